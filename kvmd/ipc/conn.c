/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ipc/conn.c - see conn.h: accepting, messages in and out, the end of a connection. (tour
 * 3/12)
 */
#include "kvmd/ipc/conn.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/mutant.h"
#include "kvmd/backend/memfd.h"
#include "kvmd/daemon.h"
#include "kvmd/dbg/fault.h"
#include "kvmd/dbg/log.h"
#include "kvmd/dbg/trace.h"
#include "kvmd/ipc/admin_priv.h"
#include "kvmd/ipc/event.h"
#include "kvmd/own/image.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

#define CONN_MSGS_A_TURN 16
#define UNDISPATCHED_NS	 100000000ull
#define CLOSE_FD(fd_)               \
	do {                        \
		if ((fd_) >= 0)     \
			close(fd_); \
		(fd_) = -1;         \
	} while (0)

int kvd_conn_tenant(const struct kvd_config *config, const struct ucred *cred,
		    const char *claimed_name)
{
	u32 t;

	if (KV_MUTANT(cred_from_message))
		for (t = 0; t < config->nr_tenants; t++)
			if (!strcmp(config->tenants[t].name, claimed_name))
				return (int)t;
	return kvd_config_tenant_of(config, cred->uid, cred->gid);
}

/* ------------------------------------------------------------------ the end */

static void closing_over(struct kvd_conn *conn)
{
	conn->kvd->nr_closing -= conn->closing;
	conn->closing = false;
}

/* Socket, ring and what waits: nothing of the peer is looked at any more. */
static void conn_shut(struct kvd_conn *conn)
{
	struct kvd *kvd = conn->kvd;

	kvd_loop_del(kvd->loop, &conn->watch);
	kvd_loop_del(kvd->loop, &conn->ring_watch);
	kvd_loop_flush(kvd->loop);
	/* A kick that found the counter filled meanwhile would wait for ever. */
	if (conn->cq_event >= 0)
		kvd_loop_drain(conn->cq_event);
	kvd_out_clear(&conn->out);
	conn->added.nr = 0;
	closing_over(conn);
	free(conn->held);
	conn->held = NULL;
	list_del(&conn->awake_node);
	CLOSE_FD(conn->fd);
	CLOSE_FD(conn->sq_event);
	CLOSE_FD(conn->cq_event);
	kvd_ring_destroy(&conn->ring);
}

static void conn_die(struct kvd_conn *conn)
{
	if (conn->dead)
		return;
	conn->dead = true;
	list_del(&conn->node);
	list_add_tail(&conn->kvd->dead, &conn->node);
}

void kvd_conn_event(struct kvd_conn *conn, const char *type)
{
	cJSON *fields;

	if (!conn->kvd->admin.nr_streams)
		return;
	fields = cJSON_CreateObject();
	kvd_admin_u64(fields, "session", conn->client_id);
	cJSON_AddNumberToObject(fields, "pid", conn->cred.pid);
	cJSON_AddNumberToObject(fields, "uid", conn->cred.uid);
	cJSON_AddStringToObject(fields, "name", conn->name);
	if (conn->state == KVD_CONN_CLOSED)
		cJSON_AddStringToObject(fields, "why", conn->end_why);
	kvd_admin_event(conn->kvd, type, fields);
}

void kvd_conn_end(struct kvd_conn *conn, int result, const char *why)
{
	struct kvd *kvd = conn->kvd;
	enum kvd_conn_state was = conn->state;
	struct kv_msg_error msg;

	if (was == KVD_CONN_CLOSED)
		return;
	conn->state = KVD_CONN_CLOSED;
	snprintf(conn->end_why, sizeof(conn->end_why), "%s", why);
	if (result) {
		kvd_stats.protocol_faults++;
		kvd_warn("ipc/conn", "client %llu pid %d uid %u: %s: closed",
			 (unsigned long long)conn->client_id, conn->cred.pid,
			 conn->cred.uid, why);
		memset(&msg, 0, sizeof(msg));
		msg.msg.magic = KV_MSG_MAGIC;
		msg.msg.type = KV_MSG_ERROR;
		msg.msg.size_bytes = sizeof(msg);
		msg.result = result;
		snprintf(msg.error, sizeof(msg.error), "%s", why);
		kvd_out_send(&conn->out, conn->fd, &msg.msg, NULL);
	}
	kvd_serve_cancel(conn, 0);
	conn_shut(conn);
	if (was == KVD_CONN_UNKNOWN) {
		kvd->nr_unknown--;
		conn_die(conn);
		return;
	}
	kvd_stats.sessions_ended++;
	kvd_trace_session_end(conn->client_id, (u64)conn->cred.pid, (u64)-result);
	kvd_conn_event(conn, "session_end");
	/* P8: table_epoch 0 first, then its pins drop. It may be reaped in here. */
	kvd_session_end(conn->session, why);
}

