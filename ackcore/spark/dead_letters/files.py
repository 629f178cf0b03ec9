"""Which files of a store hold its letters, and the columns of its sources."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from ackcore.spark.base.atomic import make_directory, remove, write_file
from ackcore.spark.base.errors import StateError
from ackcore.spark.dead_letters.letters import read_schema, schema_of, write_letters

_COLUMNS = "columns.parquet"
_FILE = re.compile(r"batch-(\d+)\.parquet|batches-(\d+)-(\d+)\.(\d+)\.parquet")


class LetterFile(NamedTuple):
    """A file of letters: of which micro-batches, and how often they were merged."""

    path: Path
    first: int
    last: int
    level: int


class Kind(NamedTuple):
    """Files of a spout whose letters have the same columns."""

    spout: str
    files: tuple[LetterFile, ...]
    payload: pa.StructType


def spouts_of(store: Path) -> list[Path]:
    """Return the directories of its spouts, sorted."""
    if not store.is_dir():
        return []
    found = (each for each in store.iterdir() if not each.name.startswith("."))
    return sorted(each for each in found if each.is_dir())


def listed(directory: Path) -> tuple[list[LetterFile], list[tuple[LetterFile, LetterFile]]]:
    """Return the files that count, in order; and others with what they were merged into."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        names = []
    matches = filter(None, map(_FILE.fullmatch, names))
    files = (
        LetterFile(directory / m[0], int(m[1] or m[2] or 0), int(m[1] or m[3] or 0), int(m[4] or 0))
        for m in matches
    )
    counts: list[LetterFile] = []
    replaced = []
    # Of two that begin alike the longer one comes first; files never overlap in part.
    for file in sorted(files, key=lambda file: (file.first, -file.last, -file.level)):
        if counts and file.last <= counts[-1].last:
            replaced.append((file, counts[-1]))
        else:
            counts.append(file)
    return counts, replaced


def active_files(directory: Path) -> list[LetterFile]:
    """Return the files of a spout's directory that count, in the order of their micro-batches."""
    return listed(directory)[0]


def files_of(store: Path) -> dict[str, list[LetterFile]]:
    """Return the files that count, by spout; no spout without letters."""
    found = {directory.name: active_files(directory) for directory in spouts_of(store)}
    return {spout: files for spout, files in found.items() if files}


def kinds_of(store: Path, spout: str | None) -> list[Kind]:
    """Return the files that count, of one spout or of all, those of the same columns together."""
    kinds = []
    for name, files in files_of(store).items():
        if spout in (None, name):
            by_columns: dict[tuple[pa.StructType, bool], list[LetterFile]] = {}
            for file in files:
                schema = read_schema(file.path)
                columns = schema.field("payload").type, "replays" in schema.names
                by_columns.setdefault(columns, []).append(file)
            kinds += [Kind(name, tuple(each), payload) for (payload, _), each in by_columns.items()]
    return kinds


# -- the columns of the sources -------------------------------------------------------------------


def remember_columns(store: Path, sources: Mapping[str, pa.Schema]) -> None:
    """Note the columns of each source, so that they are known before a record died."""
    for spout, schema in sources.items():
        make_directory(store / spout)
        path = columns_path(store, spout)
        letters = schema_of(schema)
        try:
            known = path.exists() and read_schema(path).equals(letters)
        except StateError:
            known = False
        if not known:
            write_file(path, partial(write_letters, schema=letters, tables=()))
    for directory in spouts_of(store):
        if sources and directory.name not in sources:
            remove(directory / _COLUMNS)


def columns_path(store: Path, spout: str) -> Path:
    """Return the file that has the columns of a spout's source; it may not be there."""
    return store / spout / _COLUMNS


def known_spouts(store: Path) -> list[str]:
    """Return the spouts that have letters, or whose columns are known, sorted."""
    directories = spouts_of(store)
    return [each.name for each in directories if (each / _COLUMNS).exists() or active_files(each)]
