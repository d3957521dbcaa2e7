/* SPDX-License-Identifier: Apache-2.0 */
/*
 * own/prefix.c - prefix keys, the index and LOOKUP. See prefix.h; SEAL is in seal.c.
 *
 * The index is a chained hash over the pool's link array. An entry's parent is the page
 * before it in its sequence: the tree that leaf-first eviction needs. Loop thread only.
 */
#include "kvmd/own/prefix.h"
#include <errno.h>
#include <sodium.h>
#include <string.h>
#include "base/mutant.h"
#include "base/siphash.h"
#include "kvmd/own/core.h"
#include "kvmd/own/keyhash.h"
#include "kvmd/own/walk.h"

/* --------------------------------------------------------------------------- keys */

static void personal_of(u64 fingerprint, u8 *ret)
{
	u8 le[8];

	for (u32 i = 0; i < 8; i++)
		le[i] = (u8)(fingerprint >> (8 * i));
	kv_assert(
		!crypto_generichash_blake2b(ret, KV_KEY_BYTES, le, sizeof(le), NULL, 0));
}

static void page_key(const u8 *personal, const u8 *parent_key, const u32 *tokens,
		     u8 *ret_key)
{
	struct kvd_keyhash kh;

	_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
		       "tokens are hashed as u32 LE");

	kvd_keyhash_begin(&kh, tokens, parent_key, personal);
	kvd_keyhash_end(&kh, ret_key);
}

void kvd_prefix_root_key(const u8 *secret, u64 fingerprint, u8 *ret_key)
{
	static const u8 message[] = "kvmd prefix root", nobody[KVD_DOMAIN_SECRET_BYTES];
	u8 personal[KV_KEY_BYTES], salt[KV_KEY_BYTES] = {0};

	personal_of(fingerprint, personal);
	kv_assert(!crypto_generichash_blake2b_salt_personal(
		ret_key, KV_KEY_BYTES, message, sizeof(message),
		KV_MUTANT(root_not_keyed) ? nobody : secret, KVD_DOMAIN_SECRET_BYTES,
		salt, personal));
}

void kvd_prefix_key(u64 fingerprint, const u8 *parent_key, const u32 *tokens, u8 *ret_key)
{
	u8 personal[KV_KEY_BYTES];

	personal_of(fingerprint, personal);
	page_key(personal, parent_key, tokens, ret_key);
}

void kvd_prefix_pool_init(struct kvd_pool *pool, const u8 *secret)
{
	personal_of(pool->fingerprint, pool->personal);
	kvd_prefix_root_key(secret, pool->fingerprint, pool->root_key);
	kvd_walk_pool_init(pool);
}

/* Tests truncate the hash so that collisions happen (case O42). */
static inline void key_shorten(const struct kvd_pool *pool, u8 *key)
{
	for (u32 bit = pool->key_bits; bit < KV_KEY_BYTES * 8; bit++)
		key[bit / 8] &= (u8) ~(1u << (bit % 8));
}

void kvd_prefix_pool_key(const struct kvd_pool *pool, const u8 *parent_key,
			 const u32 *tokens, u8 *ret_key)
{
	page_key(pool->personal, parent_key, tokens, ret_key);
	key_shorten(pool, ret_key);
}

/* --------------------------------------------------------------------------- index */

/*
 * SipHash under the root key, which no client knows: SEAL names its parent, so a client can
 * compute keys and would choose the chain that they fall on.
 */
static inline u64 key_hash(const struct kvd_pool *pool, const u8 *key)
{
	u64 h = kv_siphash16(key, pool->root_key, 1, 3);

	if (KV_MUTANT(index_not_keyed))
		memcpy(&h, key, sizeof(h));
	return h;
}

static u32 *head_of(const struct kvd_pool *pool, u64 hash)
{
	return &pool->hash_heads[hash & pool->hash_mask];
}

u32 *kvd_prefix_head(const struct kvd_pool *pool, const u8 *key)
{
	return head_of(pool, key_hash(pool, key));
}

