"""Many failures: tasks judge them and write them to files, and all is as if they were few."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from checkpoints import OPEN, decision, end_one, ids, records
from hypothesis import given
from hypothesis import strategies as st
from pyspark import TaskContext, cloudpickle

from ackcore.spark import dead_letters, replay, run_batch
from ackcore.spark.base import checksummed
from ackcore.spark.base.atomic import link_file
from ackcore.spark.base.checksummed import NamedByChecksum, write_batches
from ackcore.spark.base.errors import CheckpointCorrupt, StateError
from ackcore.spark.base.letter_columns import as_letters, letters_writer
from ackcore.spark.base.root_ids import in_order
from ackcore.spark.base.schemas import TRACKING, FailedFile
from ackcore.spark.checkpoint.dead_records import Dead, recorded
from ackcore.spark.checkpoint.shared_record import INDEX, SharedRecord
from ackcore.spark.checkpoint.state import State
from ackcore.spark.dead_letters import compaction, store
from ackcore.spark.dead_letters.drop import drop
from ackcore.spark.dead_letters.letter_store import Letters
from ackcore.spark.dead_letters.listing import LetterFilter, LetterId, list_letters
from ackcore.spark.dead_letters.store import DeadLetters
from ackcore.spark.engine import action, check, decide, reread, runs
from ackcore.spark.stores.opening import open_store
from ackcore.spark.stores.run_files import publish
from ackcore.spark.tasks.spout_stage import SpoutStage
from ackcore.topology import BasicBolt, Bolt, Reason, Reject, Retry, TopologyBuilder, Unavailable

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SOURCE = pa.schema([("value", pa.string())])
NUMBERS = pa.schema([("n", pa.int64()), ("text", pa.string())])


class Picky(BasicBolt):
    """By their numbers records succeed, are refused, or fail: once, for ever, or uncounted."""

    outputs = pa.schema([("n", pa.int64())])

    def execute(self, tuple, collector):
        n, attempt = tuple["n"], tuple.attempt
        kind = n % 7
        if kind == 1:
            raise Reject(f"no {n}")
        if kind == 2 and not attempt:
            raise ValueError("not at first")
        if kind == 3:
            raise ValueError(f"never {n}")
        if kind == 4 and not attempt:
            raise Retry("later", after_s=50.0)
        if kind == 5 and not attempt and n % 2 and not Path(tuple["text"]).exists():
            raise Unavailable("away")
        collector.emit((n,))


class Kept(BasicBolt):
    """Hands on what it gets."""

    outputs = pa.schema([("n", pa.int64())])

    def execute(self, tuple, collector):
        collector.emit((tuple["n"],))


def topology(spark, away, exchange=False, **settings):
    """A source that is read again by position, and one whose rows are spilled."""
    builder = TopologyBuilder()
    fixed = spark.range(0, 120, numPartitions=3).selectExpr("id AS n", f"'{away}' AS text")
    builder.spout("fixed", fixed)
    builder.spout("spilled", fixed.where("current_timestamp() > timestamp '2000-01-01'"))
    builder.bolt("picky", Picky()).shuffle("fixed").shuffle("spilled")
    if exchange:
        builder.bolt("behind", Kept()).fields("picky", "n")
    return builder.build(max_attempts=2, backoff_s=1.0, max_backoff_s=60.0, **settings)


def run_through(spark, tmp_path, inline_bytes, monkeypatch, in_run=False, **settings):
    """Run all to its end by a clock of its own; return what can be told of it."""
    monkeypatch.setattr(decide, "INLINE_BYTES", inline_bytes)
    monkeypatch.setattr(reread, "_READ_HERE", 1 << 25 if inline_bytes else 0)
    if not in_run:
        monkeypatch.setattr(runs.Runs, "_rules_in_run", lambda self, plan: None)
    now = [1_700_000_000_000]
    name = f"{inline_bytes}-{in_run}-{settings.get('exchange', False)}"
    checkpoint, away = tmp_path / name, tmp_path / f"away-{name}"

    def wait(seconds):
        now[0] += 70_000  # by then all are due
        away.touch()

    def go():
        made = topology(spark, away, **settings)
        return run_batch(
            made, spark, checkpoint, max_dead_ratio=None, clock=lambda: now[0], wait=wait
        )

    told = [go()]
    letters = dead_letters(checkpoint, spark)
    told.append(
        sorted(
            (
                row.spout,
                row.message_id,
                row.error_type,
                row.error_message,
                row.payload.n,
                row.attempts,
            )
            for row in letters.collect()
        )
    )
    if "max_waiting" in settings:
        return told
    assert replay(checkpoint, spark).records
    told.append(go())
    often = dead_letters(checkpoint, spark).groupBy("error_message", "replays").count()
    told.append(sorted(map(tuple, often.collect())))
    assert {row[1] for row in told[-1]} == {0, 1}
    made = topology(spark, away, **settings)
    sources = dict.fromkeys(("fixed", "spilled"), NUMBERS)
    with State.open(checkpoint, made, sources=sources, kind="batch") as state:
        assert state.waiting(state.last_done).rows() == 0
    return told


def test_what_tasks_write_is_what_the_driver_would(spark, tmp_path, monkeypatch):
    """When it is read again, and in the run, also in front of an exchange."""
    ways = [(1 << 17, False, False), (0, False, False), (0, True, True)]
    told = []
    for few, in_run, exchange in ways:
        with monkeypatch.context() as patch:
            told.append(run_through(spark, tmp_path, few, patch, in_run, exchange=exchange))
    assert told[1:] == told[:1] * 2
    counts, letters = told[0][:2]
    assert counts.balanced
    assert (counts.records, counts.dead) == (240, len(letters))
    assert Counter(letter[2] for letter in letters) == {"Reject": 34, "ValueError": 34}


def test_there_is_room_for_so_many_as_without_files(spark, tmp_path, monkeypatch):
    """The records given up may differ: a file of waiting records is sorted."""
    few, many = (run_through(spark, tmp_path, n, monkeypatch, max_waiting=20) for n in (1 << 17, 0))
    full = [Counter(kind for _, _, kind, *_ in told[1])["WaitingFull"] for told in (few, many)]
    assert full == [100, 100]
    assert many[0].balanced
    message = next(told[3] for told in many[1] if told[2] == "WaitingFull")
    assert message.startswith("20 records wait already (max_waiting); it failed with ")


# -- what fails while its task has it ---------------------------------------------------------


class Failing(Bolt):
    """Fails every record at first, and some of them for ever; ``late``, when it has emitted."""

    outputs = pa.schema([("n", pa.int64())])

    def __init__(self, late):
        self.late = late

    def execute(self, tuple):
        n = tuple["n"]
        fails = not tuple.attempt or n % 3 == 0
        if self.late or not fails:
            self.collector.emit((n,), anchors=tuple)
        if fails:
            raise ValueError(f"{n} at attempt {tuple.attempt}")
        self.collector.ack(tuple)


class KilledBehindItsFiles(SpoutStage):
    """The worker of the second task dies when its files are written, and nobody knows of them."""

    def __call__(self, batches):
        context = TaskContext.get()
        for result in super().__call__(batches):
            if context.partitionId() == 1 and context.attemptNumber() == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            yield result


WAYS = ["narrow", "in front of an exchange"]


@pytest.fixture(params=WAYS)
def failing(request, spark, tmp_path, monkeypatch):
    """``failing(name)`` runs a batch all of which fails; returns its counts, letters and rows."""
    monkeypatch.setattr(decide, "INLINE_BYTES", 0)
    now = [1_700_000_000_000]
    rows = {}

    def failing(name):
        builder = TopologyBuilder()
        builder.spout("n", spark.range(0, 60, numPartitions=2).selectExpr("id AS n"))
        narrow = request.param == "narrow"
        # What has sent a row across an exchange is not written in the run.
        builder.bolt("failing", Failing(late=narrow)).shuffle("n")
        last = "failing"
        if not narrow:
            last = "kept"
            builder.bolt("kept", Kept()).fields("failing", "n")
        builder.sink(last, lambda frame, n: rows.__setitem__(n, frame.collect()))
        counts = run_batch(
            builder.build(max_attempts=2), spark, tmp_path / name, max_dead_ratio=None,
            clock=lambda: now[0], wait=lambda seconds: now.__setitem__(0, now[0] + 100_000),
        )  # fmt: skip
        letters = dead_letters(tmp_path / name, spark).select("message_id", "payload.n", "attempts")
        found = sorted(row.n for some in rows.values() for row in some)
        return counts, sorted(map(tuple, letters.collect())), found

    return failing


def check_failing(found):
    counts, letters, rows = found
    assert (counts.records, counts.acked, counts.dead, counts.waiting) == (60, 40, 20, 0)
    assert rows == [n for n in range(60) if n % 3]
    assert [(n, attempts) for _, n, attempts in sorted(letters, key=lambda one: one[1])] == [
        (n, 2) for n in range(0, 60, 3)
    ]


def test_an_attempt_that_dies_behind_its_files_leaves_nothing_that_counts(failing, monkeypatch):
    judged = []

    def noted(sought, rows, is_all):
        judged.append(rows)
        return check.check_found(sought, rows, is_all)

    monkeypatch.setattr(runs, "check_found", noted)
    monkeypatch.setattr(action, "SpoutStage", KilledBehindItsFiles)
    check_failing(failing("killed"))
    assert [len(in_order(*one.roots())) for one in judged] == [60, 20]


STEPS = ["ran", "checked", "decided", "in-dead-letters", "acted", "marked"]


@pytest.mark.parametrize(
    ("step", "failing"),
    [
        pytest.param(step, way, marks=[pytest.mark.faults] * (at % 2 != WAYS.index(way)))
        for at, step in enumerate(STEPS)
        for way in WAYS
    ],
    indirect=["failing"],
)
def test_a_driver_that_dies_over_what_tasks_wrote_in_the_run_goes_on(failing, dying_at, step):
    with dying_at(step):
        failing("died")
    check_failing(failing("died"))


# -- files that tasks wrote, in a checkpoint --------------------------------------------------


def wrote(directory, name, table):
    return directory / write_batches(directory, name, table.schema, table.to_batches(), large=True)


def wrote_letters(directory, name, table, number=0):
    """The same as a task writes the dead."""
    file = NamedByChecksum(directory, name, "parquet", large=True)
    letters = as_letters(table, number)
    with letters_writer(file.sink, letters.schema) as writer:
        for start in range(0, len(letters), 3):
            writer.write_table(letters.slice(start, 3))
    path = directory / file.finish()
    return FailedFile("lines", True, path, len(table), path.stat().st_size)


def decide_with_files(state, number=0):
    """A decision of files: five wait, of which there was room for three, and four are dead."""
    state.write_plan(state.make_plan(number, 0))
    work = state.runs.new(number)
    path = wrote(work, "waiting-lines", records(0, 5))
    waiting = state.waiting(state.last_done).plus(
        "lines", FailedFile("lines", False, path, 3, None, 1000)
    )
    dead = Dead(
        {
            "lines": [
                FailedFile("lines", False, path, 2, None, start=3, no_room=100),
                wrote_letters(work, "dead-lines", records(5, 4, due_ms=0, step=0)),
            ]
        }
    )
    return state.write_decision(decision(number, waiting, dead, work=work.name))


def test_files_of_tasks_are_the_checkpoints(checkpoint, no_syncing):
    with OPEN(checkpoint) as state:
        told = decide_with_files(state)
    with OPEN(checkpoint) as state:
        for found in (told, state.decision(0)):
            assert ids(found.waiting["lines"]) == ["id-0", "id-1", "id-2"]
            assert ids(found.dead["lines"]) == [f"id-{n}" for n in (3, 4, 5, 6, 7, 8)]
            assert sum(map(len, found.dead.pieces("lines"))) == 6
            (tracked,) = {
                tuple(piece.column_names) for piece in found.dead.pieces("lines", payload=False)
            }
            assert list(tracked) == TRACKING.names
            reasons = found.dead["lines"]["_ackcore_reason"].to_pylist()
            said = "100 records wait already (max_waiting); it failed with ValueError: no"
            full = Reason("split", "WaitingFull", said, final=True)
            assert reasons[:2] == [full._asdict()] * 2
            assert reasons[2] == Reason("split", "ValueError", "no")._asdict()
        state.write_done(0)
        # The one file stays as long as something in it waits.
        for number in (1, 2, 3):
            plan = state.make_plan(number, 1001)
            state.write_plan(plan)
            due, rest, _ = state.split_due(plan)
            assert (ids(due["lines"]) if due else []) == ["id-0", "id-1"] * (number == 1)
            end_one(state, number, rest, prune=True)
        assert ids(state.waiting(3)["lines"]) == ["id-2"]


def test_what_tasks_and_the_driver_wrote_of_a_required_column_is_one_table(checkpoint, no_syncing):
    """Kafka's topic and offset are not null, yet the driver's files require no column."""
    required = records(0, 4)
    fields = [field.with_nullable(False) for field in required.schema]
    required = pa.table(required.columns, schema=pa.schema(fields))
    with OPEN(checkpoint) as state:
        for number, rows in enumerate((required.slice(0, 2), required.slice(2))):
            state.write_plan(state.make_plan(number, 0))
            work = state.runs.new(number)
            waiting = state.waiting(state.last_done)
            if number == 0:
                path = wrote(work, "waiting-lines", rows)
                waiting = waiting.plus("lines", FailedFile("lines", False, path, 2, None, 1000))
            else:
                waiting = waiting.plus("lines", rows)
            end_one(state, number, waiting, work=work.name)
        one, other = state.waiting(1).tables("lines")
        assert one.schema == other.schema
        assert ids(state.waiting(1)["lines"]) == [f"id-{n}" for n in range(4)]


@pytest.mark.parametrize("damage", ["changed", "cut", "gone"])
def test_a_damaged_file_of_tasks_is_told(checkpoint, no_syncing, damage):
    with OPEN(checkpoint) as state:
        decide_with_files(state)
    (path,) = (checkpoint / "ackcore/state").glob("0.*.dead-lines.*")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()
    if damage != "gone":
        path.write_bytes(data[:-1] if damage == "cut" else data)
    said = "missing" if damage == "gone" else "damaged"
    with pytest.raises(CheckpointCorrupt, match=rf"dead-lines\.[0-9a-f]{{16}}\.\w+ is {said}"):
        OPEN(checkpoint)


def test_files_of_letters_are_checked_by_their_length_alone_while_they_are_known(
    checkpoint, no_syncing
):
    """The driver that put one on record does not read it again, and sees what was cut off."""
    with OPEN(checkpoint) as state:
        dead = decide_with_files(state).dead
        (part,) = (part for part in dead.parts["lines"] if len(part) == 4)
        path = Path(part.path())
        data = path.read_bytes()
        path.write_bytes(data[:-1])
        with pytest.raises(CheckpointCorrupt, match=rf"bytes instead of {len(data)}"):
            part.path()


@pytest.fixture(params=["disk", "bucket"])
def anywhere(request, checkpoint):
    """Where there is no checkpoint yet."""
    return request.getfixturevalue("bucket") if request.param == "bucket" else checkpoint


def in_run(part, run):
    """A file that a task made on its machine, where it has it for a run."""
    if not isinstance(run, str):
        return part
    publish(str(part.path), run, part.path.name)
    return replace(part, path=f"{run}/{part.path.name}")


def parts_in(url):
    """Return the records of each file of a store's one spout, by name and in order."""
    found = SharedRecord(open_store(url, "path"), INDEX).load()["spouts"]["lines"]["files"]
    return {each["object"].partition(".e")[0].partition("/")[2]: each for each in found}


