/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda_dense.c - the GPU's norm, rope and silu against the host's, and norm_rope_append against
 * its parts: the same bits in pages and queries, for every format, odd heads, values that rounding
 * has trouble with, failed requests and rows without WRITE.
 */
#ifdef CONFIG_CUDA
#include "cuda_common.h"

/* ------------------------------------------------------------------- norm, rope, silu */

#define ROWS 5u
#define COLS 1536u
#define ALL  ((size_t)ROWS * COLS)

/* struct acts - activations of these tests; x and res random bf16, weight f32 */
struct acts {
	u16 x[ALL], res[ALL], y[ALL], got[ALL];
	float weight[COLS], table[64 * 64];
};

static void fill_bf16(struct kvt_rng *g, u16 *x, size_t n)
{
	for (size_t i = 0; i < n; i++)
		x[i] = kvt_to_bf16(kvt_rng_normal(g));
}

static struct acts *acts_new(void)
{
	struct acts *m = malloc(sizeof(*m));
	struct kvt_rng g = {kvt_rand64()};

	gpu_ops();
	fill_bf16(&g, m->x, ALL);
	fill_bf16(&g, m->res, ALL);
	kvt_rng_fill(&g, m->weight, COLS, 1.0f);
	kvt_rng_fill(&g, m->table, 64 * 64, 1.0f);
	return m;
}

KVT_TEST(norm_adds_the_residual)
{
	struct kvk_norm_args a = {
		.eps = 1e-6f, .nr_rows = ROWS, .cols = COLS, .act_dtype = KVK_BF16};
	struct acts *m = acts_new();

	a.x = gpu_copy(m->x, 2 * ALL);
	a.residual = gpu_copy(m->res, 2 * ALL);
	a.weight = gpu_copy(m->weight, 4ul * COLS);
	a.y = gpu_alloc(2 * ALL);
	KVT_EXPECT_EQ(gpu_ops()->norm(&a, NULL), 0);
	gpu_get(m->got, a.y, 2 * ALL);
	gpu_get(m->x + 0, a.x, 2 * ALL);
	a.y = m->y;
	a.weight = m->weight;
	a.x = m->x;
	{
		void *res = gpu_fetch(a.residual, 2 * ALL);

		a.residual = m->res;
		KVT_EXPECT_EQ(kvk_host_ops()->norm(&a, NULL), 0);
		KVT_EXPECT(memcmp(res, m->res, 2 * ALL) == 0);
	}
	acts_equal(KVK_BF16, m->got, m->y, ALL, 0.02, "norm");
	free(m);
}

/* F32, and rows that are not whole groups of eight: the kernel of any shape. */
KVT_TEST(norm_of_any_size)
{
	static const u32 cols[] = {1, 37, 512, 700, 2049, 9000};
	struct kvt_rng g = {kvt_rand64()};

	gpu_ops();
	for (u32 i = 0; i < 2 * KV_ARRAY_SIZE(cols); i++) {
		const u32 n = cols[i / 2], dtype = i % 2 ? KVK_BF16 : KVK_F32;
		struct kvk_norm_args a = {.eps = 1e-5f,
					  .nr_rows = 3,
					  .cols = n,
					  .act_dtype = dtype},
				     d;
		float *x = malloc(3ul * n * 4), *w = malloc(n * 4ul);

		kvt_rng_fill(&g, x, 3ul * n, 2.0f);
		kvt_rng_fill(&g, w, n, 1.0f);
		a.x = acts_make(dtype, x, 3ul * n);
		a.y = malloc(3ul * n * 4);
		a.weight = w;
		d = a;
		d.x = gpu_copy(a.x, acts_bytes(dtype, 3ul * n));
		d.y = gpu_alloc(acts_bytes(dtype, 3ul * n));
		d.weight = gpu_copy(w, n * 4ul);
		KVT_EXPECT_EQ(kvk_host_ops()->norm(&a, NULL), 0);
		KVT_EXPECT_EQ(gpu_ops()->norm(&d, NULL), 0);
		acts_equal(dtype, gpu_fetch(d.y, acts_bytes(dtype, 3ul * n)), a.y,
			   3ul * n, dtype == KVK_F32 ? 1e-5 : 0.04, "norm");
	}
}

