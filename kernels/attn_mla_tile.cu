/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_mla_tile.cu - MLA decode on BF16 pages for 17 to 64 query rows a CTA (64 heads; 128 heads
 * and drafts are cut into blocks of 64), on wgmma. FP8: attn_mla_reg.cu.
 *
 * Budget for a page (64 tokens) and 64 rows, in clocks of an SM:
 *
 * - memory: 73,728 bytes at 18.6: 3,960
 *
 * - matrix: 64 x 64 x (576 + 512) x 2 flops at 4,096 a clock: 2,176; with P in two parts 3,200
 *
 * - shared memory at 128 bytes: 72 KB of tile in, 72 KB of it and 72 KB of Q for the scores, 64
 *   KB for the values, 16 KB of P: 2,370
 *
 * Structure. Two tiles of 64 tokens by 576 dims lie in shared memory as wgmma wants them
 * (blocks of 64 dims, 128-byte swizzle). Four warps fill them by asynchronous copies. Two
 * warpgroups use them: each makes the scores and the softmax of every other page and sums the
 * values of all pages for its half of the latent dims. P goes to the other one from lane to lane, as it
 * lies in the registers of the operand; the warps with the same rows also hand on the
 * reference m of the exponents (an integer in log2 units). P may exceed it by 2^8, so after the
 * first pages hardly any row changes its reference and no sum is rescaled.
 *
 * There is no room for a third tile, so a page's scores start when the page before the one before it has been
 * summed, and all is one chain: scores of page i, P, values of page i by the other warpgroup, its scores of page
 * i + 1. What is in it counts, what is beside it does not. So the reference goes first, then P of 32 tokens, then
 * the others'; a page's own values come first while the other one waits for P, and the rest of them when it
 * has its products done; a tile that is there is seen (and fenced) beside products.
 *
 * A tile comes free in parts: rope when the other warpgroup has P (so the scores are done),
 * each half of the latent dims when its warpgroup has added it up.
 *
 * P in one part of 8 bits is off by 9e-4, with a bf16 output 1.9e-3 to 2.0e-3 in all; two parts
 * are exact enough for 1e-3. KVK_ATTN_FAST takes one.
 *
 * Measured: 4,380 clocks a page with P in two parts; in one it is memory that a page waits for.
 */
#include "kernels/attn_mla_tile_end.cuh"
#include "kernels/attn_mla_tile_feed.cuh"

#include <errno.h>
#include <math.h>

/* Go over to reference @m. */
KVK_DEV void tile_rescale(struct tile_state &st, const float *m)
{
	const bool same = m[0] == st.m[0] && m[1] == st.m[1];
	float f[2];

	if (__all_sync(~0u, same))
		return;
#pragma unroll
	for (int h = 0; h < 2; h++) {
		float mu = m[h] == -INFINITY ? 0.f : m[h];

		f[h] = exp2_fast(st.m[h] - mu);
		st.l[h] *= f[h];
		st.m[h] = m[h];
	}
#pragma unroll
	for (int i = 0; i < 128; i++)
		st.o[i] *= f[i / 2 & 1];
}

/*
 * Has all of page @seq's tile landed? If so matrix units may read it: the copies were made by ordinary stores
 * of other threads.
 */
KVK_DEV bool tile_look(struct tile_smem *sm, uint32_t seq)
{
	const uint32_t buf = seq & 1, phase = seq >> 1 & 1;
	/* a part's copies count as landed when those before them have */
	const bool there = __all_sync(~0u, mbar_test(&sm->full[buf][PART_RIGHT], phase));

	if (there)
		fence_proxy_async();
	return there;
}

/* Part @part of page @seq's tile, unless it is there. */
KVK_DEV void tile_wait(struct tile_smem *sm, uint32_t seq, int part, bool there)
{
	if (!there) {
		mbar_wait(&sm->full[seq & 1][part], seq >> 1 & 1);
		fence_proxy_async();
	}
	wg_fence();
}

