"""The metadata of a commit: the origin of the commit, and the length that the broker accepts."""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple

from ackcore._records import OffsetState
from ackcore.offsets import KAFKA_LIMIT, LEAST_LIMIT, Commit, encode_state

#: Bits of the topic, and of the name.  The 24 bits above them mark commits of ackcore.
_BITS = 20
_MASK = (1 << _BITS) - 1
_TAG = int.from_bytes(b"acc")


#: The search ends when the broker's limit is known to a 16th.
_CLOSE = 16


class CommitOrigin(NamedTuple):
    """Hashes of the topic's id and of the deployment's name, in the metadata of a commit.

    A reader of the commit compares them with its own, to detect a commit of a former topic of the
    same name, or of another deployment. The name is the ``force_from_start`` of a `Consumer`, or
    the key of a checkpoint on Spark. The origin takes 64 bits: 24 mark commits of ackcore, and each
    hash has 20. Two topics, or two names, have the same hash with odds of one in a million.
    """

    topic: int  # 0 if the id is unknown
    name: int  # 0 without a name

    @classmethod
    def of(cls, topic_id: str | None, name: str | None) -> CommitOrigin:
        """Return the hashes of a topic's id and of a deployment's name; None has the hash 0."""
        return cls(_bits(topic_id), _bits(name))

    @classmethod
    def read(cls, deployment: int | None) -> CommitOrigin:
        """Return the origin with this `deployment`; (0, 0) if it is None or not of ackcore."""
        if deployment is None or deployment % 2**64 >> 2 * _BITS != _TAG:
            return cls(0, 0)
        return cls(deployment >> _BITS & _MASK, deployment & _MASK)

    @property
    def deployment(self) -> int:
        """The origin as 64 bits, which `encode_state` puts into the metadata."""
        return (_TAG << 2 * _BITS) + (self.topic << _BITS) + self.name

    def is_other_topic(self, now: CommitOrigin) -> bool:
        """Return whether both topic ids are known and differ."""
        return bool(self.topic and now.topic) and self.topic != now.topic


def _bits(text: str | None) -> int:
    if text is None:
        return 0
    digest = blake2b(text.encode(), digest_size=8, person=b"ackcore.origin").digest()
    return int.from_bytes(digest, "little") % _MASK + 1


class MetadataForm:
    """Encodes done offsets as metadata of a length that the broker accepts.

    Brokers do not publish their limit. It is found by bisection, between the longest accepted
    metadata and the shortest refused. Most brokers count characters, some count bytes. So the
    search uses no characters of several bytes. They are tried again once, at the limit found.
    """

    def __init__(self) -> None:
        self._wide = self._try_wide_again = True
        self._taken, self._refused = 0, KAFKA_LIMIT + 1

    @property
    def _is_known(self) -> bool:
        return self._refused - self._taken <= self._refused // _CLOSE

    @property
    def _limit(self) -> int:
        if self._refused > KAFKA_LIMIT:
            return KAFKA_LIMIT
        if self._is_known:
            return self._taken
        # Metadata below the least limit is not shortened: it is sent whole or left out.
        return min(max((self._taken + self._refused) // 2, LEAST_LIMIT), self._refused - 1)

    def encode(
        self, topic: str, partition: int, generation: int, state: OffsetState, deployment: int
    ) -> Commit:
        """Return the offset and the metadata to commit for a partition in this state.

        ``generation``: the number of the assignment. ``deployment``: the 64 bits of a
        `CommitOrigin`. If even the shortest metadata are too long for the broker, they are "".
        """
        of = topic, partition, generation, state, deployment
        limit = self._limit
        commit = encode_state(*of, limit=max(limit, LEAST_LIMIT), wide=self._wide)
        return commit if len(commit.metadata) <= limit else commit._replace(metadata="")

    def accepted(self, metadata: str) -> None:
        """Record that the broker accepted this metadata: later ones may be as long.

        Once the limit is known, they may have characters of several bytes again.
        """
        self._taken = max(self._taken, len(metadata))
        if not self._wide and self._is_known and self._try_wide_again:
            self._wide, self._try_wide_again = True, False

    def too_large(self, metadata: str) -> bool:
        """Make later metadata shorter, or ASCII only, after the broker refused some as too large.

        ``metadata``: the longest that was refused, or "" if none was; then nothing changes. Returns
        False for "", else True: the caller encodes the states again, and sends new commits.
        """
        size = len(metadata)
        if not metadata.isascii():
            self._wide = False
        elif 0 < size < self._refused:
            self._refused = size
            if size <= self._taken:  # the broker's limit has changed
                self._taken = 0
        return size > 0
