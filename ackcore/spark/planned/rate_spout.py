"""A planned source of numbers, for tests and demonstrations."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any, ClassVar

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from ackcore._columns import as_count, positive
from ackcore._error_hints import naming_arguments
from ackcore.spark.planned.planned_source import PlannedSource


class RateSpout(PlannedSource):
    """The numbers 0, 1, 2, ... as a source for tests and demonstrations.

    It emits one column, ``value`` (int64).

    Parameters
    ----------
    rows : int, optional
        The number of rows in all. Required without `per_s`; None for no end.
    per_s : float, optional
        The rows per second, counted from the first start of the checkpoint. None: all rows exist
        at once.
    max_rows_per_batch : int, default 10,000
        The maximum number of rows in a micro-batch.
    clock : callable, optional
        Returns seconds since 1970.
    """

    source_kind: ClassVar[str] = "rate"
    schema = pa.schema([pa.field("value", pa.int64())])
    repeatable = True

    @naming_arguments
    def __init__(
        self,
        rows: int | None = None,
        *,
        per_s: float | None = None,
        max_rows_per_batch: int = 10_000,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if rows is None and per_s is None:
            raise ValueError("RateSpout must have rows or per_s, got neither")
        self._rows = None if rows is None else as_count(rows, "rows", 0)
        self._per_s = None if per_s is None else positive(per_s, "per_s", unit="rows a second")
        self._most = as_count(max_rows_per_batch, "max_rows_per_batch", 1)
        self._clock = clock
        self._began: float | None = None

    def __repr__(self) -> str:
        return f"RateSpout({self._rows}, per_s={self._per_s})"

    def bounded(self) -> RateSpout:
        """Return a copy that makes no rows after the present time."""
        found, now = copy.copy(self), self._clock()
        found._clock = lambda: now
        return found

    def plan(self, previous: Any) -> Any:
        """Return the range of the next numbers that exist by now, or None if there is none."""
        first, now = 0, self._clock()
        if previous is not None:
            first, self._began = previous["to"], previous["began"]
        began = self._began = now if self._began is None else self._began
        last = first + self._most
        if self._per_s is not None:
            last = min(last, int((now - began) * self._per_s))
        if self._rows is not None:
            last = min(last, self._rows)
        return {"from": first, "to": last, "began": began} if first < last else None

    def divided(self, plan: Any, tasks: int) -> Any:
        """Return the plan with the number of tasks among which `read` divides the numbers."""
        return {**plan, "tasks": tasks}

    def read(self, spark: SparkSession, plan: Any) -> DataFrame:
        """Return the numbers of a plan."""
        return spark.range(plan["from"], plan["to"], 1, plan["tasks"]).toDF("value")
