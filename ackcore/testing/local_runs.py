"""The implementation of `ackcore.testing.run`: Spark's part in a micro-batch, without Spark.

The protocol, the checkpoint and the stages are those of `ackcore.spark`.  This module divides the
test's rows into partitions, runs the tasks of each stage one by one, up to four times each, and
exchanges rows between stages by lists.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import fields, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
from pyspark import cloudpickle

from ackcore._arrow.lossless import as_mapping
from ackcore._arrow.shown import shown_rows
from ackcore._columns import as_count
from ackcore.calls.calls import in_event_loop
from ackcore.spark.base.letter_columns import as_letters
from ackcore.spark.base.schemas import MESSAGE_ID
from ackcore.spark.base.sources import emitted_schema, kept_schemas, source_schema
from ackcore.spark.base.workers import refuse_unpicklable
from ackcore.spark.checkpoint.state import State
from ackcore.spark.engine.action import Jobs, read_results
from ackcore.spark.engine.batch import Engine
from ackcore.spark.engine.closed_rows import ClosedRows
from ackcore.spark.engine.progress import Counts, Progress
from ackcore.spark.engine.setup import InputFrame, RunResult, RunSetup, SpoutRows
from ackcore.spark.listeners import Listeners
from ackcore.spark.query import run_to_end
from ackcore.spark.sinks.sink import Sink
from ackcore.spark.sinks.sink_batch import SinkBatch
from ackcore.spark.tables.table_snapshots import TableSnapshot, snapshot_of
from ackcore.spark.tasks.bolt_stage import BoltStage
from ackcore.spark.tasks.exchange_format import ROW_SCHEMA, SETTLE
from ackcore.spark.tasks.inflight_markers import TaskAttempt
from ackcore.spark.tasks.row_files import read_whole
from ackcore.spark.tasks.settle_stage import SettleStage
from ackcore.spark.tasks.spec import RunPlan, TaskSpec
from ackcore.spark.tasks.spout_stage import RetryStage, SpoutStage
from ackcore.spark.tasks.task import RESULT_SCHEMA, called_as
from ackcore.tables.folding import finished
from ackcore.testing.results import ByName, DeadLetter, Kill, TopologyRun
from ackcore.testing.task_kills import Kills, TaskKilled
from ackcore.topology.batch_collector import conform
from ackcore.topology.bolt_calls import call_settings
from ackcore.topology.builder import Topology
from ackcore.topology.function_calls import BatchFunction
from ackcore.topology.parts import SinkSpec, Spout
from ackcore.topology.row_conversion import RowSchema
from ackcore.topology.stage_layout import Layout

Stage = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]

#: The maximum number of tries of a task, as on Spark.
_TRIES = 4
#: The start of simulated time, in milliseconds since 1970; arbitrary, but the same in each test.
_BEGIN_MS = 1_700_000_000_000
#: The micro-batches in a row in which all records were unavailable, after which waits are doubled.
_IN_VAIN = 10
#: The key of all ids; it is fixed, so that a failing test fails again.
_KEY = 0x5EED
#: A directory in memory, if there is one, because a checkpoint is synced at each step.
_MEMORY = Path("/dev/shm")


def run_in_process(
    topology: Topology,
    rows: Mapping[str, Any],
    tasks: int,
    kills: Mapping[str, Kill],
    listeners: Sequence[Any],
) -> TopologyRun:
    """Run a topology as `ackcore.testing.run`: with a temporary checkpoint, which is deleted.

    A caller in an event loop gets another thread for the run if a bolt has a loop of its own.
    """
    if not isinstance(topology, Topology):
        raise TypeError(
            f"topology must be a Topology, got {type(topology).__name__}; "
            "create one with TopologyBuilder().build()"
        )
    tasks = as_count(tasks, "tasks", 1)
    told = Listeners(listeners)
    given = _tables(topology, rows)
    within = _MEMORY if os.access(_MEMORY, os.W_OK) else None
    runs = LocalRuns(topology, given, tasks, Kills(kills, topology.bolts), told)

    def run() -> TopologyRun:
        with tempfile.TemporaryDirectory(prefix="ackcore-testing-", dir=within) as directory:
            return runs.run(Path(directory))

    bolts = (bolt.component for bolt in topology.bolts.values())
    # True for a bolt if it, or its executor, runs an event loop.
    have_loops = (isinstance(bolt, BatchFunction) or call_settings(bolt) for bolt in bolts)
    if not in_event_loop() or not any(have_loops):
        return run()
    # In a notebook or a coroutine: the event loops of bolts need another thread.
    thread = ThreadPoolExecutor(1)
    try:
        return thread.submit(copy_context().run, run).result()
    finally:
        thread.shutdown(wait=False)  # an interrupt must not wait for the calls of bolts


class _Recorder(Sink):
    """A sink that keeps its rows in memory."""

    def __init__(self) -> None:
        self.batches: list[pa.RecordBatch] = []

    def write(self, batch: SinkBatch) -> None:
        for rows in batch.record_batches():
            # Copied, because the file is deleted with the checkpoint.
            self.batches.append(pa.concat_batches([rows]))


class _Copies(Mapping[str, Any]):
    """The bolts of one task by name, each unpickled from ``sent`` at its first use."""

    def __init__(self, sent: Mapping[str, bytes]) -> None:
        self._sent = sent
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = cloudpickle.loads(self._sent[name])
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sent)

    def __len__(self) -> int:
        return len(self._sent)


class LocalRuns:
    """One run of a topology on given rows.

    ``rows``: the rows by spout, in the columns of its source. ``tasks``: the number of tasks that
    read a spout, and that run the bolts after an exchange. ``kills``: the tuples at which tasks
    die. ``listeners``: called for each micro-batch, and at the end.
    """

    _kind: Literal["stream", "batch"] = "batch"

    def __init__(
        self,
        topology: Topology,
        rows: Mapping[str, pa.Table],
        tasks: int,
        kills: Kills,
        listeners: Listeners,
    ) -> None:
        self._sinks = {name: _Recorder() for name in topology.sinks}
        self._topology = replace(
            topology,
            sinks={
                name: SinkSpec(name, sink.component, sink.stream, self._sinks[name])
                for name, sink in topology.sinks.items()
            },
        )
        for name, bolt in topology.bolts.items():
            refuse_unpicklable(f"bolt {name!r}", bolt.component, "its prepare()")
        for (name, _), checks in topology.checks.items():
            refuse_unpicklable(f"expect of {name!r}", checks, "the function")
        #: The pickled bolts, as they are sent to tasks.
        self._bolts: dict[str, bytes] = {
            name: cloudpickle.dumps(bolt.component)  # type: ignore[no-untyped-call]
            for name, bolt in topology.bolts.items()
        }
        self._rows = rows
        self._tasks = tasks
        self._kills = kills
        self._now_ms = _BEGIN_MS
        self._attempt = 0
        self._in_vain = 0  # micro-batches in a row in which all records were unavailable
        self._listeners = listeners
        self._progress: list[Progress] = []
        listeners.add(self)
        self._dead: list[DeadLetter] = []
        self._untracked_failures = 0
        #: The number of executions by spout and message id.
        self._executed: dict[str, Counter[str]] = defaultdict(Counter)
        self._message_ids: dict[str, list[str]] = {}
        self._counted: set[int] = set()

    def run(self, directory: Path) -> TopologyRun:
        """Run the topology with a checkpoint in a directory; return the outcome."""
        topology = self._topology
        with self.engine(directory) as engine:
            state = engine.state
            with self._listeners.of_run(engine):
                run_to_end(engine, [], list, self._wait, self._listeners)
            counts = engine.counts
            last = state.last_done
            at_end = snapshot_of(state, topology, last)
            kept = {name: _rows_of(found) for name, found in at_end.items()}
        tables = {name: self._table(name) for name in self._sinks}
        return TopologyRun(
            outputs=ByName({name: shown_rows(table) for name, table in tables.items()}),
            tables=ByName({**tables, **kept}),
            dead=self._dead,
            counts=counts,
            attempts={
                name: [self._executed[name][one] for one in self._message_ids.get(name, ())]
                for name, spout in topology.spouts.items()
                if spout.tracked
            },
            executions=dict(self._kills.taken),
            progress=self._progress,
            untracked_failures=self._untracked_failures,
            elapsed_s=(self._now_ms - _BEGIN_MS) / 1000,
            kills=self._kills.count,
        )

    @contextmanager
    def engine(self, directory: Path) -> Iterator[Engine]:
        """Create or open the checkpoint in a directory; yield an engine that runs the topology."""
        topology = self._topology
        schemas = self._schemas
        with State.open(
            directory / "checkpoint",
            topology,
            sources=kept_schemas(schemas, topology),
            kind=self._kind,
            clock_ms=_BEGIN_MS,
            new_key=_KEY,
        ) as state:
            yield Engine(
                topology,
                None,
                state,
                self._take_dead,
                clock=lambda: self._now_ms,
                pause=self._pause,
                offsets=ClosedRows(topology, None, state),
                jobs=Jobs(
                    self._run,
                    lambda inputs, directory, epoch: list(inputs),
                    lambda inputs, directory: list(inputs),
                    lambda topology, layout, _, plan, __: self._setup(topology, layout, plan),
                ),
            )

    @property
    def _schemas(self) -> dict[str, pa.Schema]:
        """The schemas of all sources by spout; those of closed windows are ``<table>.closed``."""
        closed = {
            name: source_schema(self._topology.spouts[name]) for name in self._topology.closed
        }
        return {name: table.schema for name, table in self._rows.items()} | closed

    def on_progress(self, progress: Progress, counts: Counts) -> None:
        """Store a micro-batch's report; count the last micro-batches whose records were all
        unavailable."""
        self._progress.append(progress)
        waits = progress.uncounted == progress.failed > 0 and not progress.acked
        self._in_vain = self._in_vain + 1 if waits else 0

    def _wait(self, seconds: float) -> None:
        # A week with a try each minute would be ten thousand micro-batches.
        times = 1 << min(max(0, self._in_vain - _IN_VAIN), 30)
        self._now_ms += math.ceil(1000 * seconds * times)

    def _pause(self, seconds: float) -> bool:
        self._wait(seconds)
        return False

    def _table(self, sink: str) -> pa.Table:
        written = self._topology.sinks[sink]
        schema = self._topology.sink_schema(written)
        if schema is None:
            spout = self._topology.source_of(written.component)
            assert spout is not None
            # A DataFrame emits its own columns.
            is_frame = spout.kind is None
            schema = self._rows[spout.name].schema if is_frame else emitted_schema(spout)
        return pa.Table.from_batches(self._sinks[sink].batches, schema)

    def _take_dead(self, number: int, dead: Mapping[str, pa.Table]) -> None:
        for spout, table in dead.items():
            for letter in shown_rows(as_letters(table, number)):
                letter["spout"] = spout
                self._dead.append(DeadLetter(*(letter[each.name] for each in fields(DeadLetter))))

    # ---------------------------------------------------------------------- in place of Spark

    def _setup(self, topology: Topology, layout: Layout, plan: RunPlan) -> RunSetup:
        rows = {name: SpoutRows(schema, True) for name, schema in self._schemas.items()}
        setup = RunSetup(topology, layout, plan, rows, self._tasks, isolates=True)
        # Without a timeout, which would end this process.
        setup.spec = replace(
            setup.spec, timeout_s=None, make_executor=self._kills.make_executor, slots=self._tasks
        )
        return setup

    def _run(
        self, topology: Topology, layout: Layout, inputs: Sequence[InputFrame], plan: RunPlan
    ) -> RunResult:
        """Run the stages of a micro-batch; it replaces `ackcore.spark.engine.action.run`."""
        setup = self._setup(topology, layout, plan)
        spec = setup.spec
        sent: list[list[pa.RecordBatch]] = []
        parts = [*self._parts(plan.number), *map(_closed_rows, inputs)]
        for name, part in parts:
            read = partial(SpoutStage, sources=setup.sources, spout=name)
            sent.append(self._task(read, spec, 1, len(sent), part.to_batches()))
        slices = setup.slices()
        for number in range(len(slices)):
            numbers = pa.RecordBatch.from_pydict({"id": [number]})
            retries = partial(RetryStage, sources=setup.sources, spout=None, slices=slices)
            sent.append(self._task(retries, spec, 1, len(sent), [numbers]))
        schema = ROW_SCHEMA if layout.settles else RESULT_SCHEMA
        if layout.settles:
            for level in (*range(2, layout.depth + 1), SETTLE):
                sent = self._behind_exchange(spec, level, sent)
            schema = RESULT_SCHEMA
        batches = [batch for task in sent for batch in task]
        result = read_results(setup, layout, pa.Table.from_batches(batches, schema))
        if not result.problems and plan.number not in self._counted:
            self._count(setup, plan, parts)
            self._untracked_failures += result.untracked_failures
        return result

    def _behind_exchange(
        self, spec: TaskSpec, level: int, sent: list[list[pa.RecordBatch]]
    ) -> list[list[pa.RecordBatch]]:
        rows = pa.Table.from_batches([batch for task in sent for batch in task], ROW_SCHEMA)
        dests = rows["dest"].to_numpy()
        found = []
        for dest in range(spec.dests):
            here = rows.filter(pa.array(dests == dest)).to_batches()
            stage = SettleStage if level == SETTLE else partial(BoltStage, level=level)
            found.append(self._task(stage, spec, level, dest, here))
        return found

    def _count(self, setup: RunSetup, plan: RunPlan, parts: Sequence[tuple[str, pa.Table]]) -> None:
        """Count an execution of each record and retry; only a run without problems is one."""
        self._counted.add(plan.number)
        for name, file in plan.retries.items():
            self._executed[name].update(read_whole(file)[MESSAGE_ID].to_pylist())
        for partition, (name, part) in enumerate(parts):
            ids: list[str] = []
            for batch in part.to_batches():
                found = setup.sources[name].message_ids(batch, plan.number, partition, len(ids))
                ids += found.to_pylist()
            self._message_ids.setdefault(name, []).extend(ids)
            self._executed[name].update(ids)

    def _parts(self, number: int) -> Iterator[tuple[str, pa.Table]]:
        """Yield the spout and the rows of each reading task; after micro-batch 0 there are none."""
        for name, table in self._rows.items() if number == 0 else ():
            cuts = [len(table) * i // self._tasks for i in range(self._tasks + 1)]
            for start, stop in pairwise(cuts):
                yield name, table.slice(start, stop - start).combine_chunks()

    def _task(
        self,
        stage: Callable[[TaskSpec], Stage],
        spec: TaskSpec,
        level: int,
        partition: int,
        rows: list[pa.RecordBatch],
    ) -> list[pa.RecordBatch]:
        """Run a task, again after each kill, as on Spark; raise RuntimeError after four kills.

        The in-flight marker of a killed task is kept, as a killed process leaves it.
        """
        for _ in range(_TRIES):
            self._attempt += 1
            marker = Path(TaskAttempt(level, partition, self._attempt).path(spec.work))
            left: list[bytes] = []
            self._kills.dying = lambda m=marker, left=left: left.append(m.read_bytes())  # type: ignore[misc]
            own = replace(spec, components=_Copies(self._bolts))
            try:
                with called_as(partition, self._attempt):
                    return list(stage(own)(iter(rows)))
            except TaskKilled:
                marker.write_bytes(left[0])
            except (Exception, KeyboardInterrupt):
                raise
            except BaseException as error:  # e.g. SystemExit in unpickling; on Spark a worker ends
                raise RuntimeError(
                    f"task {partition} of stage {level} raised {error!r} outside of its calls, for "
                    "instance when a bolt was unpickled; it would end a worker of Spark, so raise "
                    "an Exception instead"
                ) from error
            finally:
                self._kills.ended()
        raise RuntimeError(
            f"task {partition} of stage {level} was killed {_TRIES} times, after which Spark gives "
            "up; name fewer tuples in kills"
        )


def _closed_rows(one: InputFrame) -> tuple[str, pa.Table]:
    """Return the spout and the rows of closed windows, which one task reads."""
    assert one.spout is not None
    assert one.snapshot is not None
    numbers = pa.RecordBatch.from_pydict({"id": [0]})
    return one.spout, pa.Table.from_batches(one.snapshot.read(iter([numbers])))


def _rows_of(table: TableSnapshot) -> pa.Table:
    """Return the rows of a table, copied, because the files are deleted with the checkpoint."""
    parts = [finished(table.shape, stored) for stored in table.reader().scan()]
    rows = pa.concat_tables([table.shape.row_schema.empty_table(), *parts])
    return rows.take(pa.array(range(len(rows)), pa.int64()))


# ------------------------------------------------------------------------------------- input rows


def _tables(topology: Topology, rows: Mapping[str, Any]) -> dict[str, pa.Table]:
    """Return the rows of each spout as a table with the columns of its source."""
    if not isinstance(rows, Mapping):
        raise TypeError(
            f"rows must map the names of spouts to their rows, got {type(rows).__name__}; "
            "for example {'lines': [{'line': 'a b'}]}"
        )
    closed = topology.closed
    spouts = {name: spout for name, spout in topology.spouts.items() if name not in closed}
    if set(rows) != set(spouts):
        raise ValueError(
            f"rows must have one entry per spout: {', '.join(map(repr, spouts))} "
            f"([] for a spout without rows), got {', '.join(map(repr, rows)) or 'none'}"
        )
    return {name: _table(spout, rows[name]) for name, spout in spouts.items()}


def _table(spout: Spout, rows: Any) -> pa.Table:
    schema = source_schema(spout)
    title = f"spout {spout.name!r}"
    if isinstance(rows, pa.Table):
        if spout.kind is None:
            return pa.Table.from_batches([conform(rows, schema, f"the source of {title}")])
        rows = rows.to_pylist()
    columns = RowSchema("its source", schema)
    added = [None] * (len(schema) - len(spout.fields))  # of `with_corrupt`
    found: list[tuple[Any, ...]] = []
    for place, row in enumerate(rows):
        try:
            named = as_mapping(row)
            if named is not None:  # missing columns are null
                is_kafka = spout.kind == "kafka"
                made_up = {"topic": "topic", "partition": 0, "offset": place} if is_kafka else {}
                row = {**dict.fromkeys(schema.names), **made_up, **named}
            elif added and isinstance(row, tuple | list):
                row = (*row, *added)
            found.append(columns.row(row))
        except (TypeError, ValueError) as error:
            raise type(error)(f"row {place} of {title}: {error}") from error
    batches, misfits = columns.batches(found)
    if misfits:
        place, misfit = misfits[0]
        raise ValueError(f"row {place} of {title}: {misfit}") from misfit
    return pa.Table.from_batches([batch for _, batch in batches], schema)
