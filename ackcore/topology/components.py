"""The base classes that users extend: bolts in four shapes, and the objects an engine passes to
them.

`Bolt` takes a tuple at a time and acks it when it likes; `BasicBolt` does the anchoring and acking
by itself; `AsyncBolt` does so for many tuples at once, in an event loop; `BatchBolt` takes an Arrow
batch at a time, at full speed.  In all of them raising fails
the input with the exception as its reason and the process goes on; nothing that a bolt does can
lose a record, or count it twice.  What its methods are to emit goes through a collector: returning
anything but None counts as raising.

A bolt is made on the driver, pickled, and prepared in each task: connections and clients belong
into ``prepare``, not into ``__init__``.  A task that gets no rows prepares nothing.  A bolt keeps
nothing from one micro-batch to the next; what must last goes through a sink.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import pyarrow as pa

from ackcore.flow import Chooser, DelayTarget, Idlest, Limit
from ackcore.topology.tuples import Identity, Reason, Tuple

#: The stream that is meant where none is named.
DEFAULT_STREAM = "default"


class Collector(Protocol):
    """The interface through which a `Bolt` emits, acks and fails.

    It may be kept and called from any thread until ``flush()`` has returned; a later call raises
    `RuntimeError` in its caller.
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
            The inputs that it hangs from: each of them completes only once this tuple has.  None
            leaves it untracked.  The same input twice gives two edges.
        stream : str, default "default"
            One of the streams in ``outputs``.

        Raises
        ------
        ValueError
            If there is no such stream, the values do not fit its schema, or an anchor was acked
            before.  In the last case that input fails: a tree that grows after its ack cannot
            be told complete.  What Arrow cannot convert fails the anchors when the batch ends.
        TypeError
            If ``values`` or ``anchors`` is something else.
        RuntimeError
            If ``flush()`` has returned.

        Notes
        -----
        What hangs from a tuple that failed is emitted all the same; it is a failed record's row
        then, and no sink gets it.  If that tuple failed in an earlier batch, it is not emitted any
        more, and its other anchors fail with it.
        """

    def ack(self, tuple: Tuple) -> None:
        """Say that an input is done with.

        Acked a second time, or after it failed, nothing happens but that a count goes up.  Raising
        from the ``execute`` of an input fails it though it was acked.
        """

    def fail(self, tuple: Tuple, reason: BaseException | Reason | str | None = None) -> None:
        """Say that an input failed, so that its record is tried again.

        Of several reasons the first is kept.  An input that was acked in the same batch fails; one
        that was acked earlier stays acked, which is counted.
        """


class BasicCollector(Protocol):
    """The interface through which a `BasicBolt` emits while it executes one input."""

    def emit(self, values: Sequence[Any] | Mapping[str, Any], stream: str = DEFAULT_STREAM) -> None:
        """Emit a tuple that hangs from the input; see `Collector.emit`.

        Any thread may call it until ``execute`` has returned; after that it raises `ValueError`.
        """


class AsyncCollector(BasicCollector, Protocol):
    """The interface through which an `AsyncBolt` emits while it executes one input.

    Attributes
    ----------
    endpoint : hashable
        Which of the bolt's ``endpoints`` this call is to go to; None if it has none.
    """

    endpoint: Any


class BatchOutput(Protocol):
    """The interface through which a `BatchBolt` emits and fails while it processes one batch.

    Attributes
    ----------
    component, stream : str
        Where the batch comes from; empty in ``flush``.
    first_row : int
        The task's number of the batch's first row: how many rows came before.  0 in ``flush``,
        which names rows by the task's numbers.
    identity : Identity, optional
        Which records the rows are, if the bolt says ``needs_identity = True``.
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
            or the columns in the schema's order.  A column is an Arrow array, a numpy array, or
            a sequence of values; one of another type is cast if that loses nothing, and
            else refused: a cast back gives what it was, and a Python value equals what the
            column gives back.  Numbers are not cast to times, nor dates to timestamps, nor times
            without a zone to those with one.
        parents : array-like of int, list of lists, or None
            Row numbers of the input batch that the tuples hang from: one per tuple, or a list
            per tuple (an Arrow list array, or lists), or None to leave them untracked.
        stream : str, default "default"
            One of the streams in ``outputs``.

        Raises
        ------
        ValueError, TypeError
            If there is no such stream, or columns or parents do not fit; nothing is emitted.
        RuntimeError
            If the call that it was handed to has returned.
        """

    def fail(
        self,
        rows: Any,
        reasons: BaseException | Reason | str | Sequence[BaseException | Reason | str] | None,
    ) -> None:
        """Fail rows of the input batch, with one reason per row or one for them all.

        What hangs from them is emitted all the same.  Of several reasons for a row the first is
        kept.
        """


@dataclass(frozen=True)
class Context:
    """The argument of ``prepare``.

    Attributes
    ----------
    component : str
        Name of the bolt in its topology.
    task : int
        Which of its tasks this is: the partition.
    batch_id : int, optional
        Number of the micro-batch; None where there are none.
    collector : Collector, optional
        The same as ``self.collector``; None for bolts that are handed theirs.
    """

    component: str
    task: int = 0
    batch_id: int | None = None
    collector: Collector | None = None


class Component:
    """The base class of every bolt.

    Attributes
    ----------
    outputs : pyarrow.Schema, or mapping of str to pyarrow.Schema, optional
        What it emits, by stream; a bare schema is the stream ``"default"``.  On the class or on
        the instance.
    inputs : pyarrow.Schema, optional
        What its inputs must look like; checked when the topology is built.
    reject : list of exception classes or of their names, default ()
        What sends a record to the dead letters at once when this bolt raises it, or fails a tuple
        with it: beside `Reject`, and the setting ``reject``, which is for all bolts.
    retry_on : list of exception classes or of their names, optional
        After what a record is tried again: all other exceptions then send it to the dead letters
        at once, those of ``prepare`` and those that Arrow raises over what was emitted as well.
        `Retry` is always tried again, and so is what fails with a text or with no reason.
    journal : bool, default False
        Whether what each of its calls came to is kept until the micro-batch is done, so that none
        that finished is made again, whatever dies: for an `AsyncBolt`, and a `BasicBolt` without a
        ``flush``.
    needs_identity : bool
        Whether it asks which record a row is.

    Each may be set on the class or on the instance.  A name is a builtin's, ``"TimeoutError"``, or
    ``"package.module.Class"``.
    """

    outputs: pa.Schema | Mapping[str, pa.Schema] | None = None
    inputs: pa.Schema | None = None
    reject: Iterable[type[Exception] | str] = ()
    retry_on: Iterable[type[Exception] | str] | None = None
    journal: bool = False
    needs_identity: ClassVar[bool] = False

    def prepare(self, context: Context) -> None:
        """Get ready: before a task's first row.

        If it raises, every row of the task fails, and neither ``flush`` nor ``cleanup`` is called.
        """

    def cleanup(self) -> None:
        """Let go of what ``prepare`` took; after ``flush``.  If it raises, that is logged."""


class Bolt(Component):
    """A bolt that takes a tuple at a time, and anchors and acks by itself: Storm's way.

    ``execute`` is handed a `Tuple`.

    Attributes
    ----------
    outputs : pyarrow.Schema, or mapping of str to pyarrow.Schema, optional
        What it emits, by stream; a bare schema is the stream ``"default"``.
    inputs : pyarrow.Schema, optional
        What its inputs must have, beside perhaps other fields.
    collector : Collector
        Where to emit, ack and fail; there from ``prepare`` on.
    threads : int, default 1
        How many ``execute`` at once, in threads of their own, each with another tuple: for clients
        that block.  What they emit is emitted in the order of their inputs; ``prepare``, ``flush``
        and ``cleanup`` are called while none runs.
    """

    needs_identity = True
    collector: Collector
    threads: int = 1

    def execute(self, tuple: Tuple) -> None:
        """Work on one tuple.

        It may be acked or failed now, in a later ``execute``, in ``flush``, or by another thread.
        Raising fails it.
        """
        raise NotImplementedError(f"{type(self).__name__} must define execute(self, tuple)")

    def flush(self) -> None:
        """Finish: after a task's last tuple.

        What is neither acked nor failed when this returns fails with "not acked by" and the bolt's
        name; if it raises, with the exception.
        """


class BasicBolt(Component):
    """A bolt whose tuples hang from its input, which is acked when ``execute`` returns.

    ``execute`` is handed a `Tuple` and the `BasicCollector` to emit through.

    Attributes
    ----------
    outputs : pyarrow.Schema, or mapping of str to pyarrow.Schema, optional
        What it emits, by stream; a bare schema is the stream ``"default"``.
    inputs : pyarrow.Schema, optional
        What its inputs must have, beside perhaps other fields.
    threads : int, default 1
        As of a `Bolt`.
    """

    needs_identity = True
    threads: int = 1

    def execute(self, tuple: Tuple, collector: BasicCollector) -> None:
        """Work on one tuple; raising fails it, and drops what it emitted."""
        raise NotImplementedError(
            f"{type(self).__name__} must define execute(self, tuple, collector)"
        )

    def flush(self) -> None:
        """Finish: after a task's last tuple.

        A bolt that defines this has its inputs acked when it returns, and failed if it raises.
        """


class AsyncBolt(Component):
    """A bolt that has many inputs out at once, in an event loop: for calls to the outside.

    ``execute`` is a coroutine, handed a `Tuple` and the `AsyncCollector` to emit through.  As of a
    `BasicBolt`, what it emits hangs from its input, which is acked when it returns.  Whichever
    answer is faster, what comes of the inputs is emitted in their order.

    Each of the settings may be set on the class or on the instance; `ackcore.calls.CallSettings`
    has them in full.

    Attributes
    ----------
    outputs : pyarrow.Schema, or mapping of str to pyarrow.Schema, optional
        What it emits, by stream; a bare schema is the stream ``"default"``.
    inputs : pyarrow.Schema, optional
        What its inputs must have, beside perhaps other fields.
    max_concurrency : int or callable, default `DelayTarget`
        How many inputs are out at once in each task (of each endpoint, if there are several): a
        number, or what makes a `Limit`, such as a class of `ackcore.flow`.  The default finds out
        how many the service is quick with.
    timeout_s : float, optional
        Seconds after which an ``execute`` is cancelled, and fails its input with `TimeoutError`.
    rate_per_s : float, optional
        How many are begun per second at most, in the whole topology: each task has an equal share.
        It is divided by as many tasks as may have inputs at once: those behind the bolt's grouping
        (``parallelism``), or as many as Spark has cores if these are fewer.
    endpoints : iterable of hashable, optional
        What calls go to, each by a window of its own: ``collector.endpoint`` says which.
    chooser : callable, default `Idlest`
        Makes the `Chooser` that picks among them.
    wait_in_task_s : float, default 5.0
        Seconds that an input waits in its task, its place given up meanwhile, if it raises `Retry`
        or no endpoint answers; what would have to wait for longer waits as any other that failed.
        A single refusal pauses its endpoint for the time of a call: the inputs that were not called
        yet wait that out besides, like a window that is full.
    breaker_failures : int, optional, default 10
        Failures in a row (what ``retry_on`` names, time-outs, connections) after which an
        endpoint is left alone; its inputs fail with `Unavailable` then, which is no attempt.  None
        for never.
    breaker_reset_s : float, default 5.0
        Seconds after which a single call tries whether it answers again.
    """

    needs_identity = True
    max_concurrency: int | Callable[[], Limit] = DelayTarget
    timeout_s: float | None = None
    rate_per_s: float | None = None
    endpoints: Iterable[Hashable] | None = None
    chooser: Callable[[], Chooser] = Idlest
    wait_in_task_s: float = 5.0
    breaker_failures: int | None = 10
    breaker_reset_s: float = 5.0

    async def prepare(self, context: Context) -> None:  # type: ignore[override]
        """Get ready: before a task's first row, in the loop that ``execute`` runs in.

        If it raises, every row of the task fails, and ``cleanup`` is not called.
        """

    async def execute(self, tuple: Tuple, collector: AsyncCollector) -> None:
        """Work on one tuple; raising fails it, and drops what it emitted.

        An input that waits in its task is executed again, with a collector of its own.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define async execute(self, tuple, collector)"
        )

    async def cleanup(self) -> None:  # type: ignore[override]
        """Let go of what ``prepare`` took.  If it raises, that is logged."""


