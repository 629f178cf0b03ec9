"""The inputs and results of a test of a topology."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

    from ackcore.spark.protocol.progress import Books, Progress

#: Rows of a spout, or of a sink.
Row = dict[str, Any]
#: Which of the tuples that a bolt takes its task dies of.
Kill = int | Collection[int] | Callable[[Row], bool]


class Source:
    """The columns of a spout in a topology that is built without a DataFrame.

    Parameters
    ----------
    schema : pyarrow.Schema
        The schema of the rows that you pass to `run`.

    Raises
    ------
    TypeError
        If it is not a schema.
    """

    def __init__(self, schema: pa.Schema) -> None:
        if not hasattr(schema, "names") or not hasattr(schema, "field"):
            raise TypeError(
                f"schema must be a pyarrow.Schema, got {type(schema).__name__}; "
                "pyarrow.schema([('line', pyarrow.string())]) is one"
            )
        self.schema = schema

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        return list(self.schema.names)

    def __repr__(self) -> str:
        return f"Source({', '.join(self.columns)})"


@dataclass(frozen=True)
class DeadLetter:
    """A record that died.

    Attributes
    ----------
    spout, message_id : str
        The record.
    attempts : int
        The number of its executions.
    component, error_type, error_message : str
        The bolt or spout in which it died, and the reason.
    payload : dict
        The record as the spout received it.
    batch_id : int
        The micro-batch in which it died.
    """

    spout: str
    message_id: str
    attempts: int
    component: str
    error_type: str
    error_message: str
    payload: Row
    batch_id: int

    def __str__(self) -> str:
        times = "1 attempt" if self.attempts == 1 else f"{self.attempts} attempts"
        return (
            f"{self.message_id} of {self.spout} after {times}, {self.error_type} in "
            f"{self.component}: {_short(self.error_message)}; {_short(self.payload)}"
        )


@dataclass(frozen=True, repr=False)
class TopologyRun:
    """The outcome of a topology that `run` has run; ``print`` shows it.

    Attributes
    ----------
    outputs : mapping from str to list of dict
        By sink, the rows that it was given, in the order of micro-batches; within one their order
        is that of their tasks, which is always the same here, and promised nowhere else.
    tables : mapping from str to pyarrow.Table
        The same as tables.
    dead : list of DeadLetter
        In the order in which they died.
    books : Books
        At the end: ``records``, ``acked``, ``dead``, ``retried`` and others, of all and by spout.
    attempts : mapping from str to list of int
        By tracked spout, how often each of its rows was executed, in their order.
    executions : mapping from str to int
        By bolt, how many tuples it took, those again that a killed task had taken.
    progress : list of Progress
        Of each micro-batch.
    untracked_failures : int
        Tuples that failed and hang from no record.
    elapsed_ms : int
        How much simulated time passed, all of it in waiting for retries.
    kills : int
        How many tasks died.
    """

    outputs: Mapping[str, list[Row]]
    tables: Mapping[str, pa.Table]
    dead: list[DeadLetter]
    books: Books
    attempts: Mapping[str, list[int]]
    executions: Mapping[str, int]
    progress: list[Progress] = field(repr=False, compare=False)
    untracked_failures: int = 0
    elapsed_ms: int = 0
    kills: int = 0

    def check(self, *, dead: int = 0) -> TopologyRun:
        """Return the run if it went as expected; otherwise raise an error that contains its
        `print`.

        Parameters
        ----------
        dead : int, default 0
            The expected number of dead records.

        Raises
        ------
        AssertionError
            If the books do not balance, a record waits, another number died, or an untracked tuple
            failed.
        """
        books = self.books
        wrong = []
        if not books.balanced:
            wrong.append("the books do not balance")
        if books.waiting:
            wrong.append(f"{books.waiting} records wait")
        if books.dead != dead:
            wrong.append(f"{books.dead} records died, and {dead} were to")
        if self.untracked_failures:
            wrong.append(f"{self.untracked_failures} tuples failed that hang from no record")
        if wrong:
            raise AssertionError(f"{'; '.join(wrong)}\n{self}")
        return self

    def __repr__(self) -> str:
        return f"<TopologyRun of {_told(self.books)}>"

    def __str__(self) -> str:
        batches = len(self.progress)
        plural = "" if batches == 1 else "es"
        lines = [f"{_told(self.books)}, in {batches} micro-batch{plural}"]
        if self.elapsed_ms:
            lines[0] += f" and {self.elapsed_ms / 1000:g} s of simulated time"
        if self.kills:
            lines[0] += f"; {self.kills} tasks died"
        lines += [f"  spout {name}: {_told(one)}" for name, one in self.books.spouts.items()]
        lines += [f"  bolt {name}: took {tuples}" for name, tuples in self.executions.items()]
        lines += [f"  sink {name}: {len(rows)} rows" for name, rows in self.outputs.items()]
        if self.untracked_failures:
            lines.append(f"  untracked: {self.untracked_failures} tuples failed")
        lines += [f"  dead: {letter}" for letter in self.dead[:_SHOWN]]
        if len(self.dead) > _SHOWN:
            lines.append(f"  dead: {len(self.dead) - _SHOWN} more")
        return "\n".join(lines)


#: How many of the dead are printed, and how much of what a record says.
_SHOWN, _CHARS = 10, 200


def _told(figures: Any) -> str:
    """Say the figures of books, or of a spout's account."""
    return (
        f"{figures.records} records: {figures.acked} acked, {figures.dead} dead, "
        f"{figures.waiting} waiting, {figures.retried} executed again"
    )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= _CHARS else f"{text[: _CHARS - 1]}…"
