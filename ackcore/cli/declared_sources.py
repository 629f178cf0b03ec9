"""A stand-in session that reads nothing, to find the columns of a topology's sources without a JVM.

`ackcore explain` needs only the names of a source's columns. If the code declares them (a schema, a
format with fixed columns, a selection by name), this session knows them as Spark would. If only
Spark can tell, it raises `NotKnownHere`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

#: Formats whose columns are fixed.
_FORMATS: Mapping[str, tuple[str, ...]] = {
    "kafka": ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType"),
    "rate": ("timestamp", "value"),
    "rate-micro-batch": ("timestamp", "value"),
    "socket": ("value",),
    "text": ("value",),
}
#: What leaves a frame's columns as they are.
_SAME = {
    "alias",
    "cache",
    "checkpoint",
    "coalesce",
    "distinct",
    "dropDuplicates",
    "dropDuplicatesWithinWatermark",
    "dropna",
    "exceptAll",
    "fillna",
    "filter",
    "hint",
    "intersect",
    "limit",
    "localCheckpoint",
    "orderBy",
    "persist",
    "repartition",
    "repartitionByRange",
    "sample",
    "sort",
    "sortWithinPartitions",
    "subtract",
    "union",
    "unionAll",
    "unionByName",
    "unpersist",
    "where",
    "withWatermark",
}
_NAME = r"(?:`(?P<quoted>[^`]+)`|(?P<plain>[A-Za-z_]\w*))"
_PLAIN = re.compile(_NAME)
_ALIASED = re.compile(rf".*\s+as\s+{_NAME}", re.IGNORECASE | re.DOTALL)
_DECLARED = re.compile(rf"\s*{_NAME}\s*[:\s].*", re.DOTALL)


class NotKnownHere(Exception):
    """Only Spark can tell the columns of a source."""


class Session:
    """A stand-in for the SparkSession that a topology's function receives."""

    @property
    def read(self) -> DeclaredReader:
        """A reader of bounded sources."""
        return DeclaredReader(streaming=False)

    @property
    def readStream(self) -> DeclaredReader:
        """A reader of streams."""
        return DeclaredReader(streaming=True)

    def createDataFrame(self, data: Any, schema: Any = None, *_: Any, **__: Any) -> Frame:
        """Return a frame of rows. Only the names of their columns are read."""
        return Frame(_columns_of(schema) if schema is not None else _columns_of_rows(data))

    def range(self, *_: Any, **__: Any) -> Frame:
        """Return a frame of numbers."""
        return Frame(("id",))

    def __getattr__(self, name: str) -> NoReturn:
        raise NotKnownHere(f"spark.{name}")


class DeclaredReader:
    """A stand-in for a DataFrameReader or DataStreamReader.

    Parameters
    ----------
    streaming : bool
        Whether it reads streams.
    """

    def __init__(self, streaming: bool):
        self._streaming = streaming
        self._format: str | None = None
        self._columns: tuple[str, ...] | None = None
        self._headers = False

    def format(self, source: str) -> DeclaredReader:
        """Set the format."""
        self._format = source.lower()
        return self

    def schema(self, schema: Any) -> DeclaredReader:
        """Set the columns."""
        self._columns = _columns_of(schema)
        return self

    def option(self, key: str, value: Any) -> DeclaredReader:
        """Set an option."""
        if key.lower() == "includeheaders":
            self._headers = str(value).lower() == "true"
        return self

    def options(self, **options: Any) -> DeclaredReader:
        """Set options."""
        for key, value in options.items():
            self.option(key, value)
        return self

    def load(
        self, path: Any = None, format: str | None = None, schema: Any = None, **options: Any
    ) -> Frame:
        """Return the frame."""
        self.options(**options)
        if schema is not None:
            self.schema(schema)
        if format is not None:
            self.format(format)
        columns = self._columns or _FORMATS.get(self._format or "")
        if columns is None:
            raise NotKnownHere(f"a source of format {self._format} without a schema")
        headers = ["headers"] if self._headers and self._format == "kafka" else []
        return Frame([*columns, *headers], self._streaming)

    def __getattr__(self, name: str) -> Callable[..., Frame]:
        if name not in ("csv", "json", "orc", "parquet", "text", "xml"):
            raise NotKnownHere(f"spark.read{'Stream' if self._streaming else ''}.{name}")

        def load(*paths: Any, schema: Any = None, **options: Any) -> Frame:
            if schema is None and name in ("csv", "json", "xml"):
                schema = next((each for each in paths[1:2] if each is not None), None)
            return self.format(name).load(schema=schema, **options)

        return load


