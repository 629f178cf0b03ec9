"""The acker: what it does with messages, Storm's routing, and callbacks; in simulated time."""

import asyncio
from functools import partial

import numpy as np
import pytest
from ledger_scripts import Clock, int32s, int64s
from separately import run_threads

from ackcore import ACK, FAIL, RESET, Acker
from ackcore._records import ACKED, FAILED, RESET_TIMEOUT, Outcomes
from ackcore.ids import acker_task

T = 30_000  # milliseconds: the default time-out, and so the default period


# Messages.


def test_scalars_do_what_the_ledger_does(make_acker):
    clock = Clock(1000)
    acker = make_acker(clock=clock)
    assert acker.ack(7, 5) is None  # before its init
    assert acker.get(7).task == -1
    clock.now_ms = 1500
    assert acker.init(7, 5, 2) == (7, 2, ACKED, 500)
    assert acker.init(-1, 3, 0) is None
    assert -1 in acker
    assert 2**64 - 1 in acker
    assert acker.reset_timeout(-1) == (-1, 0, RESET_TIMEOUT, 0)
    assert acker.fail(-1) == (-1, 0, FAILED, 0)
    assert acker.get(-1) is None
    assert len(acker) == 0


def test_columns_do_what_the_scalars_do(make_acker):
    roots = np.arange(-20, 20)
    by_row, by_column = make_acker(), make_acker()
    scalar = [by_row.init(root, root ^ 9, abs(root)) for root in roots.tolist()]
    scalar += [by_row.ack(root, root ^ 9) for root in roots[:10].tolist()]
    scalar += [by_row.reset_timeout(root) for root in roots[10:20].tolist()]
    scalar += [by_row.fail(root) for root in roots[20:30].tolist()]
    bulk = [
        *by_column.init_many(roots, roots ^ 9, np.abs(roots).astype(np.int32)),
        *by_column.ack_many(roots[:10], roots[:10] ^ 9),
        *by_column.reset_timeout_many(roots[10:20]),
        *by_column.fail_many(roots[20:30]),
    ]
    assert sorted(bulk) == sorted(outcome for outcome in scalar if outcome is not None)
    assert sorted(by_row.entries()) == sorted(by_column.entries())


def test_mixed_batch_is_applied_in_order_for_each_root(make_acker):
    acker = make_acker()
    roots = np.repeat(np.arange(8), 4)
    vals = int64s([5, 0, 5, 6] * 8)
    kinds = int32s([3, RESET, ACK, FAIL] * 8)
    outcomes = acker.apply(roots, vals, kinds)
    assert isinstance(outcomes, Outcomes)
    of_root = {root: [] for root in range(8)}
    for outcome in outcomes:
        of_root[outcome.root_id].append(outcome.kind)
    assert of_root == {root: [RESET_TIMEOUT, ACKED] for root in range(8)}
    assert len(acker) == 8  # the fail after the ack made an entry that nothing will finish


def test_roots_go_to_the_shard_that_storm_sends_them_to(Ledger):
    made = []

    def factory(*args, **kwargs):
        made.append(Ledger(*args, **kwargs))
        return made[-1]

    acker = Acker(factory, shards=4, clock=Clock(), capacity=10)
    # Storm's own vectors for four tasks.
    vectors = {0: 3, 1: 0, -1: 3, 42: 1, -(2**63): 3, 2**63 - 1: 3, 0x0123456789ABCDEF: 3}
    acker.init_many(int64s(vectors), int64s([1] * 7), int32s([0] * 7))
    assert {root: [root in ledger for ledger in made].index(True) for root in vectors} == vectors
    for root, shard in vectors.items():
        assert acker.ack(root, 1).root_id == root
        assert root not in made[shard]
    many = np.arange(-500, 500) * 0x9E3779B97F4A7
    acker.init_many(many, many | 1, np.zeros(1000, np.int32))
    assert [len(ledger) for ledger in made] == np.bincount(acker_task(many, 4)).tolist()
    assert all(acker.get(root).val == root | 1 for root in many.tolist())
    assert len(acker) == len(acker.entries()) == 1000


ONES, TASKS = int64s([1, 1]), int32s([1, 2])


@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (TypeError, "root_ids must be an array", lambda a: a.apply([1], ONES, TASKS)),
        (TypeError, "ack_vals must", lambda a: a.ack_many(ONES, np.array([1.0]))),
        (ValueError, "init_vals has 1", lambda a: a.init_many(ONES, ONES[:1], TASKS)),
        (ValueError, "got -4 in row 1", lambda a: a.apply(ONES, ONES, int32s([1, -4]))),
        (ValueError, "got -1 in row 1", lambda a: a.init_many(ONES, ONES, int32s([1, -1]))),
        (OverflowError, "root_id must fit", lambda a: a.ack(2**64, 1)),
        (TypeError, "root_id must be an integer", lambda a: a.fail("1")),
        (TypeError, "root_id must be an integer", lambda a: 1.5 in a),
        (TypeError, "now_ms must be an integer", lambda a: a.tick("now")),
    ],
)
def test_refused_calls_apply_nothing(make_acker, error, words, call):
    acker = make_acker()
    with pytest.raises(error, match=words):
        call(acker)
    assert len(acker) == 0


