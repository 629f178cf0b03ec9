"""The checkpoint's lock: it ends with its process, and closing it twice closes no other file.

The system gives a number that was closed to whoever opens next.  A second close of it then hits a
file of somebody else: a sink's, a socket of Spark's, or the pipe whose end makes Spark's JVM exit.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ackcore._files.process_lock import ProcessLock
from ackcore.spark.base.errors import CheckpointInUse
from ackcore.spark.base.lock import Lock


def test_a_close_within_a_close_leaves_what_was_opened_between(tmp_path, monkeypatch):
    """The second comes while the first is in the system's call, with the number free again."""
    lock = Lock(tmp_path / "lock")
    close, closed, others = os.close, [], []

    def closing(handle):
        close(handle)
        closed.append(handle)
        if len(closed) == 1:
            others.append(os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT))
            lock.close()

    monkeypatch.setattr(os, "close", closing)
    lock.close()
    monkeypatch.undo()
    assert closed == others  # it was given the same number
    assert os.path.samestat(os.fstat(others[0]), os.stat(tmp_path / "other"))
    close(others[0])


def test_threads_that_close_one_lock_leave_what_the_others_open(tmp_path):
    names = [str(n) for n in range(4)]
    switch_interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(50):
            lock, start, others = Lock(tmp_path / "lock"), threading.Barrier(len(names)), []

            def close_and_open(name, lock=lock, start=start, others=others):
                start.wait()
                lock.close()
                others.append((name, os.open(tmp_path / name, os.O_RDWR | os.O_CREAT)))

            threads = [threading.Thread(target=close_and_open, args=(name,)) for name in names]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert sorted(name for name, _ in others) == names
            for name, other in others:
                assert os.path.samestat(os.fstat(other), os.stat(tmp_path / name))
                os.close(other)
    finally:
        sys.setswitchinterval(switch_interval)


FORKS = """
import os, sys
from pathlib import Path
from ackcore.spark.base.lock import Lock

lock = Lock(Path(sys.argv[1]))
forked, tell = os.pipe()
if os.fork() == 0:
    os.write(tell, b"!")
    sys.stdin.read()  # until the test is over
    os._exit(0)
os.read(forked, 1)
os._exit(0)
"""


def test_a_copy_that_was_forked_during_a_check_can_be_closed(tmp_path):
    """A thread of the driver has the copy's mutex, and does not exist in the forked process."""
    file = ProcessLock(tmp_path / "lock")
    mutex = file._closing
    with mutex:
        file.close_in_child()
        assert file._closing is not mutex
        file.close()
    assert not file.is_open


def test_a_path_whose_inode_number_changes_is_that_of_the_lock_unless_it_is_a_copy(
    tmp_path, monkeypatch
):
    """CIFS without numbers of its server forgets the number of a path."""
    path, stat, numbers = tmp_path / "lock", os.stat, itertools.count(1)
    lock = Lock(path)

    def forgetful(of, **how):
        found = stat(of, **how)
        return os.stat_result((found.st_mode, next(numbers), *found[2:])) if of == path else found

    monkeypatch.setattr(os, "stat", forgetful)
    for _ in range(2):
        lock.check()
    content = path.read_bytes()
    path.rename(tmp_path / "old")
    path.write_bytes(content)
    with pytest.raises(CheckpointInUse, match=r"was replaced while this driver ran, .* a copy"):
        lock.check()
    monkeypatch.undo()
    lock.close()


def test_a_process_that_the_driver_forked_does_not_hold_its_lock(tmp_path):
    """A pool's process may live on when the driver is dead."""
    path: Path = tmp_path / "lock"
    driver = subprocess.Popen([sys.executable, "-c", FORKS, str(path)], stdin=subprocess.PIPE)
    try:
        assert driver.wait() == 0
        Lock(path).close()
    finally:
        driver.communicate(b"")
