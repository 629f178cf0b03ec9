"""The tables of a checkpoint in a bucket: objects named by number, epoch and checksum.

``state/7.e3/waiting-lines.<checksum>.arrow`` was put by the driver of epoch 3, before the decision
of micro-batch 7 that names it.  Only that driver can name it for the first time, and only in that
micro-batch.  So once that is done, what the head on record does not name no later head names, and
even a driver that does not know yet that it was taken over from can delete it.  `head` does, which
knows what is on record.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa

from ackcore.spark.base.checksummed import (
    RUN_AGAIN,
    check_data,
    check_size,
    table_in,
    write_batches,
)
from ackcore.spark.base.errors import corrupt
from ackcore.spark.base.paths import Place
from ackcore.spark.checkpoint.tables import TableCache
from ackcore.spark.stores.files import adopt_object
from ackcore.spark.stores.interface import Store

_BELOW = "state"
#: A table that was written stays in memory if it has no more bytes.
_SMALL = 1 << 20
#: So many tables that tasks wrote are copied beside each other.
_AT_ONCE = 16


class BucketTables(TableCache):
    """The tables below ``state``, checked whenever their bytes come from the bucket.

    What stays in memory, or in a mapped file of this machine's, is not fetched again.

    Parameters
    ----------
    store : Store
        The bucket, from ``<checkpoint>/ackcore`` on.
    epoch : int
        This driver's.
    """

    def __init__(self, store: Store, epoch: int) -> None:
        super().__init__(Path("/"))  # by which nothing is found: all paths are below the store
        self._store = store
        self._epoch = epoch
        #: What is there, by key, as far as it is known; None before the first look.
        self._there: set[str] | None = None

    def _load(self, file: str, check: bool) -> pa.Table:
        data = self._store.read(f"{_BELOW}/{file}")
        if data is None:
            raise corrupt(self.place(file), "is missing, though a record names it")
        check_size(self.place(file), data.size, self._sizes.get(file))
        self._sizes[file] = data.size
        # Whoever wrote or checked it before: these bytes are others.
        return table_in(data, self.place(file))

    def checked(self, file: str, nbytes: int) -> str:
        """See `TableCache.checked`. Tables that this driver put there are not read again."""
        if file not in self._verified or self._sizes.get(file) != nbytes:
            self.opened(file, nbytes)
        return self.place(file)

    def opened(self, file: str, nbytes: int) -> pa.NativeFile:
        """See `TableCache.opened`."""
        data = self._store.read(f"{_BELOW}/{file}")
        if data is None:
            raise corrupt(self.place(file), "is missing, though a record names it")
        check_size(self.place(file), data.size, nbytes)
        check_data(data, self.place(file))
        self._verified.add(file)
        return pa.BufferReader(data)

    def place(self, file: str) -> str:
        """See `TableCache.place`."""
        return f"{self._store.url}/{_BELOW}/{file}"

    def size(self, file: str) -> int:
        """See `TableCache.size`."""
        if file not in self._sizes:
            self.read(file)
        return self._sizes[file]

    def directory_of(self, number: int) -> str:
        """See `TableCache.directory_of`."""
        return f"{number}.e{self._epoch}"

    def write(
        self, directory: str, name: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]
    ) -> str:
        """See `TableCache.write`."""
        with tempfile.TemporaryDirectory(prefix="ackcore-") as local:
            written = Path(local, write_batches(Path(local), name, schema, batches, synced=False))
            file = f"{directory}/{written.name}"
            nbytes = written.stat().st_size
            if nbytes <= _SMALL:
                # It is looked at right away: that takes no trip.
                data = pa.py_buffer(written.read_bytes())
                self._mapped[file] = table_in(data, self.place(file), check=False)
            self._store.put_file(f"{_BELOW}/{file}", written)
        if self._there is not None:
            self._there.add(f"{_BELOW}/{file}")
        self.wrote(file, nbytes)
        return file

    def adopt_soon(self, files: Mapping[Place, int | None], directory: str) -> None:
        """See `TableCache.adopt_soon`: they are copied beside each other."""
        if len(files) > 1:
            with ThreadPoolExecutor(_AT_ONCE) as beside:
                list(beside.map(lambda path: self.adopt(path, directory, files[path]), files))

    def adopt(self, path: Place, directory: str, nbytes: int | None) -> str:
        """See `TableCache.adopt`, by a copy within the bucket: the run's own goes with the run."""
        file = f"{directory}/{os.path.basename(path)}"
        if file in self._sizes:
            return file  # by this driver, and its name tells its bytes
        size = adopt_object(path, self._store, f"{_BELOW}/{file}")
        check_size(path, size, nbytes, RUN_AGAIN)
        if self._there is not None:
            self._there.add(f"{_BELOW}/{file}")
        self.wrote(file, size)
        return file

    def sync(self, directory: str) -> None:
        """See `TableCache.sync`: an object is there when its put returns."""

    def unnamed(self, number: int, named: Collection[str]) -> Collection[str]:
        """See `TableCache.unnamed`, each once."""
        if self._there is None:
            # It may lag: what it lacks is deleted by a later driver.
            self._there = {entry.key for entry in self._store.list(_BELOW)}
        kept = {f"{_BELOW}/{file}" for file in named}
        old = {key for key in self._there - kept if _number_in(key) < number - 1}
        self._there -= old
        return old


def _number_in(key: str) -> int:
    """Return the micro-batch whose tables an object is among."""
    number = key.split("/")[1].partition(".")[0]
    return int(number) if number.isdecimal() else 1 << 63
