/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Random clients against a model: the production core, a seed, and one integer per page
 *	that stands for its bytes.
 *
 * Each client keeps what a correct engine would know: grants, references, running steps
 *	and the pages those steps may touch. Steps write P(client, generation) into pages they
 *	hold for writing, and read pages they hold shared, when they end, which may be long
 *	after the client let go of the pages or died. After every operation I1-I8 are audited,
 *	and the model's own rules are checked: a page that a running step may touch is neither
 *	FREE nor in anybody else's hands (I5), the bytes of a sealed page never change (I6), a
 *	lookup returns the bytes that were sealed under those tokens (G1).
 */
#include "tests/unit/own/common.h"

#define CLIENTS	   6u
#define EXTENTS	   4u
#define PER_EXTENT 8u
#define PAGES	   (EXTENTS * PER_EXTENT)
#define SEQS	   5u
#define HELD_MAX   256u

struct held {
	struct kv_grant g;
	bool shared; /* from a lookup, or sealed since */
};

struct client {
	struct kvd_session *s; /* gone once it is reaped */
	struct kvd_attach *a;
	struct kvd_pool *pool;
	u64 id;
	struct held held[HELD_MAX];
	u32 nr;
	bool dead; /* its process is gone, its work may not be */
	u64 slot_tags[KV_ANNOUNCE_SLOTS]
		     [PAGES]; /* pages a step may touch: expected tag */
	bool slot_write[KV_ANNOUNCE_SLOTS][PAGES];
	bool slot_busy[KV_ANNOUNCE_SLOTS];
};

/* What the model knows of one page of a pool. */
struct page {
	u64 bytes;
	u64 writer; /* session whose bytes they are; 0 = zeroes */
	u64 sealed, sealed_gen;
};

static struct rig r;
static struct client clients[CLIENTS];
static struct kvd_tenant *tenants[3];
static struct page pages[2][PAGES]; /* by domain */
static u64 next_pattern;
static u64 stats[16];

static u32 rnd(u32 n)
{
	return kvt_rand_below(n);
}

static void client_start(u32 i)
{
	struct client *c = &clients[i];

	memset(c, 0, sizeof(*c));
	c->a = rig_client(&r, tenants[i % 3], &c->s);
	c->pool = c->a->pool;
	c->id = c->s->id;
}

static struct kvd_pool *pool_of(const struct client *c)
{
	return c->pool;
}

static struct page *page_of(const struct client *c, u32 pfn)
{
	KVT_EXPECT(pfn < pool_of(c)->geo.nr_pages);
	return &pages[pool_of(c)->domain_id][pfn];
}

static void page_zero(struct page *p)
{
	p->bytes = 0;
	p->writer = 0;
}

static void page_write(const struct client *c, u32 pfn, u64 value)
{
	page_of(c, pfn)->bytes = value;
	page_of(c, pfn)->writer = c->id;
}

static void drop(struct client *c, u32 i)
{
	c->held[i] = c->held[--c->nr];
}

static void op_alloc(struct client *c)
{
	u32 nr = 1 + rnd(4),
	    gfp = (u32[]){KV_GFP_NOWAIT, KV_GFP_PREFILL, KV_GFP_ATOMIC}[rnd(3)];
	u64 used = c->s->tenant->account.used_bytes;
	struct kv_grant g[4];
	int rc;

	if (c->nr + nr > HELD_MAX)
		return;
	rc = rig_alloc(c->s, c->a, nr, gfp | (rnd(2) ? KV_GFP_ZERO : 0), g);
	KVT_EXPECT(rc == 0 || rc == KV_FULL || rc == KV_QUOTA || rc == KV_PENDING);
	stats[rc]++;
	KVT_EXPECT_LE(c->s->tenant->account.used_bytes, c->s->tenant->account.max_bytes);
	if (rc) {
		KVT_EXPECT_LE(c->s->tenant->account.used_bytes, used);
		return;
	}
	for (u32 i = 0; i < nr; i++) {
		struct page *p = page_of(c, g[i].pfn);

		/* bytes of another session must be announced; then the engine zeroes */
		KVT_EXPECT(p->writer == 0 || p->writer == c->s->id ||
			   (g[i].flags & KV_GRANT_DIRTY));
		if (g[i].flags & KV_GRANT_DIRTY)
			page_zero(p);
		c->held[c->nr++] = (struct held){.g = g[i]};
	}
}

