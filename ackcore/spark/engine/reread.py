"""Reading records of a run again: the payloads of failed records, and repeated message ids.

Records are read by (partition, place).  Due records are read from their file.  Records of a source
that can be read again by position are read from the source, and all others from the input that the
spout stage wrote while reading.
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

from ackcore._records import Int64s
from ackcore.spark.base.checksummed import in_few, write_batches
from ackcore.spark.base.reasons import FAILED, Reasons, reason_column
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
from ackcore.spark.stores.files import making_in
from ackcore.spark.tasks.failed_rows import FailedRows, Rules
from ackcore.spark.tasks.pieces import DealtPieces, Piece
from ackcore.spark.tasks.reread_stage import JudgedPicks, Picks, Reader, RereadStage, pick_keyed
from ackcore.spark.tasks.results import (
    INLINE_BYTES,
    RESULT_TYPE,
    TASK_REPORT,
    from_stream,
    results_in,
)
from ackcore.spark.tasks.retry_stage import Slice, records_in
from ackcore.spark.tasks.row_files import ROOT_ID, RowFile, among, read_whole
from ackcore.spark.tasks.source_records import SourceRecords, pick
from ackcore.spark.tasks.spout_stage import SpoutStage

#: The most rows in files that the driver searches for failed records itself, without a slower job.
_READ_HERE = 10_000


def judge(setup: RunSetup, accepted: RunResult, failed: pa.Table, rules: Rules) -> FailedRows:
    """Read the failed records of a run again, and judge them where they are read.

    Parameters
    ----------
    setup : RunSetup
        The setup of the run.
    accepted : RunResult
        The result of the run.
    failed : pyarrow.Table
        The roots and reasons of the failed records, in `FAILED`; and `ORDER`, if spouts are
        ordered.
    rules : Rules
        The settings and times that decide whether a record waits.

    Raises
    ------
    RuntimeError
        If a record cannot be found any more.
    ResultsTooLarge
        If there are so many records that Spark does not return their ids to the driver.
    """
    work = setup.plan.work
    directory = os.path.join(work, "failed")
    reader = partial(JudgedPicks, rules, directory, setup.plan.number)
    ids = ids_in(failed["root_id"])
    left = failed.drop_columns(["spout"]).unify_dictionaries()
    files, found = _files(setup, accepted, setup.sources), FailedRows()
    slices: tuple[Slice, ...] = ()
    if setup.inputs and sum(one.rows for one in files) > _READ_HERE:
        slices = (*setup.slices(), *(one for one in files if one.spilled))
    elif files:
        report, tables = _read_here(setup, files, reader(_in_table(left)))
        found = FailedRows.of(work, [report], tables)
        left = found.without(left)
    if len(left) and (slices or not setup.sources.keys() <= accepted.spilled.keys()):
        given: pa.Table | str = _in_table(left)
        if left.nbytes > INLINE_BYTES:
            with making_in(directory) as place:
                name = write_batches(
                    place, "roots", left.schema, in_few(_by_root(left)), synced=False
                )
            given = os.path.join(directory, name)
        sought = ids_in(left["root_id"])
        reports, tables = _read_by_tasks(setup, accepted, partial(reader, given), slices, sought)
        found = found.plus(FailedRows.of(work, reports, tables))
    _refuse_lost(ids, found.found.values())
    return found


def _by_root(rows: pa.Table) -> Iterator[pa.RecordBatch]:
    """Yield rows sorted by root, one range of roots at a time."""
    batches = [_in_order(batch) for batch in rows.to_batches()]
    columns = [batch.column("root_id").to_numpy() for batch in batches]
    starts = starts_of_ranges(columns)
    cuts = [cuts_of(column, starts) for column in columns]
    for n in range(len(starts) + 1):
        parts = [
            batch.slice(at[n], at[n + 1] - at[n]) for batch, at in zip(batches, cuts, strict=True)
        ]
        yield from map(_in_order, pa.Table.from_batches(parts).combine_chunks().to_batches())


def _in_table(rows: pa.Table) -> pa.Table:
    return pa.Table.from_batches(_by_root(rows), rows.schema)


def _in_order(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows sorted by root; the same batch if it is sorted."""
    roots = batch.column("root_id").to_numpy()
    if is_sorted(roots):
        return batch
    return batch.take(pa.array(np.argsort(roots, kind="stable")))


def _refuse_lost(ids: Sequence[Int64s], found: Iterable[pa.Table]) -> None:
    """Raise `RuntimeError` if a failed record was not found again."""
    pairs = in_ranges(ids, [*_roots_in(found)])
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


