"""The collectors of bolts that receive a tuple at a time.

A tuple has a state, which changes only under the collector's lock.

    OPEN ──ack──► ACKED ──(raise, fail, late emit: in the same window)──► FAILED
      └─fail, raise──► FAILED
    OPEN ──its batch ends──► HELD ──ack, fail──► ...

A *window* is the time that one `Results` covers: from the end of one ``process()`` to the end of
the next. Until its window ends, an ack is not in any result and can be revoked. When it ends, a row
that Arrow cannot convert fails its anchors, even those that were acked. An emitted row belongs to
the window of its emit, so none of its anchors was acked in an earlier one. A tuple that failed in
an earlier window is in no later result, because the engine has dropped it.

Emissions are stored as pairs of (values, anchors). One append stores a pair, so another thread or a
signal handler (an alarm that raises `TimeoutError`) never sees values without their anchors.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import pyarrow as pa

from ackcore._arrow.record_batches import offsets_of
from ackcore._error_hints import naming_arguments
from ackcore.calls.outcomes import as_final, marked_final
from ackcore.calls.usage import USAGE, report
from ackcore.topology.bolt_calls import FixedAttributes, joined, no_stream
from ackcore.topology.components import DEFAULT_STREAM
from ackcore.topology.failure_reasons import ReasonMaker
from ackcore.topology.row_conversion import Row, RowSchema, no_values, stream_title
from ackcore.topology.tuples import ACKED, FAILED, HELD, OPEN, Anchors, Emission, Reason, Tuple


class _Stream(RowSchema):
    """A stream of a bolt, and the rows emitted to it."""

    def __init__(self, title: str, schema: pa.Schema) -> None:
        super().__init__(title, schema)
        self.rows: list[tuple[Row, Tuple | tuple[Tuple, ...]]] = []
        self.pieces: list[tuple[pa.RecordBatch, Anchors]] = []

    def pop_rows(self, tuple: Tuple) -> list[Row]:
        """Remove and return the last rows of the stream that are anchored to this tuple alone."""
        start = len(self.rows)
        while start and self.rows[start - 1][1] is tuple:
            start -= 1
        popped = [row for row, _ in self.rows[start:]]
        del self.rows[start:]
        return popped


#: The emissions of a call, by stream: rows and their anchors.
Emitted = dict[_Stream, list[tuple[Row, Tuple | tuple[Tuple, ...]]]]


class RowCollector(FixedAttributes):
    """The `Collector` of one task, with further methods for its executor.

    ``reasons``: converts exceptions and texts to reasons. ``schemas``: the schema of each stream
    that the bolt emits. ``basic``: whether the emissions of a tuple are dropped when it fails.
    ``final``: whether a tuple fails without a retry if an emission does not fit its schema.
    """

    def __init__(
        self, reasons: ReasonMaker, schemas: Mapping[str, pa.Schema], basic: bool, final: bool
    ) -> None:
        self.ignored = 0
        self._final = final
        self._reasons = reasons
        self._streams = {
            name: _Stream(stream_title(reasons.component, name), schema)
            for name, schema in schemas.items()
        }
        self._basic = basic
        # Reentrant: the garbage collector may run a finalizer that acks while we hold it.
        self._lock = threading.RLock()
        self._closed = False
        self._first = 0  # the handle of the window's first new row
        self._held: dict[int, Tuple] = {}
        self._late: dict[int, Tuple] = {}  # held tuples that were acked in this window
        self._failures: dict[int, Reason] = {}

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a collector belongs to one task and cannot be pickled; use self.collector, which is "
            "set in each task before prepare() is called"
        )

    # -- called by a bolt ---------------------------------------------------------------------

    def emit(
        self,
        values: Sequence[Any] | Mapping[str, Any],
        anchors: Tuple | Iterable[Tuple] | None = None,
        stream: str = DEFAULT_STREAM,
    ) -> None:
        """Emit a tuple to ``stream``, anchored to ``anchors``; untracked if None.

        It is dropped if an anchor failed in an earlier batch. Raises TypeError or ValueError if an
        argument does not fit or an anchor was acked, RuntimeError once the collector is closed.
        """
        out, row = self._fitting(values, stream)
        if type(anchors) is Tuple:
            with self._lock:
                if (
                    anchors._state >= ACKED or self._closed or anchors._origin.owner is not self
                ) and self._failed_before(anchors):
                    self.ignored += 1
                    return
                out.rows.append((row, anchors))
        else:
            self._emit_with_anchors(out, row, anchors)

    def _fitting(
        self, values: Sequence[Any] | Mapping[str, Any], stream: str
    ) -> tuple[_Stream, Row]:
        """Return the stream of this name, and the values as a row of its schema.

        Raises TypeError or ValueError if the stream does not exist or the values do not fit it, or
        an error of the values' own methods. With `_final`, the error is marked as final.
        """
        try:
            out = self._streams.get(stream)
            if out is None:
                # Check the values first: in emit(1, "y") of a BasicBolt, "y" is probably a value.
                if not isinstance(values, list | tuple | Mapping):
                    raise no_values(values, self._reasons.component)
                raise no_stream(self._reasons.component, stream, self._streams)
            row = out.row(values) if type(values) is not tuple or out.may_change else values
            if len(row) != out.width:
                raise out.misfit(row)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a value's own methods are user code
            self._misfit(error)
            raise
        return out, row

    def _misfit(self, error: BaseException) -> BaseException:
        """Return the error of an emission that does not fit, marked as final if `_final`."""
        return as_final(error) if self._final else error

    def ack(self, tuple: Tuple) -> None:
        """Ack an input. If it was acked or has failed, only count the call in ``ignored``.

        Raises TypeError or ValueError for an object that is no input of this task, and RuntimeError
        once the collector is closed.
        """
        if type(tuple) is not Tuple:
            raise _not_a_tuple("tuple", tuple)
        with self._lock:
            if self._closed or tuple._origin.owner is not self:
                self._refuse(tuple)
            state = tuple._state
            if state == OPEN:
                tuple._state = ACKED
            elif state == HELD:
                tuple._state = ACKED
                self._late[tuple._handle] = self._held.pop(tuple._handle)
            else:
                self.ignored += 1

    def fail(self, tuple: Tuple, reason: BaseException | Reason | str | None = None) -> None:
        """Fail an input, even if it was acked in this batch; its first reason is kept.

        If it has failed, or was acked in an earlier batch, only count the call in ``ignored``.
        Raises the errors of `ack`, and TypeError if ``reason`` has another type.
        """
        if type(tuple) is not Tuple:
            raise _not_a_tuple("tuple", tuple)
        why = self._reasons.of(reason)
        with self._lock:
            if self._closed or tuple._origin.owner is not self:
                self._refuse(tuple)
            if not self._set_failed(tuple, why):
                self.ignored += 1

    def _emit_with_anchors(self, out: _Stream, row: Row, anchors: Any) -> None:
        """Emit a row; ``anchors`` is None or an iterable of tuples.

        If an anchor failed in an earlier batch, the row is dropped and its other anchors fail.
        Without anchors, a row that Arrow cannot convert raises here. Other errors are as in `emit`.
        """
        if anchors is None:
            chain: tuple[Tuple, ...] = ()
        else:
            try:
                chain = tuple(anchors)
            except TypeError:
                raise _not_a_tuple("anchors", anchors) from None
        for anchor in chain:
            if type(anchor) is not Tuple:
                raise _not_a_tuple("anchors", anchor)
        if not chain:
            # It has no anchor that could fail later, so it must fit now.
            out.batch([row])
        with self._lock:
            if self._closed:
                raise self._too_late()
            failed = [anchor for anchor in chain if self._failed_before(anchor)]
            if failed:
                # No sink will receive this row, since a record of it failed.  Its other anchors
                # must fail too, or their records would complete without the row.
                why = self._reasons.of(f"emitted together with {failed[0]!r}, which failed before")
                for anchor in chain:
                    self._set_failed(anchor, why)
                self.ignored += 1
                return
            out.rows.append((row, chain[0] if len(chain) == 1 else chain))

    def _failed_before(self, anchor: Tuple) -> bool:
        """Return whether an anchor failed in an earlier batch, so that its rows are dropped.

        Raises RuntimeError if the collector is closed. Raises ValueError for an input of another
        task, for one that failed in a `BasicBolt`, and for one that was acked, which then fails.
        Call it under the lock.
        """
        if self._closed or anchor._origin.owner is not self:
            self._refuse(anchor)
        if anchor._state == ACKED:
            error = ValueError(
                f"anchors must not have been acked before, got {anchor!r}; "
                + (
                    "a BasicBolt's input is acked when its execute returns: emit before that, or "
                    "write a Bolt"
                    if self._basic
                    else "emit first and ack afterwards"
                )
            )
            # Its tree would never complete; in Storm it times out.
            self._set_failed(anchor, self._reasons.of(error))
            raise error
        if anchor._state == FAILED and self._basic:
            raise ValueError(
                f"emit() for {anchor!r} is refused, because this input has failed, and tuples "
                "emitted for it are dropped; do not emit after execute has returned or raised"
            )
        return (
            anchor._state == FAILED
            and anchor._handle < self._first
            and anchor._handle not in self._failures
        )

    def _refuse(self, tuple: Tuple) -> NoReturn:
        if self._closed:
            raise self._too_late()
        raise ValueError(
            f"tuple must be an input of this task of bolt {self._reasons.component!r}, got "
            f"{tuple!r}, an input of another task or component; use a tuple that the bolt's "
            "execute has received"
        )

    def _too_late(self) -> RuntimeError:
        return RuntimeError(
            f"the collector of bolt {self._reasons.component!r} is closed: flush() has returned, "
            "and all tuples that were not acked have failed; join your threads in flush()"
        )

    # -- called by the executor ---------------------------------------------------------------

    def _set_failed(self, tuple: Tuple, reason: Reason) -> bool:
        """Fail a tuple, and return True.

        Returns False, without effect, if it had failed, or was acked in an earlier batch. Call it
        under the lock.
        """
        handle = tuple._handle
        if tuple._state == FAILED:
            return False
        if tuple._state == ACKED and handle < self._first and handle not in self._late:
            return False
        # Store the failure first: a tuple with a failure cannot be taken for acked.
        self._failures.setdefault(handle, reason)
        tuple._state = FAILED
        self._held.pop(handle, None)
        return True

    def _raised(self, tuple: Tuple, error: BaseException) -> None:
        """Fail a tuple with an error, even if just acked; drop its emissions if ``basic``."""
        reason = self._reasons.of(error)
        with self._lock:
            self._set_failed(tuple, reason)
            if self._basic:
                for out in self._streams.values():
                    out.pop_rows(tuple)

    def _pop_result(self, tuple: Tuple) -> tuple[dict[str, list[Row]], Reason | None]:
        """Remove and return the last executed tuple's rows, by stream, and its failure or None.

        Call it under the lock.
        """
        rows = {name: out.pop_rows(tuple) for name, out in self._streams.items()}
        return rows, self._failures.pop(tuple._handle, None)

    def _done(self, tuple: Tuple, emitted: Emitted) -> None:
        """Ack the input of a call that returned, and emit its rows, unless the input has failed."""
        with self._lock:
            if tuple._state == OPEN:
                for out, rows in emitted.items():
                    out.rows += rows
                tuple._state = ACKED

    def _refuse_late(self, tuple: Tuple) -> NoReturn:
        """Fail an input whose execute has ended, and raise ValueError for the emit after that."""
        with self._lock:
            self._failed_before(tuple)
            error = ValueError(
                f"emit() for {tuple!r} is refused, because its execute has returned; await or "
                "join all that execute starts before it returns"
            )
            self._set_failed(tuple, self._reasons.of(self._misfit(error)))
            raise error

    def _convert(self) -> None:
        """Convert the emissions so far to Arrow, and fail the anchors of rows that do not fit."""
        for out in self._streams.values():
            with self._lock:
                pairs, out.rows = out.rows, []
            if not pairs:
                continue
            batches, misfits = out.batches([values for values, _ in pairs])
            for start, batch in batches:
                part = pairs[start : start + batch.num_rows]
                out.pieces.append((batch, _anchors_of(part)))
            for row, error in misfits:
                anchors = pairs[row][1]
                reason = self._reasons.of(self._misfit(error))
                with self._lock:
                    for anchor in (anchors,) if isinstance(anchors, Tuple) else anchors:
                        self._set_failed(anchor, reason)

    def _end_window(self, seen: int) -> tuple[list[Emission], dict[int, Reason], int]:
        """End the time (window) that one `Results` covers, and begin the next one.

        Returns its emissions, the reasons of its failures by the tuple's number in the task, and
        how many tuples are neither acked nor failed. ``seen``: the number of the next input.
        """
        self._convert()
        with self._lock:
            # Again, for rows that other threads emitted meanwhile: if they have acked a tuple
            # since, its rows must be in the same window.
            self._convert()
            emissions: list[Emission] = []
            for name, out in self._streams.items():
                pieces, out.pieces = out.pieces, []
                emissions += joined(name, pieces)
            failures, self._failures = self._failures, {}
            self._late = {}
            self._first = seen
            # Count under the lock: later acks belong to the next window.
            still_open = len(self._held)
        return emissions, failures, still_open

    def _close(self, reason: Reason) -> None:
        """Fail all tuples that are neither acked nor failed; later emits, acks and fails raise."""
        with self._lock:
            self._closed = True
            # Convert first: the reason of a failed conversion is more useful than "not acked".
            self._convert()
            for one in list(self._held.values()):
                if one._state == HELD:
                    self._set_failed(one, reason)
            self._held.clear()


def _anchors_of(pairs: Sequence[tuple[Row, Tuple | tuple[Tuple, ...]]]) -> Anchors:
    try:
        return Anchors(np.array([anchor._handle for _, anchor in pairs], np.int64), None)  # type: ignore[union-attr]
    except AttributeError:  # a row with no anchor or with several has a tuple of them
        chains = [(one,) if isinstance(one, Tuple) else one for _, one in pairs]
    handles = [anchor._handle for chain in chains for anchor in chain]
    counts = np.array([len(chain) for chain in chains], np.int64)
    return Anchors(np.array(handles, np.int64), offsets_of(counts))


def _not_a_tuple(name: str, got: object) -> TypeError:
    return TypeError(
        f"{name} must be a Tuple that the bolt received, got {type(got).__name__}; keep the tuple "
        "that execute() receives"
    )


class InputCollector(FixedAttributes):
    """The collector of a `BasicBolt` while it executes one input."""

    __slots__ = ("_collector", "_input")

    def __init__(self, collector: RowCollector, input: Tuple) -> None:
        self._collector = collector
        self._input = input

    def emit(self, values: Sequence[Any] | Mapping[str, Any], stream: str = DEFAULT_STREAM) -> None:
        """Emit a tuple anchored to the input; raise ValueError if the input has ended."""
        self._collector.emit(values, self._input, stream)


class CallCollector(FixedAttributes):
    """The collector of a bolt for one of several inputs that are executed at once.

    Its emissions are stored separately, and emitted in the order of the inputs.
    """

    __slots__ = ("_collector", "_emitted", "_input")

    def __init__(self, collector: RowCollector, input: Tuple) -> None:
        self._collector = collector
        self._input = input
        self._emitted: Emitted | None = {}

    def emit(self, values: Sequence[Any] | Mapping[str, Any], stream: str = DEFAULT_STREAM) -> None:
        """Store a tuple anchored to the input. After `close`, fail the input and raise an error."""
        out, row = self._collector._fitting(values, stream)
        # A thread that execute started may be here when execute returns.
        with self._collector._lock:
            emitted = self._emitted
            if emitted is None:
                self._collector._refuse_late(self._input)
            emitted.setdefault(out, []).append((row, self._input))

    def close(self) -> Emitted:
        """Return the call's emissions, {} if called again. Later emits raise and fail the input."""
        with self._collector._lock:
            emitted, self._emitted = self._emitted, None
        return emitted or {}


