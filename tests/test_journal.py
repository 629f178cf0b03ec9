"""A journal gives everyone the same answer, whoever dies when, and never one that is not whole."""

from __future__ import annotations

import errno
import os
import signal
import struct
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ackcore._files import journal as module
from ackcore._files import journal_format
from ackcore._files.journal import Journal

CONTEXT = b"what is asked of"
A, B, C = (bytes([each]) * 16 for each in b"abc")


@pytest.fixture
def opened(tmp_path):
    """``opened()`` opens the journal once more; all are closed in the end."""
    journals = []

    def opened(context=CONTEXT, directory=tmp_path / "a" / "b"):
        journals.append(Journal(directory, context))
        return journals[-1]

    yield opened
    for journal in journals:
        journal.close()


def files(directory, ending):
    return sorted(path for path in directory.rglob(f"*{ending}"))


def test_an_answer_is_there_from_when_it_is_appended(opened, tmp_path):
    one = opened()
    assert one.get(A) is None
    one.append(A, b"first")
    one.append(B, b"")
    assert (one.get(A), one.get(B), one.get(C)) == (b"first", b"", None)
    one.append(A, b"second")
    assert one.get(A) == b"first"
    one.sync()
    assert not files(tmp_path, ".open")
    assert (one.get(A), opened().get(B)) == (b"first", b"")
    one.sync()  # there is nothing more
    assert len(files(tmp_path, ".answers")) == 1


def test_the_first_answer_to_be_synced_is_everyones(opened):
    one, other = opened(), opened()
    other.append(A, b"early")
    one._look = other._look = lambda: None  # both call at once
    one.append(A, b"late")
    one.append(B, b"one's")
    other.append(B, b"other's")
    one.sync()
    other.append(C, b"other's")
    other.sync()
    assert [one.get(A), one.get(B)] == [other.get(A), other.get(B)] == [b"late", b"one's"]
    late = opened()
    assert [late.get(key) for key in (A, B, C)] == [b"late", b"one's", b"other's"]


def test_a_segment_that_another_has_linked_a_moment_before_comes_first(opened):
    one, other = opened(), opened()
    for each in (one, other):
        each._look = each._segments = lambda: None  # neither knows of the other's
    one.append(A, b"one's")
    other.append(A, b"other's")
    other.append(B, b"other's")
    one.sync()
    other.sync()
    assert other.get(A) == one.get(A) == opened().get(A) == b"one's"
    assert opened().get(B) == b"other's"


def test_what_another_has_appended_is_taken_and_not_asked_for_again(opened):
    """A copy for speculation takes what the first attempt has, and what it gets meanwhile."""
    one, other = opened(), opened()
    one.append(A, b"a")
    assert other.get(A) == b"a"
    one.append(B, b"b")
    assert other.get(B) == b"b"
    one.close()
    other.sync()
    assert opened().get(A) == b"a"
    third = opened()
    assert third.get(B) == b"b"


def test_a_writer_that_goes_on_when_it_has_been_replaced_changes_nothing(opened):
    zombie = opened()
    zombie.append(A, b"zombie's")
    zombie._look = lambda: None
    new = opened()
    new._look = lambda: None
    new._candidates.clear()  # it did not see that
    new.append(A, b"new")
    new.sync()
    zombie.append(B, b"zombie's")
    zombie.sync()
    assert zombie.get(A) == new.get(A) == opened().get(A) == b"new"
    assert opened().get(B) == b"zombie's"


def test_a_writer_whose_directory_is_gone_says_so(opened, tmp_path):
    journal = opened()
    journal.append(A, b"a")
    for path in files(tmp_path, ".open"):
        path.unlink()
    (tmp_path / "a" / "b").rmdir()
    with pytest.raises(FileNotFoundError):
        journal.sync()
    assert opened().get(A) is None  # who begins anew finds nothing of it


OPERATIONS = st.lists(
    st.tuples(
        st.integers(0, 2),  # which of the writers
        st.sampled_from(["append", "get", "sync", "die"]),
        st.sampled_from([A, B, C]),
    ),
    max_size=30,
)


