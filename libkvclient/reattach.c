/* SPDX-License-Identifier: Apache-2.0 */
/*
 * reattach.c - calls through the current connection, and the next one when it is lost.
 *
 * There is no thread that watches the connection: a call that finds it dead connects
 * again, until its deadline. The new session opens the same pools at the same addresses.
 * HELLO carries the session's cookie. A kvmd that adopted the session answers with the
 * same client id and session page, and says what it knows of its leases (ledger.c):
 * leases, magazines and the return list go on. Else the leases are gone with the old
 * session: FREE, SEAL, PIN on them answer KV_STALE, because generations never repeat.
 * Either way steps that had begun end normally on the old tables and the old memory,
 * which both stay until they retire; the engine is told by a KV_MSG_EPOCH event.
 *
 * Between the loss and the reconnect steps go on: what they check against cannot change.
 *
 * Lock: kvc.lock (2 in internal.h). A link goes when it is not the current one, no call
 * counts itself in link.users, and no step names it.
 */
#include "internal.h"

#include <errno.h>
#include <sched.h>
#include <string.h>

#define RETRY_NS (5 * KV_NSEC_PER_MSEC)

static bool step_uses(struct kvc *c, const struct kvc_link *link)
{
	u32 mask = __atomic_load_n(&c->slot_mask, __ATOMIC_SEQ_CST);

	for (u32 i = 0; i < KV_ANNOUNCE_SLOTS; i++) {
		struct kvc_step *s = &c->steps[i];

		if (!(mask >> i & 1))
			continue;
		if (!__atomic_load_n(&s->begun, __ATOMIC_ACQUIRE) ||
		    __atomic_load_n(&s->link, __ATOMIC_ACQUIRE) == link)
			return true;
	}
	return false;
}

/**
 * kvc_links_collect_locked() - unmap links that nobody uses
 * @all: the connection closes: destroy all, the current one too
 */
void kvc_links_collect_locked(struct kvc *c, bool all)
{
	if (all) {
		while (c->link) {
			struct kvc_link *link = c->link;

			c->link = link->older;
			kvc_link_destroy(link);
		}
		return;
	}
	for (struct kvc_link *l = c->link->older; l; l = l->older) {
		if (l->gone)
			continue;
		if (__atomic_load_n(&l->users, __ATOMIC_ACQUIRE) || step_uses(c, l))
			kv_store_relaxed32(&c->deferred, 1);
		else
			kvc_link_unmap(l);
	}
}

/* Calls on the old link have ended in -ECONNRESET or are about to: what they were given is
 * in the ledger then. */
static int users_gone(struct kvc_link *old, u64 deadline_ns)
{
	while (__atomic_load_n(&old->users, __ATOMIC_ACQUIRE)) {
		if (kv_now_ns() >= deadline_ns)
			return -ETIMEDOUT;
		sched_yield();
	}
	return 0;
}

/* Pools of a session taken up that were closed while kvmd was away. */
static void close_known(struct kvc *c, struct kvc_link *link)
{
	for (u32 k = 0; k < c->nr_known && !link->dead; k++) {
		struct kv_msg_pool_close m = {.msg = {.magic = KV_MSG_MAGIC,
						      .type = KV_MSG_POOL_CLOSE,
						      .size_bytes = sizeof(m)},
					      .pool_id = c->known[k]};
		bool open = false;

		for (u32 i = 0; i < KV_POOLS_MAX; i++)
			open |= c->pools[i] && c->pools[i]->opened &&
				c->pools[i]->pool_id == c->known[k];
		if (!open)
			kvc_sock_send(link->sock, &m, sizeof(m), 0);
	}
	c->nr_known = 0;
}

/* Make @link the current one and open the pools on it. Return: 0; -ECONNRESET lost again.
 */
static int adopt(struct kvc *c, struct kvc_link *link, u64 deadline_ns)
{
	bool kept;

	if (link->resumed && users_gone(c->link, deadline_ns)) {
		kvc_link_destroy(link);
		return -ETIMEDOUT;
	}
	if (link->resumed)
		kvc_mags_resume(link, c->link);
	c->nr_known = 0;
	link->older = c->link;
	__atomic_store_n(&c->link, link, __ATOMIC_SEQ_CST);
	for (u32 i = 0; i < KV_POOLS_MAX; i++) {
		if (!c->pools[i])
			continue;
		c->pools[i]->opened = false;
		if (link->resumed)
			continue;
		kvc_ret_clear(c->pools[i]);
		kvc_extents_orphan_locked(c->pools[i]);
	}
	if (kvc_link_watch(c))
		kvc_log(c, KVC_LOG_ERR, "events of the new connection are not watched");
	for (u32 i = 0; i < KV_POOLS_MAX; i++) {
		struct kvc_pool *pool = c->pools[i];

		if (!pool)
			continue;
		pool->broken = kvc_pool_attach_locked(pool, link, deadline_ns);
		/* too late for this call, not for the next one: it connects anew */
		if (pool->broken == -ETIMEDOUT)
			kvc_link_dead_locked(link, -ETIMEDOUT);
		if (link->dead)
			return -ECONNRESET;
		if (!pool->broken)
			continue;
		kvc_log(c, KVC_LOG_ERR, "pool %u is lost: %s", pool->pool_id,
			kvc_strerror(c));
		/* of other memory, what kvmd tells of its extents is not for this one */
		if (pool->broken == -ESHUTDOWN)
			kvc_pool_send_close_locked(pool, link);
	}
	close_known(c, link);
	/* of a session that began and was lost before its pools were open nobody was told */
	kept = c->told_session == link->session_serial;
	c->told_session = link->session_serial;
	kvc_event_queue_locked(c, KV_MSG_EPOCH, NULL, kept, NULL);
	kvc_log(c, KVC_LOG_INFO, "connected again, table_epoch %llu, %s",
		(unsigned long long)link->table_epoch,
		kept ? "session taken up" : "new session");
	kvc_links_collect_locked(c, false);
	return 0;
}

