"""The metrics of a query in a registry of prometheus-client."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

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


#: By registry, the listeners that it exports; the first one collects the metrics of all.
_EXPORTED: WeakKeyDictionary[CollectorRegistry, WeakValueDictionary[str, PrometheusListener]] = (
    WeakKeyDictionary()
)


class PrometheusListener(SnapshotListener):
    """A listener that exposes the metrics of a query in a registry of prometheus-client.

    Names have underscores for OpenTelemetry's dots, and Prometheus' suffixes:
    ``messaging_client_consumed_messages_total``, ``ackcore_latency_seconds``. They are made at each
    scrape from the latest values of the query. The listener starts no server for scrapes.

    Parameters
    ----------
    query : str, default ""
        The value of the label ``ackcore_query``, which distinguishes the queries of a process. Of
        listeners with equal values, the one whose query was started last is exported.
    registry : prometheus_client.CollectorRegistry, optional
        The registry; by default a new one.
    """

    @naming_arguments
    def __init__(self, query: str = "", registry: CollectorRegistry | None = None) -> None:
        #: The registry of the metrics.
        self.registry = CollectorRegistry() if registry is None else registry
        super().__init__(query, _EXPORTED.setdefault(self.registry, WeakValueDictionary()))
        self._buckets = [0] * (len(DURATION_BOUNDS) + 1)
        self._seconds = 0.0
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
        """Yield all metrics with their values; the registry calls it at each scrape.

        The first listener of a registry yields those of all its listeners, since a metric may
        occur once in a scrape. The others yield nothing. Listeners that were unregistered are left
        out.
        """
        listeners: list[PrometheusListener] = list(self._exported.values())
        # A private attribute of the registry: another release may have none.
        registered = getattr(self.registry, "_collector_to_names", listeners)
        listeners = [each for each in listeners if each in registered]
        if listeners[:1] != [self]:
            return
        for one in READINGS:
            found = [
                (each._query, told, value)
                for each in listeners
                for told, value in each._values(one)
            ]
            labels = sorted({label for _, told, _ in found for label in told})
            kind = CounterMetricFamily if one.kind == "counter" else GaugeMetricFamily
            name = one.name.replace(".", "_") + _UNITS.get(one.unit, "")
            family = kind(name, one.about, labels=[_label(one) for one in (QUERY, *labels)])
            for query, told, value in found:
                family.add_metric([query, *(told.get(label, "") for label in labels)], value)
            yield family
        labels = [_label(one) for one in (QUERY, SYSTEM, OPERATION)]
        name = DURATION.replace(".", "_") + "_seconds"
        durations = HistogramMetricFamily(name, DURATION_ABOUT, labels=labels)
        for each in listeners:
            with each._lock:
                buckets, seconds = list(each._buckets), each._seconds
            bounds = (*map(str, map(float, DURATION_BOUNDS)), "+Inf")
            counted = list(zip(bounds, accumulate(buckets), strict=True))
            durations.add_metric([each._query, "ackcore", "process"], counted, seconds)
        yield durations


def _label(attribute: str) -> str:
    return attribute.replace(".", "_")
