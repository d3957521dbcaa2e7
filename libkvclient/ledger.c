/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ledger.c - references the application holds, page by page, so that a session can be
 * taken up again after kvmd was restarted.
 *
 * kvmd sends what it knows of the session (KV_MSG_LEASES). What it knows and the ledger
 * does not is the answer to a request that never arrived: it is freed. What the ledger
 * knows and kvmd does not was lost (damage): the application is told by REVOKE.
 *
 * A reference is entered before anybody else can see that kvmd has given it: by the call
 * that asked for it while it still counts as a user of its link, or before the
 * compare-and-swap that takes it out of a magazine. It is taken out when FREE has been sent.
 * kvc_ledger_leases() runs when no call uses the old link any more.
 *
 * Threads: entries are changed by compare-and-swap, without a lock.
 */
#include "internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define NR_MASK	 0xffffull
#define GEN_MASK ((1ull << 48) - 1)

/* Low 48 bits of the generation, and how many references. */
static u64 entry_of(u64 tag, u64 nr)
{
	return (kv_tag_gen(tag) & GEN_MASK) << 16 | nr;
}

static bool same_gen(u64 entry, u64 tag)
{
	return entry >> 16 == (kv_tag_gen(tag) & GEN_MASK);
}

/** kvc_ledger_init() - for a pool whose geometry is known. Return: 0; -ENOMEM */
int kvc_ledger_init(struct kvc_pool *pool)
{
	pool->ledger = calloc(pool->geometry.nr_pages, sizeof(*pool->ledger));
	pool->ledger_tags = calloc(pool->geometry.nr_pages, sizeof(u64));
	if (!pool->ledger || !pool->ledger_tags)
		return kvc_fail(-ENOMEM, "out of memory");
	return 0;
}

/*
 * Has the page been given anew since @tag? Who enters late (a pop that a recall has beaten,
 * an answer whose thread was held up) finds it so, and must not hide who holds it now.
 */
static bool is_older(u64 tag, u64 entry)
{
	u64 ahead = ((entry >> 16) - kv_tag_gen(tag)) & GEN_MASK;

	return entry && ahead && ahead <= GEN_MASK / 2 && !KV_MUTANT(older_hides_newer);
}

/** kvc_hold() - one more reference; an older generation's are gone by then */
void kvc_hold(struct kvc_pool *pool, u32 pfn, u64 tag)
{
	u64 old, new;

	if (pfn >= pool->geometry.nr_pages)
		return;
	do {
		old = kv_load_relaxed64(&pool->ledger[pfn]);
		if (is_older(tag, old))
			return;
		__atomic_store_n(&pool->ledger_tags[pfn], tag, __ATOMIC_RELAXED);
		new = same_gen(old, tag) ? old + ((old & NR_MASK) != NR_MASK)
					 : entry_of(tag, 1);
	} while (!kv_cas64(&pool->ledger[pfn], old, new));
}

/*
 * The first reference to a generation that this process was just given: nobody else can
 * enter it, and who still takes out the generation before it compares before it swaps. So
 * a store will do, of which a hundred cost what ten swaps cost.
 */
static void hold_first(struct kvc_pool *pool, u32 pfn, u64 tag)
{
	if (pfn >= pool->geometry.nr_pages ||
	    is_older(tag, kv_load_relaxed64(&pool->ledger[pfn])))
		return;
	__atomic_store_n(&pool->ledger_tags[pfn], tag, __ATOMIC_RELAXED);
	kv_store_relaxed64(&pool->ledger[pfn], entry_of(tag, 1));
}

/** kvc_unhold() - one less, if it is still that generation */
void kvc_unhold(struct kvc_pool *pool, u32 pfn, u64 tag)
{
	u64 old;

	if (pfn >= pool->geometry.nr_pages)
		return;
	do {
		old = kv_load_relaxed64(&pool->ledger[pfn]);
		if (!same_gen(old, tag) || !(old & NR_MASK))
			return;
	} while (!kv_cas64(&pool->ledger[pfn], old, old - 1));
}

