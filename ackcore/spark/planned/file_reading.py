"""The reading of data files by tasks."""

from __future__ import annotations

import codecs
import errno
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.errors import PySparkTypeError
from pyspark.sql import DataFrame, SparkSession

from ackcore._arrow.lossless import are_alike
from ackcore._arrow.record_batches import cast_column, is_text
from ackcore._error_hints import listed
from ackcore.spark.base.arrow_batches import Batches
from ackcore.spark.base.schemas import with_corrupt
from ackcore.spark.base.versions import from_arrow_schema, to_arrow_schema
from ackcore.spark.checkpoint.skips import shown
from ackcore.spark.planned.line_files import BLOCK_BYTES, ROWS, CsvFile, JsonLines, overflows
from ackcore.spark.stores.interface import Store
from ackcore.spark.stores.opening import is_bucket, open_store

#: The formats of `FileSpout`. Rows of the first ones have the columns of `with_corrupt`.
LINE_FORMATS = ("json", "csv")
FORMATS = ("text", *LINE_FORMATS, "parquet")
#: Suffixes of compressed files, and Arrow's names of their codecs. Parquet compresses by itself.
CODECS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4", ".br": "brotli"}
#: The first bytes of compressed content, except Brotli's. Only those of bzip2 could begin a text.
_BEGINNINGS = {
    "gzip": rb"\x1f\x8b\x08",
    "bz2": rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)",
    "zstd": rb"\(\xb5/\xfd",
    "lz4": rb"\x04\x22M\x18",
}
#: The first bytes of other content that is no text in UTF-8.
_OTHERS = {
    "xz": rb"\xfd7zXZ\x00",
    "zip": rb"PK\x03\x04",
    "compress": rb"\x1f\x9d",
    "Snappy": rb"\xff\x06\x00\x00sNaPpY",
    "UTF-16": rb"\xff\xfe|\xfe\xff",
}
#: Metadata keys of Parquet files whose old dates Spark wrote in a calendar that is Julian before
#: 1582-10-15. Spark 2 always did so: the last key is that of Spark's version.
_LEGACY = {b"org.apache.spark.legacyDateTime", b"org.apache.spark.legacyINT96"}
_VERSION = b"org.apache.spark.version"
#: The first day and the first microsecond, counted from 1970, that are equal in both calendars.
#: For times Spark takes 1900, since zones had local mean times before.
_FIRST_DAY, _FIRST_US = -141_427, -2_208_988_800_000_000
#: The longest line of text in bytes; a task holds a line in memory several times.
_LINE_BYTES = 1 << 28


class FileUnreadable(ValueError):
    """A data file is missing, damaged or of another format; the message names it."""


