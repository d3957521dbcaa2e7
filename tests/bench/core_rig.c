/* SPDX-License-Identifier: Apache-2.0 */
/*
 * core_rig.c - see core_rig.h: surroundings that do nothing, so that only the core is
 * timed.
 */
#include "tests/bench/core_rig.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/clock.h"

static int region_alloc(void *arg, struct kvd_region *reg)
{
	void *p = mmap(NULL, reg->size_bytes, PROT_READ | PROT_WRITE,
		       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	if (p == MAP_FAILED)
		return -ENOMEM;
	/* As kvmd does: this is what a host with shmem_enabled = advise gets. */
	if (reg->kind != KVD_REGION_LEASES && reg->size_bytes >= KVD_REGION_HUGE)
		madvise(p, reg->size_bytes, MADV_HUGEPAGE);
	reg->addr = p;
	reg->fd = -1;
	return 0;
}

static void region_free(void *arg, struct kvd_region *reg)
{
	munmap(reg->addr, reg->size_bytes);
}

static int save(void *arg, enum kvd_saved what, u64 value)
{
	return 0;
}

static void log_line(void *arg, int level, const char *line)
{
}

static int extent_alloc(struct kvd_backend *be, u64 size, struct kvd_extent_handle *ret)
{
	*ret = (struct kvd_extent_handle){.fd = -1};
	return 0;
}

static void extent_free(struct kvd_backend *be, struct kvd_extent_handle *h, u64 size)
{
}

static void limits(struct kvd_backend *be, struct kvd_backend_limits *ret)
{
	*ret = kv_container_of(be, struct core_rig, be)->limits;
}

static const struct kvd_backend_ops backend_ops = {
	.name = "none",
	.extent_alloc = extent_alloc,
	.extent_free = extent_free,
	.limits = limits,
};

static void on_added(void *arg, struct kvd_session *s, struct kvd_pool *p, u32 i)
{
}

static void on_removed(void *arg, struct kvd_session *s, struct kvd_pool *p, u32 i,
		       u64 serial)
{
}

static void on_revoked(void *arg, struct kvd_session *s, struct kvd_pool *p,
		       const struct kv_page_ref *pages, u32 nr)
{
}

static void on_pressure(void *arg, struct kvd_session *s, struct kvd_pool *p, u32 level)
{
}

static void on_freed(void *arg, struct kvd_pool *p, u32 nr)
{
}

static void on_stalled(void *arg, struct kvd_session *s, u64 ns)
{
}

static void on_reaped(void *arg, struct kvd_session *s)
{
}

static const struct kvd_notify notify = {
	.extent_added = on_added,
	.extent_removed = on_removed,
	.revoked = on_revoked,
	.pressure = on_pressure,
	.pages_freed = on_freed,
	.stalled = on_stalled,
	.session_reaped = on_reaped,
};

static struct kv_layout one_layer(void)
{
	return (struct kv_layout){.format_version = KV_LAYOUT_VERSION,
				  .kind = KV_LAYOUT_MLA,
				  .dtype = KV_DTYPE_BF16,
				  .page_tokens = KV_PAGE_TOKENS,
				  .nr_layers = 1,
				  .latent_dim = 512,
				  .rope_dim = 64};
}

int core_rig_init(struct core_rig *r, u32 nr_pages, u32 extent_pages)
{
	static const u8 secret[32] = "bench";
	struct kvd_core_config cfg = {.env = &r->env,
				      .backend = &r->be,
				      .gen_source = &r->gens,
				      .notify = &notify,
				      .notify_arg = r,
				      .table_epoch = 1};
	int e;

	memset(r, 0, sizeof(*r));
	r->layout = one_layer();
	r->stride_bytes = kv_page_stride(&r->layout);
	r->be.ops = &backend_ops;
	r->env = (struct kvd_env){r, region_alloc, region_free, save, log_line};
	r->limits.extent_min_bytes = r->stride_bytes * extent_pages;
	r->limits.extent_max_bytes = r->limits.extent_min_bytes;
	r->limits.extent_align_bytes = 4096;
	r->limits.capacity_bytes = r->stride_bytes * nr_pages;
	kvd_gen_source_init(&r->gens, &r->env, 0);
	e = kvd_core_init(&r->core, &cfg);
	if (e)
		return e;
	kvd_core_now(&r->core, kv_now_ns());
	e = kvd_domain_create(&r->core, "bench", secret, &r->domain);
	if (e)
		kvd_core_fini(&r->core);
	return e;
}

int core_rig_tenant(struct core_rig *r, const char *name, u64 min_pages, u64 high_pages,
		    struct kvd_tenant **ret_tenant)
{
	struct kvd_limits quota = {.min_bytes = min_pages * r->stride_bytes,
				   .high_bytes = 1ull << 50,
				   .max_bytes = 1ull << 50,
				   .weight = 100};

	if (high_pages)
		quota.high_bytes = high_pages * r->stride_bytes;
	return kvd_tenant_create(&r->core, r->domain, name, &quota, ret_tenant);
}

int core_rig_client(struct core_rig *r, struct kvd_tenant *tenant,
		    struct core_client *ret_client)
{
	struct kvd_session_params params = {
		.client_id = ++r->last_client, .name = tenant->name, .tenant = tenant};
	struct kvd_refusal why;
	int e;

	if (r->nr_pages_kept == CORE_RIG_CLIENTS)
		return -ENOSPC;
	params.page = aligned_alloc(4096, KV_SESSION_BYTES);
	if (!params.page)
		return -ENOMEM;
	memset(params.page, 0, KV_SESSION_BYTES);
	r->pages_kept[r->nr_pages_kept++] = params.page;
	e = kvd_session_create(&r->core, &params, &ret_client->session);
	if (!e)
		e = kvd_session_open_pool(ret_client->session, &r->layout, NULL,
					  &ret_client->attach, &why);
	return e;
}

void core_rig_fini(struct core_rig *r)
{
	kvd_core_fini(&r->core);
	for (u32 i = 0; i < r->nr_pages_kept; i++)
		free(r->pages_kept[i]);
}
