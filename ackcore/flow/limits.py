"""The number of tuples a consumer may have outstanding: laws that adapt to the round trips of acks.

A limit belongs to one consumer. It receives a sample for each answered tuple, and provides the
number that may be outstanding. All times are nanoseconds; each sample takes constant time and no
memory. The default, `DelayTarget`, has a module of its own.

==============  =======================================================  =======================
law             follows                                                  origin
==============  =======================================================  =======================
`DelayTarget`   service time: the tuples served within a target delay    BBR, CoDel
`RttThreshold`  round trip against a threshold, one step up or down      TCP's, without slow start
`Fixed`         nothing
==============  =======================================================  =======================
"""

from __future__ import annotations

import enum
from typing import Any, Protocol, runtime_checkable

from ackcore._columns import as_count
from ackcore.flow.numbers import nanoseconds, positive

#: Without this bound, a consumer that answers at once would get a whole stream.
MAX_LIMIT = 1_000_000


def limit_bounds(initial: Any, max_limit: Any) -> tuple[int, int]:
    """Return the first limit of a law and its largest, checked.

    Raises
    ------
    TypeError
        If one is not an integer.
    ValueError
        If one is out of range, or the first is larger than the largest.
    """
    most = as_count(max_limit, "max_limit", 1, MAX_LIMIT)
    return as_count(initial, "initial", 1, most), most


class Pressure(enum.Enum):
    """The load level of a consumer."""

    NORMAL = "normal"  # answers within the threshold
    SLOW = "slow"  # answers later, or has been silent for too long
    BUSY = "busy"  # the last tuple failed or timed out


@runtime_checkable
class Limit(Protocol):
    """The number of tuples that one consumer may have outstanding. One thread at a time uses it."""

    @property
    def limit(self) -> int:
        """The largest number of outstanding tuples, at least 1."""

    def on_sample(self, rtt_ns: int, in_flight: int, dropped: bool) -> None:
        """Adapt to a tuple that was answered.

        Parameters
        ----------
        rtt_ns : int
            Nanoseconds since it was sent.
        in_flight : int
            The number of tuples outstanding at this consumer just before, including this one.
        dropped : bool
            Whether it failed or timed out.
        """


class RttThreshold:
    """A window that grows while round trips are within a threshold, and shrinks beyond it.

    An ack within the threshold is NORMAL and adds ``step / window``. A later one is SLOW and
    subtracts as much. So the window changes linearly, by one step for each window of acks. A
    failure or time-out is BUSY and subtracts 1 at once (and the tuple goes to another consumer).
    There is no slow start: it would end in SLOW, and a larger window does not make a consumer
    faster.

    The window grows until round trips reach the threshold, which is the latency under load.

    Parameters
    ----------
    threshold_s : float, default 0.05
        The longest round trip of a NORMAL consumer, in seconds.
    step : float, default 1.0
        The number of tuples by which a window of acks changes the window.
    initial : int, default 4
        The window before the first sample.
    max_limit : int, default 1000
        The largest window.

    Attributes
    ----------
    pressure : Pressure
        NORMAL, SLOW or BUSY, after the last sample.

    Notes
    -----
    TCP's congestion avoidance without slow start, as in "An adaptive dynamic flow control for
    Storm" (Storm的自适应动态流控制算法), after RFC 2001.
    """

    __slots__ = ("_max_limit", "_step", "_window", "limit", "pressure", "threshold_ns")

    def __init__(
        self,
        threshold_s: float = 0.05,
        *,
        step: float = 1.0,
        initial: int = 4,
        max_limit: int = 1000,
    ) -> None:
        self.threshold_ns = nanoseconds(threshold_s, "threshold_s")
        self._step = positive(step, "step", MAX_LIMIT, "tuples")
        #: The number of tuples that may be outstanding.
        self.limit, self._max_limit = limit_bounds(initial, max_limit)
        self._window = float(self.limit)
        self.pressure = Pressure.NORMAL

    def on_sample(self, rtt_ns: int, in_flight: int, dropped: bool) -> None:
        """Add a sample, see `Limit.on_sample`."""
        if dropped:
            self.pressure = Pressure.BUSY
            window = self._window - 1
        elif rtt_ns <= self.threshold_ns:
            self.pressure = Pressure.NORMAL
            window = self._window + self._step / self._window
        else:
            self.pressure = Pressure.SLOW
            window = self._window - self._step / self._window
        self._window = min(max(window, 1.0), float(self._max_limit))
        self.limit = int(self._window)


class Fixed:
    """A constant window.

    Parameters
    ----------
    limit : int
        The number of tuples that may be outstanding.
    """

    __slots__ = ("limit",)

    def __init__(self, limit: int) -> None:
        #: The number of tuples that may be outstanding.
        self.limit = as_count(limit, "limit", 1, MAX_LIMIT)

    def on_sample(self, rtt_ns: int, in_flight: int, dropped: bool) -> None:
        """Do nothing."""
