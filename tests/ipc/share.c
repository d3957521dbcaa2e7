/* SPDX-License-Identifier: Apache-2.0 */
/* Several processes and one kvmd: shared prefixes, quotas in a race, dirty pages,
 * shrinking. */
#include "tests/ipc/common.h"

#include <dlfcn.h>
#include <math.h>
#include <sys/stat.h>
#include "kernels/kernels.h"

static struct eng_private_kvmd kvmd;

static const char *write_config(const char *text)
{
	static char path[64];
	int fd;

	snprintf(path, sizeof(path), "/tmp/kvt-config-XXXXXX");
	fd = mkstemp(path);
	KVT_EXPECT(fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text));
	close(fd);
	return path;
}

static void start_with(const char *config)
{
	const char *args[] = {"--config", write_config(config), NULL};

	ipc_start(&kvmd, args);
	unlink(args[1]);
}

static struct kv_stat stat_of(struct kvc_pool *pool)
{
	struct kv_stat s;

	KVT_EXPECT_EQ(kvc_stat(pool, &s), 0);
	return s;
}

/* A step over @nr pages. The caller works on the bytes and retires it. */
static struct kvc_step *checked_step(struct kvc *c, struct kvc_pool *pool,
				     const struct kv_grant *pages, u32 nr, u32 flags,
				     struct kv_row *rows, struct kv_verdict *ret)
{
	struct kvc_check_request q = {
		.rows = rows, .nonce = 5, .nr_rows = nr, .length = nr * KV_PAGE_TOKENS};
	struct kvc_step *step;

	for (u32 i = 0; i < nr; i++)
		rows[i] = kv_row_make(pages[i].pfn, pages[i].tag, flags, 5, i);
	KVT_EXPECT_EQ(kvc_step_begin(c, &step), 0);
	KVT_EXPECT_EQ(kvc_step_rows(step, pool, rows, nr), 0);
	KVT_EXPECT_EQ(kvc_step_check(step, pool, &q, 1, ret), 0);
	KVT_EXPECT(kv_verdict_ok(*ret, kvc_step_number(step), nr));
	return step;
}

/* ------------------------------------------------------------------- shared prefix */

#define SHARED 16

/* The first engine writes and seals; it ends, its pages stay. */
static int sealer(void *arg)
{
	u32 tokens[SHARED * KV_PAGE_TOKENS], crc[SHARED] = {0};
	struct kv_seal_ret rets[SHARED];
	struct kv_grant pages[SHARED];
	struct kv_row rows[SHARED];
	struct kv_layout layout = ipc_layout();
	struct kvc *c = ipc_connect(&kvmd);
	struct kvc_pool *pool = ipc_pool(c);
	struct kvc_seal seal = {.size_bytes = sizeof(seal),
				.nr_pages = SHARED,
				.pages = pages,
				.crc32c = crc,
				.tokens = tokens,
				.ret_seals = rets};
	struct kvc_step *step;
	struct kv_verdict v;

	if (kvc_alloc(pool, SHARED, KV_GFP_NOWAIT, pages))
		return 1;
	step = checked_step(c, pool, pages, SHARED, KV_ROW_WRITE, rows, &v);
	for (u32 i = 0; i < SHARED; i++)
		ipc_page_fill(pool, pages[i].pfn, (int)(i + 1), kv_page_bytes(&layout));
	kvc_step_retire(step);
	for (u32 i = 0; i < SHARED * KV_PAGE_TOKENS; i++)
		tokens[i] = 3 * i + 1;
	if (kvc_seal(pool, &seal))
		return 2;
	kvc_close(c);
	return 0;
}

