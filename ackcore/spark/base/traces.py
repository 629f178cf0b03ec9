"""The trace of a record: the components that it passed, and the time in each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple


class Step(NamedTuple):
    """One call of a bolt with tuples of a record: its place, its time and the tuples in it."""

    component: str  # the bolt
    partition: int  # the task's partition
    rows: int  # the number of tuples of the record in the call
    started_ms: float  # the start of the call, in milliseconds since 1970 by the worker's clock
    took_s: float  # the duration of the whole call in seconds, with the tuples of other records
    call_rows: int  # the number of tuples of all records in the call; 0 for a flush


class RecordTrace(NamedTuple):
    """The trace of one record in one attempt.

    Attributes
    ----------
    spout, message_id : str
        The record's spout and message id.
    attempt : int
        The number of the attempt, from 0.
    outcome : str
        ``"ACKED"``, or the reason of the failure: component, type and message.
    steps : tuple of Step
        The steps in the order of their start.
    """

    spout: str
    message_id: str
    attempt: int
    outcome: str
    steps: tuple[Step, ...]

    @classmethod
    def of(cls, found: Iterable[Any]) -> RecordTrace:
        """Return the trace from its decoded JSON: a list of the five fields, and of each step's."""
        spout, message_id, attempt, outcome, steps = found
        return cls(spout, message_id, attempt, outcome, tuple(Step(*step) for step in steps))

    def __str__(self) -> str:
        way = ", ".join(f"{one.component} {1000 * one.took_s:.1f} ms" for one in self.steps)
        return f"{self.message_id}, attempt {self.attempt}: {way or 'no bolt'}; {self.outcome}"
