"""On a free-threaded Python the GIL is off, and using ackcore leaves it off."""

import sysconfig

import pytest
from separately import run_python

pytestmark = pytest.mark.skipif(
    not sysconfig.get_config_var("Py_GIL_DISABLED"),
    reason="this Python has a GIL for good; free-threaded ones are called python3.13t, python3.14t",
)


def run(script):
    """Run a script in a process of its own, where the warning that the GIL was turned on fails.

    Another package that the tests load may turn it on, and PYTHON_GIL=0 would keep it off.
    """
    run_python(script, options=("-W", "error"), PYTHON_GIL=None)


@pytest.mark.parametrize(
    "module", ["ackcore", "ackcore._native", "ackcore._kafka_native", "ackcore.testing"]
)
def test_imports_leave_the_gil_off(native, module):
    run(f"import sys, {module}; assert not sys._is_gil_enabled()")


USES = """
import copy, pickle, sys, threading
import numpy as np
from ackcore import _native as native

def use_ledger(clock):
    ledger = native.Ledger(1, buckets=5, clock=clock)
    roots, tasks = np.arange(20_000), np.zeros(20_000, np.int32)
    ledger.init_many(roots, roots | 1, tasks)
    assert len(ledger.ack_many(roots[:9_000], roots[:9_000] | 1)) == 9_000
    ledger.apply(roots, roots, tasks - 1)
    ledger.fold(roots, roots, tasks - 1)
    ledger.fail_many(roots[9_000:9_500])
    ledger.reset_timeout_many(roots[9_500:9_900])
    for one in range(30_000, 30_100):
        ledger.init(one, 3, 1)
        assert ledger.ack(one, 3).root_id == one
        ledger.fail(one)
        ledger.reset_timeout(one)
        assert one in ledger
        assert ledger.get(one).flags
    ledger.merge(ledger.entries())
    repr(ledger), ledger.stats, ledger.tables, ledger.oldest(3)
    copies = copy.copy(ledger), pickle.loads(pickle.dumps(ledger))
    for each in copies:
        each.settle()
    for _ in range(6):
        ledger.rotate()
        ledger.expired(100)
    assert len(ledger) == 0

def use_source():
    source = native.IdSource(5)
    source.next(), source.next_many(10), pickle.loads(pickle.dumps(source)).given

def use_tracker():
    tracker = native.OffsetTracker("lines", 0, 0, 5)
    offsets = np.arange(5, 20_000)
    assert tracker.emitted(offsets) == len(offsets)
    tracker.failed(offsets[::7].copy())
    tracker.emitted(7), tracker.acked(6), tracker.failed(8), tracker.advance(30_000)
    assert tracker.acked(offsets[100:]) == len(offsets) - 100
    tracker.is_done(offsets), tracker.is_done(6), tracker.attempt(8), tracker.holes(10)
    repr(tracker), tracker.stats, tracker.oldest, tracker.pending, tracker.waiting, tracker.nbytes
    for each in (copy.copy(tracker), pickle.loads(pickle.dumps(tracker))):
        assert each.acked(offsets) == tracker.pending
    native.OffsetTracker.from_state("lines", 0, 1, tracker.state())

def use_functions():
    roots = np.arange(1_000)
    native.edge_ids(1, native.root_ids(1, 0, roots, 0), "b", roots, 0)
    native.acker_task(roots, native.root_id(1, 2, 3, 4) % 7 + 1)
    native.xor_by_parent(roots, roots, 1_000)
    native.split_by_shard(roots, 4)
    native.take_shard(roots, roots, roots.astype(np.int32), None, 1, 4)
    native.hash_fixed(np.zeros(1_000, np.int64), roots, 8)
    native.hash_binary(np.zeros(2, np.int64), np.array([0, 1, 3]), b"abc")
    native.gather_binary(np.array([0, 1, 3]), b"abc", np.array([1, 0]))
    native.fingerprint(roots)

def use():
    use_ledger(None), use_ledger(iter(range(10**9)).__next__)
    use_tracker(), use_source(), use_functions()

CLASSES = {each for each in vars(native).values() if isinstance(each, type)}
ours = {each.__name__ for each in CLASSES if each.__module__ == native.__name__}
assert ours == {"Ledger", "IdSource", "OffsetTracker"}, ours
use()
threads = [threading.Thread(target=use) for _ in range(4)]
for each in threads:
    each.start()
for each in threads:
    each.join()
assert not sys._is_gil_enabled()
"""


def test_using_every_native_class_leaves_the_gil_off(native):
    run(USES)
