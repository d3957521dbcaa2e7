/* SPDX-License-Identifier: Apache-2.0 */
/* common.c - see common.h. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "common.h"

u64 kvt_rng_next(struct kvt_rng *g)
{
	u64 z = (g->state += 0x9e3779b97f4a7c15ull);

	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
	return z ^ (z >> 31);
}

u32 kvt_rng_below(struct kvt_rng *g, u32 n)
{
	return (u32)((kvt_rng_next(g) >> 32) * n >> 32);
}

float kvt_rng_normal(struct kvt_rng *g)
{
	double u = ((double)(kvt_rng_next(g) >> 11) + 1.0) * 0x1p-53;
	double v = (double)(kvt_rng_next(g) >> 11) * 0x1p-53;

	return (float)(sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v));
}

void kvt_rng_fill(struct kvt_rng *g, float *x, size_t n, float scale)
{
	for (size_t i = 0; i < n; i++)
		x[i] = kvt_rng_normal(g) * scale;
}

double kvt_e4m3(u8 c)
{
	int e = (c >> 3) & 15, m = c & 7;
	double v = e ? ldexp(8 + m, e - 10) : ldexp(m, -9);

	if ((c & 0x7f) == 0x7f)
		return NAN;
	return c & 0x80 ? -v : v;
}

double kvt_f16(u16 h)
{
	int e = (h >> 10) & 31, m = h & 1023;
	double v = e == 31 ? (m ? NAN : INFINITY)
		   : e	   ? ldexp(1024 + m, e - 25)
			   : ldexp(m, -24);

	return h & 0x8000 ? -v : v;
}

double kvt_bf16(u16 h)
{
	u32 b = (u32)h << 16;
	float f;

	memcpy(&f, &b, sizeof(f));
	return f;
}

u16 kvt_to_bf16(float x)
{
	u32 b;

	memcpy(&b, &x, sizeof(b));
	if (isnan(x))
		return 0x7fc0;
	return (u16)((b + 0x7fff + ((b >> 16) & 1)) >> 16);
}

static struct kv_layout layout_base(u32 dtype, u32 scale_kind, u32 nr_layers)
{
	return (struct kv_layout){.format_version = KV_LAYOUT_VERSION,
				  .dtype = dtype,
				  .scale_kind = scale_kind,
				  .page_tokens = 64,
				  .nr_layers = nr_layers};
}

struct kv_layout kvt_layout_mla(u32 dtype, u32 scale_kind, u32 nr_layers)
{
	struct kv_layout l = layout_base(dtype, scale_kind, nr_layers);

	l.kind = KV_LAYOUT_MLA;
	l.latent_dim = 512;
	l.rope_dim = 64;
	l.nr_scales = scale_kind == KV_SCALE_STATIC ? nr_layers : 0;
	return l;
}

struct kv_layout kvt_layout_gqa(u32 dtype, u32 scale_kind, u32 nr_layers, u32 nr_kv_heads,
				u32 head_dim)
{
	struct kv_layout l = layout_base(dtype, scale_kind, nr_layers);

	l.kind = KV_LAYOUT_GQA;
	l.nr_kv_heads = nr_kv_heads;
	l.head_dim = head_dim;
	l.nr_scales = scale_kind == KV_SCALE_STATIC ? nr_layers * nr_kv_heads * 2 : 0;
	return l;
}

void kvt_paged_init(struct kvt_paged *f, struct kvt_rng *g, const struct kv_layout *l,
		    u32 nr_pages)
{
	u64 stride = kv_page_stride(l);

	memset(f, 0, sizeof(*f));
	f->pages.layout = *l;
	f->pages.geometry.stride_bytes = stride;
	f->pages.geometry.shift = 2;
	f->pages.geometry.extent_bytes = stride * 4 + 8192;
	f->pages.geometry.nr_pages = nr_pages;
	f->bytes = (nr_pages + 3) / 4 * f->pages.geometry.extent_bytes;
	f->pages.base = aligned_alloc(4096, f->bytes);
	memset(f->pages.base, 0xff, f->bytes);
	for (size_t i = 0; i < KV_ARRAY_SIZE(f->scales); i++)
		f->scales[i] = 0.001f * (1.0f + (float)kvt_rng_below(g, 100));
	f->pages.scales = l->scale_kind == KV_SCALE_STATIC ? f->scales : NULL;
	f->step = 1000 + kvt_rng_below(g, 1000);
}

static void batch_free(struct kvt_paged *f)
{
	free(f->rows);
	free(f->lengths);
	free(f->verdicts);
	free(f->nonces);
}

void kvt_paged_batch(struct kvt_paged *f, struct kvt_rng *g, const u32 *lengths,
		     const u32 *q_lens, u32 nr)
{
	u32 nr_pages = f->pages.geometry.nr_pages, nr_rows = 0, q_max = 0;
	u32 *pfns = malloc(nr_pages * sizeof(*pfns));

	batch_free(f);
	for (u32 r = 0; r < nr; r++) {
		f->row_start[r] = nr_rows;
		nr_rows += (lengths[r] + 63) / 64;
		f->q_start[r + 1] = f->q_start[r] + q_lens[r];
		q_max = KV_MAX(q_max, q_lens[r]);
	}
	f->row_start[nr] = nr_rows;
	if (nr_rows > nr_pages)
		abort();
	for (u32 i = 0; i < nr_pages; i++) {
		u32 j = kvt_rng_below(g, i + 1);

		pfns[i] = pfns[j];
		pfns[j] = i;
	}
	f->rows = calloc(nr_rows + 1, sizeof(*f->rows));
	f->lengths = calloc(nr + 1, sizeof(*f->lengths));
	f->verdicts = calloc(nr + 1, sizeof(*f->verdicts));
	f->nonces = calloc(nr + 1, sizeof(*f->nonces));
	for (u32 r = 0; r < nr; r++) {
		f->lengths[r] = lengths[r];
		f->nonces[r] = kvt_rng_next(g);
		for (u32 i = f->row_start[r]; i < f->row_start[r + 1]; i++)
			f->rows[i] = kv_row_make(
				pfns[i], kv_tag_make(pfns[i] + 1, KV_TAG_LIVE),
				KV_ROW_WRITE, f->nonces[r], i - f->row_start[r]);
		f->verdicts[r].step = f->step;
		f->verdicts[r].rows_checked = f->row_start[r + 1] - f->row_start[r];
	}
	f->batch = (struct kvk_batch){.rows = f->rows,
				      .row_start = f->row_start,
				      .lengths = f->lengths,
				      .q_start = f->q_start,
				      .verdicts = f->verdicts,
				      .step = &f->step,
				      .nr_requests = nr,
				      .nr_tokens = f->q_start[nr],
				      .q_len_max = q_max};
	free(pfns);
}

void kvt_paged_fini(struct kvt_paged *f)
{
	batch_free(f);
	free(f->pages.base);
	memset(f, 0, sizeof(*f));
}

void kvt_paged_append(struct kvt_paged *f, const float *first, const float *second)
{
	struct kvk_append_args a = {.pages = f->pages,
				    .batch = f->batch,
				    .src_dtype = KVK_F32,
				    .latent = first,
				    .k = first,
				    .rope = second,
				    .v = second};

	for (a.layer = 0; a.layer < f->pages.layout.nr_layers; a.layer++)
		if (kvk_host_ops()->append(&a, NULL))
			abort();
}

void kvt_paged_ask(struct kvt_paged *f, const u32 *q_lens, u32 nr)
{
	u32 most = 0;

	f->q_start[0] = 0;
	for (u32 r = 0; r < nr; r++) {
		f->q_start[r + 1] = f->q_start[r] + q_lens[r];
		most = KV_MAX(most, q_lens[r]);
	}
	f->batch.q_start = f->q_start;
	f->batch.nr_tokens = f->q_start[nr];
	f->batch.q_len_max = most;
}

struct kvk_norm_rope_append_args kvt_key_args(const struct kvk_pages *pages,
					      const struct kvk_batch *batch, void *acts,
					      const u32 *positions, u32 dtype)
{
	const size_t part = batch->nr_tokens * 576ul * 4;
	u8 *kv = acts, *latent = kv + part, *rope = latent + part, *q = rope + part;
	struct kvk_norm_rope_append_args a = {
		.k_norm = {.x = kv,
			   .weight = acts,
			   .y = latent,
			   .eps = 1e-6f,
			   .nr_rows = batch->nr_tokens,
			   .cols = 512,
			   .x_stride = 576,
			   .act_dtype = dtype},
		.k_rope = {.x = kv,
			   .positions = positions,
			   .cos_sin = acts,
			   .nr_tokens = batch->nr_tokens,
			   .nr_heads = 1,
			   .head_stride = 576,
			   .token_stride = 576,
			   .offset = 512,
			   .rope_dim = 64,
			   .act_dtype = dtype,
			   .y = rope,
			   .y_head_stride = 64,
			   .y_token_stride = 64},
		.append = {.pages = *pages,
			   .batch = *batch,
			   .src_dtype = dtype,
			   .latent = latent,
			   .rope = rope},
	};

	a.q_rope = a.k_rope;
	a.q_rope.x = q;
	a.q_rope.y = NULL;
	a.q_rope.head_stride = a.q_rope.token_stride = 64;
	a.q_rope.offset = 0;
	return a;
}

u8 *kvt_paged_part(const struct kvt_paged *f, u32 request, u32 position, u32 layer)
{
	const struct kv_layout *l = &f->pages.layout;
	u32 pfn = f->rows[f->row_start[request] + position / 64].pfn;
	u64 layer_bytes;

	if (l->kind == KV_LAYOUT_MLA)
		layer_bytes = 64ull * (l->latent_dim + l->rope_dim);
	else
		layer_bytes = 128ull * l->head_dim * l->nr_kv_heads;
	layer_bytes *= l->dtype == KV_DTYPE_F32 ? 4 : l->dtype == KV_DTYPE_BF16 ? 2 : 1;
	if (l->scale_kind == KV_SCALE_TOKEN)
		layer_bytes += l->kind == KV_LAYOUT_MLA ? 256 : 256 * l->nr_kv_heads;
	layer_bytes = (layer_bytes + 255) / 256 * 256;
	return (u8 *)f->pages.base + pfn / 4 * f->pages.geometry.extent_bytes +
	       pfn % 4 * f->pages.geometry.stride_bytes + layer * layer_bytes;
}

double kvt_paged_value(const struct kvt_paged *f, const u8 *part, u32 layer, u32 plane,
		       u32 slot, u32 i)
{
	const struct kv_layout *l = &f->pages.layout;
	u32 bytes = l->dtype == KV_DTYPE_F32 ? 4 : l->dtype == KV_DTYPE_BF16 ? 2 : 1;
	bool mla = l->kind == KV_LAYOUT_MLA;
	u64 elem, scale_at, nr_elems;
	double scale = 1;
	float v;
	u16 h;

	if (mla) {
		nr_elems = 64ull * (l->latent_dim + l->rope_dim);
		elem = plane ? 64 * l->latent_dim + slot * l->rope_dim + i
			     : slot * l->latent_dim + i;
		scale_at = nr_elems + slot * 4 + plane * 2;
	} else {
		nr_elems = 128ull * l->head_dim * l->nr_kv_heads;
		elem = (plane * 64ull + slot) * l->head_dim + i;
		scale_at = nr_elems + (plane * 64ull + slot) * 2;
	}
	if (l->scale_kind == KV_SCALE_TOKEN) {
		memcpy(&h, part + scale_at, 2);
		scale = kvt_f16(h);
	} else if (l->scale_kind == KV_SCALE_STATIC) {
		scale = f->scales[mla ? layer : layer * l->nr_kv_heads * 2 + plane];
	}
	if (bytes == 1)
		return kvt_e4m3(part[elem]) * scale;
	memcpy(&h, part + elem * 2, 2);
	memcpy(&v, part + elem * bytes, bytes == 4 ? 4 : 2);
	return bytes == 2 ? kvt_bf16(h) : v;
}

static double key_dot(const struct kvt_paged *f, u32 request, u32 layer, u32 plane,
		      u32 pos, const float *q)
{
	const struct kv_layout *l = &f->pages.layout;
	const u8 *part = kvt_paged_part(f, request, pos, layer);
	double s = 0;

	if (l->kind == KV_LAYOUT_GQA) {
		for (u32 i = 0; i < l->head_dim; i++)
			s += q[i] * kvt_paged_value(f, part, layer, plane, pos % 64, i);
		return s;
	}
	for (u32 i = 0; i < l->latent_dim; i++)
		s += q[i] * kvt_paged_value(f, part, layer, 0, pos % 64, i);
	for (u32 i = 0; i < l->rope_dim; i++)
		s += q[l->latent_dim + i] *
		     kvt_paged_value(f, part, layer, 1, pos % 64, i);
	return s;
}

void kvt_attn_truth(const struct kvt_paged *f, u32 request, u32 layer, u32 plane_k,
		    u32 plane_v, u32 sees, const float *q, double sm_scale, double *out)
{
	const struct kv_layout *l = &f->pages.layout;
	u32 dim = l->kind == KV_LAYOUT_MLA ? l->latent_dim : l->head_dim;
	double *s = malloc((sees + 1) * sizeof(*s)), max = -INFINITY, sum = 0;

	for (u32 j = 0; j < sees; j++) {
		s[j] = key_dot(f, request, layer, plane_k, j, q) * sm_scale;
		max = s[j] > max ? s[j] : max;
	}
	memset(out, 0, dim * sizeof(*out));
	for (u32 j = 0; j < sees; j++) {
		const u8 *part = kvt_paged_part(f, request, j, layer);
		double p = exp(s[j] - max);

		sum += p;
		for (u32 i = 0; i < dim; i++)
			out[i] += p * kvt_paged_value(f, part, layer, plane_v, j % 64, i);
	}
	for (u32 i = 0; i < dim; i++)
		out[i] /= sum;
	free(s);
}

double kvt_max_diff(const float *a, const double *b, size_t n)
{
	double max = 0;

	for (size_t i = 0; i < n; i++) {
		double d = fabs(a[i] - b[i]);

		if (isnan(d))
			return NAN;
		max = d > max ? d : max;
	}
	return max;
}

size_t kvt_nr_finite(const float *x, size_t n)
{
	size_t nr = 0;

	for (size_t i = 0; i < n; i++)
		nr += !isnan(x[i]);
	return nr;
}

static void matrix_int4(struct kvt_rng *g, struct kvt_matrix *m, u32 nr)
{
	size_t n = (size_t)nr * m->w.rows * m->w.cols;
	u16 *scales;

	m->data = malloc(n / 2);
	m->scales = malloc(n / m->w.group * 2);
	scales = (u16 *)(void *)m->scales;
	for (size_t i = 0; i < n / 2; i++)
		m->data[i] = (u8)kvt_rng_next(g);
	for (size_t i = 0; i < n / m->w.group; i++)
		scales[i] = m->w.scale_dtype == KVK_F16
				    ? (u16)(0x2000 + kvt_rng_below(g, 0x400))
				    : (u16)(0x3c00 + kvt_rng_below(g, 0x80));
	for (size_t i = 0; i < n; i++) {
		int q = (m->data[i / 2] >> (i % 2 * 4) & 15) - 8;
		u16 s = scales[i / m->w.group];

		m->truth[i] =
			q * (m->w.scale_dtype == KVK_F16 ? kvt_f16(s) : kvt_bf16(s));
	}
}

static void matrix_e4m3(struct kvt_rng *g, struct kvt_matrix *m, u32 nr)
{
	u32 rb = (m->w.rows + 127) / 128, cb = (m->w.cols + 127) / 128;
	size_t per = (size_t)m->w.rows * m->w.cols, n = nr * per;
	float *scales = malloc(sizeof(float) * nr * rb * cb);

	m->data = malloc(n);
	m->scales = (u8 *)scales;
	for (size_t i = 0; i < (size_t)nr * rb * cb; i++)
		scales[i] = 0.0001f * (1.0f + (float)kvt_rng_below(g, 1000) * 0.001f);
	for (size_t i = 0; i < n; i++) {
		size_t k = i / per, r = i % per / m->w.cols, c = i % m->w.cols;

		m->data[i] = (u8)kvt_rng_next(g);
		if ((m->data[i] & 0x7f) == 0x7f)
			m->data[i] = 0;
		m->truth[i] =
			kvt_e4m3(m->data[i]) * scales[(k * rb + r / 128) * cb + c / 128];
	}
}

struct kvt_matrix kvt_matrix_make(struct kvt_rng *g, u32 dtype, u32 nr, u32 rows,
				  u32 cols, u32 group, u32 scale_dtype)
{
	struct kvt_matrix m = {.w = {.dtype = dtype,
				     .rows = rows,
				     .cols = cols,
				     .group = group,
				     .scale_dtype = scale_dtype}};
	size_t n = (size_t)nr * rows * cols;

	m.truth = malloc(n * sizeof(double));
	if (dtype == KVK_INT4) {
		matrix_int4(g, &m, nr);
	} else if (dtype == KVK_E4M3) {
		matrix_e4m3(g, &m, nr);
	} else {
		float *f = malloc(n * sizeof(float));

		kvt_rng_fill(g, f, n, 0.05f);
		m.data = (u8 *)f;
		for (size_t i = 0; i < n; i++) {
			if (dtype == KVK_BF16) {
				u16 h = kvt_to_bf16(f[i]);

				m.truth[i] = kvt_bf16(h);
				((u16 *)(void *)f)[i] = h;
			} else {
				m.truth[i] = f[i];
			}
		}
	}
	m.w.data = m.data;
	m.w.scales = m.scales;
	return m;
}

void kvt_matrix_fini(struct kvt_matrix *m)
{
	free(m->data);
	free(m->scales);
	free(m->truth);
}

/* Nearest e4m3 by search: no code of kernels/. Ties to the even code. */
static double nearest_e4m3(double x)
{
	double best = 0, dist = INFINITY;

	if (isnan(x))
		return x;
	for (int c = 0; c < 0x7f; c++) {
		double d = fabs(kvt_e4m3((u8)c) - fabs(x));

		if (d < dist || (d == dist && c % 2 == 0)) {
			dist = d;
			best = kvt_e4m3((u8)c);
		}
	}
	return x < 0 ? -best : best;
}

/* What an FP8 kernel sees of its activations. */
void kvt_act_fp8(const float *x, double *y, u32 n)
{
	for (u32 b = 0; b < n; b += 128) {
		u32 len = KV_MIN(n - b, 128u);
		float amax = 0, scale;

		for (u32 i = 0; i < len; i++)
			amax = fabsf(x[b + i]) > amax ? fabsf(x[b + i]) : amax;
		scale = amax > 0 ? amax / 448.0f : 1.0f;
		for (u32 i = 0; i < len; i++)
			y[b + i] = nearest_e4m3(x[b + i] / scale) * scale;
	}
}

void kvt_acts(u32 dtype, const float *x, double *y, u32 n)
{
	if (dtype == KVK_E4M3)
		kvt_act_fp8(x, y, n);
	else
		for (u32 i = 0; i < n; i++)
			y[i] = x[i];
}
