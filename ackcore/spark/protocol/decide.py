"""The decide step: pure functions from the results of a run to a decision.

A record whose root is not ACKED waits for its next attempt, or is dead.  A root is not ACKED if

* it failed at a bolt, or was not acked;
* it crashed, or hung, the process that had it in flight, again and again;
* it shares a row for a sink with such a root: that row is not written.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ackcore._records import Int32s, Int64s
from ackcore.retry import Policy
from ackcore.spark.base.reason_columns import ReasonTexts, refused
from ackcore.spark.base.reasons import ENGINE, FAILED
from ackcore.spark.base.root_ids import distinct, ids_in, in_ranges, once
from ackcore.spark.base.schemas import ATTEMPT, FIRST_MS, ORDER, REPLAYED, SinkFile
from ackcore.spark.base.traces import RecordTrace
from ackcore.spark.checkpoint.dead import Dead, DeadPart, WrittenDead
from ackcore.spark.checkpoint.decisions import BatchDecision, Plan, Retries, nonacked_of
from ackcore.spark.checkpoint.segments import WrittenSegment, untried_in
from ackcore.spark.protocol.progress import Account
from ackcore.spark.run.types import RunResult, WrittenFailures
from ackcore.spark.tasks.failed_rows import Rules, judge, tracked
from ackcore.spark.tasks.row_files import (
    PLACE,
    ROOT_ID,
    ROOTS,
    RowFile,
    has_several_roots,
    read_rows,
)
from ackcore.topology.settings import Settings
from ackcore.topology.tuples import Reason

#: The failed records by spout; or what tasks wrote of them.
Payloads: TypeAlias = Mapping[str, pa.Table] | WrittenFailures


class Disagreement(Exception):
    """The results of a run contradict each other. It is run again, and no attempt counts."""


@dataclass(frozen=True)
class BatchOutcome:
    """A decision, and what follows from it that is not on record by itself.

    ``changes`` is by how much each spout's account changes, with what waits in the end; ``failed``
    how many executions failed, and ``uncounted`` how many of them were no attempt; ``first_ms``
    when each retried record that is ACKED now was first seen; ``breaker_trips`` how often a breaker
    opened in the run; ``emitted`` how many tuples components emitted in it; ``traces`` the way of
    records of which that is told.
    """

    decision: BatchDecision
    changes: Mapping[str, Account]
    failed: int
    uncounted: int
    first_ms: Int64s
    breaker_trips: int = 0
    emitted: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    traces: tuple[RecordTrace, ...] = ()


def with_rejection_reasons(failed: pa.Table, reasons: Mapping[int, Reason]) -> pa.Table:
    """Return the failures, those of roots that were not run with the reasons for that."""
    if not reasons:
        return failed
    root_ids = failed["root_id"].to_numpy()
    roots = np.array(sorted(reasons), np.int64)
    here = np.isin(root_ids, roots)
    texts = pa.array([reasons[root].encode() for root in roots.tolist()], pa.string())
    said = texts.take(pa.array(np.searchsorted(roots, root_ids[here])))
    column = pc.replace_with_mask(_texts(failed["reason"]), pa.array(here), said)
    return failed.set_column(2, FAILED.field(2), column.dictionary_encode())


def _texts(column: pa.ChunkedArray) -> pa.Array:
    whole = column.cast(pa.string()).combine_chunks()
    return whole if isinstance(whole, pa.Array) else pa.array([], pa.string())


def propagate_failures(
    failed: pa.Table,
    files: Iterable[SinkFile],
    directory: str,
    spouts: Sequence[str],
    written: WrittenFailures | None = None,
) -> pa.Table:
    """Return the failures and those that they entail: of roots that share a row with them.

    Parameters
    ----------
    failed : pyarrow.Table
        `FAILED`.
    files : iterable
        What the run left for the sinks.
    directory : str
        Where their paths start.
    spouts : sequence of str
        The tracked ones: if there are several, it is not known whose a root is that failures
        propagate to, and its spout is null.
    written : WrittenFailures, optional
        What tasks wrote of roots that failed, and need not be among ``failed``.
    """
    if not len(failed) and written is None:
        return failed
    groups = [
        _shared(RowFile(os.path.join(directory, file.path), file.rows, file.nbytes))
        for file in files
        if has_several_roots(file.path)
    ]
    rows = [(sizes, roots) for sizes, roots in groups if len(roots)]
    if not rows:
        return failed
    sizes = np.concatenate([sizes for sizes, _ in rows])
    roots = np.concatenate([roots for _, roots in rows])
    row = np.repeat(np.arange(len(sizes)), sizes)

    def spread(bad: Int64s) -> Int64s:
        while True:
            touched = np.bincount(row, np.isin(roots, bad), len(sizes)) > 0
            more = np.union1d(bad, roots[touched[row]])
            if len(more) == len(bad):
                return more
            bad = more

    start = distinct(*failed_roots(failed, written))
    entailed = np.setdiff1d(spread(start), start, assume_unique=True)
    if not len(entailed):
        return failed
    reason = Reason(
        ENGINE,
        "PropagatedFailure",
        "a row for a sink hangs from this record and from one that failed",
    )
    # An attempt only if that of one of those that it shares rows with was.
    counted = [failed["root_id"].to_numpy()[ReasonTexts.of_column(failed["reason"]).counts()]]
    if written is not None:
        counted += written.roots(counting=True)
    counts = np.isin(entailed, spread(distinct(*counted)))
    texts = pa.array([reason._replace(counts=each).encode() for each in (False, True)])
    owner = pa.scalar(spouts[0] if len(spouts) == 1 else None, pa.string())
    added = pa.table(
        [
            pa.array(entailed),
            pa.repeat(owner, len(entailed)).dictionary_encode(),
            pa.DictionaryArray.from_arrays(pa.array(counts.astype(np.int32)), texts),
        ],
        schema=FAILED,
    )
    return pa.concat_tables([failed.cast(FAILED), added]).unify_dictionaries()


def _shared(file: RowFile) -> tuple[Int64s, Int64s]:
    """How many roots each row with several has, and these roots one after the other."""
    sizes, roots = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for batch in read_rows(file):
        column = batch.column(ROOTS)
        sizes.append(pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64))
        roots.append(column.flatten().to_numpy())
    return np.concatenate(sizes), np.concatenate(roots)


def without_numbers(rows: pa.Table) -> pa.Table:
    """Return dead records without their order: they come behind nothing any more."""
    return rows.drop_columns([ORDER]) if ORDER in rows.schema.names else rows


def check_agreement(ran: RunResult, retries: Retries) -> None:
    """Raise `Disagreement` unless a run's parts agree, and all that was due ran."""
    if ran.problems:
        raise Disagreement("; ".join(ran.problems))
    for spout, table in retries.due.items():
        if ran.retried.get(spout, 0) != len(table):
            raise Disagreement(
                f"{len(table)} records of spout {spout} were due, and "
                f"{ran.retried.get(spout, 0)} of them ran"
            )


