"""The timer of `bolt_call_timeout_s`, which ends the process of a hanging call.

The timer is faulthandler's, a C thread that needs no GIL, so it also ends an extension that hangs
while it holds the GIL.  The traceback is read once the attempt is found to have crashed.
"""

from __future__ import annotations

import faulthandler
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ackcore.topology.tuples import Reason

#: The start of faulthandler's output when time is up.
_FIRED = "Timeout ("
#: Seconds between restarts of a timer, at least: no limit is shorter than a second.
_OFTEN_S = 0.25


class TimeLimit:
    """A timer that ends this process if a bolt does not return in time.

    ``limit_s``: the limit in seconds; None for no limit. ``path``: the file for the component's
    name and the traceback.
    """

    def __init__(self, limit_s: float | None, path: str) -> None:
        self._limit_s = limit_s
        self._path = path
        self._file: int | None = None
        self._set_s = 0.0

    @contextmanager
    def on(self, component: str) -> Iterator[None]:
        """Run the timer in this context, around one call of a component; no two may be nested."""
        if self._limit_s is None:
            yield
            return
        if self._file is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
            self._file = os.open(self._path, flags, 0o666)
        os.ftruncate(self._file, 0)
        os.write(self._file, f"{component}\n".encode())
        self._set(self._limit_s)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()

    def progressed(self) -> None:
        """Restart the timer of `on` after one of several inputs; at most once every 0.25 s."""
        # Each restart makes a thread, so restarts are limited.
        if self._limit_s is not None and time.monotonic() - self._set_s > _OFTEN_S:
            self._set(self._limit_s)

    def _set(self, limit_s: float) -> None:
        assert self._file is not None
        faulthandler.dump_traceback_later(limit_s, file=self._file, exit=True)
        self._set_s = time.monotonic()

    def end(self) -> None:
        """Stop the timer, and close the file."""
        if self._file is not None:
            faulthandler.cancel_dump_traceback_later()
            os.close(self._file)
            self._file = None


def read_time_out(path: str) -> Reason | None:
    """Return the reason from a time-out's file: the component, and the line at which it hung.

    Return None if there is no file, or if the process ended for another cause during the call.
    """
    try:
        text = Path(path).read_text(errors="replace")
    except FileNotFoundError:
        return None
    component, _, trace = text.partition("\n")
    if not trace.startswith(_FIRED):
        return None
    return Reason(component, "TimedOut", f"timed out in {component}{_innermost(trace)}", True)


def _innermost(trace: str) -> str:
    """Return the innermost line of the component's own code in a traceback, after ": ", or ""."""
    frames: list[str] = []
    waits = False
    for line in map(str.strip, trace.splitlines()):
        if line.startswith("Thread ") or line.startswith("Current thread"):
            frames, waits = [], False  # of another thread
        elif line.startswith("File "):
            waits = waits or _WAITS in line
            if any(one in line for one in _CALLERS) and not waits:
                break
            frames.append(line)
    else:
        return ""
    if not frames:
        return ""
    # The last frame is the bolt's method; calls in the same file are the bolt's code too.
    file = frames[-1].split(",")[0]
    inner = next(frame for frame in frames if frame.startswith(file))
    return f": {inner}"


#: The files that call bolts and deserializers.
_CALLERS = (
    f"{os.sep}ackcore{os.sep}topology{os.sep}",
    os.path.join(f"{os.sep}ackcore", "spark", "tasks", "decoding.py"),
)
#: The files that wait for concurrent calls.
_WAITS = f"{os.sep}ackcore{os.sep}calls{os.sep}"
