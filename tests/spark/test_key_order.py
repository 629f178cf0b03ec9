"""In a spout ordered by a key, no record overtakes an earlier one of its key."""

from __future__ import annotations

import os
import sys
import zlib
from collections import Counter, defaultdict

import numpy as np
import pyarrow as pa
import pytest
from checkpoints import tracked
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark import cloudpickle
from streams import available_now, in_line

from ackcore.ids import root_ids
from ackcore.spark.base.reasons import BEHIND, FAILED
from ackcore.spark.base.schemas import ATTEMPT, DUE_MS, ORDER
from ackcore.spark.checkpoint.decisions import Retries
from ackcore.spark.checkpoint.schema_changes import fit_columns
from ackcore.spark.checkpoint.waiting import Waiting
from ackcore.spark.engine.key_order import Ordering, held_back
from ackcore.spark.tasks.record_ids import key_hashes, positions_of
from ackcore.spark.tasks.row_files import PLACE, ROOT_ID
from ackcore.testing import Source, run
from ackcore.topology import BasicBolt, Reject, Retry, TopologyBuilder, Unavailable
from ackcore.topology.settings import Settings

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROWS = pa.schema([("key", pa.string()), ("n", pa.int64())])


@given(
    key=st.integers(-(2**63), 2**63 - 1),
    rows=st.lists(
        st.tuples(st.integers(0, 2**16 - 1), st.integers(0, 2**42 - 1), st.integers(0, 2**6 - 1)),
        max_size=20,
    ),
)
def test_a_root_id_tells_where_its_record_is(key, rows):
    partitions, places, attempts = (
        np.array([row[i] for row in rows], kind)
        for i, kind in enumerate((np.int32, np.int64, np.int32))
    )
    found = positions_of(key, root_ids(key, partitions, places, attempts))
    assert [column.tolist() for column in found] == [partitions.tolist(), places.tolist()]


class Failing(BasicBolt):
    """Fails rows by (key, n, attempt), and emits the others with their attempt."""

    outputs = pa.schema([("key", pa.string()), ("n", pa.int64()), ("attempt", pa.int64())])

    def __init__(self, outcome):
        self.outcome = outcome

    def execute(self, tuple, collector):
        error = self.outcome(tuple["key"], tuple["n"], tuple.attempt)
        if error is not None:
            raise error
        collector.emit((*tuple.values, tuple.attempt))


def topology(outcome, ordered_by="key", *, moved=False, **settings):
    builder = TopologyBuilder()
    builder.spout("rows", Source(ROWS), ordered_by=ordered_by)
    if moved:
        builder.bolt("failing", Failing(outcome), parallelism=2).fields("rows", "key")
    else:
        builder.bolt("failing", Failing(outcome)).shuffle("rows")
    builder.sink("failing", print)
    return builder.build(**{"backoff_s": 1.0, **settings})


def by_key(outputs):
    found = defaultdict(list)
    for row in outputs["failing"]:
        found[row["key"]].append(row["n"])
    return dict(found)


def timeouts(*failing):
    """(key, n, attempt) that fail."""
    return lambda key, n, attempt: TimeoutError("out") if (key, n, attempt) in failing else None


MIXED = [("a", 0), ("b", 1), ("a", 2), ("a", 3), ("b", 4), (None, 5), ("a", 6), (None, 7)]


@pytest.mark.parametrize("tasks", [1, 2])
def test_what_is_behind_one_that_failed_waits_with_it(tasks):
    outcome = timeouts(("a", 0, 0), ("a", 0, 1), ("b", 4, 0))
    ran = run(topology(outcome), {"rows": MIXED}, tasks=tasks)
    kept = by_key(ran.outputs)
    assert kept["a"] == [0, 2, 3, 6]
    assert kept["b"] == [1, 4]
    assert kept[None] == [5, 7]
    assert (ran.counts.acked, ran.counts.dead) == (8, 0)
    # Only those that failed have had an attempt.
    attempts = {(row["key"], row["n"]): row["attempt"] for row in ran.outputs["failing"]}
    assert {one: n for one, n in attempts.items() if n} == {("a", 0): 2, ("b", 4): 1}
    first = ran.progress[0]
    assert (first.failed, first.uncounted) == (5, 3)


