"""The connections that sinks keep open between micro-batches."""

from __future__ import annotations

import threading
from typing import Generic, Protocol, TypeVar


class _Closes(Protocol):
    def close(self) -> None: ...


T = TypeVar("T", bound=_Closes)


class Connections(Generic[T]):
    """A connection for each deployment and sink that a writer is used for; none of them travels.

    Pickled it is empty, so that a writer may go to workers or be copied.  For several threads, but
    for one at a time with the same deployment and sink.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], T] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[Connections[T]], tuple[()]]:
        return type(self), ()

    def __len__(self) -> int:
        """The number of open connections."""
        return len(self._open)

    def get(self, sink: str, deployment: str) -> T | None:
        """Return a sink's connection, if it has one."""
        with self._lock:
            return self._open.get((deployment, sink))

    def put(self, sink: str, deployment: str, connection: T) -> T:
        """Keep a sink's connection, and return it."""
        with self._lock:
            self._open[deployment, sink] = connection
        return connection

    def release(self, sink: str, deployment: str) -> None:
        """Close a sink's connection, if it has one."""
        with self._lock:
            found = self._open.pop((deployment, sink), None)
        if found is not None:
            found.close()

    def close(self) -> None:
        """Close all."""
        for deployment, sink in list(self._open):
            self.release(sink, deployment)
