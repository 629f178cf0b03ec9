"""A sink that writes Parquet files to a bucket, with one prefix for each micro-batch.

A bucket has no renames, and its listings may lag. So the name of a file follows from its content:
``batch_id=7/part-00001-of-00004-<content>.parquet``, where the content is the fingerprint of the
micro-batch's rows. The number of files depends only on the files of the run. Another process that
writes the same rows, after a crash or beside an abandoned task or driver, writes the same objects.
Before the files, the sink puts the note ``_ackcore/batch_id=7.json``. The note has the content, the
number of files, and the names of the files that these replace.

A micro-batch may get other rows later, for example if a sink around this one refuses some. Then a
conditional put replaces the note that was read, and the files get new names. A paused driver or an
abandoned task may still write the earlier files. So the sink does not delete them, but puts a file
without rows under each of their names. Files with rows are put only where there is no object.
"""

from __future__ import annotations

import json
import secrets
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from ackcore.spark.base.atomic import check_fence
from ackcore.spark.base.errors import CheckpointForeign, CheckpointInUse
from ackcore.spark.base.failpoints import failpoint
from ackcore.spark.sinks.columns import refusing_unfit_times
from ackcore.spark.sinks.parquet_directory import (
    ParquetDirectory,
    is_owner,
    is_small,
    owned_by_another,
    read_note,
    write_parquet,
)
from ackcore.spark.sinks.sink_batch import SinkBatch, read_all, read_sink_file
from ackcore.spark.stores.interface import Store, StoreConflict

#: Approximate bytes of the run's files that go into one Parquet file.
_PART_BYTES = 64 << 20
#: Number of files without rows that are put in parallel.
_AT_ONCE = 16


class ParquetParts(NamedTuple):
    """The content and the number of a micro-batch's Parquet files, from which `name` makes keys."""

    #: The unique part of the names: `SinkBatch.fingerprint`, and after it a number if the rows
    #: replaced others.
    content: str
    files: int  # the number of files; those without rows are not written

    def name(self, batch_id: int, number: int) -> str:
        """Return the key of file ``number`` in the bucket."""
        return f"batch_id={batch_id}/part-{number:05}-of-{self.files:05}-{self.content}.parquet"


