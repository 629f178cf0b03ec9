"""Messages of librdkafka read from C memory with ctypes: the twin of raw_messages.pxi.

That file documents arguments, results and errors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from ackcore._columns import as_count
from ackcore._records import RawMessage
from ackcore._row_arguments import addresses

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
