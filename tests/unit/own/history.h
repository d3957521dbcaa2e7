/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tests/unit/own/history.h - a fixed history of a core, what of it outlives its process, and
 * a core that starts again over a copy of that. For tests/unit/own/adopt.c and
 * tests/fuzz/recovery.c, which change the copy first; included once by each, with
 * HISTORY_CHECK(cond) defined.
 */
#ifndef TESTS_OWN_HISTORY_H
#define TESTS_OWN_HISTORY_H

#include <errno.h>
#include <sodium.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvmd/own/adopt.h"
#include "kvmd/own/core.h"
#include "kvmd/own/image.h"
#include "kvmd/own/verify.h"

#define STRIDE	    73728ull /* mla_bf16, one layer */
#define PER_EXTENT  8u
#define EXTENTS	    6u
#define SESSIONS    4u
#define REGIONS_MAX 32u

struct kept_region {
	struct kvd_region r;
	u8 *bytes;
};

struct kept_extent {
	u32 pool, index;
	u64 serial;
	bool taken;
};

/* What the keeper has of the fixed history. */
static struct {
	struct kvd_image *image;
	struct kept_region regions[REGIONS_MAX];
	struct kept_extent extents[EXTENTS];
	u32 nr_regions, nr_extents;
	struct kv_session_page *pages[SESSIONS];
	u64 saved[2];
} kept;

static u32 nr_regions_live, nr_extents_live; /* of the core that runs */
static struct kv_session_page *pages[SESSIONS];
static u64 saved[2];
static bool no_memory; /* the backend refuses what it is to adopt */
static const u8 secrets[2][KVD_DOMAIN_SECRET_BYTES] = {"red", "blue"};

/* ------------------------------------------------------------------ surroundings */

static int region_alloc(void *arg, struct kvd_region *r)
{
	r->addr = aligned_alloc(4096, kv_round_up(r->size_bytes, 4096));
	if (!r->addr)
		return -ENOMEM;
	memset(r->addr, 0, r->size_bytes);
	r->fd = -1;
	nr_regions_live++;
	return 0;
}

static void region_free(void *arg, struct kvd_region *r)
{
	free(r->addr);
	nr_regions_live--;
}

static int save(void *arg, enum kvd_saved what, u64 value)
{
	saved[what] = value;
	return 0;
}

static void no_log(void *arg, int level, const char *line)
{
}

static int extent_alloc(struct kvd_backend *be, u64 bytes, struct kvd_extent_handle *ret)
{
	*ret = (struct kvd_extent_handle){.fd = 1};
	nr_extents_live++;
	return 0;
}

static void extent_free(struct kvd_backend *be, struct kvd_extent_handle *h, u64 bytes)
{
	nr_extents_live--;
}

static void limits(struct kvd_backend *be, struct kvd_backend_limits *ret)
{
	*ret = (struct kvd_backend_limits){.extent_min_bytes = STRIDE * PER_EXTENT,
					   .extent_max_bytes = STRIDE * PER_EXTENT,
					   .extent_align_bytes = 4096,
					   .capacity_bytes =
						   EXTENTS * STRIDE * PER_EXTENT};
}

static int extent_adopt(struct kvd_backend *be, int fd, u64 bytes,
			struct kvd_extent_handle *ret)
{
	if (no_memory)
		return -EINVAL;
	return extent_alloc(be, bytes, ret);
}

static void extent_told(void *arg, struct kvd_session *s, struct kvd_pool *pool,
			u32 index)
{
}

static void extent_removed(void *arg, struct kvd_session *s, struct kvd_pool *pool,
			   u32 index, u64 serial)
{
	extent_told(arg, s, pool, index);
}

static void revoked(void *arg, struct kvd_session *s, struct kvd_pool *pool,
		    const struct kv_page_ref *refs, u32 nr)
{
	extent_told(arg, s, pool, nr);
}

static void pages_freed(void *arg, struct kvd_pool *pool, u32 nr)
{
	extent_told(arg, NULL, pool, nr);
}

static void stalled(void *arg, struct kvd_session *s, u64 ns)
{
	extent_told(arg, s, NULL, (u32)ns);
}

static void reaped(void *arg, struct kvd_session *s)
{
	extent_told(arg, s, NULL, 0);
}

static int keep_put(void *arg, u32 pool_id, u32 index, u64 serial, int fd)
{
	return 0;
}

