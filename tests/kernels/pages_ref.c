/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pages_ref.c - append and page_move of the host: what is written, and what is not.
 */
#include "tests/kvt.h"
#include "common.h"
#include "kernels/ref.h"

static struct kvt_rng rng;

/* -------------------------------------------------------------------------- append */

/* Bytes of the pool that differ from a copy. */
static size_t nr_changed(const struct kvt_paged *f, const u8 *copy)
{
	size_t n = 0;

	for (size_t i = 0; i < f->bytes; i++)
		n += ((const u8 *)f->pages.base)[i] != copy[i];
	return n;
}

static u8 *pool_copy(const struct kvt_paged *f)
{
	u8 *copy = malloc(f->bytes);

	memcpy(copy, f->pages.base, f->bytes);
	return copy;
}

/* A stored value against the source: the scale rule and e4m3's half step, or exact
 * rounding. */
static void expect_stored(const struct kvt_paged *f, double got, float x,
			  const float *plane, u32 dim, float static_scale)
{
	float amax = 0;
	double step;

	if (f->pages.layout.dtype == KV_DTYPE_F32) {
		KVT_EXPECT(got == x);
		return;
	}
	if (f->pages.layout.dtype == KV_DTYPE_BF16) {
		KVT_EXPECT(got == kvt_bf16(kvt_to_bf16(x)));
		return;
	}
	/* a static scale saturates what it does not cover */
	if (static_scale > 0)
		x = fmaxf(fminf(x, 448 * static_scale), -448 * static_scale);
	for (u32 i = 0; i < dim; i++)
		amax = fabsf(plane[i]) > amax ? fabsf(plane[i]) : amax;
	/* half a step of e4m3 is 2^-4 of the value, or 2^-10 of the scale near zero; fp16
	 * scales are up to 2^-10 above amax / 448 */
	step = static_scale > 0 ? static_scale : amax / 448 * 1.001;
	KVT_EXPECT_LE(fabs(got - x), fmax(fabs(x) / 16, step * 0x1p-10) * 1.0001);
}

static void check_append(const struct kv_layout *l)
{
	static const u32 lens[] = {1, 64, 130, 67};
	static const u32 q_lens[] = {1, 3, 70, 0};
	bool mla = l->kind == KV_LAYOUT_MLA;
	u32 planes = mla ? 2 : 2 * l->nr_kv_heads, layer = l->nr_layers - 1;
	u32 width[2] = {mla ? l->latent_dim : l->nr_kv_heads * l->head_dim,
			mla ? l->rope_dim : l->nr_kv_heads * l->head_dim};
	struct kvt_paged f;
	u64 nr_nan = 5;
	float *src[2];
	u8 *copy;

	kvt_paged_init(&f, &rng, l, 12);
	kvt_paged_batch(&f, &rng, lens, q_lens, 4);
	copy = pool_copy(&f);
	for (int i = 0; i < 2; i++) {
		src[i] = malloc(sizeof(float) * f.batch.nr_tokens * width[i]);
		kvt_rng_fill(&rng, src[i], (size_t)f.batch.nr_tokens * width[i], 0.2f);
	}
	{
		struct kvk_append_args a = {.pages = f.pages,
					    .batch = f.batch,
					    .layer = layer,
					    .src_dtype = KVK_F32,
					    .latent = src[0],
					    .rope = src[1],
					    .k = src[0],
					    .v = src[1],
					    .nan_count = &nr_nan};

		KVT_EXPECT_EQ(kvk_host_ops()->append(&a, NULL), 0);
	}
	KVT_EXPECT_EQ(nr_nan, 5);
	for (u32 r = 0; r < 4; r++)
		for (u32 t = 0; t < q_lens[r]; t++) {
			u32 pos = lens[r] - q_lens[r] + t, tok = f.q_start[r] + t;
			const u8 *part = kvt_paged_part(&f, r, pos, layer);

			for (u32 p = 0; p < planes; p++) {
				u32 dim = mla ? width[p] : l->head_dim;
				const float *x = src[p % 2] + (size_t)tok * width[p % 2] +
						 (mla ? 0 : p / 2 * dim);
				float st = l->scale_kind != KV_SCALE_STATIC ? 0
					   : mla ? f.scales[layer]
						 : f.scales[layer * planes + p];

				for (u32 i = 0; i < dim; i++)
					expect_stored(&f,
						      kvt_paged_value(&f, part, layer, p,
								      pos % 64, i),
						      x[i], x, dim, st);
			}
		}
	/* nothing but the slots of 74 tokens may change (a byte may be 0xff again) */
	KVT_EXPECT_LE(nr_changed(&f, copy),
		      74.0 * ((width[0] + width[1]) * kv_dtype_bytes(l->dtype) +
			      (l->scale_kind == KV_SCALE_TOKEN ? planes * 2 : 0)));
	free(src[0]);
	free(src[1]);
	free(copy);
	kvt_paged_fini(&f);
}

