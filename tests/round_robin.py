"""A chooser whose choice a test can foresee."""

from ackcore.flow.choosers import _CLOSED, Chooser


class RoundRobin(Chooser):
    """One consumer after the other, past those without room."""

    def __init__(self):
        super().__init__()
        self._turn = -1

    def _pick(self):
        n = len(self._scores)
        for step in range(1, n + 1):
            slot = (self._turn + step) % n
            if self._scores[slot] != _CLOSED:
                self._turn = slot
                return self._consumers[slot]
        return None
