"""Calls of a bolt's methods, for all shapes of bolts, and the reasons of their failures."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import AsyncGeneratorType, CoroutineType, GeneratorType

import numpy as np

from ackcore.topology.components import AsyncBolt, BasicBolt, Component
from ackcore.topology.tuples import Failure, Reason

log = logging.getLogger("ackcore")

#: Types of returned objects that have not run yet.
NOT_RUN = (GeneratorType, CoroutineType, AsyncGeneratorType)


def refuse_returned(result: object, emit: str) -> None:
    """Raise `TypeError` if a method returned a value, which would be lost while its inputs are
    acked.

    A returned generator or coroutine has not even run. ``emit`` is the call that the error
    suggests.
    """
    if isinstance(result, NOT_RUN):
        raise TypeError(
            f"a bolt's methods must do their work and return None, got {type(result).__name__}, "
            "which has not run; emit what it yields"
        )
    if result is not None:
        raise TypeError(
            f"a bolt's methods must return None, got {type(result).__name__}; emit it by {emit}"
        )


def failures_of(failures: Mapping[int, Reason]) -> list[Failure]:
    """Convert failures by handle to columns."""
    if not failures:
        return []
    reasons = list(failures.values())
    if all(reason is reasons[0] for reason in reasons):
        # Rows that fail in columns share one reason, which is then encoded once.
        reasons = reasons[:1]
    return [Failure(np.array(list(failures), np.int64), reasons)]


def overrides_flush(component: object, base: type) -> bool:
    """Return whether a bolt defines ``flush``."""
    return type(component).flush is not base.flush or "flush" in vars(component)  # type: ignore[attr-defined]


def journaled(component: Component) -> BasicBolt | AsyncBolt:
    """Return a bolt that has ``journal = True``, if its shape allows a journal.

    Raises
    ------
    TypeError
        If its shape does not, or ``journal`` is not a bool.
    """
    made = type(component).__name__
    if not isinstance(component.journal, bool):
        raise TypeError(
            f"{made}.journal must be True or False, got {type(component.journal).__name__} "
            f"{component.journal!r}"
        )
    if isinstance(component, AsyncBolt):
        return component
    if not isinstance(component, BasicBolt):
        raise TypeError(
            f"{made}.journal must be False, got True for what is neither an AsyncBolt nor a "
            "BasicBolt: only where each input is a call of its own is it known what the call came "
            "to; write one of these, or leave journal out"
        )
    if overrides_flush(component, BasicBolt):
        raise TypeError(
            f"{made}.journal must be False, got True for a bolt with a flush: execute is not "
            "called with an input whose answer is known, so there is nothing of it to flush; emit "
            "in execute, or leave journal out"
        )
    return component


def cleaned_up(cleanup: Callable[[], object], name: str) -> None:
    """Call a bolt's ``cleanup`` and log an exception, because no record depends on it any more."""
    try:
        cleanup()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        log.warning("%s: cleanup raised %s: %s", *Reason.of(name, error)[:3], exc_info=True)
