"""Files of a run by their paths, whichever they are: of a file system, or URLs of a bucket.

Driver and tasks hand each other files below a place that they share.  What a file is called follows
from its bytes, so two who write one write the same; a record names it, and whoever reads it checks
it.  In a bucket a file is made on this machine first, and then put whole, in parts if it is large:
there it is with all of its bytes from the moment that the put returned, or not at all.

Paths are joined by `os.path.join`, those of buckets, too.  Each process makes its own client, from
the credentials of its environment.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa

from ackcore._files.durable import sync_directory
from ackcore.spark.base.atomic import check_fence, make_directory, remove
from ackcore.spark.base.checksummed import (
    RUN_AGAIN,
    read_table,
    record_bytes,
    record_in,
    table_in,
)
from ackcore.spark.base.errors import (
    WAY_OUT,
    CheckpointCorrupt,
    CheckpointInUse,
    RowFileDamaged,
    StateError,
    corrupt,
)
from ackcore.spark.base.paths import Place
from ackcore.spark.stores.interface import Store, StoreConflict
from ackcore.spark.stores.local import LocalStore
from ackcore.spark.stores.objects import ObjectStore
from ackcore.spark.stores.opening import is_bucket


@lru_cache(maxsize=64)
def _bucket(root: str) -> Store:
    """Return the store of a whole bucket: one client for all that a process reads and writes."""
    return ObjectStore(root)


def object_at(url: Place) -> tuple[Store, str]:
    """Return the store of a URL's bucket, or of a path's directory, and the key there."""
    if not is_bucket(url):
        path = Path(url)
        return LocalStore(path.parent), path.name
    scheme, _, rest = os.fspath(url).partition("://")
    host, _, key = rest.partition("/")
    return _bucket(f"{scheme}://{host}"), key


def local_directory() -> str:
    """Return where a task makes files of its own: Spark removes it with the application."""
    return os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0] or tempfile.gettempdir()


def made_in(directory: Place) -> str:
    """Return where a file is made that `publish` gives its name in a directory; it is there."""
    if is_bucket(directory):
        return local_directory()
    os.makedirs(directory, exist_ok=True)
    return os.fspath(directory)


def publish(made: str, directory: Place, name: str, *, synced: bool = True) -> None:
    """Give a file that was made its name in a directory; `made` is gone afterwards.

    Parameters
    ----------
    made : str
        The file, in `made_in(directory)`.
    directory : path
        Where it is to be.
    name : str
        What it is called there.
    synced : bool, default True
        Whether a decision may name it: it outlasts the machine then.
    """
    if is_bucket(directory):
        store, key = object_at(os.path.join(directory, name))
        store.put_file(key, Path(made))
        return
    os.replace(made, os.path.join(directory, name))
    if synced:
        # A decision that names the file must not outlast the name.
        sync_directory(Path(directory))


class Workshop:
    """Where files are made, and given their names in a directory when they are whole.

    On a file system it is that directory; for a bucket it is one on this machine, that nobody else
    makes files in.

    Parameters
    ----------
    directory : path
        Where the files are to be.
    """

    def __init__(self, directory: Place) -> None:
        self._directory = directory
        self._local: tempfile.TemporaryDirectory[str] | None = None

    @property
    def path(self) -> Path:
        """Where files are made; it is there."""
        if not is_bucket(self._directory):
            return make_directory(Path(self._directory))
        if self._local is None:
            self._local = tempfile.TemporaryDirectory(prefix="ackcore-", dir=local_directory())
        return Path(self._local.name)

    def publish(self, name: str) -> None:
        """Have a file, which is whole and has its name, where the files are to be."""
        if is_bucket(self._directory):
            publish(str(self.path / name), self._directory, name)

    def close(self) -> None:
        """Remove what was not published to a bucket; twice is fine."""
        local, self._local = self._local, None
        if local is not None:
            local.cleanup()


@contextlib.contextmanager
def making_in(directory: Place) -> Iterator[Path]:
    """Return a directory in which files are made that are in ``directory`` after the block."""
    place = Workshop(directory)
    try:
        yield place.path
        if is_bucket(directory):
            for path in sorted(place.path.iterdir()):
                place.publish(path.name)
    finally:
        place.close()


def read_file(path: Place) -> pa.Buffer:
    """Return the bytes of a file, in place or mapped where it can be.

    Raises
    ------
    FileNotFoundError
        If it is not there.
    OSError, StateError
        If it cannot be read.
    """
    if not is_bucket(path):
        with pa.memory_map(os.fspath(path)) as source:
            return source.read_buffer()
    store, key = object_at(path)
    data = store.read(key)
    if data is None:
        raise FileNotFoundError(f"{os.fspath(path)} is not there")
    return data


def is_missing(path: Place) -> bool:
    """Whether a file is not there that its writer has published; an object is, and is not asked."""
    return not is_bucket(path) and not os.path.exists(path)


def read_table_at(path: Place, *, way_out: str = WAY_OUT) -> pa.Table:
    """Read a table that has its checksum in its name; raises as `read_table` does."""
    if not is_bucket(path):
        return read_table(Path(path), way_out=way_out)
    try:
        data = read_file(path)
    except FileNotFoundError:
        raise corrupt(path, "is missing, though a record names it", way_out) from None
    return table_in(data, path, way_out=way_out)


def read_run_table(path: Place) -> pa.Table:
    """Read a table that a task wrote in a run that is not decided.

    Raises
    ------
    RowFileDamaged
        If it is not as it was written: the run is to be repeated.
    StateError
        If it cannot be read.
    """
    try:
        return read_table_at(path, way_out=RUN_AGAIN)
    except CheckpointCorrupt as error:
        raise RowFileDamaged(str(error)) from error


class RecordFile:
    """A record that is replaced as a whole by the driver that read it, or by none.

    Parameters
    ----------
    path : path
        Where it is.
    name : str
        What it calls itself.
    """

    def __init__(self, path: Place, name: str) -> None:
        self._path = path
        self._name = name
        self._store, self._key = object_at(path)
        self._version: str | None = None

    def read(self) -> dict[str, Any] | None:
        """Return it, None if there is none; raises as `record_in` does."""
        found = self._store.get(self._key)
        self._version = None if found is None else found.version
        return None if found is None else record_in(found.data, self._path, self._name)

    def replace(self, body: Mapping[str, Any]) -> None:
        """Write it in the place of what `read` found.

        Raises
        ------
        CheckpointInUse
            If another driver has written it since, or has taken over.
        """
        check_fence()
        data = record_bytes(self._name, body)
        try:
            self._version = self._store.replace(self._key, data, self._version)
        except StoreConflict:
            raise CheckpointInUse(
                f"{os.fspath(self._path)} was written by another driver, while this one was about "
                "to. Let the other one go on, or stop it and start again"
            ) from None


def is_beside(place: Place, store: Store) -> bool:
    """Whether a file can become an object of a store by `adopt_object`."""
    if isinstance(store, LocalStore) or not is_bucket(place):
        return isinstance(store, LocalStore) and not is_bucket(place)
    return object_at(place)[0] is object_at(store.url)[0]


def adopt_object(place: Place, store: Store, key: str, *, named: bool = True) -> int:
    """Have an object be a file of a task that is beside its store; return its size.

    It is a link on a file system, and a copy within a bucket, past this machine.  A name on a file
    system that is not ``named`` lasts once its directory is synced.

    Raises
    ------
    StateError
        If it is not there any more.
    """
    if isinstance(store, LocalStore):
        return store.link(Path(place), key, named=named)
    bucket, source = object_at(place)
    assert isinstance(bucket, ObjectStore), f"{os.fspath(place)} is not in a bucket"
    _, below = object_at(store.url)
    size = bucket.copy(source, f"{below}/{key}")
    if size is None:
        raise StateError(
            f"{os.fspath(place)} is not there, though a task has just written it: another driver "
            "may have taken over and removed it. Start again"
        )
    return size


@contextlib.contextmanager
def made_for(store: Store) -> Iterator[Path]:
    """Return the path of a file that is made for `Store.put_file`; it is gone after the block."""
    local = make_directory(store.root) if isinstance(store, LocalStore) else None
    directory = local or Path(local_directory())
    path = directory / f".{secrets.token_hex(8)}.tmp"
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def remove_abandoned(store: Store) -> None:
    """Remove files of a store that their writers did not finish; a bucket has none."""
    if isinstance(store, LocalStore):
        store.remove_abandoned()


def remove_all(place: Place) -> None:
    """Remove a file, or a directory or prefix with all below it, if it is there."""
    if not is_bucket(place):
        remove(Path(place))
        return
    check_fence()
    store, key = object_at(place)
    keys = [entry.key for entry in store.list(key)]
    if keys:
        store.delete(keys)
