"""Ids, hashes and fingerprints once more, in plain integers: what both backends must equal."""

import hashlib

import numpy as np
from hypothesis import strategies as st

WORD = 2**64
MASK = WORD - 1
GOLDEN = 0x9E3779B97F4A7C15
A, B = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
VALUE = 0x2545F4914F6CDD1D
NO_VALUE = 0x6A09E667F3BCC909

#: 64 bits in either sign.
ANY_BITS = st.sampled_from([0, 1, -1, 2**63 - 1, -(2**63), 2**64 - 1]) | st.integers(
    -(2**63), 2**64 - 1
)


def signed(word):
    word %= WORD
    return word - WORD if word >= 2**63 else word


def mix(x):
    x = ((x ^ (x >> 30)) * A) % WORD
    x = ((x ^ (x >> 27)) * B) % WORD
    return x ^ (x >> 31)


def subkey(key, i):
    return mix((key + (i + 1) * GOLDEN) % WORD)


# Ids.


def root_id(key, partition, offset, attempt):
    key %= WORD
    x = (partition * 2**48 + offset * 2**6 + attempt) ^ subkey(key, 0)
    x = (mix(x) + subkey(key, 1)) % WORD
    return signed(mix(x) ^ subkey(key, 2))


def component_key(name):
    return int.from_bytes(
        hashlib.blake2b(name.encode("utf-8"), digest_size=8, person=b"ackcore.comp").digest(),
        "little",
    )


def edge_id(key, root, component, parent_edge, ordinal):
    key, root, parent_edge = key % WORD, root % WORD, parent_edge % WORD
    component = component_key(component) if isinstance(component, str) else component % WORD
    x = mix(root ^ subkey(key, 3))
    x = mix(((x + parent_edge) % WORD) ^ subkey(component ^ key, 4))
    x = mix((x + ordinal * GOLDEN) % WORD)
    return signed(x) if x else signed(subkey(key, 5) | 1)


def source_id(key, nth):
    """The nth id of an IdSource, from 1."""

    def to_word(x):
        return mix((mix(x ^ subkey(key % WORD, 6)) + subkey(key % WORD, 7)) % WORD)

    return signed(to_word(nth) ^ to_word(0))


def acker_task(root, n):
    """Compute it as Java does: int arithmetic wraps, floorMod follows the divisor's sign."""
    root %= WORD
    hash_code = (root ^ (root >> 32)) % 2**32
    total = (31 + hash_code) % 2**32
    return (total - 2**32 if total >= 2**31 else total) % n


# Ids undone.


def unshift(x, by):
    """Undo ``x ^ (x >> by)``."""
    y = x
    for _ in range(64 // by):
        y = x ^ (y >> by)
    return y


def unmix(x):
    x = (unshift(x, 31) * pow(B, -1, WORD)) % WORD
    x = (unshift(x, 27) * pow(A, -1, WORD)) % WORD
    return unshift(x, 30)


def parts_of(key, root):
    """The inverse of root_id: that there is one proves that root_id is a bijection."""
    key %= WORD
    x = unmix((root % WORD) ^ subkey(key, 2))
    x = unmix((x - subkey(key, 1)) % WORD) ^ subkey(key, 0)
    return x // 2**48, x // 2**6 % 2**42, x % 2**6


# Rows.


def words_of(data):
    return [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]


def fold(h, value_hash):
    return ((h ^ h >> 32) * 0xD1342543DE82EF95 + value_hash) & MASK


def hash_of_number(data):
    if len(data) <= 8:
        return mix(int.from_bytes(data, "little", signed=True) & MASK ^ VALUE)
    x = VALUE
    for word in words_of(data):
        x = mix(x ^ word)
    return x


def hash_of_bytes(data):
    x = (VALUE + GOLDEN * (len(data) + 1)) & MASK
    for word in words_of(data) or [0]:
        x = mix(x ^ word)
    return x


def fingerprint_of(data, seed):
    key = mix((seed ^ 0x3C6EF372FE94F82B) & MASK)
    words = enumerate(words_of(data))
    total = sum(mix(word ^ (key + place * GOLDEN) & MASK) for place, word in words) & MASK
    return signed(mix((mix(total ^ key) + len(data) * GOLDEN) & MASK))


# Columns.


def int64s(items):
    return np.array([signed(item & MASK) for item in items], np.int64)


def lay_out(strings, dtype, before=b"", after=b""):
    ends = np.cumsum([len(before), *map(len, strings)])
    return ends.astype(dtype), before + b"".join(strings) + after
