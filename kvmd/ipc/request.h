/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ipc/request.h - a ring entry being worked on.
 *
 * All requests are made at start, with private buffers for the largest arguments and
 * results; memory that was never needed is never touched. Most requests live for one
 * call. A LOOKUP or SEAL that hashes more than a turn may goes on the hash queue; an
 * ALLOC with KV_GFP_WAIT that found its pages in quarantine is parked, for a bounded
 * time.
 */
#ifndef KVD_IPC_REQUEST_H
#define KVD_IPC_REQUEST_H

#include "base/list.h"
#include "kv/abi.h"
#include "kvmd/own/prefix.h"

struct kvd;
struct kvd_conn;
struct kvd_op;

#define KVD_REQUESTS	      128u
#define KVD_PARKED_MAX	      64u /* all sessions */
#define KVD_HASHING_EACH      32u /* one tenant */
#define KVD_PARKED_EACH	      8u  /* one session */
#define KVD_PARK_NS	      1000000000ull
#define KVD_REQUEST_AGAIN     0x40000001 /* answers of handlers; no outcome, no errno */
#define KVD_REQUEST_PARK      0x40000002

#define KVD_REQUEST_ARG_BYTES KV_ARG_BYTES
#define KVD_REQUEST_RET_BYTES (KV_BATCH_MAX * sizeof(struct kv_seal_ret))

/**
 * struct kvd_request - one entry
 * @node: in free, hashing or parked of struct kvd_requests
 * @conn: whose; NULL = free
 * @sqe: private copy
 * @op: its row
 * @args: sqe.arg_bytes of private copy
 * @rets: results; @ret_bytes of them go to the client when the result is 0
 * @ret_nr, @ret_a: for the completion
 * @started_ns, @deadline_ns: time; deadline of a parked one
 * @wait_serial, @give_up_ns, @rounds: PREFETCH: restores waited for (0: none), how long, and
 *	how often without progress
 * @seal, @lookup: progress
 */
struct kvd_request {
	struct list_node node;
	struct kvd_conn *conn;
	struct kv_sqe sqe;
	const struct kvd_op *op;
	u8 *args;
	u8 *rets;
	u32 ret_bytes;
	u32 ret_nr;
	u64 ret_a;
	u64 started_ns;
	u64 deadline_ns;
	u64 wait_serial;
	u64 give_up_ns;
	u32 rounds;
	union {
		struct kvd_seal_op seal;
		struct kvd_lookup_op lookup;
	};
};

/**
 * struct kvd_requests - all of them
 * @free, @hashing, @parked: struct kvd_request.node
 * @nr_parked: length of @parked
 * @nr_hashing: requests on @hashing, by tenant
 * @all: [KVD_REQUESTS]; owned
 * @arena, @arena_bytes: buffers; owned
 */
struct kvd_requests {
	struct list_node free;
	struct list_node hashing;
	struct list_node parked;
	u32 nr_parked;
	u16 nr_hashing[KVD_TENANTS_MAX];
	struct kvd_request *all;
	u8 *arena;
	size_t arena_bytes;
};

/** kvd_requests_init() - Return: 0; -ENOMEM */
int kvd_requests_init(struct kvd_requests *rs);

/** kvd_requests_fini() - free them; none is in use */
void kvd_requests_fini(struct kvd_requests *rs);

/** kvd_serve_awake() - take entries of every ring that is awake, fairly and bounded.
 * Return: entries taken */
u32 kvd_serve_awake(struct kvd *kvd);

/** kvd_serve_hashing() - one slice of hashing for the request whose turn it is. Return:
 * requests that wait for more */
u32 kvd_serve_hashing(struct kvd *kvd);

/** kvd_serve_parked() - try parked allocations again, give up those whose time is over */
void kvd_serve_parked(struct kvd *kvd);

/**
 * kvd_serve_cancel() - drop a connection's requests
 * @pool_id: only those of this pool, which is being closed: they complete with
 *	-ECANCELED; 0: all, silently: the session has ended
 */
void kvd_serve_cancel(struct kvd_conn *conn, u32 pool_id);

/** kvd_serve_publish() - show a connection's completions, unless messages must go first
 */
void kvd_serve_publish(struct kvd_conn *conn);

/** kvd_serve_sleep() - ask sleepers to kick. Return: true when nothing came in meanwhile
 */
bool kvd_serve_sleep(struct kvd *kvd);

#endif
