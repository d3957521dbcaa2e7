/* SPDX-License-Identifier: Apache-2.0 */
/*
 * client.c - an engine process as the library makes it behave: one session, one pool,
 * references it knows of, completions it has not read yet, and how it takes up its
 * session again when kvmd is another one (libkvclient/reattach.c).
 */
#include "tests/sim/world/world.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "kvmd/dbg/fault.h"

static const struct kv_layout layout = {
	.format_version = KV_LAYOUT_VERSION,
	.kind = KV_LAYOUT_MLA,
	.dtype = KV_DTYPE_BF16,
	.page_tokens = KV_PAGE_TOKENS,
	.nr_layers = 1,
	.latent_dim = 512,
	.rope_dim = 64,
};

static u32 nr_pages(void)
{
	return (u32)(sim.o.extents * sim.o.extent_pages);
}

bool sim_client_hostile(const struct sim_client *c)
{
	u32 domain = (u32)((c - sim.clients) % sim.o.tenants % sim.o.domains);

	return sim.o.hostile && sim.o.domains > 1 && domain == sim.o.domains - 1;
}

/* ------------------------------------------------------------------- what it holds */

struct sim_held *sim_held_find(struct sim_client *c, u32 pfn, u64 gen)
{
	for (u32 i = 0; i < c->nr; i++)
		if (c->held[i].pfn == pfn && c->held[i].gen == gen)
			return &c->held[i];
	return NULL;
}

struct sim_held *sim_held_add(struct sim_client *c, u32 pfn, u64 gen)
{
	struct sim_held *h = sim_held_find(c, pfn, gen);

	if (!h) {
		SIM_EXPECT(c->nr < SIM_HELD);
		h = &c->held[c->nr++];
		*h = (struct sim_held){.pfn = pfn, .gen = gen};
	}
	h->refs++;
	return h;
}

void sim_held_revoked(struct sim_client *c, u32 pfn, u64 gen)
{
	struct sim_held *h = sim_held_find(c, pfn, gen);

	if (h)
		h->revoked = true;
	for (u32 i = 0; i < c->nr_inbox; i++) {
		struct sim_letter *l = &c->inbox[i];

		for (u32 k = 0; k < l->nr; k++)
			l->revoked[k] |= l->grants[k].pfn == pfn &&
					 kv_tag_gen(l->grants[k].tag) == gen;
	}
}

static void held_remove(struct sim_client *c, struct sim_held *h)
{
	c->stale[c->nr_stale++ % SIM_STALE] = (struct sim_row){
		.pfn = h->pfn, .gen = h->gen, .sealed = h->sealed, .write = h->write};
	*h = c->held[--c->nr];
}

void sim_held_put(struct sim_client *c, struct sim_held *h)
{
	if (--h->refs == 0)
		held_remove(c, h);
}

/* ------------------------------------------------------------------------ sessions */

void sim_conn_unmap(struct sim_conn *n, u32 index)
{
	struct sim_ext *e;

	if (!n->map[index])
		return;
	e = &sim.exts[n->map[index] - 1];
	n->map[index] = 0;
	e->maps--;
	sim_ext_put(e);
}

void sim_conn_free(struct sim_conn *n)
{
	for (u32 i = 0; i < KV_ANNOUNCE_SLOTS; i++)
		sim_step_vanish(n, &n->steps[i]);
	for (u32 i = 0; n->map && i < sim.o.extents; i++)
		sim_conn_unmap(n, i);
}

bool sim_conn_busy(const struct sim_conn *n, u32 pfn)
{
	for (u32 s = 0; s < KV_ANNOUNCE_SLOTS; s++) {
		const struct sim_step *st = &n->steps[s];

		if (st->phase != SIM_IDLE && pfn == ~0u)
			return true;
		for (u32 i = 0; i < st->nr_rows && st->phase != SIM_IDLE; i++)
			if (st->rows[i].pfn == pfn)
				return true;
	}
	return false;
}

/* The extents that the session has, as the socket tells them. Return: false: not now. */
static bool extents_sync(struct sim_conn *n)
{
	const struct kvd_pool *pool = n->a->pool;

	for (u32 i = 0; i < sim.o.extents; i++) {
		const struct kvd_extent *e = &pool->extents[i];
		bool given = n->a->given[i / 64] >> (i % 64) & 1;
		u32 ext = given ? (u32)e->handle.fd + 1 : 0;

		if (n->map[i] && n->map[i] != ext && sim_conn_busy(n, ~0u))
			return false;
	}
	for (u32 i = 0; i < sim.o.extents; i++) {
		const struct kvd_extent *e = &pool->extents[i];
		bool given = n->a->given[i / 64] >> (i % 64) & 1;
		u32 ext = given ? (u32)e->handle.fd + 1 : 0;

		if (n->map[i] != ext)
			sim_conn_unmap(n, i);
		n->leaving[i] = given && e->state == KVD_EXTENT_DRAINING ? e->serial : 0;
		if (ext && !n->map[i] && !n->leaving[i]) {
			n->map[i] = (u16)ext;
			sim.exts[ext - 1].maps++;
		}
	}
	return true;
}

