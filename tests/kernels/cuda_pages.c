/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda_pages.c - the CUDA families that touch tags and pages against the host table, bit
 * by bit: tag_check, append, page_move.
 */
#ifdef CONFIG_CUDA
#include "cuda_common.h"

/* ------------------------------------------------------------------------------ tag_check
 */

enum { MIRROR_PAGES = 3000 };

/* A mirror and a step's block in host memory, the block with room for a full table. */
struct tags {
	struct kv_mirror *mirror;
	struct kv_step_block *block;
	size_t mirror_bytes;
	size_t block_bytes;
};

static u64 random_tag(struct kvt_rng *g)
{
	u64 flags = kvt_rng_below(g, 8) ? KV_TAG_LIVE : 0;

	return kv_tag_make(1 + kvt_rng_below(g, 3),
			   kvt_rng_below(g, 4) ? flags : flags | KV_TAG_SEALED);
}

static struct tags tags_make(struct kvt_rng *g)
{
	struct tags t = {.mirror_bytes = sizeof(*t.mirror) + MIRROR_PAGES * 8,
			 .block_bytes = sizeof(*t.block) + MIRROR_PAGES * 16};
	u64 *words;

	t.mirror = calloc(1, t.mirror_bytes);
	t.block = calloc(1, t.block_bytes);
	t.mirror->nr_pages = MIRROR_PAGES;
	t.mirror->position = 500;
	words = (u64 *)(void *)(t.mirror + 1);
	for (u32 i = 0; i < MIRROR_PAGES; i++)
		words[i] = random_tag(g);
	return t;
}

/* @kind: 0 delta, 1 a bad entry, 2 a gap, 3 full, 4 too many words, 5 an unknown kind,
 * 6 old news, 7 nothing new */
static void block_make(struct tags *t, struct kvt_rng *g, u32 kind, u32 nr)
{
	struct kv_step_block *b = t->block;
	struct kv_log_entry *log = (void *)(b + 1);
	u64 *words = (u64 *)(void *)(b + 1);

	*b = (struct kv_step_block){.step = kvt_rng_next(g),
				    .log_from = kind == 2   ? 501
						: kind == 6 ? 100
							    : 500,
				    .nr_pages = MIRROR_PAGES - 5,
				    .kind = kind == 3 || kind == 4 ? KV_BLOCK_FULL
					    : kind == 5		   ? 9
								   : KV_BLOCK_DELTA,
				    .nr_entries = kind == 7 ? 0 : nr};
	b->log_to = b->log_from + b->nr_entries + (kind == 3) * 7;
	if (b->kind == KV_BLOCK_FULL) {
		for (u32 i = 0; i < nr; i++)
			words[i] = random_tag(g);
		if (kind == 4)
			t->mirror->nr_pages = nr - 3;
		return;
	}
	for (u32 i = 0; i < nr; i++)
		log[i] = (struct kv_log_entry){.tag = random_tag(g),
					       .pfn = kvt_rng_below(g, MIRROR_PAGES),
					       .sequence = (u32)(b->log_from + i)};
	if (kind == 1) {
		log[nr / 2].sequence ^= 1;
		log[nr - 1].pfn = MIRROR_PAGES;
	}
}

/* Rows that are mostly right, with defects of every kind in some requests. */
static void rows_make(struct kvt_paged *f, struct kvt_rng *g, const struct tags *t)
{
	const u64 *words = (const u64 *)(const void *)(t->mirror + 1);

	for (u32 r = 0; r < f->batch.nr_requests; r++) {
		u32 clean = kvt_rng_below(g, 2);

		for (u32 i = f->row_start[r]; i < f->row_start[r + 1]; i++) {
			u32 pfn = kvt_rng_below(g, MIRROR_PAGES - 5);

			if (!clean && !kvt_rng_below(g, 50))
				pfn += 4000;
			for (u32 n = 0; clean && n < 100 && !kv_tag_live(words[pfn]); n++)
				pfn = kvt_rng_below(g, MIRROR_PAGES - 5);
			f->rows[i] = kv_row_make(pfn, pfn < MIRROR_PAGES ? words[pfn] : 7,
						 0, f->nonces[r], i - f->row_start[r]);
			if (!clean && !kvt_rng_below(g, 50))
				f->rows[i].flags ^= KV_ROW_WRITE;
			if (!clean && !kvt_rng_below(g, 99))
				f->rows[i].flags ^= 1u << 20;
		}
		if (!clean && !kvt_rng_below(g, 3))
			f->lengths[r] += 64;
	}
}

