/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ipc/admin_mm.c - the admin verbs that show memory as the kernel's files do: meminfo,
 * slabinfo, vmstat, pressure, pagemap. They only look.
 *
 * Bytes are integers, times nanoseconds, shares parts per million. Loop thread only.
 */
#include <errno.h>
#include <string.h>

#include "kvmd/ipc/admin_priv.h"
#include "kvmd/own/core.h"

#define RUNS_LIMIT 16384u

/* ------------------------------------------------------------------ meminfo */

static void add_bytes_by_state(cJSON *out, const struct kvd_mm *mm)
{
	u64 bytes[KVD_FRAME_STATES] = {0};
	char name[24];
	u32 i, s;

	for (i = 0; i < KVD_POOLS_MAX; i++)
		for (s = 0; mm->pools[i] && s < KVD_FRAME_STATES; s++)
			bytes[s] += mm->pools[i]->nr[s] * mm->pools[i]->geo.stride_bytes;
	for (s = 0; s < KVD_FRAME_STATES; s++) {
		if (s == KVD_ABSENT)
			continue;
		kvd_admin_lower(kvd_frame_state_str(s), name, sizeof(name) - 6);
		strcat(name, "_bytes");
		kvd_admin_u64(out, name, bytes[s]);
	}
}

/* Bytes that the extents have beyond their pages: the last page does not end with them. */
static u64 padding(const struct kvd_mm *mm)
{
	u64 bytes = 0;

	for (u32 i = 0; i < KVD_POOLS_MAX; i++) {
		const struct kvd_pool *pool = mm->pools[i];

		if (pool)
			bytes += pool->nr_live_extents *
				 (pool->geo.extent_bytes -
				  (pool->geo.stride_bytes << pool->geo.shift));
	}
	return bytes;
}

int kvd_admin_meminfo(struct kvd_admin_call *call)
{
	struct kvd_core *core = &call->kvd->core;
	u64 capacity = core->mm.limits.capacity_bytes, used = core->mm.extent_bytes_used;
	cJSON *out = cJSON_AddObjectToObject(call->out, "memory");
	u64 spare = 0, stride;
	u32 i;

	for (i = 0; i < KVD_POOLS_MAX; i++) {
		const struct kvd_pool *pool = core->mm.pools[i];

		if (!pool)
			continue;
		stride = pool->geo.stride_bytes;
		spare += pool->nr[KVD_FREE] * stride +
			 kvd_reclaim_available(pool, KVD_TENANTS_MAX) * stride;
	}
	kvd_admin_u64(out, "total_bytes", capacity);
	kvd_admin_u64(out, "unused_bytes", capacity - KV_MIN(capacity, used));
	/* what new pages could use without harm to a promise, when all is quiet */
	kvd_admin_u64(out, "available_bytes", capacity - KV_MIN(capacity, used) + spare);
	kvd_admin_u64(out, "extent_bytes", used);
	kvd_admin_u64(out, "draining_bytes", core->mm.draining_bytes);
	kvd_admin_u64(out, "padding_bytes", padding(&core->mm));
	kvd_admin_u64(out, "promised_bytes", core->min_bytes_total);
	add_bytes_by_state(out, &core->mm);
	return 0;
}

/* ----------------------------------------------------------------- slabinfo */

