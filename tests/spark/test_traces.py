"""The way of sampled records: which, where, how long, and what a failed one waits for."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
from checkpoints import OPEN, records, run_one
from streams import ignored, word_count

from ackcore import testing
from ackcore.spark.base.schemas import MESSAGE_ID
from ackcore.spark.base.traces import RecordTrace, Step
from ackcore.spark.engine.progress import Progress, with_outcomes
from ackcore.spark.inspect.status import read_pending
from ackcore.spark.tasks.tracing import Tracer
from ackcore.spark.tasks.tracking import Chunks

LINES = pa.schema([("line", pa.string())])


def run(*lines, **settings):
    topology = word_count(testing.Source(LINES), ignored, **settings)
    return testing.run(topology, {"lines": [(line,) for line in lines]})


def test_the_way_of_each_record_is_told():
    ran = run("a b", "flaky", "no", trace_per_million=1_000_000)
    first, second = (progress.traces for progress in ran.progress)
    by_id = {trace.message_id: trace for trace in first}
    assert len(by_id) == 3
    way = by_id["0-0-0"]
    assert (way.spout, way.attempt, way.outcome) == ("lines", 0, "ACKED")
    assert way.steps[0].component == "split"
    assert sum(one.rows for one in way.steps if one.component == "count") == 2
    assert all(one.took_s >= 0 and one.started_ms > 1.6e12 for one in way.steps)
    outcomes = sorted(trace.outcome for trace in first)
    assert outcomes[1:] == [
        "failed in split with Reject: no",
        "failed in split with ValueError: cannot read flaky",
    ]
    # Failures come first, and a retry has the name that it had.
    assert first[-1].outcome == "ACKED"
    (again,) = second
    assert (again.message_id, again.attempt, again.outcome) == ("0-1-0", 1, "ACKED")
    assert str(again).startswith("0-1-0, attempt 1: split ")


def test_off_nothing_is_told_and_on_nothing_else_changes():
    lines = ("a b", "flaky", "no", "bad")
    off, on = run(*lines), run(*lines, trace_per_million=1_000_000)
    assert all(not progress.traces for progress in off.progress)
    assert off == on


def test_all_tasks_sample_the_same_share_of_roots():
    rng = np.random.default_rng(5)
    roots = rng.integers(-(2**63), 2**63, 200_000)
    for ids in (roots, np.arange(200_000)):
        shares = [Tracer(n, 0, Chunks()).sampled(ids) for n in (0, 1_000, 100_000, 1_000_000)]
        assert shares[0].sum() == 0
        assert 150 < shares[1].sum() < 250
        assert 19_000 < shares[2].sum() < 21_000
        assert shares[3].all()
        # One that is sampled at a share is at each larger one.
        assert not (shares[1] & ~shares[2]).any()
        assert (Tracer(1_000, 7, Chunks()).sampled(ids) == shares[1]).all()


def test_traces_pass_through_the_log():
    trace = RecordTrace("lines", "a", 1, "ACKED", (Step("split", 0, 1, 2.5, 3.5, 4),))
    progress = Progress(3, traces=(trace,))
    assert Progress.from_json(json.loads(json.dumps(progress.to_json()))) == progress


def test_not_too_many_are_kept():
    trace = RecordTrace("lines", "a", 0, "", ())
    failed = pa.table({"root_id": [7], "spout": ["lines"], "reason": ["-\x1fcheck\x1fOops\x1fno"]})
    kept = with_outcomes([(root, trace) for root in range(1_000)], failed)
    assert len(kept) == 200
    assert kept[0].outcome == "failed in check with Oops: no"
    assert {one.outcome for one in kept[1:]} == {"ACKED"}


def test_a_checkpoint_says_what_a_record_waits_for(tmp_path):
    """Waiting, due, and taken by the micro-batch that is under way."""
    path = tmp_path / "c"
    with OPEN(path) as state:
        assert read_pending(path, "id-1") is None
        run_one(state, 0, {"lines": records(0, 3), "clicks": records(2, 9)})
        waits = read_pending(path, "id-1", clock=lambda: 400)
        assert (waits.spout, waits.attempt, waits.due_in_s, waits.known_s) == (
            "lines",
            1,
            0.601,
            0.399,
        )
        assert (waits.component, waits.error_type, waits.running_in) == (
            "split",
            "ValueError",
            None,
        )
        assert read_pending(path, "id-2", spout="clicks").spout == "clicks"
        assert read_pending(path, "id-5", spout="lines") is None
        assert "is due in 0.6 s" in str(waits)
        assert "is due in the next" in str(read_pending(path, "id-1", clock=lambda: 2_000))
        state.write_plan(state.make_plan(1, 1_001))
        now = [read_pending(path, f"id-{n}", spout="lines").running_in for n in range(3)]
        assert now == [1, 1, None]


def test_what_a_micro_batch_leaves_for_the_next_one_does_not_run_in_it(tmp_path):
    path = tmp_path / "c"
    with OPEN(path) as state:
        run_one(state, 0, {"lines": records(0, 3), "clicks": records(0, 3)})
        state.write_plan(state.make_plan(1, 9_000, max_retries=3))
        retries = state.split_due(state.plan(1)).due
        for spout in ("lines", "clicks"):
            taken = retries[spout][MESSAGE_ID].to_pylist() if spout in retries else []
            for n in range(3):
                pending = read_pending(path, f"id-{n}", spout=spout, clock=lambda: 9_500)
                assert pending.running_in == (1 if f"id-{n}" in taken else None)
        assert sum(map(len, retries.values())) == 3


def test_what_a_record_waits_for(spark, tmp_path, running, folder):
    """A stream's, while it runs; nothing of one that is done, or that nobody knows."""
    topology = word_count(
        folder.stream,
        lambda frame, number: None,
        trace_per_million=1_000_000,
        backoff_s=3600.0,
        max_backoff_s=3600.0,
    )
    folder.add("a")
    folder.add("bad")
    query = running(topology, spark, tmp_path / "cp")
    while len(query.recent_progress) < 2:
        assert query.is_active
        query.await_termination(0.05)
    (message_id,) = {
        trace.message_id
        for progress in query.recent_progress
        for trace in progress.traces
        if trace.outcome != "ACKED"
    }
    pending = query.pending_tree(message_id)
    assert (pending.spout, pending.attempt, pending.running_in) == ("lines", 1, None)
    assert (pending.component, pending.error_message) == ("split", "cannot read bad")
    assert 0 < pending.due_in_s <= 3600
    (trace,) = pending.traces
    assert [one.component for one in trace.steps] == ["split"]
    assert "attempt 1 is due in" in str(pending)
    assert "\n  " + str(trace) in str(pending)
    assert query.pending_tree(message_id, spout="others") is None
    assert query.pending_tree("nobody") is None
