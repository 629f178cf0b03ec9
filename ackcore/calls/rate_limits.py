"""The limits that a service sets: calls per second and at once, for all calls or for each key."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from decimal import Decimal
from numbers import Real
from typing import Any, SupportsIndex

from ackcore._columns import as_count, positive
from ackcore._error_hints import naming_arguments
from ackcore.calls.threads import refuse_lazy
from ackcore.calls.usage import MOST_COST, UsageCounts
from ackcore.flow.limits import MAX_LIMIT, Limit, check_room

#: Larger limits are refused as mistakes.
_MOST = {"calls_per_s": 1e9, "tokens_per_min": 60e9, "cost_per_run": MOST_COST}
#: The key of all NaN.
_NAN = math.nan


@dataclass(frozen=True)
class RateLimit:
    """A limit of calls: for all calls together, or for each key on its own.

    Parameters
    ----------
    per : str or callable, optional
        The key of a tuple: the name of one of its columns, or a function of the tuple that returns
        a hashable value. Equal values, such as 1 and 1.0, are one key, and so are all NaN. Each key
        has its own rate, number of calls at once, pauses (`Retry`) and breaker, so that a key that
        is throttled slows down alone. Keys with waiting tuples are served in turn: the next call
        belongs to the key with the fewest calls in flight. None for one limit for all.
    calls_per_s : float, optional
        The largest number of calls begun per second, of each key if there is `per`. It holds for
        the whole job: the tasks that can run at once have equal shares. For a bolt without a
        ``parallelism`` these are as many as cores, even if fewer have rows, unless its source is a
        `KafkaSpout` or closed windows, whose number of tasks is known.
        If the bolt's inputs are grouped by the column `per` (`fields`), all tuples of a key are in
        one task, which then has the whole rate. None for no limit.
    tokens_per_min : float, optional
        The largest number of tokens used per minute, of each key if there is `per`, shared by the
        tasks like `calls_per_s`. A call reports its tokens by `used`, or by the ``used`` of a
        bolt's collector. Before, it counts with the mean of the key's last calls in the task. While
        more tokens are used than the limit allows, no call begins. So the excess is at most the
        tokens of the calls that were in flight in a task; the next task does not wait for it. None
        for no limit.
    cost_per_run : float, optional
        The most money that the calls of a bolt may cost, of all keys together, in the unit in which
        calls report it by ``used(cost=...)``. A run is all micro-batches of a checkpoint, restarts
        included. When it is spent, the other tuples are not called. They fail with `Unavailable`,
        so their records wait, and no attempt counts. The excess is at most the cost of the calls
        that were in flight when the money ran out. Only for an `AsyncBolt` with ``journal = True``
        behind an exchange; its tasks have equal shares of what is left. None for no limit.
    concurrency : int or callable, optional
        The largest number of calls of a key at once, in each task: a number, or a callable without
        arguments that makes a `Limit`, such as a class of `ackcore.flow`. Only with `per`, and in
        addition to ``max_concurrency``, which counts all keys together. By default it adapts to the
        answers (`DelayTarget`).

    Raises
    ------
    TypeError, ValueError
        If an argument has another type or is out of range, or if the object limits nothing.

    Notes
    -----
    The keys among the tuples that a task has read ahead share its calls: those of a batch of
    ``chunk_rows`` in a bolt, and 65,536 rows in `attempt`. A task also keeps the state of the 1,024
    keys that it called last. A key that comes back later than that begins anew, with an empty
    bucket and a closed breaker. Only tokens that it used above its limit remain counted.

    Examples
    --------
    >>> RateLimit(per="tenant", calls_per_s=5, concurrency=2)
    RateLimit(per='tenant', calls_per_s=5.0, concurrency=2, tokens_per_min=None, \
cost_per_run=None)
    """

    per: str | Callable[[Any], Hashable] | None = None
    calls_per_s: float | None = None
    concurrency: int | Callable[[], Limit] | None = None
    tokens_per_min: float | None = None
    cost_per_run: float | None = None

    def __post_init__(self) -> None:
        if self.per is not None and not (isinstance(self.per, str) or callable(self.per)):
            raise TypeError(
                "per must be the name of a column, or a function of a tuple, got "
                f"{type(self.per).__name__} {self.per!r}; write calls_per_s=... for one limit of "
                "all calls"
            )
        refuse_lazy(self.per, "per")  # each call would have a key of its own
        if self.per == "":
            raise ValueError("per must not be empty; leave it out for one limit for all")
        for name, most in _MOST.items():
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, positive(given, name, most))
        if self.concurrency is not None and self.per is None:
            raise ValueError(
                f"concurrency must be left out without per, got {self.concurrency!r}; "
                "max_concurrency limits the calls of a task"
            )
        if callable(self.concurrency):
            made_by(self.concurrency, "concurrency")
        elif self.concurrency is not None:
            made = checked_concurrency(self.concurrency, "concurrency", "key")
            object.__setattr__(self, "concurrency", made)
        if all(getattr(self, name) is None for name in ("per", *_MOST)):
            raise ValueError(
                "a RateLimit must limit something; give calls_per_s=..., tokens_per_min=..., "
                "cost_per_run=... or per=..."
            )

    def share(self, tasks: int) -> RateLimit:
        """Return the limit for one of ``tasks`` tasks: with an equal share of calls and tokens.

        ``concurrency`` and ``cost_per_run`` stay the same.
        """
        calls, tokens = self.calls_per_s, self.tokens_per_min
        return replace(
            self,
            calls_per_s=None if calls is None else calls / tasks,
            tokens_per_min=None if tokens is None else tokens / tasks,
        )

    def key_of(self, one: Any) -> Hashable:
        """Return the key of a tuple; None without `per`.

        Raises TypeError if the key is not hashable, the error of a tuple without the column, or an
        exception of the function `per`.
        """
        if self.per is None:
            return None
        key: Any = one[self.per] if isinstance(self.per, str) else self.per(one)
        try:
            hash(key)
        except TypeError:
            raise TypeError(
                f"a key of RateLimit(per=...) must be hashable, got {type(key).__name__}; use a "
                "number, a text or a tuple"
            ) from None
        # NaN differs from itself, so each tuple would have a limit of its own.
        is_nan = isinstance(key, Real | Decimal) and key != key
        found: Hashable = _NAN if is_nan else key
        return found


RateLimit.__init__ = naming_arguments(RateLimit.__init__)  # type: ignore[method-assign]


def checked_concurrency(given: Any, name: str, owner: str) -> int:
    """Return a concurrency as int. Raise TypeError or ValueError unless it is 1 to a million.

    ``name``: the argument's name. ``owner``: the noun for the error, of which each needs a `Limit`
    of its own: "endpoint" or "key".
    """
    if isinstance(given, bool) or not isinstance(given, SupportsIndex):
        advice = f"; each {owner} needs its own limit, so pass the class"
        raise TypeError(
            f"{name} must be a whole number of calls, or a function or class that makes a Limit, "
            f"got {type(given).__name__}{advice if isinstance(given, Limit) else ''}"
        )
    return as_count(given, name, 1, MAX_LIMIT)


def made_by(make: Callable[[], Any], name: str) -> Limit:
    """Return the `Limit` that an argument makes.

    Raises TypeError if it makes something else, and ValueError if it allows no call.
    """
    made = make()
    if not isinstance(made, Limit):
        raise TypeError(
            f"{name} must make a Limit, an object with limit and on_sample, got "
            f"{type(made).__name__}; pass a number, or a class of ackcore.flow"
        )
    check_room(made)
    return made


def checked_limit(given: Any) -> RateLimit | None:
    """Return the argument ``limit``. Raises TypeError if it is neither a RateLimit nor None."""
    if given is not None and not isinstance(given, RateLimit):
        raise TypeError(
            f"limit must be a RateLimit, got {type(given).__name__} {given!r}; write "
            "limit=RateLimit(calls_per_s=...)"
        )
    return given


def unreported(limit: RateLimit, counts: UsageCounts, subject: str) -> dict[str, str]:
    """Return warnings about limits of tokens or cost without effect, because no call reports them.

    The keys are ``tokens_per_min`` and ``cost_per_run``; {} if neither is set, if calls report, or
    if none has ended. ``subject``: the limit's name in warnings.
    """
    parts = (
        ("tokens_per_min", limit.tokens_per_min, counts.with_tokens, "tokens"),
        ("cost_per_run", limit.cost_per_run, counts.with_cost, "cost"),
    )
    ended = f"{counts.answered} answered calls"
    if counts.failed:
        ended = f"{counts.answered} answered and {counts.failed} failed calls"
    return {
        part: f"{subject} has {part}={most:.15g}, and none of {ended} reported its {word}, so "
        f"nothing is limited; let each call report it by used({word}=...) before it returns or "
        "raises"
        for part, most, reports, word in parts
        if most is not None and (counts.answered or counts.failed) and not reports
    }


class TokenBucket:
    """A limit on the rate at which calls begin, or at which they use tokens of a service.

    The bucket is empty at first. So within its first t seconds at most ``rate_per_s * t`` calls
    begin, and many short tasks in a row do not exceed the rate either.

    ``rate_per_s``: tokens per second, above 0. ``now_ns``: the time now, in nanoseconds.
    ``burst_s``: the bucket holds the tokens of this many seconds, but at least one token.

    The state is the time at which the bucket would be empty again (the generic cell rate algorithm,
    ITU-T I.371), so that no refill is needed.
    """

    __slots__ = ("_due_ns", "_interval_ns", "_slack_ns")

    def __init__(self, rate_per_s: float, now_ns: int, burst_s: float = 0.1) -> None:
        self._interval_ns = 1e9 / rate_per_s
        self._slack_ns = max(0.0, burst_s * 1e9 - self._interval_ns)
        self._due_ns = now_ns + self._interval_ns + self._slack_ns

    def ready_ns(self) -> int:
        """Return the time of the next token, which may be in the past."""
        # Rounded up: a nanosecond earlier there is no token.
        return int(self._due_ns - self._slack_ns) + 1

    def take(self, now_ns: int, tokens: float = 1) -> None:
        """Take tokens, also more than the bucket has: `ready_ns` is then later.

        ``now_ns``: the time now, in nanoseconds; the caller waits until `ready_ns` first.
        """
        self._due_ns = max(self._due_ns, float(now_ns)) + tokens * self._interval_ns

    def correct(self, tokens: float) -> None:
        """Take more tokens for a call that has ended; a negative number puts tokens back."""
        self._due_ns += tokens * self._interval_ns
