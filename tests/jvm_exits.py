"""How a JVM ended, in words."""

from __future__ import annotations

import signal

#: How Spark's JVM ends by itself: SparkExitCode, ExecutorExitCode, and HotSpot's own.
_EXITS = {
    0: "it was told to, or its standard input was closed",
    1: "it could not start, or was told to",
    3: "out of memory, and -XX:+ExitOnOutOfMemoryError",
    50: "an uncaught exception",
    51: "an uncaught exception, and another one while it was logged",
    52: "out of memory",
    53: "no temporary directory could be made",
    56: "no heartbeat reached the driver",
    57: "a task that was killed did not end",
}


def explain_exit(code: int | None) -> str:
    """Say in words how a JVM ended.

    Parameters
    ----------
    code : int or None
        The return code of `subprocess.Popen`: an exit status, or a signal's number, negative.
    """
    if code is None:
        return "it runs, and does not answer"
    # A JVM that is asked to end by a signal does so by itself, with that and 128 as its status.
    number = -code if code < 0 else code - 128
    if number in {each.value for each in signal.Signals}:
        name = signal.Signals(number).name
        return f"killed by {name}" if code < 0 else f"exit status {code}, asked to end by {name}"
    return f"exit status {code}: {_EXITS.get(code, 'not one that Spark gives')}"
