"""An acker for one process: a ledger in shards, a clock that turns its buckets, and callbacks.

See `ackcore.Ledger` for the meaning of the messages. The shard of a root is Storm's acker task
(`ackcore.ids.acker_task`, SEMANTICS 1), so all messages of a root reach the same ledger, in order.

*Time.*  Storm's spout gives up a tuple after at most two time-outs, so an acker that drops entries
earlier would fail trees that do complete. An entry expires ((buckets - 1) * period, buckets *
period] after it was put, to the millisecond of the clock. Messages also turn the buckets when a
turn is due, so a late `Acker.tick` lets no entry expire early. With Storm's defaults (3 buckets, a
turn each time-out T) that is (2T, 3T].

*Threads.*  Any thread may call any method. Callbacks run in the thread whose call had the outcomes,
and outside of all locks, so they may call the acker.
"""

from __future__ import annotations

import inspect
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from ackcore import _backend
from ackcore._backend import AckerBackend, BackendFactory, load_backend
from ackcore._columns import (
    MAX_BUCKETS,
    MIN_BUCKETS,
    as_count,
    as_id,
    as_ms,
    check_entries,
    message_columns,
    positive,
    read_clock,
)
from ackcore._error_hints import naming_arguments
from ackcore._records import Entries, Entry, Outcome, Outcomes, Stats
from ackcore.ids import acker_task

MAX_SHARDS = 2**16

_log = logging.getLogger(__name__)

OnOutcomes = Callable[[int, Outcomes], object]
OnExpired = Callable[[Entries], object]


def monotonic_ms() -> int:
    """Return the milliseconds of a monotonic clock, on Linux since the machine's start."""
    return time.monotonic_ns() // 1_000_000