# Arguments.


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"shards": 0}, ValueError, "records would not be tracked"),
        ({"shards": -1}, ValueError, "shards must be in 1..65536, got -1"),
        ({"shards": 1.5}, TypeError, "shards must be an integer"),
        ({"buckets": 1}, ValueError, "buckets must be in 2..126, got 1"),
        ({"timeout_s": 0}, ValueError, r"timeout_s must be above 0 and at most 1e\+09, got 0"),
        ({"timeout_s": float("inf")}, ValueError, r"timeout_s must be above 0 and at most 1e\+09"),
        ({"timeout_s": float("nan")}, ValueError, r"timeout_s must be above 0 and at most 1e\+09"),
        ({"timeout_s": 1e10}, ValueError, r"timeout_s must be above 0 and at most 1e\+09, got 1"),
        ({"period_s": 1e10}, ValueError, r"period_s must be above 0 and at most 1e\+09, got 1"),
        ({"timeout_s": "30"}, TypeError, "timeout_s must be a number of seconds, got str"),
        ({"period_s": True}, TypeError, "period_s must be a number of seconds, got bool"),
        ({"clock": 5}, TypeError, "clock must be callable, got int"),
        ({"clock": lambda: 1.5}, TypeError, "clock"),
        ({"on_outcomes": 0}, TypeError, "on_outcomes must be callable, got int"),
        ({"on_expired": []}, TypeError, "on_expired must be callable, got list"),
        ({"wait": None}, TypeError, "wait must be callable, got NoneType"),
        ({"on_outcomes": asyncio.sleep}, TypeError, "on_outcomes must be a plain function"),
        ({"on_expired": lambda ids: (yield)}, TypeError, "on_expired must be a plain function"),
        ({"capacity": 0}, ValueError, "capacity must be at least 1"),
    ],
)
def test_wrong_arguments_are_refused_by_name(make_acker, arguments, error, words):
    with pytest.raises(error, match=words):
        make_acker(**arguments)


@pytest.mark.parametrize(
    ("backend", "error", "words"),
    [
        ("rust", ValueError, "no backend has the name 'rust'"),
        (
            5,
            TypeError,
            "backend must be the name of a backend, or a callable that .*, got int; leave",
        ),
        (
            {},
            TypeError,
            "backend must be the name of a backend, or a callable that .*, got dict; leave",
        ),
        (lambda: 5, TypeError, "with the arguments capacity, .*: .*keyword argument"),
        (lambda *_, **__: {}, TypeError, "lack .*apply.*rotate"),
    ],
)
def test_wrong_backends_are_refused(backend, error, words):
    with pytest.raises(error, match=words):
        Acker(backend)


def test_backend_by_default_and_by_name():
    assert len(Acker()) == len(Acker("python")) == 0
    acker = Acker("python", shards=2)
    assert repr(acker) == "Acker(shards=2, buckets=3, period_s=30.0, pending=0)"
    assert (acker.shards, acker.buckets, acker._period_ms) == (2, 3, T)


# Callbacks.


def test_each_spout_task_gets_its_outcomes(make_acker):
    clock, received = Clock(), {}
    acker = make_acker(
        clock=clock, on_outcomes=lambda task, outcomes: received.update({task: outcomes})
    )
    roots = np.arange(30)
    acker.init_many(roots, roots + 1, (roots % 3).astype(np.int32))
    clock.now_ms = 40
    returned = acker.ack_many(roots[:20], roots[:20] + 1)
    assert sorted(received) == [0, 1, 2]
    for task, outcomes in received.items():
        assert isinstance(outcomes, Outcomes)
        expected = [(root, task, ACKED, 40) for root in range(task, 20, 3)]
        assert sorted(outcomes) == expected
    assert sorted(returned) == sorted(row for outcomes in received.values() for row in outcomes)


def test_scalars_tell_as_well(make_acker):
    received = []
    acker = make_acker(on_outcomes=lambda task, outcomes: received.append((task, *outcomes)))
    acker.init(8, 1, 5)
    assert received == []
    outcome = acker.ack(8, 1)
    assert received == [(5, outcome)]


def test_callbacks_may_call_the_acker(make_acker):
    clock, log = Clock(), []

    def on_outcomes(task, outcomes):
        log.append(("outcomes", len(acker)))
        acker.init(100, 1, task)
        acker.tick()

    def on_expired(entries):
        log.append(("expired", len(acker)))
        acker.tick()
        acker.init(200, 1, 0)

    acker = make_acker(clock=clock, on_outcomes=on_outcomes, on_expired=on_expired)
    acker.init(1, 0, 0)
    assert log == [("outcomes", 0)]
    clock.now_ms = 3 * T
    acker.tick()
    assert log == [("outcomes", 0), ("expired", 0)]
    assert 200 in acker


