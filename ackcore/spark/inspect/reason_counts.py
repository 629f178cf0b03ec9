"""Counts of waiting and dead records, by reason and age."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from ackcore.spark.base.errors import CheckpointCorrupt, corrupt
from ackcore.spark.base.reasons import reason_parts
from ackcore.spark.base.schemas import DUE_MS, FIRST_MS, REASON, TIME
from ackcore.spark.checkpoint.waiting import Waiting
from ackcore.spark.dead_letters.letter_files import LetterFile, read_letters
from ackcore.spark.dead_letters.letter_store import Letters, files_of
from ackcore.spark.dead_letters.notes import Note, counts_by_spout, gone_rows, notes_of, sent_rows

#: The upper limits of the age classes, in milliseconds; the last class has none.
AGES_MS = (10_000, 60_000, 600_000, 3_600_000, 86_400_000, 604_800_000)


@dataclass(frozen=True, slots=True)
class ReasonCount:
    """The number of a spout's records that failed for one reason: ``component`` and ``error_type``.

    ``message``: the error message of one of them. ``oldest_ms``, ``newest_ms``: the first and the
    last time, in ms since 1970, at which one was first seen (waiting) or died (dead).
    """

    spout: str
    component: str
    error_type: str
    message: str
    records: int
    oldest_ms: int
    newest_ms: int


@dataclass(frozen=True, slots=True)
class WaitingCounts:
    """The numbers of the records that wait for a retry.

    ``untried``: the replayed dead letters among them that have not run yet. ``next_due_ms``,
    ``oldest_ms``: the time at which the first is due, and that at which the oldest was first seen,
    in ms since 1970; None if none waits. ``ages``: the records by the time since they were first
    seen: one number for each upper limit in `AGES_MS`, and one for older records. ``reasons``: the
    most frequent first.
    """

    records: int = 0
    untried: int = 0
    next_due_ms: int | None = None
    oldest_ms: int | None = None
    ages: tuple[int, ...] = (0,) * (len(AGES_MS) + 1)
    reasons: tuple[ReasonCount, ...] = ()


@dataclass(frozen=True, slots=True)
class DeadCounts:
    """The numbers of the dead letters.

    ``sent``: those of ``letters`` that were replayed. ``dropped``: the dropped ones, which
    ``letters`` lacks. ``reasons``: of the letters that were not replayed, the most frequent first.
    ``damaged``: the name and damage of each unreadable file, whose letters are not counted.
    """

    letters: int = 0
    sent: int = 0
    dropped: int = 0
    reasons: tuple[ReasonCount, ...] = ()
    damaged: tuple[str, ...] = ()


def count_waiting(waiting: Waiting, now_ms: int) -> WaitingCounts:
    """Count the waiting records. Raises CheckpointCorrupt if a table is missing or damaged."""
    ages = np.zeros(len(AGES_MS) + 1, np.int64)
    found: list[ReasonCount] = []
    for spout, segments in waiting.segments().items():
        tables = []
        for segment in segments:
            table = segment.table().select([REASON, FIRST_MS, DUE_MS])
            try:
                table.validate(full=True)  # its checksum was not looked at
            except pa.ArrowInvalid as error:
                raise corrupt(segment.cache.place(segment.file), f"is damaged: {error}") from error
            at, first_ms = table[FIRST_MS], table[FIRST_MS].to_numpy()
            ages += np.bincount(
                np.searchsorted(AGES_MS, now_ms - first_ms, "left"), minlength=len(ages)
            )
            columns = [*reason_parts(table[REASON]), pa.repeat(1, len(table)), at, at]
            tables.append(_grouped(pa.table(columns, names=_COUNTED)))
        found += _by_reason(spout, pa.concat_tables(tables))
    return WaitingCounts(
        records=waiting.rows(),
        untried=waiting.untried,
        next_due_ms=waiting.next_due_ms,
        oldest_ms=waiting.oldest_ms,
        ages=tuple(ages.tolist()),
        reasons=_sorted(found),
    )


class DeadCounter:
    """A counter of the letters of a store. It reads a file again only after a replay or a drop."""

    def __init__(self) -> None:
        self._counted: dict[tuple[object, ...], tuple[int, int, pa.Table]] = {}

    def count(self, store: Letters) -> DeadCounts:
        """Count the letters in all readable files.

        Raises CheckpointCorrupt if a note about replayed or dropped letters is damaged.
        """
        notes = notes_of(store)
        about = tuple((note.request, note.at_ms, tuple(note.rows)) for note in notes)
        counted: dict[tuple[object, ...], tuple[int, int, pa.Table]] = {}
        letters = sent = 0
        found: list[ReasonCount] = []
        damaged: list[str] = []
        for spout in store.spouts():
            tables = []
            for _, file in files_of(store, spout):
                key = (file.path, about)
                try:
                    counted[key] = self._counted.get(key) or _of_file(file, spout, notes)
                except CheckpointCorrupt as error:
                    damaged.append(str(error))
                    continue
                n, again, table = counted[key]
                letters, sent = letters + n, sent + again
                tables.append(table)
            if tables:
                found += _by_reason(spout, pa.concat_tables(tables))
        self._counted = counted
        dropped = sum(sum(counts_by_spout(note.rows).values()) for note in notes if note.dropped)
        return DeadCounts(letters, sent, dropped, _sorted(found), tuple(damaged))


def _of_file(file: LetterFile, spout: str, notes: Sequence[Note]) -> tuple[int, int, pa.Table]:
    """Return the numbers of a file's letters and of those replayed, and a table of the others:
    for each reason, the columns of `_COUNTED`.
    """
    table = read_letters(file.path, [*_REASON_COLUMNS, "last_ms"])
    rows, gone = gone_rows(file.path, spout, notes)
    times, _ = sent_rows(rows, spout, notes)
    letters, sent = int((~gone).sum()), int(((times > 0) & ~gone).sum())
    if sent or gone.any():
        table = table.filter(pa.array((times == 0) & ~gone))
    at = table["last_ms"].cast(TIME).cast(pa.int64())
    whole = pa.table(
        [*(table[name] for name in _REASON_COLUMNS), pa.repeat(1, len(table)), at, at],
        names=_COUNTED,
    )
    return letters, sent, _grouped(whole)


_REASON_COLUMNS = ["component", "error_type", "error_message"]
_COUNTED = ["component", "error_type", "text", "n", "oldest", "newest"]


def _grouped(table: pa.Table) -> pa.Table:
    """Merge rows of `_COUNTED` to one for each component and error type: counts are summed."""
    counted = table.group_by(["component", "error_type"], use_threads=False).aggregate(
        [("text", "first"), ("n", "sum"), ("oldest", "min"), ("newest", "max")]
    )
    names = ["component", "error_type", "text_first", "n_sum", "oldest_min", "newest_max"]
    return counted.select(names).rename_columns(_COUNTED)


def _by_reason(spout: str, table: pa.Table) -> Iterable[ReasonCount]:
    for row in _grouped(table).to_pylist():
        yield ReasonCount(spout, *(row[name] for name in _COUNTED))


def _sorted(found: Iterable[ReasonCount]) -> tuple[ReasonCount, ...]:
    return tuple(sorted(found, key=lambda each: (-each.records, each.spout, each.component)))