static u32 *page_tokens_of(const struct kvd_pool *pool, u32 pfn)
{
	return pool->tokens + (u64)pfn * KV_PAGE_TOKENS;
}

/* Is the parent that an entry was entered under still the one in the index? */
static bool parent_alive(const struct kvd_pool *pool, const struct kvd_frame *f)
{
	const struct kvd_frame *p;

	if (f->parent == KVD_PFN_NONE)
		return false;
	p = &pool->frames[f->parent];
	return (p->flags & KVD_FRAME_INDEXED) && (u32)kv_tag_gen(p->tag) == f->parent_gen;
}

u32 kvd_prefix_parent(const struct kvd_pool *pool, u32 pfn)
{
	const struct kvd_frame *f = &pool->frames[pfn];

	return parent_alive(pool, f) ? f->parent : KVD_PFN_NONE;
}

/*
 * Key and tokens are equal: is it also the same sequence before this page? With whole
 * keys the chain of hashes has said so; this catches what a collision would let through.
 */
static bool same_parent(const struct kvd_pool *pool, const struct kvd_frame *f,
			u32 parent, bool root)
{
	bool is_root = f->flags & KVD_FRAME_ROOT;

	if (root != is_root)
		return false;
	return root || parent == KVD_PFN_NONE || !parent_alive(pool, f) ||
	       f->parent == parent;
}

/* kvd_prefix_find() by a @key whose hash is there already. */
static u32 find_hashed(const struct kvd_pool *pool, u64 hash, const u8 *key,
		       const u32 *tokens, u32 parent, bool root)
{
	u32 pfn;

	for (pfn = *head_of(pool, hash); pfn != KVD_PFN_NONE;
	     pfn = pool->links[pfn].hash_next) {
		const struct kvd_frame *f = &pool->frames[pfn];

		if (pool->links[pfn].key_hash != (u32)(hash >> 32) ||
		    memcmp(f->key, key, KV_KEY_BYTES))
			continue;
		if (KV_MUTANT(no_token_compare))
			return pfn;
		if (memcmp(page_tokens_of(pool, pfn), tokens,
			   KV_PAGE_TOKENS * sizeof(u32)))
			continue;
		if (same_parent(pool, f, parent, root))
			return pfn;
	}
	return KVD_PFN_NONE;
}

u32 kvd_prefix_find(const struct kvd_pool *pool, const u8 *key, const u32 *tokens,
		    u32 parent, bool root)
{
	return find_hashed(pool, key_hash(pool, key), key, tokens, parent, root);
}

u32 kvd_prefix_find_key(const struct kvd_pool *pool, const u8 *key)
{
	u64 hash = key_hash(pool, key);
	u32 pfn;

	for (pfn = *head_of(pool, hash); pfn != KVD_PFN_NONE;
	     pfn = pool->links[pfn].hash_next) {
		if (pool->links[pfn].key_hash == (u32)(hash >> 32) &&
		    !memcmp(pool->frames[pfn].key, key, KV_KEY_BYTES))
			return pfn;
	}
	return KVD_PFN_NONE;
}

static void child_link(struct kvd_pool *pool, struct kvd_frame *f, u32 parent)
{
	struct kvd_link *link = &pool->links[f->pfn];

	kv_assert(parent != f->pfn);
	kvd_frame_touch(pool, f->pfn);
	f->parent = parent;
	f->parent_gen = 0;
	link->walk_parent = 0;
	if (parent == KVD_PFN_NONE)
		return;
	link->walk_parent = kv_tag_gen(pool->frames[parent].tag);
	f->parent_gen = (u32)link->walk_parent;
	kvd_lru_child_added(pool, parent);
}

