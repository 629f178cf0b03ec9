"""The files of a store of dead letters, as objects. `letter_store` names them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import BinaryIO, NamedTuple

import pyarrow as pa

from ackcore.spark.base.checksummed import checksum_of
from ackcore.spark.base.errors import StateError
from ackcore.spark.base.paths import Place
from ackcore.spark.stores.interface import Store

#: Size of the cache in bytes. A file is opened once for each column that is read, and a driver
#: merges files that it has put.
_KEPT_BYTES = 1 << 25


class Objects:
    """A reader of a store's objects, which verifies each one and caches the last ones.

    ``find``: returns the file that has replaced a missing one, or None.
    """

    def __init__(
        self, store: Store, find: Callable[[ObjectFile], ObjectFile | None] | None = None
    ) -> None:
        self.store = store
        self.find = find
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, pa.Buffer] = OrderedDict()

    def read(self, key: str, size: int, digest: str) -> pa.Buffer:
        """Return the bytes of an object. Raises FileNotFoundError if the object is missing. Raises
        pyarrow.ArrowInvalid if its length or checksum differs from the recorded one.
        """
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        data = self.store.read(key)
        if data is None:
            raise FileNotFoundError("it is missing, though it was recorded")
        if data.size != size or checksum_of(data, len(digest)) != digest:
            raise pa.ArrowInvalid(
                f"the length or checksum of its {data.size} bytes differs from the recorded one"
            )
        self.keep(key, data)
        return data

    def keep(self, key: str, data: pa.Buffer) -> None:
        """Cache the bytes of a verified object."""
        with self._lock:
            self._kept[key] = data
            while len(self._kept) > 1 and sum(it.size for it in self._kept.values()) > _KEPT_BYTES:
                self._kept.popitem(last=False)


@dataclass(frozen=True, slots=True)
class ObjectFile:
    """A file of letters in a store, with its recorded length and checksum."""

    objects: Objects = field(compare=False, repr=False)
    key: str
    size: int
    digest: str

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition("/")[2]

    def __fspath__(self) -> str:
        """Return the path or URL of the file, for messages."""
        return f"{self.objects.store.url}/{self.key}"

    def open(self) -> pa.NativeFile:
        """Open the file, or the one that replaced it and has the same letters in the same rows."""
        try:
            data = self.objects.read(self.key, self.size, self.digest)
        except FileNotFoundError:
            now = None if self.objects.find is None else self.objects.find(self)
            if now is None:
                raise
            data = self.objects.read(now.key, now.size, now.digest)
        return pa.BufferReader(data)


#: Writes a file of letters.
Fill = Callable[[BinaryIO], object]


class LetterFile(NamedTuple):
    """A file of letters, with its first and last micro-batch and the number of merges that led to
    it.

    The unmerged letters of one micro-batch may be in several files: see `position_of`.
    """

    path: ObjectFile
    first: int
    last: int
    level: int


class NewFile(NamedTuple):
    """A file of letters to write: the position of its first letter, and the function that writes
    it.

    ``source`` is the path or URL of an existing file with the same content, of ``nbytes`` bytes.
    Its name contains its checksum, and it is never rewritten.
    """

    position: int
    fill: Fill
    source: Place | None = None
    nbytes: int = 0


class FileGroup(NamedTuple):
    """The files of a spout whose letters have the same columns."""

    spout: str
    files: tuple[LetterFile, ...]
    payload: pa.StructType


class NotesChanged(StateError):
    """Another process added a note after the notes were read. Read them again and retry."""
