"""The money that the calls of a bolt may cost, and the share of a task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ackcore.calls.outcomes import Unavailable

#: Seconds until a tuple is tried again, if no money was left when its micro-batch began.
_WAIT_S = 60.0
#: A share is spent when no more than this part of it is left: sums of floats are rounded.
_ROUNDING = 1e-9
#: The most keys that a report names.
MOST_KEYS = 100
#: The key of a report that has the sum of the costs of all other keys.
OTHER_KEYS = "(other keys)"


def largest_costs(costs: Mapping[str, float]) -> dict[str, float]:
    """Return the `MOST_KEYS` largest costs by key, and the sum of the others as `OTHER_KEYS`."""
    others = costs.get(OTHER_KEYS, 0.0)
    named = sorted((-cost, key) for key, cost in costs.items() if key != OTHER_KEYS)
    found = {key: -cost for cost, key in named[:MOST_KEYS]}
    others -= sum(cost for cost, _ in named[MOST_KEYS:])
    return found | ({OTHER_KEYS: others} if others else {})


class Budget:
    """The share that one task has of the money left for a bolt's calls.

    Parameters
    ----------
    bolt : str
        The bolt's name.
    limit : float
        The bolt's ``cost_per_run``.
    before : float
        The cost of the bolt's calls in earlier micro-batches.
    tasks : int
        The number of tasks of the bolt, which have equal shares of the rest.

    Attributes
    ----------
    spent : float
        The cost of this micro-batch's calls in the task.
    by_key : Counter of str
        The same cost by key; the key is "" for a limit without keys.
    """

    def __init__(self, bolt: str, limit: float, before: float, tasks: int) -> None:
        self._bolt, self._limit, self._before = bolt, limit, before
        self._share = max(0.0, limit - before) / tasks
        self.spent = 0.0
        self.by_key = Counter[str]()

    def add(self, cost: float, key: str) -> None:
        """Add the cost of a call."""
        self.spent += cost
        self.by_key[key] += cost  # type: ignore[assignment]  # costs are floats

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
