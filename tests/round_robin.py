"""A chooser whose choice a test can foresee."""

from ackcore.flow.choosers import _CLOSED, _ByScore


class RoundRobin(_ByScore):
    """One consumer after the other, past those without room."""

    def __init__(self):
        super().__init__()
        self._turn = -1

    def changed(self, consumer):
        """See `Chooser.changed`."""
        self._scores[consumer.slot] = 0.0 if consumer.has_room else _CLOSED

    def _pick(self):
        n = len(self._scores)
        for step in range(1, n + 1):
            slot = (self._turn + step) % n
            if self._scores[slot] != _CLOSED:
                self._turn = slot
                return self._consumers[slot]
        return None
