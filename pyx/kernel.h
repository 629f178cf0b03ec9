/* kernel.h - the functions of a kernel: batches of messages, listing, merging, taking and settling
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
#include "rows.h"

/* ---- a batch ----------------------------------------------------------------------------- */

/* Migrate and sweep a slice and grow if needed; return how many rows may run as the next block. */
static size_t next_block(ledger_t *ledger, size_t rest) {
    enum { LEAST_BLOCK = 64 };
    size_t rows = rest < BLOCK ? rest : BLOCK;
    /* When shrinking, the old table is nearly empty: migrate faster. */
    ledger_migrate(ledger, ledger->old.n_buckets > ledger->cur.n_buckets ? rows * 32 : rows * 2);
    if (UNLIKELY(ledger->used + rows > ledger->limit)) {
        size_t room = ledger->limit > ledger->used ? ledger->limit - ledger->used : 0;
        if (sweepable(ledger) > 0 && room < LEAST_BLOCK) {
            ledger_migrate(ledger, WHOLE);
            ledger_sweep(ledger, WHOLE);
            room = ledger->limit > ledger->used ? ledger->limit - ledger->used : 0;
        }
        if (room >= LEAST_BLOCK || room >= rest)
            rows = room < rows ? room : rows;
        else if (!grow(ledger, rows))
            ASSERT(0); /* ledger_reserve_needed has ensured a reserve */
    }
    /* Sweep slowly while the table has room, so that a batch costs little more; faster when dead
     * entries fill it. */
    ledger_sweep(ledger,
                 ledger->used + ledger->limit / 8 < ledger->limit ? (rows + 1) / 2 : rows * 4);
    if (UNLIKELY(ledger->needs_reseed)) {
        table_t table;
        if (take_reserve(ledger, ledger->used + rows, &table)) reseed_into(ledger, table);
    }
    ledger->work += rows;
    return rows;
}
static void after_block(ledger_t *ledger) {
    if (ledger->used > ledger->peak) ledger->peak = ledger->used;
}
static size_t run_batch(ledger_t *ledger, const batch_t *in, size_t n, const outcomes_t *out,
                        int decide) {
    size_t written = 0;
    if (decide) memset(out->kinds, STATUS_ACKED, n); /* `apply_message` writes the others */
    for (size_t start = 0, rows; start < n; start += rows) {
        rows = next_block(ledger, n - start);
        written =
            block_for(ledger, in, decide)(ledger, in, start, rows, n - start - rows, out, written);
        after_block(ledger);
    }
    consider_shrink(ledger);
    check_after(ledger, n);
    return written;
}
static size_t run_one(ledger_t *ledger, uint64_t key, uint64_t val, int32_t task, int64_t now,
                      const outcomes_t *out) {
    size_t written;
    next_block(ledger, 1);
    written = apply_message(ledger, key, val, task, now, 1, out, 0);
    after_block(ledger);
    consider_shrink(ledger);
    check_after(ledger, 1);
    return written;
}
/* The buckets of the reserve to add before n more rows; 0 for none; FULL if the rows without an
 * entry could make the ledger exceed `most` entries (-1: no limit). */
static size_t ledger_reserve_needed(ledger_t *ledger, size_t n, int64_t most, const uint64_t *ids,
                                    size_t *missing, int frugal) {
    if (most >= 0 && live(ledger) + n > (size_t)most) {
        place_t at;
        *missing = 0;
        for (size_t row = 0; row < n; row++) *missing += !ledger_find(ledger, ids[row], &at);
        if (*missing && live(ledger) + *missing > (size_t)most) return FULL;
    }
    return reserve_size(ledger, n, frugal);
}

/* ---- entries ----------------------------------------------------------------------------- */

INLINE void put_column(const columns_t *out, size_t written, entry_t entry, int age) {
    out->root_ids[written] = (int64_t)entry.key;
    out->vals[written] = (int64_t)entry.val;
    out->tasks[written] = entry.not_task < 0 ? ~entry.not_task : -1;
    out->inits[written] = entry.mark & MARK_INITS ? 2 : entry.not_task < 0;
    out->flags[written] = entry.mark & MARK_FLAGS;
    if (out->ages) out->ages[written] = (uint8_t)age;
    if (out->first) {
        out->first[written] = entry.first;
        out->last[written] = entry.last;
    }
}
/* The lowest of n tasks and 0, for the check of a column. */
static int32_t lowest_task(const int32_t *tasks, size_t n) {
    int32_t least = 0;
    for (size_t row = 0; row < n; row++) least = tasks[row] < least ? tasks[row] : least;
    return least;
}
/* Classify rows: invalid (`ROWS_BAD`); entries; or each equal to the entry after a single INIT or
 * ACK (`ROWS_PLAIN`), and then folded as messages. */
