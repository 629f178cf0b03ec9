"""`attempt`: call a function for each row of a frame; its errors become a column.

It tracks and records nothing.  It is a single mapInArrow, so it is lazy, and works in batches, in
streams and on Spark Connect.  For retries and dead letters pass the same function to `guard`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

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

#: Places to create objects that cannot be pickled: tasks enter a context manager before calls.
WHERE = "fn, or in __enter__() or __aenter__() of an object that is called"


def attempt(
    frame: DataFrame,
    fn: Function,
    outputs: str | StructType | pa.Schema,
    *,
    retry_on: type[BaseException] | Iterable[type[BaseException]] = (),
    max_attempts: int = 3,
    max_concurrency: int | Callable[[], Limit] | None = None,
    rate_per_s: float | None = None,
    timeout_s: float | None = None,
    wait_in_task_s: float = 5.0,
    tasks: int | None = None,
) -> DataFrame:
    """Call a function for each row. Its answer and its error become columns.

    Parameters
    ----------
    frame : pyspark.sql.DataFrame
        Bounded or streaming, of a classic session or of Spark Connect.
    fn : callable
        A callable of one argument, of one of three kinds:

        - a function of a row. It receives an `ackcore.topology.Tuple` (``row["text"]``, ``row[0]``,
          ``text, n = row``) and returns the outputs as a tuple, a list or a dict; a single
          output may also be returned as the value itself;
        - an ``async`` function of a row. Many calls run concurrently;
        - a function of batches. Its parameter must be annotated as `pyarrow.RecordBatch`. It
          returns the outputs for the rows it received, in their order: a RecordBatch, a Table, a
          dict or list of columns, or the single column.

        Objects with ``__call__`` work too. If the object is an (asynchronous) context manager, it
        is entered before a task's first call: open connections there.
    outputs : str, StructType or pyarrow.Schema
        The columns of the answer: ``"label string, score double"``. Answers must not be null in
        columns that are not nullable.
    retry_on : exception class, or iterable of them, default ()
        The exceptions after which a call is repeated, with a back-off; all others are final. By
        default none is repeated, since the rows behind it wait. (`guard` retries between
        micro-batches, and by default all exceptions.)
    max_attempts : int, default 3
        The maximum number of calls per row, the first one included. `ackcore.calls.Retry` may
        exceed it, within `wait_in_task_s`; `ackcore.calls.Reject` is never retried.
    max_concurrency : int or callable, optional
        The number of concurrent calls in a task: a number, or a callable that returns a `Limit` of
        `ackcore.flow`. By default the number of async calls adapts to the service (`DelayTarget`),
        and any other function is called one at a time. With a number, a plain function is called
        from that many threads. A function of batches is always called one at a time. A call that
        timed out no longer counts, though it may still run.
    rate_per_s : float, optional
        The maximum number of calls per second for the whole frame. Each of the `tasks` has an equal
        share.
    timeout_s : float, optional
        Seconds after which a call fails with `TimeoutError`. A plain function cannot be cancelled
        and occupies its thread until it returns.
    wait_in_task_s : float, default 5.0
        Seconds that a row may wait between its calls, in total.
    tasks : int, optional
        The number of tasks that run at once, for `rate_per_s`. The default is the session's default
        parallelism, which equals its cores. With fewer partitions the rate is lower; if the cluster
        grows meanwhile, it is higher. On Spark Connect a small job finds the default, once per
        session.

    Returns
    -------
    pyspark.sql.DataFrame
        The rows of the frame in their order, with its columns, the outputs, and ``error
        struct<type string, message string, attempts int>``. ``error`` is null for rows that
        succeeded. For all others the outputs are null, and ``attempts`` is the number of calls.

    Raises
    ------
    TypeError
        If an argument has another type, the function is of none of these kinds or cannot be
        pickled, or a column has a type that Spark does not pass to Python.
    ValueError
        If an output has the name of another column, or a setting is out of range.
    WorkerPythonError
        If the workers' Python cannot run it.

    Notes
    -----
    Nothing is called before an action, and **each action calls the function again**: write or cache
    a frame that you read twice. ``orderBy`` reads twice in one action, since Spark samples the rows
    to sort: `fn` is called twice for each row. A task that Spark repeats calls again. Any exception
    of `fn` is the error of its row, also `SystemExit`. A function that ends its process ends the
    task and finally the job (`guard` finds that row). If a function of batches raises, the batch is
    bisected to the failing rows; but `Retry`, exceptions in `retry_on` and time-outs concern the
    call, and all its rows fail.

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
        max_attempts=max_attempts,
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
    error = from_arrow_schema(pa.schema([pa.field(ERROR_COLUMN, ERROR)]))
    result = StructType([*frame.schema.fields, *columns, *error.fields])
    return plainly_named(frame).mapInArrow(run, result)
