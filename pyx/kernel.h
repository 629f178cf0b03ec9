/* kernel.h - what a kernel offers: batches of messages, listing, merging, taking and settling
 * entries.
 *
 * A batch runs in blocks of up to BLOCK rows (block.h).  Between blocks, and only there, the ledger
 * migrates, sweeps, grows into a reserve and reseeds, so within a block no entry changes tables.
 * Functions that go through all entries first finish a migration and then walk `cur`; only
 * `take_expired`, which is called in slices, walks `old` as well.
 */
#ifndef ACKCORE_KERNEL_H
#define ACKCORE_KERNEL_H

#include "block.h"
#include "check.h"

/* ---- a batch ----------------------------------------------------------------------------- */

/* Migrate and sweep a slice and grow if needed; return how many rows may run as the next block. */
static size_t next_block(ledger_t *l, size_t rest) {
    enum { LEAST_BLOCK = 64 };
    size_t rows = rest < BLOCK ? rest : BLOCK;
    /* When shrinking, the old table is nearly empty: migrate faster. */
    ledger_migrate(l, l->old.n > l->cur.n ? rows * 32 : rows * 2);
    if (UNLIKELY(l->used + rows > l->limit)) {
        size_t room = l->limit > l->used ? l->limit - l->used : 0;
        if (sweepable(l) > 0 && room < LEAST_BLOCK) {
            ledger_migrate(l, WHOLE);
            ledger_sweep(l, WHOLE);
            room = l->limit > l->used ? l->limit - l->used : 0;
        }
        if (room >= LEAST_BLOCK || room >= rest)
            rows = room < rows ? room : rows;
        else if (!grow(l, rows))
            ASSERT(0); /* ledger_reserve_needed made sure of a reserve */
    }
    /* Slowly while there is room, so that a batch costs little more; faster when dead entries fill
     * it. */
    ledger_sweep(l, l->used + l->limit / 8 < l->limit ? (rows + 1) / 2 : rows * 4);
    if (UNLIKELY(l->needs_reseed)) {
        table_t t;
        if (take_reserve(l, l->used + rows, &t)) reseed_into(l, t);
    }
    l->work += rows;
    return rows;
}
static void after_block(ledger_t *l) {
    if (l->used > l->peak) l->peak = l->used;
}
static size_t run_batch(ledger_t *l, const batch_t *in, size_t n, const outcomes_t *out,
                        int decide) {
    size_t m = 0;
    if (decide) memset(out->kinds, STATUS_ACKED, n); /* `apply_message` writes the others */
    for (size_t p = 0, rows; p < n; p += rows) {
        rows = next_block(l, n - p);
        m = block_for(l, in, decide)(l, in, p, rows, n - p - rows, out, m);
        after_block(l);
    }
    consider_shrink(l);
    check_after(l, n);
    return m;
}
static size_t run_one(ledger_t *l, uint64_t key, uint64_t val, int32_t task, int64_t now,
                      const outcomes_t *out) {
    size_t m;
    next_block(l, 1);
    m = apply_message(l, key, val, task, now, 1, out, 0);
    after_block(l);
    consider_shrink(l);
    check_after(l, 1);
    return m;
}
/* Buckets of the reserve to add before n more rows, 0 for none, or FULL if the rows that have no
 * entry now could take the ledger past `most` entries (-1: no bound). */
static size_t ledger_reserve_needed(ledger_t *l, size_t n, int64_t most, const uint64_t *ids,
                                    size_t *missing, int frugal) {
    if (most >= 0 && live(l) + n > (size_t)most) {
        place_t at;
        *missing = 0;
        for (size_t j = 0; j < n; j++) *missing += !ledger_find(l, ids[j], &at);
        if (*missing && live(l) + *missing > (size_t)most) return FULL;
    }
    return reserve_size(l, n, frugal);
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
/* The lowest of n tasks and 0: what a column of them is checked by. */
static int32_t lowest_task(const int32_t *tasks, size_t n) {
    int32_t least = 0;
    for (size_t j = 0; j < n; j++) least = tasks[j] < least ? tasks[j] : least;
    return least;
}
/* Classify rows: invalid (`ROWS_BAD`); entries; or each equal to what one INIT or ACK makes
 * (`ROWS_PLAIN`), and folded as messages. */
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
            if (j + PREFETCH_AHEAD < p + rows) {
                size_t i;
                table_t *t =
                    find_home(l, hash_of(l->seed, (uint64_t)in->root_ids[j + PREFETCH_AHEAD]), &i);
                prefetch(&t->buckets[i]);
            }
            merge_entry(l, in, j);
        }
        after_block(l);
    }
    consider_shrink(l);
    check_after(l, n);
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
        if (l->take_at < l->migrated && l->old.n &&
            l->old.buckets[l->old.n - 1].overflow_count == 0)
            /* Skip migrated buckets, unless entries of the last one wrapped round into them. */
            l->take_at = l->migrated;
        const int in_old = l->take_at < l->old.n;
        place_t at = {in_old ? &l->old : &l->cur, l->take_at - (in_old ? 0 : l->old.n), 0};
        bucket_t *b = &at.table->buckets[at.i];
        if (dead_slots(l, b))
            for (; at.s < SLOTS; at.s++)
                while (m < most && (b->stamps[at.s] & ~MARKED) == stamp) {
                    put_column(out, m++, entry_at(at.table, at.i, at.s), l->turns);
                    ledger_erase(l, at); /* may shift another one into this slot */
                }
        if (m < most && ++l->take_at >= l->old.n + l->cur.n) l->take_at = 0;
    }
    check_after(l, m);
    return m;
}
/* Decide every entry once; what is decided leaves. */
static size_t settle_all(ledger_t *l, const columns_t *out, int timed_out, int64_t before) {
    size_t m = 0;
    ledger_migrate(l, WHOLE);
    for (size_t i = 0; i < l->cur.n; i++) {
        const bucket_t *b = &l->cur.buckets[i];
        for (unsigned s = 0; s < SLOTS; s++)
            for (;;) { /* erasing may shift another entry into this slot */
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
    check_after(l, m);
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

static void rotate(ledger_t *l) {
    ledger_rotate(l);
    check_after(l, 0);
}
static void install(ledger_t *l, table_t t) {
    ledger_install(l, t);
    check_after(l, 0);
}

const kernel_t KERNEL = {
    .open = ledger_open,
    .close = ledger_close,
    .reserve_needed = ledger_reserve_needed,
    .add_reserve = ledger_add_reserve,
    .desired_size = ledger_desired_size,
    .install = install,
    .next_retired = next_retired,
    .buckets_for = buckets_for,
    .limit_of = limit_of,
    .rotate = rotate,
    .run_batch = run_batch,
    .run_one = run_one,
    .lowest_task = lowest_task,
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
