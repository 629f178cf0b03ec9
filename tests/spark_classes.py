"""Write the archive of Spark's classes that the JVMs of tests map: ``spark_classes.py FILE``.

A JVM with the archive starts in about half of the CPU time, and the tests start some hundred JVMs.
A JVM ignores an archive that was made with another Java or other jars.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from ackcore.examples.quiet_spark import SparkError, spark_session


def run_jobs(spark, directory: str) -> None:
    """Run a job and a stream with the operations of most tests."""
    rows = spark.range(100).selectExpr("id", "cast(id % 7 as string) AS word")
    rows.write.parquet(f"{directory}/rows")
    stored = spark.read.parquet(f"{directory}/rows")
    mapped = stored.repartition(2, "word").mapInArrow(lambda batches: batches, stored.schema)
    mapped.groupBy("word").count().collect()
    stream = spark.readStream.schema(stored.schema).parquet(f"{directory}/rows")
    writer = stream.writeStream.foreachBatch(lambda frame, _: frame.collect())
    writer.option("checkpointLocation", f"{directory}/checkpoint")
    writer.trigger(availableNow=True).start().awaitTermination()


def main(archive: Path) -> None:
    """Run the jobs in a JVM that writes its classes to a file when it ends."""
    unfinished = archive.with_suffix(f".{os.getpid()}.tmp")
    os.environ["JAVA_TOOL_OPTIONS"] = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"  # of all tests
    os.environ["SPARK_SUBMIT_OPTS"] = f"-XX:ArchiveClassesAtExit={unfinished} -Xlog:cds=off"
    logging.disable()  # the JVM ends before its session
    try:
        with spark_session("local[2]") as (spark, directory):
            run_jobs(spark, directory)
            process = spark.sparkContext._gateway.proc
            spark.stop()
            process.stdin.close()
            process.wait(300)
    except SparkError:
        if not unfinished.exists():
            raise
    unfinished.replace(archive)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
