"""`KafkaSpout`, and `KafkaGroup` for streams of Spark's own Kafka source."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, ClassVar

import pyarrow as pa
from confluent_kafka.serialization import MessageField, SerializationContext

from ackcore._arrow.arrow_tables import nullable_within
from ackcore._arrow.lossless import short_repr
from ackcore._columns import count_or_none, positive
from ackcore._error_hints import naming_arguments
from ackcore.calls.threads import is_async
from ackcore.kafka.client_settings import ClientSettings
from ackcore.kafka.ranges import RECORD_SCHEMA
from ackcore.kafka.start_positions import Start, as_start

#: The values of `KafkaSpout.start` besides a time and offsets.
STARTS = ("group", "earliest", "latest")
#: The values of `KafkaSpout.lost`.
POLICIES = ("dead-letter", "refuse")


class KafkaSpout:
    """A source for `TopologyBuilder.spout`: the records of Kafka's topics.

    It emits ``key, value`` (binary), ``headers`` (a list of key and value), ``topic, partition,
    offset, timestamp``. The message id is (topic, partition, offset). The checkpoint records which
    offsets are done. With ``group_id``, the spout also commits the first offset of each partition
    that is not done, after each micro-batch. Monitors of the group compute its lag from there.

    Parameters
    ----------
    topics : str or sequence of str, optional
        The topics. All their partitions are read, new ones from their beginning.
    pattern : str, optional
        Instead of topics, a regular expression that matches the whole names of topics.
    bootstrap_servers : str
        ``host:port`` of brokers, separated by commas.
    group_id : str, optional
        The consumer group whose offsets are committed. It must have no consumers, and no other
        deployment may commit to it: the two would move its offsets back and forth. Neither would
        lose a record, because each continues from its checkpoint.
    start : {"group", "earliest", "latest"}, datetime or mapping, default "group"
        Where a new checkpoint begins. "group": after the records that the group's commits name as
        done, or at the earliest record without a commit or a group. Else: at the earliest record,
        at the end, at the first record from a time on (with its zone), or at offsets by (topic,
        partition), where missing ones mean the earliest. An existing checkpoint ignores it.
    max_records : int, optional
        The maximum number of offsets in a micro-batch. If there are more partitions with records,
        it takes one of each. The offsets of a micro-batch are divided evenly among its tasks.
    target_batch_s : float, default 10
        The target duration of a micro-batch. Without ``max_records``, the number of offsets is
        adapted to it, by the durations of earlier micro-batches. The target is at least twice the
        duration of an empty micro-batch. With or without ``max_records``, a micro-batch takes no
        more records than could wait if all failed: see the topology's ``max_waiting``.
    refresh_s : float, default 60
        The interval, in seconds, at which new partitions are looked for.
    max_offset_behind : int, optional
        When the checkpoint begins, records that are further than this behind the end of their
        partition are skipped.
    lost : {"dead-letter", "refuse"}, default "dead-letter"
        What to do about skipped offsets, and offsets that were deleted before they were read: write
        one dead letter per range, which names it, or end the query with an error.
    missing_timeout_s : float, default 600
        How many seconds a micro-batch waits for a topic, or for offsets at the end of a partition,
        that existed when it was planned and do not exist now. Then the query ends with an error.
        There is no such limit for brokers that do not answer.
    deserializer : callable, optional
        A plain function that converts the bytes of a value, for instance ``json.loads``. Its
        result is copied, so it may reuse one object. A deserializer of confluent-kafka also
        receives its ``SerializationContext``. If it raises, the record fails as in a bolt: it is
        retried, unless the deserializer raised `Reject`. Its dead letter has the original bytes.
        Null values stay null. If the deserializer has a method ``prepare``, each task calls that
        first: create the client of a schema registry there, which cannot be pickled.
    value_type : pyarrow.DataType, optional
        The type of the deserialized values, required with `deserializer`. A value must keep its
        meaning in this type, or its record fails. Fields of a struct are matched by name:
        additional fields of a message are dropped, missing ones are null.
    options : mapping, optional
        Further librdkafka settings: security, ``isolation.level`` and others.
    """

    source_kind: ClassVar[str] = "kafka"
    #: The columns of the records, both as read and in the state.
    schema: ClassVar[pa.Schema] = RECORD_SCHEMA

    @naming_arguments
    def __init__(
        self,
        topics: str | Sequence[str] | None = None,
        *,
        pattern: str | None = None,
        bootstrap_servers: str,
        group_id: str | None = None,
        start: str | datetime | Mapping[tuple[str, int], int] = "group",
        max_records: int | None = None,
        target_batch_s: float = 10.0,
        refresh_s: float = 60.0,
        max_offset_behind: int | None = None,
        lost: str = "dead-letter",
        missing_timeout_s: float = 600.0,
        deserializer: Callable[..., Any] | None = None,
        value_type: pa.DataType | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.topics = _topics(topics, pattern)
        self.pattern = pattern
        self.client = ClientSettings(bootstrap_servers, options)
        if group_id is not None and (not isinstance(group_id, str) or not group_id):
            raise TypeError(f"group_id must be the name of a group or None, got {group_id!r}")
        self.group_id = group_id
        self.start = _start(start, group_id)
        self.max_records = count_or_none(max_records, "max_records", 1)
        self.target_batch_s = positive(target_batch_s, "target_batch_s", 1e9, "seconds")
        self.refresh_s = positive(refresh_s, "refresh_s", 1e9, "seconds")
        self.max_offset_behind = count_or_none(max_offset_behind, "max_offset_behind", 0)
        if lost not in POLICIES:
            raise ValueError(f"lost must be one of {', '.join(map(repr, POLICIES))}, got {lost!r}")
        self.lost = lost
        self.missing_timeout_s = positive(missing_timeout_s, "missing_timeout_s", 1e9, "seconds")
        self.deserializer, self.value_type = _deserializer(deserializer, value_type)

    @property
    def columns(self) -> list[str]:
        """The names of the emitted columns."""
        return list(self.schema.names)

    @property
    def emits(self) -> pa.Schema:
        """The schema of the emitted columns. ``value`` is binary, or of the type ``value_type``."""
        if self.value_type is None:
            return self.schema
        place = self.schema.get_field_index("value")
        return self.schema.set(place, pa.field("value", self.value_type))

    def reads(self, topic: str) -> bool:
        """Return whether a topic's name is one of ``topics``, or matches all of ``pattern``.

        A pattern matches no name that begins with ``__``, as those of Kafka's own topics do.
        """
        if self.topics is not None:
            return topic in self.topics
        found = re.fullmatch(self.pattern or "", topic)
        return found is not None and not topic.startswith("__")

    def __repr__(self) -> str:
        what = f"pattern={self.pattern!r}" if self.topics is None else f"{list(self.topics)}"
        return f"KafkaSpout({what}, bootstrap_servers={self.client.bootstrap_servers!r})"


class KafkaGroup:
    """A consumer group for Spark's own Kafka source: ``TopologyBuilder.spout(commit_group=)``.

    After each micro-batch, ackcore commits, for each partition, the offset of the first record that
    is not done. Monitors of the group compute its lag from there. The metadata list the done
    records above it. The query itself continues from its checkpoint, not from the group.

    Parameters
    ----------
    group_id : str
        The name of the group. It must have no consumers.
    bootstrap_servers : str
        ``host:port`` of the brokers that the source reads, separated by commas.
    options : mapping, optional
        Further librdkafka settings, security above all. Spark's source has settings of its own.
    """

    #: The kind of this group for `TopologyBuilder.spout`.
    commits_to: ClassVar[str] = "kafka"

    @naming_arguments
    def __init__(
        self, group_id: str, bootstrap_servers: str, options: Mapping[str, Any] | None = None
    ) -> None:
        if not isinstance(group_id, str) or not group_id:
            raise TypeError(f"group_id must be the name of a group, got {group_id!r}")
        self.group_id = group_id
        self.client = ClientSettings(bootstrap_servers, options)

    def __repr__(self) -> str:
        return f"KafkaGroup({self.group_id!r}, {self.client.bootstrap_servers!r})"


def value_context(
    topic: str, headers: list[tuple[str, str | bytes | None]]
) -> SerializationContext:
    """Make the context that a deserializer of confluent-kafka receives with a value."""
    return SerializationContext(topic, MessageField.VALUE, headers)


def _topics(topics: Any, pattern: Any) -> tuple[str, ...] | None:
    if (topics is None) == (pattern is None):
        raise ValueError(
            "KafkaSpout must have either topics or a pattern, got "
            + ("neither" if topics is None else "both")
        )
    if topics is None:
        if not isinstance(pattern, str):
            raise TypeError(f"pattern must be a str, got {type(pattern).__name__} {pattern!r}")
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"pattern must be a regular expression, got {pattern!r}: {error}; put a backslash "
                "before characters with a special meaning, such as '(' or '*'"
            ) from None
        return None
    names = (topics,) if isinstance(topics, str) else topics
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"topics must be the name of a topic or a list of them, got {topics!r}")
    if not names or not all(names):
        raise ValueError(
            f"topics must name at least one topic, and no name may be empty, got {topics!r}"
        )
    if len(set(names)) < len(names):
        raise ValueError(f"topics must not name a topic twice, got {topics!r}")
    return tuple(names)


def _start(start: Any, group_id: str | None) -> Start:
    found = as_start(start, STARTS)
    # Without a group there are no committed offsets to begin at.
    return "earliest" if found == "group" and group_id is None else found


def _deserializer(deserializer: Any, value_type: Any) -> tuple[Any, Any]:
    if (deserializer is None) != (value_type is None):
        raise ValueError(
            "deserializer and value_type must be given together: Spark needs the type of the "
            "values before the deserializer runs"
        )
    if deserializer is None:
        return None, None
    if not callable(deserializer):
        raise TypeError(
            f"deserializer must be callable, got {short_repr(deserializer)}; json.loads is one"
        )
    if is_async(deserializer):
        raise TypeError(
            f"deserializer must be a plain function, got an async one, {short_repr(deserializer)}; "
            "decode in an AsyncBolt"
        )
    if not isinstance(value_type, pa.DataType):
        way_out = "pa.string() is one"
        if isinstance(value_type, pa.Schema):
            way_out = "write pa.struct(schema) with this schema"
        raise TypeError(
            f"value_type must be a pyarrow.DataType, got {type(value_type).__name__}; {way_out}"
        )
    return deserializer, nullable_within(value_type)
