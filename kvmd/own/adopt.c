/* SPDX-License-Identifier: Apache-2.0 */
/*
 * own/adopt.c - domains, tenants, sessions and pools of an earlier core. See adopt.h;
 * records are in adopt_frame.c.
 *
 * Loop thread only; clients run on their old tables meanwhile.
 */
#include "kvmd/own/adopt.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/mutant.h"
#include "kvmd/own/image.h"

int kvd_adopt_domain(struct kvd_core *core, u32 id, const u8 *secret)
{
	struct kvd_domain *d;

	return kvd_domain_create_at(core, id, core->image->domains[id].name, secret, &d);
}

int kvd_adopt_tenants(struct kvd_core *core, struct kvd_adopted *ad)
{
	static const struct kvd_limits none = {
		.high_bytes = 1, .max_bytes = 1, .weight = 1};

	for (u32 i = 0; i < KVD_TENANTS_MAX; i++) {
		const struct kvd_image_tenant *it = &core->image->tenants[i];
		struct kvd_tenant *t;
		int r;

		if (!it->check)
			continue;
		if (!kvd_image_tenant_ok(it) || it->domain >= KVD_DOMAINS_MAX ||
		    !core->domains[it->domain]) {
			ad->damage++;
			continue;
		}
		r = kvd_tenant_create_at(core, core->domains[it->domain], i, it->name,
					 &none, &t);
		if (r)
			return r;
	}
	return 0;
}

static struct kvd_image_session *image_find(struct kvd_image *image, u64 id)
{
	for (u32 i = 0; i < KVD_IMAGE_SESSIONS; i++) {
		struct kvd_image_session *s = &image->sessions[i];

		if (s->state != KVD_IMAGE_FREE && s->id == id && kvd_image_session_ok(s))
			return s;
	}
	return NULL;
}

int kvd_adopt_session(struct kvd_core *core, const struct kvd_adopt_session_params *p,
		      struct kvd_session **ret_s, struct kvd_adopted *ad)
{
	struct kvd_image_session *is = image_find(core->image, p->id);
	u32 tenant = is ? is->tenant : p->tenant;
	struct kvd_session *s;

	if (!p->id || kvd_session_find(core, p->id) || tenant >= KVD_TENANTS_MAX ||
	    !core->tenants[tenant])
		return -ENODATA;
	s = calloc(1, sizeof(*s));
	if (!s)
		return -ENOMEM;
	s->id = p->id;
	s->owner = p->owner;
	s->core = core;
	s->image = is;
	s->tenant = core->tenants[tenant];
	s->page = p->page;
	s->state = KVD_SESSION_ENDED;
	if (is) {
		s->pid = is->pid;
		snprintf(s->name, sizeof(s->name), "%.63s", is->name);
		if (is->state == KVD_IMAGE_LIVE)
			s->state = KVD_SESSION_LIVE;
		else if (is->state != KVD_IMAGE_ENDED)
			ad->damage++;
	}
	kvd_reader_adopt(&core->mm, &s->tenant->domain->group, &s->reader, s->page);
	/* A slot's sequence is new, so that no word of before is stored again. */
	for (u32 i = 0; i < KV_MAGAZINES; i++)
		s->mags[i].sequence = (u32)(core->mm.table_epoch >> 8);
	list_add_tail(&core->sessions, &s->node);
	core->nr_sessions++;
	s->tenant->nr_sessions++;
	ad->sessions++;
	if (s->state == KVD_SESSION_ENDED) {
		core->nr_ended++;
		ad->ended++;
	}
	core->image->next_client_id = KV_MAX(core->image->next_client_id, p->id + 1);
	*ret_s = s;
	return 0;
}

/* The page's constants are hostile memory as well: they are stored again. */
void kvd_adopt_epochs(struct kvd_core *core)
{
	struct kvd_session *s;

	list_for_each_entry (s, &core->sessions, node) {
		bool live = s->state == KVD_SESSION_LIVE;

		s->page->magic = KV_SESSION_MAGIC;
		s->page->client_id = s->id;
		if (!KV_MUTANT(epoch_of_before_stays))
			kv_store_release64(&s->page->table_epoch.word,
					   live ? core->mm.table_epoch : 0);
		if (!live)
			kvd_reader_end(&s->reader);
		kvd_crash_point();
	}
	kv_full_barrier(); /* pairs with kv_slot_announce() */
	core->epochs_stored = true;
}

/* ------------------------------------------------------------------------ one pool */

static void leases_count(struct kvd_attach *a)
{
	struct kvd_pool *pool = a->pool;

	memset(a->held, 0, kv_div_round_up(pool->geo.nr_pages, 64) * sizeof(u64));
	for (u32 pfn = 0; pfn < pool->geo.nr_pages; pfn++) {
		if (!a->refs[pfn])
			continue;
		a->held[pfn / 64] |= 1ull << (pfn % 64);
		a->nr_held++;
	}
	for (u32 i = 0; i < pool->nr_extents; i++) {
		if (!(a->given[i / 64] >> (i % 64) & 1))
			continue;
		if (pool->extents[i].state == KVD_EXTENT_NONE)
			a->given[i / 64] &= ~(1ull << (i % 64));
		else
			pool->extents[i].nr_given++;
	}
}

