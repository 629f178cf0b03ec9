"""The types that a ledger returns: constants, rows, and tables of parallel numpy columns.

Both backends return these same classes, so results do not show which one ran.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt

#: Message kinds in a ``tasks`` column; a task >= 0 is an INIT by that spout task.
ACK = -1
FAIL = -2
RESET = -3

#: Bits of ``Entry.flags``.
FLAG_FAILED = 1
FLAG_TASKS_DIFFER = 2


class Status(enum.IntEnum):
    """The kind of an outcome, or the status of a settled root.

    `Ledger.apply` and the other message methods report ``ACKED``, ``FAILED`` and ``RESET_TIMEOUT``
    (a RESET gave a pending root the whole time-out again). `Ledger.settle` reports ``ACKED``,
    ``FAILED``, ``EXPIRED`` (timed out), ``ORPHAN`` (timed out without an INIT) and ``ANOMALY``
    (several INITs); an ``OPEN`` root stays in the ledger.
    """

    OPEN = 0
    ACKED = 1
    FAILED = 2
    RESET_TIMEOUT = 3
    EXPIRED = 4
    ORPHAN = 5
    ANOMALY = 6


OPEN, ACKED, FAILED, RESET_TIMEOUT, EXPIRED, ORPHAN, ANOMALY = Status

_STATUSES = tuple(Status)

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
UInt8s = npt.NDArray[np.uint8]
UInt64s = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]


class LedgerFull(RuntimeError):
    """A call might have exceeded a ledger's ``max_entries``; nothing was applied."""


class Outcome(NamedTuple):
    """The outcome of one root, caused by one message: a row of `Outcomes`.

    ``task``: the spout task of the INIT. ``elapsed_ms``: milliseconds since the root's first
    message; None without a clock.
    """

    root_id: int
    task: int
    kind: Status
    elapsed_ms: int | None


class Entry(NamedTuple):
    """One root that no message and no `Ledger.settle` has ended: a row of `Entries`.

    Each field is a column of `Entries`, which describes it.
    """

    root_id: int
    val: int
    task: int
    inits: int
    flags: int
    age: int
    first_ms: int | None
    last_ms: int | None


class Decision(NamedTuple):
    """One root that `Ledger.settle` has decided and removed: a row of `Settled`.

    ``status`` is the decision; the other fields are those of `Entries`.
    """

    root_id: int
    status: Status
    val: int
    task: int
    inits: int
    flags: int
    first_ms: int | None
    last_ms: int | None


class Stats(NamedTuple):
    """The counters of one ledger since it was made; unpickling keeps them.

    ``second_inits`` counts INITs (and merged rows with an init) of a root that already had one, and
    merged rows that have two themselves. ``orphans`` counts entries that expired without an init.
    ``expired_untaken`` counts entries that expired at a `Ledger.rotate` and were not taken before
    the next. ``growths`` counts rebuilds of the table: larger, or rarely with a new seed (always 0
    in the Python backend).
    """

    second_inits: int
    orphans: int
    expired_untaken: int
    growths: int


class _Table:
    """Parallel columns of one length; a column that a ledger does not keep is None."""

    __slots__ = ()

    __match_args__: ClassVar[tuple[str, ...]]  # the names of the columns; dataclass sets them
    root_ids: Int64s

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """Return the columns that are not None, by name and without a copy, for ``numpy.savez``."""
        named = ((name, getattr(self, name)) for name in self.__match_args__)
        return {name: column for name, column in named if column is not None}

    def take(self, rows: Any) -> Self:
        """Return a table of the rows that ``rows``, positions, a mask or a slice, selects.

        They are in the order of ``rows``. They are copies, except those of a slice.
        """
        columns = (getattr(self, name) for name in self.__match_args__)
        return type(self)(*(None if column is None else column[rows] for column in columns))

    def _lists(self) -> list[list[Any]]:
        columns = (getattr(self, name) for name in self.__match_args__)
        return [[None] * len(self) if column is None else column.tolist() for column in columns]

    def __len__(self) -> int:
        return len(self.root_ids)


@dataclass(slots=True, eq=False)
class Outcomes(_Table):
    """The outcomes of one call, in the order in which they occurred.

    ``root_ids`` int64; ``tasks`` int32: the spout task of each INIT; ``kinds`` uint8 (see
    `Status`); ``elapsed_ms`` int64: the time since the root's first message, None without a clock.
    Iterating gives `Outcome` rows.
    """

    root_ids: Int64s
    tasks: Int32s
    kinds: UInt8s
    elapsed_ms: Int64s | None = None

    def __iter__(self) -> Iterator[Outcome]:
        for root_id, task, kind, elapsed_ms in zip(*self._lists(), strict=True):
            yield Outcome(root_id, task, _STATUSES[kind], elapsed_ms)


