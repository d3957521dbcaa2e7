/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Extents with nobody left but the keeper: the engine that wrote them is gone, then kvmd is killed;
 * what comes after reads every byte (facts F-keep, design 9). On the GPU, or over the fake driver.
 */
#include "tests/ipc/restart.h"

#define NR_PAGES 40u
#define ALONE_US 300000

static void tokens_make(u32 *tokens)
{
	for (u32 i = 0; i < NR_PAGES * KV_PAGE_TOKENS; i++)
		tokens[i] = 9000 + i;
}

static u8 pattern(u32 page, u64 at)
{
	return (u8)(page * 7 + at / 512 + at % 251);
}

/* Writes pages and seals them, says so, waits to be killed. */
static int writer(void *arg)
{
	static u32 tokens[NR_PAGES * KV_PAGE_TOKENS], crc[NR_PAGES];
	struct kv_layout layout = ipc_layout();
	u64 bytes = kv_page_bytes(&layout);
	struct kv_seal_ret rets[NR_PAGES];
	struct kv_grant pages[NR_PAGES];
	struct kvc_seal seal = {.size_bytes = sizeof(seal),
				.nr_pages = NR_PAGES,
				.pages = pages,
				.crc32c = crc,
				.tokens = tokens,
				.ret_seals = rets};
	struct kvc *c = ipc_connect(&kvmd);
	struct kvc_pool *pool = ipc_pool(c);
	struct kvc_step *step;
	u8 *buf = malloc(bytes);

	/* KV_PENDING while the driver starts in kvmd */
	expect_within(!kvc_alloc(pool, NR_PAGES, KV_GFP_NOWAIT, pages), 10000);
	KVT_EXPECT_EQ(kvc_step_begin(c, &step), 0);
	kvc_step_launched(step);
	for (u32 i = 0; i < NR_PAGES; i++) {
		for (u64 k = 0; k < bytes; k++)
			buf[k] = pattern(i, k);
		ipc_page_put(pool, pages[i].pfn, 0, buf, bytes);
	}
	kvc_step_retire(step);
	tokens_make(tokens);
	KVT_EXPECT_EQ(kvc_seal(pool, &seal), 0);
	KVT_EXPECT_EQ(write((int)(intptr_t)arg, "x", 1), 1);
	for (;;)
		pause();
}

/* Finds them by their tokens; every byte is the one that was written. */
static int reader(void *arg)
{
	static u32 tokens[NR_PAGES * KV_PAGE_TOKENS];
	struct kv_layout layout = ipc_layout();
	u64 bytes = kv_page_bytes(&layout);
	struct kv_hit hits[NR_PAGES];
	struct kvc_step *step;
	struct kvc_pool *pool;
	u8 *buf = malloc(bytes);
	struct kvc *c;
	u32 nr = 0;
	char byte;

	KVT_EXPECT_EQ(read((int)(intptr_t)arg, &byte, 1), 1);
	c = ipc_connect(&kvmd);
	pool = ipc_pool(c);
	tokens_make(tokens);
	for (u32 ms = 0; ms < 5000 && nr < NR_PAGES; ms++) {
		kvc_lookup(pool, tokens, NR_PAGES * KV_PAGE_TOKENS, NR_PAGES, hits, &nr);
		usleep(1000);
	}
	KVT_EXPECT_EQ(nr, NR_PAGES);
	KVT_EXPECT_EQ(kvc_step_begin(c, &step), 0);
	kvc_step_launched(step);
	for (u32 i = 0; i < NR_PAGES; i++) {
		ipc_page_get(pool, hits[i].grant.pfn, 0, buf, bytes);
		for (u64 k = 0; k < bytes; k++)
			if (buf[k] != pattern(i, k))
				KVT_FAIL("page %u, byte %llu is %02x, not %02x", i,
					 (unsigned long long)k, buf[k], pattern(i, k));
	}
	kvc_step_retire(step);
	kvc_close(c);
	return 0;
}

/* struct left - what is there when the keeper has the pages alone: who will read them, and what tells it to */
struct left {
	pid_t reader;
	int go;
};

/* Pages are written and sealed; then neither their engine nor kvmd is there any more. */
static struct left pages_left(void)
{
	struct left left;
	int done[2], go[2];
	pid_t w;
	char byte;

