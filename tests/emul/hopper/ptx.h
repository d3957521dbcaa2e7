/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ptx.h - the instructions that the kernels are made of, for the CPU. Included before each
 * kernel file in place of arch.cuh, moe_ptx.cuh, moe_step_ptx.cuh, tile_ptx.cuh, sample_ptx.cuh, wgmma.cuh and moe_wgmma.cuh, whose
 * guards it takes.
 *
 * An mbarrier is its eight bytes in shared memory. A bulk copy completes at some later time,
 * in any order (machine.cc); cp.async when it is waited for (groups.h). A matrix product is made of exact products,
 * summed in double and rounded once.
 */
#ifndef HOPPER_PTX_H
#define HOPPER_PTX_H
#define KVK_ARCH_CUH
#define KVK_MOE_PTX_CUH
#define KVK_MOE_STEP_PTX_CUH
#define KVK_TILE_PTX_CUH
#define KVK_SAMPLE_PTX_CUH
#define KVK_WGMMA_CUH
#define KVK_MOE_WGMMA_CUH

#include <cuda_runtime.h>
#include "kernels/dev.cuh"
#include "kernels/fp8.h"

#define SM90_ASM(...)	   ((void)0)
#define GRID_ASM(...)	   ((void)0)

#define HOPPER_CHECK(what) ((what) ? (void)0 : hopper_fault(#what))
void hopper_fault(const char *what); /* a device would not have done it */

static inline float arch_exp2(float x)
{
	const float e = exp2f(x);

	return e < 0x1p-126f ? 0.0f : e;
}

static inline uint32_t arch_e4m3_f16(uint32_t two)
{
	return kvk_f32_to_f16(kvk_e4m3_decode((uint8_t)two)) |
	       (uint32_t)kvk_f32_to_f16(kvk_e4m3_decode((uint8_t)(two >> 8))) << 16;
}

static inline uint32_t arch_f32_e4m3(float lo, float hi)
{
	return kvk_e4m3_encode(lo) | (uint32_t)kvk_e4m3_encode(hi) << 8;
}

static inline uint32_t ptx_smem(const void *p)
{
	return (uint32_t)((const uint8_t *)p - hopper_shared());
}

/* ------------------------------------------------------------------------------ barriers
 */

struct hopper_mbar {
	uint16_t count;	  /* arrivals of a phase */
	uint16_t pending; /* of them, that are still to come */
	int32_t bytes;	  /* announced and not there; bit 0: the phase */
};

static inline void hopper_mbar_step(struct hopper_mbar *b, uint32_t arrivals,
				    int32_t bytes)
{
	HOPPER_CHECK(b->pending >= arrivals);
	b->pending = (uint16_t)(b->pending - arrivals);
	b->bytes += 2 * bytes;
	if (b->pending || b->bytes >> 1)
		return;
	b->pending = b->count;
	b->bytes ^= 1;
}

static inline struct hopper_mbar *hopper_mbar_at(uint32_t bar)
{
	HOPPER_CHECK(bar % 8 == 0);
	return (struct hopper_mbar *)(hopper_shared() + bar);
}

static inline void ptx_mbar_init(uint32_t bar, uint32_t count)
{
	*hopper_mbar_at(bar) = {(uint16_t)count, (uint16_t)count, 0};
}

static inline void ptx_mbar_arrive(uint32_t bar)
{
	hopper_mbar_step(hopper_mbar_at(bar), 1, 0);
}

static inline void ptx_mbar_expect(uint32_t bar, uint32_t bytes)
{
	hopper_mbar_step(hopper_mbar_at(bar), 1, (int32_t)bytes);
}

static inline bool ptx_mbar_test(uint32_t bar, uint32_t parity)
{
	hopper_yield();
	return (uint32_t)(hopper_mbar_at(bar)->bytes & 1) != parity;
}

static inline void ptx_mbar_wait(uint32_t bar, uint32_t parity)
{
	while ((uint32_t)(hopper_mbar_at(bar)->bytes & 1) == parity)
		hopper_yield();
}

static inline void ptx_bar_sync(uint32_t id, uint32_t nr_threads)
{
	hopper_barrier(id, nr_threads);
}

static inline void ptx_bar_arrive(uint32_t id, uint32_t nr_threads)
{
	hopper_arrive(id, nr_threads);
}

static inline uint32_t ptx_ld_acquire(const uint32_t *p)
{
	hopper_yield();
	return *p;
}

static inline void ptx_red_release(uint32_t *p, uint32_t v)
{
	*p += v;
}

static inline uint64_t ptx_ld_acquire64(const uint64_t *p)
{
	hopper_yield();
	return *p;
}

