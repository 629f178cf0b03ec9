# Declarations of rows.h.

from libc.stdint cimport int64_t, uint8_t, uint64_t


cdef extern from "rows.h" nogil:
    enum:
        AT_ONCE

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
