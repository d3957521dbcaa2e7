/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvmd.c - the daemon around the core: starts cold or from what the keeper has, in the
 * order of kvmd/ipc/adopt.c, and dies.
 */
#include "tests/sim/world/world.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvmd/dbg/fault.h"

static const char *const domain_names[SIM_DOMAINS] = {"red", "blue", "green"};
static const char *const tenant_names[SIM_TENANTS] = {"a", "b", "c", "d", "e", "f"};

static void secret_of(const char *name, u8 *ret)
{
	memset(ret, 0, KVD_DOMAIN_SECRET_BYTES);
	memcpy(ret, name, strlen(name));
}

/* Every pool of the schedule has the same weak keys, or whole ones. */
static void key_bits_set(void)
{
	for (u32 i = 0; i < KVD_POOLS_MAX; i++)
		if (sim.core.mm.pools[i])
			sim.core.mm.pools[i]->key_bits = (u32)sim.o.key_bits;
}

static int find_leases(void *arg, u32 pool_id, u64 session_id, struct kvd_region *ret)
{
	struct sim_region *m = sim_region_find(KVD_REGION_LEASES, pool_id, session_id);

	if (!m)
		return -ENOENT;
	*ret = m->r;
	return 0;
}

static int find_extent(void *arg, u32 pool_id, u32 index, u64 serial)
{
	for (u32 i = 0; i < SIM_EXTS; i++) {
		struct sim_ext *e = &sim.exts[i];

		if (e->used && e->keeper && !e->kvmd && e->pool_id == pool_id &&
		    e->index == index && e->serial == serial)
			return (int)i;
	}
	return -1;
}

static void extent_taken(void *arg, u32 pool_id, u32 index, u64 serial)
{
}

static int adopt_pool(u32 id, struct kvd_adopted *ad)
{
	struct kvd_adopt_pool_params p = {.id = id,
					  .leases = find_leases,
					  .extent = find_extent,
					  .extent_taken = extent_taken};
	struct sim_region *frames = sim_region_find(KVD_REGION_FRAMES, id, 0);
	struct sim_region *tokens = sim_region_find(KVD_REGION_TOKENS, id, 0);
	int r;

	if (!frames)
		return 0;
	if (!tokens) {
		sim_region_drop(frames);
		return 0;
	}
	p.frames = frames->r;
	p.tokens = tokens->r;
	r = kvd_adopt_pool(&sim.core, &p, ad);
	if (r != -EBADMSG)
		return r;
	sim_region_drop(tokens);
	sim_region_drop(frames);
	return 0;
}

static int adopt_pools(struct kvd_adopted *ad)
{
	u32 first = sim.image->undo.pool_id;
	int r = 0;

	if (first && first <= KVD_POOLS_MAX)
		r = adopt_pool(first, ad);
	if (r)
		return r;
	sim.image->undo.valid = 0;
	for (u32 id = 1; id <= 8 && !r; id++)
		if (id != first)
			r = adopt_pool(id, ad);
	return r;
}

static int adopt_sessions(struct kvd_adopted *ad)
{
	for (u32 i = 0; i < sim.nr_conns; i++) {
		struct sim_conn *n = &sim.conns[i];
		struct kvd_adopt_session_params p = {.id = n->id,
						     .tenant = n->tenant_index,
						     .page = n->page,
						     .owner = n};
		int r;

		n->s = NULL;
		n->a = NULL;
		if (!n->used || !n->kept)
			continue;
		r = kvd_adopt_session(&sim.core, &p, &n->s, ad);
		if (r == -ENODATA)
			n->kept = false;
		else if (r)
			return r;
	}
	return 0;
}

static int adopt(struct kvd_adopted *ad)
{
	u8 secret[KVD_DOMAIN_SECRET_BYTES];
	int r = 0;

	for (u32 i = 0; i < KVD_DOMAINS_MAX && !r; i++) {
		if (!sim.image->domains[i].check)
			continue;
		if (!kvd_image_domain_ok(&sim.image->domains[i])) {
			ad->damage++;
			continue;
		}
		secret_of(sim.image->domains[i].name, secret);
		r = kvd_adopt_domain(&sim.core, i, secret);
	}
	if (!r)
		r = kvd_adopt_tenants(&sim.core, ad);
	if (!r)
		r = adopt_sessions(ad);
	if (r)
		return r;
	kvd_adopt_epochs(&sim.core);
	r = adopt_pools(ad);
	if (r)
		return r;
	kvd_adopt_done(&sim.core);
	sim.next_id = sim.image->next_client_id;
	sim.stats.adoptions++;
	return 0;
}

/* What was kept and nobody took: the keeper lets go. */
static void leftovers_drop(void)
{
	for (u32 i = 0; i < SIM_REGIONS; i++) {
		struct sim_region *m = &sim.regions[i];
		const struct kvd_pool *pool;
		struct sim_conn *n = NULL;

		if (!m->used || !m->kept)
			continue;
		pool = sim.core.mm.pools[m->r.pool_id - 1];
		if (m->r.kind == KVD_REGION_LEASES) {
			for (u32 k = 0; k < sim.nr_conns && !n; k++)
				if (sim.conns[k].id == m->r.session_id && sim.conns[k].s)
					n = &sim.conns[k];
			if (!n || !kvd_session_attach(n->s, m->r.pool_id))
				sim_region_drop(m);
		} else if (!pool) {
			sim_region_drop(m);
		}
	}
	for (u32 i = 0; i < SIM_EXTS; i++) {
		struct sim_ext *e = &sim.exts[i];

		if (e->used && e->keeper && !e->kvmd) {
			e->keeper = false;
			sim_ext_put(e);
		}
	}
}

