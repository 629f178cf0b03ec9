"""A failpoint kills where it is named, and nowhere else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from ackcore.spark.base import failpoints
from ackcore.spark.base.failpoints import VARIABLE, FailpointReached, failpoint, parse

PROGRAM = """
from ackcore.spark.base.failpoints import FailpointReached, failpoint
for batch in range(3):
    for name in ("planned", "decided", "in-sink"):
        try:
            failpoint(name, batch)
        except FailpointReached as error:
            print(error, flush=True)
        print(name, batch, flush=True)
"""


def run(points):
    env = os.environ | {VARIABLE: points}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True)
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize(
    ("points", "code", "lines"),
    [
        ("decided", -signal.SIGKILL, 1),
        ("decided:1", -signal.SIGKILL, 4),
        (" planned:2 , in-sink=kill ", -signal.SIGKILL, 2),
        ("pruned", 0, 9),
        ("", 0, 9),
    ],
)
def test_the_process_dies_where_it_is_told(points, code, lines):
    found = run(points)
    assert found[0] == code
    assert len(found[1]) == lines


def test_a_failpoint_may_raise():
    code, lines = run("in-sink:1=raise")
    assert code == 0
    assert [line for line in lines if line.startswith("failpoint")] == [
        "failpoint in-sink reached in micro-batch 1"
    ]


def test_points_are_read_from_the_text():
    assert parse(" planned, decided:3 ,in-sink=raise,acted:0=kill,marked=stop,") == {
        ("planned", None): "kill",
        ("decided", 3): "kill",
        ("in-sink", None): "raise",
        ("acted", 0): "kill",
        ("marked", None): "stop",
    }


@pytest.mark.parametrize("text", ["palnned", "planned:x", "planned:", "planned=boom"])
def test_a_misspelt_failpoint_is_refused(text):
    with pytest.raises(ValueError, match=f"must be name, .* got '{text}'; the names are acted, "):
        parse(text)


def test_without_failpoints_nothing_happens(monkeypatch):
    monkeypatch.setattr(failpoints, "_POINTS", {})
    failpoint("planned", 1)
    monkeypatch.setattr(failpoints, "_POINTS", parse("acted=raise"))
    failpoint("planned", 1)
    with pytest.raises(FailpointReached):
        failpoint("acted")


def test_it_kills_by_the_signal_that_nobody_catches(monkeypatch):
    sent = []
    monkeypatch.setattr(os, "kill", lambda *what: sent.append(what))
    monkeypatch.setattr(failpoints, "_POINTS", parse("acted"))
    failpoint("acted", 5)
    assert sent == [(os.getpid(), signal.SIGKILL)]


def test_it_stops_the_process_once(monkeypatch):
    sent = []
    monkeypatch.setattr(os, "kill", lambda *what: sent.append(what))
    monkeypatch.setattr(failpoints, "_POINTS", parse("acted=stop"))
    failpoint("acted", 5)
    failpoint("acted", 5)
    assert sent == [(os.getpid(), signal.SIGSTOP)]
