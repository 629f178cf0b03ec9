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
    topology_ = topology(source(mock_kafka, "t"), to_parquet(f"{bucket}/words"))
    query = running(topology_, spark, f"{bucket}/checkpoint")
    # Not process_all_available(), which asks the bucket, too.
    marks = []
    for number in range(BATCHES):
        mock_kafka.produce("t", [f"line {number}".encode()])
        until(lambda: query.counts.acked == number + 1, query)  # noqa: B023
        assert mock_kafka.committed("g", "t")[0] == number + 1
        marks.append((query.progress.batch_id, len(s3.requests)))
    looks = [one for one in s3.requests if one.method == "GET" and "/head.json" in one.path]
    assert len(looks) >= 2 * BATCHES, "neither the sink nor the commit looks at the fence"
    (first, before), (last, after) = marks[0], marks[-1]
    assert last - first >= BATCHES - 1  # a busy cluster's answer may come in the next micro-batch
    assert (after - before) / (last - first) <= 12, marks
