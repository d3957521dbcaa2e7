/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ipc/hello.c - HELLO and POOL_OPEN: what a peer must say, what it gets.
 *
 * Refusals are replies that name field and value; the connection stays open after a
 * refused POOL_OPEN and closes after a refused HELLO. Nothing is exported before the
 * peer's pidfd is held and its tenant is known.
 */
#include <ctype.h>
#include <errno.h>
#include <sodium.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>

#include "base/assert.h"
#include "base/mutant.h"
#include "kvmd/backend/memfd.h"
#include "kvmd/daemon.h"
#include "kvmd/dbg/fault.h"
#include "kvmd/dbg/log.h"
#include "kvmd/dbg/trace.h"
#include "kvmd/ipc/conn.h"
#include "kvmd/ipc/event.h"
#include "kvmd/own/image.h"

/* -------------------------------------------------------------------- HELLO */

static int name_check(const char *name, char *error)
{
	size_t i, n = strnlen(name, KV_NAME_BYTES);

	if (n == 0 || n == KV_NAME_BYTES) {
		snprintf(error, 128, "client_name: %s",
			 n ? "no NUL in 64 bytes" : "\"\": must not be empty");
		return -EINVAL;
	}
	for (i = 0; i < n; i++) {
		if (isprint((unsigned char)name[i]))
			continue;
		snprintf(error, 128,
			 "client_name: byte %zu is 0x%02x: printable ASCII only", i,
			 (unsigned char)name[i]);
		return -EINVAL;
	}
	return 0;
}

int kvd_hello_check(const struct kv_msg_hello *hello, char *error)
{
	if (hello->abi_min > hello->abi_max) {
		snprintf(error, 128, "abi_min=%u is above abi_max=%u", hello->abi_min,
			 hello->abi_max);
		return -EINVAL;
	}
	if (hello->abi_min > KV_ABI_VERSION || hello->abi_max < KV_ABI_VERSION_MIN) {
		snprintf(error, 128, "abi_min=%u, abi_max=%u: this kvmd speaks %u to %u",
			 hello->abi_min, hello->abi_max, KV_ABI_VERSION_MIN,
			 KV_ABI_VERSION);
		return -EPROTONOSUPPORT;
	}
	if (hello->role > KV_ROLE_MONITOR) {
		snprintf(error, 128, "role=%u: unknown", hello->role);
		return -EINVAL;
	}
	if (hello->ring_depth &&
	    (!kv_is_pow2(hello->ring_depth) || hello->ring_depth > KV_RING_DEPTH_MAX)) {
		snprintf(error, 128,
			 "ring_depth=%u: must be 0 or a power of two up to %u",
			 hello->ring_depth, KV_RING_DEPTH_MAX);
		return -EINVAL;
	}
	return name_check(hello->client_name, error);
}

static void hello_reply_init(struct kv_msg_hello_reply *reply, u32 sequence)
{
	memset(reply, 0, sizeof(*reply));
	reply->msg.magic = KV_MSG_MAGIC;
	reply->msg.type = KV_MSG_HELLO_REPLY;
	reply->msg.size_bytes = sizeof(*reply);
	reply->msg.sequence = sequence;
}

/* What the kernel gives a session; on failure conn_end() gives back what was got. */
static int ring_resources(struct kvd_conn *conn, u32 depth)
{
	if (kvd_fault(KVD_FAULT_session_alloc))
		return -ENOMEM;
	conn->sq_event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (conn->sq_event < 0)
		return -errno;
	conn->cq_event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (conn->cq_event < 0)
		return -errno;
	return kvd_ring_create(&conn->ring, conn->client_id, conn->kvd->table_epoch,
			       depth ? depth : KV_RING_DEPTH, randombytes_random());
}

/* Page and pidfd are in the keeper before anybody is given the page. */
static int page_create(struct kvd_conn *conn, const struct kvd_tenant *tenant)
{
	struct kvd_keep_key key = {.kind = KVD_KEEP_PAGE,
				   .session = conn->client_id,
				   .index = tenant->index};
	void *page;
	int r;

	r = kvd_memfd_create("kvmd-session", KV_SESSION_BYTES, KVD_MEMFD_SIZE, &page,
			     &conn->page_fd);
	if (r)
		return r;
	conn->page = page;
	conn->kept = true;
	conn->kept_tenant = tenant->index;
	r = kvd_kept_put(conn->kvd, &key, conn->page_fd);
	if (r)
		return r;
	key.kind = KVD_KEEP_PIDFD;
	key.index = 0;
	return kvd_kept_put(conn->kvd, &key, conn->pidfd);
}

static void ring_kicked(void *arg, u32 events)
{
	struct kvd_conn *conn = arg;

	kvd_stats.ring_kicks++;
	kvd_loop_drain(conn->sq_event);
	kvd_conn_awake(conn);
}

