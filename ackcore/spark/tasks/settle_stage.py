"""The settle stage: finds the outcome of each root from the ledger rows of all tasks."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from ackcore import FAIL
from ackcore._records import Int32s, Int64s, Status
from ackcore.spark.base.arrow_batches import Batches
from ackcore.spark.base.checksummed import batches_of, write_batches
from ackcore.spark.base.reasons import first_reasons, look_up, with_several
from ackcore.spark.settle import wire
from ackcore.spark.settle.packing import fold, new_ledger
from ackcore.spark.stores.run_files import making_in
from ackcore.spark.tasks.exchange import Inbox
from ackcore.spark.tasks.exchange_format import SETTLE, origin_of
from ackcore.spark.tasks.failed_rows import INLINE_BYTES
from ackcore.spark.tasks.spec import TaskSpec
from ackcore.spark.tasks.task import (
    COUNTED,
    DISPUTED,
    NOT_ACKED,
    NOT_ACKED_FILE,
    NOT_ACKED_SCHEMA,
    STATUS_NAMES,
    TASK_REPORT,
    TRAILER_RECEIPTS,
    UNSETTLED,
    attempt_at,
    result_batch,
    to_stream,
)


@dataclass(frozen=True)
class SettleStage:
    """The mapInArrow function that settles the ledger rows of roots and cohorts.

    A partition gets all rows of its roots and cohorts. It returns their outcome to the driver, with
    the reports and receipts of tasks.
    """

    spec: TaskSpec

    def __call__(self, batches: Batches) -> Batches:
        """Settle one partition, for mapInArrow; RuntimeError if rows were lost or came twice."""
        inbox = Inbox(SETTLE)
        for batch in batches:
            inbox.read(batch)
        inbox.check()
        rows = [
            (TASK_REPORT, report)
            for reports in inbox.task_reports.values()
            for report in sorted(reports)
        ]
        rows += [(TRAILER_RECEIPTS, blob) for blob in inbox.receipts_of_others]
        rows += inbox.results
        receiver = origin_of(SETTLE, attempt_at(SETTLE).partition)
        rows.append((TRAILER_RECEIPTS, inbox.receipts(receiver)))
        yield result_batch(rows + self._settle(inbox.ledger))

    def _settle(self, blobs: list[pa.Buffer]) -> list[tuple[int, bytes]]:
        events, cohorts, reasons = [], [], []
        for blob in blobs:
            part = wire.unpack_blob(np.frombuffer(blob, np.uint8))
            if isinstance(part, wire.Events):
                events.append(part)
            elif isinstance(part, wire.CohortEvents):
                cohorts.append(part)
            else:
                reasons.append(part)
        expected = sum(int((part.tasks >= 0).sum()) for part in events)
        # Another seed: rows in the order of a table with the same seed would cluster.
        ledger = new_ledger(self.spec.key ^ 1, False, expected)
        for part in events:
            fold(ledger, part)
        by_cohort = settle_cohorts(cohorts)
        del events, cohorts, blobs
        settled = ledger.settle()
        still_open = ledger.entries()
        acked = settled.statuses == Status.ACKED
        numbers, counts = np.unique(settled.tasks[acked], return_counts=True)
        counted = dict(zip(numbers.tolist(), counts.tolist(), strict=True)) | by_cohort.acked
        bad = np.flatnonzero(~acked)
        roots = np.concatenate([settled.root_ids[bad], still_open.root_ids, by_cohort.roots])
        tasks = np.concatenate([settled.tasks[bad], still_open.tasks, by_cohort.tasks])
        names = [Status(status).name for status in settled.statuses[bad].tolist()]
        names += [Status.OPEN.name] * len(still_open)
        names += [Status.FAILED.name] * len(by_cohort.roots)
        found = [(COUNTED, json.dumps(counted).encode())]
        if by_cohort.unsettled:
            found.append((UNSETTLED, str(by_cohort.unsettled).encode()))
        if len(roots):
            # In an outage many reasons are equal: each text goes to the driver once.
            firsts = first_reasons(reasons)
            disputed = with_several(reasons, firsts)
            if len(disputed):
                found.append((DISPUTED, disputed.tobytes()))
            texts = look_up(firsts, roots)[0].dictionary_encode()
            columns = [pa.array(roots), pa.array(tasks), pa.array(names, STATUS_NAMES), texts]
            table = pa.Table.from_arrays(columns, schema=NOT_ACKED_SCHEMA)
            if table.nbytes <= INLINE_BYTES:
                found.append((NOT_ACKED, to_stream(table)))
            else:
                found.append((NOT_ACKED_FILE, self._written(table)))
        return found

    def _written(self, table: pa.Table) -> bytes:
        """Write records that are not ACKED to a file of the run, in root order; return its name."""
        table = table.take(pa.array(np.argsort(table["root_id"].to_numpy()))).combine_chunks()
        with making_in(os.path.join(self.spec.work, "failed")) as place:
            name = f"not-acked-{attempt_at(SETTLE).partition}"
            batches = batches_of(table)
            file = write_batches(place, name, table.schema, batches, large=True, synced=False)
        return file.encode()


class SettledCohorts(NamedTuple):
    """The outcome of one shard's cohorts, which are sets of roots that are settled together.

    ``acked`` is the number of ACKED roots by spout number. ``roots`` are the failed ones,
    ascending, and ``tasks`` the numbers of their spouts. ``unsettled`` is the number of cohorts
    whose XOR is not zero, or that were not sent exactly once: none of their roots is decided.
    """

    acked: dict[int, int]
    roots: Int64s
    tasks: Int32s
    unsettled: int


def settle_cohorts(parts: Sequence[wire.CohortEvents]) -> SettledCohorts:
    """Return the outcome of the cohorts of one shard, from all of their ledger rows."""
    if not parts:
        return SettledCohorts({}, np.empty(0, np.int64), np.empty(0, np.int32), 0)
    cohorts, vals, roots, tasks = (np.concatenate(column) for column in zip(*parts, strict=True))
    ids, of = np.unique(cohorts, return_inverse=True)
    totals = np.zeros(len(ids), np.int64)
    np.bitwise_xor.at(totals, of, vals)
    inits = np.flatnonzero(tasks >= 0)
    times = np.bincount(of[inits], minlength=len(ids))
    spouts, sizes = np.full(len(ids), -1, np.int32), np.zeros(len(ids), np.int64)
    spouts[of[inits]], sizes[of[inits]] = tasks[inits], roots[inits]
    whole = (totals == 0) & (times == 1)
    named = np.flatnonzero((tasks == FAIL) & whole[of])
    failed, firsts = np.unique(roots[named], return_index=True)
    owners = of[named[firsts]]
    left = sizes - np.bincount(owners, minlength=len(ids))
    acked = Counter[int]()
    for spout, n in zip(spouts[whole].tolist(), left[whole].tolist(), strict=True):
        acked[spout] += n
    return SettledCohorts(dict(acked), failed, spouts[owners], int((~whole).sum()))
