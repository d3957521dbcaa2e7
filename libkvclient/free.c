/* SPDX-License-Identifier: Apache-2.0 */
/*
 * free.c - the return list: pages wait here for the steps that may still use them.
 *
 * FREE goes to kvmd only when every step that was launched before the call has retired
 * (design 5, P6), in batches of KVC_FREE_BATCH or more, oldest first. A call that brings
 * a whole batch waits for kvmd's answer, one that completes a batch does not. A page on the list
 * is never handed out again from here: its next owner gets it from kvmd, with a new
 * generation.
 *
 * Fences rise along the list, so what may go is always a run at its head.
 *
 * Lock: kvc_pool.lock (5 in internal.h), not held while a batch is sent.
 */
#include "internal.h"

#include <errno.h>
#include <stdlib.h>

#define RET_MIN	    256u
/* Pages on a list beyond which every free call waits for kvmd. */
#define WAITING_MAX (4 * KVC_FREE_BATCH)

static int grow_locked(struct kvc_pool *pool, u32 nr)
{
	u32 max = pool->ret_max ? pool->ret_max : RET_MIN;
	struct kvc_ret *ret;

	while (max < pool->ret_nr + nr)
		max *= 2;
	ret = malloc(max * sizeof(*ret));
	if (!ret)
		return kvc_fail(-ENOMEM, "out of memory");
	for (u32 i = 0; i < pool->ret_nr; i++)
		ret[i] = pool->ret[(pool->ret_head + i) & (pool->ret_max - 1)];
	free(pool->ret);
	pool->ret = ret;
	pool->ret_head = 0;
	pool->ret_max = max;
	return 0;
}

/**
 * kvc_ret_add() - put pages on the return list, behind the steps launched so far
 *
 * Context: any lock but kvc_pool.lock may be held.
 * Return: 0; -ENOMEM, nothing was added.
 */
int kvc_ret_add(struct kvc_pool *pool, const struct kv_grant *pages, u32 nr)
{
	u64 fence = __atomic_load_n(&pool->c->launch_number, __ATOMIC_ACQUIRE);
	int r = 0;

	pthread_mutex_lock(&pool->lock);
	if (pool->ret_nr + nr > pool->ret_max)
		r = grow_locked(pool, nr);
	for (u32 i = 0; i < nr && !r; i++) {
		u32 at = (pool->ret_head + pool->ret_nr++) & (pool->ret_max - 1);

		pool->ret[at] = (struct kvc_ret){
			.ref = {.pfn = pages[i].pfn, .tag = pages[i].tag},
			.fence = fence};
	}
	pthread_mutex_unlock(&pool->lock);
	return r;
}

/* Take up to KVC_FREE_SEND_MAX pages whose fence has passed; none if they are too few. */
static u32 take_ready(struct kvc_pool *pool, u32 at_least, struct kv_page_ref *ret)
{
	u64 passed = 0;
	u32 nr = 0;

	pthread_mutex_lock(&pool->lock);
	if (pool->ret_nr >= at_least) {
		while (nr < pool->ret_nr && nr < KVC_FREE_SEND_MAX) {
			struct kvc_ret *e =
				&pool->ret[(pool->ret_head + nr) & (pool->ret_max - 1)];

			/* a fence that has passed stays so: one look for a run of equals
			 */
			if ((!nr || e->fence != passed) &&
			    !kvc_fence_passed(pool->c, e->fence))
				break;
			passed = e->fence;
			ret[nr++] = e->ref;
		}
		if (nr < at_least)
			nr = 0;
		pool->ret_head = (pool->ret_head + nr) & (pool->ret_max - 1);
		pool->ret_nr -= nr;
	}
	if (pool->ret_nr >= KVC_FREE_BATCH) /* the next retire looks again */
		kv_store_relaxed32(&pool->c->deferred, 1);
	pthread_mutex_unlock(&pool->lock);
	return nr;
}

static struct kvc_req free_req(struct kvc_pool *pool, const struct kv_page_ref *refs,
			       u32 nr)
{
	return (struct kvc_req){.opcode = KV_OP_FREE,
				.pool = pool,
				.nr = nr,
				.arg_bytes = nr * (u32)sizeof(*refs),
				.src = refs};
}