static void op_stock_and_pop(struct client *c)
{
	u32 mag = rnd(2), nr, pending, slot = rnd(4);
	struct kv_grant g = {0};
	int dirty, rc;

	if (rnd(2)) {
		rc = kvd_lease_stock(c->s, c->a, mag, 1 + rnd(6), KV_GFP_NOWAIT, &nr,
				     &pending);
		KVT_EXPECT(rc >= 0);
		return;
	}
	if (c->nr == HELD_MAX ||
	    !kv_mag_pop(&c->s->page->magazines[mag].slots[slot], &g.pfn, &g.tag, &dirty))
		return;
	stats[5]++;
	KVT_EXPECT(dirty || !page_of(c, g.pfn)->writer ||
		   page_of(c, g.pfn)->writer == c->s->id);
	if (dirty)
		page_zero(page_of(c, g.pfn));
	c->held[c->nr++] = (struct held){.g = g};
}

static void op_free(struct client *c)
{
	u32 i;

	if (!c->nr)
		return;
	i = rnd(c->nr);
	KVT_EXPECT_EQ(rig_free1(c->s, c->a, c->held[i].g), 0);
	if (rnd(4) ==
	    0) { /* a double free harms nobody, it may take another reference of ours */
		struct kv_grant g = c->held[i].g;
		bool more = false;

		for (u32 k = 0; k < c->nr; k++)
			more |= k != i &&
				kv_tag_gen(c->held[k].g.tag) == kv_tag_gen(g.tag);
		if (!more)
			KVT_EXPECT_EQ(rig_free1(c->s, c->a, g), KV_STALE);
	}
	drop(c, i);
}

static void op_pin(struct client *c)
{
	struct kv_page_ref ref;
	u32 i;

	if (!c->nr || c->nr == HELD_MAX)
		return;
	i = rnd(c->nr);
	ref = (struct kv_page_ref){.pfn = c->held[i].g.pfn, .tag = c->held[i].g.tag};
	KVT_EXPECT_EQ(kvd_lease_pin(c->s, c->a, &ref, 1), 0);
	c->held[c->nr++] = c->held[i];
}

/* A page is sealed when no step of ours touches it: the library waits for that. */
static bool stepping_on(const struct client *c, u32 pfn)
{
	for (u32 s = 0; s < KV_ANNOUNCE_SLOTS; s++) {
		if (c->slot_busy[s] && c->slot_tags[s][pfn] && c->slot_write[s][pfn])
			return true;
	}
	return false;
}

static u64 pattern_of(const struct client *c, u64 seq, u32 page)
{
	return 1ull << 63 | (u64)pool_of(c)->domain_id << 40 | seq << 8 | page;
}

static void op_seal(struct client *c)
{
	struct kv_grant g[3];
	struct kv_seal_ret rets[3];
	u32 nr = 0, want = 1 + rnd(3);
	u64 seq = rnd(SEQS);

	for (u32 i = 0; i < c->nr && nr < want; i++) {
		bool twice = false;

		for (u32 k = 0; k < nr; k++)
			twice |= g[k].pfn == c->held[i].g.pfn;
		if (c->held[i].shared || twice || stepping_on(c, c->held[i].g.pfn))
			continue;
		g[nr++] = c->held[i].g;
	}
	if (!nr)
		return;
	for (u32 i = 0; i < nr;
	     i++) /* a step that has retired wrote the sequence's bytes */
		page_write(c, g[i].pfn, pattern_of(c, seq, i));
	KVT_EXPECT_EQ(rig_seal(c->s, c->a, g, nr, seq, 0, NULL, rets), 0);
	stats[6]++;
	for (u32 i = 0; i < nr; i++) {
		page_of(c, g[i].pfn)->sealed = pattern_of(c, seq, i);
		page_of(c, g[i].pfn)->sealed_gen = kv_tag_gen(g[i].tag);
		for (u32 k = 0; k < c->nr; k++)
			c->held[k].shared |= c->held[k].g.pfn == g[i].pfn;
	}
}

static void op_lookup(struct client *c)
{
	struct kv_hit hits[4];
	u64 seq = rnd(SEQS + 1);
	u32 nr = 0;
	int rc;

	if (c->nr + 4 > HELD_MAX)
		return;
	rc = rig_lookup(c->s, c->a, seq, 4, hits, &nr);
	KVT_EXPECT_EQ(rc, nr ? 0 : KV_MISS);
	stats[7] += nr;
	for (u32 i = 0; i < nr; i++) {
		KVT_EXPECT_EQ(page_of(c, hits[i].grant.pfn)->bytes,
			      pattern_of(c, seq, i));
		c->held[c->nr++] = (struct held){.g = hits[i].grant, .shared = true};
	}
}

