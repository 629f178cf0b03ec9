/* kernel_avx512.c - the kernel for x86-64 with AVX-512; empty elsewhere. */
#include "layout.h"
#if HAS_X86_KERNELS
#include <immintrin.h>
#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512vl,avx512bw,avx512dq,avx2,bmi,bmi2"))), \
    apply_to = function)
#else
#pragma GCC target("avx512f,avx512vl,avx512bw,avx512dq,avx2,bmi,bmi2")
#endif
#define SIMD 3
#define KERNEL kernel_avx512
#include "kernel.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
