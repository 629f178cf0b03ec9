"""Records that wait for a retry: files sorted by when their rows are due, of which little changes.

Each spout has a list of *segments*.  A micro-batch takes due rows from the front of segments, whose
``start`` moves on in the next manifest while their files stay as they are; what fails in it begins
to wait in one new segment.  Nothing is opened in which nothing is due.

So that segments do not become too many, `_FAN` of a size are merged into one, sizes being powers
of `_FAN`: a row is written again at most once for each size, log(rows) times.  A file of which
`_DEAD` rows of `_DEAD` + 1 wait no more is written anew: files hold no more than a few times what
waits.  All this follows from what is on record alone, and so does the order of what is due:
segment by segment, each in the order of its file, requests to replay last.

Checkpoints of before had one table for each spout, in no order.  Such a table is a segment that is
not `in_order`; it is put in order when a row of it is due.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ackcore._records import Int64s
from ackcore.spark.base.checksummed import TableCache, write_batches
from ackcore.spark.base.schemas import ATTEMPT, DUE_MS, FIRST_MS, REPLAYED, TRACKING

_FAN = 8
_DEAD = 3
#: Files of fewer rows are not written anew for what is dead in them.
_SMALL = 1024
#: What is sorted or merged at a time, in rows and in bytes: an Arrow string column ends at 2 GiB.
_WINDOW_ROWS, _WINDOW_BYTES = 1 << 16, 1 << 28

#: Rows of a spout in the columns that its source has now.
Fit = Callable[[str, pa.Table], pa.Table]


def with_replayed(table: pa.Table, replayed: bool = False) -> pa.Table:
    """Return a table with the column `REPLAYED`, which those of the first version have not."""
    place = TRACKING.get_field_index(REPLAYED)
    if table.column_names[place : place + 1] == [REPLAYED]:
        return table
    column = pa.repeat(replayed, table.num_rows)
    return table.add_column(place, TRACKING.field(place), column)


@dataclass(frozen=True, slots=True)
class Segment:
    """A file of waiting rows; those before ``start`` wait no more."""

    cache: TableCache
    file: str  # relative to <checkpoint>/ackcore/state
    rows: int  # in the file
    next_due_ms: int
    oldest_ms: int  # the least first_ms of those that wait
    start: int = 0
    in_order: bool = True
    untried: int = 0  # of those that wait: replayed ones whose first turn has not come

    def __len__(self) -> int:
        """How many rows wait."""
        return self.rows - self.start

    def body(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        names = ("file", "rows", "next_due_ms", "oldest_ms", "start", "in_order", "untried")
        return {name: getattr(self, name) for name in names}

    def table(self) -> pa.Table:
        """Return the rows that wait, in a memory map."""
        return with_replayed(self.cache.read(self.file).slice(self.start))

    def after(self, taken: int, waiting: pa.Table) -> Segment:
        """Return it without the first rows of those that were waiting in it."""
        left = waiting.slice(taken)
        return replace(
            self,
            start=self.start + taken,
            next_due_ms=left[DUE_MS][0].as_py(),
            oldest_ms=pc.min(left[FIRST_MS]).as_py(),
            untried=_untried(left) if self.untried else 0,
        )


class Waiting(Mapping[str, pa.Table]):
    """Rows that wait, by spout: segments, and tables that are not on record yet.

    As a mapping it gives all rows of a spout, which is for looking at them: they are put together.

    Parameters
    ----------
    parts : mapping from str to sequence of Segment or pyarrow.Table
        By spout; what has no rows is left out.
    """

    def __init__(self, parts: Mapping[str, Sequence[Segment | pa.Table]]):
        filled = {spout: tuple(part for part in some if len(part)) for spout, some in parts.items()}
        self.parts = {spout: some for spout, some in filled.items() if some}

    @classmethod
    def of(cls, cache: TableCache, body: Mapping[str, Any]) -> Waiting:
        """Read what `body` returned, or what was written when a spout had one table."""
        return cls(
            {
                spout: (
                    [Segment(cache, **each) for each in found]
                    if isinstance(found, list)
                    else [Segment(cache, **found, in_order=False)]
                )
                for spout, found in body.items()
            }
        )

    def body(self) -> dict[str, Any]:
        """Return it as JSON can hold it, all being on record."""
        return {spout: [each.body() for each in some] for spout, some in self.segments().items()}

    def segments(self) -> dict[str, list[Segment]]:
        """Return what is on record."""
        return {
            spout: [part for part in some if isinstance(part, Segment)]
            for spout, some in self.parts.items()
        }

    def tables(self, spout: str) -> list[pa.Table]:
        """Return the rows of a spout, part by part; their columns may differ."""
        parts = self.parts.get(spout, ())
        return [part.table() if isinstance(part, Segment) else part for part in parts]

    def __getitem__(self, spout: str) -> pa.Table:
        if spout not in self.parts:
            raise KeyError(spout)
        return pa.concat_tables(self.tables(spout))

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)

    def __repr__(self) -> str:
        return f"Waiting({', '.join(f'{spout}: {self.rows(spout)} rows' for spout in self)})"

    def rows(self, *spouts: str) -> int:
        """Return how many rows wait, of some spouts or of all."""
        return sum(len(part) for spout in spouts or self for part in self.parts.get(spout, ()))

    @property
    def untried(self) -> int:
        """How many of the rows wait for their first turn, and not since they failed."""
        return sum(
            part.untried if isinstance(part, Segment) else _untried(part)
            for some in self.parts.values()
            for part in some
        )

    @property
    def next_due_ms(self) -> int | None:
        """When the first row is due; None if none waits."""
        found = [each.next_due_ms for some in self.segments().values() for each in some]
        return min(found, default=None)

    @property
    def oldest_ms(self) -> int | None:
        """The least first_ms; None if none waits."""
        found = [each.oldest_ms for some in self.segments().values() for each in some]
        return min(found, default=None)

    def due(self, now_ms: int) -> int:
        """Return how many rows are due."""
        return sum(len(each.due_ms) for each in self._ripe(now_ms))

    def _ripe(self, now_ms: int) -> Iterator[_Ripe]:
        for spout, some in self.segments().items():
            for part in some:
                if part.next_due_ms <= now_ms:
                    yield _Ripe.of(spout, part, now_ms)

    def plus(self, spout: str, table: pa.Table) -> Waiting:
        """Return it with more rows of a spout."""
        return Waiting({**self.parts, spout: (*self.parts.get(spout, ()), table)})

    def split(
        self, now_ms: int, most: int | None, requested: Sequence[tuple[str, pa.Table]], fit: Fit
    ) -> tuple[dict[str, pa.Table], Waiting]:
        """Part what is due from what goes on waiting.

        Parameters
        ----------
        now_ms : int
            The time.
        most : int or None
            How many rows are taken at most: those that were due first, and of those of one time
            those that come first here.  All if None.
        requested : sequence of (str, pyarrow.Table)
            Spouts and further rows of them, due now.
        fit : callable
            Gives the rows of a spout the columns that they must have.

        Returns
        -------
        due : dict of str to pyarrow.Table
        rest : Waiting
        """
        ripe = list(self._ripe(now_ms))
        ripe += [_Ripe.of_request(spout, table, now_ms) for spout, table in requested]
        if most is not None and sum(len(each.due_ms) for each in ripe) > most:
            every = np.concatenate([each.due_ms for each in ripe])
            first = np.zeros(len(every), np.bool_)
            first[np.argsort(every, kind="stable")[:most]] = True
            ends = np.cumsum([len(each.due_ms) for each in ripe])
            ripe = [
                replace(each, rows=each.rows[keep], due_ms=each.due_ms[keep])
                for each, keep in zip(ripe, np.split(first, ends[:-1]), strict=True)
            ]
        due: dict[str, list[pa.Table]] = {}
        touched: dict[str, _Ripe] = {}
        parts: dict[str, list[Segment | pa.Table]] = {spout: [] for spout in self.parts}
        for each in ripe:
            if len(each.rows):
                due.setdefault(each.spout, []).append(fit(each.spout, each.taken()))
            if each.segment is not None:
                touched[each.segment.file] = each
        for spout, some in self.parts.items():
            for part in some:
                found = touched.get(part.file) if isinstance(part, Segment) else None
                parts[spout].append(part if found is None else found.left(fit))
        for each in ripe:
            if each.segment is None:
                parts.setdefault(each.spout, []).append(each.left(fit))
        return {spout: _together(some) for spout, some in due.items()}, Waiting(parts)

    # -- writing ------------------------------------------------------------------------------

    def write(self, cache: TableCache, directory: str) -> Waiting:
        """Write what is not on record, and merge what has become too much; return all as segments.

        Parameters
        ----------
        cache : TableCache
            Of the files.
        directory : str
            Where to write, from the cache's root; it exists.
        """
        parts: dict[str, list[Segment | pa.Table]] = {}
        for spout, some in self.parts.items():
            parts[spout] = [
                group[0] if _stays(group) else _write(cache, directory, spout, group)
                for group in _grouped(some)
            ]
        return Waiting(parts)


@dataclass(frozen=True, slots=True)
class _Ripe:
    """Rows of a segment, or of a request, that are due, by their places."""

    spout: str
    segment: Segment | None
    table: pa.Table  # all that wait in it
    rows: Int64s
    due_ms: Int64s
    now_ms: int

    @classmethod
    def of(cls, spout: str, segment: Segment, now_ms: int) -> _Ripe:
        table = segment.table()
        due = _numbers(table, DUE_MS)
        if segment.in_order:
            rows = np.arange(np.searchsorted(due, now_ms, "right"))
        else:
            rows = np.flatnonzero(due <= now_ms)
        return cls(spout, segment, table, rows, due[rows], now_ms)

    @classmethod
    def of_request(cls, spout: str, table: pa.Table, now_ms: int) -> _Ripe:
        n = len(table)
        return cls(spout, None, table, np.arange(n), np.full(n, now_ms), now_ms)

    @property
    def _in_order(self) -> bool:
        return self.segment is None or self.segment.in_order

    def taken(self) -> pa.Table:
        if self._in_order:
            return self.table.slice(0, len(self.rows))
        return self.table.filter(pa.array(self._mask()))

    def left(self, fit: Fit) -> Segment | pa.Table:
        taken = len(self.rows)
        if not self._in_order:
            return fit(self.spout, self.table.filter(pa.array(~self._mask())))
        if self.segment is None:
            left = self.table.slice(taken)
            due = pa.array(np.full(len(left), self.now_ms))
            place = TRACKING.get_field_index(DUE_MS)
            return fit(self.spout, left.set_column(place, TRACKING.field(place), due))
        if taken == len(self.table):
            return self.table.slice(taken)
        return self.segment.after(taken, self.table)

    def _mask(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        mask = np.zeros(len(self.table), np.bool_)
        mask[self.rows] = True
        return mask


def _numbers(table: pa.Table, name: str) -> Int64s:
    values: Int64s = table[name].to_numpy()
    return values


def _untried(table: pa.Table) -> int:
    return int((table[ATTEMPT].to_numpy() == 0).sum())


def _together(tables: Sequence[pa.Table]) -> pa.Table:
    """Tables of the same columns as one; whether a column may be null is not looked at."""
    return pa.concat_tables([_plain(table) for table in tables])


def _plain(table: pa.Table) -> pa.Table:
    source = table.schema.names[len(TRACKING) :]
    fields = [pa.field(name, table.schema.field(name).type) for name in source]
    return pa.table(table.columns, schema=pa.schema([*TRACKING, *fields]))


def _size(rows: int) -> int:
    """The whole part of the logarithm of a number of rows to the base of `_FAN`."""
    return (rows.bit_length() - 1) // (_FAN.bit_length() - 1)


def _grouped(parts: Sequence[Segment | pa.Table]) -> list[list[Segment | pa.Table]]:
    """Say which parts are to be one segment."""
    new = [part for part in parts if not isinstance(part, Segment)]
    groups = [[part] for part in parts if isinstance(part, Segment)]
    groups += [new] if new else []
    while True:
        sizes: dict[int, list[list[Segment | pa.Table]]] = {}
        for group in groups:
            if all(not isinstance(part, Segment) or part.in_order for part in group):
                sizes.setdefault(_size(sum(map(len, group))), []).append(group)
        for some in (some for some in sizes.values() if len(some) >= _FAN):
            alike = _of_one_schema(some)
            if len(alike) >= _FAN:
                groups = [group for group in groups if group not in alike]
                groups.append([part for group in alike for part in group])
                break
        else:
            return groups


def _of_one_schema(
    groups: Sequence[list[Segment | pa.Table]],
) -> list[list[Segment | pa.Table]]:
    """Return most of the groups, of one schema; a source's may have changed."""
    found: list[tuple[pa.Schema, list[list[Segment | pa.Table]]]] = []
    for group in groups:
        part = group[0]
        schema = _plain(part.table() if isinstance(part, Segment) else part).schema
        for known, some in found:
            if known.equals(schema):
                some.append(group)
                break
        else:
            found.append((schema, [group]))
    return max((some for _, some in found), key=len)


