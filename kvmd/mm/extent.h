/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mm/extent.h - extents of a pool: growing, giving to sessions, taking back (design
 *	section 4).
 *
 *	NONE -> LIVE -> DRAINING -> NONE
 *
 * NONE: index free. LIVE: pages usable. DRAINING: every page was FREE and is ABSENT now;
 *	waits until each session that was given the fd has acknowledged or was reaped. It stays
 *	charged to its domain until then, and its index is not used again before. Loop thread
 *	only.
 */
#ifndef KVD_EXTENT_H
#define KVD_EXTENT_H

#include "kvmd/backend/backend.h"
#include "kvmd/mm/freelist.h"
#include "kvmd/mm/page.h"

enum kvd_extent_state {
	KVD_EXTENT_NONE = 0,
	KVD_EXTENT_LIVE = 1,
	KVD_EXTENT_DRAINING = 2
};

/**
 * struct kvd_extent - one device allocation
 * @serial: never repeats in a pool; 0 = none
 * @handle: backend's
 * @free, @nr_free: FREE pages in it
 * @nr_cached: CACHED pages in it
 * @nr_given: sessions that were given the fd and neither acknowledged nor were reaped
 * @idle_since_ns: all pages FREE since; 0 = not
 * @domain_id: one domain for its whole life (I8)
 * @state: enum kvd_extent_state
 */
struct kvd_extent {
	u64 serial;
	struct kvd_extent_handle handle;
	struct kvd_extent_free free;
	u32 nr_free;
	u32 nr_cached;
	u32 nr_given;
	u64 idle_since_ns;
	u32 domain_id;
	u32 state;
};

/**
 * kvd_geometry_choose() - extents for a page stride
 * @stride_bytes: kv_page_stride()
 * @limits: backend's
 * @ret: all fields; nr_pages covers the backend's capacity
 *
 * pages_per_extent is the power of two whose extent is closest to a small multiple of the
 * smallest extent and wastes less than 3 %; where none does, the one that wastes least.
 *
 * Return: 0; -E2BIG a page does not fit into the largest extent or the capacity.
 */
int kvd_geometry_choose(u64 stride_bytes, const struct kvd_backend_limits *limits,
			struct kv_geometry *ret);

/**
 * kvd_extent_grow() - add one extent to a pool
 *
 * Return: 0; KV_FULL: the capacity is used up or promised to tenants below their min;
 *	KV_PENDING: the backend is not ready, or its size not known; -errno of the backend other
 *	than -ENOMEM, -EAGAIN. On failure nothing changed.
 */
int kvd_extent_grow(struct kvd_pool *pool);

/**
 * kvd_extent_shrink() - start to take back an extent whose pages are all FREE
 *
 * Return: 0; KV_BUSY: a page of it is not FREE, or it is the one of a pool in use
 *	(kvd_backend_one_extent()).
 */
int kvd_extent_shrink(struct kvd_pool *pool, u32 index);

/** kvd_extent_given() - one more session has the fd */
void kvd_extent_given(struct kvd_pool *pool, u32 index);

/** kvd_extent_put() - a session acknowledged the unmap or was reaped; the last one
 * releases a DRAINING extent to the backend */
void kvd_extent_put(struct kvd_pool *pool, u32 index);

/**
 * kvd_extent_word() - what of an extent is persistent, in one word: one store, no tearing
 *
 * Serial, state and a hash of both. It is stored before the records of the extent's pages
 * change, so that an adopting kvmd can finish the job: LIVE, and a page is ABSENT: it
 * becomes FREE; not LIVE, and a page is FREE: it becomes ABSENT.
 */
u64 kvd_extent_word(u64 serial, u32 state);

/** kvd_extent_word_ok() - is it one of ours? 0 is: never used */
bool kvd_extent_word_ok(u64 word);

/** kvd_extent_word_serial(), kvd_extent_word_state() - take it apart */
u64 kvd_extent_word_serial(u64 word);
u32 kvd_extent_word_state(u64 word);

/**
 * kvd_extent_adopt() - extent @index of an adopted pool, from its word
 * @fd: kept by the keeper, or -1: it is lost
 *
 * Return: 0; -ENODATA it had to be given up: its pages are ABSENT; the fd is the
 * caller's.
 */
int kvd_extent_adopt(struct kvd_pool *pool, u32 index, int fd);

/** kvd_extent_adopt_done() - all adopted sessions are attached: DRAINING extents that
 * nobody has any more go */
void kvd_extent_adopt_done(struct kvd_pool *pool);

#endif /* KVD_EXTENT_H */
