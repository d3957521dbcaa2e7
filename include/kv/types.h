/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kv/types.h - fixed-width integers and the macros that pin the ABI.
 *
 * Everything in include/kv is shared between the daemon, the client library, the kernels
 * and CUDA device code. It compiles as C11, as C++17 and with nvcc, includes only
 * <stdint.h> and <stddef.h>, and holds plain integers: ordering lives in the accessors of
 * kv/ring.h and kv/session.h, which are host only.
 */
#ifndef KV_TYPES_H
#define KV_TYPES_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
#define KV_STATIC_ASSERT(cond, msg) static_assert(cond, msg)
#else
#define KV_STATIC_ASSERT(cond, msg) _Static_assert(cond, msg)
#endif

/* One KV_ABI_SIZE per struct, one KV_ABI_FIELD (offset, size) per field. */
#define KV_ABI_SIZE(type, size)                                                          \
	KV_STATIC_ASSERT(sizeof(struct type) == (size), "ABI: size of " #type)
#define KV_ABI_FIELD(type, field, offset, size)                                          \
	KV_STATIC_ASSERT(offsetof(struct type, field) == (offset) &&                     \
				 sizeof(((struct type *)0)->field) == (size),            \
			 "ABI: " #type "." #field)

#if defined(__CUDACC__)
#define KV_HD __host__ __device__
#else
#define KV_HD
#endif

/* A function defined in a header: host and device. */
#define KV_INLINE static inline KV_HD

#define KV_CACHE_LINE 64u

#endif /* KV_TYPES_H */
