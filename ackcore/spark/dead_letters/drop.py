"""Dropping of dead letters: afterwards they are not shown, counted or replayed, and use no disk.

`drop` first adds a note to the store that names the letters, as `replay` does. The note drops them,
while a driver may go on writing and merging. Then `drop` rewrites their files with empty rows. Each
new file replaces the old one in one step, so a reader gets either whole file, and no other letter
changes its position. If the process dies, or a driver merges old files meanwhile, the next drop and
the next merge finish the rewriting.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from ackcore.spark.base.errors import CheckpointCorrupt
from ackcore.spark.base.letter_columns import write_letters
from ackcore.spark.dead_letters.checkpoints import check_spout, checkpoint_of, store_of
from ackcore.spark.dead_letters.compaction import parts_left
from ackcore.spark.dead_letters.letter_files import (
    LetterFile,
    batch_rows,
    emptied_rows,
    read_schema,
    reading_letters,
)
from ackcore.spark.dead_letters.letter_store import Letters, files_of
from ackcore.spark.dead_letters.listing import LetterFilter
from ackcore.spark.dead_letters.notes import (
    Note,
    Spans,
    add_places,
    again_if_noted,
    counts_by_spout,
    gone_rows,
    note_time,
    notes_of,
)

#: Most passes over a spout's files, while a driver merges files that are not rewritten yet.
_PASSES = 3


class Dropped(NamedTuple):
    """The result of `drop`.

    Attributes: ``request``: the name of the store's note of this call; there is no such note after
    a dry run, or if no letter was dropped. ``records``: the number of dropped letters, by spout.
    """

    request: str
    records: dict[str, int]


def drop(path: str | os.PathLike[str], where: LetterFilter, *, dry_run: bool = False) -> Dropped:
    """Drop dead letters: afterwards they are not shown, counted or replayed, and use no disk.

    The query may run meanwhile. Its counts of deaths do not change, and the store keeps a note of
    the dropped letters and their number. A replay that was requested before still sends its
    letters. A DataFrame that `dead_letters` returned earlier omits the dropped letters from now on.

    Raises FileNotFoundError if the path is neither a checkpoint nor a store, or the store's
    checkpoint was deleted. Raises ValueError if there is no spout of that name. Raises StateError
    if the store cannot be read or written, such as CheckpointCorrupt if a file is damaged.

    ``path``: the checkpoint, or the value of ``dead_letters``: a directory, or a bucket's URL.
    ``where``: the letters to drop; all for a filter without conditions. ``dry_run``: whether to
    count the letters without dropping them.
    """
    store = store_of(path)
    check_spout(store, where.spout)
    request = uuid.uuid4().hex
    checkpoint_of(store)
    rows = again_if_noted(store, partial(_note, store, where, request, dry_run))
    if not dry_run:
        _empty(store, notes_of(store))
    return Dropped(request, counts_by_spout(rows))


def _note(store: Letters, where: LetterFilter, request: str, dry_run: bool) -> Spans:
    """Return the positions of the letters to drop; unless ``dry_run``, add a note of them."""
    notes = notes_of(store)
    rows: dict[str, dict[str, list[list[int]]]] = {}
    for spout, file in files_of(store, where.spout):
        chosen = where.rows(file, spout, notes)
        if len(chosen):
            add_places(rows.setdefault(spout, {}), chosen, batch_rows(file.path))
    if rows and not dry_run:
        store.add_note(request, Note(request, note_time(notes), rows, dropped=True)._asdict())
    return rows


def _empty(store: Letters, notes: Sequence[Note]) -> None:
    """Rewrite the files of dropped letters, including files that a driver merged meanwhile."""
    dropped = [note for note in notes if note.dropped]
    for spout in store.spouts() if dropped else ():
        numbers = {int(n) for note in dropped for n in note.rows.get(spout, ())}
        # Repeat for files that a driver merged meanwhile from files not yet rewritten.
        for _ in range(_PASSES if numbers else 0):
            files = store.named(spout, numbers)
            if not sum(_empty_file(store, spout, file, notes) for file in files):
                break


def _empty_file(store: Letters, spout: str, file: LetterFile, notes: Sequence[Note]) -> bool:
    """Rewrite a file with empty rows for dropped letters. Return False if they were empty.

    After True, list the files again: a driver may have merged the old file meanwhile.
    """
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
        # The driver has merged the file and deleted it meanwhile.
    return True  # check again: a driver may have merged the old file before the rewrite