KVT_TEST(silu_as_the_reference)
{
	struct kvk_silu_args s = {
		.nr_tokens = ROWS, .inter = COLS / 2, .act_dtype = KVK_BF16};
	struct acts *m = acts_new();

	s.gu = gpu_copy(m->x, 2 * ALL);
	s.y = gpu_alloc(ALL);
	KVT_EXPECT_EQ(gpu_ops()->silu(&s, NULL), 0);
	gpu_get(m->got, s.y, ALL);
	s.gu = m->x;
	s.y = m->y;
	KVT_EXPECT_EQ(kvk_host_ops()->silu(&s, NULL), 0);
	acts_equal(KVK_BF16, m->got, m->y, ALL / 2, 0.02, "silu");
	free(m);
}

/* Into another array; @r is the host's call, rotated in place in m->y. */
static void rope_elsewhere(const struct kvk_rope_args *r, struct acts *m,
			   const u32 *positions)
{
	enum { HEAD = 72, AT = 8, VALUES = ROWS * 8 * HEAD };
	static u16 y[VALUES];
	struct kvk_rope_args a = *r;

	memset(y, 0x11, sizeof(y));
	a.x = gpu_copy(m->x, 2 * ALL);
	a.y = gpu_copy(y, sizeof(y));
	a.positions = gpu_copy(positions, ROWS * sizeof(*positions));
	a.cos_sin = gpu_copy(m->table, sizeof(m->table));
	a.y_head_stride = HEAD;
	a.y_token_stride = 8 * HEAD;
	a.y_offset = AT;
	KVT_EXPECT_EQ(gpu_ops()->rope(&a, NULL), 0);
	gpu_get(y, a.y, sizeof(y));
	for (u32 i = 0; i < VALUES; i++) {
		u32 t = i / (8 * HEAD), h = i / HEAD % 8, k = i % HEAD;
		const u16 *in_place = m->got + t * COLS + h * r->head_stride + r->offset;

		KVT_EXPECT_EQ(y[i], k < AT ? 0x1111 : in_place[k - AT]);
	}
}

KVT_TEST(rope_both_pairings)
{
	u32 positions[ROWS] = {0, 7, 1, 63, 30};
	struct kvk_rope_args r = {.nr_tokens = ROWS,
				  .nr_heads = 8,
				  .head_stride = 192,
				  .token_stride = COLS,
				  .offset = 128,
				  .rope_dim = 64,
				  .act_dtype = KVK_BF16};
	struct acts *m = acts_new();

	for (u32 i = 0; i < 2; i++) {
		r.interleaved = i;
		r.x = gpu_copy(m->x, 2 * ALL);
		r.positions = gpu_copy(positions, sizeof(positions));
		r.cos_sin = gpu_copy(m->table, sizeof(m->table));
		KVT_EXPECT_EQ(gpu_ops()->rope(&r, NULL), 0);
		gpu_get(m->got, r.x, 2 * ALL);
		memcpy(m->y, m->x, 2 * ALL);
		r.x = m->y;
		r.positions = positions;
		r.cos_sin = m->table;
		KVT_EXPECT_EQ(kvk_host_ops()->rope(&r, NULL), 0);
		acts_equal(KVK_BF16, m->got, m->y, ALL, 0.02, "rope");
		rope_elsewhere(&r, m, positions);
	}
	free(m);
}

/* ------------------------------------------------------------------- norm_rope_append */

enum { NR_REQ = 6, NR_TOKENS = 41, NR_PAGES = 24, POSITIONS = 256 };
static const u32 lens[NR_REQ] = {70, 0, 64, 3, 200, 1};
static const u32 q_lens[NR_REQ] = {2, 0, 34, 3, 1, 1};

/* One way that a model's query and key come. */
struct key_case {
	bool mla;
	u32 dtype, scale_kind, acts;
	u32 nr_kv, head, nr_q, rope_dim;
	bool q_norm, k_norm, interleaved;
};

