"""Points at which a test may kill the driver, named in the environment.

``ACKCORE_FAILPOINTS="planned,decided:3,in-sink=raise"`` kills the process at the first ``planned``
of any micro-batch, at ``decided`` of micro-batch 3, and raises `FailpointReached` in a sink.  Read
once, when this module is imported: a run without them pays one comparison.
"""

from __future__ import annotations

import os
import signal
from typing import Literal

Name = Literal[
    "planned",
    "ran",
    "checked",
    "decided",
    "acted",
    "marked",
    "in-sink",
    "in-dead-letters",
    "pruned",
]
NAMES = frozenset(Name.__args__)  # type: ignore[attr-defined]
VARIABLE = "ACKCORE_FAILPOINTS"


class FailpointReached(RuntimeError):
    """A failpoint set to raise was reached."""


def parse(text: str) -> dict[tuple[str, int | None], bool]:
    """``{(name, batch or None): raises}`` of the variable's text."""
    points: dict[tuple[str, int | None], bool] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        place, _, action = item.partition("=")
        name, colon, batch = place.partition(":")
        if name not in NAMES:
            raise ValueError(
                f"{VARIABLE} names the failpoint {name!r}; it must be one of "
                f"{', '.join(sorted(NAMES))}"
            )
        if colon and not (batch.isascii() and batch.isdigit()):
            raise ValueError(f"{VARIABLE}: {item!r} must give the micro-batch as name:number")
        if action not in ("", "raise", "kill"):
            raise ValueError(f"{VARIABLE}: {item!r} must end in =raise or =kill, or in neither")
        points[name, int(batch) if colon else None] = action == "raise"
    return points


_POINTS = parse(os.environ.get(VARIABLE, ""))


def reach(name: Name, batch: int | None = None) -> None:
    """Die here by SIGKILL, or raise, if the environment says so.

    Raises
    ------
    FailpointReached
        If the failpoint is set to ``=raise``.
    """
    if not _POINTS:
        return
    for place in ((name, batch), (name, None)):
        if place in _POINTS:
            if _POINTS[place]:
                raise FailpointReached(f"failpoint {name} reached in micro-batch {batch}")
            os.kill(os.getpid(), signal.SIGKILL)
