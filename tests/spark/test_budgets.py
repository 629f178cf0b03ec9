"""The calls of a run cost no more than its budget, besides those in flight when it was spent."""

from __future__ import annotations

import asyncio
from collections import Counter

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import generate_latest

from ackcore import testing
from ackcore.calls import RateLimit, Reject, Retry
from ackcore.metrics import PrometheusListener
from ackcore.spark.engine.progress import Counts
from ackcore.topology import AsyncBolt, BasicBolt, TopologyBuilder, TopologyError

ROW = pa.schema([("n", pa.int64()), ("tenant", pa.string()), ("cost", pa.float64())])
#: The charges of the service, by row. The copies of bolts in tasks find it here.
CHARGED: Counter[int] = Counter()
CONCURRENCY, TASKS = 2, 3


class Paid(AsyncBolt):
    outputs = ROW
    journal = True
    max_concurrency = CONCURRENCY
    max_batch = 1
    breaker_failures = None
    wait_in_task_s = 60

    def __init__(self, budget, per=None, max_batch=1):
        self.limit = RateLimit(cost_per_run=budget, per=per)
        self.max_batch = max_batch
        self.refused = set()

    async def execute(self, tuple, collector):
        await asyncio.sleep(0.1 + tuple["n"] % 3 / 10)
        CHARGED[tuple["n"]] += 1
        collector.used(cost=tuple["cost"])
        if tuple["n"] % 10 == 7:
            raise Reject("a paid answer that is of no use")
        if tuple["n"] % 10 == 3 and tuple["n"] not in self.refused:
            self.refused.add(tuple["n"])
            raise Retry("paid, and must be asked again")
        collector.emit(tuple.values)

    async def execute_many(self, tuples, collectors):
        await asyncio.sleep(0.1)
        for one, collector in zip(tuples, collectors, strict=True):
            CHARGED[one["n"]] += 1
            collector.used(cost=one["cost"])
        if any(one["n"] % 10 == 7 for one in tuples):
            raise ValueError("one of them is bad")
        for one, collector in zip(tuples, collectors, strict=True):
            collector.emit(one.values)


def topology(bolt, fields=False, **keywords):
    builder = TopologyBuilder()
    builder.spout("in", testing.Source(ROW))
    declared = builder.bolt("paid", bolt, parallelism=TASKS)
    declared.fields("in", "tenant") if fields else declared.shuffle("in")
    builder.sink("paid", print, name="out")
    more = {"max_attempts": 1, "unavailable_timeout_s": 200, "chunk_rows": 7, **keywords}
    return builder.build(**more)


def rows(costs):
    return {"in": [{"n": n, "tenant": "abc"[n * n % 3], "cost": c} for n, c in enumerate(costs)]}


@settings(max_examples=20, deadline=None)
@given(
    costs=st.lists(st.sampled_from([0.0, 0.1, 1.0, 2.5]), min_size=1, max_size=24),
    share=st.sampled_from([0.05, 0.3, 0.6, 1.5]),
    kills=st.sets(st.integers(1, 60), max_size=3),
    per=st.sampled_from([None, "tenant"]),
    fields=st.booleans(),
    max_batch=st.sampled_from([1, 4]),
)
def test_the_excess_is_at_most_the_calls_in_flight(costs, share, kills, per, fields, max_batch):
    """With killed tasks, one task with all rows, failed and repeated calls; all money is used."""
    CHARGED.clear()
    budget = share * sum(costs) or 1.0
    bolt = Paid(budget, per, max_batch)
    ran = testing.run(topology(bolt, fields), rows(costs), kills={"paid": sorted(kills)})
    spent = sum(costs[n] * times for n, times in CHARGED.items())
    # The kills of a test come between calls, so no charge is unknown.
    assert ran.counts.spent["paid"] == pytest.approx(spent)
    reported = [progress.spent.get("paid", {}) for progress in ran.progress]
    assert sum(sum(keys.values()) for keys in reported) == pytest.approx(spent)
    assert spent <= budget + TASKS * CONCURRENCY * max_batch * 2.5
    assert ran.counts.balanced
    assert ran.counts.acked + ran.counts.dead == len(costs)
    unpaid = [letter for letter in ran.dead if letter.error_type == "Unavailable"]
    assert all("cost_per_run" in letter.error_message for letter in unpaid)
    if unpaid:
        assert spent >= budget * (1 - 1e-6)
    if per is not None:
        by_key = Counter()
        for keys in reported:
            by_key.update(keys)
        assert by_key.keys() <= set("abc")


def test_rows_without_money_wait_and_count_no_attempt():
    CHARGED.clear()
    metrics = PrometheusListener("paid")
    ran = testing.run(topology(Paid(4.0)), rows([1.0] * 16), listeners=[metrics])
    shown = f'ackcore_component="paid",ackcore_query="paid"}} {ran.counts.spent["paid"]}'
    assert shown in generate_latest(metrics.registry).decode()
    assert 4 <= sum(CHARGED.values()) <= 4 + TASKS * CONCURRENCY
    unpaid = [letter for letter in ran.dead if letter.error_type == "Unavailable"]
    assert len(unpaid) == 16 - len(CHARGED)
    # 200 s of waiting: once a minute each, and a few times while a task had money left.
    assert 3 <= max(ran.attempts["in"]) <= 12
    # Each but the last was no attempt: one is allowed.
    assert {letter.attempts for letter in unpaid} == {1}
    assert all(
        "4 was spent" in text
        or "so nothing is left; start again with a higher cost_per_run" in text
        for text in (letter.error_message for letter in unpaid)
    )


def test_without_a_journal_or_an_exchange_the_budget_is_refused():
    class Loose(Paid):
        journal = False

    builder = TopologyBuilder()
    builder.spout("in", testing.Source(ROW))
    builder.bolt("paid", Loose(1.0)).shuffle("in")
    builder.sink("paid", print, name="out")
    with pytest.raises(TopologyError) as raised:
        builder.build()
    text = str(raised.value)
    assert "cost_per_run=1, which needs journal = True" in text
    assert "cost_per_run=1, which needs an exchange" in text
    assert "parallelism=" in text


def test_counts_of_a_checkpoint_without_costs_are_read():
    assert Counts.from_json({"batches": 3, "spouts": {}}) == Counts(3)
    counts = Counts(1, {}, {"a": 1.5}).after({}, {"a": {"x": 1.0, "y": 2.0}, "b": {"": 1.0}})
    assert Counts.from_json(counts.to_json()) == Counts(2, {}, {"a": 4.5, "b": 1.0})


class Limited(BasicBolt):
    outputs = ROW

    def __init__(self, limit):
        self.limit = limit

    def execute(self, tuple, collector):
        collector.emit(tuple.values)


def test_other_bolts_may_have_an_attribute_of_that_name_without_a_budget():
    ran = testing.run(topology(Limited(10)), rows([1.0] * 4))
    assert ran.counts.acked == 4
    assert ran.counts.spent == {}
    with pytest.raises(TopologyError, match=r"which needs an AsyncBolt.*got Limited"):
        topology(Limited(RateLimit(cost_per_run=1)))