static void tags_case(struct kvt_rng *g, u32 kind, u32 nr_entries, u32 nr_requests)
{
	const struct kvk_ops *gpu = gpu_ops();
	struct kv_layout l = kvt_layout_gqa(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 1, 1, 64);
	struct kvk_tag_check_args a = {.page_tokens = 64}, d;
	u32 lengths[256], q_lens[256];
	struct tags t = tags_make(g);
	struct kv_verdict *got;
	struct gpu_paged dp;
	struct kvt_paged f;

	for (u32 r = 0; r < nr_requests; r++) {
		lengths[r] = kvt_rng_below(g, r % 8 ? 700 : 140000) * (r % 5 != 1);
		q_lens[r] = 1;
	}
	kvt_paged_init(&f, g, &l, 4);
	free(f.pages.base); /* no page byte is looked at */
	f.pages.base = NULL;
	f.bytes = 0;
	f.pages.geometry.nr_pages = 80000;
	kvt_paged_batch(&f, g, lengths, q_lens, nr_requests);
	rows_make(&f, g, &t);
	block_make(&t, g, kind, nr_entries);
	dp = gpu_paged_make(&f, f.row_start[nr_requests]);
	d = a;
	a.block = t.block;
	a.mirror = t.mirror;
	a.batch = f.batch;
	a.nonces = f.nonces;
	a.ret_verdicts = f.verdicts;
	d.block = gpu_copy(t.block, t.block_bytes);
	d.mirror = gpu_copy(t.mirror, t.mirror_bytes);
	d.batch = dp.batch;
	d.nonces = gpu_copy(f.nonces, nr_requests * 8);
	d.ret_verdicts = gpu_alloc(nr_requests * sizeof(*got));
	for (u32 twice = 0; twice < 2; twice++) {
		KVT_EXPECT_EQ(kvk_host_ops()->tag_check(&a, NULL), 0);
		KVT_EXPECT_EQ(gpu->tag_check(&d, NULL), 0);
		got = gpu_fetch(d.ret_verdicts, nr_requests * sizeof(*got));
		for (u32 r = 0; r < nr_requests; r++)
			if (memcmp(&got[r], &f.verdicts[r], sizeof(*got)))
				KVT_FAIL("kind %u, %u entries, request %u of %u: bits %x "
					 "rows %u, not %x %u",
					 kind, nr_entries, r, nr_requests, got[r].bits,
					 got[r].rows_checked, f.verdicts[r].bits,
					 f.verdicts[r].rows_checked);
		KVT_EXPECT(!memcmp(gpu_fetch(d.mirror, t.mirror_bytes), t.mirror,
				   t.mirror_bytes));
	}
}

KVT_TEST(cuda_tag_check_is_the_reference)
{
	static const u32 sizes[] = {1, 2, 37, 700, 2900};
	struct kvt_rng g = {kvt_rand64()};

	gpu_ops();
	for (u32 kind = 0; kind < 8; kind++)
		for (u32 i = 0; i < KV_ARRAY_SIZE(sizes); i++)
			if (sizes[i] > 3 || kind != 4)
				tags_case(&g, kind, sizes[i], 1 + kvt_rng_below(&g, 20));
	tags_case(&g, 0, 5, 0);
	tags_case(&g, 3, 5, 0);
	tags_case(&g, 0, 5, 129);
}

/* --------------------------------------------------------------------------------- append
 */

static const u32 lens[] = {70, 0, 64, 3, 200, 1}, q_lens[] = {2, 0, 64, 3, 0, 1};
enum { NR_REQ = KV_ARRAY_SIZE(lens), NR_TOKENS = 70, NR_LAYERS = 2, NR_PAGES = 24 };
/* prompts, where a warp takes several tokens */
static const u32 many_lens[] = {4300, 0, 64, 3, 200, 1};
static const u32 many_q_lens[] = {4101, 0, 64, 3, 0, 1};
enum { MANY_TOKENS = 4169, MANY_PAGES = 80 };

