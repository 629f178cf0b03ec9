"""The laws that `bench_flow` compares with, as their authors have them; a wheel has no benches."""

import math

import pytest
from simulated import MS, S

laws = pytest.importorskip("bench.flow_laws")


def test_gradient2_shrinks_when_round_trips_grow_and_is_patient_with_half_of_it():
    limit = laws.Gradient2(initial=100)
    for _ in range(600):
        limit.on_sample(10 * MS, 10, False)
    assert limit.limit == 100  # less than half in use: not its doing
    limit.on_sample(15 * MS, 100, False)
    assert limit.limit == 100  # within the tolerance: 100 + 0.2 * 4
    limit.on_sample(40 * MS, 100, False)
    assert limit.limit == math.floor(100.8 + 0.2 * (100.8 * 0.5 + 4 - 100.8))


def test_vegas_goes_by_what_is_queued():
    limit = laws.Vegas(initial=100, probe=10**6)
    limit.on_sample(10 * MS, 100, False)  # the shortest
    limit.on_sample(int(10.1 * MS), 100, False)
    assert limit.limit == 112  # 1 or 2 queued: up by 6 * log10
    limit.on_sample(int(10.4 * MS), 100, False)
    assert limit.limit == 114  # 5 queued, below 6: up by log10
    limit.on_sample(11 * MS, 100, False)
    assert limit.limit == 114  # 11 queued: as it should be
    limit.on_sample(20 * MS, 100, False)
    assert limit.limit == 112
    limit.on_sample(20 * MS, 10, True)
    assert limit.limit == 110
    limit.on_sample(10 * MS + 1, 10, False)
    assert limit.limit == 110  # less than half in use


def test_vegas_forgets_its_shortest_round_trip():
    limit = laws.Vegas(initial=10, probe=2, max_limit=10, seed=1)
    limit.on_sample(MS, 10, False)
    for _ in range(100):
        limit.on_sample(50 * MS, 10, False)
    assert limit.limit == 10  # 50 ms is what is shortest now
    assert limit._shortest_ns == 50 * MS


def test_aimd_adds_one_and_takes_a_tenth():
    limit = laws.AIMD(initial=100, timeout_s=1)
    limit.on_sample(MS, 50, False)
    assert limit.limit == 101
    limit.on_sample(MS, 50, False)
    assert limit.limit == 101  # less than half in use
    limit.on_sample(MS, 50, True)
    assert limit.limit == 90
    limit.on_sample(S + 1, 90, False)
    assert limit.limit == 81
    low = laws.AIMD(initial=3)
    low.on_sample(MS, 3, True)
    assert low.limit == 2
