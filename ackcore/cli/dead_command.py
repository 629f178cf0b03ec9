"""``ackcore dead``: list, show, replay and drop the dead letters of a checkpoint."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from typing import Annotated, Any

import typer

from ackcore._arrow.shown import base64_of, readable
from ackcore._error_hints import counted
from ackcore.cli.reporting import CHECKPOINT, NO, cell, console, plain, print_json, table, time_of
from ackcore.spark.base.errors import CheckpointCorrupt
from ackcore.spark.dead_letters.checkpoints import check_spout, store_of
from ackcore.spark.dead_letters.drop import drop
from ackcore.spark.dead_letters.letter_store import Letters
from ackcore.spark.dead_letters.listing import (
    Letter,
    LetterFilter,
    LetterId,
    count_letters,
    list_letters,
    none_found,
)
from ackcore.spark.dead_letters.replay import Replay, replay

Place = Annotated[
    str, typer.Argument(metavar="CHECKPOINT", help="The checkpoint, or its store of dead letters.")
]
_TIME = "2026-11-23T10:00, or 30min, 2h or 7d ago"
# The options that choose letters.
Spout = Annotated[str | None, typer.Option(help="Only letters of this spout.")]
Component = Annotated[
    str | None, typer.Option(help="Only letters that this bolt, spout or sink failed.")
]
ErrorType = Annotated[
    str | None, typer.Option(help="Only letters with this error type, such as ValueError.")
]
Message = Annotated[
    str | None, typer.Option(help="Only letters with this text in the error message.")
]
Since = Annotated[str | None, typer.Option(metavar="TIME", help=f"Only since a time: {_TIME}.")]
Until = Annotated[str | None, typer.Option(metavar="TIME", help=f"Only before a time: {_TIME}.")]
Sent = Annotated[
    bool | None,
    typer.Option("--sent/--not-sent", help="Only letters that were replayed, or only others."),
]
Named = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[LETTER...]", help="Names of letters, as `ackcore dead list` shows them."
    ),
]
All = Annotated[bool, typer.Option("--all", help="All letters, if you give no name and no filter.")]
Json = Annotated[
    bool, typer.Option("--json", help="Print JSON, one object per line; bytes are in base64.")
]

_AGO = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d|w)")
_SECONDS = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def add_to(app: typer.Typer) -> None:
    """Add ``ackcore dead`` with its commands to the app."""
    letters = typer.Typer(no_args_is_help=True, help="The dead letters.")
    letters.command("list")(listed)
    letters.command()(show)
    letters.command("replay")(replayed)
    letters.command("drop")(dropped)
    app.add_typer(letters, name="dead")


def listed(
    checkpoint: Place,
    spout: Spout = None,
    component: Component = None,
    error: ErrorType = None,
    message: Message = None,
    since: Since = None,
    until: Until = None,
    sent: Sent = None,
    limit: Annotated[
        int, typer.Option(min=0, help="The largest number of letters; 0 for all.")
    ] = 50,
    payload: Annotated[bool, typer.Option("--payload", help="Show the records too.")] = False,
    as_json: Json = False,
) -> None:
    """List dead letters, newest first.

    Replays before: the number of replays of the record before it died (JSON: replays). Replays
    since: the number of replays of this letter (JSON: sent). Exits with 3 if a file cannot be read,
    after a list of the letters in the other files.
    """
    wanted = _filter(None, spout, component, error, message, since, until, sent)
    store = store_of(checkpoint)
    check_spout(store, wanted.spout)
    damaged: list[CheckpointCorrupt] = []
    binary = base64_of if as_json else readable
    found = list_letters(
        store, wanted, limit or None, payload=payload, damaged=damaged, binary=binary
    )
    if as_json:
        for letter in found:
            print_json(_to_json(letter))
    else:
        _print(found, store, wanted, limit, payload)
    for each in damaged:
        typer.echo(f"ackcore: {plain(str(each))}", err=True)
    if damaged:
        raise typer.Exit(CHECKPOINT)


def _print(
    letters: Iterable[Letter], store: Letters, wanted: LetterFilter, limit: int, payload: bool
) -> None:
    numbers = ("attempts", "replays before", "replays since")
    columns = ("letter", "died", "component", "error", *numbers, "message")
    shown = table("dead letters", *columns, *(["record"] if payload else []), right=numbers)
    rows = 0
    for letter in letters:
        rows += 1
        record = [cell(letter.payload)] if payload else []
        shown.add_row(
            cell(letter.id),
            time_of(letter.last_ms),
            cell(letter.component),
            cell(letter.error_type),
            str(letter.attempts),
            str(letter.replays or "-"),
            str(letter.sent or "-"),
            cell(letter.error_message[:200]),
            *record,
        )
    if not rows:
        typer.echo(plain(none_found(store)))
        return
    console().print(shown)
    if limit and rows == limit and (many := count_letters(store, wanted)) > limit:
        console().print(f"the newest {limit} of {many:,}; --limit shows more")


def _many(n: int, one: str, several: str) -> str:
    return counted(n, f"dead letter {one}", f"dead letters {several}")


def show(
    checkpoint: Place,
    letter: Annotated[
        str,
        typer.Argument(
            metavar="LETTER", help="The letter's name, as `ackcore dead list` shows it."
        ),
    ],
    as_json: Json = False,
) -> None:
    """Show one dead letter with its record. Exits with 1 if no letter has that name."""
    wanted = LetterFilter(_ids([letter]))
    damaged: list[CheckpointCorrupt] = []
    binary = base64_of if as_json else readable
    letters = list_letters(
        store_of(checkpoint), wanted, 1, payload=True, damaged=damaged, binary=binary
    )
    found = next(letters, None)
    if found is None:
        if damaged:  # the letter may be in a damaged file
            raise damaged[0]
        typer.echo(f"ackcore: the checkpoint has no dead letter {plain(letter)}", err=True)
        raise typer.Exit(NO)
    if as_json:
        print_json(_to_json(found))
        return
    for name, value in _to_json(found).items():
        if name == "record":
            value = json.dumps(value, ensure_ascii=False, indent=2)
            lines = value.splitlines()
        else:
            value = time_of(value) if name.endswith("_ms") else value
            lines = str("-" if value is None else value).splitlines() or [""]
        for at, line in enumerate(lines):
            typer.echo(f"{'' if at else name.removesuffix('_ms'):<14}{plain(line)}")


def replayed(
    checkpoint: Place,
    letters: Named = None,
    spout: Spout = None,
    component: Component = None,
    error: ErrorType = None,
    message: Message = None,
    since: Since = None,
    until: Until = None,
    all_of_them: All = False,
    again: Annotated[
        bool, typer.Option("--again", help="Also letters that were replayed before.")
    ] = False,
    max_replays: Annotated[
        int,
        typer.Option(min=0, help="Skip records with this many replays or more; 0 for no limit."),
    ] = 20,
    request: Annotated[
        str | None,
        typer.Option(help="An id of your choice. A second replay with this id does nothing."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print the number of letters to replay.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Send dead letters through their topology again, in the running query or at its next start.

    Exits with 1 if you name letters and none of them is sent.
    """
    wanted = _filter(letters, spout, component, error, message, since, until)
    _refuse_all(wanted, all_of_them)
    corrupt = 0 if as_json else _corrupt(checkpoint, wanted, again)
    done = replay(
        checkpoint,
        where=wanted,
        spout=wanted.spout,
        again=again,
        max_replays=max_replays or None,
        request=request,
        dry_run=dry_run,
    )
    if as_json:
        told = {"request": done.request, "records": done.records}
        print_json({**told, "left_out": dict(done.left_out), "dry_run": dry_run})
    else:
        _tell(done, checkpoint, wanted, max_replays, dry_run)
        if corrupt and done.records:
            typer.echo(
                f"{corrupt:,} of those that match cannot be read (CorruptRecord) and die again: "
                "put corrected lines into a new file"
            )
    if letters and not done.records:
        raise typer.Exit(NO)


