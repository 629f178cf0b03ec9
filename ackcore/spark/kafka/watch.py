"""The thread that has a micro-batch run when Kafka has something new."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ackcore.retry import capped_doubling
from ackcore.spark.base.attendant import Attendant

_log = logging.getLogger("ackcore")

#: How long it pauses while nothing comes: at least, as a multiple of what the answer took, at most.
POLL_S, SHARE, LONGEST_S = 0.1, 20.0, 5.0
#: After so long without a micro-batch it beats again: the file of a beat may have been swept away.
BEAT_S = 30.0


class Watch(Attendant):
    """Asks Kafka whether there is something new, and beats for it: once, if that is not lost.

    Parameters
    ----------
    look : callable
        Whether there is something new; what it raises is taken for a no.
    beat : callable
        Has a micro-batch run.
    """

    def __init__(self, look: Callable[[], bool], beat: Callable[[], object]) -> None:
        super().__init__("ackcore-kafka")
        self._look = look
        self._beat = beat
        self._asked = False

    def look_again(self) -> None:
        """Say that the micro-batch that was asked for has run, or will not."""
        with self._changed:
            self._asked = False
            self._changed.notify()

    def _run(self) -> None:
        failures = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or not self._asked, BEAT_S)
                if self._stopped:
                    return
                # Before it is looked: a micro-batch that ends meanwhile takes it back.
                self._asked = True
            began = time.monotonic()
            try:
                is_new = self._look()
                if is_new:
                    self._beat()
                failures = 0
            except Exception as error:
                is_new = False
                if not failures:
                    _log.warning("Kafka cannot be asked for new records, trying again: %s", error)
                failures += 1
            if is_new:
                continue
            with self._changed:
                # A micro-batch that has run may have left something.
                self._changed.wait_for(
                    lambda: self._stopped or not self._asked,
                    pause_s(time.monotonic() - began, failures),
                )
                self._asked = False


def pause_s(took_s: float, failures: int) -> float:
    """Return for how long Kafka is not asked, after an answer without news or failures in a row."""
    if failures:
        return capped_doubling(round(POLL_S * 1000), failures, round(LONGEST_S * 1000)) / 1000
    return min(LONGEST_S, max(POLL_S, SHARE * took_s))
