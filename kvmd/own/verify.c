/* SPDX-License-Identifier: Apache-2.0 */
/*
 * own/verify.c - the whole audit: mm/audit.c's checks, and references, index and charges.
 *
 * Changes nothing. The slice is cheap enough for production: counters in O(pools), and as
 * many records as asked for. Loop thread only.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "base/mutant.h"
#include "kvmd/own/core.h"
#include "kvmd/own/verify.h"
#include "kvmd/own/walk.h"

/* I2: the record's count is what sessions hold, and one for a seal in progress. */
static void verify_refs(struct kvd_core *core, const struct kvd_pool *pool, u32 pfn,
			struct kvd_findings *fs)
{
	const struct kvd_frame *f = &pool->frames[pfn];
	u32 refs = f->flags & KVD_FRAME_SEALING ? 1 : 0;
	u32 holders = 0;
	struct kvd_session *s;

	list_for_each_entry (s, &core->sessions, node) {
		struct kvd_attach *a = kvd_session_attach(s, pool->id);

		if (!a)
			continue;
		refs += a->refs[pfn];
		holders += a->refs[pfn] != 0;
		if ((a->refs[pfn] != 0) != ((a->held[pfn / 64] >> (pfn % 64)) & 1))
			kvd_finding_add(fs, 2, pool->id, pfn,
					"session %llu: %u references, bit %u",
					(unsigned long long)s->id, a->refs[pfn],
					(u32)(a->held[pfn / 64] >> (pfn % 64)) & 1);
		if (a->refs[pfn] &&
		    (f->state == KVD_ACTIVE || f->state == KVD_MAGAZINE) &&
		    f->owner != s->id)
			kvd_finding_add(
				fs, 2, pool->id, pfn, "%s page of %llu held by %llu",
				kvd_frame_state_str(f->state),
				(unsigned long long)f->owner, (unsigned long long)s->id);
	}
	if (refs != f->refs)
		kvd_finding_add(fs, 2, pool->id, pfn,
				"%u references, %u held by %u sessions", f->refs, refs,
				holders);
	if ((f->state == KVD_ACTIVE || f->state == KVD_MAGAZINE ||
	     f->state == KVD_SEALED) != (refs > 0))
		kvd_finding_add(fs, 2, pool->id, pfn, "%s page with %u references",
				kvd_frame_state_str(f->state), refs);
}

static void verify_index(const struct kvd_pool *pool, u32 pfn, struct kvd_findings *fs)
{
	const struct kvd_frame *f = &pool->frames[pfn];
	bool indexed = f->flags & KVD_FRAME_INDEXED, found = false;
	u32 at, steps = 0;

	if (indexed) {
		at = *kvd_prefix_head(pool, f->key);
		for (; at != KVD_PFN_NONE && steps++ < pool->geo.nr_pages && !found;
		     at = pool->links[at].hash_next)
			found = at == pfn;
		if (!found)
			kvd_finding_add(fs, 2, pool->id, pfn,
					"indexed page is not in its chain");
	}
	if (pool->links[pfn].walk && (!indexed || !kvd_walk_has(pool, pfn)))
		kvd_finding_add(fs, 2, pool->id, pfn, "walk entry of no indexed page");
	if (indexed && f->state != KVD_SEALED && f->state != KVD_CACHED)
		kvd_finding_add(fs, 2, pool->id, pfn, "%s page in the index",
				kvd_frame_state_str(f->state));
	if (f->state == KVD_CACHED && !indexed)
		kvd_finding_add(fs, 3, pool->id, pfn, "CACHED page that nobody can find");
	if ((f->flags & KVD_FRAME_FINDABLE) && (f->flags & KVD_FRAME_SEALING))
		kvd_finding_add(fs, 6, pool->id, pfn,
				"findable before its grace period is over");
}

static void verify_frame(struct kvd_core *core, const struct kvd_pool *pool, u32 pfn,
			 struct kvd_findings *fs)
{
	u32 before = fs->nr;

	kvd_audit_frame(pool, pfn, fs);
	if (!pool->frames[pfn].nr_events || fs->nr != before)
		return;
	verify_refs(core, pool, pfn, fs);
	verify_index(pool, pfn, fs);
}

/* I7 and the ledger against the counters of states: O(tenants). */
static void verify_accounts(struct kvd_core *core, struct kvd_findings *fs)
{
	u64 by_state[KVD_FRAME_STATES] = {0};

	for (u32 i = 0; i < KVD_TENANTS_MAX; i++) {
		if (!core->tenants[i])
			continue;
		for (u32 st = 0; st < KVD_FRAME_STATES; st++)
			by_state[st] += core->tenants[i]->account.nr[st];
	}
	for (u32 st = KVD_MAGAZINE; st < KVD_POISONED; st++) {
		u64 pools = 0;

		for (u32 i = 0; i < KVD_POOLS_MAX; i++)
			pools += core->mm.pools[i] ? core->mm.pools[i]->nr[st] : 0;
		if (pools != by_state[st])
			kvd_finding_add(
				fs, 1, 0, KVD_PFN_NONE, "%s: pools %llu, tenants %llu",
				kvd_frame_state_str(st), (unsigned long long)pools,
				(unsigned long long)by_state[st]);
	}
}

