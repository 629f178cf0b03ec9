"""The driver's side of the store of dead letters.

A store belongs to one checkpoint, and is at ``<checkpoint>/ackcore/dead_letters`` or elsewhere. Its
index names the valid files; see `ackcore.spark.dead_letters.letter_store`::

    <spout>/batch-<N>....parquet           letters of micro-batch N; written again with the same
                                           content if N runs again
    <spout>/batch-<N>.<P>....parquet       letters of micro-batch N from position P on, if tasks
                                           wrote several files
    <spout>/batches-<M>-<N>.<level>....parquet  letters of micro-batches M to N, merged
    <spout>/columns....parquet             no rows: the columns of the source at the last start

A letter's name is its micro-batch and its position among the letters of that micro-batch and spout,
whichever file has it. A merged file stays for an hour, for readers that have read an older index.
If a drop deletes it earlier, they read its letters from the file into which it was merged.

Files that tasks wrote are linked from the checkpoint. Where links are impossible they are copied,
in a bucket by the bucket itself. So their letters do not pass the driver, except small files, which
the driver combines.

The row of a dropped letter stays, with only its micro-batch. `drop` and merges empty the row after
the note of the drop is written.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import BinaryIO

import pyarrow as pa

from ackcore._arrow.record_batches import rebatched
from ackcore.spark.base.clocks import wall_clock_ms
from ackcore.spark.base.errors import CheckpointForeign, CheckpointInUse, StateError, corrupt
from ackcore.spark.base.letter_columns import as_letters, schema_of, write_letters
from ackcore.spark.base.reasons import DEATHS
from ackcore.spark.base.schemas import TRACKING
from ackcore.spark.checkpoint.dead_records import DeadLettersFile, DeadPart, dead_of, pieces_of
from ackcore.spark.checkpoint.places import WITHIN, remembered_letters
from ackcore.spark.checkpoint.records import Records
from ackcore.spark.checkpoint.requests import POINTER
from ackcore.spark.checkpoint.segments import all_nullable
from ackcore.spark.checkpoint.shared_record import INDEX
from ackcore.spark.dead_letters.checkpoints import letters_at
from ackcore.spark.dead_letters.compaction import Compaction
from ackcore.spark.dead_letters.letter_files import LetterFile, NewFile
from ackcore.spark.dead_letters.letter_store import NEWER_LETTERS, Letters, files_of
from ackcore.spark.dead_letters.notes import letters_left, notes_of
from ackcore.spark.stores.opening import is_bucket, open_store, place_of

_log = logging.getLogger("ackcore")

#: Largest table of letters in memory, in rows and bytes.
_ROWS, _BYTES = 1 << 16, 1 << 25
#: Size in bytes below which the driver combines tasks' files.
_SMALL = 1 << 20


class DeadLetters:
    """The store of a checkpoint, for the driver that writes it. Call `checked` to make one.

    ``clock``: returns milliseconds since 1970.
    """

    def __init__(self, place: Letters, clock: Callable[[], int] = wall_clock_ms):
        self.place = place
        self._compaction = Compaction(clock)
        self._complained = False

    @classmethod
    def checked(
        cls,
        checkpoint: str | os.PathLike[str],
        deployment_key: int,
        path: str | os.PathLike[str] | None = None,
        sources: Mapping[str, pa.Schema] | None = None,
        records: Records | None = None,
    ) -> Callable[[], DeadLetters]:
        """Return a function that opens a directory or a bucket prefix as a checkpoint's store.

        The call itself only checks the store, and writes nothing.

        Raises ValueError if the checkpoint is a URL, and the store is not. Raises CheckpointForeign
        if the store has letters of another checkpoint, which would be overwritten, or this
        checkpoint has letters elsewhere, which readers would not find. Raises StateError if the
        store has disappeared, its index is missing or older than its files, or the function cannot
        write it. The function raises CheckpointInUse if another driver has taken over the
        checkpoint.

        ``checkpoint``: the checkpoint. It records the place of a store outside of it. ``path``: the
        store. The default is its place at the last start, or a directory in the checkpoint.
        ``sources``: the columns of each tracked spout, to be recorded in the store. ``records``:
        ``State.records``, which refuse a driver after another has taken over.
        """
        home = place_of(checkpoint, "checkpoint")
        if records is None:
            records = Records(open_store(f"{home}/ackcore", "checkpoint"))
            records.read_meta()
        within, before = home + WITHIN, remembered_letters(records)
        url = before or within if path is None else place_of(path, "dead_letters")
        check_letters_url(url, home)
        store = letters_at(url)
        if url != (before or within) and files_of(letters_at(before or within)):
            raise CheckpointForeign(
                f"the checkpoint {home} has dead letters in {before or within}, and dead_letters= "
                f"is {url} now: dead_letters() and replay() would not find the old ones. Move the "
                "whole old directory there first, or omit dead_letters= to keep using it"
            )
        owner = store.owner()
        # With another place the user accepts the loss of the letters. The same place shows no such
        # intent: a program may set it at each start.
        if owner is None and url == before and (path is None or _counted(records)):
            raise StateError(
                f"the dead letters of the checkpoint {home} are kept in {url}, which has no "
                f"{INDEX}: its file system is not mounted, or the store was removed. Mount or "
                "restore it; or, if its letters are lost, set dead_letters= to another directory, "
                "for new letters"
            )
        if owner is None and store.newer_files(sys.maxsize):
            raise corrupt(
                os.path.join(url, INDEX),
                "is missing, though the directory has files of letters: it was removed",
            )
        if path is None and owner is None and (count := _counted(records)):
            raise StateError(
                f"the checkpoint {home} has counted {count} dead records, and {url}, where their "
                f"letters were, has no {INDEX}: the store was removed. Restore the store from a "
                "backup; if its letters are lost, set dead_letters= to this directory or another "
                "one, for new letters"
            )
        if owner is not None and owner["deployment_key"] != f"{deployment_key:016x}":
            raise CheckpointForeign(
                f"{url} holds the dead letters of the checkpoint {owner['checkpoint']} "
                f"(deployment {owner['deployment_key']}), and those of {home} "
                f"({deployment_key:016x}) would overwrite them; set dead_letters= to a directory "
                "of this checkpoint alone"
            )
        done = records.numbers(".done")
        if owner is not None and done and (newer := store.newer_files(done[-1])):
            more = f" and {len(newer) - 1} more" if newer[1:] else ""
            raise corrupt(
                os.path.join(url, INDEX),
                f"is older than the letters beside it: it lacks {newer[0]}{more}, with letters of "
                "micro-batches that are done. It was put back from a backup, or lost its newest "
                "version",
                "Put the newest version back. Or move these files to another directory, and start "
                "again: dead_letters() and replay() then lack only their letters",
            )

        def own() -> DeadLetters:
            about = {"deployment_key": f"{deployment_key:016x}", "checkpoint": home}
            store.own({**about, **(owner or {})}, records.check_owner)
            # No path for a store in the checkpoint: it moves with the checkpoint.
            now = None if url == within else url
            if now != before:
                records.write(POINTER, {"path": now})
            store.remember_columns(sources or {})
            return cls(store)

        return own

    def write(self, number: int, dead: Mapping[str, pa.Table]) -> None:
        """Write the dead letters of a micro-batch. A call with the same records has no effect.

        Older files may be merged then; an error of that is only logged. ``dead``: by spout the
        records, in the columns of `TRACKING` and of the source. Raises StateError if the letters
        cannot be written, CheckpointCorrupt if the store has letters of a later micro-batch.
        """
        found = dead_of(dead)
        # The numbers of micro-batches only grow, and the last one's letters are not merged yet.
        files = defaultdict[str, list[LetterFile]](list)
        for spout, file in files_of(self.place) if found else ():
            files[spout].append(file)
            if file.last > number or (file.level and file.last == number):
                raise corrupt(
                    file.path,
                    f"has letters up to micro-batch {file.last}, but the checkpoint is only at "
                    f"micro-batch {number}: the dead letters are newer than the checkpoint",
                    NEWER_LETTERS,
                )
        for spout in found:
            older = [each for each in files[spout] if each.last < number]
            self.place.publish(spout, number, _new_files(found.parts[spout], number))
            self._compact(spout, older)

    def _compact(self, spout: str, older: list[LetterFile]) -> None:
        try:
            self._compaction.compact(self.place, spout, older)
        except CheckpointInUse:
            raise
        except (OSError, StateError, pa.ArrowException) as error:
            # The letters are written: too many files only slow down their reading.
            if not self._complained:
                where = os.path.join(self.place.url, spout)
                _log.warning(
                    "the files of dead letters in %s were not merged: %s. No letter is lost; the "
                    "next micro-batch with dead letters tries again", where, error,
                )  # fmt: skip
            self._complained = True
            self.place.refresh()

    def reasons(self) -> Iterator[pa.Table]:
        """Yield tables that count letters by component and error, with the columns of `DEATHS`.

        Letters that were sent again or dropped do not count. An error may be in several tables.
        Raises CheckpointCorrupt if a file is damaged.
        """
        columns = DEATHS.names[:-1]
        self.place.refresh()  # other processes may have sent or dropped letters meanwhile
        notes = notes_of(self.place)
        for spout, file in files_of(self.place):
            # Many letters have the same error: dictionaries store its text once.
            for letters in letters_left(file.path, spout, notes, columns):
                counted = letters.group_by(columns).aggregate([([], "count_all")])
                yield counted.rename_columns(DEATHS.names).cast(DEATHS)


def _counted(records: Records) -> int:
    """Return the number of dead records up to the last micro-batch that is done."""
    done = records.numbers(".done")
    last = (records.read(f"batches/{done[-1]}.decision") if done else None) or {}
    return sum(of["dead"] for of in last.get("totals", {}).get("spouts", {}).values())


def check_letters_url(url: str, checkpoint: str) -> None:
    """Raise ValueError if a checkpoint is at a URL, and its dead letters are not."""
    if is_bucket(checkpoint) and not is_bucket(url):
        raise ValueError(
            f"dead_letters must be a URL if the checkpoint is one ({checkpoint}), got {url!r}: "
            "every reader of the checkpoint must reach its dead letters"
        )


def _new_files(parts: Sequence[DeadPart], number: int) -> list[NewFile]:
    """Return files to write, of adjacent parts. A task's file of 1 MiB or more stays alone."""
    files: list[list[DeadPart]] = []
    together = False
    for part in parts:
        alone = isinstance(part, DeadLettersFile) and part.nbytes >= _SMALL
        if alone or not together:
            files.append([])
        files[-1].append(part)
        together = not alone
    new, position = [], 0
    for some in files:
        new.append(_new_file(position, some, number))
        position += sum(map(len, some))
    return new


def _new_file(position: int, parts: Sequence[DeadPart], number: int) -> NewFile:
    """Return the file to write for the records of some parts, which begin at ``position``."""

    def fill(file: BinaryIO) -> None:
        whole = (piece for part in parts for piece in pieces_of(part) if len(piece))
        # Parts may differ in the nullability of a column.
        pieces = map(all_nullable, whole) if len(parts) > 1 else whole
        head = next(pieces)
        schema = schema_of(pa.schema(list(head.schema)[len(TRACKING) :]))
        every = chain([head], pieces)
        del head  # it would keep a file mapped until the last one is read
        batches = (one for each in every for one in rebatched(each.to_batches(), _ROWS, _BYTES))
        letters = (as_letters(pa.Table.from_batches([one]), number) for one in batches)
        write_letters(file, schema, letters)

    alone = parts[0] if len(parts) == 1 else None
    if isinstance(alone, DeadLettersFile):
        return NewFile(position, fill, alone.path(), alone.nbytes)
    return NewFile(position, fill)
