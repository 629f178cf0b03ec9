"""Retry of failed records: exponential back-off with full jitter, and a last attempt.

All functions are pure functions of the message id and the attempt. A micro-batch that is decided
twice is therefore decided alike, two drivers agree without communication, and a test can compute
the delay beforehand. Attempts count from 0: attempt ``a`` is the ``(a + 1)``-th execution of a
record.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

#: The number of doublings after which any back-off exceeds any cap in int64 milliseconds.
#: More are not computed: 2**1_000_000 would be correct, but slow.
_DOUBLINGS = 63
_LONGEST_MS = 2**62


class NextAttempt(NamedTuple):
    """The time of a record's next attempt, by the clock of ``now_ms``, and its number."""

    due_ms: int
    attempt: int


class Decided(NamedTuple):
    """The decision for each row of a column of failed records.

    ``due_ms``: the time of the next attempt; 0 for a dead record. ``attempts``: the number of the
    next attempt; for a dead record, its number of executions.
    """

    dead: npt.NDArray[np.bool_]
    due_ms: npt.NDArray[np.int64]
    attempts: npt.NDArray[np.int32]


def whole_ms(seconds: float) -> int:
    """Return a time in seconds as whole milliseconds, rounded to the nearest, at least 1."""
    return max(1, round(seconds * 1000))


def capped_doubling(base_ms: int, attempts: int, max_ms: int) -> int:
    """Return the delay after ``attempts`` failures in a row, without jitter.

    ``base_ms``: the delay after the first failure, in milliseconds. ``attempts``: the number of
    failures so far, at least 1, without an upper limit. ``max_ms``: the longest delay in
    milliseconds, at most ``2**62``.

    The delay is ``min(max_ms, base_ms * 2**(attempts - 1))`` milliseconds.
    """
    return min(max_ms, base_ms << min(attempts - 1, _DOUBLINGS))


def backoff_ms(message_id: str, attempt: int, *, base_ms: int, cap_ms: int) -> int:
    """Return the delay of a message before an attempt, in milliseconds.

    The delay is uniform over ``1 .. min(cap_ms, base_ms * 2**(attempt - 1))``: *full* jitter, so
    that records that failed together, because a service was down, are not retried together. Raises
    ValueError if a number is out of range.

    ``message_id``: the message. Different messages have different delays. ``attempt``: the number
    of the next attempt, at least 1, without an upper limit. ``base_ms``, ``cap_ms``: the longest
    delay before attempt 1, and before any attempt, from 1 to ``2**62``.

    The result is in 1..``cap_ms``, and always the same for the same arguments.
    """
    if attempt < 1:
        raise ValueError(f"attempt must be at least 1, got {attempt}; attempt 0 has no delay")
    _check_range(base_ms, cap_ms)
    widest = capped_doubling(base_ms, attempt, cap_ms)
    # The high half of a product maps 64 random bits to the range, without a modulo's bias.
    bits = int.from_bytes(_digest(_begun(attempt), message_id), "little")
    return 1 + (bits * widest >> 64)


def _check_range(base_ms: int, cap_ms: int) -> None:
    for name, value in (("base_ms", base_ms), ("cap_ms", cap_ms)):
        if not 1 <= value <= _LONGEST_MS:
            raise ValueError(f"{name} must be between 1 and 2**62 milliseconds, got {value}")


def _begun(attempt: int) -> blake2b:
    """Return the hash state of an attempt, which is copied for each message: half the time."""
    return blake2b(attempt.to_bytes(8, "little"), digest_size=8, person=b"ackcore.retry")


def _digest(begun: blake2b, message_id: str) -> bytes:
    whole = begun.copy()
    # An id may have a lone surrogate, and its record must still be retried.
    whole.update(message_id.encode("utf-8", "surrogatepass"))
    return whole.digest()


