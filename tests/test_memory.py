"""Memory follows what is pending, not what has passed; the native ledger alone has tables."""

import ctypes
import mmap
import os
import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest
from ledger_scripts import Clock, int32s

BYTES_AN_ENTRY = 100  # with its marks; growing more than doubles it for a while


def births_and_deaths(ledger, trees, pending, sequential=False, start=0):
    """Open and complete that many trees, with at most so many pending at a time."""
    batch = pending // 2
    tasks = np.zeros(batch, np.int32)
    chance = np.random.default_rng(start)
    before = None
    for at in range(0, trees, batch):
        roots = np.arange(start + at, start + at + batch)
        if not sequential:
            roots = chance.integers(-(2**63), 2**63, batch)
        assert len(ledger.init_many(roots, roots | 1, tasks)) == 0
        if before is not None:
            assert len(ledger.ack_many(before, before | 1)) == batch
        before = roots
    assert len(ledger.ack_many(before, before | 1)) == batch


@pytest.mark.parametrize("sequential", [True, False])
@pytest.mark.parametrize("timed", [True, False])
def test_a_million_births_and_deaths_take_no_more_memory(native, sequential, timed):
    ledger = native.Ledger(capacity=1_000, clock=Clock() if timed else None)
    births_and_deaths(ledger, 20_000, 1_000, sequential)
    nbytes, capacity = ledger.nbytes, ledger.capacity
    births_and_deaths(ledger, 1_000_000, 1_000, sequential, start=2**40)
    assert len(ledger) == 0
    assert ledger.capacity <= capacity
    assert ledger.nbytes <= nbytes
    assert ledger.stats.growths == 0


def test_steady_expiry_takes_no_more_memory(native):
    """Entries that expire and are not taken free their slots."""
    ledger = native.Ledger(capacity=3_000)
    chance = np.random.default_rng(2)

    def rounds(turns):
        for _ in range(turns):
            roots = chance.integers(-(2**63), 2**63, 900)
            ledger.ack_many(roots, roots)
            ledger.rotate()

    rounds(20)
    nbytes, growths = ledger.nbytes, ledger.stats.growths
    rounds(600)
    assert ledger.nbytes <= nbytes
    assert ledger.stats.growths == growths
    assert ledger.stats.expired_untaken == 617 * 900


def test_capacity_holds_what_it_says(native):
    """A ledger made for so many does not grow before."""
    for capacity in (1, 2, 100, 1_000, 123_456):
        ledger = native.Ledger(capacity=capacity)
        assert ledger.capacity >= capacity
        roots = np.arange(capacity) * 0x5DEECE66D
        ledger.ack_many(roots, roots + 1)
        assert len(ledger) == capacity
        assert ledger.stats.growths == 0


def test_a_ledger_grows_and_says_so(native):
    ledger = native.Ledger(capacity=1)
    roots = np.arange(100_000)
    for at in range(0, 100_000, 100):
        ledger.ack_many(roots[at : at + 100], roots[at : at + 100] + 1)
    assert len(ledger) == 100_000
    assert ledger.capacity >= 100_000
    assert 5 <= ledger.stats.growths <= 20
    assert set(ledger.entries().root_ids.tolist()) == set(roots.tolist())


def test_a_copy_beyond_its_capacity_grows_as_any_ledger(native):
    """It has room for what its original held, and one migration is over before the next begins."""
    roots = np.arange(500_000)
    ledger = native.Ledger(capacity=1_000)
    ledger.ack_many(roots[:50_000], roots[:50_000] + 1)
    copied = pickle.loads(pickle.dumps(ledger))
    assert copied.capacity >= 50_000
    at, growths = 50_000, copied.stats.growths
    for moves in (1, 2):
        while copied.stats.growths == growths:
            copied.ack_many(roots[at : at + 1_000], roots[at : at + 1_000] + 1)
            at += 1_000
        growths += 1
        while len(copied.tables) == 2:
            copied.ack_many(roots[at : at + 1_000], roots[at : at + 1_000] + 1)
            at += 1_000
        assert copied.stats.growths == growths, moves
    assert len(copied) == at


def test_memory_an_entry(native):
    ledger = native.Ledger(capacity=100_000)
    roots = np.arange(100_000)
    ledger.ack_many(roots, roots + 1)
    assert ledger.nbytes / len(ledger) < BYTES_AN_ENTRY


#: The checks after each call of such a build read all pages.
unless_checked = pytest.mark.skipif(
    "asan" in os.environ.get("LD_PRELOAD", ""), reason="the sanitized build reads all pages"
)


