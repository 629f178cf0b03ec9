/* block.h - rows: one message at a time, and the loop over columns of them.
 *
 * `apply_message` is the meaning of a message (SEMANTICS 2 and 4) and handles every case.  `run_block` is
 * the same for columns, with a straight path for what nearly every row is: an INIT or an ACK whose
 * entry is in its home bucket or the one after that, or goes there.  What makes it fast, in order of
 * effect (measured; bench/README.md):
 *
 *  1. No branch that data decides.  Found or not, init or not, complete or not are masks; a
 *     mispredicted branch costs as much as the whole row.  A row only notes whether it has an outcome,
 *     and `collect_outcomes` collects them.  `value_barrier` keeps the compiler from turning masks into branches.
 *  2. A bucket is a cache line and is probed whole, so there is no walk whose length varies.
 *  3. Buckets are prefetched a fixed distance ahead, across blocks, and in a table beyond the caches
 *     the bucket after one with overflow too (`PEEK_AHEAD`), for the probes that go past it.
 *  4. A bucket is probed `PROBE_AHEAD` rows ahead of its row.  A probe begins a long chain of dependent
 *     loads, of which the out-of-order window holds two when each row starts its own.  An entry that is
 *     not in its home bucket is nearly always in the next one, which is the only branch.  Where there is
 *     a read-after-write hazard with a preceding row, the probe is left to the row's own turn.
 *  5. Few instructions and few registers: all that a row needs lies in one struct (`work_t`), to
 *     which the block's columns are copied, and from which its outcomes are collected.
 *
 * A PLAIN ledger has no dead entries, no move to another table under way, no clock and no refresh on
 * ack; an AGED one has dead entries and is plain otherwise.  The GENERAL ones pay for all those tests,
 * which are predictable branches.
 */
#ifndef ACKCORE_BLOCK_H
#define ACKCORE_BLOCK_H

#include "ledger.h"

enum {
    PREFETCH_AHEAD = 32,        /* rows from prefetching a bucket to its row */
    PREFETCH_AHEAD_LARGE = 64, /* in a table beyond the caches */
    PEEK_AHEAD = 24,
    PROBE_AHEAD = 4,
    BLOCK = 1024,
    LARGE_TABLE = 8 << 20, /* bytes */
    IDS_PER_LINE = 8         /* ids in a cache line */
};
enum { PLAIN, AGED, GENERAL }; /* ledgers, as the loop over a block sees them */

INLINE uint32_t value_barrier(uint32_t x) {
    __asm__("" : "+r"(x));
    return x;
}
INLINE uint64_t value_barrier64(uint64_t x) {
    __asm__("" : "+r"(x));
    return x;
}

/* ---- one message ------------------------------------------------------------------------- */

