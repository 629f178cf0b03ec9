"""A record in a store that several processes change without a lock.

A process reads the record, and replaces it on condition that its version is unchanged.  If another
process was faster, it reads the record again.  So each change starts from the latest version, and
no change undoes another.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping
from typing import Any

from ackcore.spark.base.checksummed import digest_of, record_bytes, record_in
from ackcore.spark.base.errors import StateError
from ackcore.spark.stores.interface import Store, StoreConflict

Body = dict[str, Any]
#: The shared record of a dead-letter store: see `ackcore.spark.dead_letters.letter_store`.
INDEX = "index.json"
#: Attempts of a change while other processes are faster.
_TRIES = 50


class SharedRecord:
    """A record of a store that several processes change.

    ``store``: the store of the record, also an attribute. ``key``: the record's key, which its
    content states as its name too.
    """

    def __init__(self, store: Store, key: str) -> None:
        self.store, self._key = store, key
        self._lock = threading.RLock()
        self._body: Body = {}
        self._data: bytes | None = None
        self._version: str | None = None
        self._known = False

    @property
    def place(self) -> str:
        """The URL of the record, for messages."""
        return f"{self.store.url}/{self._key}"

    def read(self) -> Body:
        """Return the record as last read or replaced; empty if it does not exist.

        Raises CheckpointCorrupt, CheckpointFormat or StateError if the record cannot be read.
        """
        with self._lock:
            return self._body if self._known else self.load()

    def load(self) -> Body:
        """Read the record from the store again, and return it; empty if it does not exist."""
        with self._lock:
            data, version = self.store.get(self._key) or (None, None)
            # The record may have megabytes, and is read at every heartbeat: bytes that are the same
            # as before are not parsed again.
            if data is None or data != self._data:
                body = {} if data is None else record_in(data, self.place, self._key)
                self._body, self._data = body, data
            self._version, self._known = version, True
            return self._body

    def replace(self, change: Callable[[Body], Body | None]) -> None:
        """Replace the record by the result of ``change``; try again if another process was faster.

        Raises StateError if the record cannot be written, or other processes are faster every time.

        ``change``: returns the new record without changing its argument; None if there is nothing
        to do. It must recognize its own earlier change: the answer to a put may be lost.
        """
        with self._lock:
            for _ in range(_TRIES):
                new = change(self.read())
                if new is None:
                    return
                # No two puts have the same bytes, so a process can recognize its own.
                new = {**new, "write": secrets.token_hex(16)}
                data = record_bytes(self._key, new)
                # Unknown until there is an answer: an interrupt may come anywhere.
                version, self._known = self._version, False
                try:
                    self._version = self.store.replace(self._key, data, version)
                except StoreConflict:
                    continue
                self._body, self._data, self._known = new, data, True
                return
        raise StateError(
            f"{self.place} could not be replaced in {_TRIES} attempts, because other processes "
            "replaced it first each time. Try again"
        )


def put_object(store: Store, below: str, data: bytes) -> dict[str, Any]:
    """Write an object with a new key below ``below``; return the entry for a record.

    The entry has the key (``object``), the length (``bytes``) and the checksum (``blake2b``).
    """
    digest = digest_of(data)
    key = f"{below}/{secrets.token_hex(4)}{digest[:16]}"
    store.put(key, data)
    return {"object": key, "bytes": len(data), "blake2b": digest}


def object_of(store: Store, entry: Mapping[str, Any]) -> bytes | None:
    """Return the bytes of an object that a record names; None if it is missing or damaged."""
    found = store.get(entry["object"])
    if found is None or len(found.data) != entry["bytes"]:
        return None
    return found.data if digest_of(found.data) == entry["blake2b"] else None
