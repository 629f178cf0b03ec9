"""Calls to external services: many at once within one task, and the outcome of each.

`Calls` makes the calls: in a window that adapts to the service's speed, with a rate limit,
time-outs, short waits and a breaker. It yields the outcomes in the order of the items. A call
raises `Retry`, `Unavailable` or `Reject` to decide whether its record is retried.
"""

from ackcore.calls.outcomes import Reject, Retry, Unavailable
from ackcore.calls.rate_limits import RateLimit
from ackcore.calls.usage import used

__all__ = ["RateLimit", "Reject", "Retry", "Unavailable", "used"]
