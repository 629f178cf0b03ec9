/* ledger.h - the ledger over its table: what each message means, turns of the wheel, settling.
 *
 * Time is a stamp, 1..127, that every turn advances; an entry carries the stamp under which it was
 * last put, and its age is the number of turns since.  `counts` knows how many entries carry each
 * stamp, so a turn is O(1): the entries that reach age N = `turns` are dead from then on, invisible
 * to every search, and merely wait.  Those of age N may be taken (`take_expired`); older ones were
 * not, and are swept away a few buckets at a time by the traffic that follows.  What is visible is
 * therefore what an eager sweep would leave.
 *
 * Memory.  Nothing here allocates.  The Ledger lays in spare tables before a batch
 * (`spare_needed`), so that no row can meet a lack of memory; it frees what was retired afterwards.
 * A spare that is never used is never touched, and costs address space only.
 */
#ifndef ACKCORE_LEDGER_H
#define ACKCORE_LEDGER_H

#include "table.h"
#if defined(__linux__)
#include <sys/mman.h>
#endif

/* ---- stamps ------------------------------------------------------------------------------ */

/* One bit a slot: which hold an entry of at least that age, `now` being the present stamp. */
INLINE uint32_t aged_slots(const bucket_t *b, int now, int age) {
#if SIMD >= 1
    const __m128i seven = _mm_set1_epi8(0x7f), stamp = _mm_set1_epi8((char)now);
    const __m128i stamps = _mm_and_si128(load_stamps(b), seven);
    const __m128i wrapped = _mm_and_si128(_mm_cmpgt_epi8(stamps, stamp), seven);
    const __m128i ages = _mm_add_epi8(_mm_sub_epi8(stamp, stamps), wrapped);
    const __m128i old = _mm_cmpgt_epi8(ages, _mm_set1_epi8((char)(age - 1)));
    const __m128i free_ = _mm_cmpeq_epi8(stamps, _mm_setzero_si128());
    return (uint32_t)_mm_movemask_epi8(_mm_andnot_si128(free_, old)) & ALL_SLOTS;
#else
    uint32_t aged = 0;
    for (int s = 0; s < SLOTS; s++) {
        const int stamp = b->stamps[s] & ~MARKED;
        const int is = now - stamp + (stamp > now ? STAMPS : 0);
        aged |= (uint32_t)(stamp != 0 && is >= age) << s;
    }
    return aged;
#endif
}
INLINE uint32_t dead_slots(const ledger_t *l, const bucket_t *b) {
    return aged_slots(b, l->stamp, l->turns);
}

/* ---- places ------------------------------------------------------------------------------ */

