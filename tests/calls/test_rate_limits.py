"""Each key has its own rate, calls at once, pauses and breaker, and none takes another's part."""

import asyncio
import pickle
import re
from collections import Counter, defaultdict
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_loop import SimCalls, called, now_s

from ackcore.calls import RateLimit, Retry, Unavailable, call_queues, used
from ackcore.calls.call_settings import CallSettings
from ackcore.calls.calls import Calls
from ackcore.calls.rate_limits import unreported
from ackcore.calls.usage import KEPT_SUMS, MOST_KEYS, KeySums, UsageCounts, largest_sums


def by_tenant(item):
    return item[0]


PER_TENANT = RateLimit(per=by_tenant)


class Answering:
    """A service that takes the same time for each call, and what it was called with, and when."""

    def __init__(self, took_s=0.1, calls_per_s=None, **settings):
        self.took_s = took_s
        self.begun = defaultdict(list)  # by tenant
        limit = replace(PER_TENANT, calls_per_s=calls_per_s)
        self.calls = SimCalls(self.call, CallSettings(limit=limit, **settings))

    async def call(self, item):
        self.begun[item[0]].append(now_s())
        await asyncio.sleep(self.took_s)
        return item

    def run(self, items):
        with self.calls:
            outcomes = list(self.calls.run(items))
        assert [outcome.value for outcome in outcomes if not outcome.error] == [
            item for item, outcome in zip(items, outcomes, strict=True) if not outcome.error
        ]
        return outcomes


@given(
    items=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 300)), max_size=60),
    rate=st.sampled_from([None, 0.7, 5, 1000]),
    concurrency=st.sampled_from([None, 1, 3]),
    window=st.integers(1, 8),
)
def test_each_key_keeps_its_rate_and_its_calls_at_once(items, rate, concurrency, window):
    """Whatever takes how long, is refused or fails: and each item has its own outcome."""
    out, most, begun, refused = Counter(), Counter(), defaultdict(list), set()

    async def call(item):
        tenant, wait_ms = item
        for key in (tenant, "all"):
            out[key] += 1
            most[key] = max(most[key], out[key])
        begun[tenant].append(now_s())
        try:
            await asyncio.sleep(wait_ms / 1000)
            if wait_ms % 7 == 1 and item not in refused:
                refused.add(item)
                raise Retry(after_s=0.2)
            if wait_ms % 5 == 1:
                raise ValueError(item)
            return item
        finally:
            out[tenant] -= 1
            out["all"] -= 1

    limit = replace(PER_TENANT, calls_per_s=rate, concurrency=concurrency)
    outcomes, _ = called(call, items, limit=limit, max_concurrency=window, wait_in_task_s=3600)
    for item, outcome in zip(items, outcomes, strict=True):
        assert outcome.value == item or outcome.error.args == (item,)
    assert most["all"] <= window
    for tenant, times in begun.items():
        assert concurrency is None or most[tenant] <= concurrency
        for place, at in enumerate(times if rate else ()):
            assert place + 1 <= rate * at + 1e-3


@pytest.mark.parametrize("slow_s", [0.1, 10])
def test_a_key_with_few_items_waits_for_its_part_only(slow_s):
    """Behind 20,000 items of another key, which has half of the window, also if it is slow."""
    begun = {}

    async def call(item):
        begun[item] = now_s()
        await asyncio.sleep(slow_s if item[0] == "many" else 0.1)

    items = [("many", n) for n in range(20_000)] + [("few", n) for n in range(50)]
    with SimCalls(call, CallSettings(limit=PER_TENANT, max_concurrency=10)) as calls:
        outcomes = calls.run(items)
        next(outcomes)
        while ("few", 49) not in begun:
            next(outcomes)
        outcomes.close()
    # The others' first calls fill the window before the items of this key are read.
    assert begun["few", 49] <= slow_s + 50 / 5 * 0.1 + 0.1


