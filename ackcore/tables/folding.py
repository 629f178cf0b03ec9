"""Folds rows into one state per key, and merges states."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ackcore._arrow.lossless import short_repr
from ackcore._arrow.record_batches import rebatched
from ackcore._error_hints import counted
from ackcore._records import UInt64s
from ackcore.tables.key_groups import KeyGroups, group_rows, plain, plain_type
from ackcore.tables.table_shape import EXPIRES, HASH, HASH_END, TableShape, one_chunk
from ackcore.tables.time_windows import END, session_groups

#: The maximum rows and bytes of input that are folded at once; a row counts in each of its windows.
_BLOCK_ROWS, _BLOCK_BYTES = 1_000_000, 256 << 20
#: The stored rows and bytes that are merged, written or scanned at once, about.
RANGE_ROWS, RANGE_BYTES = 500_000, 128 << 20
#: The results of blocks are merged when they exceed these bytes, and twice the last result.
_PARTIAL_BYTES = 1 << 29


def fold_rows(
    shape: TableShape, batches: Iterable[pa.RecordBatch | pa.Table], now_ms: int
) -> pa.Table:
    """Fold rows into one state per key.

    ``batches``: the rows; columns that the table does not read are ignored. ``now_ms``, in
    milliseconds since 1970: the time of the micro-batch, from which the ttl counts; for a table
    with windows, the time until which windows are closed. Rows of closed windows, and rows without
    a time, are then left out. The result has one row per key in ``shape.stored_schema``, ascending
    by hash.
    """
    partials: list[pa.Table] = []
    new = most = 0
    for block in _blocks(shape, batches):
        partials.append(_folded(shape, block, now_ms))
        new += partials[-1].nbytes
        if new > max(_PARTIAL_BYTES, most):  # mostly the same keys in all blocks
            partials = [merge_states(shape, *partials)]
            new, most = 0, 2 * partials[0].nbytes
    return merge_states(shape, *partials)


def merge_states(shape: TableShape, *tables: pa.Table) -> pa.Table:
    """Merge stored rows into one per key; sessions of a key that overlap become one.

    ``tables``: rows with ``shape.stored_schema``, ascending by hash, at most one per key in each;
    those that were folded earlier come first. The result has the same form.
    """
    tables = tuple(table for table in tables if table.num_rows)
    if len(tables) == 1:
        return tables[0]
    if not tables:
        return shape.stored_schema.empty_table()
    return pa.concat_tables([_combined_range(shape, part) for _, _, part in by_ranges(tables)])


def finished(shape: TableShape, stored: pa.Table) -> pa.Table:
    """Return stored rows as users see them: the key and the value of each aggregate.

    A row of nulls, for a key that a look-up did not find, stays one. Raises ValueError if an
    aggregate of the user's own returns values of another type or number.
    """
    columns = [stored.column(name) for name in shape.key_names]
    for name, aggregate in shape.aggregates.items():
        states = [one_chunk(stored.column(field.name)) for field in shape.states(name)]
        value = aggregate.finish(states)
        kind, n = shape.row_schema.field(name).type, len(stored)
        got = f"{len(value)} of {value.type}" if isinstance(value, pa.Array) else short_repr(value)
        if (
            not isinstance(value, pa.Array)
            or len(value) != n
            or plain_type(value.type) != plain_type(kind)
        ):
            raise ValueError(
                f"table {shape.name!r}: {type(aggregate).__name__}.finish must return "
                f"{counted(n, 'value')} of {kind}, one per state, got {got}"
            )
        columns.append(value if value.type == kind else plain(value))
    return pa.Table.from_arrays(columns, schema=shape.row_schema)


def newest_rows(shape: TableShape, tables: Sequence[pa.Table]) -> pa.Table:
    """Return the newest row of each key, ascending by hash.

    ``tables``: stored rows, each ascending by hash with at most one row per key; the newest first.
    """
    tables = [table for table in tables if table.num_rows]
    if len(tables) == 1:
        return tables[0]
    if not tables:
        return shape.stored_schema.empty_table()
    rows = pa.concat_tables(tables)
    return rows.take(pa.array(groups_of(shape, rows, joined=False)[0].firsts))


def live_rows(shape: TableShape, stored: pa.Table, horizon_ms: int | None) -> pa.Table:
    """Return the stored rows that expire after ``horizon_ms``; all of them if it is None."""
    if not shape.expires or horizon_ms is None:
        return stored
    return stored.filter(pc.greater(stored.column(EXPIRES), horizon_ms))


def ranges_of(lo: int, hi: int, rows: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield equal parts of the hashes from ``lo`` up to but not ``hi``, as pairs of start and end.

    Each part has at most some 500,000 rows and 128 MiB.

    ``rows``, ``nbytes``: the number and the size of the rows in the whole range. Hashes are
    uniform, so equal ranges have about the same number of rows.
    """
    parts = max(1, -(-rows // RANGE_ROWS), -(-nbytes // RANGE_BYTES))
    return itertools.pairwise(lo + (hi - lo) * part // parts for part in range(parts + 1))


def by_ranges(
    tables: Sequence[pa.Table], more_bytes: int = 0
) -> Iterator[tuple[int, int, list[pa.Table]]]:
    """Yield the parts of `ranges_of`: the start and the end of the hashes, and each table's rows.

    ``tables``: stored rows, each ascending by hash. ``more_bytes``: the size of other rows that
    are read with them. Parts without rows are left out.
    """
    hashes = [one_chunk(table.column(HASH)).to_numpy() for table in tables]
    total, nbytes = sum(map(len, tables)), sum(table.nbytes for table in tables) + more_bytes
    starts = [0] * len(tables)
    for lo, hi in ranges_of(0, HASH_END, total, nbytes):
        stops = [int(np.searchsorted(each, np.uint64(hi - 1), "right")) for each in hashes]
        if stops != starts:
            pieces = zip(tables, starts, stops, strict=True)
            yield lo, hi, [table.slice(start, stop - start) for table, start, stop in pieces]
        starts = stops


def _blocks(
    shape: TableShape, batches: Iterable[pa.RecordBatch | pa.Table]
) -> Iterator[list[pa.Array]]:
    """Yield blocks of up to a million rows or 256 MiB: ``shape.input_columns`` in plain types.

    A row counts once for each of its windows.
    """
    times = 1 if shape.window is None else shape.window.windows
    plain_batches = (
        _plain(shape, part)
        for batch in batches
        for part in (batch.to_batches() if isinstance(batch, pa.Table) else [batch])
        if part.num_rows
    )
    blocks = rebatched(
        plain_batches, max(1, _BLOCK_ROWS // times), _BLOCK_BYTES // times, copied=False
    )
    return (block.columns for block in blocks)


def _plain(shape: TableShape, batch: pa.RecordBatch) -> pa.RecordBatch:
    columns = []
    for name in shape.input_columns:
        kind, column = shape.inputs[name], plain(batch.column(name))
        if column.type != kind:
            raise TypeError(
                f"table {shape.name!r}: column {name!r} of the rows to fold must be {kind}, "
                f"got {column.type}"
            )
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, names=list(shape.input_columns))


def _folded(shape: TableShape, columns: list[pa.Array], now_ms: int) -> pa.Table:
    """Fold a block of ``shape.input_columns`` into one state per key; see `fold_rows`."""
    named = dict(zip(shape.input_columns, columns, strict=True))
    if shape.window is not None:
        named = shape.window.assigned(named, now_ms)
    keys = [named[name] for name in shape.key_names]
    hashes = shape.hashes(keys)
    groups, keys = _grouped(shape, hashes, keys, named.get(END))
    arrays = [pa.array(hashes[groups.firsts]), *keys]
    for aggregate in shape.aggregates.values():
        arrays += aggregate.partial([named[name] for name in aggregate.columns], groups)
    if shape.expires_by is not None:
        expires = named[shape.expires_by].to_numpy()[groups.order]
        arrays.append(pa.array(np.maximum.reduceat(expires, groups.starts[:-1])))
    elif shape.ttl_s is not None:
        arrays.append(pa.array(np.full(len(groups), now_ms + round(shape.ttl_s * 1000))))
    elif shape.window is not None:
        ends = named[END].cast(pa.int64()).to_numpy()[groups.order]
        last = np.maximum.reduceat(ends, groups.starts[:-1]) if len(groups) else ends
        arrays.append(pa.array(shape.window.expires_ms(last)))
    return pa.Table.from_arrays(arrays, schema=shape.stored_schema)


def groups_of(
    shape: TableShape, stored: pa.Table, joined: bool
) -> tuple[KeyGroups, list[pa.Array]]:
    """Group stored rows by key.

    ``joined``: whether overlapping sessions of a key are one group; otherwise a key includes the
    start of its session. Returns the groups, and the columns of the key with a row for each group.
    """
    hashes: UInt64s = one_chunk(stored.column(HASH)).to_numpy()
    keys = [one_chunk(stored.column(name)) for name in shape.key_names]
    if not (joined and shape.sessions):
        return _grouped(shape, hashes, keys, None)
    return _grouped(shape, hashes, keys, one_chunk(stored.column(shape.states(END)[0].name)))


def _grouped(
    shape: TableShape, hashes: UInt64s, keys: list[pa.Array], ends: pa.Array | None
) -> tuple[KeyGroups, list[pa.Array]]:
    """Group rows as `groups_of` does, given the hash, the key and the session's end of each row.

    ``ends``: None if overlapping sessions are not joined.
    """
    by = keys[:-1] if shape.sessions else keys
    groups = group_rows(hashes, by)
    if shape.sessions:
        starts = keys[-1].cast(pa.int64()).to_numpy()
        until = starts + 1 if ends is None else ends.cast(pa.int64()).to_numpy()
        groups, starts = session_groups(groups, starts, until)
    firsts = pa.array(groups.firsts)
    found = [key.take(firsts) for key in by]
    if shape.sessions:
        found.append(pa.array(starts).cast(keys[-1].type))
    return groups, found


def _combined_range(shape: TableShape, tables: Sequence[pa.Table]) -> pa.Table:
    """Merge stored rows as `merge_states` does, all at once."""
    rows = pa.concat_tables(tables).combine_chunks()
    groups, keys = groups_of(shape, rows, joined=True)
    arrays = [one_chunk(rows.column(HASH)).take(pa.array(groups.firsts)), *keys]
    for name, aggregate in shape.aggregates.items():
        states = [one_chunk(rows.column(field.name)) for field in shape.states(name)]
        arrays += aggregate.combine(states, groups)
    if shape.expires:
        expires = one_chunk(rows.column(EXPIRES)).to_numpy()[groups.order]
        arrays.append(pa.array(np.maximum.reduceat(expires, groups.starts[:-1])))
    return pa.Table.from_arrays(arrays, schema=shape.stored_schema)
