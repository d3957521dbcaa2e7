/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ipc/event.c - see event.h.
 *
 * The core calls these hooks inside its own calls, so nothing here calls back into it. A
 * peer that must be dropped (it does not read) is only marked: its socket is shut down
 * and the hang-up that follows ends it in the next turn.
 */
#include "kvmd/ipc/event.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/assert.h"
#include "kvmd/daemon.h"
#include "kvmd/dbg/log.h"
#include "kvmd/dbg/trace.h"

static int event_send(struct kvd_conn *conn, const struct kv_msg *msg, const int *fds)
{
	int r;

	if (conn->state != KVD_CONN_OPEN)
		return -ENOTCONN;
	r = kvd_out_send(&conn->out, conn->fd, msg, fds);
	if (r) {
		if (r == -ENOBUFS) {
			kvd_stats.slow_readers_dropped++;
			kvd_warn("ipc/event",
				 "client %llu pid %d: does not read its events",
				 (unsigned long long)conn->client_id, conn->cred.pid);
		}
		shutdown(conn->fd, SHUT_RDWR);
		return r;
	}
	kvd_conn_watch(conn);
	return 0;
}

static void msg_head(struct kv_msg *msg, u32 type, size_t bytes, u32 nr_fds)
{
	*msg = (struct kv_msg){
		.magic = KV_MSG_MAGIC,
		.type = (u16)type,
		.nr_fds = (u16)nr_fds,
		.size_bytes = (u32)bytes,
	};
}

int kvd_event_flush(struct kvd_conn *conn)
{
	u32 nr = conn->added.nr;
	int r;

	if (!nr)
		return 0;
	msg_head(&conn->added.msg, KV_MSG_EXTENT_ADDED,
		 offsetof(struct kv_msg_extents, extents) +
			 nr * sizeof(struct kv_extent_ref),
		 nr);
	r = event_send(conn, &conn->added.msg, conn->added_fds);
	conn->added.nr = 0;
	return r;
}

void kvd_event_extent_added(struct kvd_conn *conn, struct kvd_pool *pool, u32 index)
{
	struct kv_msg_extents *m = &conn->added;

	if (m->nr && (m->pool_id != pool->id || m->nr == KV_MSG_FDS_MAX))
		kvd_event_flush(conn);
	m->pool_id = pool->id;
	conn->added_fds[m->nr] = pool->extents[index].handle.fd;
	m->extents[m->nr++] = (struct kv_extent_ref){
		.index = index,
		.serial = pool->extents[index].serial,
	};
}

static void notify_extent_added(void *arg, struct kvd_session *s, struct kvd_pool *pool,
				u32 index)
{
	struct kvd_conn *conn = s->owner;

	/* A POOL_OPEN that is held for it tells it itself, after its reply. */
	if (conn->held && conn->session &&
	    !(conn->told >> (kvd_session_attach(s, pool->id) - s->attach) & 1))
		return;
	if (!conn->opening)
		kvd_event_extent_added(conn, pool, index);
}

static void notify_extent_removed(void *arg, struct kvd_session *s, struct kvd_pool *pool,
				  u32 index, u64 serial)
{
	struct kvd_conn *conn = s->owner;
	struct kv_msg_extents m;

	kvd_event_flush(conn);
	memset(&m, 0, sizeof(m));
	msg_head(&m.msg, KV_MSG_EXTENT_REMOVED,
		 offsetof(struct kv_msg_extents, extents) + sizeof(struct kv_extent_ref),
		 0);
	m.pool_id = pool->id;
	m.nr = 1;
	m.extents[0].index = index;
	m.extents[0].serial = serial;
	event_send(conn, &m.msg, NULL);
}

static void notify_revoked(void *arg, struct kvd_session *s, struct kvd_pool *pool,
			   const struct kv_page_ref *pages, u32 nr)
{
	static struct {
		struct kv_msg_revoke head;
		struct kv_page_ref pages[KV_BATCH_MAX];
	} m; /* loop thread only; too large for the stack */
	struct kvd_conn *conn = s->owner;

	kv_assert(nr && nr <= KV_BATCH_MAX);
	kvd_event_flush(conn);
	msg_head(&m.head.msg, KV_MSG_REVOKE, sizeof(m.head) + nr * sizeof(*pages), 0);
	m.head.pool_id = pool->id;
	m.head.nr = nr;
	memcpy(m.pages, pages, nr * sizeof(*pages));
	event_send(conn, &m.head.msg, NULL);
}

static void notify_pressure(void *arg, struct kvd_session *s, struct kvd_pool *pool,
			    u32 level)
{
	struct kvd_conn *conn = s->owner;
	struct kv_msg_pressure m;

	kvd_event_flush(conn);
	memset(&m, 0, sizeof(m));
	msg_head(&m.msg, KV_MSG_PRESSURE, sizeof(m), 0);
	m.pool_id = pool->id;
	m.level = level;
	event_send(conn, &m.msg, NULL);
}

static void notify_pages_freed(void *arg, struct kvd_pool *pool, u32 nr)
{
	struct kvd *kvd = arg;

	kvd->pages_freed = true;
}

static void notify_stalled(void *arg, struct kvd_session *s, u64 stalled_ns)
{
	struct kvd_conn *conn = s->owner;
	struct kvd *kvd = arg;
	bool kill_it = kvd->config.on_stall == KVD_STALL_KILL;
	cJSON *fields;

	kvd_warn("ipc/event",
		 "client %llu pid %d (%s) tenant %s: a step has not retired for %llu ms, "
		 "slots 0x%02x%s",
		 (unsigned long long)s->id, s->pid, s->name, s->tenant->name,
		 (unsigned long long)(stalled_ns / 1000000), s->reader.busy_slots,
		 kill_it ? ": killed (on_stall)" : "");
	kvd_trace_session_stall(s->id, s->reader.busy_slots, stalled_ns);
	/* Killing is safe: the pages wait for the pidfd, not for this signal. */
	if (kill_it)
		syscall(SYS_pidfd_send_signal, conn->pidfd, SIGKILL, NULL, 0);
	fields = cJSON_CreateObject();
	cJSON_AddNumberToObject(fields, "session", (double)s->id);
	cJSON_AddNumberToObject(fields, "stalled_ms", (double)(stalled_ns / 1000000));
	cJSON_AddBoolToObject(fields, "killed", kill_it);
	kvd_admin_event(kvd, "stall", fields);
}

static void notify_session_reaped(void *arg, struct kvd_session *s)
{
	struct kvd_conn *conn = s->owner;

	kvd_trace_session_reaped(s->id, (u64)s->pid, 0);
	conn->session = NULL;
}

const struct kvd_notify kvd_event_notify = {
	.extent_added = notify_extent_added,
	.extent_removed = notify_extent_removed,
	.revoked = notify_revoked,
	.pressure = notify_pressure,
	.pages_freed = notify_pages_freed,
	.stalled = notify_stalled,
	.session_reaped = notify_session_reaped,
};
