"""The list of what goes wrong with Kafka names tests that there are, and that were seen red."""

import re
import tomllib
from pathlib import Path

from mutations import load

ROOT = Path(__file__).parent.parent
FAULTS = tomllib.loads((ROOT / "tests/kafka/faults.toml").read_text(encoding="utf-8"))
PLANTED = FAULTS.pop("planted")
#: Minutes of a cluster of Spark's; and two bugs that were planted are caught by no run of these.
UNSEEN = [
    "executors, workers and drivers of a cluster are killed while a spout reads",
    "a real broker is killed under load",
]


def test_each_fault_has_tests_and_they_are_there():
    assert all(fault["tests"] for fault in FAULTS.values())
    named = {tuple(test.split("::")) for fault in FAULTS.values() for test in fault["tests"]}
    texts = {file: (ROOT / file).read_text(encoding="utf-8") for file, _ in named}
    missing = [
        f"{file}::{name}"
        for file, name in named
        if not re.search(rf"^def {name}\(", texts[file], re.M)
    ]
    assert missing == []


def test_each_fault_was_seen_red():
    """By a planted bug that one of its tests is named for."""
    caught_by = {mutation.test.partition("[")[0] for mutation in load()}
    assert [
        name for name, fault in FAULTS.items() if caught_by.isdisjoint(fault["tests"])
    ] == UNSEEN


def test_the_bugs_that_were_to_be_planted_are():
    assert len(PLANTED) == 12
    names = {mutation.name for mutation in load()}
    assert {name for found in PLANTED.values() for name in found} <= names
