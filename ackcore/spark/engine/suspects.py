"""Crashing records: the records that crash their process, found from runs that failed.

Where Spark retries tasks, the tasks isolate such a record (`isolation`).  For the next
runs, the driver does the same with the in-flight markers of the attempts that crashed:

1. all roots that were in flight become suspects, beside the earlier ones, and run one at a time;
2. when an attempt crashed with a suspect alone in flight, suspects that never were alone are
   cleared;
3. when an attempt crashed with the suspect alone a second time, it is rejected: it is not run any
   more, and decided DEAD.

So a record that was alone in one crash stays a suspect, even if other tasks die faster.

Two crashes are required, since a process may also be killed from outside, with any record in
flight.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from ackcore.spark.base.paths import Place
from ackcore.spark.base.reasons import KILLED_WORKER
from ackcore.spark.checkpoint.decisions import Plan
from ackcore.spark.stores.opening import is_bucket
from ackcore.spark.tasks.inflight_markers import Marker, TaskAttempt, crashed
from ackcore.spark.tasks.isolation import ALONE_ENOUGH
from ackcore.topology.tuples import Reason

_log = logging.getLogger("ackcore")

_LOST = re.compile(r"most recent failure: Lost task (\d+)\.\d+ in stage \S+ \(TID (\d+)\)")


def failed_attempts(error: BaseException, depth: int) -> list[TaskAttempt]:
    """Return the attempts that may have ended a Spark job, one per level: its error names no level.

    Level 1 is the spout stage. The list is empty if the error names no task. The partition may be
    wrong if Spark ran only some of a stage's tasks again.
    """
    found = _LOST.search(str(error))
    if found is None:
        return []
    return [TaskAttempt(level, int(found[1]), int(found[2])) for level in range(1, depth + 1)]


def careful_if_needed(plan: Plan, careful_after: int) -> Plan:
    """Return the plan; ``careful`` if it has suspects, rejected roots or ``careful_after`` crashes.

    Otherwise it is not ``careful``.
    """
    concluded = bool(plan.suspects or plan.rejected)
    return replace(plan, careful=plan.crashes >= careful_after or concluded)


def count_crash(plan: Plan, careful_after: int) -> Plan:
    """Return the plan with one more crash, ``careful`` from ``careful_after`` crashes on."""
    return careful_if_needed(replace(plan, crashes=plan.crashes + 1), careful_after)


def update_suspects(plan: Plan, markers: Sequence[Marker], attempt: int | None) -> Plan:
    """Return the plan with new suspects, which may have crashed a run, and with rejected roots.

    The ``markers`` of the attempts that crashed are in the order of tasks and attempts.
    ``attempt`` is the ``id`` of `failed_attempts`, at which Spark gave up the run, or None.  Spark
    cancelled the last attempts at other tasks with it, and may have killed their processes.
    """
    last = {marker.attempt.task: marker for marker in markers}
    told = any(marker.attempt.id == attempt for marker in last.values())
    unsure = []
    for marker in markers:
        if marker is last[marker.attempt.task] and marker.attempt.id != attempt:
            unsure.append(marker)
        else:
            plan = _after(plan, [marker])
    # If the attempt that crashed first is unknown, all last attempts are examined.
    return plan if told else _after(plan, unsure)


def _after(plan: Plan, markers: Sequence[Marker]) -> Plan:
    """Return the plan with new suspects and rejected roots after one of these attempts crashed.

    With several markers, it is unknown which of the attempts crashed.
    """
    known = frozenset(plan.rejected)
    left = {marker.roots - known for marker in markers}
    in_flight = [roots for roots in left if roots]
    if not in_flight:
        return plan
    alone = sorted({root for roots in in_flight if len(roots) == 1 for root in roots})
    together = sorted({root for roots in in_flight if len(roots) > 1 for root in roots})
    times = Counter(plan.suspects)
    if together and not (alone and len(in_flight) == 1):
        new = [root for root in together if root not in times]
        return replace(plan, suspects=(*plan.suspects, *new))
    times.update(dict.fromkeys(alone, 1))
    rejected = [root for root in alone if times[root] > ALONE_ENOUGH]
    rest = [root for root in alone if root not in rejected]
    # Each root counts once as a suspect, and once for each time alone, also in earlier runs.
    counts = {root: n for root, n in times.items() if n > 1 and root not in {*alone, *known}}
    counts |= {root: max(times[root], 2) for root in rest}
    suspects = [root for root, n in counts.items() for _ in range(n)]
    if len(in_flight) > 1:
        # It is unknown which of them crashed: all stay suspects, and are tried again.
        suspects += rejected
    reasons = {
        str(root): marker.timed_out.encode()
        for marker in markers
        if marker.timed_out is not None
        for root in marker.roots & frozenset(rejected)
    }
    return replace(
        plan,
        # A rejected root that is still a suspect is tried again: see `rejections`.
        suspects=(*sorted(known & {*plan.suspects}), *suspects),
        rejected=(*plan.rejected, *rejected),
        time_outs={**plan.time_outs, **reasons},
    )


def rejections(plan: Plan) -> dict[int, Reason]:
    """Return the rejected roots, which are not run, each with the reason of its failure.

    A reason is final if no other root may be the cause of the crashes.  A root that is still a
    suspect is not certain to be the cause: other attempts crashed at the same time.  It is tried
    again, in a later micro-batch and perhaps beside others.
    """
    reasons = {}
    for root in plan.rejected:
        text = plan.time_outs.get(str(root))
        reason = KILLED_WORKER if text is None else Reason.decode(text)
        reasons[root] = reason._replace(final=root not in plan.suspects)
    return reasons


def isolation_progress(plan: Plan) -> int:
    """Return a number that grows with each crash in which one suspect record ran alone."""
    alone = sum(n - 1 for n in Counter(plan.suspects).values())
    return len(plan.rejected) * (ALONE_ENOUGH + 1) + alone


@contextmanager
def crashes_logged(work: Place, number: int) -> Iterator[None]:
    """Log the task attempts that crashed during the block, when it ends or raises an exception.

    ``work``: the directory of the run. In a bucket they are logged only if the run failed, since
    the search takes requests.
    """
    try:
        yield
    except Exception:
        _log_crashes(work, number)
        raise
    if not is_bucket(work):
        _log_crashes(work, number)


def _log_crashes(work: Place, number: int) -> None:
    for marker in crashed(work):
        _log.warning("micro-batch %d: %s", number, marker)
