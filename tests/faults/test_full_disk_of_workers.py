"""A file system without room for what workers write, for real: a small tmpfs that grows."""

from __future__ import annotations

import subprocess
from pathlib import Path

import fault_job
import pytest
from pyspark import cloudpickle

cloudpickle.register_pickle_by_value(fault_job)

RULES = {"enrich": {"until": {3: 1, 14: 2}, "reject": [17]}}
WORDS = "no room " * 40


@pytest.fixture
def small_disk(tmp_path):
    """``small_disk(directory, kib)`` gives it so much room; again, another room."""
    mounted = []

    def small_disk(directory: Path, kib: int):
        options = f"{'remount,' if directory in mounted else ''}size={kib}k"
        directory.mkdir(parents=True, exist_ok=True)
        made = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)],
            capture_output=True,
            text=True,
            check=False,
        )
        if made.returncode:
            pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
        if directory not in mounted:
            mounted.append(directory)

    yield small_disk
    for directory in mounted:
        subprocess.run(["umount", "-l", str(directory)], check=True)


@pytest.mark.faults
@pytest.mark.parametrize(
    ("where", "kib", "named"),
    [("checkpoint", 640, "StateError"), ("checkpoint", 64, "StateError"), ("sink", 8, "SinkError")],
)
def test_workers_find_the_disk_full(spark, job, small_disk, where, kib, named):
    """It grows after each error: no record is lost, blamed, or written twice.

    With 640 KiB it is the rows of the workers that fill it, and then the driver has no room either.
    """
    records = {
        key: {**record, "text": f"{record['text']} {WORDS}" if record["text"] else ""}
        for key, record in fault_job.lines(400).items()
    }
    it = job(records, mode="batch", rules=RULES, otherwise=True)
    errors = []
    for room in (kib, 2 * kib, 100_000):
        small_disk(it.directory / where, room)
        error = it.run_here(spark)
        if error is None:
            break
        errors.append(error)
    assert errors[0].startswith(named)
    assert error is None
    assert all("No space left on device" in error for error in errors), errors
    it.check(dead={17})
