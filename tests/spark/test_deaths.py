"""What records died of is said, and a run of which too little is left is an error."""

from __future__ import annotations

import pickle
import sys
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from pyspark import cloudpickle
from worlds import World, fails

from ackcore.spark import TooManyDead, dead_letters, replay, run_batch
from ackcore.spark.dead_letters.store import DeadLetters
from ackcore.spark.protocol import deaths
from ackcore.spark.protocol.progress import Account, Books
from ackcore.topology import BasicBolt, TopologyBuilder
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
    builder = TopologyBuilder()
    builder.spout("words", spark.createDataFrame([("a",), ("b",), ("c",)], "word string"))
    builder.bolt("count", bolt).shuffle("words")
    return builder.build(max_attempts=1)


def warnings(caplog):
    found = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    caplog.clear()
    return found


def test_a_misspelt_column_does_not_look_like_success(spark, tmp_path, caplog):
    misspelt, mended = (topology(spark, Misspelt(each)) for each in (False, True))
    with pytest.raises(TooManyDead, match=r"^all of 3 records died: 3 in 'count' of KeyErr") as one:
        run_batch(misspelt, spark, tmp_path)
    assert (one.value.books.dead, one.value.books.records) == (3, 3)
    assert "no field 'wrod'" in str(one.value)
    assert "max_dead=None lets such a run pass" in str(one.value)
    (said,) = warnings(caplog)
    assert said.startswith("3 of 3 records died: 3 in 'count' of KeyError (")
    assert said.endswith(f"ackcore.spark.dead_letters('{tmp_path}') shows each with its payload")
    # All of it is on record, and a second run says the same.
    assert dead_letters(tmp_path, spark).count() == 3
    with pytest.raises(TooManyDead) as other:
        run_batch(misspelt, spark, tmp_path)
    assert (str(other.value), other.value.books) == (str(one.value), one.value.books)
    assert run_batch(misspelt, spark, tmp_path, max_dead=None) == one.value.books
    warnings(caplog)
    # The way out that the error names.
    replay(tmp_path, spark)
    assert run_batch(mended, spark, tmp_path, max_dead=0).acked == 3
    assert warnings(caplog) == []


@pytest.mark.parametrize(
    ("max_dead", "died", "words"),
    [
        (1.0, 9, None),
        (1.0, 10, "all of 10 records died: 10 in"),
        (None, 10, None),
        (0, 0, None),
        (0, 1, "1 of 10 records died, and max_dead is 0: 1 in 'split' of ValueError"),
        (np.int64(2), 2, None),
        (2, 3, "3 of 10 records died, and max_dead is 2: "),
        (0.2, 2, None),
        (0.2, 3, "3 of 10 records died, and max_dead is 0.2: "),
        (100, 10, "all of 10 records died"),
    ],
)
def test_how_many_may_die(max_dead, died, words, caplog):
    # One of them was sent again and is ACKED now: it died, but is not dead.
    books = Books(4, {"lines": Account(records=10, replayed=1, acked=10 - died, dead=died + 1)})
    reasons = [(Reason("split", "ValueError", "no"), died)]
    if words is None:
        assert deaths.close_run(books, reasons, "cp", max_dead) is books
    else:
        with pytest.raises(TooManyDead, match=words) as failed:
            deaths.close_run(books, reasons, "cp", max_dead)
        again = pickle.loads(pickle.dumps(failed.value))
        assert (str(again), again.books) == (str(failed.value), books)
    assert len(warnings(caplog)) == (died > 0)


def test_a_letter_that_was_sent_twice_and_acked_twice_hides_no_other(tmp_path, caplog):
    """It is among the ACKED twice, and makes up for no other record's death."""
    world = World(tmp_path, spouts=("lines", "clicks"), behaves=fails("a", "b", final=True))
    world.process(0, ["a", ("clicks", "b")])
    state, _ = world.driver()
    with state:
        letters = DeadLetters.open(tmp_path, state.deployment_key)
        letters.write(0, state.decision(0).dead)
    world.behaves = fails()
    for number in (1, 2):
        assert replay(tmp_path, spout="lines", again=True).records == {"lines": 1}
        _, books = world.process(number)
    assert (books.records, books.acked, books.dead) == (2, 2, 2)
    with pytest.raises(TooManyDead, match=r"^1 of 2 records died, and max_dead is 0: 1 in 'upper'"):
        deaths.close_run(books, letters.reasons(), "cp", 0)
    assert len(warnings(caplog)) == 1
    assert replay(tmp_path).records == {"clicks": 1}
    _, books = world.process(3)
    assert deaths.close_run(books, letters.reasons(), "cp", 0) is books


def test_nobody_died_where_nobody_came():
    assert deaths.close_run(Books(), [], "cp", 0) == Books()


@pytest.mark.parametrize(
    ("max_dead", "error", "got"),
    [
        (-1, ValueError, "got -1"),
        (0.0, ValueError, r"got 0\.0"),
        (1.5, ValueError, r"got 1\.5"),
        (float("nan"), ValueError, "got nan"),
        (True, TypeError, "got bool True"),
        ("5%", TypeError, "got str '5%'"),
        (Decimal(1), TypeError, r"got Decimal Decimal\('1'\)"),
    ],
)
def test_limits_that_are_none(tmp_path, max_dead, error, got):
    """Refused before anything else is looked at."""
    words = r"max_dead must be a number of records \(an int >= 0\), a share of them \(a float in "
    with pytest.raises(error, match=words + r".*or None for no limit, " + got):
        run_batch(None, None, tmp_path / "cp", max_dead=max_dead)
    assert not (tmp_path / "cp").exists()


def test_the_most_frequent_causes_come_first():
    found = deaths.causes(
        [
            (Reason("split", "ValueError", "line 7"), 1),
            (Reason("load", "TimeoutError", "out\nof  reach " + "x" * 200, final=True), 5),
            (Reason("split", "ValueError", "line 9"), 2),
            (Reason("split", "KeyError", "'wrod'"), 3),
        ]
    )
    assert [str(cause) for cause in found] == [
        f"5 in 'load' of TimeoutError (out of reach {'x' * 144}...)",
        "3 in 'split' of KeyError ('wrod')",
        "3 in 'split' of ValueError (line 9, and 1 other messages)",
    ]


def test_a_line_names_three_causes_and_counts_the_rest(caplog):
    kinds = [Reason("b", name, "no").encode() for name in ("A", "B", "C", "D", "E") for _ in "12"]
    table = pa.table({"_ackcore_reason": kinds})
    deaths.warn_of_micro_batch(7, {"one": table, "two": table.slice(9)}, "cp")
    (said,) = warnings(caplog)
    assert said.startswith(
        "micro-batch 7: 11 records died: 3 in 'b' of E (no); 2 in 'b' of A (no); 2 in 'b' of B (no)"
        "; 4 of other errors. "
    )
