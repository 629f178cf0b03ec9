"""The entry of one root, and the effect of each message on it: SEMANTICS 2 and 4, to the letter.

Messages follow Apache Storm 2.x, ``org.apache.storm.daemon.Acker`` (its `AckObject`, `execute`).
Merging and deciding are ackcore's own.
"""

from __future__ import annotations

from dataclasses import dataclass

from ackcore._records import (
    ACK,
    ACKED,
    ANOMALY,
    EXPIRED,
    FAIL,
    FAILED,
    FLAG_FAILED,
    FLAG_TASKS_DIFFER,
    OPEN,
    ORPHAN,
    RESET,
    RESET_TIMEOUT,
    Status,
)

UNSET = -1  # the task of an entry before its init


@dataclass(slots=True)
class Pending:
    """One pending root.

    ``turn`` is the ledger's turn in which the entry was last put in the newest bucket. In a ledger
    without a clock, the times are 0 and never returned.
    """

    turn: int
    first_ms: int
    last_ms: int
    val: int = 0
    task: int = UNSET
    inits: int = 0
    flags: int = 0

    def receive(self, val: int, task: int) -> None:
        """Fold one message in; ``task`` is its kind, as in `ackcore.Ledger.apply`."""
        if task == FAIL:
            self.flags |= FLAG_FAILED
        elif task == ACK:
            self.val ^= val
        elif task != RESET:
            self.val ^= val
            if self.inits and self.task != task:
                self.flags |= FLAG_TASKS_DIFFER
            self.inits = min(self.inits + 1, 2)
            self.task = task

    def apply(self, val: int, task: int) -> Status | None:
        """Fold one message in; return the kind of its outcome, or None."""
        self.receive(val, task)
        if self.task >= 0:
            if self.val == 0:
                return ACKED
            if self.flags & FLAG_FAILED:
                return FAILED
            if task == RESET:
                return RESET_TIMEOUT
        return None

    def merge(self, row: Pending) -> None:
        """Fold another entry of the same root in."""
        self.flags |= row.flags
        if self.inits and row.inits and self.task != row.task:
            self.flags |= FLAG_TASKS_DIFFER
        self.val ^= row.val
        self.task = max(self.task, row.task)
        self.inits = min(self.inits + row.inits, 2)
        self.turn = max(self.turn, row.turn)
        self.first_ms = min(self.first_ms, row.first_ms)
        self.last_ms = max(self.last_ms, row.last_ms)

    def decide(self, deadline: int | None) -> Status:
        """Return the status of the first row in the table of SEMANTICS 4 that applies."""
        past = deadline is not None and self.last_ms < deadline
        if self.inits == 0:
            return ORPHAN if past else OPEN
        if self.inits > 1 or self.flags & FLAG_TASKS_DIFFER:
            return ANOMALY
        if self.val == 0:
            return ACKED
        if self.flags & FLAG_FAILED:
            return FAILED
        return EXPIRED if past else OPEN
