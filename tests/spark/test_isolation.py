"""In-flight markers, and what an attempt concludes from those of attempts that crashed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from ackcore.spark.checkpoint.decisions import Plan
from ackcore.spark.engine.suspects import crashes_logged, rejections, update_suspects
from ackcore.spark.tasks import inflight_markers, isolation
from ackcore.spark.tasks.inflight_markers import (
    ALONE,
    CHUNK,
    FLUSH,
    NOTHING,
    ROOTS,
    Marker,
    MarkerFile,
    TaskAttempt,
)
from ackcore.spark.tasks.isolation import AttemptIsolation, Evidence, IsolatedBolts
from ackcore.spark.tasks.tracking import AnchoredRows, Owners
from ackcore.topology.tuples import Reason

ATTEMPT = TaskAttempt(1, 0, 7)


@pytest.fixture
def work(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    monkeypatch.setattr(isolation, "_DYING_S", 0.1)
    return str(tmp_path)


def flying(work, attempt=ATTEMPT, names=False, alone=None, isolates=True, timeout_s=None):
    found = AttemptIsolation(work, attempt, names, alone or {}, isolates, timeout_s)
    found.begin()
    return found


def die(one):
    """The fate of an attempt's files when its process dies."""
    one._file._file.close()
    one._executor.close()


def roots(*numbers):
    return np.array(numbers, np.int64)


def test_a_marker_tells_what_a_dead_attempt_had_in_flight(work):
    marker = MarkerFile(work, ATTEMPT)
    assert inflight_markers.crashed(work) == []  # it lives
    marker.set(ROOTS, 3, 10, roots(1, -2, 3))
    marker.set(ALONE, roots=roots(-2))
    assert inflight_markers.attempts(work) == [ATTEMPT]
    marker._file.close()
    assert inflight_markers.crashed(work) == [Marker(ATTEMPT, ALONE, 0, 0, frozenset({-2}))]
    assert inflight_markers.crashed(work, (1, 1)) == []
    assert str(inflight_markers.crashed(work)[0]) == (
        "attempt 7 at partition 0 of stage 1: crashed, with one record in flight"
    )


def test_an_attempt_that_ends_leaves_nothing(work):
    one = flying(work, timeout_s=60)
    with one.time_limit.on("bolt"):
        pass
    one.end()
    one.end()
    assert inflight_markers.attempts(work) == []
    assert os.listdir(f"{work}/in-flight") == []


def test_a_marker_that_is_removed_while_it_is_read_is_passed_over(work, monkeypatch):
    marker = MarkerFile(work, ATTEMPT)
    lock = fcntl.flock

    def flock(file, how):
        if how & fcntl.LOCK_NB and inflight_markers.attempts(work):
            marker.remove()
        lock(file, how)

    monkeypatch.setattr(inflight_markers.fcntl, "flock", flock)
    assert inflight_markers.crashed(work) == []
    assert inflight_markers._read(work, ATTEMPT) is None


def test_without_markers_no_attempt_died(work):
    assert inflight_markers.crashed(f"{work}/nowhere") == []


@pytest.mark.parametrize("left", [0, 31, 33, 40], ids=lambda n: f"{n} bytes")
def test_a_marker_that_its_host_cut_short_names_no_record(work, left):
    """Its name may be on the disk before its content is."""
    file = MarkerFile(work, ATTEMPT)
    file.set(ROOTS, roots=np.array([1, 2]))
    os.truncate(ATTEMPT.path(work), left)
    file._file.close()
    assert inflight_markers.crashed(work) == [Marker(ATTEMPT, NOTHING)]


def test_an_attempt_goes_by_those_before_it(work):
    """A chunk, one of it, the same again: it is rejected."""
    first = flying(work)
    with first.of_chunk(2, 3, None):
        die(first)
        second = flying(work, TaskAttempt(1, 0, 9))
    assert second.evidence.chunks == {(2, 3)}
    assert second.evidence.groups(1, 3, roots(1, 2, 3))[1] == []
    rejected, groups = second.evidence.groups(2, 3, roots(4, 5, 6))
    assert [group.tolist() for group in groups] == [[4], [5], [6]]
    assert not len(rejected)
    with second.of_roots(roots(5)):
        die(second)
        third = flying(work, TaskAttempt(1, 0, 12))
    rejected, groups = third.evidence.groups(2, 3, roots(4, 5, 6))
    assert [group.tolist() for group in groups] == [[5], [4], [6]]  # it comes first
    with third.of_roots(roots(5)):
        die(third)
        last = flying(work, TaskAttempt(1, 0, 13))
    rejected, groups = last.evidence.groups(2, 3, roots(4, 5, 6))
    assert (rejected.tolist(), [group.tolist() for group in groups]) == ([5], [[4], [6]])
    assert flying(work, TaskAttempt(1, 1, 14)).evidence.chunks == set()  # another task


