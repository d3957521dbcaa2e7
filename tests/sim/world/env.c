/* SPDX-License-Identifier: Apache-2.0 */
/*
 * env.c - what the core is given: memory, saved counters, extents, a keeper, a tier. Each
 * hook may be told to fail, and the core may be killed before and after what a hook makes
 * last.
 */
#include "tests/sim/world/world.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "kvmd/dbg/fault.h"
#include "kvmd/own/spill.h"

struct sim_world sim;

/* ------------------------------------------------------------------------- regions */

#define SPARE 512u

/* Zeroed memory of ended schedules: a fresh mapping costs more than a schedule. */
static struct {
	void *addr;
	u64 bytes;
} spares[SPARE];

static void *memory_get(u64 bytes)
{
	void *p;

	for (u32 i = 0; i < SPARE; i++) {
		p = spares[i].addr;
		if (!p || spares[i].bytes != bytes)
			continue;
		spares[i].addr = NULL;
		return p;
	}
	p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	return p == MAP_FAILED ? NULL : p;
}

/* Of a table only what was written is cleared: its log is a megabyte. */
static void memory_clear(const struct kvd_region *r)
{
	const struct kv_table *t = r->addr;
	u64 used = r->size_bytes, logged;

	if (r->kind == KVD_REGION_TABLE && t->log_off && t->log_off < r->size_bytes) {
		logged = t->log_head.word + 2 * KV_LOG_BATCH_MAX;
		if (logged < KV_LOG_ENTRIES)
			used = t->log_off + logged * sizeof(struct kv_log_entry);
		used = KV_MIN(used, r->size_bytes);
	}
	memset(r->addr, 0, used);
}

static void memory_put(const struct kvd_region *r)
{
	for (u32 i = 0; i < SPARE; i++) {
		if (spares[i].addr)
			continue;
		memory_clear(r);
		spares[i].addr = r->addr;
		spares[i].bytes = r->size_bytes;
		return;
	}
	munmap(r->addr, r->size_bytes);
}

bool sim_hook_fails(enum sim_hook hook)
{
	if (!sim.fail_left[hook] || --sim.fail_left[hook])
		return false;
	sim.stats.faults++;
	return true;
}

static int region_alloc(void *arg, struct kvd_region *r)
{
	struct sim_region *m = NULL;

	if (sim_hook_fails(SIM_HOOK_REGION))
		return -ENOMEM;
	for (u32 i = 0; i < SIM_REGIONS && !m; i++)
		m = sim.regions[i].used ? NULL : &sim.regions[i];
	SIM_EXPECT(m);
	r->addr = memory_get(r->size_bytes);
	SIM_EXPECT(r->addr);
	r->fd = -1;
	*m = (struct sim_region){.used = true, .r = *r};
	kvd_crash_point();
	m->kept = r->kind == KVD_REGION_FRAMES || r->kind == KVD_REGION_TOKENS ||
		  r->kind == KVD_REGION_LEASES;
	kvd_crash_point();
	return 0;
}

void sim_region_drop(struct sim_region *m)
{
	memory_put(&m->r);
	m->used = false;
}

static void region_free(void *arg, struct kvd_region *r)
{
	for (u32 i = 0; i < SIM_REGIONS; i++) {
		struct sim_region *m = &sim.regions[i];

		if (!m->used || m->r.addr != r->addr)
			continue;
		kvd_crash_point();
		m->kept = false;
		kvd_crash_point();
		/* Clients may have it mapped: it goes when the schedule is over. */
		if (r->kind == KVD_REGION_TABLE)
			m->orphan = true;
		else
			sim_region_drop(m);
		return;
	}
	sim_fail("a region is freed that is not there");
}

struct sim_region *sim_region_find(enum kvd_region_kind kind, u32 pool, u64 session)
{
	for (u32 i = 0; i < SIM_REGIONS; i++) {
		struct sim_region *m = &sim.regions[i];

		if (m->used && m->kept && m->r.kind == kind && m->r.pool_id == pool &&
		    m->r.session_id == session)
			return m;
	}
	return NULL;
}

static int save(void *arg, enum kvd_saved what, u64 value)
{
	if (sim_hook_fails(SIM_HOOK_SAVE))
		return -EIO;
	kvd_crash_point();
	sim.saved[what] = value;
	kvd_crash_point();
	return 0;
}

static void log_line(void *arg, int level, const char *line)
{
}

/* ------------------------------------------------------------------------- extents */

static struct sim_ext *ext_new(u32 nr_pages)
{
	struct sim_ext *e = NULL;

