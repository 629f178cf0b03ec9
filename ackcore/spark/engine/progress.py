"""The figures of a query: the progress of each micro-batch, and the counts since it began.

A record is always counted in one of three places: it was ACKED, it waits for a retry, or it is
DEAD.  ``records + replayed == acked + waiting + dead`` holds for every tracked spout, at the end of
each micro-batch.  A dead letter that is sent again counts as a new record, in ``replayed``.  When
it is ACKED, it counts in ``resolved`` and in ``acked``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ackcore._error_hints import counted
from ackcore.calls.rate_limits import unreported
from ackcore.spark.base.traces import RecordTrace
from ackcore.topology.components import AsyncBolt
from ackcore.topology.dedup import duplicates_in
from ackcore.topology.tuples import Reason

if TYPE_CHECKING:
    from ackcore.spark.engine.setup import RunResult
    from ackcore.topology.builder import Topology

_log = logging.getLogger("ackcore")

#: A warning is logged if more calls of one bolt than this raise in one micro-batch.
MANY_CALLS = 100
#: The number of unmet expectations that a log line names.
_NAMED = 3


@dataclass(frozen=True, slots=True)
class Account:
    """The counts of one spout's records."""

    records: int = 0  # records read from the source
    replayed: int = 0  # Dead letters sent again by `replay`
    #: Records that are ACKED or DEAD; a replayed record that dies again counts twice as dead.
    acked: int = 0
    dead: int = 0
    waiting: int = 0  # records that wait for a retry at the end of the last micro-batch
    retried: int = 0  # Executions beyond each record's first, including those that are no attempt
    resolved: int = 0  # Replayed records that are ACKED

    @property
    def balanced(self) -> bool:
        """Whether ``records + replayed == acked + waiting + dead``."""
        return self.records + self.replayed == self.acked + self.waiting + self.dead


