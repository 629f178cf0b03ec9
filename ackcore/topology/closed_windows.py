"""Bolts and tables that read closed windows, ``<table>.closed``.

`TopologyBuilder.build` declares a spout of this name for them. The rows of the windows that a
micro-batch closes are the records of this spout in the next one, so everything that holds for
records holds for them. The engine's part is in `ackcore.spark.engine.closed_rows`.
"""

from __future__ import annotations

from collections.abc import Sequence

from ackcore.tables.time_windows import START
from ackcore.topology.components import DEFAULT_STREAM
from ackcore.topology.parts import BoltSpec, DeclaredTable, Spout, TableSpec
from ackcore.topology.table_views import CLOSED, ClosedWindows


def with_closed(
    declared: Sequence[DeclaredTable], spouts: Sequence[Spout], bolts: Sequence[BoltSpec]
) -> tuple[list[TableSpec], list[Spout], list[str]]:
    """Return the tables, the spouts of the closed windows that are read, and the problems found.

    A table is missing if its stream is unknown, or its key or a value does not fit the stream.
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
            try:
                spec = table.spec(schemas[table.component, table.stream])
            except (TypeError, ValueError) as error:
                wrong.append(str(error))
                continue
            tables[table.name] = spec
            name = f"{table.name}{CLOSED}"
            if name in read and table.window is not None:
                source = ClosedWindows(spec.shape)
                ids = (*table.key, START)
                closed.append(Spout(name, source, tuple(source.schema.names), ids, True, True))
                schemas[name, DEFAULT_STREAM] = source.emits
    order = [table.name for table in declared]
    return sorted(tables.values(), key=lambda one: order.index(one.name)), closed, wrong
