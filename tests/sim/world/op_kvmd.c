/* SPDX-License-Identifier: Apache-2.0 */
/*
 * op_kvmd.c - acts of everybody else: the clock, the operator, death, damage, hooks that
 * fail, and a client that lies.
 */
#include "tests/sim/world/world.h"

#include <string.h>

#include "kvmd/dbg/fault.h"

static struct kvd_pool *pool_pick(u32 k)
{
	for (u32 i = 0; i < KVD_POOLS_MAX; i++) {
		struct kvd_pool *pool = sim.core.mm.pools[(k + i) % KVD_POOLS_MAX];

		if (pool)
			return pool;
	}
	return NULL;
}

void sim_op_run(const u16 *a)
{
	for (u32 i = 0; i < 1 + a[0] % 4u; i++)
		if (!sim_kvmd_turn())
			return;
}

void sim_op_clock(const u16 *a)
{
	static const u64 jumps[] = {1000,	 10000000,    1100000000,
				    11000000000, 61000000000, 3600000000000};

	sim.now_ns += jumps[a[0] % KV_ARRAY_SIZE(jumps)];
	sim_kvmd_turn();
	if (!sim.up || !(a[1] & 1))
		return;
	/* It went back: the core does not. */
	sim_core_enter();
	kvd_core_now(&sim.core, sim.now_ns / 2);
	SIM_EXPECT(sim.core.mm.now_ns == sim.now_ns);
	sim_core_leave();
}

void sim_op_evict(const u16 *a)
{
	struct kvd_evicted evicted;

	if (!sim.up)
		return;
	if (!(a[1] & 1))
		sim.nr_marks = 0; /* a reset takes held pages, too */
	sim_core_enter();
	kvd_domain_evict(&sim.core, sim.domains[a[0] % sim.o.domains], a[1] & 1,
			 &evicted);
	sim_core_leave();
}

void sim_op_hold(const u16 *a)
{
	struct kvd_pool *pool = sim.up ? pool_pick(a[0]) : NULL;
	u32 nr, pfn;
	int r;

	if (!pool)
		return;
	pfn = a[1] % pool->geo.nr_pages;
	sim_core_enter();
	r = kvd_steer_hold(pool, pfn, a[2] & 1, &nr);
	sim_core_leave();
	if (!r && !(a[2] & 1))
		sim.marks[sim.nr_marks++ % SIM_MARKS] =
			(struct sim_mark){.pool_id = pool->id,
					  .pfn = pfn,
					  .gen = kv_tag_gen(pool->frames[pfn].tag)};
}

void sim_op_unhold(const u16 *a)
{
	struct kvd_pool *pool = sim.up ? pool_pick(a[0]) : NULL;
	u32 nr;

	if (!pool)
		return;
	sim.nr_marks = 0;
	sim_core_enter();
	kvd_steer_unhold(pool, a[1] % pool->geo.nr_pages, a[2] & 1, &nr);
	sim_core_leave();
}

void sim_op_drain(const u16 *a)
{
	struct kvd_drained d;

	if (!sim.up)
		return;
	sim_core_enter();
	kvd_steer_drain(&sim.core, sim.tenants[a[0] % sim.o.tenants], (a[1] & 3) == 1,
			(a[1] & 4) != 0, &d);
	sim_core_leave();
}

void sim_op_limits(const u16 *a)
{
	u64 pages = sim.o.extents * sim.o.extent_pages;
	struct kvd_limits l = {.min_bytes = a[1] % (pages / 4 + 1) * SIM_STRIDE,
			       .max_bytes = (1 + a[2] % pages) * SIM_STRIDE,
			       .weight = 1 + a[3] % 1000u};
	const char *field;
	struct kvd_tenant *t;
	u64 stale;

	if (!sim.up)
		return;
	t = sim.tenants[a[0] % sim.o.tenants];
	l.high_bytes = l.max_bytes;
	stale = a[3] & 7 ? 0 : 1;
	sim_core_enter();
	kvd_steer_limits(&sim.core, t, &l, t->revision - stale, a[3] & 1, &field);
	sim_core_leave();
}

/* Whoever holds it may be told now, or finds out when kvmd is another one. */
static void holders_warn(u32 pool_id, u32 pfn, u64 gen)
{
	for (u32 i = 0; i < sim.o.clients; i++) {
		struct sim_client *c = &sim.clients[i];

		if (c->conn && c->conn->pool_id == pool_id)
			sim_held_revoked(c, pfn, gen);
	}
}

void sim_op_revoke(const u16 *a)
{
	struct kvd_pool *pool = sim.up ? pool_pick(a[0]) : NULL;
	u32 pfn;

	if (!pool)
		return;
	pfn = a[1] % pool->geo.nr_pages;
	sim.nr_marks = 0;
	holders_warn(pool->id, pfn, kv_tag_gen(pool->frames[pfn].tag));
	sim_core_enter();
	kvd_lease_revoke(pool, pfn, 0);
	sim_core_leave();
}

