"""What a group commits after a micro-batch: up to where all is done, and what is above that."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ackcore import OffsetState, OffsetTracker
from ackcore._records import Int32s, Int64s
from ackcore.offsets import Commit, encode_metadata
from ackcore.spark.base.schemas import ATTEMPT, REPLAYED
from ackcore.spark.kafka.plans import OffsetPlan

_NEEDED = ("topic", "partition", "offset", ATTEMPT)


def states(plan: OffsetPlan, waiting: Iterable[pa.Table]) -> Iterator[tuple[str, int, OffsetState]]:
    """Yield for each partition what is done of it after the micro-batch of a plan.

    Parameters
    ----------
    plan : OffsetPlan
        Of the micro-batch.
    waiting : iterable of pyarrow.Table
        The records of the spout that wait after it.
    """
    wait = _by_partition(waiting)
    none = np.empty(0, np.int64), np.empty(0, np.int32)
    for topic, partition, position in plan.each():
        yield topic, partition, _state(position.next, *wait.get((topic, partition), none))


def _state(next_: int, waiting: Int64s, attempts: Int32s) -> OffsetState:
    """Return what is done below ``next_``: all that does not wait."""
    # From there on it is of a topic that was before, or of what a truncation took.
    below = waiting < next_
    waiting, attempts = waiting[below], attempts[below]
    starts = waiting[np.diff(waiting, prepend=-2) > 1]
    ends = waiting[np.diff(waiting, append=np.iinfo(np.int64).max) > 1] + 1
    end = next_
    if len(ends) and ends[-1] >= next_:  # nothing above the last run is done
        end, starts, ends = int(starts[-1]), starts[:-1], ends[:-1]
    first = int(starts[0]) if len(starts) else end
    failed = attempts > 0
    return OffsetState(first, end, starts, ends, waiting[failed], attempts[failed])


def _by_partition(tables: Iterable[pa.Table]) -> dict[tuple[str, int], tuple[Int64s, Int32s]]:
    """Return the offsets that wait, in order and once each, and how often they were tried."""
    # What was sent again had been done: its offset is behind us.
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


def commit_of(topic: str, partition: int, state: OffsetState, deployment: int) -> Commit:
    """Return what to commit of a partition: its offset, and what is done above it."""
    return encode_metadata(OffsetTracker.from_state(topic, partition, 0, state), deployment)
