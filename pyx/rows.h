/* rows.h - the processing of rows that a stage emits: hashing their fields and
 * fingerprinting written data.
 *
 * No bit of a result may ever change: a checkpoint contains fingerprints, and all tasks of a
 * shuffle, of any version, must send a value to the same destination.  The reference implementation
 * is ackcore/_reference/rows.py; the test vectors are in tests/test_hashes.py.
 *
 * Columns are mixed into a row's hash h one after another:
 *
 *     h = (h ^ h >> 32) * NEXT_COLUMN + hash of the value        from h = 0: the hash of the value
 *
 *     8 bytes or fewer    mix(the sign-extended number ^ VALUE)
 *     16, 32 bytes        the same, and mix(that ^ word) for each further word
 *     any length          x = VALUE + GOLDEN * (length + 1), then x = mix(x ^ word) for each word,
 *                         at least one; the last is padded with zeros
 *     null                NO_VALUE
 *
 * Words are little-endian if bytes are hashed, and in native order if numbers are.
 */
#ifndef ACKCORE_ROWS_H
#define ACKCORE_ROWS_H

#include <string.h>

#include "ids.h"

#define VALUE 0x2545f4914f6cdd1dULL
#define NO_VALUE 0x6a09e667f3bcc909ULL
#define NEXT_COLUMN 0xd1342543de82ef95ULL
#define FINGERPRINT 0x3c6ef372fe94f82bULL

/* Eight bytes from any address, the first one lowest. */
INLINE uint64_t word_at(const uint8_t *bytes) {
    uint64_t word;
    memcpy(&word, bytes, 8);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    return word;
}

/* ---- hashes of numbers --------------------------------------------------------------------- */

INLINE uint64_t fold_value(uint64_t hash, uint64_t value_hash) {
    return (hash ^ (hash >> 32)) * NEXT_COLUMN + value_hash;
}
INLINE uint64_t where_valid(uint64_t value_hash, uint8_t valid) {
    /* A mask, not a branch: nulls are unpredictable. */
    const uint64_t keep = 0 - (uint64_t)(valid != 0);
    return (value_hash & keep) | (NO_VALUE & ~keep);
}
/* A number of a column at any address, hence memcpy. */
INLINE int64_t number_at(const uint8_t *column, size_t row, const size_t width) {
    int8_t byte;
    int16_t half;
    int32_t word;
    int64_t wide;
    switch (width) {
    case 1:
        memcpy(&byte, column + row, 1);
        return byte;
    case 2:
        memcpy(&half, column + 2 * row, 2);
        return half;
    case 4:
        memcpy(&word, column + 4 * row, 4);
        return word;
    default:
        memcpy(&wide, column + 8 * row, 8);
        return wide;
    }
}
INLINE void fold_narrow(uint64_t *hashes, const uint8_t *column, const size_t width, size_t rows,
                        const uint8_t *valid) {
    if (valid == NULL)
        for (size_t row = 0; row < rows; row++)
            hashes[row] =
                fold_value(hashes[row], mix64((uint64_t)number_at(column, row, width) ^ VALUE));
    else
        for (size_t row = 0; row < rows; row++) {
            const uint64_t hash = mix64((uint64_t)number_at(column, row, width) ^ VALUE);
            hashes[row] = fold_value(hashes[row], where_valid(hash, valid[row]));
        }
}
INLINE void fold_wide(uint64_t *hashes, const uint8_t *column, const size_t words, size_t rows,
                      const uint8_t *valid) {
    for (size_t row = 0; row < rows; row++) {
        uint64_t hash = VALUE, word;
        for (size_t k = 0; k < words; k++) {
            memcpy(&word, column + 8 * (words * row + k), 8);
            hash = mix64(hash ^ word);
        }
        hashes[row] = fold_value(hashes[row], valid ? where_valid(hash, valid[row]) : hash);
    }
}
/* Mix in a column of numbers of 1, 2, 4, 8, 16 or 32 bytes, with a loop for each; `valid` is NULL
 * without nulls.  Not inlined: the loops of an inlined copy may be badly aligned, which costs up to
 * a tenth. */
static __attribute__((noinline, unused)) void fold_numbers(uint64_t *hashes, const uint8_t *column,
                                                           size_t width, size_t rows,
                                                           const uint8_t *valid) {
    if (width == 1)
        fold_narrow(hashes, column, 1, rows, valid);
    else if (width == 2)
        fold_narrow(hashes, column, 2, rows, valid);
    else if (width == 4)
        fold_narrow(hashes, column, 4, rows, valid);
    else if (width == 8)
        fold_narrow(hashes, column, 8, rows, valid);
    else if (width == 16)
        fold_wide(hashes, column, 2, rows, valid);
    else
        fold_wide(hashes, column, 4, rows, valid);
}

/* ---- strings ------------------------------------------------------------------------------- */

