"""Requests to run dead letters again, as the query finds them that is to take them.

They are named by the index of the store of dead letters: with the note that makes one count it is
there, by one put.

Anybody may add a request there, beside a query that runs.  None but the driver that owns the
checkpoint takes one out: since a micro-batch that is done took it, or since it was withdrawn and no
plan has taken it.  The driver looks whether it is the owner after it has read the version that it
replaces.  Who takes over from then on opens the store, and by that replaces that version.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping
from typing import Any

import pyarrow as pa

from ackcore.spark.base.checksummed import digest_of, table_in
from ackcore.spark.base.errors import corrupt
from ackcore.spark.checkpoint import replays
from ackcore.spark.checkpoint.records import Records
from ackcore.spark.checkpoint.shared_record import INDEX, Body, SharedRecord
from ackcore.spark.stores.interface import Store
from ackcore.spark.stores.opening import open_store

#: The record of a checkpoint that tells where its store of dead letters is, if not in it.
POINTER = "dead_letters.json"
#: Where objects of requests are, and what a user puts there to have one withdrawn.
REQUESTS, _WITHDRAWN = ".requests", ".withdrawn"


class Requests:
    """Requests in the index of a store of dead letters.

    Parameters
    ----------
    where : callable
        Returns the URL of the store, once the checkpoint is known.
    owner : Records
        The checkpoint.
    """

    def __init__(self, where: Callable[[], str], owner: Records) -> None:
        self._where, self._owner = where, owner
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

    def names(self, taken: Collection[str]) -> list[str]:
        """Return the names of all that are there, sorted, but those that were ``taken`` by plans.

        It is asked at every heartbeat.  In a bucket it takes a trip, and one for each that is there
        and was not taken.
        """
        there = [name for name in self._index.load().get("requests", {}) if name not in taken]
        marked = {name for name in there if self._marked(name)}
        if marked and self._owner.owned:
            self._withdraw(marked)
        return sorted({*there} - marked)

    def _marked(self, name: str) -> bool:
        return self._store.get(f"{REQUESTS}/{name}{_WITHDRAWN}") is not None

    def _withdraw(self, names: Collection[str]) -> None:
        """Note that letters were not sent; the plans have taken none of these."""

        def change(body: Body) -> Body | None:
            gone = [name for name in body.get("requests", {}) if name in names]
            if not gone:
                return None
            self._owner.check_owner()
            return {**_without(body, gone), "withdrawn": [*body.get("withdrawn", []), *gone]}

        self._index.replace(change)

    def read(self, name: str, schema: pa.Schema) -> pa.Table:
        """Return the rows of a request in the columns that its source has now.

        Raises
        ------
        CheckpointCorrupt
            If it is damaged or missing.
        ColumnsChanged
            If it does not fit these columns.
        """
        place = f"{self._store.url}/{REQUESTS}/{name}"
        way_out = (
            f"To go on without it, make an empty file {place}{_WITHDRAWN} and start again: its "
            "dead letters then count as not sent, and replay() sends them"
        )
        entry = self._index.read().get("requests", {}).get(name)
        data = None if entry is None else self._store.read(entry["object"])
        if data is None:
            raise corrupt(place, "is missing, though a record names it", way_out)
        table = table_in(data, place, way_out=way_out)
        return replays.fitted(table, schema, name, place, way_out)

    def withdrawn(self, name: str) -> bool:
        """Whether a user wants the query to go on without one that a plan took.

        It is noted down once no plan has it any more.
        """
        return name in self._index.load().get("withdrawn", []) or self._marked(name)

    def forget(self, names: Collection[str]) -> None:
        """Remove requests that were taken by micro-batches that are done."""
        gone: list[str] = []

        def change(body: Body) -> Body | None:
            requests, withdrawn = body.get("requests", {}), body.get("withdrawn", [])
            there = {*requests, *withdrawn} & {*names}
            if not there:
                return None
            self._owner.check_owner()
            gone[:] = [requests[name]["object"] for name in there if name in requests]
            gone.extend(f"{REQUESTS}/{name}{_WITHDRAWN}" for name in there)
            # A name that was withdrawn after a plan took it goes as well.
            left = [each for each in withdrawn if each not in names]
            return {**_without(body, names), "withdrawn": left}

        self._index.replace(change)
        if gone:
            self._store.delete(gone)


def _without(body: Body, names: Collection[str]) -> Body:
    requests = body.get("requests", {}).items()
    return {**body, "requests": {name: of for name, of in requests if name not in names}}


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
