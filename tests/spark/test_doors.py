"""A newcomer's mistakes are refused at once: by name, with the way out, before a plan."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pyarrow as pa
import pytest
from pyspark import cloudpickle
from streams import in_line

from ackcore.spark import (
    DeadLetterTopic,
    RunFailed,
    dead_letters,
    replay,
    run_batch,
    start,
    to_parquet,
)
from ackcore.spark.base.errors import StateError
from ackcore.spark.base.workers import refuse_unpicklable
from ackcore.topology import BasicBolt

cloudpickle.register_pickle_by_value(sys.modules[__name__])

LOCK = threading.Lock()


class Number(BasicBolt):
    """Emits two columns that differ in case only; -1 fails."""

    outputs = pa.schema([("N", pa.int64()), ("n", pa.int64())])

    def execute(self, tuple, collector):
        if tuple.values[0] < 0:
            raise ValueError("below 0")
        collector.emit((tuple.values[0], 2 * tuple.values[0]))


def topology(source, bolt=None, sink=None):
    return in_line({"numbers": source, "number": bolt or Number()}, sink, max_attempts=1)


@pytest.fixture
def numbers(spark):
    return topology(spark.range(1))


@pytest.fixture
def stream(spark):
    return topology(spark.readStream.format("rate").load().select("value"))


@pytest.mark.parametrize("entry_point", [run_batch, start])
def test_what_is_no_session_is_refused(spark, tmp_path, entry_point, numbers, stream):
    runs = numbers if entry_point is run_batch else stream
    for given in (None, str(tmp_path), spark.sparkContext):
        words = f"spark must be a SparkSession, got {type(given).__name__}; SparkSession.builder"
        with pytest.raises(TypeError, match=words):
            entry_point(runs, given, tmp_path / "cp")
    with pytest.raises(TypeError, match="spark must be a SparkSession, got PosixPath"):
        entry_point(runs, tmp_path / "cp", spark)
    assert not (tmp_path / "cp").exists()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"clock": 5}, "clock must be callable, got int 5"),
        ({"accept_changes": "no"}, "accept_changes must be True or False, got str 'no'"),
        ({"dead_letters": 5}, "dead_letters must be a str or a path, got int"),
        (
            {"dead_letters": DeadLetterTopic},
            r"is the class DeadLetterTopic itself; pass DeadLetterTopic\(",
        ),
        ({"wait": 1.5}, r"wait must be callable, got float 1\.5"),
    ],
)
def test_options_of_other_types_are_refused(spark, tmp_path, numbers, stream, given, words):
    with pytest.raises(TypeError, match=words):
        run_batch(numbers, spark, tmp_path / "cp", **given)
    if "wait" not in given:
        with pytest.raises(TypeError, match=words):
            start(stream, spark, tmp_path / "cp", **given)
    assert not (tmp_path / "cp").exists()


def test_a_path_that_no_file_can_have_is_refused(spark, numbers, stream):
    for entry_point, runs in ((run_batch, numbers), (start, stream)):
        with pytest.raises(ValueError, match=r"checkpoint must be a path .*, got 'a\\x00b'"):
            entry_point(runs, spark, "a\0b")


def test_files_in_the_place_of_directories_are_named(spark, tmp_path, numbers):
    file = tmp_path / "file"
    file.touch()
    words = f": {file} must be a directory, or must not exist; it is a file"
    with pytest.raises(StateError, match="^the checkpoint" + words):
        run_batch(numbers, spark, file)
    with pytest.raises(StateError, match="^the dead letters" + words):
        run_batch(numbers, spark, tmp_path / "cp", dead_letters=file)
    with pytest.raises(StateError, match="^sink 'numbers'" + words):
        run_batch(in_line({"numbers": spark.range(1)}, to_parquet(file)), spark, tmp_path / "cp2")


def test_a_replay_is_not_sent_for_want_of_a_name(spark, tmp_path):
    """``replay(path, "error_type = 'X'")`` would have sent all letters."""
    with pytest.raises(TypeError, match="spark must be a SparkSession, got str"):
        replay(tmp_path, "error_type = 'TimeoutError'")
    with pytest.raises(ValueError, match=r"request must be 1 to 64 letters, .*, got 5"):
        replay(tmp_path, spark, request=5)
    with pytest.raises(TypeError, match="spark must be a SparkSession, got PosixPath"):
        dead_letters(spark, tmp_path)


LAZY = """
import pickle, sys
import ackcore.spark.settle.wire
assert "pyspark" not in sys.modules
import ackcore.spark as spark
from ackcore.spark import settle
assert spark.settle is settle and settle.__module__ == "ackcore.spark.settle.dataframes", settle
import ackcore.spark.settle.packing
assert spark.settle is settle
assert pickle.loads(pickle.dumps(spark)) is spark
for name in spark.__all__:
    assert getattr(spark, name) is not None and name in dir(spark), name