/* The others find them: the same frames, the bytes as written. */
static int finder(void *arg)
{
	u32 tokens[SHARED * KV_PAGE_TOKENS + 9], nr;
	struct kv_hit hits[SHARED];
	struct kv_grant pages[SHARED];
	struct kv_row rows[SHARED];
	struct kv_layout layout = ipc_layout();
	struct kvc *c = ipc_connect(&kvmd);
	struct kvc_pool *pool = ipc_pool(c);
	struct kvc_step *step;
	struct kv_verdict v;

	for (u32 i = 0; i < KV_ARRAY_SIZE(tokens); i++)
		tokens[i] = 3 * i + 1;
	if (kvc_lookup(pool, tokens, KV_ARRAY_SIZE(tokens), SHARED, hits, &nr) ||
	    nr != SHARED)
		return 1;
	for (u32 i = 0; i < SHARED; i++)
		pages[i] = hits[i].grant;
	step = checked_step(c, pool, pages, SHARED, 0, rows, &v);
	for (u32 i = 0; i < SHARED; i++)
		if (ipc_page_byte(pool, pages[i].pfn, 0) != i + 1 ||
		    ipc_page_byte(pool, pages[i].pfn, kv_page_bytes(&layout) - 1) !=
			    i + 1)
			return 2;
	kvc_step_retire(step);
	if (kvc_unpin(pool, pages, SHARED) || kvc_flush(c))
		return 3;
	kvc_close(c);
	return 0;
}

KVT_TEST(processes_of_a_tenant_share_a_prefix)
{
	struct kvc_pool *pool;
	struct kvc *c;
	pid_t pids[4];

	ipc_start(&kvmd, NULL);
	c = ipc_connect(&kvmd);
	pool = ipc_pool(c);
	KVT_EXPECT_EQ(ipc_wait(ipc_child(sealer, NULL)), 0);
	KVT_EXPECT_EQ(stat_of(pool).nr_cached, SHARED);
	for (u32 i = 0; i < 4; i++)
		pids[i] = ipc_child(finder, NULL);
	for (u32 i = 0; i < 4; i++)
		KVT_EXPECT_EQ(ipc_wait(pids[i]), 0);
	KVT_EXPECT_EQ(stat_of(pool).nr_cached, SHARED);
	KVT_EXPECT_EQ(stat_of(pool).nr_active, 0);
	kvc_close(c);
	ipc_stop(&kvmd);
}

static int finder_of_another_tenant(void *arg)
{
	u32 tokens[SHARED * KV_PAGE_TOKENS], nr;
	struct kv_hit hits[SHARED];
	struct kvc_info info;
	struct kvc_pool *pool;
	struct kvc *c;

	if (setgid(65534) || setuid(65534))
		return 5;
	c = ipc_connect(&kvmd);
	kvc_info(c, &info);
	pool = ipc_pool(c);
	for (u32 i = 0; i < KV_ARRAY_SIZE(tokens); i++)
		tokens[i] = 3 * i + 1;
	if (strcmp(info.tenant, "blue"))
		return 6;
	return kvc_lookup(pool, tokens, KV_ARRAY_SIZE(tokens), SHARED, hits, &nr) ==
			       KV_MISS
		       ? 0
		       : 1;
}

/* Another uid is another tenant, in a domain of its own: it must not find anything. */
KVT_TEST(r8_another_tenant_misses_the_prefix)
{
	char config[300];

	if (getuid())
		KVT_SKIP("needs root for a second uid");
	snprintf(config, sizeof(config),
		 "{\"tenants\":[{\"name\":\"red\",\"uids\":[0],\"gpus\":[{\"gpu\":\"*\","
		 "\"max\":\"64MiB\"}]},{\"name\":\"blue\",\"uids\":[65534],"
		 "\"gpus\":[{\"gpu\":\"*\",\"max\":\"64MiB\"}]}]}");
	start_with(config);
	KVT_EXPECT_EQ(chmod(kvmd.dir, 0755), 0);
	KVT_EXPECT_EQ(chmod(kvmd.socket_path, 0666), 0);
	/* loaded here: the other user may not be able to enter the build directory */
	if (getenv("KV_CUDA_LIB"))
		KVT_EXPECT(dlopen(getenv("KV_CUDA_LIB"), RTLD_NOW));
	KVT_EXPECT_EQ(ipc_wait(ipc_child(sealer, NULL)), 0);
	KVT_EXPECT_EQ(ipc_wait(ipc_child(finder, NULL)), 0);
	KVT_EXPECT_EQ(ipc_wait(ipc_child(finder_of_another_tenant, NULL)), 0);
	ipc_stop(&kvmd);
}

