"""The Kafka spouts of a topology, as the engine and the stream use them."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from ackcore.kafka.cluster import Cluster, ClusterFailed, TopicPartition
from ackcore.kafka.ranges import RECORD_SCHEMA
from ackcore.kafka.spout import KafkaSpout
from ackcore.spark.base.session import task_slots
from ackcore.spark.base.versions import from_arrow_schema
from ackcore.spark.checkpoint.decisions import BatchDecision, Plan
from ackcore.spark.checkpoint.state import State
from ackcore.spark.engine.setup import Backlog, InputFrame, Obstacle, PlannedRows, Snapshot
from ackcore.spark.kafka.group_commits import GroupUse, refuse_shared_groups
from ackcore.spark.kafka.offset_reading import ReadOffsets
from ackcore.spark.kafka.plans import OffsetPlan
from ackcore.spark.kafka.spout_offsets import SpoutOffsets
from ackcore.topology.builder import Topology

_log = logging.getLogger("ackcore")

#: The number of frames that are kept, by their number of tasks.
_FRAMES = 8
#: The time-out of a check whether Kafka answers, in seconds.
_ASK_S = 5.0
#: The last line of a task's traceback if offsets could not be read yet.
_UNREAD = re.compile(
    r"\backcore\.kafka\.kafka_errors\.(?:ReadTimedOut|NoToken|OffsetsLost"
    r"|ReadFailed(?=: .*\((?:UNKNOWN_TOPIC_OR_PART|UNKNOWN_TOPIC_ID|_UNKNOWN_TOPIC"
    r"|_UNKNOWN_PARTITION)\))): (.+)"
)


class KafkaSources(PlannedRows):
    """All Kafka spouts of a topology, on the driver: plans, rows, commits, checks for new records.

    ``spouts``: the spouts by name. ``once``: whether the first micro-batch takes all available
    records, and the later ones none. ``max_waiting``: the setting of the topology.
    """

    def __init__(
        self, spouts: Mapping[str, SpoutOffsets], spark: SparkSession, once: bool, max_waiting: int
    ) -> None:
        self._spouts = spouts
        self._spark = spark
        self._once = once
        self._max_waiting = max_waiting
        #: The free places in the waiting store.  None if nothing may wait: failed records are then
        #: dead at once, and the number of records is not limited.
        self._room = max_waiting or None
        #: The spouts whose cluster did not answer the last poll for new records.
        self._away: set[str] = set()
        #: An empty frame that carries the columns and the session.
        self._empty: DataFrame = spark.createDataFrame([], from_arrow_schema(RECORD_SCHEMA))
        #: Returns the frame of a number of tasks, the same one each time; see `kept_jobs`.
        self._numbers = lru_cache(_FRAMES)(lambda n: spark.range(0, n, 1, max(1, n)))

    @classmethod
    def of(
        cls, topology: Topology, spark: SparkSession, state: State, *, ends: bool, once: bool
    ) -> KafkaSources:
        """Connect to the brokers of a topology's Kafka spouts, at least one, and check the spouts.

        ``state``: the state of the checkpoint. ``ends``: whether the query ends at the offsets at
        which the partitions end during this call. ``once``: whether its first micro-batch takes all
        records up to these offsets; a spout in the last recorded plan then gets no ends.

        Raises ValueError if two spouts commit the same partitions to one group. Raises
        UnknownTopics, ClusterFailed or ConnectionError if the partitions or their ends cannot be
        looked up.
        """
        last = state.plan(state.last_plan)
        spouts: dict[str, SpoutOffsets] = {}
        sources = cls(spouts, spark, once, topology.settings.max_waiting)
        try:
            for name, spout in topology.spouts.items():
                if spout.kind == "kafka":
                    body = None if last is None else last.offsets.get(name)
                    one = spouts[name] = SpoutOffsets(name, spout.source, state.deployment_key)
                    if ends and not (once and body is not None):
                        one.end_here()
            sources._check_groups()
            if state.last_done is not None:
                for one in spouts.values():
                    one.warn_of_others()
        except BaseException:
            sources.close()
            raise
        return sources

    def _check_groups(self) -> None:
        refuse_shared_groups(
            GroupUse(name, one.spout.group_id, one.identities)
            for name, one in self._spouts.items()
            if one.spout.group_id is not None
        )

    # -- for the engine ---------------------------------------------------------------------------

    def plan(self, number: int, parent: Plan | None) -> Mapping[str, Any]:
        """Return the offsets of micro-batch ``number`` by spout, each as `OffsetPlan.body`.

        ``parent``: the plan of the last micro-batch; None for the first. Raises ValueError if two
        spouts commit the partitions of a new topic to one group. Raises OffsetsRefused if a spout
        with ``lost="refuse"`` would skip offsets. The first plan raises ConnectionError or
        UnknownTopics if brokers do not answer; later ones then take nothing from that spout.
        """
        found = {}
        tasks, left = task_slots(self._spark), self._room
        names = list(self._spouts)
        first = number % len(names)  # the one that is planned first
        for i, name in enumerate(names[first:] + names[:first]):
            one = self._spouts[name]
            body = None if parent is None else parent.offsets.get(name)
            before = None if body is None else OffsetPlan.of(body)
            if self._once and before is not None:
                found[name] = before.taking_nothing().body()
                continue
            # The remaining room is divided evenly among this spout and those after it.
            room = None if left is None else -(-left // (len(names) - i))
            plan = one.plan(before, tasks, bounded=not self._once, room=room)
            found[name] = plan.body()
            if left is not None:
                left = max(0, left - sum(one.size for some in plan.tasks for one in some))
        # A new topic may match the patterns of two spouts.
        self._check_groups()
        return found

    def most_retries(self) -> int | None:
        """Return the limit on retries in a micro-batch with new records, for all spouts together.

        None means no limit. It is returned with ``once``, or if a spout has ``max_records``.
        """
        bounds = [one.intake.most_retries for one in self._spouts.values()]
        known = [bound for bound in bounds if bound is not None]
        return None if self._once or len(known) < len(bounds) else sum(known)

    def mended(self, plan: Plan) -> Plan:
        """Return a plan without the offsets that were deleted after it was stored.

        Dead letters name the deleted offsets. ``plan`` has no decision yet. Returns the same object
        if no offsets were deleted, or Kafka does not answer. Raises OffsetsRefused if a spout with
        ``lost="refuse"`` has such offsets.
        """
        found = {}
        for name, one, before in self._planned(plan):
            now = one.mended(before)
            if now is not before:
                found[name] = now.body()
        if not found:
            return plan
        # Root ids depend on a record's place in its task, so they now belong to other records.
        return replace(plan, offsets={**plan.offsets, **found}).without_suspects()

    def replaced(self, plan: Plan) -> str | None:
        """Return a message if a topic of a stored plan was created again since; else None.

        Also returns None if Kafka does not answer.
        """
        found = (one.replaced(planned) for _, one, planned in self._planned(plan))
        return next(filter(None, found), None)

    def unread(self, error: Exception) -> str | None:
        """Return a reader's error text from the error of a run, if a wait may help; else None."""
        return unread_in(error)

    def obstacle(self, plan: Plan) -> Obstacle | None:
        """Return the first obstacle to reading a plan's offsets at present, or None."""
        found = (obstacle(name, one.spout, planned) for name, one, planned in self._planned(plan))
        return next(filter(None, found), None)

    def inputs(self, plan: Plan) -> list[InputFrame]:
        """Return one input for each spout, with the records that a plan takes from it."""
        found = []
        for name, one, planned in self._planned(plan):
            read = ReadOffsets(one.spout.client, planned.tasks, planned.lost)
            tasks = len(planned.tasks) + bool(planned.lost)
            # Without a topic id, only a comparison of all rows of a task shows that they are equal.
            topics = {range_.topic for some in planned.tasks for range_ in some}
            again = read if topics <= planned.topic_ids.keys() else None
            snapshot = Snapshot(self._numbers(tasks), read, again)
            found.append(InputFrame(self._empty, name, snapshot, planned.refused, tasks=tasks))
        return found

    def backlogs(self, plan: Plan) -> Mapping[str, Backlog]:
        """Return by spout the partitions with offsets that a plan leaves to later micro-batches.

        Spouts without such partitions are left out.
        """
        found = {}
        for name, one, planned in self._planned(plan):
            if parts := one.behind(planned):
                behind = {part: number for number, part in enumerate(parts)}
                read = {one[:2] for some in planned.tasks for one in some}
                waits = [part not in read and not silent for part, silent in parts.items()]
                tasks = [
                    [(behind.get((one.topic, one.partition), -1), one.size) for one in some]
                    for some in (*planned.tasks, *([planned.lost] if planned.lost else []))
                ]
                found[name] = Backlog([f"{topic}-{n}" for topic, n in parts], waits, tasks)
        return found

    def done(self, plan: Plan, decision: BatchDecision) -> Mapping[str, int]:
        """Commit the offsets that are done after a micro-batch. Return each spout's lag in offsets.

        Also adapts the numbers of records of the next micro-batch.
        """
        found = {}
        # Replays that were not tried yet take no room from failed records.
        waiting = decision.waiting.rows() - decision.waiting.untried
        full = waiting / max(1, self._max_waiting)
        if self._room is not None:
            self._room = max(0, self._max_waiting - waiting)
        for name, one, planned in self._planned(plan):
            if name in plan.offsets:
                one.intake.done(full, decision.counts.get("retried", 0))
                found[name] = one.commit(planned, decision.waiting.tables(name))
        return found

    def _planned(self, plan: Plan) -> Iterator[tuple[str, SpoutOffsets, OffsetPlan]]:
        """Yield name, spout and offsets of each spout; no offsets if the plan lacks the spout."""
        for name, one in self._spouts.items():
            body = plan.offsets.get(name)
            yield name, one, OffsetPlan() if body is None else OffsetPlan.of(body)

    # -- for the stream ---------------------------------------------------------------------------

    def has_new(self) -> bool:
        """Return whether a micro-batch is needed, for new records or to repeat a failed commit.

        False for new records while ``max_waiting`` records wait. Logs clusters that do not answer.
        If no spout's cluster answers, raises ConnectionError, ClusterFailed or UnknownTopics.
        """
        if any(one.has_commit_due for one in self._spouts.values()):
            return True
        if not self.has_room:
            return False
        failed = {}
        # A cluster that does not answer comes last: a request to it takes its whole timeout.
        for name in sorted(self._spouts, key=self._away.__contains__):
            try:
                if self._spouts[name].has_new():
                    return True
                self._away.discard(name)
            except Exception as error:
                if name not in self._away and len(self._spouts) > 1:
                    _log.warning(
                        "spout %s: Kafka did not answer whether it has new records: %s", name, error
                    )
                self._away.add(name)
                failed[name] = error
        if len(failed) == len(self._spouts):
            raise next(iter(failed.values()))
        return False

    @property
    def has_room(self) -> bool:
        """Whether fewer than ``max_waiting`` records wait; always True if that setting is 0."""
        return self._room != 0

    @property
    def is_through(self) -> bool:
        """Whether finished micro-batches reach the query's end offsets; False if it has none."""
        return all(one.is_through for one in self._spouts.values())

    def reaching_ends(self) -> Callable[[], bool]:
        """Return a function that returns whether finished micro-batches reach the present ends.

        Partitions whose leader does not answer this call are left out.

        Raises ConnectionError, ClusterFailed or UnknownTopics if the ends cannot be looked up.
        """
        found = [one.reaching(one.ends()) for one in self._spouts.values()]
        return lambda: all(reached() for reached in found)

    def close(self) -> None:
        """Close the connections. Later requests to Kafka fail."""
        super().close()
        for one in self._spouts.values():
            one.close()


