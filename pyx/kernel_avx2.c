/* kernel_avx2.c - the kernel for x86-64 with AVX2; empty elsewhere. */
#include "layout.h"
#if HAS_X86_KERNELS
#include <immintrin.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,bmi,bmi2"))), apply_to = function)
#else
#pragma GCC target("avx2,bmi,bmi2")
#endif
#define SIMD 2
#define KERNEL kernel_avx2
#include "kernel.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