@dataclass(frozen=True)
class FileReader:
    """A function for ``mapInArrow``: takes task numbers, returns the rows of these tasks' files."""

    root: str  # the directory, or a bucket's URL
    tasks: tuple[tuple[str, ...], ...]  # by task, the paths of its files below ``root``
    format: str  # one of `FORMATS`
    schema: pa.Schema  # the columns to read
    #: By file, the texts of columns that have one value in the whole file.
    constants: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)

    def __call__(self, batches: Batches) -> Batches:
        """Yield the rows of each task whose number is in the input.

        Raises FileUnreadable if a file is missing, damaged or of another format. Raises OSError if
        it cannot be reached now; a repetition may help.
        """
        for batch in batches:
            for task in batch.column(0).to_pylist():
                for name in self.tasks[task]:
                    try:
                        yield from self._read(name)
                    except (MemoryError, pa.ArrowCancelled):
                        raise
                    except (pa.ArrowException, ValueError, OSError) as error:
                        said = str(error).partition("\n")[0]
                        file = f"the file {self.root}/{shown(name)}"
                        # With a number it is an error of the system, and may pass.
                        if isinstance(error, OSError) and error.errno not in (None, errno.ENOENT):
                            raise OSError(
                                error.errno, f"{file} cannot be reached: {said}"
                            ) from None
                        raise FileUnreadable(
                            f"{file} cannot be read as {self.format}: "
                            f"{type(error).__name__}: {said}"
                        ) from None

    def _read(self, name: str) -> Iterator[pa.RecordBatch]:
        source = self._opened(name)
        constants = self.constants.get(name, {})
        if self.format == "parquet":
            import pyarrow.parquet as pq  # noqa: PLC0415 - loaded where it is needed

            # Spark writes times as INT96, which overflow as nanoseconds.
            with pq.ParquetFile(source, coerce_int96_timestamp_unit="us") as file:
                columns = file.schema_arrow
                there = self._columns_in(columns.names)
                self._check_path(name, columns.names.__contains__)
                for other in _in_other_case(pa.struct(list(self.schema)), pa.struct(list(columns))):
                    raise ValueError(
                        f"the file has the column {other}, whose name in the schema has another "
                        "case; correct the schema, or rename the column in the file"
                    )
                about = file.metadata.metadata or {}
                is_julian = _LEGACY & {*about} or about.get(_VERSION, b"").startswith(b"2.")
                if _VERSION not in about:  # Spark has no nanoseconds
                    _refuse_cut_times(source, file, there)
                for batch in file.iter_batches(ROWS, columns=there):
                    if is_julian:
                        _refuse_ancient(batch)
                    yield self._fitted(batch, constants)
            return
        codec = CODECS.get(os.path.splitext(name)[1].lower())
        if codec is None:  # a store may have compressed content under any name
            start = source.read(10)
            source.seek(0)
            codec = _kind_of(start, _BEGINNINGS)
            if (foreign := _kind_of(start, _OTHERS)) is not None:
                raise ValueError(
                    f"it is {foreign}, and text files must be UTF-8, perhaps compressed by gzip, "
                    "bzip2, zstd, LZ4 or Brotli; convert the file"
                )
        stream: Any = source if codec is None else pa.CompressedInputStream(source, codec)
        with stream:
            if self.format == "text":
                yield from self._lines(stream)
                return
            content = pa.py_buffer(stream.read())
        if not content.size:
            return
        of = content, shown(name), self.schema, partial(self._fitted, constants=constants)
        if self.format == "json":
            key = '"{}"'.format
            self._check_path(name, lambda one: re.search(re.escape(key(one).encode()), content))
            yield from JsonLines(*of).rows()
            return
        file = CsvFile(*of)
        self._columns_in(file.names)
        self._check_path(name, file.names.__contains__)
        self._check_header(file.names)
        yield from file.rows()

    def _columns_in(self, names: Sequence[str]) -> list[str]:
        """Return the columns of the schema that are among the ``names`` in a file.

        Raises ValueError if there are none, or one is in the file several times.
        """
        found = [name for name in self.schema.names if name in names]
        if not found:
            raise ValueError(
                f"the file has none of the columns {listed(self.schema.names)}, but "
                f"{listed(names)}; correct the schema"
            )
        for name in found:
            if names.count(name) > 1:
                raise ValueError(
                    f"the file has the column {name} {names.count(name)} times; rename all but one"
                )
        return found

    def _check_path(self, file: str, has: Callable[[str], object]) -> None:
        """Raise ValueError if a file lacks a column of the schema whose value is in its path.

        Such a path is ``day=7/x.json``; columns with `constants` are not checked. ``has``: returns
        whether the file has a column.
        """
        for part in file.split("/")[:-1]:
            column, equals, _ = part.partition("=")
            is_known = column not in self.schema.names or column in self.constants.get(file, ())
            if equals and not is_known and not has(column):
                raise ValueError(
                    f"the file has no column {column}, and values in paths ({part}) are not read. "
                    "Leave the column out of the schema, or read the directory with Spark, as a "
                    "streaming DataFrame"
                )

    def _check_header(self, names: Sequence[str]) -> None:
        """Raise ValueError if a CSV header lacks a column that must not be null or may be misnamed.

        A missing column may be misnamed if the header has a column that the schema lacks.
        """
        lacks = [one for one in self.schema if one.name not in names]
        others = [name for name in names if name not in self.schema.names]
        needs = [one.name for one in lacks if not one.nullable]
        add = "add the others to the schema"
        if needs or (lacks and others):
            raise ValueError(
                f"the header has no column {listed(needs or [one.name for one in lacks])}, but "
                f"{listed(others or names)}; if it lacks the column on purpose, "
                + " and ".join(["declare it nullable"] * bool(needs) + [add] * bool(others))
            )

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
        rest, mark = b"", codecs.BOM_UTF8
        while piece := stream.read(BLOCK_BYTES):
            *lines, rest = (rest + piece.removeprefix(mark)).split(b"\n")
            mark = b""
            yield from self._of_lines(lines)
            if len(rest) > _LINE_BYTES:
                raise ValueError(
                    f"the file has a line of more than {_LINE_BYTES} bytes, the most that a task "
                    "reads; divide the line"
                )
        if rest:
            yield from self._of_lines([rest])

    def _of_lines(self, lines: list[bytes]) -> Iterator[pa.RecordBatch]:
        for at in range(0, len(lines), ROWS):
            some = [line.removesuffix(b"\r") for line in lines[at : at + ROWS]]
            # Without a check: the bytes of a line that is not UTF-8 reach its dead letter.
            column = pa.array(some, pa.binary()).view(pa.string())
            yield pa.RecordBatch.from_arrays([column], schema=self.schema)

    def _fitted(self, batch: pa.RecordBatch, constants: Mapping[str, str | None]) -> pa.RecordBatch:
        """Return the columns of the schema: those of the file, its constants, or nulls.

        Raises ValueError for a value that the type of its column, or its nullability, refuses.
        """
        names = set(batch.schema.names)
        columns = [
            self._cast(batch.column(one.name), one)
            if one.name in names
            else pa.nulls(len(batch), one.type)
            if (text := constants.get(one.name)) is None
            else pa.repeat(pa.scalar(text), len(batch)).cast(one.type)
            for one in self.schema
        ]
        for one, column in zip(self.schema, columns, strict=True):
            if column.null_count and not one.nullable:
                raise ValueError(
                    f"column {one.name} is missing or null, and its schema allows no nulls; "
                    "correct the data, or declare it nullable"
                )
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _cast(self, column: pa.Array, field: pa.Field) -> pa.Array:
        """Return a column in the type of a field. Raises ValueError if that changes a value.

        Texts, and numbers of JSON, may be rounded.
        """
        if column.type == field.type:
            return column
        is_parsed, said = self.format != "parquet", "values would be changed"
        try:
            found = cast_column(column, field.type)
            if not any(_is_changed(*pair, is_parsed) for pair in _leaves(column, found)):
                return found
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
            if is_parsed:
                raise
            said = str(error).partition("\n")[0].rstrip(".")
        if is_parsed:
            raise ValueError(f"column {field.name} has a number too large for {field.type}")
        # Spark has no nanoseconds.
        fits = "string" if pa.types.is_timestamp(column.type) and column.type.unit == "ns" else None
        raise ValueError(
            f"column {field.name} is {column.type} in the file, and its values do not fit the "
            f"schema's {field.type}: {said}. Declare it as {fits or column.type}, and convert it "
            "in a bolt"
        )


