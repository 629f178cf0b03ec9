# How ids are mixed, packed and routed: structs and inline functions only.
#
# Everything here is fixed for ever, bit by bit: checkpoints hold ids, and the next version
# must derive the same ones.  The reference implementation is ackcore/_reference/ids.py; the test
# vectors are in tests/test_ids.py.
#
# A root id is a bijection of one 64-bit word,
#
#     63 .. 48    47 ......... 6    5 .. 0
#     partition   offset            attempt
#
# so two records of one key never share one.  Each step below (xor, add, multiply by an odd
# number, x ^= x >> s) can be undone, hence so can their composition.

cimport cython
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

cdef enum:
    PARTITION_BITS = 16
    OFFSET_BITS = 42
    ATTEMPT_BITS = 6

cdef extern from "mix.h" nogil:
    const uint64_t GOLDEN
    uint64_t mix "mix64"(uint64_t x) noexcept


cdef inline uint64_t subkey(uint64_t key, uint64_t index) noexcept nogil:
    """The index-th output of SplitMix64 started at ``key``."""
    return mix(key + (index + 1) * GOLDEN)


# Which subkeys serve what: 0-2 roots, 3-5 edges, 6-7 sources.  Two purposes never share one.

cdef struct bijection_t:
    uint64_t before
    uint64_t between
    uint64_t after


cdef inline uint64_t biject(uint64_t x, bijection_t keys) noexcept nogil:
    return mix(mix(x ^ keys.before) + keys.between) ^ keys.after


cdef inline bijection_t root_bijection(uint64_t key) noexcept nogil:
    cdef bijection_t keys
    keys.before = subkey(key, 0)
    keys.between = subkey(key, 1)
    keys.after = subkey(key, 2)
    return keys


cdef inline bijection_t source_bijection(uint64_t key) noexcept nogil:
    cdef bijection_t keys
    keys.before = subkey(key, 6)
    keys.between = subkey(key, 7)
    # 0 goes to 0, and a source counts from 1: so it never draws id 0.
    keys.after = mix(mix(keys.before) + keys.between)
    return keys


cdef inline uint64_t position(uint64_t partition, uint64_t offset, uint64_t attempt) noexcept nogil:
    """The word that a root id is the image of; the parts have been checked."""
    return (partition << (OFFSET_BITS + ATTEMPT_BITS)) | (offset << ATTEMPT_BITS) | attempt


cdef struct edge_key_t:
    uint64_t root
    uint64_t component
    uint64_t instead_of_zero


cdef inline edge_key_t edge_key(uint64_t key, uint64_t component) noexcept nogil:
    cdef edge_key_t keys
    keys.root = subkey(key, 3)
    keys.component = subkey(component ^ key, 4)
    keys.instead_of_zero = subkey(key, 5) | 1
    return keys


# An edge in three steps, so that columns may take them one loop at a time.

cdef inline uint64_t edge_root(uint64_t root, edge_key_t keys) noexcept nogil:
    return mix(root ^ keys.root)


cdef inline uint64_t edge_parent(uint64_t x, uint64_t parent_edge, edge_key_t keys) noexcept nogil:
    return mix((x + parent_edge) ^ keys.component)


cdef inline uint64_t edge_ordinal(uint64_t x, uint64_t ordinal, edge_key_t keys) noexcept nogil:
    x = mix(x + ordinal * GOLDEN)
    # An edge of 0 would not be seen in the XOR.  A mask, not a branch: this loop vectorises.
    return x | (keys.instead_of_zero & (<uint64_t>0 - <uint64_t>(x == 0)))


@cython.cdivision(True)
cdef inline int32_t acker_of(uint64_t root, int32_t tasks) noexcept nogil:
    """Storm's fields grouping: ``floorMod(31 + Long.hashCode(root), tasks)``, where + wraps."""
    cdef int32_t code = <int32_t>(<uint32_t>(root ^ (root >> 32)) + <uint32_t>31)
    cdef int32_t left = code % tasks
    # C rounds towards zero, floorMod down; adding ``tasks`` cannot overflow as left < 0.
    return left + (tasks & (left >> 31))
