"""The word count: every line of an input ends up in the books, whatever goes wrong on the way."""

from __future__ import annotations

import glob
import os
import re
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark import TaskContext, cloudpickle
from pyspark.sql import Row
from typer.testing import CliRunner

from ackcore.examples import quiet_spark, word_count, word_source, word_stages
from ackcore.examples.word_count import Job, differences, plain_count, track

ROOT = Path(word_count.__file__).parents[2]

# What the workers get of this module goes along with the job: they cannot import it.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

AWKWARD = {
    "empty.txt": b"",
    "one_newline.txt": b"\n",
    "no_last_newline.txt": b"one two\nthree",
    "windows.txt": b"one two\r\n\r\nthree\r\n",
    "returns.txt": b"one\rtwo\n",
    "latin.txt": "Käse und Brot\nÜber\n".encode("latin-1"),
    "utf8.txt": "\ufeffKäse, naïve — 日本語\nkäse\n".encode(),
    "torn.txt": b"good \xe2\x82\nbad\xff\xfe \xed\xa0\x80\n",
    "nul.txt": b"a\x00b\x0bc\x0cd\x1ce\n\x85f\n",
    "long.txt": b"word " * 50_000 + b"\n" + b"x" * 200_000,
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


def roots(*ids: tuple[int, int, int]) -> list[int]:
    """Root ids of (file, line, copy), sorted."""
    copies = np.array([copy for _, _, copy in ids], np.int32)
    offsets = np.array([file << 24 | line for file, line, _ in ids], np.int64)
    return sorted(word_stages.message_roots(copies, offsets).tolist())


# The source: positions, lines, words.


def test_books_by_plain_python(write):
    paths = write(b"to be or\nnot to be\n\nthat is\n")
    books = plain_count(Job(paths, 9, poison="^not", drop="^or$"))
    assert (books.acked, books.lines) == (4, 9)  # two copies of four lines, and "to be or" again
    assert books.failed.tolist() == roots((0, 1, 0), (0, 1, 1))
    assert books.open.tolist() == roots((0, 0, 0), (0, 0, 1), (0, 0, 2))
    assert books.words == {"that": 2, "is": 2}
    assert books.reasons == {"ValueError: split does not take lines that match '^not'": 2}


def test_a_message_id_is_file_line_and_copy(tmp_path):
    for name in "ab":
        tmp_path.joinpath(name).write_bytes(b"1\n2\n")
    lines = word_source.read(word_source.plan([str(tmp_path / name) for name in "ab"], 5))
    assert lines.copies.tolist() == [0, 0, 0, 0, 1]
    assert lines.offsets.tolist() == [0, 1, 1 << 24, 1 << 24 | 1, 0]


# Bytes that mean something somewhere: line ends, halves of characters, a mark, odd spaces.
TRICKY = st.sampled_from([b"a", b"Z9_", b" ", b"\n", b"\r", b"\x00", b"\x0b", b"\x1c", b"\x85"])
TEXTS = st.lists(
    TRICKY | st.sampled_from(["é".encode(), b"\xc3", b"\xa9", b"\xff", "\u2028".encode()])
).map(b"".join)


@given(st.lists(TEXTS, min_size=1, max_size=3), st.integers(1, 30))
def test_lines_and_words_are_those_of_plain_python(tmp_path_factory, texts, wanted):
    directory = tmp_path_factory.mktemp("texts")
    paths = [str(directory / str(number)) for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        Path(path).write_bytes(text)
    job = Job(paths, wanted)
    if not any(texts):
        with pytest.raises(word_source.InputError, match="the input has no lines"):
            _ = job.pieces
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(word_source, "PIECE_BYTES", 4)  # so that there are some
        pieces = word_source.plan(paths, wanted)
    lines = word_source.read(pieces)
    words = word_source.split(lines)
    expected = plain_count(job)
    assert len(lines) == expected.lines == wanted
    found = [words.text[a:b].decode() for a, b in zip(words.bounds, words.bounds[1:], strict=False)]
    assert Counter(found) == expected.words
    each = Counter(words.lines.tolist())
    assert words.ordinals.tolist() == [i for line in sorted(each) for i in range(each[line])]
    # Three tasks read what one does, and nothing twice.
    shares = [word_source.read(share) for share in word_source.share(pieces, 3) if share]
    assert b"".join(share.text for share in shares) == lines.text
    assert np.concatenate([share.offsets for share in shares]).tolist() == lines.offsets.tolist()


def test_batches_are_whole_and_few(monkeypatch, write):
    monkeypatch.setattr(word_source, "PIECE_BYTES", 10)
    pieces = word_source.plan(write(b"12345\n" * 20))
    batches = list(word_source.batches(pieces))
    assert [piece for batch in batches for piece in batch] == pieces
    assert [sum(piece.size for piece in batch) for batch in batches] == [12] * 10


def test_a_file_that_changes_is_noticed(write):
    paths = write(b"one\ntwo\n")
    pieces = word_source.plan(paths)
    write(b"one two\n")
    with pytest.raises(
        RuntimeError, match=re.escape(f"{paths[0]!r} has changed while it was read")
    ):
        word_source.read(pieces)


def test_a_task_that_runs_again_sends_the_same_bytes(awkward):
    pieces = Job(awkward, 60).pieces
    split = word_stages.Split([pieces], 2, "^one", tracked=True)
    first, second = ([batch.serialize() for batch in split.run(0)] for _ in range(2))
    assert first == second


# The job on Spark.


@pytest.fixture
def books_of(spark, tmp_path):
    def books_of(job):
        directory = tmp_path / "files"
        directory.mkdir()
        return track(spark, job, str(directory))

    return books_of


@pytest.mark.parametrize(
    ("poison", "drop"),
    [(None, None), ("Käse|=|^$", "^two$|日本語|o"), (".*", ".*")],
)
def test_books_balance(books_of, awkward, poison, drop):
    job = Job(awkward, 50, poison, drop)
    assert differences(books_of(job), plain_count(job)) == []


def test_lines_that_fail_and_lines_that_stay_open(books_of, write):
    """What the books say is written out here: plain counting could be wrong in the same way."""
    books = books_of(Job(write(b"to be or\nnot to be\n\nthat is\n"), 9, "^not", "^or$"))
    assert books.acked == 4
    assert books.failed.tolist() == roots((0, 1, 0), (0, 1, 1))
    assert books.open.tolist() == roots((0, 0, 0), (0, 0, 1), (0, 0, 2))
    assert books.words == {"that": 2, "is": 2}
    assert books.reasons == {"ValueError: split does not take lines that match '^not'": 2}
    assert not books.other


def test_empty_lines_are_acked_and_can_fail(books_of, write):
    paths = write(b"\n\n \n")
    books = books_of(Job(paths))
    assert (books.acked, books.lines, books.words) == (3, 3, {})


def test_a_poisoned_line_without_words_fails(books_of, write):
    books = books_of(Job(write(b"\n\n \n"), poison="^$"))
    assert books.failed.tolist() == roots((0, 0, 0), (0, 1, 0))
    assert books.acked == 1


def first_time(directory: str, name: str) -> bool:
    """Whether nobody has asked this before, in any process."""
    try:
        os.close(os.open(os.path.join(directory, name), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


@pytest.mark.parametrize("stage", ["split", "count"])
def test_a_task_that_fails_once_changes_nothing(monkeypatch, books_of, awkward, tmp_path, stage):
    marks = str(tmp_path)

    class FailingSplit(word_stages.Split):
        def run(self, task):
            for sent in super().run(task):
                yield sent
                if first_time(marks, f"failed-{task}"):
                    raise RuntimeError("this task fails after it has sent something")

    class FailingCount(word_stages.Count):
        def _tracked(self, received):
            result = super()._tracked(received)
            if first_time(marks, f"failed-{TaskContext.get().partitionId()}"):
                raise RuntimeError("this task fails after it has written its files")
            return result

    name, failing = {"split": ("Split", FailingSplit), "count": ("Count", FailingCount)}[stage]
    monkeypatch.setattr(word_count, name, failing)
    job = Job(awkward, 50, "Käse", "^two$")
    books = books_of(job)
    assert glob.glob(f"{marks}/failed-*")
    assert differences(books, plain_count(job)) == []


def test_lost_shuffle_files_change_nothing(monkeypatch, books_of, awkward, tmp_path):
    """Tasks of the first stage run again, after one counter has read what they sent before."""
    marks = str(tmp_path)

    class LosingCount(word_stages.Count):
        def _tracked(self, received):
            result = super()._tracked(received)
            if first_time(marks, "lost"):
                # Spark gives its workers the directories of its blocks under this name.
                (directory,) = os.environ["SPARK_LOCAL_DIRS"].split(",")
                lost = glob.glob(f"{directory}/*/shuffle_*")
                for file in lost:
                    os.remove(file)
                Path(marks, "how-many").write_text(str(len(lost)))
                raise RuntimeError("this task will find its input gone")
            return result

    monkeypatch.setattr(word_count, "Count", LosingCount)
    job = Job(awkward, 50, "Käse", "^two$")
    books = books_of(job)
    assert int(Path(marks, "how-many").read_text()) > 0
    assert differences(books, plain_count(job)) == []


def test_rows_that_get_lost_are_missed(monkeypatch, books_of, awkward):
    class LeakySplit(word_stages.Split):
        def run(self, task):
            *sent, trailers = super().run(task)
            yield from (batch.slice(1) for batch in sent)
            yield trailers

    monkeypatch.setattr(word_count, "Split", LeakySplit)
    with pytest.raises(Exception, match=r"counter \d got \d of \d rows from task \d of split"):
        books_of(Job(awkward))


def test_counters_that_saw_different_runs_are_refused():
    def saw(**fingerprints):
        sources = np.array([int(name[1:]) for name in fingerprints], np.int32).tobytes()
        said = np.array(list(fingerprints.values()), np.int64).tobytes()
        return Row(sources=sources, fingerprints=said)

    word_stages.check_trailers([saw(t0=5, t1=6), saw(t0=5, t1=6)], 2)
    with pytest.raises(RuntimeError, match=r"different runs of tasks \[1\] of split"):
        word_stages.check_trailers([saw(t0=5, t1=6), saw(t0=5, t1=7)], 2)
    with pytest.raises(RuntimeError, match=r"different runs of tasks \[0, 1\] of split"):
        word_stages.check_trailers([], 2)


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
    options = ["--rounds", 2, "--poison", "^not", "--drop", "^or$", "--top", 1]
    result = typed("--input", path, more, *options, spark=spark)
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert "top words of acked lines word times to 3 lines" in said
    assert "acked 3 failed 1 open 1 all 5" in said
    assert "split does not take lines that match '^not' 1" in said
    assert re.search(r"tracked [\d,]+ [\d.]+ [\d.]+, [\d.]+ untracked [\d,]+ [\d.]+ [\d.]+, ", said)
    assert "the books balance: acked + failed + open = 5 lines" in said


def test_books_that_do_not_balance_are_told(monkeypatch, typed, spark, write):
    (path,) = write(b"to be\nor not\nto be\n")

    def miscounted(job):
        books = plain_count(job)
        return replace(books, acked=2, open=books.open[1:], words=Counter(to=2, be=1, or_=1))

    monkeypatch.setattr(word_count, "plain_count", miscounted)
    result = typed("--input", path, "--drop", "not", "--no-untracked", "--rounds", 1, spark=spark)
    assert result.exit_code == 1
    assert "the books do not balance" in result.output
    assert "open: Spark has 1, plain reading 0; 1 lines are in one of them only" in result.output
    assert "2 counts differ: 'be' 2 for 1, 'or_' 0 for 1" in result.output
    assert "untracked" not in result.output


def test_every_difference_is_told():
    none, one = np.array([], np.int64), np.array([7], np.int64)
    right = word_count.Books(2, one, none, Counter(a=1), Counter(why=1))
    wrong = word_count.Books(1, none, one, Counter(a=1), Counter(), Counter(ANOMALY=1))
    assert differences(right, right) == []
    assert differences(wrong, right) == [
        "acked: Spark has 1, plain reading 2",
        "failed: Spark has 0, plain reading 1; 1 lines are in one of them only",
        "open: Spark has 1, plain reading 0; 1 lines are in one of them only",
        "1 lines ended as ANOMALY",
        "failed for 'why': Spark has 0, plain reading 1",
    ]
    fewer = replace(right, acked=1)
    assert differences(fewer, right)[0] == "lines: Spark has 2, plain reading 3"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lines", 0], "--lines"),
        (["--rounds", 0], "--rounds"),
        (["--poison", "("], "'--poison': '(' is not a regular expression: missing )"),
        (["--drop", "*"], "'--drop': '*' is not a regular expression: nothing to repeat"),
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


def test_inputs_that_cannot_be_numbered_are_refused(monkeypatch, typed, write):
    result = typed("--input", *write(b""))
    assert result.exit_code == 2
    assert "the input has no lines" in result.output
    paths = write(b"one\n")
    result = typed("--input", *paths, "--lines", 2**16 + 1)
    assert result.exit_code == 2
    assert "65537 lines of an input of 1 would take 65537 copies; at most 65536" in result.output
    monkeypatch.setattr(word_source, "LINE_BITS", 1)
    with pytest.raises(word_source.InputError, match="has 3 lines; at most 2 have a number"):
        word_source.plan(write(b"1\n2\n3\n"))
    with pytest.raises(word_source.InputError, match="262145 input files; at most 262144"):
        word_source.plan(paths * (2**18 + 1))


def test_without_java_one_line_says_so(monkeypatch, typed, write, tmp_path):
    paths = write(b"one\n")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "none"))
    result = typed("--input", *paths)
    assert result.exit_code == 1
    assert result.output.startswith(f"the word count failed: Spark needs Java and {tmp_path}/none/")
    assert len(result.output.splitlines()) == 1
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\" 2019-01-15' >&2\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(quiet_spark.SparkError, match=r'17 or newer and .* is openjdk version "11'):
        quiet_spark.check_java()


@pytest.mark.spark
def test_the_command_says_little_and_leaves_nothing(tmp_path):
    home, here, scratch = (tmp_path / name for name in ("home", "here", "scratch"))
    for directory in (home, here, scratch):
        directory.mkdir()
    environment = {**os.environ, "HOME": str(home), "TMPDIR": str(scratch)}
    if ROOT.name != "site-packages":  # not installed, or installed in place
        environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-m", "ackcore.examples.word_count"]
    options = ["--lines", "3000", "--rounds", "1"]
    ran = subprocess.run(
        command + options, cwd=here, env=environment, capture_output=True, text=True
    )
    assert ran.stderr == ""
    assert ran.returncode == 0
    assert "the books balance: acked + failed + open = 3,000 lines" in ran.stdout
    assert len(ran.stdout.splitlines()) < 40
    assert [*home.iterdir(), *here.iterdir(), *scratch.iterdir()] == []
