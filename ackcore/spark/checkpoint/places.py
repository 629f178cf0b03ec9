"""The parts of a checkpoint on a file system or in a bucket."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from ackcore.spark.base.atomic import fenced
from ackcore.spark.base.errors import StateError
from ackcore.spark.checkpoint.bucket_runs import BucketRuns
from ackcore.spark.checkpoint.head import HeadMoved, HeadRecords
from ackcore.spark.checkpoint.records import RecordFiles, Records
from ackcore.spark.checkpoint.requests import POINTER, Requests
from ackcore.spark.checkpoint.run_directories import RunDirectories
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
    runs: RunDirectories | BucketRuns


def opened_directory(checkpoint: Path, use: Callable[[Place], Opened]) -> Opened:
    """Lock a checkpoint on a file system, and return the result of ``use``."""
    root = checkpoint / "ackcore"
    records = RecordFiles.open(root)
    try:
        with fenced(records.check_owner):
            records.remove_temporaries()
            runs = RunDirectories(root / "work", records.check_owner)
            tables = TableCache(LocalStore(root), records.epoch)
            requests = Requests(partial(letters_url, records, str(checkpoint)), records)
            return use(Place(str(checkpoint), requests, records, tables, runs))
    except BaseException:
        records.close()
        raise


def opened_bucket(url: str, use: Callable[[Place], Opened]) -> Opened:
    """Call ``use`` for a checkpoint in a bucket, then take it over, and return the result of
    ``use``.
    """
    store = open_store(f"{url}/ackcore", "checkpoint")
    for tried in range(_TAKE_OVERS):
        records = HeadRecords(store)
        tables = TableCache(store, records.epoch)
        try:
            requests = Requests(partial(letters_url, records, url), records)
            runs = BucketRuns(store, records.check_owner)
            found = use(Place(url, requests, records, tables, runs))
            records.take_over()
        except StateError as error:
            # Records that are read while the other driver writes may be inconsistent.
            moved = isinstance(error, HeadMoved) or records.has_moved()
            records.close()
            if not moved or tried == _TAKE_OVERS - 1:
                raise
        except BaseException:
            records.close()
            raise
        else:
            return found
    raise AssertionError("unreachable")


def letters_url(records: Records, url: str) -> str:
    """Return the path or URL of a checkpoint's dead letters."""
    return remembered_letters(records) or url + WITHIN


def remembered_letters(records: Records) -> str | None:
    """Return the recorded place of the dead letters, or None if they are in the checkpoint."""
    pointer = records.read(POINTER)
    return None if pointer is None else pointer["path"]
