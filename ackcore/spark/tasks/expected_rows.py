"""The check of a task's emitted rows against the expectations of their streams."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from ackcore._records import Int64s
from ackcore.spark.tasks.ledger_rows import LedgerRows
from ackcore.spark.tasks.spec import TaskSpec
from ackcore.spark.tasks.time_limit import TimeLimit
from ackcore.spark.tasks.tracking import AnchoredRows, some_rows
from ackcore.topology.components import DEFAULT_STREAM
from ackcore.topology.expectations import WrongResult
from ackcore.topology.tuples import Reason

#: The error type of dead letters: the name of the exception of ``on_fail="fail"``.
_ERROR_TYPE = "ExpectationFailed"


class ExpectedRows:
    """The checks of one task, and their counts.

    ``spec``: the settings, with checks by component and stream. ``time_limit``: the time limit of
    the checks of a batch. ``ledger_rows``: the collector of failures.

    Attributes: ``counts``: by component (with its stream, if that is not the default) and
    expectation: the numbers of tuples that met it and that did not, as ``{"passed": 3, "failed":
    1}``. ``fatal``: the description of the first tuple that did not meet an expectation with
    ``on_fail="fail"``, or of a function with a wrong result. The run will be refused, so the task
    passes on no more rows.
    """

    def __init__(self, spec: TaskSpec, time_limit: TimeLimit, ledger_rows: LedgerRows) -> None:
        self._checks = spec.checks
        self._time_limit = time_limit
        self._ledger_rows = ledger_rows
        self.counts: dict[str, dict[str, dict[str, int]]] = defaultdict(dict)
        self.fatal: str | None = None

    def passing(self, source: str, stream: str, rows: AnchoredRows) -> AnchoredRows:
        """Return the rows that meet all expectations of their stream; fail or drop the others.

        A row for which a check raises fails, also with ``on_fail="drop"``. If a row misses an
        expectation with ``on_fail="fail"``, or a function has a wrong result, set ``fatal`` and
        return no row.
        """
        checks = self._checks.get((source, stream), ())
        n = len(rows)
        dead: dict[int, Reason] = {}
        dropped: list[Int64s] = []
        counts = self.counts[source if stream == DEFAULT_STREAM else f"{source}.{stream}"]
        none = np.empty(0, np.int64)
        try:
            with self._time_limit.on(source):
                failed = [check.failed(rows.batch) for check in checks]
        except WrongResult as error:  # a mistake in the function, not in a row
            self.fatal = f"{error} (emitted by {source!r})"
            return some_rows(rows, none)
        for check, (places, errors) in zip(checks, failed, strict=True):
            count = counts.setdefault(check.name, {"passed": 0, "failed": 0})
            count["passed"] += n - len(places)
            count["failed"] += len(places)
            if not len(places):
                continue
            if check.on_fail == "drop":
                raised = np.isin(places, np.fromiter(errors, np.int64, len(errors)))
                dropped.append(places[~raised])
                places = places[raised]  # an error must be visible
            if check.on_fail == "fail":
                if self.fatal is None:
                    (text,) = check.reasons(rows.batch, places[:1], errors)
                    self.fatal = f"{Reason.of(source, text).message} (emitted by {source!r})"
                continue
            places = np.setdiff1d(places, np.fromiter(dead, np.int64, len(dead)))
            for place, text in zip(
                places.tolist(), check.reasons(rows.batch, places, errors), strict=True
            ):
                dead[place] = Reason.of(source, text, final=True)._replace(type=_ERROR_TYPE)
        if self.fatal is not None:
            return some_rows(rows, none)
        if dropped:
            gone = np.setdiff1d(np.concatenate(dropped), np.fromiter(dead, np.int64, len(dead)))
            kept = np.delete(np.arange(n), gone)
            moved = {int(old): new for new, old in enumerate(kept.tolist())} if dead else {}
            rows = some_rows(rows, kept)
            dead = {moved[place]: reason for place, reason in dead.items()}
        return self._ledger_rows.fail_some(rows, dead, source)
