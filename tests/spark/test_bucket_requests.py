"""Requests in a bucket's index: who takes one out, and that others may add to them at any time.

A driver, or a command, is stopped before its n-th request to the server, for each n; what another
one does meanwhile runs where it stands.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from contextvars import Context

import pyarrow as pa
import pytest
from checkpoints import OPEN, end_one, ids
from letter_homes import VALUE, Home, every, listed, named, write

from ackcore.spark.base.errors import CheckpointInUse
from ackcore.spark.checkpoint import shared_record
from ackcore.spark.checkpoint.schema_changes import ColumnsChanged
from ackcore.spark.dead_letters.checkpoints import store_of
from ackcore.spark.dead_letters.drop import drop
from ackcore.spark.dead_letters.replay import replay
from ackcore.spark.stores.objects import ObjectStore
from ackcore.spark.stores.opening import open_store


@pytest.fixture
def bucket(monkeypatch):
    """In obstore's own memory, since there are thousands of requests."""
    stores = defaultdict(pytest.importorskip("obstore.store").MemoryStore)
    monkeypatch.setattr(ObjectStore, "_store", property(lambda store: stores[store.url]))
    return "s3://bucket/place"


@pytest.fixture
def stopped_at(monkeypatch):
    """``stopped_at(n, then)``: before the n-th request from now on, something happens once.

    Returns what tells whether it has.
    """
    armed = []

    def stopping(name):
        whole = getattr(ObjectStore, name)

        def method(self, *args, **kwargs):
            if armed:
                armed[0][0] -= 1
                if armed[0][0] == 0:
                    _, then, done = armed.pop()
                    done.append(name)
                    Context().run(then)
            return whole(self, *args, **kwargs)

        monkeypatch.setattr(ObjectStore, name, method)

    for name in ("get", "read", "put", "replace", "put_file", "copy", "list", "delete"):
        stopping(name)

    def stopped_at(n, then):
        done = []
        armed[:] = [[n, then, done]]
        return done

    return stopped_at


def homes(bucket):
    """A new one for each time that something is tried."""
    return (Home(f"{bucket}/{n}") for n in itertools.count())


def with_letters(home, batches=3):
    state, letters = home.driver()
    write(letters, 0, batches)
    return state


def taken(state):
    """Plan the next micro-batch, and return the ids of the records sent again that it takes."""
    plan = state.make_plan(state.last_done + 1, 0)
    state.write_plan(plan)
    return ids(state.split_due(plan).due["lines"]) if plan.replays else []


def finish(state):
    end_one(state, state.last_plan, prune=True)


def store_at(home):
    return open_store(store_of(home.checkpoint).url, "path")


def index_of(home):
    return store_at(home).get("index.json").data


def withdraw(home, name):
    store_at(home).put(f".requests/{name}.withdrawn", b"")


def test_a_driver_that_was_taken_over_from_forgets_no_request(bucket, stopped_at):
    """The checkpoint was put back from a copy of before: there the request is not taken yet."""
    for n, home in enumerate(homes(bucket), 1):
        first = with_letters(home)
        replay(home.checkpoint, where=named(0))
        checkpoint = open_store(f"{home.checkpoint}/ackcore", "path")
        copy = checkpoint.get("head.json").data
        assert taken(first) == ["id-0", "id-1"]
        end_one(first, 1)
        second, after = [], []

        def take_over(home=home, checkpoint=checkpoint, copy=copy, second=second, after=after):
            checkpoint.put("head.json", copy)
            second.append(home.driver()[0])
            after.append(index_of(home))

        stopped = stopped_at(n, take_over)
        try:
            first.prune(1)
        except CheckpointInUse:
            assert stopped
        if not stopped:
            break
        assert index_of(home) == after[0], f"stopped at {n}"
        put = b'"requests":{}' in after[0]
        assert taken(second[0]) == ([] if put else ["id-0", "id-1"]), f"stopped at {n}"
        finish(second[0])
    assert n > 4


def test_a_driver_that_was_taken_over_from_withdraws_no_request(bucket, stopped_at):
    """Its user thought better of it, and another driver has taken the request."""
    for n, home in enumerate(homes(bucket), 1):
        first = with_letters(home)
        replay(home.checkpoint, where=named(0))
        (name,) = first.pending_replays()
        withdraw(home, name)
        second, got, after = [], [], []

        def take_over(home=home, name=name, second=second, got=got, after=after):
            store_at(home).delete([f".requests/{name}.withdrawn"])
            second.append(home.driver()[0])
            got.extend(taken(second[0]))
            after.append(index_of(home))

        stopped = stopped_at(n, take_over)
        try:
            first.pending_replays()
        except CheckpointInUse:
            assert stopped
        if not stopped:
            break
        assert index_of(home) == after[0], f"stopped at {n}"
        # Sent by the one or by the other.
        again = replay(home.checkpoint, where=named(0)).records.get("lines", 0)
        assert len(got) + again == 2, f"stopped at {n}"
    assert n > 4


