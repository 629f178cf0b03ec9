"""The topic and deployment of a commit: 64 bits in its metadata.

A topic that was created again has the name and partitions of the former one, and a late commit for
the former topic may be stored for the new one. So the metadata holds the topic's id and the
deployment. The deployment of a `Consumer` is the ``force_from_start`` for which the partition has
begun. That of a topology on Spark is its checkpoint. Of the 64 bits, 24 mark commits of ackcore, 20
are from the topic's id and 20 from the deployment's name. Two topics, or names, are confused with
odds of one in a million.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple

#: Bits of the topic, and of the name.  The 24 bits above them mark commits of ackcore.
_BITS = 20
_MASK = (1 << _BITS) - 1
_TAG = int.from_bytes(b"acc")


class Origin(NamedTuple):
    """The topic and deployment of a commit; 0 where unknown or unnamed."""

    topic: int
    name: int

    @classmethod
    def of(cls, topic_id: str | None, name: str | None) -> Origin:
        """Return the origin of a topic's id and a deployment's name."""
        return cls(_bits(topic_id), _bits(name))

    @classmethod
    def read(cls, deployment: int | None) -> Origin:
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

    def is_other_topic(self, now: Origin) -> bool:
        """Return whether both topics are known and differ."""
        return bool(self.topic and now.topic) and self.topic != now.topic


def _bits(text: str | None) -> int:
    if text is None:
        return 0
    digest = blake2b(text.encode(), digest_size=8, person=b"ackcore.origin").digest()
    return int.from_bytes(digest, "little") % _MASK + 1
