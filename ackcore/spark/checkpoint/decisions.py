"""The records of a micro-batch: its plan, its decision, and the tables of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import pyarrow as pa

from ackcore._records import Int64s
from ackcore.spark.base.checksummed import batches_of, in_few
from ackcore.spark.base.root_ids import RootColumns, distinct
from ackcore.spark.base.schemas import SinkFile
from ackcore.spark.checkpoint.dead_records import Dead, dead_of
from ackcore.spark.checkpoint.table_cache import TableCache
from ackcore.spark.checkpoint.waiting import Waiting

#: The one column of ``BatchDecision.nonacked``.
ROOT_IDS = pa.schema([pa.field("root_id", pa.int64(), nullable=False)])


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a micro-batch, recorded before it runs. `State.make_plan` makes a plan.

    To rewrite it after a crash: ``dataclasses.replace(plan, crashes=plan.crashes + 1, ...)``.
    """

    number: int
    now_ms: int  # the time of the plan, in ms since 1970
    parent: int | None  # number - 1; None: the first micro-batch
    due: int  # the number of waiting rows of the parent that are due at now_ms, without replays
    replays: tuple[str, ...] = ()  # names of the requests that the plan takes
    crashes: int = 0  # runs in which a worker, an executor or the driver died
    #: The most due and replayed rows that the plan takes; None: all of them.
    max_retries: int | None = None
    careful: bool = False  # runs read a snapshot of the new rows, and run suspects one by one
    #: Root ids to be run alone; one that crashed its process alone occurs again for each crash.
    suspects: tuple[int, ...] = ()
    rejected: tuple[int, ...] = ()  # root ids that crash their process and are not run
    #: By root id of a rejected record that hung: the encoded reason.
    time_outs: Mapping[str, str] = field(default_factory=dict)
    interrupted: bool = False  # the driver was interrupted, and did not crash
    #: By planned spout: the rows of the plan, such as offsets, and the start of the next plan.
    offsets: Mapping[str, Any] = field(default_factory=dict)
    #: By spout with ``ordered_by`` or ``dedup``, the columns of its key, which determine the places
    #: of retries. For ``dedup``, the text "dedup" stands before the columns.
    ordered_by: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """Return the plan as a JSON object."""
        return {**asdict(replace(self, offsets={})), "offsets": self.offsets}

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Plan:
        """Return the plan that the JSON of `body` describes."""
        known = {name: body[name] for name in cls.__dataclass_fields__}
        for name in ("replays", "suspects", "rejected"):
            known[name] = tuple(known[name])
        known["ordered_by"] = {name: tuple(of) for name, of in known["ordered_by"].items()}
        return cls(**known)

    def without_suspects(self) -> Plan:
        """Return the plan without suspected, rejected and timed-out root ids.

        To be used if the rows of the plan change: the root ids then belong to other records.
        """
        return replace(self, suspects=(), rejected=(), time_outs={})