static cJSON *slab_json(const struct kvd_core *core, const struct kvd_pool *pool)
{
	u32 per_extent = 1u << pool->geo.shift, full = 0, partial = 0, empty = 0, i;
	const struct kvd_domain *domain = core->domains[pool->domain_id];
	cJSON *o = cJSON_CreateObject();
	u64 needed;

	for (i = 0; i < pool->nr_extents; i++) {
		const struct kvd_extent *e = &pool->extents[i];

		if (e->state != KVD_EXTENT_LIVE)
			continue;
		full += !e->nr_free;
		empty += e->nr_free == per_extent;
		partial += e->nr_free && e->nr_free < per_extent;
	}
	cJSON_AddNumberToObject(o, "pool", pool->id);
	cJSON_AddStringToObject(o, "domain", domain ? domain->name : "?");
	cJSON_AddNumberToObject(o, "active_pages", kvd_pool_nr_used(pool));
	cJSON_AddNumberToObject(o, "pages", pool->geo.nr_pages - pool->nr[KVD_ABSENT]);
	kvd_admin_u64(o, "page_bytes", pool->geo.stride_bytes);
	cJSON_AddNumberToObject(o, "pages_per_extent", per_extent);
	kvd_admin_u64(o, "extent_bytes", pool->geo.extent_bytes);
	cJSON_AddNumberToObject(o, "extents", pool->nr_live_extents);
	cJSON_AddNumberToObject(o, "full", full);
	cJSON_AddNumberToObject(o, "partial", partial);
	cJSON_AddNumberToObject(o, "empty", empty);
	/* memory held for each byte in use: 1.00 is none lost to scatter */
	needed = kv_div_round_up(kvd_pool_nr_used(pool), per_extent);
	if (needed)
		cJSON_AddNumberToObject(o, "spread",
					(double)pool->nr_live_extents / (double)needed);
	else
		cJSON_AddNullToObject(o, "spread");
	cJSON_AddNumberToObject(o, "low_pages", pool->low_pages);
	cJSON_AddNumberToObject(o, "high_pages", pool->high_pages);
	return o;
}

int kvd_admin_slabinfo(struct kvd_admin_call *call)
{
	cJSON *list = cJSON_AddArrayToObject(call->out, "pools");
	const struct kvd_core *core = &call->kvd->core;
	u32 i;

	for (i = 0; i < KVD_POOLS_MAX; i++)
		if (core->mm.pools[i])
			cJSON_AddItemToArray(list, slab_json(core, core->mm.pools[i]));
	return 0;
}

/* ------------------------------------------------------------------- vmstat */

int kvd_admin_vmstat(struct kvd_admin_call *call)
{
	const struct kvd_core *core = &call->kvd->core;
	struct kvd_pool_counters sum = core->mm.gone_counters;
	cJSON *out = cJSON_AddObjectToObject(call->out, "vmstat");
	u32 nr[KVD_FRAME_STATES] = {0}, i, s, stalled = 0, steps = 0;
	const struct kvd_session *session;
	u64 quota = 0, full = 0;

	for (i = 0; i < KVD_POOLS_MAX; i++) {
		const struct kvd_pool *pool = core->mm.pools[i];

		if (!pool)
			continue;
		kvd_pool_count(pool, &sum);
		for (s = 0; s < KVD_FRAME_STATES; s++)
			nr[s] += pool->nr[s];
	}
	for (i = 0; i < KVD_TENANTS_MAX; i++) {
		if (!core->tenants[i])
			continue;
		stalled += core->tenants[i]->pressure.nr_stalled;
		quota += core->tenants[i]->quota_refusals;
		full += core->tenants[i]->full_refusals;
	}
	list_for_each_entry (session, &core->sessions, node)
		steps += (u32)__builtin_popcount(session->reader.busy_slots);
	cJSON_AddNumberToObject(out, "stalled", stalled);
	cJSON_AddNumberToObject(out, "steps", steps);
	kvd_admin_states(out, nr);
	kvd_admin_u64(out, "allocs", sum.nr_allocs);
	kvd_admin_u64(out, "frees", sum.nr_frees);
	kvd_admin_u64(out, "seals", sum.nr_seals);
	kvd_admin_u64(out, "lookups", sum.nr_lookups);
	kvd_admin_u64(out, "hits", sum.nr_hits);
	kvd_admin_u64(out, "evictions", sum.nr_evictions);
	kvd_admin_u64(out, "quota_refusals", quota);
	kvd_admin_u64(out, "full_refusals", full);
	kvd_admin_u64(out, "turns", core->nr_turns);
	kvd_admin_u64(out, "left_pages", core->nr_left_pages);
	kvd_admin_u64(out, "connections_delayed", kvd_stats.connections_delayed);
	kvd_admin_u64(out, "connections_too_fast", kvd_stats.connections_too_fast);
	kvd_admin_u64(out, "grace_epoch", core->mm.grace.epoch);
	kvd_admin_u64(out, "uptime_ms",
		      (call->kvd->now_ns - call->kvd->started_ns) / 1000000);
	return 0;
}

