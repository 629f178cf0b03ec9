"""The rows, the plan and the tasks of a run, and its result."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from ackcore.calls.usage import UsageCounts
from ackcore.ids import spout_key
from ackcore.spark.base.arrow_batches import Batches, MapInArrow, plainly_named
from ackcore.spark.base.reasons import FAILED
from ackcore.spark.base.schemas import CORRUPT_REASON, SinkFile
from ackcore.spark.base.session import task_slots
from ackcore.spark.base.sources import (
    emitted_schema,
    has_fixed_order,
    has_fixed_rows,
    number_of,
    source_schema,
)
from ackcore.spark.base.traces import RecordTrace
from ackcore.spark.base.versions import to_arrow_schema
from ackcore.spark.checkpoint.decisions import BatchDecision, Plan
from ackcore.spark.tasks.decoding import CorruptLines, ValueDecoder
from ackcore.spark.tasks.failed_rows import FailedRows
from ackcore.spark.tasks.record_ids import Decoder, RefusedOffsets, SpoutSpec
from ackcore.spark.tasks.reread_stage import PieceReader
from ackcore.spark.tasks.row_files import RowFile
from ackcore.spark.tasks.spec import RunPlan, TaskPlan, TaskSpec
from ackcore.spark.tasks.spout_stage import Slice
from ackcore.topology.builder import Topology
from ackcore.topology.components import DEFAULT_STREAM
from ackcore.topology.parts import Spout
from ackcore.topology.stage_layout import Layout

T = TypeVar("T")


@runtime_checkable
class PlannedReader(Protocol):
    """A function for ``mapInArrow``: takes task numbers, returns these tasks' rows of a plan.

    `planned` makes one for another plan. ``fixed`` is the part that is equal for all plans: a kept
    job is used again only if it compares equal (``==``).
    """

    @property
    def fixed(self) -> object: ...

    def to_json(self) -> Any:
        """Return the part that depends on the plan, without any secret, for `planned`."""

    def planned(self, body: Any) -> PlannedReader:
        """Return a reader for the plan from whose reader `to_json` returned ``body``."""

    def __call__(self, batches: Batches) -> Batches: ...


class Snapshot(NamedTuple):
    """Rows that tasks read: ``read`` returns the rows of the partition numbers in ``frame``.

    ``again``, if given, reads rows at given places again without reading all.
    """

    frame: DataFrame
    read: Callable[[Batches], Batches]
    again: PieceReader | None = None


@dataclass(frozen=True)
class InputFrame:
    """New rows for the spout stage, as a DataFrame.

    ``spout`` is the spout of the rows.  If it is None, each spout has a nullable struct column, in
    the order of the topology, and each partition has rows of one spout.  The rows of a ``snapshot``
    are in files of ackcore or in ranges of offsets, and can be read again without the source.
    Records at the ``refused`` offsets are dead letters.  With ``repeats``, every reading of the
    frame gives the same rows in the same order, whatever Spark's plan shows.
    With ``own_session`` the frame is an RDD in a session that only its streaming query uses.
    ``tasks`` is the number of tasks that read the rows; None if it is unknown.
    """

    frame: DataFrame
    spout: str | None
    snapshot: Snapshot | None = None
    refused: tuple[RefusedOffsets, ...] = ()
    repeats: bool = False
    own_session: bool = False
    tasks: int | None = None

    def map_in_arrow(self, function: MapInArrow, schema: StructType | str) -> DataFrame:
        """Return the result of ``mapInArrow`` on the rows: those of the snapshot, if there is one.

        The columns may have any names, also with dots.
        """
        if self.snapshot is not None:
            # The same worker reads the rows: through the JVM, they are written and read twice more.
            read = self.snapshot.read
            return self.snapshot.frame.mapInArrow(lambda batches: function(read(batches)), schema)
        return plainly_named(self.frame).mapInArrow(function, schema)


class Obstacle(NamedTuple):
    """The reason why rows cannot be read, and the time-out for waiting; None: no time-out."""

    text: str
    timeout_s: float | None = None


class Backlog(NamedTuple):
    """The parts of a source, such as partitions of a topic, with rows for later micro-batches."""

    parts: Sequence[str]
    #: By part, whether the micro-batch reads none of its rows. False if the server of this part did
    #: not answer, but another server did.
    waits: Sequence[bool]
    #: By task, its ranges in order: the number of the part, or -1 if the range is of no such part,
    #: and the maximum number of rows.
    tasks: Sequence[Sequence[tuple[int, int]]]


class PlannedRows:
    """The spouts whose rows a plan names; this base class has none.

    A subclass has the spouts of one kind, or of several kinds in `parts`, whose results most
    methods join.
    """

    parts: Sequence[PlannedRows] = ()
    #: Whether `close` was called.
    is_closed = False

    # -- for the engine ---------------------------------------------------------------------------

    def plan(self, number: int, parent: Plan | None) -> Mapping[str, Any]:
        """Return, by spout, the rows of a micro-batch for `Plan.offsets`, such as offset ranges.

        ``number``: the micro-batch's number. ``parent``: the plan before it, or None.
        """
        found: dict[str, Any] = {}
        for part in self.parts:
            found |= part.plan(number, parent)
        return found

    def most_retries(self) -> int | None:
        """Return the most retries that leave a micro-batch room for new records; None: no limit."""
        limits = (part.most_retries() for part in self.parts)
        return min((limit for limit in limits if limit is not None), default=None)

    def inputs(self, plan: Plan) -> list[InputFrame]:
        """Return frames of the rows that a recorded plan names."""
        return [one for part in self.parts for one in part.inputs(plan)]

    def joined(self, plan: Plan) -> Plan:
        """Return a recorded plan with the rows of spouts that were added since, if any."""
        for part in self.parts:
            plan = part.joined(plan)
        return plan

    def mended(self, plan: Plan) -> Plan:
        """Return the plan without lost rows; the same object if none are lost."""
        for part in self.parts:
            plan = part.mended(plan)
        return plan

    def replaced(self, plan: Plan) -> str | None:
        """Return a text about rows that were replaced since the plan was made, or None.

        If a text is returned, the run is not accepted, and the micro-batch runs again. None may
        also mean that the source does not answer. Raises SourceError if changed rows end the query.
        """
        return _first(part.replaced(plan) for part in self.parts)

    def unread(self, error: Exception) -> str | None:
        """Return a text about the unread rows if a run failed only because of them, else None."""
        return _first(part.unread(error) for part in self.parts)

    def way_out(self, plan: Plan, said: str) -> str:
        """Return the end of an error message: how to continue without rows that cannot be read.

        It is "" if there is no way. ``said``: the error of reading them.
        """
        return next(filter(None, (part.way_out(plan, said) for part in self.parts)), "")

    def obstacle(self, plan: Plan) -> Obstacle | None:
        """Return what the rows of a plan wait for, such as a broker that is down, or None.

        None does not mean that they can be read: they may be lost, or the source does not answer.
        """
        return _first(part.obstacle(plan) for part in self.parts)

    def backlogs(self, plan: Plan) -> Mapping[str, Backlog]:
        """Return, by spout, the parts of its source with rows that a plan leaves for later."""
        return {name: one for part in self.parts for name, one in part.backlogs(plan).items()}

    def done(self, plan: Plan, decision: BatchDecision) -> Mapping[str, int]:
        """Report the rows of a marked micro-batch to the sources; return lags in offsets by spout.

        It is called again for the last micro-batch after a restart.
        """
        lag: dict[str, int] = {}
        for part in self.parts:
            lag |= part.done(plan, decision)
        return lag

    # -- for the stream ---------------------------------------------------------------------------

    def has_new(self) -> bool:
        """Return whether the sources need a micro-batch; may raise if a source does not answer."""
        return not self.is_through

    @property
    def has_room(self) -> bool:
        """Whether a micro-batch may take new rows."""
        return True

    @property
    def is_through(self) -> bool:
        """Whether a query that ends by itself, like `run_batch`, has taken all its rows."""
        return all(part.is_through for part in self.parts)

    @property
    def is_behind(self) -> bool:
        """Whether a query that ends by itself must take more rows, and may take them now."""
        return not self.is_through and self.has_room

    def reaching_ends(self) -> Callable[[], bool]:
        """Return a function that returns whether all rows are taken that existed at this call.

        This call is that of `reaching_ends`. Later rows do not count.
        """
        return lambda: self.is_through

    def close(self) -> None:
        """Close the connections. Later requests fail."""
        self.is_closed = True
        for part in self.parts:
            part.close()


def _first(found: Iterable[T | None]) -> T | None:
    return next((one for one in found if one is not None), None)


@dataclass(frozen=True)
class RunResult:
    """The result of a run: the reports of all tasks, added up, and the records not ACKED."""

    #: By spout, the numbers of new records and of due records.
    records: Mapping[str, int] = field(default_factory=dict)
    retried: Mapping[str, int] = field(default_factory=dict)
    #: ``root_id, spout, reason`` of every record that is not ACKED; those in ``judged`` may be
    #: missing.
    failed: pa.Table = field(default_factory=FAILED.empty_table)
    files: tuple[SinkFile, ...] = ()  # the files with rows for streams with a sink
    #: The reasons why the run must not be accepted; empty if it may be.
    problems: tuple[str, ...] = ()
    untracked_failures: int = 0  # the number of untracked tuples that failed
    #: By spout with rows that cannot be read again by position: the files with the rows, relative
    #: to the run's directory.
    spilled: Mapping[str, tuple[RowFile, ...]] = field(default_factory=dict)
    #: By partition of the spout stage and spout: the fingerprint of the rows that were read
    #: (`spout_stage.RowSample`).
    content: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    #: By bolt, the number of calls of its ``process`` that raised.
    raised: Mapping[str, int] = field(default_factory=dict)
    #: The fields ``breaker_trips, emitted, expectations, spent, tokens`` of `Progress`.
    figures: Mapping[str, Any] = field(default_factory=dict)
    #: The usage that each bolt's calls reported.
    used: Mapping[str, UsageCounts] = field(default_factory=dict)
    #: A tuple that did not meet an expectation with ``on_fail="fail"``: the query must end.
    unexpected: str | None = None
    #: Pairs of a traced root and its trace, without an outcome yet.
    traces: tuple[tuple[int, RecordTrace], ...] = ()
    #: By partition of the spout stage and spout: the number of new records; empty if unknown.
    read: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    #: The records that are not ACKED and that their tasks have judged.
    judged: FailedRows = field(default_factory=FailedRows)
    #: By spout, files like those in ``spilled``, of tasks with few rows of sources that can be read
    #: again.  Only this driver uses them, and only before the decision: they are not synced.
    kept: Mapping[str, tuple[RowFile, ...]] = field(default_factory=dict)
    unsettled: int = 0  # the number of cohorts whose roots could not be settled together

    def to_reread(self) -> dict[str, Any]:
        """Return the JSON fields for reading the run's records again; `of_decided` reads them."""
        return {
            "spilled": {
                spout: [list(file) for file in some] for spout, some in self.spilled.items()
            },
            "content": [[partition, dict(some)] for partition, some in self.content.items()],
        }

    @classmethod
    def of_decided(cls, files: tuple[SinkFile, ...], reread: Mapping[str, Any]) -> RunResult:
        """Return a result with only the fields for reading an accepted run's records again."""
        return cls(
            files=files,
            spilled={
                name: tuple(RowFile(*file) for file in some)
                for name, some in reread["spilled"].items()
            },
            content=dict(reread["content"]),
        )


