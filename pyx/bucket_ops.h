/* bucket_ops.h - all SIMD code: match a key in a bucket, find free and aged slots; hash keys.
 *
 * SIMD is 0 without vectors, 1 with SSE2, 2 with AVX2, 3 with AVX-512: each kernel_*.c sets it. The
 * other headers do not use it.  Slots are returned as bits, slot 0 lowest.
 */
#ifndef ACKCORE_BUCKET_OPS_H
#define ACKCORE_BUCKET_OPS_H

#include "layout.h"

enum { ALL_SLOTS = (1 << SLOTS) - 1 };

/* ---- slots of a bucket ------------------------------------------------------------------- */

#if SIMD >= 1
INLINE
__m128i load_stamps(const bucket_t *bucket) { /* and overflow_count, which callers mask out */
    int32_t word;
    memcpy(&word, bucket->stamps, sizeof word);
    return _mm_cvtsi32_si128(word);
}
#endif
/* A bit for each slot, set if the slot is free; higher bits are undefined. */
INLINE uint32_t free_unmasked(const bucket_t *bucket) {
#if SIMD >= 1
    return (uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(load_stamps(bucket), _mm_setzero_si128()));
#else
    uint32_t empty = 0;
    for (int slot = 0; slot < SLOTS; slot++) empty |= (uint32_t)(bucket->stamps[slot] == 0) << slot;
    return empty;
#endif
}
INLINE size_t is_full(const bucket_t *bucket) { return (free_unmasked(bucket) & ALL_SLOTS) == 0; }
/* One bit a slot: those that hold `key` (free ones never do), and those that are free; higher bits
 * are undefined. */
INLINE void match_unmasked(const bucket_t *bucket, uint64_t key, uint32_t *match,
                           uint32_t *free_slots) {
    const uint32_t empty = free_unmasked(bucket);
    uint32_t equal;
#if SIMD >= 3
    equal = _mm256_cmpeq_epi64_mask(_mm256_load_si256((const __m256i *)bucket->keys),
                                    _mm256_set1_epi64x((long long)key));
#elif SIMD >= 2
    equal = (uint32_t)_mm256_movemask_pd((__m256d)_mm256_cmpeq_epi64(
        _mm256_load_si256((const __m256i *)bucket->keys), _mm256_set1_epi64x((long long)key)));
#elif SIMD >= 1
    const __m128i wanted = _mm_set1_epi64x((long long)key);
    equal = 0;
    for (int k = 0; k < 2; k++) { /* no 64-bit compare below SSE4.1: both halves must agree */
        __m128i halves =
            _mm_cmpeq_epi32(_mm_load_si128((const __m128i *)&bucket->keys[2 * k]), wanted);
        halves = _mm_and_si128(halves, _mm_shuffle_epi32(halves, 0xb1));
        equal |= (uint32_t)_mm_movemask_pd((__m128d)halves) << (2 * k);
    }
#else
    equal = 0;
    for (int slot = 0; slot < SLOTS; slot++) equal |= (uint32_t)(bucket->keys[slot] == key) << slot;
#endif
    *match = equal & ~empty;
    *free_slots = empty;
}
/* The same, and higher bits are 0. */
INLINE void match_slots(const bucket_t *bucket, uint64_t key, uint32_t *match,
                        uint32_t *free_slots) {
    match_unmasked(bucket, key, match, free_slots);
    *match &= ALL_SLOTS;
    *free_slots &= ALL_SLOTS;
}
/* One bit a slot: those with an entry of at least a given age; `now` is the present stamp. */
INLINE uint32_t aged_slots(const bucket_t *bucket, int now, int age) {
#if SIMD >= 1
    const __m128i seven = _mm_set1_epi8(0x7f), stamp = _mm_set1_epi8((char)now);
    const __m128i stamps = _mm_and_si128(load_stamps(bucket), seven);
    const __m128i wrapped = _mm_and_si128(_mm_cmpgt_epi8(stamps, stamp), seven);
    const __m128i ages = _mm_add_epi8(_mm_sub_epi8(stamp, stamps), wrapped);
    const __m128i old = _mm_cmpgt_epi8(ages, _mm_set1_epi8((char)(age - 1)));
    const __m128i free_slots = _mm_cmpeq_epi8(stamps, _mm_setzero_si128());
    return (uint32_t)_mm_movemask_epi8(_mm_andnot_si128(free_slots, old)) & ALL_SLOTS;
#else
    uint32_t aged = 0;
    for (int slot = 0; slot < SLOTS; slot++) {
        const int stamp = bucket->stamps[slot] & ~MARKED;
        const int is = now - stamp + (stamp > now ? STAMPS : 0);
        aged |= (uint32_t)(stamp != 0 && is >= age) << slot;
    }
    return aged;
#endif
}

/* ---- hash, outcomes, cache ---------------------------------------------------------------- */

/* The hash of a key, in two rounds: after one, evenly spaced ids cluster in a few buckets under one
 * seed in twenty (bench/README.md).  The vector form multiplies only low halves; in scalar code,
 * folding the two halves of a full product does the work of a round.  Kernels of different levels
 * need not agree: no hash leaves them, and rows listed in table order are sorted before they are
 * packed (wire.pack_entries). */
INLINE uint64_t hash_of(seed_t seed, uint64_t key) {
    uint64_t x = key ^ seed.flip;
#if SIMD >= 2
    x = (x ^ (x >> 32)) * seed.multipliers[0];
    x ^= x >> 32;
#else
    const unsigned __int128 product = (unsigned __int128)x * seed.multipliers[0];
    x = (uint64_t)product ^ (uint64_t)(product >> 64);
#endif
    return x * seed.multipliers[1];
}
/* One bit a byte: those of the first n of 64 bytes that are not 0; all 64 are readable. */
INLINE uint64_t nonzero_bytes(const uint8_t *bytes, size_t n) {
    uint64_t none = 0;
#if SIMD >= 3
    none = _mm512_testn_epi8_mask(_mm512_loadu_si512(bytes), _mm512_loadu_si512(bytes));
#elif SIMD >= 1
    for (int k = 0; k < 64; k += 16) {
        const __m128i some = _mm_loadu_si128((const __m128i *)(bytes + k));
        none |= (uint64_t)(uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(some, _mm_setzero_si128()))
                << k;
    }
#else
    for (int k = 0; k < 64; k++) none |= (uint64_t)(bytes[k] == 0) << k;
#endif
    return n < 64 ? ~none & (((uint64_t)1 << n) - 1) : ~none;
}
INLINE void prefetch(const bucket_t *bucket) { __builtin_prefetch(bucket, 1, 3); }
/* Into L2 only: more lines can be in flight to it than to L1. */
INLINE void prefetch_far(const bucket_t *bucket) { __builtin_prefetch(bucket, 1, 2); }

#endif
