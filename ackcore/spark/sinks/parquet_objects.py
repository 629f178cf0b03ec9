"""A sink that is Parquet files in a bucket, below one prefix for each micro-batch.

Nothing in a bucket can be renamed, and what a list says may be late.  So what a file is called
follows from what is in it: ``batch_id=7/part-00001-of-00004-<content>.parquet``, where the content
is the fingerprint of the micro-batch's rows and how many files they take goes by the run's files
alone.  Whoever writes these rows again, after a crash, beside a task that was given up or a driver
that was, writes the same objects.  Before them goes ``_ackcore/batch_id=7.json``, put if there is
none: the content, in how many files, and what they take the place of.

Other rows under one batch id, as where a sink around this one refuses some, are announced by
another note, in the place of the one that was read, and have names that none had before.  Who wrote
the rows of before may be a driver that sleeps, or a task that was given up.  So what it may write
is not deleted: at each of its names there is put a file without rows, and none of the files with
rows is put where there is something already.
"""

from __future__ import annotations

import json
import secrets
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Protocol

import pyarrow as pa

from ackcore._records import Int64s
from ackcore.spark.base.atomic import check_fence
from ackcore.spark.base.errors import CheckpointForeign, CheckpointInUse
from ackcore.spark.base.failpoints import failpoint
from ackcore.spark.sinks.interface import Accepted, AcceptedFile, read_accepted, read_all
from ackcore.spark.sinks.parquet_directory import (
    ParquetDirectory,
    is_owner,
    is_small,
    owned_by_another,
    read_note,
    write_parquet,
)
from ackcore.spark.stores.interface import Store, StoreConflict

#: Of the run's files, a Parquet file has about so many bytes.
_PART_BYTES = 64 << 20
#: So many files without rows are put beside each other.
_AT_ONCE = 16


class Parts(NamedTuple):
    """The names of the objects that hold a micro-batch's rows.

    Attributes
    ----------
    content : str
        What tells them from others: `Accepted.fingerprint`, and behind it a number if they took the
        place of others.
    files : int
        How many files they take at most; one without rows is not written.
    """

    content: str
    files: int

    def name(self, batch_id: int, number: int) -> str:
        """Return the key of one of them."""
        return f"batch_id={batch_id}/part-{number:05}-of-{self.files:05}-{self.content}.parquet"

    def are_of(self, fingerprint: str, files: int) -> bool:
        """Whether they have such rows, in so many files."""
        return self.files == files and self.content.partition("-")[0] == fingerprint


class Writer(Protocol):
    """Writes the file of a number."""

    def __call__(self, number: int, rows: Iterable[pa.RecordBatch] | None = None) -> None:
        """Write these rows, or those that the run's files have for it."""


