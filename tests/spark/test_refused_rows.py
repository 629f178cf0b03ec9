"""Rows that a sink refuses: their records are dead, the rest is written, whoever dies when."""

from __future__ import annotations

import asyncio
import pickle
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa
import pytest
import worlds
from pyspark import cloudpickle
from worlds import Killed, KilledInCall, Source, Upper, World, fails

from ackcore.spark import SinkRejects, run_batch, table, to_kafka, to_parquet
from ackcore.spark.base.errors import CheckpointForeign
from ackcore.spark.base.schemas import ATTEMPT, REASON
from ackcore.spark.engine import act, insist
from ackcore.spark.engine.insist import SinkError
from ackcore.spark.sinks import rejects
from ackcore.spark.sinks.rejects import InvalidRejects, TooManyRefused
from ackcore.spark.sinks.sink import check_sink
from ackcore.spark.sinks.sink_batch import read_sink_file, row_numbers
from ackcore.tables import count
from ackcore.topology import BasicBolt, TopologyBuilder
from ackcore.topology.tuples import Reason

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Refusing(World):
    """A world whose sink refuses lines, and keeps what it was given by call."""

    def __init__(self, path, settings=None, *, bad=(), how="return", named="values", **changes):
        self.bad, self.how, self.named, self.calls = set(bad), how, named, []
        self.committed = set()
        super().__init__(path, settings or {}, **changes)

    def write(self, accepted):
        rows = [
            (number, line)
            for some, numbers in accepted.numbered()
            for number, line in zip(numbers.tolist(), some["line"].to_pylist(), strict=True)
        ]
        self.calls.append([line for _, line in rows])
        if accepted.batch_id in self.committed:
            return None  # it has seen the batch id
        refused = [one for one in rows if one[1].lower() in self.bad]
        kept = [line for _, line in rows if line.lower() not in self.bad]
        if self.how == "raise" and refused:
            raise self._named(refused)
        self.written[accepted.batch_id] = kept
        if self.how == "raise":
            self.committed.add(accepted.batch_id)
        return self._named(refused) if refused else None

    def _named(self, refused):
        numbers, lines = (list(column) for column in zip(*refused, strict=True))
        reasons = [ValueError(f"{line} is too long") for line in lines]
        if self.named == "numbers":
            return SinkRejects.of_numbers(np.array(numbers), reasons)
        return SinkRejects(pa.table({"line": lines}), reasons)


@pytest.mark.parametrize("how", ["return", "raise"])
@pytest.mark.parametrize("named", ["values", "numbers"])
def test_records_of_refused_rows_are_dead_and_the_others_written(tmp_path, how, named):
    world = Refusing(tmp_path, bad={"b"}, how=how, named=named)
    progress, counts = world.process(0, ["a", "b", "c"])
    assert (world.rows, world.parked) == (["A", "C"], ["b"])
    assert (progress.records, progress.acked, progress.failed, progress.dead) == (3, 2, 1, 1)
    assert (counts.records, counts.acked, counts.waiting, counts.dead) == (3, 2, 0, 1)
    assert counts.balanced
    state, engine = world.driver()
    with state:
        (dead,) = state.decision(0).all_dead.values()
        assert engine.counts == counts
    assert dead[ATTEMPT].to_pylist() == [1]
    reason = Reason("upper", "ValueError", "B is too long", final=True)
    assert Reason(**dead[REASON][0].as_py()) == reason
    # The next micro-batch builds on these counts.
    _, counts = world.process(1, ["d"])
    assert (counts.records, counts.acked, counts.dead, counts.batches) == (4, 3, 1, 2)


