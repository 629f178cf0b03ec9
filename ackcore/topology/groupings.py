"""Groupings: the assignment of tuples to the tasks of a bolt.

They are Storm's, with one difference. Spark cuts the source into partitions before a topology reads
it, so tuples are already spread over tasks, and a tuple that stays in its task costs nothing. Hence
*shuffle* moves tuples only to a bolt with a parallelism of its own, and *local-or-shuffle* never
moves them. The other groupings always do, because they prescribe a task.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Grouping:
    """The assignment of a stream's tuples to the tasks of a bolt."""

    name: ClassVar[str]

    def __str__(self) -> str:
        return self.name

    @property
    def keys(self) -> tuple[str, ...]:
        """The fields that decide the task of a tuple; empty for most groupings."""
        return ()

    def moves(self, parallelism: int | None) -> bool:
        """Return whether tuples may leave their task, if the bolt has the given parallelism."""
        return True


@dataclass(frozen=True, slots=True)
class Shuffle(Grouping):
    """The grouping that spreads tuples evenly over the bolt's tasks.

    It leaves tuples in their tasks if the bolt has no parallelism of its own.
    """

    name = "shuffle"

    def moves(self, parallelism: int | None) -> bool:
        """Return whether the bolt has a parallelism of its own."""
        return parallelism is not None


@dataclass(frozen=True, slots=True)
class LocalOrShuffle(Grouping):
    """The grouping that leaves each tuple in its task."""

    name = "local_or_shuffle"

    def moves(self, parallelism: int | None) -> bool:
        """Return False."""
        return False


@dataclass(frozen=True, slots=True)
class All(Grouping):
    """The grouping that sends a copy of each tuple to every task.

    The tuple's tree completes when all copies are acked.
    """

    name = "all"


@dataclass(frozen=True, slots=True)
class Global(Grouping):
    """The grouping that sends all tuples to one task."""

    name = "global"


@dataclass(frozen=True, slots=True)
class _Keyed(Grouping):
    fields: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(self.fields)})"

    @property
    def keys(self) -> tuple[str, ...]:
        """The fields of the grouping."""
        return self.fields


@dataclass(frozen=True, slots=True)
class Fields(_Keyed):
    """The grouping that sends tuples with equal values of some fields to the same task."""

    name = "fields"


@dataclass(frozen=True, slots=True)
class PartialKey(_Keyed):
    """The grouping that sends tuples with equal values of some fields to one of two tasks.

    It halves a hot key. The reader of the bolt must add up two partial results for each key.
    """

    name = "partial_key"
