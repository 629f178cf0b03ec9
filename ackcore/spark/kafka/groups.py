"""Commits to a consumer group: the done offsets of its partitions, after each micro-batch."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Hashable, Iterable, Mapping
from itertools import combinations
from typing import NamedTuple

from ackcore import OffsetState
from ackcore.kafka.cluster import Cluster
from ackcore.kafka.origins import Origin
from ackcore.offsets import decode_metadata
from ackcore.retry import capped_doubling
from ackcore.spark.base.atomic import check_fence
from ackcore.spark.kafka.commits import CommitCache

_log = logging.getLogger("ackcore")

#: A failed commit is repeated with the next micro-batch.  If it took _SLOW_S or longer, the repeat
#: waits for _TIMES its duration, at most _LONGEST_S, because micro-batches wait for commits.
_SLOW_S, _TIMES, _LONGEST_S = 1.0, 10.0, 30.0
#: Seconds until a failed commit triggers a micro-batch by itself: at first, doubled, and at most.
_AGAIN_S, _LONGEST_AGAIN_S = 1.0, 300.0
#: Seconds after which unchanged offsets are committed again, because brokers expire them.
_REPEAT_S = 3600.0

Key = tuple[str, int]


class Teller(NamedTuple):
    """A spout that commits to a group: its name, the group, the brokers, and its partitions or
    sources.
    """

    spout: str
    group_id: str
    bootstrap_servers: str
    of: Collection[Hashable]


def refuse_two_tellers(tellers: Iterable[Teller]) -> None:
    """Raise ValueError if two spouts commit the same partitions to one group.

    A reader that begins with that group would skip records that only one of them has done.
    """
    for one, other in combinations(tellers, 2):
        if one[1:3] == other[1:3] and not set(one.of).isdisjoint(other.of):
            raise ValueError(
                f"spouts {one.spout!r} and {other.spout!r} read the same partitions and both "
                f"commit to group {one.group_id!r}, so that it would have what only one of them "
                "has done; give each a group of its own, or read them by one spout, to which "
                "several bolts may subscribe"
            )


class ToldGroup:
    """A consumer group to which a spout commits.

    Parameters
    ----------
    spout : str
        The name of the spout.
    group_id : str
        The name of the group.
    deployment : int
        The key of the checkpoint whose commits these are.
    """

    def __init__(self, spout: str, group_id: str, deployment: int) -> None:
        self._spout = spout
        self._group_id = group_id
        self._cache = CommitCache(deployment)
        self._origin = Origin.of(None, self._cache.name)
        #: The last confirmed commit of each partition.
        self._told: dict[Key, tuple[int, str]] = {}
        self._repeat_at = self._next_at = 0.0
        #: The number of failed commits in a row, and the time of the next repeat.
        self._failures = 0
        self._again_at: float | None = None
        self._complained = False

    @property
    def is_due(self) -> bool:
        """Whether a failed commit is to be repeated now, by any micro-batch."""
        return self._again_at is not None and time.monotonic() >= self._again_at

    def tell_of_others(
        self, cluster: Cluster, asking: threading.Lock, partitions: Iterable[Key]
    ) -> None:
        """Warn if another deployment is known to have committed to the group."""
        with asking:
            committed = cluster.committed(self._group_id, partitions).found
        for (topic, partition), (offset, metadata) in committed.items():
            known = Origin.read(decode_metadata(topic, partition, offset, metadata).deployment)
            if known.name and known.name != self._origin.name:
                _log.warning(
                    "spout %s: another deployment has committed to group %s of %s-%d; while two "
                    "commit to one group they move its offsets back and forth, and who begins with "
                    "it leaves out what the last one has done: give each a group of its own",
                    *(self._spout, self._group_id, topic, partition),
                )
                return

    def tell(
        self,
        cluster: Cluster,
        asking: threading.Lock,
        done: Mapping[Key, OffsetState],
        topic_ids: Mapping[str, str],
    ) -> dict[Key, int]:
        """Commit the done offsets; return the last committed offset of each partition that has one.

        A failed commit is repeated with the next one. The result has only commits that the broker
        confirmed.

        Parameters
        ----------
        cluster : Cluster
            The cluster that receives the commit.
        asking : threading.Lock
            A lock held during requests: only one thread at a time may use a cluster.
        done : mapping
            The done offsets, by partition.
        topic_ids : mapping from str to str
            The ids of the topics, where known.

        Raises
        ------
        CheckpointInUse
            If another driver has taken over.
        """
        commits = self._cache.commits(done, topic_ids)
        new = {each: one for each, one in commits.items() if self._told.get(each) != one}
        now = time.monotonic()
        if now >= self._repeat_at:
            new, self._repeat_at = commits, now + _REPEAT_S
        if new and now >= self._next_at:
            # Kafka accepts commits from non-members: an older driver's would move the group back.
            check_fence()
            with asking:
                answers = cluster.commit(self._group_id, new)
                while self._cache.learn(new, answers):
                    self._told.update({each: new[each] for each in answers.found})
                    commits = self._cache.commits(done, topic_ids)
                    new = {each: commits[each] for each in answers.failed}
                    answers = cluster.commit(self._group_id, new)
            took_s = time.monotonic() - now
            if answers.failed and took_s >= _SLOW_S:
                self._next_at = now + took_s + min(_TIMES * took_s, _LONGEST_S)
            self._told.update({each: new[each] for each in answers.found})
            self._failures = self._failures + 1 if answers.failed else 0
            self._again_at = self._after_failures(now) if answers.failed else None
            if answers.failed and not self._complained:
                _log.warning(
                    "spout %s: what is done of %d partitions cannot be committed to group %s, "
                    "which is tried again with the next micro-batch: %s",
                    self._spout,
                    len(answers.failed),
                    self._group_id,
                    next(iter(answers.failed.values())).text,
                )
            self._complained = bool(answers.failed)
        elif new and self._again_at is None:
            self._again_at = self._next_at
        return {each: offset for each, (offset, _) in self._told.items()}

    def _after_failures(self, now: float) -> float:
        pause_ms = capped_doubling(
            round(_AGAIN_S * 1000), self._failures, round(_LONGEST_AGAIN_S * 1000)
        )
        return max(self._next_at, now + pause_ms / 1000)
