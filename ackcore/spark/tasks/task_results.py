"""The results that tasks return to the driver: rows of a kind and a blob."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from ackcore.spark.base.versions import from_arrow_schema

RESULT_SCHEMA = pa.schema([("kind", pa.int8()), ("blob", pa.binary())])
RESULT_TYPE = from_arrow_schema(RESULT_SCHEMA)

#: A task's report, in JSON; receipts of trailers; an Arrow stream of `NOT_ACKED_SCHEMA`; JSON
#: of counts by task; an Arrow stream of records that were read again or judged; the name of a
#: table of `NOT_ACKED_SCHEMA` among the run's files of failures; the number of cohorts whose roots
#: could not be settled together; records that were judged like `PICKED` ones, but that other tasks
#: may have failed too; the roots, as int64, that failed with several reasons.
TASK_REPORT, TRAILER_RECEIPTS, NOT_ACKED, COUNTED, PICKED, NOT_ACKED_FILE = 1, 2, 3, 4, 5, 6
UNSETTLED, NAMED, DISPUTED = 7, 8, 9

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
