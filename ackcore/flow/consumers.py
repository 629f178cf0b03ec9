"""The state of a consumer and of its outstanding tuples, the leases, in a `FlowController`."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ackcore.flow.limits import DelayTarget, Limit


class Fate(enum.Enum):
    """The state of a `Lease`.

    OUT: not answered yet. ACKED: done. REQUEUED: it failed, timed out, or its consumer was removed;
    its item waits to be sent again. SENT_AGAIN: its item got another lease. DROPPED: its item
    failed, and is not sent again, or only in parts (`FlowController.split`).
    """

    OUT = "out"
    ACKED = "acked"
    REQUEUED = "requeued"
    SENT_AGAIN = "sent again"
    DROPPED = "dropped"


class Lease:
    """Room for one tuple at one consumer, until it is answered. Only a controller creates leases.

    Attributes
    ----------
    item : object
        The item to send: the argument of `FlowController.acquire`, or its failed rows.
    key : hashable or None
        The key with which the room was acquired.
    attempt : int
        The number of the attempt, from 0.
    sent_ns : int
        The time of sending, on the controller's clock.
    fate : Fate
        The state of the lease.
    began_ns : int or None
        The time at which the consumer began the tuple, if `FlowController.begin` was called.
    failed_at : tuple of FlowConsumer
        The consumers at which the item failed or timed out so far, each once, the latest at the
        end.
    """

    # Neither slots nor a constructor: a controller sets only the attributes that differ from these
    # defaults, which takes half of the time.
    consumer: FlowConsumer
    item: Any
    sent_ns: int
    key: Hashable = None
    attempt = 0
    fate = Fate.OUT
    began_ns: int | None = None
    due_ns = 0  # of a re-queued item: the earliest time to send it again
    failed_at: tuple[FlowConsumer, ...] = ()

    @property
    def name(self) -> Hashable:
        """The consumer's name."""
        return self.consumer.name

    def __repr__(self) -> str:
        return f"Lease({self.name!r}, attempt={self.attempt}, {self.fate.value})"


@dataclass(slots=True, eq=False)
class FlowConsumer:
    """The state of a consumer, which `Windows` keeps up to date and the chooser reads."""

    name: Hashable  # the name under which it was added
    slot: int  # its place among the controller's consumers, until it leaves
    limit: Limit  # of its outstanding tuples
    service: DelayTarget  # the estimate of its service time; ``limit`` itself if that is one
    heard_ns: int  # time of its last answer, or of the first tuple sent after idling
    dropped_ns: int  # time of its last failure
    out: int = 0  # the number of outstanding tuples
    is_open: bool = True  # it may get tuples: it has not left and is not paused
    keys_wait: bool = True  # while it is paused, its keys wait for it
    opens_ns: int = 0  # the end of its pause
    silence_ns: int = 0  # time without an answer, if longer than a few service times; else 0
    #: The addition to the service time in a choice: positive for silence, negative after idling.
    extra_ns: float = 0.0
    sent: deque[Lease] = field(default_factory=deque)  # oldest first; some may be answered
    acked: int = 0
    failed: int = 0
    timed_out: int = 0
    last_rtt_ns: int = 0

    @property
    def has_room(self) -> bool:
        """Whether this consumer may receive another tuple."""
        return self.is_open and self.out < self.limit.limit


class ConsumerState(NamedTuple):
    """A snapshot of a consumer, returned by `FlowController.state`.

    ``in_flight``, ``limit``: the tuples that are outstanding, and that may be. ``is_open``: whether
    it is neither paused nor removed. ``service_s``: the estimated service time in seconds, with the
    penalty for failures; 0.0 before the first sample. ``rtt_s``: the round trip of the last tuple
    that was answered or timed out; 0.0 before the first. ``silence_s``: the time without an answer,
    if longer than expected; else 0.0.
    ``acked``, ``failed``, ``timed_out``: the numbers of tuples so far.
    """

    name: Hashable
    in_flight: int
    limit: int
    is_open: bool
    service_s: float
    rtt_s: float
    silence_s: float
    acked: int
    failed: int
    timed_out: int


def state_of(consumer: FlowConsumer) -> ConsumerState:
    """Return the `ConsumerState` of a consumer at this moment."""
    return ConsumerState(
        consumer.name,
        consumer.out,
        consumer.limit.limit,
        consumer.is_open,
        consumer.service.service_ns / 1e9,
        consumer.last_rtt_ns / 1e9,
        consumer.silence_ns / 1e9,
        consumer.acked,
        consumer.failed,
        consumer.timed_out,
    )
