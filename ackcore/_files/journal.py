"""A journal of answers by key, on which all that write to it agree, whoever dies when.

A directory has *segments*, ``00000001.answers`` and so on, which are never changed, and one open
file for each writer, ``<token>.open``, to which it appends.  What is in them, byte by byte, is in
`journal_format`.

To *sync* is to make the open file durable and to link it under the next number that is free; a
writer that finds a number taken reads that segment first.  So the segments are one sequence, of
which everyone knows a beginning, and **the answer to a key is the first one in it**.

Why two writers use one answer to a key k: let s be the first segment that has k.  A writer uses an
answer to k only after a sync from which on k is in a segment that it knows; it knows all segments
before that one, hence s; and s never changes.  An answer in an open file binds nobody: its writer
has not used it yet, since it has not synced.  Others may take it for theirs, append it to their own
open file and sync: either way it is what the one call returned.

So neither a lock nor a clock is needed, and a writer that was paused, or whose driver has been
replaced, does no harm: what it syncs goes behind what is there, and once the directory is removed
its sync raises.

What a writer has appended outlasts its process at once, and its host from the next sync on, or
from a second after at the latest if more is appended.  Where a file is damaged, what can still be
read by its checksums counts, and the rest is passed over with a warning: as if those calls had not
been made.
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

from ackcore._files.durable import NO_LINKS, sync_directory
from ackcore._files.journal_format import KEY_BYTES, FileFormat, read_header

_log = logging.getLogger("ackcore")

#: For how long an entry may be in the system's memory alone while others are appended.
_SYNC_S = 1.0
#: A file that has so many is synced, so that it can be read in one go.
_SEGMENT_BYTES = 1 << 26
#: For how long a change of a directory may not show in its time of change.
_COARSE_NS = 2_000_000_000

#: macOS has the one only.
_sync_data: Callable[[int], None] = getattr(os, "fdatasync", os.fsync)
#: What an entry may hold: a length that is damaged must not ask for more memory than there is.
MOST_BYTES = 1 << 30

_OPEN = re.compile(r"[0-9a-f]{16}\.open")


class Answered(Protocol):
    """Answers by key on which all agree that open the same place, wherever that is."""

    def get(self, key: bytes) -> bytes | None:
        """Return the answer to a key, None if none is known."""

    def append(self, key: bytes, data: bytes) -> None:
        """Write down an answer, which may turn out not to be the first one."""

    def sync(self) -> None:
        """Make what was appended durable, and agree with all others on which answers count."""

    def forget(self, keys: Iterable[bytes]) -> None:
        """Free the memory of keys that will not be asked for again."""

    def close(self) -> None:
        """Let go of it; twice is fine."""


class _Place(NamedTuple):
    """The place of an answer: a segment by its number, or an open file."""

    file: int
    offset: int
    size: int


@dataclass(slots=True)
class _OpenFile:
    """Another writer's open file, and how far it was read."""

    descriptor: int
    read: int = 0
    size: int = 0  # when it was read


