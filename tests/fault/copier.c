/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The mover's copies taken alone: what it pins, and memory of its own.
 *
 * The host pool of the tiers is pinned by one process, the mover, in pieces that every
 * driver takes (vllm#51080, FlexKV#259). Over the fake driver, whose registrations end
 * below 512 GiB as real ones do; the pool's addresses have no memory behind them.
 */
#include <sys/mman.h>

#include "tests/kvt.h"
#include "base/util.h"
#include "kv/abi.h"
#include "kvmd/mover/copy.h"
#include "tests/fake/fake.h"

#define GIB (1ull << 30)

static const u8 gpu_uuid[16] = {16, 16, 16, 16, 16, 16, 16, 16,
				16, 16, 16, 16, 16, 16, 16, 16};
static char text[128];

static struct kvd_copier *open_copier(void)
{
	struct kvd_copier *c;

	KVT_EXPECT_EQ(fake_use("KV_CUDA_LIB", "libcuda.so"), 0);
	c = kvd_copier_cuda(false);
	KVT_EXPECT(c);
	if (c->ops->open(c, gpu_uuid, text))
		KVT_FAIL("%s", text);
	return c;
}

static u8 *addresses(u64 bytes)
{
	u8 *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
		     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	KVT_EXPECT(p != MAP_FAILED);
	return p;
}

static struct fake_pins pins(void)
{
	void *lib = dlopen(getenv("KV_CUDA_LIB"), RTLD_NOW | RTLD_NOLOAD);
	void (*get)(struct fake_pins *);
	struct fake_pins ret;

	KVT_EXPECT(lib);
	*(void **)&get = dlsym(lib, "fake_pins_get");
	KVT_EXPECT(get);
	get(&ret);
	dlclose(lib);
	return ret;
}

static void unpin(u8 *addr)
{
	void *lib = dlopen(getenv("KV_CUDA_LIB"), RTLD_NOW | RTLD_NOLOAD);
	int (*fn)(void *);

	KVT_EXPECT(lib);
	*(void **)&fn = dlsym(lib, "cuMemHostUnregister");
	KVT_EXPECT_EQ(fn(addr), 0);
	dlclose(lib);
}

KVT_TEST(o61_pin_limits_and_multiplied_accounting)
{
	struct kvd_copier *c = open_copier();
	u8 *pool = addresses(600 * GIB);

	if (c->ops->pool(c, pool, 600 * GIB, text))
		KVT_FAIL("%s", text);
	KVT_EXPECT_EQ(pins().bytes, 600 * GIB); /* once the tier, however many clients */
	KVT_EXPECT_EQ(pins().nr, 10);
	KVT_EXPECT_LE(pins().largest, 64 * GIB);
}

/* Any piece may fail: then none is pinned, and nothing of the error stays. */
KVT_TEST(o61_failed_piece_unpins_the_others)
{
	struct kvd_copier *c = open_copier();
	u8 *pool = addresses(600 * GIB);
	char fail[64];
	u32 calls = 0;

	for (u32 k = 1; k <= 10; k++) {
		/* the fake counts from the process's first call on */
		calls += k;
		snprintf(fail, sizeof(fail), "cuMemHostRegister_v2:%u", calls);
		setenv("FAKE_CUDA_FAIL", fail, 1);
		KVT_EXPECT_EQ(c->ops->pool(c, pool, 600 * GIB, text), -ENOMEM);
		KVT_EXPECT_HAS(text, "cuMemHostRegister");
		KVT_EXPECT_EQ(pins().nr, 0);
		KVT_EXPECT_EQ(pins().bytes, 0);
		KVT_EXPECT_EQ(pins().out_of_order, 0);
		KVT_EXPECT_EQ(c->ops->pool(c, pool, 600 * GIB, text), 0);
		KVT_EXPECT_EQ(pins().bytes, 600 * GIB);
		calls += 10;
		for (u32 piece = 10; piece--;)
			unpin(pool + piece * 64 * GIB);
	}
}

/* Copies go over the border of two pieces. */
KVT_TEST(o61_copies_cross_the_pieces)
{
	static u8 page[65536], back[65536];
	struct kvd_copier *c = open_copier();
	u8 *pool = addresses(130 * GIB);

	KVT_EXPECT_EQ(c->ops->pool(c, pool, 130 * GIB, text), 0);
	for (u32 i = 0; i < sizeof(page); i++)
		page[i] = (u8)(i * 31 + i / 256);
	KVT_EXPECT_EQ(c->ops->copy(c, 0, (uintptr_t)page, pool + 64 * GIB - 4096,
				   sizeof(page), false),
		      0);
	KVT_EXPECT_EQ(c->ops->issue(c, 0), 0);
	KVT_EXPECT_EQ(c->ops->mark(c, 0, 0), 0);
	while (!c->ops->query(c, 0, 0))
		;
	KVT_EXPECT(!memcmp(pool + 64 * GIB - 4096, page, sizeof(page)));
	KVT_EXPECT_EQ(c->ops->copy(c, 1, (uintptr_t)back, pool + 64 * GIB - 4096,
				   sizeof(back), true),
		      0);
	KVT_EXPECT_EQ(c->ops->issue(c, 1), 0);
	KVT_EXPECT_EQ(c->ops->mark(c, 1, 0), 0);
	while (!c->ops->query(c, 1, 0))
		;
	KVT_EXPECT(!memcmp(back, page, sizeof(page)));
}

/* One of a mebibyte or more waits for others, more than a batch holds go as two, and a
 * copy that crosses two pieces is two of them. */
KVT_TEST(long_copies_go_as_a_batch)
{
	struct kvd_copier *c = open_copier();
	u8 *pool = addresses(65 * GIB), *to = addresses(256u << 20);
	u8 *from = pool + 64 * GIB - (40u << 20);
	const u32 nr = 70, mib = 1u << 20;

	setenv("FAKE_CUDA_FAIL", "cuMemcpyHtoDAsync_v2:1+", 1);
	KVT_EXPECT_EQ(c->ops->pool(c, pool, 65 * GIB, text), 0);
	for (u32 i = 0; i < nr; i++)
		memset(from + (u64)i * mib, (int)i + 1, mib);
	for (u32 i = 0; i < nr; i++)
		KVT_EXPECT_EQ(c->ops->copy(c, 2, (uintptr_t)to + (u64)i * mib,
					   from + (u64)i * mib, mib, true),
			      0);
	KVT_EXPECT_EQ(to[0], 1);
	KVT_EXPECT_EQ(to[(u64)(nr - 1) * mib], 0);
	KVT_EXPECT_EQ(c->ops->issue(c, 2), 0);
	KVT_EXPECT(!memcmp(to, from, (u64)nr * mib));
	KVT_EXPECT_EQ(c->ops->issue(c, 2), 0);
	/* Both ways on one stream. */
	memset(to, 0x77, 8 * mib);
	KVT_EXPECT_EQ(c->ops->copy(c, 2, (uintptr_t)to + 8 * mib, from + 39ull * mib,
				   2 * mib, true),
		      0);
	KVT_EXPECT_EQ(c->ops->copy(c, 2, (uintptr_t)to, pool, 8 * mib, false), 0);
	KVT_EXPECT_EQ(to[8 * mib], 40);
	KVT_EXPECT_EQ(to[9 * mib], 41);
	KVT_EXPECT_EQ(c->ops->issue(c, 2), 0);
	KVT_EXPECT(!memcmp(to, pool, 8 * mib));
}

/* Short ones go by themselves, at once. */
KVT_TEST(short_copies_are_not_gathered)
{
	struct kvd_copier *c = open_copier();
	u8 *pool = addresses(GIB), to[4096] = {0};

	setenv("FAKE_CUDA_FAIL", "cuMemcpyBatchAsync_v2:1+", 1);
	KVT_EXPECT_EQ(c->ops->pool(c, pool, GIB, text), 0);
	memset(pool, 0x5a, sizeof(to));
	KVT_EXPECT_EQ(c->ops->copy(c, 0, (uintptr_t)to, pool, sizeof(to), true), 0);
	KVT_EXPECT(!memcmp(to, pool, sizeof(to)));
	KVT_EXPECT_EQ(c->ops->issue(c, 0), 0);
}

/*
 * ucx#11226 (O07): the process that exports a legacy handle never opens it. The mover finds
 * its own memory by the id that kvmd gave it; an id that is not its own is an error.
 */
KVT_TEST(o07_open_in_the_exporting_process)
{
	struct kv_legacy_extent e = {
		.magic = KV_LEGACY_MAGIC, .id = 41, .size_bytes = 4u << 20};
	int fd = memfd_create("extent", MFD_CLOEXEC);
	u8 in[4096], out[4096] = {0};
	struct kvd_copier *c;
	u64 at = 0, again = 0;

	setenv("FAKE_CUDA_FAIL", "cuIpcOpenMemHandle_v2:1+", 1);
	KVT_EXPECT_EQ(fake_use("KV_CUDA_LIB", "libcuda.so"), 0);
	c = kvd_copier_cuda(true);
	KVT_EXPECT(c && fd >= 0);
	KVT_EXPECT_EQ(c->ops->open(c, gpu_uuid, text), 0);
	KVT_EXPECT_EQ(c->ops->alloc(c, 41, e.size_bytes, e.handle, text), 0);
	KVT_EXPECT_EQ(pwrite(fd, &e, sizeof(e), 0), sizeof(e));
	KVT_EXPECT_EQ(c->ops->map(c, fd, e.size_bytes, &at), 0);
	KVT_EXPECT_EQ(c->ops->map(c, fd, e.size_bytes, &again), 0);
	KVT_EXPECT(at && again == at);
	memset(in, 0x5a, sizeof(in));
	memcpy((void *)(uintptr_t)at, in,
	       sizeof(in)); /* the fake's memory is the host's */
	memcpy(out, (void *)(uintptr_t)again, sizeof(out));
	KVT_EXPECT(!memcmp(in, out, sizeof(in)));
	KVT_EXPECT_EQ(c->ops->unmap(c, at, e.size_bytes), 0);
	e.id = 42;
	KVT_EXPECT_EQ(pwrite(fd, &e, sizeof(e), 0), sizeof(e));
	KVT_EXPECT_EQ(c->ops->map(c, fd, e.size_bytes, &at), -ENOENT);
	KVT_EXPECT_EQ(c->ops->free(c, 41), 0);
	close(fd);
}

KVT_MAIN()