def test_equal_keys_have_equal_parts():
    """Ten tenants, in blocks, with calls of different lengths: within a tenth of each other."""
    done = Counter()

    async def call(item):
        await asyncio.sleep(0.05 + item[1] % 7 / 100)
        done[item[0]] += 1

    items = [(tenant, n) for tenant in range(10) for n in range(2_000)]
    with SimCalls(call, CallSettings(limit=PER_TENANT, max_concurrency=25)) as calls:
        outcomes = calls.run(items)
        while sum(done.values()) < 5_000:
            next(outcomes)
        outcomes.close()
    assert max(done.values()) <= 1.1 * 500
    assert min(done.values()) >= 0.9 * 500


def test_a_key_that_is_throttled_slows_down_alone():
    """Its breaker opens and its items are given back; the others take as long as without it."""
    took_s = []
    for down in ("nobody", "a"):

        async def call(item, down=down):
            await asyncio.sleep(0.1)
            if item[0] == down:
                raise ConnectionError("down")

        limit = replace(PER_TENANT, concurrency=2)
        items = [(tenant, n) for n in range(100) for tenant in "abcd"]
        outcomes, calls = called(call, items, limit=limit, max_concurrency=64, wait_in_task_s=0.5)
        took_s.append(calls.now_s)
        failed = [type(outcome.error) for outcome in outcomes[::4]]
        del outcomes[::4]
        assert not any(outcome.error for outcome in outcomes)
    assert set(failed) == {ConnectionError, Unavailable}
    assert failed.count(ConnectionError) <= 12
    assert took_s[1] <= took_s[0] * 1.01


@pytest.mark.parametrize("quick_s", [0.0001, 0.001, 0.03])
@pytest.mark.parametrize("keyed", [True, False])
def test_calls_whose_times_differ_are_not_taken_for_a_queue(keyed, quick_s):
    """Eight tenants of 100 ms beside a quick one, with the default window: a hundred at once."""

    async def call(item):
        await asyncio.sleep(quick_s if item[0] == "quick" else 0.1)

    items = [(tenant, n) for n in range(1_000) for tenant in (*range(8), "quick")]
    outcomes, calls = called(call, items, limit=PER_TENANT if keyed else None)
    assert not any(outcome.error for outcome in outcomes)
    assert calls.now_s <= 8_000 * 0.1 / 100


class Throttling:
    """A service that takes so many calls of each tenant a second, and refuses the others."""

    def __init__(self, per_s):
        self.per_s = per_s
        self.tokens = {tenant: (max(1, rate / 10), 0.0) for tenant, rate in per_s.items()}
        self.taken = Counter()
        self.refused = Counter()
        self.last_s = {}

    async def call(self, item):
        tenant = item[0]
        rate, (tokens, since), now = self.per_s[tenant], self.tokens[tenant], now_s()
        tokens = min(max(1, rate / 10), tokens + (now - since) * rate)
        if taken := tokens >= 1:
            tokens -= 1
        self.tokens[tenant] = tokens, now
        if not taken:
            self.refused[tenant] += 1
            await asyncio.sleep(0.001)
            raise Retry("429", after_s=1)
        await asyncio.sleep(0.05)
        self.taken[tenant] += 1
        self.last_s[tenant] = now_s()


