"""The Arrow files of a checkpoint's state: their names, and the checks of their content.

The driver of epoch 3 put ``state/7.e3.waiting-lines.<checksum>.arrow`` before it recorded the
decision of micro-batch 7, which names the table.  Only that driver can name it for the first time,
and only in that micro-batch.  Once micro-batch 7 is done, no later record can name a table that the
records do not name.  So even a driver that has not noticed a takeover can delete such a table.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import pyarrow as pa

from ackcore.spark.base.atomic import check_fence
from ackcore.spark.base.checksummed import (
    RUN_AGAIN,
    batches_of,
    check_data,
    check_size,
    table_in,
    write_batches,
)
from ackcore.spark.base.errors import corrupt
from ackcore.spark.base.schemas import FailedFile
from ackcore.spark.stores.interface import Store
from ackcore.spark.stores.local import LocalStore
from ackcore.spark.stores.run_files import adopt_object, making_in

_BELOW = "state"
#: Largest table in bytes that stays in memory after it was written to a bucket.
_SMALL = 1 << 20
#: Number of tasks' tables that are linked or copied concurrently.
_AT_ONCE = 16


P = TypeVar("P", bound=Sized)


class BySpout(Mapping[str, pa.Table], Generic[P]):
    """Records of a micro-batch in parts by spout; as a mapping it has one table for each spout.

    ``parts``: by spout, tables and files with the records; parts without rows are left out.
    """

    def __init__(self, parts: Mapping[str, Sequence[P]]) -> None:
        filled = {spout: tuple(part for part in some if len(part)) for spout, some in parts.items()}
        self.parts = {spout: some for spout, some in filled.items() if some}

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)

    def __repr__(self) -> str:
        rows = (f"{spout}: {sum(map(len, some))} rows" for spout, some in self.parts.items())
        return f"{type(self).__name__}({', '.join(rows)})"


@dataclass(frozen=True, slots=True)
class RecordFile:
    """Waiting or dead records of a spout in a file that a decision names."""

    cache: TableCache
    file: str  # relative to <checkpoint>/ackcore/state
    rows: int

    def __len__(self) -> int:
        return self.rows

    def body(self) -> dict[str, Any]:
        """Return the JSON object that describes the records in a decision."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "cache"}


class UnnamedFiles:
    """The files below a prefix of a store, of which `take` finds those that no record names.

    They are listed once.  Their names begin with the number of a micro-batch.  ``below``: the
    prefix, without the slash.
    """

    def __init__(self, store: Store, below: str) -> None:
        self._store = store
        self._below = below
        #: The known keys of existing files; None before the first list.
        self._there: set[str] | None = None

    def add(self, file: str) -> None:
        """Add a file that this driver has written."""
        if self._there is not None:
            self._there.add(f"{self._below}/{file}")

    def take(self, number: int, named: Collection[str]) -> set[str]:
        """Return the keys of files before micro-batch ``number - 1`` that no record names.

        These are files that were listed at first, or were passed to `add`. Each key is returned
        once: the caller deletes the file.

        ``number``: the last micro-batch that is done. ``named``: the files that records name.
        """
        kept = {f"{self._below}/{file}" for file in named}
        if self._there is None:
            # The list may lag: a later driver deletes the files that it lacks.
            self._there = {entry.key for entry in self._store.list(self._below)}
        self._there |= kept
        old = {key for key in self._there - kept if number_in(key) < number - 1}
        self._there -= old
        return old


def number_in(key: str) -> int:
    """Return the micro-batch number at the start of a file's name; a huge number if it has none.

    ``key``: the name, or a key that ends in it. File systems add names of their own, for files that
    are removed while open.
    """
    number = key.rpartition("/")[2].partition(".")[0]
    return int(number) if number.isdecimal() else 1 << 63


