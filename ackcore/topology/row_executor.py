"""The executor of bolts that receive a tuple at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import count, repeat

import pyarrow as pa

from ackcore._error_hints import counted
from ackcore.calls.outcomes import marked_final
from ackcore.topology.bolt_calls import BoltExecutor, log, refuse_returned
from ackcore.topology.components import AsyncBolt, BasicBolt, Bolt, Context
from ackcore.topology.failure_reasons import ReasonMaker
from ackcore.topology.row_collector import InputCollector, RowCollector
from ackcore.topology.row_conversion import rows_of
from ackcore.topology.tuples import ACKED, HELD, OPEN, Origin, Results, Tuple

#: Rows that become Python objects at a time.  Small slices are freed before the garbage collector
#: has scanned them often; 8,192 rows take twice as long.
SLICE_ROWS = 512


class RowExecutor(BoltExecutor):
    """The `Executor` of one task of a `Bolt` or `BasicBolt`."""

    component: Bolt | BasicBolt | AsyncBolt
    collector: RowCollector

    def __init__(
        self, component: Bolt | BasicBolt | AsyncBolt, context: Context, reasons: ReasonMaker
    ) -> None:
        super().__init__(component, context, reasons)
        basic = not isinstance(component, Bolt)
        # Whether calls may cost money. Then an emission that does not fit, which another call would
        # only repeat, fails its input without a retry.
        self._is_paid = isinstance(component, AsyncBolt) or component.journal
        self.collector = RowCollector(reasons, self._schemas, basic, self._is_paid)
        self._emit = "collector.emit(...)" if basic else "self.collector.emit(...)"

    def _process(self, origin: Origin, batch: pa.RecordBatch) -> Results:
        if batch.num_rows:
            self._run_all(self._slices(origin, batch))
        return self._results(*self.collector._end_window(self._seen))

    def flush(self) -> Results:
        """Call the bolt's ``flush``, unless it had no row or is an `AsyncBolt`.

        Then fail all tuples that are neither acked nor failed, and close the collector. If a
        `BasicBolt` has a ``flush`` of its own and it raises, all its rows fail. Returns the last
        results.
        """
        if self._broken:
            return Results([], [], 0)
        collector, reason, error = self.collector, self.reasons.not_acked(), None
        if self._prepared and not isinstance(self.component, AsyncBolt):
            try:
                refuse_returned(self.component.flush(), self._emit)
            except KeyboardInterrupt:
                raise
            except BaseException as raised:
                reason = error = self.reasons.of(raised)
        collector._close(reason)
        emissions, failures, _ = collector._end_window(self._seen)
        if error and self._until_flush:
            for handle in range(self._seen):
                if handle not in self._failed:
                    failures.setdefault(handle, error)
        self._until_flush = False
        if collector.ignored:
            log.warning(
                "%s: %s of ack, fail or emit for tuples that were acked or failed before "
                "had no effect; ack or fail each tuple once, after its last emit",
                self.reasons.component,
                counted(collector.ignored, "call"),
            )
        return self._results(emissions, failures)

    def _prepare(self) -> None:
        super()._prepare()
        if self._broken:
            self.collector._close(self._broken)

    def _call_prepare(self) -> None:
        if isinstance(self.component, Bolt):
            self.component.collector = self.collector
        super()._call_prepare()

    def _run_all(self, slices: Iterator[list[Tuple]]) -> None:
        """Execute the inputs of a batch; the collector gets the results."""
        for todo in slices:
            if isinstance(self.component, BasicBolt):
                self._execute_basic(self.component, todo)
            else:
                assert isinstance(self.component, Bolt)
                self._execute(self.component, todo)
                with self.collector._lock:
                    for one in todo:
                        if one._state == OPEN:  # in a BasicBolt, none is
                            self.collector._held[one._handle] = one
                            one._state = HELD
            self.collector._convert()

    def _slices(self, origin: Origin, batch: pa.RecordBatch) -> Iterator[list[Tuple]]:
        """Yield a batch's rows as lists of up to 512 tuples. Rows without Python values fail."""
        for start in range(0, batch.num_rows, SLICE_ROWS):
            rows, misfits = rows_of(batch.slice(start, SLICE_ROWS))
            tuples = list(map(Tuple, rows, repeat(origin), count(origin.first + start)))
            if misfits:
                for row, error in misfits:
                    self.collector._raised(tuples[row], error)
                tuples = [one for one in tuples if one._state == OPEN]
            yield tuples

    def _execute(self, bolt: Bolt, tuples: list[Tuple]) -> None:
        execute: Callable[[Tuple], object] = bolt.execute
        for one in tuples:
            try:
                result = execute(one)
                if result is not None:
                    refuse_returned(result, self._emit)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                # SystemExit as well: a bolt that exits must not end its worker.
                self.collector._raised(one, error)

    def _execute_basic(self, bolt: BasicBolt, tuples: list[Tuple]) -> None:
        collector, lock = self.collector, self.collector._lock
        execute: Callable[[Tuple, InputCollector], object] = bolt.execute
        for one in tuples:
            try:
                result = execute(one, InputCollector(collector, one))
                if result is not None:
                    self._refuse_returned(result)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                collector._raised(one, error)
            else:
                with lock:
                    if one._state == OPEN:
                        one._state = ACKED

    def _refuse_returned(self, result: object, emit: str | None = None) -> None:
        """Call `refuse_returned`; its error is final if another call could cost money again."""
        with marked_final() if self._is_paid else nullcontext():
            refuse_returned(result, emit or self._emit)