def test_an_attempt_that_runs_elsewhere_says_nothing(work):
    first = flying(work)
    with first.of_roots(roots(1)):
        assert not flying(work, TaskAttempt(1, 0, 9)).evidence


def test_what_a_plan_suspects_counts_as_well(work):
    first = flying(work, alone={1: 1, 2: 0}, names=True)
    assert [group.tolist() for group in first.evidence.groups(0, 4, roots(1, 2, 3, 4))[1]] == [
        [1],
        [2],
    ]
    with first.of_roots(roots(1)):
        die(first)
        second = flying(work, TaskAttempt(1, 0, 9), alone={1: 1, 2: 0}, names=True)
    assert second.evidence.groups(0, 4, roots(1, 2, 3, 4))[0].tolist() == [1]


def test_without_isolation_earlier_attempts_say_nothing(work):
    first = flying(work)
    with first.of_chunk(0, 3, None):
        die(first)
        assert not flying(work, TaskAttempt(1, 0, 9), isolates=False, names=True).evidence


def test_many_suspects_go_in_groups_first():
    everyone = np.arange(5000)
    evidence = Evidence()
    evidence.add(Marker(ATTEMPT, CHUNK, 0, 5000))
    _, groups = evidence.groups(0, 5000, everyone)
    assert [len(group) for group in groups] == [256] * 19 + [136]
    evidence.add(Marker(ATTEMPT, ROOTS, roots=frozenset(groups[3].tolist())))
    _, groups = evidence.groups(0, 5000, everyone)
    assert [len(group) for group in groups[:257]] == [1] * 256 + [256]
    many = Evidence()
    many.add(Marker(ATTEMPT, ROOTS, roots=frozenset(range(2000))))
    assert [len(group) for group in many.groups(0, 5000, everyone)[1]] == [256] * 7 + [208]


def parts(one, of_row, of_root, in_order):
    """Yield the rows that run together, each with the roots or the chunk that is marked."""
    marked = []
    one._file.set = lambda *marker: marked.append(marker)
    numbers = np.arange(max(of_row) + 1)
    rows = AnchoredRows(pa.record_batch({"number": numbers}), Owners(numbers))
    chunks = SimpleNamespace(roots_of=lambda _: (np.array(of_row), np.array(of_root)))
    isolated = IsolatedBolts(SimpleNamespace(used=False), one, chunks, None, in_order)
    for part in isolated._parts(rows):
        _, chunk, rows_, roots_ = marked[-1]
        yield (
            part.batch["number"].to_pylist(),
            (chunk, rows_) if roots_ is None else roots_.tolist(),
        )


@pytest.mark.parametrize("in_order", [False, True])
def test_a_row_of_several_roots_runs_with_its_suspect(work, in_order):
    """Otherwise it is never isolated, and its other roots are suspected of its crash."""
    of_row, of_root = [0, 1, 1, 2, 3], [1, 1, 2, 3, 1]
    one = flying(work, alone={2: 1}, names=True)
    calm, suspect = ([0, 3], [1]), ([1], [1, 2])
    found = list(parts(one, of_row, of_root, in_order))
    assert found == ([calm, suspect, ([2], [3])] if in_order else [suspect, ([0, 2, 3], [1, 3])])


@pytest.mark.parametrize("in_order", [False, True])
def test_rows_beside_suspects_are_marked_as_their_whole_chunk(work, in_order):
    """The next attempt compares the number of rows with that of the chunk which it gets."""
    one = flying(work)
    one.evidence.suspects = {2}
    found = list(parts(one, [0, 1, 2], [1, 2, 3], in_order))
    chunk = (1, 3)  # `flying` has begun chunk 0
    assert found == (
        [([0], chunk), ([1], [2]), ([2], chunk)] if in_order else [([1], [2]), ([0, 2], chunk)]
    )


def test_what_is_flushed_is_marked_by_name_the_next_time(work):
    first = flying(work)
    with first.of_flush(None):
        die(first)
        second = flying(work, TaskAttempt(1, 0, 9))
    assert second.names
    with second.of_flush(roots(3, 4)):
        die(second)
        third = flying(work, TaskAttempt(1, 0, 12))
    assert third.evidence.suspects == {3, 4}
    with third.of_flush(roots()):  # nothing is open
        die(third)
    kinds = [marker.kind for marker in inflight_markers.crashed(work)]
    assert kinds == [FLUSH, ROOTS, NOTHING]


