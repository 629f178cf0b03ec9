"""The committed position is the first that is not done, and survives."""

import errno
import fcntl
import json
import os
import signal
import threading

import numpy as np
import pytest

from ackcore.dispatch.checkpoint import Checkpoint, CheckpointError


def test_what_was_committed_is_there_again(tmp_path):
    path = tmp_path / "new" / "rt"
    with Checkpoint(path) as checkpoint:
        assert checkpoint.committed == 0
        checkpoint.commit(0)
        checkpoint.commit(7)
        with pytest.raises(
            ValueError, match="must be at least 7, the committed position, got 6; to"
        ):
            checkpoint.commit(6)
    with Checkpoint(path) as checkpoint:
        assert checkpoint.committed == 7
    assert sorted(file.name for file in path.parent.iterdir()) == ["rt", "rt.lock"]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b'{"version": 1, "committed": 5, "crc32": 1}',
        b'{"version": 1, "committed": "5", "crc32": 1}',
        b"\xff\xfe",
    ],
)
def test_a_damaged_file_is_named_and_not_taken_for_the_beginning(tmp_path, text):
    path = tmp_path / "rt"
    path.write_bytes(text)
    with pytest.raises(CheckpointError, match=r"rt is damaged: .*; delete it to start"):
        Checkpoint(path)
    path.unlink()
    Checkpoint(path).close()  # the lock was given back


def test_a_later_version_is_not_guessed_at(tmp_path):
    path = tmp_path / "rt"
    path.write_text(json.dumps({"version": 2, "committed": 5, "crc32": 5}))
    with pytest.raises(CheckpointError, match="has version 2, and this ackcore reads version 1"):
        Checkpoint(path)


def test_a_file_system_without_locks_is_not_taken_for_another_dispatcher(tmp_path, monkeypatch):
    def refuses(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", refuses)
        with pytest.raises(OSError, match="No locks available"):
            Checkpoint(tmp_path / "rt")
    Checkpoint(tmp_path / "rt").close()


def test_a_forked_process_does_not_hold_the_lock(tmp_path):
    """A producer that is killed leaves its checkpoint free, whatever its workers go on with."""
    reader, writer = os.pipe()
    hears, says = os.pipe()
    producer = os.fork()
    if producer == 0:
        held = Checkpoint(tmp_path / "rt")  # noqa: F841 - open until it is killed
        if os.fork() == 0:  # its worker, which stays until this test is through, or dead
            os.close(writer)
            os.write(says, b"forked")
            os.read(reader, 1)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(reader)
    try:
        os.waitpid(producer, 0)
        assert os.read(hears, 6) == b"forked"
        Checkpoint(tmp_path / "rt").close()
    finally:
        for end in (writer, hears, says):
            os.close(end)


def test_commits_of_two_threads_do_not_meet(tmp_path, monkeypatch):
    """A call goes on in its thread after its run was cancelled, and so does the last one."""
    checkpoint = Checkpoint(tmp_path / "rt")
    last = threading.Thread(target=checkpoint.commit, args=(9,))
    sync = os.fsync

    def slow(handle):
        monkeypatch.setattr("os.fsync", sync)
        last.start()
        last.join(0.2)  # it cannot go by
        sync(handle)

    monkeypatch.setattr("os.fsync", slow)
    checkpoint.commit(3)
    last.join()
    checkpoint.close()
    with Checkpoint(tmp_path / "rt") as kept:
        assert kept.committed == 9


def test_a_commit_that_cannot_be_written_leaves_the_last_one(tmp_path, monkeypatch):
    path = tmp_path / "rt"
    with Checkpoint(path) as checkpoint:
        checkpoint.commit(3)
        monkeypatch.setattr("os.fsync", lambda handle: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            checkpoint.commit(9)
        assert checkpoint.committed == 3
    with Checkpoint(path) as checkpoint:
        assert checkpoint.committed == 3


@pytest.mark.parametrize("position", [5.0, True, "5", None])
def test_a_position_that_is_no_integer_is_refused_before_it_is_written(tmp_path, position):
    with Checkpoint(tmp_path / "rt") as checkpoint:
        with pytest.raises(TypeError, match="committed must be an integer, got "):
            checkpoint.commit(position)
        assert [file.name for file in tmp_path.iterdir()] == ["rt.lock"]
        checkpoint.commit(np.int64(7))
    with Checkpoint(tmp_path / "rt") as checkpoint:
        assert checkpoint.committed == 7


def test_a_closed_checkpoint_does_not_overwrite_a_later_position(tmp_path):
    closed = Checkpoint(tmp_path / "rt")
    closed.commit(3)
    closed.close()
    with Checkpoint(tmp_path / "rt") as checkpoint:
        checkpoint.commit(10)
        with pytest.raises(CheckpointError, match="rt is closed, or belongs to the process that f"):
            closed.commit(4)
        child = os.fork()
        if child == 0:
            try:
                checkpoint.commit(11)
            except CheckpointError:
                checkpoint.close()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
    with Checkpoint(tmp_path / "rt") as checkpoint:
        assert checkpoint.committed == 10


def test_a_close_waits_for_a_running_commit(tmp_path, monkeypatch):
    checkpoint = Checkpoint(tmp_path / "rt")
    closing = threading.Thread(target=checkpoint.close)
    sync = os.fsync

    def slow(handle):
        monkeypatch.setattr("os.fsync", sync)
        closing.start()
        closing.join(0.2)
        with pytest.raises(CheckpointError, match="is open in another dispatcher"):
            Checkpoint(tmp_path / "rt")
        sync(handle)

    monkeypatch.setattr("os.fsync", slow)
    checkpoint.commit(3)
    closing.join()
    with Checkpoint(tmp_path / "rt") as kept:
        assert kept.committed == 3


def test_a_directory_that_cannot_be_synced_may_keep_the_new_position(tmp_path, monkeypatch):
    with Checkpoint(tmp_path / "rt") as checkpoint:
        checkpoint.commit(3)
        with monkeypatch.context() as patch:
            patch.setattr("ackcore.dispatch.checkpoint.sync_directory", lambda path: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                checkpoint.commit(9)
        assert checkpoint.committed == 3
    with Checkpoint(tmp_path / "rt") as checkpoint:
        assert checkpoint.committed == 9
