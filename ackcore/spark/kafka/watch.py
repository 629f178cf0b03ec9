"""The thread that triggers a micro-batch when Kafka has new records."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ackcore.retry import capped_doubling
from ackcore.spark.base.attendant import Attendant

_log = logging.getLogger("ackcore")

#: The pause between polls without news: at least, as a multiple of the answer's time, and at most.
POLL_S, SHARE, LONGEST_S = 0.1, 20.0, 5.0
#: Seconds without a micro-batch after which it is triggered again: its file may have been deleted.
BEAT_S = 30.0


class Watch(Attendant):
    """A thread that polls Kafka for new records and triggers one micro-batch for them.

    ``look``: returns whether there are new records. An exception counts as no.
    """

    def __init__(self, look: Callable[[], bool], beat: Callable[[], object]) -> None:
        super().__init__("ackcore-kafka")
        self._look = look
        self._beat = beat
        self._asked = False

    def look_again(self) -> None:
        """Resume polling, because the triggered micro-batch has run or will not run."""
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
                # Set before the poll: a micro-batch that ends meanwhile clears it.
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
                    _log.warning(
                        "Kafka did not answer whether it has new records, and is polled again: %s",
                        error,
                    )
                failures += 1
            if is_new:
                continue
            with self._changed:
                # A micro-batch that has run may have left records.
                self._changed.wait_for(
                    lambda: self._stopped or not self._asked,
                    pause_s(time.monotonic() - began, failures),
                )
                self._asked = False


def pause_s(took_s: float, failures: int) -> float:
    """Return the seconds until the next poll, after one without new records or after failures."""
    if failures:
        return capped_doubling(round(POLL_S * 1000), failures, round(LONGEST_S * 1000)) / 1000
    return min(LONGEST_S, max(POLL_S, SHARE * took_s))
