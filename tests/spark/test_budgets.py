"""The excess over the budget of a run is at most the cost of the calls in flight."""

from __future__ import annotations

import asyncio
import contextlib
import re
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
#: The number of charges by row, of all copies of the bolt in tasks.
CHARGED: Counter[int] = Counter()
CONCURRENCY, TASKS = 2, 3


class Paid(AsyncBolt):
    outputs = ROW
    journal = True
    max_concurrency = CONCURRENCY
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
    """Also with killed tasks, uneven tasks, and failed and repeated calls; all money is used."""
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
    # Only the last failure counts as an attempt.
    assert {letter.attempts for letter in unpaid} == {1}
    assert all(
        "4 was spent" in text
        or "so nothing is left; start again with a higher cost_per_run" in text
        for text in (letter.error_message for letter in unpaid)
    )


def test_a_week_without_money_is_simulated_by_few_micro_batches():
    CHARGED.clear()
    week = topology(Paid(4.0), unavailable_timeout_s=7 * 86400)
    ran = testing.run(week, rows([1.0] * 16))
    assert ran.elapsed_s > 7 * 86400
    assert ran.counts.batches < 40
    assert "Unavailable" in {letter.error_type for letter in ran.dead}


class Forgetful(AsyncBolt):
    """Reports what a test says, after its call if it is late; the first call is free."""

    outputs = ROW
    journal = True

    def __init__(self, reports, late=False, **limits):
        self.limit = RateLimit(**limits)
        self.reports, self.late = reports, late

    async def execute(self, tuple, collector):
        async def report():
            with contextlib.suppress(RuntimeError):
                collector.used(**self.reports)

        if self.late:
            await asyncio.sleep(tuple["n"] / 100)  # the loop turns after the end of each call
            self.task = asyncio.create_task(report())
        elif tuple["n"]:
            await report()
        collector.emit(tuple.values)


def test_a_limit_whose_use_no_call_reports_is_named_once(caplog):
    both = {"tokens_per_min": 1e6, "cost_per_run": 5}
    for reports, missing in (
        ({"tokens": 2}, ["cost_per_run=5"]),
        ({"cost": 0}, ["tokens_per_min=1000000"]),
        ({"tokens": 0, "cost": 0.1}, []),
    ):
        caplog.clear()
        bolt = Forgetful(reports, per="tenant", **both)
        ran = testing.run(topology(bolt), rows([1.0] * 9), tasks=2)
        assert ran.counts.acked == 9
        assert [one.getMessage() for one in caplog.records if one.levelname == "WARNING"] == [
            f"micro-batch 0: limit of bolt 'paid' has {one}, and none of 9 answered calls reported "
            f"its {word}, so nothing is limited; let each call report it by used({word}=...) "
            "before it returns or raises"
            for one in missing
            for word in ["cost" if "cost" in one else "tokens"]
        ]
    caplog.clear()
    late = Forgetful({"tokens": 1}, late=True, cost_per_run=5)
    testing.run(topology(late), rows([1.0] * 9), tasks=1)
    assert re.search(r"bolt 'paid' reported its usage \d times after the call", caplog.messages[1])


def test_the_tokens_of_each_key_are_in_the_report_and_the_metrics():
    metrics = PrometheusListener("paid")
    bolt = Forgetful({"tokens": 2}, per="tenant", tokens_per_min=1e6)
    given = rows([1.0] * 9)
    ran = testing.run(topology(bolt, True), given, listeners=[metrics])
    (progress,) = ran.progress
    used = Counter(row["tenant"] for row in given["in"][1:])
    assert progress.tokens == {"paid": {key: 2 * calls for key, calls in used.items()}}
    assert str(progress).endswith(", paid used 16 tokens")
    shown = 'ackcore_tokens_total{ackcore_component="paid",ackcore_query="paid"} 16'
    assert shown in generate_latest(metrics.registry).decode()


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
    for limit in (RateLimit(cost_per_run=1), RateLimit(calls_per_s=2)):
        with pytest.raises(TopologyError, match=r"must belong to an AsyncBolt.*got Limited"):
            topology(Limited(limit))
