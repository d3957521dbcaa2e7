/* SPDX-License-Identifier: Apache-2.0 */
/*
 * schedule.c - a schedule: options and acts drawn from a seed, run in two phases, written
 * and read as text.
 *
 * All acts are drawn before the first one runs, and their arguments are taken modulo what
 * there is at the time: so any of them can be left out, which is what the shrinker does.
 * Safety phase: anything may fail, die, be late or lie. Liveness phase: nothing fails any
 * more, everybody finishes, and all memory must come back.
 */
#include "tests/sim/world/world.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kvmd/dbg/fault.h"

#define RUN_SECONDS 20u

static u64 draw_state;

static u32 rnd(u32 n)
{
	u64 z = (draw_state += 0x9e3779b97f4a7c15ull);

	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
	return (u32)(((z ^ (z >> 31)) >> 32) * n >> 32);
}

/* ------------------------------------------------------------------------- drawing */

static void opts_draw(struct sim_opts *o)
{
	o->clients = rnd(16) ? 1 + rnd(5) : 1 + rnd(32);
	o->domains = 1 + rnd(SIM_DOMAINS);
	o->tenants = o->domains + rnd(SIM_TENANTS - (u32)o->domains + 1);
	o->extent_pages = 1ull << rnd(4);
	o->extents = 1 + rnd(8);
	if (rnd(64) == 0) {
		o->extents = 1 + rnd(16);
		o->extent_pages = 256;
	}
	while (o->extents * o->extent_pages < 4)
		o->extents++;
	o->gen_left = rnd(16) ? 0 : 1 + rnd(400);
	o->key_bits = rnd(4) ? 128 : 2 + rnd(4);
	o->hostile = rnd(4) == 0;
	o->tier = rnd(2);
}

void sim_draw(struct sim_schedule *s, u64 seed)
{
	u32 weights[64], sum = 0;

	draw_state = seed * 0xd1342543de82ef95ull;
	s->o.seed = seed;
	opts_draw(&s->o);
	s->nr = 10 + rnd(rnd(8) ? 80 : 400);
	/* Each schedule has its own mixture: what is left out of one makes room for
	 * longer runs of the rest. */
	for (u32 i = 0; i < sim_nr_ops; i++) {
		weights[i] = sim_ops[i].weight * (u32[]){0, 1, 1, 3}[rnd(4)];
		sum += weights[i];
	}
	for (u32 i = 0; i < s->nr && sum; i++) {
		struct sim_act *a = &s->acts[i];
		u32 at = rnd(sum);

		memset(a, 0, sizeof(*a));
		while (at >= weights[a->op])
			at -= weights[a->op++];
		for (u32 k = 0; k < SIM_ARGS; k++)
			a->a[k] = (u16)(sim_ops[a->op].range[k]
						? rnd(sim_ops[a->op].range[k])
						: 0);
	}
	if (!sum)
		s->nr = 0;
}

/* ------------------------------------------------------------------------- running */

static void act_run(const void *arg)
{
	const struct sim_act *a = arg;

	sim_ops[a->op].run(a->a);
	sim_check(sim.act_at % 4 == 0 || sim_ops[a->op].run == sim_op_start);
}

static struct kvd_image image;

static void world_begin(const struct sim_opts *o)
{
	struct sim_stats stats = sim.stats;

	memset(&sim, 0, offsetof(struct sim_world, clients));
	memset(sim.clients, 0, o->clients * sizeof(sim.clients[0]));
	sim.stats = stats;
	sim.o = *o;
	sim.next_id = 1;
	sim.now_ns = 1;
	kvd_crash_left = 0;
	if (o->gen_left)
		sim.saved[KVD_SAVED_GENERATION] = KV_TAG_GEN_MAX + 1 - o->gen_left;
	sim.image = &image;
	sim.in_core = false;
	sim_env_init();
}

static void world_end(void)
{
	kvd_crash_left = 0;
	sim.in_core = false;
	sim_heap_drop();
	sim_env_fini();
	for (u32 i = 0; i < sim.nr_conns; i++) {
		struct sim_conn *n = &sim.conns[i];

		for (u32 k = 0; k < KV_ANNOUNCE_SLOTS; k++)
			free(n->steps[k].block);
		free(n->page);
		free(n->map);
		free(n->leaving);
		free(n->mirror);
	}
	/* Damage may be anywhere in it, all else is at its beginning. */
	memset(&image, 0,
	       sim.lossy ? sizeof(image)
			 : offsetof(struct kvd_image, sessions) +
				   (sim.nr_conns + 1) * sizeof(image.sessions[0]));
}

