/* offset_failures.h - the number of failures of each open offset: a small hash table.
 *
 * Open addressing, linear probing, backward-shift deletion.  An offset is inserted at its first
 * failure and removed when it is done, so the table is as large as the number of such offsets.
 * An entry is 16 bytes, and a table is at most half full.
 *
 * Invariants.  attempts is 0 in a free slot and nowhere else.  From the home slot of each entry to
 * the entry there is no free slot.  `waiting` counts the entries that wait to be emitted again, and
 * `ahead` those at or above the position, which an earlier generation left.
 */
#ifndef ACKCORE_OFFSET_FAILURES_H
#define ACKCORE_OFFSET_FAILURES_H

#include <stdlib.h>

#include "layout.h"

typedef struct {
    int64_t offset;
    int32_t attempts;
    int32_t waits;
} failure_t;

typedef struct {
    failure_t *slots;
    int bits; /* 1 << bits slots; meaningless without slots */
    size_t used;
    int64_t waiting, ahead;
} failures_t;

INLINE size_t failures_room(const failures_t *failures) {
    return failures->slots ? (size_t)1 << failures->bits : 0;
}

/* Offsets are mostly in sequence: spread them (Knuth's multiplicative hashing). */
INLINE size_t failures_home(const failures_t *failures, int64_t offset) {
    return (size_t)(((uint64_t)offset * 0x9e3779b97f4a7c15ULL) >> (64 - failures->bits));
}
/* The slot of an offset, or the free one where it would go. */
static failure_t *failures_slot(const failures_t *failures, int64_t offset) {
    const size_t mask = failures_room(failures) - 1;
    size_t index = failures_home(failures, offset);
    while (failures->slots[index].attempts && failures->slots[index].offset != offset)
        index = (index + 1) & mask;
    return &failures->slots[index];
}
/* The entry of an offset, or NULL. */
static failure_t *failures_find(const failures_t *failures, int64_t offset) {
    if (failures->used == 0) return NULL;
    failure_t *const slot = failures_slot(failures, offset);
    return slot->attempts ? slot : NULL;
}
/* Insert an offset that has no entry; there is room. */
static failure_t *failures_add(failures_t *failures, int64_t offset) {
    failure_t *const slot = failures_slot(failures, offset);
    ASSERT(slot->attempts == 0 && 2 * (failures->used + 1) <= failures_room(failures));
    slot->offset = offset;
    slot->waits = 0;
    failures->used++;
    return slot;
}
/* Remove an entry, and close the gap. */
static void failures_remove(failures_t *failures, failure_t *entry) {
    const size_t mask = failures_room(failures) - 1;
    size_t gap = (size_t)(entry - failures->slots), index = gap;
    failures->waiting -= entry->waits;
    failures->used--;
    for (;;) {
        index = (index + 1) & mask;
        if (failures->slots[index].attempts == 0) break;
        /* It may move to the gap unless its home lies behind the gap. */
        const size_t home = failures_home(failures, failures->slots[index].offset);
        if (((index - home) & mask) >= ((index - gap) & mask)) {
            failures->slots[gap] = failures->slots[index];
            gap = index;
        }
    }
    failures->slots[gap].attempts = 0;
}
static void failures_free(failures_t *failures) {
    free(failures->slots);
    memset(failures, 0, sizeof *failures);
}
/* Free a large table when no failed offset is left. */
INLINE void failures_trim(failures_t *failures) {
    if (failures_room(failures) > 1024) failures_free(failures);
}
/* Reserve room for a number of entries, at most half of the slots; 0, or -1 without memory. */
static int failures_reserve(failures_t *failures, size_t entries) {
    if (2 * entries <= failures_room(failures)) return 0;
    failures_t other = {NULL, 3, 0, failures->waiting, failures->ahead};
    while (((size_t)1 << other.bits) < 2 * entries) other.bits++;
    other.slots = calloc((size_t)1 << other.bits, sizeof *other.slots);
    if (other.slots == NULL) return -1;
    for (size_t index = 0; index < failures_room(failures); index++)
        if (failures->slots[index].attempts)
            *failures_add(&other, failures->slots[index].offset) = failures->slots[index];
    free(failures->slots);
    *failures = other;
    return 0;
}
/* Remove the entries ahead that are in from .. to - 1: these offsets do not exist. */
static void failures_pass(failures_t *failures, int64_t from, int64_t to) {
    for (size_t index = 0; index < failures_room(failures); index++)
        /* Check the entry that a removal moves here, too. */
        while (failures->slots[index].attempts && failures->slots[index].offset >= from &&
               failures->slots[index].offset < to) {
            failures_remove(failures, &failures->slots[index]);
            failures->ahead--;
        }
}

#endif
