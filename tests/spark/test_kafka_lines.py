"""The example that reads lines of Kafka: what it says of itself is so."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed")

from ackcore.examples import kafka_lines


def test_lines_of_kafka_add_up(kafka_broker, spark, monkeypatch, tmp_path, capsys):
    @contextmanager
    def session(master):
        yield spark, str(tmp_path)

    monkeypatch.setattr(kafka_lines, "spark_session", session)
    servers, topic = kafka_broker.bootstrap_servers, "lines-of-the-example"
    ids = kafka_lines.send(servers, topic, 500)
    assert kafka_lines.run(servers, topic, tmp_path) == 0
    assert "500 records = 492 acked + 8 dead, lag 0" in capsys.readouterr().out
    found = kafka_lines.look(servers, topic, tmp_path, ids)
    assert found == (492, 8, 0, 0, 0, 0)
    # Two of them the other way round are found.
    first, second = [message for message, n in ids.items() if n in (1, 97)]
    ids[first], ids[second] = ids[second], ids[first]
    assert kafka_lines.look(servers, topic, tmp_path, ids).wrong


def test_lines_that_are_not_sent_in_time_are_an_error(kafka_broker, monkeypatch):
    class Producer(kafka_lines.Producer):
        def flush(self, timeout):
            super().flush(timeout)
            return 3

    monkeypatch.setattr(kafka_lines, "Producer", Producer)
    with pytest.raises(RuntimeError, match="3 of 5 lines were not sent"):
        kafka_lines.send(kafka_broker.bootstrap_servers, kafka_broker.new_group(), 5)
