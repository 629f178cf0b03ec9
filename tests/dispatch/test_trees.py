"""A tree for each attempt at a record: the attempt that is out completes it, and no other."""

import time

import numpy as np

from ackcore.dispatch.dispatch_records import Record, Trees
from ackcore.flow import Batch


def batch_of(*positions):
    return Batch([Record(position, None) for position in positions])


def acked(trees, batch, begun, failed=()):
    mask = np.isin(np.arange(len(batch)), failed)
    return [record.position for record in trees.ack(batch, *begun, mask)]


def test_records_are_acked_that_did_not_fail():
    trees, batch = Trees(), batch_of(3, 4, 5)
    begun = trees.begin(batch)
    assert acked(trees, batch, begun, failed=[1]) == [3, 5]
    assert len(trees) == 1
    trees.fail(batch)
    assert len(trees) == 0
    assert acked(trees, batch, begun) == []


def test_only_the_attempt_that_is_out_completes_a_record():
    trees, batch = Trees(), batch_of(1, 2)
    first = trees.begin(batch)
    second = trees.begin(batch_of(2))
    assert acked(trees, batch, first) == [1]
    assert acked(trees, batch, first) == []
    assert acked(trees, batch_of(2), second) == [2]
    assert len(trees) == 0  # an ack of what failed would stay, and wait for an init


def test_a_tree_has_no_time_of_its_own(monkeypatch):
    trees, batch = Trees(), batch_of(1)
    begun = trees.begin(batch)
    later = time.monotonic_ns() + 10**15
    monkeypatch.setattr(time, "monotonic_ns", lambda: later)
    assert acked(trees, batch, begun) == [1]
