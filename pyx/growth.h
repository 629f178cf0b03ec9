/* growth.h - the tables of a ledger: their load, and when another one replaces them.
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
 * Shrinking.  `peak` is the largest number of entries during the last `work` rows; a turn counts as
 * `limit` rows.  When `work` is 4 * limit and there is no `old`, both start anew.  A table that
 * grew then shrinks if `peak` was below limit / LOW_WATER: to room for twice the peak, so that
 * entries must double before it grows again.
 *
 * Reseed.  The hash has a secret seed.  A probe of more than PROBE_LIMIT buckets, which is too
 * unlikely to be chance, sets `needs_reseed`: the table is still correct, and is rebuilt with
 * another seed when there is memory, a reserve within a batch or `install` after it.
 *
 * Memory.  No function here allocates.  Before a batch, the Ledger adds reserves until the last one
 * certainly suffices (`reserve_size`, `ledger_add_reserve`), so no row can fail.  After the batch,
 * it frees retired tables and allocates one of a better size (`ledger_desired_size`,
 * `ledger_install`).  A reserve is not written until it is used or retired (16 bytes), so it takes
 * only address space.
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
/* The maximum number of entries in n buckets.  A lower load factor is faster and costs memory: a
 * table sized up front keeps its size, later ones have more room. */
INLINE size_t limit_of(size_t n, size_t min_buckets) {
    return scaled(n, n <= min_buckets ? MAX_LOAD_SIZED : MAX_LOAD_GROWN, 64);
}
/* Buckets of a table sized up front, with room beyond the requested capacity, so that a full ledger
 * still takes whole blocks of rows; a small table is four times as large, which is faster. */
INLINE size_t buckets_for(size_t entries) {
    const size_t roomy = entries < 1024 ? 4 * entries : 4096;
    const size_t tight = entries + (entries < 1024 ? 64 : 1024);
    return scaled(roomy > tight ? roomy : tight, 64, MAX_LOAD_SIZED) + 1;
}

/* Buckets of a grown table for a number of entries, with room for later ones. */
static size_t buckets_after_growth(const ledger_t *ledger, size_t entries) {
    const size_t n = scaled(entries + entries / 32 + 64, 64, MAX_LOAD_GROWN) + 1;
    return n < ledger->min_buckets ? ledger->min_buckets : n;
}

/* ---- retired tables --------------------------------------------------------------------- */

static void retire(ledger_t *ledger, table_t *table) {
    retired_t *head = (retired_t *)table->buckets;
    void *owner = table->owner;
    if (table->n_buckets == 0) return;
    head->owner = owner;
    head->next = ledger->retired;
    ledger->retired = head;
    memset(table, 0, sizeof *table);
}
static void *next_retired(ledger_t *ledger) { /* the owner of a table that may be freed, or NULL */
    void *owner;
    if (ledger->retired == NULL) return NULL;
    owner = ledger->retired->owner;
    ledger->retired = ledger->retired->next;
    return owner;
}

/* ---- migration -------------------------------------------------------------------------- */

/* Move an entry from the old table to the new one, or drop it if it is too old to be taken. */
static void migrate_entry(ledger_t *ledger, entry_t entry) {
    place_t place;
    size_t index = home_bucket(ledger->cur.n_buckets, hash_of(ledger->seed, entry.key));
    if (UNLIKELY(age_of(ledger, entry.stamp) > ledger->turns)) {
        ledger->used--;
        ledger->counts[entry.stamp]--;
        ledger->dead--;
        ledger->orphans += entry.not_task >= 0;
    } else if (UNLIKELY(table_insert(&ledger->cur, index, entry, &place) > PROBE_LIMIT))
        ledger->needs_reseed = 1;
}
/* Move the entries of this home bucket of the old table, also those that were displaced. */
static void migrate_home(ledger_t *ledger, size_t index) {
    table_t *table = &ledger->old;
    for (size_t smaller = index, distance = 0; distance < table->n_buckets;
         smaller = next_bucket(table, smaller), distance++) {
        bucket_t *bucket = &table->buckets[smaller];
        for (unsigned slot = 0; slot < SLOTS; slot++)
            while (bucket->stamps[slot] &&
                   home_bucket(table->n_buckets, hash_of(ledger->seed, bucket->keys[slot])) ==
                       index) {
                entry_t entry = entry_at(table, smaller, slot);
                table_erase(table, ledger->seed, smaller,
                            slot); /* may shift another of the same home here */
                migrate_entry(ledger, entry);
            }
        if (bucket->overflow_count == 0) break;
    }
}
/* Return the memory of migrated buckets a piece at a time: to unmap a large table at once takes
 * tens of milliseconds.  Returned pages read as zeros, that is, as free slots, so there must be no
 * entry.  While the last bucket has overflow, its displaced entries are in the first buckets.  They
 * fill them without a gap, so fewer than OVERFLOW_MAX of them are all in the first piece. */
