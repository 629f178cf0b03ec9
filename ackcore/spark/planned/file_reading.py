"""The reading of data files by tasks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from ackcore.spark.base.arrow_batches import Batches
from ackcore.spark.base.versions import from_arrow_schema, to_arrow_schema
from ackcore.spark.stores.interface import Store
from ackcore.spark.stores.opening import is_bucket, open_store

#: The formats of `FileSpout`.
FORMATS = ("text", "json", "csv", "parquet")
#: Suffixes of compressed files, and Arrow's names of their codecs. Parquet compresses by itself.
CODECS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4", ".br": "brotli"}
#: The most rows of a batch, and the bytes that are read at once; a line of JSON may be as long.
_ROWS, _BLOCK_BYTES = 10_000, 1 << 24
#: The longest line of text in bytes; a task holds a line in memory several times.
_LINE_BYTES = 1 << 28


class FileUnreadable(ValueError):
    """A data file that cannot be read in its format; the message names it."""


@dataclass(frozen=True)
class FileReader:
    """A function for ``mapInArrow`` that is given the numbers of tasks and returns their rows."""

    root: str  # the directory, or a bucket's URL
    tasks: tuple[tuple[str, ...], ...]  # by task, the paths of its files below ``root``
    format: str  # one of `FORMATS`
    schema: pa.Schema  # the columns to return
    #: By file, the texts of columns that have one value in the whole file.
    constants: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)

    def __call__(self, batches: Batches) -> Batches:
        """Yield the rows of each task in the input."""
        for batch in batches:
            for task in batch.column(0).to_pylist():
                for name in self.tasks[task]:
                    try:
                        for found in self._read(name):
                            yield self._fitted(found, self.constants.get(name, {}))
                    except (pa.ArrowException, ValueError, OSError) as error:
                        said = str(error).partition("\n")[0]
                        if self.format in ("json", "csv"):
                            said += ". For a dead letter per bad line, read the format 'text' "
                            said += "and parse the lines in a bolt"
                        raise FileUnreadable(
                            f"the file {self.root}/{shown(name)} cannot be read as {self.format}: "
                            f"{type(error).__name__}: {said}"
                        ) from None

    def _read(self, name: str) -> Iterator[pa.RecordBatch]:
        source = self._opened(name)
        if self.format == "parquet":
            import pyarrow.parquet as pq  # noqa: PLC0415 - loaded where it is needed

            # Spark writes times as INT96, which overflow as nanoseconds.
            with pq.ParquetFile(source, coerce_int96_timestamp_unit="us") as file:
                there = self._columns_in(file.schema_arrow.names)
                yield from file.iter_batches(_ROWS, columns=there)
            return
        codec = next((codec for end, codec in CODECS.items() if name.endswith(end)), None)
        stream: Any = source if codec is None else pa.CompressedInputStream(source, codec)
        with stream:
            if self.format == "text":
                yield from self._lines(stream)
                return
            content = pa.py_buffer(stream.read())
            if not content.size:
                return
            stream = pa.BufferReader(content)
            if self.format == "json":
                from pyarrow import json as formats  # noqa: PLC0415

                table = formats.read_json(
                    stream,
                    formats.ReadOptions(block_size=_BLOCK_BYTES),
                    formats.ParseOptions(
                        explicit_schema=self.schema, unexpected_field_behavior="ignore"
                    ),
                )
                yield from table.to_batches(_ROWS)
                return
            from pyarrow import csv  # noqa: PLC0415

            parse = csv.ParseOptions(newlines_in_values=True)
            with csv.open_csv(stream, parse_options=parse) as header:
                self._columns_in(header.schema.names)
            reader = csv.open_csv(
                pa.BufferReader(content),
                parse_options=parse,
                convert_options=csv.ConvertOptions(
                    column_types=self.schema,
                    include_columns=self.schema.names,
                    include_missing_columns=True,
                    null_values=[""],  # not Arrow's list, with NA and null
                    strings_can_be_null=True,
                    quoted_strings_can_be_null=False,
                ),
            )
            yield from reader

    def _columns_in(self, names: Sequence[str]) -> list[str]:
        """Return the columns to read of those in a file; raise ValueError without any."""
        found = [name for name in self.schema.names if name in names]
        if not found:
            raise ValueError(
                f"it has none of the columns {', '.join(self.schema.names)}, but {', '.join(names)}"
            )
        for name in found:
            if names.count(name) > 1:
                raise ValueError(f"it has the column {name} {names.count(name)} times")
        return found

    @cached_property
    def _bucket(self) -> Store | None:
        return open_store(self.root, "path") if is_bucket(self.root) else None

    def _opened(self, name: str) -> Any:
        if self._bucket is None:
            return pa.OSFile(os.fsencode(f"{self.root}/{name}"))
        found = self._bucket.read(name)
        if found is None:
            raise FileNotFoundError(f"the file {self.root}/{name} does not exist")
        return pa.BufferReader(found)

    def _lines(self, stream: Any) -> Iterator[pa.RecordBatch]:
        rest = b""
        while piece := stream.read(_BLOCK_BYTES):
            *lines, rest = (rest + piece).split(b"\n")
            yield from self._of_lines(lines)
            if len(rest) > _LINE_BYTES:
                raise ValueError(f"it has a line of more than {_LINE_BYTES} bytes")
        if rest:
            yield from self._of_lines([rest])

    def _of_lines(self, lines: list[bytes]) -> Iterator[pa.RecordBatch]:
        for at in range(0, len(lines), _ROWS):
            some = [line.removesuffix(b"\r") for line in lines[at : at + _ROWS]]
            # Without a check: the bytes of a line that is not UTF-8 reach its dead letter.
            column = pa.array(some, pa.binary()).view(pa.string())
            yield pa.RecordBatch.from_arrays([column], schema=self.schema)

    def _fitted(self, batch: pa.RecordBatch, constants: Mapping[str, str | None]) -> pa.RecordBatch:
        """Return the columns of the schema: those of the file, its constants, or nulls."""
        columns = [
            batch.column(one.name).cast(one.type)
            if one.name in batch.schema.names
            else pa.repeat(pa.scalar(constants.get(one.name), pa.string()), len(batch)).cast(
                one.type
            )
            for one in self.schema
        ]
        for one, column in zip(self.schema, columns, strict=True):
            if column.null_count and not one.nullable:
                raise ValueError(f"column {one.name} has nulls, and its schema allows none")
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)


def shown(name: str) -> str:
    """Return a file's name for messages; bytes that are not UTF-8 are escaped."""
    return name.encode("utf-8", "backslashreplace").decode()


def read_files(
    spark: SparkSession,
    root: str,
    files: Sequence[tuple[str, int]],
    format: str,
    schema: pa.Schema,
    tasks: int,
    constants: Mapping[str, Mapping[str, str | None]] | None = None,
) -> DataFrame:
    """Return a DataFrame of the rows of files, given by path and size; see `FileReader`.

    At most ``tasks`` tasks read them.  The same number gives the same partitions.
    """
    columns = from_arrow_schema(schema)
    parts = tuple(dealt(files, tasks))
    read = FileReader(root, parts, format, to_arrow_schema(columns), constants or {})
    return spark.range(0, len(parts), 1, max(1, len(parts))).mapInArrow(read, columns)


def dealt(files: Sequence[tuple[str, int]], tasks: int) -> Iterator[tuple[str, ...]]:
    """Yield the files of each task: at most ``tasks`` parts of about the same size, in order."""
    total = sum(size + 1 for _, size in files)
    some: list[str] = []
    taken = part = 0
    for name, size in files:
        some.append(name)
        taken += size + 1
        if taken * tasks >= total * (part + 1):
            part = taken * tasks // total
            yield tuple(some)
            some = []
