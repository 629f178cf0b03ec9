"""Differences between Spark versions, each with the version that makes its workaround needless.

The rest of `ackcore.spark` is written for Spark 4.3.  It calls this module for behaviour that older
versions lack, and for Py4J and SparkContext, which PySpark's thin client (pyspark-client) lacks.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyspark
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sql
from pyspark.sql.pandas import types as arrow_types
from pyspark.sql.types import ArrayType, DataType, MapType, NullType, StructType

from ackcore._arrow.arrow_tables import nullable_within
from ackcore._records import Int64s

try:
    from py4j import protocol as py4j_errors  # type: ignore[import-untyped]
except ImportError:  # the thin client
    py4j_errors = None

#: The errors of Py4J, and of Java through it; without Py4J, classes that nothing raises.
Py4JError: Any = py4j_errors.Py4JError if py4j_errors else type("Py4JError", (Exception,), {})
Py4JJavaError: Any = (
    py4j_errors.Py4JJavaError if py4j_errors else type("Py4JJavaError", (Py4JError,), {})
)

#: The Spark versions on which tests in tests/spark ran; docs/limits.md lists which tests.
TESTED = ("3.5", "4.0", "4.1", "4.2", "4.3")


def read_version(text: str) -> tuple[int, int]:
    """Return the first two numbers of a Spark version.

    Raises ImportError if it is older than the oldest tested version.

    Warns
    -----
    RuntimeWarning
        If it is newer than the newest tested version.
    """
    found = re.match(r"(\d+)\.(\d+)", text)
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    oldest, newest = (tuple(map(int, one.split("."))) for one in (TESTED[0], TESTED[-1]))
    if version < oldest:
        raise ImportError(
            f"ackcore.spark needs PySpark {TESTED[0]} or newer, got {text}; upgrade PySpark"
        )
    if version > newest:
        warnings.warn(
            f"ackcore.spark was tested with PySpark {', '.join(TESTED)}, and not with {text}",
            RuntimeWarning,
            stacklevel=2,
        )
    return version


SPARK = read_version(pyspark.__version__)

#: The errors of a job that failed on its workers; before 4.0 also Py4J's own error.
JOB_ERRORS = (PySparkException,) if SPARK >= (4, 0) else (PySparkException, Py4JJavaError)

#: The name of an error about a value, in its text. Its SQLSTATE is of class 22, data exception
#: (ISO 9075); before 4.0 the text has none, and Java's class says the same.
WRONG_VALUE = re.compile(
    r"\[([A-Z][A-Z0-9_.]*)\][^\n]*SQLSTATE: 22"
    if SPARK >= (4, 0)
    else r"\.Spark(?:(?:Arithmetic|ArrayIndexOutOfBounds|DateTime|NumberFormat)Exception: |"
    r"Exception: (?=\[MALFORMED_RECORD))\[([^]]+)\]"
)

#: The plan node of `mapInArrow`; unchanged from 4.0 on.
MAP_IN_ARROW_NODE = "MapInArrow" if SPARK >= (4, 0) else "PythonMapInArrow"

#: The text by which Spark recognizes an interruption in a Python error; before 4.0, both lines.
INTERRUPTED = (
    "py4j.protocol.Py4JJavaError: An error occurred while calling us.\n"
    ": java.lang.InterruptedException"
)


def repartition_by_id(frame: DataFrame, n: int, column: str) -> DataFrame:
    """Return a frame in ``n`` partitions; ``column`` has each row's partition, 0 to n - 1."""
    if SPARK >= (4, 1):
        return frame.repartitionById(n, column)
    return repartition_by_key(frame, n, column)


def repartition_by_key(frame: DataFrame, n: int, column: str) -> DataFrame:
    """Return a frame in ``n`` partitions; ``column`` has each row's, 0 to n - 1. For before 4.1."""
    return frame.repartition(n, sql.expr(f"{_keys_sql(n)}[{column}]"))


@lru_cache(64)
def _keys_sql(n: int) -> str:
    # As SQL text: PySpark's array() would call the JVM for each number.
    return f"array({','.join(map(str, partition_keys(n).tolist()))})"


def partition_keys(n: int) -> Int64s:
    """Return, for each of n partitions, an int that Spark's hash partitioning assigns to it."""
    keys = np.full(n, -1, np.int64)
    left, first = n, 0
    while left:
        some = np.arange(first, first + max(64, 2 * n), dtype=np.int64)
        first += len(some)
        found, where = np.unique(murmur3(some) % n, return_index=True)
        new = keys[found] < 0
        keys[found[new]] = some[where[new]]
        left -= int(new.sum())
    return keys


def murmur3(keys: Int64s) -> Int64s:
    """Return Spark's hash of ints: Murmur3 for x86 with 32 bits, of four bytes, with seed 42.

    The keys and the hashes are in the range of an int.
    """
    k = keys.astype(np.uint32) * np.uint32(0xCC9E2D51)
    k = _rotated(k, 15) * np.uint32(0x1B873593)
    h = _rotated(k ^ np.uint32(42), 13) * np.uint32(5) + np.uint32(0xE6546B64)
    h ^= np.uint32(4)
    h = (h ^ h >> np.uint32(16)) * np.uint32(0x85EBCA6B)
    h = (h ^ h >> np.uint32(13)) * np.uint32(0xC2B2AE35)
    h ^= h >> np.uint32(16)
    return np.asarray(h.view(np.int32), np.int64)


