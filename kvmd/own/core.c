/* SPDX-License-Identifier: Apache-2.0 */
/*
 * own/core.c - the core of one loop: set-up, the turn, what is done once a second. See
 * core.h.
 *
 * Loop thread only.
 */
#include "kvmd/own/core.h"
#include <errno.h>
#include <string.h>
#include "base/clock.h"
#include "kvmd/own/image.h"

#define GRACE_POLL_NS (10 * KV_NSEC_PER_MSEC)

/* hook of mm/: @r is embedded in its session */
static void core_stalled(struct kvd_mm *mm, struct kvd_reader *r)
{
	struct kvd_core *core = kvd_core_of(mm);
	struct kvd_session *s = kv_container_of(r, struct kvd_session, reader);

	core->cfg.notify->stalled(core->cfg.notify_arg, s, mm->now_ns - r->busy_since_ns);
}

static const struct kvd_mm_ops core_mm_ops = {
	.released = kvd_lease_released,
	.seal_done = kvd_prefix_seal_done,
	.evict = kvd_spill_evict,
	.may_grow = kvd_domain_may_grow,
	.may_shrink = kvd_domain_may_shrink,
	.extent_live = kvd_session_extent_live,
	.extent_draining = kvd_session_extent_draining,
	.extent_gone = kvd_session_extent_gone,
	.stalled = core_stalled,
};

static void config_check(const struct kvd_core_config *cfg)
{
	const struct kvd_notify *n = cfg->notify;

	kv_assert(cfg->env->region_alloc && cfg->env->region_free && cfg->env->save &&
		  cfg->env->log);
	kv_assert(n->extent_added && n->extent_removed && n->revoked && n->pressure);
	kv_assert(n->pages_freed && n->stalled && n->session_reaped);
	kvd_backend_check(cfg->backend);
}

int kvd_core_init(struct kvd_core *core, const struct kvd_core_config *cfg)
{
	struct kvd_mm *mm = &core->mm;

	if (!cfg->table_epoch)
		return -EINVAL;
	config_check(cfg);
	memset(core, 0, sizeof(*core));
	core->cfg = *cfg;
	core->image = cfg->image;
	mm->keep = cfg->keep;
	mm->undo = cfg->image ? &cfg->image->undo : NULL;
	if (!core->cfg.stall_ns)
		core->cfg.stall_ns = 10 * KV_NSEC_PER_SEC;
	if (!core->cfg.idle_shrink_ns)
		core->cfg.idle_shrink_ns = 60 * KV_NSEC_PER_SEC;
	list_init(&core->sessions);
	mm->env = cfg->env;
	mm->ops = &core_mm_ops;
	mm->backend = cfg->backend;
	mm->table_epoch = cfg->table_epoch;
	mm->stall_ns = core->cfg.stall_ns;
	cfg->backend->ops->limits(cfg->backend, &mm->limits);
	if (cfg->capacity_bytes)
		mm->limits.capacity_bytes =
			KV_MIN(mm->limits.capacity_bytes, cfg->capacity_bytes);
	kvd_gens_init(&mm->gens, cfg->gen_source);
	return kvd_grace_init(mm, cfg->saved_grace);
}

/* Everything CACHED goes, so that pools can be destroyed. */
static void pools_empty(struct kvd_core *core)
{
	struct kvd_evicted evicted;

	for (u32 i = 0; i < KVD_DOMAINS_MAX; i++) {
		if (core->domains[i])
			kvd_domain_evict(core, core->domains[i], false, &evicted);
	}
}

void kvd_core_fini(struct kvd_core *core)
{
	struct kvd_session *s;

	list_for_each_entry (s, &core->sessions, node)
		kvd_session_work_ended(s);
	while (kvd_session_turn(core))
		;
	kv_assert(list_empty(&core->sessions));
	while (kvd_grace_nr_waiting(&core->mm.grace))
		kvd_grace_advance(&core->mm);
	pools_empty(core);
	while (kvd_grace_nr_waiting(&core->mm.grace))
		kvd_grace_advance(&core->mm);
	for (u32 i = 0; i < KVD_TENANTS_MAX; i++) {
		if (core->tenants[i])
			kv_assert(kvd_tenant_destroy(core, core->tenants[i]) == 0);
	}
	for (u32 i = 0; i < KVD_DOMAINS_MAX; i++) {
		if (core->domains[i])
			kv_assert(kvd_domain_destroy(core, core->domains[i]) == 0);
	}
	kv_assert(core->mm.extent_bytes_used == 0);
}

void kvd_core_now(struct kvd_core *core, u64 now_ns)
{
	core->mm.now_ns = KV_MAX(core->mm.now_ns, now_ns);
}

/* A whole extent that has been FREE for long goes back, but one is kept for the next
 * burst. */