@pytest.mark.parametrize("how", ["return", "raise"])
@pytest.mark.parametrize(
    "step", ["decided", "in-sink", "refused", "refusals-closed", "in-dead-letters", "acted"]
)
def test_who_is_refused_is_decided_once(tmp_path, dying_at, how, step):
    world = Refusing(tmp_path, bad={"b"}, how=how)
    with dying_at(step):
        world.process(0, ["a", "b", "c"])
    on_record = step not in ("decided", "in-sink") or (how, step) == ("raise", "in-sink")
    asked = len(world.calls)
    if on_record:
        world.bad = {"a", "c"}  # a sink of another mind
        if how == "raise" and step == "refused":
            world.bad = set()
    progress, counts = world.process(0, ["a", "b", "c"])
    if on_record and how == "return":
        assert len(world.calls) == asked  # nobody asks again
    if step in ("refusals-closed", "in-dead-letters", "acted"):
        assert len(world.calls) == asked
    assert (world.rows, world.parked) == (["A", "C"], ["b"])
    assert (progress.acked, progress.failed, progress.dead) == (2, 1, 1)
    assert (counts.acked, counts.dead) == (2, 1)
    assert counts.balanced


def test_a_second_refusal_adds_to_the_first(tmp_path, dying_at):
    world = Refusing(tmp_path, bad={"b"}, how="raise")
    with dying_at("refused"):
        world.process(0, ["a", "b", "c"])
    world.bad = {"c"}
    _, counts = world.process(0, ["a", "b", "c"])
    assert (world.rows, world.parked, counts.dead) == (["A"], ["b", "c"], 2)
    assert world.calls[1:] == [["A", "C"], ["A"]]


def test_a_retried_record_that_is_refused_is_dead_with_its_attempts(tmp_path):
    world = Refusing(tmp_path, bad={"b"})
    world.behaves = fails("b", "c")
    world.process(0, ["a", "b", "c"])
    world.now_ms += 10_000
    progress, counts = world.process(1, ["d"])
    assert (progress.retried, progress.acked, progress.failed, progress.dead) == (2, 2, 1, 1)
    assert (world.rows, world.parked, counts.dead) == (["A", "C", "D"], ["b"], 1)
    assert (progress.latency_s.p50, progress.latency_s.p99) == (0, 10)  # of d and c
    with world.driver()[0] as state:
        assert state.decision(1).all_dead["lines"][ATTEMPT].to_pylist() == [2]


def test_a_row_that_hangs_from_two_records_takes_both_along(tmp_path):
    world = Refusing(tmp_path, bad={"a&b"}, shared_rows=[("A", "B")])
    _, counts = world.process(0, ["a", "b", "c"])
    # The rows of these records that were not refused are there.
    assert (world.rows, world.parked) == (["A", "B", "C"], ["a", "b"])
    assert (counts.acked, counts.dead) == (1, 2)


def test_the_records_of_several_spouts_are_told_apart(tmp_path):
    world = Refusing(tmp_path, bad={"b", "x"}, spouts=("lines", "others"))
    _, counts = world.process(0, ["a", "b", ("others", "x"), ("others", "y")])
    assert world.parked == ["b", "x"]
    dead = {name: account.dead for name, account in counts.spouts.items()}
    assert dead == {"lines": 1, "others": 1}
    assert counts.balanced


def test_all_may_be_refused(tmp_path):
    world = Refusing(tmp_path, bad={"a", "b"}, how="raise")
    _, counts = world.process(0, ["a", "b"])
    assert (world.rows, world.parked, counts.dead, counts.acked) == ([], ["a", "b"], 2, 0)
    assert world.calls[-1] == []


@pytest.mark.parametrize(
    ("rejects", "words"),
    [
        (
            lambda: SinkRejects(pa.table({"line": ["Z"]}), "no"),
            "1 of 1 values of line are in no row",
        ),
        (
            lambda: SinkRejects(pa.table({"word": ["A"]}), "no"),
            "by columns of the sink.s stream, each once: line",
        ),
        (lambda: SinkRejects.of_numbers(np.array([7]), "no"), "1 row that the sink was not given"),
        (lambda: SinkRejects.of_numbers(row_numbers(9, np.array([0])), "no"), "names 1 row that"),
        (lambda: SinkRejects([{"line": "A"}], "no"), "rows of SinkRejects must .* got list"),
        (lambda: SinkRejects(pa.table({"line": [[1]]}), "no"), "must be string, .* got list<item"),
    ],
)
@pytest.mark.parametrize("how", ["return", "raise"])
def test_a_mistake_in_what_is_refused_ends_the_query_at_once(tmp_path, rejects, words, how):
    """It is no outage, which may pass: the sink is called once, and is named."""
    world = Refusing(tmp_path, {"max_sink_attempts": 3}, how=how)
    world._named = lambda refused: rejects()
    world.bad = {"a"}
    said = rf"sink 'upper' refused rows of .* in an invalid way: .*{words}"
    with pytest.raises(InvalidRejects, match=said):
        world.process(0, ["a", "b"])
    assert (len(world.calls), world.paused) == (1, [])
    world.bad = set()
    assert world.process(0, ["a", "b"])[1].acked == 2


