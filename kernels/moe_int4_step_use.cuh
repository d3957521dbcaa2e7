/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_int4_step_use.cuh - the consumer warps of moe_int4_step.cuh, and the kernel.
 *
 * A warp asks for the tokens of its next brick before it multiplies one, across units too: x goes
 * to one of its two slots in shared memory, packets of h to registers that are free again since
 * the ones before were unpacked. (Registers for both would be copied at the end of each turn, and
 * a copy waits for what was asked for.) Sums of a unit's warps meet in shared memory; after the
 * barrier the first warps of a turn write results while the others go on.
 */
#ifndef KVK_MOE_INT4_STEP_USE_CUH
#define KVK_MOE_INT4_STEP_USE_CUH

#include "moe_int4_step.cuh"
#include "moe_step_ptx.cuh"

/* struct step_work - a warp's place: brick @j of unit @u. @from: where it lies what the lane brings,
 * @step further on of the next brick. FIRST: the tile has @n tokens, the lane's is @there. SECOND:
 * the lane's @packets of this brick and of the next one, in turn */
struct step_work {
	struct step_unit u;
	uint32_t j, n, step;
	bool there;
	const uint4 *from;
	uint4 packets[2];
};

/* Where brick j's columns of x are for token @tok of the tile. */
__device__ __forceinline__ const uint16_t *step_x(const struct moe_step &a,
						  const struct step_shared &sh,
						  const struct step_work &w, uint32_t tok)
{
	return a.x + (uint64_t)sh.tokens[w.u.tile][tok] * a.hidden + w.j * KVK_BRICK_COLS;
}

/* Ask for brick j's columns of x, in an asynchronous group of its own. */
__device__ __forceinline__ void step_ask_x(const struct step_work &w, uint32_t slot)
{
	const uint32_t lane = threadIdx.x % 32;

	if (w.there && w.j < w.u.nr)
		ptx_copy16(slot + lane / 16 * STEP_ROW + lane % 16 * 16, w.from);
	step_commit();
}

/* The next unit, as soon as the feeding warp has it; asks for what its first brick is multiplied
 * by, or the first two: packets take longer than a product. */
__device__ __forceinline__ void step_take(const struct moe_step &a,
					  struct step_shared &sh, struct moe_place &p,
					  struct step_work &w, uint32_t slot)
{
	const uint32_t lane = threadIdx.x % 32;

	ptx_mbar_wait(ptx_smem(&sh.q_full[p.q]), p.phase);
	w.u = sh.unit[p.q];
	w.j = threadIdx.x / 32;
	w.there = false;
	__syncwarp();
	if (w.u.type == STEP_END) { /* its place is left when all is done */
		step_commit();	    /* or the brick at hand would be the latest group */
		return;
	}
	if (lane == 0)
		ptx_mbar_arrive(ptx_smem(&sh.q_empty[p.q]));
	place_next(p);
	if (w.u.type == STEP_FIRST) {
		w.n = sh.nr[w.u.tile];
		w.there = w.n <= STEP_NARROW && lane / 16 < w.n;
		w.from = (const uint4 *)step_x(a, sh, w, w.there ? lane / 16 : 0) +
			 lane % 16;
		w.step = STEP_WARPS * KVK_BRICK_COLS / 8;
	} else {
		/* bricks of columns that follow each other, of all its slots */
		w.from = (const uint4 *)a.packets + lane +
			 (w.u.tile * a.top_k * a.w2.kbricks + (w.j >> a.log_rows)) *
				 (KVK_BRICK_COLS / 4);
		w.step = STEP_WARPS * KVK_BRICK_COLS / 4 >> a.log_rows;
		if (w.j < w.u.nr)
			w.packets[0] = step_packets(w.from);
		if (w.j + STEP_WARPS < w.u.nr)
			w.packets[1] = step_packets(w.from + w.step);
	}
	step_ask_x(w, slot);
}

/* 2^-@down as f16x2; from 2^-15 on nothing, which is less than what f16 leaves out */
__device__ __forceinline__ uint32_t step_down(uint32_t down)
{
	return (15 - min(down, 15u)) * 0x04000400u;
}

/* Packets to a brick of h in @slot: one power of two for all columns, and the routing weight in
 * what it is multiplied by afterwards. */
