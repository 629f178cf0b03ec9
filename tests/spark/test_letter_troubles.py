"""Drivers and commands of dead letters that die, are late, or meet."""

from __future__ import annotations

import os
import sys
from collections import defaultdict

import pyarrow as pa
import pytest
from checkpoints import Killed, Killer, died
from letter_homes import VALUE, Home, asked, contents, every, listed, named, write
from pyspark import cloudpickle
from s3_server import DENIED, ERROR_AFTER, LOST, SLOW_DOWN
from streams import in_line

from ackcore.spark.base.clocks import wall_clock_ms
from ackcore.spark.base.errors import CheckpointCorrupt, CheckpointInUse
from ackcore.spark.dead_letters import compaction
from ackcore.spark.dead_letters.checkpoints import store_of
from ackcore.spark.dead_letters.drop import drop
from ackcore.spark.dead_letters.letter_store import Letters
from ackcore.spark.dead_letters.listing import LetterFilter, LetterId, count_letters, list_letters
from ackcore.spark.dead_letters.notes import notes_of
from ackcore.spark.dead_letters.replay import replay
from ackcore.spark.dead_letters.store import DeadLetters
from ackcore.spark.query import run_batch
from ackcore.spark.stores.interface import StoreUnavailable
from ackcore.spark.stores.objects import ObjectStore
from ackcore.topology import BasicBolt

# Workers do not have the tests on their path.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


pytestmark = pytest.mark.usefixtures("no_syncing")


@pytest.fixture(params=["in the checkpoint", "elsewhere"])
def in_bucket(request, bucket, tmp_path):
    if request.param == "elsewhere":
        return Home(str(tmp_path / "checkpoint"), f"{bucket}/letters")
    return Home(bucket)


@pytest.fixture(params=["disk", "bucket"])
def home(request, tmp_path):
    return Home(
        str(tmp_path / "here") if request.param == "disk" else request.getfixturevalue("bucket")
    )


def test_a_driver_that_was_taken_over_from_publishes_nothing(in_bucket):
    _, paused = in_bucket.driver()
    write(paused, 0, 1)
    if in_bucket.elsewhere is not None:
        # A lock on a file system holds for as long as its driver lives: it is broken by hand.
        os.unlink(f"{in_bucket.checkpoint}/ackcore/lock")
    state, letters = in_bucket.driver()
    with state:
        write(letters, 0, 2)
        there = listed(in_bucket)
        with pytest.raises(CheckpointInUse, match=r"dead_letters|letters was taken over"):
            paused.write(1, {"lines": died(77, 1)})
        with pytest.raises(CheckpointInUse, match="was taken over"):
            paused.write(5, {"lines": died(77, 1)})
        assert listed(in_bucket) == there == every(2)
        write(letters, 2, 3)
        assert listed(in_bucket) == every(3)


def test_a_driver_that_woke_too_late_does_not_take_the_store_from_the_next(bucket):
    home = Home(bucket)
    state, _ = home.driver()
    last, letters = home.driver()
    with last:
        with pytest.raises(CheckpointInUse, match="was taken over"):
            DeadLetters.checked(bucket, state.deployment_key, None, VALUE, state.records)()
        write(letters, 0, 1)
    assert listed(home) == every(1)


@pytest.mark.parametrize(
    "how",
    [
        LOST,
        pytest.param(ERROR_AFTER, marks=pytest.mark.faults),
        pytest.param(SLOW_DOWN, marks=pytest.mark.faults),
    ],
)
def test_an_answer_that_is_lost_at_any_put_changes_nothing(in_bucket, s3, how, monkeypatch):
    monkeypatch.setattr(compaction, "_FEWEST", 4)
    state, letters = in_bucket.driver()
    with state:
        for n in range(6):
            s3.fail(how, "PUT")
            write(letters, n, n + 1)
            assert listed(in_bucket) == every(n + 1)
        s3.fail(how, "PUT")
        assert replay(in_bucket.checkpoint, where=named(0)).records == {"lines": 2}
        s3.fail(how, lambda one: one.method == "PUT" and "index.json" in one.path)
        assert replay(in_bucket.checkpoint, where=named(1)).records == {"lines": 2}
        s3.fail(how, "PUT")
        assert drop(in_bucket.checkpoint, named(2)).records == {"lines": 2}
        assert listed(in_bucket) == every(6, but=(2,))
        assert len(state.pending_replays()) == 2


