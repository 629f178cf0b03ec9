"""The checkpoint of a topology: what is planned, decided and done, and what waits for a retry.

Its layout, below ``<checkpoint>/ackcore/``, written by one driver at a time::

    meta.json                 format, topology, deployment key; written when it is made
    lock                      held by the driver while it runs, with a random token of its own
    batches/N.plan            what micro-batch N will do
    batches/N.decision        what became of it; written after the tables that it names
    batches/N.refused*        what its sinks refused; written between decision and mark
    state/N.*.arrow           records that wait, or are dead; roots that are not ACKED
    state/N.*.parquet         dead letters that tasks wrote, which the store links
    batches/N.done            all has been acted upon
    work/N.<token>/           what executors write in a run of it; whose counts, the manifest says
    work/N.pinned/            the snapshot of its new rows, for careful runs
    work/N.journal/           what the calls of its bolts came to, shared by all of its runs
    replays/*.arrow           requests to send dead letters again
    progress.jsonl            what the last micro-batches did; read by those who look, only

What holds at every moment, a crash between any two writes included: micro-batch N has a plan, then
a manifest, then its mark, in that order, and N + 1 has none of them before N has its mark.  So the
state is read off the names of the files, and one that is not where it must be was removed by other
hands: an error, as to begin again would lose what waits, or repeat what was done.  The last two
micro-batches are kept; files of what waits, until no manifest names them (`waiting`).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa

from ackcore.spark.base.errors import corrupt
from ackcore.spark.base.paths import local_path
from ackcore.spark.base.schemas import ORDER, ORDER_BITS
from ackcore.spark.checkpoint import compatibility, history, replays
from ackcore.spark.checkpoint.bucket_runs import BucketRuns
from ackcore.spark.checkpoint.compatibility import Described
from ackcore.spark.checkpoint.decisions import BatchDecision, Plan, Retries
from ackcore.spark.checkpoint.places import Place, opened_bucket, opened_directory
from ackcore.spark.checkpoint.records import Records
from ackcore.spark.checkpoint.refusals import Refusals
from ackcore.spark.checkpoint.run_directories import RunDirectories
from ackcore.spark.checkpoint.schema_changes import fit_columns
from ackcore.spark.checkpoint.waiting import Waiting
from ackcore.spark.stores.opening import is_bucket, store_url


class State:
    """An open checkpoint, exclusively locked; made by `open`.

    Attributes
    ----------
    url : str
        The checkpoint: an absolute path, or the URL of a place in a bucket.
    deployment_key : int
        63 random bits, drawn when the checkpoint was made.
    refusals : Refusals
        What sinks refused; closed by `close_refusals`.
    """

    def __init__(self, place: Place, meta: dict[str, Any], sources: Mapping[str, pa.Schema]):
        self.url, self._requests, self._records, self._cache, self._runs = place
        self._sources = sources
        self.deployment_key = int(meta["deployment_key"], 16)
        self._meta = meta
        self.refusals = Refusals(self._records, self._cache)
        self._decisions: dict[int, BatchDecision] = {}
        # Its set is replaced as a whole: the heartbeat's thread looks at it.
        self._history = self._read_history()

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        topology: Described,
        *,
        sources: Mapping[str, pa.Schema],
        kind: Literal["stream", "batch"] = "stream",
        offsets: str | os.PathLike[str] | None = None,
        accept_changes: bool = False,
        clock_ms: int | None = None,
        new_key: int | None = None,
    ) -> State:
        """Make the checkpoint if there is none, check it, and lock it.

        Parameters
        ----------
        path : path
            The checkpoint, on a local or a shared file system, or the URL of a place in a bucket.
            There it is taken over from whoever has it open.
        topology : Topology
            What will run on it.
        sources : mapping from str to pyarrow.Schema
            The columns that the source of each spout has now; records that wait are fitted to
            them.
        kind : {"stream", "batch"}
            Whether Spark's offsets drive it or a bounded source.
        offsets : path, optional
            Where Spark keeps its offset log; ``<path>/offsets`` if not given.  Both logs must
            tell the same history.  Streams only.
        accept_changes : bool, default False
            Take over the checkpoint of a topology of another structure.
        clock_ms : int, optional
            The time at which it is made; the system's if not given.
        new_key : int, optional
            The deployment's key if it is made; a random one if not given.

        Returns
        -------
        State
            To be closed.

        Raises
        ------
        ValueError
            If ``path`` is a URI, other than ``file:`` and those of buckets.
        CheckpointInUse, CheckpointReadOnly, CheckpointCorrupt, CheckpointForeign, CheckpointNewer
            As their names say.
        StateError
            If it cannot be read or written for another reason: no space, say.
        """
        log = None
        if kind == "stream":
            log = local_path(
                os.path.join(path, "offsets") if offsets is None else offsets, "offsets"
            )

        def use(place: Place) -> State:
            meta = compatibility.claim(
                place.records, topology, kind, log, accept_changes, clock_ms, new_key
            )
            state = cls(place, meta, sources)
            if state.last_plan is not None and state.last_plan != state.last_done:
                state._runs.remove_fenced(state.last_plan, state.decision)
            state._check_all(topology, log)
            return state

        if isinstance(path, str) and is_bucket(path):
            return opened_bucket(store_url(path, "checkpoint"), use)
        return opened_directory(local_path(path, "checkpoint"), use)

    def _check_all(self, topology: Described, log: Path | None) -> None:
        """Make sure that a topology can go on with it, and record that it does."""
        if log is not None:
            compatibility.check_offsets(log, self._records.place(""), self.last_plan)
        self._check_waiting(topology, self._check_tables())
        if self._meta["fingerprint"] != topology.fingerprint:
            self._meta |= compatibility.about(topology, self._meta["spout_order"])
            compatibility.write_meta(self._records, self._meta)

    def _read_history(self) -> history.History:
        return history.read_history(self._records, self.plan, self._meta["begun"])

    def _check_tables(self) -> BatchDecision | None:
        """Read whatever will be read, rather than at the first retry, and return the last decision.

        Raises
        ------
        CheckpointCorrupt
            If anything is missing or damaged.
        """
        planned, done = self.last_plan, self.last_done
        last = None if planned is None else self.decision(planned)
        if done is not None and (last is None or last.number != done):
            parent = self._decided(done)
            last = parent if last is None else last
        if last is not None:
            for spout in last.waiting:
                last.waiting.tables(spout)
            # What was acted upon will not be read again.
            if last.number != done:
                last.all_dead.check()
        return last

    def _check_waiting(self, topology: Described, decision: BatchDecision | None) -> None:
        """Refuse records that wait for a spout that is no more, or for columns that it has not."""
        waiting = Waiting({}) if decision is None else decision.waiting
        plan = self._open_plan()
        requested = [*(() if plan is None else plan.replays), *self.pending_replays()]
        compatibility.check_waiting(self._records.place(""), topology, waiting, requested)
        for spout in waiting:
            for table in waiting.tables(spout):
                self.fitted(spout, table)
        for name in requested:
            self._request(name)

    def _open_plan(self) -> Plan | None:
        """Return the plan that is not decided, less the requests that were withdrawn since."""
        number = self.last_plan
        plan = None if number is None else self.plan(number)
        if plan is None or self.decision(plan.number) is not None:
            return None
        left = tuple(name for name in plan.replays if not self._requests.withdrawn(name))
        if left == plan.replays:
            return plan
        # Root ids go by a record's place among the retries, so they are of other records now.
        plan = replace(plan, replays=left, crashes=0, careful=False).without_suspects()
        self._records.write(f"batches/{plan.number}.plan", plan.body())
        self._history = self._read_history()
        return plan

    # -- life ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Give it back to others; twice is fine."""
        self._runs.close(self.last_done)
        self._records.close()

    @property
    def records(self) -> Records:
        """All that is on record, for those who keep a record of their own there."""
        return self._records

    def check_owner(self) -> None:
        """Make sure that no other driver has taken over.

        Raises
        ------
        CheckpointInUse
            If one has: nothing that this one writes may count.
        """
        self._records.check_owner()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def key(self, number: int) -> int:
        """Return the key of a micro-batch: 63 bits of a hash of deployment key and number."""
        text = f"{self.deployment_key:x}/{number}".encode()
        digest = blake2b(text, digest_size=8, person=b"ackcore.batch").digest()
        return int.from_bytes(digest, "little") >> 1

    @property
    def spout_order(self) -> tuple[str, ...]:
        """The names of the spouts, in the order in which their sources are numbered."""
        return tuple(self._meta["spout_order"])

    @property
    def last_done(self) -> int | None:
        """The newest micro-batch that is done."""
        return self._history.last_done

    @property
    def last_plan(self) -> int | None:
        """The newest that is planned: `last_done`, or one more."""
        return self._history.last_plan

    def is_done(self, number: int) -> bool:
        """Whether a micro-batch has its mark.

        Raises
        ------
        CheckpointCorrupt
            If it is neither the last one that is done nor the next: either answer would skip
            records or repeat them.
        """
        expected = 0 if self.last_done is None else self.last_done + 1
        if number == expected:
            return False
        if number == self.last_done:
            return True
        raise corrupt(
            self._records.place("batches"),
            f"expects micro-batch {expected} next, and was asked for {number}: Spark's part of "
            "the checkpoint and ackcore's are not of one age",
        )

    @property
    def runs(self) -> RunDirectories | BucketRuns:
        """Where executors write."""
        return self._runs

    # -- plans --------------------------------------------------------------------------------

    def plan(self, number: int) -> Plan | None:
        """Return the plan on record, None if there is none yet."""
        body = self._records.read(f"batches/{number}.plan")
        return None if body is None else Plan.of(body)

    def make_plan(self, number: int, clock_ms: int, max_retries: int | None = None) -> Plan:
        """Return a new plan, which is not yet written.

        Parameters
        ----------
        number : int
            The micro-batch after the last one that is done.
        clock_ms : int
            What the clock says.  It may have gone back; the plan's time never does.
        max_retries : int, optional
            How many rows that are due, replays among them, it takes at most.

        Returns
        -------
        Plan
            With how many rows are due, and the requests to replay that no plan has taken.

        Raises
        ------
        CheckpointCorrupt
            If another micro-batch is next.
        ColumnsChanged
            If a request does not fit the columns that its source has now.
        """
        if self.is_done(number):
            raise ValueError(f"micro-batch {number} is done already; ask is_done first")
        parent = self.last_done
        now_ms = clock_ms
        if parent is not None:
            now_ms = max(now_ms, self._decided(parent).now_ms)
        due = self._waiting_after(parent).due(now_ms)
        requested = self.pending_replays()
        for name in requested:
            self._request(name)  # one that does not fit must not be in a plan on record
        return Plan(number, now_ms, parent, due, requested, max_retries=max_retries)

    def write_plan(self, plan: Plan) -> None:
        """Record a plan, or record it anew as long as nothing is decided.

        Raises
        ------
        ValueError
            If it is decided already.
        """
        if self.is_done(plan.number) or self.decision(plan.number) is not None:
            raise ValueError(f"micro-batch {plan.number} is decided, its plan stays as it is")
        first = plan.number != self.last_plan
        self._records.write(f"batches/{plan.number}.plan", plan.body(), once=first)
        taken = self._history.taken | frozenset(plan.replays)
        self._history = self._history._replace(last_plan=plan.number, taken=taken)
        if not self._meta["begun"]:
            # After the plan: where it is set and there is no plan, files were removed.
            compatibility.write_meta(self._records, self._meta | {"begun": True})
            self._meta["begun"] = True

    def record_interrupt(self, number: int) -> None:
        """Note that the driver was told to end, and did not die of a micro-batch that is planned.

        An interrupt comes anywhere, in the midst of `write_plan` as well: what counts is the file.
        """
        plan = self.plan(number)
        if plan is not None and self.decision(number) is None:
            self._records.write(f"batches/{number}.plan", replace(plan, interrupted=True).body())

    def split_due(self, plan: Plan) -> Retries:
        """Part the parent's waiting rows by what is due, and add the requests the plan took.

        Raises
        ------
        CheckpointCorrupt
            If there are not the rows that the plan counted, or a request is missing.
        ColumnsChanged
            If the rows do not fit the columns that their source has now.
        """
        waiting = self._waiting_after(plan.parent)
        found = waiting.due(plan.now_ms)
        if found != plan.due:
            raise corrupt(
                self._records.place(f"batches/{plan.number}.plan"),
                f"counts {plan.due} rows as due, and micro-batch {plan.parent} has {found} of them",
            )
        requested = self._requested(plan)
        due, rest = waiting.split(plan.now_ms, plan.max_retries, requested, self.fitted)
        counts = Counter[str]()
        for spout, table in requested:
            counts[spout] += len(table)
        return Retries(due, rest, dict(counts))

    def _requested(self, plan: Plan) -> list[tuple[str, pa.Table]]:
        """Return what a plan's requests bring, with its order if its spout is ordered."""
        found, before = [], Counter[str]()
        for name in plan.replays:
            spout, table = replays.spout_of(name), self._request(name)
            if ORDER in table.schema.names:
                place = table.schema.get_field_index(ORDER)
                first = (plan.number << ORDER_BITS) + before[spout]
                numbers = pa.array(first + np.arange(len(table)))
                table = table.set_column(place, table.schema.field(place), numbers)
                before[spout] += len(table)
            found.append((spout, table))
        return found

    def fitted(self, spout: str, table: pa.Table) -> pa.Table:
        """Return waiting rows in the columns that their source has now.

        Raises
        ------
        ColumnsChanged
            If they do not fit.
        """
        return fit_columns(
            table,
            self._sources[spout],
            f"{self.url}: {table.num_rows} records of spout {spout!r} that wait for a retry",
            "Let the former source run until nothing waits, then change it; or give the source "
            "these columns, by a cast or an added column",
        )

    def _request(self, name: str) -> pa.Table:
        """Return the rows of a request, in the columns that their source has now."""
        return self._requests.read(name, self._sources[replays.spout_of(name)])

    # -- decisions ----------------------------------------------------------------------------

    def decision(self, number: int) -> BatchDecision | None:
        """Return the decision on record, None if there is none.

        Its tables are read at the first access, by memory map.
        """
        if number not in self._decisions:
            body = self._records.read(f"batches/{number}.decision")
            if body is None:
                return None
            decision = BatchDecision.of(self._cache, body)
            self._decisions[number] = self.refusals.amended(decision)
        return self._decisions[number]

    def _decided(self, number: int) -> BatchDecision:
        """Return a decision on which later records build."""
        decision = self.decision(number)
        if decision is None:
            manifest = self._records.place(f"batches/{number}.decision")
            raise corrupt(manifest, "is missing, though later records build on it")
        return decision

    def write_decision(self, decision: BatchDecision) -> BatchDecision:
        """Record what became of a micro-batch.

        Parameters
        ----------
        decision : BatchDecision
            Of a micro-batch that has a plan and no decision.

        Returns
        -------
        BatchDecision
            As `decision` reads it, with what the state fills in.

        Raises
        ------
        ValueError
            If there is no plan, or a decision already, or a table is not as it must be.
        StateError
            If it cannot be written.
        """
        number = decision.number
        plan = None if self.is_done(number) else self.plan(number)
        if plan is None or self.decision(number) is not None:
            raise ValueError(f"micro-batch {number} is decided already, or has no plan yet")
        # There may be tables here of a driver that died before it wrote the manifest, or of one
        # that has just taken over: no record names them, or all depends on them.
        body = decision.write(self._cache, plan.now_ms)
        name = f"batches/{number}.decision"
        self._records.write(name, body, once=True, of_run=decision.work)
        return self._decided(number)

    def close_refusals(
        self,
        decision: BatchDecision,
        dead: Mapping[str, pa.Table],
        counts: Mapping[str, Any],
        totals: Mapping[str, Any],
    ) -> BatchDecision:
        """Record what follows from all that sinks refused; return the decision with it."""
        self.refusals.close(decision.number, dead, counts, totals)
        del self._decisions[decision.number]
        return self._decided(decision.number)

    def waiting(self, number: int) -> Waiting:
        """Return the rows that waited after a micro-batch, read at the first access.

        Raises
        ------
        CheckpointCorrupt
            If it has no decision; or later, if a table is damaged.
        """
        return self._decided(number).waiting

    def _waiting_after(self, number: int | None) -> Waiting:
        return Waiting({}) if number is None else self.waiting(number)

    def write_done(self, number: int) -> None:
        """Mark a micro-batch, after all has been acted upon.

        Raises
        ------
        ValueError
            If it is not decided.
        """
        if self.is_done(number):
            return
        if self.decision(number) is None:
            raise ValueError(f"micro-batch {number} is not decided, so it cannot be done")
        self._records.write(f"batches/{number}.done", {"number": number})
        self._history = self._history._replace(last_done=number)

    def append_progress(self, line: Mapping[str, Any]) -> None:
        """Note what a micro-batch did, for those who look at it from outside."""
        self._records.append_progress(line)

    # -- what comes and goes ------------------------------------------------------------------

    def prune(self, number: int) -> None:
        """Remove what is not read any more after micro-batch ``number`` is done.

        Plans, decisions and marks before ``number - 1``, the work of all that are done, and the
        requests that were taken.  May be cut short anywhere, and repeated.

        Raises
        ------
        ValueError
            If it is not the last one that is done.
        """
        if number != self.last_done:
            raise ValueError(f"micro-batch {number} must be the last one done, {self.last_done}")
        if self.last_plan == number:
            # Before the plans that remember having taken them.
            self._requests.forget(self._history.taken)
        self._runs.remove_done(number)
        numbers = self._records.numbers("batches", ".decision")
        kept = [self.decision(each) for each in numbers if each >= number - 1]
        # None: a later one, whose driver died while it wrote the tables.
        named = {file for each in kept if each is not None for file in each.table_files}
        # First: a network file system keeps a file that is mapped, and with it the directory.
        self._cache.keep(named)
        self._records.remove_old(number, self._cache.unnamed(number, named))
        self._decisions = {n: each for n, each in self._decisions.items() if n >= number - 1}

    def pending_replays(self) -> tuple[str, ...]:
        """Return the names of requests that no plan has taken yet, sorted.

        Cheap enough for every heartbeat, and for its thread.
        """
        return tuple(self._requests.names(self._history.taken))