def test_without_the_option_it_overtakes():
    ran = run(topology(timeouts(("a", 0, 0)), None), {"rows": MIXED}, tasks=1)
    assert by_key(ran.outputs)["a"] == [2, 3, 6, 0]
    assert ran.progress[0].uncounted == 0


def test_the_death_of_the_first_frees_those_behind():
    def outcome(key, n, attempt):
        return TimeoutError("out") if (key, n) == ("a", 0) else None

    ran = run(topology(outcome, max_attempts=3), {"rows": MIXED}, tasks=1)
    assert by_key(ran.outputs)["a"] == [2, 3, 6]
    (letter,) = ran.dead
    assert (letter.payload, letter.attempts) == ({"key": "a", "n": 0}, 3)
    assert [one.acked for one in ran.progress if one.acked] == [4, 3]


def test_those_behind_wait_no_longer_than_the_first():
    """A back-off of each would add up, as none may overtake another."""

    def outcome(key, n, attempt):
        return TimeoutError("out") if n == 0 else None

    rows = [("a", n) for n in range(200)]
    for ends in (lambda key, n, attempt: None if attempt else outcome(key, n, attempt), outcome):
        ran = run(topology(ends, max_attempts=3), {"rows": rows}, tasks=1)
        died = len(ran.dead)
        assert by_key(ran.outputs)["a"] == list(range(died, 200))
        # One micro-batch finds that they are behind; with the last attempt of the first they go on.
        assert len(ran.progress) <= 2 * max(ran.attempts["rows"]) + 1
        assert ran.attempts["rows"][0] == (3 if died else 2)


def test_one_that_dies_at_once_is_in_nobodys_way():
    ran = run(
        topology(lambda key, n, attempt: Reject("no") if n == 0 else None), {"rows": MIXED}, tasks=1
    )
    assert by_key(ran.outputs)["a"] == [2, 3, 6]
    assert len(ran.progress) == 1


def test_what_failed_behind_another_has_had_no_attempt(tmp_path):
    """Though it were to be rejected: it ran out of its turn."""

    def outcome(key, n, attempt):
        if (key, n, attempt) == ("a", 0, 0):
            return TimeoutError("out")
        before = tmp_path / f"{n}"
        if n in (2, 3) and not before.exists():
            before.touch()
            return Reject("no") if n == 2 else TimeoutError("out")
        return None

    ran = run(topology(outcome), {"rows": MIXED}, tasks=1)
    assert by_key(ran.outputs)["a"] == [0, 2, 3, 6]
    assert ran.counts.dead == 0
    assert {row["n"]: row["attempt"] for row in ran.outputs["failing"] if row["attempt"]} == {0: 1}


def waiting(rows):
    """Rows (key, n, due, order) that wait."""
    columns = [list(column) for column in zip(*rows, strict=True)]
    source = [columns[0], columns[1], columns[3]]
    return tracked(
        pa.table(source, schema=pa.schema([*ROWS, (ORDER, pa.int64())])),
        message_id=[str(one) for one in columns[1]],
        due_ms=columns[2],
        reason=BEHIND._asdict(),
    )


def as_it_is(spout, table):
    return table


def test_what_is_due_before_the_first_of_its_key_goes_on_waiting():
    rest = waiting([("b", 7, 50, 9), ("a", 3, 60, 4), ("c", 2, 70, 1), (None, 5, 80, 0)])
    due = waiting(
        [("a", 9, 5, 8), ("b", 4, 5, 3), (None, 6, 5, 5), ("c", 1, 5, None), ("d", 0, 5, 2)]
    )
    found, blocked = held_back(
        Retries({"rows": due}, Waiting({"rows": [rest]}), {}), {"rows": ("key",)}, as_it_is
    )
    # In order; b/4 is before b/7, and what has no number yet waited before there was an order.
    assert found.due["rows"]["n"].to_pylist() == [1, 0, 4, 6]
    moved = found.rest.tables("rows")[1]
    assert [moved[name].to_pylist() for name in ("n", DUE_MS, ORDER)] == [[9], [60], [8]]
    hashes, _ = key_hashes(pa.table({"key": ["a", "b", "c", "d"]}), ["key"])
    assert blocked["rows"].tolist() == sorted(hashes.tolist())
    found, blocked = held_back(Retries({}, Waiting({}), {}), {"rows": ("key",)}, as_it_is)
    assert (found.due, blocked) == ({}, {})


