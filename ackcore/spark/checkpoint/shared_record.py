"""A record in a bucket that several processes change, none of which can lock it.

It is read, and replaced on the condition that it is in the version that was read; who comes second
reads it again.  So each change is made of what is there, and none undoes another.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from typing import Any

from ackcore.spark.base.checksummed import record_bytes, record_in
from ackcore.spark.base.errors import StateError
from ackcore.spark.stores.interface import Store, StoreConflict

Body = dict[str, Any]
#: The one of a store of dead letters: see `ackcore.spark.dead_letters.bucket`.
INDEX = "index.json"
#: A change is made anew so often where others were faster.
_TRIES = 50


class SharedRecord:
    """A record of a store.

    Parameters
    ----------
    store : Store
        Where it is.
    key : str
        What it calls itself, too.
    """

    def __init__(self, store: Store, key: str) -> None:
        self._store, self._key = store, key
        self._lock = threading.RLock()
        self._body: Body = {}
        self._version: str | None = None
        self._known = False

    @property
    def place(self) -> str:
        """Where it is, for people."""
        return f"{self._store.url}/{self._key}"

    def read(self) -> Body:
        """Return it as it was when it was read or replaced last; empty if there is none.

        Raises
        ------
        CheckpointCorrupt, CheckpointNewer, StateError
            If it cannot be read.
        """
        with self._lock:
            return self._body if self._known else self.load()

    def load(self) -> Body:
        """Read it anew."""
        with self._lock:
            found = self._store.get(self._key)
            body = {} if found is None else record_in(found.data, self.place, self._key)
            self._body, self._version = body, None if found is None else found.version
            self._known = True
            return self._body

    def replace(self, change: Callable[[Body], Body | None]) -> None:
        """Replace it by what is made of it, by a call for each time that another was faster.

        Parameters
        ----------
        change : callable
            Returns the new one and leaves alone what it is given; None if nothing is to be done.
            It must know again what it has done: an answer may be lost.

        Raises
        ------
        StateError
            If it cannot be written, or others are faster again and again.
        """
        with self._lock:
            for _ in range(_TRIES):
                new = change(self.read())
                if new is None:
                    return
                # So that no two have the same bytes, by which a put is told from another's.
                new = {**new, "write": secrets.token_hex(16)}
                data = record_bytes(self._key, _plain(new))
                # Unknown until there is an answer: what interrupts it may come anywhere.
                version, self._known = self._version, False
                try:
                    self._version = self._store.replace(self._key, data, version)
                except StoreConflict:
                    continue
                self._body, self._known = new, True
                return
        raise StateError(f"{self.place} is replaced by others again and again; try once more")


def _plain(body: Body) -> Body:
    """Return a record without what says its name and format."""
    return {name: value for name, value in body.items() if name not in ("file", "format")}
