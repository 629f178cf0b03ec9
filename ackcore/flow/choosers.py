"""The choice of a consumer for the next tuple, among those with room.

A controller adds consumers to its chooser, reports each change of one, and requests the next one. A
chooser serves one controller, under its lock, and has lists with an entry per slot: for a dozen
consumers, the minimum of a list of floats costs less than any other structure.
"""

from __future__ import annotations

import random
from collections.abc import Hashable
from hashlib import blake2b
from math import inf, sqrt
from typing import ClassVar

from ackcore._reference.id_hashes import mix
from ackcore.flow.consumers import FlowConsumer

_CLOSED = inf  # the score of a slot without room, or without a consumer
_UNKNOWN_NS = 1e6  # the service time of a consumer that was never acked


class Chooser:
    """The choice of the consumer with the lowest score; among equals, of the lowest slot.

    Here all consumers with room have the same score. Subclasses compute other scores in `changed`,
    or override `choose`. Not thread-safe.
    """

    #: Whether the choice depends on the tuple's key. Each tuple then needs a key, and at most one
    #: tuple of a key is outstanding.
    keyed: ClassVar[bool] = False

    def __init__(self) -> None:
        self._scores: list[float] = []
        self._consumers: list[FlowConsumer | None] = []

    def join(self, consumer: FlowConsumer) -> None:
        """Add a consumer at its slot, its place in lists; raise ValueError if another has it.

        The controller then calls `changed`.
        """
        while len(self._scores) <= consumer.slot:
            self._scores.append(_CLOSED)
            self._consumers.append(None)
        if self._consumers[consumer.slot] is not None:
            raise ValueError(
                "this chooser belongs to another FlowController; create one for each controller"
            )
        self._consumers[consumer.slot] = consumer

    def leave(self, consumer: FlowConsumer) -> None:
        """Remove a consumer. Another one may use its slot from now on."""
        self._scores[consumer.slot] = _CLOSED
        self._consumers[consumer.slot] = None

    def changed(self, consumer: FlowConsumer) -> None:
        """Update a consumer's score after a change of its limit, load, service time or silence."""
        self._scores[consumer.slot] = 0.0 if consumer.has_room else _CLOSED

    def choose(self, key: Hashable, avoid: tuple[FlowConsumer, ...]) -> FlowConsumer | None:
        """Return a consumer that has room, or None.

        ``key``: the tuple's key, or None. ``avoid``: the consumers at which the tuple failed, the
        latest at the end. None of them is chosen while another consumer is open, even if that has
        no room now. If no other is open, the earliest ones may be chosen.
        """
        if not (avoid and (avoid := self._avoided(avoid))):
            return self._pick()
        kept = self._scores
        self._scores = [
            _CLOSED if consumer in avoid else score
            for consumer, score in zip(self._consumers, kept, strict=True)
        ]
        try:
            return self._pick()
        finally:
            self._scores = kept

    def _pick(self) -> FlowConsumer | None:
        scores = self._scores
        if not scores:
            return None
        least = min(scores)
        return None if least == _CLOSED else self._consumers[scores.index(least)]

    def _avoided(self, avoid: tuple[FlowConsumer, ...]) -> tuple[FlowConsumer, ...]:
        """Return ``avoid`` without its earliest consumers, until one that is open is not in it.

        The result is empty if no consumer is open, or if the only open one is the last in it.
        """
        opened = [c for c in self._consumers if c is not None and c.is_open]
        while avoid and all(c in avoid for c in opened):
            avoid = avoid[1:]
        return avoid


class Idlest(Chooser):
    """The default: the consumer that is likely to be done first.

    It has the lowest ``(outstanding + 1) * sqrt(service time)``. Twice the silence of a consumer
    that should have answered is added to its service time. After more than a second without tuples,
    a consumer counts as 1.5 times faster for each second, so that one that was slow, or dead, is
    tried again. The root keeps slow consumers from idling. Ties are broken by a constant random
    factor of each consumer, of at most a millionth.

    ``seed``: the seed of the random factors; by default they are unpredictable.
    """

    def __init__(self, seed: int | None = None) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._shares: list[float] = []

    def join(self, consumer: FlowConsumer) -> None:
        """Add a consumer, and draw the random factor of its slot."""
        super().join(consumer)
        while len(self._shares) < len(self._scores):
            # Several producers must not all begin with the same consumer.
            self._shares.append(1.0 + self._random.random() * 1e-6)

    def changed(self, consumer: FlowConsumer) -> None:
        """Update a consumer's score after a change; see `Idlest`. Lower is better."""
        slot = consumer.slot
        out = consumer.out
        if consumer.is_open and out < consumer.limit.limit:
            service = consumer.service
            nanoseconds = service.service_ns
            if not consumer.acked:
                # Unknown consumers count as equal and a little slow, so that known ones go first.
                # A consumer that failed at once is not fast.
                nanoseconds = max(nanoseconds, _UNKNOWN_NS * service.penalty)
            nanoseconds += consumer.extra_ns
            self._scores[slot] = (out + 1) * sqrt(nanoseconds) * self._shares[slot]
        else:
            self._scores[slot] = _CLOSED


class ByKey(Chooser):
    """The same consumer for all tuples of a key, one tuple at a time.

    The consumer has the highest hash of key and name (rendezvous hashing: Thaler and Ravishankar,
    IEEE/ACM ToN 6(1), 1998). So a consumer that joins or leaves moves no keys but its own. Tuples
    wait until it has room. Since a failed tuple is sent again, order requires that only one tuple
    of a key is outstanding: the controller sends the next one after an ack or a drop.

    A key is hashed by its ``repr``, which must be equal for equal keys.
    """

    keyed: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self._salts: list[int] = []

    def join(self, consumer: FlowConsumer) -> None:
        """Add a consumer, and hash its name."""
        super().join(consumer)
        while len(self._salts) < len(self._scores):
            self._salts.append(0)
        self._salts[consumer.slot] = _hashed(consumer.name)

    def choose(self, key: Hashable, avoid: tuple[FlowConsumer, ...]) -> FlowConsumer | None:
        """Return the consumer of a key if it has room, or None.

        Those in ``avoid``, at which the tuple failed, are passed over while another one is open.
        While the key's consumer is paused with ``keys_wait``, tuples that did not fail wait for it.
        """
        failed = bool(avoid)
        avoid = self._avoided(avoid)
        hashed = _hashed(key)
        best, highest = None, -1
        for consumer in self._consumers:
            if consumer is None or consumer in avoid:
                continue
            if consumer.is_open or (consumer.keys_wait and not failed):
                weight = mix(hashed ^ self._salts[consumer.slot])
                if weight > highest:
                    best, highest = consumer, weight
        return best if best is not None and best.has_room else None


def _hashed(key: Hashable) -> int:
    digest = blake2b(repr(key).encode("utf-8", "surrogatepass"), digest_size=8)
    return int.from_bytes(digest.digest(), "little")
