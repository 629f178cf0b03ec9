"""The command line within the test's process, and checkpoints to look at."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

# `checkpoints` and `worlds` are beside the tests of what is below.
sys.path.insert(0, str(Path(__file__).parents[1] / "spark"))

from checkpoints import with_dead_letters
from typer.testing import CliRunner

from ackcore.cli.app import app_of
from ackcore.cli.entry import COMMANDS

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
    return with_dead_letters(tmp_path / "checkpoint", NASTY)
