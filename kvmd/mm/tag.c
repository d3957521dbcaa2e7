/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mm/tag.c - generations (P1) and the published table (P2). See tag.h.
 *
 * Loop thread only; clients read the table at the same time.
 */
#include "kvmd/mm/tag.h"
#include "base/assert.h"
#include "base/mutant.h"

/* No generation at or above this exists. */
#define GEN_LIMIT  (KV_TAG_GEN_MAX + 1)

/* The bound is raised when less than this is left below it. */
#define GEN_MARGIN (1ull << 31)

void kvd_gen_source_init(struct kvd_gen_source *src, const struct kvd_env *env,
			 u64 saved_bound)
{
	src->env = env;
	src->next = saved_bound ? KV_MIN(saved_bound, GEN_LIMIT) : 1;
	src->bound = src->next;
}

static u64 source_left(const struct kvd_gen_source *src)
{
	return src->bound - src->next;
}

static int source_raise(struct kvd_gen_source *src)
{
	u64 bound = src->next + KV_MIN(KVD_GEN_BOUND_AHEAD, GEN_LIMIT - src->next);
	int r;

	if (bound <= src->bound)
		return 0;
	r = src->env->save(src->env->arg, KVD_SAVED_GENERATION, bound);
	if (r)
		return r;
	src->bound = bound;
	return 0;
}

void kvd_gens_init(struct kvd_gens *g, struct kvd_gen_source *src)
{
	g->source = src;
	g->next = 0;
	g->end = 0;
	g->reserved = 0;
}

int kvd_gens_reserve(struct kvd_gens *g, u64 nr)
{
	u64 need = 2 * nr + g->reserved;
	u64 local = g->end - g->next;
	int r;

	if (__builtin_expect(local >= need && source_left(g->source) >= GEN_MARGIN, 1))
		return 0;
	r = source_left(g->source) < GEN_MARGIN ? source_raise(g->source) : 0;
	if (local + source_left(g->source) >= need)
		return 0;
	return r ? r : -EOVERFLOW;
}

int kvd_gens_adopt(struct kvd_gens *g, u64 nr)
{
	int r = kvd_gens_reserve(g, nr);

	if (!r)
		g->reserved += nr;
	return r;
}

void kvd_gens_refill(struct kvd_gens *g)
{
	struct kvd_gen_source *src = g->source;

	kv_assert(source_left(src) > 0);
	g->next = src->next;
	g->end = src->next + KV_MIN(KVD_GEN_BLOCK, source_left(src));
	src->next = g->end;
}

void kvd_table_init(struct kvd_table *t, void *addr, u32 pool_id, u64 fingerprint,
		    u64 table_epoch, u32 nr_pages, u64 grace_epoch)
{
	struct kv_table *shared = addr;

	shared->magic = KV_TABLE_MAGIC;
	shared->abi = KV_ABI_VERSION;
	shared->pool_id = pool_id;
	shared->fingerprint = fingerprint;
	shared->table_epoch = table_epoch;
	shared->nr_pages = nr_pages;
	shared->tag_off = KV_TABLE_TAG_OFF;
	shared->log_off = (u32)kv_table_log_off(nr_pages);
	kv_store_release64(&shared->grace_epoch.word, grace_epoch);
	t->shared = shared;
	t->tags = (u64 *)((u8 *)addr + KV_TABLE_TAG_OFF);
	t->log = (struct kv_log_entry *)((u8 *)addr + kv_table_log_off(nr_pages));
	t->head = 0;
	t->published = 0;
	t->used_pages = 0;
}

void kvd_table_publish(struct kvd_table *t)
{
	if (t->head == t->published)
		return;
	kv_assert(t->head - t->published <= KV_LOG_BATCH_MAX);
	kv_store_release64(&t->shared->log_head.word, t->head);
	t->published = t->head;
}

void kvd_table_use(struct kvd_table *t, u32 nr_pages)
{
	kv_assert(nr_pages <= t->shared->nr_pages);
	if (nr_pages <= t->used_pages)
		return;
	t->used_pages = nr_pages;
	kv_store_release64(&t->shared->used_pages.word, nr_pages);
}
