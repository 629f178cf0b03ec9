"""``ackcore status``, ``table`` and ``skip``, for a checkpoint whose query runs or not."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Annotated

import pyarrow as pa
import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from ackcore._arrow.shown import shown_rows, shown_values
from ackcore._error_hints import counted
from ackcore.cli.reporting import (
    CHECKPOINT,
    NO,
    cell,
    console,
    plain,
    print_json,
    span_of,
    table,
    time_of,
)
from ackcore.spark.checkpoint.skips import skip_planned
from ackcore.spark.dead_letters.listing import encoder_of
from ackcore.spark.inspect.reason_counts import AGES_MS, DeadCounter, ReasonCount
from ackcore.spark.inspect.status import CheckpointStatus, Logged, read_status
from ackcore.spark.inspect.table_reading import first_rows, read_table, rows_of_key

Place = Annotated[
    str, typer.Argument(metavar="CHECKPOINT", help="The directory or URL of the checkpoint.")
]

#: The maximum number of reasons to show.
_REASONS = 8


def add_to(app: typer.Typer) -> None:
    """Add ``ackcore status``, ``table`` and ``skip`` to the app."""
    app.command()(status)
    tables = typer.Typer(no_args_is_help=True, help="The tables of a query.")
    tables.callback()(lambda: None)
    tables.command("show")(show_rows)
    app.add_typer(tables, name="table")
    app.command()(skip)


def status(
    checkpoint: Place,
    batches: Annotated[int, typer.Option(min=0, help="The number of micro-batches to show.")] = 5,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every second.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; with --watch, one per line.")
    ] = False,
) -> None:
    """Show counts, waiting records, the last micro-batches, lag and dead letters of a query.

    Exits with 1 if the counts do not balance, else with 3 if a file of dead letters cannot be read.
    """
    dead = DeadCounter()

    def look() -> CheckpointStatus:
        return read_status(checkpoint, batches=batches, dead=dead)

    shown = look()
    if as_json:
        print_json(shown.to_json())
        while watch:
            sys.stdout.flush()  # the reader may be behind a pipe
            time.sleep(1)
            print_json(look().to_json())
    elif watch:
        with Live(rendered(shown), console=console(), screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(1)
                live.update(rendered(look()), refresh=True)
    else:
        console().print(rendered(shown))
    if not shown.counts.balanced:
        raise typer.Exit(NO)
    if shown.dead.damaged:
        raise typer.Exit(CHECKPOINT)


def rendered(status: CheckpointStatus) -> RenderableType:
    """Return a status as text and tables for the console."""
    parts: list[RenderableType] = [_heading(status), ""]
    parts += [_counts(status), ""]
    if status.waiting.records:
        parts += [_waiting(status), ""]
        parts += [_reasons("waiting because of", status.waiting.reasons, "oldest"), ""]
    if status.batches:
        parts += [_batches(status.batches), ""]
    if status.dead.letters:
        parts += [
            _reasons("dead and not replayed, because of", status.dead.reasons, "first died"),
            "",
        ]
    return Group(*parts[:-1])


def _heading(status: CheckpointStatus) -> Text:
    holder = status.holder
    if holder is None:
        runs = "never started"
    elif holder.holds is None:
        runs = f"last owner {holder.name}; this host cannot check whether it runs"
    else:
        runs = f"{'running,' if holder.holds else 'not running, last'} owner {holder.name}"
    epoch = f" (epoch {status.epoch})" if status.epoch else ""
    lines = [f"{status.checkpoint}: a {status.kind}, {runs}{epoch}"]
    under_way = status.under_way
    if under_way is not None:
        since = span_of(status.at_ms - under_way.planned_ms)
        step, then = ("is decided, the sinks write it" if under_way.decided else "runs"), ""
        if holder is None or holder.holds is False:
            step, then = "was not finished", "; the next start continues it"
        again = f", {counted(under_way.due, 'retry', 'retries')}" if under_way.due else ""
        crashes = f", {counted(under_way.crashes, 'run')} crashed" if under_way.crashes else ""
        lines.append(
            f"micro-batch {under_way.number} {step}, planned {since} ago{again}{crashes}{then}"
        )
    if status.requests:
        lines.append(f"replays that wait for a micro-batch: {status.requests}")
    for skip in status.skips:
        lines.append(
            f"left out of micro-batch {skip.batch_id}, spout {skip.spout}, at "
            f"{time_of(skip.at_ms)}: {skip.rows}"
        )
    if status.lag:
        lag = ", ".join(f"{spout} {offsets:,}" for spout, offsets in status.lag.items())
        lines.append(f"lag in offsets: {lag}")
    declared = status.structure.get("tables", {})
    for name, size in status.tables.items():
        # Rows that have expired may still count.
        bound = "" if declared.get(name, {}).get("ttl_s") is None else "at most "
        lines.append(
            f"table {name}: {bound}{counted(size['rows'], 'row')}, {size['bytes']:,} bytes"
        )
    dead = status.dead
    if dead.letters:
        lines.append(f"dead letters: {dead.letters:,}, of which {dead.sent:,} were replayed")
    if dead.dropped:
        lines.append(f"dead letters dropped: {dead.dropped:,}")
    lines += [f"dead letters NOT COUNTED: {what}" for what in dead.damaged]
    return Text("\n").join(cell(line) for line in lines)


def _counts(status: CheckpointStatus) -> RenderableType:
    names = ("records", "replayed", "acked", "waiting", "dead", "retried", "resolved")
    counts = status.counts
    title = f"counts after {counted(counts.batches, 'micro-batch', 'micro-batches')}" + (
        "" if counts.balanced else ": THEY DO NOT BALANCE"
    )
    title += "".join(f"; {bolt} spent {cost:g}" for bolt, cost in sorted(counts.spent.items()))
    found = table(title, "spout", *names, right=names)
    for spout, account in sorted(counts.spouts.items()):
        found.add_row(cell(spout), *(f"{getattr(account, name):,}" for name in names))
    if len(counts.spouts) > 1:
        found.add_row("all", *(f"{getattr(counts, name):,}" for name in names))
    return found


def _waiting(status: CheckpointStatus) -> RenderableType:
    waiting = status.waiting
    labels = [f"< {span_of(age)}" for age in AGES_MS] + [f"> {span_of(AGES_MS[-1])}"]
    due = waiting.next_due_ms
    next_due = ""
    if due is not None:
        left = due - status.at_ms
        next_due = f", the next is due {'now' if left <= 0 else f'in {span_of(left)}'}"
    found = table(f"waiting: {waiting.records:,}{next_due}", "known for", *labels, right=(*labels,))
    found.add_row("records", *(f"{n:,}" if n else "-" for n in waiting.ages))
    return found


def _reasons(title: str, reasons: Sequence[ReasonCount], oldest: str) -> RenderableType:
    found = table(
        title, "spout", "component", "error", "records", oldest, "for example", right=("records",)
    )
    for each in reasons[:_REASONS]:
        found.add_row(
            cell(each.spout),
            cell(each.component),
            cell(each.error_type),
            f"{each.records:,}",
            time_of(each.oldest_ms),
            cell(each.message[:120]),
        )
    left = reasons[_REASONS:]
    if left:
        many = sum(each.records for each in left)
        found.add_row(f"{len(left)} more", "", "", f"{many:,}", "", "")
    return found


def _batches(batches: Sequence[Logged]) -> RenderableType:
    columns = ["records", "acked", "failed", "again", "dead", "took", "records/s", "p50", "p99"]
    more = {
        "put off": [each.progress.uncounted for each in batches],
        "duplicates": [each.progress.duplicates for each in batches],
        "unmet expectations": [sum(n for *_, n in each.progress.unmet()) for each in batches],
    }
    more = {name: numbers for name, numbers in more.items() if any(numbers)}
    columns[5:5] = more
    found = table(
        "the last micro-batches",
        "number",
        "done at",
        *columns,
        "of which",
        right=("number", *columns),
    )
    for at, each in enumerate(batches):
        progress = each.progress
        steps = sorted(progress.steps_s.items(), key=lambda step: -step[1])[:3]
        found.add_row(
            str(progress.batch_id),
            time_of(each.at_ms),
            f"{progress.records:,}",
            f"{progress.acked:,}",
            f"{progress.failed - progress.uncounted:,}",
            f"{progress.retried + progress.replayed:,}",
            f"{progress.dead:,}",
            *(f"{numbers[at]:,}" for numbers in more.values()),
            span_of(1000 * progress.duration_s),
            f"{progress.records_per_s:,.0f}",
            span_of(1000 * progress.latency_s.p50) if progress.acked else "-",
            span_of(1000 * progress.latency_s.p99) if progress.acked else "-",
            ", ".join(f"{name} {span_of(1000 * seconds)}" for name, seconds in steps),
        )
    return found


# -- tables, and planned rows ---------------------------------------------------------------------


def show_rows(
    checkpoint: Place,
    name: Annotated[str, typer.Argument(metavar="TABLE", help="The name of the table.")],
    key: Annotated[
        list[str] | None,
        typer.Option(
            help="Only the row of this key: once for each key column, in order, as the table shows "
            "the values. \\N is NULL. A time has its zone if the column has one: "
            "'2026-01-01 09:00:00+00:00'."
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="The maximum number of rows.")] = 20,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, one object per line.")
    ] = False,
) -> None:
    """Show rows of a table as they are after the last finished micro-batch.

    Exits with 1 if there is no row of the key.
    """
    found, rows = read_table(
        checkpoint, name, lambda it: (it, rows_of_key(it, key) if key else first_rows(it, limit))
    )
    if as_json:
        for line in _json_lines(rows):
            print(line)
    else:
        title = f"table {name}: {counted(len(rows), 'row')}"
        if not key and len(rows) == limit < found.rows:
            bound = "" if found.shape.ttl_s is None else "at most "
            title += f" of {bound}{found.rows:,}; --limit shows more"
        shown = table(title, *rows.column_names)
        for row in shown_rows(rows):
            shown.add_row(*(cell(_text(value)) for value in row.values()))
        console().print(shown)
    if key and not len(rows):
        raise typer.Exit(NO)


def _text(value: object) -> object:
    """Return bytes, such as the ids of ``dedup``, as text, and other values as they are."""
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else value


def _json_lines(rows: pa.Table) -> Iterator[str]:
    columns = [map(encoder_of(column.type), shown_values(column)) for column in rows.columns]
    names = [json.dumps(name, ensure_ascii=False) for name in rows.column_names]
    for row in zip(*columns, strict=True):
        pairs = (f"{name}: {text}" for name, text in zip(names, row, strict=True))
        yield f"{{{', '.join(pairs)}}}"


def skip(
    checkpoint: Place,
    spout: Annotated[str, typer.Argument(metavar="SPOUT", help="The name of the spout.")],
    file: Annotated[
        list[str] | None,
        typer.Option(help="Only the rows of this file; may be given several times."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print the rows that would be left out.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Leave out a spout's planned rows, after its source has lost some of them.

    All rows that the undecided micro-batch has for the spout are left out, also readable ones; with
    --file only those of these files. Stop the query first. Its next start continues without the
    rows, which do not become dead letters.
    """
    done = skip_planned(checkpoint, spout, file or None, dry_run=dry_run)
    if as_json:
        print_json({**asdict(done), "dry_run": dry_run})
        return
    will = "would be left out" if dry_run else "left out"
    typer.echo(plain(f"{will} of micro-batch {done.batch_id}, spout {done.spout}: {done.rows}"))