class ParquetObjects(ParquetDirectory):
    """The sink that `to_parquet` returns for a URL of a bucket or of HDFS."""

    checks_fence = True

    def __init__(self, url: str, *, compression: str = "snappy") -> None:
        super().__init__(url, compression)
        #: The last micro-batch, and its replaced files that this process has emptied.
        self._emptied: tuple[int, set[ParquetParts]] = -1, set()

    @refusing_unfit_times
    def write(self, batch: SinkBatch) -> None:
        """Put a JSON note that names the files, then the files: from tasks, unless they are small.

        Raises SinkRejects for rows whose times do not fit Spark's types. Raises CheckpointForeign
        if another sink or checkpoint has put a note for this number. Raises CheckpointInUse if
        another driver has taken over or put other rows.
        """
        sizes = [file.size() for file in batch.files]
        small = is_small(batch.rows, sum(sizes))
        # Independent of the number of task slots: other names would duplicate the rows.
        count = 1 if small else min(len(sizes), max(2, -(-sum(sizes) // _PART_BYTES)))
        if small:
            # Reading has no side effect, so it runs while the fence and note are checked.
            with ThreadPoolExecutor(1) as beside:
                rows = beside.submit(lambda: list(read_all(batch.files, batch.nonacked)))
                write = self._writer(self._announce(batch, count), batch)
                write(0, rows.result())
        else:
            write = self._writer(self._announce(batch, count), batch)

            def in_task(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
                for ids in numbers:
                    for number in ids.column(0).to_pylist():
                        write(number)
                yield from ()

            tasks = batch.spark.range(0, count, 1, count)
            tasks.mapInArrow(in_task, "none boolean").collect()
        failpoint("in-sink", batch.batch_id)

    def _writer(self, parts: ParquetParts, batch: SinkBatch) -> Callable[..., None]:
        """Return a function that writes one file, in any process, if it has rows.

        Its arguments are the file's number, and optionally its rows, if they were read before.
        """
        store, compression = self._store, self.compression
        batch_id, files, nonacked = batch.batch_id, batch.files, batch.nonacked

        def write(number: int, rows: Iterable[pa.RecordBatch] | None = None) -> None:
            if rows is None:
                mine = files[number :: parts.files]
                rows = (each for file in mine for each in read_sink_file(file, nonacked))
            key = parts.name(batch_id, number)
            with tempfile.TemporaryDirectory() as place:
                path = Path(place, "part.parquet")
                with open(path, "wb") as file:
                    if not write_parquet(file, compression, rows):
                        return
                try:
                    store.put_file(key, path, if_absent=True)
                except StoreConflict:
                    # The object was put after another note, or has the same rows.
                    _check_announced(store, batch_id, parts)

        return write

    def _announce(self, batch: SinkBatch, files: int) -> ParquetParts:
        """Put the note of the files to be written, and empty the files that they replace.

        An existing note is always replaced. So the conditional put of a paused driver that has read
        it fails. Returns the parts of the names. Raises CheckpointForeign if the note is of another
        sink or checkpoint. ``files``: the number of files to be written.
        """
        batch_id, fingerprint = batch.batch_id, batch.fingerprint()
        key, parts = _note_of(batch_id), ParquetParts(fingerprint, files)
        whose = {"deployment": batch.deployment, "sink": batch.sink}
        check_fence()
        try:
            self._store.replace(key, _note(whose, parts, ()), None)
        except StoreConflict:
            found = self._store.get(key)
            if found is None:
                raise
            before = read_note(found.data)
            if not is_owner(before, **whose):
                raise CheckpointForeign(
                    f"sink {batch.sink!r}: "
                    + owned_by_another(self.path, before, batch.deployment, batch.checkpoint, True)
                ) from None
        else:
            return parts
        replaced = {ParquetParts(*each) for each in before["replaced"]}
        last = ParquetParts(before["content"], before["parts"])
        if (last.content.partition("-")[0], last.files) == (fingerprint, files):
            parts = last
        else:
            replaced.add(last)
            # A new name: the files without rows under earlier names of the same rows stay.
            parts = ParquetParts(f"{fingerprint}-{len(replaced)}", files)
        # After the read of the note: a driver that takes over from now on replaces the note.
        check_fence()
        self._store.replace(key, _note(whose, parts, replaced), found.version)
        self._empty(batch, replaced)
        return parts

    def _empty(self, batch: SinkBatch, replaced: set[ParquetParts]) -> None:
        """Put files without rows under names that earlier attempts wrote or may still write.

        This process does so once for each name. If the batch has no files, it deletes the objects.
        """
        batch_id = batch.batch_id
        if self._emptied[0] != batch_id:
            self._emptied = batch_id, set()
        left = replaced - self._emptied[1]
        keys = [each.name(batch_id, number) for each in left for number in range(each.files)]
        if not batch.files:  # no file gives the columns
            self._store.delete(keys)
            return
        with tempfile.TemporaryFile() as file:
            write_parquet(file, self.compression, [pa.RecordBatch.from_pylist([], batch.schema())])
            file.seek(0)
            empty = file.read()
        with ThreadPoolExecutor(_AT_ONCE) as beside:
            list(beside.map(lambda key: self._store.put(key, empty), keys))
        self._emptied[1].update(left)


def _note_of(batch_id: int) -> str:
    return f"_ackcore/batch_id={batch_id}.json"


def _note(
    whose: Mapping[str, str], parts: ParquetParts, replaced: Collection[ParquetParts]
) -> bytes:
    """Return the bytes of a note; ``whose``: the deployment and the sink."""
    # A random token makes each note's bytes unique, as its version may depend on them.
    about = {**whose, "write": secrets.token_hex(16)}
    content, files = parts
    note = {**about, "content": content, "parts": files, "replaced": sorted(replaced)}
    return json.dumps(note).encode()


def _check_announced(store: Store, batch_id: int, parts: ParquetParts) -> None:
    """Raise CheckpointInUse if a micro-batch's note is missing, or names other files by now."""
    found = store.get(_note_of(batch_id))
    note = None if found is None else read_note(found.data)
    if note is None or (note.get("content"), note.get("parts")) != parts:
        raise CheckpointInUse(
            f"micro-batch {batch_id} in {store.url} was written with other rows meanwhile, by "
            "another driver or by a later attempt of this one; this attempt writes no more. Let "
            "the other driver run, or stop it and start this query again"
        )