def test_files_of_letters_are_the_stores_as_they_are(
    anywhere, tmp_path, no_syncing, monkeypatch, request
):
    """Small ones go into one file with their neighbours; each letter keeps its place."""
    checkpoint, in_bucket = anywhere, isinstance(anywhere, str)
    with OPEN(checkpoint) as state:
        state.write_plan(state.make_plan(0, 0))
        run = state.runs.new(0)
        work = tmp_path if in_bucket else run
        sizes = [200, 300, 4, 5, 250, 6]
        starts = [sum(sizes[:n]) for n in range(len(sizes))]
        parts = [
            wrote_letters(work, f"dead-lines-{n}", records(start, size, due_ms=0, step=0))
            for n, (start, size) in enumerate(zip(starts, sizes, strict=True))
        ]
        small = min(part.nbytes for part in parts if len(part) >= 200)
        monkeypatch.setattr(store, "_SMALL", small)
        parts = [in_run(part, run) for part in parts]
        parts.append(records(sum(sizes), 7, due_ms=0, step=0))
        name = os.path.basename(run)
        made = decision(0, state.waiting(None), Dead({"lines": parts}), work=name)
        dead = state.write_decision(made).dead
        state.write_done(0)
        key = state.deployment_key
        letters = DeadLetters.checked(checkpoint, key, None, {"lines": SOURCE}, state.records)()
        s3 = request.getfixturevalue("s3") if in_bucket else None
        for again in (False, True):
            if in_bucket:
                s3.requests.clear()
            letters.write(0, dead)
            if in_bucket:
                asked = Counter(each.method for each in s3.requests)
                # Three are copied; two are put, of which one's parts are read, and the index.
                assert asked == ({"GET": 3} if again else {"HEAD": 3, "PUT": 6, "GET": 3})
    names = ["batch-0", *(f"batch-0.{n}" for n in (200, 500, 509, 759))]
    files = parts_in(letters.place.url)
    assert list(files) == names
    as_they_are = [len(each["checksum"]) == 16 for each in files.values()]
    if not in_bucket:
        at_first = {
            path.stat().st_ino for path in (checkpoint / "ackcore/state").glob("0.*.dead-*")
        }
        paths = [Path(letters.place.url) / each["object"] for each in files.values()]
        assert [path.stat().st_ino in at_first for path in paths] == as_they_are
    assert as_they_are == [True, True, False, True, False]
    n = sum(sizes) + 7
    found = list(list_letters(letters.place, LetterFilter(), payload=True))
    assert [one.id.position for one in found] == list(reversed(range(n)))
    assert [one.message_id for one in found] == [f"id-{row}" for row in reversed(range(n))]
    assert {one.message_id: json.loads(one.payload) for one in found} == {
        f"id-{row}": {"value": f"line {row}"} for row in range(n)
    }
    some = [LetterId("lines", 0, row) for row in (0, 199, 200, 203, 505, 508, 509, 600, 770)]
    chosen = LetterFilter(ids=[*some, LetterId("lines", 0, n), LetterId("lines", 1, 0)])
    ids_of = [f"id-{one.position}" for one in some]
    assert [one.message_id for one in list_letters(letters.place, chosen)] == ids_of[::-1]
    # Sent again and dropped, by the places that the notes have.
    sent = LetterFilter(ids=[*some[::2]])
    assert replay(checkpoint, where=sent, request="one").records == {"lines": 5}
    assert replay(checkpoint, where=sent).records == {}
    letters.place.refresh()
    assert sum(one.sent for one in list_letters(letters.place, LetterFilter())) == 5
    assert sum(pc.sum(some["deaths"]).as_py() for some in letters.reasons()) == n - 5
    gone = LetterFilter(ids=[*some[1::2]])
    assert drop(checkpoint, gone).records == {"lines": 4}
    letters.place.refresh()
    assert sum(pc.sum(some["deaths"]).as_py() for some in letters.reasons()) == n - 9
    left = [one.message_id for one in list_letters(letters.place, LetterFilter())]
    assert left == [f"id-{row}" for row in reversed(range(n)) if f"id-{row}" not in ids_of[1::2]]
    with OPEN(checkpoint) as state:
        due = state.split_due(state.make_plan(1, 0)).due["lines"]
    assert sorted(ids(due)) == sorted(ids_of[::2])
    # Another micro-batch of that number, as of a checkpoint restored from a backup, has others.
    with pytest.raises(CheckpointCorrupt, match="of micro-batch 0 that were sent again or dropped"):
        letters.write(0, {"lines": records(0, 2)})
    assert list(parts_in(letters.place.url)) == names
    for number, size in ((1, 3), (1, 2)):  # no note names these
        letters.write(number, {"lines": records(0, size)})
    assert list(parts_in(letters.place.url)) == [*names, "batch-1"]
    left = Counter(entry.key.partition(".e")[0] for entry in letters.place.store.list("lines"))
    assert left.pop("lines/batch-0") == 2  # one of the refused write
    assert left == {f"lines/{one}": 1 for one in [*names[1:], "batch-1", "columns"]}


