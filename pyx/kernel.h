/* kernel.h - rows: one message at a time, and the loops over columns of them.
 *
 * `row` is the meaning of a message (SEMANTICS 2 and 4) and handles every case.  `run_block` is
 * the same for columns, with a straight path for what nearly every row is: an INIT or an ACK whose
 * entry is in its home bucket or goes there.  What makes it fast, in order of effect (measured;
 * bench/README.md):
 *
 *  1. No branch that data decides.  Found or not, init or not, complete or not are masks; a
 *     mispredicted branch costs as much as the whole row.  Outcomes are written always and the
 *     cursor advances by a mask.  `opaque` keeps the compiler from turning masks into branches.
 *  2. A bucket is probed whole, so there is no walk whose length varies.
 *  3. Buckets are prefetched a fixed distance ahead (`AHEAD`), and in a table beyond the caches
 *     the bucket after a full one too (`PEEK`): a search that leaves its home finds it there.
 *
 * A PLAIN ledger has no dead entries, no move to another table under way, no clock and no refresh on
 * ack; an AGED one has dead entries and is plain otherwise.  The GENERAL ones pay for all those tests,
 * which go one way all the time.
 */
#ifndef ACKCORE_KERNEL_H
#define ACKCORE_KERNEL_H

#include "ledger.h"

enum {
    AHEAD = 64,
    PEEK = 24,
    BLOCK = 512,
    BIG_BLOCK = 1024,        /* in a table beyond the caches */
    BEYOND_CACHES = 8 << 20, /* bytes */
    LEAST_BLOCK = 64
};
enum { PLAIN, AGED, GENERAL }; /* ledgers, as the loop over a block sees them */

INLINE uint32_t opaque(uint32_t x) {
    __asm__("" : "+r"(x));
    return x;
}

/* ---- one message ------------------------------------------------------------------------- */

static void set_stamp(ledger_t *l, place_t at, int stamp) {
    uint8_t *was = &at.table->buckets[at.i].stamps[at.s];
    l->counts[*was & ~MARKED]--;
    l->counts[stamp]++;
    *was = (uint8_t)((*was & MARKED) | stamp);
}
static void add_mark(place_t at, uint8_t bits) {
    uint8_t *stamp = &at.table->buckets[at.i].stamps[at.s];
    uint8_t *mark = &at.table->marks[at.i].marks[at.s];
    if (bits == 0) return;
    *mark = (uint8_t)((*stamp & MARKED ? *mark : 0) | bits);
    *stamp |= MARKED;
}
INLINE uint8_t mark_at(place_t at) {
    return at.table->buckets[at.i].stamps[at.s] & MARKED ? at.table->marks[at.i].marks[at.s] : 0;
}
/* Apply (`decide`) or fold one message; returns the outcomes written, 0 or 1, at out[m]. */
COLD size_t row(ledger_t *l, uint64_t key, uint64_t val, int32_t task, int64_t time, int decide,
                const outcomes_t *out, size_t m) {
    place_t at;
    bucket_t *b;
    int reset = 0, kind = STATUS_OPEN;
    if (!ledger_find(l, key, &at)) {
        entry_t e = {key, 0, time, time, 0, (uint8_t)l->stamp, 0};
        ledger_insert(l, e, &at);
    }
    b = &at.table->buckets[at.i];
    if (task >= TASK_ACK) b->vals[at.s] ^= val;
    if (task >= 0) {
        int32_t was = b->not_tasks[at.s], is = ~task;
        if (was < 0) {
            l->second_inits++;
            add_mark(at, (uint8_t)(MARK_INITS | (was != is ? MARK_TASKS_DIFFER : 0)));
            if (!decide && was < is) is = was; /* folding keeps the greatest task */
        }
        b->not_tasks[at.s] = is;
    } else if (task == TASK_FAIL)
        add_mark(at, MARK_FAILED);
    else if (task == TASK_RESET)
        reset = 1;
    if (task <= TASK_FAIL || l->refresh_on_ack || !decide) set_stamp(l, at, l->stamp);
    if (at.table->times) {
        times_t *t = &at.table->times[at.i];
        if (decide || time > t->last[at.s]) t->last[at.s] = time;
        if (!decide && time < t->first[at.s]) t->first[at.s] = time;
    }
    if (!decide || b->not_tasks[at.s] >= 0) return 0;
    if (b->vals[at.s] == 0)
        kind = STATUS_ACKED;
    else if (mark_at(at) & MARK_FAILED)
        kind = STATUS_FAILED;
    else if (reset)
        kind = STATUS_RESET_TIMEOUT;
    else
        return 0;
    out->root_ids[m] = (int64_t)key;
    out->tasks[m] = ~b->not_tasks[at.s];
    out->kinds[m] = (uint8_t)kind;
    if (out->elapsed) out->elapsed[m] = (int64_t)((uint64_t)time - (uint64_t)at.table->times[at.i].first[at.s]);
    if (kind != STATUS_RESET_TIMEOUT) ledger_erase(l, at);
    return 1;
}

