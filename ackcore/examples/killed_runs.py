"""A function that runs a command, kills it by kill -9, and runs it again, until it ends."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from ackcore._error_hints import counted

#: The beginning of the lines of a child that show that its stream runs.
RUNNING, PROGRESS = "running", "micro-batch"


def run_killed(command: Sequence[str], directory: Path, kills: int) -> int:
    """Run a command and kill it at a random point, ``kills`` times. Then run it to its end.

    A run that ends before it is killed is the last one. Returns the exit status of the last run; 1
    instead of 0 if none was killed, which proves nothing. The output of all runs is printed.

    ``directory``: the directory of temporary files, such as those of a killed Spark.
    """
    draw = random.Random(0)
    environment = {**os.environ, "TMPDIR": str(directory)}
    for done in range(kills + 1):
        # Some lines after its start, and then within a second.
        lines_left, delay_s, is_killed = draw.randrange(1, 4), draw.uniform(0, 1), False
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            for said in child.stdout:
                print(said, end="", flush=True)
                lines_left -= said.startswith((RUNNING, PROGRESS))
                if done < kills and not lines_left:
                    time.sleep(delay_s)
                    child.kill()
                    is_killed = True
                    break
        if not is_killed or child.returncode != -signal.SIGKILL:
            break
        print(f"kill -9, number {done + 1}", flush=True)
    print(f"killed {counted(done, 'time')}" + (f" of {kills}: it ended before" * (done < kills)))
    if not done and not child.returncode:
        print("a run that was not killed proves nothing: give it more --lines")
        return 1
    return child.returncode
