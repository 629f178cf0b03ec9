"""Settle the ack log of another system: which messages finished, failed, or are still open.

Any system that folds acks by XOR, as Storm does, can log the messages to its acker.  Here is such a
log as CSV, with the ids in hex as in Java's ``Long.toHexString``::

    at,what,root,val,task,why
    2024-05-01T10:00:00.000Z,init,8f1c1a0b,77aa01,3,
    2024-05-01T10:00:00.120Z,ack,8f1c1a0b,77aa01,,
    2024-05-01T10:00:01.500Z,fail,9d00,,,Connection refused

`events` converts it to the columns of `ackcore.spark.settle`, and one call settles the table, of
ten rows or a billion.  The state is written with the open messages, and the next day's call starts
from it.

    python -m ackcore.examples.settle_table monday.csv --state monday/
    python -m ackcore.examples.settle_table tuesday.csv --before monday/ --state tuesday/
    python -m ackcore.examples.settle_table log.parquet --timeout 3600
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sql

from ackcore.examples.quiet_spark import check_java, spark_session
from ackcore.spark import settle
from ackcore.spark.base.errors import one_line

try:
    import typer
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text
except ImportError as error:
    raise ImportError("this example needs more: pip install 'ackcore[cli,spark]'") from error

_LOG = "at timestamp, what string, root string, val string, task int, why string"


def read_log(spark: SparkSession, path: str) -> DataFrame:
    """Read a log from CSV with a header, or from Parquet."""
    if path.endswith(".parquet"):
        return spark.read.schema(_LOG).parquet(path)
    # An invalid line must raise, and not become nulls, which belong to no root.
    return spark.read.schema(_LOG).option("header", True).option("mode", "FAILFAST").csv(path)


def events(log: DataFrame) -> DataFrame:
    """Return a log in the columns of `ackcore.spark.settle`.

    A task >= 0 is an INIT by that task, -1 an ACK, -2 a FAIL.  Ids have 64 bits, which Spark reads
    as signed: hex numbers above ``7fff...`` become negative, as in Java.
    """
    what = sql.col("what")
    task = (
        sql.when(what == "init", sql.col("task"))
        .when(what == "ack", sql.lit(-1))
        .when(what == "fail", sql.lit(-2))
        .otherwise(sql.raise_error(sql.concat(sql.lit("unknown kind of event: "), what)))
    )
    return log.select(
        _bits("root").alias("root_id"),
        # The value of a FAIL is ignored, but must not be null.
        sql.coalesce(_bits("val"), sql.lit(0)).cast("bigint").alias("val"),
        task.cast("int").alias("task"),
        sql.unix_millis("at").alias("ts_ms"),
        sql.when(what == "fail", sql.col("why")).alias("reason"),
    )


def _bits(column: str) -> Column:
    return sql.conv(sql.col(column), 16, -10).cast("bigint")


def settle_log(
    log: DataFrame,
    *,
    before: DataFrame | None = None,
    now_ms: int | None = None,
    timeout_s: float | None = None,
) -> DataFrame:
    """Return the outcome of each message of a log, with its root in hex.

    Parameters
    ----------
    log : DataFrame
        A log from `read_log`.
    before : DataFrame, optional
        The result for the log before this one, whose open messages are continued.
    now_ms : int, optional
        The time in milliseconds since 1970; by default that of the newest event, so that the result
        does not depend on the time of the call.
    timeout_s : float, optional
        The time in seconds after the last event of a message after which it is EXPIRED.
    """
    rows = events(log)
    if now_ms is None and timeout_s is not None:
        ((now_ms,),) = rows.agg(sql.max("ts_ms")).collect()
    settled = settle(
        rows,
        open_before=before,
        now_ms=now_ms,
        timeout_s=timeout_s,
    )
    return settled.withColumn("root", sql.lower(sql.hex("root_id")))


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def main(
    path: Annotated[str, typer.Argument(help="The log: CSV with a header, or Parquet.")],
    before: Annotated[
        Path | None, typer.Option(help="What --state wrote for the log before this one.")
    ] = None,
    state: Annotated[
        Path | None, typer.Option(help="Where to write all outcomes, open ones too.")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(min=0, help="Seconds after which a message is EXPIRED.")
    ] = None,
    master: Annotated[str, typer.Option(help="Where Spark runs.")] = "local[2]",
) -> None:
    """Settle an ack log, and print the outcomes of its messages."""
    console = Console()
    try:
        check_java()
        with spark_session(master) as (spark, _):
            earlier = None
            if before is not None:
                earlier = spark.read.parquet(str(before)).drop("root")
            outcomes = settle_log(read_log(spark, path), before=earlier, timeout_s=timeout)
            # Two actions follow, and each would settle again.
            outcomes = outcomes.persist()
            if state is not None:
                outcomes.write.parquet(str(state))
            counts = outcomes.groupBy("status", "reason").count().orderBy("status", "reason")
            found = counts.collect()
    except Exception as error:
        said = re.sub(r"^\[[A-Z_.]+\] ", "", one_line(error))
        console.print(Text(f"the log was not settled: {said}"), soft_wrap=True)
        raise typer.Exit(1) from error
    table = Table("status", "reason", "messages", box=None)
    for row in found:
        table.add_row(row["status"], Text(row["reason"] or ""), f"{row['count']:,}")
    console.print(table)


if __name__ == "__main__":
    app()
