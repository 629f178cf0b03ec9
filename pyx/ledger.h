/* ledger.h - the entries of a ledger, in its one or two tables.
 *
 * The home bucket decides in which of `cur` and `old` a key is probed for (`find_home`).  Dead
 * entries never match (expiry.h).
 *
 * Invariants.  used = sum of counts[1..127] = occupied slots of both tables; dead = sum of counts
 * of age >= N; no entry of `old` has its home bucket before `migrated`; there is one entry at most
 * that is not dead per key.
 */
#ifndef ACKCORE_LEDGER_H
#define ACKCORE_LEDGER_H

#include "table.h"

INLINE uint32_t dead_slots(const ledger_t *ledger, const bucket_t *bucket) {
    return aged_slots(bucket, ledger->stamp, ledger->turns);
}

INLINE table_t *find_home(ledger_t *ledger, uint64_t hash, size_t *index) {
    if (UNLIKELY(ledger->old.n_buckets != 0)) {
        *index = home_bucket(ledger->old.n_buckets, hash);
        if (*index >= ledger->migrated) return &ledger->old;
    }
    *index = home_bucket(ledger->cur.n_buckets, hash);
    return &ledger->cur;
}
static int ledger_find(ledger_t *ledger, uint64_t key, place_t *place) {
    uint32_t match, free_slots;
    size_t index;
    table_t *table = find_home(ledger, hash_of(ledger->seed, key), &index);
    for (;; index = next_bucket(table, index)) {
        match_slots(&table->buckets[index], key, &match, &free_slots);
        if (UNLIKELY(ledger->dead != 0)) match &= ~dead_slots(ledger, &table->buckets[index]);
        if (match) break;
        if (free_slots) return 0;
    }
    place->table = table;
    place->index = index;
    place->slot = (unsigned)__builtin_ctz(match);
    return 1;
}
static void ledger_insert(ledger_t *ledger, entry_t entry, place_t *place) {
    size_t index;
    table_t *table = find_home(ledger, hash_of(ledger->seed, entry.key), &index);
    if (UNLIKELY(table_insert(table, index, entry, place) > PROBE_LIMIT)) ledger->needs_reseed = 1;
    ledger->used++;
    ledger->counts[entry.stamp]++;
}
/* Remove an entry that was decided, or that was dead and is dropped. */
static void ledger_erase(ledger_t *ledger, place_t at) {
    const bucket_t *bucket = &at.table->buckets[at.index];
    int stamp = bucket->stamps[at.slot] & ~MARKED;
    if (UNLIKELY(age_of(ledger, stamp) >= ledger->turns)) {
        ledger->dead--;
        ledger->orphans += bucket->not_tasks[at.slot] >= 0;
    }
    ledger->used--;
    ledger->counts[stamp]--;
    table_erase(at.table, ledger->seed, at.index, at.slot);
}

#endif
