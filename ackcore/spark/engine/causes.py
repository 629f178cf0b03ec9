"""The causes of deaths, for a log line and for the error when too many records died.

A record dies: it is given up and becomes DEAD.  A run crashes: ``Plan.crashes`` counts that, and
`ackcore.spark.engine.suspects` finds the crashing records.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import pyarrow as pa

from ackcore._error_hints import counted
from ackcore._records import Int64s
from ackcore.dead_limit import DeadLimit, Excess, TooManyDead
from ackcore.spark.base.reasons import DEATHS, reason_parts
from ackcore.spark.base.schemas import FIRST_MS, REASON
from ackcore.spark.checkpoint.dead_records import dead_of
from ackcore.spark.engine.progress import Counts

_log = logging.getLogger("ackcore")

#: The number of causes that a log line names, and the characters of each message.
_NAMED, _MESSAGE_CHARS = 3, 160
#: The argument that allows more deaths, by the exceeded limit.
_WAYS_OUT = {"max_dead": "a larger max_dead", "max_dead_ratio": "max_dead_ratio=None"}


class Cause(NamedTuple):
    """The number of dead records by one type of error in one component, and a message of them."""

    component: str
    error_type: str
    message: str  # the most frequent one
    messages: int  # the number of different ones
    deaths: int  # the number of dead records

    def __str__(self) -> str:
        message = " ".join(self.message.split())
        if len(message) > _MESSAGE_CHARS:
            message = message[: _MESSAGE_CHARS - 3] + "..."
        more = f", and {counted(self.messages - 1, 'other message')}" if self.messages > 1 else ""
        return f"{self.deaths} in {self.component!r} of {self.error_type} ({message}{more})"


def causes(reasons: Iterable[pa.Table]) -> list[Cause]:
    """Sum up the reasons of dead records by component and error type; the most frequent first.

    ``reasons``: tables in the columns of `DEATHS`, with a number of deaths for each reason.
    """
    summed = _each_once([DEATHS.empty_table(), *(_each_once([some]) for some in reasons)])
    summed = summed.sort_by([("deaths", "descending"), ("error_message", "ascending")])
    kinds = summed.group_by(["component", "error_type"], use_threads=False).aggregate(
        [("error_message", "first"), ("deaths", "count"), ("deaths", "sum")]
    )
    found = [Cause(*kind.values()) for kind in kinds.to_pylist()]
    return sorted(found, key=lambda cause: (-cause.deaths, cause))


def _each_once(reasons: list[pa.Table]) -> pa.Table:
    """Merge tables of the schema `DEATHS`, at least one: each reason once, with all its deaths."""
    by_reason = pa.concat_tables(reasons).group_by(DEATHS.names[:-1])
    return by_reason.aggregate([("deaths", "sum")]).rename_columns(DEATHS.names)


def reason_counts(dead: Mapping[str, pa.Table]) -> Iterator[pa.Table]:
    """Yield tables of the schema `DEATHS`, with one row for each dead record of a micro-batch."""
    for table in _tracked(dead):
        columns = [*reason_parts(table[REASON]), pa.repeat(1, len(table))]
        yield pa.table(columns, schema=DEATHS)


def _tracked(dead: Mapping[str, pa.Table]) -> Iterator[pa.Table]:
    """Yield the dead records of each spout in parts; the sources' columns may be missing."""
    for spout in dead:
        yield from dead_of(dead).pieces(spout, payload=False)


def _told(found: Sequence[Cause]) -> str:
    told = "; ".join(map(str, found[:_NAMED]))
    rest = sum(cause.deaths for cause in found[_NAMED:])
    return told + (f"; {rest} with other errors" if rest else "")


def _look(checkpoint: str | os.PathLike[str]) -> str:
    return f"ackcore.spark.dead_letters({os.fspath(checkpoint)!r}) shows each with its payload"


def check_run(
    counts: Counts,
    reasons: Iterable[pa.Table],
    checkpoint: str | os.PathLike[str],
    limit: DeadLimit,
) -> None:
    """Raise TooManyDead if more records of a run that has ended are dead than the limit allows.

    Otherwise log them, if there are any.

    ``reasons``: tables of the schema `DEATHS`, of the dead letters that were not replayed. They are
    read only if there are dead records.
    """
    if not counts.dead:
        return
    # Not from the counts: a dead letter that was replayed twice may be ACKED twice.
    found = causes(reasons)
    died = sum(cause.deaths for cause in found)
    if not died:
        return
    told, look = _told(found), _look(checkpoint)
    limit.ended(counts.records - died, died)
    excess = limit.judge(1, since="")
    if excess is None:
        _log.warning("%d of %s died: %s. %s", died, counted(counts.records, "record"), told, look)
        return
    raise _too_many(
        excess,
        f"{told}. The run has ended. All dead records are recorded: {look}. Remove the cause; "
        "then ackcore.spark.replay() and another run_batch() send them through again",
        counts,
        tuple(found),
    )