void kvd_prefix_insert(struct kvd_pool *pool, u32 pfn, const u8 *key, const u32 *tokens,
		       u32 parent, bool root)
{
	struct kvd_frame *f = &pool->frames[pfn];
	u64 hash = key_hash(pool, key);
	u32 *head = head_of(pool, hash);

	kv_assert(!(f->flags & KVD_FRAME_INDEXED) && parent != pfn);
	kvd_frame_touch(pool, pfn);
	memcpy(f->key, key, KV_KEY_BYTES);
	memcpy(page_tokens_of(pool, pfn), tokens, KV_PAGE_TOKENS * sizeof(u32));
	f->flags |= KVD_FRAME_INDEXED;
	if (root)
		f->flags |= KVD_FRAME_ROOT;
	pool->links[pfn].nr_children = 0;
	pool->links[pfn].key_hash = (u32)(hash >> 32);
	pool->links[pfn].hash_next = *head;
	*head = pfn;
	child_link(pool, f, root ? KVD_PFN_NONE : parent);
	if (root)
		kvd_walk_add(pool, pfn, kvd_walk_hash(pool, KVD_WALK_ROOT, tokens));
	else if (parent != KVD_PFN_NONE && pool->links[parent].walk)
		kvd_walk_add(pool, pfn,
			     kvd_walk_hash(pool, pool->links[parent].walk, tokens));
}

void kvd_prefix_adopt(struct kvd_pool *pool, u32 pfn)
{
	const struct kvd_frame *f = &pool->frames[pfn];
	u64 hash = key_hash(pool, f->key);
	u32 *head = head_of(pool, hash);

	pool->links[pfn].key_hash = (u32)(hash >> 32);
	pool->links[pfn].hash_next = *head;
	*head = pfn;
	/* No walk entry: tokens are believed only with their key (kvd_prefix_find()). */
	if (!parent_alive(pool, f))
		return;
	pool->links[f->parent].nr_children++;
	pool->links[pfn].walk_parent = kv_tag_gen(pool->frames[f->parent].tag);
}

void kvd_prefix_remove(struct kvd_pool *pool, u32 pfn)
{
	struct kvd_frame *f = &pool->frames[pfn];
	u32 *at = kvd_prefix_head(pool, f->key);

	kv_assert(f->flags & KVD_FRAME_INDEXED);
	kvd_frame_touch(pool, pfn);
	while (*at != pfn) {
		kv_assert(*at != KVD_PFN_NONE);
		at = &pool->links[*at].hash_next;
	}
	*at = pool->links[pfn].hash_next;
	kvd_walk_del(pool, pfn);
	if (parent_alive(pool, f))
		kvd_lru_child_removed(pool, f->parent);
	f->parent = KVD_PFN_NONE;
	f->flags &= (u8) ~(KVD_FRAME_INDEXED | KVD_FRAME_FINDABLE | KVD_FRAME_ROOT |
			   KVD_FRAME_HELD);
	/* Children are orphans now: parent_alive() says so, they are found again by their
	 * keys when this page comes back, and evicted as any other. */
	pool->links[pfn].nr_children = 0;
}

void kvd_prefix_forget(struct kvd_pool *pool, u32 pfn)
{
	struct kvd_frame *f = &pool->frames[pfn];

	kv_assert(f->state == KVD_SEALED);
	kvd_prefix_remove(pool, pfn);
	if (f->flags & KVD_FRAME_SEALING) {
		kvd_grace_cancel(pool, pfn);
		f->flags &= (u8)~KVD_FRAME_SEALING;
		f->refs--;
	}
	if (f->refs)
		kvd_frame_set(pool, pfn, KVD_SEALED, KVD_EV_EVICT, 0);
	else
		kvd_pool_kill(pool, pfn, KVD_EV_EVICT, 0);
}

void kvd_prefix_evict(struct kvd_pool *pool, u32 pfn)
{
	kv_assert(pool->frames[pfn].state == KVD_CACHED);
	kvd_lru_del(pool, pfn);
	kvd_prefix_remove(pool, pfn);
	kvd_pool_kill(pool, pfn, KVD_EV_EVICT, 0);
}

/* ------------------------------------------------------------------------- lookup */

