"""SplitMix64, which ids, hashes of rows and fingerprints draw on: the twin of pyx/mix.h.

Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014), with the
finaliser that Vigna's splitmix64.c has: Stafford's Mix13.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UInt64s = npt.NDArray[np.uint64]

ALL_BITS = 2**64 - 1
#: Steps of the golden ratio visit all 64-bit words and keep far apart.
GOLDEN = 0x9E3779B97F4A7C15


def mix(x: int) -> int:
    """Return a word of 64 bits mixed: a bijection in which every bit sways every bit."""
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & ALL_BITS
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & ALL_BITS
    return x ^ x >> 31


def mix_many(words: UInt64s) -> UInt64s:
    """Return each word of a column mixed, as `mix` does it."""
    words = words ^ (words >> np.uint64(30))
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words


def subkey(key: int, index: int) -> int:
    """Return the index-th output of SplitMix64 started at ``key``.

    0 to 2 serve root ids, 3 to 5 edges, 6 and 7 sources: two purposes never share one.
    """
    return mix(key + (index + 1) * GOLDEN & ALL_BITS)
