"""Promises of the compiled ledger only: columns let others run, calls are short, memory fails
before the first row."""

import os
import sys
import threading

import numpy as np
import pytest
from separately import run_python

ROWS = 300_000
ROOTS = np.arange(ROWS) * 0x5DEECE66D
VALS = ROOTS | 1
OFFSETS = np.arange(ROWS)
TASKS = np.full(ROWS, 3, np.int32)


def filled(native):
    ledger = native.Ledger(ROWS)
    ledger.init_many(ROOTS, VALS, TASKS)
    return ledger


def turned(native):
    ledger = filled(native)
    for _ in range(3):
        ledger.rotate()
    return ledger


def some(make, native):
    """Several, one after the other."""
    return (make(native) for _ in range(200))


# Without the GIL.

CALLS = {
    "apply": lambda ledger: ledger.apply(ROOTS, VALS, TASKS),
    "init_many": lambda ledger: ledger.init_many(ROOTS, VALS, TASKS),
    "ack_many": lambda ledger: ledger.ack_many(ROOTS, VALS),
    "fail_many": lambda ledger: ledger.fail_many(ROOTS),
    "reset_timeout_many": lambda ledger: ledger.reset_timeout_many(ROOTS),
    "fold": lambda ledger: ledger.fold(ROOTS, VALS, TASKS),
    "settle": lambda ledger: ledger.settle(),
    "entries": lambda ledger: ledger.entries(),
}
ID_CALLS = {
    "root_ids": lambda native: native.root_ids(1, 0, OFFSETS, 0),
    "edge_ids": lambda native: native.edge_ids(1, ROOTS, "split", ROOTS, 0),
    "acker_task": lambda native: native.acker_task(ROOTS, 7),
    "next_many": lambda native: native.IdSource(1).next_many(ROWS),
}


@pytest.fixture
def no_thread_is_interrupted():
    """The thread that has the GIL keeps it until it is handed over."""
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        pytest.skip("this Python has no GIL")
    before = sys.getswitchinterval()
    sys.setswitchinterval(1_000)
    yield
    sys.setswitchinterval(before)


def another_ran(call, *arguments):
    """Whether another thread got to run before a call was over."""
    may_look, stages, seen = threading.Lock(), ["under way"], []
    may_look.acquire()

    def look():
        with may_look:
            seen.append(stages[-1])

    looking = threading.Thread(target=look)
    looking.start()  # and it goes on until it waits for the lock
    may_look.release()
    call(*arguments)
    stages.append("over")
    looking.join()
    return seen == ["under way"]


def test_what_keeps_the_gil_is_noticed(no_thread_is_interrupted):
    """The tests below can fail."""
    assert not another_ran(sum, range(1_000_000))


@pytest.mark.parametrize("name", CALLS)
def test_columns_are_taken_without_the_gil(native, no_thread_is_interrupted, name):
    # On a busy machine the other thread may wake too late, but not always; kept out, it always is.
    assert any(another_ran(CALLS[name], ledger) for ledger in some(filled, native))


def test_expired_are_handed_out_without_the_gil(native, no_thread_is_interrupted):
    assert any(another_ran(ledger.expired) for ledger in some(turned, native))


def test_entries_are_merged_without_the_gil(native, no_thread_is_interrupted):
    entries = filled(native).entries()
    assert any(another_ran(ledger.merge, entries) for ledger in some(filled, native))


@pytest.mark.parametrize("name", ID_CALLS)
def test_ids_are_made_without_the_gil(native, no_thread_is_interrupted, name):
    assert any(another_ran(ID_CALLS[name], native) for _ in range(2_000))


# A few buckets at a time.


def held(ledger):
    """Slots that are taken, be their entries alive or dead."""
    return sum(int((table["stamps"] != 0).sum()) for table in ledger.tables)


def test_growth_moves_a_few_buckets_with_each_call(native):
    ledger = filled(native)
    at = 2**40
    while ledger.stats.growths == 0:
        ledger.ack_many(np.arange(at, at + 100), np.ones(100, np.int64))
        at += 100
    calls = 0
    while len(ledger.tables) == 2:
        ledger.ack_many(np.arange(at, at + 100), np.ones(100, np.int64))
        at += 100
        calls += 1
    # A call of a hundred rows moves some hundred of the hundred thousand buckets.
    assert calls > 200
    assert ledger.ack_many(ROOTS, VALS).root_ids.tolist() == ROOTS.tolist()


def test_a_turn_touches_no_entry(native):
    ledger = filled(native)
    before = ledger.tables[0].tobytes()
    for _ in range(3):
        ledger.rotate()
    assert len(ledger) == 0
    assert ledger.tables[0].tobytes() == before


