"""Functions of a user, called for each row of a frame: `attempt` and `guard`.

`attempt` makes the errors of the function a column.  It tracks and records nothing.  It is a single
mapInArrow, so it is lazy, and works in batches, in streams and on Spark Connect.  `guard` runs a
topology with one bolt, which calls the function, by `run_batch` or `start`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql.types import ArrayType, MapType, StructField, StructType

from ackcore import _columns
from ackcore._error_hints import naming_arguments, near_miss
from ackcore.calls import RateLimit
from ackcore.calls.call_settings import CallSettings
from ackcore.flow import DelayTarget, Limit
from ackcore.spark.base.arrow_batches import plainly_named
from ackcore.spark.base.errors import one_line
from ackcore.spark.base.session import is_case_sensitive, refuse_frame, task_slots
from ackcore.spark.base.versions import Py4JError, from_arrow_schema
from ackcore.spark.base.workers import check_workers, refuse_unpicklable
from ackcore.spark.checks import arrow_schema, kept_schema, spark_schema
from ackcore.spark.dead_letters.topic import Place
from ackcore.spark.engine.progress import Counts
from ackcore.spark.query import Query, run_batch, start
from ackcore.spark.tasks.attempts import ERROR, ERROR_COLUMN, FUNCTION, SOURCE, Attempts
from ackcore.topology.bolt_functions import Function, Kind, kind_of
from ackcore.topology.builder import TopologyBuilder
from ackcore.topology.components import Component
from ackcore.topology.failure_reasons import exception_classes
from ackcore.topology.function_calls import BatchFunction, RowFunction
from ackcore.topology.settings import check_keywords

#: Places to create objects that cannot be pickled: tasks enter a context manager before calls.
WHERE = "fn, or in __enter__() or __aenter__() of an object that is called"


@naming_arguments
def attempt(
    frame: DataFrame,
    fn: Function,
    outputs: str | StructType | pa.Schema,
    *,
    retry_on: Collection[type[Exception] | str] = (),
    max_attempts: int = 3,
    max_concurrency: int | Callable[[], Limit] | None = None,
    limit: RateLimit | None = None,
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
    retry_on : iterable of exception classes or names, default ()
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
    limit : RateLimit, optional
        The calls per second and tokens per minute of the whole frame, or of each key (`per`), such
        as a tenant. Each of the `tasks` has an equal share. It has no ``cost_per_run``, and no key
        for a function of batches.
    timeout_s : float, optional
        Seconds after which a call fails with `TimeoutError`. A plain function cannot be cancelled
        and occupies its thread until it returns.
    wait_in_task_s : float, default 5.0
        Seconds that a row may wait between its calls, in total.
    tasks : int, optional
        The number of tasks that share `limit`. The default is the session's default parallelism,
        which equals its cores. With fewer partitions the rate is lower; if the cluster grows during
        the job, it is higher. Give 1 for a frame that is partitioned by the key of the limit. On
        Spark Connect a small job finds the default, once per session.

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
        If the workers' Python cannot run ackcore.

    Notes
    -----
    Nothing is called before an action, and **each action calls the function again**: write or cache
    a frame that you read twice. ``orderBy`` reads twice in one action, since Spark samples the rows
    to sort: `fn` is called twice for each row. A task that Spark repeats calls again. Any exception
    of `fn` is the error of its row, also `SystemExit`. A function that ends its process ends the
    task and finally the job (`guard` finds that row). If a function of batches raises, the batch is
    bisected to the failing rows; but `Retry`, exceptions in `retry_on`, time-outs and failed
    connections concern the call, and all its rows fail. A wrong argument of `ackcore.calls.used`,
    and an answer that does not fit, are never retried.

    Examples
    --------
    >>> async def geocode(row):
    ...     answer = await client.get(URL, params={"q": row["address"]})
    ...     return answer.json()
    >>> found = attempt(shops, geocode, "lat double, lon double", limit=RateLimit(calls_per_s=50))
    >>> found.where("error is not null").select("address", "error.*").show()
    """
    refuse_frame(frame, "frame")
    kind = kind_of(fn)
    columns, answers = read_outputs(outputs, frame)
    check_names(frame, columns, [ERROR_COLUMN])
    settings = CallSettings(
        max_concurrency=read_concurrency(kind, max_concurrency),
        timeout_s=timeout_s,
        limit=limit,
        max_attempts=max_attempts,
        retry_on=exception_classes(retry_on, "retry_on"),
        wait_in_task_s=wait_in_task_s,
    )
    check_limit(frame, kind, limit)
    run = Attempts(
        fn,
        kind,
        arrow_schema(frame.schema, "frame"),
        answers,
        replace(settings, limit=share_of(frame, limit, tasks)),
    )
    refuse_unpicklable("fn", fn, WHERE)
    check_workers(frame.sparkSession)
    error = from_arrow_schema(pa.schema([pa.field(ERROR_COLUMN, ERROR)]))
    result = StructType([*frame.schema.fields, *columns, *error.fields])
    return plainly_named(frame).mapInArrow(run, result)


