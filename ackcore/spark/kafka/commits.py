"""The commits of a group after a micro-batch: the first offset that is not done, and metadata."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ackcore import OffsetState
from ackcore._records import Int32s, Int64s
from ackcore.kafka.cluster import Answers, Committed
from ackcore.kafka.metadata_form import MetadataForm
from ackcore.kafka.origins import Origin
from ackcore.offsets import Commit
from ackcore.spark.base.schemas import ATTEMPT, REPLAYED
from ackcore.spark.kafka.plans import OffsetPlan

_NO_OFFSETS, _NO_ATTEMPTS = np.empty(0, np.int64), np.empty(0, np.int32)
_NO_HOLES = _NO_OFFSETS, _NO_OFFSETS, _NO_OFFSETS, _NO_ATTEMPTS
_NEEDED = ("topic", "partition", "offset", ATTEMPT)


def states(plan: OffsetPlan, waiting: Iterable[pa.Table]) -> Iterator[tuple[str, int, OffsetState]]:
    """Yield topic, partition and done offsets of each partition after a micro-batch.

    Parameters
    ----------
    plan : OffsetPlan
        The plan of the micro-batch.
    waiting : iterable of pyarrow.Table
        The spout's records that wait for a retry after it.
    """
    wait = _by_partition(waiting)
    for topic, partition, position in plan.each():
        rows = wait.get((topic, partition))
        if rows is None:
            state = OffsetState(position.next, position.next, *_NO_HOLES)
        else:
            state = _state(position.next, *rows)
        yield topic, partition, state


def _state(next_: int, waiting: Int64s, attempts: Int32s) -> OffsetState:
    """Return the state in which all offsets below ``next_`` are done, except the waiting ones."""
    # Offsets from next_ on are of a former topic, or were truncated.
    if len(waiting) and waiting[-1] >= next_:
        below = int(np.searchsorted(waiting, next_))
        waiting, attempts = waiting[:below], attempts[:below]
    apart = np.ones(len(waiting) + 1, np.bool_)
    np.greater(waiting[1:] - waiting[:-1], 1, out=apart[1:-1])
    starts, ends = waiting[apart[:-1]], waiting[apart[1:]] + 1
    end = next_
    if len(ends) and ends[-1] >= next_:  # no offset above the last run is done
        end, starts, ends = int(starts[-1]), starts[:-1], ends[:-1]
    first = int(starts[0]) if len(starts) else end
    failed = attempts > 0
    return OffsetState(first, end, starts, ends, waiting[failed], attempts[failed])


def _by_partition(tables: Iterable[pa.Table]) -> dict[tuple[str, int], tuple[Int64s, Int32s]]:
    """Return the sorted, distinct waiting offsets of each partition, and their attempts."""
    # Replayed records were done before: their offsets stay committed.
    parts = [table.filter(pc.equal(table[REPLAYED], 0)).select(_NEEDED) for table in tables]
    rows = pa.concat_tables(parts) if parts else None
    if rows is None or not len(rows):
        return {}
    topics = rows["topic"].combine_chunks().dictionary_encode()
    names, of = topics.dictionary.to_pylist(), topics.indices.to_numpy()
    partitions, offsets, attempts = (rows[name].to_numpy() for name in _NEEDED[1:])
    order = np.lexsort((offsets, partitions, of))
    of, partitions, offsets = of[order], partitions[order], offsets[order]
    attempts = attempts[order].astype(np.int32)
    cuts = np.flatnonzero((np.diff(of) != 0) | (np.diff(partitions) != 0)) + 1
    found = {}
    for start, end in zip([0, *cuts.tolist()], [*cuts.tolist(), len(of)], strict=True):
        some, first = np.unique(offsets[start:end], return_index=True)
        found[names[of[start]], int(partitions[start])] = some, attempts[start:end][first]
    return found


class CommitCache:
    """A cache of the last commits, since most partitions do not change between micro-batches.

    Parameters
    ----------
    deployment : int
        The key of the checkpoint whose commits these are.
    """

    def __init__(self, deployment: int) -> None:
        #: The deployment, in the form that `Origin` takes.
        self.name = f"{deployment % 2**64:016x}"
        self._form = MetadataForm()
        self._last: dict[tuple[str, int], tuple[int, OffsetState, Commit]] = {}

    def commits(
        self, done: Mapping[tuple[str, int], OffsetState], topic_ids: Mapping[str, str]
    ) -> dict[tuple[str, int], Commit]:
        """Return the commit of each partition, for topics with these ids."""
        whose = {
            topic: Origin.of(topic_ids.get(topic), self.name).deployment
            for topic in {topic for topic, _ in done}
        }
        found = {}
        for each, state in done.items():
            last, now = self._last.get(each), whose[each[0]]
            if last is not None and last[0] == now and _is_same(last[1], state):
                found[each] = last
            else:
                found[each] = now, state, self._form.encode(*each, 0, state, now)
        self._last = found
        return {each: commit for each, (*_, commit) in found.items()}

    def learn(self, sent: Mapping[tuple[str, int], Commit], answers: Answers[Committed]) -> bool:
        """Apply the answers to commits. Return whether to retry those too large in a new form."""
        for each in answers.found:
            self._form.taken(sent[each].metadata)
        too_large = [
            sent[each].metadata
            for each, failure in answers.failed.items()
            if failure.code == "OFFSET_METADATA_TOO_LARGE"
        ]
        if not self._form.refused(max(too_large, key=len, default="")):
            return False
        self._last = {}
        return True


def _is_same(one: OffsetState, other: OffsetState) -> bool:
    return (
        one[:2] == other[:2]
        and np.array_equal(one.hole_starts, other.hole_starts)
        and np.array_equal(one.hole_ends, other.hole_ends)
        and np.array_equal(one.failed, other.failed)
        and np.array_equal(one.attempts, other.attempts)
    )
