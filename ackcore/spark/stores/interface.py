"""The interface of a store: objects by key, each whole or absent, and conditional puts.

A *key* is a relative path with slashes, ``state/7.e3.dead-lines.arrow``.  A store promises:

* A reader sees an object whole or not at all.  All readers see it once its put has returned.
* Of several puts with the same condition at most one succeeds.  The store checks the condition when
  the object gets its name, not before: it refuses a driver that slept for an hour in between.
* A put whose answer was lost is resolved: it returns if the stored bytes equal the bytes of the
  put, and raises `StoreConflict` if not.  So a writer that must recognize its *own* put adds
  random bytes to the object.
* A `list` may lag: it may lack objects that were just put, and hold objects that were just deleted.
  No caller may depend on an object being absent from a list, or present in it.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import pyarrow as pa

from ackcore.spark.base.errors import StateError

#: Larger objects are read in pieces of this size into a mapped file.
PIECE_BYTES = 32 << 20
#: Alignment of columns in bytes.
_ALIGNMENT = 64
#: Names that stores on file systems reserve.
_OWN = re.compile(r"\..+\.tmp|\d{12}\.version")


class StoreConflict(StateError):
    """The condition of a put does not hold: another writer wrote or deleted the object first."""


class StoreUnavailable(StateError):
    """A store did not answer, or answered every attempt with an internal error."""


class Stored(NamedTuple):
    """An object's bytes, and its version for `Store.replace`.

    Other bytes have another version. On a file system, an object that was deleted and is put again
    may get a version that it had before.
    """

    data: bytes
    version: str


class StoredObject(NamedTuple):
    """The key of an object in a list, and its size in bytes."""

    key: str
    size: int


@runtime_checkable
class Store(Protocol):
    """Objects by key. A store can be pickled and used by several threads, and holds no credentials.

    All methods raise `StateError` if the store refuses the operation, `StoreUnavailable` if it
    cannot be reached, and ValueError for an invalid key.
    """

    url: str  # the place of the store, in a form that can be shown to users

    def get(self, key: str) -> Stored | None:
        """Return an object, or None if it does not exist."""

    def read(self, key: str) -> pa.Buffer | None:
        """Return an object of any size, memory-mapped where possible; None if it does not exist.

        The object was written by `put` or `put_file`; `get` returns those of `replace`.  The store
        checks no checksum: the record that names an object also holds its checksum.  The
        buffer starts at a multiple of 64 bytes, so the columns of an Arrow IPC file are aligned.
        """

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> str:
        """Write an object, and return its version.

        ``if_absent``: whether to write only if no object has this key. An object with equal bytes
        is kept. Raises StoreConflict if the bytes of the object differ from ``data``.
        """

    def replace(self, key: str, data: bytes, version: str | None) -> str:
        """Replace one version of an object, and return the new version.

        An object that was written by `replace` once must be written by `replace` only. If the store
        has another version with the same bytes, that version is returned. Raises StoreConflict if
        its bytes differ from ``data``, or the object was deleted.

        ``version``: the current version, from `get` or `replace`; None if there is no object yet.
        """

    def put_file(self, key: str, path: Path, *, if_absent: bool = False) -> None:
        """Write an object of any size from a local file, and remove the file.

        ``if_absent``: whether to write only if no object has this key. If the object differs from
        the file, raises StoreConflict and keeps the file. In a bucket or HDFS any object conflicts
        with a file larger than 64 MiB. A bucket checks this before the upload of such a file; an
        object that is written during the upload is replaced.
        """

    def list(self, prefix: str = "") -> list[StoredObject]:
        """Return the objects with keys below ``prefix/`` or, without one, all; sorted by key.

        The list may lag behind puts and deletes.
        """

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects. Keys without an object are ignored."""


def version_if_equal(place: str | os.PathLike[str], found: Stored | None, data: bytes) -> str:
    """Return the version of an object if it has the bytes ``data`` of a put that was refused.

    Then an earlier attempt of the put has written it, and its answer was lost. Raises StoreConflict
    if the object differs. ``place``: its path or URL, for the message. ``found``: the object as it
    is now; None if it was deleted.
    """
    if found is not None and found.data == data:
        return found.version
    raise conflict(place, "deleted" if found is None else "written")


def conflict(place: str | os.PathLike[str], done: str = "written") -> StoreConflict:
    """Return the error of a put that was refused. ``done``: what another process did before it."""
    return StoreConflict(
        f"{os.fspath(place)} was not written: another process has {done} it meanwhile. Let that "
        "process run, or stop it and start this query again"
    )


def checked_key(key: str) -> str:
    """Return a valid key unchanged.

    Raises ValueError if the key is no relative path without ``.`` and ``..``, or has a part that is
    a name of ackcore's own files.
    """
    parts = key.split("/")
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise ValueError(
            "an object's key must be a relative path without empty parts, '.', '..' or NUL, got "
            f"{key!r}"
        )
    if any(_OWN.fullmatch(part) for part in parts):
        raise ValueError(
            "an object's key must not have a part like '.name.tmp' or '000000000001.version', "
            f"which are names of ackcore's own files, got {key!r}"
        )
    return key


def aligned(data: Any) -> pa.Buffer:
    """Return a buffer of bytes whose address is a multiple of 64, copied only if necessary."""
    buffer = pa.py_buffer(data)
    if buffer.address % _ALIGNMENT == 0:
        return buffer
    # Arrow's own allocations are aligned.
    copy = pa.allocate_buffer(buffer.size)
    memoryview(copy).cast("B")[:] = memoryview(buffer).cast("B")
    return copy


def mapped(read: Callable[[int, int], Any], size: int) -> pa.Buffer | None:
    """Return an object of ``size`` bytes as one buffer, mapped from a file without a name.

    ``read``: returns a piece of the object, given its start and its length. Returns None if it
    raises FileNotFoundError or IsADirectoryError, because the object is gone.
    """
    with tempfile.TemporaryFile() as file:
        for start in range(0, size, PIECE_BYTES):
            try:
                piece = read(start, PIECE_BYTES)
            except (FileNotFoundError, IsADirectoryError):
                return None
            file.write(piece)
        file.flush()
        with pa.memory_map(f"/proc/self/fd/{file.fileno()}") as source:
            return source.read_buffer()
