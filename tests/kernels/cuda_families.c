/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda_families.c - what holds for the CUDA table as a whole: every family that touches
 * pages obeys the verdict, and a captured step gives the same results when it is replayed
 * with other rows, lengths and verdicts. Each family's numbers are judged in cuda_pages.c,
 * attn_cuda.c and moe_cuda.c.
 */
#ifdef CONFIG_CUDA
#include "cuda_common.h"

/* ----------------------------------------------------------------- every page toucher
 */

/* Arguments of a family over two pools; both requests pass or fail together. */
struct walk {
	struct kvt_rng g;
	struct kvt_paged src, dst;
	struct gpu_paged dsrc, ddst;
	size_t out_bytes, buf_bytes;
	void *acts, *out, *buf, *crc, *nr_nan;
	union {
		struct kvk_append_args append;
		struct kvk_norm_rope_append_args key;
		struct kvk_attn_args attn;
		struct kvk_move_args move;
	} a;
	u32 nr_calls;
};

static void walk_init(struct walk *w, const char *name, u32 way)
{
	static const u32 two[] = {70, 3}, q_two[] = {2, 3};
	bool mla = strcmp(name, "attn_gqa") != 0;
	struct kv_layout l = mla ? kvt_layout_mla(KV_DTYPE_BF16, KV_SCALE_NONE, 2)
				 : kvt_layout_gqa(KV_DTYPE_BF16, KV_SCALE_NONE, 2, 2, 64);
	struct kv_layout l8 = l;
	float *x = malloc(5 * 4 * 576 * 4);

	memset(w, 0, sizeof(*w));
	w->g.state = kvt_rand64();
	l8.dtype = KV_DTYPE_E4M3;
	l8.scale_kind = KV_SCALE_TOKEN;
	kvt_paged_init(&w->src, &w->g, &l, 8);
	kvt_paged_init(&w->dst, &w->g, way == 1 ? &l : &l8, 8); /* 1: COPY */
	kvt_paged_batch(&w->src, &w->g, two, q_two, 2);
	kvt_paged_batch(&w->dst, &w->g, two, q_two, 2);
	for (size_t i = 0; i < w->src.bytes; i++)
		((u8 *)w->src.pages.base)[i] = (u8)(kvt_rng_next(&w->g) & 0x3b);
	w->dsrc = gpu_paged_make(&w->src, 8);
	w->ddst = gpu_paged_make(&w->dst, 8);
	kvt_rng_fill(&w->g, x, 5 * 4 * 576, 1.0f);
	w->acts = gpu_copy(x, 5 * 4 * 576 * 4);
	w->out_bytes = 5 * 4 * (mla ? 512 : 64) * 4;
	w->buf_bytes = 3 * kv_page_bytes(&l);
	w->out = gpu_alloc(w->out_bytes);
	w->buf = gpu_alloc(w->buf_bytes);
	w->crc = gpu_alloc(3 * 4);
	w->nr_nan = gpu_alloc(8);
	free(x);
}

