"""A source without rows for Spark's query, which causes micro-batches without new data.

Spark runs no micro-batch while no source has new data.  So the spouts are unioned with Spark's
source for text files on an empty directory.  When the first waiting record is due, or a planned
spout has new rows, a thread of the driver puts an empty file (a beat) there, and Spark runs a
micro-batch.

Beats are not records: the due times follow from the plans alone, and an unneeded beat only causes
an empty micro-batch.  The start of each micro-batch removes the beats' files.  Spark's notes of
beats are deleted when its query starts (`forget_beats`) and trimmed while it runs (`trim_log`).
Otherwise each beat would add a line to them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sql

from ackcore._files import sync_directory
from ackcore.spark.base.atomic import remove, write_file, writing
from ackcore.spark.base.clocks import Clock
from ackcore.spark.base.paths import numbered
from ackcore.spark.engine.setup import PlannedRows
from ackcore.spark.loop import Pacing

_log = logging.getLogger("ackcore")

#: The special characters of a glob.
_GLOB = re.compile(r"([{}\[\]*?\\])")
#: The age up to which Spark keeps beats; their files' times are a second apart.
_KNOWN = "60s"
#: In Spark's offset log, format 1: the offset of a source without data, and of the heartbeat.
_NOTHING = "-"
_BEAT = re.compile(r'^\{"logOffset": ?\d+\}$')
#: The prefix of the directory of the beats; no other source's path has it.
_DIRECTORY = "ackcore-beats-"

#: Seconds without a micro-batch after which it is triggered again: its file may have been deleted.
BEAT_S = 30.0


class Beats:
    """A directory of empty files, the beats: for each new one Spark runs a micro-batch.

    ``directory``: a path on the driver's machine. The directory is created here, and removed by
    `close`.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()
        self._numbers = count(1)

    @classmethod
    def beside(cls, spark: SparkSession) -> Beats:
        """Return beats in a new directory among the session's temporary files.

        The JVM removes it at its end.
        """
        return cls(Path(spark.sparkContext._temp_dir) / (_DIRECTORY + secrets.token_hex(8)))

    def advance(self) -> None:
        """Write an empty file, so that Spark runs a micro-batch. Raises OSError if that fails."""
        number = next(self._numbers)
        # Cleaners of temporary directories remove one that has been empty for days.
        self.directory.mkdir(parents=True, exist_ok=True)
        hidden = self.directory / f".{number}"
        hidden.touch()
        # Spark ignores files that are older than those it has forgotten.  The number is used as
        # the time, so that each beat is newer than the one before, whatever the clock does.
        os.utime(hidden, (number, number))
        hidden.rename(self.directory / str(number))

    def clear(self) -> bool:
        """Remove all beats; return whether there were any."""
        beats = numbered(self.directory)
        for number in beats:
            (self.directory / str(number)).unlink(missing_ok=True)
        return bool(beats)

    def close(self) -> None:
        """Remove the directory with its files, if possible; raise no error."""
        shutil.rmtree(self.directory, ignore_errors=True)


def with_heartbeat(spark: SparkSession, frame: DataFrame, directory: Path) -> DataFrame:
    """Return a streaming DataFrame that also has a micro-batch for each beat in ``directory``.

    The columns of ``frame`` are kept, but become nullable in the schema.
    """
    reader = spark.readStream.format("text").schema("value string").option("maxFileAge", _KNOWN)
    # Hadoop unescapes nothing after the scheme, but reads special characters as a glob.
    beats = reader.load("file://" + _GLOB.sub(r"\\\1", str(directory)))
    fields = frame.schema.fields
    nulls = [sql.lit(None).cast(field.dataType).alias(field.name) for field in fields]
    # The frame comes first, so that its partitions and sources keep their numbers.
    return frame.union(beats.select(*nulls))


def forget_beats(checkpoint: Path) -> None:
    """Delete all traces of beats from Spark's part of a checkpoint.

    Then neither a repeated micro-batch nor the next one has rows of the heartbeat. An interrupted
    call may be repeated. Spark's query must not run. Raises StateError if the directory cannot be
    written.

    ``checkpoint``: the directory of Spark's part.
    """
    offsets = checkpoint / "offsets"
    log = find_log(checkpoint)
    # Spark reads the last offsets, and those before if the last are not committed.
    for batch in numbered(offsets)[-2:]:
        path = offsets / str(batch)
        with writing(path):
            lines = path.read_text("utf-8").split("\n")
        if lines[0] == "v1":
            # Each source has a line; the heartbeat's is the last.
            forgotten = [*lines[:-1], _BEAT.sub(_NOTHING, lines[-1])]
        else:
            # In format 2 each line starts with the source's number; a source without data has none.
            ours = f"{log.name}:" if log is not None else "none"
            forgotten = [line for line in lines if not line.startswith(ours)]
        if forgotten == lines:
            continue
        # Hadoop's checksum is removed first: a file without a checksum is not verified.
        remove(offsets / f".{batch}.crc")
        sync_directory(offsets)
        text = "\n".join(forgotten).encode()
        write_file(path, lambda file, text=text: file.write(text))  # type: ignore[misc]
    if log is not None:
        remove(log)


