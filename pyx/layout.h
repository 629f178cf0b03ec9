/* layout.h - the memory layout of a ledger, and the functions of a kernel.
 *
 * Read layout.h, bucket_ops.h, table.h, ledger.h, growth.h, expiry.h, message.h, block.h, kernel.h;
 * then ledger.pxi, which allocates and locks.
 *
 * A ledger is an open-addressing hash table with 64-bit root ids for keys, bucketed linear
 * probing, an overflow count per bucket (as in folly's F14) and backward-shift deletion: there are
 * no tombstones.  It grows and shrinks incrementally, two home buckets a row when it
 * grows, and never allocates while it runs.
 *
 * Bucket.  One cache line, three slots, all probed at once:
 *
 *     keys[3] | stamps[3] overflow_count | not_tasks[3] | vals[3]       24 + 3 + 1 + 12 + 24 = 64
 *
 * stamps[s] is 0 when slot s is free - occupancy is a field of its own, so key 0 and value 0 are
 * like any other - and then its not_task and val are 0 too: what is inserted starts from zeros. Its
 * low seven bits are the turn (1..127) in which the entry was inserted or refreshed; its high bit
 * is set if the entry has bits in the side array `marks` (a second init, a fail, ...). not_tasks[s]
 * is ~task, negative once the init was seen, and 0 before: an INIT ORs ~task in, an ACK 0, so both
 * are one operation and the sign shows whether an init has come.  The buckets are followed by
 * `times`, only in a ledger with a clock, and by `marks`, four bytes a bucket, touched only by a
 * second INIT, FAIL and overflow above 255 (a page of zeros that is never written takes no memory).
 *
 * Lookup.  A key's home bucket is its hash scaled to 0..n-1.  Its entry is there or, if that was
 * full, in a later bucket (the first follows the last).  `overflow_count` of a bucket is the number
 * of entries that probed past it: home bucket at or before it, but stored after it.  Unlike
 * F14, searches do not read it: they end at the key, or at the first bucket with a free slot.
 * Erase reads it: 0 means that no entry has to be shifted back.
 *
 * Insert.  Into the first free slot from the home bucket on; each full bucket on the way counts one
 * more overflow.
 *
 * Erase.  Each bucket from home to the entry counts one overflow less.  If the bucket of the freed
 * slot has overflow left, the nearest later entry that probed past that bucket is moved back into
 * the slot, and so on until a bucket without overflow has the free slot.
 *
 * Invariant.  overflow_count > 0 only in a full bucket.  So a free slot ends every search, erase
 * mostly has nothing to shift, and insert/erase churn leaves no residue.
 *
 * Growth.  Scaling is monotone in the hash, so migration reads the old table and writes the new one
 * sequentially: home buckets before `migrated` are in the new table (`cur`), the others in the old
 * (`old`), and one comparison selects the table to probe.  growth.h has the rest, and the load
 * factors.
 *
 * Cost.  An operation touches one cache line, unless the home bucket is full.  In a full table
 * sized up front, 6 % of the entries are displaced from their home bucket, and 20 % of the
 * insertions find it full and probe the next; in one that grew, 3 % and 11 %.
 */
#ifndef ACKCORE_LAYOUT_H
#define ACKCORE_LAYOUT_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "mix.h"

#define COLD static __attribute__((noinline))
#define UNLIKELY(x) __builtin_expect(!!(x), 0)

/* A condition of one step; tested in checked builds (check.h), which setup.py makes. */
#ifdef ACKCORE_CHECKED
#define CHECKED 1
#undef NDEBUG /* Python's own flags define it */
#include <assert.h>
#define ASSERT(x) assert(x)
#else
#define CHECKED 0
#define ASSERT(x) ((void)0)
#endif

enum {
    SLOTS = 3,
    PROBE_LIMIT = 32, /* buckets from home */
    STAMPS = 127,
    MARKED = 0x80,
    MARK_BITS = 4,
    ALL_MARK_BITS = MARK_BITS * SLOTS,
    OVERFLOW_MAX = 255 /* of overflow_count; the fast path of block.h never reaches it */
};
/* Bits of a mark; the first two are FLAG_FAILED and FLAG_TASKS_DIFFER of _records.py. */
enum { MARK_FAILED = 1, MARK_TASKS_DIFFER = 2, MARK_FLAGS = 3, MARK_INITS = 4 };

typedef struct {
    uint64_t keys[SLOTS];
    uint8_t stamps[SLOTS];
    uint8_t overflow_count;
    int32_t not_tasks[SLOTS];
    uint64_t vals[SLOTS];
} bucket_t;

typedef struct {
    uint32_t marks : ALL_MARK_BITS;
    uint32_t overflow_excess : 32 - ALL_MARK_BITS; /* overflow beyond OVERFLOW_MAX */
} marks_t;

