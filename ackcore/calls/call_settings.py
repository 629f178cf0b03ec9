"""The checked settings of a task's calls: concurrency, rate, time-outs and retries."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ackcore._columns import as_count, count_or_none, positive, real
from ackcore.calls.outcomes import Reject, Retry, is_marked_final
from ackcore.calls.rate_limits import RateLimit, checked_concurrency, checked_limit
from ackcore.flow import DelayTarget, Limit

#: The number of threads of a plain function whose `max_concurrency` is no number.
DEFAULT_THREADS = 32
#: The largest number of threads.  More would be a mistake: each has its own stack.
MAX_THREADS = 4096
#: Errors that show that an endpoint is down, whatever the request.
NO_CONNECTION = (ConnectionError, TimeoutError, socket.gaierror)
#: Longer times are refused as mistakes.
_MOST_S = 1e9


@dataclass(frozen=True)
class CallSettings:
    """The checked settings of the calls of one task.

    `ackcore.topology.AsyncBolt` describes settings of the same names. In addition:
    ``timeout_s``: a plain function cannot be cancelled, and keeps its thread until it returns.
    ``endpoints``: the function receives one as its second argument; None for a single endpoint,
    which it does not receive. ``max_attempts``: an item whose call raises one of ``retry_on`` is
    called again in the task, up to this number of such failures; a `Retry` is not counted.
    ``reject``: permanent errors besides `Reject`, even if ``retry_on`` names a base class.

    Raises TypeError if a setting is not of its type, and ValueError if it is out of range.
    ``endpoints`` and a limit by key together raise ValueError, too. ``retry_on`` and ``reject`` are
    not checked.
    """

    max_concurrency: int | Callable[[], Limit] = DelayTarget
    timeout_s: float | None = None
    limit: RateLimit | None = None
    endpoints: tuple[Hashable, ...] | None = None
    max_attempts: int = 1
    retry_on: tuple[type[BaseException], ...] = ()
    reject: tuple[type[BaseException], ...] = ()
    wait_in_task_s: float = 5.0
    breaker_failures: int | None = 10
    breaker_reset_s: float = 5.0

    def __post_init__(self) -> None:
        if not callable(self.max_concurrency):
            made = checked_concurrency(self.max_concurrency, "max_concurrency", "endpoint")
            self._set("max_concurrency", made)
        if self.timeout_s is not None:
            self._set("timeout_s", positive(self.timeout_s, "timeout_s", _MOST_S))
        checked_limit(self.limit)
        reset_s = positive(self.breaker_reset_s, "breaker_reset_s", _MOST_S, "seconds")
        self._set("breaker_reset_s", reset_s)
        self._set("wait_in_task_s", _wait(self.wait_in_task_s))
        self._set("max_attempts", as_count(self.max_attempts, "max_attempts", 1))
        self._set("breaker_failures", count_or_none(self.breaker_failures, "breaker_failures", 1))
        self._set("endpoints", _endpoints(self.endpoints))
        if self.endpoints is not None and self.limit is not None and self.limit.per is not None:
            raise ValueError(
                "endpoints must be left out if limit has a key (per): each key has a window and a "
                "breaker of its own; choose the endpoint in the function, by the key"
            )

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def thread_count(self) -> int:
        """Return the number of threads for a plain function: `max_concurrency` or 4096 at most, and
        32 if it is no number.
        """
        if isinstance(self.max_concurrency, int):
            return min(self.max_concurrency, MAX_THREADS)
        return DEFAULT_THREADS

    def is_final(self, error: BaseException) -> bool:
        """Return whether an error is permanent: a `Reject`, one of ``reject``, or marked final."""
        return isinstance(error, (Reject, *self.reject)) or is_marked_final(error)

    def is_of_call(self, error: BaseException) -> bool:
        """Return whether an error concerns the whole call, even if it has several items: a `Retry`,
        one of ``retry_on``, a time-out or a failed connection, unless it is final.
        """
        counts = (Retry, *NO_CONNECTION, *self.retry_on)
        return isinstance(error, counts) and not self.is_final(error)


def _wait(given: Any) -> float:
    seconds = real(given, "wait_in_task_s", "seconds")
    if not seconds >= 0:
        raise ValueError(f"wait_in_task_s must be at least 0, got {given}; with 0 no item waits")
    return math.inf if seconds > _MOST_S else seconds


def _endpoints(given: Any) -> tuple[Hashable, ...] | None:
    if given is None:
        return None
    if isinstance(given, (str, bytes, Iterator)) or not isinstance(given, Iterable):
        # Each task reads a bolt's endpoints again, and an iterator would be empty by then.
        way_out = "pass list(...)" if isinstance(given, Iterator) else "put it in brackets"
        raise TypeError(
            f"endpoints must be a list, got {type(given).__name__} {given!r}; {way_out}"
        )
    endpoints = tuple(given)
    if not endpoints:
        raise ValueError("endpoints must not be empty; omit it for a single endpoint")
    for endpoint in endpoints:
        try:
            hash(endpoint)
        except TypeError:
            raise TypeError(
                f"endpoints must be hashable, got {type(endpoint).__name__} {endpoint!r}; "
                "use URLs or names"
            ) from None
    twice = [endpoint for endpoint in set(endpoints) if endpoints.count(endpoint) > 1]
    if twice:
        raise ValueError(f"endpoints must differ, got {twice[0]!r} more than once; name each once")
    return endpoints
