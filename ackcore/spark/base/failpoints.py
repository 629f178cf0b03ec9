"""Points at which a test may kill or stop the driver, set in the environment.

``ACKCORE_FAILPOINTS="planned,decided:3,in-sink=raise,acted=stop"`` kills the process at the first
``planned`` of any micro-batch and at ``decided`` of micro-batch 3.  It raises `FailpointReached` in
a sink, and stops the process at the first ``acted`` until SIGCONT.  The variable is read once, at
the import of this module.  Without it a failpoint costs one comparison.
"""

from __future__ import annotations

import os
import re
import signal
from typing import Literal, cast

Action = Literal["kill", "raise", "stop"]
Name = Literal[
    "planned",
    "ran",
    "checked",
    "decided",
    "acted",
    "marked",
    "in-transaction",
    "in-sink",
    "refused",
    "refusals-closed",
    "folded",
    "tables-recorded",
    "changes-recorded",
    "in-dead-letters",
    "pruned",
]
NAMES = frozenset(Name.__args__)  # type: ignore[attr-defined]
VARIABLE = "ACKCORE_FAILPOINTS"
_POINT = re.compile(r"([a-z-]+)(?::([0-9]+))?(?:=(kill|raise|stop))?")


class FailpointReached(RuntimeError):
    """A failpoint set to raise was reached."""


def parse(text: str) -> dict[tuple[str, int | None], Action]:
    """Return the variable's text as ``{(name, batch): action}``; the batch None means all.

    Raises ValueError for an unknown name, or another form than in the module's docstring.
    """
    points: dict[tuple[str, int | None], Action] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        found = _POINT.fullmatch(item)
        if found is None or found[1] not in NAMES:
            raise ValueError(
                f"{VARIABLE} must be name, name:number, or either with =kill, =raise or =stop, got "
                f"{item!r}; the names are {', '.join(sorted(NAMES))}"
            )
        name, batch, action = found.groups()
        points[name, None if batch is None else int(batch)] = cast(Action, action or "kill")
    return points


_POINTS = parse(os.environ.get(VARIABLE, ""))


def failpoint(name: Name, batch: int | None = None) -> None:
    """Kill the process, raise, or stop the process, if the environment sets this failpoint.

    Raises FailpointReached for ``=raise``, each time; ``=stop`` stops the process once. ``batch``:
    the number of the micro-batch; without it only settings without a number apply.
    """
    if not _POINTS:
        return
    for place in ((name, batch), (name, None)):
        action = _POINTS.get(place)
        if action == "raise":
            raise FailpointReached(f"failpoint {name} reached in micro-batch {batch}")
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "stop":
            del _POINTS[place]
            os.kill(os.getpid(), signal.SIGSTOP)
