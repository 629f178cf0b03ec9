"""The word count: every line of an input ends up in the books, whatever goes wrong on the way."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from ackcore.examples import quiet_spark, word_count, word_source
from ackcore.examples.word_count import Books, Count, Enrich, Job, Split, differences, plain_count
from ackcore.topology import Reject

ROOT = Path(word_count.__file__).parents[2]

AWKWARD = {
    "empty.txt": b"",
    "one_newline.txt": b"\n",
    "no_last_newline.txt": b"one two\nthree",
    "windows.txt": b"one two\r\n\r\nthree\r\n",
    "returns.txt": b"one\rtwo\n",
    "latin.txt": "Käse und Brot\nÜber\n".encode("latin-1"),
    "utf8.txt": "\ufeffKäse, naïve — 日本語\nkäse käse\n".encode(),
    "torn.txt": b"good \xe2\x82\nbad\xff\xfe \xed\xa0\x80\n",
    "nul.txt": b"a\x00b\x0bc\x0cd\x1ce\n\x85f\n",
    "long.txt": b"word " * 5_000 + b"\n" + b"x" * 200_000,
    "blank.txt": b"   \n\t\n\n==\n",
}


@pytest.fixture
def awkward(tmp_path):
    paths = []
    for name, content in AWKWARD.items():
        tmp_path.joinpath(name).write_bytes(content)
        paths.append(str(tmp_path / name))
    return paths


@pytest.fixture
def write(tmp_path):
    def write(content: bytes) -> list[str]:
        tmp_path.joinpath("input.txt").write_bytes(content)
        return [str(tmp_path / "input.txt")]

    return write


# The source and the bolts, without Spark.


def test_lines_are_staged_in_files_of_one_size(tmp_path, write):
    paths = write(b"a b\nc\n\nd")
    assert word_source.stage(paths, tmp_path / "staged", 10, 3) == 10
    tables = [pa.parquet.read_table(path) for path in sorted((tmp_path / "staged").iterdir())]
    assert [len(table) for table in tables] == [4, 4, 2]
    rows = pa.concat_tables(tables).to_pylist()
    assert [row["line"] for row in rows] == list(range(10))
    assert [row["text"] for row in rows] == (["a b", "c", "", "d"] * 3)[:10]
    # What is whole is not staged again.
    job = Job(["not/there"], tmp_path)
    (tmp_path / "staged").rename(job.staged)
    job.stage()


def test_an_input_without_lines_is_refused(tmp_path, write):
    paths = write(b"")
    for lines in (None, 5):
        with pytest.raises(word_source.InputError, match="the input has no lines"):
            word_source.stage(paths, tmp_path / "staged", lines, 3)


class Out:
    """Takes what a bolt emits."""

    def __init__(self):
        self.columns, self.parents = [], None

    def emit(self, columns, *, parents):
        self.columns, self.parents = [list(map(_plain, column)) for column in columns], parents


def _plain(value):
    return value.as_py()


TEXTS = st.text(st.sampled_from("aZ9_ \t.é\u2028\n"), max_size=30)


@given(st.lists(TEXTS, min_size=1, max_size=5))
def test_words_are_those_of_plain_python(texts):
    out = Out()
    batch = pa.RecordBatch.from_pydict({"line": range(len(texts)), "text": texts})
    Split().process(batch, out)
    expected = [
        (line, word) for line, text in enumerate(texts) for word in word_count._WORD.findall(text)
    ]
    assert list(zip(*out.columns, strict=True)) == expected
    assert out.parents.to_pylist() == [line for line, _ in expected]


def test_equal_words_of_a_line_are_added_up():
    words = [(1, "a"), (2, "a"), (1, "b"), (1, "a")]
    batch = pa.RecordBatch.from_pydict(
        {
            "line": [line for line, _ in words],
            "word": [word for _, word in words],
            "kind": ["name"] * 4,
        }
    )
    out = Out()
    Count().process(batch, out)
    assert list(zip(*out.columns, strict=True)) == [
        (1, "a", "name", 2),
        (2, "a", "name", 1),
        (1, "b", "name", 1),
    ]
    assert out.parents.to_pylist() == [[0, 3], [1], [2]]


class Word:
    """A stand-in for the part of a tuple that `Enrich` reads."""

    def __init__(self, word, stable_id=0, attempt=0):
        self.values, self.stable_id, self.attempt = (1, word), stable_id, attempt


class Emitted(list):
    emit = list.append


def test_the_service_has_its_moments():
    bolt = Enrich(0.25, "^bad$", seed=3)
    with pytest.raises(Reject, match="nobody knows what bad is"):
        bolt.execute(Word("bad"), Emitted())
    raised, emitted = Counter(), Emitted()
    for stable_id in range(1000):
        for attempt in range(2):
            try:
                bolt.execute(Word("good", stable_id, attempt), emitted)
            except TimeoutError:
                raised[attempt] += 1
    assert emitted[0] == (1, "good", "name")
    assert [150 < raised[attempt] < 350 for attempt in range(2)] == [True, True]
    assert [word_count.kind_of(word) for word in ("if", "7", "x7")] == ["keyword", "number", "name"]


# The job on Spark.


def run(spark, job):
    job.stage()
    seen = []
    books = word_count.run(spark, job, seen.append)
    assert [progress.batch_id for progress in seen] == list(range(len(seen)))
    return books


def test_books_balance(spark, awkward, tmp_path):
    """A tenth of the calls raises: lines die of poison or of bad luck, or live."""
    job = Job(awkward[:-2], tmp_path / "job", 60, 2, rate=0.1, poison="^c$|^Brot$")
    books = run(spark, job)
    assert differences(job, books) == []
    assert books.lines == 60
    rejected = {reason for reason in books.reasons if reason.startswith("Reject: ")}
    assert rejected == {"Reject: nobody knows what Brot is", "Reject: nobody knows what c is"}
    assert books.retried > 0
    # It ended, and has nothing to do when it is run again.
    assert word_count.run(spark, job, pytest.fail) == books


def test_books_by_hand(spark, write, tmp_path):
    """The counts are written out here: plain counting could be wrong in the same way."""
    job = Job(write(b"to be or\nnot to be\n\nto that\n"), tmp_path / "job", 9, rate=0, poison="not")
    books = run(spark, job)
    assert (books.lines, books.acked, books.retried, sorted(books.dead)) == (9, 7, 0, [1, 5])
    assert books.words == Counter(to=5, be=3, that=2) + Counter({"or": 3})
    assert books.reasons == {"Reject: nobody knows what not is": 2}
    assert differences(job, books) == []


# What a person types, and sees.


@pytest.fixture
def typed(monkeypatch, tmp_path):
    """Run the command in this process, on the Spark that is there if any is asked for."""

    def typed(*arguments, spark=None):
        @contextmanager
        def session(master):
            assert master == "local[2]"
            yield spark, str(tmp_path)

        monkeypatch.setattr(word_count, "spark_session", session)
        return CliRunner().invoke(word_count.app, [str(argument) for argument in arguments])

    return typed


def test_what_is_printed(typed, spark, write, tmp_path):
    (path,) = write(b"to be or\nnot to be\n\nthat is\n")
    more = tmp_path / "more"
    more.write_bytes(b"to to to\n")
    options = ["--poison", "^not", "--rate", 0, "--top", 1, "--batches", 2]
    result = typed("--input", path, more, *options, spark=spark)
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert "micro-batch 1: " in said
    assert "top words of acked lines word kind times to name 4 lines" in said
    assert "acked 4 dead 1 all 5 executed again 0" in said
    assert "Reject: nobody knows what not is 1" in said
    assert "the books balance: 4 acked + 1 dead = 5 lines" in said


def test_books_that_do_not_balance_are_told(monkeypatch, typed, spark, write):
    (path,) = write(b"to be\nor not\nto be\n")

    def miscounted(job, dead):
        lines, words = plain_count(job, dead)
        return lines + 1, words + Counter(to=1)

    monkeypatch.setattr(word_count, "plain_count", miscounted)
    result = typed("--input", path, "--rate", 0, "--batches", 1, spark=spark)
    assert result.exit_code == 1
    assert "the books do not balance" in result.output
    assert "lines: Spark has 3, plain reading 4" in result.output
    assert "1 counts differ: 'to' 2 for 3" in result.output


def test_every_difference_is_told(write, tmp_path):
    job = Job(write(b"a b\na\n"), tmp_path)
    right = Books(2, 1, 0, [1], Counter(why=1), Counter(a=1, b=1))
    assert differences(job, right) == []
    assert differences(job, replace(right, lines=3, acked=2)) == [
        "lines: Spark has 3, plain reading 2",
        "2 acked and 1 dead are not 2 lines",
    ]
    twice = replace(right, acked=0, dead=[1, 1])
    assert differences(job, twice) == ["1 lines are dead more than once, line 1 for one"]
    assert differences(job, replace(right, words=Counter(a=2, b=1))) == [
        "words of acked lines: 1 counts differ: 'a' 2 for 1"
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lines", 0], "--lines"),
        (["--batches", 0], "--batches"),
        (["--rate", 1.5], "--rate"),
        (["--poison", "("], "'--poison': '(' is not a regular expression: missing )"),
        (["--master", "nowhere"], "'--master': 'nowhere' is no master of Spark"),
        (["--input", "not/there"], "input 'not/there' cannot be read: No such file or directory"),
        (["--input", "."], "input '.' is not a regular file"),
        (["--input", os.devnull], f"input '{os.devnull}' is not a regular file"),
    ],
)
def test_bad_arguments_are_refused_by_name(typed, arguments, message):
    result = typed(*arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_a_python_without_sources_is_told(monkeypatch, typed, tmp_path):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    result = typed()
    assert result.exit_code == 2
    assert f"this Python has no library sources in {tmp_path}; name files" in result.output


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
        ("echo 'no idea' >&2", "is of no version that it tells; install"),
    ],
)
def test_a_java_that_will_not_do_is_told(fake_java, typed, write, script, message):
    fake_java(script)
    result = typed("--input", *write(b"one\n"))
    assert result.exit_code == 1
    assert "the word count failed: Spark needs Java" in result.output
    assert message in result.output


def test_no_java_is_told(monkeypatch):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(quiet_spark.SparkError, match="Spark needs Java and java does not run"):
        quiet_spark.check_java()


@pytest.mark.spark
def test_a_session_may_follow_another_in_one_process_and_a_jvm_that_dies_is_told_in_a_line():
    program = """
