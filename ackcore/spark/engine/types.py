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
from ackcore.spark.tasks.record_ids import Refused, Tried
from ackcore.spark.tasks.reread_stage import PieceReader
from ackcore.spark.tasks.row_files import RowFile
from ackcore.topology.tuples import Raised


class Snapshot(NamedTuple):
    """Rows that tasks read: ``read`` returns the rows of the partition numbers in ``frame``.

    ``again``, if given, reads some of the rows again without reading all.
    """

    frame: DataFrame
    read: Callable[[Batches], Batches]
    again: PieceReader | None = None


@dataclass(frozen=True)
class InputFrame:
    """Rows for the spout stage.

    ``spout`` is the spout of the rows.  If it is None, each spout has a nullable struct column, in
    the order of the topology, and each partition has rows of one spout.  The rows of a ``snapshot``
    are in files of ackcore or in ranges of offsets, and can be read again whatever the source does.
    The ``refused`` rows fail, and the ``tried`` rows have failed before.
    """

    frame: DataFrame
    spout: str | None
    snapshot: Snapshot | None = None
    refused: tuple[Refused, ...] = ()
    tried: tuple[Tried, ...] = ()

    def map_in_arrow(self, function: MapInArrow, schema: StructType | str) -> DataFrame:
        """Return the result of ``frame.mapInArrow``; the columns may have any names.

        See `plainly_named`.
        """
        if self.snapshot is not None:
            # The same worker reads the rows: through the JVM, they are written and read twice more.
            read = self.snapshot.read
            return self.snapshot.frame.mapInArrow(lambda batches: function(read(batches)), schema)
        return plainly_named(self.frame).mapInArrow(function, schema)


class Obstacle(NamedTuple):
    """The reason why rows cannot be read, and the time-out for waiting; None: no time-out."""

    text: str
    timeout_s: float | None = None


@dataclass(frozen=True)
class RunPlan:
    """The plan of a run.

    Attributes
    ----------
    number : int
        The micro-batch's number.
    now_ms : int
        The micro-batch's time, in milliseconds since 1970.
    key : int
        The 64-bit key of all ids of the run, a function of the deployment's key and the number.
    work : str
        A directory that driver and workers share, or a bucket's URL, with the due retries in it.
    journal : str
        A directory that all runs of the micro-batch share, with the outcomes of calls.
    retries : mapping from str to RowFile
        By spout, the due records: the columns that `state` keeps of waiting records, and the
        source's columns.
    careful : bool
        Whether in-flight markers name roots, from which the driver finds crashing records.
    suspects, rejected : tuple of int
        Suspects are roots that are run alone; one is repeated for each attempt that crashed with it
        alone. Rejected roots are not run, but fail.
    blocked : mapping from str to numpy.ndarray of int64
        By ordered spout, the hashes of the keys that have a waiting record.
    rules : Rules or None
        The rules by which tasks judge failed records that they hold in memory; None if all failed
        records are to be read again.
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
        By spout, the numbers of new records and of due records.
    failed : pyarrow.Table
        ``root_id, spout, reason`` of every record that is not ACKED; those in ``judged`` may be
        missing.
    files : tuple of SinkFile
        The files with rows for streams with a sink.
    problems : tuple of str
        The reasons why the run must not be accepted; empty if it may be.
    untracked_failures : int
        The number of untracked tuples that failed.
    spilled : mapping from str to tuple of RowFile
        By spout with rows that cannot be read again by position: the files with the rows, relative
        to the run's directory.
    content : mapping from int to mapping from str to int
        By partition of the spout stage and spout: the fingerprint of the rows that were read
        (`spout_stage.sampled`).
    raised : mapping from str to Raised
        By bolt, the errors that it raised.
    breaker_trips : int
        The number of times that a breaker opened in the run's tasks.
    emitted : mapping from str to mapping from str to int
        By component and stream, the number of emitted tuples.
    traces : tuple of (int, RecordTrace)
        Pairs of a traced root and its trace, without an outcome yet.
    read : mapping from int to mapping from str to int
        By partition of the spout stage and spout: the number of new records; empty if unknown.
    judged : FailedRows
        The records that are not ACKED and that their tasks have judged.
    kept : mapping from str to tuple of RowFile
        By spout, files like those in ``spilled``, of tasks with few rows of sources that can be
        read again.  Only this driver uses them, and only before the decision: they are not synced.
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
    kept: Mapping[str, tuple[RowFile, ...]] = field(default_factory=dict)

    def to_reread(self) -> dict[str, Any]:
        """Return the JSON fields for reading the run's records again; `of_decided` reads them."""
        return {
            "spilled": {
                spout: [list(file) for file in some] for spout, some in self.spilled.items()
            },
            "content": [[partition, dict(some)] for partition, some in self.content.items()],
        }

    @classmethod
    def of_decided(cls, files: tuple[SinkFile, ...], reread: Mapping[str, Any]) -> RunResult:
        """Return a result with only the fields for reading an accepted run's records again."""
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
