"""The index of a segment: finds rows by hash with two to three bytes per row.

Hashes are uniform.  Equal parts of their range, the buckets, have 1 to 2 rows on average.  The
index has the first row of each bucket, as its distance from the row that is expected there, and for
each row the 8 bits of its hash that follow those of the bucket.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ackcore._arrow.record_batches import in_ranges_of, offsets_of
from ackcore._records import Int64s, UInt64s


class HashIndex(NamedTuple):
    """An index that finds the rows that may have a hash, among rows that ascend by hash."""

    rows: int  # the number of hashes
    #: The range of the hashes: from ``lo`` to below ``hi``.
    lo: int
    hi: int
    base: int  # the smallest distance of a first row from the expected one
    #: The distances of the first row of each bucket, and of the number of rows; less ``base``.
    distances: npt.NDArray[Any]
    bits: npt.NDArray[np.uint8]  # 8 bits of each hash

    @classmethod
    def of(cls, hashes: UInt64s, lo: int, hi: int) -> HashIndex:
        """Return the index of rows, given their ascending hashes: from ``lo`` to below ``hi``."""
        index = cls(len(hashes), lo, hi, 0, np.empty(0, np.uint8), np.empty(0, np.uint8))
        places = hashes - np.uint64(lo)
        counts = np.bincount((places >> index._shift).view(np.int64), minlength=index._buckets)
        firsts = offsets_of(counts)
        distances = firsts - index._expected(np.arange(len(firsts)))
        base, top = int(distances.min()), int(distances.max())
        width = next(width for width in (1, 2, 4, 8) if top - base < 1 << 8 * width)
        bits = index._bits(places)
        return index._replace(
            base=base, distances=(distances - base).astype(f"u{width}"), bits=bits
        )

    @property
    def _shift(self) -> np.uint64:
        """The number of low bits of a hash, less ``lo``, that do not decide its bucket."""
        wide = (self.hi - self.lo - 1).bit_length()
        return np.uint64(wide - min(wide, max(1, self.rows.bit_length() - 1)))

    @property
    def _buckets(self) -> int:
        return ((self.hi - self.lo - 1) >> int(self._shift)) + 1

    def _bits(self, places: UInt64s) -> npt.NDArray[np.uint8]:
        return (places >> np.uint64(max(0, int(self._shift) - 8))).astype(np.uint8)

    def _expected(self, buckets: Int64s) -> Int64s:
        """Return the first row of each bucket if all buckets had equally many rows."""
        found: Int64s = (buckets * (self.rows / self._buckets)).astype(np.int64)
        return found

    def _firsts(self, buckets: Int64s) -> Int64s:
        found = self.distances[buckets].astype(np.int64)
        found += self._expected(buckets)
        found += self.base
        return found

    def candidates(self, hashes: UInt64s) -> tuple[Int64s, Int64s]:
        """Return the numbers of the rows that may have one of ``hashes``; some have another hash.

        ``hashes``: hashes in the range of the index. Returns pairs in two arrays: the index of the
        hash in ``hashes``, ascending, and the row.
        """
        places = hashes - np.uint64(self.lo)
        buckets = (places >> self._shift).view(np.int64)
        firsts = self._firsts(buckets)
        numbers, rows = in_ranges_of(firsts, self._firsts(buckets + 1) - firsts)
        found = np.flatnonzero(self.bits[rows] == self._bits(places)[numbers])
        return numbers[found], rows[found]

    def rows_around(self, bound: int) -> tuple[int, int]:
        """Return the start and the end of the bucket of a hash, for a search by exact hashes.

        The rows before the start have hashes below ``bound``, the rows from the end on do not.
        """
        if bound <= self.lo:
            return 0, 0
        if bound >= self.hi:
            return self.rows, self.rows
        bucket, rest = divmod(bound - self.lo, 1 << int(self._shift))
        first, end = self._firsts(np.array([bucket, bucket + 1])).tolist()
        return first, end if rest else first
