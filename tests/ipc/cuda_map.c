/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The client library maps GPU memory: a real kvmd on the cuda backend, on a GPU or over the
 * fake driver, which counts what is open. Failures of driver calls are the fake's.
 */
#include "tests/ipc/common.h"

#include <pthread.h>

#include "base/cuda_syms.h"
#include "tests/fake/fake.h"

static struct eng_private_kvmd kvmd;
static struct kvc *c;
static struct kvc_pool *pool;
static char last_log[256];

static void keep_log(void *arg, int level, const char *line)
{
	snprintf(last_log, sizeof(last_log), "%s", line);
}

static struct kvc *connect_logged(void)
{
	struct kvc_options opt = {.size_bytes = sizeof(opt),
				  .socket_path = kvmd.socket_path,
				  .client_name = "test",
				  .log = keep_log};
	struct kvc *ret;

	KVT_EXPECT_EQ(kvc_open(&opt, &ret), 0);
	return ret;
}

static void start_kvmd(const char *const *args)
{
	setenv("KVT_BACKEND", "cuda", 1);
	ipc_start(&kvmd, args);
}

static void start(const char *const *args)
{
	start_kvmd(args);
	c = connect_logged();
	ipc_gpu_context(0);
	pool = ipc_pool(c);
}

static void stop(void)
{
	kvc_close(c);
	ipc_stop(&kvmd);
}

/* Nobody counts on a GPU. */
static struct fake_cuda_counts counts(void)
{
	struct fake_cuda_counts n = {0};

	if (ipc_on_card())
		return n;

	KVT_EXPECT_EQ(fake_counts(&n), 0);
	return n;
}

#define EXPECT_COUNT(cond)                \
	do {                              \
		if (!ipc_on_card())       \
			KVT_EXPECT(cond); \
	} while (0)

static struct kv_stat stat_now(struct kvc_pool *p)
{
	struct kv_stat s;

	KVT_EXPECT_EQ(kvc_stat(p, &s), 0);
	return s;
}

/* ------------------------------------------------------------------------- context */

KVT_TEST(pool_open_needs_a_current_context)
{
	struct kv_layout l = ipc_layout();
	u32 fds;

	start_kvmd(NULL);
	c = connect_logged();
	fds = ipc_nr_fds(getpid());
	KVT_EXPECT_EQ(kvc_pool_open(c, &l, NULL, NULL, &pool), -EINVAL);
	KVT_EXPECT_HAS(kvc_strerror(c), "context");
	EXPECT_COUNT(ipc_nr_fds(getpid()) == fds); /* the real cuInit opens devices */
	ipc_gpu_context(0);
	pool = ipc_pool(c);
	stop();
}

KVT_TEST(context_of_another_gpu_is_refused)
{
	static const char *const args[] = {
		"--gpu", "GPU-11111111-1111-1111-1111-111111111111", NULL};
	struct kv_layout l = ipc_layout();

	ipc_need_fake();
	setenv("FAKE_CUDA_DEVICES", "2", 1);
	start_kvmd(args);
	c = connect_logged();
	ipc_gpu_context(0);
	KVT_EXPECT_EQ(kvc_pool_open(c, &l, NULL, NULL, &pool), -EINVAL);
	KVT_EXPECT_HAS(kvc_strerror(c), "GPU-11111111");
	ipc_gpu_context(1);
	pool = ipc_pool(c);
	stop();
}

/* The mapping may be needed on a thread that has no context current. */
static void *alloc_in_thread(void *arg)
{
	struct kv_grant pages[64];

	return (void *)(intptr_t)kvc_alloc(pool, 64, KV_GFP_NOWAIT, pages);
}