def _stays(group: Sequence[Segment | pa.Table]) -> bool:
    part = group[0]
    if len(group) > 1 or not isinstance(part, Segment):
        return False
    return part.rows < _SMALL or len(part) * (_DEAD + 1) > part.rows or not part.in_order


def _write(
    cache: TableCache, directory: str, spout: str, parts: Sequence[Segment | pa.Table]
) -> Segment:
    """Write parts, put in order, as one segment."""
    runs: list[pa.Table] = []
    for part in parts:
        if isinstance(part, Segment):
            runs.append(_plain(part.table()))
        else:
            runs += [_sorted(piece) for piece in _cut(_plain(part))]
    name = f"waiting-{spout}"
    batches = _merged(runs)
    file = write_batches(cache.root / directory, name, runs[0].schema, batches)
    path = f"{directory}/{file}"
    cache.wrote(path)
    return Segment(
        cache,
        path,
        sum(map(len, runs)),
        next_due_ms=min(run[DUE_MS][0].as_py() for run in runs),
        oldest_ms=min(pc.min(run[FIRST_MS]).as_py() for run in runs),
        untried=sum(map(_untried, runs)),
    )


def _cut(table: pa.Table) -> Iterator[pa.Table]:
    """Cut a table into pieces that can be sorted: a column of text must not have 2 GiB."""
    if len(table) < 2 or table.nbytes <= _WINDOW_BYTES:
        yield table
    else:
        yield from _cut(table.slice(0, len(table) // 2))
        yield from _cut(table.slice(len(table) // 2))


def _sorted(table: pa.Table) -> pa.Table:
    due = _numbers(table, DUE_MS)
    if (due[1:] >= due[:-1]).all():
        return table
    return table.combine_chunks().take(pa.array(np.argsort(due, kind="stable")))


def _merged(runs: Sequence[pa.Table]) -> Iterator[pa.RecordBatch]:
    """Merge tables in order, a window at a time."""
    due = np.concatenate([_numbers(run, DUE_MS) for run in runs])
    owner = np.repeat(np.arange(len(runs)), [len(run) for run in runs])
    owner = owner[np.argsort(due, kind="stable")]
    at = np.zeros(len(runs), np.int64)

    def window(first: int, last: int) -> Iterator[pa.RecordBatch]:
        counts = np.bincount(owner[first:last], minlength=len(runs))
        table = pa.concat_tables(
            run.slice(start, n)
            for run, start, n in zip(runs, at.tolist(), counts.tolist(), strict=True)
        )
        if last - first > 1 and table.nbytes > _WINDOW_BYTES:
            middle = (first + last) // 2
            yield from window(first, middle)
            yield from window(middle, last)
        else:
            yield from _sorted(table).combine_chunks().to_batches()
            at[:] += counts

    for first in range(0, len(due), _WINDOW_ROWS):
        yield from window(first, min(len(due), first + _WINDOW_ROWS))
