"""What becomes of the records of a micro-batch: pure functions from what a run left to a decision.

A record whose root is not ACKED waits for its next attempt, or is dead.  A root is not ACKED if

* it failed at a bolt, or was not acked;
* it crashed, or hung, the process that had it in flight, again and again;
* it shares a row for a sink with such a root: that row is not written.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ackcore._records import Int64s
from ackcore.retry import Policy
from ackcore.spark.base.reasons import ENGINE, FAILED
from ackcore.spark.base.schemas import (
    ATTEMPT,
    DUE_MS,
    FIRST_MS,
    MESSAGE_ID,
    REASON,
    REPLAYED,
    TRACKING,
    SinkFile,
)
from ackcore.spark.base.traces import RecordTrace
from ackcore.spark.checkpoint.decisions import ROOT_IDS, BatchDecision, Plan, Retries
from ackcore.spark.checkpoint.segments import untried_in
from ackcore.spark.protocol.progress import Account
from ackcore.spark.tasks.row_files import (
    PLACE,
    ROOT_ID,
    ROOTS,
    RowFile,
    has_several_roots,
    read_rows,
)
from ackcore.topology.settings import Settings
from ackcore.topology.tuples import UNCOUNTED, Reason

#: What the payload of a failed record has beside the source's columns.
_OF_PAYLOAD = frozenset({ROOT_ID, PLACE, MESSAGE_ID, ATTEMPT})


class Disagreement(Exception):
    """What a run left does not add up: it is run again, and no attempt is counted."""


@dataclass(frozen=True)
class BatchOutcome:
    """A decision, and what follows from it that is not on record by itself.

    ``changes`` is by how much each spout's account changes, with what waits in the end; ``failed``
    how many executions failed, and ``uncounted`` how many of them were no attempt; ``first_ms``
    when each retried record that is ACKED now was first seen; ``breaker_trips`` how often a breaker
    opened in the run; ``traces`` the way of records of which that is told.
    """

    decision: BatchDecision
    changes: Mapping[str, Account]
    failed: int
    uncounted: int
    first_ms: Int64s
    breaker_trips: int = 0
    traces: tuple[RecordTrace, ...] = ()


def with_rejection_reasons(failed: pa.Table, reasons: Mapping[int, Reason]) -> pa.Table:
    """Return the failures, those of roots that were not run with the reasons for that."""
    if not reasons:
        return failed
    texts = [
        reasons[root].encode() if root in reasons else text
        for root, text in zip(
            failed["root_id"].to_pylist(), failed["reason"].to_pylist(), strict=True
        )
    ]
    return failed.set_column(2, FAILED.field(2), pa.array(texts, pa.string()))


def propagate_failures(
    failed: pa.Table, files: Iterable[SinkFile], directory: str, spouts: Sequence[str]
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
    """
    if not len(failed):
        return failed
    groups = [
        _shared(RowFile(os.path.join(directory, file.path), file.rows))
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

    start: Int64s = failed["root_id"].to_numpy()
    entailed = np.setdiff1d(spread(np.unique(start)), start)
    if not len(entailed):
        return failed
    reason = Reason(
        ENGINE,
        "PropagatedFailure",
        "a row for a sink hangs from this record and from one that failed",
    )
    # An attempt only if that of one of those that it shares rows with was.
    counted = pc.invert(pc.starts_with(failed["reason"], UNCOUNTED)).to_numpy()
    counts = np.isin(entailed, spread(np.unique(start[counted])))
    texts = [reason._replace(counts=each).encode() for each in counts.tolist()]
    owner = spouts[0] if len(spouts) == 1 else None
    added = pa.table(
        [
            pa.array(entailed),
            pa.array([owner] * len(entailed), pa.string()),
            pa.array(texts, pa.string()),
        ],
        schema=FAILED,
    )
    return pa.concat_tables([failed.cast(FAILED), added])


def _shared(file: RowFile) -> tuple[Int64s, Int64s]:
    """How many roots each row with several has, and these roots one after the other."""
    sizes, roots = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for batch in read_rows(file):
        column = batch.column(ROOTS)
        sizes.append(pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64))
        roots.append(column.flatten().to_numpy())
    return np.concatenate(sizes), np.concatenate(roots)