/* Scores of 64 rows and 64 tokens of page @seq. @there: tile_look() saw it */
KVK_DEV void tile_scores(struct tile_smem *sm, uint32_t seq, bool there, float *s)
{
	const uint64_t dq = wg_desc(smem_addr(sm->q));
	const uint64_t dk = wg_desc(smem_addr(sm->tile[seq & 1]));

	tile_wait(sm, seq, PART_ROPE, there);
#pragma unroll
	for (int k = 32; k < 36; k++)
		wgmma_scores(s, dq + k / 4 * (TILE_BLOCK / 16) + k % 4 * 2,
			     dk + k / 4 * (TILE_BLOCK / 16) + k % 4 * 2, k > 32);
	tile_wait(sm, seq, PART_LEFT, there);
#pragma unroll
	for (int k = 0; k < 16; k++)
		wgmma_scores(s, dq + k / 4 * (TILE_BLOCK / 16) + k % 4 * 2,
			     dk + k / 4 * (TILE_BLOCK / 16) + k % 4 * 2, 1);
	tile_wait(sm, seq, PART_RIGHT, there);
#pragma unroll
	for (int k = 16; k < 32; k++)
		wgmma_scores(s, dq + k / 4 * (TILE_BLOCK / 16) + k % 4 * 2,
			     dk + k / 4 * (TILE_BLOCK / 16) + k % 4 * 2, 1);
	wg_commit();
	wg_wait<0>();
	wg_keep<32>(s);
}

/* Scores masked; mx: the largest of rows g, g + 8, times the scale. */
KVK_DEV void tile_mask(const struct attn_params &p, const struct plan_seg &g,
		       int32_t valid, float *s, float *mx)
{
	const int lane = threadIdx.x & 31, c = lane % 4, w = threadIdx.x / 32 % 4;

	if (valid - (int32_t)g.q_len + 1 < (int32_t)TOKENS) {
#pragma unroll
		for (int h = 0; h < 2; h++) {
			uint32_t row = g.hblk * TILE_ROWS + 16 * w + lane / 4 + 8 * h;
			int32_t limit = valid - (int32_t)g.q_len + 1 +
					(int32_t)(row / p.nr_q_heads);

#pragma unroll
			for (int i = 0; i < 16; i++)
				if (i / 2 * 8 + 2 * c + (i & 1) >= limit)
					s[i / 2 * 4 + 2 * h + (i & 1)] = -INFINITY;
		}
	}
	mx[0] = mx[1] = -INFINITY;
#pragma unroll
	for (int i = 0; i < 32; i++)
		mx[i / 2 & 1] = fmaxf(mx[i / 2 & 1], s[i]);
#pragma unroll
	for (int h = 0; h < 2; h++) {
		mx[h] = fmaxf(mx[h], __shfl_xor_sync(~0u, mx[h], 1));
		mx[h] = p.scale * fmaxf(mx[h], __shfl_xor_sync(~0u, mx[h], 2));
	}
}

/* Probabilities of 32 tokens as A operands of two k-steps, and the rows' sums. */
template <int PLANES>
KVK_DEV void tile_probs(float scale, const float *m, const float *s, float *l,
			uint32_t (*a)[2][4])
{
#pragma unroll
	for (int j = 0; j < 4; j++) {
#pragma unroll
		for (int h = 0; h < 2; h++) {
			const float mu = m[h] == -INFINITY ? 0.f : m[h];
			float x = exp2_fast(fmaf(s[4 * j + 2 * h], scale, -mu));
			float y = exp2_fast(fmaf(s[4 * j + 2 * h + 1], scale, -mu));
			uint32_t *to = &a[0][j / 2][2 * (j & 1) + h];

			l[h] += x + y;
			*to = pack_bf16(x, y);
			if (PLANES == 2) {
				float2 hi = unpack_bf16(*to);

				a[PLANES - 1][j / 2][2 * (j & 1) + h] =
					pack_bf16(x - hi.x, y - hi.y);
			}
		}
	}
}

/* o += P V of 32 tokens from @v on, in the first block of this warpgroup's half of the dims */
template <int PLANES> KVK_DEV void tile_values(uint32_t v, uint32_t (*a)[2][4], float *o)
{
	const uint64_t dv = wg_desc(v);

	wg_fence();
#pragma unroll
	for (int k = 0; k < PLANES; k++)
#pragma unroll
		for (int t = 0; t < 2; t++)
			wgmma_values(o, a[k][t], dv + t * (2048 / 16));
	wg_commit();
}

KVK_DEV void tile_values_end(float *o)
{
	wg_wait<0>();
	wg_keep<128>(o);
}

KVK_DEV void tile_arrive(uint64_t *bar)
{
	__syncwarp();
	if ((threadIdx.x & 31) == 0)
		mbar_arrive(bar);
}

/* Where P's parts travel: the second one by the tile's rope block, whose scores are done. */
KVK_DEV uint4 *tile_px(struct tile_smem *sm, uint32_t buf, int w, int plane)
{
	return plane ? (uint4 *)sm->tile[buf][8] + w * 128 : &sm->px[w][0][0];
}

