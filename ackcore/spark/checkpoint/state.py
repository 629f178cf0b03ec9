"""The checkpoint of a topology: plans, decisions, marks, and the records that wait for a retry.

Its layout, below ``<checkpoint>/ackcore/``, written by one driver at a time::

    head.json                 the records below, replaced as a whole by their owner (`records`);
                              on a file system a directory of its last versions
        meta.json             format, topology, deployment key; written when it is made
        batches/N.plan        the plan of micro-batch N
        batches/N.decision    its results; written after the tables that it names
        batches/N.refused*    rows that its sinks refused; written between decision and mark
        batches/N.tables      the tables after it; written with the changed rows or the mark
        batches/N.done        the mark: all effects of the decision are done
    records/                  records of more than 64 kB, which the head names
    lock                      locked by the driver while it runs; on a file system only
    state/N.*.arrow           records that wait, or are dead; roots that are not ACKED
    state/N.*.parquet         dead letters that tasks wrote, which the store links
    tables/<table>/N.*.arrow  segments of tables (`table_records`)
    work/N.<token>/           files of executors in one run; the decision names the run that counts
    work/N.snapshot/          the snapshot of its new rows, for careful runs
    work/N.journal/           the results of its bolts' calls, shared by all of its runs
    progress.jsonl            results of the last micro-batches, for readers outside the query only

An invariant holds at every moment, also after a crash between any two writes: micro-batch N gets a
plan, then a decision, then its mark, in that order, and N + 1 gets none of them before N has its
mark.  So the names of the records give the state.  A missing record was removed by another program.
That is an error: starting again would lose waiting records or repeat effects.  The records of the
last two micro-batches are kept; files of waiting records and tables, until no record names them.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import pyarrow as pa

from ackcore._error_hints import counted
from ackcore.spark.base.errors import corrupt, raise_all
from ackcore.spark.base.schemas import ORDER, ORDER_BITS
from ackcore.spark.checkpoint import compatibility
from ackcore.spark.checkpoint.dead_records import Dead
from ackcore.spark.checkpoint.decisions import BatchDecision, Plan, Retries
from ackcore.spark.checkpoint.places import CheckpointParts, opened
from ackcore.spark.checkpoint.refusals import Refusals
from ackcore.spark.checkpoint.requests import spout_of_request
from ackcore.spark.checkpoint.schema_changes import fit_columns
from ackcore.spark.checkpoint.table_records import TableRecords
from ackcore.spark.checkpoint.waiting import Waiting
from ackcore.spark.stores.opening import place_of
from ackcore.topology.parts import Parts

_log = logging.getLogger("ackcore")

#: The end of an error that no user can cause.
_FAULT = ". This is a fault of ackcore: report it with the log of the query"


class _History(NamedTuple):
    """The last planned and the last finished micro-batch, and the requests that plans took."""

    last_plan: int | None
    last_done: int | None
    taken: frozenset[str]  # requests to replay that a plan took, until the index lacks them


class State:
    """An open checkpoint that this driver owns exclusively; made by `open`.

    Attributes: ``url``: the checkpoint: an absolute path, or the URL of a place in a bucket.
    ``records``: its records. ``runs``: the directories in which executors write. ``segments``: the
    files of the tables. ``deployment_key``: 63 random bits, drawn when the checkpoint was made.
    ``refusals``: the rows that sinks refused; completed by `close_refusals`. ``tables``: the tables
    after each of the last micro-batches.
    """

    def __init__(
        self, parts: CheckpointParts, meta: dict[str, Any], sources: Mapping[str, pa.Schema]
    ):
        self.url, self._requests, self.records, self._cache, self.runs, self.segments = parts
        self._sources = sources
        self.deployment_key = int(meta["deployment_key"], 16)
        self._meta = meta
        self.refusals = Refusals(self.records, self._cache)
        self.tables = TableRecords(self.records)
        self._decisions: dict[int, BatchDecision] = {}
        #: The `losses` by an accepted change, until it is recorded; None without a change.
        self._accepted: str | None = None
        # Its set is replaced as a whole: the heartbeat's thread reads it.
        self._history = self._read_history()

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        topology: Parts,
        *,
        sources: Mapping[str, pa.Schema],
        kind: Literal["stream", "batch"] = "stream",
        offsets: Path | None = None,
        accept_changes: bool = False,
        clock_ms: int | None = None,
        new_key: int | None = None,
        rehearse: Callable[[State], object] = lambda state: None,
    ) -> State:
        """Make the checkpoint if it does not exist, check it, and lock it.

        Raises ValueError if ``path`` is a URI, other than ``file:`` and those of buckets. Raises
        CheckpointInUse, CheckpointReadOnly, CheckpointCorrupt, CheckpointForeign or
        CheckpointFormat in the cases that their names describe. Raises StateError if it cannot be
        read or written for another reason, such as a full disk.

        ``path``: the checkpoint, on a local or a shared file system, or the URL of a place in a
        bucket. In a bucket it is taken over from any driver that has it open. ``topology``: the
        topology that will run on it. ``sources``: the present columns of each spout's source;
        waiting records are converted to them. ``kind``: whether the run is one of `start`, or of
        `run_batch`. ``offsets``: Spark's offset log, which must agree with ackcore's records; None
        if Spark does not make the micro-batches. ``accept_changes``: whether to continue a
        checkpoint of a topology with another structure; `record_topology` records it. ``clock_ms``:
        the creation time in milliseconds; the system's time by default. ``new_key``: the deployment
        key of a new checkpoint; random by default. ``rehearse``: called with the checked state
        before a checkpoint in a bucket is taken over that another driver may have open; may raise.

        Returns the open checkpoint, without the files of former runs. The caller must close it.
        """

        def use(parts: CheckpointParts) -> State:
            meta = compatibility.claim(parts.records, topology, kind, offsets, clock_ms, new_key)
            state = cls(parts, meta, sources)
            state._check_all(topology, offsets, accept_changes)
            return state

        state = opened(place_of(path, "checkpoint"), use, rehearse)
        try:
            state._remove_former_runs()
        except BaseException:
            state.close()
            raise
        return state

    def _remove_former_runs(self) -> None:
        number = self.last_plan
        if number is not None and number != self.last_done:
            decision = self.decision(number)
            self.runs.remove_former(number, "" if decision is None else decision.work)

    def _check_all(self, topology: Parts, log: Path | None, accept_changes: bool) -> None:
        """Raise an error unless the topology can continue from the checkpoint.

        Keeps the description of an accepted changed topology, for `record_topology`.
        """
        if log is not None:
            compatibility.check_offsets(log, self.records.place(""), self.last_plan)
        self._check_waiting(topology, self._check_tables())
        decision = None if self.last_plan == self.last_done else self.decision(self.last_plan)
        decided = None if decision is None else decision.number
        folded = self.tables.of(decided)
        tables = folded or self.tables.of(self.last_done) or {}
        structures = self._meta["structure"], topology.structure
        root = self.records.place("")
        compatibility.check_tables(root, tables, structures, decided, folded is not None)
        if decision is not None and folded is None:
            compatibility.check_sinks(root, decision, structures)
        if self._meta["fingerprint"] != topology.fingerprint:
            self._accepted = compatibility.check_accepted(root, structures, tables, accept_changes)
            # A new dict, because the next write of any record would write a change of this one.
            self._meta = self._meta | compatibility.about(topology, self._meta["spout_order"])

    def record_topology(self) -> None:
        """Record the changed topology that `open` accepted, and log the rows that it deletes.

        Call it after all checks of a start, and before the first micro-batch. Without a change, and
        at a second call, it does nothing.
        """
        lost = self._accepted
        if lost is not None:
            self.records.write_meta(self._meta)
            self._accepted = None
            if lost:
                root = self.records.place("")
                _log.warning(
                    "%s: the next micro-batch changes stored rows of tables, as accept_changes "
                    "allows: %s",
                    root,
                    lost,
                )

    def _read_history(self) -> _History:
        """Return the last planned and the last finished micro-batch that the records show.

        Raises CheckpointCorrupt if a plan or a mark is missing.
        """
        records = self.records
        plans, dones = records.numbers(".plan"), records.numbers(".done")
        last = max([*plans, *dones, *records.numbers(".decision")], default=None)
        if last is None:
            if self._meta["begun"]:
                what = "is missing or empty, though micro-batches were run"
                raise corrupt(records.place(""), what)
            return _History(None, None, frozenset())
        plan = self.plan(last)
        if plan is None:
            raise corrupt(
                records.entry(f"batches/{last}.plan"),
                f"is missing, though there are later records of micro-batch {last}",
            )
        if plan.parent is not None and plan.parent not in dones:
            raise corrupt(
                records.entry(f"batches/{plan.parent}.done"),
                f"is missing, though micro-batch {last} was planned after it",
            )
        # Older plans are not read any more, and may be partly removed.
        before = self.plan(last - 1)
        taken = {*plan.replays, *(() if before is None else before.replays)}
        return _History(last, last if last in dones else plan.parent, frozenset(taken))

    def _check_tables(self) -> BatchDecision | None:
        """Return the last decision, or None, after a check of its files.

        These are waiting records and root ids, and dead records unless the micro-batch is done.
        Raises CheckpointCorrupt, with all their names, if tables are missing or damaged.
        """
        planned, done = self.last_plan, self.last_done
        is_decided = self.records.read(f"batches/{planned}.decision") is not None
        last = planned if is_decided else done
        checks = [] if last is None else self._table_checks(last, dead=last != done)
        if done not in (None, last):
            checks.append(partial(self._decided, done))
        raise_all(checks)
        return None if last is None else self._decided(last)

    def _table_checks(self, number: int, dead: bool) -> list[Callable[[], object]]:
        """Return functions that check the tables of a decision. The cache keeps the tables.

        ``dead``: whether to check the dead records; those of a finished micro-batch are not read
        again.
        """
        decision, refused = (
            self.records.read(f"batches/{number}.{name}") for name in ("decision", "refused")
        )
        if decision is None:
            return [partial(self._decided, number)]
        checks: list[Callable[[], object]] = []
        for body in (decision, refused or {}):
            self._cache.expect(body.get("table_bytes", {}))
            if dead:
                checks += Dead.of(self._cache, body.get("dead", {})).checks()
        waiting = Waiting.of(self._cache, decision["waiting"]).segments().values()
        checks += [segment.table for some in waiting for segment in some]
        if decision["nonacked"] is not None:
            checks.append(partial(self._cache.read, decision["nonacked"]))
        return checks

    def _check_waiting(self, topology: Parts, decision: BatchDecision | None) -> None:
        """Raise CheckpointForeign if a spout of waiting or replayed records is not in the topology.

        It is also raised if the spout is untracked, or the records do not fit its present columns
        (ColumnsChanged). ``decision``: the last decision, None before the first.
        """
        waiting = Waiting({}) if decision is None else decision.waiting
        plan = self._open_plan()
        requested = [*(() if plan is None else plan.replays), *self.pending_replays()]
        compatibility.check_waiting(self.records.place(""), topology, waiting, requested)
        for spout in waiting:
            for table in waiting.tables(spout):
                self.fitted(spout, table)
        for name in requested:
            self._request(name)

    def _open_plan(self) -> Plan | None:
        """Return the plan that has no decision, or None.

        If a user has withdrawn requests of the plan, it is recorded without them first.
        """
        plan = self.plan(self.last_plan)
        if plan is None or self.decision(plan.number) is not None:
            return None
        withdrawn = self._requests.withdrawn(plan.replays)
        if not withdrawn:
            return plan
        left = tuple(name for name in plan.replays if name not in withdrawn)
        # Root ids depend on a record's place among the retries: they belong to other records now.
        plan = replace(plan, replays=left, crashes=0, careful=False).without_suspects()
        self.records.write(f"batches/{plan.number}.plan", plan.body(), with_next=True)
        self._history = self._read_history()
        return plan

    # -- ownership and progress ---------------------------------------------------------------

    def close(self) -> None:
        """Delete finished runs' files, write records that wait for a put, release the checkpoint.

        A StateError is only logged. Repeated calls do nothing.
        """
        self.runs.close(self.last_done)
        self.records.close()

    def check_owner(self) -> None:
        """Raise CheckpointInUse if another driver has taken over: then this one must not write."""
        self.records.check_owner()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def key(self, number: int) -> int:
        """Return the key of a micro-batch's ids, 63 bits: a hash of deployment key and number."""
        text = f"{self.deployment_key:x}/{number}".encode()
        digest = blake2b(text, digest_size=8, person=b"ackcore.batch").digest()
        return int.from_bytes(digest, "little") >> 1

    @property
    def kind(self) -> str:
        """``"batch"`` for a finite run, ``"stream"`` otherwise."""
        kind: str = self._meta["kind"]
        return kind

    @property
    def spout_order(self) -> tuple[str, ...]:
        """The names of the spouts, in the order in which Spark numbers their sources."""
        return tuple(self._meta["spout_order"])

    @property
    def last_done(self) -> int | None:
        """The number of the last micro-batch that is done, or None."""
        return self._history.last_done

    @property
    def last_plan(self) -> int | None:
        """The number of the last planned micro-batch: `last_done` or the next one, or None."""
        return self._history.last_plan

    def is_done(self, number: int) -> bool:
        """Return whether a micro-batch has its mark.

        Raises CheckpointCorrupt if ``number`` is neither the last micro-batch that is done nor the
        next one: either answer would skip records or repeat them.
        """
        expected = 0 if self.last_done is None else self.last_done + 1
        if number == expected:
            return False
        if number == self.last_done:
            return True
        raise corrupt(
            self.records.place(""),
            f"continues with micro-batch {expected}, but Spark runs {number}: one of Spark's and "
            "ackcore's parts of the checkpoint is older than the other",
        )

    # -- plans --------------------------------------------------------------------------------

    def plan(self, number: int | None) -> Plan | None:
        """Return the recorded plan of a micro-batch, or None; also if ``number`` is None."""
        body = self.records.read(f"batches/{number}.plan")
        return None if body is None else Plan.of(body)

    def make_plan(self, number: int, clock_ms: int, max_retries: int | None = None) -> Plan:
        """Return a new plan, which is not written yet.

        Raises CheckpointCorrupt if another micro-batch is next, ValueError if this one is done.
        Raises ColumnsChanged if a request does not fit the present columns of its source.

        ``number``: the micro-batch after the last one that is done. ``clock_ms``: the clock's time
        in milliseconds. If the clock went back, the plan keeps its parent's time. ``max_retries``:
        the most due rows that the plan takes, replays included; None for all.

        Returns the plan, with the number of due rows and the replay requests that no plan has
        taken.
        """
        if self.is_done(number):
            raise ValueError(f"micro-batch {number} cannot be planned: it is done already{_FAULT}")
        parent = self.last_done
        now_ms = clock_ms
        if parent is not None:
            now_ms = max(now_ms, self._decided(parent).now_ms)
        due = self.waiting(parent).due(now_ms)
        requested = self.pending_replays()
        for name in requested:
            self._request(name)  # raises: one that does not fit must not be in a recorded plan
        return Plan(number, now_ms, parent, due, requested, max_retries=max_retries)

    def write_plan(self, plan: Plan) -> None:
        """Record a plan, or replace it while its micro-batch has no decision.

        Raises ValueError if the micro-batch has a decision, CheckpointInUse if another driver has
        taken over or planned the micro-batch.
        """
        if self.is_done(plan.number) or self.decision(plan.number) is not None:
            raise ValueError(
                f"the plan of micro-batch {plan.number} cannot change: the micro-batch has a "
                f"decision{_FAULT}"
            )
        first = plan.number != self.last_plan
        self.records.write(f"batches/{plan.number}.plan", plan.body(), once=first)
        taken = self._history.taken | frozenset(plan.replays)
        self._history = self._history._replace(last_plan=plan.number, taken=taken)
        if not self._meta["begun"]:
            # After the plan: if begun is set without a plan, files were removed.
            self.records.write_meta(self._meta | {"begun": True})
            self._meta["begun"] = True

    def record_interrupt(self, number: int) -> None:
        """Record in an undecided plan that the driver was interrupted, so that no crash is counted.

        Without such a plan nothing is written. An interrupt may come at any point, also within
        `write_plan`: only the recorded plan counts.
        """
        plan = self.plan(number)
        if plan is not None and self.decision(number) is None:
            self.records.write(f"batches/{number}.plan", replace(plan, interrupted=True).body())

    def split_due(self, plan: Plan) -> Retries:
        """Return the records that a plan may retry, split into those that it takes and all others.

        Raises CheckpointCorrupt if the number of due rows differs from the plan, or a request is
        missing. Raises ColumnsChanged if the rows do not fit the present columns of their source.
        """
        waiting = self.waiting(plan.parent)
        found = waiting.due(plan.now_ms)
        if found != plan.due:
            raise corrupt(
                self.records.entry(f"batches/{plan.number}.plan"),
                f"has {plan.due} due rows, but the decision of micro-batch {plan.parent} has "
                f"{found}",
            )
        requested = self._requested(plan)
        due, rest = waiting.split(plan.now_ms, plan.max_retries, requested, self.fitted)
        counts = Counter[str]()
        for spout, table in requested:
            counts[spout] += len(table)
        return Retries(due, rest, dict(counts))

    def _requested(self, plan: Plan) -> list[tuple[str, pa.Table]]:
        """Return the rows of a plan's requests, with new order numbers for ordered spouts."""
        found, before = [], Counter[str]()
        for name in plan.replays:
            spout, table = spout_of_request(name), self._request(name)
            if ORDER in table.schema.names:
                place = table.schema.get_field_index(ORDER)
                first = (plan.number << ORDER_BITS) + before[spout]
                numbers = pa.array(first + np.arange(len(table)))
                table = table.set_column(place, table.schema.field(place), numbers)
                before[spout] += len(table)
            found.append((spout, table))
        return found

    def fitted(self, spout: str, table: pa.Table) -> pa.Table:
        """Return waiting rows, converted to the present columns of their source.

        Raises ColumnsChanged if the rows do not fit.
        """
        return fit_columns(
            table,
            self._sources[spout],
            f"{self.url}: {counted(table.num_rows, 'record')} of spout {spout!r} that wait for a "
            "retry",
            "Run the former source until no record waits, then change it; or give the source "
            "these columns, by a cast or an added column",
        )

    @cached_property
    def columns(self) -> dict[str, dict[str, str]]:
        """The present columns of each spout's source: their types by name."""
        return {
            spout: {one.name: str(one.type) for one in schema}
            for spout, schema in self._sources.items()
        }

    def _request(self, name: str) -> pa.Table:
        """Return the rows of a request, converted to the present columns of its source."""
        return self._requests.read(name, self._sources[spout_of_request(name)])

    # -- decisions ----------------------------------------------------------------------------

    def decision(self, number: int | None) -> BatchDecision | None:
        """Return the recorded decision of a micro-batch, with rows refused by sinks, or None.

        Waiting and dead records are read at the first access, by memory map. ``number`` may be
        None, as before the first micro-batch.
        """
        if number not in self._decisions:
            body = self.records.read(f"batches/{number}.decision")
            if number is None or body is None:
                return None
            decision = BatchDecision.of(self._cache, body)
            self._decisions[number] = self.refusals.amended(decision)
        return self._decisions[number]

    def _decided(self, number: int) -> BatchDecision:
        """Return the decision of a micro-batch. Raises CheckpointCorrupt if there is none."""
        decision = self.decision(number)
        if decision is None:
            manifest = self.records.entry(f"batches/{number}.decision")
            raise corrupt(manifest, "is missing, though later records need it")
        return decision

    def write_decision(self, decision: BatchDecision, *, with_mark: bool = False) -> BatchDecision:
        """Record the decision of a micro-batch; return it as recorded, with the plan's ``now_ms``.

        Raises ValueError if the micro-batch has no plan, or a decision already. Raises StateError
        if the decision cannot be written, such as CheckpointInUse if another driver has taken over.

        ``with_mark``: whether to write it in the same put as the mark that follows.
        """
        number = decision.number
        done, plan = self.is_done(number), self.plan(number)
        if plan is None or done or self.decision(number) is not None:
            why = "there is no plan" if plan is None else "there is one already"
            raise ValueError(
                f"the decision of micro-batch {number} cannot be written: {why}{_FAULT}"
            )
        # There may be tables of a driver that died before it wrote the decision, or of a driver
        # that has just taken over. So none is removed here.
        body = decision.write(self._cache, plan.now_ms)
        name = f"batches/{number}.decision"
        self.records.write(name, body, once=True, with_next=with_mark)
        return self._decided(number)

    def close_refusals(
        self,
        decision: BatchDecision,
        dead: Mapping[str, pa.Table],
        counts: Mapping[str, Any],
        totals: Mapping[str, Any],
    ) -> BatchDecision:
        """Record the result of all refusals (`Refusals.close`); return the amended decision."""
        self.refusals.close(decision.number, dead, counts, totals)
        del self._decisions[decision.number]
        return self._decided(decision.number)

    def waiting(self, number: int | None) -> Waiting:
        """Return the rows that waited after a micro-batch; None means before the first one.

        They are read at the first access. Raises CheckpointCorrupt if the micro-batch has no
        decision; or later, if a table is damaged.
        """
        return Waiting({}) if number is None else self._decided(number).waiting

    def write_done(self, number: int) -> None:
        """Mark a micro-batch as done, after all effects of its decision. Repeated calls do nothing.

        Raises ValueError if the micro-batch has no decision.
        """
        if self.is_done(number):
            return
        if self.decision(number) is None:
            raise ValueError(
                f"micro-batch {number} cannot be marked as done: it has no decision{_FAULT}"
            )
        self.records.write(f"batches/{number}.done", {"number": number})
        self._history = self._history._replace(last_done=number)

    # -- removal and replays ------------------------------------------------------------------

    def prune(self, number: int) -> None:
        """Remove files that are not read any more after micro-batch ``number`` is done.

        These are plans, decisions and marks before ``number - 1``, files that no later one names,
        the work of all finished micro-batches, and the requests that were taken, if no later plan
        exists. A crash at any point does no harm: the next call completes it. Raises ValueError if
        ``number`` is not the last micro-batch that is done.
        """
        if number != self.last_done:
            raise ValueError(
                f"no files can be removed after micro-batch {number}: the last finished one is "
                f"{self.last_done}{_FAULT}"
            )
        if self.last_plan == number:
            # Before the plans that name the taken requests are removed.
            self._requests.forget(self._history.taken)
            self._history = self._history._replace(taken=frozenset())
        self.runs.remove_done(number)
        numbers = self.records.numbers(".decision")
        kept = [self.decision(each) for each in numbers if each >= number - 1]
        # None: a decision that was removed after its number was read.
        named = {file for each in kept if each is not None for file in each.table_files}
        # First: a network file system keeps a mapped file, and with it the directory.
        self._cache.keep(named)
        old = self._cache.unnamed.take(number, named)
        segments = self.tables.files(number - 1)
        if segments is not None:
            old |= self.segments.unnamed.take(number, segments)
        self.records.remove_old(number, old)
        self._decisions = {n: each for n, each in self._decisions.items() if n >= number - 1}

    def pending_replays(self) -> tuple[str, ...]:
        """Return the sorted names of requests that no plan has taken and no user has withdrawn.

        The heartbeat's thread calls it at every heartbeat.
        """
        return tuple(self._requests.names(self._history.taken))
