/* block.h - columns of messages: the loop that takes nearly all of the time.
 *
 * `run_block` applies, or folds, up to BLOCK rows.  Its fast path is for an INIT or an ACK
 * whose entry is in its home bucket or the next, or goes there, and has no marks and no second
 * init.  Every other row takes the slow path, `apply_message`, which is also what the fast path
 * is tested against.  The causes of its speed, in order of effect (measured; bench/README.md):
 *
 *  1. No branch that depends on data.  Found or new, init or not, complete or not are masks: a
 *     mispredicted branch costs as much as a whole row.  A row only notes that its tree is
 *     complete; `collect_outcomes` writes the outcomes.  `value_barrier` prevents the compiler from
 *     turning masks back into branches.
 *  2. A bucket is a cache line and is probed whole, so there is no walk of unpredictable length.
 *  3. Buckets are prefetched a fixed distance ahead, across blocks; in a table beyond the caches
 *     the one after a full bucket too (PEEK_AHEAD), for the probes that go past it.
 *  4. A row's bucket is probed PROBE_AHEAD rows early.  A probe begins a long chain of dependent
 *     loads, of which the out-of-order window holds two when each row starts its own.  A row that
 *     has a read-after-write hazard with a preceding row is probed when it is reached.
 *  5. Few instructions and few registers: all data of a row is in one struct, `block_t`, into which
 *     the columns are copied and from which outcomes are collected.
 *
 * There is a build of the loop for each kind of ledger, so that common ledgers skip tests for
 * features that they do not use.
 */
#ifndef ACKCORE_BLOCK_H
#define ACKCORE_BLOCK_H

#include "message.h"

enum {
    BLOCK = 1024,              /* rows */
    PREFETCH_AHEAD = 32,       /* rows from prefetching a bucket to its row */
    PREFETCH_AHEAD_LARGE = 64, /* the same in a table beyond the caches */
    PEEK_AHEAD = 24,
    PROBE_AHEAD = 4,
    LARGE_TABLE = 8 << 20, /* bytes */
    IDS_PER_LINE = 8       /* of cache */
};
enum {
    PLAIN,  /* no dead entries, no migration under way, no clock, no refresh on ack */
    AGED,   /* dead entries, otherwise plain */
    GENERAL /* any ledger, with tests for all of these */
};

INLINE uint32_t value_barrier(uint32_t x) {
    __asm__("" : "+r"(x));
    return x;
}
INLINE uint64_t value_barrier64(uint64_t x) {
    __asm__("" : "+r"(x));
    return x;
}

/* Slots as bits: 0..2 hold the row's key, 8..10 are free.  DISPLACED: of the bucket after its home
 * bucket, which is full. */
enum { FREE_BITS = 8, ANY_SLOT = 0x707, DISPLACED_BIT = 11, DISPLACED = 1 << DISPLACED_BIT };

typedef struct { /* the rows of a block; from [n] on, fillers for the work ahead */
    /* in */
    uint64_t ids[BLOCK + PROBE_AHEAD];
    uint64_t vals[BLOCK];
    int32_t not_tasks_in[BLOCK]; /* ~task: negative for INIT, 0 for ACK, positive for FAIL, RESET */
    /* where; `slots` are of `buckets`: the home bucket or, if DISPLACED, the next one */
    bucket_t *buckets[BLOCK + PREFETCH_AHEAD_LARGE];
    uint16_t early_mask[BLOCK + PROBE_AHEAD]; /* slots an early probe may find: ANY_SLOT or 0 */
    uint16_t slots[BLOCK + PROBE_AHEAD]; /* found; 0: none yet, or the row took the slow path */
    /* out */
    int32_t not_tasks[BLOCK];          /* of the entry */
    int64_t elapsed[BLOCK];            /* since its first message; with a clock only */
    uint8_t erased_stamps[BLOCK + 64]; /* the entry's, if it was complete and erased; else 0 */
    size_t collected;                  /* rows whose outcomes were written */
    size_t outcomes;                   /* written so far, with those of earlier blocks */
    size_t erased;                     /* entries of those rows, on the fast path */
} block_t;

/* ---- before the rows: their columns and home buckets --------------------------------------- */

