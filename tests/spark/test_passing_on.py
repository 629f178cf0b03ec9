"""A large file leaves the page cache as it is written, and is durable before it has its name."""

from __future__ import annotations

import os

import pytest

from ackcore.spark.base import checksummed
from ackcore.spark.base.checksummed import NamedByChecksum


@pytest.fixture
def calls(monkeypatch):
    """The file operations, in order: the bytes written at each."""
    monkeypatch.setattr(checksummed, "_CACHED", 100)
    monkeypatch.setattr(checksummed, "_UNSYNCED", 400)
    found = []

    def noted(module, name):
        real = getattr(module, name)

        def call(first, *others):
            file = first if isinstance(first, int) else None
            size = None if file is None else os.fstat(file).st_size
            found.append((name, size))
            return real(first, *others)

        monkeypatch.setattr(module, name, call)

    noted(os, "fsync")
    noted(os, "posix_fadvise")
    noted(os, "replace")
    return found


def write(directory, sizes, **settings):
    file = NamedByChecksum(directory, "rows", "arrow", **settings)
    for size in sizes:
        file.sink.write(b"x" * size)
    path = directory / file.finish()
    assert path.stat().st_size == sum(sizes)
    named = checksummed.checksum_in(path)
    assert checksummed.checksum_of(path.read_bytes(), len(named)) == named


def test_a_large_file_waits_for_the_disk_now_and_then(tmp_path, calls):
    write(tmp_path, [60] * 16, large=True)
    dropped = [("posix_fadvise", n) for n in range(120, 481, 120)]
    again = [("posix_fadvise", n) for n in range(600, 961, 120)]
    assert calls[:12] == [
        *dropped, ("fsync", 480), ("posix_fadvise", 480),
        *again, ("fsync", 960), ("posix_fadvise", 960),
    ]  # fmt: skip


def test_what_it_was_last_given_is_on_the_disk_and_dropped_before_it_has_its_name(tmp_path, calls):
    write(tmp_path, [60, 60, 7], large=True)
    before = calls[: calls.index(("replace", None))]
    assert before == [("posix_fadvise", 120), ("fsync", 127), ("posix_fadvise", 127)]


def test_a_small_one_stays_in_memory(tmp_path, calls):
    write(tmp_path, [60, 7], large=True)
    assert [name for name, _ in calls[:2]] == ["fsync", "replace"]


def test_others_are_synced_once(tmp_path, calls):
    write(tmp_path, [60] * 16)
    assert calls[0] == ("fsync", 960)
    assert "posix_fadvise" not in dict(calls)