/* The same for a row of columns, whose id has been read already. */
COLD size_t row_of(ledger_t *l, const batch_t *in, size_t j, uint64_t id, int decide,
                   const outcomes_t *out, size_t m) {
    const int64_t time = in->times ? in->times[j] : in->now;
    return row(l, id, in->vals ? in->vals[j] : 0, in->tasks ? in->tasks[j] : in->kind, time, decide, out, m);
}

/* The times beside a bucket of either table. */
INLINE times_t *times_of(const ledger_t *l, const bucket_t *b) {
    const table_t *t = (uintptr_t)b - (uintptr_t)l->cur.buckets < l->cur.n * sizeof *b ? &l->cur : &l->old;
    return &t->times[b - t->buckets];
}
INLINE void prefetch_times(const times_t *t) {
    __builtin_prefetch(t, 1, 3);
    __builtin_prefetch(&t->last, 1, 3);
}

/* ---- a block of messages, between two looks at the table's size ---------------------------- */

INLINE size_t run_block(ledger_t *l, const batch_t *in, size_t p, size_t n, const outcomes_t *out,
                        size_t m, const int has_tasks, const int decide, const int mode,
                        const int peek) {
    const uint64_t *restrict vals = in->vals + p;
    const int32_t *restrict tasks = has_tasks ? in->tasks + p : NULL;
    const int32_t kind = in->kind;
    const uint32_t stamp = (uint32_t)l->stamp;
    const int turns = l->turns;
    int64_t *const restrict root_ids = out->root_ids;
    int32_t *const restrict out_tasks = out->tasks;
    struct {
        bucket_t *homes[BIG_BLOCK + AHEAD];
        uint64_t ids[BIG_BLOCK];
    } own;
    bucket_t **const homes = own.homes;
    uint64_t *const ids = own.ids;
    const size_t m0 = m;
    size_t fresh = 0; /* entries made on the straight path */
    size_t apart = 0; /* outcomes written by `row` */

    /* Read once: should another thread write to the caller's column, an id must still go to its own
     * home, or a search would run into the hole. */
    memcpy(ids, in->root_ids + p, n * sizeof *ids);
    if (mode != GENERAL || l->old.n == 0) {
        const seed_t seed = l->seed;
        bucket_t *const buckets = l->cur.buckets;
        const size_t in_table = l->cur.n;
        for (size_t j = 0; j < n; j++) homes[j] = &buckets[home_in(in_table, hash_of(seed, ids[j]))];
    } else
        for (size_t j = 0; j < n; j++) {
            size_t i;
            table_t *t = home_of(l, hash_of(l->seed, ids[j]), &i);
            homes[j] = &t->buckets[i];
        }
    for (size_t j = n; j < n + AHEAD; j++) homes[j] = homes[n - 1];
    for (size_t j = 0; j < AHEAD; j++) prefetch(homes[j]);

    for (size_t j = 0; j < n; j++) {
        uint32_t match, free_;
        prefetch(homes[j + AHEAD]);
        if (mode == GENERAL && l->cur.times) prefetch_times(times_of(l, homes[j + AHEAD]));
        if (peek) {
            const bucket_t *b = homes[j + PEEK];
            probe(b, 0, &match, &free_);
            prefetch(b + (free_ == 0));
        }
        bucket_t *const b = homes[j];
        const uint64_t id = ids[j];
        const int32_t task = has_tasks ? tasks[j] : kind;
        probe(b, id, &match, &free_);
        if (mode == AGED || (mode == GENERAL && l->dead)) match &= ~aged_slots(b, (int)stamp, turns);
        const uint32_t slots = match | free_ << 8; /* where it is, or else where it may go */
        if (UNLIKELY((slots == 0) | (task < TASK_ACK))) goto apart;
        const uint32_t slot = opaque((uint32_t)__builtin_ctz(slots));
        const size_t s = slot & 7;
        const uint32_t is_new = slot >> 3;
        const uint32_t was_stamp = b->stamps[s]; /* of a free slot this is 0, and so is the rest */
        const int32_t was = b->not_tasks[s];
        const int32_t init = ~task; /* negative for an INIT, 0 for an ACK */
        if (UNLIKELY((was_stamp | (uint32_t)(was & init) >> 24) & MARKED)) goto apart;
        const uint64_t val = b->vals[s] ^ vals[j];
        const int32_t is = was | init;
        b->keys[s] = id;
        b->vals[s] = val;
        fresh += is_new;
        uint32_t now_stamp = was_stamp | (stamp & -is_new);
        if (!decide || (mode == GENERAL && l->refresh_on_ack)) now_stamp = stamp;
        if (!decide || mode == GENERAL) {
            l->counts[was_stamp]--; /* counts[0] is nobody's */
            l->counts[now_stamp]++;
        }
        if (mode == GENERAL && l->cur.times) {
            times_t *t = times_of(l, b);
            const int64_t time = in->times ? in->times[p + j] : in->now;
            const int64_t first = is_new ? time : t->first[s], last = is_new ? time : t->last[s];
            t->first[s] = !decide && time < first ? time : first;
            t->last[s] = decide || time > last ? time : last;
            if (decide) out->elapsed[m] = (int64_t)((uint64_t)time - (uint64_t)first);
        }
        if (!decide) {
            b->not_tasks[s] = is;
            b->stamps[s] = (uint8_t)now_stamp;
            continue;
        }
        const uint32_t done = opaque((uint32_t)is >> 31 & (uint32_t)(val == 0));
        root_ids[m] = (int64_t)id;
        out_tasks[m] = ~is;
        m += done;
        l->counts[now_stamp] -= done;
        const uint32_t keep = done - 1; /* 0: complete */
        if (UNLIKELY(b->over & ~keep)) {
            size_t i;
            table_t *t = home_of(l, hash_of(l->seed, id), &i);
            b->stamps[s] = (uint8_t)now_stamp;
            table_erase(t, l->seed, i, s);
        } else {
            b->stamps[s] = (uint8_t)(now_stamp & keep); /* free again, if it is complete */
            b->not_tasks[s] = is & (int32_t)keep;
        }
        continue;
    apart:
        if (row_of(l, in, p + j, id, decide, out, m)) {
            m++;
            apart++;
        }
    }
    if (decide && mode != GENERAL) l->counts[stamp] += (int64_t)fresh;
    l->used += fresh - (m - m0 - apart);
    return m;
}

