/* SPDX-License-Identifier: Apache-2.0 */
/*
 * families_ref.c - walks kvk_families: every reader and writer of page bytes asks the
 * verdict.
 *
 * A family is called with each way a verdict can fail: not one byte of a page may change,
 * the output must be NaN, and changing the pages must not change the output. A
 * page-touching family that this test does not know, or whose arguments hold no batch,
 * fails it.
 */
#include "tests/kvt.h"
#include "common.h"

enum { NR_LAYERS = 2, NR_HEADS = 4 };

/* Arguments of every page-touching family over two pools, with outputs. */
struct walk {
	struct kvt_rng g;
	struct kvt_paged src;
	struct kvt_paged dst;
	float *acts;
	float *out;
	size_t out_floats;
	u8 *buf;
	size_t buf_bytes;
	u32 crc[16];
	u64 nr_nan;
	union {
		struct kvk_append_args append;
		struct kvk_norm_rope_append_args key;
		struct kvk_attn_args attn;
		struct kvk_move_args move;
	} a;
	u32 nr_calls; /* ways to call the family */
};

/* @way: COPY (1) needs two pools of one layout, CONVERT a BF16 and an FP8 one */
static void walk_init(struct walk *w, bool mla, u32 way)
{
	static const u32 lens[] = {70, 3}, q_lens[] = {2, 3};
	struct kv_layout l =
		mla ? kvt_layout_mla(KV_DTYPE_BF16, KV_SCALE_NONE, NR_LAYERS)
		    : kvt_layout_gqa(KV_DTYPE_BF16, KV_SCALE_NONE, NR_LAYERS, 2, 64);
	struct kv_layout l8 = l;

	memset(w, 0, sizeof(*w));
	w->g.state = kvt_rand64();
	if (way != 1) {
		l8.dtype = KV_DTYPE_E4M3;
		l8.scale_kind = KV_SCALE_TOKEN;
	}
	kvt_paged_init(&w->src, &w->g, &l, 8);
	kvt_paged_init(&w->dst, &w->g, &l8, 8);
	kvt_paged_batch(&w->src, &w->g, lens, q_lens, 2);
	kvt_paged_batch(&w->dst, &w->g, lens, q_lens, 2);
	for (size_t i = 0; i < w->src.bytes; i++)
		((u8 *)w->src.pages.base)[i] = (u8)(kvt_rng_next(&w->g) & 0x3b);
	w->out_floats = 5ull * NR_HEADS * 512;
	w->acts = malloc(5ull * NR_HEADS * 576 * sizeof(float));
	w->out = malloc(w->out_floats * sizeof(float));
	w->buf_bytes = 3 * kv_page_bytes(&l);
	w->buf = malloc(w->buf_bytes);
	kvt_rng_fill(&w->g, w->acts, 5ull * NR_HEADS * 576, 1.0f);
}

static void walk_fini(struct walk *w)
{
	kvt_paged_fini(&w->src);
	kvt_paged_fini(&w->dst);
	free(w->acts);
	free(w->out);
	free(w->buf);
}

/* Fill the arguments of way @way to call a family; false: this test does not know it. */
static bool walk_args(struct walk *w, const char *name, u32 way)
{
	static const u32 ops[] = {KVK_MOVE_ZERO,    KVK_MOVE_COPY,    KVK_MOVE_GATHER,
				  KVK_MOVE_SCATTER, KVK_MOVE_CONVERT, KVK_MOVE_CRC};

	memset(&w->a, 0, sizeof(w->a));
	w->nr_calls = 1;
	if (!strcmp(name, "append")) {
		w->a.append = (struct kvk_append_args){.pages = w->src.pages,
						       .batch = w->src.batch,
						       .src_dtype = KVK_F32,
						       .latent = w->acts,
						       .rope = w->acts,
						       .k = w->acts,
						       .v = w->acts,
						       .nan_count = &w->nr_nan};
		return true;
	}
	if (!strcmp(name, "norm_rope_append")) {
		static const u32 positions[5] = {3, 0, 1, 15, 2};

		w->nr_calls = 2;
		w->a.key = kvt_key_args(&w->src.pages, &w->src.batch, w->acts, positions,
					way ? KVK_BF16 : KVK_F32);
		w->a.key.append.nan_count = &w->nr_nan;
		return true;
	}
	if (!strncmp(name, "attn_", 5)) {
		w->a.attn = (struct kvk_attn_args){.pages = w->src.pages,
						   .batch = w->src.batch,
						   .layer = 1,
						   .nr_q_heads = NR_HEADS,
						   .sm_scale = 0.1f,
						   .act_dtype = KVK_F32,
						   .q = w->acts,
						   .out = w->out};
		return !strcmp(name, "attn_mla") || !strcmp(name, "attn_gqa") ||
		       !strcmp(name, "attn_prefill");
	}
	w->nr_calls = KV_ARRAY_SIZE(ops);
	w->a.move = (struct kvk_move_args){.op = ops[way],
					   .src = w->src.pages,
					   .dst = w->dst.pages,
					   .src_batch = w->src.batch,
					   .dst_batch = w->dst.batch,
					   .buf = w->buf,
					   .ret_crc = w->crc};
	return !strcmp(name, "page_move");
}

