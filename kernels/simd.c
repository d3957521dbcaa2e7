/* SPDX-License-Identifier: Apache-2.0 */
/*
 * simd.c - simd_impl.h for each instruction set, and the choice at run time.
 *
 * Written with the vector extensions that gcc and clang share. No state; any thread.
 */
#include <stdbool.h>
#include "simd.h"
#include "fp8.h"

/* Vectors never cross a function call here: helpers are always inlined. */
#pragma GCC diagnostic ignored "-Wpsabi"

typedef float vf __attribute__((vector_size(64)));
typedef s32 vi __attribute__((vector_size(64)));
typedef u32 vu __attribute__((vector_size(64)));

#ifdef __clang__
#define KVK_UNROLL _Pragma("unroll")
#else
#define KVK_UNROLL _Pragma("GCC unroll 16")
#endif

#define KVK_T(name) name##_base
#define KVK_TARGET
#define KVK_BLOCK  2
#define KVK_NATIVE 4
#define KVK_NAME   "base"
#include "simd_impl.h"

#ifdef __x86_64__
#define KVK_T(name) name##_avx2
#define KVK_TARGET  __attribute__((target("avx2,fma")))
#define KVK_BLOCK   2
#define KVK_NATIVE  8
#define KVK_NAME    "avx2"
#include "simd_impl.h"

#define KVK_T(name) name##_avx512
#define KVK_TARGET  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#define KVK_BLOCK   4
#define KVK_NATIVE  16
#define KVK_NAME    "avx512"
#include "simd_impl.h"
#endif

const struct kvk_simd *kvk_simd_at(u32 index)
{
	if (index == 0)
		return &simd_base;
#ifdef __x86_64__
	if (index == 1 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
		return &simd_avx2;
	if (index == 2 && __builtin_cpu_supports("avx512f") &&
	    __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
	    __builtin_cpu_supports("avx512vl"))
		return &simd_avx512;
#endif
	return NULL;
}

const struct kvk_simd *kvk_simd_get(void)
{
	const struct kvk_simd *s = kvk_simd_at(2);

	if (!s)
		s = kvk_simd_at(1);
	return s ? s : kvk_simd_at(0);
}
