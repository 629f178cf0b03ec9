"""The base classes of executors and collectors, checks of bolts, and joined emissions."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import pyarrow as pa

from ackcore._arrow.record_batches import offsets_of
from ackcore._columns import as_count
from ackcore._error_hints import near_miss, signature_of
from ackcore.calls.call_settings import MAX_THREADS, CallSettings
from ackcore.calls.rate_limits import RateLimit, checked_limit
from ackcore.calls.threads import NOT_RUN
from ackcore.topology.components import (
    AsyncBolt,
    BasicBolt,
    BatchBolt,
    Bolt,
    Component,
    Context,
    output_streams,
)
from ackcore.topology.failure_reasons import ReasonMaker, exception_classes
from ackcore.topology.tuples import (
    Anchors,
    Emission,
    FailedInputs,
    Identity,
    Origin,
    Reason,
    Results,
)

#: The maximum number of joined bytes: an Arrow array of text holds up to 2 GiB.
JOIN_BYTES = 1 << 30


def joined(stream: str, pieces: Sequence[tuple[pa.RecordBatch, Anchors]]) -> list[Emission]:
    """Join the batches that were emitted to one stream, in order, to emissions of up to 1 GiB.

    ``pieces``: the batches with their anchors. Batches that Arrow cannot join stay separate, and
    so does one that is larger by itself. Few large batches cost less in later steps.
    """
    emissions: list[Emission] = []
    starts, room = [0], JOIN_BYTES
    for index, (batch, _) in enumerate(pieces):
        if batch.nbytes > room and index > starts[-1]:
            starts.append(index)
            room = JOIN_BYTES
        room -= batch.nbytes
    for start, stop in pairwise([*starts, len(pieces)]):
        group = pieces[start:stop]
        if len(group) > 1:
            try:
                batch = pa.concat_batches([batch for batch, _ in group])
            except pa.ArrowException:  # dictionaries that do not fit into one
                emissions += [Emission(stream, *piece) for piece in group]
                continue
            group = [(batch, join_anchors([anchors for _, anchors in group]))]
        emissions += [Emission(stream, *piece) for piece in group]
    return emissions


def join_anchors(parts: Sequence[Anchors]) -> Anchors:
    """Join the anchors of one or more emissions, in order, for an emission with all their rows."""
    handles = np.concatenate([part.handles for part in parts])
    if all(part.offsets is None for part in parts):
        return Anchors(handles, None)
    counts = [
        np.ones(len(part.handles), np.int64) if part.offsets is None else np.diff(part.offsets)
        for part in parts
    ]
    return Anchors(handles, offsets_of(np.concatenate(counts)))


def no_stream(component: str, stream: object, declared: Collection[str]) -> ValueError:
    """Return the ValueError for an emission to a stream that is not among those ``declared``."""
    if not declared:
        return ValueError(
            f"{component} declares no outputs, so that it cannot emit; set "
            "outputs = pa.schema([...]) on the bolt"
        )
    return ValueError(
        f"stream must be one of {component}'s outputs, got {stream!r}; "
        + near_miss(str(stream), tuple(declared), "streams")
    )


#: By method of collectors: the bolts whose collector has it, and the advice for other bolts.
_METHODS = {
    "used": (
        "an AsyncBolt",
        "limits of tokens and costs belong to an AsyncBolt; derive the bolt from it",
    ),
    "ack": (
        "a Bolt",
        "the input of any other bolt is acked when its method returns; remove the call",
    ),
    "fail": (
        "a Bolt or a BatchBolt",
        "raise an exception to fail the input of any other bolt, such as Reject or Retry",
    ),
}


class FixedAttributes:
    """The base class of collectors. An unknown attribute raises AttributeError.

    The error has advice if the collectors of other bolts have the attribute.
    """

    __slots__ = ()

    if not TYPE_CHECKING:  # with it, mypy would accept any attribute

        def __getattr__(self, name: str) -> NoReturn:
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in _METHODS:
                owners, way_out = _METHODS[name]
                text = (
                    f"this bolt's collector has no method {name}, which only the collector of "
                    f"{owners} has; {way_out}"
                )
            raise AttributeError(text, name=name, obj=self)


#: The largest ``max_batch`` of an `AsyncBolt`.
MAX_BATCH = 1 << 16

#: The attributes of an `AsyncBolt` that are settings of its calls, besides its limit.
CALL_SETTINGS = (
    "max_concurrency",
    "timeout_s",
    "endpoints",
    "wait_in_task_s",
    "breaker_failures",
    "breaker_reset_s",
)


def call_settings(
    bolt: Component, tasks: int = 1, reject: Iterable[type[Exception] | str] = ()
) -> CallSettings | None:
    """Return the settings of the calls of an `AsyncBolt` in one task.

    For a `BasicBolt` with several ``threads`` the settings have only that number. Returns None for
    any other bolt. Raises TypeError or ValueError if a setting has a wrong type or is out of range,
    and TypeError for a `Bolt` with ``threads``.

    ``tasks``: the number of tasks that share the rate of ``bolt.limit``. ``reject``: the exceptions
    that are not retried, in addition to ``bolt.reject``.
    """
    if isinstance(bolt, Bolt) and hasattr(bolt, "threads"):
        raise TypeError(
            "threads must belong to a BasicBolt, got a Bolt, whose tuples one thread executes; "
            "derive it from BasicBolt, or give it a parallelism"
        )
    if isinstance(bolt, BasicBolt):
        threads = as_count(bolt.threads, "threads", 1, MAX_THREADS)
        if threads == 1:
            return None
        # Threads treat all exceptions alike: waiting and retrying happen elsewhere.
        return CallSettings(max_concurrency=threads, breaker_failures=None, wait_in_task_s=0)
    if not isinstance(bolt, AsyncBolt):
        return None
    given = {name: _plain(bolt, name) for name in CALL_SETTINGS}
    as_count(bolt.max_batch, "max_batch", 1, MAX_BATCH)
    limit = checked_limit(bolt.limit)
    return CallSettings(
        limit=None if limit is None else limit.share(tasks),
        retry_on=exception_classes(bolt.retry_on or (), "retry_on"),
        reject=exception_classes((*reject, *bolt.reject), "reject"),
        **given,
    )


def keep_settings(component: Component) -> None:
    """Store in the bolt object the settings that its class has: numbers, None and rate limits.

    The bolt is pickled, but tasks import its class again. A value that the driver assigned to the
    class, such as a budget from its command line, would be missing there. A setting of the object
    itself is not changed. Defaults in ackcore's classes are not stored.
    """
    classes = type(component).__mro__
    ours = [one for one in classes if one.__module__ == Component.__module__]
    known = {name for one in ours for name in inspect.get_annotations(one)}
    set_by_user = {name for one in classes if one not in ours for name in vars(one)}
    own = vars(component)
    for name in (known & set_by_user) - own.keys():
        value = inspect.getattr_static(component, name)
        if value is None or isinstance(value, int | float | RateLimit):
            own[name] = value


def _plain(bolt: AsyncBolt, name: str) -> Any:
    """Return a setting of a bolt.

    Python makes a method of a function that is set in the class. If it takes no ``self``, such as a
    ``lambda: Fixed(8)``, the function itself is returned.
    """
    value = getattr(bolt, name)
    if inspect.ismethod(value) and not signature_of(value.__func__).parameters:
        return value.__func__
    return value


log = logging.getLogger("ackcore")


def refuse_returned(result: object, emit: str) -> None:
    """Raise `TypeError` if a method of a bolt returned a value, which would be lost.

    ``emit``: the call that the error suggests instead of ``return``.
    """
    if isinstance(result, NOT_RUN):
        way_out = f"emit values by {emit} instead of 'yield'"
        if inspect.iscoroutine(result):
            way_out = "await it in the execute of an AsyncBolt"
        raise TypeError(
            f"a bolt's methods must return None, got {type(result).__name__}, which has not run; "
            f"{way_out}"
        )
    if result is not None:
        way_out = f"emit values by {emit}"
        if isinstance(result, BaseException):
            way_out = "raise it instead of returning it"
        raise TypeError(
            f"a bolt's methods must return None, got {type(result).__name__}; {way_out}"
        )


def overrides_flush(component: Component) -> bool:
    """Return whether a bolt is a `BasicBolt` or a `BatchBolt` with a ``flush`` of its own."""
    for base in (BatchBolt, BasicBolt):
        if isinstance(component, base):
            return type(component).flush is not base.flush or "flush" in vars(component)
    return False


def journaled(component: Component) -> BasicBolt | AsyncBolt:
    """Return the bolt unchanged, after a check that it can have a journal.

    Call it only if ``journal`` is not False. Raises TypeError if ``journal`` is not a bool, or if
    the bolt is neither an `AsyncBolt` nor a `BasicBolt` without a ``flush`` of its own.
    """
    made = type(component).__name__
    if not isinstance(component.journal, bool):
        raise TypeError(
            f"{made}.journal must be True or False, got {type(component.journal).__name__} "
            f"{component.journal!r}"
        )
    if isinstance(component, AsyncBolt):
        return component
    if not isinstance(component, BasicBolt):
        raise TypeError(
            f"{made}.journal must be False, got True for a bolt that is neither an AsyncBolt "
            "nor a BasicBolt: only these make one call per input, whose result a journal can "
            "keep; derive from one of them, or remove journal"
        )
    if overrides_flush(component):
        raise TypeError(
            f"{made}.journal must be False, got True for a bolt with a flush: execute is not "
            "called for an input whose result is in the journal, so flush would miss it; "
            "emit in execute, or remove journal"
        )
    return component


def cleaned_up(cleanup: Callable[[], object], name: str) -> None:
    """Call the ``cleanup`` of the bolt ``name``. Log an exception instead of raising it.

    No record depends on the call any more. Only a KeyboardInterrupt is raised.
    """
    try:
        cleanup()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        text = "%s: cleanup raised %s: %s; no record is affected"
        log.warning(text, *Reason.of(name, error)[:3], exc_info=True)


class BoltExecutor:
    """The common part of the executors (`ackcore.topology.executors.Executor`): one task of a bolt.

    ``context``: the argument of ``prepare``. ``reasons``: converts the bolt's exceptions.
    """

    collector: object = None  # the owner of the tuples

    def __init__(self, component: Component, context: Context, reasons: ReasonMaker) -> None:
        self.component = component
        self.context = context
        self.reasons = reasons
        self._schemas = output_streams(component)
        self._seen = 0  # the handle of the next row
        self._prepared = False
        self._broken: Reason | None = None
        # A bolt with a flush may keep data of its rows until then, so no row is acked before.
        self._until_flush = overrides_flush(component)
        self._failed: set[int] = set()

    def process(
        self, source: str, stream: str, batch: pa.RecordBatch, identity: Identity | None
    ) -> Results:
        """Prepare the bolt before its first row; run it on a batch (`Executor.process`).

        If ``prepare`` has raised, the rows of this and all later batches fail with its exception.
        """
        first, rows = self._seen, batch.num_rows
        self._seen += rows
        if rows and not self._prepared:
            self._prepare()
        if self._broken:
            return self._results([], dict.fromkeys(range(first, self._seen), self._broken))
        fields = tuple(batch.schema.names)
        origin = Origin(self.collector, source, stream, fields, first, identity)
        return self._process(origin, batch)

    def cleanup(self) -> None:
        """Call the bolt's ``cleanup`` once, if its ``prepare`` succeeded; log an exception."""
        if self._prepared and not self._broken:
            cleaned_up(self.component.cleanup, self.reasons.component)
        self._prepared = False

    def _process(self, origin: Origin, batch: pa.RecordBatch) -> Results:
        """Run the prepared bolt on the rows of a batch."""
        raise NotImplementedError

    def _prepare(self) -> None:
        """Prepare the bolt. Store an exception, with which `process` then fails all rows."""
        self._prepared = True
        try:
            self._call_prepare()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._broken = self.reasons.of(error)
            self._until_flush = False

    def _call_prepare(self) -> None:
        self.component.prepare(self.context)

    def _results(
        self, emissions: list[Emission], failures: dict[int, Reason], still_open: int = 0
    ) -> Results:
        """Return results with the ``failures``, by the row's number in the task.

        ``still_open``: the number of rows neither acked nor failed. It is ignored before a bolt's
        own ``flush``: until then all rows that have not failed count as open.
        """
        if self._until_flush:
            self._failed.update(failures)
            still_open = self._seen - len(self._failed)
        if not failures:
            return Results(emissions, [], still_open)
        reasons = list(failures.values())
        if all(reason is reasons[0] for reason in reasons):
            reasons = reasons[:1]  # encoded once
        handles = np.array(list(failures), np.int64)
        return Results(emissions, [FailedInputs(handles, reasons)], still_open)
