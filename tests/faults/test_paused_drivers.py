"""A host stands still, another driver takes over, and the host goes on: nothing of it counts.

The first driver stops itself at a step of the protocol, and with it all that it started; the second
one runs to the end.  When the first one wakes it ends with an error that says so, and checkpoint,
sinks and dead letters hold what the second one decided, to the byte.
"""

from __future__ import annotations

import fault_job
import pytest
from pyspark import cloudpickle
from test_driver_dies import STEPS

cloudpickle.register_pickle_by_value(fault_job)

#: Whom a bolt rejects, and whom the sink refuses.
POISON, REFUSED = {3, 17, 31, 44}, {2, 21, 38}


def dead(key):
    return key in POISON | REFUSED


def alive(key):
    return not dead(key)


#: Where checkpoint and sink are.
PLACE = pytest.mark.parametrize("place", ["disk", "bucket", "hdfs"])


def stopped_job(job, mode, place="disk"):
    """The first driver decides otherwise than the second would: some records fail once."""
    return job(
        fault_job.lines(50),
        files=4,
        mode=mode,
        place=place,
        rules={"enrich": {"once": [*range(1, 50, 3)], "reject": sorted(POISON)}},
        refuse=sorted(REFUSED),
        state=4,
    )


def check_that_it_is_fenced(it, first, take_over):
    """A stopped driver wakes up, and finds all as another one left it."""
    assert take_over() is None
    it.check(dead=dead, alive=alive)
    before = it.place.contents()
    first.wake()
    assert first.ended().error.startswith("CheckpointInUse: ")
    assert it.place.contents() == before


@pytest.mark.faults
def test_a_stopped_driver_is_not_overtaken_on_its_host_and_fenced_where_its_lock_is_lost(
    spark, job
):
    it = stopped_job(job, "batch")
    with it.start(failpoints="decided=stop") as first:
        first.wait_until_it_stops()
        refused = it.run_here(spark)
        assert refused.startswith("CheckpointInUse: "), refused
        assert f"is in use by another query (pid {first.driver.pid} on " in refused
        it.place.lose_lock()
        check_that_it_is_fenced(it, first, lambda: it.run_here(spark))


@pytest.mark.faults
@PLACE
@pytest.mark.parametrize("mode", ["batch", "stream"])
@pytest.mark.parametrize("step", [*STEPS, "refused", "refusals-closed"])
def test_a_driver_that_is_stopped_at_a_step_and_wakes_writes_nothing(spark, job, step, mode, place):
    it = stopped_job(job, mode, place)
    # A stream in its second micro-batch: some of its first wait.
    at = step if mode == "batch" else f"{step}:1"
    with it.start(failpoints=f"{at}=stop") as first:
        first.wait_until_it_stops()
        it.check(finished=False)
        it.place.lose_lock()
        check_that_it_is_fenced(it, first, lambda: it.run_here(spark))


@pytest.mark.faults
def test_a_driver_is_fenced_where_its_checkpoint_was_put_back_from_a_copy(spark, job):
    it = stopped_job(job, "batch")
    with it.start(failpoints="checked=stop") as first:
        first.wait_until_it_stops()
        it.place.lose_lock("copied")
        check_that_it_is_fenced(it, first, lambda: it.run_here(spark))


@pytest.mark.faults
@PLACE
@pytest.mark.parametrize("mode", ["batch", "stream"])
def test_each_of_several_drivers_is_fenced(job, mode, place):
    """One after the other stands still, at a later step each, and they wake in that order."""
    it = stopped_job(job, mode, place)
    stopped = []
    try:
        for step in ("ran", "decided", "in-sink", "acted"):
            stopped.append(it.start(failpoints=f"{step}=stop"))
            stopped[-1].wait_until_it_stops()
            it.place.lose_lock()
        assert it.run().error is None
        it.check(dead=dead, alive=alive)
        before = it.place.contents()
        for one in stopped:
            one.wake()
            assert one.ended().error.startswith("CheckpointInUse: ")
        assert it.place.contents() == before
    finally:
        for one in stopped:
            one.end()