def test_new_records_are_behind_what_a_request_brought():
    """And that is behind what waited, and in its own order, though not all of it is taken."""
    number, key, keys = 3, 17, {"rows": ("key",)}
    brought = number << 32
    rest = waiting([("c", 2, 70, 1), ("d", 11, 5, brought + 2)])
    due = waiting([("c", 1, 5, brought), ("d", 10, 5, brought + 1)])
    retries = Retries({"rows": due}, Waiting({"rows": [rest]}), {})
    found, _ = held_back(retries, keys, as_it_is)
    assert found.due["rows"]["n"].to_pylist() == [10]
    # Two are new, of the keys c and d, and wait.
    roots = root_ids(key, np.zeros(2, np.int32), np.arange(2), np.zeros(2, np.int32))
    failed = pa.table([roots, ["rows"] * 2, [BEHIND.encode()] * 2], schema=FAILED)
    again = pa.table(
        {
            ROOT_ID: roots,
            PLACE: pa.nulls(2, pa.int64()),
            ATTEMPT: pa.array([0, 0], pa.int32()),
            "key": key_hashes(pa.table({"key": ["c", "d"]}), ["key"])[0],
        }
    )
    ordering = Ordering(keys, {"rows": key}, number, 1000, found.due, Settings())
    numbered = ordering.all_behind(failed, lambda *_: {"rows": again}, None)
    assert min(numbered[ORDER].to_pylist()) > brought + 2


def test_keys_of_what_waits_are_those_that_the_source_has_now():
    """Records may wait that were kept under other columns: as other types, or without the key."""
    columns = pa.schema([("n", pa.int64()), ("key", pa.int64()), (ORDER, pa.int64())])

    def kept(table, key):
        texts = pa.array([key], pa.string())
        return table.set_column(table.schema.get_field_index("key"), "key", texts)

    def fit(spout, table):
        return fit_columns(table, columns, "rows", "-")

    head = kept(waiting([("x", 1, 70, 1)]), "7")
    without = waiting([("x", 3, 80, 2)]).drop_columns(["key"])
    due = fit("rows", kept(waiting([("x", 2, 5, 8)]), "7"))
    found, blocked = held_back(
        Retries({"rows": due}, Waiting({"rows": [head, without]}), {}), {"rows": ("key",)}, fit
    )
    assert not found.due
    assert found.rest.tables("rows")[2]["n"].to_pylist() == [2]
    assert blocked["rows"].tolist() == key_hashes(due, ["key"])[0].tolist()


def test_they_do_not_die_of_waiting():
    """An outage counts after a while, and to be behind never does."""

    def outcome(key, n, attempt):
        return Unavailable(after_s=400) if key == "a" and n == 0 and attempt < 3 else None

    ran = run(
        topology(outcome, unavailable_timeout_s=1000, max_attempts=5), {"rows": MIXED}, tasks=1
    )
    assert by_key(ran.outputs)["a"] == [0, 2, 3, 6]
    assert ran.counts.dead == 0
    assert [row["attempt"] for row in ran.outputs["failing"] if row["n"] in (2, 3, 6)] == [0, 0, 0]


def test_a_longer_wait_of_the_first_is_theirs():
    def outcome(key, n, attempt):
        return Retry(after_s=3600) if (key, n, attempt) == ("a", 0, 0) else None

    ran = run(topology(outcome), {"rows": MIXED}, tasks=1)
    assert by_key(ran.outputs)["a"] == [0, 2, 3, 6]
    assert ran.elapsed_s >= 3600
    assert all(count <= 4 for count in ran.attempts["rows"])


OUTCOMES = ["timeout", "reject", "retry", "unavailable", None, None, None, None, None]