def test_nothing_depends_on_a_list(in_bucket, s3, monkeypatch):
    monkeypatch.setattr(compaction, "_FEWEST", 4)
    s3.lagging = True
    for n in range(6):
        state, letters = in_bucket.driver()
        with state:
            write(letters, n, n + 1)
    assert replay(in_bucket.checkpoint, where=named(1)).records == {"lines": 2}
    assert replay(in_bucket.checkpoint, where=named(1)).records == {}
    drop(in_bucket.checkpoint, named(2))
    assert listed(in_bucket) == every(6, but=(2,))
    assert asked(in_bucket) == ["id-2", "id-3"]


def meanwhile(monkeypatch, name, do):
    """Have something done once, right after a method of a store in a bucket."""
    whole, todo = getattr(Letters, name), [do]

    def method(self, *args, **kwargs):
        found = whole(self, *args, **kwargs)
        if todo:
            todo.pop()()
        return found

    monkeypatch.setattr(Letters, name, method)
    return todo


def test_what_a_driver_sweeps_that_starts_meanwhile_is_put_anew(home, monkeypatch):
    home.wrote(3)
    left = meanwhile(monkeypatch, "_put", lambda: home.driver()[0].close())
    assert drop(home.checkpoint, named(1)).records == {"lines": 2}
    assert not left
    assert listed(home) == every(3, but=(1,))
    assert b"id-2" not in b"".join(contents(home))
    left = meanwhile(monkeypatch, "_put_request", lambda: home.driver()[0].close())
    assert replay(home.checkpoint, where=named(0)).records == {"lines": 2}
    assert not left
    assert asked(home) == ["id-0", "id-1"]


def test_a_request_that_another_was_faster_than_is_made_anew(home, monkeypatch):
    place = home.checkpoint
    state, letters = home.driver()
    with state:
        write(letters, 0, 3)
        left = meanwhile(monkeypatch, "_put_request", lambda: replay(place, where=named(1)))
        assert replay(place).records == {"lines": 4}
        assert not left
    assert asked(home) == [f"id-{row}" for row in range(6)]


def test_a_drop_in_the_midst_of_a_merge(home, monkeypatch):
    monkeypatch.setattr(compaction, "_FEWEST", 4)
    state, letters = home.driver()
    with state:
        write(letters, 0, 4)
        whole = compaction.write_letters

        def copy(file, schema, letters):
            monkeypatch.setattr(compaction, "write_letters", whole)
            whole(file, schema, letters)
            assert drop(home.checkpoint, named(1)).records == {"lines": 2}

        monkeypatch.setattr(compaction, "write_letters", copy)
        write(letters, 4, 5)
        assert listed(home) == every(5, but=(1,))
        assert b"id-2" not in b"".join(contents(home))
        write(letters, 5, 7)
        assert listed(home) == every(7, but=(1,))
        assert len(letters.place.files("lines")) < 5


@pytest.fixture(scope="module")
def killer():
    return Killer()