import os, signal
from ackcore.examples.quiet_spark import SparkError, spark_session
def kill(spark):
    jvm = spark.sparkContext._gateway.proc
    os.kill(jvm.pid, signal.SIGKILL)
    jvm.wait()
try:
    with spark_session("local[1]") as (spark, _):
        kill(spark)
        spark.range(3).count()
except SparkError as error:
    print(str(error).count(chr(10)))
with spark_session("local[1]") as (spark, _):
    print(spark.range(4).count())
    kill(spark)
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=600, cwd=ROOT
    )
    assert ran.stdout.split() == ["0", "4"], ran.stderr
    assert ran.stderr.count("Spark's JVM ended before its session did") == 2


def command(*options):
    return [sys.executable, "-m", "ackcore.examples.word_count", *map(str, options)]


@pytest.mark.spark
def test_the_command_says_little_and_leaves_nothing(tmp_path):
    home, here, scratch = (tmp_path / name for name in ("home", "here", "scratch"))
    for directory in (home, here, scratch):
        directory.mkdir()
    environment = {**os.environ, "HOME": str(home), "TMPDIR": str(scratch)}
    if ROOT.name != "site-packages":  # not installed, or installed in place
        environment["PYTHONPATH"] = str(ROOT)
    ran = subprocess.run(
        command("--lines", 3000, "--batches", 2),
        cwd=here,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ran.stderr == ""
    assert ran.returncode == 0
    assert "the books balance: " in ran.stdout
    assert "ackcore status" not in ran.stdout  # its checkpoint is gone
    assert " = 3,000 lines" in ran.stdout
    assert len(ran.stdout.splitlines()) < 60
    assert [*home.iterdir(), *here.iterdir(), *scratch.iterdir()] == []


@pytest.mark.parametrize(
    ("ended", "status"), [((0, 0), 1), ((0, 2), 0), ((0, 1), 0), ((3, 2), 3), ((3, 0), 3)]
)
def test_books_of_a_run_that_nobody_killed_prove_nothing(tmp_path, monkeypatch, ended, status):
    job, console = Job([], tmp_path, 10, 1, 0, "x", 0), Console(record=True)
    monkeypatch.setattr(word_count, "run_killed", lambda *_: ended)
    assert word_count._crash(job, console, 2, []) == status
    said = console.export_text()
    assert f"killed {ended[1]} times" in said
    assert ("of 2: it was done then" in said) == (ended[1] < 2)
    assert ("give it more --lines" in said) == (ended == (0, 0))


@pytest.mark.faults
def test_killed_at_random_points(tmp_path):
    """The driver dies by kill -9 again and again, and the books balance in the end."""
    options = ["--lines", 20_000, "--kills", 4, "--seed", 1, "--directory", tmp_path]
    done = subprocess.run(
        command(*options), capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.search(r"killed (\d) times", done.stdout)[1]) >= 2
    assert "the books balance" in done.stdout
    assert done.stdout.count(f"ackcore status {tmp_path / 'checkpoint'}; ") == 1
