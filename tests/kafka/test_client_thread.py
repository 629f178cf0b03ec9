"""What a consumer makes of a client's answers that no broker gives on demand: a scripted client."""

import pytest

pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed")

from confluent_kafka import TopicPartition

from ackcore.kafka import Consumer, client_thread


class Message:
    def __init__(self, offset, value=b"x"):
        self._offset, self._value = offset, value

    def error(self):
        return None

    def topic(self):
        return "t"

    def partition(self):
        return 0

    def offset(self):
        return self._offset

    def key(self):
        return None

    def value(self):
        return self._value

    def headers(self):
        return None

    def timestamp(self):
        return 0, -1

    def __len__(self):
        return 1


class Client:
    """One partition; whatever is in ``script`` happens in the next poll, one after the other."""

    def __init__(self):
        self.script = []
        self.committed_offset = 0
        self.app_position = -1001

    def subscribe(self, topics, on_assign, on_revoke, on_lost):
        self.on_assign, self.on_revoke, self.on_lost = on_assign, on_revoke, on_lost

    def poll(self, timeout):
        return self.script.pop(0)() if self.script else None

    def consume(self, n, timeout):
        return []

    def committed(self, partitions, timeout):
        return [TopicPartition("t", 0, self.committed_offset, metadata="")]

    def get_watermark_offsets(self, partition, timeout=None, cached=False):
        return 0, 10

    def position(self, partitions):
        return [TopicPartition("t", 0, self.app_position) for _ in partitions]

    def commit(self, offsets, asynchronous):
        self.committed_offset = offsets[0].offset
        if asynchronous:
            self.script.insert(0, lambda: self.on_commit(None, offsets))
        return offsets

    def assign(self, partitions):
        self.assigned = [(found.partition, found.offset) for found in partitions]

    def incremental_assign(self, partitions):
        self.assign(partitions)

    def incremental_unassign(self, partitions):
        pass

    def resume(self, partitions):
        pass

    def close(self):
        pass


@pytest.mark.parametrize("protocol", ["eager", "cooperative"])
def test_a_message_that_came_with_its_assignment_is_read_again_and_not_passed(
    monkeypatch, protocol
):
    """The client counts it as read: what it says of its position is not believed."""
    client = Client()

    def assigned_within():
        client.on_assign(client, [TopicPartition("t", 0)])
        client.app_position = 1
        return Message(0, b"perhaps of the assignment before")

    def again():
        client.app_position = 2
        return Message(0)

    idle = [lambda: None] * 3
    client.script = [assigned_within, *idle, again]

    def make_client(settings, on_commit):
        client.on_commit = on_commit
        return client

    monkeypatch.setattr(client_thread, "make_client", make_client)
    arguments = {"bootstrap_servers": "x", "group_id": "g", "commit_interval_s": 1e-9}
    with Consumer("t", protocol=protocol, **arguments) as consumer:
        (record,) = consumer.poll(1, 20.0)
        assert (record.offset, record.value) == (0, b"x")
        assert client.assigned == [(0, 0)]
        consumer.ack(record)
    assert client.committed_offset in (1, 2)


def test_a_position_that_was_none_and_is_one_passes_markers(monkeypatch):
    client = Client()
    client.script = [lambda: client.on_assign(client, [TopicPartition("t", 0)])]

    def make_client(settings, on_commit):
        client.on_commit = on_commit
        return client

    monkeypatch.setattr(client_thread, "make_client", make_client)
    arguments = {"bootstrap_servers": "x", "group_id": "g", "commit_interval_s": 1e-9}
    with Consumer("t", **arguments) as consumer:

        def position(partitions, asked=[]):  # noqa: B006 - how often it was
            asked.append(1)
            return [TopicPartition("t", 0, -1001 if len(asked) < 3 else 4)]

        client.position = position
        while client.committed_offset != 4:
            assert consumer.poll(1, 0.01) == []
