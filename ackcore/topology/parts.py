"""The parts of a topology: spouts, bolts and sinks, and the streams between them.

Nothing here checks anything: the builder does, before it makes any of these.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa

from ackcore.topology.components import DEFAULT_STREAM, Component
from ackcore.topology.groupings import Grouping
from ackcore.topology.max_refused import MAX_REFUSED


@dataclass(frozen=True, slots=True)
class Input:
    """A stream that a bolt reads, and how its tuples are dealt out to the bolt's tasks."""

    component: str
    stream: str
    grouping: Grouping


@dataclass(frozen=True, slots=True, eq=False)
class Spout:
    """The source of records.  Its only stream is ``"default"``.

    Parameters
    ----------
    name : str
        Of the component.
    source : DataFrame or KafkaSpout
        The records.  Only the names of its columns are used in this package.
    fields : tuple of str
        The names of its columns.
    message_id : tuple of str
        The columns that tell one record from another; empty if ids are stamped.
    tracked : bool
        Whether its records are retried until they are ACKED or DEAD.
    unique : bool
        Whether `message_id` is known to be unique, so that nothing need check it.
    group : KafkaGroup or None
        Who is told which offsets are done, if the source is Spark's own for Kafka.
    ordered_by : tuple of str
        The columns of a key of which no record overtakes an earlier one; empty for none.
    """

    name: str
    source: Any
    fields: tuple[str, ...]
    message_id: tuple[str, ...]
    tracked: bool
    unique: bool
    group: Any = None
    ordered_by: tuple[str, ...] = ()

    @property
    def kind(self) -> str | None:
        """The kind of a source that tasks read themselves: ``"kafka"``; None for a DataFrame."""
        return kind_of(self.source)


def kind_of(source: Any) -> str | None:
    """Return what a source is if tasks read it by themselves, None for a DataFrame."""
    # A DataFrame has each of its columns for an attribute, and its class has not.
    kind: str | None = getattr(type(source), "source_kind", None)
    return kind


@dataclass(frozen=True, slots=True, eq=False)
class BoltSpec:
    """A bolt, what it reads, and what it emits.

    Parameters
    ----------
    name : str
        Of the component.
    component : Component
        The bolt itself.
    schemas : mapping from str to pyarrow.Schema
        Of each stream that it emits.
    parallelism : int or None
        How many tasks it was asked to have.
    inputs : tuple of Input
        What it reads, as declared.
    """

    name: str
    component: Component
    schemas: Mapping[str, pa.Schema]
    parallelism: int | None
    inputs: tuple[Input, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Sink:
    """A writer, and the stream that it is given.

    ``isolate`` has the classes of errors over which a batch is bisected, and ``isolate_alone`` says
    whether a row is refused though nothing else could be written; ``max_refused`` is how many rows
    of a micro-batch are looked for so.
    """

    name: str
    component: str
    stream: str
    writer: Any
    isolate: tuple[type[BaseException], ...] = ()
    isolate_alone: bool = False
    max_refused: int = MAX_REFUSED


@dataclass(frozen=True, eq=False)
class Parts:
    """The components of a topology and its sinks, by name, as declared."""

    spouts: Mapping[str, Spout]
    bolts: Mapping[str, BoltSpec]
    sinks: Mapping[str, Sink]

    def streams(self, component: str) -> tuple[str, ...]:
        """Return the names of a component's streams."""
        return (
            (DEFAULT_STREAM,) if component in self.spouts else tuple(self.bolts[component].schemas)
        )

    def fields(self, component: str, stream: str = DEFAULT_STREAM) -> tuple[str, ...]:
        """Return the names of a stream's fields."""
        if component in self.spouts:
            return self.spouts[component].fields
        return tuple(self.bolts[component].schemas[stream].names)

    @cached_property
    def structure(self) -> dict[str, Any]:
        """The parts that a checkpoint depends on, as plain JSON: names, fields, types and
        groupings.

        In it are neither code nor sources nor writers, no parallelism and no settings: those may
        change from one start to the next.  Nor does the order of declarations count.
        """
        return {
            "spouts": {
                spout.name: {
                    "fields": list(spout.fields),
                    "message_id": list(spout.message_id),
                    "tracked": spout.tracked,
                    # Left out for a DataFrame, as checkpoints of before have none.
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
        }

    @cached_property
    def fingerprint(self) -> str:
        """A hash of `structure`, in hex: the same in every process."""
        text = json.dumps(self.structure, sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, ...]:
    """Tell two structures apart, in words.

    Parameters
    ----------
    old, new : mapping
        The `Parts.structure` of each, perhaps read back from JSON.

    Returns
    -------
    tuple of str
        One for each component and sink that is not the same: ``"bolt 'count' is new"``,
        ``"spout 'lines' differs in its fields: ['line'] before, ['line', 'at'] now"``.
    """
    found = []
    for kind in ("spouts", "bolts", "sinks"):
        before, after = old.get(kind, {}), new.get(kind, {})
        for name in sorted({*before, *after}):
            subject = f"{kind[:-1]} {name!r}"
            if name not in after:
                found.append(f"{subject} is gone")
            elif name not in before:
                found.append(f"{subject} is new")
            elif before[name] != after[name]:
                found.append(f"{subject} {_difference(kind, before[name], after[name])}")
    return tuple(found)


def _difference(kind: str, before: Any, after: Any) -> str:
    if kind == "sinks":
        return f"reads another stream: {'/'.join(after)}, not {'/'.join(before)}"
    words = {"message_id": "message id", "tracked": "tracking"}
    keys = [key for key in {**after, **before} if before.get(key) != after.get(key)]
    names = " and ".join(words.get(key, key) for key in keys)
    values = "; ".join(f"{before.get(key)} before, {after.get(key)} now" for key in keys)
    return f"differs in its {names}: {values}"
