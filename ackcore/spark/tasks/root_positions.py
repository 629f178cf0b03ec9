"""The position of a record in its source, from its root id: inverts `ackcore.ids.root_ids`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ackcore._records import Int64s
from ackcore._reference.mix import subkey

UInt64s = npt.NDArray[np.uint64]

#: The factors of `ackcore._reference.mix.mix_many`, inverted modulo 2 ** 64.
_FACTORS = tuple(
    np.uint64(pow(factor, -1, 1 << 64)) for factor in (0x94D049BB133111EB, 0xBF58476D1CE4E5B9)
)


def positions_of(key: int, roots: Int64s) -> tuple[Int64s, Int64s]:
    """Return the partition of each root, and its place in the partition.

    Parameters
    ----------
    key : int
        The key with which the roots were made.
    roots : numpy.ndarray of int64, shape (n,)
        Root ids.
    """
    words = roots.view(np.uint64) ^ np.uint64(subkey(key & (1 << 64) - 1, 2))
    words = _unmixed(words) - np.uint64(subkey(key & (1 << 64) - 1, 1))
    words = _unmixed(words) ^ np.uint64(subkey(key & (1 << 64) - 1, 0))
    places = (words >> np.uint64(6)) & np.uint64((1 << 42) - 1)
    return (words >> np.uint64(48)).astype(np.int64), places.astype(np.int64)


def _unmixed(words: UInt64s) -> UInt64s:
    """Invert `ackcore._reference.mix.mix_many`."""
    words = _unshifted(words, 31) * _FACTORS[0]
    words = _unshifted(words, 27) * _FACTORS[1]
    return _unshifted(words, 30)


def _unshifted(words: UInt64s, bits: int) -> UInt64s:
    """Invert ``x ^ x >> bits``."""
    found = words
    for shift in range(bits, 64, bits):
        found = found ^ (words >> np.uint64(shift))
    return found
