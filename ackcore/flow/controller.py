"""Flow control: room at consumers is given out, taken back and learnt from.

A producer acquires room for a tuple, sends it to the consumer that the lease names, and says what
became of it. Nothing is sent here, and nothing runs by itself: what is due with time (time-outs,
pauses that end) is looked after in the calls, and in `FlowController.expire`.

*Costs.*  A sample takes constant time, a choice one look at each consumer. Every 2 ms at most, a
sweep over the consumers finds those that are silent.

*Threads.*  All methods may be called from any thread. One lock guards all; no callback is made
under it.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import numpy.typing as npt

from ackcore._columns import as_count
from ackcore.flow.batches import Batch
from ackcore.flow.choosers import Chooser, Idlest
from ackcore.flow.consumers import ConsumerState, Lease, state_of
from ackcore.flow.delay_target import DelayTarget
from ackcore.flow.limits import Limit
from ackcore.flow.numbers import nanoseconds
from ackcore.flow.waiters import FutureWaiter, ThreadWaiter, Waiter
from ackcore.flow.windows import Windows

#: A waiter looks at the clock again after so many seconds at the latest, and at the earliest.
_LONGEST_S, _SHORTEST_S = 1.0, 0.001


class FlowController:
    """A window for each consumer, and a choice among those that have room.

    Parameters
    ----------
    consumers : iterable of hashable, optional
        Names of those that are there from the beginning.
    limit : callable, optional
        Makes a `Limit`, without arguments, for each consumer that comes; by default
        ``DelayTarget(clock=clock)``.
    chooser : Chooser, optional
        By default `Idlest`.  It must serve no other controller.
    max_pending : int, optional
        Tuples that may be outstanding in all, Storm's ``topology.max.spout.pending``; by default as
        many as the limits allow.
    timeout_s : float, default 30.0
        A tuple that did not come back within so many seconds has timed out.
    clock : callable, optional
        Nanoseconds as an int; by default `time.monotonic_ns`.

    Raises
    ------
    TypeError
        If an argument is not of its type.
    ValueError
        If one is out of range, or two consumers have one name.

    Notes
    -----
    An item that fails or times out is kept in the order of failing until `try_again` takes it. It
    goes to a consumer at which it has not failed; if none of these is open, to the open one at
    which it failed longest ago. So whatever was acquired is out, waits to be sent again, or came to
    its end by `ack` or by `fail` with ``again=False``.
    """

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
        for argument, given in (("limit", limit), ("clock", clock)):
            if given is not None and not callable(given):
                raise TypeError(
                    f"{argument} must be callable, got {type(given).__name__}; "
                    "a limit is one consumer's, so what is asked for is what makes them"
                )
        if chooser is not None and not hasattr(chooser, "choose"):
            raise TypeError(
                f"chooser must have a method choose, got {type(chooser).__name__}; "
                "pass an instance, as Idlest()"
            )
        self._clock = clock
        self._make_limit = limit
        pending = None if max_pending is None else as_count(max_pending, "max_pending", 1)
        timeout_ns = nanoseconds(timeout_s, "timeout_s")
        self._max_pending = pending
        self._chooser: Chooser = Idlest() if chooser is None else chooser
        self._windows = Windows(self._chooser, pending, timeout_ns, clock)
        self._waiting: deque[Waiter] = deque()
        self._guard = threading.Lock()
        # In CPython 3.11 `with` takes thrice the time of these, and there are two locks a tuple.
        self._lock, self._unlock = self._guard.acquire, self._guard.release
        self._lease, self._done = self._windows.lease, self._windows.done
        for name in consumers:
            self.add(name)

    # Consumers come and go.

    def add(self, name: Hashable) -> None:
        """Take a consumer up.

        Raises
        ------
        ValueError
            If there is one of that name.
        TypeError
            If what the constructor's ``limit`` made is no `Limit`.
        """
        limit = DelayTarget(clock=self._clock) if self._make_limit is None else self._make_limit()
        if not isinstance(limit, Limit):
            raise TypeError(
                f"limit must make objects with limit and on_sample, got {type(limit).__name__}"
            )
        with self._guard:
            self._windows.join(name, limit)
            woken = self._serve_waiting()
        _wake(woken)

    def remove(self, name: Hashable) -> list[Lease]:
        """Forget a consumer; what it had outstanding is re-queued.

        Returns
        -------
        list of Lease
            What was, oldest first.

        Raises
        ------
        KeyError
            If there is none of that name.
        """
        with self._guard:
            taken = self._windows.leave(name)
            woken = self._serve_waiting()
        _wake(woken)
        return taken

    def pause(self, name: Hashable, pause_s: float, *, keys_wait: bool = True) -> None:
        """Send a consumer nothing for a while, as an HTTP server asks for by ``Retry-After``.

        Parameters
        ----------
        name : hashable
        pause_s : float
            Seconds, above 0 and at most 1e9.
        keys_wait : bool, default True
            With a chooser by key, whether the consumer's keys wait for it; False sends them to
            others meanwhile.

        Raises
        ------
        KeyError
            If there is none of that name.
        TypeError
            If ``pause_s`` is not a number.
        ValueError
            If it is out of range.
        """
        for_ns = nanoseconds(pause_s, "pause_s")
        with self._guard:
            self._windows.pause(name, for_ns, keys_wait)

    def resume(self, name: Hashable) -> None:
        """End a consumer's pause, however long it was to be.

        Raises
        ------
        KeyError
            If there is none of that name.
        """
        with self._guard:
            self._windows.resume(self._windows.named(name))
            woken = self._serve_waiting()
        _wake(woken)

    # Room.

    def try_acquire(self, item: Any = None, key: Hashable = None) -> Lease | None:
        """Return room for a tuple, or None if there is none or others wait for it.

        Parameters
        ----------
        item : object, optional
            What will be sent; it comes back with `expire` and `try_again`.
        key : hashable, optional
            For a chooser by key.

        Raises
        ------
        TypeError
            If the chooser goes by key, and none was given, or one that has no hash.
        """
        self._lock()
        try:
            if self._waiting:
                self._check_key(key)
                return None
            return self._lease(item, key)
        finally:
            self._unlock()

    def try_again(self) -> Lease | None:
        """Return room for what was re-queued first, or None: there is no such, or no room for it.

        It goes before those that wait. With a chooser by key, the first that there is room for.
        """
        with self._guard:
            return self._windows.lease_again()

    def acquire(
        self, item: Any = None, key: Hashable = None, timeout_s: float | None = None
    ) -> Lease:
        """Wait for room for a tuple; arguments as of `try_acquire`.

        Parameters
        ----------
        timeout_s : float, optional
            Seconds to wait at most; by default as long as it takes.

        Raises
        ------
        TimeoutError
            If there was none in time.
        TypeError
            As `try_acquire`.
        """
        self._check_key(key)
        waiter = ThreadWaiter(item, key)
        if self._lease_or_queue(waiter):
            return waiter.granted()
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        try:
            while not waiter.wait(max(0.0, min(until - time.monotonic(), self._until_due_s()))):
                if time.monotonic() >= until:
                    raise TimeoutError(f"no consumer had room for a tuple within {timeout_s} s")
                self.expire()
        except BaseException:
            self._leave_queue(waiter)
            raise
        return waiter.granted()

    async def acquire_async(self, item: Any = None, key: Hashable = None) -> Lease:
        """Wait for room in a coroutine; arguments as of `try_acquire`.

        It may be cancelled, and be under `asyncio.timeout`: room that came meanwhile is given back.
        """
        self._check_key(key)
        waiter = FutureWaiter(item, key, asyncio.get_running_loop())
        if self._lease_or_queue(waiter):
            return waiter.granted()
        try:
            while not await waiter.wait(self._until_due_s()):
                self.expire()
        except BaseException:
            self._leave_queue(waiter)
            raise
        return waiter.granted()

    # What became of a tuple.

    def begin(self, lease: Lease) -> None:
        """Note that the consumer begins with a tuple now: its time-out runs from here."""
        lease.began_ns = self._clock()

    def ack(self, lease: Lease) -> bool:
        """Take in that a tuple is done.

        Returns
        -------
        bool
            Whether this ends it. False if it had come back already; or had timed out and was sent
            again since, so that the other one decides. One that timed out and still waits
            to be sent again ends here.
        """
        self._lock()
        try:
            ended = self._done(lease)
            woken = self._serve_waiting() if self._waiting else None
        finally:
            self._unlock()
        if woken:
            _wake(woken)
        return ended

    def fail(
        self,
        lease: Lease,
        failed: bytes | npt.ArrayLike | None = None,
        *,
        again: bool = True,
        dropped: bool = True,
    ) -> bool:
        """Take in that a tuple failed, and re-queue it.

        Parameters
        ----------
        failed : bytes or array of bool, optional
            Which records of a `Batch` failed, as `Batch.failed`; by default all. The others are
            done, and ``lease.item`` holds those that failed from now on.
        again : bool, default True
            False drops it: nothing is re-queued.
        dropped : bool, default True
            False if the failure says nothing of the consumer's load, as a record that no consumer
            will take. A batch of which some records went well never does.

        Returns
        -------
        bool
            Whether this took it back; False if it had come back already.

        Raises
        ------
        TypeError, ValueError
            As `Batch.failed`, or if the item is no `Batch`; or if no bit is set, which is an `ack`.
        """
        item = lease.item
        if failed is not None:
            if not isinstance(item, Batch):
                raise TypeError(
                    f"a bitmap needs a Batch as the lease's item, got {type(item).__name__}"
                )
            bits = item.failed(failed)
            if not bits.any():
                raise ValueError("no record failed, so the tuple is done: call ack(lease)")
            item = item.only(bits)
            dropped = dropped and bool(bits.all())
        with self._guard:
            taken = self._windows.take_back(lease, dropped, again, timed_out=False)
            if taken:
                lease.item = item
            woken = self._serve_waiting()
        _wake(woken)
        return taken

    def timed_out(self, lease: Lease, *, again: bool = True) -> bool:
        """See `fail`, for a tuple that its producer has waited for long enough."""
        with self._guard:
            taken = self._windows.take_back(lease, True, again, timed_out=True)
            woken = self._serve_waiting()
        _wake(woken)
        return taken

    def give_back(self, lease: Lease) -> bool:
        """Return room that was not used: nothing was sent, and nothing is learnt.

        An item that was to be sent again is re-queued.

        Returns
        -------
        bool
            False if the lease had come back already.
        """
        with self._guard:
            taken = self._windows.unsend(lease)
            woken = self._serve_waiting()
        _wake(woken)
        return taken

    def delay(self, lease: Lease, delay_s: float) -> bool:
        """Make an item that waits to be sent again wait this many seconds from now.

        Its key waits with it. Returns whether it waited; errors as of `pause`.
        """
        for_ns = nanoseconds(delay_s, "delay_s")
        with self._guard:
            return self._windows.delay(lease, for_ns)

    def split(self, lease: Lease, items: Iterable[Any]) -> list[Lease]:
        """Replace an item that waits to be sent again by its parts, which are sent one by one.

        Not with a chooser by key. Returns the leases of the parts; none if the item did not wait.
        """
        with self._guard:
            return self._windows.split(lease, items)

    def drop(self, lease: Lease) -> bool:
        """Let an item go that waits to be sent again; return whether it waited."""
        with self._guard:
            waited = self._windows.drop(lease)
            woken = self._serve_waiting()
        _wake(woken)
        return waited

    def expire(self) -> list[Lease]:
        """Time out what did not come back in time, end pauses that are over, look for silence.

        Returns
        -------
        list of Lease
            What timed out, now re-queued; consumer by consumer, oldest first.
        """
        with self._guard:
            expired = self._windows.expire()
            woken = self._serve_waiting()
        _wake(woken)
        return expired

    # Looking inside.

    @property
    def in_flight(self) -> int:
        """Tuples outstanding."""
        return self._windows.in_flight

    @property
    def requeued(self) -> int:
        """Items that failed or timed out, and wait to be sent again."""
        return self._windows.requeued

    @property
    def late(self) -> int:
        """Acks and fails of leases that had come back or timed out before."""
        return self._windows.late

    @property
    def capacity(self) -> int:
        """Tuples that may be outstanding now."""
        with self._guard:
            limits = sum(c.limit.limit for c in self._windows.consumers.values() if c.is_open)
        return limits if self._max_pending is None else min(limits, self._max_pending)

    def state(self) -> list[ConsumerState]:
        """Return the state of each consumer, in the order in which they came."""
        with self._guard:
            return [state_of(consumer) for consumer in self._windows.consumers.values()]

    def __len__(self) -> int:
        return len(self._windows.consumers)

    def __contains__(self, name: object) -> bool:
        return name in self._windows.consumers

    def __repr__(self) -> str:
        return (
            f"FlowController({len(self)} consumers, in_flight={self.in_flight}, "
            f"requeued={self.requeued})"
        )

    # Waiters.

    def _check_key(self, key: Hashable) -> None:
        """Refuse a key here: room for one that waits may be looked for in any thread's call."""
        if self._chooser.keyed:
            Windows.check_key(key)

    def _lease_or_queue(self, waiter: Waiter) -> bool:
        with self._guard:
            if not self._waiting:
                waiter.lease = self._lease(waiter.item, waiter.key)
            if waiter.lease is None:
                self._waiting.append(waiter)
        return waiter.lease is not None

    def _serve_waiting(self) -> list[Waiter]:
        """Give room to those that wait for it, in their order; they are to be woken afterwards."""
        woken: list[Waiter] = []
        passed = []
        while self._waiting:
            waiter = self._waiting.popleft()
            waiter.lease = self._lease(waiter.item, waiter.key)
            if waiter.lease is not None:
                woken.append(waiter)
                continue
            passed.append(waiter)
            if not self._chooser.keyed:
                break
        self._waiting.extendleft(reversed(passed))
        return woken

    def _leave_queue(self, waiter: Waiter) -> None:
        with self._guard:
            if waiter.lease is None:
                self._waiting.remove(waiter)
                return
            self._windows.unsend(waiter.lease)
            woken = self._serve_waiting()
        _wake(woken)

    def _until_due_s(self) -> float:
        with self._guard:
            due_ns = self._windows.due_ns()
        due_s = _LONGEST_S if due_ns is None else due_ns / 1e9
        return min(max(due_s, _SHORTEST_S), _LONGEST_S)


def _wake(woken: list[Waiter]) -> None:
    for waiter in woken:
        waiter.wake()
