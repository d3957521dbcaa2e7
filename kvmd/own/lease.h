/* SPDX-License-Identifier: Apache-2.0 */
/*
 * own/lease.h - leases: alloc, free, pin, revoke, magazines.   (tour 5/12, 11/12)
 *
 * A lease is (pfn, tag, mode) held by a session; references are counted per lease. ACTIVE
 * pages have one holder, the writer. A page is named by (pfn, generation); a page that
 * was never there, is gone, or belongs to somebody else gives the same answer, KV_STALE,
 * in the same time. Nothing here allocates memory. Loop thread only.
 */
#ifndef KVD_LEASE_H
#define KVD_LEASE_H

#include "kvmd/own/session.h"

/**
 * kvd_lease_alloc() - get pages, all or nothing
 * @a: session in pool
 * @nr: 1..KV_BATCH_MAX
 * @gfp: KV_GFP_*, checked by the caller
 * @ret_grants: [nr]; untouched unless 0
 * @ret_pending: KV_PENDING: pages in quarantine or on their way there
 *
 * free list -> grow -> reclaim (with KV_GFP_WAIT) -> outcome.
 *
 * Return: 0; KV_QUOTA; KV_FULL; KV_PENDING; -EINVAL nr; -EOVERFLOW generations are used
 *	up; -errno of the save hook or the backend. On anything but 0 nothing changed for the
 *	caller.
 */
int kvd_lease_alloc(struct kvd_session *s, struct kvd_attach *a, u32 nr, u32 gfp,
		    struct kv_grant *ret_grants, u32 *ret_pending);

/**
 * kvd_lease_stock() - fill a magazine of the session page
 * @mag: index; the magazine is tied to the pool of its first stock until it is empty
 * @nr: pages wanted; fewer may be stocked
 * @ret_nr: pages stocked, when 0
 *
 * Return: 0 (ret_nr >= 1, or the magazine was full); as kvd_lease_alloc(); -EINVAL @mag,
 *	or it holds pages of another pool.
 */
int kvd_lease_stock(struct kvd_session *s, struct kvd_attach *a, u32 mag, u32 nr, u32 gfp,
		    u32 *ret_nr, u32 *ret_pending);

/**
 * kvd_lease_recall() - take stocked pages of all sessions of a pool back (pressure)
 *
 * Return: pages recalled; they are in quarantine.
 */
u32 kvd_lease_recall(struct kvd_pool *pool);

/**
 * kvd_lease_free() - drop one reference of each page; FREE and UNPIN
 * @refs: [nr], each on its own
 * @ret_nr: pages whose reference was dropped
 * @ret_first: index of the first stale one, or @nr
 *
 * The last reference of an ACTIVE page kills it; of a SEALED one makes it CACHED, or
 *	kills it if it is not in the index.
 *
 * Return: 0; KV_STALE at least one was not held with that generation; -EINVAL a pfn is
 *	out of range or a reserved field is set: then nothing was done.
 */
int kvd_lease_free(struct kvd_session *s, struct kvd_attach *a,
		   const struct kv_page_ref *refs, u32 nr, u32 *ret_nr, u32 *ret_first);

/**
 * kvd_lease_pin() - one more reference to pages the session holds, all or nothing
 *
 * Return: 0; KV_STALE: none was pinned; -EINVAL as above; -EOVERFLOW KVD_LEASE_REFS_MAX.
 */
int kvd_lease_pin(struct kvd_session *s, struct kvd_attach *a,
		  const struct kv_page_ref *refs, u32 nr);

/** kvd_lease_holds() - does the session hold this generation? A popped magazine page
 * counts and is made ACTIVE */
bool kvd_lease_holds(struct kvd_session *s, struct kvd_attach *a, u32 pfn, u64 tag);

/**
 * kvd_lease_get() - one more reference of @s to a page that is SEALED or CACHED (lookup)
 * Return: 0; -EOVERFLOW.
 */
int kvd_lease_get(struct kvd_session *s, struct kvd_attach *a, u32 pfn, u32 event);

/** kvd_lease_hold() - note a reference of the session; the record's count is the caller's
 */
static inline void kvd_lease_hold(struct kvd_attach *a, u32 pfn)
{
	kvd_crash_point();
	if (a->refs[pfn]++ == 0) {
		a->held[pfn / 64] |= 1ull << (pfn % 64);
		a->nr_held++;
	}
}

/** kvd_lease_popped() - the session took the page of this slot out of its magazine */
void kvd_lease_popped(struct kvd_session *s, struct kvd_magazine *m, u32 slot);

/** kvd_lease_mags_recall() - take back what is stocked at a session, of @pool or of all
 * (NULL); popped pages become ACTIVE. Return: pages recalled */
u32 kvd_lease_mags_recall(struct kvd_session *s, const struct kvd_pool *pool);

/* A session that asked for nothing for so long is idle. */
#define KVD_STOCK_IDLE_NS 250000000ull

/**
 * kvd_lease_recall_idle() - take stock from idle sessions of all pools and domains
 *
 * A few stocked pages can hold the extents that @for_pool could grow by. Return: pages.
 */
u32 kvd_lease_recall_idle(struct kvd_pool *for_pool);

/**
 * kvd_lease_drop_some() - a session ends or closes a pool: its references there go
 * @budget: most pages in this call
 *
 * Return: pages dropped; less than @budget: nothing is left.
 */
u32 kvd_lease_drop_some(struct kvd_session *s, struct kvd_attach *a, u32 event,
			u32 budget);

/**
 * kvd_lease_revoke() - kill a page whoever holds it
 *
 * Each holder gets notify->revoked(). Return: 0; KV_STALE the page is not ACTIVE, SEALED,
 * CACHED or MAGAZINE, or has another generation than @tag (0 = any).
 */
int kvd_lease_revoke(struct kvd_pool *pool, u32 pfn, u64 tag);

/** kvd_lease_released() - kvd_mm_ops.released */
void kvd_lease_released(struct kvd_pool *pool, u32 tenant, u32 nr);

#endif /* KVD_LEASE_H */
