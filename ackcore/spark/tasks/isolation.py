"""Isolation in a task: records that earlier attempts had in flight when they crashed run alone.

An attempt reads the in-flight markers of the earlier attempts at its task that crashed in this run:

1. the roots of a chunk or set of more than 1,024 run 256 at a time;
2. the roots of a smaller one, and the plan's suspects, run one at a time.  While one runs, no other
   worker of the same Python daemon (one daemon per executor) has rows in a bolt;
3. a root that was alone in flight when two attempts crashed is rejected: it fails, and the others
   run.

So if Spark tries a task four times, one run rejects one crashing record of a chunk of up to 1,024.
A larger chunk costs one more crash, and then the next run continues, as it does where Spark does
not retry tasks: the driver draws the same conclusions from run to run (`suspects`).

The isolation depends only on the rows and these markers, and the markers stay until the run ends.
So a task that runs again because its output was lost makes the same bytes, unless another attempt
has crashed since.  Suspects run first, or in order of arrival if a spout has ``ordered_by`` or
``dedup``.

Two attempts are required, since a process may also be killed from outside, with any rows in flight.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import InitVar, dataclass, field
from itertools import groupby

import numpy as np

from ackcore._files.process_lock import ProcessLock
from ackcore._records import Int64s
from ackcore.spark.base.reasons import KILLED_WORKER
from ackcore.spark.stores.opening import is_bucket
from ackcore.spark.stores.run_files import local_directory
from ackcore.spark.tasks.bolts import Bolts
from ackcore.spark.tasks.inflight_markers import (
    ALONE,
    CHUNK,
    FLUSH,
    NOTHING,
    ROOTS,
    Marker,
    MarkerFile,
    MarkerObject,
    TaskAttempt,
    attempts,
    crashed,
    marker_of,
)
from ackcore.spark.tasks.ledger_rows import LedgerRows
from ackcore.spark.tasks.record_ids import Decoder
from ackcore.spark.tasks.time_limit import TimeLimit
from ackcore.spark.tasks.tracking import AnchoredRows, Chunks, Owners, some_rows
from ackcore.topology.stage_layout import Subscription
from ackcore.topology.tuples import Reason

#: The number of crashed attempts with a record alone in flight that rejects it.
ALONE_ENOUGH = 2
#: The most suspects that run one at a time, and the group size if there are more.
_FEW, _GROUP = 1024, 256
#: Seconds to wait until an earlier attempt, lost for Spark, has ended; seconds between looks.
_DYING_S, _LOOK_S = 5.0, 0.05


@dataclass
class Evidence:
    """The records that crashed attempts had in flight; false if there are none and no flush.

    ``alone`` counts, by root, the crashed attempts in which the root was alone in flight.
    ``suspects`` run alone. The roots in ``many``, and those in ``chunks`` (the number of a chunk
    and its number of rows), run alone if they are 1,024 at most, and else in groups of 256.
    ``flushed``: whether an attempt crashed in a flush. ``reasons``: time-outs by root.
    """

    alone: Counter[int] = field(default_factory=Counter)
    suspects: set[int] = field(default_factory=set)
    many: set[int] = field(default_factory=set)
    chunks: set[tuple[int, int]] = field(default_factory=set)
    flushed: bool = False
    reasons: dict[int, Reason] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.suspects or self.many or self.chunks or self.flushed)

    def add(self, marker: Marker) -> None:
        """Add the records of a crashed attempt's marker."""
        if marker.kind == CHUNK:
            self.chunks.add((marker.chunk, marker.rows))
        elif marker.kind == FLUSH:
            self.flushed = True
        elif marker.kind == ROOTS and len(marker.roots) > _FEW:
            self.many |= marker.roots
        else:
            self.suspects |= marker.roots
        if marker.kind == ALONE:
            self.alone.update(marker.roots)
            if marker.timed_out is not None:
                self.reasons.update(dict.fromkeys(marker.roots, marker.timed_out))

    def groups(self, chunk: int, rows: int, roots: Int64s) -> tuple[Int64s, list[Int64s]]:
        """Return a chunk's rejected roots, and its other suspects in groups that run in turn.

        ``chunk``, ``rows``, ``roots``: the number of the chunk in the task, its number of rows, and
        its distinct roots.
        """
        suspects = np.intersect1d(roots, _array(self.suspects))
        rejected = np.array([r for r in suspects.tolist() if self.alone[r] >= ALONE_ENOUGH])
        rejected = rejected.astype(np.int64)
        # Roots that were alone run first, before other rows make the process grow.
        singles = sorted(set(suspects.tolist()) - set(rejected.tolist()), key=self._order)
        more = roots if (chunk, rows) in self.chunks else np.intersect1d(roots, _array(self.many))
        more = np.setdiff1d(more, suspects)
        size = 1 if len(more) <= _FEW else _GROUP
        found = [np.array([root], np.int64) for root in singles]
        found += [more[start : start + size] for start in range(0, len(more), size)]
        return rejected, found

    def _order(self, root: int) -> tuple[int, int]:
        return -self.alone[root], root