def test_files_of_one_micro_batch_are_merged_together(anywhere, tmp_path, no_syncing, monkeypatch):
    monkeypatch.setattr(store, "_SMALL", 1)
    monkeypatch.setattr(compaction, "_FEWEST", 4)
    with OPEN(anywhere) as state:
        key, cache, run = state.deployment_key, state._cache, state.runs.new(0)
        letters = DeadLetters.checked(anywhere, key, None, {"lines": SOURCE}, state.records)()
    for number in range(10):
        directory = cache.prefix_of(number)
        parts = [
            in_run(
                wrote_letters(tmp_path, f"dead-{n}", records(10 * number + 3 * n, 3), number), run
            )
            for n in range(2)
        ]
        letters.write(
            number, Dead({"lines": [recorded(part, "lines", cache, directory) for part in parts]})
        )
    names = list(parts_in(letters.place.url))
    left = ["batch-8", "batch-8.3", "batch-9", "batch-9.3"]
    assert names == ["batches-0-3.1", "batches-4-7.1", *left]
    found = {one.id: one.message_id for one in list_letters(letters.place, LetterFilter())}
    assert found == {
        LetterId("lines", number, row): f"id-{10 * number + row}"
        for number in range(10)
        for row in range(6)
    }


def test_a_copy_of_letters_that_is_damaged_is_told(bucket, tmp_path, no_syncing, monkeypatch):
    """One that was cut when it is copied, one that was changed when it is read."""
    monkeypatch.setattr(store, "_SMALL", 1)
    objects = open_store(bucket, "path")
    with OPEN(bucket) as state:
        key, cache = state.deployment_key, state._cache
        letters = DeadLetters.checked(bucket, key, None, {"lines": SOURCE}, state.records)()
        path = in_run(wrote_letters(tmp_path, "dead-lines", records(0, 3)), state.runs.new(0))
        dead = Dead({"lines": [recorded(path, "lines", cache, cache.prefix_of(0))]})
        name = f"ackcore/state/{dead.parts['lines'][0].file}"
        data = objects.get(name).data
        objects.put(name, data[:-1])
        with pytest.raises(CheckpointCorrupt, match=rf"bytes instead of {len(data)}"):
            letters.write(0, dead)
        assert list(parts_in(letters.place.url)) == []
        objects.put(name, data[:9] + b"\1" + data[10:])
        letters.write(0, dead)
    with pytest.raises(CheckpointCorrupt, match=r"differs from that in index\.json"):
        list(list_letters(Letters(letters.place.store), LetterFilter()))


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.ENOSPC])
def test_a_file_is_copied_where_it_cannot_be_linked(tmp_path, monkeypatch, number):
    def refuse(source, path):
        raise OSError(number, os.strerror(number))

    (tmp_path / "one").write_bytes(b"letters")
    monkeypatch.setattr(os, "link", refuse)
    if number == errno.ENOSPC:
        with pytest.raises(StateError, match="two could not be written"):
            link_file(tmp_path / "one", tmp_path / "two")
    else:
        link_file(tmp_path / "one", tmp_path / "two")
        assert (tmp_path / "two").read_bytes() == b"letters"
    assert not list(tmp_path.glob(".*"))


