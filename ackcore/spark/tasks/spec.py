"""What every task of a run has to do: the same for all of them, and pickled into each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from ackcore.spark.tasks.exchange import SETTLE
from ackcore.topology.components import Component
from ackcore.topology.stage_layout import Edge, Layout

#: Bytes that are taken in, or handed on, at a time, if that is fewer rows than otherwise.
CHUNK_BYTES = 1 << 25

#: What carries a tuple's identity beside its fields.
IDENTITY_FIELDS = (
    pa.field("_ackcore_message_id", pa.string()),
    pa.field("_ackcore_attempt", pa.int32()),
    pa.field("_ackcore_stable_id", pa.int64()),
)


@dataclass(frozen=True)
class TaskSpec:
    """What the tasks of a run do.

    Attributes
    ----------
    layout : Layout
        The components by level, and the edges between them.
    components : mapping from str to Component
        By bolt.
    schemas : mapping from (str, str) to pyarrow.Schema
        By component and stream.
    key, number : int
        Of the micro-batch.
    dests : int
        Tasks behind every exchange.
    chunk_rows : int
        What the first stage takes in at a time.
    directory : str
        Of the run, shared with the driver.
    reject : tuple
        Exceptions that fail a tuple for good.
    careful : bool
        Whether in-flight markers name roots.
    suspects : mapping from int to int
        By root that is run alone, how often it was alone in flight when an attempt died.
    rejected : frozenset of int
        Roots that fail instead of being run.
    isolates : bool
        Whether the markers of earlier attempts at a task are about the same rows.
    timeout_s : int or None
        How long a bolt may take for what it was handed.
    """

    layout: Layout
    components: Mapping[str, Component]
    schemas: Mapping[tuple[str, str], pa.Schema]
    key: int
    number: int
    dests: int
    chunk_rows: int
    directory: str
    reject: tuple[str | type[BaseException], ...]
    careful: bool = False
    suspects: Mapping[int, int] = field(default_factory=dict)
    rejected: frozenset[int] = frozenset()
    isolates: bool = False
    timeout_s: int | None = None

    def sends(self, level: int) -> tuple[int, ...]:
        """Return the levels at which something from this one may be opened."""
        if not self.layout.settles:
            return ()
        later = {
            edge.level_to
            for edge in self.layout.edges
            if edge.level_from == level and edge.level_to > level
        }
        return (*sorted(later), SETTLE)

    def edge_schema(self, edge: Edge) -> pa.Schema:
        """Return the columns of what is sent along an edge."""
        schema = self.schemas[edge.source, edge.stream]
        if edge.target in self.layout.needs_identity:
            for column in IDENTITY_FIELDS:
                schema = schema.append(column)
        return schema