/* A process whose deadline passes while it takes its session up hangs up and comes again:
 * its session was lost to nothing but a slow kvmd. Who has closed it or is gone will not. */
static bool comes_again(const struct kvd_conn *conn)
{
	struct pollfd p = {.fd = conn->pidfd, .events = POLLIN};

	return conn->state == KVD_CONN_OPEN && conn->resuming &&
	       !KV_MUTANT(late_resume_ends) && !kv_load_acquire64(&conn->page->closed) &&
	       poll(&p, 1, 0) != 1;
}

void kvd_conn_hung_up(struct kvd_conn *conn, const char *why)
{
	if (conn->state == KVD_CONN_AWAY)
		return;
	if (!comes_again(conn)) {
		kvd_conn_end(conn, 0, why);
		return;
	}
	kvd_info("ipc/conn", "client %llu pid %d: %s while it took its session up",
		 (unsigned long long)conn->client_id, conn->cred.pid, why);
	kvd_serve_cancel(conn, 0);
	conn_shut(conn);
	conn->state = KVD_CONN_AWAY;
	conn->resumed = conn->resuming = false;
	conn->leases = NULL;
	conn->told = 0;
}

/* notify->session_reaped: the core touches neither session nor page any more. */
static void conn_free(struct kvd_conn *conn)
{
	struct kvd *kvd = conn->kvd;
	struct kvd_keep_key key = {.kind = KVD_KEEP_PAGE, .session = conn->client_id};

	kv_assert(conn->state == KVD_CONN_CLOSED && !conn->session && !conn->nr_requests);
	if (conn->page && conn->kept) {
		key.index = conn->kept_tenant;
		kvd_kept_del(kvd, &key);
		key.kind = KVD_KEEP_PIDFD;
		key.index = 0;
		kvd_kept_del(kvd, &key);
	}
	kvd_loop_del(kvd->loop, &conn->pid_watch);
	CLOSE_FD(conn->pidfd);
	if (conn->page)
		kvd_memfd_destroy(conn->page, KV_SESSION_BYTES, conn->page_fd);
	list_del(&conn->node);
	kvd->nr_conns--;
	free(conn);
}

void kvd_conn_reap_dead(struct kvd *kvd)
{
	struct kvd_conn *conn, *tmp;

	list_for_each_entry_safe (conn, tmp, &kvd->conns, node)
		if (conn->state == KVD_CONN_CLOSED && !conn->session)
			conn_die(conn);
	list_for_each_entry_safe (conn, tmp, &kvd->dead, node)
		conn_free(conn);
}

/* ----------------------------------------------------------------- messages */

int kvd_conn_send(struct kvd_conn *conn, const struct kv_msg *msg, const int *fds)
{
	int r;

	if (conn->state == KVD_CONN_CLOSED || conn->state == KVD_CONN_AWAY)
		return -ENOTCONN;
	r = kvd_out_send(&conn->out, conn->fd, msg, fds);
	if (r == -ENOBUFS) {
		kvd_stats.slow_readers_dropped++;
		kvd_conn_end(conn, -ENOBUFS, "does not read its messages");
		return r;
	}
	if (r) {
		kvd_conn_hung_up(conn, "hang-up while sending");
		return r;
	}
	kvd_conn_watch(conn);
	return 0;
}

void kvd_conn_watch(struct kvd_conn *conn)
{
	struct kvd *kvd = conn->kvd;
	/* While a message is held nothing is read: unread input must not wake the loop. */
	u32 events = conn->held ? 0 : KVD_LOOP_IN;

	if (conn->out.nr && (!conn->out.refs || KV_MUTANT(refs_polled)))
		events |= KVD_LOOP_OUT;
	else if (conn->out.nr && !kvd->refs_ns)
		kvd->refs_ns = kvd->now_ns + KVD_REFS_NS;
	kvd_loop_modify(kvd->loop, &conn->watch, events);
}

