/* pack.h - the distribution of rows to the shards of a shuffle.
 *
 * A shard's rows are settled in one ledger, so this hash must be independent of that ledger's (else
 * each shard would cluster in one part of its table), and of acker_task's.  It is the same in every
 * process and version, because one job may read the shards that another wrote.  The reference
 * implementation is ackcore/_reference/rows.py.
 */
#ifndef ACKCORE_PACK_H
#define ACKCORE_PACK_H

#include <stddef.h>

#include "mix.h"

enum { MAX_SHARDS = 1 << 20, LONG_RUN = 64 };
/* One odd multiplier between shifts; not the constants of ids.h, whose output it mixes again. */
#define SPREAD 0x0e9846af9b1a615dULL

/* A 64-bit hash of a root; a bijection, so no two roots have the same hash. */
INLINE uint64_t spread_of(uint64_t root_id) {
    root_id ^= root_id >> 32;
    root_id *= SPREAD;
    root_id ^= root_id >> 32;
    root_id *= SPREAD;
    return root_id ^ (root_id >> 28);
}
/* The shard, below n, of roots with this hash; it never decreases with the hash. */
INLINE uint32_t shard_with(uint64_t hash, uint64_t n) {
    return (uint32_t)(((hash >> 32) * n) >> 32);
}
INLINE uint32_t shard_of(uint64_t root_id, uint64_t n) { return shard_with(spread_of(root_id), n); }

/* The shard of each row; adds the rows of shard s to counts[s]. */
static inline void find_shards(const uint64_t *root_ids, size_t rows, uint64_t n, uint32_t *shards,
                               int64_t *counts) {
    for (size_t row = 0; row < rows; row++) shards[row] = shard_of(root_ids[row], n);
    for (size_t row = 0; row < rows; row++) counts[shards[row]]++;
}
/* Row numbers, shard by shard, ascending within each.  next_place[s] is the place of the first row
 * of shard s, and afterwards that of the next one. */
static inline void order_by_shard(const uint32_t *shards, size_t rows, int64_t *next_place,
                                  int64_t *order) {
    for (size_t row = 0; row < rows; row++) {
        const int64_t place = next_place[shards[row]];
        next_place[shards[row]] = place + 1;
        order[place] = (int64_t)row;
    }
}

typedef struct { /* a row in the order of hashes */
    uint64_t hash;
    int64_t row;
} hashed_t;

INLINE hashed_t hashed_at(const uint64_t *hashes, const int64_t *order, size_t place) {
    hashed_t found = {hashes[place], order[place]};
    return found;
}
INLINE void put_hashed(uint64_t *hashes, int64_t *order, size_t place, hashed_t hashed) {
    hashes[place] = hashed.hash;
    order[place] = hashed.row;
}
INLINE int is_before(hashed_t one, hashed_t other) {
    return one.hash < other.hash || (one.hash == other.hash && one.row < other.row);
}
/* Move an entry of a heap of n down to where it belongs. */
static inline void sift(uint64_t *hashes, int64_t *order, size_t place, size_t n) {
    const hashed_t moved = hashed_at(hashes, order, place);
    while (2 * place + 1 < n) {
        size_t child = 2 * place + 1;
        if (child + 1 < n &&
            is_before(hashed_at(hashes, order, child), hashed_at(hashes, order, child + 1)))
            child++;
        if (!is_before(moved, hashed_at(hashes, order, child))) break;
        put_hashed(hashes, order, place, hashed_at(hashes, order, child));
        place = child;
    }
    put_hashed(hashes, order, place, moved);
}
/* Sort hashes, and row numbers with them; equal hashes by row number. */
static inline void sort_run(uint64_t *hashes, int64_t *order, size_t n) {
    if (n > LONG_RUN) { /* roots chosen to collide, or one root many times: heapsort, never n * n */
        for (size_t done = 0; done < n / 2; done++) sift(hashes, order, n / 2 - 1 - done, n);
        for (size_t last = n - 1; last > 0; last--) {
            const hashed_t least = hashed_at(hashes, order, last);
            put_hashed(hashes, order, last, hashed_at(hashes, order, 0));
            put_hashed(hashes, order, 0, least);
            sift(hashes, order, 0, last);
        }
        return;
    }
    for (size_t sorted = 1; sorted < n; sorted++) {
        const hashed_t moved = hashed_at(hashes, order, sorted);
        size_t place = sorted;
        for (; place > 0 && is_before(moved, hashed_at(hashes, order, place - 1)); place--)
            put_hashed(hashes, order, place, hashed_at(hashes, order, place - 1));
        put_hashed(hashes, order, place, moved);
    }
}
/* Row numbers in the order of their roots' hashes; adds the rows of shard s to counts[s].
 *
 * Hashes are spread evenly: after one pass by their first bits, only few rows have to be sorted
 * against each other.  next_place has room for 2**bits numbers, all 0; bits is in 1..63. */
static inline void order_by_hash(const uint64_t *root_ids, size_t rows, uint64_t n, int bits,
                                 int64_t *next_place, uint64_t *hashes, int64_t *order,
                                 int64_t *counts) {
    const int shift = 64 - bits;
    const size_t parts = (size_t)1 << bits;
    int64_t before = 0;
    size_t start = 0;
    for (size_t row = 0; row < rows; row++) next_place[spread_of(root_ids[row]) >> shift]++;
    for (size_t part = 0; part < parts; part++) {
        const int64_t count = next_place[part];
        next_place[part] = before;
        before += count;
    }
    for (size_t row = 0; row < rows; row++) {
        const uint64_t hash = spread_of(root_ids[row]);
        const int64_t place = next_place[hash >> shift]++;
        hashes[place] = hash;
        order[place] = (int64_t)row;
    }
    for (size_t part = 0; part < parts; part++) {
        const size_t end = (size_t)next_place[part];
        sort_run(hashes + start, order + start, end - start);
        start = end;
    }
    for (size_t row = 0; row < rows; row++) counts[shard_with(hashes[row], n)]++;
}
/* Copy the rows of one shard, and return their number; every output column has room for all rows.
 * Every row is copied, and the cursor advances past wanted ones: a branch would be mispredicted. */
static inline size_t take_rows_of_shard(const uint64_t *root_ids, const uint64_t *vals,
                                        const int32_t *tasks, const int64_t *times, size_t rows,
                                        uint32_t shard, uint64_t n, int64_t *out_roots,
                                        int64_t *out_vals, int32_t *out_tasks, int64_t *out_times) {
    size_t taken = 0;
    for (size_t row = 0; row < rows; row++) {
        const uint64_t root_id = root_ids[row];
        out_roots[taken] = (int64_t)root_id;
        out_vals[taken] = (int64_t)vals[row];
        out_tasks[taken] = tasks[row];
        if (times) out_times[taken] = times[row];
        taken += shard_of(root_id, n) == shard;
    }
    return taken;
}

#endif