__device__ __forceinline__ void step_unpack(const struct moe_step &a,
					    const struct step_shared &sh,
					    const struct step_work &w, uint4 v,
					    uint32_t slot)
{
	const uint32_t lane = threadIdx.x % 32, tag = sh.tag;
	uint32_t top;

	while ((v.y >> 8 != tag || v.w >> 8 != tag) && !a.any_tag)
		v = step_packets(w.from);
	__syncwarp();
	v.y &= 0xffu;
	v.w &= 0xffu;
	top = ptx_redux_max(max(v.y, v.w));
	step_sts64(slot + lane * 8u, ptx_mul_f16x2(v.x, step_down(top - v.y)),
		   ptx_mul_f16x2(v.z, step_down(top - v.w)));
	if (lane == 0) {
		const uint32_t s = (w.j >> a.log_rows) * a.by_columns >> 16;

		ptx_sts32(slot + 256u,
			  __uint_as_float(top << 23) * sh.weight[w.u.tile * a.top_k + s]);
	}
	__syncwarp();
}

/* More tokens than a slot holds: at once, to registers. */
template <int P, int G>
__device__ __forceinline__ void step_wide(uint4 (&b)[4 / P], const struct moe_step &a,
					  const struct step_shared &sh,
					  const struct step_work &w)
{
	const uint32_t lane = threadIdx.x % 32, tok = lane / 4;
	/* lanes without a token: any that is there, times zero */
	const uint16_t *x = step_x(a, sh, w, tok < w.n ? tok : 0) + lane % 4 * 8;

#pragma unroll
	for (int i = 0; i < 4 / P; i++)
		b[i] = __ldcg((const uint4 *)(x + few_block<P, G>(i) * 32));
}

/* The turn of stage @AT of two: the warp's brick j of the unit into acc, and on to the next one, which
 * is of the next unit after the last. @slots: addresses of the warp's slots, the one that is next
 * first */
template <int AT, int P, enum moe_mode MODE, bool WIDE, int G>
__device__ __forceinline__ void
step_turn(float (&acc)[2][1][4], const struct moe_step &a, struct step_shared &sh,
	  struct step_work &w, struct moe_place &p, struct moe_ring &r,
	  uint32_t (&slots)[2], const struct few_lane<P> &f, bool last)
{
	using S = step_shape<G>;
	const uint32_t warp = threadIdx.x / 32, nr = w.u.nr, slot = slots[0];
	const uint32_t brick = r.base + r.stage * S::STAGE + warp * S::BRICK;
	const bool mine = w.j < nr && !a.loads_only;
	uint4 b[4 / P] = {};

	if (MODE != MOE_X && w.j < nr)
		step_unpack(a, sh, w, w.packets[AT], slot);
	if (WIDE && mine)
		step_wide<P, G>(b, a, sh, w);
	slots[0] = slots[1];
	slots[1] = slot;
	w.j += STEP_WARPS;
	w.from += w.step;
	if (last)
		step_take(a, sh, p, w, slots[0]);
	else if (MODE == MOE_X)
		step_ask_x(w, slots[0]);
	else if (w.j + STEP_WARPS < nr)
		w.packets[AT] = step_packets(w.from + w.step);
	if (MODE == MOE_X)
		step_wait_but_one();
	__syncwarp();
	ptx_mbar_wait(r.full + 8 * r.stage, r.phase);
	if (mine && WIDE)
		brick_few_of<P, G, MODE>(acc, brick, b, 0, 0, f, a.scale_f16);
	else if (mine)
		brick_few<P, G, MODE>(acc, brick, slot, MODE == MOE_X ? STEP_ROW : 0, f,
				      a.scale_f16);
	__syncwarp();
	if (threadIdx.x % 32 == 0)
		ptx_mbar_arrive(r.empty + 8 * r.stage);
	ring_next<STEP_STAGES>(r);
}

/* All bricks of the unit @w that are the warp's, into acc; @w becomes the next unit. Every warp
 * sees every stage, so it always knows the phase. */
