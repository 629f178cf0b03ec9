"""`KafkaGroup`: the consumer group that is told what a topology has done of a stream of Spark's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ackcore.kafka.settings import ClientSettings


class KafkaGroup:
    """A group for records of Spark's own Kafka source: ``TopologyBuilder.spout(commit_group=)``.

    After each micro-batch the group's committed offsets are advanced up to the first record that
    waits, with what is done above that in the metadata, as `KafkaSpout` does it: whatever watches
    its lag is right.  The checkpoint alone says what is done, and where the query goes on.

    Parameters
    ----------
    group_id : str
        Its name.  No consumer may be a member of it meanwhile.
    bootstrap_servers : str
        ``host:port`` of the brokers that the source reads, with commas between them.
    options : mapping, optional
        Further settings of librdkafka, security above all: those of the source are Java's.

    Raises
    ------
    TypeError, ValueError
        Naming the argument.
    """

    #: What `TopologyBuilder.spout` knows it by.
    commits_to: ClassVar[str] = "kafka"

    def __init__(
        self, group_id: str, bootstrap_servers: str, options: Mapping[str, Any] | None = None
    ) -> None:
        if not isinstance(group_id, str) or not group_id:
            raise TypeError(f"group_id must be the name of a group, got {group_id!r}")
        self.group_id = group_id
        self.client = ClientSettings(bootstrap_servers, options)

    def __repr__(self) -> str:
        return f"KafkaGroup({self.group_id!r}, {self.client.bootstrap_servers!r})"
