"""The parts of a topology: spouts, bolts, sinks, tables, and the groupings of streams.

The groupings are Storm's, with one difference. Spark cuts the source into partitions before a
topology reads it, so tuples are already spread over tasks, and a tuple that stays in its task costs
nothing. Hence *shuffle* moves tuples only to a bolt with a parallelism of its own, and
*local-or-shuffle* never moves them. The other groupings always do, because they prescribe a task.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import TopologicalSorter
from typing import Any, Literal, NamedTuple

import pyarrow as pa

from ackcore.tables.aggregates import Aggregate
from ackcore.tables.table_shape import TableShape
from ackcore.tables.time_windows import START, Window
from ackcore.topology.components import DEFAULT_STREAM, Component
from ackcore.topology.expectations import Expectations
from ackcore.topology.table_views import (
    CHANGES,
    CLOSED,
    ClosedWindows,
    change_streams,
    closed_streams,
)

#: The end of the name of the bolt and the table for the duplicates of a spout.
DEDUP = ".dedup"


GroupingName = Literal["shuffle", "local_or_shuffle", "fields", "partial_key", "all", "global"]


@dataclass(frozen=True, slots=True)
class Grouping:
    """The assignment of a stream's tuples to the tasks of a bolt.

    ``name``: ``"shuffle"`` spreads tuples evenly over the bolt's tasks, if the bolt has a
    parallelism of its own; otherwise it leaves each tuple in its task, as ``"local_or_shuffle"``
    always does. ``"fields"`` sends tuples with equal values of the fields ``keys`` to the same
    task, ``"partial_key"`` to one of two tasks, so that a bolt that reads the results must combine
    two of them for each key. ``"all"`` sends a copy of each tuple to every task; the tuple's tree
    completes when all copies are acked. ``"global"`` sends all tuples to one task.
    """

    name: GroupingName
    keys: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}({', '.join(self.keys)})" if self.keys else self.name

    def moves(self, parallelism: int | None) -> bool:
        """Return whether tuples may be sent to another task than the one that emitted them.

        ``parallelism``: the bolt's own number of tasks; with None, ``"shuffle"`` moves none.
        """
        if self.name == "shuffle":
            return parallelism is not None
        return self.name != "local_or_shuffle"


@dataclass(frozen=True, slots=True)
class Input:
    """A stream that a bolt reads, and the grouping of its tuples."""

    component: str
    stream: str
    grouping: Grouping


class Dedup(NamedTuple):
    """The key of a spout's records, and how long it is kept, to recognise duplicates."""

    columns: tuple[str, ...]  # the columns of the key
    within_s: float | None  # the seconds for which the key of an ACKED record is kept
    within_keys: int | None  # the number of keys that are kept; older ones are forgotten
    #: The column of the time that `within_s` counts from; None for the time of arrival.
    event_time: str | None


@dataclass(frozen=True, slots=True, eq=False)
class Spout:
    """A spout: a source of records and its options. Its only stream is ``"default"``."""

    name: str  # the name of the component
    source: Any  # the records. This package uses only the names of its columns
    fields: tuple[str, ...]  # the names of its columns
    #: The columns that identify a record; empty if ackcore numbers the records.
    message_id: tuple[str, ...]
    tracked: bool  # whether its records are retried until they are ACKED or DEAD
    unique: bool  # whether `message_id` is known to be unique, so that it is not checked
    #: The consumer group whose offsets are committed, for Spark's own Kafka source.
    group: Any = None
    #: The columns of a key. No record overtakes an earlier one with the same key. Empty for none.
    ordered_by: tuple[str, ...] = ()
    expect: tuple[Expectations, ...] = ()  # the conditions of its tuples
    dedup: Dedup | None = None  # the key by which duplicates are recognised

    @property
    def checks_ids(self) -> bool:
        """Whether each micro-batch is checked for duplicate message ids, which are an error.

        Not for an untracked spout, with ``dedup``, with ``unique``, or if ackcore numbers records.
        """
        return self.tracked and bool(self.message_id) and not self.unique and self.dedup is None

    @property
    def emitter(self) -> str:
        """The component that readers read: ``<spout>.dedup``, a bolt, or ``name`` without dedup."""
        return self.name if self.dedup is None else f"{self.name}{DEDUP}"

    @property
    def kind(self) -> str | None:
        """The kind of a source that ackcore reads, such as ``"kafka"``; None for a DataFrame."""
        return kind_of(self.source)


