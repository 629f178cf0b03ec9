"""The check step: a run is accepted only if all its results agree.

Each task must have reported once.  Each consumer must have received the same trailer from each task
that sends to it.  All files must exist, and all sent records must be settled.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ackcore._error_hints import counted
from ackcore._records import Int64s
from ackcore.spark.base.root_ids import in_ranges, once
from ackcore.spark.base.schemas import SinkFile
from ackcore.spark.checkpoint.decisions import Plan, Retries
from ackcore.spark.engine.setup import PlannedRows, RunResult
from ackcore.spark.stores.opening import is_bucket
from ackcore.spark.tasks.exchange_format import (
    SETTLE,
    TrailerReceipt,
    level_of,
    origin_of,
    partition_of,
)
from ackcore.spark.tasks.failed_rows import FailedRows
from ackcore.spark.tasks.record_ids import SpoutSpec
from ackcore.spark.tasks.spec import TaskSpec
from ackcore.topology.stage_layout import Layout


class Disagreement(Exception):
    """The results of a run contradict each other. It is run again, and no attempt counts."""


class Unsettled(Disagreement):
    """Groups of records (cohorts) were not acked as a whole, or have too many rows for the driver.

    The next run settles each root by itself, on Spark.
    """


def trailer_problems(
    spec: TaskSpec,
    layout: Layout,
    reports: Sequence[Mapping[str, Any]],
    receipts: Sequence[TrailerReceipt],
) -> list[str]:
    """Return a text for each task that ended or ran twice, or lacks a trailer; [] if all agree.

    A task that ran twice has sent trailers with two fingerprints. A task lacks a trailer if it got
    none from a task that sends to it. Missing partitions of the spout stage are one text.
    """
    ended: dict[tuple[int, int], int] = Counter((one["level"], one["partition"]) for one in reports)
    problems = [
        f"partition {partition} of stage {level} ended {times} times"
        for (level, partition), times in ended.items()
        if times > 1
    ]
    firsts = sorted(partition for level, partition in ended if level == 1)
    if firsts != list(range(len(firsts))):
        missing = sorted({*range(firsts[-1])} - {*firsts})
        problems.append(
            f"{counted(len(missing), 'partition')} of the spout stage did not end; the first is "
            f"partition {missing[0]}"
        )
    if not layout.settles:
        return problems
    fingerprints: dict[int, set[int]] = defaultdict(set)
    received_by: dict[int, set[int]] = defaultdict(set)
    for one in receipts:
        fingerprints[one.origin].add(one.fingerprint)
        received_by[one.receiver].add(one.origin)
    problems += [
        f"partition {partition_of(origin)} of stage {level_of(origin)} ran more than once with "
        "different results"
        for origin, found in fingerprints.items()
        if len(found) > 1
    ]
    dests, later = range(spec.dests), range(2, layout.depth + 1)
    tasks: dict[int, Sequence[int]] = {1: firsts, **dict.fromkeys(later, dests)}
    for level in (*later, SETTLE):
        senders = {origin_of(at, n) for at in tasks if level in spec.sends(at) for n in tasks[at]}
        problems += [
            f"partition {partition} of stage {level} lacks the end of what some tasks sent to it"
            for partition in dests
            if received_by[origin_of(level, partition)] != senders
        ]
    return problems


def file_problems(files: Iterable[SinkFile], directory: str) -> list[str]:
    """Return a message for each missing file that a task reports as written; none for a bucket."""
    return [
        f"a task reported the file {one.path}, which does not exist"
        for one in files
        if not is_bucket(directory) and not os.path.exists(os.path.join(directory, one.path))
    ]


def count_problems(
    sources: Iterable[SpoutSpec],
    sent: Mapping[str, int],
    acked: Mapping[int, int],
    failed: Mapping[str, int],
) -> list[str]:
    """Return a message for each tracked spout with different numbers of sent and settled records.

    ``sent`` and ``failed`` are by the spout's name, ``acked`` is by its number.
    """
    problems = []
    for source in sources:
        if source.tracked:
            came = acked.get(source.number, 0) + failed.get(source.name, 0)
            if came != sent.get(source.name, 0):
                problems.append(
                    f"spout {source.name} sent {counted(sent.get(source.name, 0), 'record')}, and "
                    f"tasks reported the outcome of {came}"
                )
    return problems


def check_agreement(ran: RunResult, retries: Retries) -> None:
    """Raise `Disagreement` unless a run's results agree and all due records ran.

    Raises `Unsettled` if a group of records (a cohort) was not acked as a whole.
    """
    if ran.unsettled:
        text = (
            f"{counted(ran.unsettled, 'group of records was', 'groups of records were')} not acked "
            "as a whole, so the next run settles each record by itself"
        )
        raise Unsettled("; ".join([text, *ran.problems]))
    if ran.problems:
        raise Disagreement("; ".join(ran.problems))
    for spout, table in retries.due.items():
        if ran.retried.get(spout, 0) != len(table):
            raise Disagreement(
                f"spout {spout}: {counted(len(table), 'record was', 'records were')} due, and "
                f"{ran.retried.get(spout, 0)} ran"
            )


def check_found(sought: Sequence[Int64s], found: FailedRows, is_all: bool = False) -> None:
    """Raise `Disagreement` unless ``found`` has each failed record exactly once, and no other.

    ``sought`` has columns of the roots that failed.  With ``is_all``, ``found`` is known to have
    exactly these, and ``sought`` is not read: then only duplicates raise.
    """
    rows = found.roots()
    agree, lost, there = True, 0, 0
    for some, got in in_ranges([] if is_all else sought, rows):
        wanted = once(got if is_all else some)
        same = np.array_equal(wanted, got)
        agree &= same
        lost += len(wanted)
        there += len(wanted) if same else len(np.intersect1d(wanted, got))
    if not agree:
        raise Disagreement(
            f"{counted(lost, 'record')} failed, and the second read of their sources found "
            f"{there}, in {counted(sum(map(len, rows)), 'row')}: the sources did not return the "
            "same rows twice"
        )


def check_same_rows(plan: Plan, offsets: PlannedRows) -> None:
    """Raise `Disagreement` if the rows that were read may differ from the planned rows.

    Called after the last reading: rows that are in place now were in place at each earlier reading.
    """
    replaced = offsets.replaced(plan)
    if replaced is not None:
        raise Disagreement(replaced)