KVT_TEST(append_writes_every_layout)
{
	struct kv_layout l[] = {
		kvt_layout_mla(KV_DTYPE_F32, KV_SCALE_NONE, 1),
		kvt_layout_mla(KV_DTYPE_BF16, KV_SCALE_NONE, 2),
		kvt_layout_mla(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 2),
		kvt_layout_mla(KV_DTYPE_E4M3, KV_SCALE_STATIC, 2),
		kvt_layout_gqa(KV_DTYPE_F32, KV_SCALE_NONE, 1, 2, 64),
		kvt_layout_gqa(KV_DTYPE_BF16, KV_SCALE_NONE, 2, 3, 128),
		kvt_layout_gqa(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 2, 3, 64),
		kvt_layout_gqa(KV_DTYPE_E4M3, KV_SCALE_STATIC, 2, 2, 128)};

	rng.state = kvt_rand64();
	for (size_t i = 0; i < KV_ARRAY_SIZE(l); i++)
		check_append(&l[i]);
}

/* One token's append of @x into a fresh one-page pool. */
static void append_one(struct kvt_paged *f, const struct kv_layout *l, const float *x,
		       u64 *nr_nan)
{
	u32 one = 1;

	kvt_paged_init(f, &rng, l, 4);
	kvt_paged_batch(f, &rng, &one, &one, 1);
	{
		struct kvk_append_args a = {.pages = f->pages,
					    .batch = f->batch,
					    .src_dtype = KVK_F32,
					    .latent = x,
					    .rope = x + 512,
					    .nan_count = nr_nan};

		KVT_EXPECT_EQ(kvk_host_ops()->append(&a, NULL), 0);
	}
}

KVT_TEST(append_keeps_and_counts_nan)
{
	struct kv_layout l[] = {kvt_layout_mla(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 1),
				kvt_layout_mla(KV_DTYPE_E4M3, KV_SCALE_STATIC, 1),
				kvt_layout_mla(KV_DTYPE_BF16, KV_SCALE_NONE, 1)};

	rng.state = kvt_rand64();
	for (size_t i = 0; i < KV_ARRAY_SIZE(l); i++) {
		struct kvt_paged f;
		float x[576];
		u64 nr_nan = 10;
		const u8 *part;

		kvt_rng_fill(&rng, x, 576, 1.0f);
		x[3] = NAN;
		x[511] = NAN;
		x[575] = NAN;
		append_one(&f, &l[i], x, &nr_nan);
		KVT_EXPECT_EQ(nr_nan, 13);
		part = kvt_paged_part(&f, 0, 0, 0);
		for (u32 j = 0; j < 512; j++)
			KVT_EXPECT_EQ(isnan(kvt_paged_value(&f, part, 0, 0, 0, j)) != 0,
				      j == 3 || j == 511);
		KVT_EXPECT(isnan(kvt_paged_value(&f, part, 0, 1, 0, 63)));
		kvt_paged_fini(&f);
	}
}