@pytest.fixture(params=["file operation", "request"])
def dying(request, tmp_path, monkeypatch):
    """A place for checkpoints, and ``arm(n)``, after which the n-th operation or request kills.

    Requests are to obstore's own memory, since there are thousands of them.
    """
    if request.param == "file operation":
        killer = request.getfixturevalue("killer")
        monkeypatch.setattr(os, "fsync", killer.fsync)
        return str(tmp_path), lambda n: killer.disarm() if n is None else killer.arm(n)
    stores = defaultdict(pytest.importorskip("obstore.store").MemoryStore)
    monkeypatch.setattr(ObjectStore, "_store", property(lambda store: stores[store.url]))
    left: list[int | None] = [None]

    def counting(whole):
        def method(self, *args, **kwargs):
            if left[0] is not None:
                if left[0] == 0:
                    raise Killed
                left[0] -= 1
            return whole(self, *args, **kwargs)

        return method

    for name in ("put", "replace", "put_file", "delete"):
        monkeypatch.setattr(ObjectStore, name, counting(getattr(ObjectStore, name)))
    return "s3://bucket", lambda n: left.__setitem__(0, n)


@pytest.mark.parametrize("every_nth", [7, pytest.param(1, marks=pytest.mark.faults)])
def test_killed_at_any_instant_no_letter_is_lost_doubled_or_sent_twice(
    dying, monkeypatch, every_nth
):
    """Kill a driver that writes, merges and removes, a replay and a drop, at each operation."""
    root, arm = dying
    monkeypatch.setattr(compaction, "_FEWEST", 3)
    hour = wall_clock_ms() + 2 * compaction.KEPT_MS
    for fatal in range(0, 400, every_nth if "://" not in root else 1):
        home = Home(f"{root}/{fatal}")
        home.wrote(4)
        state, _ = home.driver()
        ended = False
        arm(fatal)
        try:
            opened = DeadLetters.checked(
                state.url, state.deployment_key, None, VALUE, state.records
            )()
            write(DeadLetters(opened.place, lambda: hour), 3, 6)
            replay(home.checkpoint, where=named(1), request="r")
            drop(home.checkpoint, named(2))
            ended = True
        except Killed:
            pass
        arm(None)
        if "://" not in root:
            os.unlink(f"{home.checkpoint}/ackcore/lock")
        found = listed(home)
        assert found.items() >= every(4, but=(2,)).items(), f"killed at {fatal}"
        assert found.items() <= every(6).items(), f"killed at {fatal}"
        # The next driver, and whoever asks again.
        state, letters = home.driver()
        with state:
            write(letters, max(int(each.split("/")[1]) for each in found), 8)
        replay(home.checkpoint, where=named(1), request="r")
        drop(home.checkpoint, named(2))
        assert listed(home) == every(8, but=(2,)), f"killed at {fatal}"
        assert asked(home) == ["id-2", "id-3"], f"killed at {fatal}"
        assert not any(b"'id-4'" in each for each in contents(home)), f"killed at {fatal}"
        home.driver()[0].close()
        store = home.letters
        told = store.get("index.json").data
        told += b"".join(store.get(each.key).data for each in store.list(".merged"))
        unnamed = {each.key for each in store.list() if each.key.encode() not in told}
        assert unnamed <= {"index.json"}, f"killed at {fatal}"
        if ended:
            break
    assert ended
    assert fatal > 12


def test_what_died_before_it_was_named_is_swept(home):
    home.wrote(1)
    store = home.letters
    digits = "0123456789abcdef01234567"
    left = [
        f"lines/batch-7.e1.{digits}.parquet",
        f".notes/e1/{digits}",
        f".requests/e1.01234567/r.lines.{digits}.arrow",
    ]
    kept = ["lines/notes of mine.txt", "elsewhere/e1/file", f"lines/batch-7.e9.{digits}.parquet"]
    for key in [*left, *kept]:
        store.put(key, b"x")
    home.wrote(0)
    there = {entry.key for entry in store.list()}
    assert not there & {*left}
    assert there >= {*kept}
    assert listed(home) == every(1)


