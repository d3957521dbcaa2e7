/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kv.c - page tables of requests: leases from kvmd on one side, rows for the check on the
 *	other.
 *
 * A row is made when the lease enters the table and carries the hash of (nonce, index).
 *	What is given back to kvmd are the leases, never the rows: a damaged row cannot free
 *	another's page.
 *
 *	page i:  leased -> [ZERO or COPY in the step that first writes it] -> appended to
 *	         -> full -> digest in the same step -> sealed after that step has retired
 *
 * Loop thread only.
 */
#include "engine/run/internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/**
 * eng_table_init() - room for a sequence's pages
 * @cap: pages
 *
 * Return: 0; -ENOMEM.
 */
int eng_table_init(struct eng_table *t, u32 cap)
{
	memset(t, 0, sizeof(*t));
	t->rows = calloc(cap, sizeof(*t->rows));
	t->leases = calloc(cap, sizeof(*t->leases));
	t->cap = cap;
	if (t->rows && t->leases)
		return 0;
	eng_table_fini(t);
	return -ENOMEM;
}

/** eng_table_fini() - free the arrays; all pages must be released */
void eng_table_fini(struct eng_table *t)
{
	kv_assert(t->nr == 0 && !t->has_fork_source);
	free(t->rows);
	free(t->leases);
	t->rows = NULL;
	t->leases = NULL;
}

/** eng_table_reset() - start an empty table with a fresh nonce */
void eng_table_reset(struct eng_engine *e, struct eng_table *t)
{
	kv_assert(t->nr == 0 && !t->has_fork_source);
	t->nr_sealed = 0;
	t->nonce = eng_rand(e);
	memset(t->key, 0, sizeof(t->key));
}

static void table_push(struct eng_table *t, struct kv_grant grant, u32 lease_flags)
{
	u32 i = t->nr;

	kv_assert(i < t->cap);
	t->leases[i].grant = grant;
	t->leases[i].flags = lease_flags;
	t->rows[i] = kv_row_make(grant.pfn, grant.tag, 0, t->nonce, i);
	t->nr++;
}

/** eng_free_grant() - give one page (or one reference) back; eng_engine_turn() flushes */
void eng_free_grant(struct eng_engine *e, const struct kv_grant *grant)
{
	kvc_free(e->pool, grant, 1);
	e->frees_due = true;
}

/*
 * All tokens are in sealed pages, but the last one must be computed again for its logits,
 * and it would append to a sealed page: fork that page, copy 63 tokens, append the 64th.
 * Without a page for the fork the whole last page is computed again.
 */
static u32 table_fork_last(struct eng_engine *e, struct eng_table *t,
			   struct kv_grant source, u32 nr_tokens)
{
	struct kv_grant copy;

	if (kvc_fork(e->pool, &source, 1, KV_GFP_NOWAIT, &copy) != 0) {
		eng_free_grant(e, &source);
		return t->nr * KV_PAGE_TOKENS;
	}
	table_push(t, copy, ENG_LEASE_COPY);
	t->fork_source = source;
	t->has_fork_source = true;
	eng_stat_add(e->stats.forked_pages, 1);
	return nr_tokens - 1;
}

/**
 * eng_table_lookup() - start a table with the sealed pages that hold its first tokens
 * @tokens: nr_tokens of the sequence
 * @ret_cached: tokens whose K/V need not be computed, less than nr_tokens
 *
 * Of more tokens than one LOOKUP holds, the first of them are looked up.
 * Return: 0 (also when nothing was found); -ETIMEDOUT kvmd is away.
 */
int eng_table_lookup(struct eng_engine *e, struct eng_table *t, const u32 *tokens,
		     u32 nr_tokens, u32 *ret_cached)
{
	u32 nr = 0, nr_asked = KV_MIN(nr_tokens, KV_LOOKUP_MAX);
	u32 whole = nr_asked / KV_PAGE_TOKENS;
	int r;

	*ret_cached = 0;
	if (whole == 0)
		return 0;
	r = kvc_lookup(e->pool, tokens, nr_asked, KV_MIN(whole, t->cap), e->hits, &nr);
	if (r == KV_MISS)
		return 0;
	if (r)
		return r;
	kv_assert(nr <= whole);
	for (u32 i = 0; i < nr; i++) {
		if ((i + 1) * KV_PAGE_TOKENS == nr_tokens) {
			*ret_cached = table_fork_last(e, t, e->hits[i].grant, nr_tokens);
			return 0;
		}
		table_push(t, e->hits[i].grant, 0);
		memcpy(t->key, e->hits[i].key, sizeof(t->key));
		t->nr_sealed = i + 1;
	}
	*ret_cached = nr * KV_PAGE_TOKENS;
	return 0;
}