@settings(deadline=None)
@given(OPERATIONS)
def test_whatever_writers_do_they_use_one_answer(tmp_path_factory, operations):
    """Return the answers that each uses after a sync; a writer that dies is followed by another."""
    directory = tmp_path_factory.mktemp("journal")
    writers = [Journal(directory, CONTEXT) for _ in range(3)]
    touched = [set() for _ in range(3)]
    used: dict[bytes, bytes] = {}
    try:
        for number, (at, what, key) in enumerate(operations):
            writer = writers[at]
            if what == "append":
                writer.append(key, f"{number} of {at}".encode())
                touched[at].add(key)
            elif what == "get" and writer.get(key) is not None:
                touched[at].add(key)
            elif what == "sync":
                writer.sync()
                for each in touched[at]:
                    answer = writer.get(each)
                    assert answer is not None
                    assert used.setdefault(each, answer) == answer
            elif what == "die":
                writer.close()
                writers[at] = Journal(directory, CONTEXT)
                touched[at] = set()
        last = Journal(directory, CONTEXT)
        writers.append(last)
        assert {key: last.get(key) for key in used} == used
    finally:
        for writer in writers:
            writer.close()


def entries(path):
    """Where the file's entries begin."""
    data, at = path.read_bytes(), journal_format.FileFormat.header_bytes
    starts = []
    while at < len(data):
        starts.append(at)
        (length,) = struct.unpack_from("<I", data, at + 4)
        at += journal_format.FileFormat.head_bytes + length
    return starts


def test_whatever_a_torn_file_ends_with_the_answers_before_it_count(opened, tmp_path):
    one = opened()
    for key in (A, B, C):
        one.append(key, key * 3)
    (path,) = files(tmp_path, ".open")
    whole, starts = path.read_bytes(), entries(path)
    one.close()
    path.unlink()
    for size in range(len(whole)):
        directory = tmp_path / f"cut-{size}"
        directory.mkdir()
        (directory / path.name).write_bytes(whole[:size])
        torn = opened(directory=directory)
        known = [key for key in (A, B, C) if torn.get(key) is not None]
        assert known == [A, B, C][: sum(start <= size for start in [*starts[1:], len(whole)])]
        # And it is written on to, by itself or another, as if the rest had not been begun.
        torn.append(C, b"new")
        torn.sync()
        again = opened(directory=directory)
        assert again.get(C) == (b"new" if C not in known else C * 3)
        assert [again.get(key) for key in known] == [key * 3 for key in known]
        torn.close()
        again.close()


def test_an_entry_that_comes_in_two_writes_is_read_when_it_is_whole(opened, tmp_path):
    one = opened()
    one.append(A, b"a")
    one.append(B, b"bbbb")
    (path,) = files(tmp_path, ".open")
    whole = path.read_bytes()
    path.unlink()
    path.write_bytes(whole[:-2])
    other = opened()
    assert (other.get(A), other.get(B)) == (b"a", None)
    path.write_bytes(whole)
    assert other.get(B) == b"bbbb"


@pytest.mark.parametrize("synced", [False, True])
def test_no_flipped_bit_makes_an_answer(opened, tmp_path, synced, caplog):
    one = opened()
    for key in (A, B, C):
        one.append(key, key * 2)
    if synced:
        one.sync()
    one.close()
    (path,) = files(tmp_path, ".answers" if synced else ".open")
    whole = path.read_bytes()
    starts = [*entries(path), len(whole)]
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        directory = tmp_path / str(at)
        directory.mkdir()
        (directory / path.name).write_bytes(damaged)
        caplog.clear()
        journal = opened(directory=directory)
        found = [journal.get(key) for key in (A, B, C)]
        journal.close()
        hit = [start <= at < stop for start, stop in pairwise(starts)]
        header = at < starts[0]  # nothing of it counts then
        hit = [header or each for each in hit]
        assert found == [
            None if lost else key * 2 for key, lost in zip((A, B, C), hit, strict=True)
        ]
        if synced or header or not hit[-1]:  # else it is as if its writer had died there
            assert "calls whose answers it held are made again" in caplog.text


