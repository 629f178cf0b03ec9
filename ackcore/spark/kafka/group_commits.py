"""Commits of the done offsets to a consumer group, after each micro-batch."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Hashable, Iterable, Mapping
from itertools import combinations
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ackcore._error_hints import counted
from ackcore._records import Int64s, OffsetState
from ackcore.kafka.cluster import Cluster, PartitionAnswers
from ackcore.kafka.commit_metadata import CommitOrigin, MetadataForm
from ackcore.offsets import Commit, decode_metadata
from ackcore.retry import capped_doubling
from ackcore.spark.base.atomic import check_fence
from ackcore.spark.base.root_ids import distinct
from ackcore.spark.base.schemas import REPLAYED
from ackcore.spark.kafka.plans import OffsetPlan

_log = logging.getLogger("ackcore")

#: A failed commit is repeated with the next micro-batch.  If it took _SLOW_S or longer, the repeat
#: waits for _TIMES its duration, at most _LONGEST_S, because micro-batches wait for commits.
_SLOW_S, _TIMES, _LONGEST_S = 1.0, 10.0, 30.0
#: Seconds until a failed commit triggers a micro-batch by itself: at first, doubled, and at most.
_AGAIN_S, _LONGEST_AGAIN_S = 1.0, 300.0
#: Seconds after which unchanged offsets are committed again, because brokers expire them.
_REPEAT_S = 3600.0

#: The remedy for a failed commit, by the code of the failure.
_WAYS_OUT = {
    "UNKNOWN_MEMBER_ID": ". The cause: a consumer is a member of the group, and Kafka then refuses "
    "the commits of others. Stop that consumer, or give the spout a group_id of its own"
}

_NO_OFFSETS, _NO_ATTEMPTS = np.empty(0, np.int64), np.empty(0, np.int32)

Key = tuple[str, int]


def states(plan: OffsetPlan, waiting: Iterable[pa.Table]) -> dict[Key, OffsetState]:
    """Return the done offsets of each partition after a micro-batch.

    All offsets below the plan's position are done, except those of waiting records. A replayed
    record that waits does not count: it was done when it died.

    ``waiting``: the spout's records that wait for a retry.
    """
    wait = _by_partition(waiting)
    return {
        key: _state(position.next, wait.get(key, _NO_OFFSETS))
        for key, position in plan.positions.items()
    }


def _state(next_: int, waiting: Int64s) -> OffsetState:
    """Return a state with all offsets below ``next_`` done, except the sorted waiting ones."""
    if not len(waiting):  # as most partitions
        return OffsetState(next_, next_, _NO_OFFSETS, _NO_OFFSETS, _NO_OFFSETS, _NO_ATTEMPTS)
    # Offsets from next_ on are of a former topic, or were truncated.
    if waiting[-1] >= next_:
        waiting = waiting[: int(np.searchsorted(waiting, next_))]
    apart = np.ones(len(waiting) + 1, np.bool_)
    np.greater(waiting[1:] - waiting[:-1], 1, out=apart[1:-1])
    starts, ends = waiting[apart[:-1]], waiting[apart[1:]] + 1
    end = next_
    if len(ends) and ends[-1] >= next_:  # no offset above the last run is done
        end, starts, ends = int(starts[-1]), starts[:-1], ends[:-1]
    first = int(starts[0]) if len(starts) else end
    return OffsetState(first, end, starts, ends, _NO_OFFSETS, _NO_ATTEMPTS)


def _by_partition(tables: Iterable[pa.Table]) -> dict[tuple[str, int], Int64s]:
    """Return the offsets of each partition's waiting records, sorted, without replayed records."""
    names = ["topic", "partition", "offset"]
    parts = [table.filter(pc.equal(table[REPLAYED], 0)).select(names) for table in tables]
    rows = pa.concat_tables(parts) if parts else None
    if rows is None or not len(rows):
        return {}
    topics = rows["topic"].combine_chunks().dictionary_encode()
    names, of = topics.dictionary.to_pylist(), topics.indices.to_numpy()
    partitions, offsets = rows["partition"].to_numpy(), rows["offset"].to_numpy()
    order = np.lexsort((offsets, partitions, of))
    of, partitions, offsets = of[order], partitions[order], offsets[order]
    cuts = np.flatnonzero((np.diff(of) != 0) | (np.diff(partitions) != 0)) + 1
    found = {}
    for start, end in zip([0, *cuts.tolist()], [*cuts.tolist(), len(of)], strict=True):
        found[names[of[start]], int(partitions[start])] = distinct(offsets[start:end])
    return found


