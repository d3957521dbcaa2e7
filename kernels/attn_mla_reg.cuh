/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_mla_reg.cuh - parameters, shared memory, queries and operands of the MLA decode kernel
 * for FP8 pages and up to 64 query rows; attn_mla_reg.cu explains it.
 */
#ifndef KVK_ATTN_MLA_REG_CUH
#define KVK_ATTN_MLA_REG_CUH

#include <cuda.h>
#include "kernels/attn_mla_slot.cuh"
#include "kernels/wgmma.cuh"

#define REG_ROWS  64   /* query rows of a CTA */
#define REG_BLOCK 8192 /* bytes of 64 rows of 128 bytes */
#define REG_SLACK 8.f  /* P may grow to 2^8 before its reference is raised */
#define REG_NONE \
	-1e30f	     /* reference before the first page; finite, as -inf - -inf is not */
#define REG_OWN	   2 /* + warpgroup: its barrier */
#define REG_AT	   1024 /* where dynamic shared memory starts; checked */
#define REG_ROPE   (TOKENS * ROPE)
#define REG_SCALES (TOKENS * 4)

struct reg_params {
	CUtensorMap latent; /* of the layer: byte, token, block of 128, page, extent */
	struct attn_params a;
};

struct reg_cfg {
	static constexpr int NR_WARPS = 8; /* consumers */
	static constexpr int NR_THREADS = 384;
	static constexpr int STAGES = 4;
	static constexpr int REGS_USE = 240;
	static constexpr int REGS_FEED = 24;
};

/*
 * q, latent, rope and p have the 128-byte swizzle (rope not for its keys) and start at multiples of
 * 1,024. P [token][row] f16 of a page: of each 16 tokens 8 are in the page's rope, whose keys are used
 * by then, where the same warp's keys were, and 8 in p[page & 1].
 */
struct reg_smem {
	using C = reg_cfg;
	uint8_t q[9][REG_BLOCK];		 /* [k-steps 4i .. 4i + 3][row] f16 */
	uint8_t latent[C::STAGES][4][REG_BLOCK]; /* [128 dims][token] e4m3 */
	uint8_t rope[C::STAGES][REG_ROPE];	 /* e4m3; then half of the page's P */
	uint8_t p[2][REG_ROPE]; /* the other half, of even and odd pages; or scratch */
	uint8_t scales[C::STAGES][REG_SCALES];
	float m[REG_ROWS];	   /* reference of a row's exponents, log2 */
	float shrink[2][REG_ROWS]; /* what a page's raise makes of older sums */
	struct mla_seg segs[SEG_RING];
	struct plan_pending pend[2];
	uint64_t full[C::STAGES];
	uint64_t empty[C::STAGES];
	uint64_t p_full[2];
	uint64_t p_empty[2];
	uint32_t raised[2]; /* with this P */
	float fixed;	    /* latent scale of pages without scales */
	uint32_t segs_in;
	uint32_t segs_done;
	uint32_t flag;
	uint32_t pair; /* this CTA and the other one of its cluster have a unit alone */
};

/* ------------------------------------------------------------------------------ queries
 */

/* Eight neighbouring values of a row as bf16. */
template <bool F32> KVK_DEV uint4 reg_q_read(const void *q, size_t at)
{
	float4 x, y;

	if (!F32)
		return *(const uint4 *)((const __nv_bfloat16 *)q + at);
	x = *(const float4 *)((const float *)q + at);
	y = *(const float4 *)((const float *)q + at + 4);
	return make_uint4(pack_bf16(x.x, x.y), pack_bf16(x.z, x.w), pack_bf16(y.x, y.y),
			  pack_bf16(y.z, y.w));
}

KVK_DEV uint32_t reg_q_f16(uint32_t two)
{
	const float2 v = unpack_bf16(two);

	return pack_f16(v.x, v.y);
}

/*
 * The block's queries to shared memory, by all consumers; the last ones are done with. Columns
 * are in the order in which lanes hold the bytes of a key (ks_dim()). Lanes take rows and
 * dims so that their words go to 32 different banks; all loads are on their way at once.
 */
