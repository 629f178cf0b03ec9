"""The state of a consumer, and of its outstanding tuples, in a controller."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Hashable
from typing import Any, NamedTuple

from ackcore.flow.delay_target import DelayTarget
from ackcore.flow.limits import Limit, Pressure


class Fate(enum.Enum):
    """Where a lease stands."""

    OUT = "out"  # sent, and nothing came back
    ACKED = "acked"
    REQUEUED = "requeued"  # failed or timed out; waits for another consumer
    SENT_AGAIN = "sent again"  # under another lease
    DROPPED = "dropped"  # failed, and not to be sent again
    GIVEN_BACK = "given back"  # never sent


class Lease:
    """Room for one tuple at one consumer, until it comes back; made by a controller only.

    Attributes
    ----------
    item : object
        What is sent: what `FlowController.acquire` was given, or the rows of it that failed.
    key : hashable or None
        For a chooser by key.
    attempt : int
        From 0; each time the item is sent again is one more.
    sent_ns : int
        When, on the controller's clock.
    fate : Fate
        Where it stands.
    began_ns : int or None
        When its consumer began with it, if `FlowController.begin` said so.
    failed_at : tuple of Consumer
        Where the item failed or timed out so far, once each, the last at the end.
    """

    # Neither slots nor a constructor: a controller sets what is not the same for all, which takes
    # half of the time.
    consumer: Consumer
    item: Any
    sent_ns: int
    key: Hashable = None
    attempt = 0
    fate = Fate.OUT
    began_ns: int | None = None
    due_ns = 0  # of one that waits to be sent again: not before
    failed_at: tuple[Consumer, ...] = ()

    @property
    def name(self) -> Hashable:
        """The consumer's name."""
        return self.consumer.name

    def __repr__(self) -> str:
        return f"Lease({self.name!r}, attempt={self.attempt}, {self.fate.value})"


class Consumer:
    """One consumer, as its controller and the chooser see it.

    Attributes
    ----------
    name : hashable
        What it was added as.
    slot : int
        Its place among the controller's consumers, its own until it leaves.
    limit : Limit
        How many tuples it may have outstanding.
    service : DelayTarget
        Its service time; the limit itself where that is one.
    out : int
        Tuples outstanding.
    is_open : bool
        It takes tuples: it has not left and is not paused.
    keys_wait : bool
        While it is paused, its keys wait for it.
    silence_ns : int
        Nanoseconds for which nothing came from it, if that is suspiciously long; else 0.
    extra_ns : float
        What a choice by service time is to add to it: for silence; below 0 for want of tuples.
    """

    __slots__ = (
        "acked",
        "dropped_ns",
        "extra_ns",
        "failed",
        "heard_ns",
        "is_open",
        "keys_wait",
        "last_dropped",
        "last_rtt_ns",
        "limit",
        "name",
        "opens_ns",
        "out",
        "sent",
        "service",
        "silence_ns",
        "slot",
        "timed_out",
    )

    def __init__(
        self, name: Hashable, slot: int, limit: Limit, service: DelayTarget, now_ns: int
    ) -> None:
        self.name = name
        self.slot = slot
        self.limit = limit
        self.service = service
        self.out = 0
        self.is_open = self.keys_wait = True
        self.opens_ns = 0
        self.silence_ns = 0
        self.extra_ns = 0.0
        self.heard_ns = now_ns  # its last ack, or the first tuple sent after it had none
        self.dropped_ns = now_ns  # when it failed last
        self.sent: deque[Lease] = deque()  # oldest first; also some that came back since the sweep
        self.acked = self.failed = self.timed_out = 0
        self.last_rtt_ns = 0
        self.last_dropped = False

    @property
    def has_room(self) -> bool:
        """Whether it takes another tuple."""
        return self.is_open and self.out < self.limit.limit

    @property
    def pressure(self) -> Pressure:
        """How it keeps up, for people: no decision is taken by it."""
        if self.last_dropped:
            return Pressure.BUSY
        threshold = getattr(self.limit, "threshold_ns", None)
        if self.silence_ns or (threshold is not None and self.last_rtt_ns > threshold):
            return Pressure.SLOW
        return Pressure.NORMAL


class ConsumerState(NamedTuple):
    """A consumer at one moment, as `FlowController.state` tells it."""

    name: Hashable
    pressure: Pressure
    in_flight: int  # tuples outstanding
    limit: int  # tuples that may be
    is_open: bool  # neither paused nor gone
    service_ms: float  # estimated service time, failures weighed in; 0.0 before the first sample
    rtt_ms: float  # round trip of the last tuple that came back
    silence_ms: float  # if nothing has come for suspiciously long, for how long; else 0.0
    acked: int
    failed: int
    timed_out: int


def state_of(consumer: Consumer) -> ConsumerState:
    """Return a consumer's state."""
    return ConsumerState(
        consumer.name,
        consumer.pressure,
        consumer.out,
        consumer.limit.limit,
        consumer.is_open,
        consumer.service.service_ns / 1e6,
        consumer.last_rtt_ns / 1e6,
        consumer.silence_ns / 1e6,
        consumer.acked,
        consumer.failed,
        consumer.timed_out,
    )
