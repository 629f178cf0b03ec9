"""The decide step: pure functions from the results of a run to a decision.

A record whose root is not ACKED waits for its next attempt, or is dead.  A root is not ACKED if,
for example,

* it failed at a bolt, or was not acked;
* it repeatedly crashed or hung the process in which it was in flight;
* it shares a row for a sink with such a root: that row is not written.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ackcore._error_hints import counted
from ackcore._records import Int64s
from ackcore.retry import Policy
from ackcore.spark.base.reasons import ENGINE, FAILED, Reasons, failures, one_array, without_room
from ackcore.spark.base.root_ids import distinct, ids_in
from ackcore.spark.base.schemas import FIRST_MS, REPLAYED, FailedFile, SinkFile
from ackcore.spark.base.traces import RecordTrace
from ackcore.spark.checkpoint.dead_records import Dead, DeadPart
from ackcore.spark.checkpoint.decisions import BatchDecision, Plan, Retries, nonacked_of
from ackcore.spark.checkpoint.segments import untried_in
from ackcore.spark.engine.check import Disagreement
from ackcore.spark.engine.progress import Account
from ackcore.spark.tasks.failed_rows import INLINE_BYTES, FailedRows, Rules
from ackcore.spark.tasks.row_files import ROOTS, RowFile, has_several_roots, read_rows
from ackcore.topology.settings import Settings
from ackcore.topology.tuples import Reason


@dataclass(frozen=True)
class BatchOutcome:
    """A decision, and results of the run that the decision does not store.

    ``changes`` has, by spout, the numbers to add to its account, and ``waiting``, which replaces
    the account's; ``failed`` is the number of failed executions, ``uncounted`` the number of those
    that do not count as attempts; ``first_ms`` the times in ms since 1970 at which the retried
    records that are ACKED now were first seen; ``figures`` those of `RunResult`; ``traces`` the
    paths of the traced records.
    """

    decision: BatchDecision
    changes: Mapping[str, Account]
    failed: int
    uncounted: int
    first_ms: Int64s
    figures: Mapping[str, Any] = field(default_factory=dict)
    traces: tuple[RecordTrace, ...] = ()


def with_rejection_reasons(failed: pa.Table, reasons: Mapping[int, Reason]) -> pa.Table:
    """Return the failures; those of rejected roots, which were not run, get their ``reasons``."""
    if not reasons:
        return failed
    root_ids = failed["root_id"].to_numpy()
    roots = np.array(sorted(reasons), np.int64)
    here = np.isin(root_ids, roots)
    texts = pa.array([reasons[root].encode() for root in roots.tolist()], pa.string())
    said = texts.take(pa.array(np.searchsorted(roots, root_ids[here])))
    column = pc.replace_with_mask(
        one_array(failed["reason"].cast(pa.string())), pa.array(here), said
    )
    return failed.set_column(2, FAILED.field(2), column.dictionary_encode())


def propagate_failures(
    failed: pa.Table,
    files: Iterable[SinkFile],
    directory: str,
    spouts: Sequence[str],
    judged: FailedRows,
) -> pa.Table:
    """Return the failures, and those of all roots that share a sink row with a failed root.

    ``files`` are the files that the run wrote for the sinks into ``directory``; ``spouts`` all
    tracked spouts.  Records that the run ``judged`` need not be among ``failed``.
    """
    if not len(failed) and not judged.found:
        return failed
    groups = [
        _shared(RowFile(os.path.join(directory, file.path), file.rows, file.nbytes))
        for file in files
        if has_several_roots(file.path)
    ]
    if not groups:
        return failed
    sizes, roots = (np.concatenate(column) for column in zip(*groups, strict=True))
    row = np.repeat(np.arange(len(sizes)), sizes)

    def spread(bad: Int64s) -> Int64s:
        while True:
            touched = np.bincount(row, np.isin(roots, bad), len(sizes)) > 0
            more = np.union1d(bad, roots[touched[row]])
            if len(more) == len(bad):
                return more
            bad = more

    start = distinct(*failed_roots(failed, judged))
    entailed = np.setdiff1d(spread(start), start, assume_unique=True)
    if not len(entailed):
        return failed
    reason = Reason(
        ENGINE, "PropagatedFailure", "a row for a sink comes from this record and from a failed one"
    )
    # It counts as an attempt only if that of a failed root with a shared row does.
    counted = [failed["root_id"].to_numpy()[Reasons.of_texts(failed["reason"]).counts()]]
    counted += judged.roots(counting=True)
    counts = np.isin(entailed, spread(distinct(*counted)))
    texts = pa.array([reason._replace(counts=each).encode() for each in (False, True)])
    reasons = pa.DictionaryArray.from_arrays(pa.array(counts.astype(np.int32)), texts)
    added = failures(entailed, spouts, reasons)
    return pa.concat_tables([failed.cast(FAILED), added]).unify_dictionaries()


def _shared(file: RowFile) -> tuple[Int64s, Int64s]:
    """Return the number of roots of each row of a file, and all these roots in one array."""
    sizes, roots = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for batch in read_rows(file):
        column = batch.column(ROOTS)
        sizes.append(pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64))
        roots.append(column.flatten().to_numpy())
    return np.concatenate(sizes), np.concatenate(roots)


def failed_roots(failed: pa.Table, rows: FailedRows) -> list[Int64s]:
    """Return arrays of the roots in ``failed`` and in ``rows``; a root in both occurs twice."""
    return [*ids_in(failed["root_id"]), *rows.roots()]


def decide(
    plan: Plan,
    retries: Retries,
    records: Mapping[str, int],
    failed: pa.Table,
    rows: FailedRows,
    files: Iterable[SinkFile],
    settings: Settings,
    spouts: Sequence[str],
) -> BatchOutcome:
    """Decide whether each record of a micro-batch is ACKED, waits or is dead; return the outcome.

    Failed records for which ``max_waiting`` leaves no room are dead. Raises Disagreement if
    ``rows`` does not fit the numbers of failed or executed records.

    ``retries``: those that ran, and those that continue to wait. ``records``: the number of new
    records by spout. ``failed``: roots that are not ACKED, of the schema `FAILED`; those in
    ``rows`` may be missing. ``rows``: all records that are not ACKED, judged. ``files``: the files
    that the run wrote for the sinks. ``spouts``: the tracked spouts.
    """
    waiting, changes = retries.rest, {}
    dead: dict[str, list[DeadPart]] = {}
    failures = 0
    first_ms = [np.empty(0, np.int64)]
    for spout in spouts:
        tried = retries.due.get(spout)
        runs_again = len(tried) if tried is not None else 0
        firsts, resolved = 0, -rows.replayed.get(spout, 0)
        if tried is not None:
            resolved += int(np.count_nonzero(tried[REPLAYED].to_numpy()))
            # Records of a replay request start again from attempt 0.
            firsts = untried_in(tried)
            # By place, not by message id: duplicates and records replayed twice share an id.
            first_ms.append(np.delete(tried[FIRST_MS].to_numpy(), rows.places(spout)))
        lost_here = len(rows.found.get(spout, ()))
        waits, dies = _parts(rows, spout)
        if sum(map(len, [*waits, *dies])) != lost_here:
            raise Disagreement(
                f"{counted(lost_here, 'record')} of spout {spout} failed, but tasks returned the "
                f"rows of {sum(map(len, [*waits, *dies]))}"
            )
        for part in waits:
            # A replay larger than a micro-batch does not make other records dead.
            room = settings.max_waiting - (waiting.rows() - waiting.untried)
            stays, goes = _cut(part, max(room, 0), settings.max_waiting)
            waiting = waiting.plus(spout, stays)
            dies.append(goes)
        parked = sum(map(len, dies))
        if parked:
            dead[spout] = dies
        executed = records.get(spout, 0) + runs_again
        changes[spout] = Account(
            records=records.get(spout, 0),
            # Counted when a request is taken, even if its rows wait for later micro-batches.
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
                f"spout {spout} has only {counted(executed, 'record')} in this micro-batch, but "
                f"tasks report {executed - changes[spout].acked} failed ones"
            )
    decision = BatchDecision(
        number=plan.number,
        waiting=waiting,
        dead=Dead(dead),
        nonacked=nonacked_of(failed_roots(failed, rows)),
        files=tuple(files),
    )
    return BatchOutcome(decision, changes, failures, rows.uncounted, np.concatenate(first_ms))


def _parts(rows: FailedRows, spout: str) -> tuple[list[pa.Table | FailedFile], list[DeadPart]]:
    """Return a spout's waiting records and its dead ones: tables in memory first, then files."""
    waits: list[pa.Table | FailedFile] = [rows.waits[spout]] if spout in rows.waits else []
    dies: list[DeadPart] = [rows.dies[spout]] if spout in rows.dies else []
    waits += [file for file in rows.files if file.spout == spout and not file.dead]
    dead = [file for file in rows.files if file.spout == spout and file.dead]
    # Small files last, side by side: the dead-letter store merges them into one file.
    return waits, [*dies, *sorted(dead, key=lambda file: -(file.nbytes or 0))]


def _cut(
    part: pa.Table | FailedFile, room: int, most: int
) -> tuple[pa.Table | FailedFile, DeadPart]:
    """Return the first ``room`` records, which wait, and the rest, which is dead.

    ``most``: the setting ``max_waiting``, for the reason of the dead ones.
    """
    kept = min(len(part), room)
    if isinstance(part, FailedFile):
        rest = replace(part, rows=len(part) - kept, start=kept, no_room=most)
        return replace(part, rows=kept), rest
    return part.slice(0, kept), without_room(part.slice(kept), most)


def rules_of(plan: Plan, settings: Settings, ended_ms: int) -> Rules:
    """Return the rules by which failed records are judged.

    ``ended_ms``: the end of the run, in ms since 1970; a wait that a reason requests begins then.
    """
    policy = Policy.of_seconds(settings.max_attempts, settings.backoff_s, settings.max_backoff_s)
    timeout_ms = 1000 * settings.unavailable_timeout_s
    return Rules(plan.now_ms, ended_ms, policy, timeout_ms, INLINE_BYTES)
