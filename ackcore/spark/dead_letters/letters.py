"""A file of dead letters: its columns, and how it is written and read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ackcore._records import Int64s
from ackcore.arrow import rebatched
from ackcore.spark.base.errors import corrupt
from ackcore.spark.base.reason_columns import ReasonTexts, parts
from ackcore.spark.base.schemas import (
    ATTEMPT,
    FIRST_MS,
    LAST_MS,
    MESSAGE_ID,
    REASON,
    REPLAYED,
    TRACKING,
)
from ackcore.spark.dead_letters.objects import ObjectFile

TIME = pa.timestamp("ms", "UTC")
#: What every letter has beside its payload.
LETTER = pa.schema(
    [
        pa.field("message_id", pa.string()),
        pa.field("attempts", pa.int32()),
        pa.field("error_type", pa.string()),
        pa.field("error_message", pa.string()),
        pa.field("component", pa.string()),
        pa.field("first_ms", TIME),
        pa.field("last_ms", TIME),
        pa.field("batch_id", pa.int64()),
        # How often it had been sent again when it died.
        pa.field("replays", pa.int32()),
    ]
)
#: No letter is without it, but one that was emptied.
ATTEMPTS = "attempts"
#: Pages carry checksums, so that a flipped bit is an error and not another letter.
_WRITING: dict[str, Any] = {"write_page_checksum": True, "compression": "zstd"}
#: What goes into one row group, so that no more of a file is in memory.
_GROUP_ROWS, _GROUP_BYTES = 1 << 16, 1 << 25

_WAY_OUT = (
    "Put the file back from a backup; or move it out of the store, which gives up the letters that "
    "only it holds, and nothing else"
)

Bools = np.ndarray[tuple[int], np.dtype[np.bool_]]
#: A file of letters, wherever it is.
FilePath = Path | ObjectFile


def as_letters(dead: pa.Table, number: int) -> pa.Table:
    """Return the dead of a micro-batch, in `TRACKING` and the source's columns, as letters."""
    reasons = ReasonTexts.of_column(dead[REASON])
    component, kind, message = (part.take(pa.array(reasons.of)) for part in parts(reasons.values))
    payload = dead.select(dead.column_names[len(TRACKING) :])
    columns = [
        dead[MESSAGE_ID],
        dead[ATTEMPT],
        kind,
        message,
        component,
        dead[FIRST_MS].cast(TIME),
        dead[LAST_MS].cast(TIME),
        pa.array(np.full(dead.num_rows, number)),
        dead[REPLAYED],
        payload.to_struct_array(),
    ]
    return pa.table(columns, schema=schema_of(payload.schema))


def schema_of(source: pa.Schema) -> pa.Schema:
    """Return the schema of letters from a source of these columns."""
    return LETTER.append(pa.field("payload", pa.struct(list(source))))


def write_letters(file: BinaryIO, schema: pa.Schema, tables: Iterable[pa.Table]) -> None:
    """Write letters, so few to a row group that a reader can have one in memory."""
    batches = (batch for table in tables for batch in table.to_batches())
    with pq.ParquetWriter(file, schema, **_WRITING) as writer:
        for batch in rebatched(batches, _GROUP_ROWS, _GROUP_BYTES):
            writer.write_batch(batch)


def read_parts(path: FilePath, wanted: Bools | None = None) -> Iterator[pa.Table]:
    """Yield the letters of a file, part by part, none larger than a row group is to be.

    Parameters
    ----------
    path : Path or ObjectFile
        The file.
    wanted : ndarray of bool, optional
        Which rows; all if not given.

    Raises
    ------
    CheckpointCorrupt
        If it is damaged or missing.
    """
    with (
        _reading(path),
        # Older row groups are of any size: not even one column's bytes need fit into memory.
        pq.ParquetFile(_opened(path), page_checksum_verification=True, buffer_size=1 << 20) as file,
    ):
        start = 0
        for n in range(file.num_row_groups):
            group = file.metadata.row_group(n)
            here = None if wanted is None else wanted[start : start + group.num_rows]
            start += group.num_rows
            if here is not None and not here.any():
                continue
            rows = group.num_rows * _GROUP_BYTES // max(group.total_byte_size, 1)
            at = 0
            for batch in file.iter_batches(min(max(rows, 1), _GROUP_ROWS), row_groups=[n]):
                table = pa.Table.from_batches([batch])
                if here is not None:
                    table = table.filter(pa.array(here[at : at + len(batch)]))
                at += len(batch)
                if len(table):
                    yield table