KVT_TEST(any_thread_may_map)
{
	pthread_t thread;
	void *ret;

	start(NULL);
	KVT_EXPECT_EQ(pthread_create(&thread, NULL, alloc_in_thread, NULL), 0);
	pthread_join(thread, &ret);
	KVT_EXPECT_EQ((intptr_t)ret, 0);
	EXPECT_COUNT(counts().mapped > 0);
	stop();
	EXPECT_COUNT(counts().mapped == 0);
}

/* -------------------------------------------------------------------- cases, by name */

static void own_uuid(u8 uuid[16])
{
	struct kv_cuda_syms cu;
	kv_cu_device dev;

	KVT_EXPECT_EQ(kv_cuda_load(&cu, NULL, 0), 0);
	KVT_EXPECT_EQ(cu.device_get(&dev, 0), 0);
	KVT_EXPECT_EQ(cu.device_uuid(uuid, dev), 0);
}

/* cases O01: ucx#3192. Two threads ask at once, and one more later. */
static pthread_barrier_t both;

static void *open_at_once(void *arg)
{
	ipc_gpu_context(0);
	pthread_barrier_wait(&both);
	return ipc_pool(c);
}

static void *open_again(void *arg)
{
	return ipc_pool(c);
}

KVT_TEST(o01_second_open_of_one_handle)
{
	struct kv_layout l = ipc_layout();
	struct kvc_pool *second, *named;
	pthread_t thread, threads[2];
	struct kv_grant page;
	void *ret, *rets[2];
	u8 uuid[16];

	start_kvmd(NULL);
	c = connect_logged();
	ipc_gpu_context(0);
	pthread_barrier_init(&both, NULL, 2);
	for (int i = 0; i < 2; i++)
		KVT_EXPECT_EQ(pthread_create(&threads[i], NULL, open_at_once, NULL), 0);
	for (int i = 0; i < 2; i++)
		pthread_join(threads[i], &rets[i]);
	KVT_EXPECT(rets[0] == rets[1]);
	pool = rets[0];
	kvc_pool_close(rets[1]);
	KVT_EXPECT_EQ(kvc_alloc(pool, 1, KV_GFP_NOWAIT, &page), 0);
	EXPECT_COUNT(counts().imports == 1);
	KVT_EXPECT_EQ(pthread_create(&thread, NULL, open_again, NULL), 0);
	pthread_join(thread, &ret);
	second = ret;
	KVT_EXPECT(second == pool);
	own_uuid(uuid); /* the only GPU, by its name */
	KVT_EXPECT_EQ(kvc_pool_open(c, &l, NULL, uuid, &named), 0);
	KVT_EXPECT(named == pool);
	EXPECT_COUNT(counts().imports == 1);
	kvc_pool_close(second);
	kvc_pool_close(named);
	ipc_page_fill(pool, page.pfn, 1, 4096); /* the first goes on */
	kvc_pool_close(pool);
	EXPECT_COUNT(counts().mapped == 0);
	EXPECT_COUNT(counts().handles == 0);
	stop();
}

/* Two layouts that want the whole GPU in turn: each growth takes the other's extents. */
static struct kvc_pool *other_pool(void)
{
	struct kv_layout l = ipc_layout();
	struct kvc_pool *p;

	l.model_id[0] = 1;
	KVT_EXPECT_EQ(kvc_pool_open(c, &l, NULL, NULL, &p), 0);
	return p;
}

static u32 fill(struct kvc_pool *p, struct kv_grant *pages, u32 max)
{
	u32 nr = 0;

	for (int i = 0; i < 2000 && nr < max; i++) {
		int r = kvc_alloc(p, 8, KV_GFP_NOWAIT, pages + nr);

		if (!r)
			nr += 8;
		else if (r == KV_FULL && nr)
			break;
		else if (r != KV_PENDING && r != KV_FULL)
			KVT_FAIL("kvc_alloc: %d %s", r, kvc_strerror(c));
		kvc_dispatch(c, NULL, NULL);
		if (r)
			usleep(200);
	}
	return nr;
}

