"""The metrics of a query, independent of the exporter: names, kinds, units and values.

Counters are those of `Counts`, since the checkpoint was made: they continue when a query is
started again. ``messaging.*`` are metrics and attributes of OpenTelemetry's semantic conventions
for messaging (1.38, in development there). Other names begin with ``ackcore.``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

_log = logging.getLogger("ackcore")

#: Attributes of one value, and the value.
Value = tuple[Mapping[str, str], float]

SYSTEM = "messaging.system"
DESTINATION = "messaging.destination.name"
OPERATION = "messaging.operation.name"
#: The name of the query, an argument of the listener.
QUERY = "ackcore.query"
#: The component and the name of an expectation, and ``passed`` or ``failed``.
COMPONENT = "ackcore.component"
EXPECTATION = "ackcore.expectation"
OUTCOME = "ackcore.outcome"

#: The duration of a micro-batch, and the bounds that the conventions advise.
DURATION = "messaging.process.duration"
DURATION_ABOUT = "Duration of a micro-batch, from its plan to its end."
DURATION_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)


@dataclass
class MetricsSnapshot:
    """The values that a `SnapshotListener` has received so far.

    ``progress``, ``counts``: the latest; None before. ``active``: False after the query has ended.
    ``trips`` (openings of breakers) to ``tokens`` (by bolt): sums over all micro-batches, also over
    several starts, so that counters never fall. ``expected`` counts tuples by component,
    expectation and outcome. ``start_s``: the start of the query; ``last_s``: the end of its last
    micro-batch; ``began_s``: the start of the running one. In seconds since 1970; 0 for none.
    """

    progress: Any = None
    counts: Any = None
    active: bool = True
    trips: int = 0
    uncounted: int = 0
    duplicates: int = 0
    expected: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    tokens: dict[str, float] = field(default_factory=dict)
    start_s: float = 0.0
    last_s: float = 0.0
    began_s: float = 0.0


class SnapshotListener:
    """A listener that keeps the latest values of a query, which subclasses export.

    ``query``: the name of the query. ``exported``: the listeners that a registry or a meter
    provider exports, by name: of those with equal names, the one whose query was started last.
    """

    def __init__(self, query: str, exported: MutableMapping[str, Any]) -> None:
        self._lock = threading.Lock()
        self._at = MetricsSnapshot()
        self._query, self._exported = query, exported
        exported.setdefault(query, self)

    def on_start(self, counts: Any) -> None:
        """Store the counts and the time of the query's start; export this listener from now on.

        Logs a warning if a running query has a listener of this name, another one or this one.
        """
        former = self._exported.get(self._query, self)._at
        if former.active and former.start_s:
            _log.warning(
                "two running queries have metrics listeners named %r, so that their metrics are "
                "mixed or only those of the last one are exported; give each query a listener with "
                "a name of its own",
                self._query,
            )
        self._exported[self._query] = self
        with self._lock:
            at = self._at
            at.counts, at.active, at.start_s = counts, True, time.time()
            at.last_s = at.began_s = 0.0

    def on_batch_start(self, batch_id: int) -> None:
        """Store the time at which a micro-batch begins."""
        with self._lock:
            self._at.began_s = time.time()

    def on_progress(self, progress: Any, counts: Any) -> None:
        """Store the progress and the counts of a finished micro-batch, and add to the sums."""
        with self._lock:
            at = self._at
            at.progress, at.counts = progress, counts
            at.trips += progress.breaker_trips
            at.uncounted += progress.uncounted
            at.duplicates += progress.duplicates
            for component, name, checked in progress.expected():
                for outcome, tuples in checked.items():
                    at.expected[component, name, outcome] += tuples
            for bolt, keys in progress.tokens.items():
                at.tokens[bolt] = at.tokens.get(bolt, 0.0) + sum(keys.values())
            at.last_s, at.began_s = time.time(), 0.0

    def on_end(self, error: BaseException | None, counts: Any) -> None:
        """Store that the query has ended, and its final counts."""
        with self._lock:
            self._at.active, self._at.counts, self._at.began_s = False, counts, 0.0

    def _values(self, reading: Reading) -> list[Value]:
        with self._lock:
            return [*reading.values(self._at)]


class Reading(NamedTuple):
    """A metric: its name, kind, unit and description for OpenTelemetry.

    ``values``: returns the value for each set of attributes, from a `MetricsSnapshot`; none before
    the query has one.
    """

    name: str
    kind: Literal["counter", "gauge"]
    unit: str
    about: str
    values: Callable[[MetricsSnapshot], Iterable[Value]]


def _by_spout(
    name: str, operation: str | None = None
) -> Callable[[MetricsSnapshot], Iterable[Value]]:
    def values(at: MetricsSnapshot) -> Iterable[Value]:
        for spout, account in at.counts.spouts.items() if at.counts is not None else ():
            told = {SYSTEM: "ackcore", DESTINATION: spout}
            if operation is not None:
                told[OPERATION] = operation
            yield told, getattr(account, name)

    return values


def _of_progress(value: Callable[[Any], float]) -> Callable[[MetricsSnapshot], Iterable[Value]]:
    return lambda at: [] if at.progress is None else [({}, value(at.progress))]


def _latency(at: MetricsSnapshot) -> Iterable[Value]:
    if at.progress is not None and at.progress.acked:
        latency = at.progress.latency_s
        for quantile, seconds in (
            ("0.5", latency.p50),
            ("0.95", latency.p95),
            ("0.99", latency.p99),
        ):
            yield {"quantile": quantile}, seconds


def _lag(at: MetricsSnapshot) -> Iterable[Value]:
    if at.progress is not None:
        for spout, lag in at.progress.lag.items():
            yield {SYSTEM: "kafka", DESTINATION: spout}, lag


def _spent(at: MetricsSnapshot) -> Iterable[Value]:
    for bolt, cost in at.counts.spent.items() if at.counts is not None else ():
        yield {COMPONENT: bolt}, cost


def _of_tables(what: str) -> Callable[[MetricsSnapshot], Iterable[Value]]:
    def values(at: MetricsSnapshot) -> Iterable[Value]:
        for name, size in at.progress.tables.items() if at.progress is not None else ():
            yield {"ackcore.table": name}, size[what]

    return values


#: All metrics except the durations, which are a histogram.
READINGS: tuple[Reading, ...] = (
    Reading(
        "messaging.client.consumed.messages",
        "counter",
        "{message}",
        "Records read from a spout's source.",
        _by_spout("records", "receive"),
    ),
    Reading("ackcore.acked", "counter", "{record}", "Records ACKED.", _by_spout("acked")),
    Reading("ackcore.dead", "counter", "{record}", "Records that died.", _by_spout("dead")),
    Reading(
        "ackcore.retried",
        "counter",
        "{execution}",
        "Executions beyond each record's first.",
        _by_spout("retried"),
    ),
    Reading(
        "ackcore.replayed", "counter", "{record}", "Dead letters sent again.", _by_spout("replayed")
    ),
    Reading(
        "ackcore.waiting", "gauge", "{record}", "Records waiting for a retry.", _by_spout("waiting")
    ),
    Reading(
        "ackcore.waiting.oldest_age",
        "gauge",
        "s",
        "Age of the oldest record that waits for a retry.",
        _of_progress(lambda progress: progress.oldest_s),
    ),
    Reading(
        "ackcore.latency",
        "gauge",
        "s",
        "Time from reading a record to its ack, in the last micro-batch.",
        _latency,
    ),
    Reading(
        "ackcore.lag",
        "gauge",
        "{message}",
        "Offsets from the first one that is not done to the end of each partition, summed.",
        _lag,
    ),
    Reading("ackcore.spent", "counter", "1", "Cost of a bolt's calls, as reported.", _spent),
    Reading(
        "ackcore.tokens",
        "counter",
        "1",
        "Tokens that a bolt's calls used, as reported, since the listener was made.",
        lambda at: [({COMPONENT: bolt}, tokens) for bolt, tokens in at.tokens.items()],
    ),
    Reading("ackcore.table.rows", "gauge", "{row}", "Rows of a table.", _of_tables("rows")),
    Reading("ackcore.table.size", "gauge", "By", "Bytes of a table.", _of_tables("bytes")),
    Reading(
        "ackcore.batches",
        "counter",
        "{batch}",
        "Micro-batches done.",
        lambda at: [] if at.counts is None else [({}, at.counts.batches)],
    ),
    Reading(
        "ackcore.batch.runs",
        "gauge",
        "{run}",
        "Runs of the last micro-batch; more than 1 if a run crashed.",
        _of_progress(lambda progress: progress.runs),
    ),
    Reading(
        "ackcore.breaker.trips",
        "counter",
        "{trip}",
        "Openings of circuit breakers, since the listener was made.",
        lambda at: [({}, at.trips)],
    ),
    Reading(
        "ackcore.uncounted",
        "counter",
        "{execution}",
        "Failures that did not count as attempts, since the listener was made.",
        lambda at: [({}, at.uncounted)],
    ),
    Reading(
        "ackcore.duplicates",
        "counter",
        "{record}",
        "Copies of ACKED records, acked without being run, since the listener was made.",
        lambda at: [({}, at.duplicates)],
    ),
    Reading(
        "ackcore.expectation.checks",
        "counter",
        "{tuple}",
        "Tuples that met an expectation (passed) or not (failed), since the listener was made.",
        lambda at: [
            ({COMPONENT: component, EXPECTATION: name, OUTCOME: outcome}, tuples)
            for (component, name, outcome), tuples in at.expected.items()
        ],
    ),
    Reading(
        "ackcore.start_time",
        "gauge",
        "s",
        "Time of the query's start, in seconds since 1970.",
        lambda at: [({}, at.start_s)] if at.start_s else [],
    ),
    Reading(
        "ackcore.batch.end_time",
        "gauge",
        "s",
        "Time at which the last micro-batch since the start was done, in seconds since 1970.",
        lambda at: [({}, at.last_s)] if at.last_s else [],
    ),
    Reading(
        "ackcore.batch.start_time",
        "gauge",
        "s",
        "Time at which the running micro-batch began, in seconds since 1970.",
        lambda at: [({}, at.began_s)] if at.began_s else [],
    ),
    Reading(
        "ackcore.active",
        "gauge",
        "1",
        "1 while the query runs, 0 when it has ended.",
        lambda at: [({}, float(at.active))],
    ),
)