@pytest.mark.parametrize("answer", [5, 0])
def test_a_sink_that_returns_something_else_ends_the_query_at_once(tmp_path, answer):
    world = Refusing(tmp_path, {"max_sink_attempts": 3}, bad={"a"}, how="return")
    world._named = lambda refused: answer
    with pytest.raises(InvalidRejects, match="write must return SinkRejects or None, got int"):
        world.process(0, ["a", "b"])
    assert (len(world.calls), world.paused) == (1, [])


def test_more_than_are_looked_for_end_the_query_at_once(tmp_path):
    world = Refusing(tmp_path, {"max_sink_attempts": 3}, bad={"a"}, how="raise")
    world._named = lambda refused: TooManyRefused("too many")
    with pytest.raises(TooManyRefused, match="too many"):
        world.process(0, ["a", "b"])
    assert (len(world.calls), world.paused, world.written) == (1, [], {})
    world.bad = set()
    assert world.process(0, ["a", "b"])[1].acked == 2


def test_that_it_refuses_and_names_nothing_ends_the_query_at_once(tmp_path):
    world = Refusing(tmp_path, bad={"a"}, how="raise")
    world._named = lambda refused: SinkRejects(pa.table({"line": pa.array([], "str")}), "no")
    with pytest.raises(InvalidRejects, match="the sink raised SinkRejects without any row"):
        world.process(0, ["a"])


def test_refused_rows_of_no_record_are_told(tmp_path, caplog):
    world = Refusing(tmp_path, bad={"loose"}, shared_rows=[])
    plain = world._file
    world._file = lambda work, rows, roots: plain(
        work, rows + ([("LOOSE", None)] if rows and not isinstance(rows[0][1], list) else []), roots
    )
    with caplog.at_level("WARNING", "ackcore"):
        _, counts = world.process(0, ["a"])
    assert (world.rows, world.parked, counts.acked, counts.dead) == (["A"], [], 1, 0)
    assert "sinks refused 1 row that belongs to no record of a tracked spout" in caplog.text


def test_a_decision_of_another_driver_stands(tmp_path, dying_at):
    """One that is there already is not written a second time."""
    world = Refusing(tmp_path, bad={"b"})
    with dying_at("refused"):
        world.process(0, ["a", "b"])
    with world.driver()[0] as state:
        (one,) = state.refusals.of(0)
        assert (one.sink, one.written) == ("upper", True)
        with pytest.raises(insist.CheckpointInUse):
            state.refusals.add(0, 0, one)


def test_what_cannot_be_read_again_stops_the_query(tmp_path):
    world = Refusing(tmp_path, {"max_sink_attempts": 1}, bad={"b"})
    fetch, world.fetch = world.fetch, lambda *args: {}
    with pytest.raises(SinkError, match="reading the records again that sinks refused"):
        world.process(0, ["a", "b"])
    world.fetch = fetch
    world.bad = {"a"}
    world.process(0, ["a", "b"])
    assert world.parked == ["b"]


def test_records_of_refused_rows_are_not_read_in_other_columns(tmp_path, dying_at, monkeypatch):
    """Values would be in the wrong columns, or the store would get letters of unlike columns."""
    world = Refusing(tmp_path, bad={"b"})
    with dying_at("refused"):
        world.process(0, ["a", "b"])
    with monkeypatch.context() as patch:
        patch.setattr(worlds, "LINES", pa.schema([("text", pa.string())]))
        with pytest.raises(CheckpointForeign, match="columns line string, and has text string now"):
            world.process(0, ["a", "b"])
    world.process(0, ["a", "b"])
    assert (world.rows, world.parked) == (["A"], ["b"])