static bool walk_args(struct walk *w, const char *name, u32 way)
{
	const struct kvk_ops *gpu = gpu_ops();

	memset(&w->a, 0, sizeof(w->a));
	w->nr_calls = 1;
	if (!strcmp(name, "append")) {
		w->a.append = (struct kvk_append_args){.pages = w->dsrc.pages,
						       .batch = w->dsrc.batch,
						       .src_dtype = KVK_F32,
						       .latent = w->acts,
						       .rope = w->acts,
						       .nan_count = w->nr_nan};
		return true;
	}
	if (!strcmp(name, "norm_rope_append")) { /* in parts; in one kernel */
		static const u32 positions[5] = {3, 0, 1, 15, 2};

		w->nr_calls = 2;
		w->a.key = kvt_key_args(&w->dsrc.pages, &w->dsrc.batch, w->acts,
					gpu_copy(positions, sizeof(positions)),
					way ? KVK_BF16 : KVK_F32);
		w->a.key.append.nan_count = w->nr_nan;
		return true;
	}
	if (!strncmp(name, "attn_", 5)) {
		w->a.attn = (struct kvk_attn_args){.pages = w->dsrc.pages,
						   .batch = w->dsrc.batch,
						   .layer = 1,
						   .nr_q_heads = 4,
						   .sm_scale = 0.1f,
						   .act_dtype = KVK_F32,
						   .q = w->acts,
						   .out = w->out};
		w->a.attn.workspace_bytes = gpu->attn_workspace(&w->a.attn);
		w->a.attn.workspace = gpu_alloc(w->a.attn.workspace_bytes);
		return true;
	}
	w->nr_calls = 6;
	w->a.move = (struct kvk_move_args){.op = KVK_MOVE_ZERO + way,
					   .src = w->dsrc.pages,
					   .dst = w->ddst.pages,
					   .src_batch = w->dsrc.batch,
					   .dst_batch = w->ddst.batch,
					   .buf = w->buf,
					   .ret_crc = w->crc};
	return !strcmp(name, "page_move");
}

typedef int call_fn(const void *args, kvk_stream stream);

static int walk_call(const struct walk *w, const struct kvk_family *fam)
{
	call_fn *fn = *(call_fn *const *)(const void *)((const u8 *)kvk_cuda_ops() +
							fam->ops_offset);

	return fn(&w->a, NULL);
}

/* @how: 0 pass, 1 .. 4 fail */
static void walk_verdicts(struct walk *w, u32 how)
{
	struct kvt_paged *pool[2] = {&w->src, &w->dst};

	for (u32 i = 0; i < 2; i++)
		for (u32 r = 0; r < 2; r++) {
			pool[i]->verdicts[r] = (struct kv_verdict){
				.step = pool[i]->step,
				.rows_checked = pool[i]->row_start[r + 1] -
						pool[i]->row_start[r]};
			if (how)
				verdict_fail(pool[i], r, how - 1);
		}
	gpu_paged_update(&w->dsrc, &w->src);
	gpu_paged_update(&w->ddst, &w->dst);
}

static u64 gpu_digest(const void *p, size_t bytes)
{
	u8 *host = gpu_fetch(p, bytes);
	u64 h = 14695981039346656037ull;

	for (size_t i = 0; i < bytes; i++)
		h = (h ^ host[i]) * 1099511628211ull;
	free(host);
	return h;
}

static u64 walk_digest(const struct walk *w)
{
	return gpu_digest(w->dsrc.pages.base, w->src.bytes) ^
	       gpu_digest(w->ddst.pages.base, w->dst.bytes) * 3;
}

static u64 walk_outputs(const struct walk *w)
{
	return gpu_digest(w->out, w->out_bytes) ^ gpu_digest(w->buf, w->buf_bytes) ^
	       gpu_digest(w->crc, 12);
}

static void expect_failed(const struct walk *w, const char *name)
{
	float *out = gpu_fetch(w->out, w->out_bytes);
	u8 *buf = gpu_fetch(w->buf, w->buf_bytes);
	u32 *crc = gpu_fetch(w->crc, 12);
	u64 *nr_nan = gpu_fetch(w->nr_nan, 8);

	if (!strncmp(name, "attn_", 5))
		KVT_EXPECT_EQ(kvt_nr_finite(out, w->out_bytes / 4), 0);
	KVT_EXPECT_EQ(*nr_nan, 0);
	if (strcmp(name, "page_move"))
		return;
	for (size_t i = 0; i < w->buf_bytes && w->a.move.op == KVK_MOVE_GATHER; i++)
		KVT_EXPECT_EQ(buf[i], 0xff);
	for (u32 i = 0; i < 3 && w->a.move.op == KVK_MOVE_CRC; i++)
		KVT_EXPECT_EQ(crc[i], 0);
}

