/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ipc/op_page.c - ALLOC, FREE, PIN, UNPIN, FORK.
 *
 * KV_GFP_WAIT: an answer KV_PENDING means that the pages are there but in quarantine.
 * Such a request is parked and tried again when pages become free, for at most
 * KVD_PARK_NS; the number of parked requests is bounded, beyond it the caller gets
 * KV_PENDING as without WAIT.
 */
#include <stdlib.h>

#include "base/mutant.h"
#include "kvmd/daemon.h"
#include "kvmd/dbg/fault.h"
#include "kvmd/ipc/conn.h"
#include "kvmd/ipc/ops.h"

struct kvd_attach *kvd_op_attach(const struct kvd_request *req)
{
	struct kvd_attach *a = kvd_session_attach(req->conn->session, req->sqe.pool_id);

	kv_assert(a);
	return a;
}

static bool may_park(const struct kvd_request *req)
{
	return (req->sqe.gfp & KV_GFP_WAIT) && req->conn->nr_parked < KVD_PARKED_EACH &&
	       req->conn->kvd->requests.nr_parked < KVD_PARKED_MAX;
}

/* A mutant: what the allocator of tests/fake/noalloc.c must notice. */
static void request_allocates(void)
{
	void *volatile p = malloc(64);

	free(p);
}

static int alloc_try(struct kvd_request *req)
{
	struct kvd_session *s = req->conn->session;
	struct kvd_attach *a = kvd_op_attach(req);
	const struct kv_sqe *sqe = &req->sqe;
	u32 pending = 0;
	int r;

	req->ret_bytes = 0;
	if (KV_MUTANT(request_allocates))
		request_allocates();
	if (kvd_fault(sqe->flags & KV_SQE_MAGAZINE ? KVD_FAULT_magazine_refill
						   : KVD_FAULT_page_alloc))
		return KV_FULL;
	if (sqe->flags & KV_SQE_MAGAZINE) {
		r = kvd_lease_stock(s, a, sqe->magazine, sqe->nr, sqe->gfp, &req->ret_nr,
				    &pending);
	} else {
		r = kvd_lease_alloc(s, a, sqe->nr, sqe->gfp, (struct kv_grant *)req->rets,
				    &pending);
		req->ret_nr = r ? 0 : sqe->nr;
		req->ret_bytes = r ? 0 : sqe->nr * (u32)sizeof(struct kv_grant);
	}
	if (r == KV_PENDING)
		req->ret_nr = pending;
	return r;
}

int kvd_op_alloc(struct kvd_request *req)
{
	int r = alloc_try(req);

	return r == KV_PENDING && may_park(req) ? KVD_REQUEST_PARK : r;
}

int kvd_op_alloc_again(struct kvd_request *req)
{
	int r = alloc_try(req);

	return r == KV_PENDING ? KVD_REQUEST_PARK : r;
}

int kvd_op_free(struct kvd_request *req)
{
	u32 first = 0;
	int r;

	r = kvd_lease_free(req->conn->session, kvd_op_attach(req),
			   (const struct kv_page_ref *)req->args, req->sqe.nr,
			   &req->ret_nr, &first);
	req->ret_a = r == KV_STALE ? first : 0;
	return r;
}

int kvd_op_pin(struct kvd_request *req)
{
	int r = kvd_lease_pin(req->conn->session, kvd_op_attach(req),
			      (const struct kv_page_ref *)req->args, req->sqe.nr);

	req->ret_nr = r ? 0 : req->sqe.nr;
	return r;
}

static int fork_try(struct kvd_request *req)
{
	u32 pending = 0;
	int r;

	r = kvd_fork(req->conn->session, kvd_op_attach(req),
		     (const struct kv_page_ref *)req->args, req->sqe.nr, req->sqe.gfp,
		     (struct kv_grant *)req->rets, &pending);
	req->ret_nr = r == KV_PENDING ? pending : r ? 0 : req->sqe.nr;
	req->ret_bytes = r ? 0 : req->sqe.nr * (u32)sizeof(struct kv_grant);
	return r;
}

int kvd_op_fork(struct kvd_request *req)
{
	int r = fork_try(req);

	return r == KV_PENDING && may_park(req) ? KVD_REQUEST_PARK : r;
}

int kvd_op_fork_again(struct kvd_request *req)
{
	int r = fork_try(req);

	return r == KV_PENDING ? KVD_REQUEST_PARK : r;
}