static void keep_del(void *arg, u32 pool_id, u32 index, u64 serial)
{
	keep_put(arg, pool_id, index, serial, 0);
}

static const struct kvd_backend_ops be_ops = {.name = "fuzz",
					      .extent_alloc = extent_alloc,
					      .extent_free = extent_free,
					      .limits = limits,
					      .extent_adopt = extent_adopt};
static struct kvd_backend be = {&be_ops};
static const struct kvd_env env = {NULL, region_alloc, region_free, save, no_log};
static const struct kvd_keep_ops keep = {NULL, keep_put, keep_del};
static const struct kvd_notify notify = {.extent_added = extent_told,
					 .extent_removed = extent_removed,
					 .revoked = revoked,
					 .pressure = extent_told,
					 .pages_freed = pages_freed,
					 .stalled = stalled,
					 .session_reaped = reaped};

static void core_start(struct kvd_core *core, struct kvd_gen_source *gens,
		       struct kvd_image *image, u64 epoch)
{
	struct kvd_core_config cfg = {.env = &env,
				      .backend = &be,
				      .gen_source = gens,
				      .notify = &notify,
				      .table_epoch = epoch,
				      .saved_grace = saved[KVD_SAVED_GRACE],
				      .stall_ns = 1000000000ull,
				      .image = image,
				      .keep = &keep};

	kvd_gen_source_init(gens, &env, saved[KVD_SAVED_GENERATION]);
	HISTORY_CHECK(!kvd_core_init(core, &cfg));
	kvd_core_now(core, 1);
}

static void turns(struct kvd_core *core, u64 *now, u32 nr)
{
	while (nr--) {
		kvd_core_now(core, ++*now);
		kvd_core_run(core);
	}
}

/* ------------------------------------------------------------------------ history */

static struct kvd_attach *open_pool(struct kvd_session *s)
{
	static const struct kv_layout layout = {.format_version = KV_LAYOUT_VERSION,
						.kind = KV_LAYOUT_MLA,
						.dtype = KV_DTYPE_BF16,
						.page_tokens = KV_PAGE_TOKENS,
						.nr_layers = 1,
						.latent_dim = 512,
						.rope_dim = 64};
	struct kvd_refusal why;
	struct kvd_attach *a;

	HISTORY_CHECK(!kvd_session_open_pool(s, &layout, NULL, &a, &why));
	return a;
}

static void seal(struct kvd_session *s, struct kvd_attach *a, const struct kv_grant *g,
		 u32 nr, u32 seq)
{
	struct kv_seal_page sp[8];
	struct kv_seal_ret rets[8];
	u32 tokens[8 * KV_PAGE_TOKENS];
	struct kvd_seal_op op = {
		.s = s, .a = a, .pages = sp, .tokens = tokens, .rets = rets, .nr = nr};
	int r;

	op.arg.flags = KV_SEAL_ROOT;
	for (u32 i = 0; i < nr; i++)
		sp[i] = (struct kv_seal_page){.pfn = g[i].pfn, .tag = g[i].tag};
	for (u32 i = 0; i < nr * KV_PAGE_TOKENS; i++)
		tokens[i] = seq * 1000 + i;
	HISTORY_CHECK(!kvd_seal_start(&op));
	do {
		r = kvd_seal_step(&op);
	} while (r == -EAGAIN);
	HISTORY_CHECK(!r);
}

static void lookup(struct kvd_session *s, struct kvd_attach *a, u32 seq)
{
	u32 tokens[3 * KV_PAGE_TOKENS];
	struct kv_hit hits[3];
	struct kvd_lookup_op op = {.s = s,
				   .a = a,
				   .tokens = tokens,
				   .nr_tokens = KV_ARRAY_SIZE(tokens),
				   .hits = hits,
				   .hits_max = 3};
	int r;

	for (u32 i = 0; i < KV_ARRAY_SIZE(tokens); i++)
		tokens[i] = seq * 1000 + i;
	r = kvd_lookup_start(&op);
	while (!r && (r = kvd_lookup_step(&op)) == -EAGAIN)
		r = 0;
	HISTORY_CHECK(r >= 0);
}

static void drop(struct kvd_session *s, struct kvd_attach *a, struct kv_grant g)
{
	struct kv_page_ref ref = {.pfn = g.pfn, .tag = g.tag};
	u32 nr, first;

	HISTORY_CHECK(!kvd_lease_free(s, a, &ref, 1, &nr, &first));
}

