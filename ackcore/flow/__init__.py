"""Flow control: how many tuples each consumer may have outstanding, and which gets the next one.

Each consumer has a `Limit` that adapts to the round-trip times of its acks. A chooser selects among
the consumers with room: the idlest one, or one `ByKey`. A `FlowController` combines both, and keeps
failed items until they are sent again. No I/O; time comes only from the given clock.
"""

from ackcore.flow.choosers import ByKey
from ackcore.flow.controller import FlowController
from ackcore.flow.flow_batches import Batch
from ackcore.flow.limits import DelayTarget, Fixed, Limit, RttThreshold

__all__ = ["Batch", "ByKey", "DelayTarget", "Fixed", "FlowController", "Limit", "RttThreshold"]