def _kind_of(start: bytes, kinds: Mapping[str, bytes]) -> str | None:
    """Return the first of some kinds of content that begins so, or None. ``kinds``: patterns."""
    return next((kind for kind, begins in kinds.items() if re.match(begins, start)), None)


def _in_other_case(wanted: pa.DataType, has: pa.DataType, within: str = "") -> Iterator[str]:
    """Yield the fields of ``has`` whose names differ from those of ``wanted`` only in case.

    At any depth of structs, lists and maps; by dotted name below ``within``.
    """
    if pa.types.is_struct(wanted) and pa.types.is_struct(has):
        for field in wanted:
            at = has.get_field_index(field.name)
            if at >= 0:
                yield from _in_other_case(field.type, has[at].type, f"{within}{field.name}.")
            else:
                lower = field.name.lower()
                yield from (f"{within}{one.name}" for one in has if one.name.lower() == lower)
    elif wanted.num_fields == has.num_fields:
        for at in range(wanted.num_fields):
            yield from _in_other_case(wanted.field(at).type, has.field(at).type, within)


def _refuse_cut_times(source: Any, file: Any, names: Sequence[str]) -> None:
    """Raise ValueError if INT96 columns of a Parquet file have parts of microseconds.

    ``file``: the file, opened to read INT96 as microseconds. ``names``: the columns to check.
    """
    if all(file.schema.column(at).physical_type != "INT96" for at in range(len(file.schema))):
        return
    import pyarrow.parquet as pq  # noqa: PLC0415 - loaded where it is needed

    with pq.ParquetFile(source, coerce_int96_timestamp_unit="ns") as whole:
        kinds = [[one.schema_arrow.field(name).type for name in names] for one in (file, whole)]
        old = [name for name, cut, not_cut in zip(names, *kinds, strict=True) if cut != not_cut]
        both = (one.iter_batches(ROWS, columns=old) for one in (file, whole) if old)
        for cut, not_cut in zip(*both, strict=True):
            for name in old:
                for us, ns in _leaves(cut[name], not_cut[name]):
                    if us.type == ns.type:
                        continue
                    # Nanoseconds of most years overflow, and so does the product.
                    numbers = pc.multiply(us.view(pa.int64()), 1000)
                    if pc.any(pc.not_equal(numbers, ns.view(pa.int64()))).as_py():
                        raise ValueError(
                            f"column {name} has times with nanoseconds (INT96), which Spark does "
                            "not have. Rewrite the file with microseconds, or with texts in their "
                            "place"
                        )


