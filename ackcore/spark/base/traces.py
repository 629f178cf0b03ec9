"""The trace of a record: the components it went through, and the time in each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple


class Step(NamedTuple):
    """One call of a bolt in which a record had tuples.

    Attributes
    ----------
    component : str
        The bolt.
    partition : int
        Of the task.
    rows : int
        Tuples of the record in the call.
    started_ms : float
        When it began, in milliseconds since 1970 by the worker's clock.
    took_ms : float
        How long the call took, whatever else was in it.
    call_rows : int
        Tuples of all records in the call; 0 of a flush.
    """

    component: str
    partition: int
    rows: int
    started_ms: float
    took_ms: float
    call_rows: int


class RecordTrace(NamedTuple):
    """The way of one record in one attempt.

    Attributes
    ----------
    spout, message_id : str
        Which record.
    attempt : int
        Counted from 0.
    outcome : str
        ``"ACKED"``, or why it failed: component, type and message.
    steps : tuple of Step
        By when they began.
    """

    spout: str
    message_id: str
    attempt: int
    outcome: str
    steps: tuple[Step, ...]

    @classmethod
    def of(cls, found: Iterable[Any]) -> RecordTrace:
        """Read what JSON made of one."""
        spout, message_id, attempt, outcome, steps = found
        return cls(spout, message_id, attempt, outcome, tuple(Step(*step) for step in steps))

    def __str__(self) -> str:
        way = ", ".join(f"{one.component} {one.took_ms:.1f} ms" for one in self.steps)
        return f"{self.message_id}, attempt {self.attempt}: {way or 'no bolt'}; {self.outcome}"