/* Offsets are of 32 bits, or wide: of 64.  Functions with `const int wide` are built for each. */
INLINE int64_t offset_at(const void *offsets, size_t row, const int wide) {
    return wide ? ((const int64_t *)offsets)[row] : ((const int32_t *)offsets)[row];
}
/* The hash of bytes in memory that can be read up to `end`, and no further. */
INLINE uint64_t hash_of_bytes(const uint8_t *bytes, uint64_t length, const uint8_t *end) {
    uint64_t hash = VALUE + GOLDEN * (length + 1), word = 0;
    for (; length > 8; bytes += 8, length -= 8) hash = mix64(hash ^ word_at(bytes));
    if (end - bytes >= 8)
        /* Read too much and mask it out; twice half the shift, for 64 at once is undefined. */
        word = word_at(bytes) & ((((uint64_t)1 << (4 * length)) << (4 * length)) - 1);
    else
        for (uint64_t at = 0; at < length; at++) word |= (uint64_t)bytes[at] << (8 * at);
    return mix64(hash ^ word);
}
INLINE size_t bad_offset_of(const void *offsets, const int wide, size_t rows, int64_t size) {
    uint64_t wrong = 0;
    /* Check all rows together, which vectorises; search for the bad row only if there is one. */
    for (size_t row = 0; row < rows; row++)
        wrong |= offset_at(offsets, row + 1, wide) < offset_at(offsets, row, wide);
    if (!wrong && offset_at(offsets, 0, wide) >= 0 && offset_at(offsets, rows, wide) <= size)
        return rows;
    for (size_t row = 0; row < rows; row++) {
        const int64_t start = offset_at(offsets, row, wide),
                      end = offset_at(offsets, row + 1, wide);
        if (start < 0 || end < start || end > size) return row;
    }
    return rows;
}
/* The first row whose bytes are not within 0..size; the number of rows if there is none. */
static inline size_t first_bad_offset(const void *offsets, int wide, size_t rows, int64_t size) {
    return wide ? bad_offset_of(offsets, 1, rows, size) : bad_offset_of(offsets, 0, rows, size);
}
INLINE void fold_bytes_at(uint64_t *hashes, const void *offsets, const int wide,
                          const uint8_t *data, size_t size, size_t rows, const uint8_t *valid) {
    for (size_t row = 0; row < rows; row++) {
        const int64_t start = offset_at(offsets, row, wide),
                      end = offset_at(offsets, row + 1, wide);
        const uint64_t hash = hash_of_bytes(data + start, (uint64_t)(end - start), data + size);
        hashes[row] = fold_value(hashes[row], valid ? where_valid(hash, valid[row]) : hash);
    }
}
/* Mix in a column of strings. */
static inline void fold_bytes(uint64_t *hashes, const void *offsets, int wide, const uint8_t *data,
                              size_t size, size_t rows, const uint8_t *valid) {
    if (wide)
        fold_bytes_at(hashes, offsets, 1, data, size, rows, valid);
    else
        fold_bytes_at(hashes, offsets, 0, data, size, rows, valid);
}
/* Compute the offsets of rows after reordering; stops at a row number that is out of range.
 * Returns its place, or `places`; `total` exceeds `most` if the bytes do not fit. */
INLINE size_t places_of(const void *offsets, const int wide, size_t rows, const uint64_t *order,
                        size_t places, void *out, int64_t most, int64_t *total) {
    int64_t end = 0;
    *total = 0;
    memset(out, 0, wide ? 8 : 4);
    for (size_t place = 0; place < places; place++) {
        const uint64_t row = order[place];
        if (row >= rows) return place;
        end += offset_at(offsets, row + 1, wide) - offset_at(offsets, row, wide);
        if (end > most) break;
        if (wide)
            ((int64_t *)out)[place + 1] = end;
        else
            ((int32_t *)out)[place + 1] = (int32_t)end;
    }
    *total = end;
    return places;
}
static inline size_t place_gathered(const void *offsets, int wide, size_t rows,
                                    const uint64_t *order, size_t places, void *out, int64_t most,
                                    int64_t *total) {
    return wide ? places_of(offsets, 1, rows, order, places, out, most, total)
                : places_of(offsets, 0, rows, order, places, out, most, total);
}

enum {
    AT_ONCE = 16
}; /* bytes: most strings are shorter, and a copy of fixed length is two moves */

INLINE void gather_bytes_at(const void *offsets, const int wide, const uint8_t *data, int64_t size,
                            const uint64_t *order, size_t places, const void *to, uint8_t *out) {
    for (size_t place = 0; place < places; place++) {
        const int64_t start = offset_at(offsets, order[place], wide);
        const int64_t at = offset_at(to, place, wide), length = offset_at(to, place + 1, wide) - at;
        if (length <= AT_ONCE && start <= size - AT_ONCE)
            memcpy(out + at, data + start, AT_ONCE);
        else
            memcpy(out + at, data + start, (size_t)length);
    }
}
/* Copy rows in order; `out` has AT_ONCE further bytes, which may be overwritten. */
static inline void gather_bytes(const void *offsets, int wide, const uint8_t *data, int64_t size,
                                const uint64_t *order, size_t places, const void *to,
                                uint8_t *out) {
    if (wide)
        gather_bytes_at(offsets, 1, data, size, order, places, to, out);
    else
        gather_bytes_at(offsets, 0, data, size, order, places, to, out);
}
/* A sum over the words, each mixed with its place, so that the steps are independent.  Each kernel
 * has a build of it, which the compiler vectorises. */
static inline uint64_t fingerprint_of(const uint8_t *data, uint64_t size, uint64_t seed) {
    const uint64_t key = mix64(seed ^ FINGERPRINT);
    uint64_t total = 0, place = key, word = 0;
    for (uint64_t at = 0; at < size / 8; at++, place += GOLDEN)
        total += mix64(word_at(data + 8 * at) ^ place);
    if (size % 8) {
        for (uint64_t at = 0; at < size % 8; at++)
            word |= (uint64_t)data[size - size % 8 + at] << (8 * at);
        total += mix64(word ^ place);
    }
    return mix64(mix64(total ^ key) + size * GOLDEN);
}

#endif
