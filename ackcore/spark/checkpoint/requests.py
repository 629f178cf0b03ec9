"""Requests to run dead letters again, as the query finds them that is to take them.

On a file system they are files below the checkpoint; see `ackcore.spark.checkpoint.replays`.  In a
bucket they are named by the index of the store of dead letters: with the note that makes one count
it is there, by one put.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from ackcore.spark.base.checksummed import digest_of, table_in
from ackcore.spark.base.errors import corrupt
from ackcore.spark.checkpoint import replays
from ackcore.spark.checkpoint.shared_record import INDEX, Body, SharedRecord
from ackcore.spark.stores.interface import Store
from ackcore.spark.stores.opening import open_store

#: The record of a checkpoint that tells where its store of dead letters is, if not in it.
POINTER = "dead_letters.json"
#: Where objects of requests are, and what a user puts there to have one withdrawn.
REQUESTS, _WITHDRAWN = ".requests", ".withdrawn"


class Requests(Protocol):
    """Requests that a query may take."""

    def names(self) -> list[str]:
        """Return the names of all that are there, sorted; cheap enough for every heartbeat."""

    def read(self, name: str, schema: pa.Schema) -> pa.Table:
        """Return the rows of a request in the columns that its source has now.

        Raises
        ------
        CheckpointCorrupt, ColumnsChanged
            As `replays.read`.
        """

    def withdrawn(self, name: str) -> bool:
        """Whether a user wants the query to go on without it."""

    def forget(self, names: Collection[str]) -> None:
        """Remove requests that were taken by micro-batches that are done."""


class DirectoryRequests:
    """Requests in a directory; `history.remove_plans` removes them with the plans.

    Parameters
    ----------
    directory : Path
        ``<checkpoint>/ackcore/replays``.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def names(self) -> list[str]:
        """As `Requests.names`."""
        return replays.visible(self._directory)

    def read(self, name: str, schema: pa.Schema) -> pa.Table:
        """As `Requests.read`."""
        return replays.read(self._directory / name, schema)

    def withdrawn(self, name: str) -> bool:
        """As `Requests.withdrawn`."""
        path = self._directory / name
        return not path.exists() and replays.withdrawn(path).exists()

    def forget(self, names: Collection[str]) -> None:
        """Do nothing: they go with the plans that took them."""


class BucketRequests:
    """Requests in the index of a store of dead letters.

    Parameters
    ----------
    where : callable
        Returns the URL of the store, once the checkpoint is known.
    """

    def __init__(self, where: Callable[[], str]) -> None:
        self._where = where
        self._opened: tuple[Store, SharedRecord] | None = None

    @property
    def _store(self) -> Store:
        return self._open()[0]

    @property
    def _index(self) -> SharedRecord:
        return self._open()[1]

    def _open(self) -> tuple[Store, SharedRecord]:
        url = self._where()
        if self._opened is None or self._opened[0].url != url:
            store = open_store(url, "dead_letters")
            self._opened = store, SharedRecord(store, INDEX)
        return self._opened

    def names(self) -> list[str]:
        """As `Requests.names`: a trip, and one for each that is there."""
        found = sorted(self._index.load().get("requests", {}))
        for name in found:
            if self._store.get(f"{REQUESTS}/{name}{_WITHDRAWN}") is not None:
                self._withdraw(name)
        return sorted(self._index.read().get("requests", {}))

    def _withdraw(self, name: str) -> None:
        def change(body: Body) -> Body | None:
            if name not in body["requests"]:
                return None
            requests = {each: of for each, of in body["requests"].items() if each != name}
            withdrawn = [*body.get("withdrawn", []), name]
            return {**body, "requests": requests, "withdrawn": withdrawn}

        self._index.replace(change)

    def read(self, name: str, schema: pa.Schema) -> pa.Table:
        """As `Requests.read`."""
        place = f"{self._store.url}/{REQUESTS}/{name}"
        way_out = (
            f"To go on without it, put an empty object {place}{_WITHDRAWN} and start again: its "
            "dead letters then count as not sent, and replay() sends them"
        )
        entry = self._index.read().get("requests", {}).get(name)
        data = None if entry is None else self._store.read(entry["object"])
        if data is None:
            raise corrupt(place, "is missing, though a record names it", way_out)
        table = table_in(data, place, way_out=way_out)
        return replays.fitted(table, schema, name, place, way_out)

    def withdrawn(self, name: str) -> bool:
        """As `Requests.withdrawn`."""
        self.names()
        return name in self._index.read().get("withdrawn", [])

    def forget(self, names: Collection[str]) -> None:
        """As `Requests.forget`; it takes trips only if there are some."""
        body = self._index.read()
        there = body.get("requests", {}).keys() | {*body.get("withdrawn", [])}
        names = there & {*names}
        if not names:
            return
        gone: list[str] = []

        def change(body: Body) -> Body:
            gone[:] = [of["object"] for name, of in body["requests"].items() if name in names]
            requests = {each: of for each, of in body["requests"].items() if each not in names}
            # Too late: it was taken.
            withdrawn = [each for each in body.get("withdrawn", []) if each not in names]
            return {**body, "requests": requests, "withdrawn": withdrawn}

        self._index.replace(change)
        self._store.delete([*gone, *(f"{REQUESTS}/{name}{_WITHDRAWN}" for name in names)])


def put_object(store: Store, below: str, data: bytes) -> dict[str, Any]:
    """Put an object that a record is to name, and return what the record has of it."""
    digest = digest_of(data)
    key = f"{below}/{secrets.token_hex(4)}{digest[:16]}"
    store.put(key, data)
    return {"object": key, "bytes": len(data), "blake2b": digest}


def object_of(store: Store, entry: Mapping[str, Any]) -> bytes | None:
    """Return an object that a record names, None if it is not there or not as it was put."""
    found = store.get(entry["object"])
    if found is None or len(found.data) != entry["bytes"]:
        return None
    return found.data if digest_of(found.data) == entry["blake2b"] else None