static int session_open(struct kvd_conn *conn, const struct kv_msg_hello *hello)
{
	struct kvd *kvd = conn->kvd;
	struct kvd_tenant *tenant;
	struct kvd_session_params params;
	int r;

	conn->client_id =
		KV_MUTANT(client_id_is_pid) ? (u64)conn->cred.pid : kvd->next_client_id++;
	if (kvd->kept.image) {
		kvd->kept.image->next_client_id = kvd->next_client_id;
		kvd_crash_point();
	}
	strcpy(conn->name, hello->client_name);
	randombytes_buf(conn->cookie, sizeof(conn->cookie));
	r = ring_resources(conn, hello->ring_depth);
	if (r)
		return r;
	tenant = kvd_tenant_find(&kvd->core, kvd->config.tenants[conn->tenant].name);
	kv_assert(tenant);
	r = page_create(conn, tenant);
	if (r)
		return r;
	params = (struct kvd_session_params){
		.client_id = conn->client_id,
		.tenant = tenant,
		.page = conn->page,
		.owner = conn,
		.pid = conn->cred.pid,
		.name = conn->name,
		.uid = conn->cred.uid,
		.role = conn->role,
		.cookie = conn->cookie,
	};
	return kvd_session_create(&kvd->core, &params, &conn->session);
}

static int session_resume(struct kvd_conn *conn, struct kvd_conn *away,
			  const struct kv_msg_hello *hello)
{
	int r;

	conn->client_id = away->client_id;
	r = ring_resources(conn, hello->ring_depth);
	if (!r)
		kvd_conn_take_up(conn, away);
	return r;
}

bool kvd_conn_too_many(const struct kvd_conn *conn, bool session)
{
	u32 all = conn->kvd->nr_conns, of_uid = 0, unknown = 0;
	bool away_too = session || KV_MUTANT(away_fills);
	const struct kvd_conn *c;

	list_for_each_entry (c, &conn->kvd->conns, node) {
		if (c->state == KVD_CONN_AWAY && !away_too) {
			all--;
			continue;
		}
		/* One whose step is not over (P8) takes its place until it is. */
		if (c->cred.uid != conn->cred.uid ||
		    (c->state == KVD_CONN_CLOSED &&
		     (!c->session || KV_MUTANT(left_behind_is_gone))))
			continue;
		of_uid++;
		unknown += c->state == KVD_CONN_UNKNOWN;
	}
	return all > KVD_CONNS_MAX ||
	       ((of_uid > KVD_CONNS_EACH_MAX || unknown > KVD_CONNS_UNKNOWN_EACH_MAX) &&
		!KV_MUTANT(uid_takes_all));
}

static int session_start(struct kvd_conn *conn, const struct kv_msg_hello *hello)
{
	struct kvd_conn *away = kvd_conn_find_away(conn, hello);
	struct kvd *kvd = conn->kvd;
	int r;

	conn->role = hello->role;
	if (!away && kvd_conn_too_many(conn, true))
		return -EUSERS;
	r = away ? session_resume(conn, away, hello) : session_open(conn, hello);
	if (r)
		return r;
	conn->ring_watch.fd = conn->sq_event;
	conn->ring_watch.events = KVD_LOOP_IN;
	conn->ring_watch.ready = ring_kicked;
	conn->ring_watch.arg = conn;
	r = kvd_loop_add(kvd->loop, &conn->ring_watch);
	conn->state = KVD_CONN_OPEN;
	kvd->nr_unknown--;
	return r;
}

static void hello_refuse(struct kvd_conn *conn, struct kv_msg_hello_reply *reply, int r)
{
	kvd_stats.connections_refused++;
	reply->result = r;
	if (!reply->error[0])
		snprintf(reply->error, sizeof(reply->error), "%s", strerror(-r));
	kvd_info("ipc/hello", "pid %d uid %u refused: %s", conn->cred.pid, conn->cred.uid,
		 reply->error);
	kvd_conn_send(conn, &reply->msg, NULL);
	kvd_conn_hung_up(conn, "HELLO refused");
}

static void hello_accept(struct kvd_conn *conn, struct kv_msg_hello_reply *reply)
{
	struct kvd *kvd = conn->kvd;
	int fds[4] = {conn->ring.fd, conn->sq_event, conn->cq_event, conn->page_fd};

	reply->msg.nr_fds = 4;
	reply->abi = KV_ABI_VERSION;
	reply->client_id = conn->client_id;
	reply->table_epoch = kvd->table_epoch;
	memcpy(reply->cookie, conn->cookie, sizeof(reply->cookie));
	reply->ring_bytes = (u32)conn->ring.map_bytes;
	reply->ring_nonce = conn->ring.nonce;
	conn->unchecked = kvd->config.check == KV_CHECK_OFF;
	reply->flags = kvd->config.check | (kvd->spins ? KV_HELLO_SPIN : 0) |
		       (conn->resumed ? KV_HELLO_RESUMED : 0);
	strcpy(reply->tenant, kvd->config.tenants[conn->tenant].name);
	kvd_stats.sessions_opened++;
	kvd_trace_session_open(conn->client_id, (u64)conn->cred.pid, conn->cred.uid);
	kvd_conn_event(conn, "session_open");
	kvd_conn_send(conn, &reply->msg, fds);
	if (conn->resumed)
		kvd_conn_tell_pools(conn);
}

