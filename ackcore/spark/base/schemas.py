"""The columns of waiting and dead records and of dead letters, and types that do not fit Parquet.

Places of a new column of dead letters: `LETTER`, and `TRACKED` or `OF_REASON`; `Letter` in
``dead_letters/listing.py``; the docstring of `dead_letters` in ``dead_letters/reading.py``.  For a
value that waiting records keep: `TRACKING`, and `judge` in ``tasks/failed_rows.py``.  For a text of
the reason: `Reason` and `REASON_TEXTS` in ``topology/tuples.py``; a text that only the bolt's task
has is set in `LedgerRows.fail`, as `judge` runs elsewhere.  Raise `FORMAT`: files without the
column cannot be read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa

from ackcore.topology.tuples import REASON_TEXTS

MESSAGE_ID = "_ackcore_message_id"
ATTEMPT = "_ackcore_attempt"
DUE_MS = "_ackcore_due_ms"
FIRST_MS = "_ackcore_first_ms"
LAST_MS = "_ackcore_last_ms"
REASON = "_ackcore_reason"
REPLAYED = "_ackcore_replayed"

#: The format of a checkpoint's files and of a store of dead letters.
FORMAT = 1

#: The type of a column of `Reason`.
REASON_TYPE = pa.struct(
    [
        *((name, pa.string()) for name in REASON_TEXTS),
        ("final", pa.bool_()),
        ("after_ms", pa.int64()),
        ("counts", pa.bool_()),
    ]
)
#: The columns before the source's own columns in a table of waiting or dead records.
TRACKING = pa.schema(
    [
        pa.field(MESSAGE_ID, pa.string(), nullable=False),
        # The number of the next attempt, from 0; for dead records the number of attempts made.
        pa.field(ATTEMPT, pa.int32(), nullable=False),
        # The time of the next attempt, in ms since 1970; 0 for dead records.
        pa.field(DUE_MS, pa.int64(), nullable=False),
        # The times of two plans: that which first read the record, and that of its last failure.
        pa.field(FIRST_MS, pa.int64(), nullable=False),
        pa.field(LAST_MS, pa.int64(), nullable=False),
        pa.field(REASON, REASON_TYPE, nullable=False),
        # The number of replays as a dead letter: `Account.resolved` counts ACKED records that have
        # any, and `replay` leaves out records that die repeatedly.
        pa.field(REPLAYED, pa.int32(), nullable=False),
    ]
)

TIME = pa.timestamp("ms", "UTC")
#: The columns of a dead letter besides its payload.
LETTER = pa.schema(
    [
        pa.field("message_id", pa.string()),
        pa.field("attempts", pa.int32()),
        pa.field("error_type", pa.string()),
        pa.field("error_message", pa.string()),
        pa.field("component", pa.string()),
        pa.field("first_ms", TIME),
        pa.field("last_ms", TIME),
        pa.field("batch_id", pa.int64()),
        # The number of replays before this death.
        pa.field("replays", pa.int32()),
    ]
)
#: By column of `LETTER`, the column of `TRACKING` or the field of the reason that has its value.
TRACKED = {
    "message_id": MESSAGE_ID,
    "attempts": ATTEMPT,
    "first_ms": FIRST_MS,
    "last_ms": LAST_MS,
    "replays": REPLAYED,
}
OF_REASON = {"component": "component", "error_type": "type", "error_message": "message"}


#: The position in the order of arrival, for records of an ordered spout.  While a record waits,
#: this is the last column, as if it belonged to the source.
ORDER = "_ackcore_order"
#: The positions of a micro-batch start at its number, shifted by this many bits.  Records of replay
#: requests are in the lower half of its range, records of its source in the upper half.
ORDER_BITS = 32


#: The hash of the key by which duplicates are recognised, for records of a spout with ``dedup``;
#: null if it is unknown.  Its place is that of `ORDER`, which such records do not have.
DEDUP_KEY = "_ackcore_dedup_key"
#: The columns that only waiting records have.
NUMBERS = (ORDER, DEDUP_KEY)


def without_numbers(rows: pa.Table) -> pa.Table:
    """Return dead records without the columns `NUMBERS`, which only waiting records need."""
    return rows.drop_columns([name for name in NUMBERS if name in rows.schema.names])


#: The text and the error of a line of a file that cannot be read; null in all other rows. Spark
#: uses the first name, too.
CORRUPT_RECORD, CORRUPT_REASON = "_corrupt_record", "_corrupt_reason"


def with_corrupt(schema: pa.Schema) -> pa.Schema:
    """Return a schema with all columns nullable, then `CORRUPT_RECORD` and `CORRUPT_REASON`."""
    own = [one.with_nullable(True) for one in schema]
    return pa.schema([*own, (CORRUPT_RECORD, pa.string()), (CORRUPT_REASON, pa.string())])


class SinkFile(NamedTuple):
    """A file of a run with rows that a component emitted to a stream, for sinks and tables."""

    component: str
    stream: str
    path: str  # relative to the run's directory
    rows: int
    nbytes: int | None = None  # None if it was not recorded


@dataclass(frozen=True, slots=True, order=True)
class FailedFile:
    """A file of failed records of one spout, either waiting or dead ones, that a task wrote.

    Waiting records are an Arrow table, sorted by their due times.  Dead records are Parquet, in the
    form of the dead-letter store.  Only ``rows`` rows from row ``start`` on count.  ``no_room`` is
    the limit `max_waiting` if they are dead because that many records waited; else None.
    """

    spout: str
    dead: bool
    path: str  # in a task's report only the name
    rows: int
    nbytes: int | None
    next_due_ms: int = 0  # of waiting records, the earliest due time, in ms since 1970
    oldest_ms: int = 0  # of waiting records, the least `FIRST_MS`
    start: int = 0
    no_room: int | None = None

    def __len__(self) -> int:
        return self.rows


def unfit_for_parquet(schema: pa.Schema) -> Iterator[tuple[pa.Field, str]]:
    """Yield the columns that Parquet cannot hold, each with Arrow's error as text."""
    import pyarrow.parquet as pq  # noqa: PLC0415 - tasks import this module, and need no Parquet

    for field in schema:
        try:
            pq.write_table(pa.schema([field]).empty_table(), pa.BufferOutputStream())
        except (pa.ArrowNotImplementedError, pa.ArrowInvalid, OSError) as error:
            yield field, str(error)