/* P of 32 tokens on its way to the other warpgroup. */
template <int PLANES>
KVK_DEV void tile_send(struct tile_smem *sm, uint32_t buf, int half, uint32_t (*a)[2][4])
{
	const int lane = threadIdx.x & 31, w = threadIdx.x / 32 % 4;

#pragma unroll
	for (int i = 0; i < 2 * PLANES; i++) {
		const uint32_t *v = a[i / 2][i % 2];

		tile_px(sm, buf, w, i / 2)[(2 * half + i % 2) * 32 + lane] =
			make_uint4(v[0], v[1], v[2], v[3]);
	}
	tile_arrive(&sm->p_full[buf][half][w]);
}

template <int PLANES>
KVK_DEV void tile_receive(struct tile_smem *sm, uint32_t buf, int half,
			  uint32_t (*a)[2][4])
{
	const int lane = threadIdx.x & 31, w = threadIdx.x / 32 % 4;

#pragma unroll
	for (int i = 0; i < 2 * PLANES; i++) {
		uint4 v = tile_px(sm, buf, w, i / 2)[(2 * half + i % 2) * 32 + lane];

		a[i / 2][i % 2][0] = v.x;
		a[i / 2][i % 2][1] = v.y;
		a[i / 2][i % 2][2] = v.z;
		a[i / 2][i % 2][3] = v.w;
	}
}

/* The reference of this lane's rows, as it was sent: what follows is behind it. */
KVK_DEV void tile_reference(const struct tile_smem *sm, float *m)
{
	const int lane = threadIdx.x & 31, w = threadIdx.x / 32 % 4;
	const volatile float *at = &sm->mx[16 * w + lane / 4];

	m[0] = at[0];
	m[1] = at[8];
}

/*
 * A page whose scores are this warpgroup's. What the other one waits for comes first: reference, then
 * P of 32 tokens and of the others.
 */
template <int PLANES>
KVK_DEV void tile_own(const struct attn_params &p, const struct plan_seg &g,
		      int32_t valid, uint32_t seq, bool there, struct tile_state &st,
		      struct tile_smem *sm)
{
	const int lane = threadIdx.x & 31, w = threadIdx.x / 32 % 4;
	const uint32_t buf = seq & 1;
	const uint32_t v = smem_addr(sm->tile[buf][4 * buf]);
	uint32_t a[2][PLANES][2][4];
	float s[32], mx[2], m[2];

	tile_scores(sm, seq, there, s);
	tile_mask(p, g, valid, s, mx);
#pragma unroll
	for (int h = 0; h < 2; h++)
		m[h] = mx[h] > st.m[h] + TILE_SLACK ? ceilf(mx[h]) : st.m[h];
	if (lane % 4 == 0) {
		sm->mx[16 * w + lane / 4] = m[0];
		sm->mx[16 * w + lane / 4 + 8] = m[1];
	}
	tile_arrive(&sm->m_full[buf][w]);
	tile_rescale(st, m);
	if (PLANES == 2) /* every warp's scores are done with the rope */
		bar_sync(BAR_OWN + buf, 128);
	tile_probs<PLANES>(p.scale, st.m, s, st.l, a[0]);
	tile_send<PLANES>(sm, buf, 0, a[0]);
	tile_values<PLANES>(v, a[0], st.o);
	/* read again, so that these exponents are not mixed with those that go first */
	tile_reference(sm, m);
	tile_probs<PLANES>(p.scale, m, s + 16, st.l, a[1]);
	tile_send<PLANES>(sm, buf, 1, a[1]);
	/* the other one's products first: it scores the next page behind them */
	mbar_wait(&sm->empty[buf][PART_LEFT + (buf ^ 1)], seq >> 1 & 1);
	tile_values<PLANES>(v + 2 * 2048, a[1], st.o);
	tile_values_end(st.o);
	tile_arrive(&sm->empty[buf][PART_LEFT + buf]);
}

/*
 * A page that the other warpgroup scores. Its fences are good for this one as well: P comes behind them.
 * Meanwhile page @seq + 1, whose scores are this one's (@more: there is one), may have come. Return: has it?
 */
