"""Reading records of a run again: the payloads of those that failed, message ids that repeat.

Records are read by (partition, place): those that were due from their file, those of a source that
can be read again by position from it, and those of any other from the input that the spout stage
wrote as it read them.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame

from ackcore._records import Int64s
from ackcore.spark.base.checksummed import in_few, write_batches
from ackcore.spark.base.reason_columns import encoded
from ackcore.spark.base.reasons import FAILED
from ackcore.spark.base.root_ids import (
    cuts_of,
    distinct,
    found_in,
    ids_in,
    in_order,
    in_ranges,
    is_sorted,
    starts_of_ranges,
)
from ackcore.spark.base.schemas import MESSAGE_ID
from ackcore.spark.run.collect import collected
from ackcore.spark.run.setup import RunSetup, setup_on_spark
from ackcore.spark.run.types import InputFrame, RunPlan, RunResult, WrittenFailures
from ackcore.spark.stores.files import making_in
from ackcore.spark.tasks.failed_rows import Rules
from ackcore.spark.tasks.failed_stage import FailedStage
from ackcore.spark.tasks.pieces import DealtPieces, Piece
from ackcore.spark.tasks.record_ids import RETRIES
from ackcore.spark.tasks.reread_stage import RereadStage
from ackcore.spark.tasks.results import RESULT_TYPE, TASK_REPORT, from_stream, results_in
from ackcore.spark.tasks.retry_stage import Slice, due_records
from ackcore.spark.tasks.row_files import (
    ROOT_ID,
    RowFile,
    among,
    partition_in,
    read_rows,
    read_whole,
)
from ackcore.spark.tasks.source_records import SourceRecords, pick
from ackcore.spark.tasks.spout_stage import SpoutStage
from ackcore.topology.builder import Topology
from ackcore.topology.stage_layout import Layout


def fetch(
    topology: Topology,
    layout: Layout,
    inputs: Sequence[InputFrame],
    plan: RunPlan,
    accepted: RunResult,
    failed: pa.Table,
) -> dict[str, pa.Table]:
    """Get the rows of some records of a run again.

    Parameters
    ----------
    topology, layout, inputs, plan
        As given to `run`.
    accepted : RunResult
        What that returned.
    failed : pyarrow.Table
        ``root_id, spout`` of the records; the spout is null where it is not known.

    Returns
    -------
    dict from str to pyarrow.Table
        By spout: ``_ackcore_root_id``, ``_ackcore_place`` (among those due, null for new records),
        ``_ackcore_message_id``, ``_ackcore_attempt`` (the one that was run), and the source's
        columns.

    Raises
    ------
    RuntimeError
        If a record is not there any more.
    ResultsTooLarge
        If there are so many that Spark does not hand them to the driver.
    """
    # Asking Spark again would take time, and might have another answer.
    setup = setup_on_spark(topology, layout, inputs, plan, accepted.spilled)
    return fetch_records(setup, accepted, failed)


def fetch_records(setup: RunSetup, accepted: RunResult, failed: pa.Table) -> dict[str, pa.Table]:
    """Do what `fetch` does, for the setup of the run."""
    ids = failed["root_id"].to_numpy()
    owners = failed["spout"].cast(pa.string())
    roots: dict[str, Int64s] = {}
    for name, source in setup.sources.items():
        of = pc.fill_null(pc.equal(owners, name), True).to_numpy()
        may_be = np.sort(ids[of])
        if len(may_be) and source.tracked:
            roots[name] = may_be
    found = _fetch(setup, accepted, roots, {})
    _refuse_lost([ids], found)
    return found


def write_failed(
    topology: Topology,
    layout: Layout,
    inputs: Sequence[InputFrame],
    plan: RunPlan,
    accepted: RunResult,
    failed: pa.Table,
    rules: Rules,
) -> WrittenFailures:
    """Have tasks read the failed records of a run again, judge them and write them to files.

    As `fetch`, but no payload goes through the driver.

    Parameters
    ----------
    topology, layout, inputs, plan, accepted, failed
        As given to `fetch`; ``failed`` has the reasons, too.
    rules : Rules
        By what it is decided which of them wait.

    Raises
    ------
    RuntimeError
        If a record is not there any more.
    ResultsTooLarge
        If there are so many that Spark does not hand their ids to the driver.
    """
    setup = setup_on_spark(topology, layout, inputs, plan, accepted.spilled)
    directory = os.path.join(plan.work, "failed")
    rows = failed.select(["root_id", "reason"]).unify_dictionaries()
    with making_in(directory) as place:
        table = write_batches(place, "roots", rows.schema, in_few(_by_root(rows)), synced=False)
    ids = ids_in(rows["root_id"])
    stage = FailedStage(
        SpoutStage(setup.spec, setup.sources, None),
        rules,
        os.path.join(directory, table),
        directory,
        frozenset(accepted.spilled),
    )
    slices = setup.slices()
    slices += tuple(
        Slice(name, RowFile(os.path.join(plan.work, path), n), 0, n or 0, spilled=True)
        for name, files in accepted.spilled.items()
        for path, n, _ in files
    )
    frames = []
    before: Mapping[int, Mapping[str, int]] = {}
    # Sources are read again for what is in no file.
    if not setup.sources.keys() <= accepted.spilled.keys():
        again, before = _reread_frames(setup, accepted, ids, stage)
        frames += again
    if slices:
        numbers = inputs[0].frame.sparkSession.range(len(slices), numPartitions=len(slices))
        frames.append(numbers.mapInArrow(replace(stage, slices=slices), RESULT_TYPE))
    reports: list[dict[str, Any]] = []
    picked: list[pa.Table] = []
    for kind, blob in results_in(collected(reduce(DataFrame.union, frames))):
        if kind == TASK_REPORT:
            reports.append(json.loads(blob.to_pybytes()))
        else:
            picked.append(from_stream(blob))
    now = {number: content for one in reports for number, content in one.get("contents", ())}
    check_content(setup, before, now)
    written = WrittenFailures.of(plan.work, reports, picked)
    _refuse_lost(ids, written.found)
    return written


def _by_root(rows: pa.Table) -> Iterator[pa.RecordBatch]:
    """Yield rows in the order of their roots, a range of these at a time."""
    batches = [_in_order(batch) for batch in rows.to_batches()]
    columns = [batch.column("root_id").to_numpy() for batch in batches]
    starts = starts_of_ranges(columns)
    cuts = [cuts_of(column, starts) for column in columns]
    for n in range(len(starts) + 1):
        parts = [
            batch.slice(at[n], at[n + 1] - at[n]) for batch, at in zip(batches, cuts, strict=True)
        ]
        yield from map(_in_order, pa.Table.from_batches(parts).combine_chunks().to_batches())


def _in_order(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows in the order of their roots, as they are if that is theirs."""
    roots = batch.column("root_id").to_numpy()
    if is_sorted(roots):
        return batch
    return batch.take(pa.array(np.argsort(roots, kind="stable")))