/* ----------------------------------------------------------------------------- O31 */

#define O31_RINGS 64

static struct ipc_raw rings[O31_RINGS];

/* cases O31: check, then allocate, by two processes (kvcached 262, HAMi-core 273) */
KVT_TEST(o31_grants_of_a_race_stay_within_the_quota)
{
	char config[200];
	bool won[O31_RINGS] = {false};
	struct kv_layout layout = ipc_layout();
	u32 half, granted, losers;

	snprintf(config, sizeof(config),
		 "{\"tenants\":[{\"name\":\"red\",\"uids\":[%u],\"gpus\":[{\"gpu\":\"*\","
		 "\"max\":\"5MiB\"}]}]}",
		 getuid());
	start_with(config);
	for (u32 i = 0; i < O31_RINGS; i++)
		raw_open(&rings[i], &kvmd);
	half = (u32)((5u << 20) / kv_page_stride(&layout) / 2);
	KVT_EXPECT(half >= 30);
	for (u32 round = 0; round < 20; round++) {
		granted = 0;
		losers = 0;
		for (u32 i = 0; i < O31_RINGS; i++) {
			struct kv_sqe sqe = raw_sqe(&rings[i], KV_OP_ALLOC);

			sqe.nr = half;
			sqe.ret_bytes = half * (u32)sizeof(struct kv_grant);
			raw_push(&rings[i], sqe);
		}
		for (u32 i = 0; i < O31_RINGS; i++) {
			struct kv_grant *grants = raw_arg(&rings[i], 0);
			struct kv_page_ref *refs = raw_arg(&rings[i], 65536);
			struct kv_cqe cqe;

			KVT_EXPECT_EQ(raw_pop(&rings[i], &cqe, 5000), 0);
			if (cqe.result) {
				KVT_EXPECT(cqe.result == KV_QUOTA ||
					   cqe.result == KV_PENDING);
				losers++;
				continue;
			}
			granted += half;
			for (u32 k = 0; k < half; k++)
				refs[k] = (struct kv_page_ref){.pfn = grants[k].pfn,
							       .tag = grants[k].tag};
			won[i] = true;
		}
		KVT_EXPECT(granted && granted <= 2 * half);
		KVT_EXPECT_EQ(losers, O31_RINGS - granted / half);
		for (u32 i = 0; i < O31_RINGS; i++) {
			struct kv_sqe sqe = raw_sqe(&rings[i], KV_OP_FREE);

			if (!won[i])
				continue;
			won[i] = false;
			sqe.nr = half;
			sqe.arg_off = 65536;
			sqe.arg_bytes = half * (u32)sizeof(struct kv_page_ref);
			KVT_EXPECT_EQ(raw_call(&rings[i], sqe).result, 0);
		}
		usleep(2000); /* out of quarantine */
	}
	ipc_stop(&kvmd);
}

/* ----------------------------------------------------------------------------- O34 */

/* Give a page a bad past: every byte is a NaN of e4m3. */
static int nan_writer(void *arg)
{
	struct kv_grant pages[32];
	struct kv_row rows[32];
	struct kv_layout layout = ipc_layout();
	struct kvc *c = ipc_connect(&kvmd);
	struct kvc_pool *pool = ipc_pool(c);
	struct kvc_step *step;
	struct kv_verdict v;

	if (kvc_alloc(pool, 32, KV_GFP_NOWAIT, pages))
		return 1;
	step = checked_step(c, pool, pages, 32, KV_ROW_WRITE, rows, &v);
	for (u32 i = 0; i < 32; i++)
		ipc_page_fill(pool, pages[i].pfn, 0xff, kv_page_bytes(&layout));
	kvc_step_retire(step);
	kvc_close(c);
	return 0;
}

