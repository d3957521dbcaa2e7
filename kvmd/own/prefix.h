/* SPDX-License-Identifier: Apache-2.0 */
/*
 * own/prefix.h - prefix keys, the index, SEAL and LOOKUP (design section 8).
 *
 * Key of page i = BLAKE2b-128(message = 64 token ids as u32 LE; salt = key i-1; personal
 * = BLAKE2b-128 of the layout fingerprint). Key -1 is BLAKE2b-128 of a constant under the
 * domain's secret, so a domain's keys mean nothing in another one. LoRA, model and the
 * rest of the layout are in the fingerprint, whose fields are typed and length-prefixed
 * (case O43).
 *
 * The index is a chained hash in the pool's kvd_link array: no allocation, O(1). The key
 * comes first, then the stored tokens are compared as well (O42). An entry is entered by
 * SEAL and findable after SEAL's grace period. Hashing is done in slices of
 * KVD_HASH_SLICE pages a turn through cursors that the caller keeps. Loop thread only.
 */
#ifndef KVD_PREFIX_H
#define KVD_PREFIX_H

#include "kvmd/own/session.h"

#define KVD_HASH_SLICE	 16u

/* Pages that a lookup may find by a walk in one turn; a page that must be hashed counts as
 * four of them. */
#define KVD_WALK_SLICE	 (4 * KVD_HASH_SLICE)

/* Pages whose tokens are wanted for a lookup's first step: most misses end there. */
#define KVD_LOOKUP_FIRST 8u

/** kvd_prefix_root_key() - key -1 of a domain and layout */
void kvd_prefix_root_key(const u8 *secret, u64 fingerprint, u8 *ret_key);

/** kvd_prefix_key() - key of one page of 64 tokens after @parent_key */
void kvd_prefix_key(u64 fingerprint, const u8 *parent_key, const u32 *tokens,
		    u8 *ret_key);

/**
 * struct kvd_seal_op - a SEAL in progress; lies in the caller's request
 * @s, @a: who and where; the caller drops the op when the session ends or closes the pool
 * @arg: copy of the argument
 * @pages: [nr], @tokens: [nr][64], @rets: [nr]: private copies of the caller
 * @nr: pages
 * @hashed: keys computed so far
 * @key: of page @hashed - 1
 */
struct kvd_seal_op {
	struct kvd_session *s;
	struct kvd_attach *a;
	struct kv_seal_arg arg;
	const struct kv_seal_page *pages;
	const u32 *tokens;
	struct kv_seal_ret *rets;
	u32 nr;
	u32 hashed;
	u8 key[KV_KEY_BYTES];
};

/**
 * kvd_seal_start() - set up @op; s, a, arg, pages, tokens, rets, nr are filled by the
 * caller
 *
 * Return: 0: now kvd_seal_step(); -EINVAL a flag, a reserved field, nr or a pfn.
 */
int kvd_seal_start(struct kvd_seal_op *op);

/**
 * kvd_seal_step() - hash up to KVD_HASH_SLICE pages; after the last one seal them all in
 *	one act
 *
 * Return: -EAGAIN: call again in the next turn; 0: sealed, @op->rets is filled; KV_STALE:
 *	a page is not held for writing with that generation, or named twice: nothing was sealed.
 */
int kvd_seal_step(struct kvd_seal_op *op);

/* Keys that are under way at a time: one being hashed, three whose entries come in. */
#define KVD_LOOKUP_KEYS 4u

/**
 * struct kvd_lookup_key - a page of a lookup that is looked for by its key
 * @key, @hash: the key, and what chooses its chain
 * @walk: token hash up to and with the page
 */
struct kvd_lookup_key {
	u8 key[KV_KEY_BYTES];
	u64 hash;
	u64 walk;
};

/**
 * struct kvd_lookup_op - a LOOKUP in progress; lies in the caller's request
 * @s, @a: as above. When the session ends its pins drop with all others
 * @tokens: [nr_tokens], the caller's private copy
 * @nr_tokens: only whole pages are looked up
 * @nr_ready: pages whose tokens are there already, the caller adds to it between steps; 0
 * = all
 * @max_pages: stop after so many hits; 0 = room in @hits
 * @hits: [hits_max]
 * @nr: pages found, each pinned for @s
 * @key: of page @nr - 1
 * @parent, @parent_gen: pfn and generation of page @nr - 1
 * @walk: token hash up to page @nr - 1 (own/walk.h)
 * @by_keys: no walk leads on: the next page is looked for by its key
 * @hashed: pages whose keys have been computed; @keys: of those from @nr on, by page
 * @ahead: pages to try by the next walk: few where the last one ended early
 * @ahead_keys: pages to hash together next: few at first, most misses end there
 * @asking: the run has ended; pages behind it are looked for in the tiers
 * @asked: pages looked at so, from the start of the sequence; @ask_key of the last one
 * @nr_coming: of them are on their way back (own/spill.h)
 */