static int check_rows(const columns_t *in, size_t n, int turns) {
    unsigned bad = 0, special = 0;
    for (size_t row = 0; row < n; row++) {
        const unsigned inits = in->inits[row], flags = in->flags[row], age = in->ages[row];
        const unsigned has_task = in->tasks[row] >= 0;
        bad |= (in->tasks[row] < -1) | (inits > 2) | (flags > MARK_FLAGS) |
               (age >= (unsigned)turns) | (has_task != (inits > 0)) |
               ((flags & MARK_TASKS_DIFFER) && inits < 2);
        special |= (inits & 2) | flags | age;
    }
    return bad ? ROWS_BAD : special || in->first ? ROWS_ENTRIES : ROWS_PLAIN;
}
static void merge_rows(ledger_t *ledger, const columns_t *in, size_t n) {
    for (size_t start = 0, rows; start < n; start += rows) {
        rows = next_block(ledger, n - start);
        for (size_t row = start; row < start + rows; row++) {
            if (row + PREFETCH_AHEAD < start + rows) {
                size_t index;
                table_t *table = find_home(
                    ledger, hash_of(ledger->seed, (uint64_t)in->root_ids[row + PREFETCH_AHEAD]),
                    &index);
                prefetch(&table->buckets[index]);
            }
            merge_entry(ledger, in, row);
        }
        after_block(ledger);
    }
    consider_shrink(ledger);
    check_after(ledger, n);
}
static size_t list_ages(ledger_t *ledger, const columns_t *out, int youngest, int oldest) {
    size_t written = 0;
    ledger_migrate(ledger, WHOLE);
    for (size_t index = 0; index < ledger->cur.n_buckets; index++)
        for (unsigned slot = 0; slot < SLOTS; slot++) {
            int stamp = ledger->cur.buckets[index].stamps[slot] & ~MARKED;
            if (stamp == 0 || age_of(ledger, stamp) < youngest || age_of(ledger, stamp) > oldest)
                continue;
            put_column(out, written++, entry_at(&ledger->cur, index, slot), age_of(ledger, stamp));
        }
    return written;
}
static size_t list_entries(ledger_t *ledger, const columns_t *out) {
    return list_ages(ledger, out, 0, ledger->turns - 1);
}
static size_t list_expired(ledger_t *ledger, const columns_t *out) {
    return takeable(ledger) ? list_ages(ledger, out, ledger->turns, ledger->turns) : 0;
}
static int look_up(ledger_t *ledger, uint64_t key, const columns_t *out) {
    place_t at;
    if (!ledger_find(ledger, key, &at)) return 0;
    if (out) {
        entry_t entry = entry_at(at.table, at.index, at.slot);
        put_column(out, 0, entry, age_of(ledger, entry.stamp));
    }
    return 1;
}
/* Remove up to `most` of the entries that expired at the last turn, and continue where the last
 * call stopped: first in the rest of the old table, then in the new one. */
static size_t take_expired(ledger_t *ledger, const columns_t *out, size_t most) {
    size_t written = 0;
    const int stamp = stamp_of(ledger, ledger->turns);
    while (written < most && ledger->counts[stamp] > 0) {
        if (ledger->take_at < ledger->migrated && ledger->old.n_buckets &&
            ledger->old.buckets[ledger->old.n_buckets - 1].overflow_count == 0)
            /* Skip migrated buckets, unless entries of the last one wrapped round into them. */
            ledger->take_at = ledger->migrated;
        const int in_old = ledger->take_at < ledger->old.n_buckets;
        place_t at = {in_old ? &ledger->old : &ledger->cur,
                      ledger->take_at - (in_old ? 0 : ledger->old.n_buckets), 0};
        bucket_t *bucket = &at.table->buckets[at.index];
        if (dead_slots(ledger, bucket))
            for (; at.slot < SLOTS; at.slot++)
                while (written < most && (bucket->stamps[at.slot] & ~MARKED) == stamp) {
                    put_column(out, written++, entry_at(at.table, at.index, at.slot),
                               ledger->turns);
                    ledger_erase(ledger, at); /* may shift another one into this slot */
                }
        if (written < most && ++ledger->take_at >= ledger->old.n_buckets + ledger->cur.n_buckets)
            ledger->take_at = 0;
    }
    check_after(ledger, written);
    return written;
}
/* Decide every entry once, and remove the decided ones. */
static size_t settle_all(ledger_t *ledger, const columns_t *out, int timed_out, int64_t before) {
    size_t written = 0;
    ledger_migrate(ledger, WHOLE);
    for (size_t index = 0; index < ledger->cur.n_buckets; index++) {
        const bucket_t *bucket = &ledger->cur.buckets[index];
        for (unsigned slot = 0; slot < SLOTS; slot++)
            for (;;) { /* erasing may shift another entry into this slot */
                place_t at = {&ledger->cur, index, slot};
                int status, stamp = bucket->stamps[slot] & ~MARKED;
                entry_t entry;
                if (stamp == 0 || age_of(ledger, stamp) >= ledger->turns) break;
                entry = entry_at(&ledger->cur, index, slot);
                status = status_of(entry, timed_out && entry.last < before);
                if (status == STATUS_OPEN) break;
                out->statuses[written] = (uint8_t)status;
                put_column(out, written++, entry, 0);
                ledger_erase(ledger, at);
            }
    }
    check_after(ledger, written);
    return written;
}
/* The expired entries without an init that were not counted when they left. */
static int64_t waiting_orphans(ledger_t *ledger) {
    int64_t orphans = 0;
    if (ledger->dead == 0) return 0;
    ledger_migrate(ledger, WHOLE);
    for (size_t index = 0; index < ledger->cur.n_buckets; index++)
        for (unsigned slot = 0; slot < SLOTS; slot++) {
            int stamp = ledger->cur.buckets[index].stamps[slot] & ~MARKED;
            orphans += stamp && age_of(ledger, stamp) >= ledger->turns &&
                       ledger->cur.buckets[index].not_tasks[slot] >= 0;
        }
    return orphans;
}

static void rotate(ledger_t *ledger) {
    ledger_rotate(ledger);
    check_after(ledger, 0);
}
static void install(ledger_t *ledger, table_t table) {
    ledger_install(ledger, table);
    check_after(ledger, 0);
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
    .pages_ahead = ledger_pages_ahead,
    .populate = populate_pages,
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
    .fingerprint = fingerprint_of,
};

#endif
