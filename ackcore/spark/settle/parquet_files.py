"""The Parquet files at given paths, and the data in their footers."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq

from ackcore._arrow import is_text

#: The number of footers that the driver reads at a time; it mostly waits for storage.
_LISTING_THREADS = 16

_TYPES = {
    "root_id": pa.int64(),
    "val": pa.int64(),
    "task": pa.int32(),
    "ts_ms": pa.int64(),
    "reason": pa.string(),
}
_REQUIRED = ("root_id", "val", "task")

_WILD = re.compile(r"[*?\[]")
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")


class ListedFile(NamedTuple):
    """A file with its size and time of change when it was listed."""

    path: str
    size: int
    mtime_ns: int | None
    filesystem: pa.fs.FileSystem


class EventFile(NamedTuple):
    """The columns and row groups of a file, from its footer."""

    source: ListedFile
    columns: list[str]
    group_rows: list[int]
    group_bytes: list[int]


def read_footers(paths: Any, filesystem: pa.fs.FileSystem | None) -> list[EventFile]:
    """Return the files at some paths, with the data in their footers.

    Raises
    ------
    FileNotFoundError, TypeError, ValueError
        As `ackcore.spark.settle_parquet`.
    """
    sources = _list_files(paths, filesystem)
    with ThreadPoolExecutor(min(_LISTING_THREADS, len(sources))) as pool:
        return list(pool.map(_read_footer, sources))


def _list_files(paths: Any, filesystem: pa.fs.FileSystem | None) -> list[ListedFile]:
    if isinstance(paths, (str, os.PathLike)):
        paths = [paths]
    elif isinstance(paths, bytes) or not isinstance(paths, Iterable):
        raise TypeError(f"paths must be a path or a sequence of paths, got {type(paths).__name__}")
    found: dict[tuple[str, str], ListedFile] = {}
    for given in paths:
        if not isinstance(given, (str, os.PathLike)):
            raise TypeError(f"paths must be paths, got {type(given).__name__}")
        for source in _expand(os.fspath(given), filesystem):
            key = (source.filesystem.type_name, source.path)
            if key in found:
                raise ValueError(
                    f"paths name {source.path} twice, and its events would be counted twice"
                )
            found[key] = source
    if not found:
        raise ValueError("paths must name at least one file, got none")
    return [found[key] for key in sorted(found)]


def _expand(given: str, filesystem: pa.fs.FileSystem | None) -> list[ListedFile]:
    """Return the files of a path, a directory or a pattern."""
    wild = _WILD.search(given)
    files, base, info = _look_at(given, filesystem)
    if info is not None and info.type == pa.fs.FileType.File:
        return [_source(info, files)]
    if info is not None and info.type == pa.fs.FileType.Directory:
        pattern = re.compile(".*")
    elif wild is None:
        raise FileNotFoundError(f"paths: {given} does not exist")
    else:
        start = given.rfind("/", 0, wild.start()) + 1
        files, base = _resolve(given[:start] or ".", filesystem)
        pattern = re.compile(_translate(given[start:].rstrip("/")))
    below = pa.fs.FileSelector(base, recursive=True, allow_not_found=True)
    found = []
    for info in files.get_file_info(below):
        parts = info.path[len(base) :].strip("/").split("/")
        shown = not any(part.startswith(("_", ".")) for part in parts)
        # If a pattern matches a directory, all files below it are included.
        heads = ("/".join(parts[:n]) for n in range(len(parts), 0, -1))
        if info.type == pa.fs.FileType.File and shown and any(map(pattern.fullmatch, heads)):
            found.append(_source(info, files))
    if not found:
        raise FileNotFoundError(f"paths: there are no files in {given}")
    return found


def _look_at(
    given: str, filesystem: pa.fs.FileSystem | None
) -> tuple[pa.fs.FileSystem, str, pa.fs.FileInfo | None]:
    """Look a path up literally first, because a name may contain brackets."""
    try:
        files, path = _resolve(given, filesystem)
    except pa.ArrowInvalid:
        if _WILD.search(given) is None:
            raise
        return filesystem, given, None  # a URI has no brackets, so this is a pattern
    return files, path, files.get_file_info(path)


def _resolve(path: str, filesystem: pa.fs.FileSystem | None) -> tuple[pa.fs.FileSystem, str]:
    """Return the file system of a path or URI, and the path within it."""
    if filesystem is not None:
        return filesystem, path.rstrip("/")
    if _URI.match(path):
        found, inner = pa.fs.FileSystem.from_uri(path)
        return found, inner.rstrip("/")
    return pa.fs.LocalFileSystem(), os.path.abspath(path)


def _translate(pattern: str) -> str:
    """Return a regular expression for a shell pattern; ``*`` and ``?`` do not match ``/``."""
    out = ""
    while pattern:
        bracket = re.match(r"\[(!?)([^\]]+)\]", pattern)
        if pattern.startswith("**/"):
            out, pattern = out + "(?:.*/)?", pattern[3:]
        elif bracket:
            members = re.sub(r"([\[\\^&~|])", r"\\\1", bracket[2])
            out += f"[{'^' if bracket[1] else ''}{members}]"
            pattern = pattern[bracket.end() :]
        else:
            out += {"*": "[^/]*", "?": "[^/]"}.get(pattern[0]) or re.escape(pattern[0])
            pattern = pattern[1:]
    return out


def _source(info: pa.fs.FileInfo, filesystem: pa.fs.FileSystem) -> ListedFile:
    return ListedFile(info.path, info.size, info.mtime_ns, filesystem)


def _read_footer(source: ListedFile) -> EventFile:
    """Read a file's footer, and refuse a file that does not have events."""
    path = source.path
    for part in path.split("/"):
        name = part.partition("=")[0]
        if "=" in part and name in _TYPES:
            raise ValueError(
                f"{path}: {name} is told by a directory's name (Hive's partitioning), and only "
                "what is in the files is read; use settle(spark.read.parquet(...))"
            )
    try:
        with source.filesystem.open_input_file(path) as file, pq.ParquetFile(file) as parquet:
            schema, metadata = parquet.schema_arrow, parquet.metadata
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} is not a Parquet file: {error}") from None
    found = _check_schema(path, schema)
    # Columns are numbered by leaves, which differ from the schema's fields if one is nested.
    numbers = {metadata.schema.column(n).path: n for n in range(metadata.num_columns)}
    group_rows, group_bytes = [], []
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        size = 0
        for name in found:
            column = group.column(numbers[name])
            size += column.total_compressed_size
            statistics = column.statistics
            nulls = statistics.null_count if statistics and statistics.has_null_count else 0
            if nulls and name != "reason":
                raise ValueError(
                    f"{path}: {name} must not hold nulls, got {nulls} of {group.num_rows} "
                    f"rows in row group {number}; drop these rows or set a value first"
                )
        group_rows.append(group.num_rows)
        group_bytes.append(size)
    return EventFile(source, found, group_rows, group_bytes)


def _check_schema(path: str, schema: pa.Schema) -> list[str]:
    """Return the event columns of a file; refuse columns of other types."""
    found = []
    for name, expected in _TYPES.items():
        fields = [field for field in schema if field.name == name]
        if len(fields) > 1:
            raise ValueError(f"{path} has {len(fields)} columns {name}; it must have one")
        if not fields:
            if name in _REQUIRED:
                raise ValueError(
                    f"{path} must have a column {name} ({expected}), got {', '.join(schema.names)}"
                )
            continue
        got = fields[0].type
        if not (is_text(got) if name == "reason" else got == expected):
            raise TypeError(
                f"{path}: {name} must be {expected}, got {got}; cast it when the file is written, "
                "or use settle(spark.read.parquet(...).withColumn(...))"
            )
        found.append(name)
    return found


def common_columns(files: list[EventFile]) -> list[str]:
    """Return the columns of all files; refuse files with different columns."""
    first, *others = files
    for other in others:
        for name in set(first.columns) ^ set(other.columns):
            has, lacks = (first, other) if name in first.columns else (other, first)
            raise ValueError(
                f"{has.source.path} has a column {name} and {lacks.source.path} has none; all "
                "files that are settled together must have it, or none"
            )
    return first.columns