/** kvc_ledger_revoked() - kvmd took it from every holder */
void kvc_ledger_revoked(struct kvc_pool *pool, u32 pfn, u64 tag)
{
	u64 old;

	if (pfn >= pool->geometry.nr_pages)
		return;
	do {
		old = kv_load_relaxed64(&pool->ledger[pfn]);
		if (!same_gen(old, tag))
			return;
	} while (!kv_cas64(&pool->ledger[pfn], old, 0));
}

/** kvc_ledger_clear() - the session is gone, and all its leases */
void kvc_ledger_clear(struct kvc_pool *pool)
{
	for (u32 i = 0; pool->ledger && i < pool->geometry.nr_pages; i++)
		__atomic_store_n(&pool->ledger[i], 0, __ATOMIC_RELAXED);
}

/** kvc_ledger_answered() - a request was answered with 0: enter what it brought */
void kvc_ledger_answered(const struct kvc_req *req)
{
	const struct kv_grant *grants = req->ret;
	const struct kv_hit *hits = req->ret;

	switch (req->opcode) {
	case KV_OP_PIN:
		grants = req->src;
		for (u32 i = 0; i < req->nr && grants; i++)
			kvc_hold(req->pool, grants[i].pfn, grants[i].tag);
		return;
	case KV_OP_ALLOC:
	case KV_OP_FORK:
		for (u32 i = 0; i < req->nr && grants; i++)
			hold_first(req->pool, grants[i].pfn, grants[i].tag);
		return;
	case KV_OP_LOOKUP:
		for (u32 i = 0; i < req->ret_nr && hits; i++)
			kvc_hold(req->pool, hits[i].grant.pfn, hits[i].grant.tag);
		return;
	default:
		return;
	}
}

/** kvc_ledger_freeing() - FREE was sent, and its caller still uses the link */
void kvc_ledger_freeing(const struct kvc_req *req)
{
	const struct kv_page_ref *refs = req->src;

	for (u32 i = 0; i < req->nr; i++)
		kvc_unhold(req->pool, refs[i].pfn, refs[i].tag);
}

/* ----------------------------------------------------------------------- after a restart
 */

struct surplus {
	struct kvc_pool *pool;
	struct kvc_link *link;
	u32 nr;
	struct kv_page_ref refs[KVC_FREE_SEND_MAX];
};

/* A ring without room keeps them for the return list. */
static void surplus_send(struct surplus *s)
{
	struct kvc_req req = {.opcode = KV_OP_FREE,
			      .pool = s->pool,
			      .nr = s->nr,
			      .arg_bytes = s->nr * (u32)sizeof(s->refs[0]),
			      .src = s->refs};

	if (s->nr && kvc_ring_post(s->link, &req, KVC_FREE_ASYNC)) {
		for (u32 i = 0; i < s->nr; i++) {
			struct kv_grant g = {.pfn = s->refs[i].pfn,
					     .tag = s->refs[i].tag};

			kvc_hold(s->pool, g.pfn, g.tag);
			if (kvc_ret_add(s->pool, &g, 1))
				kvc_log(s->pool->c, KVC_LOG_ERR, "pfn %u is lost", g.pfn);
		}
	}
	s->nr = 0;
}

static void page_lost(struct kvc_pool *pool, u32 pfn, u64 old, u32 refs)
{
	struct kv_page_ref ref = {.pfn = pfn, .tag = pool->ledger_tags[pfn]};

	if (!kv_cas64(&pool->ledger[pfn], old, refs ? (old & ~NR_MASK) | refs : 0))
		return; /* changed meanwhile: its owner frees it, and is told STALE */
	if (!refs)
		kvc_event_queue_locked(pool->c, KV_MSG_REVOKE, pool, 1, &ref);
}

