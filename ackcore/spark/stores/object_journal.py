"""A journal of the answers of calls in a bucket: the counterpart of `ackcore._files.journal`.

The journal consists of segments, ``00000001.answers`` and so on.  Each is put only if its number is
free; a writer that finds a number taken reads that segment first.  So the segments form one
sequence, and each process has read a prefix of it.  **The answer to a key is the first one in the
sequence**; `ackcore._files.journal` explains why all use one answer.  The byte format is the same.

A bucket cannot append to an object.  New answers stay in memory until they are put: at the next
sync, at 16 MiB, or by a thread every half second.  So a process that dies loses the answers of the
last half second, and these calls are made again.  Segments of other processes are read at most
every half second too, since each look is a request.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from ackcore._files.journal import check_context, check_entry
from ackcore._files.journal_format import FileFormat, read_header
from ackcore.spark.base.errors import StateError
from ackcore.spark.stores.interface import Store, StoreConflict

_log = logging.getLogger("ackcore")

#: Longest time in seconds that an answer is only in memory, and between two looks for segments.
_EVERY_S = 0.5
#: Answers of more bytes are put at once.
_SEGMENT_BYTES = 1 << 24
#: Most bytes of recently read or put segments in memory.
_KEPT_BYTES = 1 << 26
#: Concurrent reads of segments: a journal may have thousands when it is opened.
_AT_ONCE = 16


class ObjectJournal:
    """The answers of calls by key, shared by all processes that open the same place.

    Threads may share one journal. Raises ValueError if the context has not 16 bytes, StateError if
    the bucket cannot be read.

    ``below``: the prefix of the keys of its objects. ``context``: 16 bytes that identify the calls.
    Segments with another context are ignored.
    """

    def __init__(self, store: Store, below: str, context: bytes) -> None:
        check_context(context)
        self._store, self._below, self._context = store, below, context
        self._lock = threading.RLock()
        #: Held while segments are read and put, which takes requests; acquired before ``_lock``.
        self._moving = threading.RLock()
        #: The segment number, offset and length of each answer.
        self._decided: dict[bytes, tuple[int, int, int]] = {}
        self._kept: OrderedDict[int, bytes] = OrderedDict()
        self._next = 1
        #: Appended answers that are in no segment yet.
        self._own: dict[bytes, bytes] = {}
        self._size = 0
        self._looked_s = float("-inf")
        self._closed = threading.Event()
        self._flusher: threading.Thread | None = None
        self._look()

    def get(self, key: bytes) -> bytes | None:
        """Return the answer to a key, None if none is known.

        Segments of other processes are read before None is returned, at most every half second.
        Raises StateError if the bucket cannot be read.
        """
        data = self._known(key)
        if data is None and time.monotonic() - self._looked_s > _EVERY_S:
            self._look()
            data = self._known(key)
        return data

    def known_keys(self) -> list[bytes]:
        """Return the keys of answers that this process has read or appended and not forgotten."""
        with self._lock:
            return [*self._decided, *(key for key in self._own if key not in self._decided)]

    def _known(self, key: bytes) -> bytes | None:
        with self._lock:
            place = self._decided.get(key)
            if place is None:
                return self._own.get(key)
        return self._read(key, *place)

    def append(self, key: bytes, data: bytes) -> None:
        """Add an answer to those that a thread puts, unless this process has one for the key.

        Another process may put an answer first; then that one is the answer to the key. Raises
        ValueError if the key has not 16 bytes, or the answer is too large; StateError if more than
        16 MiB of answers are in memory and cannot be put.
        """
        check_entry(key, data)
        with self._lock:
            if key in self._decided or key in self._own:
                return
            self._own[key] = data
            self._size += len(data)
            much = self._size > _SEGMENT_BYTES
            if self._flusher is None and not self._closed.is_set():
                self._flusher = threading.Thread(
                    target=self._flush, name="ackcore-journal", daemon=True
                )
                self._flusher.start()
        if much:
            self.sync()

    def _flush(self) -> None:
        while not self._closed.wait(_EVERY_S):
            try:
                self.sync()
            except StateError as error:
                # A caller that needs these answers calls sync, which raises.
                _log.debug("%s could not be written: %s", self._below, error)

    def sync(self) -> None:
        """Put the appended answers, so that all processes use the same answer to each key.

        Raises StateError if the answers cannot be put.
        """
        with self._moving:
            with self._lock:
                pending = {key: data for key, data in self._own.items() if key not in self._decided}
            if pending:
                segment, places = self._segment(pending)
                while True:
                    try:
                        self._store.put(self._key(self._next), segment, if_absent=True)
                        break
                    except StoreConflict:
                        self._take(self._next, self._get(self._next))
            with self._lock:
                if pending:
                    for key, place in places.items():
                        self._decided.setdefault(key, (self._next, *place))
                    self._keep(self._next, segment)
                    self._next += 1
                self._own = {k: data for k, data in self._own.items() if k not in self._decided}
                self._size = sum(map(len, self._own.values()))

    def _segment(self, answers: dict[bytes, bytes]) -> tuple[bytes, dict[bytes, tuple[int, int]]]:
        """Return the bytes of a segment, and by key the offset and length of its answers."""
        form = FileFormat.new()
        parts = [form.header(self._context)]
        at, places = len(parts[0]), {}
        for key, data in answers.items():
            head = form.head(at, key, data)
            places[key] = at + len(head), len(data)
            parts += [head, data]
            at += len(head) + len(data)
        return b"".join(parts), places

    def forget(self, keys: Iterable[bytes]) -> None:
        """Forget the places of put answers, to free memory. A later `get` of them returns None."""
        with self._lock:
            for key in keys:
                self._decided.pop(key, None)

    def close(self) -> None:
        """End the thread and put the appended answers; an error is logged. May be called again."""
        self._closed.set()
        if self._flusher is not None:
            self._flusher.join()
            self._flusher = None
        try:
            self.sync()
        except StateError as error:
            _log.warning("%s; calls whose answers were not stored are made again", error)

    # -- segments -----------------------------------------------------------------------------

    def _key(self, number: int) -> str:
        return f"{self._below}/{number:08d}.answers"

    def _get(self, number: int) -> bytes | None:
        found = self._store.get(self._key(number))
        return None if found is None else found.data

    def _look(self) -> None:
        """Read the segments that other processes have added since the last call."""
        with self._moving:
            self._looked_s = time.monotonic()
            found = self._get(self._next)
            if found is None:
                return
            self._take(self._next, found)
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                while True:
                    numbers = range(self._next, self._next + _AT_ONCE)
                    for number, data in zip(numbers, pool.map(self._get, numbers), strict=True):
                        if data is None:
                            return
                        self._take(number, data)

    def _take(self, number: int, data: bytes | None) -> None:
        """Add the answers of the next segment, by another process, to keys that have none yet.

        Damaged parts are skipped, with a warning.
        """
        form = _format(data, self._context)
        with self._lock:
            self._next = number + 1
            if form is None or data is None:
                self._warn(number, "is damaged, or belongs to other calls")
                return
            end, lost = form.header_bytes, 0
            for key, offset, length, skipped in form.entries(data, end, 0):
                self._decided.setdefault(key, (number, offset, length))
                lost += skipped
                end = offset + length
            lost += len(data) - end
            self._keep(number, data)
        if lost:
            self._warn(number, f"is damaged: {lost} of its {len(data)} bytes are skipped")

    def _keep(self, number: int, data: bytes) -> None:
        self._kept[number] = data
        self._kept.move_to_end(number)
        while len(self._kept) > 1 and sum(map(len, self._kept.values())) > _KEPT_BYTES:
            self._kept.popitem(last=False)

    def _read(self, key: bytes, number: int, offset: int, size: int) -> bytes | None:
        """Return an answer from its place. If its bytes are damaged, forget it and return None."""
        with self._lock:
            segment = self._kept.get(number)
        if segment is None:
            segment = self._get(number) or b""
            with self._lock:
                self._keep(number, segment)
        data = segment[offset : offset + size]
        form = _format(segment, self._context)
        if form is not None:
            begin = offset - form.head_bytes
            if len(data) == size and segment[begin:offset] == form.head(begin, key, data):
                return data
        self._warn(number, "is damaged")
        with self._lock:
            self._decided.pop(key, None)
        return None

    def _warn(self, number: int, what: str) -> None:
        _log.warning(
            "%s/%s %s; calls whose answers it held are made again",
            self._store.url,
            self._key(number),
            what,
        )


def _format(segment: bytes | None, context: bytes) -> FileFormat | None:
    try:
        return None if segment is None else read_header(segment, context)
    except ValueError:
        return None