def test_one_alone_has_the_executor_for_itself(work):
    """Were the JVM to die, others of its tasks would have nothing in flight."""
    one, other = flying(work), flying(work, TaskAttempt(1, 1, 8))

    def may(how):
        with open(other_lock, "w") as lock:
            try:
                fcntl.flock(lock, how | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    other_lock = isolation._executor_lock(work)
    with one.of_chunk(0, 3, None), other.of_chunk(0, 3, None):
        assert may(fcntl.LOCK_SH)
        assert not may(fcntl.LOCK_EX)
    with one.of_roots(roots(1)):
        with one.of_flush(roots(1)):
            assert not may(fcntl.LOCK_SH)
        assert not may(fcntl.LOCK_SH)
    assert may(fcntl.LOCK_EX)


TRACE = """slow
Timeout (0:00:01)!
Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait

Thread 0x00007f02 (most recent call first):
  File "/usr/lib/python3.11/socket.py", line 705 in readinto
  File "/home/me/bolts.py", line 8 in ask
  File "/home/me/bolts.py", line 12 in execute
  File "/site-packages/ackcore/topology/row_executor.py", line 400 in process
  File "/site-packages/ackcore/spark/tasks/bolts.py", line 180 in process
"""


def timed_out(work, text):
    with open(ATTEMPT.time_out_path(work), "w") as file:
        file.write(text)
    return inflight_markers.crashed(work)[0].timed_out


def test_a_time_out_tells_where_it_was(work):
    one = MarkerFile(work, ATTEMPT)
    one.set(ALONE, roots=roots(5))
    one._file.close()
    found = timed_out(work, TRACE)
    where = 'File "/home/me/bolts.py", line 8 in ask'
    assert found == Reason("slow", "TimedOut", f"timed out in slow: {where}", True)
    inner = TRACE.replace('  File "/usr/lib/python3.11/socket.py", line 705 in readinto\n', "")
    assert timed_out(work, inner) == found
    assert timed_out(work, TRACE.split("Thread")[0]).message == "timed out in slow"
    nowhere = TRACE.split("Thread")[0] + "Thread 1\n" + TRACE[TRACE.index('  File "/site') :]
    assert timed_out(work, nowhere).message == "timed out in slow"
    assert timed_out(work, "slow\n") is None  # killed while it was timed
    timed_out(work, TRACE)
    evidence = Evidence()
    evidence.add(inflight_markers.crashed(work)[0])
    assert evidence.reasons == {5: found}
    assert "timed out in slow" in str(inflight_markers.crashed(work)[0])
    plan = Plan(0, 0, None, 0, careful=True)
    for _ in range(2):
        plan = update_suspects(plan, inflight_markers.crashed(work), 7)
    assert rejections(Plan.of(plan.body())) == {5: found}
    held_back = rejections(Plan.of({**plan.body(), "suspects": [5]}))
    assert held_back == {5: found._replace(final=False)}


def test_deaths_are_logged_once(work, caplog):
    one = flying(work)
    with crashes_logged(work, 3), one.of_chunk(0, 5, None):
        die(one)
        one = flying(work, TaskAttempt(1, 0, 9))
    text = "attempt 7 at partition 0 of stage 1: crashed, with a chunk of 5 rows in flight"
    assert [record.getMessage() for record in caplog.records] == [f"micro-batch 3: {text}"]
    with pytest.raises(ValueError, match="no"), crashes_logged(work, 4):
        raise ValueError("no")
    assert f"micro-batch 4: {text}" in caplog.text
    with pytest.raises(KeyboardInterrupt), crashes_logged(work, 5):
        raise KeyboardInterrupt  # an attempt that is cancelled for it has not crashed


FORKS = """
import os, subprocess, sys, time
import numpy as np
from ackcore.spark.tasks.isolation import AttemptIsolation
from ackcore.spark.tasks.inflight_markers import TaskAttempt

work, how = sys.argv[1:]
one = AttemptIsolation(work, TaskAttempt(1, 0, 7), False, {}, True, None)
one.begin()
with one.of_roots(np.array([5])):
    if how == "subprocess":
        subprocess.Popen(["cat"])  # it ends with its input, the test's pipe
    elif os.fork() == 0:
        one.end()  # what a child does with it is nothing to the worker's
        print("forked", flush=True)
        sys.stdin.read()
        os._exit(0)
    print("worker", flush=True)
    while True:
        time.sleep(9)
"""


@pytest.mark.parametrize("how", ["fork", "subprocess"])
def test_a_process_that_a_bolt_forked_holds_no_lock_of_its_workers(work, how):
    """It may live on: a pool, a daemon, a service; its worker died all the same."""
    worker = subprocess.Popen(
        [sys.executable, "-c", FORKS, work, how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with worker, contextlib.ExitStack() as after:
        after.callback(worker.kill)
        for _ in range(2 if how == "fork" else 1):
            worker.stdout.readline()
        assert inflight_markers.attempts(work) == [ATTEMPT]
        assert inflight_markers.crashed(work) == []
        worker.kill()
        os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
        (found,) = inflight_markers.crashed(work)
        assert (found.kind, found.roots) == (ALONE, {5})
        (lock,) = (name for name in os.listdir(work) if name.endswith(".lock"))
        with open(f"{work}/{lock}", "w") as executor:
            fcntl.flock(executor, fcntl.LOCK_EX | fcntl.LOCK_NB)