@dataclass(frozen=True, slots=True)
class BatchDecision:
    """The result of a micro-batch, recorded before anything outside the checkpoint is written."""

    number: int
    #: All rows that wait: `Retries.rest`, and the new ones.
    waiting: Waiting
    #: Rows that became dead in this micro-batch, by spout, in the same columns.
    dead: Mapping[str, pa.Table]
    #: Root ids of this micro-batch that are not ACKED: column ``root_id`` (int64), sorted.  A large
    #: number is in `RootColumns` until it is recorded.
    nonacked: pa.Table | RootColumns
    #: Files for the sinks, which get all rows except those of non-ACKED roots.
    files: tuple[SinkFile, ...] = ()
    #: The directory of these files, below ``work``.
    work: str = ""
    #: Counts of the micro-batch, and totals since the beginning; any JSON values.
    counts: Mapping[str, Any] = field(default_factory=dict)
    totals: Mapping[str, Any] = field(default_factory=dict)
    #: The time of the plan, which `State.write_decision` sets.
    now_ms: int = 0
    #: JSON values needed to read records of the run again: see `ackcore.spark.engine.reread`.
    reread: Mapping[str, Any] = field(default_factory=dict)
    #: Records that are dead because a sink refused their rows: tables like those of ``dead``, which
    #: are recorded after the decision (`refusals`).
    refused: Mapping[str, pa.Table] = field(default_factory=dict)
    #: Whether the answers of all sinks are recorded, which is done only if one refused rows.
    sinks_done: bool = False
    #: By table with windows and by spout, the largest event time of an ACKED record's row, in ms
    #: since 1970.
    times: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    #: The same time by table, spout and part of its source that has rows for later micro-batches.
    #: `NEVER` if the part has no row of an ACKED record, `UNSURE` if the time is unknown.
    behind: Mapping[str, Mapping[str, Mapping[str, int]]] = field(default_factory=dict)

    @classmethod
    def of(cls, cache: TableCache, body: Mapping[str, Any]) -> BatchDecision:
        """Return the decision that the JSON of `write` describes.

        It reads the ids of roots that are not ACKED. Waiting and dead records are read at the first
        access.
        """
        cache.expect(body["table_bytes"])
        roots = body["nonacked"]
        return cls(
            waiting=Waiting.of(cache, body["waiting"]),
            dead=Dead.of(cache, body["dead"]),
            nonacked=ROOT_IDS.empty_table() if roots is None else cache.read(roots),
            files=tuple(map(SinkFile._make, body["files"])),
            **{name: body[name] for name in _AS_JSON},
        )

    @property
    def all_dead(self) -> Dead:
        """All dead records, by spout: failed in the run, or refused by a sink."""
        return dead_of(self.dead).plus(dead_of(self.refused))

    @property
    def table_files(self) -> set[str]:
        """The files with waiting and dead records, relative to ``<checkpoint>/ackcore/state``."""
        segments = self.waiting.segments().values()
        waiting = {segment.file for some in segments for segment in some}
        return waiting | self.all_dead.files

    def write(self, cache: TableCache, now_ms: int) -> dict[str, Any]:
        """Write and sync the files of the decision: waiting and dead records, roots not ACKED.

        Returns the decision as a JSON object to record. ``cache``: where the files are written.
        ``now_ms``: the time of the plan, which is recorded.
        """
        prefix = cache.prefix_of(self.number)
        roots = self._write_nonacked(cache, prefix) if len(self.nonacked) else None
        body: dict[str, Any] = {
            "dead": dead_of(self.dead).write(cache, prefix),
            "nonacked": roots,
            "waiting": self.waiting.write(cache, prefix).body(),
        }
        lists = (*body["dead"].values(), *body["waiting"].values())
        files = {each["file"] for some in lists for each in some if "nbytes" not in each}
        if roots is not None:
            files.add(roots)
        cache.sync()
        return {
            **body,
            "table_bytes": cache.sizes(files),
            "files": [list(file) for file in self.files],
            **{name: getattr(self, name) for name in _AS_JSON},
            "now_ms": now_ms,
        }

    def _write_nonacked(self, cache: TableCache, prefix: str) -> str:
        if isinstance(self.nonacked, RootColumns):
            ordered = self.nonacked.ordered()
            batches = in_few(pa.record_batch([pa.array(ids)], schema=ROOT_IDS) for ids in ordered)
        else:
            batches = batches_of(self.nonacked.select(ROOT_IDS.names).cast(ROOT_IDS))
        return cache.write(prefix, "nonacked", ROOT_IDS, batches)


#: The fields that are JSON already; `BatchDecision.write` replaces ``now_ms``.
_AS_JSON = ("number", "work", "counts", "totals", "now_ms", "reread", "times", "behind")


def nonacked_of(columns: Sequence[Int64s]) -> pa.Table | RootColumns:
    """Return root ids for `BatchDecision.nonacked`.

    Up to 2**18 ids are a table, distinct and sorted. More are `RootColumns`: the columns as given.
    """
    roots = RootColumns(columns)
    if roots.are_many:
        return roots
    return pa.table([pa.array(distinct(*columns), pa.int64())], schema=ROOT_IDS)


class Retries(NamedTuple):
    """The records that a planned micro-batch may retry, split into due and other ones.

    They waited after the micro-batch before, or belong to replay requests of the plan.
    """

    due: dict[str, pa.Table]  # by spout, at most `Plan.max_retries` rows to run; no empty tables
    rest: Waiting  # all others, also due ones for which the plan has no room
    requested: dict[str, int]  # rows of the requests, by spout, in ``due`` or in ``rest``