static void walk_clear(const struct walk *w)
{
	CU(cudaMemset(w->out, 0, w->out_bytes));
	CU(cudaMemset(w->buf, 0, w->buf_bytes));
	CU(cudaMemset(w->crc, 0x55, 12));
	CU(cudaMemset(w->nr_nan, 0, 8));
}

static void walk_way(const struct kvk_family *fam, u32 way, u32 *ret_nr_calls)
{
	u64 pages, outputs;
	struct walk w;

	walk_init(&w, fam->name, way);
	if (!walk_args(&w, fam->name, way))
		KVT_FAIL("%s touches pages and is not known here", fam->name);
	*ret_nr_calls = w.nr_calls;
	for (u32 how = 1; how <= 4; how++) {
		walk_clear(&w);
		walk_verdicts(&w, how);
		pages = walk_digest(&w);
		KVT_EXPECT_EQ(walk_call(&w, fam), 0);
		if (walk_digest(&w) != pages)
			KVT_FAIL("%s wrote to pages of failed requests", fam->name);
		expect_failed(&w, fam->name);
	}
	walk_clear(&w);
	walk_verdicts(&w, 0);
	pages = walk_digest(&w);
	outputs = walk_outputs(&w);
	KVT_EXPECT_EQ(walk_call(&w, fam), 0);
	/* else the checks above have shown nothing */
	KVT_EXPECT(pages != walk_digest(&w) || outputs != walk_outputs(&w));
}

KVT_TEST(cuda_every_page_toucher_obeys_the_verdict)
{
	u32 nr_walked = 0;

	gpu_ops();
	for (size_t i = 0; i < kvk_nr_families; i++) {
		u32 nr = 1;

		if (!kvk_families[i].pages)
			continue;
		for (u32 way = 0; way < nr; way++)
			walk_way(&kvk_families[i], way, &nr);
		nr_walked++;
	}
	KVT_EXPECT_EQ(nr_walked, 6);
}

/* A family whose arguments hold no batch has nothing to ask: it must refuse. */
KVT_TEST(cuda_page_toucher_without_batch_is_refused)
{
	gpu_ops();
	for (size_t i = 0; i < kvk_nr_families; i++) {
		const struct kvk_family *fam = &kvk_families[i];
		struct kvk_batch *b, keep;
		struct walk w;

		if (!fam->pages)
			continue;
		walk_init(&w, fam->name, 2);
		KVT_EXPECT(walk_args(&w, fam->name, 2)); /* page_move: GATHER reads src */
		b = (struct kvk_batch *)(void *)((u8 *)&w.a + fam->batch_offset);
		keep = *b;
		b->verdicts = NULL;
		KVT_EXPECT_EQ(walk_call(&w, fam), -EINVAL);
		*b = keep;
		b->step = NULL;
		KVT_EXPECT_EQ(walk_call(&w, fam), -EINVAL);
		*b = keep;
		b->rows = NULL;
		KVT_EXPECT_EQ(walk_call(&w, fam), -EINVAL);
	}
}

/* ---------------------------------------------------------------------- a captured step
 */

enum { STEP_REQ = 4, STEP_PAGES = 32, STEP_HEADS = 4 };

/* A small step: mirror and check, append, attention, digest of all rows. */
struct step {
	struct kvk_tag_check_args check;
	struct kvk_append_args append;
	struct kvk_attn_args attn;
	struct kvk_move_args crc;
};

static void step_run(const struct kvk_ops *ops, const struct step *s, kvk_stream stream)
{
	KVT_EXPECT_EQ(ops->tag_check(&s->check, stream), 0);
	KVT_EXPECT_EQ(ops->append(&s->append, stream), 0);
	KVT_EXPECT_EQ(ops->attn_gqa(&s->attn, stream), 0);
	KVT_EXPECT_EQ(ops->page_move(&s->crc, stream), 0);
}

