"""The messages of a Kafka client as columns, and librdkafka's messages in C through ctypes.

The twins of record_buffers.pxi and raw_messages.pxi, which document arguments, results and errors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from ackcore._arguments import addresses
from ackcore._columns import as_count
from ackcore._records import UNREADABLE_HEADERS, BinaryColumn, GatheredRecords, RawMessage

_MOST_MS = 2**31 - 1


class _Message(ctypes.Structure):
    """The C struct rd_kafka_message_t."""

    _fields_ = (
        ("err", ctypes.c_int),
        ("topic", ctypes.c_void_p),
        ("partition", ctypes.c_int32),
        ("payload", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
        ("key", ctypes.c_void_p),
        ("key_size", ctypes.c_size_t),
        ("offset", ctypes.c_int64),
        ("private", ctypes.c_void_p),
    )


_POINTER = ctypes.c_void_p
_CONSUME = ctypes.CFUNCTYPE(ctypes.c_ssize_t, _POINTER, ctypes.c_int, _POINTER, ctypes.c_size_t)
_DESTROY = ctypes.CFUNCTYPE(None, _POINTER)
_TIMESTAMP = ctypes.CFUNCTYPE(ctypes.c_int64, _POINTER, _POINTER)
_HEADERS = ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, _POINTER)
_HEADER = ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, ctypes.c_size_t, _POINTER, _POINTER, _POINTER)


class RawMessages:
    """The messages of one call to a queue of librdkafka, in librdkafka's memory."""

    def __init__(self, functions: Sequence[int], queue: int) -> None:
        *found, self._queue = addresses(functions, queue)
        self._consume = _CONSUME(found[0])
        self._destroy = _DESTROY(found[1])
        self._timestamp = _TIMESTAMP(found[2])
        self._headers = _HEADERS(found[3])
        self._header = _HEADER(found[4])
        self._messages: list[int] = []

    def consume(self, most: int, timeout_s: float) -> None:
        """Free the held messages; wait for ``most`` new ones, or for ``timeout_s``."""
        wanted = as_count(most, "most", 1, 1 << 24)
        self.clear()
        room = (ctypes.c_void_p * wanted)()
        wait_ms = int(max(0, min(timeout_s * 1000, _MOST_MS)))
        found = self._consume(self._queue, wait_ms, room, wanted)
        self._messages = [one for one in room[: max(found, 0)] if one is not None]

    def clear(self) -> None:
        """Free the held messages."""
        messages, self._messages = self._messages, []
        for one in messages:
            self._destroy(one)

    def __del__(self) -> None:
        if hasattr(self, "_messages"):
            self.clear()

    def __len__(self) -> int:
        return len(self._messages)

    def __getitem__(self, place: int) -> RawMessage:
        if not 0 <= place < len(self._messages):
            raise IndexError(f"place must be in 0..{len(self._messages) - 1}, got {place}")
        at = self._messages[place]
        one = _Message.from_address(at)
        value = _bytes_or_none(one.payload, one.size)
        if one.err:
            return RawMessage(one.offset, (one.err, _text(value or b"")))
        kind = ctypes.c_int(0)
        ms = self._timestamp(at, ctypes.byref(kind))
        key = _bytes_or_none(one.key, one.key_size)
        return RawMessage(one.offset, None, key, value, self._headers_of(at), (kind.value, ms))

    def _headers_of(self, at: int) -> list[tuple[str, bytes | None]] | None:
        headers, name = ctypes.c_void_p(), ctypes.c_char_p()
        value, size = ctypes.c_void_p(), ctypes.c_size_t()
        if self._headers(at, ctypes.byref(headers)):
            return None
        found: list[tuple[str, bytes | None]] = []
        out: list[Any] = [ctypes.byref(each) for each in (name, value, size)]
        while self._header(headers, len(found), *out) == 0:
            text = (name.value or b"").decode("utf-8", "backslashreplace")
            found.append((text, _bytes_or_none(value.value, size.value)))
        return found


def _bytes_or_none(at: int | None, size: int) -> bytes | None:
    return None if at is None else ctypes.string_at(at, size)


def _text(said: bytes) -> str:
    return said.rstrip(b"\0").decode("utf-8", "replace")


#: More bytes do not fit 32-bit offsets.
_MOST_BYTES = 2**31 - 1


class RecordBuffers:
    """Records of one partition, collected from messages into columns."""

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

    def add(
        self, messages: Sequence[Any] | RawMessages, first: int = 0, stop: int = 2**63 - 1
    ) -> int:
        """Add the records from ``messages[first]`` on; return the index after the last."""
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
        timed = np.array([kind != 0 for kind, _ in self._timestamps], np.uint8)
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
