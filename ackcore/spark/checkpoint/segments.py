"""Files of waiting records, sorted by due time: reading and writing.

`waiting.py` decides which files are merged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ackcore._records import Int64s
from ackcore.spark.base.schemas import ATTEMPT, DUE_MS, FIRST_MS, REASON, TRACKING
from ackcore.spark.checkpoint.table_cache import RecordFile, TableCache

#: Most rows and bytes that are sorted or merged at a time, in memory.
_WINDOW_ROWS, _WINDOW_BYTES = 1 << 16, 1 << 26


@dataclass(frozen=True, slots=True)
class Segment(RecordFile):
    """A file of waiting records; those in rows before ``start`` no longer wait.

    ``rows``: the rows of the file, without those at its end that had no room and are dead.
    """

    next_due_ms: int  # the earliest due time of the waiting rows, in ms since 1970
    oldest_ms: int  # the least first_ms of the waiting rows
    start: int = 0
    untried: int = 0  # waiting rows that were replayed and not tried yet

    def __len__(self) -> int:
        """The number of rows that wait."""
        return self.rows - self.start

    @property
    def nbytes(self) -> int:
        """The size of the file in bytes."""
        return self.cache.size(self.file)

    def table(self) -> pa.Table:
        """Return the waiting rows, in a memory map, with all columns of the source nullable.

        Files of tasks and of the driver may differ in nullability, and are concatenated.
        """
        return all_nullable(self.cache.read(self.file).slice(self.start, len(self)))

    def after(self, taken: int, waiting: pa.Table) -> Segment:
        """Return a segment of the same file without the first ``taken`` waiting rows.

        At least one row must be left. ``waiting``: the result of `table`.
        """
        left = waiting.slice(taken)
        return replace(
            self,
            start=self.start + taken,
            next_due_ms=left[DUE_MS][0].as_py(),
            oldest_ms=pc.min(left[FIRST_MS]).as_py(),
            untried=untried_in(left) if self.untried else 0,
        )


def write_segment(
    cache: TableCache, prefix: str, spout: str, parts: Sequence[Segment | pa.Table]
) -> Segment:
    """Write the waiting rows of one or more parts to a new segment, sorted by due time.

    No part may be empty.
    """
    runs: list[pa.Table] = []
    for part in parts:
        if isinstance(part, Segment):
            runs.append(part.table())
        else:
            runs += [_sorted(piece) for piece in _cut(all_nullable(part))]
    path = cache.write(prefix, f"waiting-{spout}", runs[0].schema, _merged(runs))
    return Segment(
        cache,
        path,
        sum(map(len, runs)),
        next_due_ms=min(run[DUE_MS][0].as_py() for run in runs),
        oldest_ms=min(pc.min(run[FIRST_MS]).as_py() for run in runs),
        untried=sum(map(untried_in, runs)),
    )


def _cut(table: pa.Table) -> Iterator[pa.Table]:
    """Yield a table in pieces small enough to sort: a text column must have less than 2 GiB."""
    if len(table) < 2 or table.nbytes <= _WINDOW_BYTES:
        yield table
    else:
        yield from _cut(table.slice(0, len(table) // 2))
        yield from _cut(table.slice(len(table) // 2))


def _sorted(table: pa.Table) -> pa.Table:
    due = due_of(table)
    if (due[1:] >= due[:-1]).all():
        return table
    return table.combine_chunks().take(pa.array(np.argsort(due, kind="stable")))


def _merged(runs: Sequence[pa.Table]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of sorted tables by due time, `_WINDOW_ROWS` at a time."""
    due = np.concatenate([due_of(run) for run in runs])
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


def due_of(table: pa.Table) -> Int64s:
    """Return the due times of rows in milliseconds since 1970."""
    values: Int64s = table[DUE_MS].to_numpy()
    return values


def untried_in(table: pa.Table) -> int:
    """Return the number of rows that were replayed and not tried since.

    They have attempt 0, though the reason of their death counts as a failed attempt.
    """
    counts = pc.struct_field(table[REASON], "counts")
    return pc.sum(pc.and_(pc.equal(table[ATTEMPT], 0), counts)).as_py() or 0


def all_nullable(table: pa.Table) -> pa.Table:
    """Return rows with all columns of the source nullable: their nullability may have changed."""
    source = table.schema.names[len(TRACKING) :]
    fields = [pa.field(name, table.schema.field(name).type) for name in source]
    return pa.table(table.columns, schema=pa.schema([*TRACKING, *fields]))
