"""Sending letters of a dead-letter topic through their topology again.

A letter in the topic names itself by its micro-batch and its row there, as one in the store does.
So the store's notes of what was sent are those of the topic as well, and a letter is sent once,
from wherever it is read first.  The topic is read once to choose, and once for each spout to send,
part by part: however many letters there are, all go in one request or none.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ackcore.arrow.buffers import is_text
from ackcore.arrow.shown import text_of
from ackcore.spark.base.schemas import TRACKING
from ackcore.spark.dead_letters.letters import read_schema
from ackcore.spark.dead_letters.notes import (
    NamedRows,
    Note,
    again_if_noted,
    counted,
    note_of,
    note_time,
    notes_of,
    spans_of,
)
from ackcore.spark.dead_letters.replay import (
    REQUEST,
    UNREAD,
    Replay,
)
from ackcore.spark.dead_letters.store_of_checkpoint import check_spout, checkpoint_of, store_of
from ackcore.spark.dead_letters.topic import OURS, DeadLetterTopic, message_columns
from ackcore.topology.tuples import Reason

_log = logging.getLogger("ackcore")

_NUMBERS = ("partition", "offset", "timestamp")


#: Rows of letters, by spout and micro-batch.
_Places = dict[tuple[str, int], set[int]]


class _Letter(NamedTuple):
    """A letter of the topic: which it is, how often its record has died, and the record."""

    spout: str
    number: int
    row: int
    deaths: int
    tracking: tuple[Any, ...]
    record: dict[str, Any]


def replay_topic(
    path: str | os.PathLike[str],
    topic: DeadLetterTopic,
    *,
    spout: str | None = None,
    max_deaths: int = 20,
    request: str | None = None,
) -> Replay:
    """Send the letters of a dead-letter topic through their topology again, as `replay` does.

    Those of this checkpoint whose source is Kafka, or else has text or bytes in ``value``: they are
    in the topic as they came.  What is there beside is left.  A letter is sent once, whether from
    here or by `replay`, though it may be in the topic twice; whatever dies when.

    Parameters
    ----------
    path : path
        The checkpoint, or what was given as ``dead_letters``: a directory, or a bucket's URL.
    topic : DeadLetterTopic
        Where they are.
    spout : str, optional
        Of the letters; all if not given.
    max_deaths : int, default 20
        A record that has died so often is left: so what sends letters again by itself ends.  How
        often is in the header ``ackcore-deaths``.
    request : str, optional
        As `replay` has it.

    Returns
    -------
    Replay
        Id and numbers of records; no records if there was nothing to send.

    Raises
    ------
    FileNotFoundError, ValueError, CheckpointForeign, CheckpointCorrupt
        As `replay` does.
    TypeError
        If ``topic`` is none.
    UnknownTopics, ClusterFailed, OffsetsLost, ReadTimedOut, ReadFailed
        Of `ackcore.kafka`, if the topic cannot be read; nothing was sent then.
    RuntimeError
        If letters went from the topic while it was read; nothing was sent then.
    """
    if not isinstance(topic, DeadLetterTopic):
        raise TypeError(f"topic must be a DeadLetterTopic, got {type(topic).__name__} {topic!r}")
    name = uuid.uuid4().hex if request is None else request
    if not isinstance(name, str) or not REQUEST.fullmatch(name):
        raise ValueError(f"request must be 1 to 64 of letters, digits, - and _, got {name!r}")
    store = store_of(path)
    checkpoint = checkpoint_of(store)
    check_spout(store, spout)
    meta = checkpoint.meta()
    assert meta is not None
    schemas = {
        each: schema
        for each in store.spouts()
        if spout in (None, each)
        and (columns := store.columns(each)) is not None
        and message_columns(
            schema := pa.schema(list(read_schema(columns).field("payload").type))
        ).value
        is not None
    }

    def send() -> Replay:
        notes = notes_of(store)
        before = note_of(notes, name)
        if before is not None:
            return Replay(name, counted(before.rows))
        with _reading(topic, meta["deployment_key"], schemas) as letters:
            wanted = _wanted(letters(), NamedRows(notes), max_deaths, topic)
            rows = _rows_of(wanted)
            if rows:
                # Read once more: of what is sent, places alone are in memory.
                tables = {
                    each: _tables(letters(), each, schemas[each], wanted, max_deaths, topic)
                    for each in rows
                }
                note = Note(name, note_time(notes), rows)
                store.send(name, note._asdict(), tables)
        return Replay(name, counted(rows))

    return again_if_noted(store, send)


def _wanted(
    letters: Iterable[list[_Letter]], sent: NamedRows, max_deaths: int, topic: DeadLetterTopic
) -> _Places:
    """Return which letters are to be sent."""
    wanted: _Places = defaultdict(set)
    often = 0
    for letter in chain.from_iterable(letters):
        if letter.deaths >= max_deaths:
            often += 1
        elif letter[:3] not in sent:
            wanted[letter.spout, letter.number].add(letter.row)
    if often:
        _log.warning(
            "%d letters in %r are of records that have died %d times or oftener, and are left",
            *(often, topic, max_deaths),
        )
    return wanted


def _rows_of(wanted: _Places) -> dict[str, dict[str, Any]]:
    """Return the places of letters, as a note has them."""
    places: dict[str, dict[str, Any]] = defaultdict(dict)
    for (spout, number), rows in sorted(wanted.items()):
        places[spout][str(number)] = spans_of(np.array(sorted(rows)))
    return dict(places)


def _tables(
    letters: Iterable[list[_Letter]],
    spout: str,
    schema: pa.Schema,
    wanted: _Places,
    max_deaths: int,
    topic: DeadLetterTopic,
) -> Iterator[pa.Table]:
    """Yield a spout's letters as records that wait for their first attempt, those wanted once each.

    Raises
    ------
    RuntimeError
        If one of them is not there any more, which would be noted as sent.
    """
    left = {number: set(rows) for (name, number), rows in wanted.items() if name == spout}
    for some in letters:
        found = []
        for letter in some:
            rows = left.get(letter.number, ()) if letter.spout == spout else ()
            if letter.row in rows and letter.deaths < max_deaths:
                left[letter.number].remove(letter.row)
                found.append(letter)
        if found:
            yield _table(found, schema)
    if gone := sum(map(len, left.values())):
        raise RuntimeError(
            f"{gone} letters went from {topic!r} while they were read, and nothing was sent; give "
            "the topic a longer retention and no compaction (cleanup.policy=delete), and try again"
        )


def _table(letters: Sequence[_Letter], schema: pa.Schema) -> pa.Table:
    columns = zip(*(letter.tracking for letter in letters), strict=True)
    tracking = [
        pa.array(column, field.type) for column, field in zip(columns, TRACKING, strict=True)
    ]
    records = [
        _column([letter.record[field.name] for letter in letters], field.type) for field in schema
    ]
    return pa.table([*tracking, *records], schema=pa.schema([*TRACKING, *schema]))


@contextmanager
def _reading(
    topic: DeadLetterTopic, deployment: str, schemas: Mapping[str, pa.Schema]
) -> Iterator[Callable[[], Iterator[list[_Letter]]]]:
    """Within, read the letters of a deployment that are in a topic now, as often as is wanted."""
    from ackcore.kafka.cluster import Cluster  # noqa: PLC0415
    from ackcore.kafka.ranges import OffsetRange  # noqa: PLC0415
    from ackcore.kafka.reading import RangeReader  # noqa: PLC0415

    settings = topic.settings
    with Cluster(settings) as cluster, RangeReader(settings) as reader:
        bounds = cluster.bounds_of(topic.topic)
        ranges = [OffsetRange(*key, low, high) for key, (low, high) in bounds.items()]

        def letters() -> Iterator[list[_Letter]]:
            for batch in chain.from_iterable(map(reader.read, ranges)):
                times = pc.cast(batch.column("timestamp"), pa.int64())
                each = zip(batch.to_pylist(), times.to_pylist(), strict=True)
                found = (_letter(row, at_ms or 0, deployment, schemas) for row, at_ms in each)
                yield [letter for letter in found if letter is not None]

        yield letters


def _letter(
    message: dict[str, Any], at_ms: int, deployment: str, schemas: Mapping[str, pa.Schema]
) -> _Letter | None:
    """Return what a message stands for; None if it is no letter, or another's."""
    from ackcore.kafka.dead_letters import (  # noqa: PLC0415
        deaths,
        headers_that_came,
        is_of_topology,
    )

    headers = [(one["key"], one["value"]) for one in message["headers"] or ()]
    if not is_of_topology(headers):  # a `Consumer`'s: `ackcore.kafka.replay_letters` sends it
        return None
    # Ours come last, whatever came with the record.
    told = {name: (value or b"").decode(errors="replace") for name, value in headers}
    owner, _, place = told.get("ackcore-batch", "").partition("/")
    spout, _, number = place.rpartition("/")
    row = told.get("ackcore-row", "")
    if owner != deployment or spout not in schemas or not (number.isdigit() and row.isdigit()):
        return None
    kind, _, said = told.get("ackcore-reason", "").partition(": ")
    component = told.get("ackcore-component", "")
    if component == spout and kind in UNREAD:
        return None
    reason = Reason(component, kind, said).encode()
    record = {
        "key": message["key"],
        "value": message["value"],
        "headers": [
            {"key": name, "value": value} for name, value in headers_that_came(headers, OURS)
        ],
        "topic": told.get("ackcore-topic"),
        **{name: _number(told.get(f"ackcore-{name}")) for name in _NUMBERS},
    }
    schema = schemas[spout]
    died = max(deaths(headers), 1)
    tracking = (told.get("ackcore-message-id", ""), 0, 0, at_ms, at_ms, reason, died)
    return _Letter(
        spout,
        int(number),
        int(row),
        died,
        tracking,
        {field.name: _as(record.get(field.name), field.type) for field in schema},
    )


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.lstrip("-").isdigit() else None


def _as(value: Any, kind: pa.DataType) -> Any:
    """Return a value as a column has it, and of text its bytes."""
    if pa.types.is_timestamp(kind):
        return None if value is None else datetime.fromtimestamp(value / 1000, UTC)
    return value.encode() if is_text(kind) and isinstance(value, str) else value


def _column(values: list[Any], kind: pa.DataType) -> pa.Array:
    """Return values as a column; text as its bytes are, which need not be UTF-8."""
    return text_of(values, kind) if is_text(kind) else pa.array(values, kind)
