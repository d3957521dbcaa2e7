/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_fp8_step_use.cuh - the consumer warps of moe_fp8_step.cuh, and the kernel.
 *
 * A warp asks for the tokens of its next brick, to registers, before it multiplies one, across
 * units too; when it comes to that brick it rounds them to e4m3, while the brick's weights are on
 * their way. Codes go through a slot in shared memory of the warp's own, since who rounds has four
 * neighbouring columns of each token and who multiplies sixteen of one. Sums of a unit's warps meet
 * in shared memory; after the barrier the first warps of a turn write results while the others go
 * on.
 */
#ifndef KVK_MOE_FP8_STEP_USE_CUH
#define KVK_MOE_FP8_STEP_USE_CUH

#include "moe_fp8_step.cuh"
#include "quant.cuh"

/* struct f8s_work - a warp's place: brick @j of unit @u, which has @n tokens. FIRST: @raw are four
 * columns of each of four of @tokens, @from the scales of the unit's gate rows. SECOND: two packets
 * each, @from where they are. @scale: of the brick's blocks; the second one of SECOND is the slot's
 * weight. There is no register to spare: one that is spilled is waited for as it comes. */
struct f8s_work {
	struct f8s_unit u;
	uint32_t j, n;
	uint64_t tokens;
	uint4 raw[2];
	const void *from;
	float scale[2];
};

/* What a brick is multiplied by: codes of token g, columns 64 kk + 16 t .. + 15; scales of tokens
 * 2 t and 2 t + 1. */
struct f8s_tokens {
	uint4 codes[2];
	float scale[2];
};

/* The next unit, as soon as the feeding warp has it. */
__device__ __forceinline__ void f8s_take(const struct f8s_args &a, struct f8s_shared &sh,
					 struct f8s_place &p, struct f8s_work &w)
{
	ptx_mbar_wait(ptx_smem(&sh.q_full[p.q]), p.phase);
	w.u = sh.unit[p.q];
	w.j = threadIdx.x / 32;
	w.n = 1;
	if (w.u.type == F8S_FIRST) {
		const uint64_t gate = sh.expert[w.u.tile] * 2;

		w.tokens = *(const uint64_t *)sh.tokens[w.u.tile];
		/* a tile's are its first ones; F8S_NONE has the highest bit, no token has */
		w.n = 8 - __popcll(w.tokens & 0x8080808080808080ull);
		w.from =
			a.s13 + (gate * (a.inter / 128) + w.u.row / 8) * (a.hidden / 128);
	}
	__syncwarp();
	if (w.u.type == F8S_END) /* not before all is done */
		return;
	if (threadIdx.x % 32 == 0)
		ptx_mbar_arrive(ptx_smem(&sh.q_empty[p.q]));
	f8s_place_next(p);
}

/* Four columns of four tokens of the tile from the @from-th on, to @raw. */
__device__ __forceinline__ void f8s_ask_x(const struct f8s_args &a,
					  const struct f8s_work &w, uint32_t j,
					  uint32_t from, uint4 (&raw)[2])
{
	uint2 v[F8S_HALF];

#pragma unroll
	for (uint32_t i = 0; i < F8S_HALF; i++) {
		const uint32_t token = (uint32_t)(w.tokens >> 8 * (from + i)) & 0xffu;

		if (from + i < w.n)
			v[i] = __ldcg((const uint2 *)(a.x + (uint64_t)token * a.hidden +
						      j * 128) +
				      threadIdx.x % 32);
		else
			v[i] = make_uint2(0, 0);
	}
	raw[0] = make_uint4(v[0].x, v[0].y, v[1].x, v[1].y);
	raw[1] = make_uint4(v[2].x, v[2].y, v[3].x, v[3].y);
}