def kind_of(source: Any) -> str | None:
    """Return the kind of a source that ackcore reads, such as ``"kafka"``; None for a DataFrame."""
    # Look at the class: a DataFrame has an attribute for each column, its class does not.
    kind: str | None = getattr(type(source), "source_kind", None)
    return kind


@dataclass(frozen=True, slots=True, eq=False)
class BoltSpec:
    """A bolt, its inputs, and its output streams."""

    name: str  # the name of the component
    component: Component  # the bolt itself
    schemas: Mapping[str, pa.Schema]  # the schema of each stream that it emits
    parallelism: int | None  # the requested number of tasks; None for the default
    inputs: tuple[Input, ...]  # its inputs, as declared
    expect: tuple[Expectations, ...] = ()  # the conditions of its tuples


@dataclass(frozen=True, slots=True, eq=False)
class SinkSpec:
    """A sink: its writer, and the component and stream that it writes."""

    name: str
    component: str
    stream: str
    writer: Any
    #: The classes of the writer's errors after which a batch is bisected to the refused rows.
    isolate: tuple[type[BaseException], ...] = ()
    #: Whether rows are refused even if no other part of the batch could be written.
    isolate_alone: bool = False


class DeclaredTable(NamedTuple):
    """The arguments of a table, before its key and values are checked against its stream."""

    name: str
    component: str
    stream: str
    key: tuple[str, ...]
    value: Mapping[str, Aggregate]
    ttl_s: float | None
    window: Window | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TableSpec:
    """A table of the checkpoint, and the stream whose rows are folded into it."""

    name: str
    component: str
    stream: str
    shape: TableShape


