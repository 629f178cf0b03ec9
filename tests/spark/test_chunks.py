"""Where rows are cut: by position and by content alone, and never too large."""

from __future__ import annotations

import pyarrow as pa
import pytest

from ackcore.spark import source
from ackcore.spark.source import chunked


def batches(*sizes):
    return iter([pa.record_batch({"n": list(range(size))}) for size in sizes])


@pytest.mark.parametrize(
    ("sizes", "cut"),
    [((), []), ((0, 0), []), ((3,), [3]), ((4, 4, 4), [8, 4]), ((9, 1, 0, 2), [9, 3])],
)
def test_small_batches_are_put_together(sizes, cut):
    assert [len(batch) for batch in chunked(batches(*sizes), 6)] == cut


def test_long_rows_are_put_together_by_bytes(monkeypatch):
    monkeypatch.setattr(source, "CHUNK_BYTES", 100)
    assert [len(batch) for batch in chunked(batches(6, 6, 6, 6, 6), 1000)] == [18, 12]
