"""The list of what goes wrong with Kafka names tests that there are."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_each_fault_has_tests_and_they_are_there():
    faults = tomllib.loads((ROOT / "tests/kafka/faults.toml").read_text(encoding="utf-8"))
    assert all(fault["tests"] for fault in faults.values())
    named = {tuple(test.split("::")) for fault in faults.values() for test in fault["tests"]}
    texts = {file: (ROOT / file).read_text(encoding="utf-8") for file, _ in named}
    missing = [
        f"{file}::{name}"
        for file, name in named
        if not re.search(rf"^def {name}\(", texts[file], re.M)
    ]
    assert missing == []
