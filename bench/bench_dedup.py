"""Deduplication: the cost of recognising copies, with 10 million keys of ACKED records.

The rows are those of one task: half of them are copies of ACKED records.  The seconds are those of
the bolt that divides them, and of the fold of the new keys; the exchange before the bolt is that of
any fields grouping.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from ackcore.spark.tasks.dedup_executor import DedupExecutor, SeenKeys
from ackcore.tables.folding import fold_rows, merge_states
from ackcore.tables.table_segments import TableReader, TableSegment, write_segment
from ackcore.tables.table_shape import HASH, HASH_END
from ackcore.testing import Source
from ackcore.topology import TopologyBuilder
from ackcore.topology.dedup import AT_MS, SEEN, DedupBolt
from ackcore.topology.parts import Dedup

CHUNK = 50_000


def ids(numbers: np.ndarray) -> pa.Array:
    """Return ids of 18 characters."""
    texts = pa.array(numbers).cast(pa.string())
    return pc.binary_join_element_wise("event-", pc.utf8_lpad(texts, 12, "0"), "")


@pytest.fixture(scope="module")
def shape():
    """The table of keys of a spout."""
    builder = TopologyBuilder()
    source = Source(pa.schema([("id", pa.string()), ("n", pa.int64())]))
    builder.spout("events", source, dedup="id", within_s=86_400)
    builder.sink("events", print)
    return builder.build().tables["events.dedup"].shape


@pytest.fixture(scope="module")
def segments(shape, quick):
    """Files of one range of hashes each, with all keys."""
    keys = 100_000 if quick else 10_000_000
    parts = []
    for some in np.array_split(np.arange(keys), max(1, keys // 1_000_000)):
        named = {"id": ids(some).cast(pa.binary()), AT_MS: np.full(len(some), 1)}
        parts.append(fold_rows(shape, [pa.record_batch(named)], 1))
    rows = pa.concat_tables(parts).sort_by(HASH)
    found = []
    for n in range(20):
        lo, hi = HASH_END * n // 20, HASH_END * (n + 1) // 20
        at = np.searchsorted(
            rows[HASH].to_numpy(), np.array([lo, min(hi, HASH_END - 1)], np.uint64)
        )
        part = rows.slice(at[0], at[1] - at[0])
        found.append(TableSegment.open(write_segment(shape, part, lo, hi), shape))
    return keys, found


def bench_dedup(shape, segments, quick, interleaved, report_ratio):
    """CPU seconds of this thread per million rows."""
    keys, opened = segments
    n = 50_000 if quick else 500_000
    rng = np.random.default_rng(1)
    numbers = rng.permutation(np.concatenate([rng.choice(keys, n // 2), keys + np.arange(n // 2)]))
    table = pa.table({"id": ids(numbers), "n": numbers})
    rows = table.to_batches(max_chunksize=CHUNK)
    bolt = DedupBolt("events", Dedup(("id",), 86_400.0, None, None))
    seen: list[pa.RecordBatch] = []

    def divide() -> None:
        seen.clear()
        reader = SeenKeys(shape, opened, 0, np.empty(0, np.uint64), 2)
        executor = DedupExecutor(bolt, reader)
        for batch in rows:
            found = executor.process("events", "default", batch, None)
            seen.extend(one.batch for one in found.emissions if one.stream == SEEN)

    def fold() -> None:
        partial = fold_rows(shape, seen, 2)
        older = TableReader(shape, opened, 0).lookup(partial)
        known = older.filter(pc.is_valid(older.column(HASH)))
        write_segment(shape, merge_states(shape, known, partial))

    divide()
    assert sum(map(len, seen)) == n // 2
    taken = interleaved({"divide": divide, "fold": fold}, 1 if quick else 5)
    for name, what in (("divide", "copies recognised"), ("fold", "new keys folded")):
        label = f"{what}, per million rows, with {keys:,} keys"
        report_ratio(label, [1e6 * s / n for s in taken[name]], unit="s")