static inline void ptx_red_release64(uint64_t *p, uint64_t v)
{
	*p += v;
}

static inline void ptx_fence_async(void)
{
}

static inline void ptx_grid_wait(void)
{
}

static inline void ptx_grid_launch(void)
{
}

/* -------------------------------------------------------------------------------- copies
 */

void hopper_copy(uint32_t dst, const void *src, uint32_t bytes, uint32_t bar);

static inline uint64_t ptx_policy_stream(void)
{
	return 0;
}

static inline void ptx_bulk(uint32_t dst, const void *src, uint32_t bytes, uint32_t bar)
{
	HOPPER_CHECK(bytes && bytes % 16 == 0 && dst % 16 == 0 &&
		     (uintptr_t)src % 16 == 0);
	hopper_copy(dst, src, bytes, bar);
}

static inline void ptx_bulk_stream(uint32_t dst, const void *src, uint32_t bytes,
				   uint32_t bar, uint64_t)
{
	ptx_bulk(dst, src, bytes, bar);
}

#include "groups.h"

static inline void tile_copy16(void *dst, const void *src, uint32_t bytes)
{
	HOPPER_CHECK((uintptr_t)dst % 16 == 0 && (uintptr_t)src % 16 == 0);
	memset(dst, 0, 16);
	memcpy(dst, src, bytes);
}

static inline void tile_commit(void)
{
}

static inline void tile_fence_async(void)
{
}

template <int N> static inline void tile_wait_all_but(void)
{
}

/* not for two NaN: +NaN or -NaN, a device has one */
static inline uint32_t tile_max_bf16x2(uint32_t a, uint32_t b)
{
	uint32_t d = 0;

	for (int i = 0; i < 32; i += 16) {
		const uint32_t x = a >> i & 0xffffu, y = b >> i & 0xffffu;
		const float f = kvk_bf16_to_f32((uint16_t)x),
			    g = kvk_bf16_to_f32((uint16_t)y);

		d |= (g > f || f != f ? y : x) << i;
	}
	return d;
}

static inline void tile_cluster_sync(void)
{
	hopper_cluster_barrier();
}

static inline void tile_cluster_leave(void)
{
	hopper_cluster_barrier();
}

static inline void tile_cluster_arrive(void)
{
	hopper_cluster_arrive();
}

static inline void sample_cluster_arrive(void)
{
	hopper_cluster_arrive();
}

static inline void sample_cluster_fence(void)
{
}

static inline void tile_cluster_wait(void)
{
	hopper_cluster_wait();
}

static inline uint32_t tile_cluster_get32(const void *p, uint32_t rank)
{
	return *(const uint32_t *)(hopper_cluster_shared(rank) + ptx_smem(p));
}

static inline uint64_t tile_cluster_get64(const void *p, uint32_t rank)
{
	return *(const uint64_t *)(hopper_cluster_shared(rank) + ptx_smem(p));
}

static inline void tile_cluster_put(const void *to, uint32_t rank, uint4 v)
{
	memcpy(hopper_cluster_shared(rank) + ptx_smem(to), &v, sizeof(v));
}

static inline float4 tile_cluster_get(const float4 *p, uint32_t rank)
{
	return *(const float4 *)(hopper_cluster_shared(rank) + ptx_smem(p));
}

template <class T> static inline T hopper_lds(uint32_t a)
{
	T v;

	HOPPER_CHECK(a % sizeof(T) == 0);
	memcpy(&v, hopper_shared() + a, sizeof(v));
	return v;
}

static inline uint4 ptx_lds128(uint32_t a)
{
	return hopper_lds<uint4>(a);
}

static inline uint2 ptx_lds64(uint32_t a)
{
	return hopper_lds<uint2>(a);
}

static inline float ptx_lds32(uint32_t a)
{
	return hopper_lds<float>(a);
}

static inline void ptx_sts32(uint32_t a, float v)
{
	HOPPER_CHECK(a % 4 == 0);
	memcpy(hopper_shared() + a, &v, sizeof(v));
}

static inline void step_sts64(uint32_t a, uint32_t lo, uint32_t hi)
{
	const uint32_t v[2] = {lo, hi};

	HOPPER_CHECK(a % 8 == 0);
	memcpy(hopper_shared() + a, v, sizeof(v));
}

static inline uint4 step_packets(const uint4 *from)
{
	HOPPER_CHECK((uintptr_t)from % 16 == 0);
	hopper_yield();
	return *from;
}

static inline void step_send(uint64_t *to, uint32_t two, uint32_t tag)
{
	*to = two | (uint64_t)tag << 32;
}