/**
 * kvc_link_alive_locked() - connect again if the connection is lost
 *
 * Context: kvc.lock; it is given up while the call sleeps between two tries.
 * Return: 0; -ETIMEDOUT, with the last try's reason as text.
 */
int kvc_link_alive_locked(struct kvc *c, u64 deadline_ns)
{
	while (c->link->dead) {
		struct kvc_link *link;
		int r;

		r = kvc_link_open(c, deadline_ns, &link);
		if (!r)
			r = adopt(c, link, deadline_ns);
		if (!r)
			return 0;
		/* tries that failed half way have descriptors */
		kvc_links_collect_locked(c, false);
		if (kv_now_ns() + RETRY_NS >= deadline_ns)
			return -ETIMEDOUT;
		pthread_mutex_unlock(&c->lock);
		kvc_sleep_ns(RETRY_NS);
		pthread_mutex_lock(&c->lock);
	}
	return 0;
}

/**
 * kvc_link_get() - the current link, alive, with a reference
 *
 * Return: 0; -ETIMEDOUT kvmd is away.
 */
int kvc_link_get(struct kvc *c, u64 deadline_ns, struct kvc_link **ret_link)
{
	int r;

	r = kvc_lock_until(&c->lock, deadline_ns);
	if (r)
		return kvc_fail(r, "another call is waiting for kvmd");
	r = kvc_link_alive_locked(c, deadline_ns);
	if (!r) {
		__atomic_add_fetch(&c->link->users, 1, __ATOMIC_RELAXED);
		*ret_link = c->link;
	}
	pthread_mutex_unlock(&c->lock);
	return r;
}

/** kvc_link_put() - the call does not use the link any more */
void kvc_link_put(struct kvc_link *link)
{
	__atomic_sub_fetch(&link->users, 1, __ATOMIC_RELEASE);
}

/* Who has the lock for longer than the call lasts finds out by itself. */
static void mark_dead(struct kvc_link *link, int error, u64 deadline_ns)
{
	if (kv_load_relaxed32(&link->dead) || kvc_lock_until(&link->c->lock, deadline_ns))
		return;
	kvc_link_dead_locked(link, error);
	pthread_mutex_unlock(&link->c->lock);
}

/* One try; the ledger follows while the link counts us as a user. */
static int call_on(struct kvc_link *link, struct kvc_req *req, u64 deadline_ns)
{
	int r = kvc_ring_call(link, req, deadline_ns);

	if (!r)
		kvc_ledger_answered(req);
	return r;
}

/**
 * kvc_call() - a request and its answer, over as many connections as it takes
 *
 * A request that was under way when kvmd went is sent again to the next one. In a new
 * session what it named is gone, so that doing it twice is not possible. In one that was
 * taken up, what it brought was given back before (ledger.c), a FREE is done by that, and
 * SEAL says that it comes again.
 *
 * Context: no lock held; waits up to the deadline.
 * Return: the request's answer; -ETIMEDOUT; -EPROTO; -ESHUTDOWN the pool was lost in a
 *	reconnect; -EOWNERDEAD.
 */
int kvc_call(struct kvc *c, struct kvc_req *req, u64 deadline_ns)
{
	u64 sent_in = 0;

	for (;;) {
		struct kvc_link *link = NULL;
		int r, error;

		if (kvc_poisoned(c))
			return kvc_fail(-EOWNERDEAD, "the process forked");
		r = kvc_link_get(c, deadline_ns, &link);
		if (r)
			return r;
		if (req->pool && req->pool->broken)
			r = kvc_fail(-ESHUTDOWN, "the pool was lost when kvmd restarted");
		else if (req->opcode == KV_OP_FREE && req->sent &&
			 sent_in == link->session_serial && !KV_MUTANT(free_sent_again))
			r = 0;
		else
			r = call_on(link, req, deadline_ns);
		sent_in = link->session_serial;
		req->again = true;
		error = link->ring.error;
		/* First: whoever attaches again waits for the users of this link. */
		kvc_link_put(link);
		if (error)
			mark_dead(link, error, deadline_ns);
		if (r == -ECONNRESET && kv_now_ns() < deadline_ns)
			continue;
		if (r == -ECONNRESET || r == -ETIMEDOUT)
			return kvc_fail(-ETIMEDOUT, "no answer from kvmd");
		if (r < 0 && r != -EPROTO && r != -E2BIG && r != -ESHUTDOWN)
			kvc_fail(r, "kvmd refused opcode %u, nr %u: %s", req->opcode,
				 req->nr, strerror(-r));
		return r;
	}
}

/**
 * kvc_attach_again() - the session page names another instance of kvmd than @old's
 *
 * Return: 0; -ETIMEDOUT.
 */
int kvc_attach_again(struct kvc *c, struct kvc_link *old, u64 deadline_ns)
{
	int r;

	r = kvc_lock_until(&c->lock, deadline_ns);
	if (r)
		return kvc_fail(r, "another call is waiting for kvmd");
	kvc_link_dead_locked(old, -ECONNRESET);
	r = kvc_link_alive_locked(c, deadline_ns);
	pthread_mutex_unlock(&c->lock);
	return r;
}
