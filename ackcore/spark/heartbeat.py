"""A source without rows that advances when something is due, so that retries need no new data.

Spark runs no micro-batch while no source has anything new.  So the spouts are unioned with a source
of ours: Spark's own for text files, on a directory that is empty.  A thread of the driver puts an
empty file there when the first of the waiting records is due, and Spark runs a micro-batch for it.

A beat is a hint and no record: what is due follows from the plans alone, and a beat too many is a
micro-batch with nothing in it.  So a beat's file is removed as soon as a micro-batch begins, and
what Spark has noted of beats is forgotten whenever its query starts (`forget_beats`) and cut short
while it runs (`trim_log`): else it would grow by a line with every beat, for ever.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sql

from ackcore._files.durable import sync_directory
from ackcore.spark.base.atomic import remove, write_file, writing
from ackcore.spark.base.attendant import Attendant
from ackcore.spark.base.clocks import Clock
from ackcore.spark.base.paths import numbered

_log = logging.getLogger("ackcore")

#: What a glob reads as anything but itself.
_GLOB = re.compile(r"([{}\[\]*?\\])")
#: Beats whose files Spark keeps note of, by their times, which are a second apart.
_KNOWN = "60s"
#: In Spark's offset log, format 1: a source that has nothing yet, and the heartbeat's offset.
_NOTHING = "-"
_BEAT = re.compile(r'^\{"logOffset": ?\d+\}$')
#: How the directory of the beats is called: no other source reads one of that name.
_DIRECTORY = "ackcore-beats-"


class Beats:
    """A directory where an empty file is a beat.

    Parameters
    ----------
    directory : Path
        On the driver's machine; made here, removed by `close`.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()
        self._numbers = count(1)

    @classmethod
    def beside(cls, spark: SparkSession) -> Beats:
        """Make one among the temporary files of a session, which the JVM removes as it ends."""
        return cls(Path(spark.sparkContext._temp_dir) / (_DIRECTORY + secrets.token_hex(8)))

    def advance(self) -> None:
        """Have Spark run a micro-batch."""
        number = next(self._numbers)
        # A sweeper of temporary directories removes one that has been empty for days.
        self.directory.mkdir(parents=True, exist_ok=True)
        hidden = self.directory / f".{number}"
        hidden.touch()
        # Spark passes over files that are older than what it has forgotten.  The number is the
        # time, so that no clock that was set back makes a beat older than the one before.
        os.utime(hidden, (number, number))
        hidden.rename(self.directory / str(number))

    def clear(self) -> bool:
        """Take the beats away; tell whether there were any."""
        beats = numbered(self.directory)
        for number in beats:
            (self.directory / str(number)).unlink(missing_ok=True)
        return bool(beats)

    def close(self) -> None:
        """Remove the directory."""
        shutil.rmtree(self.directory, ignore_errors=True)


def with_heartbeat(spark: SparkSession, frame: DataFrame | None, directory: Path) -> DataFrame:
    """Return a streaming DataFrame that has a micro-batch for each beat also.

    Parameters
    ----------
    spark : SparkSession
        The one that the query will run in.
    frame : DataFrame or None
        Streaming.  Its columns stay as they are, but are nullable in its schema.  Without one
        there are the beats alone.
    directory : Path
        Of the beats.
    """
    reader = spark.readStream.format("text").schema("value string").option("maxFileAge", _KNOWN)
    # Hadoop takes what follows the scheme as it is, but for what a glob is made of.
    beats = reader.load("file://" + _GLOB.sub(r"\\\1", str(directory)))
    if frame is None:
        return beats
    fields = frame.schema.fields
    nulls = [sql.lit(None).cast(field.dataType).alias(field.name) for field in fields]
    # The frame comes first: its partitions keep their numbers, and its sources theirs.
    return frame.union(beats.select(*nulls))


def forget_beats(checkpoint: Path) -> None:
    """Make Spark's part of a checkpoint what it is before the first beat.

    Whether a micro-batch is to be repeated or comes next, it has no rows of the heartbeat.  May be
    cut short anywhere, and repeated; Spark's query must not run.

    Parameters
    ----------
    checkpoint : Path
        Spark's part of it.

    Raises
    ------
    StateError
        If it cannot be written.
    """
    offsets = checkpoint / "offsets"
    log = find_log(checkpoint)
    # Spark reads the last one, and the one before if that was not committed.
    for batch in numbered(offsets)[-2:]:
        path = offsets / str(batch)
        with writing(path):
            lines = path.read_text("utf-8").split("\n")
        if lines[0] == "v1":
            # A line for each source, and ours is the last of them.
            forgotten = [*lines[:-1], _BEAT.sub(_NOTHING, lines[-1])]
        else:
            # Format 2 has the number before each offset, and no line for a source without one.
            ours = f"{log.name}:" if log is not None else "none"
            forgotten = [line for line in lines if not line.startswith(ours)]
        if forgotten == lines:
            continue
        # Hadoop's checksum first: without one, a file is taken as it is.
        remove(offsets / f".{batch}.crc")
        sync_directory(offsets)
        text = "\n".join(forgotten).encode()
        write_file(path, lambda file, text=text: file.write(text))  # type: ignore[misc]
    if log is not None:
        remove(log)