/* References are grants without their flags. */
static void refs_fill(void *arg, const struct kvc_req *req)
{
	const struct kv_grant *pages = req->src;
	struct kv_page_ref *refs = arg;

	for (u32 i = 0; i < req->nr; i++)
		refs[i] = (struct kv_page_ref){.pfn = pages[i].pfn, .tag = pages[i].tag};
}

/* A batch that did not get into the ring: back to the list, behind newer steps at worst. */
static void put_back(struct kvc_pool *pool, const struct kv_page_ref *refs, u32 nr)
{
	for (u32 i = 0; i < nr; i++) {
		struct kv_grant g = {.pfn = refs[i].pfn, .tag = refs[i].tag};

		if (kvc_ret_add(pool, &g, 1))
			kvc_log(pool->c, KVC_LOG_ERR, "pfn %u is lost", g.pfn);
	}
}

/**
 * kvc_ret_send() - send what may go and wait for kvmd
 * @at_least: send only batches of that many pages
 *
 * A batch whose answer does not come counts as sent: kvmd has it, or has lost the session
 * and all its leases.
 *
 * Return: 0; KV_STALE some page was gone already; -ETIMEDOUT and others as kvc_call().
 */
int kvc_ret_send(struct kvc_pool *pool, u32 at_least, u64 deadline_ns)
{
	struct kv_page_ref refs[KVC_FREE_SEND_MAX];
	int outcome = 0;
	u32 nr;

	while ((nr = take_ready(pool, at_least, refs)) > 0) {
		struct kvc_req req = free_req(pool, refs, nr);
		int r = kvc_call(pool->c, &req, deadline_ns);

		if (r < 0) {
			if (!req.sent && !KV_MUTANT(unsent_frees_lost))
				put_back(pool, refs, nr);
			return r;
		}
		if (r == KV_STALE)
			outcome = r;
	}
	return outcome;
}

/** kvc_ret_post() - send full batches that may go, do not wait; kvc.lock is held */
void kvc_ret_post(struct kvc_pool *pool, struct kvc_link *link)
{
	struct kv_page_ref refs[KVC_FREE_SEND_MAX];
	struct kvc_req req;
	u32 nr;

	while (!link->dead && (nr = take_ready(pool, KVC_FREE_BATCH, refs)) > 0) {
		req = free_req(pool, refs, nr);
		if (!kvc_ring_post(link, &req, KVC_FREE_ASYNC)) {
			kvc_ledger_freeing(&req);
			continue;
		}
		put_back(pool, refs, nr);
		return;
	}
}

/** kvc_ret_clear() - the session's leases are gone */
void kvc_ret_clear(struct kvc_pool *pool)
{
	pthread_mutex_lock(&pool->lock);
	pool->ret_nr = 0;
	kvc_ledger_clear(pool);
	pthread_mutex_unlock(&pool->lock);
}

static int check_pfns(struct kvc_pool *pool, const struct kv_grant *pages, u32 nr)
{
	for (u32 i = 0; i < nr; i++)
		if (pages[i].pfn >= pool->geometry.nr_pages)
			return kvc_fail(-EINVAL, "pages[%u].pfn=%u: the pool has %u", i,
					pages[i].pfn, pool->geometry.nr_pages);
	return 0;
}

/* Whoever holds the lock is about to send or to leave: the next call tries again. */
static void post_some(struct kvc_pool *pool)
{
	struct kvc *c = pool->c;

	if (pthread_mutex_trylock(&c->lock))
		return;
	if (!c->link->dead) {
		kvc_ring_reap(c->link);
		kvc_ret_post(pool, c->link);
	}
	pthread_mutex_unlock(&c->lock);
}

/*
 * A whole batch that nothing waits before, of which no step is left: past the list, from
 * the caller's array into the ring. Return: as kvc_ret_send(); KV_BUSY: not so.
 */
