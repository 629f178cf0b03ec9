"""Sessions of visitors: clicks that follow each other within half an hour.

    clicks ─► visit ─► table of sessions by user ─► sink of closed sessions

Clicks arrive out of order.  A late click may join two sessions to one.  A session is written once,
when no click can join it any more.

    python -m ackcore.examples.click_sessions
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from ackcore.examples.quiet_spark import spark_session
from ackcore.spark import run_batch, to_parquet
from ackcore.tables import count, first, latest, session
from ackcore.topology import BasicBolt, BasicCollector, Topology, TopologyBuilder, Tuple

GAP_S = 1800
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
#: The user, the minute, and the page of each click, in the order of arrival.
CLICKS = (
    ("ann", 0, "home"),
    ("bob", 5, "home"),
    ("ann", 50, "cart"),
    ("ann", 25, "shoes"),
    ("bob", 120, "help"),
    ("ann", 60, "paid"),
    ("", 70, "home"),
    ("bob", 125, "home"),
)


class Visit(BasicBolt):
    """A bolt that checks clicks: those without a user are dead letters."""

    outputs = pa.schema(
        [("user", pa.string()), ("at", pa.timestamp("us", tz="UTC")), ("page", pa.string())]
    )

    def execute(self, tuple: Tuple, collector: BasicCollector) -> None:
        """Check one click; the first attempt at the shoes fails."""
        if not tuple["user"]:
            raise ValueError("a click without a user")
        if tuple["page"] == "shoes" and tuple.attempt == 0:
            raise TimeoutError("a simulated time-out, at the first attempt only")
        collector.emit((tuple["user"], tuple["at"], tuple["page"]))


def build(spark: SparkSession, clicks: Sequence[tuple[str, int, str]], path: str) -> Topology:
    """Return the topology, for clicks and a directory for its sink."""
    rows = [(user, BEGIN + timedelta(minutes=minute), page) for user, minute, page in clicks]
    frame = spark.createDataFrame(rows, "user string, at timestamp, page string")
    builder = TopologyBuilder()
    builder.spout("clicks", frame)
    builder.bolt("visit", Visit()).shuffle("clicks")
    builder.table(
        "sessions",
        from_="visit",
        key="user",
        value={"clicks": count(), "from": first("at", "page"), "to": latest("at", "page")},
        window=session(GAP_S, "at"),
    )
    builder.sink("sessions.closed", to_parquet(path))
    return builder.build(max_attempts=2, backoff_s=0.1)


def main() -> None:
    """Run the example on two cores, and print the sessions."""
    with spark_session("local[2]") as (spark, directory):
        path = Path(directory, "sessions")
        topology = build(spark, CLICKS, str(path))
        print(topology.explain())
        counts = run_batch(topology, spark, Path(directory, "checkpoint"))
        files = path.glob("batch_id=*/*.parquet")
        rows = [row for file in files for row in pq.ParquetFile(file).read().to_pylist()]
    print(f"{counts.records} clicks: {counts.acked} acked, {counts.dead} dead")
    for row in sorted(rows, key=lambda row: (row["user"], row["window_start"])):
        start, end = f"{row['window_start']:%H:%M}", f"{row['window_end']:%H:%M}"
        print(f"  {row['user']} {start}-{end}: {row['clicks']} from {row['from']} to {row['to']}")


if __name__ == "__main__":
    main()
