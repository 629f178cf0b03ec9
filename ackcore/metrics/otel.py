"""The metrics of a query in an OpenTelemetry meter."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

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

#: By provider, the listeners that its instruments observe.
_EXPORTED: WeakKeyDictionary[MeterProvider, dict[str, OpenTelemetryListener]] = WeakKeyDictionary()
#: The listeners of the global provider, made before and after `set_meter_provider`.
_GLOBAL: dict[str, OpenTelemetryListener] = {}


class OpenTelemetryListener(SnapshotListener):
    """A listener that exposes the metrics of a query in an OpenTelemetry meter.

    The meter provider decides what is exported, how often and to where. With ``ackcore[otlp]`` a
    ``PeriodicExportingMetricReader(OTLPMetricExporter(...))`` sends the metrics to a collector.

    Parameters
    ----------
    query : str, default ""
        The value of the attribute ``ackcore.query``, which distinguishes the queries of a process.
        Of listeners with equal values, the one whose query was started last is exported. The values
        of an ended query are exported until another query of that name starts, so reuse names.
    meter_provider : opentelemetry.metrics.MeterProvider, optional
        The provider of the meter; by default the global one.
    """

    @naming_arguments
    def __init__(self, query: str = "", meter_provider: MeterProvider | None = None) -> None:
        provider = get_meter_provider() if meter_provider is None else meter_provider
        is_global = provider is get_meter_provider()
        exported = _EXPORTED.setdefault(provider, _GLOBAL if is_global else {})
        is_first = not exported
        super().__init__(query, exported)
        self._told = {QUERY: query}
        meter = provider.get_meter("ackcore")
        # A meter ignores the callbacks of a second instrument with the same name.
        for one in READINGS if is_first else ():
            kind = one.kind == "counter"
            make = meter.create_observable_counter if kind else meter.create_observable_gauge
            observe = partial(_observed, one, exported)
            make(one.name, callbacks=[observe], unit=one.unit, description=one.about)
        self._durations = meter.create_histogram(
            DURATION,
            unit="s",
            description=DURATION_ABOUT,
            explicit_bucket_boundaries_advisory=list(DURATION_BOUNDS),
        )

    def on_progress(self, progress: Any, counts: Any) -> None:
        """Store a finished micro-batch, and record its duration."""
        super().on_progress(progress, counts)
        about = {**self._told, SYSTEM: "ackcore", OPERATION: "process"}
        self._durations.record(progress.duration_s, about)


def _observed(
    one: Reading, exported: Mapping[str, OpenTelemetryListener], options: CallbackOptions
) -> list[Observation]:
    return [
        Observation(value, {**each._told, **told})
        for each in list(exported.values())
        for told, value in each._values(one)
    ]
