"""Offset trackers, on both backends: what is done, what may be committed, what changes nothing."""

import copy
import os
import pickle
import random
import sys
from functools import partial

import numpy as np
import pytest
from offset_oracle import STEPS, Machine
from separately import run_threads

from ackcore._records import OffsetState, OffsetStats

NONE = np.empty(0, np.int64)
HUGE = 10**9


def int64s(*offsets):
    return np.array(offsets, np.int64)


@pytest.fixture(scope="session")
def OffsetTracker(backend):
    return backend.OffsetTracker


@pytest.fixture
def tracker(OffsetTracker):
    """Records 100..109 are in flight."""
    tracker = OffsetTracker("lines", 3, 7, 100)
    assert tracker.emitted(np.arange(100, 110)) == 10
    return tracker


def holes_of(tracker):
    return tracker.holes().tolist()


# What Storm's OffsetManagerTest asks, in its words where it has them.


def test_acks_out_of_order_become_contiguous(tracker):
    for offset, committable in [(102, 100), (101, 100), (104, 100), (100, 103), (103, 105)]:
        assert tracker.acked(offset) == 1
        assert tracker.committable == committable


# Failures.


def test_a_thousand_failures_are_each_counted(OffsetTracker):
    """Enough that the native table grows, and by chance, so that places in it are contended."""
    tracker = OffsetTracker("lines", 0, 0, 0)
    offsets = np.sort(np.random.default_rng(4).choice(50_000, 1_000, replace=False))
    tracker.emitted(np.arange(50_000))
    for attempt in range(1, 4):
        assert tracker.failed(offsets) == 1_000
        assert tracker.waiting == 1_000
        assert [tracker.attempt(offset) for offset in offsets.tolist()] == [attempt] * 1_000
        assert tracker.emitted(offsets) == 1_000
    some, others = offsets[::2].copy(), offsets[1::2].copy()
    assert tracker.failed(offsets) == 1_000
    assert tracker.acked(some) == 500
    assert tracker.waiting == 500
    assert [tracker.attempt(offset) for offset in others.tolist()] == [4] * 500
    assert tracker.state().failed.tolist() == others.tolist()
    assert tracker.acked(others) == 500
    assert (tracker.waiting, len(tracker.state().failed)) == (0, 0)


# Gaps and positions.


@pytest.mark.parametrize("gap", [1, 63, 64, 65, 300, 320, 321, 385, 5_000, HUGE, 2**62])
def test_gaps_of_any_width_are_done(OffsetTracker, gap):
    tracker = OffsetTracker("lines", 0, 0, 30)
    above = 40 + gap
    tracker.emitted(np.arange(30, 40))
    tracker.emitted(np.arange(above, above + 10))
    assert tracker.pending == 20
    assert tracker.is_done(int64s(39, 40, above - 1, above)).tolist() == [False, True, True, False]
    assert tracker.acked(int64s(40, above - 1)) == 0  # not there, as if it were done
    assert tracker.acked(int64s(above + 9, 30, above)) == 3
    assert holes_of(tracker) == [*range(31, 40), *range(above + 1, above + 9)]
    assert tracker.acked(np.arange(31, 40)) == 9
    assert tracker.committable == above + 1
    assert tracker.acked(np.arange(above, above + 10)) == 8
    assert tracker.committable == above + 10


def test_a_wide_gap_costs_nothing(OffsetTracker):
    tracker = OffsetTracker("lines", 0, 0, 0)
    tracker.emitted(0)
    before = tracker.nbytes
    tracker.emitted(int64s(HUGE, 2 * HUGE))
    assert tracker.nbytes - before < 1_000
    assert tracker.state().hole_starts.tolist() == [0, HUGE]


def test_many_gaps_in_one_column(OffsetTracker):
    """Each in a word of its own, far from the others, in the middle of a long column."""
    offsets = np.arange(1_000) ** 3
    tracker = OffsetTracker("lines", 0, 0, 0)
    assert tracker.emitted(offsets) == 1_000
    order = np.random.default_rng(1).permutation(offsets)
    assert tracker.acked(order[:500]) == 500
    left = sorted(order[500:].tolist())
    assert tracker.committable == left[0]
    assert holes_of(tracker) == [o for o in left if o < 999**3]  # done: the gap before the last
    assert tracker.is_done(offsets).tolist() == [o not in set(left) for o in offsets.tolist()]
    assert tracker.acked(order) == 500
    assert tracker.committable == 999**3 + 1


def test_the_last_offset_there_is(OffsetTracker):
    last = 2**63 - 2
    tracker = OffsetTracker("lines", 2**31 - 1, 2**63 - 1, last - 70)
    assert tracker.emitted(np.arange(last - 70, last + 1)) == 71
    assert tracker.acked(np.arange(last - 69, last + 1)) == 70
    assert holes_of(tracker) == [last - 70]
    assert tracker.acked(last - 70) == 1
    assert tracker.committable == tracker.position == last + 1
    tracker.advance(last + 1)
    assert tracker.stats == OffsetStats(0, 0, 0, 0)


