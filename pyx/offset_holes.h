/* offset_holes.h - listing and loading of a partition's state; and checks of all invariants of
 * offsets.h, in checked builds.
 *
 * A hole is an offset that is not done and is below one that is (`done_end` - 1).  Listing costs a
 * step per word and one per run of holes; so does loading.
 */
#ifndef ACKCORE_OFFSET_HOLES_H
#define ACKCORE_OFFSET_HOLES_H

#include "offsets.h"

/* The runs of holes found so far; without columns they are only counted. */
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
/* Find the runs in one word of holes, whose first bit is that of `offset`; stops without room. */
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
/* List the lowest runs of holes, at most `room`; returns their number. */
static inline size_t list_holes(const offsets_t *tracker, int64_t *starts, int64_t *ends,
                                size_t room) {
    runs_t runs = {starts, ends, 0, room, -1};
    for (size_t place = tracker->seg_head; place < tracker->seg_tail && runs.n < room; place++) {
        const segment_t segment = tracker->segments[place];
        const size_t end = segment_end(tracker, place);
        for (size_t index = place == tracker->seg_head ? tracker->head : segment.start; index < end;
             index++) {
            const int64_t word = segment.word + (int64_t)(index - segment.start),
                          offset = word << 6;
            uint64_t holes = ~tracker->words[index];
            if (offset >= tracker->done_end || runs.n == room) break;
            if (word == tracker->done_end >> 6) holes &= bits_below(tracker->done_end);
            list_word(&runs, holes, offset);
            if (runs.begun >= 0 && index + 1 == end && runs.n < room)
                end_run(&runs, offset + 63 + 1); /* offsets without words are done */
        }
    }
    return runs.n;
}
/* List the failed offsets, in any order, with `waits` for those not emitted again. */
static inline size_t list_failures(const offsets_t *tracker, int64_t *offsets, int32_t *attempts,
                                   uint8_t *waits) {
    size_t n = 0;
    for (size_t index = 0; index < failures_room(&tracker->failures); index++) {
        const failure_t failure = tracker->failures.slots[index];
        if (failure.attempts == 0) continue;
        offsets[n] = failure.offset;
        attempts[n] = failure.attempts;
        waits[n++] = (uint8_t)failure.waits;
    }
    return n;
}
/* Fill a new tracker: runs of holes from `committable` up to `done_end`, and only open offsets from
 * there up to the position.  0, or -1 without memory. */
static inline int load_holes(offsets_t *tracker, int64_t done_end, int64_t position,
                             const int64_t *starts, const int64_t *ends, size_t n) {
    for (size_t index = 0; index < n; index++) {
        if (index) set_bits(tracker, ends[index - 1], starts[index]);
        if (open_run(tracker, starts[index], ends[index] - starts[index]) < 0) return -1;
        if (starts[index] < position)
            tracker->pending += (ends[index] < position ? ends[index] : position) - starts[index];
    }
    if (n) set_bits(tracker, ends[n - 1], done_end);
    if (position > done_end) {
        if (open_run(tracker, done_end, position - done_end) < 0) return -1;
        tracker->pending += position - done_end;
    }
    tracker->position = position;
    tracker->done_end = done_end;
    find_committable(tracker);
    return 0;
}
/* Load the failed offsets; 0, or -1 without memory. */
static inline int load_failures(offsets_t *tracker, const int64_t *offsets, const int32_t *attempts,
                                size_t n) {
    if (failures_reserve(&tracker->failures, n) < 0) return -1;
    for (size_t index = 0; index < n; index++) {
        failures_add(&tracker->failures, offsets[index])->attempts = attempts[index];
        tracker->failures.ahead += offsets[index] >= tracker->position;
    }
    return 0;
}

#if CHECKED
static void check_offsets(const offsets_t *tracker) {
    const int64_t end = max_offset(tracker->position, tracker->done_end);
    int64_t pending = 0, next = INT64_MIN, waiting = 0, ahead = 0;
    size_t used = 0;
    ASSERT(tracker->base <= tracker->committable && tracker->base <= tracker->position &&
           tracker->committable <= end);
    ASSERT(tracker->head <= tracker->tail && tracker->tail <= tracker->room &&
           tracker->seg_tail <= tracker->seg_room);
    ASSERT(has_words(tracker) ? tracker->segments[tracker->seg_head].start <= tracker->head
                              : tracker->committable == end);
    for (size_t place = tracker->seg_head; place < tracker->seg_tail; place++) {
        const segment_t segment = tracker->segments[place];
        ASSERT(segment.start < segment_end(tracker, place) && segment.word >= next);
        for (size_t index = segment.start; index < segment_end(tracker, place); index++) {
            const int64_t offset = (segment.word + (int64_t)(index - segment.start)) << 6;
            uint64_t open = ~tracker->words[index];
            next = (offset >> 6) + 1;
            ASSERT(index >= tracker->head || open == 0);
            if (offset + 63 >= end) {
                const uint64_t above = offset >= end ? ~0ULL : bits_from(end);
                ASSERT((tracker->words[index] & above) == 0);
            }
            if (index == tracker->head)
                ASSERT(tracker->committable == offset + __builtin_ctzll(open));
            if (offset >= tracker->position)
                open = 0;
            else if (offset + 63 >= tracker->position)
                open &= bits_below(tracker->position);
            pending += __builtin_popcountll(open);
        }
    }
    ASSERT(pending == tracker->pending);
    for (size_t index = 0; index < failures_room(&tracker->failures); index++) {
        const failure_t failure = tracker->failures.slots[index];
        if (failure.attempts == 0) continue;
        used++;
        waiting += failure.waits;
        ahead += failure.offset >= tracker->position;
        ASSERT(failures_find(&tracker->failures, failure.offset) ==
               &tracker->failures.slots[index]);
        ASSERT(!is_done(tracker, failure.offset) &&
               (!failure.waits || failure.offset < tracker->position));
    }
    ASSERT(used == tracker->failures.used && waiting == tracker->failures.waiting);
    ASSERT(ahead == tracker->failures.ahead);
}
/* Check everything after a call with n offsets, unless it is large and was checked recently. */
static inline void check_offsets_after(offsets_t *tracker, size_t offsets) {
    tracker->unchecked += 64 + offsets;
    if (tracker->unchecked < tracker->tail - tracker->head + failures_room(&tracker->failures))
        return;
    tracker->unchecked = 0;
    check_offsets(tracker);
}
#else
INLINE void check_offsets_after(offsets_t *tracker, size_t offsets) {
    (void)tracker;
    (void)offsets;
}
#endif

#endif
