"""The application, and its output: text without control characters, JSON, and errors."""

from __future__ import annotations

import json
import logging
import re
import select
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib import import_module
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

import ackcore

OK, NO, USAGE, CHECKPOINT, FAILED, INTERRUPTED = 0, 1, 2, 3, 4, 130
EXIT_CODES = (
    "Exit codes: 0 done; 1 a negative answer (too many dead records, no such dead letter, a failed "
    "check); 2 wrong usage, or a missing package; 3 the checkpoint cannot be used; 4 the run "
    "failed; 130 interrupted."
)


def app_of(names: Iterable[str]) -> typer.Typer:
    """Return the command line with some of its commands, and load their modules."""
    app = typer.Typer(
        cls=Commands,
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        epilog=EXIT_CODES,
    )
    app.callback()(_options)
    for name in names:
        import_module(f"ackcore.cli.{name}_command").add_to(app)
    return app


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ackcore {ackcore.__version__}")
        raise typer.Exit


def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Run topologies on Spark with per-record delivery guarantees, and look at their status."""


class Commands(TyperGroup):
    """Commands whose errors are printed in one line and set the exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the requested command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except Exception as error:
            # All exceptions of Typer except Abort have an exit code.
            own = isinstance(error, typer.Abort) or hasattr(error, "exit_code")
            own = own or (isinstance(error, BrokenPipeError) and _reader_ended())
            if isinstance(error, typer.BadParameter):
                _add_value(error)
            if own or ctx.params.get("debug"):
                raise
            text, code = _told(error)
            print(f"ackcore: {plain(text)}", file=sys.stderr)
            raise typer.Exit(code) from None


def _add_value(error: typer.BadParameter) -> None:
    """Add the refused value to the error of an option if Typer has the error from pydantic."""
    problems = getattr(error.__cause__, "errors", None)
    if problems is not None:
        error.message += f", got {problems()[0]['input']!r}"


def _reader_ended() -> bool:
    """Return whether the program that reads this one's output, such as head, has ended."""
    poll = select.poll()
    with suppress(OSError):  # the output is no file
        poll.register(sys.stdout, 0)
    return bool(poll.poll(0))


def _told(error: Exception) -> tuple[str, int]:
    """Return the message of an error, and the exit code."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    text = as_commands(str(error)) or type(error).__name__
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    text, code = _text_and_code(error, kinds, text)
    return f"{text}{notes}", code


def _text_and_code(error: Exception, kinds: set[str], text: str) -> tuple[str, int]:
    if "TooManyDead" in kinds:
        return text, NO
    if kinds & {"StateError", "FileNotFoundError"}:
        return text, CHECKPOINT
    ours = type(error).__module__.partition(".")[0] == "ackcore"
    if ours or isinstance(error, ValueError | TypeError):
        return text, FAILED if ours else USAGE
    return f"{type(error).__name__}: {text.strip().splitlines()[0]}", FAILED


def _dead_list(found: re.Match[str]) -> str:
    return f"`ackcore dead list {shlex.quote(found[2])} --payload`"


#: Advice in messages: calls in Python, and the same on the command line.
_COMMANDS = (
    (r"ackcore\.spark\.dead_letters\((['\"])(.*?)\1\)", _dead_list),
    (
        r"ackcore\.spark\.replay\(\) and another run_batch\(\) send",
        "`ackcore dead replay` and another `ackcore run` send",
    ),
    (r"ackcore\.spark\.replay\(\)", "`ackcore dead replay`"),
    (r"\bstart\(\) on the same checkpoint", "`ackcore run` on the same checkpoint"),
    (r"\bmax_dead_ratio=None", "--max-dead-ratio none"),
    (r"\ba larger max_dead\b", "a larger --max-dead"),
    (r"\baccept_changes=True", "--accept-changes"),
    (r"\bdead_letters=", "--dead-letters"),
)


def as_commands(text: str) -> str:
    """Return a message that advises commands and options instead of calls and arguments."""
    for python, command in _COMMANDS:
        text = re.sub(python, command, text)
    return text


@contextmanager
def advising_commands() -> Iterator[None]:
    """A context in which log messages advise commands, too."""

    def changed(record: logging.LogRecord) -> bool:
        record.msg, record.args = as_commands(record.getMessage()), ()
        return True

    logger = logging.getLogger("ackcore")
    logger.addFilter(changed)
    try:
        yield
    finally:
        logger.removeFilter(changed)


# -- text -----------------------------------------------------------------------------------------


def plain(text: str) -> str:
    """Return a text on one line, without control characters for a terminal."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def cell(text: object) -> Text:
    """Return a record's text for a table, also without markup of rich."""
    return Text(plain(str(text)))


def table(title: str, *columns: str, right: tuple[str, ...] = ()) -> Table:
    """Return an empty table; the columns named in ``right`` hold numbers."""
    # Titles wrap at their table's width.
    made = Table(
        title=title, title_justify="left", title_style="bold", box=None, min_width=len(title) + 2
    )
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return made


def console() -> Console:
    """Return a console. Without a terminal it is 240 characters wide."""
    made = Console(highlight=False)
    if not made.is_terminal:
        made.width = 240  # a line of a path stays whole
    return made


def time_of(ms: int | None) -> str:
    """Return a time in ISO 8601, in this machine's zone."""
    if ms is None:
        return "-"
    return datetime.fromtimestamp(ms / 1000, UTC).astimezone().isoformat(" ", "seconds")


#: The units of time: seconds, and the name.
_UNITS = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def span_of(ms: float) -> str:
    """Return a duration as text."""
    if abs(ms) < 1000:
        return f"{ms:.0f} ms"
    if abs(ms) < 60_000:
        return f"{ms / 1000:.1f} s"
    seconds = int(abs(ms) // 1000)
    parts = []
    for size, name in _UNITS:
        if seconds >= size:
            parts.append(f"{seconds // size} {name}")
            seconds %= size
    return ("-" if ms < 0 else "") + " ".join(parts[:2])


def print_json(value: Mapping[str, Any]) -> None:
    """Print one JSON object on one line."""
    print(json.dumps(value, ensure_ascii=False, separators=(", ", ": ")))
