"""The tables of a checkpoint: the record of each micro-batch, and the files with their rows.

The record ``batches/N.tables`` names the files of each table after micro-batch N.  It is written
once, in the same put as the next record: that of the changed rows, or the mark.  So it costs no
put.  A driver that finds no record folds again, from the last marked tables.  The tables in force
are those of the last micro-batch that is done; a micro-batch without rows for a table carries its
entry on.

A file is ``tables/<table>/N.eE.<checksum>.arrow``, which a driver of epoch E puts before it writes
the record of N.  The rules of `ackcore.spark.checkpoint.table_cache` apply: no other driver and no
later record can name the file for the first time.  Readers check each file once per process: its
length, and the checksum in its name.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import pyarrow as pa

from ackcore.spark.base.checksummed import check_data, check_size, checksum_of
from ackcore.spark.base.errors import corrupt
from ackcore.spark.checkpoint.records import Records
from ackcore.spark.checkpoint.table_cache import UnnamedFiles
from ackcore.spark.stores.interface import Store
from ackcore.spark.stores.local import LocalStore
from ackcore.tables.table_compaction import SegmentInfo

BELOW = "tables"
#: The maximum number of bytes of segments from buckets that a process keeps.
_KEPT_BYTES = 1 << 28
#: The maximum number of files that a process knows to be undamaged.
_KNOWN = 1 << 14


class TableState(NamedTuple):
    """The recorded state of a table after a micro-batch."""

    structure: Mapping[str, Any]  # `TableShape.structure` of the table
    #: The time of the plan in milliseconds since 1970: rows that expire until then do not exist.
    #: For a table of keys, see `ackcore.spark.tables.seen_keys`.
    horizon_ms: int
    #: The number of rows; with a ttl there may be fewer, since expired rows may still count.
    rows: int = 0
    segments: tuple[SegmentInfo, ...] = ()  # the segments with the rows, the newest first
    changed: tuple[SegmentInfo, ...] = ()  # the segments with the rows that the micro-batch changed
    #: Of a table of keys with a bound by number: times, and the number of keys of each.
    spans: tuple[tuple[int, int], ...] = ()
    #: The segments with the rows of the windows that the micro-batch closed.
    closed: tuple[SegmentInfo, ...] = ()
    #: `WindowWatermarks.body` of a table with windows.  Its ``horizon_ms`` is the bound until which
    #: windows are closed.
    watermarks: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> TableState:
        """Return the state that the JSON of a record describes."""
        state = cls(**body)
        return state._replace(
            segments=tuple(map(SegmentInfo.of, state.segments)),
            changed=tuple(map(SegmentInfo.of, state.changed)),
            spans=tuple((time, count) for time, count in state.spans),
            closed=tuple(map(SegmentInfo.of, state.closed)),
        )

    @property
    def nbytes(self) -> int:
        """The size of the segments' files in bytes."""
        return sum({segment.file: segment.nbytes for segment in self.segments}.values())


class TableRecords:
    """The records of a checkpoint's tables, one per micro-batch."""

    def __init__(self, records: Records) -> None:
        self._records = records

    def of(self, number: int | None) -> dict[str, TableState] | None:
        """Return the recorded tables after a micro-batch, or None without a record."""
        body = None if number is None else self._records.read(f"batches/{number}.tables")
        if body is None:
            return None
        return {name: TableState.of(state) for name, state in body["tables"].items()}

    def write(self, number: int, tables: Mapping[str, TableState]) -> None:
        """Record the tables after a micro-batch, in the same put as the next record.

        Raises CheckpointInUse if another driver has taken over, or has recorded them.
        """
        body = {"tables": {name: state._asdict() for name, state in tables.items()}}
        self._records.write(f"batches/{number}.tables", body, once=True, with_next=True)

    def files(self, first: int) -> set[str] | None:
        """Return the files that records name, from micro-batch ``first`` on.

        None means that there is no such record.
        """
        numbers = [each for each in self._records.numbers(".tables") if each >= first]
        if not numbers:
            return None
        return {
            segment.file
            for number in numbers
            for state in (self.of(number) or {}).values()
            for segment in (*state.segments, *state.changed, *state.closed)
        }


class _Checked:
    """The segments whose checksum this process has checked; of a bucket, also their bytes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: OrderedDict[tuple[str, int], pa.Buffer | None] = OrderedDict()
        self._nbytes = 0

    def get(self, place: tuple[str, int]) -> tuple[bool, pa.Buffer | None]:
        """Return whether a file, by path or URL and size, was checked, and its bytes if kept."""
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
    """The files with the rows of a checkpoint's tables. It can be pickled, since tasks read them.

    ``store``: the file system or the bucket, rooted at ``<checkpoint>/ackcore``. ``epoch``: the
    epoch of the driver.

    Attributes: ``unnamed``: the files that perhaps no record names.
    """

    def __init__(self, store: Store, epoch: int) -> None:
        self._store = store
        self._epoch = epoch
        self.unnamed = UnnamedFiles(store, BELOW)

    def __reduce__(self) -> tuple[Any, ...]:
        return SegmentFiles, (self._store, self._epoch)

    def place(self, file: str) -> str:
        """Return the path or URL of a file, for messages."""
        return f"{self._store.url}/{BELOW}/{file}"

    def put(self, table: str, number: int, data: bytes, rows: int, lo: int, hi: int) -> SegmentInfo:
        """Write a segment of a table, durably, and return its entry for a record.

        ``number``: the micro-batch. ``lo``, ``hi``: the range of hashes, as in `SegmentInfo`.
        """
        file = f"{table}/{number}.e{self._epoch}.{checksum_of(data, 16)}.arrow"
        self._store.put(f"{BELOW}/{file}", data)
        self.unnamed.add(file)
        return SegmentInfo(file, rows, len(data), lo, hi)

    def read(self, segment: SegmentInfo) -> pa.Buffer:
        """Return the bytes of a segment, memory-mapped where possible.

        Raises CheckpointCorrupt if the file is missing or damaged, StateError if it is unreadable.
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
        """Raise CheckpointCorrupt if a segment of a table is missing; no content is checked."""
        there = {each.key for each in self._store.list(f"{BELOW}/{table}")}
        for segment in segments:
            key = f"{BELOW}/{segment.file}"
            # A list may lag.
            if key not in there and self._store.read(key) is None:
                raise self._missing(segment)

    def _missing(self, segment: SegmentInfo) -> Exception:
        return corrupt(self.place(segment.file), "is missing, though the checkpoint refers to it")
