"""Every SIMD level of the kernel keeps the contract; ACKCORE_CPU orders one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

LEVELS = ["baseline", "avx2", "avx512"]
TESTS = Path(__file__).parent


def run(level: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "ACKCORE_CPU": level, "ACKCORE_BACKEND": "native"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("level", LEVELS)
def test_level_keeps_the_contract(level: str) -> None:
    """The contract, Storm's streams and the model hold, whichever kernel runs."""
    if importlib.util.find_spec("ackcore._native") is None:
        pytest.skip("not built")
    had = run(level, "-c", "import ackcore._native as n; print(n.cpu)")
    if "this machine does not run it" in had.stderr:
        pytest.skip(f"no {level} here")
    assert had.stdout.split() == [level]
    files = ["test_ledger.py", "test_conformance.py", "test_ledger_model.py", "test_memory.py"]
    done = run(
        level,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-k",
        "native or model",
        *(str(TESTS / name) for name in files),
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


PACK = """
import hashlib
import numpy as np
from ackcore.spark import packing, wire
from ackcore.spark.shards import combine_events, pack_events
import pyarrow as pa

packing.CHUNK_ROWS, packing.PROBE_ROWS, packing.TABLES = 3000, 2000, ((2000, 10), (8000, 50))
rng = np.random.default_rng(5)
roots = np.repeat(rng.integers(-(2**63), 2**63 - 1, 6000), 5)
columns = [roots, rng.integers(-(2**63), 2**63 - 1, len(roots)), np.full(len(roots), -1, np.int32)]
batch = pa.record_batch(columns, ["root_id", "val", "task"])
digest = hashlib.blake2b()
kinds = set()
for fixed_order in (True, False):
    for found in pack_events(7, seed=9, fixed_order=fixed_order)(iter([batch])):
        digest.update(found.serialize())
        kinds.update(found["kind"].to_pylist())
assert wire.ENTRIES in kinds
for found in combine_events(seed=9)(iter([batch])):
    digest.update(found.serialize())
print(digest.hexdigest())
"""


def test_what_is_packed_is_the_same_on_every_processor() -> None:
    """Spark gives a job up if a task that runs again, on another host, writes other bytes."""
    packed = {}
    for level in [*LEVELS, "python"]:
        done = subprocess.run(
            [sys.executable, "-c", PACK],
            env={
                **{name: value for name, value in os.environ.items() if name != "ACKCORE_CPU"},
                "ACKCORE_BACKEND": "python" if level == "python" else "native",
                **({} if level == "python" else {"ACKCORE_CPU": level}),
            },
            capture_output=True,
            text=True,
            check=False,
        )
        if "this machine does not run it" not in done.stderr:
            assert done.returncode == 0, done.stderr
            packed[level] = done.stdout
    assert {"baseline", "python"} <= packed.keys()
    assert len(set(packed.values())) == 1, packed


def test_an_unknown_level_is_refused_by_name() -> None:
    done = run("sse9", "-c", "import ackcore")
    assert done.returncode != 0
    assert "ACKCORE_CPU must be one of baseline, avx2, avx512, got 'sse9'" in done.stderr
