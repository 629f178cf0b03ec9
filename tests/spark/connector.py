"""A Spark with its own Kafka connector, whose jars come through Maven, where they are published."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path

import pyspark
import pytest

from ackcore.examples.quiet_spark import spark_session

POM = Path(__file__).parent.parent / "kafka" / "connector-pom.xml"
#: The connector for each Spark; of its jars, what Spark has not.
CONNECTORS = {"4.0": "4.0.0", "4.1": "4.1.1", "4.2": "4.2.0"}
NEEDED = ("spark-sql-kafka", "spark-token-provider-kafka", "kafka-clients", "commons-pool2")


@contextmanager
def connector_spark(live_spark, kafka):
    """A session of its own: the one of the other tests makes room for it."""
    spark = ".".join(pyspark.__version__.split(".")[:2])
    if spark not in CONNECTORS:
        pytest.skip(f"Spark's Kafka connector is not published for {spark} and Scala 2.13")
    connector = CONNECTORS[spark]
    directory = POM.parents[2] / "build" / f"connector-{connector}"
    try:
        found = kafka.downloaded(POM, directory, "Spark's connector", f"-Dconnector={connector}")
    except kafka.Unavailable as error:
        if os.environ.get("ACKCORE_REQUIRE_KAFKA"):
            raise
        pytest.skip(str(error))
    jars = [str(jar) for jar in found.glob("*.jar") if jar.name.startswith(NEEDED)]
    live_spark.close()
    with spark_session("local[2,4]", {"spark.jars": ",".join(jars)}) as (session, _):
        yield session