class BatchBolt(Component):
    """A bolt that takes an Arrow batch at a time.

    ``process`` is handed a `pyarrow.RecordBatch` and the `BatchOutput` to emit and fail rows
    through, whose ``identity`` is the `Identity` of the batch's rows.

    Attributes
    ----------
    outputs : pyarrow.Schema, or mapping of str to pyarrow.Schema, optional
        What it emits, by stream; a bare schema is the stream ``"default"``.
    inputs : pyarrow.Schema, optional
        What its inputs must have, beside perhaps other fields.
    needs_identity : bool
        Set it to True on the class for ``out.identity``, which is None otherwise.
    """

    def process(self, batch: pa.RecordBatch, out: BatchOutput) -> None:
        """Work on a batch: emit, fail rows; the rest is acked when this returns.

        If it raises, nothing that it emitted counts, and halves of the batch are processed again,
        and their halves, until the rows that make it raise stand alone; these fail with the
        exception.  So it may see a row several times, and what it keeps on ``self`` must bear that.
        Many such rows cost as many calls, which the log tells: catch what is to be expected, and
        fail those rows with ``out.fail``.
        """
        raise NotImplementedError(f"{type(self).__name__} must define process(self, batch, out)")

    def flush(self, out: BatchOutput) -> None:
        """Finish: after a task's last batch.

        Here ``parents`` and ``rows`` are the task's row numbers (`BatchOutput.first_row`).  A bolt
        that defines this has its rows acked when it returns, and failed if it raises.  What hangs
        from a row that failed before is not emitted any more, and its other parents fail with it.
        """


