/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_int4_use.cuh - the consumer warps of moe_int4.cuh: a unit's results, and the kernel.
 */
#ifndef KVK_MOE_INT4_USE_CUH
#define KVK_MOE_INT4_USE_CUH

#include "moe_int4_mma.cuh"

/* ------------------------------------------------------------------------------- results
 */

/* Largest bits over the eight lanes that share a token. */
__device__ __forceinline__ uint32_t octet_max(uint32_t v)
{
#pragma unroll
	for (int i = 4; i < 32; i *= 2)
		v = max(v, __shfl_xor_sync(~0u, v, i));
	return v;
}

/* h as f16: a unit is the 128 columns that share a scale. */
template <int NT>
__device__ __forceinline__ void store_h16(const struct moe_i4 &a, float (&acc)[2][NT][4],
					  const struct moe_unit &u, const uint32_t *slot,
					  uint32_t *amax)
{
	const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4,
		       t = lane % 4;
	const uint32_t row_bytes = a.w2.kbricks * MOE_H_BRICK;
	const bool mine = u.rb * MOE_GROUP + warp < a.w13.mtiles;
	uint8_t *h = a.h + u.rb * MOE_H_BRICK;

#pragma unroll
	for (int i = 0; i < 2 * NT && mine; i++) {
		const int nt = i / 2, c = i % 2;
		uint32_t token = nt * 8 + 2 * t + c, top;

		acc[0][nt][c] = swiglu(acc[0][nt][c], acc[0][nt][c + 2]);
		acc[1][nt][c] = swiglu(acc[1][nt][c], acc[1][nt][c + 2]);
		top = octet_max(max(__float_as_uint(acc[0][nt][c]) & 0x7fffffffu,
				    __float_as_uint(acc[1][nt][c]) & 0x7fffffffu));
		if (g == 0 && token < u.n)
			atomicMax(&amax[token], top);
	}
	ptx_bar_sync(1, MOE_GROUP * 32);
#pragma unroll
	for (int i = 0; i < 2 * NT && mine; i++) {
		const int nt = i / 2, c = i % 2;
		uint32_t token = nt * 8 + 2 * t + c;
		float inv;

		if (token >= u.n)
			continue;
		uint8_t *row = h + (uint64_t)slot[token] * row_bytes;
		uint16_t *col = (uint16_t *)row + warp * 16 + g;

		inv = h_scale(amax[token]);
		if (warp == 0 && g == 0) /* all that is copied, so also what pads it */
			*(uint4 *)(row + 256) =
				make_uint4(__float_as_uint(h_back(inv)), 0, 0, 0);
		inv *= g & 2 ? MOE_H_HIGH : 1.0f;
		col[0] = (uint16_t)ptx_f16x2(acc[0][nt][c] * inv, 0.0f);
		col[8] = (uint16_t)ptx_f16x2(acc[1][nt][c] * inv, 0.0f);
	}
}

/* h as f32 and the slot's largest value: a unit is 16 WM columns. */
template <int NT, int WK>
__device__ __forceinline__ void store_h32(const struct moe_i4 &a,
					  const float (&acc)[2][NT][4],
					  const struct moe_unit &u, const uint32_t *slot)
{
	const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4,
		       t = lane % 4;
	const uint32_t mtile = u.rb * (MOE_GROUP / WK) + warp / WK;
	float *h = (float *)a.h + mtile * 16 + g;

	if (mtile >= a.w13.mtiles)
		return;
#pragma unroll
	for (int i = 0; i < 4 * NT; i++) {
		const int m = i / (2 * NT), nt = i / 2 % NT, c = i % 2;
		uint32_t token = nt * 8 + 2 * t + c, top;
		float v;

		if (i % WK != warp % WK)
			continue;
		v = swiglu(acc[m][nt][c], acc[m][nt][c + 2]);
		top = octet_max(__float_as_uint(v) & 0x7fffffffu);
		if (token >= u.n)
			continue;
		h[(uint64_t)slot[token] * a.inter + m * 8] = v;
		if (g == 0)
			atomicMax(&a.amax[slot[token]], top);
	}
}

/* The power of two for a warp's results of 32 rows, all tokens alike: one reduction instead of three
 * shuffles a token, and f16 has room for tokens that differ by 2^14. Inf and NaN do not count, so
 * such a token does not disturb the others; nor do columns without a token, which hold anything. */