@dataclass(eq=False, repr=False)
class AttemptIsolation:
    """The isolation of one attempt: its in-flight marker, the evidence it uses, and its time limit.

    ``work``: the run's directory. ``attempt``: the attempt that runs here. ``names``: whether
    markers name roots, as the driver requires in careful runs, or chunks. ``alone``: by suspect of
    the plan, the number of crashed attempts in which only it was in flight. ``isolates``: whether
    to isolate records: the markers of earlier attempts name the same rows, and are not from
    speculative copies. ``timeout_s``: the time limit of one call of a bolt in seconds.
    """

    _work: str
    _attempt: TaskAttempt
    names: bool
    _alone: Mapping[int, int]
    _isolates: bool
    timeout_s: InitVar[float | None]
    evidence: Evidence = field(default_factory=Evidence)
    _file: MarkerFile | MarkerObject | None = None
    _executor: ProcessLock | None = None
    _inside: bool = False
    _chunks: int = 0

    def __post_init__(self, timeout_s: float | None) -> None:
        self.time_limit = TimeLimit(timeout_s, self._attempt.time_out_path(self._work))

    def begin(self) -> int:
        """Begin a chunk, and return its number in the task, from 0.

        The first call creates the marker of this attempt. With ``isolates``, it first reads the
        markers of earlier attempts, and waits up to 5 s for those that still run, except in a
        bucket.
        """
        if self._file is None:
            self.evidence = Evidence(Counter(dict(self._alone)), set(self._alone))
            # In a bucket there are only markers that name roots.
            if self._isolates and (self.names or not is_bucket(self._work)):
                for marker in self._earlier():
                    self.evidence.add(marker)
                self.names |= self.evidence.flushed
            self._file = marker_of(self._work, self._attempt)
            self._executor = ProcessLock(_executor_lock(self._work))
        self._chunks += 1
        return self._chunks - 1

    def _earlier(self) -> list[Marker]:
        """Return the markers of crashed attempts at this task; wait `_DYING_S` for running ones."""
        until = time.monotonic() + _DYING_S
        while True:
            # Spark may try the task again before the workers of a lost executor have ended.
            found = crashed(self._work, self._attempt.task)
            task = self._attempt.task
            if is_bucket(self._work):
                return found  # which may include attempts that still run
            there = [attempt for attempt in attempts(self._work) if attempt.task == task]
            if len(found) >= len(there) or time.monotonic() > until:
                return found
            time.sleep(_LOOK_S)

    def end(self) -> None:
        """Stop the time limit and remove the marker: the attempt has ended, perhaps by an error."""
        self.time_limit.end()
        if self._executor is not None:
            self._executor.close()
            self._executor = None
        if self._file is not None:
            self._file.remove()
            self._file = None

    # --------------------------------------------------------------------------- rows in flight

    def of_chunk(self, chunk: int, rows: int, roots: Int64s | None) -> AbstractContextManager[None]:
        """Return a context in which a chunk or, if given, its roots are marked as in flight."""
        return self._marked(CHUNK if roots is None else ROOTS, chunk, rows, roots)

    def of_roots(self, roots: Int64s) -> AbstractContextManager[None]:
        """Return a context in which suspects are marked as in flight.

        With a single root, its start waits until no other worker of this executor has rows in a
        bolt, and others wait for its end.
        """
        return self._marked(ALONE if len(roots) == 1 else ROOTS, 0, 0, roots)

    def of_flush(self, roots: Int64s | None) -> AbstractContextManager[None]:
        """Return a context in which the bolts' open rows, or their roots, are marked as in flight.

        It marks nothing if ``roots`` is empty, or other rows are marked.
        """
        if self._inside or (roots is not None and not len(roots)):
            return nullcontext()
        return self._marked(FLUSH if roots is None else ROOTS, 0, 0, roots)

    @contextmanager
    def _marked(self, kind: int, chunk: int, rows: int, roots: Int64s | None) -> Iterator[None]:
        assert self._file is not None
        assert self._executor is not None
        self._executor.lock(fcntl.LOCK_EX if kind == ALONE else fcntl.LOCK_SH)
        self._file.set(kind, chunk, rows, roots)
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
            self._file.set(NOTHING)
            self._executor.lock(fcntl.LOCK_UN)