def test_limits_that_only_the_service_knows_are_used():
    """Within two minutes: almost in full, and few calls are refused."""
    per_s = {"a": 4, "b": 20, "c": 60}
    service = Throttling(per_s)
    items = [(tenant, n) for n in range(240) for tenant in "abc" for _ in range(per_s[tenant] // 2)]
    outcomes, _ = called(
        service.call, items, limit=PER_TENANT, max_concurrency=64, wait_in_task_s=3600
    )
    assert not any(outcome.error for outcome in outcomes)
    for tenant, rate in per_s.items():
        assert service.taken[tenant] == 120 * rate
        assert service.last_s[tenant] <= 120 / 0.95, tenant
        assert service.refused[tenant] <= 0.11 * service.taken[tenant], tenant


def test_an_item_without_a_key_fails_alone():
    service = Answering()
    outcomes = service.run([("a", 0), ((), 1), ([], 2), 3, ("a", 4)])
    assert [type(outcome.error) for outcome in outcomes[2:4]] == [TypeError] * 2
    assert [outcome.error for outcome in outcomes[:2] + outcomes[4:]] == [None] * 3
    assert "must be hashable, got list" in str(outcomes[2].error)
    assert outcomes[2].attempts == 0


def test_keys_that_wait_take_little_memory():
    """20,000 keys at once: endpoints exist for the calls in flight and the kept keys only."""
    service = Answering(0.01, calls_per_s=1_000, max_concurrency=10)
    made = 0

    def counted():
        nonlocal made
        made += 1
        return make()

    queues = service.calls._workers.queues
    make, queues._made_endpoints = queues._made_endpoints, counted
    with service.calls:
        outcomes = service.calls.run([(n, 0) for n in range(20_000)])
        next(outcomes)
        assert len(queues._by_key) == 20_000
        assert made <= 100
        outcomes.close()


def test_all_nan_are_one_key():
    service = Answering(0.0, calls_per_s=1)
    service.run([(float("nan"), n) for n in range(5)])
    times = [at for times in service.begun.values() for at in times]
    assert sorted(times) == pytest.approx([1, 2, 3, 4, 5], abs=0.01)


def test_answers_do_not_wait_for_many_slow_items():
    """Items of a millisecond each are read ahead between answers, not all before the first."""

    def items():
        for n in range(3_000):
            calls.sim.now_ns += 1_000_000
            yield n % 10, n

    async def call(item):
        began_s = now_s()
        await asyncio.sleep(0.1)
        assert now_s() - began_s < 0.5

    with SimCalls(call, CallSettings(limit=PER_TENANT, max_concurrency=10)) as calls:
        assert not any(outcome.error for outcome in calls.run(items()))


@pytest.fixture
def few_keys(monkeypatch):
    monkeypatch.setattr(call_queues, "KEPT_KEYS", 100)


def test_the_state_of_few_keys_without_items_is_kept(few_keys):
    service = Answering(0.0, calls_per_s=1000)
    service.run([(n, 0) for n in range(300)])
    assert len(service.calls._workers.queues._by_key) == 100
    assert all(len(times) == 1 for times in service.begun.values())


def test_a_key_continues_in_the_next_run():
    """Its bucket is not empty again, and not full."""
    service = Answering(0.0, calls_per_s=2)
    with service.calls:
        list(service.calls.run([("a", 0), ("b", 0)]))
        list(service.calls.run([("a", 1), ("b", 1), ("a", 2)]))
    assert service.begun["a"] == pytest.approx([0.5, 1, 1.5], abs=0.01)
    assert service.begun["b"] == pytest.approx([0.5, 1], abs=0.01)


# -- tokens -----------------------------------------------------------------------------------


@given(
    items=st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(0, 2_000), st.integers(0, 3_000)), max_size=40
    ),
    per_s=st.sampled_from([50, 1_000]),
    window=st.integers(1, 6),
    keyed=st.booleans(),
)
def test_no_call_begins_while_more_tokens_are_used_than_allowed(items, per_s, window, keyed):
    """Whatever calls use, and also if they fail or are refused: the excess was in flight."""
    ended = Counter()
    refused = set()

    async def call(item):
        tenant, tokens, wait_ms = item
        of = tenant if keyed else "all"
        assert ended[of] <= per_s * now_s() + 1.001
        await asyncio.sleep(wait_ms / 1000)
        if tokens % 3 == 1 and item not in refused:
            refused.add(item)
            raise Retry(after_s=0.1)
        used(tokens=tokens)
        ended[of] += tokens
        if tokens % 5 == 1:
            raise ValueError(item)
        return item

    limit = RateLimit(per=by_tenant if keyed else None, tokens_per_min=60 * per_s)
    outcomes, calls = called(call, items, limit=limit, max_concurrency=window, wait_in_task_s=3600)
    for item, outcome in zip(items, outcomes, strict=True):
        assert outcome.value == item or outcome.error.args == (item,)
    assert sum(calls.counts.used.tokens.values()) == sum(tokens for _, tokens, _ in items)