/* Ask for what brick j is multiplied by. */
__device__ __forceinline__ void f8s_ask(const struct f8s_args &a,
					const struct f8s_shared &sh, struct f8s_work &w)
{
	const uint32_t h_blocks = a.inter / 128, x_blocks = a.hidden / 128;

	if (w.j >= w.u.nr) /* also: no more units */
		return;
	if (w.u.type == F8S_SECOND) {
		const uint32_t row = w.u.row + (w.j & ((1u << a.log_rows) - 1));
		uint32_t s, k, id;

		f8s_column(a, w.j >> a.log_rows, s, k);
		s += w.u.tile * a.top_k;
		id = sh.id[s];
		w.from = a.packets + (uint64_t)s * a.inter + k * 128 +
			 threadIdx.x % 32 * 4;
		w.raw[0] = step_packets((const uint4 *)w.from);
		w.raw[1] = step_packets((const uint4 *)w.from + 1);
		w.scale[1] = id < a.nr_experts ? __ldcg(&a.weights[s]) : NAN;
		w.scale[0] = __ldg(&a.s2[((uint64_t)min(id, a.nr_experts - 1) * x_blocks +
					  min(row / 4, x_blocks - 1)) *
						 h_blocks +
					 k]);
		return;
	}
	f8s_ask_x(a, w, w.j, 0, w.raw);
	w.scale[0] = __ldg((const float *)w.from + w.j);
	w.scale[1] = __ldg((const float *)w.from + w.j + h_blocks * x_blocks);
}

/* Four columns a lane of a token's 128 to the @i-th row of @slot, as codes; their scale. */
__device__ __forceinline__ void f8s_round(float (&v)[4], uint32_t slot, uint32_t i)
{
	const uint32_t lane = threadIdx.x % 32;
	uint32_t top = 0;
	float scale;

#pragma unroll
	for (uint32_t c = 0; c < 4; c++) {
		const uint32_t m = __float_as_uint(v[c]) & 0x7fffffffu;

		top = max(top, m > 0x7f800000u ? 0u : m);
	}
	scale = kvk_fp8_act_scale(__uint_as_float(ptx_redux_max(top)));
	kvk_quant_div(v, kvk_quant_make(scale));
	ptx_sts32(slot + i * F8S_ROW + lane * 4,
		  __uint_as_float(arch_f32_e4m3(v[0], v[1]) | arch_f32_e4m3(v[2], v[3])
								      << 16));
	if (lane == 0)
		ptx_sts32(slot + F8S_HALF * F8S_ROW + i * 4, scale);
}

/* What the lane multiplies with, of tokens @from .. @from + 3, out of the slot. */
__device__ __forceinline__ void f8s_pick(struct f8s_tokens &x, uint32_t n, uint32_t slot,
					 uint32_t from)
{
	const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;

	__syncwarp();
	if (g / F8S_HALF * F8S_HALF == from && g < n) {
		x.codes[0] = ptx_lds128(slot + g % F8S_HALF * F8S_ROW + t * 16);
		x.codes[1] = ptx_lds128(slot + g % F8S_HALF * F8S_ROW + 64 + t * 16);
	}
	if (2 * t / F8S_HALF * F8S_HALF == from) {
#pragma unroll
		for (uint32_t i = 0; i < 2; i++)
			if (2 * t + i < n)
				x.scale[i] = ptx_lds32(slot + F8S_HALF * F8S_ROW +
						       (2 * t + i) % F8S_HALF * 4);
	}
	__syncwarp();
}

/* x, as asked for; of more than four tokens the rest at once. */
__device__ __forceinline__ void f8s_round_x(const struct f8s_args &a, struct f8s_work &w,
					    uint32_t slot, struct f8s_tokens &x)
{
#pragma unroll 1
	for (uint32_t from = 0; from < w.n; from += F8S_HALF) {
		uint32_t two[8] = {w.raw[0].x, w.raw[0].y, w.raw[0].z, w.raw[0].w,
				   w.raw[1].x, w.raw[1].y, w.raw[1].z, w.raw[1].w};

#pragma unroll
		for (uint32_t i = 0; i < F8S_HALF; i++) {
			float v[4] = {__uint_as_float(two[2 * i] << 16),
				      __uint_as_float(two[2 * i] & 0xffff0000u),
				      __uint_as_float(two[2 * i + 1] << 16),
				      __uint_as_float(two[2 * i + 1] & 0xffff0000u)};

			if (from + i >= w.n)
				break;
			f8s_round(v, slot, i);
		}
		f8s_pick(x, w.n, slot, from);
		if (from + F8S_HALF < w.n)
			f8s_ask_x(a, w, w.j, from + F8S_HALF, w.raw);
	}
}

/* h: packets of this call, as soon as they are. */
__device__ __forceinline__ void f8s_round_h(const struct f8s_args &a,
					    const struct f8s_shared &sh,
					    const struct f8s_work &w, uint32_t slot,
					    struct f8s_tokens &x)
{
	const uint32_t tag = sh.tag;
	uint4 p = w.raw[0], q = w.raw[1];
	float v[4];

