/* SPDX-License-Identifier: Apache-2.0 */
/*
 * alloc.c - kvc_alloc(): from the thread's magazine, else from kvmd. Tour 2/12.
 *
 * A magazine lies in the session page: KV_MAGAZINE_SLOTS words that kvmd fills and this
 * side takes by one compare-and-swap, which is also how kvmd recalls a page: whoever wins
 * the swap has it. A thread claims one magazine for one pool; threads beyond
 * KV_MAGAZINES, and requests for more than one page, go through the ring. A busy thread
 * stocks up to KV_MAGAZINE_SLOTS pages, one that allocates rarely REFILL_MIN. At the low
 * watermark a refill is sent without waiting for it; one that fails is harmless and is
 * tried again later.
 *
 * Stocked pages are charged, so before an answer FULL, QUOTA or PENDING reaches the
 * caller its session's magazines are emptied and its return list is sent.
 *
 * Threads: the owner pops without a lock; kvc_mag_drain() pops from any thread. Claiming
 * is under kvc.lock.
 */
#include "internal.h"

#include <errno.h>
#include <string.h>

#define MAG_UNUSABLE ~0ull
#define MAG_CACHE    4
#define DRAIN_MAX    (KV_MAGAZINES * KV_MAGAZINE_SLOTS)
#define REFILL_MIN   2u
#define BUSY_NS	     (20 * KV_NSEC_PER_MSEC)  /* used up so soon: ask for more */
#define RARE_NS	     (500 * KV_NSEC_PER_MSEC) /* lasted so long: fewer will do */
#define ANSWER_NS    (50 * KV_NSEC_PER_MSEC)  /* the last question has so long */
#define WAIT_MIN_NS  (100 * KV_NSEC_PER_USEC)
#define WAIT_MAX_NS  (2 * KV_NSEC_PER_MSEC)
#define PARK_NS	     KV_NSEC_PER_SEC /* how long kvmd holds a request with WAIT back */

static __thread struct {
	u64 pool_serial;
	u64 link_serial;
	u32 index;
} mag_cache[MAG_CACHE];

/* ---------------------------------------------------------------------------- magazines
 */

/*
 * Entered before it is taken: nobody may see it taken and not entered (ledger.c). Whose
 * magazine it is is read after the word: another pool's pages come only when its id is
 * there (mag_rededicate()), and whoever drains may be looking since before.
 */
static bool slot_pop(struct kvc_pool *pool, struct kv_magazine *m, u32 at,
		     struct kv_grant *ret)
{
	struct kv_mag_slot *slot = &m->slots[at];
	u64 word = kv_load_acquire64(&slot->word), tag;

	if (!(word & KV_MAG_STOCKED))
		return false;
	if (kv_load_relaxed32(&m->pool_id) != pool->pool_id && !KV_MUTANT(pop_any_pool))
		return false;
	tag = kv_load_relaxed64(&slot->tag);
	kvc_hold(pool, KV_MAG_PFN(word), tag);
	if (!kv_cas64(&slot->word, word, 0)) {
		kvc_unhold(pool, KV_MAG_PFN(word), tag);
		return false;
	}
	ret->pfn = KV_MAG_PFN(word);
	ret->tag = tag;
	ret->flags = word & KV_MAG_DIRTY ? KV_GRANT_DIRTY : 0;
	return true;
}

static bool mag_pop(struct kvc_pool *pool, struct kvc_link *link, u32 index, u32 *cursor,
		    struct kv_grant *ret)
{
	for (u32 i = 0; i < KV_MAGAZINE_SLOTS; i++) {
		u32 at = (*cursor + i) % KV_MAGAZINE_SLOTS;

		if (!slot_pop(pool, &link->session->magazines[index], at, ret))
			continue;
		*cursor = at + 1;
		return true;
	}
	return false;
}

/**
 * kvc_mag_drain() - take what is stocked for a pool, in all magazines of the session
 * @max: room in @ret
 *
 * Return: pages taken.
 */