	KVT_EXPECT_EQ(pipe(done), 0);
	KVT_EXPECT_EQ(pipe(go), 0);
	start();
	w = ipc_child(writer, (void *)(intptr_t)done[1]);
	left.reader = ipc_child(reader, (void *)(intptr_t)go[0]);
	left.go = go[1];
	KVT_EXPECT_EQ(read(done[0], &byte, 1), 1);
	kill(w, SIGKILL);
	ipc_wait(w);
	kill_kvmd();
	return left;
}

/* kvmd is there again: another engine finds every byte. */
static void expect_pages(const struct left *left)
{
	KVT_EXPECT_EQ(write(left->go, "x", 1), 1);
	KVT_EXPECT_EQ(ipc_wait(left->reader), 0);
}

KVT_TEST_T(extents_survive_with_the_keeper_alone, 60)
{
	struct left left;
	pid_t keeper;

	setenv("KVT_BACKEND", "cuda", 1);
	left = pages_left();
	KVT_NOTE("on %s", ipc_on_card() ? "the card" : "the fake driver");
	keeper = ipc_keeper_pid();
	KVT_EXPECT(keeper > 0);
	usleep(ALONE_US); /* nobody has the memory mapped, and no context is there */
	KVT_EXPECT_EQ(ipc_keeper_pid(), keeper);
	again();
	expect_pages(&left);
	ipc_stop(&kvmd);
}

/*
 * Without --gpu-bytes the size of the GPU is known when its driver has started, which is long
 * after extents have been taken over.
 */
KVT_TEST_T(extents_are_adopted_before_the_size_is_known, 60)
{
	static const char *const unsized[] = {"--keeper", "--backend", "cuda",
					      "--test-extents", NULL};
	struct left left;

	setenv("KVT_BACKEND", "cuda", 1);
	ipc_need_fake();
	left = pages_left();
	setenv("FAKE_CUDA_INIT_MS", "500", 1);
	if (!ipc_start_again(&kvmd, unsized)) {
		ipc_show_log(&kvmd);
		KVT_FAIL("kvmd does not start again");
	}
	unsetenv("FAKE_CUDA_INIT_MS");
	expect_pages(&left);
	ipc_stop(&kvmd);
}

/* --------------------------------------------------- the keeper has one memory, the start another */

static const char *const automatic[] = {"--keeper", "--backend", "auto", "--test-extents",
					NULL};
static const char *const named_cuda[] = {"--keeper", "--backend", "cuda",
					 "--test-extents", NULL};
static const char *const named_legacy[] = {"--keeper", "--backend", "cuda-legacy",
					   "--test-extents", NULL};
static const char *const named_host[] = {"--keeper",	 "--backend", "host",
					 "--host-bytes", "256MiB",    NULL};
static const char *const sized_host[] = {"--keeper",	 "--backend", "auto",
					 "--host-bytes", "256MiB",    NULL};

static void expect_refused(const char *const *args, const char *why)
{
	pid_t keeper = ipc_keeper_pid();
	int status;

	unlink(kvmd.log_path);
	KVT_EXPECT(keeper > 0);
	if (ipc_start_again(&kvmd, args))
		KVT_FAIL("kvmd starts although \"%s\"", why);
	KVT_EXPECT_EQ(waitpid(kvmd.pid, &status, 0), kvmd.pid);
	KVT_EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 1);
	if (!log_has(why)) {
		ipc_show_log(&kvmd);
		KVT_FAIL("it does not say \"%s\"", why);
	}
	KVT_EXPECT_EQ(ipc_keeper_pid(), keeper);
}

static void expect_start(const char *const *args, const char *backend)
{
	char *status, want[64];

	if (!ipc_start_again(&kvmd, args)) {
		ipc_show_log(&kvmd);
		KVT_FAIL("kvmd does not start again");
	}
	snprintf(want, sizeof(want), "\"backend\":\"%s\"", backend);
	status = ipc_admin(&kvmd, "{\"op\":\"status\"}");
	KVT_EXPECT_HAS(status, want);
	free(status);
}