/* Return: 1: what a session held here is lost; 0; -ENOMEM */
static int session_attach(struct kvd_session *s, struct kvd_pool *pool,
			  const struct kvd_adopt_pool_params *p, struct kvd_adopted *ad)
{
	const struct kvd_env *env = pool->mm->env;
	struct kvd_region region;
	int r;

	if (!s->image)
		return 1; /* it may have held something */
	for (u32 i = 0; i < KV_POOLS_MAX; i++) {
		u32 word = s->image->pools[i];
		struct kvd_attach *a = &s->attach[i];

		if (word && !kvd_image_pool_id(word)) {
			ad->damage++;
			s->image->pools[i] = 0;
			return 1;
		}
		if (kvd_image_pool_id(word) != pool->id)
			continue;
		r = p->leases(p->arg, pool->id, s->id, &region);
		if (r == -ENOMEM)
			return r;
		if (!r && kvd_attach_layout(a, pool, &region)) {
			env->region_free(env->arg, &region);
			r = -EBADMSG;
		}
		if (r) {
			ad->damage++;
			s->image->pools[i] = 0;
			return 1;
		}
		a->pool = pool;
		kvd_batch_set_init(&a->seals, pool, &s->reader, KVD_BATCH_SEAL);
		pool->nr_sessions++;
		leases_count(a);
		return 0;
	}
	return 0;
}

static void extents_adopt(struct kvd_pool *pool, const struct kvd_adopt_pool_params *p,
			  struct kvd_adopted *ad)
{
	struct kvd_domain *domain = pool->owner;

	for (u32 i = 0; i < pool->nr_extents; i++) {
		u64 word = pool->extent_words[i], serial = kvd_extent_word_serial(word);
		bool whole = kvd_extent_word_ok(word);
		int fd = -1;

		if (!word)
			continue;
		if (whole && kvd_extent_word_state(word) != KVD_EXTENT_NONE)
			fd = p->extent(p->arg, pool->id, i, serial);
		if (!kvd_extent_adopt(pool, i, fd)) {
			p->extent_taken(p->arg, pool->id, i, serial);
			domain->extent_bytes += pool->geo.extent_bytes;
			kvd_core_of(pool->mm)->unmet_valid = false;
		} else if (!whole || kvd_extent_word_state(word) != KVD_EXTENT_NONE) {
			ad->damage++;
		}
	}
}

int kvd_adopt_pool(struct kvd_core *core, const struct kvd_adopt_pool_params *p,
		   struct kvd_adopted *ad)
{
	int domain_id =
		p->id && p->id <= KVD_POOLS_MAX ? kvd_pool_domain(&p->frames, p->id) : -1;
	bool damage = true, lossy = false;
	struct kvd_domain *domain = NULL;
	struct kvd_session *s;
	struct kvd_pool *pool;
	int r = -EBADMSG;

	kv_assert(core->epochs_stored);
	if (domain_id >= 0 && domain_id < (int)KVD_DOMAINS_MAX)
		domain = core->domains[domain_id];
	if (domain || domain_id < 0)
		r = p->id && p->id <= KVD_POOLS_MAX
			    ? kvd_pool_adopt(&core->mm, p->id, domain,
					     domain ? &domain->group : NULL, &p->frames,
					     &p->tokens, &damage, &pool)
			    : -EBADMSG;
	if (r) {
		ad->damage += r == -EBADMSG && damage;
		return r;
	}
	kvd_prefix_pool_init(pool, domain->secret);
	extents_adopt(pool, p, ad);
	list_for_each_entry (s, &core->sessions, node) {
		r = session_attach(s, pool, p, ad);
		if (r < 0)
			return r;
		lossy |= r;
	}
	ad->pools++;
	r = kvd_adopt_frames(core, pool, lossy, ad);
	if (r)
		return r;
	kvd_extent_adopt_done(pool);
	return 0;
}

void kvd_adopt_done(struct kvd_core *core)
{
	struct kvd_session *s;

	list_for_each_entry (s, &core->sessions, node) {
		if (s->state != KVD_SESSION_ENDED)
			continue;
		kvd_lease_mags_recall(s, NULL);
		for (u32 i = 0; i < KV_POOLS_MAX; i++)
			s->attach[i].drop_word = 0;
	}
	/* Entries without a session page were reaped or never given out. */
	for (u32 i = 0; i < KVD_IMAGE_SESSIONS; i++) {
		struct kvd_image_session *is = &core->image->sessions[i];

		s = is->state == KVD_IMAGE_FREE ? NULL : kvd_session_find(core, is->id);
		if (!s || s->image != is) {
			is->state = KVD_IMAGE_FREE;
			continue;
		}
		for (u32 k = 0; k < KV_POOLS_MAX; k++) {
			if (!s->attach[k].pool) /* the pool was left out */
				is->pools[k] = 0;
		}
	}
}
