"""The results that tasks return to the driver: rows of a kind and a blob."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from ackcore.spark.base.versions import from_arrow_schema

RESULT_SCHEMA = pa.schema([("kind", pa.int8()), ("blob", pa.binary())])
RESULT_TYPE = from_arrow_schema(RESULT_SCHEMA)

# The kinds of results, and the content of the blob:
TASK_REPORT = 1  # the report of a task, in JSON
TRAILER_RECEIPTS = 2  # receipts of trailers, as `Inbox.receipts` returns them
NOT_ACKED = 3  # an Arrow stream of `NOT_ACKED_SCHEMA`
COUNTED = 4  # the number of ACKED roots by spout number, in JSON
PICKED = 5  # an Arrow stream of records that were read again or judged
NOT_ACKED_FILE = 6  # the name of a file of `NOT_ACKED_SCHEMA` among the run's files of failures
UNSETTLED = 7  # the number of cohorts that could not be settled
NAMED = 8  # like `PICKED`, but other tasks may have failed the judged records too
DISPUTED = 9  # the roots, as int64, that failed with several reasons

#: The most bytes of failures that a task returns to the driver; it writes more to files.
INLINE_BYTES = 1 << 17

#: Names of `Status`; records that are not ACKED have one of three.
STATUS_NAMES = pa.dictionary(pa.int8(), pa.string())
#: Records that are not ACKED, including those whose trees are still OPEN.
NOT_ACKED_SCHEMA = pa.schema(
    [
        ("root_id", pa.int64()),
        ("task", pa.int32()),
        ("status", STATUS_NAMES),
        ("reason", pa.dictionary(pa.int32(), pa.string())),
    ]
)


def result_batch(rows: list[tuple[int, bytes]]) -> pa.RecordBatch:
    """Return results for the driver, pairs of (kind, blob), as a batch."""
    kinds = pa.array([kind for kind, _ in rows], pa.int8())
    blobs = pa.array([blob for _, blob in rows], pa.binary())
    return pa.RecordBatch.from_arrays([kinds, blobs], schema=RESULT_SCHEMA)


def results_in(rows: pa.Table) -> Iterator[tuple[int, pa.Buffer]]:
    """Yield (kind, blob) from the results that the driver got.

    Reading a blob from its batch copies it.  So each batch is released after it was read, and the
    caller must not keep ``rows``.
    """
    batches = rows.to_batches()[::-1]
    del rows
    while batches:
        batch = batches.pop()
        for kind, blob in zip(batch.column(0).to_pylist(), batch.column(1), strict=True):
            yield kind, blob.as_buffer()


def to_stream(table: pa.Table | pa.RecordBatch) -> bytes:
    """Return a table as an Arrow stream, with its schema."""
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write(table)
    return out.getvalue().to_pybytes()  # type: ignore[no-any-return]


def from_stream(blob: bytes | pa.Buffer) -> pa.Table:
    """Return the table in the bytes that `to_stream` returned."""
    return pa.ipc.open_stream(blob).read_all()