def resident(ledger):
    """The bytes of a ledger's tables that are in memory."""
    total, libc = 0, ctypes.CDLL(None)
    for table in ledger.tables:
        start = table.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
        length = table.ctypes.data + table.nbytes - start
        pages = (ctypes.c_ubyte * -(-length // mmap.PAGESIZE))()
        assert libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(length), pages) == 0
        total += sum(page & 1 for page in pages) * mmap.PAGESIZE
    return total


@unless_checked
@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_table_that_migrates_takes_a_new_page_for_an_old_one(native, wrapped):
    """Also where entries of the old table's last bucket were displaced into its first one."""
    roots = np.arange(300_000)
    if wrapped:
        last = []  # roots whose home is the last bucket under this seed
        for start in (2**40, 2**41, 2**42):
            ledger = native.Ledger(capacity=200_000, seed=1)
            ledger.ack_many(roots[:200_000] + start, roots[:200_000] + 1)
            last.extend(ledger.tables[0]["keys"][-1].astype(np.int64))
        roots[: len(last)] = last
    ledger = native.Ledger(capacity=200_000, seed=1)
    at = 0
    while ledger.stats.growths == 0:
        ledger.ack_many(roots[at : at + 1_000], np.ones(1_000, np.int64))
        at += 1_000
    assert (ledger.tables[1]["overflow_count"][-1] > 0) == wrapped
    lag = 4 << 20  # a huge page of each table
    while len(ledger.tables) == 2:
        ledger.ack_many(roots[:1_000], np.full(1_000, 2))
        assert ledger.nbytes <= 96 * len(ledger) + lag
        assert resident(ledger) <= ledger.nbytes + lag


def can_populate():
    """Return whether the system can have pages in memory before they are written."""
    try:
        with mmap.mmap(-1, 1 << 16) as memory:
            memory.madvise(23)  # MADV_POPULATE_WRITE
    except (AttributeError, OSError):
        return False
    return True


@unless_checked
@pytest.mark.skipif(not can_populate(), reason="needs Linux 5.14 or later")
def test_a_thread_requests_the_pages_of_a_growing_table(native, monkeypatch):
    """The caller has hardly any page faults, and memory stays within that of the full table."""
    resource = pytest.importorskip("resource")
    roots = np.random.default_rng(3).integers(-(2**63), 2**63, 600_000)
    threads = []

    def at_once(function, arguments):
        thread = threading.Thread(target=function, args=arguments)
        thread.start()
        thread.join()
        threads.append(thread)

    def not_now(function, arguments):
        raise RuntimeError("can't start new thread")

    faults, outcomes = {}, {}
    for start_new_thread in (not_now, at_once):
        monkeypatch.setattr("_thread.start_new_thread", start_new_thread)
        ledger = native.Ledger(capacity=500_000, seed=1)
        ledger.ack_many(roots[:500_000], roots[:500_000])
        faults_before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        for at in range(500_000, 600_000, 1_000):
            ledger.ack_many(roots[at : at + 1_000], roots[at : at + 1_000])
        lag = (4 << 20) + ledger.tables[0].nbytes // 16
        while len(ledger.tables) == 2:
            ledger.ack_many(roots[:1_000], np.full(1_000, 2))
            assert resident(ledger) <= ledger.nbytes + lag
        used = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - faults_before
        faults[start_new_thread] = used
        outcomes[start_new_thread] = np.sort(ledger.entries().root_ids).tolist()
    assert 3 < len(threads) < 40
    assert faults[at_once] < 0.4 * faults[not_now]
    assert outcomes[at_once] == outcomes[not_now]


GROW_FORK_AND_END = """
import os
import numpy as np
from ackcore import _native

roots = np.random.default_rng(3).integers(-(2**63), 2**63, 900_000)
ledger = _native.Ledger()
at = 0

def grow(until):
    global at
    for at in range(at, until, 8192):
        ledger.ack_many(roots[at : at + 8192], roots[at : at + 8192])
    at += 8192

grow(500_000)
while len(ledger.tables) == 1:  # until another migration is under way
    grow(at + 8192)
child = os.fork()
grow(850_000)
assert len(ledger) == at
if child:
    assert os.waitpid(child, 0)[1] == 0
"""  # and ends in the middle of a migration, or soon after one


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_process_that_requests_pages_can_fork_and_end(native):
    for _ in range(3):
        ended = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", GROW_FORK_AND_END],
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert (ended.returncode, ended.stderr) == (0, b"")


def test_a_table_whose_load_fell_shrinks(native):
    ledger = native.Ledger(capacity=100)
    roots = np.arange(200_000)
    ledger.ack_many(roots, roots + 1)
    at_peak = ledger.nbytes
    assert ledger.init_many(roots, roots + 1, int32s(roots * 0)).root_ids.tolist() == roots.tolist()
    births_and_deaths(ledger, 4_000_000, 1_000, start=2**40)
    assert ledger.nbytes < at_peak / 8
    assert len(ledger) == 0


def test_orphans_that_a_migration_leaves_behind_are_counted(native):
    ledger = native.Ledger(capacity=1, buckets=2)
    room = ledger.capacity
    ledger.ack_many(np.arange(room), np.ones(room, np.int64))
    ledger.rotate()
    ledger.rotate()
    ledger.ack(-1, 1)
    assert len(ledger.tables) == 2
    ledger.rotate()
    assert ledger.stats.orphans == room
    assert ledger.stats.expired_untaken == room


def test_expiry_of_a_burst_shrinks_too(native):
    ledger = native.Ledger(capacity=100)
    roots = np.arange(200_000)
    ledger.ack_many(roots, roots + 1)
    at_peak = ledger.nbytes
    for _ in range(60):
        ledger.rotate()
        births_and_deaths(ledger, 20_000, 1_000, start=2**40)
    assert ledger.nbytes < at_peak / 8


def test_tables_are_the_memory(native):
    ledger = native.Ledger(capacity=1_000)
    tables = ledger.tables
    assert 1 <= len(tables) <= 2
    for table in tables:
        assert isinstance(table, np.ndarray)
        assert not table.flags.writeable
        with pytest.raises(ValueError, match="WRITEABLE"):
            table.setflags(write=True)
        with pytest.raises(ValueError, match="read-only"):
            table[0] = 0
    assert sum(table.nbytes for table in tables) <= ledger.nbytes
    # A view outlives the growth that made it stale, and the ledger.
    roots = np.arange(100_000)
    ledger.ack_many(roots, roots + 1)
    del ledger
    assert sum(int(table.view(np.uint8).sum(dtype=np.int64)) for table in tables) >= 0


@pytest.mark.skipif(
    not hasattr(mmap, "MADV_HUGEPAGE") or os.environ.get("NUMPY_MADVISE_HUGEPAGE") == "0",
    reason="huge pages are not asked for",
)
@pytest.mark.parametrize("capacity", [30_000, 100_000, 1_000_000])
def test_a_large_table_begins_with_a_huge_page(native, capacity):
    """Else what lies before the first and after the last would be in small ones."""
    (table,) = native.Ledger(capacity=capacity).tables
    assert table.ctypes.data % (2 << 20) == 0


def test_a_column_that_changes_during_the_call_leaves_the_table_whole(native):
    """Another thread may write to it; here it is the table itself, which changes for sure."""
    for seed in range(5):
        ledger = native.Ledger(capacity=300, seed=seed)
        roots = np.arange(250) * 0x5DEECE66D
        ledger.ack_many(roots, roots + 1)
        (table,) = ledger.tables
        changing = table.view(np.int64)[:400]
        ledger.ack_many(changing, np.arange(400))
        assert all(root in ledger for root in ledger.entries().root_ids.tolist())
        for table in ledger.tables:
            assert (table["stamps"][table["overflow_count"] > 0] != 0).all()


@pytest.mark.parametrize("seed", range(5))
def test_buckets_with_overflow_are_full(native, seed):
    """The table's invariant: an overflow count is above 0 only in a full bucket."""
    chance = np.random.default_rng(seed)
    ledger = native.Ledger(capacity=3_000, seed=seed)
    overflowed = 0
    for turn in range(60):
        roots = chance.integers(0, 3_000, 2_000)
        tasks = chance.choice([-1, -1, -2, 0], 2_000).astype(np.int32)
        ledger.apply(roots, chance.integers(0, 2, 2_000), tasks)
        if turn % 4 == 3:
            ledger.rotate()
        for table in ledger.tables:
            has_overflow = table["overflow_count"] > 0
            overflowed += int(has_overflow.sum())
            assert (table["stamps"][has_overflow] != 0).all()
        held = sum(int((table["stamps"] != 0).sum()) for table in ledger.tables)
        assert held >= len(ledger)
    assert overflowed > 0


def test_a_clock_costs_nothing_when_there_is_none(native):
    assert native.Ledger(10_000).nbytes < native.Ledger(10_000, clock=Clock()).nbytes


def test_the_twin_has_no_tables(reference):
    ledger = reference.Ledger(capacity=5)
    empty = ledger.nbytes
    roots = np.arange(100)
    ledger.ack_many(roots, roots + 1)
    assert ledger.tables == ()
    assert ledger.nbytes > empty
    assert ledger.capacity == 100
    assert ledger.stats.growths == 0


def test_repr_tells_how_many(Ledger):
    ledger = Ledger()
    ledger.ack_many(np.arange(3), np.arange(3))
    assert repr(ledger).startswith("<ackcore.Ledger: 3 entries, ")