static void release_migrated(ledger_t *ledger) {
#if defined(__linux__)
    enum { PIECE = 2 << 20 };
    const uint8_t overflow = ledger->old.buckets[ledger->old.n_buckets - 1].overflow_count;
    const uintptr_t start = (uintptr_t)ledger->old.buckets;
    uintptr_t from = (start + ledger->released_to + PIECE - 1) / PIECE * PIECE;
    const uintptr_t to = (uintptr_t)&ledger->old.buckets[ledger->migrated] / PIECE * PIECE;
    if (overflow && from < start + PIECE) from += PIECE;
    if (to <= from || overflow == OVERFLOW_MAX) return;
    madvise((void *)from, to - from, MADV_DONTNEED); /* if this fails, it is freed with the rest */
    ledger->released += to - from;
    ledger->released_to = to - start;
#endif
}
static void ledger_migrate(ledger_t *ledger, size_t homes) {
    size_t end = ledger->old.n_buckets - ledger->migrated < homes ? ledger->old.n_buckets
                                                                  : ledger->migrated + homes;
    if (ledger->old.n_buckets == 0) return;
    while (ledger->migrated < end) migrate_home(ledger, ledger->migrated++);
    if (ledger->migrated == ledger->old.n_buckets) {
        retire(ledger, &ledger->old);
        ledger->take_at = 0;
    } else
        release_migrated(ledger);
}
static void start_migration(ledger_t *ledger, table_t table) {
    ledger_migrate(ledger, WHOLE);
    ledger->old = ledger->cur;
    ledger->cur = table;
    ledger->migrated = ledger->released = ledger->released_to = ledger->populated = 0;
    ledger->limit = limit_of(table.n_buckets, ledger->min_buckets);
    ledger->sweep_at = ledger->take_at = 0;
}

/* ---- reserves --------------------------------------------------------------------------- */

/* Take the smallest reserve with room for that many entries; smaller ones are retired. */
static int take_reserve(ledger_t *ledger, size_t entries, table_t *table) {
    size_t chosen = 0;
    while (chosen < ledger->n_reserves &&
           limit_of(ledger->reserves[chosen].n_buckets, ledger->min_buckets) < entries)
        chosen++;
    if (chosen == ledger->n_reserves) return 0;
    *table = ledger->reserves[chosen];
    for (size_t smaller = 0; smaller < chosen; smaller++)
        retire(ledger, &ledger->reserves[smaller]);
    ledger->n_reserves -= chosen + 1;
    memmove(ledger->reserves, ledger->reserves + chosen + 1, ledger->n_reserves * sizeof *table);
    return 1;
}
/* Buckets of the reserve to add before n more rows; 0: none is needed.  Each is half as large again
 * as the one before (or twice a table sized up front), so growth stops near the size that the rows
 * need; the last one suffices for any rows.  A long batch also gets one to reseed into.  `frugal`,
 * after a failed allocation: only the size that n rows may need. */
static size_t reserve_size(const ledger_t *ledger, size_t n, int frugal) {
    enum { LONG_BATCH = 65536 };
    const size_t limit =
        ledger->n_reserves
            ? limit_of(ledger->reserves[ledger->n_reserves - 1].n_buckets, ledger->min_buckets)
            : ledger->limit;
    /* Entries to buckets: 70/64 * 11/8 = 1.50 times the last table, 92/64 * 11/8 = 1.98 times one
     * sized up front. */
    const size_t next = scaled(limit, 11, 8);
    if (ledger->used + n <= limit)
        return n >= LONG_BATCH && ledger->n_reserves == 0 && !frugal ? next : 0;
    return frugal || ledger->n_reserves == MAX_RESERVES - 1
               ? buckets_after_growth(ledger, ledger->used + n)
               : next;
}
static void ledger_add_reserve(ledger_t *ledger, table_t table) {
    if (ledger->n_reserves == MAX_RESERVES ||
        (ledger->n_reserves &&
         ledger->reserves[ledger->n_reserves - 1].n_buckets >= table.n_buckets))
        retire(ledger, &table);
    else
        ledger->reserves[ledger->n_reserves++] = table;
}
/* Replace the table by a reserve with room for the entries and these rows; 0: there is none. */
COLD int grow(ledger_t *ledger, size_t rows) {
    table_t table;
    if (!take_reserve(ledger, ledger->used + rows, &table)) return 0;
    start_migration(ledger, table);
    ledger->growths++;
    /* Two home buckets a row: done before the new table is full. */
    ledger_migrate(ledger, rows * 2);
    return 1;
}

/* ---- another seed, a smaller table ------------------------------------------------------ */

static void reseed_into(ledger_t *ledger, table_t table) {
    table_t from;
    ledger_migrate(ledger, WHOLE);
    from = ledger->cur;
    ledger->secret = mix64(ledger->secret + 1);
    ledger->seed = seed_from(ledger->secret);
    ledger->cur = table;
    /* Same size: keep the limit, as `min_buckets` may have been lowered since (restore). */
    if (table.n_buckets != from.n_buckets)
        ledger->limit = limit_of(table.n_buckets, ledger->min_buckets);
    ledger->sweep_at = ledger->take_at = 0;
    ledger->needs_reseed = 0;
    ledger->growths++;
    for (size_t index = 0; index < from.n_buckets; index++)
        for (unsigned slot = 0; slot < SLOTS; slot++)
            if (from.buckets[index].stamps[slot])
                migrate_entry(ledger, entry_at(&from, index, slot));
    retire(ledger, &from);
}
/* ---- pages ahead of a migration --------------------------------------------------------- */

