"""All records of a checkpoint, in one object that only the owner can replace.

``head.json`` holds the owner's epoch, name and token, and the records by name: plans, decisions,
marks, and meta.json.  Each record holds the key of its deployment, and the epoch of the driver that
wrote it: the number of times the checkpoint had been opened.  Each step of the protocol is one put
of the head, on condition that its version is the one that this driver wrote last.
So after a takeover the old driver is refused at its very next step, however long it slept: the
check and the step are one put, so nothing can happen in between.  This needs no lock and no clock.
A driver opens the checkpoint by replacing the head, with the next epoch: this fences the old owner.
On a file system a lock also refuses a second driver while the first one lives.

A refused put does not prove a takeover: an earlier attempt of the same put may have succeeded.
The driver then reads the head: it is the owner if the head holds its token.  A late put of
an earlier owner depends on a version that was replaced, and fails whenever it arrives.

A record of more than `_LARGE` bytes is an object of its own; the head holds its length and
checksum.  If a new head no longer names a table or such an object, the driver that put the head
deletes the object afterwards.  No head names it then, and no later head can, even after a takeover.
In a bucket the lines of progress are in the head, so they need no request.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ackcore.spark.base.checksummed import record_bytes, record_in
from ackcore.spark.base.errors import CheckpointForeign, CheckpointInUse, StateError, corrupt
from ackcore.spark.base.lock import Lock, process_name
from ackcore.spark.checkpoint.progress_log import ProgressLog
from ackcore.spark.checkpoint.shared_record import object_of, put_object
from ackcore.spark.stores.interface import Store, StoreConflict
from ackcore.spark.stores.local import LocalStore

_log = logging.getLogger("ackcore")

HEAD, META = "head.json", "meta.json"
#: The prefix of large records.
_BELOW = "records"
#: Larger records are objects of their own.
_LARGE = 1 << 16
#: Most lines of progress in the head.
_PROGRESS_LINES = 50
#: Attempts of a put that conflicts with an earlier put of this driver.
_TRIES = 5
#: The name of a record of a micro-batch: the number, and the ending that names its kind.
_OF_BATCH = re.compile(r"batches/(0|[1-9][0-9]{0,18})(.*)")

Bodies = dict[str, dict[str, Any]]


class HeadMoved(StateError):
    """Another driver wrote to a checkpoint while this driver opened it. `opened` tries again."""


class Records:
    """The records of a checkpoint: JSON such as ``batches/7.plan``, all in one object, the head.

    The constructor only reads them. The first write or `take_over` makes this driver the owner and
    fences the former one. So a driver whose topology is refused fences nobody.

    ``store``: the file system or the bucket, rooted at ``<checkpoint>/ackcore``. ``lock``: the lock
    of a checkpoint on a file system; `close` releases it.

    Attributes: ``found``: the head as this driver first read it: epoch, holder, whether it is open,
    and records. ``epoch``: the epoch of this driver, if it becomes the owner. ``owned``: whether it
    has put a head, and so became the owner.
    """

    def __init__(self, store: Store, lock: Lock | None = None) -> None:
        self._store = store
        self._file_lock = lock
        self._log = ProgressLog(store.root) if isinstance(store, LocalStore) else None
        self._token = secrets.token_hex(16)
        self._lock = threading.RLock()
        self._deployment = ""
        self._large: dict[str, dict[str, Any]] = {}
        #: Objects that no record names any more; the stored head may name them until the next put.
        self._dropped: set[str] = set()
        #: Objects that no head names since the last put: they may be deleted.
        self._deletable: set[str] = set()
        #: The first micro-batch with records in the next head.
        self._first = 0
        self._swept = False
        self.owned = self._closed = False
        found = store.get(HEAD)
        self.found: dict[str, Any] = {} if found is None else self._parsed(found.data)
        self.epoch: int = self.found.get("epoch", 0) + 1
        self._records: Bodies = self.found.get("records", {})
        #: Records that the next put writes, too.
        self._next: Bodies = {}
        #: Objects that the stored head names.
        self._named = _objects_of(self._records)
        self._progress: list[dict[str, Any]] = self.found.get("progress", [])
        #: The head's version; None if there is no head, or while the result of a put is unknown.
        self._version = None if found is None else found.version

    # -- the head -----------------------------------------------------------------------------

    def _parsed(self, data: bytes) -> dict[str, Any]:
        return record_in(data, self.place(HEAD), HEAD)

    def _bytes(self, records: Bodies, *, is_open: bool = True) -> bytes:
        body = {
            "epoch": self.epoch,
            "holder": process_name(),
            "token": self._token,
            "open": is_open,
            # No two heads have the same bytes, so a driver can recognize its own put.
            "write": secrets.token_hex(16),
            "records": records,
            "progress": self._progress,
        }
        return record_bytes(HEAD, body)

    def take_over(self) -> None:
        """Make this driver the owner, and write the records that wait for the next put.

        Repeated calls do nothing. Raises HeadMoved if the head has changed since it was read. Logs
        a warning if the former owner has not released the checkpoint.
        """
        with self._lock:
            if not self.owned:
                self._take_over({**self._records, **self._next})

    def _take_over(self, records: Bodies) -> None:
        version, self._version = self._version, None
        data = self._bytes(records)
        try:
            self._version = self._store.replace(HEAD, data, version)
        except StoreConflict:
            raise HeadMoved(
                f"{self.place('')} could not be taken over, because another query writes to it at "
                "the same time. Stop that query, or run this one on another checkpoint"
            ) from None
        self.owned = True
        self._has_put(records)
        if self.found.get("open"):
            _log.warning(
                "%s is taken over from %s, which did not release it: that driver died, or "
                "ends at its next step",
                self.place(""),
                self.found["holder"],
            )

    def has_moved(self) -> bool:
        """Return whether the head changed since it was read; False once this driver has put one."""
        if self.owned:
            return False
        found = self._store.get(HEAD)
        return (None if found is None else found.version) != self._version

    def _load(self) -> None:
        """Read the head again after a put without an answer.

        Raises CheckpointInUse if the head belongs to another driver.
        """
        version, records = self._read_own()
        self._recorded(records)
        self._version = version

    def _read_own(self) -> tuple[str, Bodies]:
        """Return the version and the records of the stored head.

        Raises CheckpointInUse if the head belongs to another driver.
        """
        found = self._store.get(HEAD)
        head = {} if found is None else self._parsed(found.data)
        if found is None or head["token"] != self._token:
            by = "unknown: its head was removed" if found is None else head["holder"]
            raise CheckpointInUse(
                f"{self.place('')} was taken over from this driver (epoch {self.epoch}) by another "
                f"({by}, epoch {head.get('epoch', 'none')}). The records that this driver wrote "
                "are valid; it writes no more. Let the other driver run, or stop it and start this "
                "query again"
            )
        return found.version, head["records"]

    def _recorded(self, records: Bodies) -> None:
        # Dropped records stay dropped, though the stored head may still have them.
        self._records = self._kept(records)
        named = _objects_of(records)
        self._dropped |= self._named - named
        self._deletable -= named
        self._named = named

    def _has_put(self, records: Bodies) -> None:
        """Update this object after a put of a head with ``records``."""
        self._recorded(records)
        self._next = {}
        self._deletable |= self._dropped - self._named
        self._dropped = set()

    def _replace(self, change: Callable[[Bodies], Bodies], *, is_open: bool = True) -> None:
        """Put a head with the result of ``change``, given the present records.

        The first put takes the checkpoint over; it raises HeadMoved if another driver came first.
        Raises CheckpointInUse if another driver has taken over, and StateError if the store refuses
        each attempt. ``change``: returns new records, and does not change its argument. Records
        that wait for the next put are added.
        """
        with self._lock:
            if not self.owned:
                self._take_over({**change(self._records), **self._next})
                return
            for _ in range(_TRIES):
                if self._version is None:
                    self._load()
                version, records = self._version, {**change(self._records), **self._next}
                assert version is not None
                # Unknown until there is an answer: an interrupt may come anywhere.
                self._version = None
                try:
                    data = self._bytes(records, is_open=is_open)
                    put = self._store.replace(HEAD, data, version)
                except StoreConflict:
                    continue
                self._has_put(records)
                self._version = put
                return
        raise StateError(
            f"{self.place(HEAD)} could not be replaced: the store refused {_TRIES} conditional "
            "puts, though no other driver wrote the file. Start again on the same checkpoint; if "
            "this happens again, the store does not support conditional puts reliably"
        )

    def check_owner(self) -> None:
        """Raise CheckpointInUse if another driver took over.

        In a bucket this takes a request, and does nothing before this driver is the owner.
        """
        with self._lock:
            if self._file_lock is not None:
                # A put of the head calls this, too, just before the version gets its name.
                self._file_lock.check()
            elif self.owned:
                self._read_own()

    def close(self) -> None:
        """Write the records that wait for a put, and release the checkpoint.

        Does nothing if called again, and writes nothing if this driver is not the owner.

        A StateError is only logged: the next driver then takes over as after a crash.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                if self.owned and self._version is not None:
                    self._replace(lambda records: records, is_open=False)
                    self._delete()
            except StateError as error:
                _log.debug("%s was not released: %s", self.place(""), error)
            finally:
                if self._file_lock is not None:
                    self._file_lock.close()

    # -- records ------------------------------------------------------------------------------

    def place(self, name: str) -> str:
        """Return the path or URL of an object, for messages."""
        return f"{self._store.url}/{name}".rstrip("/")

    def entry(self, name: str) -> str:
        """Return the head's path or URL with the name of a record in it, for messages."""
        return f"{self.place(HEAD)}: {name}"

    def read_meta(self) -> dict[str, Any] | None:
        """Return meta.json, whose deployment key `read` then expects; None if it is missing."""
        meta = self._body(META)
        if meta is not None:
            self._deployment = meta["deployment_key"]
        return meta

    def write_meta(
        self, meta: Mapping[str, Any], *, once: bool = False, with_next: bool = False
    ) -> None:
        """Write meta.json; see `write`. After this, other records can be read and written."""
        self._deployment = meta["deployment_key"]
        self.write(META, {**meta, "epoch": self.epoch}, once=once, with_next=with_next)

    def first_content(self) -> str | None:
        """Return the name of a record or file of the checkpoint; None if there is none.

        The head and the lock do not count. Nor do large records that the first driver of a new
        checkpoint put after an empty head, if it could not put the head that names them.
        """
        if self._records:
            return min(self._records)
        keys = [entry.key for entry in self._store.list()]
        if self.found:
            keys = [key for key in keys if not key.startswith(f"{_BELOW}/")]
        return next((key for key in keys if key not in (HEAD, "lock")), None)

    def read(self, name: str) -> dict[str, Any] | None:
        """Return a record of the checkpoint, such as ``batches/7.plan``; None if it does not exist.

        It may be one that this driver has passed to `write` and that waits for the next put.
        Raises CheckpointCorrupt or StateError if the record cannot be read, and CheckpointForeign
        if it belongs to another deployment.
        """
        with self._lock:
            if self.owned and self._version is None:
                self._load()  # an interrupted put may have succeeded
        body = self._body(name)
        if body is not None and body["deployment_key"] != self._deployment:
            raise CheckpointForeign(
                f"{self.entry(name)} was written for deployment {body['deployment_key']}, and "
                f"{self.entry(META)} is of {self._deployment}: it was copied here from another "
                "checkpoint. Put back the file that belongs here, or start on a new checkpoint"
            )
        return body

    def _body(self, name: str) -> dict[str, Any] | None:
        body = self._next.get(name) or self._records.get(name)
        if body is None or "object" not in body:
            return body
        key = body["object"]
        if key not in self._large:
            data = object_of(self._store, body)
            if data is None:
                raise corrupt(self.place(key), f"is missing or damaged, though {HEAD} names it")
            self._large[key] = json.loads(data)
        return self._large[key]

    def write(
        self, name: str, body: Mapping[str, Any], *, once: bool = False, with_next: bool = False
    ) -> None:
        """Write a record of the checkpoint. The first put takes the checkpoint over.

        Raises CheckpointInUse if another driver has taken over, or has written the record though
        ``once`` is true. Raises HeadMoved if this is the first put, and another driver came first.

        ``once``: whether the record must not exist yet. ``with_next``: whether to write it in the
        same put as the next record, or at `close`. Until then only this driver reads it.
        """
        if once and (name in self._records or name in self._next):
            raise CheckpointInUse(
                f"{self.entry(name)} was written by another driver before this one could write it. "
                "Let the other driver run, or stop it and start this query again: it continues "
                "from that record"
            )
        body = {"deployment_key": self._deployment, "epoch": self.epoch, **body}
        data = json.dumps(body, allow_nan=False, separators=(",", ":")).encode()
        kept: dict[str, Any] = json.loads(data)
        if len(data) > _LARGE:
            if not self.found:  # an object without any head would look like a damaged checkpoint
                self.take_over()
            entry = put_object(self._store, f"{_BELOW}/e{self.epoch}", data)
            self._large[entry["object"]], kept = kept, entry
        if with_next:
            with self._lock:
                self._next = {**self._next, name: kept}
        else:
            self._replace(lambda records: {**records, name: kept})

    def append_progress(self, line: Mapping[str, Any]) -> None:
        """Log the results of a micro-batch for readers outside the query.

        On a file system the log is a file.  In a bucket the line is written with the next record or
        at `close`.
        """
        if self._log is not None:
            self._log.append(line)
            return
        with self._lock:
            text = json.dumps(line, default=float)
            self._progress = [*self._progress, json.loads(text)][-_PROGRESS_LINES:]

    def numbers(self, ending: str) -> list[int]:
        """Return the sorted numbers of micro-batches with a record ``batches/<number><ending>``.

        Records that wait for the next put do not count.
        """
        found = map(_OF_BATCH.fullmatch, self._records)
        return sorted(int(each[1]) for each in found if each is not None and each[2] == ending)

    # -- removal ------------------------------------------------------------------------------

    def remove_old(self, number: int, tables: Collection[str]) -> None:
        """Remove records of micro-batches before ``number - 1``, and files that no record names.

        ``tables`` are the keys of these files. The next put removes the records. The files are
        deleted one micro-batch later, or at `close`.
        """
        with self._lock:
            self._first = number - 1
            self._records = self._kept(self._records)
            named = _objects_of(self._records)
            self._large = {key: body for key, body in self._large.items() if key in named}
            self._dropped |= {*tables}
            if not self._swept:
                # Objects of drivers that died before a head named them.  The list may lag.
                listed = {entry.key for entry in self._store.list(_BELOW)}
                self._dropped |= {key for key in listed if _epoch_in(key) < self.epoch}
                self._swept = True
            self._delete()

    def _delete(self) -> None:
        """Delete objects that no head names, unless the result of the last put is unknown."""
        if self._deletable and self._version is not None:
            self._store.delete(sorted(self._deletable))
            self._deletable = set()

    def _kept(self, records: Bodies) -> Bodies:
        """Return the records without those of removed micro-batches."""
        found = {name: _OF_BATCH.fullmatch(name) for name in records}
        old = {name for name, of in found.items() if of is not None and int(of[1]) < self._first}
        return {name: body for name, body in records.items() if name not in old}


def _objects_of(records: Bodies) -> set[str]:
    return {body["object"] for body in records.values() if "object" in body}


def _epoch_in(key: str) -> int:
    """Return the epoch in the key of a large record, or a huge number if the key has none."""
    epoch = key.split("/")[1].removeprefix("e")
    return int(epoch) if epoch.isdecimal() else 1 << 63