def check_payloads(failed: pa.Table, payloads: Mapping[str, pa.Table]) -> None:
    """Raise `Disagreement` unless the payload of each failed root was found, once."""
    found = [table[ROOT_ID].to_numpy() for table in payloads.values()]
    wanted = np.unique(failed["root_id"].to_numpy())
    got = np.sort(np.concatenate([np.empty(0, np.int64), *found]))
    if not np.array_equal(wanted, got):
        raise Disagreement(
            f"{len(wanted)} records failed, and reading the sources again found "
            f"{len(np.intersect1d(wanted, got))} of them in {len(got)} rows: they did not give "
            "the same rows a second time"
        )


def decide(
    plan: Plan,
    retries: Retries,
    records: Mapping[str, int],
    failed: pa.Table,
    payloads: Mapping[str, pa.Table],
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
    payloads : mapping from str to pyarrow.Table
        Their records by spout: the source's columns, `ROOT_ID`, `PLACE`, message id and
        attempt.
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
    policy = Policy(settings.max_attempts, settings.backoff_ms, settings.max_backoff_ms)
    reasons = dict(zip(failed["root_id"].to_pylist(), failed["reason"].to_pylist(), strict=True))
    waiting, dead, changes = retries.rest, {}, {}
    failures = uncounted = 0
    first_ms = [np.empty(0, np.int64)]
    for spout in spouts:
        tried = retries.due.get(spout)
        lost = payloads.get(spout)
        runs_again = len(tried) if tried is not None else 0
        firsts = resolved = 0
        if tried is not None:
            resolved = pc.sum(tried[REPLAYED]).as_py() or 0
            # What a request put back starts again from attempt 0.
            firsts = untried_in(tried)
            first_ms.append(_first_of_acked(tried, lost))
        parked = lost_here = 0
        if lost is not None and len(lost):
            lost_here = len(lost)
            rows = _tracked(plan, tried, lost, [reasons[root] for root in _roots(lost)])
            resolved -= pc.sum(rows[REPLAYED]).as_py()
            rows, ends, free = _judge(policy, settings, plan.now_ms, ended_ms, rows)
            uncounted += free
            waits, dies = rows.filter(pa.array(~ends)), rows.filter(pa.array(ends))
            # A replay that is larger than a micro-batch takes is no reason to give others up.
            room = settings.max_waiting - (waiting.rows() - waiting.untried)
            if len(waits) > room:
                kept = max(room, 0)
                dies = pa.concat_tables([dies, _refused(waits.slice(kept), settings.max_waiting)])
                waits = waits.slice(0, kept)
            waiting = waiting.plus(spout, waits)
            if len(dies):
                dead[spout] = dies
                parked = len(dies)
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
    nonacked = np.unique(failed["root_id"].to_numpy())
    decision = BatchDecision(
        number=plan.number,
        waiting=waiting,
        dead=dead,
        nonacked=pa.table([pa.array(nonacked, pa.int64())], schema=ROOT_IDS),
        files=tuple(files),
    )
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
    reasons = dict(zip(failed["root_id"].to_pylist(), failed["reason"].to_pylist(), strict=True))
    dead, changes = {}, {}
    for spout in spouts:
        lost = payloads.get(spout)
        if lost is None or not len(lost):
            continue
        rows = _tracked(plan, retries.due.get(spout), lost, [reasons[r] for r in _roots(lost)])
        dead[spout] = _with(rows, ATTEMPT, pc.add(rows[ATTEMPT], pa.scalar(1, pa.int32())))
        changes[spout] = Account(
            acked=-len(rows), dead=len(rows), resolved=-pc.sum(rows[REPLAYED]).as_py()
        )
    return dead, changes


def _roots(table: pa.Table) -> list[int]:
    roots: list[int] = table[ROOT_ID].to_pylist()
    return roots


def _first_of_acked(tried: pa.Table, lost: pa.Table | None) -> Int64s:
    """When those of the retried records that did not fail again were first seen."""
    values: Int64s = tried[FIRST_MS].to_numpy()
    # By place, not by message id: a duplicate, or a record that was replayed twice, has the same.
    return values if lost is None else np.delete(values, lost[PLACE].drop_null().to_numpy())


def _tracked(plan: Plan, tried: pa.Table | None, lost: pa.Table, reasons: list[str]) -> pa.Table:
    """Failed records in the columns of a waiting table, under the attempt that failed."""
    n = len(lost)
    first, replayed = pa.array(np.full(n, plan.now_ms)), pa.repeat(False, n)
    if tried is not None:
        place = lost[PLACE].combine_chunks()
        first = pc.coalesce(tried[FIRST_MS].combine_chunks().take(place), first)
        replayed = pc.coalesce(tried[REPLAYED].combine_chunks().take(place), replayed)
    tracking = [
        lost[MESSAGE_ID],
        lost[ATTEMPT],
        pa.array(np.zeros(n, np.int64)),
        first,
        pa.array(np.full(n, plan.now_ms)),
        pa.array(reasons, pa.string()),
        replayed,
    ]
    source = [field for field in lost.schema if field.name not in _OF_PAYLOAD]
    return pa.table(
        [*tracking, *(lost[field.name] for field in source)],
        schema=pa.schema([*TRACKING, *source]),
    )


def _judge(
    policy: Policy, settings: Settings, now_ms: int, ended_ms: int, rows: pa.Table
) -> tuple[pa.Table, np.ndarray[tuple[int], np.dtype[np.bool_]], int]:
    """Give failed records their next attempt and when it is due; tell which are dead instead.

    And how many failures were no attempt.
    """
    texts = rows[REASON].combine_chunks().dictionary_encode()  # many fail alike
    reasons = [Reason.decode(text) for text in texts.dictionary.to_pylist()]
    of = texts.indices.to_numpy()
    final = np.array([reason.final for reason in reasons], np.bool_)[of]
    after_ms = np.array([reason.after_ms for reason in reasons], np.int64)[of]
    first_ms: Int64s = rows[FIRST_MS].to_numpy()
    # Not for ever: what never can be done would never be told.
    late = now_ms - first_ms >= 1000 * settings.unavailable_timeout_s
    counts = np.array([reason.counts for reason in reasons], np.bool_)[of] | late
    decided = policy.decide_many(
        rows[MESSAGE_ID].to_pylist(),
        rows[ATTEMPT].to_numpy(),
        now_ms,
        final,
        counts=counts,
        not_before_ms=np.where(after_ms > 0, max(ended_ms, now_ms) + after_ms, 0),
        first_ms=first_ms,
    )
    rows = _with(rows, ATTEMPT, pa.array(decided.attempts))
    rows = _with(rows, DUE_MS, pa.array(decided.due_ms))
    # The wait is on record as the time; whether it counted, as the reason.
    kept = [
        [reason._replace(after_ms=0, counts=each).encode() for reason in reasons]
        for each in (False, True)
    ]
    said = [kept[each][at] for each, at in zip(counts.tolist(), of.tolist(), strict=True)]
    rows = _with(rows, REASON, pa.array(said, pa.string()))
    return rows, decided.dead, int((~counts & ~decided.dead).sum())


def _refused(rows: pa.Table, most: int) -> pa.Table:
    """Records for which the waiting store has no room, as dead ones."""
    reasons = []
    for text in rows[REASON].to_pylist():
        was = Reason.decode(text)
        message = f"{most} records wait already (max_waiting); it failed with {was.type}: "
        reasons.append(
            Reason(was.component, "WaitingFull", message + was.message, final=True).encode()
        )
    rows = _with(rows, DUE_MS, pa.array(np.zeros(len(rows), np.int64)))
    return _with(rows, REASON, pa.array(reasons, pa.string()))


def _with(rows: pa.Table, name: str, column: pa.Array) -> pa.Table:
    place = TRACKING.get_field_index(name)
    return rows.set_column(place, TRACKING.field(place), column)
