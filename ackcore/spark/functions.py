"""Ids and routing as functions of Columns, computed by Arrow UDFs.

They call `ackcore.ids`, so a column has the same ids that a bolt in plain Python would compute.
The functions are pure, so a task that runs again computes the same values.

    key = ackcore.ids.spout_key(deployment_key, "lines", "access-log", generation=1)
    events = kafka.select(functions.root_id(key, "partition", "offset", 0).alias("root_id"), ...)

A column can be given as a Column or by name and, where documented, as one integer for all rows.
Nulls and integers out of range raise when the job runs; the error names the column.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql import functions as sql
from pyspark.sql.types import DataType, IntegerType, LongType
from pyspark.sql.utils import is_remote

from ackcore import _columns, ids
from ackcore._arrow.arrow_tables import integers, refuse_nulls
from ackcore.spark.base.session import refuse_no_session
from ackcore.spark.base.versions import active_context, arrow_udf
from ackcore.spark.base.workers import use_drivers_python

ColumnOrName = Column | str


def root_id(
    key: int, partition: ColumnOrName | int, offset: ColumnOrName, attempt: ColumnOrName | int = 0
) -> Column:
    """Return the root ids of attempts at records: `ackcore.ids.root_ids`.

    Parameters
    ----------
    key : int
        The spout's key, from `ackcore.ids.spout_key`.
    partition, attempt : Column, str or int
        Integers in 0..2**16-1 and 0..2**6-1.
    offset : Column or str
        Integers in 0..2**42-1.

    Returns
    -------
    pyspark.sql.Column
        A column of type bigint.
    """
    spout = _columns.as_id(key, "key")

    def compute(partitions: pa.Array, offsets: pa.Array, attempts: pa.Array) -> pa.Array:
        return pa.array(
            ids.root_ids(
                spout,
                integers(partitions, "partition", pa.int32()),
                integers(offsets, "offset", pa.int64()),
                integers(attempts, "attempt", pa.int32()),
            )
        )

    return _call(
        "root_id", compute, LongType(), partition=partition, offset=offset, attempt=attempt
    )


def edge_id(
    key: int,
    root_id: ColumnOrName,
    component: str | int,
    parent_edge: ColumnOrName | int,
    ordinal: ColumnOrName | int,
) -> Column:
    """Return the ids of deliveries by one component: `ackcore.ids.edge_ids`.

    Parameters
    ----------
    key : int
        The spout's key, from `ackcore.ids.spout_key`.
    root_id : Column or str
        The roots that the tuples are anchored to.
    component : str or int
        The emitter: its name (not a column's name), or the result of `ackcore.ids.component_key`.
    parent_edge : Column, str or int
        The edges on which the emitter received its inputs; 0 for a spout.
    ordinal : Column, str or int
        The positions among the siblings, from 0.

    Returns
    -------
    pyspark.sql.Column
        A column of type bigint, never 0.
    """
    spout = _columns.as_id(key, "key")
    emitter = ids.component_key(component)

    def compute(roots: pa.Array, parents: pa.Array, ordinals: pa.Array) -> pa.Array:
        return pa.array(
            ids.edge_ids(
                spout,
                integers(roots, "root_id", pa.int64()),
                emitter,
                integers(parents, "parent_edge", pa.int64()),
                integers(ordinals, "ordinal", pa.int64()),
            )
        )

    return _call(
        "edge_id", compute, LongType(), root_id=root_id, parent_edge=parent_edge, ordinal=ordinal
    )


def acker_task(root_id: ColumnOrName, n: int) -> Column:
    """Return the acker of each root as in Storm, from 0 to n - 1: `ackcore.ids.acker_task`.

    Parameters
    ----------
    root_id : Column or str
        The roots.
    n : int
        The number of ackers, at least 1.

    Returns
    -------
    pyspark.sql.Column
        A column of type int.
    """
    ackers = _columns.as_count(n, "n", 1, _columns.MAX_TASK)

    def compute(roots: pa.Array) -> pa.Array:
        return pa.array(ids.acker_task(integers(roots, "root_id", pa.int64()), ackers))

    return _call("acker_task", compute, IntegerType(), root_id=root_id)


def xor_edges(edges: ColumnOrName) -> Column:
    """Return the XOR of the edge ids in each array: the init val of a row's deliveries.

    ``edges``: a column of type array<bigint>.

    Returns
    -------
    pyspark.sql.Column
        A column of type bigint; 0 for an empty array.
    """

    if not isinstance(edges, Column | str):
        raise TypeError(f"edges must be a Column or a column's name, got {type(edges).__name__}")

    def compute(arrays: pa.Array) -> pa.Array:
        if not (pa.types.is_list(arrays.type) or pa.types.is_large_list(arrays.type)):
            raise TypeError(
                f"edges must be a column of array<bigint>, got a column of Arrow's {arrays.type}"
            )
        refuse_nulls(arrays, "edges")
        values = integers(arrays.flatten(), "edges", pa.int64())
        rows = np.repeat(
            np.arange(len(arrays)), arrays.value_lengths().to_numpy(zero_copy_only=False)
        )
        return pa.array(ids.xor_by_parent(rows, values, len(arrays)))

    return _call("xor_edges", compute, LongType(), edges=edges)


def _operand(value: Any, name: str) -> Column:
    """Return an argument as a Column: a Column, a column's name, or one integer for all rows.

    Raises TypeError for another value, and ValueError without a session. ``name``: its name.
    """
    refuse_no_session()
    if isinstance(value, Column):
        return value
    if isinstance(value, str):
        return sql.col(value)
    # True would be accepted as 1.
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(
            f"{name} must be a Column, a column's name or an integer, got {type(value).__name__}"
        )
    return sql.lit(_columns.as_id(value, name)).cast("bigint")


def _call(
    name: str, compute: Callable[..., pa.Array], returns: DataType, **operands: ColumnOrName | int
) -> Column:
    columns = [_operand(value, operand) for operand, value in operands.items()]
    compute.__name__ = name  # shown in plans and as the name of unnamed columns
    if not is_remote():
        use_drivers_python(active_context())
    return arrow_udf(compute, returns)(*columns)
