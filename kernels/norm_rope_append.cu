/* SPDX-License-Identifier: Apache-2.0 */
/*
 * norm_rope_append.cu - query and key of a step from their projections to where attention reads
 * them, in one kernel: norm, rotation, quantisation and the store into the page slot.
 *
 * One after the other these are three to five kernels of 2 us and the gaps between them, of which
 * only the first waits for anything. The bits are those of norm_rope.cu and append.cu, called one
 * after the other: sums run in the same order, each step rounds to BF16 as its store did. What
 * nobody reads, the normed and rotated key outside of its page, is not written.
 *
 * A plane (latent, rope, a head of K, V or q) is LANES lanes of eight neighbouring values. A key's
 * plane goes through append.cuh: verdict first, then WRITE rows only (design 5, P5). Queries are
 * no pages and do not ask for verdicts. Other shapes take the kernels one after the other.
 */
#include "kernels/append.cuh"
#include "kernels/moe_cuda.h"
#include "kernels/norm_rope.cuh"

#define ENTER_GQA_WARPS 4u
#define ENTER_MLA_TOKENS \
	4u /* of a CTA: a warp for each one's latent, one for all ropes */
#define ENTER_MLA_WARPS (ENTER_MLA_TOKENS + 1)
#define ENTER_Q		4u /* heads of q that a lane takes of many: one row of cosines for all */
#define ENTER_GQA_MANY	33u /* tokens from which it does; of fewer it takes one */
#define ENTER_MLA_MANY	1024u

/* Heads of q: where they are, and where they go. */
struct enter_heads {
	const u8 *from;
	u8 *to;
	u32 nr;
	u32 from_head, from_token; /* bytes */
	u32 to_head, to_token;
};

struct enter_params {
	struct append_params ap;
	struct enter_heads q;
	const u8 *kv; /* MLA: latent and rope of a token, side by side */
	const float *q_weight;
	const float *k_weight;
	const float *cos_sin;
	const u32 *positions;
	float q_eps;
	float k_eps;
	u32 rope_dim;
	u32 interleaved;
	u32 key_ctas; /* the others do queries */
};

/* Eight of a norm's weights. */
struct enter_weights {
	float v[8];
};

KVK_DEV struct enter_weights weights_read(const float *from, u32 group)
{
	struct enter_weights w = {};

	if (from) {
		const float4 a = ((const float4 *)from)[group * 2];
		const float4 b = ((const float4 *)from)[group * 2 + 1];

		w.v[0] = a.x, w.v[1] = a.y, w.v[2] = a.z, w.v[3] = a.w;
		w.v[4] = b.x, w.v[5] = b.y, w.v[6] = b.z, w.v[7] = b.w;
	}
	return w;
}

KVK_DEV u32 enter_pack(float lo, float hi)
{
	return kvk_f32_to_bf16(lo) | (u32)kvk_f32_to_bf16(hi) << 16;
}

KVK_DEV float enter_lo(u32 w)
{
	return kvk_bf16_to_f32((u16)w);
}

KVK_DEV float enter_hi(u32 w)
{
	return kvk_bf16_to_f32((u16)(w >> 16));
}

/* Sum of squares over the plane's lanes. */
template <u32 LANES> KVK_DEV float squares(const uint4 &x)
{
	float sum = 0.0f;

#pragma unroll
	for (u32 i = 0; i < 4; i++)
		sum = norm_add(sum, enter_lo(fast_word(x, i)), enter_hi(fast_word(x, i)));
	for (u32 o = LANES / 2; o; o >>= 1)
		sum += __shfl_xor_sync(~0u, sum, (int)o);
	return sum;
}

KVK_DEV uint4 scaled(const uint4 &x, const struct enter_weights &w, float inv)
{
	u32 r[4];

#pragma unroll
	for (u32 i = 0; i < 4; i++)
		r[i] = enter_pack(enter_lo(fast_word(x, i)) * inv * w.v[2 * i],
				  enter_hi(fast_word(x, i)) * inv * w.v[2 * i + 1]);
	return make_uint4(r[0], r[1], r[2], r[3]);
}

/* Cosines and sines of the eight pairs whose first or second values a lane gets. */
struct enter_turn {
	float c[8], s[8];
	u32 a, b; /* lanes of the warp that have the pairs */
	bool on, second;
};

