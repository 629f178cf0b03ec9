"""A contest: aged contestants take the same stretches of a stream in turn, and are checked."""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ackcore._records import Outcomes
from bench.streams import CALL, Columns, Stream, age, ledger_class

TURN = 128 * CALL  # rows, in full: a million, so that the caches have filled again

Interleaved = Callable[..., dict[str, list[float]]]


class Contestant(ABC):
    """Something that applies records of a stream.

    ``prepare`` is not timed, ``run`` is, and ``check`` then proves that the run did the work.
    ``share`` of a turn's calls are enough for a contestant that is much slower than the others.
    The first ``lead_in`` part of a turn is not timed: the caches, full of what the others' turns
    left there, fill again. Without it the quickest would suffer most.
    """

    name: str
    stream: Stream
    share: float = 1.0
    lead_in: float = 0.2

    def rows(self, turn: int, calls: int) -> slice:
        """The rows of a turn: they follow those of the turn before."""
        length = round(calls * self.share) * CALL
        return slice(self.stream.aged + turn * length, self.stream.aged + (turn + 1) * length)

    def age(self) -> None:
        """Go through the first ``stream.aged`` rows, in turns of the usual length."""
        for rows in self.stream.slices(slice(0, self.stream.aged), TURN):
            self.check(rows, self.run(self.prepare(rows)))

    def prepare(self, rows: slice) -> Any:
        """Return the arguments of `run` for these rows."""
        return rows

    @abstractmethod
    def run(self, prepared: Any) -> Any:
        """Apply the rows."""

    @abstractmethod
    def check(self, rows: slice, result: Any) -> None:
        """Assert that the result is what the stream's maker knows."""

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Give back what the garbage collector does not."""


class LedgerContestant(Contestant):
    """A Ledger of ours, fed batches of one size.

    Nothing but the last outcomes are kept, as by a user who is done with them: to keep them all
    would time the page faults of new memory. So the last ones are compared in full, and the number
    of trees that are left; while ageing, all are compared.
    """

    def __init__(
        self,
        stream: Stream,
        backend: str = "_native",
        name: str = "ackcore",
        size: int = CALL,
        **arguments: Any,
    ) -> None:
        self.ledger = ledger_class(backend)(**arguments)
        self.stream, self.name, self.size = stream, name, size

    def age(self) -> None:
        """Fill and age, call by call."""
        age(self.ledger, self.stream)

    def prepare(self, rows: slice) -> list[Columns]:
        """Views of the stream's columns, call by call."""
        return [self.stream.columns(piece) for piece in self.stream.slices(rows, self.size)]

    def run(self, prepared: list[Columns]) -> Outcomes:
        """Apply batch after batch: what the figures are about."""
        apply = self.ledger.apply
        for columns in prepared:
            outcomes = apply(*columns)
        return outcomes

    def check(self, rows: slice, result: Outcomes) -> None:
        """The last outcomes, and what is pending."""
        self.stream.batch(self.stream.slices(rows, self.size)[-1]).check(result)
        assert len(self.ledger) == self.stream.pending(rows.stop)


class Twin(LedgerContestant):
    """The plain-Python ledger.

    Its turns have a quarter of the calls. They are long enough still; were ours as short, most of
    our turn would go by while the caches fill again with what the twin's drove out of them.
    """

    share = 0.25

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream, "_reference", "twin")


@dataclass
class Figures:
    """Seconds a record, turn by turn, of each contestant."""

    in_flight: int
    seconds: dict[str, list[float]]

    def rate(self, name: str) -> float:
        """Millions of records a second, at the median."""
        return 1e-6 / statistics.median(self.seconds[name])

    def ratios(self, slow: str, fast: str = "ackcore") -> list[float]:
        """How many times faster one is than the other, turn by turn."""
        pairs = zip(self.seconds[slow], self.seconds[fast], strict=True)
        return [slower / faster for slower, faster in pairs]

    def label(self, slow: str, fast: str = "ackcore") -> str:
        """Both, with their rates, as a row of the summary names them."""
        rates = f"{self.rate(fast):.3g} / {self.rate(slow):.3g} M records/s"
        return f"{self.in_flight:,} in flight: {fast} / {slow} ({rates})"


def hold(
    interleaved: Interleaved,
    contestants: Sequence[Contestant],
    turns: int,
    calls: int,
    clock: Callable[[], float] = time.thread_time,
) -> Figures:
    """Age all, let them run in turn, and check every result.

    A turn has ``calls`` calls of 8192, of which the first are a lead-in.
    """
    at_work = {each.name: each for each in contestants}
    turns_of = {name: iter(range(turns)) for name in at_work}
    rows: dict[str, slice] = {}
    prepared: dict[str, Any] = {}
    results: dict[str, Any] = {}
    lengths = {}

    def before(name: str) -> None:
        each = at_work[name]
        whole = each.rows(next(turns_of[name]), calls)
        lead = round((whole.stop - whole.start) // CALL * each.lead_in) * CALL
        rows[name] = slice(whole.start + lead, whole.stop)
        lengths[name] = rows[name].stop - rows[name].start
        prepared[name] = each.prepare(rows[name])
        if lead:
            first = slice(whole.start, whole.start + lead)
            each.check(first, each.run(each.prepare(first)))

    def turn(name: str) -> object:
        results[name] = at_work[name].run(prepared[name])
        return results[name]

    def after(name: str) -> None:
        del prepared[name]
        at_work[name].check(rows[name], results.pop(name))

    for each in contestants:
        each.age()
    works = {name: partial(turn, name) for name in at_work}
    seconds = interleaved(works, turns, clock, before, after)
    for each in contestants:
        each.close()
    per_record = {n: [taken / lengths[n] for taken in each] for n, each in seconds.items()}
    return Figures(contestants[0].stream.in_flight, per_record)


def same_rows(found: np.ndarray, expected: np.ndarray) -> None:
    """Assert that two columns hold the same ids, in whatever order."""
    np.testing.assert_array_equal(np.sort(found), np.sort(expected))
