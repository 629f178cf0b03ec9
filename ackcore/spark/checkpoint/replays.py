"""Requests to run dead letters again: tables that a stopped or a running query finds.

A request is staged first, where no query sees it; then the dead letters' store notes down which
letters it holds (that note is what makes it count); then its files are renamed to where a query
sees them.  A rename happens once, so a request is taken once, whatever dies when; after a crash
the next replay, or a query, finishes a noted request's renames.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path

import pyarrow as pa

from ackcore._files.durable import sync_directory
from ackcore.arrow import rebatched
from ackcore.spark.base.atomic import writing
from ackcore.spark.base.checksummed import read_table, read_table_schema, write_batches
from ackcore.spark.base.errors import StateError, corrupt
from ackcore.spark.checkpoint.schema_changes import fit_columns
from ackcore.spark.checkpoint.shared_record import INDEX, SharedRecord
from ackcore.spark.stores.opening import is_bucket, open_store

#: What is in memory of a request that is written.
_ROWS, _BYTES = 1 << 16, 1 << 25
#: In a request's schema: the note that makes it count.
_NOTE = b"ackcore_note"
_STAGED, _WITHDRAWN = ".staged", ".withdrawn"
#: <request>.<spout>.<checksum>.arrow
_NAME = re.compile(r"([^.]+)\.(.+)\.[0-9a-f]{32}\.arrow")


def spout_of(name: str) -> str:
    """Return the spout of a request: ``<request>.<spout>.<checksum>.arrow``."""
    return name.split(".", 1)[1].rsplit(".", 2)[0]


def stage(
    directory: Path, request: str, spout: str, tables: Iterable[pa.Table], note: Path | str
) -> str:
    """Write a request's file, of one or more tables, where no query sees it yet.

    ``note`` is where it is noted down; as text, the URL of a store in a bucket.
    """
    inside = isinstance(note, Path) and note.is_relative_to(directory.parent)
    # A store in the checkpoint moves with it.
    path = os.path.relpath(note, directory) if inside else note
    return write(directory, request, spout, tables, {_NOTE: os.fsencode(path)})


def write(
    directory: Path,
    request: str,
    spout: str,
    tables: Iterable[pa.Table],
    about: Mapping[bytes, bytes] | None = None,
) -> str:
    """Write a request's file, of one or more tables, and return its name."""
    parts = iter(tables)
    first = next(parts)
    schema = first.schema.with_metadata(dict(about) if about else None)
    batches = (batch for part in chain([first], parts) for batch in part.to_batches())
    whole = rebatched(batches, _ROWS, _BYTES)
    return write_batches(directory, f"{request}.{spout}", schema, whole, staged=about is not None)


def publish(directory: Path, staged: str) -> None:
    """Make a staged file visible to queries, unless another process has done so already."""
    with writing(directory / staged):
        try:
            os.rename(directory / staged, directory / staged.removesuffix(_STAGED))
        except FileNotFoundError:
            return
        sync_directory(directory)


def staged(directory: Path) -> list[str]:
    """Return the names of staged files."""
    return _names(directory, _STAGED)


def counts(directory: Path, name: str) -> bool:
    """Whether a staged file's request was noted down, so that it must be seen to the end."""
    # The footer alone: the heartbeat looks every second for as long as the file lies there, and
    # when the request is taken it is read and checked whole.
    path = directory / name
    note = (read_table_schema(path, _way_out(path)).metadata or {}).get(_NOTE)
    if note is None:
        raise corrupt(directory / name, "does not tell where its request is noted down")
    where = os.fsdecode(note)
    if is_bucket(where):
        index = SharedRecord(open_store(where, "dead_letters"), INDEX).load()
        return name.partition(".")[0] in index.get("notes", {})
    return (directory / where).exists()


def published(directory: Path) -> list[str]:
    """Return the names of the requests that are where queries see them, and change nothing."""
    return _names(directory, ".arrow")


def visible(directory: Path) -> list[str]:
    """Return the names of all requests, and publish those whose `replay` died."""
    names = _names(directory, "")
    unfinished = [name for name in names if name.endswith(_STAGED)]
    finished = [name for name in unfinished if _finish(directory, name)]
    seen = [name for name in names if name.endswith(".arrow")]
    return sorted({*seen, *(name.removesuffix(_STAGED) for name in finished)})


def _finish(directory: Path, name: str) -> bool:
    try:
        noted = counts(directory, name)
    except StateError:
        if (directory / name).exists():
            raise
        return True  # its `replay` lives, and was faster
    if noted:
        publish(directory, name)
    return noted


def _names(directory: Path, ending: str) -> list[str]:
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    return sorted(name for name in names if name.endswith(ending) and not name.startswith("."))


def withdrawn(path: Path) -> Path:
    """Return what a request is renamed to so that the query goes on without it."""
    return path.with_name(path.name.removesuffix(_STAGED) + _WITHDRAWN)


def withdrawn_in(directory: Path) -> set[tuple[str, str]]:
    """Return the requests that were withdrawn, each with its spout: their letters are not sent."""
    names = (name.removesuffix(_WITHDRAWN) for name in _names(directory, _WITHDRAWN))
    matches = (_NAME.fullmatch(name) for name in names if not (directory / name).exists())
    return {(match[1], match[2]) for match in matches if match is not None}


def _way_out(path: Path) -> str:
    return (
        f"To go on without it, rename the file to {withdrawn(path).name} (if it is missing, make "
        "an empty file of that name) and start again: its dead letters then count as not sent, and "
        "replay() sends them"
    )


def read(path: Path, schema: pa.Schema) -> pa.Table:
    """Read a request.

    Parameters
    ----------
    path : Path
        Its file.
    schema : pyarrow.Schema
        The columns that the spout's source has now.

    Raises
    ------
    CheckpointCorrupt
        If it is damaged or missing.
    ColumnsChanged
        If it does not fit these columns.
    """
    way_out = (
        f"To go on without them, rename the file to {withdrawn(path).name} and start again; under "
        "its name of now it is taken up once the source has such columns again"
    )
    return fitted(read_table(path, way_out=_way_out(path)), schema, path.name, str(path), way_out)


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