def find_keys(
    setup: RunSetup,
    accepted: RunResult,
    roots: Mapping[str, Int64s],
    keys: Mapping[str, Int64s],
) -> dict[str, pa.Table]:
    """Return the records with given roots and new records with given keys, in `KEYED`, by spout.

    Parameters
    ----------
    setup, accepted
        See `judge`.
    roots, keys : mapping from str to numpy.ndarray of int64
        Sorted roots, and sorted hashes of keys, by spout. The roots may belong to another spout.

    Raises
    ------
    RuntimeError
        If the rows cannot be found any more.
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
    """Return the records that a function picks; ``sought``, if given, has all their roots."""
    reader = partial(Picks, function)
    _, tables = _read_here(setup, _files(setup, accepted, spouts), reader())
    if sought is not None:
        wanted = distinct(*sought)
        missing = ~found_in(wanted, _roots_in(tables))
        sought = [wanted[missing]]
    # Records in no file must be read from their sources, which takes a job.
    if (sought is None or len(*sought)) and not set(spouts) <= accepted.spilled.keys():
        tables += _read_by_tasks(setup, accepted, reader, (), sought)[1]
    found: dict[str, list[pa.Table]] = defaultdict(list)
    for table in tables:
        found[table.schema.metadata[b"spout"].decode()].append(table)
    return {name: pa.concat_tables(some, promote_options="none") for name, some in found.items()}


def _files(setup: RunSetup, accepted: RunResult, spouts: Collection[str]) -> tuple[Slice, ...]:
    """Return the files with due records and with spilled records of these spouts."""
    due = [
        Slice(name, file, 0, len(read_whole(file)) if file.rows is None else file.rows)
        for name, file in setup.plan.retries.items()
        if name in spouts
    ]
    spilled = [
        Slice(name, RowFile(os.path.join(setup.plan.work, path), rows), 0, rows or 0, spilled=True)
        for name, files in accepted.spilled.items()
        for path, rows, _ in (files if name in spouts else ())
    ]
    return (*due, *spilled)


def _read_here(
    setup: RunSetup, slices: Iterable[Slice], reader: Reader
) -> tuple[dict[str, Any], list[pa.Table]]:
    """Read files in this process; return the reader's report and tables."""
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
    reader: Callable[[], Reader],
    slices: tuple[Slice, ...],
    sought: Sequence[Int64s] | None,
) -> tuple[list[dict[str, Any]], list[pa.Table]]:
    """Read slices, and the input of spouts without spilled files, again in one Spark job.

    If ``sought`` is given and the source can find roots, only the pieces with these roots are read.

    Raises `RuntimeError` if a partition holds other rows than it did in the run.
    """
    spilled = frozenset(accepted.spilled)
    stage = RereadStage(SpoutStage(setup.spec, setup.sources, None), reader, spilled)
    frames: list[DataFrame] = []
    before: Mapping[int, Mapping[str, int]] = {}
    if not setup.sources.keys() <= spilled:
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
    setup: RunSetup,
    accepted: RunResult,
    sought: Sequence[Int64s] | None,
    stage: RereadStage,
) -> tuple[list[DataFrame], Mapping[int, Mapping[str, int]]]:
    """Return frames that read the sources again, and fingerprints of whole partitions.

    If ``sought`` is given and the source can find roots, only the pieces with these roots are read.
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
    """Return the pieces of the input that hold these roots, or None if all input must be read.

    With several inputs, the input of each partition is unknown here.  For a micro-batch that was
    decided before, the numbers of rows are unknown.
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
    """Raise `RuntimeError` if partitions hold other rows than they held in the run.

    A place in a partition would then belong to another record.
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
    """Return the failures, adding records that share a message id within the micro-batch."""
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
            " is that of ",
            pa.array(many).cast(pa.string()),
            " records of one micro-batch; drop duplicates, or let positions be the ids: "
            "spout(...) without message_id",
            "",
        )
        n = len(text)
        # Final: on a retry they would wait equally long and meet again.
        kind, owner = pa.repeat("RepeatedMessageId", n), pa.repeat(spout, n)
        reasons = Reasons(reason_column(owner, kind, text, final=True), np.arange(n))
        columns = [
            pa.array(roots[repeated]),
            pa.repeat(spout, int(repeated.sum())).dictionary_encode(),
            pa.DictionaryArray.from_arrays(
                pa.array(of[repeated]), reasons.encoded(np.zeros(n, np.int64))
            ),
        ]
        tables.append(pa.table(columns, schema=FAILED))
    return pa.concat_tables(tables).unify_dictionaries()
