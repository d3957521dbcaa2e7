/* SPDX-License-Identifier: Apache-2.0 */
/*
 * own/session.c - sessions: begin, pools, end (P8), reaping. See session.h.
 *
 * Loop thread only. The session page is hostile memory; this file only stores into it.
 */
#include "kvmd/own/session.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/mutant.h"
#include "kvmd/own/core.h"
#include "kvmd/own/image.h"

/* Return: 0; -ENOSPC the image is full of sessions. */
static int session_note(struct kvd_session *s, const struct kvd_session_params *p)
{
	struct kvd_image_session is = {
		.id = s->id,
		.pid = s->pid,
		.uid = p->uid,
		.tenant = s->tenant->index,
		.role = p->role,
	};

	if (!s->core->image)
		return 0;
	if (p->cookie)
		memcpy(is.cookie, p->cookie, sizeof(is.cookie));
	memcpy(is.name, s->name, sizeof(is.name));
	s->image = kvd_image_session_get(s->core->image, &is);
	return s->image ? 0 : -ENOSPC;
}

int kvd_session_create(struct kvd_core *core, const struct kvd_session_params *p,
		       struct kvd_session **ret_session)
{
	struct kvd_session *s;
	int r;

	if (!p->client_id || kvd_session_find(core, p->client_id))
		return -EINVAL;
	s = calloc(1, sizeof(*s));
	if (!s)
		return -ENOMEM;
	s->id = p->client_id;
	s->owner = p->owner;
	s->core = core;
	s->tenant = p->tenant;
	s->pid = p->pid;
	snprintf(s->name, sizeof(s->name), "%s", p->name);
	s->state = KVD_SESSION_LIVE;
	s->page = p->page;
	r = session_note(s, p);
	if (r) {
		free(s);
		return r;
	}
	s->page->magic = KV_SESSION_MAGIC;
	s->page->client_id = s->id;
	kvd_reader_add(&core->mm, &p->tenant->domain->group, &s->reader, s->page);
	kv_store_release64(&s->page->table_epoch.word, core->mm.table_epoch);
	list_add_tail(&core->sessions, &s->node);
	core->nr_sessions++;
	s->tenant->nr_sessions++;
	*ret_session = s;
	return 0;
}

struct kvd_session *kvd_session_find(struct kvd_core *core, u64 client_id)
{
	struct kvd_session *s;

	list_for_each_entry (s, &core->sessions, node) {
		if (s->id == client_id)
			return s;
	}
	return NULL;
}

struct kvd_attach *kvd_session_attach(struct kvd_session *s, u32 pool_id)
{
	for (u32 i = 0; i < KV_POOLS_MAX; i++) {
		if (s->attach[i].pool && s->attach[i].pool->id == pool_id)
			return &s->attach[i];
	}
	return NULL;
}

/* ------------------------------------------------------------------------- extents */

static void extent_give(struct kvd_session *s, struct kvd_attach *a, u32 index)
{
	struct kvd_core *core = s->core;

	a->given[index / 64] |= 1ull << (index % 64);
	kvd_extent_given(a->pool, index);
	core->cfg.notify->extent_added(core->cfg.notify_arg, s, a->pool, index);
}

static bool extent_given(const struct kvd_attach *a, u32 index)
{
	return (a->given[index / 64] >> (index % 64)) & 1;
}

static void extent_ungive(struct kvd_attach *a, u32 index)
{
	kv_assert(extent_given(a, index));
	a->given[index / 64] &= ~(1ull << (index % 64));
	kvd_extent_put(a->pool, index);
}

void kvd_session_extent_live(struct kvd_pool *pool, u32 index)
{
	struct kvd_core *core = kvd_core_of(pool->mm);
	struct kvd_domain *domain = pool->owner;
	struct kvd_session *s;

	domain->extent_bytes += pool->geo.extent_bytes;
	core->unmet_valid = false;
	list_for_each_entry (s, &core->sessions, node) {
		struct kvd_attach *a = kvd_session_attach(s, pool->id);

		if (a && s->state == KVD_SESSION_LIVE)
			extent_give(s, a, index);
	}
}

void kvd_session_extent_draining(struct kvd_pool *pool, u32 index)
{
	struct kvd_core *core = kvd_core_of(pool->mm);
	struct kvd_session *s;

	list_for_each_entry (s, &core->sessions, node) {
		struct kvd_attach *a = kvd_session_attach(s, pool->id);

		if (a && s->state == KVD_SESSION_LIVE && extent_given(a, index))
			core->cfg.notify->extent_removed(core->cfg.notify_arg, s, pool,
							 index,
							 pool->extents[index].serial);
	}
}

