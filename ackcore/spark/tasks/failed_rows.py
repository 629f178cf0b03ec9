"""Judgement of failed records: each waits for its next attempt, or is dead.

The outcome of a record depends only on the record, its reason and `Rules`.  It is the same in a
task that holds the records, in a task that reads them again, and in the driver.  `FailedRows` holds
the judged records, in memory or in files.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ackcore._records import Bools, Int64s
from ackcore.retry import Policy
from ackcore.spark.base.reasons import Reasons
from ackcore.spark.base.root_ids import distinct, found_in, ids_in
from ackcore.spark.base.schemas import (
    ATTEMPT,
    DUE_MS,
    FIRST_MS,
    LAST_MS,
    MESSAGE_ID,
    REASON,
    REPLAYED,
    TRACKING,
    FailedFile,
    without_numbers,
)
from ackcore.spark.stores.run_files import read_run_table
from ackcore.spark.tasks.record_ids import READ_AGAIN, SourceRecords
from ackcore.spark.tasks.row_files import COUNTS, PLACE, ROOT_ID, among

#: The most bytes of failures that a task returns to the driver; it writes more to files.
INLINE_BYTES = 1 << 17


@dataclass(frozen=True)
class Rules:
    """The settings, and times in ms since 1970, that decide if a failed record waits or is dead."""

    now_ms: int  # the time of the plan
    #: The time of the run's end, at which a wait begins that a reason requests.  During the run it
    #: is ``now_ms``; failures that request a wait are then judged later.
    ended_ms: int
    policy: Policy  # the limits of attempts, and the back-off
    #: The age of a record from which each of its failures counts as an attempt.  Without this limit
    #: a record whose failures never count would be retried without end.
    timeout_ms: float
    #: The number of bytes of failed records above which a task writes a file.
    inline_bytes: float = INLINE_BYTES


class Judged(NamedTuple):
    """Failed records that wait or are dead, in the columns of `TRACKING` and of the source.

    ``uncounted``: the number of waiting ones whose failure used no attempt. ``replayed``: the
    number of records in both tables that are replayed dead letters.
    """

    waits: pa.Table
    dies: pa.Table
    uncounted: int
    replayed: int


def judge(rules: Rules, some: SourceRecords, lost: pa.Table, reasons: Reasons) -> Judged:
    """Decide for failed records whether each is dead or waits, and until when.

    ``some``: the records of a task that include the failed ones. ``lost``: the failed records, in
    the columns of `READ_AGAIN` and of the source. ``reasons``: the reason of each failure.
    """

    def kept(name: str, fresh: int) -> Int64s:
        """Return the values of a column of due records; ``fresh`` for new records."""
        if some.due is None:
            return np.full(len(lost), fresh)
        values: Int64s = some.due.column(name).to_numpy()[lost[PLACE].to_numpy() - some.first]
        return values

    first_ms, replayed = kept(FIRST_MS, rules.now_ms), kept(REPLAYED, 0)
    # Without this limit a record that can never succeed would be retried without end or report.
    late = rules.now_ms - first_ms >= rules.timeout_ms
    counts = reasons.counts() | (late & ~reasons.behind())
    after_ms = reasons.after_ms()
    ended_ms = max(rules.ended_ms, rules.now_ms)
    attempts: Int64s = lost[ATTEMPT].to_numpy().astype(np.int64)
    decided = rules.policy.decide_many(
        lost[MESSAGE_ID].to_pylist(),
        attempts,
        rules.now_ms,
        reasons.final(),
        counts=counts,
        not_before_ms=np.where(after_ms > 0, ended_ms + after_ms, 0),
        first_ms=first_ms,
    )
    tracking = {
        MESSAGE_ID: lost[MESSAGE_ID],
        ATTEMPT: decided.attempts,
        # A record behind another of its key waits for that one, without a back-off of its own.
        DUE_MS: np.where(reasons.behind(), rules.now_ms, decided.due_ms),
        FIRST_MS: first_ms,
        LAST_MS: np.full(len(lost), rules.now_ms),
        REASON: reasons.kept(counts),
        REPLAYED: replayed.astype(np.int32),
    }
    source = lost.drop_columns(READ_AGAIN.names)
    rows = pa.table(
        [*map(tracking.__getitem__, TRACKING.names), *source.columns],
        schema=pa.schema([*TRACKING, *source.schema]),
    )
    told = int((~counts & ~decided.dead).sum()), int(np.count_nonzero(replayed))
    if not decided.dead.any():
        return Judged(rows, rows.slice(0, 0), *told)
    if decided.dead.all():
        return Judged(rows.slice(0, 0), without_numbers(rows), *told)
    dead = pa.array(decided.dead)
    return Judged(rows.filter(pc.invert(dead)), without_numbers(rows.filter(dead)), *told)


@dataclass(frozen=True)
class FailedRows:
    """The failed records of a run after it was decided which of them wait and which are dead."""

    files: tuple[FailedFile, ...] = ()  # the files of tasks with many failed records
    #: By spout, a row for each record: its root, its row number among the due records, and whether
    #: its reason counts.  The number is null for new records, and its column is of type null if all
    #: records are new.
    found: Mapping[str, pa.Table] = field(default_factory=dict)
    #: By spout, the number of failed records that were replayed dead letters.
    replayed: Mapping[str, int] = field(default_factory=dict)
    uncounted: int = 0  # the number of waiting records whose failure used no attempt
    #: By spout, the records of tasks with few failed records, in `TRACKING` and the source's
    #: columns.
    waits: Mapping[str, pa.Table] = field(default_factory=dict)
    dies: Mapping[str, pa.Table] = field(default_factory=dict)

    @classmethod
    def of(
        cls, work: str, reports: Iterable[Mapping[str, Any]], tables: Iterable[pa.Table]
    ) -> FailedRows:
        """Combine the reports and the tables of `FailedWriter.finish` of several tasks.

        ``work``: the run's directory. Raises RowFileDamaged if a file with roots is missing, or has
        changed since a task wrote it.
        """
        directory, reports = os.path.join(work, "failed"), list(reports)
        parts: dict[bytes, dict[str, list[pa.Table]]] = defaultdict(lambda: defaultdict(list))
        for table in tables:
            about = table.schema.metadata
            some = parts[about[b"part"]][about[b"spout"].decode()]
            some.append(table.replace_schema_metadata(None))
        for spout, name in (each for report in reports for each in report["found"]):
            parts[b"found"][spout].append(read_run_table(os.path.join(directory, name)))
        found, waits, dies = (
            {spout: _together(some) for spout, some in parts[part].items()}
            for part in (b"found", b"waits", b"dies")
        )
        files = [FailedFile(*one) for report in reports for one in report["files"]]
        return cls(
            tuple(sorted(replace(one, path=os.path.join(directory, one.path)) for one in files)),
            found,
            sum((Counter(report["replayed"]) for report in reports), Counter[str]()),
            sum(report["uncounted"] for report in reports),
            waits,
            dies,
        )

    def roots(self, *, counting: bool = False) -> list[Int64s]:
        """Return arrays of the roots of the records, in any order, without a copy if possible.

        ``counting``: whether to return only those whose reasons count as attempts, at any age.
        """
        tables = list(self.found.values())
        if counting:
            tables = [rows.filter(rows[COUNTS]) for rows in tables]
        return [ids for rows in tables for ids in ids_in(rows[ROOT_ID])]

    def have(self, root_ids: Int64s) -> Bools:
        """Return, for each root, whether its record is among the failed records."""
        ordered = distinct(root_ids)
        return among(root_ids, ordered[found_in(ordered, self.roots())])

    def without(self, failed: pa.Table) -> pa.Table:
        """Return the rows of ``failed`` whose ``root_id`` is none of these failed records."""
        if not len(failed) or not self.found:
            return failed
        return failed.filter(pa.array(~self.have(failed["root_id"].to_numpy())))

    def places(self, spout: str) -> Int64s:
        """Return a spout's failed records that were due, as row numbers among all due records."""
        if spout not in self.found:
            return np.empty(0, np.int64)
        # New records have numbers of type null, which would take memory as int64.
        due = [chunk for chunk in self.found[spout][PLACE].chunks if chunk.null_count < len(chunk)]
        places = pa.chunked_array([chunk.drop_null() for chunk in due], pa.int64())
        found: Int64s = places.to_numpy()
        return found

    def plus(self, more: FailedRows) -> FailedRows:
        """Return these records combined with other failed records of the same run."""
        if not (self.found and more.found):
            return self if self.found else more

        def both(name: str) -> dict[str, pa.Table]:
            ours, theirs = getattr(self, name), getattr(more, name)
            return {
                spout: _together([some[spout] for some in (ours, theirs) if spout in some])
                for spout in [*dict.fromkeys([*ours, *theirs])]
            }

        return FailedRows(
            tuple(sorted(self.files + more.files)),
            both("found"),
            Counter(self.replayed) + Counter(more.replayed),
            self.uncounted + more.uncounted,
            both("waits"),
            both("dies"),
        )


def _together(tables: Sequence[pa.Table]) -> pa.Table:
    return pa.concat_tables(tables, promote_options="permissive")
