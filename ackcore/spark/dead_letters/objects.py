"""A file of dead letters that is an object in a bucket."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import pyarrow as pa

from ackcore.spark.base.checksummed import checksum_of
from ackcore.spark.stores.interface import Store

#: What was read or put last stays, up to so many bytes: a file is opened once for each of its
#: columns that are looked at, and a driver merges what it has put.
_KEPT_BYTES = 1 << 25


class Objects:
    """Objects of a store, each read and checked whole; the last ones are kept.

    Parameters
    ----------
    store : Store
        Where they are.
    find : callable, optional
        Returns what has taken the place of a file that is not there any more, None if nothing has.
    """

    def __init__(
        self, store: Store, find: Callable[[ObjectFile], ObjectFile | None] | None = None
    ) -> None:
        self.store = store
        self.find = find
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, pa.Buffer] = OrderedDict()

    def read(self, key: str, size: int, digest: str) -> pa.Buffer:
        """Return an object.

        Raises
        ------
        FileNotFoundError
            If it is not there.
        pyarrow.ArrowInvalid
            If it is not as it was written.
        """
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        data = self.store.read(key)
        if data is None:
            raise FileNotFoundError("it is missing, though a record names it")
        if data.size != size or checksum_of(data, len(digest)) != digest:
            raise pa.ArrowInvalid(f"its {data.size} bytes are not those that are on record")
        self.keep(key, data)
        return data

    def keep(self, key: str, data: pa.Buffer) -> None:
        """Have an object at hand that is as it must be."""
        with self._lock:
            self._kept[key] = data
            while len(self._kept) > 1 and sum(it.size for it in self._kept.values()) > _KEPT_BYTES:
                self._kept.popitem(last=False)


@dataclass(frozen=True, slots=True)
class ObjectFile:
    """A file of letters in a bucket, with what is on record of it."""

    objects: Objects = field(compare=False, repr=False)
    key: str
    size: int
    digest: str

    @property
    def name(self) -> str:
        """The last part of its key."""
        return self.key.rpartition("/")[2]

    def __fspath__(self) -> str:
        """Return where it is, for people."""
        return f"{self.objects.store.url}/{self.key}"

    def open(self) -> pa.NativeFile:
        """Open it to be read, checked; or what is now in its place, row by row the same letters."""
        try:
            data = self.objects.read(self.key, self.size, self.digest)
        except FileNotFoundError:
            now = None if self.objects.find is None else self.objects.find(self)
            if now is None:
                raise
            data = self.objects.read(now.key, now.size, now.digest)
        return pa.BufferReader(data)
