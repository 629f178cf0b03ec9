"""A producer and its consumers: records are sent to the idlest consumer, tracked, retried,
committed.

`ackcore.flow` limits the records of each consumer, and chooses the consumer of the next one.
This package sends them to functions, coroutines, processes and HTTP endpoints, and stores the
committed position of a source.
"""

from ackcore.calls import Reject, Retry, Unavailable
from ackcore.dispatch.checkpoint import Checkpoint, CheckpointError
from ackcore.dispatch.dispatch_consumers import Function, Target
from ackcore.dispatch.dispatcher import DispatchCounts, Dispatcher, RecordDead
from ackcore.dispatch.http import Http, HttpError
from ackcore.dispatch.processes import Process, ProcessDied

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "DispatchCounts",
    "Dispatcher",
    "Function",
    "Http",
    "HttpError",
    "Process",
    "ProcessDied",
    "RecordDead",
    "Reject",
    "Retry",
    "Target",
    "Unavailable",
]