/* Both sides of the step, and the memory that changes from replay to replay. */
struct replay {
	struct kvt_rng g;
	struct kvt_paged f;
	struct gpu_paged d;
	struct {
		struct kv_mirror head;
		u64 tags[STEP_PAGES];
	} mirror;
	struct {
		struct kv_step_block head;
		struct kv_log_entry log[8];
	} block;
	struct step host, gpu;
	u64 nr_nan;
	size_t acts;
	float *x;
	u32 crc[STEP_PAGES];
};

/* Pointers of one side. @batch->verdicts is what tag_check writes. */
static void step_set(struct step *s, const struct replay *p,
		     const struct kvk_pages *pages, const struct kvk_batch *batch,
		     const void *x)
{
	s->check = (struct kvk_tag_check_args){
		.batch = *batch,
		.page_tokens = 64,
		.ret_verdicts = (struct kv_verdict *)batch->verdicts};
	s->append = (struct kvk_append_args){
		.pages = *pages, .batch = *batch, .src_dtype = KVK_F32, .k = x, .v = x};
	s->attn = (struct kvk_attn_args){.pages = *pages,
					 .batch = *batch,
					 .nr_q_heads = STEP_HEADS,
					 .sm_scale = 0.1f,
					 .act_dtype = KVK_F32,
					 .q = x};
	s->crc = (struct kvk_move_args){
		.op = KVK_MOVE_CRC, .src = *pages, .src_batch = *batch};
}

static void replay_init(struct replay *p)
{
	struct kv_layout l = kvt_layout_gqa(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 1, 2, 64);
	static const u32 start[STEP_REQ] = {1, 1, 1, 1};

	memset(p, 0, sizeof(*p));
	p->g.state = kvt_rand64();
	kvt_paged_init(&p->f, &p->g, &l, STEP_PAGES);
	kvt_paged_batch(&p->f, &p->g, start, start, STEP_REQ);
	p->mirror.head.nr_pages = STEP_PAGES;
	for (u32 i = 0; i < STEP_PAGES; i++)
		p->mirror.tags[i] = kv_tag_make(i + 1, KV_TAG_LIVE);
	p->acts = (size_t)STEP_REQ * STEP_HEADS * 64;
	p->x = malloc(p->acts * 4);
	p->d = gpu_paged_make(&p->f, STEP_PAGES);
	step_set(&p->host, p, &p->f.pages, &p->f.batch, p->x);
	step_set(&p->gpu, p, &p->d.pages, &p->d.batch, gpu_copy(p->x, p->acts * 4));
	p->host.check.block = &p->block.head;
	p->host.check.mirror = &p->mirror.head;
	p->host.check.nonces = p->f.nonces;
	p->host.append.nan_count = &p->nr_nan;
	p->host.attn.out = malloc(p->acts * 4);
	p->host.crc.ret_crc = p->crc;
	p->gpu.check.block = gpu_copy(&p->block, sizeof(p->block));
	p->gpu.check.mirror = gpu_copy(&p->mirror, sizeof(p->mirror));
	p->gpu.check.nonces = gpu_alloc(STEP_REQ * 8);
	p->gpu.append.nan_count = gpu_copy(&p->nr_nan, 8);
	p->gpu.attn.out = gpu_alloc(p->acts * 4);
	p->gpu.attn.workspace_bytes = gpu_ops()->attn_workspace(&p->gpu.attn);
	p->gpu.attn.workspace = gpu_alloc(p->gpu.attn.workspace_bytes);
	p->gpu.crc.ret_crc = gpu_alloc(sizeof(p->crc));
}