assert spark.functions.__name__ == "ackcore.spark.functions"
try:
    spark.nothing
except AttributeError as error:
    print(error)
"""


def test_public_names_are_loaded_when_they_are_asked_for():
    """Also ``settle``, which is a package in it as well."""
    done = subprocess.run([sys.executable, "-c", LAZY], capture_output=True, text=True)
    assert done.stdout == "module 'ackcore.spark' has no attribute 'nothing'\n", done.stderr


#: Three sessions in one process: the JVM of the first dies, and that of the second is used again.
SESSIONS = """
import os, signal
from pyspark import SparkContext
from pyspark.sql import SparkSession
from ackcore.examples.quiet_spark import SparkError, spark_session
from ackcore.spark import (
    attempt, combine, dead_letters, functions, replay, run_batch, settle, settle_parquet, start
)
from ackcore.topology import TopologyBuilder

def topology(source):
    builder = TopologyBuilder()
    builder.spout("numbers", source)
    builder.sink("numbers", print)
    return builder.build()

try:
    with spark_session("local[1]") as (spark, _):
        jvm = spark.sparkContext._gateway.proc
        os.kill(jvm.pid, signal.SIGKILL)
        jvm.wait()
        spark.range(3).count()
except SparkError as error:
    print(str(error).count(chr(10)))
SparkSession.builder.master("local[1]").getOrCreate().stop()
left = SparkContext._gateway.proc

with spark_session("local[1]") as (spark, folder):
    print(spark.range(4).count(), spark.sparkContext._gateway.proc is left)
    events = spark.createDataFrame([(1, 5, 0)], "root_id bigint, val bigint, task int")
    bounded = topology(events)
    stream = topology(spark.readStream.format("rate").load())
    try:
        start(stream, spark, folder + "/caf\u00e9", trigger={"availableNow": True}).stop()
    except ValueError as error:
        print("no UTF-8", str(error).partition("cannot write")[2], sep="|")
    spark.stop()
    entry_points = {
        "run_batch": lambda: run_batch(bounded, spark, folder + "/cp"),
        "start": lambda: start(stream, spark, folder + "/cp"),
        "attempt": lambda: attempt(events, len, "n int"),
        "settle": lambda: settle(events),
        "combine": lambda: combine(events),
        "settle_parquet": lambda: settle_parquet(spark, folder),
        "dead_letters": lambda: dead_letters(folder, spark),
        "replay": lambda: replay(folder, spark),
        "no session": lambda: dead_letters(folder),
        "root_id": lambda: functions.root_id(5, 0, "offset"),
        "xor_edges": lambda: functions.xor_edges("edges"),
    }
    for name, entry_point in entry_points.items():
        try:
            entry_point()
        except Exception as error:
            print(name, type(error).__name__, error, sep="|")