def test_a_careful_micro_batch_is_read_again_from_its_snapshot(tmp_path, dying_at):
    world = Refusing(tmp_path, {"careful_after": 0}, bad={"b"})
    with dying_at("refused"):
        world.process(0, ["a", "b"])
    world.process(0, ["other", "rows"])
    assert (world.rows, world.parked) == (["A"], ["b"])


# ------------------------------------------------------------------------------------- isolation


class Raising(World):
    """A world whose sink raises over bad lines, or is out; it replaces what a batch id had."""

    replaces = True
    error = ValueError

    def __init__(self, path, settings=None, *, bad=(), isolate=True):
        self.bad, self.isolate, self.calls, self.out = set(bad), isolate, [], False
        self.before = lambda accepted: None  # called before each call of the sink
        super().__init__(path, settings or {})

    def _sink(self, builder):
        builder.sink("upper", self, isolate=self.isolate)

    def write(self, accepted):
        self.before(accepted)
        lines = [
            line.lower()
            for file in accepted.files
            for some in read_sink_file(file, accepted.nonacked)
            for line in some["line"].to_pylist()
        ]
        self.calls.append(lines)
        if self.out:
            raise ConnectionError("it is out")
        for line in lines:
            if line in self.bad:
                raise self.error(f"no {line}")
        self.written[accepted.batch_id] = [line.upper() for line in lines]


LINES = [f"line-{n}" for n in range(20)]


@pytest.mark.parametrize("bad", [["line-7"], ["line-0", "line-19"], LINES[3:9], LINES[1:]])
def test_a_batch_is_bisected_to_the_rows_that_fail(tmp_path, bad):
    world = Raising(tmp_path, bad=bad)
    _, counts = world.process(0, LINES)
    assert world.rows == sorted(line.upper() for line in LINES if line not in bad)
    assert world.parked == sorted(bad)
    assert (counts.acked, counts.dead) == (20 - len(bad), len(bad))
    # Once more before it begins; then halves, and at last all that is left.
    assert world.calls[:3] == [LINES, LINES, LINES[:10]]
    assert world.calls[-1] == [line for line in LINES if line not in bad]
    assert world.paused == [1.0]
    with world.driver()[0] as state:
        (dead,) = state.decision(0).all_dead.values()
    said = {one["message"] for one in dead[REASON].to_pylist()}
    assert said == {f"no {line}" for line in bad}


@pytest.mark.parametrize("error", [SystemExit, asyncio.CancelledError, BaseException])
def test_a_batch_is_bisected_over_what_is_no_exception(tmp_path, error):
    world = Raising(tmp_path, bad=["line-7"])
    world.error = error
    _, counts = world.process(0, LINES)
    assert (counts.acked, counts.dead, world.parked) == (19, 1, ["line-7"])


class Mute(ValueError):
    def __str__(self):
        raise ZeroDivisionError("no text")


@pytest.mark.parametrize("isolate", [True, ["ValueError"]])
def test_a_batch_is_bisected_over_an_error_that_has_no_text(tmp_path, isolate):
    world = Raising(tmp_path, bad=["line-7"], isolate=isolate)
    world.error = Mute
    _, counts = world.process(0, LINES)
    assert (counts.acked, counts.dead, world.parked) == (19, 1, ["line-7"])


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (Mute, "Mute: the exception has no text: __str__ raised ZeroDivisionError"),
        (lambda text: ValueError(f"\ud800 {text}"), r"ValueError: \? no a"),
    ],
)
@pytest.mark.parametrize("isolate", [False, [KeyError]])
def test_an_error_without_a_valid_text_is_named(tmp_path, error, said, isolate):
    world = Raising(tmp_path, {"max_sink_attempts": 1}, bad=["a"], isolate=isolate)
    world.error = error
    with pytest.raises(SinkError, match=f"the last time with {said}"):
        world.process(0, ["a", "b"])


def test_a_part_of_a_batch_is_named_in_a_few_bytes(tmp_path):
    """It goes along with each of the calls, to tasks, too: not a list of all other rows."""
    world = Raising(tmp_path, bad=["77"])
    sizes = []
    world.before = lambda accepted: sizes.append(len(pickle.dumps(accepted.files)))
    _, counts = world.process(0, list(map(str, range(3000))))
    assert (counts.acked, counts.dead, world.parked) == (2999, 1, ["77"])
    assert max(sizes) - min(sizes) < 100