int kvc_mag_drain(struct kvc_pool *pool, struct kvc_link *link, struct kv_grant *ret,
		  u32 max)
{
	u32 nr = 0;

	for (u32 i = 0; i < KV_MAGAZINES && nr < max; i++) {
		u32 cursor = 0;

		if (__atomic_load_n(&link->mags[i].pool_serial, __ATOMIC_ACQUIRE) !=
		    pool->serial)
			continue;
		while (nr < max && mag_pop(pool, link, i, &cursor, &ret[nr]))
			nr++;
	}
	return (int)nr;
}

/* Make an unowned magazine another pool's. Its old stock goes back to where it came from.
 */
static bool mag_rededicate(struct kvc_pool *pool, struct kvc_link *link, u32 index)
{
	struct kvc_mag *m = &link->mags[index];
	struct kvc *c = pool->c;
	struct kv_grant g;
	u32 cursor = 0;

	if (kv_load_acquire32(&m->refilling))
		return false;
	for (u32 i = 0; i < KV_POOLS_MAX; i++) {
		if (!c->pools[i] || c->pools[i]->serial != m->pool_serial)
			continue;
		while (mag_pop(c->pools[i], link, index, &cursor, &g))
			if (kvc_ret_add(c->pools[i], &g, 1))
				return false;
	}
	/* not @owner: other threads look at it without the lock */
	kv_store_relaxed32(&m->stocked, 0);
	m->popped = 0;
	m->refill_nr = KVC_REFILL_FIRST;
	m->refilled_ns = 0;
	m->cursor = 0;
	kv_store_relaxed32(&m->pause, 0);
	kv_store_relaxed32(&link->session->magazines[index].pool_id, pool->pool_id);
	__atomic_store_n(&m->pool_serial, pool->serial, __ATOMIC_RELEASE);
	return true;
}

/* One that a closed pool left with a refill under way: when that has come, what it brought
 * is taken out, and kvmd drops it with the pool. */
static void mag_reuse(struct kvc_link *link, u32 index)
{
	struct kv_magazine *m = &link->session->magazines[index];

	if (link->mags[index].pool_serial != MAG_UNUSABLE ||
	    kv_load_acquire32(&link->mags[index].refilling))
		return;
	for (u32 i = 0; i < KV_MAGAZINE_SLOTS; i++) {
		u64 word = kv_load_acquire64(&m->slots[i].word);

		if (word)
			kv_cas64(&m->slots[i].word, word, 0);
	}
	__atomic_store_n(&link->mags[index].pool_serial, 0, __ATOMIC_RELEASE);
}

/* First choice: one that holds this pool's pages already; then an unused one; then any.
 */
static int mag_claim_locked(struct kvc_pool *pool, struct kvc_link *link, u64 me)
{
	const u64 wanted[] = {pool->serial, 0};

	for (u32 i = 0; i < KV_MAGAZINES; i++)
		mag_reuse(link, i);
	for (u32 k = 0; k <= KV_ARRAY_SIZE(wanted); k++) {
		for (u32 i = 0; i < KV_MAGAZINES; i++) {
			struct kvc_mag *m = &link->mags[i];

			if (m->pool_serial == MAG_UNUSABLE ||
			    (k < KV_ARRAY_SIZE(wanted) && m->pool_serial != wanted[k]) ||
			    !kv_cas64(&m->owner, 0, me))
				continue;
			if (m->pool_serial == pool->serial ||
			    mag_rededicate(pool, link, i))
				return (int)i;
			__atomic_store_n(&m->owner, 0, __ATOMIC_RELEASE);
		}
	}
	return -1;
}

