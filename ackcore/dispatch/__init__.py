"""A `Dispatcher` sends the records of a source to consumers, and retries those that fail.

Consumers are functions, coroutines, processes and HTTP endpoints. `ackcore.flow` limits the records
of each, and chooses the consumer of the next record. A checkpoint, which is optional, is a file
with the position before which all records are done.
"""

from ackcore.dispatch.dispatch_consumers import Function, Target
from ackcore.dispatch.dispatcher import Dispatcher, RecordDead
from ackcore.dispatch.http import Http
from ackcore.dispatch.processes import Process

__all__ = ["Dispatcher", "Function", "Http", "Process", "RecordDead", "Target"]
