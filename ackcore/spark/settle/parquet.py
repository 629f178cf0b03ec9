"""Settling a table that lies in Parquet files: the workers read them, and no event meets the JVM.

There are two plans, and what crosses into the JVM is names, blobs and results:

- *shares*, for few cores: each task reads all files and settles its share of the roots.  To read a
  row once more costs less than to fold it, pack it, and have the JVM carry it to another task.
- *blobs*, for the rest: the driver deals row groups out; a task reads its own, and folds and packs
  them as `ackcore.spark.settle` does.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

from ackcore._backend import Ledger
from ackcore._records import Int64s
from ackcore._row_parts import MAX_SHARDS
from ackcore._shuffle import split_by_shard, take_shard
from ackcore.arrow import is_text
from ackcore.spark.base.session import refuse_session
from ackcore.spark.settle.packing import HELD_ROOTS, Batches, Crowd, Packer, new_ledger
from ackcore.spark.settle.reasons import earliest
from ackcore.spark.settle.settled import Narrow
from ackcore.spark.settle.shards import MapInArrow, read_events, results
from ackcore.spark.settle.tables import Job
from ackcore.spark.settle.wire import BLOB_DDL, Events

#: Compressed bytes that a task reads at most, a row group more or less.  The more it reads, the
#: more rows meet their root again and need not be shipped.
_TASK_BYTES = 256 << 20
#: Rows that are decoded at a time.
_READ_ROWS = 1 << 16
#: Cores up to which all read all.  Each but one pays 16 ns a row for it (11 to read, 5 to pick its
#: share); carrying costs all of them together, for each row of the table, 40 ns where a tree's rows
#: lie together and 130 where they are scattered, and a stage more.  (Measured with two cores.)
MOST_READERS = 4
#: Rows of such a share at most: where each is a root of its own, it is read in some five passes.
SHARE_ROWS = 1 << 24
#: Tables of reasons that are kept until they are made into one, which has but one of each root.
_READINGS = 64
#: Footers that the driver reads at a time: it waits for storage, not for its core.
_LISTING_THREADS = 16
#: Bytes of one event in memory, as `default_shards` counts them.
_EVENT_BYTES, _TIME_BYTES = 20, 8

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


class _Source(NamedTuple):
    """A file as it was when it was listed."""

    path: str
    size: int
    mtime_ns: int | None
    filesystem: pa.fs.FileSystem


class _File(NamedTuple):
    """What the driver learns of a file."""

    source: _Source
    columns: list[str]
    group_rows: list[int]
    group_bytes: list[int]


class _Piece(NamedTuple):
    """Row groups ``first`` to ``end`` (without it) of a file."""

    source: _Source
    first: int
    end: int
    rows: int


def settle_parquet(
    spark: SparkSession,
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    filesystem: pa.fs.FileSystem | None = None,
    shards: int | None = None,
    open_before: DataFrame | None = None,
    now_ms: int | None = None,
    timeout_ms: int | None = None,
) -> DataFrame:
    """Tell of each root in Parquet files of ack events what became of it.

    Several times as fast as `settle` of a DataFrame of the same files, whose rows are made in the
    JVM and handed to Python.

    Parameters
    ----------
    spark : pyspark.sql.SparkSession
        A classic one.
    paths : path or sequence of paths
        Files, directories (read with all below; names that begin with ``_`` or ``.`` are left
        out) and patterns (``*``, ``?``, ``[...]``, ``**/``).  A path is local, or a URI that
        pyarrow knows (``s3://``, ``gs://``, ``hdfs://``, ``file://``); every worker must see it.
        The files must not change until the last action on the result.
    filesystem : pyarrow.fs.FileSystem, optional
        What the paths belong to, if not told by URIs: with credentials, say.
    shards, open_before, now_ms, timeout_ms
        As for `settle`.  Without the first two, up to 4 cores read all of local files each, and
        there is no shuffle.

    Returns
    -------
    pyspark.sql.DataFrame
        As `settle` returns.  The files hold ``root_id`` (int64), ``val`` (int64), ``task``
        (int32), and if you have them ``ts_ms`` (int64) and ``reason`` (text); other columns
        are not read.

    Raises
    ------
    FileNotFoundError
        If a path does not exist, or matches no file.
    TypeError, ValueError
        As for `settle`, naming the file; or if a file is named twice or is not Parquet.
    """
    refuse_session(spark)
    sources = _list_files(paths, filesystem)
    with ThreadPoolExecutor(min(_LISTING_THREADS, len(sources))) as pool:
        files = list(pool.map(_read_footer, sources))
    names = _common_columns(files)
    timed = "ts_ms" in names
    rows = sum(sum(file.group_rows) for file in files)
    job = Job(
        spark,
        timed=timed,
        reasons="reason" in names,
        shards=shards,
        open_before=open_before,
        now_ms=now_ms,
        timeout_ms=timeout_ms,
        size=lambda: rows * (_EVENT_BYTES + timed * _TIME_BYTES),
    )
    cores = spark.sparkContext.defaultParallelism
    if shards is None and open_before is None and _is_read_by_all(files, rows, cores):
        readers = min(cores, job.shards)
        settle_share = settle_shares(
            files,
            names,
            readers,
            seed=job.seed,
            now_ms=job.now_ms,
            timeout_ms=job.timeout_ms,
            narrow=job.narrow,
        )
        numbers = spark.range(0, readers, 1, readers)
        return job.narrow.widen(numbers.mapInArrow(settle_share, job.narrow.ddl))
    tasks = _deal_out(files, cores)
    pack = _pack_pieces(tasks, names, job.shards, job.seed)
    numbers = spark.range(0, len(tasks), 1, max(1, len(tasks)))
    return job.settle(numbers.mapInArrow(pack, BLOB_DDL))


def _is_read_by_all(files: list[_File], rows: int, cores: int) -> bool:
    """Whether each core had better read all files: they are near, and neither is too many."""
    near = all(isinstance(file.source.filesystem, pa.fs.LocalFileSystem) for file in files)
    return near and cores <= MOST_READERS and 0 < rows <= cores * SHARE_ROWS


def settle_shares(
    files: list[_File],
    names: list[str],
    shares: int,
    *,
    seed: int,
    now_ms: int,
    timeout_ms: int | None,
    narrow: Narrow | None = None,
    held_roots: int = HELD_ROOTS,
) -> MapInArrow:
    """Return what maps the numbers of shares to what becomes of their roots.

    Each share has all roots that `split_by_shard` gives to it, so nothing is left to be merged.
    One of more than ``held_roots`` is settled in several passes, each of which reads all again.
    """
    timed = "ts_ms" in names
    everything = [
        _Piece(file.source, 0, len(file.group_rows), sum(file.group_rows)) for file in files
    ]
    rows = sum(piece.rows for piece in everything)

    def settle(numbers: Batches) -> Batches:
        todo = [(n, shares) for batch in numbers for n in batch.column(0).to_pylist()]
        while todo:
            share, of = todo.pop()
            ledger: Ledger | None = None
            texts: list[pa.Table] = []
            for events, found in _events_of(everything, names):
                if ledger is None:
                    roots = Crowd.among(events, seed, timed).roots_in(rows) / of
                    ledger = new_ledger(seed, timed, math.ceil(min(roots, held_roots)))
                ledger.fold(*take_shard(*events, share, of))
                if found is not None:
                    texts.append(found.take(_rows_of(found["root_id"].to_numpy(), share, of)))
                if len(texts) == _READINGS:
                    texts = [earliest(texts)]
                if len(ledger) > held_roots and 2 * of <= MAX_SHARDS:
                    # This pass goes on with half of its roots; the others get one of their own.
                    share, of = 2 * share, 2 * of
                    todo.append((share + 1, of))
                    entries = ledger.entries()
                    ledger = new_ledger(seed, timed, held_roots)
                    ledger.merge(entries.take(_rows_of(entries.root_ids, share, of)))
            if ledger is not None:
                kept = earliest(texts)
                yield from results(ledger, timed, kept, now_ms, timeout_ms, narrow)

    return settle


def _rows_of(root_ids: Int64s, share: int, of: int) -> Int64s:
    """Return the numbers of the rows whose roots are in a share."""
    order, counts = split_by_shard(root_ids, of)
    start = int(counts[:share].sum())
    return order[start : start + int(counts[share])]


def _pack_pieces(tasks: list[list[_Piece]], names: list[str], shards: int, seed: int) -> MapInArrow:
    """Return what maps the numbers of tasks to blobs of what they read."""
    timed = "ts_ms" in names

    def pack(numbers: Batches) -> Batches:
        # A file's rows always come in the same order.
        mine = [
            piece for batch in numbers for n in batch.column(0).to_pylist() for piece in tasks[n]
        ]
        rows = sum(piece.rows for piece in mine)
        packer = Packer(shards, seed=seed, timed=timed, fixed_order=True, rows=rows)
        for events, found in _events_of(mine, names):
            yield from packer.add(events)
            yield from packer.add_reasons(found)
        yield from packer.finish()

    return pack


def _events_of(pieces: list[_Piece], names: list[str]) -> Iterator[tuple[Events, pa.Table | None]]:
    timed, reasons = "ts_ms" in names, "reason" in names
    for piece in pieces:
        name = f"{piece.source.path}, row groups {piece.first} to {piece.end - 1}"
        yield from read_events(_read(piece, names), timed, reasons, name)


def _read(piece: _Piece, names: list[str]) -> Batches:
    path, size, mtime_ns, filesystem = piece.source
    info = filesystem.get_file_info(path)
    if info.type != pa.fs.FileType.File:
        raise FileNotFoundError(f"{path} is gone; it was there when settle_parquet listed it")
    if (info.size, info.mtime_ns) != (size, mtime_ns):
        raise ValueError(
            f"{path} has changed since settle_parquet listed it, and its rows may no longer go "
            "with those already read; call settle_parquet again"
        )
    with filesystem.open_input_file(path) as file, pq.ParquetFile(file) as parquet:
        groups = list(range(piece.first, piece.end))
        yield from parquet.iter_batches(_READ_ROWS, groups, columns=names, use_threads=False)


def _deal_out(files: list[_File], cores: int) -> list[list[_Piece]]:
    """Deal row groups out to tasks: neighbours together, and so that all have about as much."""
    total = sum(sum(file.group_bytes) for file in files)
    if total == 0:
        return []
    wanted = max(1, cores) * math.ceil(total / (max(1, cores) * _TASK_BYTES))
    tasks: list[list[_Piece]] = [[] for _ in range(wanted)]
    before = 0
    for file in files:
        for group, (rows, size) in enumerate(zip(file.group_rows, file.group_bytes, strict=True)):
            # By its middle, so that a large group does not fall to the task that it only begins in.
            task = tasks[min(wanted - 1, (2 * before + size) * wanted // (2 * total))]
            before += size
            if task and task[-1].source == file.source and task[-1].end == group:
                task[-1] = task[-1]._replace(end=group + 1, rows=task[-1].rows + rows)
            else:
                task.append(_Piece(file.source, group, group + 1, rows))
    return [task for task in tasks if task]


# Listing.


def _list_files(paths: Any, filesystem: pa.fs.FileSystem | None) -> list[_Source]:
    if isinstance(paths, (str, os.PathLike)):
        paths = [paths]
    elif isinstance(paths, bytes) or not isinstance(paths, Iterable):
        raise TypeError(f"paths must be a path or a sequence of paths, got {type(paths).__name__}")
    found: dict[tuple[str, str], _Source] = {}
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


def _expand(given: str, filesystem: pa.fs.FileSystem | None) -> list[_Source]:
    """Return the files that a path, a directory or a pattern stands for."""
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
        # A pattern may name a directory, and then all below it is meant.
        heads = ("/".join(parts[:n]) for n in range(len(parts), 0, -1))
        if info.type == pa.fs.FileType.File and shown and any(map(pattern.fullmatch, heads)):
            found.append(_source(info, files))
    if not found:
        raise FileNotFoundError(f"paths: there are no files in {given}")
    return found


def _look_at(
    given: str, filesystem: pa.fs.FileSystem | None
) -> tuple[pa.fs.FileSystem, str, pa.fs.FileInfo | None]:
    """Take a path as it is written: a name may have brackets in it."""
    try:
        files, path = _resolve(given, filesystem)
    except pa.ArrowInvalid:
        if _WILD.search(given) is None:
            raise
        return filesystem, given, None  # a URI must not have brackets, and then this is a pattern
    return files, path, files.get_file_info(path)


def _resolve(path: str, filesystem: pa.fs.FileSystem | None) -> tuple[pa.fs.FileSystem, str]:
    """Return the file system that a path or URI belongs to, and the path within it."""
    if filesystem is not None:
        return filesystem, path.rstrip("/")
    if _URI.match(path):
        found, inner = pa.fs.FileSystem.from_uri(path)
        return found, inner.rstrip("/")
    return pa.fs.LocalFileSystem(), os.path.abspath(path)


def _translate(pattern: str) -> str:
    """Return the regular expression of a shell pattern whose ``*`` and ``?`` stop at ``/``."""
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


def _source(info: pa.fs.FileInfo, filesystem: pa.fs.FileSystem) -> _Source:
    return _Source(info.path, info.size, info.mtime_ns, filesystem)


def _read_footer(source: _Source) -> _File:
    """Return what a file says of itself, and refuse a file that does not hold events."""
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
    # Columns are numbered by their leaves, which differ from the schema's where one is nested.
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
                    f"{path}: {name} must not hold nulls, got {nulls} of {group.num_rows} rows in "
                    f"row group {number}; drop these rows or give them a value first"
                )
        group_rows.append(group.num_rows)
        group_bytes.append(size)
    return _File(source, found, group_rows, group_bytes)


def _check_schema(path: str, schema: pa.Schema) -> list[str]:
    """Return which columns of events a file has; refuse those of other types."""
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


def _common_columns(files: list[_File]) -> list[str]:
    """Return the columns of all files, which must have the same ones."""
    first, *others = files
    for other in others:
        for name in set(first.columns) ^ set(other.columns):
            has, lacks = (first, other) if name in first.columns else (other, first)
            raise ValueError(
                f"{has.source.path} has a column {name} and {lacks.source.path} has none; all "
                "files that are settled together must have it, or none"
            )
    return first.columns
