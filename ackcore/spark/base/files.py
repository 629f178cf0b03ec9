"""Files of a checkpoint that are either there whole or not at all, and say when they are not.

A file is written under a temporary name, synced, renamed, and its directory synced: whenever the
machine stops, the name leads to the whole old file or the whole new one.  What a file holds is
checked when it is read:

* a *record* (JSON) is one line, and after it a line with the checksum of the first:
  ``{"file": "batches/7.plan", "format": 1, ...}`` and ``blake2b <32 hex digits>``.  It names
  itself, so that a copy under another name is not taken for it.
* a *table* is a plain Arrow IPC file that any tool opens; its checksum is part of its name
  (``waiting-lines.<32 hex digits>.arrow``), so it cannot be in two states under one name.

Both are damaged if a byte is missing, added or changed.

A driver that was cut off long enough for another to take over its checkpoint may wake at any line.
So what it writes within `fenced` is refused from then on, by the last look before a file gets its
name; and what is written ``once`` is never replaced, whoever looked when.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from ackcore.arrow import rebatched

#: Of the files of a checkpoint.  A reader knows all formats up to its own.  In format 1 each spout
#: had one waiting table, in no order.
FORMAT = 2
#: A table's checksum: the hex digits in its name.
_NAMED = re.compile(r"\.([0-9a-f]{32})\.arrow(?:\.staged)?")
_TEMPORARY = re.compile(r"\..+\.tmp")
_CHUNK = 1 << 20
_DENIED = {errno.EROFS, errno.EACCES, errno.EPERM}
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


class StateError(RuntimeError):
    """The checkpoint cannot be used or written; the message says which file, and the way out."""


class CheckpointInUse(StateError):
    """Another query holds the checkpoint, or has taken it over."""


class CheckpointCorrupt(StateError):
    """A file of the checkpoint is damaged or missing."""


class WorkFileDamaged(CheckpointCorrupt):
    """A file that a run left is damaged or missing; before a decision that costs only a run."""


class CheckpointForeign(StateError):
    """The checkpoint belongs to another topology, or to another way of running it."""


class CheckpointNewer(StateError):
    """A newer ackcore wrote the checkpoint."""


class CheckpointReadOnly(StateError):
    """The checkpoint cannot be written."""


#: Ends most messages about damage: there is no repairing it, only the choice what to give up.
WAY_OUT = (
    "Restore the whole checkpoint directory, Spark's part and ackcore's together, from a backup; "
    "or start on a new checkpoint, which reads the source from where it is told to and knows "
    "nothing of the records that waited for a retry in this one"
)


def corrupt(path: str | os.PathLike[str], what: str) -> CheckpointCorrupt:
    """The error for a file that is not as it was written."""
    return CheckpointCorrupt(f"{os.fspath(path)} {what}. {WAY_OUT}.")


def local_path(path: str | os.PathLike[str], argument: str) -> Path:
    """An absolute path of this machine's file systems, shared ones among them.

    Raises
    ------
    ValueError
        If it is a URI of another kind than ``file:``, empty, or on a file system of the kernel's.
    TypeError
        If it is no path.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"{argument} must be a str or a path, got {type(path).__name__}")
    text = os.fspath(path)
    if not text or "\0" in text:
        raise ValueError(f"{argument} must be a path, got {text!r}")
    scheme, colon, rest = text.partition(":")
    if colon and re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]+", scheme):
        if scheme.lower() != "file":
            raise ValueError(
                f"{argument} must be a path on a local or shared file system, got {text!r}: what "
                f"is decided must be renamed and synced, which {scheme}: stores cannot do. Give a "
                "mounted directory; a sink that is a function of (DataFrame, batch id) may write "
                "to any store"
            )
        if rest.startswith("//") and not rest.startswith("///"):
            raise ValueError(f"{argument} must name no host: file:///path, got {text!r}")
        text = rest[2:] if rest.startswith("//") else rest
    kind = _file_system(os.path.realpath(text))
    if kind in _KERNELS:
        raise ValueError(
            f"{argument} must be a path on a file system that holds files, got {text!r}, which is "
            f"on the kernel's {kind}; give a directory on a disk or a shared file system"
        )
    return Path(os.path.abspath(text))


