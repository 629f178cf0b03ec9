"""Listeners that expose the metrics of a query to Prometheus or OpenTelemetry.

`PrometheusListener` needs ``ackcore[metrics]``, `OpenTelemetryListener` needs opentelemetry-api;
``ackcore[otlp]`` has its SDK and exporter. Both have the metrics of `ackcore.metrics.readings`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ackcore.metrics.otel import OpenTelemetryListener
    from ackcore.metrics.prometheus import PrometheusListener

__all__ = ["OpenTelemetryListener", "PrometheusListener"]

_MODULES = {"PrometheusListener": "prometheus", "OpenTelemetryListener": "otel"}


def __getattr__(name: str) -> Any:
    # Imported on demand, because each listener needs its own extra.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415

    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
