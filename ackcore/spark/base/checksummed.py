"""Files of a checkpoint with a checksum that is checked when they are read.

* A *record* is a line of JSON, followed by a line with its checksum:
  ``{"file": "head.json", "format": 1, ...}`` and ``blake2b <32 hex digits>``.  It contains its
  own name, so that a copy under another name is refused.
* A *table* is an Arrow IPC file, readable by any Arrow tool, with its checksum in its name
  (``waiting-lines.<32 hex digits>.arrow``).  So one name cannot have two contents.  Tables that
  tasks write may be large; they have the fingerprint of row files instead (16 hex digits), which
  takes a tenth of the time.  Dead letters that tasks write are Parquet files, named likewise.

A missing, added or changed byte makes either file damaged.
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

from ackcore._arrow.record_batches import rebatched
from ackcore._backend import fingerprint
from ackcore._files import sync_directory
from ackcore.spark.base.atomic import writing
from ackcore.spark.base.errors import WAY_OUT, CheckpointFormat, corrupt
from ackcore.spark.base.schemas import FORMAT

#: The end of the message about a damaged file of an undecided run.
RUN_AGAIN = "Start again: its micro-batch is not decided, and is run again"
#: The checksum in a file's name.
_NAMED = re.compile(r"\.([0-9a-f]{16}|[0-9a-f]{32})\.(?:arrow|parquet)")
#: The size in bytes of the pieces whose hashes, one after the other, make a fingerprint.
_PIECE = 1 << 20
#: The number of rows of a table that are written at a time: Arrow copies each batch.
_TABLE_ROWS = 1 << 20
#: The maximum size in bytes of a large file's pages in the page cache; they are reused.  To get a
#: page that was long unused takes longer than to fill and write it.
_CACHED = 1 << 23
#: The maximum number of bytes of a large file that wait for the disk.
_UNSYNCED = 1 << 26


def digest_of(data: bytes | memoryview | pa.Buffer) -> str:
    """Return the BLAKE2b checksum of bytes: 32 hex digits."""
    return blake2b(data, digest_size=16).hexdigest()


def checksum_of(data: bytes | memoryview | pa.Buffer, digits: int) -> str:
    """Return the checksum of bytes: `digest_of` if ``digits`` is 32, else 16 hex digits."""
    if digits == 32:
        return digest_of(data)
    checksum = _Fingerprint()
    checksum.update(memoryview(data))
    return checksum.hexdigest()


def checksum_in(name: str | os.PathLike[str]) -> str | None:
    """Return the 16 or 32 hex digits before ``.arrow`` or ``.parquet`` in a name, or None."""
    named = _NAMED.search(os.fspath(name))
    return None if named is None else named[1]


def record_bytes(name: str, body: Mapping[str, Any]) -> bytes:
    """Return the bytes of a record: JSON of ``body``, the name and the format; then a checksum."""
    head = {"file": name, "format": FORMAT}
    whole = {**head, **body, **head}
    line = json.dumps(whole, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode()
    return b"%s\nblake2b %s\n" % (line, digest_of(line).encode())


def record_in(data: bytes, path: str | os.PathLike[str], name: str) -> dict[str, Any]:
    """Return the JSON object that `record_bytes` has stored in the bytes of an object.

    Raises CheckpointCorrupt if they are damaged, or contain a record of another name than ``name``;
    CheckpointFormat if it has another `FORMAT`. ``path``: the path or URL, for messages.
    """
    line, _, rest = data.partition(b"\n")
    if rest != b"blake2b %s\n" % digest_of(line).encode():
        raise corrupt(
            path, f"is damaged: its {len(data)} bytes are not one line followed by its checksum"
        )
    body: dict[str, Any] = json.loads(line)
    if body["format"] != FORMAT:
        raise CheckpointFormat(
            f"{path} has format {body['format']}, and this version of ackcore reads only format "
            f"{FORMAT}: another version wrote it. Install that version, or use a new checkpoint"
        )
    if body["file"] != name:
        raise corrupt(path, f"contains the record {body['file']}, so it was copied or renamed")
    return body


class _Fingerprint:
    """A checksum of 16 hex digits, with methods as in `blake2b`; ``hexdigest`` ends the updates."""

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

    def hexdigest(self) -> str:
        if self._rest:
            self._add(bytes(self._rest))
            self._rest.clear()
        return f"{self._so_far & 0xFFFFFFFFFFFFFFFF:016x}"


class _Hashed:
    """A file that Arrow writes to. Adds each write to ``checksum``.

    If ``passing``, written pages are dropped from the page cache.
    """

    def __init__(self, file: BinaryIO, checksum: blake2b | _Fingerprint, passing: bool):
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
        """Write all bytes to the disk; drop those of a large file from the page cache."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._unsynced = 0
        if self._passed_on:
            self._pass_on()

    def _pass_on(self) -> None:
        """Start writing to the disk, and drop the pages that are already there from the page cache.

        The task does not wait for the disk: other pages are dropped the next time.
        """
        self._file.flush()
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self._cached, self._passed_on = 0, True