static const struct key_case key_cases[] = {
	/* Kimi K2, a rank of eight and alone; GLM-5; then MLA in parts */
	{true, KV_DTYPE_E4M3, KV_SCALE_TOKEN, KVK_BF16, 1, 0, 8, 64, false, true, true},
	{true, KV_DTYPE_BF16, KV_SCALE_NONE, KVK_BF16, 1, 0, 64, 64, false, true, true},
	{true, KV_DTYPE_E4M3, KV_SCALE_STATIC, KVK_BF16, 1, 0, 3, 64, false, true, false},
	{true, KV_DTYPE_E4M3, KV_SCALE_TOKEN, KVK_F32, 1, 0, 5, 64, false, true, true},
	/* GLM-4.6 and its like; without norms; whole heads rotated; one of everything */
	{false, KV_DTYPE_E4M3, KV_SCALE_TOKEN, KVK_BF16, 8, 128, 96, 64, true, true,
	 false},
	{false, KV_DTYPE_BF16, KV_SCALE_NONE, KVK_BF16, 1, 128, 12, 128, true, true,
	 false},
	{false, KV_DTYPE_E4M3, KV_SCALE_TOKEN, KVK_BF16, 2, 128, 7, 96, false, false,
	 true},
	{false, KV_DTYPE_E4M3, KV_SCALE_STATIC, KVK_BF16, 1, 128, 1, 16, false, true,
	 true},
	{false, KV_DTYPE_E4M3, KV_SCALE_TOKEN, KVK_BF16, 3, 64, 5, 64, true, false, true},
	{false, KV_DTYPE_BF16, KV_SCALE_NONE, KVK_BF16, 2, 64, 4, 32, false, false,
	 false},
	/* in parts: a rotation of five pairs, an odd head, F32 pages */
	{false, KV_DTYPE_E4M3, KV_SCALE_TOKEN, KVK_BF16, 2, 128, 3, 10, true, true,
	 false},
	{false, KV_DTYPE_E4M3, KV_SCALE_TOKEN, KVK_BF16, 2, 40, 3, 16, true, true, true},
	{false, KV_DTYPE_F32, KV_SCALE_NONE, KVK_F32, 1, 64, 2, 64, false, true, false},
};

/* Values with what rounding has trouble with, NaN and infinity among them. */
static void odd_values(struct kvt_rng *g, float *x, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		x[i] = kvt_rng_normal(g) * (kvt_rng_below(g, 9) ? 1.0f : 30.0f);
		if (!kvt_rng_below(g, 3000))
			x[i] = kvt_rng_below(g, 2) ? NAN : -INFINITY;
		else if (!kvt_rng_below(g, 50))
			x[i] = 0;
	}
	for (size_t i = 0; i < n / 8; i++)
		x[i] = 0; /* tokens of zeros */
}

/* The arrays of one side. */
struct key_side {
	struct kvk_norm_rope_append_args a;
	u8 *q; /* what attention reads */
	size_t q_bytes;
};

/* Room and inputs in memory of the kernels: @gpu, or the host's. */
static void *side_array(bool gpu, const void *src, size_t bytes)
{
	void *p;

	if (gpu)
		return src ? gpu_copy(src, bytes) : gpu_alloc(bytes);
	p = malloc(bytes + 1);
	if (src)
		memcpy(p, src, bytes);
	else
		memset(p, 0xff, bytes);
	return p;
}

/* struct key_data - inputs of a case, in host memory */
struct key_data {
	float *q, *kv, *v;
	size_t nr_q, nr_kv, nr_v;
	float q_weight[512], k_weight[512], table[POSITIONS * 128];
	u32 positions[NR_TOKENS];
};

static void key_data_make(struct key_data *d, struct kvt_rng *g, const struct key_case *c)
{
	const u32 head = c->mla ? 192 : c->head;

	d->nr_q = (size_t)NR_TOKENS * c->nr_q * head;
	d->nr_kv = (size_t)NR_TOKENS * (c->mla ? 576 : c->nr_kv * c->head);
	d->nr_v = c->mla ? 1 : d->nr_kv;
	d->q = malloc(d->nr_q * 4);
	d->kv = malloc(d->nr_kv * 4);
	d->v = malloc(d->nr_v * 4);
	odd_values(g, d->q, d->nr_q);
	odd_values(g, d->kv, d->nr_kv);
	odd_values(g, d->v, d->nr_v);
	kvt_rng_fill(g, d->q_weight, 512, 1.0f);
	kvt_rng_fill(g, d->k_weight, 512, 1.0f);
	for (size_t i = 0; i < KV_ARRAY_SIZE(d->table); i++)
		d->table[i] = cosf(kvt_rng_normal(g) * 3.0f);
	for (u32 t = 0; t < NR_TOKENS; t++)
		d->positions[t] = kvt_rng_below(g, POSITIONS);
}

