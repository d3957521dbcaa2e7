/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvmd/mm, own at their ends: names, numbers and tables that are full, references that
 * cannot be counted further, and memory that is not there: each allocation of the core's
 * life fails in turn.
 */
#include <sys/mman.h>

#include "kvmd/own/layout.h"
#include "kvmd/own/steer.h"
#include "tests/unit/own/common.h"

#define HISTORY_CHECK KVT_EXPECT
#include "tests/unit/own/history.h"

/* --------------------------------------------------------- an allocator with a limit */

static u32 fail_nth, calls; /* 0: none fails */

#ifndef KV_SANITIZED /* it has its own */
void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t nr, size_t bytes);
void *__libc_memalign(size_t align, size_t bytes);
void *__libc_realloc(void *p, size_t bytes);
void __libc_free(void *p);

static bool fails(void)
{
	return fail_nth && ++calls == fail_nth;
}

void *malloc(size_t bytes)
{
	return fails() ? NULL : __libc_malloc(bytes);
}

void *calloc(size_t nr, size_t bytes)
{
	return fails() ? NULL : __libc_calloc(nr, bytes);
}

void *realloc(void *p, size_t bytes)
{
	return fails() ? NULL : __libc_realloc(p, bytes);
}

void *aligned_alloc(size_t align, size_t bytes)
{
	return fails() ? NULL : __libc_memalign(align, bytes);
}

void free(void *p)
{
	__libc_free(p);
}
#endif

static struct kvd_core core;
static struct kvd_gen_source gens;

/* A core's life, as far as it comes. Return: what stopped it */
static int life(struct kvd_image *image)
{
	static const struct kvd_limits lim = {
		.high_bytes = 1ull << 50, .max_bytes = 1ull << 50, .weight = 100};
	static const struct kv_layout layout = {.format_version = KV_LAYOUT_VERSION,
						.kind = KV_LAYOUT_GQA,
						.dtype = KV_DTYPE_E4M3,
						.scale_kind = KV_SCALE_STATIC,
						.nr_scales = 2,
						.page_tokens = KV_PAGE_TOKENS,
						.nr_layers = 1,
						.nr_kv_heads = 1,
						.head_dim = 64};
	static const float scales[2] = {1, 2};
	struct kvd_session_params p = {.client_id = 1, .page = pages[0], .name = "life"};
	struct kvd_finding list[4];
	struct kvd_findings fs = {.list = list, .max = 4};
	struct kvd_refusal why;
	struct kvd_domain *d;
	struct kvd_session *s;
	struct kvd_attach *a;
	struct kv_grant g[2];
	u32 pending, nr;
	int r;

	core_start(&core, &gens, image, 7);
	r = kvd_domain_create(&core, "red", secrets[0], &d);
	if (!r)
		r = kvd_tenant_create(&core, d, "t", &lim, &p.tenant);
	if (!r)
		r = kvd_session_create(&core, &p, &s);
	if (!r)
		r = kvd_session_open_pool(s, &layout, scales, &a, &why);
	if (!r)
		r = kvd_lease_alloc(s, a, 2, KV_GFP_NOWAIT, g, &pending);
	if (!r)
		r = kvd_steer_unhold(a->pool, g[0].pfn, true, &nr) == -ENOMEM ? -ENOMEM
									      : 0;
	if (!r)
		r = KV_MIN(kvd_audit(&core, &fs), 0);
	return r;
}

KVT_TEST(each_allocation_of_a_life_fails)
{
	u32 nth = 1, refused = 0;
	int r;

#ifdef KV_SANITIZED
	KVT_SKIP("the sanitizer's allocator is not ours to fail");
#endif
	pages[0] = aligned_alloc(4096, KV_SESSION_BYTES);
	for (;; nth++) {
		struct kvd_image *image = calloc(1, sizeof(*image));

		kvd_image_format(image);
		memset(pages[0], 0, KV_SESSION_BYTES);
		calls = 0;
		fail_nth = nth;
		r = life(image);
		fail_nth = 0;
		KVT_EXPECT(r == 0 || r == -ENOMEM);
		KVT_EXPECT(!audit(&core));
		kvd_core_fini(&core);
		KVT_EXPECT_EQ(nr_regions_live, 0);
		KVT_EXPECT_EQ(nr_extents_live, 0);
		free(image);
		if (calls < nth)
			break;
		refused += r != 0;
	}
	KVT_NOTE("%u allocations, %u told", nth - 1, refused);
	KVT_EXPECT(refused >= 8);
}

