"""The plans and commits of one spout that reads Kafka."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import pyarrow as pa

from ackcore.kafka.cluster import (
    Cluster,
    ClusterFailed,
    PartitionFailure,
    TopicPartition,
    UnknownTopics,
    Watermarks,
)
from ackcore.kafka.ranges import OffsetRange
from ackcore.kafka.spout import KafkaSpout
from ackcore.kafka.start_positions import MADE_ANEW, time_ms
from ackcore.kafka.truncations import truncations
from ackcore.offsets import Commit, decode_metadata
from ackcore.spark.kafka.group_commits import GroupCommitter, Key, states
from ackcore.spark.kafka.plans import Intake, OffsetPlan, Position, evenly, shares
from ackcore.spark.kafka.spout_starts import (
    TOO_FAR_BEHIND,
    PartitionFacts,
    Start,
    decide,
    without_deleted,
)

_log = logging.getLogger("ackcore")

#: Offsets by topic and partition.
Offsets = Mapping[Key, int]


class OffsetsRefused(RuntimeError):
    """Offsets were deleted or would be skipped, and the spout has ``lost="refuse"``."""


class SpoutOffsets:
    """The planner of one `KafkaSpout`'s offsets. It also commits done offsets to the group.

    It runs on the driver. When it is made, it looks up the partitions, and raises UnknownTopics or
    ClusterFailed if it cannot. ``name``: the name of the spout. ``deployment``: the key of the
    checkpoint.

    Attributes: ``partitions``: the partitions at the last look-up, in order. ``intake``: the choice
    of the number of offsets.
    """

    def __init__(self, name: str, spout: KafkaSpout, deployment: int) -> None:
        self.name = name
        self.spout = spout
        #: The plan of the last done micro-batch.
        self._done: OffsetPlan | None = None
        self._cluster = Cluster(spout.client)
        #: The offsets at which the query ends; None if it runs on.
        self._until: dict[Key, int] | None = None
        self.partitions: list[TopicPartition] = []
        #: Those of them whose ends the last look-up returned.
        self._answered: Collection[Key] = ()
        #: The ids of their topics, and the time of the next look-up.
        self._topic_ids: dict[str, str] = {}
        self._refresh_at = 0.0
        #: The leader epochs of partitions, where known.
        self._epochs: dict[Key, int] = {}
        self._was_read = False
        self._group = (
            None if spout.group_id is None else GroupCommitter(name, spout.group_id, deployment)
        )
        #: The last partition that had a share when there was not room for all; see `shares`.
        self._turn: Key | None = None
        self.intake = Intake(spout)
        self._refresh()

    def close(self) -> None:
        """Close the connections."""
        self._cluster.close()

    @property
    def identities(self) -> list[tuple[str, TopicPartition]]:
        """The partitions with their topics' ids, which differ between clusters.

        If the brokers have no topic ids, their addresses replace the ids.
        """
        servers = self.spout.client.bootstrap_servers
        return [(self._topic_ids.get(one.topic, servers), one) for one in self.partitions]

    # -- partitions and their ends ----------------------------------------------------------------

    def _refresh(self) -> None:
        """Look up the partitions if that is due, by ``refresh_s`` or after a change of leaders.

        Warns of topics that are missing since then. Raises UnknownTopics or ClusterFailed if the
        look-up fails.
        """
        if time.monotonic() < self._refresh_at:
            return
        # After the first look-up, a topic may have been deleted.
        found = self._cluster.partitions(
            self.spout.topics, pattern=self.spout.pattern, missing_ok=self._was_read
        )
        there = {one.topic for one in found}
        self._warn_of_missing({one.topic for one in self.partitions if one.topic not in there})
        self._was_read = True
        self.partitions = [one.key for one in found]
        self._topic_ids = {one.topic: one.topic_id for one in found if one.topic_id is not None}
        self._refresh_at = time.monotonic() + self.spout.refresh_s

    def _warn_of_missing(self, topics: Collection[str]) -> None:
        """Warn of topics that the last look-up found and this one did not."""
        if not topics:
            return
        try:
            self._cluster.partitions(topics)
        except (UnknownTopics, ClusterFailed) as error:
            _log.warning(
                "spout %s cannot read a topic that was deleted, or that this user may not read. "
                "Other topics are read, and this one once it can be read again: %s",
                self.name,
                error,
            )

    def _bounds(
        self, before: OffsetPlan | None = None, *, all_of_them: bool = False
    ) -> dict[Key, Watermarks]:
        """Return the first offset and the end of each partition whose leader answers, in order.

        Raises ConnectionError if none answers, or with ``all_of_them`` if one does not; and
        ClusterFailed or UnknownTopics if the partitions are to be looked up, and cannot be.
        ``before``: the last plan. The end is not below its position if the log reaches it.
        """
        try:
            self._refresh()
            positions = {one: _next(before, one, 0) for one in self.partitions} if before else {}
            answers = self._cluster.watermarks(self.partitions, positions)
        except Exception:
            self._refresh_at, self._answered = 0.0, ()
            raise
        self._answered = answers.found.keys()
        if answers.failed:
            self._refresh_at = 0.0  # a topic may be deleted, or a leader may have changed
            if all_of_them or not answers.found:
                raise _unanswered("the first and last offset", answers.failed)
        epochs: dict[Key, int] = {
            each: one.epoch for each, one in answers.found.items() if one.epoch is not None
        }
        if any(self._epochs.get(each, epoch) != epoch for each, epoch in epochs.items()):
            self._refresh_at = 0.0  # partitions that were moved may come with new ones
        self._epochs.update(epochs)
        return {each: answers.found[each] for each in self.partitions if each in answers.found}

    def ends(self, *, all_of_them: bool = False) -> dict[Key, int]:
        """Return the end of each partition whose leader answers.

        Raises ConnectionError if none does, or with ``all_of_them`` if one does not; ClusterFailed
        or UnknownTopics if the partitions cannot be looked up.
        """
        marks = self._bounds(all_of_them=all_of_them)
        return {each: high for each, (_, high) in marks.items()}

    def end_here(self) -> None:
        """Let the query end at the offsets at which all partitions end now.

        Raises ConnectionError, ClusterFailed or UnknownTopics if one of them is unknown.
        """
        self._until = self.ends(all_of_them=True)

    def has_new(self) -> bool:
        """Return whether a micro-batch should run: for records that no finished one has taken.

        Also true before the first one, and if a topic was created again, a log was truncated or a
        leader is new. Raises ConnectionError if no leader answers, and ClusterFailed or
        UnknownTopics if the partitions cannot be looked up.
        """
        marks = self._bounds(self._done)
        if self._done is None or self._is_recreated(self._done, marks):
            return True
        # A partition that ends below its position was truncated or created again.  Once it is as
        # long again, its new records would count as read; then only its new leader reveals it.
        return any(
            _next(self._done, of, -1) != one.high or _has_new_leader(self._done, of, one)
            for of, one in marks.items()
        )

    def _is_recreated(self, plan: OffsetPlan, partitions: Iterable[Key]) -> bool:
        """Return whether the topic of one of the partitions was created again since a plan."""
        recreated = plan.recreated(self._topic_ids)
        return any(topic in recreated for topic, _ in partitions)

    @property
    def is_through(self) -> bool:
        """Whether finished micro-batches reach the query's ends; False if it has no ends."""
        return self._until is not None and self.reaching(self._until)()

    def reaching(self, ends: Offsets) -> Callable[[], bool]:
        """Return a function that returns whether finished micro-batches have read up to these ends.

        It returns False before the first micro-batch is done, and if a topic of the ends was
        created again since.
        """

        def reached() -> bool:
            if self._done is None:
                return False
            if self._is_recreated(self._done, ends):
                return False
            return all(_next(self._done, of, -1) >= end for of, end in ends.items())

        return reached

    # -- plans ------------------------------------------------------------------------------------

    def behind(self, plan: OffsetPlan) -> dict[Key, bool]:
        """Return the partitions with offsets that a plan leaves to later micro-batches.

        A partition whose leader does not answer may have some, and is included. The value is True
        if the leader did not answer and another one did.
        """
        there, until = set(self.partitions), self._until
        found: dict[Key, bool] = {}
        for key, at in plan.positions.items():
            end = at.end if until is None else min(at.end, until.get(key, 0))
            answered = key in self._answered
            if key in there and (at.next < end or not answered):
                found[key] = not answered and bool(self._answered)
        return found

    def plan(
        self, before: OffsetPlan | None, tasks: int, *, bounded: bool, room: int | None = None
    ) -> OffsetPlan:
        """Return the plan of the next micro-batch. If Kafka does not answer, it takes no offsets.

        Without ``before``, raises ConnectionError or UnknownTopics instead. Raises OffsetsRefused
        if offsets were deleted or are skipped, and the spout has ``lost="refuse"``.

        ``before``: the plan of the last micro-batch; None for the first. ``tasks``: the number of
        tasks that run at once. ``bounded``: whether `Intake` limits the number of offsets.
        ``room``: the number of records that may still wait for a retry, and so the limit on new
        ones; None: no limit.
        """
        try:
            # The first plan decides the starts of all partitions at once, or fails.
            marks = self._bounds(before, all_of_them=before is None)
            if before is not None and any(
                _next(before, each, high) > high for each, (_, high) in marks.items()
            ):
                self._refresh_at = 0.0  # the topic may have been created again just now
                marks = self._bounds(before)
            starts = self._starts(before, marks)
        except (ClusterFailed, UnknownTopics, ConnectionError) as error:
            if before is None and isinstance(error, ClusterFailed):
                raise ConnectionError(str(error)) from error  # it may be temporary, too
            if before is None:
                raise
            # Retries do not need Kafka.
            _log.warning(
                "spout %s: this micro-batch takes no new records, because Kafka did not answer: %s",
                self.name,
                error,
            )
            return before.taking_nothing()
        self._report(starts, is_first=before is None)
        if self._group is not None:
            self._group.first_not_done.update(
                {each: start.lowest for each, start in starts.items()}
            )
        at = {each: starts.get(each) or _continued(before, each) for each in marks}
        stops = {each: high for each, (_, high) in marks.items()}
        if self._until is not None:
            there_are = {*marks, *self.partitions}
            # If a partition was truncated, the query ends at its new end.
            self._until = {
                each: min(end, marks[each][1]) if each in marks else end
                for each, end in self._until.items()
                if each in there_are
            }
            stops = {each: min(stop, self._until.get(each, 0)) for each, stop in stops.items()}
        there = {each: max(0, stops[each] - at[each].next) for each in marks}
        takes = shares(there, self.intake.most, room, self._turn) if bounded else there
        # If there was not room for one offset of each, the next micro-batch begins after the last.
        self._turn = next(reversed(takes), self._turn)
        ranges = [one for start in starts.values() for one in start.holes]
        ranges += [
            OffsetRange(*each, at[each].next, at[each].next + n)
            for each in marks
            if (n := takes.get(each, 0))
        ]
        positions = self._carried(before, marks)
        for each, mark in marks.items():
            next_ = at[each].next + takes.get(each, 0)
            positions[each] = Position(next_, mark.high, at[each].why, mark.epoch)
        gone = [one for start in starts.values() for one in start.gone]
        plan = OffsetPlan(
            positions,
            self._ids(before, marks),
            evenly(ranges, tasks),
            tuple(one.range for one in gone),
            tuple(one.refused(self.name) for one in gone),
        )
        self.intake.planned(sum(one.size for one in ranges))
        return plan

    def mended(self, plan: OffsetPlan) -> OffsetPlan:
        """Return a plan without the offsets that were deleted after it was stored.

        The new plan has them in ``lost``. ``plan`` has no decision yet. Returns the same object if
        no offsets were deleted, or Kafka does not answer. Raises OffsetsRefused if some were, and
        the spout has ``lost="refuse"``.
        """
        keys = sorted({(one.topic, one.partition) for some in plan.tasks for one in some})
        if not keys:
            return plan
        try:
            topics = self._cluster.partitions({topic for topic, _ in keys}, missing_ok=True)
            found = self._cluster.watermarks(keys).found
        except (ClusterFailed, ConnectionError) as error:
            _log.warning(
                "spout %s: Kafka did not answer which planned offsets exist: %s", self.name, error
            )
            return plan
        ids = {one.topic: one.topic_id for one in topics}
        lows: dict[Key, int] = {each: one.low for each, one in found.items()}
        after, lost = without_deleted(plan, self.name, lows, ids)
        for one in lost:
            self._report({one.range[:2]: Start(one.range.stop, "out of range", gone=(one,))})
        return after if lost else plan

    def replaced(self, plan: OffsetPlan) -> str | None:
        """Return a message if a topic of a plan was created again after it was stored; else None.

        Also returns None if Kafka does not answer.
        """
        topics = {one.topic for some in plan.tasks for one in some}
        if not topics:
            return None
        try:
            found = self._cluster.partitions(topics, missing_ok=True)
        except ClusterFailed as error:
            _log.warning(
                "spout %s: Kafka did not answer whether its topics were created again: %s",
                self.name,
                error,
            )
            return None
        for topic in sorted(plan.recreated({one.topic: one.topic_id for one in found})):
            return (
                f"topic {topic} of spout {self.name} was created again after its offsets were "
                "planned, so these offsets now belong to other records"
            )
        return None

    def _carried(self, before: OffsetPlan | None, marks: Mapping[Key, Any]) -> dict[Key, Position]:
        """Return the positions of the last plan, except those of topics that were created again."""
        if before is None:
            return {}
        recreated = before.recreated(self._ids(before, marks))
        # Positions of partitions that are no longer read are kept: they may be read again.  Those
        # of a topic that was created again are not kept, even while a partition has no leader.
        return {key: one for key, one in before.positions.items() if key[0] not in recreated}

    def _ids(self, before: OffsetPlan | None, marks: Iterable[Key]) -> dict[str, str]:
        """Return the topic ids for the next plan: the present ones, else those of the last plan."""
        answered = {topic for topic, _ in marks}
        now = {topic: id_ for topic, id_ in self._topic_ids.items() if topic in answered}
        return {**({} if before is None else before.topic_ids), **now}

    def _starts(
        self, before: OffsetPlan | None, marks: Mapping[Key, Watermarks]
    ) -> dict[Key, Start]:
        """Return the starts of new partitions, and of those whose positions are gone.

        Raises ConnectionError or ClusterFailed if Kafka does not answer a request for them.
        """
        first = before is None
        committed: Mapping[Any, Commit] = {}
        of_time: Mapping[Any, int] = {}
        if first and self.spout.start == "group" and self.spout.group_id is not None:
            groups = self._cluster.committed(self.spout.group_id, marks)
            if groups.failed:
                raise _unanswered("the committed offset", groups.failed)
            committed = groups.found
        if first:
            marks = self._reached(marks, committed)
        ms = time_ms(self.spout.start)
        if first and ms is not None:
            times = self._cluster.offsets_for_time(marks, ms)
            if times.failed:
                raise _unanswered("the first offset at the start time", times.failed)
            of_time = times.found
        last = OffsetPlan() if before is None else before
        recreated = last.recreated(self._topic_ids)
        truncated = truncations(self.spout.client, self._with_new_leaders(last, marks))
        found = {}
        for (topic, partition), mark in marks.items():
            low, high = mark
            position = last.positions.get((topic, partition))
            known, now = last.topic_ids.get(topic), self._topic_ids.get(topic)
            start = decide(
                self.spout,
                PartitionFacts(
                    topic,
                    partition,
                    low,
                    high,
                    position,
                    is_other=topic in recreated,
                    is_same=known is not None and known == now,
                    is_first=first,
                    committed=committed.get((topic, partition)),
                    of_time=of_time.get((topic, partition)),
                    other_from=truncated.get((topic, partition)),
                    topic_id=now,
                ),
            )
            if start is not None:
                found[topic, partition] = start
        return found

    def _reached(
        self, marks: Mapping[Key, Watermarks], committed: Mapping[Any, Commit]
    ) -> Mapping[Key, Watermarks]:
        """Return the bounds; an end before a start is moved to the start, if the log reaches it.

        The ends exclude open transactions, whose records other consumers of the group may have
        read. Raises ConnectionError if an end cannot be looked up.
        """
        at: Mapping[Any, int] = {
            (topic, partition): decode_metadata(topic, partition, *one).state.end
            for (topic, partition), one in committed.items()
        }
        if isinstance(self.spout.start, Mapping):
            at = self.spout.start
        beyond = [key for key, (_, high) in marks.items() if at.get(key, 0) > high]
        if not beyond:
            return marks
        answers = self._cluster.watermarks(beyond, at)
        if answers.failed:
            raise _unanswered("the end of the log", answers.failed)
        found: Mapping[Any, Watermarks] = answers.found
        return {**marks, **found}

    def _with_new_leaders(
        self, last: OffsetPlan, marks: Mapping[Key, Watermarks]
    ) -> dict[Key, tuple[int, int, int]]:
        """Return the partitions with a newer leader than in a plan, for `truncations`.

        The values: the first offset, the offset after the last one read, and the plan's epoch.
        """
        found = {}
        for of, mark in marks.items():
            position = last.positions.get(of)
            if position is None or position.epoch is None or not _has_new_leader(last, of, mark):
                continue
            if last.topic_ids.get(of[0]) == self._topic_ids.get(of[0]):
                found[of] = mark.low, min(position.next, mark.high), position.epoch
        return found

    def _report(self, starts: Mapping[Key, Start], *, is_first: bool = False) -> None:
        """Log where partitions begin. Raise OffsetsRefused if ``lost="refuse"`` forbids it."""
        for (topic, partition), start in starts.items():
            message = "; ".join(one.message for one in start.gone)
            found_else = start.why in ("out of range", "truncated", MADE_ANEW)
            _log.log(
                logging.WARNING if found_else or start.gone else logging.INFO,
                "spout %s: %s-%d begins at offset %d, %s%s",
                self.name,
                topic,
                partition,
                start.next,
                start.why,
                f"; {message}" if message else "",
            )
            # A new checkpoint has read nothing of the former topic, and reads all of this one.
            if is_first and start.why == MADE_ANEW and not start.gone:
                continue
            if self.spout.lost == "refuse" and (found_else or start.gone):
                way_out = "give the topology a new checkpoint, and the spout another start"
                if any(one.kind == TOO_FAR_BEHIND for one in start.gone):
                    way_out = "raise max_offset_behind"
                raise OffsetsRefused(
                    f"spout {self.name}: {topic}-{partition} would begin at offset {start.next}, "
                    f"{message or start.why}, and lost='refuse'. Set lost='dead-letter' to "
                    f"continue without these offsets, or {way_out}"
                )

    # -- the group --------------------------------------------------------------------------------

    def warn_of_others(self) -> None:
        """Log a warning if the group's last commit of a partition is from another deployment."""
        if self._group is not None:
            self._group.warn_of_others(self._cluster, self.partitions)

    @property
    def has_commit_due(self) -> bool:
        """Whether a micro-batch is due to repeat a failed commit."""
        return self._group is not None and self._group.is_due

    def commit(self, plan: OffsetPlan, waiting: Iterable[pa.Table]) -> int:
        """Commit the offsets that are done after a micro-batch, and return the lag.

        Topics that were created again since the plan are left out. A failed commit is logged, and
        repeated with the next one. The lag is the number of offsets from the committed ones to the
        planned ends of the partitions, or from the first ones not done if the spout has no group.
        """
        self._done = plan
        # The planned offsets of these topics now belong to other records.
        others = plan.recreated(self._topic_ids)
        after = {key: of for key, of in states(plan, waiting).items() if key[0] not in others}
        if self._group is None:
            done = {each: state.committable for each, state in after.items()}
        else:
            done = self._group.commit(self._cluster, after, plan.topic_ids)
        return sum(max(0, plan.positions[key].end - done[key]) for key in after)


def _unanswered(what: str, failed: Mapping[Any, PartitionFailure]) -> ConnectionError:
    (topic, partition), why = next(iter(failed.items()))
    return ConnectionError(
        f"the request to Kafka for {what} of {topic}-{partition} failed: {why.text}; check the "
        "brokers, and what this user may read"
    )


def _next(before: OffsetPlan, of: Key, otherwise: int) -> int:
    position = before.positions.get(of)
    return otherwise if position is None else position.next


def _has_new_leader(before: OffsetPlan, of: Key, now: Watermarks) -> bool:
    """Return whether a partition has a newer leader than in a plan, as far as that is known."""
    position = before.positions.get(of)
    known = None if position is None else position.epoch
    return known is not None and now.epoch is not None and now.epoch > known


def _continued(before: OffsetPlan | None, of: Key) -> Start:
    assert before is not None  # without a plan each partition has a start
    position = before.positions[of]
    return Start(position.next, position.began)