/* Pages no table has: back in as many calls as it takes. */
static void give_back(struct eng_engine *e, const struct kv_grant *grants, u32 nr)
{
	for (u32 i = 0; i < nr; i += KV_BATCH_MAX)
		kvc_free(e->pool, grants + i, KV_MIN(nr - i, KV_BATCH_MAX));
	if (nr)
		e->frees_due = true;
}

/* A sequence may have more pages than one ALLOC gives. */
static int alloc_all(struct eng_engine *e, u32 nr, u32 gfp)
{
	u32 got = 0;

	while (got < nr) {
		u32 n = KV_MIN(nr - got, KV_BATCH_MAX);
		int r = kvc_alloc(e->pool, n, gfp, e->grants + got);

		if (r) {
			give_back(e, e->grants, got);
			return r;
		}
		got += n;
	}
	return 0;
}

/**
 * eng_table_grow() - lease more pages, all or nothing
 * @nr_pages: pages the table is to have; fewer than now is fine
 * @gfp: KV_GFP_*
 *
 * Return: 0; KV_FULL, KV_QUOTA, KV_PENDING; -errno of kvc_alloc().
 */
int eng_table_grow(struct eng_engine *e, struct eng_table *t, u32 nr_pages, u32 gfp)
{
	u32 nr;
	int r;

	if (nr_pages <= t->nr)
		return 0;
	nr = nr_pages - t->nr;
	kv_assert(nr_pages <= t->cap && nr <= e->pages_max);
	r = alloc_all(e, nr, gfp);
	if (r)
		return r;
	if (e->inject.nr_want)
		eng_inject_take(e, t, e->grants, nr);
	for (u32 i = 0; i < nr; i++) {
		u32 dirty = e->grants[i].flags & KV_GRANT_DIRTY;

		table_push(t, e->grants[i], dirty ? ENG_LEASE_ZERO : 0);
	}
	return 0;
}

/**
 * eng_table_release() - give all pages back
 *
 * kvclient holds the frees until every step launched so far has retired (P6).
 */
void eng_table_release(struct eng_engine *e, struct eng_table *t)
{
	u32 nr = 0;

	for (u32 i = 0; i < t->nr; i++) {
		if (!(t->leases[i].flags & ENG_LEASE_GONE))
			e->grants[nr++] = t->leases[i].grant;
	}
	give_back(e, e->grants, nr);
	if (t->has_fork_source)
		give_back(e, &t->fork_source, 1);
	t->nr = 0;
	t->nr_sealed = 0;
	t->has_fork_source = false;
}

/**
 * eng_table_revoke() - kvmd took a page back
 *
 * Return: true if the table holds it; the request must compute it again elsewhere.
 */
bool eng_table_revoke(struct eng_table *t, const struct kv_page_ref *page)
{
	bool found = false;

	for (u32 i = 0; i < t->nr; i++) {
		const struct kv_grant *g = &t->leases[i].grant;

		if (g->pfn != page->pfn || kv_tag_gen(g->tag) != kv_tag_gen(page->tag))
			continue;
		t->leases[i].flags |= ENG_LEASE_GONE;
		found = true;
	}
	if (t->has_fork_source && t->fork_source.pfn == page->pfn &&
	    kv_tag_gen(t->fork_source.tag) == kv_tag_gen(page->tag)) {
		t->has_fork_source = false;
		found = true;
	}
	return found;
}

/**
 * eng_table_seal() - make full pages immutable and findable
 * @r: request
 * @crc: [nr] digests, computed in the step that has just retired
 * @nr: pages from table.nr_sealed on
 *
 * Not sealed (kvmd away, a step still in flight) is no failure: the pages are tried again
 * with the next full one, and work unsealed meanwhile.
 */
void eng_table_seal(struct eng_engine *e, struct eng_request *r, const u32 *crc, u32 nr)
{
	struct eng_table *t = &r->table;
	struct kvc_seal seal = {
		.size_bytes = sizeof(seal),
		.nr_pages = nr,
		.pages = e->grants,
		.crc32c = crc,
		.tokens = r->tokens + (size_t)t->nr_sealed * KV_PAGE_TOKENS,
		.parent_key = t->nr_sealed ? t->key : NULL,
		.ret_seals = e->seal_rets,
	};

	if (nr == 0 || eng_kvmd_away(e))
		return;
	kv_assert(t->nr_sealed + nr <= t->nr);
	for (u32 i = 0; i < nr; i++) {
		if (t->leases[t->nr_sealed + i].flags & ENG_LEASE_GONE)
			return;
		e->grants[i] = t->leases[t->nr_sealed + i].grant;
	}
	if (eng_kvmd_note(e, kvc_seal(e->pool, &seal)) != 0)
		return;
	memcpy(t->key, e->seal_rets[nr - 1].key, sizeof(t->key));
	t->nr_sealed += nr;
	eng_stat_add(e->stats.sealed_pages, nr);
}
