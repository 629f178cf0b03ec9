"""Tables: folds into 10 million keys, look-ups, compaction, and the size of segments.

The table has a key, a sum, a count and the latest value by a time.  Both sides of the comparison
with Spark read the same Parquet files, one a micro-batch, on one core; the first file has every key
once and is not counted.  The seconds of both are those of whole micro-batches: ackcore's rows pass
through a bolt and are tracked.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyspark.sql.streaming import StreamingQueryListener

from ackcore.spark import start
from ackcore.spark.checkpoint.table_records import SegmentFiles, TableState
from ackcore.spark.sinks.sink_batch import BatchFile
from ackcore.spark.stores.local import LocalStore
from ackcore.spark.tables.table_fold import TableFold
from ackcore.spark.tables.table_snapshots import TableSnapshot
from ackcore.spark.tasks.row_files import ROOT, RowFileWriter
from ackcore.tables import count, latest, session, sum_of, tumbling
from ackcore.tables.folding import RANGE_ROWS, fold_rows, merge_states
from ackcore.tables.table_compaction import SegmentInfo
from ackcore.tables.table_segments import TableReader, TableSegment, merged_parts, write_segment
from ackcore.tables.table_shape import HASH, HASH_END, TableShape
from ackcore.tables.watermarks import NEVER
from ackcore.tables.window_rows import closing_rows, merged_sessions
from bench.processes import cpu_s
from bench.topologies import PassOn, passed_on

SCHEMA = pa.schema([("shop", pa.int64()), ("euros", pa.float64()), ("at", pa.timestamp("us"))])
SHAPE = TableShape.of(
    "totals",
    SCHEMA,
    "shop",
    {"euros": sum_of("euros"), "orders": count(), "last": latest("at", "euros")},
)
LOOKUP_KEYS, BATCHES = 10_000, 3


def orders(shops: np.ndarray, seed: int) -> pa.RecordBatch:
    """Return one order for each of some shops."""
    rng, n = np.random.default_rng(seed), len(shops)
    at = pa.array(rng.integers(0, 86_400 * 10**6, n)).cast(pa.timestamp("us"))
    return pa.record_batch([shops, rng.integers(0, 10**6, n) / 100, at], schema=SCHEMA)


class StoredBase:
    """A base of segments in files, which are mapped into memory."""

    def __init__(self, directory: Path, keys: int) -> None:
        self.directory, self.keys, self.names = directory, keys, itertools.count()
        parts = [
            fold_rows(SHAPE, [orders(shops, 1)], 0)
            for shops in np.array_split(np.arange(keys), max(1, keys // 1_000_000))
        ]
        self.deltas = [TableSegment.open(write_segment(SHAPE, part), SHAPE) for part in parts]
        self.infos: list[SegmentInfo] = []
        self.compact()

    def compact(self) -> None:
        """Merge the deltas into the base, range by range."""
        self.infos.clear()
        for lo, hi, rows in merged_parts(SHAPE, self.deltas, 0, HASH_END, None):
            self.put(rows, lo, hi, len(self.infos))

    def put(self, rows: pa.Table, lo: int, hi: int, place: int) -> SegmentInfo:
        """Write a segment at a place among the others."""
        data = write_segment(SHAPE, rows, lo, hi)
        file = f"{next(self.names)}.arrow"
        (self.directory / file).write_bytes(data)
        self.infos.insert(place, SegmentInfo(file, len(rows), len(data), lo, hi))
        return self.infos[place]

    @property
    def nbytes(self) -> int:
        """The size of all files."""
        return sum(info.nbytes for info in self.infos)

    def reader(self) -> TableReader:
        """Open all files."""
        return TableReader(SHAPE, [self.opened(info) for info in self.infos], 0)

    def opened(self, info: SegmentInfo) -> TableSegment:
        """Map a segment into memory."""
        buffer = pa.memory_map(str(self.directory / info.file)).read_buffer()
        return TableSegment.open(buffer, SHAPE, info.lo, info.hi)

    def fold(self, reader: TableReader, rows: pa.Table) -> None:
        """Fold a micro-batch, and write its segment."""
        partial = fold_rows(SHAPE, [rows], 0)
        older = reader.lookup(partial)
        older = older.filter(pc.is_valid(older.column(HASH)))
        data = write_segment(SHAPE, merge_states(SHAPE, older, partial))
        (self.directory / "delta").write_bytes(data)


@pytest.fixture(scope="module")
def keys(quick: bool) -> int:
    """The number of keys in the table."""
    return 100_000 if quick else 10_000_000


@pytest.fixture(scope="module")
def base(keys: int, tmp_path_factory: pytest.TempPathFactory) -> StoredBase:
    """A table in which every key has one order."""
    return StoredBase(tmp_path_factory.mktemp("table"), keys)


def bench_folds_lookups_and_compaction(base, keys, quick, interleaved, report_ratio):
    """CPU time of this thread."""
    rng = np.random.default_rng(2)
    n = keys // 10
    rows = pa.Table.from_batches([orders(rng.integers(0, keys, n), 3)])
    sought = pa.record_batch({"shop": rng.integers(0, keys, LOOKUP_KEYS)})
    reader = base.reader()
    assert reader.lookup(sought).column(HASH).null_count == 0
    contestants = {
        "fold": lambda: base.fold(reader, rows),
        "opened": lambda: base.reader().lookup(sought),
        "open": lambda: reader.lookup(sought),
    }
    taken = interleaved(contestants, 1 if quick else 9)
    report_ratio("rows folded a second", [n / s / 1e6 for s in taken["fold"]], unit="M/s")
    for name, bound in (("opened", 50), ("open", 5)):
        label = f"look-up of {LOOKUP_KEYS:,} keys, segments {name}"
        report_ratio(label, [s * 1e3 for s in taken[name]], bound, True, "ms")
    taken = interleaved({"compaction": base.compact}, 1 if quick else 3)
    rates = [keys / s / 1e6 for s in taken["compaction"]]
    report_ratio("rows compacted a second", rates, unit="M/s")


@pytest.mark.parametrize("window", [tumbling(3600, "at"), session(600, "at")])
def bench_folds_of_windows(window, keys, quick, interleaved, report_ratio):
    """CPU time of a fold of the same rows with windows against one without, and of a close.

    A day of orders of a tenth of the keys, all of them open; then one micro-batch closes an hour.
    """
    shape = TableShape.of("totals", SCHEMA, "shop", SHAPE.aggregates, window=window)
    rng = np.random.default_rng(7)
    n = keys // 10
    rows = pa.Table.from_batches([orders(rng.integers(0, n, n), number) for number in (1, 2)])
    more = pa.Table.from_batches([orders(rng.integers(0, n, n), 3)])
    kinds, readers = {"windows": shape, "none": SHAPE}, {}
    for name, of in kinds.items():
        segment = TableSegment.open(write_segment(of, fold_rows(of, [rows], NEVER)), of)
        readers[name] = TableReader(of, [segment], NEVER)

    def fold(name):
        of, reader = kinds[name], readers[name]
        partial = fold_rows(of, [more], NEVER)
        if of.sessions:
            _, states = merged_sessions(of, reader, partial)
        else:
            older = reader.lookup(partial)
            states = merge_states(of, older.filter(pc.is_valid(older.column(HASH))), partial)
        write_segment(of, states)

    taken = interleaved({name: lambda name=name: fold(name) for name in kinds}, 1 if quick else 5)
    what = "sessions" if shape.sessions else "hours"
    report_ratio(
        f"rows folded a second, {what}", [n / s / 1e6 for s in taken["windows"]], unit="M/s"
    )
    pairs = zip(taken["windows"], taken["none"], strict=True)
    report_ratio(f"fold with {what} against none", [one / other for one, other in pairs])
    hour = 3_600_000 + (2 * 600_000 if shape.sessions else 0)
    closed = sum(len(part) for part in closing_rows(readers["windows"], hour))
    taken = interleaved(
        {"close": lambda: [*closing_rows(readers["windows"], hour)]}, 1 if quick else 5
    )
    total = readers["windows"].segments[0].rows
    report_ratio(
        f"{what}: {closed:,} of {total:,} rows close", [s * 1e3 for s in taken["close"]], unit="ms"
    )


def bench_bytes_against_parquet(base, report_ratio, tmp_path):
    """The rows of the base in the same order, as one Parquet file each range."""
    nbytes = 0
    for part in base.reader().scan():
        pq.write_table(part.drop_columns([HASH]), tmp_path / "part.parquet")
        nbytes += (tmp_path / "part.parquet").stat().st_size
    report_ratio("bytes against Parquet", [base.nbytes / nbytes], 1.5, True)
    numbers = np.random.default_rng(5).permutation(10_000_000)[: min(base.keys, RANGE_ROWS)]
    for key in ("shop-{:07d}", "user{0}@example{0:.2}.com"):
        texts = pa.array([key.format(str(n)) if "@" in key else key.format(n) for n in numbers])
        rows = pa.Table.from_batches([orders(numbers, 6)]).set_column(0, "shop", texts)
        shape = TableShape.of("totals", rows.schema, "shop", SHAPE.aggregates)
        stored = fold_rows(shape, [rows], 0)
        pq.write_table(stored.drop_columns([HASH]), tmp_path / "part.parquet")
        ratio = len(write_segment(shape, stored)) / (tmp_path / "part.parquet").stat().st_size
        report_ratio(f"bytes against Parquet, keys {texts[0]}", [ratio], 1.5, True)


class FoldedTable:
    """A table in a checkpoint's files, into which the driver folds micro-batches."""

    def __init__(self, directory: Path, base: StoredBase) -> None:
        self.directory, self.keys, self.number = directory, base.keys, 0
        self.files = SegmentFiles(LocalStore(directory), 1)
        self.state = TableState(SHAPE.structure(), 0)
        segments = [
            self.files.put(
                SHAPE.name, 0, (base.directory / each.file).read_bytes(), *each[1:2], *each[3:5]
            )
            for each in base.infos
        ]
        self.state = self.state._replace(rows=base.keys, segments=tuple(segments))

    def fold(self, rows: int) -> float:
        """Return the seconds of the fold of some rows, with its merges."""
        self.number += 1
        shops = np.random.default_rng(self.number).integers(0, self.keys, rows)
        batch = orders(shops, self.number).append_column(ROOT, pa.nulls(rows, pa.int64()))
        file = RowFileWriter(str(self.directory / f"work-{self.number}"), batch.schema, 0)
        file.write(batch)
        name, count_of, _ = file.finish()
        path = os.path.join(self.directory, f"work-{self.number}", name)
        fold = TableFold(self.files, SHAPE, self.number, 0)
        start = time.perf_counter()
        files = [BatchFile(path, count_of, nbytes=file.nbytes)]
        self.state = fold.folded(self.state, files, np.empty(0, np.int64))
        seconds = time.perf_counter() - start
        kept = {each.file for each in self.state.segments}
        for segment in (self.directory / "tables" / SHAPE.name).iterdir():
            if f"{SHAPE.name}/{segment.name}" not in kept:
                segment.unlink()
        return seconds