def _is_same(one: OffsetState, other: OffsetState) -> bool:
    return (
        one[:2] == other[:2]
        and np.array_equal(one.hole_starts, other.hole_starts)
        and np.array_equal(one.hole_ends, other.hole_ends)
    )


class GroupUse(NamedTuple):
    """A spout and the group to which it commits, for `refuse_shared_groups`."""

    spout: str
    group_id: str
    of: Collection[Hashable]  # partitions with their topics' ids, or numbers of sources


def refuse_shared_groups(uses: Iterable[GroupUse]) -> None:
    """Raise ValueError if two spouts commit the same partitions to one group."""
    for one, other in combinations(uses, 2):
        if one.group_id == other.group_id and not set(one.of).isdisjoint(other.of):
            raise ValueError(
                f"spouts {one.spout!r} and {other.spout!r} read the same partitions and both "
                f"commit to group {one.group_id!r}: a record would be committed when only one of "
                "them has done it; give each spout a group of its own, or read the partitions by "
                "one spout, to which several bolts may subscribe"
            )


class GroupCommitter:
    """A committer of a spout's done offsets to its consumer group. It repeats failed commits.

    ``spout``: the name of the spout. ``deployment``: the key of the checkpoint.

    Attributes: ``first_not_done``: by partition, the first offset that was not done when the spout
    began the partition, or at its first commit.
    """

    def __init__(self, spout: str, group_id: str, deployment: int) -> None:
        self._spout = spout
        self._group_id = group_id
        #: The deployment, in the form that `CommitOrigin` takes.
        self._name = f"{deployment % 2**64:016x}"
        self._form = MetadataForm()
        #: By partition the origin, the done offsets and the commit that was encoded last.
        self._encoded: dict[Key, tuple[int, OffsetState, Commit]] = {}
        self.first_not_done: dict[Key, int] = {}
        #: The last confirmed commit of each partition.
        self._confirmed: dict[Key, tuple[int, str]] = {}
        self._repeat_at = self._next_at = 0.0
        #: The number of failed commits in a row, and the time of the next repeat.
        self._failures = 0
        self._again_at: float | None = None
        self._complained = False

    @property
    def is_due(self) -> bool:
        """Whether a micro-batch is due to repeat a failed commit."""
        return self._again_at is not None and time.monotonic() >= self._again_at

    def warn_of_others(self, cluster: Cluster, partitions: Iterable[Key]) -> None:
        """Log one warning, if the group's last commit of a partition is from another deployment.

        Partitions whose commit cannot be read are ignored.
        """
        committed = cluster.committed(self._group_id, partitions).found
        for (topic, partition), (offset, metadata) in committed.items():
            known = CommitOrigin.read(
                decode_metadata(topic, partition, offset, metadata).deployment
            )
            if known.name and known.name != CommitOrigin.of(None, self._name).name:
                _log.warning(
                    "spout %s: another deployment has committed to group %s of %s-%d: the two move "
                    "its offsets back and forth, and a reader that begins at them skips records "
                    "that only one deployment has done; give each deployment a group of its own",
                    *(self._spout, self._group_id, topic, partition),
                )
                return

    def commit(
        self, cluster: Cluster, done: Mapping[Key, OffsetState], topic_ids: Mapping[str, str]
    ) -> dict[Key, int]:
        """Commit the done offsets. Return the last confirmed offset of each partition.

        For a partition without one, returns its offset in `first_not_done`. Sends only changes, and
        once an hour all. The next call repeats a failed commit; of several failures in a row, the
        first is logged. After a slow failure, nothing is sent for up to 30 s. Raises
        CheckpointInUse if another driver has taken over the checkpoint.

        ``done``: the done offsets by partition. ``topic_ids``: the ids of the topics, where known.
        """
        for each, state in done.items():
            self.first_not_done.setdefault(each, state.committable)
        commits = self._commits(done, topic_ids)
        new = {each: one for each, one in commits.items() if self._confirmed.get(each) != one}
        now = time.monotonic()
        if now >= self._repeat_at:
            new, self._repeat_at = commits, now + _REPEAT_S
        if new and now >= self._next_at:
            # Kafka accepts commits from non-members: an older driver's would move the group back.
            check_fence()
            answers = cluster.commit(self._group_id, new)
            while self._are_too_large(new, answers):
                self._confirmed.update({each: new[each] for each in answers.found})
                commits = self._commits(done, topic_ids)
                new = {each: commits[each] for each in answers.failed}
                answers = cluster.commit(self._group_id, new)
            took_s = time.monotonic() - now
            if answers.failed and took_s >= _SLOW_S:
                self._next_at = now + took_s + min(_TIMES * took_s, _LONGEST_S)
            self._confirmed.update({each: new[each] for each in answers.found})
            self._failures = self._failures + 1 if answers.failed else 0
            self._again_at = self._after_failures(now) if answers.failed else None
            if answers.failed and not self._complained:
                failure = next(iter(answers.failed.values()))
                _log.warning(
                    "spout %s: the offsets of %s could not be committed to group %s: %s. They are "
                    "in the checkpoint, and are committed with the next micro-batch, or at the "
                    "query's next start if none follows%s",
                    self._spout,
                    counted(len(answers.failed), "partition"),
                    self._group_id,
                    failure.text,
                    _WAYS_OUT.get(failure.code, ""),
                )
            self._complained = bool(answers.failed)
        elif new and self._again_at is None:
            self._again_at = self._next_at
        confirmed = {each: offset for each, (offset, _) in self._confirmed.items()}
        return {**self.first_not_done, **confirmed}

    def _commits(
        self, done: Mapping[Key, OffsetState], topic_ids: Mapping[str, str]
    ) -> dict[Key, Commit]:
        """Return offset and metadata to commit for each partition; encode only those that changed.

        The arguments are those of `commit`.
        """
        origins = {
            topic: CommitOrigin.of(topic_ids.get(topic), self._name).deployment
            for topic in {topic for topic, _ in done}
        }
        found = {}
        for each, state in done.items():
            last, now = self._encoded.get(each), origins[each[0]]
            if last is not None and last[0] == now and _is_same(last[1], state):
                found[each] = last
            else:
                found[each] = now, state, self._form.encode(*each, 0, state, now)
        self._encoded = found
        return {each: commit for each, (*_, commit) in found.items()}

    def _are_too_large(self, sent: Mapping[Key, Commit], answers: PartitionAnswers[Commit]) -> bool:
        """Return whether metadata were refused as too large; if so, let all be encoded again.

        Also adapts the length of later metadata to the answers.
        """
        for each in answers.found:
            self._form.accepted(sent[each].metadata)
        refused = [
            sent[each].metadata
            for each, failure in answers.failed.items()
            if failure.code == "OFFSET_METADATA_TOO_LARGE"
        ]
        if not self._form.too_large(max(refused, key=len, default="")):
            return False
        self._encoded = {}
        return True

    def _after_failures(self, now: float) -> float:
        pause_ms = capped_doubling(
            round(_AGAIN_S * 1000), self._failures, round(_LONGEST_AGAIN_S * 1000)
        )
        return max(self._next_at, now + pause_ms / 1000)