def find_log(checkpoint: Path) -> Path | None:
    """Return the directory of Spark's log of the beats that it has read; None if there is none.

    The log is found by its content, because Spark chooses the numbers of sources. ``checkpoint``:
    the directory of Spark's part of the checkpoint.
    """
    sources = checkpoint / "sources"
    for number in reversed(numbered(sources)):
        log = sources / str(number)
        newest = [f"{name}{kind}" for kind in ("", ".compact") for name in numbered(log, kind)[-1:]]
        if any(_DIRECTORY.encode() in (log / name).read_bytes() for name in newest):
            return log
    return None


def trim_log(log: Path) -> None:
    """Remove from Spark's log of a file source all entries before the last compact file.

    Spark must not read or write the log during the call.  A compact file has a line for every file
    that the source ever read.  The last line is kept, so that `find_log` finds the log.
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


class Pacemaker:
    """A thread that writes a beat, an empty file, when a micro-batch is needed without new data.

    ``beat``: `Beats.advance`. ``clock``: returns the time in milliseconds, by the clock of the due
    times. ``poll_s``: the time in seconds between two readings of the clock while a record waits.
    ``is_called``: returns whether something else, such as a replay, waits for a micro-batch.
    ``check``: a function that is called about once a second. ``rows``: the planned spouts whose new
    rows it looks for; None if it looks at retries and requests.
    """

    def __init__(
        self,
        beat: Callable[[], object],
        clock: Clock,
        poll_s: float,
        is_called: Callable[[], bool] = lambda: False,
        check: Callable[[], None] = lambda: None,
        rows: PlannedRows | None = None,
    ) -> None:
        self._thread = threading.Thread(target=self._run, name="ackcore-heartbeat", daemon=True)
        self._stopped = False
        #: Notified when there is work.
        self._changed = threading.Condition()
        self._beat = beat
        self.is_called = is_called
        self.check = check
        self._pacing = Pacing(
            self, rows, clock, self._pause, ends=False, interval_s=0.0, poll_s=poll_s
        )
        self._due_ms: int | None = None
        #: Whether a micro-batch has ended since the last pause.
        self._ran = False

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait for its end."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def is_current(self) -> bool:
        """Whether the caller's thread is that of this pacemaker."""
        return threading.current_thread() is self._thread

    def schedule(self, due_ms: int | None) -> None:
        """Plan the next beat after a micro-batch, which answers all beats before it.

        ``due_ms``: the time at which the first waiting record is due; None if none waits. It is
        ignored with ``rows``.
        """
        with self._changed:
            self._due_ms, self._ran = due_ms if self._pacing.rows is None else None, True
            self._changed.notify()

    def is_unfinished(self) -> bool:
        """Return False: Spark repeats an unfinished micro-batch without a beat."""
        return False

    def next_due_ms(self) -> int | None:
        """Return the time at which the first waiting record is due; None if none waits."""
        return self._due_ms

    def _pause(self, seconds: float) -> bool:
        """Wait until a micro-batch has ended, for ``seconds`` at most; return whether to stop."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._ran, seconds)
            if self._ran:
                self._ran = False
                self._pacing.ran(0)
            return self._stopped

    def _run(self) -> None:
        complained = False
        while True:
            # An error of a source or of the user's clock: the micro-batch raises it, too, and ends
            # the query.
            with contextlib.suppress(BaseException):
                if not self._pacing.next():
                    return
            # Only a micro-batch that ends after the beat answers it.
            if self._pause(0):
                return
            pause_s = BEAT_S
            try:
                self._beat()
                complained = False
            except OSError as error:
                # A full disk may have room later; the query itself reports lasting errors.
                if not complained:
                    _log.warning(
                        "the file that makes Spark run a micro-batch for retries and planned rows "
                        "cannot be written; ackcore tries again: %s",
                        error,
                    )
                complained, pause_s = True, self._pacing.poll_s
            # One beat is enough: the micro-batch takes all retries, requests and rows.
            if self._pause(pause_s):
                return
