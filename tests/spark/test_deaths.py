"""Causes of deaths are logged, and a run with too few survivors is an error."""

from __future__ import annotations

import pickle
import sys

import numpy as np
import pyarrow as pa
import pytest
from pyspark import cloudpickle
from streams import Folder, available_now, in_line, until
from worlds import World, fails

from ackcore.dead_limit import DeadLimit
from ackcore.spark import TooManyDead, dead_letters, replay, run_batch, start
from ackcore.spark.base.reasons import DEATHS
from ackcore.spark.base.schemas import REASON_TYPE
from ackcore.spark.dead_letters.store import DeadLetters
from ackcore.spark.engine import causes as limits
from ackcore.spark.engine.progress import Account, Counts
from ackcore.topology import BasicBolt
from ackcore.topology.tuples import Reason

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Misspelt(BasicBolt):
    """Asks for a column that is not there, as long as it is not mended."""

    outputs = pa.schema([("word", pa.string())])

    def __init__(self, mended=False):
        self.mended = mended

    def execute(self, tuple, collector):
        collector.emit((tuple["word" if self.mended else "wrod"],))


def topology(spark, bolt):
    words = spark.createDataFrame([("a",), ("b",), ("c",)], "word string")
    return in_line({"words": words, "count": bolt}, max_attempts=1)


def warnings(caplog):
    found = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    caplog.clear()
    return found


def test_a_misspelt_column_does_not_look_like_success(spark, tmp_path, caplog):
    misspelt, mended = (topology(spark, Misspelt(each)) for each in (False, True))
    with pytest.raises(TooManyDead, match=r"^all of 3 records died: 3 in 'count' of KeyErr") as one:
        run_batch(misspelt, spark, tmp_path)
    assert (one.value.counts.dead, one.value.counts.records) == (3, 3)
    assert "no field 'wrod'" in str(one.value)
    assert "set max_dead_ratio=None to accept so many dead records" in str(one.value)
    look = f"ackcore.spark.dead_letters('{tmp_path}') shows each with its payload"
    assert look in str(one.value)
    assert warnings(caplog) == []  # what is raised is not logged as well
    # All of it is on record, and a second run says the same.
    assert dead_letters(tmp_path, spark).count() == 3
    with pytest.raises(TooManyDead) as other:
        run_batch(misspelt, spark, tmp_path)
    assert (str(other.value), other.value.counts) == (str(one.value), one.value.counts)
    assert run_batch(misspelt, spark, tmp_path, max_dead_ratio=None) == one.value.counts
    said = warnings(caplog)[-1]
    assert said.startswith("3 of 3 records died: 3 in 'count' of KeyError (")
    assert said.endswith(look)
    # The way out that the error names.
    replay(tmp_path, spark)
    assert run_batch(mended, spark, tmp_path, max_dead=0).acked == 3
    assert warnings(caplog) == []


def counted(*rows):
    """Deaths, as they are counted by reason."""
    named = [dict(zip(DEATHS.names, row, strict=True)) for row in rows]
    return [pa.Table.from_pylist(named, DEATHS)]


@pytest.mark.parametrize(
    ("limit", "died", "words"),
    [
        ((None, 1.0), 9, None),
        ((None, 1.0), 10, "all of 10 records died: 10 in"),
        ((None, None), 10, None),
        ((0, None), 0, None),
        ((0, None), 1, "1 of 10 records died, and max_dead is 0: 1 in 'split' of ValueError"),
        ((np.int64(2), 1), 2, None),
        ((2, 1.0), 3, "3 of 10 records died, and max_dead is 2: "),
        ((None, 0.2), 2, None),
        ((None, 0.2), 3, "3 of 10 records died, and max_dead_ratio is 0.2: "),
        ((2, 0.5), 3, "and max_dead is 2: "),
        ((5, 0.2), 3, "and max_dead_ratio is 0.2: "),
        ((100, 1.0), 10, "all of 10 records died"),
        ((100, None), 10, None),
        ((None, 0), 1, "1 of 10 records died, and max_dead_ratio is 0: "),
    ],
)
def test_how_many_may_die(limit, died, words, caplog):
    # One of them was sent again and is ACKED now: it died, but is not dead.
    counts = Counts(4, {"lines": Account(records=10, replayed=1, acked=10 - died, dead=died + 1)})
    reasons = counted(("split", "ValueError", "no", died))
    if words is None:
        limits.check_run(counts, reasons, "cp", DeadLimit(*limit))
    else:
        with pytest.raises(TooManyDead, match=words) as failed:
            limits.check_run(counts, reasons, "cp", DeadLimit(*limit))
        assert (failed.value.limit == "max_dead") == ("max_dead is" in words)
        again = pickle.loads(pickle.dumps(failed.value))
        assert (str(again), again.counts) == (str(failed.value), counts)
    assert len(warnings(caplog)) == (died > 0 and words is None)


