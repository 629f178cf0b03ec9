"""The ledger in plain Python: the table of pending roots.

`Pending` is the entry of one root, and the effect of each message on it: SEMANTICS 2 and 4, to the
letter. Messages follow Apache Storm 2.x, ``org.apache.storm.daemon.Acker`` (its `AckObject`,
`execute`). Merging and deciding are ackcore's own.

`Ledger` has one dict from root id to entry, one list of the entries that expired at the last turn,
and one lock. It has Storm's `RotatingMap` (SEMANTICS 3), as a counter of turns, and the methods
that take and return columns.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ackcore import _columns
from ackcore._records import (
    ACK,
    ACKED,
    ANOMALY,
    EXPIRED,
    FAIL,
    FAILED,
    FLAG_FAILED,
    FLAG_TASKS_DIFFER,
    OPEN,
    ORPHAN,
    RESET,
    RESET_TIMEOUT,
    Entries,
    Entry,
    Outcome,
    Outcomes,
    Settled,
    Stats,
    Status,
)

UNSET = -1  # the task of an entry before its init
#: The types of the columns of `Entries`.
_ENTRY_TYPES = ("i8", "i8", "i4", "u1", "u1", "u1", "i8", "i8")


@dataclass(slots=True)
class Pending:
    """One pending root.

    ``turn`` is the number of the ledger's rotations before the entry was last put in the newest
    bucket. In a ledger without a clock, the times are 0 and never returned.
    """

    turn: int
    first_ms: int
    last_ms: int
    val: int = 0
    task: int = UNSET
    inits: int = 0
    flags: int = 0

    def receive(self, val: int, task: int) -> None:
        """Fold one message in, without an outcome.

        ``task``: the spout task of an INIT, at least 0; or ACK, FAIL or RESET.
        """
        if task == FAIL:
            self.flags |= FLAG_FAILED
        elif task == ACK:
            self.val ^= val
        elif task != RESET:
            self.val ^= val
            if self.inits and self.task != task:
                self.flags |= FLAG_TASKS_DIFFER
            self.inits = min(self.inits + 1, 2)
            self.task = task

    def apply(self, val: int, task: int) -> Status | None:
        """Fold one message in; return the kind of its outcome, or None without one.

        After ACKED or FAILED the caller removes the entry.
        """
        self.receive(val, task)
        if self.task >= 0:
            if self.val == 0:
                return ACKED
            if self.flags & FLAG_FAILED:
                return FAILED
            if task == RESET:
                return RESET_TIMEOUT
        return None

    def merge(self, row: Pending) -> None:
        """Fold in another entry of the same root, by the rules of SEMANTICS 4."""
        self.flags |= row.flags
        if self.inits and row.inits and self.task != row.task:
            self.flags |= FLAG_TASKS_DIFFER
        self.val ^= row.val
        self.task = max(self.task, row.task)
        self.inits = min(self.inits + row.inits, 2)
        self.turn = max(self.turn, row.turn)
        self.first_ms = min(self.first_ms, row.first_ms)
        self.last_ms = max(self.last_ms, row.last_ms)

    def decide(self, deadline: int | None) -> Status:
        """Return the root's status (SEMANTICS 4).

        Without an INIT it is OPEN or ORPHAN. Else the first that applies: ANOMALY for several
        INITs, ACKED, FAILED, EXPIRED, OPEN. ``deadline``: an entry whose last message is earlier
        has timed out. None without a time-out.
        """
        past = deadline is not None and self.last_ms < deadline
        if self.inits == 0:
            return ORPHAN if past else OPEN
        if self.inits > 1 or self.flags & FLAG_TASKS_DIFFER:
            return ANOMALY
        if self.val == 0:
            return ACKED
        if self.flags & FLAG_FAILED:
            return FAILED
        return EXPIRED if past else OPEN


class Ledger:
    """The pending tuple trees, by root id; SEMANTICS defines the messages.

    ``capacity``: the number of entries to reserve room for. A ledger grows as needed. A capacity
    above any table's limit raises `MemoryError`, as in the native ledger. ``buckets``: the number
    of turns (`rotate`) after which an entry expires: 2..126. ``refresh_on_ack``: whether every
    message moves its entry to the newest bucket, as in early Storm, and not only FAIL and RESET.
    ``clock``: returns the time in milliseconds; called once per call. A ledger with a clock keeps
    times. ``max_entries``: the limit on entries. A call that might exceed it raises `LedgerFull`
    and applies nothing. ``seed``: ignored, because a dict has its own. The native ledger hashes
    with it.
    """

    def __init__(
        self,
        capacity: int = 1024,
        *,
        buckets: int = 3,
        refresh_on_ack: bool = False,
        clock: Callable[[], int] | None = None,
        max_entries: int | None = None,
        seed: int | None = None,
    ) -> None:
        self._options = _columns.ledger_options(
            capacity, buckets, refresh_on_ack, clock, max_entries, seed
        )
        self._pending: dict[int, Pending] = {}
        self._left: list[Entry] = []  # entries that expired at the last turn and were not taken yet
        self._turn = 0
        self._second_inits = self._orphans = self._expired_untaken = 0
        self._lock = threading.Lock()

    @property
    def buckets(self) -> int:
        """The number of calls of `rotate` after which an entry expires."""
        return self._options.buckets

    @property
    def refresh_on_ack(self) -> bool:
        """Whether every message moves its entry to the newest bucket."""
        return self._options.refresh_on_ack

    @property
    def clock(self) -> Callable[[], int] | None:
        """The clock, or None."""
        return self._options.clock

    @property
    def max_entries(self) -> int | None:
        """The limit on the number of entries, or None."""
        return self._options.max_entries

    @property
    def capacity(self) -> int:
        """The number of entries that there is room for now, the present ones included."""
        return max(self._options.capacity, len(self._pending))

    @property
    def nbytes(self) -> int:
        """The approximate memory of the pending entries, in bytes."""
        with self._lock:
            an_entry = sys.getsizeof(Pending(0, 0, 0)) + 3 * sys.getsizeof(2**63)
            return sys.getsizeof(self._pending) + an_entry * len(self._pending)

    @property
    def stats(self) -> Stats:
        """Counters since the ledger was made."""
        with self._lock:
            return self._stats()

    @property
    def tables(self) -> tuple[npt.NDArray[np.uint8], ...]:
        """The arrays that hold the entries: always empty in this backend."""
        return ()

    # Messages -------------------------------------------------------------------------------

    def apply(self, root_ids: Any, vals: Any, tasks: Any) -> Outcomes:
        """Apply a mixed batch of messages, row by row.

        ``root_ids``, ``vals``: parallel columns. Both dtypes are the same 64 bits. ``tasks``: the
        kind of each row: a task >= 0 is an INIT by that spout task; otherwise ``ACK``, ``FAIL`` or
        ``RESET``, of which the last two ignore their val.

        Returns the outcomes, in the order of the rows. Raises TypeError or ValueError if a column
        or the clock's result has a wrong type or value. Raises LedgerFull if the number of entries
        might exceed ``max_entries``.

        If it raises, nothing has been applied.
        """
        return self._apply_many("apply", root_ids=root_ids, vals=vals, tasks=tasks)

    def init_many(self, root_ids: Any, init_vals: Any, tasks: Any) -> Outcomes:
        """Apply a batch of INITs; see `apply`. ``tasks`` must be >= 0."""
        return self._apply_many("init_many", root_ids=root_ids, init_vals=init_vals, tasks=tasks)

    def ack_many(self, root_ids: Any, ack_vals: Any) -> Outcomes:
        """Apply a batch of ACKs; see `apply`."""
        return self._apply_many("ack_many", root_ids=root_ids, ack_vals=ack_vals)

    def fail_many(self, root_ids: Any) -> Outcomes:
        """Apply a batch of FAILs; see `apply`."""
        ids = _columns.id_column(root_ids, "root_ids")
        return self._apply_rows(ids.tolist(), [0] * len(ids), [FAIL] * len(ids))

    def reset_timeout_many(self, root_ids: Any) -> Outcomes:
        """Apply a batch of RESETs; see `apply`."""
        ids = _columns.id_column(root_ids, "root_ids")
        return self._apply_rows(ids.tolist(), [0] * len(ids), [RESET] * len(ids))

    def init(self, root_id: int, init_val: int, task: int) -> Outcome | None:
        """Apply one INIT by the spout task ``task``; return its outcome, or None without one."""
        root = _columns.as_id(root_id, "root_id")
        val = _columns.as_id(init_val, "init_val")
        return self._apply_one(root, val, _columns.as_count(task, "task", 0, _columns.MAX_TASK))

    def ack(self, root_id: int, ack_val: int) -> Outcome | None:
        """Apply one ACK; return its outcome, or None if it completes nothing."""
        root = _columns.as_id(root_id, "root_id")
        return self._apply_one(root, _columns.as_id(ack_val, "ack_val"), ACK)

    def fail(self, root_id: int) -> Outcome | None:
        """Apply one FAIL; return its outcome, or None without an INIT."""
        return self._apply_one(_columns.as_id(root_id, "root_id"), 0, FAIL)

    def reset_timeout(self, root_id: int) -> Outcome | None:
        """Apply one RESET; return its outcome, or None without an INIT."""
        return self._apply_one(_columns.as_id(root_id, "root_id"), 0, RESET)

    def _apply_many(self, method: str, **given: Any) -> Outcomes:
        columns = _columns.message_columns(method, given)
        ids, xors, *tasks = [column.tolist() for column in columns.values()]
        return self._apply_rows(ids, xors, tasks[0] if tasks else [ACK] * len(ids))

    def _apply_one(self, root: int, val: int, task: int) -> Outcome | None:
        return next(iter(self._apply_rows([root], [val], [task])), None)

    def _apply_rows(self, roots: list[int], vals: list[int], tasks: list[int]) -> Outcomes:
        now = None if self.clock is None else _columns.read_clock(self.clock)
        with self._lock:
            self._refuse_if_full(roots)
            outcomes = [
                outcome
                for root, val, task in zip(roots, vals, tasks, strict=True)
                if (outcome := self._message(root, val, task, now)) is not None
            ]
        ids, spouts, kinds, elapsed = _columns_of(outcomes, 4)
        return Outcomes(
            np.array(ids, np.int64),
            np.array(spouts, np.int32),
            np.array(kinds, np.uint8),
            None if now is None else np.array(elapsed, np.int64),
        )

    def _refuse_if_full(self, roots: Iterable[int]) -> None:
        if self.max_entries is None:
            return
        new = sum(root not in self._pending for root in roots)
        if len(self._pending) + new > self.max_entries:
            _columns.refuse_full(len(self._pending), new, self.max_entries)

    def _message(self, root: int, val: int, task: int, now: int | None) -> Outcome | None:
        time = 0 if now is None else now
        entry = self._pending.get(root)
        if entry is None:
            entry = self._pending[root] = Pending(self._turn, time, time)
        entry.last_ms = time
        if task in (FAIL, RESET) or self.refresh_on_ack:
            entry.turn = self._turn
        self._second_inits += task >= 0 and entry.inits > 0
        kind = entry.apply(val, task)
        if kind is None:
            return None
        if kind is not RESET_TIMEOUT:
            del self._pending[root]
        elapsed = None if now is None else _columns.signed(now - entry.first_ms)
        return Outcome(root, entry.task, kind, elapsed)

    # Time -----------------------------------------------------------------------------------

    def rotate(self) -> None:
        """Turn the buckets once: the entries of the oldest one expire, and `expired` returns them.

        Entries that expired at the call before and were not taken are dropped and counted.
        """
        with self._lock:
            self._expired_untaken += len(self._left)
            self._turn += 1
            left = [
                root
                for root, entry in self._pending.items()
                if self._turn - entry.turn >= self.buckets
            ]
            self._left = [self._row(root) for root in left]
            self._orphans += sum(entry.task == UNSET for entry in self._left)
            for root in left:
                del self._pending[root]

    def expired(self, limit: int | None = None) -> Entries:
        """Remove and return entries that expired in the last `rotate`: all, or up to ``limit``."""
        if limit is not None:
            limit = _columns.as_count(limit, "limit", 0)
        with self._lock:
            taken, self._left = self._left[:limit], [] if limit is None else self._left[limit:]
            return self._entries_of(taken)

    # Folding and settling -------------------------------------------------------------------

    def merge(self, entries: Entries) -> None:
        """Fold another ledger's entries into the pending ones; none completes.

        ``entries``: the entries, in any order; a root may occur several times. They have times if
        and only if this ledger has a clock. Raises TypeError or ValueError for entries that a
        ledger cannot hold, and LedgerFull if they might exceed ``max_entries``; nothing is folded.
        """
        rows = _columns.check_entries(entries, self.buckets, self.clock is not None)
        with self._lock:
            self._refuse_if_full(rows.root_ids.tolist())
            for row in rows:
                turn = self._turn - row.age
                times = row.first_ms or 0, row.last_ms or 0
                folded = Pending(turn, *times, row.val, row.task, row.inits, row.flags)
                self._fold(row.root_id, folded)

    def fold(self, root_ids: Any, vals: Any, tasks: Any, times_ms: Any = None) -> None:
        """Combine a mixed batch of messages with the pending entries. Nothing completes.

        A message of any kind moves its entry to the newest bucket.
        ``root_ids``, ``vals``, ``tasks``, and the errors: see `apply`. ``times_ms``: the time at
        which each message was sent, only for a ledger with a clock; by default the clock's time.
        """
        ids = _columns.id_column(root_ids, "root_ids")
        xors = _columns.id_column(vals, "vals")
        kinds = _columns.task_column(tasks, "tasks")
        given = _columns.times_column(times_ms, self.clock is not None)
        if given is None:
            _columns.same_length(root_ids=ids, vals=xors, tasks=kinds)
        else:
            _columns.same_length(root_ids=ids, vals=xors, tasks=kinds, times_ms=given)
        _columns.check_kinds(kinds)
        if given is not None:
            times = given.tolist()
        else:
            now = 0 if self.clock is None else _columns.read_clock(self.clock)
            times = [now] * len(ids)
        rows = zip(ids.tolist(), xors.tolist(), kinds.tolist(), times, strict=True)
        with self._lock:
            self._refuse_if_full(ids.tolist())
            for root, val, task, time in rows:
                row = Pending(self._turn, time, time)
                row.receive(val, task)
                self._fold(root, row)

    def _fold(self, root: int, row: Pending) -> None:
        entry = self._pending.get(root)
        if row.inits == 2 or (row.inits and entry is not None and entry.inits):
            self._second_inits += 1
        if entry is None:
            self._pending[root] = row
        else:
            entry.merge(row)

    def settle(self, now_ms: int | None = None, timeout_ms: int | None = None) -> Settled:
        """Give each entry a `Status`; remove and return those that are not OPEN.

        ``now_ms``: the time in milliseconds; the clock's by default. Unused without ``timeout_ms``.
        ``timeout_ms``: the time-out: an entry whose last message is older has timed out. By default
        no entry times out. Needs a ledger with a clock.

        Returns the decided roots in any order; the open ones stay in the ledger.
        """
        deadline = _columns.deadline(now_ms, timeout_ms, self.clock)
        with self._lock:
            statuses = {
                root: status
                for root, entry in self._pending.items()
                if (status := entry.decide(deadline)) != OPEN
            }
            decided = self._entries_of([self._row(root) for root in statuses])
            for root in statuses:
                del self._pending[root]
        columns = decided.columns()
        del columns["ages"]
        return Settled(statuses=np.array(list(statuses.values()), np.uint8), **columns)

    # Inspection, saving, loading ------------------------------------------------------------

    def entries(self) -> Entries:
        """Return all pending entries, in any order."""
        with self._lock:
            return self._entries_of([self._row(root) for root in self._pending])

    @classmethod
    def from_entries(cls, entries: Entries, **arguments: Any) -> Ledger:
        """Make a ledger with these entries; the other arguments are the constructor's."""
        ledger = cls(**arguments)
        ledger.merge(entries)
        return ledger

    def get(self, root_id: int) -> Entry | None:
        """Return the entry of a root, or None if it is not pending."""
        root = _columns.as_id(root_id, "root_id")
        with self._lock:
            return self._row(root) if root in self._pending else None

    def oldest(self, n: int) -> Entries:
        """Return the ``n`` oldest entries: by age, then by first message, then by root id."""
        n = _columns.as_count(n, "n", 0)
        with self._lock:
            rows = [self._row(root) for root in self._pending]
            rows.sort(key=lambda row: (-row.age, row.first_ms or 0, row.root_id))
            return self._entries_of(rows[:n])

    def __len__(self) -> int:
        with self._lock:
            return len(self._pending)

    def __contains__(self, root_id: object) -> bool:
        root = _columns.as_id(root_id, "root_id")
        with self._lock:
            return root in self._pending

    def __repr__(self) -> str:
        return f"<ackcore.Ledger: {len(self)} entries, {self.nbytes} bytes, python>"

    def __reduce__(self) -> tuple[Any, ...]:
        with self._lock:
            state = (
                self._entries_of([self._row(root) for root in self._pending]),
                self._entries_of(self._left),
                self._stats(),
            )
        return _restore, (type(self), self._options, *state)

    def _stats(self) -> Stats:
        return Stats(self._second_inits, self._orphans, self._expired_untaken, 0)

    def _row(self, root: int) -> Entry:
        entry = self._pending[root]
        age = self._turn - entry.turn
        times = (None, None) if self.clock is None else (entry.first_ms, entry.last_ms)
        return Entry(root, entry.val, entry.task, entry.inits, entry.flags, age, *times)

    def _entries_of(self, rows: Sequence[Entry]) -> Entries:
        columns = _columns_of(rows, 6 if self.clock is None else 8)
        return Entries(*map(np.array, columns, _ENTRY_TYPES))


def _columns_of(rows: Sequence[tuple[Any, ...]], width: int) -> list[list[Any]]:
    return [[row[column] for row in rows] for column in range(width)]


def _restore(
    cls: type[Ledger], options: _columns.Options, entries: Entries, left: Entries, stats: Stats
) -> Ledger:
    """Unpickle a ledger."""
    ledger = cls.from_entries(entries, **options._asdict())
    ledger._left = list(left)
    ledger._second_inits, ledger._orphans, ledger._expired_untaken, _ = stats
    return ledger
