"""The base classes of sinks, which write the rows of ACKED records of each micro-batch."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cached_property, partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import pyarrow as pa
from pyspark.sql import DataFrame

from ackcore._error_hints import refused_call
from ackcore.calls.threads import refuse_lazy, refuse_unrun
from ackcore.spark.base.atomic import check_fence
from ackcore.spark.base.errors import CheckpointForeign, one_line
from ackcore.spark.base.failpoints import failpoint
from ackcore.spark.base.interrupts import raised_by
from ackcore.spark.sinks.columns import refusing_unfit_times, spark_schema
from ackcore.spark.sinks.rejects import SinkRejects
from ackcore.spark.sinks.sink_batch import SinkBatch

_log = logging.getLogger("ackcore")

T = TypeVar("T")


class _Closes(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=_Closes)


class Sink(ABC):
    """Base class of sinks. Pass an instance to `TopologyBuilder.sink` or `guard`.

    All methods run on the driver. The order of the calls:

    1. `check` when a query starts, before anything runs; also for queries that are then refused.
    2. `claim` after that, once the driver owns the checkpoint. In a bucket also before, if another
       query may run on the checkpoint: a start that is refused must not end that query.
    3. `write` for each micro-batch in which rows were emitted to the sink, in the order of their
       numbers. It gets the rows of ACKED records only, which may be none.
    4. `release` when the query or `run_batch` has ended, or a start is refused after `claim`.

    After a crash or an error, `write` is called again with the same number and the same rows. Each
    row is written exactly once if the sink then replaces what it wrote under this number, or finds
    the number in its target and writes nothing. `TransactionalSink` does the latter.

    ackcore calls one sink object from one thread at a time for each query. Several queries may
    share the object; `sink` and ``deployment`` tell them apart.
    """

    #: Whether a repeated `write` replaces the rows that were written under the same number, even
    #: with fewer or other rows. `isolate` is allowed only then, since it writes parts of a batch.
    replaces: bool = False
    #: Whether the sink needs the JVM of a classic session. Spark Connect then refuses the sink.
    needs_jvm: bool = False
    #: Whether `write` calls `check_fence` itself before its first effect. Otherwise ackcore checks
    #: before each call that this driver still owns the checkpoint.
    checks_fence: bool = False
    #: A directory, or a prefix in a bucket, to which no other sink may write.
    #: `TopologyBuilder.build` refuses two sinks with the same one.
    own_place: str | None = None

    def check(  # noqa: B027
        self, sink: str, schema: pa.Schema, case_sensitive: bool = False
    ) -> None:
        """Refuse columns that the sink cannot write. By default all columns are accepted.

        Parameters
        ----------
        sink : str
            The sink's name in its topology, for errors.
        schema : pyarrow.Schema
            The columns of the rows.
        case_sensitive : bool, default False
            Whether the session distinguishes columns whose names differ only in case.

        Raises
        ------
        Exception
            Any error refuses the query: TypeError or ValueError for columns, `SinkUnavailable` if
            the target cannot be reached.
        """

    def claim(self, sink: str, deployment: str, checkpoint: str) -> None:  # noqa: B027
        """Prepare the target before any run, for instance create a table. Does nothing by default.

        Parameters
        ----------
        sink : str
            The sink's name in its topology.
        deployment : str
            The unique identifier of the checkpoint, 16 hex digits. A moved checkpoint keeps it.
        checkpoint : str
            The location of the checkpoint, for errors.

        Raises
        ------
        Exception
            Any error refuses the query: `CheckpointForeign` if the target belongs to another query.
        """

    @abstractmethod
    def write(self, batch: SinkBatch) -> SinkRejects | None:
        """Write the rows of a micro-batch. They must be durable when this method returns.

        Parameters
        ----------
        batch : SinkBatch
            The rows.

        Returns
        -------
        SinkRejects or None
            The rows that the sink refuses, or None if it refuses none. All others are written. A
            repeated call must refuse the same rows again.

        Raises
        ------
        SinkRejects
            If the sink refuses rows and has written nothing. It is called again without these rows.
        CheckpointCorrupt, CheckpointForeign, CheckpointInUse, InvalidRejects, TooManyRefused
            If a repeated call would fail, too. The error ends the query.
        Exception
            After any other error the method is called again. The query ends after
            ``max_sink_attempts`` calls in all.
        """

    def release(self, sink: str, deployment: str) -> None:  # noqa: B027
        """Close connections that the sink keeps open for a query. Does nothing by default.

        A later `write` may open them again. ackcore logs an error of this method and continues.
        """


class Written(NamedTuple):
    """The last micro-batch that a `TransactionalSink` has written, as recorded in its store.

    Attributes
    ----------
    number : int
        The number of the micro-batch, at least 0; negative if there was none.
    content : str
        `SinkBatch.content` of the micro-batch, or `ANY_CONTENT`.
    """

    number: int
    content: str


#: A content that equals all others. A user records it to have a micro-batch counted as written.
ANY_CONTENT = "any"


class TransactionalSink(Sink, Generic[T]):
    """Base class of sinks for stores with transactions; each row is written exactly once.

    A subclass defines `begin`, `read_number`, `write_rows`, `record` and `commit`. The store keeps
    one number for each deployment and sink: that of the last micro-batch that it has. `write` calls
    these methods in one transaction:

    1. `begin`, and `read_number` in the new transaction.
    2. A check that this driver still owns the checkpoint; if not, `CheckpointInUse` is raised.
       ackcore also checks before it calls `write`, because `begin` may end the session of another
       driver.
    3. If the store has the micro-batch with the same content, nothing is written. If it has this
       number with other content, or a later number, the checkpoint was restored from a backup or
       another query wrote them, and `CheckpointForeign` is raised.
    4. `write_rows`, `record` and `commit`.

    If the number is smaller than one that this object has committed or found, the store has lost a
    commit. For instance, a failover led to a server that did not have the commit yet. Then
    `CheckpointForeign` is raised once; after the next start, the query continues. If the store
    has no number, the query continues at once: a user may have deleted the number.

    Two drivers must not both commit the same micro-batch. So `read_number` locks the number until
    the transaction ends, or `commit` fails if another transaction changed the number meanwhile.

    The type parameter is the type of transactions. `ackcore.examples.mongo_sink` is an example.
    """

    @cached_property
    def __committed(self) -> dict[tuple[str, str], int]:
        """The last micro-batch that this object has committed, by deployment and sink name."""
        return {}

    @abstractmethod
    def begin(self, batch: SinkBatch) -> AbstractContextManager[T]:
        """Return a context manager that begins a transaction and yields it.

        On exit it rolls the transaction back unless `commit` was called. It may use a connection
        that stays open until `release`, and replace errors of the store by `SinkUnavailable`.
        """

    @abstractmethod
    def read_number(self, transaction: T, batch: SinkBatch) -> Written | None:
        """Return the last `Written` that `record` stored for this deployment and sink, or None."""

    @abstractmethod
    def write_rows(self, transaction: T, batch: SinkBatch) -> SinkRejects | None:
        """Write the rows of ``batch.record_batches()``.

        Returns None if none is refused, else returns or raises `SinkRejects`. Either way the
        transaction is then rolled back, and `write` is called again without these rows.
        """

    @abstractmethod
    def record(self, transaction: T, batch: SinkBatch, written: Written) -> None:
        """Store ``written`` for ``(batch.deployment, batch.sink)``, in place of an earlier one."""

    @abstractmethod
    def commit(self, transaction: T) -> None:
        """Commit. Raise an error if the outcome is unknown: the next `write` reads the number."""

    def advice(self, batch: SinkBatch, last: int) -> str:
        """Return advice on how to have micro-batches from ``batch`` to ``last`` written again.

        ``last``: the number of the last one that the store has. The advice is the end of the
        message of a `CheckpointForeign`. Override it to name the statement that a user must run.
        """
        return (
            f"or delete the number that {self!r} has recorded for deployment {batch.deployment} "
            f"and sink {batch.sink!r}, to have micro-batches from {batch.batch_id} to {last} "
            "written again, in addition to their rows that are there"
        )

    def write(self, batch: SinkBatch) -> SinkRejects | None:
        """Write the rows of a micro-batch and its number in one transaction. Return None.

        Nothing is written if the store has this number with the same rows. Raises CheckpointForeign
        if it has this number with other rows, a later number, or lost a commit of this object;
        CheckpointInUse if another driver has taken over; SinkRejects if rows are refused; and
        errors of the subclass.
        """
        number, content = batch.batch_id, batch.content()
        with self.begin(batch) as transaction:
            found = self.read_number(transaction, batch)
            # A driver that passes this check owned the checkpoint while it held the number's lock,
            # or after it read the version that its commit replaces.
            check_fence()
            of, committed = (batch.deployment, batch.sink), self.__committed
            last = committed.pop(of, -1)
            if found is not None and 0 <= found.number < last < number:
                raise CheckpointForeign(
                    f"{self!r} has micro-batch {found.number} as the last one of sink "
                    f"{batch.sink!r}, though the sink has committed micro-batch {last}. The target "
                    "has lost commits: a failover to a replica that lagged, or a restored backup. "
                    f"Rows of the micro-batches up to {last} may be missing. Restore them, or "
                    "start again to continue without them"
                )
            committed[of] = max(last, -1 if found is None else found.number)
            if found is not None and found.number >= number:
                if found.number == number and found.content in (content, ANY_CONTENT):
                    return None
                raise CheckpointForeign(
                    f"{self!r} has micro-batch {found.number} of sink {batch.sink!r}, and the "
                    f"checkpoint {batch.checkpoint} is at micro-batch {number}"
                    f"{' with other rows' * (found.number == number)}: the checkpoint is older "
                    "than the rows written from it, for instance restored from a backup. Start "
                    f"with a new checkpoint, {self.advice(batch, found.number)}"
                )
            refused = self.write_rows(transaction, batch)
            if refused is not None and len(refused):
                raise refused  # a repeated call would find the number, and could not refuse again
            self.record(transaction, batch, Written(number, content))
            failpoint("in-transaction", number)
            self.commit(transaction)
            committed[of] = number
        return None


class Connections(Generic[C]):
    """The open connections of one sink object, by deployment and sink name.

    A pickled copy is empty, so that the sink object can be sent to workers. Several threads may use
    it, but only one at a time for the same deployment and name.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], C] = {}

    def __reduce__(self) -> tuple[type[Connections[C]], tuple[()]]:
        return type(self), ()

    def get(self, sink: str, deployment: str) -> C | None:
        """Return the open connection, or None."""
        return self._open.get((deployment, sink))

    def put(self, sink: str, deployment: str, connection: C) -> C:
        """Store an open connection, and return it. One that was stored before is not closed."""
        self._open[deployment, sink] = connection
        return connection

    def release(self, sink: str, deployment: str) -> None:
        """Remove and close the stored connection, if there is one."""
        found = self._open.pop((deployment, sink), None)
        if found is not None:
            found.close()


