"""Flow control: leases of room at consumers, and limits that adapt to their answers.

A producer acquires room for a tuple, sends it to the consumer that the lease names, and reports the
result. This module sends nothing and runs no thread. Time-outs are handled in
`FlowController.expire` and in a waiting `acquire`; pauses that are over end there and in each call
that returns a lease.

*Threads.* Any thread may call any method. One lock guards all; no callback runs under it.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import numpy.typing as npt

from ackcore._columns import count_or_none, nanoseconds
from ackcore._error_hints import naming_arguments
from ackcore.flow.choosers import Chooser, Idlest
from ackcore.flow.consumers import ConsumerState, Lease, state_of
from ackcore.flow.flow_batches import Batch
from ackcore.flow.limits import DelayTarget, Limit
from ackcore.flow.windows import Windows

#: The longest and the shortest wait, in seconds, before a waiter checks time-outs again.
_LONGEST_S, _SHORTEST_S = 1.0, 0.001


class FlowController:
    """A limit for each of several consumers, and a choice among those with room. Thread-safe.

    Parameters
    ----------
    consumers : iterable of hashable, optional
        The names of the first consumers.
    limit : callable, optional
        Makes a `Limit` for each new consumer, without arguments; by default
        ``DelayTarget(clock=clock)``.
    chooser : Chooser, optional
        By default `Idlest`. It must serve no other controller.
    max_pending : int, optional
        The largest number of outstanding tuples in all, Storm's ``topology.max.spout.pending``; by
        default only the limits count.
    timeout_s : float, default 30.0
        Seconds after which a tuple without an answer has timed out.
    clock : callable, optional
        Returns the time in nanoseconds, as an int; by default `time.monotonic_ns`.

    Raises
    ------
    TypeError, ValueError
        If an argument has another type or is out of range, or if two consumers have one name.

    Notes
    -----
    Items that fail or time out are queued in that order until `try_again` takes them. An item goes
    to a consumer at which it has not failed. If none of these is open, it goes to the open one at
    which it failed longest ago. So every acquired item is outstanding, is queued again, or has
    ended by `ack` or by `fail` with ``again=False``.
    """

    @naming_arguments
    def __init__(
        self,
        consumers: Iterable[Hashable] = (),
        *,
        limit: Callable[[], Limit] | None = None,
        chooser: Chooser | None = None,
        max_pending: int | None = None,
        timeout_s: float = 30.0,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        if limit is not None and not callable(limit):
            raise TypeError(
                f"limit must be callable, got {type(limit).__name__}; "
                "each consumer has its own limit, so pass a function that makes one"
            )
        if not callable(clock):
            raise TypeError(
                f"clock must be a callable that returns nanoseconds, got {type(clock).__name__}"
            )
        if chooser is not None and not isinstance(chooser, Chooser):
            raise TypeError(
                f"chooser must be a Chooser, got {type(chooser).__name__}; pass an instance, such "
                "as ByKey()"
            )
        self._clock = clock
        self._make_limit = limit
        pending = count_or_none(max_pending, "max_pending", 1)
        timeout_ns = nanoseconds(timeout_s, "timeout_s")
        self._chooser: Chooser = Idlest() if chooser is None else chooser
        self._windows = Windows(self._chooser, pending, timeout_ns, clock)
        self._guard = threading.Lock()
        #: Notified when there may be room; and the number of threads that wait for that.
        self._room, self._waiting = threading.Condition(self._guard), 0
        # In CPython 3.11 `with` takes three times as long, and each tuple takes the lock twice.
        self._lock, self._unlock = self._guard.acquire, self._guard.release
        self._lease, self._done = self._windows.lease, self._windows.done
        for name in consumers:
            self.add(name)

    # Consumers.

    def add(self, name: Hashable) -> None:
        """Add a consumer, and wake threads that wait for room.

        Raises ValueError if there is a consumer of that name, or its `Limit` allows no tuple.
        Raises TypeError if the constructor's ``limit`` made an object that is no `Limit`.
        """
        limit = DelayTarget(clock=self._clock) if self._make_limit is None else self._make_limit()
        if not isinstance(limit, Limit):
            raise TypeError(
                "limit must return an object with limit and on_sample, such as DelayTarget(), got "
                f"{type(limit).__name__}"
            )
        with self._guard:
            self._windows.join(name, limit)
            self._room.notify_all()

    def remove(self, name: Hashable) -> list[Lease]:
        """Remove a consumer, and re-queue its outstanding items.

        Raises KeyError if there is no consumer of that name.

        Returns
        -------
        list of Lease
            The leases that were outstanding, oldest first.
        """
        with self._guard:
            taken = self._windows.leave(name)
            self._room.notify_all()
        return taken

    def pause(self, name: Hashable, pause_s: float, *, keys_wait: bool = True) -> None:
        """Stop sending to a consumer for a while, for example after an HTTP ``Retry-After``.

        Parameters
        ----------
        name : hashable
        pause_s : float
            Seconds from now, above 0 and at most 1e9. The end of a pause that ends later stays.
        keys_wait : bool, default True
            With a chooser by key: whether tuples of the consumer's keys wait for it. False sends
            them to others meanwhile. The last call counts.

        Raises
        ------
        KeyError
            If there is no consumer of that name.
        TypeError, ValueError
            If ``pause_s`` is not a number, or is out of range.
        """
        for_ns = nanoseconds(pause_s, "pause_s")
        with self._guard:
            self._windows.pause(name, for_ns, keys_wait)

    def resume(self, name: Hashable) -> None:
        """End a consumer's pause at once.

        Raises KeyError if there is no consumer of that name.
        """
        with self._guard:
            self._windows.resume(self._windows.named(name))
            self._room.notify_all()

    # Room.

    def try_acquire(self, item: Any = None, key: Hashable = None) -> Lease | None:
        """Return a lease for a tuple, which names its consumer, or None if there is no room.

        With a chooser by key, also return None while another tuple of the key is not done.

        Parameters
        ----------
        item : object, optional
            The item to send. `expire` and `try_again` return it in their leases.
        key : hashable, optional
            The tuple's key, which a chooser such as `ByKey` requires.

        Raises
        ------
        TypeError
            If the chooser requires a key, and it is None or has no hash.
        """
        self._lock()
        try:
            return self._lease(item, key)
        finally:
            self._unlock()

    def try_again(self) -> Lease | None:
        """Return a lease for a re-queued item: the first that is due and for which there is room.

        Returns None if there is no such item.
        """
        with self._guard:
            return self._windows.lease_again()

    def acquire(
        self, item: Any = None, key: Hashable = None, timeout_s: float | None = None
    ) -> Lease:
        """Wait for room for a tuple, and return a lease; in no particular order with other threads.

        Times out overdue tuples meanwhile. ``item`` and ``key`` are those of `try_acquire`.

        Parameters
        ----------
        timeout_s : float, optional
            The longest wait, in seconds; by default no limit.

        Raises
        ------
        TimeoutError
            If there was no room in time.
        TypeError
            If the chooser requires a key, and it is None or has no hash.
        """
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        with self._room:
            while (lease := self._lease(item, key)) is None:
                left_s = until - time.monotonic()
                if not left_s > 0:  # also for NaN
                    raise TimeoutError(
                        f"no consumer had room for a tuple within {timeout_s} s, and "
                        f"{self.in_flight} are outstanding; answer them, or wait for longer"
                    )
                due_ns = self._windows.due_ns()
                due_s = _LONGEST_S if due_ns is None else max(due_ns / 1e9, _SHORTEST_S)
                self._waiting += 1
                try:
                    self._room.wait(min(left_s, due_s, _LONGEST_S))
                finally:
                    self._waiting -= 1
                if self._windows.expire():
                    self._room.notify_all()
            return lease

    # Answers.

    def begin(self, lease: Lease) -> None:
        """Record that the consumer begins a tuple only now, so that its time-out runs from now."""
        lease.began_ns = self._clock()

    def ack(self, lease: Lease) -> bool:
        """Record that a tuple is done.

        Returns
        -------
        bool
            Whether this ends the item. False if the lease was answered before, or had timed out and
            was sent again since: then the newer lease decides. If the item timed out and still
            waits to be sent again, this ends it.
        """
        self._lock()
        try:
            ended = self._done(lease)
            if self._waiting:
                self._room.notify_all()
            return ended
        finally:
            self._unlock()

    def fail(
        self,
        lease: Lease,
        failed: bytes | npt.ArrayLike | None = None,
        *,
        again: bool = True,
        dropped: bool = True,
    ) -> bool:
        """Record that a tuple failed, and re-queue it.

        Parameters
        ----------
        failed : bytes or array of bool, optional
            The failed records of a `Batch`, see `Batch.failed`; by default all. The others are
            done, and from now on ``lease.item`` holds the failed ones.
        again : bool, default True
            False drops the item instead.
        dropped : bool, default True
            False if the failure does not depend on the consumer's load, for example a record that
            no consumer can process. A batch of which some records succeeded always counts as False.

        Returns
        -------
        bool
            Whether the lease was outstanding. False if it was answered before or had timed out;
            nothing changes then.

        Raises
        ------
        TypeError, ValueError
            If ``failed`` is no bitmap of the batch's length, or names no record (use `ack`), or the
            item is no `Batch`.
        """
        item = lease.item
        if failed is not None:
            if not isinstance(item, Batch):
                raise TypeError(
                    "failed= names records of a Batch, and the lease's item is "
                    f"{type(item).__name__}; omit failed= if the whole item failed"
                )
            bits = item.failed(failed)
            if not bits.any():
                raise ValueError("failed= names no record, so the tuple is done: call ack(lease)")
            item = item.only(bits)
            dropped = dropped and bool(bits.all())
        with self._guard:
            taken = self._windows.take_back(lease, dropped, again, timed_out=False)
            if taken:
                lease.item = item
            self._room.notify_all()
        return taken

    def delay(self, lease: Lease, delay_s: float) -> bool:
        """Delay the re-queued item of a failed or timed-out lease by seconds from now.

        Later items of its key wait for it. A second delay replaces the first. Returns whether the
        item was queued. Raises TypeError or ValueError unless ``delay_s`` is a number above 0 and
        at most 1e9.
        """
        for_ns = nanoseconds(delay_s, "delay_s")
        with self._guard:
            return self._windows.delay(lease, for_ns)

    def split(self, lease: Lease, items: Iterable[Any]) -> list[Lease]:
        """Replace the re-queued item of a failed or timed-out lease by ``items``, its parts.

        Returns a re-queued lease for each part; an empty list if the item was not queued. Not for a
        chooser by key.
        """
        with self._guard:
            return self._windows.split(lease, items)

    def drop(self, lease: Lease) -> bool:
        """Drop the re-queued item of a failed or timed-out lease. Return whether it was queued."""
        with self._guard:
            waited = self._windows.drop(lease)
            self._room.notify_all()
        return waited

    def expire(self) -> list[Lease]:
        """Time out overdue tuples, end pauses that are over, and detect silent consumers.

        Returns
        -------
        list of Lease
            The leases that timed out, now re-queued; by consumer, oldest first.
        """
        with self._guard:
            expired = self._windows.expire()
            self._room.notify_all()
        return expired

    # State.

    @property
    def in_flight(self) -> int:
        """The number of outstanding tuples."""
        return self._windows.in_flight

    @property
    def requeued(self) -> int:
        """The number of items that wait to be sent again; see `Fate.REQUEUED`."""
        return self._windows.requeued

    def state(self) -> list[ConsumerState]:
        """Return the state of each consumer, in the order in which they were added."""
        with self._guard:
            return [state_of(consumer) for consumer in self._windows.consumers.values()]

    def __repr__(self) -> str:
        return (
            f"FlowController({len(self._windows.consumers)} consumers, in_flight={self.in_flight}, "
            f"requeued={self.requeued})"
        )