def test_what_a_plan_has_taken_is_not_withdrawn_while_it_runs(bucket):
    home = Home(bucket)
    state = with_letters(home)
    replay(bucket, where=named(0))
    (name,) = state.pending_replays()
    assert taken(state) == ["id-0", "id-1"]
    withdraw(home, name)
    assert state.pending_replays() == ()
    assert replay(bucket, where=named(0)).records == {}
    finish(state)
    assert replay(bucket, where=named(0)).records == {}
    assert name.encode() not in index_of(home)


def test_a_start_reads_the_index_as_often_however_many_requests_its_plan_took(bucket, monkeypatch):
    read, counts = [], []
    get = ObjectStore.get
    monkeypatch.setattr(ObjectStore, "get", lambda self, key: read.append(key) or get(self, key))
    for n in (2, 8):
        home = Home(f"{bucket}/{n}")
        state = with_letters(home, n)
        for number in range(n):
            replay(home.checkpoint, where=named(number))
        assert len(taken(state)) == 2 * n
        read.clear()
        with OPEN(home.checkpoint) as state:
            assert len(state.plan(state.last_plan).replays) == n
        counts.append(read.count("index.json"))
    assert counts[0] == counts[1]


def test_a_heartbeat_parses_the_index_only_after_a_change(bucket, monkeypatch):
    parsed = []
    parse = shared_record.record_in
    monkeypatch.setattr(shared_record, "record_in", lambda *of: parsed.append(of) or parse(*of))
    home = Home(bucket)
    state = with_letters(home)
    state.pending_replays()
    parsed.clear()
    assert [state.pending_replays() for _ in range(3)] == [()] * 3
    assert not parsed
    replay(bucket, where=named(0))
    parsed.clear()
    assert [len(state.pending_replays()) for _ in range(3)] == [1] * 3
    assert len(parsed) == 1


def test_a_driver_forgets_the_requests_that_it_has_removed(bucket):
    """Also in memory: it may run for years, and a program may replay every minute."""
    home = Home(bucket)
    state = with_letters(home)
    replay(bucket, where=named(0))
    assert taken(state) == ["id-0", "id-1"]
    assert len(state._history.taken) == 1
    finish(state)
    assert not state._history.taken
    assert state.pending_replays() == ()


def test_a_driver_that_is_refused_at_its_start_withdraws_nothing(bucket):
    """It has not taken over: the one that runs goes on."""
    home = Home(bucket)
    state = with_letters(home)
    replay(bucket, where=named(0), request="a")
    replay(bucket, where=named(1), request="b")
    name, _ = state.pending_replays()
    withdraw(home, name)
    before = index_of(home)
    now = {"lines": pa.schema([("value", pa.int8())]), "clicks": VALUE["lines"]}
    with pytest.raises(ColumnsChanged, match=r"/b\.lines\..* requests"):
        OPEN(bucket, sources=now)
    assert index_of(home) == before
    assert taken(state) == ["id-2", "id-3"]
    assert replay(bucket, where=named(0)).records == {"lines": 2}


def asks(home):
    """Another process, beside the query that runs."""
    assert replay(home.checkpoint, where=named(1)).records == {"lines": 2}
    assert drop(home.checkpoint, named(2)).records == {"lines": 2}


def runs(state):
    """Micro-batches, until nothing is asked for; return what they took."""
    found = []
    for _ in range(3):
        found += taken(state)
        finish(state)
    return found


def check(home, found, n):
    counts = Counter(found)
    with OPEN(home.checkpoint) as state:
        counts.update(taken(state))
    assert counts == {f"id-{row}": 1 for row in range(4)}, f"stopped at {n}"
    assert listed(home) == every(4, but=(2,)), f"stopped at {n}"


def test_others_ask_at_any_request_of_a_driver_that_takes_and_forgets(bucket, stopped_at):
    for n, home in enumerate(homes(bucket), 1):
        state = with_letters(home, 4)
        replay(home.checkpoint, where=named(0))
        stopped = stopped_at(n, lambda home=home: asks(home))
        found = runs(state)
        if not stopped:
            break
        check(home, found, n)
    assert n > 10


@pytest.mark.parametrize("starts", [False, True], ids=["a micro-batch", "another driver"])
def test_a_driver_takes_and_forgets_at_any_request_of_others(bucket, stopped_at, starts):
    for n, home in enumerate(homes(bucket), 1):
        state, found = with_letters(home, 4), []
        replay(home.checkpoint, where=named(0))

        def meanwhile(home=home, state=state, found=found):
            found.extend(runs(home.driver()[0] if starts else state))

        stopped = stopped_at(n, meanwhile)
        asks(home)
        if not stopped:
            break
        check(home, found, n)
    assert n > 10


def test_of_an_index_that_was_removed_no_part_is_made_anew(bucket):
    """A reader would take that for all there is."""
    home = Home(bucket)
    state = with_letters(home)
    replay(bucket, where=named(0))
    assert taken(state) == ["id-0", "id-1"]
    store = store_at(home)
    store.delete(["index.json"])
    finish(state)
    assert store.get("index.json") is None
