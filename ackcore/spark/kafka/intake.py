"""The numbers of offsets and retries in a micro-batch, adapted to the time of earlier ones."""

from __future__ import annotations

import time

from ackcore.kafka.spout import KafkaSpout

#: Offsets of the first micro-batch, before it is known how many a second go through.
_FIRST = 100_000


class Intake:
    """The number of offsets in a micro-batch: ``max_records``, or as many as its time allows.

    What goes through is counted in records that run, new ones and retries: where many fail they
    take the time, and to take fewer new ones for it would end with none.  So of what a micro-batch
    has time for, new records have half at least, and retries half at most.

    Parameters
    ----------
    spout : KafkaSpout
        Whose settings say that.
    """

    def __init__(self, spout: KafkaSpout) -> None:
        self._target_s = spout.target_batch_s
        self._fixed = spout.max_records
        self._most = float(_FIRST if spout.max_records is None else spout.max_records)
        self._room = 1.0
        #: Of a micro-batch before: how many it took, and how long that took.
        self._before: tuple[int, float] | None = None
        self._overhead_s = 0.0
        self._taken = self._retried = 0
        self._began = 0.0

    @property
    def most(self) -> int:
        """The maximum number of offsets, not counting one for each partition."""
        if self._fixed is not None:
            return int(self._most * self._room)
        # As many are tried again as in the micro-batch before, or thereabouts.
        return int(max(self._most - self._retried, self._most / 2) * self._room)

    @property
    def most_retries(self) -> int | None:
        """The maximum number of retries beside new records; None if unlimited."""
        return None if self._fixed is not None else max(1, int(self._most / 2))

    def planned(self, records: int) -> None:
        """Note how many a micro-batch takes, and when it begins."""
        self._taken, self._began = records, time.monotonic()

    def done(self, waiting: float, retried: int = 0) -> None:
        """Go by how long the micro-batch took, and by how full the waiting store is, 0 to 1.

        Of its records ``retried`` were no new ones.
        """
        # From half full on it takes less, and at the end what it must.
        self._room = min(1.0, max(0.0, 2 * (1 - waiting)))
        self._retried = retried
        if self._fixed is not None or not self._taken:
            return
        took_s = max(time.monotonic() - self._began, 1e-3)
        taken = self._taken + retried
        over_s = self._overhead(taken, took_s)
        # Where most of the time goes whatever is taken, to take less would only be slower.
        target_s = max(self._target_s, 2 * over_s)
        allowed = taken * (target_s - over_s) / max(took_s - over_s, 1e-3)
        # One that was slow counts at once; one that was quick doubles what is taken, at most, and
        # if it was a small one tells nothing.
        if took_s > target_s:
            self._most = max(1.0, allowed)
        elif taken >= self._most * self._room / 2:
            self._most = min(allowed, 2 * self._most)
        self._taken = 0

    def _overhead(self, taken: int, took_s: float) -> float:
        """Return how many seconds a micro-batch takes whatever is in it: by this and one before."""
        before, before_s = self._before or (taken, took_s)
        if abs(taken - before) < max(taken, before) / 4:  # too much alike to tell
            self._overhead_s = min(self._overhead_s, took_s)
            if taken >= before:
                self._before = taken, took_s
            return self._overhead_s
        each_s = max(0.0, (took_s - before_s) / (taken - before))
        self._overhead_s = max(0.0, min(took_s, before_s) - each_s * min(taken, before))
        self._before = taken, took_s
        return self._overhead_s
