/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A kvmd that answers anything: HELLO and POOL replies, completions, events, what stands in
 * the table, the session page and the results. libkvclient ends each call in time, hands out
 * only pages that are mapped, and leaves no descriptor behind.
 *
 * kvmd is a thread that acts only when it is asked, by the second half of the input; the
 * first half is what the engine calls.
 */
#include <dirent.h>

#include "base/clock.h"
#include "kvclient.h"
#include "tests/fuzz/client_kvmd.h"

#define TIMEOUT_MS 40u
#define CALLS_MAX  16u

static u32 nr_open(void)
{
	DIR *d = opendir("/proc/self/fd");
	u32 nr = 0;

	FUZZ_CHECK(d);
	while (readdir(d))
		nr++;
	closedir(d);
	return nr;
}

/* A page that was handed out can be touched from end to end. */
static void touch(struct kvc_pool *pool, const struct kv_grant *g)
{
	volatile u8 *p = kvc_page_addr(pool, g->pfn);

	FUZZ_CHECK(p);
	(void)p[0];
	(void)p[k.geo.stride_bytes - 1];
}

static void step(struct kvc *c, struct kvc_pool *pool, const struct kv_grant *g, u32 nr)
{
	struct kv_row rows[8];
	struct kvc_check_request req = {
		.rows = rows, .nonce = 3, .nr_rows = nr, .length = nr * 64};
	struct kv_verdict v;
	struct kvc_step *s;

	if (!nr || kvc_step_begin(c, &s))
		return;
	for (u32 i = 0; i < nr; i++)
		rows[i] = kv_row_make(g[i].pfn, g[i].tag, 0, 3, i);
	kvc_step_check(s, pool, &req, 1, &v);
	kvc_step_launched(s);
	kvc_step_retire(s);
}

static void calls(struct kvc *c, struct kvc_pool *pool, struct fuzz_in *in)
{
	static const u32 tokens[4 * KV_PAGE_TOKENS];
	struct kv_grant g[8];
	struct kv_hit hits[4];
	struct kv_stat stat;
	u32 held = 0, nr;

	for (u32 i = 0; i < CALLS_MAX && in->left; i++) {
		u8 what = fuzz_u8(in);
		u64 start = kv_now_ns();

		switch (what % 8) {
		case 0:
		case 1:
			nr = KV_MIN(1u + (what >> 3) % 4, 8 - held);
			if (nr && !kvc_alloc(pool, nr, KV_GFP_NOWAIT, g + held)) {
				for (u32 n = 0; n < nr; n++)
					touch(pool, &g[held + n]);
				held += nr;
			}
			break;
		case 2:
			if (held)
				kvc_free(pool, &g[--held], 1);
			break;
		case 3:
			step(c, pool, g, held);
			break;
		case 4:
			nr = 0;
			if (!kvc_lookup(pool, tokens, KV_ARRAY_SIZE(tokens), 4, hits,
					&nr))
				FUZZ_CHECK(nr <= 4);
			break;
		case 5:
			kvc_stat(pool, &stat);
			break;
		case 6:
			kvc_flush(c);
			break;
		default:
			kvc_dispatch(c, NULL, NULL);
		}
		FUZZ_CHECK(kv_now_ns() - start < 20 * TIMEOUT_MS * KV_NSEC_PER_MSEC);
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
	struct fuzz_in mine = {data, bytes / 2},
		       his = {data + bytes / 2, bytes - bytes / 2};
	struct kvc_options opt = {.size_bytes = sizeof(opt), .timeout_ms = TIMEOUT_MS};
	struct kv_layout layout = the_layout();
	u32 before = nr_open();
	struct kvc_pool *pool;
	struct kvc *c;

	kvmd_start(&his);
	opt.socket_path = k.path;
	if (!kvc_open(&opt, &c)) {
		if (!kvc_pool_open(c, &layout, NULL, NULL, &pool))
			calls(c, pool, &mine);
		kvc_close(c);
	}
	kvmd_stop();
	FUZZ_CHECK(nr_open() == before);
	return 0;
}