/* The layouts that exist, one with an odd head size and one in F32. */
static struct kv_layout layout_of(u32 i)
{
	switch (i) {
	case 0:
		return kvt_layout_mla(KV_DTYPE_BF16, KV_SCALE_NONE, NR_LAYERS);
	case 1:
		return kvt_layout_mla(KV_DTYPE_E4M3, KV_SCALE_TOKEN, NR_LAYERS);
	case 2:
		return kvt_layout_mla(KV_DTYPE_E4M3, KV_SCALE_STATIC, NR_LAYERS);
	case 3:
		return kvt_layout_gqa(KV_DTYPE_BF16, KV_SCALE_NONE, NR_LAYERS, 2, 64);
	case 4:
		return kvt_layout_gqa(KV_DTYPE_E4M3, KV_SCALE_TOKEN, NR_LAYERS, 3, 128);
	case 5:
		return kvt_layout_gqa(KV_DTYPE_E4M3, KV_SCALE_STATIC, NR_LAYERS, 2, 64);
	case 6:
		return kvt_layout_gqa(KV_DTYPE_E4M3, KV_SCALE_TOKEN, NR_LAYERS, 1, 37);
	default:
		return kvt_layout_gqa(KV_DTYPE_F32, KV_SCALE_NONE, NR_LAYERS, 2, 64);
	}
}

enum { NR_LAYOUTS = 8 };

/* Values with what rounding has trouble with, NaN and infinity among them. */
static void odd_values(struct kvt_rng *g, float *x, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		x[i] = kvt_rng_normal(g) * (kvt_rng_below(g, 9) ? 1.0f : 300.0f);
		if (!kvt_rng_below(g, 500))
			x[i] = kvt_rng_below(g, 2) ? NAN : -NAN;
		else if (!kvt_rng_below(g, 900))
			x[i] = -INFINITY;
		else if (!kvt_rng_below(g, 50))
			x[i] = 0;
	}
	for (size_t i = 0; i < n / 8; i++)
		x[i] = 0; /* tokens of zeros */
	/* tokens whose scale is 1.5 and whose quotients lie between two codes, or beside that */
	for (size_t i = n / 4 / 64 * 64; i < n / 2; i++) {
		float tie = ldexpf((float)(2 * kvt_rng_below(g, 16) + 1),
				   (int)kvt_rng_below(g, 12) - 10);

		x[i] = i % 16 == 0 ? 672 : kvt_rng_below(g, 3) ? tie * 1.5f : tie * 1.51f;
	}
	x[n / 2] = NAN;
}

static void append_case(struct kvt_rng *g, u32 layout, u32 src_dtype, bool all_fail,
			bool many)
{
	const struct kvk_ops *gpu = gpu_ops();
	struct kv_layout l = layout_of(layout);
	u32 per = l.kind == KV_LAYOUT_MLA ? l.latent_dim : l.nr_kv_heads * l.head_dim;
	struct kvk_append_args a = {.layer = 1, .src_dtype = src_dtype}, d;
	size_t n = (size_t)(many ? MANY_TOKENS : NR_TOKENS) * per;
	float *x = malloc(n * 4), *y = malloc(n * 4);
	u64 host_nan = 5, *got_nan;
	struct gpu_paged dp;
	struct kvt_paged f;

	kvt_paged_init(&f, g, &l, many ? MANY_PAGES : NR_PAGES);
	kvt_paged_batch(&f, g, many ? many_lens : lens, many ? many_q_lens : q_lens,
			NR_REQ);
	f.rows[f.row_start[5]].flags &= ~KV_ROW_WRITE;
	verdict_fail(&f, 3, kvt_rng_below(g, 4));
	for (u32 r = 0; r < NR_REQ && all_fail; r++)
		verdict_fail(&f, r, kvt_rng_below(g, 4));
	odd_values(g, x, n);
	odd_values(g, y, n);
	dp = gpu_paged_make(&f, f.row_start[NR_REQ]);
	a.latent = a.k = acts_make(src_dtype, x, n);
	a.rope = a.v = acts_make(src_dtype, y, n);
	d = a;
	d.latent = d.k = gpu_copy(a.k, acts_bytes(src_dtype, n));
	d.rope = d.v = gpu_copy(a.v, acts_bytes(src_dtype, n));
	a.pages = f.pages;
	a.batch = f.batch;
	a.nan_count = &host_nan;
	d.pages = dp.pages;
	d.batch = dp.batch;
	d.nan_count = gpu_copy(&host_nan, 8);
	KVT_EXPECT_EQ(kvk_host_ops()->append(&a, NULL), 0);
	KVT_EXPECT_EQ(gpu->append(&d, NULL), 0);
	gpu_pages_equal(&dp, &f, "append");
	got_nan = gpu_fetch(d.nan_count, 8);
	KVT_EXPECT_EQ(*got_nan, host_nan);
	KVT_EXPECT(all_fail ? host_nan == 5 : host_nan > 5);
	kvt_paged_fini(&f);
}