def test_a_sink_that_is_out_refuses_nothing(tmp_path):
    world = Raising(tmp_path, {"max_sink_attempts": 3}, bad=["line-3"])
    world.out = True
    many = [*LINES, *map(str, range(500))]
    with pytest.raises(SinkError, match="the last time with ConnectionError: it is out"):
        world.process(0, many)
    assert len(world.calls) < 200  # twice some 64, and not as many as there are rows
    world.out = False
    assert world.process(0, many)[1].dead == 1


@pytest.mark.parametrize("lines", [["a"], ["a", "b"]])
def test_where_nothing_can_be_written_only_a_named_error_is_a_rows_fault(tmp_path, lines):
    world = Raising(tmp_path / "any", {"max_sink_attempts": 2}, bad=["a", "b"])
    with pytest.raises(SinkError, match=r"no a\. .* ackcore bisected the batch, .* and found no"):
        world.process(0, lines)
    world = Raising(tmp_path / "named", bad=["a", "b"], isolate=["ValueError"])
    _, counts = world.process(0, lines)
    assert (counts.acked, counts.dead, world.parked) == (0, len(lines), lines)


@pytest.mark.parametrize(("isolate", "good"), [([ValueError], []), (True, range(0, 1000, 8))])
def test_rows_that_fail_are_looked_for_up_to_a_number(tmp_path, monkeypatch, isolate, good):
    """Not to the end of a batch of which each row fails, which would be three calls a row."""
    lines = list(map(str, range(1000)))
    bad = [str(n) for n in range(1000) if n not in good]
    for module in (act, rejects):
        monkeypatch.setattr(module, "MAX_REFUSED", 20)
    world = Raising(tmp_path, bad=bad, isolate=isolate)
    says = (
        "sink 'upper' refuses more than 20 rows of micro-batch 0, the first with ValueError: no "
        f"{bad[0]}. The next attempt .* a sink of your own that raises SinkRejects"
    )
    with pytest.raises(TooManyRefused, match=says):
        world.process(0, lines)
    assert (len(world.calls) < 70, world.paused) == (True, [1.0])
    world.bad = set(bad[:20])  # the code was mended
    _, counts = world.process(0, lines)
    assert (counts.acked, counts.dead, sorted(world.parked)) == (980, 20, sorted(bad[:20]))


def test_an_outage_amid_the_search_is_no_refusal_of_too_many(tmp_path, monkeypatch):
    monkeypatch.setattr(act, "MAX_REFUSED", 3)
    world = Raising(tmp_path, bad=["line-0"])

    def out_until_the_next_try(accepted):
        world.out = len(world.calls) >= 4 and len(world.paused) < 2

    world.before = out_until_the_next_try
    _, counts = world.process(0, LINES)
    assert (world.parked, counts.acked, counts.dead) == (["line-0"], 19, 1)
    assert world.paused == [1.0, 2.0]


def test_an_error_that_is_not_named_is_no_rows_fault(tmp_path):
    world = Raising(tmp_path, {"max_sink_attempts": 2}, bad=["line-3"], isolate=[KeyError])
    with pytest.raises(SinkError, match="no line-3"):
        world.process(0, LINES)
    assert world.calls == [LINES, LINES]


def test_a_sink_that_fails_without_rows_is_not_searched(tmp_path):
    """The only row is refused, and the call with the rest of the micro-batch has none."""
    world = Raising(tmp_path, {"max_sink_attempts": 2}, bad=["line-3"], isolate=[ValueError])
    write = world.write

    def needs_rows(accepted):
        write(accepted)
        if not world.calls[-1]:
            raise (ValueError if len(world.calls) < 99 else OSError)("must pass at least one batch")

    world.write = needs_rows
    with pytest.raises(SinkError, match="must pass at least one batch"):
        world.process(0, ["line-3"])
    assert len(world.calls) < 20


