"""Load a log with one producer and twelve unequal workers, some of which are killed.

Twelve processes parse and load the lines of a log.  The fastest is eight times as fast as the
slowest, and each is slow at times. Some lines are damaged. A worker is killed by kill -9, and later
the producer, which is started again and continues. At the end each line is loaded or in the dead
letters.  The number of lines loaded twice is bounded by the lines after the committed position that
were done when the producer died.

    python -m ackcore.examples.log_etl
    python -m ackcore.examples.log_etl --lines 20000 --keep folder
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from ackcore.dispatch import Checkpoint, Dispatcher, Process, Reject

WORKERS = 12
SLOWEST_PER_S, FASTEST_PER_S = 60.0, 480.0
LOADED, DEAD, LOG, POSITION = "loaded", "dead.jsonl", "access.log", "position"
_PATIENCE_S = 120


class LogCounts(NamedTuple):
    """The counts of lines by outcome."""

    lines: int
    loaded: int  # distinct lines
    dead: int
    missing: int  # neither loaded nor dead
    twice: int  # loads of a line after its first
    at_most: int  # the bound of `twice`: lines done but not committed when the producer died
    resumed_at: int  # the position at which the second producer started
    by_worker: dict[str, int]

    @property
    def balance(self) -> bool:
        """Whether each line is loaded or dead, and loads twice are within their bound."""
        ended = not self.missing and self.lines == self.loaded + self.dead
        return ended and self.twice <= self.at_most


# ------------------------- the producer, in its own process


def work(folder: str, worker: int, line: str) -> None:
    """Parse and load a line in a worker, at its own changing speed."""
    number, _, rest = line.partition(" ")
    if not rest.startswith("GET "):
        raise Reject(f"line {number} is damaged: {rest[:20]!r}")
    per_s = SLOWEST_PER_S * (FASTEST_PER_S / SLOWEST_PER_S) ** (worker / (WORKERS - 1))
    # For a tenth of the time, each worker has a tenth of its speed, each at another time.
    if (time.time() * 2 + worker * 7) % 20 < 2:
        per_s /= 10
    time.sleep(random.expovariate(per_s))
    row = json.dumps({"line": int(number), "path": rest.split()[1]})
    # One unbuffered write per row: it is complete before the producer gets the result.
    with open(Path(folder, LOADED, f"{worker}-{os.getpid()}"), "ab", buffering=0) as file:
        file.write(f"{row}\n".encode())


def produce(folder: Path) -> None:
    """Send the lines from the committed position on to the workers."""

    def lines(start: int) -> Iterator[str]:
        with open(folder / LOG, encoding="utf-8") as file:
            yield from islice(file, start, None)

    def bury(position: int, line: str, error: BaseException) -> None:
        with open(folder / DEAD, "a", encoding="utf-8") as file:
            file.write(json.dumps({"line": position, "why": str(error)}) + "\n")
            file.flush()
            os.fsync(file.fileno())

    # Otherwise each worker would import it.
    multiprocessing.set_forkserver_preload(["ackcore.dispatch"])
    Dispatcher(
        lines,
        {
            # Forked workers would keep each other's pipes open after the producer is killed.
            n: Process(work, str(folder), n, context="forkserver")
            for n in range(WORKERS)
        },
        dead=bury,
        checkpoint=folder / POSITION,
        checkpoint_s=0.1,
        timeout_s=10,
    ).run()


# ------------------------- the parent, which starts it, kills it, and counts


def write_log(path: Path, lines: int, damaged: int) -> None:
    """Write a log of numbered requests, some of them cut off."""
    rng = random.Random(1)
    bad = set(rng.sample(range(lines), damaged))
    with path.open("w", encoding="utf-8") as file:
        for n in range(lines):
            file.write(f"{n} {'GE' if n in bad else f'GET /page/{rng.randrange(99)} 200'}\n")


def start(folder: Path) -> subprocess.Popen[bytes]:
    """Start the producer."""
    return subprocess.Popen([sys.executable, "-m", __spec__.name, "--produce", str(folder)])


def loads(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield worker and line of each load; incomplete rows are left out."""
    for file in sorted((folder / LOADED).iterdir()):
        for row in file.read_bytes().split(b"\n")[:-1]:
            yield file.name.partition("-")[0], json.loads(row)["line"]


