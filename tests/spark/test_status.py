"""How a query stands, read from its checkpoint: the figures, and that nobody notices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from hashlib import blake2b
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from checkpoints import OPEN, Killer, ask, damage_head, died, records, run_one
from worlds import World, fails

from ackcore.spark.base.errors import CheckpointCorrupt, CheckpointFormat, StateError
from ackcore.spark.base.lock import holder_of
from ackcore.spark.base.schemas import REASON_TYPE
from ackcore.spark.checkpoint import progress_log
from ackcore.spark.checkpoint.progress_log import ProgressLog, read_progress
from ackcore.spark.dead_letters.store import DeadLetters
from ackcore.spark.engine.progress import Counts, Percentiles, Progress
from ackcore.spark.inspect import status as statuses
from ackcore.spark.inspect.reason_counts import AGES_MS, ReasonCount
from ackcore.spark.inspect.status import read_status
from ackcore.topology.tuples import Reason

pytestmark = pytest.mark.usefixtures("no_syncing")


def at(now_ms):
    return lambda: now_ms


def test_a_checkpoint_on_which_nothing_ran(tmp_path):
    with OPEN(tmp_path / "c"):
        status = read_status(tmp_path / "c", clock=at(7))
    assert (status.counts, status.last_done, status.under_way) == (Counts(), None, None)
    assert (status.waiting.records, status.dead.letters, status.batches) == (0, 0, ())
    assert status.checkpoint == str(tmp_path / "c")
    assert (status.kind, status.at_ms, status.created_ms) == ("batch", 7, 0)
    assert json.loads(json.dumps(status.to_json()))["counts"]["balanced"]


def test_what_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no ackcore/head\.json in it"):
        read_status(tmp_path)


def test_the_figures_are_those_of_the_driver(tmp_path):
    world = World(tmp_path, behaves=fails("a", "b", times=99), settings={"max_attempts": 2})
    began = world.now_ms
    first, _ = world.process(0, ["a", "b", "c"])
    world.now_ms += 400_000
    second, counts = world.process(1, ["d"])
    world.now_ms += 5
    third, counts = world.process(2, ["a", "e"])
    status = read_status(tmp_path, batches=2, clock=at(world.now_ms + 1000))
    assert status.counts == counts
    assert (counts.dead, counts.waiting, status.last_done, status.under_way) == (2, 1, 2, None)
    assert [each.progress for each in status.batches] == [second, third]
    assert status.batches[-1].at_ms == world.now_ms
    assert status.waiting.records == 1
    assert status.waiting.oldest_ms == world.now_ms
    assert 0 < status.waiting.next_due_ms - world.now_ms <= 10_000
    assert status.waiting.ages == (1, 0, 0, 0, 0, 0, 0)
    assert status.waiting.reasons == (
        ReasonCount("lines", "upper", "ValueError", "no a", 1, world.now_ms, world.now_ms),
    )
    assert first.records == 3
    assert began < world.now_ms


def test_waiting_records_are_counted_by_reason_and_age(tmp_path):
    rows = records(0, 60)
    first_ms = np.repeat([0, *(age + 1 for age in AGES_MS)], 10)[:60]
    now_ms = AGES_MS[-1] + 1000
    reasons = [
        Reason("split", "ValueError", f"no\x1f{row}", final=False, after_ms=row)._asdict()
        if row % 3
        else Reason("call", "Unavailable", "down\nfor now", counts=False)._asdict()
        for row in range(60)
    ]
    rows = rows.set_column(3, rows.schema.field(3), pa.array(now_ms - first_ms))
    rows = rows.set_column(5, rows.schema.field(5), pa.array(reasons, REASON_TYPE))
    with OPEN(tmp_path / "c") as state:
        run_one(state, 0, {"lines": rows.slice(0, 50), "clicks": rows.slice(50)})
    waiting = read_status(tmp_path / "c", clock=at(now_ms)).waiting
    assert waiting.ages == (10, 10, 10, 10, 10, 10, 0)
    found = {(each.spout, each.component, each.error_type): each for each in waiting.reasons}
    assert {key: each.records for key, each in found.items()} == {
        ("lines", "split", "ValueError"): 33,
        ("lines", "call", "Unavailable"): 17,
        ("clicks", "split", "ValueError"): 7,
        ("clicks", "call", "Unavailable"): 3,
    }
    assert waiting.reasons[0].records == 33
    assert found["lines", "call", "Unavailable"].message == "down\nfor now"
    assert found["lines", "split", "ValueError"].message == "no\x1f1"


def test_dead_letters_are_counted_but_for_those_sent_again(tmp_path):
    slow, bad = Reason("enrich", "TimeoutError", "3 s"), Reason("split", "ValueError", "no")
    with OPEN(tmp_path / "c") as state:
        letters = DeadLetters.checked(tmp_path / "c", state.deployment_key)()
        dead = died(0, 5, (bad, bad, slow))
        letters.write(0, {"lines": dead})
        run_one(state, 0, dead={"lines": dead})
    counted = read_status(tmp_path / "c").dead
    assert (counted.letters, counted.sent) == (5, 0)
    assert [(each.component, each.records) for each in counted.reasons] == [
        ("split", 4),
        ("enrich", 1),
    ]


def test_a_micro_batch_under_way_and_requests(tmp_path):
    with OPEN(tmp_path / "c") as state:
        run_one(state, 0, {"lines": records(0, 3, due_ms=5)}, now_ms=3)
        ask(tmp_path / "c")
        assert read_status(tmp_path / "c").requests == 1
        state.write_plan(state.make_plan(1, 6))
        status = read_status(tmp_path / "c")
        assert status.requests == 0  # the plan has taken it
        under_way = status.under_way
        assert (under_way.number, under_way.planned_ms, under_way.due) == (1, 6, 2)
        assert (under_way.decided, status.last_done) == (False, 0)


def test_nothing_is_locked_and_nothing_is_written(tmp_path, monkeypatch):
    world = World(tmp_path, behaves=fails("a"))
    world.process(0, ["a", "b"])
    ask(tmp_path)
    monkeypatch.setattr("fcntl.flock", None)
    killer = Killer()
    killer.arm(None)
    try:
        status = read_status(tmp_path)
    finally:
        killer.disarm()
    assert killer.count == 0
    assert (status.waiting.records, status.requests) == (1, 1)


def test_what_is_pruned_meanwhile_is_read_again(tmp_path, monkeypatch):
    world = World(tmp_path, behaves=fails(*"abcdef"))
    world.process(0, ["a"])
    left = [1, 2, 3]
    state = statuses._state

    def later(*args):
        while left:  # the names were read, and now they are of long ago
            world.now_ms += 400_000
            world.process(left.pop(0), ["b"])
        return state(*args)

    monkeypatch.setattr(statuses, "_state", later)
    status = read_status(tmp_path)
    assert status.last_done == 3
    assert status.counts.batches == 4
    assert status.waiting.records == status.counts.waiting == 1


def test_damage_is_told_of(tmp_path):
    with OPEN(tmp_path / "c") as state:
        run_one(state, 0, {"lines": records(0, 3)})
    path = damage_head(tmp_path / "c", lambda whole: whole[:-5])
    with pytest.raises(CheckpointCorrupt, match=r"head\.json is damaged"):
        read_status(tmp_path / "c")
    path.unlink()  # the one before it counts again
    (table,) = (tmp_path / "c/ackcore/state").glob("*.waiting-*.arrow")
    good = table.read_bytes()
    for at in range(0, len(good), 5):  # its checksum is not looked at
        table.write_bytes(good[:at] + bytes([good[at] ^ 255]) + good[at + 1 :])
        with suppress(StateError):
            read_status(tmp_path / "c")
    table.write_bytes(good[:200])
    with pytest.raises(CheckpointCorrupt, match=r"waiting-lines.*is damaged"):
        read_status(tmp_path / "c")
    table.write_bytes(good)

    def newer(head):
        line = head.partition(b"\n")[0].replace(b'"format":', b'"format":9')
        digest = blake2b(line, digest_size=16).hexdigest().encode()
        return line + b"\nblake2b %s\n" % digest

    damage_head(tmp_path / "c", newer)
    with pytest.raises(CheckpointFormat, match="format 9"):
        read_status(tmp_path / "c")


# who holds it


def test_the_holder_of_a_lock_is_told_without_asking_for_it(tmp_path):
    path = tmp_path / "c/ackcore/lock"
    assert holder_of(path) is None
    with OPEN(tmp_path / "c"):
        assert read_status(tmp_path / "c").holder == (f"pid {os.getpid()} on {os.uname()[1]}", True)
    assert holder_of(path).holds is False
    path.write_text("pid 1 on another-host\n00\n")
    assert holder_of(path) == ("pid 1 on another-host", None)


def test_the_lock_of_another_process(tmp_path):
    code = (
        "import sys; from pathlib import Path; from ackcore.spark.base.lock import Lock; "
        "lock = Lock(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        assert holder_of(tmp_path / "lock") == (f"pid {holder.pid} on {os.uname()[1]}", True)
        holder.stdin.close()
    assert holder_of(tmp_path / "lock").holds is False


# the log of micro-batches


def test_progress_is_kept_whole(tmp_path):
    progress = Progress(
        3, 10, 9, latency_s=Percentiles(1, 2, 3), steps_s={"run": 5.5}, lag={"k": np.int64(4)}
    )
    log = ProgressLog(tmp_path)
    log.append({"at_ms": 5, **progress.to_json()})
    (line,) = read_progress(tmp_path, 10)
    assert Progress.from_json(line) == progress
    assert line["at_ms"] == 5


def test_a_line_that_was_cut_short_is_passed_over(tmp_path):
    ProgressLog(tmp_path).append({"batch_id": 1})
    path = tmp_path / "progress.jsonl"
    path.write_bytes(path.read_bytes() + b'{"batch_id": 2, "rec')
    ProgressLog(tmp_path).append({"batch_id": 3})
    ProgressLog(tmp_path).append({"batch_id": 1, "again": True})
    assert read_progress(tmp_path, 9) == [{"batch_id": 1, "again": True}, {"batch_id": 3}]
    assert read_progress(tmp_path, 1) == [{"batch_id": 3}]
    assert read_progress(tmp_path, 0) == []


def test_the_log_does_not_grow_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(progress_log, "_FULL_BYTES", 1000)
    log = ProgressLog(tmp_path)
    for number in range(500):
        log.append({"batch_id": number})
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 2100
    numbers = [line["batch_id"] for line in read_progress(tmp_path, 1000)]
    assert numbers == list(range(500 - len(numbers), 500))
    assert len(numbers) > 40


def test_of_a_long_log_only_its_end_is_read(tmp_path, monkeypatch):
    parsed = []
    loads = lambda text: parsed.append(text) or json.loads(text)  # noqa: E731
    monkeypatch.setattr(progress_log, "json", SimpleNamespace(loads=loads, dumps=json.dumps))
    log = ProgressLog(tmp_path)
    for number in range(3000):
        log.append({"batch_id": number, "filled up": "x" * 480})
    assert {path.name for path in tmp_path.iterdir()} == {"progress.jsonl", "progress.1.jsonl"}
    numbers = [line["batch_id"] for line in read_progress(tmp_path, 100)]
    assert numbers == list(range(2900, 3000))
    assert len(parsed) < 600
    assert next(line["batch_id"] for line in read_progress(tmp_path, 1500)) == 1500


def test_a_log_that_cannot_be_written_costs_one_warning(tmp_path, caplog):
    log = ProgressLog(tmp_path / "absent")
    log.append({"batch_id": 1})
    log.append({"batch_id": 2})
    assert len(caplog.records) == 1
    assert read_progress(tmp_path / "absent", 3) == []