def unread_in(error: BaseException | None) -> str | None:
    """Return the text of a reader's error among an error and its causes, if waiting may help.

    It names offsets that a task could not read yet. Returns None without such an error.
    """
    while error is not None:
        told = _UNREAD.search(str(error))
        if told is not None:
            return told[1]
        # PySpark stores the cause of a Java error in `_cause`.
        error = getattr(error, "_cause", None) or error.__cause__
    return None


def obstacle(name: str, spout: KafkaSpout, plan: OffsetPlan) -> Obstacle | None:
    """Return why offsets of a spout's plan cannot be read at present; None if all can.

    Also returns None for deleted offsets, and topics that were created again: they never come back.
    """
    stops: dict[TopicPartition, int] = {}
    for one in chain.from_iterable(plan.tasks):
        key = TopicPartition(one.topic, one.partition)
        stops[key] = max(one.stop, stops.get(key, 0))
    if not stops:
        return None
    try:
        with Cluster(spout.client, timeout_s=_ASK_S) as cluster:
            topics = cluster.partitions({topic for topic, _ in stops}, missing_ok=True)
            there = {one.key for one in topics}
            ids = {one.topic: one.topic_id for one in topics}
            marks = cluster.watermarks([key for key in stops if key in there])
            short = [key for key, (_, high) in marks.found.items() if high < stops[key]]
            logs = cluster.watermarks(short, stops)
    except ClusterFailed as error:
        return Obstacle(f"spout {name} waits for Kafka: {error}")
    recreated = plan.recreated(ids)
    for key, stop in sorted(stops.items()):
        if key.topic in recreated:
            continue  # the planned offsets are of the former topic, and lost
        if key not in there:
            said = f"spout {name} waits for {key}, which does not exist"
            return Obstacle(said, spout.missing_timeout_s)
        failure = marks.failed.get(key)
        if failure is not None:
            return Obstacle(f"spout {name} waits for {key}: {failure.text}")
        high = marks.found[key].high
        if high < stop:
            said = f"spout {name} waits for offset {stop - 1} of {key}, which ends"
            if key in logs.found and logs.found[key].high >= stop:
                return Obstacle(f"{said} at {high} for readers of committed records")
            return Obstacle(f"{said} at {high}, as after a truncation", spout.missing_timeout_s)
    return None
