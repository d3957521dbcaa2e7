/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dev.cuh - the rules of ref.h for CUDA kernels: who may touch pages, and where they are.
 *
 * Every page-touching kernel asks dev_request_ok() before its first access to a page of a
 * request (design 5, P5) and turns a row into an address with dev_page() only. Nothing
 * here needs more than sm_80.
 */
#ifndef KVK_DEV_CUH
#define KVK_DEV_CUH

#include <cuda_runtime.h>
#include <errno.h>
#include "base/mutant.h"
#include "base/util.h"
#include "kernels/fp8.h"
#include "kernels/kernels.h"

#define KVK_DEV		  static __device__ __forceinline__

/* Safety rules that a test build takes out: on both sides by their name, so that a whole
 * engine can run without; on the device alone by cuda_name, so that the reference judges. */
#define DEV_MUTANT(name)  (KV_MUTANT(name) || KV_MUTANT(cuda_##name))
#define DEV_NO_VERDICT	  0x01u
#define DEV_NO_WRITE_FLAG 0x02u
#define DEV_NO_ROW_RANGE  0x04u

#ifdef __CUDACC__
#define DEV_LAUNCH(kernel, grid, block, stream, args) \
	kernel<<<(grid), (block), 0, (cudaStream_t)(stream)>>>(args)
#define DEV_LAUNCH_SHARED(kernel, grid, block, bytes, stream, args) \
	kernel<<<(grid), (block), (bytes), (cudaStream_t)(stream)>>>(args)
/* A kernel that may begin before the one in front of it in the stream has ended: it must
 * call ptx_grid_wait() (dev_grid_wait()) before it touches what that one reads or writes. */
#define DEV_LAUNCH_EARLY(kernel, grid, block, stream, ...) \
	dev_launch_early(kernel, grid, block, stream, __VA_ARGS__)
#define DEV_SHARED(type, name)	    __shared__ type name
#define DEV_DYNAMIC_SHARED(name)    extern __shared__ __align__(16) u8 name[]
/* for swizzled boxes of tensor copies */
#define DEV_DYNAMIC_SHARED_1K(name) extern __shared__ __align__(1024) u8 name[]
#endif

#ifdef __CUDACC__
template <class K, class... A>
static inline void dev_launch_early(K kernel, dim3 grid, dim3 block, kvk_stream stream,
				    const A &...args)
{
	cudaLaunchAttribute attr[1] = {};
	cudaLaunchConfig_t cfg = {};

	attr[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
	attr[0].val.programmaticStreamSerializationAllowed = 1;
	cfg.gridDim = grid;
	cfg.blockDim = block;
	cfg.stream = (cudaStream_t)stream;
	cfg.attrs = attr;
	cfg.numAttrs = 1;
	(void)cudaLaunchKernelEx(&cfg, kernel, args...); /* dev_launched() tells */
}
#endif

/* For kernels of DEV_LAUNCH_EARLY(): let the next one begin; wait for the one in front. */
KVK_DEV void dev_grid_launch(void)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
	asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

KVK_DEV void dev_grid_wait(void)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
	asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* 0, or -EIO when the launch before it failed. */
static inline int dev_launched(void)
{
	return cudaGetLastError() == cudaSuccess ? 0 : -EIO;
}

/* In batch_ref.c: reads the host side of the pages only. */
extern "C" int kvk_pages_check(const struct kvk_pages *p);

/* The host side of a batch; its arrays are in device memory and cannot be looked at. */
static inline int dev_batch_check(const struct kvk_batch *b, bool need_tokens)
{
	if (!b->nr_requests)
		return b->nr_tokens ? -EINVAL : 0;
	if (!b->rows || !b->row_start || !b->verdicts || !b->step)
		return -EINVAL;
	return need_tokens && (!b->lengths || !b->q_start) ? -EINVAL : 0;
}

static inline bool dev_aligned(const void *p, size_t bytes)
{
	return (uintptr_t)p % bytes == 0;
}

/* May whole pages be moved in pieces of 16 bytes? */
static inline bool dev_pages_aligned(const struct kvk_pages *p)
{
	return dev_aligned(p->base, 16) && p->geometry.extent_bytes % 16 == 0 &&
	       p->geometry.stride_bytes % 16 == 0;
}

/* ------------------------------------------------------------------------------ requests
 */

/**
 * dev_request_ok() - may this request's pages be touched?
 * @b: batch
 * @r: request
 * @off: DEV_NO_*
 *
 * As kvk_request_ok(), but for the range of the rows: dev_page() looks at the one row
 * that becomes an address.
 */
KVK_DEV bool dev_request_ok(const struct kvk_batch &b, u32 r, u32 off)
{
	/* all loads first: they are on their way together */
	const u32 first = b.row_start[r], end = b.row_start[r + 1];
	const u32 length = b.lengths ? b.lengths[r] : 0, nr_rows = end - first;
	const struct kv_verdict v = b.verdicts[r];
	const bool passed = kv_verdict_ok(v, *b.step, nr_rows);

	return end >= first && (passed || (off & DEV_NO_VERDICT)) &&
	       length <= (u64)nr_rows * KV_PAGE_TOKENS;
}

/* Start of the page of a row; NULL: the row is outside the pool. */
KVK_DEV u8 *dev_page(const struct kvk_pages &p, const struct kv_row &row, u32 off)
{
	if (row.pfn >= p.geometry.nr_pages && !(off & DEV_NO_ROW_RANGE))
		return NULL;
	return (u8 *)p.base + kv_page_offset(&p.geometry, row.pfn);
}

/* The request of flat token @t, by all lanes of a warp: those that end before it. */
KVK_DEV u32 dev_request_of(const struct kvk_batch &b, u32 t)
{
	u32 nr = 0;

	for (u32 i = 0; i < b.nr_requests; i += 256) {
		u32 end[8];

#pragma unroll
		for (u32 k = 0; k < 8; k++) {
			u32 r = i + k * 32 + threadIdx.x % 32;

			end[k] = r < b.nr_requests ? b.q_start[r + 1] : ~0u;
		}
#pragma unroll
		for (u32 k = 0; k < 8; k++)
			nr += (u32)__popc(__ballot_sync(~0u, end[k] <= t));
	}
	return nr;
}

/* -------------------------------------------------------------------- activations, warps
 */

KVK_DEV float dev_act_get(u32 dtype, const void *p, size_t i)
{
	return dtype == KVK_F32 ? ((const float *)p)[i]
				: kvk_bf16_to_f32(((const u16 *)p)[i]);
}

KVK_DEV u32 dev_warp_max(u32 v)
{
	for (int o = 16; o; o >>= 1) {
		u32 w = __shfl_xor_sync(~0u, v, o);

		v = w > v ? w : v;
	}
	return v;
}

template <class T> KVK_DEV T dev_warp_sum(T v)
{
	for (int o = 16; o; o >>= 1)
		v += __shfl_xor_sync(~0u, v, o);
	return v;
}

#endif /* KVK_DEV_CUH */
