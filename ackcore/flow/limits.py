"""How many tuples a consumer may have outstanding: laws that follow the round-trip times of acks.

A limit belongs to one consumer. It is given a sample for each tuple that comes back, and says how
many may be out. All times are nanoseconds; each sample takes constant time and no memory. The
default, `DelayTarget`, has a module of its own.

==============  =======================================================  =======================
law             follows                                                  where it is from
==============  =======================================================  =======================
`DelayTarget`   service time: what is served within a target delay        BBR, CoDel
`RttThreshold`  round trip against a threshold, one step up or down      TCP's, without slow start
`Fixed`         nothing
==============  =======================================================  =======================
"""

from __future__ import annotations

import enum
from typing import Any, Protocol, runtime_checkable

from ackcore._columns import as_count
from ackcore.flow.numbers import milliseconds, positive

#: A limit that nothing bounds would put a whole stream before a consumer that answers at once.
MAX_LIMIT = 1_000_000


def limit_bounds(initial: Any, max_limit: Any) -> tuple[int, int]:
    """Return the first limit of a law and its largest, if they are in that order.

    Raises
    ------
    TypeError
        If one is no whole number.
    ValueError
        If one is out of range.
    """
    most = as_count(max_limit, "max_limit", 1, MAX_LIMIT)
    return as_count(initial, "initial", 1, most), most


class Pressure(enum.Enum):
    """How a consumer keeps up."""

    NORMAL = "normal"  # answers within the threshold
    SLOW = "slow"  # answers, but later, or has been silent for longer than it should
    BUSY = "busy"  # what came back last had failed or timed out


@runtime_checkable
class Limit(Protocol):
    """How many tuples one consumer may have outstanding.  Used by one thread at a time."""

    @property
    def limit(self) -> int:
        """Tuples that may be outstanding, at least 1."""

    def on_sample(self, rtt_ns: int, in_flight: int, dropped: bool) -> None:
        """Take in that a tuple came back.

        Parameters
        ----------
        rtt_ns : int
            Nanoseconds since it was sent.
        in_flight : int
            Tuples that were outstanding at this consumer just before, itself included.
        dropped : bool
            It failed or timed out.
        """


class RttThreshold:
    """A window that grows while round trips are within a threshold, and shrinks beyond it.

    An ack within the threshold is NORMAL and adds ``step / window``, a later one is SLOW and takes
    as much off: linear in time, a step for each window of acks. A failure or time-out is BUSY and
    takes 1 off at once (and the tuple goes to another consumer). There is no slow start: it would
    end in SLOW, and a larger window is not a faster consumer.

    The window grows until round trips are at the threshold: that is the latency under load.

    Parameters
    ----------
    threshold_ms : float, default 50.0
        Round trip up to which a consumer counts as NORMAL, in milliseconds.
    step : float, default 1.0
        Tuples by which a window of acks moves the window.
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
        threshold_ms: float = 50.0,
        *,
        step: float = 1.0,
        initial: int = 4,
        max_limit: int = 1000,
    ) -> None:
        self.threshold_ns = milliseconds(threshold_ms, "threshold_ms")
        self._step = positive(step, "step", MAX_LIMIT, "tuples")
        #: Tuples that may be outstanding.
        self.limit, self._max_limit = limit_bounds(initial, max_limit)
        self._window = float(self.limit)
        self.pressure = Pressure.NORMAL

    def on_sample(self, rtt_ns: int, in_flight: int, dropped: bool) -> None:
        """Take a sample in, as `Limit.on_sample`."""
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
    """A window that stays as it is.

    Parameters
    ----------
    limit : int
        Tuples that may be outstanding.
    """

    __slots__ = ("limit",)

    def __init__(self, limit: int) -> None:
        #: Tuples that may be outstanding.
        self.limit = as_count(limit, "limit", 1, MAX_LIMIT)

    def on_sample(self, rtt_ns: int, in_flight: int, dropped: bool) -> None:
        """Nothing is learnt."""