static void announce(struct kvd_session *s, struct kvd_pool *pool)
{
	kv_slot_announce(s->page, 0,
			 kv_load_acquire64(&pool->table.shared->grace_epoch.word));
}

/* One of each state: ACTIVE, MAGAZINE, SEALED by one and by two, CACHED, QUARANTINE; two
 * domains; a session that has ended and may still run. */
static void history(struct kvd_core *core, struct kvd_session **s, u64 *now)
{
	struct kvd_domain *d[2];
	struct kvd_tenant *t[2];
	struct kvd_limits lim = {
		.high_bytes = 1ull << 50, .max_bytes = 1ull << 50, .weight = 100};
	struct kvd_attach *a[SESSIONS];
	struct kv_grant g[8];
	u32 nr, pending;

	for (u32 i = 0; i < 2; i++) {
		const char *name = i ? "blue" : "red";

		HISTORY_CHECK(!kvd_domain_create(core, name, secrets[i], &d[i]));
		HISTORY_CHECK(!kvd_tenant_create(core, d[i], name, &lim, &t[i]));
	}
	for (u32 i = 0; i < SESSIONS; i++) {
		struct kvd_session_params p = {.client_id = i + 1,
					       .tenant = t[i == 2],
					       .page = pages[i],
					       .pid = (s32)(100 + i),
					       .name = "fuzz"};

		HISTORY_CHECK(!kvd_session_create(core, &p, &s[i]));
		a[i] = open_pool(s[i]);
	}
	HISTORY_CHECK(!kvd_lease_alloc(s[0], a[0], 8, KV_GFP_PREFILL, g, &pending));
	seal(s[0], a[0], g, 3, 1);
	seal(s[0], a[0], g + 3, 2, 2);
	turns(core, now, 4);
	lookup(s[1], a[1], 1);
	drop(s[0], a[0], g[3]);
	drop(s[0], a[0], g[4]); /* CACHED */
	HISTORY_CHECK(!kvd_lease_stock(s[0], a[0], 1, 4, KV_GFP_NOWAIT, &nr, &pending));
	HISTORY_CHECK(!kvd_lease_alloc(s[2], a[2], 3, KV_GFP_PREFILL, g, &pending));
	announce(s[2], a[2]->pool);
	drop(s[2], a[2], g[0]); /* QUARANTINE for as long as the step runs */
	HISTORY_CHECK(!kvd_lease_alloc(s[3], a[3], 4, KV_GFP_PREFILL, g, &pending));
	announce(s[3], a[3]->pool);
	seal(s[3], a[3], g, 1, 3); /* SEALING */
	turns(core, now, 2);
	kvd_session_end(s[3], "fuzz");
}

static void *copy_of(const void *data, size_t bytes)
{
	void *copy = aligned_alloc(4096, kv_round_up(bytes, 4096));

	HISTORY_CHECK(copy);
	memcpy(copy, data, bytes);
	return copy;
}

static void keep_region(const struct kvd_region *r)
{
	HISTORY_CHECK(kept.nr_regions < REGIONS_MAX);
	kept.regions[kept.nr_regions].r = *r;
	kept.regions[kept.nr_regions++].bytes = copy_of(r->addr, r->size_bytes);
}

static void keep_all(struct kvd_core *core, struct kvd_session **s)
{
	for (u32 i = 0; i < KVD_POOLS_MAX; i++) {
		struct kvd_pool *pool = core->mm.pools[i];

		if (!pool)
			continue;
		keep_region(&pool->frames_region);
		keep_region(&pool->tokens_region);
		for (u32 k = 0; k < SESSIONS; k++) {
			struct kvd_attach *a = kvd_session_attach(s[k], pool->id);

			if (a)
				keep_region(&a->region);
		}
		for (u32 k = 0; k < pool->nr_extents; k++)
			if (pool->extents[k].state != KVD_EXTENT_NONE)
				kept.extents[kept.nr_extents++] = (struct kept_extent){
					pool->id, k, pool->extents[k].serial, false};
	}
	for (u32 i = 0; i < SESSIONS; i++)
		kept.pages[i] = copy_of(pages[i], KV_SESSION_BYTES);
	kept.image = copy_of(core->image, sizeof(*core->image));
	memcpy(kept.saved, saved, sizeof(saved));
}