static int free_now(struct kvc_pool *pool, const struct kv_grant *pages, u32 nr)
{
	u64 fence = __atomic_load_n(&pool->c->launch_number, __ATOMIC_ACQUIRE);
	struct kvc_req req = free_req(pool, NULL, nr);
	int r;

	_Static_assert(sizeof(struct kv_grant) == sizeof(struct kv_page_ref) &&
			       offsetof(struct kv_grant, tag) ==
				       offsetof(struct kv_page_ref, tag) &&
			       offsetof(struct kv_grant, flags) ==
				       offsetof(struct kv_page_ref, reserved),
		       "a grant without its flags is a reference");
	if (nr < KVC_FREE_BATCH || nr > KVC_FREE_SEND_MAX ||
	    kv_load_relaxed32(&pool->ret_nr) || !kvc_fence_passed(pool->c, fence))
		return KV_BUSY;
	req.src = pages;
	req.fill = refs_fill;
	r = kvc_call(pool->c, &req, kvc_deadline(pool->c));
	if (r < 0 && !req.sent && !KV_MUTANT(unsent_frees_lost))
		put_back(pool, (const struct kv_page_ref *)pages, nr);
	return r == KV_BUSY ? 0 : r;
}

int kvc_free(struct kvc_pool *pool, const struct kv_grant *pages, uint32_t nr)
{
	struct kvc *c = pool->c;
	u32 waiting;
	int r;

	if (kvc_poisoned(c))
		return kvc_fail(-EOWNERDEAD, "the process forked");
	r = check_pfns(pool, pages, nr);
	if (r)
		return r;
	if (!__atomic_load_n(&c->link, __ATOMIC_ACQUIRE)->dead) {
		r = free_now(pool, pages, nr);
		if (r != KV_BUSY)
			return r < 0 ? 0 : r;
	}
	r = kvc_ret_add(pool, pages, nr);
	if (r)
		return r;
	waiting = kv_load_relaxed32(&pool->ret_nr);
	if (waiting < KVC_FREE_BATCH || __atomic_load_n(&c->link, __ATOMIC_ACQUIRE)->dead)
		return 0;
	/* Few pages at a time, as from a magazine: nobody waits for a round trip. What
	 * was found gone is said by kvc_flush(). */
	if (nr < KVC_FREE_BATCH && waiting < WAITING_MAX) {
		post_some(pool);
		return 0;
	}
	r = kvc_ret_send(pool, KVC_FREE_BATCH, kvc_deadline(c));
	return r < 0 ? 0 : r;
}

int kvc_unpin(struct kvc_pool *pool, const struct kv_grant *pages, uint32_t nr)
{
	return kvc_free(pool, pages, nr);
}

/*
 * The pool stays while the call works on it: kvc_pool_close() waits. One that was lost in a
 * restart has nothing to free, and is no reason to leave the others' frees.
 * Return: 0; KV_BUSY some wait for a step; as kvc_ret_send().
 */
static int flush_pool(struct kvc *c, u32 slot, u64 deadline_ns)
{
	struct kvc_pool *pool;
	int r;

	r = kvc_pool_use(c, slot, deadline_ns, &pool);
	if (r || !pool)
		return r;
	r = kvc_ret_send(pool, 1, deadline_ns);
	if (!r && kv_load_relaxed32(&pool->ret_nr))
		r = KV_BUSY;
	kvc_pool_unuse(pool);
	return r == -ESHUTDOWN ? 0 : r;
}

int kvc_flush(struct kvc *c)
{
	u64 deadline_ns = kvc_deadline(c);
	bool busy = false, stale = false;
	struct kvc_link *link;
	int r;

	if (kvc_poisoned(c))
		return kvc_fail(-EOWNERDEAD, "the process forked");
	for (u32 i = 0; i < KV_POOLS_MAX; i++) {
		r = flush_pool(c, i, deadline_ns);
		if (r < 0)
			return r;
		busy |= r == KV_BUSY;
		stale |= r == KV_STALE;
	}
	r = kvc_link_get(c, deadline_ns, &link);
	if (r)
		return r;
	r = kvc_ring_settle_frees(link, deadline_ns);
	kvc_link_put(link);
	if (r == -ETIMEDOUT)
		return kvc_fail(r, "no answer from kvmd");
	/* a lost connection has lost its leases too */
	stale |= r == KV_STALE;
	return stale ? KV_STALE : busy ? KV_BUSY : 0;
}
