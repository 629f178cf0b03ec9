"""The ranges of an `OffsetTracker`'s arguments, and the errors for arguments out of range.

Both backends use these limits and errors.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import numpy as np

from ackcore._columns import as_count, id_column, same_length, task_column
from ackcore._records import Int64s, OffsetState

#: The position after the last offset must fit in 64 bits too.
MAX_OFFSET = 2**63 - 2
MAX_GENERATION = 2**63 - 1
MAX_PARTITION = 2**31 - 1

_WHY_NEGATIVE = "; negative ones are Kafka's codes for positions, as -1001 is for none"


class Key(NamedTuple):
    """The checked arguments of one tracker."""

    topic: str
    partition: int
    generation: int
    base: int


def tracker_key(topic: Any, partition: Any, generation: Any, base: Any) -> Key:
    """Check the constructor arguments of a tracker, and return them."""
    if not isinstance(topic, str):
        raise TypeError(f"topic must be a string, got {type(topic).__name__}")
    if not topic:
        raise ValueError("topic must not be empty")
    return Key(
        topic,
        as_count(partition, "partition", 0, MAX_PARTITION),
        as_generation(generation),
        as_offset(base, "base"),
    )


def as_generation(generation: Any) -> int:
    """Return the number of a generation as an int."""
    return as_count(generation, "generation", 0, MAX_GENERATION)


def as_offset(value: Any, name: str) -> int:
    """Return an offset as an int."""
    try:
        return as_count(value, name, 0, MAX_OFFSET)
    except ValueError as error:
        raise ValueError(f"{error}{_WHY_NEGATIVE if value < 0 else ''}") from None


def as_position(value: Any, name: str) -> int:
    """Return a position, which is an offset plus 1, as an int."""
    return as_count(value, name, 0, MAX_OFFSET + 1)


def offset_column(offsets: Any) -> Int64s:
    """Return a column of offsets as an int64 array on the same memory."""
    column = id_column(offsets, "offsets")
    if len(column) and (column.min() < 0 or column.max() > MAX_OFFSET):
        refuse_offsets(offsets, column)
    return column


def refuse_offsets(offsets: Any, column: Int64s) -> NoReturn:
    """Raise for the first row that is not an offset.

    ``offsets`` is the column as the caller gave it, ``column`` the array made from it.
    """
    column = column.view(np.int64)
    row = int(np.argmax((column < 0) | (column > MAX_OFFSET)))
    offset = int(column[row])
    if getattr(offsets, "dtype", None) == np.uint64:
        offset %= 2**64
    why = _WHY_NEGATIVE if offset < 0 else ""
    raise ValueError(f"offsets must be in 0..{MAX_OFFSET}, got {offset} in row {row}{why}")


def check_state(state: Any) -> OffsetState:
    """Return a state with its columns as arrays; raise if no tracker can have it."""
    if not isinstance(state, OffsetState):
        way_out = "; pass its state()" if hasattr(state, "from_state") else ""
        raise TypeError(f"state must be ackcore.OffsetState, got {type(state).__name__}{way_out}")
    checked = OffsetState(
        as_offset(state.committable, "committable"),
        as_position(state.end, "end"),
        id_column(state.hole_starts, "hole_starts"),
        id_column(state.hole_ends, "hole_ends"),
        id_column(state.failed, "failed"),
        task_column(state.attempts, "attempts"),
    )
    starts, ends, failed, attempts = checked[2:]
    same_length(hole_starts=starts, hole_ends=ends)
    same_length(failed=failed, attempts=attempts)
    # Runs of holes and of done offsets alternate, from the first hole to the last done offset.
    bounds = np.empty(2 * len(starts) + 1, np.int64)
    bounds[:-1:2], bounds[1::2], bounds[-1] = starts, ends, checked.end
    if bounds[0] != checked.committable:
        raise ValueError(
            f"committable must be the first hole, or end without holes, got "
            f"{checked.committable} and {bounds[0]}"
        )
    _refuse_descent("hole_starts, hole_ends and end, in turn,", bounds)
    _refuse_descent("failed", failed)
    _refuse_rows("attempts", attempts, attempts < 1, "at least 1")
    # The run that each failed offset would be in; -1 if it is before the first run.
    run = np.searchsorted(starts, failed, "right") - 1
    is_done = (run < 0) | (failed >= ends[run]) if len(ends) else np.ones(len(failed), np.bool_)
    _refuse_rows("failed", failed, is_done & (failed < checked.end), "not done")
    _refuse_rows("failed", failed, failed > MAX_OFFSET, f"in 0..{MAX_OFFSET}")
    return checked


def _refuse_rows(name: str, column: Any, wrong: Any, must_be: str) -> None:
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ValueError(f"{name} must be {must_be}, got {int(column[row])} in row {row}")


def _refuse_descent(name: str, column: Int64s) -> None:
    down = column[1:] <= column[:-1]
    if down.any():
        row = int(np.argmax(down)) + 1
        raise ValueError(f"{name} must ascend, got {int(column[row])} after {int(column[row - 1])}")
