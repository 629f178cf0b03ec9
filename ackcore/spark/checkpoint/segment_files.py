"""The files of tables: ``tables/<table>/N.eE.<checksum>.arrow`` in a checkpoint's store.

The rules of `ackcore.spark.checkpoint.table_cache` apply.  A driver of epoch E puts a file in
micro-batch N before it records the tables of N, and no other driver and no later record can name
the file for the first time.  Readers check each file once per process: its length, and the checksum
in its name.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable
from typing import Any

import pyarrow as pa

from ackcore.spark.base.checksummed import check_data, check_size, checksum_of
from ackcore.spark.base.errors import corrupt
from ackcore.spark.checkpoint.unnamed_files import UnnamedFiles
from ackcore.spark.stores.interface import Store
from ackcore.spark.stores.local import LocalStore
from ackcore.tables.table_compaction import SegmentInfo

BELOW = "tables"
#: The maximum number of bytes of segments from buckets that a process keeps.
_KEPT_BYTES = 1 << 28
#: The maximum number of files that a process knows to be undamaged.
_KNOWN = 1 << 14


class _Checked:
    """The segments that this process has checked; of a bucket, also their bytes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: OrderedDict[tuple[str, int], pa.Buffer | None] = OrderedDict()
        self._nbytes = 0

    def get(self, place: tuple[str, int]) -> tuple[bool, pa.Buffer | None]:
        """Return whether a file was checked, and its bytes if they are kept."""
        with self._lock:
            if place not in self._places:
                return False, None
            self._places.move_to_end(place)
            return True, self._places[place]

    def add(self, place: tuple[str, int], data: pa.Buffer | None) -> None:
        """Note that a file was checked, and keep its bytes if they are given."""
        with self._lock:
            old = self._places.pop(place, None)
            self._nbytes += (0 if data is None else data.size) - (0 if old is None else old.size)
            self._places[place] = data
            while self._nbytes > _KEPT_BYTES or len(self._places) > _KNOWN:
                _, gone = self._places.popitem(last=False)
                self._nbytes -= 0 if gone is None else gone.size


_CHECKED = _Checked()


class SegmentFiles:
    """The files of a checkpoint's tables; it can be pickled.

    ``store``: the file system or the bucket, rooted at ``<checkpoint>/ackcore``. ``epoch``: the
    epoch of the driver.
    """

    def __init__(self, store: Store, epoch: int) -> None:
        self._store = store
        self._epoch = epoch
        self._unnamed = UnnamedFiles(store, BELOW)

    def __reduce__(self) -> tuple[Any, ...]:
        return SegmentFiles, (self._store, self._epoch)

    def place(self, file: str) -> str:
        """Return the path or URL of a file, for messages."""
        return f"{self._store.url}/{BELOW}/{file}"

    def put(self, table: str, number: int, data: bytes, rows: int, lo: int, hi: int) -> SegmentInfo:
        """Write a segment of micro-batch ``number``, durably, and return its entry for a record."""
        file = f"{table}/{number}.e{self._epoch}.{checksum_of(data, 16)}.arrow"
        self._store.put(f"{BELOW}/{file}", data)
        self._unnamed.add(file)
        return SegmentInfo(file, rows, len(data), lo, hi)

    def read(self, segment: SegmentInfo) -> pa.Buffer:
        """Return the bytes of a segment, memory-mapped where possible. Raises CheckpointCorrupt if
        the file is missing or damaged. Raises StateError if it cannot be read.
        """
        place = self.place(segment.file)
        is_local = isinstance(self._store, LocalStore)
        checked, data = _CHECKED.get((place, segment.nbytes))
        if data is not None:
            return data
        data = self._store.read(f"{BELOW}/{segment.file}")
        if data is None:
            raise self._missing(segment)
        check_size(place, data.size, segment.nbytes)
        # The bytes of a bucket are sent again at each read.
        check_data(data, place, content=not (checked and is_local))
        _CHECKED.add((place, segment.nbytes), None if is_local else data)
        return data

    def check_all(self, table: str, segments: Iterable[SegmentInfo]) -> None:
        """Check that the segments of a table exist. Raises CheckpointCorrupt if one is missing."""
        there = {each.key for each in self._store.list(f"{BELOW}/{table}")}
        for segment in segments:
            key = f"{BELOW}/{segment.file}"
            # A list may lag.
            if key not in there and self._store.read_range(key, 0, 1) is None:
                raise self._missing(segment)

    def _missing(self, segment: SegmentInfo) -> Exception:
        return corrupt(self.place(segment.file), "is missing, though the checkpoint refers to it")

    def unnamed(self, number: int, named: Collection[str]) -> set[str]:
        """Return what `UnnamedFiles.take` returns."""
        return self._unnamed.take(number, named)
