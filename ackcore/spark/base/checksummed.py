"""Files of a checkpoint that carry their checksum, and are checked by it when they are read.

* A *record* (JSON) is one line, and after it a line with the checksum of the first:
  ``{"file": "batches/7.plan", "format": 1, ...}`` and ``blake2b <32 hex digits>``.  It names
  itself, so that a copy under another name is not taken for it.
* A *table* is a plain Arrow IPC file that any tool opens; its checksum is part of its name
  (``waiting-lines.<32 hex digits>.arrow``), so it cannot be in two states under one name.  Those
  that tasks write, of any size, have the fingerprint of row files there (16 hex digits), which
  takes a tenth of the time.  The dead letters that tasks write are Parquet, and named alike.

Both are damaged if a byte is missing, added or changed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from ackcore._files.durable import sync_directory
from ackcore._shuffle import fingerprint
from ackcore.arrow import rebatched
from ackcore.spark.base.atomic import write_file, writing
from ackcore.spark.base.errors import WAY_OUT, CheckpointNewer, StateError, corrupt

#: The format of a checkpoint's files.
FORMAT = 1
#: Ends the message about a file of a run that is not decided.
RUN_AGAIN = "Start again: its micro-batch is not decided, and is run once more"
#: A file's checksum: the hex digits in its name.
_NAMED = re.compile(r"\.([0-9a-f]{16}|[0-9a-f]{32})\.(?:arrow|parquet)")
#: A table's bytes are hashed so many at a time: its fingerprint is that of these pieces in a row.
_PIECE = 1 << 20
#: What `write_table` writes at a time: Arrow hands each batch over in memory of its own.
_TABLE_ROWS = 1 << 20
#: Of a large file so much is in the page cache, whose pages serve for what comes next: a page that
#: was not used for long takes longer to be had than to be filled and written.
_CACHED = 1 << 23
#: And no more than so much of it waits for the disk.
_UNSYNCED = 1 << 26


def digest_of(data: bytes | memoryview | pa.Buffer) -> str:
    """Return the checksum of bytes: 32 hex digits."""
    return blake2b(data, digest_size=16).hexdigest()


def checksum_of(data: bytes | memoryview | pa.Buffer, digits: int) -> str:
    """Return the checksum of bytes that has so many hex digits: a digest, or a fingerprint."""
    checksum = _Digest() if digits == 32 else _Fingerprint()
    view = memoryview(data)
    for start in range(0, len(view), _PIECE):
        checksum.update(view[start : start + _PIECE])
    return checksum.hex()


def checksum_in(name: str | os.PathLike[str]) -> str | None:
    """Return the checksum that a file has in its name, None if it has none."""
    named = _NAMED.search(os.fspath(name))
    return None if named is None else named[1]


def write_record(
    path: Path,
    name: str,
    body: Mapping[str, Any],
    *,
    once: bool = False,
    made_in: Path | None = None,
) -> None:
    """Write a record that calls itself ``name``, as `write_file` does."""
    said = record_bytes(name, body)
    write_file(path, lambda file: file.write(said), once=once, made_in=made_in)


def record_bytes(name: str, body: Mapping[str, Any]) -> bytes:
    """Return a record that calls itself ``name`` as it is written."""
    whole = {"file": name, "format": FORMAT, **body}
    line = json.dumps(whole, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode()
    return b"%s\nblake2b %s\n" % (line, digest_of(line).encode())


def read_record(path: Path, name: str) -> dict[str, Any] | None:
    """A record, or None if there is no such file, nor its directory.

    Raises
    ------
    CheckpointCorrupt
        If it is not as it was written, or is another record.
    CheckpointNewer
        If a newer ackcore wrote it.
    """
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StateError(f"{path} cannot be read: {error.strerror or error}") from error
    return record_in(data, path, name)


def record_in(data: bytes, path: str | os.PathLike[str], name: str) -> dict[str, Any]:
    """Return the record that a file holds; raises as `read_record` does."""
    line, _, rest = data.partition(b"\n")
    if rest != b"blake2b %s\n" % digest_of(line).encode():
        raise corrupt(
            path,
            f"is damaged: its {len(data)} bytes must be one line and the checksum of that line",
        )
    body: dict[str, Any] = json.loads(line)
    if body["format"] > FORMAT:
        raise CheckpointNewer(
            f"{path} has format {body['format']}, and this ackcore knows formats up to {FORMAT}: "
            "a newer one wrote it. Start the query with that version again"
        )
    if body["file"] != name:
        raise corrupt(path, f"calls itself {body['file']}, so it was copied or renamed")
    return body


class _Digest:
    """blake2b of what comes."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=16)

    def update(self, data: memoryview) -> None:
        self._hash.update(data)

    def hex(self) -> str:
        return self._hash.hexdigest()


