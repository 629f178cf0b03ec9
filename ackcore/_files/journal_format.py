"""The byte format of a journal's files: a header, then one entry after the other.

::

    magic 8 | context 16 | salt 8 | checksum of these 8
    ( magic 4 | bytes of data 4 | key 16 | checksum of data 8 | checksum of this head 8 | data ) ...

All checksums of a file include its random salt, and that of a head also its position in the file.
So no part of an answer can be mistaken for an entry, even if it was copied from a journal and the
entry around it is torn.  Data is only read after a valid head, so a scan takes time in proportion
to the file.  A failed write leaves a head without its data; each such head may cost the time of its
stated length.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Iterator
from hashlib import blake2b
from typing import Self

#: The size in bytes of a key, and of a journal's context.
KEY_BYTES = 16
#: The size in bytes of a checksum, a salt, and a file's magic.
_SUM_BYTES = 8

_MAGIC = b"ackjrnl1"
_ENTRY_MAGIC = b"\xf6ent"


class FileFormat:
    """The layout of the entries of one file of a journal.

    ``salt``: the file's salt, of 8 bytes.
    """

    header_bytes = len(_MAGIC) + KEY_BYTES + 2 * _SUM_BYTES
    _HEAD = struct.Struct("<4sI16s8s")
    head_bytes = _HEAD.size + _SUM_BYTES

    def __init__(self, salt: bytes) -> None:
        self._salt = salt

    @classmethod
    def new(cls) -> Self:
        """Return the format of a new file, with a random salt."""
        return cls(secrets.token_bytes(_SUM_BYTES))

    def header(self, context: bytes) -> bytes:
        """Return the header of a file with answers for a context of 16 bytes."""
        header = _MAGIC + context + self._salt
        return header + self._sum(header)

    def head(self, at: int, key: bytes, data: bytes) -> bytes:
        """Return the bytes before the data of an entry that begins at ``at`` in the file."""
        head = self._HEAD.pack(_ENTRY_MAGIC, len(data), key, self._sum(data))
        return head + self._sum_of_head(head, at)

    def entries(self, data: bytes, first: int, at: int) -> Iterator[tuple[bytes, int, int, int]]:
        """Find the whole entries with correct checksums in ``data``, a part of the file.

        ``first``: the offset in the part at which to begin. ``at``: the offset of the part in the
        file. Yields the key of each entry, the begin and the length of its data in the part, and
        the number of bytes before it that are not an entry.
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
        person = b"ackcore.journal"
        return blake2b(data, digest_size=_SUM_BYTES, salt=self._salt, person=person).digest()

    def _sum_of_head(self, head: bytes, at: int) -> bytes:
        return self._sum(head + at.to_bytes(8, "little"))


def read_header(data: bytes, context: bytes) -> FileFormat | None:
    """Return the format of a file whose first bytes are ``data``; None if the header is cut off.

    Raises ValueError if the file begins with other bytes, or its header is damaged or of another
    context.
    """
    magic = data[: len(_MAGIC)]
    if len(magic) < len(_MAGIC):
        return None
    if magic != _MAGIC:
        raise ValueError("the file is not one of a journal")
    at = len(_MAGIC) + KEY_BYTES
    found = FileFormat(data[at : at + _SUM_BYTES])
    if len(data) < found.header_bytes:
        return None
    if data[: found.header_bytes] != found.header(context):
        raise ValueError("the header is damaged, or was written for another context")
    return found
