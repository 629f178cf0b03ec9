"""The inputs of a run's stages: its sources, its task spec, and the due records in slices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa
from pyspark.sql.types import StructType

from ackcore.ids import spout_key
from ackcore.spark.base.determinism import has_fixed_order, has_fixed_rows
from ackcore.spark.base.session import task_slots
from ackcore.spark.base.sources import emitted_schema, source_schema
from ackcore.spark.base.versions import to_arrow_schema
from ackcore.spark.engine.types import InputFrame, RunPlan
from ackcore.spark.tasks.decoding import ValueDecoder
from ackcore.spark.tasks.record_ids import Refused, SpoutSpec, Tried
from ackcore.spark.tasks.row_files import read_whole
from ackcore.spark.tasks.spec import TaskSpec
from ackcore.spark.tasks.spout_stage import Slice
from ackcore.topology.builder import Topology
from ackcore.topology.components import DEFAULT_STREAM
from ackcore.topology.parts import Spout
from ackcore.topology.stage_layout import Layout


class SpoutRows(NamedTuple):
    """The schema of a spout's rows, and whether the run must write them to files (``spills``)."""

    schema: pa.Schema
    spills: bool
    refused: tuple[Refused, ...] = ()
    tried: tuple[Tried, ...] = ()


class RunSetup:
    """The sources of a run and its task spec.

    Parameters
    ----------
    topology, layout, plan
        See `run`.
    rows : mapping from str to SpoutRows
        The rows of each spout.
    tasks : int
        The number of tasks that run at once; unless the settings say otherwise, also the number of
        tasks after each exchange.
    isolates : bool
        See `TaskSpec`.
    inputs : sequence of InputFrame
        The inputs to read again if their rows were not written to files.
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
        schemas: dict[tuple[str, str], pa.Schema] = {}
        for number, spout in enumerate(topology.spouts.values()):
            schema, spills, refused, tried = rows[spout.name]
            self.sources[spout.name] = SpoutSpec(
                name=spout.name,
                number=number,
                schema=schema,
                message_id=tuple(spout.message_id),
                tracked=spout.tracked,
                claims=spout.tracked and bool(spout.message_id) and not spout.unique,
                spills=spout.tracked and spills,
                key=spout_key(plan.key, spout.name, "", plan.number),
                by_tasks=spout.kind is not None,
                decode=_decoder_of(spout),
                refused=refused,
                ordered_by=spout.ordered_by,
                blocked=plan.blocked.get(spout.name),
                tried=tried,
            )
            schemas[spout.name, DEFAULT_STREAM] = (
                schema if spout.kind is None else emitted_schema(spout)
            )
        for bolt in topology.bolts.values():
            for stream, schema in bolt.schemas.items():
                schemas[bolt.name, stream] = schema
        dests = settings.parallelism or tasks
        asked = [bolt.parallelism for bolt in topology.bolts.values() if bolt.parallelism]
        self.spec = TaskSpec(
            layout=layout,
            components={bolt.name: bolt.component for bolt in topology.bolts.values()},
            schemas=schemas,
            key=plan.key,
            number=plan.number,
            dests=max(dests, *asked) if asked else dests,
            chunk_rows=settings.chunk_rows,
            directory=plan.work,
            journal=plan.journal,
            reject=tuple(settings.reject),
            careful=plan.careful,
            suspects={root: n - 1 for root, n in Counter(plan.suspects).items()},
            rejected=frozenset(plan.rejected),
            isolates=isolates,
            timeout_s=settings.bolt_call_timeout_s,
            slots=max(1, tasks),
            rules=plan.rules,
            trace_per_million=settings.trace_per_million,
        )

    def slices(self) -> tuple[Slice, ...]:
        """Cut the due records into slices, for each spout at most one per task."""
        found = []
        for spout, file in sorted(self.plan.retries.items()):
            rows = len(read_whole(file)) if file.rows is None else file.rows
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

    Parameters
    ----------
    topology, layout, inputs, plan
        See `run`.
    spilled : collection of str, optional
        The spouts with input that the run has spilled; by default, Spark's plans determine them.
    """
    spark = inputs[0].frame.sparkSession
    rows: dict[str, SpoutRows] = {}
    for spout in topology.spouts.values():
        shared = None if spout.kind is None else spout.name
        frames = [one for one in inputs if one.spout in (spout.name, shared)]
        schema = None if spout.kind is not None else _schema_of(frames, spout.name)
        if spilled is not None:
            spills = spout.name in spilled
        else:
            spills = spout.tracked and not all(_reads_alike(one, spout) for one in frames)
        refused = tuple(one for frame in frames for one in frame.refused)
        tried = tuple(one for frame in frames for one in frame.tried)
        rows[spout.name] = SpoutRows(
            source_schema(spout) if schema is None else schema, spills, refused, tried
        )
    # If rows may come in another order, a root is another record in the next attempt.
    isolates = not any(one.spills for one in rows.values())
    isolates &= spark.conf.get("spark.speculation", "false") != "true"
    tasks = task_slots(spark)
    return RunSetup(topology, layout, plan, rows, tasks, isolates, inputs)


def _decoder_of(spout: Spout) -> ValueDecoder | None:
    if spout.kind is None or spout.source.deserializer is None:
        return None
    return ValueDecoder(spout.name, spout.source.deserializer, spout.source.value_type)


def _reads_alike(one: InputFrame, spout: Spout) -> bool:
    """Return whether every reading gives the same rows, in the same order."""
    return one.snapshot is not None or (has_fixed_order(one.frame) and has_fixed_rows(spout.source))


def _schema_of(frames: Iterable[InputFrame], spout: str) -> pa.Schema | None:
    for one in frames:
        if one.spout is None:
            struct = one.frame.schema[spout].dataType
            assert isinstance(struct, StructType)
            return to_arrow_schema(struct)
        return to_arrow_schema(one.frame.schema)
    return None
