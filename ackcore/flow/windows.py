"""The consumers, their outstanding leases, and the queue of failed items. Not thread-safe.

`FlowController` adds a lock, and lets threads wait for room.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from copy import copy
from heapq import heappop, heappush
from typing import Any

from ackcore._error_hints import Unquoted
from ackcore.flow.choosers import Chooser
from ackcore.flow.consumers import Fate, FlowConsumer, Lease
from ackcore.flow.limits import DelayTarget, Limit, check_room

#: The least time between two sweeps: in total, and for each consumer. A sweep takes about
#: 1,000 ns per consumer.
_SWEEP_NS, _SWEEP_EACH_NS = 2_000_000, 20_000
#: The number of answered leases of a consumer that may stay behind one that is outstanding.
_KEPT = 64
#: A consumer counts as faster by this factor for each second without a tuple.
_IDLE_NS, _IDLE_FACTOR = 1_000_000_000, 1.5

_OUT, _ACKED, _REQUEUED = Fate.OUT, Fate.ACKED, Fate.REQUEUED
_new = object.__new__


class Windows:
    """Consumers, outstanding leases, and items that wait to be sent again.

    ``chooser``: chooses among consumers with room. ``max_pending``: the largest number of
    outstanding leases in all, or None. ``timeout_ns``: nanoseconds after which a lease has timed
    out. ``clock``: returns the time in nanoseconds.
    """

    def __init__(
        self, chooser: Chooser, max_pending: int | None, timeout_ns: int, clock: Callable[[], int]
    ) -> None:
        self._chooser = chooser
        self._keyed = chooser.keyed
        self._max_pending = sys.maxsize if max_pending is None else max_pending
        self._timeout_ns = timeout_ns
        self._clock = clock
        self._free_slots: list[int] = []
        self._queue: deque[Lease] = deque()  # re-queued; also some that have ended since
        self._delayed: list[tuple[int, int, Lease]] = []  # delayed ones, a heap by due time
        self._delays = 0
        self._held: set[Hashable] = set()  # with a chooser by key: keys of tuples not done
        self._next_sweep_ns = clock()
        self.consumers: dict[Hashable, FlowConsumer] = {}
        self.in_flight = 0
        self.requeued = 0

    def join(self, name: Hashable, limit: Limit) -> None:
        """Add a consumer with its own ``limit``; raise ValueError if there is one of that name."""
        if name in self.consumers:
            raise ValueError(f"consumer {name!r} exists already; remove it first")
        check_room(limit)
        slot = self._free_slots.pop() if self._free_slots else len(self.consumers)
        # With any limit, the choice needs the service time.
        service = limit if isinstance(limit, DelayTarget) else DelayTarget(clock=self._clock)
        now = self._clock()
        consumer = FlowConsumer(name, slot, limit, service, heard_ns=now, dropped_ns=now)
        self.consumers[name] = consumer
        self._chooser.join(consumer)
        self._chooser.changed(consumer)

    def leave(self, name: Hashable) -> list[Lease]:
        """Remove a consumer, and return its outstanding leases, now re-queued, oldest first.

        Raises KeyError if there is no consumer of that name.
        """
        consumer = self.named(name)
        del self.consumers[name]
        consumer.is_open = False
        self._chooser.leave(consumer)
        self._free_slots.append(consumer.slot)
        taken = [lease for lease in consumer.sent if lease.fate is _OUT]
        consumer.sent.clear()
        consumer.out = 0
        self.in_flight -= len(taken)
        for lease in taken:
            self._requeue(lease)
        return taken

    def pause(self, name: Hashable, for_ns: int, keys_wait: bool = True) -> None:
        """Send nothing to a consumer for ``for_ns`` nanoseconds, or until a later end set before.

        ``keys_wait``: whether tuples of its keys wait for it. Raises KeyError for an unknown name.
        """
        consumer = self.named(name)
        consumer.is_open = False
        consumer.keys_wait = keys_wait
        consumer.opens_ns = max(consumer.opens_ns, self._clock() + for_ns)
        self._chooser.changed(consumer)

    def resume(self, consumer: FlowConsumer) -> None:
        """End a consumer's pause at once."""
        consumer.opens_ns = 0
        consumer.is_open = True
        self._chooser.changed(consumer)

    def named(self, name: Hashable) -> FlowConsumer:
        """Return the consumer of that name; raise KeyError, which lists the names, without one."""
        try:
            return self.consumers[name]
        except KeyError:
            there = ", ".join(map(repr, self.consumers)) or "none"
            raise KeyError(
                Unquoted(f"no consumer has the name {name!r}; the consumers are {there}")
            ) from None

    def lease(
        self,
        item: Any,
        key: Hashable = None,
        avoid: tuple[FlowConsumer, ...] = (),
        attempt: int = 0,
    ) -> Lease | None:
        """Return a lease for an item, or None if no consumer has room.

        Also None at ``max_pending``, and for the first attempt with a key of which a tuple is not
        done. Ends pauses that are over. With a chooser by key, raises TypeError if the key is None
        or has no hash. ``avoid``: the consumers at which the item failed. ``attempt``: the number
        of the attempt, from 0.
        """
        now = self._clock()
        if now >= self._next_sweep_ns:
            self._sweep(now)
        if self._keyed:
            self.check_key(key)
            if not attempt and key in self._held:
                return None
        if self.in_flight >= self._max_pending:
            return None
        chooser = self._chooser
        consumer = chooser.choose(key, avoid)
        if consumer is None:
            return None
        lease = _new(Lease)
        lease.fate = _OUT
        lease.consumer = consumer
        lease.item = item
        lease.sent_ns = now
        if attempt:
            lease.attempt = attempt
        consumer.sent.append(lease)
        if consumer.out:
            consumer.out += 1
        else:
            consumer.out = 1
            consumer.heard_ns = now
        self.in_flight += 1
        chooser.changed(consumer)
        if key is not None:
            lease.key = key
            if self._keyed:
                self._held.add(key)
        return lease

    @staticmethod
    def check_key(key: Hashable) -> None:
        """Raise TypeError for a key by which no consumer can be chosen: None or unhashable."""
        if key is None:
            raise TypeError("the key must not be None: the chooser selects by it; give tuples keys")
        try:
            hash(key)
        except TypeError:
            raise TypeError(
                f"key must be hashable, got {type(key).__name__}; use a tuple of its parts"
            ) from None

    def lease_again(self) -> Lease | None:
        """Return a lease for the first re-queued item that is due and has room, or None."""
        if self.in_flight >= self._max_pending:
            return None
        now = self._clock()
        while self._delayed and self._delayed[0][0] <= now:
            self._queue.append(heappop(self._delayed)[2])
        passed = []
        lease = None
        while self._queue and lease is None:
            failed = self._queue.popleft()
            if failed.fate is not _REQUEUED:
                continue
            if failed.due_ns > now:
                self._push_delayed(failed.due_ns, failed)
                continue
            # By name: for the user, a consumer that left and returned is the same.
            avoid = tuple(self.consumers.get(each.name, each) for each in failed.failed_at)
            lease = self.lease(failed.item, failed.key, avoid, failed.attempt + 1)
            if lease is None:
                passed.append(failed)
                # Without the chooser: a choice might change its state.
                if not any(c.has_room for c in self.consumers.values()):
                    break  # there is no room for any
            else:
                failed.fate = Fate.SENT_AGAIN
                lease.failed_at = failed.failed_at
                self.requeued -= 1
        self._queue.extendleft(reversed(passed))
        return lease

    def done(self, lease: Lease) -> bool:
        """Record that a lease was acked. Return whether that ends its item, even if re-queued."""
        now = self._clock()
        consumer = lease.consumer
        if lease.fate is not _OUT:
            consumer.heard_ns = now  # a late answer also ends the silence
            if lease.fate is not _REQUEUED:
                return False
            self._end_requeued(lease, _ACKED)
            return True
        lease.fate = _ACKED
        out = consumer.out
        consumer.out = out - 1
        self.in_flight -= 1
        consumer.acked += 1
        consumer.last_rtt_ns = rtt = now - lease.sent_ns
        consumer.heard_ns = now
        consumer.silence_ns = 0
        consumer.extra_ns = 0.0
        consumer.service.on_sample(rtt, out, False, now)
        if consumer.limit is not consumer.service:
            consumer.limit.on_sample(rtt, out, False)
            if not consumer.out:  # else a later answer may raise the limit
                check_room(consumer.limit)
        self._chooser.changed(consumer)
        if self._keyed:
            self._held.discard(lease.key)
        return True

    def take_back(self, lease: Lease, dropped: bool, again: bool, timed_out: bool) -> bool:
        """Record that a lease failed or timed out. Return whether it was outstanding.

        ``dropped``: whether the failure may come from the consumer's load. ``again``: whether the
        item is re-queued, and not dropped. ``timed_out``: whether the lease timed out.
        """
        if lease.fate is not _OUT:
            return False
        now = self._clock()
        consumer = lease.consumer
        if timed_out:
            consumer.timed_out += 1
        else:
            consumer.failed += 1
            consumer.heard_ns = now
            consumer.silence_ns = 0
            consumer.extra_ns = 0.0
        consumer.last_rtt_ns = rtt = now - lease.sent_ns
        consumer.dropped_ns = now
        consumer.limit.on_sample(rtt, consumer.out, dropped)
        if consumer.service is not consumer.limit:
            consumer.service.on_sample(rtt, consumer.out, dropped)
        if again:
            self._requeue(lease)
        else:
            lease.fate = Fate.DROPPED
            self._held.discard(lease.key)
        consumer.out -= 1
        self.in_flight -= 1
        if not consumer.out:
            check_room(consumer.limit)
        self._chooser.changed(consumer)
        return True

    def delay(self, lease: Lease, for_ns: int) -> bool:
        """Delay a lease's re-queued item by ``for_ns`` from now. Return whether it was queued."""
        if lease.fate is not _REQUEUED:
            return False
        due_ns = self._clock() + for_ns
        if due_ns < lease.due_ns:  # it may be in the heap already, for later
            self._push_delayed(due_ns, lease)
        lease.due_ns = due_ns
        return True

    def _push_delayed(self, due_ns: int, lease: Lease) -> None:
        self._delays += 1
        heappush(self._delayed, (due_ns, self._delays, lease))

    def split(self, lease: Lease, items: Iterable[Any]) -> list[Lease]:
        """Replace a lease's re-queued item by its parts; return their leases, re-queued too.

        Returns an empty list if the item was not queued.
        """
        if lease.fate is not _REQUEUED:
            return []
        parts = []
        for item in items:
            part = copy(lease)
            part.item = item
            self._queue_again(part)
            parts.append(part)
        self._end_requeued(lease, Fate.DROPPED)
        return parts

    def drop(self, lease: Lease) -> bool:
        """Remove a lease's re-queued item. Return whether it was queued."""
        if lease.fate is not _REQUEUED:
            return False
        self._end_requeued(lease, Fate.DROPPED)
        return True

    def expire(self) -> list[Lease]:
        """Re-queue and return the leases that timed out, by consumer; end pauses that are over."""
        now = self._clock()
        expired = []
        for consumer in self.consumers.values():
            sent = consumer.sent
            if sent and now >= sent[0].sent_ns + self._timeout_ns:
                # The first may have begun late: those behind it time out all the same.
                for lease in [each for each in sent if now >= self._ends_ns(each)]:
                    if self.take_back(lease, dropped=True, again=True, timed_out=True):
                        expired.append(lease)
        self._sweep(now)
        return expired

    def due_ns(self) -> int | None:
        """Return the nanoseconds until the next time-out or end of a pause; None without one."""
        now = self._clock()
        due = []
        for consumer in self.consumers.values():
            if consumer.sent:
                first = consumer.sent[0]
                # The oldest lease times out first, unless its consumer began it late.
                some = (first,) if first.began_ns is None else consumer.sent
                due.append(min(map(self._ends_ns, some)) - now)
            if not consumer.is_open:
                due.append(consumer.opens_ns - now)
        return max(0, min(due)) if due else None

    def _ends_ns(self, lease: Lease) -> int:
        return (lease.sent_ns if lease.began_ns is None else lease.began_ns) + self._timeout_ns

    def _requeue(self, lease: Lease) -> None:
        consumer = lease.consumer
        others = (each for each in lease.failed_at if each.name != consumer.name)
        lease.failed_at = (*others, consumer)
        self._queue_again(lease)

    def _queue_again(self, lease: Lease) -> None:
        lease.fate = _REQUEUED
        self._queue.append(lease)
        self.requeued += 1

    def _end_requeued(self, lease: Lease, fate: Fate) -> None:
        lease.fate = fate
        self.requeued -= 1
        self._held.discard(lease.key)

    def _sweep(self, now: int) -> None:
        """Update each consumer's silence and idle time, and end the pauses that are over by now."""
        self._next_sweep_ns = now + max(_SWEEP_NS, _SWEEP_EACH_NS * len(self.consumers))
        for consumer in self.consumers.values():
            sent = consumer.sent
            while sent and sent[0].fate is not _OUT:
                sent.popleft()
            if len(sent) > 2 * consumer.out + _KEPT:
                # The oldest lease is slow: answered ones behind it would stay until it times out.
                consumer.sent = deque(lease for lease in sent if lease.fate is _OUT)
            service = consumer.service
            silence, extra = 0, 0.0
            if consumer.out:
                # The first answer of an empty queue takes a round trip, later ones a service time.
                silent = now - consumer.heard_ns
                if silent > 4 * service.service_ns + service.base_rtt_ns:
                    silence, extra = silent, 2.0 * silent
            else:
                idle = now - max(consumer.heard_ns, consumer.dropped_ns)
                if idle > _IDLE_NS:
                    # A consumer that is never chosen for its old estimate would never be measured.
                    quicker = _IDLE_FACTOR ** -min(idle / _IDLE_NS, 60.0)
                    extra = service.service_ns * (quicker - 1.0)
            if not consumer.is_open and now >= consumer.opens_ns:
                consumer.is_open = True
            consumer.silence_ns = silence
            consumer.extra_ns = extra
            self._chooser.changed(consumer)