@pytest.mark.parametrize("where", ["another journal", "this file"])
def test_entries_within_a_torn_entry_are_none(opened, tmp_path, where):
    """Whatever an answer holds, be it what was once read from a journal."""
    other = opened(directory=tmp_path / "other") if where == "another journal" else opened()
    other.append(B, b"within")
    (path,) = files(tmp_path, ".open")
    held = path.read_bytes()
    entry = held[entries(path)[0] :]
    if where == "this file":
        held = held.replace(entry, b"?" * len(entry))  # what is whole counts, where it stands
        path.write_bytes(held)
    one = opened() if where == "another journal" else other
    one.append(A, entry * 3)
    one.append(C, b"behind")
    one.close()
    (path,) = files(tmp_path / "a", ".open")
    torn = bytearray(path.read_bytes())
    torn[-len(entry) - 100] ^= 1
    path.write_bytes(torn)
    journal = opened()
    assert [journal.get(key) for key in (A, B, C)] == [None, None, b"behind"]


def test_a_scan_takes_time_in_proportion_to_the_file(opened, tmp_path, monkeypatch):
    """Though an answer be full of what looks like the beginnings of large ones."""
    one = opened()
    head = struct.pack("<4sI", journal_format._ENTRY_MAGIC, 40_000)
    one.append(A, head * 10_000)
    one.append(B, b"behind")
    one.close()
    (path,) = files(tmp_path, ".open")
    torn = bytearray(path.read_bytes())
    torn[100] ^= 1
    path.write_bytes(torn)
    summed = []
    form = journal_format.FileFormat
    real = form._sum
    monkeypatch.setattr(
        form, "_sum", lambda self, data: summed.append(len(data)) or real(self, data)
    )
    assert opened().get(B) == b"behind"
    assert sum(summed) < 8 * len(torn)


def test_an_answer_that_is_damaged_after_it_was_found_is_none(opened, tmp_path, caplog):
    one = opened()
    one.append(A, b"answer")
    one.sync()
    (path,) = files(tmp_path, ".answers")
    data = path.read_bytes()
    path.write_bytes(data[:-1] + b"?")
    assert one.get(A) is None
    assert f"{path} is damaged at byte 40" in caplog.text
    one.append(A, b"again")
    one.sync()
    assert one.get(A) == opened().get(A) == b"again"


def test_answers_to_others_are_none(opened, caplog):
    one = opened()
    one.append(A, b"a")
    one.sync()
    one.append(B, b"b")
    other = opened(context=b"some other calls")
    assert (other.get(A), other.get(B)) == (None, None)
    assert caplog.text.count("belongs to other calls") == 2
    other.append(A, b"other's")
    other.sync()
    assert (other.get(A), one.get(A)) == (b"other's", b"a")


def test_files_of_others_are_passed_over(opened, tmp_path):
    directory = tmp_path / "a" / "b"
    directory.mkdir(parents=True)
    for name in (".nfs0001", "1.answers", "x.open", "answers", "0" * 16 + ".tmp"):
        (directory / name).write_bytes(b"?")
    journal = opened()
    journal.append(A, b"a")
    journal.sync()
    assert opened().get(A) == b"a"


def test_what_is_appended_is_durable_within_a_second(opened, monkeypatch):
    now, synced = 100.0, []
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    monkeypatch.setattr(module, "_sync_data", lambda file: synced.append(now))
    journal = opened()
    monkeypatch.setattr(module, "sync_directory", lambda path: synced.append(path.name))
    for key in range(5):
        journal.append(bytes([key]) * 16, b"")
        now += 0.75
    # The directory as well, or the host would come back without the file, but once.
    assert synced == [101.5, "b", 103.0]


