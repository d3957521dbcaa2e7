/* SPDX-License-Identifier: Apache-2.0 */
/*
 * event.c - what kvmd says without being asked, and kvc_dispatch().
 *
 * Messages are read by whoever needs to know (an allocation that misses an extent, a
 * dispatch). Extents are handled at once; what concerns the engine is queued for its next
 * dispatch. When KVC_EVENTS_MAX events wait, the socket is read no further: nothing is
 * dropped.
 *
 * Lock: kvc.lock (2 in internal.h); callbacks run without it.
 */
#include "internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

struct event {
	struct list_node node;
	u32 type;
	u32 nr;
	struct kvc_pool *pool;
	struct kv_page_ref pages[];
};

static void wake(struct kvc *c)
{
	u64 one = 1;
	ssize_t n = write(c->wake_fd, &one, sizeof(one));

	(void)n; /* a full counter is readable too */
}

/**
 * kvc_event_queue_locked() - keep an event for the next dispatch
 * @nr: REVOKE: pages at @pages; PRESSURE: level
 *
 * Return: 0; -ENOMEM.
 */
int kvc_event_queue_locked(struct kvc *c, u32 type, struct kvc_pool *pool, u32 nr,
			   const struct kv_page_ref *pages)
{
	size_t bytes = pages ? nr * sizeof(*pages) : 0;
	struct event *e;

	if (type == KV_MSG_PRESSURE) { /* only the latest level counts */
		list_for_each_entry (e, &c->events, node) {
			if (e->type == type && e->pool == pool) {
				e->nr = nr;
				return 0;
			}
		}
	}
	e = malloc(sizeof(*e) + bytes);
	if (!e)
		return kvc_fail(-ENOMEM, "out of memory");
	e->type = type;
	e->nr = nr;
	e->pool = pool;
	if (bytes)
		memcpy(e->pages, pages, bytes);
	list_add_tail(&c->events, &e->node);
	c->nr_events++;
	wake(c);
	return 0;
}

/** kvc_events_drop_pool_locked() - @pool goes; NULL: everything goes */
void kvc_events_drop_pool_locked(struct kvc *c, const struct kvc_pool *pool)
{
	struct event *e, *tmp;

	list_for_each_entry_safe (e, tmp, &c->events, node) {
		if (pool && e->pool != pool)
			continue;
		list_del(&e->node);
		c->nr_events--;
		free(e);
	}
}

/** kvc_link_dead_locked() - kvmd hung up or broke the protocol: every call on the link
 * ends */
void kvc_link_dead_locked(struct kvc_link *link, int error)
{
	struct kvc *c = link->c;

	if (link->dead)
		return;
	__atomic_store_n(&link->dead, 1, __ATOMIC_RELEASE);
	epoll_ctl(c->epoll_fd, EPOLL_CTL_DEL, link->sock, NULL);
	/* kvmd learns of it now, not when the link is freed */
	shutdown(link->sock, SHUT_RDWR);
	kvc_ring_fail(&link->ring, error == -EPROTO ? error : -ECONNRESET);
	kvc_log(c, KVC_LOG_WARN, "connection to kvmd lost: %s", strerror(-error));
	wake(c);
}

static struct kvc_pool *find_pool(struct kvc *c, u32 pool_id)
{
	for (u32 i = 0; i < KV_POOLS_MAX; i++)
		if (c->pools[i] && c->pools[i]->opened && c->pools[i]->pool_id == pool_id)
			return c->pools[i];
	/* Being opened: not in its slot yet. */
	if (c->attaching && c->attaching->pool_id == pool_id)
		return c->attaching;
	return NULL;
}

/* A pool's reply that nobody waits for any more: its call timed out, so kvmd may close
 * it. */
static void close_late_pool(struct kvc *c, const struct kv_msg_pool_reply *m)
{
	struct kv_msg_pool_close close_msg = {.msg = {.magic = KV_MSG_MAGIC,
						      .type = KV_MSG_POOL_CLOSE,
						      .size_bytes = sizeof(close_msg)},
					      .pool_id = m->pool_id};

	if (m->msg.size_bytes >= sizeof(*m) && !m->result && !find_pool(c, m->pool_id))
		kvc_sock_send(c->link->sock, &close_msg, sizeof(close_msg), 0);
}

static int handle_extents(struct kvc *c, struct kvc_msg_in *in)
{
	const struct kv_msg_extents *m = &in->extents;
	size_t head = offsetof(struct kv_msg_extents, extents);
	struct kvc_pool *pool;
	int r;

	if (m->msg.size_bytes < head || m->nr > KV_MSG_FDS_MAX ||
	    m->msg.size_bytes != head + m->nr * sizeof(m->extents[0]))
		return kvc_fail(-EPROTO, "extents: %u bytes", m->msg.size_bytes);
	pool = find_pool(c, m->pool_id);
	if (!pool)
		return 0; /* closed meanwhile */
	if (m->msg.type == KV_MSG_EXTENT_ADDED)
		return kvc_extents_added_locked(pool, in);
	r = kvc_extents_removed_locked(pool, m);
	return r ? r
		 : kvc_event_queue_locked(c, KV_MSG_EXTENT_REMOVED, pool, m->nr, NULL);
}