#: File systems in which the kernel shows itself; in some of them mkdir even does something.
_KERNELS = frozenset(
    {"binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts", "efivarfs"}
    | {"mqueue", "proc", "pstore", "securityfs", "sysfs", "tracefs"}
)


def _file_system(path: str) -> str:
    """Return the type of the file system that a path is on; empty where nobody tells."""
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found, longest = "", -1
    for line in mounts.splitlines():
        _, point, kind, *_ = line.split(" ")
        # Of several on one place the last hides the others.
        if len(point) >= longest and (point == "/" or f"{path}/".startswith(f"{point}/")):
            found, longest = kind, len(point)
    return found


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name the file in whatever the system says against writing it."""
    try:
        yield
    except OSError as error:
        if error.errno in _DENIED:
            raise CheckpointReadOnly(
                f"{path} cannot be written ({error.strerror}), and the driver must be able to. "
                "Nothing was lost; make it so and start again"
            ) from error
        raise StateError(
            f"{path} could not be written: {error.strerror or error}. What was recorded before "
            "stands; remove the cause and start again"
        ) from error


def sync_directory(path: Path) -> None:
    """Make what was created, renamed or removed in a directory last."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_directory(path: Path) -> Path:
    """A directory that lasts, and those above it."""
    with writing(path):
        if not path.is_dir():
            make_directory(path.parent)
            if path.exists():
                raise StateError(f"{path} must be a directory, or not be there yet; it is a file")
            path.mkdir(exist_ok=True)
            sync_directory(path.parent)
    return path


#: What raises once another driver has taken over; set by `fenced`.
_fence: ContextVar[Callable[[], object] | None] = ContextVar("fence", default=None)


@contextlib.contextmanager
def fenced(check: Callable[[], object]) -> Iterator[None]:
    """Have ``check`` called, which may raise, right before each write within that counts."""
    token = _fence.set(check)
    try:
        yield
    finally:
        _fence.reset(token)


def check_fence() -> None:
    """Raise `CheckpointInUse` if this is within `fenced`, and the checkpoint is another's now."""
    check = _fence.get()
    if check is not None:
        check()


def write_file(path: Path, write: Callable[[BinaryIO], object], *, once: bool = False) -> None:
    """Let ``write`` fill a file that replaces ``path`` as a whole, for good.

    Raises
    ------
    FileExistsError
        If it is to be written ``once``, and is there.
    CheckpointInUse
        If another driver has taken over.
    """
    # A driver that wakes after another took over may have a file of this name open still.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    free = True
    with writing(path):
        try:
            with open(temporary, "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            check_fence()
            if once:
                free = _link(temporary, path)
            else:
                os.replace(temporary, path)
        except Exception:
            temporary.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)
    if not free:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))


def _link(temporary: Path, path: Path) -> bool:
    """Give a file its name if that is free; tell whether it was."""
    free = True
    try:
        os.link(temporary, path)
    except FileExistsError:
        free = False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # Not every file system that can be mounted has links; a look has to do there.
        free = not path.exists()
        if free:
            os.replace(temporary, path)
            return True
    temporary.unlink()
    return free


def remove(path: Path) -> None:
    """Remove a file or a directory with all below, if it is there."""
    with writing(path):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def remove_temporaries(directory: Path) -> None:
    """Remove what writers left that died; nothing may be writing there."""
    left = list(directory.iterdir()) if directory.is_dir() else []
    # What was not there before the look is none of another driver's that has taken over.
    check_fence()
    for path in left:
        if _TEMPORARY.fullmatch(path.name):
            remove(path)


def _digest(data: bytes | memoryview | pa.Buffer) -> str:
    return blake2b(data, digest_size=16).hexdigest()


