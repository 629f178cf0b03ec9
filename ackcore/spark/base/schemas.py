"""The columns that track waiting and dead records, and the types that Parquet cannot hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

MESSAGE_ID = "_ackcore_message_id"
ATTEMPT = "_ackcore_attempt"
DUE_MS = "_ackcore_due_ms"
FIRST_MS = "_ackcore_first_ms"
LAST_MS = "_ackcore_last_ms"
REASON = "_ackcore_reason"
REPLAYED = "_ackcore_replayed"

#: The columns before the source's own columns in a table of waiting or dead records.
TRACKING = pa.schema(
    [
        pa.field(MESSAGE_ID, pa.string(), nullable=False),
        # The number of the next attempt, from 0; for dead records the number of attempts made.
        pa.field(ATTEMPT, pa.int32(), nullable=False),
        # 0 for dead records.
        pa.field(DUE_MS, pa.int64(), nullable=False),
        pa.field(FIRST_MS, pa.int64(), nullable=False),
        pa.field(LAST_MS, pa.int64(), nullable=False),
        pa.field(REASON, pa.string(), nullable=False),  # Reason.encode()
        # The number of replays as a dead letter.  The books count resolved replays, and `replay`
        # leaves out records that die repeatedly.
        pa.field(REPLAYED, pa.int32(), nullable=False),
    ]
)


#: The position in the order of arrival, for records of an ordered spout.  While a record waits,
#: this is the last column, as if it belonged to the source.
ORDER = "_ackcore_order"
#: The positions of a micro-batch start at its number, shifted by this many bits.  Records of replay
#: requests are in the lower half of its range, records of its source in the upper half.
ORDER_BITS = 32


class SinkFile(NamedTuple):
    """A file of an accepted run with rows for a sink, under ``State.runs.of(decision)``."""

    component: str
    stream: str
    path: str  # relative to the work directory
    rows: int
    nbytes: int | None = None  # None if it was not recorded


def unfit_for_parquet(schema: pa.Schema) -> Iterator[tuple[pa.Field, str]]:
    """Yield the columns that Parquet cannot hold, each with the reason."""
    for field in schema:
        try:
            pq.write_table(pa.schema([field]).empty_table(), pa.BufferOutputStream())
        except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
            yield field, str(error)
