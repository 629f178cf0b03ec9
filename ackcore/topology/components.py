"""The base classes of bolts, which users extend, and the interfaces that bolts emit through.

A `Bolt` receives a tuple at a time and acks it at any time. A `BasicBolt` anchors and acks
automatically. An `AsyncBolt` does the same for many tuples at once, in an event loop. A `BatchBolt`
receives an Arrow batch at a time, which is the fastest. An exception in any of them fails the input
with the exception as the reason, and processing continues: a bolt can neither lose a record nor
count it twice. Methods emit through a collector; a returned value other than None fails the input.

A bolt is created on the driver, pickled, and prepared in each task: open connections and clients in
``prepare``, not in ``__init__``. A task without rows does not prepare its bolt. A bolt keeps no
state between micro-batches; write lasting results to a sink, or emit them to a table, which a bolt
can look up in later micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import pyarrow as pa

from ackcore._arrow.arrow_tables import nullable_within
from ackcore._error_hints import Unquoted, nearest
from ackcore.calls import RateLimit
from ackcore.flow import DelayTarget, Limit
from ackcore.topology.tuples import Identity, Reason, Tuple

#: The default stream.
DEFAULT_STREAM = "default"


class Collector(Protocol):
    """The interface through which a `Bolt` emits, acks and fails.

    You may keep it and call it from any thread until ``flush()`` has returned. Later calls raise
    `RuntimeError`.
    """

    def emit(
        self,
        values: Sequence[Any] | Mapping[str, Any],
        anchors: Tuple | Iterable[Tuple] | None = None,
        stream: str = DEFAULT_STREAM,
    ) -> None:
        """Emit a tuple.

        Parameters
        ----------
        values : tuple, list or dict
            Values in the order of the stream's schema, or by the names of its fields.
        anchors : Tuple or iterable of Tuple, optional
            The inputs that the tuple is anchored to: each of them completes only after this tuple.
            None leaves the tuple untracked. The same input twice gives two edges.
        stream : str, default "default"
            One of the streams in ``outputs``.

        Raises
        ------
        ValueError
            If the stream does not exist, ``values`` are too many, too few or under other names, or
            an anchor is no input of this task or was acked before. In the last case that input
            fails, because a tree that grows after its ack has no defined end. Values that Arrow
            cannot convert fail the anchors when the batch ends; without anchors, they raise here.
        TypeError
            If ``values`` or ``anchors`` has another type.
        RuntimeError
            If ``flush()`` has returned.

        Notes
        -----
        A tuple anchored to a failed input is emitted, but no sink receives it, as its record has
        failed. If the input failed in an earlier batch, the tuple is dropped and its other anchors
        fail.
        """

    def ack(self, tuple: Tuple) -> None:
        """Ack an input.

        A second ack, or an ack after a fail, has no effect; the number of such calls is logged. If
        ``execute`` raises, its input fails although it was acked. Raises TypeError or ValueError
        for an object that is no input of this task, and RuntimeError after ``flush()``.
        """

    def fail(self, tuple: Tuple, reason: BaseException | Reason | str | None = None) -> None:
        """Fail an input: its record is retried, or dead if ``reason`` is final.

        A `Reject` is final, and an exception that ``reject`` or ``retry_on`` makes final. The first
        of several reasons is kept. An input that was acked in the same batch fails. For one that
        was acked in an earlier batch, the call has no effect. Raises TypeError or ValueError for an
        object that is no input of this task, and RuntimeError after ``flush()``.
        """


class BasicCollector(Protocol):
    """The interface through which a `BasicBolt` emits while it executes one input."""

    def emit(self, values: Sequence[Any] | Mapping[str, Any], stream: str = DEFAULT_STREAM) -> None:
        """Emit a tuple anchored to the input.

        ``values``: the values in the order of the stream's schema, or by field. ``stream``: one of
        ``outputs``. Raises TypeError or ValueError if the stream is unknown, or the number or names
        of the values differ from its schema's. A value of another type fails the input later.

        Any thread may call it until ``execute`` has returned. Later calls raise `ValueError`, and
        fail the input if its batch has not ended.
        """


class AsyncCollector(BasicCollector, Protocol):
    """The interface through which an `AsyncBolt` emits while it executes one input.

    Attributes
    ----------
    endpoint : hashable
        The endpoint that this call must use, one of the bolt's ``endpoints``; None if the bolt has
        none.
    """

    endpoint: Any

    def used(self, *, tokens: float | None = None, cost: float | None = None) -> None:
        """Report what the call has used, for a limit with ``tokens_per_min`` or ``cost_per_run``.

        Any thread may call it. Several reports of a call add up. They have no effect without such
        a limit. In ``execute_many``, any one collector reports for all tuples of the call. Raises
        TypeError if both are missing or one is no number, ValueError if one is out of range.
        """


class BatchOutput(Protocol):
    """The interface through which a `BatchBolt` emits tuples and fails rows in one call.

    Attributes
    ----------
    component, stream : str
        The component and stream that emitted the batch; empty in ``flush``.
    first_row : int
        The number of rows that the task received before this batch. 0 in ``flush``, where row
        numbers count all rows of the task.
    identity : Identity, optional
        The records of the rows, if the bolt sets ``needs_identity = True``.
    """

    component: str
    stream: str
    first_row: int
    identity: Identity | None

    def emit(self, columns: Any, *, parents: Any, stream: str = DEFAULT_STREAM) -> None:
        """Emit a batch of tuples.

        Parameters
        ----------
        columns : RecordBatch, Table, mapping or list
            A batch or table with the stream's fields, in any order; a mapping of field to column;
            or the columns in the schema's order. A column is an Arrow array, a numpy array, or
            a sequence of values. A column of another type is cast if the cast is lossless, that is
            if casting back gives equal values; otherwise it is refused. Numbers are not cast to
            times, dates not to timestamps, and times without a zone not to times with one. Numpy
            arrays are copied, but the memory behind an Arrow array must not change afterwards.
        parents : array-like of int, list of lists, or None
            The rows of the input batch that the tuples are anchored to: a row number for each
            tuple, or a list of them for each (an Arrow list array, or lists). None leaves all
            tuples untracked.
        stream : str, default "default"
            One of the streams in ``outputs``.

        Raises
        ------
        ValueError, TypeError
            If the stream does not exist, or columns or parents do not fit. Nothing is emitted.
        RuntimeError
            If the call of the bolt has returned.
        """

    def fail(
        self,
        rows: Any,
        reasons: BaseException | Reason | str | Sequence[BaseException | Reason | str] | None,
    ) -> None:
        """Fail rows of the input batch, with a reason for each row or one for all.

        ``rows``: an array of row numbers. The first of several reasons for a row is kept. Tuples
        anchored to these rows are emitted, but no sink receives them. Raises TypeError or
        ValueError if an argument does not fit, and RuntimeError after the call of the bolt.
        """


@dataclass(frozen=True)
class Context:
    """The argument of ``prepare``.

    Attributes
    ----------
    component : str
        The name of the bolt in its topology.
    task : int
        The number of the task, which is the partition.
    batch_id : int, optional
        The number of the micro-batch; None outside of one.
    """

    component: str
    task: int = 0
    batch_id: int | None = None


class UsedTables(dict[str, Any]):
    """The tables in ``uses`` of a bolt, by name."""

    def __missing__(self, name: str) -> Any:
        """Raise KeyError for a table that is not in ``uses``, with advice."""
        near = nearest(str(name), list(self))
        hint = f"did you mean {near!r}?" if near else f"write uses = [{name!r}] in its class"
        if not self:
            hint += ", and read it in prepare or later: __init__ has no tables"
        raise KeyError(Unquoted(f"table {name!r} is not in uses of the bolt; {hint}"))


class Component:
    """The base class of every bolt.

    Set each attribute on the class or on the instance. An exception is a class or its name:
    ``"TimeoutError"`` for a builtin, otherwise ``"package.module.Class"``.
    """

    #: The schema of each emitted stream; a bare schema is the stream ``"default"``. None if the
    #: bolt emits nothing. A column may be declared not nullable; nested fields may always be null.
    outputs: pa.Schema | Mapping[str, pa.Schema] | None = None
    #: The exceptions that make a record a dead letter at once, when this bolt raises them or fails
    #: a tuple with them. They add to `Reject` and to the setting ``reject`` of all bolts.
    reject: Collection[type[Exception] | str] = ()
    #: The only exceptions after which a record is retried. All others then make it a dead letter at
    #: once, also those of ``prepare`` and of Arrow's conversion of emitted values. A failure by
    #: `Retry`, with a text or without a reason is always retried.
    retry_on: Collection[type[Exception] | str] | None = None
    #: Whether the result of each call is kept until the micro-batch is done, so that no finished
    #: call is made again after a crash. For an `AsyncBolt`, or a `BasicBolt` without ``flush``.
    journal: bool = False
    uses: Sequence[str] = ()  # the names of the topology's tables that the bolt looks up
    #: The `TableView` of each table in ``uses``, as it was after the last finished micro-batch. Set
    #: before ``prepare`` is called.
    tables: Mapping[str, Any] = UsedTables()
    needs_identity: ClassVar[bool] = False  # whether the bolt receives the record of each row

    def prepare(self, context: Context) -> None:
        """Prepare the bolt, before a task's first row.

        If it raises, every row of the task fails, and neither ``flush`` nor ``cleanup`` is called.
        """

    def cleanup(self) -> None:
        """Release the resources of ``prepare``, after ``flush``. An exception is logged."""


class Bolt(Component):
    """A bolt that receives a tuple at a time, and anchors and acks explicitly, as in Storm.

    ``execute`` receives a `Tuple`.

    Attributes
    ----------
    outputs : pyarrow.Schema, or mapping of str to pyarrow.Schema, optional
        The schema of each emitted stream; a bare schema is the stream ``"default"``.
    collector : Collector
        The collector to emit, ack and fail through; set before ``prepare`` is called.
    """

    needs_identity = True
    collector: Collector

    def execute(self, tuple: Tuple) -> None:
        """Process one tuple.

        You may ack or fail it here, in a later ``execute``, in ``flush``, or in another thread. An
        exception fails it.
        """
        raise NotImplementedError(f"{type(self).__name__} must define execute(self, tuple)")

    def flush(self) -> None:
        """Emit and ack what is left, after a task's last tuple.

        Tuples that are neither acked nor failed when this returns fail with "not acked by" and the
        bolt's name; if it raises, they fail with the exception.
        """


class BasicBolt(Component):
    """A bolt whose tuples are anchored to its input, which is acked when ``execute`` returns.

    ``execute`` receives a `Tuple` and the `BasicCollector` to emit through.

    Attributes
    ----------
    outputs : pyarrow.Schema, or mapping of str to pyarrow.Schema, optional
        The schema of each emitted stream; a bare schema is the stream ``"default"``.
    threads : int, default 1
        The number of threads that call ``execute``, each with another tuple: for blocking clients.
        Their tuples are emitted in the order of the inputs. ``prepare``, ``flush`` and ``cleanup``
        are called while no ``execute`` runs.
    """

    needs_identity = True
    threads: int = 1

    def execute(self, tuple: Tuple, collector: BasicCollector) -> None:
        """Process one tuple. An exception fails it, and drops the tuples it emitted."""
        raise NotImplementedError(
            f"{type(self).__name__} must define execute(self, tuple, collector)"
        )

    def flush(self) -> None:
        """Do what is left, after a task's last tuple; there is no collector to emit through.

        If a bolt defines this, its inputs that have not failed are acked when it returns, and fail
        if it raises.
        """


class AsyncBolt(Component):
    """A bolt that processes many inputs at once in an event loop, for calls to services.

    ``execute`` is a coroutine that receives a `Tuple` and an `AsyncCollector`. As in a `BasicBolt`,
    its tuples are anchored to its input, which is acked when ``execute`` returns. Tuples are
    emitted in the order of the inputs, whichever call ends first.

    Await all asyncio tasks that ``execute`` starts. If one emits after ``execute`` has returned,
    while the batch still runs, the input fails. Tasks that run longer are cancelled, and the tuples
    that they would have emitted are missing.

    Attributes
    ----------
    outputs : pyarrow.Schema, or mapping of str to pyarrow.Schema, optional
        The schema of each emitted stream; a bare schema is the stream ``"default"``.
    max_concurrency : int or callable, default `DelayTarget`
        The number of concurrent calls in each task, and to each endpoint if there are several: a
        number, or a callable that returns a `Limit`, such as a class of `ackcore.flow`. The
        default adapts to the service. With a ``limit`` per key, for all keys together.
    timeout_s : float, optional
        Seconds after which an ``execute`` is cancelled, and fails its input with `TimeoutError`.
    limit : RateLimit, optional
        The calls per second in the whole topology, or the limits of each key, such as a tenant.
        The bolt's tasks that can run at once have equal shares: as many as its ``parallelism``, or
        as the source has tasks, if that is known; at most as many as Spark has cores. A task that
        receives all tuples of its keys, grouped by the limit's column, has the whole rate of each.
    endpoints : list of hashable, optional
        The endpoints of the calls, each with a ``max_concurrency`` of its own. ``execute`` calls
        the one in ``collector.endpoint``, which is the idlest one. Not with a ``limit`` per key.
    wait_in_task_s : float, default 5.0
        Seconds that an input may wait in its task after `Retry`, or while no endpoint answers. It
        does not count in ``max_concurrency`` meanwhile. An input that would wait longer fails and
        is retried later. `Retry` also pauses its endpoint: for about the time of one call at first,
        then twice as long each time, up to its ``after_s``, or else ``breaker_reset_s``.
    breaker_failures : int, optional, default 10
        The number of failures in a row (exceptions in ``retry_on``, time-outs, connection errors)
        after which an endpoint is not called. Inputs then fail with `Unavailable`, which counts
        no attempt. None disables the breaker, and the pauses after `Retry`.
    breaker_reset_s : float, default 5.0
        Seconds after which one call tests the endpoint again.
    max_batch : int, default 1
        The largest number of inputs of one call. Above 1, ``execute_many`` is called instead of
        ``execute``, with inputs of one batch (`Settings.chunk_rows`) and one key of ``limit``. No
        call waits for more inputs. It counts once in ``limit`` and in ``max_concurrency``.
    """

    needs_identity = True
    max_concurrency: int | Callable[[], Limit] = DelayTarget
    timeout_s: float | None = None
    limit: RateLimit | None = None
    endpoints: Collection[Hashable] | None = None
    wait_in_task_s: float = 5.0
    breaker_failures: int | None = 10
    breaker_reset_s: float = 5.0
    max_batch: int = 1

    async def prepare(self, context: Context) -> None:  # type: ignore[override]
        """Prepare the bolt, before a task's first row, in the loop that ``execute`` runs in.

        If it raises, every row of the task fails, and ``cleanup`` is not called.
        """

    async def execute(self, tuple: Tuple, collector: AsyncCollector) -> None:
        """Process one tuple. An exception fails it, and drops the tuples it emitted.

        An input that waits in its task (`wait_in_task_s`) is executed again, with a new collector.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define async execute(self, tuple, collector)"
        )

    async def execute_many(
        self, tuples: Sequence[Tuple], collectors: Sequence[AsyncCollector]
    ) -> None:
        """Process several tuples by one call; ``collectors[i]`` emits for ``tuples[i]``.

        An emission that does not fit its schema does not raise, but fails its tuple.
        If ``execute_many`` raises, the tuples it emitted are dropped. After `Retry`, a time-out, a
        failed connection or an exception in ``retry_on`` the call is repeated, or all its inputs
        fail. After any other exception the inputs are bisected, by calls with fewer inputs, until
        the failing ones are found; only these fail. So an input may be processed several times.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define async execute_many(self, tuples, collectors)"
        )

    async def cleanup(self) -> None:  # type: ignore[override]
        """Release the resources of ``prepare``. An exception is logged."""


class BatchBolt(Component):
    """A bolt that receives an Arrow batch at a time.

    ``process`` receives a `pyarrow.RecordBatch`, and the `BatchOutput` to emit and fail rows
    through.

    Attributes
    ----------
    outputs : pyarrow.Schema, or mapping of str to pyarrow.Schema, optional
        The schema of each emitted stream; a bare schema is the stream ``"default"``.
    needs_identity : bool
        Set it to True on the class to get ``out.identity``, the `Identity` of the batch's rows.
    """

    def process(self, batch: pa.RecordBatch, out: BatchOutput) -> None:
        """Process a batch: emit tuples, fail rows. All other rows are acked when this returns.

        If it raises, the tuples it emitted are dropped, and the batch is bisected until the failing
        rows are found; these fail with the exception. A row may therefore be processed several
        times, which state on ``self`` must tolerate. Many failing rows cost as many calls, which is
        logged: catch expected errors, and fail their rows with ``out.fail``.
        """
        raise NotImplementedError(f"{type(self).__name__} must define process(self, batch, out)")

    def flush(self, out: BatchOutput) -> None:
        """Emit and fail what is left, after a task's last batch.

        In ``flush``, the row numbers of `out.emit` and `out.fail` count all rows of the task from 0
        (`BatchOutput.first_row`). If a bolt defines ``flush``, all rows of the task that have not
        failed are acked when it returns, and fail if it raises. A tuple anchored to a row that
        failed before is dropped, and its other parents fail.
        """


def output_streams(component: Component) -> dict[str, pa.Schema]:
    """Return the schemas of a bolt's streams by name; empty if ``outputs`` is None.

    All nested fields are made nullable: Parquet raises for a null in one that is declared NOT NULL.
    Raises TypeError if ``outputs`` is neither a schema nor a mapping of str to schema. Raises
    ValueError if a stream has no fields.
    """
    outputs, name = component.outputs, type(component).__name__
    if outputs is None:
        return {}
    if isinstance(outputs, pa.Schema):
        outputs = {DEFAULT_STREAM: outputs}
    if not isinstance(outputs, Mapping):
        raise TypeError(
            f"{name}.outputs must be a pyarrow.Schema or a mapping of stream to one, got "
            f"{type(outputs).__name__}; write outputs = pa.schema([('word', pa.string())])"
        )
    for stream, schema in outputs.items():
        if not isinstance(stream, str) or not isinstance(schema, pa.Schema):
            raise TypeError(
                f"{name}.outputs must map the name of each stream to a pyarrow.Schema, got "
                f"{stream!r}: {type(schema).__name__}"
            )
        if not len(schema):
            raise ValueError(
                f"{name}.outputs[{stream!r}] must have at least one field, got none; name its "
                "fields, or remove the stream"
            )
    return {
        stream: pa.schema(
            [field.with_type(nullable_within(field.type)) for field in schema], schema.metadata
        )
        for stream, schema in outputs.items()
    }