static void set_stamp(ledger_t *l, place_t at, int stamp) {
    uint8_t *was = &at.table->buckets[at.i].stamps[at.s];
    l->counts[*was & ~MARKED]--;
    l->counts[stamp]++;
    *was = (uint8_t)((*was & MARKED) | stamp);
}
static void add_mark(place_t at, uint8_t bits) {
    if (bits == 0) return;
    mark_put(at.table, at.i, at.s, mark_in(at.table, at.i, at.s) | bits);
    at.table->buckets[at.i].stamps[at.s] |= MARKED;
}
/* Apply (`decide`) or fold one message; returns the outcomes written, 0 or 1, at out[m]. */
COLD size_t apply_message(ledger_t *l, uint64_t key, uint64_t val, int32_t task, int64_t time, int decide,
                const outcomes_t *out, size_t m) {
    place_t at;
    bucket_t *b;
    int reset = 0, kind = STATUS_OPEN;
    if (!ledger_find(l, key, &at)) {
        entry_t e = {key, 0, time, time, 0, (uint8_t)l->stamp, 0};
        ledger_insert(l, e, &at);
    }
    b = &at.table->buckets[at.i];
    if (task >= TASK_ACK) b->vals[at.s] ^= val;
    if (task >= 0) {
        int32_t was = b->not_tasks[at.s], is = ~task;
        if (was < 0) {
            l->second_inits++;
            add_mark(at, (uint8_t)(MARK_INITS | (was != is ? MARK_TASKS_DIFFER : 0)));
            if (!decide && was < is) is = was; /* folding keeps the greatest task */
        }
        b->not_tasks[at.s] = is;
    } else if (task == TASK_FAIL)
        add_mark(at, MARK_FAILED);
    else if (task == TASK_RESET)
        reset = 1;
    if (task <= TASK_FAIL || l->refresh_on_ack || !decide) set_stamp(l, at, l->stamp);
    if (at.table->times) {
        times_t *t = &at.table->times[at.i];
        if (decide || time > t->last[at.s]) t->last[at.s] = time;
        if (!decide && time < t->first[at.s]) t->first[at.s] = time;
    }
    if (!decide || b->not_tasks[at.s] >= 0) return 0;
    if (b->vals[at.s] == 0)
        kind = STATUS_ACKED;
    else if (mark_in(at.table, at.i, at.s) & MARK_FAILED)
        kind = STATUS_FAILED;
    else if (reset)
        kind = STATUS_RESET_TIMEOUT;
    else
        return 0;
    out->root_ids[m] = (int64_t)key;
    out->tasks[m] = ~b->not_tasks[at.s];
    out->kinds[m] = (uint8_t)kind;
    if (out->elapsed) out->elapsed[m] = (int64_t)((uint64_t)time - (uint64_t)at.table->times[at.i].first[at.s]);
    if (kind != STATUS_RESET_TIMEOUT) ledger_erase(l, at);
    return 1;
}

/* The times beside a bucket of either table. */
INLINE times_t *times_of(const ledger_t *l, const bucket_t *b) {
    const table_t *t = (uintptr_t)b - (uintptr_t)l->cur.buckets < l->cur.n * sizeof *b ? &l->cur : &l->old;
    return &t->times[b - t->buckets];
}
INLINE void prefetch_times(const times_t *t) {
    __builtin_prefetch(t, 1, 3);
    __builtin_prefetch(&t->last, 1, 3);
}

/* ---- a block of messages, between two looks at the table's size ---------------------------- */

/* Slots of a bucket as bits: 0 to 2 where the root is, 8 to 10 where it may go; and whether the bucket is
 * not the row's home, which is full, but the one after it. */
enum { FREE_BITS = 8, ANY_SLOT = 0x707, DISPLACED_BIT = 16, DISPLACED = 1 << DISPLACED_BIT };

typedef struct { /* what the rows of a block need, and what became of them, by row */
    uint8_t put[2 * FREE_BITS]; /* the stamp to put into a slot, by its bit: none, or the present one */
    bucket_t *homes[BLOCK + PREFETCH_AHEAD_LARGE];
    uint64_t ids[BLOCK + PROBE_AHEAD];
    uint64_t vals[BLOCK];          /* after the row, in a ledger with a clock: how long the tree took */
    int32_t inits[BLOCK + PROBE_AHEAD];  /* ~task: negative for an INIT, 0 for an ACK; after the row: the entry's */
    uint32_t slots[BLOCK + PROBE_AHEAD]; /* which there are; before the look: which may be seen */
    uint32_t home_indexes[PROBE_AHEAD + BLOCK + PROBE_AHEAD]; /* of the home buckets; before and after the block's, fillers */
    uint8_t left[BLOCK + 64]; /* the stamp of the entry that left complete; 0: none did */
} work_t;

