"""The activity that a run shows between micro-batches."""

from __future__ import annotations

from checkpoints import OPEN, died, records, run_one

from ackcore.cli.run_command import QUIET_S, Quiet, described
from ackcore.spark.inspect.status import Activity, UnderWay, read_activity


def test_it_is_told_from_the_checkpoint_at_every_step(tmp_path):
    def said(now_ms, tasks=""):
        return described(read_activity(tmp_path / "c", lambda: now_ms), tasks)

    assert said(0) == "starting"
    with OPEN(tmp_path / "c") as state:
        assert said(0) == "starting"
        state.write_plan(state.make_plan(0, 100))
        assert said(3300, "task 2 of 4") == "micro-batch 0 runs, 3.2 s, task 2 of 4"
    with OPEN(tmp_path / "d") as state:
        run_one(state, 0)
        assert read_activity(tmp_path / "d").waiting == 0
        assert described(read_activity(tmp_path / "d")) == "waits for new records"
        run_one(state, 1, {"lines": records(20, 3, due_ms=5000)}, {"lines": died(0, 1)})
        activity = read_activity(tmp_path / "d", lambda: 1000)
    assert described(activity) == "3 wait for a retry, the next is due in 4.0 s"


def test_what_is_told_of_a_micro_batch_and_of_a_retry():
    def said(*under_way, waiting=0, due=None):
        way = UnderWay(*under_way) if under_way else None
        return described(Activity(61_000, way, waiting, due), "task 1 of 9")

    assert said(7, 0, 12, True, 0) == (
        "micro-batch 7 is decided, the sinks write it, 1 min 1 s, 12 retries"
    )
    assert said(7, 60_000, 0, False, 2) == (
        "micro-batch 7 runs, 1.0 s, 2 runs crashed, task 1 of 9"
    )
    assert said(waiting=2, due=60_000).endswith("2 wait for a retry, the next is due")
    assert said(waiting=2).endswith("2 replayed records wait for the next micro-batch")


def test_without_a_terminal_a_line_comes_where_nothing_was_printed_for_a_while():
    quiet = Quiet(0.0)
    assert quiet.line(QUIET_S - 1, "x") is None
    assert quiet.line(QUIET_S, "x") == "after 10.0 s: x"
    assert quiet.line(2 * QUIET_S - 1, "x") is None
    quiet.printed(2 * QUIET_S - 1)
    assert quiet.line(2 * QUIET_S, "x") is None
    assert quiet.line(3 * QUIET_S, "x") == "after 30.0 s: x"
