"""What a micro-batch takes from Kafka when all of it may have to wait for a retry."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark import cloudpickle

pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed")

import test_kafka_spout as spouts
from streams import until
from test_kafka_spout import Kept, source

from ackcore.topology import BasicBolt, TopologyBuilder, Unavailable

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(spouts)


class Ask(BasicBolt):
    """Asks a service that is away while there is a file."""

    outputs = pa.schema([("partition", pa.int32()), ("offset", pa.int64()), ("text", pa.string())])

    def __init__(self, away):
        self.away = away

    def execute(self, tuple, collector):
        if Path(self.away).exists():
            raise Unavailable("the service is away")
        collector.emit((tuple["partition"], tuple["offset"], tuple["value"].decode()))


@pytest.mark.parametrize("settings", [{}, {"max_records": 60}], ids=["adaptive", "fixed"])
def test_a_service_that_goes_down_while_nothing_waits_costs_no_record(
    spark, mock_kafka, tmp_path, checkpoint, running, settings
):
    """What comes then is left in Kafka when as much waits as may, and goes through later."""
    kept, away = Kept(), tmp_path / "away"
    mock_kafka.create_topic("t", 2)
    builder = TopologyBuilder()
    builder.spout("lines", source(mock_kafka, "t", **settings))
    builder.bolt("ask", Ask(str(away))).shuffle("lines")
    builder.sink("ask", kept)
    it = builder.build(max_waiting=20, backoff_ms=50, max_backoff_ms=200, parallelism=2)
    on = running(it, spark, checkpoint)
    mock_kafka.produce("t", [b"before"])
    on.process_all_available()
    away.touch()
    for partition in (0, 1):
        mock_kafka.produce("t", [b"%d" % n for n in range(45)], partition)
    # One that had room for none more, as those before it had left it.
    until(lambda: on.books.waiting == 20 and on.progress.retried and not on.progress.records, on)
    assert on.books.dead == 0
    assert on.progress.lag == {"lines": 90}
    away.unlink()
    on.process_all_available()
    assert (on.books.records, on.books.acked, on.books.dead) == (91, 91, 0)
    assert kept.texts == sorted(["before", *(str(n) for n in range(45)), *map(str, range(45))])