template <int PLANES>
KVK_DEV bool tile_other(uint32_t seq, bool more, struct tile_state &st,
			struct tile_smem *sm)
{
	const int w = threadIdx.x / 32 % 4;
	const uint32_t buf = seq & 1, phase = seq >> 1 & 1;
	const uint32_t v = smem_addr(sm->tile[buf][4 * (buf ^ 1)]);
	uint32_t a[2][PLANES][2][4];
	float m[2];
	bool there;

	mbar_wait(&sm->m_full[buf][w], phase);
	tile_reference(sm, m);
	tile_rescale(st, m);
#pragma unroll
	for (int half = 0; half < 2; half++) {
		mbar_wait(&sm->p_full[buf][half][w], phase);
		tile_receive<PLANES>(sm, buf, half, a[half]);
		tile_values<PLANES>(v + half * 2 * 2048, a[half], st.o);
	}
	tile_arrive(&sm->empty[buf][PART_ROPE]);
	there = more && tile_look(sm, seq + 1);
	tile_values_end(st.o);
	tile_arrive(&sm->empty[buf][PART_LEFT + (buf ^ 1)]);
	return there;
}

/* Bench only: the tiles come and go. */
KVK_DEV void tile_skip(uint32_t seq, int wg, struct tile_smem *sm)
{
	const uint32_t buf = seq & 1, phase = seq >> 1 & 1;

	for (int i = 0; i < NR_PARTS; i++)
		mbar_wait(&sm->full[buf][i], phase);
	__syncwarp();
	if ((threadIdx.x & 31) == 0) {
		if (buf != wg)
			mbar_arrive(&sm->empty[buf][PART_ROPE]);
		mbar_arrive(&sm->empty[buf][PART_LEFT + wg]);
	}
}

/* After a segment's last page. */
template <bool PAIR>
KVK_DEV void tile_end(const struct attn_params &p, const struct mla_seg &g,
		      struct tile_state &st, struct tile_smem *sm)
{
	const int lane = threadIdx.x & 31, wg = threadIdx.x / 128;
	const uint32_t rows =
		min((uint32_t)TILE_ROWS, g.s.q_len * p.nr_q_heads - g.s.hblk * TILE_ROWS);
	const bool slot = g.s.nr_parts > 1 && !(PAIR && sm->pair);

#pragma unroll
	for (int h = 0; h < 2; h++) {
		float l = st.l[h];

		l += __shfl_xor_sync(~0u, l, 1);
		l += __shfl_xor_sync(~0u, l, 2);
		if (lane % 4 == 0)
			sm->lsum[wg][threadIdx.x / 32 % 4 * 16 + lane / 4 + 8 * h] =
				g.poisoned ? NAN : l;
	}
	if (slot)
		tile_tops(st, sm);
	bar_sync(BAR_ALL, 256);
	if constexpr (PAIR) {
		if (g.ok && sm->pair) {
			tile_pair(p, g.s, st, rows, sm);
			return;
		}
	}
	if (g.ok && slot)
		tile_slot(p, g.s, st, rows, sm);
	else if (g.ok)
		tile_write(p, g.s, st, rows, sm);
	else if (g.s.part == 0)
		for (uint32_t e = threadIdx.x; e < rows * (LATENT / 2); e += 256)
			out_store2(p, mla_row_elem(p, g.s, TILE_ROWS, 0) + 2 * e, NAN,
				   NAN);
	if (g.ok && slot)
		slot_arrive(p, g.s, &sm->pend[g.s.part == 0], BAR_ALL);
}

template <int PLANES, bool PAIR>
KVK_DEV void tile_consume(const struct attn_params &p, uint32_t count,
			  struct tile_smem *sm)
{
	/* the compiler must see that whole warps take a branch with wgmma in it */
	const uint32_t wg = __shfl_sync(~0u, threadIdx.x / 128, 0);
	uint32_t seq = 0;

	if (PAIR && threadIdx.x == 0) /* kept there, not in a register */
		sm->pair = pair_is(p);
	for (uint32_t i = 0; i < count; i++) {
		const struct mla_seg &g = sm->segs[i % TILE_SEGS];
		struct tile_state st = {};
		bool there = false; /* page @seq's tile, for its scores */
		uint32_t nr;

		spin_until(&sm->segs_in, i);
		st.m[0] = st.m[1] = -INFINITY;
		tile_load_q(p, g.s, sm);
		nr = __shfl_sync(~0u, g.nr_pieces, 0);
		for (uint32_t n = 0; n < nr; n++, seq++) {
			int32_t valid = (int32_t)(g.s.len - (g.s.page0 + n) * TOKENS);

			if (p.flags & KVK_ATTN_LOADS)
				tile_skip(seq, wg, sm);
			else if ((seq & 1) == wg)
				tile_own<PLANES>(p, g.s, valid, seq, there, st, sm);
			else
				there = tile_other<PLANES>(seq, n + 1 < nr, st, sm);
		}
		tile_end<PAIR>(p, g, st, sm);
		__syncwarp();
		if (threadIdx.x % 32 == 0)
			atoms_add_release(&sm->segs_done, 1);
	}
}

