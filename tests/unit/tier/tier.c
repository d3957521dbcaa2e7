/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvmd/tier over a real core: pages go down and come back, and nothing wrong is ever read.
 *
 * The core is tests/unit/own's rig; frames have bytes here, and the copier is a list of
 * jobs that a case ends when it likes: a copy reads and writes at its end, as a late DMA
 * would. The disk is a real file.
 */
#include "kvmd/tier/tier.h"

#include <sodium.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "kvmd/backend/memfd.h"
#include "kvmd/dbg/fault.h"
#include "kvmd/tier/crc.h"
#include "kvmd/tier/tier_priv.h"
#include "tests/unit/own/common.h"
#include "tests/unit/tier/common.h"

#define PAGE	   RIG_STRIDE
#define DRAM_BYTES (4ull << 20) /* 52 pages */
#define NVME_BYTES (16ull << 20)
#define NR_PAGES   64u
#define JOBS	   64u

struct job {
	enum kvd_tier_dir dir;
	u32 nr, cookie;
	struct kvd_tier_copy copies[KVD_TIER_BATCH];
};

/**
 * struct world - a core, its tiers, bytes
 * @mem: of frames, by pool id - 1
 * @jobs: the copier's
 * @hold: the case ends jobs itself
 */
struct world {
	struct rig rig;
	struct kvd_tiers *tiers;
	u8 *dram;
	int dram_fd;
	u8 *mem[4];
	struct job jobs[JOBS];
	u32 nr_jobs;
	bool hold[2];
	int submit_result;
	u32 told;
	struct kvd_tenant *red, *red2, *blue;
	struct kvd_session *s, *s2, *sb;
	struct kvd_attach *a, *a2, *ab;
};

static struct world w;