def batches_of(table: pa.Table) -> Iterator[pa.RecordBatch]:
    """Yield a table in batches of 2**20 rows, or of 256 MiB if the rows are long."""
    return in_few(table.to_batches(max_chunksize=_TABLE_ROWS))


def in_few(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Join and cut ``batches`` into batches of 2**20 rows, or of 256 MiB if the rows are long."""
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
    """Write batches as ``<name>.<checksum>.arrow`` into a directory, and return that name.

    The checksum of a ``large`` table has 16 hex digits, and takes less time.  A table that is not
    ``synced`` may be lost if the machine stops.  With ``named=False`` its name becomes durable only
    when the caller syncs the directory.  Raises StateError if the file cannot be written.
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
    """A file that is written piece by piece and gets the checksum of its content in its name.

    The constructor creates it under a temporary name. ``name``, ``ending``: the parts of the final
    name, ``<name>.<checksum>.<ending>``. ``large``: whether the checksum has 16 hex digits instead
    of 32. ``synced``: whether the file must survive a stop of the machine.

    Attributes: ``sink``: the open file to write to.
    """

    def __init__(
        self, directory: Path, name: str, ending: str, *, large: bool = False, synced: bool = True
    ) -> None:
        self._directory = directory
        self._name = name
        self._ending = ending
        self._synced = synced
        self._checksum = _Fingerprint() if large else blake2b(digest_size=16)
        self._temporary = directory / f".{name}.{secrets.token_hex(8)}.tmp"
        with self.writing():
            self._file = open(self._temporary, "wb")  # noqa: SIM115 # until `finish` or `discard`
        self._hashed = _Hashed(self._file, self._checksum, passing=large and synced)
        self.sink = pa.PythonFile(self._hashed, "w")

    def writing(self) -> contextlib.AbstractContextManager[None]:
        """Convert OSErrors in a block to StateErrors that name the file."""
        return writing(self._directory / self._name)

    def finish(self, *, named: bool = True) -> str:
        """Close the file and rename it; return its final name, without the directory.

        ``named``: whether to sync the directory of a synced file. Otherwise the caller does.
        """
        with self.writing():
            if self._synced:
                self._hashed.sync()
            self._file.close()
            name = f"{self._name}.{self._checksum.hexdigest()}.{self._ending}"
            os.replace(self._temporary, self._directory / name)
            if self._synced and named:
                sync_directory(self._directory)
        return name

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()

    def discard(self) -> None:
        """Close the file, and delete it unless it has its final name."""
        self.close()
        self._temporary.unlink(missing_ok=True)


def table_in(
    data: pa.Buffer, path: str | os.PathLike[str], *, check: bool = True, way_out: str = WAY_OUT
) -> pa.Table:
    """Return the table in the bytes of an object. Raises CheckpointCorrupt if they are damaged.

    ``path``: the path or URL of the object. ``check``: whether to compare the bytes with the
    checksum in its name. ``way_out``: the sentence in the error that says what to do.
    """
    check_data(data, path, content=check, way_out=way_out)
    try:
        table: pa.Table = pa.ipc.open_file(pa.BufferReader(data)).read_all()
        # Without a check of the checksum, damage must raise here, where the file is known.
        len(table.column_names)
        table.validate()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, UnicodeDecodeError, OSError) as error:
        raise corrupt(path, f"is damaged: {error}", way_out) from error
    return table


def check_data(
    data: pa.Buffer, path: str | os.PathLike[str], *, content: bool = True, way_out: str = WAY_OUT
) -> None:
    """Raise CheckpointCorrupt if the bytes of an object do not match the checksum in its name.

    ``content``: whether to read the bytes; if False, the name must only have a checksum.
    ``way_out``: the sentence in the error that says what to do.
    """
    named = checksum_in(path)
    if named is None:
        what = "has no checksum in its name, as tables of ackcore have"
        raise corrupt(path, what, way_out)
    if content and checksum_of(data, len(named)) != named:
        what = f"is damaged: its {data.size} bytes do not match the checksum in its name"
        raise corrupt(path, what, way_out)


def check_size(
    path: str | os.PathLike[str], size: int, nbytes: int | None, way_out: str = WAY_OUT
) -> None:
    """Raise `CheckpointCorrupt` if a file's size differs from ``nbytes``; None: it may be any."""
    if nbytes is not None and size != nbytes:
        raise corrupt(path, f"is damaged: it has {size} bytes instead of {nbytes}", way_out)
