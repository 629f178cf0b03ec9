"""A thread of the driver that waits for work until it is stopped."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod


class Attendant(ABC):
    """A daemon thread that runs until it is stopped."""

    def __init__(self, name: str) -> None:
        self._stopped = False
        #: Notified when there is work.
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait for its end."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    @abstractmethod
    def _run(self) -> None:
        """Do the work, and wait in `_changed` for more, until `_stopped`."""
