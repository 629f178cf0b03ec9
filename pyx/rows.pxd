# Declarations of rows.h.

from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t

from ids cimport edge_key_t


cdef extern from "rows.h" nogil:
    enum:
        AT_ONCE

    ctypedef struct row_runs_t:
        uint64_t *groups
        uint64_t *vals
        int32_t *rows
        int64_t *counts

    void fold_numbers(
        uint64_t *hashes, const uint8_t *column, size_t width, size_t rows, const uint8_t *valid
    ) noexcept
    size_t first_bad_offset(const void *offsets, int wide, size_t rows, int64_t size) noexcept
    void fold_bytes(
        uint64_t *hashes, const void *offsets, int wide, const uint8_t *data, size_t size,
        size_t rows, const uint8_t *valid
    ) noexcept
    size_t place_gathered(
        const void *offsets, int wide, size_t rows, const uint64_t *order, size_t places,
        void *out, int64_t most, int64_t *total
    ) noexcept
    void gather_bytes(
        const void *offsets, int wide, const uint8_t *data, int64_t size, const uint64_t *order,
        size_t places, const void *to, uint8_t *out
    ) noexcept
    void start_edges(
        const uint64_t *roots, const uint64_t *parents, uint64_t parent, size_t groups,
        edge_key_t keys, uint64_t *bases
    ) noexcept
    size_t number_edges(
        const uint64_t *owners, size_t rows, size_t groups, edge_key_t keys, const uint64_t *bases,
        uint64_t *ordinals, uint64_t *edges, uint64_t *totals, uint64_t *bad_owner
    ) noexcept
    size_t cut_runs(
        const uint64_t *owners, const uint64_t *edges, size_t rows, const uint64_t *order,
        const int64_t *counts, size_t destinations, row_runs_t out, uint8_t *seen, size_t *bad_place
    ) noexcept
