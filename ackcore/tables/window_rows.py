"""Stored rows of windows: sessions that new rows join, and rows whose windows close."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ackcore._records import Int64s
from ackcore.tables.folding import groups_of, merge_states, newest_rows, ranges_of
from ackcore.tables.table_segments import TableReader, TableSegment, rows_in
from ackcore.tables.table_shape import EXPIRES, HASH, HASH_END, TableShape, one_chunk
from ackcore.tables.time_windows import END, START
from ackcore.tables.watermarks import NEVER


def merged_sessions(
    shape: TableShape, reader: TableReader, partial: pa.Table
) -> tuple[int, pa.Table]:
    """Join the sessions of a micro-batch's rows with the open sessions of a table.

    ``reader``: the table before. ``partial``: the sessions of the new rows, from `fold_rows`.
    Returns the number of sessions by which the table grows, and the stored rows to write, ascending
    by hash: one for each session that new rows join or begin, and one for each session that has
    become part of an earlier one. The latter has no states and has expired, and so hides the older
    row of its session.
    """
    names = [*shape.key_names, shape.states(END)[0].name]
    known = reader.rows_of(partial[HASH].unique().to_numpy(), [*names, EXPIRES])
    both = pa.concat_tables([known.select([HASH, *names]), partial.select([HASH, *names])])
    groups, keys = groups_of(shape, both, joined=True)
    session = np.empty(len(both), np.int64)
    session[groups.order] = groups.numbers
    # Only the sessions that new rows join are read as a whole, and written again.
    joins = groups.sizes[session] > 1
    joined = np.flatnonzero(joins[: len(known)])
    if not len(joined):
        return len(partial), partial
    starts = keys[-1].take(pa.array(session[joined]))
    older = reader.whole(known.take(pa.array(joined)))
    joins = joins[len(known) :]
    merged = merge_states(shape, older, partial.filter(pa.array(joins)))
    gone = older.filter(pc.not_equal(older.column(START), starts))
    more = len(partial) - int(joins.sum()) + len(merged) - len(older)
    columns = [gone.column(name) for name in (HASH, *shape.key_names)]
    for field in list(shape.stored_schema)[len(columns) :]:
        ends = field.name == EXPIRES
        columns.append(
            pa.array(np.full(len(gone), NEVER)) if ends else pa.nulls(len(gone), field.type)
        )
    gone = pa.Table.from_arrays(columns, schema=shape.stored_schema)
    rows = pa.concat_tables([merged, partial.filter(pa.array(~joins)), gone]).combine_chunks()
    order = np.argsort(one_chunk(rows.column(HASH)).to_numpy(), kind="stable")
    return more, rows.take(pa.array(order))


def closing_rows(reader: TableReader, until_ms: int) -> Iterator[pa.Table]:
    """Yield the stored rows whose windows close, in tables of bounded size.

    ``reader``: the table, with all rows of the micro-batch; its horizon is the bound until which
    windows were closed before. ``until_ms``: the bound until which they are closed now.
    """
    shape, from_ms = reader.shape, reader.horizon_ms
    places: list[tuple[TableSegment, Int64s]] = []
    for segment in reader.segments:
        expires = segment.expires()
        rows = np.flatnonzero((expires > from_ms) & (expires <= until_ms))
        if len(rows):
            places.append((segment, rows))
    total = sum(len(rows) for _, rows in places)
    nbytes = sum(segment.nbytes * len(rows) // max(1, segment.rows) for segment, rows in places)
    for lo, hi in ranges_of(0, HASH_END, total, nbytes):
        found = []
        for segment, rows in places:
            start, stop = np.searchsorted(rows, segment.places(lo, hi))
            part = segment, rows[start:stop] + segment.start
            found.append(rows_in(shape, [part], names=shape.key_names if shape.sessions else None))
        newest = newest_rows(shape, found)
        if not len(newest):
            continue
        if shape.sessions:
            # A newer row of the session may close later.
            hashes = newest[HASH].unique().to_numpy()
            newest = reader.rows_of(hashes, [*shape.key_names, EXPIRES])
            newest = reader.whole(newest.filter(pc.less_equal(newest.column(EXPIRES), until_ms)))
        if len(newest):
            yield newest
