"""The executor of `dedup`: lets one record of each key pass, and acks copies of ACKED records.

Each row of a task is treated in one of four ways:

* Its key has a null: it passes.
* Its key is in the table of keys of ACKED records: it is a duplicate, which is acked.
* Records with its key wait for a retry and none is due, or an earlier row of this task with its key
  passes: it fails as `BEHIND`, so it waits, and its attempts do not grow.
* It passes, as the first with its key.

The grouping by the key brings all rows of a key into one task, in an order that depends on the
source alone. The result is therefore the same whenever the task runs. Keys in the table are
compared by value. Waiting keys and those of this task are compared by hash: a record with another
key of equal hash waits without need, and passes later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ackcore._arrow.record_batches import has_offsets
from ackcore._arrow.shown import as_texts
from ackcore._records import Bools, Int64s, UInt64s
from ackcore.spark.base.reasons import BEHIND
from ackcore.spark.tasks.row_files import among
from ackcore.tables.key_groups import hashes_of
from ackcore.tables.table_segments import TableReader
from ackcore.tables.table_shape import EXPIRES, one_chunk
from ackcore.topology.components import DEFAULT_STREAM
from ackcore.topology.dedup import AT_MS, DUPLICATES, SEEN, DedupBolt
from ackcore.topology.tuples import Anchors, Emission, FailedInputs, Identity, Results


@dataclass(eq=False, repr=False)
class SeenKeys(TableReader):
    """A reader of the table of ACKED records' keys, with the hashes of waiting records' keys.

    ``horizon_ms``: keys that expire until then are not found. ``waiting``: the sorted hashes of the
    keys for which a record waits and none is due. ``now_ms``: the time of the micro-batch's plan.
    Times are in milliseconds since 1970.
    """

    waiting: UInt64s
    now_ms: int


class DedupExecutor:
    """The executor of the bolt that `dedup` adds behind a spout, in one task.

    ``keys``: the keys of ACKED and of waiting records.
    """

    def __init__(self, bolt: DedupBolt, keys: SeenKeys) -> None:
        self._dedup = bolt.dedup
        self._keys = keys
        self._rows = 0
        self._passed = _HashSet()

    def process(
        self, source: str, stream: str, batch: pa.RecordBatch, identity: Identity | None
    ) -> Results:
        """Emit the rows that pass, on the default stream; fail rows that wait, as `BEHIND`.

        Emits the keys of duplicates, with their times, on `DUPLICATES`; those of all other rows
        with a key, waiting ones included, on `SEEN`.
        """
        n, first = batch.num_rows, self._rows
        self._rows += n
        columns = key_columns([batch.column(name) for name in self._dedup.columns])
        keyed = np.ones(n, np.bool_)
        for column in columns:
            if column.null_count:
                keyed &= column.is_valid().to_numpy(zero_copy_only=False)
        hashes = hashes_of(columns, n)
        times = self._times(batch)
        seen = pa.RecordBatch.from_arrays(columns, list(self._dedup.columns))
        duplicates = keyed & self._known(seen, times)
        left = np.flatnonzero(keyed & ~duplicates)
        left = left[~among(hashes[left], self._keys.waiting)]
        _, firsts = np.unique(hashes[left], return_index=True)
        left = np.sort(left[firsts])
        left = left[~self._passed.has(hashes[left])]
        self._passed.add(hashes[left])
        passes = ~keyed
        passes[left] = True
        behind = keyed & ~duplicates & ~passes

        seen = pa.RecordBatch.from_arrays([*columns, pa.array(times)], [*seen.schema.names, AT_MS])
        emissions = [
            Emission(name, _some(rows, chosen), Anchors(first + np.flatnonzero(chosen), None))
            for name, rows, chosen in (
                (DEFAULT_STREAM, batch, passes),
                # Those that wait are not ACKED: the driver finds their keys by their roots.
                (SEEN, seen, keyed & ~duplicates),
                (DUPLICATES, seen, duplicates),
            )
            if chosen.any()
        ]
        failures = []
        if behind.any():
            failures.append(FailedInputs(first + np.flatnonzero(behind), [BEHIND]))
        return Results(emissions, failures, 0)

    def flush(self) -> Results:
        """Return empty results: each row was passed, acked or failed by its call."""
        return Results([], [], 0)

    def cleanup(self) -> None:
        """Do nothing."""

    def _times(self, batch: pa.RecordBatch) -> Int64s:
        """Return, for each row, the time in milliseconds from which its key is kept.

        It is the row's event time. It is the time of the micro-batch if the event time is null or
        later than that, or if the spout has none.
        """
        now_ms = self._keys.now_ms
        if self._dedup.event_time is None:
            return np.full(batch.num_rows, now_ms)
        column = batch.column(self._dedup.event_time)
        times = column.cast(pa.timestamp("ms", column.type.tz), safe=False).cast(pa.int64())
        found: Int64s = np.minimum(pc.fill_null(times, now_ms).to_numpy(), now_ms)
        return found

    def _known(self, keys: pa.RecordBatch, times: Int64s) -> Bools:
        """Return which rows have the key of an ACKED record that is within the spout's bounds."""
        known = one_chunk(self._keys.lookup(keys).column(EXPIRES))
        found: Bools = known.is_valid().to_numpy(zero_copy_only=False)
        if self._dedup.event_time is not None and self._dedup.within_s is not None:
            at = pc.fill_null(known, 0).to_numpy()
            found = found & (times < at + round(self._dedup.within_s * 1000))
        return found