/* A pool of one page in host memory: a copy of @page, which the host kernels know as
 * page 0; on the host backend they get the pool itself. */
static void host_pages(struct kvc_pool *pool, struct kv_grant page, u8 *copy,
		       struct kvk_pages *ret, struct kv_row *row)
{
	struct kvc_pool_info info;

	kvc_pool_get_info(pool, &info);
	if (info.backend != KV_BACKEND_HOST) {
		ipc_page_get(pool, page.pfn, 0, copy, kv_page_bytes(&info.layout));
		info.base = copy;
		info.geometry.nr_pages = 1;
		row->pfn = 0;
	}
	*ret = (struct kvk_pages){.base = info.base,
				  .geometry = info.geometry,
				  .layout = info.layout,
				  .scales = info.scales};
}

#define O34_TOKENS 3

/* Append three tokens to the page, then attend to it. Return: is every output finite? */
static bool attend(struct kvc *c, struct kvc_pool *pool, struct kv_grant page,
		   bool zero_first)
{
	static float k[O34_TOKENS][2][64], v[O34_TOKENS][2][64], q[4][64], out[4][64];
	const struct kvk_ops *ops = kvk_host_ops();
	u32 row_start[2] = {0, 1}, q_start[2] = {0, O34_TOKENS}, length = O34_TOKENS;
	struct kvk_append_args append = {.src_dtype = KVK_F32, .k = k, .v = v};
	struct kvk_attn_args attn = {.nr_q_heads = 4,
				     .sm_scale = 0.125f,
				     .q = q,
				     .out = out,
				     .act_dtype = KVK_F32};
	struct kvk_move_args zero = {.op = KVK_MOVE_ZERO};
	struct kv_verdict verdict;
	struct kvc_step *step;
	struct kv_row row;
	u64 number;
	bool finite = true;
	struct kv_layout layout = ipc_layout();
	u8 *copy = malloc(kv_page_bytes(&layout));

	for (u32 i = 0; i < O34_TOKENS * 2 * 64; i++) {
		(&k[0][0][0])[i] = kvt_randf();
		(&v[0][0][0])[i] = kvt_randf();
	}
	for (u32 i = 0; i < 4 * 64; i++)
		(&q[0][0])[i] = kvt_randf();
	step = checked_step(c, pool, &page, 1, KV_ROW_WRITE, &row, &verdict);
	number = kvc_step_number(step);
	host_pages(pool, page, copy, &append.pages, &row);
	append.batch = (struct kvk_batch){.rows = &row,
					  .row_start = row_start,
					  .lengths = &length,
					  .q_start = q_start,
					  .verdicts = &verdict,
					  .step = &number,
					  .nr_requests = 1,
					  .nr_tokens = O34_TOKENS,
					  .q_len_max = O34_TOKENS};
	zero.dst = append.pages;
	zero.dst_batch = append.batch;
	if (zero_first)
		KVT_EXPECT_EQ(ops->page_move(&zero, NULL), 0);
	KVT_EXPECT_EQ(ops->append(&append, NULL), 0);
	attn.pages = append.pages;
	attn.batch = append.batch;
	q_start[1] = 1; /* one query, the last token */
	attn.batch.nr_tokens = 1;
	attn.batch.q_len_max = 1;
	KVT_EXPECT_EQ(ops->attn_gqa(&attn, NULL), 0);
	if (append.pages.base == copy)
		ipc_page_put(pool, page.pfn, 0, copy, kv_page_bytes(&layout));
	kvc_step_retire(step);
	free(copy);
	for (u32 i = 0; i < 4 * 64; i++)
		finite &= isfinite((&out[0][0])[i]);
	return finite;
}

