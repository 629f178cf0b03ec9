"""``ackcore status CHECKPOINT``: show the status of a query, whether it runs or not."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from ackcore.cli.reporting import CHECKPOINT, NO, cell, console, print_json, span_of, table, time_of
from ackcore.spark.inspect.reason_counts import AGES_MS, DeadCounter, ReasonCount
from ackcore.spark.inspect.status import CheckpointStatus, Logged, read_status

#: The maximum number of reasons to show.
_REASONS = 8


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(status)


def status(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="The directory or URL of the checkpoint.")
    ],
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
    """Return the printed form of a status."""
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
        runs = f"{'running' if holder.holds else 'not running'}, owner {holder.name}"
    epoch = f" (epoch {status.epoch})" if status.epoch else ""
    lines = [f"{status.checkpoint}: a {status.kind}, {runs}{epoch}"]
    under_way = status.under_way
    if under_way is not None:
        since = span_of(status.at_ms - under_way.planned_ms)
        step, then = ("is decided, the sinks write it" if under_way.decided else "runs"), ""
        if holder is None or holder.holds is False:
            step, then = "was not finished", "; the next start continues it"
        again = f", {under_way.due} retries" if under_way.due else ""
        crashes = f", {under_way.crashes} runs crashed" if under_way.crashes else ""
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
        lines.append(f"lag: {lag} offsets")
    declared = status.structure.get("tables", {})
    for name, size in status.tables.items():
        # Rows that have expired may still count.
        bound = "" if declared.get(name, {}).get("ttl_s") is None else "at most "
        lines.append(f"table {name}: {bound}{size['rows']:,} rows, {size['bytes']:,} bytes")
    dead = status.dead
    if dead.letters:
        lines.append(f"dead letters: {dead.letters:,}, of which {dead.sent:,} were replayed")
    if dead.dropped:
        lines.append(f"dead letters dropped: {dead.dropped:,}")
    lines += [f"dead letters NOT COUNTED: {what}" for what in dead.damaged]
    return cell_lines(lines)


def cell_lines(lines: Iterable[str]) -> Text:
    """Return lines without control characters for a terminal."""
    return Text("\n").join(cell(line) for line in lines)


def _counts(status: CheckpointStatus) -> RenderableType:
    names = ("records", "replayed", "acked", "waiting", "dead", "retried", "resolved")
    counts = status.counts
    title = f"counts after {counts.batches:,} micro-batches" + (
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
    next_due = "" if due is None else f", the next is due {_until(due - status.at_ms)}"
    found = table(f"waiting: {waiting.records:,}{next_due}", "known for", *labels, right=(*labels,))
    found.add_row("records", *(f"{n:,}" if n else "-" for n in waiting.ages))
    return found


def _until(ms: int) -> str:
    return "now" if ms <= 0 else f"in {span_of(ms)}"


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
