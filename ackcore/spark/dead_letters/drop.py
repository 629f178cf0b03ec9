"""Dropping dead letters: they are not shown, counted or sent again any more, and take no disk.

A note in the store names them, as one of `replay` does, so that a driver may go on writing and
merging meanwhile: with it they are dropped.  Then the files that have them are written again with
their rows empty, each in the place of the old one by a rename: who reads sees the whole old file or
the whole new one, and no other letter moves.  What a process that died left of that, or a driver
that merged the old files in the meantime, the next drop does, and the next merge.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from ackcore.spark.base.clocks import wall_clock_ms
from ackcore.spark.base.errors import CheckpointCorrupt
from ackcore.spark.base.letters import write_letters
from ackcore.spark.dead_letters.compaction import parts_left
from ackcore.spark.dead_letters.files import LetterFile
from ackcore.spark.dead_letters.letter_store import Letters, kinds_of
from ackcore.spark.dead_letters.letters import (
    batch_rows,
    emptied_rows,
    read_schema,
    reading_letters,
)
from ackcore.spark.dead_letters.listing import LetterFilter, wanted_rows
from ackcore.spark.dead_letters.notes import (
    Note,
    Spans,
    add_places,
    again_if_noted,
    counted,
    gone_rows,
    notes_of,
    places_of,
)
from ackcore.spark.dead_letters.store_of_checkpoint import check_spout, checkpoint_of, store_of

#: How often files are looked at again.
_PASSES = 3


class Dropped(NamedTuple):
    """Letters that were dropped.

    Attributes
    ----------
    request : str
        The name of the note.
    records : dict of str to int
        How many, by spout.
    """

    request: str
    records: dict[str, int]


def drop(path: str | os.PathLike[str], where: LetterFilter, *, dry_run: bool = False) -> Dropped:
    """Drop dead letters: they are not shown, counted or sent again any more, and take no disk.

    The query need not be stopped.  The books stay: what died has died; and how many were dropped,
    and which, stays on record.  What was sent again before goes on.  A DataFrame that
    `dead_letters` returned before leaves them out from now on.

    Parameters
    ----------
    path : path
        The checkpoint, or what was given as ``dead_letters``: a directory, or a bucket's URL.
    where : LetterFilter
        Which ones.
    dry_run : bool, default False
        Only tell how many would be dropped.

    Raises
    ------
    FileNotFoundError
        If the path is neither a checkpoint nor a store, or the store's checkpoint is gone.
    ValueError
        If there is no spout of that name.
    CheckpointCorrupt
        If a file is damaged.
    """
    store = store_of(path)
    check_spout(store, where.spout)
    request = uuid.uuid4().hex
    checkpoint_of(store)
    rows = again_if_noted(store, partial(_note, store, where, request, dry_run))
    if not dry_run:
        _empty(store, notes_of(store))
    return Dropped(request, counted(rows))


def _note(store: Letters, where: LetterFilter, request: str, dry_run: bool) -> Spans:
    """Note down which letters are dropped, and return them."""
    notes = notes_of(store)
    kinds = kinds_of(store, where.spout)
    chosen = wanted_rows(kinds, notes, where)
    rows: dict[str, dict[str, list[list[int]]]] = {}
    for kind in kinds:
        for file in kind.files:
            if file.path in chosen:
                places = places_of(chosen[file.path], batch_rows(file.path))
                add_places(rows.setdefault(kind.spout, {}), places)
    if rows and not dry_run:
        store.add_note(request, Note(request, wall_clock_ms(), rows, dropped=True)._asdict())
    return rows


def _empty(store: Letters, notes: Sequence[Note]) -> None:
    """Write files again whose letters were dropped, and those that were merged into others."""
    dropped = [note for note in notes if note.dropped]
    for spout in store.spouts() if dropped else ():
        numbers = {int(n) for note in dropped for n in note.rows.get(spout, ())}
        # Again, for what a driver merged meanwhile from files that were whole.
        for _ in range(_PASSES if numbers else 0):
            if not sum(
                _empty_file(store, spout, file, notes) for file in store.named(spout, numbers)
            ):
                break


def _empty_file(store: Letters, spout: str, file: LetterFile, notes: Sequence[Note]) -> bool:
    """Write a file again without what was dropped; return whether there was anything to do."""
    path = file.path
    try:
        _, gone = gone_rows(path, spout, notes)
        with reading_letters(path) as opened:
            emptied = emptied_rows(opened)
        if not gone.any() or (emptied is not None and emptied[gone].all()):
            return False
        schema = read_schema(path)
        store.rewrite(spout, file, lambda new: write_letters(new, schema, parts_left(path, notes)))
    except CheckpointCorrupt:
        if store.has(spout, file):
            raise
        # It was merged, and the driver has removed it meanwhile.
    return True  # look again: it may have been merged before it was written