	for (u32 i = 0; i < SIM_EXTS && !e; i++)
		e = sim.exts[i].used ? NULL : &sim.exts[i];
	SIM_EXPECT(e);
	*e = (struct sim_ext){.used = true, .kvmd = true, .nr_pages = nr_pages};
	sim.in_core = false;
	e->cells = calloc(nr_pages, sizeof(*e->cells));
	sim.in_core = true;
	SIM_EXPECT(e->cells);
	sim.nr_exts++;
	return e;
}

void sim_ext_put(struct sim_ext *e)
{
	if (e->kvmd || e->keeper || e->maps)
		return;
	free(e->cells);
	e->used = false;
	sim.nr_exts--;
}

static int extent_alloc(struct kvd_backend *be, u64 size, struct kvd_extent_handle *ret)
{
	if (sim.backend_eagain) {
		sim.backend_eagain--;
		return -EAGAIN;
	}
	if (sim_hook_fails(SIM_HOOK_EXTENT))
		return -EIO;
	ret->fd = (int)(ext_new((u32)(size / SIM_STRIDE)) - sim.exts);
	ret->addr = NULL;
	ret->cookie = 0;
	return 0;
}

static void extent_free(struct kvd_backend *be, struct kvd_extent_handle *h, u64 size)
{
	struct sim_ext *e = &sim.exts[h->fd];

	SIM_EXPECT(e->used && e->kvmd);
	e->kvmd = false;
	sim_ext_put(e);
}

static int extent_adopt(struct kvd_backend *be, int fd, u64 size,
			struct kvd_extent_handle *ret)
{
	SIM_EXPECT(sim.exts[fd].used && sim.exts[fd].keeper);
	sim.exts[fd].kvmd = true;
	ret->fd = fd;
	ret->addr = NULL;
	ret->cookie = 0;
	return 0;
}

static void limits(struct kvd_backend *be, struct kvd_backend_limits *ret)
{
	*ret = sim.limits;
}

static const struct kvd_backend_ops backend_ops = {
	.name = "sim",
	.extent_alloc = extent_alloc,
	.extent_free = extent_free,
	.limits = limits,
	.extent_adopt = extent_adopt,
};

static int keep_put(void *arg, u32 pool_id, u32 index, u64 serial, int fd)
{
	struct sim_ext *e = &sim.exts[fd];

	if (sim_hook_fails(SIM_HOOK_KEEP))
		return -EPIPE;
	kvd_crash_point();
	e->keeper = true;
	e->pool_id = pool_id;
	e->index = index;
	e->serial = serial;
	e->domain = sim.core.mm.pools[pool_id - 1]->domain_id;
	kvd_crash_point();
	return 0;
}

static void keep_del(void *arg, u32 pool_id, u32 index, u64 serial)
{
	for (u32 i = 0; i < SIM_EXTS; i++) {
		struct sim_ext *e = &sim.exts[i];

		if (!e->used || !e->keeper || e->pool_id != pool_id ||
		    e->index != index || e->serial != serial)
			continue;
		kvd_crash_point();
		e->keeper = false;
		kvd_crash_point();
		sim_ext_put(e);
		return;
	}
	sim_fail("the keeper is told to forget an extent that it has not");
}

const struct kvd_keep_ops sim_keep_ops = {.extent_put = keep_put, .extent_del = keep_del};

struct sim_ext *sim_ext_of(const struct kvd_pool *pool, u32 pfn)
{
	const struct kvd_extent *e = &pool->extents[kvd_pool_extent_of(pool, pfn)];

	return e->state == KVD_EXTENT_NONE ? NULL : &sim.exts[e->handle.fd];
}

struct sim_cell *sim_cell_of(const struct kvd_pool *pool, u32 pfn)
{
	struct sim_ext *e = sim_ext_of(pool, pfn);

	return e ? &e->cells[pfn & ((1u << pool->geo.shift) - 1)] : NULL;
}

/* -------------------------------------------------------------------- notifications */

static void on_added(void *arg, struct kvd_session *s, struct kvd_pool *pool, u32 index)
{
	struct sim_conn *n = s->owner;
	u32 ext = (u32)pool->extents[index].handle.fd;

	/* One that is away is told when it comes back. */
	if (!n->given || n->attached_epoch != sim.core.mm.table_epoch)
		return;
	if (n->map[index] == ext + 1)
		return; /* a second descriptor of the same memory */
	if (n->map[index])
		sim_fail("extent %u of pool %u comes while another is mapped there",
			 index, pool->id);
	if (sim.exts[ext].domain != sim.tenants[n->tenant]->domain->id)
		sim_fail("an extent of domain %u goes to one of domain %u",
			 sim.exts[ext].domain, sim.tenants[n->tenant]->domain->id);
	n->map[index] = (u16)(ext + 1);
	sim.exts[ext].maps++;
}