static u32 nan_bytes_in_tail(struct kvc_pool *pool, struct kv_grant page)
{
	struct kv_layout l = ipc_layout();
	u8 *bytes = malloc(kv_page_bytes(&l));
	u32 found = 0;

	ipc_page_get(pool, page.pfn, 0, bytes, kv_page_bytes(&l));
	for (u32 head = 0; head < l.nr_kv_heads; head++)
		for (u32 is_v = 0; is_v < 2; is_v++)
			for (u32 slot = O34_TOKENS; slot < KV_PAGE_TOKENS; slot++)
				for (u32 i = 0; i < l.head_dim; i++)
					found += (bytes[kv_gqa_off(&l, head, is_v, slot) +
							i] &
						  0x7f) == 0x7f;
	free(bytes);
	return found;
}

/*
 * cases O34: stale bytes in the tail (vllm 641, PR 53856): 0 * NaN = NaN. A page of
 * another session is DIRTY and zeroed before use; even one that is not never lets its
 * tail into arithmetic.
 */
KVT_TEST(o34_tail_of_a_used_page_never_reaches_arithmetic)
{
	struct kv_grant pages[32];
	struct kvc_pool *pool;
	u32 nr_dirty = 0, nr_nan = 0;
	struct kvc *c;

	ipc_start(&kvmd, NULL);
	KVT_EXPECT_EQ(ipc_wait(ipc_child(nan_writer, NULL)), 0);
	c = ipc_connect(&kvmd);
	pool = ipc_pool(c);
	expect_within(stat_of(pool).nr_quarantine == 0, 1000);
	KVT_EXPECT_EQ(kvc_alloc(pool, 32, KV_GFP_NOWAIT, pages), 0);
	for (u32 i = 0; i < 32; i++) {
		bool stale = nan_bytes_in_tail(pool, pages[i]) > 0;

		if (stale)
			KVT_EXPECT(pages[i].flags & KV_GRANT_DIRTY); /* never unsaid */
		nr_nan += stale;
		nr_dirty += pages[i].flags & KV_GRANT_DIRTY;
		KVT_EXPECT(attend(c, pool, pages[i], i % 2));
		if (i % 2)
			KVT_EXPECT_EQ(nan_bytes_in_tail(pool, pages[i]), 0);
	}
	KVT_NOTE("%u of 32 pages held NaN bytes, %u were DIRTY", nr_nan, nr_dirty);
	KVT_EXPECT(nr_nan > 0);
	kvc_close(c);
	ipc_stop(&kvmd);
}

/* ----------------------------------------------------------------------------- O40 */

static u32 removed;

static void on_event(void *arg, const struct kvc_event *event)
{
	removed += event->type == KV_MSG_EXTENT_REMOVED ? event->nr : 0;
}

static u32 count_mapped(struct kvc_pool *pool, const struct kv_grant *pages, u32 nr)
{
	u32 n = 0;

	for (u32 i = 0; i < nr; i++)
		n += kvc_page_addr(pool, pages[i].pfn) != NULL;
	return n;
}

/*
 * cases O40: unmapped under a kernel (LMCache 3536). An idle pool shrinks while a step
 * runs: the step's addresses stay until it retires, the memory is charged until then.
 */