static void give_back(struct kvc_pool *p, struct kv_grant *pages, u32 nr)
{
	KVT_EXPECT_EQ(kvc_free(p, pages, nr), 0);
	KVT_EXPECT_EQ(kvc_flush(c), 0);
}

/* cases O02: ucx#4410. Imports do not pile up, and each is closed once. */
KVT_TEST(o02_importers_cache_without_end)
{
	static const char *const args[] = {"--host-bytes", "72MiB", NULL};
	static struct kv_grant pages[2048];
	int rounds = getenv("KVT_LONG") ? 10000 : ipc_on_card() ? 60 : 100;
	struct fake_cuda_counts n;
	struct kvc_pool *p[2];
	unsigned most = 0;
	u32 fds = 0;

	start(args);
	p[0] = pool;
	p[1] = other_pool();
	for (int i = 0; i < rounds; i++) {
		u32 nr = fill(p[i & 1], pages, KV_ARRAY_SIZE(pages));

		KVT_EXPECT(nr >= 64);
		for (u32 k = 0; k < nr; k++)
			ipc_page_fill(p[i & 1], pages[k].pfn, i, 1);
		give_back(p[i & 1], pages, nr);
		n = counts();
		most = KV_MAX(most, n.mapped);
		EXPECT_COUNT(n.handles == 0); /* mappings alone hold the memory */
		EXPECT_COUNT(n.mapped_bytes <= 72u << 20);
		if (i == 1)
			fds = ipc_nr_fds(kvmd.pid);
	}
	KVT_NOTE("%u imports, at most %u mapped at a time", counts().imports, most);
	EXPECT_COUNT(counts().imports >= (unsigned)rounds);
	KVT_EXPECT(ipc_nr_fds(kvmd.pid) <= fds + 1);
	stop();
	n = counts();
	EXPECT_COUNT(n.mapped == 0);
	EXPECT_COUNT(n.reserved_bytes == 0);
}

/* cases O04: ucx#10346. An extent is charged until its importer has let go. */
KVT_TEST(o04_owner_frees_before_importer_closes)
{
	static const char *const args[] = {"--host-bytes", "36MiB", NULL};
	static struct kv_grant pages[1024];
	struct kvc_pool *other;
	struct kvc_step *step;
	struct kv_grant one;
	u32 nr, mapped;

	start(args);
	other = other_pool();
	nr = fill(pool, pages, KV_ARRAY_SIZE(pages));
	mapped = counts().mapped;
	give_back(pool, pages, nr);
	expect_within(stat_now(pool).nr_quarantine == 0, 2000);
	KVT_EXPECT_EQ(kvc_step_begin(c, &step), 0); /* may still read what it read */
	kvc_step_launched(step);
	for (int i = 0; i < 50; i++) {
		KVT_EXPECT_EQ(kvc_alloc(other, 1, KV_GFP_NOWAIT, &one), KV_PENDING);
		kvc_dispatch(c, NULL, NULL);
		usleep(1000);
	}
	EXPECT_COUNT(counts().mapped == mapped);
	KVT_EXPECT(ipc_admin_number(&kvmd, "{\"op\":\"status\"}", "\"extent_bytes\":") >
		   30e6);
	kvc_step_retire(step);
	kvc_dispatch(c, NULL, NULL);
	expect_within(kvc_alloc(other, 1, KV_GFP_NOWAIT, &one) == 0, 2000);
	stop();
}

/* cases O06: ucx PR#11288. Who only asks whether it would work holds nothing back. */
KVT_TEST(o06_probe_that_pins)
{
	static const char *const args[] = {"--host-bytes", "36MiB", NULL};
	static struct kv_grant pages[1024];
	struct kvc *idle;
	u64 t0;
	u32 nr;

	start(args);
	nr = fill(pool, pages, KV_ARRAY_SIZE(pages));
	idle = connect_logged();
	kvc_pool_close(ipc_pool(idle)); /* the probe: all extents were mapped */
	give_back(pool, pages, nr);
	kvc_pool_close(pool);
	t0 = kv_now_ns();
	pool = other_pool();
	KVT_EXPECT(fill(pool, pages, 8) == 8);
	KVT_NOTE("memory was another pool's after %.1f ms",
		 (double)(kv_now_ns() - t0) * 1e-6);
	kvc_close(idle);
	stop();
}