KVT_TEST(append_of_zeros_and_of_huge_values)
{
	struct kv_layout l = kvt_layout_mla(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 1);
	struct kvt_paged f;
	float x[576] = {0};
	const u8 *part;
	u64 nr_nan = 0;

	rng.state = kvt_rand64();
	append_one(&f, &l, x, &nr_nan);
	part = kvt_paged_part(&f, 0, 0, 0);
	KVT_EXPECT_EQ(part[64 * 576] | part[64 * 576 + 1] << 8, 0x3c00); /* scale 1 */
	KVT_EXPECT(kvt_paged_value(&f, part, 0, 0, 0, 9) == 0);
	kvt_paged_fini(&f);
	x[0] = 1e30f;
	x[1] = -INFINITY;
	x[512] = 1e-30f;
	append_one(&f, &l, x, &nr_nan);
	part = kvt_paged_part(&f, 0, 0, 0);
	KVT_EXPECT(kvt_paged_value(&f, part, 0, 0, 0, 0) == 448.0 * 65504);
	KVT_EXPECT(kvt_paged_value(&f, part, 0, 0, 0, 1) == -448.0 * 65504);
	KVT_EXPECT_EQ(nr_nan, 0);
	kvt_paged_fini(&f);
}

KVT_TEST(append_only_through_write_rows)
{
	struct kv_layout l = kvt_layout_mla(KV_DTYPE_BF16, KV_SCALE_NONE, 1);
	u32 len = 130, q = 80; /* positions 50 .. 129: rows 0, 1 and 2 */
	struct kvt_paged f;
	float *x;
	u8 *copy;

	rng.state = kvt_rand64();
	x = calloc((size_t)q * 512, sizeof(float));
	kvt_paged_init(&f, &rng, &l, 8);
	kvt_paged_batch(&f, &rng, &len, &q, 1);
	f.rows[1].flags &= ~KV_ROW_WRITE;
	copy = pool_copy(&f);
	{
		struct kvk_append_args a = {.pages = f.pages,
					    .batch = f.batch,
					    .src_dtype = KVK_F32,
					    .latent = x,
					    .rope = x};

		KVT_EXPECT_EQ(kvk_host_ops()->append(&a, NULL), 0);
	}
	/* zeros over 0xff: every byte of the 14 + 2 tokens of rows 0 and 2, none of row 1
	 */
	KVT_EXPECT_EQ(nr_changed(&f, copy), 16 * 576 * 2);
	KVT_EXPECT_EQ(kvt_paged_part(&f, 0, 64, 0)[0], 0xff);
	free(copy);
	free(x);
	kvt_paged_fini(&f);
}

/* With checks switched off the engine writes good verdicts itself: a wild row must still
 * not become a wild address. */
KVT_TEST(row_outside_the_pool_is_never_an_address)
{
	struct kv_layout l = kvt_layout_mla(KV_DTYPE_BF16, KV_SCALE_NONE, 1);
	u32 len = 130, q = 1;
	struct kvt_paged f;
	float x[576] = {0}, out[512] = {0};
	u8 *copy;

	rng.state = kvt_rand64();
	kvt_paged_init(&f, &rng, &l, 8);
	kvt_paged_batch(&f, &rng, &len, &q, 1);
	copy = pool_copy(&f);
	f.rows[2].pfn = 0xfffffff0;
	{
		struct kvk_append_args a = {.pages = f.pages,
					    .batch = f.batch,
					    .src_dtype = KVK_F32,
					    .latent = x,
					    .rope = x};
		struct kvk_attn_args at = {.pages = f.pages,
					   .batch = f.batch,
					   .nr_q_heads = 1,
					   .act_dtype = KVK_F32,
					   .q = x,
					   .out = out};

		KVT_EXPECT_EQ(kvk_host_ops()->append(&a, NULL), 0);
		KVT_EXPECT_EQ(kvk_host_ops()->attn_mla(&at, NULL), 0);
	}
	KVT_EXPECT_EQ(nr_changed(&f, copy), 0);
	KVT_EXPECT_EQ(kvt_nr_finite(out, 512), 0);
	free(copy);
	kvt_paged_fini(&f);
}