template <int NT, int P>
__device__ __forceinline__ float out_scale(const float (&acc)[2][NT][4], uint32_t n)
{
	const uint32_t first = threadIdx.x % 4 * 2 % (8 / P);
	uint32_t top = 0;

#pragma unroll
	for (int i = 0; i < 2 * NT; i++) {
		const int nt = i / 2, c = i % 2;
		const float v =
			fmaxf(fmaxf(fabsf(acc[0][nt][c]), fabsf(acc[0][nt][c + 2])),
			      fmaxf(fabsf(acc[1][nt][c]), fabsf(acc[1][nt][c + 2])));
		const uint32_t bits = __float_as_uint(v);

		if (nt * 8u + first + c < n && bits < 0x7f800000u)
			top = max(top, bits);
	}
	return h_scale(ptx_redux_max(top));
}

/* Results of a slot: f16 with a power of two per 32 rows, half the bytes of f32 there and back.
 * Lane g's rows g, g + 8, g + 16, g + 24 of a tile are neighbours. */
template <int NT, int P, enum moe_mode MODE>
__device__ __forceinline__ void
store_out(const struct moe_i4 &a, const float (&acc)[2][NT][4], uint32_t rb, uint32_t n,
	  const uint32_t *slot, const float *inv)
{
	const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
	const uint32_t mtile = rb * MOE_GROUP + threadIdx.x / 32 % MOE_GROUP;
	uint16_t *out = a.out + mtile * 32 + g * 4;
	float scale;

	if (mtile >= a.w2.mtiles)
		return;
	scale = out_scale<NT, P>(acc, n);
#pragma unroll
	for (int i = 0; i < 2 * NT; i++) {
		const int nt = i / 2, c = i % 2;
		const uint32_t token = nt * 8 + 2 * t + c;

		if (token < n)
			*(uint2 *)(out + (uint64_t)slot[token] * a.hidden) =
				make_uint2(ptx_f16x2(acc[0][nt][c] * scale,
						     acc[0][nt][c + 2] * scale),
					   ptx_f16x2(acc[1][nt][c] * scale,
						     acc[1][nt][c + 2] * scale));
	}
	if (lane < n)
		a.out_scale[(uint64_t)slot[lane] * a.w2.mtiles + mtile] =
			h_back(scale) * (MODE == MOE_H32 ? h_back(inv[lane]) : 1.0f);
}

template <int NT, int P, int NTMAX, int WK, int G>
__device__ __forceinline__ void
unit_run(const struct moe_i4 &a, struct moe_shared<NTMAX> &sh, const struct moe_unit &u,
	 uint32_t q, uint32_t red, struct moe_ring &r, struct moe_ring &rx)
{
	using S = moe_shape<NTMAX, WK, G>;
	const bool store = threadIdx.x < MOE_GROUP * 32;
	float acc[2][NT][4];

	if (u.type == MOE_FIRST) {
		unit_mma<NT, P, WK, MOE_X, G, S>(acc, a, u.rb, u.n, nullptr, false, r,
						 rx);
		unit_reduce<NT, WK>(acc, red);
		if (store && WK == 1)
			store_h16<NT>(a, acc, u, sh.slot[q], sh.amax[q]);
		else if (store)
			store_h32<NT, WK>(a, acc, u, sh.slot[q]);
		return;
	}
	for (uint32_t i = 0, nr = rsub_of<1>(a.w2, u.rb); i < nr; i += 2) {
		uint32_t rb = u.rb * a.w2.rsub + i;
		const bool keep = i + 2 < nr, pair = i + 1 < nr;

		if (pair) {
			rb = pair_mma<NT, P, S::MODE2, G, S>(acc, a, rb, u.n, sh.inv[q],
							     keep, r, rx);
		} else {
			unit_mma<NT, P, 1, S::MODE2, G, S>(acc, a, rb, u.n, sh.inv[q],
							   keep, r, rx);
			unit_reduce<NT, 1>(acc, red);
		}
		if (store || pair)
			store_out<NT, P, S::MODE2>(a, acc, rb, u.n, sh.slot[q],
						   sh.inv[q]);
	}
}

/* Lane j: the weight of token @tok's slot j. */
__device__ __forceinline__ float sum_weight(const struct moe_i4 &a, uint32_t tok)
{
	const uint64_t slot = (uint64_t)tok * a.top_k + threadIdx.x % 32;

	if (threadIdx.x % 32 >= a.top_k || tok >= a.nr_tokens)
		return 0.0f;
	return a.ids[slot] < a.nr_experts ? a.weights[slot] : NAN;
}

