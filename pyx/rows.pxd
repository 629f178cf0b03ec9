# What a stage does with the rows it emits: hashing their fields, numbering their edges, and
# fingerprinting what is written.  Inline functions only.
#
# Fixed for ever, bit by bit: a checkpoint holds fingerprints, and two tasks of one shuffle, or of
# two versions, must send one value to one place.  The reference implementation is
# ackcore/_reference/rows.py; the test vectors are in tests/test_hashes.py, test_runs.py and
# test_fingerprints.py.
#
# A row's hash h takes in one column after the other:
#
#     h = (h ^ h >> 32) * NEXT_COLUMN + hash of the value        so h = 0 makes it the value's own
#
#     8 bytes or fewer    mix(the sign-extended number ^ VALUE)
#     16, 32 bytes        the same, and mix(that ^ word) for each further word
#     any length          x = VALUE + GOLDEN * (length + 1), then x = mix(x ^ word) for each word,
#                         of which there is one at least; the last is filled up with zeros
#     null                NO_VALUE
#
# Words are little-endian where bytes are hashed, and the machine's own where numbers are.

from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint8_t, uint64_t
from libc.string cimport memcpy

from ids cimport GOLDEN, edge_key_t, edge_ordinal, edge_parent, edge_root, mix

cdef extern from *:
    """
    #define ACKCORE_VALUE 0x2545f4914f6cdd1dULL
    #define ACKCORE_NO_VALUE 0x6a09e667f3bcc909ULL
    #define ACKCORE_NEXT_COLUMN 0xd1342543de82ef95ULL
    #define ACKCORE_FINGERPRINT 0x3c6ef372fe94f82bULL

    /* Eight bytes from anywhere, the first one lowest. */
    static inline uint64_t ackcore_word(const uint8_t *p) {
        uint64_t x;
        memcpy(&x, p, 8);
    #if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
        x = __builtin_bswap64(x);
    #endif
        return x;
    }
    """
    const uint64_t VALUE "ACKCORE_VALUE"
    const uint64_t NO_VALUE "ACKCORE_NO_VALUE"
    const uint64_t NEXT_COLUMN "ACKCORE_NEXT_COLUMN"
    const uint64_t FINGERPRINT "ACKCORE_FINGERPRINT"
    uint64_t word_at "ackcore_word"(const uint8_t *p) noexcept nogil

ctypedef fused number_t:
    int8_t
    int16_t
    int32_t
    int64_t


cdef inline uint64_t fold_value(uint64_t h, uint64_t value_hash) noexcept nogil:
    return (h ^ (h >> 32)) * NEXT_COLUMN + value_hash


cdef inline uint64_t where_valid(uint64_t value_hash, uint8_t valid) noexcept nogil:
    # A mask, not a branch: nulls come in no order that could be foreseen.
    cdef uint64_t keep = <uint64_t>0 - <uint64_t>(valid != 0)
    return (value_hash & keep) | (NO_VALUE & ~keep)


# Columns of numbers may start anywhere in memory, hence memcpy.

cdef inline void fold_numbers(
    uint64_t *hashes, const number_t *column, size_t rows, const uint8_t *valid
) noexcept nogil:
    cdef size_t i
    cdef number_t x
    if valid == NULL:
        for i in range(rows):
            memcpy(&x, column + i, sizeof(number_t))
            hashes[i] = fold_value(hashes[i], mix(<uint64_t><int64_t>x ^ VALUE))
    else:
        for i in range(rows):
            memcpy(&x, column + i, sizeof(number_t))
            hashes[i] = fold_value(
                hashes[i], where_valid(mix(<uint64_t><int64_t>x ^ VALUE), valid[i])
            )


cdef inline void fold_wide(
    uint64_t *hashes, const uint8_t *data, size_t words, size_t rows, const uint8_t *valid
) noexcept nogil:
    cdef size_t i, j
    cdef uint64_t x, word
    for i in range(rows):
        x = VALUE
        for j in range(words):
            memcpy(&word, data + 8 * (words * i + j), 8)
            x = mix(x ^ word)
        hashes[i] = fold_value(hashes[i], x if valid == NULL else where_valid(x, valid[i]))


cdef inline uint64_t hash_of_bytes(
    const uint8_t *p, uint64_t length, const uint8_t *end
) noexcept nogil:
    """The hash of bytes in memory that can be read up to ``end``, and no further."""
    cdef uint64_t x = VALUE + GOLDEN * (length + 1)
    cdef uint64_t word = 0, j
    while length > 8:
        x = mix(x ^ word_at(p))
        p += 8
        length -= 8
    if end - p >= 8:
        # Read too much and mask it out; twice half the shift, for 64 at once is undefined.
        word = word_at(p) & (((<uint64_t>1 << (4 * length)) << (4 * length)) - 1)
    else:
        for j in range(length):
            word |= <uint64_t>p[j] << (8 * j)
    return mix(x ^ word)


ctypedef fused offset_t:
    int32_t
    int64_t


cdef inline size_t first_bad_offset(
    const offset_t *offsets, size_t rows, int64_t size
) noexcept nogil:
    """The first row whose bytes are not a piece of 0..size; the number of rows if there is none."""
    cdef size_t i
    cdef uint64_t wrong = 0
    # All at once, so that it vectorises; which one it was is found out only if there is one.
    for i in range(rows):
        wrong |= <uint64_t>(offsets[i + 1] < offsets[i])
    if not wrong and offsets[0] >= 0 and offsets[rows] <= size:
        return rows
    for i in range(rows):
        if offsets[i] < 0 or offsets[i + 1] < offsets[i] or offsets[i + 1] > size:
            return i
    return rows


