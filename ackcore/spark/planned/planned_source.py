"""The base class of sources whose rows a plan names, and the simplest source."""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from ackcore._columns import as_count, count_or_none, positive
from ackcore._error_hints import naming_arguments


class SourceError(RuntimeError):
    """A planned source failed, or broke a rule of `PlannedSource`; the message names its spout."""


class PlannedSource(ABC):
    """The base class of sources whose rows a plan names, for `TopologyBuilder.spout`.

    For each micro-batch ackcore calls `plan`, records the plan in the checkpoint, and then calls
    `read`. A restart reads the recorded plan again and does not call `plan` for it. A source may
    therefore be a table with a growing key, or a service with a cursor. All methods run in the
    driver, on classic sessions and on Spark Connect.

    Attributes
    ----------
    schema : pyarrow.Schema
        The columns of the rows.
    repeatable : bool, default False
        Whether every `read` of a plan returns the same rows in the same order and the same
        partitions, also for a driver with another number of cores; see `divided`. Otherwise each
        run keeps a copy of the rows that it read.
    """

    #: The kind of the source in checkpoints: a checkpoint accepts no source of another kind.
    source_kind: ClassVar[str] = "planned"
    #: For the engine: the rows are emitted as they were read.
    deserializer: ClassVar[None] = None
    schema: pa.Schema
    repeatable: bool = False

    @abstractmethod
    def plan(self, previous: Any) -> Any:
        """Return the plan of the next micro-batch, or None if there is nothing new.

        May be called again with the same ``previous``: only a recorded plan counts.

        Parameters
        ----------
        previous : JSON value or None
            The last plan in this checkpoint, also before a restart, as `divided` returned it and
            JSON keeps it (tuples are lists); None at the first call.

        Returns
        -------
        JSON value or None
            A plan that names rows after those of ``previous``, for example ``{"from": 7, "to":
            12}``. If it equals one of the first 8 or last 56 plans, `SourceError` ends the query.

        Raises
        ------
        OSError, EOFError
            If the source cannot be reached at present. A stream calls the method again later. A
            temporary error of Spark restarts the micro-batch. Any other exception ends the query.
        """

    def bounded(self) -> PlannedSource:
        """Return the source for a query that ends, which takes the rows that exist at its start.

        By default this object. If rows arrive faster than micro-batches end, `plan` never returns
        None: such a source returns a copy whose `plan` leaves later rows to the next query.
        """
        return self

    def divided(self, plan: Any, tasks: int) -> Any:
        """Return a new plan as it is recorded; by default, unchanged.

        ``tasks`` is the number of tasks that the session runs at once. A repeatable source that
        divides its rows by this number adds it to the plan, because a later driver may have
        another number.
        """
        return plan

    @abstractmethod
    def read(self, spark: SparkSession, plan: Any) -> DataFrame:
        """Return the rows of a recorded plan, in the columns of `schema`; may be called again.

        A stream repeats a micro-batch after OSError, EOFError and temporary errors of Spark. Any
        other exception ends the query with `SourceError`.
        """

    def check(self, plan: Any) -> None:  # noqa: B027 - optional
        """Raise an exception if the rows of a plan are no longer the planned ones.

        Called after each reading, and before a reading is repeated, until the micro-batch is
        decided. Exceptions have the effects that `read` describes. By default it does nothing.
        """

    def done(self, plan: Any) -> None:  # noqa: B027 - optional
        """Take note that all rows of a plan are ACKED, DEAD, or kept in the checkpoint for retries.

        Plans are done in their order, so all earlier plans are done, too. The method may delete the
        rows. After a restart it is called again for the last plan. An exception is logged.
        """

    @property
    def columns(self) -> list[str]:
        """The names of the columns in `emits`. Raises TypeError if `schema` is missing or empty."""
        schema = getattr(self, "schema", None)
        if not isinstance(schema, pa.Schema) or not schema.names:
            got = "one without" if isinstance(schema, pa.Schema) else type(schema).__name__
            raise TypeError(
                f"schema of {self!r} must be a pyarrow.Schema with at least one column, got {got}; "
                'pa.schema([("id", pa.int64())]) is one'
            )
        return list(self.emits.names)

    @property
    def emits(self) -> pa.Schema:
        """The columns of the emitted tuples; by default, those of `schema`."""
        return self.schema


class DividedSource(PlannedSource):
    """The base class of sources with equal rows in each `read`, divided as the plan says."""

    repeatable = True

    def divided(self, plan: Any, tasks: int) -> Any:
        """Return the plan with the number of tasks among which `read` divides its rows."""
        return {**plan, "tasks": tasks}


class RateSpout(DividedSource):
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
            raise ValueError(
                "RateSpout must have rows or per_s, got neither; RateSpout(100) ends after 100 rows"
            )
        self._rows = count_or_none(rows, "rows", 0)
        self._per_s = None if per_s is None else positive(per_s, "per_s", unit="rows a second")
        self._most = as_count(max_rows_per_batch, "max_rows_per_batch", 1)
        self._clock = clock
        self._began: float | None = None

    def __repr__(self) -> str:
        return f"RateSpout({self._rows}, per_s={self._per_s})"

    def bounded(self) -> RateSpout:
        """Return a copy whose `plan` ends with the rows that exist at the time of this call."""
        found, now = copy.copy(self), self._clock()
        found._clock = lambda: now
        return found

    def plan(self, previous: Any) -> Any:
        """Return a plan of the next numbers that exist by now; None if there is none.

        It has at most ``max_rows_per_batch`` numbers. Time counts from the first plan.
        """
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

    def read(self, spark: SparkSession, plan: Any) -> DataFrame:
        """Return the numbers of a plan, in the column ``value``."""
        return spark.range(plan["from"], plan["to"], 1, plan["tasks"]).toDF("value")


def any_of(looks: Sequence[Callable[[], bool]]) -> bool:
    """Return whether any function in ``looks`` returns True.

    Calls them until one does. Raises a `SourceError` at once, another exception only if none
    returns True: the first one.
    """
    errors = []
    for look in looks:
        try:
            if look():
                return True
        except SourceError:
            raise
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return False