def _refuse_lost(ids: Sequence[Int64s], found: Mapping[str, pa.Table]) -> None:
    """Raise `RuntimeError` if a record is not there any more."""
    pairs = in_ranges(ids, [*_roots_in(found.values())])
    lost = sum(int((~among(sought, there)).sum()) for sought, there in pairs)
    if lost:
        n = sum(map(len, ids))
        raise RuntimeError(
            f"{n} records failed, and {lost} of them were not found when their source "
            "was read again; a source must give the same rows when it is read twice within a "
            "micro-batch"
        )


def _roots_in(tables: Iterable[pa.Table]) -> Iterator[Int64s]:
    return (ids for table in tables for ids in ids_in(table[ROOT_ID]))


def _fetch(
    setup: RunSetup, accepted: RunResult, roots: Mapping[str, Int64s], claims: Mapping[str, Int64s]
) -> dict[str, pa.Table]:
    """Get records by their roots, or by their claims, from where each spout's can be read again."""
    tables: dict[str, list[pa.Table]] = defaultdict(list)
    wanted = {*roots, *claims}
    for some in in_files(setup, accepted, wanted):
        # What is due makes no claims.
        claimed = {} if some.partition == RETRIES else claims
        picked = pick(some, roots, claimed, setup.plan.number)
        tables[some.source.name].append(pa.Table.from_batches([picked]))
    sought = distinct(*roots.values())
    there = int(found_in(sought, _roots_in(chain(*tables.values()))).sum())
    # Sources are read again for what is in no file: it takes a job.
    if (claims or there < len(sought)) and not wanted <= accepted.spilled.keys():
        for name, table in _in_sources(setup, accepted, roots, claims):
            tables[name].append(table)
    return {
        name: found
        for name, some in tables.items()
        if len(found := pa.concat_tables(some, promote_options="none"))
    }


def in_files(
    setup: RunSetup, accepted: RunResult, wanted: Collection[str]
) -> Iterator[SourceRecords]:
    """The records of these spouts that were due, and those that the run has spilled."""
    for name, file in setup.plan.retries.items():
        if name in wanted:
            yield from due_records(setup.sources[name], read_whole(file))
    for name, files in accepted.spilled.items():
        for path, rows, _ in files if name in wanted else ():
            partition, first = partition_in(path), 0
            for batch in read_rows(RowFile(os.path.join(setup.plan.work, path), rows)):
                yield SourceRecords(setup.sources[name], batch, partition, first)
                first += len(batch)