/* @l: lane of the plane; @row: of cos_sin */
template <u32 LANES>
KVK_DEV struct enter_turn turn_read(const struct enter_params &p, u32 l, const float *row,
				    bool on)
{
	const u32 half = p.rope_dim / 2, lanes = half / 8, m = l < lanes ? l : l - lanes;
	const u32 first = threadIdx.x % 32 - threadIdx.x % LANES;
	struct enter_turn t = {};

	t.second = l >= lanes;
	t.on = on && l < 2 * lanes;
	t.a = first + (t.on ? p.interleaved ? 2 * m : m : 0);
	t.b = first + (t.on ? p.interleaved ? 2 * m + 1 : m + lanes : 0);
	if (!t.on)
		return t;
#pragma unroll
	for (u32 k = 0; k < 2; k++) {
		const float4 c = ((const float4 *)row)[m * 2 + k];
		const float4 s = ((const float4 *)(row + half))[m * 2 + k];

		t.c[4 * k] = c.x, t.c[4 * k + 1] = c.y;
		t.c[4 * k + 2] = c.z, t.c[4 * k + 3] = c.w;
		t.s[4 * k] = s.x, t.s[4 * k + 1] = s.y;
		t.s[4 * k + 2] = s.z, t.s[4 * k + 3] = s.w;
	}
	return t;
}

KVK_DEV u32 turned(const struct enter_turn &t, u32 j, float p, float q)
{
	return kvk_f32_to_bf16(t.second ? rope_second(p, q, t.c[j], t.s[j])
					: rope_first(p, q, t.c[j], t.s[j]));
}

/* The lane's values of the rotated plane; by all lanes of the warp. */
KVK_DEV uint4 rotated(const struct enter_params &p, const uint4 &x,
		      const struct enter_turn &t)
{
	u32 a[4], b[4], r[4];

#pragma unroll
	for (u32 i = 0; i < 4; i++) {
		a[i] = __shfl_sync(~0u, fast_word(x, i), (int)t.a);
		b[i] = __shfl_sync(~0u, fast_word(x, i), (int)t.b);
	}
#pragma unroll
	for (u32 i = 0; i < 4; i++) {
		/* pairs 2i and 2i + 1 */
		const u32 v = i < 2 ? a[2 * i] : b[2 * i - 4];
		const u32 w = i < 2 ? a[2 * i + 1] : b[2 * i - 3];

		r[i] = p.interleaved
			       ? turned(t, 2 * i, enter_lo(v), enter_hi(v)) |
					 turned(t, 2 * i + 1, enter_lo(w), enter_hi(w))
						 << 16
			       : turned(t, 2 * i, enter_lo(a[i]), enter_lo(b[i])) |
					 turned(t, 2 * i + 1, enter_hi(a[i]),
						enter_hi(b[i]))
						 << 16;
	}
	return t.on ? make_uint4(r[0], r[1], r[2], r[3]) : x;
}

KVK_DEV const float *turn_row(const struct enter_params &p, u32 t)
{
	return p.cos_sin + (size_t)load_now(p.positions + t) * p.rope_dim;
}

/* ---------------------------------------------------------------------------------- queries */

/* Warps that the queries of a token take, @heads of a lane. */
static __host__ __device__ __forceinline__ u32 query_warps(const struct enter_heads &q,
							   u32 lanes, u32 heads)
{
	const u32 per = 32 / lanes * heads;

	return (q.nr + per - 1) / per;
}

/* The queries of a token of which @warp is one of the warps. Q heads of a lane; NORM: heads are
 * LANES * 8 values. */
