"""The partitions to pause, and the number of records in a read."""

from __future__ import annotations

from collections.abc import Mapping

from ackcore.kafka.held_partition import WAITING, WAITING_CAUSE, HeldPartition, Key, Limits


def room(partitions: Mapping[Key, HeldPartition], limits: Limits) -> int:
    """Records that may be read at once, whatever partition they are of; 0 if all are paused.

    An eighth of the limit in any case, or one that is nearly full would make all reads small:
    so much more than the limit there may be.
    """
    limit = limits.held
    free = [limit - each.in_flight for each in partitions.values() if not each.cause]
    return max(min(free), limit // 8, 1) if free else 0


def change_pauses(
    partitions: Mapping[Key, HeldPartition], limits: Limits
) -> tuple[list[Key], list[Key]]:
    """Give each partition its cause of a pause; return which are paused now, and which resumed."""
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
    """Say what stops intake if it is records that wait for another attempt; "" if it is not."""
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