def _rotated(words: Any, bits: int) -> Any:
    return words << np.uint32(bits) | words >> np.uint32(32 - bits)


def to_arrow_schema(schema: StructType) -> pa.Schema:
    """Return the Arrow schema of Spark columns, with times in UTC and all nested fields nullable.

    Spark does not keep NOT NULL of nested fields: a left join makes null structs of them.
    """
    if SPARK >= (4, 2):
        found = arrow_types.to_arrow_schema(schema, timezone="UTC")
    else:
        found = arrow_types.to_arrow_schema(schema)
    fields = [field.with_type(nullable_within(field.type)) for field in found]
    return pa.schema(fields, metadata=found.metadata)


#: Types of Spark 4.0 and 4.1 that become structs of binaries in Arrow's columns. TIME, of 4.1,
#: loses its precision: Spark cannot read the Parquet that Arrow writes of it.
_LOST = ("variant", "geometry", "geography", "time")


def lost_in_arrow(kind: DataType) -> str | None:
    """Return the name of a type, or of one inside it, that Arrow does not preserve; else None.

    A user-defined type (UDT) is treated as its storage type.
    """
    if isinstance(kind, StructType):
        inner = [field.dataType for field in kind]
    elif isinstance(kind, MapType):
        inner = [kind.keyType, kind.valueType]
    elif isinstance(kind, ArrayType):
        inner = [kind.elementType]
        if isinstance(kind.elementType, NullType):  # Arrow gets its lengths wrong
            return kind.simpleString()
    else:
        # From 4.0 on strings have a collation.
        collated = getattr(kind, "collation", "UTF8_BINARY") != "UTF8_BINARY"
        lost = collated or kind.typeName() in _LOST
        return kind.simpleString() if lost else None
    return next((lost for lost in map(lost_in_arrow, inner) if lost), None)


def from_arrow_schema(schema: pa.Schema) -> StructType:
    """Return an Arrow schema as a Spark schema. Times without a zone stay without, as from 4.2.

    Raises PySparkException if Spark has no type for a column.
    """
    return arrow_types.from_arrow_schema(schema, prefer_timestamp_ntz=True)


def to_arrow(frame: DataFrame) -> pa.Table:
    """Run a job and return its rows, by `DataFrame.toArrow` from 4.0 on."""
    if SPARK >= (4, 0):
        return frame.toArrow()
    schema = to_arrow_schema(frame.schema)
    batches = frame._collect_as_arrow()  # type: ignore[operator]
    # Before 4.0 times are in the session's zone.
    return pa.Table.from_batches(batches).cast(schema) if batches else schema.empty_table()


def results(frame: DataFrame) -> pa.Table:
    """Run a job of a classic session; return its rows, or a table without columns if it has none.

    This takes 13 fewer calls of the JVM than `toArrow`.
    """
    batches = frame._collect_as_arrow()  # type: ignore[operator]
    return pa.Table.from_batches(batches) if batches else pa.table({})


def arrow_udf(compute: Callable[..., pa.Array], returns: DataType) -> Callable[..., Column]:
    """Turn a function of Arrow arrays into one of Columns: `sql.arrow_udf` from Spark 4.1 on."""
    if SPARK >= (4, 1):
        return sql.arrow_udf(compute, returns)  # type: ignore[attr-defined, no-any-return]
    return pandas_udf(compute, returns)


def pandas_udf(compute: Callable[..., pa.Array], returns: DataType) -> Callable[..., Column]:
    """Turn a function of Arrow integers, or of lists of them, into one of Columns, by pandas."""

    def on_series(*columns: Any) -> Any:
        return compute(*map(_from_pandas, columns)).to_pandas()

    series = type(pa.array([], pa.int64()).to_pandas())
    on_series.__annotations__ = {"columns": series, "return": series}
    on_series.__name__ = compute.__name__
    return sql.pandas_udf(on_series, returns)  # type: ignore[attr-defined, no-any-return]


def _from_pandas(series: Any) -> pa.Array:
    """Return a pandas column as Arrow integers; pandas makes floats of integers with nulls."""
    column = pa.Array.from_pandas(series)
    if pa.types.is_list(column.type):
        values, kind = column.flatten(), pa.list_(pa.int64())
    else:
        values, kind = column, pa.int64()
    if pa.types.is_floating(values.type) and values.null_count:
        # Nulls are refused later, so the loss of precision does no harm.
        return column.cast(kind, safe=False)
    return column


def active_context() -> Any:
    """Return the SparkContext of this process; None if there is none, as on the thin client."""
    kind = getattr(pyspark, "SparkContext", None)
    return None if kind is None else kind._active_spark_context


def pins_threads() -> bool:
    """Return whether each Python thread has its own thread of the JVM, as it has by default.

    With ``PYSPARK_PIN_THREAD=false`` it has not, and local properties may get into other jobs.
    """
    kind = getattr(pyspark, "SparkContext", None)
    return kind is not None and type(kind._gateway).__name__ == "ClientServer"


def set_active(session: SparkSession) -> None:
    """Make a session active in this thread, so that its settings apply here.

    Spark resolves some settings, such as case sensitivity, by its *active* session.  New threads do
    not inherit it with the local properties, and would use the defaults.
    """
    jvm = session._jvm
    assert jvm is not None
    before_4 = SPARK < (4, 0)
    java = jvm.SparkSession if before_4 else SparkSession._get_j_spark_session_class(jvm)
    java.setActiveSession(session._jsparkSession)
