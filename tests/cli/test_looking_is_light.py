"""Looking at a checkpoint loads neither pyspark nor pandas, and starts no Java."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from checkpoints import with_dead_letters

HEAVY = ("pyspark", "py4j", "pandas")

RUN = """
import json, runpy, sys
told, *words = sys.argv[1:]
sys.argv = ["ackcore", *words]
try:
    runpy.run_module("ackcore.cli.entry", run_name="__main__")
except SystemExit as ended:
    code = ended.code
with open(told, "w") as file:
    json.dump([code, sorted({name.partition(".")[0] for name in sys.modules})], file)
"""


@pytest.fixture
def alone(tmp_path, jobs):
    """``alone("status", path)`` runs a command in a process and returns what it has loaded."""
    fake = tmp_path / "jdk" / "bin" / "java"
    fake.parent.mkdir(parents=True)
    fake.write_text(f"#!/bin/sh\ntouch {tmp_path}/java-was-started\nexit 1\n")
    fake.chmod(0o755)

    def run(*words, code=0):
        told = tmp_path / "told.json"
        command = [sys.executable, "-c", RUN, told, *words]
        path = f"{fake.parent}{os.pathsep}{os.environ['PATH']}"
        env = {**os.environ, "JAVA_HOME": str(fake.parents[1]), "PATH": path}
        done = subprocess.run(
            list(map(str, command)), capture_output=True, text=True, cwd=tmp_path, env=env
        )
        ended, loaded = json.loads(told.read_text())
        assert (ended or 0) == code, done.stderr
        assert not (tmp_path / "java-was-started").exists()
        return loaded

    return run


@pytest.mark.parametrize(
    "words",
    [
        ("status",),
        ("status", "--json"),
        ("dead", "list"),
        ("dead", "list", "--error", "TimeoutError", "--payload", "--json"),
        ("dead", "show", "lines/0/2"),
        ("dead", "replay", "lines/0/2"),
        ("dead", "drop", "--component", "split"),
    ],
    ids=" ".join,
)
def test_commands_on_a_checkpoint(alone, checkpoint, words):
    at = 1 if words[0] == "status" else 2
    loaded = alone(*words[:at], checkpoint, *words[at:])
    assert "pyarrow" in loaded
    assert not {*HEAVY, "obstore"} & {*loaded}


def test_commands_on_a_bucket(alone, bucket):
    with_dead_letters(bucket)
    for words in (["status"], ["dead", "drop", "--component", "split"]):
        loaded = alone(*words[:2], bucket, *words[2:])
        assert "obstore" in loaded
        assert not {*HEAVY} & {*loaded}


def test_explain_of_a_function_without_a_session(alone):
    pytest.importorskip("confluent_kafka")
    assert not {*HEAVY} & {*alone("explain", "jobs:kafka")}


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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"
