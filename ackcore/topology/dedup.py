"""Deduplication of the records of a spout: its arguments, and the bolt and table that implement it.

`TopologyBuilder.build` puts the bolt ``<spout>.dedup`` between a spout with ``dedup`` and all its
readers. A fields grouping by the key brings all copies of a micro-batch into one task, which lets
one of them pass. The bolt emits the key of each record that runs or waits to its stream ``"seen"``.
A table with the bolt's name is folded from it: the keys of ACKED records, each with the time of its
record.
The engine's part is in `ackcore.spark.tasks.dedup_executor` and `ackcore.spark.tables.seen_keys`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from ackcore._error_hints import as_seconds, listed
from ackcore.tables.aggregates import count
from ackcore.tables.table_shape import MAX_TTL_S, MIN_TTL_S, TableShape
from ackcore.topology.components import DEFAULT_STREAM, Component
from ackcore.topology.parts import (
    DEDUP,
    BoltSpec,
    Dedup,
    Grouping,
    Input,
    SinkSpec,
    Spout,
    TableSpec,
)

#: The streams of the bolt with the keys of records that run or wait, and with the duplicates.
SEEN, DUPLICATES = "seen", "duplicates"
#: The column with the time of a record that the bound counts from, in milliseconds since 1970.
AT_MS = "_ackcore_at_ms"

#: The beginnings of the names of types that a key may not have, in Arrow and in Spark.
_NO_KEYS = (
    *("float", "double", "halffloat", "struct", "map", "list", "array", "large_list"),
    *("fixed_size_list", "dictionary", "variant", "interval", "duration"),
)


class DedupBolt(Component):
    """The bolt that leaves out the duplicates among the records of ``spout``.

    It has no ``execute``: the engine runs it with an executor of its own.
    """

    def __init__(self, spout: str, dedup: Dedup) -> None:
        self.spout = spout
        self.dedup = dedup
        self.uses = (f"{spout}{DEDUP}",)

    def __repr__(self) -> str:
        return f"DedupBolt({listed(self.dedup.columns)})"


def dedup_of(
    spout: str, columns: tuple[str, ...] | None, within_s: Any, within_keys: Any, event_time: Any
) -> Dedup | None:
    """Check the arguments of a spout for ``dedup``, and return them; None without ``dedup``.

    ``columns``: the argument ``dedup``. Raises TypeError for a wrong type. Raises ValueError if a
    bound is out of range, ``dedup`` has no bound, ``event_time`` is given without ``within_s``, or
    any argument without ``dedup``.
    """
    of = f"of spout {spout!r}"
    given = {"within_s": within_s, "within_keys": within_keys, "event_time": event_time}
    if columns is None:
        for name, value in given.items():
            if value is not None:
                raise ValueError(
                    f"{name} {of} has no effect without dedup, got {value!r}; name the columns of "
                    f"the key in dedup, or remove {name}"
                )
        return None
    if within_s is None and within_keys is None:
        raise ValueError(
            f"dedup {of} needs a bound, because the keys are kept in the checkpoint, and got "
            "none; pass within_s, such as 86400 for a day, or within_keys"
        )
    if within_s is not None:
        way_out = "pass within_keys alone for a bound by number"
        within_s = as_seconds(within_s, f"within_s {of}", MIN_TTL_S, MAX_TTL_S, way_out)
    if within_keys is not None and (
        isinstance(within_keys, bool) or not isinstance(within_keys, int)
    ):
        raise TypeError(
            f"within_keys {of} must be an integer or None, got {type(within_keys).__name__} "
            f"{within_keys!r}"
        )
    if within_keys is not None and within_keys < 1:
        raise ValueError(
            f"within_keys {of} must be at least 1, got {within_keys}; remove dedup if you want none"
        )
    if event_time is not None and not isinstance(event_time, str):
        raise TypeError(
            f"event_time {of} must be the name of a column or None, got "
            f"{type(event_time).__name__} {event_time!r}"
        )
    if event_time is not None and within_s is None:
        raise ValueError(
            f"event_time {of} has no effect without within_s, which counts from this time; pass "
            "within_s, or remove event_time"
        )
    return Dedup(columns, within_s, within_keys, event_time)


def problems(spout: Spout, names: Iterable[str]) -> Iterator[str]:
    """Yield the problems of a spout's ``dedup`` as texts; none if it has no ``dedup``.

    Columns that the source lacks are reported elsewhere. ``names``: the names of all bolts and
    tables, which must not include ``<spout>.dedup``.
    """
    dedup, subject = spout.dedup, f"spout {spout.name!r}"
    if dedup is None:
        return
    types = _types_of(spout)
    for column in dict.fromkeys(dedup.columns):
        if types.get(column, "").startswith(_NO_KEYS):
            yield (
                f"dedup of {subject} must name columns of text, bytes, integers, decimals or "
                f"times, got {column!r} of {types[column]}; add a column with the id as text"
            )
    time = dedup.event_time
    kind = "timestamp" if time is None else types.get(time, "timestamp")
    if not kind.startswith("timestamp"):
        yield (
            f"event_time of {subject} must name a column of timestamps, got {time!r} of {kind}; "
            "cast it"
        )
    if not spout.tracked:
        yield (
            f"{subject} has dedup but is untracked, and an untracked record is never ACKED; "
            "remove dedup or tracked=False"
        )
    if spout.ordered_by:
        yield (
            f"{subject} has dedup and ordered_by, and the exchange by the key of dedup does not "
            "keep the order of records; remove one of them, or order a spout that reads the "
            "deduplicated records"
        )
    if f"{spout.name}{DEDUP}" in names:
        yield (
            f"a bolt or table must not be named {f'{spout.name}{DEDUP}'!r}, because ackcore makes "
            f"a bolt and a table of this name for dedup of {subject}; rename it"
        )


def _types_of(spout: Spout) -> dict[str, str]:
    """Return the types of a spout's columns as text, by name; none if it declares no types."""
    source: Any = spout.source
    # A DataFrame may have a column "emits", and one of Spark Connect has columns of any name.
    schema = source.schema if spout.kind is None else source.emits
    if isinstance(schema, pa.Schema):
        return {field.name: str(field.type) for field in schema}
    fields = getattr(schema, "fields", ())  # of Spark's StructType
    return {field.name: field.dataType.simpleString() for field in fields}