/* ----------------------------------------------------------------- pressure */

int kvd_admin_pressure(struct kvd_admin_call *call)
{
	static const char *const kinds[] = {"some", "full"};
	static const char *const avgs[] = {"avg10_ppm", "avg60_ppm", "avg300_ppm"};
	cJSON *list = cJSON_AddArrayToObject(call->out, "tenants"), *o, *one;
	struct kvd_core *core = &call->kvd->core;
	u32 i, k, a;

	for (i = 0; i < KVD_TENANTS_MAX; i++) {
		struct kvd_tenant *t = core->tenants[i];

		if (!t)
			continue;
		kvd_pressure_update(&t->pressure, core->mm.now_ns);
		o = cJSON_CreateObject();
		cJSON_AddStringToObject(o, "name", t->name);
		cJSON_AddNumberToObject(o, "asking", t->pressure.nr_asking);
		cJSON_AddNumberToObject(o, "stalled", t->pressure.nr_stalled);
		for (k = 0; k < KVD_PRESSURE_KINDS; k++) {
			one = cJSON_AddObjectToObject(o, kinds[k]);
			for (a = 0; a < KVD_PRESSURE_AVGS; a++)
				cJSON_AddNumberToObject(one, avgs[a],
							t->pressure.avg[k][a]);
			kvd_admin_u64(one, "total_us", t->pressure.total_ns[k] / 1000);
		}
		cJSON_AddItemToArray(list, o);
	}
	return 0;
}

/* ------------------------------------------------------------------ pagemap */

/* Runs of pages in one state: "state" and how many, in page order. */
static u32 add_runs(cJSON *list, const struct kvd_pool *pool, u32 from, u32 limit)
{
	u32 pfn = from, nr;
	char state[16];
	cJSON *run;

	for (nr = 0; pfn < pool->geo.nr_pages && nr < limit; nr++) {
		u32 first = pfn, s = pool->frames[pfn].state;

		while (pfn < pool->geo.nr_pages && pool->frames[pfn].state == s)
			pfn++;
		kvd_admin_lower(kvd_frame_state_str(s), state, sizeof(state));
		run = cJSON_CreateObject();
		cJSON_AddStringToObject(run, "state", state);
		cJSON_AddNumberToObject(run, "pages", pfn - first);
		cJSON_AddItemToArray(list, run);
	}
	return pfn;
}

int kvd_admin_pagemap(struct kvd_admin_call *call)
{
	u32 from = 0, limit = RUNS_LIMIT, next;
	struct kvd_pool *pool;
	int r;

	r = kvd_admin_get_pool(call, &pool);
	if (r)
		return r;
	if (kvd_admin_get_u32(call, "from", &from) < 0 ||
	    kvd_admin_get_u32(call, "limit", &limit) < 0)
		return -EINVAL;
	if (from > pool->geo.nr_pages)
		return kvd_admin_fail(call, -ENOENT,
				      "from: page %u: pool %u has %u pages", from,
				      pool->id, pool->geo.nr_pages);
	limit = KV_MIN(limit, RUNS_LIMIT);
	cJSON_AddNumberToObject(call->out, "pool", pool->id);
	cJSON_AddNumberToObject(call->out, "from", from);
	cJSON_AddNumberToObject(call->out, "nr_pages", pool->geo.nr_pages);
	cJSON_AddNumberToObject(call->out, "pages_per_extent", 1u << pool->geo.shift);
	next = add_runs(cJSON_AddArrayToObject(call->out, "runs"), pool, from, limit);
	cJSON_AddNumberToObject(call->out, "next", next);
	cJSON_AddBoolToObject(call->out, "more", next < pool->geo.nr_pages);
	return 0;
}
