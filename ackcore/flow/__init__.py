"""Flow control: the number of tuples each consumer may have outstanding, and the choice of the
next.

Each consumer has a law (`Limit`) that adapts to the round-trip times of its acks. A `Chooser`
selects among the consumers with room. A `FlowController` combines both, and keeps failed items
until they are sent again. No I/O; time comes only from the given clock.
"""

from ackcore.flow.batches import Batch
from ackcore.flow.choosers import (
    ByKey,
    Chooser,
    Idlest,
)
from ackcore.flow.consumers import ConsumerState, Fate, Lease
from ackcore.flow.controller import FlowController
from ackcore.flow.delay_target import DelayTarget
from ackcore.flow.limits import (
    Fixed,
    Limit,
    Pressure,
    RttThreshold,
)

__all__ = [
    "Batch",
    "ByKey",
    "Chooser",
    "ConsumerState",
    "DelayTarget",
    "Fate",
    "Fixed",
    "FlowController",
    "Idlest",
    "Lease",
    "Limit",
    "Pressure",
    "RttThreshold",
]
