"""Settling of events in Parquet files, which the workers read themselves, without the JVM.

Only file names, blobs and results pass through the JVM.  There are two plans:

- *shares*, for few cores: each task reads all files and settles its share of the roots.  Reading a
  row once more costs less than to fold it, pack it, and send it to another task.
- *blobs*, otherwise: the driver distributes the row groups; a task reads its own, and folds and
  packs them as `ackcore.spark.settle` does.
"""

from __future__ import annotations

import math
import os
import posixpath
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

from ackcore._arguments import MAX_SHARDS
from ackcore._arrow.record_batches import is_text
from ackcore._backend import Ledger, split_by_shard, take_shard
from ackcore._error_hints import naming_arguments
from ackcore._records import Int64s
from ackcore.spark.base.arrow_batches import Batches, MapInArrow
from ackcore.spark.base.reasons import earliest
from ackcore.spark.base.session import refuse_session, task_slots
from ackcore.spark.settle.dataframes import Settling
from ackcore.spark.settle.packing import HELD_ROOTS, CardinalityEstimate, Packer, new_ledger
from ackcore.spark.settle.wire import BLOB_DDL, Events
from ackcore.spark.settle.worker_functions import EVENT_TYPES, ResultForm, read_events, results

#: The approximate maximum of compressed bytes that a task reads.  The more it reads, the more rows
#: are folded with others of their root and need not be sent.
_TASK_BYTES = 256 << 20
#: The number of rows that are decoded at a time.
_READ_ROWS = 1 << 16
#: The maximum number of cores with which each core reads all files.  That costs each further core
#: 16 ns per row (11 to read, 5 to select its share).  Sending rows costs all cores together 40 ns
#: per row of the table if a tree's rows are adjacent, 130 if they are scattered, and one more
#: stage.  (Measured with two cores.)
MOST_READERS = 4
#: The maximum rows of such a share; if each row is its own root, that takes some five passes.
SHARE_ROWS = 1 << 24
#: The number of tables of reasons after which they are merged to one reason per root.
_READINGS = 64
#: The bytes of one event in memory, for `default_shards`.
_EVENT_BYTES, _TIME_BYTES = 20, 8
#: The number of footers that the driver reads at a time; it mostly waits for storage.
_LISTING_THREADS = 16


_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")


class ListedFile(NamedTuple):
    """A file with its size and time of change when it was listed."""

    path: str
    size: int
    mtime_ns: int | None  # since 1970; None if the file system does not report it
    filesystem: pa.fs.FileSystem


class EventFile(NamedTuple):
    """A file with data from its footer.

    ``columns``: its columns of events. ``group_rows``, ``group_bytes``: for each row group, the
    number of rows, and the compressed bytes of these columns.
    """

    source: ListedFile
    columns: list[str]
    group_rows: list[int]
    group_bytes: list[int]


class _Piece(NamedTuple):
    """The row groups of a file from ``first`` to ``end`` (exclusive), with ``rows`` rows in all."""

    source: ListedFile
    first: int
    end: int
    rows: int


