"""The money that the calls of a bolt may cost, and the share of a task."""

from __future__ import annotations

from ackcore.calls.outcomes import Unavailable
from ackcore.calls.usage import KeySums

#: Seconds until a tuple is tried again, if no money was left when its micro-batch began.
_WAIT_S = 60.0
#: A share is spent when no more than this part of it is left: sums of floats are rounded.
_ROUNDING = 1e-9


class Budget:
    """The share that one task has of the money left for a bolt's calls.

    ``bolt``: the bolt's name. ``limit``: the bolt's ``cost_per_run``. ``before``: the cost of the
    bolt's calls in earlier micro-batches. ``tasks``: the number of tasks of the bolt, which have
    equal shares of the rest.

    Attributes: ``spent``: the cost of this micro-batch's calls in the task. ``by_key``: the same
    cost by key; the key is "" for a limit without keys.
    """

    def __init__(self, bolt: str, limit: float, before: float, tasks: int) -> None:
        self._bolt, self._limit, self._before = bolt, limit, before
        self._share = max(0.0, limit - before) / tasks
        self.spent = 0.0
        self.by_key = KeySums()

    def add(self, cost: float, key: str) -> None:
        """Add the cost of a call."""
        self.spent += cost
        self.by_key.add(key, cost)

    def refusal(self) -> Unavailable | None:
        """Return the error of tuples that the task must not call, or None while money is left."""
        if self.spent < self._share * (1 - _ROUNDING):
            return None
        text = (
            f"not called: of cost_per_run={self._limit:g} of bolt {self._bolt!r}, "
            f"{self._before:g} was spent before this micro-batch"
        )
        if not self._share:
            return Unavailable(
                f"{text}, so nothing is left; start again with a higher cost_per_run",
                after_s=_WAIT_S,
            )
        return Unavailable(
            f"{text}, and this task has spent {self.spent:g} of its share of {self._share:g}; the "
            "next micro-batch uses what other tasks left. When all is spent, start again with a "
            "higher cost_per_run"
        )
