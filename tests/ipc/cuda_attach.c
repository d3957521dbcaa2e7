/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two engines share pages on a GPU, or over the fake driver (KVT_DRIVER). Bytes are reached
 * by the driver's copies only, engines are forked before anybody calls cuInit.
 */
#include "tests/ipc/common.h"

#include "base/cuda_syms.h"
#include "tests/fake/fake.h"

#define NR_PAGES 4u

static struct eng_private_kvmd kvmd;
static struct kv_cuda_syms cu;

static void start(void)
{
	static const char *const args[] = {"--backend", "cuda", "--gpu-bytes", "256MiB",
					   NULL};
	char error[512];

	ipc_use_driver();
	KVT_NOTE("on %s", ipc_on_card() ? "the card" : "the fake driver");
	if (eng_private_kvmd_start(args, &kvmd, error, sizeof(error)))
		KVT_FAIL("%s", error);
}

/* What an engine does first. Return: its connection and pool. */
static struct kvc *attach(struct kvc_pool **ret_pool)
{
	u64 t0 = kv_now_ns(), t1, t2;
	struct kvc *c;

	KVT_EXPECT_EQ(kv_cuda_load(&cu, NULL, 0), 0);
	ipc_gpu_context(0);
	t1 = kv_now_ns();
	c = ipc_connect(&kvmd);
	*ret_pool = ipc_pool(c);
	t2 = kv_now_ns();
	KVT_NOTE("cuInit and context %.1f ms, connect and pool %.1f ms",
		 (double)(t1 - t0) / 1e6, (double)(t2 - t1) / 1e6);
	return c;
}

static kv_cu_ptr device_addr(struct kvc_pool *pool, u32 pfn)
{
	return (kv_cu_ptr)(uintptr_t)kvc_page_addr(pool, pfn);
}

static void tokens_make(u32 *tokens)
{
	for (u32 i = 0; i < NR_PAGES * KV_PAGE_TOKENS; i++)
		tokens[i] = 7000 + i;
}

/* Writes pages and seals them, then waits to be killed. */
static int writer(void *arg)
{
	u32 tokens[NR_PAGES * KV_PAGE_TOKENS], crc[NR_PAGES] = {0};
	struct kv_layout layout = ipc_layout();
	u64 bytes = kv_page_bytes(&layout), t0;
	struct kv_seal_ret rets[NR_PAGES];
	struct kv_grant pages[NR_PAGES];
	struct kvc_seal seal = {.size_bytes = sizeof(seal),
				.nr_pages = NR_PAGES,
				.pages = pages,
				.crc32c = crc,
				.tokens = tokens,
				.ret_seals = rets};
	struct kvc_pool *pool;
	struct kvc_step *step;
	struct kvc *c = attach(&pool);
	u8 *buf = malloc(bytes);

	t0 = kv_now_ns();
	for (int i = 0; i < 5000; i++) { /* KV_PENDING while cuInit runs in kvmd */
		if (!kvc_alloc(pool, NR_PAGES, KV_GFP_NOWAIT, pages))
			break;
		usleep(1000);
	}
	KVT_NOTE("first page after %.1f ms", (double)(kv_now_ns() - t0) / 1e6);
	KVT_EXPECT_EQ(kvc_step_begin(c, &step), 0);
	kvc_step_launched(step);
	for (u32 i = 0; i < NR_PAGES; i++) {
		memset(buf, (int)(0x31 + i), bytes);
		KVT_EXPECT_EQ(cu.copy_in(device_addr(pool, pages[i].pfn), buf, bytes), 0);
	}
	KVT_EXPECT_EQ(cu.ctx_sync(), 0);
	kvc_step_retire(step);
	tokens_make(tokens);
	KVT_EXPECT_EQ(kvc_seal(pool, &seal), 0);
	KVT_EXPECT_EQ(write((int)(intptr_t)arg, "x", 1), 1);
	for (;;)
		pause();
}

