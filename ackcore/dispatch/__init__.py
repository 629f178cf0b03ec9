"""A producer and its consumers: records are sent to the idlest consumer, tracked, retried,
committed.

`ackcore.flow` limits the records of each consumer, and chooses the consumer of the next one.
This package sends them to functions, coroutines, processes and HTTP endpoints, and stores the
committed position of a source.
"""

from ackcore.calls import Reject, Retry, Unavailable
from ackcore.dispatch.checkpoint import Checkpoint, CheckpointError, Prefix
from ackcore.dispatch.consumers import Coroutine, Function, Target
from ackcore.dispatch.dispatcher import DispatchCounts, Dispatcher, FailedInBatch, RecordDead
from ackcore.dispatch.http import Http, HttpError, Response
from ackcore.dispatch.processes import Process, ProcessDied

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Coroutine",
    "DispatchCounts",
    "Dispatcher",
    "FailedInBatch",
    "Function",
    "Http",
    "HttpError",
    "Prefix",
    "Process",
    "ProcessDied",
    "RecordDead",
    "Reject",
    "Response",
    "Retry",
    "Target",
    "Unavailable",
]