def _in_sources(
    setup: RunSetup, accepted: RunResult, roots: Mapping[str, Int64s], claims: Mapping[str, Int64s]
) -> Iterator[tuple[str, pa.Table]]:
    """Records of spouts whose input was not spilled, and whose they are: one Spark job.

    Raises `RuntimeError` if a partition holds other rows than it did in the run.
    """
    stage = RereadStage(SpoutStage(setup.spec, setup.sources, None), roots, claims)
    sought = None if claims else [*roots.values()]
    frames, before = _reread_frames(setup, accepted, sought, stage)
    content, picked = {}, []
    for kind, blob in results_in(collected(reduce(DataFrame.union, frames))):
        if kind == TASK_REPORT:
            report = json.loads(blob.to_pybytes())
            content[report["partition"]] = report["content"]
        else:
            picked.append(from_stream(blob))
    check_content(setup, before, content)
    for table in picked:
        name = table.schema.metadata[b"spout"].decode()
        if name not in accepted.spilled:
            yield name, table


def _reread_frames(
    setup: RunSetup,
    accepted: RunResult,
    sought: Sequence[Int64s] | None,
    stage: RereadStage | FailedStage,
) -> tuple[list[DataFrame], Mapping[int, Mapping[str, int]]]:
    """Return what a stage makes of the rows of sources, and what partitions that are whole had.

    Only pieces with the roots that are ``sought`` are read, where these can be told.
    """
    pieces = None if sought is None else _pieces(setup, accepted, sought)
    if pieces is None:
        return [
            one.map_in_arrow(
                replace(stage, stage=replace(stage.stage, spout=one.spout)), RESULT_TYPE
            )
            for one in setup.inputs
        ], accepted.content
    (one,) = setup.inputs
    assert one.snapshot is not None
    assert one.snapshot.again is not None
    tasks = max(1, min(len(pieces), setup.spec.dests))
    dealt = DealtPieces(one.snapshot.again, [pieces[i::tasks] for i in range(tasks)])
    numbers = one.frame.sparkSession.range(tasks, numPartitions=tasks)
    of = replace(stage, stage=replace(stage.stage, spout=one.spout), pieces=dealt)
    whole = {piece.partition for piece in pieces if piece.rows is None}
    before = {
        partition: found for partition, found in accepted.content.items() if partition in whole
    }
    return [numbers.mapInArrow(of, RESULT_TYPE)], before


def _pieces(setup: RunSetup, accepted: RunResult, sought: Sequence[Int64s]) -> list[Piece] | None:
    """Return what is to be read for some roots; None if that takes all of the input.

    Where there are several inputs it is not known here which partitions are whose, and of a
    micro-batch that was decided before not how many rows they had.
    """
    one = setup.inputs[0]
    if len(setup.inputs) > 1 or one.spout is None or not accepted.read:
        return None
    if one.snapshot is None or one.snapshot.again is None:
        return None
    source = setup.sources[one.spout]
    rows = {partition: read[one.spout] for partition, read in accepted.read.items() if read}
    places, ordered = {}, in_order(*sought)
    for partition, n in rows.items():
        at = np.flatnonzero(among(source.roots(partition, 0, n), ordered))
        if len(at):
            places[partition] = at
    return one.snapshot.again.pieces(places, rows)


def check_content(
    setup: RunSetup,
    before: Mapping[int, Mapping[str, int]],
    now: Mapping[int, Mapping[str, int]],
) -> None:
    """Raise `RuntimeError` if partitions do not hold the rows that they held in the run.

    A place in a partition would then be another record's.
    """
    for partition in before.keys() | now.keys():
        for name, source in setup.sources.items():
            if source.spills:
                continue
            if before.get(partition, {}).get(name) != now.get(partition, {}).get(name):
                raise RuntimeError(
                    f"partition {partition} of spout {name} holds other rows than it did in the "
                    "run; its source must be cut and ordered alike when it is read twice"
                )


def with_repeated_ids(setup: RunSetup, result: RunResult, claims: Mapping[str, Int64s]) -> pa.Table:
    """Add the records whose message id another record of the micro-batch has."""
    suspects = _fetch(setup, result, {}, claims)
    written = () if result.written is None else result.written.roots()
    failed = in_order(result.failed["root_id"].to_numpy(), *written)
    tables = [result.failed]
    for spout, table in suspects.items():
        roots = table[ROOT_ID].to_numpy()
        messages = table[MESSAGE_ID].combine_chunks().dictionary_encode("encode")
        of = messages.indices.to_numpy()
        many = np.bincount(of, minlength=len(messages.dictionary))
        # Of a message id that is there once, two hashes have met.
        repeated = (many[of] > 1) & ~among(roots, failed)
        text = pc.binary_join_element_wise(
            "message id ",
            messages.dictionary,
            " is that of ",
            pa.array(many).cast(pa.string()),
            " records of one micro-batch; drop duplicates, or let positions be the ids: "
            "spout(...) without message_id",
            "",
        )
        n = len(text)
        # They would wait equally long, and meet again.
        reasons = encoded("!", pa.repeat(spout, n), pa.repeat("RepeatedMessageId", n), text)
        columns = [
            pa.array(roots[repeated]),
            pa.repeat(spout, int(repeated.sum())).dictionary_encode(),
            pa.DictionaryArray.from_arrays(pa.array(of[repeated]), reasons),
        ]
        tables.append(pa.table(columns, schema=FAILED))
    return pa.concat_tables(tables).unify_dictionaries()