/* Charges counted again from the records. */
static void count_used(const struct kvd_core *core, u64 *used)
{
	for (u32 i = 0; i < KVD_POOLS_MAX; i++) {
		const struct kvd_pool *pool = core->mm.pools[i];

		for (u32 pfn = 0; pool && pfn < pool->geo.nr_pages; pfn++) {
			const struct kvd_frame *f = &pool->frames[pfn];

			if (f->state != KVD_ABSENT && f->state != KVD_FREE &&
			    f->state != KVD_POISONED && f->tenant < KVD_TENANTS_MAX)
				used[f->tenant] += pool->geo.stride_bytes;
		}
	}
}

/* @used: bytes by tenant, from the records */
static void verify_charges(struct kvd_core *core, const u64 *used,
			   struct kvd_findings *fs)
{
	u64 extents = 0;

	for (u32 i = 0; i < KVD_POOLS_MAX; i++) {
		const struct kvd_pool *pool = core->mm.pools[i];

		for (u32 e = 0; pool && e < pool->nr_extents; e++)
			extents += pool->extents[e].state != KVD_EXTENT_NONE
					   ? pool->geo.extent_bytes
					   : 0;
	}
	for (u32 i = 0; i < KVD_TENANTS_MAX; i++) {
		const struct kvd_tenant *t = core->tenants[i];

		if (used[i] != (t ? t->account.used_bytes : 0))
			kvd_finding_add(
				fs, 7, 0, KVD_PFN_NONE, "%.40s: charged %llu, has %llu",
				t ? t->name : "?",
				(unsigned long long)(t ? t->account.used_bytes : 0),
				(unsigned long long)used[i]);
	}
	for (u32 i = 0; i < KVD_DOMAINS_MAX && core->unmet_valid; i++) {
		const struct kvd_domain *d = core->domains[i];

		if (d && d->unmet_bytes != kvd_domain_unmet_min(core, d))
			kvd_finding_add(
				fs, 7, 0, KVD_PFN_NONE,
				"domain %.40s: unmet %llu, is %llu", d->name,
				(unsigned long long)d->unmet_bytes,
				(unsigned long long)kvd_domain_unmet_min(core, d));
	}
	if (extents != core->mm.extent_bytes_used ||
	    extents > KV_MAX(core->mm.limits.capacity_bytes,
			     KV_MUTANT(adopted_beyond_is_damage)
				     ? 0
				     : core->mm.adopted_bytes))
		kvd_finding_add(fs, 7, 0, KVD_PFN_NONE,
				"extents: charged %llu, have %llu",
				(unsigned long long)core->mm.extent_bytes_used,
				(unsigned long long)extents);
}

static int cmp_u64(const void *a, const void *b)
{
	u64 x = *(const u64 *)a, y = *(const u64 *)b;

	return x < y ? -1 : x > y;
}

/* I4: no generation on two pages. */
static int verify_generations(struct kvd_core *core, struct kvd_findings *fs)
{
	u64 nr = 0, at = 0, *gens;

	for (u32 i = 0; i < KVD_POOLS_MAX; i++)
		nr += core->mm.pools[i] ? core->mm.pools[i]->table.used_pages : 0;
	gens = malloc((nr + 1) * sizeof(*gens));
	if (!gens)
		return -ENOMEM;
	for (u32 i = 0; i < KVD_POOLS_MAX; i++) {
		const struct kvd_pool *pool = core->mm.pools[i];

		for (u32 pfn = 0; pool && pfn < pool->table.used_pages; pfn++) {
			if (pool->frames[pfn].tag)
				gens[at++] = kv_tag_gen(pool->frames[pfn].tag);
		}
	}
	qsort(gens, at, sizeof(*gens), cmp_u64);
	for (u64 i = 1; i < at; i++) {
		if (gens[i] == gens[i - 1])
			kvd_finding_add(fs, 4, 0, KVD_PFN_NONE,
					"generation %#llx is on two pages",
					(unsigned long long)gens[i]);
	}
	free(gens);
	return 0;
}

int kvd_audit(struct kvd_core *core, struct kvd_findings *fs)
{
	u64 used[KVD_TENANTS_MAX] = {0};
	int r;

	fs->nr = 0;
	fs->checked = 0;
	for (u32 i = 0; i < KVD_POOLS_MAX; i++) {
		const struct kvd_pool *pool = core->mm.pools[i];

		if (!pool)
			continue;
		kvd_audit_counters(pool, fs);
		kvd_audit_lists(pool, fs);
		for (u32 pfn = 0; pfn < pool->geo.nr_pages; pfn++)
			verify_frame(core, pool, pfn, fs);
	}
	verify_accounts(core, fs);
	count_used(core, used);
	verify_charges(core, used, fs);
	r = verify_generations(core, fs);
	return r ? r : (int)fs->nr;
}