/* Which of the slots asked for a row may take. */
INLINE uint32_t probe_slots(const ledger_t *l, const bucket_t *b, uint64_t id, uint32_t asked, const int mode) {
    uint32_t match, free_;
    probe_unmasked(b, id, &match, &free_);
    if (mode == AGED || (mode == GENERAL && l->dead)) match &= ~dead_slots(l, b);
    return (match | free_ << FREE_BITS) & asked;
}
/* Probe early: the home bucket, and if that has nothing, the next one, where the rest nearly always is. */
INLINE void probe_early(const ledger_t *l, work_t *w, size_t e, const int mode) {
    const uint32_t asked = w->slots[e];
    uint32_t slots = probe_slots(l, w->homes[e], w->ids[e], asked, mode);
    if (UNLIKELY(slots == 0) && asked) {
        slots = probe_slots(l, w->homes[e] + 1, w->ids[e], asked, mode);
        if (slots) {
            w->homes[e]++;
            slots |= DISPLACED;
        }
    }
    w->slots[e] = slots;
}
/* Probe in a row's own turn, on a read-after-write hazard with a preceding row.  Slot by slot: a store is
 * forwarded to a load of the same width, but a vector load over it stalls. */
INLINE uint32_t probe_late(const ledger_t *l, const bucket_t *b, uint64_t id, const int mode) {
    uint32_t match = 0, free_ = 0;
    for (unsigned s = 0; s < SLOTS; s++) {
        const uint32_t empty = value_barrier(b->stamps[s] == 0);
        match |= (value_barrier(b->keys[s] == id) & ~empty) << s;
        free_ |= empty << s;
    }
    if (mode == AGED || (mode == GENERAL && l->dead)) match &= ~dead_slots(l, b);
    return match | free_ << FREE_BITS;
}
/* Row j moved entries: the rows that were probed early are probed again.  In a needs_reseed table nothing is found early, so that `over` of a bucket
 * counts no more than the entries of `PROBE_LIMIT` buckets, but by `row`. */
INLINE void reprobe(const ledger_t *l, work_t *w, size_t j, const int mode) {
    const uint32_t any = l->needs_reseed ? 0 : ANY_SLOT;
    for (size_t e = j + 1; e <= j + PROBE_AHEAD; e++) {
        w->homes[e] -= w->slots[e] >> DISPLACED_BIT;
        w->slots[e] = w->slots[e] ? any : 0;
        probe_early(l, w, e, mode);
    }
}
/* Copy the rows in.  What matters is read once (`find_next_homes` only prefetches): should another thread
 * write to the caller's columns, an id must still go to its own home bucket, or the table's invariant breaks. */
INLINE void read_rows(work_t *w, const batch_t *in, size_t p, size_t n, const int has_tasks) {
    memcpy(w->ids, in->root_ids + p, n * sizeof *w->ids);
    if (in->vals)
        memcpy(w->vals, in->vals + p, n * sizeof *w->vals);
    else
        memset(w->vals, 0, n * sizeof *w->vals);
    if (has_tasks)
        for (size_t j = 0; j < n; j++) w->inits[j] = ~in->tasks[p + j];
    for (size_t j = n; j < n + PROBE_AHEAD; j++) {
        w->ids[j] = 0;
        w->inits[j] = 0;
    }
}
/* Whether a bucket is the last of a table, or might be: the one after that is the first. */
INLINE uint32_t is_last(const ledger_t *l, uint32_t number) {
    return (number == (uint32_t)(l->cur.n - 1)) | (number == (uint32_t)(l->old.n - 1));
}
/* The rows' home buckets, and which rows may be probed early: not those with a read-after-write hazard (one
 * of the PROBE_AHEAD preceding rows has its home bucket in this one or beside it), not those of the last
 * bucket, whose next one is the first, and not those that `apply_message` must do; none while a reseed is
 * due. */
