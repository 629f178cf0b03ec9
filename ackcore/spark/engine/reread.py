"""Reading records of a run again: the payloads of failed records, and repeated message ids.

Records are read by (partition, place).  Due records are read from their file.  Records of a source
that can be read again by position are read from the source.  All others are read from the files
that the spout stage wrote.  Tasks with little input keep it in files in any case: if these
have all sought records, no Spark job is needed.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame

from ackcore._error_hints import counted
from ackcore._records import Int64s
from ackcore.spark.base.checksummed import in_few, write_batches
from ackcore.spark.base.reasons import Reasons, failures, reason_column
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
from ackcore.spark.base.session import collected
from ackcore.spark.engine.setup import RunResult, RunSetup
from ackcore.spark.stores.run_files import making_in
from ackcore.spark.tasks.failed_rows import INLINE_BYTES, FailedRows, Rules
from ackcore.spark.tasks.record_ids import SourceRecords, SpoutSpec, pick, positions_of
from ackcore.spark.tasks.reread_stage import (
    DealtPieces,
    JudgedPicks,
    Picks,
    RereadStage,
    pick_keyed,
)
from ackcore.spark.tasks.row_files import ROOT_ID, RowFile, among, partition_in
from ackcore.spark.tasks.spout_stage import Slice, SpoutStage, records_in
from ackcore.spark.tasks.task import RESULT_TYPE, TASK_REPORT, from_stream, results_in

#: The most bytes of files that the driver searches for records itself, without a slower job.
_READ_HERE = 1 << 25


def judge(setup: RunSetup, accepted: RunResult, failed: pa.Table, rules: Rules) -> FailedRows:
    """Read the failed records of a run again, and decide for each whether it waits or is dead.

    A task, or the driver, decides on a record when it reads it. Raises RuntimeError if a record
    cannot be found any more. Raises ResultsTooLarge if there are so many records that Spark does
    not return their ids to the driver.

    ``accepted``: the result of the run. ``failed``: the roots and reasons of the failed records, of
    the schema `FAILED`, perhaps with `ORDER` and `DEDUP_KEY`. ``rules``: the settings and times
    that decide whether a record waits.
    """
    work = setup.plan.work
    directory = os.path.join(work, "failed")
    reader = partial(JudgedPicks, rules, directory, setup.plan.number)
    ids = ids_in(failed["root_id"])
    left = failed.drop_columns(["spout"]).unify_dictionaries()
    kept = _kept(setup, accepted, setup.sources, ids)
    files, found = _files(setup, accepted, setup.sources, kept), FailedRows()
    slices: tuple[Slice, ...] = ()
    if setup.inputs and sum(one.file.nbytes or 0 for one in files) > _READ_HERE:
        slices = (*setup.slices(), *(one for one in files if one.spilled))
    elif files:
        report, tables = _read_here(setup, files, reader(_in_table(left)))
        found = FailedRows.of(work, [report], tables)
        left = found.without(left)
    from_source = kept is None and not setup.sources.keys() <= accepted.spilled.keys()
    if len(left) and (slices or from_source):
        if left.nbytes > INLINE_BYTES:
            with making_in(directory) as place:
                name = write_batches(
                    place, "roots", left.schema, in_few(_by_root(left)), synced=False
                )
            given: pa.Table | str = os.path.join(directory, name)
        else:
            given = _in_table(left)
        sought = ids_in(left["root_id"])
        reports, tables = _read_by_tasks(
            setup, accepted, partial(reader, given), slices, sought, from_source=from_source
        )
        found = found.plus(FailedRows.of(work, reports, tables))
    _refuse_lost(ids, found.found.values())
    return found


def _by_root(rows: pa.Table) -> Iterator[pa.RecordBatch]:
    """Yield batches of rows sorted by the column ``root_id``; each has one range of roots."""
    batches = [_in_order(batch) for batch in rows.to_batches()]
    columns = [batch.column("root_id").to_numpy() for batch in batches]
    starts = starts_of_ranges(columns)
    cuts = [cuts_of(column, starts) for column in columns]
    for n in range(len(starts) + 1):
        parts = [
            batch.slice(at[n], at[n + 1] - at[n]) for batch, at in zip(batches, cuts, strict=True)
        ]
        table = pa.Table.from_batches(parts, rows.schema)
        yield from map(_in_order, table.combine_chunks().to_batches())


def _in_table(rows: pa.Table) -> pa.Table:
    return pa.Table.from_batches(_by_root(rows), rows.schema)


def _in_order(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows sorted by the column ``root_id``; the same batch if it is sorted."""
    roots = batch.column("root_id").to_numpy()
    if is_sorted(roots):
        return batch
    return batch.take(pa.array(np.argsort(roots, kind="stable")))