int kvd_audit_quick(struct kvd_core *core, struct kvd_findings *fs)
{
	u64 used[KVD_TENANTS_MAX] = {0};

	fs->nr = 0;
	fs->checked = 0;
	for (u32 i = 0; i < KVD_POOLS_MAX; i++) {
		if (!core->mm.pools[i])
			continue;
		kvd_audit_counters(core->mm.pools[i], fs);
		kvd_audit_lists(core->mm.pools[i], fs);
	}
	verify_accounts(core, fs);
	count_used(core, used);
	verify_charges(core, used, fs);
	return (int)fs->nr;
}

bool kvd_audit_slice(struct kvd_core *core, u32 nr, struct kvd_findings *fs)
{
	verify_accounts(core, fs);
	for (u32 i = 0; i < KVD_POOLS_MAX; i++) {
		if (core->mm.pools[i])
			kvd_audit_counters(core->mm.pools[i], fs);
	}
	for (u32 i = core->sweep_pool; i < KVD_POOLS_MAX; i++) {
		struct kvd_pool *pool = core->mm.pools[i];

		core->sweep_pool = i;
		for (; pool && pool->sweep_pfn < pool->geo.nr_pages; pool->sweep_pfn++) {
			if (!nr--)
				return false;
			verify_frame(core, pool, pool->sweep_pfn, fs);
		}
		if (pool)
			pool->sweep_pfn = 0;
	}
	core->sweep_pool = 0;
	return true;
}

/* --------------------------------------------------------------- beside the work */

int kvd_audit_begin(struct kvd_core *core, struct kvd_audit_run *run)
{
	u64 nr = 0, size = 1024;

	kv_assert(!core->mm.recount);
	for (u32 i = 0; i < KVD_POOLS_MAX; i++)
		nr += core->mm.pools[i] ? core->mm.pools[i]->geo.nr_pages : 0;
	while (size < 2 * nr)
		size *= 2;
	run->gens = calloc(size, sizeof(*run->gens));
	if (!run->gens)
		return -ENOMEM;
	run->gens_mask = size - 1;
	run->error = 0;
	memset(&run->count, 0, sizeof(run->count));
	run->findings.nr = 0;
	run->findings.checked = 0;
	core->mm.recount = &run->count;
	return 0;
}

void kvd_audit_end(struct kvd_core *core, struct kvd_audit_run *run)
{
	core->mm.recount = NULL;
	free(run->gens);
	run->gens = NULL;
}

/* I4: no generation on two pages. A page that changes later gets one that was on none. */
static void generation_add(struct kvd_audit_run *run, const struct kvd_pool *pool,
			   u32 pfn)
{
	u64 gen = kv_tag_gen(pool->frames[pfn].tag);
	u64 at = gen * 0x9e3779b97f4a7c15ull >> 20;

	if (!gen)
		return;
	while (run->gens[at & run->gens_mask] && run->gens[at & run->gens_mask] != gen)
		at++;
	if (run->gens[at & run->gens_mask] == gen)
		kvd_finding_add(&run->findings, 4, pool->id, pfn,
				"generation %#llx is on two pages",
				(unsigned long long)gen);
	run->gens[at & run->gens_mask] = gen;
}

static void run_record(struct kvd_core *core, struct kvd_audit_run *run,
		       const struct kvd_pool *pool)
{
	u32 pfn = run->count.pfn, in_extent = (1u << pool->geo.shift) - 1;
	u32 before = run->findings.nr;

	verify_frame(core, pool, pfn, &run->findings);
	if (run->findings.nr == before)
		kvd_audit_links(pool, pfn, &run->findings);
	generation_add(run, pool, pfn);
	kvd_recount_add(&run->count, pool);
	if (!(run->count.pfn & in_extent))
		kvd_recount_extent(&run->count, pool, &run->findings);
}

bool kvd_audit_step(struct kvd_core *core, struct kvd_audit_run *run, u32 nr)
{
	struct kvd_recount *rc = &run->count;

	if (rc->stale) {
		kvd_audit_end(core, run);
		run->error = kvd_audit_begin(core, run);
		if (run->error)
			return true;
	}
	for (; rc->index < KVD_POOLS_MAX;) {
		const struct kvd_pool *pool = core->mm.pools[rc->index];

		for (; pool && rc->pfn < pool->geo.nr_pages; nr--) {
			if (!nr)
				return false;
			run_record(core, run, pool);
		}
		if (pool)
			kvd_recount_pool(rc, pool, &run->findings);
		else
			rc->index++;
	}
	verify_accounts(core, &run->findings);
	verify_charges(core, rc->used, &run->findings);
	return true;
}
