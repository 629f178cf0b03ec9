"""Files of a run, at paths of a file system or at URLs of a bucket.

Driver and tasks exchange files in a place that they share.  A file's name is derived from its
bytes, so two writers of one name write the same bytes.  A record names the file, and each reader
checks it.  A file for a bucket is first made on this machine and then put whole, in parts if it is
large.  Once the put has returned, the object has all of its bytes; before, it does not exist.

Use `os.path.join` for paths and for URLs of buckets.  Each process makes its own client, from the
credentials of its environment.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pyarrow as pa

from ackcore._files import sync_directory
from ackcore.spark.base.atomic import check_fence, make_directory, remove
from ackcore.spark.base.checksummed import RUN_AGAIN, table_in
from ackcore.spark.base.errors import (
    WAY_OUT,
    CheckpointCorrupt,
    RowFileDamaged,
    StateError,
    corrupt,
)
from ackcore.spark.base.paths import Place
from ackcore.spark.stores.hdfs import HdfsStore
from ackcore.spark.stores.interface import Store
from ackcore.spark.stores.local import LocalStore
from ackcore.spark.stores.objects import ObjectStore
from ackcore.spark.stores.opening import is_bucket, store_at


@lru_cache(maxsize=64)
def _bucket(root: str) -> Store:
    """Return the store of a whole bucket: one client for all requests of this process."""
    return store_at(root)


def object_at(url: Place) -> tuple[Store, str]:
    """Return the store of a URL's bucket or of a path's directory, and the key within it."""
    if not is_bucket(url):
        path = Path(url)
        return LocalStore(path.parent), path.name
    scheme, _, rest = os.fspath(url).partition("://")
    host, _, key = rest.partition("/")
    return _bucket(f"{scheme}://{host}"), key


def local_directory() -> str:
    """Return a directory for local files: the first of SPARK_LOCAL_DIRS, or that of `tempfile`."""
    return os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0] or tempfile.gettempdir()


def made_in(directory: Place) -> str:
    """Return the directory in which to make a file for `publish`.

    It is ``directory`` itself, which is created. If ``directory`` is in a bucket, it is local.
    """
    if is_bucket(directory):
        return local_directory()
    os.makedirs(directory, exist_ok=True)
    return os.fspath(directory)


def publish(made: str, directory: Place, name: str, *, synced: bool = True) -> None:
    """Rename a finished file to its name in a directory, or move it into a bucket.

    ``made``: the file, in `made_in(directory)`. ``name``: the file's name in the target directory.
    ``synced``: whether to sync the directory, so that the name survives a crash of the machine. A
    decision may name only synced files.
    """
    if is_bucket(directory):
        store, key = object_at(os.path.join(directory, name))
        store.put_file(key, Path(made))
        return
    os.replace(made, os.path.join(directory, name))
    if synced:
        # A decision that names the file must not outlast the name.
        sync_directory(Path(directory))


class StagingDirectory:
    """A directory in which to make files for ``directory``.

    It is ``directory`` itself. If ``directory`` is in a bucket, it is a new local directory.
    """

    def __init__(self, directory: Place) -> None:
        self._directory = directory
        self._local: tempfile.TemporaryDirectory[str] | None = None

    @property
    def path(self) -> Path:
        """The directory in which to make files; it exists."""
        if not is_bucket(self._directory):
            return make_directory(Path(self._directory))
        if self._local is None:
            self._local = tempfile.TemporaryDirectory(prefix="ackcore-", dir=local_directory())
        return Path(self._local.name)

    def publish(self, name: str) -> None:
        """Move a finished file to the bucket; on a file system it is already in place."""
        if is_bucket(self._directory):
            publish(str(self.path / name), self._directory, name)

    def close(self) -> None:
        """Remove files that were not published to a bucket. Repeated calls do nothing."""
        local, self._local = self._local, None
        if local is not None:
            local.cleanup()


@contextlib.contextmanager
def making_in(directory: Place) -> Iterator[Path]:
    """Yield a directory in which to make files. After the block they are in ``directory``.

    If the block raises, no file is put into a bucket; on a file system they stay.
    """
    with contextlib.closing(StagingDirectory(directory)) as place:
        yield place.path
        if is_bucket(directory):
            for path in sorted(place.path.iterdir()):
                place.publish(path.name)


def read_file(path: Place) -> pa.Buffer | None:
    """Return the bytes of a file, memory-mapped where possible; None if it does not exist.

    Raises StateError if the file cannot be read.
    """
    store, key = object_at(path)
    return store.read(key)


def read_table_at(path: Place, *, way_out: str = WAY_OUT) -> pa.Table:
    """Return the table in an Arrow file whose name has its checksum, memory-mapped if possible.

    Raises CheckpointCorrupt if the file is missing or damaged, StateError if it cannot be read.

    ``way_out``: the end of the message about damage: a sentence without the full stop.
    """
    data = read_file(path)
    if data is None:
        raise corrupt(path, "is missing, though the checkpoint refers to it", way_out)
    return table_in(data, path, way_out=way_out)


def read_run_table(path: Place) -> pa.Table:
    """Read a table that a task wrote in a run that has no decision yet.

    Raises RowFileDamaged if it is damaged or missing, so that the run is repeated. Raises
    StateError if it cannot be read.
    """
    try:
        return read_table_at(path, way_out=RUN_AGAIN)
    except CheckpointCorrupt as error:
        raise RowFileDamaged(str(error)) from error


def is_beside(place: Place, store: Store) -> bool:
    """Return whether a file is on the storage of a store, so that `adopt_object` can take it."""
    if isinstance(store, LocalStore) or not is_bucket(place):
        return isinstance(store, LocalStore) and not is_bucket(place)
    return object_at(place)[0] is object_at(store.url)[0]


def adopt_object(place: Place, store: Store, key: str, *, named: bool = True) -> int:
    """Link or copy a task's file to an object, in place of one there; return its size in bytes.

    On a file system it is linked. In a bucket the server copies it, in HDFS this process does.
    Raises StateError if the file no longer exists.

    ``named``: whether the name is durable at once on a file system, and not only when its directory
    is synced.
    """
    if isinstance(store, LocalStore):
        return store.link(Path(place), key, named=named)
    bucket, source = object_at(place)
    assert isinstance(bucket, ObjectStore | HdfsStore), f"{os.fspath(place)} is not in a bucket"
    _, below = object_at(store.url)
    size = bucket.copy(source, f"{below}/{key}")
    if size is None:
        raise StateError(
            f"{os.fspath(place)} does not exist, though a task has just written it: another driver "
            "may have taken over and removed it. Start again"
        )
    return size


@contextlib.contextmanager
def made_for(store: Store) -> Iterator[Path]:
    """Yield a path at which to make a file for `Store.put_file`; remove it after the block."""
    local = make_directory(store.root) if isinstance(store, LocalStore) else None
    directory = local or Path(local_directory())
    path = directory / f".{secrets.token_hex(8)}.tmp"
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def remove_abandoned(store: Store) -> None:
    """Remove unfinished files of dead writers. A bucket has no such files."""
    if isinstance(store, LocalStore | HdfsStore):
        store.remove_abandoned()


def remove_all(place: Place) -> None:
    """Remove a file or a directory, or in a bucket all objects below a prefix, if there are any.

    Raises CheckpointInUse if another driver has taken over.
    """
    check_fence()
    if not is_bucket(place):
        remove(Path(place))
        return
    store, key = object_at(place)
    keys = [entry.key for entry in store.list(key)]
    if keys:
        store.delete(keys)
