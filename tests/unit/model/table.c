/* SPDX-License-Identifier: Apache-2.0 */
/*
 * table.c - page tables of long sequences: more pages than one ALLOC or FREE takes, more tokens
 * than one LOOKUP does. The library's calls end here (--wrap in the Makefile).
 */
#include "engine/run/internal.h"
#include "tests/kvt.h"

#include <stdlib.h>

#define PAGES  (2 * KV_BATCH_MAX + 3)
#define TOKENS (PAGES * KV_PAGE_TOKENS)

int __wrap_kvc_alloc(struct kvc_pool *pool, uint32_t nr, uint32_t gfp,
		     struct kv_grant *ret_pages);
int __wrap_kvc_free(struct kvc_pool *pool, const struct kv_grant *pages, uint32_t nr);
int __wrap_kvc_lookup(struct kvc_pool *pool, const uint32_t *tokens, uint32_t nr_tokens,
		      uint32_t max_pages, struct kv_hit *ret_hits, uint32_t *ret_nr);

int __wrap_kvc_fork(struct kvc_pool *pool, const struct kv_grant *sources, uint32_t nr,
		    uint32_t gfp, struct kv_grant *ret_pages);

static struct eng_engine e;
static struct eng_table t;
static bool out[PAGES]; /* by pfn: the table's, or on its way back */
static u32 nr_out;
static u32 room; /* pages that kvmd has */
static u32 next_pfn;
static u32 nr_asked; /* tokens of the last lookup */

int __wrap_kvc_alloc(struct kvc_pool *pool, uint32_t nr, uint32_t gfp,
		     struct kv_grant *ret_pages)
{
	if (!nr || nr > KV_BATCH_MAX)
		return -EINVAL;
	if (nr > room)
		return KV_FULL;
	room -= nr;
	for (u32 i = 0; i < nr; i++) {
		ret_pages[i] = (struct kv_grant){.pfn = next_pfn++, .tag = 0x101};
		out[ret_pages[i].pfn] = true;
	}
	nr_out += nr;
	return 0;
}

int __wrap_kvc_free(struct kvc_pool *pool, const struct kv_grant *pages, uint32_t nr)
{
	KVT_EXPECT(nr && nr <= KV_BATCH_MAX);
	for (u32 i = 0; i < nr; i++) {
		KVT_EXPECT(out[pages[i].pfn]);
		out[pages[i].pfn] = false;
	}
	nr_out -= nr;
	return 0;
}

int __wrap_kvc_lookup(struct kvc_pool *pool, const uint32_t *tokens, uint32_t nr_tokens,
		      uint32_t max_pages, struct kv_hit *ret_hits, uint32_t *ret_nr)
{
	nr_asked = nr_tokens;
	if (nr_tokens > KV_LOOKUP_MAX || max_pages > nr_tokens / KV_PAGE_TOKENS)
		return -EINVAL;
	for (u32 i = 0; i < max_pages; i++) {
		ret_hits[i] = (struct kv_hit){.grant = {.pfn = i, .tag = 0x103}};
		out[i] = true;
	}
	nr_out += max_pages;
	*ret_nr = max_pages;
	return max_pages ? 0 : KV_MISS;
}

/* No page for a copy: the last one is computed again. */
int __wrap_kvc_fork(struct kvc_pool *pool, const struct kv_grant *sources, uint32_t nr,
		    uint32_t gfp, struct kv_grant *ret_pages)
{
	return KV_FULL;
}

static void start(u32 nr_pages)
{
	memset(&e, 0, sizeof(e));
	e.pages_max = PAGES;
	e.grants = calloc(PAGES, sizeof(*e.grants));
	e.hits = calloc(PAGES, sizeof(*e.hits));
	KVT_EXPECT(e.grants && e.hits && !eng_table_init(&t, PAGES));
	eng_table_reset(&e, &t);
	memset(out, 0, sizeof(out));
	nr_out = 0;
	next_pfn = 0;
	room = nr_pages;
}

static void end(void)
{
	eng_table_release(&e, &t);
	eng_table_fini(&t);
	free(e.grants);
	free(e.hits);
}

KVT_TEST(table_grows_by_any_number_of_pages)
{
	static const u32 sizes[] = {
		1,    KV_BATCH_MAX - 1, KV_BATCH_MAX, KV_BATCH_MAX + 1, 2 * KV_BATCH_MAX,
		PAGES};

	for (size_t k = 0; k < KV_ARRAY_SIZE(sizes); k++) {
		start(PAGES);
		KVT_EXPECT_EQ(eng_table_grow(&e, &t, sizes[k], KV_GFP_NOWAIT), 0);
		KVT_EXPECT_EQ(t.nr, sizes[k]);
		for (u32 i = 0; i < t.nr; i++)
			KVT_EXPECT_EQ(t.leases[i].grant.pfn, i);
		KVT_EXPECT_EQ(nr_out, sizes[k]);
		end();
		KVT_EXPECT_EQ(nr_out, 0);
		KVT_EXPECT(e.frees_due);
	}
}

/* All or nothing: what came before the refusal goes back. */
KVT_TEST(table_that_cannot_grow_holds_nothing)
{
	static const u32 rooms[] = {0, 1, KV_BATCH_MAX, KV_BATCH_MAX + 7, PAGES - 1};

	for (size_t k = 0; k < KV_ARRAY_SIZE(rooms); k++) {
		start(rooms[k]);
		KVT_EXPECT_EQ(eng_table_grow(&e, &t, PAGES, KV_GFP_NOWAIT), KV_FULL);
		KVT_EXPECT_EQ(t.nr, 0);
		KVT_EXPECT_EQ(nr_out, 0);
		KVT_EXPECT_EQ(e.frees_due, next_pfn > 0);
		end();
	}
}

/* The beginning of a long prompt is found like a short one. */
KVT_TEST(lookup_asks_for_as_much_as_there_may_be)
{
	static u32 tokens[TOKENS];
	static const u32 sizes[] = {
		63, 64, 100, KV_LOOKUP_MAX - 1, KV_LOOKUP_MAX, KV_LOOKUP_MAX + 1, TOKENS};

	for (size_t k = 0; k < KV_ARRAY_SIZE(sizes); k++) {
		u32 asked = KV_MIN(sizes[k], KV_LOOKUP_MAX), cached = 1;
		/* at least the last token of all is computed, for its logits */
		u32 nr = KV_MIN(asked, sizes[k] - 1) / KV_PAGE_TOKENS;

		start(PAGES);
		nr_asked = 0;
		KVT_EXPECT_EQ(eng_table_lookup(&e, &t, tokens, sizes[k], &cached), 0);
		KVT_EXPECT_EQ(nr_asked, asked < KV_PAGE_TOKENS ? 0 : asked);
		KVT_EXPECT_EQ(cached, nr * KV_PAGE_TOKENS);
		KVT_EXPECT_EQ(t.nr, nr);
		KVT_EXPECT_EQ(nr_out, nr);
		end();
		KVT_EXPECT_EQ(nr_out, 0);
	}
}

KVT_MAIN()
