/* block.h - columns of messages: the loop that nearly all time is spent in.
 *
 * `run_block` applies, or folds, up to BLOCK rows.  Its fast path is for an INIT or an ACK
 * whose entry is in its home bucket or the next, or goes there, and has no marks and no second
 * init.  Every other row takes the slow path, `apply_message`, which is also what the fast path
 * is tested against.  What makes it fast, in order of effect (measured; bench/README.md):
 *
 *  1. No branch that depends on data.  Found or new, init or not, complete or not are masks: a
 *     mispredicted branch costs as much as a whole row.  A row only notes that its tree is
 *     complete; `collect_outcomes` writes the outcomes.  `value_barrier` keeps the compiler from
 *     turning masks back into branches.
 *  2. A bucket is a cache line and is probed whole, so there is no walk of unpredictable length.
 *  3. Buckets are prefetched a fixed distance ahead, across blocks; in a table beyond the caches
 *     the next one too where there is overflow (PEEK_AHEAD), for the probes that go past it.
 *  4. A row's bucket is probed PROBE_AHEAD rows early.  A probe begins a long chain of dependent
 *     loads, of which the out-of-order window holds two when each row starts its own.  A row that
 *     has a read-after-write hazard with a preceding row is probed when it is reached.
 *  5. Few instructions and few registers: what a row needs is in one struct, `block_t`, into which
 *     the columns are copied and from which outcomes are collected.
 *
 * There is a build of the loop for each kind of ledger, so that the common ones do not test for
 * what they do not have.
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
    GENERAL /* any ledger: it tests for all of these */
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

