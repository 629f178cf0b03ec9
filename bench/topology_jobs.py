"""The Spark jobs of workers.py's children, for compare.py, and functions shared with the benches.

Only what is public in the oldest commit that is still compared is used here.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

import ackcore
from ackcore.examples.quiet_spark import spark_session
from ackcore.spark import run_batch, settle, start, to_parquet
from ackcore.topology import TopologyBuilder
from bench import topologies
from bench.processes import cpu_s
from bench.topologies import Ends, Split, SplitBut, Tag, periods, word_count

CORES = 2
LINES = "id bigint, line string"
DAY_MS = 86_400_000
#: Messages of a tree: an INIT and four ACKs.
MESSAGES = 5
SMALL_ROWS = 10_000
_FILES, _GROUP_ROWS = 8, 1 << 20


# ---- what is run -------------------------------------------------------------------------------


def words_into_parquet(source: Any, place: Path) -> TopologyBuilder:
    """Lines to words, shuffled by word, to a row for each in Parquet."""
    builder = TopologyBuilder()
    builder.spout("lines", source)
    builder.bolt("split", Split()).shuffle("lines")
    builder.bolt("tag", Tag()).fields("split", "word")
    builder.sink("tag", to_parquet(place))
    return builder


def write_events(directory: Path, rows: int, scattered: bool) -> None:
    """Write Parquet files of whole trees, whose messages lie anywhere in them, or together."""
    rng = np.random.default_rng(7)
    trees = rows // MESSAGES
    roots = rng.integers(-(2**63), 2**63 - 1, trees)
    edges = rng.integers(-(2**63), 2**63 - 1, (trees, MESSAGES - 1))
    vals = np.zeros((trees, MESSAGES), np.int64)
    vals[:, :-1] ^= edges
    vals[:, 1:] ^= edges
    tasks = np.full((trees, MESSAGES), -1, np.int32)
    tasks[:, 0] = rng.integers(0, 16, trees)
    order = np.arange(trees * MESSAGES)
    if scattered:
        rng.shuffle(order)
    columns = {"root_id": roots.repeat(MESSAGES), "val": vals.ravel(), "task": tasks.ravel()}
    for n, part in enumerate(np.array_split(order, _FILES)):
        written = pa.table({name: column[part] for name, column in columns.items()})
        pq.write_table(written, directory / f"part-{n}.parquet", row_group_size=_GROUP_ROWS)


def take_all(frame: Any) -> None:
    """Have every row made, and drop it."""
    frame.write.format("noop").mode("overwrite").save()


def _where_ackcore_is(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield pa.record_batch({"place": [ackcore.__file__] * len(batch)})


# ---- turn by turn ------------------------------------------------------------------------------


class OnSpark:
    """A session; each turn runs what it is asked for to its end, from a new checkpoint.

    A turn returns seconds: of the wall clock, and of CPU time of driver, JVM and workers.
    """

    def __init__(self, data: str) -> None:
        self._data = Path(data)
        self._lines = ds.dataset(self._data / "lines").count_rows()
        self._words = topologies.words_in(ds.dataset(self._data / "lines").to_table())
        self._small = len(list((self._data / "small").iterdir()))
        self._session = spark_session(f"local[{CORES}]")
        self._spark, _ = self._session.__enter__()
        self._spark.conf.set("spark.sql.adaptive.enabled", "true")
        (row,) = self._spark.range(1).mapInArrow(_where_ackcore_is, "place string").collect()
        assert row.place == ackcore.__file__, (row, ackcore.__file__)

    def close(self) -> None:
        """Stop the session."""
        self._session.__exit__(None, None, None)

    def __call__(self, work: str) -> dict[str, float]:
        """Do one of what is below."""
        with tempfile.TemporaryDirectory() as place:
            began, cpu = time.perf_counter(), cpu_s()
            own = getattr(self, work)(Path(place))
            taken = {"wall": time.perf_counter() - began, "CPU": cpu_s() - cpu}
        return own or taken

    def count_words(self, place: Path) -> None:
        """The word count, with an exchange."""
        frame = self._spark.read.parquet(str(self._data / "lines"))
        counts = run_batch(word_count(frame).build(), self._spark, place)
        assert counts.balanced
        assert counts.acked == counts.records == self._lines

    def write_parquet(self, place: Path) -> None:
        """A stream that writes a row for each word, a micro-batch for each file."""
        topology = words_into_parquet(self._stream("lines"), place / "out").build()
        trigger = {"availableNow": True}
        query = start(topology, self._spark, place / "checkpoint", trigger=trigger)
        query.await_termination()
        assert query.counts.acked == self._lines
        out = ds.dataset(place / "out", exclude_invalid_files=True)
        assert out.count_rows() == self._words

    def micro_batches(self, place: Path) -> dict[str, float]:
        """One small micro-batch of a stream in which 1,000 records wait for a day: the median."""
        topology = word_count(self._stream("small"), split=SplitBut(1000)).build(
            backoff_s=DAY_MS / 1000, max_backoff_s=DAY_MS / 1000
        )
        ends = Ends(counts_cpu=True)
        stop = ends.listen()
        try:
            query = start(topology, self._spark, place)
            began = time.monotonic()
            while len(ends.times) < self._small:
                assert query.is_active, query.exception
                assert time.monotonic() < began + 120, query.progress
                time.sleep(0.01)
            query.stop()
        finally:
            stop()
        assert query.counts.waiting == 1000
        assert query.counts.acked + 1000 == query.counts.records == SMALL_ROWS * self._small
        columns = {"wall": ends.times, "CPU": ends.cpu}
        return {name: statistics.median(periods(each)) for name, each in columns.items()}

    def settle_events(self, place: Path) -> None:
        """Trees scattered over a table of ack events; every outcome is taken."""
        frame = self._spark.read.parquet(str(self._data / "events"))
        take_all(settle(frame))

    def _stream(self, of: str) -> Any:
        reader = self._spark.readStream.schema(LINES).option("maxFilesPerTrigger", 1)
        return reader.parquet(str(self._data / of))


#: What is compared, by the name it is printed under.
COMPARED = {
    "word count": "count_words",
    "words into Parquet": "write_parquet",
    "micro-batch of 10,000 rows, 1,000 waiting": "micro_batches",
    "settle": "settle_events",
}


def write_data(directory: Path, lines: int, small: int, events: int) -> None:
    """Write what `OnSpark` reads."""
    for name in ("lines", "small", "events"):
        os.mkdir(directory / name)
    topologies.write_lines(directory / "lines", [lines // _FILES] * _FILES)
    topologies.write_lines(directory / "small", [SMALL_ROWS] * small)
    write_events(directory / "events", events, scattered=True)