def with_dedup(
    spouts: Sequence[Spout],
    bolts: Sequence[BoltSpec],
    sinks: Sequence[SinkSpec],
    tables: Sequence[TableSpec],
) -> tuple[list[BoltSpec], list[SinkSpec], list[TableSpec]]:
    """Return the bolts, sinks and tables of a topology, with a bolt and a table for each ``dedup``.

    The readers of a spout with ``dedup`` are changed to read its bolt. Raises ValueError if a
    column of a key has a reserved name.
    """
    instead = {spout.name: spout.emitter for spout in spouts}

    def of(component: str) -> str:
        return instead.get(component, component)

    added, seen = [], []
    for spout in spouts:
        if spout.dedup is None:
            continue
        name, dedup = spout.emitter, spout.dedup
        schema = pa.schema([*((one, pa.binary()) for one in dedup.columns), (AT_MS, pa.int64())])
        # The types of the records are known when the source is read.
        records = pa.schema([(column, pa.null()) for column in spout.fields])
        added.append(
            BoltSpec(
                name,
                DedupBolt(spout.name, dedup),
                {DEFAULT_STREAM: records, SEEN: schema},
                None,
                (Input(spout.name, DEFAULT_STREAM, Grouping("fields", dedup.columns)),),
            )
        )
        ttl_s = MAX_TTL_S if dedup.within_s is None else dedup.within_s
        shape = TableShape.of(
            name, schema, dedup.columns, {"_ackcore_acked": count()}, ttl_s, AT_MS
        )
        seen.append(TableSpec(name, name, SEEN, shape))
    for bolt in bolts:
        inputs = tuple(replace(each, component=of(each.component)) for each in bolt.inputs)
        added.append(replace(bolt, inputs=inputs))
    return (
        added,
        [replace(sink, component=of(sink.component)) for sink in sinks],
        [*seen, *(replace(table, component=of(table.component)) for table in tables)],
    )


def duplicates_in(emitted: Mapping[str, Mapping[str, int]]) -> int:
    """Return the number of records that ``dedup`` found to be duplicates.

    ``emitted``: the number of emitted tuples, by component and stream.
    """
    return sum(
        streams.get(DUPLICATES, 0) for name, streams in emitted.items() if name.endswith(DEDUP)
    )