def _refuse_lost(ids: Sequence[Int64s], found: Iterable[pa.Table]) -> None:
    """Raise `RuntimeError` if a root in ``ids`` is not in the tables that were read again."""
    pairs = in_ranges(ids, [*_roots_in(found)])
    lost = sum(int((~among(sought, there)).sum()) for sought, there in pairs)
    if lost:
        n = sum(map(len, ids))
        raise RuntimeError(
            f"{counted(n, 'record')} failed, and the second read of the spouts' sources lacks "
            f"{lost}; within a micro-batch a source must return the same rows each time it is read"
        )


def _roots_in(tables: Iterable[pa.Table]) -> Iterator[Int64s]:
    return (ids for table in tables for ids in ids_in(table[ROOT_ID]))


def find_keys(
    setup: RunSetup, accepted: RunResult, roots: Mapping[str, Int64s], keys: Mapping[str, Int64s]
) -> dict[str, pa.Table]:
    """Return, by spout, the records with given roots and the new records with given keys.

    The tables have the columns `KEYED`; a spout without such records is missing. Raises
    RuntimeError if a source does not return the same rows as in the run.

    ``roots``, ``keys``: sorted roots, and sorted hashes of keys, by spout. Roots of other spouts
    are ignored.
    """
    sought = None if keys else [*roots.values()]
    function = partial(pick_keyed, roots=roots, keys=keys)
    return _picked(setup, accepted, {*roots, *keys}, sought, function)


def _picked(
    setup: RunSetup,
    accepted: RunResult,
    spouts: Collection[str],
    sought: Sequence[Int64s] | None,
    function: Callable[[SourceRecords], pa.RecordBatch],
) -> dict[str, pa.Table]:
    """Return the records of a run that ``function`` picks, by spout; those without are missing.

    ``sought``: all roots that it may pick, so that only their files or partitions are read; None if
    they are unknown.
    """
    reader = partial(Picks, function)
    kept = _kept(setup, accepted, spouts, sought)
    if kept and sum(file.nbytes or 0 for some in kept.values() for file in some) > _READ_HERE:
        kept = None  # tasks read the sources faster than the driver reads these files
    _, tables = _read_here(setup, _files(setup, accepted, spouts, kept), reader())
    if sought is not None:
        wanted = distinct(*sought)
        missing = ~found_in(wanted, _roots_in(tables))
        sought = [wanted[missing]]
    # Records in no file must be read from their sources, which takes a job.
    in_files = kept is not None or set(spouts) <= accepted.spilled.keys()
    if (sought is None or len(*sought)) and not in_files:
        tables += _read_by_tasks(setup, accepted, reader, (), sought)[1]
    found: dict[str, list[pa.Table]] = defaultdict(list)
    for table in tables:
        found[table.schema.metadata[b"spout"].decode()].append(table)
    return {name: pa.concat_tables(some, promote_options="none") for name, some in found.items()}


def _kept(
    setup: RunSetup, accepted: RunResult, spouts: Collection[str], sought: Sequence[Int64s] | None
) -> dict[str, list[RowFile]] | None:
    """Return, by spout, the files in which tasks kept the partitions with ``sought`` roots.

    If ``sought`` is None, these are all partitions.  Returns None if a task has not kept one of
    them.
    """
    found: dict[str, list[RowFile]] = {}
    for name in set(spouts) - accepted.spilled.keys():
        source = setup.sources[name]
        rows = {partition: read.get(name, 0) for partition, read in accepted.read.items()}
        files = {partition_in(file.path): file for file in accepted.kept.get(name, ())}
        if not accepted.read:  # decided before, so unknown
            return None
        wanted = [partition for partition, n in rows.items() if n]
        if sought is not None:
            wanted = [*_places(source, sought, rows)]
        if source.tracked and not files.keys() >= set(wanted):
            return None
        found[name] = [files[partition] for partition in wanted if partition in files]
    return found