/* y of eight rows of tile @mtile, those of lanes 2 @j and 2 @j + 1 in store_out(): slots in
 * order. @weight: sum_weight(). Half of a warp may have no such tile: it reads the last one, which
 * is of the same row block, so all there, and drops it. */
__device__ __forceinline__ void sum_eight(const struct moe_i4 &a, uint32_t tok,
					  uint32_t mtile, uint32_t j, float weight)
{
	const bool there = mtile < a.w2.mtiles;
	const uint32_t from = min(mtile, a.w2.mtiles - 1);
	const uint64_t slot = (uint64_t)tok * a.top_k;
	const uint16_t *out = a.out + slot * a.hidden + from * 32 + j * 8;
	const float *scale = a.out_scale + slot * a.w2.mtiles + from;
	const uint64_t y = (uint64_t)tok * a.hidden + mtile * 32 + j * 2;
	float s[8] = {};

#pragma unroll 8
	for (uint32_t k = 0; k < a.top_k; k++) {
		const uint4 o = __ldcg((const uint4 *)(out + (uint64_t)k * a.hidden));
		const float w = __shfl_sync(~0u, weight, k) *
				__ldcg(scale + (uint64_t)k * a.w2.mtiles);
		const uint32_t v[4] = {o.x, o.y, o.z, o.w};

#pragma unroll
		for (int i = 0; i < 4; i++) {
			s[2 * i] += w * ptx_f16_f32(v[i] & 0xffffu);
			s[2 * i + 1] += w * ptx_f16_f32(v[i] >> 16);
		}
	}
	if (there)
		moe_y_put_pairs(a.y, y, s);
}

/* y of a few tokens in a row block. */
__device__ __forceinline__ void unit_sum(const struct moe_i4 &a, const struct moe_unit &u,
					 uint32_t nr_tiles)
{
	const uint32_t group = threadIdx.x / 256, rows = 256u * a.w2.rsub;
	const uint32_t first = u.tile * a.sum_toks;
	const uint32_t n = min(a.sum_toks, a.nr_tokens - first);
	/* a warp's 256 rows are of one token; its weights are asked for ahead */
	float weight = sum_weight(a, first + threadIdx.x / (rows / 8));

	if (threadIdx.x % 256 == 0)
		while (ptx_ld_acquire(&a.done2[u.rb]) < nr_tiles)
			;
	ptx_bar_sync(group ? 4 : 1, MOE_GROUP * 32);
	for (uint32_t i = threadIdx.x; i < n * rows / 8; i += MOE_CONSUMERS * 32) {
		const uint32_t at = i % (rows / 8), mtile = u.rb * rows / 32 + at / 4;

		sum_eight(a, first + i / (rows / 8), mtile, at % 4, weight);
		weight = sum_weight(a, first + (i + MOE_CONSUMERS * 32) / (rows / 8));
	}
}

template <int NTMAX, int WK, int G>
__device__ __forceinline__ void consumer(const struct moe_i4 &a,
					 struct moe_shared<NTMAX> &sh, uint32_t red,
					 struct moe_ring r, struct moe_ring rx)
{
	using S = moe_shape<NTMAX, WK, G>;
	struct moe_place p = {};

	if (threadIdx.x < MOE_GROUP * 32)
		ptx_bar_arrive(3, MOE_CONSUMERS * 32);
	for (;;) {
		ptx_mbar_wait(ptx_smem(&sh.q_ready[p.q]), p.phase);
		const struct moe_unit u = sh.unit[p.q];

		if (u.type == MOE_END)
			return;
		if (u.type == MOE_SUM)
			unit_sum(a, u, sh.nr_tiles);
		else if (S::SETS_4 && u.n <= 2)
			unit_run<1, (S::SETS_4 ? 4 : 1), NTMAX, WK, G>(a, sh, u, p.q, red,
								       r, rx);
		else if (S::SETS_2 && u.n <= 4)
			unit_run<1, (S::SETS_2 ? 2 : 1), NTMAX, WK, G>(a, sh, u, p.q, red,
								       r, rx);
		else if (NTMAX == 1 || u.n <= 8)
			unit_run<1, 1, NTMAX, WK, G>(a, sh, u, p.q, red, r, rx);
		else if (NTMAX == 2 || u.n <= 16)
			unit_run<(NTMAX >= 2 ? 2 : 1), 1, NTMAX, WK, G>(a, sh, u, p.q,
									red, r, rx);
		else if (u.n <= 24)
			unit_run<(NTMAX >= 4 ? 3 : 1), 1, NTMAX, WK, G>(a, sh, u, p.q,
									red, r, rx);
		else
			unit_run<NTMAX, 1, NTMAX, WK, G>(a, sh, u, p.q, red, r, rx);
		__syncwarp();
		if (threadIdx.x % 32 == 0) {
			ptx_mbar_arrive(ptx_smem(&sh.q_done[p.q]));
			ptx_mbar_arrive(ptx_smem(&sh.q_empty[p.q]));
		}
		place_next(p);
	}
}