def _high_product(
    bits: npt.NDArray[np.uint64], widest: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return ``bits * widest >> 64`` from half products, because a product has up to 126 bits."""
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    wide = widest.astype(np.uint64)
    a, b, c, d = bits >> half, bits & low, wide >> half, wide & low
    middle = a * d + (b * d >> half)
    crossed = b * c + (middle & low)
    high: npt.NDArray[np.uint64] = a * c + (middle >> half) + (crossed >> half)
    return high.astype(np.int64)


def unavailable_ms(
    message_id: str, attempt: int, known_ms: int, *, base_ms: int, cap_ms: int
) -> int:
    """Return the delay of a message after a failure that did not count as an attempt.

    Its attempts do not increase, so the delay grows with the age of the message. *Equal* jitter:
    uniform over the upper half of ``1 .. min(cap_ms, max(base_ms * 2**attempt, known_ms))``. A
    service that is down for long is called in ever longer intervals, up to ``cap_ms``, each at
    least half as long as all earlier ones together.

    ``attempt``: the attempt that failed; a negative one raises ValueError. ``known_ms``: the time
    since the message was first seen, in milliseconds. ``base_ms``, ``cap_ms``: as for `backoff_ms`.
    The result is always the same for the same arguments.
    """
    widest = max(capped_doubling(base_ms, attempt + 1, cap_ms), min(known_ms, cap_ms))
    upper = widest - widest // 2
    jitter = backoff_ms(message_id, attempt + 1, base_ms=upper, cap_ms=upper)
    return widest // 2 + jitter


class Policy(NamedTuple):
    """The number of attempts of a record, and the delays between them.

    ``max_attempts``: the number of failures after which the record is dead. ``base_ms``,
    ``cap_ms``: the arguments of `backoff_ms`.
    """

    max_attempts: int = 5
    base_ms: int = 1000
    cap_ms: int = 300_000

    @classmethod
    def of_seconds(cls, max_attempts: int, backoff_s: float, max_backoff_s: float) -> Policy:
        """Make a policy from the first and the longest delay, in seconds."""
        return cls(max_attempts, whole_ms(backoff_s), whole_ms(max_backoff_s))

    def decide(
        self,
        message_id: str,
        attempt: int,
        now_ms: int,
        final: bool = False,
        *,
        counts: bool = True,
        not_before_ms: int = 0,
        first_ms: int | None = None,
    ) -> NextAttempt | None:
        """Decide whether a failed record is retried, and when.

        Raises ValueError if ``attempt`` is negative, or if the record is retried and the policy's
        delays are out of range.

        ``message_id``: the record's id. ``attempt``: the attempt that failed, from 0. ``now_ms``:
        the time at which the delay begins, in milliseconds; on Spark that of the micro-batch's
        plan. ``final``: whether the reason excludes another attempt. ``counts``: whether the
        failure counts as an attempt; if not, the next attempt has the same number.
        ``not_before_ms``: the earliest time of the next attempt. ``first_ms``: the time at which
        the record was first seen; ``now_ms`` by default. The delay after a failure that does not
        count depends on it: see `unavailable_ms`.

        Returns the time and number of the next attempt; None if the record is dead.
        """
        attempt = operator.index(attempt)
        if attempt < 0:
            raise ValueError(f"attempt must be at least 0, got {attempt}")
        if final or (counts and attempt + 1 >= self.max_attempts):
            return None
        base, cap = self.base_ms, self.cap_ms
        if counts:
            delay = backoff_ms(message_id, attempt + 1, base_ms=base, cap_ms=cap)
        else:
            known = 0 if first_ms is None else max(now_ms - first_ms, 0)
            delay = unavailable_ms(message_id, attempt, known, base_ms=base, cap_ms=cap)
        return NextAttempt(max(now_ms + delay, not_before_ms), attempt + counts)

    def decide_many(
        self,
        message_ids: Sequence[str],
        attempts: npt.ArrayLike,
        now_ms: int,
        final: npt.ArrayLike | None = None,
        *,
        counts: npt.ArrayLike | None = None,
        not_before_ms: npt.ArrayLike | None = None,
        first_ms: npt.ArrayLike | None = None,
    ) -> Decided:
        """Decide whether failed records are retried, and when: `decide` for columns.

        Raises ValueError if the columns differ in length, an attempt is negative, or the policy's
        delays are out of range.

        ``message_ids``: the ids of the records. ``attempts``: the attempts that failed. ``now_ms``:
        as for `decide`. ``final``: whether each reason excludes another attempt; by default none
        does. ``counts``: whether each failure counts as an attempt; by default all do.
        ``not_before_ms``, ``first_ms``: as for `decide`.

        Returns three columns of n rows: see `Decided`.
        """
        n = len(message_ids)

        def column(name: str, values: npt.ArrayLike | None, default: int) -> npt.NDArray[np.int64]:
            found = np.full(n, default) if values is None else np.asarray(values)
            if found.shape != (n,):
                raise ValueError(
                    f"message_ids has {n} rows and {name} has shape {found.shape}; they must pair "
                    "up row by row"
                )
            return found.astype(np.int64)

        failed = column("attempts", attempts, 0)
        final_, counted = column("final", final, False) != 0, column("counts", counts, True) != 0
        earliest = column("not_before_ms", not_before_ms, 0)
        firsts = column("first_ms", first_ms, now_ms)
        if n and failed.min() < 0:
            row = int(failed.argmin())
            raise ValueError(f"attempts must be at least 0, got {failed[row]} in row {row}")
        _check_range(self.base_ms, self.cap_ms)
        dead = final_ | (counted & (failed + 1 >= self.max_attempts))
        # Loop over attempts: they have few distinct values, and the columns have many rows.
        of_each, at = np.unique(failed, return_inverse=True)
        doubled = [
            capped_doubling(self.base_ms, each + 1, self.cap_ms) for each in of_each.tolist()
        ]
        widest = np.array(doubled, np.int64)[at]
        known = np.clip(now_ms - firsts, 0, self.cap_ms)
        free = ~counted
        widest[free] = np.maximum(widest[free], known[free])
        lower = np.where(free, widest // 2, 0)
        begun = [_begun(each + 1) for each in of_each.tolist()]
        # Skip dead records, which have no next attempt and may be all records of an outage.
        digests = [
            b"\0" * 8 if gone else _digest(begun[of], message_id)
            for of, message_id, gone in zip(at.tolist(), message_ids, dead.tolist(), strict=True)
        ]
        bits = np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)
        delay = lower + 1 + _high_product(bits, widest - lower)
        due = np.where(dead, 0, np.maximum(now_ms + delay, earliest))
        following = failed + (counted | dead)
        return Decided(dead, due, following.astype(np.int32))
