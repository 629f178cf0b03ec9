"""The offset at which a consumer begins to read each partition that it is assigned.

The reason is logged, by one of these names:

- "group": the committed offset.
- "earliest", "latest", "timestamp", "explicit": the position that ``start`` names, for a partition
  without a committed offset. With "forced, " before it, also for one that has such an offset.
- "topic created again": the first offset of a topic that was deleted and created again since it was
  read.
- "new partition": the first offset of a partition that was added while its topic was read. With
  "latest" or a time, its first records would be skipped.
- "another log": the position that ``out_of_range`` names, because the partition ends below offsets
  that were committed as done.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import NamedTuple

from confluent_kafka import Consumer, TopicPartition

from ackcore.kafka.cluster import Cluster, ClusterFailed
from ackcore.kafka.commit_metadata import CommitOrigin
from ackcore.kafka.consumer.consumer_client import REQUEST_S, ask_brokers, offsets_at, watermarks
from ackcore.kafka.consumer.consumer_settings import ConsumerSettings
from ackcore.kafka.consumer.held_partition import Key
from ackcore.kafka.kafka_errors import ConsumerError, OffsetsOutOfRange
from ackcore.kafka.start_positions import MADE_ANEW, NEW_PARTITION, first_offset, time_ms
from ackcore.offsets import Restored, decode_metadata

_log = logging.getLogger(__name__)

ANOTHER_LOG = "another log"
WAY_OUT = "to read the new topic from its beginning, set out_of_range='earliest' or 'latest'"


class AssignedStart(NamedTuple):
    """An assigned partition, and the offset at which it begins."""

    key: Key
    restored: Restored  # the start, and the done offsets above it
    committed: bool  # whether the group has committed this start, so that it need not be committed
    origin: CommitOrigin  # the origin that commits of the partition hold from now on
    topic_id: str | None  # None if unknown
    skip_to: int | None  # records below this offset are too far behind; None if none are


def decide_starts(
    client: Consumer,
    settings: ConsumerSettings,
    partitions: Sequence[TopicPartition],
    ids: Mapping[str, str | None],
    seen: Mapping[str, str],
    is_new: Callable[[Key], bool],
) -> list[AssignedStart]:
    """Return where newly assigned partitions begin, in their order, and log it.

    Raises OffsetsOutOfRange if ``out_of_range`` is "fail" and a topic was deleted and created
    again, a log was truncated below done offsets, or a partition is too far behind. Raises
    ConsumerError if a request to the brokers fails.

    ``client``, ``settings``: of the consumer. ``partitions``: the partitions that it is assigned.
    ``ids``: the present ids of their topics; None if unknown. ``seen``: the ids that the topics had
    when this consumer last read them. ``is_new``: returns whether a partition was added to its
    topic after this consumer began to read the topic.
    """
    log = settings.client.logger(_log)
    asked = [TopicPartition(*_key(each)) for each in partitions]
    found = ask_brokers(
        lambda: client.committed(asked, REQUEST_S),
        f"the committed offsets of group {settings.group_id!r}",
    )
    goes_on = [_continued(each, settings, ids.get(each.topic), seen) for each in found]
    new = [_key(each) for each, kept in zip(found, goes_on, strict=True) if kept is None]
    # Before the times: a record that is written between the two requests may have that time.
    marks = watermarks(
        client,
        [
            _key(each)
            for each, kept in zip(found, goes_on, strict=True)
            if kept is None or settings.max_offset_behind is not None or _may_be_shorter(kept)
        ],
    )
    times = _of_time(client, settings, new)
    begun = []
    for each, kept in zip(found, goes_on, strict=True):
        key, topic_id = _key(each), ids.get(each.topic)
        if kept is None:
            low, high = marks[key]
            offset, why = first_offset(settings.start, key, low, high, times.get(key))
            if each.offset >= 0:
                why = f"forced, {why}"
            elif why in ("latest", "timestamp") and is_new(key):
                offset, why = low, NEW_PARTITION
            kept = decode_metadata(*key, offset, None), why
        elif _may_be_shorter(kept):
            kept = _shorter_log(settings, key, marks[key], kept[0].state.end) or kept
        restored, why = kept
        offset = restored.state.committable
        level = logging.WARNING if why in (MADE_ANEW, ANOTHER_LOG) else logging.INFO
        log.log(level, "%s-%d begins at %d, %s", *key, offset, why)
        if why == MADE_ANEW and settings.on_out_of_range == "fail":
            raise OffsetsOutOfRange(
                f"the topic of {key[0]}-{key[1]} was deleted and created again, and each start "
                f"ends like this; {WAY_OUT}"
            )
        name = settings.force_from_start
        origin = CommitOrigin.of(topic_id, name)
        was = CommitOrigin.read(restored.deployment)
        if name is None:  # keep the former name: that deployment must not begin anew if it returns
            origin = origin._replace(name=was.name)
        if topic_id is None and (why == "group" or each.offset < 0):
            # Whether the topic was created again is not known yet.
            origin = origin._replace(
                topic=was.topic or CommitOrigin.of(seen.get(key[0]), None).topic
            )
        skip_to = _skip_to(settings, key, marks, offset)
        begun.append(AssignedStart(key, restored, why == "group", origin, topic_id, skip_to))
    return begun


def _key(partition: TopicPartition) -> Key:
    return partition.topic, partition.partition


def _continued(
    found: TopicPartition, settings: ConsumerSettings, topic_id: str | None, seen: Mapping[str, str]
) -> tuple[Restored, str] | None:
    """Return where to continue and the reason; None if the partition begins at ``start``.

    ``found``: the partition with its committed offset.
    """
    key = _key(found)
    now = CommitOrigin.of(topic_id, settings.force_from_start)
    was_seen = CommitOrigin.of(seen.get(found.topic), None)
    if found.offset < 0:
        anew = decode_metadata(*key, 0, None), MADE_ANEW
        return anew if was_seen.is_other_topic(now) else None
    restored = decode_metadata(*key, found.offset, found.metadata)
    was = CommitOrigin.read(restored.deployment)
    if settings.force_from_start is not None and was.name != now.name:
        return None
    if (was if was.topic else was_seen).is_other_topic(now):
        return decode_metadata(*key, 0, None), MADE_ANEW
    return restored, "group"


def _may_be_shorter(kept: tuple[Restored, str]) -> bool:
    """Return whether a partition continues at the group's offset, and has done records above it."""
    restored, why = kept
    return why == "group" and restored.state.end > restored.state.committable


