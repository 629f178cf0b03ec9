"""Late records: those with a row whose window had closed before the record was first read.

A late record fails for good after the run, like a record that a bolt rejects: it is a dead letter,
and no row of it is in a sink or a table.  So is a record with a row without a usable time.  A copy
of a waiting record (``dedup``) counts as first read with it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ackcore._error_hints import counted
from ackcore._records import Bools, Int64s
from ackcore.spark.base.reasons import FAILED, failures
from ackcore.spark.base.root_ids import distinct
from ackcore.spark.base.schemas import FIRST_MS, REPLAYED, SinkFile
from ackcore.spark.checkpoint.table_records import TableState
from ackcore.spark.engine.setup import Backlog
from ackcore.spark.sinks.sink_batch import files_of, read_with_roots
from ackcore.spark.tasks.record_ids import RETRIES, positions_of
from ackcore.tables.time_windows import Window
from ackcore.tables.watermarks import EVER, NEVER, UNSURE, WindowWatermarks
from ackcore.topology.dedup import AT_MS
from ackcore.topology.parts import Parts, TableSpec
from ackcore.topology.tuples import Reason

_log = logging.getLogger("ackcore")


@dataclass(frozen=True)
class ReadRecords:
    """The records that a run has read; finds the spout and the time of a root id."""

    keys: Mapping[str, int]  # the key of the root ids of each tracked spout
    read: Mapping[int, Mapping[str, int]]  # by partition and spout, the number of new records
    due: Mapping[str, pa.Table]  # by spout, the retried records
    copies: tuple[Int64s, Int64s]  # the copies of due records, as `first_copies` returns them
    backlogs: Mapping[str, Backlog]  # by spout, the parts with rows for later micro-batches

    def owners(self, roots: Int64s) -> Int64s:
        """Return the index in ``keys`` of each root's spout; -1 if none or several may have it.

        With a single spout it is 0 for any root.
        """
        if len(self.keys) == 1:
            return np.zeros(len(roots), np.int64)
        found = np.full(len(roots), -1)
        matches = np.zeros(len(roots), np.int64)
        for number, spout in enumerate(self.keys):
            partitions, places = positions_of(self.keys[spout], roots)
            sizes = self._sizes[spout]
            here = places < sizes[np.minimum(partitions, len(sizes) - 1)]
            found[here] = number
            matches += here
        # The root of one spout is a position of another one in 1 of 10^9 cases.
        found[matches != 1] = -1
        return found

    @cached_property
    def _sizes(self) -> dict[str, Int64s]:
        """By spout, the number of records of each partition; the last one has the due records."""
        found = {}
        for spout in self.keys:
            sizes = np.zeros(RETRIES + 1, np.int64)
            for partition, rows in self.read.items():
                sizes[partition] = rows.get(spout, 0)
            sizes[RETRIES] = len(self.due.get(spout, ()))
            found[spout] = sizes
        return found

    def bounds(self, roots: Int64s, watermarks: WindowWatermarks) -> Int64s:
        """Return, for each root, the event time up to which windows were closed to its record.

        It is in milliseconds since 1970. A row is late if its window ends then or earlier.
        """
        found = np.full(len(roots), max(watermarks.reached, watermarks.closed))
        for tried, first_ms in self._retried(roots, FIRST_MS):
            found[tried] = _bounds(watermarks, first_ms)
        copies, first_ms = self.copies
        if len(copies):
            places = np.minimum(np.searchsorted(copies, roots), len(copies) - 1)
            known = np.flatnonzero(copies[places] == roots)
            earlier = _bounds(watermarks, first_ms[places[known]])
            found[known] = np.minimum(found[known], earlier)
        return found

    def replayed(self, roots: Int64s) -> Bools:
        """Return a mask of the roots of records that were sent again from the dead letters."""
        found = np.zeros(len(roots), np.bool_)
        for tried, times in self._retried(roots, REPLAYED):
            found[tried] = times > 0
        return found

    def newest_of_parts(self, spout: str, roots: Int64s, ms: Int64s) -> Int64s:
        """Return the largest event time of the new records of each part of a spout's backlog.

        It is `NEVER` if no record is of the part, and `UNSURE` if it is unknown whether one is.

        ``roots``, ``ms``: the root ids of records of the spout, and their event times in
        milliseconds.
        """
        backlog = self.backlogs[spout]
        found = np.full(len(backlog.parts), NEVER)
        read = sorted((at, rows[spout]) for at, rows in self.read.items() if rows.get(spout))
        if len(read) != len(backlog.tasks):  # a task has no record, and it is not known which one
            return found + UNSURE - NEVER if len(roots) else found
        partitions, places = positions_of(self.keys[spout], roots)
        for (partition, rows), ranges in zip(read, backlog.tasks, strict=True):
            here = np.flatnonzero((partitions == partition) & (places < rows))
            parts, sizes = np.array(ranges, np.int64).T
            # A range can have fewer rows than offsets.  So the rows before a record give its first
            # possible range, and those after it the last one.
            first = np.searchsorted(sizes.cumsum(), places[here], "right")
            after = rows - 1 - places[here]
            last = len(sizes) - 1 - np.searchsorted(sizes[::-1].cumsum(), after, "right")
            if (first < last).any():
                np.maximum.at(found, parts[parts >= 0], UNSURE)
            known = (first == last) & (parts[first] >= 0)
            np.maximum.at(found, parts[first[known]], ms[here[known]])
        return found

    def _retried(self, roots: Int64s, column: str) -> Iterator[tuple[Int64s, Int64s]]:
        """Yield the indices in ``roots`` of retried records, and their values in a column."""
        for spout, records in self.due.items():
            partitions, places = positions_of(self.keys[spout], roots)
            tried = np.flatnonzero((partitions == RETRIES) & (places < len(records)))
            if len(tried):
                yield tried, records[column].to_numpy()[places[tried]]


@dataclass(frozen=True)
class WindowedRows:
    """The rows of a run that are folded into tables with event times.

    These are tables with windows, and the keys of spouts whose ``dedup`` counts event times.
    """

    topology: Parts
    tables: Mapping[str, TableState]  # the tables after the micro-batch before
    records: ReadRecords  # the records of the run
    files: Sequence[SinkFile]  # the files of the run
    work: str  # the directory of the files
    now_ms: int  # the time of the plan

    def with_late(self, failed: pa.Table, nonacked: Int64s) -> pa.Table:
        """Return the failures, with the late records and those without a usable time added.

        Each has one row, with the reason of the first table in question. Logs the number of late or
        timeless rows that belong to no record, which are lost.

        ``failed``: the failures, of the schema `FAILED`. ``nonacked``: all failed roots, sorted.
        """
        found, spouts = [failed.cast(FAILED)], list(self.records.keys)
        for table, window, watermarks in self._windowed():
            limit = max(watermarks.reached, watermarks.closed)
            late, timeless, lost = [_EMPTY], [_EMPTY], 0
            for us, usable, roots in self._rows(table, nonacked):
                ends = window.late_from_ms(us)
                places = np.flatnonzero(usable & (ends <= limit))
                if len(places):
                    some, rows = _roots_at(roots, places)
                    # A row of several records is late if it is late for each of them.
                    bounds = np.full(len(places), EVER)
                    np.minimum.at(bounds, rows, self.records.bounds(some, watermarks))
                    rootless = np.bincount(rows, minlength=len(places)) == 0
                    bounds[rootless] = watermarks.closed
                    is_late = ends[places] <= bounds
                    late.append(some[is_late[rows]])
                    lost += int((is_late & rootless).sum())
                some, rows = _roots_at(roots, np.flatnonzero(~usable))
                timeless.append(some)
                lost += int((~usable).sum()) - len(distinct(rows))
            if lost:
                _log.warning(
                    "table %r leaves out %s without a record of a tracked spout, because of a late "
                    "or unusable time. Such rows are lost: anchor what bolts emit, and track the "
                    "spout, so that they are dead letters",
                    table.name,
                    counted(lost, "row"),
                )
            late_roots = np.concatenate(late)
            again = self.records.replayed(late_roots)
            for kind, text, roots in (
                ("Late", _late_text(table, window, limit, False), late_roots[~again]),
                ("Late", _late_text(table, window, limit, True), late_roots[again]),
                ("NoTime", _timeless_text(table, window), np.concatenate(timeless)),
            ):
                if len(roots):
                    reason = Reason(table.name, kind, text, True).encode()
                    roots = distinct(roots)
                    found.append(failures(roots, spouts, pa.repeat(reason, len(roots))))
        rows = pa.concat_tables(found).unify_dictionaries()
        _, first = np.unique(rows["root_id"].to_numpy(), return_index=True)
        return rows if len(first) == len(rows) else rows.take(pa.array(np.sort(first)))

    def times(
        self, nonacked: Int64s
    ) -> tuple[dict[str, dict[str, int]], dict[str, dict[str, dict[str, int]]]]:
        """Return the largest event times of the ACKED records, in milliseconds.

        The first value has them by table and spout (`BatchDecision.times`), the second one by
        table, spout and part of its backlog (`BatchDecision.behind`).

        ``nonacked``: the sorted roots of all failed records.
        """
        spouts = list(self.records.keys)
        found: dict[str, dict[str, int]] = {}
        behind: dict[str, dict[str, dict[str, int]]] = {}
        for name, table in self.topology.tables.items():
            if table.shape.window is None and not self._has_backlog(name):
                continue
            largest, future = np.full((2, len(spouts) + 1), NEVER)
            reaching = self.topology.spouts_of(table.component)
            backlogs = {s: one for s, one in self.records.backlogs.items() if s in reaching}
            parts = {s: np.where(one.waits, UNSURE, NEVER) for s, one in backlogs.items()}
            for us, usable, roots in self._rows(table, nonacked):
                some, rows = _roots_at(roots, np.flatnonzero(usable))
                ms = us[usable][rows] // 1_000
                owners = self.records.owners(some)
                # The last entry is for roots of no known spout.
                wrong = ms >= self.now_ms
                np.maximum.at(future, owners[wrong], ms[wrong])
                ms[wrong] = UNSURE
                np.maximum.at(largest, owners, ms)
                for spout, newest in parts.items():
                    own = owners == spouts.index(spout)
                    of_batch = self.records.newest_of_parts(spout, some[own], ms[own])
                    np.maximum(newest, of_batch, out=newest)
            if table.shape.window is not None:
                # A time in the future counts only without another: it must not make records late.
                times = np.where(largest > UNSURE, largest, future)
                known = zip(spouts, times.tolist(), strict=False)
                found[name] = {spout: time for spout, time in known if time > NEVER}
            if parts:
                behind[name] = {
                    spout: dict(zip(backlogs[spout].parts, newest.tolist(), strict=True))
                    for spout, newest in parts.items()
                }
        return found, behind

    def _windowed(self) -> Iterator[tuple[TableSpec, Window, WindowWatermarks]]:
        for name, table in self.topology.tables.items():
            if table.shape.window is not None:
                state = self.tables.get(name)
                watermarks = WindowWatermarks.of(None if state is None else state.watermarks)
                yield table, table.shape.window, watermarks

    def _has_backlog(self, table: str) -> bool:
        """Return whether a table has keys of ``dedup`` by event time, of a spout with a backlog."""
        spout = self.topology.source_of(table)
        if spout is None or spout.dedup is None or spout.dedup.event_time is None:
            return False
        return spout.name in self.records.backlogs

    def _rows(self, table: TableSpec, nonacked: Int64s) -> Iterator[tuple[Int64s, Bools, pa.Array]]:
        """Yield the times of a table's rows, whether each is usable, and each row's root or roots.

        ``nonacked``: the sorted roots of the records whose rows are left out.
        """
        window = table.shape.window
        for file in files_of(self.files, self.work, table.component, table.stream):
            for batch, _ in read_with_roots(file, nonacked):
                if window is not None:
                    us, usable = window.times(batch.column(window.time))
                else:
                    us = batch.column(AT_MS).to_numpy() * 1_000
                    usable = np.ones(len(us), np.bool_)
                yield us, usable, batch.column(len(batch.schema) - 1)


_EMPTY: Int64s = np.empty(0, np.int64)


def _bounds(watermarks: WindowWatermarks, first_ms: Int64s) -> Int64s:
    """Return the time, in milliseconds, up to which windows had closed when each record was read.

    ``first_ms``: when the records were first read.
    """
    times, of = np.unique(first_ms, return_inverse=True)
    return np.array([watermarks.bound(ms) for ms in times.tolist()], np.int64)[of]


def _roots_at(roots: pa.Array, places: Int64s) -> tuple[Int64s, Int64s]:
    """Return the roots of the rows at ``places``, and for each its row's index in ``places``."""
    if len(places) < len(roots):
        roots = roots.take(pa.array(places))
    if pa.types.is_list(roots.type):
        return pc.list_flatten(roots).to_numpy(), pc.list_parent_indices(roots).to_numpy()
    valid = np.flatnonzero(roots.is_valid().to_numpy(zero_copy_only=False))
    return roots.drop_null().to_numpy(), valid


# Logs and lists cut long messages, so these are short, and end with the way out.


def _late_text(table: TableSpec, window: Window, limit: int, replayed: bool) -> str:
    last = f"{np.datetime64(limit, 'ms')} UTC".replace(".000 ", " ")
    until = "all have closed" if limit >= EVER else f"those until {last} have closed"
    way_out = f"increase late_s, now {window.late_ms / 1_000:.15g}"
    if replayed:
        way_out = (
            "a replay does not open it: correct the row that its sink has, or emit no row to this "
            "table for the record"
        )
    return f"its {window.time!r} is in a closed window of table {table.name!r} ({until}); {way_out}"


def _timeless_text(table: TableSpec, window: Window) -> str:
    return (
        f"its {window.time!r} is null, or one of its windows in table {table.name!r} is not in the "
        "years 1 to 9999; emit a time, or leave the row out"
    )
