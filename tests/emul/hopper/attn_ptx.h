/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_ptx.h - the instructions of the attention kernels, for the CPU. Included before each of
 * them, behind ptx.h, in place of common.cuh, attn_ptx.cuh, attn_mla_tile_ptx.cuh and attn_mla_pair_ptx.cuh.
 */
#ifndef HOPPER_ATTN_PTX_H
#define HOPPER_ATTN_PTX_H
#define KVK_COMMON_CUH
#define KVK_ATTN_PTX_CUH
#define KVK_ATTN_MLA_TILE_PTX_CUH
#define KVK_ATTN_MLA_PAIR_PTX_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include "ptx.h"

#define __trap() hopper_fault("no trap")

static inline void *__cvta_shared_to_generic(uint32_t a)
{
	return hopper_shared() + a;
}

static inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t pick)
{
	const uint64_t all = a | (uint64_t)b << 32;
	uint32_t r = 0;

	for (int i = 0; i < 4; i++)
		r |= (uint32_t)(all >> (pick >> 4 * i & 7) * 8 & 0xff) << 8 * i;
	return r;
}

/* ------------------------------------------------------------------------------ barriers
 */

KVK_DEV uint32_t smem_addr(const void *p)
{
	return ptx_smem(p);
}

KVK_DEV void mbar_init(uint64_t *bar, uint32_t count)
{
	ptx_mbar_init(smem_addr(bar), count);
}

KVK_DEV void mbar_init_fence(void)
{
}

KVK_DEV void mbar_arrive(uint64_t *bar)
{
	ptx_mbar_arrive(smem_addr(bar));
}

KVK_DEV void mbar_arrive_expect(uint64_t *bar, uint32_t bytes)
{
	ptx_mbar_expect(smem_addr(bar), bytes);
}

KVK_DEV void mbar_wait(uint64_t *bar, uint32_t parity)
{
	ptx_mbar_wait(smem_addr(bar), parity);
}

KVK_DEV bool mbar_test(uint64_t *bar, uint32_t parity)
{
	return ptx_mbar_test(smem_addr(bar), parity);
}

KVK_DEV void bar_sync(int id, int nr_threads)
{
	hopper_barrier(id, nr_threads);
}

KVK_DEV bool bar_or(int id, int nr_threads, bool v)
{
	return hopper_barrier_or(id, nr_threads, v);
}

KVK_DEV void fence_proxy_async(void)
{
}

KVK_DEV void grid_wait(void)
{
}

KVK_DEV void grid_launch_next(void)
{
}

template <int N> KVK_DEV void regs_inc(void)
{
	static_assert(N % 8 == 0 && N <= 256, "no such number of registers");
}

template <int N> KVK_DEV void regs_dec(void)
{
	static_assert(N % 8 == 0 && N >= 24, "no such number of registers");
}

/* -------------------------------------------------------------------------------- memory
 */

KVK_DEV uint64_t policy_evict_first(void)
{
	return 0;
}

KVK_DEV void bulk_load(void *dst, const void *src, uint32_t bytes, uint64_t *bar,
		       uint64_t)
{
	ptx_bulk(smem_addr(dst), src, bytes, smem_addr(bar));
}

KVK_DEV uint4 lds128(uint32_t addr)
{
	return hopper_lds<uint4>(addr);
}

KVK_DEV uint2 lds64(uint32_t addr)
{
	return hopper_lds<uint2>(addr);
}

KVK_DEV uint32_t lds32(uint32_t addr)
{
	return hopper_lds<uint32_t>(addr);
}

KVK_DEV uint32_t ldg32(const void *p)
{
	HOPPER_CHECK((uintptr_t)p % 4 == 0);
	return *(const uint32_t *)p;
}

KVK_DEV uint32_t lds_acquire(const uint32_t *p)
{
	hopper_yield();
	return *p;
}

KVK_DEV void sts_release(uint32_t *p, uint32_t v)
{
	*p = v;
}

KVK_DEV uint32_t atoms_add_release(uint32_t *p, uint32_t v)
{
	return atomicAdd(p, v);
}

KVK_DEV uint32_t atoms_add_acq_rel(uint32_t *p, uint32_t v)
{
	return atomicAdd(p, v);
}