def first_lookup(snapshot: TableSnapshot, keys: int, seed: int, cached: bool) -> list[float]:
    """Return the wall and the CPU milliseconds of the first look-up of this process."""
    sought = pa.record_batch({"shop": np.random.default_rng(seed).integers(0, keys, LOOKUP_KEYS)})
    for info in () if cached else snapshot.segments:
        file = os.open(snapshot.files.place(info.file), os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)
    start = time.perf_counter(), time.thread_time()
    assert snapshot.reader().lookup(sought).column(HASH).null_count == 0
    return [1e3 * (time.perf_counter() - start[0]), 1e3 * (time.thread_time() - start[1])]


def bench_first_lookup_of_a_process(base, quick, report_ratio, tmp_path):
    """Checks the checksums of all files; with the page cache, and without."""
    table = FoldedTable(tmp_path, base)
    snapshot = TableSnapshot(SHAPE, table.state.segments, 0, table.files)
    taken = defaultdict(list)
    context = multiprocessing.get_context("spawn")
    for seed in range(1 if quick else 7):
        for cached in (True, False):
            with ProcessPoolExecutor(1, context) as pool:
                # The modules are loaded before.
                pool.submit(first_lookup, snapshot._replace(segments=()), 9, 0, True).exception()
                taken[cached].append(
                    pool.submit(first_lookup, snapshot, base.keys, seed, cached).result()
                )
    for cached, name in ((True, "in the page cache"), (False, "on the disk")):
        for clock, milliseconds in zip(
            ("wall", "CPU"), zip(*taken[cached], strict=True), strict=True
        ):
            report_ratio(
                f"first look-up of {LOOKUP_KEYS:,} keys in a process, files {name}, {clock}",
                milliseconds,
                50 if clock == "wall" else None,
                True,
                "ms",
            )