/* Lane l's address is row l % 8 of matrix l / 8. */
static inline void ptx_stmatrix(uint32_t a, uint32_t m0, uint32_t m1, uint32_t m2,
				uint32_t m3)
{
	uint64_t *all = hopper_lanes();
	const unsigned lane = threadIdx.x % 32;
	const uint32_t m[4] = {m0, m1, m2, m3};

	HOPPER_CHECK(a % 16 == 0);
	all[lane * 16] = a;
	hopper_warp_barrier();
	for (unsigned i = 0; i < 4; i++)
		memcpy(hopper_shared() + all[(i * 8 + lane / 4) * 16] + lane % 4 * 4,
		       &m[i], 4);
	hopper_warp_barrier();
}

/* Matrix i's column c goes to where lane 8 i + c says. */
static inline void hopper_turned(uint32_t a, const uint32_t *m, unsigned nr)
{
	uint64_t *all = hopper_lanes();
	const unsigned lane = threadIdx.x % 32;

	HOPPER_CHECK(a % 16 == 0);
	all[lane * 16] = a;
	hopper_warp_barrier();
	for (unsigned i = 0; i < 2 * nr; i++)
		memcpy(hopper_shared() + all[(i / 2 * 8 + lane % 4 * 2 + i % 2) * 16] +
			       lane / 4 * 2,
		       (const uint8_t *)&m[i / 2] + i % 2 * 2, 2);
	hopper_warp_barrier();
}

static inline void ptx_stmatrix_turned(uint32_t a, uint32_t m0, uint32_t m1, uint32_t m2,
				       uint32_t m3)
{
	const uint32_t m[4] = {m0, m1, m2, m3};

	hopper_turned(a, m, 4);
}

static inline void ptx_stmatrix2_turned(uint32_t a, uint32_t m0, uint32_t m1)
{
	const uint32_t m[2] = {m0, m1};

	hopper_turned(a, m, 2);
}

/* --------------------------------------------------------------------------- arithmetic
 */

template <bool BF16> static inline float hopper_half(uint32_t bits)
{
	return BF16 ? kvk_bf16_to_f32((uint16_t)bits) : kvk_f16_to_f32((uint16_t)bits);
}

template <bool BF16> static inline uint32_t hopper_round(float v)
{
	return BF16 ? kvk_f32_to_bf16(v) : kvk_f32_to_f16(v);
}

template <bool BF16> static inline uint32_t hopper_fma(uint32_t a, uint32_t b, uint32_t c)
{
	uint32_t d = 0;

	for (int i = 0; i < 32; i += 16)
		d |= hopper_round<BF16>(fmaf(hopper_half<BF16>(a >> i),
					     hopper_half<BF16>(b >> i),
					     hopper_half<BF16>(c >> i)))
		     << i;
	return d;
}

static inline uint32_t ptx_redux_max(uint32_t v)
{
	for (unsigned i = 1; i < 32; i *= 2) {
		const uint32_t o = __shfl_xor_sync(~0u, v, i);

		v = o > v ? o : v;
	}
	return v;
}

static inline uint32_t ptx_fma_bf16x2(uint32_t a, uint32_t b, uint32_t c)
{
	return hopper_fma<true>(a, b, c);
}

static inline uint32_t ptx_fma_f16x2(uint32_t a, uint32_t b, uint32_t c)
{
	return hopper_fma<false>(a, b, c);
}

static inline uint32_t ptx_mul_f16x2(uint32_t a, uint32_t b)
{
	return hopper_fma<false>(a, b, 0x80008000u);
}

static inline uint32_t ptx_max_u16x2(uint32_t a, uint32_t b)
{
	const uint32_t lo = max(a & 0xffffu, b & 0xffffu), hi = max(a >> 16, b >> 16);

	return hi << 16 | lo;
}

template <bool HIGH> static inline uint32_t ptx_mul_f16x2_half(uint32_t a, uint32_t two)
{
	return ptx_mul_f16x2(a,
			     HIGH ? (two >> 16) * 0x10001u : (two & 0xffffu) * 0x10001u);
}

static inline float ptx_f16_f32(uint32_t bits)
{
	return hopper_half<false>(bits);
}

static inline uint32_t ptx_and_or(uint32_t a, uint32_t mask, uint32_t magic)
{
	return (a & mask) | magic;
}

static inline uint32_t ptx_f16x2(float lo, float hi)
{
	return hopper_round<false>(lo) | hopper_round<false>(hi) << 16;
}

static inline uint32_t ptx_bf16x2(float lo, float hi)
{
	return hopper_round<true>(lo) | hopper_round<true>(hi) << 16;
}

