/* SPDX-License-Identifier: Apache-2.0 */
/* util.h - small things every directory needs. */
#ifndef BASE_UTIL_H
#define BASE_UTIL_H

#include <stddef.h>
#include <stdint.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int8_t s8;
typedef int16_t s16;
typedef int32_t s32;
typedef int64_t s64;

#define KV_ARRAY_SIZE(a) (sizeof(a) / sizeof((a)[0]))
#define KV_MIN(a, b)	 ((a) < (b) ? (a) : (b))
#define KV_MAX(a, b)	 ((a) > (b) ? (a) : (b))

#define kv_container_of(ptr, type, member)                                               \
	((type *)((char *)(ptr) - offsetof(type, member)))

static inline u64 kv_div_round_up(u64 a, u64 b)
{
	return (a + b - 1) / b;
}

/* @align: a power of two */
static inline u64 kv_round_up(u64 a, u64 align)
{
	return (a + align - 1) & ~(align - 1);
}

static inline int kv_is_pow2(u64 a)
{
	return a && !(a & (a - 1));
}

#endif