def anonymous_mb() -> float:
    """Return the memory of this process without pages of files, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith("RssAnon"))


@pytest.mark.parametrize(("rows", "batches"), [(1_000, 1_000), (20_000, 200)])
def bench_micro_batches_of_a_large_table(base, quick, rows, batches, report_ratio, tmp_path):
    """Wall time of the driver: read, fold, write the segment durably, and merge."""
    table = FoldedTable(tmp_path, base)
    taken, memory = [], []
    for _ in range(20 if quick else batches):
        taken.append(table.fold(rows))
        memory.append(anonymous_mb())
    label = f"micro-batch of {rows:,} rows"
    report_ratio(
        f"{label}, table of {base.keys:,} keys", taken, 0.15 if rows == 1_000 else None, True, "s"
    )
    report_ratio(
        f"{label}, the slowest above the median", [max(taken) - np.median(taken)], 1, True, "s"
    )
    half = len(memory) // 2
    report_ratio(
        f"{label}, memory of the second half against the first",
        [max(memory[half:]) / max(memory[:half])],
        1.1,
        True,
    )


class PassOrders(PassOn):
    """Passes orders on."""

    outputs = SCHEMA


def totals_of_spark(source):
    """Return the same table by Spark's aggregates."""
    from pyspark.sql import functions as F  # noqa: PLC0415

    return source.groupBy("shop").agg(F.sum("euros"), F.count(F.lit(1)), F.max_by("euros", "at"))