static void on_removed(void *arg, struct kvd_session *s, struct kvd_pool *pool, u32 index,
		       u64 serial)
{
	struct sim_conn *n = s->owner;

	if (n->given && n->attached_epoch == sim.core.mm.table_epoch)
		n->leaving[index] = serial;
}

static void on_revoked(void *arg, struct kvd_session *s, struct kvd_pool *pool,
		       const struct kv_page_ref *pages, u32 nr)
{
	struct sim_conn *n = s->owner;

	for (u32 i = 0; i < nr && n == sim.clients[n->client].conn; i++)
		sim_held_revoked(&sim.clients[n->client], pages[i].pfn,
				 kv_tag_gen(pages[i].tag));
}

static void on_pressure(void *arg, struct kvd_session *s, struct kvd_pool *p, u32 level)
{
}

static void on_freed(void *arg, struct kvd_pool *pool, u32 nr)
{
}

static void on_stalled(void *arg, struct kvd_session *s, u64 ns)
{
}

static void on_reaped(void *arg, struct kvd_session *s)
{
	struct sim_conn *n = s->owner;

	for (u32 i = 0; i < KV_ANNOUNCE_SLOTS && n->given &&
			!sim_client_hostile(&sim.clients[n->client]);
	     i++)
		if (n->steps[i].phase >= SIM_ATTACHED && !n->proof)
			sim_fail("session %llu is reaped with a step in slot %u",
				 (unsigned long long)n->id, i);
	n->s = NULL;
	n->a = NULL;
	n->kept = false;
}

const struct kvd_notify sim_notify = {
	.extent_added = on_added,
	.extent_removed = on_removed,
	.revoked = on_revoked,
	.pressure = on_pressure,
	.pages_freed = on_freed,
	.stalled = on_stalled,
	.session_reaped = on_reaped,
};

/* ---------------------------------------------------------------------------- tier */

static struct sim_copy *copy_new(const struct kvd_pool *pool)
{
	for (u32 i = 0; i < SIM_COPIES; i++)
		if (!sim.copies[i].used)
			return &sim.copies[i];
	return NULL;
}

static void copy_begin(struct sim_copy *c, const struct kvd_pool *pool, u32 pfn,
		       bool restore)
{
	struct sim_ext *e = sim_ext_of(pool, pfn);

	*c = (struct sim_copy){.used = true,
			       .restore = restore,
			       .pool_id = pool->id,
			       .pfn = pfn,
			       .ext = (u32)(e - sim.exts)};
	e->maps++;
}

static struct sim_stored *stored_find(u32 domain, const u8 *key)
{
	for (u32 i = 0; i < SIM_STORED; i++)
		if (sim.stored[i].used && sim.stored[i].domain == domain &&
		    !memcmp(sim.stored[i].key, key, KV_KEY_BYTES))
			return &sim.stored[i];
	return NULL;
}

static int tier_evict(void *arg, struct kvd_pool *pool, u32 pfn)
{
	const struct kvd_frame *f = &pool->frames[pfn];
	u32 parent = kvd_prefix_parent(pool, pfn);
	struct sim_copy *c = copy_new(pool);
	struct sim_stored *st;

	if (sim.calm || stored_find(pool->domain_id, f->key))
		return 0;
	if (parent == KVD_PFN_NONE && !(f->flags & KVD_FRAME_ROOT))
		return 0;
	if (!c)
		return -EAGAIN;
	st = &sim.stored[sim.nr_stored++ % SIM_STORED];
	*st = (struct sim_stored){.domain = pool->domain_id,
				  .root = f->flags & KVD_FRAME_ROOT};
	memcpy(st->key, f->key, KV_KEY_BYTES);
	if (parent != KVD_PFN_NONE)
		memcpy(st->parent_key, pool->frames[parent].key, KV_KEY_BYTES);
	memcpy(st->tokens, pool->tokens + (u64)pfn * KV_PAGE_TOKENS, sizeof(st->tokens));
	copy_begin(c, pool, pfn, false);
	c->gen = kv_tag_gen(f->tag);
	c->stored = (u32)(st - sim.stored);
	kvd_spill_begin(pool, pfn);
	sim.stats.spills++;
	return 1;
}

