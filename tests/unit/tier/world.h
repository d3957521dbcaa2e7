/* SPDX-License-Identifier: Apache-2.0 */
/*
 * world.h - a core with tiers over made-up surroundings, for tests/unit/tier/tier.c and
 * faults.c.
 *
 * The core is tests/unit/own's rig; frames have bytes here, and the copier is a list of
 * jobs that a case ends when it likes: a copy reads and writes at its end, as a late DMA
 * would. The disk is a real file.
 */
#ifndef TESTS_UNIT_TIER_WORLD_H
#define TESTS_UNIT_TIER_WORLD_H

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

#define PAGE RIG_STRIDE
#ifndef DRAM_BYTES
#define DRAM_BYTES (4ull << 20) /* 52 pages */
#endif
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
static u32 nvme_depth = 32; /* of the next world */

static inline u8 *frame(const struct kvd_pool *pool, u32 pfn)
{
	if (!w.mem[pool->id - 1])
		w.mem[pool->id - 1] =
			mmap(NULL, pool->geo.nr_pages * PAGE, PROT_READ | PROT_WRITE,
			     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	return w.mem[pool->id - 1] + pfn * PAGE;
}

static inline int submit(void *arg, enum kvd_tier_dir dir,
			 const struct kvd_tier_copy *copies, u32 nr, u64 deadline_ns,
			 u32 cookie)
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

static inline void job_end(u32 i, int status)
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

static inline void tell(void *arg, const char *line)
{
	w.told++;
}

static inline bool jobs_run(void)
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
static inline void settle(void)
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

static inline void limits_set(u16 tenant, u64 min, u64 max)
{
	struct kvd_tier_limits l = {min, max, max, 100};

	kvd_tier_set_limits(w.tiers, KVD_TIER_DRAM, tenant, &l);
	kvd_tier_set_limits(w.tiers, KVD_TIER_NVME, tenant, &l);
}

static inline void tiers_open(bool nvme, u32 write_from)
{
	struct kvd_tier_params p = {
		.core = &w.rig.core,
		.copier = {.submit = submit},
		.dram_bytes = DRAM_BYTES,
		.nvme_path = nvme ? scratch("nvme") : NULL,
		.nvme_bytes = NVME_BYTES,
		.nvme_depth = nvme_depth,
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

static inline void world_open(bool nvme, u32 write_from)
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

static inline void world_check(void)
{
	const struct kvd_space *sp;

	rig_audit(&w.rig);
	for (u32 i = 0; i < KVD_TIER_NR; i++) {
		sp = kvd_tier_space(w.tiers, i);
		if (sp && kvd_space_check(sp))
			KVT_FAIL("tier %u: %s", i, kvd_space_check(sp));
	}
}

static inline void world_close(void)
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
static inline void pattern(u8 *p, u64 seq, u32 page)
{
	u64 z = seq * 0x9e3779b97f4a7c15ull + page * 0xbf58476d1ce4e5b9ull + 1;

	for (u32 i = 0; i < PAGE; i += 8) {
		z ^= z << 13;
		z ^= z >> 7;
		z ^= z << 17;
		memcpy(p + i, &z, 8);
	}
}

static inline bool is_pattern(const u8 *p, u64 seq, u32 page)
{
	static u8 want[PAGE];

	pattern(want, seq, page);
	return !memcmp(p, want, PAGE);
}

/* Write, seal and let go pages 0..nr-1 of a sequence: CACHED. @crc_xor: a wrong digest */
static inline void cache_with(struct kvd_session *s, struct kvd_attach *a, u64 seq,
			      u32 nr, u32 crc_xor)
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

static inline void cache(u64 seq, u32 nr)
{
	cache_with(w.s, w.a, seq, nr, 0);
}

static inline void evict(struct kvd_attach *a, u32 nr)
{
	while (nr) {
		u32 got = kvd_reclaim_pool(a->pool, KVD_TENANTS_MAX, nr, false);

		settle();
		KVT_EXPECT(got || a->pool->evict_again);
		nr -= got;
	}
}

/* Look up, expect the right bytes in each hit, let go. Return: hits */
static inline u32 look(struct kvd_session *s, struct kvd_attach *a, u64 seq, u32 nr,
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
static inline u32 fetch(u64 seq, u32 nr)
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

static inline const struct kvd_tier_stats *stats(void)
{
	return kvd_tier_stats(w.tiers);
}

static inline void arm(enum kvd_fault_point point, u32 space, u32 times)
{
	struct kvd_fault_spec spec = {
		.probability = 1000000, .times = times, .space = space};

	kvd_fault_arm(point, &spec);
}

static inline void to_nvme_only(u64 seq, u32 nr)
{
	cache(seq, nr);
	evict(w.a, nr);
	for (u64 i = 0; i < 8; i++) { /* 64 more pages push it out of DRAM */
		cache(1000 + i, 8);
		evict(w.a, 8);
	}
}

#endif
