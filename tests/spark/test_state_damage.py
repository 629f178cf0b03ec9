"""Checkpoints that are damaged, or cannot be written: what is wrong is named."""

from __future__ import annotations

import errno
import os
import re
import shutil
from dataclasses import replace
from functools import partial

import pytest
from checkpoints import OPEN, DeadLetters, decision, died, records, roots, run_one, store_of

from ackcore.spark.base import checksummed, errors
from ackcore.spark.base.errors import (
    CheckpointCorrupt,
    CheckpointFormat,
    CheckpointReadOnly,
    StateError,
)
from ackcore.spark.base.schemas import FORMAT
from ackcore.spark.checkpoint.records import HEAD
from ackcore.spark.checkpoint.shared_record import SharedRecord
from ackcore.spark.stores.local import LocalStore
from ackcore.spark.stores.run_files import read_table_at


def made(checkpoint):
    """Micro-batches 0 to 2 done, 3 decided."""
    with OPEN(checkpoint) as state:
        for number in range(3):
            run_one(state, number, {"lines": records(number, 2)}, {"clicks": records(9, 1)})
        state.prune(2)
        state.write_plan(state.make_plan(3, 0))
        last = {"lines": records(5, 2)}, {"clicks": records(9, 1)}
        state.write_decision(decision(3, *last, nonacked=roots(4)))
    return checkpoint / "ackcore"


TABLES = ["state/3.*.waiting-lines", "state/3.*.dead-clicks", "state/3.*.nonacked"]


def found(root, name):
    """The file, whatever checksum is in its name; of the head the newest version."""
    return max((root / name).iterdir()) if name == HEAD else next(root.glob(f"{name}.*.arrow"))


def read(path, name):
    if name != HEAD:
        return read_table_at(path)
    return checksummed.record_in(path.read_bytes(), path, HEAD)