def _refuse_ancient(batch: pa.RecordBatch) -> None:
    """Raise ValueError for a date or time that means another one in Spark's old calendar."""
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if _is_ancient(column):
            raise ValueError(
                f"column {name} has a date before 1582-10-15 or a time before 1900, which Spark "
                "wrote in the calendar of its mode LEGACY. Rewrite the file with Spark 3 or later, "
                "with spark.sql.parquet.datetimeRebaseModeInWrite and "
                "spark.sql.parquet.int96RebaseModeInWrite set to CORRECTED"
            )


def _is_ancient(column: pa.Array) -> bool:
    for leaf, _ in _leaves(column, column):
        if pa.types.is_date32(leaf.type):
            numbers, first = leaf.view(pa.int32()), _FIRST_DAY
        elif pa.types.is_timestamp(leaf.type):
            numbers, first = leaf.cast(pa.timestamp("us")).view(pa.int64()), _FIRST_US
        else:
            continue
        if pc.any(pc.less(numbers, first)).as_py():
            return True
    return False


def _is_changed(was: pa.Array, now: pa.Array, is_parsed: bool) -> bool:
    """Return whether a cast column without fields has other values, or was cast from or to times.

    Texts, and numbers of JSON (``is_parsed``), may be rounded, but not to infinity.
    """
    kind = pa.types
    if was.type == now.type:
        return False
    if is_parsed or is_text(was.type):
        return overflows(was, now)
    # Arrow cannot parse the text of all types, and its older versions compare no half floats.
    if is_text(now.type) or (kind.is_float16(was.type) and kind.is_floating(now.type)):
        return False
    if kind.is_temporal(was.type) != kind.is_temporal(now.type):
        return True
    return not are_alike(was, now.cast(was.type))


def _leaves(was: pa.Array, now: pa.Array) -> Iterator[tuple[pa.Array, pa.Array]]:
    """Yield the columns without fields in a column, and the same ones after its cast."""
    kind = now.type
    if pa.types.is_null(was.type):
        return
    if pa.types.is_struct(kind):
        old, new = was.flatten(), now.flatten()
        for place, field in enumerate(kind):
            at = was.type.get_field_index(field.name)
            if at >= 0:  # else it is null
                yield from _leaves(old[at], new[place])
    elif pa.types.is_map(kind):
        pairs = [
            one.cast(pa.list_(pa.struct([one.type.key_field, one.type.item_field])))
            for one in (was, now)
        ]
        yield from _leaves(*pairs)
    elif kind.num_fields:
        yield from _leaves(was.flatten(), now.flatten())
    else:
        yield was, now


def check_types(format: str, schema: pa.Schema) -> None:
    """Raise ValueError if Spark, or a format of lines, does not have the types of a schema."""
    try:
        own = to_arrow_schema(from_arrow_schema(schema))
        names = ('"' + name.replace('"', '""') + '"' for name in own.names)
        rows = "{}\n" if format == "json" else ",".join(names) + "\n" + ",".join(['""'] * len(own))
        of = pa.py_buffer(rows.encode()), "", own, lambda batch: batch
        for _ in (JsonLines if format == "json" else CsvFile)(*of).rows():
            pass
    except (PySparkTypeError, NotImplementedError) as error:
        raise ValueError(
            f"schema must have types that Spark and {format} files have: {str(error).rstrip('.')}. "
            "Read such values as text, and convert them in a bolt"
        ) from None


def read_files(
    spark: SparkSession,
    root: str,
    files: Sequence[tuple[str, int]],
    format: str,
    schema: pa.Schema,
    tasks: int,
    constants: Mapping[str, Mapping[str, str | None]] | None = None,
) -> DataFrame:
    """Return a DataFrame of the rows of files, given by path below ``root`` and size in bytes.

    At most ``tasks`` tasks read them.  The same number gives the same partitions.  Rows of JSON and
    CSV also have the columns for corrupt lines (`with_corrupt`).  ``constants``: by file, the texts
    of columns with one value in the whole file.
    """
    own = to_arrow_schema(from_arrow_schema(schema))
    parts = tuple(dealt(files, tasks))
    read = FileReader(root, parts, format, own, constants or {})
    columns = from_arrow_schema(with_corrupt(own) if format in LINE_FORMATS else own)
    return spark.range(0, len(parts), 1, max(1, len(parts))).mapInArrow(read, columns)


def dealt(files: Sequence[tuple[str, int]], tasks: int) -> Iterator[tuple[str, ...]]:
    """Cut the files, in order, into at most ``tasks`` parts of about the same size in bytes."""
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
