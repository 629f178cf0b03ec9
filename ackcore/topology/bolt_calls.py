"""How the methods of a bolt are called, whichever shape it has, and what their failures become."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

import numpy as np

from ackcore.topology.components import BasicBolt, Bolt
from ackcore.topology.tuples import Failure, Reason

log = logging.getLogger("ackcore")

#: What a call returns that has not run yet.
_NOT_RUN = (GeneratorType, CoroutineType, AsyncGeneratorType)


def refuse_returned(result: object, emit: str) -> None:
    """Raise `TypeError` for what a method returns: its inputs would be acked, and it be lost.

    A generator or a coroutine has not even run.  ``emit`` is what to call instead.
    """
    if isinstance(result, _NOT_RUN):
        raise TypeError(
            f"a bolt's methods must do their work and return None, got {type(result).__name__}, "
            "which has not run; emit what it yields"
        )
    if result is not None:
        raise TypeError(
            f"a bolt's methods must return None, got {type(result).__name__}; emit it by {emit}"
        )


def failures_of(failures: Mapping[int, Reason]) -> list[Failure]:
    """Return failures by handle as columns."""
    if not failures:
        return []
    return [Failure(np.array(list(failures), np.int64), list(failures.values()))]


def overrides_flush(component: object, base: type) -> bool:
    """Whether a bolt has a flush of its own."""
    return type(component).flush is not base.flush or "flush" in vars(component)  # type: ignore[attr-defined]


def cleaned_up(component: Bolt | BasicBolt | Any, name: str) -> None:
    """Call a bolt's cleanup; what it raises is logged, for no record hangs from it any more."""
    try:
        component.cleanup()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        log.warning("%s: cleanup raised %s: %s", *Reason.of(name, error)[:3], exc_info=True)
