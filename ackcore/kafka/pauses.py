"""The partitions to pause, and the number of records in a read."""

from __future__ import annotations

from collections.abc import Mapping

from ackcore.kafka.held_partition import WAITING, WAITING_CAUSE, HeldPartition, Key, Limits


def room(partitions: Mapping[Key, HeldPartition], limits: Limits) -> int:
    """Return the number of records that may be read at once, of any partition; 0 if all are paused.

    It is at least an eighth of the limit, so that a nearly full partition does not make all reads
    small. A partition may exceed its limit by that number.
    """
    limit = limits.held
    free = [limit - each.in_flight for each in partitions.values() if not each.cause]
    return max(min(free), limit // 8, 1) if free else 0


def change_pauses(
    partitions: Mapping[Key, HeldPartition], limits: Limits
) -> tuple[list[Key], list[Key]]:
    """Set each partition's cause of a pause. Return the partitions to pause and those to resume."""
    waiting = sum(each.numbers[WAITING] for each in partitions.values())
    waiting_bytes = sum(each.sizes[WAITING] for each in partitions.values())
    pause: list[Key] = []
    resume: list[Key] = []
    for key, each in partitions.items():
        cause = each.cause_of_pause(limits, waiting, waiting_bytes)
        if bool(cause) != bool(each.cause):
            (pause if cause else resume).append(key)
        each.cause = cause
    return pause, resume


def stopped_by_waiting(partitions: Mapping[Key, HeldPartition], limits: Limits) -> str:
    """Return a message if records that wait for a retry stop reading; else ""."""
    stopped = sum(each.cause == WAITING_CAUSE for each in partitions.values())
    if not stopped:
        return ""
    waiting = sum(each.numbers[WAITING] for each in partitions.values())
    waiting_bytes = sum(each.sizes[WAITING] for each in partitions.values())
    return (
        f"nothing is read of {stopped} of {len(partitions)} partitions: {waiting} records "
        f"wait for another attempt, of {waiting_bytes} bytes; reading stops at "
        f"max_waiting={limits.waiting} or max_waiting_bytes={limits.waiting_bytes}, and goes on "
        "below half of both"
    )
