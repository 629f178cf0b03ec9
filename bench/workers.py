"""Child processes that do a job turn by turn: in another environment, at another commit.

A job is a function of jobs.py, or ``module.function`` of this folder: it sets up, and returns what
is done at each turn. It is run by the same interpreter, or by that of `python`, with ackcore from
here or from the folder that `home` names.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parent.parent


class Worker:
    """A process with one job, in a ``with`` block."""

    def __init__(
        self,
        job: str,
        *,
        environment: dict[str, str] | None = None,
        home: Path = ROOT,
        python: str = sys.executable,
        **arguments: object,
    ) -> None:
        self.job, self.home = job, home
        self.process = subprocess.Popen(
            [python, "-m", "bench.workers", job, json.dumps(arguments)],
            env={
                **os.environ,
                # The path is what we say, whatever folder this is run in; Spark's workers, too.
                "PYTHONSAFEPATH": "1",
                "PYTHONPATH": f"{home}{os.pathsep}{ROOT}",
                **(environment or {}),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, *arguments: object) -> None:
        """Begin a turn, and do not wait for it."""
        assert self.process.stdin is not None
        print(json.dumps(arguments), file=self.process.stdin, flush=True)

    def result(self) -> Any:
        """Return the result of the turn, or at first of the set-up."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.job}: its process ended with {self.process.wait()}")
        return json.loads(line)

    def turn(self, *arguments: object) -> Any:
        """One turn, waited for."""
        self.start(*arguments)
        return self.result()

    def __enter__(self) -> Self:
        try:
            ready = self.result()
        except RuntimeError:
            self.__exit__()
            raise
        assert Path(ready["ackcore"]).is_relative_to(self.home), ready
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


def serve(job: str, arguments: str) -> None:
    """Be the child: set up, say so, and do a turn for every line that comes in."""
    import ackcore  # noqa: PLC0415 - the parent's half needs neither

    module, _, function = job.rpartition(".")
    jobs = importlib.import_module(f"bench.{module or 'jobs'}")
    turn = getattr(jobs, function)(**json.loads(arguments))
    print(json.dumps({"ackcore": ackcore.__file__}), flush=True)
    try:
        for line in sys.stdin:
            print(json.dumps(turn(*json.loads(line))), flush=True)
    finally:
        # What it has open may keep a process that has failed from ending: threads of a session.
        getattr(turn, "close", int)()


if __name__ == "__main__":
    serve(*sys.argv[1:])
