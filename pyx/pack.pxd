# How rows are dealt out to the shards of a shuffle: inline functions only.
#
# A shard's rows are settled in one ledger, so the hash here must share nothing with that
# ledger's (else each shard would cluster in one part of its table), nor with acker_task's.  It is
# the same in every process and version: what one job wrote for a shard another may read.
# The reference implementation is ackcore/_reference/pack.py.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

cdef enum:
    MAX_SHARDS = 1 << 20
    LONG_RUN = 64

# One odd multiplier between shifts; not the constants of ids.pxd, whose output it mixes again.
cdef extern from *:
    """
    #define ACKCORE_SPREAD 0x0e9846af9b1a615dULL
    """
    const uint64_t SPREAD "ACKCORE_SPREAD"


cdef inline uint64_t spread_of(uint64_t root_id) noexcept nogil:
    """A hash of a root, in 64 bits; a bijection, so no two roots have the same."""
    root_id ^= root_id >> 32
    root_id *= SPREAD
    root_id ^= root_id >> 32
    root_id *= SPREAD
    return root_id ^ (root_id >> 28)


cdef inline uint32_t shard_with(uint64_t hash_, uint64_t n) noexcept nogil:
    """The shard, below n, of the roots with this hash: a greater hash never has a lower shard."""
    return <uint32_t>(((hash_ >> 32) * n) >> 32)


cdef inline uint32_t shard_of(uint64_t root_id, uint64_t n) noexcept nogil:
    """The shard of a root, below n."""
    return shard_with(spread_of(root_id), n)


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


cdef inline bint is_before(
    uint64_t hash_, int64_t row, uint64_t other_hash, int64_t other_row
) noexcept nogil:
    return hash_ < other_hash or (hash_ == other_hash and row < other_row)


cdef inline void sift(uint64_t *hashes, int64_t *order, size_t i, size_t n) noexcept nogil:
    """Move entry i of a heap down to where it belongs."""
    cdef size_t child
    cdef uint64_t hash_ = hashes[i]
    cdef int64_t row = order[i]
    while 2 * i + 1 < n:
        child = 2 * i + 1
        if child + 1 < n and is_before(
            hashes[child], order[child], hashes[child + 1], order[child + 1]
        ):
            child += 1
        if not is_before(hash_, row, hashes[child], order[child]):
            break
        hashes[i], order[i] = hashes[child], order[child]
        i = child
    hashes[i], order[i] = hash_, row


cdef inline void sort_run(uint64_t *hashes, int64_t *order, size_t n) noexcept nogil:
    """Sort hashes, and row numbers with them; equal hashes by row number."""
    cdef size_t i, j
    cdef uint64_t hash_
    cdef int64_t row
    if n > LONG_RUN:  # roots chosen to collide, or one root many times: heapsort, never n * n steps
        for i in range(n // 2):
            sift(hashes, order, n // 2 - 1 - i, n)
        for i in range(n - 1):
            j = n - 1 - i
            hashes[0], hashes[j] = hashes[j], hashes[0]
            order[0], order[j] = order[j], order[0]
            sift(hashes, order, 0, j)
        return
    for i in range(1, n):
        hash_, row = hashes[i], order[i]
        j = i
        while j > 0 and is_before(hash_, row, hashes[j - 1], order[j - 1]):
            hashes[j], order[j] = hashes[j - 1], order[j - 1]
            j -= 1
        hashes[j], order[j] = hash_, row


cdef inline void order_by_hash(
    const uint64_t *root_ids, size_t rows, uint64_t n, int bits, int64_t *next_place,
    uint64_t *hashes, int64_t *order, int64_t *counts
) noexcept nogil:
    """Row numbers in the order of their roots' hashes; counts[s] is raised by the rows of shard s.

    Hashes are spread evenly: after one pass over their first bits, only a few rows are left to be
    sorted against each other.  next_place has room for 2**bits numbers, all 0; bits is in 1..63.
    """
    cdef size_t i, start = 0, end
    cdef int shift = 64 - bits
    cdef int64_t place, before = 0, count
    cdef uint64_t hash_
    for i in range(rows):
        next_place[spread_of(root_ids[i]) >> shift] += 1
    for i in range(<size_t>1 << bits):
        count = next_place[i]
        next_place[i] = before
        before += count
    for i in range(rows):
        hash_ = spread_of(root_ids[i])
        place = next_place[hash_ >> shift]
        next_place[hash_ >> shift] = place + 1
        hashes[place] = hash_
        order[place] = <int64_t>i
    for i in range(<size_t>1 << bits):
        end = <size_t>next_place[i]
        sort_run(hashes + start, order + start, end - start)
        start = end
    for i in range(rows):
        counts[shard_with(hashes[i], n)] += 1


cdef inline size_t take_rows_of_shard(
    const uint64_t *root_ids, const uint64_t *vals, const int32_t *tasks, const int64_t *times,
    size_t rows, uint32_t shard, uint64_t n, int64_t *out_roots, int64_t *out_vals,
    int32_t *out_tasks, int64_t *out_times
) noexcept nogil:
    """Copy the rows of one shard, and return how many; every column out has room for all.

    A row is always copied; the cursor advances if it was wanted, as a branch would be mispredicted.
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