static bool tier_restore(void *arg, const struct kvd_restore_ask *ask)
{
	struct sim_stored *st = stored_find(ask->pool->domain_id, ask->key);
	struct sim_copy *c = copy_new(ask->pool);
	u32 pfn;

	if (!st || !c || sim.calm)
		return false;
	for (u32 i = 0; i < SIM_COPIES; i++)
		if (sim.copies[i].used && sim.copies[i].restore &&
		    sim.copies[i].stored == (u32)(st - sim.stored))
			return true;
	if (kvd_restore_begin(ask->tenant, ask->pool, &pfn))
		return false;
	copy_begin(c, ask->pool, pfn, true);
	c->stored = (u32)(st - sim.stored);
	return true;
}

const struct kvd_spill_ops sim_spill_ops = {.evict = tier_evict, .restore = tier_restore};

static void restore_end(struct sim_copy *c, struct kvd_pool *pool, bool good)
{
	struct sim_stored *st = &sim.stored[c->stored];
	struct kvd_restored r = {.key = st->key,
				 .parent_key = st->parent_key,
				 .tokens = st->tokens,
				 .root = st->root};
	struct sim_cell *cell = sim_cell_of(pool, c->pfn);
	const struct kvd_gens *g = &pool->mm->gens;

	*cell = (struct sim_cell){.gen = ~0ull, .writer = KVD_OWNER_TIER};
	/* The place in the tier may have been used for another page meanwhile. */
	if (!good || !st->used) {
		kvd_restore_fail(pool, c->pfn);
		return;
	}
	/* All bytes are there before anybody can find it: under its next generation. */
	cell->gen = g->next != g->end ? g->next : g->source->next;
	cell->sealed = st->sealed;
	if (kvd_restore_end(pool, c->pfn, &r))
		*cell = (struct sim_cell){.gen = ~0ull, .writer = KVD_OWNER_TIER};
	else
		sim.stats.restores++;
}

void sim_copy_end(u32 k, bool good)
{
	struct sim_copy *c = &sim.copies[k % SIM_COPIES];
	struct kvd_pool *pool;
	struct sim_cell *cell;
	u32 ext = c->ext;

	if (!c->used || c->lost || !sim.up)
		return;
	pool = sim.core.mm.pools[c->pool_id - 1];
	cell = &sim.exts[ext].cells[c->pfn & ((1u << pool->geo.shift) - 1)];
	c->used = false;
	sim.exts[ext].maps--;
	sim_core_enter();
	if (c->restore) {
		restore_end(c, pool, good);
	} else {
		if (cell->gen != c->gen)
			sim_fail("page %u is copied out: generation %#llx, has %#llx",
				 c->pfn, (unsigned long long)c->gen,
				 (unsigned long long)cell->gen);
		sim.stored[c->stored].sealed = cell->sealed;
		sim.stored[c->stored].used = good;
		kvd_spill_end(pool, c->pfn);
	}
	sim_core_leave();
}

/* --------------------------------------------------------------------- begin and end */

void sim_env_init(void)
{
	sim.be.ops = &backend_ops;
	sim.env = (struct kvd_env){&sim, region_alloc, region_free, save, log_line};
	sim.limits.extent_min_bytes = SIM_STRIDE * sim.o.extent_pages;
	sim.limits.extent_max_bytes = sim.limits.extent_min_bytes;
	sim.limits.extent_align_bytes = 4096;
	sim.limits.capacity_bytes = sim.o.extents * sim.limits.extent_min_bytes;
}

void sim_env_died(void)
{
	for (u32 i = 0; i < SIM_REGIONS; i++) {
		struct sim_region *m = &sim.regions[i];

		if (!m->used || m->kept)
			continue;
		if (m->r.kind == KVD_REGION_TABLE)
			m->orphan = true;
		else
			sim_region_drop(m);
	}
	for (u32 i = 0; i < SIM_EXTS; i++) {
		struct sim_ext *e = &sim.exts[i];

		if (!e->used || !e->kvmd)
			continue;
		e->kvmd = false;
		sim_ext_put(e);
	}
	for (u32 i = 0; i < SIM_COPIES; i++)
		sim.copies[i].lost = sim.copies[i].used;
}

void sim_env_fini(void)
{
	for (u32 i = 0; i < SIM_REGIONS; i++)
		if (sim.regions[i].used)
			sim_region_drop(&sim.regions[i]);
	for (u32 i = 0; i < SIM_EXTS; i++) {
		if (sim.exts[i].used) {
			free(sim.exts[i].cells);
			sim.exts[i].used = false;
		}
	}
}
