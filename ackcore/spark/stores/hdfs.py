"""A store in HDFS, through hdfs-native, which needs no JVM.

The NameNode renames a file atomically, and refuses to replace another one if asked to.  So an
object is first written to a file with a random name beside it, synced to the disks of the
DataNodes and closed, and then renamed.  No other process ever opens such a file, so the lease of a
dead writer blocks nobody.  Objects with numbered versions (see
`ackcore.spark.stores.file_system_store`) get their names by a rename that replaces nothing.

A rename may succeed although its answer is lost, for instance if the NameNode restarts.  Its
repetition then finds no file under the random name, or one at the target.  In both cases the store
reads the object and compares it with the bytes of the put.

Requests are repeated for 90 seconds while the NameNode does not answer, is in safe mode, or has no
DataNode for a block.  In each process the client takes addresses, user and credentials from the
same places as Hadoop's own tools: ``HADOOP_CONF_DIR``, ``HADOOP_USER_NAME``, a Kerberos ticket
cache, or the delegation tokens that YARN gives to a container.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from posixpath import basename, dirname
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import pyarrow as pa

from ackcore._error_hints import naming_extra
from ackcore.spark.base.errors import CheckpointReadOnly, StateError
from ackcore.spark.stores.file_system_store import FileSystemStore, version_file
from ackcore.spark.stores.interface import (
    PIECE_BYTES,
    StoreUnavailable,
    aligned,
    checked_key,
    conflict,
    mapped,
    version_if_equal,
)

if TYPE_CHECKING:
    import hdfs_native

Answer = TypeVar("Answer")

#: Time in seconds for which a request is repeated.
_RETRY_S = 90.0
#: First and longest pause in seconds between two attempts.
_PAUSES_S = 0.1, 5.0
#: Settings of the client. It tries each NameNode of a nameservice; the store does the rest.
_CLIENT = {
    "dfs.client.failover.max.attempts": "4",
    "dfs.client.failover.sleep.base.millis": "100",
    "dfs.client.failover.sleep.max.millis": "1000",
}
#: Largest file that is compared with an existing object.
_COMPARED_BYTES = 64 << 20
#: Concurrent requests of a delete.
_AT_ONCE = 16
#: Attempts of a list: a directory may be deleted while it is listed.
_LISTS = 10

#: Java's exceptions in answers of the NameNode: class, and the first line of the message.
_RPC = re.compile(r'RPCError\("(?:[\w$]+\.)*([\w$]+)", "(.*?)(?:\\n|"\)$)', re.DOTALL)
#: A part of a path is a file, not a directory: there is no object below it.
_NOT_A_DIRECTORY = re.compile(r"\(is not a directory\)|ParentNotDirectory")
_IS_A_DIRECTORY = re.compile("Path is not a file|PathIsNotEmptyDirectory")
_DENIED = re.compile("AccessControlException|AuthorizationException")
#: Answers that a repetition does not change.
_FINAL = re.compile(
    "InvalidPath|InvalidToken|Quota|PathComponentTooLong|MaxDirectoryItems|must both be|"
    "SASLError|GSSAPIError|HadoopIllegalArgument|SnapshotAccessControl|ParentNotDirectory|"
    "[Uu]nsupported"
)
_WRONG_HOST = re.compile("failed to lookup address|No NameNode hosts")
_LONGEST = 200


class HdfsStore(FileSystemStore):
    """The store at a URL of HDFS.

    ``url``: a URL from `ackcore.spark.stores.opening.store_url`. ``retry_s``: the time in seconds
    for which a request is repeated.
    """

    def __init__(self, url: str, retry_s: float = _RETRY_S) -> None:
        self.url = url
        self._retry_s = retry_s
        scheme, _, rest = url.partition("://")
        host, slash, path = rest.partition("/")
        self._cluster, self._root = f"{scheme}://{host}", slash + path
        #: The client of this process, and before it those of processes that this one forked from.
        self._clients: list[tuple[int, hdfs_native.Client]] = []

    def __repr__(self) -> str:
        return f"HdfsStore({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return HdfsStore, (self.url, self._retry_s)

    @property
    def _client(self) -> hdfs_native.Client:
        """The client, made once in each process: a client's threads do not survive a fork."""
        if not self._clients or self._clients[-1][0] != os.getpid():
            with naming_extra(self.url, "hdfs-native", "hdfs", ", for the driver and the workers"):
                from hdfs_native import Client  # noqa: PLC0415 - an extra
            # Former clients are kept: they would wait for threads that a fork has not copied.
            self._clients.append((os.getpid(), Client(self._cluster, dict(_CLIENT))))
        return self._clients[-1][1]

    def _path(self, key: str) -> str:
        return f"{self._root}/{checked_key(key)}"

    def place(self, key: str) -> str:
        """Return the URL of an object."""
        return f"{self.url}/{key}" if key else self.url

    # -- reading ------------------------------------------------------------------------------

    def _read_file(self, file: str) -> bytes:
        return self._read(file)[1]

    def read(self, key: str) -> pa.Buffer | None:
        """Return an object of `put` or `put_file`; None if there is none.

        An object of over 32 MiB is first copied to a temporary file, which is mapped.
        """
        try:
            size, data = self._read(checked_key(key), 0, PIECE_BYTES)
            if size <= PIECE_BYTES:
                return aligned(data)
        except (FileNotFoundError, IsADirectoryError):
            return None
        return mapped(lambda at, most: self._read(key, at, most)[1] if at else data, size)

    def _read(self, file: str, start: int = 0, length: int = sys.maxsize) -> tuple[int, bytes]:
        """Return the size of a file, and up to ``length`` of its bytes from ``start`` on."""

        def read() -> tuple[int, bytes]:
            reader = self._client.read(f"{self._root}/{file}")
            size = len(reader)
            # hdfs-native panics at a range that ends after the file.
            return size, reader.read_range(start, max(0, min(length, size - start)))

        return self._ask(file, "read", read)

    def _files(
        self, prefix: str, is_wanted: Callable[[str], bool] = bool
    ) -> list[tuple[str, int, int]]:
        below = self._path(prefix) if prefix else self._root

        def listed() -> list[tuple[str, int, int]]:
            return sorted(
                (each.path[len(self._root) + 1 :], each.length, each.modification_time)
                for each in self._client.list_status(below or "/", True)
                if not each.isdir and each.path != below and is_wanted(basename(each.path))
            )

        for _ in range(_LISTS):
            with contextlib.suppress(FileNotFoundError):
                return self._ask(prefix, "listed", listed)
            try:
                self._ask(prefix, "listed", lambda: self._client.get_file_info(below or "/"))
            except FileNotFoundError:
                return []
        raise StoreUnavailable(
            f"{self.place(prefix)} could not be listed in {_LISTS} attempts, because directories "
            "in it were deleted meanwhile. Try again"
        )

    # -- writing ------------------------------------------------------------------------------

    def _write_file(self, file: str, data: bytes, once: bool) -> None:
        self._write(file, lambda: [data], not once)

    def put_file(self, key: str, path: Path, *, if_absent: bool = False) -> None:
        """Move a local file to an object. With ``if_absent``, an object that exists is kept.

        If such an object differs, or the file has over 64 MiB, raises StoreConflict and keeps the
        file.
        """

        def pieces() -> Iterator[bytes]:
            with open(path, "rb") as file:
                while piece := file.read(PIECE_BYTES):
                    yield piece

        try:
            self._write(checked_key(key), pieces, not if_absent)
        except FileExistsError:
            if path.stat().st_size > _COMPARED_BYTES:
                raise conflict(self.place(key)) from None
            version_if_equal(self.place(key), self.get(key), path.read_bytes())
        path.unlink()

    def copy(self, source: str, key: str) -> int | None:
        """Copy an object to ``key`` through this process, in place of an object there.

        Return its size in bytes, or None if ``source`` does not exist.
        """
        data = self.read(source)
        if data is None:
            return None

        def pieces() -> Iterator[pa.Buffer]:
            return (data[at : at + PIECE_BYTES] for at in range(0, data.size, PIECE_BYTES))

        self._write(checked_key(key), pieces, True)
        return int(data.size)

    def _write(self, file: str, pieces: Callable[[], Iterable[Any]], overwrite: bool) -> None:
        """Write a file under a temporary name, and rename it to ``file``.

        Raises FileExistsError if ``file`` exists and ``overwrite`` is false. The file there may be
        the new one, if the answer to the rename was lost. ``pieces``: returns the content in
        pieces, anew for each attempt.
        """
        path = f"{self._root}/{file}"
        client = self._client  # raises if hdfs-native is not installed
        from hdfs_native import WriteOptions  # noqa: PLC0415

        temporary = ""

        def write() -> None:
            nonlocal temporary
            self._drop(temporary)
            temporary = f"{dirname(path)}/.{basename(path)}.{secrets.token_hex(8)}.tmp"
            # To overwrite makes no difference but to a repetition within the client.
            options = WriteOptions(overwrite=True, create_parent=True)
            try:
                out = client.create(temporary, options)
                for piece in pieces():
                    out.write(piece)
                out.hsync()
                out.close()
            except (FileNotFoundError, FileExistsError) as error:
                raise RuntimeError(str(error)) from None  # of this file, not of the target

        try:
            self._repeat(file, "written", write)
            self._ask(file, "written", lambda: client.rename(temporary, path, overwrite))
        except FileNotFoundError as error:  # the file has another name, or was removed after hours
            raise FileExistsError(str(error)) from None
        except BaseException:
            self._drop(temporary)
            raise

    def _drop(self, temporary: str) -> None:
        if temporary:
            with contextlib.suppress(Exception):
                self._client.delete(temporary)

    def _names(self, directory: str) -> list[str]:
        def listed() -> list[str]:
            found = self._client.list_status(f"{self._root}/{directory}")
            return [basename(each.path) for each in found]

        try:
            return self._ask(directory, "read", listed)
        except FileNotFoundError:
            return []

    def _remove_file(self, file: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._ask(file, "deleted", lambda: self._client.delete(f"{self._root}/{file}"))

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects, and directories that become empty. Missing objects are ignored."""
        every = [checked_key(key) for key in keys]
        with ThreadPoolExecutor(_AT_ONCE) as beside:
            list(beside.map(self._delete_object, every))
        left = {dirname(self._path(key)) for key in every}
        for path in sorted(left, key=len, reverse=True):
            above = path
            while above not in ("", self._root) and self._is_removed(above):
                above = dirname(above)

    def _delete_object(self, key: str) -> None:
        try:
            self._remove_file(key)
        except IsADirectoryError:  # of versions, or no object
            for number in self._versions(key):
                self._remove_file(version_file(key, number))
            self._is_removed(self._path(key))

    def _is_removed(self, directory: str) -> bool:
        """Delete a directory if it is empty, and return whether it is gone."""
        try:
            self._client.delete(directory)
        except Exception:
            return False  # it is not empty, or the next delete removes it
        return True

    def list_versions(self) -> Iterator[tuple[str, int, str, int]]:
        """Yield path, size in bytes, version and last change (ns since 1970) of each file."""
        for key, size, time_ms in self._files(""):
            yield key, size, f"{size} {time_ms}", time_ms * 1_000_000

    # -- requests -----------------------------------------------------------------------------

    def _ask(self, key: str, how: str, request: Callable[[], Answer]) -> Answer:
        """Repeat a request by `_repeat`. Raise errors about files and directories as Python's."""

        def ask() -> Answer:
            try:
                return request()
            except (RuntimeError, OSError) as error:
                text = str(error)
                if _IS_A_DIRECTORY.search(text):
                    raise IsADirectoryError(text) from None
                if _NOT_A_DIRECTORY.search(text):
                    raise FileNotFoundError(text) from None
                raise

        return self._repeat(key, how, ask)

    def _repeat(self, key: str, how: str, request: Callable[[], Answer]) -> Answer:
        """Return the answer to a request, which is repeated while a repetition may help.

        FileNotFoundError, FileExistsError and IsADirectoryError pass through; raises StateError if
        no repetition helps, or none has within ``retry_s``. ``how``: the verb of the message, such
        as "read" or "written".
        """
        until, pause_s = time.monotonic() + self._retry_s, _PAUSES_S[0]
        while True:
            try:
                return request()
            except (FileNotFoundError, FileExistsError, IsADirectoryError, StateError):
                raise
            except (OSError, RuntimeError, ValueError) as error:
                wrong = _DENIED.search(str(error)) or _FINAL.search(str(error))
                late = time.monotonic() + pause_s > until
                if wrong or late or _WRONG_HOST.search(str(error)):
                    self._fail(key, how, error)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSES_S[1])

    def _fail(self, key: str, how: str, error: Exception) -> NoReturn:
        """Raise the error for a failed request: object, first line of the answer, and advice."""
        text, what = str(error), f"{self.place(key)} could not be {how}: {told(error)}"
        if _DENIED.search(text):
            kind = CheckpointReadOnly if how in ("written", "deleted") else StateError
            raise kind(
                f"{what}. Give the user of driver and workers (HADOOP_USER_NAME, or the Kerberos "
                "principal) read and write access to this place"
            ) from None
        if _FINAL.search(text):
            raise StateError(f"{what}. Remove the cause, then start again") from None
        host = self._cluster.partition("://")[2]
        if _WRONG_HOST.search(text):
            raise StoreUnavailable(
                f"{what}. {host!r} must be the NameNode's host and port, or a nameservice whose "
                "hdfs-site.xml is in HADOOP_CONF_DIR of driver and workers"
            ) from None
        raise StoreUnavailable(
            f"{what}. All that was recorded before is kept. Check that the NameNode at {host} is "
            "up and not in safe mode, and that its DataNodes have space; then start again"
        ) from None


def told(error: BaseException) -> str:
    """Return the message of an error as one short line, without Java's stack trace."""
    text = str(error)
    found = _RPC.search(text)
    line = f"{found[1]}: {found[2]}" if found else text.strip().partition("\n")[0]
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} ..."
