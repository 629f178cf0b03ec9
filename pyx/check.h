/* check.h - all invariants of layout.h and ledger.h, looked at in checked builds.
 *
 * With ACKCORE_CHECKED=1 or ACKCORE_SANITIZE=1, ASSERT tests what one step relies on, and
 * `check_after` goes through the whole ledger after calls; without, both are empty.  A failure
 * prints the expression and aborts.
 */
#ifndef ACKCORE_CHECK_H
#define ACKCORE_CHECK_H

#include "expiry.h"

#if CHECKED
#include <stdlib.h>

static void check_entry(ledger_t *l, table_t *t, size_t i, unsigned s) {
    const entry_t e = entry_at(t, i, s);
    const int dead = age_of(l, e.stamp) >= l->turns;
    place_t found;
    size_t home;
    ASSERT(e.stamp >= 1 && e.stamp <= STAMPS);
    ASSERT(e.not_task <= 0);
    ASSERT((t->buckets[i].stamps[s] & MARKED) == (e.mark ? MARKED : 0));
    ASSERT(e.not_task < 0 || !(e.mark & (MARK_INITS | MARK_TASKS_DIFFER)));
    ASSERT(find_home(l, hash_of(l->seed, e.key), &home) == t); /* on its side of the migration */
    ASSERT(dead ||
           (ledger_find(l, e.key, &found) && found.table == t && found.i == i && found.s == s));
}
/* One table: slots, entries, and overflow counts against a recount. */
static void check_table(ledger_t *l, table_t *t, int64_t *counts) {
    uint64_t *const overflow = calloc(t->n + 1, sizeof *overflow);
    if (overflow == NULL) return;
    for (size_t i = 0; i < t->n; i++)
        for (unsigned s = 0; s < SLOTS; s++) {
            const bucket_t *const b = &t->buckets[i];
            if (b->stamps[s] == 0) {
                ASSERT(b->not_tasks[s] == 0 && b->vals[s] == 0);
                continue;
            }
            check_entry(l, t, i, s);
            counts[b->stamps[s] & ~MARKED]++;
            for (size_t j = home_bucket(t->n, hash_of(l->seed, b->keys[s])); j != i;
                 j = next_bucket(t, j))
                overflow[j]++;
        }
    for (size_t i = 0; i < t->n; i++) {
        const bucket_t *const b = &t->buckets[i];
        const uint64_t counted = b->overflow_count + (uint64_t)t->marks[i].overflow_excess;
        ASSERT(counted == overflow[i]);
        ASSERT(t->marks[i].overflow_excess == 0 || b->overflow_count == OVERFLOW_MAX);
        ASSERT(counted == 0 || (b->stamps[0] && b->stamps[1] && b->stamps[2]));
    }
    free(overflow);
}
static void check_ledger(ledger_t *l) {
    int64_t counts[STAMPS + 1] = {0}, used = 0, dead = 0;
    check_table(l, &l->cur, counts);
    check_table(l, &l->old, counts);
    for (int stamp = 1; stamp <= STAMPS; stamp++) {
        ASSERT(counts[stamp] == l->counts[stamp]);
        used += counts[stamp];
        if (age_of(l, stamp) >= l->turns) dead += counts[stamp];
    }
    ASSERT((size_t)used == l->used && dead == l->dead);
    ASSERT(l->used < SLOTS * (l->cur.n + l->old.n)); /* a search ends */
    ASSERT(l->old.n ? l->migrated < l->old.n : l->cur.n != 0);
    for (size_t k = 1; k < l->n_reserves; k++) ASSERT(l->reserves[k - 1].n < l->reserves[k].n);
}
/* After a call that did so many rows: look at the whole ledger, unless it is large and that was
 * done recently, so that checks cost a row no more than 8 buckets. */
static void check_after(ledger_t *l, size_t rows) {
    l->unchecked += 64 + 8 * rows;
    if (l->unchecked < l->cur.n + l->old.n) return;
    l->unchecked = 0;
    check_ledger(l);
}
#else
INLINE void check_after(ledger_t *l, size_t rows) {
    (void)l;
    (void)rows;
}
#endif

#endif
