"""What is recorded of a micro-batch: its plan and its decision, and the tables that go with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from ackcore.spark.files import read_table, write_table

MESSAGE_ID = "_ackcore_message_id"
ATTEMPT = "_ackcore_attempt"
DUE_MS = "_ackcore_due_ms"
FIRST_MS = "_ackcore_first_ms"
LAST_MS = "_ackcore_last_ms"
REASON = "_ackcore_reason"
REPLAYED = "_ackcore_replayed"

#: What a waiting or dead table has in front of the source's own columns.
TRACKING = pa.schema(
    [
        pa.field(MESSAGE_ID, pa.string(), nullable=False),
        # Of the next execution, counted from 0; in a table of the dead: executions it had.
        pa.field(ATTEMPT, pa.int32(), nullable=False),
        # 0 in a table of the dead.
        pa.field(DUE_MS, pa.int64(), nullable=False),
        pa.field(FIRST_MS, pa.int64(), nullable=False),
        pa.field(LAST_MS, pa.int64(), nullable=False),
        pa.field(REASON, pa.string(), nullable=False),  # Reason.encode()
        # Whether it is a dead letter that was sent again: the books tell what became of those.
        pa.field(REPLAYED, pa.bool_(), nullable=False),
    ]
)
#: The one column of ``Decision.nonacked``.
ROOT_IDS = pa.schema([pa.field("root_id", pa.int64(), nullable=False)])


class SinkFile(NamedTuple):
    """A file that an accepted run left for a sink, under ``State.work_of(decision)``."""

    component: str
    stream: str
    path: str  # relative to the work directory
    rows: int


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
    careful: bool = False
    suspects: tuple[int, ...] = ()  # root ids to be run alone
    condemned: tuple[int, ...] = ()  # root ids that crash their process and are not run
    time_outs: Mapping[str, str] = field(default_factory=dict)  # reasons of those that hung
    interrupted: bool = False  # its driver was told to end, and did not die of what it ran

    def body(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return asdict(self)

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Plan:
        """Read what `body` returned; a later ackcore's additions are passed over."""
        known = {name: body[name] for name in cls.__dataclass_fields__ if name in body}
        for name in ("replays", "suspects", "condemned"):
            known[name] = tuple(known[name])
        return cls(**known)


@dataclass(frozen=True, slots=True)
class Decision:
    """What became of a micro-batch, recorded before anything outside hears of it."""

    number: int
    #: Rows that wait, by spout: `TRACKING` columns, then the source's.  All that wait, not only
    #: the new ones.  Pass a table on as `State.split_due` gave it (the same object) and its file
    #: is kept instead of written again.  Spouts without rows may be left out.
    waiting: Mapping[str, pa.Table]
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


class Due(NamedTuple):
    """The waiting rows of a plan's parent, parted; and the rows that were asked for again."""

    due: dict[str, pa.Table]  # by spout, rows of taken replays included; no empty tables
    rest: dict[str, pa.Table]  # the very object of the parent where nothing was due


class Entry(NamedTuple):
    """A table's file, and what is asked of it so often that no file should be opened for it."""

    file: str  # relative to <checkpoint>/ackcore/state
    rows: int
    next_due_ms: int | None = None
    oldest_ms: int | None = None

    def ripe(self, now_ms: int) -> bool:
        """Whether anything in it is due."""
        return self.next_due_ms is not None and self.next_due_ms <= now_ms


class Tables(Mapping[str, pa.Table]):
    """Tables by name, read when they are asked for.

    Parameters
    ----------
    root : Path
        The directory that the files are named from.
    entries : mapping from str to Entry
        Their files.
    verified : set of str
        Files whose checksum need not be looked at again; added to.
    """

    def __init__(self, root: Path, entries: Mapping[str, Entry], verified: set[str]):
        self.entries = dict(entries)
        self._root = root
        self._verified = verified
        self._loaded: dict[str, pa.Table] = {}

    def __getitem__(self, name: str) -> pa.Table:
        if name not in self._loaded:
            file = self.entries[name].file
            table = read_table(self._root / file, check=file not in self._verified)
            # The one table of root ids is read by this, too.
            self._loaded[name] = with_replayed(table) if REASON in table.column_names else table
            self._verified.add(file)
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __repr__(self) -> str:
        rows = (f"{name}: {entry.rows} rows" for name, entry in self.entries.items())
        return f"Tables({', '.join(rows)})"

    def entry_of(self, name: str, table: pa.Table) -> Entry | None:
        """Return the file of a table that came from here unchanged."""
        return self.entries[name] if self._loaded.get(name) is table else None


def with_replayed(table: pa.Table, replayed: bool = False) -> pa.Table:
    """Return a table with the column `REPLAYED`, which those of the first version have not."""
    place = TRACKING.get_field_index(REPLAYED)
    if table.column_names[place : place + 1] == [REPLAYED]:
        return table
    column = pa.repeat(replayed, table.num_rows)
    return table.add_column(place, TRACKING.field(place), column)


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


def write_entry(root: Path, directory: str, name: str, table: pa.Table, waits: bool) -> Entry:
    """Write a table below ``root`` and return its entry."""
    due = oldest = None
    if waits:
        due, oldest = (pc.min(table[column]).as_py() for column in (DUE_MS, FIRST_MS))
    file = write_table(root / directory, name, table)
    return Entry(f"{directory}/{file}", table.num_rows, due, oldest)


def part(table: pa.Table, now_ms: int) -> tuple[pa.Table, pa.Table]:
    """Part a waiting table in the rows that are due and the others."""
    due = pc.less_equal(table[DUE_MS], now_ms)
    return table.filter(due), table.filter(pc.invert(due))


def filled(tables: Mapping[str, pa.Table]) -> dict[str, pa.Table]:
    """Return the tables that have rows."""
    return {name: table for name, table in tables.items() if table.num_rows}