def _too_many(excess: Excess, told: str, counts: Counts, found: tuple[Cause, ...]) -> TooManyDead:
    way_out = f"set {_WAYS_OUT[excess.limit]} to accept so many dead records"
    if any(cause.error_type == "CorruptRecord" for cause in found):
        told += ". A line that could not be read dies again; put it, corrected, into a new file"
    return TooManyDead(f"{excess.message}: {told}; or {way_out}", counts, excess.limit, found)


def _added(*some: Iterable[Cause]) -> tuple[Cause, ...]:
    """Merge the causes of each component and error type: add their deaths; most deaths first.

    The messages are those of the cause with the most deaths.
    """
    kinds: dict[tuple[str, str], Cause] = {}
    for cause in chain.from_iterable(some):
        kind = cause.component, cause.error_type
        before = kinds.get(kind, cause._replace(deaths=0))
        first = max(before, cause, key=lambda each: each.deaths)
        kinds[kind] = first._replace(deaths=before.deaths + cause.deaths)
    return tuple(sorted(kinds.values(), key=lambda cause: (-cause.deaths, cause)))


@dataclass(eq=False, repr=False)
class StreamLimit:
    """The limit on the dead records of a stream, checked after each micro-batch.

    A record ends when it is ACKED or DEAD; one that waits for a retry is not counted yet.  A dead
    record that was first seen before this start (``since_ms``) counts for `max_dead`, but not for
    the ratio.  Otherwise a restarted query whose old records all die, waiting or sent by `replay`,
    would end after the first ten.
    """

    _limit: DeadLimit
    _last_counts: Counts  # at first, the recorded counts before this start
    _since_ms: int
    _checkpoint: str | os.PathLike[str]
    _last: str = ""
    #: The causes by micro-batch of the window; without a window, all since the start.
    _causes: deque[tuple[Cause, ...]] = field(default_factory=deque)

    def after(self, number: int, dead: Mapping[str, pa.Table], counts: Counts) -> None:
        """Count a finished micro-batch and check the limit; log its deaths.

        Raises TooManyDead if more records died than the limit allows; they are then not logged.

        ``dead``: the dead records by spout. ``counts``: the counts after the micro-batch.
        """
        new_dead = 0
        for table in _tracked(dead):
            first_ms: Int64s = table[FIRST_MS].to_numpy()
            new_dead += int((first_ms >= self._since_ms).sum())
        before, self._last_counts = self._last_counts, counts
        found = tuple(causes(reason_counts(dead)))
        acked, died = counts.acked - before.acked, counts.dead - before.dead
        if acked or died:  # a step without them would leave the window only after later records
            self._causes.append(found)
            if self._limit.window is None:
                self._causes = deque([_added(*self._causes)])
            for _ in range(self._limit.ended(acked, died, new_dead)):
                self._causes.popleft()
        if dead:
            self._last = f"in micro-batch {number} {_told(found)}"
        self._end(self._limit.excess, counts)
        if dead:
            records = counted(sum(cause.deaths for cause in found), "record")
            look = _look(self._checkpoint)
            _log.warning("micro-batch %d: %s died: %s. %s", number, records, _told(found), look)

    def at_end(self, counts: Counts) -> None:
        """Check the limit when the stream has ended: a ratio then also counts for few records.

        Raises TooManyDead if more records died than the limit allows.
        """
        self._end(self._limit.judge(1), counts)

    def _end(self, excess: Excess | None, counts: Counts) -> None:
        if excess is None:
            return
        found = _added(*self._causes)
        told = self._last if self._limit.window is None else _told(found)
        raise _too_many(
            excess,
            f"{told}. All dead records are recorded: {_look(self._checkpoint)}. Remove the cause. "
            "Then call start() on the same checkpoint, which continues after the dead records, "
            "and ackcore.spark.replay(), which sends them through again",
            counts,
            found,
        )
