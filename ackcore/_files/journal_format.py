"""The files of a journal, byte by byte: a header, and one entry after the other.

::

    magic 8 | context 16 | salt 8 | checksum of these 8
    ( magic 4 | bytes of data 4 | key 16 | checksum of data 8 | checksum of this head 8 | data ) ...

All checksums of a file take its salt, which is random, and a head's its place in the file as well.
So nothing within an answer passes for an entry, though it were read from a journal: not even where
the entry around it is torn.  And only behind a head that was written here is anything read at its
length, so that a scan takes time in proportion to the file; but for what writes that failed half
way have left, each of which may cost as much as it says that it is long.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Iterator
from hashlib import blake2b
from typing import Self

#: Bytes of a key, and of the context of a journal.
KEY_BYTES = 16
#: Of a checksum, a salt, and the magic of a file.
_SUM_BYTES = 8

_MAGIC = b"ackjrnl1"
_ENTRY_MAGIC = b"\xf6ent"


class FileFormat:
    """The layout of the entries of one file.

    Parameters
    ----------
    salt : bytes
        8 bytes.
    """

    header_bytes = len(_MAGIC) + KEY_BYTES + 2 * _SUM_BYTES
    _HEAD = struct.Struct("<4sI16s8s")
    head_bytes = _HEAD.size + _SUM_BYTES

    def __init__(self, salt: bytes) -> None:
        self._salt = salt

    @classmethod
    def new(cls) -> Self:
        """Return the format of a file that is about to be written."""
        return cls(secrets.token_bytes(_SUM_BYTES))

    def header(self, context: bytes) -> bytes:
        """Return the header of a file with answers to calls of a context."""
        header = _MAGIC + context + self._salt
        return header + self._sum(header)

    def head(self, at: int, key: bytes, data: bytes) -> bytes:
        """Return the head of an entry: the bytes before its data."""
        head = self._HEAD.pack(_ENTRY_MAGIC, len(data), key, self._sum(data))
        return head + self._sum_of_head(head, at)

    def entries(self, data: bytes, first: int, at: int) -> Iterator[tuple[bytes, int, int, int]]:
        """Find the entries of a part of the file.

        Parameters
        ----------
        data : bytes
            The part.
        first : int
            Where in it to begin.
        at : int
            Where it is in the file.

        Yields
        ------
        key : bytes
        begin, length : int
            Of its data, within the part.
        skipped : int
            Bytes before it that are no entry.
        """
        view = memoryview(data)
        from_ = first
        while (found := data.find(_ENTRY_MAGIC, from_)) >= 0:
            begin = found + self.head_bytes
            if begin > len(data):
                return
            head = data[found : begin - _SUM_BYTES]
            from_ = found + 1
            if self._sum_of_head(head, at + found) != data[begin - _SUM_BYTES : begin]:
                continue
            _, length, key, checksum = self._HEAD.unpack(head)
            end = begin + length
            if end <= len(data) and self._sum(view[begin:end]) == checksum:
                yield key, begin, length, found - first
                from_ = first = end

    def _sum(self, data: bytes | memoryview) -> bytes:
        return _sum(data, self._salt)

    def _sum_of_head(self, head: bytes, at: int) -> bytes:
        return self._sum(head + at.to_bytes(8, "little"))


def read_header(data: bytes, context: bytes) -> FileFormat | None:
    """Return how a file has its entries, None if its header is not all there.

    Raises
    ------
    ValueError
        If it has another header, or one of another context.
    """
    magic = data[: len(_MAGIC)]
    if len(magic) < len(_MAGIC):
        return None
    if magic != _MAGIC:
        raise ValueError("no journal's")
    at = len(_MAGIC) + KEY_BYTES
    found = FileFormat(data[at : at + _SUM_BYTES])
    if len(data) < found.header_bytes:
        return None
    if data[: found.header_bytes] != found.header(context):
        raise ValueError("damaged, or of another context")
    return found


def _sum(data: bytes | memoryview, salt: bytes) -> bytes:
    return blake2b(data, digest_size=_SUM_BYTES, salt=salt, person=b"ackcore.journal").digest()
