/* SPDX-License-Identifier: Apache-2.0 */
/*
 * own/walk.c - finding pages by their tokens and their parent. See walk.h.
 *
 * Loop thread only.
 */
#include "kvmd/own/walk.h"
#ifdef __SSE2__
#include <emmintrin.h>
#endif
#include <sodium.h>
#include <string.h>
#include "base/mutant.h"

void kvd_walk_pool_init(struct kvd_pool *pool)
{
	static const u8 message[] = "kvmd token walk";

	/* Whoever does not know the secret cannot make chains long. */
	for (u8 i = 0; i < sizeof(pool->walk_key) / 64; i++) {
		u8 salt[KV_KEY_BYTES] = {i};

		kv_assert(!crypto_generichash_blake2b_salt_personal(
			(u8 *)pool->walk_key + i * 64, 64, message, sizeof(message),
			pool->root_key, KV_KEY_BYTES, salt, pool->personal));
	}
}

/* Each pair of tokens, keyed, as one product. */
static inline u64 pairs_sum(const u32 *tokens, const u32 *key)
{
#ifdef __SSE2__
	__m128i sum = _mm_setzero_si128(), t;

	for (u32 i = 0; i < KV_PAGE_TOKENS; i += 4) {
		t = _mm_add_epi32(_mm_loadu_si128((const __m128i *)(tokens + i)),
				  _mm_loadu_si128((const __m128i *)(key + i)));
		sum = _mm_add_epi64(sum, _mm_mul_epu32(t, _mm_srli_epi64(t, 32)));
	}
	return (u64)_mm_cvtsi128_si64(sum) +
	       (u64)_mm_cvtsi128_si64(_mm_unpackhi_epi64(sum, sum));
#else
	u64 sum = 0;

	for (u32 i = 0; i < KV_PAGE_TOKENS; i += 2)
		sum += (u64)(u32)(tokens[i] + key[i]) * (u32)(tokens[i + 1] + key[i + 1]);
	return sum;
#endif
}

u64 kvd_walk_hash(const struct kvd_pool *pool, u64 before, const u32 *tokens)
{
	u64 sum = pairs_sum(tokens, pool->walk_key), hash;
	unsigned __int128 product;

	product = (unsigned __int128)(before ^ 0x9e3779b97f4a7c15ull) *
		  (sum ^ 0xbf58476d1ce4e5b9ull);
	hash = (u64)product ^ (u64)(product >> 64);
	/* Tests truncate keys so that they collide (case O42), and these with them. */
	if (pool->key_bits < 64)
		hash &= (1ull << pool->key_bits) - 1;
	return hash ? hash : 1;
}

static u32 *head_of(const struct kvd_pool *pool, u64 hash)
{
	return &pool->walk_heads[hash & pool->hash_mask];
}

void kvd_walk_add(struct kvd_pool *pool, u32 pfn, u64 hash)
{
	struct kvd_link *link = &pool->links[pfn];
	u32 *head = head_of(pool, hash);

	kv_assert(hash && !link->walk && (pool->frames[pfn].flags & KVD_FRAME_INDEXED));
	link->walk = hash;
	link->walk_next = *head;
	*head = pfn;
}

void kvd_walk_del(struct kvd_pool *pool, u32 pfn)
{
	struct kvd_link *link = &pool->links[pfn];
	u32 *at;

	if (!link->walk)
		return;
	for (at = head_of(pool, link->walk); *at != pfn; at = &pool->links[*at].walk_next)
		kv_assert(*at != KVD_PFN_NONE);
	*at = link->walk_next;
	link->walk = 0;
}

static const u32 *page_tokens_of(const struct kvd_pool *pool, u32 pfn)
{
	return pool->tokens + (u64)pfn * KV_PAGE_TOKENS;
}

void kvd_walk_head_fetch(const struct kvd_pool *pool, u64 hash)
{
	__builtin_prefetch(head_of(pool, hash), 1);
}

void kvd_walk_fetch(const struct kvd_attach *a, u32 pfn)
{
	const u32 *tokens = page_tokens_of(a->pool, pfn);

	if (pfn == KVD_PFN_NONE)
		return;
	__builtin_prefetch(&a->pool->links[pfn], 1);
	__builtin_prefetch(&a->pool->frames[pfn], 1);
	__builtin_prefetch(&a->pool->frames[pfn].past, 1);
	for (u32 i = 0; i < KV_PAGE_TOKENS; i += 64 / sizeof(u32))
		__builtin_prefetch(tokens + i);
	__builtin_prefetch(&a->refs[pfn], 1);
	__builtin_prefetch(&a->held[pfn / 64], 1);
}