@naming_arguments
def settle_parquet(
    spark: SparkSession,
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    filesystem: pa.fs.FileSystem | None = None,
    shards: int | None = None,
    open_before: DataFrame | None = None,
    now_ms: int | None = None,
    timeout_s: float | None = None,
) -> DataFrame:
    """Settle the roots in Parquet files of ack events.

    It is several times as fast as `settle` of a DataFrame of the same files, because the rows do
    not pass through the JVM.

    Parameters
    ----------
    spark : pyspark.sql.SparkSession
        A classic session, or one of Spark Connect.
    paths : path or sequence of paths
        Files and directories (read recursively, without names that begin with ``_`` or ``.``). A
        path is local, or a URI that pyarrow supports (``s3://``, ``gs://``, ``hdfs://``,
        ``file://``), whose ``%20`` is a space. Every worker must be able to read it. The files must
        not change until the last action on the result.
    filesystem : pyarrow.fs.FileSystem, optional
        The file system of the paths, for instance with credentials, if they are not URIs.
    shards, open_before, now_ms, timeout_s
        The arguments of `settle`. Without the first two, on up to 4 cores and with up to 2**24
        local rows for each, every core reads all files, and there is no shuffle.

    Returns
    -------
    pyspark.sql.DataFrame
        The result of `settle`. The files must have ``root_id`` (int64), ``val`` (int64),
        ``task`` (int32), and may have ``ts_ms`` (int64) and ``reason`` (text). Other columns are
        not read.

    Raises
    ------
    FileNotFoundError
        If a path does not exist, or a directory has no files.
    TypeError, ValueError
        If `settle` would refuse the events or an argument, with the name of the file; or if a file
        is named twice or is not Parquet.
    """
    refuse_session(spark)
    files = read_footers(paths, filesystem)
    names = common_columns(files)
    timed = "ts_ms" in names
    rows = sum(sum(file.group_rows) for file in files)
    settling = Settling(
        spark,
        timed=timed,
        reasons="reason" in names,
        shards=shards,
        open_before=open_before,
        now_ms=now_ms,
        timeout_s=timeout_s,
        size=lambda: rows * (_EVENT_BYTES + timed * _TIME_BYTES),
    )
    cores = task_slots(spark)
    if shards is None and open_before is None and _is_read_by_all(files, rows, cores):
        readers = min(cores, settling.shards)
        settle_share = settle_shares(
            files,
            names,
            readers,
            seed=settling.seed,
            now_ms=settling.now_ms,
            timeout_ms=settling.timeout_ms,
            form=settling.form,
        )
        numbers = spark.range(0, readers, 1, readers)
        return settling.form.documented(numbers.mapInArrow(settle_share, settling.form.ddl))
    tasks = _deal_out(files, cores)
    pack = _pack_pieces(tasks, names, settling.shards, settling.seed)
    numbers = spark.range(0, len(tasks), 1, max(1, len(tasks)))
    return settling.settle(numbers.mapInArrow(pack, BLOB_DDL))


def _is_read_by_all(files: list[EventFile], rows: int, cores: int) -> bool:
    """Return whether each core should read all files: if local, up to 4 cores, 2**24 rows each."""
    near = all(isinstance(file.source.filesystem, pa.fs.LocalFileSystem) for file in files)
    return near and cores <= MOST_READERS and 0 < rows <= cores * SHARE_ROWS


def settle_shares(
    files: list[EventFile],
    names: list[str],
    shares: int,
    *,
    seed: int,
    now_ms: int,
    timeout_ms: int | None,
    form: ResultForm,
) -> MapInArrow:
    """Return a function for ``mapInArrow`` that maps numbers of shares to their settled roots.

    A share has all messages of the roots that `split_by_shard` assigns to it, so that no merge
    follows. A share of more than `HELD_ROOTS` roots is settled in several passes over the files.

    ``names``: the columns to read. ``shares``: the number of shares, which are numbered from 0.
    ``seed``: the seed of the ledgers. ``now_ms``, ``timeout_ms``: the time from which the time-out
    is measured, and the time-out or None. ``form``: the columns of the result.
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
                    roots = CardinalityEstimate.of_sample(events, seed, timed).roots_in(rows) / of
                    ledger = new_ledger(seed, timed, math.ceil(min(roots, HELD_ROOTS)))
                ledger.fold(*take_shard(*events, share, of))
                if found is not None:
                    texts.append(found.take(_rows_of(found["root_id"].to_numpy(), share, of)))
                if len(texts) == _READINGS:
                    texts = [earliest(texts)]
                if len(ledger) > HELD_ROOTS and 2 * of <= MAX_SHARDS:
                    # This pass continues with half of its roots; the other half gets another pass.
                    share, of = 2 * share, 2 * of
                    todo.append((share + 1, of))
                    entries = ledger.entries()
                    ledger = new_ledger(seed, timed, HELD_ROOTS)
                    ledger.merge(entries.take(_rows_of(entries.root_ids, share, of)))
            if ledger is not None:
                kept = earliest(texts)
                yield from results(ledger, timed, kept, now_ms, timeout_ms, form)

    return settle


def _rows_of(root_ids: Int64s, share: int, of: int) -> Int64s:
    """Return the row numbers of the roots in share ``share``, from 0, of ``of`` shares."""
    order, counts = split_by_shard(root_ids, of)
    start = int(counts[:share].sum())
    return order[start : start + int(counts[share])]


def _pack_pieces(tasks: list[list[_Piece]], names: list[str], shards: int, seed: int) -> MapInArrow:
    """Return a function for ``mapInArrow`` that maps task numbers to blobs of the tasks' events."""
    timed = "ts_ms" in names

    def pack(numbers: Batches) -> Batches:
        # A file's rows always come in the same order.
        mine = [
            piece for batch in numbers for n in batch.column(0).to_pylist() for piece in tasks[n]
        ]
        rows = sum(piece.rows for piece in mine)
        packer = Packer(shards, seed=seed, timed=timed, fixed_order=True, rows=rows)
        yield from packer.pack(_events_of(mine, names))

    return pack