def _corrupt(checkpoint: str, wanted: LetterFilter, again: bool) -> int:
    """Return the number of letters to replay whose record is a line that cannot be parsed."""
    if wanted.error_type not in (None, "CorruptRecord"):
        return 0
    lines = replace(wanted, error_type="CorruptRecord", sent=None if again else False)
    return count_letters(store_of(checkpoint), lines)


def _tell(
    done: Replay, checkpoint: str, wanted: LetterFilter, max_replays: int, dry_run: bool
) -> None:
    many, often = sum(done.records.values()), sum(done.left_out.values())
    of = ", ".join(f"{n:,} of {plain(name)}" for name, n in done.records.items())
    if often:
        skipped = _many(often, "is", "are")
        typer.echo(f"{skipped} skipped: replayed {counted(max_replays, 'time')} or more")
    if not many:
        if not often:
            typer.echo(_none_sent(store_of(checkpoint), wanted))
    elif dry_run:
        typer.echo(f"{_many(many, 'would be', 'would be')} sent: {of}")
    else:
        typer.echo(f"{_many(many, 'is', 'are')} sent again ({of}), request {done.request}")


def _none_sent(store: Letters, wanted: LetterFilter) -> str:
    """Return a line with the reason why no letter was sent.

    Either none matches, or those that match were sent before or have no record.
    """
    found = count_letters(store, wanted)
    if not found:
        return plain(none_found(store))
    sent = count_letters(store, replace(wanted, sent=True))
    told = [f"{sent:,} were sent before (--again sends them once more)"] if sent else []
    if found > sent:
        told.append(f"{found - sent:,} have no record, because their offsets were not read")
    return f"no dead letter is sent: of those that match, {', '.join(told)}"


