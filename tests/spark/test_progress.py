"""The counts, the line of a micro-batch, and percentiles."""

from __future__ import annotations

import numpy as np
import pytest

from ackcore.spark.engine.progress import Account, Counts, Percentiles, Progress, percentiles


def test_the_counts_go_on_and_are_kept():
    counts = Counts().after({"a": Account(records=5, acked=3, waiting=2), "b": Account(records=1)})
    assert not counts.balanced  # b's record is nowhere
    counts = counts.after(
        {"a": Account(records=1, acked=1, dead=1, waiting=1, retried=1), "b": Account(acked=1)}
    )
    assert counts.spouts["a"] == Account(6, 0, 4, 1, 1, 1)
    assert counts.balanced
    assert (counts.batches, counts.records, counts.acked, counts.dead) == (2, 7, 5, 1)
    assert (counts.waiting, counts.retried, counts.replayed) == (1, 1, 0)
    assert Counts.from_json(counts.to_json()) == counts
    assert Counts.from_json({}) == Counts()


def test_a_replayed_record_is_in_one_place_again():
    account = Account(records=1, dead=1)
    assert account.balanced
    counts = Counts(1, {"a": account}).after({"a": Account(replayed=1, acked=1)})
    assert counts.balanced


@pytest.mark.parametrize("seed", range(20))
def test_percentiles_are_by_nearest_rank(seed):
    rng = np.random.default_rng(seed)
    groups = [(float(value), int(n)) for value, n in rng.integers(0, 30, (rng.integers(0, 4), 2))]
    single = rng.integers(0, 100, rng.integers(1, 30)).astype(float)
    everything = sorted([value for value, n in groups for _ in range(n)] + single.tolist())
    expected = [everything[-(-len(everything) * p // 100) - 1] for p in (50, 95, 99)]
    assert percentiles(groups, single) == Percentiles(*expected)


def test_percentiles_of_nothing():
    assert percentiles([(3.0, 0)]) == Percentiles(0, 0, 0)
    assert percentiles([(3.0, 10**9)]) == Percentiles(3, 3, 3)


def test_the_line_of_a_micro_batch(caplog):
    caplog.set_level("INFO", "ackcore")
    progress = Progress(
        batch_id=7,
        records=10,
        acked=9,
        failed=2,
        uncounted=1,
        retried=1,
        dead=1,
        waiting=1,
        oldest_s=1.5,
        latency_s=Percentiles(0.21, 0.22, 4.1),
        duration_s=0.25,
        records_per_s=44.0,
        runs=2,
        breaker_trips=3,
        lag={"lines": 5, "words": 2},
        expectations={
            "take": {f"n > {n}": {"passed": 9, "failed": n} for n in range(5)},
            "take.rest": {"n < 9": {"passed": 5, "failed": 0}},
        },
    )
    progress.log()
    assert caplog.messages == [
        "micro-batch 7: 9 acked, 1 failed, 1 put off (unavailable, or behind a record of their "
        "key), 1 retried, 1 dead, "
        "1 waiting (oldest 1.5 s), latency p50/p95/p99 210/220/4100 ms, 44 records/s, 0.25 s, "
        "lag 7, 3 breaker trips, 2 runs, unmet: 'n > 4' of take 4, 'n > 3' of take 3, "
        "'n > 2' of take 2, 1 more"
    ]


def test_the_log_has_no_latency_where_nothing_was_acked_and_says_what_was_replayed():
    told = str(Progress(3, failed=5, replayed=5, dead=5))
    assert told.startswith("micro-batch 3: 0 acked, 5 failed, 0 retried, 5 replayed, 5 dead, ")
    assert "latency" not in told