template <u32 LANES, u32 Q, bool NORM>
KVK_DEV void enter_queries(const struct enter_params &p, u32 warp)
{
	const u32 warps = query_warps(p.q, LANES, Q), t = warp / warps,
		  l = threadIdx.x % LANES;
	const u32 h0 = warp % warps * (32 / LANES * Q) + threadIdx.x % 32 / LANES;
	const bool in = t < p.ap.a.batch.nr_tokens;
	const bool norm = NORM && p.q_weight;
	const struct enter_weights w = weights_read(norm ? p.q_weight : NULL, l);
	struct fast_values<1> x[Q];
	struct enter_turn turn;

	dev_grid_wait();
#pragma unroll
	for (u32 k = 0; k < Q; k++) {
		const u32 h = h0 + k * (32 / LANES);

		fast_read<LANES, 1>(x[k],
				    p.q.from + (size_t)t * p.q.from_token +
					    (size_t)h * p.q.from_head,
				    in && h < p.q.nr);
	}
	turn = turn_read<LANES>(p, l, turn_row(p, in ? t : 0), true);
#pragma unroll
	for (u32 k = 0; k < Q; k++) {
		const u32 h = h0 + k * (32 / LANES);
		uint4 v = x[k].v[0];

		if (norm)
			v = scaled(v, w,
				   norm_inverse(squares<LANES>(v), LANES * 8, p.q_eps));
		v = rotated(p, v, turn);
		if (in && h < p.q.nr)
			((uint4 *)(p.q.to + (size_t)t * p.q.to_token +
				   (size_t)h * p.q.to_head))[l] = v;
	}
}

/* ------------------------------------------------------------------------------------- MLA */

template <bool E4M3, bool TOKEN>
KVK_DEV void enter_latent(const struct enter_params &p, u32 t)
{
	const struct dev_plane pl = dev_plane_get(&p.ap.a.pages.layout, p.ap.a.layer, 0);
	const bool in = t < p.ap.a.batch.nr_tokens;
	const struct kvk_quant fixed = fast_fixed<E4M3, TOKEN>(p.ap.a.pages.scales, pl);
	const u32 lane = threadIdx.x % 32;
	const struct enter_weights w0 = weights_read(p.k_weight, lane);
	const struct enter_weights w1 = weights_read(p.k_weight, lane + 32);
	struct fast_values<2> x;
	struct fast_coded<2> coded;
	struct append_place at;
	float inv;
	u8 *part;

	dev_grid_wait();
	fast_read<32, 2>(x, p.kv + (size_t)t * 1152, in);
	place_find(p.ap, t, &at);
	inv = norm_inverse(squares<32>(x.v[0]) + squares<32>(x.v[1]), 512, p.k_eps);
	x.v[0] = scaled(x.v[0], w0, inv);
	x.v[1] = scaled(x.v[1], w1, inv);
	fast_encode<32, 2, E4M3, TOKEN>(coded, x, fixed);
	part = place_part(p.ap, at);
	if (!part)
		return;
	fast_store<32, 2, E4M3, TOKEN>(part, pl, at.slot, coded);
	append_nan(p.ap, coded.nr_nan);
}

template <bool E4M3, bool TOKEN>
KVK_DEV void enter_key_rope(const struct enter_params &p, u32 t)
{
	const struct dev_plane pl = dev_plane_get(&p.ap.a.pages.layout, p.ap.a.layer, 1);
	const bool in = t < p.ap.a.batch.nr_tokens;
	const struct kvk_quant fixed = fast_fixed<E4M3, TOKEN>(p.ap.a.pages.scales, pl);
	struct fast_values<1> x;
	struct fast_coded<1> coded;
	struct append_place at;
	struct enter_turn turn;
	const float *row;
	u8 *part;

	dev_grid_wait();
	fast_read<8, 1>(x, p.kv + (size_t)t * 1152 + 1024, in);
	row = turn_row(p, in ? t : 0);
	place_find(p.ap, t, &at);
	turn = turn_read<8>(p, threadIdx.x % 8, row, true);
	x.v[0] = rotated(p, x.v[0], turn);
	fast_encode<8, 1, E4M3, TOKEN>(coded, x, fixed);
	part = place_part(p.ap, at);
	if (!part)
		return;
	fast_store<8, 1, E4M3, TOKEN>(part, pl, at.slot, coded);
	append_nan(p.ap, coded.nr_nan);
}

template <u32 Q, bool E4M3, bool TOKEN>
__global__ void __launch_bounds__(32 * ENTER_MLA_WARPS)
	enter_mla_kernel(const __grid_constant__ struct enter_params p)
{
	const u32 warp = threadIdx.x / 32, t = blockIdx.x * ENTER_MLA_TOKENS;

	dev_grid_launch();
	if (blockIdx.x >= p.key_ctas)
		enter_queries<8, Q, false>(
			p, (blockIdx.x - p.key_ctas) * ENTER_MLA_WARPS + warp);
	else if (warp < ENTER_MLA_TOKENS)
		enter_latent<E4M3, TOKEN>(p, t + warp);
	else
		enter_key_rope<E4M3, TOKEN>(p, t + threadIdx.x % 32 / 8);
}

