/* growth.h - the tables of a ledger: how full they get, and when another one takes over.
 *
 *                 a reserve takes over (`grow`)
 *     STEADY --------------------------------------> GROWING     two home buckets a row
 *     no `old`    used + rows > limit                `old` is smaller than `cur`
 *      ^  |                                             |
 *      |  |       a smaller one (`ledger_install`)      |
 *      |  +----------------------------------------> SHRINKING   32 a row, SLICE a turn
 *      |          peak < limit / LOW_WATER           `old` is larger than `cur`
 *      |                                                |
 *      +------------------------------------------------+
 *                 `old` is empty, and retired
 *
 * In each state, a reseed that is due moves all entries at once and ends in STEADY.  A growth or a
 * reseed in GROWING or SHRINKING first ends the migration, as do settling and listing (WHOLE).
 *
 * Load.  A table sized up front is filled to MAX_LOAD_SIZED entries in 64 buckets (48 bytes an
 * entry, marks included), one that grew to MAX_LOAD_GROWN (62 to 94 bytes an entry until entries
 * leave); while it migrates, `old` may pass its limit, up to 92 + 32.
 *
 * Growth.  When `used` would pass `limit`, the smallest reserve that suffices takes over.  Blocks
 * migrate two home buckets a row, so `old` is empty before a table half as large again is full.
 *
 * Shrinking.  `peak` is the most entries in the last rows, `work` their number, a turn counting as
 * `limit` rows.  When `work` is 4 * limit and there is no `old`, both start anew, and a table that
 * grew shrinks if `peak` was below limit / LOW_WATER: to room for twice the peak, so that entries
 * must double before it grows again.
 *
 * Reseed.  The hash has a secret seed.  A probe of more than PROBE_LIMIT buckets, which chance does
 * not bring about, sets `needs_reseed`: the table is correct all the same, and is rebuilt under
 * another seed as soon as there is memory, a reserve within a batch or `install` after it.
 *
 * Memory.  Nothing here allocates: before a batch the Ledger adds reserves until the last one is
 * sure to suffice (`reserve_size`, `ledger_add_reserve`), so no row can fail; after it, it frees
 * the retired tables and allocates the one that would suit better (`ledger_desired_size`,
 * `ledger_install`).  A reserve is not written until it is used or retired (16 bytes): it takes
 * address space only.
 */
#ifndef ACKCORE_GROWTH_H
#define ACKCORE_GROWTH_H

#include "ledger.h"
#if defined(__linux__)
#include <sys/mman.h>
#endif

/* ---- load -------------------------------------------------------------------------------- */

enum {
    /* Maximum load, in entries per 64 buckets (192 slots): of a table sized up front, and of one
     * that is larger than that.  92 is what 48 bytes an entry allow: (64 + 4) * 64 / 92 = 47.3
     * without a clock.  70 leaves half as many displaced, each of which costs its rows a second
     * cache line; it takes 62 bytes an entry, and 94 just after growth by half. */
    MAX_LOAD_SIZED = 92,
    MAX_LOAD_GROWN = 70,
    LOW_WATER = 8
};

/* n * times / by, for numbers whose product would be too large. */
INLINE size_t scaled(size_t n, size_t times, size_t by) {
    return n / by * times + n % by * times / by;
}
/* Entries that a table of n buckets takes.  A lower load factor is faster and costs memory: a table
 * sized up front keeps to its size, those that follow have room. */
INLINE size_t limit_of(size_t n, size_t min_buckets) {
    return scaled(n, n <= min_buckets ? MAX_LOAD_SIZED : MAX_LOAD_GROWN, 64);
}
/* Buckets of a table sized up front, with some room above what was asked for, so that a full ledger
 * still takes blocks of rows whole; a small one is four times as large, and so much the faster. */
INLINE size_t buckets_for(size_t entries) {
    const size_t roomy = entries < 1024 ? 4 * entries : 4096;
    const size_t tight = entries + (entries < 1024 ? 64 : 1024);
    return scaled(roomy > tight ? roomy : tight, 64, MAX_LOAD_SIZED) + 1;
}

/* Buckets of a grown table for so many entries, with some room for what follows. */
static size_t buckets_after_growth(const ledger_t *l, size_t entries) {
    const size_t n = scaled(entries + entries / 32 + 64, 64, MAX_LOAD_GROWN) + 1;
    return n < l->min_buckets ? l->min_buckets : n;
}

/* ---- retired tables --------------------------------------------------------------------- */

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

/* ---- migration -------------------------------------------------------------------------- */

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

/* ---- reserves --------------------------------------------------------------------------- */

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
/* Let a reserve with room for the entries and these rows take over; 0: there is none. */
COLD int grow(ledger_t *l, size_t rows) {
    table_t t;
    if (!take_reserve(l, l->used + rows, &t)) return 0;
    start_migration(l, t);
    l->growths++;
    /* Two home buckets a row: done before the new table is full. */
    ledger_migrate(l, rows * 2);
    return 1;
}

/* ---- another seed, a smaller table ------------------------------------------------------ */

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

/* ---- begin and end ---------------------------------------------------------------------- */

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

#endif