/* The same while it adopts: it ends, and the next one has all. */
static int adopt_failing(struct kvd_region *r, struct kvd_image *image)
{
	struct kvd_adopted ad = {0};
	struct kvd_session *s;
	int ret = 0;

	core_start(&core, &gens, image, 8);
	fail_nth += calls; /* from here on */
	for (u32 i = 0; i < 2 && !ret; i++)
		ret = kvd_adopt_domain(&core, i, secrets[i]);
	if (!ret)
		ret = kvd_adopt_tenants(&core, &ad);
	for (u32 i = 0; i < SESSIONS && !ret; i++) {
		struct kvd_adopt_session_params p = {
			.id = i + 1, .tenant = i == 2, .page = pages[i]};

		ret = kvd_adopt_session(&core, &p, &s, &ad);
	}
	if (ret)
		return ret;
	kvd_adopt_epochs(&core);
	for (u32 id = 1; id <= 2 && !ret; id++) {
		struct kvd_adopt_pool_params p = {.id = id,
						  .leases = find_leases,
						  .extent = find_extent,
						  .extent_taken = extent_taken,
						  .arg = r};

		for (u32 i = 0; i < kept.nr_regions; i++) {
			if (r[i].pool_id == id && r[i].kind == KVD_REGION_FRAMES)
				p.frames = r[i];
			if (r[i].pool_id == id && r[i].kind == KVD_REGION_TOKENS)
				p.tokens = r[i];
		}
		ret = kvd_adopt_pool(&core, &p, &ad);
	}
	return ret;
}

KVT_TEST(each_allocation_of_an_adoption_fails)
{
	struct kvd_region r[REGIONS_MAX];
	struct kvd_image *image;
	u32 nth, refused = 0;

#ifdef KV_SANITIZED
	KVT_SKIP("the sanitizer's allocator is not ours to fail");
#endif
	for (nth = 1; nth < 200; nth++) {
		int status, ret;
		bool all;
		pid_t pid;

		copies_make(r, &image);
		fflush(stdout);
		pid = fork(); /* what stopped half way is not taken apart, as in kvmd */
		if (!pid) {
			calls = 0;
			fail_nth = nth;
			ret = adopt_failing(r, image);
			all = calls < fail_nth;
			fail_nth = 0;
			_exit(ret == -ENOMEM ? 1 : ret ? 3 : all ? 2 : 0);
		}
		KVT_EXPECT_EQ(waitpid(pid, &status, 0), pid);
		if (!WIFEXITED(status) || WEXITSTATUS(status) == 3)
			KVT_FAIL("allocation %u: status %#x", nth, status);
		copies_drop(r, image);
		if (WEXITSTATUS(status) == 2)
			break;
		refused += WEXITSTATUS(status) == 1;
	}
	KVT_NOTE("%u allocations, %u told", nth - 1, refused);
	KVT_EXPECT(refused >= 8);
}

/* ---------------------------------------------------------------- tables that are full */

KVT_TEST(names_and_numbers_of_tenants_and_domains)
{
	static const u8 secret[KVD_DOMAIN_SECRET_BYTES];
	struct kvd_limits lim = {.high_bytes = 1, .max_bytes = 1, .weight = 1};
	char name[KV_NAME_BYTES + 1];
	struct kvd_domain *d;
	struct kvd_tenant *t;
	struct rig r;
	int rc;

	rig_init(&r, 2, 8);
	memset(name, 'n', sizeof(name));
	name[KV_NAME_BYTES] = 0;
	KVT_EXPECT_EQ(kvd_domain_create(&r.core, "", secret, &d), -EINVAL);
	KVT_EXPECT_EQ(kvd_domain_create(&r.core, name, secret, &d), -EINVAL);
	KVT_EXPECT_EQ(kvd_domain_create(&r.core, "red", secret, &d), -EEXIST);
	KVT_EXPECT_EQ(kvd_domain_create_at(&r.core, 0, "new", secret, &d), -EBUSY);
	KVT_EXPECT_EQ(kvd_tenant_create(&r.core, r.red, "", &lim, &t), -EINVAL);
	KVT_EXPECT_EQ(kvd_tenant_create(&r.core, r.red, name, &lim, &t), -EINVAL);
	rig_tenant(&r, r.red, "t", 0, 0);
	KVT_EXPECT_EQ(kvd_tenant_create(&r.core, r.red, "t", &lim, &t), -EEXIST);
	KVT_EXPECT_EQ(kvd_tenant_create_at(&r.core, r.red, 0, "u", &lim, &t), -EBUSY);
	KVT_EXPECT_EQ(
		kvd_tenant_create_at(&r.core, r.red, KVD_TENANTS_MAX, "u", &lim, &t),
		-ENOSPC);
	lim.weight = 0;
	KVT_EXPECT_EQ(kvd_tenant_create(&r.core, r.red, "w", &lim, &t), -EINVAL);
	lim.weight = 1;
	for (u32 i = 1; i <= KVD_DOMAIN_TENANTS_MAX; i++) {
		snprintf(name, sizeof(name), "t%u", i);
		rc = kvd_tenant_create(&r.core, r.red, name, &lim, &t);
		KVT_EXPECT_EQ(rc, i < KVD_DOMAIN_TENANTS_MAX ? 0 : -ENOSPC);
	}
	KVT_EXPECT_EQ(kvd_domain_destroy(&r.core, r.red), -EBUSY);
	for (u32 i = 2; i <= KVD_DOMAINS_MAX; i++) {
		snprintf(name, sizeof(name), "d%u", i);
		rc = kvd_domain_create(&r.core, name, secret, &d);
		KVT_EXPECT_EQ(rc, i < KVD_DOMAINS_MAX ? 0 : -ENOSPC);
	}
	KVT_EXPECT_EQ(kvd_domain_destroy(&r.core, r.core.domains[KVD_DOMAINS_MAX - 1]),
		      0);
	rig_fini(&r);
}

