"""The inputs and results of a test of a topology."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from ackcore._error_hints import Unquoted, counted

if TYPE_CHECKING:
    import pyarrow as pa

    from ackcore.spark.engine.progress import Counts, Progress

#: A row of a spout or a sink.
Row = dict[str, Any]
_V = TypeVar("_V")
#: The tuples at which a bolt's task dies.
Kill = int | Collection[int] | Callable[[Row], bool]


class Source:
    """The source of a spout in a test: it has only a schema; the rows are an argument of `run`.

    Parameters
    ----------
    schema : pyarrow.Schema
        The names and types of the rows' columns.

    Raises
    ------
    TypeError
        If it is not a schema.
    """

    def __init__(self, schema: pa.Schema) -> None:
        if not hasattr(schema, "names") or not hasattr(schema, "field"):
            raise TypeError(
                f"schema of Source() must be a pyarrow.Schema, got {type(schema).__name__}; write "
                "pyarrow.schema([('line', pyarrow.string())])"
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
    """A dead record.

    Attributes
    ----------
    spout, message_id : str
        The record's spout and message id.
    attempts : int
        The number of its executions.
    component, error_type, error_message : str
        The bolt or spout that failed it, or the table that it was too late for, and the reason.
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
        return (
            f"{self.message_id} of {self.spout} after {counted(self.attempts, 'attempt')}, "
            f"{self.error_type} in {self.component}: {_short(self.error_message)}; "
            f"{_short(self.payload)}"
        )


class ByName(dict[str, _V]):
    """Results by the names of sinks or tables; a KeyError lists the names."""

    def __missing__(self, name: str) -> NoReturn:
        names = ", ".join(map(repr, self)) or "none"
        raise KeyError(Unquoted(f"the run has no results named {name!r}; the names are {names}"))


@dataclass(frozen=True, repr=False)
class TopologyRun:
    """The result of `run`; ``print`` shows it.

    Attributes
    ----------
    outputs : mapping from str to list of dict
        The rows of each sink, in the order of micro-batches.  Within a micro-batch they are in the
        order of tasks, which is the same in each test run, but not guaranteed on Spark.
    tables : mapping from str to pyarrow.Table
        By sink, the same rows as a table; and by table of the topology, its rows at the end of the
        run, in no particular order.
    dead : list of DeadLetter
        The dead records in the order of their deaths.
    counts : Counts
        The counts at the end, in total and by spout: ``records``, ``acked``, ``dead``, ``retried``
        and others.
    attempts : mapping from str to list of int
        By tracked spout, the number of executions of each of its ``rows``, in their order.
    executions : mapping from str to int
        The number of tuples that each bolt received, including those received again after a kill.
    progress : list of Progress
        The report of each micro-batch.
    untracked_failures : int
        The number of failed tuples that belong to no record.
    elapsed_s : float
        The simulated time in seconds that the run waited for retries.
    kills : int
        The number of killed tasks.
    """

    outputs: Mapping[str, list[Row]]
    tables: Mapping[str, pa.Table]
    dead: list[DeadLetter]
    counts: Counts
    attempts: Mapping[str, list[int]]
    executions: Mapping[str, int]
    progress: list[Progress] = field(repr=False, compare=False)
    untracked_failures: int = 0
    elapsed_s: float = 0.0
    kills: int = 0

    def check(self, *, dead: int = 0) -> TopologyRun:
        """Return this object if the run went as expected; otherwise raise an error that shows it.

        Parameters
        ----------
        dead : int, default 0
            The expected number of dead records.

        Raises
        ------
        AssertionError
            If the counts do not balance, a record waits for a retry, the number of dead records is
            not ``dead``, or an untracked tuple failed.
        """
        counts = self.counts
        wrong = []
        if not counts.balanced:
            wrong.append("the counts do not balance")
        if counts.waiting:
            wrong.append(f"{counted(counts.waiting, 'record waits', 'records wait')} for a retry")
        if counts.dead != dead:
            wrong.append(
                f"{counted(counts.dead, 'record is', 'records are')} dead, and dead={dead} was "
                "expected"
            )
        if self.untracked_failures:
            wrong.append(f"{counted(self.untracked_failures, 'untracked tuple')} failed")
        if wrong:
            raise AssertionError(f"{'; '.join(wrong)}\n{self}")
        return self

    def __repr__(self) -> str:
        return f"<TopologyRun of {_counts_text(self.counts)}>"

    def __str__(self) -> str:
        batches = counted(len(self.progress), "micro-batch", "micro-batches")
        lines = [f"{_counts_text(self.counts)}, in {batches}"]
        if self.elapsed_s:
            lines[0] += f" and {self.elapsed_s:g} s of simulated time"
        if self.kills:
            lines[0] += f"; {counted(self.kills, 'task')} died"
        lines += [
            f"  spout {name}: {_counts_text(one)}" for name, one in self.counts.spouts.items()
        ]
        duplicates = sum(progress.duplicates for progress in self.progress)
        if duplicates:
            lines.append(
                f"  duplicates: {counted(duplicates, 'record was', 'records were')} not run"
            )
        unmet = Counter[tuple[str, str]]()
        for progress in self.progress:
            for component, condition, tuples in progress.unmet():
                unmet[component, condition] += tuples
        lines += [
            f"  expectation {condition!r} of {component}: not met by {counted(tuples, 'tuple')}"
            for (component, condition), tuples in unmet.items()
        ]
        # Those of dedup were not declared.
        made = {f"{name}.dedup" for name in self.counts.spouts}
        lines += [
            f"  bolt {name}: took {tuples}"
            for name, tuples in self.executions.items()
            if name not in made
        ]
        lines += [
            f"  sink {name}: {counted(len(rows), 'row')}" for name, rows in self.outputs.items()
        ]
        lines += [
            f"  table {name}: {counted(len(table), 'row')}"
            for name, table in self.tables.items()
            if name not in self.outputs and name not in made
        ]
        if self.untracked_failures:
            lines.append(f"  untracked: {counted(self.untracked_failures, 'tuple')} failed")
        lines += [f"  dead: {letter}" for letter in self.dead[:_SHOWN]]
        if len(self.dead) > _SHOWN:
            lines.append(f"  dead: {len(self.dead) - _SHOWN} more")
        return "\n".join(lines)


#: The maximum number of dead letters that are printed, and of characters of a text.
_SHOWN, _CHARS = 10, 200


def _counts_text(figures: Any) -> str:
    return (
        f"{counted(figures.records, 'record')}: {figures.acked} acked, {figures.dead} dead, "
        f"{figures.waiting} waiting, {figures.retried} executed again"
    )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= _CHARS else f"{text[: _CHARS - 1]}…"
