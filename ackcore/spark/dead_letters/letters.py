"""A file of dead letters: its columns, and how it is written and read."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ackcore._records import Int64s
from ackcore.spark.base import letters as base_letters
from ackcore.spark.base.errors import corrupt
from ackcore.spark.dead_letters.objects import ObjectFile

#: No letter is without it, but one that was emptied.
ATTEMPTS = "attempts"
#: A file of only some of the letters of a micro-batch, from this position on.
_PART = re.compile(r"batch-\d+\.(\d+)\.e\d+\.[0-9a-f]+\.parquet")
#: The end of the name of an empty file by which a user gives up a file of letters.
GIVEN_UP = ".given-up"

Bools = np.ndarray[tuple[int], np.dtype[np.bool_]]


def read_parts(
    path: ObjectFile,
    wanted: Bools | None = None,
    columns: list[str] | None = None,
    *,
    encoded: Sequence[str] = (),
) -> Iterator[pa.Table]:
    """Yield the letters of a file, part by part, none larger than a row group is to be.

    Parameters
    ----------
    path : ObjectFile
        The file.
    wanted : ndarray of bool, optional
        Which rows; all if not given.
    columns : list of str, optional
        Which columns, in the order of the file; all if not given.
    encoded : sequence of str, optional
        Columns of text that are dictionaries then.

    Raises
    ------
    CheckpointCorrupt
        If it is damaged or missing.
    """
    with (
        _reading(path),
        # Older row groups are of any size: not even one column's bytes need fit into memory.
        pq.ParquetFile(
            path.open(),
            page_checksum_verification=True,
            buffer_size=1 << 20,
            read_dictionary=list(encoded),
        ) as file,
    ):
        start = 0
        for n in range(file.num_row_groups):
            group = file.metadata.row_group(n)
            here = None if wanted is None else wanted[start : start + group.num_rows]
            start += group.num_rows
            if here is not None and not here.any():
                continue
            rows = group.num_rows * base_letters.GROUP_BYTES // max(group.total_byte_size, 1)
            at = 0
            for batch in file.iter_batches(
                min(max(rows, 1), base_letters.GROUP_ROWS), row_groups=[n], columns=columns
            ):
                table = pa.Table.from_batches([batch])
                if here is not None:
                    table = table.filter(pa.array(here[at : at + len(batch)]))
                at += len(batch)
                if len(table):
                    yield table


@contextlib.contextmanager
def reading_letters(path: ObjectFile) -> Iterator[pq.ParquetFile]:
    """Open a file of letters, to read parts of it; within, what is wrong with it names it.

    Raises
    ------
    CheckpointCorrupt
        If it is damaged or missing.
    """
    with _reading(path), pq.ParquetFile(path.open(), page_checksum_verification=True) as file:
        yield file


@contextlib.contextmanager
def _reading(path: ObjectFile) -> Iterator[None]:
    """Name the file in whatever is wrong with it."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        way_out = (
            "Put the file back from a backup; or make an empty file beside it whose name ends in "
            f"{path.name}{GIVEN_UP} and start again: that gives up the letters that only it holds, "
            "and nothing else"
        )
        raise corrupt(path, f"is damaged: {error}", way_out) from error


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


def read_letters(path: ObjectFile, columns: list[str] | None = None) -> pa.Table:
    """Read a file of letters.

    Raises
    ------
    CheckpointCorrupt
        If it is damaged or missing.
    """
    with _reading(path):
        return pq.read_table(
            path.open(),
            columns=columns,
            page_checksum_verification=True,
            partitioning=None,
        )


def read_replays(path: ObjectFile) -> Int64s:
    """Read how often letters of a file had been sent again.

    Raises
    ------
    CheckpointCorrupt
        If it is damaged or missing.
    """
    with reading_letters(path) as file:
        replays = file.read(["replays"])["replays"].fill_null(0)  # where letters were emptied
        found: Int64s = replays.to_numpy().astype(np.int64)
        return found


def read_schema(path: ObjectFile) -> pa.Schema:
    """Return the columns of a file of letters, as Arrow had them.

    Raises
    ------
    CheckpointCorrupt
        If it is damaged or missing.
    """
    with _reading(path):
        return pq.read_schema(path.open())


class BatchRows(NamedTuple):
    """The micro-batch of each row of a file, and the first row of each micro-batch's letters.

    Where the file has only some letters of a micro-batch, they may begin before the first row.
    """

    batch_ids: Int64s
    starts: Mapping[int, int]

    def __len__(self) -> int:
        return len(self.batch_ids)

    def position(self, row: int) -> int:
        """Return the how-manieth of its micro-batch the letter in a row is."""
        return row - self.starts[int(self.batch_ids[row])]

    def row(self, number: int, position: int) -> int | None:
        """Return the row of a letter; None if it is not in the file."""
        row = self.starts.get(number, len(self)) + position
        return row if 0 <= row < len(self) and self.batch_ids[row] == number else None


def batch_rows(path: ObjectFile, batch_ids: Int64s | None = None) -> BatchRows:
    """Return the micro-batches of a file's letters.

    Parameters
    ----------
    path : ObjectFile
        The file.
    batch_ids : numpy.ndarray of int64, optional
        The column, if it was read already.

    Raises
    ------
    CheckpointCorrupt
        If the file is damaged or missing.
    """
    if batch_ids is None:
        batch_ids = read_letters(path, ["batch_id"])["batch_id"].to_numpy()
    numbers, starts = np.unique(batch_ids, return_index=True)
    starts -= position_of(path)
    return BatchRows(batch_ids, dict(zip(numbers.tolist(), starts.tolist(), strict=True)))


def position_of(path: ObjectFile) -> int:
    """Return which letter of its micro-batch is the first one of a file."""
    part = _PART.fullmatch(path.name)
    return 0 if part is None else int(part[1])
