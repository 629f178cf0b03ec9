"""Drivers that are stopped (SIGSTOP) at each step, on disk and in a bucket, without Spark.

The protocol, the checkpoint, the sink and the dead letters are the real ones, and so are the
processes.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from contextvars import Context

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from counts import letter_files
from places import PROXIES, Bucket, Disk
from processes import eventually, state_of
from s3_server import ERROR, ERROR_AFTER, LOST, REFUSED, SLOW_DOWN
from stopped_worlds import DEAD, KEPT, PlacedWorld, drive, run_here
from test_driver_dies import STEPS as DRIVERS_STEPS
from test_driver_dies import TABLE_STEPS

from ackcore.spark.base.errors import CheckpointInUse
from ackcore.spark.inspect.table_reading import first_rows, read_table

STEPS = [*DRIVERS_STEPS, "refused", "refusals-closed"]
#: In the order in which a micro-batch takes them; its mark is the last in one, what follows in one.
IN_ORDER = ["planned", "ran", "checked", "decided", "refused", "in-sink", "refusals-closed"]
IN_ORDER += [*TABLE_STEPS, "in-dead-letters", "acted"]
#: In `make test`; the others are run by `make faults`.
QUICK = {"decided", "in-sink", "marked"}


def slow(*parameters, unless=False):
    return pytest.param(*parameters, marks=() if unless else pytest.mark.faults)


@pytest.fixture(params=["disk", "bucket"])
def place(request, tmp_path):
    """Where all of it is."""
    if request.param == "disk":
        return Disk(tmp_path)
    return Bucket.before(request.getfixturevalue(PROXIES[request.param]), tmp_path)


@pytest.fixture
def proxy(request, place):
    """Return the proxy before the server of a place in a bucket."""
    return request.getfixturevalue(PROXIES[request.node.callspec.params["place"]])


class Driver:
    """A driver in a process of its own."""

    def __init__(self, context, place, role, points, said):
        self._said = said
        self.process = context.Process(target=drive, args=(place, role, points, said))
        self.process.start()

    @property
    def pid(self):
        return self.process.pid

    def wait_until_it_stops(self):
        eventually(lambda: state_of(self.pid) in ("T", "Z", None))
        assert state_of(self.pid) == "T", self._said.read_text()

    def wake(self):
        """Let it go on; return what it ended with."""
        os.kill(self.pid, signal.SIGCONT)
        return self.ended()

    def ended(self):
        self.process.join(60)
        assert self.process.exitcode is not None
        return self._said.read_text() if self._said.exists() else self.process.exitcode


@pytest.fixture
def driver(place, tmp_path):
    """``driver(role, points)`` starts one, whose failpoints are as `failpoints` has them."""
    context = multiprocessing.get_context("forkserver")
    # What takes long to load; its path has not this directory.
    context.set_forkserver_preload(["ackcore.spark.engine.batch", "ackcore.topology"])
    started = []

    def driver(role, points=""):
        said = tmp_path / f"{role}-{len(started)}.txt"
        started.append(Driver(context, place, role, points, said))
        return started[-1]

    yield driver
    for one in started:
        one.process.kill()
        one.process.join()


def check(place, counts):
    """Each line is there once: its row, or its dead letter."""
    here = place.fetched()
    parts = sorted((here / "sink").glob("batch_id=*/*.parquet"))
    rows = [row for part in parts for row in pq.ParquetFile(part).read()["line"].to_pylist()]
    assert sorted(rows) == KEPT
    letters = here / "checkpoint/ackcore/dead_letters"
    dead = [
        letter["line"].as_py()
        for part, _, _ in letter_files(letters)
        for letter in pq.ParquetFile(part).read()["payload"]
    ]
    assert sorted(dead) == DEAD
    once = [{"line": line, "n": 1} for line in KEPT]
    table = read_table(here / "checkpoint", "seen", lambda table: first_rows(table, 99))
    assert table.sort_by("line").to_pylist() == once
    changes = sorted((here / "sink-changes").glob("batch_id=*/*.parquet"))
    changed = pa.concat_tables([pq.ParquetFile(part).read() for part in changes])
    assert changed.sort_by("line").to_pylist() == [{**row, "old_n": None} for row in once]
    assert (counts.records, counts.acked, counts.dead, counts.waiting) == (10, 6, 4, 0)
    assert counts.balanced


def check_fenced(place, role, *stopped):
    """Have another driver end the work; the stopped ones then wake, and write nothing."""
    check(place, run_here(place, role))
    before = place.contents()
    for one in stopped:
        assert one.wake().startswith("CheckpointInUse: ")
    assert place.contents() == before


@pytest.mark.parametrize(
    ("step", "number"),
    [slow(step, number, unless=number and step in QUICK) for step in STEPS for number in (0, 1)],
)
def test_stopped_at_a_step_it_wakes_and_writes_nothing(place, driver, step, number):
    first = driver("first", f"{step}:{number}=stop")
    first.wait_until_it_stops()
    if isinstance(place, Disk):
        with pytest.raises(CheckpointInUse, match=rf"in use by another query \(pid {first.pid} on"):
            PlacedWorld(place, "second").driver()
        place.lose_lock()
    check_fenced(place, "second", first)


@pytest.mark.parametrize("place", ["disk"], indirect=True)
def test_it_is_fenced_where_its_checkpoint_was_put_back_from_a_copy(place, driver):
    first = driver("first", "checked=stop")
    first.wait_until_it_stops()
    place.lose_lock("copied")
    check_fenced(place, "second", first)


@pytest.mark.faults
@pytest.mark.parametrize("place", ["disk", "bucket", "s3proxy"], indirect=True)
def test_each_of_several_is_fenced(place, driver):
    """Each takes over from one that stands still, and stands still a step later."""
    stopped = []
    for role, step in (("first", "ran"), ("second", "decided"), ("third", "in-sink")):
        stopped.append(driver(role, f"{step}=stop"))
        stopped[-1].wait_until_it_stops()
        place.lose_lock()
    check_fenced(place, "first", *stopped)


@pytest.mark.faults
@pytest.mark.parametrize("place", ["disk", "bucket", "s3proxy"], indirect=True)
def test_killed_at_every_step(place, driver):
    """One driver after the other, in both micro-batches."""
    for number, last in enumerate(("pruned", "marked")):
        for step in (*IN_ORDER, last):
            assert driver("first", f"{step}:{number}").ended() == -signal.SIGKILL, step
    check(place, run_here(place, "second"))


@pytest.mark.faults
@pytest.mark.parametrize("place", ["bucket", "s3proxy"], indirect=True)
@pytest.mark.parametrize("how", [LOST, REFUSED, SLOW_DOWN, ERROR, ERROR_AFTER])
def test_a_store_that_fails_at_every_third_request(place, driver, proxy, how):
    """Under drivers one of which is killed, and one taken over from."""
    met = []

    def fails(request):
        if len(proxy.requests) % 3 == 0:
            met.append(request)
            proxy.fail(how, lambda one: one is request)

    proxy.before = fails
    stopped = driver("first", "checked=stop")
    stopped.wait_until_it_stops()
    assert driver("second", "in-sink:1").ended() == -signal.SIGKILL
    assert driver("third").ended() == "the end"
    assert stopped.wake().startswith("CheckpointInUse: ")
    proxy.before = None
    assert len(met) > 10
    with PlacedWorld(place, "first").driver()[0] as state:
        assert state.last_done is not None
    check(place, run_here(place, "first"))


@pytest.mark.parametrize("place", ["bucket", slow("s3proxy")], indirect=True)
@pytest.mark.parametrize("some", [slow("all"), "two"])
def test_taken_over_from_before_any_request_it_changes_nothing(place, proxy, tmp_path, some):
    """Between the last look and the request, too, which goes through when another is done."""

    def run(n):
        """Be overtaken before the n-th request, or never: the place, the requests until the
        checkpoint was open and until the end, how it ended, and what the other one left.
        """
        here, asked, left, by_name = Bucket.before(proxy, tmp_path / str(n)), [], [], []
        world = PlacedWorld(here, "first")
        opens = world.driver

        def take_over(request):
            if left:
                return  # of the second one, or of the first after that
            asked.append(request)
            if len(asked) == n:
                left.append(None)
                counts = run_here(here, "second")
                left[:] = here.contents(), counts

        def driver():
            opened = opens()
            by_name.append(len(asked))
            return opened

        world.driver, proxy.before, ended = driver, take_over, None
        try:
            Context().run(world.run_to_end)
        except Exception as error:
            ended = error
        proxy.before = None
        return here, (*by_name, len(asked)), ended, left

    _, (opened, requests), ended, _ = run(None)
    assert ended is None
    assert opened < 20
    assert requests > 60
    # One that is overtaken before it has the checkpoint takes over in its turn.
    numbers = range(opened + 1, requests + 1)
    # By the last one it gives the checkpoint back.
    for n in numbers if some == "all" else (numbers[len(numbers) // 2], numbers[-1]):
        here, _, ended, (before, counts) = run(n)
        # After its last mark it has only to prune, and to give back what is another's.
        is_over = ended is None and n > requests - 5
        assert is_over or isinstance(ended, CheckpointInUse), (n, ended)
        assert here.contents() == before, n
        check(here, counts)
        assert run_here(here, "third") == counts, n
        # What it had put before it met the index has gone, and was never read.
        assert here.unnamed_letters() == set(), n
