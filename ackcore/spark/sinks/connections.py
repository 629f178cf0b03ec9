"""The connections that sinks keep open between micro-batches."""

from __future__ import annotations

import threading
from typing import Generic, Protocol, TypeVar


class _Closes(Protocol):
    def close(self) -> None: ...


T = TypeVar("T", bound=_Closes)


class Connections(Generic[T]):
    """The open connections of one writer, by deployment and sink.

    A pickled copy is empty, so that a writer can be sent to workers or copied.  Several threads may
    use it, but only one at a time for the same deployment and sink.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], T] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[Connections[T]], tuple[()]]:
        return type(self), ()

    def __len__(self) -> int:
        """Return the number of open connections."""
        return len(self._open)

    def get(self, sink: str, deployment: str) -> T | None:
        """Return a sink's open connection, or None."""
        with self._lock:
            return self._open.get((deployment, sink))

    def put(self, sink: str, deployment: str, connection: T) -> T:
        """Store a sink's open connection, and return it."""
        with self._lock:
            self._open[deployment, sink] = connection
        return connection

    def release(self, sink: str, deployment: str) -> None:
        """Close a sink's connection, if one is open."""
        with self._lock:
            found = self._open.pop((deployment, sink), None)
        if found is not None:
            found.close()

    def close(self) -> None:
        """Close all connections."""
        for deployment, sink in list(self._open):
            self.release(sink, deployment)