void sim_op_recall(const u16 *a)
{
	struct kvd_pool *pool = sim.up ? pool_pick(a[0]) : NULL;

	if (!pool)
		return;
	sim_core_enter();
	kvd_lease_recall(pool);
	sim_core_leave();
}

void sim_op_shrink(const u16 *a)
{
	struct kvd_pool *pool = sim.up ? pool_pick(a[0]) : NULL;
	u32 index;

	if (!pool)
		return;
	index = a[1] % pool->nr_extents;
	if (pool->extents[index].state != KVD_EXTENT_LIVE)
		return;
	sim_core_enter();
	kvd_extent_shrink(pool, index);
	sim_core_leave();
}

/* EXTENT_REMOVED was read, and the steps that had begun before have retired. */
void sim_op_unmap(const u16 *a)
{
	struct sim_client *c = sim_op_client(a[0]);
	struct sim_conn *n;
	int r;

	if (!sim_client_ready(c) || sim_conn_busy(c->conn, ~0u))
		return;
	n = c->conn;
	for (u32 i = 0; i < sim.o.extents; i++) {
		struct kv_extent_ref ref = {.index = i, .serial = n->leaving[i]};

		if (!n->leaving[i])
			continue;
		sim_conn_unmap(n, i);
		n->leaving[i] = 0;
		sim_core_enter();
		r = kvd_session_unmapped(n->s, n->pool_id, &ref);
		sim_core_leave();
		if (r && !sim.lossy)
			sim_fail("unmapped extent %u serial %llu: %d", i,
				 (unsigned long long)ref.serial, r);
	}
}

/* ---------------------------------------------------------------------------- ends */

static void client_forget(struct sim_client *c)
{
	c->conn = NULL;
	c->nr = 0;
	c->nr_inbox = 0;
	c->chain_next = 0;
}

/* The connection is lost, the process lives: its steps go on. */
void sim_op_bye(const u16 *a)
{
	struct sim_client *c = sim_op_client(a[0]);
	struct sim_conn *n = c->conn;

	if (!n || !sim.up || !n->s)
		return;
	client_forget(c);
	sim_core_enter();
	kvd_session_end(n->s, "good bye");
	sim_core_leave();
	sim.stats.deaths++;
}

/* It closes its pool, with no step under way, and opens another session later. */
void sim_op_close(const u16 *a)
{
	struct sim_client *c = sim_op_client(a[0]);
	struct sim_conn *n;

	if (!sim_client_ready(c) || sim_conn_busy(c->conn, ~0u))
		return;
	n = c->conn;
	n->closed = true;
	client_forget(c);
	for (u32 i = 0; i < sim.o.extents; i++)
		sim_conn_unmap(n, i);
	sim_core_enter();
	kvd_session_close_pool(n->s, n->pool_id);
	if (a[1] & 1)
		kvd_domain_pools_trim(&sim.core);
	kvd_session_end(n->s, "good bye");
	sim_core_leave();
}

void sim_op_die(const u16 *a)
{
	struct sim_client *c = sim_op_client(a[0]);
	struct sim_conn *n = c->conn;

	if (!n)
		return;
	client_forget(c);
	n->dead = true;
	sim.stats.deaths++;
	if (!sim.up || !n->s || (a[1] & 3) == 3)
		return; /* nobody has noticed */
	sim_core_enter();
	kvd_session_end(n->s, "hang-up");
	sim_core_leave();
}

/* Proof that a dead process's work is over, or that of one that never came to life. */
void sim_op_proof(const u16 *a)
{
	for (u32 k = 0; k < sim.nr_conns; k++) {
		struct sim_conn *n = &sim.conns[(a[0] + k) % sim.nr_conns];

		if (n->given && !n->dead)
			continue;
		if (n->proof && !(n->s && sim.up))
			continue;
		n->dead = n->proof = true;
		sim_conn_free(n);
		if (!sim.up || !n->s)
			return;
		sim_core_enter();
		kvd_session_work_ended(n->s);
		sim_core_leave();
		return;
	}
}

/* ---------------------------------------------------------------------------- tier */

void sim_op_copy(const u16 *a)
{
	for (u32 i = 0; i < SIM_COPIES; i++) {
		u32 k = (a[0] + i) % SIM_COPIES;

		if (!sim.copies[k].used)
			continue;
		sim_copy_end(k, (a[1] & 7) != 7);
		return;
	}
}

/* The copier of a kvmd before this one is proven to be gone. */
void sim_op_mover(const u16 *a)
{
	for (u32 i = 0; i < SIM_COPIES; i++) {
		struct sim_copy *c = &sim.copies[i];

		if (!c->used || !c->lost)
			continue;
		c->used = c->lost = false;
		sim.exts[c->ext].maps--;
		sim_ext_put(&sim.exts[c->ext]);
	}
	if (sim.up)
		sim.core.mm.grace.held = false;
}