/* Copy the rows in.  Each id is read once (`find_next_homes` only prefetches): if another thread
 * writes to the caller's columns, an id must still go to its own home bucket, or the invariant
 * breaks. */
INLINE void copy_rows(block_t *block, const batch_t *in, size_t start, size_t n,
                      const int has_tasks) {
    memcpy(block->ids, in->root_ids + start, n * sizeof *block->ids);
    memset(block->ids + n, 0, PROBE_AHEAD * sizeof *block->ids);
    if (in->vals)
        memcpy(block->vals, in->vals + start, n * sizeof *block->vals);
    else
        memset(block->vals, 0, n * sizeof *block->vals);
    if (has_tasks)
        for (size_t row = 0; row < n; row++) block->not_tasks_in[row] = ~in->tasks[start + row];
}
/* Find the rows' home buckets, and the rows that may be probed early: not those with a read-after-
 * write hazard (one of the PROBE_AHEAD preceding rows has its home bucket here or beside it), those
 * of the last bucket, whose next one is the first, FAILs and RESETs.
 *
 * A distance of 1 suffices: on the fast path a row reads and writes only its home bucket and the
 * next one, so two rows share a bucket only if their homes are at most 1 apart.  Code that goes
 * further (`apply_slowly`, `erase_shifting`) calls `reprobe` for the rows that were probed early.
 *
 * While a reseed is due, no row is probed early, and `probe_late` reads only the home bucket.  So
 * the fast path displaces entries only while none is more than PROBE_LIMIT buckets from home: those
 * that probed past a bucket then lie in the 32 buckets after it, at most 32 x SLOTS = 96.  Only
 * `table_insert` makes greater overflow counts, and it respects OVERFLOW_MAX. */
INLINE void find_homes(block_t *block, ledger_t *ledger, const batch_t *in, size_t n,
                       const int has_tasks, const int mode) {
    uint32_t padded[PROBE_AHEAD + BLOCK], *const homes = padded + PROBE_AHEAD;
    const uint32_t any = ledger->needs_reseed || (!has_tasks && ~in->kind > 0) ? 0 : ANY_SLOT;
    const uint32_t last = (uint32_t)(ledger->cur.n_buckets - 1),
                   last_old = (uint32_t)(ledger->old.n_buckets - 1);
    if (mode != GENERAL || ledger->old.n_buckets == 0) {
        const seed_t seed = ledger->seed;
        bucket_t *const buckets = ledger->cur.buckets;
        const size_t in_table = ledger->cur.n_buckets;
        for (size_t row = 0; row < n; row++) {
            const size_t index = home_bucket(in_table, hash_of(seed, block->ids[row]));
            block->buckets[row] = &buckets[index];
            homes[row] = (uint32_t)index;
        }
    } else
        for (size_t row = 0; row < n; row++) {
            size_t index;
            table_t *table = find_home(ledger, hash_of(ledger->seed, block->ids[row]), &index);
            block->buckets[row] = &table->buckets[index];
            homes[row] = (uint32_t)index; /* of either table: an extra hazard is harmless */
        }
    for (size_t row = 0; row < PROBE_AHEAD; row++)
        padded[row] = UINT32_MAX - 1; /* next to no bucket */
    for (size_t row = 0; row < n; row++) {
        uint32_t hazard = (homes[row] == last) | (homes[row] == last_old);
        if (has_tasks) hazard |= block->not_tasks_in[row] > 0;
        for (size_t k = 1; k <= PROBE_AHEAD; k++) /* unsigned: a difference of -1, 0 or 1 */
            hazard |= homes[row] - padded[PROBE_AHEAD + row - k] + 1 <= 2;
        block->early_mask[row] = (uint16_t)((hazard - 1) & any);
    }
    memset(block->early_mask + n, 0, PROBE_AHEAD * sizeof *block->early_mask);
}
/* Find the home buckets of the rows after the block, for prefetching; without further rows, repeat
 * that of the last row. */