INLINE void find_homes(work_t *w, ledger_t *l, const batch_t *in, size_t n, const int has_tasks,
                       const int mode) {
    uint32_t *const indexes = w->home_indexes + PROBE_AHEAD;
    const uint32_t any = l->needs_reseed || (!has_tasks && ~in->kind > 0) ? 0 : ANY_SLOT;
    if (mode != GENERAL || l->old.n == 0) {
        const seed_t seed = l->seed;
        bucket_t *const buckets = l->cur.buckets;
        const size_t in_table = l->cur.n;
        for (size_t j = 0; j < n; j++) {
            const size_t i = home_bucket(in_table, hash_of(seed, w->ids[j]));
            w->homes[j] = &buckets[i];
            indexes[j] = (uint32_t)i;
        }
    } else
        for (size_t j = 0; j < n; j++) {
            size_t i;
            table_t *t = find_home(l, hash_of(l->seed, w->ids[j]), &i);
            w->homes[j] = &t->buckets[i];
            indexes[j] = (uint32_t)i;
        }
    for (size_t j = 0; j < PROBE_AHEAD; j++) {
        w->home_indexes[j] = UINT32_MAX - 1; /* beside no home bucket */
        indexes[n + j] = indexes[n - 1];
    }
    for (size_t j = 0; j < n + PROBE_AHEAD; j++) {
        uint32_t hazard = is_last(l, indexes[j]);
        if (has_tasks) hazard |= w->inits[j] > 0;
        for (size_t k = 1; k <= PROBE_AHEAD; k++) hazard |= indexes[j] - w->home_indexes[PROBE_AHEAD + j - k] + 1 <= 2;
        w->slots[j] = (hazard - 1) & any;
    }
}
/* The home buckets of the rows that follow the block, to be prefetched; for want of rows, the last row's. */
INLINE void find_next_homes(work_t *w, ledger_t *l, const uint64_t *ids, size_t n, size_t rest, size_t ahead) {
    const size_t known = rest < ahead ? rest : ahead;
    for (size_t j = 0; j < known; j++) {
        size_t i;
        table_t *t = find_home(l, hash_of(l->seed, ids[j]), &i);
        w->homes[n + j] = &t->buckets[i];
    }
    for (size_t j = known; j < ahead; j++) w->homes[n + j] = w->homes[n - 1];
}
/* The columns come from memory as well, and processors prefetch them no further than a page. */
INLINE void prefetch_rows(const batch_t *in, size_t p) {
    __builtin_prefetch(in->root_ids + p);
    if (in->vals) __builtin_prefetch(in->vals + p);
    if (in->tasks) __builtin_prefetch(in->tasks + p);
}

/* Which of up to 64 rows completed a tree, as bits. */
INLINE uint64_t completed_rows(const uint8_t *left, size_t n) {
    uint64_t none = 0;
#if SIMD >= 3
    none = _mm512_testn_epi8_mask(_mm512_loadu_si512(left), _mm512_loadu_si512(left));
#elif SIMD >= 1
    for (int k = 0; k < 64; k += 16) {
        const __m128i some = _mm_loadu_si128((const __m128i *)(left + k));
        none |= (uint64_t)(uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(some, _mm_setzero_si128())) << k;
    }
#else
    for (int k = 0; k < 64; k++) none |= (uint64_t)(left[k] == 0) << k;
#endif
    return n < 64 ? ~none & (((uint64_t)1 << n) - 1) : ~none;
}
/* Write the outcomes of the trees that rows `from` to `to` completed, from outcome m on, and count their
 * entries out; returns how many.  The exit of the inner loop is mispredicted, which costs less than doing
 * all 64 rows. */
static __attribute__((noinline)) size_t collect_outcomes(ledger_t *l, const work_t *w, size_t from, size_t to, const outcomes_t *out, size_t m) {
    const size_t before = m;
    for (; from < to; from += 64)
        for (uint64_t done = completed_rows(w->left + from, to - from); done; done &= done - 1) {
            const size_t j = from + (size_t)__builtin_ctzll(done);
            out->root_ids[m] = (int64_t)w->ids[j];
            out->tasks[m] = ~w->inits[j];
            if (out->elapsed) out->elapsed[m] = (int64_t)w->vals[j];
            l->counts[w->left[j]]--;
            m++;
        }
    return m - before;
}

