"""Streams of planned sources on Spark Connect: the same as on a classic session."""

from __future__ import annotations

import sys
import time

import pytest
import test_planned_sources as planned
from checkpoints import recorded
from pyspark import cloudpickle
from streams import available_now, in_line, until
from test_planned_sources import Held, Table, Values, values_of
from test_planned_sources import topology as words_of

from ackcore.spark import (
    QueryListener,
    RateSpout,
    RunCancelled,
    SourceError,
    dead_letters,
    replay,
    start,
    to_parquet,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(planned)


class Noted(QueryListener):
    def __init__(self):
        self.progress, self.dead, self.ends = [], [], []

    def on_progress(self, progress, counts):
        self.progress.append(progress.records)

    def on_dead(self, batch_id, letters):
        self.dead += [
            row["payload"]["value"] for table in letters.values() for row in table.to_pylist()
        ]

    def on_end(self, error, counts):
        self.ends.append((error, counts.acked))


def rows_in(spark, path):
    return sorted(row.word for row in spark.read.parquet(str(path)).collect())


def test_a_stream_runs_as_on_a_classic_session(connect, tmp_path):
    """Retries, a dead letter that is sent again, listeners, a restart, and a sink by files."""
    noted, source = Noted(), RateSpout(50, max_rows_per_batch=20)
    out, checkpoint = tmp_path / "out", tmp_path / "cp"
    on = available_now(values_of(source, to_parquet(out)), connect, checkpoint, listeners=[noted])
    assert (on.counts.acked, on.counts.dead, on.counts.balanced) == (49, 1, True)
    assert (noted.progress[:3], noted.dead, noted.ends) == ([20, 20, 10], [13], [(None, 49)])
    assert rows_in(connect, out) == sorted(str(n) for n in range(50) if n != 13)
    (letter,) = dead_letters(checkpoint, connect).collect()
    assert (letter.error_type, letter.payload.value) == ("Reject", 13)
    assert replay(checkpoint, connect).records == {"values": 1}
    more = RateSpout(60, max_rows_per_batch=20)
    on = available_now(values_of(more, to_parquet(out)), connect, checkpoint)
    assert (on.counts.records, on.counts.acked, on.counts.replayed) == (60, 59, 1)


def test_kafka_is_read_and_its_group_is_committed(connect, mock_kafka, tmp_path):
    pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed")
    import test_kafka_spout as kafka  # noqa: PLC0415

    cloudpickle.register_pickle_by_value(kafka)
    kept = kafka.Kept()
    mock_kafka.create_topic("t", 2)
    mock_kafka.produce("t", [b"a", b"flaky", b"bad"])
    it = kafka.topology(kafka.source(mock_kafka, "t"), kept)
    on = available_now(it, connect, tmp_path / "cp")
    assert (kept.texts, on.counts.dead) == (["a", "flaky"], 1)
    assert mock_kafka.committed("g", "t")[0] == 3


def held(directory, sink=print):
    return in_line({"lines": Table("a"), "held": Held(directory / "came")}, sink)


def test_stop_in_the_middle_of_a_micro_batch_ends_its_tasks(connect, tmp_path, running):
    on = running(held(tmp_path), connect, tmp_path / "cp")
    until((tmp_path / "came").exists, on)
    began = time.monotonic()
    on.stop()
    assert time.monotonic() - began < 30
    assert (on.is_active, on.exception) == (False, None)
    plan = recorded(tmp_path / "cp").read("batches/0.plan")
    assert (plan["interrupted"], plan["crashes"]) == (True, 0)
    assert connect.interruptAll() == []


def test_a_session_that_its_server_ended_ends_the_stream(connect, other_connect, tmp_path, running):
    on = running(held(tmp_path), other_connect, tmp_path / "cp")
    until((tmp_path / "came").exists, on)
    other_connect.client.release_session()
    with pytest.raises(RunCancelled, match="the session of Spark Connect has ended"):
        on.await_termination(300)


def test_an_idle_stream_keeps_its_session_alive(connect, tmp_path, store, running, monkeypatch):
    heard = []
    monkeypatch.setattr("ackcore.spark.loop.ALIVE_S", 0.5)
    monkeypatch.setattr("ackcore.spark.loop.keep_alive", heard.append)
    on = running(words_of(store, lines=Table()), connect, tmp_path / "cp")
    until(lambda: len(heard) >= 2, on)
    assert set(heard) == {connect}


def test_the_rules_of_sources_hold(connect, spark, tmp_path, store, running):
    class Classic(Table):
        def read(self, session, plan):
            return super().read(spark, plan)

    on = running(words_of(store, lines=Classic("a")), connect, tmp_path / "cp")
    with pytest.raises(SourceError, match=r"must return a DataFrame of the session that it was"):
        on.await_termination(300)


def test_a_streaming_dataframe_is_refused_with_the_way_out(connect, tmp_path, store):
    frame = connect.readStream.format("rate").load()
    with pytest.raises(
        TypeError,
        match=r"start\(\) needs a classic session for spout 'rate', .* use a planned source",
    ):
        start(in_line({"rate": frame, "values": Values()}, store), connect, tmp_path / "cp")
    assert not (tmp_path / "cp").exists()