/* A length shorter than the step's tokens is nonsense: nothing before position 0 is
 * written. */
KVT_TEST(append_skips_positions_before_the_sequence)
{
	struct kv_layout l = kvt_layout_mla(KV_DTYPE_BF16, KV_SCALE_NONE, 1);
	u32 len = 10, q = 10;
	struct kvt_paged f;
	float x[10 * 512] = {0};
	u8 *copy;

	rng.state = kvt_rand64();
	kvt_paged_init(&f, &rng, &l, 8);
	kvt_paged_batch(&f, &rng, &len, &q, 1);
	f.lengths[0] = 4;
	copy = pool_copy(&f);
	{
		struct kvk_append_args a = {.pages = f.pages,
					    .batch = f.batch,
					    .src_dtype = KVK_F32,
					    .latent = x,
					    .rope = x};

		KVT_EXPECT_EQ(kvk_host_ops()->append(&a, NULL), 0);
		KVT_EXPECT_EQ(nr_changed(&f, copy), 4 * 576 * 2);
		f.lengths[0] = 65; /* beyond its one row: the request fails as a whole */
		memcpy(f.pages.base, copy, f.bytes);
		KVT_EXPECT_EQ(kvk_host_ops()->append(&a, NULL), 0);
		KVT_EXPECT_EQ(nr_changed(&f, copy), 0);
		a.layer = 1;
		KVT_EXPECT_EQ(kvk_host_ops()->append(&a, NULL), -EINVAL);
	}
	free(copy);
	kvt_paged_fini(&f);
}

/* ----------------------------------------------------------------------- page_move */

/* Two pools of the same shape and a batch of 2 + 3 rows in each. */
struct move {
	struct kvt_paged src;
	struct kvt_paged dst;
	struct kvk_move_args a;
	u8 *src_copy;
	u8 *dst_copy;
};

static void move_init(struct move *m, const struct kv_layout *from,
		      const struct kv_layout *to, u32 op)
{
	static const u32 lens[] = {100, 190}, zero[] = {0, 0}, other[] = {200, 20};

	kvt_paged_init(&m->src, &rng, from, 10);
	kvt_paged_init(&m->dst, &rng, to, 10);
	kvt_paged_batch(&m->src, &rng, lens, zero, 2);
	kvt_paged_batch(&m->dst, &rng, other, zero, 2); /* 4 + 1 rows: split elsewhere */
	for (size_t i = 0; i < m->src.bytes; i++)
		((u8 *)m->src.pages.base)[i] = (u8)(kvt_rng_next(&rng) & 0x7b);
	m->src_copy = pool_copy(&m->src);
	m->dst_copy = pool_copy(&m->dst);
	m->a = (struct kvk_move_args){.op = op,
				      .src = m->src.pages,
				      .dst = m->dst.pages,
				      .src_batch = m->src.batch,
				      .dst_batch = m->dst.batch};
}

static void move_fini(struct move *m)
{
	kvt_paged_fini(&m->src);
	kvt_paged_fini(&m->dst);
	free(m->src_copy);
	free(m->dst_copy);
}

static u8 *row_page(const struct kvt_paged *f, u32 i)
{
	u32 pfn = f->rows[i].pfn;

	return (u8 *)f->pages.base + pfn / 4 * f->pages.geometry.extent_bytes +
	       pfn % 4 * f->pages.geometry.stride_bytes;
}

static bool page_is(const u8 *p, u8 byte, size_t n)
{
	for (size_t i = 0; i < n; i++)
		if (p[i] != byte)
			return false;
	return true;
}

