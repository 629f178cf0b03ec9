"""The record ``batches/N.tables``: the tables after micro-batch N.

It is written once, in the same put as the next record: that of the changed rows, or the mark.  So
it costs no put.  A driver that finds no record folds again, from the last marked tables.  The
tables in force are those of the last micro-batch that is done; a micro-batch without rows for a
table carries its entry on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ackcore.spark.checkpoint.records import Records
from ackcore.tables.table_compaction import SegmentInfo


class TableState(NamedTuple):
    """A table after a micro-batch."""

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
        """Rebuild the entry from the JSON of a record."""
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
    """The tables of a checkpoint, by micro-batch."""

    def __init__(self, records: Records) -> None:
        self._records = records

    def of(self, number: int | None) -> dict[str, TableState] | None:
        """Return the recorded tables after a micro-batch, or None without a record."""
        body = None if number is None else self._records.read(_name(number))
        if body is None:
            return None
        return {name: TableState.of(state) for name, state in body["tables"].items()}

    def write(self, number: int, tables: Mapping[str, TableState]) -> None:
        """Record the tables after a micro-batch, together with the next record.

        Raises CheckpointInUse if another driver has taken over, or has recorded them.
        """
        body = {"tables": {name: state._asdict() for name, state in tables.items()}}
        self._records.write(_name(number), body, once=True, with_next=True)

    def files(self, first: int) -> set[str] | None:
        """Return the files that the records from micro-batch ``first`` on name; None without a
        record.
        """
        numbers = [each for each in self._records.numbers("batches", ".tables") if each >= first]
        if not numbers:
            return None
        return {
            segment.file
            for number in numbers
            for state in (self.of(number) or {}).values()
            for segment in (*state.segments, *state.changed, *state.closed)
        }


def _name(number: int) -> str:
    return f"batches/{number}.tables"
