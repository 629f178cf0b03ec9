"""Stored rows of windows: the open sessions of some keys, and the rows whose windows close."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ackcore._records import Int64s
from ackcore.tables.folding import merge_states, newest_rows
from ackcore.tables.key_groups import Bools, UInt64s, group_rows
from ackcore.tables.table_segments import TableReader, TableSegment, ranges_of
from ackcore.tables.table_shape import EXPIRES, HASH, HASH_END, TableShape, one_chunk
from ackcore.tables.time_windows import START
from ackcore.tables.watermarks import NEVER


def merged_sessions(
    shape: TableShape, reader: TableReader, partial: pa.Table
) -> tuple[int, pa.Table]:
    """Return sessions after some rows: the joined ones, and a mark for each that has gone.

    ``partial``: the sessions among the new rows, as `fold_rows` returns them.

    Returns
    -------
    tuple
        By how many sessions there are more than before, and stored rows, ascending by hash.  A
        session that another one has taken in has no states, and expired long ago; its row hides
        the older one.
    """
    known = _open_sessions(reader, partial)
    if not len(known):
        return len(partial), partial
    known = known.take(_by_start(known))
    merged = merge_states(shape, known, partial)
    names = [HASH, *shape.key_names]
    gone = known.select(names).filter(
        pa.array(~_among(shape, known.select(names), merged.select(names)))
    )
    more = len(merged) - len(known)
    if not len(gone):
        return more, merged
    columns = [*gone.columns]
    for field in list(shape.stored_schema)[len(columns) :]:
        ends = field.name == EXPIRES
        columns.append(
            pa.array(np.full(len(gone), NEVER)) if ends else pa.nulls(len(gone), field.type)
        )
    rows = pa.concat_tables(
        [merged, pa.Table.from_arrays(columns, schema=shape.stored_schema)]
    ).combine_chunks()
    return more, rows.take(_by_start(rows))


def _open_sessions(reader: TableReader, rows: pa.Table) -> pa.Table:
    """Return the newest rows of all open sessions whose hashes some rows have."""
    return reader.rows_of(np.unique(one_chunk(rows.column(HASH)).to_numpy()))


def _by_start(rows: pa.Table) -> pa.Array:
    """Return the order of stored rows by hash, then by the start of their windows."""
    return pc.sort_indices(rows, [(HASH, "ascending"), (START, "ascending")])


def _among(shape: TableShape, rows: pa.Table, others: pa.Table) -> Bools:
    """Return which keys are among other keys."""
    both = pa.concat_tables([others, rows]).combine_chunks()
    hashes: UInt64s = one_chunk(both.column(HASH)).to_numpy()
    groups = group_rows(hashes, [one_chunk(both.column(name)) for name in shape.key_names])
    return groups.first_rows()[len(others) :] < len(others)


def closing_rows(reader: TableReader, until_ms: int) -> Iterator[pa.Table]:
    """Yield the rows whose windows close, in tables of bounded size.

    ``reader``: the table, with all rows of the micro-batch; its horizon is the bound before.
    ``until_ms``: the bound until which windows are closed now.
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
            found.append(segment.take(rows[start:stop]))
        newest = newest_rows(shape, found)
        if not len(newest):
            continue
        if shape.window is not None and shape.window.is_session:
            # A newer row of the session may close later.
            newest = _open_sessions(reader, newest)
            newest = newest.filter(pc.less_equal(newest.column(EXPIRES), until_ms))
        if len(newest):
            yield newest
