"""Waiting until planned rows can be read: an outage of their source is no crash of a run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ackcore.retry import capped_doubling
from ackcore.spark.checkpoint.decisions import Plan
from ackcore.spark.engine.types import Obstacle

_log = logging.getLogger("ackcore")

#: The first pause between two checks, the longest, and the seconds between two warnings.
_PAUSE_MS, _LONGEST_PAUSE_MS, _SAY_S = 500, 5_000, 60.0


class RowsMissing(Exception):
    """The rows that a micro-batch waits for did not arrive in time."""


class Outage:
    """A time in which the planned rows of a micro-batch cannot be read.

    Parameters
    ----------
    ask : callable
        Returns the obstacle to reading the rows of a plan, or None.
    pause : callable
        Waits for a number of seconds; returns whether to stop.
    clock : callable, optional
        Returns seconds.
    """

    def __init__(
        self,
        ask: Callable[[Plan], Obstacle | None],
        pause: Callable[[float], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._ask = ask
        self._pause = pause
        self._runs = 0
        self._said_at: float | None = None
        #: The time since when rows with a time-out are missing.
        self._missing_since: float | None = None

    def wait(self, plan: Plan, said: str) -> bool:
        """Wait until a run may read the planned rows; return True if the query is to stop.

        Parameters
        ----------
        plan : Plan
            The plan of the micro-batch.
        said : str
            The error of the failed run: the rows that it could not read.

        Raises
        ------
        RowsMissing
            If the rows are missing for longer than the obstacle's time-out.
        """
        self._runs += 1
        asked = 0
        while True:
            obstacle = self._ask(plan)
            self._look_at(plan.number, obstacle, said)
            asked += 1
            # Tasks may not reach rows that the driver can read: always pause.
            waits = capped_doubling(_PAUSE_MS, asked if obstacle else self._runs, _LONGEST_PAUSE_MS)
            if self._pause(waits / 1000):
                return True
            if obstacle is None:
                return False

    def _look_at(self, number: int, obstacle: Obstacle | None, said: str) -> None:
        now = self._clock()
        text = said if obstacle is None else obstacle.text
        limit = None if obstacle is None else obstacle.timeout_s
        if limit is None:
            self._missing_since = None
        elif self._missing_since is None:
            self._missing_since = now
        elif now - self._missing_since > limit:
            raise RowsMissing(f"{text}, for {limit:g} s")
        if self._said_at is None or now - self._said_at >= _SAY_S:
            self._said_at = now
            ends = "" if limit is None else f"; the query ends if that lasts {limit:g} s"
            _log.warning(
                "micro-batch %d cannot be read, and is run when it can: %s%s",
                number,
                text,
                ends,
            )
