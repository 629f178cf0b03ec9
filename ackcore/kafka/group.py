"""`KafkaGroup`: the consumer group whose offsets a topology commits for a stream of Spark's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ackcore.kafka.settings import ClientSettings


class KafkaGroup:
    """A consumer group for Spark's own Kafka source: ``TopologyBuilder.spout(commit_group=)``.

    After each micro-batch the group's committed offsets advance to the first record that waits,
    with the records done above it in the metadata, as with a `KafkaSpout`, so that lag monitors are
    right. Only the checkpoint decides where the query continues.

    Parameters
    ----------
    group_id : str
        The name of the group. It must have no other consumer meanwhile.
    bootstrap_servers : str
        ``host:port`` of the brokers that the source reads, separated by commas.
    options : mapping, optional
        Further librdkafka settings, security above all; the source's own settings are Java's.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong; it names the argument.
    """

    #: The kind of this group for `TopologyBuilder.spout`.
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