/* The next step: other lengths on other pages, and some page dies. */
static void replay_next(struct replay *p, u32 n)
{
	static const u32 ones[STEP_REQ] = {1, 1, 1, 1};
	u32 lengths[STEP_REQ];

	for (u32 r = 0; r < STEP_REQ; r++)
		lengths[r] = 1 + kvt_rng_below(&p->g, 500);
	kvt_paged_batch(&p->f, &p->g, lengths, ones, STEP_REQ);
	for (u32 i = 0; i < p->f.row_start[STEP_REQ]; i++)
		p->f.rows[i].expected = p->mirror.tags[p->f.rows[i].pfn];
	p->f.step = 77 + n;
	p->block.head = (struct kv_step_block){.step = p->f.step,
					       .log_from = n,
					       .log_to = n + 1,
					       .nr_pages = STEP_PAGES,
					       .nr_entries = 1};
	p->block.log[0] = (struct kv_log_entry){
		.pfn = p->f.rows[kvt_rng_below(&p->g, 4)].pfn, .sequence = n};
	p->block.log[0].tag = kv_tag_make(1000 + n, n % 2 ? KV_TAG_LIVE : 0);
	kvt_rng_fill(&p->g, p->x, p->acts, 1.0f);
	/* kvt_paged_batch() took new host arrays */
	p->host.check.batch = p->host.append.batch = p->host.attn.batch =
		p->host.crc.src_batch = p->f.batch;
	p->host.check.nonces = p->f.nonces;
	p->host.check.ret_verdicts = p->f.verdicts;
	for (u32 r = 0; r < STEP_REQ; r++)
		memset(&p->f.verdicts[r], 0xff, sizeof(p->f.verdicts[r]));
	gpu_paged_update(&p->d, &p->f);
	gpu_put((void *)p->gpu.check.block, &p->block, sizeof(p->block));
	gpu_put((void *)p->gpu.check.nonces, p->f.nonces, STEP_REQ * 8);
	gpu_put((void *)p->gpu.append.k, p->x, p->acts * 4);
}

static void replay_compare(const struct replay *p, u32 *ret_failed)
{
	u32 nr_rows = p->f.row_start[STEP_REQ];
	struct kv_verdict *v =
		gpu_fetch(p->gpu.check.ret_verdicts, STEP_REQ * sizeof(*v));
	float *out = gpu_fetch(p->gpu.attn.out, p->acts * 4);
	/* behind the rows nobody writes */
	u32 *crc = gpu_fetch(p->gpu.crc.ret_crc,
			     gpu_poisoned() ? sizeof(p->crc) : nr_rows * sizeof(u32));

	KVT_EXPECT(!memcmp(v, p->f.verdicts, STEP_REQ * sizeof(*v)));
	gpu_pages_equal(&p->d, &p->f, "replay");
	for (u32 i = 0; i < nr_rows; i++)
		KVT_EXPECT_EQ(crc[i], p->crc[i]);
	for (u32 r = 0; r < STEP_REQ; r++)
		*ret_failed += v[r].bits != 0;
	acts_equal(KVK_F32, out, p->host.attn.out, p->acts, 0.05, "replay");
	free(v);
	free(out);
	free(crc);
}

KVT_TEST(cuda_captured_step_replays_with_new_rows)
{
	const struct kvk_ops *gpu = gpu_ops();
	cudaGraphExec_t exec;
	cudaStream_t stream;
	cudaGraph_t graph;
	struct replay p;
	u32 failed = 0;

	replay_init(&p);
	CU(cudaStreamCreate(&stream));
	CU(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
	step_run(gpu, &p.gpu, stream);
	CU(cudaStreamEndCapture(stream, &graph));
	CU(cudaGraphInstantiate(&exec, graph, 0));
	for (u32 n = 0; n < 12; n++) {
		replay_next(&p, n);
		step_run(kvk_host_ops(), &p.host, NULL);
		CU(cudaGraphLaunch(exec, stream));
		CU(cudaStreamSynchronize(stream));
		replay_compare(&p, &failed);
	}
	KVT_EXPECT(failed > 0 && failed < 12 * STEP_REQ);
}
#else
#include "tests/kvt.h"

KVT_TEST(cuda_families)
{
	KVT_SKIP("no GPU: built without CUDA");
}
#endif

KVT_MAIN()