def _places(
    source: SpoutSpec, sought: Sequence[Int64s], rows: Mapping[int, int]
) -> dict[int, Int64s]:
    """Return, by partition, the sorted row numbers of a spout's records with ``sought`` roots.

    ``rows``: the number of rows of each partition.
    """
    partitions, places = positions_of(source.key, np.concatenate([np.empty(0, np.int64), *sought]))
    order = np.lexsort((places, partitions))
    partitions, places = partitions[order], places[order]
    found = {}
    for partition, n in rows.items():
        first, last = np.searchsorted(partitions, [partition, partition + 1])
        # Roots of other spouts, and of due records, have places beyond all rows.
        at = places[first:last]
        at = at[at < n]
        if len(at):
            found[partition] = at
    return found


def _files(
    setup: RunSetup,
    accepted: RunResult,
    spouts: Collection[str],
    kept: Mapping[str, Sequence[RowFile]] | None,
) -> tuple[Slice, ...]:
    """Return slices of whole files: the due records of these spouts, and what tasks wrote.

    Tasks wrote the spilled files of the run, and the files in ``kept``.
    """
    due = [
        Slice(name, file, 0, file.rows)
        for name, file in setup.plan.retries.items()
        if name in spouts
    ]
    spilled = [
        Slice(
            name,
            file._replace(path=os.path.join(setup.plan.work, file.path)),
            0,
            file.rows,
            spilled=True,
        )
        for name, files in (*accepted.spilled.items(), *(kept or {}).items())
        for file in (files if name in spouts else ())
    ]
    return (*due, *spilled)


def _read_here(
    setup: RunSetup, slices: Iterable[Slice], reader: Picks
) -> tuple[dict[str, Any], list[pa.Table]]:
    """Read slices in this process; return the reader's report, and tables of what it picked."""
    tables = []
    try:
        for part in slices:
            for some in records_in(setup.sources[part.spout], part):
                rows = reader.take(some)
                if rows is not None and len(rows):
                    tables.append(pa.Table.from_batches([rows]))
        report, more = reader.finish()
    finally:
        reader.discard()
    return report, tables + more


def _read_by_tasks(
    setup: RunSetup,
    accepted: RunResult,
    reader: Callable[[], Picks],
    slices: tuple[Slice, ...],
    sought: Sequence[Int64s] | None,
    *,
    from_source: bool = True,
) -> tuple[list[dict[str, Any]], list[pa.Table]]:
    """Read slices and, if ``from_source``, sources without spilled files again in one Spark job.

    ``sought``: the roots to find; where possible, only ranges of rows with these are read. None
    reads all rows.

    Returns the tasks' reports, and tables of the records that their readers picked. Raises
    RuntimeError if a partition has other rows than in the run.
    """
    spilled = frozenset(accepted.spilled)
    stage = RereadStage(SpoutStage(setup.spec, setup.sources, None), reader, spilled)
    frames: list[DataFrame] = []
    before: Mapping[int, Mapping[str, int]] = {}
    if from_source:
        frames, before = _reread_frames(setup, accepted, sought, stage)
    if slices:
        numbers = setup.inputs[0].frame.sparkSession.range(len(slices), numPartitions=len(slices))
        frames.append(numbers.mapInArrow(replace(stage, slices=slices), RESULT_TYPE))
    reports: list[dict[str, Any]] = []
    tables: list[pa.Table] = []
    for kind, blob in results_in(collected(reduce(DataFrame.union, frames))):
        if kind == TASK_REPORT:
            reports.append(json.loads(blob.to_pybytes()))
        else:
            tables.append(from_stream(blob))
    now = {number: content for one in reports for number, content in one["contents"]}
    check_content(setup, before, now)
    return reports, tables


