"""A thread of the driver that waits for something to do, until it is stopped."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod


class Attendant(ABC):
    """A daemon thread.

    Parameters
    ----------
    name : str
        Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._stopped = False
        #: Notified by whatever it may wait for.
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; waits for it."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    @abstractmethod
    def _run(self) -> None:
        """Do what there is to do, and wait in `_changed`, until `_stopped`."""