class TableCache:
    """The Arrow files below ``state``, called tables, each mapped and checked once.

    In a bucket a table is checked each time its bytes are fetched.  A table that stays in memory,
    or in a mapped file on this machine, is not fetched again.

    ``store``: the file system or the bucket, rooted at ``<checkpoint>/ackcore``. ``epoch``: the
    epoch of this driver. ``check``: whether to check the lengths and checksums of files on a file
    system.

    Attributes: ``unnamed``: the files that perhaps no record names.
    """

    def __init__(self, store: Store, epoch: int, *, check: bool = True):
        self._store = store
        self._epoch = epoch
        self._is_local = isinstance(store, LocalStore)
        self._check = check or not self._is_local
        self._verified: set[str] = set()
        self._mapped: dict[str, pa.Table] = {}
        #: The lengths of files in bytes, as written or as recorded.
        self._sizes: dict[str, int] = {}
        self.unnamed = UnnamedFiles(store, _BELOW)

    def expect(self, sizes: Mapping[str, int]) -> None:
        """Set the lengths of files in bytes. `read` raises for a file of another length."""
        self._sizes.update(sizes)

    def sizes(self, files: Iterable[str]) -> dict[str, int]:
        """Return the lengths of files in bytes, for a record, without files of unknown length."""
        return {file: self._sizes[file] for file in sorted(files) if file in self._sizes}

    def read(self, file: str, keep: bool = True) -> pa.Table:
        """Return the Arrow table in a file. With ``keep=False`` the cache does not keep it mapped.

        Raises CheckpointCorrupt or StateError if the file is missing, damaged or unreadable.
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
            raise corrupt(self.place(file), "is missing, though the checkpoint refers to it")
        check_size(self.place(file), data.size, nbytes)
        return data

    def _is_unchecked(self, file: str) -> bool:
        # Even if it was written or checked before: a bucket sends the bytes again.
        return self._check and not (self._is_local and file in self._verified)

    def checked(self, file: str, nbytes: int) -> str:
        """Return the path or URL of a file that is no Arrow table, and check the file.

        A file that this driver has written is not read for the check. Raises CheckpointCorrupt or
        StateError if the file is missing, damaged or unreadable.
        """
        if file not in self._verified or self._sizes.get(file) != nbytes:
            self.opened(file, nbytes)
        elif self._is_local:
            self._data(file, nbytes)  # checks the length: it may have been cut off since
        return self.place(file)

    def opened(self, file: str, nbytes: int) -> pa.NativeFile:
        """Check length and checksum of a Parquet file, and return it open for a reader.

        The checksum of a file on a file system is not checked twice. Raises CheckpointCorrupt or
        StateError if the file is missing, damaged or unreadable.
        """
        data = self._data(file, nbytes)
        check_data(data, self.place(file), content=self._is_unchecked(file))
        self._wrote(file, nbytes)
        return pa.BufferReader(data)

    def place(self, file: str) -> str:
        """Return the path or URL of a table, for messages."""
        return f"{self._store.url}/{_BELOW}/{file}"

    def size(self, file: str) -> int:
        """Return the length of a table's file in bytes; read the file if it is not known."""
        if file not in self._sizes:
            self.read(file)
        return self._sizes[file]

    def prefix_of(self, number: int) -> str:
        """Return the prefix of the names of a micro-batch's files."""
        return f"{number}.e{self._epoch}"

    def write(
        self, prefix: str, name: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]
    ) -> str:
        """Write a table to a file, and return its name, which is durable after the next `sync`."""
        if self._is_local:
            check_fence()
        with making_in(f"{self._store.url}/{_BELOW}") as made:
            file = write_batches(made, f"{prefix}.{name}", schema, batches, named=False)
            nbytes = (made / file).stat().st_size
            if nbytes <= _SMALL and not self._is_local:
                # It is read right away: this saves a request.
                data = pa.py_buffer((made / file).read_bytes())
                self._mapped[file] = table_in(data, self.place(file), check=False)
        self._has(file, nbytes)
        return file

    def _has(self, file: str, nbytes: int) -> None:
        self.unnamed.add(file)
        self._wrote(file, nbytes)

    def write_table(self, prefix: str, name: str, table: pa.Table) -> str:
        """Write a table that is in memory, as `write` does, and return its file name."""
        return self.write(prefix, name, table.schema, batches_of(table))

    def adopt_all(self, parts: Iterable[object], prefix: str) -> None:
        """Link or copy the files of tasks among ``parts`` in parallel, if there are several.

        Later calls of `adopt` then only return their names. ``prefix``: see `adopt`.
        """
        files = [part for part in parts if isinstance(part, FailedFile)]
        if len(files) > 1:
            with ThreadPoolExecutor(_AT_ONCE) as beside:
                list(beside.map(lambda file: self.adopt(file, prefix), files))

    def adopt(self, part: FailedFile, prefix: str) -> str:
        """Link or copy a file that tasks wrote, unless this was done before; return its new name.

        The original is removed with its run. Raises CheckpointCorrupt if the file has another
        length than its task reported. Raises StateError if it is missing, or cannot be linked or
        copied.

        ``prefix``: the prefix of its new name.
        """
        file = f"{prefix}.{os.path.basename(part.path)}"
        if file in self._sizes:
            return file  # by this driver, and its name holds its checksum
        size = adopt_object(part.path, self._store, f"{_BELOW}/{file}", named=False)
        check_size(part.path, size, part.nbytes, RUN_AGAIN)
        self._has(file, size)
        return file

    def sync(self) -> None:
        """Make the names of written files durable; in a bucket they are durable already."""
        if isinstance(self._store, LocalStore):
            self._store.sync(_BELOW)

    def _wrote(self, file: str, nbytes: int) -> None:
        """Set the length of a file that was just written or checked, and skip later checks."""
        self._verified.add(file)
        self._sizes[file] = nbytes

    def keep(self, files: Collection[str]) -> None:
        """Drop all but the given files from the cache; no file is deleted."""
        self._verified.intersection_update(files)
        self._sizes = {file: nbytes for file, nbytes in self._sizes.items() if file in files}
        self._mapped = {file: table for file, table in self._mapped.items() if file in files}
