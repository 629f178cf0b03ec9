"""The command line within the test's process, and checkpoints to look at."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from checkpoints import with_dead_letters
from typer.testing import CliRunner

from ackcore.cli.entry import MODULES
from ackcore.cli.reporting import app_of

NASTY = "\x1b[31m[bold]<b>no</b>\nnext"


TOPOLOGY = """
import pyarrow as pa
from ackcore.topology import BasicBolt, Reject, TopologyBuilder

class Split(BasicBolt):
    outputs = pa.schema([("word", pa.string())])

    def execute(self, tuple, collector):
        if tuple["value"] == "no":
            raise Reject("not for us")
        for word in tuple["value"].split():
            collector.emit((word,))

def write(frame, batch_id):
    frame.count()

def made(spark, lines):
    builder = TopologyBuilder()
    builder.spout("lines", lines)
    builder.bolt("split", Split()).shuffle("lines")
    builder.sink("split", write)
    return builder.build(backoff_s=0.01)

def batch(spark):
    return made(spark, spark.createDataFrame([("a b",), ("no",), ("c",)], "value string"))

def stream(spark):
    return made(spark, spark.readStream.format("rate").load().selectExpr("'a b' as value"))

def kafka():
    from ackcore.kafka import KafkaSpout
    return made(None, KafkaSpout("lines", bootstrap_servers="nowhere:9092", group_id="group"))
"""


@pytest.fixture
def jobs(tmp_path):
    """``jobs:batch`` and others are topologies in ``tmp_path``."""
    (tmp_path / "jobs.py").write_text(TOPOLOGY)


@pytest.fixture(autouse=True)
def no_syncing(monkeypatch):
    """Durability when a machine stops is the matter of another test."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def ackcore():
    """``ackcore("status", path)`` runs the command line and returns what came of it."""
    app = app_of(MODULES)

    def run(*words, code=0):
        done = CliRunner().invoke(app, [str(word) for word in words])
        assert done.exit_code == code, (done.output, done.exception)
        return done

    return run


@pytest.fixture
def lines():
    """The JSON objects that a command printed."""
    return lambda done: [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def doctor(ackcore, lines):
    """``doctor(place)`` returns the findings of ``ackcore doctor`` by their names."""

    def run(place, code=0):
        told = lines(ackcore("doctor", place, "--master", "none", "--json", code=code))
        found = {each["what"]: each for each in told}
        assert len(found) == len(told)
        return found

    return run


@pytest.fixture
def without():
    """``without(modules, *words)`` runs a command in a process where modules are missing."""

    def run(modules, *words):
        code = (
            f"import sys; sys.modules.update(dict.fromkeys({modules!r}))\n"
            f"sys.argv = ['ackcore', *{[*map(str, words)]!r}]\n"
            "from ackcore.cli.entry import main; main()"
        )
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    return run


@pytest.fixture
def checkpoint(tmp_path):
    """One with seven dead letters of two micro-batches, and three records that wait."""
    return with_dead_letters(tmp_path / "checkpoint", NASTY)
