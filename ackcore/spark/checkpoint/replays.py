"""The tables of requests to replay dead letters, ``<request>.<spout>.<checksum>.arrow``."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import pyarrow as pa

from ackcore._arrow import rebatched
from ackcore.spark.base.checksummed import write_batches
from ackcore.spark.checkpoint.schema_changes import fit_columns

#: Most rows and bytes in memory while a request is written.
_ROWS, _BYTES = 1 << 16, 1 << 25


def spout_of(name: str) -> str:
    """Return the spout in the name of a request: ``<request>.<spout>.<checksum>.arrow``."""
    return name.split(".", 1)[1].rsplit(".", 2)[0]


def write(directory: Path, request: str, spout: str, tables: Iterable[pa.Table]) -> str:
    """Write one or more tables to a request's file, and return its name."""
    parts = iter(tables)
    first = next(parts)
    schema = first.schema.remove_metadata()
    batches = (batch for part in chain([first], parts) for batch in part.to_batches())
    whole = rebatched(batches, _ROWS, _BYTES)
    return write_batches(directory, f"{request}.{spout}", schema, whole, synced=False)


def fitted(table: pa.Table, schema: pa.Schema, name: str, place: str, way_out: str) -> pa.Table:
    """Return the rows of a request, converted to the present columns of its source.

    Raises ColumnsChanged if the rows do not fit.

    ``table``: the rows as they were written. ``schema``: the present columns of the source.
    ``name``, ``place``, ``way_out``: the request's name, its path or URL, and how to continue
    without it.
    """
    table = table.replace_schema_metadata(None)
    what = f"the {table.num_rows} dead letters of spout {spout_of(name)!r} that {place} requests"
    return fit_columns(table, schema, what, way_out)