static void key_data_fini(struct key_data *d)
{
	free(d->q);
	free(d->kv);
	free(d->v);
}

static struct kvk_rope_args key_rope(const struct key_case *c, const struct key_data *d,
				     bool gpu)
{
	return (struct kvk_rope_args){
		.positions = side_array(gpu, d->positions, sizeof(d->positions)),
		.cos_sin = side_array(gpu, d->table, sizeof(d->table)),
		.nr_tokens = NR_TOKENS,
		.rope_dim = c->rope_dim,
		.act_dtype = c->acts,
		.interleaved = c->interleaved,
	};
}

static void side_mla(struct key_side *s, const struct key_case *c, bool gpu)
{
	struct kvk_norm_rope_append_args *a = &s->a;
	void *rest;

	a->k_norm.y = side_array(gpu, NULL, acts_bytes(c->acts, NR_TOKENS * 512ul));
	a->k_norm.nr_rows = NR_TOKENS;
	a->k_norm.cols = 512;
	a->k_norm.x_stride = 576;
	a->k_rope.x = (void *)a->k_norm.x;
	a->k_rope.y = side_array(gpu, NULL, acts_bytes(c->acts, NR_TOKENS * 64ul));
	a->k_rope.nr_heads = 1;
	a->k_rope.head_stride = a->k_rope.token_stride = 576;
	a->k_rope.offset = 512;
	a->k_rope.y_head_stride = a->k_rope.y_token_stride = 64;
	a->q_rope.head_stride = 192;
	a->q_rope.token_stride = c->nr_q * 192;
	a->q_rope.offset = 128;
	s->q_bytes = acts_bytes(c->acts, (size_t)NR_TOKENS * c->nr_q * 576);
	/* of which a part is written: the rest is compared too, and must be something */
	rest = malloc(s->q_bytes);
	memset(rest, 0xff, s->q_bytes);
	s->q = a->q_rope.y = side_array(gpu, rest, s->q_bytes);
	free(rest);
	a->q_rope.y_head_stride = 576;
	a->q_rope.y_token_stride = c->nr_q * 576;
	a->q_rope.y_offset = 512;
	a->append.latent = a->k_norm.y;
	a->append.rope = a->k_rope.y;
}

static void side_gqa(struct key_side *s, const struct key_case *c, bool gpu)
{
	struct kvk_norm_rope_append_args *a = &s->a;

	a->k_norm.y = (void *)a->k_norm.x;
	a->k_norm.nr_rows = NR_TOKENS * c->nr_kv;
	a->k_norm.cols = a->q_norm.cols = c->head;
	a->q_norm.x = a->q_norm.y = a->q_rope.x;
	a->q_norm.nr_rows = NR_TOKENS * c->nr_q;
	a->k_rope.x = a->k_norm.y;
	a->k_rope.nr_heads = c->nr_kv;
	a->k_rope.head_stride = a->q_rope.head_stride = c->head;
	a->k_rope.token_stride = c->nr_kv * c->head;
	a->q_rope.token_stride = c->nr_q * c->head;
	a->append.k = a->k_norm.y;
	s->q = a->q_rope.x;
}

static struct key_side side_make(const struct key_case *c, struct key_data *d, bool gpu,
				 const struct kvk_pages *pages,
				 const struct kvk_batch *batch)
{
	struct kvk_norm_args norm = {.eps = 1e-5f, .act_dtype = c->acts};
	struct key_side s = {.a = {.q_norm = norm, .k_norm = norm}};
	const u64 none = 0;
	void *q = acts_make(c->acts, d->q, d->nr_q);
	void *kv = acts_make(c->acts, d->kv, d->nr_kv);
	void *v = acts_make(c->acts, d->v, d->nr_v);

	s.q_bytes = acts_bytes(c->acts, d->nr_q);
	s.a.q_rope = s.a.k_rope = key_rope(c, d, gpu);
	s.a.q_rope.x = side_array(gpu, q, s.q_bytes);
	s.a.q_rope.nr_heads = c->nr_q;
	s.a.k_norm.x = side_array(gpu, kv, acts_bytes(c->acts, d->nr_kv));
	s.a.append = (struct kvk_append_args){
		.pages = *pages,
		.batch = *batch,
		.layer = 1,
		.src_dtype = c->acts,
		.v = side_array(gpu, v, acts_bytes(c->acts, d->nr_v)),
		.nan_count = side_array(gpu, &none, sizeof(none)),
	};
	if (c->q_norm)
		s.a.q_norm.weight = side_array(gpu, d->q_weight, sizeof(d->q_weight));
	if (c->k_norm)
		s.a.k_norm.weight = side_array(gpu, d->k_weight, sizeof(d->k_weight));
	if (c->mla)
		side_mla(&s, c, gpu);
	else
		side_gqa(&s, c, gpu);
	free(q);
	free(kv);
	free(v);
	return s;
}

