/* expiry.h - turns: what is dead, when it leaves its slot, and how a turn begins.
 *
 * A stamp, 1..127, is the turn in which an entry was inserted or refreshed; `rotate` advances the
 * present one, and the age of an entry is the number of turns since.  `counts` has the number of
 * entries per stamp, so a turn looks at no entry to age it: those that reach age N = `turns` are
 * dead, invisible to lookups, and keep their slots.  Those of age N can be taken (`take_expired`);
 * older ones are swept, half a bucket to four a row and SLICE buckets a turn.  What is visible is
 * what an eager sweep would leave.
 */
#ifndef ACKCORE_EXPIRY_H
#define ACKCORE_EXPIRY_H

#include "growth.h"

/* Drop the entries of a bucket of `cur` that are too old to be taken, one by one. */
COLD void sweep_bucket(ledger_t *l, size_t i) {
    const bucket_t *b = &l->cur.buckets[i];
    for (unsigned s = 0; s < SLOTS; s++) {
        place_t at = {&l->cur, i, s};
        while (b->stamps[s] && age_of(l, b->stamps[s] & ~MARKED) > l->turns)
            ledger_erase(l, at); /* may shift another one into this slot */
    }
}
/* Drop the entries of up to that many buckets that are too old to be taken. */
static void ledger_sweep(ledger_t *l, size_t buckets) {
    enum { SWEEP_AHEAD = 8 };
    const int turns = l->turns, now = l->stamp;
    uint32_t overflow_before; /* of the bucket before */
    size_t i = l->sweep_at;
    if (l->old.n || sweepable(l) == 0) return; /* migration drops them */
    overflow_before = l->cur.buckets[i ? i - 1 : l->cur.n - 1].overflow_count;
    for (; buckets && sweepable(l) > 0; buckets--) {
        bucket_t *b = &l->cur.buckets[i];
        const uint32_t gone = aged_slots(b, now, turns + 1), older = aged_slots(b, now, turns + 2);
        prefetch(b + SWEEP_AHEAD);
        if (UNLIKELY(overflow_before | b->overflow_count | older)) {
            if (gone) sweep_bucket(l, i);
        } else if (gone) {
            /* No overflow in this bucket or the one before, so nothing is displaced and no count
             * changes; and all are of one age.  Masks, as which slots they are is unpredictable. */
            const int n = __builtin_popcount(gone);
            for (unsigned s = 0; s < SLOTS; s++) {
                const uint32_t keep = (gone >> s & 1) - 1;
                l->orphans += (b->not_tasks[s] >= 0) & ~keep;
                b->stamps[s] &= (uint8_t)keep;
                b->not_tasks[s] &= (int32_t)keep;
                b->vals[s] &= (uint64_t)(int64_t)(int32_t)keep;
            }
            l->counts[stamp_of(l, turns + 1)] -= n;
            l->dead -= n;
            l->used -= (size_t)n;
        }
        overflow_before = b->overflow_count;
        i = next_bucket(&l->cur, i);
    }
    l->sweep_at = i;
}
static void ledger_rotate(ledger_t *l) {
    int next = l->stamp % STAMPS + 1;
    l->untaken += takeable(l);
    l->work += l->limit;
    /* Entries 126 turns old have not left: a large table or a growth without traffic, or turns is
     * 126 and they were not taken.  The new stamp must not be theirs. */
    if (UNLIKELY(l->counts[next] != 0)) {
        ledger_migrate(l, WHOLE);
        for (size_t i = 0; i < l->cur.n && l->counts[next]; i++)
            for (unsigned s = 0; s < SLOTS; s++)
                while ((l->cur.buckets[i].stamps[s] & ~MARKED) == next) {
                    place_t at = {&l->cur, i, s};
                    ledger_erase(l, at);
                }
    }
    l->stamp = next;
    l->dead += l->counts[stamp_of(l, l->turns)];
    l->take_at = 0;
    /* Without traffic, turns alone finish a shrink and the sweep. */
    if (l->old.n > l->cur.n) ledger_migrate(l, SLICE);
    ledger_sweep(l, SLICE);
    consider_shrink(l);
}

#endif
