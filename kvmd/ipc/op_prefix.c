/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ipc/op_prefix.c - SEAL, LOOKUP and PREFETCH: hashing goes on over several turns, in slices of
 * KVD_HASH_SLICE pages. The first slice runs at once if no other request has used the
 * turn's.
 */
#include <errno.h>
#include <string.h>

#include "base/mutant.h"
#include "kvmd/daemon.h"
#include "kvmd/ipc/conn.h"
#include "kvmd/ipc/ops.h"

/* args: kv_seal_arg, kv_seal_page[nr], tokens[nr][64] */
int kvd_op_seal(struct kvd_request *req)
{
	struct kvd_seal_op *op = &req->seal;
	int r;

	memset(op, 0, sizeof(*op));
	op->s = req->conn->session;
	op->a = kvd_op_attach(req);
	memcpy(&op->arg, req->args, sizeof(op->arg));
	op->pages = (const struct kv_seal_page *)(req->args + sizeof(op->arg));
	op->tokens = (const u32 *)(op->pages + req->sqe.nr);
	op->rets = (struct kv_seal_ret *)req->rets;
	op->nr = req->sqe.nr;
	r = kvd_seal_start(op);
	return r ? r : KVD_REQUEST_AGAIN;
}

int kvd_op_seal_again(struct kvd_request *req)
{
	struct kvd_seal_op *op = &req->seal;
	int r;

	r = kvd_seal_step(op);
	if (r == -EAGAIN)
		return KVD_REQUEST_AGAIN;
	req->ret_nr = r ? 0 : op->nr;
	req->ret_bytes = r ? 0 : op->nr * (u32)sizeof(struct kv_seal_ret);
	return r;
}

/*
 * Tokens of the pages that the next step can reach are copied, each once: a lookup that
 * ends early never moves the rest of the array from the client's cache to ours.
 */
static int lookup_fetch(struct kvd_request *req)
{
	struct kvd_lookup_op *op = &req->lookup;
	u32 pages = op->asking ? op->asked + KVD_HASH_SLICE
			       : op->nr + (op->nr ? KVD_WALK_SLICE : KVD_LOOKUP_FIRST);
	u32 from = op->nr_ready * KV_PAGE_TOKENS, to;
	u32 off = (u32)sizeof(struct kv_lookup_arg) + from * (u32)sizeof(u32);

	pages = KV_MIN(pages, op->nr_tokens / KV_PAGE_TOKENS);
	if (pages <= op->nr_ready)
		return 0;
	to = pages * KV_PAGE_TOKENS;
	op->nr_ready = pages;
	return kvd_ring_args(&req->conn->ring, req->sqe.arg_off + off,
			     (to - from) * (u32)sizeof(u32), req->args + off);
}

/* args: kv_lookup_arg, tokens[nr] */
int kvd_op_lookup(struct kvd_request *req)
{
	struct kvd_lookup_op *op = &req->lookup;
	struct kv_lookup_arg arg;
	u32 room, i;
	int r;

	memcpy(&arg, req->args, sizeof(arg));
	for (i = 0; i < KV_ARRAY_SIZE(arg.reserved); i++)
		if (arg.reserved[i])
			return -EINVAL;
	room = KV_MIN(req->sqe.ret_bytes, KVD_REQUEST_RET_BYTES) / sizeof(struct kv_hit);
	if (!room && req->sqe.nr >= KV_PAGE_TOKENS)
		return -ENOSPC;
	memset(op, 0, sizeof(*op));
	op->s = req->conn->session;
	op->a = kvd_op_attach(req);
	op->tokens = (const u32 *)(req->args + sizeof(arg));
	op->nr_tokens = req->sqe.nr;
	op->max_pages = arg.max_pages;
	op->hits = (struct kv_hit *)req->rets;
	op->hits_max = room;
	r = kvd_lookup_start(op);
	return r ? r : KVD_REQUEST_AGAIN;
}

int kvd_op_lookup_again(struct kvd_request *req)
{
	struct kvd_lookup_op *op = &req->lookup;
	int r;

	r = lookup_fetch(req);
	if (r)
		return r;
	r = kvd_lookup_step(op);
	if (r == -EAGAIN)
		return KVD_REQUEST_AGAIN;
	req->ret_a = op->nr_coming;
	req->ret_nr = r ? 0 : op->nr;
	req->ret_bytes = r ? 0 : op->nr * (u32)sizeof(struct kv_hit);
	return r;
}