typedef size_t (*block_t)(ledger_t *, const batch_t *, size_t, size_t, const outcomes_t *, size_t);
#define BLOCK_OF(NAME, HAS_TASKS, DECIDE, MODE, PEEK)                                              \
    static __attribute__((noinline)) size_t NAME(ledger_t *l, const batch_t *in, size_t p, size_t n, \
                                                 const outcomes_t *out, size_t m) {               \
        return run_block(l, in, p, n, out, m, HAS_TASKS, DECIDE, MODE, PEEK);                      \
    }
BLOCK_OF(apply_cached, 1, 1, PLAIN, 0)
BLOCK_OF(apply_beyond, 1, 1, PLAIN, 1)
BLOCK_OF(apply_aged, 1, 1, AGED, 1)
BLOCK_OF(apply_general, 1, 1, GENERAL, 1)
BLOCK_OF(kind_cached, 0, 1, PLAIN, 0)
BLOCK_OF(kind_beyond, 0, 1, PLAIN, 1)
BLOCK_OF(kind_aged, 0, 1, AGED, 1)
BLOCK_OF(kind_general, 0, 1, GENERAL, 1)
BLOCK_OF(fold_cached, 1, 0, PLAIN, 0)
BLOCK_OF(fold_beyond, 1, 0, PLAIN, 1)
BLOCK_OF(fold_general, 1, 0, GENERAL, 1)

