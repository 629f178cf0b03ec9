"""The notes of a store: which of its letters were sent again, or dropped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from ackcore._records import Int64s
from ackcore.spark.base.clocks import wall_clock_ms
from ackcore.spark.dead_letters.letter_files import (
    ATTEMPTS,
    BatchRows,
    Bools,
    NotesChanged,
    ObjectFile,
    batch_rows,
    emptied_rows,
    read_parts,
    reading_letters,
)
from ackcore.spark.dead_letters.letter_store import Letters

#: Spans ``[start, end)`` of positions among a micro-batch's letters, by spout and micro-batch.
Spans = Mapping[str, Mapping[str, list[list[int]]]]
#: Attempts to add a note while other processes add theirs.
_TRIES = 20

T = TypeVar("T")


class Note(NamedTuple):
    """The recorded note of a request that sends letters again or drops them.

    ``at_ms``: the time of the request, in ms since 1970. ``rows``: the positions of the letters.
    """

    request: str
    at_ms: int
    rows: Spans
    dropped: bool = False  # whether the request drops the letters
    #: Number of letters left out because they were replayed too often, by spout.
    left_out: Mapping[str, int] | None = None


def notes_of(store: Letters) -> list[Note]:
    """Return the notes of a store, the oldest first, without the letters of withdrawn requests.

    Raises CheckpointCorrupt if a note is damaged.
    """
    noted, withdrawn = list(store.notes()), store.withdrawn()
    found = []
    for request, record in noted:
        rows = {
            spout: batches
            for spout, batches in record["rows"].items()
            if (request, spout) not in withdrawn
        }
        found.append(Note(**{**record, "rows": rows}))
    return sorted(found, key=lambda note: (note.at_ms, note.request))


def again_if_noted(store: Letters, ask: Callable[[], T]) -> T:
    """Return the result of ``ask``, called again with a new index after `NotesChanged`.

    Raises NotesChanged if each of 21 calls raises it.
    """
    for _ in range(_TRIES):
        try:
            return ask()
        except NotesChanged:
            store.refresh()
    return ask()


def sent_rows(rows: BatchRows, spout: str, notes: Iterable[Note]) -> tuple[Int64s, Int64s]:
    """Return for each row of a file how often it was sent again, and the note of the last time.

    A note is returned as its index in ``notes``, which are sorted by time. The index is -1 if the
    letter was not sent again.
    """
    times = np.zeros(len(rows), np.int64)
    newest = np.full(len(rows), -1)
    for n, note in enumerate(notes):
        for some in () if note.dropped else _named(note, spout, rows):
            times[some] += 1
            newest[some] = n
    return times, newest


def dropped_rows(rows: BatchRows, spout: str, notes: Iterable[Note]) -> Bools:
    """Return for each row of a file whether one of the notes drops its letter."""
    dropped = np.zeros(len(rows), np.bool_)
    for note in notes:
        for some in _named(note, spout, rows) if note.dropped else ():
            dropped[some] = True
    return dropped


def gone_rows(path: ObjectFile, spout: str, notes: Sequence[Note]) -> tuple[BatchRows, Bools]:
    """Return the micro-batches of a file's letters, and for each letter whether it was dropped.

    Letters count as dropped also if a drop emptied them after the notes were read. Raises
    CheckpointCorrupt if the file is damaged.
    """
    with reading_letters(path) as file:
        batch_ids = file.read(["batch_id"])["batch_id"].to_numpy()
        emptied = emptied_rows(file)
    rows = batch_rows(path, batch_ids)
    gone = dropped_rows(rows, spout, notes)
    return rows, gone if emptied is None else gone | emptied


def letters_left(
    path: ObjectFile, spout: str, notes: Sequence[Note], columns: Sequence[str]
) -> Iterator[pa.Table]:
    """Yield text columns of a file's letters that were neither sent again nor dropped.

    The tables come part by part, with dictionary-encoded columns. Raises CheckpointCorrupt if the
    file is damaged.
    """
    starts: dict[int, int] = {}
    done = 0
    for part in read_parts(path, columns=["batch_id", ATTEMPTS, *columns], encoded=columns):
        batch_ids, here = batch_rows(path, part["batch_id"].to_numpy())
        for number, start in here.items():
            starts.setdefault(number, done + start)
        # A micro-batch's letters may begin in an earlier part.
        rows = BatchRows(batch_ids, {number: starts[number] - done for number in here})
        done += len(part)
        times, _ = sent_rows(rows, spout, notes)
        gone = dropped_rows(rows, spout, notes) | part[ATTEMPTS].is_null().to_numpy()
        yield part.select(columns).filter(pa.array((times == 0) & ~gone))


def _named(note: Note, spout: str, rows: BatchRows) -> Iterator[slice]:
    """Yield the ranges of a file's rows that a note names."""
    for number, spans in note.rows.get(spout, {}).items():
        start = rows.starts.get(int(number))
        if start is not None:
            low, high = np.searchsorted(rows.batch_ids, [int(number), int(number) + 1]).tolist()
            for span in spans:
                yield slice(*(min(max(start + place, low), high) for place in span))


def note_time(notes: Iterable[Note]) -> int:
    """Return the time of a new note in ms since 1970, later than that of each existing note."""
    return max([wall_clock_ms(), *(note.at_ms + 1 for note in notes)])


def counts_by_spout(rows: Spans) -> dict[str, int]:
    """Return, by spout, the number of letters that the spans cover."""
    return {
        spout: sum(end - start for spans in batches.values() for start, end in spans)
        for spout, batches in rows.items()
    }


def add_places(named: dict[str, list[list[int]]], chosen: Int64s, rows: BatchRows) -> None:
    """Add the positions of a file's letters to spans by micro-batch, as a `Note` has them.

    ``named``: the spans so far, which this extends. ``chosen``: the sorted rows of the letters.
    ``rows``: the micro-batches of all rows.
    """
    cuts = np.flatnonzero((np.diff(chosen) != 1) | (np.diff(rows.batch_ids[chosen]) != 0)) + 1
    for run in np.split(chosen, cuts) if len(chosen) else ():
        number = int(rows.batch_ids[run[0]])
        spans = named.setdefault(str(number), [])
        spans.append([int(row) - rows.starts[number] for row in (run[0], run[-1] + 1)])
