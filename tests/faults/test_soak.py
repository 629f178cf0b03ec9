"""An hour of chaos: drivers, executors and workers killed or paused at random, while files come in.

``ACKCORE_SOAK_S`` is for how many seconds (`make soak`), ``ACKCORE_SOAK_SEED`` which chaos,
``ACKCORE_SOAK_MASTER`` where it runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import time
from collections import Counter

import fault_job
import pytest
from counts import numbers
from counts import records as recorded

MASTER = os.environ.get("ACKCORE_SOAK_MASTER", "local-cluster[2,1,1024]")
SECONDS = int(os.environ.get("ACKCORE_SOAK_S", "90"))
SEED = int(os.environ.get("ACKCORE_SOAK_SEED", str(time.time_ns() % 1_000_000)))
#: By the name of what is hit: how often, against the others.
CHAOS = {"driver": 2, "jvm": 1, "executor": 8, "worker": 14, "pause": 7}
FILE_ROWS = 40
#: Files that wait at most: chaos slows drivers down, and the last one does what is left.
MOST_BEHIND = 20


def feed(directory, records, number):
    """One more file of records, which appears whole."""
    first = number * FILE_ROWS
    records = [records[i] for i in range(first, first + FILE_ROWS)]
    staging = directory / "coming"
    staging.mkdir(exist_ok=True)
    fault_job.stage(staging, records, 1)
    os.rename(staging / "lines-000.parquet", directory / "in" / f"lines-{number:05}.parquet")
    return {record["id"]: record for record in records}


def done_batches(directory):
    """How many micro-batches are done; each read one file, or retries alone."""
    marks = numbers(recorded(directory / "checkpoint/ackcore"), "done")
    return max((number + 1 for number in marks), default=0)


@pytest.mark.faults
def test_chaos_loses_nothing_and_writes_nothing_twice(job):
    rng = random.Random(SEED)
    records = fault_job.lines(FILE_ROWS * (SECONDS + 1) * 2)
    it = job(
        {},
        files=0,
        message_id="id",
        rules={"enrich": {"rate": 0.02, "reject_every": fault_job.POISON}, "count": {"rate": 0.01}},
        # What is killed from outside is killed often: no record is to be taken for the cause.
        settings={"max_attempts": 12, "max_runs": 50, "careful_after": 5},
        trigger={"processingTime": "500 milliseconds"},
        conf={"spark.task.maxFailures": "8", "spark.deploy.maxExecutorRetries": "-1"},
    )
    done, starts, fed = Counter(), 0, 0
    until = time.monotonic() + SECONDS
    running = None
    try:
        while time.monotonic() < until:
            if running is None or running.driver.poll() is not None:
                if running is not None:
                    running.end()
                for left in (it.directory / "tmp").iterdir():
                    shutil.rmtree(left, ignore_errors=True)
                running = it.start(master=MASTER, until_decided=None)
                starts += 1
            if fed - done_batches(it.directory) < MOST_BEHIND:
                it.records.update(feed(it.directory, records, fed))
                fed += 1
            time.sleep(rng.uniform(0.5, 8))
            kind = rng.choices(list(CHAOS), list(CHAOS.values()))[0]
            victims = running.of("worker" if kind == "pause" else kind)
            if victims:
                victim = rng.choice(victims)
                with contextlib.suppress(ProcessLookupError):
                    if kind == "pause":
                        os.kill(victim, signal.SIGSTOP)
                        time.sleep(rng.uniform(0.5, 3))
                        os.kill(victim, signal.SIGCONT)
                    else:
                        os.kill(victim, signal.SIGKILL)
                    done[kind] += 1
    finally:
        if running is not None:
            running.end()
    said = {"seed": SEED, "records": len(it.records), "drivers": starts, "chaos": dict(done)}
    it.check(fault_job.poisoned, finished=False)
    ended = it.run(trigger={"availableNow": True}, master="local[2,4]")
    assert ended.error is None, said
    found = it.check(fault_job.poisoned)
    said |= {"micro-batches": found.last.number + 1, "totals": found.totals}
    print(json.dumps(said))
    assert found.totals["records"] == len(it.records), said
    assert done, said