int kvd_lookup_start(struct kvd_lookup_op *op)
{
	if (op->nr_tokens > KV_LOOKUP_MAX)
		return -EINVAL;
	op->nr = 0;
	op->asking = false;
	op->nr_coming = 0;
	op->parent = KVD_PFN_NONE;
	op->parent_gen = 0;
	op->walk = KVD_WALK_ROOT;
	op->ahead = KVD_WALK_AHEAD / 4;
	op->ahead_keys = 1;
	op->by_keys = false;
	op->hashed = 0;
	memcpy(op->key, op->a->pool->root_key, KV_KEY_BYTES);
	op->a->pool->nr_lookups++;
	return 0;
}

static const u32 *lookup_tokens(const struct kvd_lookup_op *op, u32 nr)
{
	return op->tokens + (u64)nr * KV_PAGE_TOKENS;
}

static bool may_hit(const struct kvd_lookup_op *op, u32 pfn)
{
	return (op->a->pool->frames[pfn].flags & KVD_FRAME_FINDABLE) &&
	       op->a->refs[pfn] < KVD_LEASE_REFS_MAX;
}

/* @pfn is page @op->nr, and @walk the token hash up to it. */
static void lookup_hit(struct kvd_lookup_op *op, u32 pfn, u64 walk)
{
	struct kvd_pool *pool = op->a->pool;
	struct kv_hit *hit = &op->hits[op->nr];
	struct kvd_frame *f = &pool->frames[pfn];

	kv_assert(kvd_lease_get(op->s, op->a, pfn, KVD_EV_HIT) == 0);
	memcpy(hit->key, f->key, KV_KEY_BYTES);
	hit->grant.pfn = pfn;
	hit->grant.flags = KV_GRANT_SHARED;
	hit->grant.tag = f->tag;
	memcpy(op->key, f->key, KV_KEY_BYTES);
	op->parent = pfn;
	op->parent_gen = kv_tag_gen(f->tag);
	op->walk = walk;
	op->nr++;
	pool->nr_hits++;
}

/* ------------------------------------------------- asking the tiers behind the run */

/* Is page @op->asked, with @key, on its way? Then the one behind it is asked for next. */
static bool ask(struct kvd_lookup_op *op, const u8 *key)
{
	const struct kvd_core *core = op->s->core;
	struct kvd_restore_ask a = {
		.pool = op->a->pool,
		.tenant = op->s->tenant,
		.key = key,
		.parent_key = op->ask_key,
		.root = op->asked == 0,
	};

	if (!core->cfg.spill || !core->cfg.spill->restore(core->cfg.spill_arg, &a))
		return false;
	memcpy(op->ask_key, key, KV_KEY_BYTES);
	op->asked++;
	op->nr_coming++;
	return true;
}

/* The first page that is in no index. */
static void ask_first(struct kvd_lookup_op *op, const u8 *key)
{
	op->asked = op->nr;
	memcpy(op->ask_key, op->key, KV_KEY_BYTES);
	op->asking = ask(op, key);
}

/* Pages behind it, up to KVD_HASH_SLICE: back in the pool already, or asked for. */
static int ask_step(struct kvd_lookup_op *op, u32 want, u32 here)
{
	const struct kvd_pool *pool = op->a->pool;
	u8 key[KV_KEY_BYTES];
	u32 pfn;

	for (u32 i = 0; i < KVD_HASH_SLICE && op->asked < here; i++) {
		kvd_prefix_pool_key(pool, op->ask_key, lookup_tokens(op, op->asked), key);
		pfn = kvd_prefix_find_key(pool, key);
		if (pfn == KVD_PFN_NONE) {
			if (!ask(op, key))
				return op->nr ? 0 : KV_MISS;
			continue;
		}
		memcpy(op->ask_key, key, KV_KEY_BYTES);
		op->asked++;
	}
	if (op->asked < want)
		return -EAGAIN;
	return op->nr ? 0 : KV_MISS;
}

static struct kvd_lookup_key *key_of(struct kvd_lookup_op *op, u32 page)
{
	return &op->keys[page % KV_ARRAY_SIZE(op->keys)];
}