static block_t block_for(const ledger_t *l, const batch_t *in, int decide) {
    static const block_t blocks[3][4] = {{kind_cached, kind_beyond, kind_aged, kind_general},
                                         {apply_cached, apply_beyond, apply_aged, apply_general},
                                         {fold_cached, fold_beyond, fold_general, fold_general}};
    const int beyond = l->cur.n * sizeof(bucket_t) > BEYOND_CACHES;
    const int general = l->old.n || l->cur.times || l->refresh_on_ack;
    return blocks[in->tasks ? 1 + !decide : 0][general ? 3 : l->dead ? 2 : beyond];
}

/* ---- a batch ----------------------------------------------------------------------------- */

/* Make room for the next rows; returns how many may go at once.  Between blocks the table moves
 * on: a slice of a migration, a slice of a sweep, growth into a spare. */
static size_t next_block(ledger_t *l, size_t rest) {
    size_t rows = l->cur.n * sizeof(bucket_t) > BEYOND_CACHES ? BIG_BLOCK : BLOCK;
    if (rows > rest) rows = rest;
    /* A table that is left for a smaller one is nearly empty: go through it faster. */
    ledger_migrate(l, l->old.n > l->cur.n ? rows * 16 : rows);
    if (UNLIKELY(l->used + rows > l->limit)) {
        size_t room = l->limit > l->used ? l->limit - l->used : 0;
        table_t t;
        if (dropped(l) > 0 && room < LEAST_BLOCK) {
            ledger_migrate(l, WHOLE);
            ledger_sweep(l, WHOLE);
            room = l->limit > l->used ? l->limit - l->used : 0;
        }
        if (room >= LEAST_BLOCK || room >= rest)
            rows = room < rows ? room : rows;
        else if (take_spare(l, l->used + rows, &t)) {
            lay_out_in(l, t);
            l->growths++;
            ledger_migrate(l, rows); /* as many homes as rows, always: the old table cannot fill */
        }
    }
    /* Leisurely while there is room, so that a batch costs little more; dead entries take it up. */
    ledger_sweep(l, l->used + l->limit / 8 < l->limit ? (rows + 1) / 2 : rows * 2);
    if (UNLIKELY(l->tangled)) {
        table_t t;
        if (take_spare(l, l->used + rows, &t)) reseed_in(l, t);
    }
    l->work += rows;
    return rows;
}
static void after_block(ledger_t *l) {
    if (l->used > l->peak) l->peak = l->used;
}
static size_t run_batch(ledger_t *l, const batch_t *in, size_t n, const outcomes_t *out, int decide) {
    size_t m = 0;
    if (decide) memset(out->kinds, STATUS_ACKED, n); /* `row` writes the others */
    for (size_t p = 0, rows; p < n; p += rows) {
        rows = next_block(l, n - p);
        m = block_for(l, in, decide)(l, in, p, rows, out, m);
        after_block(l);
    }
    ledger_weigh(l);
    return m;
}
static size_t run_one(ledger_t *l, uint64_t key, uint64_t val, int32_t task, int64_t now,
                      const outcomes_t *out) {
    size_t m;
    next_block(l, 1);
    m = row(l, key, val, task, now, 1, out, 0);
    after_block(l);
    ledger_weigh(l);
    return m;
}
/* What must be had before n more rows: buckets of a spare table, 0 for nothing, or FULL if the
 * rows that have no entry now could take the ledger past `most` entries (-1: no bound). */
static size_t ledger_needs(ledger_t *l, size_t n, int64_t most, const uint64_t *ids,
                           size_t *missing, int frugal) {
    if (most >= 0 && live(l) + n > (size_t)most) {
        place_t at;
        *missing = 0;
        for (size_t j = 0; j < n; j++) *missing += !ledger_find(l, ids[j], &at);
        if (*missing && live(l) + *missing > (size_t)most) return FULL;
    }
    return spare_needed(l, n, frugal);
}

/* ---- entries ----------------------------------------------------------------------------- */

