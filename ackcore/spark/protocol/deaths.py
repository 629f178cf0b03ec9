"""What records died of, in a line for the log; and how many may, before a run counts as failed.

These are records that were given up, and are DEAD.  ``Plan.deaths`` counts something else: runs of
a micro-batch in which a process died, be it a worker, an executor or the driver.
"""

from __future__ import annotations

import logging
import operator
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import pyarrow as pa

from ackcore.spark.base.schemas import REASON
from ackcore.spark.protocol.progress import Books
from ackcore.topology.tuples import Reason

_log = logging.getLogger("ackcore")

#: Kinds of deaths that a line names, and characters of each one's message.
_NAMED, _MESSAGE_CHARS = 3, 160


class TooManyDead(RuntimeError):
    """More records of a run died than `run_batch` was allowed; all of it is on record.

    Parameters
    ----------
    message : str
        How many died, of what, and the way out.
    books : Books
        The books of the run, which are closed: every record is ACKED or DEAD.
    """

    def __init__(self, message: str, books: Books) -> None:
        super().__init__(message)
        self.books = books

    def __reduce__(self) -> tuple[type[TooManyDead], tuple[str, Books]]:
        return TooManyDead, (str(self), self.books)


class Cause(NamedTuple):
    """Deaths by one type of error in one component."""

    component: str
    error_type: str
    message: str  # the most frequent one
    messages: int
    deaths: int

    def __str__(self) -> str:
        message = " ".join(self.message.split())
        if len(message) > _MESSAGE_CHARS:
            message = message[: _MESSAGE_CHARS - 3] + "..."
        more = f", and {self.messages - 1} other messages" if self.messages > 1 else ""
        return f"{self.deaths} in {self.component!r} of {self.error_type} ({message}{more})"


def causes(reasons: Iterable[tuple[Reason, int]]) -> list[Cause]:
    """Sum deaths up by component and type of error.

    Parameters
    ----------
    reasons : iterable of (Reason, int)
        Why records died, and how many of each.

    Returns
    -------
    list of Cause
        The most frequent first.
    """
    messages: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for reason, deaths in reasons:
        messages[reason.component, reason.type][reason.message] += deaths
    found = [
        Cause(*kind, max(sorted(texts), key=texts.__getitem__), len(texts), texts.total())
        for kind, texts in messages.items()
    ]
    return sorted(found, key=lambda cause: (-cause.deaths, cause))


def reasons_of(dead: Mapping[str, pa.Table]) -> list[tuple[Reason, int]]:
    """Return why the dead of a micro-batch died, and how many of each reason."""
    return [
        (Reason.decode(one["values"].as_py()), one["counts"].as_py())
        for table in dead.values()
        for one in table[REASON].value_counts()
    ]


def _records(n: int) -> str:
    return f"{n} record{'s' * (n != 1)}"


def _told(found: list[Cause]) -> str:
    told = "; ".join(map(str, found[:_NAMED]))
    rest = sum(cause.deaths for cause in found[_NAMED:])
    return told + (f"; {rest} of other errors" if rest else "")


def _look(checkpoint: str | os.PathLike[str]) -> str:
    return f"ackcore.spark.dead_letters({os.fspath(checkpoint)!r}) shows each with its payload"


def warn_of_micro_batch(
    number: int, dead: Mapping[str, pa.Table], checkpoint: str | os.PathLike[str]
) -> None:
    """Log one line about the dead of a micro-batch."""
    found = causes(reasons_of(dead))
    died = _records(sum(cause.deaths for cause in found))
    _log.warning("micro-batch %d: %s died: %s. %s", number, died, _told(found), _look(checkpoint))


def check_max_dead(max_dead: object) -> None:
    """Refuse a limit that is none.

    Raises
    ------
    TypeError
        If it is not a number or None.
    ValueError
        If it is below 0, or a share that is not in (0, 1].
    """
    if max_dead is None:
        return
    must = "max_dead must be a number of records (an int >= 0), a share of them (a float in (0, 1])"
    if isinstance(max_dead, float):
        if not 0 < max_dead <= 1:
            raise ValueError(f"{must} or None for no limit, got {max_dead!r}")
        return
    if isinstance(max_dead, bool) or not hasattr(max_dead, "__index__"):
        got = f"{type(max_dead).__name__} {max_dead!r}"
        raise TypeError(f"{must} or None for no limit, got {got}")
    if operator.index(max_dead) < 0:
        raise ValueError(f"{must} or None for no limit, got {max_dead!r}")


def close_run(
    books: Books,
    reasons: Iterable[tuple[Reason, int]],
    checkpoint: str | os.PathLike[str],
    max_dead: float | None,
) -> Books:
    """Say what died in a run that has ended; fail if it is too much.

    Parameters
    ----------
    books : Books
        At the end.
    reasons : iterable of (Reason, int)
        Of the dead letters that were not sent again; read only if there are dead.
    checkpoint : path
        The run's.
    max_dead : int, float or None
        As `run_batch` has it.

    Returns
    -------
    Books
        Those.

    Raises
    ------
    TooManyDead
        If more died than ``max_dead``, or all of them and it is not None.
    """
    if not books.dead:
        return books
    # Not from the books: a letter that was sent twice may be ACKED twice.
    found = causes(reasons)
    died = sum(cause.deaths for cause in found)
    if not died:
        return books
    told, look = _told(found), _look(checkpoint)
    _log.warning("%d of %s died: %s. %s", died, _records(books.records), told, look)
    if max_dead is None:
        return books
    every = died == books.records
    limit = max_dead * books.records if isinstance(max_dead, float) else max_dead
    if died <= limit and not every:
        return books
    who = f"all of {_records(died)}" if every else f"{died} of {_records(books.records)}"
    allowed = "" if every else f", and max_dead is {max_dead}"
    raise TooManyDead(
        f"{who} died{allowed}: {told}. The run has ended and all of it is on record: {look}. When "
        "the cause is mended, ackcore.spark.replay() and another run_batch() send them through "
        "again; max_dead=None lets such a run pass",
        books,
    )