KVT_TEST(references_are_counted_to_their_end)
{
	struct kv_seal_ret rets[1];
	struct kv_page_ref ref;
	struct kvd_session *s;
	struct kvd_attach *a;
	struct kv_grant g;
	struct rig r;

	rig_init(&r, 2, 8);
	a = rig_client(&r, rig_tenant(&r, r.red, "t", 0, 0), &s);
	g = rig_alloc1(s, a);
	KVT_EXPECT_EQ(rig_seal(s, a, &g, 1, 3, 0, NULL, rets), 0);
	rig_run(&r);
	ref = (struct kv_page_ref){.pfn = g.pfn, .tag = a->pool->frames[g.pfn].tag};
	for (u32 i = 1; i < KVD_LEASE_REFS_MAX; i++)
		KVT_EXPECT_EQ(kvd_lease_pin(s, a, &ref, 1), 0);
	KVT_EXPECT_EQ(kvd_lease_pin(s, a, &ref, 1), -EOVERFLOW);
	KVT_EXPECT_EQ(kvd_lease_pin(s, a, &ref, 0), -EINVAL);
	KVT_EXPECT_EQ(kvd_fork(s, a, &ref, 0, KV_GFP_NOWAIT, &g, &(u32){0}), -EINVAL);
	KVT_EXPECT_EQ(kvd_fork(s, a, &ref, KV_BATCH_MAX + 1, 0, &g, &(u32){0}), -EINVAL);
	rig_audit(&r);
	rig_fini(&r);
}

/* A seal asked for again by the session that did it answers as it did. */
KVT_TEST(seal_again_answers_the_same)
{
	struct kv_seal_page sp = {0};
	struct kv_seal_ret first[1], again[1];
	u32 tokens[KV_PAGE_TOKENS];
	struct kvd_seal_op op = {.pages = &sp, .tokens = tokens, .rets = again, .nr = 1};
	struct kvd_session *s, *other;
	struct kvd_attach *a, *b;
	struct kvd_tenant *t;
	struct kv_grant g, h;
	struct rig r;
	int rc;

	rig_init(&r, 2, 8);
	t = rig_tenant(&r, r.red, "t", 0, 0);
	a = rig_client(&r, t, &s);
	b = rig_client(&r, t, &other);
	g = rig_alloc1(s, a);
	h = rig_alloc1(s, a);
	KVT_EXPECT_EQ(rig_seal(s, a, &g, 1, 3, 0, NULL, first), 0);
	rig_run(&r);
	KVT_EXPECT_EQ(rig_seal(s, a, &h, 1, 3, 0, NULL, again), 0); /* the same tokens */
	KVT_EXPECT(again[0].flags & KV_SEALED_DUP);
	for (u32 i = 0; i < 3; i++) {
		struct kv_grant *which = i == 1 ? &h : &g;

		memset(&op.arg, 0, sizeof(op.arg));
		memset(again, 0, sizeof(again));
		op.arg.flags = KV_SEAL_ROOT | (i < 2 ? KV_SEAL_AGAIN : 0);
		op.s = s;
		op.a = a;
		sp.pfn = which->pfn;
		sp.tag = a->pool->frames[which->pfn].tag;
		rig_tokens(3, 0, tokens);
		rc = kvd_seal_start(&op);
		while (!rc && (rc = kvd_seal_step(&op)) == -EAGAIN)
			rc = 0;
		KVT_EXPECT_EQ(rc, i < 2 ? 0 : KV_STALE);
		if (i < 2)
			KVT_EXPECT(!memcmp(again[0].key, first[0].key, KV_KEY_BYTES));
		if (i < 2)
			KVT_EXPECT_EQ(!!(again[0].flags & KV_SEALED_DUP), i == 1);
	}
	KVT_EXPECT(b->pool == a->pool);
	rig_audit(&r);
	rig_fini(&r);
}