def drawn(seed):
    """An outcome that follows from (key, n, attempt) alone."""

    def outcome(key, n, attempt):
        chosen = OUTCOMES[zlib.crc32(f"{seed}/{key}/{n}/{attempt}".encode()) % len(OUTCOMES)]
        return {
            "timeout": TimeoutError("out"),
            "reject": Reject("no"),
            "retry": Retry(after_s=7),
            "unavailable": Unavailable(after_s=3),
            None: None,
        }[chosen]

    return outcome


@settings(deadline=None, max_examples=10)
@given(
    seed=st.integers(0, 10**6),
    keys=st.lists(st.sampled_from(["a", "b", "c", None]), min_size=1, max_size=14),
    moved=st.booleans(),
    most=st.sampled_from([1, 3, 100]),
)
def test_no_record_overtakes_one_of_its_key(seed, keys, moved, most):
    rows = [(key, n) for n, key in enumerate(keys)]
    running = topology(
        drawn(seed),
        moved=moved,
        max_attempts=3,
        backoff_s=5.0,
        max_retries_per_batch=most,
        unavailable_timeout_s=20,
    )
    ran = run(running, {"rows": rows}, tasks=1)
    assert ran.counts.balanced
    assert ran.counts.acked + ran.counts.dead == len(rows)
    for key, found in by_key(ran.outputs).items():
        if key is not None:
            assert found == sorted(found)
    for letter in ran.dead:
        assert letter.attempts <= 3
        assert set(letter.payload) == {"key", "n"}
    assert all(row["attempt"] < 3 for row in ran.outputs["failing"])


@pytest.mark.parametrize(("n", "kills"), [(8, 1), (8, [3, 7]), (1100, [3, 5])])
@pytest.mark.parametrize("moved", [False, True])
def test_records_that_run_alone_after_a_crash_keep_their_order(moved, n, kills):
    """Those that were in flight run alone, or in groups if they are many."""
    rows = {"rows": [("a", number) for number in range(n)]}
    ran = run(topology(lambda *of: None, moved=moved), rows, tasks=1, kills={"failing": kills})
    assert ran.kills
    assert by_key(ran.outputs)["a"] == list(range(n))


def test_what_is_behind_is_said():
    columns = [["x"], ["y"]]
    assert FAILED.names == ["root_id", "spout", "reason"]
    assert BEHIND.message == "an earlier record of its key waits"
    with pytest.raises(ValueError, match=r"(?s)names 'kye', .* did you mean 'key'.*untracked"):
        in_line({"rows": Source(ROWS)}, print, spout={"ordered_by": ["kye"], "tracked": False})
    with pytest.raises(TypeError, match="ordered_by of spout 'rows' must be the name"):
        TopologyBuilder().spout("rows", Source(ROWS), ordered_by=columns)


def test_new_records_of_a_stream_wait_behind_those_of_their_key(spark, tmp_path):
    """They are not even run: only what was behind in the same micro-batch is."""
    (tmp_path / "in").mkdir()
    parts = [[("a", 0), ("b", 1), ("a", 2)], [("a", 3), ("b", 4), ("", 5)], [("a", 6)]]
    for number, rows in enumerate(parts):
        path = tmp_path / "in" / f"{number}.csv"
        path.write_text("".join(f"{key},{n}\n" for key, n in rows))
        os.utime(path, (number, number))
    frame = (
        spark.readStream.schema("key string, n bigint")
        .option("maxFilesPerTrigger", 1)
        .csv(str(tmp_path / "in"))
    )

    def outcome(key, n, attempt):
        with open(tmp_path / "executed", "a") as file:
            file.write(f"{n}\n")
        return Retry(after_s=3) if (n, attempt) == (0, 0) else None

    written = []

    def sink(rows, number):
        written.extend((row.key, row.n, row.attempt) for row in rows.collect())

    parts, spout = {"rows": frame, "failing": Failing(outcome)}, {"ordered_by": "key"}
    topology = in_line(parts, sink, spout=spout, backoff_s=0.001)
    query = available_now(topology, spark, tmp_path / "checkpoint")
    assert query.counts.acked == 7
    assert [n for key, n, _ in written if key == "a"] == [0, 2, 3, 6]
    assert {n: attempt for _, n, attempt in written if attempt} == {0: 1}
    executed = Counter((tmp_path / "executed").read_text().split())
    assert executed["0"] == 2
    assert {executed[n] for n in "145"} == {1}
