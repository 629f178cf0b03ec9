"""The messages of a Kafka client as columns.

The twin of record_buffers.pxi, which documents arguments, results and errors.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        #: Keys, values, headers, offsets and timestamps.
        self._records: list[tuple[bytes | None, bytes | None, Any, int, tuple[int, int]]] = []
        self._sizes = 0, 0, 0  # in bytes, of all keys, values and headers

    @property
    def rows(self) -> int:
        """The number of records that were added and not taken yet."""
        return len(self._records)

    @property
    def bytes(self) -> int:
        """The size of all keys, values and headers in bytes; header names count in characters."""
        return sum(self._sizes)

    def add(self, messages: Any, first: int = 0, stop: int = 2**63 - 1) -> int:
        """Add the records from ``messages[first]`` on; return the index of the first not added.

        It ends at a message with an error or with an offset from ``stop`` on, and where
        ``most_bytes`` would be exceeded. Raises TypeError, and adds none, if a key or value is
        neither bytes nor None.
        """
        found = []
        key_bytes, value_bytes, header_bytes = self._sizes
        for place in range(first, len(messages)):
            message = messages[place]
            if message.error() is not None:
                break
            offset = message.offset()
            if offset >= stop:
                break
            key, value = message.key(), message.value()
            sizes = key_bytes + _size(key, "key", place), value_bytes + _size(value, "value", place)
            if max(sizes) > self._most_bytes:
                break
            key_bytes, value_bytes = sizes
            headers = _headers(message)
            header_bytes += sum(len(name) + len(of or b"") for name, of in headers or ())
            kind, ms = message.timestamp()
            found.append((key, value, headers, offset, (kind, ms)))
        self._records += found
        self._sizes = key_bytes, value_bytes, header_bytes
        return first + len(found)

    def taken(self) -> GatheredRecords | None:
        """Remove and return all records; None if there are none."""
        if not self._records:
            return None
        columns: Any = ([record[at] for record in self._records] for at in range(5))
        keys, values, headers, offsets, timestamps = columns
        timed = np.array([kind != 0 and ms != _NO_TIMESTAMP for kind, ms in timestamps], np.uint8)
        found = GatheredRecords(
            _column(keys),
            _column(values),
            headers if any(headers) else None,
            np.array(offsets, np.int64),
            np.array([ms for _, ms in timestamps], np.int64),
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


def _column(values: Sequence[bytes | None]) -> BinaryColumn:
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum([len(value or b"") for value in values], out=offsets[1:])
    valid = np.array([value is not None for value in values], np.uint8)
    data = np.frombuffer(b"".join(value or b"" for value in values), np.uint8)
    return BinaryColumn(offsets, data, None if valid.all() else valid)