def guard(
    frame: DataFrame,
    fn: Function,
    outputs: str | StructType | pa.Schema,
    sink: Any,
    checkpoint: str | os.PathLike[str],
    *,
    message_id: str | Sequence[str] | None = None,
    retry_on: Collection[type[Exception] | str] | None = None,
    reject: Collection[type[Exception] | str] = (),
    max_concurrency: int | Callable[[], Limit] | None = None,
    limit: RateLimit | None = None,
    timeout_s: float | None = None,
    wait_in_task_s: float = 5.0,
    journal: bool = False,
    trigger: str | Mapping[str, Any] | None = None,
    max_dead: int | None = None,
    max_dead_ratio: float | None = 1.0,
    dead_letters: Place = None,
    accept_changes: bool = False,
    listeners: Sequence[Any] = (),
    **settings: Any,
) -> Counts | Query:
    """Call a function for each row with delivery guarantees: retries, dead letters, each row once.

    `guard` runs a topology of the frame, one bolt that calls the function, and a sink. It uses
    `run_batch`, or `start` if the frame is a stream.

    Parameters
    ----------
    frame : pyspark.sql.DataFrame
        Bounded, or streaming in a classic session.
    fn : callable
        A callable of one of the three kinds of `attempt`. A row's ``attempt``, ``message_id`` and
        ``stable_id`` identify its record here. An exception fails the record, which is retried
        after a back-off.
    outputs : str, StructType or pyarrow.Schema
        The columns of the answer, as for `attempt`.
    sink : Sink or callable
        The sink of the rows that succeeded, each written once, with the frame's columns and the
        outputs: a `Sink` such as `to_parquet`, or a function of (DataFrame, batch id).
    checkpoint : path
        A directory or URL for this call alone. A call with the same checkpoint continues after a
        crash; a bounded frame needs a new one for each run. See `run_batch` and `start`.
    message_id : str or sequence of str, optional
        The columns that identify a row. By default ids are made from positions; for Spark's Kafka
        source, of topic, partition and offset.
    retry_on : list of exception classes or of their names, optional
        The exceptions after which a record is retried, with a back-off; all others are final. By
        default all but `ackcore.topology.Reject` are retried. (`attempt` retries within the task,
        and by default none.)
    reject : list of exception classes or of their names, default ()
        The exceptions that make a record a dead letter at once.
    max_concurrency, limit, timeout_s, wait_in_task_s
        As for `attempt` and `ackcore.topology.AsyncBolt`. A row that raises
        `ackcore.topology.Retry` waits up to `wait_in_task_s` within its task, and for longer
        in the checkpoint.
    journal : bool, default False
        Whether the result of each call is kept until the micro-batch is done, so that no finished
        call is made again after a crash; see `ackcore.topology.Bolt`. Not for a function of
        batches.
    trigger : str or mapping, optional
        The trigger of a stream, such as ``"1 minute"``; see `start`.
    max_dead, max_dead_ratio, dead_letters, accept_changes, listeners
        The limits on dead records, their directory, whether the arguments may differ from those
        that made the checkpoint, and listeners; see `run_batch` and `start`.
    **settings
        Settings of a topology, such as ``max_attempts=3``; see `ackcore.topology.Settings`.

    Returns
    -------
    Counts or Query
        The counts of a bounded frame, or the running query of a stream.

    Raises
    ------
    TypeError, ValueError
        If `attempt`, `run_batch` or `start` would refuse an argument; if there is a trigger for a
        bounded frame, or a journal for a function of batches.
    Exception
        The exceptions of `run_batch` and `start`: `TooManyDead`, `RunFailed`, `SinkError` and
        others.

    Examples
    --------
    >>> counts = guard(shops, geocode, "lat double, lon double", to_parquet("found"), "checkpoint")
    >>> counts.acked, counts.dead
    (14997, 3)
    """
    check_keywords(settings, guard.__kwdefaults__ or ())
    refuse_frame(frame, "frame")
    kind = kind_of(fn)
    columns, answers = read_outputs(outputs, frame)
    check_names(frame, columns)
    kept = kept_schema(frame.schema, "frame")
    kept_schema(columns, "outputs")
    calls = CallSettings(
        max_concurrency=read_concurrency(kind, max_concurrency),
        timeout_s=timeout_s,
        limit=limit,
        retry_on=() if retry_on is None else exception_classes(retry_on, "retry_on"),
        reject=exception_classes(reject, "reject"),
        wait_in_task_s=wait_in_task_s,
    )
    check_limit(frame, kind, limit)
    if trigger is not None and not frame.isStreaming:
        raise ValueError(
            f"trigger must be left out for a bounded frame, got {trigger!r}; to make a stream, use "
            "spark.readStream"
        )
    refuse_unpicklable("fn", fn, WHERE)
    told: dict[str, Any] = {"retry_on": retry_on, "reject": reject}
    if kind is not Kind.BATCH:
        bolt: Component = RowFunction(fn, answers, kept, calls, journal=journal, **told)
    elif journal is False:
        shared = replace(calls, limit=share_of(frame, limit, None))
        bolt = BatchFunction(fn, answers, kept, shared, **told)
    else:
        raise ValueError(
            f"journal must be left out for a function of batches, got {journal!r}: results can be "
            "assigned to rows only if each row has its own call"
        )
    builder = TopologyBuilder()
    builder.spout(SOURCE, frame, message_id=message_id)
    builder.bolt(FUNCTION, bolt).shuffle(SOURCE)
    builder.sink(FUNCTION, sink, name="sink")
    topology = builder.build(**settings)
    options: dict[str, Any] = {
        "max_dead": max_dead,
        "max_dead_ratio": max_dead_ratio,
        "dead_letters": dead_letters,
        "accept_changes": accept_changes,
        "listeners": listeners,
    }
    if frame.isStreaming:
        return start(topology, frame.sparkSession, checkpoint, trigger=trigger, **options)
    return run_batch(topology, frame.sparkSession, checkpoint, **options)