static void conn_writable(struct kvd_conn *conn)
{
	int r = kvd_out_flush(&conn->out, conn->fd);

	if (r < 0) {
		kvd_conn_hung_up(conn, "hang-up while sending");
		return;
	}
	kvd_conn_watch(conn);
	if (r == 0) {
		if (conn->leases) {
			kvd_conn_leases(conn);
			if (!conn->leases)
				kvd_conn_unhold(conn);
		}
		kvd_serve_publish(conn);
	}
}

void kvd_conn_refs_turn(struct kvd *kvd)
{
	struct kvd_conn *conn, *tmp;

	if (!kvd->refs_ns || kvd->now_ns < kvd->refs_ns)
		return;
	kvd->refs_ns = 0;
	list_for_each_entry_safe (conn, tmp, &kvd->conns, node)
		if (conn->out.refs)
			conn_writable(conn);
}

static int conn_message(struct kvd_conn *conn, const struct kv_msg *msg, u32 bytes,
			const char **ret_why)
{
	if (conn->state == KVD_CONN_UNKNOWN) {
		if (msg->type != KV_MSG_HELLO) {
			*ret_why = "first message is not HELLO";
			return -EPROTO;
		}
		if (bytes != sizeof(struct kv_msg_hello)) {
			*ret_why = "HELLO has another size";
			return -EPROTO;
		}
		kvd_hello(conn, (const struct kv_msg_hello *)msg);
		return 0;
	}
	if (msg->type == KV_MSG_HELLO) {
		*ret_why = "second HELLO";
		return -EPROTO;
	}
	return kvd_pool_message(conn, msg, bytes, ret_why);
}

static void conn_readable(struct kvd_conn *conn)
{
	const char *why = "";
	int i, r;

	for (i = 0; i < CONN_MSGS_A_TURN && conn->fd >= 0 && !conn->held; i++) {
		r = kvd_msg_receive(conn->fd, conn->kvd->msg_buf, KV_MSG_BYTES_MAX, &why);
		if (r == -EAGAIN)
			return;
		if (r > 0)
			r = conn_message(conn, (const struct kv_msg *)conn->kvd->msg_buf,
					 (u32)r, &why);
		else if (r != -EPROTO)
			return kvd_conn_hung_up(conn, "hang-up");
		if (r == -EPROTO)
			return kvd_conn_end(conn, r, why);
	}
}

int kvd_conn_hold(struct kvd_conn *conn, const struct kv_msg *msg, u32 bytes)
{
	conn->held = malloc(bytes);
	if (!conn->held)
		return -ENOMEM;
	memcpy(conn->held, msg, bytes);
	conn->held_bytes = bytes;
	kvd_conn_watch(conn);
	return 0;
}

void kvd_conn_unhold(struct kvd_conn *conn)
{
	struct kv_msg *msg = conn->held;
	const char *why = "";

	if (!msg)
		return;
	conn->held = NULL;
	closing_over(conn);
	kvd_conn_watch(conn);
	if (kvd_pool_message(conn, msg, conn->held_bytes, &why))
		kvd_conn_end(conn, -EPROTO, why);
	free(msg);
}

void kvd_conn_closing_turn(struct kvd *kvd)
{
	struct kvd_conn *conn, *tmp;

	list_for_each_entry_safe (conn, tmp, &kvd->conns, node) {
		if (kvd->nr_closing && conn->closing)
			kvd_conn_unhold(conn);
	}
}

static void conn_ready(void *arg, u32 events)
{
	struct kvd_conn *conn = arg;

	if (conn->held && (events & KVD_LOOP_HUP))
		return kvd_conn_hung_up(conn, "hang-up");
	if (events & KVD_LOOP_OUT)
		conn_writable(conn);
	/* Messages sent before a hang-up are still read; then recvmsg says 0. */
	if (conn->fd >= 0 && (events & (KVD_LOOP_IN | KVD_LOOP_HUP)))
		conn_readable(conn);
}