/* The bytes of a large table that grows whose pages to request now, 0 for none: those that the
 * migration will write next, up to AHEAD or a sixteenth of the table, so that memory stays within
 * that of the full table. */
static size_t ledger_pages_ahead(ledger_t *ledger, char **from) {
    enum { PAGE = 4096, LEAST_TABLE = 16 << 20, AHEAD = 16 << 20 };
    const table_t *const cur = &ledger->cur, *const old = &ledger->old;
    const size_t bytes = cur->n_buckets * sizeof(bucket_t);
    const size_t ahead = bytes / 16 < AHEAD ? bytes / 16 : AHEAD;
    if (old->n_buckets == 0 || old->n_buckets >= cur->n_buckets || bytes < LEAST_TABLE) return 0;
    const size_t written = cur->n_buckets * ledger->migrated / old->n_buckets * sizeof(bucket_t);
    const size_t start = ledger->populated > written ? ledger->populated : written;
    const size_t end = written + ahead < bytes ? written + ahead : bytes;
    if (start > written + ahead / 2 || start >= end) return 0;
    ledger->populated = end;
    const uintptr_t first = ((uintptr_t)cur->buckets + start) / PAGE * PAGE;
    *from = (char *)first;
    return ((uintptr_t)cur->buckets + end) / PAGE * PAGE - first;
}
/* Request the pages of a table from the system, without a change of their contents, a piece at a
 * time, so that other threads wait for the address space no longer than for a piece.  Returns 0 if
 * the system cannot do that (before Linux 5.14), or there is no memory. */
static int populate_pages(char *from, size_t bytes) {
#if defined(__linux__)
    enum { PIECE = 2 << 20, POPULATE_WRITE = 23 };
    for (size_t at = 0; at < bytes; at += PIECE)
        if (madvise(from + at, bytes - at < PIECE ? bytes - at : PIECE, POPULATE_WRITE)) return 0;
    return 1;
#else
    (void)from;
    (void)bytes;
    return 0;
#endif
}

/* Called after rows and turns: sets `shrink_to` if the table was far too large for a long time. */
static void consider_shrink(ledger_t *ledger) {
    if (ledger->work < 4 * ledger->limit || ledger->old.n_buckets) return;
    ledger->shrink_to = 0;
    if (ledger->peak * LOW_WATER < ledger->limit && ledger->cur.n_buckets > ledger->min_buckets)
        ledger->shrink_to = buckets_after_growth(ledger, 2 * ledger->peak);
    ledger->work = 0;
    ledger->peak = ledger->used;
}
/* The buckets of a better table than the present one, to reseed or to shrink; 0: there is none. */
static size_t ledger_desired_size(const ledger_t *ledger) {
    return ledger->needs_reseed
               ? (ledger->old.n_buckets > ledger->cur.n_buckets ? ledger->old.n_buckets
                                                                : ledger->cur.n_buckets)
               : ledger->shrink_to;
}
/* Move the entries to a table of that size, or retire it if the size is no longer right. */
static void ledger_install(ledger_t *ledger, table_t table) {
    if (ledger->needs_reseed && (table.n_buckets == ledger->cur.n_buckets ||
                                 limit_of(table.n_buckets, ledger->min_buckets) >= ledger->used))
        reseed_into(ledger, table);
    else if (ledger->shrink_to && table.n_buckets < ledger->cur.n_buckets &&
             limit_of(table.n_buckets, ledger->min_buckets) >= 2 * ledger->used &&
             ledger->old.n_buckets == 0) {
        for (size_t k = 0; k < ledger->n_reserves; k++) retire(ledger, &ledger->reserves[k]);
        ledger->n_reserves = 0;
        start_migration(ledger, table);
    } else
        retire(ledger, &table);
    ledger->shrink_to = 0;
}

/* ---- begin and end ---------------------------------------------------------------------- */

static void ledger_open(ledger_t *ledger, table_t table, int turns, int refresh_on_ack,
                        uint64_t secret) {
    memset(ledger, 0, sizeof *ledger);
    ledger->cur = table;
    ledger->min_buckets = table.n_buckets;
    ledger->limit = limit_of(table.n_buckets, table.n_buckets);
    ledger->stamp = 1;
    ledger->turns = turns;
    ledger->refresh_on_ack = refresh_on_ack;
    ledger->secret = secret;
    ledger->seed = seed_from(secret);
}
/* Retire everything. */
static void ledger_close(ledger_t *ledger) {
    retire(ledger, &ledger->cur);
    retire(ledger, &ledger->old);
    while (ledger->n_reserves) retire(ledger, &ledger->reserves[--ledger->n_reserves]);
}

#endif
