"""A status line shown between micro-batches, so that a long run does not look hung."""

from __future__ import annotations

from ackcore.cli.reporting import span_of
from ackcore.spark.inspect.status import Activity

#: Where there is no terminal, what it is at is printed if nothing else was for so long.
QUIET_S = 10.0


def described(activity: Activity | None, tasks: str = "") -> str:
    """Describe the activity of a run.

    Parameters
    ----------
    activity : Activity or None
        None before its first micro-batch.
    tasks : str, default ""
        The number of Spark's tasks that have ended.
    """
    if activity is None:
        return "starting"
    way = activity.under_way
    if way is not None:
        parts = [f"micro-batch {way.number} runs"]
        if way.decided:
            parts = [f"micro-batch {way.number} is decided, sinks have their turn"]
        parts.append(span_of(max(0, activity.at_ms - way.planned_ms)))
        if way.due:
            parts.append(f"{way.due:,} records again")
        if way.crashes:
            parts.append(f"{way.crashes} runs crashed")
        if tasks and not way.decided:
            parts.append(tasks)
        return ", ".join(parts)
    if not activity.waiting:
        return "waits for new records"
    due = activity.next_due_ms
    if due is None:
        return f"{activity.waiting:,} sent again have not had their turn"
    when = "" if due <= activity.at_ms else f" in {span_of(due - activity.at_ms)}"
    return f"{activity.waiting:,} wait for a retry, the next is due{when}"


class Quiet:
    """Detects that nothing was printed for a while.

    Parameters
    ----------
    now_s : float
        The time of a monotonic clock.
    """

    def __init__(self, now_s: float):
        self._began = self._last = now_s

    def printed(self, now_s: float) -> None:
        """Note that something was printed."""
        self._last = now_s

    def line(self, now_s: float, text: str) -> str | None:
        """Return the line to print now, if any."""
        if now_s - self._last < QUIET_S:
            return None
        self._last = now_s
        return f"after {span_of(1000 * (now_s - self._began))}: {text}"