KVT_TEST(move_zero_gather_scatter_crc)
{
	struct kv_layout l = kvt_layout_mla(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 2);
	size_t bytes = kv_page_bytes(&l);
	struct move m;
	u32 crc[5];
	u8 *buf;

	rng.state = kvt_rand64();
	move_init(&m, &l, &l, KVK_MOVE_ZERO);
	buf = malloc(5 * bytes);
	KVT_EXPECT_EQ(kvk_host_ops()->page_move(&m.a, NULL), 0);
	KVT_EXPECT_EQ(nr_changed(&m.dst, m.dst_copy), 5 * bytes);
	for (u32 i = 0; i < 5; i++)
		KVT_EXPECT(page_is(row_page(&m.dst, i), 0, bytes));
	m.a.op = KVK_MOVE_GATHER;
	m.a.buf = buf;
	KVT_EXPECT_EQ(kvk_host_ops()->page_move(&m.a, NULL), 0);
	m.a.op = KVK_MOVE_CRC;
	m.a.ret_crc = crc;
	KVT_EXPECT_EQ(kvk_host_ops()->page_move(&m.a, NULL), 0);
	for (u32 i = 0; i < 5; i++) {
		KVT_EXPECT(!memcmp(buf + i * bytes, row_page(&m.src, i), bytes));
		KVT_EXPECT_EQ(crc[i], kvk_crc32c_portable(row_page(&m.src, i), bytes));
	}
	m.a.op = KVK_MOVE_SCATTER;
	m.dst.rows[2].flags &= ~KV_ROW_WRITE;
	KVT_EXPECT_EQ(kvk_host_ops()->page_move(&m.a, NULL), 0);
	for (u32 i = 0; i < 5; i++)
		KVT_EXPECT(i == 2 ? page_is(row_page(&m.dst, 2), 0, bytes)
				  : !memcmp(buf + i * bytes, row_page(&m.dst, i), bytes));
	KVT_EXPECT_EQ(nr_changed(&m.src, m.src_copy), 0);
	free(buf);
	move_fini(&m);
}

KVT_TEST(move_copy_clears_the_tail)
{
	struct kv_layout ls[] = {kvt_layout_mla(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 2),
				 kvt_layout_gqa(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 2, 2, 64),
				 kvt_layout_gqa(KV_DTYPE_BF16, KV_SCALE_NONE, 1, 3, 64)};
	u32 tokens[5] = {64, 0, 1, 63, 17};

	rng.state = kvt_rand64();
	for (size_t k = 0; k < KV_ARRAY_SIZE(ls); k++) {
		u32 planes = ls[k].kind == KV_LAYOUT_MLA ? 2 : 2 * ls[k].nr_kv_heads;
		struct move m;

		move_init(&m, &ls[k], &ls[k], KVK_MOVE_COPY);
		m.a.nr_tokens = tokens;
		KVT_EXPECT_EQ(kvk_host_ops()->page_move(&m.a, NULL), 0);
		KVT_EXPECT_EQ(nr_changed(&m.src, m.src_copy), 0);
		KVT_EXPECT(!memcmp(row_page(&m.src, 0), row_page(&m.dst, 0),
				   kv_page_bytes(&ls[k])));
		for (u32 i = 1; i < 5; i++) {
			u32 sr = i < 2 ? 0 : 1, sp = i < 2 ? i : i - 2;
			u32 dr = i < 4 ? 0 : 1, dp = i < 4 ? i : 0,
			    layer = ls[k].nr_layers - 1;
			const u8 *s = kvt_paged_part(&m.src, sr, sp * 64, layer);
			const u8 *d = kvt_paged_part(&m.dst, dr, dp * 64, layer);
			u32 nonzero = 0;

			for (u32 p = 0; p < planes; p++)
				for (u32 slot = 0; slot < 64; slot++)
					for (u32 j = 0; j < 64; j += 3) {
						double a = kvt_paged_value(
							&m.src, s, layer, p, slot, j);
						double b = kvt_paged_value(
							&m.dst, d, layer, p, slot, j);

						KVT_EXPECT(slot < tokens[i] ? a == b
									    : b == 0);
						nonzero += b != 0;
					}
			KVT_EXPECT(tokens[i] == 0 ? !nonzero : nonzero > 0);
			if (!tokens[i])
				KVT_EXPECT(page_is(row_page(&m.dst, i), 0,
						   kv_page_bytes(&ls[k])));
		}
		move_fini(&m);
	}
}

