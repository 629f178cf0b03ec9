/* ledger.h - the entries of a ledger, in the one or two tables that it has.
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

INLINE uint32_t dead_slots(const ledger_t *l, const bucket_t *b) {
    return aged_slots(b, l->stamp, l->turns);
}

INLINE table_t *find_home(ledger_t *l, uint64_t hash, size_t *i) {
    if (UNLIKELY(l->old.n != 0)) {
        *i = home_bucket(l->old.n, hash);
        if (*i >= l->migrated) return &l->old;
    }
    *i = home_bucket(l->cur.n, hash);
    return &l->cur;
}
static int ledger_find(ledger_t *l, uint64_t key, place_t *place) {
    uint32_t match, free_;
    size_t i;
    table_t *t = find_home(l, hash_of(l->seed, key), &i);
    for (;; i = next_bucket(t, i)) {
        match_slots(&t->buckets[i], key, &match, &free_);
        if (UNLIKELY(l->dead != 0)) match &= ~dead_slots(l, &t->buckets[i]);
        if (match) break;
        if (free_) return 0;
    }
    place->table = t;
    place->i = i;
    place->s = (unsigned)__builtin_ctz(match);
    return 1;
}
static void ledger_insert(ledger_t *l, entry_t e, place_t *place) {
    size_t i;
    table_t *t = find_home(l, hash_of(l->seed, e.key), &i);
    if (UNLIKELY(table_insert(t, i, e, place) > PROBE_LIMIT)) l->needs_reseed = 1;
    l->used++;
    l->counts[e.stamp]++;
}
/* An entry leaves: it was decided, or it was dead and is dropped. */
static void ledger_erase(ledger_t *l, place_t at) {
    const bucket_t *b = &at.table->buckets[at.i];
    int stamp = b->stamps[at.s] & ~MARKED;
    if (UNLIKELY(age_of(l, stamp) >= l->turns)) {
        l->dead--;
        l->orphans += b->not_tasks[at.s] >= 0;
    }
    l->used--;
    l->counts[stamp]--;
    table_erase(at.table, l->seed, at.i, at.s);
}

#endif