/* ----------------------------------------------------------------------- prefetch */

/* Rounds of restores that brought the run no further before a PREFETCH gives up: there is
 * no room, or the disk is of no use. */
#define PREFETCH_ROUNDS 3u
#define UNPIN_CHUNK	64u

/* args: kv_lookup_arg, tokens[nr] */
int kvd_op_prefetch(struct kvd_request *req)
{
	struct kvd_lookup_op *op = &req->lookup;
	struct kvd *kvd = req->conn->kvd;
	struct kv_lookup_arg arg;
	u32 i;
	int r;

	memcpy(&arg, req->args, sizeof(arg));
	for (i = 0; i < KV_ARRAY_SIZE(arg.reserved); i++)
		if (arg.reserved[i])
			return -EINVAL;
	if (!kvd->tiering.tiers && !kvd->tiering.filling.wanted)
		return -EOPNOTSUPP;
	memset(op, 0, sizeof(*op));
	op->s = req->conn->session;
	op->a = kvd_op_attach(req);
	op->tokens = (const u32 *)(req->args + sizeof(arg));
	op->nr_tokens = req->sqe.nr;
	op->max_pages = arg.max_pages;
	op->hits = (struct kv_hit *)req->rets;
	op->hits_max = KVD_REQUEST_RET_BYTES / sizeof(struct kv_hit);
	req->wait_serial = 0;
	req->rounds = 0;
	req->give_up_ns = kvd->now_ns + KVD_PARK_NS;
	r = kvd_lookup_start(op);
	return r ? r : KVD_REQUEST_AGAIN;
}

/* Pages were held while the ones behind them came; the caller was promised none of them. */
static void prefetch_unpin(struct kvd_request *req)
{
	struct kvd_lookup_op *op = &req->lookup;
	struct kv_page_ref refs[UNPIN_CHUNK];
	u32 done, first;

	for (u32 at = 0; at < op->nr && !KV_MUTANT(prefetch_keeps_pins);
	     at += UNPIN_CHUNK) {
		u32 nr = KV_MIN(op->nr - at, UNPIN_CHUNK);

		for (u32 i = 0; i < nr; i++)
			refs[i] = (struct kv_page_ref){
				.pfn = op->hits[at + i].grant.pfn,
				.tag = op->hits[at + i].grant.tag,
			};
		/* A page that was revoked meanwhile is no reference any more: STALE. */
		kvd_lease_free(op->s, op->a, refs, nr, &done, &first);
	}
}

/* As many as may be parked, and no more: requests are a bounded good. */
static bool may_wait(const struct kvd_request *req)
{
	return req->conn->nr_parked < KVD_PARKED_EACH &&
	       req->conn->kvd->requests.nr_parked < KVD_PARKED_MAX;
}

static int prefetch_done(struct kvd_request *req, int result)
{
	prefetch_unpin(req);
	req->ret_nr = req->lookup.nr;
	req->ret_a = req->lookup.nr_coming;
	return result;
}

int kvd_op_prefetch_again(struct kvd_request *req)
{
	struct kvd_lookup_op *op = &req->lookup;
	struct kvd *kvd = req->conn->kvd;
	bool late = kvd->now_ns >= req->give_up_ns;
	u32 had = op->nr;
	int r;

	if (req->wait_serial) {
		if (late)
			return prefetch_done(req, KV_PENDING);
		if (kvd_tier_oldest(kvd->tiering.tiers, op->a->pool) <= req->wait_serial)
			return KVD_REQUEST_PARK;
		req->wait_serial = 0;
		kvd_lookup_again(op);
		had = op->nr;
	}
	r = kvd_lookup_step(op);
	if (op->nr > had)
		req->rounds = 0;
	if (r == -EAGAIN)
		return KVD_REQUEST_AGAIN;
	if (!op->nr_coming)
		return prefetch_done(req, r);
	if (late || ++req->rounds > PREFETCH_ROUNDS || !may_wait(req))
		return prefetch_done(req, KV_PENDING);
	req->wait_serial = kvd_tier_serial(kvd->tiering.tiers);
	return KVD_REQUEST_PARK;
}
