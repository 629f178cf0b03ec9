/* offsets.h - the done offsets of a partition: a ring of bits, one per offset.
 *
 * Operations: `offsets_emit`, `offsets_ack`, `offsets_fail` take columns, `offsets_pass` a
 * position; `committable` is kept up to date.  offset_holes.h lists and loads, offset_failures.h
 * counts failures.
 *
 * Bits.  A bit is 1 when its offset is done or has no record (compaction, transaction markers),
 * and 0 when it is not done.  `words[head .. tail)` are in use, in the order of their offsets. They
 * are cut into segments, each of consecutive words: segment s begins at word number
 * `segments[s].word` (offset / 64) and at `words[segments[s].start]`, and ends where the next
 * begins.  All offsets below the position without a word are done.  So a gap costs a segment at
 * most, 16 bytes, however wide; one of up to GAP_WORDS words is filled with ones, as a segment
 * would save little.
 *
 * Offsets, in this order: base <= committable; base <= position.  Below `position` each was emitted
 * or passed.  From `position` up to `done_end`, if that is higher, are the offsets that an earlier
 * generation left: 1 done, 0 a hole that is still to be emitted.
 *
 * Memory.  When the words reach the end of their room, those before `head` (done, below
 * `committable`) are dropped and runs of more than GAP_WORDS words of ones become gaps; only if
 * that leaves less than a fifth of the room free, it grows to 1.5 times the words in use.  So a
 * word is moved a constant number of times, an offset in flight takes at most 1.5 bits, and
 * millions of done offsets after an open one take no memory.
 *
 * Invariants.  The first segment contains `committable`, unless no offset is open, and then
 * there are no segments.  No word has 1 at or above max(position, done_end).  `pending` is the
 * number of zeros below `position`.  No segment is empty and their words ascend;
 * segments[seg_head].start <= head.
 *
 * Cost.  An ack is a load, an OR and a store, and a search in the segments if it is not in the one
 * of the ack before; an emit in sequence touches a word in 64.  Memory is reserved before a batch.
 */
#ifndef ACKCORE_OFFSETS_H
#define ACKCORE_OFFSETS_H

#include "offset_failures.h"

enum { GAP_WORDS = 4, LEAST_WORDS = 8, LEAST_SEGMENTS = 2, KEPT_WORDS = 1024 };

typedef struct {
    int64_t word;
    size_t start;
} segment_t;

typedef struct {
    uint64_t *words;
    size_t room, head, tail;
    segment_t *segments;
    size_t seg_room, seg_head, seg_tail;
    int64_t base, committable, position, done_end, pending;
    failures_t failures;
    int64_t stale, below_base, not_emitted, repeated;
    size_t unchecked; /* words since the last check */
} offsets_t;

INLINE uint64_t bits_from(int64_t offset) { return ~0ULL << (offset & 63); }
INLINE uint64_t bits_below(int64_t offset) { return ~bits_from(offset); }
INLINE int64_t max_offset(int64_t a, int64_t b) { return a > b ? a : b; }

/* Whether a column of offsets is in ascending order. */
static inline int are_ascending(const int64_t *offsets, size_t n) {
    uint64_t signs = 0;
    for (size_t row = 1; row < n; row++)
        signs |= (uint64_t)offsets[row] - (uint64_t)offsets[row - 1];
    return signs >> 63 == 0;
}
/* Whether each offset is in 0..INT64_MAX - 1: neither it nor its successor is negative. */
static inline int are_offsets(const int64_t *offsets, size_t n) {
    uint64_t signs = 0;
    for (size_t row = 0; row < n; row++)
        signs |= (uint64_t)offsets[row] | ((uint64_t)offsets[row] + 1);
    return signs >> 63 == 0;
}

