# Declarations of pack.h.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t


cdef extern from "pack.h" nogil:
    enum:
        MAX_SHARDS

    void find_shards(
        const uint64_t *root_ids, size_t rows, uint64_t n, uint32_t *shards, int64_t *counts
    ) noexcept
    void order_by_shard(
        const uint32_t *shards, size_t rows, int64_t *next_place, int64_t *order
    ) noexcept
    void order_by_hash(
        const uint64_t *root_ids, size_t rows, uint64_t n, int bits, int64_t *next_place,
        uint64_t *hashes, int64_t *order, int64_t *counts
    ) noexcept
    size_t take_rows_of_shard(
        const uint64_t *root_ids, const uint64_t *vals, const int32_t *tasks, const int64_t *times,
        size_t rows, uint32_t shard, uint64_t n, int64_t *out_roots, int64_t *out_vals,
        int32_t *out_tasks, int64_t *out_times
    ) noexcept
