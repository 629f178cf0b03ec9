"""Put known bugs in, one by one, and see each caught by the test that is named for it.

    python tests/mutations.py [WORD ...]           those with one of the words in their name or file
    python tests/mutations.py --core --seconds N   not on Spark, no fault runs; for so long or so

The bugs are in mutations.toml.  The tree is copied, the tests are seen to pass there, and then each
mutation is applied to the copy, alone, the extension is built again if its sources changed, and the
named test must fail.  What runs in Python comes first, then what is built, which takes 15 s each
and more: time runs out among these, so their order is random.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
#: Of what is copied: neither what is built nor what is not ours.
LEFT_BEHIND = shutil.ignore_patterns(
    ".git", ".venv*", "build", "dist", "*.so", "*.egg-info", "__pycache__", ".*_cache"
)
TEST_TIMEOUT_S = 240
_SLOW = ("tests/spark/", "tests/faults/")
PASSED, FAILED_TESTS = 0, 1  # pytest's exit codes; the others say that nothing was tested


class Mutation(NamedTuple):
    """One bug: what it is, where, the text as it is and as it would be, and the test to fail."""

    name: str
    file: str
    old: str
    new: str
    test: str

    @property
    def is_native(self) -> bool:
        """Whether the extension has to be built."""
        return self.file.startswith("pyx/")


def load() -> list[Mutation]:
    """All that are in the file."""
    with (ROOT / "tests" / "mutations.toml").open("rb") as file:
        return [Mutation(name, **rest) for name, rest in tomllib.load(file).items()]


def run(
    tree: Path, *command: str, timeout_s: float = TEST_TIMEOUT_S
) -> subprocess.CompletedProcess[str]:
    """Run Python in the copied tree, on the copied package and nothing else of ours."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "PYTHONDONTWRITEBYTECODE": "1",  # a mutation within a second would not be noticed
        "ACKCORE_REQUIRE_NATIVE": "1",
        "ACKCORE_CHECKED": "1",  # compiles in a third of the time
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
    }
    return subprocess.run(
        [sys.executable, *command],
        cwd=tree,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=timeout_s,
        check=False,
    )


def build(tree: Path) -> None:
    """Build the extension in place, and see that it can be imported."""
    for command in (
        ("setup.py", "-q", "build_ext", "--inplace"),
        ("-c", "import ackcore._native, ackcore._kafka_native"),
    ):
        done = run(tree, *command)
        if done.returncode:
            raise SystemExit(f"mutations: the copy cannot be built:\n{done.stdout[-3000:]}")


def run_tests(
    tree: Path, *tests: str, timeout_s: float = TEST_TIMEOUT_S
) -> subprocess.CompletedProcess[str]:
    """Run tests; a run that hangs has failed."""
    # No marker leaves out a test that is named: fault runs are.
    pytest = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "")
    try:
        return run(tree, *pytest, *tests, timeout_s=timeout_s)
    except subprocess.TimeoutExpired as hung:
        return subprocess.CompletedProcess(hung.cmd, FAILED_TESTS, "it hung")


def survives(tree: Path, mutation: Mutation) -> str | None:
    """Apply one mutation, run its test, and undo it; returns what is wrong, or None if caught."""
    path = tree / mutation.file
    original = path.read_text(encoding="utf-8")
    path.write_text(original.replace(mutation.old, mutation.new), encoding="utf-8")
    try:
        if mutation.is_native:
            build(tree)
        done = run_tests(tree, mutation.test)
        if done.returncode == PASSED:  # a test of several processes may miss the moment once
            done = run_tests(tree, mutation.test)
    finally:
        path.write_text(original, encoding="utf-8")
    if done.returncode == PASSED:
        return f"{mutation.test} passes twice all the same"
    # Below zero: a signal ended it, as it may if memory is misused.
    if done.returncode != FAILED_TESTS and done.returncode >= 0:
        return f"{mutation.test} did not run:\n{done.stdout[-2000:]}"
    return None


def main() -> int:
    """Run all mutations, or those that were chosen."""
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="*")
    parser.add_argument("--core", action="store_true")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    options = parser.parse_args()
    chosen = [
        mutation
        for mutation in load()
        if not options.core or not mutation.test.startswith(_SLOW)
        if not options.words
        or any(word in f"{mutation.name} {mutation.file}" for word in options.words)
    ]
    random.shuffle(chosen)
    chosen.sort(key=lambda mutation: mutation.is_native)
    ran = survived = 0
    with tempfile.TemporaryDirectory(prefix="ackcore-mutations-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=LEFT_BEHIND)
        build(tree)
        tests = dict.fromkeys(mutation.test for mutation in chosen)
        done = run_tests(tree, *tests, timeout_s=TEST_TIMEOUT_S + 10 * len(tests))
        if done.returncode != PASSED:
            print(f"mutations: the tests fail before any:\n{done.stdout[-3000:]}")
            return 1
        # From here on: all of it would go by, on a busy machine, before the first bug was in.
        began = time.monotonic()
        for mutation in chosen:
            at = time.monotonic()
            if at - began > options.seconds:
                break
            problem = survives(tree, mutation)
            took = f"{time.monotonic() - at:5.1f} s"
            print(f"{'SURVIVED' if problem else 'caught  '} {took}  {mutation.name}", flush=True)
            ran += 1
            if problem:
                survived += 1
                print(f"    {problem}", flush=True)
    left = f"; {len(chosen) - ran} were left out, as time was up" if ran < len(chosen) else ""
    print(f"{ran - survived} of {ran} mutations were caught{left}")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