def failed_roots(failed: pa.Table, written: Payloads | None) -> list[Int64s]:
    """Return columns of the roots that failed, those included that tasks wrote.

    Some may be there twice.
    """
    in_files = written.roots() if isinstance(written, WrittenFailures) else []
    return [*ids_in(failed["root_id"]), *in_files]


def check_payloads(
    failed: pa.Table, payloads: Payloads, written: WrittenFailures | None = None
) -> None:
    """Raise `Disagreement` unless the payload of each failed root was found, once.

    ``written`` is what tasks wrote in the run, which need not be among ``failed``.
    """
    in_files = payloads.roots() if isinstance(payloads, WrittenFailures) else ()
    tables = payloads.tables if isinstance(payloads, WrittenFailures) else payloads
    rows = [*in_files, *(ids for table in tables.values() for ids in ids_in(table[ROOT_ID]))]
    # What tasks wrote may be all that failed: it is there, if not twice.
    is_all = payloads is written and not len(failed)
    sought = [] if is_all else failed_roots(failed, written)
    agree, lost, there = True, 0, 0
    for some, got in in_ranges(sought, rows):
        wanted = once(got if is_all else some)
        same = np.array_equal(wanted, got)
        agree &= same
        lost += len(wanted)
        there += len(wanted) if same else len(np.intersect1d(wanted, got))
    if not agree:
        raise Disagreement(
            f"{lost} records failed, and reading the sources again found {there} of them in "
            f"{sum(map(len, rows))} rows: they did not give the same rows a second time"
        )