void kvd_session_extent_gone(struct kvd_pool *pool, u32 index)
{
	struct kvd_domain *domain = pool->owner;

	kv_assert(domain->extent_bytes >= pool->geo.extent_bytes);
	domain->extent_bytes -= pool->geo.extent_bytes;
	kvd_core_of(pool->mm)->unmet_valid = false;
}

int kvd_session_unmapped(struct kvd_session *s, u32 pool_id,
			 const struct kv_extent_ref *ref)
{
	struct kvd_attach *a = kvd_session_attach(s, pool_id);

	if (!a || ref->reserved || ref->index >= a->pool->nr_extents ||
	    !extent_given(a, ref->index) ||
	    a->pool->extents[ref->index].serial != ref->serial)
		return -ENOENT;
	if (a->pool->extents[ref->index].state != KVD_EXTENT_DRAINING)
		return -EINVAL;
	extent_ungive(a, ref->index);
	return 0;
}

/* --------------------------------------------------------------------------- pools */

static u64 refs_bytes(const struct kvd_pool *pool)
{
	return kv_round_up((u64)pool->geo.nr_pages * sizeof(u16), 8);
}

static u64 lease_bytes(const struct kvd_pool *pool)
{
	u64 held = kv_div_round_up(pool->geo.nr_pages, 64) * 8;
	u64 given = kv_div_round_up(pool->nr_extents, 64) * 8;

	return kv_round_up(refs_bytes(pool) + held + given, 4096);
}

int kvd_attach_layout(struct kvd_attach *a, struct kvd_pool *pool,
		      const struct kvd_region *region)
{
	u64 held = kv_div_round_up(pool->geo.nr_pages, 64) * 8;

	if (region->size_bytes < lease_bytes(pool))
		return -EBADMSG;
	a->region = *region;
	a->refs = region->addr;
	a->held = (u64 *)((u8 *)region->addr + refs_bytes(pool));
	a->given = (u64 *)((u8 *)region->addr + refs_bytes(pool) + held);
	return 0;
}

void kvd_session_give_extents(struct kvd_session *s, struct kvd_attach *a)
{
	for (u32 i = 0; i < a->pool->nr_extents; i++) {
		if (a->pool->extents[i].state == KVD_EXTENT_LIVE && !extent_given(a, i))
			extent_give(s, a, i);
	}
}

static int attach_init(struct kvd_session *s, struct kvd_attach *a, struct kvd_pool *pool)
{
	const struct kvd_env *env = s->core->mm.env;
	struct kvd_region region = {
		.kind = KVD_REGION_LEASES,
		.pool_id = pool->id,
		.session_id = s->id,
		.size_bytes = lease_bytes(pool),
		.fd = -1,
	};
	int r;

	memset(a, 0, sizeof(*a));
	r = env->region_alloc(env->arg, &region);
	if (r)
		return r;
	kv_assert(!kvd_attach_layout(a, pool, &region));
	a->pool = pool;
	kvd_batch_set_init(&a->seals, pool, &s->reader, KVD_BATCH_SEAL);
	pool->nr_sessions++;
	if (s->image) {
		s->image->pools[a - s->attach] = kvd_image_pool(pool->id);
		kvd_crash_point();
	}
	kvd_session_give_extents(s, a);
	return 0;
}

/* Nothing is held any more; what is sealed and waits goes on without us. */
static void attach_fini(struct kvd_session *s, struct kvd_attach *a)
{
	const struct kvd_env *env = s->core->mm.env;
	struct kvd_pool *pool = a->pool;

	kv_assert(a->nr_held == 0);
	kvd_batch_set_move(&a->seals, &pool->seals);
	for (u32 i = 0; i < pool->nr_extents; i++) {
		if (extent_given(a, i) && !KV_MUTANT(closed_pool_holds))
			extent_ungive(a, i);
	}
	for (u32 i = 0; i < KV_MAGAZINES; i++) {
		if (s->mags[i].pool == pool)
			s->mags[i].pool = NULL;
	}
	if (s->image) {
		s->image->pools[a - s->attach] = 0;
		kvd_crash_point();
	}
	env->region_free(env->arg, &a->region);
	kv_assert(pool->nr_sessions > 0);
	pool->nr_sessions--;
	a->pool = NULL;
}

