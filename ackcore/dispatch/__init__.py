"""A producer and its consumers: records are sent to the idlest consumer, tracked, retried,
committed.

`ackcore.flow` limits the records of each consumer, and chooses the consumer of the next one.
This package sends them to functions, coroutines, processes and HTTP endpoints, and stores the
committed position of a source.
"""

from ackcore.calls import Reject, Retry, Unavailable
from ackcore.dispatch.checkpoint import CheckpointError
from ackcore.dispatch.dispatch_consumers import Function, Target
from ackcore.dispatch.dispatcher import Dispatcher, RecordDead
from ackcore.dispatch.http import Http
from ackcore.dispatch.processes import Process

__all__ = [
    "CheckpointError",
    "Dispatcher",
    "Function",
    "Http",
    "Process",
    "RecordDead",
    "Reject",
    "Retry",
    "Target",
    "Unavailable",
]
