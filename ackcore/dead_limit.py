"""The limit on dead records, for topologies on Spark and `ackcore.kafka.Consumer`.

If more records die, the cause is probably outside the records.
"""

from __future__ import annotations

import operator
from collections import deque
from numbers import Real
from typing import Any, NamedTuple

from ackcore._error_hints import counted

#: The dead records from which on a ratio is checked: a source may begin with a few bad ones.
_FEW = 10


class TooManyDead(RuntimeError):
    """More records died than `max_dead` or `max_dead_ratio` allows.

    ``message``: the number of dead records, their causes, and the way out. ``counts``: the counts
    of a run on Spark that has ended, in which every record is ACKED or DEAD. For a stream, they are
    those after the micro-batch that exceeded the limit. For a `Consumer`, ``counts`` is None.
    ``limit``: the limit that was exceeded: ``"max_dead"`` or ``"max_dead_ratio"``. ``causes``: a
    tuple of the causes of death on Spark, the most frequent first; () for a `Consumer`.
    """

    def __init__(
        self,
        message: str,
        counts: Any = None,
        limit: str = "max_dead",
        causes: tuple[Any, ...] = (),
    ) -> None:
        super().__init__(message)
        self.counts = counts
        self.limit = limit
        self.causes = causes

    def __reduce__(self) -> tuple[type[TooManyDead], tuple[str, Any, str, tuple[Any, ...]]]:
        return TooManyDead, (str(self), self.counts, self.limit, self.causes)


class Excess(NamedTuple):
    """A limit that was exceeded: the argument of `DeadLimit` that sets it, and an error's text."""

    limit: str
    message: str


class DeadLimit:
    """The check of the number of dead records among those that ended, ACKED or DEAD.

    ``max_dead``: the number of records that may die. ``max_dead_ratio``: the share of the records
    that may die, from 0 to 1, checked from ten dead records on. With any share, also 1, the limit
    is exceeded if all of them died. ``window``: the dead are counted among the latest steps of
    `ended` in which at least this number of records ended; None for all steps.

    Raises TypeError or ValueError if a limit has another type or is out of range.

    Attributes: ``window``: the number of records, as given. ``excess``: the limit that was exceeded
    first; None if none was. It stays when later records meet the limit again.
    """

    def __init__(
        self,
        max_dead: int | None = None,
        max_dead_ratio: float | None = None,
        window: int | None = None,
    ) -> None:
        self._max_dead = _as_max_dead(max_dead)
        self._ratio = _as_ratio(max_dead_ratio)
        self.window = window
        #: Of each step in the window: records ACKED, dead, and dead that count for the ratio.
        self._steps: deque[tuple[int, int, int]] = deque()
        self._acked = self._dead = self._new_dead = 0
        self.excess: Excess | None = None

    def ended(self, acked: int, dead: int, new_dead: int | None = None) -> int:
        """Count the records that ended in one step, such as a micro-batch.

        ``acked``, ``dead``: the number of records that were ACKED, and that died. ``new_dead``: the
        number of the dead that count for the ratio; all of them by default.

        Returns the number of steps, the oldest first, that have left the window, so that the caller
        can drop its data about them; 0 without a window. With neither limit nothing is counted, and
        with a window each step leaves it at once.
        """
        if self._max_dead is None and self._ratio is None:
            return int(self.window is not None)  # no step is kept
        step = acked, dead, dead if new_dead is None else new_dead
        self._add(step, 1)
        left = 0
        if self.window is not None:
            self._steps.append(step)
            while self._acked + self._dead - sum(self._steps[0][:2]) >= self.window:
                self._add(self._steps.popleft(), -1)
                left += 1
        self.excess = self.excess or self.judge()
        return left

    def _add(self, step: tuple[int, int, int], sign: int) -> None:
        acked, dead, new_dead = step
        self._acked += sign * acked
        self._dead += sign * dead
        self._new_dead += sign * new_dead

    def judge(self, few: int = _FEW, since: str = " since this start") -> Excess | None:
        """Return the limit that the counted records exceed, or None. Changes nothing.

        ``few``: the number of dead records from which on the ratio is checked; at most the window.
        ``since``: the text after "records" in the message, unless there is a window.
        """
        if self.window is not None:
            few, since = min(few, self.window), " that ended last"
        acked, dead, limit = self._acked, self._dead, self._max_dead
        if limit is not None and dead > limit:
            among = counted(acked + dead, "record")
            return Excess("max_dead", f"{dead} of {among}{since} died, and max_dead is {limit}")
        dead, ratio = self._new_dead, self._ratio
        if ratio is None or dead < max(few, 1):
            return None
        if not acked:
            return Excess("max_dead_ratio", f"all of {counted(dead, 'record')}{since} died")
        # Divide; a product may be rounded wrong: 0.29 * 100 is less than 29.
        if dead / (acked + dead) <= ratio:
            return None
        among = counted(acked + dead, "record")
        return Excess(
            "max_dead_ratio", f"{dead} of {among}{since} died, and max_dead_ratio is {ratio:g}"
        )


def _as_max_dead(value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        way_out = "; a share of the records is max_dead_ratio" if isinstance(value, Real) else ""
        raise TypeError(
            "max_dead must be a number of records, an int of at least 0, or None for no limit, "
            f"got {type(value).__name__} {value!r}{way_out}"
        )
    if operator.index(value) < 0:
        raise ValueError(
            f"max_dead must be a number of records, at least 0, or None for no limit, got {value!r}"
        )
    return operator.index(value)


def _as_ratio(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(
            "max_dead_ratio must be a share of the records, from 0 to 1, or None for no limit, "
            f"got {type(value).__name__} {value!r}"
        )
    if not 0 <= float(value) <= 1:
        raise ValueError(
            "max_dead_ratio must be a share of the records, from 0 to 1, or None for no limit, "
            f"got {value!r}; a number of records is max_dead"
        )
    return float(value)
