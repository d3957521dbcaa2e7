/* SPDX-License-Identifier: Apache-2.0 */
/*
 * prefix.c - shared prefixes: seal, lookup, pin, fork; and report and stat.
 *
 * Arguments are written straight into the ring's argument area: a LOOKUP of 131,072
 * tokens is copied once here and read once by kvmd.
 */
#include "internal.h"

#include <errno.h>
#include <string.h>

static int check_pages(struct kvc_pool *pool, const struct kv_grant *pages, u32 nr)
{
	if (kvc_poisoned(pool->c))
		return kvc_fail(-EOWNERDEAD, "the process forked");
	if (!nr || nr > KV_BATCH_MAX)
		return kvc_fail(-EINVAL, "nr=%u: 1 to %u are possible", nr, KV_BATCH_MAX);
	for (u32 i = 0; i < nr; i++)
		if (pages[i].pfn >= pool->geometry.nr_pages)
			return kvc_fail(-EINVAL, "pages[%u].pfn=%u: the pool has %u", i,
					pages[i].pfn, pool->geometry.nr_pages);
	return 0;
}

static void fill_refs(void *arg, const struct kvc_req *req)
{
	const struct kv_grant *pages = req->src;
	struct kv_page_ref *refs = arg;

	for (u32 i = 0; i < req->nr; i++)
		refs[i] = (struct kv_page_ref){.pfn = pages[i].pfn, .tag = pages[i].tag};
}

/* --------------------------------------------------------------------------------- seal
 */

static void fill_seal(void *arg, const struct kvc_req *req)
{
	const struct kvc_seal *seal = req->src;
	struct kv_seal_arg *head = arg;
	struct kv_seal_page *pages = (void *)(head + 1);

	memset(head, 0, sizeof(*head));
	if (seal->parent_key)
		memcpy(head->parent_key, seal->parent_key, KV_KEY_BYTES);
	else
		head->flags = KV_SEAL_ROOT;
	if (req->again)
		head->flags |= KV_SEAL_AGAIN;
	for (u32 i = 0; i < req->nr; i++)
		pages[i] = (struct kv_seal_page){.pfn = seal->pages[i].pfn,
						 .crc32c = seal->crc32c[i],
						 .tag = seal->pages[i].tag};
	memcpy(pages + req->nr, seal->tokens,
	       (size_t)req->nr * req->pool->layout.page_tokens * sizeof(u32));
}

static int check_seal(struct kvc_pool *pool, const struct kvc_seal *seal)
{
	if (seal->flags || seal->reserved)
		return kvc_fail(-EINVAL, "seal.flags=0x%x, reserved=%u: must be 0",
				seal->flags, seal->reserved);
	if (!seal->pages || !seal->crc32c || !seal->tokens || !seal->ret_seals)
		return kvc_fail(-EINVAL, "seal.pages, crc32c, tokens or ret_seals: NULL");
	return check_pages(pool, seal->pages, seal->nr_pages);
}

int kvc_seal(struct kvc_pool *pool, const struct kvc_seal *given)
{
	struct kvc *c = pool->c;
	struct kvc_seal taken;
	const struct kvc_seal *seal = &taken;
	struct kvc_req req = {
		.opcode = KV_OP_SEAL, .pool = pool, .fill = fill_seal, .src = seal};
	int r;

	r = kvc_struct_take(&taken, sizeof(taken),
			    KVC_FIRST_SIZE(struct kvc_seal, ret_seals), given,
			    "kvc_seal");
	if (!r)
		r = check_seal(pool, seal);
	if (r)
		return r;
	/* a launched step may still write the pages */
	if (!kvc_fence_passed(c, __atomic_load_n(&c->launch_number, __ATOMIC_ACQUIRE)))
		return KV_BUSY;
	req.nr = seal->nr_pages;
	req.arg_bytes = (u32)sizeof(struct kv_seal_arg) +
			req.nr * (u32)(sizeof(struct kv_seal_page) +
				       pool->layout.page_tokens * sizeof(u32));
	req.ret_bytes = req.nr * (u32)sizeof(struct kv_seal_ret);
	req.ret = seal->ret_seals;
	return kvc_call(c, &req, kvc_deadline(c));
}

/* ------------------------------------------------------------------------------- lookup
 */

struct lookup {
	u32 max_pages;
	const u32 *tokens;
};

static void fill_lookup(void *arg, const struct kvc_req *req)
{
	const struct lookup *l = req->src;
	struct kv_lookup_arg *head = arg;

	*head = (struct kv_lookup_arg){.max_pages = l->max_pages};
	memcpy(head + 1, l->tokens, req->nr * sizeof(u32));
}

