"""The word count: each line is acked or dead, whatever goes wrong on the way."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from ackcore.examples import quiet_spark, word_count
from ackcore.examples.killed_runs import run_killed
from ackcore.examples.word_count import differences, stage

ROOT = Path(word_count.__file__).parents[2]


def test_every_difference_is_told():
    texts = ["a b", "a"]
    right = {"acked": 1, "dead": [1], "words": Counter(a=1, b=1)}
    assert differences(texts, **right) == []
    assert differences(texts, **right | {"acked": 2}) == ["2 acked and 1 dead are not 2 lines"]
    assert differences(texts, **right | {"acked": 0, "dead": [1, 1]}) == [
        "1 lines are dead more than once"
    ]
    assert differences(texts, **right | {"words": Counter(a=2, b=1)}) == [
        "'a' is in the sink 2 times, not 1"
    ]


# The job on Spark, and what a person sees.


def test_all_adds_up(spark, tmp_path, capsys):
    texts = ["to be or", "not XXX to be", "", "to that"]
    stage(texts, tmp_path)
    assert word_count.run(spark, tmp_path, texts) == []
    said = capsys.readouterr().out
    assert "micro-batch 3: " in said
    assert re.search(r"top words of acked lines\n to +name +2\n", said)
    assert re.search(r"lines\n acked +3\n dead +1\n all +4\n executed again +0\n", said)
    assert re.search(r"dead because of\n Reject: unknown word XXX +1\n", said)
    assert "the counts balance: 3 acked + 1 dead = 4 lines" in said
    # It ended, and has nothing to do when it is run again; what differs is told.
    assert word_count.run(spark, tmp_path, [*texts[:-1], "to thar"]) == [
        "'thar' is in the sink 0 times, not 1",
        "'that' is in the sink 1 time, not 0",
    ]
    assert "micro-batch" not in capsys.readouterr().out


def test_bad_arguments_are_refused_by_name(capsys):
    with pytest.raises(SystemExit, match="2"):
        word_count.main(["--lines", "0"])
    assert "--lines must be at least 1, got 0" in capsys.readouterr().err


@pytest.fixture
def fake_java(tmp_path, monkeypatch):
    def fake_java(script):
        java = tmp_path / "bin" / "java"
        java.parent.mkdir()
        java.write_text(f"#!/bin/sh\n{script}\n")
        java.chmod(0o755)
        monkeypatch.setenv("JAVA_HOME", str(tmp_path))

    return fake_java


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("exit 3", "does not run; install a JDK of version 17 or 21"),
        ("echo 'openjdk version \"1.8.0_1\"' >&2", 'is openjdk version "1.8.0_1"; install'),
        ("echo 'no idea' >&2", "is of an unknown version; install"),
    ],
)
def test_a_java_that_will_not_do_is_told(fake_java, capsys, script, message):
    fake_java(script)
    assert word_count.main(["--lines", "1"]) == 1
    said = capsys.readouterr().out
    assert "the word count failed: Spark needs Java" in said
    assert message in said


def test_no_java_is_told(monkeypatch):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(quiet_spark.SparkError, match="Spark needs Java and java does not run"):
        quiet_spark.check_java()


def command(*options):
    return [sys.executable, "-m", "ackcore.examples.word_count", *map(str, options)]


@pytest.mark.spark
def test_the_command_says_little_and_leaves_nothing(tmp_path):
    home, here, scratch = (tmp_path / name for name in ("home", "here", "scratch"))
    for directory in (home, here, scratch):
        directory.mkdir()
    environment = {**os.environ, "HOME": str(home), "TMPDIR": str(scratch)}
    if ROOT.name != "site-packages":  # not installed, or installed in place
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment["PYTHONPATH"]])
    ran = subprocess.run(
        command("--lines", 300), cwd=here, env=environment, capture_output=True, text=True
    )
    assert ran.stderr == ""
    assert ran.returncode == 0
    assert "the counts balance: " in ran.stdout
    assert "\nnext: read docs/quickstart.md; " in ran.stdout
    assert "ackcore status" not in ran.stdout  # its checkpoint is removed
    assert " = 300 lines" in ran.stdout
    assert len(ran.stdout.splitlines()) < 60
    assert [*home.iterdir(), *here.iterdir(), *scratch.iterdir()] == []


@pytest.mark.parametrize(
    ("waiting", "kills", "status"), [(0, 0, 1), (0, 1, 1), (1, 2, 0), (2, 2, 0)]
)
def test_a_run_that_was_not_killed_proves_nothing(tmp_path, capfd, waiting, kills, status):
    """Some children wait for their kill; the next one ends."""
    child = (
        "import pathlib, time\n"
        f"place = pathlib.Path({str(tmp_path)!r})\n"
        "n = len(list(place.iterdir()))\n"
        "(place / str(n)).touch()\n"
        f"if n < {waiting}:\n"
        "    print('micro-batch 0\\n' * 3, flush=True)\n"
        "    time.sleep(300)\n"
    )
    assert run_killed([sys.executable, "-c", child], tmp_path, kills) == status
    said = capfd.readouterr().out
    assert f"killed {waiting} time" in said
    assert (f"of {kills}: it ended before" in said) == (waiting < kills)
    assert ("give it more --lines" in said) == bool(status)
    assert run_killed([sys.executable, "-c", "exit(3)"], tmp_path, 1) == 3


@pytest.mark.faults
def test_killed_at_random_points(tmp_path):
    """The driver dies by kill -9 again and again, and the counts balance in the end."""
    options = ["--lines", 20_000, "--kills", 4, "--directory", tmp_path]
    done = subprocess.run(
        command(*options), capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.search(r"killed (\d) times", done.stdout)[1]) >= 2
    assert "the counts balance" in done.stdout
    assert done.stdout.count(f"ackcore status {tmp_path / 'checkpoint'}; ") == 1
