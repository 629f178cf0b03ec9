"""The metrics of a query in an OpenTelemetry meter."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation, get_meter_provider

from ackcore._error_hints import naming_arguments
from ackcore.metrics.readings import (
    DURATION,
    DURATION_ABOUT,
    DURATION_BOUNDS,
    OPERATION,
    QUERY,
    READINGS,
    SYSTEM,
    Reading,
    SnapshotListener,
)


class OpenTelemetryListener(SnapshotListener):
    """A listener that exposes the metrics of a query in an OpenTelemetry meter.

    The meter provider decides what is exported, how often and to where. With ``ackcore[otlp]`` a
    ``PeriodicExportingMetricReader(OTLPMetricExporter(...))`` sends the metrics to a collector.

    Parameters
    ----------
    query : str, default ""
        The value of the attribute ``ackcore.query``.
    meter_provider : opentelemetry.metrics.MeterProvider, optional
        The provider of the meter; by default the global one.
    """

    @naming_arguments
    def __init__(self, query: str = "", meter_provider: MeterProvider | None = None) -> None:
        super().__init__()
        self._told = {QUERY: query}
        provider = get_meter_provider() if meter_provider is None else meter_provider
        meter = provider.get_meter("ackcore")
        for one in READINGS:
            kind = one.kind == "counter"
            make = meter.create_observable_counter if kind else meter.create_observable_gauge
            make(one.name, callbacks=[self._observing(one)], unit=one.unit, description=one.about)
        self._durations = meter.create_histogram(
            DURATION,
            unit="s",
            description=DURATION_ABOUT,
            explicit_bucket_boundaries_advisory=list(DURATION_BOUNDS),
        )

    def _observing(self, one: Reading) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(options: CallbackOptions) -> Iterable[Observation]:
            with self._lock:
                values = [*one.values(self._at)]
            return [Observation(value, {**self._told, **told}) for told, value in values]

        return observe

    def on_progress(self, progress: Any, counts: Any) -> None:
        """Store a finished micro-batch, and record its duration."""
        super().on_progress(progress, counts)
        about = {**self._told, SYSTEM: "ackcore", OPERATION: "process"}
        self._durations.record(progress.duration_s, about)
