"""The common part of the Parquet sinks: checks of columns, the owner's note, and files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
import pyspark

from ackcore._arrow.record_batches import cast_column, has_type
from ackcore.spark.base.errors import CheckpointForeign
from ackcore.spark.base.paths import Place, is_hidden
from ackcore.spark.base.schemas import unfit_for_parquet
from ackcore.spark.base.versions import SPARK, from_arrow_schema
from ackcore.spark.sinks.columns import refuse_same_names, spark_schema, with_spark_times
from ackcore.spark.sinks.sink import Sink
from ackcore.spark.stores.interface import StoreConflict
from ackcore.spark.stores.opening import is_bucket, open_store

#: Largest output that the driver writes itself, because a Spark job takes longer to start.
DRIVER_ROWS = 1 << 17
DRIVER_BYTES = 32 << 20

#: Limits of a row group of a Parquet file.
_GROUP_ROWS = 1 << 18
_GROUP_BYTES = 64 << 20

_CODECS = ("snappy", "zstd", "lz4", "gzip", "brotli", "none")

#: Metadata key of Spark's schema in a file, which Spark needs to read intervals.
_SPARK_SCHEMA = b"org.apache.spark.sql.parquet.row.metadata"

#: Metadata key of the version of Spark that wrote a file. Without it, a Spark whose
#: datetimeRebaseModeInRead is LEGACY or EXCEPTION changes or refuses dates before 1582-10-15 and
#: times before 1900.
_SPARK_VERSION = b"org.apache.spark.version"

#: Types that Parquet holds and Spark does not read, with the types to emit instead.
_UNREAD: dict[str, tuple[Callable[[pa.DataType], bool], str]] = {
    "nanoseconds": (
        lambda kind: (
            (pa.types.is_timestamp(kind) or pa.types.is_duration(kind)) and kind.unit == "ns"
        ),
        "microseconds: timestamp('us') or duration('us')",
    ),
    "times of day": (pa.types.is_time, "a string or a duration('us')"),
    "floats of 16 bits": (pa.types.is_float16, "float32()"),
    "decimals of more than 38 digits": (
        lambda kind: pa.types.is_decimal(kind) and kind.precision > 38,
        "decimal128(38, ...) or a string",
    ),
}
if SPARK < (4, 1):
    _UNREAD["nulls only"] = pa.types.is_null, "a type, or drop the column"

#: The name of the note of a directory's owner: deployment, sink and checkpoint in JSON.
OWNER = "_ackcore.json"


def is_small(rows: int, size: int) -> bool:
    """Return whether the driver itself writes some rows, faster than a Spark job.

    It writes up to 131,072 ``rows``, read from files of up to 32 MiB in all. ``size``: the size of
    these files in bytes.
    """
    return rows <= DRIVER_ROWS and size <= DRIVER_BYTES


class ParquetDirectory(Sink):
    """Base class of the Parquet sinks, with a directory or prefix for each micro-batch."""

    replaces = True

    def __init__(self, path: Place, compression: str) -> None:
        self._store = open_store(path, "path")
        self.path = self.own_place = self._store.url
        if compression not in _CODECS:
            raise ValueError(
                f"compression must be one of {', '.join(_CODECS)}, got {compression!r}"
            )
        self.compression = compression

    def __repr__(self) -> str:
        return f"to_parquet({self.path!r})"

    def check(self, sink: str, schema: pa.Schema, case_sensitive: bool = False) -> None:
        """Raise TypeError if Parquet cannot hold a column, or Spark cannot read it back.

        That includes a column ``batch_id``, and names that Spark does not distinguish.
        """
        what = f"sink {sink!r}"
        struct = pa.struct(list(schema))
        refuse_same_names(f"{what} writes Parquet for Spark", struct, case_sensitive)
        for field in schema:
            if field.name.lower() == "batch_id":
                raise TypeError(
                    f"{what} writes directories batch_id=..., whose number Spark would read in "
                    f"place of the column {field.name!r}; rename the column in the bolt, or for "
                    "guard() in the frame or in outputs"
                )
            for unread, (is_unread, instead) in _UNREAD.items():
                if has_type(field.type, is_unread):
                    raise TypeError(
                        f"{what} writes Parquet for Spark, which cannot read {unread}, and "
                        f"column {field.name!r} is {field.type}; have the bolt emit {instead}"
                    )
        if any(has_type(field.type, pa.types.is_duration) for field in schema):
            spark_schema(
                f"{what} writes a duration, so its files need the Spark type of every column",
                schema,
            )
        for field, why in unfit_for_parquet(schema):
            raise TypeError(
                f"{what} writes Parquet, which cannot hold column {field.name!r} of "
                f"{field.type} ({why}); have the bolt emit another type"
            )

    def claim(self, sink: str, deployment: str, checkpoint: str) -> None:
        """Put a file ``_ackcore.json`` that names this sink of this deployment as the owner.

        A repeated call has no effect. Raises CheckpointForeign if the directory has another owner,
        or rows without such a file, since its micro-batches may have the same numbers. Also raises
        it if a new sink's directory has other files. Raises StateError if it cannot be read or
        written.
        """
        owner = {"deployment": deployment, "sink": sink, "checkpoint": checkpoint}
        note = self._store.get(OWNER)
        keys = [entry.key for entry in self._store.list()] if note is None else []
        if note is None and not any(key.startswith("batch_id=") for key in keys):
            if (other := next((key for key in keys if not is_hidden(key)), None)) is not None:
                raise CheckpointForeign(
                    f"sink {sink!r}: {self.path} has files that are not the sink's, such as "
                    f"{other}. Spark would read either those files or the sink's rows, not both. "
                    "Give the sink an empty directory"
                )
            try:
                self._store.put(OWNER, json.dumps(owner).encode(), if_absent=True)
            except StoreConflict:  # another writer came first
                note = self._store.get(OWNER)
            else:
                return
        found = None if note is None else read_note(note.data)
        if not is_owner(found, deployment, sink):
            told = owned_by_another(self.path, found, deployment, checkpoint, self._has_rows())
            raise CheckpointForeign(f"sink {sink!r}: {told}")

    def _has_rows(self) -> bool:
        return any(entry.key.startswith("batch_id=") for entry in self._store.list())


def read_note(note: bytes) -> Any:
    """Return the value of a note in JSON; None if it is not JSON."""
    try:
        return json.loads(note)
    except ValueError:
        return None


def is_owner(found: Any, deployment: str, sink: str) -> bool:
    """Return whether the value of a note names this sink of this deployment as the owner."""
    return (
        isinstance(found, dict)
        and found.get("deployment") == deployment
        and found.get("sink") == sink
    )


def owned_by_another(
    place: str, found: Any, deployment: str, checkpoint: str, has_rows: bool
) -> str:
    """Return the message of the error for a directory with another owner, and a way out.

    ``place``: the directory. ``found``: the value of its note, or None. ``deployment``,
    ``checkpoint``: of the refused query. ``has_rows``: whether the directory has rows.
    """
    owner = "another checkpoint or another sink"
    if isinstance(found, dict) and found.get("deployment") == deployment:
        return (
            f"{place} is the directory of sink {found.get('sink')!r} of the same checkpoint, whose "
            "micro-batches have the same numbers. Give each sink its own directory. If you have "
            "given the sink another name or another stream to read, undo that, or give it an "
            "empty directory"
            + ("" if has_rows else f". This one has no rows: you can delete its {OWNER} instead")
        )
    if isinstance(found, dict):
        there = found.get("checkpoint")
        of = f"the checkpoint {there}" if there else "another checkpoint"
        if there == checkpoint:
            of = f"an earlier checkpoint in {there}, which this one has replaced"
        elif there and not is_bucket(there) and not os.path.isdir(there):
            of += ", which does not exist any more"
        owner = f"sink {found.get('sink')!r} of {of} (deployment {found.get('deployment')})"
    release = (
        "To use this directory, delete it first, with all rows in it"
        if has_rows
        else "It has no rows: if no query uses that checkpoint any more, delete "
        f"{os.path.join(place, OWNER)}"
    )
    return (
        f"{place} is the directory of {owner}, whose micro-batches have the same numbers. Give "
        f"each checkpoint and sink its own directory, such as {place}/run=2. {release}"
    )


def write_parquet(file: BinaryIO, compression: str, batches: Iterable[pa.RecordBatch]) -> bool:
    """Write batches to a Parquet file and sync it. Without any, write nothing, return False.

    Raises pyarrow.ArrowInvalid if a time does not fit Spark's type.
    """
    writer = None
    for table in _gathered(batches):
        schema = _file_schema(table.schema)
        # A value that does not fit raises. Some versions of Arrow would write another one instead.
        columns = list(map(cast_column, table.columns, schema.types))
        writer = writer or pq.ParquetWriter(
            file, schema, compression=compression, use_dictionary=_with_dictionaries(schema)
        )
        rows = pa.Table.from_arrays(columns, schema=schema)
        writer.write_table(rows, row_group_size=_GROUP_ROWS)
    if writer is None:
        return False
    writer.close()
    file.flush()
    # The rows must be on disk before the micro-batch is marked as done.
    os.fsync(file.fileno())
    return True


def _file_schema(schema: pa.Schema) -> pa.Schema:
    """Return the schema of a file: times as Spark has them, and durations as its intervals."""
    metadata = {**(schema.metadata or {}), _SPARK_VERSION: pyspark.__version__}
    if any(has_type(kind, pa.types.is_duration) for kind in schema.types):
        metadata[_SPARK_SCHEMA] = from_arrow_schema(schema).json()
    fields = [field.with_type(with_spark_times(field.type)) for field in schema]
    return pa.schema(fields, metadata)


def _with_dictionaries(schema: pa.Schema) -> list[str]:
    """Return the paths of the columns that may have a dictionary: all but numbers in lists or maps.

    If all numbers are null, Arrow writes an empty dictionary, which Spark reads by index.
    """
    if not any(map(pa.types.is_nested, schema.types)):
        return list(schema.names)
    empty = pa.BufferOutputStream()
    pq.write_table(schema.empty_table(), empty)
    with pq.ParquetFile(pa.BufferReader(empty.getvalue())) as file:
        columns = map(file.schema.column, range(len(file.schema)))
        return [
            column.path
            for column in columns
            if not column.max_repetition_level or column.physical_type.endswith("BYTE_ARRAY")
        ]


def _gathered(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Combine batches to tables of about the size of a row group."""
    found: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        found.append(batch)
        rows += len(batch)
        size += batch.nbytes
        if rows >= _GROUP_ROWS or size >= _GROUP_BYTES:
            yield pa.Table.from_batches(found)
            found, rows, size = [], 0, 0
    if found:
        yield pa.Table.from_batches(found)