def write_record(path: Path, name: str, body: Mapping[str, Any], *, once: bool = False) -> None:
    """Write a record that calls itself ``name``; raises as `write_file` does."""
    whole = {"file": name, "format": FORMAT, **body}
    line = json.dumps(whole, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode()
    said = b"%s\nblake2b %s\n" % (line, _digest(line).encode())
    write_file(path, lambda file: file.write(said), once=once)


def read_record(path: Path, name: str) -> dict[str, Any] | None:
    """A record, or None if there is no such file.

    Raises
    ------
    CheckpointCorrupt
        If it is not as it was written, or is another record.
    CheckpointNewer
        If a newer ackcore wrote it.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StateError(f"{path} cannot be read: {error.strerror or error}") from error
    line, _, rest = data.partition(b"\n")
    if rest != b"blake2b %s\n" % _digest(line).encode():
        raise corrupt(
            path,
            f"is damaged: its {len(data)} bytes must be one line and the checksum of that line",
        )
    body: dict[str, Any] = json.loads(line)
    if body["format"] > FORMAT:
        raise CheckpointNewer(
            f"{path} has format {body['format']}, and this ackcore knows formats up to {FORMAT}: "
            "a newer one wrote it. Start the query with that version again"
        )
    if body["file"] != name:
        raise corrupt(path, f"calls itself {body['file']}, so it was copied or renamed")
    return body


class _Hashed:
    """A file that knows the checksum of what was written to it, as far as Arrow needs a file."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self._hash = blake2b(digest_size=16)
        self.closed = False

    def write(self, data: Any) -> int:
        self._hash.update(data)
        self._file.write(data)
        return memoryview(data).nbytes

    def digest(self) -> str:
        return self._hash.hexdigest()


def write_table(directory: Path, name: str, table: pa.Table, *, staged: bool = False) -> str:
    """Write a table as ``<name>.<checksum>.arrow`` and return that name.

    A ``staged`` one ends in ``.staged`` and counts for nothing until it is renamed.
    """
    # Few batches, whatever pieces the table came in: a filter makes as many again.
    batches = rebatched(table.to_batches(), len(table))
    return write_batches(directory, name, table.schema, batches, staged=staged)


def write_batches(
    directory: Path,
    name: str,
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    *,
    staged: bool = False,
) -> str:
    """Write a table batch by batch, as `write_table` does."""
    temporary = directory / f".{name}.{secrets.token_hex(8)}.tmp"
    with writing(directory / name):
        with open(temporary, "wb") as file:
            hashed = _Hashed(file)
            with pa.ipc.new_file(pa.PythonFile(hashed, "w"), schema) as writer:
                for batch in batches:
                    writer.write_batch(batch)
            file.flush()
            os.fsync(file.fileno())
        whole = f"{name}.{hashed.digest()}.arrow" + ".staged" * staged
        os.replace(temporary, directory / whole)
        sync_directory(directory)
    return whole


def read_table(path: Path, *, check: bool = True) -> pa.Table:
    """A table, its columns in a memory map of the file.

    Raises
    ------
    CheckpointCorrupt
        If it is missing or not as it was written.
    StateError
        If the system does not let it be read.
    """
    named = _NAMED.search(path.name)
    try:
        with pa.memory_map(os.fspath(path)) as source:
            data = source.read_buffer()
    except FileNotFoundError:
        raise corrupt(path, "is missing, though a record names it") from None
    except OSError as error:
        raise StateError(f"{path} cannot be read: {error}") from error
    if named is None:
        raise corrupt(path, "does not carry a checksum in its name, as tables of ackcore do")
    if check and _digest(data) != named[1]:
        raise corrupt(
            path,
            f"is damaged: its {data.size} bytes do not have the checksum in its name",
        )
    table: pa.Table = pa.ipc.open_file(pa.BufferReader(data)).read_all()
    return table


def read_table_schema(path: Path) -> pa.Schema:
    """A table's schema, from the end of its file; the rest is not looked at.

    Raises
    ------
    CheckpointCorrupt
        If it is missing or not that of a table.
    StateError
        If the system does not let it be read.
    """
    try:
        with pa.memory_map(os.fspath(path)) as source:
            return pa.ipc.open_file(source).schema
    except FileNotFoundError:
        raise corrupt(path, "is missing, though it was there just now") from None
    except pa.ArrowInvalid as error:
        raise corrupt(path, f"is damaged: {error}") from error
    except OSError as error:
        raise StateError(f"{path} cannot be read: {error}") from error


class Reader:
    """The tables below a directory, each of them mapped and checked once.

    Parameters
    ----------
    root : Path
        What their names start from.
    """

    def __init__(self, root: Path):
        self.root = root
        self._verified: set[str] = set()
        self._mapped: dict[str, pa.Table] = {}

    def read(self, file: str) -> pa.Table:
        """Return a table.

        Raises
        ------
        CheckpointCorrupt, StateError
            As `read_table`.
        """
        if file not in self._mapped:
            self._mapped[file] = read_table(self.root / file, check=file not in self._verified)
            self._verified.add(file)
        return self._mapped[file]

    def wrote(self, file: str) -> None:
        """Say that a file's checksum need not be looked at: who wrote it has just made it."""
        self._verified.add(file)

    def keep(self, files: Collection[str]) -> None:
        """Forget all other files."""
        self._verified.intersection_update(files)
        self._mapped = {file: table for file, table in self._mapped.items() if file in files}


def unfit_for_parquet(schema: pa.Schema) -> Iterator[tuple[pa.Field, str]]:
    """Yield the columns that Parquet cannot hold, and why."""
    for field in schema:
        try:
            pq.write_table(pa.schema([field]).empty_table(), pa.BufferOutputStream())
        except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
            yield field, str(error)


class Lock:
    """A file's lock, which the system takes back when the process that holds it dies.

    Locked by ``flock``: another opening in the same process is refused, too.  A file system may
    give a lock to another host when it hears nothing of the one that holds it; so the file also
    has a random token of its holder, for `check`.
    """

    def __init__(self, path: Path, wait: bool = False):
        self.path = path
        self._closing = threading.Lock()
        with writing(path):
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            with writing(path):
                fcntl.flock(self._handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                holder = f"pid {os.getpid()} on {os.uname().nodename}\n{secrets.token_hex(16)}\n"
                self._held = holder.encode()
                os.ftruncate(self._handle, 0)
                os.pwrite(self._handle, self._held, 0)
        except BaseException as error:
            told = _holder(os.pread(self._handle, 1000, 0))
            self.close()
            if isinstance(error.__cause__, BlockingIOError):
                raise CheckpointInUse(
                    f"{path.parent.parent} is in use by another query ({told}), which "
                    f"holds {path}. Two on one checkpoint would each undo the other: stop that "
                    "one, or give this one a checkpoint of its own"
                ) from None
            raise

    def check(self) -> None:
        """Make sure that nobody took it over.

        Raises
        ------
        CheckpointInUse
            If somebody did, or removed it so that somebody may at any time.
        StateError
            If that cannot be told.
        """
        try:
            found = self.path.read_bytes()
        except FileNotFoundError:
            found = b"nobody yet: the file was removed"
        except OSError as error:
            raise StateError(f"{self.path} cannot be read: {error.strerror or error}") from error
        if found != self._held:
            raise CheckpointInUse(
                f"{self.path.parent.parent} was taken over from this driver, whose host was cut "
                f"off or stood still: {self.path} is held by another ({_holder(found)}). What this "
                "one recorded before then stands, and it writes nothing more; let the other one "
                "go on, or stop it and start again"
            )

    def close(self) -> None:
        """Let go; twice is fine, and from any thread."""
        # A number that is closed twice may be another file's by then: a sink's that is being
        # written, a socket of Spark's, or the pipe whose end makes Spark's JVM exit.
        with self._closing:
            handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)


def _holder(found: bytes) -> str:
    """Who holds a lock, by what is in its file."""
    return found.decode("utf-8", "replace").partition("\n")[0].strip() or "unknown"


def numbered(directory: Path, suffix: str = "") -> list[int]:
    """The numbers of ``<number><suffix>`` in a directory, sorted; [] if there is none."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    stems = (name.removesuffix(suffix) for name in names if name.endswith(suffix))
    return sorted(int(stem) for stem in stems if re.fullmatch(r"0|[1-9][0-9]{0,18}", stem))