/* -------------------------------------------------------------------------------- kernel
 */

template <int NTMAX, class S>
__device__ __forceinline__ void init_barriers(struct moe_shared<NTMAX> &sh)
{
	for (uint32_t i = 0; i < S::STAGES; i++) {
		ptx_mbar_init(ptx_smem(&sh.full[i]), 1);
		ptx_mbar_init(ptx_smem(&sh.empty[i]), MOE_GROUP);
	}
	for (uint32_t i = 0; i < S::CHUNKS; i++) {
		ptx_mbar_init(ptx_smem(&sh.xfull[i]),
			      S::BULK ? 1 : 32); /* lanes that copy */
		ptx_mbar_init(ptx_smem(&sh.xempty[i]), MOE_CONSUMERS);
	}
	for (uint32_t i = 0; i < 2; i++)
		ptx_mbar_init(ptx_smem(&sh.turn[i]), 1);
	for (uint32_t i = 0; i < MOE_QUEUE; i++) {
		ptx_mbar_init(ptx_smem(&sh.q_full[i]), 1);
		ptx_mbar_init(ptx_smem(&sh.q_ready[i]), 1);
		ptx_mbar_init(ptx_smem(&sh.q_done[i]), MOE_CONSUMERS);
		ptx_mbar_init(ptx_smem(&sh.q_empty[i]), MOE_CONSUMERS + 3);
	}
	ptx_fence_async();
}

template <int NTMAX, int WK, int G>
__global__ void __launch_bounds__(MOE_THREADS, 1)
	moe_i4_kernel(const __grid_constant__ struct moe_i4 a)
{
	using S = moe_shape<NTMAX, WK, G>;
	MOE_DYNAMIC(dynamic);
	MOE_SHARED(struct moe_shared<NTMAX>, sh);
	const uint32_t warp = threadIdx.x / 32;
	struct moe_ring r = {}, rx = {};

	r.base = (ptx_smem(dynamic) + 127u) & ~127u;
	r.full = ptx_smem(sh.full);
	r.empty = ptx_smem(sh.empty);
	rx.base = r.base + S::STAGES * S::STAGE;
	rx.full = ptx_smem(sh.xfull);
	rx.empty = ptx_smem(sh.xempty);
	/* by the warp that needs them first, before anybody else looks */
	if (threadIdx.x == MOE_CONSUMERS * 32)
		init_barriers<NTMAX, S>(sh);
	__syncwarp();
	ptx_grid_launch();
	ptx_grid_wait();
	if (warp == MOE_CONSUMERS)
		weight_begin<NTMAX, WK, G>(a, sh, r);
	if (a.own_plan)
		own_plan<NTMAX>(a, sh);
	if (!a.own_plan && threadIdx.x == 0)
		sh.nr_tiles = __ldcg(a.nr_tiles);
	__syncthreads();
	if (warp < MOE_CONSUMERS) {
		SM90_ASM("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MOE_REGS_USE));
		consumer<NTMAX, WK, G>(a, sh, rx.base + S::CHUNKS * S::CHUNK, r, rx);
	} else {
		SM90_ASM("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(MOE_REGS_FEED));
		if (warp == MOE_CONSUMERS)
			weight_warp<NTMAX, WK, G>(a, sh, r);
		else if (warp == MOE_CONSUMERS + 3)
			signal_warp<NTMAX, S::BULK>(a, sh);
		else
			token_warp<NTMAX, WK, G>(a, sh, rx, warp - MOE_CONSUMERS - 1);
	}
}

#endif /* KVK_MOE_INT4_USE_CUH */
