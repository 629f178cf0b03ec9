"""Back-off is bounded, pure, jittered in full, and comes to an end."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ackcore.retry import NextAttempt, Policy, backoff_ms, capped_doubling, unavailable_ms

ATTEMPTS = st.integers(1, 10**6)
MILLIS = st.integers(1, 2**62)
IDS = st.text(st.characters(exclude_categories=()), max_size=20)


@given(IDS, ATTEMPTS, MILLIS, MILLIS)
@example("a", 44, 1000, 300_000)  # where Storm's product overflows, and its delay turns negative
@example("a", 57, 1000, 2**62)  # where it becomes 0 for good
@example("\ud800", 10**6, 2**62, 2**62)
def test_a_delay_is_at_least_one_and_at_most_the_cap(message_id, attempt, base, cap):
    delay = backoff_ms(message_id, attempt, base_ms=base, cap_ms=cap)
    assert 1 <= delay <= min(cap, base * 2 ** (attempt - 1))
    assert delay == backoff_ms(message_id, attempt, base_ms=base, cap_ms=cap)


@given(MILLIS, ATTEMPTS, MILLIS)
@example(1, 63, 2**62)  # the last wait below the highest cap is half of it
@example(1, 10**6, 2**62)
def test_a_wait_doubles_up_to_the_cap(base, attempts, cap):
    assert capped_doubling(base, attempts, cap) == min(cap, base * 2 ** (attempts - 1))


def test_every_attempt_up_to_a_million_stays_within_the_cap():
    delays = [backoff_ms("m", n, base_ms=1000, cap_ms=300_000) for n in range(1, 10**6 + 1, 7)]
    assert min(delays) >= 1
    assert max(delays) <= 300_000
    assert max(delays[-1000:]) > 290_000  # and does not fade out


@pytest.mark.parametrize("attempt", [10, 44, 57, 65, 66, 129, 10**6])
def test_the_wait_grows_to_the_cap_and_stays_there(attempt):
    delays = [backoff_ms(f"m{n}", attempt, base_ms=1000, cap_ms=300_000) for n in range(100)]
    assert max(delays) > 250_000


@given(IDS, ATTEMPTS, MILLIS, MILLIS, MILLIS)
def test_a_higher_cap_never_shortens_a_delay(message_id, attempt, base, cap, other):
    low, high = sorted((cap, other))
    shorter = backoff_ms(message_id, attempt, base_ms=base, cap_ms=low)
    assert shorter <= backoff_ms(message_id, attempt, base_ms=base, cap_ms=high)


@pytest.mark.parametrize("attempt", [1, 2, 5, 9, 1000])
def test_jitter_is_full(attempt):
    """Uniform over 1..window: chi squared over 20 cells, far beyond what chance would do."""
    window = min(60_000, 1000 * 2 ** (attempt - 1))
    ids = [f"topic-{n % 7}-{n}" for n in range(20_000)]
    delays = np.array([backoff_ms(m, attempt, base_ms=1000, cap_ms=60_000) for m in ids])
    assert delays.min() >= 1
    assert delays.max() <= window
    cells, _ = np.histogram(delays, bins=20, range=(1, window + 1))
    expected = len(ids) / 20
    assert ((cells - expected) ** 2 / expected).sum() < 60  # 19 degrees: p = 4e-6


def test_attempts_of_one_message_and_messages_of_one_attempt_differ():
    of_one = {backoff_ms("m", n, base_ms=10**9, cap_ms=10**9) for n in range(1, 200)}
    of_all = {backoff_ms(f"m{n}", 1, base_ms=10**9, cap_ms=10**9) for n in range(200)}
    assert len(of_one) == 199
    assert len(of_all) == 200
    # "1" + "2" and "12" + "" are not the same message and attempt.
    assert backoff_ms("2", 1, base_ms=10**9, cap_ms=10**9) != backoff_ms(
        "", 12, base_ms=10**9, cap_ms=10**9
    )


def test_delays_are_what_they_were():
    """A restart under a new version must decide a recorded micro-batch as the old one would."""
    found = [backoff_ms("0-17", n, base_ms=1000, cap_ms=300_000) for n in (1, 2, 3, 10, 99)]
    assert found == PINNED


PINNED = [60, 203, 793, 61417, 107363]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"attempt": 0}, "attempt must be at least 1, got 0"),
        ({"base_ms": 0}, "base_ms must be between 1 and"),
        ({"cap_ms": -5}, "cap_ms must be .* got -5"),
        ({"cap_ms": 2**63}, "cap_ms must be"),
    ],
)
def test_numbers_out_of_range_are_refused(wrong, words):
    arguments = {"attempt": 1, "base_ms": 1, "cap_ms": 1} | wrong
    with pytest.raises(ValueError, match=words):
        backoff_ms("m", **arguments)


def test_a_record_is_dead_after_its_last_execution():
    policy = Policy(max_attempts=3, base_ms=10, cap_ms=20)
    now, attempt, waits = 1_000, 0, []
    while (next_one := policy.decide("m", attempt, now)) is not None:
        assert isinstance(next_one, NextAttempt)
        assert next_one.attempt == attempt + 1
        waits.append(next_one.due_ms - now)
        now, attempt = next_one
    assert attempt == 2  # executions 0, 1, 2
    assert len(waits) == 2
    assert 1 <= waits[0] <= 10
    assert 1 <= waits[1] <= 20


def test_a_final_reason_leaves_no_other_attempt():
    assert Policy().decide("m", 0, 5, final=True) is None
    assert Policy(max_attempts=1).decide("m", 0, 5) is None


def test_a_record_with_more_attempts_than_the_policy_now_allows_is_dead():
    assert Policy(max_attempts=2).decide("m", 7, 5) is None


def test_a_negative_attempt_is_refused():
    with pytest.raises(ValueError, match="at least 0, got -1"):
        Policy().decide("m", -1, 0)
    with pytest.raises(ValueError, match="at least 0, got -1"):
        Policy().decide_many(["m"], [-1], 0)


def test_a_record_is_due_no_earlier_than_was_asked_for():
    policy = Policy(base_ms=10, cap_ms=20)
    assert policy.decide("m", 0, 1_000, not_before_ms=9_000) == NextAttempt(9_000, 1)
    assert 1_001 <= policy.decide("m", 0, 1_000, not_before_ms=500).due_ms <= 1_010
    assert policy.decide("m", 4, 1_000, not_before_ms=9_000) is None


def test_what_is_no_attempt_goes_on_waiting_for_the_same_one():
    """For ever longer, up to the cap: each wait is at least half as long as all before."""
    policy = Policy(max_attempts=1, base_ms=100, cap_ms=50_000)
    now, waits = 0, []
    for _ in range(40):
        due, attempt = policy.decide("m", 0, now, counts=False, first_ms=0)
        assert attempt == 0
        waits.append(due - now)
        now = due
    assert 50 <= waits[0] <= 100
    assert all(wait >= min(sum(waits[:n]), 50_000) // 2 for n, wait in enumerate(waits) if n)
    assert max(waits) <= 50_000
    assert len(set(waits[-10:])) == 1  # of one message, always the same; of others not:
    last = {policy.decide(f"m{n}", 0, now, counts=False, first_ms=0).due_ms for n in range(50)}
    assert len(last) > 45


@given(IDS, st.integers(0, 10**6), st.integers(0, 2**62), MILLIS, MILLIS)
@example("a", 0, 0, 1, 1)
def test_such_a_wait_is_at_least_one_and_at_most_the_cap(message_id, attempt, known, base, cap):
    wait = unavailable_ms(message_id, attempt, known, base_ms=base, cap_ms=cap)
    widest = max(min(cap, base * 2**attempt), min(known, cap))
    assert widest // 2 < wait <= widest <= max(cap, 1)


ROWS = st.lists(
    st.tuples(
        IDS,
        st.integers(0, 10),
        st.booleans(),
        st.booleans(),
        st.integers(0, 2**51),
        st.integers(0, 2**50),
    ),
    max_size=30,
)


@given(ROWS, st.integers(1, 12), st.integers(0, 2**50))
def test_columns_are_decided_as_their_rows(rows, max_attempts, now):
    policy = Policy(max_attempts, 100, 5_000)
    ids, attempts, final, counts, not_before, firsts = ([row[n] for row in rows] for n in range(6))
    found = policy.decide_many(
        ids, attempts, now, final, counts=counts, not_before_ms=not_before, first_ms=firsts
    )
    for row, (message_id, attempt, last, each, earliest, first) in enumerate(rows):
        one = policy.decide(
            message_id, attempt, now, last, counts=each, not_before_ms=earliest, first_ms=first
        )
        assert found.dead[row] == (one is None)
        assert found.attempts[row] == (attempt + 1 if one is None else one.attempt)
        assert found.due_ms[row] == (0 if one is None else one.due_ms)
    plain = policy.decide_many(ids, attempts, now)
    assert plain.due_ms.tolist() == [
        0 if (one := policy.decide(each, attempt, now)) is None else one.due_ms
        for each, attempt in zip(ids, attempts, strict=True)
    ]


def test_columns_must_pair_up():
    with pytest.raises(ValueError, match="must pair up row by row"):
        Policy().decide_many(["a", "b"], [0], 0)
    with pytest.raises(ValueError, match="must pair up row by row"):
        Policy().decide_many(["a"], [0], 0, [True, False])
    assert len(Policy().decide_many([], [], 0).dead) == 0


def test_final_column_is_not_written_to():
    final = np.zeros(1, np.bool_)
    assert Policy(max_attempts=1).decide_many(["a"], [0], 0, final).dead.all()
    assert not final.any()