/* Page @op->nr by its key, which is there. */
static bool lookup_key(struct kvd_lookup_op *op)
{
	const struct kvd_lookup_key *k = key_of(op, op->nr);
	struct kvd_pool *pool = op->a->pool;
	const struct kvd_frame *p;
	struct kvd_frame *f;
	u32 pfn;

	pfn = find_hashed(pool, k->hash, k->key, lookup_tokens(op, op->nr), op->parent,
			  op->nr == 0);
	if (pfn == KVD_PFN_NONE)
		ask_first(op, k->key);
	if (pfn == KVD_PFN_NONE || !may_hit(op, pfn))
		return false;
	f = &pool->frames[pfn];
	/* Could a walk have found it? Then it may find those behind it. */
	op->by_keys = pool->links[pfn].walk != k->walk ||
		      pool->links[pfn].walk_parent != op->parent_gen;
	/* An orphan's parent is back under a new pfn: the tree needs to know. Whoever gave up
	 * its pin between two turns let that pfn be another page: @pfn itself, even. */
	p = op->nr && !parent_alive(pool, f) ? &pool->frames[op->parent] : NULL;
	if (p && (p->flags & KVD_FRAME_INDEXED) &&
	    (kv_tag_gen(p->tag) == op->parent_gen || KV_MUTANT(stale_parent_linked)))
		child_link(pool, f, op->parent);
	if (!pool->links[pfn].walk)
		kvd_walk_add(pool, pfn, k->walk);
	lookup_hit(op, pfn, k->walk);
	return true;
}

/* The head of @page's chain was fetched a while ago: now the entry it names. */
static inline void fetch_first(struct kvd_lookup_op *op, u32 page)
{
	kvd_walk_fetch(op->a, *head_of(op->a->pool, key_of(op, page)->hash));
}

/* And now, if that one is another key's, the first with the right hash: a chain's links
 * lie anywhere. */
static inline void fetch_right(struct kvd_lookup_op *op, u32 page)
{
	const struct kvd_pool *pool = op->a->pool;
	u64 hash = key_of(op, page)->hash;
	u32 first = *head_of(pool, hash), pfn = first;

	while (pfn != KVD_PFN_NONE && pool->links[pfn].key_hash != (u32)(hash >> 32))
		pfn = pool->links[pfn].hash_next;
	if (pfn != first)
		kvd_walk_fetch(op->a, pfn);
}

/* Pages whose keys are there and whose memory is still coming. */
#define KEYS_AHEAD (KVD_LOOKUP_KEYS - 1)

/*
 * The key of page @op->hashed, and in the shade of its two halves its token hash and the
 * hit of the page that is KEYS_AHEAD before it. Return: was that one a hit?
 *
 * A CPU looks about one half ahead of what it waits for: what lies between the halves may
 * not be long, or it waits to begin the second one (measured: seven orders).
 */
static bool hash_one(struct kvd_lookup_op *op)
{
	u32 page = op->hashed;
	struct kvd_lookup_key *k = key_of(op, page), *before = key_of(op, page - 1);
	const u32 *tokens = lookup_tokens(op, page);
	struct kvd_pool *pool = op->a->pool;
	bool first = page == op->nr;
	struct kvd_keyhash kh;

	kvd_keyhash_begin(&kh, tokens, first ? op->key : before->key, pool->personal);
	k->walk = kvd_walk_hash(pool, first ? op->walk : before->walk, tokens);
	kvd_walk_head_fetch(pool, k->walk);
	kvd_keyhash_end(&kh, k->key);
	key_shorten(pool, k->key);
	if (page - op->nr == KEYS_AHEAD && !lookup_key(op))
		return false;
	if (page - op->nr > 1)
		fetch_right(op, page - 2);
	if (!first)
		fetch_first(op, page - 1);
	k->hash = key_hash(pool, k->key);
	__builtin_prefetch(head_of(pool, k->hash));
	op->hashed++;
	return true;
}