INLINE void find_next_homes(block_t *block, ledger_t *ledger, const uint64_t *ids, size_t n,
                            size_t rest, size_t ahead) {
    const size_t known = rest < ahead ? rest : ahead;
    for (size_t row = 0; row < known; row++) {
        size_t index;
        table_t *table = find_home(ledger, hash_of(ledger->seed, ids[row]), &index);
        block->buckets[n + row] = &table->buckets[index];
    }
    for (size_t row = known; row < ahead; row++) block->buckets[n + row] = block->buckets[n - 1];
}

/* ---- ahead of a row: prefetching and probing ----------------------------------------------- */

/* The columns come from memory too, and hardware prefetching ends at a page. */
INLINE void prefetch_columns(const batch_t *in, size_t start) {
    __builtin_prefetch(in->root_ids + start);
    if (in->vals) __builtin_prefetch(in->vals + start);
    if (in->tasks) __builtin_prefetch(in->tasks + start);
}
/* The times beside a bucket of either table. */
INLINE times_t *times_of(const ledger_t *ledger, const bucket_t *bucket) {
    const table_t *table =
        (uintptr_t)bucket - (uintptr_t)ledger->cur.buckets < ledger->cur.n_buckets * sizeof *bucket
            ? &ledger->cur
            : &ledger->old;
    return &table->times[bucket - table->buckets];
}
INLINE void prefetch_ahead(const ledger_t *ledger, const block_t *block, size_t row, const int mode,
                           const int large) {
    const bucket_t *const bucket =
        block->buckets[row + (large ? PREFETCH_AHEAD_LARGE : PREFETCH_AHEAD)];
    const int timed = mode == GENERAL && ledger->cur.times;
    if (large) {
        const bucket_t *const near = block->buckets[row + PEEK_AHEAD];
        const size_t next = is_full(near);
        prefetch_far(bucket);
        prefetch(near + next);
        if (timed) __builtin_prefetch(&times_of(ledger, near)[next].last, 1, 3);
    } else
        prefetch(bucket);
    if (timed) {
        const times_t *const times = times_of(ledger, bucket);
        __builtin_prefetch(times, 1, 3);
        __builtin_prefetch(&times->last, 1, 3);
    }
}
/* Slots of a bucket that a row may take: its key's, or free ones; higher bits are undefined. */
INLINE uint32_t probe_slots(const ledger_t *ledger, const bucket_t *bucket, uint64_t id,
                            const int mode) {
    uint32_t match, free_slots;
    match_unmasked(bucket, id, &match, &free_slots);
    if (mode == AGED || (mode == GENERAL && ledger->dead)) match &= ~dead_slots(ledger, bucket);
    return match | free_slots << FREE_BITS;
}
INLINE void probe_early(const ledger_t *ledger, block_t *block, size_t row, const int mode) {
    const uint32_t allowed = block->early_mask[row];
    uint32_t slots = probe_slots(ledger, block->buckets[row], block->ids[row], mode) & allowed;
    if (UNLIKELY(slots == 0) && allowed) {
        slots = probe_slots(ledger, block->buckets[row] + 1, block->ids[row], mode) & allowed;
        if (slots) {
            block->buckets[row]++;
            slots |= DISPLACED;
        } else
            prefetch(block->buckets[row] + 2); /* where the slow path goes on */
    }
    block->slots[row] = (uint16_t)slots;
}
/* probe_slots with scalar loads: a store is forwarded to a load of its own width, but a vector load
 * over it stalls. */
