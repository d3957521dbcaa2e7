/* SPDX-License-Identifier: Apache-2.0 */
/*
 * own/walk.h - the second way into the prefix index: from page to page by token compares.
 *
 * A key costs a BLAKE2b, and a lookup of 32 k tokens 512 of them, one after the other. An
 * entry that was found once needs none: if the page before it is the entry that was just
 * matched - the same pfn, the same generation, and generations never repeat - and its 64
 * stored tokens equal those asked for, it is the page. That is more than equal keys say.
 * Keys stay the identity: they go to the client, into SEAL and into the tiers, and decide
 * whenever a walk does not lead on (an entry whose parent was evicted and came back).
 *
 * The table says where to look: a 64-bit hash of all tokens of a sequence up to a page
 * (NH under a key that comes from the domain's secret, chained). It costs a few ns and
 * does not need the entries, so the memory of the next pages is fetched while the first
 * is compared. Nothing is believed because a hash is equal. Lives in struct kvd_link,
 * volatile; a miss enters what it finds by key, so the table need not be rebuilt.
 *
 * Loop thread only.
 */
#ifndef KVD_WALK_H
#define KVD_WALK_H

#include "kvmd/own/session.h"

/* Token hash before the first page of a sequence. */
#define KVD_WALK_ROOT  1ull

/* Pages of one walk, and how far it looks ahead, at most. */
#define KVD_WALK_MAX   64u
#define KVD_WALK_AHEAD 16u

/**
 * struct kvd_walk - pages that are looked for one behind the other
 * @before: token hash of the last one that is hashed, or before them
 * @tokens: [nr][KV_PAGE_TOKENS]
 * @again: the page at which kvd_walk_ahead() is to be called
 * @hashed, @linked, @chained, @fetched: pages that have taken so many of its steps
 * @hashes: [hashed]
 * @pfns: [linked], the first or second of the chain; KVD_PFN_NONE: it has none
 */
struct kvd_walk {
	u64 before;
	const u32 *tokens;
	u32 nr, again;
	u32 hashed, linked, chained, fetched;
	u64 hashes[KVD_WALK_MAX];
	u32 pfns[KVD_WALK_MAX];
};

/** kvd_walk_pool_init() - the pool's hash key; its root key is there */
void kvd_walk_pool_init(struct kvd_pool *pool);

/** kvd_walk_hash() - token hash of a sequence of hash @before and 64 @tokens. Never 0 */
u64 kvd_walk_hash(const struct kvd_pool *pool, u64 before, const u32 *tokens);

/** kvd_walk_add() - enter an indexed page that is not in the table */
void kvd_walk_add(struct kvd_pool *pool, u32 pfn, u64 hash);

/** kvd_walk_del() - the page leaves the index; it need not be in the table */
void kvd_walk_del(struct kvd_pool *pool, u32 pfn);

/** kvd_walk_start() - @nr <= KVD_WALK_MAX pages with @tokens behind token hash @before */
void kvd_walk_start(struct kvd_walk *w, u64 before, const u32 *tokens, u32 nr);

/**
 * kvd_walk_ahead() - hash the next pages and fetch what a lookup will touch of them
 * @at: the page that is looked at now, @w->again
 * @ahead: how far, 1 .. KVD_WALK_AHEAD; @at and half as many behind it are fetched
 */
void kvd_walk_ahead(const struct kvd_attach *a, struct kvd_walk *w, u32 at, u32 ahead);

/** kvd_walk_head_fetch() - fetch the head of a chain that is entered soon */
void kvd_walk_head_fetch(const struct kvd_pool *pool, u64 hash);

/** kvd_walk_fetch() - fetch what a lookup will touch of a page, unless it is KVD_PFN_NONE
 */
void kvd_walk_fetch(const struct kvd_attach *a, u32 pfn);

/**
 * kvd_walk_find() - the entry with these tokens after that parent, findable or not
 * @hash: token hash, with @tokens
 * @parent, @parent_gen: the entry before it; KVD_PFN_NONE, 0 = it starts its sequence
 *
 * Return: pfn; KVD_PFN_NONE: ask by key.
 */
u32 kvd_walk_find(const struct kvd_pool *pool, u64 hash, const u32 *tokens, u32 parent,
		  u64 parent_gen);

/** kvd_walk_has() - is the page in the chain where its hash puts it? (audit) */
bool kvd_walk_has(const struct kvd_pool *pool, u32 pfn);

#endif /* KVD_WALK_H */