void kvd_hello(struct kvd_conn *conn, const struct kv_msg_hello *hello)
{
	struct kv_msg_hello_reply reply;
	int r;

	hello_reply_init(&reply, hello->msg.sequence);
	r = kvd_hello_check(hello, reply.error);
	if (r) {
		hello_refuse(conn, &reply, r);
		return;
	}
	r = kvd_conn_tenant(&conn->kvd->config, &conn->cred, hello->client_name);
	if (r < 0) {
		snprintf(reply.error, sizeof(reply.error),
			 "uid %u, gid %u: belongs to no tenant of this host",
			 conn->cred.uid, conn->cred.gid);
		hello_refuse(conn, &reply, r);
		return;
	}
	conn->tenant = (u32)r;
	r = session_start(conn, hello);
	if (r) {
		if (r == -EMFILE || r == -ENFILE)
			kvd_stats.fd_shortages++;
		hello_refuse(conn, &reply, r);
		return;
	}
	hello_accept(conn, &reply);
}

/* -------------------------------------------------------------------- pools */

static void pool_reply_send(struct kvd_conn *conn, struct kv_msg_pool_reply *reply,
			    int table_fd)
{
	reply->msg.magic = KV_MSG_MAGIC;
	reply->msg.type = KV_MSG_POOL_REPLY;
	reply->msg.size_bytes = sizeof(*reply);
	reply->msg.nr_fds = reply->result ? 0 : 1;
	kvd_conn_send(conn, &reply->msg, &table_fd);
}

static bool given_live(const struct kvd_attach *a, u32 i)
{
	return (a->given[i / 64] >> (i % 64) & 1) &&
	       a->pool->extents[i].state == KVD_EXTENT_LIVE;
}

/* Extents of a pool that was just opened, after its reply; in batches of 250. */
static void pool_extents_send(struct kvd_conn *conn, const struct kvd_attach *a)
{
	u32 i;

	for (i = 0; i < a->pool->nr_extents; i++)
		if (given_live(a, i))
			kvd_event_extent_added(conn, a->pool, i);
	kvd_event_flush(conn);
	/* Asked for by an earlier kvmd, whose word may have been lost. */
	for (i = 0; i < a->pool->nr_extents; i++)
		if ((a->given[i / 64] >> (i % 64) & 1) &&
		    a->pool->extents[i].state == KVD_EXTENT_DRAINING)
			kvd_event_notify.extent_removed(conn->kvd, conn->session, a->pool,
							i, a->pool->extents[i].serial);
}

static u32 attach_nr_given(const struct kvd_attach *a)
{
	u32 i, nr = 0;

	for (i = 0; i < a->pool->nr_extents; i++)
		nr += given_live(a, i);
	return nr;
}

/* Where a pool is one extent, it is there before anybody has the pool. Return: 0;
 * KV_PENDING; -ENOMEM */
static int pool_extent(struct kvd_conn *conn, const struct kvd_attach *a, char *error)
{
	int r;

	if (!kvd_backend_one_extent(&conn->kvd->core.mm.limits) ||
	    a->pool->nr_live_extents)
		return 0;
	conn->opening = true;
	r = kvd_extent_grow(a->pool);
	conn->opening = false;
	if (!r || r == KV_PENDING)
		return r;
	snprintf(
		error, 128,
		"no room for the pool's extent of %llu MiB (%s); \"pool\": {\"extent\": ...} "
		"makes them smaller",
		(unsigned long long)(a->pool->geo.extent_bytes >> 20),
		r > 0 ? kv_outcome_str(r) : strerror(-r));
	return r > 0 ? -ENOMEM : r;
}