def decide(
    plan: Plan,
    retries: Retries,
    records: Mapping[str, int],
    failed: pa.Table,
    payloads: Payloads,
    files: Iterable[SinkFile],
    settings: Settings,
    spouts: Sequence[str],
    ended_ms: int = 0,
) -> BatchOutcome:
    """Decide what becomes of each record of a micro-batch.

    Parameters
    ----------
    plan : Plan
        Its time is that of all decisions.
    retries : Retries
        The retries that were run, and those that go on waiting.
    records : mapping from str to int
        New records by spout.
    failed : pyarrow.Table
        `FAILED`: all roots that are not ACKED.
    payloads : mapping from str to pyarrow.Table, or WrittenFailures
        Their records by spout: the source's columns, `ROOT_ID`, `PLACE`, message id and
        attempt; or what tasks judged, by the same rules, and wrote.
    files : iterable of SinkFile
        What the run left for the sinks.
    settings : Settings
        Attempts, back-off, and how many may wait.
    spouts : sequence of str
        The tracked ones.
    ended_ms : int, default 0
        When the run had ended, if that is later than the plan: waits that reasons ask for begin
        with the failure, and that was no later.

    Returns
    -------
    BatchOutcome
    """
    tables = payloads.tables if isinstance(payloads, WrittenFailures) else payloads
    judged = _judged(rules_of(plan, settings, ended_ms), retries, failed, tables)
    if isinstance(payloads, WrittenFailures):
        for spout, lost in _written(payloads).items():
            judged[spout] = judged.get(spout, _NONE).plus(lost)
    waiting, changes = retries.rest, {}
    dead: dict[str, list[DeadPart]] = {}
    failures = 0
    first_ms = [np.empty(0, np.int64)]
    for spout in spouts:
        tried = retries.due.get(spout)
        lost = judged.get(spout, _NONE)
        runs_again = len(tried) if tried is not None else 0
        firsts, resolved = 0, -lost.replayed
        if tried is not None:
            resolved += int(np.count_nonzero(tried[REPLAYED].to_numpy()))
            # What a request put back starts again from attempt 0.
            firsts = untried_in(tried)
            # By place, not by message id: a duplicate, or a record that was replayed twice, has
            # the same.
            first_ms.append(np.delete(tried[FIRST_MS].to_numpy(), lost.places))
        dies = list(lost.dies)
        for part in lost.waits:
            # A replay that is larger than a micro-batch takes is no reason to give others up.
            room = settings.max_waiting - (waiting.rows() - waiting.untried)
            stays, goes = _cut(part, max(room, 0), settings.max_waiting)
            waiting = waiting.plus(spout, stays)
            dies.append(goes)
        parked = sum(map(len, dies))
        if parked:
            dead[spout] = dies
        lost_here = lost.rows
        executed = records.get(spout, 0) + runs_again
        changes[spout] = Account(
            records=records.get(spout, 0),
            # Counted when a request is taken, however long its rows then wait for their turn.
            replayed=retries.requested.get(spout, 0),
            acked=executed - lost_here,
            dead=parked,
            waiting=waiting.rows(spout),
            retried=runs_again - firsts,
            resolved=resolved,
        )
        failures += lost_here
        if changes[spout].acked < 0:
            raise Disagreement(
                f"spout {spout} has {executed} records in this micro-batch, and "
                f"{executed - changes[spout].acked} failed"
            )
    decision = BatchDecision(
        number=plan.number,
        waiting=waiting,
        dead=Dead(dead),
        nonacked=nonacked_of(failed_roots(failed, payloads)),
        files=tuple(files),
    )
    uncounted = sum(lost.uncounted for lost in judged.values())
    return BatchOutcome(decision, changes, failures, uncounted, np.concatenate(first_ms))


def refused_records(
    plan: Plan,
    retries: Retries,
    payloads: Mapping[str, pa.Table],
    failed: pa.Table,
    spouts: Sequence[str],
) -> tuple[dict[str, pa.Table], dict[str, Account]]:
    """Return the records that sinks refused as dead ones, by spout, and how the accounts change.

    Parameters
    ----------
    plan, retries, payloads, spouts
        As `decide` has them.
    failed : pyarrow.Table
        `FAILED`: their roots, which the decision has as ACKED.
    """
    failed = _by_root(failed)
    dead, changes = {}, {}
    for spout in spouts:
        lost = payloads.get(spout)
        if lost is None or not len(lost):
            continue
        first_ms, replayed = _known(plan.now_ms, retries.due.get(spout), lost)
        attempts = pc.add(lost[ATTEMPT], pa.scalar(1, pa.int32()))
        said = _reasons_of(failed, lost).texts()
        due_ms = np.zeros(len(lost), np.int64)
        dead[spout] = tracked(lost, attempts, due_ms, first_ms, plan.now_ms, said, replayed)
        often = int(np.count_nonzero(replayed))
        changes[spout] = Account(acked=-len(lost), dead=len(lost), resolved=-often)
    return dead, changes