def test_a_key_that_used_too_many_tokens_waits_also_after_it_was_forgotten(few_keys):
    begun = defaultdict(list)

    async def call(item):
        begun[item[0]].append(now_s())
        used(tokens=600)

    limit = RateLimit(per=by_tenant, tokens_per_min=600)
    with SimCalls(call, CallSettings(limit=limit)) as calls:
        list(calls.run([("a", 0)]))
        list(calls.run([(n, 0) for n in range(300)]))
        assert len(calls._workers.queues._by_key) == 100
        list(calls.run([("a", 1)]))
        assert begun["a"][1] - begun["a"][0] >= 59
        list(calls.run([(n, 0) for n in range(300, 900)]))
        assert len(calls._workers.queues._debts) <= 600


def test_the_tokens_of_a_minute_are_used_in_full():
    """400 calls of 100 to 900 tokens, 1,000 a second: the first window's are the only excess."""

    async def call(item):
        await asyncio.sleep(0.5)
        used(tokens=100 * (item % 9 + 1))

    limit = RateLimit(tokens_per_min=60_000)
    outcomes, calls = called(call, range(400), limit=limit, max_concurrency=8)
    assert not any(outcome.error for outcome in outcomes)
    assert sum(calls.counts.used.tokens.values()) / 1_000 == pytest.approx(calls.now_s, rel=0.03)


def test_threads_and_started_coroutines_report_for_their_call():
    def call(item):
        used(tokens=item)
        used(tokens=1)

    limit = RateLimit(tokens_per_min=1e9)
    with Calls(call, CallSettings(limit=limit, max_concurrency=4)) as calls:
        assert not any(outcome.error for outcome in calls.run(range(100)))
    assert sum(calls.counts.used.tokens.values()) == sum(range(100)) + 100

    async def start(item):
        async def part():
            used(tokens=item)

        await asyncio.gather(part(), part())

    outcomes, started = called(start, range(10), limit=limit)
    assert not any(outcome.error for outcome in outcomes)
    assert sum(started.counts.used.tokens.values()) == 2 * sum(range(10))


def test_reports_of_a_call_that_has_ended_are_refused_and_counted():
    """By a coroutine that outlives its call, or by one of a call that timed out."""
    late = []

    async def call(item):
        async def after():
            await asyncio.sleep(2)
            try:
                used(tokens=5, cost=1)
            except RuntimeError as error:
                late.append(str(error))

        used(tokens=3)
        task = asyncio.create_task(after())
        await asyncio.sleep(10 if item else 0)
        await task

    async def soon(item):
        tasks.append(asyncio.create_task(call(item)))
        await asyncio.sleep(0)

    tasks = []
    limit = RateLimit(per=lambda item: "x", tokens_per_min=1e9)
    with SimCalls(soon, CallSettings(limit=limit)) as calls:
        list(calls.run([0, 1]))
        calls.complete(asyncio.wait(tasks))
    assert calls.counts.used == UsageCounts(2, 2, 0, 2, KeySums(x=6.0))
    assert len(late) == 2
    assert "used() must be called before its call ends, got a report of tokens=5" in late[0]


def test_failed_calls_are_counted_if_none_reports_its_use():
    """Do not count calls that were refused, and failed connections: they used nothing."""

    async def call(item):
        raise (ValueError, Retry, ConnectionError)[item % 3]("no")

    limit = RateLimit(cost_per_run=5)
    _, calls = called(call, range(9), limit=limit, wait_in_task_s=0, breaker_failures=None)
    assert unreported(limit, calls.counts.used, "limit of frame") == {
        "cost_per_run": "limit of frame has cost_per_run=5, and none of 0 answered and 3 failed "
        "calls reported its cost, so nothing is limited; let each call report it by used(cost=...) "
        "before it returns or raises"
    }


