"""``ackcore status``, in this process and as a process."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import threading
import time

import pytest
from checkpoints import OPEN, run_one
from rich.console import Console
from screens import recorded

from ackcore.cli import checkpoint_commands, reporting
from ackcore.spark.engine.progress import Account, Counts, Progress
from ackcore.spark.inspect import reason_counts as reasons
from ackcore.spark.inspect.status import Logged


def test_status_tells_the_counts_and_why(ackcore, checkpoint):
    said = ackcore("status", checkpoint).stdout
    assert f"{checkpoint}: a batch, not running, last owner pid" in said
    assert "(epoch 1)" in said
    assert "counts after 2 micro-batches " in said
    assert "dead letters: 7, of which 0 were replayed" in said
    assert "waiting: 3, the next is due now" in said
    assert "TimeoutError" in said
    # What a record's error says is no command to the terminal, and no markup.
    assert "\\x1b[31m[bold]<b>no</b>\\nnext" in said
    assert "\x1b[31m" not in said


def test_status_as_json(ackcore, checkpoint, lines):
    (found,) = lines(ackcore("status", checkpoint, "--json"))
    assert found["counts"]["spouts"]["lines"]["dead"] == 7
    assert found["counts"]["balanced"]
    assert found["dead"]["letters"] == 7
    assert found["waiting"]["reasons"][0]["records"] == 3
    assert found["last_done"] == 1


def test_counts_that_do_not_balance_are_told_by_the_exit_code(ackcore, tmp_path):
    totals = Counts(1, {"lines": Account(records=5, acked=4)}).to_json()
    with OPEN(tmp_path / "c") as state:
        run_one(state, 0, totals=totals)
    assert "THEY DO NOT BALANCE" in ackcore("status", tmp_path / "c", code=1).stdout


def test_a_running_query_is_told(ackcore, tmp_path):
    with OPEN(tmp_path / "c") as state:
        state.write_plan(state.make_plan(0, 0))
        said = ackcore("status", tmp_path / "c").stdout
    assert "a batch, running, owner pid" in said
    assert "micro-batch 0 runs, planned" in said
    said = ackcore("status", tmp_path / "c").stdout
    assert "a batch, not running, last owner pid" in said
    assert "micro-batch 0 was not finished, planned" in said
    assert "the next start continues it" in said


@pytest.fixture
def looks(monkeypatch):
    """Ends a `--watch` after five looks; returns the files of dead letters that were read."""
    pauses, read = iter(range(4)), []
    real, wait, here = reasons.read_letters, time.sleep, threading.get_ident()

    def sleep(seconds):
        if threading.get_ident() != here:  # of Py4J, say
            wait(seconds)
        elif next(pauses, None) is None:
            raise KeyboardInterrupt

    def read_letters(path, *rest):
        read.append(path)
        return real(path, *rest)

    monkeypatch.setattr(checkpoint_commands.time, "sleep", sleep)
    monkeypatch.setattr(reasons, "read_letters", read_letters)
    return read


def test_who_watches_reads_each_file_of_dead_letters_once(ackcore, checkpoint, looks, monkeypatch):
    screen = recorded(monkeypatch, checkpoint_commands)
    ackcore("status", checkpoint, "--watch", code=130)
    assert len(looks) == len(set(looks)) > 0
    text = screen.file.getvalue()
    assert text.count("dead letters: 7, of which 0 were replayed") >= 5
    assert "\x1b[?1049h" in text  # on the terminal's other screen, which is left again
    assert text.rindex("\x1b[?1049l") > text.rindex("dead letters: 7")


def test_who_watches_may_have_json(ackcore, checkpoint, looks, lines):
    found = lines(ackcore("status", checkpoint, "--watch", "--json", code=130))
    assert [each["dead"]["letters"] for each in found] == [7] * 5
    assert len(looks) == len(set(looks)) > 0


def test_errors_are_one_line(ackcore, tmp_path):
    done = ackcore("status", tmp_path, code=3)
    assert done.stderr.startswith("ackcore: checkpoint must be the directory or URL passed")
    assert done.stderr.count("\n") == 1
    done = ackcore("status", "viewfs://host/x", code=2)
    assert "viewfs" in done.stderr
    done = ackcore("status", "s3://user:word@bucket/x", code=2)
    assert "without user, password" in done.stderr
    assert "word@" not in done.stderr
    done = ackcore("--debug", "status", tmp_path, code=1)
    assert isinstance(done.exception, FileNotFoundError)


def test_as_a_process(checkpoint):
    command = [sys.executable, "-m", "ackcore.cli.entry", "status", str(checkpoint), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["dead"]["letters"] == 7
    assert done.stderr == ""


def test_a_reader_of_the_output_that_has_ended_is_no_error(checkpoint):
    """Run the command line with a closed pipe, as ``ackcore status | head`` does."""
    read, write = os.pipe()
    os.close(read)
    ackcore = [sys.executable, "-m", "ackcore.cli.entry"]
    for words in (["status", checkpoint, "--json"], ["dead", "list", checkpoint], ["--help"]):
        done = subprocess.run([*ackcore, *map(str, words)], stdout=write, stderr=subprocess.PIPE)
        assert done.stderr == b"", words
    os.close(write)


def test_other_broken_pipes_are_told(ackcore, checkpoint, monkeypatch):
    def fails(*of, **options):
        raise BrokenPipeError("the store hung up")

    monkeypatch.setattr(checkpoint_commands, "read_status", fails)
    assert "BrokenPipeError: the store hung up" in ackcore("status", checkpoint, code=4).stderr


def test_ids_of_dedup_are_shown_as_text():
    shown = [checkpoint_commands._text(value) for value in (b"order-1", b"\xff", 5, None)]
    assert shown == ["order-1", "\\xff", 5, None]


def test_duplicates_and_unmet_expectations_are_shown_if_there_are_any():
    def shown(**figures):
        console = Console(width=240, file=io.StringIO())
        some = [Logged(0, Progress(0)), Logged(0, Progress(1, acked=3, **figures))]
        console.print(checkpoint_commands._batches(some))
        return console.file.getvalue()

    checks = {"orders": {"n > 0": {"passed": 1, "failed": 4}, "n < 9": {"passed": 1, "failed": 1}}}
    text = shown(emitted={"orders.dedup": {"duplicates": 7}}, expectations=checks)
    assert "dead  duplicates  unmet expectations  took" in text
    assert "7                   5" in text
    text = shown(emitted={"orders.dedup": {"default": 7}})
    assert "duplicates" not in text
    assert "unmet" not in text


def test_what_is_not_installed_is_said_in_one_line(without, checkpoint):
    for name, extra in [("typer", "cli"), ("rich", "cli"), ("pyarrow", "cli,spark")]:
        done = without([name], "status", checkpoint)
        assert done.returncode == 2
        assert done.stderr.endswith(f" is not installed; pip install 'ackcore[{extra}]'\n")
        assert done.stderr.count("\n") == 1


def test_letters_that_the_output_lacks_are_escaped(checkpoint, tmp_path):
    """In JSON too, which stays JSON."""
    named = tmp_path / "h\xf6f\N{GRINNING FACE}"
    shutil.copytree(checkpoint, named)
    for form in ((), ("--json",)):
        code = "from ackcore.cli.entry import main\nmain()"
        command = [sys.executable, "-c", code, "status", str(named), *form]
        environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
        done = subprocess.run(command, capture_output=True, check=True, env=environment)
        assert b"/h\\u00f6f\\ud83d\\ude00" in done.stdout
    assert str(named) in json.loads(done.stdout)["checkpoint"]


def test_help_is_there_where_some_commands_cannot_be(without):
    done = without(["pyspark", "uvicorn"], "--help")
    assert done.returncode == 0
    assert "status" in done.stdout
    assert "ackcore: ui needs uvicorn; pip install 'ackcore[cli,spark,ui]'\n" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_path_beside_a_checkpoint_is_put_right(ackcore, checkpoint):
    said = ackcore("status", checkpoint / "ackcore", code=3).stderr
    assert said.endswith(f"it is within a checkpoint, {checkpoint}\n")
    for words in (("status",), ("dead", "list")):
        said = ackcore(*words, checkpoint.parent, code=3).stderr
        assert said.endswith(f", but it contains {checkpoint}\n")
        said = ackcore(*words, checkpoint / "no", code=3).stderr
        assert said.endswith(f"{checkpoint / 'no'} does not exist\n")


def test_help_and_version(ackcore):
    assert "Exit codes: 0 done" in ackcore("--help").stdout
    assert ackcore("--version").stdout.startswith("ackcore ")
    assert ackcore("status", code=2)
    assert ackcore("nonsense", code=2)


def test_names_in_titles_and_columns_are_shown_as_they_are(capsys):
    shown = reporting.table("table [bold]t", "[red]n\x1b", "b")
    shown.add_row("1", "2")
    reporting.console().print(shown)
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines[:2] == ["table [bold]t", "[red]n\\x1b  b"]
