"""Conversion of a bolt's call options to `ackcore.calls.CallSettings`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from ackcore._columns import as_count
from ackcore.calls import CallSettings
from ackcore.calls.settings import MAX_THREADS
from ackcore.flow.numbers import positive
from ackcore.topology.components import AsyncBolt, BasicBolt, Bolt, Component
from ackcore.topology.exception_classes import exception_classes

_NAMES = (
    "max_concurrency",
    "timeout_s",
    "endpoints",
    "chooser",
    "wait_in_task_s",
    "breaker_failures",
    "breaker_reset_s",
)


def call_settings(
    bolt: Component, tasks: int = 1, reject: Iterable[type[Exception] | str] = ()
) -> CallSettings | None:
    """Return the settings of a bolt's calls in one task; None for a bolt with one call at a time.

    Parameters
    ----------
    bolt : Component
        The bolt.
    tasks : int, default 1
        The number of tasks that share the bolt's rate.
    reject : iterable of exception class or str
        The exceptions that are final, in addition to the bolt's own `reject`.

    Raises
    ------
    TypeError, ValueError
        If an option has another type or is out of range.
    """
    if isinstance(bolt, Bolt | BasicBolt):
        threads = as_count(bolt.threads, "threads", 1, MAX_THREADS)
        if threads == 1:
            return None
        # Threads treat all exceptions alike: waiting and retrying happen elsewhere.
        return CallSettings(max_concurrency=threads, breaker_failures=None, wait_in_task_s=0)
    if not isinstance(bolt, AsyncBolt):
        return None
    given = {name: _plain(bolt, name) for name in _NAMES}
    if bolt.rate_per_s is not None:
        given["rate_per_s"] = positive(bolt.rate_per_s, "rate_per_s", 1e9) / tasks
    return CallSettings(
        retry_on=exception_classes(bolt.retry_on or (), "retry_on"),
        reject=exception_classes((*reject, *bolt.reject), "reject"),
        **given,
    )


def _plain(bolt: AsyncBolt, name: str) -> Any:
    """Return an attribute of a bolt; a function without parameters, such as a lambda, unbound."""
    value = getattr(bolt, name)
    if inspect.ismethod(value) and not inspect.signature(value.__func__).parameters:
        return value.__func__
    return value
