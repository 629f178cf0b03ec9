"""The arguments and results of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from ackcore._records import Int64s
from ackcore.spark.base.batches import Batches, MapInArrow, plainly_named
from ackcore.spark.base.reasons import FAILED
from ackcore.spark.base.schemas import SinkFile
from ackcore.spark.base.traces import RecordTrace
from ackcore.spark.tasks.failed_rows import FailedRows, Rules
from ackcore.spark.tasks.pieces import PieceReader
from ackcore.spark.tasks.record_ids import Refused, Tried
from ackcore.spark.tasks.row_files import RowFile
from ackcore.topology.tuples import Raised


class Snapshot(NamedTuple):
    """Rows that tasks read: ``read`` reads those of the partitions whose numbers ``frame`` has.

    ``again`` reads some of them again, if there is a shorter way to these than through all.
    """

    frame: DataFrame
    read: Callable[[Batches], Batches]
    again: PieceReader | None = None


@dataclass(frozen=True)
class InputFrame:
    """Rows for the spout stage.

    ``spout`` is whose rows they are; None where each spout has a nullable struct column, in the
    order of the topology, and each partition has rows of one of them.  Those of a ``snapshot`` are
    in files of ours, or in ranges of offsets, and there again whatever the source does.  Of them
    ``refused`` ones fail, and ``tried`` ones have failed before.
    """

    frame: DataFrame
    spout: str | None
    snapshot: Snapshot | None = None
    refused: tuple[Refused, ...] = ()
    tried: tuple[Tried, ...] = ()

    def map_in_arrow(self, function: MapInArrow, schema: StructType | str) -> DataFrame:
        """``frame.mapInArrow``, where columns have any names.

        See `plainly_named`.
        """
        if self.snapshot is not None:
            # Read by the same worker: what goes through the JVM is written and read twice more.
            read = self.snapshot.read
            return self.snapshot.frame.mapInArrow(lambda batches: function(read(batches)), schema)
        return plainly_named(self.frame).mapInArrow(function, schema)


class Obstacle(NamedTuple):
    """The reason why rows cannot be read, and how long to wait for it; None: without end."""

    text: str
    timeout_s: float | None = None


@dataclass(frozen=True)
class RunPlan:
    """The plan of a run.

    Attributes
    ----------
    number : int
        The micro-batch.
    now_ms : int
        Its time.
    key : int
        64 bits, a function of the deployment's key and the number: of all ids of the run.
    work : str
        A directory that driver and workers share, or a bucket's URL, with the due retries in it.
    journal : str
        A directory that all runs of the micro-batch share, with what calls came to.
    retries : mapping from str to RowFile
        By spout, the records that are due: what `state` keeps of those that wait, and the
        source's columns.
    careful : bool
        Whether in-flight markers name roots, for the driver to go by.
    suspects, rejected : tuple of int
        Roots that are run alone, and once more for each attempt that crashed with one alone;
        roots that are not run at all, but fail.
    blocked : mapping from str to numpy.ndarray of int64
        By spout that is ordered, the hashes of the keys of which any record waits.
    rules : Rules or None
        The rules by which tasks judge records that fail while they have them; None if all that
        fail are to be read again.
    """

    number: int
    now_ms: int
    key: int
    work: str
    journal: str
    retries: Mapping[str, RowFile] = field(default_factory=dict)
    careful: bool = False
    suspects: tuple[int, ...] = ()
    rejected: tuple[int, ...] = ()
    blocked: Mapping[str, Int64s] = field(default_factory=dict)
    rules: Rules | None = None


@dataclass(frozen=True)
class RunResult:
    """The result of a run.

    Attributes
    ----------
    records, retried : mapping from str to int
        By spout: new records, and records that were due.
    failed : pyarrow.Table
        ``root_id, spout, reason`` of every record that is not ACKED, but for such as are among
        ``judged``.
    files : tuple of SinkFile
        What was emitted to streams with a sink.
    problems : tuple of str
        Why the run must not be accepted; empty if it may be.
    untracked_failures : int
        Untracked tuples that failed.
    spilled : mapping from str to tuple of RowFile
        By spout of which rows cannot be read again by position: the files that have them,
        relative to the run's directory.
    content : mapping from int to mapping from str to int
        By partition of the spout stage and spout: `spout_stage.sampled` of what was read.
    raised : mapping from str to Raised
        By bolt, what it raised.
    breaker_trips : int
        How often a breaker opened in its tasks.
    emitted : mapping from str to mapping from str to int
        By component and stream, how many tuples were emitted.
    traces : tuple of (int, RecordTrace)
        By root, the way of those that were traced, without an outcome yet.
    read : mapping from int to mapping from str to int
        By partition of the spout stage and spout: how many new records it had; empty if that is not
        known.
    judged : FailedRows
        The records that are not ACKED and that their tasks have judged.
    """

    records: Mapping[str, int]
    retried: Mapping[str, int]
    failed: pa.Table
    files: tuple[SinkFile, ...]
    problems: tuple[str, ...]
    untracked_failures: int
    spilled: Mapping[str, tuple[RowFile, ...]]
    content: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    raised: Mapping[str, Raised] = field(default_factory=dict)
    breaker_trips: int = 0
    emitted: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    traces: tuple[tuple[int, RecordTrace], ...] = ()
    read: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    judged: FailedRows = field(default_factory=FailedRows)

    def to_reread(self) -> dict[str, Any]:
        """Return, as JSON, what it takes to read its records again; `of_decided` reads it."""
        return {
            "spilled": {
                spout: [[file.path, file.rows] for file in some]
                for spout, some in self.spilled.items()
            },
            "content": [[partition, dict(some)] for partition, some in self.content.items()],
        }

    @classmethod
    def of_decided(cls, files: tuple[SinkFile, ...], reread: Mapping[str, Any]) -> RunResult:
        """Return as much of an accepted run as it takes to read its records again."""
        return cls(
            records={},
            retried={},
            failed=FAILED.empty_table(),
            files=files,
            problems=(),
            untracked_failures=0,
            spilled={
                name: tuple(RowFile(*file) for file in some)
                for name, some in reread["spilled"].items()
            },
            content=dict(reread["content"]),
        )