static void op_fork(struct client *c)
{
	struct kv_page_ref ref;
	struct kv_grant g;
	u32 i, pending;

	if (!c->nr || c->nr == HELD_MAX)
		return;
	i = rnd(c->nr);
	ref = (struct kv_page_ref){.pfn = c->held[i].g.pfn, .tag = c->held[i].g.tag};
	if (kvd_fork(c->s, c->a, &ref, 1, KV_GFP_PREFILL, &g, &pending))
		return;
	page_zero(page_of(c, g.pfn));
	c->held[c->nr++] = (struct held){.g = g};
}

static void op_step_begin(struct client *c)
{
	u32 slot = rnd(3);

	if (c->slot_busy[slot])
		return;
	rig_announce(c->s, slot, pool_of(c));
	c->slot_busy[slot] = true;
	memset(c->slot_tags[slot], 0, sizeof(c->slot_tags[slot]));
	memset(c->slot_write[slot], 0, sizeof(c->slot_write[slot]));
	for (u32 i = 0; i < c->nr; i++) {
		u32 pfn = c->held[i].g.pfn;

		if (rnd(3) == 0)
			continue;
		/* the check: generation equal and LIVE, WRITE rows not SEALED */
		KVT_EXPECT_EQ(kv_tag_gen(pool_of(c)->table.tags[pfn]),
			      kv_tag_gen(c->held[i].g.tag));
		KVT_EXPECT(kv_tag_live(pool_of(c)->table.tags[pfn]));
		c->slot_tags[slot][pfn] = c->held[i].g.tag;
		c->slot_write[slot][pfn] = !c->held[i].shared;
	}
}

/* The step's work happens now, at its very end: the worst moment. */
static void step_end(struct client *c, u32 slot)
{
	for (u32 pfn = 0; pfn < PAGES; pfn++) {
		u64 tag = c->slot_tags[slot][pfn];

		if (!tag)
			continue;
		/* I5: not FREE, and not somebody else's */
		KVT_EXPECT(pool_of(c)->frames[pfn].state != KVD_FREE);
		KVT_EXPECT(pool_of(c)->frames[pfn].state != KVD_ABSENT);
		if (kv_tag_live(pool_of(c)->frames[pfn].tag))
			KVT_EXPECT_EQ(kv_tag_gen(pool_of(c)->frames[pfn].tag),
				      kv_tag_gen(tag));
		if (c->slot_write[slot][pfn])
			page_write(c, pfn, ++next_pattern);
	}
	c->slot_busy[slot] = false;
}

static void op_step_end(struct client *c)
{
	u32 slot = rnd(3);

	if (!c->slot_busy[slot])
		return;
	step_end(c, slot);
	rig_retire(c->s, slot);
}

static void op_die(struct client *c)
{
	kvd_session_end(c->s, "killed");
	c->dead = true;
	c->nr = 0;
	stats[8]++;
}

static void client_bury(u32 i)
{
	struct client *c = &clients[i];
	struct kvd_session *s_left = kvd_session_find(&r.core, c->id);
	bool busy = false;

	for (u32 s = 0; s < KV_ANNOUNCE_SLOTS; s++) {
		if (c->slot_busy[s] && rnd(2)) {
			step_end(c, s);
			c->s->page->slots[s].word =
				0; /* late retire of a child that lived on */
		}
		busy |= c->slot_busy[s];
	}
	if (busy && rnd(3))
		return;
	for (u32 s = 0; s < KV_ANNOUNCE_SLOTS; s++) {
		if (c->slot_busy[s])
			step_end(c, s);
	}
	if (s_left)
		kvd_session_work_ended(s_left);
	rig_run(&r);
	client_start(i);
}

/* I6 and the model's view of every page. */
static void check_world(void)
{
	for (u32 i = 0; i < CLIENTS; i++) {
		struct client *c = &clients[i];

		for (u32 pfn = 0; pfn < PAGES; pfn++) {
			const struct kvd_frame *f = &pool_of(c)->frames[pfn];
			struct page *p = page_of(c, pfn);

			if (f->state == KVD_ABSENT &&
			    pool_of(c)->extents[pfn / PER_EXTENT].state ==
				    KVD_EXTENT_NONE)
				page_zero(p); /* the driver has it; it comes back as
						 zeroes */
			if (kv_tag_sealed(f->tag) && kv_tag_gen(f->tag) == p->sealed_gen)
				KVT_EXPECT_EQ(p->bytes, p->sealed);
			for (u32 s = 0; s < KV_ANNOUNCE_SLOTS; s++) {
				if (c->slot_busy[s] && c->slot_tags[s][pfn])
					KVT_EXPECT(f->state != KVD_FREE);
			}
		}
		for (u32 k = 0; k < c->nr; k++)
			KVT_EXPECT_EQ(
				kv_tag_gen(pool_of(c)->frames[c->held[k].g.pfn].tag),
				kv_tag_gen(c->held[k].g.tag));
	}
}

