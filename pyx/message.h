/* message.h - the effect of a message on an entry, and the status of a settled one: SEMANTICS 2, 4.
 *
 * One message, any entry, every case.  block.h has a second form of INIT and ACK for entries
 * without marks, branch-free, for whole columns; tests/test_messages.py applies every message to
 * every state of an entry by both forms, and compares them with SEMANTICS and each other.
 */
#ifndef ACKCORE_MESSAGE_H
#define ACKCORE_MESSAGE_H

#include "expiry.h"

static void set_stamp(ledger_t *ledger, place_t at, int stamp) {
    uint8_t *was = &at.table->buckets[at.index].stamps[at.slot];
    ASSERT(*was != 0 && stamp >= 1 && stamp <= STAMPS);
    ledger->counts[*was & ~MARKED]--;
    ledger->counts[stamp]++;
    *was = (uint8_t)((*was & MARKED) | stamp);
}
static void add_mark(place_t at, uint8_t bits) {
    if (bits == 0) return;
    mark_put(at.table, at.index, at.slot, mark_in(at.table, at.index, at.slot) | bits);
    at.table->buckets[at.index].stamps[at.slot] |= MARKED;
}
/* Apply (`decide`) or fold one message; returns the number of outcomes written, 0 or 1. */
COLD size_t apply_message(ledger_t *ledger, uint64_t key, uint64_t val, int32_t task, int64_t time,
                          int decide, const outcomes_t *out, size_t written) {
    place_t at;
    bucket_t *bucket;
    int reset = 0, kind = STATUS_OPEN;
    if (!ledger_find(ledger, key, &at)) {
        entry_t entry = {key, 0, time, time, 0, (uint8_t)ledger->stamp, 0};
        ledger_insert(ledger, entry, &at);
    }
    bucket = &at.table->buckets[at.index];
    if (task >= TASK_ACK) bucket->vals[at.slot] ^= val;
    if (task >= 0) {
        int32_t was = bucket->not_tasks[at.slot], is = ~task;
        if (was < 0) {
            ledger->second_inits++;
            add_mark(at, (uint8_t)(MARK_INITS | (was != is ? MARK_TASKS_DIFFER : 0)));
            if (!decide && was < is) is = was; /* folding keeps the greatest task */
        }
        bucket->not_tasks[at.slot] = is;
    } else if (task == TASK_FAIL)
        add_mark(at, MARK_FAILED);
    else if (task == TASK_RESET)
        reset = 1;
    if (task <= TASK_FAIL || ledger->refresh_on_ack || !decide)
        set_stamp(ledger, at, ledger->stamp);
    if (at.table->times) {
        times_t *times = &at.table->times[at.index];
        if (decide || time > times->last[at.slot]) times->last[at.slot] = time;
        if (!decide && time < times->first[at.slot]) times->first[at.slot] = time;
    }
    if (!decide || bucket->not_tasks[at.slot] >= 0) return 0;
    if (bucket->vals[at.slot] == 0)
        kind = STATUS_ACKED;
    else if (mark_in(at.table, at.index, at.slot) & MARK_FAILED)
        kind = STATUS_FAILED;
    else if (reset)
        kind = STATUS_RESET_TIMEOUT;
    else
        return 0;
    out->root_ids[written] = (int64_t)key;
    out->tasks[written] = ~bucket->not_tasks[at.slot];
    out->kinds[written] = (uint8_t)kind;
    if (out->elapsed)
        out->elapsed[written] =
            (int64_t)((uint64_t)time - (uint64_t)at.table->times[at.index].first[at.slot]);
    if (kind != STATUS_RESET_TIMEOUT) ledger_erase(ledger, at);
    return 1;
}
/* Fold one saved entry in; one of age `turns` has expired and can be taken. */
static void merge_entry(ledger_t *ledger, const columns_t *in, size_t row) {
    place_t at;
    /* Checked before, but another thread may write to the caller's columns; a stamp is an index. */
    int age = in->ages[row] < ledger->turns ? in->ages[row] : ledger->turns;
    entry_t entry = {
        (uint64_t)in->root_ids[row],
        (uint64_t)in->vals[row],
        in->first ? in->first[row] : 0,
        in->last ? in->last[row] : 0,
        in->inits[row] ? ~in->tasks[row] : 0,
        (uint8_t)stamp_of(ledger, age),
        (uint8_t)((in->flags[row] & MARK_FLAGS) | (in->inits[row] > 1 ? MARK_INITS : 0))};
    if (age >= ledger->turns || !ledger_find(ledger, entry.key, &at)) {
        ledger_insert(ledger, entry, &at);
        ledger->dead += age >= ledger->turns;
        ledger->second_inits += in->inits[row] > 1;
        return;
    }
    bucket_t *bucket = &at.table->buckets[at.index];
    int32_t was = bucket->not_tasks[at.slot];
    bucket->vals[at.slot] ^= entry.val;
    if (was < 0 && entry.not_task < 0)
        entry.mark |= MARK_INITS | (was != entry.not_task ? MARK_TASKS_DIFFER : 0);
    ledger->second_inits += in->inits[row] > 1 || (was < 0 && entry.not_task < 0);
    if (entry.not_task < was) bucket->not_tasks[at.slot] = entry.not_task;
    add_mark(at, entry.mark);
    if (age < age_of(ledger, bucket->stamps[at.slot] & ~MARKED)) set_stamp(ledger, at, entry.stamp);
    if (at.table->times) {
        times_t *times = &at.table->times[at.index];
        if (entry.first < times->first[at.slot]) times->first[at.slot] = entry.first;
        if (entry.last > times->last[at.slot]) times->last[at.slot] = entry.last;
    }
}
/* The status of an entry when settled; `past`: its last message is older than the time-out. */
static int status_of(entry_t entry, int past) {
    if (entry.not_task >= 0) return past ? STATUS_ORPHAN : STATUS_OPEN;
    if (entry.mark & MARK_INITS) return STATUS_ANOMALY;
    if (entry.val == 0) return STATUS_ACKED;
    if (entry.mark & MARK_FAILED) return STATUS_FAILED;
    return past ? STATUS_EXPIRED : STATUS_OPEN;
}

#endif