/* The driver does not work any more when kvmd comes again: what is on the GPU waits for it. */
KVT_TEST_T(extents_wait_for_a_driver_that_works, 60)
{
	static const struct {
		const char *name, *value, *why;
	} broken[] = {
		{"KV_CUDA_LIB", "/nonexistent/libcuda.so.1", "libcuda"},
		{"FAKE_CUDA_INIT", "803", "versions differ"},
		{"FAKE_CUDA_INIT", "999", "cuInit"},
		{"FAKE_CUDA_DEVICES", "0", "no device"},
		{"FAKE_CUDA_LACKS", "103", "export of memory"}, /* KV_CU_ATTR_POSIX_FD */
	};
	struct left left;
	char *lib;

	setenv("KVT_BACKEND", "cuda", 1);
	ipc_need_fake();
	left = pages_left();
	lib = strdup(getenv("KV_CUDA_LIB"));
	for (u32 i = 0; i < KV_ARRAY_SIZE(broken); i++) {
		setenv(broken[i].name, broken[i].value, 1);
		expect_refused(automatic, broken[i].why);
		KVT_EXPECT(log_has("pages of the GPU") && log_has("kvmd-keeper"));
		unsetenv(broken[i].name);
		setenv("KV_CUDA_LIB", lib, 1);
	}
	setenv("KV_CUDA_LIB", "/nonexistent/libcuda.so.1", 1);
	expect_refused(named_cuda, "libcuda");
	setenv("KV_CUDA_LIB", lib, 1);
	expect_refused(named_host, "pages of the GPU");
	expect_refused(sized_host, "pages of the GPU");
	expect_refused(named_legacy, "pages of the GPU");
	expect_start(automatic, "cuda");
	expect_pages(&left);
	free(lib);
	ipc_stop(&kvmd);
}

/* Nothing is on the GPU: nothing is lost. */
KVT_TEST(without_extents_auto_is_free)
{
	setenv("KVT_BACKEND", "cuda", 1);
	ipc_need_fake();
	start();
	kill_kvmd();
	setenv("FAKE_CUDA_INIT", "999", 1);
	expect_start(automatic, "host");
	kill_kvmd();
	unsetenv("FAKE_CUDA_INIT");
	expect_start(automatic, "cuda");
	ipc_stop(&kvmd);
}

/* Legacy memory has no use for a keeper: one that holds no pages is ended. */
static void legacy_ends_the_keeper(const char *const *args)
{
	setenv("KVT_BACKEND", "cuda", 1);
	ipc_need_fake();
	start();
	KVT_EXPECT(ipc_keeper_pid() > 0);
	kill_kvmd();
	if (args == automatic)
		setenv("FAKE_CUDA_LACKS", "103", 1); /* KV_CU_ATTR_POSIX_FD */
	expect_start(args, "cuda-legacy");
	expect_within(ipc_keeper_pid() <= 0, 2000);
	ipc_stop(&kvmd);
}

KVT_TEST(legacy_by_name_ends_the_keeper)
{
	legacy_ends_the_keeper(named_legacy);
}

KVT_TEST(legacy_by_need_ends_the_keeper)
{
	legacy_ends_the_keeper(automatic);
}

/* The other way round: a driver is there now, and the pages are in host memory. */
KVT_TEST(auto_stays_with_host_memory_that_has_pages)
{
	struct kv_grant pages[8];
	struct kvc_pool *pool;
	char error[512];
	struct kvc *c;

	ipc_need_fake();
	ipc_use_fake_cuda();
	setenv("FAKE_CUDA_DEVICES", "0", 1);
	if (eng_private_kvmd_start(automatic, &kvmd, error, sizeof(error)))
		KVT_FAIL("%s", error);
	c = ipc_connect(&kvmd);
	pool = ipc_pool(c);
	KVT_EXPECT_EQ(kvc_alloc(pool, 8, KV_GFP_NOWAIT, pages), 0);
	fill(pool, pages[3].pfn, 3);
	kill_kvmd();
	unsetenv("FAKE_CUDA_DEVICES");
	expect_refused(named_cuda, "pages in host memory");
	expect_refused(named_legacy, "pages in host memory");
	expect_start(automatic, "host");
	KVT_EXPECT_EQ(stat_of(pool).nr_active, 8);
	KVT_EXPECT(ipc_passes(c, pool, pages[3]) && filled(pool, pages[3].pfn, 3));
	kvc_close(c);
	ipc_stop(&kvmd);
}

KVT_MAIN()