static void conn_attach(struct sim_conn *n)
{
	n->attached_epoch = sim.core.mm.table_epoch;
	n->table = n->a->pool->table.shared;
	n->pool_id = n->a->pool->id;
	n->position = 0;
	n->fresh = true;
	memset(n->mirror, 0, nr_pages() * sizeof(u64));
}

static int session_make(struct sim_conn *n)
{
	struct kvd_session_params p = {
		.client_id = n->id,
		.tenant = sim.tenants[n->tenant],
		.page = n->page,
		.owner = n,
		.pid = (s32)(1000 + n->id),
		.name = "sim",
	};
	struct kvd_refusal why;
	int r;

	sim_core_enter();
	sim.image->next_client_id = sim.next_id;
	kvd_crash_point();
	n->kept = true;
	kvd_crash_point();
	r = kvd_session_create(&sim.core, &p, &n->s);
	if (r) {
		n->kept = false;
		n->s = NULL;
		sim_core_leave();
		return r;
	}
	r = kvd_session_open_pool(n->s, &layout, NULL, &n->a, &why);
	if (r)
		kvd_session_end(n->s, "no pool");
	else
		n->a->pool->key_bits = (u32)sim.o.key_bits;
	sim_core_leave();
	return r;
}

bool sim_conn_open(struct sim_client *c)
{
	u32 k = (u32)(c - sim.clients);
	struct sim_conn *n;
	int r;

	if (!sim.up || sim.nr_conns == SIM_CONNS)
		return false;
	n = &sim.conns[sim.nr_conns++];
	*n = (struct sim_conn){.used = true,
			       .id = sim.next_id++,
			       .client = k,
			       .tenant = k % (u32)sim.o.tenants};
	n->page = calloc(1, KV_SESSION_BYTES);
	n->map = calloc(sim.o.extents, sizeof(*n->map));
	n->leaving = calloc(sim.o.extents, sizeof(*n->leaving));
	n->mirror = calloc(nr_pages(), sizeof(u64));
	SIM_EXPECT(n->page && n->map && n->leaving && n->mirror);
	n->tenant_index = sim.tenants[n->tenant]->index;
	r = session_make(n);
	if (r) {
		if (r != -ENOMEM && r != -EMFILE && r != -EIO)
			sim_fail("a session is refused: %d", r);
		n->dead = true;
		return false;
	}
	n->given = true;
	SIM_EXPECT(extents_sync(n));
	conn_attach(n);
	c->conn = n;
	c->nr_inbox = 0;
	c->chain_next = 0;
	return true;
}

/* The session is lost: whatever the requests held is gone, they start again. */
static void all_lost(struct sim_client *c)
{
	if (!sim.lossy && !sim_client_hostile(c))
		sim_fail("session %llu is lost, and nothing was damaged",
			 (unsigned long long)c->conn->id);
	c->conn->dead = c->conn->s == NULL;
	c->conn = NULL;
	while (c->nr)
		held_remove(c, &c->held[c->nr - 1]);
	c->nr_inbox = 0;
}

static void surplus_free(struct sim_conn *n, u32 pfn, u64 tag, u32 nr)
{
	struct kv_page_ref ref = {.pfn = pfn, .tag = tag};
	u32 done, first;

	for (u32 i = 0; i < nr; i++)
		SIM_EXPECT(kvd_lease_free(n->s, n->a, &ref, 1, &done, &first) == 0);
}