class Journal:
    """Answers by key, shared with all that open the same directory.

    Threads may share one.

    Parameters
    ----------
    directory : path
        On a POSIX file system; made if it is not there.
    context : bytes
        16 bytes that say what the answers are to.  A file of another context counts for nothing.

    Raises
    ------
    ValueError
        If the context has another size.
    OSError
        If the directory cannot be made or read.
    """

    def __init__(self, directory: str | os.PathLike[str], context: bytes) -> None:
        check_context(context)
        self._directory = Path(directory)
        self._context = context
        self._lock = threading.RLock()
        self._decided: dict[bytes, _Place] = {}
        self._candidates: dict[bytes, _Place] = {}
        self._next = 1
        #: Of segments, by their number below 0, and of files that are open here, by descriptor.
        self._formats: dict[int, FileFormat] = {}
        self._others: dict[str, _OpenFile] = {}
        self._foreign: set[str] = set()
        self._seen_ns: tuple[int, int] = (0, 0)
        #: The segment that was read from last, open: mostly the next answer is in it, too.
        self._segment_read: dict[int, int] = {}
        # What is appended here since the last sync.
        self._name = ""
        self._file = -1
        self._size = 0
        self._named = False  # durably
        self._own: dict[bytes, _Place] = {}
        self._synced_s = 0.0
        _make(self._directory)
        self._look()

    def get(self, key: bytes) -> bytes | None:
        """Return the answer to a key, None if none is known.

        It is everyone's if the key is one that was appended, or asked for, before the last sync.

        Parameters
        ----------
        key : bytes
            16 of them.

        Raises
        ------
        OSError
            If a file cannot be read.
        """
        with self._lock:
            data = self._known(key)
            if data is None:
                self._look()
                data = self._known(key)
            return data

    def _known(self, key: bytes) -> bytes | None:
        for places in (self._decided, self._own, self._candidates):
            while (place := places.get(key)) is not None:
                data = self._read(key, place)
                if data is None:  # damaged since it was found
                    del places[key]
                    continue
                if places is self._candidates:
                    self.append(key, data)
                return data
        return None

    def append(self, key: bytes, data: bytes) -> None:
        """Write down an answer, which may turn out not to be the first one.

        Parameters
        ----------
        key : bytes
            16 of them.
        data : bytes
            The answer, of less than 1 GiB.

        Raises
        ------
        ValueError
            If the key has another size, or the answer is too large.
        OSError
            If it cannot be written.
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
                # Half an entry is nothing, but where the next one begins must be known.
                self._size = os.fstat(self._file).st_size
                raise
            self._own[key] = _Place(self._file, self._size + len(head), len(data))
            self._size += len(head) + len(data)
            if self._size > _SEGMENT_BYTES:
                self.sync()
            elif time.monotonic() - self._synced_s > _SYNC_S:
                _sync_data(self._file)
                if not self._named:
                    sync_directory(self._directory)  # or the host would come back without the file
                    self._named = True
                self._synced_s = time.monotonic()

    def sync(self) -> None:
        """Make what was appended durable, and agree with all others on which answers count.

        Raises
        ------
        OSError
            If it cannot be written; FileNotFoundError if the directory was removed.
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
                # It is a segment, to which nothing is appended, whether or not that went well.
                for key, (_, offset, size) in self._own.items():
                    self._decided.setdefault(key, _Place(-self._next, offset, size))
                self._formats[-self._next] = self._formats[self._file]
                self._next += 1
                self._own.clear()
                self._end()

    def forget(self, keys: Iterable[bytes]) -> None:
        """Free the memory of keys that will not be asked for again; a key takes some 200 bytes."""
        with self._lock:
            for key in keys:
                for places in (self._decided, self._candidates):
                    places.pop(key, None)

    def close(self) -> None:
        """Let go of all files; what was not synced stays, for others to take."""
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
            # Entries behind half a header would be nobody's but this writer's.
            os.unlink(self._directory / self._name)
            self._end()
            raise
        self._size, self._named = form.header_bytes, False
        self._synced_s = time.monotonic()

    def _link(self, path: Path) -> bool:
        """Make the open file the next segment, if its number is free.

        By a link alone: a rename would take the place of what another has just put there.
        """
        try:
            os.link(path, self._segment(self._next))
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            raise OSError(
                error.errno,
                "a journal needs a file system with hard links; keep the checkpoint on another, or "
                "set journal = False",
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

    # -- what others wrote --------------------------------------------------------------------

    def _look(self) -> None:
        """Read what has come since the last look."""
        self._segments()
        changed_ns = os.stat(self._directory).st_mtime_ns
        before, looked_ns = self._seen_ns
        # A change right after a look may not move the time on.
        if changed_ns != before or looked_ns - changed_ns < _COARSE_NS:
            self._seen_ns = (changed_ns, time.time_ns())
            self._find_open()
        for name, other in list(self._others.items()):
            size = os.fstat(other.descriptor).st_size
            if size > other.size:
                other.size = size
                self._read_open(name, other, size)

    def _segments(self) -> None:
        """Read the segments that are new; one that is gone was removed by other hands."""
        while os.path.exists(f"{self._directory}/{self._next:08d}.answers"):
            self._read_segment(self._next)
            self._next += 1

    def _find_open(self) -> None:
        there = {name for name in os.listdir(self._directory) if _OPEN.fullmatch(name)}
        for name in there - self._others.keys() - self._foreign - {self._name}:
            try:
                descriptor = os.open(self._directory / name, os.O_RDONLY)
            except FileNotFoundError:
                continue  # it is a segment by now
            self._others[name] = _OpenFile(descriptor)
        for name in self._others.keys() - there:
            # It was synced: whatever it had is in a segment that was, or will be, read.
            gone = self._others.pop(name).descriptor
            lost = [key for key, place in self._candidates.items() if place.file == gone]
            for key in lost:
                del self._candidates[key]
            self._close(gone)
        # After the look, so that what was synced meanwhile is known.
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
                return  # its writer is about to go on, or died
            self._formats[other.descriptor] = header
            start = header.header_bytes
        end = start
        found = self._formats[other.descriptor].entries(data, start, other.read)
        for key, begin, length, skipped in found:
            if skipped:
                self._warn(name, f"is damaged: {skipped} bytes are passed over")
            end = begin + length
            place = _Place(other.descriptor, other.read + begin, length)
            self._candidates.setdefault(key, place)
        # What follows may be the beginning of an entry: it is looked at again when there is more.
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
            self._warn(path.name, f"is damaged: {lost} of its {len(data)} bytes are passed over")

    def _read(self, key: bytes, place: _Place) -> bytes | None:
        """Return an answer, None if it is not as it was written any more."""
        file = place.file if place.file >= 0 else self._opened(-place.file)
        form = self._formats[place.file]
        begin = place.offset - form.head_bytes
        entry = os.pread(file, form.head_bytes + place.size, begin)
        data = entry[form.head_bytes :]
        if entry[: form.head_bytes] == form.head(begin, key, data) and len(data) == place.size:
            return data
        self._warn(str(place), "is damaged")
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
            "%s/%s %s; calls whose answers were there are made again", self._directory, name, what
        )


def check_context(context: bytes) -> None:
    """Refuse a context of another size."""
    if len(context) != KEY_BYTES:
        raise ValueError(f"context must be {KEY_BYTES} bytes, got {len(context)}")


def check_entry(key: bytes, data: bytes) -> None:
    """Refuse a key of another size, and an answer that is too large."""
    if len(key) != KEY_BYTES:
        raise ValueError(f"key must be {KEY_BYTES} bytes, got {len(key)}")
    if len(data) >= MOST_BYTES:
        raise ValueError(f"data must have less than {MOST_BYTES} bytes, got {len(data)}")


def _make(directory: Path) -> None:
    """Make a directory so that it outlasts the host, and those above it."""
    if not directory.is_dir():
        _make(directory.parent)
        directory.mkdir(exist_ok=True)
        sync_directory(directory.parent)


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