typedef int call_fn(const void *args, kvk_stream stream);

static int walk_call(const struct walk *w, const struct kvk_family *fam)
{
	call_fn *fn = *(call_fn *const *)(const void *)((const u8 *)kvk_host_ops() +
							fam->ops_offset);

	return fn(&w->a, NULL);
}

static u64 digest(const void *p, size_t n)
{
	u64 h = 14695981039346656037ull;

	for (size_t i = 0; i < n; i++)
		h = (h ^ ((const u8 *)p)[i]) * 1099511628211ull;
	return h;
}

static u64 pages_digest(const struct walk *w)
{
	return digest(w->src.pages.base, w->src.bytes) ^
	       digest(w->dst.pages.base, w->dst.bytes) * 3;
}

static void outputs_clear(struct walk *w)
{
	memset(w->out, 0, w->out_floats * sizeof(float));
	memset(w->buf, 0, w->buf_bytes);
	memset(w->crc, 0x55, sizeof(w->crc));
	w->nr_nan = 0;
}

/* Both requests fail; @how says how their verdicts do. */
static void verdicts_fail(struct kvt_paged *f, u32 how)
{
	for (u32 r = 0; r < 2; r++) {
		f->verdicts[r] = (struct kv_verdict){.step = f->step,
						     .rows_checked = f->row_start[r + 1] -
								     f->row_start[r]};
		if (how == 1)
			f->verdicts[r].bits = KV_BAD_GEN;
		else if (how == 2)
			f->verdicts[r].step = f->step - 1; /* last step's verdict */
		else if (how == 3)
			f->verdicts[r].rows_checked = 0; /* nobody looked */
		else if (how == 4)
			memset(&f->verdicts[r], 0, sizeof(f->verdicts[r]));
	}
}

static void expect_failed_outputs(const struct walk *w, const char *name,
				  size_t out_floats)
{
	if (!strncmp(name, "attn_", 5))
		KVT_EXPECT_EQ(kvt_nr_finite(w->out, out_floats), 0);
	KVT_EXPECT_EQ(w->nr_nan, 0);
	if (strcmp(name, "page_move"))
		return;
	for (size_t i = 0; i < w->buf_bytes && w->a.move.op == KVK_MOVE_GATHER; i++)
		KVT_EXPECT_EQ(w->buf[i], 0xff);
	for (u32 i = 0; i < 3 && w->a.move.op == KVK_MOVE_CRC; i++)
		KVT_EXPECT_EQ(w->crc[i], 0);
}

/* One family, one way to call it: it works with good verdicts and keeps off with bad
 * ones. */
static void walk_way(const struct kvk_family *fam, u32 way, bool mla, u32 *ret_nr_calls)
{
	size_t out_floats = 5ull * NR_HEADS * (mla ? 512 : 64);
	u64 pages, outputs;
	struct walk w;

	walk_init(&w, mla, way);
	if (!walk_args(&w, fam->name, way))
		KVT_FAIL("%s touches pages and is not known here", fam->name);
	*ret_nr_calls = w.nr_calls;
	for (u32 how = 1; how <= 4; how++) {
		outputs_clear(&w);
		verdicts_fail(&w.src, how);
		verdicts_fail(&w.dst, how);
		pages = pages_digest(&w);
		KVT_EXPECT_EQ(walk_call(&w, fam), 0);
		if (pages_digest(&w) != pages)
			KVT_FAIL("%s wrote to pages of failed requests", fam->name);
		expect_failed_outputs(&w, fam->name, out_floats);
	}
	verdicts_fail(&w.src, 0);
	verdicts_fail(&w.dst, 0);
	outputs_clear(&w);
	pages = pages_digest(&w);
	outputs = digest(w.out, w.out_floats * 4) ^ digest(w.buf, w.buf_bytes) ^
		  digest(w.crc, sizeof(w.crc));
	KVT_EXPECT_EQ(walk_call(&w, fam), 0);
	/* else the checks above have shown nothing */
	KVT_EXPECT(pages != pages_digest(&w) ||
		   outputs !=
			   (digest(w.out, w.out_floats * 4) ^ digest(w.buf, w.buf_bytes) ^
			    digest(w.crc, sizeof(w.crc))));
	walk_fini(&w);
}

