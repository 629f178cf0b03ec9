"""The form of commit metadata that a group's broker accepts, learned from its answers."""

from __future__ import annotations

from ackcore._records import OffsetState
from ackcore.offsets import KAFKA_LIMIT, LEAST_LIMIT, Commit, encode_state

#: The search ends when the broker's limit is known to a 16th.
_CLOSE = 16


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