def test_an_outage_amid_the_search_ends_it(tmp_path):
    world = Raising(tmp_path, bad=["line-3"], isolate=[ValueError])

    def out_for_a_while(accepted):
        world.out = 3 <= len(world.calls) <= 5

    world.before = out_for_a_while
    _, counts = world.process(0, LINES)
    assert (world.parked, counts.dead) == (["line-3"], 1)


@pytest.mark.parametrize("blip", [[], ["line-4"]])
def test_a_row_that_failed_once_alone_is_not_refused(tmp_path, blip):
    """It may have been the network's: it fails once more, amid rows that go in, or is written."""
    world = Raising(tmp_path, bad=["line-3", *blip])
    write = world.write

    def reset_once(accepted):
        try:
            write(accepted)
        finally:
            if world.calls[-1] == blip:
                world.bad.discard("line-4")

    world.write = reset_once
    _, counts = world.process(0, LINES)
    assert world.calls.count(["line-4"]) == (2 if blip else 1)
    assert (world.parked, counts.acked, counts.dead) == (["line-3"], 19, 1)
    assert world.rows == sorted(line.upper() for line in LINES if line != "line-3")


def test_a_row_over_which_a_sink_was_away_twice_is_not_refused(tmp_path):
    """Others went in between: it was away, back, and away again."""
    world = Raising(tmp_path, bad=["line-3", "line-4"])
    write = world.write

    def reset_twice(accepted):
        try:
            write(accepted)
        finally:
            if world.calls.count(["line-4"]) == 2:
                world.bad.discard("line-4")

    world.write = reset_twice
    _, counts = world.process(0, LINES)
    assert world.calls.count(["line-3"]) == world.calls.count(["line-4"]) == 3
    assert (world.parked, counts.acked, counts.dead) == (["line-3"], 19, 1)


@pytest.mark.parametrize("out", [{1}, {2, 3, 4}, {4}])
def test_rows_are_not_refused_while_none_go_in(tmp_path, out):
    """Rows are tried once more in these calls: others, both rows, others."""
    world = Raising(tmp_path, bad=["line-3", "line-4"])
    since = []

    def out_for_a_while(accepted):
        world.out = len(since) in out
        if since or accepted.files[0].within == (4, 5):
            since.append(accepted)

    world.before = out_for_a_while
    _, counts = world.process(0, LINES)
    assert len(since) > 5
    assert world.paused == [1.0, 2.0]  # the search began anew
    assert (world.parked, counts.acked, counts.dead) == (["line-3", "line-4"], 18, 2)


def test_a_crash_amid_the_search_begins_it_anew(tmp_path):
    world = Raising(tmp_path, bad=["line-3"])

    def dying(accepted):
        if len(world.calls) == 5:
            raise KilledInCall

    world.before = dying
    with pytest.raises(Killed):
        world.process(0, LINES)
    world.before = lambda accepted: None
    _, counts = world.process(0, LINES)
    assert (world.parked, counts.acked, counts.dead) == (["line-3"], 19, 1)
    assert len(world.rows) == 19


def test_a_stop_amid_the_search_is_heard(tmp_path):
    world = Raising(tmp_path, bad=["line-3"])

    def stopping(accepted):
        world.stopping = len(world.calls) >= 2

    world.before = stopping
    with pytest.raises(insist.Stopped):
        world.process(0, LINES)
    world.stopping, world.before = False, lambda accepted: None
    assert world.process(0, LINES)[1].dead == 1


@pytest.mark.parametrize(("replaces", "says"), [(True, True), (False, False)])
def test_where_rows_may_be_at_fault_the_way_out_is_told(tmp_path, replaces, says):
    world = Raising(tmp_path, {"max_sink_attempts": 1}, bad=["a"], isolate=False)
    world.replaces = replaces
    with pytest.raises(SinkError, match=r"sink 'upper' failed 1 time .*ValueError: no a") as told:
        world.process(0, ["a", "b"])
    way_out = "return or raise SinkRejects, which names them, or declare the sink with isolate=True"
    assert (way_out in str(told.value)) == says


