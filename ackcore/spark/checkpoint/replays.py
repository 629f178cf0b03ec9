"""The tables of requests to run dead letters again, ``<request>.<spout>.<checksum>.arrow``."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import pyarrow as pa

from ackcore.arrow import rebatched
from ackcore.spark.base.checksummed import write_batches
from ackcore.spark.checkpoint.schema_changes import fit_columns

#: What is in memory of a request that is written.
_ROWS, _BYTES = 1 << 16, 1 << 25


def spout_of(name: str) -> str:
    """Return the spout of a request: ``<request>.<spout>.<checksum>.arrow``."""
    return name.split(".", 1)[1].rsplit(".", 2)[0]


def write(directory: Path, request: str, spout: str, tables: Iterable[pa.Table]) -> str:
    """Write a request's file, of one or more tables, and return its name."""
    parts = iter(tables)
    first = next(parts)
    schema = first.schema.remove_metadata()
    batches = (batch for part in chain([first], parts) for batch in part.to_batches())
    whole = rebatched(batches, _ROWS, _BYTES)
    return write_batches(directory, f"{request}.{spout}", schema, whole, synced=False)


def fitted(table: pa.Table, schema: pa.Schema, name: str, place: str, way_out: str) -> pa.Table:
    """Return the rows of a request in the columns that its source has now.

    Parameters
    ----------
    table : pyarrow.Table
        As it was written.
    schema : pyarrow.Schema
        Those columns.
    name, place, way_out : str
        What it is called, where it is, and how to go on without it.

    Raises
    ------
    ColumnsChanged
        If it does not fit.
    """
    table = table.replace_schema_metadata(None)
    what = f"the {table.num_rows} dead letters of spout {spout_of(name)!r} that {place} asks for"
    return fit_columns(table, schema, what, way_out)