@pytest.mark.parametrize("name", [HEAD, *TABLES])
def test_a_file_cut_or_changed_anywhere_is_told(checkpoint, name):
    root = made(checkpoint)
    path = found(root, name)
    whole = path.read_bytes()
    # Not every byte of a table: one checksum is over all of them.
    places = range(0, len(whole), 1 + len(whole) // 400)
    wrong = [whole[:size] for size in places]
    wrong += [whole[:n] + bytes([whole[n] ^ 1]) + whole[n + 1 :] for n in places]
    wrong += [whole + b"\n", whole + whole, b"\0" * len(whole)]
    told = root / HEAD if name == HEAD else path
    for n, data in enumerate(wrong):
        path.write_bytes(data)
        # All by the reader, some by opening the checkpoint, which takes longer.
        for look in (partial(read, path, name), partial(OPEN, checkpoint))[: 1 + (n % 97 == 0)]:
            with pytest.raises(CheckpointCorrupt, match=re.escape(str(told))) as caught:
                look()
            assert "Restore the whole checkpoint" in str(caught.value)
    path.write_bytes(whole)
    OPEN(checkpoint).close()


@pytest.mark.parametrize("name", TABLES)
def test_a_missing_table_is_told(checkpoint, name):
    path = found(made(checkpoint), name)
    path.unlink()
    with pytest.raises(CheckpointCorrupt, match="is missing") as caught:
        OPEN(checkpoint)
    assert str(path) in str(caught.value)


def test_all_damaged_tables_are_told_at_once_and_each_is_read_once(checkpoint, monkeypatch):
    root = made(checkpoint)
    paths = [found(root, name) for name in TABLES]
    read, asked = LocalStore.read, []
    monkeypatch.setattr(LocalStore, "read", lambda *of: (asked.append(of[1]), read(*of))[1])
    OPEN(checkpoint).close()
    assert sorted(asked) == sorted(f"state/{path.name}" for path in paths)
    for path in paths[:2]:
        path.unlink()
    paths[2].write_bytes(b"x")
    said = r"^3 files of the checkpoint are damaged: "
    with pytest.raises(CheckpointCorrupt, match=said) as all_:
        OPEN(checkpoint)
    assert all(str(path) in str(all_.value) for path in paths)
    assert str(all_.value).count("is missing, though") == 2
    assert str(all_.value).count("Restore the whole checkpoint") == 1
    monkeypatch.setattr(errors, "_MOST_FILES", 1)
    with pytest.raises(CheckpointCorrupt, match=r"\.arrow is .*; and 2 more\. Restore the whole"):
        OPEN(checkpoint)


def test_a_record_that_is_missing_is_told(checkpoint):
    """A head that somebody edited by hand, with a checksum of its new content."""
    root = made(checkpoint)
    for name, told in {
        "batches/2.done": "batches/2.done is missing",
        "batches/3.plan": "batches/3.plan is missing",
        "batches/2.decision": "batches/2.decision is missing",
        "meta.json": "meta.json is missing, though batches/",
    }.items():
        head = SharedRecord(LocalStore(root), HEAD)
        body = head.load()
        left = {key: of for key, of in body["records"].items() if key != name}
        head.replace(lambda _, left=left, body=body: {**body, "records": left})
        with pytest.raises(CheckpointCorrupt, match=told):
            OPEN(checkpoint)
        head.load()
        head.replace(lambda _, body=body: body)
    OPEN(checkpoint).close()


def test_a_head_that_is_missing_is_told(checkpoint):
    root = made(checkpoint)
    shutil.rmtree(root / HEAD)
    with pytest.raises(CheckpointCorrupt, match=r"meta.json is missing, though state/"):
        OPEN(checkpoint)
    # Of a checkpoint all of whose records are ACKED nothing else may be left.
    shutil.rmtree(root / "state")
    (root / "progress.jsonl").write_text("{}\n")
    with pytest.raises(CheckpointCorrupt, match=r"meta.json is missing, though "):
        OPEN(checkpoint)


def test_a_head_that_cannot_be_read_is_told(checkpoint):
    path = found(made(checkpoint), HEAD)
    path.unlink()
    path.symlink_to(path.name)
    with pytest.raises(StateError, match="cannot be read: "):
        OPEN(checkpoint)


@pytest.mark.parametrize("other", [FORMAT - 1, FORMAT + 1])
def test_another_format_is_told(checkpoint, monkeypatch, other):
    monkeypatch.setattr(checksummed, "FORMAT", other)
    made(checkpoint)
    with OPEN(checkpoint) as state:
        DeadLetters.checked(checkpoint, state.deployment_key)().write(0, {"lines": died(0, 1)})
    monkeypatch.undo()
    said = f"json has format {other}, .* only format {FORMAT}: .* Install that version, or use"
    for ask in (lambda: OPEN(checkpoint), lambda: store_of(checkpoint).spouts()):
        with pytest.raises(CheckpointFormat, match=said):
            ask()


def test_a_plan_that_counts_other_rows_than_there_are_is_told(checkpoint):
    with OPEN(checkpoint) as state:
        run_one(state, 0, {"lines": records(0, 3)})
        plan = replace(state.make_plan(1, 1001), due=7)
        said = r"1.plan has 7 due rows, .* micro-batch 0 has 2"
        with pytest.raises(CheckpointCorrupt, match=said):
            state.split_due(plan)


# -- no writing -------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_read_only_checkpoint_is_told(checkpoint, monkeypatch, code):
    made(checkpoint)
    real = os.open

    def refuse(path, flags, *rest, **more):
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(code, os.strerror(code), path)
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(CheckpointReadOnly, match="lock cannot be written"):
        OPEN(checkpoint)


def test_a_checkpoint_that_becomes_read_only_is_told(checkpoint, monkeypatch):
    with OPEN(checkpoint) as state:
        plan = state.make_plan(0, 0)

        def refuse(*_):
            raise OSError(errno.EROFS, "Read-only file system")

        monkeypatch.setattr(os, "link", refuse)
        with pytest.raises(CheckpointReadOnly, match=r"head.json.* cannot be written"):
            state.write_plan(plan)


def test_a_full_disk_is_told_and_what_was_recorded_stands(checkpoint, monkeypatch):
    with OPEN(checkpoint) as state:
        run_one(state, 0, {"lines": records(0, 2)})
        state.write_plan(state.make_plan(1, 0))

        def full(_):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        said = r"1.e1.waiting-lines.* could not be written: No space left"
        with pytest.raises(StateError, match=said):
            state.write_decision(decision(1, {"lines": records(0, 3)}))
        monkeypatch.undo()
        assert state.decision(1) is None
        state.write_decision(decision(1, {"lines": records(0, 3)}))
    with OPEN(checkpoint) as state:
        assert len(state.waiting(1)["lines"]) == 3


def test_a_file_where_the_checkpoint_must_be_is_told(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(StateError, match=r"file.* must be a directory"):
        OPEN(tmp_path / "file")