/* An idle extent goes; live clients acknowledge, ended ones hold it until they are
 * reaped. */
static void extents_shake(struct kvd_pool *pool)
{
	u32 index = rnd(EXTENTS);

	if (pool->extents[index].state == KVD_EXTENT_LIVE)
		stats[9] += kvd_extent_shrink(pool, index) == 0;
	for (u32 i = 0; i < CLIENTS; i++) {
		struct client *c = &clients[i];

		for (u32 e = 0; e < EXTENTS && !c->dead && pool_of(c) == pool; e++) {
			struct kv_extent_ref ref = {.index = e,
						    .serial = pool->extents[e].serial};

			if (pool->extents[e].state == KVD_EXTENT_DRAINING && rnd(2))
				kvd_session_unmapped(c->s, pool->id, &ref);
		}
	}
}

static void one_op(void)
{
	static void (*const ops[])(struct client *) = {
		op_alloc,    op_alloc,	       op_free,		 op_free,
		op_free,     op_pin,	       op_seal,		 op_lookup,
		op_lookup,   op_fork,	       op_step_begin,	 op_step_end,
		op_step_end, op_stock_and_pop, op_stock_and_pop,
	};
	u32 i = rnd(CLIENTS), what = rnd(64);
	struct client *c = &clients[i];
	struct kvd_evicted evicted;

	if (c->dead)
		client_bury(i);
	else if (what == 0)
		op_die(c);
	else if (what == 1)
		kvd_domain_evict(&r.core, rnd(2) ? r.red : r.blue, rnd(2), &evicted);
	else if (what == 2)
		kvd_lease_recall(pool_of(c));
	else if (what == 3)
		extents_shake(pool_of(c));
	else if (what < 12)
		rig_run(&r);
	else
		ops[rnd(KV_ARRAY_SIZE(ops))](c);
}

KVT_TEST_T(random_clients_keep_every_invariant, 120)
{
	const char *env = getenv("KVT_STEPS");
	u32 steps = env ? (u32)atoi(env) : 400000;

	for (u32 round = 0; round < 4; round++) {
		rig_init(&r, EXTENTS, PER_EXTENT);
		memset(pages, 0, sizeof(pages));
		tenants[0] = rig_tenant(&r, r.red, "t", 4, round & 1 ? 20 : 0);
		tenants[1] = rig_tenant(&r, r.red, "u", 0, round & 2 ? 12 : 0);
		tenants[2] = rig_tenant(&r, r.blue, "v", 4, 16);
		for (u32 i = 0; i < CLIENTS; i++)
			client_start(i);
		for (u32 n = 0; n < steps / 4; n++) {
			one_op();
			check_world();
			if (n % 4 == 0)
				rig_audit(&r);
		}
		/* liveness: everybody ends, everything comes back */
		for (u32 i = 0; i < CLIENTS; i++) {
			for (u32 s = 0; s < KV_ANNOUNCE_SLOTS; s++) {
				if (clients[i].slot_busy[s])
					step_end(&clients[i], s);
			}
			if (kvd_session_find(&r.core, clients[i].id))
				kvd_session_work_ended(clients[i].s);
		}
		rig_run(&r);
		rig_audit(&r);
		for (u32 i = 0; i < 3; i++) {
			KVT_EXPECT_EQ(tenants[i]->account.quarantine_bytes, 0);
			KVT_EXPECT_EQ(tenants[i]->account.used_bytes,
				      tenants[i]->account.nr[KVD_CACHED] * RIG_STRIDE);
		}
		rig_fini(&r);
	}
	KVT_NOTE(
		"alloc ok %llu full %llu quota %llu pending %llu, pops %llu, seals %llu, hits %llu, "
		"deaths %llu",
		(unsigned long long)stats[0], (unsigned long long)stats[1],
		(unsigned long long)stats[2], (unsigned long long)stats[3],
		(unsigned long long)stats[5], (unsigned long long)stats[6],
		(unsigned long long)stats[7], (unsigned long long)stats[8]);
	KVT_EXPECT(stats[0] && stats[1] && stats[2] && stats[3] && stats[5] && stats[6]);
	KVT_EXPECT(stats[7] && stats[8] && stats[9]);
}

KVT_MAIN()