INLINE uint32_t probe_each_slot(const ledger_t *ledger, const bucket_t *bucket, uint64_t id,
                                const int mode) {
    uint32_t match = 0, free_slots = 0;
    for (unsigned slot = 0; slot < SLOTS; slot++) {
        const uint32_t empty = value_barrier(bucket->stamps[slot] == 0);
        match |= (value_barrier(bucket->keys[slot] == id) & ~empty) << slot;
        free_slots |= empty << slot;
    }
    if (mode == AGED || (mode == GENERAL && ledger->dead)) match &= ~dead_slots(ledger, bucket);
    return match | free_slots << FREE_BITS;
}
INLINE int is_last_bucket(const table_t *table, const bucket_t *bucket) { /* which may be empty */
    return (uintptr_t)(bucket + 1) == (uintptr_t)table->buckets + table->n_buckets * sizeof *bucket;
}
/* Probe for a row when it is reached, as the early probe was not allowed or found nothing. */
INLINE uint32_t probe_late(const ledger_t *ledger, block_t *block, size_t row, const int mode) {
    const bucket_t *const bucket = block->buckets[row];
    uint32_t slots = probe_each_slot(ledger, bucket, block->ids[row], mode);
    if (slots == 0 && !ledger->needs_reseed && !is_last_bucket(&ledger->cur, bucket) &&
        !is_last_bucket(&ledger->old, bucket)) {
        slots = probe_each_slot(ledger, bucket + 1, block->ids[row], mode);
        if (slots) {
            block->buckets[row]++;
            slots |= DISPLACED;
        }
    }
    block->slots[row] = (uint16_t)slots;
    return slots;
}
/* A row moved entries: repeat the early probes. */
INLINE void reprobe(const ledger_t *ledger, block_t *block, size_t row) {
    for (size_t k = row + 1; k <= row + PROBE_AHEAD; k++) {
        block->buckets[k] -= block->slots[k] >> DISPLACED_BIT;
        probe_early(ledger, block, k, GENERAL);
    }
}

/* ---- after rows: outcomes ------------------------------------------------------------------ */

/* Write the outcomes of trees that rows before `end` completed; subtract their entries in `counts`.
 * The exit of the inner loop is mispredicted, which costs less than doing all 64 rows. */
COLD void collect_outcomes(ledger_t *ledger, block_t *block, size_t end, const outcomes_t *out) {
    size_t written = block->outcomes;
    for (size_t start = block->collected; start < end; start += 64)
        for (uint64_t done = nonzero_bytes(block->erased_stamps + start, end - start); done;
             done &= done - 1) {
            const size_t row = start + (size_t)__builtin_ctzll(done);
            out->root_ids[written] = (int64_t)block->ids[row];
            out->tasks[written] = ~block->not_tasks[row];
            if (out->elapsed) out->elapsed[written] = block->elapsed[row];
            ASSERT(block->erased_stamps[row] <= STAMPS);
            ledger->counts[block->erased_stamps[row]]--;
            written++;
        }
    block->erased += written - block->outcomes;
    block->outcomes = written;
    block->collected = end;
}

/* ---- rows on the slow path ----------------------------------------------------------------- */

COLD void apply_slowly(ledger_t *ledger, block_t *block, const batch_t *in, size_t start,
                       size_t row, int decide, const outcomes_t *out) {
    const int32_t task = in->tasks ? ~block->not_tasks_in[row] : in->kind;
    const int64_t time = in->times ? in->times[start + row] : in->now;
    block->slots[row] = 0;
    if (decide)
        collect_outcomes(ledger, block, row, out); /* outcomes are in the order of their rows */
    block->collected = row + 1;
    block->outcomes += apply_message(ledger, block->ids[row], block->vals[row], task, time, decide,
                                     out, block->outcomes);
    if (UNLIKELY(ledger->needs_reseed))
        memset(block->early_mask + row + 1, 0, (BLOCK - row - 1) * sizeof *block->early_mask);
    reprobe(ledger, block, row);
}
/* Erase the entry that a row completed from a bucket with overflow.  `counts` and `used` follow in
 * collect_outcomes, by `erased_stamps`. */
COLD void erase_shifting(ledger_t *ledger, block_t *block, size_t row, unsigned slot) {
    size_t home;
    table_t *table = find_home(ledger, hash_of(ledger->seed, block->ids[row]), &home);
    table_erase(table, ledger->seed, (size_t)(block->buckets[row] - table->buckets), slot);
    reprobe(ledger, block, row);
}

/* ---- a block ------------------------------------------------------------------------------- */