/* m16n8k16: lane 4 g + t has rows g and g + 8 of a, column g of b, rows g and g + 8 of c. */
template <bool BF16>
static inline void hopper_mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
			      uint32_t b1, const float (&c)[4])
{
	const unsigned lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
	uint32_t(*all)[32] = (uint32_t(*)[32])hopper_lanes();
	float r[4];

	memcpy(all[lane], a, sizeof(a));
	all[lane][4] = b0;
	all[lane][5] = b1;
	hopper_warp_barrier();
	for (unsigned i = 0; i < 4; i++) {
		const unsigned col = 2 * t + i % 2;
		double sum = c[i];

		for (unsigned k = 0; k < 16; k++) {
			const unsigned quad = k % 8 / 2, half = k % 2 * 16;

			sum += (double)hopper_half<BF16>(
				       all[4 * g + quad][k / 8 * 2 + i / 2] >> half) *
			       hopper_half<BF16>(all[4 * col + quad][4 + k / 8] >> half);
		}
		r[i] = (float)sum;
	}
	hopper_warp_barrier();
	memcpy(d, r, sizeof(r));
}

static inline void ptx_mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
				uint32_t b1, const float (&c)[4])
{
	hopper_mma<true>(d, a, b0, b1, c);
}

static inline void ptx_mma_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
			       uint32_t b1, const float (&c)[4])
{
	hopper_mma<false>(d, a, b0, b1, c);
}

template <bool BF16>
static inline void tile_mma16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
			      uint32_t b1)
{
	hopper_mma<BF16>(d, a, b0, b1, d);
}

/* ------------------------------------------------------------------- warpgroup products
 */

void hopper_tensor_copy(uint32_t dst, const void *map, uint32_t bar, uint32_t nr_dims,
			const int (&at)[5]);

static inline void tma_load_4d(uint32_t dst, const void *map, uint32_t bar, int c0,
			       int c1, int c2, int c3)
{
	hopper_tensor_copy(dst, map, bar, 4, {c0, c1, c2, c3, 0});
}

static inline void tma_load_5d(uint32_t dst, const void *map, uint32_t bar,
			       const int (&c)[5], uint64_t)
{
	hopper_tensor_copy(dst, map, bar, 5, c);
}

/* A warp's rows of a product; done when a wait asks for it, not before. */
void hopper_product(float *d, uint32_t n, const uint32_t (&a)[4], uint32_t b, int use_d);
void hopper_product_commit(void);
void hopper_product_wait(uint32_t but_latest);

template <int N>
static inline void moe_wgmma(float *d, const uint32_t (&a)[4], uint64_t b, int use_d)
{
	hopper_product(d, N, a, (uint32_t)b << 4, use_d);
}

static inline void tile_wgmma8(float *d, const uint32_t (&a)[4], uint64_t b, int use_d)
{
	hopper_product(d, 8, a, (uint32_t)b << 4, use_d);
}

/* e4m3, both in shared memory: a's rows are the warpgroup's 64; @narrow: b's have 64 bytes */
void hopper_product_e4m3(float *d, uint32_t n, uint32_t a, uint32_t b, int use_d,
			 bool narrow = false);
void hopper_product_e4m3(float *d, uint32_t n, const uint32_t (&a)[4], uint32_t b,
			 int use_d);

template <int N>
static inline void moe_wgmma_e4m3(float *d, uint64_t a, uint64_t b, int use_d)
{
	hopper_product_e4m3(d, N, (uint32_t)a << 4, (uint32_t)b << 4, use_d);
}

/* bf16, the same */
void hopper_product_bf16(float *d, uint32_t n, uint32_t a, uint32_t b, int use_d);

template <int N>
static inline void wgm_ss_few(float (&d)[N / 2], uint64_t a, uint64_t b, int use_d)
{
	hopper_product_bf16(d, N, (uint32_t)a << 4, (uint32_t)b << 4, use_d);
}

static inline void wgm_fence(void)
{
	hopper_warp_barrier();
}

static inline void wgm_commit(void)
{
	hopper_product_commit();
}

template <int N> static inline void wgm_wait(void)
{
	hopper_product_wait(N);
}

template <int N> static inline void wgm_keep(float (&)[N])
{
}

static inline uint64_t wgm_desc(uint32_t addr)
{
	HOPPER_CHECK(addr % 1024 == 0);
	return addr >> 4;
}

static inline uint64_t wgm_desc_rows(uint32_t addr, uint32_t apart)
{
	HOPPER_CHECK(addr % 1024 == 0 && apart % 1024 == 0 && apart < 1 << 18);
	return addr >> 4 | (uint64_t)(apart >> 4) << 32;
}

static inline uint64_t wgm_desc_at(uint64_t desc, uint32_t units)
{
	return desc + units;
}

#endif /* HOPPER_PTX_H */
