"""Columns: in which records that wait or are dead are tracked, and which Parquet cannot hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa

MESSAGE_ID = "_ackcore_message_id"
ATTEMPT = "_ackcore_attempt"
DUE_MS = "_ackcore_due_ms"
FIRST_MS = "_ackcore_first_ms"
LAST_MS = "_ackcore_last_ms"
REASON = "_ackcore_reason"
REPLAYED = "_ackcore_replayed"

#: A `Reason`, field by field.
REASON_TYPE = pa.struct(
    [
        ("component", pa.string()),
        ("type", pa.string()),
        ("message", pa.string()),
        ("final", pa.bool_()),
        ("after_ms", pa.int64()),
        ("counts", pa.bool_()),
    ]
)
#: What a waiting or dead table has in front of the source's own columns.
TRACKING = pa.schema(
    [
        pa.field(MESSAGE_ID, pa.string(), nullable=False),
        # Of the next execution, counted from 0; in a table of the dead: executions it had.
        pa.field(ATTEMPT, pa.int32(), nullable=False),
        # 0 in a table of the dead.
        pa.field(DUE_MS, pa.int64(), nullable=False),
        pa.field(FIRST_MS, pa.int64(), nullable=False),
        pa.field(LAST_MS, pa.int64(), nullable=False),
        pa.field(REASON, REASON_TYPE, nullable=False),
        # How often it was sent again as a dead letter: the books count what was resolved of those,
        # and `replay` leaves out what dies again and again.
        pa.field(REPLAYED, pa.int32(), nullable=False),
    ]
)


#: Of records of a spout that is ordered: in which order they came.  It is behind the source's
#: columns, which it is taken for as long as a record waits.
ORDER = "_ackcore_order"
#: Those of a micro-batch have it from its number, shifted by so many bits, on: in the lower half
#: what requests brought, in the upper one what its source gave.
ORDER_BITS = 32


def without_numbers(rows: pa.Table) -> pa.Table:
    """Return dead records without `ORDER`: they come behind nothing any more."""
    return rows.drop_columns([ORDER]) if ORDER in rows.schema.names else rows


class SinkFile(NamedTuple):
    """A file that an accepted run left for a sink, under ``State.runs.of(decision)``."""

    component: str
    stream: str
    path: str  # relative to the work directory
    rows: int
    nbytes: int | None = None  # None if it was not recorded


@dataclass(frozen=True, slots=True, order=True)
class FailedFile:
    """A file of failed records of one spout that a task wrote, until a decision adopts it.

    Records that wait are an Arrow table, sorted by when they are due.  Dead records are Parquet, as
    the dead-letter store has them.  ``no_room`` is set where records from ``start`` on were to wait
    and there was no room: they are dead, and the number is `max_waiting`.
    """

    spout: str
    dead: bool
    path: str  # in the report of a task its name
    rows: int
    nbytes: int | None
    next_due_ms: int = 0
    oldest_ms: int = 0
    start: int = 0
    no_room: int | None = None

    def __len__(self) -> int:
        return self.rows


def unfit_for_parquet(schema: pa.Schema) -> Iterator[tuple[pa.Field, str]]:
    """Yield the columns that Parquet cannot hold, and why."""
    import pyarrow.parquet as pq  # noqa: PLC0415 - no task needs it to know the columns

    for field in schema:
        try:
            pq.write_table(pa.schema([field]).empty_table(), pa.BufferOutputStream())
        except (pa.ArrowNotImplementedError, pa.ArrowInvalid, OSError) as error:
            yield field, str(error)