def find_log(checkpoint: Path) -> Path | None:
    """Return where Spark notes the beats that it has seen; None if it has seen none.

    Known by what is in it: which number Spark gives a source is Spark's affair.
    """
    sources = checkpoint / "sources"
    for number in reversed(numbered(sources)):
        log = sources / str(number)
        newest = [f"{name}{kind}" for kind in ("", ".compact") for name in numbered(log, kind)[-1:]]
        if any(_DIRECTORY.encode() in (log / name).read_bytes() for name in newest):
            return log
    return None


def trim_log(log: Path) -> None:
    """Remove from Spark's log of a file source what it read before its last compact file.

    Nothing may be reading or writing there.  A compact file has a line for every file that the
    source ever read; the last one is left, by which `find_log` finds the log.

    Parameters
    ----------
    log : Path
        ``sources/<number>`` of Spark's part of a checkpoint.
    """
    compact = numbered(log, ".compact")
    if not compact:
        return
    last = log / f"{compact[-1]}.compact"
    version, *entries = last.read_bytes().split(b"\n")
    if len(entries) > 1:
        (log / f".{last.name}.crc").unlink(missing_ok=True)
        short = log / f".{last.name}.tmp"
        short.write_bytes(version + b"\n" + entries[-1])
        short.replace(last)
    for suffix in ("", ".compact"):
        for number in numbered(log, suffix):
            if number < compact[-1]:
                (log / f"{number}{suffix}").unlink()
                (log / f".{number}{suffix}.crc").unlink(missing_ok=True)


class Pacemaker(Attendant):
    """The thread that beats when something is due.

    Parameters
    ----------
    beat : callable
        `Beats.advance`.
    clock : callable
        Returns milliseconds, by the clock that made the due times.
    poll_ms : int
        How often to look at the clock while something waits.
    called : callable, optional
        Whether something else waits for a micro-batch, as a replay: called once a second.
    """

    #: How often what other processes ask for is looked at.
    CALLED_S = 1.0

    def __init__(
        self,
        beat: Callable[[], object],
        clock: Clock,
        poll_ms: int = 200,
        called: Callable[[], bool] | None = None,
    ) -> None:
        super().__init__("ackcore-heartbeat")
        self._advance = beat
        self._clock = clock
        self._poll_s = poll_ms / 1000
        self._called = called
        self._due_ms: int | None = None
        self._answered = False

    def schedule(self, due_ms: int | None) -> None:
        """Say when the first of the records that wait now is due; None if none waits."""
        with self._changed:
            self._due_ms = due_ms
            self._answered = False
            self._changed.notify()

    def _run(self) -> None:
        look_at = 0.0
        complained = False
        while True:
            with self._changed:
                if self._stopped:
                    return
                due = self._due_ms
                beat = due is not None and self._left_ms(due) <= 0
                if beat:
                    self._due_ms = None
            now = time.monotonic()
            if self._called is not None and not self._answered and now >= look_at:
                look_at = now + self.CALLED_S
                with contextlib.suppress(OSError, RuntimeError):
                    # One beat for all of it: the next micro-batch takes it, and raises what is
                    # raised here.
                    self._answered = self._called()
                    beat = beat or self._answered
            if beat:
                try:
                    self._advance()
                    complained = False
                except OSError as error:
                    # A disk that is full now may have room later; the query itself will tell.
                    if not complained:
                        _log.warning("the heartbeat cannot be written, trying again: %s", error)
                    complained = True
                    with self._changed:
                        if self._due_ms is None:
                            self._due_ms = due if due is not None else 0
            with self._changed:
                if not self._stopped:
                    # What is due already and could not be written need not be tried without pause.
                    self._changed.wait(self._poll_s if complained else self._pause_s())

    def _left_ms(self, due_ms: int) -> int:
        try:
            return due_ms - self._clock()
        except BaseException:
            # The user's clock: the micro-batch asks it too, and its error ends the query.
            return 0

    def _pause_s(self) -> float | None:
        pauses = []
        if self._due_ms is not None:
            left = self._left_ms(self._due_ms) / 1000
            # In steps: the clock may be another than this machine's.
            pauses.append(min(max(left, 0.001), self._poll_s))
        if self._called is not None and not self._answered:
            pauses.append(self.CALLED_S)
        return min(pauses, default=None)
