"""The figures of a query: the progress of each micro-batch, and the books since it began.

A record of the books is in one of three places, always: it was ACKED, it waits for a retry, or it
is DEAD.  ``records + replayed == acked + waiting + dead`` for every tracked spout, at the end of
each micro-batch.  A dead letter that is sent again is a new record, among ``replayed``; it is
``resolved`` when that was ACKED, and among ``acked`` as well.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ackcore.spark.base.traces import RecordTrace

if TYPE_CHECKING:
    from ackcore.spark.run.types import RunResult

_log = logging.getLogger("ackcore")

#: Calls that raised, of one bolt in one micro-batch, from which on a warning says so.
MANY_CALLS = 100


@dataclass(frozen=True, slots=True)
class Account:
    """The records of one spout.

    Parameters
    ----------
    records : int
        Read from the source.
    replayed : int
        Dead letters sent again by `replay`.
    acked, dead : int
        Decided so; a replayed record is dead twice if it dies again.
    waiting : int
        For a retry, at the end of the last micro-batch.
    retried : int
        Executions beyond each record's first, those that did not count as well.
    resolved : int
        Of the replayed: ACKED.
    """

    records: int = 0
    replayed: int = 0
    acked: int = 0
    dead: int = 0
    waiting: int = 0
    retried: int = 0
    resolved: int = 0

    @property
    def balanced(self) -> bool:
        """Whether each record is in its place."""
        return self.records + self.replayed == self.acked + self.waiting + self.dead


@dataclass(frozen=True, slots=True)
class Books:
    """Everything since the checkpoint was made: what a query has done with its records.

    Parameters
    ----------
    batches : int
        Micro-batches done.
    spouts : mapping from str to Account
        Each tracked spout's records.
    """

    batches: int = 0
    spouts: Mapping[str, Account] = field(default_factory=dict)

    def _sum(self, of: Callable[[Account], int]) -> int:
        return sum(map(of, self.spouts.values()))

    @property
    def records(self) -> int:
        """Records that were read."""
        return self._sum(lambda account: account.records)

    @property
    def replayed(self) -> int:
        """Dead letters that were sent again."""
        return self._sum(lambda account: account.replayed)

    @property
    def acked(self) -> int:
        """Records that were ACKED."""
        return self._sum(lambda account: account.acked)

    @property
    def dead(self) -> int:
        """Records that went to the dead letters."""
        return self._sum(lambda account: account.dead)

    @property
    def waiting(self) -> int:
        """Records that wait for a retry."""
        return self._sum(lambda account: account.waiting)

    @property
    def retried(self) -> int:
        """Executions beyond each record's first."""
        return self._sum(lambda account: account.retried)

    @property
    def resolved(self) -> int:
        """Dead letters that were sent again and ACKED."""
        return self._sum(lambda account: account.resolved)

    @property
    def balanced(self) -> bool:
        """Whether ``records + replayed == acked + waiting + dead``, spout by spout."""
        return all(account.balanced for account in self.spouts.values())

    def after(self, changes: Mapping[str, Account]) -> Books:
        """Return the books after one more micro-batch; its ``waiting`` replaces what was."""
        spouts = dict(self.spouts)
        for name, change in changes.items():
            before = spouts.get(name, Account())
            sums = {
                each.name: getattr(before, each.name) + getattr(change, each.name)
                for each in fields(Account)
            }
            spouts[name] = Account(**{**sums, "waiting": change.waiting})
        return Books(self.batches + 1, spouts)

    def corrected(self, changes: Mapping[str, Account]) -> Books:
        """Return the books of the same micro-batch with what became of some records changed."""
        changed = {
            name: replace(change, waiting=self.spouts[name].waiting)
            for name, change in changes.items()
        }
        return replace(self.after(changed), batches=self.batches)

    def to_json(self) -> dict[str, Any]:
        """Return the books as a checkpoint keeps them."""
        return {
            "batches": self.batches,
            "spouts": {name: asdict(account) for name, account in self.spouts.items()},
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Books:
        """Return the books that a checkpoint kept; none at all are those of the beginning."""
        spouts = found.get("spouts", {})
        return cls(
            found.get("batches", 0),
            {name: Account(**account) for name, account in spouts.items()},
        )


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Three percentiles of a distribution, in milliseconds."""

    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0


@dataclass(frozen=True, slots=True)
class Progress:
    """The report of one micro-batch.

    Parameters
    ----------
    batch_id : int
        Its number.
    records : int
        New records of tracked spouts.
    acked, failed : int
        Executions that ended so; together the new and the retried records.
    uncounted : int
        Of the failed ones: those that were no attempt (`ackcore.topology.Unavailable`).
    retried, replayed : int
        Records that were executed again, after a failure or out of the dead letters.
    dead : int
        Records that went to the dead letters: of the failed ones.
    waiting : int
        Records that wait for a retry when it ends.
    oldest_ms : int
        For how long the oldest of them has been known; 0 without any.
    latency_ms : Percentiles
        Of the acked records: from the plan of their first micro-batch until the sinks had them.
    duration_ms, records_per_s : float
        How long it took from plan to mark, and executions in a second of that.
    runs : int
        How often it was run; more than 1 if a run died or its parts did not agree.
    steps_ms : mapping from str to float
        What the steps of the protocol took; steps done before a restart are missing.
    breaker_trips : int
        How often a circuit breaker opened, in all tasks, in the run that was accepted.
    emitted : mapping from str to mapping from str to int
        In that run, how many tuples each component emitted to each of its streams that is read,
        those of calls included that were repeated for parts of a batch.
    lag : mapping from str to int
        By spout that reads Kafka: offsets from what its group was told to be done up to the end of
        each partition, as it was when the micro-batch was planned.
    traces : tuple of RecordTrace
        The way of those records that the setting ``trace_per_million`` chose: 200 at most, those
        that failed first.
    """

    batch_id: int
    records: int = 0
    acked: int = 0
    failed: int = 0
    uncounted: int = 0
    retried: int = 0
    replayed: int = 0
    dead: int = 0
    waiting: int = 0
    oldest_ms: int = 0
    latency_ms: Percentiles = Percentiles()
    duration_ms: float = 0.0
    records_per_s: float = 0.0
    runs: int = 0
    steps_ms: Mapping[str, float] = field(default_factory=dict)
    breaker_trips: int = 0
    lag: Mapping[str, int] = field(default_factory=dict)
    emitted: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    traces: tuple[RecordTrace, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        replayed = f", {self.replayed} replayed" if self.replayed else ""
        p50, p95, p99 = (f"{ms:.0f}" for ms in astuple(self.latency_ms))
        # Of none that was ACKED there is no latency, and 0 ms would be a quick one.
        took = f"latency {p50}/{p95}/{p99} ms, " if self.acked else ""
        oldest = f" (oldest {self.oldest_ms / 1000:.1f} s)" if self.waiting else ""
        free = f" ({self.uncounted} not counted)" if self.uncounted else ""
        trips = f", {self.breaker_trips} breaker trips" if self.breaker_trips else ""
        again = f", {self.runs} runs" if self.runs > 1 else ""
        lag = f", lag {sum(self.lag.values())}" if self.lag else ""
        return (
            f"micro-batch {self.batch_id}: {self.acked} acked, {self.failed} failed{free}, "
            f"{self.retried} retried{replayed}, {self.dead} dead, {self.waiting} waiting{oldest}, "
            f"{took}"
            f"{self.records_per_s:.0f} records/s, {self.duration_ms / 1000:.2f} s"
            f"{lag}{trips}{again}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the progress as an object for JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Progress:
        """Read what `to_json` returned; other entries of the mapping are passed over."""
        known = {each.name: found[each.name] for each in fields(cls)}
        latency, traces = (
            Percentiles(**found["latency_ms"]),
            tuple(map(RecordTrace.of, found["traces"])),
        )
        return cls(**{**known, "latency_ms": latency, "traces": traces})

    def log(self) -> None:
        """Write the one line of a micro-batch to the logger ``ackcore``."""
        _log.info("%s", self)


def percentiles(groups: Iterable[tuple[float, int]], values: npt.ArrayLike = ()) -> Percentiles:
    """Return the 50th, 95th and 99th percentile, by nearest rank.

    Parameters
    ----------
    groups : iterable of (float, int)
        Values, and how often each occurs: no array is made of a million equal ones.
    values : array_like of float, default ()
        Further values that occur once each.

    Returns
    -------
    Percentiles
        Zeros if there are no values.
    """
    pairs = [(value, count) for value, count in groups if count > 0]
    single = np.asarray(values, np.float64)
    found = np.concatenate([np.array([value for value, _ in pairs], np.float64), single])
    counts = np.array([count for _, count in pairs] + [1] * len(single), np.int64)
    if not len(found):
        return Percentiles()
    order = np.argsort(found, kind="stable")
    ranks = np.cumsum(counts[order])
    total = int(ranks[-1])
    # Nearest rank: the least value that at least so many percent do not exceed.
    wanted = [-(-total * percent // 100) for percent in (50, 95, 99)]
    places = np.searchsorted(ranks, wanted)
    return Percentiles(*found[order][places].tolist())


class Stopwatch:
    """Milliseconds by step; a step taken twice counts with both."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Count the time since the last lap as that of a step."""
        now = time.perf_counter()
        self.laps[name] = self.laps.get(name, 0.0) + 1000 * (now - self._last)
        self._last = now

    def seconds(self) -> float:
        """Return the time since it was made."""
        return max(time.perf_counter() - self._start, 1e-9)


def warn_of_failures(number: int, ran: RunResult) -> None:
    """Say what no dead letter will: untracked failures, and bolts that raise in many calls."""
    if ran.untracked_failures:
        _log.warning(
            "micro-batch %d: %d untracked tuples failed; they are gone",
            number,
            ran.untracked_failures,
        )
    for name, some in sorted(ran.raised.items()):
        if some.calls <= MANY_CALLS:
            continue
        _log.warning(
            "micro-batch %d: process() of bolt %s raised in %d calls, for %d row%s%s; a batch that "
            "raises is bisected to the rows that raise by themselves. Catch it, and fail those "
            "rows with out.fail(rows, reasons)",
            number,
            name,
            some.calls,
            some.rows,
            "s" * (some.rows != 1),
            f", mostly {some.types.most_common(1)[0][0]}" if some.rows else "",
        )