static void turns(void)
{
	for (u32 i = 0; i < 2000; i++)
		if (!sim_kvmd_turn())
			return;
	sim_fail("liveness: the core never comes to rest");
}

/* Everybody finishes what it does and goes. */
static void all_end(void)
{
	u16 none[SIM_ARGS] = {0};

	sim_op_mover(none);
	for (u32 i = 0; i < SIM_COPIES; i++)
		sim_copy_end(i, true);
	for (u32 i = 0; i < sim.o.clients; i++)
		if (sim.clients[i].conn)
			sim_client_ready(&sim.clients[i]);
	for (u32 i = 0; i < sim.nr_conns; i++) {
		struct sim_conn *n = &sim.conns[i];

		if (!n->dead)
			for (u32 k = 0; k < KV_ANNOUNCE_SLOTS; k++)
				sim_step_finish(n, k);
		n->dead = n->proof = true;
		sim_conn_free(n);
		if (!n->s)
			continue;
		sim_core_enter();
		kvd_session_work_ended(n->s);
		sim_core_leave();
	}
	memset(sim.clients, 0, sim.o.clients * sizeof(sim.clients[0]));
	turns();
}

static void caches_empty(void)
{
	struct kvd_evicted evicted;

	sim_core_enter();
	for (u32 i = 0; i < KVD_POOLS_MAX; i++) {
		struct kvd_pool *pool = sim.core.mm.pools[i];

		for (u32 pfn = 0; pool && pfn < pool->geo.nr_pages; pfn++)
			if (pool->frames[pfn].flags & KVD_FRAME_HELD)
				kvd_lease_revoke(pool, pfn, 0);
	}
	for (u32 i = 0; i < sim.o.domains; i++)
		kvd_domain_evict(&sim.core, sim.domains[i], false, &evicted);
	sim_core_leave();
	turns();
}

static void all_back_check(void)
{
	for (u32 i = 0; i < sim.o.tenants; i++) {
		const struct kvd_account *acct = &sim.tenants[i]->account;

		if (acct->used_bytes || acct->quarantine_bytes)
			sim_fail("liveness: tenant %u keeps %llu pages, %llu in "
				 "quarantine",
				 i, (unsigned long long)(acct->used_bytes / SIM_STRIDE),
				 (unsigned long long)(acct->quarantine_bytes /
						      SIM_STRIDE));
	}
	if (sim.core.nr_sessions)
		sim_fail("liveness: %u sessions are left", sim.core.nr_sessions);
	for (u32 i = 0; i < KVD_POOLS_MAX; i++) {
		struct kvd_pool *pool = sim.core.mm.pools[i];

		sim_core_enter();
		for (u32 e = 0; pool && e < pool->nr_extents; e++)
			if (pool->extents[e].state == KVD_EXTENT_LIVE &&
			    kvd_extent_shrink(pool, e))
				sim_fail("liveness: extent %u of pool %u cannot go", e,
					 pool->id);
		sim_core_leave();
	}
	if (sim.core.mm.extent_bytes_used || sim.nr_exts)
		sim_fail("liveness: %u extents are left", sim.nr_exts);
}

static void regions_check(void)
{
	for (u32 i = 0; i < SIM_REGIONS; i++)
		if (sim.regions[i].used && !sim.regions[i].orphan)
			sim_fail("liveness: a region of kind %d is left",
				 (int)sim.regions[i].r.kind);
	if (sim_heap_blocks())
		sim_fail("liveness: %u heap blocks are left", sim_heap_blocks());
}

static void liveness(const void *arg)
{
	kvd_crash_left = 0;
	sim.peek.armed = false;
	sim.nr_marks = 0;
	memset(sim.fail_left, 0, sizeof(sim.fail_left));
	sim.backend_eagain = 0;
	sim.calm = true;
	sim_kvmd_start();
	if (sim.over)
		return;
	sim_check(true);
	all_end();
	sim_check(true);
	caches_empty();
	sim_check(true);
	all_back_check();
	sim_core_enter();
	kvd_core_fini(&sim.core);
	sim_core_leave();
	regions_check();
}

