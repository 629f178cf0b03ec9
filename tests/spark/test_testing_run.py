"""Topologies run by `ackcore.testing.run`: as a model says, and as real Spark runs them."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
import signal
import sys
import threading

import branching
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from branching import DESTS, ROWS, Branch, expected, topologies
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark import cloudpickle
from pyspark.sql import Row
from streams import in_line

from ackcore import testing
from ackcore._arrow.shown import text_of
from ackcore.kafka import KafkaSpout
from ackcore.retry import backoff_ms
from ackcore.spark import FileSpout, RunFailed, dead_letters, run_batch, to_parquet
from ackcore.topology import AsyncBolt, BasicBolt, BatchBolt, Reject, Retry, TopologyBuilder, expect
from ackcore.topology.stage_layout import Layout

LINE = pa.schema([("line", pa.string())])
WORD = pa.schema([("word", pa.string())])
#: What bolts did, that are in this module: their copies in tasks find it here.
DONE: list[str] = []


@pytest.fixture(autouse=True)
def _nothing_done():
    DONE.clear()


class Split(BatchBolt):
    outputs = WORD

    def process(self, batch, out):
        words = pc.split_pattern(batch["line"], " ")
        out.emit([words.flatten()], parents=pc.list_parent_indices(words))


class Check(BasicBolt):
    outputs = WORD

    def execute(self, tuple, collector):
        word = tuple["word"]
        if word == "poison":
            raise Reject("not for us")
        if word == "flaky" and tuple.attempt < 2:
            raise TimeoutError("the service is out")
        if word == "never":
            raise ValueError("no such word")
        DONE.append(word)
        collector.emit(tuple.values)

    def cleanup(self):
        DONE.append("cleanup")


class Journaled(Check):
    journal = True


class Ask(AsyncBolt):
    outputs = WORD

    async def execute(self, tuple, collector):
        await asyncio.sleep(30)
        if tuple["word"] == "later" and tuple.attempt == 0:
            raise Retry(after_s=3600)
        collector.emit((tuple["word"].upper(),))


RELEASED = threading.Event()


class Interrupts(Check):
    """Its call hangs; an interrupt comes to the main thread."""

    def execute(self, tuple, collector):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        if not RELEASED.wait(5):
            RELEASED.set()


class HangingCalls(Ask):
    async def execute(self, tuple, collector):
        Interrupts.execute(self, tuple, collector)


class Numbered(BasicBolt):
    """Numbers what it takes, in itself."""

    outputs = pa.schema([("number", pa.int64())])

    def __init__(self):
        self.taken = 0

    def execute(self, tuple, collector):
        self.taken += 1
        collector.emit((self.taken,))


class Total(BatchBolt):
    """Sums up in flush: one row hangs from many records."""

    outputs = pa.schema([("words", pa.int64())])

    def prepare(self, context):
        self.rows = []

    def process(self, batch, out):
        self.rows += range(out.first_row, out.first_row + len(batch))

    def flush(self, out):
        if self.rows:
            out.emit([[len(self.rows)]], parents=[self.rows])


def nothing(frame, number):
    raise AssertionError("a sink is not called")


def words(bolt, source=None, **keywords):
    """Lines are split, and their words go through a bolt."""
    builder = TopologyBuilder()
    builder.spout("lines", testing.Source(LINE) if source is None else source)
    builder.bolt("split", Split()).shuffle("lines")
    builder.bolt("check", bolt).fields("split", "word")
    builder.sink("check", nothing, name="words")
    return builder.build(**{"max_attempts": 5, "backoff_s": 0.1, **keywords})


def lines(*texts):
    return {"lines": [{"line": text} for text in texts]}


def test_outputs_deaths_attempts_and_counts_are_plain():
    ran = testing.run(words(Check()), lines("to be", "not flaky", "some poison"))
    assert sorted(row["word"] for row in ran.outputs["words"]) == ["be", "flaky", "not", "to"]
    assert ran.tables["words"].schema == WORD
    with pytest.raises(KeyError, match=r"no results named 'word'; the names are 'words'"):
        ran.tables["word"]
    (dead,) = ran.dead
    assert (dead.spout, dead.component, dead.attempts) == ("lines", "check", 1)
    assert (dead.error_type, dead.error_message) == ("Reject", "not for us")
    assert dead.payload == {"line": "some poison"}
    assert ran.attempts == {"lines": [1, 3, 1]}
    counts = ran.counts
    assert (counts.records, counts.acked, counts.dead, counts.waiting) == (3, 2, 1, 0)
    assert counts.balanced
    assert [one.batch_id for one in ran.progress] == [0, 1, 2]
    # The second line is in the second task, at its first place; it waits as it would on Spark.
    waits = [backoff_ms("0-1-0", n, base_ms=100, cap_ms=300_000) for n in (1, 2)]
    assert ran.elapsed_s == sum(waits) / 1000


def test_it_is_printed_and_checked():
    ran = testing.run(words(Check()), lines("to be", "not flaky", "some poison"))
    assert repr(ran) == ("<TopologyRun of 3 records: 2 acked, 1 dead, 0 waiting, 2 executed again>")
    said = str(ran)
    assert "in 3 micro-batches and 0." in said
    for line in (
        "spout lines: 3 records: 2 acked, 1 dead, 0 waiting, 2 executed again",
        "bolt check: took 10",
        "sink words: 4 rows",
        "dead: 0-1-1 of lines after 1 attempt, Reject in check: not for us; {'line': 'some ",
    ):
        assert line in said
    assert ran.check(dead=1) is ran
    told = r"1 record is dead, and dead=0 was expected\n.*\n  spout"
    with pytest.raises(AssertionError, match=told):
        ran.check()
    many = testing.run(words(Check()), lines(*["some poison" * 30] * 12))
    assert str(many).endswith("  dead: 2 more")
    assert max(map(len, str(many).splitlines())) < 500
    untracked = dataclasses.replace(ran, untracked_failures=2)
    with pytest.raises(AssertionError, match="2 untracked tuples failed"):
        untracked.check(dead=1)
    account = dataclasses.replace(ran.counts.spouts["lines"], acked=1, waiting=2)
    counts = dataclasses.replace(ran.counts, spouts={"lines": account})
    with pytest.raises(AssertionError, match="the counts do not balance; 2 records wait"):
        dataclasses.replace(ran, counts=counts).check(dead=1)


def test_duplicates_and_unmet_expectations_are_printed_and_what_carries_dedup_out_is_not():
    known = expect(lambda rows: pc.not_equal(rows["line"], "no"))
    given = {"dedup": "line", "within_s": 60, "expect": known}
    topology = in_line({"lines": testing.Source(LINE)}, nothing, spout=given)
    said = str(testing.run(topology, lines("to", "be", "no", "to", "to")))
    assert "\n  duplicates: 2 records were not run\n" in said
    assert "\n  expectation '<lambda>' of lines: not met by 1 tuple\n" in said
    assert "lines.dedup" not in said


def test_the_same_again():
    rows = lines("to be", "not flaky", "some poison", "never")
    assert testing.run(words(Check()), rows) == testing.run(words(Check()), rows)


def test_each_task_has_a_copy_of_a_bolt():
    """One that dies leaves nothing to the one that is run in its place."""
    bolt = Numbered()
    topology = in_line({"lines": testing.Source(LINE), "numbered": bolt}, nothing)
    for kills in (None, {"numbered": 2}):
        ran = testing.run(topology, lines("a", "b", "c", "d"), kills=kills)
        assert sorted(row["number"] for row in ran.outputs["numbered"]) == [1, 1, 2, 2]
    assert bolt.taken == 0


def test_no_rows():
    ran = testing.run(words(Check()), {"lines": []})
    assert ran.outputs == {"words": []}
    assert ran.attempts == {"lines": []}
    assert ran.counts.records == 0


@settings(max_examples=30)
@given(
    topology=topologies(),
    values=st.lists(st.integers(0, 10**6), max_size=20),
    # Of three that hit one record it would be the cause.
    kills=st.dictionaries(st.sampled_from(["b0", "b1", "b2"]), st.integers(1, 40), max_size=2),
)
def test_any_topology_does_what_the_model_does_whatever_dies(topology, values, kills):
    kills = {name: places for name, places in kills.items() if name in topology.bolts}
    rows = {"spout": list(enumerate(values))}
    ran = testing.run(topology, rows, tasks=DESTS, kills=kills)
    failed, kept = expected(topology, Layout.of(topology), values)
    assert {dead.payload["record"] for dead in ran.dead} == failed
    assert {dead.attempts for dead in ran.dead} <= {topology.settings.max_attempts}
    for name in topology.sinks:
        found = [tuple(row.values()) for row in ran.outputs[name]]
        assert collections.Counter(found) == kept.get(name, collections.Counter())
    assert ran.counts.acked == len(values) - len(failed)
    assert ran.attempts["spout"] == [
        topology.settings.max_attempts if record in failed else 1 for record in range(len(values))
    ]


def test_a_task_that_dies_runs_again_with_the_same_ids():
    rows = lines("a b c d e f")
    whole = testing.run(words(Check()), rows)
    done = len(DONE)
    died = testing.run(words(Check()), rows, kills={"check": 3})
    assert (died.kills, whole.kills) == (1, 0)
    assert died.outputs == whole.outputs
    assert died.counts == whole.counts
    assert died.attempts == {"lines": [1]}
    # Two words had been through, and what was in flight is run again; no bolt that dies cleans up.
    assert len(DONE) - done == done + 2
    assert died.executions["check"] == whole.executions["check"] + 3


def test_calls_that_a_journal_has_are_not_made_again():
    testing.run(words(Journaled()), lines("a b c d e f"), kills={"check": 4})
    assert sorted(word for word in DONE if word != "cleanup") == list("abcdef")


def test_a_record_that_always_kills_is_found_and_the_others_go_on():
    kills = {"check": lambda row: row["word"] == "be"}
    ran = testing.run(words(Check()), lines("to be", "or not"), kills=kills)
    (dead,) = ran.dead
    assert (dead.error_type, dead.component) == ("KilledWorker", "ackcore")
    assert dead.payload == {"line": "to be"}
    assert sorted(row["word"] for row in ran.outputs["words"]) == ["not", "or"]
    assert ran.kills == 3


@pytest.mark.parametrize("in_event_loop", [False, True])
def test_time_of_async_bolts_is_simulated(in_event_loop):
    """Half a minute for each call, and an hour for one.

    The cells of a notebook run in an event loop, and so do async tests.
    """

    async def run():
        return testing.run(*of, kills={"check": 2})

    of = words(Ask()), lines("now later", "now")
    ran = asyncio.run(run()) if in_event_loop else testing.run(*of, kills={"check": 2})
    assert sorted(row["word"] for row in ran.outputs["words"]) == ["LATER", "NOW", "NOW"]
    assert ran.attempts == {"lines": [2, 1]}
    assert ran.elapsed_s >= 3600


@pytest.mark.parametrize("bolt", [Interrupts(), HangingCalls()], ids=["plain", "async"])
def test_an_interrupt_in_an_event_loop_ends_the_wait_for_a_bolt_that_hangs(bolt):
    async def run():
        testing.run(words(bolt), lines("hang"))

    loop = asyncio.new_event_loop()  # as in a notebook: asyncio.run takes the first interrupt
    RELEASED.clear()
    try:
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(run())
        assert not RELEASED.is_set()
    finally:
        RELEASED.set()
        loop.close()


def decoded(deserializer, values, value_type=None, tasks=2):
    """Run the values of a topic through a deserializer."""
    of = {"deserializer": deserializer, "value_type": value_type or pa.string()}
    spout = KafkaSpout("topic", bootstrap_servers="nobody:9092", **of)
    rows = {"in": [{"value": value} for value in values]}
    return testing.run(in_line({"in": spout}, nothing, max_attempts=1), rows, tasks=tasks)


def test_rows_of_a_kafka_spout_are_given_and_decoded():
    ran = decoded(json.loads, [b'"one"', b"no JSON", None])
    assert [(row["offset"], row["value"]) for row in ran.outputs["in"]] == [(0, "one"), (2, None)]
    (dead,) = ran.dead
    assert (dead.error_type, dead.message_id) == ("JSONDecodeError", '["topic", 0, 1]')
    assert dead.payload["value"] == b"no JSON"
    assert ran.attempts == {"in": [1, 1, 1]}


@pytest.mark.parametrize(
    ("value_type", "values"),
    [
        (pa.list_(pa.int64()), [[1], [2]]),
        (pa.map_(pa.string(), pa.int64()), [[("n", 1)], [("n", 2)]]),
        (pa.binary(), [b"1", b"2"]),
    ],
)
def test_a_deserializer_may_fill_the_same_object_again(value_type, values):
    made = {"list": [0], "map": {}, "binary": bytearray(1)}[str(value_type).partition("<")[0]]

    def reader(value):
        made["n" if isinstance(made, dict) else 0] = (
            value[0] if isinstance(made, bytearray) else int(value)
        )
        return made

    ran = decoded(reader, [b"1", b"2"], value_type, tasks=1)
    assert [row["value"] for row in ran.outputs["in"]] == values


def test_rows_given_to_a_source_are_held_to_its_columns():
    point = pa.struct([("x", pa.int64()), ("y", pa.int64())])
    schema = pa.schema([("n", pa.int64()), ("at", point)])
    topology = in_line({"in": testing.Source(schema)}, nothing)
    ran = testing.run(topology, {"in": [Row(at=Row(y=2, x=1), n=5), {"n": 2.0}, (3, (1, 2))]})
    xy = {"x": 1, "y": 2}
    assert ran.outputs["in"] == [{"n": 5, "at": xy}, {"n": 2, "at": None}, {"n": 3, "at": xy}]
    with pytest.raises(ValueError, match=r"row 1 of spout 'in': 'n' of its source .* become 1"):
        testing.run(topology, {"in": [(1, None), (1.5, None)]})


class Panic(BaseException):
    """An error of an extension, as PyO3 raises it."""


def test_a_deserializer_that_exits_or_panics_fails_its_record_alone():
    def strict(value):
        raise {b"exit": SystemExit(3), b"panic": Panic("index")}.get(value, ValueError("no"))

    ran = decoded(strict, [b"exit", None, b"panic", b"odd"])
    assert [dead.error_type for dead in ran.dead] == ["SystemExit", "Panic", "ValueError"]
    assert [row["offset"] for row in ran.outputs["in"]] == [1]


class Unloadable(Split):
    """Raises where a task loads it."""

    def __reduce__(self):
        return sys.exit, ("no licence",)


def test_a_bolt_that_exits_where_it_is_loaded_ends_the_run_and_not_the_test():
    topology = in_line({"lines": testing.Source(LINE), "split": Unloadable()}, max_runs=1)
    with pytest.raises(RunFailed, match=r"raised SystemExit\('no licence'\)"):
        testing.run(topology, lines("a"))


def test_message_ids_that_repeat_and_untracked_spouts():
    builder = TopologyBuilder()
    builder.spout("lines", testing.Source(LINE), message_id="line")
    builder.spout("beats", testing.Source(LINE), tracked=False)
    builder.bolt("split", Split()).shuffle("lines").shuffle("beats")
    builder.bolt("check", Check()).shuffle("split")
    builder.sink("check", nothing)
    ran = testing.run(builder.build(), {**lines("a", "b", "b"), "beats": [("c",), ("poison",)]})
    assert sorted(row["word"] for row in ran.outputs["check"]) == ["a", "c"]
    assert [dead.error_type for dead in ran.dead] == ["RepeatedMessageId"] * 2
    assert list(ran.attempts) == ["lines"]
    assert ran.untracked_failures == 1


def test_what_is_wrong_is_named():
    topology = words(Check())
    with pytest.raises(TypeError, match="topology must be a Topology, got str"):
        testing.run("topology", {})
    with pytest.raises(ValueError, match=r"one entry per spout: 'lines' \(.*, got none"):
        testing.run(topology, {})
    with pytest.raises(TypeError, match="rows must map the names of spouts"):
        testing.run(topology, [("a",)])
    with pytest.raises(ValueError, match=r"row 1 of spout 'lines': .* got 'word'; .*'line'"):
        testing.run(topology, {"lines": [{"line": "a"}, {"word": "b"}]})
    with pytest.raises(TypeError, match=r"row 0 of spout 'lines': .* a dict .* got str"):
        testing.run(topology, {"lines": ["a"]})
    said = r"row 0 .*'line' of .* must be string, got int: 1 does not"
    with pytest.raises(ValueError, match=said):
        testing.run(topology, {"lines": [(1,)]})
    with pytest.raises(ValueError, match=r"fields of the source of spout 'lines', got 'word'"):
        testing.run(topology, {"lines": pa.table({"word": ["a"]})})
    with pytest.raises(ValueError, match=r"'line' of the source of spout 'lines' .* got timestamp"):
        testing.run(topology, {"lines": pa.table({"line": pa.array([1], pa.timestamp("s"))})})
    with pytest.raises(ValueError, match=r"kills must name bolts \('split', 'check'\), got 'chek'"):
        testing.run(topology, lines("a"), kills={"chek": 1})
    with pytest.raises(ValueError, match="must be a tuple's position from 1"):
        testing.run(topology, lines("a"), kills={"check": [0]})
    with pytest.raises(ValueError, match="tasks must be at least 1, got 0"):
        testing.run(topology, lines("a"), tasks=0)
    with pytest.raises(TypeError, match=r"schema of Source.. must be a pyarrow.Schema, got list"):
        testing.Source(["line"])
    bolt = Check()
    bolt.client = (row for row in ())
    with pytest.raises(TypeError, match="its attribute 'client', a generator, cannot be pickled"):
        testing.run(words(bolt), lines("a"))


# --------------------------------------------------------------------------- and as Spark does it


def totals(source, **keywords):
    """Two levels, a row that hangs from many records, message ids, and a spout with a sink."""
    builder = TopologyBuilder()
    builder.spout("lines", source, message_id="line")
    builder.bolt("split", Split()).shuffle("lines")
    builder.bolt("check", Check()).fields("split", "word")
    builder.bolt("total", Total()).global_("check")
    for name in ("lines", "check", "total"):
        builder.sink(name, nothing)
    return builder.build(**keywords)


def branches(source, **keywords):
    builder = TopologyBuilder()
    builder.spout("lines", source)
    builder.bolt("one", Branch(1, 9)).shuffle("lines")
    builder.bolt("two", Branch(2, 9)).fields("one", "value")
    builder.bolt("three", Branch(3, 0)).fields("two", "value").fields("lines", "value")
    builder.sink("three", nothing)
    return builder.build(**keywords)


#: Which records share a row of a sum goes by when they are tried again.
RETRIED = ("or flaky", "never", "flaky flaky")
TEXTS = ["to be", "poison", "twice", "twice", "a b c", "", *RETRIED]
CASES = {
    "words": (words, LINE, [{"line": text} for text in TEXTS]),
    "totals": (totals, LINE, [{"line": text} for text in TEXTS if text not in RETRIED]),
    "branches": (branches, ROWS, [{"record": i, "value": i * 7919} for i in range(60)]),
}


def counted(rows):
    return collections.Counter(json.dumps(row, sort_keys=True) for row in rows)


@pytest.fixture
def _sent_to_workers():
    """Workers get these modules with the job: they cannot import them."""
    modules = sys.modules[__name__], branching
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    yield
    for module in modules:
        cloudpickle.unregister_pickle_by_value(module)


@pytest.mark.usefixtures("_sent_to_workers")
@pytest.mark.parametrize("case", CASES)
def test_spark_does_the_same(spark, tmp_path, case):
    """Outputs, dead letters and counts of one topology, run here and by `run_batch`."""
    make, schema, rows = CASES[case]
    keywords = {"max_attempts": 3, "backoff_s": 0.001, "parallelism": 2}
    source = testing.Source(schema)
    topology = make(Check(), source, **keywords) if make is words else make(source, **keywords)
    here = testing.run(topology, {"lines": rows})

    types = ", ".join(
        f"{one.name} {'string' if one.type == pa.string() else 'bigint'}" for one in schema
    )
    frame = spark.createDataFrame(rows, types)
    builder = TopologyBuilder()
    spout = topology.spouts["lines"]
    builder.spout("lines", frame, message_id=spout.message_id or None)
    for bolt in topology.bolts.values():
        declared = builder.bolt(bolt.name, bolt.component, parallelism=bolt.parallelism)
        for one in bolt.inputs:
            declare = getattr(declared, one.grouping.name.replace("global", "global_"))
            declare(one.component, *one.grouping.keys)
    for name, sink in topology.sinks.items():
        builder.sink(sink.component, to_parquet(f"{tmp_path}/{name}"), name=name)
    there = run_batch(builder.build(**keywords), spark, tmp_path / "checkpoint")

    # How many micro-batches its retries take goes by the clock.
    assert here.counts.spouts == there.spouts
    letters = [row.asDict(True) for row in dead_letters(tmp_path / "checkpoint", spark).collect()]
    about = ("spout", "attempts", "component", "error_type", "error_message", "payload")
    assert counted({name: getattr(one, name) for name in about} for one in here.dead) == counted(
        {name: one[name] for name in about} for one in letters
    )
    for name in topology.sinks:
        frame = spark.read.parquet(f"{tmp_path}/{name}").drop("batch_id")
        assert counted(row.asDict(True) for row in frame.collect()) == counted(here.outputs[name])


class Same(BatchBolt):
    outputs = WORD

    def process(self, batch, out):
        bad = pc.equal(pc.binary_length(batch["line"]), 3).to_numpy(zero_copy_only=False)
        out.fail(bad.nonzero()[0], "three bytes")
        keep = (~bad).nonzero()[0]
        out.emit([batch["line"].take(pa.array(keep))], parents=keep)


def test_text_that_is_not_utf8_is_shown_escaped():
    """In outputs and letters; the tables keep its bytes."""
    builder = TopologyBuilder()
    builder.spout("lines", testing.Source(LINE))
    builder.bolt("same", Same()).shuffle("lines")
    builder.sink("same", print, name="words")
    rows = pa.table({"line": text_of([b"plain", b"caf\xe9", b"ca\xe9"])})
    ran = testing.run(builder.build(max_attempts=1), {"lines": rows})
    assert ran.outputs == {"words": [{"word": "plain"}, {"word": "caf\\xe9"}]}
    assert ran.tables["words"]["word"].cast(pa.binary()).to_pylist() == [b"plain", b"caf\xe9"]
    assert [letter.payload for letter in ran.dead] == [{"line": "ca\\xe9"}]


def test_rows_of_a_planned_source_whose_columns_are_not_null_reach_a_sink(tmp_path):
    """Rows are kept with nullable columns, so the sink's table has them, too."""
    schema = pa.schema([pa.field("a", pa.int64(), nullable=False)])
    topology = in_line({"numbers": FileSpout(tmp_path, "json", schema)}, nothing)
    ran = testing.run(topology, {"numbers": [(1,), (2,)]})
    assert ran.outputs == {"numbers": [{"a": 1}, {"a": 2}]}
