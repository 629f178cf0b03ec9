"""The changed rows of tables, and those of closed windows, for the sinks that read them.

The rows are written to files, and the files are recorded, before the first call of a sink. So all
sinks get the same rows in all calls, also after a crash.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import starmap
from typing import Any

import numpy as np
import pyarrow as pa

from ackcore.spark.base.errors import one_line
from ackcore.spark.base.failpoints import failpoint
from ackcore.spark.base.schemas import SinkFile
from ackcore.spark.checkpoint.decisions import BatchDecision
from ackcore.spark.checkpoint.state import State
from ackcore.spark.checkpoint.table_records import SegmentFiles, TableState
from ackcore.spark.engine.act import call_sink, sink_batch
from ackcore.spark.engine.insist import SinkCalls
from ackcore.spark.sinks.rejects import SinkRejects, TooManyRefused
from ackcore.spark.sinks.sink import as_sink
from ackcore.spark.sinks.sink_batch import SinkBatch, files_of
from ackcore.spark.tables.table_snapshots import opened_segments, stored_rows
from ackcore.spark.tasks.row_files import ROOT, RowFileWriter
from ackcore.tables.folding import finished
from ackcore.tables.table_segments import TableReader
from ackcore.tables.table_shape import TableShape
from ackcore.topology.builder import Topology
from ackcore.topology.parts import SinkSpec
from ackcore.topology.table_views import CHANGES, CLOSED, change_streams, closed_streams


def write_changes(
    topology: Topology, calls: SinkCalls, state: State, decision: BatchDecision, age_ms: int | None
) -> None:
    """Pass changed rows of tables, and rows of closed windows, to the sinks that read them.

    Writes the rows to files and records these first, unless that is done. The tables of the
    micro-batch must be recorded. The arguments are those of `write_to_sinks`. Raises TooManyRefused
    if a sink refuses any row, as no record can become a dead letter. Raises SinkError if a sink
    failed as often as the settings allow, and the other errors of `SinkCalls.once`.
    """
    sinks = [sink for sink in topology.sinks.values() if topology.table_read(sink) is not None]
    if not sinks:
        return
    number, work = decision.number, state.runs.of(decision)
    record = f"batches/{number}.changes"
    known = state.records.read(record)
    if known is None:
        known = {"files": _write_files(topology, sinks, state, decision, os.fspath(work))}
        state.records.write(record, known, once=True)
        failpoint("changes-recorded", number)
    for sink in sinks:
        files = files_of(starmap(SinkFile, known["files"]), work, sink.component, sink.stream)
        if files:
            none = np.empty(0, np.int64)
            _write(sink, sink_batch(sink, calls, state, number, files, none, age_ms), calls)


def _write(sink: SinkSpec, batch: SinkBatch, calls: SinkCalls) -> None:
    writer = as_sink(sink.writer)

    def write() -> None:
        rejects, _ = call_sink(writer, batch)
        if rejects is not None and len(rejects):
            raise _refused(sink, batch, rejects)

    calls.insist(f"sink {sink.name!r}", write, fenced=writer.checks_fence)


def _refused(sink: SinkSpec, batch: SinkBatch, rejects: SinkRejects) -> TooManyRefused:
    reason = rejects.reasons[0] if len(rejects.reasons) else "no reason"
    told = f"{type(reason).__name__}: " if isinstance(reason, BaseException) else ""
    kind = "closed" if sink.component.endswith(CLOSED) else "changed"
    text = one_line(reason) if isinstance(reason, BaseException) else reason
    return TooManyRefused(
        f"sink {sink.name!r} refuses {kind} rows of a table in micro-batch {batch.batch_id}, the "
        f"first with {told}{text}. Such a row belongs to no single record, so that no record "
        "can become a dead letter for it. Change the target, so that it takes the rows, and start "
        "again on the same checkpoint: the sink gets the same rows"
    )


def _write_files(
    topology: Topology, sinks: Sequence[SinkSpec], state: State, decision: BatchDecision, work: str
) -> list[list[Any]]:
    """Write the rows for all sinks; return component, stream, path, rows and bytes of each file.

    ``work``: the directory of the run, to which the paths are relative.
    """
    plan = state.plan(decision.number)
    parent = None if plan is None else plan.parent
    now, before = state.tables.of(decision.number) or {}, state.tables.of(parent) or {}
    found: list[list[Any]] = []
    for table in topology.tables.values():
        shape, after = table.shape, now[table.name]
        for component, segments, schemas in (
            (f"{table.name}{CHANGES}", after.changed, change_streams(shape)),
            (f"{table.name}{CLOSED}", after.closed, closed_streams(shape)),
        ):
            read = {sink.stream for sink in sinks if sink.component == component}
            if read and segments:
                if component.endswith(CHANGES):
                    rows = _changed(shape, state.segments, after, before.get(table.name))
                else:
                    closed = stored_rows(state.segments, shape, segments)
                    rows = (finished(shape, stored) for stored in closed)
                wanted = {stream: schemas[stream] for stream in sorted(read)}
                found += _write_table(component, wanted, work, rows)
    return found


def _write_table(
    component: str, streams: Mapping[str, pa.Schema], work: str, changed: Iterator[pa.Table]
) -> Iterator[list[Any]]:
    root = pa.field(ROOT, pa.int64())
    schemas = {name: schema.append(root) for name, schema in streams.items()}
    files: dict[str, RowFileWriter] = {}
    try:
        for rows in changed:
            rows = rows.append_column(root, pa.nulls(len(rows), pa.int64()))
            for stream, schema in schemas.items():
                if stream not in files:
                    directory = os.path.join(work, "rows", component, stream)
                    files[stream] = RowFileWriter(directory, schema, 0)
                for batch in rows.select(schema.names).combine_chunks().to_batches():
                    files[stream].write(batch)
        for stream, file in files.items():
            name, count_of, _ = file.finish()
            path = os.path.join("rows", component, stream, name)
            yield [component, stream, path, count_of, file.nbytes]
    finally:
        for file in files.values():
            file.close()


def _changed(
    shape: TableShape, files: SegmentFiles, now: TableState, before: TableState | None
) -> Iterator[pa.Table]:
    """Yield the rows that a micro-batch changed, with former values in columns ``old_<name>``.

    These are null if there was no row, or if it had expired.
    """
    former = TableReader(shape, (), now.horizon_ms)
    if before is not None:
        # With the present horizon: a row that has expired since is no former value.  But a window
        # that closes now is open until now.
        horizon = now.horizon_ms if shape.window is None else before.horizon_ms
        former = TableReader(shape, opened_segments(files, shape, before.segments), horizon)
    values = list(shape.aggregates)
    for stored in stored_rows(files, shape, now.changed):
        rows = finished(shape, stored)
        old = finished(shape, former.lookup(stored)).select(values)
        for name, column in zip(values, old.columns, strict=True):
            rows = rows.append_column(f"old_{name}", column)
        yield rows
