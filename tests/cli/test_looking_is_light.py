"""Looking at a checkpoint loads neither pyspark nor pandas, and starts no Java."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from checkpoints import with_dead_letters
from separately import run_python

HEAVY = ("pyspark", "py4j", "pandas")

RUN = """
import json, runpy, sys
told, commands = sys.argv[1], json.loads(sys.argv[2])
found = []
for words in commands:
    sys.argv = ["ackcore", *words]
    try:
        runpy.run_module("ackcore.cli.entry", run_name="__main__")
    except SystemExit as ended:
        found.append([ended.code, sorted({name.partition(".")[0] for name in sys.modules})])
with open(told, "w") as file:
    json.dump(found, file)
"""


@pytest.fixture
def alone(tmp_path, jobs):
    """``alone(("status", path), ...)`` runs commands in a process; returns what was loaded then."""
    fake = tmp_path / "jdk" / "bin" / "java"
    fake.parent.mkdir(parents=True)
    fake.write_text(f"#!/bin/sh\ntouch {tmp_path}/java-was-started\nexit 1\n")
    fake.chmod(0o755)

    def run(*commands):
        told = tmp_path / "told.json"
        words = json.dumps([list(map(str, words)) for words in commands])
        command = [sys.executable, "-W", "ignore::RuntimeWarning", "-c", RUN, told, words]
        path = f"{fake.parent}{os.pathsep}{os.environ['PATH']}"
        env = {**os.environ, "JAVA_HOME": str(fake.parents[1]), "PATH": path}
        done = subprocess.run(
            list(map(str, command)), capture_output=True, text=True, cwd=tmp_path, env=env
        )
        for words, (ended, loaded) in zip(commands, json.loads(told.read_text()), strict=True):
            assert not ended, (words, done.stderr)
            assert not {*HEAVY} & {*loaded}, words
        assert not (tmp_path / "java-was-started").exists()
        return loaded

    return run


def test_commands_on_a_checkpoint(alone, checkpoint):
    loaded = alone(
        ("status", checkpoint),
        ("status", checkpoint, "--json"),
        ("dead", "list", checkpoint),
        ("dead", "list", checkpoint, "--error", "TimeoutError", "--payload", "--json"),
        ("dead", "show", checkpoint, "lines/0/2"),
        ("dead", "replay", checkpoint, "lines/0/2"),
        ("dead", "drop", checkpoint, "--component", "split"),
    )
    assert "pyarrow" in loaded
    assert "obstore" not in loaded


def test_commands_on_a_bucket(alone, bucket):
    with_dead_letters(bucket)
    loaded = alone(("status", bucket), ("dead", "drop", bucket, "--component", "split"))
    assert "obstore" in loaded


def test_explain_of_a_function_without_a_session(alone):
    pytest.importorskip("confluent_kafka")
    assert alone(("explain", "jobs:kafka"))


def test_the_page(checkpoint):
    code = f"""
import sys, urllib.request
from ackcore.ui.server import PageServer
with PageServer([{str(checkpoint)!r}]) as server:
    for path in ("", "api/0/status", "api/0/letters", "api/0/topology.svg"):
        urllib.request.urlopen(server.url + path).read()
print(*sorted({{"pyspark", "py4j"}} & sys.modules.keys()))
"""
    pytest.importorskip("uvicorn")
    assert run_python(code) == "\n"