# Columns and numbers.


@pytest.mark.parametrize(
    "offsets",
    [
        np.array([101, 103], np.uint64),
        memoryview(np.array([101, 103])),
        np.array([101, 0, 103])[::2].copy(),
        np.int64(101),
    ],
    ids=["uint64", "memoryview", "copy", "numpy's int"],
)
def test_what_is_taken(tracker, offsets):
    n = tracker.acked(offsets)
    assert n == np.size(offsets)
    assert tracker.is_done(101)
    assert tracker.is_done(offsets) is True if n == 1 else tracker.is_done(offsets).all()


RANGE = "offsets must be in 0..9223372036854775806, got "
CODES = "negative values are no offsets, but codes of Kafka"


@pytest.mark.parametrize("name", ["emitted", "acked", "failed", "is_done"])
@pytest.mark.parametrize(
    ("offsets", "error", "words"),
    [
        (-1, ValueError, f"{RANGE}-1; negative"),
        (2**63 - 1, ValueError, f"{RANGE}9223372036854775807"),
        (10**30, ValueError, "offsets must be in 0"),
        (1.0, TypeError, "must be an array or another buffer of 64-bit integers, got float"),
        ([1], TypeError, "got list; numpy.array"),
        (None, TypeError, "got NoneType"),
        (np.array([1.0]), TypeError, "must hold 64-bit integers, got items of dtype float64"),
        (np.arange(4, dtype=np.int32), TypeError, "cast the column to int64 first"),
        (np.arange(4).reshape(2, 2), ValueError, "one-dimensional"),
        (np.arange(110, 130)[::2], ValueError, "C-contiguous"),
        (int64s(110, 111, -1001), ValueError, f"got -1001 in row 2; {CODES}"),
        (int64s(110, 2**63 - 1), ValueError, "got 9223372036854775807 in row 1"),
        (np.array([110, 2**64 - 1], np.uint64), ValueError, "got 18446744073709551615 in row 1"),
    ],
)
def test_bad_offsets_are_refused_and_nothing_is_applied(tracker, name, offsets, error, words):
    tracker.failed(105)
    with pytest.raises(error) as caught:
        getattr(tracker, name)(offsets)
    assert str(caught.value).startswith("offsets must ")
    assert words in str(caught.value)
    assert (tracker.position, tracker.pending, tracker.committable) == (110, 10, 100)
    assert (tracker.waiting, tracker.stats) == (1, OffsetStats(0, 0, 0, 0))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((b"t", 0, 0, 0), TypeError, "topic must be a string, got bytes"),
        (("", 0, 0, 0), ValueError, "topic must not be empty"),
        (("t", -1, 0, 0), ValueError, "partition must be in 0..2147483647, got -1"),
        (("t", 2**31, 0, 0), ValueError, "partition must be in"),
        (("t", "0", 0, 0), TypeError, "partition must be an integer, got str"),
        (("t", 0, -1, 0), ValueError, "generation must be in 0..9223372036854775807, got -1"),
        (("t", 0, 0, -1001), ValueError, "base must be in 0..9223372036854775806, got -1001; neg"),
        (("t", 0, 0, 0.0), TypeError, "base must be an integer, got float"),
        (("t", 0, 0, True), TypeError, "base must be an integer, got bool"),
        (("t", True, 0, 0), TypeError, "partition must be an integer, got bool"),
        (("t", 0, 0, int64s(0, 1)), TypeError, "base must be an integer, got ndarray"),
    ],
)
def test_bad_arguments_are_refused(OffsetTracker, arguments, error, words):
    with pytest.raises(error) as caught:
        OffsetTracker(*arguments)
    assert words in str(caught.value)


def test_bad_numbers_are_refused(tracker):
    for call, words in [
        (lambda: tracker.acked(100, -1), "generation must be in 0..9223372036854775807, got -1"),
        (lambda: tracker.acked(int64s(100), -1), "generation must be in"),
        (lambda: tracker.advance(-5), "position must be in 0..9223372036854775807, got -5"),
        (lambda: tracker.advance(200, -1), "generation must be in"),
        (lambda: tracker.holes(-1), "limit must be at least 0, got -1"),
        (lambda: tracker.state(limit=-1), "limit must be at least 0, got -1"),
        (lambda: tracker.attempt(-1), "offset must be in 0..9223372036854775806, got -1"),
    ]:
        with pytest.raises(ValueError, match="must be") as caught:
            call()
        assert words in str(caught.value)
    assert (tracker.position, tracker.pending) == (110, 10)


