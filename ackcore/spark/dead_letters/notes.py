"""What was sent again: the notes of a store, and which letters they name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ackcore._records import Int64s
from ackcore.spark.base.checksummed import read_record
from ackcore.spark.base.errors import StateError
from ackcore.spark.checkpoint import replays
from ackcore.spark.dead_letters.letters import starts_of
from ackcore.spark.dead_letters.store_of_checkpoint import checkpoint_of

NOTES = ".replayed"
#: Spans ``[start, end)`` of positions among a micro-batch's letters, by spout and micro-batch.
Spans = Mapping[str, Mapping[str, list[list[int]]]]


class Note(NamedTuple):
    """A request to send letters again, as it was noted down."""

    request: str
    at_ms: int
    rows: Spans


def notes_of(store: Path) -> list[Note]:
    """Return what was sent again, the oldest request first, less what was withdrawn since.

    Raises
    ------
    CheckpointCorrupt
        If a note is damaged.
    """
    withdrawn: set[tuple[str, str]] = set()
    # Letters can be read without their checkpoint.
    with contextlib.suppress(FileNotFoundError, StateError):
        withdrawn = replays.withdrawn_in(checkpoint_of(store)[0] / "replays")
    directory = store / NOTES
    found = []
    for path in directory.glob("*.json") if directory.is_dir() else ():
        if not path.name.startswith("."):
            record = read_record(path, f"{NOTES}/{path.name}")
            assert record is not None
            rows = {
                spout: batches
                for spout, batches in record["rows"].items()
                if (path.stem, spout) not in withdrawn
            }
            found.append(Note(path.stem, record["at_ms"], rows))
    return sorted(found, key=lambda note: (note.at_ms, note.request))


def sent_rows(batch_ids: Int64s, spout: str, notes: Iterable[Note]) -> tuple[Int64s, Int64s]:
    """Return of each row of a file how often it was sent again, and by which of the notes at last.

    Parameters
    ----------
    batch_ids : ndarray of int64
        The file's column of that name.
    spout : str
        Of the letters in it.
    notes : iterable of Note
        The oldest first.

    Returns
    -------
    times, newest : ndarray of int64
        ``newest`` is -1 where none did.
    """
    times = np.zeros(len(batch_ids), np.int64)
    newest = np.full(len(batch_ids), -1)
    starts = starts_of(batch_ids)
    for n, note in enumerate(notes):
        for number, spans in note.rows.get(spout, {}).items():
            start = starts.get(int(number), -1)
            for first, end in spans if start >= 0 else ():
                times[start + first : start + end] += 1
                newest[start + first : start + end] = n
    return times, newest