@pytest.mark.parametrize("kind", [RuntimeError, SystemExit])
def test_a_callback_that_raises_keeps_no_other_from_being_called(make_acker, kind):
    received = []

    def on_outcomes(task, outcomes):
        received.append(task)
        if task in broken:
            raise kind(f"task {task}")

    roots, broken = np.arange(6), {1}
    acker = make_acker(on_outcomes=on_outcomes)
    acker.init_many(roots, roots + 1, (roots // 2).astype(np.int32))
    with pytest.raises(kind, match="task 1"):
        acker.ack_many(roots, roots + 1)
    assert received == [0, 1, 2]
    assert len(acker) == 0

    broken = {0, 2}
    with pytest.raises(BaseExceptionGroup, match="raised for several spout tasks") as group:
        acker.init_many(roots, np.zeros(6, np.int64), (roots // 2).astype(np.int32))
    assert [str(error) for error in group.value.exceptions] == ["task 0", "task 2"]
    with pytest.raises(kind, match="task 2"):
        acker.init(9, 0, 2)
    assert received == [0, 1, 2, 0, 1, 2, 2]


def test_outcomes_of_some_shards_are_told_if_another_lacks_memory(make_acker):
    told = []
    acker = make_acker(shards=3, on_outcomes=lambda task, outcomes: told.extend(outcomes.root_ids))
    roots = np.arange(90)
    shards = acker_task(roots, 3)

    class Full:
        def init_many(self, *columns):
            raise MemoryError("full")

    ledger, acker._shards[1] = acker._shards[1], Full()
    with pytest.raises(MemoryError, match="full"):
        acker.init_many(roots, np.zeros(90, np.int64), np.zeros(90, np.int32))
    assert sorted(told) == roots[shards == 0].tolist()
    acker._shards[1] = ledger
    assert len(acker) == 0


def test_on_expired_that_raises_is_heard_and_heard_once(make_acker):
    clock = Clock()

    def on_expired(entries):
        raise RuntimeError(f"{len(entries)} left")

    acker = make_acker(clock=clock, on_expired=on_expired)
    acker.init(1, 1, 0)
    clock.now_ms = 3 * T
    with pytest.raises(RuntimeError, match="1 left"):
        acker.tick()
    assert acker.tick() == 0


# Looking inside.


def test_oldest_come_first(make_acker):
    clock = Clock()
    acker = make_acker(clock=clock)
    for root, clock.now_ms in [(5, 0), (4, 10), (9, 10), (7, T), (3, 2 * T)]:
        acker.init(root, 1, 0)
    acker.reset_timeout(5)
    assert acker.oldest(4).root_ids.tolist() == [4, 9, 7, 5]
    assert acker.oldest(99).root_ids.tolist() == [4, 9, 7, 5, 3]
    assert acker.oldest(0).root_ids.tolist() == []


def test_saved_entries_go_on_under_other_shards(Ledger, make_acker):
    clock = Clock()
    acker = make_acker(clock=clock)
    roots = np.arange(50) * 12345678912345
    acker.init_many(roots, roots + 1, (roots % 5).astype(np.int32))
    clock.now_ms = T + 500
    acker.apply(int64s([3, -4]), int64s([1, 1]), int32s([FAIL, ACK]))
    saved = acker.entries()
    again = Acker.from_entries(saved, Ledger, shards=5, clock=clock)
    assert again.shards == 5
    assert sorted(again.entries()) == sorted(saved)
    assert again.get(-4) == acker.get(-4)
    outcomes = again.ack_many(roots, roots + 1)
    assert sorted(outcomes) == [(root, root % 5, ACKED, T + 500) for root in roots.tolist()]


def test_wrong_entries_are_refused_before_any_is_taken(make_acker):
    saved = make_acker().entries()
    with pytest.raises(TypeError, match=r"entries must be ackcore.Entries, got list"):
        Acker.from_entries([])
    saved.tasks = [1]
    with pytest.raises(TypeError, match="tasks must be an array"):
        Acker.from_entries(saved, shards=2)


def test_stats_are_summed(make_acker):
    acker = make_acker()
    for root in range(10):
        acker.init(root, 1, 0)
        acker.init(root, 2, 0)
    assert acker.stats.second_inits == 10


def test_four_threads_lose_nothing(make_acker):
    received = []
    acker = make_acker(on_outcomes=lambda task, outcomes: received.append(outcomes.root_ids))

    def work(task):
        roots = np.arange(2_000) * 4 + task
        for some in np.split(roots, 20):
            acker.init_many(some, some | 2**40, np.full(len(some), task, np.int32))
            acker.init(-1 - int(some[0]), 1, task)
        for some in np.split(roots, 40):
            acker.ack_many(some, some | 2**40)
        for some in np.split(roots, 20):
            acker.ack(-1 - int(some[0]), 1)

    run_threads(*(partial(work, task) for task in range(4)))
    assert len(acker) == 0
    roots = np.concatenate(received)
    assert len(roots) == len(np.unique(roots)) == 8_080