def totals_in_pandas(source):
    """Return the same table by `transformWithStateInPandas`."""
    import pandas as pd  # noqa: PLC0415
    from pyspark.sql.streaming import StatefulProcessor  # noqa: PLC0415

    class Totals(StatefulProcessor):
        def init(self, handle):
            self.state = handle.getValueState(
                "t", "euros double, orders long, at timestamp, last double"
            )

        def handleInputRows(self, key, rows, timerValues):
            euros, n, at, last = self.state.get() or (0.0, 0, None, None)
            for frame in rows:
                euros, n = euros + float(frame.euros.sum()), n + len(frame)
                newest = frame.loc[frame["at"].idxmax()]
                if at is None or newest["at"].to_pydatetime() >= at:
                    at, last = newest["at"].to_pydatetime(), float(newest.euros)
            self.state.update((euros, n, at, last))
            yield pd.DataFrame({"shop": [key[0]], "euros": [euros], "orders": [n], "last": [last]})

        def close(self):
            pass

    return source.groupBy("shop").transformWithStateInPandas(
        Totals(), "shop long, euros double, orders long, last double", "Update", "None"
    )


class NotedProgress(StreamingQueryListener):
    """Notes the CPU time of all processes when a micro-batch with rows ends."""

    def __init__(self, cpu: list[float]) -> None:
        self.cpu = cpu

    def onQueryStarted(self, event):
        """Do nothing."""

    def onQueryProgress(self, event):
        """Note one."""
        if event.progress.numInputRows:
            self.cpu.append(cpu_s())

    def onQueryTerminated(self, event):
        """Do nothing."""


@pytest.fixture(scope="module")
def spark():
    """One core, and a state store of files on the disk."""
    quiet_spark = pytest.importorskip("ackcore.examples.quiet_spark")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_SUBMIT_ARGS", "--driver-memory 4g pyspark-shell")
        with quiet_spark.spark_session("local[1]") as (session, _):
            session.conf.set("spark.sql.shuffle.partitions", 1)
            session.conf.set(
                "spark.sql.streaming.stateStore.providerClass",
                "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
            )
            yield session