class Frame:
    """A stand-in for a DataFrame with known column names.

    Parameters
    ----------
    columns : tuple of str
        The names of the columns.
    streaming : bool, default False
        Whether it is a stream.
    """

    def __init__(self, columns: Iterable[str], streaming: bool = False):
        self.columns = list(columns)
        self.isStreaming = streaming

    def _of(self, columns: Iterable[str]) -> Frame:
        return Frame(columns, self.isStreaming)

    def select(self, *columns: Any) -> Frame:
        """Select columns by their names."""
        names = columns[0] if len(columns) == 1 and isinstance(columns[0], list) else columns
        return self._of(name for each in names for name in self._selected(each, _PLAIN))

    def selectExpr(self, *expressions: Any) -> Frame:
        """Select columns, and named expressions."""
        return self._of(name for each in expressions for name in self._selected(each, _ALIASED))

    def _selected(self, what: Any, pattern: re.Pattern[str]) -> list[str]:
        if what == "*":
            return self.columns
        found = isinstance(what, str) and (_PLAIN.fullmatch(what) or pattern.fullmatch(what))
        if not found:
            raise NotKnownHere(f"the column {what!r}")
        return [_named(found)]

    def withColumn(self, name: str, column: Any) -> Frame:
        """Add a column."""
        return self._of([*self.columns, *([] if name in self.columns else [name])])

    def withColumnRenamed(self, old: str, new: str) -> Frame:
        """Rename a column."""
        return self._of(new if each == old else each for each in self.columns)

    def drop(self, *columns: Any) -> Frame:
        """Remove columns."""
        if not all(isinstance(each, str) for each in columns):
            raise NotKnownHere("drop of what is no name")
        return self._of(each for each in self.columns if each not in columns)

    def toDF(self, *columns: str) -> Frame:
        """Rename all columns."""
        return self._of(columns)

    def __getattr__(self, name: str) -> Callable[..., Frame]:
        if name not in _SAME:
            raise NotKnownHere(f"DataFrame.{name}")
        return lambda *_, **__: self


def _named(found: re.Match[str]) -> str:
    return found["quoted"] or found["plain"]


def _columns_of(schema: Any) -> tuple[str, ...]:
    """Return the names in a schema: a DDL string, names, or a StructType."""
    names = getattr(schema, "names", None)
    if names is not None:
        return tuple(names)
    if isinstance(schema, Sequence) and not isinstance(schema, str):
        return tuple(map(str, schema))
    found = [_DECLARED.fullmatch(each) for each in _parts(str(schema))]
    if not all(found):
        raise NotKnownHere(f"the schema {schema!r}")
    return tuple(_named(each) for each in found if each)


def _parts(schema: str) -> list[str]:
    """Split a DDL string at the commas that are not inside a type."""
    text = re.sub(r"^\s*struct\s*<(.*)>\s*$", r"\1", schema, flags=re.IGNORECASE | re.DOTALL)
    parts, depth = [""], 0
    for each in text:
        depth += (each in "<(") - (each in ">)")
        if each == "," and not depth:
            parts.append("")
        else:
            parts[-1] += each
    return parts


def _columns_of_rows(data: Any) -> tuple[str, ...]:
    """Return the column names of rows, or of a table of pandas or Arrow."""
    for name in ("column_names", "columns"):
        names = getattr(data, name, None)
        if names is not None:
            return tuple(map(str, names))
    first = next(iter(data), None)
    for name in ("__fields__", "_fields", "keys"):
        names = getattr(first, name, None)
        if names is not None:
            return tuple(names() if callable(names) else names)
    raise NotKnownHere("createDataFrame of rows without a schema")
