"""Calls to the outside: many at once within one task, and what is to become of each.

`Calls` makes them: in a window that follows the service's speed, at a rate, with time-outs, short
waits and a breaker, and yields their outcomes in the order of the items. `Retry`, `Unavailable` and
`Reject` are what a call raises to say what is to become of its record.
"""

from ackcore.calls.breaker import BreakerState
from ackcore.calls.calls import Calls
from ackcore.calls.errors import Reject, Retry, Unavailable
from ackcore.calls.outcomes import CallCounts, Outcome
from ackcore.calls.settings import CallSettings

__all__ = [
    "BreakerState",
    "CallCounts",
    "CallSettings",
    "Calls",
    "Outcome",
    "Reject",
    "Retry",
    "Unavailable",
]