KVK_DEV void spin_until(const uint32_t *p, uint32_t more_than)
{
	while (lds_acquire(p) <= more_than)
		;
}

/* What other blocks may be writing: they may come between. */
template <class T> KVK_DEV void hopper_relaxed(const float *at, bool in, T &v)
{
	hopper_yield();
	HOPPER_CHECK((uintptr_t)at % sizeof(T) == 0 || !in);
	if (in)
		v = *(const T *)at;
}

KVK_DEV void ldg_relaxed2(const float *at, bool in, float2 &v)
{
	hopper_relaxed(at, in, v);
}

KVK_DEV void ldg_relaxed4(const float *at, bool in, float4 &v)
{
	hopper_relaxed(at, in, v);
}

KVK_DEV uint32_t ldg_acquire(const uint32_t *at)
{
	return ptx_ld_acquire(at);
}

KVK_DEV void stg_relaxed2(float *at, float2 v)
{
	HOPPER_CHECK((uintptr_t)at % sizeof(v) == 0);
	*(float2 *)at = v;
}

KVK_DEV void stg_relaxed4(float *at, float4 v)
{
	HOPPER_CHECK((uintptr_t)at % sizeof(v) == 0);
	*(float4 *)at = v;
}

/* ---------------------------------------------------------------------------- arithmetic
 */

KVK_DEV void e4m3x4_f16(uint32_t v, uint32_t &lo, uint32_t &hi)
{
	lo = arch_e4m3_f16(v);
	hi = arch_e4m3_f16(v >> 16);
}

KVK_DEV uint32_t pack_f16(float lo, float hi)
{
	return ptx_f16x2(lo, hi);
}

KVK_DEV uint32_t pack_bf16(float lo, float hi)
{
	return ptx_bf16x2(lo, hi);
}

KVK_DEV float2 unpack_f16(uint32_t v)
{
	return {hopper_half<false>(v), hopper_half<false>(v >> 16)};
}

KVK_DEV float2 unpack_bf16(uint32_t v)
{
	return {hopper_half<true>(v), hopper_half<true>(v >> 16)};
}

KVK_DEV float exp2_fast(float x)
{
	return arch_exp2(x);
}

template <bool BF16>
KVK_DEV void mma_16816(float *d, const uint32_t *a, uint32_t b0, uint32_t b1)
{
	float(&sum)[4] = *(float(*)[4])d;

	hopper_mma<BF16>(sum, *(const uint32_t(*)[4])a, b0, b1, sum);
}

/* Lane 4 g + c has row g, columns 2 c and 2 c + 1, and gets rows 2 c and 2 c + 1 of column g. */
KVK_DEV uint32_t movmatrix_trans(uint32_t v)
{
	const uint32_t g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;

	return hopper_exchange(v, [=](const uint32_t *all) {
		const uint32_t half = g % 2 * 16;

		return (all[8 * c + g / 2] >> half & 0xffffu) |
		       (all[8 * c + 4 + g / 2] >> half & 0xffffu) << 16;
	});
}

KVK_DEV void stmatrix4(uint32_t addr, const uint32_t *v)
{
	ptx_stmatrix(addr, v[0], v[1], v[2], v[3]);
}

/* Lane 8 i + r has the address of row r of matrix i; 4 g + c gets rows 2 c, 2 c + 1 of column g. */
KVK_DEV void ldmatrix4_trans(uint32_t addr, uint32_t (&w)[4])
{
	uint64_t *all = hopper_lanes();
	const uint32_t lane = threadIdx.x % 32;

	HOPPER_CHECK(addr % 16 == 0);
	all[lane * 16] = addr;
	hopper_warp_barrier();
	for (uint32_t i = 0; i < 8; i++)
		memcpy((uint16_t *)&w[i / 2] + i % 2,
		       hopper_shared() + all[(i / 2 * 8 + lane % 4 * 2 + i % 2) * 16] +
			       lane / 4 * 2,
		       2);
	hopper_warp_barrier();
}

/* ----------------------------------------------------- warpgroup products, 16-byte copies
 */

void hopper_product_turned(float *d, uint32_t n, const uint32_t (&a)[4], uint32_t b,
			   uint32_t block, bool bf16);