/* A schedule's policy: the first domain has the odd tenants' share as well. */
static int policy(void)
{
	u64 pages = sim.o.extents * sim.o.extent_pages;
	u8 secret[KVD_DOMAIN_SECRET_BYTES];
	bool deferred;
	int r = 0;

	for (u32 i = 0; i < sim.o.domains && !r; i++) {
		sim.domains[i] = kvd_domain_find(&sim.core, domain_names[i]);
		secret_of(domain_names[i], secret);
		if (!sim.domains[i])
			r = kvd_domain_create(&sim.core, domain_names[i], secret,
					      &sim.domains[i]);
	}
	for (u32 i = 0; i < sim.o.tenants && !r; i++) {
		struct kvd_domain *d = sim.domains[i % sim.o.domains];
		struct kvd_limits l = {.weight = 100 + i, .max_bytes = 1ull << 50};
		struct kvd_tenant *t = kvd_tenant_find(&sim.core, tenant_names[i]);

		if (i == 1)
			l.max_bytes = KV_MAX(pages / 2, 2ull) * SIM_STRIDE;
		if (i == 2)
			l.min_bytes = pages / 4 * SIM_STRIDE;
		l.high_bytes = i == 3 ? l.min_bytes : l.max_bytes;
		sim.tenants[i] = t;
		if (t)
			r = kvd_tenant_set_limits(&sim.core, t, &l, &deferred);
		else
			r = kvd_tenant_create(&sim.core, d, tenant_names[i], &l,
					      &sim.tenants[i]);
	}
	return r;
}

static void image_new(void)
{
	if (sim.lossy) /* else it is zeroes still */
		memset(sim.image, 0, sizeof(*sim.image));
	kvd_image_format(sim.image);
	for (u32 i = 0; i < sim.nr_conns; i++) {
		sim.conns[i].kept = false;
		sim.conns[i].s = NULL;
		sim.conns[i].a = NULL;
	}
	sim.stats.cold++;
}

static void audit_quick(const struct kvd_adopted *ad)
{
	struct kvd_finding list[4];
	struct kvd_findings fs = {.list = list, .max = KV_ARRAY_SIZE(list)};

	if (kvd_audit_quick(&sim.core, &fs))
		sim_fail("adopted: I%u pool %u pfn %d: %s", list[0].invariant,
			 list[0].pool_id, (int)list[0].pfn, list[0].text);
	if (!sim.lossy && (ad->damage || ad->poisoned))
		sim_fail("adopted: damage %u, poisoned %u, and nothing was damaged",
			 ad->damage, ad->poisoned);
}

static int start(void)
{
	struct kvd_core_config cfg = {
		.env = &sim.env,
		.backend = &sim.be,
		.gen_source = &sim.gens,
		.notify = &sim_notify,
		.table_epoch = sim.next_epoch += 1ull << 12,
		.saved_grace = sim.saved[KVD_SAVED_GRACE],
		.stall_ns = 1000000000ull,
		.image = sim.image,
		.keep = &sim_keep_ops,
		.spill = sim.o.tier ? &sim_spill_ops : NULL,
	};
	bool found = kvd_image_whole(sim.image, sizeof(*sim.image));
	struct kvd_adopted ad = {0};
	int r;

	if (!found)
		image_new();
	kvd_gen_source_init(&sim.gens, &sim.env, sim.saved[KVD_SAVED_GENERATION]);
	r = kvd_core_init(&sim.core, &cfg);
	if (r)
		return r;
	kvd_core_now(&sim.core, sim.now_ns);
	if (found)
		r = adopt(&ad);
	key_bits_set();
	if (!r)
		r = policy();
	if (r)
		return r;
	audit_quick(&ad);
	leftovers_drop();
	for (u32 i = 0; i < SIM_COPIES; i++)
		sim.core.mm.grace.held |= sim.copies[i].lost;
	return 0;
}

void sim_kvmd_start(void)
{
	int r;

	if (sim.up)
		return;
	sim.up = true;
	sim_core_enter();
	r = start();
	sim_core_leave();
	if (!r)
		return;
	sim_kvmd_died();
	if (r == -EOVERFLOW && sim.o.gen_left)
		sim.over = true;
	else if (r != -EIO && r != -ENOMEM)
		sim_fail("kvmd does not start: %d", r);
	else if (sim.calm)
		sim_fail("kvmd does not start: %d, and nothing fails", r);
}

void sim_kvmd_died(void)
{
	kvd_crash_left = 0;
	sim.peek.armed = false;
	sim.up = false;
	sim.in_core = false;
	sim_heap_drop();
	sim_env_died();
	for (u32 i = 0; i < sim.nr_conns; i++) {
		sim.conns[i].s = NULL;
		sim.conns[i].a = NULL;
	}
	for (u32 i = 0; i < SIM_CLIENTS; i++)
		sim.clients[i].nr_inbox = 0;
}

bool sim_kvmd_turn(void)
{
	u64 next;

	if (!sim.up)
		return false;
	sim_core_enter();
	kvd_core_now(&sim.core, ++sim.now_ns);
	next = kvd_core_run(&sim.core);
	sim_core_leave();
	return next <= sim.now_ns;
}
