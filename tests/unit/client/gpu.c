/* SPDX-License-Identifier: Apache-2.0 */
/*
 * GPU extents against a scripted kvmd and the fake driver: what a right daemon never
 * sends. What a right one sends is in tests/ipc/cuda_map.c.
 */
#include "tests/unit/client/common.h"

#include <dirent.h>

#include "base/cuda_syms.h"
#include "tests/fake/fake.h"

static struct fake fake;
static struct kvc *c;
static struct kvc_pool *pool;

static void start(void)
{
	struct kv_cuda_syms cu;
	kv_cu_ctx ctx;

	KVT_EXPECT_EQ(fake_use("KV_CUDA_LIB", "libcuda.so"), 0);
	KVT_EXPECT_EQ(kv_cuda_load(&cu, NULL, 0), 0);
	KVT_EXPECT_EQ(cu.init(0), 0);
	KVT_EXPECT_EQ(cu.ctx_retain(&ctx, 0), 0);
	KVT_EXPECT_EQ(cu.ctx_push(ctx), 0);
	fake.backend = KV_BACKEND_CUDA;
	fake_start(&fake);
	c = fake_connect(&fake, 1000);
	pool = fake_pool(&fake, c);
}

static void stop(void)
{
	kvc_close(c);
	fake_stop(&fake);
}

static struct fake_cuda_counts counts(void)
{
	struct fake_cuda_counts n;

	KVT_EXPECT_EQ(fake_counts(&n), 0);
	return n;
}

static int nr_fds(void)
{
	DIR *d = opendir("/proc/self/fd");
	int n = 0;

	while (readdir(d))
		n++;
	closedir(d);
	return n;
}

/* What was sent is handled within a second. */
static void dispatch_until_mapped(unsigned nr)
{
	for (int i = 0; i < 1000 && counts().mapped != nr; i++) {
		kvc_dispatch(c, NULL, NULL);
		usleep(1000);
	}
	KVT_EXPECT_EQ(counts().mapped, nr);
}

/* cases O12: pytorch#198305. Two descriptors of one memory: mapped once, the second is
 * closed. */
KVT_TEST(o12_one_memory_two_handles)
{
	int fds;

	start();
	fake_extent_add(&fake, 0);
	dispatch_until_mapped(1);
	fds = nr_fds();
	fake.next_serial--; /* the same (index, serial) again */
	fake_extent_add(&fake, 0);
	fake_extent_add(&fake, 1);
	dispatch_until_mapped(2);
	KVT_EXPECT_EQ(counts().imports, 2);
	KVT_EXPECT_EQ(counts().handles, 0);
	KVT_EXPECT_EQ(nr_fds(), fds);
	stop();
	KVT_EXPECT_EQ(counts().mapped, 0);
}

/* cases O03: ucx PR#2738. The same addresses with other memory: never mapped over what is
 * there; only after EXTENT_REMOVED and UNMAPPED. */
KVT_TEST(o03_same_address_new_memory)
{
	struct kv_grant page;
	u8 *bytes;

	start();
	KVT_EXPECT_EQ(kvc_alloc(pool, 1, KV_GFP_NOWAIT, &page), 0);
	bytes = kvc_page_addr(pool, page.pfn);
	memset(bytes, 0x11, 4096);
	fake_extent_add(&fake, page.pfn >> FAKE_SHIFT); /* a new serial, not removed */
	/* refused by its serial: the connection ends instead */
	expect_within(kvc_dispatch(c, NULL, NULL) == -ECONNRESET, 1000);
	KVT_EXPECT_EQ(counts().imports, 1);
	KVT_EXPECT_EQ(bytes[0], 0x11);
	stop();
}

KVT_TEST(o03_index_is_mapped_anew_after_unmapped)
{
	struct kv_grant page;
	u8 *bytes;

	start();
	KVT_EXPECT_EQ(kvc_alloc(pool, 1, KV_GFP_NOWAIT, &page), 0);
	bytes = kvc_page_addr(pool, page.pfn);
	memset(bytes, 0x11, 4096);
	fake_extent_remove(&fake, page.pfn >> FAKE_SHIFT);
	dispatch_until_mapped(0);
	KVT_EXPECT(!kvc_page_addr(pool, page.pfn));
	expect_within(fake.unmapped == 1, 1000);
	fake_extent_add(&fake, page.pfn >> FAKE_SHIFT);
	dispatch_until_mapped(1);
	KVT_EXPECT(kvc_page_addr(pool, page.pfn) == bytes);
	KVT_EXPECT_EQ(bytes[0], 0);
	stop();
}

KVT_MAIN()
