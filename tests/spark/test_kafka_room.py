"""The records that a micro-batch takes from Kafka when all of them may have to wait."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from pyspark import cloudpickle

pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed")

import test_kafka_spout as spouts
from streams import in_line, until
from test_kafka_spout import Kept, source

from ackcore.kafka.ranges import OffsetRange
from ackcore.spark.kafka import kafka_spouts
from ackcore.spark.kafka.kafka_spouts import KafkaSources
from ackcore.spark.kafka.plans import OffsetPlan
from ackcore.topology import BasicBolt, Unavailable

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


def asking(kafka, away, kept, spout, **settings):
    """A topology of one bolt, which fails while there is a file."""
    parts = {"lines": source(kafka, "t", **spout), "ask": Ask(str(away))}
    return in_line(parts, kept, max_waiting=20, parallelism=2, **settings)


@pytest.mark.parametrize(
    "settings",
    [{}, pytest.param({"max_records": 60}, marks=pytest.mark.faults)],
    ids=["adaptive", "fixed"],
)
def test_a_service_that_goes_down_while_nothing_waits_costs_no_record(
    spark, mock_kafka, tmp_path, checkpoint, running, settings
):
    """New records are left in Kafka while the waiting store is full, and go through later."""
    kept, away = Kept(), tmp_path / "away"
    mock_kafka.create_topic("t", 2)
    it = asking(mock_kafka, away, kept, settings, backoff_s=0.05, max_backoff_s=0.2)
    on = running(it, spark, checkpoint)
    mock_kafka.produce("t", [b"before"])
    on.process_all_available()
    away.touch()
    for partition in (0, 1):
        mock_kafka.produce("t", [b"%d" % n for n in range(45)], partition)
    # One that had room for none more, as those before it had left it.
    until(lambda: on.counts.waiting == 20 and on.progress.retried and not on.progress.records, on)
    assert on.counts.dead == 0
    assert on.progress.lag == {"lines": 90}
    away.unlink()
    on.process_all_available()
    assert (on.counts.records, on.counts.acked, on.counts.dead) == (91, 91, 0)
    assert kept.texts == sorted(["before", *(str(n) for n in range(45)), *map(str, range(45))])


@pytest.mark.parametrize("trigger", [None, {"availableNow": True}], ids=["stream", "once"])
def test_without_room_the_next_micro_batch_comes_when_a_retry_is_due(
    spark, mock_kafka, tmp_path, checkpoint, running, monkeypatch, trigger
):
    """However often it is looked whether Kafka has more: it has, and nothing of it may be taken."""
    looks = []
    has_new, is_through = KafkaSources.has_new, KafkaSources.is_through

    def look(found):
        return lambda self: (looks.append(None), found(self))[1]

    monkeypatch.setattr(KafkaSources, "has_new", look(has_new))
    monkeypatch.setattr(KafkaSources, "is_through", property(look(is_through.fget)))
    mock_kafka.create_topic("t", 2)
    for partition in (0, 1):
        mock_kafka.produce("t", [b"%d" % n for n in range(45)], partition)
    kept, away, now = Kept(), tmp_path / "away", [time.time_ns() // 1_000_000]
    away.touch()
    hour_s = 3600
    it = asking(
        *(mock_kafka, away, kept, {}),
        backoff_s=hour_s, max_backoff_s=hour_s,
    )  # fmt: skip
    on = running(it, spark, checkpoint, trigger=trigger, clock=lambda: now[0])
    until(lambda: on.counts.waiting == 20, on)
    number, looked = on.progress.batch_id, len(looks)
    until(lambda: len(looks) >= looked + 20, on)
    # One more at most, which was asked for while that one ran.
    assert on.progress.batch_id <= number + 1
    away.unlink()
    now[0] += 2000 * hour_s
    on.process_all_available() if trigger is None else on.await_termination(300)
    assert (on.counts.records, on.counts.acked, on.counts.dead) == (90, 90, 0)


@pytest.mark.parametrize(
    ("room", "there", "taken"),
    [
        (1, [5, 5], [[1, 0], [0, 1], [1, 0]]),
        (1, [0, 5], [[0, 1], [0, 1], [0, 1]]),
        (10, [50, 50], [[5, 5], [5, 5], [5, 5]]),
        (10, [2, 50], [[2, 8], [2, 5], [2, 8]]),
        (10, [50, 2], [[5, 2], [8, 2], [5, 2]]),
        (0, [5, 5], [[0, 0], [0, 0], [0, 0]]),
    ],
)
def test_each_spout_has_a_share_of_the_room_in_turn(monkeypatch, room, there, taken):
    """Were it a part that is none, nothing would be taken, for ever and without a pause."""

    def spout(n):
        def plan(before, tasks, *, bounded, room):
            return OffsetPlan(tasks=((OffsetRange("t", 0, 0, min(n, room)),),))

        group = SimpleNamespace(group_id=None)
        return SimpleNamespace(plan=plan, spout=group, has_new=lambda: n > 0, has_commit_due=False)

    monkeypatch.setattr(kafka_spouts, "task_slots", lambda spark: 2)
    spark = SimpleNamespace(createDataFrame=lambda *_: None)
    spouts = {str(i): spout(n) for i, n in enumerate(there)}
    it = KafkaSources(spouts, spark, False, 10)
    it._room = room
    assert it.has_new() == it.has_room == bool(room)
    by_name = [it.plan(n, None) for n in range(3)]
    found = [[OffsetPlan.of(plan[name]).tasks[0][0].size for name in spouts] for plan in by_name]
    assert found == taken