	while ((p.y != tag || p.w != tag || q.y != tag || q.w != tag) && !a.any_tag) {
		p = step_packets((const uint4 *)w.from);
		q = step_packets((const uint4 *)w.from + 1);
	}
	__syncwarp();
	v[0] = __uint_as_float(p.x);
	v[1] = __uint_as_float(p.z);
	v[2] = __uint_as_float(q.x);
	v[3] = __uint_as_float(q.z);
	f8s_round(v, slot, 0);
	f8s_pick(x, 1, slot, 0);
}

/* -------------------------------------------------------------------------------- products */

/* Fragment row g is row f8s_row(g) of eight: so that two rows of a quarter warp lie in different
 * halves of the copy's swizzle. */
__device__ __forceinline__ uint32_t f8s_row(uint32_t g)
{
	return (g & 2) | (g & 1) << 2 | g >> 2;
}

/* Sixteen columns of a row, the lane's share of columns 64 kk .. + 63. */
__device__ __forceinline__ uint4 f8s_load(uint32_t brick, uint32_t row, uint32_t kk)
{
	const uint32_t piece = kk * 4 + threadIdx.x % 4;

	return ptx_lds128(brick + row * 128 + (piece ^ (row & 7)) * 16);
}

__device__ __forceinline__ uint32_t f8s_word(const uint4 &v, int i)
{
	return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

/* acc += the brick's sums times @scale of its blocks, of 16 rows each, and of the tokens. @half:
 * from its first 16 rows to the others */
__device__ __forceinline__ void f8s_brick(float (&acc)[2][4], uint32_t brick,
					  uint32_t half, const struct f8s_tokens &x,
					  const float (&scale)[2])
{
	const uint32_t row = f8s_row(threadIdx.x % 32 / 4);
	float part[2][4] = {};

#pragma unroll
	for (uint32_t kk = 0; kk < 2; kk++) {
		uint4 w[2][2];

#pragma unroll
		for (uint32_t i = 0; i < 4; i++)
			w[i / 2][i % 2] =
				f8s_load(brick + i / 2 * half, i % 2 * 8 + row, kk);
#pragma unroll
		for (int s = 0; s < 4; s++) {
			const uint32_t b = f8s_word(x.codes[kk], s);
			const uint32_t b0 = arch_e4m3_f16(b), b1 = arch_e4m3_f16(b >> 16);

#pragma unroll
			for (uint32_t m = 0; m < 2; m++) {
				const uint32_t lo = f8s_word(w[m][0], s),
					       hi = f8s_word(w[m][1], s);
				const uint32_t f[4] = {
					arch_e4m3_f16(lo), arch_e4m3_f16(hi),
					arch_e4m3_f16(lo >> 16), arch_e4m3_f16(hi >> 16)};

				ptx_mma_f16(part[m], f, b0, b1, part[m]);
			}
		}
	}
#pragma unroll
	for (uint32_t i = 0; i < 8; i++)
		acc[i / 4][i % 4] += part[i / 4][i % 4] * (scale[i / 4] * x.scale[i % 2]);
}

/* One loop for both turns' sums: registers cannot be chosen by a number. */
__device__ __forceinline__ void f8s_swap(float (&x)[2][4], float (&y)[2][4])
{
#pragma unroll
	for (uint32_t i = 0; i < 8; i++) {
		const float v = x[i / 4][i % 4];

		x[i / 4][i % 4] = y[i / 4][i % 4];
		y[i / 4][i % 4] = v;
	}
}

/* All bricks of the unit @w that are the warp's, into acc, of second turns into @more; @w becomes the
 * next unit. Every warp sees every stage, so it always knows the phase. */
template <bool TWO, bool SECOND>
__device__ __forceinline__ void f8s_multiply(float (&acc)[2][4], float (&more)[2][4],
					     const struct f8s_args &a,
					     struct f8s_shared &sh, struct f8s_work &w,
					     struct f8s_place &p, struct f8s_ring &r)
{
	const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
	const uint32_t slot = ptx_smem(sh.x[warp]), nr = w.u.nr;
	const bool two = f8s_log_turns<TWO>(a, SECOND ? F8S_SECOND : F8S_FIRST);

#pragma unroll
	for (uint32_t i = 0; i < 8; i++)
		acc[i / 4][i % 4] = more[i / 4][i % 4] = 0.0f;
#pragma unroll 1
	for (uint32_t at = 0; at < nr; at += F8S_WARPS) {
		const bool mine = at + warp < nr;
		struct f8s_tokens x = {};
		float scale[2] = {};

		if (mine) {
			if (SECOND)
				f8s_round_h(a, sh, w, slot, x);
			else
				f8s_round_x(a, w, slot, x);
			scale[0] = SECOND ? w.scale[0] * w.scale[1] : w.scale[0];
			scale[1] = SECOND ? scale[0] : w.scale[1];
		}
		w.j += F8S_WARPS;
		if (at + F8S_WARPS >= nr)
			f8s_take(a, sh, p, w);
		f8s_ask(a, sh, w);
#pragma unroll 1
		for (uint32_t turn = 0; turn <= two; turn++, f8s_next(r)) {
			const uint32_t brick =
				r.base + r.stage * F8S_STAGE +
				warp * (SECOND ? F8S_BRICK : F8S_BRICK / 2);

			ptx_mbar_wait(ptx_smem(&sh.full[r.stage]), r.phase);
			if (mine && !MOE_LOADS_ONLY)
				f8s_brick(acc, brick,
					  SECOND ? F8S_BRICK / 2 : F8S_STAGE / 2, x,
					  scale);
			__syncwarp();
			if (lane == 0)
				ptx_mbar_arrive(ptx_smem(&sh.empty[r.stage]));
			if (two)
				f8s_swap(acc, more);
		}
	}
}

/* --------------------------------------------------------------------------------- results */

/* A warp's share: [token][row]; of W13 the 16 gate rows, then the 16 up rows. */
__device__ __forceinline__ void f8s_put(float *sums, const float (&acc)[2][4], uint32_t n)
{
	const uint32_t lane = threadIdx.x % 32, t = lane % 4;

	sums += threadIdx.x / 32 * F8S_WARP_SUMS + f8s_row(lane / 4);
#pragma unroll
	for (uint32_t i = 0; i < 8; i++)
		if (2 * t + i % 2 < n)
			sums[(2 * t + i % 2) * F8S_TOKEN_SUMS + i / 2 * 8] =
				acc[i / 4][i % 4];
}

/* h of two tokens, from those @pair begins: 16 columns from @row on, a lane each, to their packets. */
__device__ __forceinline__ void f8s_first_end(const struct f8s_args &a,
					      const struct f8s_shared &sh,
					      const float *sums, uint32_t tile,
					      uint32_t row, uint32_t n, uint32_t pair)
{
	const uint32_t col = threadIdx.x % 16, tok = pair + threadIdx.x % 32 / 16;
	float gate = 0, up = 0;

	sums += (tok < n ? tok : 0) * F8S_TOKEN_SUMS + col;
#pragma unroll
	for (uint32_t w = 0; w < F8S_WARPS; w++) {
		gate += sums[w * F8S_WARP_SUMS];
		up += sums[w * F8S_WARP_SUMS + 16];
	}
	if (tok < n)
		step_send(a.packets + (uint64_t)sh.slots[tile][tok] * a.inter + row * 16 +
				  col,
			  __float_as_uint(gate / (1.0f + __expf(-gate)) * up), sh.tag);
}

/* y of row tile @row, a row a lane; it is the @r-th of its stage. */
__device__ __forceinline__ void f8s_second_end(const struct f8s_args &a,
					       const float *sums,
					       const struct f8s_unit &u, uint32_t row,
					       uint32_t r)
{
	const uint32_t lane = threadIdx.x % 32, nr = min(u.nr, F8S_WARPS);
	float two[2] = {};

	if (row >= a.hidden / 32)
		return;
	sums += lane;
#pragma unroll 8
	for (uint32_t w = r; w < nr; w += 1u << a.log_rows)
		two[0] += sums[w * F8S_WARP_SUMS];
	two[1] = __shfl_down_sync(~0u, two[0], 1);
	if (lane % 2 == 0)
		moe_y_put(a.y, (uint64_t)u.tile * a.hidden + row * 32 + lane, two);
}

/* Results of @nr turns from the @from-th on, whose sums lie F8S_APART tokens apart; the @self-th warp's
 * share, if it has one. */
__device__ __forceinline__ void f8s_end(const struct f8s_args &a,
					const struct f8s_shared &sh,
					const struct f8s_unit &u, uint32_t n,
					uint32_t from, uint32_t nr, uint32_t self)
{
	/* of a turn: pairs of tokens, or row tiles */
	const uint32_t log = u.type == F8S_SECOND ? a.log_rows : nr > 1 ? 1 : 2;
	const uint32_t turn = self >> log, i = self & ((1u << log) - 1);
	const float *sums = sh.sums + turn * F8S_APART * F8S_TOKEN_SUMS;

	if (turn >= nr)
		return;
	if (u.type == F8S_SECOND)
		f8s_second_end(a, sums, u, u.row + ((from + turn) << log) + i, i);
	else if (2 * i < n)
		f8s_first_end(a, sh, sums, u.tile, u.row + from + turn, n, 2 * i);
}

template <bool TWO>
__device__ __forceinline__ void f8s_use(const struct f8s_args &a, struct f8s_shared &sh,
					struct f8s_ring r)
{
	const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
	struct f8s_place p = {};
	struct f8s_work w = {};

	f8s_take(a, sh, p, w);
	f8s_ask(a, sh, w);
	for (uint32_t round = 0; w.u.type != F8S_END;) {
		const struct f8s_unit u = w.u;
		const uint32_t n = w.n, turns = 1u << f8s_log_turns<TWO>(a, u.type);
		/* turns whose sums there is room for at once */
		const uint32_t nr = n > F8S_APART ? 1 : turns;
		float acc[2][4], more[2][4];

		if (u.type == F8S_SECOND)
			f8s_multiply<TWO, true>(acc, more, a, sh, w, p, r);
		else
			f8s_multiply<TWO, false>(acc, more, a, sh, w, p, r);
#pragma unroll 1
		for (uint32_t from = 0; from < turns; from += nr, round++) {
			ptx_mbar_wait(ptx_smem(&sh.sums_free), ~round & 1);
			f8s_put(sh.sums, acc, n);
			if (TWO)
				f8s_swap(acc, more);
			if (nr > 1)
				f8s_put(sh.sums + F8S_APART * F8S_TOKEN_SUMS, acc, n);
			ptx_bar_sync(1, F8S_WARPS * 32);
			f8s_end(a, sh, u, n, from, nr, (warp + round) % F8S_WARPS);
			__syncwarp();
			if (lane == 0)
				ptx_mbar_arrive(ptx_smem(&sh.sums_free));
		}
	}
	__syncwarp();
	if (lane == 0)
		ptx_mbar_arrive(ptx_smem(&sh.q_empty[p.q]));
}

/* ---------------------------------------------------------------------------------- kernel */

template <bool TWO>
__global__ void __launch_bounds__(F8S_THREADS, 1)
	f8s_kernel(const __grid_constant__ struct f8s_args a)
{
	MOE_DYNAMIC(dynamic);
	MOE_SHARED(struct f8s_shared, sh);
	struct f8s_ring r = {};

	r.base = (ptx_smem(dynamic) + 1023u) & ~1023u;
	if (threadIdx.x == F8S_THREADS - 1) {
		f8s_prefetch_map(&a.w13);
		f8s_prefetch_map(&a.w2);
		for (uint32_t i = 0; i < F8S_STAGES; i++) {
			ptx_mbar_init(ptx_smem(&sh.full[i]), 1);
			ptx_mbar_init(ptx_smem(&sh.empty[i]), F8S_WARPS);
		}
		ptx_mbar_init(ptx_smem(&sh.sums_free), F8S_WARPS);
		for (uint32_t i = 0; i < F8S_QUEUE; i++) {
			ptx_mbar_init(ptx_smem(&sh.q_full[i]), 1);
			ptx_mbar_init(ptx_smem(&sh.q_empty[i]), F8S_WARPS);
		}
		ptx_fence_async();
	}
	__syncthreads();
	ptx_grid_launch();
	ptx_grid_wait();
	if (threadIdx.x / 32 < F8S_WARPS) {
		SM90_ASM("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(F8S_REGS_USE(TWO)));
		f8s_use<TWO>(a, sh, r);
	} else {
		SM90_ASM("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(F8S_REGS_FEED(TWO)));
		if (threadIdx.x / 32 == F8S_WARPS)
			f8s_feed<TWO>(a, sh, r);
	}
}

#endif /* KVK_MOE_FP8_STEP_USE_CUH */