# ------------------------------------------------------------------------------------- arguments

_FORMS = "a schema: 'label string, score double', a StructType or a pyarrow.Schema"


def read_outputs(outputs: Any, frame: DataFrame) -> tuple[StructType, pa.Schema]:
    """Return the output columns of a function as a Spark schema and as an Arrow schema.

    ``outputs``: the argument of `attempt`. Raises TypeError or ValueError if they are not columns
    that Spark accepts from Python.
    """
    if isinstance(outputs, StructType):
        columns = outputs
    elif isinstance(outputs, pa.Schema):
        columns = spark_schema(outputs, "outputs")
    elif isinstance(outputs, str):
        columns = _from_ddl(outputs, frame)
    else:
        raise TypeError(f"outputs must be {_FORMS}, got {type(outputs).__name__} {outputs!r}")
    if not columns.fields:
        raise ValueError(f"outputs must have at least one column, got none; give {_FORMS}")
    return _nullable_within(columns), arrow_schema(columns, "outputs")


def _nullable_within(kind: Any) -> Any:
    """Return a Spark type with all nested types nullable, also the fields of a schema.

    If a type is declared not nullable, Spark reads a null as 0.
    """
    if isinstance(kind, StructType):
        return StructType(
            [
                StructField(field.name, _nullable_within(field.dataType), True, field.metadata)
                for field in kind
            ]
        )
    if isinstance(kind, ArrayType):
        return ArrayType(_nullable_within(kind.elementType))
    if isinstance(kind, MapType):
        return MapType(_nullable_within(kind.keyType), _nullable_within(kind.valueType))
    return kind