class _Fingerprint:
    """`fingerprint` of what comes, whatever pieces it comes in."""

    def __init__(self) -> None:
        self._so_far = 0
        self._rest = bytearray()

    def update(self, data: memoryview) -> None:
        if self._rest:
            missing = _PIECE - len(self._rest)
            self._rest += data[:missing]
            data = data[missing:]
            if len(self._rest) < _PIECE:
                return
            self._add(bytes(self._rest))
            self._rest.clear()
        whole = len(data) - len(data) % _PIECE
        for start in range(0, whole, _PIECE):
            self._add(data[start : start + _PIECE])
        self._rest += data[whole:]

    def _add(self, data: bytes | memoryview) -> None:
        self._so_far = fingerprint(pa.py_buffer(data), self._so_far)

    def hex(self) -> str:
        if self._rest:
            self._add(bytes(self._rest))
            self._rest.clear()
        return f"{self._so_far & 0xFFFFFFFFFFFFFFFF:016x}"


class _Hashed:
    """A file with the checksum of what was written to it, as far as Arrow needs a file."""

    def __init__(self, file: BinaryIO, checksum: _Digest | _Fingerprint, passing: bool):
        self._file = file
        self._checksum = checksum
        self._passing = passing and hasattr(os, "posix_fadvise")
        self._cached = self._unsynced = 0
        self._passed_on = False
        self.closed = False

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._checksum.update(view)
        self._file.write(view)
        self._cached += view.nbytes
        self._unsynced += view.nbytes
        if self._passing and self._cached >= _CACHED:
            self._pass_on()
            if self._unsynced >= _UNSYNCED:
                self.sync()
        return view.nbytes

    def sync(self) -> None:
        """Have what was written on the disk; of a large file no more stays in memory."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._unsynced = 0
        if self._passed_on:
            self._pass_on()

    def _pass_on(self) -> None:
        """Start writing to the disk what was written, and drop from memory what is there.

        The task does not wait for it: what is not on the disk yet is dropped the next time.
        """
        self._file.flush()
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self._cached, self._passed_on = 0, True


def _checksum_of(path: Path, digits: int) -> str:
    """Return the checksum of a file; its bytes do not stay in memory."""
    checksum = _Digest() if digits == 32 else _Fingerprint()
    piece = memoryview(bytearray(_PIECE))
    with open(path, "rb", buffering=0) as file:
        while n := file.readinto(piece):
            checksum.update(piece[:n])
    return checksum.hex()


def write_table(directory: Path, name: str, table: pa.Table) -> str:
    """Write a table as ``<name>.<checksum>.arrow`` and return that name."""
    return write_batches(directory, name, table.schema, batches_of(table))


def batches_of(table: pa.Table) -> Iterator[pa.RecordBatch]:
    """Yield a table in few batches, whatever pieces it came in: a filter makes as many again."""
    return in_few(table.to_batches(max_chunksize=_TABLE_ROWS))


def in_few(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield batches as tables have them: the bytes of a table do not depend on what it came in."""
    return rebatched(batches, _TABLE_ROWS)