/* kvmd says which leases it knows: what the client does not know is given back. */
static void leases_sync(struct sim_client *c)
{
	struct sim_conn *n = c->conn;
	struct kvd_pool *pool = n->a->pool;
	u32 known[SIM_HELD] = {0}, nr = c->nr; /* what is popped meanwhile comes behind */

	sim_core_enter();
	for (u32 pfn = 0; pfn < pool->geo.nr_pages; pfn++) {
		u32 refs = n->a->refs[pfn];
		u64 tag = pool->frames[pfn].tag;
		struct sim_held *h;

		if (!refs)
			continue;
		if (pool->frames[pfn].state == KVD_MAGAZINE &&
		    !kvd_lease_holds(n->s, n->a, pfn, tag))
			continue;
		h = sim_held_find(c, pfn, kv_tag_gen(tag));
		if (h) {
			known[h - c->held] = KV_MIN(refs, h->refs);
			h->revoked = false;
			if (kv_tag_sealed(tag) && h->write) {
				h->write = false;
				h->sealed =
					sim_cell_of(pool, pfn)->sealed & ~SIM_UNFINISHED;
			} else if (h->sealing) {
				sim_cell_of(pool, pfn)->sealed = 0;
			}
			h->sealing = false;
		}
		if (refs > (h ? h->refs : 0))
			surplus_free(n, pfn, tag, refs - (h ? h->refs : 0));
	}
	sim_core_leave();
	for (u32 i = nr; i-- > 0;) {
		struct sim_held *h = &c->held[i];

		if (known[i] < h->refs && !h->revoked && !sim.lossy &&
		    !sim_client_hostile(c))
			sim_fail("session %llu: page %u generation %#llx: %u references, "
				 "kvmd knows %u",
				 (unsigned long long)n->id, h->pfn,
				 (unsigned long long)h->gen, h->refs, known[i]);
		h->refs = known[i];
		if (!h->refs)
			held_remove(c, h);
	}
}

static bool resume(struct sim_client *c)
{
	struct sim_conn *n = c->conn;

	n->a = NULL;
	for (u32 i = 0; i < KV_POOLS_MAX && !n->a; i++)
		if (n->s->attach[i].pool)
			n->a = &n->s->attach[i];
	if (!n->a) {
		sim_core_enter();
		kvd_session_end(n->s, "its pool is lost");
		sim_core_leave();
		all_lost(c);
		return sim_conn_open(c);
	}
	n->a->pool->key_bits = (u32)sim.o.key_bits;
	sim_core_enter();
	kvd_session_give_extents(n->s, n->a);
	sim_core_leave();
	if (!extents_sync(n))
		return false;
	leases_sync(c);
	conn_attach(n);
	c->chain_next = 0;
	return true;
}

bool sim_client_ready(struct sim_client *c)
{
	struct sim_conn *n = c->conn;

	if (!sim.up)
		return false;
	if (n && (!n->s || n->s->state != KVD_SESSION_LIVE)) {
		all_lost(c);
		n = NULL;
	}
	if (!n)
		return sim_conn_open(c);
	if (n->attached_epoch == sim.core.mm.table_epoch)
		return true;
	return resume(c);
}

/* --------------------------------------------------------------------- completions */

static void grant_take(struct sim_client *c, const struct sim_letter *l, u32 i)
{
	const struct kv_grant *g = &l->grants[i];
	struct sim_conn *n = c->conn;
	u32 index = g->pfn / (u32)sim.o.extent_pages;
	struct sim_held *h = sim_held_add(c, g->pfn, kv_tag_gen(g->tag));
	const struct sim_cell *cell;

	h->write = !l->shared && !h->sealed;
	h->revoked |= l->revoked[i];
	if (l->shared)
		h->sealed = l->sealed[i];
	if (sim_client_hostile(c) || h->revoked)
		return;
	if (!n->map[index])
		sim_fail("page %u is handed out before its extent", g->pfn);
	cell = &sim.exts[n->map[index] - 1].cells[g->pfn % sim.o.extent_pages];
	if (!l->shared && cell->gen && cell->writer != n->id &&
	    !(g->flags & KV_GRANT_DIRTY))
		sim_fail(
			"page %u has bytes of session %llu, and is given to %llu as clean",
			g->pfn, (unsigned long long)cell->writer,
			(unsigned long long)n->id);
	if (l->shared && (cell->gen != h->gen || cell->sealed != h->sealed) &&
	    kv_tag_gen(sim.core.mm.pools[n->pool_id - 1]->frames[g->pfn].tag) == h->gen)
		sim_fail("lookup of prefix page %#llx: page %u has %#llx, generation "
			 "%#llx of %#llx",
			 (unsigned long long)h->sealed, g->pfn,
			 (unsigned long long)cell->sealed, (unsigned long long)cell->gen,
			 (unsigned long long)h->gen);
}

void sim_letter_take(struct sim_client *c, u32 k)
{
	struct sim_letter l = c->inbox[k];

	c->inbox[k] = c->inbox[--c->nr_inbox];
	for (u32 i = 0; i < l.nr; i++)
		grant_take(c, &l, i);
}
