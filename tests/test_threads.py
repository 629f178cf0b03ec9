"""Threads that share one ledger: nothing is lost, nothing comes twice, nothing deadlocks."""

import pickle
import sys
import threading

import numpy as np
import pytest
from ledger_scripts import Clock, int32s
from separately import run_threads

THREADS = 4


@pytest.fixture
def often_switched():
    """Threads that want the GIL get it at once."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def forest(trees):
    """Trees of one edge per thread: roots, init vals, and the edges."""
    chance = np.random.default_rng(3)
    roots = chance.permutation(np.arange(trees) << 20)
    edges = chance.integers(-(2**63), 2**63, (THREADS, trees))
    return roots, np.bitwise_xor.reduce(edges), edges


def test_long_batches_of_four_threads_on_the_same_roots(native):
    """Batches long enough that two of them run at once, if nothing keeps them apart."""
    roots = np.arange(1_600_000) % 16
    ledger = native.Ledger()
    vals = np.random.default_rng(9).integers(-(2**63), 2**63, (THREADS, len(roots)))

    def acking(mine):
        def work():
            for _ in range(3):
                ledger.ack_many(roots, vals[mine])

        return work

    run_threads(*(acking(thread) for thread in range(THREADS)))
    # An odd number of rounds leaves every val in once.
    wanted = np.bitwise_xor.reduce(np.bitwise_xor.reduce(vals).reshape(-1, 16))
    assert [ledger.get(root).val for root in range(16)] == wanted.tolist()
    assert len(ledger) == 16


def test_scalars_of_four_threads_on_the_same_roots(Ledger):
    """Every thread acks all edges of its own on few roots, one call at a time."""
    roots, rounds = 8, 500
    ledger = Ledger(capacity=1)

    def acking(thread):
        def work():
            for turn in range(rounds):
                for root in range(roots):
                    ledger.ack(root, (thread + 1) << (turn % 50))

        return work

    run_threads(*(acking(thread) for thread in range(THREADS)))
    wanted = 0
    for turn in range(rounds):
        for thread in range(THREADS):
            wanted ^= (thread + 1) << (turn % 50)
    assert [ledger.get(root).val for root in range(roots)] == [wanted] * roots


def test_looking_and_turning_beside_the_traffic(Ledger):
    """Every way in at once; what is counted in the end adds up."""
    trees = 2_000
    roots, vals, edges = forest(trees)
    clock = Clock()
    ledger = Ledger(capacity=1, buckets=126, clock=clock)
    taken, outcomes = [], []
    stop = threading.Event()

    def traffic():
        for at in range(0, trees, 20):
            some = slice(at, at + 20)
            outcomes.extend(ledger.init_many(roots[some], vals[some], int32s([1] * 20)))
            for mine in edges[: THREADS - 1]:
                outcomes.extend(ledger.ack_many(roots[some], mine[some]))
        stop.set()

    def turning():
        turns = 0
        while not stop.is_set():
            if turns < 60:  # fewer than the buckets: nothing expires
                ledger.rotate()
                turns += 1
            taken.extend(ledger.expired(5))

    def looking():
        while not stop.is_set():
            for row in ledger.oldest(5):
                ledger.get(row.root_id)
            pickle.loads(pickle.dumps(ledger)).settle()
            assert len(ledger.entries()) <= trees
            assert ledger.nbytes > 0
            assert ledger.stats.second_inits == 0

    run_threads(traffic, turning, looking)
    assert (taken, outcomes) == ([], [])
    done = ledger.ack_many(roots, edges[THREADS - 1])
    assert done.root_ids.tolist() == roots.tolist()
    assert len(ledger) == 0


def test_max_entries_holds_between_threads(Ledger):
    """Calls race for the last places; those that do not fit are refused whole."""
    ledger = Ledger(capacity=1, max_entries=100)
    refused = []

    def filling(thread):
        def work():
            for at in range(20):
                roots = np.arange(3) + (thread * 20 + at) * 3
                try:
                    ledger.ack_many(roots, roots + 1)
                except RuntimeError:
                    refused.append(roots)

        return work

    run_threads(*(filling(thread) for thread in range(THREADS)))
    assert len(ledger) == 99
    assert len(refused) == THREADS * 20 - 33
    for roots in refused:
        assert all(root not in ledger for root in roots.tolist())


def test_four_threads_share_what_expired(Ledger):
    """Each entry is taken by one of them, while another puts entries in and acks them."""
    ledger, roots = Ledger(capacity=1, buckets=2), np.arange(60_000)
    ledger.ack_many(roots, roots)
    ledger.rotate()
    ledger.rotate()
    taken, done = [], []

    def taking():
        while len(entries := ledger.expired(9_000)):
            taken.append(entries)

    def traffic():
        for at in range(60_000, 90_000, 1_000):
            some = np.arange(at, at + 1_000)
            ledger.init_many(some, some, int32s([7] * 1_000))
            done.append(len(ledger.ack_many(some, some)))

    run_threads(traffic, *[taking] * THREADS)
    found = np.concatenate([entries.root_ids for entries in taken])
    assert sorted(found.tolist()) == roots.tolist()
    assert done == [1_000] * 30
    assert (len(ledger), ledger.stats.expired_untaken) == (0, 0)


def test_a_copy_is_of_one_moment(Ledger, often_switched):
    """Entries and counters that are saved while the wheel turns belong together."""
    for _ in range(5):
        ledger = Ledger(buckets=126)
        for root in range(126):
            ledger.ack_many(np.arange(20) + 20 * root, np.ones(20, np.int64))
            if root < 125:
                ledger.rotate()
        seen = []

        def saving(ledger=ledger, seen=seen):
            while len(ledger) > 0:
                *_, entries, _expired, stats = ledger.__reduce__()[1]
                seen.append(len(entries) + stats.orphans)

        def turning(ledger=ledger):
            for _ in range(126):
                ledger.rotate()
                for _ in range(20):
                    len(ledger)

        run_threads(saving, turning)
        assert set(seen) <= {126 * 20}


def test_merging_two_ledgers_into_each_other(Ledger):
    """Each locks itself only: merging both ways at once does not deadlock."""
    one, other = Ledger(), Ledger()
    roots = np.arange(100)
    one.ack_many(roots, roots + 1)

    def merging(into, source):
        def work():
            for _ in range(50):
                into.merge(source.entries())

        return work

    run_threads(merging(one, other), merging(other, one))
    assert len(one) == len(other) == 100