/* Conversion must give the very bytes that append writes for the same values. */
static void check_convert(const struct kv_layout *from, const struct kv_layout *to)
{
	u32 len = 64, tokens[5] = {64, 64, 64, 64, 40};
	bool mla = from->kind == KV_LAYOUT_MLA;
	u32 w0 = mla ? 512 : from->nr_kv_heads * from->head_dim, w1 = mla ? 64 : w0;
	float *a = malloc(64ull * w0 * sizeof(float)),
	      *b = malloc(64ull * w1 * sizeof(float));
	struct kvt_paged direct;
	struct move m;

	move_init(&m, from, to, KVK_MOVE_CONVERT);
	m.a.nr_tokens = tokens;
	kvt_paged_init(&direct, &rng, to, 4);
	memcpy(direct.scales, m.dst.scales, sizeof(direct.scales));
	m.a.dst.scales = m.dst.pages.scales ? m.dst.scales : NULL;
	direct.pages.scales = m.dst.pages.scales ? direct.scales : NULL;
	kvt_paged_batch(&direct, &rng, &len, &len, 1);
	memset(direct.pages.base, 0, direct.bytes);
	KVT_EXPECT_EQ(kvk_host_ops()->page_move(&m.a, NULL), 0);
	for (u32 layer = 0; layer < to->nr_layers; layer++) {
		const u8 *part = kvt_paged_part(&m.src, 0, 0, layer);
		struct kvk_append_args ap = {.pages = direct.pages,
					     .batch = direct.batch,
					     .layer = layer,
					     .src_dtype = KVK_F32,
					     .latent = a,
					     .rope = b,
					     .k = a,
					     .v = b};

		for (u32 s = 0; s < 64; s++) {
			for (u32 i = 0; i < w0; i++)
				a[s * w0 + i] = (float)kvt_paged_value(
					&m.src, part, layer,
					mla ? 0 : i / from->head_dim * 2, s,
					mla ? i : i % from->head_dim);
			for (u32 i = 0; i < w1; i++)
				b[s * w1 + i] = (float)kvt_paged_value(
					&m.src, part, layer,
					mla ? 1 : i / from->head_dim * 2 + 1, s,
					mla ? i : i % from->head_dim);
		}
		KVT_EXPECT_EQ(kvk_host_ops()->append(&ap, NULL), 0);
	}
	KVT_EXPECT(!memcmp(row_page(&direct, 0), row_page(&m.dst, 0), kv_page_bytes(to)));
	KVT_EXPECT(kvt_paged_value(&m.dst, kvt_paged_part(&m.dst, 1, 0, 0), 0, 0, 40,
				   0) == 0);
	KVT_EXPECT_EQ(nr_changed(&m.src, m.src_copy), 0);
	kvt_paged_fini(&direct);
	move_fini(&m);
	free(a);
	free(b);
}

KVT_TEST(move_convert_equals_append)
{
	struct kv_layout mla = kvt_layout_mla(KV_DTYPE_BF16, KV_SCALE_NONE, 2);
	struct kv_layout mla8 = kvt_layout_mla(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 2);
	struct kv_layout mla8s = kvt_layout_mla(KV_DTYPE_E4M3, KV_SCALE_STATIC, 2);
	struct kv_layout gqa = kvt_layout_gqa(KV_DTYPE_BF16, KV_SCALE_NONE, 2, 2, 64);
	struct kv_layout gqa8 = kvt_layout_gqa(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 2, 2, 64);

	rng.state = kvt_rand64();
	check_convert(&mla, &mla8);
	check_convert(&mla, &mla8s);
	check_convert(&gqa, &gqa8);
}