def _reread_frames(
    setup: RunSetup, accepted: RunResult, sought: Sequence[Int64s] | None, stage: RereadStage
) -> tuple[list[DataFrame], Mapping[int, Mapping[str, int]]]:
    """Return frames that read the sources again, and the run's fingerprints of their rows.

    The fingerprints are by partition and spout, for the partitions that the frames read whole.

    The frames read all rows if ``sought`` is None; with several inputs, since then the input of
    each partition is unknown here; and for a micro-batch that was decided before, since then the
    numbers of rows are unknown.
    """
    one, *more = setup.inputs
    stage = replace(stage, stage=replace(stage.stage, spout=one.spout))
    if sought is None or more or one.spout is None or not accepted.read:
        frames = [
            each.map_in_arrow(
                replace(stage, stage=replace(stage.stage, spout=each.spout)), RESULT_TYPE
            )
            for each in setup.inputs
        ]
        return frames, accepted.content
    rows = {partition: read.get(one.spout, 0) for partition, read in accepted.read.items()}
    places = _places(setup.sources[one.spout], sought, rows)
    again = None if one.snapshot is None else one.snapshot.again
    if again is not None:
        pieces = again.pieces(places, rows)
        tasks = max(1, min(len(pieces), setup.spec.dests))
        numbers = one.frame.sparkSession.range(tasks, numPartitions=tasks)
        dealt = DealtPieces(again, [pieces[i::tasks] for i in range(tasks)])
        frame = numbers.mapInArrow(replace(stage, pieces=dealt), RESULT_TYPE)
        whole = {piece.partition for piece in pieces if piece.rows is None}
    else:
        # Not filtered by partition in the JVM: Spark's optimizer evaluates a filter of rows that
        # the plan holds (`VALUES`) once for all of them, as if they were one partition.
        frame, whole = one.map_in_arrow(stage, RESULT_TYPE), {*rows}
    before = {partition: of for partition, of in accepted.content.items() if partition in whole}
    return [frame], before


def check_content(
    setup: RunSetup, before: Mapping[int, Mapping[str, int]], now: Mapping[int, Mapping[str, int]]
) -> None:
    """Raise `RuntimeError` if partitions have other rows than in the run.

    A place in a partition would then be that of another record. ``before``, ``now``: fingerprints
    of the rows in the run and now, by partition and spout.
    """
    for partition in before.keys() | now.keys():
        for name, source in setup.sources.items():
            if source.spills:
                continue
            if before.get(partition, {}).get(name) != now.get(partition, {}).get(name):
                raise RuntimeError(
                    f"partition {partition} of the source of spout {name} has other rows than "
                    "when the micro-batch first read it; within a micro-batch a source must "
                    "return the same partitions with the same rows each time it is read"
                )


def with_repeated_ids(setup: RunSetup, result: RunResult, claims: Mapping[str, Int64s]) -> pa.Table:
    """Return the failures of a run, with all records that share a message id in the micro-batch.

    These fail for good, as ``RepeatedMessageId``, unless they have failed already. ``claims``: by
    spout, the sorted hashes of the message ids that occurred more than once.
    """
    suspects = _picked(
        setup,
        result,
        claims,
        None,
        partial(pick, roots={}, claims=claims, number=setup.plan.number),
    )
    failed = in_order(result.failed["root_id"].to_numpy(), *result.judged.roots())
    tables = [result.failed]
    for spout, table in suspects.items():
        roots = table[ROOT_ID].to_numpy()
        messages = table[MESSAGE_ID].combine_chunks().dictionary_encode("encode")
        of = messages.indices.to_numpy()
        many = np.bincount(of, minlength=len(messages.dictionary))
        # A message id that occurs once was picked because its hash equals another's.
        repeated = (many[of] > 1) & ~among(roots, failed)
        text = pc.binary_join_element_wise(
            "message id ",
            messages.dictionary,
            " belongs to ",
            pa.array(many).cast(pa.string()),
            " records of one micro-batch; drop duplicates, or use positions as ids: "
            "spout(...) without message_id",
            "",
        )
        n = len(text)
        # Final: on a retry they would wait equally long and meet again.
        said = {"component": pa.repeat(spout, n), "type": pa.repeat("RepeatedMessageId", n)}
        column = reason_column({**said, "message": text}, final=True)
        reasons = Reasons(column, np.arange(n))
        texts = reasons.encoded(np.zeros(n, np.int64)).take(pa.array(of[repeated]))
        tables.append(failures(roots[repeated], [spout], texts))
    return pa.concat_tables(tables).unify_dictionaries()
