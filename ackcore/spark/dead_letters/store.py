"""The store of dead letters, as the driver writes it.

A store is a place of one checkpoint, ``<checkpoint>/ackcore/dead_letters`` or another.  Its index
names the files that count; see `ackcore.spark.dead_letters.letter_store`::

    <spout>/batch-<N>....parquet           the dead of micro-batch N; written again alike if N
                                           acts again
    <spout>/batch-<N>.<P>....parquet       those from position P on, where the ones before are in
                                           files of their own: as tasks wrote them
    <spout>/batches-<M>-<N>.<level>....parquet  those of micro-batches M to N, merged
    <spout>/columns....parquet             no rows: the columns of the source at the last start

A letter is named by its micro-batch and its position among the letters of that micro-batch and
spout, in whatever file it is.  A file that was merged into another stays for an hour, for readers
that have read the index before.

What tasks wrote is linked from the checkpoint, and copied where that cannot be, or within the
bucket: none of it passes the driver, but for what is so small that it goes into one file with its
neighbours.

A letter that was dropped keeps its row, with nothing but the micro-batch in it: `drop` and merges
empty it, after the note that names it was written.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from ackcore.arrow import rebatched
from ackcore.spark.base.clocks import wall_clock_ms
from ackcore.spark.base.errors import CheckpointForeign, CheckpointInUse, StateError, corrupt
from ackcore.spark.base.letters import as_letters, schema_of, write_letters
from ackcore.spark.base.reasons import DEATHS
from ackcore.spark.base.schemas import TRACKING
from ackcore.spark.checkpoint.dead import DeadLettersFile, DeadPart, dead_of, pieces_of
from ackcore.spark.checkpoint.places import WITHIN, remembered_letters
from ackcore.spark.checkpoint.records import RecordFiles, Records
from ackcore.spark.checkpoint.requests import POINTER
from ackcore.spark.checkpoint.segments import all_nullable
from ackcore.spark.checkpoint.shared_record import INDEX
from ackcore.spark.dead_letters.checkpoints import letters_at
from ackcore.spark.dead_letters.compaction import Compaction
from ackcore.spark.dead_letters.files import NewFile
from ackcore.spark.dead_letters.letter_store import Letters, files_of
from ackcore.spark.dead_letters.notes import letters_left, notes_of
from ackcore.spark.stores.opening import is_bucket, place_of

_log = logging.getLogger("ackcore")

#: What is in memory of the dead of a micro-batch that are written.
_ROWS, _BYTES = 1 << 16, 1 << 25
#: Files of tasks that have fewer bytes are put together.
_SMALL = 1 << 20


class DeadLetters:
    """The store of a checkpoint, as the driver writes it; made by `open`.

    Parameters
    ----------
    place : Letters
        Where it is.
    clock : callable, optional
        Returns milliseconds since 1970.
    """

    def __init__(self, place: Letters, clock: Callable[[], int] = wall_clock_ms):
        self.place = place
        self._compaction = Compaction(clock)
        self._complained = False

    @property
    def path(self) -> Path:
        """Its directory, where it is on a file system."""
        return Path(self.place.url)

    @classmethod
    def open(
        cls,
        checkpoint: str | os.PathLike[str],
        deployment_key: int,
        path: str | os.PathLike[str] | None = None,
        sources: Mapping[str, pa.Schema] | None = None,
        records: Records | None = None,
    ) -> DeadLetters:
        """Take a directory, or a place in a bucket, as the store of an open checkpoint.

        Parameters
        ----------
        checkpoint : path
            The checkpoint, which remembers a store elsewhere.
        deployment_key : int
            ``State.deployment_key``.
        path : path, optional
            The store; where it was at the last start if not given, at first in the checkpoint.
        sources : mapping from str to pyarrow.Schema, optional
            The columns of each tracked spout, which the store remembers.
        records : Records, optional
            ``State.records``, by which a driver that was taken over from is refused.

        Raises
        ------
        ValueError
            If the checkpoint is in a bucket, and the store is not.
        CheckpointForeign
            If it holds the letters of another checkpoint, which would be overwritten; or the
            letters of this one are elsewhere, and would be out of sight.
        CheckpointInUse
            If another driver has taken over the checkpoint.
        StateError
            If it cannot be written, or is not there although it was.
        """
        home = place_of(checkpoint, "checkpoint")
        if records is None:
            records = RecordFiles(Path(home, "ackcore"), f"{deployment_key:016x}")
        within, before = home + WITHIN, remembered_letters(records)
        url = before or within if path is None else place_of(path, "dead_letters")
        check_letters_url(url, home)
        store = letters_at(url)
        if url != (before or within) and files_of(letters_at(before or within)):
            raise CheckpointForeign(
                f"the checkpoint {home} has dead letters in {before or within}, and dead_letters= "
                f"is {url} now: dead_letters() and replay() would not see the old ones. Move the "
                "directory there first, with all that is in it; or leave dead_letters= out, and "
                "the letters go on where they are"
            )
        owner = store.owner()
        if path is None and before is not None and owner is None:
            raise StateError(
                f"the dead letters of the checkpoint {home} are kept in {url}, and there is no "
                f"{INDEX} in it: is its file system mounted? If they are gone for good, give "
                "dead_letters= the directory for those to come"
            )
        if owner is None and store.has_remains():
            raise corrupt(
                os.path.join(url, INDEX),
                "is missing, though there are letters beside it: it was removed",
            )
        if owner is not None and owner["deployment_key"] != f"{deployment_key:016x}":
            raise CheckpointForeign(
                f"{url} holds the dead letters of the checkpoint {owner['checkpoint']} "
                f"(deployment {owner['deployment_key']}), and those of {home} "
                f"({deployment_key:016x}) would overwrite them; give dead_letters= a directory of "
                "its own"
            )
        about = {"deployment_key": f"{deployment_key:016x}", "checkpoint": home}
        store.own({**about, **(owner or {})}, records.check_owner)
        # One in the checkpoint is found wherever that is moved to.
        now = None if url == within else url
        if now != before:
            records.write(POINTER, {"path": now})
        store.remember_columns(sources or {})
        return cls(store)

    def write(self, number: int, dead: Mapping[str, pa.Table]) -> None:
        """Write the dead of a micro-batch; once more does no harm.

        Parameters
        ----------
        number : int
            The micro-batch.
        dead : mapping from str to pyarrow.Table
            ``BatchDecision.dead``.

        Raises
        ------
        StateError
            If it cannot be written.
        """
        found = dead_of(dead)
        for spout in found:
            parts = found.parts[spout]
            self._write(spout, number, _files(parts))

    def _write(self, spout: str, number: int, parts: Sequence[Sequence[DeadPart]]) -> None:
        files = self.place.files(spout)
        for file in files:
            if file.level and file.first <= number <= file.last:
                raise corrupt(
                    file.path,
                    f"holds letters of micro-batches after {number}, which is only now being "
                    "written: the dead letters and the checkpoint are not of one age",
                )
        new, position = [], 0
        for some in parts:
            new.append(_new_file(position, some, number))
            position += sum(map(len, some))
        self.place.publish(spout, number, new)
        older = [each for each in files if each.last < number]
        try:
            self._compaction.compact(self.place, spout, older)
        except CheckpointInUse:
            raise
        except (OSError, StateError, pa.ArrowException) as error:
            # The letters are written: that they are many files only makes them slow to read.
            if not self._complained:
                where = os.path.join(self.place.url, spout)
                _log.warning("the dead letters in %s stay many files: %s", where, error)
            self._complained = True
            self.place.refresh()

    def reasons(self) -> Iterator[pa.Table]:
        """Yield why records died that were neither sent again nor dropped, in `DEATHS`.

        A part of a file at a time: a reason may be there more than once.

        Raises
        ------
        CheckpointCorrupt
            If a file is damaged.
        """
        columns = DEATHS.names[:-1]
        self.place.refresh()  # others send letters again and drop some meanwhile
        notes = notes_of(self.place)
        for spout, files in files_of(self.place).items():
            for file in files:
                # Many die alike: as dictionaries they take no text each.
                for letters in letters_left(file.path, spout, notes, columns):
                    counted = letters.group_by(columns).aggregate([([], "count_all")])
                    yield counted.rename_columns(DEATHS.names).cast(DEATHS)


def check_letters_url(url: str, checkpoint: str) -> None:
    """Refuse a store that a checkpoint cannot have, wherever it is.

    Raises
    ------
    ValueError
        If the checkpoint is in a bucket, and the store is not.
    """
    if is_bucket(checkpoint) and not is_bucket(url):
        raise ValueError(
            f"dead_letters must be in a bucket if the checkpoint is ({checkpoint}), got {url!r}: "
            "who looks at the one must find the other"
        )


def _files(parts: Sequence[DeadPart]) -> list[list[DeadPart]]:
    """Say which parts of the dead of a micro-batch make up each file."""
    files: list[list[DeadPart]] = []
    together = False
    for part in parts:
        alone = isinstance(part, DeadLettersFile) and part.nbytes >= _SMALL
        if alone or not together:
            files.append([])
        files[-1].append(part)
        together = not alone
    return files


def _new_file(position: int, parts: Sequence[DeadPart], number: int) -> NewFile:
    """Return what becomes a file of letters, or is one that tasks wrote."""

    def fill(file: BinaryIO) -> None:
        whole = (piece for part in parts for piece in pieces_of(part) if len(piece))
        # A column may be required in some of them.
        pieces = map(all_nullable, whole) if len(parts) > 1 else whole
        head = next(pieces)
        schema = schema_of(pa.schema(list(head.schema)[len(TRACKING) :]))
        every = chain([head], pieces)
        del head  # it would keep a file mapped until the last one is read
        write_letters(file, schema, _letters(every, number))

    alone = parts[0] if len(parts) == 1 else None
    if isinstance(alone, DeadLettersFile):
        return NewFile(position, fill, alone.path(), alone.nbytes)
    return NewFile(position, fill)


def _letters(dead: Iterable[pa.Table], number: int) -> Iterator[pa.Table]:
    """Yield the dead as letters, so many at a time that they are no burden."""
    for piece in dead:
        for batch in rebatched(piece.to_batches(), _ROWS, _BYTES):
            yield as_letters(pa.Table.from_batches([batch]), number)