class ParquetObjects(ParquetDirectory):
    """The sink that `to_parquet` returns for a URL of a bucket."""

    #: It looks at the fence itself, right before the first thing that it writes.
    looks_at_fence = True

    def __init__(self, url: str, *, compression: str = "snappy") -> None:
        super().__init__(url, compression)
        #: A micro-batch, and what of it this process has put files without rows in the place of.
        self._emptied: tuple[int, set[Parts]] = -1, set()

    def write_accepted(self, accepted: Accepted) -> None:
        """Write the rows of a micro-batch, straight from the files that its run left."""
        sizes = [file.size() for file in accepted.files]
        small = is_small(accepted.rows, sum(sizes))
        # Not by how many tasks can run: with other names the rows would be there twice.
        count = 1 if small else min(len(sizes), max(2, -(-sum(sizes) // _PART_BYTES)))
        if small:
            # To read has no effect, so it goes on beside the fence and the note.
            with ThreadPoolExecutor(1) as beside:
                rows = beside.submit(lambda: list(read_all(accepted.files, accepted.nonacked)))
                write = self._writer(self._announce(accepted, count), accepted)
                write(0, rows.result())
        else:
            write = self._writer(self._announce(accepted, count), accepted)

            def in_task(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
                for batch in numbers:
                    for number in batch.column(0).to_pylist():
                        write(number)
                yield from ()

            tasks = accepted.spark.range(0, count, 1, count)
            tasks.mapInArrow(in_task, "none boolean").collect()
        failpoint("in-sink", accepted.batch_id)

    def _writer(self, parts: Parts, accepted: Accepted) -> Writer:
        """Return what writes the file of a number, in any process, if there are rows for it.

        It reads them if they are not given.
        """
        store, compression = self._store, self.compression
        batch_id, files, nonacked = accepted.batch_id, accepted.files, accepted.nonacked

        def write(number: int, rows: Iterable[pa.RecordBatch] | None = None) -> None:
            if rows is None:
                rows = _one_by_one(files[number :: parts.files], nonacked)
            key = parts.name(batch_id, number)
            with tempfile.TemporaryDirectory() as place:
                path = Path(place, "part.parquet")
                with open(path, "wb") as file:
                    if not write_parquet(file, compression, rows):
                        return
                try:
                    store.put_file(key, path, if_absent=True)
                except StoreConflict:
                    # The note first: what is there was put behind it, or has these rows.
                    _check_announced(store, batch_id, parts)

        return write

    def _announce(self, accepted: Accepted, files: int) -> Parts:
        """Put on record what will be there, and put nothing in the place of what was there before.

        The note that is there is replaced in any case: a driver that sleeps, and has read it, is
        to find another one when it wakes.
        """
        batch_id, fingerprint = accepted.batch_id, accepted.fingerprint()
        key, parts = _note_of(batch_id), Parts(fingerprint, files)
        whose = {"deployment": accepted.deployment, "sink": accepted.sink}
        check_fence()
        try:
            self._store.replace(key, _noted(whose, parts, ()), None)
        except StoreConflict:
            found = self._store.get(key)
            if found is None:
                raise
            before = read_note(found.data)
            if not is_owner(before, **whose):
                raise CheckpointForeign(
                    owned_by_another(self.path, before, accepted.checkpoint, True)
                ) from None
        else:
            return parts
        replaced = {Parts(*each) for each in before["replaced"]}
        last = Parts(before["content"], before["parts"])
        if last.are_of(fingerprint, files):
            parts = last
        else:
            replaced.add(last)
            # Never called so before: what was put in the place of the same rows stays there.
            parts = Parts(f"{fingerprint}-{len(replaced)}", files)
        # Behind the look at the note: whoever takes over from now on replaces it.
        check_fence()
        self._store.replace(key, _noted(whose, parts, replaced), found.version)
        self._empty(accepted, replaced)
        return parts

    def _empty(self, accepted: Accepted, replaced: set[Parts]) -> None:
        """Put files without rows where others are, or may be put yet by who announced them."""
        batch_id = accepted.batch_id
        if self._emptied[0] != batch_id:
            self._emptied = batch_id, set()
        left = replaced - self._emptied[1]
        keys = [each.name(batch_id, number) for each in left for number in range(each.files)]
        if not accepted.files:  # of which one would know the columns
            self._store.delete(keys)
            return
        with tempfile.TemporaryFile() as file:
            write_parquet(
                file, self.compression, [pa.RecordBatch.from_pylist([], accepted.schema())]
            )
            file.seek(0)
            empty = file.read()
        with ThreadPoolExecutor(_AT_ONCE) as beside:
            list(beside.map(lambda key: self._store.put(key, empty), keys))
        self._emptied[1].update(left)


def _note_of(batch_id: int) -> str:
    return f"_ackcore/batch_id={batch_id}.json"


def _noted(whose: Mapping[str, str], parts: Parts, replaced: Collection[Parts]) -> bytes:
    # So that no two notes have the same bytes: the version of one goes by these.
    about = {**whose, "write": secrets.token_hex(16)}
    content, files = parts
    note = {**about, "content": content, "parts": files, "replaced": sorted(replaced)}
    return json.dumps(note).encode()


def _check_announced(store: Store, batch_id: int, parts: Parts) -> None:
    """Make sure that rows are those of their micro-batch still.

    Raises
    ------
    CheckpointInUse
        If others took their place.
    """
    found = store.get(_note_of(batch_id))
    note = {} if found is None else read_note(found.data)
    if (note.get("content"), note.get("parts")) != parts:
        raise CheckpointInUse(
            f"{store.url} has other rows of micro-batch {batch_id} by now, those of a driver that "
            "took over from this one, or of a later attempt: these are not written"
        )


def _one_by_one(files: Sequence[AcceptedFile], nonacked: Int64s) -> Iterator[pa.RecordBatch]:
    for file in files:
        yield from read_accepted(file, nonacked)
