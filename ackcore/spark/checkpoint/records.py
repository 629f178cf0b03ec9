"""The records of a checkpoint, by name: plans, decisions, marks, and meta.json.

Each record holds the key of its deployment; a record of another deployment is refused.  It also
holds the epoch of the driver that wrote it: the number of times the checkpoint had been opened.  On
a file system records are files, protected by a lock (`RecordFiles`).  In a bucket all records are
in one object (`head.HeadRecords`).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

from ackcore.spark.base.atomic import make_directory, remove, remove_temporaries
from ackcore.spark.base.checksummed import read_record, write_record
from ackcore.spark.base.errors import CheckpointForeign, CheckpointInUse
from ackcore.spark.base.lock import Lock
from ackcore.spark.base.paths import numbered
from ackcore.spark.checkpoint.progress_log import ProgressLog
from ackcore.spark.stores.local import LocalStore

META = "meta.json"


class Records(Protocol):
    """The records of a checkpoint that this driver owns.

    Attributes
    ----------
    epoch : int
        The number of times the checkpoint was opened, this time included. Each record holds it.
    """

    epoch: int

    @property
    def owned(self) -> bool:
        """Whether this driver has taken over the checkpoint. Before that it only reads."""

    def place(self, name: str) -> str:
        """Return the path or URL of a record, for messages."""

    def read_meta(self) -> dict[str, Any] | None:
        """Return the content of meta.json, or None if it does not exist yet."""

    def write_meta(self, meta: Mapping[str, Any], *, once: bool = False) -> None:
        """Write meta.json. After this, other records can be read and written."""

    def remains(self) -> str | None:
        """Return the name of any record other than `META` and the lock, or None."""

    def read(self, name: str) -> dict[str, Any] | None:
        """Return a record, or None if it does not exist.

        Raises
        ------
        CheckpointCorrupt, CheckpointNewer, StateError
            In the cases of `read_record`.
        CheckpointForeign
            If the record belongs to another deployment.
        """

    def write(
        self,
        name: str,
        body: Mapping[str, Any],
        *,
        once: bool = False,
        of_run: str = "",
    ) -> None:
        """Write a record. With ``once`` it must not exist yet.

        A record with ``of_run``, the name of a run, counts only if that run was not fenced off.

        Raises
        ------
        CheckpointInUse
            If another driver has taken over, or has written a record with ``once``.
        """

    def numbers(self, directory: str, ending: str = "") -> list[int]:
        """Return the numbers of ``<directory>/<number><ending>``, sorted."""

    def append_progress(self, line: Mapping[str, Any]) -> None:
        """Log the results of a micro-batch for readers outside the query. Nothing depends on this
        log.
        """

    def remove_old(self, number: int, tables: Collection[str]) -> None:
        """Remove records of micro-batches before ``number - 1``, and tables that no record names.

        ``tables`` are the keys of these tables.
        """

    def check_owner(self) -> None:
        """Raise `CheckpointInUse` if another driver has taken over."""

    def close(self) -> None:
        """Release the checkpoint. Repeated calls do nothing."""


class RecordFiles:
    """Records in files below a directory.

    Parameters
    ----------
    root : Path
        ``<checkpoint>/ackcore``.
    deployment : str, optional
        The deployment's key, if it is known already.
    lock : Lock, optional
        The lock that protects the checkpoint. Without a lock the records are only read.
    """

    def __init__(self, root: Path, deployment: str = "", lock: Lock | None = None):
        self.root = root
        self._deployment = deployment
        self._lock = lock
        self._progress = ProgressLog(root)
        self.epoch = 0 if lock is None else lock.epoch
        self.owned = lock is not None

    @classmethod
    def open(cls, root: Path) -> RecordFiles:
        """Lock a directory, and create it if it does not exist."""
        return cls(root, lock=Lock(make_directory(root) / "lock"))

    def remove_temporaries(self) -> None:
        """Remove the temporary files of drivers that died."""
        for directory in (self.root, self.root / "batches", self.root / "state"):
            remove_temporaries(directory)

    def place(self, name: str) -> str:
        """See `Records.place`."""
        return str(self.root / name)

    def read_meta(self) -> dict[str, Any] | None:
        """See `Records.read_meta`."""
        meta = read_record(self.root / META, META)
        if meta is not None:
            self._deployment = meta["deployment_key"]
        return meta

    def write_meta(self, meta: Mapping[str, Any], *, once: bool = False) -> None:
        """See `Records.write_meta`."""
        write_record(self.root / META, META, {**meta, "epoch": self.epoch}, once=once)
        self._deployment = meta["deployment_key"]

    def remains(self) -> str | None:
        """See `Records.remains`."""
        own = {self.root / META, self.root / "lock"}
        files = (path for path in sorted(self.root.rglob("*")) if path.is_file())
        found = next((path for path in files if path not in own), None)
        return None if found is None else str(found.relative_to(self.root))

    def read(self, name: str) -> dict[str, Any] | None:
        """See `Records.read`."""
        body = read_record(self.root / name, name)
        return of_deployment(body, self._deployment, self.place(name), self.place(META))

    def write(
        self,
        name: str,
        body: Mapping[str, Any],
        *,
        once: bool = False,
        of_run: str = "",
    ) -> None:
        """See `Records.write`. With ``of_run`` the file is made in the run's directory.

        The next driver renames that directory, so a fenced-off run cannot record anything.
        """
        made_in = self.root / "work" / of_run if of_run else None
        path = self.root / name
        make_directory(path.parent)
        whole = {"deployment_key": self._deployment, "epoch": self.epoch, **body}
        try:
            write_record(path, name, whole, once=once, made_in=made_in)
        except FileExistsError:
            raise written_by_another(path) from None

    def numbers(self, directory: str, ending: str = "") -> list[int]:
        """See `Records.numbers`."""
        return numbered(self.root / directory, ending)

    def append_progress(self, line: Mapping[str, Any]) -> None:
        """See `Records.append_progress`."""
        self._progress.append(line)

    def remove_old(self, number: int, tables: Collection[str]) -> None:
        """See `Records.remove_old`."""
        # A driver that takes over from here on removes the same: it sees this driver's mark.
        self.check_owner()
        for path in sorted((self.root / "batches").iterdir()):
            of = path.name.partition(".")[0]
            if of.isdecimal() and int(of) < number - 1:
                remove(path)
        LocalStore(self.root).delete(tables)

    def check_owner(self) -> None:
        """See `Records.check_owner`."""
        if self._lock is not None:
            self._lock.check()

    def close(self) -> None:
        """See `Records.close`."""
        if self._lock is not None:
            self._lock.close()


def of_deployment(
    body: dict[str, Any] | None, deployment: str, place: str, meta: str
) -> dict[str, Any] | None:
    """Return a record of this deployment unchanged, and refuse other records.

    Raises
    ------
    CheckpointForeign
        If the record belongs to another deployment.
    """
    if body is not None and body["deployment_key"] != deployment:
        raise CheckpointForeign(
            f"{place} was written for deployment {body['deployment_key']}, and {meta} is of "
            f"{deployment}: it was copied here from another checkpoint. Put back the file that "
            "belongs here, or start on a new checkpoint"
        )
    return body


def written_by_another(path: str | os.PathLike[str]) -> CheckpointInUse:
    """Return the error for a record that another driver wrote before this one could."""
    return CheckpointInUse(
        f"{os.fspath(path)} was written by another driver, while this one was about to. Two at "
        "once are one too many: let the other one go on, or stop it and start again, and it goes "
        "on from that record"
    )