/* The process is gone; whether its work is, proof.c finds out. */
static void conn_pid_ready(void *arg, u32 events)
{
	struct kvd_conn *conn = arg;

	kvd_loop_del(conn->kvd->loop, &conn->pid_watch);
	if (KV_MUTANT(socket_is_life)) /* a child may have it for hours */
		return;
	kvd_conn_end(conn, 0, "process ended");
	kvd_proof_exited(conn);
}

/* ---------------------------------------------------------------- beginning */

static int conn_identify(struct kvd_conn *conn)
{
	socklen_t len = sizeof(conn->cred);
	int pidfd;

	if (getsockopt(conn->fd, SOL_SOCKET, SO_PEERCRED, &conn->cred, &len))
		return -errno;
	len = sizeof(pidfd);
	if (kvd_fault(KVD_FAULT_pidfd))
		return -EMFILE;
	if (!getsockopt(conn->fd, SOL_SOCKET, SO_PEERPIDFD, &pidfd, &len)) {
		conn->pidfd = pidfd;
		return 0;
	}
	if (errno == EMFILE || errno == ENFILE)
		return -EMFILE;
	/* Of a peer that is gone the pid may be anybody's: only where the kernel does not know
	 * the question, before Linux 6.5, it is asked instead, and status says so. */
	if (errno != ENOPROTOOPT && !KV_MUTANT(gone_peer_by_pid))
		return -errno;
	pidfd = (int)syscall(SYS_pidfd_open, conn->cred.pid, 0);
	if (pidfd < 0)
		return -errno;
	conn->pidfd = pidfd;
	conn->pidfd_raced = true;
	return 0;
}

static struct kvd_conn *conn_new(struct kvd *kvd, int fd)
{
	struct kvd_conn *conn = calloc(1, sizeof(*conn));

	if (!conn)
		return NULL;
	conn->kvd = kvd;
	conn->fd = fd;
	conn->pidfd = conn->sq_event = conn->cq_event = conn->page_fd = conn->ring.fd =
		-1;
	conn->opened_ns = kvd->now_ns;
	list_init(&conn->awake_node);
	kvd_out_init(&conn->out);
	conn->watch.fd = fd;
	conn->watch.events = KVD_LOOP_IN;
	conn->watch.ready = conn_ready;
	conn->watch.arg = conn;
	list_add_tail(&kvd->conns, &conn->node);
	kvd->nr_conns++;
	kvd->nr_unknown++;
	return conn;
}

struct kvd_conn *kvd_conn_away(struct kvd *kvd, u64 client_id, int page_fd, int pidfd)
{
	struct kvd_conn *conn = conn_new(kvd, -1);
	void *page;

	if (!conn)
		return NULL;
	page = mmap(NULL, KV_SESSION_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, page_fd,
		    0);
	kvd->nr_unknown--;
	conn->state = KVD_CONN_AWAY;
	conn->client_id = client_id;
	if (page == MAP_FAILED) {
		kvd_conn_away_drop(conn);
		return NULL;
	}
	madvise(page, KV_SESSION_BYTES, MADV_DONTFORK);
	madvise(page, KV_SESSION_BYTES, MADV_DONTDUMP);
	conn->page = page;
	conn->page_fd = page_fd;
	conn->pidfd = pidfd;
	return conn;
}

void kvd_conn_away_drop(struct kvd_conn *conn)
{
	if (conn->page)
		munmap(conn->page, KV_SESSION_BYTES);
	list_del(&conn->node);
	conn->kvd->nr_conns--;
	free(conn);
}

void kvd_conn_away_ready(struct kvd_conn *conn)
{
	const struct kvd_image_session *is = conn->session->image;

	conn->kept = true;
	conn->kept_tenant = conn->session->tenant->index;
	if (is) {
		conn->cred.pid = is->pid;
		conn->cred.uid = is->uid;
		conn->role = is->role;
		memcpy(conn->cookie, is->cookie, sizeof(conn->cookie));
		memcpy(conn->name, conn->session->name, sizeof(conn->name));
	}
	kvd_proof_adopt(conn);
	if (conn->session->state == KVD_SESSION_ENDED)
		conn->state = KVD_CONN_CLOSED;
	conn->pid_watch.fd = conn->pidfd;
	conn->pid_watch.events = KVD_LOOP_IN;
	conn->pid_watch.ready = conn_pid_ready;
	conn->pid_watch.arg = conn;
	if (kvd_loop_add(conn->kvd->loop, &conn->pid_watch))
		kvd_err("ipc/conn", "client %llu: its end will not be seen",
			(unsigned long long)conn->client_id);
}

