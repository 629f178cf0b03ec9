/* ids.h - how ids are mixed, packed and routed.
 *
 * No bit of an id may ever change: checkpoints contain ids, and the next version must derive the
 * same ones.  The reference implementation is ackcore/_reference/id_hashes.py; the test vectors are in
 * tests/test_ids.py.
 *
 * A root id is a bijection of one 64-bit word,
 *
 *     63 .. 48    47 ......... 6    5 .. 0
 *     partition   offset            attempt
 *
 * so two records never share an id under one key.  Each step below (xor, add, multiply by an odd
 * number, x ^= x >> s) can be undone, hence so can their composition.
 */
#ifndef ACKCORE_IDS_H
#define ACKCORE_IDS_H

#include "mix.h"

enum { PARTITION_BITS = 16, OFFSET_BITS = 42, ATTEMPT_BITS = 6 };

/* The output number `index` of SplitMix64 started at `key`.  Roots use numbers 0-2, edges 3-5,
 * sources 6-7, so no two purposes share a number. */
INLINE uint64_t subkey(uint64_t key, uint64_t index) { return mix64(key + (index + 1) * GOLDEN); }

typedef struct {
    uint64_t before, between, after;
} bijection_t;

INLINE uint64_t biject(uint64_t x, bijection_t keys) {
    return mix64(mix64(x ^ keys.before) + keys.between) ^ keys.after;
}
INLINE bijection_t root_bijection(uint64_t key) {
    bijection_t keys = {subkey(key, 0), subkey(key, 1), subkey(key, 2)};
    return keys;
}
INLINE bijection_t source_bijection(uint64_t key) {
    bijection_t keys = {subkey(key, 6), subkey(key, 7), 0};
    /* 0 maps to 0, and a source counts from 1, so it never returns id 0. */
    keys.after = mix64(mix64(keys.before) + keys.between);
    return keys;
}
/* The word from which a root id is mixed; the parts have been checked. */
INLINE uint64_t position(uint64_t partition, uint64_t offset, uint64_t attempt) {
    return (partition << (OFFSET_BITS + ATTEMPT_BITS)) | (offset << ATTEMPT_BITS) | attempt;
}

typedef struct {
    uint64_t root, component, instead_of_zero;
} edge_key_t;

INLINE edge_key_t edge_key(uint64_t key, uint64_t component) {
    edge_key_t keys = {subkey(key, 3), subkey(component ^ key, 4), subkey(key, 5) | 1};
    return keys;
}
/* An edge in three steps, so that columns can be processed one loop per step. */
INLINE uint64_t edge_root(uint64_t root, edge_key_t keys) { return mix64(root ^ keys.root); }
INLINE uint64_t edge_parent(uint64_t x, uint64_t parent_edge, edge_key_t keys) {
    return mix64((x + parent_edge) ^ keys.component);
}
INLINE uint64_t edge_ordinal(uint64_t x, uint64_t ordinal, edge_key_t keys) {
    x = mix64(x + ordinal * GOLDEN);
    /* An edge of 0 would have no effect in the XOR.  A mask, not a branch: this loop vectorises. */
    return x | (keys.instead_of_zero & (0 - (uint64_t)(x == 0)));
}
/* Storm's fields grouping: floorMod(31 + Long.hashCode(root), tasks), where + wraps. */
INLINE int32_t acker_of(uint64_t root, int32_t tasks) {
    const int32_t left = (int32_t)((uint32_t)(root ^ (root >> 32)) + 31) % tasks;
    /* C rounds towards zero, floorMod down; adding `tasks` cannot overflow as left < 0. */
    return left + (tasks & (left >> 31));
}

#endif
