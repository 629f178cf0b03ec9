"""Settling at scale, and against a second opinion: plain sums over plain dicts."""

from collections import defaultdict

import numpy as np
import pytest
from ledger_scripts import Clock, entries_of, int32s, int64s

from ackcore import _records as records


@pytest.fixture(scope="module")
def stream():
    """Random messages of 5,000 roots: some whole, failed, doubled, unfinished or foreign."""
    chance = np.random.default_rng(5)
    roots, vals, tasks = [], [], []
    for root in range(5_000):
        edges = chance.integers(1, 2**62, 4)
        init = int(np.bitwise_xor.reduce(edges))
        fate = root % 8
        rows = [(init, root % 5)] + [(int(edge), records.ACK) for edge in edges]
        if fate == 1:
            rows = rows[1:]
        elif fate == 2:
            rows.append((1, records.FAIL))
        elif fate == 3:
            rows = rows[:-1]
        elif fate == 4:
            rows = [*rows[:-1], (1, records.FAIL)]
        elif fate == 5:
            rows += rows
        elif fate == 6:
            rows.append((init, 4 - root % 5))
        elif fate == 7:
            rows.append((3, records.RESET))
        for val, task in rows:
            roots.append(root * 0x9E3779B97F4A7C15)
            vals.append(val)
            tasks.append(task)
    order = chance.permutation(len(roots))
    times = chance.integers(0, 1_000, len(roots))
    return int64s(roots)[order], int64s(vals)[order], int32s(tasks)[order], times


def second_opinion(roots, vals, tasks, times, past_before):
    """Statuses by root, from SEMANTICS 4 alone."""
    of_root = defaultdict(list)
    for row in zip(roots.tolist(), vals.tolist(), tasks.tolist(), times.tolist(), strict=True):
        of_root[row[0]].append(row[1:])
    statuses = {}
    for root, rows in of_root.items():
        inits = [task for _, task, _ in rows if task >= 0]
        xor = 0
        for val, task, _ in rows:
            if task >= records.ACK:
                xor ^= val
        past = max(time for *_, time in rows) < past_before
        if not inits:
            statuses[root] = records.ORPHAN if past else records.OPEN
        elif len(inits) > 1:
            statuses[root] = records.ANOMALY
        elif xor == 0:
            statuses[root] = records.ACKED
        elif any(task == records.FAIL for _, task, _ in rows):
            statuses[root] = records.FAILED
        else:
            statuses[root] = records.EXPIRED if past else records.OPEN
    return statuses


@pytest.mark.parametrize("cuts", [1, 2, 7])
def test_statuses_are_those_of_a_second_opinion(Ledger, stream, cuts):
    roots, vals, tasks, times = stream
    ledger = Ledger(capacity=1, clock=Clock())
    for part in np.array_split(np.arange(len(roots)), cuts):
        ledger.fold(roots[part], vals[part], tasks[part], times[part])
    settled = ledger.settle(now_ms=1_000, timeout_ms=200)
    got = dict(zip(settled.root_ids.tolist(), settled.statuses.tolist(), strict=True))
    wanted = second_opinion(roots, vals, tasks, times, 800)
    decided = {root: status for root, status in wanted.items() if status != records.OPEN}
    assert set(decided.values()) == set(records.Status) - {records.OPEN, records.RESET_TIMEOUT}
    assert got == decided
    assert set(ledger.entries().root_ids.tolist()) == set(wanted) - set(decided)


def test_settling_an_expiring_ledger_leaves_the_expired_alone(Ledger):
    ledger = Ledger(buckets=2)
    ledger.merge(entries_of([(1, 0, 4, 1, 0, 1, None, None), (2, 0, 4, 1, 0, 0, None, None)]))
    ledger.rotate()
    assert [row.root_id for row in ledger.settle()] == [2]
    assert [row.root_id for row in ledger.expired()] == [1]
