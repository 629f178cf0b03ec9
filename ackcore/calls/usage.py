"""The tokens and the money that calls report as used: sums by key, and the budget of a bolt."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from ackcore._columns import real
from ackcore._error_hints import naming_arguments
from ackcore.calls.outcomes import Unavailable, marked_final

#: More tokens of a report are refused as mistakes: their key would wait for ever.
_MOST_TOKENS = 1e9
#: Larger costs are refused as mistakes.
MOST_COST = 1e15
#: The most keys that a report names.
MOST_KEYS = 100
#: The key of a report that has the sum of all other keys.
OTHER_KEYS = "(other keys)"
#: The number of keys that `KeySums` keeps when it has more than twice as many.
KEPT_SUMS = 1000
_KEY_CHARS = 200  # longer keys of a limit are cut
#: Seconds until a tuple is tried again, if no money was left when its micro-batch began.
_NO_MONEY_S = 60.0
#: A share is spent when no more than this part of it is left: sums of floats are rounded.
_ROUNDING = 1e-9


def largest_sums(sums: Mapping[str, float], most: int = MOST_KEYS) -> dict[str, float]:
    """Return the ``most`` largest sums by key, then the sum of others as `OTHER_KEYS`, unless 0."""
    others = sums.get(OTHER_KEYS, 0.0)
    named = sorted((-amount, key) for key, amount in sums.items() if key != OTHER_KEYS)
    found = {key: -amount for amount, key in named[:most]}
    others -= sum(amount for amount, _ in named[most:])
    return found | ({OTHER_KEYS: others} if others else {})


def text_of(key: Hashable) -> str:
    """Return the text of a key of a limit, cut to 200 characters; its class if `str` raises."""
    try:
        return str(key)[:_KEY_CHARS]
    except KeyboardInterrupt:
        raise
    except BaseException:  # user code, after the call was paid
        return type(key).__name__


class KeySums(dict[str, float]):
    """Sums by key. Above 2,000 keys, all but the 1,000 largest are added up in `OTHER_KEYS`."""

    def add(self, key: str, amount: float) -> None:
        """Add an amount to the sum of a key."""
        self[key] = self.get(key, 0.0) + amount
        if len(self) > 2 * KEPT_SUMS:
            kept = largest_sums(self, KEPT_SUMS)
            self.clear()
            self.update(kept)


@dataclass
class UsageCounts:
    """The numbers of calls and reports, and the tokens that calls reported.

    ``answered``: calls that returned. ``with_tokens``, ``with_cost``: calls that reported these.
    ``late``: reports after the end of their call, which were refused. ``tokens``: the sums by key
    of the limit; the key is "" without ``per``. ``failed``: calls that raised an error that does
    not concern the service.
    """

    answered: int = 0
    with_tokens: int = 0
    with_cost: int = 0
    late: int = 0
    tokens: KeySums = field(default_factory=KeySums)
    failed: int = 0

    def add(self, other: UsageCounts) -> None:
        """Add other counts to these."""
        for name in ("answered", "with_tokens", "with_cost", "late", "failed"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for key, tokens in other.tokens.items():
            self.tokens.add(key, tokens)

    def taken(self) -> UsageCounts:
        """Return a copy of the counts, and set these to 0."""
        found = replace(self)
        vars(self).update(vars(UsageCounts()))
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the counts by name for JSON. ``tokens`` has the 100 largest and the rest."""
        return vars(self) | {"tokens": largest_sums(self.tokens)}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> UsageCounts:
        """Return the counts in a result of `to_json`."""
        return cls(**found | {"tokens": KeySums(found["tokens"])})


@dataclass
class CallCounts:
    """The counts since the calls of a task began.

    ``trips``: times that a breaker opened. ``used``: the reports of `used`, if the limit has
    ``tokens_per_min`` or ``cost_per_run``.
    """

    trips: int = 0
    used: UsageCounts = field(default_factory=UsageCounts)


class Budget:
    """The share that one task has of the money left for a bolt's calls.

    ``bolt``: the bolt's name. ``limit``: the bolt's ``cost_per_run``. ``before``: the cost of the
    bolt's calls in earlier micro-batches. ``tasks``: the number of tasks of the bolt, which have
    equal shares of the rest.

    Attributes: ``spent``: the cost of this micro-batch's calls in the task. ``by_key``: the same
    cost by key; the key is "" for a limit without keys.
    """

    def __init__(self, bolt: str, limit: float, before: float, tasks: int) -> None:
        self._bolt, self._limit, self._before = bolt, limit, before
        self._share = max(0.0, limit - before) / tasks
        self.spent = 0.0
        self.by_key = KeySums()

    def add(self, cost: float, key: str) -> None:
        """Add the cost of a call with a key."""
        self.spent += cost
        self.by_key.add(key, cost)

    def refusal(self) -> Unavailable | None:
        """Return the error of tuples that are not called, or None while the share is not spent."""
        if self.spent < self._share * (1 - _ROUNDING):
            return None
        text = (
            f"not called: bolt {self._bolt!r} has cost_per_run={self._limit:g}, of which "
            f"{self._before:g} was spent before this micro-batch"
        )
        if not self._share:
            return Unavailable(
                f"{text}, so nothing is left; start again with a higher cost_per_run",
                after_s=_NO_MONEY_S,
            )
        return Unavailable(
            f"{text}, and this task has spent {self.spent:g} of its share of {self._share:g}; the "
            "next micro-batch uses what other tasks left. When all is spent, start again with a "
            "higher cost_per_run"
        )