/* ------------------------------------------------------------------ kvmd's own fate */

void sim_op_kill(const u16 *a)
{
	if (!sim.up)
		return;
	sim.stats.kills++;
	sim_kvmd_died();
}

/* At such a place a client does something of its own, and the core goes on. */
void sim_op_peek(const u16 *a)
{
	sim.peek.armed = true;
	memcpy(sim.peek.a, a, sizeof(sim.peek.a));
	kvd_crash_left = 1 + a[0] % 64u;
}

void sim_peek_now(void)
{
	const u16 *a = sim.peek.a, pop[] = {a[1], a[2], a[3], 0};
	struct sim_conn *n = sim.nr_conns ? &sim.conns[a[1] % sim.nr_conns] : NULL;
	bool was = sim.in_core;

	sim.peek.armed = false;
	sim.peek.under = true;
	sim.in_core = false;
	if (a[3] & 1)
		sim_op_pop(pop);
	for (u32 i = 0; i < 1 + a[2] % 8u && n && n->given && !n->dead; i++)
		sim_step_go(n, a[3] % 3, a[3]);
	sim.in_core = was;
	sim.peek.under = false;
}

/* At the n-th store or system call from here that leaves something behind. */
void sim_op_crash(const u16 *a)
{
	sim.peek.armed = false;
	kvd_crash_left = 1 + a[0] % 96u;
}

void sim_op_start(const u16 *a)
{
	sim_kvmd_start();
}

static void flip(void *p, u64 bytes, u32 r)
{
	((u8 *)p)[(r * 2654435761ull) % bytes] ^= (u8)(1u << (r & 7));
}

/* Torn: a part of it is what it was before anybody wrote it, or another's. */
static void tear(void *p, u64 bytes, u32 r)
{
	u64 at = r * 2654435761ull % bytes & ~7ull, nr = 8 + (r & 24);

	nr = KV_MIN(nr, bytes - at);
	if (r & 64)
		memset((u8 *)p + at, 0, nr);
	else
		memmove((u8 *)p + at, p, nr);
}

/* What is kept is damaged while no kvmd looks: records, tokens, leases or the image. */
void sim_op_damage(const u16 *a)
{
	void (*how)(void *p, u64 bytes, u32 r) = a[2] & 1 ? tear : flip;
	struct kvd_region *r = NULL;
	u32 r16 = a[1];

	if (sim.up)
		return;
	sim.lossy = true;
	sim.stats.damages++;
	if ((a[0] & 15) == 15) {
		how(sim.image, sizeof(*sim.image), r16);
		return;
	}
	if ((a[0] & 15) == 14) {
		how(&sim.image->sessions[a[3] % 4], sizeof(sim.image->sessions[0]), r16);
		return;
	}
	for (u32 i = 0; i < SIM_REGIONS && !r; i++) {
		struct sim_region *m = &sim.regions[(a[0] + i) % SIM_REGIONS];

		if (m->used && m->kept)
			r = &m->r;
	}
	if (!r)
		return;
	if (r->kind == KVD_REGION_FRAMES &&
	    (a[2] & 6)) /* a record rather than the head */
		how((u8 *)r->addr + KVD_FRAMES_OFF +
			    a[3] % (sim.o.extents * sim.o.extent_pages) * 128,
		    64, r16);
	else
		how(r->addr, r->size_bytes, r16);
}

void sim_op_fault(const u16 *a)
{
	if (a[0] % 6u == 5)
		sim.backend_eagain = 1 + a[1] % 3u;
	else
		sim.fail_left[a[0] % SIM_HOOK_NR] = 1 + a[1] % 6u;
}

/* A hostile client writes what it likes into its session page. */
void sim_op_lie(const u16 *a)
{
	struct sim_client *c = sim_op_client(a[0]);
	struct kv_session_page *p;
	u64 word = (u64)a[1] << 48 | (u64)a[2] << 32 | a[3] % 64;

	if (!c->conn || !sim_client_hostile(c))
		return;
	p = c->conn->page;
	switch (a[1] % 5) {
	case 0:
		p->slots[a[2] % KV_ANNOUNCE_SLOTS].word = a[3] & 1 ? ~0ull : a[3];
		return;
	case 1:
		p->magazines[a[2] % 2].slots[a[3] % 8].word = word | KV_MAG_STOCKED;
		return;
	case 2:
		p->magazines[a[2] % 2].slots[a[3] % 8].tag = word;
		return;
	case 3:
		p->table_epoch.word = word;
		p->wake.word = word;
		return;
	default:
		p->magazines[a[2] % 2].slots[a[3] % 8].word = 0;
		p->closed = word;
		return;
	}
}