static void pool_shrink_idle(struct kvd_core *core, struct kvd_pool *pool)
{
	u32 idle = 0;

	for (u32 i = pool->nr_extents; i-- > 0;) {
		struct kvd_extent *e = &pool->extents[i];

		if (e->state != KVD_EXTENT_LIVE || e->nr_free != 1u << pool->geo.shift)
			continue;
		if (core->mm.now_ns - e->idle_since_ns < core->cfg.idle_shrink_ns)
			continue;
		if (idle++ || !pool->nr_sessions)
			kv_assert(kvd_extent_shrink(pool, i) == 0);
	}
}

static u32 pool_pressure(const struct kvd_pool *pool)
{
	const struct kvd_mm *mm = pool->mm;

	/* Held for a while: sessions are told of a state, not of every refusal. */
	if (pool->starved_ns && mm->now_ns - pool->starved_ns < KV_NSEC_PER_SEC)
		return 2;
	if (pool->nr[KVD_FREE] < pool->low_pages && mm->limits.capacity_bytes &&
	    mm->extent_bytes_used + pool->geo.extent_bytes > mm->limits.capacity_bytes)
		return 1;
	return 0;
}

static void pressure_tell(struct kvd_core *core, struct kvd_pool *pool)
{
	u32 level = pool_pressure(pool);
	struct kvd_session *s;

	if (level == pool->pressure)
		return;
	pool->pressure = level;
	list_for_each_entry (s, &core->sessions, node) {
		if (s->state == KVD_SESSION_LIVE && kvd_session_attach(s, pool->id))
			core->cfg.notify->pressure(core->cfg.notify_arg, s, pool, level);
	}
}

static void pools_turn(struct kvd_core *core)
{
	for (u32 i = 0; i < core->mm.pools_end; i++) {
		struct kvd_pool *pool = core->mm.pools[i];

		if (!pool)
			continue;
		pressure_tell(core, pool);
		if (pool->starved && pool->nr[KVD_FREE]) {
			pool->starved = false;
			core->cfg.notify->pages_freed(core->cfg.notify_arg, pool,
						      pool->nr[KVD_FREE]);
		}
	}
}

static void second_turn(struct kvd_core *core)
{
	if (core->mm.now_ns - core->second_ns < KV_NSEC_PER_SEC)
		return;
	core->second_ns = core->mm.now_ns;
	kvd_pressure_turn(core);
	for (u32 i = 0; i < KVD_POOLS_MAX; i++) {
		if (core->mm.pools[i])
			pool_shrink_idle(core, core->mm.pools[i]);
	}
}

/* Also for those whose wait ended between two turns: in an allocation, or by a revoke. */
static void stalls_turn(struct kvd_core *core)
{
	struct kvd_mm *mm = &core->mm;
	bool waits = kvd_grace_nr_waiting(&mm->grace) != 0;

	if (!waits && core->calm_scans == mm->grace.scans)
		return;
	for (u32 i = 0; i < core->domains_end; i++) {
		if (core->domains[i])
			kvd_grace_stalls(mm, &core->domains[i]->group);
	}
	if (!waits)
		core->calm_scans = mm->grace.scans;
}

u64 kvd_core_run(struct kvd_core *core)
{
	struct kvd_mm *mm = &core->mm;
	bool more = kvd_session_turn(core);

	more |= kvd_grace_turn(mm);
	if (kvd_reclaim_run(mm))
		more = true;
	if (!list_empty(&mm->grace.open))
		more |= kvd_grace_turn(mm);
	stalls_turn(core);
	pools_turn(core);
	second_turn(core);
	if (more)
		return mm->now_ns;
	return kvd_grace_nr_waiting(&mm->grace) ? mm->now_ns + GRACE_POLL_NS
						: KVD_CORE_IDLE;
}

void kvd_stat(const struct kvd_session *s, const struct kvd_attach *a,
	      struct kv_stat *ret)
{
	const struct kvd_pool *pool = a->pool;

	ret->nr_pages_max = pool->geo.nr_pages;
	ret->nr_pages = pool->geo.nr_pages - pool->nr[KVD_ABSENT];
	ret->nr_free = pool->nr[KVD_FREE];
	ret->nr_active = pool->nr[KVD_ACTIVE];
	ret->nr_sealed = pool->nr[KVD_SEALED];
	ret->nr_cached = pool->nr[KVD_CACHED];
	/* Also what is on its way to or from a tier: counts sum to nr_pages. */
	ret->nr_quarantine = pool->nr[KVD_QUARANTINE] + pool->nr[KVD_SPILLING] +
			     pool->nr[KVD_RESTORING];
	ret->nr_magazine = pool->nr[KVD_MAGAZINE];
	ret->tenant_used_bytes = s->tenant->account.used_bytes;
	ret->tenant_max_bytes = s->tenant->account.max_bytes;
	ret->lookups = pool->nr_lookups;
	ret->hits = pool->nr_hits;
}
