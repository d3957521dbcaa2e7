/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ipc/request.c - from ring entry to completion (see request.h).               (tour
 * 3/12)
 *
 * Copy the entry, check the copy, copy the arguments, check room for the results, act,
 * write the results, complete. One session gets at most SERVE_BATCH entries a turn and
 * one hashing request at a time, a tenant's together KVD_HASHING_EACH; all share one hashing
 * slice a turn.
 */
#include "kvmd/ipc/request.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/assert.h"
#include "base/clock.h"
#include "base/mutant.h"
#include "kvmd/daemon.h"
#include "kvmd/dbg/log.h"
#include "kvmd/dbg/trace.h"
#include "kvmd/ipc/conn.h"
#include "kvmd/ipc/event.h"
#include "kvmd/ipc/ops.h"

#define SERVE_BATCH 32u

int kvd_requests_init(struct kvd_requests *rs)
{
	size_t each = KVD_REQUEST_ARG_BYTES + KVD_REQUEST_RET_BYTES;
	u32 i;

	memset(rs, 0, sizeof(*rs));
	list_init(&rs->free);
	list_init(&rs->hashing);
	list_init(&rs->parked);
	rs->all = calloc(KVD_REQUESTS, sizeof(*rs->all));
	if (!rs->all)
		return -ENOMEM;
	rs->arena_bytes = each * KVD_REQUESTS;
	rs->arena = mmap(NULL, rs->arena_bytes, PROT_READ | PROT_WRITE,
			 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (rs->arena == MAP_FAILED) {
		free(rs->all);
		return -ENOMEM;
	}
	for (i = 0; i < KVD_REQUESTS; i++) {
		rs->all[i].args = rs->arena + i * each;
		rs->all[i].rets = rs->all[i].args + KVD_REQUEST_ARG_BYTES;
		list_add_tail(&rs->free, &rs->all[i].node);
	}
	return 0;
}

void kvd_requests_fini(struct kvd_requests *rs)
{
	if (!rs->all)
		return;
	kv_assert(list_empty(&rs->hashing) && list_empty(&rs->parked));
	munmap(rs->arena, rs->arena_bytes);
	free(rs->all);
	rs->all = NULL;
}

/* Last in, first out: its buffers are warm. */
static void request_release(struct kvd *kvd, struct kvd_request *req)
{
	req->conn = NULL;
	list_del(&req->node);
	list_add(&kvd->requests.free, &req->node);
}

static void request_count(struct kvd *kvd, const struct kvd_request *req, int result)
{
	struct kvd_op_stats *stats;

	if (req->sqe.opcode >= KV_OP_NR)
		return;
	stats = &kvd->op_stats[req->sqe.opcode];
	stats->calls++;
	if (result < 0)
		stats->errors++;
	else
		stats->results[KV_MIN(result, KV_OUTCOME_NR - 1)]++;
	kvd_hist_add(&stats->time, kv_now_ns() - req->started_ns);
}

static void request_finish(struct kvd_request *req, int result)
{
	struct kvd_conn *conn = req->conn;
	struct kvd *kvd = conn->kvd;

	if (result == 0 && req->ret_bytes)
		kvd_ring_results(&conn->ring, req->sqe.ret_off, req->rets,
				 req->ret_bytes);
	kvd_ring_complete(&conn->ring, req->sqe.user_data, result, req->ret_nr,
			  req->ret_a);
	kvd_trace_op_done(conn->client_id, req->sqe.opcode, (u64)(s64)result);
	request_count(kvd, req, result);
	request_release(kvd, req);
}

/* Everything a row asks for; then the arguments are copied, once. */
static int request_prepare(struct kvd_request *req)
{
	struct kvd_conn *conn = req->conn;
	const struct kv_sqe *sqe = &req->sqe;
	int r;

	r = kvd_op_check(sqe, conn->role == KV_ROLE_MONITOR, &req->op);
	if (r)
		return r;
	if ((req->op->flags & KVD_OP_POOL) &&
	    !kvd_session_attach(conn->session, sqe->pool_id))
		return -ENOENT;
	if (req->op->ret_fixed + req->op->ret_each && !(sqe->flags & KV_SQE_MAGAZINE)) {
		r = kvd_ring_room(&conn->ring, sqe->ret_off, sqe->ret_bytes, 0);
		if (r)
			return r;
		kvd_ring_expect(&conn->ring, sqe->ret_off, sqe->ret_bytes);
	}
	if (!(req->op->flags & KVD_OP_LATE))
		return kvd_ring_args(&conn->ring, sqe->arg_off, sqe->arg_bytes,
				     req->args);
	/* All of it must lie inside before anything is done with a part. */
	r = kvd_ring_room(&conn->ring, sqe->arg_off, sqe->arg_bytes, 0);
	return r ? r
		 : kvd_ring_args(&conn->ring, sqe->arg_off, req->op->arg_fixed,
				 req->args);
}

/* One tenant's requests on the hash queue. */
static u16 *hashing_of(const struct kvd_conn *conn)
{
	return &conn->kvd->requests.nr_hashing[conn->session->tenant->index];
}

/* Moves a request to where its answer says. */
static void request_dispatch(struct kvd_request *req, int result)
{
	struct kvd_conn *conn = req->conn;
	struct kvd_requests *rs = &conn->kvd->requests;

	if (result == KVD_REQUEST_AGAIN) {
		++*hashing_of(conn);
		conn->nr_requests++;
		list_del(&req->node);
		list_add_tail(&rs->hashing, &req->node);
	} else if (result == KVD_REQUEST_PARK) {
		kvd_stats.requests_parked++;
		conn->nr_requests++;
		conn->nr_parked++;
		rs->nr_parked++;
		req->deadline_ns = conn->kvd->now_ns + KVD_PARK_NS;
		list_del(&req->node);
		list_add_tail(&rs->parked, &req->node);
	} else {
		request_finish(req, result);
	}
}

static void request_run(struct kvd_request *req)
{
	struct kvd_conn *conn = req->conn;
	int r;

	req->ret_bytes = 0;
	req->ret_nr = 0;
	req->ret_a = 0;
	req->started_ns = kv_now_ns();
	kvd_trace_op_start(conn->client_id, req->sqe.opcode, req->sqe.nr);
	r = request_prepare(req);
	if (!r)
		r = req->op->start(req);
	request_dispatch(req, r);
}

static void ring_fault(struct kvd_conn *conn)
{
	kvd_stats.ring_faults++;
	kvd_trace_ring_fault(conn->client_id, conn->ring.fault, conn->ring.fault_value);
	kvd_conn_end(conn, -EPROTO, kvd_ring_fault_str(conn->ring.fault));
}

static bool hashes(u32 opcode)
{
	const struct kvd_op *op = kvd_op_row(opcode);

	return op && (op->flags & KVD_OP_HASH);
}

static u32 serve_conn(struct kvd_conn *conn)
{
	struct kvd *kvd = conn->kvd;
	struct kvd_request *req;
	u64 pages = 0;
	bool full;
	u32 nr;
	int r = 0;

	/* Entries differ in work by a factor of 4,096: the others wait for the pages. */
	for (nr = 0; nr < SERVE_BATCH && pages < KV_BATCH_MAX; nr++) {
		/* A hashing request keeps the session's order: a SEAL before its LOOKUP.
		 */
		if (conn->nr_requests > conn->nr_parked)
			break;
		req = list_first(&kvd->requests.free, struct kvd_request, node);
		if (!req)
			break;
		/* What waits to be hashed holds a request each: some are left to others. */
		full = *hashing_of(conn) >= KVD_HASHING_EACH &&
		       !KV_MUTANT(hashing_unbounded);
		if (full && (!kvd_ring_waiting(&conn->ring) ||
			     hashes(kvd_ring_peek(&conn->ring))))
			break;
		r = kvd_ring_fetch(&conn->ring, &req->sqe);
		if (r <= 0)
			break;
		if (full && hashes(req->sqe.opcode)) {
			conn->ring.fault = KVD_RING_CHANGED;
			r = -EPROTO;
			break;
		}
		req->conn = conn;
		/* In a resume it frees what no answer has brought, nothing else. */
		if (req->sqe.opcode != KV_OP_FREE && !KV_MUTANT(resume_never_over))
			conn->resuming = false;
		pages += KV_MUTANT(turn_by_entries) ? 0 : req->sqe.nr;
		request_run(req);
	}
	conn->nr_ops += nr;
	kvd_stats.ring_entries += nr;
	if (r < 0)
		ring_fault(conn);
	else
		kvd_serve_publish(conn);
	return nr;
}

u32 kvd_serve_awake(struct kvd *kvd)
{
	struct kvd_conn *conn, *tmp;
	struct list_node *first;
	u32 nr = 0;

	list_for_each_entry_safe (conn, tmp, &kvd->awake, awake_node)
		nr += serve_conn(conn);
	/* Round robin: who was first is last in the next turn. */
	first = kvd->awake.next;
	if (first != &kvd->awake) {
		list_del(first);
		list_add_tail(&kvd->awake, first);
	}
	return nr;
}

u32 kvd_serve_hashing(struct kvd *kvd)
{
	struct kvd_requests *rs = &kvd->requests;
	struct kvd_request *req = list_first(&rs->hashing, struct kvd_request, node);
	struct kvd_conn *conn;
	int r;

	if (!req)
		return 0;
	conn = req->conn;
	r = req->op->step(req);
	if (r == KVD_REQUEST_AGAIN) {
		list_del(&req->node);
		list_add_tail(&rs->hashing, &req->node);
	} else if (r == KVD_REQUEST_PARK) {
		--*hashing_of(conn);
		conn->nr_requests--;
		request_dispatch(req, r);
		kvd_conn_awake(conn);
	} else {
		--*hashing_of(conn);
		conn->nr_requests--;
		request_finish(req, r);
		kvd_serve_publish(conn);
		kvd_conn_awake(conn);
	}
	return !list_empty(&rs->hashing);
}

static void unpark(struct kvd_request *req)
{
	req->conn->nr_requests--;
	req->conn->nr_parked--;
	req->conn->kvd->requests.nr_parked--;
}

void kvd_serve_parked(struct kvd *kvd)
{
	struct kvd_request *req, *tmp;
	struct kvd_conn *conn;
	int r;

	list_for_each_entry_safe (req, tmp, &kvd->requests.parked, node) {
		conn = req->conn;
		r = req->op->step(req);
		if (r == KVD_REQUEST_PARK) {
			if (kvd->now_ns < req->deadline_ns)
				continue;
			r = KV_PENDING; /* ret_nr: how many are still on their way */
		}
		unpark(req);
		request_dispatch(req, r);
		kvd_serve_publish(conn);
	}
	kvd->pages_freed = false;
}

static void cancel_list(struct kvd_conn *conn, struct list_node *list, u32 pool_id,
			bool parked)
{
	struct kvd_request *req, *tmp;

	list_for_each_entry_safe (req, tmp, list, node) {
		if (req->conn != conn || (pool_id && req->sqe.pool_id != pool_id))
			continue;
		if (parked) {
			unpark(req);
		} else {
			--*hashing_of(conn);
			conn->nr_requests--;
		}
		if (pool_id)
			request_finish(req, -ECANCELED);
		else
			request_release(conn->kvd, req);
	}
}

void kvd_serve_cancel(struct kvd_conn *conn, u32 pool_id)
{
	struct kvd_requests *rs = &conn->kvd->requests;

	cancel_list(conn, &rs->hashing, pool_id, false);
	cancel_list(conn, &rs->parked, pool_id, true);
	if (pool_id)
		kvd_serve_publish(conn);
}

void kvd_serve_publish(struct kvd_conn *conn)
{
	if (conn->state != KVD_CONN_OPEN)
		return;
	/* An extent's fd goes before the completion that hands out its pages. */
	if (kvd_event_flush(conn) || conn->out.nr)
		return;
	if (kvd_ring_publish(&conn->ring))
		kvd_loop_kick(conn->kvd->loop, conn->cq_event);
}

bool kvd_serve_sleep(struct kvd *kvd)
{
	struct kvd_conn *conn, *tmp;
	bool quiet = true;

	list_for_each_entry (conn, &kvd->awake, awake_node)
		kvd_ring_sleep(&conn->ring);
	/* Pairs with the client's: store sq_tail, full barrier, read sq_need_wakeup. */
	kv_full_barrier();
	list_for_each_entry_safe (conn, tmp, &kvd->awake, awake_node) {
		if (kvd_ring_waiting(&conn->ring) && !kvd_ring_choked(&conn->ring)) {
			kvd_ring_wake(&conn->ring);
			quiet = false;
		} else if (!kvd_ring_waiting(&conn->ring)) {
			list_del(&conn->awake_node);
		}
	}
	return quiet;
}