typedef struct {
    int64_t first[SLOTS];
    int64_t last[SLOTS];
} times_t;

typedef struct {
    bucket_t *buckets;
    marks_t *marks;
    times_t *times;   /* NULL without a clock */
    size_t n_buckets; /* 0: no table */
    void *owner;      /* a reference to the numpy array of its memory */
} table_t;

typedef struct { /* one entry, out of its table */
    uint64_t key, val;
    int64_t first, last;
    int32_t not_task;
    uint8_t stamp, mark;
} entry_t;

typedef struct { /* a slot position */
    table_t *table;
    size_t index; /* of the bucket */
    unsigned slot;
} place_t;

_Static_assert(sizeof(bucket_t) == 64 && sizeof(marks_t) == 4, "a cache line and four bytes");

/* ---- memory ------------------------------------------------------------------------------ */

enum { TABLE_ALIGN = 64 };

INLINE size_t table_bytes(size_t n, int timed) {
    return n * (sizeof(bucket_t) + sizeof(marks_t) + (timed ? sizeof(times_t) : 0)) + TABLE_ALIGN;
}
/* Lay a table out in zeroed memory of table_bytes(n, timed). */
INLINE table_t table_at(void *memory, size_t n, int timed, void *owner) {
    uintptr_t start = ((uintptr_t)memory + TABLE_ALIGN - 1) & ~(uintptr_t)(TABLE_ALIGN - 1);
    table_t table;
    table.buckets = (bucket_t *)start;
    table.times = timed ? (times_t *)(table.buckets + n) : NULL;
    table.marks = timed ? (marks_t *)(table.times + n) : (marks_t *)(table.buckets + n);
    table.n_buckets = n;
    table.owner = owner;
    return table;
}

typedef struct {
    uint64_t flip, multipliers[2]; /* secret; the multipliers are odd */
} seed_t;

/* ---- the ledger ---------------------------------------------------------------------------- */

enum { TASK_ACK = -1, TASK_FAIL = -2, TASK_RESET = -3 };
/* Status of _records.py. */
enum {
    STATUS_OPEN = 0,
    STATUS_ACKED = 1,
    STATUS_FAILED = 2,
    STATUS_RESET_TIMEOUT = 3,
    STATUS_EXPIRED = 4,
    STATUS_ORPHAN = 5,
    STATUS_ANOMALY = 6
};
enum { MAX_RESERVES = 64, SLICE = 32768 };
#define WHOLE ((size_t)1 << 60) /* as a number of buckets: all */

typedef struct {
    table_t cur;                    /* the table */
    table_t old;                    /* the one that migrates into it; n = 0: none */
    size_t migrated;                /* home buckets of `old` before this one are in `cur` */
    size_t released, released_to;   /* bytes of `old` returned to the system; offset of their end */
    size_t populated;               /* bytes of `cur` whose pages were requested ahead */
    table_t reserves[MAX_RESERVES]; /* preallocated for growth, smallest first */
    size_t n_reserves;
    struct retired *retired; /* tables that the Ledger may free */
    size_t used, limit;      /* entries, with the dead; their maximum before growth */
    size_t min_buckets;      /* it never shrinks below this, the requested size */
    uint64_t secret;
    seed_t seed;
    int64_t counts[STAMPS + 1]; /* entries by stamp; [0] is scratch */
    int64_t dead;               /* entries of age >= turns */
    int stamp, turns;
    int refresh_on_ack;
    int needs_reseed; /* a probe was longer than PROBE_LIMIT */
    /* The next bucket to sweep, and to take expired entries from (old, then cur). */
    size_t sweep_at, take_at;
    /* For shrinking (growth.h): rows since `peak` was reset, a turn counting as `limit` rows; the
     * most entries since; and the buckets that would suffice, 0 if the table fits. */
    size_t work, peak, shrink_to;
    int64_t second_inits, orphans, untaken, growths;
#if CHECKED
    size_t unchecked; /* of check_after */
#endif
} ledger_t;

typedef struct { /* where outcomes go */
    int64_t *root_ids;
    int32_t *tasks;
    uint8_t *kinds;
    int64_t *elapsed; /* NULL without a clock */
} outcomes_t;

typedef struct { /* entries as columns, in or out */
    int64_t *root_ids, *vals;
    int32_t *tasks;
    uint8_t *inits, *flags, *ages;
    int64_t *first, *last; /* NULL without a clock */
    uint8_t *statuses;     /* settling only */
} columns_t;

#define FULL SIZE_MAX /* of kernel_t.reserve_needed: max_entries might be exceeded */

