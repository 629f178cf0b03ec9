"""Topologies and acks on Spark.

`start` and `run_batch` run topologies, `attempt` and `guard` a function for each row. Functions
that begin with ``to_`` make sinks, classes that end in ``Spout`` are sources. `dead_letters` reads
dead letters, `replay` sends them again, and `table` reads a table of a checkpoint.
`skip_planned` leaves out rows that a source cannot read any more. `settle`,
`settle_parquet`, `settle_partitions` and `combine` work on ack events; `functions` has ids as UDFs.

Each kind of failure has its own error: `StateError` and its subclasses for a checkpoint,
`RunFailed` for a micro-batch that Spark cannot run, `RunCancelled` for a cancelled job,
`SourceError` for a planned source, `SinkError` for a sink or the dead-letter store, `TooManyDead`
for a run with too many dead records, and `WorkerPythonError` for workers whose Python cannot run
ackcore.

Needs ``ackcore[spark]``, or the pyspark and pyarrow of a cluster, and ackcore on its workers.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ackcore.dead_limit import TooManyDead
    from ackcore.spark import functions
    from ackcore.spark.base.errors import StateError
    from ackcore.spark.base.interrupts import RunCancelled
    from ackcore.spark.checkpoint.skips import skip_planned
    from ackcore.spark.dead_letters.reading import dead_letters
    from ackcore.spark.dead_letters.replay import replay
    from ackcore.spark.dead_letters.topic import DeadLetterTopic
    from ackcore.spark.engine.insist import RunFailed, SinkError
    from ackcore.spark.guards import attempt, guard
    from ackcore.spark.inspect.table_frames import table
    from ackcore.spark.listeners import QueryListener
    from ackcore.spark.planned.delta_spout import DeltaSpout
    from ackcore.spark.planned.file_spout import FileSpout
    from ackcore.spark.planned.planned_source import PlannedSource, RateSpout, SourceError
    from ackcore.spark.query import Query, run_batch, start
    from ackcore.spark.settle.dataframes import combine, settle
    from ackcore.spark.settle.parquet_events import settle_parquet
    from ackcore.spark.settle.worker_functions import settle_partitions
    from ackcore.spark.sinks.delta import to_delta
    from ackcore.spark.sinks.iceberg import to_iceberg
    from ackcore.spark.sinks.jdbc import to_jdbc
    from ackcore.spark.sinks.kafka import to_kafka
    from ackcore.spark.sinks.parquet import to_parquet
    from ackcore.spark.sinks.postgres import to_postgres
    from ackcore.spark.sinks.rejects import SinkRejects
    from ackcore.spark.sinks.sink import Sink, TransactionalSink, Written
    from ackcore.spark.sinks.sink_batch import SinkBatch
    from ackcore.spark.sinks.unavailable import SinkUnavailable

__all__ = [
    "DeadLetterTopic",
    "DeltaSpout",
    "FileSpout",
    "PlannedSource",
    "Query",
    "QueryListener",
    "RateSpout",
    "RunCancelled",
    "RunFailed",
    "Sink",
    "SinkBatch",
    "SinkError",
    "SinkRejects",
    "SinkUnavailable",
    "SourceError",
    "StateError",
    "TooManyDead",
    "TransactionalSink",
    "Written",
    "attempt",
    "combine",
    "dead_letters",
    "functions",
    "guard",
    "replay",
    "run_batch",
    "settle",
    "settle_parquet",
    "settle_partitions",
    "skip_planned",
    "start",
    "table",
    "to_delta",
    "to_iceberg",
    "to_jdbc",
    "to_kafka",
    "to_parquet",
    "to_postgres",
]

#: The public names of each module.  They are loaded at first use: tools that only read a checkpoint
#: import modules below this package, without pyspark, which takes over a second.
_NAMES = {
    ".base.errors": "StateError",
    ".base.interrupts": "RunCancelled",
    ".checkpoint.skips": "skip_planned",
    ".dead_letters.reading": "dead_letters",
    ".dead_letters.replay": "replay",
    ".dead_letters.topic": "DeadLetterTopic",
    ".engine.insist": "RunFailed SinkError",
    ".guards": "attempt guard",
    ".inspect.table_frames": "table",
    ".listeners": "QueryListener",
    ".planned.delta_spout": "DeltaSpout",
    ".planned.file_spout": "FileSpout",
    ".planned.planned_source": "PlannedSource RateSpout SourceError",
    ".query": "Query run_batch start",
    ".settle.dataframes": "combine settle",
    ".settle.parquet_events": "settle_parquet",
    ".settle.worker_functions": "settle_partitions",
    ".sinks.delta": "to_delta",
    ".sinks.iceberg": "to_iceberg",
    ".sinks.jdbc": "to_jdbc",
    ".sinks.kafka": "to_kafka",
    ".sinks.parquet": "to_parquet",
    ".sinks.postgres": "to_postgres",
    ".sinks.rejects": "SinkRejects",
    ".sinks.sink": "Sink TransactionalSink Written",
    ".sinks.sink_batch": "SinkBatch",
    ".sinks.unavailable": "SinkUnavailable",
    "ackcore.dead_limit": "TooManyDead",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}


class _Package(ModuleType):
    """The class of this package, which loads public names at first use.

    The name `settle` stays the function when the subpackage ``settle`` is imported.
    """

    def __getattr__(self, name: str) -> Any:
        if name == "functions":
            return import_module(f"{__name__}.functions")
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(import_module(_MODULES[name], __name__), name)
        setattr(self, name, found)
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        # An import of the subpackage `settle` would replace the function of the same name.
        if not (name in _MODULES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})

    def __reduce__(self) -> tuple[Any, ...]:
        return import_module, (__name__,)


sys.modules[__name__].__class__ = _Package
