/* ledger.h - a ledger's two tables: lookup in both, migration, reseeding, shrinking, expiry.
 *
 * Lookup.  The home bucket decides in which of `cur` and `old` a key is probed for (`find_home`).
 * Dead entries never match.
 *
 * Growth.  When `used` would pass `limit`, the smallest reserve that suffices becomes `cur`, and
 * the former table `old`; each block then migrates two home buckets a row, so `old` is empty before
 * a table half as large again is full.  Shrinking is the same into a smaller table, when the most
 * entries seen in a long time (`peak`) were less than an eighth of the limit.  A reseed moves all
 * entries at once.
 *
 * Memory.  Nothing here allocates: before a batch the Ledger adds reserves until the last one is
 * sure to suffice (`reserve_size`, `ledger_add_reserve`), so no row can fail; after it, it frees
 * the retired tables and allocates the one that would suit better (`ledger_desired_size`,
 * `ledger_install`).  A reserve is not written until it is used or retired (16 bytes): it takes
 * address space only.
 *
 * Expiry.  A stamp, 1..127, is the turn in which an entry was inserted or refreshed; `rotate`
 * advances the present one, and the age of an entry is the number of turns since.  `counts` has the
 * number of entries per stamp, so a turn looks at no entry to age it: those that reach age N =
 * `turns` are dead, invisible to lookups, and keep their slots.  Those of age N can be taken
 * (`take_expired`); older ones are swept, half a bucket to four a row and SLICE buckets a turn.
 * What is visible is what an eager sweep would leave.
 *
 * Invariants.  used = sum of counts[1..127] = occupied slots of both tables; dead = sum of counts
 * of age >= N; no entry of `old` has its home bucket before `migrated`; there is one entry at most
 * that is not dead per key.
 */
#ifndef ACKCORE_LEDGER_H
#define ACKCORE_LEDGER_H

#include "table.h"
#if defined(__linux__)
#include <sys/mman.h>
#endif

INLINE uint32_t dead_slots(const ledger_t *l, const bucket_t *b) {
    return aged_slots(b, l->stamp, l->turns);
}

/* ---- entries ----------------------------------------------------------------------------- */

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

/* ---- another table: growth, shrinking, a new seed ---------------------------------------- */

static void retire(ledger_t *l, table_t *t) {
    retired_t *r = (retired_t *)t->buckets;
    void *owner = t->owner;
    if (t->n == 0) return;
    r->owner = owner;
    r->next = l->retired;
    l->retired = r;
    memset(t, 0, sizeof *t);
}
static void *next_retired(ledger_t *l) { /* the owner of a table that may be freed, or NULL */
    void *owner;
    if (l->retired == NULL) return NULL;
    owner = l->retired->owner;
    l->retired = l->retired->next;
    return owner;
}
/* Move an entry from the old table to the new one, or drop it if it is too old to be taken. */
static void migrate_entry(ledger_t *l, entry_t e) {
    place_t place;
    size_t i = home_bucket(l->cur.n, hash_of(l->seed, e.key));
    if (UNLIKELY(age_of(l, e.stamp) > l->turns)) {
        l->used--;
        l->counts[e.stamp]--;
        l->dead--;
        l->orphans += e.not_task >= 0;
    } else if (UNLIKELY(table_insert(&l->cur, i, e, &place) > PROBE_LIMIT))
        l->needs_reseed = 1;
}
/* Move the entries whose home is bucket i of the old table, wherever they were displaced to. */
static void migrate_home(ledger_t *l, size_t i) {
    table_t *t = &l->old;
    for (size_t j = i, distance = 0; distance < t->n; j = next_bucket(t, j), distance++) {
        bucket_t *b = &t->buckets[j];
        for (unsigned s = 0; s < SLOTS; s++)
            while (b->stamps[s] && home_bucket(t->n, hash_of(l->seed, b->keys[s])) == i) {
                entry_t e = entry_at(t, j, s);
                table_erase(t, l->seed, j, s); /* may shift another of the same home here */
                migrate_entry(l, e);
            }
        if (b->overflow_count == 0) break;
    }
}
/* Return the memory of migrated buckets a piece at a time: to unmap a large table at once takes
 * tens of milliseconds.  Returned pages read as zeros, that is, as free slots; so there must be no
 * entry, and while the last bucket has overflow, its displaced entries may be in the first ones. */