/* The pages whose keys are there. */
static bool keys_finish(struct kvd_lookup_op *op)
{
	u32 end = op->hashed;

	if (op->nr < end)
		fetch_first(op, end - 1);
	if (op->nr + 1 < end)
		fetch_right(op, end - 2);
	while (op->nr < end) {
		if (op->nr + 1 == end)
			fetch_right(op, op->nr);
		if (!lookup_key(op))
			return false;
	}
	return true;
}

/*
 * @max pages more by their keys, up to page @here at most. A key needs the one before it,
 * but not its entry, and a hash is a long chain of steps that leaves most of the CPU idle.
 * So the pages before are worked on behind its second half: the hit of one, whose memory is
 * there by then, the entry of the next, and the chain's head of the last.
 * What is so under way at the end goes on in the next turn. Return: were all of them hits?
 */
static bool lookup_hash(struct kvd_lookup_op *op, u32 max, u32 here)
{
	kv_assert(max && op->hashed + max <= here);
	while (max--)
		if (!hash_one(op))
			return false;
	if (op->hashed < here && op->by_keys && op->ahead_keys == KVD_HASH_SLICE)
		return true;
	return keys_finish(op);
}

/* As far as the walk table leads, @max <= KVD_WALK_SLICE pages at most. */
static void lookup_walk(struct kvd_lookup_op *op, u32 max)
{
	struct kvd_pool *pool = op->a->pool;
	struct kvd_walk w;

	kvd_walk_start(&w, op->walk, lookup_tokens(op, op->nr), max);
	for (u32 i = 0; i < max; i++) {
		u32 pfn;

		if (i == w.again)
			kvd_walk_ahead(op->a, &w, i, op->ahead);
		pfn = kvd_walk_find(pool, w.hashes[i], lookup_tokens(op, op->nr),
				    op->parent, op->parent_gen);
		if (pfn == KVD_PFN_NONE || !may_hit(op, pfn))
			return;
		lookup_hit(op, pfn, w.hashes[i]);
		/* What is there is likely to go on. */
		if (i + 1 >= op->ahead)
			op->ahead = KV_MIN(op->ahead * 4, KVD_WALK_AHEAD);
	}
}

/* A page that is hashed counts as so many that are walked. */
#define KEY_COST (KVD_WALK_SLICE / KVD_HASH_SLICE)

int kvd_lookup_step(struct kvd_lookup_op *op)
{
	u32 want = KV_MIN(op->nr_tokens / KV_PAGE_TOKENS, op->hits_max), here;

	kv_assert(op->s->state == KVD_SESSION_LIVE && op->a->pool);
	if (op->max_pages)
		want = KV_MIN(want, op->max_pages);
	here = op->nr_ready ? KV_MIN(want, op->nr_ready) : want;
	if (op->asking)
		return ask_step(op, want, here);
	for (u32 left = KVD_WALK_SLICE; left && op->nr < here;) {
		u32 max = KV_MIN(here - op->nr, left), from = op->nr;

		if (!op->by_keys) {
			lookup_walk(op, max);
			op->hashed = op->nr;
			left -= op->nr - from;
			if (op->nr - from == max) {
				op->ahead_keys = 1;
				continue;
			}
		}
		max = KV_MIN(here - op->hashed, kv_div_round_up(left, KEY_COST));
		max = KV_MIN(max, op->ahead_keys);
		if (!lookup_hash(op, max, here)) {
			op->hashed = op->nr;
			if (op->asking && op->asked < want)
				return -EAGAIN;
			return op->nr ? 0 : KV_MISS;
		}
		left -= KV_MIN(left, max * KEY_COST);
		op->ahead = 1;
		op->ahead_keys = KV_MIN(op->ahead_keys * 4, KVD_HASH_SLICE);
	}
	if (op->nr < want)
		return -EAGAIN;
	return op->nr ? 0 : KV_MISS;
}

void kvd_lookup_again(struct kvd_lookup_op *op)
{
	op->asking = false;
	op->nr_coming = 0;
	op->ahead = 1;
	op->ahead_keys = 1;
	op->by_keys = false;
	op->hashed = op->nr;
}