def dropped(
    checkpoint: Place,
    letters: Named = None,
    spout: Spout = None,
    component: Component = None,
    error: ErrorType = None,
    message: Message = None,
    since: Since = None,
    until: Until = None,
    sent: Sent = None,
    all_of_them: All = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print the number of letters to drop.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Delete dead letters for good. They are no longer shown, counted or sent.

    Exits with 1 if you name letters and none of them exists.
    """
    wanted = _filter(letters, spout, component, error, message, since, until, sent)
    _refuse_all(wanted, all_of_them)
    done = drop(checkpoint, wanted, dry_run=dry_run)
    if as_json:
        print_json({"request": done.request, "records": done.records, "dry_run": dry_run})
    else:
        many = sum(done.records.values())
        was, were = ("would be", "would be") if dry_run else ("was", "were")
        typer.echo(f"{_many(many, was, were)} dropped")
    if letters and not done.records:
        raise typer.Exit(NO)


def _ids(texts: Sequence[str]) -> tuple[LetterId, ...]:
    try:
        return tuple(LetterId.of(text) for text in texts)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _filter(
    ids: Sequence[str] | None,
    spout: str | None,
    component: str | None,
    error: str | None,
    message: str | None,
    since: str | None,
    until: str | None,
    sent: bool | None = None,
) -> LetterFilter:
    texts = {"component": component, "error": error, "message": message}
    for name, text in texts.items():
        if text is not None and not text.strip():  # for example from an unset shell variable
            raise typer.BadParameter(
                f"--{name} must not be blank, got {text!r}; omit it to match all"
            )
    since_ms, until_ms = (None if text is None else time_in(text) for text in (since, until))
    found = _ids(ids) if ids else None
    return LetterFilter(found, spout, component, error, message, since_ms, until_ms, sent)


def _refuse_all(wanted: LetterFilter, all_of_them: bool) -> None:
    if wanted == LetterFilter() and not all_of_them:
        raise typer.BadParameter(
            "no dead letter was chosen: give names that `ackcore dead list` shows, a filter such "
            "as --component or --error, or --all"
        )


def time_in(text: str) -> int:
    """Return a time of --since or --until in milliseconds since 1970.

    The text is in ISO 8601, by default in this machine's zone, or a span before now, such as
    ``2h``. Raises typer.BadParameter if it is neither.
    """
    ago = _AGO.fullmatch(text.removesuffix("ago").strip())
    try:
        if ago is not None:
            return int((time.time() - float(ago[1]) * _SECONDS[ago[2]]) * 1000)
        return int(datetime.fromisoformat(text).timestamp() * 1000)
    except (ValueError, OverflowError):
        raise typer.BadParameter(
            f"--since and --until must be a time such as {_TIME}, got {plain(text)!r}"
        ) from None


def _to_json(letter: Letter) -> dict[str, Any]:
    told = asdict(letter)
    del told["id"], told["payload"]
    told = {
        "letter": str(letter.id),
        "spout": letter.id.spout,
        "batch_id": letter.id.batch_id,
        **told,
    }
    if letter.payload is not None:
        told["record"] = json.loads(letter.payload)
    return told