SINCE, RATIO = "since this start died", "max_dead_ratio"


@pytest.mark.parametrize(
    ("limit", "ended", "in_stream", "at_end"),
    [
        # (acked, dead) after each micro-batch of this start; in which it ends, None if in none
        ((None, 1.0), [(0, 9), (0, 10)], (1, f"all of 10 records {SINCE}: "), True),
        ((None, 1.0), [(0, 9)], None, True),
        ((None, 1.0), [(1, 9), (1, 99)], None, False),
        ((None, 1.0), [(0, 0), (5, 0)], None, False),
        ((None, None), [(0, 99)], None, False),
        ((0, 1.0), [(7, 0), (9, 1)], (1, f"1 of 10 records {SINCE}, and max_dead is 0: "), True),
        ((2, 1), [(7, 2), (9, 3)], (1, f"3 of 12 records {SINCE}, and max_dead is 2: "), True),
        ((99, 1.0), [(0, 10)], (0, f"all of 10 records {SINCE}: "), True),
        ((99, 1.0), [(0, 9)], None, True),
        ((99, None), [(0, 10)], None, False),
        ((None, 0.01), [(90, 9), (91, 9)], None, True),
        *(((None, n / 100), [(100 - n, n)], None, False) for n in (29, 57, 58)),
        ((None, 0.01), [(90, 10)], (0, f"10 of 100 records {SINCE}, and {RATIO} is 0.01: "), True),
        # (acked, dead, of them first seen before this start)
        ((None, 1.0), [(0, 99, 99)], None, False),
        ((None, 1.0), [(0, 99, 90)], None, True),
        ((98, 1.0), [(0, 99, 99)], (0, f"99 of 99 records {SINCE}, and max_dead is 98: "), True),
        ((99, 1.0), [(0, 99, 99)], None, False),
        ((None, 0.5), [(50, 99, 60)], None, False),
        (
            (None, 0.5),
            [(9, 9), (9, 10)],
            (1, f"10 of 19 records {SINCE}, and {RATIO} is 0.5: "),
            True,
        ),
    ],
)
def test_how_many_may_die_in_a_stream(limit, ended, in_stream, at_end, caplog):
    before = Counts(3, {"lines": Account(records=1000, acked=500, dead=500)})
    limit = limits.StreamLimit(DeadLimit(*limit), before, 1000, "cp")
    reason, was, counts = Reason("split", "ValueError", "no")._asdict(), 0, before
    for number, (acked, dead, *older) in enumerate(ended):
        account = Account(records=2000, acked=500 + acked, dead=500 + dead, waiting=1000)
        counts = Counts(4 + number, {"lines": account})
        first_ms = [999] * sum(older) + [1000] * (dead - was - sum(older))
        columns = {
            "_ackcore_reason": pa.array([reason] * (dead - was), REASON_TYPE),
            "_ackcore_first_ms": first_ms,
        }
        died = {"lines": pa.table(columns)}
        was, died = dead, died if dead > was else {}
        if in_stream is None or number < in_stream[0]:
            limit.after(number, died, counts)
            assert len(warnings(caplog)) == len(died)
        else:
            words = f"^{in_stream[1]}in micro-batch {number} "
            with pytest.raises(TooManyDead, match=words) as one:
                limit.after(number, died, counts)
            assert one.value.counts is counts
            assert "to accept so many dead records" in str(one.value)
            assert warnings(caplog) == []
    if at_end:
        with pytest.raises(TooManyDead, match=SINCE):
            limit.at_end(counts)
    else:
        limit.at_end(counts)


def test_micro_batches_in_which_no_record_ended_are_not_kept():
    """In an outage of days there is nothing but retries, and each has a micro-batch."""
    limit = DeadLimit(None, 0.5, 100)
    counts = Counts(3, {"lines": Account(records=1000, acked=900, dead=100)})
    stream = limits.StreamLimit(limit, counts, 1000, "cp")
    for number in range(50):
        stream.after(number, {}, counts)
    assert not limit._steps
    assert not stream._causes
    assert judged([(40, 10), *[(0, 0)] * 20, (0, 45)], None, 0.5, 100)[0] == 21