/* cases O10: nccl#1647. Named GPU not visible here: refused before any fd comes. */
KVT_TEST(o10_device_not_visible_to_importer)
{
	static const char *const args[] = {
		"--gpu", "GPU-12121212-1212-1212-1212-121212121212", NULL};
	struct kv_layout l = ipc_layout();
	u8 uuid[16];
	u32 fds;

	ipc_need_fake();
	setenv("FAKE_CUDA_DEVICES", "4", 1);
	start_kvmd(args);
	setenv("FAKE_CUDA_VISIBLE", "3", 1);
	c = connect_logged();
	ipc_gpu_context(0);
	memset(uuid, 0x12, sizeof(uuid));
	fds = ipc_nr_fds(getpid());
	KVT_EXPECT_EQ(kvc_pool_open(c, &l, NULL, uuid, &pool), -ENODEV);
	KVT_EXPECT_HAS(kvc_strerror(c), "GPU-12121212");
	KVT_EXPECT_EQ(kvc_pool_open(c, &l, NULL, NULL, &pool), -ENODEV);
	KVT_EXPECT_HAS(kvc_strerror(c), "GPU-12121212");
	KVT_EXPECT_EQ(ipc_nr_fds(getpid()), fds);
	kvc_close(c);
	ipc_stop(&kvmd);
}

KVT_TEST(o10_ordinal_0_here_is_gpu_2_there)
{
	static const char *const args[] = {
		"--gpu", "GPU-12121212-1212-1212-1212-121212121212", NULL};
	struct kv_grant page;

	ipc_need_fake();
	setenv("FAKE_CUDA_DEVICES", "4", 1);
	start_kvmd(args);
	setenv("FAKE_CUDA_VISIBLE", "2", 1);
	c = connect_logged();
	ipc_gpu_context(0);
	pool = ipc_pool(c);
	KVT_EXPECT_EQ(kvc_alloc(pool, 1, KV_GFP_NOWAIT, &page), 0);
	ipc_page_fill(pool, page.pfn, 1, 4096);
	stop();
}

/* cases O11: pytorch#186213. Addresses: no more than the memory, whatever is imported. */
KVT_TEST(o11_address_space_eaten_by_imports)
{
	static const char *const args[] = {"--host-bytes", "1360MiB", NULL};
	struct kv_grant pages[64];
	struct kv_layout layout = ipc_layout();
	struct fake_cuda_counts n;
	u32 nr = 0;

	start(args);
	while (kvc_alloc(pool, 64, KV_GFP_NOWAIT, pages) == 0)
		nr += 64;
	n = counts();
	KVT_NOTE("%u pages, %u extents, %.1f MB mapped, %.1f MB reserved", nr, n.mapped,
		 (double)n.mapped_bytes / 1e6, (double)n.reserved_bytes / 1e6);
	EXPECT_COUNT(n.mapped >= 20);
	EXPECT_COUNT((double)n.reserved_bytes <= 1.1 * (double)n.mapped_bytes);
	EXPECT_COUNT(ipc_admin_number(&kvmd, "{\"op\":\"pool\"}", "\"va_bytes\":") ==
		     (double)n.reserved_bytes);
	/* of all that there is, 1 % may be lost to rounding */
	KVT_EXPECT(nr * (double)kv_page_stride(&layout) >= 0.99 * (1360u << 20));
	stop();
}

