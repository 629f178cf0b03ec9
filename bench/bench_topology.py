"""Topologies on Spark against the same functions on bare Spark, untracked.

ACKCORE_BENCH_LINES says how many lines a word count has, 2 million by default, of 3.8 words each.
Contestants take turns, each a whole job or micro-batch, with a new DataFrame each time: of one that
was collected before, Spark keeps the shuffle files and skips what wrote them. Wall time decides;
the CPU time of driver, JVM and workers together stands beside it, since other work on the machine
takes no part in that.

A side reads from Parquet what the other reads: both columns. Bare word counts return one row, and
the counts of a bolt are not used: neither is timed.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from ackcore.retry import Policy
from ackcore.spark import FileSpout, QueryListener, RateSpout, run_batch, start, to_parquet
from ackcore.spark.base.reasons import REASON_SCHEMA
from ackcore.spark.base.schemas import FailedFile
from ackcore.spark.tasks.failed_rows import Rules
from ackcore.spark.tasks.failed_writer import FailedInRun
from ackcore.spark.tasks.record_ids import SourceRecords, SpoutSpec
from ackcore.topology import TopologyBuilder, expect
from ackcore.topology.executors import executor_for
from ackcore.topology.tuples import Identity, Reason
from bench import topologies
from bench.driver_memory_job import Waits, growth, wait_no_longer
from bench.processes import cpu_s
from bench.topologies import (
    EmitAndAck,
    EmitBasic,
    FailBelow,
    PassNumbers,
    PassOn,
    SplitBut,
    SplitOthers,
    passed_on,
    periods,
    word_count,
)
from bench.topology_jobs import CORES, DAY_MS, LINES, take_all, words_into_parquet

MICRO_ROWS = 10_000


# ---- whole jobs --------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [3.8, 10])
def bench_word_count(spark, rows, whole, contest, tmp_path, words):
    """Words shuffled by word: bare, in Spark SQL, tracked, and on our own engine untracked."""
    topologies.write_lines(tmp_path, [rows // 8] * 8, words)

    def read() -> Any:
        return spark.read.parquet(str(tmp_path))

    def bare() -> None:
        every_word = read().mapInArrow(topologies.split_bare, "word string")
        every_word = every_word.repartition(CORES, "word")
        every_word.mapInArrow(topologies.count_bare, "n bigint").collect()

    def sql() -> None:
        every_word = read().selectExpr("explode(split(line, ' ')) AS word")
        take_all(every_word.groupBy("word").count())

    def engine(tracked: bool) -> None:
        whole(word_count(read(), tracked=tracked), rows, tracked)

    contest(
        f"word count, {rows:,} lines of {words:g} words",
        {
            "bare": bare,
            "SQL": sql,
            "tracked": partial(engine, True),
            "untracked": partial(engine, False),
        },
        {("bare", "tracked"): 1.5, ("SQL", "tracked"): 1.05, ("untracked", "tracked"): 0.85},
    )


def bench_one_in_a_hundred(spark, lines, rows, new_path, contest):
    """The word count, where one line in a hundred fails behind the split and waits."""

    def run(every: int) -> None:
        builder = word_count(spark.read.parquet(str(lines)), split=SplitOthers(every))
        with contextlib.suppress(Waits):
            # By a clock that stands still, so that no retry is due.
            run_batch(
                builder.build(max_waiting=rows),
                spark,
                new_path(),
                max_dead_ratio=None,
                clock=lambda: DAY_MS,
                wait=wait_no_longer,
            )

    contest(
        f"word count, {rows:,} lines",
        {"none fails": partial(run, 0), "one in 100 fails": partial(run, 100)},
        {("none fails", "one in 100 fails"): 0.8},
    )


@pytest.mark.parametrize("what", ["word count", "pass-through"])
def bench_narrow(spark, lines, rows, whole, contest, what):
    """Without a shuffle."""
    counts = what == "word count"
    function = topologies.split_and_count_bare if counts else topologies.pass_bare

    def bare() -> None:
        spark.read.parquet(str(lines)).mapInArrow(function, "n bigint").collect()

    def tracked() -> None:
        frame = spark.read.parquet(str(lines))
        whole(word_count(frame, by="local") if counts else passed_on(frame, PassOn()), rows)

    contest(
        f"narrow {what}, {rows:,} lines",
        {"bare": bare, "tracked": tracked},
        {("bare", "tracked"): 0.97},
    )


def bench_ordered(spark, lines, rows, whole, contest):
    """Order by key, where nothing fails."""

    def run(ordered_by: str | None) -> None:
        whole(word_count(spark.read.parquet(str(lines)), by="local", ordered_by=ordered_by), rows)

    contest(
        f"narrow word count, {rows:,} lines, nothing failing",
        {"as they come": partial(run, None), "ordered_by": partial(run, "line")},
        {("as they come", "ordered_by"): 0.95},
        fine=True,
    )


def bench_expectations(spark, rows, whole, contest, tmp_path):
    """Rows that Spark SQL filters before the spout, and rows that expectations drop."""
    rows *= 5
    good = topologies.write_orders(tmp_path, rows)

    def read() -> Any:
        return spark.read.parquet(str(tmp_path))

    def take(frame: Any, records: int, *expected: Any) -> None:
        builder = TopologyBuilder()
        builder.spout("orders", frame, expect=expected)
        builder.bolt("taken", topologies.TakeIn()).shuffle("orders")
        whole(builder, records)

    contest(
        f"{len(topologies.EXPECTED)} conditions, {rows:,} rows",
        {
            "filter in Spark SQL": lambda: take(
                read().where(" AND ".join(topologies.EXPECTED)), good
            ),
            "expect": lambda: take(read(), rows, expect(*topologies.EXPECTED, on_fail="drop")),
            "neither": lambda: take(read(), rows),
        },
        {("filter in Spark SQL", "expect"): 0.8, ("neither", "expect"): None},
    )


@pytest.mark.parametrize("order", ["fixed", "unknown"])
def bench_snapshot(spark, lines, rows, whole, contest, order):
    """Input as it is read, and from a snapshot that is written before; few lines show the job."""

    def run(**settings: Any) -> None:
        frame = spark.read.parquet(str(lines))
        if order == "unknown":  # the plan asks for the time: the spout stage spills the rows
            frame = frame.where("current_timestamp() > timestamp '2000-01-01'")
        whole(word_count(frame, by="local"), rows, **settings)

    contest(
        f"narrow word count, {rows:,} lines in {order} order",
        {"as read": run, "snapshot": partial(run, careful_after=0)},
        {("as read", "snapshot"): None},
    )


def bench_parquet_sink(spark, lines, rows, new_path, contest):
    """A row for each word into Parquet, as a stream: against a foreachBatch that persists."""
    source = partial(spark.readStream.schema(LINES).parquet, str(lines))
    every_word = topologies.words_in(ds.dataset(lines).to_table())

    def write(frame: Any, number: int, out: Path) -> None:
        words = frame.mapInArrow(topologies.split_bare, "word string").repartition(CORES, "word")
        measured = words.mapInArrow(topologies.measure_bare, "word string, letters int").persist()
        measured.write.mode("overwrite").parquet(str(out / f"batch_id={number}"))
        measured.unpersist()

    def bare() -> None:
        place = new_path()
        writer = source().writeStream.foreachBatch(partial(write, out=place / "out"))
        options = {"checkpointLocation": str(place / "checkpoint")}
        writer.options(**options).trigger(availableNow=True).start().awaitTermination()
        assert ds.dataset(place / "out").count_rows() == every_word

    def tracked() -> None:
        place = new_path()
        topology = words_into_parquet(source(), place / "out").build()
        trigger = {"availableNow": True}
        query = start(topology, spark, place / "checkpoint", trigger=trigger)
        query.await_termination()
        assert query.counts.acked == rows
        assert ds.dataset(place / "out", exclude_invalid_files=True).count_rows() == every_word

    contest(
        f"word count into Parquet, {rows:,} lines",
        {"bare": bare, "tracked": tracked},
        {("bare", "tracked"): 0.6},
    )


def bench_ten_times(spark, lines, rows, rounds, whole, interleaved, report_ratio, tmp_path):
    """The word count with ten times the rows: its files ten times over."""
    larger = tmp_path / "larger"
    larger.mkdir()
    for file in lines.glob("*.parquet"):
        for number in range(10):
            os.link(file, larger / f"{number}-{file.name}")
    contestants = {
        "once": lambda: whole(word_count(spark.read.parquet(str(lines))), rows),
        "ten times": lambda: whole(word_count(spark.read.parquet(str(larger))), 10 * rows),
    }
    contestants["once"]()
    seconds = interleaved(contestants, min(rounds, 3), time.perf_counter)
    pairs = zip(seconds["ten times"], seconds["once"], strict=True)
    report_ratio(
        f"word count, {10 * rows:,} / {rows:,} lines", [a / b for a, b in pairs], 11, at_most=True
    )


# ---- micro-batches -----------------------------------------------------------------------------


@pytest.fixture
def micro_batches(spark, ends, quick, new_path, tmp_path_factory):
    """``bare, tracked = micro_batches(first, rows)``: each runs a stream of micro-batches.

    Before them comes one of ``first`` rows.  ``bare()`` and ``tracked(failing)`` return the
    seconds of each micro-batch; the first ``failing`` rows fail, and wait for a day or so.
    """
    batches = 6 if quick else 14

    def micro_batches(first: int, rows: int = MICRO_ROWS) -> tuple[Callable[[], list[float]], Any]:
        directory = tmp_path_factory.mktemp("stream")
        topologies.write_lines(directory, [first] + [rows] * batches)

        def source() -> Any:
            reader = spark.readStream.schema(LINES).option("maxFilesPerTrigger", 1)
            return reader.parquet(str(directory))

        def bare() -> list[float]:
            times: list[float] = []
            done = threading.Event()

            def each(frame: Any, number: int) -> None:
                words = frame.mapInArrow(topologies.split_bare, "word string")
                words = words.repartition(CORES, "word")
                words.mapInArrow(topologies.count_bare, "n bigint").collect()
                times.append(time.perf_counter())
                if len(times) > batches:
                    done.set()

            place = str(new_path())
            writer = source().writeStream.foreachBatch(each).option("checkpointLocation", place)
            query = writer.start()
            assert done.wait(120), query.exception()
            query.stop()
            return periods(times)

        def tracked(failing: int) -> list[float]:
            ends.times.clear()
            builder = word_count(source(), split=SplitBut(failing))
            topology = builder.build(backoff_s=DAY_MS / 1000, max_backoff_s=DAY_MS / 1000)
            query = start(topology, spark, new_path())
            began = time.monotonic()
            while len(ends.times) <= batches:
                assert query.is_active, query.exception
                assert time.monotonic() < began + 120, query.progress
                time.sleep(0.01)
            query.stop()
            records = first + batches * rows
            assert query.counts.records == records
            # Of a day's back-off hardly any comes to its end within seconds.
            assert query.counts.waiting == failing
            assert query.counts.acked == records - failing
            return periods(ends.times[: batches + 1])

        return bare, tracked

    return micro_batches


@pytest.mark.parametrize(("rows", "waiting", "bound"), [(10_000, 1000, 0.3), (1000, 0, 0.03)])
def bench_micro_batch(micro_batches, rounds, report_ratio, rows, waiting, bound):
    """The extra time of a small micro-batch over a bare foreachBatch with one action."""
    bare, tracked = micro_batches(rows, rows)
    pairs = [
        (statistics.median(tracked(waiting)), statistics.median(bare())) for _ in range(rounds)
    ]
    taken = " - ".join(f"{statistics.median(side):.2f}" for side in zip(*pairs, strict=True))
    report_ratio(
        f"micro-batch of {rows:,} rows, {waiting:,} waiting: tracked - bare ({taken} s)",
        [more - less for more, less in pairs],
        bound,
        at_most=True,
        unit="s",
    )


def bench_loop(spark, new_path, quick, rounds, report_ratio):
    """A micro-batch of 1,000 numbers into Parquet on the loop, and the same query by itself."""
    rows, batches = 1000, 6 if quick else 20

    def bare() -> float:
        out, times = new_path(), []
        for number in range(batches):
            frame = spark.range(number * rows, (number + 1) * rows).toDF("value")
            passed = frame.mapInArrow(topologies.numbers_bare, "value bigint")
            passed.write.mode("overwrite").parquet(str(out / f"batch_id={number}"))
            times.append(time.perf_counter())
        return statistics.median(periods(times))

    def tracked() -> float:
        times: list[float] = []

        class Noted(QueryListener):
            def on_progress(self, progress: Any, counts: Any) -> None:
                times.append(time.perf_counter())

        builder = TopologyBuilder()
        builder.spout("numbers", RateSpout(rows * batches, max_rows_per_batch=rows))
        builder.bolt("passed", PassNumbers()).shuffle("numbers")
        builder.sink("passed", to_parquet(new_path()))
        ends = {"availableNow": True}
        query = start(builder.build(), spark, new_path(), trigger=ends, listeners=[Noted()])
        assert query.await_termination(300)
        assert query.counts.acked == rows * batches
        return statistics.median(periods(times[:batches]))

    pairs = [(tracked(), bare()) for _ in range(rounds)]
    name = f"loop, micro-batch of {rows:,} numbers into Parquet"
    report_ratio(f"{name}: in all", [more for more, _ in pairs], 0.12, at_most=True, unit="s")
    beyond = [more - less for more, less in pairs]
    report_ratio(f"{name}: beyond the query alone", beyond, None, at_most=True, unit="s")


@pytest.mark.parametrize("files", [0, 10_000])
def bench_idle(spark, tmp_path, new_path, quick, rounds, report_ratio, files):
    """The CPU of driver, JVM and workers while a stream of files waits for a new one."""
    folder = tmp_path / "in"
    folder.mkdir()
    for n in range(files):
        (folder / f"{n:05}").touch()
    builder = TopologyBuilder()
    builder.spout("lines", FileSpout(folder, "text"))
    builder.sink("lines", lambda frame, number: None)
    query = start(builder.build(), spark, new_path())
    query.process_all_available()
    seconds, shares = 3 if quick else 20, []
    time.sleep(seconds)  # the JVM compiles and collects for a while
    for _ in range(rounds):
        before, began = cpu_s(), time.perf_counter()
        time.sleep(seconds)
        shares.append(100 * (cpu_s() - before) / (time.perf_counter() - began))
    query.stop()
    report_ratio(f"idle stream, {files:,} files", shares, 2, at_most=True, unit="% of a core")


def bench_file_plan(tmp_path, rounds, report_ratio):
    """The plan of 100 new files among 10,000."""
    for n in range(10_000):
        (tmp_path / f"{n:05}").touch()
    spout = FileSpout(tmp_path, "text")
    plan = json.loads(json.dumps(spout.plan(None)))
    for n in range(100):
        (tmp_path / f"new-{n}").touch()
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        assert len(spout.plan(plan)["files"]) == 100
        seconds.append(time.perf_counter() - began)
    report_ratio("plan of 100 new files among 10,000", seconds, 0.2, at_most=True, unit="s")


def bench_waiting(micro_batches, rounds, quick, report_ratio):
    """The same with 100,000 records waiting for retries, and with none."""
    waiting = 10_000 if quick else 100_000
    _, tracked = micro_batches(waiting)
    pairs = [[statistics.median(tracked(n)) for n in (waiting, 0)] for _ in range(rounds)]
    taken = " / ".join(f"{statistics.median(side):.2f}" for side in zip(*pairs, strict=True))
    report_ratio(
        f"micro-batch of {MICRO_ROWS:,} rows: {waiting:,} waiting / none ({taken} s)",
        [a / b for a, b in pairs],
        1.3,
        at_most=True,
    )


# ---- an outage -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settled", "fate"),
    [(False, "waits"), (False, "dies"), (True, "waits")],
    ids=["waits", "dies", "waits, settled"],
)
def bench_all_fail(
    spark, quick, rounds, new_path, tmp_path, interleaved, report_ratio, settled, fate
):
    """A micro-batch of records of 1 kB that all fail, against one that all succeed.

    With an exchange behind the bolt that fails them there is a settle stage.
    """
    rows = 100_000 if quick else 1_000_000
    topologies.write_long_lines(tmp_path, rows, 1000)
    grown: list[float] = []

    def run(failing: int) -> None:
        builder = passed_on(spark.read.parquet(str(tmp_path)), FailBelow(failing))
        if settled:
            builder.bolt("kept", FailBelow(0)).fields("bolt", "id")
        attempts = 1 if fate == "dies" else 5
        topology = builder.build(max_waiting=rows, max_attempts=attempts)
        with contextlib.suppress(Waits), growth() as megabytes:
            # By a clock that stands still, so that no retry is due.
            run_batch(
                topology,
                spark,
                new_path(),
                max_dead_ratio=None,
                clock=lambda: DAY_MS,
                wait=wait_no_longer,
            )
        if failing:
            grown.append(megabytes()["RSS"])

    contestants = {"succeed": partial(run, 0), "fail": partial(run, rows)}
    for work in contestants.values():
        work()
    seconds = interleaved(contestants, rounds, time.perf_counter)
    taken = " / ".join(f"{statistics.median(seconds[each]):.2f}" for each in contestants)
    pairs = zip(seconds["succeed"], seconds["fail"], strict=True)
    title = f"{rows:,} records of 1 kB, each {fate}" + ", settled" * settled
    report_ratio(f"{title}: succeed / fail ({taken} s)", [a / b for a, b in pairs], 0.7)
    report_ratio(f"{title}: the driver's Python grows", grown[1:], 300, at_most=True, unit="MB")


@pytest.mark.parametrize("fate", ["waits", "dies"])
def bench_failing_task(quick, rounds, new_path, report_ratio, fate):
    """The CPU time of a task for failing records of 1 kB, without Spark."""
    size, batches = 10_000, 2 if quick else 12
    schema = pa.schema([("id", pa.int64()), ("line", pa.string())])
    source = SpoutSpec("lines", 0, schema, (), True, False, False, 7)
    rules = Rules(DAY_MS, DAY_MS, Policy(1 if fate == "dies" else 5), 1e12)
    rng = np.random.default_rng(3)
    given = []
    for n in range(batches):
        text = pa.py_buffer(rng.integers(32, 127, size * 1000, dtype=np.uint8))
        ends = pa.py_buffer(np.arange(0, size * 1000 + 1, 1000, dtype=np.int32))
        lines = pa.StringArray.from_buffers(size, ends, text)
        batch = pa.record_batch([np.arange(size), lines], schema=schema)
        given.append(SourceRecords(source, batch, 0, n * size))
    said = pa.repeat(Reason("bolt", "Failed", "the service is away").encode(), size)
    taken = []
    for _ in range(rounds + 1):
        start = time.process_time()
        writer = FailedInRun(str(new_path()), "0", rules, 0)
        for some in given:
            roots = source.roots(0, some.first, size)
            reasons = pa.table([roots, np.zeros(size, np.int64), said], schema=REASON_SCHEMA)
            writer.write(some, roots, [reasons])
        written, _ = writer.finish([])
        taken.append((time.process_time() - start) / (size * batches) * 1e6)
        files = [FailedFile(*file) for file in written["files"]]
        assert sum(map(len, files)) == size * batches
        assert {file.dead for file in files} == {fate == "dies"}
    report_ratio(f"a record of 1 kB that {fate}, CPU time of its task", taken[1:], unit="us")


# ---- tuples one by one -------------------------------------------------------------------------


@pytest.mark.parametrize("bolt", [EmitAndAck, EmitBasic])
def bench_row_bolt(bolt, quick, rounds, report_ratio):
    """Emit, anchored, and ack: the executor alone, in CPU time of its thread."""
    batches = topologies.make_lines(131_072 if quick else 524_288).to_batches(65_536)
    identities = [
        Identity(
            pa.array([f"0-0-{i}" for i in range(len(batch))]),
            np.zeros(len(batch), np.int32),
            np.arange(len(batch)),
        )
        for batch in batches
    ]
    rates = []
    for _ in range(rounds):
        executor = executor_for("bolt", bolt())
        emitted = 0
        begin = time.thread_time()
        for batch, identity in zip(batches, identities, strict=True):
            results = executor.process("lines", "default", batch, identity)
            assert not results.failures
            emitted += sum(len(emission.batch) for emission in results.emissions)
        executor.flush()
        rates.append(emitted / (time.thread_time() - begin) / 1e6)
        assert emitted == sum(map(len, batches))
    report_ratio(f"{bolt.__name__}, its executor alone", rates, 0.3, unit="M/s")


def bench_row_bolt_on_spark(spark, lines, rows, rounds, whole, interleaved, report_ratio):
    """The same from Parquet to the counts, by the CPU time of driver, JVM and workers together."""
    contestants = {
        bolt.__name__: partial(
            lambda bolt: whole(passed_on(spark.read.parquet(str(lines)), bolt()), rows), bolt
        )
        for bolt in (EmitAndAck, EmitBasic)
    }
    for work in contestants.values():
        work()
    for name, seconds in interleaved(contestants, rounds, cpu_s).items():
        rates = [rows / each / 1e6 for each in seconds]
        report_ratio(f"{name} on Spark, {rows:,} lines, per core", rates, 0.3, unit="M/s")