INLINE table_t *home_of(ledger_t *l, uint64_t hash, size_t *i) {
    if (UNLIKELY(l->old.n != 0)) {
        *i = home_in(l->old.n, hash);
        if (*i >= l->front) return &l->old;
    }
    *i = home_in(l->cur.n, hash);
    return &l->cur;
}
static int ledger_find(ledger_t *l, uint64_t key, place_t *place) {
    uint32_t match, free_;
    size_t i;
    table_t *t = home_of(l, hash_of(l->seed, key), &i);
    for (;; i = after(t, i)) {
        probe(&t->buckets[i], key, &match, &free_);
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
    table_t *t = home_of(l, hash_of(l->seed, e.key), &i);
    if (UNLIKELY(table_insert(t, i, e, place) > CHAIN_LIMIT)) l->tangled = 1;
    l->used++;
    l->counts[e.stamp]++;
}
/* An entry leaves for good: decided, or, if it was dead, forgotten. */
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

/* ---- another layout: growth, shrinking, a new seed --------------------------------------- */

static void retire(ledger_t *l, table_t *t) {
    retired_t *r = (retired_t *)t->buckets;
    void *owner = t->owner;
    if (t->n == 0) return;
    r->owner = owner;
    r->next = l->retired;
    l->retired = r;
    memset(t, 0, sizeof *t);
}
static void *next_retired(ledger_t *l) { /* whose memory may go, or NULL */
    void *owner;
    if (l->retired == NULL) return NULL;
    owner = l->retired->owner;
    l->retired = l->retired->next;
    return owner;
}
/* Move an entry from the old layout to the new, or forget it if nobody can see it any more. */
static void ledger_carry(ledger_t *l, entry_t e) {
    place_t place;
    size_t i = home_in(l->cur.n, hash_of(l->seed, e.key));
    if (UNLIKELY(age_of(l, e.stamp) > l->turns)) {
        l->used--;
        l->counts[e.stamp]--;
        l->dead--;
        l->orphans += e.not_task >= 0;
    } else if (UNLIKELY(table_insert(&l->cur, i, e, &place) > CHAIN_LIMIT))
        l->tangled = 1;
}
/* Carry the entries whose home is bucket i of the old table, wherever they had to go. */
static void migrate_home(ledger_t *l, size_t i) {
    table_t *t = &l->old;
    for (size_t j = i, distance = 0; distance < t->n; j = after(t, j), distance++) {
        bucket_t *b = &t->buckets[j];
        for (unsigned s = 0; s < SLOTS; s++)
            while (b->stamps[s] && home_in(t->n, hash_of(l->seed, b->keys[s])) == i) {
                entry_t e = entry_at(t, j, s);
                table_erase(t, l->seed, j, s); /* may put another one of the same home here */
                ledger_carry(l, e);
            }
        if (b->over == 0) break;
    }
}
/* Give the memory behind the front back a piece at a time: to unmap a large table in one go takes
 * tens of milliseconds.  Pages given back read as zeros, which is to say as free slots; the table
 * must hold nothing there, and entries that went past its end might lie at its beginning. */
static void give_back(ledger_t *l) {
#if defined(__linux__)
    enum { PIECE = 2 << 20 };
    const uintptr_t start = (uintptr_t)l->old.buckets;
    const uintptr_t from = (start + l->given_back + PIECE - 1) / PIECE * PIECE;
    const uintptr_t to = (uintptr_t)&l->old.buckets[l->front] / PIECE * PIECE;
    if (to <= from || l->old.buckets[l->old.n - 1].over) return;
    madvise((void *)from, to - from, MADV_DONTNEED); /* failing, it is freed with the rest */
    l->given_back = to - start;
#endif
}
static void ledger_migrate(ledger_t *l, size_t homes) {
    size_t end = l->old.n - l->front < homes ? l->old.n : l->front + homes;
    if (l->old.n == 0) return;
    while (l->front < end) migrate_home(l, l->front++);
    if (l->front == l->old.n) {
        retire(l, &l->old);
        l->taking = 0;
    } else
        give_back(l);
}
static void lay_out_in(ledger_t *l, table_t t) {
    ledger_migrate(l, WHOLE);
    l->old = l->cur;
    l->cur = t;
    l->front = l->given_back = 0;
    l->limit = limit_of(t.n, l->least);
    l->sweep = l->taking = 0;
}
static void reseed_in(ledger_t *l, table_t t) {
    table_t from;
    ledger_migrate(l, WHOLE);
    from = l->cur;
    l->secret = mix64(l->secret + 1);
    l->seed = seed_from(l->secret);
    l->cur = t;
    if (t.n != from.n) l->limit = limit_of(t.n, l->least);
    l->sweep = l->taking = 0;
    l->tangled = 0;
    l->growths++;
    for (size_t i = 0; i < from.n; i++)
        for (unsigned s = 0; s < SLOTS; s++)
            if (from.buckets[i].stamps[s]) ledger_carry(l, entry_at(&from, i, s));
    retire(l, &from);
}
/* The first spare with room for that many entries, taken out; smaller ones are of no more use. */
static int take_spare(ledger_t *l, size_t entries, table_t *t) {
    size_t k = 0;
    while (k < l->n_spares && limit_of(l->spares[k].n, l->least) < entries) k++;
    if (k == l->n_spares) return 0;
    *t = l->spares[k];
    for (size_t j = 0; j < k; j++) retire(l, &l->spares[j]);
    l->n_spares -= k + 1;
    memmove(l->spares, l->spares + k + 1, l->n_spares * sizeof *t);
    return 1;
}
/* Buckets of a table that takes over so many entries, with some room for what follows. */
static size_t taking_over(const ledger_t *l, size_t entries) {
    const size_t n = scaled(entries + entries / 32 + 64, 64, GROWN) + 1;
    return n < l->least ? l->least : n;
}
/* Buckets of the table to lay in before n more rows; 0: go ahead.  Each spare is half as large again as the
 * one before (as a table sized up front: twice), so that growth stops near what the rows turn out to
 * need; the last one is sure to do.  A long batch also gets one for a new seed.  `frugal`, where memory
 * is short: what must be. */
static size_t spare_needed(const ledger_t *l, size_t n, int frugal) {
    enum { LONG_BATCH = 65536 };
    const size_t limit = l->n_spares ? limit_of(l->spares[l->n_spares - 1].n, l->least) : l->limit;
    const size_t next = scaled(limit, 11, 8);
    if (l->used + n <= limit) return n >= LONG_BATCH && l->n_spares == 0 && !frugal ? next : 0;
    return frugal || l->n_spares == MAX_SPARES - 1 ? taking_over(l, l->used + n) : next;
}
static void ledger_lay_in(ledger_t *l, table_t t) {
    if (l->n_spares == MAX_SPARES || (l->n_spares && l->spares[l->n_spares - 1].n >= t.n))
        retire(l, &t);
    else
        l->spares[l->n_spares++] = t;
}
/* Called after rows and turns: has the table been far too large for a long time? */
static void ledger_weigh(ledger_t *l) {
    if (l->work < 4 * l->limit || l->old.n) return;
    l->shrink_to = 0;
    if (l->peak * LOW_WATER < l->limit && l->cur.n > l->least) l->shrink_to = taking_over(l, 2 * l->peak);
    l->work = 0;
    l->peak = l->used;
}
/* Buckets of a table that would suit better than the present one, or 0. */
static size_t ledger_wants(const ledger_t *l) {
    return l->tangled ? (l->old.n > l->cur.n ? l->old.n : l->cur.n) : l->shrink_to;
}
/* Take over such a table, unless things have changed since. */
static void ledger_relay(ledger_t *l, table_t t) {
    if (l->tangled && (t.n == l->cur.n || limit_of(t.n, l->least) >= l->used))
        reseed_in(l, t);
    else if (l->shrink_to && t.n < l->cur.n && limit_of(t.n, l->least) >= 2 * l->used && l->old.n == 0) {
        for (size_t k = 0; k < l->n_spares; k++) retire(l, &l->spares[k]);
        l->n_spares = 0;
        lay_out_in(l, t);
    } else
        retire(l, &t);
    l->shrink_to = 0;
}

static void ledger_open(ledger_t *l, table_t t, int turns, int refresh_on_ack, uint64_t secret) {
    memset(l, 0, sizeof *l);
    l->cur = t;
    l->least = t.n;
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
    while (l->n_spares) retire(l, &l->spares[--l->n_spares]);
}

/* ---- turns ------------------------------------------------------------------------------- */

/* Forget the entries of a bucket of `cur` that nobody took, one by one. */
COLD void sweep_bucket(ledger_t *l, size_t i) {
    const bucket_t *b = &l->cur.buckets[i];
    for (unsigned s = 0; s < SLOTS; s++) {
        place_t at = {&l->cur, i, s};
        while (b->stamps[s] && age_of(l, b->stamps[s] & ~MARKED) > l->turns)
            ledger_erase(l, at); /* may pull another one into this slot */
    }
}
/* Sweep up to that many buckets clear of entries that were not taken in their time. */
static void ledger_sweep(ledger_t *l, size_t buckets) {
    enum { SWEEP_AHEAD = 8 };
    const int turns = l->turns, now = l->stamp;
    uint32_t over;
    size_t i = l->sweep;
    if (l->old.n || dropped(l) == 0) return; /* moving to the new table leaves them behind */
    over = l->cur.buckets[i ? i - 1 : l->cur.n - 1].over;
    for (; buckets && dropped(l) > 0; buckets--) {
        bucket_t *b = &l->cur.buckets[i];
        const uint32_t gone = aged_slots(b, now, turns + 1), older = aged_slots(b, now, turns + 2);
        prefetch(b + SWEEP_AHEAD);
        if (UNLIKELY(over | b->over | older)) {
            if (gone) sweep_bucket(l, i);
        } else if (gone) {
            /* None went past this bucket or came from before it, so a slot is all that an entry is;
             * and all are of one age.  Masks: which slots, nothing foretells. */
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
        over = b->over;
        i = after(&l->cur, i);
    }
    l->sweep = i;
}
static void ledger_rotate(ledger_t *l) {
    int next = l->stamp % STAMPS + 1;
    l->untaken += takeable(l);
    l->work += l->limit;
    if (UNLIKELY(l->counts[next] != 0)) { /* 127 turns without traffic, or 126 buckets */
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
    l->taking = 0;
    /* Without traffic, turns alone see to it that room is had and memory given back. */
    if (l->old.n > l->cur.n) ledger_migrate(l, SLICE);
    ledger_sweep(l, SLICE);
    ledger_weigh(l);
}

#endif
