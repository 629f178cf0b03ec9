"""The topic and deployment of a commit: 64 bits in its metadata.

A topic that was made anew has the name and partitions of the one before, and a commit that crossed
its deletion stands beside an offset of the new one.  So the metadata says which topic, by its id;
and whose it is: of a `Consumer`, for which ``force_from_start`` the partition has begun, of a
topology on Spark its checkpoint.  Of 64 bits 24 tell these from all that others commit, 20 are of
the topic's id and 20 of the name: two topics, or names, are taken for one with odds of one in a
million.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple

#: Of the topic, and of the name; the 24 above them tell these commits from others.
_BITS = 20
_MASK = (1 << _BITS) - 1
_TAG = int.from_bytes(b"acc")


class Origin(NamedTuple):
    """The topic and deployment of a commit; 0 where unknown or unnamed."""

    topic: int
    name: int

    @classmethod
    def of(cls, topic_id: str | None, name: str | None) -> Origin:
        """Return that of a topic's id and a deployment's name."""
        return cls(_bits(topic_id), _bits(name))

    @classmethod
    def read(cls, deployment: int | None) -> Origin:
        """Take a commit's deployment apart; nothing is known of one that is not an origin's.

        Checkpoints have committed their keys alone, once, and no topic with them.
        """
        if deployment is None or deployment % 2**64 >> 2 * _BITS != _TAG:
            return cls(0, 0)
        return cls(deployment >> _BITS & _MASK, deployment & _MASK)

    @property
    def deployment(self) -> int:
        """The deployment, in the form that `encode_metadata` takes."""
        return (_TAG << 2 * _BITS) + (self.topic << _BITS) + self.name

    def is_other_topic(self, now: Origin) -> bool:
        """Whether it is of another topic than the one that is there now, as far as is known."""
        return bool(self.topic and now.topic) and self.topic != now.topic


def _bits(text: str | None) -> int:
    if text is None:
        return 0
    digest = blake2b(text.encode(), digest_size=8, person=b"ackcore.origin").digest()
    return int.from_bytes(digest, "little") % _MASK + 1