/* ------------------------------------------------------------------------------------- GQA */

/* Warps that K and V of a token take: 32 / LANES planes each. */
static __host__ __device__ __forceinline__ u32 key_warps(const struct enter_params &p,
							 u32 lanes)
{
	return (p.ap.nr_planes + 32 / lanes - 1) / (32 / lanes);
}

/* K and V of head 0, of head 1, ... of a token. All lanes do everything and keep what is theirs. */
template <u32 LANES, bool E4M3, bool TOKEN>
KVK_DEV void enter_keys(const struct enter_params &p, u32 warp)
{
	const u32 warps = key_warps(p, LANES), t = warp / warps, l = threadIdx.x % LANES;
	const u32 plane = warp % warps * (32 / LANES) + threadIdx.x % 32 / LANES;
	const bool in = t < p.ap.a.batch.nr_tokens && plane < p.ap.nr_planes;
	const float *weight = plane % 2 ? NULL : p.k_weight;
	const struct dev_plane pl =
		dev_plane_get(&p.ap.a.pages.layout, p.ap.a.layer, in ? plane : 0);
	const struct kvk_quant fixed = fast_fixed<E4M3, TOKEN>(p.ap.a.pages.scales, pl);
	const struct enter_weights w = weights_read(weight, l);
	struct append_place at;
	struct fast_values<1> x;
	struct fast_coded<1> coded;
	struct enter_turn turn;
	const float *row;
	uint4 normed;
	u8 *part;

	dev_grid_wait();
	fast_read<LANES, 1>(x, append_src(p.ap, t, plane, LANES * 8), in);
	row = turn_row(p, in ? t : 0);
	place_find(p.ap, in ? t : p.ap.a.batch.nr_tokens, &at);
	turn = turn_read<LANES>(p, l, row, plane % 2 == 0);
	normed = scaled(x.v[0], w,
			norm_inverse(squares<LANES>(x.v[0]), LANES * 8, p.k_eps));
	x.v[0] = rotated(p, weight ? normed : x.v[0], turn);
	fast_encode<LANES, 1, E4M3, TOKEN>(coded, x, fixed);
	part = place_part(p.ap, at);
	if (!part)
		return;
	fast_store<LANES, 1, E4M3, TOKEN>(part, pl, at.slot, coded);
	append_nan(p.ap, coded.nr_nan);
}

template <u32 LANES, u32 Q, bool E4M3, bool TOKEN>
__global__ void __launch_bounds__(32 * ENTER_GQA_WARPS)
	enter_gqa_kernel(const __grid_constant__ struct enter_params p)
{
	const u32 warp = threadIdx.x / 32;

	dev_grid_launch();
	if (blockIdx.x < p.key_ctas)
		enter_keys<LANES, E4M3, TOKEN>(p, blockIdx.x * ENTER_GQA_WARPS + warp);
	else
		enter_queries<LANES, Q, true>(
			p, (blockIdx.x - p.key_ctas) * ENTER_GQA_WARPS + warp);
}

/* ---------------------------------------------------------------------------------- launcher */

/* One after the other. */
static int enter_parts(const struct kvk_norm_rope_append_args *a, kvk_stream stream)
{
	int r = a->q_norm.weight ? kvk_norm_cuda(&a->q_norm, stream) : 0;

	if (!r && a->k_norm.weight)
		r = kvk_norm_cuda(&a->k_norm, stream);
	if (!r)
		r = kvk_rope_cuda(&a->q_rope, stream);
	if (!r)
		r = kvk_rope_cuda(&a->k_rope, stream);
	return r ? r : kvk_append_cuda(&a->append, stream);
}

/* Rows of @cols BF16 values from @x to @y, as norm_rope.cu takes them in one trip. */
static bool norm_fits(const struct kvk_norm_args *n, const void *x, const void *y,
		      u32 nr_rows, u32 cols, u32 x_stride)
{
	return n->x == x && n->y == y && !n->residual && n->nr_rows == nr_rows &&
	       n->cols == cols && (n->x_stride ? n->x_stride : cols) == x_stride &&
	       (!n->y_stride || n->y_stride == cols) && n->act_dtype == KVK_BF16 &&
	       dev_aligned(n->weight, 16);
}