KVT_TEST(move_refuses_what_does_not_fit)
{
	struct kv_layout l = kvt_layout_mla(KV_DTYPE_BF16, KV_SCALE_NONE, 1);
	struct move m;
	u8 *copy;

	rng.state = kvt_rand64();
	move_init(&m, &l, &l, 99);
	copy = pool_copy(&m.dst);
	KVT_EXPECT_EQ(kvk_host_ops()->page_move(&m.a, NULL), -EINVAL);
	m.a.op = KVK_MOVE_CONVERT; /* dst is not E4M3 */
	KVT_EXPECT_EQ(kvk_host_ops()->page_move(&m.a, NULL), -EINVAL);
	m.a.op = KVK_MOVE_GATHER; /* no buf */
	KVT_EXPECT_EQ(kvk_host_ops()->page_move(&m.a, NULL), -EINVAL);
	m.a.op = KVK_MOVE_CRC;
	KVT_EXPECT_EQ(kvk_host_ops()->page_move(&m.a, NULL), -EINVAL);
	m.a.op = KVK_MOVE_COPY;
	m.a.dst_batch.nr_requests = 1; /* 4 rows for 5 */
	KVT_EXPECT_EQ(kvk_host_ops()->page_move(&m.a, NULL), -EINVAL);
	m.a.dst_batch.nr_requests = 2;
	m.a.dst.layout.rope_dim = 32;
	KVT_EXPECT_EQ(kvk_host_ops()->page_move(&m.a, NULL), -EINVAL);
	KVT_EXPECT_EQ(nr_changed(&m.dst, copy), 0);
	free(copy);
	move_fini(&m);
}

/* O49: equal byte counts, other planes. Bytes of one are never taken for the other. */
KVT_TEST(o49_layouts_that_look_the_same)
{
	struct kv_layout two = kvt_layout_gqa(KV_DTYPE_BF16, KV_SCALE_NONE, 1, 2, 64);
	struct kv_layout one = kvt_layout_gqa(KV_DTYPE_BF16, KV_SCALE_NONE, 1, 1, 128);
	struct kv_layout st = kvt_layout_mla(KV_DTYPE_E4M3, KV_SCALE_STATIC, 1);
	struct kv_layout tok = kvt_layout_mla(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 1);
	struct move m;

	rng.state = kvt_rand64();
	KVT_EXPECT_EQ(kv_page_bytes(&two), kv_page_bytes(&one));
	move_init(&m, &two, &one, KVK_MOVE_COPY);
	KVT_EXPECT_EQ(kvk_host_ops()->page_move(&m.a, NULL), -EINVAL);
	m.a.op = KVK_MOVE_CONVERT;
	m.a.dst.layout.dtype = KV_DTYPE_E4M3;
	m.a.dst.layout.scale_kind = KV_SCALE_TOKEN;
	KVT_EXPECT_EQ(kvk_host_ops()->page_move(&m.a, NULL), -EINVAL);
	KVT_EXPECT_EQ(nr_changed(&m.dst, m.dst_copy), 0);
	move_fini(&m);
	move_init(&m, &tok, &st, KVK_MOVE_COPY); /* scales elsewhere */
	KVT_EXPECT_EQ(kvk_host_ops()->page_move(&m.a, NULL), -EINVAL);
	KVT_EXPECT_EQ(nr_changed(&m.dst, m.dst_copy), 0);
	move_fini(&m);
}

KVT_TEST(crc32c_known_answers)
{
	u8 buf[300];

	rng.state = kvt_rand64();
	KVT_EXPECT_EQ(kvk_crc32c("123456789", 9), 0xe3069283u);
	KVT_EXPECT_EQ(kvk_crc32c_portable("123456789", 9), 0xe3069283u);
	memset(buf, 0, 32);
	KVT_EXPECT_EQ(kvk_crc32c(buf, 32), 0x8a9136aau); /* RFC 3720, B.4 */
	memset(buf, 0xff, 32);
	KVT_EXPECT_EQ(kvk_crc32c_portable(buf, 32), 0x62a8ab43u);
	for (u32 n = 0; n < 300; n++) {
		for (u32 i = 0; i < n; i++)
			buf[i] = (u8)kvt_rng_next(&rng);
		KVT_EXPECT_EQ(kvk_crc32c(buf, n), kvk_crc32c_portable(buf, n));
	}
}

KVT_MAIN()