INLINE size_t run_block(ledger_t *l, const batch_t *in, size_t p, size_t n, size_t rest, const outcomes_t *out,
                        size_t m, const int has_tasks, const int decide, const int mode,
                        const int large) {
    const size_t ahead = large ? PREFETCH_AHEAD_LARGE : PREFETCH_AHEAD;
    const size_t next = p + BLOCK + ahead; /* of the columns to prefetch */
    const uint32_t stamp = (uint32_t)l->stamp;
    work_t w;
    size_t from = 0;    /* the first row whose outcome was not collected */
    size_t gone = 0;    /* entries that left on the straight path, before that row */
    uint32_t fresh = 0; /* entries made there */

    for (int k = 0; k < 2 * FREE_BITS; k++) w.put[k] = k < FREE_BITS ? 0 : (uint8_t)stamp;
    read_rows(&w, in, p, n, has_tasks);
    find_homes(&w, l, in, n, has_tasks, mode);
    find_next_homes(&w, l, in->root_ids + p + n, n, rest, ahead);
    for (size_t j = 0; j < ahead; j++) prefetch(w.homes[j]);
    for (size_t j = 0; j < PROBE_AHEAD; j++) probe_early(l, &w, j, mode);

    for (size_t line = 0; line < n; line += IDS_PER_LINE) {
        const size_t end = line + IDS_PER_LINE < n ? line + IDS_PER_LINE : n;
        prefetch_rows(in, next + line);
        for (size_t j = line; j < end; j++) {
            if (large) {
                const bucket_t *b = w.homes[j + PEEK_AHEAD];
                prefetch_far(w.homes[j + ahead]);
                prefetch(b + (b->overflow_count != 0));
            } else
                prefetch(w.homes[j + ahead]);
            if (mode == GENERAL && l->cur.times) prefetch_times(times_of(l, w.homes[j + ahead]));
            probe_early(l, &w, j + PROBE_AHEAD, mode);

            bucket_t *b = w.homes[j];
            const uint64_t id = w.ids[j];
            const int32_t init = has_tasks ? w.inits[j] : ~in->kind;
            uint32_t slots = w.slots[j];
            if (UNLIKELY(slots == 0)) {
                if (init > 0) goto apart;
                slots = probe_late(l, b, id, mode);
                if (slots == 0 && !l->needs_reseed && !is_last(l, w.home_indexes[PROBE_AHEAD + j])) {
                    slots = probe_late(l, ++b, id, mode);
                    slots |= slots ? DISPLACED : 0;
                }
                if (slots == 0) goto apart;
                w.slots[j] = slots;
            }
            const uint32_t slot = value_barrier((uint32_t)__builtin_ctz(slots));
            const size_t s = slot % FREE_BITS;
            const int32_t was_stamp = (int8_t)b->stamps[s]; /* of a free slot this is 0, and so is the rest */
            const int32_t was = b->not_tasks[s];
            if (UNLIKELY((was_stamp | (was & init)) < 0)) goto apart; /* marked, or a second init */
            const uint64_t val = value_barrier64(b->vals[s] ^ w.vals[j]); /* or it is compared before the XOR */
            const int32_t is = was | init;
            b->keys[s] = id;
            b->vals[s] = val;
            uint32_t now_stamp = (uint32_t)was_stamp | w.put[slot];
            if (!decide || (mode == GENERAL && l->refresh_on_ack)) now_stamp = stamp;
            if (!decide || mode == GENERAL) {
                l->counts[was_stamp]--; /* counts[0] is scratch */
                l->counts[now_stamp]++;
            }
            if (mode == GENERAL && l->cur.times) {
                times_t *t = times_of(l, b);
                const int is_new = (slot & FREE_BITS) != 0;
                const int64_t time = in->times ? in->times[p + j] : in->now;
                const int64_t first = is_new ? time : t->first[s], last = is_new ? time : t->last[s];
                t->first[s] = !decide && time < first ? time : first;
                t->last[s] = decide || time > last ? time : last;
                w.vals[j] = (uint64_t)time - (uint64_t)first;
            }
            if (!decide) {
                b->not_tasks[s] = is;
                b->stamps[s] = (uint8_t)now_stamp;
                if (UNLIKELY(slots & DISPLACED)) b[-1].overflow_count += (slot & FREE_BITS) != 0;
                continue;
            }
            /* All ones if the tree is complete: it has its init, and nothing is left of its values. */
            const uint32_t done = value_barrier(-(uint32_t)(val == 0)) & (uint32_t)(is >> 31);
            const uint8_t left = (uint8_t)(now_stamp & done);
            w.inits[j] = is;
            w.left[j] = left;
            if (UNLIKELY(b->overflow_count & (uint8_t)done)) {
                size_t i;
                table_t *t = find_home(l, hash_of(l->seed, id), &i);
                b->stamps[s] = (uint8_t)now_stamp;
                table_erase(t, l->seed, i + (slots >> DISPLACED_BIT), (unsigned)s);
                reprobe(l, &w, j, mode);
            } else {
                b->stamps[s] = (uint8_t)(now_stamp ^ left); /* free again, if it is complete */
                b->not_tasks[s] = is & (int32_t)~done;
                if (UNLIKELY(slots & DISPLACED)) b[-1].overflow_count += (uint8_t)(((slot & FREE_BITS) != 0) + done);
            }
            continue;
        apart:
            w.slots[j] = 0;
            w.left[j] = 0;
            if (decide) {
                const size_t more = collect_outcomes(l, &w, from, j, out, m);
                gone += more;
                m += more;
                from = j + 1;
            }
            m += apply_message(l, id, w.vals[j], ~init, in->times ? in->times[p + j] : in->now, decide, out, m);
            reprobe(l, &w, j, mode);
            if (UNLIKELY(l->needs_reseed)) memset(w.slots + j + 1, 0, (n + PROBE_AHEAD - j - 1) * sizeof *w.slots);
        }
    }
    for (size_t j = 0; j < n; j++) fresh += ((w.slots[j] & ALL_SLOTS) == 0) & (w.slots[j] != 0);
    if (decide) {
        const size_t more = collect_outcomes(l, &w, from, n, out, m);
        gone += more;
        m += more;
        if (mode != GENERAL) l->counts[stamp] += fresh;
    }
    l->used += (size_t)fresh - gone;
    return m;
}

