"""The bytes of objects that a service sent, at addresses where Arrow columns may start."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import pyarrow as pa

#: Larger objects are read in pieces of this size into a mapped file.
PIECE_BYTES = 32 << 20
#: Alignment of columns in bytes.
_ALIGNMENT = 64


def aligned(data: Any) -> pa.Buffer:
    """Return bytes at an aligned address for Arrow columns: an answer may start at any address."""
    buffer = pa.py_buffer(data)
    if buffer.address % _ALIGNMENT == 0:
        return buffer
    # Arrow's own allocations are aligned.
    copy = pa.allocate_buffer(buffer.size)
    memoryview(copy).cast("B")[:] = memoryview(buffer).cast("B")
    return copy


def mapped(read: Callable[[int, int], pa.Buffer | None], size: int) -> pa.Buffer | None:
    """Return ``size`` bytes as one buffer, mapped from a file without a name.

    Returns None if ``read``, which is called with start and length of each piece, returns None.
    """
    with tempfile.TemporaryFile() as file:
        for start in range(0, size, PIECE_BYTES):
            piece = read(start, PIECE_BYTES)
            if piece is None:
                return None
            file.write(piece)
        file.flush()
        with pa.memory_map(f"/proc/self/fd/{file.fileno()}") as source:
            return source.read_buffer()