static void make_history(void)
{
	struct kvd_image *image = calloc(1, sizeof(*image));
	struct kvd_session *s[SESSIONS];
	struct kvd_gen_source gens;
	static struct kvd_core core;
	u64 now = 1;

	HISTORY_CHECK(image && sodium_init() >= 0);
	for (u32 i = 0; i < SESSIONS; i++) {
		pages[i] = aligned_alloc(4096, KV_SESSION_BYTES);
		HISTORY_CHECK(pages[i]);
		memset(pages[i], 0, KV_SESSION_BYTES);
	}
	kvd_image_format(image);
	core_start(&core, &gens, image, 7);
	history(&core, s, &now);
	keep_all(&core, s);
	kvd_core_fini(&core);
	free(image);
	HISTORY_CHECK(!nr_regions_live && !nr_extents_live);
}

/* --------------------------------------------------------------------- start again */

static int find_leases(void *arg, u32 pool_id, u64 session_id, struct kvd_region *ret)
{
	struct kvd_region *r = arg;

	for (u32 i = 0; i < kept.nr_regions; i++) {
		if (r[i].kind != KVD_REGION_LEASES || r[i].pool_id != pool_id ||
		    r[i].session_id != session_id || !r[i].addr)
			continue;
		*ret = r[i];
		r[i].addr = NULL;
		return 0;
	}
	return -ENOENT;
}

static int find_extent(void *arg, u32 pool_id, u32 index, u64 serial)
{
	for (u32 i = 0; i < kept.nr_extents; i++)
		if (kept.extents[i].pool == pool_id && kept.extents[i].index == index &&
		    kept.extents[i].serial == serial && !kept.extents[i].taken)
			return 1;
	return -1;
}

static void extent_taken(void *arg, u32 pool_id, u32 index, u64 serial)
{
	for (u32 i = 0; i < kept.nr_extents; i++)
		if (kept.extents[i].pool == pool_id && kept.extents[i].index == index &&
		    kept.extents[i].serial == serial)
			kept.extents[i].taken = true;
}

static void adopt_pool(struct kvd_core *core, struct kvd_region *r, u32 id,
		       struct kvd_adopted *ad)
{
	struct kvd_adopt_pool_params p = {.id = id,
					  .leases = find_leases,
					  .extent = find_extent,
					  .extent_taken = extent_taken,
					  .arg = r};
	struct kvd_region *frames = NULL, *tokens = NULL;
	int ret;

	for (u32 i = 0; i < kept.nr_regions; i++) {
		if (r[i].pool_id != id || !r[i].addr)
			continue;
		if (r[i].kind == KVD_REGION_FRAMES)
			frames = &r[i];
		if (r[i].kind == KVD_REGION_TOKENS)
			tokens = &r[i];
	}
	if (!frames || !tokens)
		return;
	p.frames = *frames;
	p.tokens = *tokens;
	ret = kvd_adopt_pool(core, &p, ad);
	HISTORY_CHECK(!ret || ret == -EBADMSG);
	if (!ret)
		frames->addr = tokens->addr = NULL;
}

/* The order of own/adopt.h, as ipc/adopt.c has it. */
__attribute__((unused)) static void adopt(struct kvd_core *core, struct kvd_region *r,
					  struct kvd_session **s, struct kvd_adopted *ad)
{
	u32 first = core->image->undo.pool_id;

	for (u32 i = 0; i < KVD_DOMAINS_MAX; i++) {
		if (!core->image->domains[i].check)
			continue;
		if (kvd_image_domain_ok(&core->image->domains[i]))
			HISTORY_CHECK(!kvd_adopt_domain(core, i, secrets[i % 2]));
		else
			ad->damage++;
	}
	HISTORY_CHECK(!kvd_adopt_tenants(core, ad));
	for (u32 i = 0; i < SESSIONS; i++) {
		struct kvd_adopt_session_params p = {
			.id = i + 1, .tenant = i == 2, .page = pages[i]};
		int ret = kvd_adopt_session(core, &p, &s[i], ad);

		HISTORY_CHECK(!ret || ret == -ENODATA);
		if (ret)
			s[i] = NULL;
	}
	kvd_adopt_epochs(core);
	for (u32 i = 0; i < SESSIONS; i++)
		HISTORY_CHECK(!s[i] ||
			      pages[i]->table_epoch.word ==
				      (s[i]->state == KVD_SESSION_LIVE ? 8u : 0u));
	if (first && first <= KVD_POOLS_MAX)
		adopt_pool(core, r, first, ad);
	core->image->undo.valid = 0;
	for (u32 id = 1; id <= KVD_POOLS_MAX; id++)
		if (id != first)
			adopt_pool(core, r, id, ad);
	kvd_adopt_done(core);
}

