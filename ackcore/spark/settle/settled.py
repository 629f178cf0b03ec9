"""The transfer of settled rows from Python to the JVM: few and narrow columns, widened there.

Handing a row over costs some 10 ns for each column and more for text, in Python and in the JVM.  So
a task hands over ``root_id``, ``val``, and ``marks`` with everything small in one number; times and
reasons only where there may be some.  A projection makes the documented columns of that, compiled
by Spark into whatever comes next: what that does not ask for is not made.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame

from ackcore._records import Settled
from ackcore.arrow import STATUS_NAMES

# What is never null spares the JVM a look at each row.
_ALWAYS, _TIMES = ("root_id", "marks", "val"), ("first_ms", "last_ms")

# marks: task | flags | inits | status, the task in the upper bits as it may be -1.
_INITS, _FLAGS, _TASK = 4, 8, 12

#: Statuses in the order of how many rows have them, for it is asked in this order.
_STATUSES = ("ACKED", "OPEN", "FAILED", "EXPIRED", "ORPHAN", "ANOMALY")


class Narrow(NamedTuple):
    """The form in which settled rows cross."""

    #: Whether there may be times, and reasons; without them the columns do not cross.
    times: bool
    reasons: bool

    @property
    def ddl(self) -> str:
        """The columns, for ``mapInArrow``."""
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
        """Return rows with these reasons as a batch of `ddl`."""
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
        """Return the documented columns of rows that crossed; any of them may be null, formally."""
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
        # With a null in it a column may be null: the schema is the same whatever crossed.  Spark's
        # optimizer takes it away.  Text, as columns would cost some 500 calls of the JVM.
        return rows.selectExpr(
            *(f"if(false, null, {value}) as {name}" for name, value in columns.items())
        )
