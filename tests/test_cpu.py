"""Every SIMD level of the kernel keeps the contract; ACKCORE_CPU orders one."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

LEVELS = ["baseline", "avx2", "avx512"]

Started = dict[str, tuple[subprocess.Popen[bytes], Path]]

TESTS = Path(__file__).parent
FILES = ["test_ledger.py", "test_conformance.py", "test_ledger_model.py", "test_memory.py"]
FILES += [f"test_hashes.py::test_fingerprints_{name}" for name in ("are_alike", "of_long_data")]
#: The tests that run on each level: no others than those whose result a level could change.
ON_EACH = "not (_reference or check_backend or pages or beyond_the_caches and not options0)"


def run(level: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=ordered(level),
        capture_output=True,
        text=True,
        check=False,
    )


def ordered(level: str) -> dict[str, str]:
    return {
        **os.environ,
        "ACKCORE_CPU": level,
        "ACKCORE_BACKEND": "native",
        "ACKCORE_HYPOTHESIS": os.environ.get("ACKCORE_HYPOTHESIS", "few"),
    }


@pytest.fixture(scope="session")
def started(native: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """The tests on each level that this machine has beside the one that runs here.

    They run at once, beside all other tests of the session (ORDER of conftest.py).
    """
    started: Started = {}
    for level in LEVELS:
        had = run(level, "-c", "import ackcore._native as n; print(n.cpu)")
        if "this machine does not run it" in had.stderr:
            continue
        assert had.stdout.split() == [level]
        if level != native.cpu:
            out = tmp_path_factory.mktemp(level) / "out"
            command = ["pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", ON_EACH]
            with out.open("w") as file:
                tests = subprocess.Popen(
                    [sys.executable, "-m", *command, *(str(TESTS / name) for name in FILES)],
                    env=ordered(level),
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            started[level] = tests, out
    yield started
    for tests, _ in started.values():
        tests.kill()  # where the run was cut short
        tests.wait()


def test_each_level_can_be_ordered(native: ModuleType, started: Started) -> None:
    """`started` asks each which it is; there is always the baseline, if it does not run here."""
    assert native.cpu in LEVELS
    assert native.cpu not in started
    assert "baseline" in {native.cpu, *started}


@pytest.mark.parametrize("level", LEVELS)
def test_level_keeps_the_contract(level: str, native: ModuleType, started: Started) -> None:
    """The contract, Storm's streams and the model hold, whichever kernel runs."""
    if level == native.cpu:
        pytest.skip("all other tests run on it")
    if level not in started:
        pytest.skip(f"no {level} here")
    tests, out = started[level]
    assert tests.wait() == 0, out.read_text()
    assert " passed" in out.read_text()


def test_an_unknown_level_is_refused_by_name() -> None:
    done = run("sse9", "-c", "import ackcore")
    assert done.returncode != 0
    assert "ACKCORE_CPU must be one of baseline, avx2, avx512, got 'sse9'" in done.stderr


@pytest.mark.skipif(platform.machine() in ("x86_64", "AMD64"), reason="levels beside baseline")
def test_machines_of_other_kinds_run_the_baseline(native: ModuleType) -> None:
    """One of them is plain C, without the vector instructions named in it."""
    assert native.cpu == "baseline"
    refused = run("avx2", "-c", "import ackcore")
    assert refused.returncode != 0
    assert "this machine does not run it" in refused.stderr