class SpoutRows(NamedTuple):
    """The rows of a spout: their schema, whether tasks write them to files, and refused ones."""

    schema: pa.Schema
    spills: bool
    refused: tuple[RefusedOffsets, ...] = ()


class RunSetup:
    """The sources of a run (``sources``, by spout) and the spec of its tasks (``spec``).

    ``rows`` has the schema of each spout's rows, and how they are read.  ``tasks`` is the number of
    tasks that run at once; by default, also the number of tasks after each exchange.  ``isolates``
    is whether a retried task isolates a record that crashed it.  ``inputs`` are read again if their
    rows were not written to files.
    """

    def __init__(
        self,
        topology: Topology,
        layout: Layout,
        plan: RunPlan,
        rows: Mapping[str, SpoutRows],
        tasks: int,
        isolates: bool,
        inputs: Sequence[InputFrame] = (),
    ) -> None:
        self.plan = plan
        self.inputs = inputs
        settings = topology.settings
        self.sources: dict[str, SpoutSpec] = {}
        schemas = {
            (bolt.name, stream): schema
            for bolt in topology.bolts.values()
            for stream, schema in bolt.schemas.items()
        }
        for number, spout in enumerate(topology.spouts.values()):
            schema, spills, refused = rows[spout.name]
            self.sources[spout.name] = SpoutSpec(
                name=spout.name,
                number=number,
                schema=schema,
                message_id=tuple(spout.message_id),
                tracked=spout.tracked,
                claims=spout.checks_ids,
                spills=spout.tracked and spills,
                key=spout_key(plan.key, spout.name, "", plan.number),
                by_tasks=spout.kind is not None,
                decode=_decoder_of(spout),
                refused=refused,
                ordered_by=spout.ordered_by,
                blocked=plan.blocked.get(spout.name),
                number_column=number_of(spout),
            )
            emitted = schema if spout.kind is None else emitted_schema(spout)
            schemas[spout.name, DEFAULT_STREAM] = schemas[spout.emitter, DEFAULT_STREAM] = emitted
        asked = [bolt.parallelism for bolt in topology.bolts.values() if bolt.parallelism]
        asked.append(settings.parallelism or tasks)
        self.spec = TaskSpec(
            layout=layout,
            components={bolt.name: bolt.component for bolt in topology.bolts.values()},
            schemas=schemas,
            dests=max(asked),
            chunk_rows=settings.chunk_rows,
            reject=tuple(settings.reject),
            isolates=isolates,
            in_order=any(one.ordered_by or one.dedup for one in topology.spouts.values()),
            timeout_s=settings.bolt_call_timeout_s,
            slots=max(1, tasks),
            trace_per_million=settings.trace_per_million,
            checks=topology.checks,
            **{one.name: getattr(plan, one.name) for one in fields(TaskPlan)},
        )
        known = [one.tasks for one in inputs if one.tasks is not None]
        if inputs and len(known) == len(inputs):
            self.spec = replace(self.spec, readers=max(1, sum(known) + len(self.slices())))

    def slices(self) -> tuple[Slice, ...]:
        """Cut the due records into slices: for an ordered spout one, else at most one per task."""
        found = []
        for spout, file in sorted(self.plan.retries.items()):
            rows = file.rows
            pieces = max(1, min(self.spec.dests, -(-rows // self.spec.chunk_rows)))
            if self.sources[spout].ordered_by:
                pieces = 1  # its records must run in order
            size = -(-rows // pieces)
            found += [
                Slice(spout, file, first, min(size, rows - first))
                for first in range(0, rows, max(1, size))
            ]
        return tuple(found)


def setup_on_spark(
    topology: Topology,
    layout: Layout,
    inputs: Sequence[InputFrame],
    plan: RunPlan,
    spilled: Collection[str] | None = None,
) -> RunSetup:
    """Return the setup of a run on Spark.

    ``spilled`` has the spouts whose rows the run has written to files.  By default, these are the
    tracked spouts whose rows may differ when they are read again, by Spark's plan.
    """
    spark = inputs[0].frame.sparkSession
    rows: dict[str, SpoutRows] = {}
    for spout in topology.spouts.values():
        shared = None if spout.kind is None else spout.name
        frames = [one for one in inputs if one.spout in (spout.name, shared)]
        if spilled is not None:
            spills = spout.name in spilled
        else:
            spills = spout.tracked and not all(_reads_alike(one, spout) for one in frames)
        refused = tuple(one for frame in frames for one in frame.refused)
        rows[spout.name] = SpoutRows(_schema_of(spout, frames), spills, refused)
    # If rows may come in another order, a root is another record in the next attempt.
    isolates = not any(one.spills for one in rows.values())
    isolates &= str(spark.conf.get("spark.speculation", "false")).lower() != "true"
    tasks = task_slots(spark)
    return RunSetup(topology, layout, plan, rows, tasks, isolates, inputs)


def _decoder_of(spout: Spout) -> Decoder | None:
    source = spout.source
    if spout.kind is None:
        return None
    if CORRUPT_REASON in source.schema.names and CORRUPT_REASON not in source.emits.names:
        return CorruptLines(spout.name)
    if source.deserializer is None:
        return None
    return ValueDecoder(spout.name, source.deserializer, source.value_type)


def _reads_alike(one: InputFrame, spout: Spout) -> bool:
    """Return whether every reading gives the same rows, in the same order."""
    if one.repeats or one.snapshot is not None:
        return True
    source = spout.source if spout.kind is None else one.frame
    return has_fixed_order(one.frame) and has_fixed_rows(source)


def _schema_of(spout: Spout, frames: Sequence[InputFrame]) -> pa.Schema:
    if spout.kind is not None or not frames:
        return source_schema(spout)
    schema: Any = frames[0].frame.schema
    return to_arrow_schema(schema if frames[0].spout else schema[spout.name].dataType)
