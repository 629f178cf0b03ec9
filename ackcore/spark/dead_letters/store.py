"""The store of dead letters, as the driver writes it.

A store is a directory, ``<checkpoint>/ackcore/dead_letters`` or another, of one checkpoint::

    <spout>/batch-<N>.parquet              the dead of micro-batch N; written again alike if N
                                           acts again
    <spout>/batches-<M>-<N>.<level>.parquet  those of micro-batches M to N, merged
    <spout>/columns.parquet                no rows: the columns of the source at the last start
    .owner.json                            to which checkpoint it belongs, and its deployment key
    .replayed/<request>.json               which rows (micro-batch, position) were sent or dropped;
                                           the files of those that were dropped are made there

A letter is named by its micro-batch and its position among the letters of that micro-batch and
spout, in whatever file it is.  A file all of whose micro-batches are within those of another one
was merged into that one and no longer counts: so a merge takes effect by one rename, and a driver
that dies around it loses no letter and doubles none.  A file that was merged stays for an hour, for
readers that have listed it before.

A letter that was dropped keeps its row, with nothing but the micro-batch in it: `drop` and merges
empty it, after the note that names it was written.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path

import pyarrow as pa

from ackcore.arrow import rebatched
from ackcore.spark.base.atomic import make_directory, remove, remove_temporaries, write_file
from ackcore.spark.base.checksummed import read_record, write_record
from ackcore.spark.base.clocks import wall_clock_ms
from ackcore.spark.base.errors import CheckpointForeign, StateError, corrupt
from ackcore.spark.base.paths import local_path
from ackcore.spark.base.reason_columns import DEATHS
from ackcore.spark.base.schemas import TRACKING
from ackcore.spark.checkpoint.dead import pieces_of
from ackcore.spark.dead_letters.compaction import Compaction
from ackcore.spark.dead_letters.files import (
    LetterFile,
    files_of,
    listed,
    remember_columns,
    spouts_of,
)
from ackcore.spark.dead_letters.letters import as_letters, read_letters, schema_of, write_letters
from ackcore.spark.dead_letters.notes import gone_rows, notes_of, sent_rows
from ackcore.spark.dead_letters.store_of_checkpoint import OWNER, POINTER, remembered

_log = logging.getLogger("ackcore")

#: What is in memory of the dead of a micro-batch that are written.
_ROWS, _BYTES = 1 << 16, 1 << 25


class DeadLetters:
    """The store of a checkpoint, as the driver writes it; made by `open`."""

    def __init__(self, path: Path, clock: Callable[[], int] = wall_clock_ms):
        self.path = path
        self._compaction = Compaction(clock)
        self._complained = False
        self._listed: dict[Path, tuple[list[LetterFile], list[tuple[LetterFile, LetterFile]]]] = {}

    @classmethod
    def open(
        cls,
        checkpoint: str | os.PathLike[str],
        deployment_key: int,
        path: str | os.PathLike[str] | None = None,
        sources: Mapping[str, pa.Schema] | None = None,
    ) -> DeadLetters:
        """Take a directory as the store of an open checkpoint.

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

        Raises
        ------
        CheckpointForeign
            If it holds the letters of another checkpoint, which would be overwritten; or the
            letters of this one are elsewhere, and would be out of sight.
        StateError
            If it cannot be written, or is not there although it was.
        """
        root = local_path(checkpoint, "checkpoint") / "ackcore"
        before = remembered(root)
        store = before if path is None else local_path(path, "dead_letters")
        if store != before and files_of(before):
            raise CheckpointForeign(
                f"the checkpoint {root.parent} has dead letters in {before}, and dead_letters= is "
                f"{store} now: dead_letters() and replay() would not see the old ones. Move the "
                "directory there first, with all that is in it; or leave dead_letters= out, and "
                "the letters go on where they are"
            )
        if path is None and (root / POINTER).exists() and not (store / OWNER).exists():
            raise StateError(
                f"the dead letters of the checkpoint {root.parent} are kept in {store}, and there "
                f"is no {OWNER} in it: is its file system mounted? If they are gone for good, "
                "give dead_letters= the directory for those to come"
            )
        owner = read_record(make_directory(store) / OWNER, OWNER)
        if owner is None:
            if files_of(store):
                raise corrupt(
                    store / OWNER, "is missing, though there are letters beside it: it was removed"
                )
            about = {"deployment_key": f"{deployment_key:016x}", "checkpoint": str(root.parent)}
            write_record(store / OWNER, OWNER, about)
        elif owner["deployment_key"] != f"{deployment_key:016x}":
            raise CheckpointForeign(
                f"{store} holds the dead letters of the checkpoint {owner['checkpoint']} "
                f"(deployment {owner['deployment_key']}), and those of {root.parent} "
                f"({deployment_key:016x}) would overwrite them; give dead_letters= a directory of "
                "its own"
            )
        if store == root / "dead_letters":  # which is found wherever the checkpoint is moved to
            remove(root / POINTER)
        elif store != before:
            write_record(root / POINTER, POINTER, {"path": str(store)})
        for directory in spouts_of(store):
            remove_temporaries(directory)
        remember_columns(store, sources or {})
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
        for spout in dead:
            found = (piece for piece in pieces_of(dead, spout) if len(piece))
            first = next(found, None)
            if first is not None:
                letters = _letters(chain([first], found), number)
                schema = schema_of(pa.schema(list(first.schema)[len(TRACKING) :]))
                self._write(make_directory(self.path / spout), number, schema, letters)

    def _write(
        self, directory: Path, number: int, schema: pa.Schema, letters: Iterator[pa.Table]
    ) -> None:
        # One driver writes, and what was put together stays for a while: thousands of files.
        known = self._listed.pop(directory) if directory in self._listed else None
        files, replaced = known or listed(directory)
        for file in files:
            if file.level and file.first <= number <= file.last:
                raise corrupt(
                    file.path,
                    f"holds letters of micro-batches after {number}, which is only now being "
                    "written: the dead letters and the checkpoint are not of one age",
                )
        file = LetterFile(directory / f"batch-{number}.parquet", number, number, 0)
        write_file(file.path, partial(write_letters, schema=schema, tables=letters))
        older = [each for each in files if each.last < number]
        try:
            self._compaction.compact(directory, older, replaced)
        except (OSError, StateError, pa.ArrowException) as error:
            # The letters are written: that they are many files only makes them slow to read.
            if not self._complained:
                _log.warning("the dead letters in %s stay many files: %s", directory, error)
            self._complained = True
        else:
            if all(each.last <= number for each in files):
                self._listed[directory] = [*older, file], replaced

    def reasons(self) -> Iterator[pa.Table]:
        """Yield why records died that were neither sent again nor dropped, in `DEATHS`.

        Raises
        ------
        CheckpointCorrupt
            If a file is damaged.
        """
        columns = DEATHS.names[:-1]
        notes = notes_of(self.path)
        for spout, files in files_of(self.path).items():
            for file in files:
                letters = read_letters(file.path, columns)
                batch_ids, gone = gone_rows(file.path, spout, notes)
                times, _ = sent_rows(batch_ids, spout, notes)
                counted = letters.filter(pa.array((times == 0) & ~gone)).group_by(columns)
                yield counted.aggregate([([], "count_all")]).rename_columns(DEATHS.names)


def _letters(dead: Iterable[pa.Table], number: int) -> Iterator[pa.Table]:
    """Yield the dead as letters, so many at a time that they are no burden."""
    for piece in dead:
        for batch in rebatched(piece.to_batches(), _ROWS, _BYTES):
            yield as_letters(pa.Table.from_batches([batch]), number)
