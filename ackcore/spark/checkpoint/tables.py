"""The tables of a checkpoint: where they are, and that each is what was written."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import pyarrow as pa

from ackcore._files.durable import sync_directory
from ackcore.spark.base.atomic import make_directory, writing
from ackcore.spark.base.checksummed import (
    RUN_AGAIN,
    batches_of,
    check_file,
    check_size,
    read_table,
    write_batches,
)
from ackcore.spark.base.paths import Place


class TableCache:
    """The tables below a directory, each of them mapped and checked once.

    Parameters
    ----------
    root : Path
        What their names start from.
    check : bool, default True
        Whether lengths and checksums are looked at.
    """

    def __init__(self, root: Path, *, check: bool = True):
        self.root = root
        self._check = check
        self._verified: set[str] = set()
        self._mapped: dict[str, pa.Table] = {}
        #: The lengths of files, as they were written or as a record says.
        self._sizes: dict[str, int] = {}

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
            As `read_table`.
        """
        if file in self._mapped:
            return self._mapped[file]
        table = self._load(file, self._check and file not in self._verified)
        self._verified.add(file)
        if keep:
            self._mapped[file] = table
        return table

    def _load(self, file: str, check: bool) -> pa.Table:
        nbytes = self._sizes.get(file) if self._check else None
        return read_table(self.root / file, check=check, nbytes=nbytes)

    def checked(self, file: str, nbytes: int) -> Place:
        """Return where a file is that is no table, once it has its length and its checksum.

        Raises
        ------
        CheckpointCorrupt, StateError
            As `read_table`.
        """
        path = self.root / file
        check_file(path, nbytes, self._check and file not in self._verified)
        self._verified.add(file)
        return path

    def opened(self, file: str, nbytes: int) -> Path | pa.NativeFile:
        """Return what `checked` looks at as something that Parquet is read from."""
        path = self.checked(file, nbytes)
        assert isinstance(path, Path)
        return path

    def place(self, file: str) -> str:
        """Return where a table is, for people."""
        return str(self.root / file)

    def size(self, file: str) -> int:
        """Return how many bytes a table has."""
        known = self._sizes.get(file)
        return (self.root / file).stat().st_size if known is None else known

    def directory_of(self, number: int) -> str:
        """Return where the tables of a micro-batch go, from the root; it is there."""
        make_directory(self.root / str(number))
        return str(number)

    def write(
        self, directory: str, name: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]
    ) -> str:
        """Write a table, and return its file from the root."""
        file = f"{directory}/{write_batches(self.root / directory, name, schema, batches)}"
        self.wrote(file, (self.root / file).stat().st_size)
        return file

    def write_table(self, directory: str, name: str, table: pa.Table) -> str:
        """Write a table that is whole already."""
        return self.write(directory, name, table.schema, batches_of(table))

    def adopt_soon(self, files: Mapping[Place, int | None], directory: str) -> None:
        """Say what `adopt` will be called with, where it is sooner done for all at once."""

    def adopt(self, path: Place, directory: str, nbytes: int | None) -> str:
        """Move a file that tasks wrote below the root, unless it is there; return its name there.

        Parameters
        ----------
        path : path
            Where it is.
        directory : str
            Where it is to be, from the root.
        nbytes : int or None
            Its length, as its task told it.

        Raises
        ------
        CheckpointCorrupt
            If it has another one.
        StateError
            If it is not there, or cannot be moved.
        """
        file = f"{directory}/{os.path.basename(path)}"
        target = self.root / file
        with writing(target):
            # By a rename: where another driver has taken over, there is no such path any more.
            try:
                os.rename(path, target)
            except FileNotFoundError:
                if not target.exists():
                    raise
            size = target.stat().st_size
        check_size(target, size, nbytes, RUN_AGAIN)
        self.wrote(file, size)
        return file

    def sync(self, directory: str) -> None:
        """Make durable the names in a directory."""
        with writing(self.root / directory):
            sync_directory(self.root / directory)

    def wrote(self, file: str, nbytes: int) -> None:
        """Skip the check of the content of a file that has just been written, and has a length."""
        self._verified.add(file)
        self._sizes[file] = nbytes

    def unnamed(self, number: int, named: Collection[str]) -> Collection[str]:
        """Return the keys of tables of before ``number - 1`` that go; here they go with decisions.

        Parameters
        ----------
        number : int
            The last micro-batch that is done.
        named : collection of str
            The files that the records name which are kept.
        """
        return ()

    def keep(self, files: Collection[str]) -> None:
        """Forget all other files."""
        self._verified.intersection_update(files)
        self._sizes = {file: nbytes for file, nbytes in self._sizes.items() if file in files}
        self._mapped = {file: table for file, table in self._mapped.items() if file in files}