/* First and last time of the entry in a slot, and how long its tree has taken. */
INLINE void set_times(const ledger_t *ledger, block_t *block, const batch_t *in, size_t start,
                      size_t row, size_t slot, uint32_t is_new, const int decide) {
    times_t *const times = times_of(ledger, block->buckets[row]);
    const int64_t time = in->times ? in->times[start + row] : in->now;
    const int64_t first = is_new ? time : times->first[slot],
                  last = is_new ? time : times->last[slot];
    times->first[slot] = !decide && time < first ? time : first;
    times->last[slot] = decide || time > last ? time : last;
    block->elapsed[row] = (int64_t)((uint64_t)time - (uint64_t)first);
}
/* Run n rows from `start` on, which `rest` more will follow; returns the number of outcomes. */
INLINE size_t run_block(ledger_t *ledger, const batch_t *in, size_t start, size_t n, size_t rest,
                        const outcomes_t *out, size_t outcomes, const int has_tasks,
                        const int decide, const int mode, const int large) {
    const size_t ahead = large ? PREFETCH_AHEAD_LARGE : PREFETCH_AHEAD;
    const uint32_t now = (uint32_t)ledger->stamp;
    const int timed = mode == GENERAL && ledger->cur.times;
    const int restamp = !decide || (mode == GENERAL && ledger->refresh_on_ack);
    /* Otherwise `counts` is updated in bulk: insertions after the block, erasures in
     * collect_outcomes; no found entry changes its stamp. */
    const int count_now = !decide || mode == GENERAL;
    uint32_t inserted = 0;
    block_t block;
    block.collected = block.erased = 0;
    block.outcomes = outcomes;
    copy_rows(&block, in, start, n, has_tasks);
    find_homes(&block, ledger, in, n, has_tasks, mode);
    find_next_homes(&block, ledger, in->root_ids + start + n, n, rest, ahead);
    for (size_t row = 0; row < ahead; row++) prefetch(block.buckets[row]);
    for (size_t row = 0; row < PROBE_AHEAD; row++) probe_early(ledger, &block, row, mode);

    for (size_t line = 0; line < n; line += IDS_PER_LINE) {
        const size_t end = line + IDS_PER_LINE < n ? line + IDS_PER_LINE : n;
        prefetch_columns(in, start + BLOCK + ahead + line);
        for (size_t row = line; row < end; row++) {
            prefetch_ahead(ledger, &block, row, mode, large);
            probe_early(ledger, &block, row + PROBE_AHEAD, mode);

            /* The entry's slot, or a free one. */
            const int32_t init = has_tasks ? block.not_tasks_in[row] : ~in->kind;
            uint32_t slots = block.slots[row];
            if (UNLIKELY(slots == 0) &&
                (init > 0 || (slots = probe_late(ledger, &block, row, mode)) == 0)) {
                apply_slowly(ledger, &block, in, start, row, decide, out);
                continue;
            }
            bucket_t *const bucket = block.buckets[row];
            /* The lowest bit: the key's slot comes before free ones. Where there is a free slot and
             * not the key, the key is nowhere: a search ends here. */
            const uint32_t bit = value_barrier((uint32_t)__builtin_ctz(slots));
            const size_t slot = bit % FREE_BITS;
            const uint32_t is_new = bit / FREE_BITS;
            const int32_t was_stamp =
                (int8_t)bucket->stamps[slot]; /* 0 for a free slot, like all its fields */
            const int32_t was_not_task = bucket->not_tasks[slot];
            ASSERT(slot < SLOTS &&
                   (is_new ? was_stamp == 0 && was_not_task == 0 && bucket->vals[slot] == 0
                           : bucket->keys[slot] == block.ids[row]));
            ASSERT(!(slots & DISPLACED) ||
                   (bucket[-1].stamps[0] && bucket[-1].stamps[1] && bucket[-1].stamps[2]));
            if (UNLIKELY((was_stamp | (was_not_task & init)) < 0)) { /* marks, or a second init */
                apply_slowly(ledger, &block, in, start, row, decide, out);
                continue;
            }

            /* Fold the message in.  Barrier: else the compiler tests old == operand. */
            const uint64_t val = value_barrier64(bucket->vals[slot] ^ block.vals[row]);
            const int32_t not_task = was_not_task | init;
            const uint32_t stamp = restamp ? now : (uint32_t)was_stamp | (now & (0 - is_new));
            bucket->keys[slot] = block.ids[row];
            bucket->vals[slot] = val;
            if (count_now) {
                ledger->counts[was_stamp]--; /* counts[0] is scratch */
                ledger->counts[stamp]++;
            }
            if (timed) set_times(ledger, &block, in, start, row, slot, is_new, decide);
            if (!decide) {
                bucket->not_tasks[slot] = not_task;
                bucket->stamps[slot] = (uint8_t)stamp;
                if (UNLIKELY(slots & DISPLACED)) bucket[-1].overflow_count += is_new;
                continue;
            }

            /* Decide: all ones if its init has come and the XOR is 0. */
            const uint32_t done = value_barrier(-(uint32_t)(val == 0)) & (uint32_t)(not_task >> 31);
            block.not_tasks[row] = not_task;
            block.erased_stamps[row] = (uint8_t)(stamp & done);
            if (UNLIKELY(bucket->overflow_count & (uint8_t)done)) {
                bucket->stamps[slot] = (uint8_t)stamp;
                erase_shifting(ledger, &block, row, (unsigned)slot);
                continue;
            }
            bucket->stamps[slot] = (uint8_t)(stamp & ~done);
            bucket->not_tasks[slot] = not_task & (int32_t)~done;
            /* One more, one less (`done` is 0 or all ones, that is, -1), or both. */
            if (UNLIKELY(slots & DISPLACED)) bucket[-1].overflow_count += (uint8_t)(is_new + done);
        }
    }
    /* Rows of the fast path that found no entry took a free slot. */
    for (size_t row = 0; row < n; row++)
        inserted += ((block.slots[row] & ALL_SLOTS) == 0) & (block.slots[row] != 0);
    if (decide) collect_outcomes(ledger, &block, n, out);
    if (!count_now) ledger->counts[now] += inserted;
    ledger->used += inserted - block.erased;
    return block.outcomes;
}

