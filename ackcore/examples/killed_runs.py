"""A function that runs a command in children and kills them by kill -9, until one of them ends."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple


class Kill(NamedTuple):
    """The time of a kill: a number of lines that the child prints, and a delay after them."""

    lines: int
    delay_s: float


def run_killed(
    command: Sequence[str],
    directory: Path,
    kills: Iterable[Kill],
    show: Callable[[str], object],
    counts: Callable[[str], bool] = lambda said: True,
) -> tuple[int, int]:
    """Run a command in children; the first ones are killed, and the last one ends by itself.

    Parameters
    ----------
    command : sequence of str
        The command.
    directory : Path
        The directory of its temporary files, which removes the remains of a killed Spark with it.
    kills : iterable of Kill
        The time of each kill.
    show : callable
        Called with each line that a child prints, and with each kill.
    counts : callable, optional
        Returns whether `Kill.lines` counts a line; by default all lines count.

    Returns
    -------
    (int, int)
        The exit status of the child that was not killed, and the number of kills.  The latter is
        smaller than intended if a child ends early; the caller must report that.
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
