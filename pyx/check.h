/* check.h - checks of all invariants of layout.h and ledger.h, in checked builds.
 *
 * With ACKCORE_CHECKED=1 or ACKCORE_SANITIZE=1, ASSERT tests the conditions of one step, and
 * `check_after` checks the whole ledger after calls; otherwise both are empty.  A failure prints
 * the expression and aborts.
 */
#ifndef ACKCORE_CHECK_H
#define ACKCORE_CHECK_H

#include "expiry.h"

#if CHECKED
#include <stdlib.h>

static void check_entry(ledger_t *ledger, table_t *table, size_t index, unsigned slot) {
    const entry_t entry = entry_at(table, index, slot);
    const int dead = age_of(ledger, entry.stamp) >= ledger->turns;
    place_t found;
    size_t home;
    ASSERT(entry.stamp >= 1 && entry.stamp <= STAMPS);
    ASSERT(entry.not_task <= 0);
    ASSERT((table->buckets[index].stamps[slot] & MARKED) == (entry.mark ? MARKED : 0));
    ASSERT(entry.not_task < 0 || !(entry.mark & (MARK_INITS | MARK_TASKS_DIFFER)));
    ASSERT(find_home(ledger, hash_of(ledger->seed, entry.key), &home) ==
           table); /* on its side of the migration */
    ASSERT(dead || (ledger_find(ledger, entry.key, &found) && found.table == table &&
                    found.index == index && found.slot == slot));
}
/* One table: slots, entries, and overflow counts against a recount. */
static void check_table(ledger_t *ledger, table_t *table, int64_t *counts) {
    uint64_t *const overflow = calloc(table->n_buckets + 1, sizeof *overflow);
    if (overflow == NULL) return;
    for (size_t index = 0; index < table->n_buckets; index++)
        for (unsigned slot = 0; slot < SLOTS; slot++) {
            const bucket_t *const bucket = &table->buckets[index];
            if (bucket->stamps[slot] == 0) {
                ASSERT(bucket->not_tasks[slot] == 0 && bucket->vals[slot] == 0);
                continue;
            }
            check_entry(ledger, table, index, slot);
            counts[bucket->stamps[slot] & ~MARKED]++;
            for (size_t passed =
                     home_bucket(table->n_buckets, hash_of(ledger->seed, bucket->keys[slot]));
                 passed != index; passed = next_bucket(table, passed))
                overflow[passed]++;
        }
    for (size_t index = 0; index < table->n_buckets; index++) {
        const bucket_t *const bucket = &table->buckets[index];
        const uint64_t counted =
            bucket->overflow_count + (uint64_t)table->marks[index].overflow_excess;
        ASSERT(counted == overflow[index]);
        ASSERT(table->marks[index].overflow_excess == 0 || bucket->overflow_count == OVERFLOW_MAX);
        ASSERT(counted == 0 || (bucket->stamps[0] && bucket->stamps[1] && bucket->stamps[2]));
    }
    free(overflow);
}
static void check_ledger(ledger_t *ledger) {
    int64_t counts[STAMPS + 1] = {0}, used = 0, dead = 0;
    check_table(ledger, &ledger->cur, counts);
    check_table(ledger, &ledger->old, counts);
    for (int stamp = 1; stamp <= STAMPS; stamp++) {
        ASSERT(counts[stamp] == ledger->counts[stamp]);
        used += counts[stamp];
        if (age_of(ledger, stamp) >= ledger->turns) dead += counts[stamp];
    }
    ASSERT((size_t)used == ledger->used && dead == ledger->dead);
    ASSERT(ledger->used <
           SLOTS * (ledger->cur.n_buckets + ledger->old.n_buckets)); /* a search ends */
    ASSERT(ledger->old.n_buckets ? ledger->migrated < ledger->old.n_buckets
                                 : ledger->cur.n_buckets != 0);
    for (size_t k = 1; k < ledger->n_reserves; k++)
        ASSERT(ledger->reserves[k - 1].n_buckets < ledger->reserves[k].n_buckets);
}
/* Check the whole ledger after a call with rows, unless it is large and was checked recently, so
 * that checks cost at most 8 buckets per row. */
static void check_after(ledger_t *ledger, size_t rows) {
    ledger->unchecked += 64 + 8 * rows;
    if (ledger->unchecked < ledger->cur.n_buckets + ledger->old.n_buckets) return;
    ledger->unchecked = 0;
    check_ledger(ledger);
}
#else
INLINE void check_after(ledger_t *ledger, size_t rows) {
    (void)ledger;
    (void)rows;
}
#endif

#endif