def _shorter_log(
    settings: ConsumerSettings, key: Key, marks: tuple[int, int], done: int
) -> tuple[Restored, str] | None:
    """Return where to begin and the reason if a partition ends below its done offsets; else None.

    Such a partition was truncated, or its topic created again. If it were read at its committed
    offset, new records with offsets up to ``done`` would count as done. Logs a warning for it, or
    raises OffsetsOutOfRange if ``out_of_range`` is "fail". Raises ConsumerError if the brokers do
    not answer. ``marks``: its first offset and its end.
    """
    low, high = marks
    if done > high:
        # A reader of uncommitted records may have committed offsets of an open transaction.
        try:
            with closing(Cluster(settings.client)) as cluster:
                now, failed = cluster.watermarks([key], {key: done})
        except ClusterFailed as error:
            where = f"the end of {key[0]}-{key[1]}"
            raise ConsumerError(
                f"{where} could not be read: {error}; start the consumer again once brokers answer"
            ) from None
        for failure in failed.values():
            raise ConsumerError(
                f"the end of {key[0]}-{key[1]} could not be read: {failure.text}; start the "
                "consumer again once its leader answers"
            )
        ((_, high),) = now.values()
    if done <= high:
        return None
    shorter = (
        f"{key[0]}-{key[1]} has records done up to {done}, but its offsets are [{low}, {high})"
    )
    if settings.on_out_of_range == "fail":
        raise OffsetsOutOfRange(
            f"{shorter}: it was truncated or its topic created again; to continue at its beginning "
            "or end, set out_of_range='earliest' or 'latest'"
        )
    settings.client.logger(_log).warning("%s", shorter)
    offset = low if settings.on_out_of_range == "earliest" else high
    return decode_metadata(*key, offset, None), ANOTHER_LOG


def _skip_to(
    settings: ConsumerSettings, key: Key, marks: Mapping[Key, tuple[int, int]], offset: int
) -> int | None:
    """Return the first offset that ``max_offset_behind`` does not skip; None if it skips none.

    ``offset``: the offset at which the partition would begin. Logs a warning if some are skipped,
    or raises OffsetsOutOfRange if ``out_of_range`` is "fail".
    """
    most = settings.max_offset_behind
    if most is None:
        return None
    _, high = marks[key]
    if high - offset <= most:
        return None
    name = f"{key[0]}-{key[1]}"
    if settings.on_out_of_range == "fail":
        raise OffsetsOutOfRange(
            f"{name} would be read from offset {offset}, more than max_offset_behind={most} "
            f"before its end {high}; raise max_offset_behind, or set out_of_range='earliest' or "
            f"'latest': then it is read from offset {high - most}, and with dead_letters a dead "
            "letter names the skipped offsets"
        )
    settings.client.logger(_log).warning(
        "%s would be read from offset %d, too far before its end %d: it is read from %d offsets "
        "before the end",
        *(name, offset, high, most),
    )
    return high - most


def _of_time(client: Consumer, settings: ConsumerSettings, keys: Sequence[Key]) -> dict[Key, int]:
    """Return the first offset of the time in ``start`` by partition; empty if it is no time.

    Partitions without a record of that time or later are left out.
    """
    wanted = time_ms(settings.start)
    if wanted is None or not keys:
        return {}
    found = offsets_at(client, keys, wanted, f"the first offsets of {settings.start}")
    return {key: offset for key, offset in found.items() if offset >= 0}
