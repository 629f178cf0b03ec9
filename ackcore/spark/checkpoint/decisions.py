"""What is recorded of a micro-batch: its plan and its decision, and the tables that go with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import pyarrow as pa

from ackcore.spark.base.checksummed import TableCache, write_table
from ackcore.spark.base.schemas import REASON, TRACKING, SinkFile
from ackcore.spark.checkpoint.waiting import Waiting, with_replayed

#: The one column of ``BatchDecision.nonacked``.
ROOT_IDS = pa.schema([pa.field("root_id", pa.int64(), nullable=False)])


@dataclass(frozen=True, slots=True)
class Plan:
    """What a micro-batch will do, recorded before it runs: `State.make_plan` makes one.

    To rewrite it after a death: ``dataclasses.replace(plan, deaths=plan.deaths + 1, ...)``.
    """

    number: int
    now_ms: int
    parent: int | None  # number - 1; None: the first micro-batch
    due: int  # waiting rows of the parent that are due at now_ms, without replays
    replays: tuple[str, ...] = ()  # names of requests it takes
    deaths: int = 0
    #: How many of the due and the replayed rows it takes at most; None: all of them.
    max_retries: int | None = None
    careful: bool = False
    suspects: tuple[int, ...] = ()  # root ids to be run alone
    rejected: tuple[int, ...] = ()  # root ids that crash their process and are not run
    time_outs: Mapping[str, str] = field(default_factory=dict)  # reasons of those that hung
    interrupted: bool = False  # its driver was told to end, and did not die of what it ran

    def body(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        body = asdict(self)
        body["condemned"] = body.pop("rejected")  # its name on record
        return body

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Plan:
        """Read what `body` returned; a later ackcore's additions are passed over."""
        known = {name: body[name] for name in cls.__dataclass_fields__ if name in body}
        for name in ("replays", "suspects"):
            known[name] = tuple(known[name])
        return cls(**known, rejected=tuple(body["condemned"]))


@dataclass(frozen=True, slots=True)
class BatchDecision:
    """What became of a micro-batch, recorded before anything outside hears of it."""

    number: int
    #: All who wait: `Retries.rest`, and the new ones.
    waiting: Waiting
    #: Rows that became dead in this micro-batch, by spout, in the same columns.
    dead: Mapping[str, pa.Table]
    #: Root ids of this micro-batch that are not ACKED: column ``root_id`` (int64).
    nonacked: pa.Table
    #: Files whose rows (less those of non-ACKED roots) the sinks get.
    files: tuple[SinkFile, ...] = ()
    #: The directory that they are in, below ``work``.
    work: str = ""
    #: Books of the micro-batch and since the beginning; anything that JSON can hold.
    counts: Mapping[str, Any] = field(default_factory=dict)
    totals: Mapping[str, Any] = field(default_factory=dict)
    #: Filled in by the state (what is given is ignored): rows waiting, when the first is due,
    #: the oldest one's first_ms, and the time of the plan.
    waiting_rows: int = 0
    next_due_ms: int | None = None
    oldest_ms: int | None = None
    now_ms: int = 0


class Retries(NamedTuple):
    """The rows that wait after a plan's parent and those of its requests: what runs, what not."""

    due: dict[str, pa.Table]  # by spout; no empty tables
    rest: Waiting
    asked: dict[str, int]  # rows of the requests, by spout, whether they are due or in the rest


class TableFile(NamedTuple):
    """A table's file, relative to ``<checkpoint>/ackcore/state``."""

    file: str
    rows: int


class Tables(Mapping[str, pa.Table]):
    """Tables by name, read when they are asked for.

    Parameters
    ----------
    reader : TableCache
        Of the directory that the files are named from.
    entries : mapping from str to TableFile
        Their files.
    """

    def __init__(self, reader: TableCache, entries: Mapping[str, TableFile]):
        self.entries = dict(entries)
        self._reader = reader

    def __getitem__(self, name: str) -> pa.Table:
        table = self._reader.read(self.entries[name].file)
        # The one table of root ids is read by this, too.
        return with_replayed(table) if REASON in table.column_names else table

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __repr__(self) -> str:
        rows = (f"{name}: {entry.rows} rows" for name, entry in self.entries.items())
        return f"Tables({', '.join(rows)})"


def check_tracking(table: pa.Table, what: str) -> None:
    """Refuse a table that does not begin with the `TRACKING` columns, all of them filled.

    Raises
    ------
    ValueError
        If it does not.
    """
    for field_, column in zip(TRACKING, table.schema, strict=False):
        if field_.name != column.name or field_.type != column.type:
            raise ValueError(
                f"{what}: column {column.name} ({column.type}) is where {field_.name} "
                f"({field_.type}) must be; the TRACKING columns come first, then the source's"
            )
    if table.num_columns < len(TRACKING):
        raise ValueError(f"{what} has {table.column_names} and lacks columns of TRACKING")
    for name in TRACKING.names:
        if table[name].null_count:
            raise ValueError(f"{what}: column {name} holds nulls, and must not")


def write_table_file(reader: TableCache, directory: str, name: str, table: pa.Table) -> TableFile:
    """Write a table and return its entry."""
    file = f"{directory}/{write_table(reader.root / directory, name, table)}"
    reader.wrote(file)
    return TableFile(file, table.num_rows)


def filled(tables: Mapping[str, pa.Table]) -> dict[str, pa.Table]:
    """Return the tables that have rows."""
    return {name: table for name, table in tables.items() if table.num_rows}
