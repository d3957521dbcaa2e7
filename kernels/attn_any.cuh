/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_any.cuh - attention of any kind, dtype and shape: one CTA per query row, its warps
 * walk every eighth visible position. T is the arithmetic: float for the fallback
 * launcher, double for the bench's and the tests' reference. Nothing is shared with the
 * fast kernels but layout.h, so that one can judge the other.
 */
#ifndef KVK_ATTN_ANY_CUH
#define KVK_ATTN_ANY_CUH

#include "kernels/common.cuh"
#include "kernels/fp8.h"
#include "kernels/kernels.h"

#include <math.h>

#define ANY_DIM_MAX 576u /* values of a query row */
#define ANY_PER	    (ANY_DIM_MAX / 32)
#define ANY_WARPS   8u

struct any_args {
	struct kvk_pages pages;
	struct kvk_batch batch;
	const void *q;
	void *out; /* act_dtype; f64 if T is double */
	float sm_scale;
	uint32_t layer;
	uint32_t nr_q_heads;
	uint32_t act_f32;
};

KVK_DEV float any_value(const uint8_t *p, uint32_t dtype, uint32_t i)
{
	if (dtype == KV_DTYPE_E4M3)
		return kvk_e4m3_decode(p[i]);
	if (dtype == KV_DTYPE_BF16)
		return kvk_bf16_to_f32(((const uint16_t *)p)[i]);
	return ((const float *)p)[i];
}

/* Where a position's key and value are: K is one or two vectors (latent, rope). */
struct any_pos {
	const uint8_t *k0;
	const uint8_t *k1;
	const uint8_t *v;
	float s0;
	float s1;
	float sv;
};

KVK_DEV struct any_pos any_locate(const struct any_args &a, uint32_t row, uint32_t slot,
				  uint32_t head)
{
	const struct kv_layout *l = &a.pages.layout;
	const uint8_t *page = (const uint8_t *)a.pages.base +
			      kv_page_offset(&a.pages.geometry, a.batch.rows[row].pfn) +
			      (uint64_t)kv_layer_stride(l) * a.layer;
	struct any_pos r;

	r.s0 = r.s1 = r.sv = 1.0f;
	if (l->kind == KV_LAYOUT_MLA) {
		const uint16_t *sc = (const uint16_t *)(page + kv_mla_scale_off(l, slot));

		r.k0 = r.v = page + kv_mla_latent_off(l, slot);
		r.k1 = page + kv_mla_rope_off(l, slot);
		if (l->scale_kind == KV_SCALE_TOKEN) {
			r.s0 = r.sv = kvk_f16_to_f32(sc[0]);
			r.s1 = kvk_f16_to_f32(sc[1]);
		} else if (l->scale_kind == KV_SCALE_STATIC) {
			r.s0 = r.s1 = r.sv = a.pages.scales[a.layer];
		}
		return r;
	}
	r.k0 = page + kv_gqa_off(l, head, 0, slot);
	r.k1 = NULL;
	r.v = page + kv_gqa_off(l, head, 1, slot);
	if (l->scale_kind == KV_SCALE_TOKEN) {
		r.s0 = kvk_f16_to_f32(
			*(const uint16_t *)(page + kv_gqa_scale_off(l, head, 0, slot)));
		r.sv = kvk_f16_to_f32(
			*(const uint16_t *)(page + kv_gqa_scale_off(l, head, 1, slot)));
	} else if (l->scale_kind == KV_SCALE_STATIC) {
		const float *s =
			a.pages.scales + ((size_t)a.layer * l->nr_kv_heads + head) * 2;

		r.s0 = s[0];
		r.sv = s[1];
	}
	return r;
}

/* The request of flat token @t: the last r with q_start[r] <= t. */
KVK_DEV uint32_t any_request(const struct kvk_batch &b, uint32_t t)
{
	uint32_t lo = 0, hi = b.nr_requests;

	while (hi - lo > 1) {
		uint32_t mid = (lo + hi) / 2;

		if (b.q_start[mid] <= t)
			lo = mid;
		else
			hi = mid;
	}
	return lo;
}

template <class T> KVK_DEV void any_store(const struct any_args &a, size_t i, T v)
{
	if (sizeof(T) == 8)
		((double *)a.out)[i] = (double)v;
	else if (a.act_f32)
		((float *)a.out)[i] = (float)v;
	else
		((uint16_t *)a.out)[i] = kvk_f32_to_bf16((float)v);
}

/* Add the warps' states up in warp order; the result is in every thread's acc and sum. */
template <class T> KVK_DEV void any_merge(T *acc, T m_own, T *sum_io, uint32_t dims)
{
	__shared__ T part[ANY_WARPS][ANY_DIM_MAX], ms[ANY_WARPS], sums[ANY_WARPS];
	const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x / 32;
	T m = -INFINITY, sum = 0;

	for (uint32_t i = 0; i < ANY_PER; i++)
		part[warp][lane + 32 * i] = acc[i];
	if (lane == 0) {
		ms[warp] = m_own;
		sums[warp] = *sum_io;
	}
	__syncthreads();
	for (uint32_t w = 0; w < ANY_WARPS; w++)
		m = ms[w] > m || ms[w] != ms[w] ? ms[w] : m;
	for (uint32_t i = 0; i < ANY_PER; i++)
		acc[i] = 0;
	for (uint32_t w = 0; w < ANY_WARPS; w++) {
		T c = sums[w] == 0 ? (T)0 : (T)exp(ms[w] - m);

		sum += sums[w] * c;
		for (uint32_t i = 0; i < ANY_PER; i++)
			if (lane + 32 * i < dims)
				acc[i] += part[w][lane + 32 * i] * c;
	}
	*sum_io = sum;
}

