"""Reading tables: the streams of their changed rows and closed windows, and look-ups by bolts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import pyarrow as pa

from ackcore._arrow.lossless import array_of, as_mapping, short_repr
from ackcore._arrow.record_batches import one_batch
from ackcore.tables.folding import finished
from ackcore.tables.table_segments import TableReader
from ackcore.tables.table_shape import HASH, TableShape
from ackcore.topology.batch_collector import conform
from ackcore.topology.components import DEFAULT_STREAM
from ackcore.topology.row_conversion import rows_of

#: The end of the name under which a sink reads the changed rows of a table.
CHANGES = ".changes"
#: The stream of changed rows without their former values.
UPSERTS = "upserts"
#: The end of the name under which sinks, bolts and tables read the rows of closed windows.
CLOSED = ".closed"


def change_streams(shape: TableShape) -> dict[str, pa.Schema]:
    """Return the two streams of the changed rows of a table: their schemas by name.

    The default stream has the key columns, the values, and the former values as ``old_<name>``,
    which are null if there was no row. The stream ``"upserts"`` has the rows of the table alone.
    """
    rows = shape.row_schema
    former = [rows.field(name).with_name(f"old_{name}") for name in shape.aggregates]
    return {DEFAULT_STREAM: pa.schema([*rows, *former]), UPSERTS: rows}


def closed_streams(shape: TableShape) -> dict[str, pa.Schema]:
    """Return the streams of a table's closed windows: one, whose rows are those of the table."""
    return {DEFAULT_STREAM: shape.row_schema}


class ClosedWindows:
    """The source of the spout ``<table>.closed``, whose records are the rows of closed windows.

    `TopologyBuilder.build` declares this spout if a bolt or a table reads it. Each micro-batch
    reads the rows of the windows that the micro-batch before has closed.
    """

    source_kind = "closed"
    deserializer = None

    def __init__(self, shape: TableShape) -> None:
        self.shape = shape
        self.schema = self.emits = shape.row_schema

    def __repr__(self) -> str:
        return f"ClosedWindows({self.shape.name!r})"


class TableSource(Protocol):
    """A table at one point in time, which a task can open."""

    def reader(self) -> TableReader:
        """Open the table.

        Raises CheckpointCorrupt or StateError if a file of it is missing, damaged or unreadable.
        """


class TableView:
    """A table of the topology, as it was after the last finished micro-batch.

    A bolt with ``uses = ["totals"]`` has one as ``self.tables["totals"]``. Every attempt and every
    repetition of a micro-batch sees the same rows. Updates of the same micro-batch are not in it.
    Threads may share it.

    Attributes: ``name``: the name of the table.
    """

    def __init__(self, name: str, reader: TableReader) -> None:
        self.name = name
        self._reader = reader
        self._key_schema = pa.schema(reader.shape.key)

    @property
    def key(self) -> tuple[str, ...]:
        """The names of the key columns; if the table has windows, the last is ``window_start``."""
        return tuple(self._key_schema.names)

    @property
    def schema(self) -> pa.Schema:
        """The schema of the rows: the key columns, then the values."""
        return self._reader.shape.row_schema

    def lookup(self, keys: Any) -> pa.RecordBatch:
        """Return the rows of several keys.

        Raises TypeError if ``keys`` has no names or one of its items is no column. Raises
        ValueError if a key column is missing or cannot be cast, or if their lengths differ.

        ``keys``: the key columns, by name: a RecordBatch, a Table or a mapping. Other columns are
        ignored, so that you can pass a bolt's whole batch. A column is an Arrow array, a numpy
        array, or a sequence of values, and is cast to the type of the key if the cast is lossless.
        NULL is a key like any other.

        Returns
        -------
        pyarrow.RecordBatch
            One row per key, in the order of the keys, in the columns of `schema`. All columns of a
            row, also the key columns, are null if the table has no row for its key.
        """
        rows, _ = self._found(conform(self._key_columns(keys), self._key_schema, self._title))
        return rows

    def get(self, key: Any) -> dict[str, Any] | None:
        """Return the row of one key as a dict by column, or None if the table has none.

        To look up many keys, call `lookup` once: it costs about as much as a few calls of `get`.
        Raises ValueError if the key lacks a key column or has too many values, if a value does not
        fit the type of its column, or if a value of the row has no Python value.

        ``key``: the value of the key column; for several key columns, a tuple of their values in
        the order of `key`, or a mapping, whose other entries are ignored.
        """
        names = self.key
        named = as_mapping(key)
        if named is not None:
            values = tuple(self._key_columns(named, "key").values())
        elif len(names) == 1:
            values = (key,)
        elif isinstance(key, tuple | list) and len(key) == len(names):
            values = tuple(key)
        else:
            raise ValueError(
                f"key must have one value for each of {', '.join(names)}, the key columns of "
                f"{self._title}, got {short_repr(key)}; pass a tuple or a mapping"
            )
        columns = [
            self._key_column(field, value)
            for field, value in zip(self._key_schema, values, strict=True)
        ]
        batch = pa.RecordBatch.from_arrays(columns, schema=self._key_schema)
        found, exists = self._found(batch)
        if not exists:
            return None
        rows, misfits = rows_of(found)
        for _, misfit in misfits:
            raise misfit
        return dict(zip(self.schema.names, rows[0], strict=True))

    @property
    def _title(self) -> str:
        return f"table {self.name!r}"

    def _key_column(self, field: pa.Field, value: Any) -> pa.Array:
        """Return one value of a key as a column; raise ValueError if it does not fit ``field``."""
        try:
            return array_of([value], field.type)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            many = isinstance(value, tuple | list) and len(self.key) == 1
            raise ValueError(
                f"key must be of type {field.type} for {field.name!r} of {self._title}, got "
                f"{type(value).__name__}: {str(error).removesuffix(' in row 0')}; "
                + ("pass the value itself; lookup() takes several" if many else "convert it first")
            ) from error

    def _key_columns(self, keys: Any, argument: str = "keys") -> Mapping[str, Any]:
        if isinstance(keys, pa.RecordBatch | pa.Table):
            given: Mapping[Any, Any] | None = dict(
                zip(keys.schema.names, keys.columns, strict=True)
            )
        else:
            given = as_mapping(keys)
        if given is None:
            raise TypeError(
                f"keys must be a RecordBatch, a Table or a mapping with the key columns "
                f"{', '.join(self.key)} of {self._title}, got {type(keys).__name__}; write "
                f"{{{self.key[0]!r}: [...]}}"
            )
        missing = [name for name in self.key if name not in given]
        if missing:
            raise ValueError(
                f"{argument} must have the key columns {', '.join(self.key)} of {self._title}, and "
                f"{', '.join(missing)} is missing among {', '.join(map(str, given)) or 'none'}"
            )
        return {name: given[name] for name in self.key}

    def _found(self, keys: pa.RecordBatch) -> tuple[pa.RecordBatch, bool]:
        """Return one row per key, null if absent, and whether the table has the first key."""
        stored = self._reader.lookup(keys)
        rows = finished(self._reader.shape, stored).combine_chunks().to_batches()
        exists = stored.num_rows > 0 and stored.column(HASH)[0].is_valid
        return one_batch(rows or [pa.RecordBatch.from_pylist([], self.schema)]), exists
