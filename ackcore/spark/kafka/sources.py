"""The spouts of a topology that read Kafka: planned, read and committed for each micro-batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from ackcore.kafka.ranges import RECORD_SCHEMA
from ackcore.spark.base.session import task_slots
from ackcore.spark.base.versions import from_arrow_schema
from ackcore.spark.checkpoint.decisions import BatchDecision, Plan
from ackcore.spark.checkpoint.state import State
from ackcore.spark.kafka.groups import Teller, refuse_two_tellers
from ackcore.spark.kafka.offsets import SpoutOffsets
from ackcore.spark.kafka.outages import obstacle, unread_in
from ackcore.spark.kafka.plans import OffsetPlan, records_in
from ackcore.spark.kafka.reading import ReadOffsets
from ackcore.spark.run.types import InputFrame, Obstacle, Snapshot
from ackcore.topology.builder import Topology

_log = logging.getLogger("ackcore")


class KafkaSources:
    """The spouts of a topology that read Kafka, as a query uses them.

    Parameters
    ----------
    spouts : mapping from str to SpoutOffsets
        By name.
    spark : SparkSession
        Where the query runs.
    once : bool
        Whether the first micro-batch takes all that there is, and no other takes anything.
    max_waiting : int
        How many records may wait for a retry.
    """

    def __init__(
        self,
        spouts: Mapping[str, SpoutOffsets],
        spark: SparkSession,
        once: bool,
        max_waiting: int,
    ) -> None:
        self._spouts = spouts
        self._spark = spark
        self._once = once
        self._max_waiting = max_waiting
        #: How many more may wait.  Where none may, they die at once, and all are taken.
        self._room = max_waiting or None
        self.is_closed = False
        #: The spouts whose cluster did not answer when it was last asked for something new.
        self._away: set[str] = set()
        #: Without rows: what its columns are, and the session.
        self._empty: DataFrame = spark.createDataFrame([], from_arrow_schema(RECORD_SCHEMA))

    @classmethod
    def of(
        cls, topology: Topology, spark: SparkSession, state: State, *, ends: bool, once: bool
    ) -> KafkaSources:
        """Return those of a topology, as `kafka_sources` says, and commit what is done of them."""
        last = None if state.last_plan is None else state.plan(state.last_plan)
        spouts: dict[str, SpoutOffsets] = {}
        sources = cls(spouts, spark, once, topology.settings.max_waiting)
        try:
            for name, spout in topology.spouts.items():
                if spout.kind == "kafka":
                    body = None if last is None else last.offsets.get(name)
                    one = spouts[name] = SpoutOffsets(name, spout.source, state.deployment_key)
                    if ends and not (once and body is not None):
                        one.end_here()
            sources._check_tellers()
            sources._commit_last(state)
        except BaseException:
            sources.close()
            raise
        return sources

    def _check_tellers(self) -> None:
        """Raise ValueError if two spouts commit to one group of the same partitions."""
        refuse_two_tellers(
            Teller(name, one.spout.group_id, one.spout.client.bootstrap_servers, one.partitions)
            for name, one in self._spouts.items()
            if one.spout.group_id is not None
        )

    def _commit_last(self, state: State) -> None:
        """Commit what a driver may have marked that died before it committed."""
        number = state.last_done
        plan = None if number is None else state.plan(number)
        decision = None if number is None else state.decision(number)
        if plan is not None and decision is not None:
            for one in self._spouts.values():
                one.tell_of_others()
            self.done(plan, decision)

    # -- for the engine ---------------------------------------------------------------------------

    def plan(self, number: int, parent: Plan | None) -> Mapping[str, Any]:
        """Return what a micro-batch takes, given the plan before it.

        Raises ValueError if two spouts commit to one group of a topic that has come since.
        """
        found = {}
        tasks, left = task_slots(self._spark), self._room
        for i, name in enumerate(self._in_turn(number)):
            one = self._spouts[name]
            body = None if parent is None else parent.offsets.get(name)
            before = None if body is None else OffsetPlan.of(body)
            if self._once and before is not None:
                found[name] = before.carried().body()
                continue
            # Of what those before it have left, as much as each of those behind it.
            room = None if left is None else -(-left // (len(self._spouts) - i))
            plan = one.plan(before, tasks, bounded=not self._once, room=room)
            found[name] = plan.body()
            if left is not None:
                left = max(0, left - records_in(chain.from_iterable(plan.tasks)))
        # What fits both of their patterns may have come to be.
        self._check_tellers()
        return found

    def _in_turn(self, number: int) -> list[str]:
        """Return the spouts in the order in which they take: each is first in turn."""
        names = list(self._spouts)
        first = number % max(1, len(names))
        return names[first:] + names[:first]

    def most_retries(self) -> int | None:
        """Return how many retries a micro-batch takes at most beside new records; None: any."""
        bounds = [one.intake.most_retries for one in self._spouts.values()]
        known = [bound for bound in bounds if bound is not None]
        return None if self._once or len(known) < len(bounds) else sum(known)

    def mended(self, plan: Plan) -> Plan:
        """Return a plan that is not decided without the offsets that were deleted since.

        They are lost in it; the same plan if there are none.
        """
        found = {}
        for name, one in self._spouts.items():
            body = plan.offsets.get(name)
            before = OffsetPlan() if body is None else OffsetPlan.of(body)
            now = one.mended(before)
            if now is not before:
                found[name] = now.body()
        if not found:
            return plan
        # Root ids go by a record's place in its task, so they are of other records now.
        return replace(plan, offsets={**plan.offsets, **found}).without_suspects()

    def replaced(self, plan: Plan) -> str | None:
        """Return which offsets of a plan are other records now, None if none are."""
        for name, one in self._spouts.items():
            body = plan.offsets.get(name)
            found = None if body is None else one.replaced(OffsetPlan.of(body))
            if found is not None:
                return found
        return None

    def unread(self, error: Exception) -> str | None:
        """Return what a task could not read yet, if a run ended for that."""
        return unread_in(error)

    def obstacle(self, plan: Plan) -> Obstacle | None:
        """Return what keeps planned offsets from being read now."""
        for name, one in self._spouts.items():
            body = plan.offsets.get(name)
            found = None if body is None else obstacle(name, one.spout, OffsetPlan.of(body))
            if found is not None:
                return found
        return None

    def inputs(self, plan: Plan) -> list[InputFrame]:
        """Return the rows that a plan on record names, one input for each spout."""
        found = []
        for name, one in self._spouts.items():
            body = plan.offsets.get(name)
            planned = OffsetPlan() if body is None else OffsetPlan.of(body)
            read = ReadOffsets(one.spout.client, planned.tasks, planned.lost)
            tasks = len(planned.tasks) + bool(planned.lost)
            ids = self._spark.range(0, tasks, 1, max(1, tasks))
            # Where a topic has no id, only all rows of a task tell that they are what they were.
            topics = {range_.topic for some in planned.tasks for range_ in some}
            again = read if topics <= planned.topic_ids.keys() else None
            snapshot = Snapshot(ids, read, again)
            found.append(InputFrame(self._empty, name, snapshot, planned.refused, planned.tried))
        return found

    def done(self, plan: Plan, decision: BatchDecision) -> Mapping[str, int]:
        """Commit what is done after a micro-batch; return each spout's lag."""
        found = {}
        # Replays whose turn has not come take no room from what fails.
        waiting = decision.waiting.rows() - decision.waiting.untried
        full = waiting / max(1, self._max_waiting)
        if self._room is not None:
            self._room = max(0, self._max_waiting - waiting)
        for name, one in self._spouts.items():
            body = plan.offsets.get(name)
            if body is not None:
                one.intake.done(full, decision.counts.get("retried", 0))
                found[name] = one.commit(OffsetPlan.of(body), decision.waiting.tables(name))
        return found

    # -- for the stream ---------------------------------------------------------------------------

    def has_new(self) -> bool:
        """Whether there is something for a micro-batch: records and room for them, or a commit.

        One that failed is repeated though nothing new comes: what looks at the group's lag would
        be wrong until then.  Raises what Kafka's client does if that can be asked of no spout.
        """
        if any(one.has_commit_due for one in self._spouts.values()):
            return True
        if not self.has_room:
            return False
        failed = {}
        # A cluster that is away is asked last: an answer takes its whole timeout.
        for name in sorted(self._spouts, key=self._away.__contains__):
            try:
                if self._spouts[name].has_new():
                    return True
                self._away.discard(name)
            except Exception as error:
                if name not in self._away and len(self._spouts) > 1:
                    _log.warning("spout %s: Kafka cannot be asked for new records: %s", name, error)
                self._away.add(name)
                failed[name] = error
        if len(failed) == len(self._spouts):
            raise next(iter(failed.values()))
        return False

    @property
    def has_room(self) -> bool:
        """Whether a micro-batch may take anything.

        Where as much waits as may, it takes nothing before a retry is due.
        """
        return self._room != 0

    @property
    def is_through(self) -> bool:
        """Whether all has been taken that there was when it began."""
        return all(one.is_through for one in self._spouts.values())

    def reaching_ends(self) -> Callable[[], bool]:
        """Return what tells whether all has been taken that there is now."""
        found = [one.reaching(one.ends()) for one in self._spouts.values()]
        return lambda: all(reached() for reached in found)

    def close(self) -> None:
        """Close the connections; nothing can be asked of Kafka from now on."""
        self.is_closed = True
        for one in self._spouts.values():
            one.close()