/* ---- which build of the loop --------------------------------------------------------------- */

INLINE int is_large(const ledger_t *ledger) {
    return (ledger->cur.n_buckets + ledger->old.n_buckets) * sizeof(bucket_t) > LARGE_TABLE;
}
typedef size_t (*run_block_t)(ledger_t *, const batch_t *, size_t start, size_t n, size_t rest,
                              const outcomes_t *, size_t outcomes);
#define BLOCK_OF(NAME, HAS_TASKS, DECIDE, MODE, LARGE) \
    static __attribute__((noinline)) size_t NAME(ledger_t *ledger, const batch_t *in, \
                                                 size_t start, size_t n, size_t rest, \
                                                 const outcomes_t *out, size_t written) { \
        return run_block(ledger, in, start, n, rest, out, written, HAS_TASKS, DECIDE, MODE, \
                         LARGE); \
    }
BLOCK_OF(apply_cached, 1, 1, PLAIN, 0)
BLOCK_OF(apply_large, 1, 1, PLAIN, 1)
BLOCK_OF(apply_aged, 1, 1, AGED, is_large(ledger))
BLOCK_OF(apply_general, 1, 1, GENERAL, is_large(ledger))
BLOCK_OF(kind_cached, 0, 1, PLAIN, 0)
BLOCK_OF(kind_large, 0, 1, PLAIN, 1)
BLOCK_OF(kind_aged, 0, 1, AGED, is_large(ledger))
BLOCK_OF(kind_general, 0, 1, GENERAL, is_large(ledger))
BLOCK_OF(fold_cached, 1, 0, PLAIN, 0)
BLOCK_OF(fold_large, 1, 0, PLAIN, 1)
BLOCK_OF(fold_general, 1, 0, GENERAL, is_large(ledger))

static run_block_t block_for(const ledger_t *ledger, const batch_t *in, int decide) {
    /* Row: one kind, tasks, fold.  Column: cached, large, aged, general; the last two are built for
     * any size. */
    static const run_block_t blocks[3][4] = {{kind_cached, kind_large, kind_aged, kind_general},
                                             {apply_cached, apply_large, apply_aged, apply_general},
                                             {fold_cached, fold_large, fold_general, fold_general}};
    const int general = ledger->old.n_buckets || ledger->cur.times || ledger->refresh_on_ack;
    return blocks[in->tasks ? 1 + !decide : 0][general ? 3 : ledger->dead ? 2 : is_large(ledger)];
}

#endif
