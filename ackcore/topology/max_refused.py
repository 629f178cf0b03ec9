"""The limit on rows of a micro-batch that a sink may refuse."""

from __future__ import annotations

#: Each refused row costs some statements in a transaction, or some calls of the sink.
MAX_REFUSED = 10_000


def check_max_refused(limit: int) -> int:
    """Return the argument ``max_refused`` of a sink, or raise TypeError or ValueError."""
    if not isinstance(limit, int) or isinstance(limit, bool):
        raise TypeError(f"max_refused must be an int, got {type(limit).__name__}")
    if limit < 0:
        raise ValueError(f"max_refused must be at least 0, got {limit}")
    return limit
