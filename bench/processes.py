"""The CPU time of all that a bench runs."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path


def processes_below(pid: int) -> list[int]:
    """The processes that a process and those below it have started, and that live."""
    below = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        below[parent].append(int(stat.parent.name))
    found, left = [], [pid]
    while left:
        more = below[left.pop()]
        found += more
        left += more
    return found


def cpu_s(without: Collection[int] = ()) -> float:
    """The CPU time of this process and all below it, but for some and what is below those."""
    taken, below = {}, defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # Behind the name, which may hold anything: state, parent, ..., and from 11 on the
            # times in user mode and in the kernel, of the process and of its ended children.
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        pid = int(stat.parent.name)
        taken[pid] = sum(map(int, fields[11:15]))
        below[int(fields[1])].append(pid)
    ticks, left = 0, [os.getpid()]
    while left:
        pid = left.pop()
        if pid not in without:
            ticks += taken.get(pid, 0)
            left += below[pid]
    return ticks / os.sysconf("SC_CLK_TCK")