def judged(ended, *limit):
    """Judge a stream by (acked, dead, of them old) in each micro-batch; return where it ended."""
    before = Counts(3, {"lines": Account(records=1000, acked=900, dead=100)})
    limit = limits.StreamLimit(DeadLimit(*limit), before, 1000, "cp")
    acked, died = 900, 100
    for number, (more_acked, *dead) in enumerate(ended):
        new, old = [*dead, 0][:2]
        acked, died = acked + more_acked, died + new
        counts = Counts(4 + number, {"lines": Account(records=9000, acked=acked, dead=died)})
        reason = Reason("split", "ValueError", f"no {number}")._asdict()
        first_ms = [999] * old + [1000] * (new - old)
        columns = {
            "_ackcore_reason": pa.array([reason] * new, REASON_TYPE),
            "_ackcore_first_ms": first_ms,
        }
        try:
            limit.after(number, {"lines": pa.table(columns)} if new else {}, counts)
        except TooManyDead as error:
            return number, pickle.loads(pickle.dumps(error))
    return None, None


@pytest.mark.parametrize(
    ("limit", "ended", "number"),
    [
        # A long good past excuses nothing; without a window it does.
        ((None, 0.1, 100), [(9000, 0), (50, 0), (45, 5), (20, 20)], 3),
        ((None, 0.1, None), [(9000, 0), (50, 0), (45, 5), (20, 20)], None),
        # What is past is forgotten: 15 of the last 140, and then 5 of the last 110.
        ((None, 0.12, 100), [(60, 0), (50, 10), (75, 5), (30, 0)], None),
        ((None, 0.1, 100), [(60, 0), (50, 10), (75, 5), (30, 0)], 2),
        # A number, too, of those that ended last.
        ((9, None, 100), [(99, 8), (99, 8), (99, 8)], None),
        ((9, None, 200), [(99, 8), (99, 8), (99, 8)], 1),
        # Too few to judge a share by; what was there before the start.
        ((None, 0.1, 100), [(9, 0), (0, 9)], None),
        ((None, 0.1, 5), [(9, 0), (0, 4)], None),
        ((None, 0.1, 5), [(9, 0), (0, 5)], 1),
        ((None, 0.1, 5), [(9, 0), (0, 99, 95)], None),
        ((None, None, 5), [(0, 99)], None),
        # All of the last ones, as of a service that is down.
        ((None, 1.0, 6), [(99, 0), (0, 3), (0, 3)], 2),
        ((None, 1.0, 6), [(99, 0), (0, 3), (1, 3), (0, 3)], None),
    ],
)
def test_the_last_records_that_ended_are_judged(limit, ended, number):
    found, error = judged(ended, *limit)
    assert found == number
    if error is not None:
        assert error.limit == ("max_dead" if limit[1] is None else "max_dead_ratio")
        assert "records that ended last died" in str(error)
        assert "to accept so many dead records" in str(error)
        (cause,) = error.causes
        assert (cause.component, cause.error_type) == ("split", "ValueError")


@pytest.fixture
def endless(spark, tmp_path):
    """A stream of words, and a topology that misspells them until it is mended."""
    folder = Folder(spark, tmp_path / "words")

    def topology(mended=False):
        words = folder.stream.withColumnRenamed("line", "word")
        parts = {"words": words, "count": Misspelt(mended)}
        return in_line(parts, max_attempts=2, backoff_s=0.001)

    return folder, topology


def test_a_stream_of_which_every_record_dies_ends(spark, tmp_path, endless, running, caplog):
    folder, topology = endless
    folder.add(*"abcdef")
    query = running(topology(), spark, tmp_path / "cp")
    until(lambda: query.counts.dead == 6, query)  # a stream may begin with a few bad records
    folder.add(*"ghij")
    words = r"^all of 10 records since this start died: in micro-batch \d+ 4 in 'count' "
    with pytest.raises(TooManyDead, match=words) as failed:
        query.await_termination(300)
    assert query.exception is failed.value
    assert not query.is_active
    # Said once: that micro-batch has no warning.
    said, ended = [each.getMessage() for each in caplog.records if "died" in each.getMessage()]
    assert "6 records died" in said
    assert ended == f"the query ended: {failed.value}"
    # The counts of that micro-batch are closed, and nothing died but records.
    counts = failed.value.counts
    assert (counts.records, counts.dead, counts.waiting, counts.balanced) == (10, 10, 0, True)
    assert all(each.runs == 1 for each in query.recent_progress)
    assert dead_letters(tmp_path / "cp", spark).count() == 10
    # The way out that the error names.
    query = running(topology(mended=True), spark, tmp_path / "cp")
    replay(tmp_path / "cp", spark)
    folder.add("k")
    query.process_all_available()
    counts = query.counts
    assert (counts.acked, counts.dead, counts.replayed, counts.resolved) == (11, 10, 10, 10)