/* cases O15: pytorch#188008. Each driver call of a mapping fails, once and for good. */
static void half_mapped(const char *entry, int nth, bool for_good)
{
	struct fake_cuda_counts n;
	struct kv_grant pages[8];
	char text[80];
	u32 fds;

	ipc_need_fake();
	start(NULL);
	n = counts();
	fds = ipc_nr_fds(getpid());
	snprintf(text, sizeof(text), "%s:%d%s", entry, nth, for_good ? "+" : "");
	setenv("FAKE_CUDA_FAIL", text, 1);
	if (for_good) {
		KVT_EXPECT_EQ(kvc_alloc(pool, 8, KV_GFP_NOWAIT, pages), -ENOMEM);
		EXPECT_COUNT(counts().handles == 0);
		EXPECT_COUNT(counts().mapped == 0);
		EXPECT_COUNT(counts().reserved_bytes == n.reserved_bytes);
		unsetenv("FAKE_CUDA_FAIL");
		/* nothing was handed out, and the next try finds a clean slate */
		KVT_EXPECT_EQ(kvc_flush(c), 0);
		KVT_EXPECT_EQ(stat_now(pool).nr_active, 0);
	}
	KVT_EXPECT_EQ(kvc_alloc(pool, 8, KV_GFP_NOWAIT, pages), 0);
	KVT_EXPECT_HAS(last_log, "CUDA result 2");
	ipc_page_fill(pool, pages[7].pfn, 1, 4096);
	EXPECT_COUNT(counts().mapped == 1);
	EXPECT_COUNT(counts().handles == 0);
	KVT_EXPECT_EQ(ipc_nr_fds(getpid()), fds);
	stop();
	EXPECT_COUNT(counts().mapped == 0);
}

KVT_TEST(o15_half_mapped_extent_is_undone)
{
	static const struct {
		const char *entry;
		int nth; /* the test's own context and the reservation push before */
		bool for_good;
	} steps[] = {
		{"cuCtxPushCurrent_v2", 3, false},
		{"cuCtxPushCurrent_v2", 3, true},
		{"cuMemImportFromShareableHandle", 1, false},
		{"cuMemImportFromShareableHandle", 1, true},
		{"cuMemMap", 1, false},
		{"cuMemMap", 1, true},
		{"cuMemSetAccess", 1, false},
		{"cuMemSetAccess", 1, true},
		{"cuMemRelease", 1, false},
	};

	for (u32 i = 0; i < KV_ARRAY_SIZE(steps); i++) {
		pid_t pid = fork(); /* the fake counts calls per process */

		if (pid) {
			KVT_EXPECT_EQ(ipc_wait(pid), 0);
			continue;
		}
		half_mapped(steps[i].entry, steps[i].nth, steps[i].for_good);
		_exit(0);
	}
}

KVT_TEST(o15_failed_reservation_leaves_no_pool)
{
	struct kv_layout l = ipc_layout();
	u32 fds;

	ipc_need_fake();
	start_kvmd(NULL);
	c = connect_logged();
	ipc_gpu_context(0);
	fds = ipc_nr_fds(getpid());
	setenv("FAKE_CUDA_FAIL", "cuMemAddressReserve:1", 1);
	KVT_EXPECT_EQ(kvc_pool_open(c, &l, NULL, NULL, &pool), -ENOMEM);
	KVT_EXPECT_HAS(kvc_strerror(c), "GPU addresses");
	KVT_EXPECT_EQ(ipc_nr_fds(getpid()), fds);
	pool = ipc_pool(c);
	stop();
}