static u8 *frame(const struct kvd_pool *pool, u32 pfn)
{
	if (!w.mem[pool->id - 1])
		w.mem[pool->id - 1] =
			mmap(NULL, pool->geo.nr_pages * PAGE, PROT_READ | PROT_WRITE,
			     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	return w.mem[pool->id - 1] + pfn * PAGE;
}

static int submit(void *arg, enum kvd_tier_dir dir, const struct kvd_tier_copy *copies,
		  u32 nr, u64 deadline_ns, u32 cookie)
{
	struct job *j = &w.jobs[w.nr_jobs];

	if (w.submit_result)
		return w.submit_result;
	if (w.nr_jobs == JOBS)
		return KV_BUSY;
	w.nr_jobs++;
	j->dir = dir;
	j->nr = nr;
	j->cookie = cookie;
	memcpy(j->copies, copies, nr * sizeof(*copies));
	return 0;
}

static void job_end(u32 i, int status)
{
	struct job j = w.jobs[i];

	w.jobs[i] = w.jobs[--w.nr_jobs];
	for (u32 k = 0; k < j.nr && !status; k++) {
		u8 *f = frame(j.copies[k].pool, j.copies[k].pfn);
		u8 *d = w.dram + j.copies[k].off;

		memcpy(j.dir == KVD_TIER_OUT ? d : f, j.dir == KVD_TIER_OUT ? f : d,
		       j.copies[k].bytes);
	}
	kvd_tier_copied(w.tiers, j.cookie, status);
}

static void tell(void *arg, const char *line)
{
	w.told++;
}

static bool jobs_run(void)
{
	bool any = false;

	for (u32 i = 0; i < w.nr_jobs;) {
		if (w.hold[w.jobs[i].dir]) {
			i++;
			continue;
		}
		job_end(i, 0);
		any = true;
	}
	return any;
}

/* Until nothing moves by itself any more: only held jobs are left. */
static void settle(void)
{
	u32 quiet = 0;

	for (u32 i = 0; quiet < 3; i++) {
		bool moved = kvd_tier_turn(w.tiers);
		const struct kvd_store *st = kvd_tier_store(w.tiers);

		moved |= jobs_run();
		kvd_tier_ready(w.tiers);
		rig_run(&w.rig);
		if ((st && kvd_store_pending(st)) ||
		    kvd_workers_pending(w.tiers->workers))
			moved = true;
		quiet = moved ? 0 : quiet + 1;
		if (i > 200000)
			KVT_FAIL("it never comes to rest");
	}
}

static void limits_set(u16 tenant, u64 min, u64 max)
{
	struct kvd_tier_limits l = {min, max, max, 100};

	kvd_tier_set_limits(w.tiers, KVD_TIER_DRAM, tenant, &l);
	kvd_tier_set_limits(w.tiers, KVD_TIER_NVME, tenant, &l);
}

static void tiers_open(bool nvme, u32 write_from)
{
	struct kvd_tier_params p = {
		.core = &w.rig.core,
		.copier = {.submit = submit},
		.dram_bytes = DRAM_BYTES,
		.nvme_path = nvme ? scratch("nvme") : NULL,
		.nvme_bytes = NVME_BYTES,
		.nvme_depth = 32,
		.write_from = write_from,
		.read_deadline_ns = 1000000000ull,
		.host_mark = {9},
		.nr_workers = 2,
		.tell = tell,
	};
	char error[KVD_STORE_ERROR];
	int r;

	KVT_EXPECT_EQ(kvd_memfd_create("dram", DRAM_BYTES, KVD_MEMFD_PRIVATE,
				       (void **)&w.dram, &w.dram_fd),
		      0);
	p.pool = w.dram;
	r = kvd_tier_create(&p, error, &w.tiers);
	if (r)
		KVT_FAIL("%d: %s", r, error);
	w.rig.core.cfg.spill = kvd_tier_ops();
	w.rig.core.cfg.spill_arg = w.tiers;
	for (u16 i = 0; i < 3; i++)
		limits_set(i, 0, 1ull << 40);
}

static void world_open(bool nvme, u32 write_from)
{
	KVT_EXPECT(sodium_init() >= 0);
	memset(&w, 0, sizeof(w));
	rig_init(&w.rig, 8, NR_PAGES / 8);
	w.red = rig_tenant(&w.rig, w.rig.red, "red", 0, 0);
	w.red2 = rig_tenant(&w.rig, w.rig.red, "red2", 0, 0);
	w.blue = rig_tenant(&w.rig, w.rig.blue, "blue", 0, 0);
	tiers_open(nvme, write_from);
	w.a = rig_client(&w.rig, w.red, &w.s);
	w.a2 = rig_client(&w.rig, w.red2, &w.s2);
	w.ab = rig_client(&w.rig, w.blue, &w.sb);
}

static void world_check(void)
{
	const struct kvd_space *sp;

	rig_audit(&w.rig);
	for (u32 i = 0; i < KVD_TIER_NR; i++) {
		sp = kvd_tier_space(w.tiers, i);
		if (sp && kvd_space_check(sp))
			KVT_FAIL("tier %u: %s", i, kvd_space_check(sp));
	}
}

static void world_close(void)
{
	w.hold[0] = w.hold[1] = false;
	settle();
	world_check();
	KVT_EXPECT_EQ(kvd_tier_busy(w.tiers), 0);
	w.rig.core.cfg.spill = NULL;
	kvd_tier_destroy(w.tiers);
	kvd_memfd_destroy(w.dram, DRAM_BYTES, w.dram_fd);
	rig_fini(&w.rig);
	for (u32 i = 0; i < 4; i++)
		if (w.mem[i])
			munmap(w.mem[i], NR_PAGES * PAGE);
}

/* ------------------------------------------------------------------- patterns */

/* Page @page of sequence @seq has these bytes and no others. */
static void pattern(u8 *p, u64 seq, u32 page)
{
	u64 z = seq * 0x9e3779b97f4a7c15ull + page * 0xbf58476d1ce4e5b9ull + 1;

	for (u32 i = 0; i < PAGE; i += 8) {
		z ^= z << 13;
		z ^= z >> 7;
		z ^= z << 17;
		memcpy(p + i, &z, 8);
	}
}

static bool is_pattern(const u8 *p, u64 seq, u32 page)
{
	static u8 want[PAGE];

	pattern(want, seq, page);
	return !memcmp(p, want, PAGE);
}

/* Write, seal and let go pages 0..nr-1 of a sequence: CACHED. @crc_xor: a wrong digest */
static void cache_with(struct kvd_session *s, struct kvd_attach *a, u64 seq, u32 nr,
		       u32 crc_xor)
{
	struct kv_grant g[NR_PAGES];
	struct kv_seal_ret rets[NR_PAGES];
	struct kv_seal_page pages[NR_PAGES];
	u32 tokens[NR_PAGES * KV_PAGE_TOKENS];
	struct kvd_seal_op op = {.s = s,
				 .a = a,
				 .arg = {.flags = KV_SEAL_ROOT},
				 .pages = pages,
				 .tokens = tokens,
				 .rets = rets,
				 .nr = nr};
	int r;

	KVT_EXPECT_EQ(rig_alloc(s, a, nr, KV_GFP_PREFILL, g), 0);
	for (u32 i = 0; i < nr; i++) {
		u8 *p = frame(a->pool, g[i].pfn);

		pattern(p, seq, i);
		pages[i] = (struct kv_seal_page){.pfn = g[i].pfn,
						 .crc32c = kvd_crc32c(p, PAGE) ^ crc_xor,
						 .tag = g[i].tag};
		rig_tokens(seq, i, tokens + i * KV_PAGE_TOKENS);
	}
	KVT_EXPECT_EQ(kvd_seal_start(&op), 0);
	do {
		r = kvd_seal_step(&op);
	} while (r == -EAGAIN);
	KVT_EXPECT_EQ(r, 0);
	for (u32 i = 0; i < nr; i++)
		KVT_EXPECT_EQ(rig_free1(s, a, g[i]), 0);
	rig_run(&w.rig);
}

static void cache(u64 seq, u32 nr)
{
	cache_with(w.s, w.a, seq, nr, 0);
}

static void evict(struct kvd_attach *a, u32 nr)
{
	while (nr) {
		u32 got = kvd_reclaim_pool(a->pool, KVD_TENANTS_MAX, nr, false);

		settle();
		KVT_EXPECT(got || a->pool->evict_again);
		nr -= got;
	}
}

/* Look up, expect the right bytes in each hit, let go. Return: hits */
static u32 look(struct kvd_session *s, struct kvd_attach *a, u64 seq, u32 nr,
		u32 *ret_coming)
{
	static u32 tokens[NR_PAGES * KV_PAGE_TOKENS];
	struct kv_hit hits[NR_PAGES];
	struct kvd_lookup_op op = {.s = s,
				   .a = a,
				   .tokens = tokens,
				   .nr_tokens = nr * KV_PAGE_TOKENS,
				   .hits = hits,
				   .hits_max = nr};
	int r;

	for (u32 i = 0; i < nr; i++)
		rig_tokens(seq, i, tokens + i * KV_PAGE_TOKENS);
	KVT_EXPECT_EQ(kvd_lookup_start(&op), 0);
	do {
		r = kvd_lookup_step(&op);
	} while (r == -EAGAIN);
	KVT_EXPECT(r == (op.nr ? 0 : KV_MISS));
	for (u32 i = 0; i < op.nr; i++) {
		if (!is_pattern(frame(a->pool, hits[i].grant.pfn), seq, i))
			KVT_FAIL("wrong bytes: sequence %llu page %u at pfn %u",
				 (unsigned long long)seq, i, hits[i].grant.pfn);
		KVT_EXPECT_EQ(rig_free1(s, a, hits[i].grant), 0);
	}
	if (ret_coming)
		*ret_coming = op.nr_coming;
	rig_run(&w.rig);
	return op.nr;
}

/* What an engine does: ask, wait for what is on its way, ask again. */
static u32 fetch(u64 seq, u32 nr)
{
	u32 coming, hits = 0;

	for (u32 i = 0; i < 4; i++) {
		hits = look(w.s, w.a, seq, nr, &coming);
		if (!coming)
			break;
		settle();
	}
	return hits;
}

static const struct kvd_tier_stats *stats(void)
{
	return kvd_tier_stats(w.tiers);
}

static void arm(enum kvd_fault_point point, u32 space, u32 times)
{
	struct kvd_fault_spec spec = {
		.probability = 1000000, .times = times, .space = space};

	kvd_fault_arm(point, &spec);
}

/* ----------------------------------------------------------------------- paths */

KVT_TEST(evicted_pages_come_back_from_dram)
{
	u32 coming;
	u64 tag;

	world_open(false, 0);
	cache(1, 8);
	tag = w.a->pool->frames[0].tag;
	evict(w.a, 8);
	KVT_EXPECT_EQ(stats()->spills, 8);
	KVT_EXPECT_EQ(w.a->pool->nr[KVD_CACHED], 0);
	world_check();
	KVT_EXPECT_EQ(look(w.s, w.a, 1, 8, &coming), 0);
	KVT_EXPECT_EQ(coming, 8);
	settle();
	KVT_EXPECT_EQ(look(w.s, w.a, 1, 8, &coming), 8);
	KVT_EXPECT_EQ(coming, 0);
	KVT_EXPECT_EQ(stats()->restores_dram, 8);
	for (u32 pfn = 0; pfn < NR_PAGES; pfn++)
		if (w.a->pool->frames[pfn].state == KVD_CACHED)
			KVT_EXPECT(w.a->pool->frames[pfn].tag > tag);
	/* Evicting them again copies nothing. */
	evict(w.a, 8);
	KVT_EXPECT_EQ(stats()->spills_had, 8);
	KVT_EXPECT_EQ(fetch(1, 8), 8);
	world_close();
}

static void to_nvme_only(u64 seq, u32 nr)
{
	cache(seq, nr);
	evict(w.a, nr);
	for (u64 i = 0; i < 8; i++) { /* 64 more pages push it out of DRAM */
		cache(1000 + i, 8);
		evict(w.a, 8);
	}
}

KVT_TEST(pages_come_back_from_nvme)
{
	world_open(true, 0);
	to_nvme_only(1, 4);
	KVT_EXPECT(stats()->writes >= 60);
	KVT_EXPECT_EQ(fetch(1, 4), 4);
	KVT_EXPECT_EQ(stats()->restores_nvme, 4);
	world_close();
}

/* The NVMe tier is there after a restart, in a fresh core with other pfns and tags (O46: the
 * scales are in the page and under its digest). */
KVT_TEST(o46_pages_survive_a_restart_on_nvme)
{
	world_open(true, 0);
	to_nvme_only(1, 4);
	world_close();
	world_open(true, 0);
	KVT_EXPECT(kvd_tier_store(w.tiers)->found.clean);
	KVT_EXPECT(kvd_tier_store(w.tiers)->adopted >= 60);
	cache(77, 3); /* the frames that come back are other ones */
	KVT_EXPECT_EQ(fetch(1, 4), 4);
	KVT_EXPECT_EQ(stats()->restores_nvme, 4);
	world_close();
}

/* ------------------------------------------------------------ copies in flight */

/* O24: a page is being stored, its frame is wanted: nobody gets it before the copy ended,
 * and what was stored is the page. */
KVT_TEST(o24_frame_being_stored_is_not_used_again)
{
	struct kv_grant g[NR_PAGES];
	u32 nr;

	world_open(false, 0);
	cache(1, 8);
	w.hold[KVD_TIER_OUT] = true;
	KVT_EXPECT_EQ(kvd_reclaim_pool(w.a->pool, KVD_TENANTS_MAX, 8, false), 8);
	settle();
	for (nr = 0; nr < NR_PAGES; nr++) {
		if (rig_alloc(w.s, w.a, 1, KV_GFP_NOWAIT, &g[nr]))
			break;
		memset(frame(w.a->pool, g[nr].pfn), 0xee, PAGE);
	}
	KVT_EXPECT_EQ(nr, NR_PAGES - 8);
	world_check();
	w.hold[KVD_TIER_OUT] = false;
	settle();
	KVT_EXPECT_EQ(stats()->spills, 8);
	for (u32 i = 0; i < nr; i++)
		rig_free1(w.s, w.a, g[i]);
	rig_run(&w.rig);
	KVT_EXPECT_EQ(fetch(1, 8), 8);
	world_close();
}

/* O21: the session that wanted the page is gone, the copy into it comes late. */
KVT_TEST(o21_session_ends_while_a_page_comes_back)
{
	struct kv_grant g[NR_PAGES];
	u32 coming, nr;

	world_open(false, 0);
	cache(1, 8);
	evict(w.a, 8);
	w.hold[KVD_TIER_IN] = true;
	KVT_EXPECT_EQ(look(w.s2, w.a2, 1, 8, &coming), 0);
	KVT_EXPECT_EQ(coming, 8);
	settle();
	KVT_EXPECT_EQ(w.a->pool->nr[KVD_RESTORING], 8);
	kvd_session_end(w.s2, "test");
	kvd_session_work_ended(w.s2);
	rig_run(&w.rig);
	for (nr = 0; nr < NR_PAGES; nr++) {
		if (rig_alloc(w.s, w.a, 1, KV_GFP_NOWAIT, &g[nr]))
			break;
		pattern(frame(w.a->pool, g[nr].pfn), 500, nr);
	}
	KVT_EXPECT_EQ(nr, NR_PAGES - 8);
	w.hold[KVD_TIER_IN] = false;
	settle();
	for (u32 i = 0; i < nr; i++) {
		KVT_EXPECT(is_pattern(frame(w.a->pool, g[i].pfn), 500, i));
		rig_free1(w.s, w.a, g[i]);
	}
	KVT_EXPECT_EQ(fetch(1, 8), 8);
	world_close();
}

/* O35: DRAM is under pressure while a slot of it is copied back. */
KVT_TEST(o35_source_is_not_evicted_during_load_back)
{
	u32 coming;

	world_open(false, 0);
	cache(1, 6);
	evict(w.a, 6);
	w.hold[KVD_TIER_IN] = true;
	KVT_EXPECT_EQ(look(w.s, w.a, 1, 6, &coming), 0);
	KVT_EXPECT_EQ(coming, 6);
	settle();
	for (u64 i = 0; i < 10; i++) {
		cache(1000 + i, 8);
		KVT_EXPECT_EQ(kvd_reclaim_pool(w.a->pool, KVD_TENANTS_MAX, 8, false), 8);
		settle();
	}
	KVT_EXPECT(kvd_tier_space(w.tiers, KVD_TIER_DRAM)->evictions > 20);
	w.hold[KVD_TIER_IN] = false;
	settle();
	KVT_EXPECT_EQ(look(w.s, w.a, 1, 6, &coming), 6);
	world_close();
}

/* O37: neither the digest alone nor the copy alone makes a page. */
KVT_TEST(o37_page_is_found_after_copy_and_digest)
{
	u32 coming;

	world_open(false, 0);
	cache(1, 4);
	evict(w.a, 4);
	for (u32 pfn = 0; pfn < NR_PAGES; pfn++)
		memset(frame(w.a->pool, pfn), 0xee, PAGE);
	w.hold[KVD_TIER_IN] = true;
	look(w.s, w.a, 1, 4, &coming);
	settle(); /* digests are done, copies are not */
	KVT_EXPECT_EQ(look(w.s, w.a, 1, 4, &coming), 0);
	KVT_EXPECT_EQ(coming, 4);
	KVT_EXPECT_EQ(w.a->pool->nr[KVD_RESTORING], 4);
	w.hold[KVD_TIER_IN] = false;
	settle();
	KVT_EXPECT_EQ(look(w.s, w.a, 1, 4, NULL), 4);
	world_close();
}

/* O41: a copy of a page is another page, wherever the first one goes. */
KVT_TEST(o41_copy_stands_alone)
{
	struct kv_grant g;
	u32 crc;

	world_open(true, 0);
	cache(1, 1);
	g = rig_alloc1(w.s, w.a);
	memcpy(frame(w.a->pool, g.pfn), frame(w.a->pool, g.pfn ? 0 : 1), PAGE);
	pattern(frame(w.a->pool, g.pfn), 1, 0); /* as the engine's fork copy */
	crc = kvd_crc32c(frame(w.a->pool, g.pfn), PAGE);
	evict(w.a, 1);
	to_nvme_only(2, 2);
	KVT_EXPECT_EQ(kvd_crc32c(frame(w.a->pool, g.pfn), PAGE), crc);
	KVT_EXPECT(is_pattern(frame(w.a->pool, g.pfn), 1, 0));
	KVT_EXPECT_EQ(fetch(1, 1), 1);
	KVT_EXPECT(is_pattern(frame(w.a->pool, g.pfn), 1, 0));
	rig_free1(w.s, w.a, g);
	world_close();
}

/* R9: a page that is held is not evicted, however long its reader takes. */
KVT_TEST(r9_pinned_page_outlasts_any_reclaim)
{
	struct kv_hit hits[8];
	u32 nr;

	world_open(false, 0);
	cache(1, 4);
	KVT_EXPECT_EQ(rig_lookup(w.s, w.a, 1, 4, hits, &nr), 0);
	KVT_EXPECT_EQ(nr, 4);
	for (u64 i = 0; i < 20; i++) {
		cache(1000 + i, 8);
		w.rig.now += 10000000000ull;
		kvd_reclaim_pool(w.a->pool, KVD_TENANTS_MAX, NR_PAGES, false);
		settle();
		for (u32 k = 0; k < 4; k++)
			KVT_EXPECT(is_pattern(frame(w.a->pool, hits[k].grant.pfn), 1, k));
	}
	for (u32 k = 0; k < 4; k++)
		KVT_EXPECT_EQ(rig_free1(w.s, w.a, hits[k].grant), 0);
	rig_run(&w.rig);
	world_close();
}

/* A restored page's bytes are another session's to whoever gets the frame next. */
KVT_TEST(restored_bytes_are_dirty_for_the_next_session)
{
	struct kv_grant g[NR_PAGES];
	bool held[NR_PAGES] = {false};

	world_open(false, 0);
	KVT_EXPECT_EQ(rig_alloc(w.s2, w.a2, 60, KV_GFP_NOWAIT | KV_GFP_GROW, g), 0);
	for (u32 i = 0; i < 60; i++)
		KVT_EXPECT_EQ(rig_free1(w.s2, w.a2, g[i]), 0);
	rig_run(&w.rig);
	cache(1, 4);
	evict(w.a, 4);
	KVT_EXPECT_EQ(rig_alloc(w.s2, w.a2, 60, KV_GFP_NOWAIT | KV_GFP_GROW, g), 0);
	for (u32 i = 0; i < 60; i++)
		KVT_EXPECT_EQ(rig_free1(w.s2, w.a2, g[i]), 0);
	rig_run(&w.rig);
	KVT_EXPECT_EQ(look(w.s2, w.a2, 1, 4, NULL), 0);
	settle();
	for (u32 pfn = 0; pfn < NR_PAGES; pfn++)
		held[pfn] = w.a->pool->frames[pfn].state == KVD_CACHED;
	evict(w.a, 4);
	KVT_EXPECT_EQ(rig_alloc(w.s2, w.a2, 60, KV_GFP_NOWAIT | KV_GFP_GROW, g), 0);
	for (u32 i = 0; i < 60; i++) {
		if (held[g[i].pfn])
			KVT_EXPECT(g[i].flags & KV_GRANT_DIRTY);
		KVT_EXPECT_EQ(rig_free1(w.s2, w.a2, g[i]), 0);
	}
	rig_run(&w.rig);
	world_close();
}

/* ----------------------------------------------------------------- bad copies */

/* O36: the second of four pages cannot be read: the run is one page, whatever the disk did. */
KVT_TEST(o36_failed_read_is_a_miss)
{
	static const enum kvd_fault_point points[] = {
		KVD_FAULT_tier_read_eio, KVD_FAULT_tier_read_short,
		KVD_FAULT_tier_read_flip, KVD_FAULT_tier_read_swap, KVD_FAULT_tier_copy};

	for (u32 i = 0; i < KV_ARRAY_SIZE(points); i++) {
		u64 before;

		world_open(true, 0);
		to_nvme_only(100 + i, 4);
		before = stats()->read_errors + stats()->read_shorts +
			 stats()->bad_digests + stats()->bad_names +
			 stats()->restores_failed;
		KVT_EXPECT_EQ(fetch(100 + i, 1), 1); /* the first one is there */
		arm(points[i], 0, 1);
		look(w.s, w.a, 100 + i, 2, NULL);
		settle();
		KVT_EXPECT_EQ(look(w.s, w.a, 100 + i, 4, NULL), 1);
		KVT_EXPECT_EQ(stats()->read_errors + stats()->read_shorts +
				      stats()->bad_digests + stats()->bad_names +
				      stats()->restores_failed,
			      before + 1);
		settle();
		world_check();
		/* A failed copy can be tried again; what the disk lost is lost. */
		KVT_EXPECT_EQ(fetch(100 + i, 4),
			      points[i] == KVD_FAULT_tier_copy ? 4 : 1);
		world_close();
		unlink(scratch("nvme/journal"));
	}
}

/* R6: each step of a restore fails once. */
KVT_TEST_T(r6_error_at_every_step_of_a_restore, 120)
{
	static const enum kvd_fault_point points[] = {
		KVD_FAULT_tier_read_eio,   KVD_FAULT_tier_read_short,
		KVD_FAULT_tier_read_flip,  KVD_FAULT_tier_read_swap,
		KVD_FAULT_tier_read_late,  KVD_FAULT_tier_copy,
		KVD_FAULT_tier_write_eio,  KVD_FAULT_tier_write_full,
		KVD_FAULT_tier_write_torn, KVD_FAULT_tier_journal};

	world_open(true, 0);
	for (u32 round = 0; round < 120; round++) {
		u64 seq = 1 + round % 30;

		arm(points[round % KV_ARRAY_SIZE(points)], kvt_rand_below(6),
		    1 + kvt_rand_below(3));
		if (fetch(seq, 4) < 4)
			cache(seq, 4);
		KVT_EXPECT(look(w.s, w.a, seq, 4, NULL) ==
			   4); /* right bytes, in look() */
		evict(w.a, w.a->pool->nr[KVD_CACHED]);
		w.rig.now += 2000000000ull;
		kvd_tier_tick(w.tiers);
		settle();
		world_check();
	}
	KVT_EXPECT(kvd_fault_fired() >= 30);
	world_close();
}

/* R7: eight tenants' pages come back through a disk that exchanges slots: all noticed. */
KVT_TEST(r7_swapped_offsets_are_all_noticed)
{
	u32 swaps = 0;

	world_open(true, 0);
	for (u64 seq = 1; seq <= 8; seq++) {
		cache(seq, 4);
		evict(w.a, 4);
	}
	for (u64 i = 0; i < 7; i++) {
		cache(1000 + i, 8);
		evict(w.a, 8);
	}
	for (u64 seq = 1; seq <= 8; seq++) {
		u64 reads = stats()->reads, bad = stats()->bad_names;

		arm(KVD_FAULT_tier_read_swap, 0, 4);
		fetch(seq, 4);
		swaps += (u32)(stats()->reads - reads);
		KVT_EXPECT_EQ(stats()->bad_names - bad, stats()->reads - reads);
		kvd_fault_arm(KVD_FAULT_tier_read_swap, NULL);
	}
	KVT_EXPECT(swaps >= 8);
	KVT_EXPECT(w.told >= swaps);
	world_close();
}

/* R8: the same tokens in another domain are other pages, in the tiers as well. */
KVT_TEST(r8_other_domain_misses_in_the_tiers)
{
	u32 coming;

	world_open(true, 0);
	to_nvme_only(1, 4);
	KVT_EXPECT_EQ(look(w.sb, w.ab, 1, 4, &coming), 0);
	KVT_EXPECT_EQ(coming, 0);
	KVT_EXPECT_EQ(look(w.s2, w.a2, 1, 4, &coming), 0);
	KVT_EXPECT_EQ(coming, 4); /* same domain, another tenant */
	settle();
	KVT_EXPECT_EQ(look(w.s2, w.a2, 1, 4, NULL), 4);
	KVT_EXPECT_EQ(look(w.sb, w.ab, 1, 4, NULL), 0);
	world_close();
}

/* A page whose bytes are not those that were sealed never becomes a stored page. */
KVT_TEST(wrong_digest_is_a_miss_and_is_told)
{
	world_open(false, 0);
	cache_with(w.s, w.a, 1, 2, 0x1000);
	evict(w.a, 2);
	KVT_EXPECT_EQ(stats()->bad_digests, 2);
	KVT_EXPECT_EQ(stats()->spills, 0);
	KVT_EXPECT_EQ(w.told, 2);
	KVT_EXPECT_EQ(fetch(1, 2), 0);
	world_close();
}

/* A bit of DRAM turns over: noticed before anybody may read the page. */
KVT_TEST(flipped_bit_in_dram_is_a_miss)
{
	world_open(false, 0);
	cache(1, 3);
	evict(w.a, 3);
	for (u64 off = 4096 + 1000; off < 3 * 77824; off += 77824)
		w.dram[off] ^= 1;
	KVT_EXPECT_EQ(fetch(1, 3), 0);
	KVT_EXPECT_EQ(stats()->bad_digests, 3);
	KVT_EXPECT_EQ(w.a->pool->nr[KVD_CACHED], 0);
	world_close();
}

/* -------------------------------------------------------------- full and slow */

/* ENOSPC and EIO stop the writes, and nothing else; a later write that goes well starts
 * them again. */
KVT_TEST(full_disk_stops_writes_only)
{
	world_open(true, 0);
	arm(KVD_FAULT_tier_write_full, 0, 0);
	cache(1, 8);
	evict(w.a, 8);
	KVT_EXPECT(stats()->write_full >= 1);
	KVT_EXPECT_HAS(kvd_tier_fault(w.tiers), "No space left");
	KVT_EXPECT_EQ(stats()->writes, 0);
	KVT_EXPECT_EQ(fetch(1, 8), 8); /* from DRAM */
	kvd_fault_arm(KVD_FAULT_tier_write_full, NULL);
	w.rig.now += 11000000000ull;
	settle();
	KVT_EXPECT_STR(kvd_tier_fault(w.tiers), "");
	KVT_EXPECT_EQ(stats()->writes, 8);
	world_close();
}

KVT_TEST(late_read_is_not_waited_for)
{
	u32 coming;

	world_open(true, 0);
	to_nvme_only(1, 2);
	arm(KVD_FAULT_tier_read_late, 0, 2);
	look(w.s, w.a, 1, 2, &coming);
	KVT_EXPECT_EQ(coming, 2);
	KVT_EXPECT(kvd_tier_oldest(w.tiers) <= kvd_tier_serial(w.tiers));
	kvd_tier_tick(w.tiers);
	KVT_EXPECT_EQ(stats()->read_late, 2);
	KVT_EXPECT_EQ(kvd_tier_oldest(w.tiers), KVD_TIER_NONE);
	settle();
	/* They were right after all, and are in DRAM for the next one. */
	KVT_EXPECT_EQ(stats()->restores, 0);
	KVT_EXPECT_EQ(fetch(1, 2), 2);
	KVT_EXPECT_EQ(stats()->restores_dram, 2);
	world_close();
}

/* So many pages are being stored that reclaim has to wait: it goes on by itself. */
KVT_TEST(reclaim_waits_for_the_copier)
{
	struct kv_grant g[NR_PAGES];
	u32 pending = 0;

	world_open(false, 0);
	for (u64 seq = 1; seq <= 8; seq++)
		cache(seq, 8);
	KVT_EXPECT(w.a->pool->nr[KVD_CACHED] >= NR_PAGES - w.a->pool->high_pages);
	w.hold[KVD_TIER_OUT] = true;
	/* What is SPILLING counts as on its way: wait, do not preempt. */
	KVT_EXPECT_EQ(
		kvd_lease_alloc(w.s, w.a, 40, KV_GFP_WAIT | KV_GFP_RECLAIM, g, &pending),
		KV_PENDING);
	KVT_EXPECT(pending >= 40);
	settle();
	KVT_EXPECT_EQ(w.a->pool->nr[KVD_SPILLING] >= 40, 1);
	world_check();
	w.hold[KVD_TIER_OUT] = false;
	settle();
	KVT_EXPECT_EQ(rig_alloc(w.s, w.a, 40, KV_GFP_NOWAIT, g), 0);
	for (u32 i = 0; i < 40; i++)
		rig_free1(w.s, w.a, g[i]);
	world_close();
}

/* The copier's process is gone: its jobs fail, pages are lost, nothing else. */
KVT_TEST(dead_copier_costs_its_jobs)
{
	world_open(false, 0);
	cache(1, 8);
	w.hold[KVD_TIER_OUT] = true;
	KVT_EXPECT_EQ(kvd_reclaim_pool(w.a->pool, KVD_TENANTS_MAX, 8, false), 8);
	settle();
	while (w.nr_jobs)
		job_end(0, -EPIPE);
	settle();
	KVT_EXPECT_EQ(stats()->spills_failed, 8);
	KVT_EXPECT_EQ(fetch(1, 8), 0);
	kvd_tier_copier(w.tiers, true); /* it starts again: nobody waits for it */
	cache(2, 8);
	KVT_EXPECT_EQ(kvd_reclaim_pool(w.a->pool, KVD_TENANTS_MAX, 8, false), 8);
	KVT_EXPECT_EQ(w.a->pool->nr[KVD_SPILLING], 0);
	settle();
	world_close();
}

/* --------------------------------------------------------------------- owners */

KVT_TEST(tenant_budget_in_a_tier_is_kept)
{
	const struct kvd_space *dram;

	world_open(true, 0);
	dram = kvd_tier_space(w.tiers, KVD_TIER_DRAM);
	limits_set(w.red->index, 0, 10 * 77824);
	for (u64 seq = 1; seq <= 6; seq++) {
		cache(seq, 8);
		evict(w.a, 8);
		KVT_EXPECT(dram->acct[w.red->index].used_bytes <= 10 * 77824);
	}
	KVT_EXPECT_EQ(dram->acct[w.red->index].nr, 10);
	limits_set(w.red->index, 0, 0); /* lowered under use: it goes */
	settle();
	KVT_EXPECT_EQ(dram->acct[w.red->index].nr, 0);
	cache(9, 8);
	evict(w.a, 8);
	KVT_EXPECT_EQ(dram->acct[w.red->index].nr, 0);
	world_close();
}

/* O38: forgetting a domain's pages is forgetting them in the tiers, also those on their
 * way there. */
KVT_TEST(o38_reset_reaches_the_tiers)
{
	world_open(true, 0);
	to_nvme_only(1, 4);
	cache(2, 4);
	w.hold[KVD_TIER_OUT] = true;
	KVT_EXPECT_EQ(kvd_reclaim_pool(w.a->pool, KVD_TENANTS_MAX, 4, false), 4);
	settle();
	KVT_EXPECT(kvd_tier_drop_domain(w.tiers, w.rig.red->id) > 60);
	w.hold[KVD_TIER_OUT] = false;
	settle();
	KVT_EXPECT_EQ(kvd_tier_count_domain(w.tiers, w.rig.red->id), 0);
	KVT_EXPECT_EQ(fetch(1, 4), 0);
	KVT_EXPECT_EQ(fetch(2, 4), 0);
	world_close();
	world_open(true, 0); /* and after a restart */
	KVT_EXPECT_EQ(kvd_tier_store(w.tiers)->adopted, 0);
	world_close();
}

/* ---------------------------------------------------------------------- chance */

/* Random work, jobs ended in random order, faults: a hit always has the right bytes (that
 * look() checks), and all sums hold. */
KVT_TEST_T(random_work_never_reads_wrong_bytes, 120)
{
	static const enum kvd_fault_point points[] = {
		KVD_FAULT_tier_read_eio,   KVD_FAULT_tier_read_short,
		KVD_FAULT_tier_read_flip,  KVD_FAULT_tier_read_swap,
		KVD_FAULT_tier_read_late,  KVD_FAULT_tier_copy,
		KVD_FAULT_tier_write_eio,  KVD_FAULT_tier_write_torn,
		KVD_FAULT_tier_write_full, KVD_FAULT_tier_journal};
	u32 hits = 0;

	kvd_fault_seed(kvt_rand64());
	world_open(true, 50);
	for (u32 i = 0; i < KV_ARRAY_SIZE(points); i++) {
		struct kvd_fault_spec spec = {.probability = 20000};

		kvd_fault_arm(points[i], &spec);
	}
	for (u32 i = 0; i < 3000; i++) {
		u64 seq = 1 + kvt_rand_below(24);
		u32 nr = 1 + kvt_rand_below(6), got;
		bool two = kvt_rand_below(2);

		w.hold[0] = w.hold[1] = true;
		got = look(two ? w.s2 : w.s, two ? w.a2 : w.a, seq, nr, NULL);
		hits += got;
		if (got < nr && kvd_pool_nr_used(w.a->pool) + 8 < NR_PAGES &&
		    kvt_rand_below(3) == 0)
			cache_with(two ? w.s2 : w.s, two ? w.a2 : w.a, seq, nr, 0);
		if (kvt_rand_below(2))
			kvd_reclaim_pool(w.a->pool, KVD_TENANTS_MAX,
					 1 + kvt_rand_below(8), false);
		kvd_tier_turn(w.tiers);
		while (w.nr_jobs && kvt_rand_below(3))
			job_end(kvt_rand_below(w.nr_jobs),
				kvt_rand_below(40) ? 0 : -EPIPE);
		kvd_tier_ready(w.tiers);
		rig_run(&w.rig);
		if (i % 64 == 0) {
			w.rig.now += 3000000000ull;
			kvd_tier_tick(w.tiers);
			w.hold[0] = w.hold[1] = false;
			settle();
			world_check();
		}
	}
	KVT_NOTE("%u hits; spilled %llu, restored %llu + %llu, written %llu", hits,
		 (unsigned long long)stats()->spills,
		 (unsigned long long)stats()->restores_dram,
		 (unsigned long long)stats()->restores_nvme,
		 (unsigned long long)stats()->writes);
	KVT_EXPECT(stats()->restores_nvme > 20 && stats()->restores_dram > 100);
	for (u32 i = 0; i < KV_ARRAY_SIZE(points); i++)
		kvd_fault_arm(points[i], NULL);
	w.rig.now += 20000000000ull;
	world_close();
}

TIER_MAIN("/tmp")
