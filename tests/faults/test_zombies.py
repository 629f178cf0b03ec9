"""A host is cut off, another driver takes over, and the host comes back: nothing of it counts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zombie_job
from processes import PATIENCE_S, eventually, state_of

pytestmark = pytest.mark.faults

HERE = Path(__file__).parent


def jvm_of(pid):
    """The JVM that a driver started."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = stat.read_text().partition(") ")
            if int(rest.split()[1]) == pid and "java" in name:
                return int(stat.parent.name)
    raise AssertionError(f"{pid} has no JVM")


class Stage:
    """Records, and drivers in processes of their own."""

    def __init__(self, directory):
        self.directory = directory
        for name in ("in", "marks", "tmp"):
            (directory / name).mkdir()
        ids = range(zombie_job.RECORDS)
        for number in range(zombie_job.FILES):
            rows = pa.table([list(ids[number :: zombie_job.FILES])], schema=zombie_job.ID)
            pq.write_table(rows, directory / "in" / f"{number}.parquet")
        self.started = []

    def driver(self, role, **environment):
        log = open(self.directory / f"{role}.log", "ab")  # noqa: SIM115
        environment = {**os.environ, "TMPDIR": str(self.directory / "tmp"), **environment}
        environment.pop("SPARK_LOCAL_DIRS", None)
        command = [sys.executable, str(HERE / "zombie_job.py"), str(self.directory), role]
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        log.close()
        self.started.append(process.pid)
        return process

    def ended(self, process, role):
        """Return the driver's log about itself."""
        assert process.wait(PATIENCE_S) == 0, (self.directory / f"{role}.log").read_text()[-5000:]
        return json.loads((self.directory / f"{role}.json").read_text())

    def marks(self, pattern):
        return sorted(path.name for path in (self.directory / "marks").glob(pattern))

    def snapshot(self):
        return {
            path: path.read_bytes()
            for top in ("checkpoint", "sink")
            for path in (self.directory / top).rglob("*")
            if path.is_file()
        }

    def written(self):
        parts = (self.directory / "sink").glob("batch_id=*/*.parquet")
        return sorted(
            row for part in parts for row in pq.ParquetFile(part).read()["id"].to_pylist()
        )


@pytest.fixture
def stage(tmp_path):
    stage = Stage(tmp_path)
    yield stage
    for pid in stage.started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_tasks_of_a_dead_driver_write_into_no_file_of_its_successor(stage):
    """They hang in a bolt, their JVM stands still, their driver's Python is gone."""
    first = stage.driver("a")
    eventually(lambda: stage.marks("a-*-1") == ["a-0-1", "a-1-1"])
    jvm = jvm_of(first.pid)
    stage.started.append(jvm)
    os.kill(jvm, signal.SIGSTOP)
    first.kill()
    first.wait()
    said = stage.ended(stage.driver("b"), "b")
    # Its tasks had their files open when those of the first driver opened theirs.
    assert stage.marks("a-*-2") == ["a-0-2", "a-1-2"]
    assert said["error"] is None
    assert said["counts"]["spouts"]["ids"]["acked"] == zombie_job.RECORDS
    assert stage.written() == list(range(zombie_job.RECORDS))
    before = stage.snapshot()
    (stage.directory / "marks" / "end").touch()
    last = zombie_job.RECORDS // zombie_job.FILES // 500
    eventually(lambda: stage.marks(f"a-*-{last}") == [f"a-0-{last}", f"a-1-{last}"])
    workers = [int((stage.directory / "marks" / f"a-{p}-1").read_text()) for p in (0, 1)]
    os.kill(jvm, signal.SIGCONT)
    eventually(lambda: all(state_of(pid) in (None, "Z") for pid in (jvm, *workers)))
    assert stage.snapshot() == before
