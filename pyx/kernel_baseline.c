/* kernel_baseline.c - the kernel for any machine (on x86-64 that is SSE2), and the choice of
 * kernel. */
#if defined(__SSE2__)
#include <immintrin.h>
#define SIMD 1
#else
#define SIMD 0
#endif
#define KERNEL kernel_baseline
#include "kernel.h"

const kernel_t *kernel_at(int level) {
    if (level == 0) return &kernel_baseline;
#if HAS_X86_KERNELS
    __builtin_cpu_init();
    const int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
                     __builtin_cpu_supports("bmi2");
    if (level == 1 && avx2) return &kernel_avx2;
    if (level == 2 && avx2 && __builtin_cpu_supports("avx512f") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq"))
        return &kernel_avx512;
#endif
    return NULL;
}
