"""The growth of the driver's Python while all of a micro-batch fails, in a process of its own."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ackcore.examples.quiet_spark import spark_session
from ackcore.spark import run_batch
from ackcore.topology import TopologyBuilder
from bench.topologies import FailBelow, PassOn, passed_on, write_long_lines
from bench.topology_jobs import CORES, DAY_MS

#: By path, what the topology is to have besides: of those that find no room a fifth waits.
PATHS: dict[str, Callable[[int], dict[str, int]]] = {
    "waits": lambda rows: {"max_waiting": rows},
    "dies": lambda rows: {"max_waiting": rows, "max_attempts": 1},
    "no room": lambda rows: {"max_waiting": rows // 5},
    "settled": lambda rows: {"max_waiting": rows},
    "behind an exchange": lambda rows: {"max_waiting": rows},
}
_LETTERS, _WARM_UP = 10, 100_000
_FIELDS = {"RSS": "VmRSS", "RssAnon": "RssAnon"}


class Waits(Exception):
    """All that is left waits for a retry."""


def wait_no_longer(_seconds: float) -> None:
    """For `run_batch`, which waits until something is due: end it."""
    raise Waits


@contextlib.contextmanager
def growth() -> Iterator[Callable[[], dict[str, float]]]:
    """Give by how many MB this process has grown at most, as far as a look each 20 ms shows.

    ``RssAnon`` is without what is mapped of files, which the kernel takes back when it needs room.
    """

    def now() -> dict[str, float]:
        lines = Path("/proc/self/status").read_text().splitlines()
        told = {name: value for name, _, value in (line.partition(":") for line in lines)}
        return {name: int(told[field].split()[0]) * 1024 / 1e6 for name, field in _FIELDS.items()}

    before, done = now(), threading.Event()
    most = dict.fromkeys(before, 0.0)

    def look() -> None:
        while not done.wait(0.02):
            for name, megabytes in now().items():
                most[name] = max(most[name], megabytes - before[name])

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield lambda: most
    finally:
        done.set()
        thread.join()


class FailingBatches:
    """A session; a turn is a micro-batch of small records all of which fail, on one of `PATHS`."""

    def __init__(self) -> None:
        self._session = spark_session(f"local[{CORES}]")
        self._spark, _ = self._session.__enter__()
        self._spark.conf.set("spark.sql.adaptive.enabled", "true")

    def close(self) -> None:
        """Stop the session."""
        self._session.__exit__(None, None, None)

    def __call__(self, path: str, rows: int) -> dict[str, float]:
        """Return by how much this process grew at most; a small micro-batch did alike before."""
        self._run(path, min(rows, _WARM_UP))
        began = time.perf_counter()
        return self._run(path, rows) | {"seconds": time.perf_counter() - began}

    def _run(self, path: str, rows: int) -> dict[str, float]:
        with tempfile.TemporaryDirectory() as place:
            lines = Path(place, "lines")
            lines.mkdir()
            write_long_lines(lines, rows, _LETTERS)
            topology = self._builder(path, lines, rows).build(**PATHS[path](rows))
            with contextlib.suppress(Waits), growth() as megabytes:
                # By a clock that stands still, so that no retry is due.
                checkpoint = Path(place, "checkpoint")
                run_batch(
                    topology,
                    self._spark,
                    checkpoint,
                    max_dead_ratio=None,
                    clock=lambda: DAY_MS,
                    wait=wait_no_longer,
                )
            return megabytes()

    def _builder(self, path: str, lines: Path, rows: int) -> TopologyBuilder:
        frame: Any = self._spark.read.parquet(str(lines))
        if path == "behind an exchange":
            builder = passed_on(frame, PassOn())
            builder.bolt("fails", FailBelow(rows)).fields("bolt", "id")
            return builder
        builder = passed_on(frame, FailBelow(rows))
        if path == "settled":
            builder.bolt("kept", FailBelow(0)).fields("bolt", "id")
        return builder