static int handle_revoke(struct kvc *c, const struct kv_msg_revoke *m)
{
	const struct kv_page_ref *refs;
	struct kvc_pool *pool;

	if (m->msg.size_bytes < sizeof(*m) || m->nr > KV_BATCH_MAX ||
	    m->msg.size_bytes != sizeof(*m) + m->nr * sizeof(struct kv_page_ref))
		return kvc_fail(-EPROTO, "revoke: %u bytes", m->msg.size_bytes);
	pool = find_pool(c, m->pool_id);
	if (!pool)
		return 0;
	refs = (const void *)(m + 1);
	for (u32 i = 0; i < m->nr; i++)
		kvc_ledger_revoked(pool, refs[i].pfn, refs[i].tag);
	return kvc_event_queue_locked(c, KV_MSG_REVOKE, pool, m->nr,
				      (const void *)(m + 1));
}

/**
 * kvc_msg_handle_locked() - act on a message of the current link
 *
 * Return: 0; -EPROTO; -ENOMEM; -ECONNRESET kvmd said that it hangs up.
 */
int kvc_msg_handle_locked(struct kvc *c, struct kvc_msg_in *in)
{
	struct kvc_pool *pool;

	switch (in->msg.type) {
	case KV_MSG_EXTENT_ADDED:
	case KV_MSG_EXTENT_REMOVED:
		return handle_extents(c, in);
	case KV_MSG_REVOKE:
		return handle_revoke(c, &in->revoke);
	case KV_MSG_LEASES:
		return kvc_ledger_leases(c, find_pool(c, in->leases.pool_id),
					 &in->leases);
	case KV_MSG_PRESSURE:
		if (in->msg.size_bytes < sizeof(in->pressure))
			return kvc_fail(-EPROTO, "pressure: %u bytes",
					in->msg.size_bytes);
		pool = find_pool(c, in->pressure.pool_id);
		return pool ? kvc_event_queue_locked(c, KV_MSG_PRESSURE, pool,
						     in->pressure.level, NULL)
			    : 0;
	case KV_MSG_EPOCH:
		return -ECONNRESET; /* attach again: by a new connection */
	case KV_MSG_ERROR:
		if (in->msg.size_bytes >= sizeof(in->error))
			kvc_log(c, KVC_LOG_ERR, "kvmd: %.*s",
				(int)sizeof(in->error.error), in->error.error);
		return -ECONNRESET;
	case KV_MSG_POOL_REPLY:
		close_late_pool(c, &in->pool);
		return 0;
	default:
		kvc_log(c, KVC_LOG_INFO, "message of unknown type %u", in->msg.type);
		return 0;
	}
}

/**
 * kvc_sock_read_locked() - handle every message that is there, do not wait
 *
 * Return: 0; -ECONNRESET the link is dead; -ENOBUFS too many events wait for a dispatch.
 */
int kvc_sock_read_locked(struct kvc *c)
{
	struct kvc_link *link = c->link;

	while (!link->dead) {
		int r;

		if (c->nr_events >= KVC_EVENTS_MAX)
			return kvc_fail(-ENOBUFS, "%u events wait for kvc_dispatch()",
					c->nr_events);
		r = kvc_sock_recv(link->sock, c->msg);
		if (r == -EAGAIN)
			return 0;
		if (!r) {
			r = kvc_msg_handle_locked(c, c->msg);
			kvc_msg_close_fds(c->msg);
		}
		if (r)
			kvc_link_dead_locked(link, r);
	}
	return -ECONNRESET;
}

int kvc_event_fd(struct kvc *c)
{
	return kvc_poisoned(c) ? -EOWNERDEAD : c->epoll_fd;
}

/* A callback may close a pool that a later event names. */
static bool pool_is_open(struct kvc *c, const struct kvc_pool *pool)
{
	bool found = !pool;

	pthread_mutex_lock(&c->lock);
	for (u32 i = 0; i < KV_POOLS_MAX; i++)
		found |= c->pools[i] == pool;
	pthread_mutex_unlock(&c->lock);
	return found;
}

static int call_back(struct kvc *c, struct list_node *events,
		     void (*fn)(void *, const struct kvc_event *), void *arg)
{
	struct event *e, *tmp;
	int nr = 0;

	list_for_each_entry_safe (e, tmp, events, node) {
		struct kvc_event out = {.type = e->type, .nr = e->nr, .pool = e->pool};

		if (e->type == KV_MSG_REVOKE)
			out.pages = e->pages;
		if (fn && pool_is_open(c, e->pool))
			fn(arg, &out);
		list_del(&e->node);
		free(e);
		nr++;
	}
	return nr;
}

int kvc_dispatch(struct kvc *c, void (*fn)(void *arg, const struct kvc_event *event),
		 void *arg)
{
	struct list_node events;
	u64 count;
	int r, nr;

	if (kvc_poisoned(c))
		return kvc_fail(-EOWNERDEAD, "the process forked");
	if (pthread_mutex_trylock(&c->lock)) /* another thread is at it */
		return -EAGAIN;
	r = kvc_sock_read_locked(c);
	kvc_deferred_run_locked(c);
	list_init(&events);
	if (!list_empty(&c->events)) {
		list_insert_between(&events, c->events.prev, c->events.next);
		list_init(&c->events);
	}
	c->nr_events = 0;
	if (read(c->wake_fd, &count, sizeof(count)) < 0)
		count = 0; /* nobody had written */
	pthread_mutex_unlock(&c->lock);
	nr = call_back(c, &events, fn, arg);
	if (!nr && r == -ECONNRESET)
		return kvc_fail(-ECONNRESET, "kvmd is away; the next call reconnects");
	return nr;
}