@dataclass(slots=True, eq=False)
class Entries(_Table):
    """Pending or expired roots as columns, the form in which a ledger is saved, loaded and merged.

    ``root_ids`` int64; ``vals`` int64: the XOR of the messages so far; ``tasks`` int32: the spout
    task, -1 until the init; ``inits`` uint8: the number of INITs (0, 1, or 2 for more); ``flags``
    uint8 (bit 0: failed; bit 1: INITs of different tasks); ``ages`` uint8: calls of `Ledger.rotate`
    since the entry was last put in the newest bucket; ``first_ms`` and ``last_ms`` int64: times of
    the first and last message, None without a clock. Iterating gives `Entry` rows.
    """

    root_ids: Int64s
    vals: Int64s
    tasks: Int32s
    inits: UInt8s
    flags: UInt8s
    ages: UInt8s
    first_ms: Int64s | None = None
    last_ms: Int64s | None = None

    def __iter__(self) -> Iterator[Entry]:
        for row in zip(*self._lists(), strict=True):
            yield Entry(*row)


@dataclass(slots=True, eq=False)
class Settled(_Table):
    """The roots that one `Ledger.settle` decided. Open roots stay in the ledger.

    Columns as in `Entries`, without ages, with ``statuses`` uint8 (see `Status`).
    Iterating gives `Decision` rows.
    """

    root_ids: Int64s
    statuses: UInt8s
    vals: Int64s
    tasks: Int32s
    inits: UInt8s
    flags: UInt8s
    first_ms: Int64s | None = None
    last_ms: Int64s | None = None

    def __iter__(self) -> Iterator[Decision]:
        for root_id, status, *rest in zip(*self._lists(), strict=True):
            yield Decision(root_id, _STATUSES[status], *rest)


class OffsetStats(NamedTuple):
    """The number of offsets in messages to an `OffsetTracker` that had no effect, by cause.

    ``stale``: of another generation. ``below_base``: below the offset at which the generation
    began. ``not_emitted``: acked or failed, but not emitted yet. ``repeated``: already emitted,
    done or failed.
    """

    stale: int
    below_base: int
    not_emitted: int
    repeated: int


class OffsetState(NamedTuple):
    """The state that a partition's next reader needs: offsets done, and failures by offset.

    A hole is an offset that is not done and is below one that is done. All offsets below
    ``committable`` are done, and all below ``end`` that are in no run of holes. Run i is the
    offsets from ``hole_starts[i]`` to ``hole_ends[i] - 1``. ``failed``: the offsets that failed and
    are not done, ascending. ``attempts``: the number of failures of each.
    """

    committable: int
    end: int
    hole_starts: Int64s
    hole_ends: Int64s
    failed: Int64s
    attempts: Int32s


class BinaryColumn(NamedTuple):
    """A column of n byte strings, almost in Arrow's layout.

    ``offsets``: shape (n + 1,); value i is ``data[offsets[i]:offsets[i + 1]]``. ``valid``: shape
    (n,), a byte for each row instead of a bit: 0 without a value; None if all have one.
    """

    offsets: Int32s
    data: UInt8s
    valid: UInt8s | None


class GatheredRecords(NamedTuple):
    """The n records that a `RecordBuffers` returned.

    ``headers``: of each record, or None if all are None. ``offsets``, ``times_ms``: shape (n,);
    times are since 1970. ``timed``: shape (n,), 0 for a record without a time; None if all have
    one.
    """

    keys: BinaryColumn
    values: BinaryColumn
    headers: list[list[tuple[str, bytes | None]] | None] | None
    offsets: Int64s
    times_ms: Int64s
    timed: UInt8s | None


#: Replaces the headers of a record if the name of one is not UTF-8, which confluent-kafka's message
#: cannot return.
UNREADABLE_HEADERS: list[tuple[str, bytes | None]] = [("ackcore.unreadable", None)]


class RawMessage(NamedTuple):
    """A copy of one message of `RawMessages`, with the methods of confluent-kafka's `Message`.

    A message with an error is not a record. The error is a code of librdkafka and its text.
    """

    offset_: int
    error_: tuple[int, str] | None = None
    key_: bytes | None = None
    value_: bytes | None = None
    headers_: list[tuple[str, bytes | None]] | None = None
    timestamp_: tuple[int, int] = (0, 0)

    def offset(self) -> int:
        """Return the message's offset in its partition."""
        return self.offset_

    def error(self) -> tuple[int, str] | None:
        """Return the code and text of the error, or None for a record."""
        return self.error_

    def key(self) -> bytes | None:
        """Return the key; None if the message has none."""
        return self.key_

    def value(self) -> bytes | None:
        """Return the value; None if the message has none."""
        return self.value_

    def headers(self) -> list[tuple[str, bytes | None]] | None:
        """Return the names and values of the headers; None if there are none."""
        return self.headers_

    def timestamp(self) -> tuple[int, int]:
        """Return the type of the timestamp, 0 for none, and its milliseconds since 1970."""
        return self.timestamp_