static bool rope_fits(const struct kvk_rope_args *r, const struct kvk_rope_args *key,
		      u32 nr_tokens)
{
	return r->x && r->positions && r->positions == key->positions && r->cos_sin &&
	       r->cos_sin == key->cos_sin && dev_aligned(r->cos_sin, 16) &&
	       r->nr_tokens == nr_tokens && r->nr_heads && r->rope_dim &&
	       r->rope_dim == key->rope_dim && r->rope_dim % 16 == 0 &&
	       r->interleaved == key->interleaved && r->act_dtype == KVK_BF16 &&
	       kvk_rope_places_ok(r);
}

/* q's heads as bytes; false: a lane's values would not be 16 aligned ones. */
static bool heads_make(const struct kvk_rope_args *r, struct enter_heads *q)
{
	const bool here = !r->y;
	const u32 y_offset = here ? r->offset : r->y_offset;

	q->from = (const u8 *)r->x + r->offset * 2ull;
	q->to = (u8 *)(here ? r->x : r->y) + y_offset * 2ull;
	q->nr = r->nr_heads;
	q->from_head = r->head_stride * 2;
	q->from_token = r->token_stride * 2;
	q->to_head = (here ? r->head_stride : r->y_head_stride) * 2;
	q->to_token = (here ? r->token_stride : r->y_token_stride) * 2;
	return dev_aligned(q->from, 16) && dev_aligned(q->to, 16) &&
	       q->from_head % 16 == 0 && q->from_token % 16 == 0 &&
	       q->to_head % 16 == 0 && q->to_token % 16 == 0;
}

static bool enter_mla_fits(const struct kvk_norm_rope_append_args *a,
			   struct enter_params *p)
{
	const struct kvk_rope_args *k = &a->k_rope;
	const u32 n = a->append.batch.nr_tokens;

	p->kv = (const u8 *)a->k_norm.x;
	return !a->q_norm.weight && a->k_norm.weight &&
	       norm_fits(&a->k_norm, k->x, a->append.latent, n, 512, 576) &&
	       dev_aligned(p->kv, 16) && k->y == a->append.rope && k->nr_heads == 1 &&
	       k->rope_dim == 64 && k->offset == 512 && k->y_offset == 0 &&
	       k->token_stride == 576 && k->y_token_stride == 64;
}

static bool enter_gqa_fits(const struct kvk_norm_rope_append_args *a,
			   struct enter_params *p)
{
	const struct kvk_rope_args *k = &a->k_rope, *q = &a->q_rope;
	const u32 dim = a->append.pages.layout.head_dim, n = a->append.batch.nr_tokens;
	const u32 nr_kv = a->append.pages.layout.nr_kv_heads;

	if (a->q_norm.weight &&
	    !norm_fits(&a->q_norm, q->x, q->x, n * q->nr_heads, dim, dim))
		return false;
	if (a->k_norm.weight && !norm_fits(&a->k_norm, k->x, k->x, n * nr_kv, dim, dim))
		return false;
	/* heads side by side, rotated where they are */
	return k->x == a->append.k && (!k->y || k->y == k->x) && k->nr_heads == nr_kv &&
	       k->head_stride == dim && k->token_stride == nr_kv * dim && !k->offset &&
	       (!k->y || (k->y_head_stride == dim && k->y_token_stride == nr_kv * dim &&
			  !k->y_offset)) &&
	       (!q->y || q->y == q->x) && q->head_stride == dim && !q->offset &&
	       q->token_stride == q->nr_heads * dim &&
	       (!q->y || (q->y_head_stride == dim && !q->y_offset &&
			  q->y_token_stride == q->token_stride)) &&
	       k->rope_dim <= dim && p->q.nr < 65536;
}