enum { ROWS_BAD, ROWS_ENTRIES, ROWS_PLAIN }; /* of kernel_t.check_rows */

typedef struct { /* columns of messages; without `tasks` all are of one kind */
    const uint64_t *root_ids;
    const uint64_t *vals; /* NULL if the kind ignores them */
    const int32_t *tasks; /* NULL: `kind` */
    const int64_t *times; /* NULL: `now` */
    int64_t now;
    int32_t kind;
} batch_t;

typedef struct retired { /* written over the table that it retires */
    struct retired *next;
    void *owner;
} retired_t;

INLINE int age_of(const ledger_t *ledger, int stamp) {
    int age = ledger->stamp - stamp;
    return age < 0 ? age + STAMPS : age;
}
INLINE int stamp_of(const ledger_t *ledger, int age) {
    int stamp = ledger->stamp - age;
    return stamp < 1 ? stamp + STAMPS : stamp;
}
/* An entry that no message completes becomes
 *   dead       when its age reaches `turns`: lookups skip it, and it keeps its slot;
 *   takeable   dead, and exactly that old: `take_expired` can return it until the next turn;
 *   untaken    was takeable, and was not taken before that turn;
 *   sweepable  dead and older, so untaken: sweeping or migration frees its slot;
 *   orphan     dead, in any of these states, and without an init: `orphans` counts those that left
 *              their slots, `waiting_orphans` counts the others. */
INLINE int64_t takeable(const ledger_t *ledger) {
    return ledger->counts[stamp_of(ledger, ledger->turns)];
}
/* Dead entries that still have slots, and can no longer be taken. */
INLINE int64_t sweepable(const ledger_t *ledger) { return ledger->dead - takeable(ledger); }
INLINE size_t live(const ledger_t *ledger) { return ledger->used - (size_t)ledger->dead; }
/* Bytes of the tables, without those that are only address space: what is behind the migrated
 * buckets in `cur`, which is filled in the order of `old`, and what `old` has returned. */
INLINE size_t memory_of(const ledger_t *ledger, int timed) {
    const table_t *const cur = &ledger->cur, *const old = &ledger->old;
    if (old->n_buckets == 0) return table_bytes(cur->n_buckets, timed);
    return table_bytes(cur->n_buckets * ledger->migrated / old->n_buckets, timed) +
           table_bytes(old->n_buckets, timed) - ledger->released;
}

/* ---- the kernel ---------------------------------------------------------------------------- */

/* One build of kernel.h; there is one for each level of SIMD, with the same results. */
typedef struct {
    void (*open)(ledger_t *, table_t, int turns, int refresh_on_ack, uint64_t secret);
    void (*close)(ledger_t *);
    size_t (*reserve_needed)(ledger_t *, size_t n, int64_t most, const uint64_t *ids,
                             size_t *missing, int frugal);
    void (*add_reserve)(ledger_t *, table_t);
    size_t (*desired_size)(const ledger_t *);
    void (*install)(ledger_t *, table_t);
    void *(*next_retired)(ledger_t *);
    size_t (*buckets_for)(size_t entries);
    size_t (*limit_of)(size_t n, size_t min_buckets);
    size_t (*pages_ahead)(ledger_t *, char **from);
    int (*populate)(char *from, size_t bytes);
    void (*rotate)(ledger_t *);
    size_t (*run_batch)(ledger_t *, const batch_t *, size_t n, const outcomes_t *, int decide);
    size_t (*run_one)(ledger_t *, uint64_t key, uint64_t val, int32_t task, int64_t now,
                      const outcomes_t *);
    int32_t (*lowest_task)(const int32_t *, size_t n);
    int (*check_rows)(const columns_t *, size_t n, int turns);
    void (*merge_rows)(ledger_t *, const columns_t *, size_t n);
    size_t (*list_entries)(ledger_t *, const columns_t *);
    size_t (*list_expired)(ledger_t *, const columns_t *);
    size_t (*take_expired)(ledger_t *, const columns_t *, size_t most);
    size_t (*settle_all)(ledger_t *, const columns_t *, int timed_out, int64_t before);
    int64_t (*waiting_orphans)(ledger_t *);
    int (*look_up)(ledger_t *, uint64_t key, const columns_t *);
    uint64_t (*fingerprint)(const uint8_t *data, uint64_t size, uint64_t seed);
} kernel_t;

#if defined(__x86_64__)
#define HAS_X86_KERNELS 1
extern const kernel_t kernel_avx2, kernel_avx512;
#else
#define HAS_X86_KERNELS 0
#endif
extern const kernel_t kernel_baseline;

/* The kernel for a level - 0 baseline, 1 AVX2, 2 AVX-512 - or NULL where it cannot run. */
const kernel_t *kernel_at(int level);

#endif
