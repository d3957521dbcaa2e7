/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda_tags.c - the GPU's check where its words move: rows outside the pool, and a mirror whose
 * words change under checks that run (cases O40; design 5, P1, P4).
 */
#ifdef CONFIG_CUDA
#include "cuda_common.h"

enum { PAGES = 8192, NR = 64, ROWS = 100, STEPS = 600, WRITES = 2 /* a step */ };

/* Requests whose rows are good, with everything in device memory. */
struct scene {
	struct kv_row rows[NR * ROWS];
	u32 row_start[NR + 1], lengths[NR];
	u64 nonces[NR], words[PAGES];
	struct kvk_tag_check_args a; /* of the device */
	u64 *dev_words;
};

static struct scene *scene_make(u32 nr_pages)
{
	struct kvt_rng g = {kvt_rand64()};
	struct scene *s = calloc(1, sizeof(*s));
	struct kv_mirror *m = calloc(1, sizeof(*m) + sizeof(s->words));

	m->position = 700;
	m->nr_pages = PAGES;
	for (u32 i = 0; i < PAGES; i++)
		s->words[i] = kv_tag_make(1 + kvt_rng_below(&g, 1000), KV_TAG_LIVE);
	memcpy(m + 1, s->words, sizeof(s->words));
	for (u32 r = 0; r < NR; r++) {
		s->nonces[r] = kvt_rng_next(&g);
		s->lengths[r] = ROWS * KV_PAGE_TOKENS;
		s->row_start[r + 1] = (r + 1) * ROWS;
		/* no page of a request is another's */
		for (u32 i = 0; i < ROWS; i++) {
			u32 pfn = r * ROWS + i;

			s->rows[pfn] =
				kv_row_make(pfn, s->words[pfn], 0, s->nonces[r], i);
		}
	}
	KVT_EXPECT(NR * ROWS <= nr_pages && nr_pages <= PAGES);
	s->a.page_tokens = KV_PAGE_TOKENS;
	s->a.mirror = gpu_copy(m, sizeof(*m) + sizeof(s->words));
	s->a.nonces = gpu_copy(s->nonces, sizeof(s->nonces));
	s->a.batch.row_start = gpu_copy(s->row_start, sizeof(s->row_start));
	s->a.batch.lengths = gpu_copy(s->lengths, sizeof(s->lengths));
	s->a.batch.nr_requests = NR;
	s->dev_words = (u64 *)(void *)((struct kv_mirror *)s->a.mirror + 1);
	free(m);
	return s;
}

/* The block of a step that brings nothing new. */
static struct kv_step_block block_of(u64 step, u32 nr_pages)
{
	return (struct kv_step_block){.step = step,
				      .log_from = 700,
				      .log_to = 700,
				      .nr_pages = nr_pages,
				      .kind = KV_BLOCK_DELTA};
}

/* The mirror may have more words than the pool has pages; rows end where either does. */
KVT_TEST(o40_rows_outside_the_pool_fail_alone)
{
	const u32 pool = PAGES - 300;
	const u32 outside[] = {pool,	 pool + 1,   PAGES - 1,	 PAGES, PAGES + 1,
			       1u << 30, 0x7fffffff, 0x80000000, ~0u};
	const struct kvk_ops *gpu = gpu_ops();
	struct scene *s = scene_make(pool);
	struct kv_step_block b = block_of(41, pool);
	struct kv_verdict *v;

	for (u32 r = 1; r < NR; r += 2) {
		struct kv_row *row = &s->rows[r * ROWS + r * 31 % ROWS];
		u32 pfn = outside[r / 2 % KV_ARRAY_SIZE(outside)];

		/* a word that is there would be the right one */
		*row = kv_row_make(pfn, pfn < PAGES ? s->words[pfn] : row->expected, 0,
				   s->nonces[r], r * 31 % ROWS);
	}
	s->a.block = gpu_copy(&b, sizeof(b));
	s->a.batch.rows = gpu_copy(s->rows, sizeof(s->rows));
	s->a.ret_verdicts = gpu_alloc(NR * sizeof(*v));
	KVT_EXPECT_EQ(gpu->tag_check(&s->a, NULL), 0);
	v = gpu_fetch(s->a.ret_verdicts, NR * sizeof(*v));
	for (u32 r = 0; r < NR; r++) {
		KVT_EXPECT_EQ(v[r].step, 41);
		KVT_EXPECT_EQ(v[r].rows_checked, ROWS);
		KVT_EXPECT_EQ(v[r].bits, r % 2 ? KV_BAD_PFN : 0);
	}
}

