# How rows are dealt out to the shards of a shuffle: inline functions only.
#
# A shard's rows are settled in one ledger, so the hash here must share nothing with that
# ledger's (else each shard would crowd one part of its table), nor with acker_task's.  It is
# the same in every process and version: what one job wrote for a shard another may read.
# The twin is ackcore/_reference_pack.py.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

cdef enum:
    MAX_SHARDS = 1 << 20

# One odd multiplier between shifts; not the constants of ids.pxd, whose output it mixes again.
cdef extern from *:
    """
    #define ACKCORE_SPREAD 0x0e9846af9b1a615dULL
    """
    const uint64_t SPREAD "ACKCORE_SPREAD"


cdef inline uint32_t shard_of(uint64_t root_id, uint64_t n) noexcept nogil:
    """The shard of a root, below n."""
    root_id ^= root_id >> 32
    root_id *= SPREAD
    root_id ^= root_id >> 32
    root_id *= SPREAD
    root_id ^= root_id >> 28
    return <uint32_t>(((root_id >> 32) * n) >> 32)


cdef inline void find_shards(
    const uint64_t *root_ids, size_t rows, uint64_t n, uint32_t *shards, int64_t *counts
) noexcept nogil:
    """The shard of each row; counts[s] is raised by the rows of shard s."""
    cdef size_t i
    for i in range(rows):
        shards[i] = shard_of(root_ids[i], n)
    for i in range(rows):
        counts[shards[i]] += 1


cdef inline void order_by_shard(
    const uint32_t *shards, size_t rows, int64_t *next_place, int64_t *order
) noexcept nogil:
    """Row numbers, shard by shard, each shard's in their old order.

    next_place[s] is where the first row of shard s goes, and afterwards where the next would.
    """
    cdef size_t i
    cdef int64_t place
    for i in range(rows):
        place = next_place[shards[i]]
        next_place[shards[i]] = place + 1
        order[place] = <int64_t>i


cdef inline size_t take_rows_of_shard(
    const uint64_t *root_ids, const uint64_t *vals, const int32_t *tasks, const int64_t *times,
    size_t rows, uint32_t shard, uint64_t n, int64_t *out_roots, int64_t *out_vals,
    int32_t *out_tasks, int64_t *out_times
) noexcept nogil:
    """Copy the rows of one shard, and return how many; every column out has room for all.

    A row is always copied, and the cursor goes on if it was wanted: which are, nothing foretells.
    """
    cdef size_t i, k = 0
    cdef uint64_t root_id
    for i in range(rows):
        root_id = root_ids[i]
        out_roots[k] = <int64_t>root_id
        out_vals[k] = <int64_t>vals[i]
        out_tasks[k] = tasks[i]
        if times != NULL:
            out_times[k] = times[i]
        k += shard_of(root_id, n) == shard
    return k
