"""The encoding of ledger rows: a few large blobs per shard, never a Spark row per event.

A row of the shuffle is ``(dest, kind, blob)``: the shard, the kind of content, the bytes.  A blob
is a header of 16 bytes, then whole columns one after the other, then zeros up to a multiple of 8:

==========  ======================================================================================
`EVENTS`    root_id 8 | val 8 | [time 8] | task 1, 2 or 4
`ENTRIES`   root_id 8 | val 8 | [first 8 | last 8] | task 1, 2 or 4 | inits + 4 * flags 1
`REASONS`   root_id 8 | time 8 | end of text 4 | texts in UTF-8
`COHORTS`   cohort 8 | val 8 | root 8 | task 1, 2 or 4
==========  ======================================================================================

All numbers are little-endian.  Tasks have the smallest width that holds those of the call.

Spark compares the bytes of a shuffle's output when a task runs again, and aborts the job if they
differ.  So the bytes depend on the arguments alone: rows keep their order within a shard, and every
byte is written, also the padding.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ackcore._arrow.record_batches import offsets_of
from ackcore._backend import sort_by_shard, split_by_shard
from ackcore._records import Entries, Int32s, Int64s, UInt8s
from ackcore.spark.base.reasons import REASON_SCHEMA

EVENTS, ENTRIES, REASONS, COHORTS = 1, 2, 3, 4

BLOB_DDL = "dest int, kind tinyint, blob binary"
BLOB_SCHEMA = pa.schema([("dest", pa.int32()), ("kind", pa.int8()), ("blob", pa.binary())])

# kind, bytes per task, has times, rows
_HEADER = struct.Struct("<BBBxxxxxQ")
_TASK_TYPES = (np.dtype(np.int8), np.dtype(np.int16), np.dtype(np.int32))

_Column = npt.NDArray[Any]


class Events(NamedTuple):
    """Messages as columns: a task is the spout task of an INIT, or ACK, FAIL or RESET.

    ``times_ms``: the times in milliseconds since 1970; None without times.
    """

    root_ids: Int64s
    vals: Int64s
    tasks: Int32s
    times_ms: Int64s | None = None


class CohortEvents(NamedTuple):
    """Messages about cohorts of roots as columns.

    ``tasks``: the kinds of messages, as in `Events`.  ``roots``: the number of the cohort's roots
    in an INIT, the failed root in a FAIL, and 0 in an ACK.  ``vals``: the val of a FAIL is folded,
    like that of an ACK.
    """

    cohorts: Int64s
    vals: Int64s
    roots: Int64s
    tasks: Int32s


def pack_events(events: Events, shards: int) -> pa.RecordBatch:
    """Return a batch of unfolded messages, with one blob for each shard that has any."""
    times = () if events.times_ms is None else (events.times_ms,)
    columns = (events.root_ids, events.vals, *times, narrowed(events.tasks))
    return _pack(EVENTS, bool(times), columns, *split_by_shard(events.root_ids, shards))


def pack_cohorts(events: CohortEvents, shards: int) -> pa.RecordBatch:
    """Return a batch of messages about cohorts, with one blob for each shard that has any."""
    columns = (events.cohorts, events.vals, events.roots, narrowed(events.tasks))
    return _pack(COHORTS, False, columns, *split_by_shard(events.cohorts, shards))


def pack_entries(entries: Entries, shards: int, most_rows: int) -> Iterator[pa.RecordBatch]:
    """Yield batches of at most ``most_rows`` entries, without their ages.

    Each batch has one blob for each shard with entries in it.  The order in a ledger's table
    depends on the processor, so entries are sorted by shard and by a fixed hash of the root.
    """
    times: tuple[Int64s, ...] = ()
    if entries.first_ms is not None and entries.last_ms is not None:
        times = (entries.first_ms, entries.last_ms)
    marks = entries.inits | (entries.flags << 2)
    columns = (entries.root_ids, entries.vals, *times, narrowed(entries.tasks), marks)
    order, counts = sort_by_shard(entries.root_ids, shards)
    bounds = offsets_of(counts)
    for start in range(0, len(order), most_rows):
        here = np.diff(bounds.clip(start, start + most_rows))
        yield _pack(ENTRIES, bool(times), columns, order[start : start + most_rows], here)


def pack_reasons(reasons: pa.Table, shards: int, cohorts: Int64s | None = None) -> pa.RecordBatch:
    """Return a batch of reasons, with one blob for each shard that has any.

    ``cohorts``: the cohort of each reason, which determines its shard; by default the root does.
    """
    reasons = reasons.combine_chunks()
    ids = reasons["root_id"].to_numpy() if cohorts is None else cohorts
    order, counts = split_by_shard(ids, shards)
    reasons = reasons.take(pa.array(order)).combine_chunks()
    dests, blobs, start = np.flatnonzero(counts), [], 0
    for dest in dests:
        rows = reasons.slice(start, counts[dest])
        start += counts[dest]
        # Not Arrow's buffers, because they also contain texts outside of the slice.
        texts = [text.encode() for text in rows["text"].to_pylist()]
        ends = np.cumsum([len(text) for text in texts], dtype=np.uint32)
        head = _HEADER.pack(REASONS, 0, True, len(rows))
        columns = [rows["root_id"].to_numpy(), rows["ms"].to_numpy(), ends]
        body = b"".join([head, *(column.tobytes() for column in columns), *texts])
        blobs.append(body + bytes(-len(body) % 8))
    kinds = pa.array(np.full(len(dests), REASONS, np.int8))
    dest_column = pa.array(dests.astype(np.int32))
    return pa.RecordBatch.from_arrays(
        [dest_column, kinds, pa.array(blobs, pa.binary())], schema=BLOB_SCHEMA
    )


def narrowed(numbers: _Column) -> _Column:
    """Return integers in the smallest width, up to 32 bits, that holds all of them."""
    if len(numbers) == 0:
        return numbers.astype(np.int8)
    least, most = int(numbers.min()), int(numbers.max())
    for dtype in _TASK_TYPES:
        limits = np.iinfo(dtype)
        if limits.min <= least and most <= limits.max:
            break
    return numbers.astype(dtype, copy=False)


def _pack(
    kind: int, timed: bool, columns: tuple[_Column, ...], order: Int64s, counts: Int64s
) -> pa.RecordBatch:
    """Return a batch with one blob of the columns for each shard that has rows.

    ``columns``: the values, columns of 8 bytes first. ``order``: the row numbers of the rows to
    pack, sorted by shard. ``counts``: by shard, how many of these rows it has.
    """
    dests = np.flatnonzero(counts)
    task_bytes = next(column.itemsize for column in columns if column.itemsize < 8)
    row_bytes = sum(column.itemsize for column in columns)
    sizes = _HEADER.size + counts[dests] * row_bytes
    ends = np.cumsum(sizes + -sizes % 8)
    offsets = np.zeros(len(dests) + 1, np.int32)
    offsets[1:] = ends
    data = np.empty(int(offsets[-1]), np.uint8)
    start = 0
    for dest, end in zip(dests, ends, strict=True):
        rows = order[start : start + counts[dest]]
        start += len(rows)
        size = _HEADER.size + len(rows) * row_bytes
        place = int(end) - size - -size % 8
        data[end - 8 : end] = 0  # the padding; columns overwrite their part of it
        _HEADER.pack_into(data.data, place, kind, task_bytes, timed, len(rows))
        place += _HEADER.size
        for column in columns:
            until = place + len(rows) * column.itemsize
            # All row numbers are in range; "clip" only saves take() a copy of its output.
            np.take(column, rows, out=data[place:until].view(column.dtype), mode="clip")
            place = until
    blobs = pa.BinaryArray.from_buffers(
        pa.binary(), len(dests), [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    )
    kinds = pa.array(np.full(len(dests), kind, np.int8))
    dest_column = pa.array(dests.astype(np.int32))
    return pa.RecordBatch.from_arrays([dest_column, kinds, blobs], schema=BLOB_SCHEMA)


def unpack(batch: pa.RecordBatch) -> Iterator[Events | Entries | pa.Table]:
    """Yield the content of each blob, in order: events, entries, or a table of reasons.

    The batch must have no blob of the kind `COHORTS`.
    """
    for blob in batch.column("blob"):
        part = unpack_blob(np.frombuffer(blob.as_buffer(), np.uint8))
        assert not isinstance(part, CohortEvents)
        yield part


def unpack_blob(blob: npt.NDArray[np.uint8]) -> Events | Entries | CohortEvents | pa.Table:
    """Return the content of one blob: reasons as a table, entries with ages of 0.

    Columns are views of ``blob`` where possible.
    """
    kind, task_bytes, timed, rows = _HEADER.unpack_from(blob.data)
    place = _HEADER.size

    def column(dtype: npt.DTypeLike) -> _Column:
        nonlocal place
        size = rows * np.dtype(dtype).itemsize
        items = blob[place : place + size]
        place += size
        if items.ctypes.data % np.dtype(dtype).alignment:
            items = items.copy()
        return items.view(dtype)

    if kind == REASONS:
        roots, ms, ends = column(np.int64), column(np.int64), column(np.uint32)
        texts = bytes(blob[place:])
        starts = [0, *ends.tolist()]
        found = [texts[a:b].decode() for a, b in itertools.pairwise(starts)]
        arrays = [pa.array(roots), pa.array(ms), pa.array(found, pa.string())]
        return pa.table(arrays, schema=REASON_SCHEMA)
    more = 1 if kind == COHORTS else timed * (1 if kind == EVENTS else 2)
    wide = [column(np.int64) for _ in range(2 + more)]
    tasks = column(f"<i{task_bytes}").astype(np.int32, copy=False)
    if kind == COHORTS:
        return CohortEvents(wide[0], wide[1], wide[2], tasks)
    if kind == EVENTS:
        return Events(wide[0], wide[1], tasks, wide[2] if timed else None)
    marks: UInt8s = column(np.uint8)
    inits, flags = (marks & np.uint8(3)).view(np.uint8), (marks >> np.uint8(2)).view(np.uint8)
    ages = np.zeros(rows, np.uint8)
    times = (wide[2], wide[3]) if timed else (None, None)
    return Entries(wide[0], wide[1], tasks, inits, flags, ages, *times)
