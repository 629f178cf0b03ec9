"""The choice of a consumer for the next tuple, among those with room.

A controller tells its chooser which consumers there are and whenever one has changed, and asks it
for one. A chooser serves one controller, under its lock, and keeps what it needs in lists by slot:
with a dozen consumers the smallest of a list of floats costs less than any cleverer structure
would.
"""

from __future__ import annotations

import random
from collections.abc import Hashable
from hashlib import blake2b
from math import inf, sqrt
from typing import ClassVar, Protocol

from ackcore._reference.mix import mix
from ackcore.flow.consumers import Consumer

_CLOSED = inf  # the score of a slot without room, or without a consumer
_UNKNOWN_NS = 1e6  # the service time of a consumer that was never acked


class Chooser(Protocol):
    """The choice of a consumer for the next tuple.  Used by one thread at a time."""

    @property
    def keyed(self) -> bool:
        """Whether a tuple's key decides: it must be given, and one tuple of a key is out at
        most."""

    def join(self, consumer: Consumer) -> None:
        """Take a consumer up, at its slot; `changed` follows."""

    def leave(self, consumer: Consumer) -> None:
        """Forget a consumer; its slot may be another's from now on."""

    def changed(self, consumer: Consumer) -> None:
        """Take in that its limit, its load, its service time or its silence is another now."""

    def choose(self, key: Hashable, avoid: tuple[Consumer, ...]) -> Consumer | None:
        """Return a consumer that has room, or None.

        Parameters
        ----------
        key : hashable
            The tuple's, or None.
        avoid : tuple of Consumer
            Where the tuple failed, the last at the end. None of them is taken while another is
            open, even if that has no room now; if none is, the first ones may be.
        """


class _ByScore:
    """The consumer of the lowest score; infinite for those without room."""

    keyed: ClassVar[bool] = False

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)
        self._scores: list[float] = []
        self._consumers: list[Consumer | None] = []

    def join(self, consumer: Consumer) -> None:
        """See `Chooser.join`."""
        while len(self._scores) <= consumer.slot:
            self._scores.append(_CLOSED)
            self._consumers.append(None)
        if self._consumers[consumer.slot] is not None:
            raise ValueError("this chooser serves a controller already; make one for each")
        self._consumers[consumer.slot] = consumer

    def leave(self, consumer: Consumer) -> None:
        """See `Chooser.leave`."""
        self._scores[consumer.slot] = _CLOSED
        self._consumers[consumer.slot] = None

    def changed(self, consumer: Consumer) -> None:
        """See `Chooser.changed`."""
        raise NotImplementedError

    def choose(self, key: Hashable, avoid: tuple[Consumer, ...]) -> Consumer | None:
        """See `Chooser.choose`."""
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

    def _pick(self) -> Consumer | None:
        scores = self._scores
        if not scores:
            return None
        least = min(scores)
        return None if least == _CLOSED else self._consumers[scores.index(least)]

    def _avoided(self, avoid: tuple[Consumer, ...]) -> tuple[Consumer, ...]:
        """Return the last of them, as many as leave another open."""
        opened = [c for c in self._consumers if c is not None and c.is_open]
        while avoid and all(c in avoid for c in opened):
            avoid = avoid[1:]
        return avoid


class Idlest(_ByScore):
    """The one that is likely to be done first, within reason: the default.

    Lowest ``(outstanding + 1) * sqrt(service time)``. Twice the silence of a consumer that should
    have answered counts as service time; one that has been idle for more than a second counts as
    1.5 times quicker for each, so that one which was slow, or dead, is tried again. By the service
    time instead of its root, slow consumers would idle until the queues of the quick ones take as
    long: hardly better on the whole, and much less fair. Ties are broken at random, once and for
    all, by a consumer's own part in a million.

    Parameters
    ----------
    seed : int, optional
        Of the random ties; by default not to be foreseen.
    """

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(seed)
        self._shares: list[float] = []

    def join(self, consumer: Consumer) -> None:
        """See `Chooser.join`."""
        super().join(consumer)
        while len(self._shares) < len(self._scores):
            # Several producers must not all begin with the same consumer.
            self._shares.append(1.0 + self._random.random() * 1e-6)

    def changed(self, consumer: Consumer) -> None:
        """See `Chooser.changed`."""
        slot = consumer.slot
        out = consumer.out
        if consumer.is_open and out < consumer.limit.limit:
            service = consumer.service
            nanoseconds = service.service_ns
            if not consumer.acked:
                # All are alike, and a little slow: what is known goes first. One that failed at
                # once was not quick.
                nanoseconds = max(nanoseconds, _UNKNOWN_NS * service.penalty)
            nanoseconds += consumer.extra_ns
            self._scores[slot] = (out + 1) * sqrt(nanoseconds) * self._shares[slot]
        else:
            self._scores[slot] = _CLOSED


class ByKey(_ByScore):
    """Always the same one for a key, and the tuples of a key one after the other.

    The consumer is the highest by a hash of key and name (rendezvous hashing: Thaler and
    Ravishankar, IEEE/ACM ToN 6(1), 1998), so that one that comes or goes moves no keys but its own.
    Its room is waited for. Since a tuple that fails is sent again, order is kept only with one
    tuple of a key out at a time: the controller sends the next when the one before was acked or
    dropped.

    A key is hashed by its ``repr``, which must be the same whenever the key is equal.
    """

    keyed: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self._salts: list[int] = []

    def join(self, consumer: Consumer) -> None:
        """See `Chooser.join`."""
        super().join(consumer)
        while len(self._salts) < len(self._scores):
            self._salts.append(0)
        self._salts[consumer.slot] = _hashed(consumer.name)

    def changed(self, consumer: Consumer) -> None:
        """See `Chooser.changed`."""
        self._scores[consumer.slot] = 0.0 if consumer.has_room else _CLOSED

    def choose(self, key: Hashable, avoid: tuple[Consumer, ...]) -> Consumer | None:
        """See `Chooser.choose`; a paused consumer's keys wait for it, if its pause says so."""
        avoid = self._avoided(avoid)
        hashed = _hashed(key)
        best, highest = None, -1
        for consumer in self._consumers:
            if consumer is None or consumer in avoid:
                continue
            if consumer.is_open or (consumer.keys_wait and not avoid):
                weight = mix(hashed ^ self._salts[consumer.slot])
                if weight > highest:
                    best, highest = consumer, weight
        return best if best is not None and best.has_room else None


def _hashed(key: Hashable) -> int:
    digest = blake2b(repr(key).encode("utf-8", "surrogatepass"), digest_size=8)
    return int.from_bytes(digest.digest(), "little")
