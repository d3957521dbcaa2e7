/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check.c - after every act: the core's own audit (I1 .. I8), and what the model knows
 * that the core does not: whose bytes a page has, and what clients were promised.
 */
#include "tests/sim/world/world.h"

static void audit(bool whole)
{
	struct kvd_finding list[4];
	struct kvd_findings fs = {.list = list, .max = KV_ARRAY_SIZE(list)};
	int nr = whole ? kvd_audit(&sim.core, &fs) : kvd_audit_quick(&sim.core, &fs);

	if (nr)
		sim_fail("I%u pool %u pfn %d: %s", list[0].invariant, list[0].pool_id,
			 (int)list[0].pfn, list[0].text);
}

/* I6, I8: bytes of sealed pages are what was sealed, in an extent of their domain. */
static void pages_check(const struct kvd_pool *pool)
{
	const struct kvd_domain *d = pool->owner;
	bool hostile =
		sim.o.hostile && sim.o.domains > 1 && d == sim.domains[sim.o.domains - 1];

	for (u32 i = 0; i < pool->nr_extents; i++)
		if (pool->extents[i].state != KVD_EXTENT_NONE &&
		    sim.exts[pool->extents[i].handle.fd].domain != pool->domain_id)
			sim_fail("I8: extent %u of pool %u belongs to domain %u", i,
				 pool->id, sim.exts[pool->extents[i].handle.fd].domain);
	for (u32 pfn = 0; pfn < pool->table.used_pages && !hostile; pfn++) {
		const struct kvd_frame *f = &pool->frames[pfn];
		const struct sim_cell *cell;

		if (!kv_tag_sealed(f->tag) || f->state == KVD_ABSENT)
			continue;
		cell = sim_cell_of(pool, pfn);
		if (cell->gen != kv_tag_gen(f->tag) || !cell->sealed)
			sim_fail("I6: sealed page %u generation %#llx has bytes of %#llx",
				 pfn, (unsigned long long)kv_tag_gen(f->tag),
				 (unsigned long long)cell->gen);
	}
}

/* What a client was granted and has not given back is there (I2, from its side). */
static void leases_check(const struct sim_client *c)
{
	const struct sim_conn *n = c->conn;
	const struct kvd_pool *pool;

	if (!n || !n->s || !n->a || n->attached_epoch != sim.core.mm.table_epoch ||
	    n->s->state != KVD_SESSION_LIVE)
		return;
	pool = n->a->pool;
	for (u32 i = 0; i < c->nr; i++) {
		const struct sim_held *h = &c->held[i];
		const struct kvd_frame *f = &pool->frames[h->pfn];

		if (h->revoked)
			continue;
		if (kv_tag_gen(f->tag) != h->gen || !kv_tag_live(f->tag))
			sim_fail("page %u of session %llu: generation %#llx, it has tag "
				 "%#llx",
				 h->pfn, (unsigned long long)n->id,
				 (unsigned long long)h->gen, (unsigned long long)f->tag);
		if (n->a->refs[h->pfn] < h->refs || f->refs < h->refs)
			sim_fail("page %u of session %llu: %u references, kvmd has %u",
				 h->pfn, (unsigned long long)n->id, h->refs,
				 n->a->refs[h->pfn]);
		if (h->write && kv_tag_sealed(f->tag))
			sim_fail("page %u is held for writing, and sealed", h->pfn);
	}
}

/* What an operator holds is not evicted. */
static void marks_check(void)
{
	for (u32 i = 0; i < KV_MIN(sim.nr_marks, SIM_MARKS) && !sim.lossy; i++) {
		const struct sim_mark *m = &sim.marks[i];
		const struct kvd_pool *pool = sim.core.mm.pools[m->pool_id - 1];

		if (!pool || kv_tag_gen(pool->frames[m->pfn].tag) != m->gen)
			sim_fail("page %u of pool %u is held, and gone", m->pfn,
				 m->pool_id);
	}
}

void sim_check(bool whole)
{
	if (!sim.up)
		return;
	audit(whole);
	marks_check();
	if (!whole)
		return;
	for (u32 i = 0; i < KVD_POOLS_MAX; i++)
		if (sim.core.mm.pools[i])
			pages_check(sim.core.mm.pools[i]);
	for (u32 i = 0; i < sim.o.clients; i++)
		if (!sim_client_hostile(&sim.clients[i]))
			leases_check(&sim.clients[i]);
}