def test_what_it_tracks_can_be_read_and_not_set(tracker):
    assert (tracker.topic, tracker.partition, tracker.generation, tracker.base) == (
        *("lines", 3, 7),
        100,
    )
    for name in ("topic", "partition", "generation", "base", "committable"):
        with pytest.raises(AttributeError):
            setattr(tracker, name, 5)
    assert repr(tracker).startswith(
        "<ackcore.OffsetTracker: lines-3, generation 7, committable 100, 10 pending, "
    )


# Saving, loading, restarting.


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_go_on_by_themselves(tracker, way):
    tracker.acked(int64s(101, 102, 400))
    tracker.failed(int64s(104, 105))
    tracker.emitted(int64s(105, 50, HUGE))
    other = way(tracker)
    assert type(other) is type(tracker)
    for name in ("topic", "partition", "generation", "base", "position", "committable", "pending"):
        assert getattr(other, name) == getattr(tracker, name), name
    assert (other.waiting, other.stats, holes_of(other)) == (1, tracker.stats, holes_of(tracker))
    assert (other.attempt(104), other.attempt(105)) == (1, 1)
    assert other.emitted(int64s(104, 105)) == 1
    assert other.acked(int64s(100, 103)) == 2
    assert (other.committable, tracker.committable) == (104, 100)


def test_a_state_is_of_either_backend(native, reference):
    first = native.OffsetTracker("lines", 0, 0, 5)
    first.emitted(np.arange(5, 500))
    first.acked(np.arange(5, 500, 3))
    first.failed(np.arange(6, 100, 30))
    second = reference.OffsetTracker.from_state("lines", 0, 1, first.state())
    third = native.OffsetTracker.from_state("lines", 0, 2, second.state())
    for one, other in zip(first.state(), third.state(), strict=True):
        np.testing.assert_array_equal(one, other)
        assert np.asarray(one).dtype == np.asarray(other).dtype


def state(committable=10, end=20, starts=(10, 15), ends=(12, 16), failed=(), attempts=()):
    return OffsetState(
        committable,
        end,
        int64s(*starts),
        int64s(*ends),
        int64s(*failed),
        np.array(attempts, np.int32),
    )


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (state(committable=9), "committable must be 10, the first of hole_starts (or end, if"),
        (state(starts=(), ends=()), "committable must be 20, the first of hole_starts"),
        (state(end=16), "hole_starts[1], ..., end must ascend, got 16 after 16"),
        (state(starts=(10, 12)), "must ascend, got 12 after 12"),
        (state(ends=(10, 16)), "must ascend, got 10 after 10"),
        (state(starts=(10,)), "hole_starts has 1 row and hole_ends has 2"),
        (state(committable=-1), "committable must be in"),
        (state(failed=(10,)), "failed has 1 row and attempts has 0"),
        (state(failed=(10, 10), attempts=(1, 1)), "failed must ascend, got 10 after 10"),
        (state(failed=(12,), attempts=(1,)), "failed must be offsets not done, got 12 in row 0"),
        (state(failed=(9,), attempts=(1,)), "failed must be offsets not done, got 9 in row 0"),
        (state(failed=(10, 16, 20), attempts=(1, 1, 1)), "not done, got 16 in row 1"),
        (state(failed=(10,), attempts=(0,)), "attempts must be at least 1, got 0 in row 0"),
        (state(failed=(2**63 - 1,), attempts=(1,)), "failed must be in 0..9223372036854775806"),
    ],
)
def test_states_that_cannot_be_are_refused(OffsetTracker, wrong, words):
    with pytest.raises(ValueError, match="must") as caught:
        OffsetTracker.from_state("lines", 0, 0, wrong)
    assert words in str(caught.value)


def test_other_things_than_states_are_refused(OffsetTracker, tracker):
    with pytest.raises(
        TypeError, match=r"state must be .*OffsetState, got OffsetTracker; pass its"
    ):
        OffsetTracker.from_state("lines", 0, 0, tracker)
    with pytest.raises(TypeError, match="got dict"):
        OffsetTracker.from_state("lines", 0, 0, {})
    with pytest.raises(TypeError, match="hole_starts must be an array"):
        OffsetTracker.from_state("lines", 0, 0, state()._replace(hole_starts=[10, 15]))


def test_limits_of_holes(tracker):
    tracker.acked(int64s(102, 103, 107, 109))
    holes = [100, 101, 104, 105, 106, 108]
    for limit in range(8):
        assert tracker.holes(limit).tolist() == holes[:limit]
    assert tracker.holes(10**30).tolist() == holes


# --- Trackers of both backends against sets, step by step.


#: 1_000_000 takes minutes a backend.
RANDOM_STEPS = int(os.environ.get("ACKCORE_OFFSET_STEPS", "10000"))
STEPS_A_RUN = 250