cdef inline void fold_bytes(
    uint64_t *hashes, const offset_t *offsets, const uint8_t *data, size_t size, size_t rows,
    const uint8_t *valid
) noexcept nogil:
    cdef size_t i
    cdef uint64_t x
    for i in range(rows):
        x = hash_of_bytes(
            data + offsets[i], <uint64_t>(offsets[i + 1] - offsets[i]), data + size
        )
        hashes[i] = fold_value(hashes[i], x if valid == NULL else where_valid(x, valid[i]))


cdef inline size_t place_gathered(
    const offset_t *offsets, size_t rows, const uint64_t *order, size_t places, offset_t *out,
    int64_t most, int64_t *total
) noexcept nogil:
    """Where rows begin once they are put in order; stops at a row number that is out of range.

    Returns that place, or ``places``; ``total`` goes above ``most`` where there is no room.
    """
    cdef size_t i
    cdef uint64_t row
    cdef int64_t end = 0
    total[0] = 0
    out[0] = 0
    for i in range(places):
        row = order[i]
        if row >= rows:
            return i
        end += offsets[row + 1] - offsets[row]
        if end > most:
            break
        out[i + 1] = <offset_t>end
    total[0] = end
    return places


cdef enum:
    AT_ONCE = 16  # bytes: most strings are shorter, and a copy of fixed length is two moves


cdef inline void gather_bytes(
    const offset_t *offsets, const uint8_t *data, int64_t size, const uint64_t *order,
    size_t places, const offset_t *to, uint8_t *out
) noexcept nogil:
    """Copy rows in order; ``out`` has room for AT_ONCE bytes more, of which any may be written."""
    cdef size_t i
    cdef int64_t start, length
    for i in range(places):
        start = offsets[order[i]]
        length = to[i + 1] - to[i]
        if length <= AT_ONCE and start <= size - AT_ONCE:
            memcpy(out + to[i], data + start, AT_ONCE)
        else:
            memcpy(out + to[i], data + start, length)


cdef inline uint64_t fingerprint_of(
    const uint8_t *data, uint64_t size, uint64_t seed
) noexcept nogil:
    """A sum over the words, each mixed with its place: steps are independent."""
    cdef uint64_t key = mix(seed ^ FINGERPRINT)
    cdef uint64_t total = 0, place = key, word = 0, i
    for i in range(size // 8):
        total += mix(word_at(data + 8 * i) ^ place)
        place += GOLDEN
    if size % 8:
        for i in range(size % 8):
            word |= <uint64_t>data[size - size % 8 + i] << (8 * i)
        total += mix(word ^ place)
    return mix(mix(total ^ key) + size * GOLDEN)


# Edges of emitted rows, and the runs in which they leave.

cdef inline void start_edges(
    const uint64_t *roots, const uint64_t *parents, uint64_t parent, size_t groups,
    edge_key_t keys, uint64_t *bases
) noexcept nogil:
    """The common part of the edges of a group. Only the ordinal is missing."""
    cdef size_t g
    for g in range(groups):
        bases[g] = edge_root(roots[g], keys)
    if parents != NULL:
        for g in range(groups):
            bases[g] = edge_parent(bases[g], parents[g], keys)
    else:
        for g in range(groups):
            bases[g] = edge_parent(bases[g], parent, keys)


cdef inline size_t number_edges(
    const uint64_t *owners, size_t rows, size_t groups, edge_key_t keys, const uint64_t *bases,
    uint64_t *ordinals, uint64_t *edges, uint64_t *totals, uint64_t *bad_owner
) noexcept nogil:
    """The edge of each row; stops at a row whose owner is no group and returns its number."""
    cdef size_t i
    cdef uint64_t g, edge
    for i in range(rows):
        # Read once: it is a place in memory, and another thread may write to the caller's column.
        g = owners[i]
        if g >= groups:
            bad_owner[0] = g
            return i
        edge = edge_ordinal(bases[g], ordinals[g], keys)
        ordinals[g] += 1
        edges[i] = edge
        totals[g] ^= edge
    return rows


cdef struct runs_t:
    uint64_t *groups
    uint64_t *vals
    int32_t *rows
    int64_t *counts


cdef inline size_t cut_runs(
    const uint64_t *owners, const uint64_t *edges, size_t rows, const uint64_t *order,
    const int64_t *counts, size_t destinations, runs_t out, uint8_t *seen, size_t *bad_place
) noexcept nogil:
    """The runs of each destination; returns how many there are in all.

    Without a branch that data decides: runs are short and of any length.  Each row that comes up
    gets a 1 in ``seen``.  ``bad_place`` is where ``order`` has no row number, or ``rows``.
    """
    cdef size_t i, d, place = 0, stop, k = 0, before
    cdef uint64_t row, owner, last, val, same
    cdef int32_t length
    bad_place[0] = rows
    for d in range(destinations):
        before = k
        stop = place + <size_t>counts[d]
        last = 0
        val = 0
        length = 0
        for i in range(place, stop):
            row = i if order == NULL else order[i]
            if row >= rows:
                bad_place[0] = i
                return k
            seen[row] = 1
            owner = owners[row]
            # The first row begins a run whatever is in it: it was checked to be a group, but
            # another thread may have written to the caller's column since.
            # `same` is 0 or all ones (-1): k grows only for a new run.
            same = <uint64_t>0 - <uint64_t>((owner == last) & (i != place))
            last = owner
            k += 1 + same
            val = (val & same) ^ edges[row]
            length = (length & <int32_t>same) + 1
            out.groups[k - 1] = owner
            out.vals[k - 1] = val
            out.rows[k - 1] = length
        out.counts[d] = <int64_t>(k - before)
        place = stop
    return k
