/* SPDX-License-Identifier: Apache-2.0 */
/*
 * linear_end.cuh - what linear_mid.cu and linear_fp8.cu share: which columns a CTA takes, the
 * sum over a cluster's CTAs into y, tensor maps and the launch. Hopper.
 *
 * Either a CTA of a cluster takes one or two of linear.cu's chains (columns in blocks of 128: c,
 * c + 8, ...; and those of c + 4) and the chains are added in turn out of each other's shared
 * memory, or a CTA takes all chains of its rows in turn. The bits are the same. Eight CTAs have
 * to find room in one GPC: of clusters of eight with half an SM each some 28 run at once, of
 * clusters of four all.
 */
#ifndef KVK_LINEAR_END_CUH
#define KVK_LINEAR_END_CUH

#include "kernels/moe_ptx.cuh"
#include "kernels/tensor_map.cuh"
#include "kernels/tile_ptx.cuh"

#define END_CHAINS 8u  /* of linear.cu: its warps */
#define END_STEP   8u  /* tokens that a tile's threads store at once */
#define END_EIGHTS 28u /* clusters of eight that run at once, two CTAs on an SM */

/* y, and what is added, in whole, aligned groups of four, or as they come */
#define END_ANY	   0u
#define END_BF16   1u
#define END_F32	   2u

struct end_params {
	struct kvk_linear_args a;
	u64 y_stride;
	u64 y_batch;
	u32 nr_blocks; /* of 128 columns */
	u32 ctas;      /* of a cluster; 1: alone */
	u32 parts;     /* chains of each CTA that are added up apart; alone: 1 */
	u32 kind;      /* of y: END_BF16, END_F32, END_ANY */
};

/* The block behind @kb in its chain, or the first of the CTA's next chain; nr_blocks: none. */
KVK_DEV u32 end_next(const struct end_params &p, u32 kb)
{
	const u32 first = kb % END_CHAINS + p.ctas;

	if (kb + END_CHAINS < p.nr_blocks)
		return kb + END_CHAINS;
	return first < min(p.nr_blocks, END_CHAINS) ? first : p.nr_blocks;
}

/* How many blocks a CTA has whose first chain is @chain. */
KVK_DEV u32 end_count(const struct end_params &p, u32 chain)
{
	u32 nr = 0;

	for (u32 c = chain; c < END_CHAINS; c += p.ctas)
		nr += (p.nr_blocks + END_CHAINS - 1 - c) / END_CHAINS;
	return nr;
}

/* Block number *@i of a CTA from its chain *@chain on; both go to the chain that has it. */
KVK_DEV u32 end_block(const struct end_params &p, u32 *chain, u32 *i)
{
	for (; *chain < END_CHAINS; *chain += p.ctas) {
		const u32 nr = (p.nr_blocks + END_CHAINS - 1 - *chain) / END_CHAINS;

		if (*i < nr)
			break;
		*i -= nr;
	}
	return *chain + *i * END_CHAINS;
}

/* Behind block @kb: a chain's sums to those before it; two parts: the second one stays. */
template <u32 M>
KVK_DEV void end_chain(const struct end_params &p, u32 kb, float (&acc)[M],
		       float (&total)[M])
{
	if (kb + END_CHAINS < p.nr_blocks || (p.parts == 2 && kb % END_CHAINS >= p.ctas))
		return;
#pragma unroll
	for (u32 i = 0; i < M; i++)
		total[i] += acc[i], acc[i] = 0;
}

/* ----------------------------------------------------------------------------- adding up */

/* Four rows of what is added, from @at on; of END_ANY those from @nr on are not there. */
template <u32 KIND> KVK_DEV void end_get4(const float *add, u64 at, u32 nr, float (&v)[4])
{
	if (KIND != END_ANY) {
		const float4 f = *(const float4 *)(add + at);

		v[0] = f.x, v[1] = f.y, v[2] = f.z, v[3] = f.w;
	} else {
#pragma unroll
		for (u32 i = 0; i < 4; i++)
			if (i < nr)
				v[i] = add[at + i];
	}
}

template <u32 KIND>
KVK_DEV void end_put4(void *y, u32 dtype, u64 at, u32 nr, const float (&v)[4])
{
	if (KIND == END_F32) {
		*(float4 *)((float *)y + at) = make_float4(v[0], v[1], v[2], v[3]);
	} else if (KIND == END_BF16) {
		*(uint2 *)((u16 *)y + at) =
			make_uint2(ptx_bf16x2(v[0], v[1]), ptx_bf16x2(v[2], v[3]));
	} else {
#pragma unroll
		for (u32 i = 0; i < 4; i++) {
			if (i < nr && dtype == KVK_F32)
				((float *)y)[at + i] = v[i];
			else if (i < nr)
				((u16 *)y)[at + i] = kvk_f32_to_bf16(v[i]);
		}
	}
}

/* Four rows of a token, summed over the chains in turn: chain c is part c / ctas of CTA c % ctas.
 * @bytes: of a part */