static int mag_find(struct kvc_pool *pool, struct kvc_link *link)
{
	u64 me = kvc_thread_serial();
	int index = -1;

	for (u32 i = 0; i < KV_MAGAZINES; i++)
		if (__atomic_load_n(&link->mags[i].owner, __ATOMIC_RELAXED) == me &&
		    __atomic_load_n(&link->mags[i].pool_serial, __ATOMIC_ACQUIRE) ==
			    pool->serial)
			index = (int)i;
	if (index < 0 && !pthread_mutex_trylock(&pool->c->lock)) {
		if (link == pool->c->link && pool->opened)
			index = mag_claim_locked(pool, link, me);
		pthread_mutex_unlock(&pool->c->lock);
	}
	if (index >= 0) {
		mag_cache[pool->serial % MAG_CACHE].pool_serial = pool->serial;
		mag_cache[pool->serial % MAG_CACHE].link_serial = link->serial;
		mag_cache[pool->serial % MAG_CACHE].index = (u32)index;
	}
	return index;
}

/* What is in stock is charged and nobody else's: as much as is used within RARE_NS. */
static void refill_size(struct kvc_mag *m)
{
	u64 now_ns = kv_now_ns(), took_ns = now_ns - m->refilled_ns;

	if (m->refilled_ns && took_ns < BUSY_NS)
		m->refill_nr = KV_MIN(m->refill_nr * 2, KV_MAGAZINE_SLOTS);
	else if (m->refilled_ns && took_ns > RARE_NS && !KV_MUTANT(refill_only_grows))
		m->refill_nr = KV_MAX(m->refill_nr / 2, REFILL_MIN);
	m->refilled_ns = now_ns;
}

static void mag_refill(struct kvc_pool *pool, u32 index, u32 left, u32 gfp)
{
	struct kvc_req req = {.opcode = KV_OP_ALLOC,
			      .flags = KV_SQE_MAGAZINE,
			      .magazine = (u16)index,
			      .pool = pool,
			      .gfp = gfp & (KV_GFP_GROW | KV_GFP_RECLAIM | KV_GFP_ZERO)};
	struct kvc *c = pool->c;
	struct kvc_mag *m;

	if (pthread_mutex_trylock(&c->lock))
		return;
	m = &c->link->mags[index];
	if (c->link->dead || m->pool_serial != pool->serial)
		goto unlock;
	refill_size(m);
	req.nr = KV_MIN(m->refill_nr, KV_MAGAZINE_SLOTS - left);
	/* a pool that kvmd had to make anew may have another id */
	kv_store_relaxed32(&c->link->session->magazines[index].pool_id, pool->pool_id);
	kv_store_relaxed32(&m->refilling, 1);
	if (kvc_ring_post(c->link, &req, KVC_REFILL))
		kv_store_relaxed32(&m->refilling, 0);
unlock:
	pthread_mutex_unlock(&c->lock);
}

/* The common case: no lock, no system call. */
static bool mag_alloc(struct kvc_pool *pool, u32 gfp, struct kv_grant *ret_page)
{
	struct kvc_link *link = __atomic_load_n(&pool->c->link, __ATOMIC_ACQUIRE);
	u32 at = pool->serial % MAG_CACHE, left;
	struct kvc_mag *m;
	int index = -1;
	bool got;

	if (mag_cache[at].pool_serial == pool->serial &&
	    mag_cache[at].link_serial == link->serial)
		index = (int)mag_cache[at].index;
	else
		index = mag_find(pool, link);
	if (index < 0)
		return false;
	m = &link->mags[index];
	got = mag_pop(pool, link, (u32)index, &m->cursor, ret_page);
	if (got)
		m->popped++;
	left = got ? kv_load_relaxed32(&m->stocked) - m->popped : 0;
	if (left > m->refill_nr / 4 && left <= KV_MAGAZINE_SLOTS)
		return got;
	if (kv_load_relaxed32(&m->pause)) {
		kv_store_relaxed32(&m->pause, m->pause - 1);
		return got;
	}
	if (kv_load_acquire32(&m->refilling)) {
		if (!pthread_mutex_trylock(
			    &pool->c->lock)) { /* holds the ring's memory */
			if (link == pool->c->link && !link->dead)
				kvc_ring_reap(link);
			pthread_mutex_unlock(&pool->c->lock);
		}
		return got;
	}
	if (!got ||
	    left > KV_MAGAZINE_SLOTS) { /* recalled, or counted wrongly: start again */
		m->popped = kv_load_relaxed32(&m->stocked);
		left = 0;
	}
	mag_refill(pool, (u32)index, left, gfp);
	return got;
}

