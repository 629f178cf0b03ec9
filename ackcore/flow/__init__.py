"""Flow control: how many tuples each consumer may have outstanding, and which gets the next.

A law per consumer (`Limit`) follows the round-trip times of its acks, a `Chooser` picks among those
that have room, and a `FlowController` keeps both, with what failed and is to be sent again. No I/O,
and no clock but the one that is given.
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
