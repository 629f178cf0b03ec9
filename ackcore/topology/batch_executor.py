"""The executor of bolts that receive an Arrow batch at a time.

If a call raises, the emissions and failures of this call are dropped, and each half of its rows is
processed by another call, down to single rows. k failing rows of n cost some 2 k log2(n / k) calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pyarrow as pa

from ackcore._arrow.record_batches import offsets_of
from ackcore.topology.batch_collector import BatchCollector, Piece
from ackcore.topology.bolt_calls import BoltExecutor, joined, refuse_returned
from ackcore.topology.components import BatchBolt
from ackcore.topology.failure_reasons import missing_column, with_hint
from ackcore.topology.tuples import Anchors, Emission, Origin, Reason, Results


class BatchExecutor(BoltExecutor):
    """The `Executor` of one task of a `BatchBolt`."""

    component: BatchBolt

    def _process(self, origin: Origin, batch: pa.RecordBatch) -> Results:
        """Run the bolt on a batch; if it raises, on each half, down to rows that fail alone."""
        first, rows, identity = origin.first, batch.num_rows, origin.identity
        emitted: list[Piece] = []
        failures: dict[int, Reason] = {}
        raised = 0
        # Not recursive: a recursive closure would keep the batch until Python collects cycles.
        spans = [(0, rows)] if rows else []
        while spans:
            start, stop = spans.pop()
            part, part_identity = batch, identity
            if stop - start < rows:
                part = batch.slice(start, stop - start)
                part_identity = identity and identity.part(start, stop)
            out = BatchCollector(
                self.reasons,
                self._schemas,
                first + start,
                stop - start,
                origin.component,
                origin.stream,
                part_identity,
            )
            process = partial(self.component.process, part, out)
            error = self._call(process, out, part.schema.names)
            if error is None:
                more, failed = out._close()
                emitted.extend(more)
                failures.update(failed)
                continue
            raised += 1
            if stop - start == 1:
                failures[first + start] = error
            else:
                middle = (start + stop) // 2
                spans += [(middle, stop), (start, middle)]
        return self._results(self._joined(emitted), failures)._replace(raised=raised)

    def flush(self) -> Results:
        """Call the bolt's ``flush``, if it has one and had a row; return the last results.

        If it raises, all rows fail that have not failed before.
        """
        emitted: list[Piece] = []
        failures: dict[int, Reason] = {}
        if self._prepared and self._until_flush:
            out = BatchCollector(self.reasons, self._schemas, 0, self._seen)
            error = self._call(lambda: self.component.flush(out), out)
            if error is None:
                emitted, failures = out._close()
                emitted = [self._without_gone(piece, failures) for piece in emitted]
            else:
                failures = dict.fromkeys(range(self._seen), error)
            failures = {
                handle: reason for handle, reason in failures.items() if handle not in self._failed
            }
        self._until_flush = False
        return self._results(self._joined(emitted), failures)

    def _without_gone(self, piece: Piece, failures: dict[int, Reason]) -> Piece:
        """Return an emission of ``flush`` without the tuples anchored to a row that failed before.

        All anchors of these tuples are added to ``failures``: their records would complete without
        the tuple. The engine no longer has a row that failed in an earlier batch.
        """
        stream, batch, (handles, offsets) = piece
        gone = np.isin(handles, np.array(sorted(self._failed), np.int64))
        if not gone.any():
            return piece
        counts = np.ones(len(handles), np.int64) if offsets is None else np.diff(offsets)
        rows = np.repeat(np.arange(batch.num_rows), counts)
        dropped = np.zeros(batch.num_rows, np.bool_)
        dropped[rows[gone]] = True
        why = self.reasons.of(f"emitted together with row {handles[gone][0]}, which failed before")
        for handle in handles[dropped[rows]].tolist():
            failures.setdefault(handle, why)
        kept = ~dropped
        if offsets is not None:
            offsets = offsets_of(counts[kept])
        return stream, batch.filter(pa.array(kept)), Anchors(handles[kept[rows]], offsets)

    def _call(
        self, call: Callable[[], object], out: BatchCollector, columns: Sequence[str] = ()
    ) -> Reason | None:
        """Call the bolt. If it raises or returns a value, close ``out`` and return the reason.

        Otherwise return None; ``out`` is still open. ``columns``: the columns of the batch, for the
        hint if the bolt read a missing one.
        """
        try:
            refuse_returned(call(), "out.emit(...)")
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            # SystemExit as well: a bolt that exits must not end its worker.
            out._close()
            batch = f"the batch of {out.component}'s stream {out.stream!r}"
            return with_hint(self.reasons.of(error), missing_column(error, columns, batch))
        return None

    def _joined(self, emitted: list[Piece]) -> list[Emission]:
        emissions: list[Emission] = []
        for stream in self._schemas:
            pieces = [
                (batch, anchors)
                for name, batch, anchors in emitted
                if name == stream and batch.num_rows
            ]
            emissions += joined(stream, pieces)
        return emissions