KVK_DEV float4 end_sum(const struct end_params &p, const float4 *part, u32 bytes)
{
	const u32 nr = p.ctas * p.parts;
	float4 v[END_CHAINS], sum = make_float4(0, 0, 0, 0);

	if (p.ctas == 1)
		return *part;
#pragma unroll
	for (u32 c = 0; c < END_CHAINS; c++)
		if (c < nr)
			v[c] = tile_cluster_get(
				(const float4 *)((const u8 *)part +
						 (c < p.ctas ? 0 : bytes)),
				c < p.ctas ? c : c - p.ctas);
#pragma unroll
	for (u32 c = 0; c < END_CHAINS; c++) {
		if (c >= nr)
			continue;
		sum.x += v[c].x;
		sum.y += v[c].y;
		sum.z += v[c].z;
		sum.w += v[c].w;
	}
	return sum;
}

/*
 * The sums to shared memory, then y: this CTA's share of the tokens. What is added comes before
 * the barrier, all of it at once: a load behind each store took 6 us. No sum is -0, so nothing
 * changes by adding a bias or an @add that are not there.
 * @part: [parts][N][ROWS + 4], so that no bank is met twice; @lane_row: the tile's row of [0]
 */
template <u32 ROWS, u32 N, u32 KIND>
KVK_DEV void end_store(const struct end_params &p, float *part, u32 tile, u32 chain,
		       u32 lane_row, const float (&total)[N / 2],
		       const float (&acc)[N / 2])
{
	const u32 lanes = ROWS / 4, line = ROWS + 4, most = N / END_STEP;
	const u32 t = threadIdx.x, share = max(N / p.ctas, 1u), first = chain * share;
	const u32 row = tile * ROWS + t % lanes * 4;
	const u32 nr = row < p.a.w.rows ? min(p.a.w.rows - row, 4u) : 0;
	const u32 left = p.a.nr_tokens - min(p.a.nr_tokens, blockIdx.z * N);
	const u32 end = nr && first < N ? min(left, first + share) : 0;
	const u64 base = blockIdx.z * N * p.y_stride + blockIdx.y * p.y_batch + row;
	const u32 dtype = p.a.y_dtype;
	float add[most][4] = {}, bias[4] = {};

#pragma unroll
	for (u32 k = 0; k < most; k++) {
		const u32 tok = first + t / lanes + k * END_STEP;

		if (!p.a.add || tok >= end)
			break;
		end_get4<KIND>(p.a.add, base + tok * p.y_stride, nr, add[k]);
	}
#pragma unroll
	for (u32 i = 0; i < 4; i++)
		if (p.a.bias && i < nr)
			bias[i] = p.a.bias[row + i];
#pragma unroll
	for (u32 i = 0; i < N / 2; i++) {
		const u32 at =
			(i / 4 * 8 + t % 4 * 2 + i % 2) * line + lane_row + i % 4 / 2 * 8;

		part[at] = total[i];
		if (p.parts == 2)
			part[at + N * line] = acc[i];
	}
	tile_cluster_sync();
#pragma unroll
	for (u32 k = 0; k < most; k++) {
		const u32 tok = first + t / lanes + k * END_STEP;

		/* not one branch after the other over code that nobody has fetched: 2 us */
		if (tok >= end)
			break;
		const float4 sum =
			end_sum(p, (const float4 *)(part + tok * line + t % lanes * 4),
				N * line * 4);
		float v[4] = {sum.x, sum.y, sum.z, sum.w};

#pragma unroll
		for (u32 i = 0; i < 4; i++)
			v[i] = v[i] + bias[i] + add[k][i];
		end_put4<KIND>(p.a.y, dtype, base + tok * p.y_stride, nr, v);
	}
}

/* By the 2 ROWS threads that multiplied; the others of the cluster meet them once. */
template <u32 ROWS, u32 N>
KVK_DEV void end_finish(const struct end_params &p, float *part, u32 tile, u32 chain,
			u32 lane_row, const float (&total)[N / 2],
			const float (&acc)[N / 2])
{
	if (p.kind == END_BF16)
		end_store<ROWS, N, END_BF16>(p, part, tile, chain, lane_row, total, acc);
	else if (p.kind == END_F32)
		end_store<ROWS, N, END_F32>(p, part, tile, chain, lane_row, total, acc);
	else
		end_store<ROWS, N, END_ANY>(p, part, tile, chain, lane_row, total, acc);
}

/* ------------------------------------------------------------------------------ launching */

static inline struct end_params end_make(const struct kvk_linear_args *a)
{
	const u32 vec_bytes = a->y_dtype == KVK_F32 ? 16 : 8;
	struct end_params p = {};

	p.a = *a;
	p.y_batch = kvk_linear_y_batch(a);
	p.y_stride = kvk_linear_y_stride(a);
	if (a->w.rows % 4 == 0 && p.y_stride % 4 == 0 && p.y_batch % 4 == 0 &&
	    dev_aligned(a->y, vec_bytes) && dev_aligned(a->add, 16))
		p.kind = a->y_dtype == KVK_F32 ? END_F32 : END_BF16;
	p.nr_blocks = (a->w.cols + 127) / 128;
	p.ctas = p.parts = 1;
	return p;
}

