/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mm/tag.h - generations (P1) and the published table (P2).
 *
 * Generations never repeat on a host: a loop takes blocks of 2^20 from the host's source,
 * and the source saves a bound 2^32 ahead before it gives a block below it. A kill needs
 * a generation too and must not fail, so alloc keeps one in reserve for every live page.
 *
 * The table is written by the loop thread and read by clients: tag, log entry, log_head,
 * grace_epoch in this order, each with release. Barriers pair with kv_table readers in
 * libkvclient/step.c.
 */
#ifndef KVD_TAG_H
#define KVD_TAG_H

#include <errno.h>
#include "base/assert.h"
#include "base/mutant.h"
#include "kv/abi.h"
#include "kv/tag.h"
#include "kvmd/mm/env.h"

#define KVD_GEN_BLOCK	    (1ull << 20)
#define KVD_GEN_BOUND_AHEAD (1ull << 32)

/**
 * struct kvd_gen_source - the host's generations; one per host, shared by its loops
 * @env: saves the bound; borrowed
 * @next: first generation of the next block
 * @bound: saved: nothing at or above it was given out
 */
struct kvd_gen_source {
	const struct kvd_env *env;
	u64 next;
	u64 bound;
};

/**
 * struct kvd_gens - one loop's block of generations
 * @source: borrowed
 * @next, @end: rest of the block
 * @reserved: live pages: each will need one more generation to die
 */
struct kvd_gens {
	struct kvd_gen_source *source;
	u64 next;
	u64 end;
	u64 reserved;
};

/**
 * kvd_gen_source_init() - start from the bound that was saved last
 * @saved_bound: 0 on a host that never ran kvmd; generation 0 is never used
 */
void kvd_gen_source_init(struct kvd_gen_source *src, const struct kvd_env *env,
			 u64 saved_bound);

/** kvd_gens_init() - no block yet; the first kvd_gens_reserve() takes one */
void kvd_gens_init(struct kvd_gens *g, struct kvd_gen_source *src);

/**
 * kvd_gens_reserve() - make sure that @nr pages can be made live and die later
 *
 * Return: 0; -EOVERFLOW the range is used up; -errno of the save hook. Nothing is taken
 * yet.
 */
int kvd_gens_reserve(struct kvd_gens *g, u64 nr);

/** kvd_gens_adopt() - a live page of an earlier kvmd: it will need a generation to die.
 * Return: as kvd_gens_reserve() */
int kvd_gens_adopt(struct kvd_gens *g, u64 nr);

/** kvd_gens_refill() - the next block of the source; used by kvd_gens_next() */
void kvd_gens_refill(struct kvd_gens *g);

/** kvd_gens_next() - used by the two below */
static inline u64 kvd_gens_next(struct kvd_gens *g)
{
	if (__builtin_expect(g->next == g->end, 0))
		kvd_gens_refill(g);
	kv_assert(g->next <= KV_TAG_GEN_MAX);
	return g->next++;
}

/** kvd_gens_live() - next generation for a page that comes to life; reserved before */
static inline u64 kvd_gens_live(struct kvd_gens *g)
{
	u64 gen = kvd_gens_next(g);

	if (KV_MUTANT(gen_repeat) && (gen & 1))
		g->next--;
	g->reserved++;
	return gen;
}

/** kvd_gens_dead() - next generation for a page that dies; cannot fail */
static inline u64 kvd_gens_dead(struct kvd_gens *g)
{
	kv_assert(g->reserved > 0);
	g->reserved--;
	return kvd_gens_next(g);
}

/**
 * struct kvd_table - writer's side of a published table
 * @shared: the memory clients see
 * @tags, @log: inside it
 * @head: entries logged so far, published or not
 * @published: log_head as stored last
 * @used_pages: as stored
 */
struct kvd_table {
	struct kv_table *shared;
	u64 *tags;
	struct kv_log_entry *log;
	u64 head;
	u64 published;
	u32 used_pages;
};

/** kvd_table_init() - format zeroed memory of kv_table_bytes(nr_pages) bytes */
void kvd_table_init(struct kvd_table *t, void *addr, u32 pool_id, u64 fingerprint,
		    u64 table_epoch, u32 nr_pages, u64 grace_epoch);

/** kvd_table_publish() - store log_head for all entries so far; cheap when there are none
 */
void kvd_table_publish(struct kvd_table *t);

/**
 * kvd_table_set() - store a tag and its log entry; readers see the entry after
 *	kvd_table_publish(). Publishes by itself when KV_LOG_BATCH_MAX entries wait
 */
static inline void kvd_table_set(struct kvd_table *t, u32 pfn, u64 tag)
{
	struct kv_log_entry *e = &t->log[t->head % KV_LOG_ENTRIES];

	kv_assert(pfn < t->used_pages && tag > t->tags[pfn]);
	kv_store_release64(&t->tags[pfn], tag);
	if (KV_MUTANT(log_after_head))
		kv_store_release64(&t->shared->log_head.word, t->head + 1);
	/* Release, so that an entry we overwrite stays behind the log_head that allows
	 * it. */
	kv_store_release64(&e->tag, tag);
	kv_store_release32(&e->pfn, pfn);
	kv_store_release32(&e->sequence, (u32)t->head);
	t->head++;
	if (t->head - t->published >= KV_LOG_BATCH_MAX)
		kvd_table_publish(t);
}

/** kvd_table_use() - raise used_pages to cover @nr_pages; before a tag up there is stored
 */
void kvd_table_use(struct kvd_table *t, u32 nr_pages);

#endif /* KVD_TAG_H */