bool sim_run(const struct sim_schedule *s)
{
	enum sim_end end = SIM_DONE;

	world_begin(&s->o);
	alarm(RUN_SECONDS);
	for (u32 i = 0; i <= s->nr && end != SIM_FAILED && !sim.over; i++) {
		static const struct sim_act first = {.a = {0}};

		sim.act_at = i;
		sim.stats.acts++;
		if (i == 0)
			end = sim_guard((void (*)(const void *))sim_op_start, first.a);
		else
			end = sim_guard(act_run, &s->acts[i - 1]);
		if (end == SIM_KILLED)
			sim_kvmd_died();
	}
	if (end != SIM_FAILED && !sim.over)
		end = sim_guard(liveness, NULL);
	alarm(0);
	world_end();
	return end != SIM_FAILED;
}

/* ---------------------------------------------------------------------------- text */

static const struct {
	const char *name;
	size_t off;
} opt_names[] = {
	{"seed", offsetof(struct sim_opts, seed)},
	{"clients", offsetof(struct sim_opts, clients)},
	{"tenants", offsetof(struct sim_opts, tenants)},
	{"domains", offsetof(struct sim_opts, domains)},
	{"extents", offsetof(struct sim_opts, extents)},
	{"extent_pages", offsetof(struct sim_opts, extent_pages)},
	{"gen_left", offsetof(struct sim_opts, gen_left)},
	{"key_bits", offsetof(struct sim_opts, key_bits)},
	{"hostile", offsetof(struct sim_opts, hostile)},
	{"tier", offsetof(struct sim_opts, tier)},
};

static u64 *opt_of(struct sim_opts *o, u32 i)
{
	return (u64 *)((u8 *)o + opt_names[i].off);
}

void sim_write(const struct sim_schedule *s, FILE *f, const char *why)
{
	struct sim_opts o = s->o;

	fprintf(f, "# %s\n", why);
	for (u32 i = 0; i < KV_ARRAY_SIZE(opt_names); i++)
		fprintf(f, "%s %llu\n", opt_names[i].name,
			(unsigned long long)*opt_of(&o, i));
	for (u32 i = 0; i < s->nr; i++) {
		const struct sim_act *a = &s->acts[i];

		fprintf(f, "%s", sim_ops[a->op].name);
		for (u32 k = 0; k < SIM_ARGS && sim_ops[a->op].range[k]; k++)
			fprintf(f, " %u", a->a[k]);
		fprintf(f, "\n");
	}
}

static bool opts_good(const struct sim_opts *o)
{
	return o->clients && o->clients <= SIM_CLIENTS && o->domains &&
	       o->domains <= SIM_DOMAINS && o->tenants >= o->domains &&
	       o->tenants <= SIM_TENANTS && kv_is_pow2(o->extent_pages) && o->extents &&
	       o->extents <= 64 && o->extents * o->extent_pages <= 4096 && o->key_bits &&
	       o->key_bits <= 128;
}

static bool line_read(struct sim_schedule *s, const char *line)
{
	unsigned a[SIM_ARGS] = {0};
	unsigned long long value;
	char name[32];

	if (line[0] == '#' || line[0] == '\n')
		return true;
	if (sscanf(line, "%31s", name) != 1)
		return false;
	for (u32 i = 0; i < KV_ARRAY_SIZE(opt_names); i++) {
		if (strcmp(name, opt_names[i].name))
			continue;
		if (sscanf(line, "%*s %llu", &value) != 1)
			return false;
		*opt_of(&s->o, i) = value;
		return true;
	}
	for (u32 op = 0; op < sim_nr_ops && s->nr < SIM_ACTS_MAX; op++) {
		if (strcmp(name, sim_ops[op].name))
			continue;
		sscanf(line, "%*s %u %u %u %u", &a[0], &a[1], &a[2], &a[3]);
		s->acts[s->nr++] = (struct sim_act){
			.op = (u16)op, .a = {(u16)a[0], (u16)a[1], (u16)a[2], (u16)a[3]}};
		return true;
	}
	return false;
}

u32 sim_read(struct sim_schedule *s, FILE *f)
{
	char line[512];
	u32 nr = 0;

	s->nr = 0;
	memset(&s->o, 0, sizeof(s->o));
	while (fgets(line, sizeof(line), f)) {
		nr++;
		if (!line_read(s, line))
			return nr;
	}
	return opts_good(&s->o) ? 0 : nr + 1;
}