int kvc_lookup(struct kvc_pool *pool, const uint32_t *tokens, uint32_t nr_tokens,
	       uint32_t max_pages, struct kv_hit *ret_hits, uint32_t *ret_nr)
{
	struct lookup l = {.tokens = tokens};
	struct kvc_req req = {.opcode = KV_OP_LOOKUP,
			      .pool = pool,
			      .ret_unit = sizeof(*ret_hits),
			      .fill = fill_lookup,
			      .src = &l,
			      .ret = ret_hits};
	int r;

	if (kvc_poisoned(pool->c))
		return kvc_fail(-EOWNERDEAD, "the process forked");
	if (nr_tokens > KV_LOOKUP_MAX)
		return kvc_fail(-EINVAL, "nr_tokens=%u: at most %u", nr_tokens,
				KV_LOOKUP_MAX);
	l.max_pages = KV_MIN(max_pages, nr_tokens / pool->layout.page_tokens);
	*ret_nr = 0;
	if (!l.max_pages)
		return KV_MISS;
	req.nr = l.max_pages * pool->layout.page_tokens; /* a part of a page cannot hit */
	req.arg_bytes = (u32)(sizeof(struct kv_lookup_arg) + req.nr * sizeof(u32));
	req.ret_bytes = l.max_pages * (u32)sizeof(*ret_hits);
	r = kvc_call(pool->c, &req, kvc_deadline(pool->c));
	if (r)
		return r;
	r = kvc_pages_mapped(pool, &ret_hits->grant, req.ret_nr, sizeof(*ret_hits));
	for (u32 i = 0; r && i < req.ret_nr; i++)
		if (kvc_ret_add(pool, &ret_hits[i].grant, 1))
			kvc_log(pool->c, KVC_LOG_ERR, "pfn %u is lost",
				ret_hits[i].grant.pfn);
	if (!r)
		*ret_nr = req.ret_nr;
	return r;
}

int kvc_prefetch(struct kvc_pool *pool, const uint32_t *tokens, uint32_t nr_tokens,
		 uint32_t max_pages, uint32_t *ret_nr)
{
	struct lookup l = {.tokens = tokens};
	struct kvc_req req = {
		.opcode = KV_OP_PREFETCH, .pool = pool, .fill = fill_lookup, .src = &l};
	int r;

	if (kvc_poisoned(pool->c))
		return kvc_fail(-EOWNERDEAD, "the process forked");
	if (nr_tokens > KV_LOOKUP_MAX)
		return kvc_fail(-EINVAL, "nr_tokens=%u: at most %u", nr_tokens,
				KV_LOOKUP_MAX);
	l.max_pages = KV_MIN(max_pages, nr_tokens / pool->layout.page_tokens);
	*ret_nr = 0;
	if (!l.max_pages)
		return KV_MISS;
	req.nr = l.max_pages * pool->layout.page_tokens;
	req.arg_bytes = (u32)(sizeof(struct kv_lookup_arg) + req.nr * sizeof(u32));
	r = kvc_call(pool->c, &req, kvc_deadline(pool->c));
	if (r >= 0)
		*ret_nr = req.ret_nr;
	return r;
}

int kvc_pin(struct kvc_pool *pool, const struct kv_grant *pages, uint32_t nr)
{
	struct kvc_req req = {.opcode = KV_OP_PIN,
			      .pool = pool,
			      .nr = nr,
			      .arg_bytes = nr * (u32)sizeof(struct kv_page_ref),
			      .fill = fill_refs,
			      .src = pages};
	int r;

	r = check_pages(pool, pages, nr);
	return r ? r : kvc_call(pool->c, &req, kvc_deadline(pool->c));
}

int kvc_fork(struct kvc_pool *pool, const struct kv_grant *sources, uint32_t nr,
	     uint32_t gfp, struct kv_grant *ret_pages)
{
	struct kvc_req req = {.opcode = KV_OP_FORK,
			      .pool = pool,
			      .nr = nr,
			      .arg_bytes = nr * (u32)sizeof(struct kv_page_ref),
			      .ret_bytes = nr * (u32)sizeof(*ret_pages),
			      .fill = fill_refs,
			      .src = sources,
			      .ret = ret_pages};
	int r;

	r = check_pages(pool, sources, nr);
	if (r)
		return r;
	if (gfp & ~KV_GFP_VALID)
		return kvc_fail(-EINVAL, "gfp=0x%x: unknown bits 0x%x", gfp,
				gfp & ~KV_GFP_VALID);
	r = kvc_fork_call(pool, &req, gfp);
	if (r)
		return r;
	r = kvc_pages_mapped(pool, ret_pages, nr, sizeof(*ret_pages));
	if (r && kvc_ret_add(pool, ret_pages, nr))
		kvc_log(pool->c, KVC_LOG_ERR, "%u pages are lost: out of memory", nr);
	return r;
}

/* ----------------------------------------------------------------------- report and stat
 */

int kvc_report(struct kvc_pool *pool, const struct kv_incident *incident)
{
	struct kvc_req req = {.opcode = KV_OP_REPORT,
			      .pool = pool,
			      .nr = 1,
			      .arg_bytes = sizeof(*incident),
			      .src = incident};

	if (kvc_poisoned(pool->c))
		return kvc_fail(-EOWNERDEAD, "the process forked");
	return kvc_call(pool->c, &req, kvc_deadline(pool->c));
}

int kvc_stat(struct kvc_pool *pool, struct kv_stat *ret_stat)
{
	struct kvc_req req = {.opcode = KV_OP_STAT,
			      .pool = pool,
			      .ret_bytes = sizeof(*ret_stat),
			      .ret = ret_stat};

	if (kvc_poisoned(pool->c))
		return kvc_fail(-EOWNERDEAD, "the process forked");
	return kvc_call(pool->c, &req, kvc_deadline(pool->c));
}
