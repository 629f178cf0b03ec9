# Declarations of offsets.h and offset_holes.h for offsets.pxi.

from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t


cdef extern from "offset_holes.h" nogil:
    ctypedef struct segment_t:
        pass

    ctypedef struct failure_t:
        int32_t attempts
        int32_t waits

    ctypedef struct failures_t:
        size_t used
        int64_t waiting

    ctypedef struct offsets_t:
        size_t room
        size_t seg_room
        int64_t base
        int64_t committable
        int64_t position
        int64_t done_end
        int64_t pending
        failures_t failures
        int64_t stale
        int64_t below_base
        int64_t not_emitted
        int64_t repeated

    int64_t offsets_emit(offsets_t *t, const int64_t *offsets, size_t n) noexcept
    int64_t offsets_ack(offsets_t *t, const int64_t *offsets, size_t n) noexcept
    int64_t offsets_fail(offsets_t *t, const int64_t *offsets, size_t n) noexcept
    void offsets_pass(offsets_t *t, int64_t position) noexcept
    void offsets_free(offsets_t *t) noexcept
    bint is_done(const offsets_t *t, int64_t offset) noexcept
    size_t failures_room(const failures_t *f) noexcept
    failure_t *failures_find(const failures_t *f, int64_t offset) noexcept
    size_t list_holes(
        const offsets_t *t, int64_t *starts, int64_t *ends, size_t room
    ) noexcept
    size_t list_failures(
        const offsets_t *t, int64_t *offsets, int32_t *attempts, uint8_t *waits
    ) noexcept
    int load_holes(
        offsets_t *t, int64_t done_end, int64_t position, const int64_t *starts,
        const int64_t *ends, size_t n
    ) noexcept
    int load_failures(
        offsets_t *t, const int64_t *offsets, const int32_t *attempts, size_t n
    ) noexcept
    void check_offsets_after(offsets_t *t, size_t offsets) noexcept
    bint are_ascending(const int64_t *offsets, size_t n) noexcept
    bint are_offsets(const int64_t *offsets, size_t n) noexcept