static int key_parts(const struct kvk_ops *o, const struct kvk_norm_rope_append_args *a)
{
	int r = a->q_norm.weight ? o->norm(&a->q_norm, NULL) : 0;

	if (!r && a->k_norm.weight)
		r = o->norm(&a->k_norm, NULL);
	if (!r)
		r = o->rope(&a->q_rope, NULL);
	if (!r)
		r = o->rope(&a->k_rope, NULL);
	return r ? r : o->append(&a->append, NULL);
}

static struct kv_layout key_layout(const struct key_case *c)
{
	return c->mla ? kvt_layout_mla(c->dtype, c->scale_kind, 2)
		      : kvt_layout_gqa(c->dtype, c->scale_kind, 2, c->nr_kv, c->head);
}

/* Rows of @f that may not be written hold what they held: 0xff. */
static void untouched(const struct kvt_paged *f, const u8 *pool, u32 r)
{
	const size_t bytes = kv_page_bytes(&f->pages.layout);

	for (u32 i = f->row_start[r]; i < f->row_start[r + 1]; i++) {
		const u8 *page =
			pool + kv_page_offset(&f->pages.geometry, f->rows[i].pfn);

		for (size_t at = 0; at < bytes; at++)
			if (page[at] != 0xff)
				KVT_FAIL("request %u: byte %zu of its page was written",
					 r, at);
	}
}

static void key_run(struct kvt_rng *g, const struct key_case *c, u32 failed)
{
	const struct kvk_ops *gpu = gpu_ops();
	struct kv_layout l = key_layout(c);
	struct key_data *data = malloc(sizeof(*data));
	struct gpu_paged parts, one;
	struct key_side ps, os;
	struct kvt_paged f;
	u64 *nan_parts, *nan_one;
	u8 *pool, *want, *got;

	kvt_paged_init(&f, g, &l, NR_PAGES);
	kvt_paged_batch(&f, g, lens, q_lens, NR_REQ);
	f.rows[f.row_start[5]].flags &= ~KV_ROW_WRITE;
	if (failed < NR_REQ)
		verdict_fail(&f, failed, kvt_rng_below(g, 4));
	key_data_make(data, g, c);
	parts = gpu_paged_make(&f, f.row_start[NR_REQ]);
	one = gpu_paged_make(&f, f.row_start[NR_REQ]);
	ps = side_make(c, data, true, &parts.pages, &parts.batch);
	os = side_make(c, data, true, &one.pages, &one.batch);
	KVT_EXPECT_EQ(key_parts(gpu, &ps.a), 0);
	KVT_EXPECT_EQ(gpu->norm_rope_append(&os.a, NULL), 0);
	pool = gpu_fetch(one.pages.base, f.bytes);
	want = gpu_fetch(parts.pages.base, f.bytes);
	for (size_t i = 0; i < f.bytes; i++)
		if (pool[i] != want[i])
			KVT_FAIL("case %td: byte %zu of the pool is %02x, not %02x",
				 c - key_cases, i, pool[i], want[i]);
	got = gpu_fetch(os.q, os.q_bytes);
	free(want);
	want = gpu_fetch(ps.q, ps.q_bytes);
	for (size_t i = 0; i < os.q_bytes; i++)
		if (got[i] != want[i])
			KVT_FAIL("case %td: byte %zu of q is %02x, not %02x",
				 c - key_cases, i, got[i], want[i]);
	nan_parts = gpu_fetch(ps.a.append.nan_count, 8);
	nan_one = gpu_fetch(os.a.append.nan_count, 8);
	KVT_EXPECT_EQ(*nan_one, *nan_parts);
	if (gpu_poisoned()) {
		untouched(&f, pool, 5);
		if (failed < NR_REQ)
			untouched(&f, pool, failed);
	}
	key_data_fini(data);
	kvt_paged_fini(&f);
	free(data);
	free(pool);
	free(want);
	free(got);
}

