"""`guard`: call a function for each row of a frame in a topology with one bolt."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from ackcore.calls import CallSettings
from ackcore.flow import Limit
from ackcore.spark.attempts import WHERE
from ackcore.spark.base.pickling import refuse_unpicklable
from ackcore.spark.base.session import refuse_frame
from ackcore.spark.call_arguments import (
    check_names,
    read_concurrency,
    read_outputs,
    share_of_rate,
)
from ackcore.spark.checks import kept_schema
from ackcore.spark.dead_letters.topic import Place
from ackcore.spark.engine.progress import Counts
from ackcore.spark.query import Query, run_batch, start
from ackcore.spark.tasks.attempts import FUNCTION, SOURCE
from ackcore.topology.builder import TopologyBuilder
from ackcore.topology.components import Component
from ackcore.topology.failure_reasons import exception_classes
from ackcore.topology.function_calls import BatchFunction, RowFunction
from ackcore.topology.functions import Function, Kind, kind_of


def guard(
    frame: DataFrame,
    fn: Function,
    outputs: str | StructType | pa.Schema,
    sink: Any,
    checkpoint: str | os.PathLike[str],
    *,
    message_id: str | Sequence[str] | None = None,
    retry_on: Iterable[type[Exception] | str] | None = None,
    reject: Iterable[type[Exception] | str] = (),
    max_concurrency: int | Callable[[], Limit] | None = None,
    rate_per_s: float | None = None,
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
        As for `attempt`. A row's ``attempt``, ``message_id`` and ``stable_id`` identify its record
        here. An exception fails the record, which is retried after a back-off.
    outputs : str, StructType or pyarrow.Schema
        As for `attempt`.
    sink : callable or object with a ``write``
        The sink of the rows that succeeded, each written once, with the frame's columns and the
        outputs: `to_parquet`, or a function of (DataFrame, batch id).
    checkpoint : path
        See `run_batch` and `start`.
    message_id : str or sequence of str, optional
        See `TopologyBuilder.spout`.
    retry_on : list of exception classes or of their names, optional
        The exceptions after which a record is retried, with a back-off; all others are final. By
        default all but `ackcore.topology.Reject` are retried. (`attempt` retries within the task,
        and by default none.)
    reject : list of exception classes or of their names, default ()
        The exceptions that make a record a dead letter at once.
    max_concurrency, rate_per_s, timeout_s, wait_in_task_s
        As for `attempt` and `ackcore.topology.AsyncBolt`. A row that raises
        `ackcore.topology.Retry` waits up to `wait_in_task_s` within its task, and for longer
        in the checkpoint.
    journal : bool, default False
        Whether the result of each call is kept until the micro-batch is done, so that no finished
        call is made again after a crash; see `ackcore.topology.Bolt`. Not for a function of
        batches.
    trigger : str or mapping, optional
        The trigger of a stream; see `start`.
    max_dead, max_dead_ratio, dead_letters, accept_changes, listeners
        See `run_batch` and `start`.
    **settings
        Settings of a topology, such as ``max_attempts=3``; see `ackcore.topology.Settings`.

    Returns
    -------
    Counts or Query
        The counts of a bounded frame, or the running query of a stream.

    Raises
    ------
    TypeError, ValueError
        As `attempt`, `run_batch` and `start`; or if a trigger is given for a bounded frame.
    Exception
        The exceptions of `run_batch` and `start`: `TooManyDead`, `RunFailed`, `SinkError` and
        others.

    Examples
    --------
    >>> counts = guard(shops, geocode, "lat double, lon double", to_parquet("found"), "checkpoint")
    >>> counts.acked, counts.dead
    (14997, 3)
    """
    refuse_frame(frame, "frame")
    kind = kind_of(fn)
    columns, answers = read_outputs(outputs, frame)
    check_names(frame, columns)
    kept = kept_schema(frame.schema, "frame")
    kept_schema(columns, "outputs")
    calls = CallSettings(
        max_concurrency=read_concurrency(kind, max_concurrency),
        timeout_s=timeout_s,
        rate_per_s=rate_per_s,
        retry_on=() if retry_on is None else exception_classes(retry_on, "retry_on"),
        reject=exception_classes(reject, "reject"),
        wait_in_task_s=wait_in_task_s,
    )
    if trigger is not None and not frame.isStreaming:
        raise ValueError(
            f"trigger must be left out for a frame that ends, got {trigger!r}; spark.readStream "
            "reads one that does not"
        )
    refuse_unpicklable("fn", fn, WHERE)
    told: dict[str, Any] = {"retry_on": retry_on, "reject": reject}
    if kind is not Kind.BATCH:
        bolt: Component = RowFunction(fn, answers, kept, calls, journal=journal, **told)
    elif journal is False:
        shared = replace(calls, rate_per_s=share_of_rate(frame, calls.rate_per_s, None))
        bolt = BatchFunction(fn, answers, kept, shared, **told)
    else:
        raise ValueError(
            f"journal must be left out for a function of batches, got {journal!r}: whose answer is "
            "whose is known only where each row is a call of its own"
        )
    builder = TopologyBuilder()
    builder.spout(SOURCE, frame, message_id=message_id)
    builder.bolt(FUNCTION, bolt).shuffle(SOURCE)
    builder.sink(FUNCTION, sink, name="sink")
    topology = builder.build(**settings)
    if not frame.isStreaming:
        return run_batch(
            topology,
            frame.sparkSession,
            checkpoint,
            max_dead=max_dead,
            max_dead_ratio=max_dead_ratio,
            dead_letters=dead_letters,
            accept_changes=accept_changes,
            listeners=listeners,
        )
    return start(
        topology,
        frame.sparkSession,
        checkpoint,
        trigger=trigger,
        max_dead=max_dead,
        max_dead_ratio=max_dead_ratio,
        dead_letters=dead_letters,
        accept_changes=accept_changes,
        listeners=listeners,
    )
