"""The executor of bolts that process several inputs at once, in an event loop or in threads.

All inputs of a batch are done when `process` returns. Emissions are in the order of the inputs, so
the results do not depend on which call ended first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field

from ackcore.calls.call_settings import CallSettings
from ackcore.calls.calls import Calls
from ackcore.calls.outcomes import Unavailable, is_marked_final
from ackcore.calls.usage import CallCounts
from ackcore.topology.bolt_calls import cleaned_up, refuse_returned
from ackcore.topology.components import AsyncBolt, BasicBolt, Context
from ackcore.topology.failure_reasons import ReasonMaker
from ackcore.topology.row_collector import (
    AsyncCallCollector,
    CallCollector,
    Emitted,
    GroupCollector,
)
from ackcore.topology.row_executor import SLICE_ROWS, RowExecutor
from ackcore.topology.tuples import Emission, Reason, Results, Tuple


@dataclass(slots=True, eq=False)
class CallInput:
    """An input whose call has begun, and the rows that the call emitted for it."""

    tuple: Tuple
    done: bool = False  # whether its call has ended
    error: BaseException | None = None
    emitted: Emitted = field(default_factory=dict)
    #: The error of an emission that did not fit, in a call of several inputs.
    misfit: BaseException | None = None
    #: StopIteration of an execute in a thread, which a coroutine cannot raise.
    stopped: StopIteration | None = None


#: The inputs of one call.
Group = list[CallInput]


class CallExecutor(RowExecutor):
    """The `Executor` of one task of an `AsyncBolt`, or of a `BasicBolt` with several threads.

    ``context``: the argument of ``prepare``. ``reasons``: converts the bolt's exceptions.
    ``settings``: the settings of the bolt's calls. ``progressed``: called after each call, in the
    order of the inputs.
    """

    def __init__(
        self,
        component: BasicBolt | AsyncBolt,
        context: Context,
        reasons: ReasonMaker,
        settings: CallSettings,
        progressed: Callable[[], None],
    ) -> None:
        super().__init__(component, context, reasons)
        self._settings = settings
        self._max_batch = component.max_batch if isinstance(component, AsyncBolt) else 1
        self._progressed = progressed
        #: Makes the object that runs the calls.
        self.make_calls: Callable[..., Calls[Group, None]] = Calls
        self._calls: Calls[Group, None] | None = None
        #: Called before each call: returns the error with which it is refused, or None.
        self._refusal: Callable[[], Unavailable | None] | None = None
        self._trips = 0  # the number of times that a breaker has opened, as last reported

    def cleanup(self) -> None:
        """Call the bolt's ``cleanup``, if ``prepare`` succeeded; end its event loop or threads."""
        calls = self._calls
        self._calls = None
        if calls is None:
            return
        try:
            if isinstance(self.component, AsyncBolt):
                if self._prepared and not self._broken:
                    bolt = self.component
                    cleaned_up(lambda: calls.complete(bolt.cleanup()), self.reasons.component)
                self._prepared = False
            else:
                super().cleanup()
        finally:
            calls.close()

    def abandon(self) -> None:
        """End the event loop or threads without ``cleanup``, as the end of the process would."""
        if self._calls is not None:
            self._calls.close()
        self._calls = None

    def _call_prepare(self) -> None:
        bolt = self.component
        calls = self._calls = self._made_calls()
        try:
            if isinstance(bolt, AsyncBolt):
                refuse_returned(calls.complete(bolt.prepare(self.context)), self._emit)
            else:
                bolt.prepare(self.context)
        except BaseException:
            self._calls = None
            calls.close()
            raise

    def _made_calls(self) -> Calls[Group, None]:
        function: Callable[..., object] = self._execute_in_thread
        if isinstance(self.component, AsyncBolt):
            function = self._async_call()
        limit = self._settings.limit
        key_of = None if limit is None else lambda group: limit.key_of(group[0].tuple)
        return self.make_calls(function, self._settings, key_of=key_of, refusal=self._refusal)

    def _async_call(self) -> Callable[..., Awaitable[None]]:
        """Return the coroutine function that makes the call of a group of inputs."""
        return self._await_execute if self._max_batch == 1 else self._await_execute_many

    def _run_all(self, slices: Iterator[list[Tuple]]) -> None:
        """Execute the inputs of a batch by calls; the collector gets the results."""
        assert self._calls is not None
        out: deque[CallInput] = deque()  # inputs whose call has begun and not ended, in order
        called: deque[Group] = deque()
        not_made: list[BaseException] = []

        def inputs() -> Iterator[CallInput]:
            for tuples in slices:
                for one in tuples:
                    out.append(CallInput(one))
                    yield out[-1]

        def noted(groups: Iterable[Group]) -> Iterator[Group]:
            try:
                for group in groups:
                    called.append(group)
                    yield group
            except BaseException as error:
                not_made.append(error)
                raise

        pulled = inputs()
        groups: Iterable[Group] = self._grouped(pulled)
        done = 0
        while groups:
            halves: list[Group] = []
            with closing(self._calls.run(noted(groups))) as run:
                while True:
                    # Only the call is in the `try`: an exception of this executor itself ends the
                    # task.
                    try:
                        outcome = next(run, None)
                    except KeyboardInterrupt:
                        raise
                    except BaseException as error:
                        if not_made:
                            raise  # rows that were never pulled would count as done
                        # Not from execute, but from a limit of the user's or a signal handler.
                        self._fail_rest(out, pulled, error)
                        self.collector._convert()
                        return
                    if outcome is None:
                        break
                    group = called.popleft()
                    self._progressed()
                    error_ = outcome.error or group[0].stopped
                    # Any other error may be due to only some of the inputs.
                    of_all = error_ and (
                        self._settings.is_of_call(error_) or is_marked_final(error_)
                    )
                    if error_ and len(group) > 1 and not of_all:
                        half = len(group) // 2
                        halves += group[:half], group[half:]
                        continue
                    for input in group:
                        input.done, input.error = True, error_ or input.misfit
                    while out and out[0].done:
                        input = out.popleft()
                        self._end(input, input.error)
                        done += 1
                        if not done % SLICE_ROWS:
                            self.collector._convert()
            groups = halves
        self.collector._convert()

    def _grouped(self, inputs: Iterator[CallInput]) -> Iterator[Group]:
        """Yield the inputs of each call: up to ``max_batch``, with the same key of the limit.

        Groups with fewer inputs come last. An input whose key cannot be computed is alone.
        """
        most = self._max_batch
        if most == 1:
            for input in inputs:
                yield [input]
            return
        limit = self._settings.limit
        begun: dict[Hashable, Group] = {}
        for input in inputs:
            try:
                key = None if limit is None else limit.key_of(input.tuple)
            except KeyboardInterrupt:
                raise
            except BaseException:  # user code, which is run again for the call, and fails it
                yield [input]
                continue
            group = begun.setdefault(key, [])
            group.append(input)
            if len(group) == most:
                yield begun.pop(key)
        yield from begun.values()

    def _end(self, input: CallInput, error: BaseException | None) -> None:
        """Pass the rows or the error of an input to the collector: inputs end in their order."""
        if error is not None:
            self.collector._raised(input.tuple, error)
        else:
            self.collector._done(input.tuple, input.emitted)

    def _fail_rest(
        self, out: deque[CallInput], pulled: Iterator[CallInput], error: BaseException
    ) -> None:
        """Fail the inputs that have not ended: ``out``, which were called, and then ``pulled``.

        ``error``: the exception that ended the event loop or threads, and that no call raised. All
        later inputs of an `AsyncBolt` fail too; a `BasicBolt` gets new threads.
        """
        for input in out:
            self.collector._raised(input.tuple, input.error or error)
        out.clear()
        for input in pulled:
            self.collector._raised(input.tuple, error)
        if isinstance(self.component, AsyncBolt):
            # The objects it prepared belong to the loop that is now closed.
            self._broken = self.reasons.of(error)
        else:
            self._calls = self._made_calls()

    # ------------------------------------------------------------------------------- the calls

    async def _await_execute(self, group: Group, endpoint: object = None) -> None:
        (input,) = group
        execute: Callable[[Tuple, AsyncCallCollector], Awaitable[object]] = self.component.execute  # type: ignore[assignment]
        collector = AsyncCallCollector(self.collector, input.tuple, endpoint)
        try:
            result = await execute(input.tuple, collector)
            if result is not None:
                self._refuse_returned(result)
        finally:
            input.emitted = collector.close()

    async def _await_execute_many(self, group: Group, endpoint: object = None) -> None:
        execute: Callable[..., Awaitable[object]] = self.component.execute_many  # type: ignore[union-attr]
        collectors = [GroupCollector(self.collector, input.tuple, endpoint) for input in group]
        try:
            result = await execute([input.tuple for input in group], collectors)
            if result is not None:
                self._refuse_returned(result, "collectors[i].emit(...)")
        finally:
            for input, collector in zip(group, collectors, strict=True):
                input.emitted, input.misfit = collector.close(), collector.error

    def _execute_in_thread(self, group: Group) -> None:
        (input,) = group
        execute: Callable[[Tuple, CallCollector], object] = self.component.execute  # type: ignore[assignment]
        collector = CallCollector(self.collector, input.tuple)
        try:
            result = execute(input.tuple, collector)
            if result is not None:
                self._refuse_returned(result)
        except StopIteration as error:
            input.stopped = error
        finally:
            input.emitted = collector.close()

    def _results(
        self, emissions: list[Emission], failures: dict[int, Reason], still_open: int = 0
    ) -> Results:
        # Rows without a Python value fail when they are pulled, which may be before or after
        # their neighbours raise.  Sort, so that the order is deterministic.
        results = super()._results(emissions, dict(sorted(failures.items())), still_open)
        counts = self._calls.counts if self._calls else CallCounts()
        told, self._trips = self._trips, counts.trips
        trips = max(0, self._trips - told)
        used = None if self._settings.limit is None else counts.used.taken()
        return results._replace(breaker_trips=trips, used=used)