template <int P, enum moe_mode MODE, bool WIDE, int G>
__device__ __forceinline__ void step_mma(float (&acc)[2][1][4], const struct moe_step &a,
					 struct step_shared &sh, struct step_work &w,
					 struct moe_place &p, struct moe_ring &r,
					 uint32_t (&slots)[2])
{
	constexpr int TWO =
		MODE != MOE_X; /* packets in registers: each turn has its own */
	const struct few_lane<P> f = unit_begin<1, P, G, MODE>(
		acc, nullptr, MODE == MOE_X ? w.n : 1, MODE == MOE_X ? STEP_ROW : 0);

#pragma unroll 1
	for (uint32_t left = w.u.nr;;) {
		bool last = left <= STEP_WARPS;

		step_turn<0, P, MODE, WIDE, G>(acc, a, sh, w, p, r, slots, f, last);
		if (last)
			break;
		left -= STEP_WARPS;
		if (!TWO)
			continue;
		last = left <= STEP_WARPS;
		step_turn<TWO, P, MODE, WIDE, G>(acc, a, sh, w, p, r, slots, f, last);
		if (last)
			break;
		left -= STEP_WARPS;
	}
	unit_end<1, P, MODE>(acc);
}

/* ------------------------------------------------------------------------------- results
 */

/* A warp's share: [token][row]; of w13 the 16 gate rows, then the 16 up rows. */
template <enum moe_mode MODE>
__device__ __forceinline__ void step_put(float *sums, const float (&acc)[2][1][4],
					 uint32_t n)
{
	const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;

	sums += threadIdx.x / 32 * STEP_WARP_SUMS;
#pragma unroll
	for (uint32_t i = 0; i < 8; i++) {
		const uint32_t m = i / 4, c = i % 2, half = i / 2 % 2;
		const uint32_t row =
			MODE == MOE_X ? half * 16 + m * 8 : m * 16 + half * 8;

		if (2 * t + c < n)
			sums[(2 * t + c) * STEP_TOKEN_SUMS + row + g] = acc[m][0][i % 4];
	}
}

/* h of two tokens, from those @pair begins: 16 columns, a lane each, to their packets. */
__device__ __forceinline__ void step_first_end(const struct moe_step &a,
					       const struct step_shared &sh,
					       const struct step_unit &u, uint32_t n,
					       uint32_t pair)
{
	const uint32_t col = threadIdx.x % 16, tok = pair + threadIdx.x % 32 / 16;
	const bool there = tok < n;
	float gate = 0, up = 0, h;
	const float *sums = sh.sums + (there ? tok : 0) * STEP_TOKEN_SUMS + col;
	uint32_t top, slot, back, two;

#pragma unroll
	for (uint32_t w = 0; w < STEP_WARPS; w++) {
		gate += sums[w * STEP_WARP_SUMS];
		up += sums[w * STEP_WARP_SUMS + 16];
	}
	h = __fdividef(gate, 1.0f + __expf(-gate)) * up;
	top = __float_as_uint(h) & 0x7fffffffu;
#pragma unroll
	for (uint32_t i = 1; i < 16; i *= 2)
		top = max(top, __shfl_xor_sync(~0u, top, i));
	h *= h_scale(top);
	back = __float_as_uint(h_back(h_scale(top))) >> 23;
	h *= col & 2 ? MOE_H_HIGH : 1.0f;
	two = ptx_f16x2(h, __shfl_down_sync(~0u, h, 1));
	if (!there || col % 2)
		return;
	slot = sh.slots[u.tile][tok];
	step_send(a.packets + (uint64_t)slot * (a.inter / 2) + u.row * 8 + col / 2, two,
		  sh.tag << 8 | back);
}

/* y of one row tile, a row a lane. */
__device__ __forceinline__ void step_second_end(const struct moe_step &a,
						const float *sums,
						const struct step_unit &u, uint32_t r)
{
	const uint32_t lane = threadIdx.x % 32, rows = 1u << a.log_rows;
	const uint32_t nr = min(u.nr, STEP_WARPS);
	float two[2] = {};

	sums += lane;
#pragma unroll 8
	for (uint32_t w = r; w < nr; w += rows)
		two[0] += sums[w * STEP_WARP_SUMS];
	two[1] = __shfl_down_sync(~0u, two[0], 1);
	if (lane % 2 == 0)
		moe_y_put(a.y,
			  (uint64_t)u.tile * a.hidden + (u.row + r) * KVK_BRICK_ROWS +
				  lane,
			  two);
}