def output_streams(component: Component) -> dict[str, pa.Schema]:
    """Return what a component emits as a mapping of stream to schema.

    Raises
    ------
    TypeError
        If ``outputs`` is neither a schema nor a mapping of str to schema.
    ValueError
        If a stream has no fields.
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
                f"{name}.outputs must map streams to pyarrow.Schema, got {stream!r}: "
                f"{type(schema).__name__}"
            )
        if not len(schema):
            raise ValueError(
                f"{name}.outputs[{stream!r}] must have a field at least; a tuple without values "
                "carries nothing"
            )
    return dict(outputs)


def refuse_unrunnable(component: Component) -> None:
    """Raise `TypeError` for a bolt whose methods would do nothing when they are called.

    A ``yield`` or an ``async`` makes a call return at once: its inputs would be acked undone.
    """
    if not isinstance(component, Bolt | BasicBolt | BatchBolt | AsyncBolt):
        raise TypeError(
            f"a bolt must be an instance of Bolt, BasicBolt, BatchBolt or AsyncBolt, got "
            f"{'the class ' if isinstance(component, type) else ''}"
            f"{component.__name__ if isinstance(component, type) else type(component).__name__}"
        )
    if isinstance(component, AsyncBolt):
        _refuse_plain(component)
        return
    for method in ("prepare", "execute", "process", "flush", "cleanup"):
        function = getattr(component, method, None)
        if (
            inspect.isgeneratorfunction(function)
            or inspect.iscoroutinefunction(function)
            or inspect.isasyncgenfunction(function)
        ):
            raise TypeError(
                f"{type(component).__name__}.{method} must be a plain method, got one with "
                "'yield' or 'async': calling it would do nothing; emit what it yields, or derive "
                "from AsyncBolt to await"
            )


def _refuse_plain(component: AsyncBolt) -> None:
    made = type(component).__name__
    for method in ("prepare", "execute", "cleanup"):
        if not inspect.iscoroutinefunction(getattr(component, method)):
            raise TypeError(
                f"{made}.{method} must be a coroutine function, as it is an AsyncBolt's; write it "
                "with 'async def', or derive from BasicBolt with threads=... for a client that "
                "blocks"
            )
    if hasattr(component, "flush"):
        raise TypeError(
            f"{made}.flush would never be called, as an AsyncBolt has no flush: each input is done "
            "when its execute returns; emit there what is to be emitted"
        )