class AsyncCallCollector(CallCollector):
    """The `AsyncCollector` of one input. Create it in the coroutine that makes the call."""

    __slots__ = ("_usage", "endpoint")

    def __init__(self, collector: RowCollector, input: Tuple, endpoint: Any = None) -> None:
        super().__init__(collector, input)
        self._usage = USAGE.get()  # a thread of the bolt has another context
        self.endpoint = endpoint

    @marked_final()
    @naming_arguments
    def used(self, *, tokens: float | None = None, cost: float | None = None) -> None:
        """Add tokens and a cost to the usage of the call, which the bolt's limit counts."""
        report(self._usage, tokens, cost)

    if not TYPE_CHECKING:
        __getattr__ = marked_final()(FixedAttributes.__getattr__)


class GroupCollector(AsyncCallCollector):
    """The collector of one input in a call of `AsyncBolt.execute_many`.

    ``error``: the error of the first emission that did not fit, which fails this input alone.
    """

    __slots__ = ("error",)

    def __init__(self, collector: RowCollector, input: Tuple, endpoint: Any = None) -> None:
        super().__init__(collector, input, endpoint)
        self.error: BaseException | None = None

    def emit(self, values: Sequence[Any] | Mapping[str, Any], stream: str = DEFAULT_STREAM) -> None:
        """Emit a tuple. If it does not fit, store the first error in ``error`` and do not raise.

        An emit after the end of the call raises ValueError, and fails the input.
        """
        try:
            super().emit(values, stream)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a value's own methods are user code
            if self._emitted is None:  # the call has ended
                raise
            self.error = self.error or error