#: Writers of Spark and Delta, which write when their last method is called.
_WRITERS = {"DataFrameWriter", "DataFrameWriterV2", "MergeIntoWriter", "DeltaMergeBuilder"}


class FunctionSink(Sink):
    """The sink that calls a user's function of (DataFrame, batch id); `replaces` is True."""

    replaces = True

    def __init__(self, function: Callable[[DataFrame, int], object]) -> None:
        self._function = function

    def check(self, sink: str, schema: pa.Schema, case_sensitive: bool = False) -> None:
        """Raise TypeError if Spark has no type for a column, so that there is no DataFrame."""
        spark_schema(f"sink {sink!r}", schema)

    @refusing_unfit_times
    def write(self, batch: SinkBatch) -> SinkRejects | None:
        """Call the function; return its result if that is a `SinkRejects`, else None.

        Raises TypeError if it returns a coroutine, a generator, a DataFrame that is not the result
        of a command, a writer that was not started, or a sink.
        """
        frame = batch.frame()
        answer = self._function(frame, batch.batch_id)
        sink, kind = f"sink {batch.sink!r}", type(answer).__name__
        refuse_unrun(answer, sink)
        # The result of a command such as INSERT, which has run, is a local DataFrame.
        is_local = getattr(answer, "isLocal", None)
        is_lazy = answer is frame or (kind == "DataFrame" and is_local and not is_local())
        if is_lazy or kind in _WRITERS:
            raise TypeError(
                f"{sink} returned a {kind}, which may have written nothing; "
                "call the last method of a writer, such as frame.write.save(path), "
                "saveAsTable(name), append(), merge() or execute(), and return None"
            )
        if isinstance(answer, Sink):
            raise TypeError(
                f"{sink} returned {answer!r}, which has written nothing; declare what the function "
                "returns as the writer of the sink, instead of the function"
            )
        return answer if isinstance(answer, SinkRejects) else None


