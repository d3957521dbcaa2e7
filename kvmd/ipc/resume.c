/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ipc/resume.c - a process takes up its session again: cookie, same process, what kvmd
 * knows of its leases (design 9).
 *
 * A cookie alone opens nothing: the peer must be the very process that had the session.
 * While the process behind a pidfd lives, its pid is nobody else's, and a peer connected
 * after that pidfd was made; so the pids are compared and the pidfd is asked whether its
 * process lives. Anybody else gets a session of its own, and learns nothing.
 */
#include <errno.h>
#include <poll.h>
#include <sodium.h>
#include <string.h>

#include "base/assert.h"
#include "base/mutant.h"
#include "kvmd/daemon.h"
#include "kvmd/dbg/log.h"
#include "kvmd/ipc/conn.h"

#define LEASES_A_MSG 2048u

static bool same_process(const struct kvd_conn *conn, const struct kvd_conn *away)
{
	struct pollfd p = {.fd = away->pidfd, .events = POLLIN};

	if (KV_MUTANT(cookie_any_process))
		return true;
	return conn->cred.pid == away->cred.pid && conn->cred.uid == away->cred.uid &&
	       poll(&p, 1, 0) == 0;
}

struct kvd_conn *kvd_conn_find_away(struct kvd_conn *conn,
				    const struct kv_msg_hello *hello)
{
	const char *tenant = conn->kvd->config.tenants[conn->tenant].name;
	struct kvd_conn *c, *found = NULL;

	if (sodium_is_zero(hello->cookie, KV_COOKIE_BYTES))
		return NULL;
	/* Every cookie is compared, however soon one fits. */
	list_for_each_entry (c, &conn->kvd->conns, node) {
		if (!sodium_memcmp(c->cookie, hello->cookie, KV_COOKIE_BYTES) &&
		    c->state == KVD_CONN_AWAY)
			found = c;
	}
	if (!found)
		return NULL;
	if (!same_process(conn, found)) {
		kvd_warn("ipc/resume",
			 "pid %d uid %u named the cookie of client %llu, pid %d: refused",
			 conn->cred.pid, conn->cred.uid,
			 (unsigned long long)found->client_id, found->cred.pid);
		return NULL;
	}
	if (strcmp(found->session->tenant->name, tenant) || found->role != hello->role)
		return NULL;
	return found;
}

void kvd_conn_take_up(struct kvd_conn *conn, struct kvd_conn *away)
{
	conn->page = away->page;
	conn->page_fd = away->page_fd;
	conn->session = away->session;
	conn->session->owner = conn;
	conn->kept = away->kept;
	conn->kept_tenant = away->kept_tenant;
	memcpy(conn->cookie, away->cookie, sizeof(conn->cookie));
	memcpy(conn->name, away->name, sizeof(conn->name));
	conn->resumed = conn->resuming = true;
	conn->proof.seen = away->proof.seen;
	/* Its pidfd stays the keeper's; ours is of the same process. */
	away->page = NULL;
	away->page_fd = -1;
	away->session = NULL;
	away->kept = false;
	away->state = KVD_CONN_CLOSED; /* freed at the end of the turn */
}

static void head(struct kv_msg_leases *m, u32 pool_id, u32 nr, u32 flags)
{
	memset(m, 0, sizeof(*m));
	m->msg.magic = KV_MSG_MAGIC;
	m->msg.type = KV_MSG_LEASES;
	m->msg.size_bytes = (u32)(sizeof(*m) + nr * sizeof(struct kv_lease));
	m->pool_id = pool_id;
	m->nr = nr;
	m->flags = flags;
}

void kvd_conn_tell_pools(struct kvd_conn *conn)
{
	struct kv_msg_leases m;

	for (u32 i = 0; i < KV_POOLS_MAX; i++) {
		if (conn->state != KVD_CONN_OPEN || !conn->session->attach[i].pool)
			continue;
		head(&m, conn->session->attach[i].pool->id, 0, KV_LEASES_OPEN);
		kvd_conn_send(conn, &m.msg, NULL);
	}
}

/* A stocked page is listed as such: it may be popped at any time. */
static struct kv_lease lease_of(struct kvd_conn *conn, struct kvd_attach *a, u32 pfn)
{
	const struct kvd_frame *f = &a->pool->frames[pfn];
	struct kv_lease lease = {.pfn = pfn, .refs = a->refs[pfn], .tag = f->tag};

	if (f->state == KVD_MAGAZINE && !kvd_lease_holds(conn->session, a, pfn, f->tag))
		lease.flags = KV_LEASE_STOCKED;
	return lease;
}

void kvd_conn_leases(struct kvd_conn *conn)
{
	static struct {
		struct kv_msg_leases head;
		struct kv_lease leases[LEASES_A_MSG];
	} m; /* loop thread only; too large for the stack */

	while (conn->state == KVD_CONN_OPEN && conn->leases && !conn->out.nr) {
		struct kvd_attach *a =
			kvd_session_attach(conn->session, conn->leases->id);
		u32 nr = 0, pfn = conn->leases_pfn, end = conn->leases->geo.nr_pages;

		for (; a && pfn < end && nr < LEASES_A_MSG; pfn++) {
			if (a->refs[pfn])
				m.leases[nr++] = lease_of(conn, a, pfn);
			else if (!(pfn % 64) && !a->held[pfn / 64])
				pfn += 63;
		}
		conn->leases_pfn = pfn;
		head(&m.head, conn->leases->id, nr, pfn >= end ? KV_LEASES_LAST : 0);
		if (pfn >= end)
			conn->leases = NULL;
		kvd_conn_send(conn, &m.head.msg, NULL);
	}
}
