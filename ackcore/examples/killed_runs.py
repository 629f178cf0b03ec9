"""Runs a command whose children die by kill -9, one after the other, until one of them ends."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple


class Kill(NamedTuple):
    """The time at which a child is killed: a delay after a number of its lines."""

    lines: int
    delay_s: float


def run_killed(
    command: Sequence[str],
    directory: Path,
    kills: Iterable[Kill],
    show: Callable[[str], object],
    counts: Callable[[str], bool] = lambda said: True,
) -> tuple[int, int]:
    """Run a command in children: the first ones are killed, and the last one ends by itself.

    Parameters
    ----------
    command : sequence of str
        What is run.
    directory : Path
        Where its temporary files go: what a killed Spark leaves goes with the directory.
    kills : iterable of Kill
        When each of the first children dies.
    show : callable
        Called with each line that a child says, and with each kill.
    counts : callable, optional
        Whether a line is one of those that `Kill.lines` counts; all are if not given.

    Returns
    -------
    (int, int)
        The exit status of the child that was not killed, and how many were.  Fewer than were to
        be, if one ends before its time: whoever shows what a killed run comes to has to say so.
    """
    environment = {**os.environ, "TMPDIR": str(directory)}
    for done, kill in enumerate((*kills, None)):
        lines, is_killed = 0, False
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            for said in child.stdout:
                show(said.rstrip("\n"))
                lines += counts(said)
                if kill is not None and lines == kill.lines:
                    time.sleep(kill.delay_s)
                    child.kill()
                    is_killed = True
                    break
        if not is_killed or child.returncode != -signal.SIGKILL:
            break
        show(f"kill -9, number {done + 1}")
    return child.returncode, done
