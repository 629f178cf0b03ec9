"""A topology on its open checkpoint: the steps that `start` and `run_batch` have in common."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import SparkSession

from ackcore.dead_limit import DeadLimit
from ackcore.spark.base.atomic import fenced
from ackcore.spark.base.clocks import Clock, read_clock
from ackcore.spark.base.errors import CheckpointReadOnly, StateError
from ackcore.spark.base.paths import local_path
from ackcore.spark.base.session import refuse_unnameable
from ackcore.spark.base.sources import kept_schemas, source_schema
from ackcore.spark.checkpoint.state import State
from ackcore.spark.checks import (
    check,
    check_dead_topic,
    check_options,
    check_places,
    interval_s,
    read_trigger,
)
from ackcore.spark.dead_letters.store import DeadLetters, check_letters_url
from ackcore.spark.dead_letters.topic import DeadLetterTopic, Place, TopicWriter
from ackcore.spark.engine.batch import Engine
from ackcore.spark.engine.insist import Pause
from ackcore.spark.listeners import Listeners
from ackcore.spark.planned import planned_rows
from ackcore.spark.sinks.sink import as_sink, release_sinks
from ackcore.spark.stores.interface import StoreUnavailable
from ackcore.spark.stores.opening import is_bucket, place_of
from ackcore.topology.builder import Topology

if TYPE_CHECKING:
    from ackcore.spark.kafka.frame_groups import FrameGroups


class Deployment:
    """A topology on its open checkpoint, with its sinks claimed and its dead-letter store open.

    The constructor checks all arguments before it opens a file or a store.  See `start` for the
    arguments and the errors.  ``streaming`` is True for streams, and False for bounded sources.

    Attributes: ``topology``: the topology, with its spouts in the order of the checkpoint.
    ``checkpoint``, ``spark_checkpoint``: the place of the checkpoint, and the directory of Spark's
    own part of it, if it has one. ``available_now``, ``trigger``, ``interval_s``: whether a stream
    ends when the sources have been read and no record waits; the keywords for Spark's
    ``trigger()``; and the interval of micro-batches in seconds, or 0. ``limit``: the limit
    on dead records, which has counted nothing yet. ``rows``, ``groups``: the planned spouts, and
    the consumer groups whose offsets ackcore commits for DataFrame sources; None without any.
    """

    def __init__(
        self,
        topology: Topology,
        spark: SparkSession,
        checkpoint: str | os.PathLike[str],
        *,
        streaming: bool,
        max_dead: int | None,
        max_dead_ratio: float | None,
        dead_letters: Place,
        accept_changes: bool,
        listeners: Sequence[Any],
        clock: Clock,
        trigger: str | Mapping[str, Any] | None = None,
        spark_checkpoint: str | os.PathLike[str] | None = None,
    ) -> None:
        DeadLimit(max_dead, max_dead_ratio)  # raises for invalid limits before anything is read
        check_options(dead_letters, accept_changes, clock)
        self.listeners = Listeners(listeners)
        check(topology, spark, streaming)
        check_dead_topic(topology, dead_letters)
        #: Whether Spark makes the micro-batches: it must for DataFrames that are streams.
        self.by_spark = streaming and any(one.kind is None for one in topology.spouts.values())
        self.trigger = read_trigger(trigger)
        self.interval_s = interval_s(self.trigger)
        self.available_now = "availableNow" in self.trigger
        window = topology.settings.max_dead_window if streaming else None
        self.limit = DeadLimit(max_dead, max_dead_ratio, window)
        self.spark = spark
        self._clock = clock
        self.checkpoint, letters = _places_of(checkpoint, dead_letters)
        places = {"checkpoint": self.checkpoint, "dead_letters": letters}
        self.spark_checkpoint = Path()
        if self.by_spark:
            self.spark_checkpoint = _spark_checkpoint_of(self.checkpoint, spark_checkpoint)
            refuse_unnameable(str(self.spark_checkpoint), spark)
            places["spark_checkpoint"] = str(self.spark_checkpoint)
        check_places(topology, places)
        schemas = {name: source_schema(spout) for name, spout in topology.spouts.items()}
        self._streaming = streaming
        open_parts = partial(self._open_parts, topology, schemas, dead_letters)
        with _errors_naming("the checkpoint"):
            self.state = State.open(
                self.checkpoint,
                topology,
                sources=kept_schemas(schemas, topology),
                kind="stream" if streaming else "batch",
                offsets=self.spark_checkpoint / "offsets" if self.by_spark else None,
                accept_changes=accept_changes,
                clock_ms=read_clock(clock),
                rehearse=lambda state: open_parts(state).close(),
            )
        with ExitStack() as stack:
            stack.callback(self.state.close)
            stack.push(open_parts(self.state))
            self._report_last()
            # Last: a refused start leaves the recorded place of the dead letters as it is.
            with _errors_naming("the dead letters"):
                self.letters = self._own_letters()
            self._stack = stack.pop_all()

    def _open_parts(
        self, topology: Topology, schemas: Mapping[str, pa.Schema], letters: Place, state: State
    ) -> ExitStack:
        """Claim the sinks, open the sources, and check the dead letters.

        Returns the stack that closes the sources and releases the sinks. Nothing is written into
        the checkpoint, and nothing reported to the sources.
        """
        with ExitStack() as stack:
            self.topology = topology.in_order(state.spout_order)
            deployment = f"{state.deployment_key:016x}"
            writers = {sink.name: sink.writer for sink in topology.sinks.values()}
            stack.callback(release_sinks, writers, deployment)
            for name, writer in writers.items():
                with _errors_naming(f"sink {name!r}"):
                    as_sink(writer).claim(name, deployment, state.url)
            self.groups: FrameGroups | None = None
            has_groups = any(spout.group is not None for spout in self.topology.spouts.values())
            if self.by_spark and has_groups:
                from ackcore.spark.kafka.frame_groups import FrameGroups  # noqa: PLC0415 - an extra

                log = self.spark_checkpoint / "offsets"
                self.groups = FrameGroups(self.topology, state.deployment_key, log)
                stack.callback(self.groups.close)
            ends, once = self.available_now or not self._streaming, not self._streaming
            self.rows = planned_rows(self.topology, self.spark, state, ends=ends, once=once)
            if self.rows is not None:
                stack.callback(self.rows.close)
            with _errors_naming("the dead letters"):
                spouts = self.topology.spouts.items()
                sources = {name: schemas[name] for name, spout in spouts if spout.tracked}
                self._topic: TopicWriter | None = None
                if isinstance(letters, DeadLetterTopic):
                    self._topic = TopicWriter(letters, deployment, sources)
                    stack.callback(self._topic.close)
                path = letters.store if isinstance(letters, DeadLetterTopic) else letters
                self._own_letters = DeadLetters.checked(
                    state.url, state.deployment_key, path, sources, state.records
                )
            return stack.pop_all()

    def _report_last(self) -> None:
        """Report the last done micro-batch to the sources and groups again.

        The driver that ran it may have died before its own report.
        """
        state = self.state
        plan, decision = state.plan(state.last_done), state.decision(state.last_done)
        if plan is None or decision is None:
            return
        with fenced(state.check_owner):
            if self.groups is not None:
                self.groups.done(decision)
            if self.rows is not None:
                self.rows.done(plan, decision)

    def _write_dead_letters(self, number: int, dead: Mapping[str, pa.Table]) -> None:
        self.letters.write(number, dead)
        if self._topic is not None:
            self._topic.write(number, dead)

    def engine(self, pause: Pause | None = None) -> Engine:
        """Return a new engine, which runs the micro-batches on the open checkpoint.

        ``pause``: waits for a number of seconds; returns whether to stop.
        """
        return Engine(
            self.topology,
            self.spark,
            self.state,
            self._write_dead_letters,
            clock=self._clock,
            pause=pause,
            offsets=self.rows,
            commit_groups=None if self.groups is None else self.groups.done,
        )

    def close(self) -> None:
        """Close the sources and the dead letters, release the sinks, and close the checkpoint.

        A second call has no effect.
        """
        self._stack.close()


@contextmanager
def _errors_naming(part: str) -> Iterator[None]:
    """Raise a StateError of the block again, with ``part`` before a message that lacks it."""
    try:
        yield
    except StateError as error:
        # The other classes name the part by themselves.
        unnamed = type(error) in (StateError, CheckpointReadOnly, StoreUnavailable)
        if unnamed and error.part is None:
            error.part = part
            error.args = (f"{part}: {error}",)
        raise


def _places_of(checkpoint: str | os.PathLike[str], dead_letters: Place) -> tuple[str, str | None]:
    """Return the paths or URLs of a checkpoint and of its dead letters, None if they have none.

    Raises ValueError if only the dead letters are not at a URL.
    """
    place = place_of(checkpoint, "checkpoint")
    path = dead_letters.store if isinstance(dead_letters, DeadLetterTopic) else dead_letters
    letters = None if path is None else place_of(path, "dead_letters")
    if letters is not None:
        check_letters_url(letters, place)
    return place, letters


def _spark_checkpoint_of(checkpoint: str, given: str | os.PathLike[str] | None) -> Path:
    """Return the directory of Spark's own part of a checkpoint.

    Raises ValueError or TypeError if ``given``, the argument of `start`, is no path of a file
    system, or is None although the checkpoint is a URL.
    """
    if given is not None:
        return local_path(given, "spark_checkpoint")
    if not is_bucket(checkpoint):
        return Path(checkpoint, "spark")
    raise ValueError(
        f"spark_checkpoint must be given if the checkpoint is a URL ({checkpoint!r}): a "
        "directory for Spark's offset log, which the driver writes and the next driver reads"
    )
