"""Records that wait for a retry: files sorted by due time; each micro-batch changes few of them.

Each spout has a list of *segments*.  A micro-batch takes due rows from the front of segments.  The
next decision advances their ``start``, and their files stay unchanged.  Records that fail in the
micro-batch form one new segment.  A segment without due rows is not opened.

To limit the number of segments, `_FAN` segments of a size are merged into one; sizes are powers of
`_FAN`.  So a row is rewritten at most once for each size, log(rows) times.  A file is rewritten
when `_DEAD` of each `_DEAD` + 1 rows no longer wait, so files hold at most a few times the waiting
rows. All this depends only on recorded data, and so does the order of due rows: segment by segment,
each in the order of its file, then the requests to replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from ackcore._records import Int64s
from ackcore.spark.base.schemas import DUE_MS, MESSAGE_ID, TRACKING, FailedFile
from ackcore.spark.checkpoint.segments import (
    Segment,
    all_nullable,
    due_of,
    untried_in,
    write_segment,
)
from ackcore.spark.checkpoint.table_cache import BySpout, TableCache

#: The number of segments of a size that are merged, and the ratio of sizes.
_FAN = 8
#: A file is rewritten from this ratio on: rows that no longer wait, per waiting row.
_DEAD = 3
#: Files of fewer rows are not rewritten to remove rows that no longer wait.
_SMALL = 1024
#: Files from this size in bytes on are not merged: they are few, and reading them takes long.
_LARGE = 1 << 22
#: Converts the rows of a spout to the present columns of its source.
Fit = Callable[[str, pa.Table], pa.Table]


#: Waiting rows of a spout: in a recorded segment, in a file that tasks wrote, or in a table.
Part: TypeAlias = Segment | FailedFile | pa.Table


class Waiting(BySpout[Part]):
    """The waiting records, by spout: recorded segments, and parts that are not recorded yet.

    As a mapping it returns all rows of a spout in one concatenated table, for inspection only.
    """

    @classmethod
    def of(cls, cache: TableCache, body: Mapping[str, Any]) -> Waiting:
        """Return the waiting records that the JSON of `body` describes."""
        return cls(
            {spout: [Segment(cache, **each) for each in found] for spout, found in body.items()}
        )

    def body(self) -> dict[str, Any]:
        """Return the waiting records as a JSON object. Parts that are not recorded are left out."""
        return {spout: [each.body() for each in some] for spout, some in self.segments().items()}

    def segments(self) -> dict[str, list[Segment]]:
        """Return the recorded segments by spout."""
        return {
            spout: [part for part in some if isinstance(part, Segment)]
            for spout, some in self.parts.items()
        }

    def tables(self, spout: str) -> list[pa.Table]:
        """Return the rows of a spout, one table for each part. Their columns may differ.

        [] for an unknown spout. No part may be a task's file that is not recorded yet.
        """
        return [_rows_of(part) for part in self.parts.get(spout, ())]

    def __getitem__(self, spout: str) -> pa.Table:
        if spout not in self.parts:
            raise KeyError(spout)
        return pa.concat_tables(self.tables(spout))

    def rows(self, *spouts: str) -> int:
        """Return the number of rows that wait, of the given spouts or of all."""
        return sum(len(part) for spout in spouts or self for part in self.parts.get(spout, ()))

    @property
    def untried(self) -> int:
        """The number of replayed dead letters that wait for their first attempt."""
        return sum(
            untried_in(part) if isinstance(part, pa.Table) else part.untried
            for some in self.parts.values()
            for part in some
            if not isinstance(part, FailedFile)  # its records have just failed
        )

    @property
    def next_due_ms(self) -> int | None:
        """The earliest due time of recorded segments, in ms since 1970; None without segments."""
        found = [each.next_due_ms for some in self.segments().values() for each in some]
        return min(found, default=None)

    @property
    def oldest_ms(self) -> int | None:
        """The least ``first_ms`` of recorded segments, in ms since 1970; None without segments."""
        found = [each.oldest_ms for some in self.segments().values() for each in some]
        return min(found, default=None)

    def due(self, now_ms: int) -> int:
        """Return the number of rows in recorded segments that are due at ``now_ms``."""
        return sum(len(each.due_ms) for each in self._due_rows(now_ms))

    def _due_rows(self, now_ms: int) -> Iterator[_DueRows]:
        for spout, some in self.segments().items():
            for part in some:
                if part.next_due_ms <= now_ms:
                    yield _DueRows.of(spout, part, now_ms)

    def plus(self, spout: str, *more: Part) -> Waiting:
        """Return a copy with more rows of a spout."""
        return Waiting({**self.parts, spout: (*self.parts.get(spout, ()), *more)})

    def split(
        self, now_ms: int, most: int | None, requested: Sequence[tuple[str, pa.Table]], fit: Fit
    ) -> tuple[dict[str, pa.Table], Waiting]:
        """Split the rows into due rows and rows that continue to wait.

        ``now_ms``: the time in ms since 1970. ``most``: the most rows to take: the earliest due
        first, and rows of equal due time in the order of the parts.  None takes all. ``requested``:
        further rows with their spouts, due now. ``fit``: converts the rows of a spout to the
        present columns of its source.

        Returns the due rows by spout, and the rest.
        """
        found = list(self._due_rows(now_ms))
        found += [_DueRows.of_request(spout, table, now_ms) for spout, table in requested]
        found = _first_due(found, most)
        due: dict[str, list[pa.Table]] = {}
        touched: dict[str, _DueRows] = {}
        parts: dict[str, list[Part]] = {spout: [] for spout in self.parts}
        for each in found:
            if len(each.rows):
                taken = each.table.slice(0, len(each.rows))
                due.setdefault(each.spout, []).append(fit(each.spout, taken))
            if each.segment is not None:
                touched[each.segment.file] = each
        for spout, some in self.parts.items():
            for part in some:
                rows = touched.get(part.file) if isinstance(part, Segment) else None
                parts[spout].append(part if rows is None else rows.left(fit))
        for each in found:
            if each.segment is None:
                parts.setdefault(each.spout, []).append(each.left(fit))
        together = {spout: pa.concat_tables(map(all_nullable, some)) for spout, some in due.items()}
        return together, Waiting(parts)

    def taken_ids(self, now_ms: int, most: int | None) -> Iterator[tuple[str, pa.Table]]:
        """Yield spout and message ids (a table) for each part of waiting rows that `split` takes.

        Requests are due at ``now_ms``, so no due waiting row is left out for a request.
        """
        for each in _first_due(list(self._due_rows(now_ms)), most):
            yield each.spout, each.table.select([MESSAGE_ID]).take(pa.array(each.rows))

    # -- writing ------------------------------------------------------------------------------

    def write(self, cache: TableCache, prefix: str) -> Waiting:
        """Write the parts that are not recorded yet, merge segments, and return all as segments.

        ``prefix``: the prefix of new files' names.
        """
        parts: dict[str, list[Part]] = {}
        cache.adopt_all((part for some in self.parts.values() for part in some), prefix)
        for spout, some in self.parts.items():
            known = [
                Segment(
                    cache, cache.adopt(part, prefix), part.rows, part.next_due_ms, part.oldest_ms
                )
                if isinstance(part, FailedFile)
                else part
                for part in some
            ]
            parts[spout] = [
                group[0] if _is_kept(group) else write_segment(cache, prefix, spout, group)
                for group in _grouped(known)
            ]
        return Waiting(parts)


@dataclass(frozen=True, slots=True)
class _DueRows:
    """The due rows of a segment or of a request, by their row numbers."""

    spout: str
    segment: Segment | None
    table: pa.Table  # all waiting rows of the segment or request
    rows: Int64s
    due_ms: Int64s
    now_ms: int

    @classmethod
    def of(cls, spout: str, segment: Segment, now_ms: int) -> _DueRows:
        table = segment.table()
        due = due_of(table)
        rows = np.arange(np.searchsorted(due, now_ms, "right"))
        return cls(spout, segment, table, rows, due[rows], now_ms)

    @classmethod
    def of_request(cls, spout: str, table: pa.Table, now_ms: int) -> _DueRows:
        n = len(table)
        return cls(spout, None, table, np.arange(n), np.full(n, now_ms), now_ms)

    def left(self, fit: Fit) -> Part:
        taken = len(self.rows)
        if self.segment is None:
            left = self.table.slice(taken)
            due = pa.array(np.full(len(left), self.now_ms))
            place = TRACKING.get_field_index(DUE_MS)
            return fit(self.spout, left.set_column(place, TRACKING.field(place), due))
        if taken == len(self.table):
            return self.table.slice(taken)
        return self.segment.after(taken, self.table)


def _size(rows: int) -> int:
    """Return the logarithm of a number of rows to the base `_FAN`, rounded down."""
    return (rows.bit_length() - 1) // (_FAN.bit_length() - 1)


def _grouped(parts: Sequence[Part]) -> list[list[Part]]:
    """Return the parts of a spout in lists, each of which is to become one segment, in any order.

    Tables form one list. `_FAN` lists or more of like size and one schema are joined, except those
    with a segment of `_LARGE` bytes.
    """
    new = [part for part in parts if not isinstance(part, Segment)]
    groups: list[list[Part]] = [[part] for part in parts if isinstance(part, Segment)]
    groups += [new] if new else []
    while True:
        sizes: dict[int, list[list[Part]]] = {}
        for group in groups:
            if all(not isinstance(part, Segment) or part.nbytes < _LARGE for part in group):
                sizes.setdefault(_size(sum(map(len, group))), []).append(group)
        for some in (some for some in sizes.values() if len(some) >= _FAN):
            alike = _of_one_schema(some)
            if len(alike) >= _FAN:
                groups = [group for group in groups if group not in alike]
                groups.append([part for group in alike for part in group])
                break
        else:
            return groups


def _rows_of(part: Part) -> pa.Table:
    if isinstance(part, Segment):
        return part.table()
    assert isinstance(part, pa.Table), f"{part} is not on record yet"
    return part


def _of_one_schema(groups: Sequence[list[Part]]) -> list[list[Part]]:
    """Return the largest set of groups with the same schema; a source's schema may have changed."""
    found: dict[pa.Schema, list[list[Part]]] = {}  # pyarrow hashes none with metadata
    for group in groups:
        found.setdefault(all_nullable(_rows_of(group[0])).schema, []).append(group)
    return max(found.values(), key=len)


def _is_kept(group: Sequence[Part]) -> bool:
    """Return whether a group is one segment that need not be rewritten.

    Few of its rows no longer wait, or it has few rows.
    """
    part = group[0]
    if len(group) > 1 or not isinstance(part, Segment):
        return False
    return part.rows < _SMALL or len(part) * (_DEAD + 1) > part.rows


def _first_due(found: list[_DueRows], most: int | None) -> list[_DueRows]:
    """Return ``found`` with the ``most`` rows that were due first; None keeps all.

    Of rows with an equal due time, those that come first in ``found`` are kept.
    """
    if most is None or sum(len(each.due_ms) for each in found) <= most:
        return found
    every = np.concatenate([each.due_ms for each in found])
    first = np.zeros(len(every), np.bool_)
    first[np.argsort(every, kind="stable")[:most]] = True
    ends = np.cumsum([len(each.due_ms) for each in found])
    return [
        replace(each, rows=each.rows[keep], due_ms=each.due_ms[keep])
        for each, keep in zip(found, np.split(first, ends[:-1]), strict=True)
    ]