@pytest.fixture
def micro_batches(spark, tmp_path, new_path, ends):
    """``micro_batches(keys, rows, n)`` writes files of orders: of every key, and ``n`` of ``rows``.

    It returns two functions, ``ackcore(table)`` and ``bare(query)``.  They run a stream with one
    micro-batch a file, and return the wall and the CPU seconds of each but the first.
    """

    def micro_batches(keys: int, rows: int, n: int) -> Any:
        rng = np.random.default_rng(4)
        directory = tmp_path / f"orders-{keys}"
        directory.mkdir()
        for number in range(n + 1):
            shops = rng.integers(0, keys, rows) if number else np.arange(keys)
            path = directory / f"{number}.parquet"
            pq.write_table(pa.Table.from_batches([orders(shops, number)]), path)
            os.utime(path, (number, number))

        def source() -> Any:
            reader = spark.readStream.schema("shop long, euros double, at timestamp_ntz")
            return reader.option("maxFilesPerTrigger", 1).parquet(str(directory))

        def ackcore(with_table: bool = True) -> list[tuple[float, float]]:
            builder = passed_on(source(), PassOrders())
            if with_table:
                builder.table("totals", from_="bolt", key="shop", value=SHAPE.aggregates)
            ends.counts_cpu = True
            ends.times.clear()
            ends.cpu.clear()
            run = start(builder.build(), spark, new_path(), trigger={"availableNow": True})
            assert run.await_termination(3600)
            assert run.counts.acked == keys + n * rows
            times, cpu = ends.times[: n + 1], ends.cpu[: n + 1]
            return list(zip(np.diff(times).tolist(), np.diff(cpu).tolist(), strict=True))

        def bare(query: Any) -> list[tuple[float, float]]:
            cpu: list[float] = []
            noted = NotedProgress(cpu)
            spark.streams.addListener(noted)
            frame = source().selectExpr("shop", "euros", "CAST(at AS timestamp) AS at")
            writer = query(frame).writeStream.format("noop").outputMode("update")
            writer = writer.option("checkpointLocation", str(new_path()))
            run = writer.trigger(availableNow=True).start()
            run.awaitTermination()
            progress = [each for each in run.recentProgress if each["numInputRows"]]
            assert progress[-1]["stateOperators"][0]["numRowsTotal"] == keys
            while len(cpu) < len(progress):
                time.sleep(0.01)
            spark.streams.removeListener(noted)
            wall = [each["durationMs"]["triggerExecution"] / 1e3 for each in progress[1:]]
            return list(zip(wall, np.diff(cpu[: n + 1]).tolist(), strict=True))

        return ackcore, bare

    return micro_batches


@pytest.mark.parametrize(
    ("query", "keys", "rows", "bound"),
    [(totals_of_spark, 1_000_000, 1_000_000, 1), (totals_in_pandas, 20_000, 10_000, 5)],
)
def bench_micro_batches_against_spark(query, keys, rows, bound, quick, micro_batches, report_ratio):
    """Whole micro-batches of one core, from the file to the state that is durable."""
    if quick:
        keys, rows = keys // 100, rows // 100
    ackcore, bare = micro_batches(keys, rows, BATCHES)
    mine, theirs = ackcore(), bare(query)
    for place, clock in enumerate(("wall", "CPU")):
        pairs = [(one[place], other[place]) for one, other in zip(theirs, mine, strict=True)]
        taken = " / ".join(f"{np.median(side):.2f}" for side in zip(*pairs, strict=True))
        report_ratio(
            f"{rows:,} rows, {keys:,} keys: {query.__name__} / table ({taken} s {clock})",
            [one / other for one, other in pairs],
            bound,
        )


def bench_small_micro_batches_of_a_large_table(keys, quick, micro_batches, report_ratio):
    """Whole micro-batches of 1,000 rows on Spark, with a table and without."""
    ackcore, _ = micro_batches(keys, 1_000, 5 if quick else 40)
    ackcore(False)  # the JVM compiles
    mine, none = ackcore(True), ackcore(False)
    for place, clock, bound in ((0, "wall", 0.15), (1, "CPU", None)):
        taken = [np.array([one[place] for one in side[2:]]) for side in (mine, none)]
        medians = " - ".join(f"{np.median(side):.3f}" for side in taken)
        report_ratio(
            f"micro-batch of 1,000 rows, {keys:,} keys: table - none ({medians} s {clock})",
            (taken[0] - np.median(taken[1])).tolist(),
            bound,
            True,
            "s",
        )