/* Tiles of @rows x @n */
static inline u64 end_tiles(const struct kvk_linear_args *a, u32 rows, u32 n)
{
	return (u64)((a->w.rows + rows - 1) / rows) * a->nr_batch *
	       ((a->nr_tokens + n - 1) / n);
}

/* A CTA per chain; half as many if there are more than @eights tiles: clusters of eight that
 * run at once. */
static inline void end_split(struct end_params *p, u64 tiles, u32 eights)
{
	while (p->ctas < KV_MIN(p->nr_blocks, END_CHAINS))
		p->ctas *= 2;
	if (p->ctas == END_CHAINS && tiles > eights)
		p->ctas /= 2, p->parts = 2;
}

/* struct end_map - [batch][rows][cols], in boxes of 128 bytes x @box_rows; strides: bytes */
struct end_map {
	const void *data;
	u64 rows;
	u64 row_stride;
	u64 batch_stride;
	CUtensorMapDataType type;
	u32 box_rows;
	u32 rank;
};

static int end_encode(const struct kvk_linear_args *a, CUtensorMap *map,
		      const struct end_map &m)
{
	const bool wide = m.type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
	const cuuint64_t dims[5] = {a->w.cols, m.rows, a->nr_batch, 1, 1};
	const cuuint64_t strides[4] = {m.row_stride, m.batch_stride, m.batch_stride,
				       m.batch_stride};
	const cuuint32_t box[5] = {wide ? 64u : 128u, m.box_rows, 1, 1, 1};
	const cuuint32_t step[5] = {1, 1, 1, 1, 1};
	const tensor_encode_fn encode = tensor_encode_find();

	return encode && encode(map, m.type, m.rank, (void *)m.data, dims, strides, box,
				step, CU_TENSOR_MAP_INTERLEAVE_NONE,
				CU_TENSOR_MAP_SWIZZLE_128B,
				CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
				CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS
		       ? 0
		       : -EIO;
}

/* @w: [batch][rows][cols] of @type, and @x: [tokens][batch][cols] in BF16, @n at a time */
static int end_maps(const struct kvk_linear_args *a, CUtensorMap *w, CUtensorMap *x,
		    CUtensorMapDataType type, u32 rows, u32 n)
{
	const u64 bytes = type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 ? 2 : 1;
	const u64 xs = kvk_linear_x_stride(a);
	struct end_map m = {};
	int r;

	m.data = a->w.data;
	m.rows = a->w.rows;
	m.row_stride = a->w.cols * bytes;
	m.batch_stride = m.row_stride * a->w.rows;
	m.type = type;
	m.box_rows = rows;
	m.rank = 5;
	r = end_encode(a, w, m);
	if (r)
		return r;
	m.data = a->x;
	m.rows = a->nr_tokens;
	m.row_stride = xs * 2;
	/* one matrix: its stride to the next one is not used, and any will do */
	m.batch_stride = (a->nr_batch == 1 ? xs : kvk_linear_x_batch(a)) * 2;
	m.type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
	m.box_rows = n;
	m.rank = 4;
	return end_encode(a, x, m);
}

/* grid: (CTAs of a cluster x tiles of rows, matrices, runs of n tokens) */
template <class P>
static int end_launch(void (*kernel)(P), const P &p, u32 rows, u32 n, u32 threads,
		      u32 bytes, kvk_stream stream)
{
	const struct kvk_linear_args *a = &p.e.a;
	cudaLaunchAttribute attr[2] = {};
	cudaLaunchConfig_t cfg = {};

	if (cudaFuncSetAttribute((const void *)kernel,
				 cudaFuncAttributeMaxDynamicSharedMemorySize,
				 (int)bytes) != cudaSuccess) {
		(void)cudaGetLastError();
		return -EIO;
	}
	attr[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
	attr[0].val.programmaticStreamSerializationAllowed = 1;
	attr[1].id = cudaLaunchAttributeClusterDimension;
	attr[1].val.clusterDim.x = p.e.ctas;
	attr[1].val.clusterDim.y = attr[1].val.clusterDim.z = 1;
	cfg.gridDim = dim3((a->w.rows + rows - 1) / rows * p.e.ctas, a->nr_batch,
			   (a->nr_tokens + n - 1) / n);
	cfg.blockDim = dim3(threads);
	cfg.dynamicSmemBytes = bytes;
	cfg.stream = (cudaStream_t)stream;
	cfg.attrs = attr;
	cfg.numAttrs = p.e.ctas > 1 ? 2 : 1;
	return cudaLaunchKernelEx(&cfg, kernel, p) ? -EIO : 0;
}

#endif /* KVK_LINEAR_END_CUH */