def test_many_random_steps(OffsetTracker):
    """Messages of any kind, gaps, restarts and copies; runs are so long that words are packed,
    dropped and added. Seeded, and the seed is shown.
    """
    for run in range(RANDOM_STEPS // STEPS_A_RUN):
        chance = random.Random(run)
        gap = chance.choice([0, 0, 1, 5, 300, 700])  # how far apart records are, at most
        machine = Machine(OffsetTracker, chance.choice([0, 5, 64, 10_000]))
        for at in range(STEPS_A_RUN):
            name = chance.choice(STEPS)
            n = chance.choice([0, 1, 3, 10, 30, 60 if gap < 300 else 5])
            most = gap if name == "read" else chance.choice([40, 700])
            numbers = [chance.randint(0, most) for _ in range(n)]
            try:
                getattr(machine, name)(numbers, chance.choice(["column", "scalars"]))
                machine.check()
            except AssertionError as error:
                raise AssertionError(f"run {run}, step {at}: {name} {numbers}") from error


# --- The memory of offset trackers, and threads that share one.


def test_an_offset_in_flight_takes_a_bit_and_a_half(native):
    tracker = native.OffsetTracker("lines", 0, 0, 0)
    for start in range(0, 1_000_000, 10_000):
        tracker.emitted(np.arange(start, start + 10_000))
    assert tracker.pending == 1_000_000
    assert tracker.nbytes <= 0.2 * 1_000_000


@pytest.mark.parametrize("batch", [10_000, 5_000_000])
def test_five_million_behind_a_poison_head_take_less_than_a_megabyte(native, batch):
    tracker = native.OffsetTracker("lines", 0, 0, 0)
    most = 0
    for start in range(0, 5_000_000, batch):
        tracker.emitted(np.arange(start, start + batch))
        tracker.acked(np.arange(max(1, start), start + batch))
        most = max(most, tracker.nbytes)
    assert (tracker.committable, tracker.pending) == (0, 1)
    assert most < 1_000_000
    assert tracker.state().hole_ends.tolist() == [1]
    tracker.acked(0)
    assert tracker.committable == 5_000_000


def test_a_window_that_slides_takes_no_more_memory(native):
    tracker = native.OffsetTracker("lines", 0, 0, 0)
    chance = np.random.default_rng(2)
    tracker.emitted(np.arange(10_000))
    most = 0
    for start in range(10_000, 2_000_000, 5_000):
        tracker.emitted(np.arange(start, start + 5_000))
        order = chance.permutation(np.arange(start - 10_000, start - 5_000))
        tracker.acked(order)
        most = max(most, tracker.nbytes)
    assert tracker.committable == 1_990_000
    assert most < 10_000


def test_memory_of_a_rush_is_given_back(native):
    tracker = native.OffsetTracker("lines", 0, 0, 0)
    tracker.emitted(np.arange(5_000_000))
    tracker.failed(np.arange(0, 5_000_000, 500))
    assert tracker.nbytes > 900_000
    tracker.acked(np.arange(5_000_000))
    tracker.emitted(5_000_000)
    tracker.acked(5_000_000)
    assert tracker.nbytes < 20_000


def test_an_idle_tracker_takes_next_to_nothing(native):
    assert native.OffsetTracker("lines", 0, 0, 0).nbytes == 0


def test_what_cannot_be_had_is_refused_and_nothing_is_applied(native):
    """A run of holes that would take more than the address space."""
    tracker = native.OffsetTracker("lines", 0, 0, 0)
    whole = OffsetState(
        0, 2**62 + 1, *(np.array(n, np.int64) for n in ([0], [2**62], [])), np.empty(0, np.int32)
    )
    with pytest.raises(MemoryError, match="read from committable again"):
        native.OffsetTracker.from_state("lines", 0, 0, whole)
    assert tracker.pending == 0


def test_threads_that_share_a_tracker_lose_nothing(backend):
    tracker = backend.OffsetTracker("lines", 0, 0, 0)
    rows, batch, threads = 20_000, 100, 4
    counts = [0] * threads
    tracker.emitted(np.arange(rows))

    def acking(mine):
        order = np.random.default_rng(mine).permutation(rows // batch) * batch
        for at in order:
            counts[mine] += tracker.acked(np.arange(at, at + batch))
            counts[mine] += tracker.acked(int(at))

    def looking():
        while tracker.pending:
            seen = tracker.state()
            assert seen.committable <= seen.end
            assert len(seen.hole_starts) == 0 or seen.hole_starts[0] == seen.committable
            pickle.dumps(tracker)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        run_threads(looking, *(partial(acking, mine) for mine in range(threads)))
    finally:
        sys.setswitchinterval(interval)
    assert sum(counts) == rows
    assert tracker.committable == rows
    assert tracker.stats.repeated == (threads - 1) * rows + threads * (rows // batch)
