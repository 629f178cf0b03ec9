"""Attempts at records: the present attempt completes its record, and no other does."""

import numpy as np

from ackcore.dispatch.dispatch_records import OpenAttempts, Record
from ackcore.flow import Batch


def batch_of(*positions):
    return Batch([Record(position, None) for position in positions])


def acked(attempts, batch, begun, failed=()):
    mask = np.isin(np.arange(len(batch)), failed)
    return [record.position for record in attempts.done(batch, begun, mask)]


def test_records_are_acked_that_did_not_fail():
    attempts, batch = OpenAttempts(), batch_of(3, 4, 5)
    begun = attempts.begin(batch)
    assert acked(attempts, batch, begun, failed=[1]) == [3, 5]
    assert len(attempts) == 1
    attempts.fail(batch)
    assert len(attempts) == 0
    assert acked(attempts, batch, begun) == []


def test_only_the_attempt_that_is_out_completes_a_record():
    attempts, batch = OpenAttempts(), batch_of(1, 2)
    first = attempts.begin(batch)
    second = attempts.begin(batch_of(2))
    assert acked(attempts, batch, first) == [1]
    assert acked(attempts, batch, first) == []
    assert acked(attempts, batch_of(2), second) == [2]
    assert len(attempts) == 0
