/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_mla_tile.cuh - constants, shared memory, operands and queries of the MLA decode kernel
 * for up to 64 query rows; attn_mla_tile.cu explains it.
 */
#ifndef KVK_ATTN_MLA_TILE_CUH
#define KVK_ATTN_MLA_TILE_CUH

#include "kernels/attn_mla.cuh"
#include "kernels/attn_mla_tile_ptx.cuh"

#define TILE_ROWS   64	 /* query rows of a CTA */
#define TILE_BLOCK  8192 /* bytes of 64 tokens (or rows) by 64 dims of 16 bits */
#define TILE_BLOCKS 9	 /* latent 0 .. 7, rope 8 */
#define TILE_SEGS   4
#define TILE_SLACK  8.f /* P may grow to 2^8 before its reference is raised */
#define BAR_OWN	    2	/* + warpgroup */

/* Parts of a tile: each has barriers of its own. */
#define PART_ROPE   0 /* block 8 */
#define PART_LEFT   1 /* blocks 0 .. 3: the first warpgroup's values */
#define PART_RIGHT  2 /* blocks 4 .. 7: the second one's */
#define NR_PARTS    3

/* PLANES: P in one or two parts of 16 bits. */
template <int PLANES> struct tile_cfg {
	static constexpr int ES = 2;
	static constexpr int RB = LATENT * ES;
	static constexpr int RR = ROPE * ES;
	static constexpr int ROPE_OFF = TOKENS * RB;
	static constexpr int NR_USE = 8;  /* consumer warps */
	static constexpr int NR_FEED = 4; /* warps that fill the tiles */
	static constexpr int NR_THREADS = (NR_USE + NR_FEED) * 32;
	static constexpr int REGS_USE = 208;
	static constexpr int REGS_FEED = 88;
	static constexpr int FULL_COUNT = NR_FEED * 32; /* every thread's copies */
};

/* Aligned to 1,024 bytes: q and tile are read by wgmma with the 128-byte swizzle. */
struct tile_smem {
	uint8_t q[TILE_BLOCKS][TILE_BLOCK];	  /* [64 dims][row][dim] */
	uint8_t tile[2][TILE_BLOCKS][TILE_BLOCK]; /* [64 dims][token][dim] */
	uint4 px[4][4][32];			  /* P on its way: [warp][k-step][lane] */
	float mx[TILE_ROWS];			  /* reference that goes with px */
	float lsum[2][TILE_ROWS];		  /* at a segment's end */
	float top[2][TILE_ROWS];		  /* ... largest magnitude of O */
	struct mla_seg segs[TILE_SEGS];
	struct plan_pending pend[2];
	uint64_t full[2][NR_PARTS];
	uint64_t empty[2][NR_PARTS];
	uint64_t m_full[2][4];	  /* mx holds what this warp of this warpgroup made */
	uint64_t p_full[2][2][4]; /* px its P: of the first 32 tokens, of the others */
	uint32_t segs_in;
	uint32_t segs_done;
	uint32_t flag;
	uint32_t pair; /* this CTA and the other one of its cluster have a unit alone */
};

/*
 * Descriptor of an operand with the 128-byte swizzle: groups of 8 rows lie 1,024 bytes
 * apart, blocks of 64 columns TILE_BLOCK (only a transposed operand has more than one).
 */
KVK_DEV uint64_t wg_desc(uint32_t addr)
{
	return (uint64_t)((addr & 0x3ffff) >> 4) | ((uint64_t)(TILE_BLOCK >> 4) << 16) |
	       (64ull << 32) | (1ull << 62);
}

/* ------------------------------------------------------------------------------ queries
 */

/* Eight neighbouring values, rounded to bf16. */
KVK_DEV void tile_q_f32(const float *q, uint32_t *v)
{
	const float4 x = *(const float4 *)q, y = *(const float4 *)(q + 4);

	v[0] = pack_bf16(x.x, x.y);
	v[1] = pack_bf16(x.z, x.w);
	v[2] = pack_bf16(y.x, y.y);
	v[3] = pack_bf16(y.z, y.w);
}

/* The block's queries to shared memory, by all consumers; the last ones are done with. */
KVK_DEV void tile_load_q(const struct attn_params &p, const struct plan_seg &s,
			 struct tile_smem *sm)
{
	const uint32_t rows = s.q_len * p.nr_q_heads, first = s.hblk * TILE_ROWS;
	constexpr uint32_t PER = (LATENT + ROPE) / 8; /* chunks of 16 bytes in a row */

	grid_wait();
#pragma unroll 9
	for (uint32_t i = threadIdx.x; i < TILE_ROWS * PER; i += 256) {
		const uint32_t row = i / PER, at = i % PER;
		const size_t d =
			((size_t)s.q0 * p.nr_q_heads + first + row) * (LATENT + ROPE) +
			at * 8;
		uint32_t v[4] = {};

		if (first + row < rows && !p.act_f32) {
			uint4 x = *(const uint4 *)((const __nv_bfloat16 *)p.q + d);

			v[0] = x.x;
			v[1] = x.y;
			v[2] = x.z;
			v[3] = x.w;
		} else if (first + row < rows) {
			tile_q_f32((const float *)p.q + d, v);
		}
		*(uint4 *)(sm->q[at / 8] + row * 128 + ((at ^ row) & 7) * 16) =
			make_uint4(v[0], v[1], v[2], v[3]);
	}
	fence_proxy_async();
	bar_sync(BAR_ALL, 256);
}

#endif /* KVK_ATTN_MLA_TILE_CUH */
