"""Which record killed its worker: what a driver concludes from the marks of tasks that died.

Once a micro-batch has died a few times its tasks are *careful*: each keeps a file, its mark, that
names the roots it has in hand, and removes it when it is through.  What a job that failed leaves
of marks is looked at before the next run:

1. all roots of the dead task's mark become suspects, beside those who are, and run one at a time;
2. when a suspect was alone in hand as the worker died, those who never were are let off;
3. when it dies alone a second time, it is condemned: not run any more, and decided DEAD.

So whoever has been found alone stays under suspicion, though other tasks die faster.

Twice, since a worker may also be killed by something outside, with an innocent record in hand.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from ackcore.spark.state import Plan

#: A suspect is named once in a plan, and once more each time that it was alone at a death.
_ALONE_ENOUGH = 2

_LOST = re.compile(r"most recent failure: Lost task \S+ in stage \S+ \(TID (\d+)\)")


def read_marks(directory: Path) -> dict[int, frozenset[int]]:
    """Return the roots in hand of each task that left a mark, by Spark's number of its attempt."""
    marks = {}
    for path in directory.glob("*.mark"):
        data = path.read_bytes()
        # A worker that died while writing leaves some of the roots.
        roots = np.frombuffer(data[: len(data) // 8 * 8], np.int64).tolist()
        if roots:
            marks[int(path.stem)] = frozenset(roots)
    return marks


def failed_attempt(error: BaseException) -> int | None:
    """Return Spark's number of the task attempt that a job gave up at, if its error tells."""
    found = _LOST.search(str(error))
    return None if found is None else int(found[1])


def blame(plan: Plan, marks: Mapping[int, frozenset[int]], attempt: int | None) -> Plan:
    """Return the plan with the suspects and the condemned that follow from a death.

    Parameters
    ----------
    plan : Plan
        Of the run that died.
    marks : mapping from int to frozenset of int
        `read_marks`.  Tasks that were cancelled along with the one that died leave theirs, too.
    attempt : int or None
        `failed_attempt`: whose mark it is.
    """
    known = frozenset(plan.condemned)
    if attempt is not None and attempt in marks:
        marks = {attempt: marks[attempt]}
    in_hand = [roots - known for roots in marks.values() if roots - known]
    if not in_hand:
        return plan
    alone = sorted({root for roots in in_hand if len(roots) == 1 for root in roots})
    together = sorted({root for roots in in_hand if len(roots) > 1 for root in roots})
    times = Counter(plan.suspects)
    if together and not (alone and len(in_hand) == 1):
        new = [root for root in together if root not in times]
        return replace(plan, suspects=(*plan.suspects, *new))
    times.update(dict.fromkeys(alone, 1))
    condemned = [root for root in alone if times[root] > _ALONE_ENOUGH]
    left = [root for root in alone if root not in condemned]
    # Each counts as a suspect, and for having been alone; so do those of earlier runs.
    counts = {root: n for root, n in times.items() if n > 1 and root not in {*alone, *known}}
    counts |= {root: max(times[root], 2) for root in left}
    suspects = [root for root, n in counts.items() for _ in range(n)]
    if len(in_hand) > 1:
        # One of them did it, and nothing tells which: they stay suspects, who are tried again.
        suspects += condemned
    return replace(
        plan,
        suspects=(*_held_back(plan), *suspects),
        condemned=(*plan.condemned, *condemned),
    )


def certainty(plan: Plan) -> int:
    """Return how much is known of who kills workers; it grows with each death of one alone."""
    alone = sum(n - 1 for n in Counter(plan.suspects).values())
    return len(plan.condemned) * (_ALONE_ENOUGH + 1) + alone


def _held_back(plan: Plan) -> list[int]:
    """Condemned roots that are suspects still."""
    return sorted(set(plan.condemned) & set(plan.suspects))