def test_a_stream_that_ends_with_its_source_is_judged_by_however_few(
    spark, tmp_path, endless, caplog
):
    folder, topology = endless
    folder.add(*"abc")
    query = start(topology(), spark, tmp_path / "cp", trigger={"availableNow": True})
    query._stream._thread.join()
    assert [each.getMessage() for each in caplog.records if each.levelname == "ERROR"] == [
        f"the query ended: {query.exception}"
    ]
    with pytest.raises(TooManyDead, match=r"^all of 3 records since this start died"):
        query.await_termination()
    # They are on record, and no matter of the next start.
    query = available_now(topology(), spark, tmp_path / "cp")
    assert query.counts.dead == 3


def test_a_letter_that_was_sent_twice_and_acked_twice_hides_no_other(tmp_path, caplog):
    """It is among the ACKED twice, and makes up for no other record's death."""
    world = World(tmp_path, spouts=("lines", "clicks"), behaves=fails("a", "b", final=True))
    with world.driver()[0] as state:
        DeadLetters.checked(tmp_path, state.deployment_key)()  # as a query that starts does
    world.process(0, ["a", ("clicks", "b")])
    with world.driver()[0] as state:
        letters = DeadLetters.checked(tmp_path, state.deployment_key)()
        letters.write(0, state.decision(0).dead)
    world.behaves = fails()
    for number in (1, 2):
        assert replay(tmp_path, spout="lines", again=True).records == {"lines": 1}
        _, counts = world.process(number)
    assert (counts.records, counts.acked, counts.dead) == (2, 2, 2)
    with pytest.raises(TooManyDead, match=r"^1 of 2 records died, and max_dead is 0: 1 in 'upper'"):
        limits.check_run(counts, letters.reasons(), "cp", DeadLimit(0))
    assert warnings(caplog) == []
    assert replay(tmp_path).records == {"clicks": 1}
    _, counts = world.process(3)
    limits.check_run(counts, letters.reasons(), "cp", DeadLimit(0))


def test_nobody_died_where_nobody_came():
    limits.check_run(Counts(), [], "cp", DeadLimit(0))


@pytest.mark.parametrize(
    ("limit", "error", "words"),
    [
        ({"max_dead": -1}, ValueError, "max_dead must be a number of records, .* got -1"),
        ({"max_dead": 0.5}, TypeError, r"got float 0\.5; a share of the records is max_dead_ratio"),
        ({"max_dead": True}, TypeError, "got bool True"),
        ({"max_dead": "5"}, TypeError, "got str '5'"),
        ({"max_dead_ratio": 5}, ValueError, "max_dead_ratio must be a share .* got 5; a number of"),
        ({"max_dead_ratio": -0.1}, ValueError, r"from 0 to 1, or None for no limit, got -0\.1"),
        ({"max_dead_ratio": float("nan")}, ValueError, "got nan"),
        ({"max_dead_ratio": True}, TypeError, "got bool True"),
        ({"max_dead_ratio": "5%"}, TypeError, "got str '5%'"),
    ],
)
def test_limits_that_are_none(tmp_path, limit, error, words):
    """Refused before anything else is looked at."""
    with pytest.raises(error, match=words):
        run_batch(None, None, tmp_path / "cp", **limit)
    with pytest.raises(error, match=words):
        start(None, None, tmp_path / "cp", **limit)
    assert not (tmp_path / "cp").exists()


def test_the_most_frequent_causes_come_first():
    told = [
        ("split", "ValueError", "line 7", 1),
        ("load", "TimeoutError", "out\nof  reach " + "x" * 200, 5),
        ("split", "ValueError", "line 9", 1),
        ("split", "KeyError", "'wrod'", 3),
        ("split", "ValueError", "line 9", 1),
    ]
    found = limits.causes(table for one in told for table in counted(one))
    assert [str(cause) for cause in found] == [
        f"5 in 'load' of TimeoutError (out of reach {'x' * 144}...)",
        "3 in 'split' of KeyError ('wrod')",
        "3 in 'split' of ValueError (line 9, and 1 other message)",
    ]


def test_a_line_names_three_causes_and_counts_the_rest(caplog):
    kinds = [Reason("b", name, "no")._asdict() for name in ("A", "B", "C", "D", "E") for _ in "12"]
    table = pa.table({"_ackcore_reason": kinds, "_ackcore_first_ms": [0] * len(kinds)})
    limit = limits.StreamLimit(DeadLimit(None, None), Counts(), 0, "cp")
    limit.after(7, {"one": table, "two": table.slice(9)}, Counts())
    (said,) = warnings(caplog)
    assert said.startswith(
        "micro-batch 7: 11 records died: 3 in 'b' of E (no); 2 in 'b' of A (no); 2 in 'b' of B (no)"
        "; 4 with other errors. "
    )