struct kvd_lookup_op {
	struct kvd_session *s;
	struct kvd_attach *a;
	const u32 *tokens;
	u32 nr_tokens;
	u32 nr_ready;
	u32 max_pages;
	struct kv_hit *hits;
	u32 hits_max;
	u32 nr;
	u8 key[KV_KEY_BYTES];
	u32 parent;
	u64 parent_gen;
	u64 walk;
	bool by_keys;
	u32 hashed;
	struct kvd_lookup_key keys[KVD_LOOKUP_KEYS];
	u32 ahead;
	u32 ahead_keys;
	bool asking;
	u32 asked;
	u32 nr_coming;
	u8 ask_key[KV_KEY_BYTES];
};

/** kvd_lookup_start() - set up @op; s .. hits_max are filled by the caller. Return: 0;
 * -EINVAL */
int kvd_lookup_start(struct kvd_lookup_op *op);

/**
 * kvd_lookup_step() - find and pin up to KVD_WALK_SLICE pages; at most KVD_HASH_SLICE of
 * them are hashed
 *
 * A page that no index has is asked for from the tiers, and those behind it
 * (@op->nr_coming): the answer does not wait for them.
 *
 * Return: -EAGAIN: call again; 0: op->nr >= 1 pages are pinned; KV_MISS: none.
 */
int kvd_lookup_step(struct kvd_lookup_op *op);

/** kvd_lookup_again() - restores are over: look on from page @op->nr */
void kvd_lookup_again(struct kvd_lookup_op *op);

/** kvd_prefix_pool_key() - as kvd_prefix_key(), with the pool's constants and key_bits */
void kvd_prefix_pool_key(const struct kvd_pool *pool, const u8 *parent_key,
			 const u32 *tokens, u8 *ret_key);

/** kvd_prefix_head() - head of the chain that entries with this key lie on */
u32 *kvd_prefix_head(const struct kvd_pool *pool, const u8 *key);

/** kvd_prefix_find_key() - an entry with this key, or KVD_PFN_NONE */
u32 kvd_prefix_find_key(const struct kvd_pool *pool, const u8 *key);

/** kvd_prefix_insert() - enter a page; not findable yet; key and tokens are copied */
void kvd_prefix_insert(struct kvd_pool *pool, u32 pfn, const u8 *key, const u32 *tokens,
		       u32 parent, bool root);

/** kvd_prefix_adopt() - enter a page whose record says that it is INDEXED; before any of
 * the pool's pages is on an LRU */
void kvd_prefix_adopt(struct kvd_pool *pool, u32 pfn);

/** kvd_prefix_remove() - take an indexed page out of the index (evict, revoke, reset) */
void kvd_prefix_remove(struct kvd_pool *pool, u32 pfn);

/** kvd_prefix_parent() - the page before @pfn in its prefix, or KVD_PFN_NONE: it is the
 * first, or the one before it is gone */
u32 kvd_prefix_parent(const struct kvd_pool *pool, u32 pfn);

/** kvd_prefix_forget() - a SEALED page that its readers keep is not found any more. A
 * seal in progress ends without its grace period: there is nothing left to publish */
void kvd_prefix_forget(struct kvd_pool *pool, u32 pfn);

/** kvd_prefix_pool_init() - keys' constants of a new pool */
void kvd_prefix_pool_init(struct kvd_pool *pool, const u8 *secret);

/**
 * kvd_prefix_find() - entry with this key and these tokens, findable or not
 * @parent: pfn of the page before it, KVD_PFN_NONE = unknown or @root
 * @root: the page starts its sequence
 *
 * Return: pfn, or KVD_PFN_NONE.
 */
u32 kvd_prefix_find(const struct kvd_pool *pool, const u8 *key, const u32 *tokens,
		    u32 parent, bool root);

/** kvd_prefix_seal_done() - kvd_mm_ops.seal_done */
void kvd_prefix_seal_done(struct kvd_pool *pool, u32 pfn);

/** kvd_prefix_evict() - a CACHED page goes, past any tier */
void kvd_prefix_evict(struct kvd_pool *pool, u32 pfn);

#endif /* KVD_PREFIX_H */