KVT_TEST(cuda_norm_rope_append_is_its_parts)
{
	struct kvt_rng g = {kvt_rand64()};

	gpu_ops();
	for (u32 i = 0; i < KV_ARRAY_SIZE(key_cases); i++)
		key_run(&g, &key_cases[i], i % 2 ? 0 : NR_REQ);
}

/* A request that failed is not appended, nor through a row without WRITE. */
KVT_TEST(cuda_norm_rope_append_touches_only_what_it_may)
{
	struct kvt_rng g = {kvt_rand64()};

	gpu_ops();
	for (u32 r = 0; r < NR_REQ; r++) {
		key_run(&g, &key_cases[0], r);
		key_run(&g, &key_cases[4], r);
	}
}

/* What the host's parts give, but for roundings: the pages as numbers, and q. */
static void key_reference(struct kvt_rng *g, const struct key_case *c)
{
	struct kv_layout l = key_layout(c);
	struct key_data *data = malloc(sizeof(*data));
	const u32 planes = c->mla ? 2 : 2 * c->nr_kv;
	struct kvt_paged f, h;
	struct key_side host, dev;
	struct gpu_paged d;
	double num = 0, den = 0;

	kvt_paged_init(&f, g, &l, NR_PAGES);
	kvt_paged_batch(&f, g, lens, q_lens, NR_REQ);
	key_data_make(data, g, c);
	for (size_t i = 0; i < data->nr_kv; i++)
		data->kv[i] = kvt_rng_normal(g);
	for (size_t i = 0; i < data->nr_v; i++)
		data->v[i] = kvt_rng_normal(g);
	for (size_t i = 0; i < data->nr_q; i++)
		data->q[i] = kvt_rng_normal(g);
	d = gpu_paged_make(&f, f.row_start[NR_REQ]);
	host = side_make(c, data, false, &f.pages, &f.batch);
	dev = side_make(c, data, true, &d.pages, &d.batch);
	KVT_EXPECT_EQ(kvk_host_ops()->norm_rope_append(&host.a, NULL), 0);
	KVT_EXPECT_EQ(gpu_ops()->norm_rope_append(&dev.a, NULL), 0);
	h = f;
	h.pages.base = gpu_fetch(d.pages.base, f.bytes);
	for (u32 r = 0; r < NR_REQ; r++)
		for (u32 p = lens[r] - q_lens[r]; p < lens[r]; p++)
			for (u32 plane = 0; plane < planes; plane++) {
				const u8 *want = kvt_paged_part(&f, r, p, 1);
				const u8 *got = kvt_paged_part(&h, r, p, 1);

				for (u32 i = 0; i < (c->mla ? plane ? 64 : 512 : c->head);
				     i++) {
					double a = kvt_paged_value(&f, got, 1, plane,
								   p % 64, i);
					double b = kvt_paged_value(&f, want, 1, plane,
								   p % 64, i);

					num += (a - b) * (a - b);
					den += b * b;
				}
			}
	KVT_EXPECT(den > 0);
	KVT_EXPECT_LE(sqrt(num / den), 5e-3);
	free(h.pages.base);
	acts_equal(c->acts, gpu_fetch(dev.q, dev.q_bytes), host.q,
		   dev.q_bytes / acts_bytes(c->acts, 1), 0.05, "q");
	key_data_fini(data);
	kvt_paged_fini(&f);
	free(data);
}

KVT_TEST(cuda_norm_rope_append_is_near_the_reference)
{
	struct kvt_rng g = {kvt_rand64()};

	gpu_ops();
	for (u32 i = 0; i < KV_ARRAY_SIZE(key_cases); i++)
		key_reference(&g, &key_cases[i]);
}
#else
#include "tests/kvt.h"

KVT_TEST(cuda_dense)
{
	KVT_SKIP("no GPU: built without CUDA");
}
#endif

KVT_MAIN()
