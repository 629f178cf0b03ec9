"""Listeners: callbacks for finished micro-batches, like Spark's StreamingQueryListener.

The thread that runs the micro-batches calls them between two micro-batches, after the mark of the
finished one.  So their reports are final.  If the driver dies in between, the call is lost; the
counts and the dead letters are in the checkpoint and the dead-letter store.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pyarrow as pa

from ackcore._error_hints import refuse_uncalled
from ackcore.calls.threads import refuse_unrun
from ackcore.spark.base.interrupts import raised_by
from ackcore.spark.base.letter_columns import as_letters
from ackcore.spark.checkpoint.dead_records import Dead
from ackcore.spark.checkpoint.decisions import BatchDecision
from ackcore.spark.engine.batch import Engine
from ackcore.spark.engine.progress import Account, Counts, Progress
from ackcore.topology.builder import Topology

_log = logging.getLogger("ackcore")

#: The maximum size in bytes of the dead letters in one call of a listener.
_TOLD_BYTES = 1 << 25

_METHODS = ("on_start", "on_batch_start", "on_progress", "on_dead", "on_end")


class QueryListener:
    """The base class of listeners. Any object with some of these methods can be a listener.

    An exception in a listener is logged, and affects neither the query nor other listeners. A slow
    listener delays the next micro-batch.
    """

    def on_start(self, counts: Counts) -> None:
        """Called when a query or `run_batch` starts, with each tracked spout's counts so far."""

    def on_batch_start(self, batch_id: int) -> None:
        """Called when a stream begins or repeats a micro-batch; `run_batch` does not call it.

        If `on_progress` is not called for a long time, the micro-batch may hang.
        """

    def on_progress(self, progress: Progress, counts: Counts) -> None:
        """Called with the report of a micro-batch, and the counts after it."""

    def on_dead(self, batch_id: int, letters: Mapping[str, pa.Table]) -> None:
        """Called with the dead letters of a micro-batch, if there are any.

        If they are many, it is called several times, each time with about 32 MB. Letters are read
        only for listeners that override this method.

        Parameters
        ----------
        batch_id : int
            The micro-batch.
        letters : mapping from str to pyarrow.Table
            The dead letters by spout, in the columns of `ackcore.spark.dead_letters` without
            ``spout``, ``replayed`` and ``replay_request``.
        """

    def on_end(self, error: BaseException | None, counts: Counts) -> None:
        """Called at the end of the query, or of `run_batch`.

        Parameters
        ----------
        error : BaseException or None
            The error that ended it; None after a stop or a normal end.
        counts : Counts
            The counts after the last finished micro-batch.
        """


class Listeners:
    """The listeners of one query.

    ``listeners``: objects with some of the methods of `QueryListener`.

    Raises TypeError if an object has none of these methods.
    """

    def __init__(self, listeners: Sequence[Any] = ()) -> None:
        if isinstance(listeners, str) or not isinstance(listeners, Sequence):
            raise TypeError(
                f"listeners must be a list of objects, got {type(listeners).__name__}; "
                "put it in brackets"
            )
        self._all: list[Any] = []
        for one in listeners:
            self.add(one)

    def add(self, listener: Any) -> None:
        """Add a listener. Raises TypeError if it has none of the methods."""
        refuse_uncalled(listener, "each of listeners")
        if not any(callable(getattr(listener, name, None)) for name in _METHODS):
            raise TypeError(
                f"listeners must be objects with some of {', '.join(_METHODS)}, got {listener!r}; "
                "derive them from ackcore.spark.QueryListener"
            )
        self._all.append(listener)

    def started(self, topology: Topology, counts: Counts) -> None:
        """Call ``on_start`` with the counts of all tracked spouts, also new ones; log errors."""
        accounts = {name: Account() for name, spout in topology.spouts.items() if spout.tracked}
        self._tell("on_start", replace(counts, spouts={**accounts, **counts.spouts}))

    def began(self, number: int) -> None:
        """Call ``on_batch_start`` of the listeners with the number; log their errors."""
        self._tell("on_batch_start", number)

    def done(self, progress: Progress, counts: Counts, decision: BatchDecision | None) -> None:
        """Call ``on_progress`` of the listeners, and ``on_dead`` if records died; log errors."""
        if not self._all:
            return
        self._tell("on_progress", progress, counts)
        if decision is None or not decision.all_dead or not self._hearing("on_dead"):
            return
        number = progress.batch_id
        try:
            for letters in _some_at_a_time(decision.all_dead, number):
                self._tell("on_dead", number, letters)
        except Exception:
            _log.exception(
                "the dead letters of micro-batch %d could not be read for on_dead; the query "
                "continues",
                number,
            )

    @contextmanager
    def of_run(self, engine: Engine) -> Iterator[None]:
        """Call ``on_start``, run the ``with`` block, and call ``on_end`` with its error or None.

        The error is raised.
        """
        self.started(engine.topology, engine.counts)
        try:
            yield
        except BaseException as error:
            self.ended(error, engine.counts)
            raise
        self.ended(None, engine.counts)

    def ended(self, error: BaseException | None, counts: Counts) -> None:
        """Call ``on_end`` of the listeners; log their errors."""
        self._tell("on_end", error, counts)

    def _hearing(self, name: str) -> list[tuple[Any, Callable[..., object]]]:
        """Return the listeners that define the method ``name``, each with its method.

        One that only inherits the empty method of `QueryListener` is left out.
        """
        found = []
        for listener in self._all:
            method = getattr(listener, name, None)
            inherited = getattr(method, "__func__", None) is getattr(QueryListener, name)
            if callable(method) and not inherited:
                found.append((listener, method))
        return found

    def _tell(self, name: str, *about: Any) -> None:
        for listener, method in self._hearing(name):
            error = raised_by(partial(_call, name, method, *about))
            if error is not None:
                said = "%s of listener %r raised; the query continues"
                _log.error(said, name, listener, exc_info=error)


def _call(name: str, method: Callable[..., object], *about: Any) -> None:
    refuse_unrun(method(*about), name)


def _some_at_a_time(dead: Dead, number: int) -> Iterator[dict[str, pa.Table]]:
    """Yield the dead letters of a micro-batch in parts of about 32 MiB, each by spout."""
    held: dict[str, list[pa.Table]] = {}
    nbytes = 0
    for spout in dead:
        for piece in dead.pieces(spout):
            if held and nbytes + piece.nbytes > _TOLD_BYTES:
                yield {name: pa.concat_tables(some) for name, some in held.items()}
                held, nbytes = {}, 0
            held.setdefault(spout, []).append(as_letters(piece, number))
            nbytes += piece.nbytes
    yield {name: pa.concat_tables(some) for name, some in held.items()}