def _from_ddl(outputs: str, frame: DataFrame) -> StructType:
    try:
        # This call uses the DDL parser of the JVM or of Spark Connect.
        columns: StructType = frame.sparkSession.createDataFrame([], outputs).schema
    except (PySparkException, Py4JError, ValueError) as error:
        said = one_line(error)
        if "char/varchar" in said:
            said = "Spark passes no char(n) and varchar(n) to Python; write string"
        raise ValueError(f"outputs must be {_FORMS}, got {outputs!r}: {said}") from None
    # Spark reads a type without a name as a column of this name.
    if columns.names == ["value"] and "value" not in outputs.lower():
        raise ValueError(
            f"outputs must name its columns, got {outputs!r}; give 'answer {outputs.strip()}'"
        )
    return columns


def check_names(frame: DataFrame, columns: StructType, added: Sequence[str] = ()) -> None:
    """Raise ValueError if two columns of a result have names that are equal in this session.

    ``columns`` are the outputs, ``added`` the names of columns that ackcore adds.
    """
    sensitive = is_case_sensitive(frame.sparkSession)
    taken: dict[str, tuple[str, str]] = {}
    for whose, names in (
        ("frame", frame.columns),
        ("outputs", columns.names),
        ("the result", added),
    ):
        for name in names:
            key = name if sensitive else name.lower()
            if key in taken:
                other, first = taken[key]
                case = "; in this session names that differ only in case are equal"
                alike = "" if name == other else case
                raise ValueError(
                    f"columns must have different names, got {other!r} of {first} and {name!r} of "
                    f"{whose}{alike}; rename the column of {first}"
                )
            taken[key] = (name, whose)


def read_concurrency(
    kind: Kind, given: int | Callable[[], Limit] | None
) -> int | Callable[[], Limit]:
    """Return the number of calls that a task makes at once, or a callable that returns a `Limit`.

    By default only an async function is called several times at once: few other functions are
    thread-safe. Raises ValueError if several concurrent calls of a function of batches are
    requested.
    """
    if kind is Kind.BATCH and given not in (None, 1):
        raise ValueError(
            "max_concurrency must be left out for a function of batches, which is called with one "
            f"batch at a time, got {given!r}; an async function of a row has many calls at once"
        )
    if given is None:
        return DelayTarget if kind is Kind.ASYNC else 1
    return given


def check_limit(frame: DataFrame, kind: Kind, limit: RateLimit | None) -> None:
    """Raise ValueError if `attempt` and `guard` cannot apply a limit.

    It must have no ``cost_per_run``. If it has a key, this must be a column of the frame or a
    callable, and the function one of a row. None is always accepted.
    """
    if limit is not None and limit.cost_per_run is not None:
        raise ValueError(
            f"limit of attempt() or guard() must have no cost_per_run, got {limit.cost_per_run:g}: "
            "only a bolt with a journal, behind an exchange, counts the money of a run; write an "
            "AsyncBolt with journal = True, and add it by .bolt(..., parallelism=...)"
        )
    per = None if limit is None else limit.per
    if per is None:
        return
    if kind is Kind.BATCH:
        raise ValueError(
            f"limit must have no key (per) for a function of batches, got {per!r}: a call has rows "
            "of several keys; let the function take one row"
        )
    if isinstance(per, str) and per not in frame.columns:
        raise ValueError(
            f"limit must name a column of frame, got per={per!r}; "
            + near_miss(per, tuple(frame.columns), "columns")
        )


def share_of(frame: DataFrame, limit: RateLimit | None, tasks: int | None) -> RateLimit | None:
    """Return the limit of one task: ``limit`` divided by ``tasks``; None without a limit.

    ``tasks`` is by default the number of tasks that the session runs at once. Raises TypeError or
    ValueError if it is no positive number, or is given without a limit.
    """
    if tasks is not None:
        tasks = _columns.as_count(tasks, "tasks", 1)
    if limit is None:
        if tasks is not None:
            raise ValueError(
                f"tasks must be left out without limit, got {tasks}: they are the tasks that share "
                "the limit"
            )
        return None
    return limit.share(task_slots(frame.sparkSession) if tasks is None else tasks)