INLINE void put_column(const columns_t *out, size_t m, entry_t e, int age) {
    out->root_ids[m] = (int64_t)e.key;
    out->vals[m] = (int64_t)e.val;
    out->tasks[m] = e.not_task < 0 ? ~e.not_task : -1;
    out->inits[m] = e.mark & MARK_INITS ? 2 : e.not_task < 0;
    out->flags[m] = e.mark & MARK_FLAGS;
    if (out->ages) out->ages[m] = (uint8_t)age;
    if (out->first) {
        out->first[m] = e.first;
        out->last[m] = e.last;
    }
}
/* Fold one saved entry in; one of age `turns` has expired and waits to be taken. */
static void merge_row(ledger_t *l, const columns_t *in, size_t j) {
    place_t at;
    /* Checked before, but another thread may write to the caller's columns: a stamp is an index. */
    int age = in->ages[j] < l->turns ? in->ages[j] : l->turns;
    entry_t e = {(uint64_t)in->root_ids[j],
                 (uint64_t)in->vals[j],
                 in->first ? in->first[j] : 0,
                 in->last ? in->last[j] : 0,
                 in->inits[j] ? ~in->tasks[j] : 0,
                 (uint8_t)stamp_of(l, age),
                 (uint8_t)((in->flags[j] & MARK_FLAGS) | (in->inits[j] > 1 ? MARK_INITS : 0))};
    if (age >= l->turns || !ledger_find(l, e.key, &at)) {
        ledger_insert(l, e, &at);
        l->dead += age >= l->turns;
        l->second_inits += in->inits[j] > 1;
        return;
    }
    bucket_t *b = &at.table->buckets[at.i];
    int32_t was = b->not_tasks[at.s];
    b->vals[at.s] ^= e.val;
    if (was < 0 && e.not_task < 0) e.mark |= MARK_INITS | (was != e.not_task ? MARK_TASKS_DIFFER : 0);
    l->second_inits += in->inits[j] > 1 || (was < 0 && e.not_task < 0);
    if (e.not_task < was) b->not_tasks[at.s] = e.not_task;
    add_mark(at, e.mark);
    if (age < age_of(l, b->stamps[at.s] & ~MARKED)) set_stamp(l, at, e.stamp);
    if (at.table->times) {
        times_t *t = &at.table->times[at.i];
        if (e.first < t->first[at.s]) t->first[at.s] = e.first;
        if (e.last > t->last[at.s]) t->last[at.s] = e.last;
    }
}
/* What these rows are: none that an entry can be (`ROWS_BAD`), entries, or such as one message each
 * would make (`ROWS_PLAIN`), which take the straight path. */
static int check_rows(const columns_t *in, size_t n, int turns) {
    unsigned bad = 0, special = 0;
    for (size_t j = 0; j < n; j++) {
        const unsigned inits = in->inits[j], flags = in->flags[j], age = in->ages[j];
        const unsigned has_task = in->tasks[j] >= 0;
        bad |= (in->tasks[j] < -1) | (inits > 2) | (flags > MARK_FLAGS) | (age >= (unsigned)turns) |
               (has_task != (inits > 0)) | ((flags & MARK_TASKS_DIFFER) && inits < 2);
        special |= (inits & 2) | flags | age;
    }
    return bad ? ROWS_BAD : special || in->first ? ROWS_ENTRIES : ROWS_PLAIN;
}
static void merge_rows(ledger_t *l, const columns_t *in, size_t n) {
    for (size_t p = 0, rows; p < n; p += rows) {
        rows = next_block(l, n - p);
        for (size_t j = p; j < p + rows; j++) {
            if (j + AHEAD < p + rows) {
                size_t i;
                table_t *t = home_of(l, hash_of(l->seed, (uint64_t)in->root_ids[j + AHEAD]), &i);
                prefetch(&t->buckets[i]);
            }
            merge_row(l, in, j);
        }
        after_block(l);
    }
    ledger_weigh(l);
}
static size_t list_ages(ledger_t *l, const columns_t *out, int youngest, int oldest) {
    size_t m = 0;
    ledger_migrate(l, WHOLE);
    for (size_t i = 0; i < l->cur.n; i++)
        for (unsigned s = 0; s < SLOTS; s++) {
            int stamp = l->cur.buckets[i].stamps[s] & ~MARKED;
            if (stamp == 0 || age_of(l, stamp) < youngest || age_of(l, stamp) > oldest) continue;
            put_column(out, m++, entry_at(&l->cur, i, s), age_of(l, stamp));
        }
    return m;
}
static size_t list_entries(ledger_t *l, const columns_t *out) {
    return list_ages(l, out, 0, l->turns - 1);
}
static size_t list_expired(ledger_t *l, const columns_t *out) {
    return takeable(l) ? list_ages(l, out, l->turns, l->turns) : 0;
}
static int look_up(ledger_t *l, uint64_t key, const columns_t *out) {
    place_t at;
    if (!ledger_find(l, key, &at)) return 0;
    if (out) {
        entry_t e = entry_at(at.table, at.i, at.s);
        put_column(out, 0, e, age_of(l, e.stamp));
    }
    return 1;
}
/* Hand out up to `most` of the entries that expired at the last turn, going on where the last call
 * stopped: through what is left of the old table, then through the new one. */
