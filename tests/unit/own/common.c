/* SPDX-License-Identifier: Apache-2.0 */
/* tests/unit/own/common.c - see common.h */
#include "tests/unit/own/common.h"
#include <sys/mman.h>

static bool fault(struct rig *r)
{
	r->calls++;
	if (r->fail_at && r->calls == r->fail_at)
		r->fired = true;
	return r->fail_at && r->calls == r->fail_at;
}

static int rig_region_alloc(void *arg, struct kvd_region *reg)
{
	struct rig *r = arg;
	void *p;

	if (fault(r))
		return -ENOMEM;
	p = mmap(NULL, reg->size_bytes, PROT_READ | PROT_WRITE,
		 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (p == MAP_FAILED)
		return -ENOMEM;
	reg->addr = p;
	r->regions++;
	return 0;
}

static void rig_region_free(void *arg, struct kvd_region *reg)
{
	struct rig *r = arg;

	munmap(reg->addr, reg->size_bytes);
	r->regions--;
}

static int rig_save(void *arg, enum kvd_saved what, u64 value)
{
	struct rig *r = arg;

	if (fault(r))
		return -EIO;
	r->saved[what] = value;
	return 0;
}

static void rig_log(void *arg, int level, const char *line)
{
}

static int rig_extent_alloc(struct kvd_backend *be, u64 size,
			    struct kvd_extent_handle *ret)
{
	struct rig *r = kv_container_of(be, struct rig, be);

	if (r->backend_error)
		return r->backend_error;
	if (fault(r))
		return -EIO;
	r->extents++;
	ret->fd = -1;
	ret->addr = NULL;
	ret->cookie = ++r->allocs;
	return 0;
}

static void rig_extent_free(struct kvd_backend *be, struct kvd_extent_handle *h, u64 size)
{
	struct rig *r = kv_container_of(be, struct rig, be);

	r->extents--;
	r->frees++;
}

static void rig_limits(struct kvd_backend *be, struct kvd_backend_limits *ret)
{
	*ret = kv_container_of(be, struct rig, be)->limits;
}

static const struct kvd_backend_ops rig_ops = {
	.name = "rig",
	.extent_alloc = rig_extent_alloc,
	.extent_free = rig_extent_free,
	.limits = rig_limits,
};

static void on_added(void *arg, struct kvd_session *s, struct kvd_pool *pool, u32 index)
{
	((struct rig *)arg)->added++;
}

static void on_removed(void *arg, struct kvd_session *s, struct kvd_pool *pool, u32 index,
		       u64 serial)
{
	((struct rig *)arg)->removed++;
}

static void on_revoked(void *arg, struct kvd_session *s, struct kvd_pool *pool,
		       const struct kv_page_ref *pages, u32 nr)
{
	((struct rig *)arg)->revoked += nr;
	((struct rig *)arg)->last_revoked = pages[0];
}

static void on_pressure(void *arg, struct kvd_session *s, struct kvd_pool *pool,
			u32 level)
{
	((struct rig *)arg)->pressure = level;
	((struct rig *)arg)->pressures++;
}

static void on_pages_freed(void *arg, struct kvd_pool *pool, u32 nr)
{
	((struct rig *)arg)->pages_freed++;
}

static void on_stalled(void *arg, struct kvd_session *s, u64 ns)
{
	((struct rig *)arg)->stalls++;
	((struct rig *)arg)->stalled_id = s->id;
}

static void on_reaped(void *arg, struct kvd_session *s)
{
	((struct rig *)arg)->reaped++;
	((struct rig *)arg)->last_reaped = s->id;
	free(s->page);
}

static const struct kvd_notify rig_notify = {
	.extent_added = on_added,
	.extent_removed = on_removed,
	.revoked = on_revoked,
	.pressure = on_pressure,
	.pages_freed = on_pages_freed,
	.stalled = on_stalled,
	.session_reaped = on_reaped,
};

void rig_init(struct rig *r, u32 nr_extents, u32 pages_per_extent)
{
	static const u8 red_secret[32] = "red", blue_secret[32] = "blue";
	struct kvd_core_config cfg = {
		.env = &r->env,
		.backend = &r->be,
		.gen_source = &r->gens,
		.notify = &rig_notify,
		.notify_arg = r,
		.table_epoch = 7,
		.stall_ns = 1000000000ull,
	};

	memset(r, 0, sizeof(*r));
	r->be.ops = &rig_ops;
	r->env =
		(struct kvd_env){r, rig_region_alloc, rig_region_free, rig_save, rig_log};
	r->limits.extent_min_bytes = RIG_STRIDE * pages_per_extent;
	r->limits.extent_max_bytes = RIG_STRIDE * pages_per_extent;
	r->limits.extent_align_bytes = 4096;
	r->limits.capacity_bytes = nr_extents * r->limits.extent_min_bytes;
	kvd_gen_source_init(&r->gens, &r->env, 0);
	KVT_EXPECT_EQ(kvd_core_init(&r->core, &cfg), 0);
	r->now = 1;
	kvd_core_now(&r->core, r->now);
	KVT_EXPECT_EQ(kvd_domain_create(&r->core, "red", red_secret, &r->red), 0);
	KVT_EXPECT_EQ(kvd_domain_create(&r->core, "blue", blue_secret, &r->blue), 0);
}

void rig_fini(struct rig *r)
{
	rig_audit(r);
	kvd_core_fini(&r->core);
	KVT_EXPECT_EQ(r->extents, 0);
	KVT_EXPECT_EQ(r->regions, 0);
}

struct kvd_tenant *rig_tenant(struct rig *r, struct kvd_domain *d, const char *name,
			      u32 min, u32 max)
{
	struct kvd_limits l = {
		.min_bytes = min * RIG_STRIDE,
		.max_bytes = max ? max * RIG_STRIDE : 1ull << 50,
		.weight = 100,
	};
	struct kvd_tenant *t;

	l.high_bytes = l.max_bytes;
	KVT_EXPECT_EQ(kvd_tenant_create(&r->core, d, name, &l, &t), 0);
	return t;
}

struct kvd_session *rig_session(struct rig *r, struct kvd_tenant *t)
{
	struct kvd_session_params p = {
		.client_id = ++r->next_client,
		.tenant = t,
		.page = aligned_alloc(4096, KV_SESSION_BYTES),
		.pid = (s32)(1000 + r->next_client),
		.name = "test",
	};
	struct kvd_session *s;

	memset(p.page, 0, KV_SESSION_BYTES);
	KVT_EXPECT_EQ(kvd_session_create(&r->core, &p, &s), 0);
	return s;
}

struct kv_layout rig_layout(u64 lora)
{
	struct kv_layout l = {
		.format_version = KV_LAYOUT_VERSION,
		.kind = KV_LAYOUT_MLA,
		.dtype = KV_DTYPE_BF16,
		.page_tokens = KV_PAGE_TOKENS,
		.nr_layers = 1,
		.latent_dim = 512,
		.rope_dim = 64,
		.lora_id = lora,
	};

	return l;
}

struct kvd_attach *rig_open(struct kvd_session *s, const struct kv_layout *l)
{
	struct kvd_attach *a;
	struct kvd_refusal why;
	int r = kvd_session_open_pool(s, l, NULL, &a, &why);

	if (r)
		KVT_FAIL("open pool: %d %s", r, r == -EINVAL ? why.text : "");
	return a;
}

struct kvd_attach *rig_client(struct rig *r, struct kvd_tenant *t,
			      struct kvd_session **ret_s)
{
	struct kv_layout l = rig_layout(0);

	*ret_s = rig_session(r, t);
	return rig_open(*ret_s, &l);
}

void rig_run(struct rig *r)
{
	for (u32 i = 0; i < 1000; i++) {
		u64 next;

		kvd_core_now(&r->core, ++r->now);
		next = kvd_core_run(&r->core);
		if (next > r->now)
			return;
	}
	KVT_FAIL("the core never comes to rest");
}

void rig_audit(struct rig *r)
{
	struct kvd_finding list[8];
	struct kvd_findings fs = {.list = list, .max = KV_ARRAY_SIZE(list)};
	int nr = kvd_audit(&r->core, &fs);

	for (u32 i = 0; i < KV_MIN(fs.nr, fs.max); i++)
		printf("# I%u pool %u pfn %d: %s\n", list[i].invariant, list[i].pool_id,
		       (int)list[i].pfn, list[i].text);
	KVT_EXPECT_EQ(nr, 0);
}

u32 rig_quarantine(const struct kvd_pool *pool)
{
	return pool->nr[KVD_QUARANTINE];
}

int rig_alloc(struct kvd_session *s, struct kvd_attach *a, u32 nr, u32 gfp,
	      struct kv_grant *g)
{
	u32 pending = 0;

	return kvd_lease_alloc(s, a, nr, gfp, g, &pending);
}

struct kv_grant rig_alloc1(struct kvd_session *s, struct kvd_attach *a)
{
	struct kv_grant g;

	KVT_EXPECT_EQ(rig_alloc(s, a, 1, KV_GFP_NOWAIT, &g), 0);
	return g;
}

int rig_free1(struct kvd_session *s, struct kvd_attach *a, struct kv_grant g)
{
	struct kv_page_ref ref = {.pfn = g.pfn, .tag = g.tag};
	u32 nr, first;

	return kvd_lease_free(s, a, &ref, 1, &nr, &first);
}

void rig_tokens(u64 seq, u32 page, u32 *ret)
{
	for (u32 i = 0; i < KV_PAGE_TOKENS; i++)
		ret[i] = (u32)(seq * 1000003 + page * 1009 + i) * 2654435761u;
}

int rig_seal(struct kvd_session *s, struct kvd_attach *a, const struct kv_grant *pages,
	     u32 nr, u64 seq, u32 first, const u8 *parent, struct kv_seal_ret *rets)
{
	static struct kv_seal_page sp[KV_BATCH_MAX];
	static u32 tokens[KV_BATCH_MAX * KV_PAGE_TOKENS];
	struct kvd_seal_op op = {
		.s = s, .a = a, .pages = sp, .tokens = tokens, .rets = rets, .nr = nr};
	int r;

	for (u32 i = 0; i < nr; i++) {
		sp[i] = (struct kv_seal_page){
			.pfn = pages[i].pfn, .crc32c = i, .tag = pages[i].tag};
		rig_tokens(seq, first + i, tokens + i * KV_PAGE_TOKENS);
	}
	if (parent)
		memcpy(op.arg.parent_key, parent, KV_KEY_BYTES);
	else
		op.arg.flags = KV_SEAL_ROOT;
	r = kvd_seal_start(&op);
	if (r)
		return r;
	do {
		r = kvd_seal_step(&op);
	} while (r == -EAGAIN);
	return r;
}

int rig_lookup(struct kvd_session *s, struct kvd_attach *a, u64 seq, u32 nr_pages,
	       struct kv_hit *hits, u32 *ret_nr)
{
	static u32 tokens[2048 * KV_PAGE_TOKENS];
	struct kvd_lookup_op op = {
		.s = s,
		.a = a,
		.tokens = tokens,
		.nr_tokens = nr_pages * KV_PAGE_TOKENS,
		.hits = hits,
		.hits_max = nr_pages,
	};
	int r;

	for (u32 i = 0; i < nr_pages; i++)
		rig_tokens(seq, i, tokens + i * KV_PAGE_TOKENS);
	r = kvd_lookup_start(&op);
	if (r)
		return r;
	do {
		r = kvd_lookup_step(&op);
	} while (r == -EAGAIN);
	*ret_nr = op.nr;
	return r;
}

void rig_cache(struct rig *r, struct kvd_session *s, struct kvd_attach *a, u64 seq,
	       u32 nr)
{
	struct kv_grant g[64];
	struct kv_seal_ret rets[64];

	KVT_EXPECT(nr <= 64);
	KVT_EXPECT_EQ(rig_alloc(s, a, nr, KV_GFP_PREFILL, g), 0);
	KVT_EXPECT_EQ(rig_seal(s, a, g, nr, seq, 0, NULL, rets), 0);
	for (u32 i = 0; i < nr; i++)
		KVT_EXPECT_EQ(rig_free1(s, a, g[i]), 0);
	rig_run(r);
}

void rig_announce(struct kvd_session *s, u32 slot, struct kvd_pool *pool)
{
	kv_slot_announce(s->page, slot,
			 kv_load_acquire64(&pool->table.shared->grace_epoch.word));
}

int rig_retire(struct kvd_session *s, u32 slot)
{
	return kv_slot_retire(s->page, slot);
}

bool rig_pop(struct kvd_session *s, u32 mag, u32 slot, struct kv_grant *ret)
{
	int dirty;

	ret->flags = 0;
	return kv_mag_pop(&s->page->magazines[mag].slots[slot], &ret->pfn, &ret->tag,
			  &dirty);
}