/* 16 bytes, or zeros; those of a thread that are not there yet arrive together, as one of @bar. */
void hopper_piece(uint32_t dst, const void *src);
void hopper_pieces_arrive(uint32_t bar);
void hopper_pieces_wait(void);

KVK_DEV void wg_fence(void)
{
	wgm_fence();
}

KVK_DEV void wg_commit(void)
{
	wgm_commit();
}

template <int N> KVK_DEV void wg_wait(void)
{
	wgm_wait<N>();
}

template <int N> KVK_DEV void wg_keep(float *)
{
}

/* An operand's address; its descriptor says: rows of 128 bytes, swizzled, groups of 8 in a row. */
KVK_DEV uint32_t wg_addr(uint64_t desc)
{
	HOPPER_CHECK(desc >> 62 == 1 && (desc >> 32 & 0x3fff) == 1024 >> 4);
	return (uint32_t)(desc & 0x3fff) << 4;
}

KVK_DEV void wgmma_scores(float *d, uint64_t a, uint64_t b, int use_d)
{
	hopper_product_bf16(d, 64, wg_addr(a), wg_addr(b), use_d);
}

KVK_DEV void wgmma_values(float *d, const uint32_t *a, uint64_t b)
{
	hopper_product_turned(d, 256, *(const uint32_t(*)[4])a, wg_addr(b),
			      (uint32_t)(b >> 16 & 0x3fff) << 4, true);
}

/* FP8 pages: descriptors are wgm_desc()'s, or one with the 64-byte swizzle. */
template <int N, int TRANS, bool F16>
KVK_DEV void wgm_rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int use_d)
{
	static_assert(N == 64 && F16, "one block of columns");
	if (!TRANS) {
		hopper_product(d, N, a, (uint32_t)(b & 0x3fff) << 4, use_d);
	} else {
		HOPPER_CHECK(use_d);
		hopper_product_turned(d, N, a, (uint32_t)(b & 0x3fff) << 4, 8192, false);
	}
}

KVK_DEV void wgm_rs_e4m3(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int use_d)
{
	hopper_product_e4m3(d, 64, a, (uint32_t)(b & 0x3fff) << 4, use_d);
}

KVK_DEV void wgm_ss_e4m3(float (&d)[32], uint64_t a, uint64_t b, int use_d)
{
	HOPPER_CHECK(b >> 62 == 0 || (b >> 62 == 2 && (b >> 32 & 0x3fff) == 512 >> 4));
	hopper_product_e4m3(d, 64, (uint32_t)(a & 0x3fff) << 4,
			    (uint32_t)(b & 0x3fff) << 4, use_d, b >> 62 == 2);
}

KVK_DEV void feed_prefetch(const uint8_t *src, uint32_t bytes)
{
	HOPPER_CHECK((uintptr_t)src % 16 == 0 && bytes % 16 == 0);
}

KVK_DEV void feed_copy(uint32_t dst, const uint8_t *src, bool in, uint64_t)
{
	hopper_piece(dst, in ? src : NULL);
}

KVK_DEV void feed_copied(uint64_t *bar)
{
	hopper_pieces_arrive(smem_addr(bar));
}

KVK_DEV void feed_wait(void)
{
	hopper_pieces_wait();
}

/* ----------------------------------------------------------------- the other of two blocks
 */

KVK_DEV void pair_arrive(void)
{
	hopper_cluster_arrive();
}

KVK_DEV void pair_wait(void)
{
	hopper_cluster_wait();
}

/* Addresses are offsets, the same in both. */
KVK_DEV uint32_t pair_addr(uint32_t addr)
{
	return addr;
}

template <class T> KVK_DEV T hopper_pair_read(uint32_t addr)
{
	HOPPER_CHECK(addr % sizeof(T) == 0);
	return *(const T *)(hopper_cluster_shared(blockIdx.x % 2 ^ 1) + addr);
}

KVK_DEV float4 pair_read4(uint32_t addr)
{
	return hopper_pair_read<float4>(addr);
}

KVK_DEV float2 pair_read2(uint32_t addr)
{
	return hopper_pair_read<float2>(addr);
}

KVK_DEV uint32_t pair_rank(void)
{
	return 0;
}

#endif /* HOPPER_ATTN_PTX_H */
