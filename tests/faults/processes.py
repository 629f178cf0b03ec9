"""A driver and all that it starts, JVM, executors and workers, to be killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import uuid
from pathlib import Path

PATIENCE_S = 300


def eventually(what):
    """Wait until something holds."""
    until = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < until
        time.sleep(0.05)


def state_of(pid):
    """How the system says that a process is; None if it is no more."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None


class Processes:
    """The processes of one driver, found by a word in their environment."""

    def __init__(self, command, log, environment, **more):
        self._word = uuid.uuid4().hex
        with open(log, "ab") as sink:
            self.driver = subprocess.Popen(
                command,
                env={**environment, "ACKCORE_TEST_WORD": self._word},
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                **more,
            )

    def of(self, *kinds):
        """Process ids of such kinds that live now; of all, if none are named."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self._word.encode() not in path.joinpath("environ").read_bytes():
                    continue
                command = path.joinpath("cmdline").read_bytes()
                if b"CoarseGrainedExecutorBackend" in command:
                    what = "executor"
                elif b"pyspark.daemon" in command or b"pyspark/daemon" in command:
                    what = "worker"
                elif b"java" in command.split(b"\0")[0]:
                    what = "jvm"
                else:
                    what = "driver"
                if not kinds or what in kinds:
                    found.append(int(path.name))
        return found

    def end(self):
        """Kill whatever is left."""
        for _ in range(100):
            left = self.of()
            if not left:
                break
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.driver.poll()
            time.sleep(0.1)
        self.driver.wait()
