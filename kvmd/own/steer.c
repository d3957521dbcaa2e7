/* SPDX-License-Identifier: Apache-2.0 */
/* own/steer.c - an operator's changes to pages and tenants. See steer.h. Loop thread only. */
#include "kvmd/own/steer.h"
#include <errno.h>
#include <stdlib.h>
#include "base/mutant.h"
#include "kvmd/own/core.h"

/* --------------------------------------------------------------------- hold */

/* A CACHED page changes its list with the mark, so it is taken off and put back. */
static void mark(struct kvd_pool *pool, u32 pfn, bool held)
{
	struct kvd_frame *f = &pool->frames[pfn];
	bool cached = f->state == KVD_CACHED;

	if (cached)
		kvd_lru_del(pool, pfn);
	kvd_frame_touch(pool, pfn);
	if (held)
		f->flags |= KVD_FRAME_HELD;
	else
		f->flags &= (u8)~KVD_FRAME_HELD;
	kvd_frame_set(pool, pfn, f->state, held ? KVD_EV_HOLD : KVD_EV_UNHOLD, 0);
	if (cached)
		kvd_lru_add(pool, pfn);
}

int kvd_steer_hold(struct kvd_pool *pool, u32 pfn, bool dry_run, u32 *ret_nr)
{
	u32 steps = 0;

	if (pfn >= pool->geo.nr_pages || !(pool->frames[pfn].flags & KVD_FRAME_INDEXED))
		return -ENOENT;
	*ret_nr = 0;
	for (; pfn != KVD_PFN_NONE && steps < pool->geo.nr_pages; steps++) {
		if (!(pool->frames[pfn].flags & KVD_FRAME_HELD)) {
			(*ret_nr)++;
			if (!dry_run)
				mark(pool, pfn, true);
		}
		pfn = kvd_prefix_parent(pool, pfn);
	}
	return 0;
}

int kvd_steer_unhold(struct kvd_pool *pool, u32 pfn, bool dry_run, u32 *ret_nr)
{
	u32 nr_pages = pool->geo.nr_pages, *children, parent;

	if (pfn >= nr_pages || !(pool->frames[pfn].flags & KVD_FRAME_HELD))
		return -ENOENT;
	children = calloc(nr_pages, sizeof(*children));
	if (!children)
		return -ENOMEM;
	for (u32 i = 0; i < nr_pages; i++) {
		if (!(pool->frames[i].flags & KVD_FRAME_HELD))
			continue;
		parent = kvd_prefix_parent(pool, i);
		if (parent != KVD_PFN_NONE)
			children[parent]++;
	}
	*ret_nr = 0;
	while (pfn != KVD_PFN_NONE && !children[pfn] && *ret_nr < nr_pages) {
		parent = kvd_prefix_parent(pool, pfn);
		(*ret_nr)++;
		if (!dry_run)
			mark(pool, pfn, false);
		if (parent != KVD_PFN_NONE)
			children[parent]--;
		pfn = parent;
	}
	free(children);
	return 0;
}

/* -------------------------------------------------------------------- drain */

static void recall(struct kvd_core *core, struct kvd_tenant *t)
{
	struct kvd_session *s;

	list_for_each_entry (s, &core->sessions, node) {
		if (s->tenant == t && s->state == KVD_SESSION_LIVE)
			kvd_lease_mags_recall(s, NULL);
	}
}

static u32 evict(struct kvd_core *core, struct kvd_tenant *t, bool dry_run)
{
	u64 later_bytes = 0;
	u32 nr = 0;

	for (u32 p = 0; p < KVD_POOLS_MAX; p++) {
		struct kvd_pool *pool = core->mm.pools[p];

		if (!pool || pool->domain_id != t->account.domain_id)
			continue;
		if (dry_run) {
			nr += kvd_lru_nr(&pool->lru[t->account.slot]);
			continue;
		}
		nr += kvd_reclaim_pool(pool, t->index, pool->geo.nr_pages, true);
		/* A tier takes a part of a pool at a time. */
		if (pool->evict_again)
			later_bytes += kvd_lru_nr(&pool->lru[t->account.slot]) *
				       pool->geo.stride_bytes;
	}
	if (later_bytes) {
		t->account.reclaim_debt = KV_MAX(t->account.reclaim_debt, later_bytes);
		core->mm.own_debts = true;
	}
	return nr;
}

void kvd_steer_drain(struct kvd_core *core, struct kvd_tenant *t, bool on, bool dry_run,
		     struct kvd_drained *ret)
{
	*ret = (struct kvd_drained){.sessions = t->nr_sessions};
	if (!dry_run)
		t->account.draining = on;
	if (on && !dry_run)
		recall(core, t);
	if (on)
		ret->evicted = evict(core, t, dry_run);
	for (u32 s = 0; s < KVD_FRAME_STATES; s++)
		ret->left_pages += t->account.nr[s];
	if (on && dry_run)
		ret->left_pages -= ret->evicted;
}

/* ------------------------------------------------------------------- limits */

const char *kvd_steered_str(enum kvd_steered s)
{
	static const char *const names[] = {"applied", "deferred", "stale", "conflict"};

	return s < KV_ARRAY_SIZE(names) ? names[s] : "?";
}

enum kvd_steered kvd_steer_limits(struct kvd_core *core, struct kvd_tenant *t,
				  const struct kvd_limits *limits, u64 revision,
				  bool dry_run, const char **ret_field)
{
	bool deferred;

	if (revision != t->revision && !KV_MUTANT(stale_limits))
		return KVD_STEER_STALE;
	if (kvd_limits_check(core, t, limits, ret_field))
		return KVD_STEER_CONFLICT;
	if (dry_run)
		return t->account.used_bytes > limits->max_bytes ? KVD_STEER_DEFERRED
								 : KVD_STEER_APPLIED;
	kv_assert(!kvd_tenant_set_limits(core, t, limits, &deferred));
	return deferred ? KVD_STEER_DEFERRED : KVD_STEER_APPLIED;
}
