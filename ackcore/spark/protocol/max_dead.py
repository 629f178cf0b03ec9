"""The causes of deaths, in a log line, and the limit on dead records.

A record dies: it is given up, and DEAD.  A run crashes, which ``Plan.crashes`` counts, and
`ackcore.spark.protocol.suspects` concludes from.
"""

from __future__ import annotations

import logging
import operator
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, NoReturn

import pyarrow as pa
import pyarrow.compute as pc

from ackcore._records import Int64s
from ackcore.spark.base.reason_columns import DEATHS, parts
from ackcore.spark.base.schemas import FIRST_MS, REASON
from ackcore.spark.checkpoint.dead import dead_of
from ackcore.spark.protocol.progress import Books

_log = logging.getLogger("ackcore")

#: Kinds of deaths that a line names, and characters of each one's message.
_NAMED, _MESSAGE_CHARS = 3, 160
#: So many reasons, or as many as are known, are put together at a time.
_TOGETHER = 1 << 12


#: A share is judged from so many dead on in a stream, which may begin with a few bad records.
_FEW = 10


class TooManyDead(RuntimeError):
    """More records died than `run_batch` or `start` was allowed; all of it is on record.

    Parameters
    ----------
    message : str
        How many died, of what, and the way out.
    books : Books
        Of a run that has ended: every record is ACKED or DEAD.  Of a stream, after the micro-batch
        that was one too many; what waits for a retry goes on at the next start.
    limit : str, default "max_dead"
        What was exceeded: ``"max_dead"``, ``"max_dead_window"`` or ``"max_dead_in_a_row"``.
    causes : tuple of Cause, default ()
        What those died of that counted, the most frequent first.
    """

    def __init__(
        self,
        message: str,
        books: Books,
        limit: str = "max_dead",
        causes: tuple[Cause, ...] = (),
    ) -> None:
        super().__init__(message)
        self.books = books
        self.limit = limit
        self.causes = causes

    def __reduce__(self) -> tuple[type[TooManyDead], tuple[str, Books, str, tuple[Cause, ...]]]:
        return TooManyDead, (str(self), self.books, self.limit, self.causes)


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


def causes(reasons: Iterable[pa.Table]) -> list[Cause]:
    """Sum deaths up by component and type of error.

    Parameters
    ----------
    reasons : iterable of pyarrow.Table
        In `DEATHS`: why records died, and how many of each.

    Returns
    -------
    list of Cause
        The most frequent first.
    """
    kind = ["component", "error_type"]
    summed = _summed(reasons)
    of_kinds = summed.group_by(kind).aggregate(
        [("deaths", "sum"), ("deaths", "max"), ("deaths", "count")]
    )
    found = []
    for one in of_kinds.to_pylist():
        of = pc.and_(
            pc.and_(
                pc.equal(summed["component"], one["component"]),
                pc.equal(summed["error_type"], one["error_type"]),
            ),
            pc.equal(summed["deaths"], one["deaths_max"]),
        )
        message = pc.min(summed["error_message"].filter(of)).as_py()
        found.append(
            Cause(
                one["component"],
                one["error_type"],
                message,
                one["deaths_count"],
                one["deaths_sum"],
            )
        )
    return sorted(found, key=lambda cause: (-cause.deaths, cause))


def _summed(reasons: Iterable[pa.Table]) -> pa.Table:
    """Return `DEATHS` with each reason once; they are put together as they come."""
    summed, more, n = DEATHS.empty_table(), list[pa.Table](), 0
    for some in reasons:
        more.append(some)
        n += len(some)
        if n > max(_TOGETHER, len(summed)):
            summed, more, n = _each_once([summed, *more]), [], 0
    return _each_once([summed, *more])


def _each_once(reasons: list[pa.Table]) -> pa.Table:
    by_reason = pa.concat_tables(reasons).group_by(DEATHS.names[:-1])
    return by_reason.aggregate([("deaths", "sum")]).rename_columns(DEATHS.names)


def reason_counts(dead: Mapping[str, pa.Table]) -> list[pa.Table]:
    """Return why the dead of a micro-batch died, and how many of each reason, in `DEATHS`."""
    found = []
    for table in _tracked(dead):
        counted = table[REASON].value_counts()
        columns = [*parts(counted.field("values")), counted.field("counts")]
        found.append(pa.table(columns, schema=DEATHS))
    return found