/* The domain's pool with this layout, made if there is none. */
static int pool_get(struct kvd_session *s, const struct kv_layout *layout,
		    const float *scales, struct kvd_pool **ret_pool,
		    struct kvd_refusal *ret_why)
{
	struct kvd_domain *domain = s->tenant->domain;
	struct kvd_core *core = s->core;
	struct kvd_pool_params p = {
		.domain_id = domain->id,
		.owner = domain,
		.group = &domain->group,
		.layout = layout,
		.scales = scales,
		.fingerprint = kvd_layout_fingerprint(layout, scales),
	};
	int r;

	for (u32 i = 0; i < KVD_POOLS_MAX; i++) {
		struct kvd_pool *pool = core->mm.pools[i];

		if (!pool || (pool->owner != domain && !KV_MUTANT(pool_of_any_domain)))
			continue;
		if (pool->fingerprint == p.fingerprint) {
			*ret_pool = pool;
			return 0;
		}
		if (!pool->nr_sessions)
			continue;
		if (KV_MUTANT(layout_guess))
			continue;
		r = kvd_layout_differs(&pool->layout, pool->scales, layout, scales,
				       ret_why);
		if (r)
			return r;
	}
	if (kvd_domain_pool_room(core, domain) == 0)
		kvd_domain_pools_trim(core);
	if (kvd_domain_pool_room(core, domain) == 0 && !KV_MUTANT(all_pools_for_one))
		return -ENOSPC;
	r = kvd_pool_create(&core->mm, &p, ret_pool);
	core->unmet_valid = false;
	if (!r)
		kvd_prefix_pool_init(*ret_pool, domain->secret);
	return r;
}

static struct kvd_attach *attach_of_layout(struct kvd_session *s, u64 fingerprint)
{
	for (u32 i = 0; i < KV_POOLS_MAX; i++) {
		if (s->attach[i].pool && s->attach[i].pool->fingerprint == fingerprint)
			return &s->attach[i];
	}
	return NULL;
}

int kvd_session_open_pool(struct kvd_session *s, const struct kv_layout *layout,
			  const float *scales, struct kvd_attach **ret_attach,
			  struct kvd_refusal *ret_why)
{
	struct kvd_attach *a = NULL;
	struct kvd_pool *pool;
	int r;

	kv_assert(s->state == KVD_SESSION_LIVE);
	r = kvd_layout_check(layout, scales, s->core->cfg.test_layouts, ret_why);
	if (r)
		return r;
	for (u32 i = KV_POOLS_MAX; i-- > 0;) {
		if (!s->attach[i].pool)
			a = &s->attach[i];
	}
	*ret_attach = attach_of_layout(s, kvd_layout_fingerprint(layout, scales));
	if (*ret_attach)
		return 0;
	if (!a)
		return -EMFILE;
	r = pool_get(s, layout, scales, &pool, ret_why);
	if (r)
		return r;
	r = attach_init(s, a, pool);
	if (r)
		return r;
	*ret_attach = a;
	return 0;
}

int kvd_session_close_pool(struct kvd_session *s, u32 pool_id)
{
	struct kvd_attach *a = kvd_session_attach(s, pool_id);

	kv_assert(s->state == KVD_SESSION_LIVE);
	if (!a)
		return -ENOENT;
	kvd_lease_mags_recall(s, a->pool);
	a->drop_word = 0;
	kvd_lease_drop_some(s, a, KVD_EV_FREE,
			    KV_MUTANT(close_at_once) ? ~0u : KVD_DROP_SLICE);
	if (a->nr_held)
		return -EAGAIN;
	attach_fini(s, a);
	return 0;
}

/* ----------------------------------------------------------------------------- end */

static void pins_drop(struct kvd_session *s)
{
	u32 budget = KVD_DROP_SLICE;

	if (KV_MUTANT(dead_keeps_pages))
		return;
	kvd_lease_mags_recall(s, NULL);
	for (u32 i = 0; i < KV_POOLS_MAX; i++) {
		struct kvd_attach *a = &s->attach[i];

		if (!a->pool)
			continue;
		a->drop_word = 0;
		budget -= kvd_lease_drop_some(s, a, KVD_EV_DEATH, budget);
	}
}

/* P8: from this store and barrier on no new step can start (kv_slot_announce(), P3). */
static void epoch0_store(struct kvd_session *s)
{
	kv_store_release64(&s->page->table_epoch.word, 0);
	kv_full_barrier();
}