/** kvc_mags_resume() - the same session page on a new link: its magazines go on. Refills
 * under way were lost with the old link; what one brought for a closed pool is taken out
 * before the magazine is used (mag_reuse()) */
void kvc_mags_resume(struct kvc_link *link, const struct kvc_link *old)
{
	for (u32 i = 0; i < KV_MAGAZINES; i++) {
		link->mags[i] = old->mags[i];
		link->mags[i].refilling = 0;
		link->mags[i].pause = 0;
	}
}

static void thread_exit(struct kvc *c, void *thread_serial)
{
	for (struct kvc_link *l = c->poisoned ? NULL : c->link; l; l = l->older)
		for (u32 i = 0; i < KV_MAGAZINES; i++)
			kv_cas64(&l->mags[i].owner, (u64)(uintptr_t)thread_serial, 0);
}

/** kvc_thread_exit() - a thread ends: its magazines are for others, with what is in them
 */
void kvc_thread_exit(void *thread_serial)
{
	kvc_for_each(thread_exit, thread_serial);
}

/**
 * kvc_mag_forget_pool_locked() - the pool closes: no page of it may stay in a magazine
 *
 * kvmd frees what the session holds in the pool, popped pages included. A magazine whose
 * refill is still on its way could fill later, so it is not used again before that.
 */
void kvc_mag_forget_pool_locked(struct kvc_pool *pool)
{
	struct kvc_link *link = pool->c->link;
	struct kv_grant g;

	for (u32 i = 0; i < KV_MAGAZINES; i++) {
		struct kvc_mag *m = &link->mags[i];
		u32 cursor = 0;

		if (m->pool_serial != pool->serial)
			continue;
		if (!link->dead)
			kvc_ring_reap(link);
		while (mag_pop(pool, link, i, &cursor, &g))
			continue;
		__atomic_store_n(&m->pool_serial,
				 kv_load_acquire32(&m->refilling) ? MAG_UNUSABLE : 0,
				 __ATOMIC_RELEASE);
		__atomic_store_n(&m->owner, 0, __ATOMIC_RELEASE);
	}
}

/* ------------------------------------------------------------------------------- extents
 */

static bool pfn_mapped(const struct kvc_pool *pool, u32 pfn)
{
	return pfn < pool->geometry.nr_pages &&
	       kv_load_acquire32(&pool->extents[pfn >> pool->geometry.shift].state) ==
		       KVC_EXTENT_MAPPED;
}

static u32 first_unmapped(const struct kvc_pool *pool, const struct kv_grant *pages,
			  u32 nr, size_t stride)
{
	for (u32 i = 0; i < nr; i++) {
		const struct kv_grant *g = (const void *)((const u8 *)pages + i * stride);

		if (!pfn_mapped(pool, g->pfn))
			return i;
	}
	return nr;
}

/**
 * kvc_pages_mapped() - no page goes to the caller whose extent is not mapped
 * @pages: @nr grants, @stride bytes apart
 *
 * kvmd sends EXTENT_ADDED before it completes the request that uses the extent, so one
 * look at the socket must be enough.
 *
 * Context: no lock held; may wait for steps of a lost connection, and for a kvmd that went
 *	between its answer and now, up to the timeout.
 * Return: 0; -ENOMEM the mapping fails; -EPROTO kvmd did not send the extent; -ETIMEDOUT,
 *	also when the pages went with their session.
 */
