"""Executors of bolts whose calls are made once: one call at a time, or many at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

import pyarrow as pa

from ackcore.calls import CallSettings
from ackcore.topology.answers import Answers
from ackcore.topology.call_executor import CallExecutor, CallInput
from ackcore.topology.components import AsyncBolt, BasicBolt, Context
from ackcore.topology.failure_reasons import Reasons
from ackcore.topology.row_executor import RowExecutor
from ackcore.topology.tuples import ACKED, OPEN, Identity, Origin, Reason, Results, Tuple


class _Journaled(RowExecutor):
    """The common part of both executors: it executes only inputs without an answer, and emits all
    answers in the same way.

    The bolt is prepared before its first call, and not at all if all answers are in the journal. An
    exception of ``prepare`` is no answer: all inputs without an answer fail with it.
    """

    _answers: Answers
    _keys: dict[int, bytes]
    _asked: Iterator[list[Tuple]]

    def process(
        self, source: str, stream: str, batch: pa.RecordBatch, identity: Identity | None
    ) -> Results:
        """Run the bolt on the rows of a batch that have no answer.

        Raises
        ------
        RuntimeError, OSError
            If the journal fails.
        """
        if self._flushed:
            raise RuntimeError(f"{self.reasons.component} was flushed: there can be no more input")
        first = self._seen
        self._seen += batch.num_rows
        origin = Origin(self.collector, source, stream, tuple(batch.schema.names), first, identity)
        inputs: list[tuple[bytes, int]] = []
        failures: dict[int, Reason] = {}
        self._keys = {}
        asked = self._unanswered(super()._slices(origin, batch, first), inputs)
        head = next(asked, None)
        if head is not None:
            if not self._prepared:
                self._prepare()
            self._asked = chain([head], asked)
            if self._broken:
                failures = {one._handle: self._broken for some in self._asked for one in some}
            else:
                self._run_all(origin, batch, first)
        # If a thread of the bolt emitted too late, the input fails even if it has an answer.
        _, others, _ = self.collector._end_window(self._seen)
        failures |= others
        inputs += [
            (key, handle)
            for handle, key in self._keys.items()
            if handle not in failures or self._answers.known(key)
        ]
        inputs.sort(key=lambda one: one[1])
        emissions, failed = self._answers.settled(inputs)
        return self._results(emissions, dict(sorted({**failed, **failures}.items())), 0)

    def _slices(self, origin: Origin, batch: pa.RecordBatch, first: int) -> Iterator[list[Tuple]]:
        """Return the inputs of this batch that are to be executed."""
        return self._asked

    def _unanswered(
        self, slices: Iterator[list[Tuple]], inputs: list[tuple[bytes, int]]
    ) -> Iterator[list[Tuple]]:
        """Yield the inputs without an answer; add the others to ``inputs``."""
        for tuples in slices:
            some = []
            for one in tuples:
                key = self._answers.key_of(one)
                if self._answers.known(key):
                    inputs.append((key, one._handle))
                else:
                    self._keys[one._handle] = key
                    some.append(one)
            if some:
                yield some

    def _ack(self, one: Tuple) -> None:
        """Ack an input whose answer is written, so that it takes no more emissions."""
        with self.collector._lock:
            if one._state == OPEN:
                one._state = ACKED


class JournaledExecutor(_Journaled):
    """The executor of one task of a `BasicBolt` with ``journal = True``.

    See `ackcore.topology.executors.Executor`.
    """

    def __init__(
        self, component: BasicBolt, context: Context, reasons: Reasons, answers: Answers
    ) -> None:
        super().__init__(component, context, reasons)
        self._answers = answers

    def _execute_basic(self, bolt: BasicBolt, tuples: list[Tuple]) -> None:
        for one in tuples:
            super()._execute_basic(bolt, [one])
            with self.collector._lock:
                rows, reason = self.collector._take(one)
            if reason is not None:
                self._answers.failed(self._keys[one._handle], reason)
            else:
                self._answers.emitted(self._keys[one._handle], rows, self.reasons)


class JournaledCallExecutor(_Journaled, CallExecutor):
    """The same for an `AsyncBolt`, or for a `BasicBolt` with several threads.

    An answer is written when its call returns, whether or not earlier inputs are done.
    """

    def __init__(
        self,
        component: BasicBolt | AsyncBolt,
        context: Context,
        reasons: Reasons,
        settings: CallSettings,
        progressed: Callable[[], None],
        answers: Answers,
    ) -> None:
        CallExecutor.__init__(self, component, context, reasons, settings, progressed)
        self._answers = answers
        self._unwritten: OSError | None = None

    async def _await_execute(self, input: CallInput, endpoint: object = None) -> None:
        await super()._await_execute(input, endpoint)
        self._write_down(input)

    def _execute_in_thread(self, input: CallInput) -> None:
        super()._execute_in_thread(input)
        if input.stopped is None:
            self._write_down(input)

    def _write_down(self, input: CallInput) -> None:
        rows = {
            name: [row for row, _ in input.emitted.get(out, ())]
            for name, out in self.collector._streams.items()
        }
        try:
            self._answers.emitted(self._keys[input.tuple._handle], rows, self.reasons)
        except OSError as error:
            # A failure of the journal, not of the call that this runs in.
            self._unwritten = self._unwritten or error

    def _end(self, input: CallInput, error: BaseException | None) -> None:
        if self._unwritten is not None:
            raise self._unwritten
        if error is not None:
            # If the call did return, the journal has its answer already, and keeps the first.
            key = self._keys[input.tuple._handle]
            self._answers.failed(key, self.reasons.of(error))
        self._ack(input.tuple)
