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


def test_an_unknown_level_is_refused_by_name() -> None:
    done = run("sse9", "-c", "import ackcore")
    assert done.returncode != 0
    assert "ACKCORE_CPU must be one of baseline, avx2, avx512, got 'sse9'" in done.stderr
