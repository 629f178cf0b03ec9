# Declarations of the kernel for _native.pyx: layout.h, and one build of kernel.h chosen at import.

from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t


cdef extern from "layout.h" nogil:
    enum:
        TASK_ACK
        TASK_FAIL
        TASK_RESET
        SLOTS
        ROWS_BAD
        ROWS_PLAIN

    size_t FULL

    ctypedef struct table_t:
        size_t n_buckets
        void *owner
        void *buckets

    ctypedef struct ledger_t:
        table_t cur
        table_t old
        size_t limit
        size_t min_buckets
        int turns
        void *retired
        int64_t second_inits
        int64_t orphans
        int64_t untaken
        int64_t growths

    ctypedef struct outcomes_t:
        int64_t *root_ids
        int32_t *tasks
        uint8_t *kinds
        int64_t *elapsed

    ctypedef struct batch_t:
        const uint64_t *root_ids
        const uint64_t *vals
        const int32_t *tasks
        const int64_t *times
        int64_t now
        int32_t kind

    ctypedef struct columns_t:
        int64_t *root_ids
        int64_t *vals
        int32_t *tasks
        uint8_t *inits
        uint8_t *flags
        uint8_t *ages
        int64_t *first
        int64_t *last
        uint8_t *statuses

    size_t table_bytes(size_t n, int timed) noexcept
    table_t table_at(void *memory, size_t n, int timed, void *owner) noexcept
    size_t live(const ledger_t *l) noexcept
    size_t memory_of(const ledger_t *l, int timed) noexcept
    int64_t takeable(const ledger_t *l) noexcept

    ctypedef struct kernel_t:
        void (*open)(
            ledger_t *l, table_t t, int turns, int refresh_on_ack, uint64_t secret
        ) noexcept nogil
        void (*close)(ledger_t *l) noexcept nogil
        size_t (*reserve_needed)(
            ledger_t *l, size_t n, int64_t most, const uint64_t *ids, size_t *missing, int frugal
        ) noexcept nogil
        void (*add_reserve)(ledger_t *l, table_t t) noexcept nogil
        size_t (*desired_size)(const ledger_t *l) noexcept nogil
        void (*install)(ledger_t *l, table_t t) noexcept nogil
        void *(*next_retired)(ledger_t *l) noexcept nogil
        size_t (*buckets_for)(size_t entries) noexcept nogil
        size_t (*limit_of)(size_t n, size_t min_buckets) noexcept nogil
        size_t (*pages_ahead)(ledger_t *l, char **start) noexcept nogil
        int (*populate)(char *start, size_t n) noexcept nogil
        void (*rotate)(ledger_t *l) noexcept nogil
        size_t (*run_batch)(
            ledger_t *l, const batch_t *rows, size_t n, const outcomes_t *out, int decide
        ) noexcept nogil
        size_t (*run_one)(
            ledger_t *l, uint64_t key, uint64_t val, int32_t task, int64_t now,
            const outcomes_t *out
        ) noexcept nogil
        int32_t (*lowest_task)(const int32_t *tasks, size_t n) noexcept nogil
        int (*check_rows)(const columns_t *rows, size_t n, int turns) noexcept nogil
        void (*merge_rows)(ledger_t *l, const columns_t *rows, size_t n) noexcept nogil
        size_t (*list_entries)(ledger_t *l, const columns_t *out) noexcept nogil
        size_t (*list_expired)(ledger_t *l, const columns_t *out) noexcept nogil
        size_t (*take_expired)(ledger_t *l, const columns_t *out, size_t most) noexcept nogil
        size_t (*settle_all)(
            ledger_t *l, const columns_t *out, int timed_out, int64_t before
        ) noexcept nogil
        int64_t (*waiting_orphans)(ledger_t *l) noexcept nogil
        int (*look_up)(ledger_t *l, uint64_t key, const columns_t *out) noexcept nogil
        uint64_t (*fingerprint)(
            const uint8_t *data, uint64_t size, uint64_t seed
        ) noexcept nogil

    const kernel_t *kernel_at(int level) noexcept


cdef extern from "lock.h" nogil:
    ctypedef struct lock_t:
        pass

    int lock_init(lock_t *lock) noexcept
    void lock_destroy(lock_t *lock) noexcept
    void lock_acquire_gil(lock_t *lock) noexcept
    void lock_acquire_nogil(lock_t *lock) noexcept
    void lock_release(lock_t *lock) noexcept