/* Finds them by their tokens and reads what the other one wrote. */
static int reader(void *arg)
{
	u32 tokens[NR_PAGES * KV_PAGE_TOKENS], nr = 0;
	struct kv_layout layout = ipc_layout();
	u64 bytes = kv_page_bytes(&layout);
	struct kv_hit hits[NR_PAGES];
	struct kvc_pool *pool;
	struct kvc_step *step;
	struct kvc *c;
	u8 *buf = malloc(bytes);
	char byte;

	KVT_EXPECT_EQ(read((int)(intptr_t)arg, &byte, 1), 1);
	c = attach(&pool);
	tokens_make(tokens);
	/* findable when the seal's grace period is over */
	for (int i = 0; i < 2000 && nr < NR_PAGES; i++) {
		kvc_lookup(pool, tokens, NR_PAGES * KV_PAGE_TOKENS, NR_PAGES, hits, &nr);
		usleep(1000);
	}
	KVT_EXPECT_EQ(nr, NR_PAGES);
	KVT_EXPECT_EQ(kvc_step_begin(c, &step), 0);
	kvc_step_launched(step);
	for (u32 i = 0; i < NR_PAGES; i++) {
		kv_cu_ptr at = device_addr(pool, hits[i].grant.pfn);

		KVT_EXPECT(at);
		KVT_EXPECT_EQ(cu.copy_out(buf, at, bytes), 0);
		for (u64 k = 0; k < bytes; k++)
			KVT_EXPECT_EQ(buf[k], 0x31 + i);
	}
	kvc_step_retire(step);
	kvc_close(c);
	return 0;
}

KVT_TEST(pages_of_one_engine_are_read_by_another)
{
	pid_t w, r;
	int fds[2];
	char byte;

	start();
	KVT_EXPECT_EQ(pipe(fds), 0);
	w = ipc_child(writer, (void *)(intptr_t)fds[1]);
	r = ipc_child(reader, (void *)(intptr_t)fds[0]);
	KVT_EXPECT_EQ(ipc_wait(r), 0);
	kill(w, SIGKILL);
	ipc_wait(w);
	close(fds[1]);
	KVT_EXPECT_EQ(read(fds[0], &byte, 1), 0);
	ipc_stop(&kvmd);
}

/* cases F-keep: the writer is dead before the reader begins; the pages are kvmd's. */
KVT_TEST(pages_outlive_the_engine_that_wrote_them)
{
	int done[2], go[2];
	pid_t w, r;
	char byte;

	start();
	KVT_EXPECT_EQ(pipe(done), 0);
	KVT_EXPECT_EQ(pipe(go), 0);
	w = ipc_child(writer, (void *)(intptr_t)done[1]);
	r = ipc_child(reader, (void *)(intptr_t)go[0]);
	KVT_EXPECT_EQ(read(done[0], &byte, 1), 1);
	kill(w, SIGKILL);
	ipc_wait(w);
	KVT_EXPECT_EQ(write(go[1], "x", 1), 1);
	KVT_EXPECT_EQ(ipc_wait(r), 0);
	ipc_stop(&kvmd);
}

/* ------------------------------------------------------- O20: vllm#55906, a slow path */

static char last_log[256];

static void keep_log(void *arg, int level, const char *line)
{
	snprintf(last_log, sizeof(last_log), "%s", line);
}

/* There is no slow path: who cannot import is told, others go on. */
static int import_fails(void *arg)
{
	struct kvc_options opt = {.size_bytes = sizeof(opt),
				  .socket_path = kvmd.socket_path,
				  .client_name = "test",
				  .log = keep_log};
	struct kv_grant page;
	struct kvc *mine;

	setenv("FAKE_CUDA_FAIL", "cuMemImportFromShareableHandle:1+", 1);
	KVT_EXPECT_EQ(kvc_open(&opt, &mine), 0);
	ipc_gpu_context(0);
	if (kvc_alloc(ipc_pool(mine), 1, KV_GFP_NOWAIT, &page) != -ENOMEM)
		return 2;
	if (!strstr(last_log, "cuMemImportFromShareableHandle"))
		return 3;
	kvc_close(mine);
	return 0;
}

KVT_TEST(o20_silent_slow_path)
{
	struct kvc_pool *pool;
	struct kv_grant page;
	struct kvc *c;

	ipc_need_fake();
	setenv("FAKE_CUDA_FORK_BREAKS", "1", 1);
	setenv("KVT_BACKEND", "cuda", 1);
	ipc_start(&kvmd, NULL);
	KVT_EXPECT_EQ(ipc_wait(ipc_child(import_fails, NULL)), 0);
	c = ipc_connect(&kvmd);
	ipc_gpu_context(0);
	pool = ipc_pool(c);
	KVT_EXPECT_EQ(kvc_alloc(pool, 1, KV_GFP_NOWAIT, &page), 0);
	ipc_page_fill(pool, page.pfn, 1, 4096);
	kvc_close(c);
	ipc_stop(&kvmd);
}

KVT_MAIN()