def test_damage_is_told_and_nothing_is_sent(home):
    (file, _) = home.wrote(2).place.files("lines")
    store = home.letters
    data = store.get(file.path.key).data
    store.put(file.path.key, data[:99] + bytes([data[99] ^ 1]) + data[100:])
    with pytest.raises(CheckpointCorrupt, match=r"batch-0\.e1\..*differs from that in index\.json"):
        replay(home.checkpoint)
    store.delete([file.path.key])
    said = r"/lines/batch-0\.e1\..*parquet is missing, though index"
    with pytest.raises(CheckpointCorrupt, match=said):
        listed(home)
    assert asked(home) == []
    index = store.get("index.json")
    damaged = index.data.replace(b"lines", b"linEs", 1)
    store.replace("index.json", damaged, index.version)
    with pytest.raises(CheckpointCorrupt, match=r"index\.json is damaged"):
        listed(home)


def test_many_notes_are_objects_of_their_own(home):
    place = home.checkpoint
    state, letters = home.driver()
    with state:
        letters.write(0, {"lines": died(0, 2000)})
    odd = tuple(LetterId("lines", 0, at) for at in range(0, 2000, 2))
    assert replay(place, where=LetterFilter(odd), request="odd").records == {"lines": 1000}
    store = home.letters
    (note,) = store.list(".notes")
    assert len(store.get("index.json").data) < 3000
    home.wrote(0)
    assert count_letters(store_of(place), LetterFilter(sent=True)) == 1000
    store.delete([note.key])
    with pytest.raises(CheckpointCorrupt, match=r"missing or damaged, though index\.json name"):
        notes_of(store_of(place))


def test_what_it_costs(bucket, s3):
    home = Home(bucket)
    state, letters = home.driver()
    with state:
        write(letters, 0, 1)
        before = len(s3.requests)
        write(letters, 1, 2)
        assert len(s3.requests) - before == 2
        write(letters, 1, 2)  # as after a crash
        assert len(s3.requests) - before == 2
        before = len(s3.requests)
        listed(home)
        assert len(s3.requests) - before <= 8, s3.requests[before:]
        for n in range(2, 17):
            write(letters, n, n + 1)
        before = len(s3.requests)
        write(letters, 17, 18)  # puts sixteen files together
        assert letters.place.files("lines")[0].level == 1
        assert len(s3.requests) - before <= 6, s3.requests[before:]


def test_no_credential_is_told(bucket, s3, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "this-is-secret")
    Home(bucket).wrote(1)
    s3.fail(DENIED, "GET", times=50)
    with pytest.raises(Exception, match="s3://") as caught:
        store_of(bucket)
    for secret in ("this-is-secret", "AKIA"):
        assert secret not in str(caught.value)
    assert not isinstance(caught.value, StoreUnavailable)


def test_a_store_on_a_disk_does_not_go_with_a_checkpoint_in_a_bucket(bucket, tmp_path):
    with pytest.raises(ValueError, match="dead_letters must be a URL if the checkpoint is one"):
        Home(bucket, str(tmp_path / "letters")).driver()


class Take(BasicBolt):
    outputs = pa.schema([("word", pa.string())])

    def execute(self, one, collector):
        if one["word"] == "bad":
            raise ValueError("cannot take it")
        collector.emit((one["word"],))


def test_a_run_whose_letters_go_to_a_bucket(spark, bucket, tmp_path):
    def run():
        lines = spark.createDataFrame([("a",), ("bad",)], "word string")
        topology = in_line({"lines": lines, "take": Take()}, max_attempts=1)
        return run_batch(topology, spark, tmp_path / "cp", dead_letters=f"{bucket}/letters")

    assert run().dead == 1
    (letter,) = list_letters(store_of(f"{bucket}/letters"), LetterFilter(), payload=True)
    assert (letter.error_message, letter.payload) == ("cannot take it", '{"word":"bad"}')
    assert replay(tmp_path / "cp").records == {"lines": 1}
    counts = run()
    assert (counts.replayed, counts.dead, counts.balanced) == (1, 2, True)
    found = list_letters(store_of(tmp_path / "cp"), LetterFilter())
    assert [each.replays for each in found] == [1, 0]