/*
 * While checks run one after the other, words of the mirror are stored from another stream, in
 * any order: pages of odd requests die, pages of even ones are sealed. A check sees a word as it
 * was or as it is. So an even request always passes; an odd one passes up to some step and never
 * again; and a check behind the last store fails each of them.
 */
static void store_word(struct scene *s, cudaStream_t stream, u64 *host, u32 n)
{
	/* a multiplier prime to the number of rows: every word once */
	const u32 pfn = (u32)((u64)n * 2741 % (NR * ROWS));

	host[n] = pfn / ROWS % 2 ? kv_tag_make(kv_tag_gen(s->words[pfn]) + 1, 0)
				 : s->words[pfn] | KV_TAG_SEALED;
	CU(cudaMemcpyAsync(s->dev_words + pfn, host + n, 8, cudaMemcpyHostToDevice,
			   stream));
}

static u32 transitions(const struct kv_verdict *v)
{
	u32 changed = 0;

	for (u32 r = 0; r < NR; r++) {
		u32 failed = 0;

		for (u32 i = 0; i <= STEPS; i++) {
			const struct kv_verdict *at = &v[i * NR + r];
			const bool ok = kv_verdict_ok(*at, i + 1, ROWS);

			KVT_EXPECT_EQ(at->step, i + 1);
			KVT_EXPECT_EQ(at->rows_checked, ROWS);
			if (!ok && at->bits != (KV_BAD_GEN | KV_BAD_DEAD))
				KVT_FAIL("request %u, step %u: bits %x", r, i, at->bits);
			if (ok && failed)
				KVT_FAIL("request %u passes at step %u, failed before", r,
					 i);
			failed += !ok;
		}
		KVT_EXPECT_EQ(failed > 0, r % 2);
		changed += failed > 1 && failed <= STEPS;
	}
	return changed;
}

KVT_TEST(o40_words_change_under_the_check)
{
	const struct kvk_ops *gpu = gpu_ops();
	struct scene *s = scene_make(PAGES);
	struct kv_step_block blocks[STEPS + 1], *dev_blocks;
	struct kv_verdict *v, *dev_v;
	cudaStream_t checks, stores;
	u64 *host;
	u32 n = 0, changed;

	for (u32 i = 0; i <= STEPS; i++)
		blocks[i] = block_of(i + 1, PAGES);
	dev_blocks = gpu_copy(blocks, sizeof(blocks));
	dev_v = gpu_alloc((STEPS + 1) * NR * sizeof(*v));
	s->a.batch.rows = gpu_copy(s->rows, sizeof(s->rows));
	CU(cudaMallocHost((void **)&host, STEPS * WRITES * 8));
	CU(cudaStreamCreateWithFlags(&checks, cudaStreamNonBlocking));
	CU(cudaStreamCreateWithFlags(&stores, cudaStreamNonBlocking));
	CU(cudaDeviceSynchronize());
	for (u32 i = 0; i <= STEPS; i++) {
		if (i == STEPS)
			CU(cudaStreamSynchronize(stores));
		s->a.block = dev_blocks + i;
		s->a.ret_verdicts = dev_v + i * NR;
		KVT_EXPECT_EQ(gpu->tag_check(&s->a, checks), 0);
		for (u32 k = 0; k < WRITES && i < STEPS; k++)
			store_word(s, stores, host, n++);
	}
	CU(cudaStreamSynchronize(checks));
	v = gpu_fetch(dev_v, (STEPS + 1) * NR * sizeof(*v));
	changed = transitions(v);
	KVT_NOTE("%u of %u requests died between two of %u checks", changed, NR / 2,
		 STEPS);
	/* else nothing moved under them; a sanitizer runs one thing at a time */
	KVT_EXPECT(changed >= NR / 4 || gpu_sanitizer(NULL));
}
#else
#include "tests/kvt.h"

KVT_TEST(o40_rows_outside_the_pool_fail_alone)
{
	KVT_SKIP("no GPU: built without CUDA");
}

KVT_TEST(o40_words_change_under_the_check)
{
	KVT_SKIP("no GPU: built without CUDA");
}
#endif

KVT_MAIN()