u32 kvd_session_nr_held(const struct kvd_session *s)
{
	u32 nr = 0;

	for (u32 i = 0; i < KV_POOLS_MAX; i++)
		nr += s->attach[i].pool ? s->attach[i].nr_held : 0;
	return nr;
}

/* What it did not give back is its leak, unless it was cut off: a line with numbers. */
static void end_log(struct kvd_session *s, const char *why)
{
	u32 held = kvd_session_nr_held(s), stocked = 0;
	char line[200];

	for (u32 i = 0; i < KV_MAGAZINES; i++)
		stocked += s->mags[i].nr;
	s->core->nr_left_pages += held - KV_MIN(held, stocked);
	snprintf(
		line, sizeof(line),
		"session %llu (%.60s, pid %d) ended: %.40s; it held %u pages, %u of them in "
		"stock",
		(unsigned long long)s->id, s->name, s->pid, why, held, stocked);
	s->core->mm.env->log(s->core->mm.env->arg, 6, line);
}

void kvd_session_end(struct kvd_session *s, const char *why)
{

	if (s->state == KVD_SESSION_ENDED)
		return;
	s->state = KVD_SESSION_ENDED;
	s->core->nr_ended++;
	kvd_pressure_leave(s);
	if (s->image) {
		s->image->state = KVD_IMAGE_ENDED;
		kvd_crash_point();
	}
	end_log(s, why);
	if (KV_MUTANT(late_epoch0)) {
		pins_drop(s);
		epoch0_store(s);
	} else {
		epoch0_store(s);
		pins_drop(s);
	}
	kvd_reader_end(&s->reader);
}

void kvd_session_work_ended(struct kvd_session *s)
{
	kvd_session_end(s, "process is gone");
	kvd_reader_gone(&s->core->mm, &s->reader);
}

static void session_reap(struct kvd_session *s)
{
	struct kvd_core *core = s->core;

	for (u32 i = 0; i < KV_POOLS_MAX; i++) {
		if (s->attach[i].pool)
			attach_fini(s, &s->attach[i]);
	}
	kvd_reader_del(&core->mm, &s->reader);
	list_del(&s->node);
	core->nr_sessions--;
	core->nr_ended--;
	s->tenant->nr_sessions--;
	if (s->image) {
		s->image->state = KVD_IMAGE_FREE;
		kvd_crash_point();
	}
	core->cfg.notify->session_reaped(core->cfg.notify_arg, s);
	free(s);
}

/* Drop more of an ended session. Return: true when it holds nothing any more. */
static bool session_drop(struct kvd_session *s, u32 *budget)
{
	if (KV_MUTANT(dead_keeps_pages))
		return false;
	for (u32 i = 0; i < KV_POOLS_MAX; i++) {
		struct kvd_attach *a = &s->attach[i];

		if (!a->pool || !a->nr_held)
			continue;
		*budget -= kvd_lease_drop_some(s, a, KVD_EV_DEATH, *budget);
		if (a->nr_held)
			return false;
	}
	return true;
}

/*
 * Memory behind a legacy handle may not be freed while a process has it open, and one whose
 * session ended lives on with it: its end is waited for, not only its steps'. (A descriptor's
 * importer holds the memory itself.)
 */
static bool holds_handles(const struct kvd_session *s)
{
	if (!kvd_backend_one_extent(&s->core->mm.limits) || s->reader.gone ||
	    KV_MUTANT(legacy_freed_open))
		return false;
	for (u32 p = 0; p < KV_POOLS_MAX; p++) {
		const struct kvd_attach *a = &s->attach[p];

		for (u32 i = 0; a->pool && i < a->pool->nr_extents; i++)
			if (extent_given(a, i))
				return true;
	}
	return false;
}

bool kvd_session_turn(struct kvd_core *core)
{
	struct kvd_session *s, *tmp;
	u32 budget = KVD_DROP_SLICE;
	bool more = false;

	if (!core->nr_ended)
		return false;
	list_for_each_entry_safe (s, tmp, &core->sessions, node) {
		if (s->state != KVD_SESSION_ENDED)
			continue;
		if (!session_drop(s, &budget)) {
			more = true;
			continue;
		}
		if (!kvd_reader_quiet(&s->reader))
			kvd_reader_scan(&core->mm, &s->reader);
		if (kvd_reader_quiet(&s->reader) && !holds_handles(s))
			session_reap(s);
	}
	return more;
}