def test_a_run_that_was_fenced_off_leaves_no_decision(checkpoint, no_syncing):
    """Its files are gone from where they were: another driver has taken over."""
    with OPEN(checkpoint) as state:
        state.write_plan(state.make_plan(0, 0))
        work = state.runs.new(0)
        path = wrote(work, "waiting-lines", records(0, 5))
        work.rename(f"{work}.fenced")
        waiting = state.waiting(None).plus("lines", FailedFile("lines", False, path, 5, None, 1000))
        with pytest.raises(StateError, match=r"waiting-lines.* could not be written: No such file"):
            state.write_decision(decision(0, waiting, work=work.name))
        assert state.decision(0) is None


@given(
    st.lists(st.integers(0, 3000), min_size=1, max_size=8), st.integers(1, 400).map(lambda n: n * 7)
)
def test_a_fingerprint_does_not_depend_on_what_a_file_was_written_in(sizes, piece):
    data = np.random.default_rng(sum(sizes)).bytes(sum(sizes))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksummed, "_PIECE", piece)
        whole, parts = checksummed._Fingerprint(), checksummed._Fingerprint()
        whole.update(memoryview(data))
        start = 0
        for size in sizes:
            parts.update(memoryview(data)[start : start + size])
            start += size
        assert whole.hexdigest() == parts.hexdigest()