typedef struct { /* the rows of a block; [n] and on are fillers, for what is done ahead */
    /* in */
    uint64_t ids[BLOCK + PROBE_AHEAD];
    uint64_t vals[BLOCK];
    int32_t not_tasks_in[BLOCK]; /* ~task: negative for INIT, 0 for ACK, positive for FAIL, RESET */
    /* where; `buckets` is what `slots` is of: the home bucket or, DISPLACED, the next one */
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

/* Copy the rows in.  What matters is read once (`find_next_homes` only prefetches): should another
 * thread write to the caller's columns, an id must still go to its own home bucket, or the
 * invariant breaks. */
INLINE void copy_rows(block_t *w, const batch_t *in, size_t p, size_t n, const int has_tasks) {
    memcpy(w->ids, in->root_ids + p, n * sizeof *w->ids);
    memset(w->ids + n, 0, PROBE_AHEAD * sizeof *w->ids);
    if (in->vals)
        memcpy(w->vals, in->vals + p, n * sizeof *w->vals);
    else
        memset(w->vals, 0, n * sizeof *w->vals);
    if (has_tasks)
        for (size_t j = 0; j < n; j++) w->not_tasks_in[j] = ~in->tasks[p + j];
}
/* The rows' home buckets, and which rows may be probed early: not those with a read-after-write
 * hazard (one of the PROBE_AHEAD preceding rows has its home bucket here or beside it), not those
 * of the last bucket, whose next one is the first, and not FAILs and RESETs.
 *
 * Beside it is enough: on the fast path a row reads and writes its home bucket and the next one
 * only, so two rows have a bucket in common only if their homes are at most 1 apart.  What goes
 * further (`apply_slowly`, `erase_shifting`) calls `reprobe` for the rows that were probed early.
 *
 * While a reseed is due, none, and `probe_late` looks at the home bucket only.  So the fast path
 * displaces entries only while none is more than PROBE_LIMIT buckets from home: those that probed
 * past a bucket then lie in the 32 buckets after it, 32 x SLOTS = 96 at most.  Only
 * `table_insert` makes greater overflow counts, and it minds OVERFLOW_MAX. */
INLINE void find_homes(block_t *w, ledger_t *l, const batch_t *in, size_t n, const int has_tasks,
                       const int mode) {
    uint32_t padded[PROBE_AHEAD + BLOCK], *const homes = padded + PROBE_AHEAD;
    const uint32_t any = l->needs_reseed || (!has_tasks && ~in->kind > 0) ? 0 : ANY_SLOT;
    const uint32_t last = (uint32_t)(l->cur.n - 1), last_old = (uint32_t)(l->old.n - 1);
    if (mode != GENERAL || l->old.n == 0) {
        const seed_t seed = l->seed;
        bucket_t *const buckets = l->cur.buckets;
        const size_t in_table = l->cur.n;
        for (size_t j = 0; j < n; j++) {
            const size_t i = home_bucket(in_table, hash_of(seed, w->ids[j]));
            w->buckets[j] = &buckets[i];
            homes[j] = (uint32_t)i;
        }
    } else
        for (size_t j = 0; j < n; j++) {
            size_t i;
            table_t *t = find_home(l, hash_of(l->seed, w->ids[j]), &i);
            w->buckets[j] = &t->buckets[i];
            homes[j] = (uint32_t)i; /* of either table: a hazard too many does no harm */
        }
    for (size_t j = 0; j < PROBE_AHEAD; j++) padded[j] = UINT32_MAX - 1; /* beside no bucket */
    for (size_t j = 0; j < n; j++) {
        uint32_t hazard = (homes[j] == last) | (homes[j] == last_old);
        if (has_tasks) hazard |= w->not_tasks_in[j] > 0;
        for (size_t k = 1; k <= PROBE_AHEAD; k++) /* unsigned: a difference of -1, 0 or 1 */
            hazard |= homes[j] - padded[PROBE_AHEAD + j - k] + 1 <= 2;
        w->early_mask[j] = (uint16_t)((hazard - 1) & any);
    }
    memset(w->early_mask + n, 0, PROBE_AHEAD * sizeof *w->early_mask);
}
/* The home buckets of the rows that follow the block, to be prefetched; for want of rows, the last
 * row's. */
INLINE void find_next_homes(block_t *w, ledger_t *l, const uint64_t *ids, size_t n, size_t rest,
                            size_t ahead) {
    const size_t known = rest < ahead ? rest : ahead;
    for (size_t j = 0; j < known; j++) {
        size_t i;
        table_t *t = find_home(l, hash_of(l->seed, ids[j]), &i);
        w->buckets[n + j] = &t->buckets[i];
    }
    for (size_t j = known; j < ahead; j++) w->buckets[n + j] = w->buckets[n - 1];
}

/* ---- ahead of a row: prefetching and probing ----------------------------------------------- */

/* The columns come from memory as well, and hardware prefetches no further than a page. */
INLINE void prefetch_columns(const batch_t *in, size_t p) {
    __builtin_prefetch(in->root_ids + p);
    if (in->vals) __builtin_prefetch(in->vals + p);
    if (in->tasks) __builtin_prefetch(in->tasks + p);
}
/* The times beside a bucket of either table. */
INLINE times_t *times_of(const ledger_t *l, const bucket_t *b) {
    const table_t *t =
        (uintptr_t)b - (uintptr_t)l->cur.buckets < l->cur.n * sizeof *b ? &l->cur : &l->old;
    return &t->times[b - t->buckets];
}
INLINE void prefetch_ahead(const ledger_t *l, const block_t *w, size_t j, const int mode,
                           const int large) {
    const bucket_t *const b = w->buckets[j + (large ? PREFETCH_AHEAD_LARGE : PREFETCH_AHEAD)];
    if (large) {
        const bucket_t *const near = w->buckets[j + PEEK_AHEAD];
        prefetch_far(b);
        prefetch(near + (near->overflow_count != 0));
    } else
        prefetch(b);
    if (mode == GENERAL && l->cur.times) {
        const times_t *const t = times_of(l, b);
        __builtin_prefetch(t, 1, 3);
        __builtin_prefetch(&t->last, 1, 3);
    }
}
/* Slots of a bucket that a row may take: its key's, or free ones; higher bits are undefined. */
INLINE uint32_t probe_slots(const ledger_t *l, const bucket_t *b, uint64_t id, const int mode) {
    uint32_t match, free_;
    match_unmasked(b, id, &match, &free_);
    if (mode == AGED || (mode == GENERAL && l->dead)) match &= ~dead_slots(l, b);
    return match | free_ << FREE_BITS;
}
INLINE void probe_early(const ledger_t *l, block_t *w, size_t j, const int mode) {
    const uint32_t allowed = w->early_mask[j];
    uint32_t slots = probe_slots(l, w->buckets[j], w->ids[j], mode) & allowed;
    if (UNLIKELY(slots == 0) && allowed) {
        slots = probe_slots(l, w->buckets[j] + 1, w->ids[j], mode) & allowed;
        if (slots) {
            w->buckets[j]++;
            slots |= DISPLACED;
        }
    }
    w->slots[j] = (uint16_t)slots;
}
/* probe_slots with scalar loads: a store is forwarded to a load of its own width, but a vector load
 * over it stalls. */
INLINE uint32_t probe_each_slot(const ledger_t *l, const bucket_t *b, uint64_t id, const int mode) {
    uint32_t match = 0, free_ = 0;
    for (unsigned s = 0; s < SLOTS; s++) {
        const uint32_t empty = value_barrier(b->stamps[s] == 0);
        match |= (value_barrier(b->keys[s] == id) & ~empty) << s;
        free_ |= empty << s;
    }
    if (mode == AGED || (mode == GENERAL && l->dead)) match &= ~dead_slots(l, b);
    return match | free_ << FREE_BITS;
}
INLINE int is_last_bucket(const table_t *t, const bucket_t *b) { /* t may be empty */
    return (uintptr_t)(b + 1) == (uintptr_t)t->buckets + t->n * sizeof *b;
}
/* Probe for a row when it is reached, as the early probe was not allowed or found nothing. */
INLINE uint32_t probe_late(const ledger_t *l, block_t *w, size_t j, const int mode) {
    const bucket_t *const b = w->buckets[j];
    uint32_t slots = probe_each_slot(l, b, w->ids[j], mode);
    if (slots == 0 && !l->needs_reseed && !is_last_bucket(&l->cur, b) &&
        !is_last_bucket(&l->old, b)) {
        slots = probe_each_slot(l, b + 1, w->ids[j], mode);
        if (slots) {
            w->buckets[j]++;
            slots |= DISPLACED;
        }
    }
    w->slots[j] = (uint16_t)slots;
    return slots;
}
/* Row j moved entries: what was probed early is probed again. */
INLINE void reprobe(const ledger_t *l, block_t *w, size_t j) {
    for (size_t k = j + 1; k <= j + PROBE_AHEAD; k++) {
        w->buckets[k] -= w->slots[k] >> DISPLACED_BIT;
        probe_early(l, w, k, GENERAL);
    }
}

/* ---- after rows: outcomes ------------------------------------------------------------------ */

/* Write the outcomes of the trees that rows before `end` completed, and count their entries out.
 * The exit of the inner loop is mispredicted, which costs less than doing all 64 rows. */
COLD void collect_outcomes(ledger_t *l, block_t *w, size_t end, const outcomes_t *out) {
    size_t m = w->outcomes;
    for (size_t start = w->collected; start < end; start += 64)
        for (uint64_t done = nonzero_bytes(w->erased_stamps + start, end - start); done;
             done &= done - 1) {
            const size_t j = start + (size_t)__builtin_ctzll(done);
            out->root_ids[m] = (int64_t)w->ids[j];
            out->tasks[m] = ~w->not_tasks[j];
            if (out->elapsed) out->elapsed[m] = w->elapsed[j];
            ASSERT(w->erased_stamps[j] <= STAMPS);
            l->counts[w->erased_stamps[j]]--;
            m++;
        }
    w->erased += m - w->outcomes;
    w->outcomes = m;
    w->collected = end;
}

/* ---- rows on the slow path ----------------------------------------------------------------- */

COLD void apply_slowly(ledger_t *l, block_t *w, const batch_t *in, size_t p, size_t j, int decide,
                       const outcomes_t *out) {
    const int32_t task = in->tasks ? ~w->not_tasks_in[j] : in->kind;
    const int64_t time = in->times ? in->times[p + j] : in->now;
    w->slots[j] = 0;
    if (decide) collect_outcomes(l, w, j, out); /* outcomes are in the order of their rows */
    w->collected = j + 1;
    w->outcomes += apply_message(l, w->ids[j], w->vals[j], task, time, decide, out, w->outcomes);
    if (UNLIKELY(l->needs_reseed))
        memset(w->early_mask + j + 1, 0, (BLOCK - j - 1) * sizeof *w->early_mask);
    reprobe(l, w, j);
}
/* Erase the entry that row j completed from a bucket with overflow.  `counts` and `used` follow in
 * collect_outcomes, by `erased_stamps`. */
COLD void erase_shifting(ledger_t *l, block_t *w, size_t j, unsigned s) {
    size_t home;
    table_t *t = find_home(l, hash_of(l->seed, w->ids[j]), &home);
    table_erase(t, l->seed, (size_t)(w->buckets[j] - t->buckets), s);
    reprobe(l, w, j);
}

/* ---- a block ------------------------------------------------------------------------------- */

/* First and last time of the entry in a slot, and how long its tree has taken. */
INLINE void set_times(const ledger_t *l, block_t *w, const batch_t *in, size_t p, size_t j,
                      size_t s, uint32_t is_new, const int decide) {
    times_t *const t = times_of(l, w->buckets[j]);
    const int64_t time = in->times ? in->times[p + j] : in->now;
    const int64_t first = is_new ? time : t->first[s], last = is_new ? time : t->last[s];
    t->first[s] = !decide && time < first ? time : first;
    t->last[s] = decide || time > last ? time : last;
    w->elapsed[j] = (int64_t)((uint64_t)time - (uint64_t)first);
}
/* Run rows p to p + n, which `rest` more will follow; returns how many outcomes there are now. */
INLINE size_t run_block(ledger_t *l, const batch_t *in, size_t p, size_t n, size_t rest,
                        const outcomes_t *out, size_t outcomes, const int has_tasks,
                        const int decide, const int mode, const int large) {
    const size_t ahead = large ? PREFETCH_AHEAD_LARGE : PREFETCH_AHEAD;
    const uint32_t now = (uint32_t)l->stamp;
    const int timed = mode == GENERAL && l->cur.times;
    const int restamp = !decide || (mode == GENERAL && l->refresh_on_ack);
    /* Otherwise `counts` is updated in bulk: insertions after the block, erasures in
     * collect_outcomes; no found entry changes its stamp. */
    const int count_now = !decide || mode == GENERAL;
    uint32_t inserted = 0;
    block_t w;
    w.collected = w.erased = 0;
    w.outcomes = outcomes;
    copy_rows(&w, in, p, n, has_tasks);
    find_homes(&w, l, in, n, has_tasks, mode);
    find_next_homes(&w, l, in->root_ids + p + n, n, rest, ahead);
    for (size_t j = 0; j < ahead; j++) prefetch(w.buckets[j]);
    for (size_t j = 0; j < PROBE_AHEAD; j++) probe_early(l, &w, j, mode);

    for (size_t line = 0; line < n; line += IDS_PER_LINE) {
        const size_t end = line + IDS_PER_LINE < n ? line + IDS_PER_LINE : n;
        prefetch_columns(in, p + BLOCK + ahead + line);
        for (size_t j = line; j < end; j++) {
            prefetch_ahead(l, &w, j, mode, large);
            probe_early(l, &w, j + PROBE_AHEAD, mode);

            /* The entry's slot, or a free one. */
            const int32_t init = has_tasks ? w.not_tasks_in[j] : ~in->kind;
            uint32_t slots = w.slots[j];
            if (UNLIKELY(slots == 0) && (init > 0 || (slots = probe_late(l, &w, j, mode)) == 0)) {
                apply_slowly(l, &w, in, p, j, decide, out);
                continue;
            }
            bucket_t *const b = w.buckets[j];
            /* The lowest bit: the key's slot comes before free ones. Where there is a free slot and
             * not the key, the key is nowhere: a search ends here. */
            const uint32_t slot = value_barrier((uint32_t)__builtin_ctz(slots));
            const size_t s = slot % FREE_BITS;
            const uint32_t is_new = slot / FREE_BITS;
            const int32_t was_stamp = (int8_t)b->stamps[s]; /* 0 of a free slot, as all else */
            const int32_t was_not_task = b->not_tasks[s];
            ASSERT(s < SLOTS && (is_new ? was_stamp == 0 && was_not_task == 0 && b->vals[s] == 0
                                        : b->keys[s] == w.ids[j]));
            ASSERT(!(slots & DISPLACED) || (b[-1].stamps[0] && b[-1].stamps[1] && b[-1].stamps[2]));
            if (UNLIKELY((was_stamp | (was_not_task & init)) < 0)) { /* marks, or a second init */
                apply_slowly(l, &w, in, p, j, decide, out);
                continue;
            }

            /* Fold the message in.  Barrier: else the compiler tests old == operand. */
            const uint64_t val = value_barrier64(b->vals[s] ^ w.vals[j]);
            const int32_t not_task = was_not_task | init;
            const uint32_t stamp = restamp ? now : (uint32_t)was_stamp | (now & (0 - is_new));
            b->keys[s] = w.ids[j];
            b->vals[s] = val;
            if (count_now) {
                l->counts[was_stamp]--; /* counts[0] is scratch */
                l->counts[stamp]++;
            }
            if (timed) set_times(l, &w, in, p, j, s, is_new, decide);
            if (!decide) {
                b->not_tasks[s] = not_task;
                b->stamps[s] = (uint8_t)stamp;
                if (UNLIKELY(slots & DISPLACED)) b[-1].overflow_count += is_new;
                continue;
            }

            /* Decide: all ones if its init has come and the XOR is 0. */
            const uint32_t done = value_barrier(-(uint32_t)(val == 0)) & (uint32_t)(not_task >> 31);
            w.not_tasks[j] = not_task;
            w.erased_stamps[j] = (uint8_t)(stamp & done);
            if (UNLIKELY(b->overflow_count & (uint8_t)done)) {
                b->stamps[s] = (uint8_t)stamp;
                erase_shifting(l, &w, j, (unsigned)s);
                continue;
            }
            b->stamps[s] = (uint8_t)(stamp & ~done);
            b->not_tasks[s] = not_task & (int32_t)~done;
            /* One more, one less (`done` is 0 or all ones, that is, -1), or both. */
            if (UNLIKELY(slots & DISPLACED)) b[-1].overflow_count += (uint8_t)(is_new + done);
        }
    }
    /* Rows of the fast path that found no entry took a free slot. */
    for (size_t j = 0; j < n; j++) inserted += ((w.slots[j] & ALL_SLOTS) == 0) & (w.slots[j] != 0);
    if (decide) collect_outcomes(l, &w, n, out);
    if (!count_now) l->counts[now] += inserted;
    l->used += inserted - w.erased;
    return w.outcomes;
}

/* ---- which build of the loop --------------------------------------------------------------- */

typedef size_t (*run_block_t)(ledger_t *, const batch_t *, size_t p, size_t n, size_t rest,
                              const outcomes_t *, size_t outcomes);
#define BLOCK_OF(NAME, HAS_TASKS, DECIDE, MODE, LARGE) \
    static __attribute__((noinline)) size_t NAME(ledger_t *l, const batch_t *in, size_t p, \
                                                 size_t n, size_t rest, const outcomes_t *out, \
                                                 size_t m) { \
        return run_block(l, in, p, n, rest, out, m, HAS_TASKS, DECIDE, MODE, LARGE); \
    }
BLOCK_OF(apply_cached, 1, 1, PLAIN, 0)
BLOCK_OF(apply_large, 1, 1, PLAIN, 1)
BLOCK_OF(apply_aged, 1, 1, AGED, 1)
BLOCK_OF(apply_general, 1, 1, GENERAL, 1)
BLOCK_OF(kind_cached, 0, 1, PLAIN, 0)
BLOCK_OF(kind_large, 0, 1, PLAIN, 1)
BLOCK_OF(kind_aged, 0, 1, AGED, 1)
BLOCK_OF(kind_general, 0, 1, GENERAL, 1)
BLOCK_OF(fold_cached, 1, 0, PLAIN, 0)
BLOCK_OF(fold_large, 1, 0, PLAIN, 1)
BLOCK_OF(fold_general, 1, 0, GENERAL, 1)

static run_block_t block_for(const ledger_t *l, const batch_t *in, int decide) {
    /* Row: one kind, tasks, fold.  Column: cached, large, aged, general.  The last two are built as
     * large only, which does for any size: in a small table they prefetch further ahead than they
     * need, and once more a row. */
    static const run_block_t blocks[3][4] = {{kind_cached, kind_large, kind_aged, kind_general},
                                             {apply_cached, apply_large, apply_aged, apply_general},
                                             {fold_cached, fold_large, fold_general, fold_general}};
    const int large = l->cur.n * sizeof(bucket_t) > LARGE_TABLE;
    const int general = l->old.n || l->cur.times || l->refresh_on_ack;
    return blocks[in->tasks ? 1 + !decide : 0][general ? 3 : l->dead ? 2 : large];
}

#endif
