"""How what a bolt raises, or says, becomes the reason of a failure."""

from __future__ import annotations

from collections.abc import Iterable

from ackcore.topology.components import Reject
from ackcore.topology.tuples import Reason


class Reasons:
    """Makes the reasons of one component.

    Parameters
    ----------
    component : str
        Name of the component, which its reasons carry.
    reject : iterable of exception class or str
        What goes to the dead letters at once, beside `Reject`: classes, or names of classes, bare
        or with their module.  Subclasses are meant too.
    """

    def __init__(self, component: str, reject: Iterable[type[BaseException] | str] = ()) -> None:
        self.component = component
        given = tuple(reject)
        self._classes: tuple[type[BaseException], ...] = (
            Reject,
            *(kind for kind in given if not isinstance(kind, str)),
        )
        self._names = frozenset(kind for kind in given if isinstance(kind, str))

    def of(self, reason: BaseException | Reason | str | None) -> Reason:
        """Return the reason that an exception, a text, or nothing at all stands for.

        Raises
        ------
        TypeError
            If it is something else.
        """
        if isinstance(reason, BaseException):
            return Reason.of(self.component, reason, self._is_final(reason))
        if isinstance(reason, Reason):
            # As its fields may be anything, they are made into what can be written down.
            text = Reason.of(str(reason.component), str(reason.message), bool(reason.final))
            return text._replace(type=Reason.of("", str(reason.type)).message)
        if reason is None:
            return Reason.of(self.component, f"failed by {self.component}")
        if isinstance(reason, str):
            return Reason.of(self.component, reason)
        raise TypeError(
            f"reason must be an exception, a text or a Reason, got {type(reason).__name__}"
        )

    def not_acked(self) -> Reason:
        """Return the reason of an input that was neither acked nor failed."""
        return Reason(self.component, "NotAcked", f"not acked by {self.component}")

    def _is_final(self, error: BaseException) -> bool:
        if isinstance(error, self._classes):
            return True
        return bool(self._names) and any(
            kind.__name__ in self._names or f"{kind.__module__}.{kind.__qualname__}" in self._names
            for kind in type(error).__mro__
        )