def _tracked(dead: Mapping[str, pa.Table]) -> Iterator[pa.Table]:
    """Yield the dead of a micro-batch without their sources' columns, a part at a time."""
    for spout in dead:
        yield from dead_of(dead).pieces(spout, payload=False)


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
    found = causes(reason_counts(dead))
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
    reasons: Iterable[pa.Table],
    checkpoint: str | os.PathLike[str],
    max_dead: float | None,
) -> Books:
    """Say what died in a run that has ended; fail if it is too much.

    Parameters
    ----------
    books : Books
        At the end.
    reasons : iterable of pyarrow.Table
        In `DEATHS`, of the dead letters that were not sent again; read only if there are dead.
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
    excess = _excess(died, books.records, "", max_dead)
    if excess is None:
        _log.warning("%d of %s died: %s. %s", died, _records(books.records), told, look)
        return books
    raise TooManyDead(
        f"{excess}: {told}. The run has ended and all of it is on record: {look}. When "
        "the cause is mended, ackcore.spark.replay() and another run_batch() send them through "
        "again; max_dead=None lets such a run pass",
        books,
        causes=tuple(found),
    )


def _excess(died: int, among: int, since: str, max_dead: float | None) -> str | None:
    """Return how many died in words, None if that many may."""
    if max_dead is None or not died:
        return None
    if died == among:
        return f"all of {_records(died)}{since} died"
    # Shares are compared, since their product is no whole number: 0.29 * 100 is less than 29.
    if (died / among if isinstance(max_dead, float) else died) <= max_dead:
        return None
    return f"{died} of {_records(among)}{since} died, and max_dead is {max_dead}"


class Ended(NamedTuple):
    """Records that ended in a micro-batch: those that died, of them the new ones, and why."""

    acked: int
    dead: int
    new_dead: int
    causes: tuple[Cause, ...]


def _added(some: Iterable[Ended]) -> Ended:
    """Add micro-batches up; of each kind of death the most frequent message is kept."""
    acked = dead = new_dead = 0
    kinds: dict[tuple[str, str], Cause] = {}
    for one in some:
        acked, dead, new_dead = acked + one.acked, dead + one.dead, new_dead + one.new_dead
        for cause in one.causes:
            kind = cause.component, cause.error_type
            before = kinds.get(kind, cause._replace(deaths=0))
            first = max(before, cause, key=lambda each: each.deaths)
            kinds[kind] = first._replace(deaths=before.deaths + cause.deaths)
    found = sorted(kinds.values(), key=lambda cause: (-cause.deaths, cause))
    return Ended(acked, dead, new_dead, tuple(found))


class DeathLimit:
    """How many records of a stream may die, of those that ended since it was started.

    A record ends when it is ACKED or DEAD; one that waits for a retry is not counted yet.  What was
    first seen before this start and dies counts against a number, and not against a share, nor as
    one in a row: a query that is started again when nothing but hopeless records waits, or is sent
    to it by `replay`, would end with the first ten of them.

    Parameters
    ----------
    max_dead : int, float or None
        As `start` has it.
    before : Books
        What was on record before this start.
    since_ms : int
        The time of this start.
    checkpoint : path
        The query's.
    window, in_a_row : int, optional
        ``Settings.max_dead_window`` and ``max_dead_in_a_row``.
    """

    def __init__(
        self,
        max_dead: float | None,
        before: Books,
        since_ms: int,
        checkpoint: str | os.PathLike[str],
        *,
        window: int | None = None,
        in_a_row: int | None = None,
    ) -> None:
        self._max_dead = max_dead
        self._window = window
        self._max_in_a_row = in_a_row
        self._last_books = before
        self._since_ms = since_ms
        self._checkpoint = checkpoint
        self._last = ""
        #: The micro-batches of the window; without one, all since the start in one.
        self._counted: deque[Ended] = deque([_added(())])
        self._row = _added(())

    def after(self, number: int, dead: Mapping[str, pa.Table], books: Books) -> None:
        """Judge the stream after a micro-batch that is done; log what died in it.

        Parameters
        ----------
        number : int
            The micro-batch's.
        dead : mapping of str to pyarrow.Table
            Its dead, by spout.
        books : Books
            After it.

        Raises
        ------
        TooManyDead
            If more died than one of the limits allows: a number at once, a share of them and all
            of them once ten are dead.
        """
        new_dead = 0
        for table in _tracked(dead):
            first_ms: Int64s = table[FIRST_MS].to_numpy()
            new_dead += int((first_ms >= self._since_ms).sum())
        before, self._last_books = self._last_books, books
        found = tuple(causes(reason_counts(dead)))
        one = Ended(books.acked - before.acked, books.dead - before.dead, new_dead, found)
        if self._window is None:
            self._counted = deque([_added([*self._counted, one])])
        else:
            self._counted.append(one)
            while _ended(self._counted) - _ended([self._counted[0]]) >= self._window:
                self._counted.popleft()
        self._row = _added(() if one.acked else (self._row, one))
        if dead:
            self._last = f"in micro-batch {number} {_told(list(found))}"
        self._judge(books, _FEW)
        if dead:
            warn_of_micro_batch(number, dead, self._checkpoint)

    def at_end(self, books: Books) -> None:
        """Judge a stream that has ended with its sources, by however few records.

        Raises
        ------
        TooManyDead
            If more died than ``max_dead``.
        """
        self._judge(books, 1)

    def _judge(self, books: Books, few: int) -> None:
        limit, row, counted = self._max_dead, self._row, _added(self._counted)
        if self._max_in_a_row is not None and row.new_dead > self._max_in_a_row:
            said = f"{_records(row.new_dead)} died in a row, and max_dead_in_a_row is"
            self._end(f"{said} {self._max_in_a_row}", "max_dead_in_a_row", row, books)
        died, share = counted.dead, isinstance(limit, float)
        if limit is None or share or died <= limit:
            if counted.new_dead < few:
                return
            died = counted.new_dead
        since = " since this start" if self._window is None else " that ended last"
        excess = _excess(died, died + counted.acked, since, limit)
        if excess is not None:
            name = "max_dead" if self._window is None else "max_dead_window"
            self._end(excess, name, counted, books)

    def _end(self, excess: str, limit: str, counted: Ended, books: Books) -> NoReturn:
        told = self._last if limit == "max_dead" else _told(list(counted.causes))
        way_out = "max_dead=None" if limit != "max_dead_in_a_row" else f"{limit}=None"
        raise TooManyDead(
            f"{excess}: {told}. All of it is on record: {_look(self._checkpoint)}. When the "
            "cause is mended, start() on the same checkpoint goes on behind them, and "
            f"ackcore.spark.replay() sends them through again; {way_out} lets such a stream run "
            "on",
            books,
            limit,
            counted.causes,
        )


def _ended(some: Iterable[Ended]) -> int:
    return sum(one.acked + one.dead for one in some)