int kvc_pages_mapped(struct kvc_pool *pool, const struct kv_grant *pages, u32 nr,
		     size_t stride)
{
	struct kvc *c = pool->c;
	bool lost = false;
	u64 deadline_ns;
	u32 i;
	int r;

	if (first_unmapped(pool, pages, nr, stride) == nr ||
	    KV_MUTANT(accept_unmapped_extent))
		return 0;
	deadline_ns = kvc_deadline(c);
	for (;;) {
		const struct kv_grant *g;
		struct kvc_extent *e = NULL;

		r = kvc_lock_until(&c->lock, deadline_ns);
		if (r)
			return kvc_fail(r, "no time to map an extent");
		r = kvc_sock_read_locked(c);
		kvc_extents_run_locked(pool);
		i = first_unmapped(pool, pages, nr, stride);
		lost |= c->link->dead;
		/* what it had sent went with it: the next one sends it again */
		if (i < nr && c->link->dead && !kvc_link_alive_locked(c, deadline_ns))
			i = first_unmapped(pool, pages, nr, stride);
		g = (const void *)((const u8 *)pages + i * stride);
		if (i < nr && g->pfn < pool->geometry.nr_pages)
			e = &pool->extents[g->pfn >> pool->geometry.shift];
		if (i < nr && e && e->fd >= 0)
			r = e->state == KVC_EXTENT_NONE ? -ENOMEM : -EAGAIN;
		else if (i < nr)
			r = r == -ENOBUFS || r == -EMFILE ? -ENOMEM
			    : lost			  ? -ETIMEDOUT
							  : -EPROTO;
		pthread_mutex_unlock(&c->lock);
		if (i == nr)
			return 0;
		if (r != -EAGAIN)
			return kvc_fail(r, "pfn %u: its extent is not mapped", g->pfn);
		if (kv_now_ns() >= deadline_ns)
			return kvc_fail(
				-ETIMEDOUT,
				"pfn %u: a step of the lost session still runs there",
				g->pfn);
		kvc_sleep_ns(KV_NSEC_PER_MSEC);
	}
}

/* ------------------------------------------------------------------------------ requests
 */

static int ask(struct kvc_pool *pool, struct kvc_req *req, u32 gfp, u64 deadline_ns)
{
	req->gfp = gfp;
	return kvc_call(pool->c, req, deadline_ns);
}

static struct kvc_req alloc_req(struct kvc_pool *pool, u32 nr, struct kv_grant *ret_pages)
{
	return (struct kvc_req){.opcode = KV_OP_ALLOC,
				.pool = pool,
				.nr = nr,
				.ret_bytes = nr * (u32)sizeof(*ret_pages),
				.ret = ret_pages};
}

/* Pages that cannot be used by the caller go back; @r says why. */
static int take_back(struct kvc_pool *pool, const struct kv_grant *pages, u32 nr, int r)
{
	if (kvc_ret_add(pool, pages, nr))
		kvc_log(pool->c, KVC_LOG_ERR, "%u pages are lost: out of memory", nr);
	return r;
}

/* Serve what the magazines hold, the rest by kvmd; else give both back. */
static int alloc_with_stock(struct kvc_pool *pool, u32 nr, u32 gfp,
			    struct kv_grant *ret_pages, int outcome, u64 deadline_ns)
{
	struct kvc_link *link = __atomic_load_n(&pool->c->link, __ATOMIC_ACQUIRE);
	struct kv_grant stock[DRAIN_MAX];
	u32 nr_stock = (u32)kvc_mag_drain(pool, link, stock, DRAIN_MAX);
	u32 use = KV_MIN(nr_stock, nr);
	struct kvc_req rest = alloc_req(pool, nr - use, ret_pages + use);
	int r = 0;

	if (use < nr && use)
		r = ask(pool, &rest, gfp, deadline_ns);
	else if (!use)
		r = outcome;
	if (r) {
		take_back(pool, stock, nr_stock, 0);
	} else {
		memcpy(ret_pages, stock, use * sizeof(*stock));
		take_back(pool, stock + use, nr_stock - use, 0);
	}
	return r;
}

static bool may_come(int r)
{
	return r == KV_FULL || r == KV_QUOTA || r == KV_PENDING;
}

