/* offset_failures.h - how often each offset failed that is not done: a small hash table.
 *
 * Open addressing, linear probing, backward-shift deletion; a key has a place of its own as soon as
 * it failed once, and leaves when it is done, so that the table is as large as what is in trouble.
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

INLINE size_t failures_room(const failures_t *f) { return f->slots ? (size_t)1 << f->bits : 0; }

/* Offsets are mostly in sequence: spread them (Knuth's multiplicative hashing). */
INLINE size_t failures_home(const failures_t *f, int64_t offset) {
    return (size_t)(((uint64_t)offset * 0x9e3779b97f4a7c15ULL) >> (64 - f->bits));
}
/* The slot of an offset, or the free one where it would go. */
static failure_t *failures_slot(const failures_t *f, int64_t offset) {
    const size_t mask = failures_room(f) - 1;
    size_t i = failures_home(f, offset);
    while (f->slots[i].attempts && f->slots[i].offset != offset) i = (i + 1) & mask;
    return &f->slots[i];
}
/* The entry of an offset, or NULL. */
static failure_t *failures_find(const failures_t *f, int64_t offset) {
    if (f->used == 0) return NULL;
    failure_t *const slot = failures_slot(f, offset);
    return slot->attempts ? slot : NULL;
}
/* Insert an offset that has no entry; there is room. */
static failure_t *failures_add(failures_t *f, int64_t offset) {
    failure_t *const slot = failures_slot(f, offset);
    ASSERT(slot->attempts == 0 && 2 * (f->used + 1) <= failures_room(f));
    slot->offset = offset;
    slot->waits = 0;
    f->used++;
    return slot;
}
/* Remove an entry, and close the gap. */
static void failures_remove(failures_t *f, failure_t *entry) {
    const size_t mask = failures_room(f) - 1;
    size_t gap = (size_t)(entry - f->slots), i = gap;
    f->waiting -= entry->waits;
    f->used--;
    for (;;) {
        i = (i + 1) & mask;
        if (f->slots[i].attempts == 0) break;
        /* It may move to the gap unless its home lies behind the gap. */
        const size_t home = failures_home(f, f->slots[i].offset);
        if (((i - home) & mask) >= ((i - gap) & mask)) {
            f->slots[gap] = f->slots[i];
            gap = i;
        }
    }
    f->slots[gap].attempts = 0;
}
static void failures_free(failures_t *f) {
    free(f->slots);
    memset(f, 0, sizeof *f);
}
/* Nothing is in trouble any more: a large table goes. */
INLINE void failures_trim(failures_t *f) {
    if (failures_room(f) > 1024) failures_free(f);
}
/* Have room for so many entries, half of the slots at most; 0, or -1 without memory. */
static int failures_reserve(failures_t *f, size_t entries) {
    if (2 * entries <= failures_room(f)) return 0;
    failures_t other = {NULL, 3, 0, f->waiting, f->ahead};
    while (((size_t)1 << other.bits) < 2 * entries) other.bits++;
    other.slots = calloc((size_t)1 << other.bits, sizeof *other.slots);
    if (other.slots == NULL) return -1;
    for (size_t i = 0; i < failures_room(f); i++)
        if (f->slots[i].attempts) *failures_add(&other, f->slots[i].offset) = f->slots[i];
    free(f->slots);
    *f = other;
    return 0;
}
/* Remove the entries ahead that are in from .. to - 1: those offsets are not there. */
static void failures_pass(failures_t *f, int64_t from, int64_t to) {
    for (size_t i = 0; i < failures_room(f); i++)
        /* What a removal moves here is looked at as well. */
        while (f->slots[i].attempts && f->slots[i].offset >= from && f->slots[i].offset < to) {
            failures_remove(f, &f->slots[i]);
            f->ahead--;
        }
}

#endif
