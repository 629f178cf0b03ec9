"""Clocks in milliseconds since 1970: the machine's, the user's, and one that never goes back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np

Clock = Callable[[], int]


def wall_clock_ms() -> int:
    """Return the machine's time in milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def read_clock(clock: Clock) -> int:
    """Return the time of a user's clock; raise TypeError unless it is an int (5.0 is refused)."""
    now = clock()
    if not isinstance(now, int | np.integer):
        raise TypeError(
            f"clock must return milliseconds since 1970 as an int, got {now!r}; "
            "for example time.time_ns() // 1_000_000"
        )
    return int(now)


class SteadyClock:
    """A clock that never goes back, even if the underlying clock does.

    If the underlying clock goes back, or starts below ``at_least``, the difference is added to its
    times from then on. ``clock``: returns milliseconds. ``at_least``: the lowest time to return.
    """

    def __init__(self, clock: Clock, at_least: int = 0) -> None:
        self._clock = clock
        self._last = at_least
        self._ahead = 0
        self._lock = threading.Lock()

    def __call__(self) -> int:
        """Return milliseconds, never less than before; TypeError if the clock returns no int."""
        with self._lock:
            now = read_clock(self._clock) + self._ahead
            if now < self._last:
                # The difference is kept.  Otherwise, if the clock is set back by an hour, due
                # records would wait for an hour.
                self._ahead += self._last - now
                now = self._last
            self._last = now
            return now