INLINE int has_words(const offsets_t *tracker) { return tracker->seg_head < tracker->seg_tail; }
INLINE size_t segment_end(const offsets_t *tracker, size_t place) {
    return place + 1 < tracker->seg_tail ? tracker->segments[place + 1].start : tracker->tail;
}
/* The number of the last word; there is one. */
INLINE int64_t last_word(const offsets_t *tracker) {
    const segment_t last = tracker->segments[tracker->seg_tail - 1];
    return last.word + (int64_t)(tracker->tail - last.start) - 1;
}
/* The last segment that does not begin after a word, or the first. */
static size_t find_segment(const offsets_t *tracker, int64_t word) {
    size_t low = tracker->seg_head, high = tracker->seg_tail;
    if (tracker->segments[high - 1].word <= word) return high - 1;
    while (high - low > 1) {
        const size_t middle = low + (high - low) / 2;
        if (tracker->segments[middle].word <= word)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* The words of one segment in which an ack looks for its bit, limited to offsets from the base up
 * to the position.  Acks are near each other, so one window serves many. */
typedef struct {
    uint64_t *words;
    int64_t word;         /* the number of the first */
    uint64_t first, bits; /* offsets first .. first + bits - 1 */
} window_t;

INLINE int in_window(const window_t *window, int64_t offset) {
    return (uint64_t)offset - window->first < window->bits;
}
INLINE uint64_t *window_word(const window_t *window, int64_t offset) {
    return &window->words[(offset >> 6) - window->word];
}
/* Move the window to an offset that is at least the base and below `limit`; 0 if the offset has no
 * word, which means that it is done. */
static int move_window(const offsets_t *tracker, int64_t offset, int64_t limit, window_t *window) {
    const int64_t word = offset >> 6;
    if (!has_words(tracker)) return 0;
    const size_t place = find_segment(tracker, word);
    const segment_t segment = tracker->segments[place];
    const int64_t words = (int64_t)(segment_end(tracker, place) - segment.start);
    if (word < segment.word || word - segment.word >= words) return 0;
    const int64_t first = max_offset(tracker->base, segment.word << 6);
    uint64_t bits = ((uint64_t)(segment.word + words) << 6) - (uint64_t)first;
    if (bits > (uint64_t)(limit - first)) bits = (uint64_t)(limit - first);
    *window = (window_t){tracker->words + segment.start, segment.word, (uint64_t)first, bits};
    ASSERT(in_window(window, offset));
    return 1;
}
/* The same for an ack or a fail; if that has no effect, count it and return 0. */
static int enter_window(offsets_t *tracker, int64_t offset, window_t *window) {
    if (offset < tracker->base)
        tracker->below_base++;
    else if (offset >= tracker->position)
        tracker->not_emitted++;
    else if (move_window(tracker, offset, tracker->position, window))
        return 1;
    else
        tracker->repeated++;
    return 0;
}
static int is_done(const offsets_t *tracker, int64_t offset) {
    window_t window;
    if (offset < tracker->base) return 1;
    if (offset >= max_offset(tracker->position, tracker->done_end)) return 0;
    if (!move_window(tracker, offset, INT64_MAX, &window)) return 1;
    return (*window_word(&window, offset) >> (offset & 63)) & 1;
}

/* Memory. */

/* Whether a word may be dropped; the last one stays, so that the covered offsets do not change. */
INLINE int is_spare(const offsets_t *tracker, size_t index) {
    return tracker->words[index] == ~0ULL && index + 1 < tracker->tail;
}
/* Pack the words: drop those before the head, runs of more than GAP_WORDS words of ones, and ones
 * at either end of a segment.  Returns the resulting number of segments, and stores that of words
 * in `words`.  Without `segments`, which has room for them, it only counts. */
static size_t pack_words(offsets_t *tracker, segment_t *segments, size_t *words) {
    size_t n = 0, to = 0;
    for (size_t place = tracker->seg_head; place < tracker->seg_tail; place++) {
        const segment_t segment = tracker->segments[place];
        const size_t end = segment_end(tracker, place);
        size_t index = place == tracker->seg_head ? tracker->head : segment.start;
        while (index < end) {
            if (is_spare(tracker, index)) {
                index++;
                continue;
            }
            const size_t begin = index;
            size_t open_end = index; /* after the last kept word of this piece */
            for (; index < end && index - open_end <= GAP_WORDS; index++)
                if (!is_spare(tracker, index)) open_end = index + 1;
            if (segments) {
                segments[n] = (segment_t){segment.word + (int64_t)(begin - segment.start), to};
                memmove(&tracker->words[to], &tracker->words[begin],
                        (open_end - begin) * sizeof *tracker->words);
            }
            n++;
            to += open_end - begin;
        }
    }
    *words = to;
    return n;
}
/* Change the room for words; 0, or -1 without memory, and then nothing has changed. */
static int resize(offsets_t *tracker, size_t room) {
    uint64_t *const words = realloc(tracker->words, room * sizeof *words);
    if (words == NULL) return -1;
    tracker->words = words;
    tracker->room = room;
    return 0;
}
/* Reserve room for more words and segments; 0, or -1 without memory, and then nothing has changed.
 */
static int make_room(offsets_t *tracker, size_t words, size_t segments) {
    if (tracker->tail + words <= tracker->room && tracker->seg_tail + segments <= tracker->seg_room)
        return 0;
    size_t used;
    const size_t n = pack_words(tracker, NULL, &used), need = used + words;
    const size_t best = LEAST_WORDS + need + need / 2;
    const size_t seg_room = LEAST_SEGMENTS + n + segments + (n + segments) / 2;
    if (best > SIZE_MAX / 64 || seg_room > SIZE_MAX / 64) return -1;
    segment_t *const packed = malloc(seg_room * sizeof *packed);
    if (packed == NULL) return -1;
    if (tracker->room < need + need / 4 && resize(tracker, best) < 0) {
        free(packed);
        return -1;
    }
    tracker->seg_tail = pack_words(tracker, packed, &tracker->tail);
    tracker->head = tracker->seg_head = 0;
    free(tracker->segments);
    tracker->segments = packed;
    tracker->seg_room = seg_room;
    if (tracker->room / 4 > best)
        (void)resize(tracker, best); /* without memory, the size does not change */
    return 0;
}
/* Count the words and segments needed to cover words first .. last, if `end` is the last word. */
INLINE void add_needs(int64_t end, int64_t first, int64_t last, size_t *words, size_t *segments) {
    if (last <= end) return;
    const int is_far = first - end > GAP_WORDS + 1;
    *segments += is_far;
    *words += (size_t)(last - (is_far ? first - 1 : end));
}
/* The number of the last word, or one that is far from every word. */
INLINE int64_t covered(const offsets_t *tracker) {
    return has_words(tracker) ? last_word(tracker) : -2 - GAP_WORDS;
}

/* Write zeros for `run` offsets from `offset`, and ones between the last word and them.  0, or -1
 * without memory, and then nothing has changed. */
static int open_run(offsets_t *tracker, int64_t offset, int64_t run) {
    const int64_t first = offset >> 6, last = (offset + (run - 1)) >> 6;
    int64_t end = covered(tracker);
    size_t words = 0, segments = 0;
    if (last <= end) return 0;
    add_needs(end, first, last, &words, &segments);
    if (make_room(tracker, words, segments) < 0) return -1;
    if (first - end > GAP_WORDS + 1) {
        ASSERT(tracker->seg_tail < tracker->seg_room);
        tracker->segments[tracker->seg_tail++] = (segment_t){first, tracker->tail};
        end = first - 1;
    }
    for (; end + 1 < first; end++) tracker->words[tracker->tail++] = ~0ULL;
    if (end < first) {
        tracker->words[tracker->tail++] = bits_below(offset);
        end++;
    }
    memset(&tracker->words[tracker->tail], 0, (size_t)(last - end) * sizeof *tracker->words);
    tracker->tail += (size_t)(last - end);
    ASSERT(tracker->tail <= tracker->room);
    return 0;
}
/* Set the bits of offsets from .. to - 1 that have words. */
static void set_bits(offsets_t *tracker, int64_t from, int64_t to) {
    const int64_t first = from >> 6, last = (to - 1) >> 6;
    if (from >= to || first > covered(tracker)) return;
    for (size_t place = find_segment(tracker, first); place < tracker->seg_tail; place++) {
        const segment_t segment = tracker->segments[place];
        const int64_t end = segment.word + (int64_t)(segment_end(tracker, place) - segment.start);
        for (int64_t window = segment.word > first ? segment.word : first;
             window < end && window <= last; window++)
            tracker->words[segment.start + (size_t)(window - segment.word)] |=
                (window == first ? bits_from(from) : ~0ULL) &
                (window == last ? ~0ULL >> (63 - ((to - 1) & 63)) : ~0ULL);
        if (end > last) break;
    }
}
static inline void offsets_free(offsets_t *tracker) {
    free(tracker->words);
    free(tracker->segments);
    failures_free(&tracker->failures);
}

/* Messages.  A column is checked before: every offset is in 0 .. INT64_MAX - 1. */

/* The first word from `index` on that is not all ones, or `end`. */
static size_t first_open(const uint64_t *words, size_t index, size_t end) {
    for (; index + 8 <= end; index += 8) {
        uint64_t all = ~0ULL; /* eight at once, as vectors */
        for (size_t k = 0; k < 8; k++) all &= words[index + k];
        if (all != ~0ULL) break;
    }
    while (index < end && words[index] == ~0ULL) index++;
    return index;
}
/* The number of consecutive offsets at the start of a column. */
static size_t run_length(const int64_t *offsets, size_t n) {
    const uint64_t first = (uint64_t)offsets[0];
    size_t run = 1;
    for (; run + 8 <= n; run += 8) {
        uint64_t differs = 0;
        for (size_t k = 0; k < 8; k++) differs |= (uint64_t)offsets[run + k] ^ (first + run + k);
        if (differs) break;
    }
    while (run < n && (uint64_t)offsets[run] == first + run) run++;
    return run;
}
/* Drop done offsets from the front. */
static void find_committable(offsets_t *tracker) {
    const int64_t end = max_offset(tracker->position, tracker->done_end);
    const int is_open =
        tracker->pending > 0 || tracker->done_end > tracker->position; /* or all is done */
    for (; is_open && has_words(tracker); tracker->seg_head++) {
        const segment_t segment = tracker->segments[tracker->seg_head];
        const size_t segment_stop = segment_end(tracker, tracker->seg_head);
        tracker->head = first_open(tracker->words, tracker->head, segment_stop);
        if (tracker->head < segment_stop) {
            const int64_t word = segment.word + (int64_t)(tracker->head - segment.start);
            tracker->committable = (word << 6) + __builtin_ctzll(~tracker->words[tracker->head]);
            if (tracker->committable < end) return;
            break;
        }
    }
    tracker->committable = end;
    /* Free most of the room if it is far more than was used since it was last empty. */
    if (tracker->room > KEPT_WORDS && tracker->room / 8 > tracker->tail)
        resize(tracker, KEPT_WORDS + 2 * tracker->tail);
    tracker->head = tracker->tail = tracker->seg_head = tracker->seg_tail = 0;
}
/* Mark offsets below one that were not emitted as done: they do not exist. */
static void pass(offsets_t *tracker, int64_t offset) {
    if (offset <= tracker->position) return;
    set_bits(tracker, tracker->position, offset);
    if (UNLIKELY(tracker->failures.ahead))
        failures_pass(&tracker->failures, tracker->position, offset);
    tracker->position = offset;
    tracker->done_end = max_offset(tracker->done_end, offset);
}
static inline void offsets_pass(offsets_t *tracker, int64_t position) {
    pass(tracker, position);
    find_committable(tracker);
}
/* Emit an offset below the position again: it is in flight again if it waited. */
static int64_t emit_again(offsets_t *tracker, int64_t offset) {
    failure_t *const failure =
        offset < tracker->base ? NULL : failures_find(&tracker->failures, offset);
    if (failure && failure->waits) {
        failure->waits = 0;
        tracker->failures.waiting--;
        return 1;
    }
    if (offset < tracker->base)
        tracker->below_base++;
    else
        tracker->repeated++;
    return 0;
}
/* Emit the offset at the position, and its direct successors; -1 without memory. */
static int64_t emit_run(offsets_t *tracker, const int64_t *offsets, size_t n, size_t *taken) {
    const int64_t offset = offsets[0];
    int64_t run = 1;
    if (offset < tracker->done_end) { /* done, or a hole, from an earlier generation */
        if (is_done(tracker, offset)) {
            tracker->position = offset + 1;
            tracker->repeated++;
            *taken = 1;
            return 0;
        }
    } else {
        run = (int64_t)run_length(offsets, n);
        if (open_run(tracker, offset, run) < 0) return -1;
    }
    if (UNLIKELY(tracker->failures.ahead))
        for (int64_t index = 0; index < run; index++)
            if (failures_find(&tracker->failures, offset + index)) tracker->failures.ahead--;
    tracker->position = offset + run;
    tracker->pending += run;
    *taken = (size_t)run;
    return run;
}
/* Emit a column; returns the number newly in flight, or -1, unchanged, without memory. */
static inline int64_t offsets_emit(offsets_t *tracker, const int64_t *offsets, size_t n) {
    int64_t changed = 0, next = max_offset(tracker->position, tracker->done_end),
            end = covered(tracker);
    size_t words = 0, segments = 0, taken;
    for (size_t index = 0; index < n; index += taken) {
        taken = 1;
        if (offsets[index] < next) continue;
        taken = run_length(offsets + index, n - index);
        next = offsets[index] + (int64_t)taken;
        add_needs(end, offsets[index] >> 6, (next - 1) >> 6, &words, &segments);
        end = (next - 1) >> 6;
    }
    if (make_room(tracker, words, segments) < 0) return -1;
    for (size_t index = 0; index < n; index += taken) {
        taken = 1;
        if (offsets[index] < tracker->position) {
            changed += emit_again(tracker, offsets[index]);
            continue;
        }
        pass(tracker, offsets[index]);
        const int64_t run = emit_run(tracker, offsets + index, n - index, &taken);
        if (run < 0) return -1; /* only if another thread writes to the column */
        changed += run;
    }
    find_committable(tracker);
    return changed;
}
/* Ack a column; returns the number of those that were not done before. */
static inline int64_t offsets_ack(offsets_t *tracker, const int64_t *offsets, size_t n) {
    int64_t changed = 0, found = 0, done_end = tracker->done_end;
    window_t window = {NULL, 0, 0, 0};
    for (size_t index = 0; index < n; index++) {
        const int64_t offset = offsets[index];
        if (UNLIKELY(!in_window(&window, offset)) && !enter_window(tracker, offset, &window))
            continue;
        uint64_t *const word = window_word(&window, offset);
        const uint64_t bit = 1ULL << (offset & 63);
        const int64_t was_open = (*word & bit) == 0;
        *word |= bit;
        found++;
        changed += was_open;
        done_end = max_offset(done_end, offset + 1);
        if (UNLIKELY(tracker->failures.used) && was_open) {
            failure_t *const failure = failures_find(&tracker->failures, offset);
            if (failure) failures_remove(&tracker->failures, failure);
        }
    }
    tracker->repeated += found - changed;
    tracker->pending -= changed;
    tracker->done_end = done_end;
    if (UNLIKELY(tracker->failures.used == 0)) failures_trim(&tracker->failures);
    find_committable(tracker);
    return changed;
}
/* Fail a column; returns the number newly waiting, or -1, unchanged, without memory. */
static inline int64_t offsets_fail(offsets_t *tracker, const int64_t *offsets, size_t n) {
    const size_t most = n < (size_t)tracker->pending ? n : (size_t)tracker->pending;
    if (failures_reserve(&tracker->failures, tracker->failures.used + most) < 0) return -1;
    int64_t changed = 0;
    window_t window = {NULL, 0, 0, 0};
    for (size_t index = 0; index < n; index++) {
        const int64_t offset = offsets[index];
        if (!in_window(&window, offset) && !enter_window(tracker, offset, &window)) continue;
        failure_t *failure = failures_find(&tracker->failures, offset);
        if ((*window_word(&window, offset) >> (offset & 63)) & 1 || (failure && failure->waits)) {
            tracker->repeated++;
            continue;
        }
        if (failure == NULL) failure = failures_add(&tracker->failures, offset);
        if (failure->attempts < INT32_MAX) failure->attempts++;
        failure->waits = 1;
        tracker->failures.waiting++;
        changed++;
    }
    return changed;
}

#endif