KVT_TEST(cuda_append_is_the_reference)
{
	struct kvt_rng g = {kvt_rand64()};

	gpu_ops();
	for (u32 layout = 0; layout < NR_LAYOUTS; layout++)
		for (u32 dtype = KVK_F32; dtype <= KVK_BF16; dtype++) {
			append_case(&g, layout, dtype, false, false);
			append_case(&g, layout, dtype, true, false);
		}
	for (u32 layout = 0; layout < 6; layout++)
		append_case(&g, layout, KVK_BF16, false, true);
}

/* Even a row that passed its check never becomes an address outside the pool. */
KVT_TEST(cuda_row_outside_the_pool_is_never_an_address)
{
	struct kv_layout l = layout_of(1);
	struct kvk_append_args a = {.src_dtype = KVK_F32};
	const u32 one = 5, all[] = {KVK_MOVE_ZERO, KVK_MOVE_GATHER};
	const struct kvk_ops *gpu = gpu_ops();
	struct kvt_rng g = {kvt_rand64()};
	float x[5 * 512] = {0};
	struct gpu_paged d;
	struct kvt_paged f;
	u8 *buf;

	kvt_paged_init(&f, &g, &l, 8);
	kvt_paged_batch(&f, &g, &one, &one, 1);
	f.rows[0].pfn = 7; /* the bytes are there, but not ours */
	f.pages.geometry.nr_pages = 7;
	d = gpu_paged_make(&f, 1);
	a.pages = d.pages;
	a.batch = d.batch;
	a.latent = a.rope = gpu_copy(x, sizeof(x));
	KVT_EXPECT_EQ(gpu->append(&a, NULL), 0);
	gpu_pages_equal(&d, &f, "append");
	memset(f.pages.base, 0x11, f.bytes);
	gpu_put(d.pages.base, f.pages.base, f.bytes);
	for (u32 i = 0; i < 2; i++) {
		struct kvk_move_args m = {.op = all[i],
					  .src = d.pages,
					  .dst = d.pages,
					  .src_batch = d.batch,
					  .dst_batch = d.batch,
					  .buf = gpu_alloc(kv_page_bytes(&l))};

		KVT_EXPECT_EQ(gpu->page_move(&m, NULL), 0);
		gpu_pages_equal(&d, &f, "page_move");
		if (!gpu_poisoned())
			continue; /* nobody has written to it */
		buf = gpu_fetch(m.buf, kv_page_bytes(&l));
		for (size_t at = 0; at < kv_page_bytes(&l); at++)
			KVT_EXPECT_EQ(buf[at], 0xff);
	}
}

/* ------------------------------------------------------------------------------ page_move
 */

static void pages_fill(struct kvt_paged *f, struct kvt_rng *g)
{
	u64 *w = (u64 *)f->pages.base;

	/* BF16 and e4m3 values without NaN, of any size */
	for (size_t i = 0; i < f->bytes / 8; i++)
		w[i] = kvt_rng_next(g) & 0xbf7fbf7fbf7fbf7full;
}

