"""The columns of a spout's records: in its source, as emitted, and while they wait."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from ackcore.spark.base.schemas import ORDER
from ackcore.spark.base.versions import to_arrow_schema
from ackcore.topology.parts import Spout


def source_schema(spout: Spout) -> pa.Schema:
    """Return the schema of a spout's source, which waiting and dead records keep."""
    schema = spout.source.schema
    return schema if isinstance(schema, pa.Schema) else to_arrow_schema(schema)


def emitted_schema(spout: Spout) -> pa.Schema:
    """Return the schema of the tuples that a spout emits."""
    if spout.kind is None:
        return source_schema(spout)
    schema: pa.Schema = spout.source.emits
    return schema


def kept_schemas(schemas: Mapping[str, pa.Schema], topology: Any) -> dict[str, pa.Schema]:
    """Return the schemas of waiting records: the source's, with `ORDER` for ordered spouts.

    Parameters
    ----------
    schemas : mapping from str to pyarrow.Schema
        The sources' schemas by spout.
    topology : Topology
        The topology, which has the spouts' order.
    """
    return {
        name: schema.append(pa.field(ORDER, pa.int64()))
        if topology.spouts[name].ordered_by
        else schema
        for name, schema in schemas.items()
    }