def test_what_was_not_taken_is_swept_little_by_little(native):
    ledger = turned(native)
    ledger.rotate()  # after which it can no longer be taken
    steps = [held(ledger)]
    assert steps[0] > ROWS // 2  # a turn sweeps a little itself
    while steps[-1] > 0:
        ledger.ack_many(ROOTS[:100], VALS[:100])
        ledger.ack_many(ROOTS[:100], VALS[:100])
        ledger.init_many(ROOTS[:100], ROOTS[:100] * 0, TASKS[:100])
        steps.append(held(ledger))
    assert max(np.diff(steps) * -1) < ROWS // 50
    assert ledger.stats.expired_untaken == ROWS


def test_turns_alone_sweep_what_was_not_taken(native):
    """So the turn that comes round to an old stamp finds nothing left of it."""
    ledger = turned(native)
    steps = [held(ledger)]
    while steps[-1] > 0:
        ledger.rotate()
        steps.append(held(ledger))
    assert 5 < len(steps) < 126 - 3
    assert max(np.diff(steps) * -1) <= 6 * 16_384


# Memory that is not there.

WITHOUT_MEMORY = """
import resource, sys
import numpy as np
import ackcore._native as native

ledger = native.Ledger(1_000, max_entries=2**40)
ledger.init_many(np.arange(500), np.arange(500) + 1, np.zeros(500, np.int32))
roots = np.arange(2_000_000)
entries = native.Ledger(1)
entries.ack_many(roots, roots)
entries = entries.entries()
before = sorted(ledger.entries()), ledger.stats, ledger.capacity
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
# Enough for the columns of outcomes, and not for a table of so many entries.
resource.setrlimit(resource.RLIMIT_AS, (used + (80 << 20), resource.RLIM_INFINITY))
for call in (
    lambda: ledger.ack_many(roots, roots),
    lambda: ledger.fold(roots, roots, roots.astype(np.int32)),
    lambda: ledger.merge(entries),
):
    try:
        call()
    except MemoryError as error:
        assert "no memory" in str(error), error
    else:
        sys.exit("there was memory")
    assert (sorted(ledger.entries()), ledger.stats, ledger.capacity) == before
done = ledger.ack_many(np.arange(500), np.arange(500) + 1)
assert done.root_ids.tolist() == list(range(500))
"""


LITTLE_MEMORY = """
import resource
import numpy as np
import ackcore._native as native

ledger = native.Ledger(1_000_000)
roots = np.arange(900_000)
for part in np.split(roots, 90):
    ledger.ack_many(part, part + 1)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (20 << 20), resource.RLIM_INFINITY))
# They are all pending: a table of twice the size would be a convenience.
ledger.ack_many(roots[:70_000], roots[:70_000])
assert len(ledger) == 900_000
"""

NO_MORE_THAN_IT_MUST = """
import resource
import numpy as np
import ackcore._native as native

ledger = native.Ledger(1_000_000)
for part in np.array_split(np.arange(ledger.capacity), 100):
    ledger.ack_many(part, part + 1)
assert len(ledger) == ledger.capacity and ledger.stats.growths == 0
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
# Enough for a third more entries, and not for twice as many.
resource.setrlimit(resource.RLIMIT_AS, (used + (78 << 20), resource.RLIM_INFINITY))
ledger.ack(-1, 1)
assert ledger.stats.growths == 1
# Were there no room beyond what it must have, each new root would ask for the next table.
assert len(ledger) + 10_000 < ledger.capacity < 1.2 * len(ledger), (len(ledger), ledger.capacity)
ledger.ack_many(np.arange(-10_000, -1), np.ones(9_999, np.int64))
assert ledger.stats.growths == 1
"""


BOUND_IS_KEPT = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (1 << 40, resource.RLIM_INFINITY))
print(resource.getrlimit(resource.RLIMIT_AS)[0] == 1 << 40)
"""


@pytest.fixture(scope="module")
def bounded_memory():
    """Skip where a bound on memory is taken and not set, as QEMU does."""
    if run_python(BOUND_IS_KEPT) != "True\n":
        pytest.skip("memory cannot be bounded here")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the kernel what is used")
@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="ASan reserves terabytes")
@pytest.mark.parametrize(
    "script",
    [WITHOUT_MEMORY, LITTLE_MEMORY, NO_MORE_THAN_IT_MUST],
    ids=["refused", "suffices", "frugal"],
)
def test_a_batch_is_applied_if_memory_suffices_and_else_not_at_all(native, bounded_memory, script):
    # Threads of numpy's would take address space of their own.
    run_python(script, OPENBLAS_NUM_THREADS="1")


def test_a_table_that_no_machine_holds_is_refused(native):
    with pytest.raises(MemoryError, match=rf"at most \d+ entries, got {2**62}; "):
        native.Ledger(2**62)
