"""The planned spouts of a topology that has several kinds of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from ackcore.spark.checkpoint.decisions import BatchDecision, Plan
from ackcore.spark.engine.setup import Backlog, InputFrame, Obstacle, PlannedRows
from ackcore.spark.planned.planned_source import SourceError

T = TypeVar("T")


class JoinedRows(PlannedRows):
    """Several groups of planned spouts as one."""

    def __init__(self, parts: Sequence[PlannedRows]) -> None:
        self._parts = parts

    def plan(self, number: int, parent: Plan | None) -> Mapping[str, Any]:
        """See `PlannedRows.plan`."""
        found: dict[str, Any] = {}
        for part in self._parts:
            found |= part.plan(number, parent)
        return found

    def most_retries(self) -> int | None:
        """See `PlannedRows.most_retries`."""
        bounds = [part.most_retries() for part in self._parts]
        return min((bound for bound in bounds if bound is not None), default=None)

    def inputs(self, plan: Plan) -> list[InputFrame]:
        """See `PlannedRows.inputs`."""
        return [one for part in self._parts for one in part.inputs(plan)]

    def mended(self, plan: Plan) -> Plan:
        """See `PlannedRows.mended`."""
        for part in self._parts:
            plan = part.mended(plan)
        return plan

    def replaced(self, plan: Plan) -> str | None:
        """See `PlannedRows.replaced`."""
        return _first(part.replaced(plan) for part in self._parts)

    def unread(self, error: Exception) -> str | None:
        """See `PlannedRows.unread`."""
        return _first(part.unread(error) for part in self._parts)

    def way_out(self, plan: Plan, said: str) -> str:
        """See `PlannedRows.way_out`."""
        return next(filter(None, (part.way_out(plan, said) for part in self._parts)), "")

    def obstacle(self, plan: Plan) -> Obstacle | None:
        """See `PlannedRows.obstacle`."""
        return _first(part.obstacle(plan) for part in self._parts)

    def backlogs(self, plan: Plan) -> Mapping[str, Backlog]:
        """See `PlannedRows.backlogs`."""
        return {name: one for part in self._parts for name, one in part.backlogs(plan).items()}

    def done(self, plan: Plan, decision: BatchDecision) -> Mapping[str, int]:
        """See `PlannedRows.done`."""
        lag: dict[str, int] = {}
        for part in self._parts:
            lag |= part.done(plan, decision)
        return lag

    def has_new(self) -> bool:
        """See `PlannedRows.has_new`. Raises an error of a part only if no part has new rows."""
        return any_of([part.has_new for part in self._parts])

    @property
    def is_through(self) -> bool:
        """See `PlannedRows.is_through`."""
        return all(part.is_through for part in self._parts)

    @property
    def is_behind(self) -> bool:
        """See `PlannedRows.is_behind`."""
        return any(part.is_behind for part in self._parts)

    def reaching_ends(self) -> Callable[[], bool]:
        """See `PlannedRows.reaching_ends`."""
        found = [part.reaching_ends() for part in self._parts]
        return lambda: all(reached() for reached in found)

    def close(self) -> None:
        """See `PlannedRows.close`."""
        super().close()
        for part in self._parts:
            part.close()


def any_of(looks: Sequence[Callable[[], bool]]) -> bool:
    """Return whether any look finds new rows; raise an error of a look only if none does.

    `SourceError` is raised at once.
    """
    errors = []
    for look in looks:
        try:
            if look():
                return True
        except SourceError:
            raise
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return False


def _first(found: Iterable[T | None]) -> T | None:
    return next((one for one in found if one is not None), None)