void kvd_conn_accepted(struct kvd *kvd, int fd)
{
	struct kvd_conn *conn = NULL;
	int r;

	if (kvd->nr_unknown < KVD_CONNS_UNKNOWN_MAX)
		conn = conn_new(kvd, fd);
	if (!conn) {
		kvd_stats.connections_refused++;
		kvd_warn("ipc/conn",
			 "too many connections (%u, %u without HELLO): refused",
			 kvd->nr_conns, kvd->nr_unknown);
		close(fd);
		return;
	}
	r = conn_identify(conn);
	if (r == -EMFILE)
		kvd_stats.fd_shortages++;
	if (!r && kvd_conn_too_many(conn, false))
		r = -EUSERS;
	if (!r)
		r = kvd_loop_add(kvd->loop, &conn->watch);
	if (!r) {
		conn->pid_watch.fd = conn->pidfd;
		conn->pid_watch.events = KVD_LOOP_IN;
		conn->pid_watch.ready = conn_pid_ready;
		conn->pid_watch.arg = conn;
		r = kvd_loop_add(kvd->loop, &conn->pid_watch);
	}
	if (r) {
		kvd_stats.connections_refused++;
		kvd_warn("ipc/conn", "pid %d uid %u: %s: refused", conn->cred.pid,
			 conn->cred.uid, strerror(-r));
		kvd_conn_end(conn, 0, "could not be set up");
	}
}

void kvd_conn_awake(struct kvd_conn *conn)
{
	if (conn->state != KVD_CONN_OPEN || !list_empty(&conn->awake_node))
		return;
	kvd_ring_wake(&conn->ring);
	list_add_tail(&conn->kvd->awake, &conn->awake_node);
}

static void conn_check_dispatch(struct kvd_conn *conn)
{
	struct kvd *kvd = conn->kvd;
	int unread = 0;

	if (ioctl(conn->fd, SIOCOUTQ, &unread) || (!unread && !conn->out.nr)) {
		conn->undispatched_ns = 0;
		return;
	}
	if (!conn->undispatched_ns) {
		conn->undispatched_ns = kvd->now_ns;
	} else if (kvd->now_ns - conn->undispatched_ns > UNDISPATCHED_NS) {
		kvd_warn("ipc/conn", "client %llu pid %d (%s): events unread for %llu ms",
			 (unsigned long long)conn->client_id, conn->cred.pid, conn->name,
			 (unsigned long long)((kvd->now_ns - conn->undispatched_ns) /
					      1000000));
		if (kvd->config.on_stall == KVD_STALL_KILL &&
		    kvd->now_ns - conn->undispatched_ns >
			    kvd->config.stall_ms * 1000000ull)
			syscall(SYS_pidfd_send_signal, conn->pidfd, SIGKILL, NULL, 0);
	}
}

void kvd_conn_look_slots(struct kvd_conn *conn)
{
	u64 epoch;
	u32 i;

	for (i = 0; conn->page && i < KV_ANNOUNCE_SLOTS; i++) {
		epoch = kv_load_relaxed64(&conn->page->slots[i].word);
		if (epoch == conn->slots[i].epoch)
			continue;
		conn->slots[i].epoch = epoch;
		conn->slots[i].since_ns = conn->kvd->now_ns;
	}
}

void kvd_conn_tick(struct kvd *kvd)
{
	struct kvd_conn *conn, *tmp;

	list_for_each_entry_safe (conn, tmp, &kvd->conns, node) {
		if (conn->state == KVD_CONN_UNKNOWN &&
		    kvd->now_ns - conn->opened_ns > KVD_HELLO_NS)
			kvd_conn_end(conn, -ETIMEDOUT, "no HELLO");
		else if (conn->state == KVD_CONN_OPEN)
			conn_check_dispatch(conn);
		else if (conn->state == KVD_CONN_AWAY &&
			 kv_load_acquire64(&conn->page->closed))
			kvd_conn_end(conn, 0, "closed while kvmd was away");
		kvd_conn_look_slots(conn);
	}
}
