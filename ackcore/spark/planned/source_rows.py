"""The planned spouts whose sources are a `PlannedSource`: their plans, rows and reports."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any

from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession

from ackcore.calls.threads import refuse_unrun
from ackcore.spark.base.arrow_batches import Batches
from ackcore.spark.base.errors import one_line
from ackcore.spark.base.interrupts import raised_by
from ackcore.spark.base.session import is_connect, task_slots
from ackcore.spark.base.versions import Py4JError, from_arrow_schema
from ackcore.spark.checkpoint.decisions import BatchDecision, Plan
from ackcore.spark.checkpoint.skips import skip_command
from ackcore.spark.checkpoint.state import State
from ackcore.spark.engine.setup import InputFrame, PlannedRows, Snapshot
from ackcore.spark.planned.planned_source import PlannedSource, SourceError, any_of

_log = logging.getLogger("ackcore")

#: Errors of a source or of Spark that may pass: a stream tries again.
_MAY_PASS = (OSError, EOFError, PySparkException, Py4JError)
#: The numbers of first and last plans that a later plan is compared with.
_FIRST, _LAST = 8, 56
#: The most plans that a source may return for one `run_batch`.
_MOST_PLANS = 10_000
#: The number of characters of a plan in an error.
_SHOWN = 200


@dataclass
class _Taken:
    """The plans of one spout in one micro-batch.

    ``rows``: the plans that the micro-batch reads. ``last``: the last plan of this and all earlier
    micro-batches. ``seen``: digests of the first and the last of all these plans.
    """

    rows: list[Any] = field(default_factory=list)
    last: Any = None
    seen: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, body: Mapping[str, Any] | None) -> _Taken:
        """Return the plans from the result of `body`; no plan if it is None."""
        if body is None:
            return cls()
        rows = body["rows"]
        return cls(rows, rows[-1] if rows else body["last"], body["seen"])

    def body(self) -> dict[str, Any]:
        """Return the plans as an object for JSON; a plan to read is not stored twice."""
        return {"rows": self.rows, "last": None if self.rows else self.last, "seen": self.seen}

    def carried(self) -> _Taken:
        """Return the plans of a next micro-batch that reads nothing."""
        return _Taken([], self.last, self.seen)

    def plus(self, plan: Any, digest: str) -> _Taken:
        """Return the plans with one more to read."""
        seen = [*self.seen, digest]
        if len(seen) > _FIRST + _LAST:
            del seen[_FIRST]
        return _Taken([*self.rows, plan], plan, seen)


class _Spout:
    """A spout with a planned source, the plans of its last done micro-batch, and the next plan.

    `look` may make the next plan before the micro-batch that takes it begins.
    """

    def __init__(
        self, name: str, source: PlannedSource, last: _Taken, spark: SparkSession, url: str
    ) -> None:
        self.name = name
        self._url = url
        self._spark = spark
        self.source = source
        self.last = last
        #: The plan that `look` has made, its digest, and the plan before it.
        self._ahead: tuple[Any, str, Any] | None = None
        #: The number of calls of the source's `plan`, and the last one that found nothing new.
        self.asked = self.nothing = 0
        #: Held while the source makes a plan: `look` may be called by another thread than `take`.
        self._planning = threading.Lock()

    def look(self, number: int) -> bool:
        """Return whether the source has new rows; keep their plan for `take`.

        Does not call the source again while a kept plan is valid. ``number``: the number of the
        micro-batch, for errors. Raises OSError, EOFError or an error of Spark if a repetition may
        help, else SourceError.
        """
        with self._planning:
            last = self.last
            if self._ahead is None or self._ahead[2] != last.last:
                found = self._asked(last, number)
                self._ahead = None if found is None else (*found, last.last)
            return self._ahead is not None

    def take(self, before: _Taken, number: int) -> _Taken | None:
        """Return ``before`` with the source's next plan added, or None if there are no new rows.

        Uses the plan that `look` has kept, if it follows ``before``. Raises the errors of `look`.
        """
        with self._planning:
            ahead, self._ahead = self._ahead, None
            if ahead is not None and ahead[2] == before.last:
                return before.plus(*ahead[:2])
            found = self._asked(before, number)
            return None if found is None else before.plus(*found)

    def _asked(self, before: _Taken, number: int) -> tuple[Any, str] | None:
        """Return the source's next plan and its digest, or None if there are no new rows.

        Raises SourceError for a wrong or repeated plan, and for lasting errors of the source.
        """
        where = f"spout {self.name!r}, micro-batch {number}"
        self.asked += 1
        asked = self.asked
        previous = None if before.last is None else json.loads(json.dumps(before.last))

        def planned() -> tuple[Any, Any]:
            plan = self.source.plan(previous)
            if plan is None:
                return None, None
            # `divided` may change its argument.
            other = copy(plan) if isinstance(plan, dict | list) else plan
            return self.source.divided(plan, task_slots(self._spark)), other

        found, error = _result(planned)
        if error is not None:
            raise _raised(where, "plan()", error) from error
        plan, other = found
        if plan is None:
            self.nothing = asked
            return None
        try:
            text = json.dumps(plan, sort_keys=True, allow_nan=False)
            # Divided for one task, a plan is the same with any number of slots. Nested values are
            # not copied, so this comes after `text`.
            compared = json.dumps(self.source.divided(other, 1), sort_keys=True)
        except (TypeError, ValueError) as error:
            raise SourceError(
                f"{where}: plan() must return a JSON value or None, got {type(plan).__name__} "
                f"({error}); use dicts, lists, strings and finite numbers, also in divided()"
            ) from None
        # The form in which it comes back from the checkpoint: tuples are lists.
        plan = json.loads(text)
        digest = blake2b(compared.encode(), digest_size=8).hexdigest()
        if digest in before.seen:
            raise SourceError(
                f"{where}: plan() returned a plan that this checkpoint has already, "
                f"{_shown(text)}. Nothing was written. The plan must name rows after those of "
                "`previous`, and must be None if there are none"
            )
        return plan, digest

    def check(self, plan: Any, number: int) -> None:
        """Raise SourceError if the rows of a recorded plan have changed.

        Raises OSError, EOFError or an error of Spark if a repetition may help.
        """
        self._called("check()", lambda: self.source.check(plan), plan, number)

    def _called(self, what: str, call: Callable[[], Any], plan: Any, number: int) -> Any:
        """Return the result of ``call``, a method of the source with a recorded plan.

        Raises SourceError, with the way out, for an error that a repetition would meet again.
        """
        found, error = _result(call)
        if error is None:
            return found
        own = isinstance(error, SourceError)
        where = f"spout {self.name!r}, micro-batch {number}"
        said = str(error) if own else str(_raised(where, what, error))
        raise SourceError(f"{said}. {self.way_out([plan], said)}") from error

    def way_out(self, plans: Sequence[Any], said: str) -> str:
        """Return a sentence with the command that leaves out the rows of plans for good.

        ``said``: the text of the error. The command names the planned files that the error is
        about, or else all rows of the plans.
        """
        assert self.source.source_kind is not None
        kind, root = self.source.source_kind, getattr(self.source, "_root", "")
        command = skip_command(self._url, self.name, kind, root, plans, said)
        return f"To continue without rows that can never be read again, run: {command}"

    def read(self, spark: SparkSession, plan: Any, number: int) -> InputFrame:
        """Return the rows of a recorded plan; SourceError if the source returns other columns.

        Raises OSError, EOFError or an error of Spark if a repetition may help, else SourceError.
        """
        where = f"spout {self.name!r}, micro-batch {number}"
        frame = self._called("read()", lambda: self.source.read(spark, plan), plan, number)
        is_frame = isinstance(frame, DataFrame) or is_connect(frame)
        if not is_frame or is_connect(frame) != is_connect(spark):
            raise SourceError(
                f"{where}: read() must return a DataFrame of the session that it was given, got "
                f"{type(frame).__module__}.{type(frame).__qualname__}"
            )
        wanted, found = (
            [f"{one.name} {one.dataType.simpleString()}" for one in schema.fields]
            for schema in (from_arrow_schema(self.source.schema), frame.schema)
        )
        if wanted != found:
            raise SourceError(
                f"{where}: read() must return the columns of the source's schema, "
                f"{', '.join(wanted)}; got {', '.join(found)}"
            )
        return InputFrame(frame, self.name, repeats=self.source.repeatable)


class SourceRows(PlannedRows):
    """The spouts of a topology whose sources are a `PlannedSource`.

    ``sources``: the sources by spout. ``spark``: the session of the query. ``state``: the open
    checkpoint. ``ends``: whether the query ends when it has taken the rows that exist at its
    start. ``once``: whether the first micro-batch takes all plans up to the first None, and later
    ones nothing.
    """

    def __init__(
        self,
        sources: Mapping[str, PlannedSource],
        spark: SparkSession,
        state: State,
        *,
        ends: bool,
        once: bool,
    ) -> None:
        self._spark = spark
        if ends:
            sources = {name: source.bounded() for name, source in sources.items()}
        self._once = once
        done = state.plan(state.last_done)
        self._number = 0 if done is None else done.number + 1
        self._spouts = [
            _Spout(
                name,
                source,
                _Taken.of(None if done is None else done.offsets.get(name)),
                spark,
                state.url,
            )
            for name, source in sources.items()
        ]
        #: By spout, an empty frame that carries the columns and the session.
        self._empty = {
            name: spark.createDataFrame([], from_arrow_schema(source.schema))
            for name, source in sources.items()
        }

    # -- for the engine ---------------------------------------------------------------------------

    def plan(self, number: int, parent: Plan | None) -> Mapping[str, Any]:
        """Return, by spout, the source's next plan, if it has one, in the form of `_Taken.body`.

        With ``once``: all plans in the first micro-batch, and none in later ones. Raises the errors
        of `_Spout.take`; without ``once``, an OSError or EOFError is logged instead.
        """
        found = {}
        for one in self._spouts:
            before = _Taken.of(None if parent is None else parent.offsets.get(one.name))
            taken = before.carried()
            if not self._once:
                taken = self._next(one, taken, number)
            elif parent is None:
                taken = self._all(one, taken, number)
            found[one.name] = taken.body()
        return found

    def _next(self, one: _Spout, taken: _Taken, number: int) -> _Taken:
        """Add the source's next plan, if it has new rows; log an OSError or EOFError of it."""
        try:
            return one.take(taken, number) or taken
        except (OSError, EOFError) as error:  # it must not hold back other spouts and retries
            _log.warning(
                "spout %s: its source did not answer, and micro-batch %d takes none of its rows: "
                "%s",
                one.name,
                number,
                one_line(error),
            )
            return taken

    def _all(self, one: _Spout, taken: _Taken, number: int) -> _Taken:
        """Add all plans of a source up to its first None; SourceError after 10,000 without one."""
        for _ in range(_MOST_PLANS):
            more = one.take(taken, number)
            if more is None:
                return taken
            taken = more
        raise SourceError(
            f"spout {one.name!r}: its source returned {_MOST_PLANS} plans and no None, so it does "
            "not end as run_batch() needs; use start(), or give the source an end"
        )

    def inputs(self, plan: Plan) -> list[InputFrame]:
        """Read the plans: return the rows of each, and an empty input for a spout without plans."""
        found: list[InputFrame] = []
        for one in self._spouts:
            rows = _Taken.of(plan.offsets.get(one.name)).rows
            found += [one.read(self._spark, each, plan.number) for each in rows]
            if not rows:
                nothing = Snapshot(self._spark.range(0, 0, 1, 1), _without_rows)
                found.append(InputFrame(self._empty[one.name], one.name, nothing, tasks=0))
        return found

    def mended(self, plan: Plan) -> Plan:
        """Check the rows before they are read again: raise SourceError, or return the same plan."""
        self._check(plan)
        return plan

    def replaced(self, plan: Plan) -> str | None:
        """Check the rows that were read: raise SourceError if they have changed, or return None."""
        self._check(plan)
        return None

    def way_out(self, plan: Plan, said: str) -> str:
        """Return a sentence with the command that leaves out rows that cannot be read.

        The command is for the first spout of which the error ``said`` names a file, or else for the
        first spout. Returns "" if the plan has no rows of these spouts.
        """
        found = [(one, _Taken.of(plan.offsets.get(one.name)).rows) for one in self._spouts]
        outs = [one.way_out(rows, said) for one, rows in found if rows]
        return next((out for out in outs if "--file" in out), next(iter(outs), ""))

    def _check(self, plan: Plan) -> None:
        for one in self._spouts:
            for each in _Taken.of(plan.offsets.get(one.name)).rows:
                one.check(each, plan.number)

    def done(self, plan: Plan, decision: BatchDecision) -> Mapping[str, int]:
        """Note the plans of a finished micro-batch, and report them to the sources; return {}.

        An exception of a source's `done` is logged.
        """
        self._number = plan.number + 1
        for one in self._spouts:
            one.last = _Taken.of(plan.offsets.get(one.name))
        for one in self._spouts:
            for each in one.last.rows:
                error = raised_by(partial(_report, one.source.done, each))
                if error is not None:
                    _log.error(
                        "spout %s: done() of its source raised for the plan %s; the query "
                        "continues",
                        one.name,
                        _shown(json.dumps(each)),
                        exc_info=error,
                    )
        return {}

    # -- for the stream ---------------------------------------------------------------------------

    def has_new(self) -> bool:
        """Return whether any source has a next plan.

        Raises a SourceError at once. Raises another exception only if no other source has one.
        """
        return any_of([partial(one.look, self._number) for one in self._spouts])

    @property
    def is_through(self) -> bool:
        """Whether each source has once returned no plan; those that have not are asked again."""
        open_ones = [one for one in self._spouts if not one.nothing]
        return not any_of([partial(one.look, self._number) for one in open_ones])

    def reaching_ends(self) -> Callable[[], bool]:
        """Return a function that returns whether each source has had nothing new since this call.

        This call is that of `reaching_ends`: a source must return None to a later `plan`.
        """
        # A call that runs now may have looked already.
        before = [one.asked for one in self._spouts]
        return lambda: all(
            one.nothing > count for one, count in zip(self._spouts, before, strict=True)
        )


def _report(done: Callable[[Any], object], plan: Any) -> None:
    """Call ``done`` of a source; raise TypeError if it returns a coroutine."""
    refuse_unrun(done(plan), "done")


def _result(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Call code of a source; return its result, or None and an error that a repetition would meet.

    That error may be of any class: SystemExit, or a panic of an extension. Raises errors that may
    pass, KeyboardInterrupt, and the exceptions of signal handlers.
    """
    found: list[Any] = []
    error = raised_by(lambda: found.append(call()))
    if error is None:
        return found[0], None
    if isinstance(error, _MAY_PASS) and not isinstance(error, AnalysisException):
        raise error
    return None, error


def _raised(where: str, what: str, error: BaseException) -> SourceError:
    said = f"{where}: {what} of its source raised {type(error).__name__}: {one_line(error)}"
    hint = "" if isinstance(error, SourceError) else ". Remove the cause, and start again"
    return SourceError(said + hint)


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _without_rows(batches: Batches) -> Batches:
    return iter(())
