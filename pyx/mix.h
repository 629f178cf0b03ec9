/* mix.h - SplitMix64, which the table, the ids and the rows all use. */
#ifndef ACKCORE_MIX_H
#define ACKCORE_MIX_H

#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))

/* SplitMix64's increment: multiples of the golden ratio visit all 64-bit words, far apart. */
#define GOLDEN 0x9e3779b97f4a7c15ULL

/* Its finaliser (Stafford's Mix13): a bijection with full avalanche. */
INLINE uint64_t mix64(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}

#endif
