"""The parts of a checkpoint on a file system or in a bucket."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

from ackcore.spark.base.atomic import fenced, make_directory, remove_temporaries
from ackcore.spark.base.errors import StateError
from ackcore.spark.base.lock import Lock
from ackcore.spark.checkpoint.records import HEAD, HeadMoved, Records
from ackcore.spark.checkpoint.requests import POINTER, Requests
from ackcore.spark.checkpoint.run_places import RunPlaces
from ackcore.spark.checkpoint.tables import TableCache
from ackcore.spark.stores.local import LocalStore
from ackcore.spark.stores.opening import open_store

#: Attempts to take over a checkpoint while another driver writes to it.
_TAKE_OVERS = 10

#: The end of the path of a dead-letter store inside a checkpoint.
WITHIN = "/ackcore/dead_letters"

Opened = TypeVar("Opened")


class Place(NamedTuple):
    """The place of a checkpoint, with the objects that access its parts.

    ``url`` is the checkpoint itself; ``requests`` are those to replay dead letters.
    """

    url: str
    requests: Requests
    records: Records
    tables: TableCache
    runs: RunPlaces


def opened(url: str, use: Callable[[Place], Opened]) -> Opened:
    """Call ``use`` for a checkpoint, then take it over, and return the result of ``use``.

    On a file system the checkpoint is locked first.
    """
    store = open_store(f"{url}/ackcore", "checkpoint")
    lock = Lock(make_directory(store.root) / "lock") if isinstance(store, LocalStore) else None
    for tried in range(_TAKE_OVERS):
        records: Records | None = None
        try:
            with fenced(lock.check) if lock is not None else contextlib.nullcontext():
                records = Records(store, lock)
                if isinstance(store, LocalStore):
                    for name in (HEAD, "records", "state"):
                        remove_temporaries(store.root / name)
                tables = TableCache(store, records.epoch)
                requests = Requests(partial(letters_url, records, url), records)
                runs = RunPlaces(store, records.check_owner)
                found = use(Place(url, requests, records, tables, runs))
                records.take_over()
        except StateError as error:
            # Records that are read while the other driver writes may be inconsistent.
            moved = isinstance(error, HeadMoved) or (records is not None and records.has_moved())
            if not moved or tried == _TAKE_OVERS - 1:
                _given_up(records, lock)
                raise
        except BaseException:
            _given_up(records, lock)
            raise
        else:
            return found
    raise AssertionError("unreachable")


def _given_up(records: Records | None, lock: Lock | None) -> None:
    if records is not None:
        records.close()
    elif lock is not None:
        lock.close()


def letters_url(records: Records, url: str) -> str:
    """Return the path or URL of a checkpoint's dead letters."""
    return remembered_letters(records) or url + WITHIN


def remembered_letters(records: Records) -> str | None:
    """Return the recorded place of the dead letters, or None if they are in the checkpoint."""
    pointer = records.read(POINTER)
    return None if pointer is None else pointer["path"]