def test_only_a_sink_that_replaces_is_isolated():
    builder = TopologyBuilder()
    with pytest.raises(TypeError, match=r"'upper' cannot have isolate: to_kafka.* not replace"):
        check_sink("upper", to_kafka("topic", "broker:9092"), None, isolated=True)
    with pytest.raises(ValueError, match="isolate of sink 'upper' has 'NoError'"):
        builder.sink("upper", print, isolate=["NoError"])
    with pytest.raises(TypeError, match="isolate of sink 'upper' must be a list"):
        builder.sink("upper", print, isolate=ValueError)
    check_sink("upper", to_parquet("/somewhere"), None, isolated=True)


@pytest.fixture
def ordered():
    builder = TopologyBuilder()
    builder.spout("lines", Source(), ordered_by="line")
    builder.bolt("upper", Upper()).shuffle("lines")

    def ordered(world):
        """Return its topology with an order."""
        builder.sink("upper", world)
        return builder.build(backoff_s=10.0, **world.settings)

    return ordered


def test_an_order_that_came_since_does_not_make_other_records_dead(tmp_path, dying_at, ordered):
    """The places of the due records identify the rows."""
    world = Refusing(tmp_path, bad={"b"})
    with dying_at("refused"):
        world.process(0, ["a", "b"])
    before, world.topology = world.topology, ordered(world)
    with pytest.raises(CheckpointForeign, match=r"dedup of no spout, .* now has 'lines' by line"):
        world.process(0, ["a", "b"])
    world.topology = before
    world.process(0, ["a", "b"])
    assert world.parked == ["b"]


def test_an_order_that_came_since_leaves_nobody_suspected(tmp_path, dying_at, ordered):
    world = Refusing(tmp_path)
    with dying_at("planned"):
        world.process(0, ["a", "b"])
    with world.driver()[0] as state:
        state.write_plan(replace(state.plan(0), crashes=3, careful=True, rejected=(7,)))
    world.topology = ordered(world)
    world.process(0, ["a", "b"])
    assert world.rows == ["A", "B"]
    assert [run.rejected for run in world.runs] == [()]
    with world.driver()[0] as state:
        assert state.plan(0).ordered_by == {"lines": ("line",)}


class Words(BasicBolt):
    """Emits the words of a line."""

    outputs = pa.schema([("word", pa.string())])

    def execute(self, tuple, collector):
        for word in tuple["line"].split():
            collector.emit((word,))


@pytest.mark.parametrize("order", [("refusing", "taking"), ("taking", "refusing")])
@pytest.mark.parametrize("raises", [True, False])
def test_a_refused_row_keeps_its_record_out_of_tables_but_its_other_rows_in_sinks(
    spark, tmp_path, order, raises
):
    """The order in which sinks and tables are declared makes no difference."""
    taken = {name: {} for name in order}

    def write(name, frame, number):
        words = sorted(row["word"] for row in frame.collect())
        taken[name][number] = words
        if name == "refusing" and {"b", "loose"} & set(words):
            refused = pa.table({"word": [word for word in words if word in ("b", "loose")]})
            rejects = SinkRejects(refused, ["no"] * len(refused))
            if raises:
                raise rejects
            taken[name][number] = [word for word in words if word not in ("b", "loose")]
            return rejects
        return None

    def lines(*some):
        return spark.createDataFrame([(line,) for line in some], "line string")

    builder = TopologyBuilder()
    builder.spout("lines", lines("a b", "c d", "a"))
    builder.spout("untracked", lines("loose"), tracked=False)
    builder.bolt("words", Words()).shuffle("lines").shuffle("untracked")
    builder.sink("words", partial(write, order[0]), name=order[0])
    builder.table("before", from_="words", key="word", value={"n": count()})
    builder.sink("words", partial(write, order[1]), name=order[1])
    builder.table("after", from_="words", key="word", value={"n": count()})
    progress = run_batch(builder.build(), spark, tmp_path / "cp", max_dead_ratio=None)
    assert (progress.acked, progress.dead) == (2, 1)
    assert [*taken["refusing"].values()] == [["a", "a", "c", "d"]]
    assert [*taken["taking"].values()] == [["a", "a", "b", "c", "d", "loose"]]
    for name in ("before", "after"):
        rows = table(tmp_path / "cp", name, spark).collect()
        assert {row["word"]: row["n"] for row in rows} == {"a": 1, "c": 1, "d": 1, "loose": 1}
