"""Tasks fail and run again, shuffle files get lost, results are asked for twice: nothing shows.

XOR is not idempotent, so whatever is applied twice cancels itself; what Spark discards must be
discarded whole, and what it computes again must come out alike (SEMANTICS 6).
"""

from __future__ import annotations

import glob
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pyspark
import pytest
from pyspark import TaskContext, cloudpickle

from ackcore.spark import combine, settle, settle_parquet
from ackcore.spark.settle import worker_functions

# What the workers get of this module goes along with the job: they cannot import it.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

EVENT_DDL = "root_id bigint, val bigint, task int, ts_ms bigint, reason string"


def first_time(marks, name):
    """Whether nobody has asked this before, in any process."""
    try:
        os.close(os.open(os.path.join(marks, name), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def fail_once(marks, way):
    """A mapInArrow function whose task fails once in each partition, after all its rows."""

    def fail(batches):
        yield from batches
        if first_time(marks, f"failed-{way}-{TaskContext.get().partitionId()}"):
            if way == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("this task fails after its last row")

    return fail


def lose_files_once(marks):
    """A mapInArrow function that removes all shuffle files once one task has read its own."""

    def lose(batches):
        yield from batches
        if first_time(marks, "lost"):
            (directory,) = os.environ["SPARK_LOCAL_DIRS"].split(",")
            lost = glob.glob(f"{directory}/*/*/shuffle_*")
            lost += glob.glob(f"{directory}/*/shuffle_*")
            for file in lost:
                # Spark removes what earlier tests have shuffled, when it comes to that.
                with suppress(FileNotFoundError):
                    os.remove(file)
            Path(marks, "how-many").write_text(str(len(lost)))

    return lose


@pytest.fixture
def marks(tmp_path):
    return str(tmp_path)


@pytest.fixture(scope="module")
def events(random_events):
    return random_events(31, 600)


@pytest.fixture
def still_open(frame, events, expected):
    """Open rows of an earlier call, and what the events then come to."""
    earlier = [(root, 1, -1, 2000, None) for root in range(5000, 5100)]
    return settle(frame(earlier, 5)), expected([*events, *earlier])


@pytest.fixture
def parquet(tmp_path, events):
    directory = tmp_path / "events"
    directory.mkdir()
    names = [column.split()[0] for column in EVENT_DDL.split(", ")]
    types = [pa.int64(), pa.int64(), pa.int32(), pa.int64(), pa.string()]
    for n in range(4):
        columns = zip(*events[n::4], strict=True)
        arrays = [pa.array(column, t) for column, t in zip(columns, types, strict=True)]
        table = pa.table(arrays, names=names)
        pq.write_table(table, directory / f"part-{n}.parquet", row_group_size=200)
    return directory


@pytest.mark.parametrize("way", [pytest.param("raised", marks=pytest.mark.faults), "killed"])
def test_tasks_that_fail_before_the_shuffle(frame, events, expected, found, marks, way):
    table = frame(events, 5).repartition(3).mapInArrow(fail_once(marks, way), EVENT_DDL)
    assert found(settle(table, shards=2)) == expected(events)
    assert len(glob.glob(f"{marks}/failed-*")) == 3
    marks_left = glob.glob(f"{marks}/*")
    assert found(settle(combine(table), shards=2)) == expected(events)
    assert glob.glob(f"{marks}/*") == marks_left


@pytest.mark.parametrize("way", ["raised", pytest.param("killed", marks=pytest.mark.faults)])
def test_tasks_that_fail_after_they_have_packed(
    monkeypatch, frame, events, expected, found, marks, way
):
    """Their blobs are discarded with them."""
    events_packer = worker_functions.events_packer

    def failing(*args, **options):
        pack, fail = events_packer(*args, **options), fail_once(marks, way)
        return lambda batches: fail(pack(batches))

    monkeypatch.setattr(sys.modules["ackcore.spark.settle.dataframes"], "events_packer", failing)
    assert found(settle(frame(events, 5).repartition(3), shards=2)) == expected(events)
    assert len(glob.glob(f"{marks}/failed-*")) == 3


def test_tasks_that_fail_after_they_have_settled(frame, still_open, events, found, marks):
    before, outcomes = still_open
    settled = settle(frame(events, 5), open_before=before, shards=3)
    again = settled.mapInArrow(fail_once(marks, "raised"), settled.schema)
    assert found(again) == outcomes
    assert len(glob.glob(f"{marks}/failed-*")) >= 1


@pytest.mark.parametrize(("adaptive", "order"), [("true", "from a shuffle"), ("false", "fixed")])
def test_lost_shuffle_files(conf, frame, still_open, events, found, marks, adaptive, order):
    """One task has read all its blobs, the others find theirs gone; map tasks run again.

    Spark compares what they write now with what they wrote before, and gives up if it differs.
    """
    conf("spark.sql.adaptive.enabled", adaptive)
    conf("spark.sql.adaptive.coalescePartitions.enabled", "false")
    before, outcomes = still_open
    table = frame(events, 5)
    table = table.repartition(5) if order == "from a shuffle" else table
    settled = settle(table, open_before=before, shards=6)
    again = settled.mapInArrow(lose_files_once(marks), settled.schema)
    assert found(again) == outcomes
    assert int(Path(marks, "how-many").read_text()) > 0


def test_lost_shuffle_files_of_a_table_in_files(
    spark, conf, parquet, events, expected, found, marks
):
    conf("spark.sql.adaptive.coalescePartitions.enabled", "false")
    settled = settle_parquet(spark, parquet, shards=6)
    again = settled.mapInArrow(lose_files_once(marks), settled.schema)
    assert found(again) == expected(events)
    assert int(Path(marks, "how-many").read_text()) > 0


def test_a_second_action_computes_the_same(spark, frame, parquet, events, expected, found):
    for settled in (settle(frame(events, 5).repartition(3)), settle_parquet(spark, parquet)):
        assert found(settled) == expected(events)
        assert found(settled) == expected(events)
        assert settled.count() == len(expected(events))
        # Both sides of a join come from one lineage.
        twice = settled.join(settled.select("root_id", "val"), ["root_id", "val"])
        assert twice.count() == len(expected(events))


def test_now_stays_as_it_was_at_the_call(monkeypatch, frame, found):
    """An action that comes later decides alike: by that time the row would be past its time-out."""
    module = sys.modules["ackcore.spark.settle.dataframes"]
    monkeypatch.setattr(module, "wall_clock_ms", lambda: 100)
    settled = settle(frame([(1, 5, 0, 0, None)], 5), timeout_s=0.1)
    monkeypatch.setattr(module, "wall_clock_ms", lambda: 101)
    assert found(settled)[1].status == "OPEN"
    assert found(settle(frame([(1, 5, 0, 0, None)], 5), timeout_s=0.1))[1].status == "EXPIRED"


SPECULATION = """
import glob, os, pickle, sys, time
from pyspark import TaskContext
from pyspark.sql import SparkSession
from ackcore.spark import settle

marks, events = sys.argv[1], pickle.load(open(sys.argv[2], "rb"))
spark = (
    SparkSession.builder.master("local-cluster[2,1,1024]")
    .config("spark.ui.enabled", "false")
    .config("spark.speculation", "true")
    .config("spark.speculation.interval", "50ms")
    .config("spark.speculation.quantile", "0.1")
    .config("spark.speculation.multiplier", "1.1")
    .config("spark.speculation.minTaskRuntime", "10ms")
    .config("spark.local.dir", marks)
    .getOrCreate()
)

def slow_once(stage):
    def slow(batches):
        yield from batches
        context = TaskContext.get()
        mark = f"{marks}/{stage}-{context.partitionId()}-"
        open(mark + str(context.attemptNumber()), "w").close()
        # The first task of a stage waits, having shipped everything, until its copy has run too.
        if context.partitionId() == 0 and context.attemptNumber() == 0:
            until = time.monotonic() + 300
            while not os.path.exists(mark + "1"):
                assert time.monotonic() < until, "nobody speculated"
                time.sleep(0.01)
    return slow

table = spark.createDataFrame(events, "EVENT_DDL").repartition(4)
import sys
module = sys.modules["ackcore.spark.settle.dataframes"]
events_packer, settle_blobs = module.events_packer, module.settle_blobs

def after(make, stage):
    def made(*args, **options):
        function, slow = make(*args, **options), slow_once(stage)
        return lambda batches: slow(function(batches))
    return made

module.events_packer = after(events_packer, "pack")
module.settle_blobs = after(settle_blobs, "settle")
spark.conf.set("spark.sql.adaptive.coalescePartitions.enabled", "false")
rows = [tuple(row) for row in settle(table, shards=4).collect()]
copies = sorted(os.path.basename(path) for path in glob.glob(f"{marks}/*-0-1"))
pickle.dump((rows, copies), open(sys.argv[2], "wb"))
spark.stop()
""".replace("EVENT_DDL", EVENT_DDL)


@pytest.mark.faults
def test_speculation_on_a_cluster(tmp_path, events, expected):
    """Two executors run copies of the first task of either stage to their end."""
    file = tmp_path / "events.pickle"
    file.write_bytes(cloudpickle.dumps(events))
    marks = tmp_path / "marks"
    marks.mkdir()
    # A cluster writes its logs into Spark's home: give it one to throw away.
    home = tmp_path / "spark"
    home.mkdir()
    for part in Path(pyspark.__file__).parent.iterdir():
        (home / part.name).symlink_to(part)
    environment = {
        **os.environ,
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    environment.pop("SPARK_LOCAL_DIRS", None)
    script = [sys.executable, "-c", SPECULATION, str(marks), str(file)]
    done = subprocess.run(
        script, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    rows, copies = cloudpickle.loads(file.read_bytes())
    assert {row[0]: row[1:] for row in rows} == expected(events)
    assert len(rows) == len(expected(events))
    assert copies == ["pack-0-1", "settle-0-1"]
