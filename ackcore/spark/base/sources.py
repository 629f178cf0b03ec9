"""The columns of a spout: as its source has them, and as it emits them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from ackcore.spark.base.schemas import ORDER
from ackcore.spark.base.versions import to_arrow_schema
from ackcore.topology.parts import Spout


def source_schema(spout: Spout) -> pa.Schema:
    """Return the columns of a spout's records, as they are kept if they wait or are dead."""
    schema = spout.source.schema
    return schema if isinstance(schema, pa.Schema) else to_arrow_schema(schema)


def emitted_schema(spout: Spout) -> pa.Schema:
    """Return the columns of what a spout emits."""
    if spout.kind is None:
        return source_schema(spout)
    schema: pa.Schema = spout.source.emits
    return schema


def kept_schemas(schemas: Mapping[str, pa.Schema], topology: Any) -> dict[str, pa.Schema]:
    """Return the columns that records have as long as they wait: with the order, if they have one.

    Parameters
    ----------
    schemas : mapping from str to pyarrow.Schema
        By spout, the source's.
    topology : Topology
        Says which spouts are ordered.
    """
    return {
        name: schema.append(pa.field(ORDER, pa.int64()))
        if topology.spouts[name].ordered_by
        else schema
        for name, schema in schemas.items()
    }
