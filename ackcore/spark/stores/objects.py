"""A store in a bucket: S3, Google Cloud Storage, Azure, and compatible services.

obstore makes the requests.  In each process it takes credentials from the same places as the
provider's own tools: environment variables, or the role of an instance or pod.  This object, its
pickle, its ``repr`` and its messages contain no credentials.  Messages quote only the status and
the code of a server's answer, since some answers repeat the name of the key and the signed text.

obstore repeats requests that are safe to repeat (throttling, 5xx, broken connections).  A put with
a condition is different: it may have succeeded although its answer was lost, and then its
repetition is refused.  In this case `ObjectStore.put` reads the object and compares.

S3 may also refuse a request with 409 because another one for the object is in progress.  Then
nothing was written and no condition has failed, although obstore reports that the object exists.
S3 answers 400 `RequestTimeout` if the bytes of a request come too slowly, for example from a busy
machine.  Its answer to a delete of many objects has the status 200, and an error for each object
that remains.  `ObjectStore._change` repeats these requests.  obstore repeats only a put that
replaces a version, after 409.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import pyarrow as pa

from ackcore._error_hints import naming_extra
from ackcore.spark.base.errors import CheckpointReadOnly, StateError
from ackcore.spark.stores.interface import (
    PIECE_BYTES,
    Stored,
    StoredObject,
    StoreUnavailable,
    aligned,
    checked_key,
    conflict,
    mapped,
    version_if_equal,
)

if TYPE_CHECKING:
    import obstore.store

Answer = TypeVar("Answer")

#: Attempts of a put with a condition, in addition to obstore's own retries.
_TRIES = 3
#: Seconds before each repetition of a change that was refused and that obstore does not repeat.
_PAUSES_S = (0.1, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0)
#: Least bytes of a part of an upload.
_PART_BYTES = 8 << 20
#: Largest file that is put in one conditional request: a multipart upload takes no condition.
_CONDITIONAL_BYTES = 64 << 20
#: Most parts of an upload.
_MOST_PARTS = 9000
#: The repetitions of a request. The time limits them: obstore's pauses grow so slowly that ten of
#: them last five seconds if a service refuses at once.
_RETRY: obstore.store.RetryConfig = {"max_retries": 1000, "retry_timeout": timedelta(seconds=90)}
#: The same until a bucket has answered: a wrong address and missing credentials are found soon.
_FIRST_RETRY: obstore.store.RetryConfig = {**_RETRY, "max_retries": 10}
#: The URLs that have answered this process, or another one that passed their store on.
_answered: set[str] = set()
#: Keys in a page of a list, and in a request to delete.
_PAGE = 1000

#: The name in obstore's error about a name that it does not accept.
_INVALID = re.compile(r'Path ("[^"]+")')
_STATUS = re.compile(r"status code: (\d{3})[^:]*")
#: obstore's error about an object that a delete of many objects left, with S3's code.
_LEFT = re.compile(r"DeleteObjects request failed for key .*\(code: ([A-Za-z]{1,60})\)", re.DOTALL)
_CODE = re.compile(r"<Code>([A-Za-z]{1,60})</Code>")
_QUERY = re.compile(r"\?\S+")
_SECRET = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|SAS|CREDENTIAL|SIGNATURE", re.IGNORECASE)
_LONGEST = 200
#: obstore's note of its retries in the first line; and the system's message in later lines.
_RETRIES = re.compile(r", after \d+ retries, max_retries: \d+, retry_timeout: \w+\s*(?= - )")
_SYSTEM_SAID = re.compile(r'\b(?:error|message): "([^"\\]{1,100})"')
#: obstore's mark of a request that took longer than the time-out, and the variables that set it.
_TIMED_OUT = "kind: Timeout"
_TIMEOUTS = {"s3": "AWS_TIMEOUT", "gs": "GOOGLE_TIMEOUT"}  # else AZURE_TIMEOUT
#: Services that give machines and pods the credentials of their role.
_METADATA = re.compile(r" https?://(?:169\.254\.|metadata)[^/]*/")
#: Codes of S3 and GCS, and of Azure, for a missing bucket.
_NO_BUCKET = re.compile("NoSuchBucket|ContainerNotFound")
#: Codes of S3, and of Ceph, for a request that met another one for its object.
_COLLISION = re.compile("ConditionalRequestConflict|OperationAborted|ConcurrentModification")
#: Temporary refusals of S3 that obstore does not repeat: of a request whose bytes came too slowly,
#: and of single objects in a delete of many.
_PASSES = re.compile(
    r"status code: 400.*<Code>RequestTimeout<"
    r"|\(code: (?:RequestTimeout|ServiceUnavailable|OperationAborted)\)",
    re.DOTALL,
)
#: Codes with status 403 that are not about rights, and the ways out.
_WAYS_OUT = {
    "RequestTimeTooSkewed": "Set the clock of this machine: the service has another time",
    "QuotaExceeded": "Delete objects that you do not need, or raise the quota",  # of Ceph
    "InvalidObjectState": "The object was moved to an archive: restore it, and exclude the objects "
    "of this place from the lifecycle rule or the tier that archives them",
}
#: Codes of S3, with status 400, for temporary credentials that have expired.
_EXPIRED = re.compile("ExpiredToken|TokenRefreshRequired")
_AZURE_NAMES = "AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN"
#: The usual environment variables for credentials.
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": _AZURE_NAMES,
    "abfss": _AZURE_NAMES,
}


class _Refused(StoreUnavailable):
    """The error of a change that the service refused for now. You may repeat the request."""


class _Collided(_Refused):
    """A request that was not executed, because another one for its object was in progress."""


class ObjectStore:
    """The store at the URL of a bucket.

    ``url``: a URL from `ackcore.spark.stores.opening.store_url`. ``retry``: obstore's settings for
    repeated requests. By default a request is repeated for 90 s, and at most ten times until the
    bucket has answered.
    """

    def __init__(self, url: str, retry: obstore.store.RetryConfig | None = None) -> None:
        self.url = url
        self._retry = retry
        self._client: tuple[tuple[int, bool], obstore.store.ObjectStore] | None = None
        #: Whether `_refuse_web_server` has found that an object store answers.
        self._is_store = False

    def __repr__(self) -> str:
        return f"ObjectStore({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        retry = _RETRY if self.url in _answered else None
        return ObjectStore, (self.url, self._retry or retry)

    @property
    def _obstore(self) -> ModuleType:
        """The module obstore. Raises ImportError if it is not installed."""
        with naming_extra(self.url, "obstore", "stores", ", for the driver and the workers"):
            import obstore  # noqa: PLC0415
            import obstore.exceptions  # noqa: PLC0415
            import obstore.store  # noqa: PLC0415
        return obstore

    @property
    def _store(self) -> obstore.store.ObjectStore:
        """The client of this process; made again, to retry for longer, after the first answer."""
        kind = os.getpid(), self.url in _answered
        if self._client is None or self._client[0] != kind:
            retry = self._retry or (_RETRY if kind[1] else _FIRST_RETRY)
            scheme, _, place = self.url.partition("://")
            host, slash, path = place.partition("/")
            # obstore decodes a path: without this, %2e%2e in it would name another place.
            url = f"{scheme}://{host}{slash}{quote(path)}"
            with self._asking("", "opened"):
                self._client = kind, self._obstore.store.from_url(url, retry_config=retry)
        return self._client[1]

    def get(self, key: str) -> Stored | None:
        """Return an object, or None if it does not exist."""
        checked_key(key)
        try:
            with self._asking(key):
                found = self._got(key)
                return Stored(bytes(found.bytes()), _version(found.meta))
        except FileNotFoundError:
            return None

    def read(self, key: str) -> pa.Buffer | None:
        """Return an object of any size, memory-mapped where possible; None if it does not exist."""
        checked_key(key)
        try:
            with self._asking(key):
                found = self._got(key)
                size = found.meta["size"]
                if size <= PIECE_BYTES:
                    return aligned(found.bytes())
        except FileNotFoundError:
            return None

        def piece(start: int, length: int) -> Any:
            with self._asking(key):
                return self._obstore.get_range(self._store, key, start=start, length=length)

        return mapped(piece, size)

    def _got(self, key: str) -> Any:
        """Return obstore's answer to a read; raise StateError if a web server answers."""
        found = self._obstore.get(self._store, key)
        if found.attributes.get("Content-Type", "").startswith("text/html") and not self._is_store:
            self._refuse_web_server()
        return found

    def _refuse_web_server(self) -> None:
        """Raise StateError if an object with a random name exists, because a web server answers.

        obstore reads a web page as an empty list of objects.
        """
        exists = False
        with contextlib.suppress(StateError):  # the rights may exclude such names
            exists = self._size(f"ackcore-probe/{secrets.token_hex(8)}") is not None
        if exists:
            raise StateError(
                f"{self.url}: a web server answers, which is not an object store. Correct the "
                "address of the store (AWS_ENDPOINT_URL); for example, MinIO's console has another "
                "port than its object store"
            )
        self._is_store = True

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> str:
        """Write an object, and return its version.

        With ``if_absent`` an object that exists is kept; raises StoreConflict if its bytes differ.
        """
        return self._put(key, data, "create" if if_absent else "overwrite", None)

    def replace(self, key: str, data: bytes, version: str | None) -> str:
        """Replace ``version`` of an object, and return the new version.

        Another version with the bytes ``data`` is kept, and returned. Raises StoreConflict if its
        bytes differ, or the object was deleted. ``version``: None if there is no object yet.
        """
        return self._put(key, data, "create" if version is None else _condition(version), version)

    def _put(self, key: str, data: bytes, mode: Any, version: str | None) -> str:
        errors = self._obstore.exceptions
        checked_key(key)
        tries = _TRIES

        def put() -> str:
            done = self._obstore.put(self._store, key, data, mode=mode, use_multipart=False)
            return _version(done)

        while True:
            try:
                return self._change(key, "written", put, replaces=version is not None)
            except FileNotFoundError:
                raise StateError(
                    f"{self._named(key)} cannot be written: there is no such bucket. Create it"
                ) from None
            except (errors.AlreadyExistsError, errors.PreconditionError):
                return self._unless_ours(key, data)
            except StoreUnavailable as lost:
                # It may have succeeded, or may still: then the store refuses its repetition.
                tries -= 1
                if mode == "overwrite" or not tries:
                    raise
                try:
                    found = self.get(key)
                except StoreUnavailable:
                    raise lost from None
                if (None if found is None else found.version) != version:
                    return self._unless_ours(key, data, found)
                if isinstance(lost.__context__, _Refused):  # `_change` has repeated it already
                    raise

    def _unless_ours(self, key: str, data: bytes, found: Stored | None = None) -> str:
        """Return the stored object's version if it equals ``data``; else raise StoreConflict."""
        return version_if_equal(self._named(key), found or self.get(key), data)

    def put_file(self, key: str, path: Path, *, if_absent: bool = False) -> None:
        """Move a local file to an object. With ``if_absent``, an object that exists is kept.

        If such an object differs, or the file has over 64 MiB, raises StoreConflict and keeps the
        file.
        """
        checked_key(key)
        size = path.stat().st_size
        if if_absent and size <= _CONDITIONAL_BYTES:
            self.put(key, path.read_bytes(), if_absent=True)
            path.unlink()
            return
        if if_absent and self._size(key) is not None:
            raise conflict(self._named(key))
        part = max(_PART_BYTES, -(-size // _MOST_PARTS))
        try:
            self._change(
                key, "written", lambda: self._obstore.put(self._store, key, path, chunk_size=part)
            )
        except FileNotFoundError:
            # Servers answer this also for a completed upload whose answer was lost.
            if size <= part or self._size(key) != size:
                raise StateError(
                    f"{self._named(key)} cannot be written: there is no such bucket, or the "
                    "service aborted the upload. Create the bucket, or start again"
                ) from None
        path.unlink()

    def _size(self, key: str) -> int | None:
        """Return the length of an object in bytes, or None if it does not exist."""
        try:
            with self._asking(key):
                return int(self._obstore.head(self._store, key)["size"])
        except FileNotFoundError:
            return None

    def copy(self, source: str, key: str) -> int | None:
        """Copy an object of up to 5 GB to ``key`` on the server, in place of an object there.

        Return its size in bytes, or None if ``source`` does not exist.
        """
        checked_key(source)
        checked_key(key)
        size = self._size(source)
        if size is None:
            return None
        try:
            self._change(key, "written", lambda: self._obstore.copy(self._store, source, key))
        except FileNotFoundError:
            return None
        return size

    def list(self, prefix: str = "") -> list[StoredObject]:
        """Return the objects with keys below ``prefix/``, sorted."""
        found: list[StoredObject] = []
        below = checked_key(prefix) if prefix else None
        with self._asking(prefix, "listed"), contextlib.suppress(FileNotFoundError):
            for page in self._obstore.list(self._store, below, chunk_size=_PAGE):
                found += (StoredObject(each["path"], each["size"]) for each in page)
        return sorted(found)

    def list_versions(self) -> Iterator[tuple[str, int, str, int]]:
        """Yield key, size in bytes, version and last change (ns since 1970) of each object.

        Raises `StateError` if the bucket does not exist, a name has an empty part, or a web server
        answers.
        """
        is_empty = True
        with self._asking(""):
            for page in self._obstore.list(self._store, None, chunk_size=_PAGE):
                for each in page:
                    is_empty = False
                    time_us = round(each["last_modified"].timestamp() * 1_000_000)
                    yield each["path"], each["size"], _version(each), time_us * 1000
        if is_empty and not self._is_store:
            self._refuse_web_server()

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects. Missing objects are ignored."""
        every = [checked_key(key) for key in keys]
        for start in range(0, len(every), _PAGE):
            some = every[start : start + _PAGE]
            try:
                self._delete(some[0], some)
            except FileNotFoundError:
                # Google's and Azure's batch deletes stop at a missing object.
                for key in some:
                    with contextlib.suppress(FileNotFoundError):
                        self._delete(key, key)

    def _delete(self, key: str, which: str | Sequence[str]) -> None:
        self._change(key, "deleted", lambda: self._obstore.delete(self._store, which))

    def _named(self, key: str) -> str:
        return f"{self.url}/{key}" if key else self.url

    def _change(
        self, key: str, how: str, request: Callable[[], Answer], *, replaces: bool = False
    ) -> Answer:
        """Send a request, repeat it after pauses while it is refused, and return its answer.

        The errors are those of `_asking`. ``replaces``: whether the request replaces a version of
        an object. obstore itself repeats such a request if it met another one for its object.
        """
        pauses = iter(_PAUSES_S)
        while True:
            try:
                with self._asking(key, how):
                    return request()
            except _Refused as refused:
                pause_s = next(pauses, None)
                if pause_s is None or (replaces and isinstance(refused, _Collided)):
                    raise StoreUnavailable(*refused.args) from None
                time.sleep(pause_s)

    @contextlib.contextmanager
    def _asking(self, key: str, how: str = "read") -> Iterator[None]:
        """Convert obstore's errors to errors that name the object and contain no secret.

        FileNotFoundError for a missing object, and errors for failed conditions, pass through.
        ``how``: the verb of the message, such as "read" or "written".
        """
        errors = self._obstore.exceptions
        try:
            yield
            if how != "opened":
                _answered.add(self.url)
        except (errors.AlreadyExistsError, errors.PreconditionError) as refused:
            if not _COLLISION.search(str(refused)):
                raise
            raise _Collided(
                f"{self._named(key)} could not be {how}: another request for it was in progress "
                f"({told(refused)}). All that was recorded before is kept; start again"
            ) from None
        except FileNotFoundError as absent:
            if how == "read" and _NO_BUCKET.search(str(absent)):
                scheme, _, place = self.url.partition("://")
                raise StateError(
                    f"there is no bucket {scheme}://{place.partition('/')[0]}: create it, or "
                    f"correct the URL {self.url}"
                ) from None
            raise
        except errors.InvalidPathError as bad:
            found = _INVALID.search(str(bad))
            raise StateError(
                f"{self._named(key)} cannot be {how}: obstore lists no objects if a name has an "
                f"empty part, '.' or '..' between slashes, as {found[1] if found else told(bad)} "
                "has. Rename or delete that object, or use another place in the bucket"
            ) from None
        # Not chained to their causes: those repeat the server's answer.
        except (PermissionError, errors.PermissionDeniedError, errors.UnauthenticatedError) as bad:
            raise self._denied(key, how, bad) from None
        except (errors.BaseError, OSError) as bad:
            left = _LEFT.search(str(bad))
            if left and left[1] == "AccessDenied":
                raise self._denied(key, how, bad) from None
            what = f"{self._named(key)} could not be {how}: {told(bad)}"
            if _TIMED_OUT in str(bad):
                name = _TIMEOUTS.get(self.url.partition(":")[0], "AZURE_TIMEOUT")
                what += f"; it timed out. On a slow link set {name}, by default '30 seconds', for "
                what += "the driver and the workers"
            if _METADATA.search(str(bad)):  # obstore asks it if the environment has no credentials
                what += "; the error is from the service that assigns roles to machines and pods. "
                what += self._credentials()
            elif _EXPIRED.search(str(bad)):
                what += "; the credentials have expired. Renew them, or use credentials that are "
                what += f"renewed automatically. {self._credentials()}"
            kind = _Refused if _PASSES.search(str(bad)) else StoreUnavailable
            raise kind(
                f"{what}. All that was recorded before is kept"
                + (f". {self._doctor()}" if how == "read" else "; remove the cause and start again")
            ) from None

    def _denied(self, key: str, how: str, bad: Exception) -> StateError:
        """Return the error of a refused request. For the arguments see `_asking`."""
        changes = how in ("written", "deleted")
        code = _CODE.search(str(bad))
        way_out = _WAYS_OUT.get(code[1] if code else "") or (
            f"{self._credentials()} with the rights to read, write, list and delete objects"
        )
        return (CheckpointReadOnly if changes else StateError)(
            f"{self._named(key)} cannot be {how} ({told(bad)}). {way_out}"
            + ("; then start again" if changes else f". {self._doctor()}")
        )

    def _credentials(self) -> str:
        names = _CREDENTIALS[self.url.partition(":")[0]]
        return (
            f"Driver and workers take their credentials from the environment ({names}) or the "
            "role of their machine or pod: check that they have credentials"
        )

    def _doctor(self) -> str:
        return f"To find the cause: ackcore doctor {self.url}"


def _version(of: Any) -> str:
    """Return the version of an object: its ETag, and its generation where the service has one."""
    return f"{of.get('e_tag') or ''} {of.get('version') or ''}"


def _condition(version: str) -> dict[str, str]:
    e_tag, _, number = version.rpartition(" ")
    return {name: it for name, it in (("e_tag", e_tag), ("version", number)) if it}


def told(error: BaseException) -> str:
    """Return the message of an error as one short line, without possible secrets."""
    text = str(error)
    status, code = _STATUS.search(text), _CODE.search(text)
    if status is not None:
        return f"{type(error).__name__}, status {status[1]}" + (f" {code[1]}" if code else "")
    left = _LEFT.search(text)
    if left is not None:
        return f"{type(error).__name__} {left[1]}"
    line = _RETRIES.sub("", text.strip().partition("\n")[0].partition("<")[0])
    line = _QUERY.sub("?...", line)
    for name, value in os.environ.items():
        if _SECRET.search(name) and len(value) > 3:
            line = line.replace(value, "***")
    if len(line) > _LONGEST:
        line = f"{line[:_LONGEST].rpartition(' ')[0] or line[:_LONGEST]} ..."
    said = _SYSTEM_SAID.findall(text)
    if said and "HttpError" in text:
        line = f"{line} ({said[-1]})"
    return f"{type(error).__name__}: {line}"