class Usage:
    """The tokens and the cost that one call has reported.

    ``key``: the text of its key in reports. ``counts``: the task's counts, to which `end` adds the
    tokens, and whether a cost was reported.

    Attributes: ``tokens``, ``cost``: the sums of its reports, None without one.
    """

    __slots__ = ("_counts", "_ended", "cost", "key", "tokens")

    def __init__(self, key: str, counts: UsageCounts) -> None:
        self.key = key
        self.tokens: float | None = None
        self.cost: float | None = None
        self._counts = counts
        self._ended = False

    def report(self, tokens: float | None, cost: float | None) -> None:
        """Add reported tokens and cost; None adds nothing. Raises RuntimeError after the call."""
        if self._ended:
            self._counts.late += 1
            raise RuntimeError(
                "used() must be called before its call ends, got a report of "
                f"tokens={tokens}, cost={cost} after that, which does not count; await, or join, "
                "all that the call starts before it returns"
            )
        if tokens is not None:
            self.tokens = (self.tokens or 0.0) + tokens
        if cost is not None:
            self.cost = (self.cost or 0.0) + cost

    def close(self) -> None:
        """Refuse further reports."""
        self._ended = True

    def end(self, answered: bool, failed: bool) -> None:
        """Add the ended call to the task's counts, and refuse further reports.

        ``answered``: whether it returned. ``failed``: whether it raised an error that does not
        concern the service.
        """
        self.close()
        counts = self._counts
        counts.answered += answered
        counts.failed += failed
        counts.with_cost += self.cost is not None
        if self.tokens is not None:
            counts.with_tokens += 1
            counts.tokens.add(self.key, self.tokens)


#: The usage of the call that is running; None if neither tokens nor cost are limited.
USAGE: ContextVar[Usage | None] = ContextVar("ackcore.calls.usage", default=None)


@marked_final()
@naming_arguments
def used(*, tokens: float | None = None, cost: float | None = None) -> None:
    """Report the tokens that the running call has used, such as those of a language model, or the
    money that it has cost.

    Call it in an `AsyncBolt`, or in a function of `attempt` or `guard`, also in a thread or
    coroutine that `asyncio` starts for the call. Several reports of a call add up. It has no effect
    elsewhere, or without a `RateLimit` with ``tokens_per_min`` or ``cost_per_run``. If a failed
    call costs money, report the cost before you raise the exception.

    Parameters
    ----------
    tokens : number, optional
        At least 0, at most a billion. Numbers of numpy and `decimal.Decimal` are converted to
        float.
    cost : number, optional
        At least 0, at most 1e15, in the unit of ``cost_per_run``.

    Raises
    ------
    TypeError
        If one is not a number, both are missing, or there is another argument.
    ValueError
        If one is out of range.
    RuntimeError
        If the call has ended, for example by a timeout that its thread outlived. The report does
        not count.

    Notes
    -----
    All these errors are final: the call may have cost money, so it is not repeated, and its record
    becomes a dead letter. This holds also if you handle the error and raise another one.
    """
    report(USAGE.get(), tokens, cost)


def report(usage: Usage | None, tokens: Any, cost: Any) -> None:
    """Check the arguments of `used`, and add them to ``usage``, unless that is None.

    Raises the TypeError, ValueError and RuntimeError of `used`, without marking them as final.
    """
    if tokens is None and cost is None:
        raise TypeError(
            "used() needs tokens=... or cost=..., got neither; do not call it if the service does "
            "not return them"
        )
    some = (("tokens", tokens, _MOST_TOKENS), ("cost", cost, MOST_COST))
    found = [None if one is None else _amount(one, name, most) for name, one, most in some]
    if usage is not None:
        usage.report(*found)


def _amount(given: Any, name: str, most: float) -> float:
    try:
        amount = real(given, name)
    except TypeError:
        raise TypeError(
            f"{name} of used() must be a number, got {type(given).__name__} {given!r}; convert it, "
            "such as with float(...)"
        ) from None
    if not 0 <= amount <= most:
        raise ValueError(
            f"{name} of used() must be in 0..{most:.0f}, got {given}; leave out an amount that is "
            "not known"
        )
    return amount