template <bool F32>
KVK_DEV void reg_copy_q(const struct attn_params &p, const struct plan_seg &s,
			struct reg_smem *sm)
{
	constexpr int NR = 9 * 16 / reg_cfg::NR_WARPS; /* of a warp: 4 rows, 64 dims */
	const uint32_t rows = s.q_len * p.nr_q_heads, first = s.hblk * REG_ROWS;
	const uint32_t lane = threadIdx.x & 31, pair = lane & 1, c = lane >> 1 & 3;
	const uint32_t w = threadIdx.x / 32;
	uint4 v[NR];

#pragma unroll
	for (int i = 0; i < NR; i++) {
		const uint32_t row = (i % 2 * 8 + w) * 4 + lane / 8;
		const uint32_t dim = ks_dim<true>(i / 2 * 4, (int)c) + pair * 8;

		v[i] = make_uint4(0, 0, 0, 0);
		if (first + row < rows)
			v[i] = reg_q_read<F32>(p.q, ((size_t)s.q0 * p.nr_q_heads + first +
						     row) * (LATENT + ROPE) +
							    dim);
	}
#pragma unroll
	for (int i = 0; i < NR; i++) {
		const uint32_t row = (i % 2 * 8 + w) * 4 + lane / 8;
		const uint32_t two[4] = {v[i].x, v[i].y, v[i].z, v[i].w};

#pragma unroll
		for (uint32_t k = 0; k < 4; k++)
			*(uint32_t *)(sm->q[i / 2] + row * 128 +
				      ((pair * 4 + k) ^ (row & 7)) * 16 + c * 4) =
				reg_q_f16(two[k]);
	}
}

KVK_DEV void reg_load_q(const struct attn_params &p, const struct plan_seg &s,
			struct reg_smem *sm)
{
	grid_wait();
	if (p.act_f32)
		reg_copy_q<true>(p, s, sm);
	else
		reg_copy_q<false>(p, s, sm);
	fence_proxy_async();
	bar_sync(BAR_ALL, 256);
}

/* ----------------------------------------------------------------------------- operands
 */

/*
 * A operands are made one product at a time, REG_AHEAD products ahead, in slots of a ring: when
 * a product is issued, the one that far before it is waited for and its slot filled again. Bytes
 * come from shared memory in groups of four products, 8 words a lane, two groups ahead.
 */
#define REG_AHEAD 2
#define REG_SLOTS (2 * REG_AHEAD)

/* What a thread has of the products to come. */
struct reg_feed {
	uint32_t a[REG_SLOTS][4];
	uint32_t w[2][8];
};

/* Keys, four k-steps: 16 bytes of rows g and g + 8, @next bytes apart. */
KVK_DEV void reg_key_read(uint32_t at, uint32_t next, uint32_t (&w)[8])
{
	lds_one(at, w);
	lds_one(at + next, w + 4);
}

KVK_DEV void reg_key_cvt(const uint32_t (&w)[8], int k, uint32_t *a)
{
	e4m3x4_f16(w[k], a[0], a[2]);
	e4m3x4_f16(w[4 + k], a[1], a[3]);
}

/*
 * Values, one k-step of four products: 8 dims of tokens 2c, 2c + 1, 2c + 8, 2c + 9. Of these dims
 * 2 b and 2 b + 1 are rows g and g + 8 of product b.
 */
KVK_DEV void reg_value_read(uint32_t at, uint32_t (&w)[8])
{
	const uint32_t odd = (at ^ 16) + 128;
	const uint2 v[4] = {lds64(at), lds64(odd), lds64(at + 1024), lds64(odd + 1024)};

#pragma unroll
	for (int i = 0; i < 4; i++) {
		w[2 * i] = v[i].x;
		w[2 * i + 1] = v[i].y;
	}
}

KVK_DEV void reg_value_cvt(const uint32_t (&w)[8], int b, uint32_t *a)
{
	const uint32_t order = b & 1 ? 0x7362 : 0x5140;
	const int i = b / 2;

	e4m3x4_f16(__byte_perm(w[i], w[2 + i], order), a[0], a[1]);
	e4m3x4_f16(__byte_perm(w[4 + i], w[6 + i], order), a[2], a[3]);
}

/* --------------------------------------------------------------------------------- sums
 */

/* A consumer thread's sums. Columns are rows of the block: 8 j + 2 c + e. */
struct reg_state {
	float o[4][32]; /* o[b][4 j + 2 h + e]: dim 2 b + h of the thread's 8 */
	float l[2];	/* of columns 8 g + 2 c + e, this warp's tokens */
};

KVK_DEV void reg_keep(float (&o)[4][32])
{
#pragma unroll
	for (int b = 0; b < 4; b++)
		wgm_keep<32>(o[b]);
}

#endif /* KVK_ATTN_MLA_REG_CUH */
