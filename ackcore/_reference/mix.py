"""SplitMix64, used by ids, hashes of rows and fingerprints: the twin of pyx/mix.h.

Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014), with the
finaliser of Vigna's splitmix64.c: Stafford's Mix13.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UInt64s = npt.NDArray[np.uint64]

ALL_BITS = 2**64 - 1
#: Multiples of the golden ratio visit all 64-bit words, and near ones are far apart.
GOLDEN = 0x9E3779B97F4A7C15


def mix(x: int) -> int:
    """Return a mixed 64-bit word: a bijection in which every input bit affects every output bit."""
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & ALL_BITS
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & ALL_BITS
    return x ^ x >> 31


def mix_many(words: UInt64s) -> UInt64s:
    """Return each word of a column mixed by `mix`."""
    words = words ^ (words >> np.uint64(30))
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words


def subkey(key: int, index: int) -> int:
    """Return the index-th output of SplitMix64 started at ``key``.

    Root ids use indexes 0 to 2, edges 3 to 5, sources 6 and 7, so no two purposes share an output.
    """
    return mix(key + (index + 1) * GOLDEN & ALL_BITS)