def write_batches(
    directory: Path,
    name: str,
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    *,
    large: bool = False,
    synced: bool = True,
    named: bool = True,
) -> str:
    """Write a table batch by batch, as `write_table` does; a ``large`` one with a fingerprint.

    One that is not ``synced`` may be gone when the machine stops; the name of one that is not
    ``named`` lasts once its directory is synced.
    """
    made = NamedByChecksum(directory, name, "arrow", large=large, synced=synced)
    try:
        with made.writing(), pa.ipc.new_file(made.sink, schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
        return made.finish(named=named)
    except Exception:
        made.discard()
        raise
    finally:
        made.close()


class NamedByChecksum:
    """A file that is written piece by piece, and has the checksum of all of it in its name.

    Parameters
    ----------
    directory : Path
        Where it is to be.
    name, ending : str
        Its name is to be ``<name>.<checksum>.<ending>``.
    large : bool, default False
        Whether the checksum is a fingerprint.
    synced : bool, default True
        Whether it is to outlast the machine's stop.

    Attributes
    ----------
    sink : pyarrow.NativeFile
        What is written to it is in the file.
    """

    def __init__(
        self, directory: Path, name: str, ending: str, *, large: bool = False, synced: bool = True
    ) -> None:
        self._directory = directory
        self._name = name
        self._ending = ending
        self._synced = synced
        self._checksum = _Fingerprint() if large else _Digest()
        self._temporary = directory / f".{name}.{secrets.token_hex(8)}.tmp"
        with self.writing():
            self._file = open(self._temporary, "wb")  # noqa: SIM115 # until `finish` or `discard`
        self._hashed = _Hashed(self._file, self._checksum, passing=large and synced)
        self.sink = pa.PythonFile(self._hashed, "w")

    def writing(self) -> contextlib.AbstractContextManager[None]:
        """Raise what goes wrong within as an error that names the file."""
        return writing(self._directory / self._name)

    def finish(self, *, named: bool = True) -> str:
        """Give it its name, which is returned; nothing is written after that."""
        with self.writing():
            if self._synced:
                self._hashed.sync()
            self._file.close()
            name = f"{self._name}.{self._checksum.hex()}.{self._ending}"
            os.replace(self._temporary, self._directory / name)
            if self._synced and named:
                sync_directory(self._directory)
        return name

    def close(self) -> None:
        """Close it, whatever was written; twice is fine."""
        self._file.close()

    def discard(self) -> None:
        """Leave nothing of it, unless it has its name."""
        self.close()
        self._temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _reading(path: Path, way_out: str) -> Iterator[None]:
    """Raise what is wrong with a table's file as an error that names it."""
    try:
        yield
    except FileNotFoundError:
        raise corrupt(path, "is missing, though a record names it", way_out) from None
    except _DAMAGE as error:
        raise corrupt(path, f"is damaged: {error}", way_out) from error
    except OSError as error:
        raise StateError(f"{path} cannot be read: {error}") from error


def table_in(
    data: pa.Buffer,
    path: str | os.PathLike[str],
    *,
    check: bool = True,
    way_out: str = WAY_OUT,
) -> pa.Table:
    """Return the table that an object holds, by the name of which it is checked.

    Raises
    ------
    CheckpointCorrupt
        If it is not as it was written.
    """
    check_data(data, path, content=check, way_out=way_out)
    try:
        return _table_of(data)
    except (*_DAMAGE, OSError) as error:
        raise corrupt(path, f"is damaged: {error}", way_out) from error


#: What Arrow raises over bytes that it did not write.
_DAMAGE = (pa.ArrowInvalid, pa.ArrowNotImplementedError, UnicodeDecodeError)


def _table_of(data: pa.Buffer) -> pa.Table:
    table: pa.Table = pa.ipc.open_file(pa.BufferReader(data)).read_all()
    # What is damaged where no checksum was looked at is to fail here, and be named.
    len(table.column_names)
    table.validate()
    return table


def check_data(
    data: pa.Buffer,
    path: str | os.PathLike[str],
    *,
    content: bool = True,
    way_out: str = WAY_OUT,
) -> None:
    """Raise unless the bytes of an object have the checksum in its name.

    Raises
    ------
    CheckpointCorrupt
        If they are not as they were written.
    """
    named = checksum_in(path)
    if named is None:
        what = "does not carry a checksum in its name, as tables of ackcore do"
        raise corrupt(path, what, way_out)
    if content and checksum_of(data, len(named)) != named:
        what = f"is damaged: its {data.size} bytes do not have the checksum in its name"
        raise corrupt(path, what, way_out)


def check_size(
    path: str | os.PathLike[str], size: int, nbytes: int | None, way_out: str = WAY_OUT
) -> None:
    """Raise `CheckpointCorrupt` unless a file has the length that a record says, if one does."""
    if nbytes is not None and size != nbytes:
        raise corrupt(path, f"is damaged: it has {size} bytes, and had {nbytes}", way_out)


def read_table(
    path: Path, *, check: bool = True, nbytes: int | None = None, way_out: str = WAY_OUT
) -> pa.Table:
    """A table, its columns in a memory map of the file.

    Parameters
    ----------
    path : Path
        Its file.
    check : bool, default True
        Whether its checksum is looked at.
    nbytes : int, optional
        Its length, if a record says it.
    way_out : str, optional
        Ends the message if it is damaged: a sentence without the full stop.

    Raises
    ------
    CheckpointCorrupt
        If it is missing or not as it was written.
    StateError
        If the system does not let it be read.
    """
    named = _NAMED.search(path.name)
    with _reading(path, way_out):
        with pa.memory_map(os.fspath(path)) as source:
            data = source.read_buffer()
        check_size(path, data.size, nbytes, way_out)
        if named is None:
            what = "does not carry a checksum in its name, as tables of ackcore do"
            raise corrupt(path, what, way_out)
        if check and _checksum_of(path, len(named[1])) != named[1]:
            what = f"is damaged: its {data.size} bytes do not have the checksum in its name"
            raise corrupt(path, what, way_out)
        return _table_of(data)