/* Return: 0 replied; KV_PENDING: ask again when there is memory */
static int pool_open(struct kvd_conn *conn, const struct kv_msg_pool_open *msg,
		     const float *scales)
{
	struct kvd_session *s = conn->session;
	struct kv_msg_pool_reply reply;
	struct kvd_attach *a = NULL;
	struct kvd_refusal why;
	bool fresh;

	memset(&reply, 0, sizeof(reply));
	memset(&why, 0, sizeof(why));
	reply.msg.sequence = msg->msg.sequence;
	reply.result = kvd_memory_check(conn->kvd, msg->gpu_uuid, reply.error);
	if (!reply.result) {
		conn->opening = true;
		reply.result = kvd_session_open_pool(s, &msg->layout, scales, &a, &why);
		conn->opening = false;
	}
	if (!reply.result) {
		reply.result = pool_extent(conn, a, reply.error);
		if (reply.result == KV_PENDING)
			return KV_PENDING;
		if (reply.result && !(conn->told >> (a - s->attach) & 1))
			kvd_session_close_pool(s, a->pool->id);
	}
	if (reply.result) {
		memcpy(reply.field, why.field, sizeof(reply.field));
		if (!reply.error[0])
			snprintf(reply.error, sizeof(reply.error), "%s",
				 why.text[0] ? why.text : strerror(-reply.result));
		kvd_info("ipc/pool", "client %llu: POOL_OPEN refused: %s",
			 (unsigned long long)conn->client_id, reply.error);
		pool_reply_send(conn, &reply, -1);
		return 0;
	}
	reply.pool_id = a->pool->id;
	reply.fingerprint = a->pool->fingerprint;
	reply.table_epoch = conn->kvd->table_epoch;
	reply.table_bytes = a->pool->table_region.size_bytes;
	reply.geometry = a->pool->geo;
	reply.backend = conn->kvd->core.mm.limits.kind;
	kvd_memory_uuid(conn->kvd, reply.gpu_uuid);
	/* Opening a pool again sends no extents twice. */
	fresh = !(conn->told >> (a - s->attach) & 1);
	conn->told |= 1u << (a - s->attach);
	if (fresh && conn->resumed) {
		conn->opening = true;
		kvd_session_give_extents(s, a);
		conn->opening = false;
	}
	reply.nr_extents = fresh ? attach_nr_given(a) : 0;
	pool_reply_send(conn, &reply, a->pool->table_region.fd);
	if (fresh && conn->state == KVD_CONN_OPEN)
		pool_extents_send(conn, a);
	if (conn->resumed && conn->state == KVD_CONN_OPEN) {
		conn->leases = a->pool;
		conn->leases_pfn = 0;
		kvd_conn_leases(conn);
	}
	return 0;
}

static int pool_close(struct kvd_conn *conn, const struct kv_msg_pool_close *msg,
		      const char **ret_why)
{
	struct kvd_attach *a;

	if (msg->reserved) {
		*ret_why = "POOL_CLOSE: reserved not 0";
		return -EPROTO;
	}
	a = kvd_session_attach(conn->session, msg->pool_id);
	if (!a) {
		*ret_why = "POOL_CLOSE: pool is not open";
		return -EPROTO;
	}
	conn->told &= ~(1u << (a - conn->session->attach));
	if (conn->leases == a->pool)
		conn->leases = NULL;
	kvd_serve_cancel(conn, msg->pool_id);
	kvd_out_forget(&conn->out, msg->pool_id);
	if (kvd_session_close_pool(conn->session, msg->pool_id) != -EAGAIN)
		return 0;
	/* The rest in later turns; nothing else of this client is read before. */
	if (kvd_conn_hold(conn, &msg->msg, sizeof(*msg))) {
		*ret_why = "no memory to hold a POOL_CLOSE";
		return -EPROTO;
	}
	conn->closing = true;
	conn->kvd->nr_closing++;
	return 0;
}

int kvd_pool_message(struct kvd_conn *conn, const struct kv_msg *msg, u32 bytes,
		     const char **ret_why)
{
	const struct kv_msg_pool_open *open_msg = (const void *)msg;
	char error[128];
	int r;

	if (msg->type == KV_MSG_POOL_CLOSE) {
		*ret_why = "POOL_CLOSE has another size";
		if (bytes != sizeof(struct kv_msg_pool_close))
			return -EPROTO;
		return pool_close(conn, (const void *)msg, ret_why);
	}
	if (msg->type != KV_MSG_POOL_OPEN) {
		*ret_why = "message type that no client sends";
		return -EPROTO;
	}
	*ret_why = "POOL_OPEN has another size than its nr_scales says";
	if (bytes < sizeof(*open_msg) || open_msg->layout.nr_scales > KV_SCALES_MAX ||
	    bytes != sizeof(*open_msg) + open_msg->layout.nr_scales * sizeof(float))
		return -EPROTO;
	r = kvd_memory_check(conn->kvd, open_msg->gpu_uuid, error);
	/* LEASES of the open before wait for the socket: conn_writable() goes on with it. */
	if ((conn->leases && !KV_MUTANT(leases_cut)) || r == -EAGAIN ||
	    (!r && kvd_proof_wait(conn)) ||
	    pool_open(conn, open_msg, (const float *)(open_msg + 1))) {
		*ret_why = "no memory to hold a POOL_OPEN";
		return kvd_conn_hold(conn, msg, bytes) ? -EPROTO : 0;
	}
	return 0;
}
