"""The command line within the test's process, and checkpoints to look at."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pyarrow as pa
import pytest

# `checkpoints` and `worlds` are beside the tests of what is below.
sys.path.insert(0, str(Path(__file__).parents[1] / "spark"))

from checkpoints import OPEN, died, records, run_one
from typer.testing import CliRunner

from ackcore.cli.app import app_of
from ackcore.cli.entry import COMMANDS
from ackcore.spark.dead_letters.store import DeadLetters
from ackcore.spark.protocol.progress import Account, Books
from ackcore.topology.tuples import Reason

NASTY = "\x1b[31m[bold]<b>no</b>\nnext"


@pytest.fixture(autouse=True)
def no_syncing(monkeypatch):
    """What is not on the disk when a machine stops is another test's matter."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def ackcore():
    """``ackcore("status", path)`` runs the command line and returns what came of it."""
    app = app_of(COMMANDS)

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
def checkpoint(tmp_path):
    """One with seven dead letters of two micro-batches, and three records that wait."""
    path = tmp_path / "checkpoint"
    slow = Reason("enrich", "TimeoutError", "3 s")
    nasty = Reason("split", "ValueError", NASTY)
    first, second = died(0, 4, (nasty, slow)), died(4, 3, (slow,))
    spouts = {"lines": Account(10, 0, 0, 7, 3, 4)}
    with OPEN(path) as state:
        letters = DeadLetters.open(
            path, state.deployment_key, None, {"lines": pa.schema([("value", pa.string())])}
        )
        for number, dead in enumerate([first, second]):
            letters.write(number, {"lines": dead})
            run_one(
                state,
                number,
                {"lines": records(20, 3)},
                {"lines": dead},
                totals=Books(number + 1, spouts).to_json(),
            )
    return path
