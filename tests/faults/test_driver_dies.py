"""The driver dies at every step of the protocol, and is started again until it ends."""

from __future__ import annotations

import fault_job
import pytest
from pyspark import cloudpickle

cloudpickle.register_pickle_by_value(fault_job)

#: Of a topology with a table and a sink of its rows.
TABLE_STEPS = ["folded", "tables-recorded", "changes-recorded"]
#: Every step, in the order in which a micro-batch takes them.
STEPS = [
    "planned",
    "ran",
    "checked",
    "decided",
    "in-sink",
    *TABLE_STEPS,
    "in-dead-letters",
    "acted",
    "marked",
    "pruned",
]
POISON, HOPELESS = {3, 17, 31, 44}, {5}
DEAD = POISON | HOPELESS
RULES = {
    "enrich": {
        "reject": sorted(POISON),
        "raise": sorted(HOPELESS),
        "until": {8: 1, 9: 3, 27: 2},
        "once": [12, 23, 34],
        "rate": 0.02,
    },
    "count": {"until": {14: 1}},
}
#: Once a crash for each step was not counted against it, a record still has attempts left.
SETTINGS = {"max_attempts": 5, "max_runs": 1, "max_sink_attempts": 1}
VARIANTS = [("id", "row"), (None, "batch")]


@pytest.mark.parametrize(
    ("message_id", "enrich"), VARIANTS, ids=["given, rows", "stamped, batches"]
)
def test_a_driver_that_fails_at_every_step(spark, job, failing_at, message_id, enrich):
    """The same in one process: it raises where it would die, which takes seconds."""
    it = job(
        fault_job.lines(50),
        mode="batch",
        message_id=message_id,
        enrich=enrich,
        rules=RULES,
        settings=SETTINGS,
        state=2,
    )
    for step in STEPS:
        failing_at(step)
        assert "failpoint" in it.run_here(spark), step
        it.check(DEAD, finished=False)
    failing_at()
    assert it.run_here(spark) is None
    it.check(DEAD)
    # And once more, now that there is nothing to do.
    assert it.run_here(spark) is None
    it.check(DEAD)


@pytest.mark.faults
def test_a_killed_driver_of_a_file_spout_goes_on(job, tmp_path):
    """`test_a_driver_that_is_killed_at_every_step` does it with a DataFrame."""
    it = job(fault_job.lines(50), rules=RULES, files=5, state=5, bucket_files=f"{tmp_path}/job/in")
    for step in ("decided:1", "tables-recorded:2", "changes-recorded:3"):
        assert it.run(failpoints=step).killed
        it.check(DEAD, finished=False)
    assert it.run().error is None
    it.check(DEAD)


@pytest.mark.faults
@pytest.mark.parametrize(
    ("message_id", "enrich", "otherwise"),
    [("id", "row", False), (None, "batch", True)],
    ids=["given, rows, alike", "stamped, batches, otherwise"],
)
def test_a_driver_that_is_killed_at_every_step(job, message_id, enrich, otherwise):
    """A stream of micro-batches; one driver after the other dies at the next step."""
    # Some in each file, of those that have words.
    more = {n for n in range(50, 130, 3) if n % 8 and n % 10}
    it = job(
        fault_job.lines(130),
        files=13,
        message_id=message_id,
        enrich=enrich,
        rules={**RULES, "enrich": {**RULES["enrich"], "reject": sorted(POISON | more)}},
        otherwise=otherwise,
        state=13,
    )
    for step in [*STEPS, "decided", "in-sink"]:
        ended = it.run(failpoints=step)
        assert ended.killed, (step, ended.said, ended.log[-2000:])
        it.check(finished=False)
    assert it.run().error is None
    it.check(DEAD | more, alive=lambda key: False)


#: Records of five keys, some of which fail for a while, one for good; those behind them wait.
KEYED = {n: {"id": n, "text": f"key{n % 5} rest"} for n in range(60)}
KEYED_RULES = {"enrich": {"until": {6: 2, 8: 1, 21: 3}, "raise": [14], "reject": [30]}}


def check_order(it, files):
    """No record is in the sink before an earlier one of its key; return the micro-batches."""
    written = it.found().written
    batches = {row["id"]: number for number, rows in written.items() for row in rows}
    for key in range(5):
        came = sorted((n % files, n) for n in batches if n % 5 == key)
        of_key = [batches[n] for _, n in came]
        assert of_key == sorted(of_key)
    return set(batches.values())


def test_order_by_key_outlives_a_driver_that_fails(spark, job, failing_at):
    it = job(KEYED, files=4, ordered_by="text", rules=KEYED_RULES, settings=SETTINGS)
    for step in ("ran:1", "decided:1", "in-sink:2"):
        failing_at(step)
        assert "failpoint" in it.run_here(spark), step
        it.check(finished=False)
        check_order(it, 4)
    failing_at()
    assert it.run_here(spark) is None
    it.check({14, 30})
    assert len(check_order(it, 4)) > 1
