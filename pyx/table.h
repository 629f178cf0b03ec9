/* table.h - one hash table: hashing, probing, insert, erase, as layout.h describes them.
 *
 * A slot is named by bucket and number.  `match` and `free_` have one bit a slot.  Functions here
 * read every free slot as free and every other one as alive; expiry is ledger.h's.  The caller
 * sees to it that no two live entries have one key, and that the table does not become full.
 */
#ifndef ACKCORE_TABLE_H
#define ACKCORE_TABLE_H

#include "bucket_ops.h"
#include "mix.h"

/* ---- hashing ----------------------------------------------------------------------------- */

INLINE seed_t seed_from(uint64_t secret) {
    seed_t seed = {mix64(secret + GOLDEN),
                   {mix64(secret + 2 * GOLDEN) | 1, mix64(secret + 3 * GOLDEN) | 1}};
    return seed;
}
/* The upper half of the hash, scaled to 0..n-1: n is below 2**32, as vectors multiply 32 bits. */
INLINE size_t home_bucket(size_t n, uint64_t hash) {
    return (size_t)(((hash >> 32) * (uint32_t)n) >> 32);
}

/* ---- one table --------------------------------------------------------------------------- */

INLINE size_t next_bucket(const table_t *t, size_t i) { return i + 1 == t->n ? 0 : i + 1; }
INLINE size_t probe_distance(const table_t *t, size_t from, size_t to) {
    return to >= from ? to - from : to + t->n - from;
}
INLINE void overflow_inc(table_t *t, size_t i) {
    bucket_t *b = &t->buckets[i];
    if (UNLIKELY(b->overflow_count == OVERFLOW_MAX))
        t->marks[i].overflow_excess++;
    else
        b->overflow_count++;
}
INLINE void overflow_dec(table_t *t, size_t i) {
    bucket_t *b = &t->buckets[i];
    ASSERT(b->overflow_count > 0);
    if (UNLIKELY(b->overflow_count == OVERFLOW_MAX && t->marks[i].overflow_excess))
        t->marks[i].overflow_excess--;
    else
        b->overflow_count--;
}
INLINE uint8_t mark_in(const table_t *t, size_t i, unsigned s) {
    const uint32_t all = t->buckets[i].stamps[s] & MARKED ? t->marks[i].marks : 0;
    return (uint8_t)(all >> MARK_BITS * s & ((1 << MARK_BITS) - 1));
}
INLINE void mark_put(table_t *t, size_t i, unsigned s, uint8_t mark) {
    uint32_t others = t->marks[i].marks & ~((((uint32_t)1 << MARK_BITS) - 1) << MARK_BITS * s);
    t->marks[i].marks = others | (uint32_t)mark << MARK_BITS * s;
}
INLINE entry_t entry_at(const table_t *t, size_t i, unsigned s) {
    const bucket_t *b = &t->buckets[i];
    entry_t e;
    e.key = b->keys[s];
    e.val = b->vals[s];
    e.not_task = b->not_tasks[s];
    e.stamp = b->stamps[s] & ~MARKED;
    e.mark = mark_in(t, i, s);
    e.first = t->times ? t->times[i].first[s] : 0;
    e.last = t->times ? t->times[i].last[s] : 0;
    return e;
}
INLINE void entry_put(table_t *t, size_t i, unsigned s, entry_t e) {
    bucket_t *b = &t->buckets[i];
    ASSERT(s < SLOTS && b->stamps[s] == 0 && e.stamp >= 1 && e.stamp <= STAMPS);
    b->keys[s] = e.key;
    b->vals[s] = e.val;
    b->not_tasks[s] = e.not_task;
    b->stamps[s] = (uint8_t)(e.stamp | (e.mark ? MARKED : 0));
    if (e.mark) mark_put(t, i, s, e.mark);
    if (t->times) {
        t->times[i].first[s] = e.first;
        t->times[i].last[s] = e.last;
    }
}
INLINE void slot_clear(bucket_t *b, unsigned s) {
    b->stamps[s] = 0;
    b->not_tasks[s] = 0;
    b->vals[s] = 0;
}
/* Insert an entry: no live entry has the key, unless this one is dead, and the table is not full.
 * Returns the probe distance, in buckets. */
static size_t table_insert(table_t *t, size_t home, entry_t e, place_t *place) {
    size_t i = home, distance = 0;
    uint32_t match, free_;
    for (;; i = next_bucket(t, i), distance++) {
        match_slots(&t->buckets[i], e.key, &match, &free_);
        if (free_) break;
        ASSERT(distance < t->n);
        overflow_inc(t, i);
    }
    place->table = t;
    place->i = i;
    place->s = (unsigned)__builtin_ctz(free_);
    entry_put(t, i, place->s, e);
    return distance;
}
/* Erase an entry by backward shift: a slot freed in a bucket with overflow is filled with the
 * nearest later entry that probed past that bucket, which frees that entry's slot, and so on. */
static void table_erase(table_t *t, seed_t seed, size_t i, unsigned s) {
    size_t home = home_bucket(t->n, hash_of(seed, t->buckets[i].keys[s]));
    ASSERT(t->buckets[i].stamps[s] != 0);
    for (size_t j = home; j != i; j = next_bucket(t, j)) overflow_dec(t, j);
    slot_clear(&t->buckets[i], s);
    while (UNLIKELY(t->buckets[i].overflow_count != 0)) {
        size_t j = i, distance = 0;
        uint32_t displaced = 0;  /* slots of bucket j whose entries probed past bucket i */
        while (displaced == 0) { /* ends: overflow_count > 0 says that there is one */
            j = next_bucket(t, j);
            distance++;
            ASSERT(distance < t->n);
            const bucket_t *b = &t->buckets[j];
            for (unsigned k = 0; k < SLOTS; k++) {
                const size_t from = home_bucket(t->n, hash_of(seed, b->keys[k]));
                displaced |=
                    (uint32_t)((b->stamps[k] != 0) & (probe_distance(t, from, j) >= distance)) << k;
            }
        }
        const unsigned q = (unsigned)__builtin_ctz(displaced);
        entry_put(t, i, s, entry_at(t, j, q));
        for (size_t x = i; x != j; x = next_bucket(t, x)) overflow_dec(t, x);
        slot_clear(&t->buckets[j], q);
        i = j;
        s = q;
    }
}

#endif