static void findings_show(const struct kvd_findings *fs)
{
	for (u32 i = 0; i < KV_MIN(fs->nr, fs->max) && getenv("FUZZ_SHOW"); i++)
		fprintf(stderr, "I%u pool %u pfn %d: %s\n", fs->list[i].invariant,
			fs->list[i].pool_id, (int)fs->list[i].pfn, fs->list[i].text);
}

/* In one go, and in slices as kvmd does it. */
__attribute__((unused)) static int audit(struct kvd_core *core)
{
	struct kvd_finding list[4];
	struct kvd_findings fs = {.list = list, .max = KV_ARRAY_SIZE(list)};
	struct kvd_audit_run run = {.findings = fs};
	int nr = kvd_audit(core, &fs);

	findings_show(&fs);
	HISTORY_CHECK(!kvd_audit_begin(core, &run));
	while (!kvd_audit_step(core, &run, 7))
		;
	HISTORY_CHECK(!run.error);
	findings_show(&run.findings);
	nr += (int)run.findings.nr;
	kvd_audit_end(core, &run);
	return nr;
}

/* No page that waited for a step is free: whoever runs it may still write there. */
__attribute__((unused)) static void expect_waiting(const struct kvd_core *core)
{
	for (u32 i = 0; i < kept.nr_regions; i++) {
		const struct kvd_region *r = &kept.regions[i].r;
		const struct kvd_pool *pool = core->mm.pools[r->pool_id - 1];
		const struct kvd_frame *f =
			(const void *)(kept.regions[i].bytes + KVD_FRAMES_OFF);

		if (r->kind != KVD_REGION_FRAMES || !pool)
			continue;
		for (u32 pfn = 0; pfn < pool->geo.nr_pages; pfn++)
			HISTORY_CHECK(f[pfn].state != KVD_QUARANTINE ||
				      pool->frames[pfn].state != KVD_FREE);
	}
}

/* A few requests, as if nothing had happened; then everybody goes. */
__attribute__((unused)) static void serve(struct kvd_core *core)
{
	struct kvd_session *s;
	u64 now = 10;

	list_for_each_entry (s, &core->sessions, node) {
		for (u32 k = 0; k < KV_POOLS_MAX; k++) {
			struct kvd_attach *a = &s->attach[k];
			struct kv_grant g[2];
			u32 pending;

			if (s->state != KVD_SESSION_LIVE || !a->pool)
				continue;
			if (!kvd_lease_alloc(s, a, 2, KV_GFP_NOWAIT, g, &pending))
				drop(s, a, g[0]);
			lookup(s, a, 1);
		}
	}
	turns(core, &now, 3);
	HISTORY_CHECK(!audit(core));
	for (u64 id = 1; id <= SESSIONS; id++) { /* some are reaped meanwhile */
		s = kvd_session_find(core, id);
		if (s)
			kvd_session_end(s, "over");
	}
	turns(core, &now, 8);
	HISTORY_CHECK(!audit(core));
}

/* A fresh copy of all that was kept, for a core to start over. */
static void copies_make(struct kvd_region *r, struct kvd_image **image)
{
	if (!kept.image)
		make_history();
	for (u32 i = 0; i < kept.nr_regions; i++) {
		r[i] = kept.regions[i].r;
		r[i].addr = copy_of(kept.regions[i].bytes, r[i].size_bytes);
		nr_regions_live++;
	}
	for (u32 i = 0; i < SESSIONS; i++)
		memcpy(pages[i], kept.pages[i], KV_SESSION_BYTES);
	for (u32 i = 0; i < kept.nr_extents; i++)
		kept.extents[i].taken = false;
	*image = copy_of(kept.image, sizeof(**image));
	memcpy(saved, kept.saved, sizeof(saved));
}

static void copies_drop(struct kvd_region *r, struct kvd_image *image)
{
	for (u32 i = 0; i < kept.nr_regions; i++)
		if (r[i].addr)
			region_free(NULL, &r[i]);
	free(image);
	HISTORY_CHECK(!nr_regions_live && !nr_extents_live);
}

#endif
