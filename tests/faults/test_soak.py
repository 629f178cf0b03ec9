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
import subprocess
import sys
import time
import uuid
from collections import Counter
from pathlib import Path

import fault_job
import pytest

MASTER = os.environ.get("ACKCORE_SOAK_MASTER", "local-cluster[2,1,1024]")
SECONDS = int(os.environ.get("ACKCORE_SOAK_S", "90"))
SEED = int(os.environ.get("ACKCORE_SOAK_SEED", str(time.time_ns() % 1_000_000)))
#: By the name of what is hit: how often, against the others.
CHAOS = {"driver": 2, "jvm": 1, "executor": 8, "worker": 14, "pause": 7}
FILE_ROWS = 40
#: Files that wait at most: chaos slows drivers down, and the last one does what is left.
MOST_BEHIND = 20
POISON = 17  # each record whose id this divides is rejected


class Processes:
    """The processes of one driver, found by a word in their environment."""

    def __init__(self, command, log, **environment):
        self._word = uuid.uuid4().hex
        with open(log, "ab") as sink:
            self.driver = subprocess.Popen(
                command,
                env={**os.environ, **environment, "ACKCORE_SOAK_WORD": self._word},
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
            )

    def of(self, kind):
        """Process ids of one kind that live now."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self._word.encode() not in path.joinpath("environ").read_bytes():
                    continue
                command = path.joinpath("cmdline").read_bytes()
                if b"CoarseGrainedExecutorBackend" in command:
                    what = "executor"
                elif b"pyspark.daemon" in command or b"pyspark/daemon" in command:
                    what = "worker"
                elif b"java" in command.split(b"\0")[0]:
                    what = "jvm"
                else:
                    what = "driver"
                if what == kind:
                    found.append(int(path.name))
        return found

    def end(self):
        """Kill whatever is left."""
        for _ in range(100):
            left = [
                pid for kind in ("driver", "jvm", "executor", "worker") for pid in self.of(kind)
            ]
            if not left:
                break
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.driver.poll()
            time.sleep(0.1)
        self.driver.wait()


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
    marks = directory.glob("checkpoint/ackcore/batches/*.done")
    return max((int(mark.stem) + 1 for mark in marks), default=0)


@pytest.mark.faults
def test_chaos_loses_nothing_and_writes_nothing_twice(job):
    rng = random.Random(SEED)
    records = fault_job.lines(FILE_ROWS * (SECONDS + 1) * 2)
    it = job(
        {},
        files=0,
        message_id="id",
        rules={"enrich": {"rate": 0.02, "reject_every": POISON}, "count": {"rate": 0.01}},
        # What is killed from outside is killed often: no record is to be taken for the cause.
        settings={"max_attempts": 12, "run_attempts": 50, "careful_after": 5},
        trigger={"processingTime": "500 milliseconds"},
        conf={"spark.task.maxFailures": "8", "spark.deploy.maxExecutorRetries": "-1"},
        master=MASTER,
    )
    config = it.directory / "config.json"
    config.write_text(json.dumps({**it.config, "until_decided": None}))
    environment = {"TMPDIR": str(it.directory / "tmp"), "SPARK_LOCAL_IP": "127.0.0.1"}
    if MASTER.startswith("local-cluster"):
        environment["SPARK_HOME"] = it._spark_home()
    command = [sys.executable, str(Path(fault_job.__file__)), str(config)]
    log = it.directory / "log.txt"
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
                running = Processes(command, log, **environment)
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
    it.check(finished=False, alive=alive)
    ended = it.run(trigger={"availableNow": True}, master="local[2,4]")
    assert ended.error is None, said
    found = it.check(dead=dead, alive=alive)
    said |= {"micro-batches": found.last.number + 1, "totals": found.totals}
    print(json.dumps(said))
    assert found.totals["records"] == len(it.records), said
    assert done, said


def dead(key):
    """Whoever has no words never comes to where it is rejected."""
    return key % POISON == 0 and key % 8 > 0 and key % 10 > 0


def alive(key):
    return not dead(key)
