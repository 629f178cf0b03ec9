"""What is refused before any job runs: sessions that were stopped, and those of Spark Connect."""

from __future__ import annotations

from typing import Any

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark import SparkContext
from pyspark.sql import DataFrame, SparkSession


def is_connect(value: Any) -> bool:
    """Whether a session or a DataFrame is Spark Connect's."""
    return type(value).__module__.startswith("pyspark.sql.connect")


def refuse_frame(frame: Any, name: str) -> None:
    """Raise if an argument is not a DataFrame of Spark's classic engine."""
    if is_connect(frame):
        raise TypeError(
            f"{name} is a DataFrame of Spark Connect, which shows no plan and no cluster; "
            "use a classic session (SparkSession.builder.master(...))"
        )
    if not isinstance(frame, DataFrame):
        raise TypeError(
            f"{name} must be a pyspark DataFrame, got {type(frame).__name__}; "
            "spark.createDataFrame() makes one"
        )
    _refuse_stopped(frame.sparkSession, f"{name} is a DataFrame of a session")


def refuse_session(spark: Any) -> None:
    """Raise if an argument is not a classic SparkSession."""
    if is_connect(spark):
        raise TypeError(
            "spark is a session of Spark Connect, which shows no cluster; "
            "use a classic one (SparkSession.builder.master(...))"
        )
    if not isinstance(spark, SparkSession):
        raise TypeError(
            f"spark must be a SparkSession, got {type(spark).__name__}; "
            "SparkSession.builder.getOrCreate() gives one"
        )
    _refuse_stopped(spark, "spark is a session")


def _refuse_stopped(spark: SparkSession, what: str) -> None:
    """Raise if a session was stopped, or its JVM has ended."""
    java: Any = spark.sparkContext._jsc
    try:
        if java is not None and not java.sc().isStopped():
            return
    except (Py4JError, OSError):
        pass  # its JVM has ended
    raise ValueError(
        f"{what} that was stopped; SparkSession.builder.getOrCreate() makes another, and what is "
        "read with it has to be read anew"
    )


def refuse_no_session() -> None:
    """Raise if there is no session, without which there are no Columns."""
    active = SparkContext._active_spark_context
    if active is None or active._jsc is None:
        raise ValueError(
            "there must be a SparkSession where Columns are made, and there is none, or it was "
            "stopped; SparkSession.builder.getOrCreate() makes one"
        )