KVT_TEST(each_field_of_a_layout_that_differs_is_named)
{
	static const float ones[2] = {1, 1}, twos[2] = {1, 2};
	const struct kv_layout have = {.format_version = 1,
				       .kind = KV_LAYOUT_GQA,
				       .dtype = KV_DTYPE_E4M3,
				       .scale_kind = KV_SCALE_STATIC,
				       .page_tokens = 64,
				       .nr_layers = 1,
				       .nr_kv_heads = 1,
				       .head_dim = 64,
				       .nr_scales = 2};
	struct kvd_refusal why;
	struct kv_layout want;

#define DIFFERS(field_)                                                           \
	do {                                                                      \
		want = have;                                                      \
		want.field_++;                                                    \
		KVT_EXPECT_EQ(kvd_layout_differs(&have, ones, &want, ones, &why), \
			      -EINVAL);                                           \
		KVT_EXPECT(!strcmp(why.field, #field_));                          \
	} while (0)
#define OTHER(field_)                                                                 \
	do {                                                                          \
		want = have;                                                          \
		want.field_++;                                                        \
		KVT_EXPECT_EQ(kvd_layout_differs(&have, ones, &want, ones, &why), 0); \
	} while (0)
	DIFFERS(format_version);
	DIFFERS(page_tokens);
	DIFFERS(nr_layers);
	DIFFERS(nr_kv_heads);
	DIFFERS(head_dim);
	DIFFERS(latent_dim);
	DIFFERS(rope_dim);
	DIFFERS(plane_order);
	DIFFERS(nr_scales);
	OTHER(lora_id);
	OTHER(kind);
	OTHER(dtype);
	OTHER(scale_kind);
	OTHER(model_id[0]);
	KVT_EXPECT_EQ(kvd_layout_differs(&have, ones, &have, ones, &why), 0);
	KVT_EXPECT_EQ(kvd_layout_differs(&have, ones, &have, twos, &why), -EINVAL);
	KVT_EXPECT(!strcmp(why.field, "scales"));
	want = have; /* the most static scales are less than the most layers and heads */
	want.nr_layers = KV_LAYERS_MAX;
	want.nr_kv_heads = KV_KV_HEADS_MAX;
	KVT_EXPECT_EQ(kvd_layout_check(&want, ones, false, &why), -EINVAL);
	KVT_EXPECT(!strcmp(why.field, "nr_scales"));
}

KVT_TEST(image_has_an_end)
{
	struct kvd_image *image = calloc(1, sizeof(*image));
	struct kvd_image_session from = {.id = 1, .name = "s"};

	kvd_image_format(image);
	for (u32 i = 0; i < KVD_IMAGE_SESSIONS; i++)
		KVT_EXPECT(kvd_image_session_get(image, &from));
	KVT_EXPECT(!kvd_image_session_get(image, &from));
	image->sessions[5].state = KVD_IMAGE_FREE;
	KVT_EXPECT(kvd_image_session_get(image, &from) == &image->sessions[5]);
	/* what is there already is not written again; another name is */
	kvd_image_domain_set(image, 1, "red");
	kvd_image_domain_set(image, 1, "red");
	kvd_image_domain_set(image, 1, "blue");
	KVT_EXPECT(!strcmp(image->domains[1].name, "blue"));
	kvd_image_tenant_set(image, 2, 1, "t");
	kvd_image_tenant_set(image, 2, 1, "t");
	kvd_image_tenant_set(image, 2, 0, "t");
	kvd_image_tenant_set(image, 2, 0, "u");
	KVT_EXPECT(kvd_image_tenant_ok(&image->tenants[2]) && !image->tenants[2].domain &&
		   !strcmp(image->tenants[2].name, "u"));
	free(image);
}

KVT_TEST(core_starts_only_under_an_epoch)
{
	struct rig r;
	struct kvd_core_config cfg;
	struct kvd_core one;

	rig_init(&r, 4, 8);
	cfg = r.core.cfg;
	cfg.table_epoch = 0;
	KVT_EXPECT_EQ(kvd_core_init(&one, &cfg), -EINVAL);
	cfg.table_epoch = 9;
	cfg.stall_ns = 0;
	cfg.capacity_bytes = r.limits.extent_min_bytes;
	KVT_EXPECT_EQ(kvd_core_init(&one, &cfg), 0);
	KVT_EXPECT_EQ(one.mm.limits.capacity_bytes, r.limits.extent_min_bytes);
	KVT_EXPECT(one.mm.stall_ns > 0);
	kvd_core_fini(&one);
	rig_fini(&r);
}

KVT_MAIN()
