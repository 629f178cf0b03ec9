"""A journal of answers by key on which all its writers agree, also after crashes.

A directory has *segments*, ``00000001.answers`` and so on, which are never changed, and one open
file for each writer, ``<token>.open``, to which it appends.  `journal_format` describes their
bytes.

A *sync* makes the open file durable and links it under the next free number.  If the number is
taken, the writer first reads that segment.  So the segments form one sequence, of which every
writer has read a beginning, and **the answer to a key is the first one in the sequence**.

All writers use the same answer to a key k, for this reason.  Let s be the first segment with k.  A
writer uses an answer to k only after a sync, when k is in a segment that it has read.  It has read
all earlier segments, too, and hence s; and s never changes.  An answer in an open file does not
count yet: its writer has not used it, since it has not synced.  Other writers may adopt it, append
it to their own open files and sync.  In both cases it is the result of the same call.

So neither locks nor clocks are needed.  A writer that was paused, or whose driver was replaced,
does no harm: its sync only adds a later segment, and after the directory is removed it raises.

An appended answer survives its process at once.  It survives the host after the next sync, or about
a second later while others are appended.  After a crash only entries with correct checksums count.
The rest is skipped with a warning, as if those calls had not been made.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, Self

from ackcore._files import NO_LINKS, sync_directory
from ackcore._files.journal_format import KEY_BYTES, FileFormat, read_header

_log = logging.getLogger("ackcore")

#: The maximum time in seconds before an entry is synced to the disk while others are appended.
_SYNC_S = 1.0
#: The size in bytes above which the open file becomes a segment; segments are read as a whole.
_SEGMENT_BYTES = 1 << 26
#: The resolution of a directory's modification time.
_COARSE_NS = 2_000_000_000

#: macOS has only fsync.
_sync_data: Callable[[int], None] = getattr(os, "fdatasync", os.fsync)
#: The maximum size of an answer, so that a damaged length cannot exhaust memory.
MOST_BYTES = 1 << 30

_OPEN = re.compile(r"[0-9a-f]{16}\.open")


class JournalAnswers(Protocol):
    """Answers by key, shared by all writers that open the same directory or bucket."""

    def get(self, key: bytes) -> bytes | None:
        """Return the answer to a key, or None."""

    def known_keys(self) -> list[bytes]:
        """Return the keys of the known answers."""

    def append(self, key: bytes, data: bytes) -> None:
        """Append an answer, unless one to the key is known here.

        After `sync`, `get` returns the first answer of all writers.
        """

    def sync(self) -> None:
        """Make appended answers durable, and find the first answer to each of their keys."""

    def forget(self, keys: Iterable[bytes]) -> None:
        """Free the memory of keys that will not be used again: `get` may return None for them."""

    def close(self) -> None:
        """Close the journal. Answers appended since the last `sync` may be lost."""


class _Place(NamedTuple):
    """The place of an answer. ``file``: an open file's descriptor, or minus a segment's number."""

    file: int
    offset: int
    size: int


@dataclass(slots=True)
class _OpenFile:
    """The open file of another writer, and the position up to which it was read."""

    descriptor: int
    read: int = 0
    size: int = 0  # at the last read


class Journal:
    """Answers by key, shared by all writers that open the same directory.

    A journal is thread-safe.

    ``directory``: a directory on a POSIX file system; created if it does not exist, and read at
    once. ``context``: 16 bytes that identify the kind of calls. Files of another context are
    ignored with a warning. Raises ValueError if the context has another size, and OSError if the
    directory cannot be created or read.
    """

    def __init__(self, directory: str | os.PathLike[str], context: bytes) -> None:
        check_context(context)
        self._directory = Path(directory)
        self._context = context
        self._lock = threading.RLock()
        self._decided: dict[bytes, _Place] = {}
        self._candidates: dict[bytes, _Place] = {}
        self._next = 1
        #: The formats of segments, by negative number, and of open files, by descriptor.
        self._formats: dict[int, FileFormat] = {}
        self._others: dict[str, _OpenFile] = {}
        self._foreign: set[str] = set()
        self._seen_ns: tuple[int, int] = (0, 0)
        #: The open segment of the last answer; mostly the next answer is in it, too.
        self._segment_read: dict[int, int] = {}
        # The open file, with the entries appended since the last sync.
        self._name = ""
        self._file = -1
        self._size = 0
        self._named = False  # whether its name is durable
        self._own: dict[bytes, _Place] = {}
        self._synced_s = 0.0
        _make(self._directory)
        self._look()

    def get(self, key: bytes) -> bytes | None:
        """Return the answer to a key of 16 bytes, or None. Looks for an unknown key in new files.

        After a sync the answer is the same for all writers, if the key was appended or read before
        it. An answer that its writer has not synced is appended here too. Raises OSError if a file
        cannot be read, or written.
        """
        with self._lock:
            data = self._known(key)
            if data is None:
                self._look()
                data = self._known(key)
            return data

    def known_keys(self) -> list[bytes]:
        """Return the keys of the answers found so far; a `get` of an unknown key looks for more."""
        with self._lock:
            return list(self._decided | self._own | self._candidates)

    def _known(self, key: bytes) -> bytes | None:
        for places in (self._decided, self._own, self._candidates):
            while (place := places.get(key)) is not None:
                data = self._read(key, place)
                if data is None:  # damaged after it was found
                    del places[key]
                    continue
                if places is self._candidates:
                    self.append(key, data)
                return data
        return None

    def append(self, key: bytes, data: bytes) -> None:
        """Append an answer, unless this journal has one to the key from a segment or from itself.

        A call also runs `sync` once 64 MiB were appended. After `sync`, `get` returns the first
        answer of all writers. ``key``: the key, of 16 bytes. ``data``: the answer, of less than
        1 GiB. Raises ValueError if the key has another size, or the answer is too large, and
        OSError if it cannot be written.
        """
        check_entry(key, data)
        with self._lock:
            if key in self._decided or key in self._own:
                return
            if self._file < 0:
                self._begin()
            head = self._formats[self._file].head(self._size, key, data)
            try:
                _write_all(self._file, head + data)
            except BaseException:
                # An incomplete entry is ignored, but the next one's position must be right.
                self._size = os.fstat(self._file).st_size
                raise
            self._own[key] = _Place(self._file, self._size + len(head), len(data))
            self._size += len(head) + len(data)
            if self._size > _SEGMENT_BYTES:
                self.sync()
            elif time.monotonic() - self._synced_s > _SYNC_S:
                _sync_data(self._file)
                if not self._named:
                    sync_directory(self._directory)  # or a host crash could lose the file
                    self._named = True
                self._synced_s = time.monotonic()

    def sync(self) -> None:
        """Make appended answers durable, and find the first answer to each of their keys.

        Raises OSError if they cannot be written; FileNotFoundError if the directory was removed.
        """
        with self._lock:
            self._segments()
            if all(key in self._decided for key in self._own):
                self._own.clear()
                return
            os.fsync(self._file)
            path = self._directory / self._name
            while not self._link(path):
                self._read_segment(self._next)
                self._next += 1
            try:
                sync_directory(self._directory)
                path.unlink(missing_ok=True)
            finally:
                # The file is a segment now, even after an error; no more entries are appended.
                for key, (_, offset, size) in self._own.items():
                    self._decided.setdefault(key, _Place(-self._next, offset, size))
                self._formats[-self._next] = self._formats[self._file]
                self._next += 1
                self._own.clear()
                self._end()

    def forget(self, keys: Iterable[bytes]) -> None:
        """Free the memory of keys, some 200 bytes each. `get` may return None for them.

        Answers that were appended here since the last `sync` are kept.
        """
        with self._lock:
            for key in keys:
                for places in (self._decided, self._candidates):
                    places.pop(key, None)

    def close(self) -> None:
        """Close all files without a sync; other writers may adopt the appended answers."""
        with self._lock:
            self._end()
            for descriptor in (
                *(other.descriptor for other in self._others.values()),
                *self._segment_read.values(),
            ):
                os.close(descriptor)
            self._others.clear()
            self._segment_read.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- writing ------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._name = f"{secrets.token_hex(8)}.open"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND
        self._file = os.open(self._directory / self._name, flags, 0o666)
        self._formats[self._file] = form = FileFormat.new()
        try:
            _write_all(self._file, form.header(self._context))
        except BaseException:
            # Other writers could not read entries after an incomplete header.
            os.unlink(self._directory / self._name)
            self._end()
            raise
        self._size, self._named = form.header_bytes, False
        self._synced_s = time.monotonic()

    def _link(self, path: Path) -> bool:
        """Give the open file the name of the next segment, a file that is never changed.

        Returns False if another writer has given that name to its own file.
        Raises OSError, which names the way out, if the file system has no hard links.
        """
        try:  # a rename would replace a segment that another writer has just linked
            os.link(path, self._segment(self._next))
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            raise OSError(
                error.errno,
                "a journal needs a file system with hard links; put the checkpoint on "
                "another file system, or set journal = False in the bolt",
                str(self._directory),
            ) from error
        return True

    def _end(self) -> None:
        if self._file >= 0:
            self._close(self._file)
        self._file = -1
        self._name = ""

    def _close(self, descriptor: int) -> None:
        self._formats.pop(descriptor, None)
        os.close(descriptor)

    def _segment(self, number: int) -> Path:
        return self._directory / f"{number:08d}.answers"

    # -- reading of other writers' files ------------------------------------------------------

    def _look(self) -> None:
        """Read the answers that other writers have synced or appended since the last call."""
        self._segments()
        changed_ns = os.stat(self._directory).st_mtime_ns
        before, looked_ns = self._seen_ns
        # A change right after the last look may have the same modification time.
        if changed_ns != before or looked_ns - changed_ns < _COARSE_NS:
            self._seen_ns = (changed_ns, time.time_ns())
            self._find_open()
        for name, other in list(self._others.items()):
            size = os.fstat(other.descriptor).st_size
            if size > other.size:
                other.size = size
                self._read_open(name, other, size)

    def _segments(self) -> None:
        """Read the segments, files that other writers have synced, that are new since last time."""
        while os.path.exists(f"{self._directory}/{self._next:08d}.answers"):
            self._read_segment(self._next)
            self._next += 1

    def _find_open(self) -> None:
        there = {name for name in os.listdir(self._directory) if _OPEN.fullmatch(name)}
        for name in there - self._others.keys() - self._foreign - {self._name}:
            try:
                descriptor = os.open(self._directory / name, os.O_RDONLY)
            except FileNotFoundError:
                continue  # it has become a segment
            self._others[name] = _OpenFile(descriptor)
        for name in self._others.keys() - there:
            # It was synced: its entries are in a segment that was, or will be, read.
            gone = self._others.pop(name).descriptor
            lost = [key for key, place in self._candidates.items() if place.file == gone]
            for key in lost:
                del self._candidates[key]
            self._close(gone)
        # After the listing, to read files that were synced meanwhile.
        self._segments()

    def _read_open(self, name: str, other: _OpenFile, size: int) -> None:
        data = os.pread(other.descriptor, size - other.read, other.read)
        start = 0
        if other.read == 0:
            try:
                header = read_header(data, self._context)
            except ValueError:
                self._warn(name, "is damaged, or belongs to other calls")
                self._foreign.add(name)
                os.close(self._others.pop(name).descriptor)
                return
            if header is None:
                return  # its writer is still writing it, or died
            self._formats[other.descriptor] = header
            start = header.header_bytes
        end = start
        found = self._formats[other.descriptor].entries(data, start, other.read)
        for key, begin, length, skipped in found:
            if skipped:
                self._warn(name, f"is damaged: {skipped} bytes are skipped")
            end = begin + length
            place = _Place(other.descriptor, other.read + begin, length)
            self._candidates.setdefault(key, place)
        # The rest may be the beginning of an entry, and is read again when the file grows.
        other.read += end

    def _read_segment(self, number: int) -> None:
        path = self._segment(number)
        data = path.read_bytes()
        try:
            found = read_header(data, self._context)
        except ValueError:
            found = None
        if found is None:
            self._warn(path.name, "is damaged, or belongs to other calls")
            return
        self._formats[-number] = found
        end, lost = found.header_bytes, 0
        for key, offset, length, skipped in found.entries(data, end, 0):
            self._decided.setdefault(key, _Place(-number, offset, length))
            lost += skipped
            end = offset + length
        lost += len(data) - end
        if lost:
            self._warn(path.name, f"is damaged: {lost} of its {len(data)} bytes are skipped")

    def _read(self, key: bytes, place: _Place) -> bytes | None:
        """Return an answer, or None if its entry was damaged after it was found."""
        file = place.file
        form = self._formats[file]
        begin = place.offset - form.head_bytes
        descriptor = file if file >= 0 else self._opened(-file)
        entry = os.pread(descriptor, form.head_bytes + place.size, begin)
        data = entry[form.head_bytes :]
        if entry[: form.head_bytes] == form.head(begin, key, data) and len(data) == place.size:
            return data
        names = {other.descriptor: name for name, other in self._others.items()}
        name = self._segment(-file).name if file < 0 else names.get(file, self._name)
        self._warn(name, f"is damaged at byte {begin}")
        return None

    def _opened(self, segment: int) -> int:
        if segment not in self._segment_read:
            for descriptor in self._segment_read.values():
                os.close(descriptor)
            self._segment_read.clear()
            self._segment_read[segment] = os.open(self._segment(segment), os.O_RDONLY)
        return self._segment_read[segment]

    def _warn(self, name: str, what: str) -> None:
        _log.warning(
            "%s/%s %s; calls whose answers it held are made again", self._directory, name, what
        )


def check_context(context: bytes) -> None:
    """Raise ValueError unless a journal's context has 16 bytes."""
    if len(context) != KEY_BYTES:
        raise ValueError(
            f"context, which identifies the kind of calls, must have {KEY_BYTES} bytes, got "
            f"{len(context)}"
        )


def check_entry(key: bytes, data: bytes) -> None:
    """Raise ValueError unless a key has 16 bytes, and its answer less than 1 GiB."""
    if len(key) != KEY_BYTES:
        raise ValueError(
            f"key, which identifies the call, must have {KEY_BYTES} bytes, got {len(key)}"
        )
    if len(data) >= MOST_BYTES:
        raise ValueError(f"data must have less than {MOST_BYTES} bytes, got {len(data)}")


def _make(directory: Path) -> None:
    """Create a directory and its missing parents, durably; do nothing if it exists."""
    if not directory.is_dir():
        _make(directory.parent)
        directory.mkdir(exist_ok=True)
        sync_directory(directory.parent)


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
