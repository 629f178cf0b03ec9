"""`attempt`: a function tried on each row of a frame, whose errors become a column.

Nothing is tracked and nothing recorded: it is a single mapInArrow, so it is lazy, and works in
batches, in streams and on Spark Connect.  `guard` is the next step, with the same function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import StructField, StructType

from ackcore.calls import CallSettings
from ackcore.calls.settings import exception_classes
from ackcore.flow import Limit
from ackcore.spark.base.batches import plainly_named
from ackcore.spark.base.pickling import refuse_unpicklable
from ackcore.spark.base.session import refuse_frame
from ackcore.spark.base.versions import from_arrow_schema
from ackcore.spark.base.workers import check_workers
from ackcore.spark.call_arguments import (
    check_names,
    read_concurrency,
    read_outputs,
    share_of_rate,
)
from ackcore.spark.checks import arrow_schema
from ackcore.spark.tasks.attempts import ERROR, ERROR_COLUMN, Attempts
from ackcore.topology.functions import Function, kind_of

#: Where what cannot be pickled may be made: calls enter a function that is a context manager.
WHERE = "fn, or in __enter__() or __aenter__() of an object that is called"


def attempt(
    frame: DataFrame,
    fn: Function,
    outputs: str | StructType | pa.Schema,
    *,
    retry_on: type[BaseException] | Iterable[type[BaseException]] = (),
    attempts: int = 3,
    max_concurrency: int | Callable[[], Limit] | None = None,
    rate_per_s: float | None = None,
    timeout_s: float | None = None,
    wait_in_task_s: float = 5.0,
    tasks: int | None = None,
) -> DataFrame:
    """Try a function on each row; what it answers becomes columns, and what it raises a column too.

    Parameters
    ----------
    frame : pyspark.sql.DataFrame
        Bounded or streaming, of a classic session or of Spark Connect.
    fn : callable
        Of one argument, and one of three kinds:

        - a function of a row: it is given a `ackcore.topology.Tuple` (``row["text"]``, ``row[0]``,
          ``text, n = row``), as a bolt is, and returns the values of the outputs in a tuple, a
          list or a dict; of a single output also the value by itself;
        - an ``async`` function of a row, of which many calls wait at once;
        - a function of batches, which says so: its parameter is annotated as a
          `pyarrow.RecordBatch`.  It returns the outputs for the rows that it was given, in their
          order: a RecordBatch, a Table, a dict or list of columns, or the one column.

        An object with a ``__call__`` will do, and if it is an (asynchronous) context manager, it
        is entered before a task's first call: connect there.
    outputs : str, StructType or pyarrow.Schema
        The columns that it answers: ``"label string, score double"``.  What is not nullable there
        must not be null in an answer.
    retry_on : exception class, or iterable of them, default ()
        What may pass: a call that raises it is made again, after a back-off.
    attempts : int, default 3
        How often, at most, the first call included.  `ackcore.calls.Retry` is followed beyond
        that, within `wait_in_task_s`, and `ackcore.calls.Reject` never.
    max_concurrency : int or callable, optional
        How many calls a task makes at once: a number, or what makes a `Limit` of `ackcore.flow`.
        By default an async function has as many as its service bears (`DelayTarget`), and any other
        is called one at a time; given a number, from so many threads.  A function of batches is
        always called one at a time.  A call that timed out does not count, though it may still run.
    rate_per_s : float, optional
        Calls per second, for the whole frame at most: each task gets its share of `tasks`.
    timeout_s : float, optional
        Seconds after which a call fails with `TimeoutError`.  A plain function cannot be cancelled,
        and keeps its thread until it returns.
    wait_in_task_s : float, default 5.0
        Seconds that a row waits to be called again, in all.
    tasks : int, optional
        How many tasks of the frame run at once, for `rate_per_s`; by default the session's default
        parallelism, which is what the cores that it has can run.  A frame with fewer partitions
        stays below its rate by as much; a cluster that grows meanwhile goes beyond it.  On Spark
        Connect, a small job asks for it, once for each session.

    Returns
    -------
    pyspark.sql.DataFrame
        The rows of the frame in their order, with its columns as they are, the outputs, and
        ``error struct<type string, message string, attempts int>``: null where it went well.
        Where it did not the outputs are null, and ``attempts`` tells how many calls were made.

    Raises
    ------
    TypeError
        If an argument is of another type, the function is none of these kinds or cannot be
        pickled, or a column has a type that Spark does not hand to Python.
    ValueError
        If an output has the name of another column, or a setting is out of range.
    WorkerPythonError
        If the workers' Python cannot run it.

    Notes
    -----
    Nothing is called before an action, and **each action calls anew**: write or cache what is read
    twice.  ``orderBy`` reads twice in one action, since Spark samples what it sorts: `fn` is called
    twice for each row.  A task that Spark runs again calls again.  Whatever `fn` raises is an error
    of its row, `SystemExit` too; a function that ends its process ends the task, and fails the
    job in the end (`guard` finds that row).  Of batches, what is raised is put down to a row, and
    the batch is bisected to those that raise by themselves; but `Retry`, what `retry_on` names and
    a time-out are put down to the call, and all its rows fail.

    Examples
    --------
    >>> async def geocode(row):
    ...     answer = await client.get(URL, params={"q": row["address"]})
    ...     return answer.json()
    >>> found = attempt(shops, geocode, "lat double, lon double", rate_per_s=50)
    >>> found.where("error is not null").select("address", "error.*").show()
    """
    refuse_frame(frame, "frame")
    kind = kind_of(fn)
    columns, answers = read_outputs(outputs, frame)
    check_names(frame, columns, [ERROR_COLUMN])
    settings = CallSettings(
        max_concurrency=read_concurrency(kind, max_concurrency),
        timeout_s=timeout_s,
        rate_per_s=rate_per_s,
        attempts=attempts,
        retry_on=exception_classes(retry_on, "retry_on"),
        wait_in_task_s=wait_in_task_s,
    )
    share = share_of_rate(frame, settings.rate_per_s, tasks)
    run = Attempts(
        fn,
        kind,
        arrow_schema(frame.schema, "frame"),
        answers,
        replace(settings, rate_per_s=share),
    )
    refuse_unpicklable("fn", fn, WHERE)
    check_workers(frame.sparkSession)
    nullable = [StructField(each.name, each.dataType, True, each.metadata) for each in columns]
    error = from_arrow_schema(pa.schema([pa.field(ERROR_COLUMN, ERROR)]))
    result = StructType([*frame.schema.fields, *nullable, *error.fields])
    return plainly_named(frame).mapInArrow(run, result)
