"""A checkpoint in a bucket: each step is one put of its head, and who lost it takes none."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from checkpoints import OPEN, TOPOLOGY, Topology, decision, end_one, ids, records, roots, run_one
from s3_server import DENIED, ERROR_AFTER, LOST

from ackcore.spark.base.errors import (
    CheckpointCorrupt,
    CheckpointForeign,
    CheckpointInUse,
    CheckpointReadOnly,
)
from ackcore.spark.checkpoint import records as heads
from ackcore.spark.checkpoint.refusals import REFUSED, Refusal
from ackcore.spark.checkpoint.requests import POINTER
from ackcore.spark.dead_letters.store import DeadLetters
from ackcore.spark.stores.interface import StoreUnavailable
from ackcore.spark.stores.objects import ObjectStore
from ackcore.spark.stores.opening import open_store


def store_of(url):
    return open_store(f"{url}/ackcore", "checkpoint")


def head_of(url):
    return json.loads(store_of(url).get("head.json").data.partition(b"\n")[0])


def plan_of(state, number):
    state.write_plan(state.make_plan(number, number * 1000))


# -- removal --------------------------------------------------------------------------------------


def test_what_dead_drivers_left_is_swept(bucket, monkeypatch):
    with OPEN(bucket) as state:
        plan_of(state, 0)
        with monkeypatch.context() as patch:
            patch.setattr(state.records, "write", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                state.write_decision(decision(0, {"lines": records(0, 3)}))
    left = {entry.key for entry in store_of(bucket).list("state")}
    assert len(left) == 1
    store_of(bucket).put("work/0.0123456789abcdef/rows/part", b"x")
    store_of(bucket).put("work/9.0123456789abcdef/rows/part", b"x")
    store_of(bucket).put("records/e1/0123", b"x")
    with OPEN(bucket) as state:
        end_one(state, 0, {"lines": records(0, 3)}, prune=True)
        for number in (1, 2):
            run_one(state, number, prune=True)
        # The head on record has the first micro-batch yet.
        assert left < {entry.key for entry in store_of(bucket).list("state")}
    assert not left & {entry.key for entry in store_of(bucket).list("state")}
    assert [entry.key for entry in store_of(bucket).list("work")] == [
        "work/9.0123456789abcdef/rows/part"
    ]
    assert store_of(bucket).list("records") == []


def test_what_runs_left_goes_every_few_micro_batches_and_at_the_end(bucket):
    store = store_of(bucket)
    for _ in range(2):
        with OPEN(bucket) as state:
            first = 0 if state.last_done is None else state.last_done + 1
            left = []
            for number in range(first, first + 10):
                store.put(f"work/{number}.0123456789abcdef/rows/part", b"x")
                run_one(state, number, prune=True)
                left.append(len(store.list("work")))
            assert left == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1]
            store.put(f"work/{first + 10}.0123456789abcdef/rows/part", b"x")
        assert len(store.list("work")) == 1  # its micro-batch is not done
        store.delete([store.list("work")[0].key])


def test_a_large_record_is_an_object_of_its_own(bucket, monkeypatch):
    monkeypatch.setattr(heads, "_LARGE", 1000)
    counts = {"of": "x" * 2000}
    with OPEN(bucket) as state:
        run_one(state, 0, counts=counts)
        assert len(store_of(bucket).list("records")) == 1
    (entry,) = store_of(bucket).list("records")
    with OPEN(bucket) as state:
        assert state.decision(0).counts == counts
        for number in range(1, 5):
            run_one(state, number, counts=counts, prune=True)
    kept = [entry.key for entry in store_of(bucket).list("records")]
    assert entry.key not in kept
    assert len(kept) <= 3
    for harm in (
        lambda: [store_of(bucket).put(key, b"{}") for key in kept],
        lambda: store_of(bucket).delete(kept),
    ):
        harm()
        with pytest.raises(CheckpointCorrupt, match=r"missing or damaged, though head\.json names"):
            OPEN(bucket)


@pytest.mark.parametrize("large", [100, heads._LARGE])
def test_no_object_is_deleted_that_the_head_names(bucket, monkeypatch, large):
    """Nor a table that its records name: whoever opens it after a crash meets none that is gone."""
    monkeypatch.setattr(heads, "_LARGE", large)
    store, delete, deleted = store_of(bucket), ObjectStore.delete, []

    def looked_at(self, keys):
        keys = list(keys)
        head = json.dumps(head_of(bucket)["records"])
        objects = (store.get(key).data.decode() for key in kept("records") if key in head)
        named = head + "".join(objects)
        assert not [key for key in keys if key.removeprefix("state/") in named]
        deleted.extend(keys)
        delete(self, keys)

    def kept(below):
        return [entry.key for entry in store.list(below)]

    monkeypatch.setattr(ObjectStore, "delete", looked_at)
    for first in (0, 4):  # the second driver finds what the first one left, by a list
        with OPEN(bucket) as state:
            for number in range(first, first + 4):
                run_one(state, number, {"lines": records(0, 3)}, nonacked=roots(number), prune=True)
                state.prune(number)  # nothing was put in between
                state.check_owner()  # which reads the head once more
    assert {key.split("/")[1].split(".")[0] for key in deleted if key.startswith("state/")} == {
        str(number) for number in range(6)
    }
    # Two micro-batches, of which each has two tables.
    assert len(kept("state")) == 4
    if large == 100:
        # Of six micro-batches a plan and a decision each.
        assert sum(key.startswith("records/") for key in deleted) >= 12
        # Of each a plan, a mark and a decision; and what tells of the deployment.
        assert len(kept("records")) <= 7


@pytest.mark.parametrize("how", ["refused", "taken over"])
def test_what_a_step_was_to_drop_stays_if_it_fails(bucket, s3, how):
    """Neither the next time is it deleted nor when the checkpoint is closed."""

    def left():
        return [
            entry.key.split("/")[1].split(".wait")[0] for entry in store_of(bucket).list("state")
        ]

    with OPEN(bucket) as state:
        for number in range(4):
            run_one(state, number, {"lines": records(0, 3)})
            if number < 3:
                state.prune(number)
        # The steps of the last one have dropped what there was of the first.
        assert left() == ["0.e1", "1.e1", "2.e1", "3.e1"]
        if how == "refused":
            s3.fail(DENIED, "PUT", times=100)
            with pytest.raises(CheckpointReadOnly):
                plan_of(state, 4)
            # Whether that came about is not known before the head was looked at.
            state.records.remove_old(3, set())
            assert left() == ["0.e1", "1.e1", "2.e1", "3.e1"]
        else:
            OPEN(bucket).close()
        state.prune(3)
        assert left() == ["1.e1", "2.e1", "3.e1"]
    assert left() == ["1.e1", "2.e1", "3.e1"]


# -- epochs and owners ----------------------------------------------------------------------------


def test_every_record_bears_the_epoch_of_its_driver(bucket, checkpoint):
    for place in (bucket, checkpoint):
        for number in range(2):
            with OPEN(place) as state:
                run_one(state, number)
                assert state.records.epoch == number + 1
                assert state.records.read(f"batches/{number}.plan")["epoch"] == number + 1
                assert state.records.read("batches/0.done")["epoch"] == 1
                elsewhere = f"{place}-dead/{number}"
                DeadLetters.checked(place, state.deployment_key, elsewhere, None, state.records)()
                pointer = state.records.read(POINTER)
                assert (pointer["epoch"], pointer["path"]) == (number + 1, elsewhere)
    assert head_of(bucket)["open"] is False


STEPS = {
    "plan": lambda state: state.write_plan(replace(state.plan(2), crashes=1)),
    "decide": lambda state: state.write_decision(decision(2, {"lines": records(0, 2)})),
    "refuse": lambda state: state.refusals.add(
        2, 0, Refusal("out", True, pa.Table.from_pylist([], schema=REFUSED))
    ),
    "close": lambda state: state.close_refusals(state.decision(2), {}, {}, {}),
    "mark": lambda state: state.write_done(2),
    "effect": lambda state: state.check_owner(),
}
BEFORE = {"plan": [], "decide": [], "refuse": ["decide"], "close": ["decide", "refuse"]}


@pytest.mark.parametrize("step", STEPS)
def test_a_driver_that_was_cut_off_takes_no_further_step(place, step, caplog):
    with OPEN(place) as first:
        run_one(first, 0)
        run_one(first, 1, {"lines": records(5, 5, due_ms=10**9)})
        plan_of(first, 2)
        for before in BEFORE.get(step, ["decide"]):
            STEPS[before](first)
        if isinstance(place, Path):  # its file system has given the lock to another host
            (place / "ackcore/lock").unlink()
        with caplog.at_level(logging.WARNING, "ackcore"), OPEN(place) as second:
            assert "is taken over from pid" in caplog.text
            before = head_of(place)
            with pytest.raises(CheckpointInUse, match="was taken over from this driver"):
                STEPS[step](first)
            assert head_of(place) == before
            # The other goes on to the end, and what the first one does of its own accord
            # afterwards takes nothing away.
            if second.decision(2) is None:
                second.write_decision(decision(2, {"lines": records(0, 2)}))
            second.write_done(2)
            first.prune(1)
            first.runs.remove_done(1)
            assert second.waiting(2).rows() == 2
            second.prune(2)
            with pytest.raises(CheckpointInUse):
                first.check_owner()
    with OPEN(place) as third:
        assert third.last_done == 2
        assert ids(third.waiting(2)["lines"]) == ["id-0", "id-1"]
        assert third.records.epoch == 3


def test_a_prune_that_was_paused_deletes_nothing_of_who_took_over(bucket, s3):
    """Whatever it has listed before: the same table of the next driver has another name."""
    with OPEN(bucket) as dead:
        run_one(dead, 0)
        plan_of(dead, 1)
        dead._cache.write_table("1.e1", "waiting-lines", records(0, 3))  # and dies
    with OPEN(bucket) as first:
        paused = first._cache._store.list("state")
        with OPEN(bucket) as second:
            end_one(second, 1, {"lines": records(0, 3)})
            for number in (2, 3, 4):
                plan_of(second, number)
                rest = second.waiting(number - 1)
                end_one(second, number, rest)
            first._cache._store.delete(entry.key for entry in paused)
            assert ids(OPEN(bucket).waiting(4)["lines"]) == ["id-0", "id-1", "id-2"]


@pytest.mark.parametrize("how", [LOST, ERROR_AFTER])
def test_lost_answers_of_its_own_steps_are_not_another_driver(bucket, s3, how):
    for number in range(3):
        s3.fail(how, lambda one: one.method == "PUT" and one.path.endswith("head.json"))
        with OPEN(bucket) as state:
            s3.fail(how, lambda one: one.method == "PUT" and one.path.endswith("head.json"))
            run_one(state, number)
    with OPEN(bucket) as state:
        assert state.last_done == 2


def test_a_step_whose_outcome_is_unknown_is_looked_up_by_the_next(bucket, monkeypatch):
    """After a Ctrl-C, or a long outage of the store, the step may have come about."""
    for went_through in (True, False):
        with OPEN(bucket) as state:
            number = 0 if state.last_done is None else state.last_done + 1
            put = state.records._store.replace

            def interrupted(*given, put=put, went_through=went_through, **conditions):
                if went_through:
                    put(*given, **conditions)
                raise KeyboardInterrupt

            with monkeypatch.context() as patch:
                patch.setattr(state.records._store, "replace", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    plan_of(state, number)
            assert (f"batches/{number}.plan" in head_of(bucket)["records"]) is went_through
            state.record_interrupt(number)
            plan = state.plan(number)
            assert (plan is not None and plan.interrupted) is went_through
        with OPEN(bucket) as state:
            if not went_through:
                plan_of(state, number)
            end_one(state, number)


def test_a_step_that_came_about_twice_is_one(bucket, s3, monkeypatch):
    """A put that was given up arrives after all, between the look at the head and the next put."""
    with OPEN(bucket) as state:
        put, held = state.records._store.replace, []

        def given_up(*given, **conditions):
            held.append((given, conditions))
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(state.records._store, "replace", given_up)
            with pytest.raises(KeyboardInterrupt):
                plan_of(state, 0)

        def arrives(request):
            if request.method == "PUT":
                s3.before = None
                ((given, conditions),) = held
                put(*given, **conditions)

        s3.before = arrives
        plan_of(state, 0)
        assert s3.before is None
        end_one(state, 0)
    with OPEN(bucket) as state:
        assert state.last_done == 0


def test_two_that_open_at_once_are_one_after_the_other(bucket, s3):
    """The later one reads anew what the earlier one has made of it."""
    OPEN(bucket).close()
    opened = []

    def opens_too(request):
        if request.method == "PUT" and request.path.endswith("head.json"):
            s3.before = None
            opened.append(OPEN(bucket))
            run_one(opened[0], 0)

    s3.before = opens_too
    with OPEN(bucket) as second:
        assert second.last_done == 0
        assert second.records.epoch == 3
        with pytest.raises(CheckpointInUse, match="was taken over from this driver"):
            run_one(opened[0], 1)


def test_who_is_refused_has_fenced_nobody(bucket):
    with OPEN(bucket) as state:
        run_one(state, 0)
        with pytest.raises(CheckpointForeign, match="belongs to another topology"):
            OPEN(bucket, Topology(["other"], lines=("value",)))
        with pytest.raises(CheckpointForeign, match=r"cannot continue it"):
            OPEN(bucket, kind="stream", offsets=Path("/nowhere/offsets"))
        run_one(state, 1)
        assert state.last_done == 1


def test_a_head_that_was_removed_is_nobodys(bucket):
    with OPEN(bucket) as state:
        store_of(bucket).delete(["head.json"])
        with pytest.raises(CheckpointInUse, match="its head was removed"):
            plan_of(state, 0)


@pytest.mark.parametrize("place", ["checkpoint", "bucket"])
@pytest.mark.parametrize("put", [1, 2, 3])
def test_a_first_start_that_fails_leaves_a_new_checkpoint(request, monkeypatch, place, put):
    """Its meta.json is an object: the puts are those of an empty head, of the object, and of the
    head that names it."""
    path = request.getfixturevalue(place)
    monkeypatch.setattr(heads, "_LARGE", 100)
    kind = type(store_of(path))
    methods, puts = {name: getattr(kind, name) for name in ("put", "replace")}, []

    def fails(name, store, *args):
        puts.append(args[0].partition("/")[0])
        if len(puts) >= put:
            raise StoreUnavailable("the store does not answer")
        return methods[name](store, *args)

    with monkeypatch.context() as patch:
        for name in methods:
            patch.setattr(kind, name, lambda store, *args, name=name: fails(name, store, *args))
        with pytest.raises(StoreUnavailable, match="does not answer"):
            OPEN(path)
    assert puts[:put] == ["head.json", "records", "head.json"][:put]
    with OPEN(path) as state:
        run_one(state, 0)
    with OPEN(path) as state:
        assert state.last_done == 0


# -- what it costs --------------------------------------------------------------------------------


def test_a_micro_batch_takes_few_round_trips(bucket, s3):
    with OPEN(bucket, TOPOLOGY) as state:
        assert sum(one.path.endswith("head.json") for one in s3.requests) == 2
        for number in range(4):
            run_one(state, number)
            state.records.append_progress({"batch_id": number})
            state.prune(number)
        before = len(s3.requests)
        run_one(state, 4)
        state.records.append_progress({"batch_id": 4})
        state.prune(4)
        # Whether letters are sent again, plan, decision, mark; what runs left is looked for in one
        # of eight.
        assert len(s3.requests) - before == 4
        before = len(s3.requests)
        run_one(state, 5, {"lines": records(0, 3)}, nonacked=roots(1, 2), prune=True)
        assert len(s3.requests) - before == 6, s3.requests[before:]
    assert [line["batch_id"] for line in head_of(bucket)["progress"]] == [0, 1, 2, 3, 4]


def test_nothing_depends_on_a_list(bucket, s3):
    s3.lagging = True
    for number in range(4):
        with OPEN(bucket) as state:
            run_one(state, number, {"lines": records(0, number + 1)}, prune=True)
    with OPEN(bucket) as state:
        assert state.waiting(3).rows() == 4