static u32 in_time(u32 gfp, u64 deadline_ns)
{
	return kv_now_ns() + 2 * PARK_NS < deadline_ns ? gfp : gfp & ~KV_GFP_WAIT;
}

/*
 * kvmd may hold a request with WAIT back until pages are freed, and those may be the ones
 * on our own return list: so it is asked without WAIT first, and WAIT is used only after
 * all that may go has been sent. Steps that retire meanwhile free more, hence the
 * repeated sending. Near the deadline WAIT is left out again: kvmd holds a request back
 * for PARK_NS, and an answer that comes too late would be -ETIMEDOUT instead of PENDING.
 * @r: the answer without WAIT.
 */
static int ask_again(struct kvc_pool *pool, struct kvc_req *req, u32 gfp, int r,
		     u64 deadline_ns)
{
	u64 wait_ns = WAIT_MIN_NS;

	if (may_come(r) && kvc_ret_send(pool, 1, deadline_ns) >= 0)
		r = ask(pool, req, in_time(gfp, deadline_ns), deadline_ns);
	while (r == KV_PENDING && (gfp & KV_GFP_WAIT) &&
	       kv_now_ns() + wait_ns + ANSWER_NS < deadline_ns) {
		kvc_sleep_ns(wait_ns);
		wait_ns = KV_MIN(wait_ns * 2, WAIT_MAX_NS);
		kvc_ret_send(pool, 1, deadline_ns);
		r = ask(pool, req, in_time(gfp, deadline_ns), deadline_ns);
	}
	return r;
}

static int alloc_slow(struct kvc_pool *pool, u32 nr, u32 gfp, struct kv_grant *ret_pages)
{
	struct kvc_req req = alloc_req(pool, nr, ret_pages);
	u64 deadline_ns = kvc_deadline(pool->c);
	u32 now = gfp & ~KV_GFP_WAIT;
	int r;

	r = ask(pool, &req, now, deadline_ns);
	if (may_come(r))
		r = alloc_with_stock(pool, nr, now, ret_pages, r, deadline_ns);
	return ask_again(pool, &req, gfp, r, deadline_ns);
}

/**
 * kvc_fork_call() - send FORK as often as an allocation would be sent
 * @req: the request
 * @gfp: as the caller of kvc_fork() has it
 *
 * Stock does not serve it, but is given back before it is refused.
 * Return: as kvc_fork().
 */
int kvc_fork_call(struct kvc_pool *pool, struct kvc_req *req, u32 gfp)
{
	u64 deadline_ns = kvc_deadline(pool->c);
	struct kv_grant stock[DRAIN_MAX];
	struct kvc_link *link;
	int r;

	r = ask(pool, req, gfp & ~KV_GFP_WAIT, deadline_ns);
	link = __atomic_load_n(&pool->c->link, __ATOMIC_ACQUIRE);
	if (may_come(r))
		take_back(pool, stock, (u32)kvc_mag_drain(pool, link, stock, DRAIN_MAX),
			  r);
	return ask_again(pool, req, gfp, r, deadline_ns);
}

int kvc_alloc(struct kvc_pool *pool, uint32_t nr, uint32_t gfp,
	      struct kv_grant *ret_pages)
{
	int r;

	if (kvc_poisoned(pool->c))
		return kvc_fail(-EOWNERDEAD, "the process forked");
	if (!nr || nr > KV_BATCH_MAX)
		return kvc_fail(-EINVAL, "nr=%u: 1 to %u are possible", nr, KV_BATCH_MAX);
	if (gfp & ~KV_GFP_VALID)
		return kvc_fail(-EINVAL, "gfp=0x%x: unknown bits 0x%x", gfp,
				gfp & ~KV_GFP_VALID);
	if (nr != 1 || !mag_alloc(pool, gfp, ret_pages)) {
		r = alloc_slow(pool, nr, gfp, ret_pages);
		if (r)
			return r;
	}
	r = kvc_pages_mapped(pool, ret_pages, nr, sizeof(*ret_pages));
	return r ? take_back(pool, ret_pages, nr, r) : 0;
}
