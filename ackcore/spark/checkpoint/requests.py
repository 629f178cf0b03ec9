"""Requests to replay dead letters, read by the query that retries the records.

The index of the dead-letter store lists the requests.  One put adds a request to the index together
with the note of the letters that it sends.

Any process may add a request while a query runs.  Only the driver that owns the checkpoint removes
one: after a finished micro-batch took it, or after it was withdrawn and no plan has taken it.  The
driver checks that it is the owner after it has read the version that it replaces.  A driver that
takes over later opens the store and thereby replaces that version, so the old driver's put fails.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from itertools import chain
from pathlib import Path

import pyarrow as pa

from ackcore._arrow.record_batches import rebatched
from ackcore._error_hints import counted
from ackcore.spark.base.checksummed import table_in, write_batches
from ackcore.spark.base.errors import corrupt
from ackcore.spark.checkpoint.records import Records
from ackcore.spark.checkpoint.schema_changes import fit_columns
from ackcore.spark.checkpoint.shared_record import INDEX, Body, SharedRecord
from ackcore.spark.stores.opening import open_store

#: The record with the place of the dead-letter store, if that is outside the checkpoint.
POINTER = "dead_letters.json"
#: The prefix of requests' objects, and the suffix of the empty file that withdraws a request.
REQUESTS, _WITHDRAWN = ".requests", ".withdrawn"
#: Most rows and bytes in memory while a request is written.
_ROWS, _BYTES = 1 << 16, 1 << 25


def spout_of_request(name: str) -> str:
    """Return the spout in the name of a request: ``<request>.<spout>.<checksum>.arrow``."""
    return name.split(".", 1)[1].rsplit(".", 2)[0]


def write_request(directory: Path, request: str, spout: str, letters: Iterable[pa.Table]) -> str:
    """Write the records of a request to a new file ``<request>.<spout>.<checksum>.arrow``.

    Returns the name of the file, which is also the name of the request in the store's index. The
    file is not synced. ``letters``: tables with the same columns, at least one.
    """
    parts = iter(letters)
    first = next(parts)
    schema = first.schema.remove_metadata()
    batches = (batch for part in chain([first], parts) for batch in part.to_batches())
    whole = rebatched(batches, _ROWS, _BYTES)
    return write_batches(directory, f"{request}.{spout}", schema, whole, synced=False)


class Requests:
    """The requests in the index of a store of dead letters.

    ``where``: returns the URL of the store, once the checkpoint was read. ``owner``: the records of
    the checkpoint.
    """

    def __init__(self, where: Callable[[], str], owner: Records) -> None:
        self._where, self._owner = where, owner
        self._opened: SharedRecord | None = None

    @property
    def _index(self) -> SharedRecord:
        url = self._where()
        if self._opened is None or self._opened.store.url != url:
            self._opened = SharedRecord(open_store(url, "dead_letters"), INDEX)
        return self._opened

    def names(self, taken: Collection[str]) -> list[str]:
        """Return the sorted names of all requests, except those that plans have ``taken``.

        Withdrawn requests are left out too. If this driver owns the checkpoint, it moves them to
        the index's list of withdrawn requests. This method is called at every heartbeat. In a
        bucket it reads the index, and makes one more read for each name that was not taken.
        """
        there = [name for name in self._index.load().get("requests", {}) if name not in taken]
        marked = {name for name in there if self._marked(name)}
        if marked and self._owner.owned:
            self._withdraw(marked)
        return sorted({*there} - marked)

    def _marked(self, name: str) -> bool:
        return self._index.store.get(f"{REQUESTS}/{name}{_WITHDRAWN}") is not None

    def _withdraw(self, names: Collection[str]) -> None:
        """Move requests in the index to its list of withdrawn ones: their letters were not sent.

        No plan may have taken them.
        """

        def change(body: Body) -> Body | None:
            gone = [name for name in body.get("requests", {}) if name in names]
            if not gone:
                return None
            self._owner.check_owner()
            return {**_without(body, gone), "withdrawn": [*body.get("withdrawn", []), *gone]}

        self._index.replace(change)

    def read(self, name: str, schema: pa.Schema) -> pa.Table:
        """Return the rows of a request, converted to the present columns of its source.

        Raises CheckpointCorrupt if the request is damaged or missing. Raises ColumnsChanged if the
        rows do not fit these columns.
        """
        index = self._index
        place = f"{index.store.url}/{REQUESTS}/{name}"
        way_out = (
            f"To continue without it, make an empty file {place}{_WITHDRAWN} and start again: its "
            "dead letters then count as not sent, and replay() sends them"
        )
        entry = index.read().get("requests", {}).get(name)
        found = place if entry is None else f"{index.store.url}/{entry['object']}"
        data = None if entry is None else index.store.read(entry["object"])
        if data is None:
            raise corrupt(found, "is missing, though the checkpoint refers to it", way_out)
        table = table_in(data, found, way_out=way_out).replace_schema_metadata(None)
        letters = f"the {counted(table.num_rows, 'dead letter')} of {spout_of_request(name)!r}"
        return fit_columns(table, schema, f"{letters} that {found} requests", way_out)

    def withdrawn(self, names: Collection[str]) -> set[str]:
        """Return those of ``names`` that a user has withdrawn. ``names``: requests in a plan."""
        moved = {*self._index.load().get("withdrawn", [])} if names else set()
        return {name for name in names if name in moved or self._marked(name)}

    def forget(self, names: Collection[str]) -> None:
        """Delete requests, which finished micro-batches have taken, from the index and the store.

        Unknown names are left out. Raises CheckpointInUse if another driver has taken over.
        """
        gone: list[str] = []

        def change(body: Body) -> Body | None:
            requests, withdrawn = body.get("requests", {}), body.get("withdrawn", [])
            there = {*requests, *withdrawn} & {*names}
            if not there:
                return None
            self._owner.check_owner()
            gone[:] = [requests[name]["object"] for name in there if name in requests]
            gone.extend(f"{REQUESTS}/{name}{_WITHDRAWN}" for name in there)
            # Also remove a name that was withdrawn after a plan took it.
            left = [each for each in withdrawn if each not in names]
            return {**_without(body, names), "withdrawn": left}

        self._index.replace(change)
        if gone:
            self._index.store.delete(gone)


def _without(body: Body, names: Collection[str]) -> Body:
    requests = body.get("requests", {}).items()
    return {**body, "requests": {name: of for name, of in requests if name not in names}}
