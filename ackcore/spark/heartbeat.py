"""A source without rows that advances when something is due, so that retries need no new data.

Spark runs no micro-batch while no source has anything new.  So the spouts are unioned with a source
of ours: its offset is a number in a file, and it never has rows.  A thread of the driver advances
the number when the first of the waiting records is due, and Spark runs a micro-batch for it.

The number is a hint and no record: whether it is lost, goes back or runs ahead, what is due
follows from the plans alone, and a beat too many is a micro-batch with nothing in it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sql
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

_log = logging.getLogger("ackcore")

FORMAT = "ackcore_heartbeat"

Clock = Callable[[], int]


def wall_clock_ms() -> int:
    """Milliseconds since 1970, as the machine's clock has them."""
    return time.time_ns() // 1_000_000


def read_clock(clock: Clock) -> int:
    """Return what a clock of the user's says, which must be whole milliseconds."""
    now = clock()
    if not isinstance(now, int | np.integer):
        raise TypeError(
            f"clock must return milliseconds since 1970 as an int, got {now!r}; "
            "time.time_ns() // 1_000_000 is such a number"
        )
    return int(now)


class SteadyClock:
    """A clock that goes on from where it was when the one beneath it goes back.

    Parameters
    ----------
    clock : callable
        Returns milliseconds; may go back, or stand still.
    at_least : int, default 0
        What it shows at least: a time that is on record already.
    """

    def __init__(self, clock: Clock, at_least: int = 0) -> None:
        self._clock = clock
        self._last = at_least
        self._ahead = 0
        self._lock = threading.Lock()

    def __call__(self) -> int:
        """Return milliseconds, never fewer than before."""
        with self._lock:
            now = read_clock(self._clock) + self._ahead
            if now < self._last:
                # The difference stays: else whatever is due would wait until the clock has
                # caught up, an hour when it was set back by an hour.
                self._ahead += self._last - now
                now = self._last
            self._last = now
            return now


def read_beat(path: str) -> int:
    """Return a heartbeat's number, 0 if there is none yet."""
    try:
        with open(path, encoding="ascii") as file:
            return int(file.read() or "0")
    except FileNotFoundError:
        return 0
    except ValueError:
        return 0  # torn by a power cut: the reader never goes back, so any number will do


def advance_beat(path: str) -> int:
    """Advance a heartbeat's number; return it."""
    # Not from what was there alone: Spark remembers higher ones when the file is lost.
    beat = max(read_beat(path) + 1, wall_clock_ms())
    temporary = f"{path}.{os.getpid()}.tmp"
    # Renamed, so that the reader in the other process finds a whole number; not synced to disk,
    # since nothing depends on it after a power cut.
    with open(temporary, "w", encoding="ascii") as file:
        file.write(str(beat))
    os.replace(temporary, path)
    return beat


class HeartbeatReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The heartbeat's number as a stream's offset."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._target: int | None = None

    def initialOffset(self) -> dict[str, int]:
        """A new query starts below any beat, so that its first micro-batch may be the beat's."""
        return {"beat": 0}

    def prepareForTriggerAvailableNow(self) -> None:
        """Beats from now on are another run's."""
        self._target = read_beat(self._path)

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:
        """The number; never less than what the query has seen."""
        beat = read_beat(self._path) if self._target is None else self._target
        return {"beat": max(start["beat"], beat)}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        """No rows, no task to read them."""
        return []

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        """Never called, as there are no partitions."""
        return iter(())


class Heartbeat(DataSource):
    """The data source ``ackcore_heartbeat``; its option ``path`` names the number's file."""

    @classmethod
    def name(cls) -> str:
        """What ``format()`` is given."""
        return FORMAT

    def schema(self) -> str:
        """One column, of no rows."""
        return "beat bigint"

    def streamReader(self, schema: StructType) -> HeartbeatReader:
        """Spark passes the schema by this name."""
        return HeartbeatReader(self.options["path"])


def with_heartbeat(spark: SparkSession, frame: DataFrame, path: str) -> DataFrame:
    """Return a streaming DataFrame that has a micro-batch for each beat also.

    Parameters
    ----------
    spark : SparkSession
        The one that the query will run in.
    frame : DataFrame
        Streaming.  Its columns stay as they are, but may be null for all that Spark knows.
    path : str
        The number's file, on the driver's machine.
    """
    spark.dataSource.register(Heartbeat)
    beats = spark.readStream.format(FORMAT).option("path", path).load()
    nulls = [_null(field.name, field.dataType) for field in frame.schema.fields]
    # The frame comes first: its partitions keep their numbers.
    return frame.union(beats.select(*nulls))


def _null(name: str, kind: Any) -> Column:
    return sql.lit(None).cast(kind).alias(name)


class Pacemaker:
    """The thread that advances the number when something is due.

    Parameters
    ----------
    path : str
        The number's file.
    clock : callable
        Returns milliseconds, by the clock that made the due times.
    poll_ms : int
        How often to look at the clock while something waits.
    called : callable, optional
        Tells whether someone asks for a micro-batch now: looked at once a second.
    """

    #: How often what other processes ask for is looked at.
    CALLED_S = 1.0

    def __init__(
        self,
        path: str,
        clock: Clock,
        poll_ms: int = 200,
        called: Callable[[], bool] | None = None,
    ) -> None:
        self._path = path
        self._clock = clock
        self._poll_s = poll_ms / 1000
        self._called = called
        self._due_ms: int | None = None
        self._answered = False
        self._stopped = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._beat, name="ackcore-heartbeat", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def schedule(self, due_ms: int | None) -> None:
        """Say when the first of the records that wait now is due; None if none waits."""
        with self._changed:
            self._due_ms = due_ms
            self._answered = False
            self._changed.notify()

    def stop(self) -> None:
        """End the thread; waits for it."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _beat(self) -> None:
        look_at = 0.0
        while True:
            with self._changed:
                if self._stopped:
                    return
                due = self._due_ms
                beat = due is not None and self._clock() >= due
                if beat:
                    self._due_ms = None
            now = time.monotonic()
            if self._called is not None and not self._answered and now >= look_at:
                look_at = now + self.CALLED_S
                with contextlib.suppress(OSError, RuntimeError):
                    # One beat for each call: the next micro-batch answers it and says so, and it
                    # tells of what is damaged, too.
                    self._answered = self._called()
                    beat = beat or self._answered
            if beat:
                try:
                    advance_beat(self._path)
                except OSError as error:
                    # A disk that is full now may have room later; the query itself will tell.
                    _log.warning("the heartbeat cannot be written, trying again: %s", error)
                    with self._changed:
                        if self._due_ms is None:
                            self._due_ms = due if due is not None else 0
            with self._changed:
                if not self._stopped:
                    self._changed.wait(self._pause_s())

    def _pause_s(self) -> float | None:
        pauses = []
        if self._due_ms is not None:
            left = (self._due_ms - self._clock()) / 1000
            # In steps: the clock may be another than this machine's.
            pauses.append(min(max(left, 0.001), self._poll_s))
        if self._called is not None and not self._answered:
            pauses.append(self.CALLED_S)
        return min(pauses, default=None)
