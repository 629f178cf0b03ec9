"""The metrics of a query in a registry of prometheus-client."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from ackcore._error_hints import naming_arguments
from ackcore.metrics.readings import (
    DURATION,
    DURATION_ABOUT,
    DURATION_BOUNDS,
    OPERATION,
    QUERY,
    READINGS,
    SYSTEM,
    SnapshotListener,
)

_UNITS = {"s": "_seconds", "By": "_bytes"}


class PrometheusListener(SnapshotListener):
    """A listener that exposes the metrics of a query in a registry of prometheus-client.

    Names have underscores for OpenTelemetry's dots, and Prometheus' suffixes:
    ``messaging_client_consumed_messages_total``, ``ackcore_latency_seconds``. They are made at each
    scrape from the latest values of the query. The listener starts no server for scrapes.

    Parameters
    ----------
    query : str, default ""
        The value of the label ``ackcore_query``, which distinguishes the queries of a process.
    registry : prometheus_client.CollectorRegistry, optional
        The registry; by default a new one.
    """

    @naming_arguments
    def __init__(self, query: str = "", registry: CollectorRegistry | None = None) -> None:
        super().__init__()
        self._query = query
        self._buckets = [0] * (len(DURATION_BOUNDS) + 1)
        self._seconds = 0.0
        #: The registry of the metrics.
        self.registry = CollectorRegistry() if registry is None else registry
        self.registry.register(self)

    def on_progress(self, progress: Any, counts: Any) -> None:
        """Store a finished micro-batch, and count its duration in the histogram."""
        super().on_progress(progress, counts)
        seconds = progress.duration_s
        with self._lock:
            self._buckets[bisect_left(DURATION_BOUNDS, seconds)] += 1
            self._seconds += seconds

    def describe(self) -> list[Metric]:
        """Return nothing: the registry then does not call `collect` at the registration."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics with their values; the registry calls it at each scrape."""
        with self._lock:
            found = [(one, [*one.values(self._at)]) for one in READINGS]
            buckets, seconds = list(self._buckets), self._seconds
        for one, values in found:
            name = one.name.replace(".", "_") + _UNITS.get(one.unit, "")
            labels = sorted({label for told, _ in values for label in told})
            kind = CounterMetricFamily if one.kind == "counter" else GaugeMetricFamily
            family = kind(name, one.about, labels=[_label(one) for one in (QUERY, *labels)])
            for told, value in values:
                family.add_metric([self._query, *(told.get(label, "") for label in labels)], value)
            yield family
        labels = [_label(one) for one in (QUERY, SYSTEM, OPERATION)]
        name = DURATION.replace(".", "_") + "_seconds"
        durations = HistogramMetricFamily(name, DURATION_ABOUT, labels=labels)
        so_far, counted = 0, []
        for bound, count in zip((*map(float, DURATION_BOUNDS), "+Inf"), buckets, strict=True):
            so_far += count
            counted.append((str(bound), so_far))
        durations.add_metric([self._query, "ackcore", "process"], counted, seconds)
        yield durations


def _label(attribute: str) -> str:
    return attribute.replace(".", "_")
