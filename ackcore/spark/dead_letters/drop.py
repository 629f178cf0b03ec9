"""Dropping dead letters: they are not shown, counted or sent again any more.

A note in the store names them, as one of `replay` does, so that a driver may go on writing and
merging meanwhile.  The files stay as they are, and so does what they take on the disk.
"""

from __future__ import annotations

import os
import uuid
from typing import NamedTuple

from ackcore.spark.base.atomic import make_directory
from ackcore.spark.base.checksummed import write_record
from ackcore.spark.base.clocks import wall_clock_ms
from ackcore.spark.base.lock import Lock
from ackcore.spark.dead_letters.files import kinds_of
from ackcore.spark.dead_letters.letters import read_letters
from ackcore.spark.dead_letters.listing import LetterFilter, wanted_rows
from ackcore.spark.dead_letters.notes import NOTES, Note, counted, notes_of, places_of
from ackcore.spark.dead_letters.store_of_checkpoint import check_spout, checkpoint_of, store_of


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
    """Drop dead letters: they are not shown, counted or sent again any more.

    The query need not be stopped.  The books stay: what died has died.

    Parameters
    ----------
    path : path
        The checkpoint, or the directory that was given as ``dead_letters``.
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
    directory = make_directory(checkpoint_of(store)[0] / "replays")
    request = uuid.uuid4().hex
    # That of `replay`: what one sends, another does not drop.
    lock = Lock(directory / "lock", wait=True)
    try:
        notes = notes_of(store)
        kinds = kinds_of(store, where.spout)
        chosen = wanted_rows(kinds, notes, where)
        rows: dict[str, dict[str, list[list[int]]]] = {}
        for kind in kinds:
            for file in kind.files:
                if file.path in chosen:
                    batch_ids = read_letters(file.path, ["batch_id"])["batch_id"].to_numpy()
                    places = places_of(chosen[file.path], batch_ids)
                    rows.setdefault(kind.spout, {}).update(places)
        if rows and not dry_run:
            note = Note(request, wall_clock_ms(), rows, dropped=True)
            path_of_note = make_directory(store / NOTES) / f"{request}.json"
            write_record(path_of_note, f"{NOTES}/{path_of_note.name}", note._asdict())
    finally:
        lock.close()
    return Dropped(request, counted(rows))