/* q . k of one position, in every lane. */
template <class T>
KVK_DEV T any_score(const struct any_pos &p, uint32_t dtype, const T *q, uint32_t d0,
		    uint32_t d1)
{
	const uint32_t lane = threadIdx.x & 31;
	T s = 0;

	for (uint32_t i = 0; i < ANY_PER; i++) {
		uint32_t d = lane + 32 * i;

		if (d < d0)
			s += q[i] * (T)any_value(p.k0, dtype, d) * (T)p.s0;
		else if (d < d0 + d1)
			s += q[i] * (T)any_value(p.k1, dtype, d - d0) * (T)p.s1;
	}
	for (int o = 16; o > 0; o >>= 1)
		s += __shfl_xor_sync(~0u, s, o);
	return s;
}

template <class T>
__global__ void attn_any_kernel(const __grid_constant__ struct any_args a)
{
	const struct kv_layout *l = &a.pages.layout;
	const bool mla = l->kind == KV_LAYOUT_MLA;
	const uint32_t d0 = mla ? l->latent_dim : l->head_dim, d1 = mla ? l->rope_dim : 0;
	const uint32_t lane = threadIdx.x & 31;
	const size_t w = blockIdx.x;
	const uint32_t warp = threadIdx.x / 32;
	const uint32_t t = (uint32_t)(w / a.nr_q_heads), h = (uint32_t)(w % a.nr_q_heads);
	uint32_t r, row0, nr_rows, len, q_len, seen, kv_head;
	T q[ANY_PER], acc[ANY_PER], m = -INFINITY, sum = 0;
	bool ok;

	if (t >= a.batch.nr_tokens)
		return;
	r = any_request(a.batch, t);
	row0 = a.batch.row_start[r];
	nr_rows = a.batch.row_start[r + 1] - row0;
	len = a.batch.lengths[r];
	q_len = a.batch.q_start[r + 1] - a.batch.q_start[r];
	seen = len + t - a.batch.q_start[r] + 1;
	seen = seen > q_len ? seen - q_len : 0;
	kv_head = mla ? 0 : h / (a.nr_q_heads / l->nr_kv_heads);
	ok = kv_verdict_ok(a.batch.verdicts[r], *a.batch.step, nr_rows);
	for (uint32_t i = 0; i < ANY_PER; i++) {
		uint32_t d = lane + 32 * i;
		size_t at = w * (d0 + d1) + d;

		acc[i] = 0;
		q[i] = 0;
		if (d < d0 + d1)
			q[i] = a.act_f32 ? ((const float *)a.q)[at]
					 : kvk_bf16_to_f32(((const uint16_t *)a.q)[at]);
	}
	for (uint32_t pos = warp; ok && pos < seen; pos += ANY_WARPS) {
		struct any_pos p = any_locate(a, row0 + pos / l->page_tokens,
					      pos % l->page_tokens, kv_head);
		T s, mn, ca, e;

		s = any_score<T>(p, l->dtype, q, d0, d1);
		s *= (T)a.sm_scale;
		mn = s > m ? s : m;
		mn = s != s ? s : mn;
		ca = exp(m - mn);
		e = exp(s - mn);
		sum = sum * ca + e;
		m = mn;
		for (uint32_t i = 0; i < ANY_PER; i++) {
			uint32_t d = lane + 32 * i;

			if (d < d0)
				acc[i] = acc[i] * ca +
					 e * (T)any_value(p.v, l->dtype, d) * (T)p.sv;
		}
	}
	any_merge<T>(acc, m, &sum, d0);
	for (uint32_t i = 0; i < ANY_PER; i++) {
		uint32_t d = lane + 32 * i;

		if (i % ANY_WARPS == warp && d < d0)
			any_store<T>(a, w * d0 + d,
				     ok ? (seen ? acc[i] / sum : (T)0) : (T)NAN);
	}
}

/* Queue it; 0, -EINVAL or -EIO. T double: a->out is f64. */
template <class T>
static int any_launch(const struct kvk_attn_args *a, cudaStream_t stream)
{
	const struct kv_layout *l = &a->pages.layout;
	struct any_args k = {};
	size_t rows = (size_t)a->batch.nr_tokens * a->nr_q_heads;
	uint32_t dim =
		l->kind == KV_LAYOUT_MLA ? l->latent_dim + l->rope_dim : l->head_dim;

	if (!rows || dim > ANY_DIM_MAX || a->layer >= l->nr_layers || !l->page_tokens ||
	    (a->act_dtype != KVK_F32 && a->act_dtype != KVK_BF16) ||
	    (l->kind == KV_LAYOUT_GQA &&
	     (!l->nr_kv_heads || a->nr_q_heads % l->nr_kv_heads)) ||
	    (l->scale_kind == KV_SCALE_STATIC && !a->pages.scales))
		return -22; /* -EINVAL */
	k.pages = a->pages;
	k.batch = a->batch;
	k.q = a->q;
	k.out = a->out;
	k.sm_scale = a->sm_scale;
	k.layer = a->layer;
	k.nr_q_heads = a->nr_q_heads;
	k.act_f32 = a->act_dtype == KVK_F32;
	attn_any_kernel<T><<<(unsigned)rows, ANY_WARPS * 32, 0, stream>>>(k);
	return cudaGetLastError() == cudaSuccess ? 0 : -5; /* -EIO */
}

#endif /* KVK_ATTN_ANY_CUH */