@dataclass(eq=False, repr=False)
class IsolatedBolts:
    """The bolts of a task, with a marker for the rows in flight and with suspects run alone.

    ``ledger_rows``: the collector of failures, for rejected roots. ``in_order``: whether suspects
    and the other rows run in order of arrival, as ``ordered_by`` and ``dedup`` promise.
    """

    _bolts: Bolts
    _isolation: AttemptIsolation
    _chunks: Chunks
    _ledger_rows: LedgerRows
    _in_order: bool

    def deliver(
        self, source: str, stream: str, rows: AnchoredRows, decode: Decoder | None = None
    ) -> None:
        """Pass rows of a spout to the bolts. Decode them first, which may crash the process, too.

        Rows that cannot be decoded fail.
        """
        for part in self._parts(rows):
            some = part if decode is None else self._decoded(source, part, decode)
            self._bolts.deliver(source, stream, some)

    def _decoded(self, source: str, rows: AnchoredRows, decode: Decoder) -> AnchoredRows:
        """Return the rows that a spout emits for its source's rows; fail undecodable rows."""
        with self._isolation.time_limit.on(source):
            batch, undecodable = decode(rows.batch)
        bare = rows.without_columns()
        decoded = AnchoredRows(batch, lambda: bare.owners, rows.identity, rows.only_chunk)
        return self._ledger_rows.fail_some(decoded, undecodable, source)

    def process(self, sub: Subscription, rows: AnchoredRows) -> None:
        """Run the target bolt of a subscription on the rows received for it."""
        for part in self._parts(rows):
            self._bolts.process(sub.target, sub.source, sub.stream, part)

    def flush(self) -> None:
        """Flush the bolts, and mark their open rows as in flight meanwhile."""
        if not self._bolts.used:
            return
        roots = self._open_roots() if self._isolation.names else None
        with self._isolation.of_flush(roots):
            self._bolts.flush()

    def _open_roots(self) -> Int64s:
        """Return the roots of the tuples that bolts may still have open."""
        found = [self._chunks.roots_of(rows.owners)[1] for rows in self._bolts.open_rows]
        return np.unique(np.concatenate([np.empty(0, np.int64), *found]))

    def _parts(self, rows: AnchoredRows) -> Iterator[AnchoredRows]:
        """Yield rows in the parts to process: each group of suspects alone, then all other rows.

        With ``in_order``, suspects and other rows come in order of arrival. Rejected rows fail. The
        bolts are flushed before and after each group of suspects.
        """
        isolation = self._isolation
        chunk = isolation.begin()
        if not (isolation.names or isolation.evidence):
            with isolation.of_chunk(chunk, len(rows), None):
                yield rows
            return
        of_row, of_root = self._chunks.roots_of(rows.owners)
        left = np.ones(len(rows), np.bool_)
        rejected, groups = isolation.evidence.groups(chunk, len(rows), np.unique(of_root))
        # A row of several roots runs with its suspects, not with its other roots.
        decides = np.isin(of_root, np.concatenate([rejected, *groups]))
        decides |= ~np.isin(of_row, of_row[decides])

        def taken(roots: Int64s) -> Int64s:  # takes the roots' rows out of the rows left
            places = np.unique(of_row[decides & np.isin(of_root, roots)])
            places = places[left[places]]
            left[places] = False
            return places

        def roots_of(places: Int64s) -> Int64s:
            return np.unique(of_root[np.isin(of_row, places)])

        for root in rejected.tolist():
            reason = isolation.evidence.reasons.get(root, KILLED_WORKER)
            self._reject(root, reason, rows, taken(np.array([root])))
        parts = [(group, True) for group in groups]
        if self._in_order and groups:
            in_turn = np.argsort(of_row, kind="stable")
            parts = _by_arrival(groups, of_root[in_turn[decides[in_turn]]])
        found = [(taken(group), alone) for group, alone in parts]
        for places, alone in (*found, (np.flatnonzero(left), False)):
            if not len(places):
                continue
            some = rows if len(places) == len(rows) else some_rows(rows, places)
            if alone:
                self.flush()
                with isolation.of_roots(roots_of(places)):
                    yield some
                    self.flush()
            else:
                # The marker has the row count of the whole chunk: the next attempt compares it.
                roots = roots_of(places) if isolation.names else None
                with isolation.of_chunk(chunk, len(rows), roots):
                    yield some

    def _reject(self, root: int, reason: Reason, rows: AnchoredRows, places: Int64s) -> None:
        """Fail the rows with the numbers ``places``, which have a rejected root.

        Rows that have other roots too do not fail for good.
        """
        groups = np.unique(rows.owners.take(places, None).pairs()[1])
        own = [
            self._chunks.roots_of(Owners(groups[i : i + 1]))[1] == root for i in range(len(groups))
        ]
        alone = np.array([found.all() for found in own], np.bool_)
        for some, why in ((groups[alone], reason), (groups[~alone], reason._replace(final=False))):
            if len(some):
                self._ledger_rows.fail(Owners(some), [why], why.component)


def _by_arrival(groups: list[Int64s], roots: Int64s) -> list[tuple[Int64s, bool]]:
    """Cut roots into groups in their order; return each with whether its roots are suspects.

    ``groups``: the suspects, as `Evidence.groups` returns them. ``roots``: may have repetitions.
    """
    roots = roots[np.sort(np.unique(roots, return_index=True)[1])]
    # 1 for a root that runs alone, 2 for one that runs in a group of suspects.
    kinds = {root: min(len(group), 2) for group in groups for root in group.tolist()}
    found = []
    for kind, some in groupby(roots.tolist(), lambda root: kinds.get(root, 0)):
        part = np.array([*some], np.int64)
        size = (len(part), 1, _GROUP)[kind]
        found += [(part[at : at + size], kind > 0) for at in range(0, len(part), size)]
    return found


def _array(roots: set[int]) -> Int64s:
    return np.array(sorted(roots), np.int64)


def _executor_lock(work: str) -> str:
    """Return the path of the lock file of one executor's workers, which have the same parent."""
    directory = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0]
    if not directory:
        directory = local_directory() if is_bucket(work) else work
    return os.path.join(directory, f"ackcore-{os.getppid()}.lock")
