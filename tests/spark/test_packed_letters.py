"""Dead letters that tasks write are compressed where that saves a quarter of their payloads."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ackcore.retry import Policy
from ackcore.spark.base import letter_columns as base_letters
from ackcore.spark.base.reasons import Reasons
from ackcore.spark.base.schemas import FailedFile
from ackcore.spark.tasks.failed_rows import Rules
from ackcore.spark.tasks.failed_writer import FailedWriter
from ackcore.spark.tasks.record_ids import SourceRecords, SpoutSpec, records_at

LINES = pa.schema([("id", pa.int64()), ("line", pa.string())])
REASONS = Reasons.of_texts(pa.array(["!\x1fbolt\x1fFailed\x1fno"]))


def noise(rng, n):
    """Letters that come to 0.82 of what they are."""
    return bytes(rng.integers(32, 127, n, dtype=np.uint8)).decode()


def document(rng, n):
    return json.dumps([{"name": f"item {int(x)}", "price": int(x)} for x in rng.integers(0, 99, n)])


def written(directory, lines):
    """Return the path and the letters of a task whose records all die."""
    batch = pa.record_batch([list(range(len(lines))), lines], schema=LINES)
    source = SpoutSpec("lines", 0, LINES, (), True, False, False, 7)
    some = SourceRecords(source, batch, 0, 0)
    places = np.arange(len(lines))
    writer = FailedWriter(Rules(1, 1, Policy(), 1e12, inline_bytes=0), str(directory), 0)
    roots = source.roots(0, 0, len(lines))
    said = REASONS.taken(np.zeros(len(lines), np.int64))
    writer.write(some, records_at(some, roots, places, 0), said)
    (file,) = writer.finish()[0]["files"]
    return directory / FailedFile(*file).path


def codecs(path):
    """How the columns of all row groups are compressed."""
    metadata = pq.read_metadata(path)
    groups = [metadata.row_group(n) for n in range(metadata.num_row_groups)]
    return {group.column(n).compression for group in groups for n in range(metadata.num_columns)}


@pytest.mark.parametrize(
    ("text", "size", "rows", "codec"),
    [
        (noise, 1000, 2000, "UNCOMPRESSED"),
        (noise, 300_000, 3, "UNCOMPRESSED"),  # each once: three alike would be worth it
        (noise, 3_000_000, 1, "UNCOMPRESSED"),
        (document, 30, 2000, "ZSTD"),
        (document, 30, 1, "ZSTD"),
    ],
)
def test_letters_are_compressed_where_that_is_worth_it(tmp_path, text, size, rows, codec):
    rng = np.random.default_rng(3)
    lines = [text(rng, size) for _ in range(rows)]
    path = written(tmp_path, lines)
    assert codecs(path) == {codec}
    assert [one["line"] for one in pq.read_table(path)["payload"].to_pylist()] == lines
    assert written(tmp_path, lines) == path  # by its checksum, too


def test_letters_of_any_kind_are_looked_for(tmp_path):
    """Noise at the beginning does not tell of what follows."""
    rng = np.random.default_rng(3)
    lines = [noise(rng, 1000) for _ in range(200)] + [document(rng, 30) for _ in range(1800)]
    assert codecs(written(tmp_path, lines)) == {"ZSTD"}


def test_of_large_letters_only_so_much_is_tried(tmp_path, monkeypatch):
    tried = []
    codec = pa.Codec("zstd")

    class Codec:
        def __init__(self, name):
            assert name == "zstd"

        def compress(self, data):
            tried.append(len(data))
            return codec.compress(data)

    rng = np.random.default_rng(3)
    table = pa.table({"payload": pa.array([{"line": noise(rng, 3_000_000)}])})
    monkeypatch.setattr(base_letters.pa, "Codec", Codec)
    assert not base_letters.worth_compressing(table)
    assert tried == [2 * base_letters._SAMPLE_BYTES]