/* Runs rows p to p + n, which `rest` more will follow, and returns how many outcomes there are now. */
typedef size_t (*block_t)(ledger_t *, const batch_t *, size_t p, size_t n, size_t rest, const outcomes_t *,
                          size_t m);
#define BLOCK_OF(NAME, HAS_TASKS, DECIDE, MODE, BEYOND)                                            \
    static __attribute__((noinline)) size_t NAME(ledger_t *l, const batch_t *in, size_t p, size_t n, \
                                                 size_t rest, const outcomes_t *out, size_t m) {   \
        return run_block(l, in, p, n, rest, out, m, HAS_TASKS, DECIDE, MODE, BEYOND);              \
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

static block_t block_for(const ledger_t *l, const batch_t *in, int decide) {
    static const block_t blocks[3][4] = {{kind_cached, kind_large, kind_aged, kind_general},
                                         {apply_cached, apply_large, apply_aged, apply_general},
                                         {fold_cached, fold_large, fold_general, fold_general}};
    const int large = l->cur.n * sizeof(bucket_t) > LARGE_TABLE;
    const int general = l->old.n || l->cur.times || l->refresh_on_ack;
    return blocks[in->tasks ? 1 + !decide : 0][general ? 3 : l->dead ? 2 : large];
}

#endif
