"""The messages of a Kafka client as columns.

The twin of record_buffers.pxi, which documents arguments, results and errors.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ackcore._columns import as_count
from ackcore._records import UNREADABLE_HEADERS, BinaryColumn, GatheredRecords

#: More bytes do not fit 32-bit offsets.
_MOST_BYTES = 2**31 - 1
_NO_TIMESTAMP = -1


class RecordBuffers:
    """The records of one partition, collected from a client's messages, as columns.

    ``most_bytes``: the limit on the bytes of all keys, and on those of all values.
    """

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes = as_count(most_bytes, "most_bytes", 0, _MOST_BYTES)
        self._begin()

    def _begin(self) -> None:
        self._keys: list[bytes | None] = []
        self._values: list[bytes | None] = []
        self._headers: list[Any] = []
        self._offsets: list[int] = []
        self._timestamps: list[tuple[int, int]] = []
        self._key_bytes = self._value_bytes = self._header_bytes = 0

    @property
    def rows(self) -> int:
        """The number of records that were added and not taken yet."""
        return len(self._offsets)

    @property
    def bytes(self) -> int:
        """The size of all keys, values and headers in bytes; header names count in characters."""
        return self._key_bytes + self._value_bytes + self._header_bytes

    def add(self, messages: Any, first: int = 0, stop: int = 2**63 - 1) -> int:
        """Add the records from ``messages[first]`` on; return the index of the first not added.

        It ends at a message with an error or with an offset from ``stop`` on, and where
        ``most_bytes`` would be exceeded.
        """
        found = []
        key_bytes, value_bytes = self._key_bytes, self._value_bytes
        for place in range(first, len(messages)):
            message = messages[place]
            if message.error() is not None:
                break
            offset = message.offset()
            if offset >= stop:
                break
            key, value = message.key(), message.value()
            key_bytes += _size(key, "key", place)
            value_bytes += _size(value, "value", place)
            if max(key_bytes, value_bytes) > self._most_bytes:
                break
            kind, ms = message.timestamp()
            found.append((key, value, _headers(message), offset, (kind, ms)))
        for key, value, headers, offset, timestamp in found:
            self._key_bytes += len(key or b"")
            self._value_bytes += len(value or b"")
            self._header_bytes += sum(len(name) + len(of or b"") for name, of in headers or ())
            self._keys.append(key)
            self._values.append(value)
            self._headers.append(headers)
            self._offsets.append(offset)
            self._timestamps.append(timestamp)
        return first + len(found)

    def taken(self) -> GatheredRecords | None:
        """Remove and return all records; None if there are none."""
        if not self._offsets:
            return None
        timed = np.array(
            [kind != 0 and ms != _NO_TIMESTAMP for kind, ms in self._timestamps], np.uint8
        )
        found = GatheredRecords(
            _column(self._keys),
            _column(self._values),
            self._headers if any(self._headers) else None,
            np.array(self._offsets, np.int64),
            np.array([ms for _, ms in self._timestamps], np.int64),
            None if timed.all() else timed,
        )
        self._begin()
        return found


def _headers(message: Any) -> Any:
    try:
        return message.headers() or None
    except (SystemError, UnicodeDecodeError):  # CPython raises SystemError for it
        return UNREADABLE_HEADERS


def _size(value: Any, name: str, place: int) -> int:
    if value is None:
        return 0
    if type(value) is not bytes:
        raise TypeError(
            f"the {name} of message {place} must be bytes or None, got {type(value).__name__}"
        )
    return len(value)


def _column(values: list[bytes | None]) -> BinaryColumn:
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum([len(value or b"") for value in values], out=offsets[1:])
    valid = np.array([value is not None for value in values], np.uint8)
    data = np.frombuffer(b"".join(value or b"" for value in values), np.uint8)
    return BinaryColumn(offsets, data, None if valid.all() else valid)
