/* offset_holes.h - what is known of a partition, listed and loaded; and all invariants of
 * offsets.h, looked at in checked builds.
 *
 * A hole is an offset that is not done below one that is (`done_end` - 1).  Listing costs a step a
 * word and one a run of holes, loading one a run and one a word.
 */
#ifndef ACKCORE_OFFSET_HOLES_H
#define ACKCORE_OFFSET_HOLES_H

#include "offsets.h"

/* Runs of holes as they are found; without columns they are only counted. */
typedef struct {
    int64_t *starts, *ends;
    size_t n, room;
    int64_t begun; /* the run that has no end yet, or -1 */
} runs_t;

INLINE void end_run(runs_t *runs, int64_t end) {
    if (runs->begun < 0) return;
    if (runs->starts) {
        runs->starts[runs->n] = runs->begun;
        runs->ends[runs->n] = end;
    }
    runs->n++;
    runs->begun = -1;
}
/* The runs of one word of holes, the first of which is that of `offset`; stops at the room. */
static void list_word(runs_t *runs, uint64_t holes, int64_t offset) {
    for (int bit = 0; bit < 64 && runs->n < runs->room;) {
        const uint64_t next = (runs->begun < 0 ? holes : ~holes) >> bit;
        if (next == 0) return;
        bit += __builtin_ctzll(next);
        if (runs->begun < 0)
            runs->begun = offset + bit;
        else
            end_run(runs, offset + bit);
    }
}
/* List the lowest runs of holes; how many, `room` at most. */
static inline size_t list_holes(const offsets_t *t, int64_t *starts, int64_t *ends, size_t room) {
    runs_t runs = {starts, ends, 0, room, -1};
    for (size_t s = t->seg_head; s < t->seg_tail && runs.n < room; s++) {
        const segment_t segment = t->segments[s];
        const size_t end = segment_end(t, s);
        for (size_t i = s == t->seg_head ? t->head : segment.start; i < end; i++) {
            const int64_t word = segment.word + (int64_t)(i - segment.start), offset = word << 6;
            uint64_t holes = ~t->words[i];
            if (offset >= t->done_end || runs.n == room) break;
            if (word == t->done_end >> 6) holes &= bits_below(t->done_end);
            list_word(&runs, holes, offset);
            if (runs.begun >= 0 && i + 1 == end && runs.n < room)
                end_run(&runs, offset + 63 + 1); /* what has no words is done */
        }
    }
    return runs.n;
}
/* List what failed, in any order, with `waits` where it was not emitted again. */
static inline size_t list_failures(const offsets_t *t, int64_t *offsets, int32_t *attempts,
                                   uint8_t *waits) {
    size_t n = 0;
    for (size_t i = 0; i < failures_room(&t->failures); i++) {
        const failure_t failure = t->failures.slots[i];
        if (failure.attempts == 0) continue;
        offsets[n] = failure.offset;
        attempts[n] = failure.attempts;
        waits[n++] = (uint8_t)failure.waits;
    }
    return n;
}
/* Fill a new tracker: runs of holes from `committable` up to `done_end`, and from there on up to
 * the position nothing done.  0, or -1 without memory. */
static inline int load_holes(offsets_t *t, int64_t done_end, int64_t position,
                             const int64_t *starts, const int64_t *ends, size_t n) {
    for (size_t i = 0; i < n; i++) {
        if (i) set_bits(t, ends[i - 1], starts[i]);
        if (open_run(t, starts[i], ends[i] - starts[i]) < 0) return -1;
        if (starts[i] < position)
            t->pending += (ends[i] < position ? ends[i] : position) - starts[i];
    }
    if (n) set_bits(t, ends[n - 1], done_end);
    if (position > done_end) {
        if (open_run(t, done_end, position - done_end) < 0) return -1;
        t->pending += position - done_end;
    }
    t->position = position;
    t->done_end = done_end;
    find_committable(t);
    return 0;
}
/* Load what failed; 0, or -1 without memory. */
static inline int load_failures(offsets_t *t, const int64_t *offsets, const int32_t *attempts,
                                size_t n) {
    if (failures_reserve(&t->failures, n) < 0) return -1;
    for (size_t i = 0; i < n; i++) {
        failures_add(&t->failures, offsets[i])->attempts = attempts[i];
        t->failures.ahead += offsets[i] >= t->position;
    }
    return 0;
}

#if CHECKED
static void check_offsets(const offsets_t *t) {
    const int64_t end = max_offset(t->position, t->done_end);
    int64_t pending = 0, next = INT64_MIN, waiting = 0, ahead = 0;
    size_t used = 0;
    ASSERT(t->base <= t->committable && t->base <= t->position && t->committable <= end);
    ASSERT(t->head <= t->tail && t->tail <= t->room && t->seg_tail <= t->seg_room);
    ASSERT(has_words(t) ? t->segments[t->seg_head].start <= t->head : t->committable == end);
    for (size_t s = t->seg_head; s < t->seg_tail; s++) {
        const segment_t segment = t->segments[s];
        ASSERT(segment.start < segment_end(t, s) && segment.word >= next);
        for (size_t i = segment.start; i < segment_end(t, s); i++) {
            const int64_t offset = (segment.word + (int64_t)(i - segment.start)) << 6;
            uint64_t open = ~t->words[i];
            next = (offset >> 6) + 1;
            ASSERT(i >= t->head || open == 0);
            if (offset + 63 >= end) {
                const uint64_t above = offset >= end ? ~0ULL : bits_from(end);
                ASSERT((t->words[i] & above) == 0);
            }
            if (i == t->head) ASSERT(t->committable == offset + __builtin_ctzll(open));
            if (offset >= t->position)
                open = 0;
            else if (offset + 63 >= t->position)
                open &= bits_below(t->position);
            pending += __builtin_popcountll(open);
        }
    }
    ASSERT(pending == t->pending);
    for (size_t i = 0; i < failures_room(&t->failures); i++) {
        const failure_t failure = t->failures.slots[i];
        if (failure.attempts == 0) continue;
        used++;
        waiting += failure.waits;
        ahead += failure.offset >= t->position;
        ASSERT(failures_find(&t->failures, failure.offset) == &t->failures.slots[i]);
        ASSERT(!is_done(t, failure.offset) && (!failure.waits || failure.offset < t->position));
    }
    ASSERT(used == t->failures.used && waiting == t->failures.waiting);
    ASSERT(ahead == t->failures.ahead);
}
/* After a call of so many offsets: look at all, unless it is large and that was done recently. */
static inline void check_offsets_after(offsets_t *t, size_t offsets) {
    t->unchecked += 64 + offsets;
    if (t->unchecked < t->tail - t->head + failures_room(&t->failures)) return;
    t->unchecked = 0;
    check_offsets(t);
}
#else
INLINE void check_offsets_after(offsets_t *t, size_t offsets) {
    (void)t;
    (void)offsets;
}
#endif

#endif
