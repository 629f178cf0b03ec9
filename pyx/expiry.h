/* expiry.h - turns: which entries are dead, when they leave their slots, and how a turn begins.
 *
 * A stamp, 1..127, is the turn in which an entry was inserted or refreshed; `rotate` begins the
 * next turn, and the age of an entry is the number of turns since.  `counts` has the number of
 * entries per stamp, so a turn reads no entry to age it: those that reach age N = `turns` are
 * dead, invisible to lookups, and keep their slots.  Those of age N can be taken (`take_expired`);
 * older ones are swept, half a bucket to four a row and SLICE buckets a turn.  Lookups see the same
 * entries as after an immediate sweep.
 */
#ifndef ACKCORE_EXPIRY_H
#define ACKCORE_EXPIRY_H

#include "growth.h"

/* Drop the entries of a bucket of `cur` that are too old to be taken, one by one. */
COLD void sweep_bucket(ledger_t *ledger, size_t index) {
    const bucket_t *bucket = &ledger->cur.buckets[index];
    for (unsigned slot = 0; slot < SLOTS; slot++) {
        place_t at = {&ledger->cur, index, slot};
        while (bucket->stamps[slot] &&
               age_of(ledger, bucket->stamps[slot] & ~MARKED) > ledger->turns)
            ledger_erase(ledger, at); /* may shift another one into this slot */
    }
}
/* Drop the entries that are too old to be taken, of up to that many buckets. */
static void ledger_sweep(ledger_t *ledger, size_t buckets) {
    enum { SWEEP_AHEAD = 8 };
    const int turns = ledger->turns, now = ledger->stamp;
    uint32_t overflow_before; /* of the bucket before */
    size_t index = ledger->sweep_at;
    if (ledger->old.n_buckets || sweepable(ledger) == 0) return; /* migration drops them */
    overflow_before =
        ledger->cur.buckets[index ? index - 1 : ledger->cur.n_buckets - 1].overflow_count;
    for (; buckets && sweepable(ledger) > 0; buckets--) {
        bucket_t *bucket = &ledger->cur.buckets[index];
        const uint32_t gone = aged_slots(bucket, now, turns + 1),
                       older = aged_slots(bucket, now, turns + 2);
        prefetch(bucket + SWEEP_AHEAD);
        if (UNLIKELY(overflow_before | bucket->overflow_count | older)) {
            if (gone) sweep_bucket(ledger, index);
        } else if (gone) {
            /* No overflow in this bucket or the one before, so no entry is displaced and no count
             * changes; and all have one age.  Masks, because the slots are unpredictable. */
            const int n = __builtin_popcount(gone);
            for (unsigned slot = 0; slot < SLOTS; slot++) {
                const uint32_t keep = (gone >> slot & 1) - 1;
                ledger->orphans += (bucket->not_tasks[slot] >= 0) & ~keep;
                bucket->stamps[slot] &= (uint8_t)keep;
                bucket->not_tasks[slot] &= (int32_t)keep;
                bucket->vals[slot] &= (uint64_t)(int64_t)(int32_t)keep;
            }
            ledger->counts[stamp_of(ledger, turns + 1)] -= n;
            ledger->dead -= n;
            ledger->used -= (size_t)n;
        }
        overflow_before = bucket->overflow_count;
        index = next_bucket(&ledger->cur, index);
    }
    ledger->sweep_at = index;
}
static void ledger_rotate(ledger_t *ledger) {
    int next = ledger->stamp % STAMPS + 1;
    ledger->untaken += takeable(ledger);
    ledger->work += ledger->limit;
    /* Entries 126 turns old are still here: a large table or a growth without traffic, or turns is
     * 126 and they were not taken.  The new stamp must differ from theirs. */
    if (UNLIKELY(ledger->counts[next] != 0)) {
        ledger_migrate(ledger, WHOLE);
        for (size_t index = 0; index < ledger->cur.n_buckets && ledger->counts[next]; index++)
            for (unsigned slot = 0; slot < SLOTS; slot++)
                while ((ledger->cur.buckets[index].stamps[slot] & ~MARKED) == next) {
                    place_t at = {&ledger->cur, index, slot};
                    ledger_erase(ledger, at);
                }
    }
    ledger->stamp = next;
    ledger->dead += ledger->counts[stamp_of(ledger, ledger->turns)];
    ledger->take_at = 0;
    /* Without traffic, turns alone finish a shrink and the sweep. */
    if (ledger->old.n_buckets > ledger->cur.n_buckets) ledger_migrate(ledger, SLICE);
    ledger_sweep(ledger, SLICE);
    consider_shrink(ledger);
}

#endif