@contextlib.contextmanager
def reading_letters(path: FilePath) -> Iterator[pq.ParquetFile]:
    """Open a file of letters, to read parts of it; within, what is wrong with it names it.

    Raises
    ------
    CheckpointCorrupt
        If it is damaged or missing.
    """
    with _reading(path), pq.ParquetFile(_opened(path), page_checksum_verification=True) as file:
        yield file


def _opened(path: FilePath) -> Path | pa.NativeFile:
    return path if isinstance(path, Path) else path.open()


@contextlib.contextmanager
def _reading(path: FilePath) -> Iterator[None]:
    """Name the file in whatever is wrong with it."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise corrupt(path, f"is damaged: {error}", _WAY_OUT) from error


def emptied(letters: pa.Table, gone: Bools) -> pa.Table:
    """Return letters with those that are gone without all but their micro-batch.

    The rows stay: a letter is named by its position among those of its micro-batch.
    """
    schema = letters.schema.remove_metadata()
    empty = {field.name: _empty_of(field.type) for field in schema if field.name == "payload"}
    whole = pa.concat_tables(
        [letters.replace_schema_metadata(), pa.Table.from_pylist([empty], schema)]
    )
    rows = np.where(gone, len(letters), np.arange(len(letters)))
    at = schema.get_field_index("batch_id")
    return whole.take(pa.array(rows)).set_column(at, schema.field(at), letters["batch_id"])


def _empty_of(kind: pa.DataType) -> Any:
    """Return a value with nothing in it, which may stand where no null may."""
    if pa.types.is_struct(kind):
        return {field.name: None if field.nullable else _empty_of(field.type) for field in kind}
    if pa.types.is_nested(kind):
        return []
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return ""
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return b""
    if pa.types.is_boolean(kind):
        return False
    return Decimal(0) if pa.types.is_decimal(kind) else 0


def emptied_rows(file: pq.ParquetFile) -> Bools | None:
    """Return which rows of a file were emptied; None if no one was, which its footer tells."""
    at = file.schema_arrow.get_field_index(ATTEMPTS)
    groups = (file.metadata.row_group(n) for n in range(file.num_row_groups))
    if not any(group.column(at).statistics.null_count for group in groups):
        return None
    found: Bools = file.read([ATTEMPTS])[ATTEMPTS].is_null().to_numpy()
    return found


def read_letters(path: FilePath, columns: list[str] | None = None) -> pa.Table:
    """Read a file of letters.

    Raises
    ------
    CheckpointCorrupt
        If it is damaged or missing.
    """
    with _reading(path):
        return pq.read_table(
            _opened(path), columns=columns, page_checksum_verification=True, partitioning=None
        )


def read_replays(path: FilePath) -> Int64s:
    """Read how often letters of a file had been sent again; older files do not tell, and are 0.

    Raises
    ------
    CheckpointCorrupt
        If it is damaged or missing.
    """
    with reading_letters(path) as file:
        if "replays" not in file.schema_arrow.names:
            return np.zeros(file.metadata.num_rows, np.int64)
        replays = file.read(["replays"])["replays"].fill_null(0)  # where letters were emptied
        found: Int64s = replays.to_numpy().astype(np.int64)
        return found


def read_schema(path: FilePath) -> pa.Schema:
    """Return the columns of a file of letters, as Arrow had them.

    Raises
    ------
    CheckpointCorrupt
        If it is damaged or missing.
    """
    with _reading(path):
        return pq.read_schema(_opened(path))


def starts_of(batch_ids: Int64s) -> dict[int, int]:
    """Return where the letters of each micro-batch begin in a file."""
    numbers, starts = np.unique(batch_ids, return_index=True)
    return dict(zip(numbers.tolist(), starts.tolist(), strict=True))
