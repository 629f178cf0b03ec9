/* message.h - what a message does to an entry, and what a settled entry is: SEMANTICS 2 and 4.
 *
 * One message, any entry, every case.  block.h has a second form of INIT and ACK for entries
 * without marks, branch-free, for whole columns; tests/test_messages.py applies every message to
 * every state of an entry by both forms, and holds them to SEMANTICS and to each other.
 */
#ifndef ACKCORE_MESSAGE_H
#define ACKCORE_MESSAGE_H

#include "expiry.h"

static void set_stamp(ledger_t *l, place_t at, int stamp) {
    uint8_t *was = &at.table->buckets[at.i].stamps[at.s];
    ASSERT(*was != 0 && stamp >= 1 && stamp <= STAMPS);
    l->counts[*was & ~MARKED]--;
    l->counts[stamp]++;
    *was = (uint8_t)((*was & MARKED) | stamp);
}
static void add_mark(place_t at, uint8_t bits) {
    if (bits == 0) return;
    mark_put(at.table, at.i, at.s, mark_in(at.table, at.i, at.s) | bits);
    at.table->buckets[at.i].stamps[at.s] |= MARKED;
}
/* Apply (`decide`) or fold one message; returns the outcomes written, 0 or 1, at out[m]. */
COLD size_t apply_message(ledger_t *l, uint64_t key, uint64_t val, int32_t task, int64_t time,
                          int decide, const outcomes_t *out, size_t m) {
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
    else if (mark_in(at.table, at.i, at.s) & MARK_FAILED)
        kind = STATUS_FAILED;
    else if (reset)
        kind = STATUS_RESET_TIMEOUT;
    else
        return 0;
    out->root_ids[m] = (int64_t)key;
    out->tasks[m] = ~b->not_tasks[at.s];
    out->kinds[m] = (uint8_t)kind;
    if (out->elapsed)
        out->elapsed[m] = (int64_t)((uint64_t)time - (uint64_t)at.table->times[at.i].first[at.s]);
    if (kind != STATUS_RESET_TIMEOUT) ledger_erase(l, at);
    return 1;
}
/* Fold one saved entry in; one of age `turns` has expired and waits to be taken. */
static void merge_entry(ledger_t *l, const columns_t *in, size_t j) {
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
    if (was < 0 && e.not_task < 0)
        e.mark |= MARK_INITS | (was != e.not_task ? MARK_TASKS_DIFFER : 0);
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
/* What settling makes of an entry; `past`: its last message is older than the time-out. */
static int status_of(entry_t e, int past) {
    if (e.not_task >= 0) return past ? STATUS_ORPHAN : STATUS_OPEN;
    if (e.mark & MARK_INITS) return STATUS_ANOMALY;
    if (e.val == 0) return STATUS_ACKED;
    if (e.mark & MARK_FAILED) return STATUS_FAILED;
    return past ? STATUS_EXPIRED : STATUS_OPEN;
}

#endif
