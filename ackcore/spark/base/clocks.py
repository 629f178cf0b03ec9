"""Clocks: milliseconds since 1970, the machine's or the user's, and one that does not go back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np

Clock = Callable[[], int]


def wall_clock_ms() -> int:
    """Milliseconds since 1970, as the machine's clock has them."""
    return time.time_ns() // 1_000_000


def read_clock(clock: Clock) -> int:
    """Return what a clock of the user's says, which must be whole milliseconds."""
    now = clock()
    if not isinstance(now, int | np.integer):
        raise TypeError(
            f"clock must return milliseconds since 1970 as an int, got {now!r}; "
            "time.time_ns() // 1_000_000 is such a number"
        )
    return int(now)


class SteadyClock:
    """A clock that goes on from where it was when the one beneath it goes back.

    Parameters
    ----------
    clock : callable
        Returns milliseconds; may go back, or stand still.
    at_least : int, default 0
        What it shows at least: a time that is on record already.
    """

    def __init__(self, clock: Clock, at_least: int = 0) -> None:
        self._clock = clock
        self._last = at_least
        self._ahead = 0
        self._lock = threading.Lock()

    def __call__(self) -> int:
        """Return milliseconds, never fewer than before."""
        with self._lock:
            now = read_clock(self._clock) + self._ahead
            if now < self._last:
                # The difference stays: else whatever is due would wait until the clock has
                # caught up, an hour when it was set back by an hour.
                self._ahead += self._last - now
                now = self._last
            self._last = now
            return now