@dataclass(frozen=True, eq=False)
class Parts:
    """The spouts, bolts, sinks and tables of a topology, by name."""

    spouts: Mapping[str, Spout]
    bolts: Mapping[str, BoltSpec]
    sinks: Mapping[str, SinkSpec]
    tables: Mapping[str, TableSpec] = field(default_factory=dict, kw_only=True)

    def table_read(self, sink: SinkSpec) -> TableSpec | None:
        """Return the table whose changes or closed windows a sink reads; None for other sinks."""
        for end in (CHANGES, CLOSED):
            if sink.component.endswith(end):
                return self.tables.get(sink.component.removesuffix(end))
        return None

    def sink_schema(self, sink: SinkSpec) -> pa.Schema | None:
        """Return the schema of a sink's rows; None for a sink of a spout, also with ``dedup``."""
        table = self.table_read(sink)
        if table is not None:
            streams = closed_streams if sink.component.endswith(CLOSED) else change_streams
            return streams(table.shape)[sink.stream]
        if self.source_of(sink.component) is not None:
            return None
        return self.bolts[sink.component].schemas[sink.stream]

    def source_of(self, component: str) -> Spout | None:
        """Return the spout for its own name or its `emitter`'s; None for any other component."""
        spout = self.spouts.get(component) or self.spouts.get(component.removesuffix(DEDUP))
        return spout if spout is not None and component in (spout.name, spout.emitter) else None

    def spouts_of(self, component: str) -> tuple[str, ...]:
        """Return the names of the spouts whose records reach a component, in declared order.

        A spout is reached by itself alone. ``<table>.closed`` is such a spout: those that fill the
        table do not count. Returns () for an unknown name.
        """
        reached, left = set[str](), [component]
        while left:
            name = left.pop()
            if name not in reached:
                reached.add(name)
                if name in self.bolts:
                    left += [each.component for each in self.bolts[name].inputs]
        return tuple(name for name in self.spouts if name in reached)

    @property
    def closed(self) -> dict[str, TableSpec]:
        """The tables whose closed windows bolts or tables read, by name ``<table>.closed``."""
        return {
            name: self.tables[spout.source.shape.name]
            for name, spout in self.spouts.items()
            if spout.kind == ClosedWindows.source_kind
        }

    def tables_before(self, table: TableSpec) -> tuple[str, ...]:
        """Return the names of the tables whose closed windows reach a table, also through bolts."""
        closed = self.closed
        return tuple(closed[one].name for one in self.spouts_of(table.component) if one in closed)

    @cached_property
    def tables_in_order(self) -> tuple[TableSpec, ...]:
        """The tables, each after those whose closed windows reach it."""
        graph = {name: self.tables_before(table) for name, table in self.tables.items()}
        return tuple(self.tables[name] for name in TopologicalSorter(graph).static_order())

    @property
    def written(self) -> frozenset[tuple[str, str]]:
        """The component and name of each stream of a spout or bolt that a sink or table reads."""
        sinks = {  # without those of sinks that read tables, which are no streams of a run
            (sink.component, sink.stream)
            for sink in self.sinks.values()
            if self.table_read(sink) is None
        }
        return frozenset(
            sinks | {(table.component, table.stream) for table in self.tables.values()}
        )

    @cached_property
    def structure(self) -> dict[str, Any]:
        """The part of the topology that a checkpoint depends on, as plain JSON.

        It has names, fields, types, message ids, groupings and the shapes of tables, but no code,
        source, writer, parallelism or setting. The order of declarations has no effect.
        """
        tables = {
            table.name: {"from": [table.component, table.stream], **table.shape.structure()}
            for table in self.tables.values()
        }
        return {
            "spouts": {
                spout.name: {
                    "fields": list(spout.fields),
                    "message_id": list(spout.message_id),
                    "tracked": spout.tracked,
                    # Left out for a DataFrame: structures in older checkpoints have no source.
                    **({} if spout.kind is None else {"source": spout.kind}),
                }
                for spout in self.spouts.values()
            },
            "bolts": {
                bolt.name: {
                    "inputs": sorted(
                        [each.component, each.stream, each.grouping.name, *each.grouping.keys]
                        for each in bolt.inputs
                    ),
                    "streams": {
                        stream: [[field.name, str(field.type), field.nullable] for field in schema]
                        for stream, schema in bolt.schemas.items()
                    },
                }
                for bolt in self.bolts.values()
            },
            "sinks": {sink.name: [sink.component, sink.stream] for sink in self.sinks.values()},
            **({} if not tables else {"tables": tables}),
        }

    @cached_property
    def fingerprint(self) -> str:
        """A hash of `structure`, in hex; the same in every process."""
        text = json.dumps(self.structure, sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def with_closed(
    declared: Sequence[DeclaredTable], spouts: Sequence[Spout], bolts: Sequence[BoltSpec]
) -> tuple[list[TableSpec], list[Spout], list[str]]:
    """Return the checked tables, the spouts ``<table>.closed``, and the problems as texts.

    A table with windows has such a spout if a bolt or a table reads it. The rows of the windows
    that a micro-batch closes are its records in the next one. A table whose key or value does not
    fit its stream is left out with a problem; one whose stream is unknown, without one.
    """
    schemas = {
        (bolt.name, stream): schema for bolt in bolts for stream, schema in bolt.schemas.items()
    }
    schemas |= {
        (spout.name, DEFAULT_STREAM): spout.source.emits
        for spout in spouts
        if spout.kind is not None  # the types of a DataFrame are known when it is read
    }
    read = {each.component for bolt in bolts for each in bolt.inputs}
    read |= {table.component for table in declared}
    tables: dict[str, TableSpec] = {}
    closed: list[Spout] = []
    wrong: list[str] = []
    left = list(declared)
    while ready := [one for one in left if (one.component, one.stream) in schemas]:
        left = [one for one in left if one not in ready]
        for table in ready:
            name, component, stream, key, value, ttl_s, window = table
            schema = schemas[component, stream]
            try:
                shape = TableShape.of(name, schema, key, value, ttl_s, window=window)
            except (TypeError, ValueError) as error:
                wrong.append(str(error))
                continue
            tables[name] = TableSpec(name, component, stream, shape)
            spout = f"{name}{CLOSED}"
            if spout in read and window is not None:
                source = ClosedWindows(shape)
                ids = (*key, START)
                closed.append(Spout(spout, source, tuple(source.schema.names), ids, True, True))
                schemas[spout, DEFAULT_STREAM] = source.emits
    order = [table.name for table in declared]
    return sorted(tables.values(), key=lambda one: order.index(one.name)), closed, wrong
