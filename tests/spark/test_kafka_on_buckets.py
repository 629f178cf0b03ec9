"""A stream from Kafka whose checkpoint and sink are in a bucket: what a micro-batch asks of it."""

from __future__ import annotations

import sys

import pytest
from pyspark import cloudpickle

pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed")

import test_kafka_spout as spouts
from streams import until
from test_kafka_spout import source, topology

from ackcore.spark import to_parquet
from ackcore.spark.loop import Pacing

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(spouts)

#: The work of runs is swept each eighth time.
BATCHES = 9


def test_what_a_micro_batch_asks_of_a_bucket(
    spark, tasks_reach, mock_kafka, bucket, s3, running, monkeypatch
):
    """All requests of driver and tasks, when nothing fails; the commit's look at the head, too."""
    # It looks for requests once a second: how long a micro-batch takes is the machine's matter.
    monkeypatch.setattr(Pacing, "CALLED_S", 3600.0)
    mock_kafka.create_topic("t")
    # The first micro-batch plans where to begin, and has no record if there is none yet.
    mock_kafka.produce("t", [b"line 0"])
    topology_ = topology(source(mock_kafka, "t"), to_parquet(f"{bucket}/words"))
    query = running(topology_, spark, f"{bucket}/checkpoint")
    # Not process_all_available(), which asks the bucket, too.
    marks = []
    for number in range(BATCHES):
        if number:
            mock_kafka.produce("t", [f"line {number}".encode()])
        until(lambda: query.counts.acked == number + 1, query)  # noqa: B023
        assert mock_kafka.committed("g", "t")[0] == number + 1
        marks.append(len(s3.requests))
    assert query.progress.batch_id == BATCHES - 1
    looks = [one for one in s3.requests if one.method == "GET" and "/head.json" in one.path]
    assert len(looks) >= 2 * BATCHES, "neither the sink nor the commit looks at the fence"
    assert (marks[-1] - marks[0]) / (BATCHES - 1) <= 12, marks
