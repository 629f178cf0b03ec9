/* table.h - one hash table: hashing, probing, insert, erase, as layout.h describes them.
 *
 * A slot is named by bucket and number; `match` and `free_slots` have one bit a slot.  Functions
 * here read every free slot as free and every other one as alive; ledger.h handles expiry.  The
 * caller ensures that no two live entries have the same key, and that the table does not become
 * full.
 */
#ifndef ACKCORE_TABLE_H
#define ACKCORE_TABLE_H

#include "bucket_ops.h"

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

INLINE size_t next_bucket(const table_t *table, size_t index) {
    return index + 1 == table->n_buckets ? 0 : index + 1;
}
INLINE size_t probe_distance(const table_t *table, size_t from, size_t to) {
    return to >= from ? to - from : to + table->n_buckets - from;
}
INLINE void overflow_inc(table_t *table, size_t index) {
    bucket_t *bucket = &table->buckets[index];
    if (UNLIKELY(bucket->overflow_count == OVERFLOW_MAX))
        table->marks[index].overflow_excess++;
    else
        bucket->overflow_count++;
}
INLINE void overflow_dec(table_t *table, size_t index) {
    bucket_t *bucket = &table->buckets[index];
    ASSERT(bucket->overflow_count > 0);
    if (UNLIKELY(bucket->overflow_count == OVERFLOW_MAX && table->marks[index].overflow_excess))
        table->marks[index].overflow_excess--;
    else
        bucket->overflow_count--;
}
INLINE uint8_t mark_in(const table_t *table, size_t index, unsigned slot) {
    const uint32_t all =
        table->buckets[index].stamps[slot] & MARKED ? table->marks[index].marks : 0;
    return (uint8_t)(all >> MARK_BITS * slot & ((1 << MARK_BITS) - 1));
}
INLINE void mark_put(table_t *table, size_t index, unsigned slot, uint8_t mark) {
    uint32_t others =
        table->marks[index].marks & ~((((uint32_t)1 << MARK_BITS) - 1) << MARK_BITS * slot);
    table->marks[index].marks = others | (uint32_t)mark << MARK_BITS * slot;
}
INLINE entry_t entry_at(const table_t *table, size_t index, unsigned slot) {
    const bucket_t *bucket = &table->buckets[index];
    entry_t entry;
    entry.key = bucket->keys[slot];
    entry.val = bucket->vals[slot];
    entry.not_task = bucket->not_tasks[slot];
    entry.stamp = bucket->stamps[slot] & ~MARKED;
    entry.mark = mark_in(table, index, slot);
    entry.first = table->times ? table->times[index].first[slot] : 0;
    entry.last = table->times ? table->times[index].last[slot] : 0;
    return entry;
}
INLINE void entry_put(table_t *table, size_t index, unsigned slot, entry_t entry) {
    bucket_t *bucket = &table->buckets[index];
    ASSERT(slot < SLOTS && bucket->stamps[slot] == 0 && entry.stamp >= 1 && entry.stamp <= STAMPS);
    bucket->keys[slot] = entry.key;
    bucket->vals[slot] = entry.val;
    bucket->not_tasks[slot] = entry.not_task;
    bucket->stamps[slot] = (uint8_t)(entry.stamp | (entry.mark ? MARKED : 0));
    if (entry.mark) mark_put(table, index, slot, entry.mark);
    if (table->times) {
        table->times[index].first[slot] = entry.first;
        table->times[index].last[slot] = entry.last;
    }
}
INLINE void slot_clear(bucket_t *bucket, unsigned slot) {
    bucket->stamps[slot] = 0;
    bucket->not_tasks[slot] = 0;
    bucket->vals[slot] = 0;
}
/* Insert an entry: no live entry has the key, unless this one is dead, and the table is not full.
 * Returns the probe distance, in buckets. */
static size_t table_insert(table_t *table, size_t home, entry_t entry, place_t *place) {
    size_t index = home, distance = 0;
    uint32_t match, free_slots;
    for (;; index = next_bucket(table, index), distance++) {
        match_slots(&table->buckets[index], entry.key, &match, &free_slots);
        if (free_slots) break;
        ASSERT(distance < table->n_buckets);
        overflow_inc(table, index);
    }
    place->table = table;
    place->index = index;
    place->slot = (unsigned)__builtin_ctz(free_slots);
    entry_put(table, index, place->slot, entry);
    return distance;
}
/* Erase an entry by backward shift: a slot freed in a bucket with overflow is filled with the
 * nearest later entry that probed past that bucket, which frees that entry's slot, and so on. */
static void table_erase(table_t *table, seed_t seed, size_t index, unsigned slot) {
    size_t home = home_bucket(table->n_buckets, hash_of(seed, table->buckets[index].keys[slot]));
    ASSERT(table->buckets[index].stamps[slot] != 0);
    for (size_t other = home; other != index; other = next_bucket(table, other))
        overflow_dec(table, other);
    slot_clear(&table->buckets[index], slot);
    while (UNLIKELY(table->buckets[index].overflow_count != 0)) {
        size_t other = index, distance = 0;
        uint32_t displaced = 0;  /* slots of `other` whose entries probed past `index` */
        while (displaced == 0) { /* ends: overflow_count > 0 means that there is one */
            other = next_bucket(table, other);
            distance++;
            ASSERT(distance < table->n_buckets);
            const bucket_t *bucket = &table->buckets[other];
            for (unsigned candidate = 0; candidate < SLOTS; candidate++) {
                const size_t from =
                    home_bucket(table->n_buckets, hash_of(seed, bucket->keys[candidate]));
                displaced |= (uint32_t)((bucket->stamps[candidate] != 0) &
                                        (probe_distance(table, from, other) >= distance))
                             << candidate;
            }
        }
        const unsigned donor = (unsigned)__builtin_ctz(displaced);
        entry_put(table, index, slot, entry_at(table, other, donor));
        for (size_t passed = index; passed != other; passed = next_bucket(table, passed))
            overflow_dec(table, passed);
        slot_clear(&table->buckets[other], donor);
        index = other;
        slot = donor;
    }
}

#endif