def _events_of(pieces: list[_Piece], names: list[str]) -> Iterator[tuple[Events, pa.Table | None]]:
    timed, reasons = "ts_ms" in names, "reason" in names
    for piece in pieces:
        part = f"row groups {piece.first} to {piece.end - 1}"
        batches = _read(piece, names)
        yield from read_events(batches, timed, reasons, piece.source.path, part=part)


def _read(piece: _Piece, names: list[str]) -> Batches:
    path, size, mtime_ns, filesystem = piece.source
    info = filesystem.get_file_info(path)
    if info.type != pa.fs.FileType.File:
        raise FileNotFoundError(
            f"{path} is not a file on this worker: it was deleted after settle_parquet listed it, "
            "or the workers cannot read it; call settle_parquet again, or give the workers the file"
        )
    if (info.size, info.mtime_ns) != (size, mtime_ns):
        raise ValueError(
            f"{path} has changed since settle_parquet listed it, and other row groups may have "
            "been read before the change; call settle_parquet again"
        )
    with filesystem.open_input_file(path) as file, pq.ParquetFile(file) as parquet:
        groups = list(range(piece.first, piece.end))
        yield from parquet.iter_batches(_READ_ROWS, groups, columns=names, use_threads=False)


def _deal_out(files: list[EventFile], cores: int) -> list[list[_Piece]]:
    """Distribute row groups among tasks: adjacent ones together, and about equal bytes for each.

    Tasks without a row group are left out.
    """
    total = sum(sum(file.group_bytes) for file in files)
    if total == 0:
        return []
    wanted = max(1, cores) * math.ceil(total / (max(1, cores) * _TASK_BYTES))
    tasks: list[list[_Piece]] = [[] for _ in range(wanted)]
    before = 0
    for file in files:
        for group, (rows, size) in enumerate(zip(file.group_rows, file.group_bytes, strict=True)):
            # By the middle of the group, so that a large one goes to the task with most of it.
            task = tasks[min(wanted - 1, (2 * before + size) * wanted // (2 * total))]
            before += size
            if task and task[-1].source == file.source and task[-1].end == group:
                task[-1] = task[-1]._replace(end=group + 1, rows=task[-1].rows + rows)
            else:
                task.append(_Piece(file.source, group, group + 1, rows))
    return [task for task in tasks if task]


def read_footers(paths: Any, filesystem: pa.fs.FileSystem | None) -> list[EventFile]:
    """Return the files at the paths of `settle_parquet`, sorted, with the data in their footers.

    Raises FileNotFoundError if a path does not exist or has no files. Raises TypeError if an
    argument or a column has another type. Raises ValueError if no file is named, or one twice, or
    one is no Parquet file or lacks a column.
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
            raise TypeError(f"paths must contain only paths, got {type(given).__name__}")
        for source in _expand(os.fspath(given), filesystem):
            key = _identity(source)
            if key in found:
                raise ValueError(
                    f"paths must name each file once, got {source.path} twice, first as "
                    f"{found[key].path}: its events would count twice"
                )
            found[key] = source
    if not found:
        raise ValueError("paths must name at least one file, got none")
    return [found[key] for key in sorted(found)]


def _identity(source: ListedFile) -> tuple[str, str]:
    """Return the kind of a file's file system, and its path there without links and ``//``."""
    files, path = source.filesystem, source.path
    while isinstance(files, pa.fs.SubTreeFileSystem):
        files, path = files.base_fs, posixpath.join(files.base_path, path)
    if isinstance(files, pa.fs.LocalFileSystem):
        path = os.path.realpath(path)
    elif files.type_name == "hdfs":
        path = posixpath.normpath(path)  # in a bucket, a//b is another key than a/b
    return files.type_name, path


def _expand(given: str, filesystem: pa.fs.FileSystem | None) -> list[ListedFile]:
    """Return the file at a path, or those below a directory, but not ``_names`` and ``.names``.

    Raises FileNotFoundError if there is none.
    """
    if filesystem is not None:
        files, base = filesystem, given.rstrip("/")
    elif _URI.match(given):
        files, path = pa.fs.FileSystem.from_uri(given)
        base = path.rstrip("/")
    else:
        files, base = pa.fs.LocalFileSystem(), os.path.abspath(given)
    info = files.get_file_info(base)
    if info.type == pa.fs.FileType.File:
        return [ListedFile(info.path, info.size, info.mtime_ns, files)]
    if info.type != pa.fs.FileType.Directory:
        glob = "; for a pattern, pass the list that glob.glob returns" * ("*" in given)
        raise FileNotFoundError(f"paths: {given} does not exist{glob}")
    found = []
    for info in files.get_file_info(pa.fs.FileSelector(base, recursive=True)):
        parts = info.path[len(base) :].strip("/").split("/")
        shown = not any(part.startswith(("_", ".")) for part in parts)
        if info.type == pa.fs.FileType.File and shown:
            found.append(ListedFile(info.path, info.size, info.mtime_ns, files))
    if not found:
        raise FileNotFoundError(f"paths: {given} has no files; _names and .names do not count")
    return found


def _read_footer(source: ListedFile) -> EventFile:
    """Read a file's footer.

    Raises ValueError if it is no Parquet or lacks an event column, TypeError if one has another
    type.
    """
    path = source.path
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
        group_rows.append(group.num_rows)
        columns = (group.column(numbers[name]) for name in found)
        group_bytes.append(sum(column.total_compressed_size for column in columns))
    return EventFile(source, found, group_rows, group_bytes)


def _check_schema(path: str, schema: pa.Schema) -> list[str]:
    """Return the event columns of a file.

    Raises ValueError if one is missing or there twice, TypeError if one has another type.
    """
    found = []
    for name, expected in EVENT_TYPES.items():
        fields = [field for field in schema if field.name == name]
        if len(fields) > 1:
            raise ValueError(
                f"{path} has {len(fields)} columns {name}; write it with one, and other names for "
                "the rest"
            )
        if not fields:
            if name not in ("ts_ms", "reason"):
                raise ValueError(
                    f"{path} has no column {name}, of type {expected}; its columns are "
                    f"{', '.join(schema.names) or 'none'}"
                )
            continue
        got = fields[0].type
        if not (is_text(got) if name == "reason" else got == expected):
            other, cast = "cast it when the file is written", "..."
            # A cast to long would count seconds, or the unit of the column.
            if name == "ts_ms" and pa.types.is_timestamp(got):
                other = "write it as milliseconds"
                cast = '"ts_ms", unix_millis(col("ts_ms").cast("timestamp"))'
            raise TypeError(
                f"{path}: column {name} must be {expected}, got {got}; {other}, or use "
                f"settle(spark.read.parquet(...).withColumn({cast}))"
            )
        found.append(name)
    return found


def common_columns(files: list[EventFile]) -> list[str]:
    """Return the event columns of the files; raise ValueError if they have different ones."""
    first, *others = files
    for other in others:
        for name in set(first.columns) ^ set(other.columns):
            has, lacks = (first, other) if name in first.columns else (other, first)
            raise ValueError(
                f"{has.source.path} has a column {name} and {lacks.source.path} has none; all "
                "files that are settled together must have it, or none: write them alike, or use "
                f"settle(...) with a DataFrame of all files without {name}"
            )
    return first.columns
