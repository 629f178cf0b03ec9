"""Delta's own Spark reads the rows of `to_delta`, and each knows the other's numbers.

On Spark 4.0 and 4.1, for which Delta's jars are published; they come through Maven.
"""

from __future__ import annotations

from pathlib import Path

import pyspark
import pytest

pytest.importorskip("deltalake")
pytest.importorskip("confluent_kafka")  # by what downloads jars

import broker
from accepted_rows import accepted, two_files
from one_sink import word_count
from test_delta_sink import started

from ackcore.examples.quiet_spark import spark_session
from ackcore.spark import run_batch, to_delta
from ackcore.spark.base.errors import CheckpointForeign

POM = Path(__file__).parent / "delta-pom.xml"
#: Artifact and version for each Spark.
DELTAS = {"4.0": ("delta-spark_2.13", "4.0.0"), "4.1": ("delta-spark_4.1_2.13", "4.1.0")}
DELTA = "org.apache.spark.sql.delta.catalog.DeltaCatalog"


@pytest.fixture(scope="module")
def delta_spark(live_spark):
    """A session of its own: the one of the other tests makes room for it."""
    version = ".".join(pyspark.__version__.split(".")[:2])
    if version not in DELTAS:
        pytest.skip(f"Delta is not published for Spark {version}")
    artifact, delta = DELTAS[version]
    directory = POM.parents[2] / "build" / f"delta-{version}"
    options = (f"-Ddelta.artifact={artifact}", f"-Ddelta.version={delta}")
    try:
        found = broker.downloaded(POM, directory, "Delta's jars", *options)
    except broker.Unavailable as error:
        pytest.skip(str(error))
    conf = {
        "spark.jars": ",".join(map(str, found.glob("*.jar"))),
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": DELTA,
    }
    live_spark.close()
    with spark_session("local[2,4]", conf) as (session, _):
        yield session


def words(spark, path):
    return sorted(tuple(row) for row in spark.read.format("delta").load(str(path)).collect())


@pytest.mark.parametrize("keys", [None, "word"])
def test_spark_and_the_sink_know_each_others_numbers(delta_spark, tmp_path, keys):
    path, files = tmp_path / "table", two_files(tmp_path)
    delta_spark.sql(f"CREATE TABLE delta.`{path}` (word string, n bigint) USING delta")
    sink = started(path, keys=keys)
    sink.write(accepted(files))
    written = [("a", 5), ("c", 3), ("d", 4)] if keys else [("a", 1), ("a", 5), ("c", 3), ("d", 4)]
    assert words(delta_spark, path) == written
    row = delta_spark.createDataFrame([("x", 1)], "word string, n bigint")
    for number in (0, 1):  # 0 is in the table, by the sink
        by_spark = row.write.format("delta").mode("append").option("txnAppId", "ackcore-abc-count")
        by_spark.option("txnVersion", number).save(str(path))
    assert words(delta_spark, path) == [*written, ("x", 1)]
    with pytest.raises(CheckpointForeign, match=r"has micro-batch 1 .* with other rows"):
        sink.write(accepted(files, 1))  # 1 is, by Spark
    assert words(delta_spark, path) == [*written, ("x", 1)]
    history = delta_spark.sql(f"DESCRIBE HISTORY delta.`{path}`").collect()
    (said,) = {row.userMetadata for row in history} - {None}
    assert said == f"ackcore ackcore-abc-count/0 {accepted(files).content()}"


def test_a_topology_writes_what_spark_reads(delta_spark, tmp_path):
    path = tmp_path / "table"
    topology = word_count(delta_spark, to_delta(path))
    run_batch(topology, delta_spark, tmp_path / "checkpoint", max_dead_ratio=None)
    assert words(delta_spark, path) == [("a",), ("a",), ("b",)]