/* @op on two pools of @layout, or BF16 -> FP8; some requests fail, some rows lack WRITE */
static void move_case(struct kvt_rng *g, u32 op, u32 layout, bool tails)
{
	const struct kvk_ops *gpu = gpu_ops();
	struct kv_layout l = layout_of(layout), from = l;
	struct kvk_move_args a = {.op = op}, d;
	struct gpu_paged ds, dd;
	struct kvt_paged s, t;
	u32 tokens[16], crc[16], *got_crc;
	size_t bytes;
	u8 *buf, *got;

	if (op == KVK_MOVE_CONVERT) {
		from.dtype = KV_DTYPE_BF16;
		from.scale_kind = KV_SCALE_NONE;
		from.nr_scales = 0;
	}
	kvt_paged_init(&s, g, &from, NR_PAGES);
	kvt_paged_init(&t, g, &l, NR_PAGES);
	kvt_paged_batch(&s, g, lens, q_lens, NR_REQ);
	kvt_paged_batch(&t, g, lens, q_lens, NR_REQ);
	pages_fill(&s, g);
	pages_fill(&t, g);
	verdict_fail(&s, kvt_rng_below(g, NR_REQ), kvt_rng_below(g, 4));
	verdict_fail(&t, kvt_rng_below(g, NR_REQ), kvt_rng_below(g, 4));
	t.rows[kvt_rng_below(g, 9)].flags &= ~KV_ROW_WRITE;
	for (u32 i = 0; i < 16; i++)
		tokens[i] = kvt_rng_below(g, 67);
	ds = gpu_paged_make(&s, s.row_start[NR_REQ]);
	dd = gpu_paged_make(&t, t.row_start[NR_REQ]);
	bytes = s.row_start[NR_REQ] * kv_page_bytes(&l);
	buf = malloc(bytes);
	for (size_t i = 0; i < bytes; i++)
		buf[i] = (u8)kvt_rng_next(g);
	memset(crc, 0xff, sizeof(crc));
	d = a = (struct kvk_move_args){.op = op};
	a.src = s.pages, a.dst = t.pages, a.src_batch = s.batch, a.dst_batch = t.batch;
	d.src = ds.pages, d.dst = dd.pages, d.src_batch = ds.batch,
	d.dst_batch = dd.batch;
	a.nr_tokens = tails ? tokens : NULL;
	d.nr_tokens = tails ? gpu_copy(tokens, sizeof(tokens)) : NULL;
	a.buf = buf;
	d.buf = gpu_copy(buf, bytes);
	a.ret_crc = crc;
	d.ret_crc = gpu_copy(crc, sizeof(crc));
	KVT_EXPECT_EQ(kvk_host_ops()->page_move(&a, NULL), 0);
	KVT_EXPECT_EQ(gpu->page_move(&d, NULL), 0);
	gpu_pages_equal(&ds, &s, "page_move: src");
	gpu_pages_equal(&dd, &t, "page_move: dst");
	got = gpu_fetch(d.buf, bytes);
	got_crc = gpu_fetch(d.ret_crc, sizeof(crc));
	KVT_EXPECT(!memcmp(got, buf, bytes));
	for (u32 i = 0; i < 16; i++)
		KVT_EXPECT_EQ(got_crc[i], crc[i]);
	kvt_paged_fini(&s);
	kvt_paged_fini(&t);
}

KVT_TEST(cuda_page_move_is_the_reference)
{
	struct kvt_rng g = {kvt_rand64()};

	gpu_ops();
	for (u32 op = KVK_MOVE_ZERO; op <= KVK_MOVE_CRC; op++)
		for (u32 layout = 0; layout < NR_LAYOUTS; layout++) {
			if (op == KVK_MOVE_CONVERT &&
			    layout_of(layout).dtype != KV_DTYPE_E4M3)
				continue;
			move_case(&g, op, layout, false);
			move_case(&g, op, layout, true);
		}
}
#else
#include "tests/kvt.h"

KVT_TEST(cuda_families)
{
	KVT_SKIP("no GPU: built without CUDA");
}
#endif

KVT_MAIN()
