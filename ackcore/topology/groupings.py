"""Groupings: which task of a bolt a tuple goes to.

They are Storm's, with one difference that Spark makes.  Spark has cut the source into partitions
before a topology sees it, so there is a spread of tuples over tasks to begin with, and staying
where it is costs a tuple nothing.  Hence *shuffle* moves tuples only to a bolt that was given a
parallelism of its own, and *local-or-shuffle* never does; the others always do, since where a
tuple goes is then the point of them.
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
        """The fields that decide where a tuple goes; most groupings look at none."""
        return ()

    def moves(self, parallelism: int | None) -> bool:
        """Whether tuples may leave the task they are in, for a bolt of that parallelism."""
        return True


@dataclass(frozen=True, slots=True)
class Shuffle(Grouping):
    """Spread tuples evenly over the bolt's tasks; left where they are if it has no parallelism."""

    name = "shuffle"

    def moves(self, parallelism: int | None) -> bool:
        """Only where a parallelism says that the spread is to be another than the source's."""
        return parallelism is not None


@dataclass(frozen=True, slots=True)
class LocalOrShuffle(Grouping):
    """Leave tuples in the task they are in."""

    name = "local_or_shuffle"

    def moves(self, parallelism: int | None) -> bool:
        """Never."""
        return False


@dataclass(frozen=True, slots=True)
class All(Grouping):
    """Send a copy of each tuple to every task; its tree closes when all copies are acked."""

    name = "all"


@dataclass(frozen=True, slots=True)
class Global(Grouping):
    """Send all tuples to one and the same task."""

    name = "global"


@dataclass(frozen=True, slots=True)
class _Keyed(Grouping):
    fields: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(self.fields)})"

    @property
    def keys(self) -> tuple[str, ...]:
        """The fields it was given."""
        return self.fields


@dataclass(frozen=True, slots=True)
class Fields(_Keyed):
    """Send tuples that agree in these fields to one task."""

    name = "fields"


@dataclass(frozen=True, slots=True)
class PartialKey(_Keyed):
    """Send tuples that agree in these fields to one of two tasks, so that a hot key is halved.

    Whoever reads the bolt must add up two partial results for each key.
    """

    name = "partial_key"