def wait_for(folder: Path, producer: subprocess.Popen[bytes], count: int) -> None:
    """Wait until the workers have made ``count`` loads."""
    give_up = time.monotonic() + _PATIENCE_S
    while sum(file.read_bytes().count(b"\n") for file in (folder / LOADED).iterdir()) < count:
        if producer.poll() is not None or time.monotonic() > give_up:
            raise RuntimeError(f"the producer came to its end ({producer.poll()}) or to a halt")
        time.sleep(0.02)


def kill_worker(folder: Path, worker: int) -> None:
    """Kill the newest process of a worker by kill -9."""
    pids = [int(file.name.partition("-")[2]) for file in (folder / LOADED).glob(f"{worker}-*")]
    os.kill(pids[-1], signal.SIGKILL)


def run(folder: Path, lines: int) -> LogCounts:
    """Write the log, produce, kill, produce again; return the counts."""
    (folder / LOADED).mkdir(parents=True)
    write_log(folder / LOG, lines, damaged=max(1, lines // 1000))
    producer = start(folder)
    wait_for(folder, producer, lines // 5)
    kill_worker(folder, WORKERS - 1)
    wait_for(folder, producer, lines // 2)
    producer.kill()
    producer.wait()
    with Checkpoint(folder / POSITION) as checkpoint:
        resumed_at = checkpoint.committed
    done = {line for _, line in loads(folder) if line >= resumed_at}
    if start(folder).wait(_PATIENCE_S):
        raise RuntimeError("the producer failed")

    loaded = Counter(line for _, line in loads(folder))
    text = (folder / DEAD).read_text(encoding="utf-8")
    dead = {json.loads(letter)["line"] for letter in text.splitlines()}
    return LogCounts(
        lines=lines,
        loaded=len(loaded),
        dead=len(dead),
        missing=len(set(range(lines)) - loaded.keys() - dead),
        twice=loaded.total() - len(loaded),
        # Each worker may have had one more line in work, and so had the killed one.
        at_most=len(done) + WORKERS + 1,
        resumed_at=resumed_at,
        by_worker=dict(Counter(worker for worker, _ in loads(folder))),
    )


def main() -> int:
    """Run the example and print the counts; return 1 if they do not balance."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--lines", type=int, default=6000, help="of the log; 6000 take 5 s or so")
    parser.add_argument("--keep", type=Path, help="a folder to be made, for what is written")
    parser.add_argument("--produce", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.produce is not None:
        produce(options.produce)
        return 0
    if options.lines < 100:
        parser.error(f"--lines must be at least 100, got {options.lines}")
    with tempfile.TemporaryDirectory() as scratch:
        began = time.monotonic()
        counts = run(options.keep or Path(scratch) / "etl", options.lines)
        took_s = time.monotonic() - began
    print(
        f"{counts.lines:,} lines = {counts.loaded:,} loaded + {counts.dead} dead, in {took_s:.1f} s"
    )
    print(f"killed: worker {WORKERS - 1}, and the producer, which went on at {counts.resumed_at:,}")
    print(f"{counts.twice} were loaded twice, of at most {counts.at_most}")
    shares = [f"{name}: {counts.by_worker.get(str(name), 0)}" for name in range(WORKERS)]
    print("lines by worker, slowest first:", ", ".join(shares))
    print("the counts balance" if counts.balance else "THE COUNTS DO NOT BALANCE")
    return not counts.balance


if __name__ == "__main__":
    sys.exit(main())