static void page_compare(struct surplus *s, u32 pfn)
{
	const struct kv_lease *kvmd = &s->pool->leases[pfn];
	u64 mine = kv_load_relaxed64(&s->pool->ledger[pfn]);
	u32 nr = mine & NR_MASK, have = kvmd->refs;

	if (kvmd->flags & KV_LEASE_STOCKED)
		return; /* in a magazine, or just popped by one of our threads */
	if (nr && !(have && same_gen(mine, kvmd->tag))) {
		page_lost(s->pool, pfn, mine, 0);
		nr = 0;
	} else if (nr > have) {
		page_lost(s->pool, pfn, mine, have);
		nr = have;
	}
	for (u32 extra = KV_MUTANT(keep_surplus) ? 0 : have - nr; extra > 0; extra--) {
		s->refs[s->nr++] = (struct kv_page_ref){.pfn = pfn, .tag = kvmd->tag};
		if (s->nr == KVC_FREE_SEND_MAX)
			surplus_send(s);
	}
}

static void compare(struct kvc_pool *pool)
{
	struct surplus s = {.pool = pool, .link = pool->c->link};

	for (u32 pfn = 0; pfn < pool->geometry.nr_pages; pfn++)
		if (pool->ledger[pfn] || pool->leases[pfn].refs)
			page_compare(&s, pfn);
	surplus_send(&s);
	free(pool->leases);
	pool->leases = NULL;
	pool->leases_due = false;
	kvc_extents_sweep_locked(pool);
}

/**
 * kvc_ledger_leases() - a LEASES message
 * @pool: NULL for KV_LEASES_OPEN
 *
 * Context: kvc.lock, and no call uses the old link.
 * Return: 0; -EPROTO; -ENOMEM.
 */
int kvc_ledger_leases(struct kvc *c, struct kvc_pool *pool, const struct kv_msg_leases *m)
{
	const struct kv_lease *leases = (const void *)(m + 1);

	if (m->msg.size_bytes < sizeof(*m) || m->nr > KV_BATCH_MAX || m->reserved ||
	    m->msg.size_bytes != sizeof(*m) + m->nr * sizeof(*leases))
		return kvc_fail(-EPROTO, "leases: %u bytes", m->msg.size_bytes);
	if (m->flags & KV_LEASES_OPEN) {
		if (c->nr_known < KV_POOLS_MAX)
			c->known[c->nr_known++] = m->pool_id;
		return 0;
	}
	if (!pool || !pool->leases_due)
		return kvc_fail(-EPROTO, "leases: pool %u did not ask", m->pool_id);
	if (!pool->leases)
		pool->leases = calloc(pool->geometry.nr_pages, sizeof(*leases));
	if (!pool->leases)
		return kvc_fail(-ENOMEM, "out of memory");
	for (u32 i = 0; i < m->nr; i++) {
		if (leases[i].pfn >= pool->geometry.nr_pages)
			return kvc_fail(-EPROTO, "leases: pfn=%u", leases[i].pfn);
		pool->leases[leases[i].pfn] = leases[i];
	}
	if (m->flags & KV_LEASES_LAST)
		compare(pool);
	return 0;
}

/**
 * kvc_leases_wait_locked() - on a session that was taken up, kvmd says what it knows: the
 * pool is not used before
 */
int kvc_leases_wait_locked(struct kvc_pool *pool, struct kvc_link *link, u64 deadline_ns)
{
	struct kvc_msg_in *in = pool->c->msg;
	int r = 0;

	free(pool->leases);
	pool->leases = NULL;
	for (u32 i = 0; i < pool->nr_extents; i++)
		pool->extents[i].seen = false;
	pool->leases_due = true;
	pool->c->attaching = pool;
	while (!r && pool->leases_due) {
		r = kvc_sock_recv_until(link->sock, in, deadline_ns);
		if (r)
			break;
		r = kvc_msg_handle_locked(pool->c, in);
		kvc_msg_close_fds(in);
	}
	pool->c->attaching = NULL;
	if (!r)
		return 0;
	kvc_link_dead_locked(link, r);
	return kvc_fail(r == -EPROTO ? r : -ECONNRESET, "leases: %s", strerror(-r));
}
