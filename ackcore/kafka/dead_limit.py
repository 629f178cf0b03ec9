"""The limit on a consumer's dead records, above which the cause cannot be the records."""

from __future__ import annotations

from collections import deque


class DeadLimit:
    """Looks at what becomes of each record: acked, or dead.

    Parameters
    ----------
    share : float or None
        Of the last ``window`` records no more than this share may be dead, and not all of them.
    window : int
        How many; nothing is said of fewer.
    in_a_row : int or None
        No more than so many may die one after another.
    """

    def __init__(
        self, share: float | None = None, window: int = 1000, in_a_row: int | None = None
    ) -> None:
        self._share = share
        self._in_a_row = in_a_row
        self._last: deque[bool] = deque(maxlen=window)
        self._window = window
        self._dead = 0
        self._row = 0
        #: What was too many, once it was.
        self.excess: str | None = None

    def ended(self, *, dead: bool) -> None:
        """Take in that a record has ended, and how."""
        self._row = self._row + 1 if dead else 0
        if self._in_a_row is not None and self._row > self._in_a_row:
            self.excess = self.excess or (
                f"{self._row} records died one after another, and max_dead_in_a_row is "
                f"{self._in_a_row}"
            )
        if self._share is None:
            return
        self._dead += dead
        if len(self._last) == self._window:
            self._dead -= self._last[0]
        self._last.append(dead)
        # Not a product of the share, which is no whole number: 0.29 * 100 is less than 29.
        too_many = self._dead / self._window > self._share or self._dead == self._window
        if len(self._last) == self._window and too_many:
            self.excess = self.excess or (
                f"{self._dead} of the last {self._window} records died, and max_dead is "
                f"{self._share:g}"
            )