def as_sink(writer: Sink | Callable[[DataFrame, int], object]) -> Sink:
    """Return a `Sink` unchanged, and a function in a new `FunctionSink`."""
    return writer if isinstance(writer, Sink) else FunctionSink(writer)


def check_sink(
    name: str,
    writer: Any,
    schema: pa.Schema | None,
    case_sensitive: bool = False,
    isolated: bool = False,
) -> None:
    """Check before a query starts that a writer can write the rows of a stream.

    Raises TypeError if the writer is neither a sink nor a function of (DataFrame, batch id); if it
    or a method of it has ``async`` or ``yield``; if ``isolated``, and the sink does not replace its
    rows; and for a function if Spark lacks a column's type. Raises the errors of `Sink.check`.

    ``name``: the sink's name, for errors. ``writer``: the argument of `TopologyBuilder.sink`.
    ``schema``: the stream's schema; with None, if it is not known, `Sink.check` is not called.
    ``isolated``: whether the topology sets ``isolate``. ``case_sensitive``: as in `Sink.check`.
    """
    if not isinstance(writer, Sink):
        must = f"sink {name!r} must be a function of (DataFrame, batch_id) or a Sink"
        if not callable(writer):
            raise TypeError(f"{must}, got {type(writer).__name__}")
        refuse_lazy(writer, f"sink {name!r}")
        if (takes := refused_call(writer, ("frame", "batch_id"))) is not None:
            raise TypeError(f"{must}, got a function of {takes}")
    sink = as_sink(writer)
    for method in ("claim", "write", "write_rows", "record", "commit"):
        refuse_lazy(getattr(sink, method, None), f"{method} of sink {name!r}")
    if isolated and not sink.replaces:
        raise TypeError(
            f"sink {name!r} cannot have isolate: {writer!r} does not replace the rows that it has "
            "written under the same number (Sink.replaces). Leave isolate out, and have the sink "
            "return or raise ackcore.spark.SinkRejects"
        )
    if schema is not None:
        sink.check(name, schema, case_sensitive)


def release_sinks(writers: Mapping[str, Any], deployment: str) -> None:
    """Call `Sink.release` of each sink in ``writers``, by name; log its errors and continue."""
    for name, writer in writers.items():
        error = raised_by(partial(as_sink(writer).release, name, deployment))
        if error is not None:
            said = "sink %r could not be released: %s; its connections may stay open until the exit"
            _log.warning(said, name, one_line(error))
