"""The notes of a store about letters that were sent again or dropped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from ackcore._records import Int64s
from ackcore.spark.base.clocks import wall_clock_ms
from ackcore.spark.dead_letters.files import NotesChanged
from ackcore.spark.dead_letters.letter_store import Letters
from ackcore.spark.dead_letters.letters import (
    ATTEMPTS,
    BatchRows,
    Bools,
    batch_rows,
    emptied_rows,
    read_parts,
    reading_letters,
)
from ackcore.spark.dead_letters.objects import ObjectFile

#: Spans ``[start, end)`` of positions among a micro-batch's letters, by spout and micro-batch.
Spans = Mapping[str, Mapping[str, list[list[int]]]]
#: A request is made anew so often where others are faster.
_TRIES = 20

T = TypeVar("T")


class Note(NamedTuple):
    """A request to send letters again, or to drop them, as it was noted down."""

    request: str
    at_ms: int
    rows: Spans
    dropped: bool = False
    #: How many it did not take, since they had come back too often, by spout.
    left_out: Mapping[str, int] | None = None


def notes_of(store: Letters) -> list[Note]:
    """Return what was sent again or dropped, the oldest first, less what was withdrawn since.

    Raises
    ------
    CheckpointCorrupt
        If a note is damaged.
    """
    noted, withdrawn = list(store.notes()), store.withdrawn()
    found = []
    for request, record in noted:
        rows = {
            spout: batches
            for spout, batches in record["rows"].items()
            if (request, spout) not in withdrawn
        }
        dropped, left_out = record.get("dropped", False), record.get("left_out")
        found.append(Note(request, record["at_ms"], rows, dropped, left_out))
    return sorted(found, key=lambda note: (note.at_ms, note.request))


def again_if_noted(store: Letters, ask: Callable[[], T]) -> T:
    """Return what is asked, asked again where another made a note meanwhile."""
    for _ in range(_TRIES):
        try:
            return ask()
        except NotesChanged:
            store.refresh()
    return ask()


def sent_rows(rows: BatchRows, spout: str, notes: Iterable[Note]) -> tuple[Int64s, Int64s]:
    """Return of each row of a file how often it was sent again, and by which of the notes at last.

    Parameters
    ----------
    rows : BatchRows
        The file's.
    spout : str
        Of the letters in it.
    notes : iterable of Note
        The oldest first.

    Returns
    -------
    times, newest : ndarray of int64
        ``newest`` is -1 where none did.
    """
    times = np.zeros(len(rows), np.int64)
    newest = np.full(len(rows), -1)
    for n, note in enumerate(notes):
        for some in () if note.dropped else _named(note, spout, rows):
            times[some] += 1
            newest[some] = n
    return times, newest


def dropped_rows(rows: BatchRows, spout: str, notes: Iterable[Note]) -> Bools:
    """Return of each row of a file whether it was dropped; as `sent_rows` is given them."""
    dropped = np.zeros(len(rows), np.bool_)
    for note in notes:
        for some in _named(note, spout, rows) if note.dropped else ():
            dropped[some] = True
    return dropped


def gone_rows(path: ObjectFile, spout: str, notes: Sequence[Note]) -> tuple[BatchRows, Bools]:
    """Return the micro-batches of a file's letters, and which were dropped.

    A drop that came after the notes were read may have emptied some: they count as dropped, too.

    Raises
    ------
    CheckpointCorrupt
        If the file is damaged.
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
    """Yield columns of text of the letters of a file that were neither sent again nor dropped.

    They come part by part, the columns as dictionaries.

    Raises
    ------
    CheckpointCorrupt
        If the file is damaged.
    """
    starts: dict[int, int] = {}
    done = 0
    for part in read_parts(path, columns=["batch_id", ATTEMPTS, *columns], encoded=columns):
        batch_ids, here = batch_rows(path, part["batch_id"].to_numpy())
        for number, start in here.items():
            starts.setdefault(number, done + start)
        # Those of a micro-batch may begin in an earlier part.
        rows = BatchRows(batch_ids, {number: starts[number] - done for number in here})
        done += len(part)
        times, _ = sent_rows(rows, spout, notes)
        gone = dropped_rows(rows, spout, notes) | part[ATTEMPTS].is_null().to_numpy()
        yield part.select(columns).filter(pa.array((times == 0) & ~gone))


def _named(note: Note, spout: str, rows: BatchRows) -> Iterator[slice]:
    """Yield the rows of a file that a note names."""
    for number, spans in note.rows.get(spout, {}).items():
        start = rows.starts.get(int(number))
        if start is not None:
            for first, end in spans:
                yield slice(max(start + first, 0), max(start + end, 0))


def note_of(notes: Iterable[Note], request: str) -> Note | None:
    """Return what was noted of a request, None if it is new; ValueError if it dropped letters."""
    for note in notes:
        if note.request == request:
            if note.dropped:
                raise ValueError(f"request must be a new id: letters were dropped as {request!r}")
            return note
    return None


def note_time(notes: Iterable[Note]) -> int:
    """Return the time of a new note: what was sent last goes by these, and clocks are set back."""
    return max([wall_clock_ms(), *(note.at_ms + 1 for note in notes)])


def counted(rows: Spans) -> dict[str, int]:
    """Return how many letters a note names, by spout."""
    return {
        spout: sum(end - start for spans in batches.values() for start, end in spans)
        for spout, batches in rows.items()
    }


def counted_all(rows: Spans) -> int:
    """Return how many letters a note names."""
    return sum(counted(rows).values())


def places_of(chosen: Int64s, rows: BatchRows) -> dict[str, list[list[int]]]:
    """Return rows of a file as a note names them: spans by micro-batch, within its letters."""
    return {
        str(number): spans_of(of_batch - start)
        for number, start in rows.starts.items()
        if len(of_batch := chosen[rows.batch_ids[chosen] == number])
    }


def add_places(
    named: dict[str, list[list[int]]], places: Mapping[str, Sequence[list[int]]]
) -> None:
    """Add what `places_of` returned of one file to that of others: a micro-batch may have more."""
    for number, spans in places.items():
        named.setdefault(number, []).extend(spans)


def spans_of(rows: Int64s) -> list[list[int]]:
    """Sorted row numbers as ``[start, end)``."""
    cuts = np.flatnonzero(np.diff(rows) != 1) + 1
    return [[int(run[0]), int(run[-1]) + 1] for run in np.split(rows, cuts)]
