"""The files of a checkpoint: plans, decisions and marks of micro-batches, by number.

What they mean together, and their order, is the matter of `State`; where they are, that they are
whole, and which of them nobody needs any more is told here.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from ackcore.spark.base.atomic import make_directory, remove, remove_temporaries, sync_directory
from ackcore.spark.base.checksummed import TableCache, read_record, write_record
from ackcore.spark.base.errors import CheckpointCorrupt, CheckpointForeign, CheckpointInUse, corrupt
from ackcore.spark.base.paths import numbered
from ackcore.spark.base.schemas import SinkFile
from ackcore.spark.checkpoint.decisions import (
    ROOT_IDS,
    BatchDecision,
    Plan,
    TableFile,
    Tables,
    check_tracking,
    filled,
    write_table_file,
)
from ackcore.spark.checkpoint.waiting import Waiting


class History(NamedTuple):
    """How far a checkpoint came."""

    last_plan: int | None
    last_done: int | None
    taken: frozenset[str]  # requests to replay that a plan took


class Archive:
    """Records of micro-batches.

    Parameters
    ----------
    root : Path
        ``<checkpoint>/ackcore``.
    deployment : str
        The deployment's key, which every record carries.
    """

    def __init__(self, root: Path, deployment: str):
        self.root = root
        self.batches, self.state = root / "batches", root / "state"
        self.replays, self.works = root / "replays", root / "work"
        self._deployment = deployment
        self._reader = TableCache(self.state)
        self._decisions: dict[int, BatchDecision] = {}

    # -- records ------------------------------------------------------------------------------

    def _record(self, path: Path, body: Mapping[str, Any], once: bool = False) -> None:
        make_directory(path.parent)
        whole = {"deployment_key": self._deployment, **body}
        try:
            write_record(path, path.relative_to(self.root).as_posix(), whole, once=once)
        except FileExistsError:
            raise CheckpointInUse(
                f"{path} was written by another driver, while this one was about to. Two at once "
                "are one too many: let the other one go on, or stop it and start again, and it "
                "goes on from that record"
            ) from None

    def _read(self, path: Path) -> dict[str, Any] | None:
        body = read_record(path, path.relative_to(self.root).as_posix())
        if body is not None and body["deployment_key"] != self._deployment:
            raise CheckpointForeign(
                f"{path} was written for deployment {body['deployment_key']}, and "
                f"{self.root / 'meta.json'} is of {self._deployment}: it was copied here from "
                "another checkpoint. Put back the file that belongs here, or start on a new "
                "checkpoint"
            )
        return body

    def _manifest(self, number: int) -> Path:
        return self.state / str(number) / "manifest.json"

    def plan(self, number: int) -> Plan | None:
        """Return a plan, None if there is none."""
        body = self._read(self.batches / f"{number}.plan")
        return None if body is None else Plan.of(body)

    def write_plan(self, plan: Plan, first: bool) -> None:
        """Record a plan, the first one of its micro-batch or one in its place."""
        self._record(self.batches / f"{plan.number}.plan", plan.body(), once=first)

    def write_done(self, number: int) -> None:
        """Record a mark."""
        self._record(self.batches / f"{number}.done", {"number": number})

    def decision(self, number: int) -> BatchDecision | None:
        """Return a decision, None if there is none; its tables are read when asked for."""
        if number not in self._decisions:
            body = self._read(self._manifest(number))
            if body is None:
                return None
            self._decisions[number] = self._decision_of(body)
        return self._decisions[number]

    def decided(self, number: int) -> BatchDecision:
        """Return a decision that there must be.

        Raises
        ------
        CheckpointCorrupt
            If there is none.
        """
        decision = self.decision(number)
        if decision is None:
            raise corrupt(self._manifest(number), "is missing, though later records build on it")
        return decision

    def _tables(self, entries: Mapping[str, Any]) -> Tables:
        # There was more in an entry when waiting tables had one, too.
        read = {name: TableFile(entry["file"], entry["rows"]) for name, entry in entries.items()}
        return Tables(self._reader, read)

    def _decision_of(self, body: Mapping[str, Any]) -> BatchDecision:
        waiting = Waiting.of(self._reader, body["waiting"])
        roots = self._tables(body["nonacked"])
        return BatchDecision(
            number=body["number"],
            waiting=waiting,
            dead=self._tables(body["dead"]),
            nonacked=roots["nonacked"] if roots else ROOT_IDS.empty_table(),
            files=tuple(SinkFile(*file) for file in body["files"]),
            # Runs had no directories of their own at first.
            work=body.get("work", str(body["number"])),
            counts=body["counts"],
            totals=body["totals"],
            waiting_rows=waiting.rows(),
            next_due_ms=waiting.next_due_ms,
            oldest_ms=waiting.oldest_ms,
            now_ms=body["now_ms"],
        )

    def waiting(self, number: int | None) -> Waiting:
        """Return who waited after a micro-batch; nobody before the first."""
        return Waiting({}) if number is None else self.decided(number).waiting

    def write_decision(self, decision: BatchDecision, plan: Plan) -> BatchDecision:
        """Record a decision, the tables first, and return it as `decision` reads it.

        Raises
        ------
        ValueError
            If a table has not the columns that it must have.
        """
        number = decision.number
        waiting, dead = decision.waiting, filled(decision.dead)
        for spout, parts in waiting.parts.items():
            for part in parts:
                if isinstance(part, pa.Table):
                    check_tracking(part, f"waiting[{spout!r}]")
        for spout, table in dead.items():
            check_tracking(table, f"dead[{spout!r}]")
        roots = decision.nonacked.select(ROOT_IDS.names).cast(ROOT_IDS)
        # There may be tables here of a driver that died before it wrote the manifest, or of one
        # that has just taken over: nothing names them, or all depends on them.
        make_directory(self._manifest(number).parent)
        tables = {
            "dead": {spout: self._write(number, f"dead-{spout}", dead[spout]) for spout in dead},
            "nonacked": {"nonacked": self._write(number, "nonacked", roots)} if len(roots) else {},
        }
        body: dict[str, Any] = {
            what: {name: entry._asdict() for name, entry in entries.items()}
            for what, entries in tables.items()
        }
        body["waiting"] = waiting.write(self._reader, str(number)).body()
        body |= {"number": number, "now_ms": plan.now_ms}
        body |= {"work": decision.work, "files": [list(file) for file in decision.files]}
        body |= {"counts": dict(decision.counts), "totals": dict(decision.totals)}
        self._record(self._manifest(number), body, once=True)
        return self.decided(number)

    def _write(self, number: int, name: str, table: pa.Table) -> TableFile:
        return write_table_file(self._reader, str(number), name, table)

    # -- what is there ------------------------------------------------------------------------

    def history(self, begun: bool) -> History:
        """Read off the names of the files how far it came.

        Parameters
        ----------
        begun : bool
            Whether there was ever a plan.

        Raises
        ------
        CheckpointCorrupt
            If a file is missing.
        """
        remove_temporaries(self.batches)
        plans, dones = numbered(self.batches, ".plan"), numbered(self.batches, ".done")
        last = max([*plans, *dones, *numbered(self.state)], default=None)
        if last is None:
            if begun:
                raise corrupt(self.batches, "is missing or empty, though micro-batches were run")
            return History(None, None, frozenset())
        plan = self.plan(last)
        if plan is None:
            raise corrupt(
                self.batches / f"{last}.plan",
                f"is missing, though there are later records of micro-batch {last}",
            )
        if plan.parent is not None and plan.parent not in dones:
            raise corrupt(
                self.batches / f"{plan.parent}.done",
                f"is missing, though micro-batch {last} was planned after it",
            )
        # Of older ones nothing is asked any more, and they may be half pruned.
        before = self.plan(last - 1)
        taken = {*plan.replays, *(() if before is None else before.replays)}
        done = last if last in dones else plan.parent
        return History(last, done, frozenset(taken))

    def check_tables(self, history: History) -> BatchDecision | None:
        """Read whatever will be read, better now than at the first retry in the night.

        Returns
        -------
        BatchDecision or None
            The last one.

        Raises
        ------
        CheckpointCorrupt
            If anything is missing or damaged.
        """
        planned, done = history.last_plan, history.last_done
        last = None if planned is None else self.decision(planned)
        if done is not None and (last is None or last.number != done):
            parent = self.decided(done)
            last = parent if last is None else last
        if last is not None:
            for spout in last.waiting:
                last.waiting.tables(spout)
            # What was acted upon will not be read again.
            for spout in last.dead if last.number != done else ():
                last.dead[spout]
        return last

    def prune(self, number: int) -> None:
        """Drop what nobody reads once micro-batch ``number`` is done."""
        plans = numbered(self.batches, ".plan")
        # Requests go for good before the plans that remember having taken them.
        taken = [name for plan in plans if plan <= number for name in self._took(plan, number)]
        for name in taken:
            remove(self.replays / name)
        if taken and self.replays.is_dir():
            sync_directory(self.replays)
        for ending in (".plan", ".done"):
            for old in numbered(self.batches, ending):
                if old < number - 1:
                    remove(self.batches / f"{old}{ending}")
        for run in self.works.iterdir() if self.works.is_dir() else ():
            of = run.name.partition(".")[0]
            # File systems put names of their own there: what is open still as it is removed, say.
            if of.isdecimal() and int(of) <= number:
                # Tasks of a job that was given up may be writing there still: then the next time.
                shutil.rmtree(run, ignore_errors=True)
        self._prune_state(number)
        self._decisions = {n: kept for n, kept in self._decisions.items() if n >= number - 1}

    def _took(self, plan: int, number: int) -> tuple[str, ...]:
        """Return the requests that a plan took; an old one may be past reading, and left none."""
        try:
            found = self.plan(plan)
        except CheckpointCorrupt:
            if plan >= number - 1:
                raise
            return ()
        return () if found is None else found.replays

    def _prune_state(self, number: int) -> None:
        numbers = numbered(self.state)
        named: set[str] = set()
        for kept in numbers:
            if kept >= number - 1:
                decision = self.decision(kept)
                # None: a later one, whose driver died while it wrote the tables.
                if decision is not None:
                    assert isinstance(decision.dead, Tables)
                    named.update(entry.file for entry in decision.dead.entries.values())
                    segments = decision.waiting.segments().values()
                    named.update(segment.file for some in segments for segment in some)
        # First: a network file system keeps a file that is mapped, and with it the directory.
        self._reader.keep(named)
        for old in numbers:
            if old < number - 1:
                directory = self.state / str(old)
                remove(directory / "manifest.json")
                files = list(directory.iterdir())
                for path in files:
                    if f"{old}/{path.name}" not in named:
                        remove(path)
                if not any(f"{old}/{path.name}" in named for path in files):
                    remove(directory)