static size_t take_expired(ledger_t *l, const columns_t *out, size_t most) {
    size_t m = 0;
    const int stamp = stamp_of(l, l->turns);
    while (m < most && l->counts[stamp] > 0) {
        if (l->taking < l->front && l->old.n && l->old.buckets[l->old.n - 1].over == 0)
            l->taking = l->front; /* before the front there is nothing */
        const int in_old = l->taking < l->old.n;
        place_t at = {in_old ? &l->old : &l->cur, l->taking - (in_old ? 0 : l->old.n), 0};
        bucket_t *b = &at.table->buckets[at.i];
        if (dead_slots(l, b))
            for (; at.s < SLOTS; at.s++)
                while (m < most && (b->stamps[at.s] & ~MARKED) == stamp) {
                    put_column(out, m++, entry_at(at.table, at.i, at.s), l->turns);
                    ledger_erase(l, at); /* may pull another one into this slot */
                }
        if (m < most && ++l->taking >= l->old.n + l->cur.n) l->taking = 0;
    }
    return m;
}
static int status_of(entry_t e, int past) {
    if (e.not_task >= 0) return past ? STATUS_ORPHAN : STATUS_OPEN;
    if (e.mark & MARK_INITS) return STATUS_ANOMALY;
    if (e.val == 0) return STATUS_ACKED;
    if (e.mark & MARK_FAILED) return STATUS_FAILED;
    return past ? STATUS_EXPIRED : STATUS_OPEN;
}
/* Decide every entry once; what is decided leaves. */
static size_t settle_all(ledger_t *l, const columns_t *out, int timed_out, int64_t before) {
    size_t m = 0;
    ledger_migrate(l, WHOLE);
    for (size_t i = 0; i < l->cur.n; i++) {
        const bucket_t *b = &l->cur.buckets[i];
        for (unsigned s = 0; s < SLOTS; s++)
            for (;;) { /* erasing may pull another entry into this slot */
                place_t at = {&l->cur, i, s};
                int status, stamp = b->stamps[s] & ~MARKED;
                entry_t e;
                if (stamp == 0 || age_of(l, stamp) >= l->turns) break;
                e = entry_at(&l->cur, i, s);
                status = status_of(e, timed_out && e.last < before);
                if (status == STATUS_OPEN) break;
                out->statuses[m] = (uint8_t)status;
                put_column(out, m++, e, 0);
                ledger_erase(l, at);
            }
    }
    return m;
}
/* Entries that expired without an init and have not been counted as they left. */
static int64_t waiting_orphans(ledger_t *l) {
    int64_t orphans = 0;
    if (l->dead == 0) return 0;
    ledger_migrate(l, WHOLE);
    for (size_t i = 0; i < l->cur.n; i++)
        for (unsigned s = 0; s < SLOTS; s++) {
            int stamp = l->cur.buckets[i].stamps[s] & ~MARKED;
            orphans += stamp && age_of(l, stamp) >= l->turns && l->cur.buckets[i].not_tasks[s] >= 0;
        }
    return orphans;
}

const kernel_t KERNEL = {
    .open = ledger_open,
    .close = ledger_close,
    .needs = ledger_needs,
    .lay_in = ledger_lay_in,
    .wants = ledger_wants,
    .relay = ledger_relay,
    .next_retired = next_retired,
    .rotate = ledger_rotate,
    .run_batch = run_batch,
    .run_one = run_one,
    .check_rows = check_rows,
    .merge_rows = merge_rows,
    .list_entries = list_entries,
    .list_expired = list_expired,
    .take_expired = take_expired,
    .settle_all = settle_all,
    .waiting_orphans = waiting_orphans,
    .look_up = look_up,
};

#endif