/* enum fast_shape of one kernel for it all, and its parameters; FAST_NONE: the parts. */
static u32 enter_shape(const struct kvk_norm_rope_append_args *a, struct enter_params *p)
{
	const u32 n = a->append.batch.nr_tokens;
	u32 shape;

	p->ap = append_params_make(&a->append);
	shape = append_shape(&p->ap);
	if (shape == FAST_NONE || !rope_fits(&a->q_rope, &a->k_rope, n) ||
	    !rope_fits(&a->k_rope, &a->k_rope, n) || !heads_make(&a->q_rope, &p->q) ||
	    !(shape == FAST_MLA ? enter_mla_fits(a, p) : enter_gqa_fits(a, p)))
		return FAST_NONE;
	p->q_weight = a->q_norm.weight;
	p->k_weight = a->k_norm.weight;
	p->q_eps = a->q_norm.eps;
	p->k_eps = a->k_norm.eps;
	p->cos_sin = a->k_rope.cos_sin;
	p->positions = a->k_rope.positions;
	p->rope_dim = a->k_rope.rope_dim;
	p->interleaved = a->k_rope.interleaved;
	return shape;
}

static u32 ctas_of(u64 warps, u32 per)
{
	return (u32)((warps + per - 1) / per);
}

template <u32 LANES, u32 Q, bool E4M3, bool TOKEN>
static void enter_gqa_launch(struct enter_params &p, kvk_stream stream)
{
	const u64 nr = p.ap.a.batch.nr_tokens;
	const u32 q_ctas = ctas_of(nr * query_warps(p.q, LANES, Q), ENTER_GQA_WARPS);

	p.key_ctas = ctas_of(nr * key_warps(p, LANES), ENTER_GQA_WARPS);
	DEV_LAUNCH_EARLY((enter_gqa_kernel<LANES, Q, E4M3, TOKEN>), p.key_ctas + q_ctas,
			 32 * ENTER_GQA_WARPS, stream, p);
}

template <u32 Q, bool E4M3, bool TOKEN>
static void enter_mla_launch(struct enter_params &p, kvk_stream stream)
{
	const u64 nr = p.ap.a.batch.nr_tokens;
	const u32 q_ctas = ctas_of(nr * query_warps(p.q, 8, Q), ENTER_MLA_WARPS);

	p.key_ctas = ctas_of(nr, ENTER_MLA_TOKENS);
	DEV_LAUNCH_EARLY((enter_mla_kernel<Q, E4M3, TOKEN>), p.key_ctas + q_ctas,
			 32 * ENTER_MLA_WARPS, stream, p);
}

/*
 * us, one and four heads of a lane: GQA 96/8 of 1 token 2.5, 3.0; 16 3.1, 3.2; 64 4.7, 4.6; 256 12.7,
 * 10.7. MLA with 64 heads of 256 tokens 3.9, 4.1.
 */
template <bool E4M3, bool TOKEN>
static void enter_launch(struct enter_params &p, u32 shape, kvk_stream stream)
{
	const u32 nr = p.ap.a.batch.nr_tokens;

	if (shape == FAST_GQA64 && nr < ENTER_GQA_MANY)
		enter_gqa_launch<8, 1, E4M3, TOKEN>(p, stream);
	else if (shape == FAST_GQA64)
		enter_gqa_launch<8, ENTER_Q, E4M3, TOKEN>(p, stream);
	else if (shape == FAST_GQA128 && nr < ENTER_GQA_MANY)
		enter_gqa_launch<16, 1, E4M3, TOKEN>(p, stream);
	else if (shape == FAST_GQA128)
		enter_gqa_launch<16, ENTER_Q, E4M3, TOKEN>(p, stream);
	else if (nr < ENTER_MLA_MANY)
		enter_mla_launch<1, E4M3, TOKEN>(p, stream);
	else
		enter_mla_launch<ENTER_Q, E4M3, TOKEN>(p, stream);
}

int kvk_norm_rope_append_cuda(const struct kvk_norm_rope_append_args *a,
			      kvk_stream stream)
{
	const u32 nr = a->append.batch.nr_tokens;
	struct enter_params p = {};
	u32 shape;
	int r = append_check(&a->append);

	if (r)
		return r;
	shape = nr ? enter_shape(a, &p) : (u32)FAST_NONE;
	if (shape == FAST_NONE)
		return enter_parts(a, stream);
	if (a->append.pages.layout.dtype != KV_DTYPE_E4M3)
		enter_launch<false, false>(p, shape, stream);
	else if (a->append.pages.layout.scale_kind == KV_SCALE_TOKEN)
		enter_launch<true, true>(p, shape, stream);
	else
		enter_launch<true, false>(p, shape, stream);
	return dev_launched();
}