def test_a_file_that_grows_large_is_synced(opened, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_SEGMENT_BYTES", 100)
    journal = opened()
    journal.append(A, b"a" * 100)
    journal.append(B, b"b")
    assert len(files(tmp_path, ".answers")) == 1
    journal.sync()
    assert [opened().get(key) for key in (A, B)] == [b"a" * 100, b"b"]


def test_what_was_used_takes_no_memory(opened):
    journal = opened()
    journal.append(A, b"a")
    journal.sync()
    journal.forget([A])
    assert not journal._decided
    assert opened().get(A) == b"a"


def test_what_is_no_key_is_refused(opened):
    with pytest.raises(ValueError, match="the call, must have 16 bytes, got 5"):
        opened().append(b"short", b"")


def test_a_context_of_another_size_is_refused(tmp_path):
    with pytest.raises(ValueError, match="kind of calls, must have 16 bytes, got 3"):
        Journal(tmp_path, b"abc")


def test_an_answer_that_is_too_large_is_refused(opened, monkeypatch):
    monkeypatch.setattr(module, "MOST_BYTES", 5)
    opened().append(A, b"1234")
    with pytest.raises(ValueError, match="data must have less than 5 bytes, got 5"):
        opened().append(A, b"12345")


WRITER = """
import os, sys
from ackcore._files.journal import Journal
journal = Journal(sys.argv[1], b"what is asked of")
for number in range(10**6):
    key = number.to_bytes(16, "little")
    if journal.get(key) is None:
        journal.append(key, f"{number} by {os.getpid()}".encode())
    print(number, flush=True)
    if number % 7 == 0:
        journal.sync()
"""


def test_a_writer_that_is_killed_leaves_all_that_it_said_it_had(tmp_path, opened):
    """By SIGKILL, anywhere; and the next one goes on where it was."""
    said = 0
    for _ in range(3):
        size = said + 50  # a writer is ahead of what is read of it
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(module.__file__).parents[2])},
        ) as process:
            for line in process.stdout:
                if int(line) == size:
                    break
            process.send_signal(signal.SIGKILL)
            rest = process.stdout.read().split()
        said = max([size, *map(int, rest)])
        journal = opened(directory=tmp_path)
        answers = [journal.get(number.to_bytes(16, "little")) for number in range(said + 1)]
        assert None not in answers
    writers = {int(answer.split()[-1]) for answer in answers}
    assert len(writers) == 3  # what one had was taken by those after it, and not made again


RACER = """
import sys
from ackcore._files.journal import Journal
journal = Journal(sys.argv[1], b"what is asked of")
sys.stdin.read(1)  # until all are there
for batch in range(40):
    keys = [(batch * 5 + at).to_bytes(16, "little") for at in range(5)]
    for key in keys:
        if journal.get(key) is None:
            journal.append(key, sys.argv[2].encode())
    journal.sync()
    print(*(journal.get(key).decode() for key in keys))
"""


def test_writers_that_race_use_one_answer(tmp_path):
    """Real processes, with one file system between them."""
    environment = {**os.environ, "PYTHONPATH": str(Path(module.__file__).parents[2])}
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(tmp_path), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for name in "abc"
    ]
    for racer in racers:
        racer.stdin.write("\n")
        racer.stdin.flush()
    used = [racer.communicate(timeout=120)[0] for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0, 0]
    assert used[0] == used[1] == used[2]
    assert len(used[0].split()) == 200


def test_a_file_whose_header_was_not_written_is_removed(opened, tmp_path, monkeypatch):
    """Entries behind it would be answers to this writer alone."""
    one, real, failing = opened(), module._write_all, [OSError("no space")]

    def fails(descriptor, data):
        if failing:
            os.write(descriptor, data[:7])
            raise failing.pop()
        real(descriptor, data)

    monkeypatch.setattr(module, "_write_all", fails)
    with pytest.raises(OSError, match="no space"):
        one.append(A, b"a")
    assert not files(tmp_path, ".open")
    one.append(B, b"b")
    one.sync()
    assert opened().get(B) == one.get(B) == b"b"


def test_a_segment_does_not_grow_when_its_sync_fails_behind_the_link(opened, tmp_path, monkeypatch):
    one = opened()
    one.append(A, b"a")
    with monkeypatch.context() as patched:
        patched.setattr(module, "sync_directory", failing("too slow"))
        with pytest.raises(OSError, match="too slow"):
            one.sync()
    [segment] = files(tmp_path, ".answers")
    before = segment.read_bytes()
    one.append(B, b"b")
    one.sync()
    assert segment.read_bytes() == before
    assert [opened().get(key) for key in (A, B)] == [b"a", b"b"]


def test_a_file_system_without_links_is_refused(opened, monkeypatch):
    """A rename would replace the segment that another has just linked."""
    one = opened()
    one.append(A, b"a")
    monkeypatch.setattr(os, "link", failing("not permitted", errno.EPERM))
    with pytest.raises(OSError, match="needs a file system with hard links; put the checkpoint"):
        one.sync()


def failing(text, number=errno.EIO):
    def fails(*arguments):
        raise OSError(number, text)

    return fails
