"""The columns of a spout: as its source has them, and as it emits them."""

from __future__ import annotations

import pyarrow as pa

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
