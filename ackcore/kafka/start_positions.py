"""The argument ``start`` of `Consumer` and `KafkaSpout`: a name, a time, or offsets."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from ackcore._columns import as_count

#: Names of two decisions of `Consumer` and `KafkaSpout` to begin at the first record: the topic was
#: deleted and created again, or the partition was added to it.
MADE_ANEW, NEW_PARTITION = "topic created again", "new partition"

#: A name, a time with its zone, or offsets by topic and partition.
Start = str | datetime | Mapping[tuple[str, int], int]


def as_start(start: Any, names: tuple[str, ...]) -> Start:
    """Return the argument ``start``: a name, a time, or a copy of the offsets.

    ``names``: the allowed names. Raises TypeError if offsets are not integers by (topic,
    partition). Raises ValueError for another name or type, a time without a zone, or an offset
    below 0.
    """
    if isinstance(start, datetime):
        check_zone(start, "start")
        return start
    if isinstance(start, Mapping):
        for key, offset in start.items():
            named = isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], str)
            if not named or not isinstance(key[1], int) or not isinstance(offset, int):
                raise TypeError(
                    "start must map (topic, partition) to an offset, "
                    f"got {key!r}: {offset!r}; {{('lines', 0): 100}} is one"
                )
            as_count(offset, f"start of {key[0]}-{key[1]}", 0)
        return dict(start)
    if start not in names:
        raise ValueError(
            f"start must be one of {', '.join(map(repr, names))}, a datetime, or offsets by "
            f"(topic, partition), got {start!r}"
        )
    return str(start)


def check_zone(time: datetime, name: str) -> None:
    """Raise ValueError if the argument ``name`` is a time without a zone."""
    if time.tzinfo is None:
        raise ValueError(
            f"{name} must be a time with its zone, got {time!r} without one; "
            "datetime(..., tzinfo=timezone.utc) has one"
        )


def first_offset(
    start: Start, key: tuple[str, int], low: int, high: int, of_time: int | None
) -> tuple[int, str]:
    """Return the offset at which a partition begins, and the reason.

    The reason is "earliest", "latest", "timestamp" or "explicit". The offset may be out of range.
    With "group" as ``start``, or offsets without this partition, returns the first offset and
    "earliest".

    ``start``: the user's argument. ``key``: topic and number. ``low``, ``high``: the partition's
    first offset and its end. ``of_time``: the first offset of the time in ``start``; None if no
    record has that time or a later one, and the partition begins at its end.
    """
    if isinstance(start, Mapping):
        offset = start.get(key)
        return (low, "earliest") if offset is None else (offset, "explicit")
    if isinstance(start, datetime):
        return (high if of_time is None else of_time), "timestamp"
    return (high, "latest") if start == "latest" else (low, "earliest")


def time_ms(start: Start) -> int | None:
    """Return the time ``start`` in milliseconds since 1970, at least 0; None if it is no time."""
    if not isinstance(start, datetime):
        return None
    # No record has a time below 0, and Kafka uses -1 for the end of a partition.
    return max(0, round(start.timestamp() * 1000))