print(left.returncode is not None)
"""


@pytest.fixture(scope="module")
def sessions():
    return subprocess.run(
        [sys.executable, "-c", SESSIONS],
        env=os.environ | {"LC_ALL": "C"},
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )


@pytest.mark.spark
def test_a_session_may_follow_another_in_one_process_and_a_jvm_that_dies_is_told_in_a_line(
    sessions,
):
    said = [line for line in sessions.stdout.splitlines() if "|" not in line]
    assert said == ["0", "4 True", "True"]
    assert sessions.stderr.count("Spark's JVM ended before its session did") == 1


@pytest.mark.spark
def test_a_stopped_session_is_refused_at_every_door(sessions):
    # Also a path that Java cannot write in the C locale, while the session still runs.
    lines = sessions.stdout.splitlines()
    told = dict(line.split("|", 1) for line in lines if "|" in line)
    way_out = "SparkSession.builder.getOrCreate() makes another, with which all data must be"
    session = f"ValueError|spark is a session that was stopped; {way_out} read again"
    frame = f"ValueError|events is a DataFrame of a session that was stopped; {way_out} read again"
    columns = "ValueError|a Column needs a running SparkSession, and there is none, "
    columns += "or it was stopped; SparkSession.builder.getOrCreate() makes one"
    assert told == {
        **dict.fromkeys(
            ("run_batch", "start", "settle_parquet", "dead_letters", "replay"), session
        ),
        **dict.fromkeys(("settle", "combine"), frame),
        "attempt": frame.replace("events is", "frame is"),
        **dict.fromkeys(("root_id", "xor_edges"), columns),
        "no session": "ValueError|spark must be given: there is no active session",
        "no UTF-8": " 'é' in paths: their encoding is ANSI_X3.4-1968, by the locale. "
        "Start the driver with LC_ALL=C.UTF-8, or choose another path",
    }


# ------------------------------------------------------------------- columns that differ in case


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (["id AS Id", "id"], "has columns 'Id' and 'id', which differ in case only, so that Spark"),
        (
            ["struct(array(struct(id AS x, id AS X)) AS deep) AS s"],
            r"has columns 'x' and 'X' in 's\.deep\.element', which .*spark\.sql\.caseSensitive to",
        ),
    ],
)
def test_columns_that_differ_in_case_only_are_refused(spark, tmp_path, columns, words):
    with pytest.raises(ValueError, match=f"source of spout 'numbers' {words}"):
        run_batch(topology(spark.range(1).selectExpr(*columns)), spark, tmp_path / "cp")
    stream = spark.readStream.format("rate").load().selectExpr("value AS id").selectExpr(*columns)
    with pytest.raises(ValueError, match=f"source of spout 'numbers' {words}"):
        start(topology(stream), spark, tmp_path / "cp")
    sink = topology(spark.range(1), sink=to_parquet(tmp_path / "out"))
    said = r"does not distinguish the columns 'N' and 'n'; .*caseSensitive to true"
    with pytest.raises(TypeError, match=said):
        run_batch(sink, spark, tmp_path / "cp")
    assert not (tmp_path / "cp").exists()


@pytest.mark.parametrize(
    ("column", "where"),
    [
        ("struct(id AS x, id AS y, id AS x) AS s", "s"),
        ("array(struct(struct(id AS x, id AS x) AS deep)) AS s", r"s\.element\.deep"),
        ("map('k', struct(id AS x, id AS x)) AS s", r"s\.entries\.value"),
    ],
)
def test_a_struct_with_one_name_twice_is_refused(spark, tmp_path, conf, column, where):
    conf("spark.sql.caseSensitive", "true")
    said = f"source of spout 'numbers' has two columns 'x' in '{where}', .*; rename one of them"
    with pytest.raises(ValueError, match=said):
        run_batch(topology(spark.range(1).selectExpr("id", column)), spark, tmp_path / "cp")
    assert not (tmp_path / "cp").exists()


def test_a_bolts_struct_with_one_name_twice_is_refused(spark, tmp_path):
    class Twice(Number):
        outputs = pa.schema([("s", pa.struct([("x", pa.int64()), ("x", pa.int64())]))])

    with pytest.raises(ValueError, match="stream 'default' of bolt 'twice' has two columns 'x' in"):
        run_batch(in_line({"numbers": spark.range(1), "twice": Twice()}), spark, tmp_path / "cp")


def test_a_value_that_a_source_refuses_is_said_after_two_runs(spark, tmp_path, conf):
    conf("spark.sql.ansi.enabled", "true")
    source = spark.range(4).selectExpr("cast(concat('x', id) AS int) AS id")
    said = r"run 2 times .*CAST_INVALID_INPUT.*DataFrame of a spout has a value .*try_cast"
    with pytest.raises(RunFailed, match=said):
        run_batch(topology(source), spark, tmp_path / "cp")


def test_columns_that_differ_in_case_only_work_where_case_counts(spark, tmp_path, conf):
    conf("spark.sql.caseSensitive", "true")
    source = spark.createDataFrame([(1, 10), (-1, 20), (2, 30)], "Id bigint, id bigint")
    counts = run_batch(topology(source, sink=to_parquet(tmp_path / "out")), spark, tmp_path / "cp")
    assert (counts.acked, counts.dead) == (2, 1)
    (letter,) = dead_letters(tmp_path / "cp", spark).collect()
    assert letter.payload == (-1, 20)
    written = spark.read.parquet(str(tmp_path / "out")).select("N", "n").collect()
    assert sorted(map(tuple, written)) == [(1, 2), (2, 4)]


# --------------------------------------------------------------------- what does not travel along


def helper():
    return LOCK


def refers_to_a_global(bolt):
    class Refers(Number):
        def execute(self, tuple, collector):
            with LOCK:
                super().execute(tuple, collector)

    return Refers()


def refers_through_a_function(bolt):
    class Refers(Number):
        def prepare(self, context):
            self.lock = helper()

    return Refers()


def refers_to_a_variable(lock):
    class Refers(Number):
        def prepare(self, context):
            self.lock = lock

    return Refers()


def has_it_on_the_class(lock):
    class Has(Number):
        held = lock

    return Has()


def has_a_default(held):
    class Slotted(Number):
        __slots__ = ("lock",)

        def prepare(self, context, held=held):
            self.lock = self.LOCK = held  # an attribute, not the global of this name

    return Slotted()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            refers_to_a_global,
            r"the global 'LOCK' in Refers\.execute\(\), a lock, cannot be pickled",
        ),
        (refers_through_a_function, r"the global 'LOCK' in helper\(\), a lock, cannot be pickled"),
        (refers_to_a_variable, r"the variable 'lock' in Refers\.prepare\(\), a lock, cannot be"),
        (
            has_a_default,
            r"the default of 'held' in Slotted\.prepare\(\), a lock, cannot be pickled",
        ),
        (has_it_on_the_class, "the attribute 'held' of class Has, a lock, cannot be pickled"),
    ],
)
def test_what_a_bolt_refers_to_and_cannot_travel_is_named(spark, tmp_path, make, words):
    words = (
        "bolt 'number' is sent to the workers with all that its methods refer to, and "
        rf"{words}.*\(TypeError: cannot pickle '_thread\.lock' object\); make it in prepare\(\), or"
    )
    with pytest.raises(TypeError, match=words):
        run_batch(topology(spark.range(1), make(threading.Lock())), spark, tmp_path / "cp")
    with pytest.raises(TypeError, match="only the driver can use it: make a DataFrame another spo"):
        run_batch(topology(spark.range(1), refers_to_a_variable(spark)), spark, tmp_path / "cp")
    assert not (tmp_path / "cp").exists()


class Holds:
    def __init__(self, lock):
        self.plain, self.lock, self.open = 1, lock, lock

    def __getstate__(self):
        return {"plain": self.plain, "open": self.open}


class InSlots:
    __slots__ = ("open", "plain")

    def __init__(self, lock):
        self.plain, self.open = 1, lock


@pytest.mark.parametrize("kind", [Holds, InSlots])
def test_only_an_attribute_that_would_be_sent_is_named(kind):
    with pytest.raises(TypeError, match=r"it is sent .* its attribute 'open', a lock, cannot"):
        refuse_unpicklable("it", kind(threading.Lock()), "prepare()")


class Raises:
    def __init__(self, lock):
        self.lock = lock

    def __reduce__(self):
        raise ValueError("no copies")


def test_nothing_is_named_if_an_object_refuses_by_itself():
    said = r"cannot be pickled \(ValueError: no copies\); make the part"
    with pytest.raises(TypeError, match=said):
        refuse_unpicklable("it", Raises(threading.Lock()), "prepare()")
