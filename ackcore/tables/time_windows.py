"""Windows of time: their definitions, the windows of each row, and the times at which they close.

Times are microseconds since 1970 in UTC, rounded down.  The times at which windows close are
milliseconds, rounded up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from ackcore._arrow.lossless import short_repr
from ackcore._arrow.record_batches import in_ranges_of, valid_rows
from ackcore._error_hints import as_seconds, naming_arguments
from ackcore._records import Bools, Int64s
from ackcore.tables.key_groups import KeyGroups

#: The columns with the start of a window, which is a part of the key, and with its end (exclusive).
START, END = "window_start", "window_end"
#: The range of a length of time: from 1 ms to about 300 years.
MIN_S, MAX_S = 0.001, 10**10
#: The maximum number of windows of a row.
MAX_WINDOWS = 1_000
#: The first and the last second that a row's time may have: those of the years 1 to 9999.
_FIRST_S, _LAST_S = -62_135_596_800, 253_402_300_799
_PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}


@dataclass(frozen=True, repr=False)
class Window:
    """The definition of a table's windows; `tumbling`, `sliding` and `session` return it."""

    time: str  # the column with the time of a row
    size_ms: int  # the length of a window; of a session, the gap that ends it
    #: The distance between the starts of two windows.  None: the windows are sessions.
    step_ms: int | None
    late_ms: int  # the time for which windows stay open for records out of order
    idle_ms: int | None  # the time after which a spout without records does not hold windows open

    def __repr__(self) -> str:
        steps = [] if self.step_ms in (None, self.size_ms) else [self.step_ms]
        sizes = ", ".join(f"{ms / 1_000:.15g}" for ms in (self.size_ms, *steps))
        kind = "session" if self.step_ms is None else "sliding" if steps else "tumbling"
        late = f", late_s={self.late_ms / 1_000:.15g}" if self.late_ms else ""
        idle = "" if self.idle_ms is None else f", idle_s={self.idle_ms / 1_000:.15g}"
        return f"{kind}({sizes}, {self.time!r}{late}{idle})"

    @property
    def windows(self) -> int:
        """The maximum number of windows that a row has."""
        return 1 if self.step_ms is None else -(-self.size_ms // self.step_ms)

    def structure(self) -> dict[str, Any]:
        """Return the attributes on which the stored rows depend, as JSON values.

        Lateness and idle time are not among them.
        """
        return {"time": self.time, "size_ms": self.size_ms, "step_ms": self.step_ms}

    @classmethod
    def of(cls, structure: Mapping[str, Any]) -> Window:
        """Rebuild the definition from `structure`, without lateness: to read rows, not to close."""
        return cls(**structure, late_ms=0, idle_ms=None)

    def times(self, column: pa.Array) -> tuple[Int64s, Bools]:
        """Return the time of each row in microseconds since 1970, and whether it is usable.

        A time is unusable if it is null, or if it or one of its windows is not in the years 1 to
        9999: few sinks and no Python value can hold such a time.  It is returned as 0.
        """
        values: Int64s = column.cast(pa.int64()).fill_null(0).to_numpy()
        per_second = _PER_SECOND[column.type.unit]
        # Compared as whole seconds: microseconds of a far time may not fit 64 bits.
        seconds = values // per_second
        usable = (seconds >= _FIRST_S) & (seconds <= _LAST_S)
        valid = valid_rows(column)
        if valid is not None:
            usable &= valid != 0
        values = np.where(usable, values, 0)
        us = values // 1_000 if per_second > 1_000_000 else values * (1_000_000 // per_second)
        first, last = self._range_us
        usable &= (us >= first) & (us <= last)
        return np.where(usable, us, 0), usable

    @property
    def _range_us(self) -> tuple[int, int]:
        """The first and the last time of which all windows start and end in the years 1 to 9999."""
        first, last = 1_000_000 * _FIRST_S, 1_000_000 * (_LAST_S + 1) - 1
        size = 1_000 * self.size_ms
        if self.step_ms is None:
            return first, last - size
        step = 1_000 * self.step_ms
        # The first window starts after `time - size`, and the last one at `time` or before.
        return (-(-first // step) - 1) * step + size, ((last - size) // step + 1) * step - 1

    def late_from_ms(self, us: Int64s) -> Int64s:
        """Return, for each row, the bound in ms since 1970 at which the row becomes late.

        ``us``: the times of the rows in microseconds. A bound is a watermark less the lateness; see
        `WindowWatermarks`. This one is the end of the row's first window, or of a session that has
        only this row.
        """
        if self.step_ms is None:
            return _up(us + 1_000 * self.size_ms)
        step, size = 1_000 * self.step_ms, 1_000 * self.size_ms
        return ((us - size) // step + 1) * self.step_ms + self.size_ms

    def expires_ms(self, ends: Int64s) -> Int64s:
        """Return the times in milliseconds at which windows close, given their ends in us.

        A session closes a gap after its end: until then, a record that is not late can join it.
        """
        return _up(ends) + (self.size_ms if self.step_ms is None else 0)

    def closes_between(self, from_ms: int, until_ms: int) -> bool:
        """Return whether a window can close when the bound rises between these times, in ms.

        A window can close if its time of closing is above ``from_ms`` and at most ``until_ms``.
        """
        if self.step_ms is None:
            return from_ms < until_ms
        ends = ((bound - self.size_ms) // self.step_ms for bound in (from_ms, until_ms))
        return next(ends) < next(ends)

    def assigned(self, columns: Mapping[str, pa.Array], horizon_ms: int) -> dict[str, pa.Array]:
        """Return rows with the start and the end of their windows, one row for each window.

        Rows without a usable time, and late rows, are left out.  Each row of a session begins a
        session, and `session_groups` joins them.

        ``columns``: the columns of the rows. ``horizon_ms``: the bound until which windows are
        closed.
        """
        us, usable = self.times(columns[self.time])
        usable &= self.late_from_ms(us) > horizon_ms
        if not usable.all():
            columns = {name: column.filter(pa.array(usable)) for name, column in columns.items()}
            us = us[usable]
        size = 1_000 * self.size_ms
        if self.step_ms is None:
            starts, ends = us, us + size
        else:
            step = 1_000 * self.step_ms
            first = ((us - size) // step + 1) * step
            counts = (us // step * step - first) // step + 1
            rows, numbers = in_ranges_of(np.zeros(len(us), np.int64), counts)
            starts = first[rows] + numbers * step
            ends = starts + size
            if len(rows) > len(us):
                columns = {name: column.take(pa.array(rows)) for name, column in columns.items()}
        kind = pa.timestamp("us", columns[self.time].type.tz)
        return {**columns, START: pa.array(starts).cast(kind), END: pa.array(ends).cast(kind)}


def session_groups(groups: KeyGroups, starts: Int64s, ends: Int64s) -> tuple[KeyGroups, Int64s]:
    """Divide the rows of each key into sessions.

    Rows of one key belong to the same session if their intervals overlap, or are connected by
    others that do.

    ``groups``: the rows of each key. ``starts``, ``ends``: the interval of each row: from the start
    to before the end. Returns the rows of each session and the start of each session; sessions are
    ordered by key and then by start.
    """
    n = len(starts)
    if not n:
        return groups, starts
    order = groups.order
    begin, end = starts[order], ends[order]
    low, span = int(begin.min()), int(end.max()) - int(begin.min()) + 1
    if span * len(groups) >= 2**63:
        begin, end = np.split(np.unique(np.append(begin, end), return_inverse=True)[1], 2)
        low, span = 0, 2 * n
    # One axis of time for all keys: those of the next key are behind those of one.
    shift = groups.numbers * span - low
    begin += shift
    end += shift
    by_start = np.argsort(begin, kind="stable")
    reached = np.maximum.accumulate(end[by_start])
    is_first = np.ones(n, np.bool_)
    is_first[1:] = begin[by_start[1:]] >= reached[:-1]
    rows = order[by_start]
    # The rows of a session in their original order.
    bits = n.bit_length()
    numbers = (np.cumsum(is_first) - 1) << bits | rows
    numbers.sort()
    found = KeyGroups(numbers & ((1 << bits) - 1), np.append(np.flatnonzero(is_first), n))
    return found, starts[rows[is_first]]


@naming_arguments
def tumbling(
    size_s: float, time: str, *, late_s: float = 0.0, idle_s: float | None = None
) -> Window:
    """Return windows that follow each other without a gap, such as hours.

    Windows start at multiples of ``size_s`` since 1970, UTC.

    Parameters
    ----------
    size_s : float
        The length of a window in seconds, a multiple of 0.001.
    time : str
        The column of timestamps that decides the window of a row.
    late_s : float, default 0.0
        The time in seconds by which a record may be behind the newest one: a window closes when
        the watermark has passed its end by this time.  A record whose window had closed before it
        was first read becomes a dead letter.
    idle_s : float, optional
        The time in seconds after which a spout without ACKED records does not hold windows open,
        if the table is fed by several spouts.  By default it holds them forever.

    Raises
    ------
    TypeError, ValueError
        If an argument has another type, or a time is out of range or no multiple of 0.001.
    """
    size_ms = _ms(size_s, "size_s", MIN_S)
    return _window(size_ms, size_ms, time, late_s, idle_s)


@naming_arguments
def sliding(
    size_s: float, step_s: float, time: str, *, late_s: float = 0.0, idle_s: float | None = None
) -> Window:
    """Return windows that overlap, such as the last hour every minute.

    Windows start at multiples of ``step_s`` since 1970, UTC.  A row counts in each window that
    contains its time.

    Parameters
    ----------
    size_s : float
        The length of a window in seconds, a multiple of 0.001.
    step_s : float
        The distance between the starts of two windows in seconds, a multiple of 0.001; at most
        ``size_s``, and at least a thousandth of it; otherwise ValueError is raised.
    time, late_s, idle_s
        The column of timestamps, the lateness, and the idle time of spouts, as in `tumbling`.
    """
    size_ms, step_ms = _ms(size_s, "size_s", MIN_S), _ms(step_s, "step_s", MIN_S)
    if not step_ms <= size_ms <= MAX_WINDOWS * step_ms:
        raise ValueError(
            f"step_s must be from size_s / {MAX_WINDOWS:,} to size_s, so that each row is in 1 to "
            f"{MAX_WINDOWS:,} windows, got {step_s!r} with size_s={size_s!r}"
        )
    return _window(size_ms, step_ms, time, late_s, idle_s)


@naming_arguments
def session(gap_s: float, time: str, *, late_s: float = 0.0, idle_s: float | None = None) -> Window:
    """Return windows that last as long as the rows of a key follow each other closely.

    A session ends ``gap_s`` after its last row; a row exactly then begins the next one.  It closes
    ``gap_s`` later than that, since until then a record that is not late may join it.

    Parameters
    ----------
    gap_s : float
        The time in seconds without a row that ends a session, a multiple of 0.001.
    time, late_s, idle_s
        The column of timestamps, the lateness, and the idle time of spouts, as in `tumbling`.
    """
    return _window(_ms(gap_s, "gap_s", MIN_S), None, time, late_s, idle_s)


def _window(
    size_ms: int, step_ms: int | None, time: str, late_s: float, idle_s: float | None
) -> Window:
    if not isinstance(time, str):
        raise TypeError(f"time must be the name of a column, got {short_repr(time)}")
    late_ms = _ms(late_s, "late_s", 0)
    idle_ms = None if idle_s is None else _ms(idle_s, "idle_s", MIN_S)
    return Window(time, size_ms, step_ms, late_ms, idle_ms)


def _ms(seconds: float, argument: str, least: float) -> int:
    seconds = as_seconds(seconds, argument, least, MAX_S)
    ms = round(seconds * 1_000)
    if abs(seconds * 1_000 - ms) > 1e-6 * max(1, ms):
        raise ValueError(f"{argument} must be a multiple of 0.001 seconds, got {seconds!r}")
    return ms


def _up(us: Int64s) -> Int64s:
    """Convert microseconds to milliseconds, rounded up."""
    return -(-us // 1_000)