class _Lost(NamedTuple):
    """The failed records of a spout, and what becomes of them.

    ``places`` are those of them that were due.
    """

    rows: int
    places: Int64s
    replayed: int
    uncounted: int
    waits: Sequence[pa.Table | WrittenSegment]
    dies: Sequence[DeadPart]

    def plus(self, more: _Lost) -> _Lost:
        return _Lost(
            self.rows + more.rows,
            np.concatenate([self.places, more.places]),
            self.replayed + more.replayed,
            self.uncounted + more.uncounted,
            [*self.waits, *more.waits],
            [*self.dies, *more.dies],
        )


_NONE = _Lost(0, np.empty(0, np.int64), 0, 0, (), ())


def _judged(
    rules: Rules, retries: Retries, failed: pa.Table, payloads: Mapping[str, pa.Table]
) -> dict[str, _Lost]:
    """Judge records that were read again."""
    found: dict[str, _Lost] = {}
    if not payloads:
        return found
    failed = _by_root(failed)
    for spout, lost in payloads.items():
        if len(lost):
            first_ms, replayed = _known(rules.now_ms, retries.due.get(spout), lost)
            reasons = _reasons_of(failed, lost)
            waits, dies, uncounted = judge(rules, lost, reasons, first_ms, replayed)
            places = lost[PLACE].drop_null().to_numpy()
            some = int(np.count_nonzero(replayed))
            dead = without_numbers(dies)
            found[spout] = _Lost(len(lost), places, some, uncounted, (waits,), (dead,))
    return found


def _written(failures: WrittenFailures) -> dict[str, _Lost]:
    """Return what tasks judged, and wrote."""
    found = {}
    for spout, rows in failures.found.items():
        files = [file for file in failures.files if file.spout == spout]
        waits = [
            WrittenSegment(
                os.path.join(failures.directory, file.name),
                file.rows,
                file.next_due_ms,
                file.oldest_ms,
                nbytes=file.nbytes,
            )
            for file in files
            if not file.dead
        ]
        dies = [
            WrittenDead(
                os.path.join(failures.directory, file.name),
                file.rows,
                nbytes=file.nbytes,
                letters=True,
            )
            # Small ones side by side: the dead-letter store has them in one file.
            for file in sorted(files, key=lambda file: -file.nbytes)
            if file.dead
        ]
        places = failures.places(spout)
        replayed = failures.replayed.get(spout, 0)
        found[spout] = _Lost(len(rows), places, replayed, 0, waits, dies)
    if found:
        some = next(iter(found))
        found[some] = found[some]._replace(uncounted=failures.uncounted)
    return found


def _cut(
    part: pa.Table | WrittenSegment, room: int, most: int
) -> tuple[pa.Table | WrittenSegment, DeadPart]:
    """Return what waits of records for which there is only so much room, and what is dead."""
    kept = min(len(part), room)
    if isinstance(part, WrittenSegment):
        rest = WrittenDead(part.path, len(part) - kept, kept, most, part.nbytes)
        return replace(part, rows=kept), rest
    return part.slice(0, kept), without_numbers(refused(part.slice(kept), most))


def _known(now_ms: int, tried: pa.Table | None, lost: pa.Table) -> tuple[Int64s, Int32s]:
    """Return when failed records were first seen, and how often they were replayed."""
    n = len(lost)
    first, replayed = np.full(n, now_ms), np.zeros(n, np.int32)
    if tried is not None:
        place = lost[PLACE].combine_chunks()
        due = place.is_valid().to_numpy(zero_copy_only=False)
        at = place.drop_null().to_numpy()
        first[due] = tried[FIRST_MS].to_numpy()[at]
        replayed[due] = tried[REPLAYED].to_numpy()[at]
    return first, replayed


def _by_root(failed: pa.Table) -> pa.Table:
    return failed.take(pa.array(np.argsort(failed["root_id"].to_numpy(), kind="stable")))


def _reasons_of(failed: pa.Table, lost: pa.Table) -> ReasonTexts:
    """Return why records failed; ``failed`` is in the order of roots."""
    at = np.searchsorted(failed["root_id"].to_numpy(), lost[ROOT_ID].to_numpy())
    return ReasonTexts.of_column(failed["reason"].take(pa.array(at)))


def rules_of(plan: Plan, settings: Settings, ended_ms: int) -> Rules:
    """Return by what the failed records of a micro-batch are judged."""
    policy = Policy(settings.max_attempts, settings.backoff_ms, settings.max_backoff_ms)
    return Rules(plan.now_ms, ended_ms, policy, 1000 * settings.unavailable_timeout_s)
