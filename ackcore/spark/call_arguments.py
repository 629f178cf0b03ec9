"""Checks of the arguments of `attempt` and `guard`, before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql.types import ArrayType, MapType, StructField, StructType

from ackcore import _columns
from ackcore.flow import DelayTarget, Limit
from ackcore.spark.base.errors import one_line
from ackcore.spark.base.session import task_slots
from ackcore.spark.base.versions import from_arrow_schema
from ackcore.spark.checks import arrow_schema, is_case_sensitive
from ackcore.topology.functions import Kind

_FORMS = "a schema: 'label string, score double', a StructType or a pyarrow.Schema"


def read_outputs(outputs: Any, frame: DataFrame) -> tuple[StructType, pa.Schema]:
    """Return the output columns of a function as a Spark schema and as an Arrow schema.

    Raises
    ------
    TypeError, ValueError
        If they are not columns that Spark accepts from Python.
    """
    if isinstance(outputs, StructType):
        columns = outputs
    elif isinstance(outputs, pa.Schema):
        columns = _from_arrow(outputs)
    elif isinstance(outputs, str):
        columns = _from_ddl(outputs, frame)
    else:
        raise TypeError(f"outputs must be {_FORMS}, got {type(outputs).__name__} {outputs!r}")
    if not columns.fields:
        raise ValueError(f"outputs must have a column at least, got none; give {_FORMS}")
    return _nullable_within(columns), arrow_schema(columns, "outputs")


def _nullable_within(kind: Any) -> Any:
    """Return a Spark type with all nested types nullable, like `ackcore._arrow.nullable_within`.

    If a type is declared not nullable, Spark reads a null as 0.
    """
    if isinstance(kind, StructType):
        return StructType(
            [
                StructField(field.name, _nullable_within(field.dataType), True, field.metadata)
                for field in kind
            ]
        )
    if isinstance(kind, ArrayType):
        return ArrayType(_nullable_within(kind.elementType))
    if isinstance(kind, MapType):
        return MapType(_nullable_within(kind.keyType), _nullable_within(kind.valueType))
    return kind


def _from_arrow(outputs: pa.Schema) -> StructType:
    for field in outputs:
        try:
            from_arrow_schema(pa.schema([field]))
        except PySparkException as error:
            raise TypeError(
                f"outputs has a column {field.name!r} of {field.type}, for which Spark has no type "
                f"({one_line(error)}); declare another, to which the answers are cast"
            ) from None
    return from_arrow_schema(outputs)


def _from_ddl(outputs: str, frame: DataFrame) -> StructType:
    try:
        # This call uses the DDL parser of the JVM or of Spark Connect.
        columns: StructType = frame.sparkSession.createDataFrame([], outputs).schema
    except (PySparkException, ValueError) as error:
        raise ValueError(f"outputs must be {_FORMS}, got {outputs!r}: {one_line(error)}") from None
    # Spark reads a type without a name as a column of this name.
    if columns.names == ["value"] and "value" not in outputs.lower():
        raise ValueError(
            f"outputs must name its columns, got {outputs!r}; give 'answer {outputs.strip()}'"
        )
    return columns


def check_names(frame: DataFrame, columns: StructType, added: Sequence[str] = ()) -> None:
    """Refuse columns if two of them have the same name in this session.

    Parameters
    ----------
    frame : DataFrame
        The frame, whose columns are kept.
    columns : StructType
        The outputs.
    added : sequence of str, default ()
        The names of columns that ackcore adds.

    Raises
    ------
    ValueError
        If two names are equal; the message has both.
    """
    sensitive = is_case_sensitive(frame.sparkSession)
    taken: dict[str, tuple[str, str]] = {}
    for whose, names in (
        ("frame", frame.columns),
        ("outputs", columns.names),
        ("the result", added),
    ):
        for name in names:
            key = name if sensitive else name.lower()
            if key in taken:
                other, first = taken[key]
                alike = "" if name == other else "; in this session case does not tell them apart"
                raise ValueError(
                    f"columns must have names of their own, got {other!r} of {first} and {name!r} "
                    f"of {whose}{alike}; rename that of {first}"
                )
            taken[key] = (name, whose)


def read_concurrency(
    kind: Kind, given: int | Callable[[], Limit] | None
) -> int | Callable[[], Limit]:
    """Return the number of calls that a task makes at once, or a callable that returns a `Limit`.

    By default only an async function is called several times at once: few other functions are
    thread-safe.

    Raises
    ------
    ValueError
        If a function of batches is to be called several times at once.
    """
    if kind is Kind.BATCH and given not in (None, 1):
        raise ValueError(
            "max_concurrency must be left out for a function of batches, which is called with one "
            f"at a time, got {given!r}; an async function of a row has many calls at once"
        )
    if given is None:
        return DelayTarget if kind is Kind.ASYNC else 1
    return given


def share_of_rate(frame: DataFrame, rate_per_s: float | None, tasks: int | None) -> float | None:
    """Return the rate of one task: the total rate divided by the number of concurrent tasks.

    Raises
    ------
    TypeError, ValueError
        If `tasks` is not a positive number, or is given without a rate.
    """
    if tasks is not None:
        tasks = _columns.as_count(tasks, "tasks", 1)
    if rate_per_s is None:
        if tasks is not None:
            raise ValueError(
                f"tasks must be left out without rate_per_s, which it divides, got {tasks}"
            )
        return None
    if tasks is None:
        tasks = task_slots(frame.sparkSession)
    return rate_per_s / tasks
