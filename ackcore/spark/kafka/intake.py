"""The numbers of offsets and retries in a micro-batch, adapted to the time of earlier ones."""

from __future__ import annotations

import time

from ackcore.kafka.spout import KafkaSpout

#: The number of offsets of the first micro-batch, while the rate is unknown.
_FIRST = 100_000


class Intake:
    """The number of offsets in a micro-batch: ``max_records``, or adapted to its target duration.

    The measured rate counts all processed records, new ones and retries. Where many records fail,
    retries take much of the time. If they displaced new records, in the end none would be taken. So
    new records have at least half of the capacity, and retries at most half.

    Parameters
    ----------
    spout : KafkaSpout
        The spout with the settings ``max_records`` and ``target_batch_s``.
    """

    def __init__(self, spout: KafkaSpout) -> None:
        self._target_s = spout.target_batch_s
        self._fixed = spout.max_records
        self._most = float(_FIRST if spout.max_records is None else spout.max_records)
        self._room = 1.0
        #: The number of records and the seconds of an earlier micro-batch.
        self._before: tuple[int, float] | None = None
        self._overhead_s = 0.0
        self._taken = self._retried = 0
        self._began = 0.0

    @property
    def most(self) -> int:
        """The maximum number of offsets, not counting one for each partition."""
        if self._fixed is not None:
            return int(self._most * self._room)
        # The number of retries is about that of the last micro-batch.
        return int(max(self._most - self._retried, self._most / 2) * self._room)

    @property
    def most_retries(self) -> int | None:
        """The maximum number of retries besides new records; None if unlimited."""
        return None if self._fixed is not None else max(1, int(self._most / 2))

    def planned(self, records: int) -> None:
        """Record the number of offsets in a micro-batch, and its start time."""
        self._taken, self._began = records, time.monotonic()

    def done(self, waiting: float, retried: int = 0) -> None:
        """Adapt the limits after a micro-batch, by its duration.

        Parameters
        ----------
        waiting : float
            The share of the waiting store that is filled, from 0 to 1.
        retried : int, default 0
            The number of retries among its records.
        """
        # A waiting store that is more than half full reduces the limit, down to the minimum.
        self._room = min(1.0, max(0.0, 2 * (1 - waiting)))
        self._retried = retried
        if self._fixed is not None or not self._taken:
            return
        took_s = max(time.monotonic() - self._began, 1e-3)
        taken = self._taken + retried
        over_s = self._overhead(taken, took_s)
        # If most of the time is fixed overhead, smaller micro-batches would only be slower.
        target_s = max(self._target_s, 2 * over_s)
        allowed = taken * (target_s - over_s) / max(took_s - over_s, 1e-3)
        # A slow micro-batch lowers the limit at once.  A fast one doubles it at most, and only if
        # it was at least half as large as allowed.
        if took_s > target_s:
            self._most = max(1.0, allowed)
        elif taken >= self._most * self._room / 2:
            self._most = min(allowed, 2 * self._most)
        self._taken = 0

    def _overhead(self, taken: int, took_s: float) -> float:
        """Return a micro-batch's fixed seconds, estimated from this and an earlier one."""
        before, before_s = self._before or (taken, took_s)
        if abs(taken - before) < max(taken, before) / 4:  # sizes too similar for an estimate
            self._overhead_s = min(self._overhead_s, took_s)
            if taken >= before:
                self._before = taken, took_s
            return self._overhead_s
        each_s = max(0.0, (took_s - before_s) / (taken - before))
        self._overhead_s = max(0.0, min(took_s, before_s) - each_s * min(taken, before))
        self._before = taken, took_s
        return self._overhead_s
