"""The thread that has a micro-batch run when Kafka has something new."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

_log = logging.getLogger("ackcore")

#: How often Kafka is asked while nothing comes, and how many times longer than the answer took.
POLL_S, SHARE = 0.1, 20.0


class Watch:
    """Asks Kafka whether there is something new, and beats once for it.

    Parameters
    ----------
    look : callable
        Whether there is something new; what it raises is taken for a no.
    beat : callable
        Has a micro-batch run.
    """

    def __init__(self, look: Callable[[], bool], beat: Callable[[], object]) -> None:
        self._look = look
        self._beat = beat
        self._asked = self._stopped = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="ackcore-kafka", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def look_again(self) -> None:
        """Say that the micro-batch that was asked for has run, or will not."""
        with self._changed:
            self._asked = False
            self._changed.notify()

    def stop(self) -> None:
        """End the thread; waits for it."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        complained = False
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or not self._asked)
                if self._stopped:
                    return
                # Before it is looked: a micro-batch that ends meanwhile takes it back.
                self._asked = True
            began = time.monotonic()
            try:
                is_new = self._look()
                if is_new:
                    self._beat()
                complained = False
            except Exception as error:
                is_new = False
                if not complained:
                    _log.warning("Kafka cannot be asked for new records, trying again: %s", error)
                complained = True
            if is_new:
                continue
            pause = max(POLL_S, SHARE * (time.monotonic() - began))
            with self._changed:
                self._changed.wait_for(lambda: self._stopped, pause)
                self._asked = False