def key_columns(columns: Sequence[pa.Array]) -> list[pa.Array]:
    """Return the columns of a key as binary, the type that they have in the table of keys.

    Values that are neither text nor bytes are converted to text. Equal values have equal texts,
    because a source may change the scale of a decimal, or the unit or zone of a timestamp.
    """

    def is_text(kind: pa.DataType) -> bool:
        return has_offsets(kind) or pa.types.is_fixed_size_binary(kind)

    return [
        (column if is_text(column.type) else _texts_by_value(column)).cast(pa.binary())
        for column in columns
    ]


def _texts_by_value(column: pa.Array) -> pa.Array:
    """Return a column as text: fractions without zeros at the end, and instants in UTC."""
    kind, is_ = column.type, pa.types
    if is_.is_timestamp(kind) and kind.tz:
        column = column.cast(pa.timestamp(kind.unit, "UTC"))
    texts = as_texts(column)
    if is_.is_decimal(kind) or is_.is_timestamp(kind) or is_.is_time(kind):
        # Arrow writes 0E-18, 1.50E-10 and 12:00:00.000Z; far times end with +00:00.
        ends = r"(E|Z|\+|$)"
        for zeros, rest in ((rf"(\.\d*?)0+{ends}", r"\1\2"), (rf"\.{ends}", r"\1"), ("^0E.*", "0")):
            texts = pc.replace_substring_regex(texts, zeros, rest)
    return texts


def _some(rows: pa.RecordBatch, chosen: Bools) -> pa.RecordBatch:
    return rows if chosen.all() else rows.filter(pa.array(chosen))


class _HashSet:
    """A growing set of hashes in sorted arrays, of 8 bytes per hash."""

    def __init__(self) -> None:
        self._parts: list[UInt64s] = []

    def has(self, hashes: UInt64s) -> Bools:
        """Return which hashes are in the set."""
        found = np.zeros(len(hashes), np.bool_)
        for part in self._parts:
            found |= among(hashes, part)
        return found

    def add(self, hashes: UInt64s) -> None:
        """Add hashes that are not in the set; parts of similar sizes are merged."""
        part = np.sort(hashes)
        while self._parts and len(self._parts[-1]) <= 2 * len(part):
            part = np.sort(np.concatenate([self._parts.pop(), part]), kind="stable")
        self._parts.append(part)
