/* SPDX-License-Identifier: Apache-2.0 */
/*
 * No request makes kvmd allocate memory: the real program, with an allocator that aborts
 * (tests/fake/noalloc.c), serves every operation of an engine, from the first extent to a
 * full pool that reclaims, without tiers and with them.
 */
#include "tests/ipc/tier.h"

#include <sys/mman.h>

#define RUN 8u

static u32 *forbidden;
static char word_path[128];

static void word_make(void)
{
	int fd;

	snprintf(word_path, sizeof(word_path), "/tmp/kvt-noalloc-%d", getpid());
	fd = open(word_path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	KVT_EXPECT(fd >= 0);
	KVT_EXPECT_EQ(ftruncate(fd, sizeof(*forbidden)), 0);
	forbidden =
		mmap(NULL, sizeof(*forbidden), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	KVT_EXPECT(forbidden != MAP_FAILED);
	close(fd);
}

/* For the kvmd that starts in between. */
static void preload(bool on)
{
	char lib[1024];

	ipc_build_path("tests/fake/libnoalloc.so", lib, sizeof(lib));
	if (on) {
		word_make();
		setenv("KV_NOALLOC", word_path, 1);
		setenv("LD_PRELOAD", lib, 1);
		return;
	}
	unsetenv("LD_PRELOAD");
	unsetenv("KV_NOALLOC");
	unlink(word_path); /* it is mapped */
}

static void forbid(bool on)
{
	__atomic_store_n(forbidden, on ? (u32)kvmd.pid : 0, __ATOMIC_RELEASE);
}

static void need_our_allocator(void)
{
#ifdef KV_SANITIZED
	KVT_SKIP("the sanitizer has an allocator of its own");
#endif
	if (ipc_on_cuda())
		KVT_SKIP("a driver allocates as it likes");
}

/* A sequence of its own: looked up, computed, sealed, pinned, let go. */
static void sequence(u32 seq)
{
	static u32 tokens[RUN * KV_PAGE_TOKENS];
	struct kv_seal_ret rets[RUN];
	struct kv_grant pages[RUN], copy, found[RUN];
	struct kv_hit hits[RUN];
	static const u32 crc32c[RUN];
	struct kvc_seal seal = {.size_bytes = sizeof(seal),
				.nr_pages = RUN,
				.pages = pages,
				.crc32c = crc32c,
				.tokens = tokens,
				.ret_seals = rets};
	u32 nr = 0;
	int r;

	for (u32 i = 0; i < RUN * KV_PAGE_TOKENS; i++)
		tokens[i] = seq * 7919u + i;
	r = kvc_lookup(pool, tokens, RUN * KV_PAGE_TOKENS, 0, hits, &nr);
	KVT_EXPECT(r == 0 || r == KV_MISS);
	for (u32 i = 0; i < nr; i++)
		found[i] = hits[i].grant;
	if (nr)
		KVT_EXPECT_EQ(kvc_free(pool, found, nr), 0);
	r = kvc_alloc(pool, RUN, KV_GFP_PREFILL, pages);
	KVT_EXPECT_EQ(r, 0);
	r = kvc_fork(pool, pages, 1, KV_GFP_NOWAIT, &copy);
	KVT_EXPECT(r == 0 || r == KV_PENDING || r == KV_FULL);
	if (!r)
		KVT_EXPECT_EQ(kvc_free(pool, &copy, 1), 0);
	KVT_EXPECT_EQ(kvc_seal(pool, &seal), 0);
	KVT_EXPECT_EQ(kvc_pin(pool, pages, 2), 0);
	KVT_EXPECT_EQ(kvc_free(pool, pages, 2), 0);
	KVT_EXPECT_EQ(kvc_free(pool, pages, RUN), 0);
}

KVT_TEST(no_request_allocates)
{
	static const char *const args[] = {"--host-bytes", "67108864", NULL};
	struct kv_stat stat;

	need_our_allocator();
	preload(true);
	ipc_start(&kvmd, args);
	preload(false);
	attach();
	sequence(0);
	forbid(true);
	for (u32 i = 1; i < 400; i++) {
		struct kv_grant one;

		sequence(i % 300);
		KVT_EXPECT(kvc_alloc(pool, 1, KV_GFP_PREFILL, &one) == 0);
		KVT_EXPECT_EQ(kvc_free(pool, &one, 1), 0);
		KVT_EXPECT_EQ(kvc_stat(pool, &stat), 0);
	}
	printf("# %u pages cached of %u\n", stat.nr_cached, stat.nr_pages);
	KVT_EXPECT(stat.nr_cached > RUN);
	/* over a tick: sweeps and averages allocate nothing either */
	usleep(1200000);
	KVT_EXPECT_EQ(kvc_stat(pool, &stat), 0);
	forbid(false);
	kvc_close(c);
	ipc_stop(&kvmd);
}

/* Nor do evictions to DRAM and NVMe, restores, and what waits for them. */
KVT_TEST(no_request_allocates_beside_tiers)
{
	double spills, reads;
	u32 found = 0;

	need_our_allocator();
	preload(true);
	begin(BOTH);
	preload(false);
	make_many(60); /* the mover and the threads are there now */
	expect_within(counter("writes") > 100, 5000);
	fetch_all(60);
	spills = counter("spills");
	reads = counter("reads");
	forbid(true);
	for (u32 i = 61; i < 160; i++) {
		make(i);
		found += fetch(i - 30);
	}
	usleep(1200000);
	found += fetch(150);
	forbid(false);
	printf("# %u pages found, %.0f spilled, %.0f read\n", found,
	       counter("spills") - spills, counter("reads") - reads);
	KVT_EXPECT(found >= 100);
	KVT_EXPECT(counter("spills") - spills >= 100);
	KVT_EXPECT(counter("reads") - reads >= 100);
	finish();
}

KVT_MAIN()