template <int G>
__device__ __forceinline__ void step_use(const struct moe_step &a, struct step_shared &sh,
					 struct moe_ring r)
{
	constexpr int P = step_shape<G>::P;
	const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
	uint32_t slots[2];
	struct moe_place p = {};
	struct step_work w = {};

	slots[0] = r.base + STEP_STAGES * step_shape<G>::STAGE + 2 * warp * STEP_SLOT;
	slots[1] = slots[0] + STEP_SLOT;
	ptx_mbar_wait(ptx_smem(&sh.planned), 0);
	step_take(a, sh, p, w, slots[0]);
	for (uint32_t turn = 0; w.u.type != STEP_END; turn++) {
		const struct step_unit u = w.u;
		const uint32_t n = w.n, self = (warp + turn) % STEP_WARPS;
		float acc[2][1][4];

		if (u.type == STEP_SECOND)
			step_mma<P, MOE_H16, false, G>(acc, a, sh, w, p, r, slots);
		else if (n <= STEP_NARROW)
			step_mma<P, MOE_X, false, G>(acc, a, sh, w, p, r, slots);
		else
			step_mma<1, MOE_X, true, G>(acc, a, sh, w, p, r, slots);
		ptx_mbar_wait(ptx_smem(&sh.sums_free), ~turn & 1);
		if (u.type == STEP_SECOND)
			step_put<MOE_H16>(sh.sums, acc, 1);
		else
			step_put<MOE_X>(sh.sums, acc, n);
		ptx_bar_sync(1, STEP_WARPS * 32);
		if (u.type == STEP_FIRST && 2 * self < n)
			step_first_end(a, sh, u, n, 2 * self);
		else if (u.type == STEP_SECOND && self < 1u << a.log_rows &&
			 u.row + self < a.w2.mtiles)
			step_second_end(a, sh.sums, u, self);
		__syncwarp();
		if (lane == 0)
			ptx_mbar_arrive(ptx_smem(&sh.sums_free));
	}
	__syncwarp();
	if (lane == 0)
		ptx_mbar_arrive(ptx_smem(&sh.q_empty[p.q]));
}

/* -------------------------------------------------------------------------------- kernel
 */

template <int G>
__global__ void __launch_bounds__(STEP_THREADS, 1)
	moe_step_kernel(const __grid_constant__ struct moe_step a)
{
	using S = step_shape<G>;
	MOE_DYNAMIC(dynamic);
	MOE_SHARED(struct step_shared, sh);
	struct moe_ring r = {};

	r.base = (ptx_smem(dynamic) + 127u) & ~127u;
	r.full = ptx_smem(sh.full);
	r.empty = ptx_smem(sh.empty);
	for (uint32_t i = threadIdx.x; i < MOE_PLAN_EXPERTS; i += STEP_THREADS)
		*(uint64_t *)sh.same[i] = 0;
	if (threadIdx.x == STEP_THREADS - 1) {
		for (uint32_t i = 0; i < STEP_STAGES; i++) {
			ptx_mbar_init(ptx_smem(&sh.full[i]), 1);
			ptx_mbar_init(ptx_smem(&sh.empty[i]), STEP_WARPS);
		}
		ptx_mbar_init(ptx_smem(&sh.sums_free), STEP_WARPS);
		ptx_mbar_init(ptx_smem(&sh.planned), 1);
		for (uint32_t i = 0; i < MOE_QUEUE; i++) {
			ptx_mbar_init(ptx_smem(&sh.q_full[i]), 1);
			ptx_mbar_init(ptx_smem(&sh.q_empty[i]), STEP_WARPS);
		}
		ptx_fence_async();
	}
	__syncthreads();
	ptx_grid_launch();
	if (threadIdx.x / 32 < STEP_WARPS) {
		SM90_ASM("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MOE_REGS_USE));
		ptx_grid_wait();
		step_use<G>(a, sh, r);
	} else {
		SM90_ASM("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(MOE_REGS_FEED));
		if (threadIdx.x / 32 == STEP_WARPS)
			step_feed<G>(a, sh, r);
		else if (threadIdx.x / 32 == STEP_WARPS + 1)
			step_plan(a, sh);
	}
}

#endif /* KVK_MOE_INT4_STEP_USE_CUH */