static void release_migrated(ledger_t *l) {
#if defined(__linux__)
    enum { PIECE = 2 << 20 };
    const uintptr_t start = (uintptr_t)l->old.buckets;
    const uintptr_t from = (start + l->released + PIECE - 1) / PIECE * PIECE;
    const uintptr_t to = (uintptr_t)&l->old.buckets[l->migrated] / PIECE * PIECE;
    if (to <= from || l->old.buckets[l->old.n - 1].overflow_count) return;
    madvise((void *)from, to - from, MADV_DONTNEED); /* failing, it is freed with the rest */
    l->released = to - start;
#endif
}
static void ledger_migrate(ledger_t *l, size_t homes) {
    size_t end = l->old.n - l->migrated < homes ? l->old.n : l->migrated + homes;
    if (l->old.n == 0) return;
    while (l->migrated < end) migrate_home(l, l->migrated++);
    if (l->migrated == l->old.n) {
        retire(l, &l->old);
        l->take_at = 0;
    } else
        release_migrated(l);
}
static void start_migration(ledger_t *l, table_t t) {
    ledger_migrate(l, WHOLE);
    l->old = l->cur;
    l->cur = t;
    l->migrated = l->released = 0;
    l->limit = limit_of(t.n, l->min_buckets);
    l->sweep_at = l->take_at = 0;
}
static void reseed_into(ledger_t *l, table_t t) {
    table_t from;
    ledger_migrate(l, WHOLE);
    from = l->cur;
    l->secret = mix64(l->secret + 1);
    l->seed = seed_from(l->secret);
    l->cur = t;
    /* Same size: keep the limit, as `min_buckets` may have been lowered since (restore). */
    if (t.n != from.n) l->limit = limit_of(t.n, l->min_buckets);
    l->sweep_at = l->take_at = 0;
    l->needs_reseed = 0;
    l->growths++;
    for (size_t i = 0; i < from.n; i++)
        for (unsigned s = 0; s < SLOTS; s++)
            if (from.buckets[i].stamps[s]) migrate_entry(l, entry_at(&from, i, s));
    retire(l, &from);
}
/* Take the smallest reserve with room for that many entries; smaller ones are retired. */
static int take_reserve(ledger_t *l, size_t entries, table_t *t) {
    size_t k = 0;
    while (k < l->n_reserves && limit_of(l->reserves[k].n, l->min_buckets) < entries) k++;
    if (k == l->n_reserves) return 0;
    *t = l->reserves[k];
    for (size_t j = 0; j < k; j++) retire(l, &l->reserves[j]);
    l->n_reserves -= k + 1;
    memmove(l->reserves, l->reserves + k + 1, l->n_reserves * sizeof *t);
    return 1;
}
/* Buckets of a grown table for so many entries, with some room for what follows. */
static size_t buckets_after_growth(const ledger_t *l, size_t entries) {
    const size_t n = scaled(entries + entries / 32 + 64, 64, MAX_LOAD_GROWN) + 1;
    return n < l->min_buckets ? l->min_buckets : n;
}
/* Buckets of the reserve to add before n more rows; 0: there is enough.  Each is half as large
 * again as the one before (twice a table sized up front), so growth stops near what the rows turn
 * out to need; the last one suffices whatever they are.  A long batch also gets one to reseed into.
 * `frugal`, when an allocation failed: only what n rows may need. */
static size_t reserve_size(const ledger_t *l, size_t n, int frugal) {
    enum { LONG_BATCH = 65536 };
    const size_t limit =
        l->n_reserves ? limit_of(l->reserves[l->n_reserves - 1].n, l->min_buckets) : l->limit;
    /* Entries to buckets: 70/64 * 11/8 = 1.50 times the last table, 92/64 * 11/8 = 1.98 times one
     * sized up front. */
    const size_t next = scaled(limit, 11, 8);
    if (l->used + n <= limit) return n >= LONG_BATCH && l->n_reserves == 0 && !frugal ? next : 0;
    return frugal || l->n_reserves == MAX_RESERVES - 1 ? buckets_after_growth(l, l->used + n)
                                                       : next;
}
static void ledger_add_reserve(ledger_t *l, table_t t) {
    if (l->n_reserves == MAX_RESERVES || (l->n_reserves && l->reserves[l->n_reserves - 1].n >= t.n))
        retire(l, &t);
    else
        l->reserves[l->n_reserves++] = t;
}
/* Called after rows and turns: sets `shrink_to` if the table was far too large for a long time. */
static void consider_shrink(ledger_t *l) {
    if (l->work < 4 * l->limit || l->old.n) return;
    l->shrink_to = 0;
    if (l->peak * LOW_WATER < l->limit && l->cur.n > l->min_buckets)
        l->shrink_to = buckets_after_growth(l, 2 * l->peak);
    l->work = 0;
    l->peak = l->used;
}
/* Buckets of a table that would suit better than the present one, to reseed or to shrink, or 0. */
static size_t ledger_desired_size(const ledger_t *l) {
    return l->needs_reseed ? (l->old.n > l->cur.n ? l->old.n : l->cur.n) : l->shrink_to;
}
/* Move into such a table, or retire it if it no longer suits. */
static void ledger_install(ledger_t *l, table_t t) {
    if (l->needs_reseed && (t.n == l->cur.n || limit_of(t.n, l->min_buckets) >= l->used))
        reseed_into(l, t);
    else if (l->shrink_to && t.n < l->cur.n && limit_of(t.n, l->min_buckets) >= 2 * l->used &&
             l->old.n == 0) {
        for (size_t k = 0; k < l->n_reserves; k++) retire(l, &l->reserves[k]);
        l->n_reserves = 0;
        start_migration(l, t);
    } else
        retire(l, &t);
    l->shrink_to = 0;
}

static void ledger_open(ledger_t *l, table_t t, int turns, int refresh_on_ack, uint64_t secret) {
    memset(l, 0, sizeof *l);
    l->cur = t;
    l->min_buckets = t.n;
    l->limit = limit_of(t.n, t.n);
    l->stamp = 1;
    l->turns = turns;
    l->refresh_on_ack = refresh_on_ack;
    l->secret = secret;
    l->seed = seed_from(secret);
}
/* Retire everything. */
static void ledger_close(ledger_t *l) {
    retire(l, &l->cur);
    retire(l, &l->old);
    while (l->n_reserves) retire(l, &l->reserves[--l->n_reserves]);
}

/* ---- turns ------------------------------------------------------------------------------- */

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