/* The CTA's end: its split units, by all consumers. The tiles are empty and serve as
 * scratch. */
KVK_DEV void tile_finish(const struct attn_params &p, struct tile_smem *sm)
{
	bar_sync(BAR_ALL, 256);
	for (int i = 0; i < 2; i++)
		if (sm->pend[i].epoch)
			slot_finish<tile_words>(p, &sm->pend[i], (float *)sm->tile,
						&sm->flag, threadIdx.x, BAR_ALL);
}

template <int PLANES, bool PAIR>
__global__ void __launch_bounds__(384, 1)
	attn_mla_tile_kernel(const __grid_constant__ struct attn_params p)
{
	using C = tile_cfg<PLANES>;
	DEV_DYNAMIC_SHARED_1K(smem_raw);
	/* a constant, so that addresses and descriptors are; of a pair but for the high bits */
	const uint32_t base = PAIR ? pair_base(SMEM_AT) : SMEM_AT;
	struct tile_smem *sm = (struct tile_smem *)__cvta_shared_to_generic(base);

	if (smem_addr(smem_raw) != base)
		__trap();
	if (threadIdx.x == 0) {
		for (int i = 0; i < 2; i++) {
			for (int k = 0; k < NR_PARTS; k++) {
				mbar_init(&sm->full[i][k], C::FULL_COUNT);
				mbar_init(&sm->empty[i][k], 4);
			}
			for (int k = 0; k < 4; k++) {
				mbar_init(&sm->m_full[i][k], 1);
				mbar_init(&sm->p_full[i][0][k], 1);
				mbar_init(&sm->p_full[i][1][k], 1);
			}
			sm->pend[i].epoch = sm->pend[i].last = 0;
		}
		sm->segs_in = sm->segs_done = 0;
		mbar_init_fence();
	}
	__syncthreads();
	plan_enter(p);
	if (threadIdx.x >= 256) {
		regs_dec<C::REGS_FEED>();
		feed_bf16(p, p.mem.ctas[blockIdx.x], *p.step, sm);
	} else {
		regs_inc<C::REGS_USE>();
		tile_consume<PLANES, PAIR>(p, p.mem.ctas[blockIdx.x].count, sm);
		tile_finish(p, sm);
	}
}

/* @pair: clusters of two */
template <int PLANES, bool PAIR>
static int launch(const struct attn_params *p, uint32_t nr_ctas, cudaStream_t stream)
{
	cudaLaunchAttribute attr[2] = {};
	cudaLaunchConfig_t cfg = {};

	static_assert(sizeof(struct tile_smem) <= 227 * 1024, "too much shared memory");
	if (cudaFuncSetAttribute(attn_mla_tile_kernel<PLANES, PAIR>,
				 cudaFuncAttributeMaxDynamicSharedMemorySize,
				 (int)sizeof(struct tile_smem)) != cudaSuccess)
		return -EIO;
	pair_launch_attrs(PAIR, attr, &cfg);
	cfg.gridDim = dim3(nr_ctas);
	cfg.blockDim = dim3(tile_cfg<PLANES>::NR_THREADS);
	cfg.dynamicSmemBytes = sizeof(struct tile_smem);
	cfg.stream = stream;
	return cudaLaunchKernelEx(&cfg, attn_mla_tile_kernel<PLANES, PAIR>, *p) ==
			       cudaSuccess
		       ? 0
		       : -EIO;
}

int mla_tile_launch(const struct attn_params *p, uint32_t nr_ctas, bool pairs,
		    cudaStream_t stream)
{
	struct attn_params k = *p;

	k.flight = p->flags >> 16 & 15; /* two tiles are enough on their way */
	if (p->flags & KVK_ATTN_FAST)
		return pairs ? launch<1, true>(&k, nr_ctas, stream)
			     : launch<1, false>(&k, nr_ctas, stream);
	return pairs ? launch<2, true>(&k, nr_ctas, stream)
		     : launch<2, false>(&k, nr_ctas, stream);
}