/* cases O16: vllm#36651. A failed unmap is tried again; later calls have their own luck. */
KVT_TEST(o16_sticky_error_and_double_release)
{
	static const char *const args[] = {"--host-bytes", "36MiB", NULL};
	static struct kv_grant pages[1024];
	struct kvc_pool *p[2];
	u64 first = 0;

	ipc_need_fake();
	start(args);
	p[0] = pool;
	p[1] = other_pool();
	setenv("FAKE_CUDA_FAIL", "cuMemUnmap:7", 1);
	for (int i = 0; i < 500; i++) {
		u32 nr = fill(p[i & 1], pages, KV_ARRAY_SIZE(pages));

		KVT_EXPECT(nr >= 64);
		if (i == 1)
			first = counts().mapped_bytes;
		if (i & 1)
			EXPECT_COUNT(counts().mapped_bytes == first);
		give_back(p[i & 1], pages, nr);
	}
	stop();
	EXPECT_COUNT(counts().mapped == 0);
	EXPECT_COUNT(counts().reserved_bytes == 0);
}

static bool status_has(const char *part)
{
	char *status = ipc_admin(&kvmd, "{\"op\":\"status\"}");
	bool has = strstr(status, part) != NULL;

	free(status);
	return has;
}

/* An unmap that keeps failing shows as such, and is over when it succeeds. */
KVT_TEST(o16_unresolved_unmap_is_a_health_code)
{
	static const char *const args[] = {"--host-bytes", "36MiB", NULL};
	static struct kv_grant pages[1024];
	struct kvc_pool *other;
	struct kv_grant one;
	u32 nr;

	ipc_need_fake();
	start(args);
	other = other_pool();
	nr = fill(pool, pages, KV_ARRAY_SIZE(pages));
	give_back(pool, pages, nr);
	expect_within(stat_now(pool).nr_quarantine == 0, 2000);
	setenv("FAKE_CUDA_FAIL", "cuMemUnmap:1+", 1);
	for (int i = 0; i < 3000 && !status_has("EXTENTS_HELD"); i++) {
		KVT_EXPECT_EQ(kvc_alloc(other, 1, KV_GFP_NOWAIT, &one), KV_PENDING);
		kvc_dispatch(c, NULL, NULL);
		usleep(1000);
	}
	KVT_EXPECT(status_has("EXTENTS_HELD"));
	EXPECT_COUNT(counts().mapped == 1);
	unsetenv("FAKE_CUDA_FAIL");
	for (int i = 0; i < 3000 && kvc_alloc(other, 1, KV_GFP_NOWAIT, &one); i++) {
		kvc_dispatch(c, NULL, NULL);
		usleep(1000);
	}
	KVT_EXPECT(!status_has("EXTENTS_HELD"));
	EXPECT_COUNT(counts().mapped == 1); /* the other pool's */
	stop();
}

/* cases O18: cudf#2469. A grant is a page of an extent, not the extent's start. */
KVT_TEST(o18_pointer_inside_a_block)
{
	struct kvc_pool_info info;
	struct kv_grant pages[32];

	start(NULL);
	kvc_pool_get_info(pool, &info);
	KVT_EXPECT_EQ(info.backend, KV_BACKEND_CUDA);
	KVT_EXPECT_EQ(kvc_alloc(pool, 32, KV_GFP_NOWAIT, pages), 0);
	for (u32 i = 0; i < 32; i++)
		ipc_page_fill(pool, pages[i].pfn, (int)pages[i].pfn + 1,
			      kv_page_bytes(&info.layout));
	for (u32 i = 0; i < 32; i++) {
		const u8 *at = kvc_page_addr(pool, pages[i].pfn);

		KVT_EXPECT_EQ(at - (u8 *)info.base,
			      kv_page_offset(&info.geometry, pages[i].pfn));
		KVT_EXPECT_EQ(ipc_page_byte(pool, pages[i].pfn, 0),
			      (u8)(pages[i].pfn + 1));
		KVT_EXPECT_EQ(ipc_page_byte(pool, pages[i].pfn,
					    kv_page_bytes(&info.layout) - 1),
			      (u8)(pages[i].pfn + 1));
	}
	KVT_EXPECT(!kvc_page_addr(pool, info.geometry.nr_pages));
	KVT_EXPECT(!kvc_page_addr(pool, ~0u));
	stop();
}

KVT_MAIN()
