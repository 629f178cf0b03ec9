"""The application, and its output: text without control characters, JSON, and errors."""

from __future__ import annotations

import json
import select
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib import import_module
from typing import Annotated, Any, Literal

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


def app_of(modules: Iterable[str]) -> typer.Typer:
    """Return the command line with the commands of some modules of `ackcore.cli`; import them."""
    app = typer.Typer(
        cls=Commands,
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        epilog=EXIT_CODES,
    )
    app.callback()(_options)
    for module in modules:
        import_module(f"ackcore.cli.{module}").add_to(app)
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
    """A group of commands that prints an error on one line, or with --debug its traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command of the parsed arguments, which the context ``ctx`` has."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except Exception as error:
            # All exceptions of Typer except Abort have an exit code.
            own = isinstance(error, typer.Abort) or hasattr(error, "exit_code")
            own = own or (isinstance(error, BrokenPipeError) and _reader_ended())
            if isinstance(error, typer.BadParameter):
                # An error of pydantic lacks the refused value.
                problems = getattr(error.__cause__, "errors", None)
                if problems is not None:
                    error.message += f", got {problems()[0]['input']!r}"
            if own or ctx.params.get("debug"):
                raise
            text, code = _told(error)
            print(f"ackcore: {plain(text)}", file=sys.stderr)
            raise typer.Exit(code) from None


def _reader_ended() -> bool:
    """Return whether the program that reads this output, such as head, has ended."""
    poll = select.poll()
    with suppress(OSError):  # the output is no file
        poll.register(sys.stdout, 0)
    return bool(poll.poll(0))


def _told(error: Exception) -> tuple[str, int]:
    """Return the message of an error with its notes, and the exit code for its class."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    ours = type(error).__module__.partition(".")[0] == "ackcore"
    text = str(error).strip() or type(error).__name__
    notes = getattr(error, "__notes__", ())
    code = FAILED
    if "TooManyDead" in kinds:
        code = NO
    elif notes:
        pass  # added by `raised_by`: the error is of the user's own module or function
    elif kinds & {"StateError", "FileNotFoundError"}:
        code = CHECKPOINT
    elif isinstance(error, ValueError | TypeError) and not ours:
        code = USAGE
    if code == FAILED and not ours:
        text = f"{type(error).__name__}: {text.splitlines()[0]}"
    return text + "".join(f" ({note})" for note in notes), code


# -- text -----------------------------------------------------------------------------------------


def plain(text: str) -> str:
    """Return a text on one line, with escape sequences in place of control characters."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def cell(text: object) -> Text:
    """Return a value's `plain` text for a table, in which rich finds no markup."""
    return Text(plain(str(text)))


def table(title: str, *columns: str, right: tuple[str, ...] = ()) -> Table:
    """Return an empty table with these columns; those in ``right`` are aligned to the right.

    Title and columns may have names from users, in which rich must find no markup.
    """
    # Titles wrap at their table's width.
    made = Table(
        title=Text(plain(title), "bold"),  # rich ignores title_style for a Text
        title_justify="left",
        box=None,
        min_width=len(title) + 2,
    )
    for column in columns:
        justify: Literal["left", "right"] = "right" if column in right else "left"
        made.add_column(cell(column), justify=justify, overflow="fold")
    return made


def console() -> Console:
    """Return a console for the output. Without a terminal it is 240 characters wide."""
    made = Console(highlight=False)
    if not made.is_terminal:
        made.width = 240  # a line of a path stays whole
    return made


def time_of(ms: int | None) -> str:
    """Return milliseconds since 1970 in ISO 8601, in this machine's zone; "-" for None."""
    if ms is None:
        return "-"
    return datetime.fromtimestamp(ms / 1000, UTC).astimezone().isoformat(" ", "seconds")


#: The units of time: seconds, and the name.
_UNITS = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def span_of(ms: float) -> str:
    """Return a duration in milliseconds as text, such as 5.2 s or 2 h 10 min."""
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