KVT_TEST(every_page_toucher_obeys_the_verdict)
{
	u32 nr_walked = 0;

	for (size_t i = 0; i < kvk_nr_families; i++) {
		const struct kvk_family *fam = &kvk_families[i];
		bool mla = strcmp(fam->name, "attn_gqa") != 0;
		u32 nr = 1;

		if (!fam->pages)
			continue;
		for (u32 way = 0; way < nr; way++)
			walk_way(fam, way, mla, &nr);
		nr_walked++;
	}
	KVT_EXPECT_EQ(nr_walked, 6);
}

/* One side of a two-sided move fails: neither page is touched. */
KVT_TEST(copy_and_convert_need_both_verdicts)
{
	for (u32 side = 0; side < 2; side++)
		for (u32 way = 1; way <= 4; way += 3) {
			const struct kvk_family *fam = &kvk_families[kvk_nr_families - 1];
			struct walk w;
			u64 pages;

			walk_init(&w, true, way);
			KVT_EXPECT(walk_args(&w, fam->name, way));
			verdicts_fail(side ? &w.src : &w.dst, 1);
			pages = pages_digest(&w);
			KVT_EXPECT_EQ(walk_call(&w, fam), 0);
			KVT_EXPECT(pages == pages_digest(&w));
			walk_fini(&w);
		}
}

/* A family whose arguments hold no batch has nothing to ask: it must refuse. */
KVT_TEST(page_toucher_without_batch_is_refused)
{
	for (size_t i = 0; i < kvk_nr_families; i++) {
		const struct kvk_family *fam = &kvk_families[i];
		struct kvk_batch *b;
		struct walk w;

		if (!fam->pages)
			continue;
		KVT_EXPECT(fam->batch_offset + sizeof(*b) <= fam->args_bytes);
		walk_init(&w, strcmp(fam->name, "attn_gqa") != 0, 2);
		KVT_EXPECT(walk_args(&w, fam->name, 2)); /* page_move: GATHER reads src */
		b = (struct kvk_batch *)(void *)((u8 *)&w.a + fam->batch_offset);
		KVT_EXPECT(b->verdicts == w.src.verdicts); /* the offset is right */
		b->verdicts = NULL;
		KVT_EXPECT_EQ(walk_call(&w, fam), -EINVAL);
		b->verdicts = w.src.verdicts;
		b->step = NULL;
		KVT_EXPECT_EQ(walk_call(&w, fam), -EINVAL);
		b->step = &w.src.step;
		b->rows = NULL;
		KVT_EXPECT_EQ(walk_call(&w, fam), -EINVAL);
		walk_fini(&w);
	}
}

/* Every hook from tag_check to page_move is in the list once, so none can hide from the
 * walk. */
KVT_TEST(families_list_every_hook_once)
{
	size_t first = offsetof(struct kvk_ops, tag_check);
	size_t last = offsetof(struct kvk_ops, page_move);
	size_t nr_hooks = (last - first) / sizeof(void *) + 1;

	KVT_EXPECT_EQ(kvk_nr_families, nr_hooks);
	/* behind page_move lie the two workspace sizes, which touch nothing */
	KVT_EXPECT_EQ(sizeof(struct kvk_ops) - last, 3 * sizeof(void *));
	for (size_t at = first; at <= last; at += sizeof(void *)) {
		u32 found = 0;

		for (size_t i = 0; i < kvk_nr_families; i++)
			found += kvk_families[i].ops_offset == at;
		KVT_EXPECT_EQ(found, 1);
		KVT_EXPECT(*(void *const *)(const void *)((const u8 *)kvk_host_ops() +
							  at) != NULL);
	}
	KVT_EXPECT(kvk_host_ops()->attn_workspace && kvk_host_ops()->moe_workspace);
	KVT_EXPECT_STR(kvk_host_ops()->name, "host");
}

/* A row that lacks WRITE is never written by a move, whatever its verdict says. */
KVT_TEST(moves_write_through_write_rows_only)
{
	for (u32 way = 0; way < 6; way++) {
		const struct kvk_family *fam = &kvk_families[kvk_nr_families - 1];
		struct walk w;
		u64 pages;

		walk_init(&w, true, way);
		KVT_EXPECT(walk_args(&w, fam->name, way));
		for (u32 i = 0; i < 3; i++)
			w.dst.rows[i].flags &= ~KV_ROW_WRITE;
		pages = pages_digest(&w);
		KVT_EXPECT_EQ(walk_call(&w, fam), 0);
		KVT_EXPECT(pages == pages_digest(&w));
		walk_fini(&w);
	}
}

KVT_MAIN()
