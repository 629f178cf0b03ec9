"""The memory of offset trackers, and threads that share one."""

import pickle
import sys
import threading

import numpy as np
import pytest

from ackcore import OffsetState


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
    counts, errors = [0] * threads, []
    tracker.emitted(np.arange(rows))
    start = threading.Barrier(threads + 1)

    def acking(mine):
        order = np.random.default_rng(mine).permutation(rows // batch) * batch
        start.wait()
        try:
            for at in order:
                counts[mine] += tracker.acked(np.arange(at, at + batch))
                counts[mine] += tracker.acked(int(at))
        except BaseException as error:
            errors.append(error)

    def looking():
        start.wait()
        try:
            while tracker.pending:
                seen = tracker.state()
                assert seen.committable <= seen.end
                assert len(seen.hole_starts) == 0 or seen.hole_starts[0] == seen.committable
                pickle.dumps(tracker)
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        workers = [threading.Thread(target=acking, args=(mine,)) for mine in range(threads)]
        workers.append(threading.Thread(target=looking))
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors
    assert sum(counts) == rows
    assert tracker.committable == rows
    assert tracker.stats.repeated == (threads - 1) * rows + threads * (rows // batch)