class Acker:
    """Pending tuple trees in shards, with expiry.

    Parameters
    ----------
    backend : str or callable, optional
        The maker of ledgers: ``"native"``, ``"python"``, a name in the entry-point group
        ``ackcore.backends``, or a callable with the arguments of `ackcore.Ledger`. By default
        `ackcore.Ledger`.
    shards : int, default 1
        The number of ledgers among which roots are divided, as Storm divides them among acker
        tasks.
    timeout_s : float, default 30.0
        The spout's message time-out, T.
    buckets : int, default 3
        The number of turns after which an entry expires.
    period_s : float, optional
        The time between turns, rounded up to whole milliseconds. By default ``timeout_s``.
    clock : callable, optional
        Returns milliseconds as an int. By default `monotonic_ms`. If another machine's acker is to
        continue with saved entries, use a clock with the same zero everywhere.
    on_outcomes : callable, optional
        ``on_outcomes(task, outcomes)`` is called for each spout task that has outcomes in a call.
    on_expired : callable, optional
        ``on_expired(entries)`` is called by `tick` with expired entries. Without it, expired
        entries are counted in `stats` and dropped.
    capacity : int, default 1024
        The number of entries to reserve room for, in all shards together.
    refresh_on_ack : bool, default False
        Whether every message moves its entry to the newest bucket, and not only FAIL and RESET.
    wait : callable, optional
        The wait of the thread of `start`: ``wait(stopping, seconds)`` returns when the time is over
        or the event ``stopping`` is set. By default `threading.Event.wait`.

    Raises
    ------
    ValueError
        If an argument is out of range, or the acker would drop trees that are still pending in the
        spout: ``(buckets - 1) * period_s < 2 * timeout_s``.
    TypeError
        If an argument has another type, or the backend's ledgers lack methods.
    ImportError
        If the backend of this name cannot be loaded.

    Notes
    -----
    If a callback raises, the other callbacks of the call are still made and the messages stay
    applied. The call then raises that exception, or a `BaseExceptionGroup` if several raised. Only
    `KeyboardInterrupt` is raised at once.

    Each shard applies a batch as a whole or not at all. If one of several shards lacks memory, the
    others may have applied their rows: ``on_outcomes`` gets the outcomes, and the call raises.
    """

    @naming_arguments
    def __init__(
        self,
        backend: str | BackendFactory | None = None,
        *,
        shards: int = 1,
        timeout_s: float = 30.0,
        buckets: int = 3,
        period_s: float | None = None,
        clock: Callable[[], int] | None = None,
        on_outcomes: OnOutcomes | None = None,
        on_expired: OnExpired | None = None,
        capacity: int = 1024,
        refresh_on_ack: bool = False,
        wait: Callable[[threading.Event, float], object] = threading.Event.wait,
    ) -> None:
        if shards == 0:
            raise ValueError(
                "shards must be at least 1, got 0: records would not be tracked; to run "
                "without tracking, create no Acker"
            )
        shards = as_count(shards, "shards", 1, MAX_SHARDS)
        self._buckets = as_count(buckets, "buckets", MIN_BUCKETS, MAX_BUCKETS)
        timeout_ms = _milliseconds(timeout_s, "timeout_s")
        self._period_ms = timeout_ms if period_s is None else _milliseconds(period_s, "period_s")
        if (self._buckets - 1) * self._period_ms < 2 * timeout_ms:
            needed = 1 + -(-2 * timeout_ms // self._period_ms)
            raise ValueError(
                "the acker would drop pending trees after "
                f"{(self._buckets - 1) * self._period_ms} ms, and a spout may wait 2 * "
                f"timeout_s = {2 * timeout_ms} ms for them; use "
                + (f"buckets={needed} or " if needed <= MAX_BUCKETS else "")
                + f"period_s={-(-2 * timeout_ms // (self._buckets - 1)) / 1000}"
            )
        self._clock = _callable(monotonic_ms if clock is None else clock, "clock")
        self._on_outcomes = None if on_outcomes is None else _callable(on_outcomes, "on_outcomes")
        self._on_expired = None if on_expired is None else _callable(on_expired, "on_expired")
        self._wait = _callable(wait, "wait")

        factory = _factory(backend)
        each = -(-as_count(capacity, "capacity", 1) // shards)
        self._shards = [
            _ledger(factory, each, self._buckets, refresh_on_ack, self._clock)
            for _ in range(shards)
        ]
        # Guards the turns and the expired entries. Never held during a callback.
        self._turning = threading.Lock()
        self._next_turn_ms = read_clock(self._clock) + self._period_ms
        self._left: list[Entries] = []

        # Guards the attributes of the thread. Never held while waiting for the thread.
        self._starting = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._thread_error: BaseException | None = None

    @classmethod
    def from_entries(cls, entries: Entries, *args: Any, **kwargs: Any) -> Self:
        """Return an acker that continues with saved entries.

        ``entries``: the result of `Acker.entries` or `ackcore.Ledger.entries`, with times, of any
        number of shards. ``*args``, ``**kwargs``: the arguments of the constructor. The clock must
        have the zero of the clock that made the times.

        The first turn is one period away, so the entries live up to one period longer.
        """
        acker = cls(*args, **kwargs)
        checked = check_entries(entries, acker._buckets, timed=True)
        order, shards = acker._split(checked.root_ids)
        ordered = checked.take(order)
        for shard, rows in shards:
            acker._shards[shard].merge(ordered.take(rows))
        return acker

    @property
    def shards(self) -> int:
        """The number of ledgers."""
        return len(self._shards)

    @property
    def buckets(self) -> int:
        """The number of turns, one per period, after which an entry expires."""
        return self._buckets

    # Messages.  Columns, as in `ackcore.Ledger`.

    def apply(self, root_ids: Any, vals: Any, tasks: Any) -> Outcomes:
        """Apply a mixed batch of messages in order; see `ackcore.Ledger.apply` for the arguments.

        Like all messages, first turns the buckets if a turn is due, and calls ``on_outcomes``.
        Returns the outcomes shard by shard. Within a shard, and so for each root, they are in the
        order of the batch.
        """
        return self._apply_many("apply", root_ids=root_ids, vals=vals, tasks=tasks)

    def init_many(self, root_ids: Any, init_vals: Any, tasks: Any) -> Outcomes:
        """Apply a column of INITs; see `apply`."""
        return self._apply_many("init_many", root_ids=root_ids, init_vals=init_vals, tasks=tasks)

    def ack_many(self, root_ids: Any, ack_vals: Any) -> Outcomes:
        """Apply a column of ACKs; see `apply`."""
        return self._apply_many("ack_many", root_ids=root_ids, ack_vals=ack_vals)

    def fail_many(self, root_ids: Any) -> Outcomes:
        """Apply a column of FAILs; see `apply`."""
        return self._apply_many("fail_many", root_ids=root_ids)

    def reset_timeout_many(self, root_ids: Any) -> Outcomes:
        """Apply a column of RESETs; see `apply`."""
        return self._apply_many("reset_timeout_many", root_ids=root_ids)

    def init(self, root_id: int, init_val: int, task: int) -> Outcome | None:
        """Apply one INIT; return its outcome, or None. ``on_outcomes`` gets the outcome too."""
        self._turn_if_due()
        return self._report_one(self._shard_of(root_id).init(root_id, init_val, task))

    def ack(self, root_id: int, ack_val: int) -> Outcome | None:
        """Apply one ACK; return its outcome, or None. ``on_outcomes`` gets the outcome too."""
        self._turn_if_due()
        return self._report_one(self._shard_of(root_id).ack(root_id, ack_val))

    def fail(self, root_id: int) -> Outcome | None:
        """Apply one FAIL; return its outcome, or None. ``on_outcomes`` gets the outcome too."""
        self._turn_if_due()
        return self._report_one(self._shard_of(root_id).fail(root_id))

    def reset_timeout(self, root_id: int) -> Outcome | None:
        """Apply one RESET; return its outcome, or None. ``on_outcomes`` gets the outcome too."""
        self._turn_if_due()
        return self._report_one(self._shard_of(root_id).reset_timeout(root_id))

    # Inspection.

    def __len__(self) -> int:
        self._turn_if_due()
        return sum(map(len, self._shards))

    def __contains__(self, root_id: object) -> bool:
        self._turn_if_due()
        return root_id in self._shard_of(root_id)

    def get(self, root_id: int) -> Entry | None:
        """Return the entry of a root, or None if the root is not pending."""
        self._turn_if_due()
        return self._shard_of(root_id).get(root_id)

    def oldest(self, n: int) -> Entries:
        """Return up to ``n`` entries that expire first; if equal in age, those seen first."""
        self._turn_if_due()
        found = _joined([ledger.oldest(n) for ledger in self._shards])
        keys = (found.root_ids, found.first_ms, -found.ages.astype(np.int16))
        order = np.lexsort([key for key in keys if key is not None])
        return found.take(order[:n])

    def entries(self) -> Entries:
        """Return the pending entries in any order, for `from_entries`. They stay in the acker."""
        self._turn_if_due()
        return _joined([ledger.entries() for ledger in self._shards])

    @property
    def stats(self) -> Stats:
        """The counters, each summed over all shards."""
        return Stats(*map(sum, zip(*(ledger.stats for ledger in self._shards), strict=True)))

    # Time.

    def tick(self, now_ms: int | None = None) -> int:
        """Turn the buckets once for each period that has passed, and report the expired entries.

        ``on_expired`` gets all entries that expired since the last tick, also at turns that
        messages made. It is not called without such entries.

        ``now_ms``: the time, on the scale of the clock; by default the clock's. Returns the number
        of turns, at most ``buckets``: after that many, every entry has expired. An exception of
        ``on_expired`` is raised, and its entries are not reported again.
        """
        now = read_clock(self._clock) if now_ms is None else as_ms(now_ms, "now_ms")
        with self._turning:
            turns = self._turn(now)
            self._collect()
            left, self._left = self._left, []
        if left and self._on_expired is not None:
            self._on_expired(_joined(left))
        return turns

    def start(self) -> None:
        """Start a daemon thread that calls `tick` when turns are due, until `stop`.

        Exceptions of callbacks in the thread are logged, the thread continues, and `stop` raises
        the first one. If the clock or ``wait`` raises, it tries again after ``period_s``, and logs
        only the first error in a row.

        Raises RuntimeError if the thread runs already.
        """
        with self._starting:
            if self._thread is not None and self._thread.is_alive():
                raise RuntimeError("this acker's thread is already running; call stop() first")
            self._stopping.clear()
            thread = threading.Thread(target=self._run, name="ackcore-acker", daemon=True)
            thread.start()
            self._thread = thread

    def stop(self) -> None:
        """Stop the thread of `start` and wait for it; without such a thread do nothing.

        A callback may call it in the thread itself; it then does not wait.

        Raises the first exception of a callback, the clock or ``wait`` in the thread.
        """
        with self._starting:
            thread = self._thread
            if thread is None:
                return
            self._stopping.set()
        if thread is threading.current_thread():
            return
        thread.join()
        with self._starting:
            if self._thread is not thread:
                return  # another stop() was faster, and maybe a start() after it
            self._thread = None
            error, self._thread_error = self._thread_error, None
        if error is not None:
            raise error

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return (
            f"Acker(shards={self.shards}, buckets={self._buckets}, "
            f"period_s={self._period_ms / 1000}, pending={sum(map(len, self._shards))})"
        )

    def _run(self) -> None:
        is_broken = False
        while not self._stopping.is_set():
            due_ms = self._next_turn_ms
            try:
                left_ms = due_ms - read_clock(self._clock)
                # If the clock was set back, the next check is still at most one period away.
                self._wait(self._stopping, min(max(left_ms, 0), self._period_ms) / 1000)
                if not self._stopping.is_set():
                    self.tick()
                is_broken = False
            except BaseException as error:
                self._thread_error = self._thread_error or error
                if self._next_turn_ms != due_ms:
                    _log.exception("a callback of the acker raised; the acker's thread continues")
                    continue
                if not is_broken:
                    _log.exception("the acker's buckets did not turn; its thread tries again")
                is_broken = True
                self._stopping.wait(self._period_ms / 1000)

    def _turn_if_due(self) -> None:
        # Without the lock: at worst, another thread has just made the turn, and no turn is due.
        now = read_clock(self._clock)
        if now >= self._next_turn_ms:
            with self._turning:
                self._turn(now)

    def _turn(self, now: int) -> int:
        """Rotate the ledgers once for each period over by ``now``; return how often.

        That is at most ``buckets`` times.
        """
        due = (now - self._next_turn_ms) // self._period_ms + 1
        if due < 1:
            return 0
        turns = min(due, self._buckets)
        for _ in range(turns):
            # The next turn drops entries that were not taken.
            self._collect()
            for ledger in self._shards:
                ledger.rotate()
        self._next_turn_ms += due * self._period_ms
        return turns

    def _collect(self) -> None:
        if self._on_expired is not None:
            left = _joined([ledger.expired() for ledger in self._shards])
            self._left += [left] if len(left) else []

    def _apply_many(self, method: str, **columns: Any) -> Outcomes:
        # All rows are checked before the first shard receives some.
        checked = message_columns(method, columns)
        self._turn_if_due()
        root_ids = checked["root_ids"]
        if len(self._shards) == 1 or not len(root_ids):
            outcomes: Outcomes = getattr(self._shards[0], method)(*checked.values())
        else:
            parts: list[Outcomes] = []
            try:
                order, shards = self._split(root_ids)
                ordered = [column[order] for column in checked.values()]
                for shard, rows in shards:
                    message = getattr(self._shards[shard], method)
                    parts.append(message(*(column[rows] for column in ordered)))
            except BaseException:
                if parts:  # these roots have left their ledgers
                    self._report(_joined(parts))
                raise
            outcomes = _joined(parts)
        self._report(outcomes)
        return outcomes

    def _shard_of(self, root_id: Any) -> AckerBackend:
        if len(self._shards) == 1:
            return self._shards[0]
        return self._shards[acker_task(as_id(root_id, "root_id"), len(self._shards))]

    def _split(self, roots: npt.NDArray[np.int64]) -> _Groups:
        # numpy sorts 16-bit integers by radix sort.
        return _groups_of(acker_task(roots, len(self._shards)).astype(np.uint16))

    def _report_one(self, outcome: Outcome | None) -> Outcome | None:
        if outcome is not None and self._on_outcomes is not None:
            elapsed_ms = outcome.elapsed_ms
            self._on_outcomes(
                outcome.task,
                Outcomes(
                    np.array([outcome.root_id], np.int64),
                    np.array([outcome.task], np.int32),
                    np.array([outcome.kind], np.uint8),
                    None if elapsed_ms is None else np.array([elapsed_ms], np.int64),
                ),
            )
        return outcome

    def _report(self, outcomes: Outcomes) -> None:
        if self._on_outcomes is None:
            return
        errors = []
        order, tasks = _groups_of(outcomes.tasks)
        ordered = outcomes.take(order)
        for task, rows in tasks:
            try:
                self._on_outcomes(task, ordered.take(rows))
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # SystemExit, and a panic of an extension, too
                # Continue: the outcomes of the other tasks are reported only here.
                errors.append(error)
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise BaseExceptionGroup(
                "the acker's on_outcomes raised for several spout tasks", errors
            )


def _milliseconds(seconds: Any, name: str) -> int:
    # Slightly less than the ceiling: 2.007 * 1000 is 2007.0000000000002.
    return math.ceil(positive(seconds, name, 1e9, "seconds") * 1000 - 1e-6)


_Given = TypeVar("_Given")


def _callable(given: _Given, name: str) -> _Given:
    if not callable(given):
        raise TypeError(f"{name} must be callable, got {type(given).__name__}")
    kinds = inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction
    if any(kind(given) for kind in kinds):
        raise TypeError(f"{name} must be a plain function: a call of {given!r} would run nothing")
    return given


_Table = TypeVar("_Table", Entries, Outcomes)


#: The row numbers sorted by label, and for each label the slice of them that has it.
_Groups = tuple[npt.NDArray[np.intp], list[tuple[int, slice]]]


def _groups_of(labels: npt.NDArray[Any]) -> _Groups:
    """Return row numbers sorted by label, and each label, ascending, with its slice of them.

    The row numbers of a label ascend, too. Without rows, there are no labels.
    """
    order = np.argsort(labels, kind="stable")
    ordered = labels[order]
    starts = (np.flatnonzero(np.diff(ordered)) + 1).tolist()
    bounds = [0, *starts, len(labels)] if len(labels) else []
    return order, [(int(ordered[start]), slice(start, end)) for start, end in pairwise(bounds)]


def _joined(tables: Sequence[_Table]) -> _Table:
    """Concatenate tables with the same columns, at least one; a single one is returned itself."""
    if len(tables) == 1:
        return tables[0]
    names: Iterable[str] = tables[0].columns()
    return type(tables[0])(
        **{name: np.concatenate([getattr(table, name) for table in tables]) for name in names}
    )


def _factory(backend: str | BackendFactory | None) -> BackendFactory:
    if backend is None:
        return _backend.Ledger
    if isinstance(backend, str):
        return load_backend(backend)
    if not callable(backend):
        raise TypeError(
            "backend must be the name of a backend, or a callable that makes ledgers, got "
            f"{type(backend).__name__}; leave it out for ackcore.Ledger"
        )
    return backend


def _ledger(
    factory: BackendFactory, capacity: int, buckets: int, refresh_on_ack: bool, clock: Any
) -> AckerBackend:
    try:
        ledger = factory(capacity, buckets=buckets, refresh_on_ack=refresh_on_ack, clock=clock)
    except TypeError as error:
        raise TypeError(
            "backend must make ledgers with the arguments capacity, buckets, refresh_on_ack and "
            f"clock, but {factory!r} raised TypeError: {error}"
        ) from error
    missing = _backend.missing_from(ledger)
    if missing:
        raise TypeError(
            f"backend must make ledgers with the methods of AckerBackend, but those of "
            f"{factory!r} lack {', '.join(missing)}"
        )
    return ledger