@pytest.mark.parametrize("kind", [float, np.float64, np.float32, Decimal])
def test_all_nan_of_a_kind_are_one_key(kind):
    limit = RateLimit(per=kind, concurrency=2)
    assert len({limit.key_of("nan") for _ in range(3)}) == 1
    assert limit.key_of("1") == 1


def test_a_key_that_nobody_awaits_is_refused():
    async def tenant(one):
        return one["tenant"]

    with pytest.raises(TypeError, match="per must be a plain function, got"):
        RateLimit(per=tenant, concurrency=2)


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("calls_per_min", "did you mean 'calls_per_s'?"),
        ("tokens_per_s", "did you mean 'tokens_per_min'?"),
        ("max_concurrency", "did you mean 'concurrency'?"),
        ("rps", "the arguments are 'per', 'calls_per_s', 'concurrency', 'tokens_per_min', "),
    ],
)
def test_another_argument_of_a_limit_is_refused(argument, says):
    says = f"RateLimit() has no argument {argument!r}; {says}"
    with pytest.raises(TypeError, match=re.escape(says)):
        RateLimit(**{argument: 5})


def test_a_limit_can_be_copied_and_pickled():
    limit = RateLimit(per="tenant", calls_per_s=5)
    assert pickle.loads(pickle.dumps(limit)) == limit
    assert limit.share(2) == RateLimit("tenant", 2.5)


@pytest.mark.parametrize("one", [Decimal("0.5"), np.float32(0.5), Fraction(1, 2), 0.5])
def test_reports_and_limits_are_real_numbers_of_any_type(one):
    async def call(item):
        used(tokens=one, cost=one)

    limit = RateLimit(tokens_per_min=one * 2000, cost_per_run=one)
    assert (limit.tokens_per_min, limit.cost_per_run) == (1000, 0.5)
    outcomes, calls = called(call, range(4), limit=limit)
    assert not any(outcome.error for outcome in outcomes)
    assert calls.counts.used.tokens == {"": 2.0}
    assert type(calls.counts.used.tokens[""]) is float


@given(st.lists(st.tuples(st.integers(0, 9000), st.integers(1, 50)), min_size=1, max_size=20))
def test_sums_are_of_a_bounded_number_of_keys_the_largest_among_them(some):
    sums, total = KeySums(), 0
    for start, amount in some:
        for key in range(start, start + 1000):
            sums.add(str(key), amount)
            total += amount
        sums.add("large", 10_000)
        assert len(sums) <= 2 * KEPT_SUMS + 1
    assert sums["large"] == 10_000 * len(some)
    assert sum(sums.values()) == sum(largest_sums(sums).values()) == total + sums["large"]
    assert len(largest_sums(sums)) <= MOST_KEYS + 1


@pytest.mark.parametrize(
    ("tokens", "error", "says"),
    [
        (Decimal("sNaN"), ValueError, r"tokens of used\(\) must be in 0..1000000000, got sNaN"),
        (np.True_, TypeError, r"tokens of used\(\) must be a number, got bool"),
        (-1, ValueError, r"tokens of used\(\) must be in 0..1000000000, got -1"),
        (1e300, ValueError, r"tokens of used\(\) must be in 0\.\.1000000000, got 1e\+300"),
        (10**400, ValueError, r"tokens of used\(\) must be in 0\.\.1000000000, got 1000"),
        (float("nan"), ValueError, r"tokens of used\(\) must be in 0..1000000000, got nan"),
        ("3", TypeError, r"tokens of used\(\) must be a number, got str '3'"),
    ],
)
def test_what_is_no_number_of_tokens_is_refused(tokens, error, says):
    with pytest.raises(error, match=says):
        used(tokens=tokens)
