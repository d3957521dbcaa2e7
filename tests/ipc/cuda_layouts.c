/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An engine that attaches with another idea of the bytes is refused before it can read one
 * (kvcached#424, R12): on a GPU, or over the fake driver.
 */
#include "tests/ipc/common.h"

static struct eng_private_kvmd kvmd;

static void refused(struct kvc *c, const struct kv_layout *l, const float *scales,
		    const char *field)
{
	struct kvc_pool *pool;
	u32 fds = ipc_nr_fds(getpid());

	KVT_EXPECT_EQ(kvc_pool_open(c, l, scales, NULL, &pool), -EINVAL);
	KVT_EXPECT_HAS(kvc_strerror(c), field);
	KVT_NOTE("%s", kvc_strerror(c));
	KVT_EXPECT_EQ(ipc_nr_fds(getpid()), fds); /* no table, no extent came */
}

KVT_TEST(r12_engine_with_other_bytes_is_refused)
{
	struct kv_layout have = ipc_layout(), l;
	struct kvc *owner, *other;
	struct kv_grant pages[8];
	struct kvc_pool *pool;
	float scales[64];

	setenv("KVT_BACKEND", "cuda", 1);
	ipc_start(&kvmd, NULL);
	owner = ipc_connect(&kvmd);
	other = ipc_connect(&kvmd);
	have.scale_kind = KV_SCALE_STATIC;
	have.nr_scales = have.nr_layers * have.nr_kv_heads * 2;
	for (u32 i = 0; i < 64; i++)
		scales[i] = 0.5f;
	KVT_EXPECT_EQ(kvc_pool_open(owner, &have, scales, NULL, &pool), 0);
	KVT_EXPECT_EQ(kvc_alloc(pool, 8, KV_GFP_NOWAIT, pages), 0);
	scales[3] = 0.25f; /* FP8 with another scale is another number */
	refused(other, &have, scales, "scales");
	scales[3] = 0.5f;
	l = have;
	l.page_tokens = 32;
	refused(other, &l, scales, "page_tokens");
	l = have;
	l.nr_layers = 3;
	l.nr_scales = l.nr_layers * l.nr_kv_heads * 2;
	refused(other, &l, scales, "nr_layers");
	l = have;
	l.plane_order = 1;
	refused(other, &l, scales, "plane_order");
	l = have;
	l.dtype = 9;
	refused(other, &l, scales, "dtype");
	/* the owner saw nothing of it, and the right layout is the same pool */
	KVT_EXPECT_EQ(kvc_free(pool, pages, 8), 0);
	KVT_EXPECT_EQ(kvc_pool_open(other, &have, scales, NULL, &pool), 0);
	kvc_close(other);
	kvc_close(owner);
	ipc_stop(&kvmd);
}

KVT_MAIN()
