"""Copies of a record that waits: they run after the record is ACKED or dead.

For spouts with ``dedup``.  A waiting record has the hash of its key (`DEDUP_KEY`), once it has come
to the bolt of ``dedup``.  A due record continues to wait while a record of its key that was seen
earlier waits.  New records with the key of a waiting record wait too: the bolt gets these keys.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ackcore._records import Bools, Int64s, UInt64s
from ackcore.spark.base.reasons import BEHIND
from ackcore.spark.base.schemas import DEDUP_KEY, FIRST_MS, REASON, SinkFile
from ackcore.spark.checkpoint.decisions import Retries
from ackcore.spark.checkpoint.waiting import Fit
from ackcore.spark.engine.key_order import hold
from ackcore.spark.tasks.dedup_executor import key_columns
from ackcore.spark.tasks.row_files import ROOT, RowFile, among, read_rows
from ackcore.tables.key_groups import hashes_of
from ackcore.topology.dedup import SEEN
from ackcore.topology.parts import Spout


def held_copies(
    retries: Retries, spouts: Iterable[str], fit: Fit
) -> tuple[Retries, dict[str, UInt64s]]:
    """Let due records continue to wait while an earlier record of their key waits.

    Returns the retries, divided anew into due and waiting ones; and by spout, the sorted hashes of
    the keys of which a record waits and none is due. ``spouts``: the names of those with ``dedup``.
    """
    due, rest, waiting = dict(retries.due), retries.rest, {}
    for spout in spouts:
        tables = (fit(spout, table) for table in rest.tables(spout))
        rest, waits, due_keys = hold(spout, due, rest, tables, _keyed)
        waiting[spout] = np.sort(np.setdiff1d(waits, due_keys).view(np.uint64))
    return retries._replace(due=due, rest=rest), waiting


def _keyed(table: pa.Table) -> tuple[Int64s, Int64s, Bools]:
    """Return the hash of each record's key, its number among the copies, and whether it has a key.

    Records that were first seen earlier have lower numbers.  Copies of one micro-batch have the
    same time, and the one that ran has the lowest number.
    """
    keys = table[DEDUP_KEY]
    behind = pc.equal(pc.struct_field(table[REASON], "type"), BEHIND.type).to_numpy()
    numbers = 2 * table[FIRST_MS].to_numpy() + behind
    return keys.fill_null(0).to_numpy(), numbers, keys.is_valid().to_numpy()


def with_dedup_keys(
    failed: pa.Table, files: Sequence[SinkFile], directory: str, spouts: Iterable[Spout]
) -> pa.Table:
    """Return the failures with the hash of each one's key, in `DEDUP_KEY`; null if unknown.

    ``failed``: the failures, with the column ``root_id``. ``files``: the files that the run wrote
    into ``directory``, among them those with keys. ``spouts``: the spouts with ``dedup``.
    """
    sought = np.sort(failed["root_id"].to_numpy())
    found = [(np.empty(0, np.int64), np.empty(0, np.int64))]
    for spout in spouts:
        for rows in _seen(spout, files, directory):
            rows = rows.filter(pa.array(among(rows.column(ROOT).to_numpy(), sought)))
            found.append((rows.column(ROOT).to_numpy(), _keys(spout, rows)))
    roots, keys = (pa.array(np.concatenate(each)) for each in zip(*found, strict=True))
    at = pc.index_in(failed["root_id"], value_set=roots)
    return failed.append_column(DEDUP_KEY, keys.take(at.combine_chunks()))


def first_copies(
    due: Mapping[str, pa.Table], files: Sequence[SinkFile], directory: str, spouts: Iterable[Spout]
) -> tuple[Int64s, Int64s]:
    """Find the records of a run that are copies of due records.

    Returns their sorted roots, and for each the time at which the earliest of its due copies was
    first read, in ms since 1970.

    ``due``: the due records by spout. ``files``: the files that the run wrote into ``directory``.
    ``spouts``: the spouts with ``dedup``.
    """
    found = [np.empty((2, 0), np.int64)]
    for spout in spouts:
        if spout.name not in due:
            continue
        copies = due[spout.name].select([DEDUP_KEY, FIRST_MS]).drop_null()
        copies = copies.group_by(DEDUP_KEY).aggregate([(FIRST_MS, "min")])
        times = copies[f"{FIRST_MS}_min"].to_numpy()
        for rows in _seen(spout, files, directory):
            at = pc.index_in(pa.array(_keys(spout, rows)), value_set=copies[DEDUP_KEY])
            some = rows.filter(at.is_valid()).column(ROOT).to_numpy()
            found.append(np.stack([some, times[at.drop_null().to_numpy()]]))
    roots, first_ms = np.concatenate(found, axis=1)
    order = np.argsort(roots)
    return roots[order], first_ms[order]


def _seen(spout: Spout, files: Iterable[SinkFile], directory: str) -> Iterator[pa.RecordBatch]:
    """Yield batches of a run's records that are no duplicates: their key columns and their roots.

    They are read from the run's files.
    """
    for file in files:
        if (file.component, file.stream) == (spout.emitter, SEEN):
            path = os.path.join(directory, file.path)
            yield from read_rows(RowFile(path, file.rows, file.nbytes))


def _keys(spout: Spout, rows: pa.RecordBatch) -> Int64s:
    """Return the hash of the key of each row."""
    assert spout.dedup is not None
    arrays = key_columns([rows.column(name) for name in spout.dedup.columns])
    return hashes_of(arrays, len(rows)).view(np.int64)
