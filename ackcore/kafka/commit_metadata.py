"""The metadata of a commit: its topic and deployment, and the length that the broker accepts."""

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
    """The topic and deployment of a commit, in 64 bits of its metadata; 0 where unknown or unnamed.

    A topic that was created again has the name and partitions of the former one, and a late commit
    for the former topic may be stored for the new one. So the metadata holds the topic's id and the
    deployment. The deployment of a `Consumer` is the ``force_from_start`` for which the partition
    has begun. That of a topology on Spark is its checkpoint. Of the 64 bits, 24 mark commits of
    ackcore, 20 are from the topic's id and 20 from the deployment's name. Two topics, or names, are
    confused with odds of one in a million.
    """

    topic: int
    name: int

    @classmethod
    def of(cls, topic_id: str | None, name: str | None) -> CommitOrigin:
        """Return the origin of a topic's id and a deployment's name."""
        return cls(_bits(topic_id), _bits(name))

    @classmethod
    def read(cls, deployment: int | None) -> CommitOrigin:
        """Return the origin in a commit's deployment; an unknown one (0, 0) if it holds none.

        A deployment without the mark of 24 bits holds no origin.
        """
        if deployment is None or deployment % 2**64 >> 2 * _BITS != _TAG:
            return cls(0, 0)
        return cls(deployment >> _BITS & _MASK, deployment & _MASK)

    @property
    def deployment(self) -> int:
        """The deployment, in the form that `encode_metadata` takes."""
        return (_TAG << 2 * _BITS) + (self.topic << _BITS) + self.name

    def is_other_topic(self, now: CommitOrigin) -> bool:
        """Return whether both topics are known and differ."""
        return bool(self.topic and now.topic) and self.topic != now.topic


def _bits(text: str | None) -> int:
    if text is None:
        return 0
    digest = blake2b(text.encode(), digest_size=8, person=b"ackcore.origin").digest()
    return int.from_bytes(digest, "little") % _MASK + 1


class MetadataForm:
    """The length limit of metadata, and whether it has wide characters.

    Brokers do not publish their limit. It is found by bisection, between the longest accepted
    metadata and the shortest refused. Most brokers count characters, some count bytes. So the
    search uses no wide characters. They are tried again once, at the limit found.
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
        """Return the commit of a partition in this state; see `encode_state`."""
        of = topic, partition, generation, state, deployment
        limit = self._limit
        commit = encode_state(*of, limit=max(limit, LEAST_LIMIT), wide=self._wide)
        return commit if len(commit.metadata) <= limit else commit._replace(metadata="")

    def taken(self, metadata: str) -> None:
        """Record that the broker accepted this metadata."""
        self._taken = max(self._taken, len(metadata))
        if not self._wide and self._is_known and self._try_wide_again:
            self._wide, self._try_wide_again = True, False

    def refused(self, metadata: str) -> bool:
        """Record that the broker found this metadata too large. Return whether to try again.

        The empty string changes nothing, and returns False.
        """
        size = len(metadata)
        if not metadata.isascii():
            self._wide = False
        elif 0 < size < self._refused:
            self._refused = size
            if size <= self._taken:  # the broker's limit has changed
                self._taken = 0
        return size > 0
