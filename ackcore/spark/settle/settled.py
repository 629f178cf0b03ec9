"""The transfer of settled rows from Python to the JVM in few narrow columns, which Spark widens.

A transferred row costs some 10 ns for each column and more for text, in Python and in the JVM.  So
a task transfers ``root_id``, ``val``, and ``marks``, one number with all small columns.  Times and
reasons are only transferred if there may be some.  A projection makes the documented columns from
these.  Spark compiles it into the next operator, so columns that are not used are not made.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame

from ackcore._arrow import STATUS_NAMES
from ackcore._records import Settled

# For columns declared not null the JVM checks no rows.
_ALWAYS, _TIMES = ("root_id", "marks", "val"), ("first_ms", "last_ms")

# marks: task | flags | inits | status; the task is in the upper bits because it may be -1.
_INITS, _FLAGS, _TASK = 4, 8, 12

#: Statuses by decreasing frequency, the order in which the SQL expression compares them.
_STATUSES = ("ACKED", "OPEN", "FAILED", "EXPIRED", "ORPHAN", "ANOMALY")


class Narrow(NamedTuple):
    """The form in which settled rows are transferred."""

    #: Whether there may be times, and reasons; otherwise their columns are not transferred.
    times: bool
    reasons: bool

    @property
    def ddl(self) -> str:
        """The schema for ``mapInArrow``."""
        ddl = [f"{name} bigint not null" for name in _ALWAYS]
        if self.times:
            ddl += [f"{name} bigint" for name in _TIMES]
        if self.reasons:
            ddl.append("reason string")
        return ", ".join(ddl)

    @property
    def _schema(self) -> pa.Schema:
        fields = [pa.field(name, pa.int64(), nullable=False) for name in _ALWAYS]
        if self.times:
            fields += [pa.field(name, pa.int64()) for name in _TIMES]
        if self.reasons:
            fields.append(pa.field("reason", pa.string()))
        return pa.schema(fields)

    def batch(self, settled: Settled, texts: pa.Array) -> pa.RecordBatch:
        """Return settled rows with their reasons as a batch of `ddl`."""
        n = len(settled)
        marks = settled.tasks.astype(np.int64)
        marks <<= _TASK - _FLAGS
        marks |= settled.flags
        marks <<= _FLAGS - _INITS
        marks |= settled.inits
        marks <<= _INITS
        marks |= settled.statuses
        arrays = [pa.array(column) for column in (settled.root_ids, marks, settled.vals)]
        if self.times:
            for times in (settled.first_ms, settled.last_ms):
                arrays.append(pa.nulls(n, pa.int64()) if times is None else pa.array(times))
        if self.reasons:
            arrays.append(texts)
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def widen(self, rows: DataFrame) -> DataFrame:
        """Return the documented columns of transferred rows, all of them declared nullable."""
        statuses = " ".join(f"when {STATUS_NAMES.index(name)} then '{name}'" for name in _STATUSES)
        columns = {
            "root_id": "root_id",
            "status": f"case marks & 15 {statuses} end",
            "task": f"cast(shiftright(marks, {_TASK}) as int)",
            "val": "val",
            "inits": f"cast(shiftright(marks, {_INITS}) & 15 as tinyint)",
            "flags": f"cast(shiftright(marks, {_FLAGS}) & 15 as tinyint)",
            "first_ms": "first_ms" if self.times else "cast(null as bigint)",
            "last_ms": "last_ms" if self.times else "cast(null as bigint)",
            "reason": "reason" if self.reasons else "cast(null as string)",
        }
        # The null makes each column nullable, so that the schema is always the same.  Spark's
        # optimizer removes it.  As text, because Column objects would take some 500 JVM calls.
        return rows.selectExpr(
            *(f"if(false, null, {value}) as {name}" for name, value in columns.items())
        )
