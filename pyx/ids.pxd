# Declarations of ids.h.

from libc.stdint cimport int32_t, uint64_t


cdef extern from "ids.h" nogil:
    enum:
        PARTITION_BITS
        OFFSET_BITS
        ATTEMPT_BITS

    ctypedef struct bijection_t:
        pass

    ctypedef struct edge_key_t:
        pass

    uint64_t biject(uint64_t x, bijection_t keys) noexcept
    bijection_t root_bijection(uint64_t key) noexcept
    bijection_t source_bijection(uint64_t key) noexcept
    uint64_t position(uint64_t partition, uint64_t offset, uint64_t attempt) noexcept
    edge_key_t edge_key(uint64_t key, uint64_t component) noexcept
    uint64_t edge_root(uint64_t root, edge_key_t keys) noexcept
    uint64_t edge_parent(uint64_t x, uint64_t parent_edge, edge_key_t keys) noexcept
    uint64_t edge_ordinal(uint64_t x, uint64_t ordinal, edge_key_t keys) noexcept
    int32_t acker_of(uint64_t root, int32_t tasks) noexcept
