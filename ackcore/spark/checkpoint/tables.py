"""The tables of a checkpoint: where they are, and that each is what was written.

``state/7.e3.waiting-lines.<checksum>.arrow`` was put by the driver of epoch 3, before the decision
of micro-batch 7 that names it.  Only that driver can name it for the first time, and only in that
micro-batch.  So once that is done, what the records do not name no later record names, and even a
driver that does not know yet that it was taken over from can delete it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa

from ackcore.spark.base.checksummed import (
    RUN_AGAIN,
    batches_of,
    check_data,
    check_size,
    table_in,
    write_batches,
)
from ackcore.spark.base.errors import corrupt
from ackcore.spark.base.paths import Place
from ackcore.spark.stores.files import Workshop, adopt_object
from ackcore.spark.stores.interface import Store
from ackcore.spark.stores.local import LocalStore

_BELOW = "state"
#: A table that was written to a bucket stays in memory if it has no more bytes.
_SMALL = 1 << 20
#: So many tables that tasks wrote are copied beside each other.
_AT_ONCE = 16


class TableCache:
    """The tables below ``state``, each mapped and checked once.

    Where they are in a bucket they are checked whenever their bytes come from there.  What stays in
    memory, or in a mapped file of this machine's, is not fetched again.

    Parameters
    ----------
    store : Store
        The file system or the bucket, from ``<checkpoint>/ackcore`` on.
    epoch : int
        This driver's.
    check : bool, default True
        Whether lengths and checksums of files of a file system are looked at.
    """

    def __init__(self, store: Store, epoch: int, *, check: bool = True):
        self._store = store
        self._epoch = epoch
        self._is_local = isinstance(store, LocalStore)
        self._check = check or not self._is_local
        self._verified: set[str] = set()
        self._mapped: dict[str, pa.Table] = {}
        #: The lengths of files, as they were written or as a record says.
        self._sizes: dict[str, int] = {}
        #: What is there, by key, as far as it is known; None before the first look.
        self._there: set[str] | None = None

    def expect(self, sizes: Mapping[str, int]) -> None:
        """Have files refused that have not the lengths which a record says."""
        self._sizes.update(sizes)

    def sizes(self, files: Iterable[str]) -> dict[str, int]:
        """Return the lengths of files for a record, of those that are known."""
        return {file: self._sizes[file] for file in sorted(files) if file in self._sizes}

    def read(self, file: str, keep: bool = True) -> pa.Table:
        """Return a table; without ``keep`` its pages may leave memory when that goes.

        Raises
        ------
        CheckpointCorrupt, StateError
            If it is missing, damaged or unreadable.
        """
        if file in self._mapped:
            return self._mapped[file]
        data = self._data(file, self._sizes.get(file) if self._check else None)
        table = table_in(data, self.place(file), check=self._is_unchecked(file))
        self._sizes.setdefault(file, data.size)
        self._verified.add(file)
        if keep:
            self._mapped[file] = table
        return table

    def _data(self, file: str, nbytes: int | None) -> pa.Buffer:
        data = self._store.read(f"{_BELOW}/{file}")
        if data is None:
            raise corrupt(self.place(file), "is missing, though a record names it")
        check_size(self.place(file), data.size, nbytes)
        return data

    def _is_unchecked(self, file: str) -> bool:
        # Whoever wrote or checked it before: what comes from a bucket now are other bytes.
        return self._check and not (self._is_local and file in self._verified)

    def checked(self, file: str, nbytes: int) -> str:
        """Return where a file is that is no table, once it has its length and its checksum.

        What this driver has written is not read for that.

        Raises
        ------
        CheckpointCorrupt, StateError
            If it is missing, damaged or unreadable.
        """
        if file not in self._verified or self._sizes.get(file) != nbytes:
            self.opened(file, nbytes)
        elif self._is_local:
            self._data(file, nbytes)  # by its length: it may have been cut off since
        return self.place(file)

    def opened(self, file: str, nbytes: int) -> pa.NativeFile:
        """Return what `checked` looks at as something that Parquet is read from."""
        data = self._data(file, nbytes)
        check_data(data, self.place(file), content=self._is_unchecked(file))
        self.wrote(file, nbytes)
        return pa.BufferReader(data)

    def place(self, file: str) -> str:
        """Return where a table is, for people."""
        return f"{self._store.url}/{_BELOW}/{file}"

    def size(self, file: str) -> int:
        """Return how many bytes a table has."""
        if file not in self._sizes:
            self.read(file)
        return self._sizes[file]

    def directory_of(self, number: int) -> str:
        """Return how the names of the tables of a micro-batch begin."""
        return f"{number}.e{self._epoch}"

    def write(
        self, directory: str, name: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]
    ) -> str:
        """Write a table, and return its file; its name lasts from the next `sync` on."""
        shop = Workshop(f"{self._store.url}/{_BELOW}")
        try:
            made = shop.path
            file = write_batches(made, f"{directory}.{name}", schema, batches, named=False)
            nbytes = (made / file).stat().st_size
            if nbytes <= _SMALL and not self._is_local:
                # It is looked at right away: that takes no trip.
                data = pa.py_buffer((made / file).read_bytes())
                self._mapped[file] = table_in(data, self.place(file), check=False)
            shop.publish(file)
        finally:
            shop.close()
        self._has(file, nbytes)
        return file

    def _has(self, file: str, nbytes: int) -> None:
        if self._there is not None:
            self._there.add(f"{_BELOW}/{file}")
        self.wrote(file, nbytes)

    def write_table(self, directory: str, name: str, table: pa.Table) -> str:
        """Write a table that is whole already."""
        return self.write(directory, name, table.schema, batches_of(table))

    def adopt_soon(self, files: Mapping[Place, int | None], directory: str) -> None:
        """Call `adopt` for files, beside each other."""
        if len(files) > 1:
            with ThreadPoolExecutor(_AT_ONCE) as beside:
                list(beside.map(lambda path: self.adopt(path, directory, files[path]), files))

    def adopt(self, path: Place, directory: str, nbytes: int | None) -> str:
        """Link or copy a file that tasks wrote, unless it was done; return its file.

        The run's own goes with the run.

        Parameters
        ----------
        path : path
            Where it is.
        directory : str
            How its name is to begin.
        nbytes : int or None
            Its length, as its task told it.

        Raises
        ------
        CheckpointCorrupt
            If it has another one.
        StateError
            If it is not there, or cannot be linked or copied.
        """
        file = f"{directory}.{os.path.basename(path)}"
        if file in self._sizes:
            return file  # by this driver, and its name tells its bytes
        size = adopt_object(path, self._store, f"{_BELOW}/{file}", named=False)
        check_size(path, size, nbytes, RUN_AGAIN)
        self._has(file, size)
        return file

    def sync(self) -> None:
        """Make durable the names of what was written; an object is there when its put returns."""
        if isinstance(self._store, LocalStore):
            self._store.sync(_BELOW)

    def wrote(self, file: str, nbytes: int) -> None:
        """Skip the check of the content of a file that has just been written, and has a length."""
        self._verified.add(file)
        self._sizes[file] = nbytes

    def unnamed(self, number: int, named: Collection[str]) -> Collection[str]:
        """Return the keys of tables of before ``number - 1`` that no record names, each once.

        Parameters
        ----------
        number : int
            The last micro-batch that is done.
        named : collection of str
            The files that the records name which are kept.
        """
        if self._there is None:
            # It may lag: what it lacks is deleted by a later driver.
            self._there = {entry.key for entry in self._store.list(_BELOW)}
        kept = {f"{_BELOW}/{file}" for file in named}
        old = {key for key in self._there - kept if _number_in(key) < number - 1}
        self._there -= old
        return old

    def keep(self, files: Collection[str]) -> None:
        """Forget all other files."""
        self._verified.intersection_update(files)
        self._sizes = {file: nbytes for file, nbytes in self._sizes.items() if file in files}
        self._mapped = {file: table for file, table in self._mapped.items() if file in files}


def _number_in(key: str) -> int:
    """Return the micro-batch whose tables an object is among."""
    number = key.split("/")[1].partition(".")[0]
    return int(number) if number.isdecimal() else 1 << 63