KVT_TEST(o40_shrinking_pool_waits_for_the_step)
{
	char config[256];
	static struct kv_grant pages[1024];
	struct kvc_pool_info info;
	struct kvc_pool *pool;
	struct kvc_step *step;
	struct kvc *c;
	u32 nr;

	snprintf(
		config, sizeof(config),
		"{\"pool\":{\"extent\":\"4MiB\",\"idle_shrink_ms\":50},\"tenants\":[{\"name\":\"red\",\"uids\":[%u],"
		"\"gpus\":[{\"gpu\":\"*\",\"max\":\"64MiB\"}]}]}",
		getuid());
	start_with(config);
	c = ipc_connect(&kvmd);
	pool = ipc_pool(c);
	kvc_pool_get_info(pool, &info);
	/* three extents; kvmd keeps one for the next burst */
	nr = 3u << info.geometry.shift;
	KVT_EXPECT(nr <= KV_ARRAY_SIZE(pages));
	KVT_EXPECT_EQ(kvc_alloc(pool, nr, KV_GFP_NOWAIT, pages), 0);
	KVT_EXPECT_EQ(kvc_free(pool, pages, nr), 0);
	expect_within(stat_of(pool).nr_quarantine == 0, 1000);
	KVT_EXPECT_EQ(kvc_step_begin(c, &step), 0);
	for (u32 i = 0; i < 4000 && !removed; i++) {
		KVT_EXPECT(kvc_dispatch(c, on_event, NULL) >= 0);
		usleep(1000);
	}
	KVT_EXPECT(removed > 0);
	for (u32 i = 0; i < 100; i++) { /* the kernel that still writes */
		for (u32 k = 0; k < nr; k++)
			ipc_page_fill(pool, pages[k].pfn, 1, 1);
		kvc_dispatch(c, on_event, NULL);
		usleep(500);
	}
	KVT_EXPECT_EQ(count_mapped(pool, pages, nr), nr);
	kvc_step_retire(step);
	KVT_EXPECT_LE(count_mapped(pool, pages, nr), nr - 1);
	KVT_EXPECT_EQ(kvc_alloc(pool, 128, KV_GFP_PREFILL, pages),
		      0); /* and grows again */
	kvc_close(c);
	ipc_stop(&kvmd);
}

/* ------------------------------------------------------------------------ patterns */

#define RACE_STEPS 300

/* Writes its mark into pages of its own, reads it back a step later; never sees
 * another's. */
static int marker(void *arg)
{
	u8 mark = (u8)(uintptr_t)arg;
	struct kvc *c = ipc_connect(&kvmd);
	struct kvc_pool *pool = ipc_pool(c);
	struct kv_layout layout = ipc_layout();
	u64 bytes = kv_page_bytes(&layout);
	u8 *p = malloc(bytes);

	for (u32 round = 0; round < RACE_STEPS; round++) {
		struct kv_grant pages[16];
		struct kv_row rows[16];
		struct kv_verdict v;
		struct kvc_step *step;
		int r = kvc_alloc(pool, 16, KV_GFP_PREFILL, pages);

		if (r > 0)
			continue; /* the others have them now */
		if (r) {
			KVT_NOTE("kvc_alloc: %d %s", r, kvc_strerror(c));
			return 1;
		}
		step = checked_step(c, pool, pages, 16, KV_ROW_WRITE, rows, &v);
		for (u32 i = 0; i < 16; i++)
			ipc_page_fill(pool, pages[i].pfn, mark, bytes);
		kvc_step_retire(step);
		step = checked_step(c, pool, pages, 16, 0, rows, &v);
		for (u32 i = 0; i < 16; i++) {
			ipc_page_get(pool, pages[i].pfn, 0, p, bytes);
			for (u64 k = 0; k < bytes; k += 509)
				if (p[k] != mark)
					return 2;
		}
		/* freed under the running step: nobody may get them before it retires */
		if (kvc_free(pool, pages, 16))
			return 3;
		for (u32 i = 0; i < 16; i++)
			if (ipc_page_byte(pool, pages[i].pfn, 0) != mark)
				return 4;
		kvc_step_retire(step);
	}
	kvc_close(c);
	return 0;
}

/* Three processes, a pool too small for them, pages that change hands all the time. */
KVT_TEST(pages_change_hands_without_a_foreign_byte)
{
	static const char *const small[] = {"--host-bytes", "6MiB", NULL};
	pid_t pids[3];

	ipc_start(&kvmd, small);
	for (u32 i = 0; i < 3; i++)
		pids[i] = ipc_child(marker, (void *)(uintptr_t)(0x11 * (i + 1)));
	for (u32 i = 0; i < 3; i++)
		KVT_EXPECT_EQ(ipc_wait(pids[i]), 0);
	ipc_stop(&kvmd);
}

KVT_MAIN()
