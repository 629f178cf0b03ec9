"""Drivers that are processes to kill, and the checks of the simulated world that they run in.

No tests; a module of its own, so that a fork server can load it once for all of them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from contextlib import suppress

#: Lines of each micro-batch; those that begin with "bad" are dead in the end.
BATCHES = (["a", "bad-b", "c", "d"], ["e", "f", "bad-g", "bad-h"])
KEPT = sorted(line.upper() for lines in BATCHES for line in lines if not line.startswith("bad"))
DEAD = sorted(line for lines in BATCHES for line in lines if line.startswith("bad"))
STEPS = [
    "planned",
    "ran",
    "decided",
    "refused",
    "in-transaction",
    "in-sink",
    "refusals-closed",
    "in-dead-letters",
    "acted",
    "marked",
]


def in_processes(drive, patience_s):
    """Return what has `drive` run in a process of its own, and returns what that ended with."""
    context = multiprocessing.get_context("forkserver")
    # What takes long to load; its path has not this directory.
    context.set_forkserver_preload(["ackcore.spark.engine.batch", "ackcore.topology"])

    def driver(*of):
        process = context.Process(target=drive, args=of)
        process.start()
        process.join(patience_s)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and its JVM, if it has one
        assert process.exitcode is not None
        return process.exitcode

    return driver