void kvd_walk_start(struct kvd_walk *w, u64 before, const u32 *tokens, u32 nr)
{
	kv_assert(nr <= KVD_WALK_MAX);
	w->before = before;
	w->tokens = tokens;
	w->nr = nr;
	w->again = 0;
	w->hashed = w->linked = w->chained = w->fetched = 0;
}

static u32 upto(const struct kvd_walk *w, u32 at, u32 ahead)
{
	return KV_MIN(w->nr, at + KV_MAX(ahead, 1u));
}

/*
 * Memory takes longer to come than a page takes to be looked at. So there are four steps
 * from a hash to its page, each so far behind the one before that this one's memory is
 * there: the chain's head; the links of the first page in it; if that is another hash's,
 * those of the second; and all that a hit touches of the right one.
 */
void kvd_walk_ahead(const struct kvd_attach *a, struct kvd_walk *w, u32 at, u32 ahead)
{
	const struct kvd_pool *pool = a->pool;
	const struct kvd_link *links = pool->links;
	u32 pfn;

	for (; w->hashed < upto(w, at, ahead * 5 / 4); w->hashed++) {
		w->before = kvd_walk_hash(pool, w->before,
					  w->tokens + w->hashed * KV_PAGE_TOKENS);
		w->hashes[w->hashed] = w->before;
		kvd_walk_head_fetch(pool, w->before);
	}
	for (; w->linked < upto(w, at, ahead); w->linked++) {
		w->pfns[w->linked] = pfn = *head_of(pool, w->hashes[w->linked]);
		if (pfn != KVD_PFN_NONE)
			__builtin_prefetch(&links[pfn], 1);
	}
	for (; w->chained < upto(w, at, ahead * 3 / 4); w->chained++) {
		pfn = w->pfns[w->chained];
		if (pfn == KVD_PFN_NONE || links[pfn].walk == w->hashes[w->chained])
			continue;
		w->pfns[w->chained] = pfn = links[pfn].walk_next;
		if (pfn != KVD_PFN_NONE)
			__builtin_prefetch(&links[pfn], 1);
	}
	for (; w->fetched < upto(w, at, ahead / 2); w->fetched++) {
		pfn = w->pfns[w->fetched];
		while (pfn != KVD_PFN_NONE && links[pfn].walk != w->hashes[w->fetched])
			pfn = links[pfn].walk_next;
		kvd_walk_fetch(a, pfn);
	}
	w->again = at + KV_MAX(ahead / 4, 1u);
}

static bool follows(const struct kvd_pool *pool, u32 pfn, u32 parent, u64 parent_gen)
{
	const struct kvd_frame *f = &pool->frames[pfn];

	if (parent == KVD_PFN_NONE)
		return f->flags & KVD_FRAME_ROOT;
	return f->parent == parent && pool->links[pfn].walk_parent == parent_gen &&
	       !(f->flags & KVD_FRAME_ROOT);
}

u32 kvd_walk_find(const struct kvd_pool *pool, u64 hash, const u32 *tokens, u32 parent,
		  u64 parent_gen)
{
	u32 pfn;

	for (pfn = *head_of(pool, hash); pfn != KVD_PFN_NONE;
	     pfn = pool->links[pfn].walk_next) {
		if (pool->links[pfn].walk != hash)
			continue;
		if (memcmp(page_tokens_of(pool, pfn), tokens,
			   KV_PAGE_TOKENS * sizeof(u32)) &&
		    !KV_MUTANT(walk_no_token_compare))
			continue;
		if (follows(pool, pfn, parent, parent_gen) || KV_MUTANT(walk_any_parent))
			return pfn;
	}
	return KVD_PFN_NONE;
}

bool kvd_walk_has(const struct kvd_pool *pool, u32 pfn)
{
	u32 at = *head_of(pool, pool->links[pfn].walk);

	for (u32 i = 0; at != pfn && at != KVD_PFN_NONE && i < pool->geo.nr_pages; i++)
		at = pool->links[at].walk_next;
	return at == pfn;
}