@dataclass(frozen=True, slots=True)
class Counts:
    """The counts of a query's records since its checkpoint was made.

    Parameters
    ----------
    batches : int
        Micro-batches done.
    spouts : mapping from str to Account
        The account of each tracked spout.
    spent : mapping from str to float
        By bolt whose limit has ``cost_per_run``: the cost of its calls.
    """

    batches: int = 0
    spouts: Mapping[str, Account] = field(default_factory=dict)
    spent: Mapping[str, float] = field(default_factory=dict)

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

    def after(
        self,
        changes: Mapping[str, Account],
        spent: Mapping[str, Mapping[str, float]] = MappingProxyType({}),
    ) -> Counts:
        """Return the counts after one more micro-batch; its ``waiting`` replaces the old one.

        ``spent`` has the costs of the micro-batch, by bolt and key.
        """
        spouts = dict(self.spouts)
        for name, change in changes.items():
            before = spouts.get(name, Account())
            sums = {
                each.name: getattr(before, each.name) + getattr(change, each.name)
                for each in fields(Account)
            }
            spouts[name] = Account(**{**sums, "waiting": change.waiting})
        costs = dict(self.spent)
        for bolt, keys in spent.items():
            costs[bolt] = costs.get(bolt, 0.0) + sum(keys.values())
        return Counts(self.batches + 1, spouts, costs)

    def corrected(self, changes: Mapping[str, Account]) -> Counts:
        """Return the counts with ``changes`` added; ``waiting`` and ``batches`` stay the same."""
        changed = {
            name: replace(change, waiting=self.spouts[name].waiting)
            for name, change in changes.items()
        }
        return replace(self.after(changed), batches=self.batches)

    def to_json(self) -> dict[str, Any]:
        """Return the counts in the form that a checkpoint stores."""
        return {
            "batches": self.batches,
            "spouts": {name: asdict(account) for name, account in self.spouts.items()},
            "spent": dict(self.spent),
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Counts:
        """Return the counts from a checkpoint; an empty mapping gives the initial counts."""
        spouts = found.get("spouts", {})
        return cls(
            found.get("batches", 0),
            {name: Account(**account) for name, account in spouts.items()},
            found.get("spent", {}),
        )


@dataclass(frozen=True, slots=True)
class Percentiles:
    """The 50th, 95th and 99th percentile of some times, in seconds."""

    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0


@dataclass(frozen=True, slots=True)
class Progress:
    """The report of one micro-batch.

    Parameters
    ----------
    batch_id : int
        The micro-batch's number.
    records : int
        New records of tracked spouts.
    acked, failed : int
        Executions that were ACKED or failed: of new records, retries and replays.
    uncounted : int
        Failed executions that used no attempt: those with `ackcore.topology.Unavailable`, and
        records behind an earlier one with their key (``ordered_by``), or behind the record that
        they may be a copy of (``dedup``). The log shows them as put off, and not as failed.
    retried, replayed : int
        Records that were executed again after a failure; dead letters that `replay` sent, all in
        the micro-batch that takes the request, even if some wait for later ones.
    dead : int
        Failed records that went to the dead letters.
    waiting : int
        Records that wait for a retry at the end of the micro-batch.
    oldest_s : float
        Seconds since the oldest waiting record was first seen; 0 if no record waits.
    latency_s : Percentiles
        Latency of the acked records: from the plan of their first micro-batch until the sinks had
        them. A replayed record counts from its first micro-batch, too, so a replay of old dead
        letters shows their age.
    duration_s, records_per_s : float
        Seconds from plan to mark, and executions per second of it; the rate is 0 if `runs` is 0.
    runs : int
        Number of runs; more than 1 if a run died, its results did not agree, or rows could not be
        read; 0 if an earlier driver has decided the micro-batch.
    steps_s : mapping from str to float
        Durations of the protocol's steps, in seconds; steps done before a restart are missing.
    breaker_trips : int
        Number of times that a circuit breaker opened, in all tasks of the accepted run.
    emitted : mapping from str to mapping from str to int
        Tuples that each component emitted to each of its streams that is read, in the accepted
        run. Calls that were repeated for parts of a batch count too.
    lag : mapping from str to int
        By spout that reads Kafka: the number of offsets from the committed one to the end of each
        partition, summed. Without a group it counts from the first offset that is not done. One
        record that waits for a retry holds the committed offset, although later records are done;
        ``waiting`` counts the waiting records.
    expectations : mapping from str to mapping from str to mapping from str to int
        By component, or ``component.stream``, and expectation: the emitted tuples that met it and
        those that did not, in the accepted run: ``{"orders": {"amount > 0": {"passed": 99,
        "failed": 1}}}``. A retried record is checked, and counts, at each execution.
    spent : mapping from str to mapping from str to float
        By bolt whose limit has ``cost_per_run``: the cost of the micro-batch's calls, those of
        lost runs included, by key: ``{"classify": {"tenant 1": 0.5}}``. The key is "" for a limit
        without ``per``. With more than 100 keys the others are together under "(other keys)".
        `Counts` has the total.
    tokens : mapping from str to mapping from str to float
        By bolt whose limit has ``tokens_per_min`` or ``cost_per_run``: the tokens that calls of the
        accepted run reported, by key, as in ``spent``.
    tables : mapping from str to mapping from str to int
        By table: ``rows``, which with a ttl may include rows that have expired, and ``bytes`` in
        the checkpoint.
    traces : tuple of RecordTrace
        Traces of the records that the setting ``trace_per_million`` chose: 200 at most, those of
        failed records first.
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
    oldest_s: float = 0.0
    latency_s: Percentiles = Percentiles()
    duration_s: float = 0.0
    records_per_s: float = 0.0
    runs: int = 0
    steps_s: Mapping[str, float] = field(default_factory=dict)
    breaker_trips: int = 0
    lag: Mapping[str, int] = field(default_factory=dict)
    emitted: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    expectations: Mapping[str, Mapping[str, Mapping[str, int]]] = field(default_factory=dict)
    spent: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    tokens: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    tables: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    traces: tuple[RecordTrace, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        replayed = f", {self.replayed} replayed" if self.replayed else ""
        p50, p95, p99 = (f"{1000 * each:.0f}" for each in astuple(self.latency_s))
        # If no record was ACKED there is no latency: 0 ms would look fast.
        took = f"latency p50/p95/p99 {p50}/{p95}/{p99} ms, " if self.acked else ""
        oldest = f" (oldest {self.oldest_s:.1f} s)" if self.waiting else ""
        put_off = f", {self.uncounted} put off (unavailable, or behind a record of their key)"
        put_off = put_off if self.uncounted else ""
        failed = self.failed - self.uncounted
        trips = f", {counted(self.breaker_trips, 'breaker trip')}" if self.breaker_trips else ""
        copies = f" ({counted(self.duplicates, 'duplicate')})" if self.duplicates else ""
        again = f", {self.runs} runs" if self.runs > 1 else ""
        unmet = sorted(self.unmet(), key=lambda one: -one[2])
        named = [f"{name!r} of {of} {n}" for of, name, n in unmet]
        more = [f"{len(named) - _NAMED} more"] if len(named) > _NAMED else []
        unexpected = f", unmet: {', '.join([*named[:_NAMED], *more])}" if named else ""
        cost = "".join(
            f", {bolt} {verb} {sum(keys.values()):g}{unit}"
            for verb, unit, some in (("spent", "", self.spent), ("used", " tokens", self.tokens))
            for bolt, keys in some.items()
        )
        lag = f", lag {sum(self.lag.values())}" if self.lag else ""
        return (
            f"micro-batch {self.batch_id}: {self.acked} acked{copies}, {failed} failed{put_off}, "
            f"{self.retried} retried{replayed}, {self.dead} dead, {self.waiting} waiting{oldest}, "
            f"{took}"
            f"{self.records_per_s:.0f} records/s, {self.duration_s:.2f} s"
            f"{lag}{trips}{again}{unexpected}{cost}"
        )

    @property
    def duplicates(self) -> int:
        """The number of acked records that were not run, as copies of ACKED ones."""
        return duplicates_in(self.emitted)

    def expected(self) -> Iterator[tuple[str, str, Mapping[str, int]]]:
        """Yield component, expectation and counts for each of `expectations`."""
        for component, some in self.expectations.items():
            for name, counts in some.items():
                yield component, name, counts

    def unmet(self) -> Iterator[tuple[str, str, int]]:
        """Yield component, expectation and number of tuples that did not meet it, if any."""
        for component, name, counts in self.expected():
            if counts["failed"]:
                yield component, name, counts["failed"]

    def to_json(self) -> dict[str, Any]:
        """Return the progress as an object for JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Progress:
        """Read the result of `to_json`; other entries of the mapping are ignored."""
        known = {each.name: found[each.name] for each in fields(cls) if each.name in found}
        known["latency_s"] = Percentiles(**found["latency_s"])
        known["traces"] = tuple(map(RecordTrace.of, found["traces"]))
        return cls(**known)

    def log(self) -> None:
        """Log one line about the micro-batch to the logger ``ackcore``."""
        _log.info("%s", self)


def percentiles(groups: Iterable[tuple[float, int]], values: npt.ArrayLike = ()) -> Percentiles:
    """Return the 50th, 95th and 99th percentile, by nearest rank; zeros without values.

    ``groups`` has pairs of a value and its frequency, so that a million equal values need no array.
    ``values`` are further values that occur once each.
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
    # Nearest rank: the least value with at least this percentage at or below it.
    wanted = [-(-total * percent // 100) for percent in (50, 95, 99)]
    places = np.searchsorted(ranks, wanted)
    return Percentiles(*found[order][places].tolist())


class Stopwatch:
    """Seconds by step; the times of a repeated step are added."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Add the time since the last call, or since the start, to step ``name``."""
        now = time.perf_counter()
        self.laps[name] = self.laps.get(name, 0.0) + now - self._last
        self._last = now

    def seconds(self) -> float:
        """Return the seconds since the stopwatch was made."""
        return max(time.perf_counter() - self._start, 1e-9)


def warn_of_failures(number: int, ran: RunResult) -> None:
    """Log how many tuples without a tracked record failed, and bolts with over 100 failed calls."""
    if ran.untracked_failures:
        _log.warning(
            "micro-batch %d: %s to no record of a tracked spout. Such tuples are lost: anchor what "
            "bolts emit, and track the spout, so that they are retried",
            number,
            counted(
                ran.untracked_failures, "tuple failed that belongs", "tuples failed that belong"
            ),
        )
    for name, calls in sorted(ran.raised.items()):
        if calls > MANY_CALLS:
            _log.warning(
                "micro-batch %d: process() of bolt %s raised in %d calls; a batch that raises is "
                "bisected to the failing rows. To avoid this, catch the error, and fail these "
                "rows with out.fail(rows, reasons)",
                number,
                name,
                calls,
            )


class UsageWarnings:
    """Warnings about bolts whose calls report no tokens or cost, or report them after the call.

    A limit without effect, because calls report nothing that it counts, is warned of once.
    """

    def __init__(self, topology: Topology) -> None:
        self._limits = {
            name: bolt.component.limit
            for name, bolt in topology.bolts.items()
            if isinstance(bolt.component, AsyncBolt) and bolt.component.limit is not None
        }
        self._told: set[tuple[str, str]] = set()

    def warn(self, number: int, ran: RunResult) -> None:
        """Log the warnings about a run."""
        for name, used in sorted(ran.used.items()):
            for part, reports in (
                ("tokens_per_min", used.with_tokens),
                ("cost_per_run", used.with_cost),
            ):
                if reports:
                    self._told.add((name, part))  # later calls may be free
            texts = unreported(self._limits[name], used, f"limit of bolt {name!r}")
            for part, text in texts.items():
                if (name, part) not in self._told:
                    self._told.add((name, part))
                    _log.warning("micro-batch %d: %s", number, text)
            if used.late:
                _log.warning(
                    "micro-batch %d: bolt %r reported its usage %s after the call had ended, "
                    "so these tokens and costs did not count; let execute() await or join the "
                    "tasks and threads that it starts",
                    number,
                    name,
                    counted(used.late, "time"),
                )


#: The most traces kept for one micro-batch; those of failures first.
_MOST = 200
ACKED = "ACKED"


def with_outcomes(
    traces: Sequence[tuple[int, RecordTrace]], failed: pa.Table
) -> tuple[RecordTrace, ...]:
    """Return traces with the outcomes of their records, failures first, 200 at most.

    ``traces`` has pairs of a root and its trace; ``failed`` all records that are not ACKED, of the
    schema `FAILED`.
    """
    if not traces:
        return ()
    # Keep only the traced ones of the failures, which may be a million.
    roots = pa.array([root for root, _ in traces], pa.int64())
    failed = failed.filter(pc.is_in(failed["root_id"], value_set=roots))
    reasons = dict(zip(failed["root_id"].to_pylist(), failed["reason"].to_pylist(), strict=True))
    acked, others = [], []
    for root, trace in traces:
        if root in reasons:
            reason = Reason.decode(reasons[root])
            outcome = f"failed in {reason.component} with {reason.type}: {reason.message}"
            others.append(trace._replace(outcome=outcome))
        else:
            acked.append(trace._replace(outcome=ACKED))
    return (*others, *acked)[:_MOST]
