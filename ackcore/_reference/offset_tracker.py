"""The done offsets of a partition, in plain Python: the twin of pyx/offsets.h.

A dict holds the open offsets, in order. All other offsets below the position are done.
pyx/offsets.pxi documents arguments, results and errors.
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from ackcore._arguments import (
    as_generation,
    as_offset,
    as_position,
    check_state,
    is_one_for_all,
    offset_column,
    tracker_key,
)
from ackcore._columns import MAX_TASK, as_count
from ackcore._records import Int64s, OffsetState, OffsetStats

Run = tuple[int, int]


class OffsetTracker:
    """The done offsets of one partition, in one generation of its assignment.

    The first offset that is not done is the one to commit, because a reader must begin again there.
    A message with another ``generation`` only counts as stale; None is this one.

    ``topic``, ``partition``, ``generation``: the tracked partition and the generation: a str, and
    ints >= 0. ``base``: the offset that this generation reads first; all below it are done.
    """

    def __init__(self, topic: str, partition: int, generation: int, base: int) -> None:
        self._key = tracker_key(topic, partition, generation, base)
        self._position = self._done_end = self._key.base
        # Emitted and not done, in order: the position only grows, so each is appended.
        self._open: OrderedDict[int, None] = OrderedDict()
        # Runs of holes of an earlier generation, as far as the position has not reached them.
        self._inherited: list[Run] = []
        self._attempts: dict[int, int] = {}
        self._waiting: set[int] = set()
        self._stale = self._below_base = self._not_emitted = self._repeated = 0
        self._lock = threading.Lock()

    # Properties ------------------------------------------------------------------------------

    @property
    def topic(self) -> str:
        """The topic."""
        return self._key.topic

    @property
    def partition(self) -> int:
        """The number of the partition."""
        return self._key.partition

    @property
    def generation(self) -> int:
        """The number of the partition's assignment; messages with another have no effect."""
        return self._key.generation

    @property
    def base(self) -> int:
        """The offset that this generation read first."""
        return self._key.base

    @property
    def position(self) -> int:
        """The highest offset that was emitted or passed, plus 1; at first the base."""
        return self._position

    @property
    def committable(self) -> int:
        """The lowest offset that is not done: the one to commit, Kafka's next offset to read."""
        with self._lock:
            return self._committable()

    @property
    def pending(self) -> int:
        """The number of offsets that were emitted and are not done."""
        return len(self._open)

    @property
    def waiting(self) -> int:
        """The number of pending offsets that failed and were not emitted again since."""
        return len(self._waiting)

    @property
    def oldest(self) -> int | None:
        """The lowest pending offset, or None."""
        with self._lock:
            return next(iter(self._open), None)

    @property
    def nbytes(self) -> int:
        """The approximate memory, in bytes."""
        with self._lock:
            an_offset = 2 * sys.getsizeof(2**40)
            sizes = map(sys.getsizeof, (self._open, self._inherited, self._attempts, self._waiting))
            return sum(sizes) + an_offset * (len(self._open) + len(self._attempts))

    @property
    def stats(self) -> OffsetStats:
        """The counts of offsets in messages that had no effect."""
        with self._lock:
            return self._stats()

    def _stats(self) -> OffsetStats:
        return OffsetStats(self._stale, self._below_base, self._not_emitted, self._repeated)

    def _committable(self) -> int:
        if self._open:
            return next(iter(self._open))
        if self._inherited:
            return self._inherited[0][0]
        return max(self._position, self._done_end)

    # Messages --------------------------------------------------------------------------------

    def emitted(self, offsets: Any, generation: int | None = None) -> int:
        """Mark offsets as emitted, and gaps below as done; return how many are newly in flight."""
        return self._apply(self._emit, offsets, generation, in_order=True)

    def acked(self, offsets: Any, generation: int | None = None) -> int:
        """Mark emitted offsets as done; return the number of those that were not done before."""
        return self._apply(self._ack, offsets, generation)

    def failed(self, offsets: Any, generation: int | None = None) -> int:
        """Mark offsets in flight as failed, to be emitted again; return how many were in flight."""
        return self._apply(self._fail, offsets, generation)

    def advance(self, position: int, generation: int | None = None) -> None:
        """Mark all offsets below a position that were not emitted as done: no record has them.

        A position below that of the tracker changes nothing.
        """
        to = as_position(position, "position")
        theirs = None if generation is None else as_generation(generation)
        with self._lock:
            if not self._is_stale(theirs, 1):
                self._pass(to)

    def _apply(
        self, one: Callable[[int], int], offsets: Any, generation: Any, in_order: bool = False
    ) -> int:
        if is_one_for_all(offsets):
            rows = [as_offset(offsets, "offsets")]
        else:
            rows = offset_column(offsets).tolist()
        theirs = None if generation is None else as_generation(generation)
        with self._lock:
            if self._is_stale(theirs, len(rows)):
                return 0
            return sum(map(one, sorted(rows) if in_order else rows))

    def _is_stale(self, generation: int | None, rows: int) -> bool:
        if generation is None or generation == self.generation:
            return False
        self._stale += rows
        return True

    def _emit(self, offset: int) -> int:
        if offset < self.base:
            self._below_base += 1
            return 0
        if offset < self._position:
            if offset in self._waiting:
                self._waiting.remove(offset)
                return 1
            self._repeated += 1
            return 0
        done_before = self._is_done(offset)
        self._pass(offset)
        self._position = offset + 1
        self._drop_passed()
        if done_before:
            self._repeated += 1
            return 0
        self._open[offset] = None
        return 1

    def _pass(self, position: int) -> None:
        """Raise the position; offsets below it that were not emitted do not exist, and are done.

        A position that is not higher changes nothing.
        """
        if position <= self._position:
            return
        self._position = position
        self._done_end = max(self._done_end, position)
        self._drop_passed()
        gone = [
            offset for offset in self._attempts if offset < position and offset not in self._open
        ]
        for offset in gone:
            del self._attempts[offset]

    def _drop_passed(self) -> None:
        """Remove the holes of an earlier generation below the position: now open or done."""
        passed = bisect_right(self._inherited, self._position, key=lambda run: run[1])
        del self._inherited[:passed]
        if self._inherited and self._inherited[0][0] < self._position:
            self._inherited[0] = (self._position, self._inherited[0][1])

    def _ack(self, offset: int) -> int:
        if not self._is_known(offset):
            return 0
        if offset not in self._open:
            self._repeated += 1
            return 0
        del self._open[offset]
        self._attempts.pop(offset, None)
        self._waiting.discard(offset)
        self._done_end = max(self._done_end, offset + 1)
        return 1

    def _fail(self, offset: int) -> int:
        if not self._is_known(offset):
            return 0
        if offset not in self._open or offset in self._waiting:
            self._repeated += 1
            return 0
        self._waiting.add(offset)
        self._attempts[offset] = min(self._attempts.get(offset, 0) + 1, MAX_TASK)
        return 1

    def _is_known(self, offset: int) -> bool:
        """Return whether an acked or failed offset may have been emitted; if not, count it."""
        self._below_base += offset < self.base
        self._not_emitted += offset >= self._position
        return self.base <= offset < self._position

    # Inspection, saving and loading ----------------------------------------------------------

    @overload
    def is_done(self, offsets: int) -> bool: ...
    @overload
    def is_done(self, offsets: Any) -> npt.NDArray[np.bool_]: ...
    def is_done(self, offsets: Any) -> bool | npt.NDArray[np.bool_]:
        """Return whether an offset, or each of a column, is done and need not be read (again)."""
        if is_one_for_all(offsets):
            offset = as_offset(offsets, "offsets")
            with self._lock:
                return self._is_done(offset)
        column = offset_column(offsets)
        with self._lock:
            return np.array([self._is_done(offset) for offset in column.tolist()], np.bool_)

    def _is_done(self, offset: int) -> bool:
        if offset < self._position:
            return offset not in self._open
        before = bisect_right(self._inherited, offset, key=lambda run: run[0])
        in_hole = before > 0 and offset < self._inherited[before - 1][1]
        return offset < self._done_end and not in_hole

    def attempt(self, offset: int) -> int:
        """Return the number of failures of an offset that is not done; 0 at the first attempt."""
        offset = as_offset(offset, "offset")
        with self._lock:
            return self._attempts.get(offset, 0)

    def holes(self, limit: int | None = None) -> Int64s:
        """Return up to ``limit`` offsets, or all, that are not done below a done one, sorted."""
        most = None if limit is None else as_count(limit, "limit", 0)
        found: list[int] = []
        with self._lock:
            for start, end in self._holes():
                left = end - start if most is None else most - len(found)
                found.extend(range(start, min(end, start + left)))
        return np.array(found, np.int64)

    def _holes(self) -> Iterator[Run]:
        """Yield the runs of holes, in order; adjacent runs are joined."""
        in_flight = ((offset, offset + 1) for offset in self._open if offset < self._done_end)
        return _joined([*in_flight, *self._inherited])

    def state(self, limit: int | None = None) -> OffsetState:
        """Return the state for the next reader, with at most ``limit`` runs of holes.

        If there are more, the state ends before the next run: done offsets above it are left out.
        """
        most = None if limit is None else as_count(limit, "limit", 0)
        with self._lock:
            return self._state(most)

    def _state(self, most: int | None) -> OffsetState:
        runs = list(self._holes())
        committable = self._committable()
        end = max(committable, self._done_end)
        if most is not None and len(runs) > most:
            end = runs[most][0]
        starts, ends = np.array(runs[:most], np.int64).reshape(-1, 2).T
        failed = sorted(self._attempts.items())
        return OffsetState(
            committable,
            end,
            starts.copy(),
            ends.copy(),
            np.array([offset for offset, _ in failed], np.int64),
            np.array([attempts for _, attempts in failed], np.int32),
        )

    @classmethod
    def from_state(
        cls, topic: str, partition: int, generation: int, state: OffsetState
    ) -> OffsetTracker:
        """Make a tracker that continues from the state of a tracker of an earlier generation."""
        checked = check_state(state)
        tracker = cls(topic, partition, generation, checked.committable)
        tracker._load(checked, checked.committable)
        return tracker

    def _load(self, state: OffsetState, position: int) -> None:
        runs = list(zip(state.hole_starts.tolist(), state.hole_ends.tolist(), strict=True))
        self._position, self._done_end, self._inherited = position, state.end, runs
        # Holes below the position are in flight, and so are all offsets after the last done one.
        flying = [(start, min(end, position)) for start, end in runs if start < position]
        for start, end in [*flying, (state.end, position)]:
            self._open.update(dict.fromkeys(range(start, end)))
        self._drop_passed()
        self._attempts = dict(zip(state.failed.tolist(), state.attempts.tolist(), strict=True))

    def __repr__(self) -> str:
        return (
            f"<ackcore.OffsetTracker: {self.topic}-{self.partition}, generation "
            f"{self.generation}, committable {self.committable}, {self.pending} pending, python>"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        with self._lock:
            return _restore, (
                type(self),
                self._key,
                self._state(None),
                self._position,
                np.array(sorted(self._waiting), np.int64),
                self._stats(),
            )


def _joined(runs: Iterable[Run]) -> Iterator[Run]:
    """Yield the given runs, which must be in order, with adjacent ones joined."""
    last: Run | None = None
    for start, end in runs:
        if last is not None and last[1] == start:
            last = (last[0], end)
        else:
            if last is not None:
                yield last
            last = (start, end)
    if last is not None:
        yield last


def _restore(
    cls: type[OffsetTracker],
    key: tuple[str, int, int, int],
    state: OffsetState,
    position: int,
    waiting: Int64s,
    stats: OffsetStats,
) -> OffsetTracker:
    """Unpickle a tracker."""
    tracker = cls(*key)
    tracker._load(state, position)
    tracker._waiting = set(waiting.tolist())
    tracker._stale, tracker._below_base, tracker._not_emitted, tracker._repeated = stats
    return tracker
