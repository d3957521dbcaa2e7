/* SPDX-License-Identifier: Apache-2.0 */
/* Every operation against a real kvmd, through the library. */
#include "tests/ipc/common.h"

static struct eng_private_kvmd kvmd;
static struct kvc *c;
static struct kvc_pool *pool;

static void start(const char *const *args)
{
	ipc_start(&kvmd, args);
	c = ipc_connect(&kvmd);
	pool = ipc_pool(c);
}

static void stop(void)
{
	kvc_close(c);
	ipc_stop(&kvmd);
}

static struct kv_stat stat_now(void)
{
	struct kv_stat s;

	KVT_EXPECT_EQ(kvc_stat(pool, &s), 0);
	return s;
}

/* One step that checks @nr pages and writes @byte into them. */
static struct kv_verdict write_pages(const struct kv_grant *pages, u32 nr, u8 byte)
{
	struct kv_row rows[64];
	struct kvc_check_request q = {
		.rows = rows, .nonce = 5, .nr_rows = nr, .length = nr * KV_PAGE_TOKENS};
	struct kv_layout layout = ipc_layout();
	struct kvc_step *step;
	struct kv_verdict v;

	for (u32 i = 0; i < nr; i++)
		rows[i] = kv_row_make(pages[i].pfn, pages[i].tag, KV_ROW_WRITE, 5, i);
	KVT_EXPECT_EQ(kvc_step_begin(c, &step), 0);
	KVT_EXPECT_EQ(kvc_step_rows(step, pool, rows, nr), 0);
	KVT_EXPECT_EQ(kvc_step_check(step, pool, &q, 1, &v), 0);
	for (u32 i = 0; i < nr && !v.bits; i++)
		ipc_page_fill(pool, pages[i].pfn, byte, kv_page_bytes(&layout));
	kvc_step_retire(step);
	return v;
}

static void seal_pages(const struct kv_grant *pages, u32 nr, const u32 *tokens,
		       const u8 *parent, struct kv_seal_ret *rets)
{
	u32 crc[64] = {0};
	struct kvc_seal seal = {.size_bytes = sizeof(seal),
				.nr_pages = nr,
				.pages = pages,
				.crc32c = crc,
				.tokens = tokens,
				.parent_key = parent,
				.ret_seals = rets};
	int r = kvc_seal(pool, &seal);

	if (r)
		KVT_FAIL("kvc_seal: %d %s", r, kvc_strerror(c));
}

static void fill_tokens(u32 *tokens, u32 nr, u32 seed)
{
	for (u32 i = 0; i < nr; i++)
		tokens[i] = seed * 1000000 + i;
}

/* --------------------------------------------------------------------------- alloc, free
 */

KVT_TEST(alloc_and_free_move_the_counts)
{
	struct kv_grant pages[100];
	struct kv_stat before, during, after;

	start(NULL);
	before = stat_now();
	KVT_EXPECT_EQ(kvc_alloc(pool, 100, KV_GFP_NOWAIT, pages), 0);
	for (u32 i = 0; i < 100; i++) {
		KVT_EXPECT(kv_tag_live(pages[i].tag) &&
			   kvc_page_addr(pool, pages[i].pfn));
		for (u32 k = 0; k < i; k++)
			KVT_EXPECT(pages[i].pfn != pages[k].pfn);
	}
	during = stat_now();
	KVT_EXPECT_EQ(during.nr_active, before.nr_active + 100);
	KVT_EXPECT(during.tenant_used_bytes > before.tenant_used_bytes);
	KVT_EXPECT_EQ(kvc_free(pool, pages, 100), 0);
	expect_within(stat_now().nr_quarantine == 0, 1000);
	after = stat_now();
	KVT_EXPECT_EQ(after.nr_active, before.nr_active);
	KVT_EXPECT_EQ(after.tenant_used_bytes, before.tenant_used_bytes);
	stop();
}

/* cases O29: the second free of a page is stale (vllm 1556) */
KVT_TEST(o29_second_free_is_stale)
{
	struct kv_grant pages[64], again[64];

	start(NULL);
	KVT_EXPECT_EQ(kvc_alloc(pool, 64, KV_GFP_NOWAIT, pages), 0);
	KVT_EXPECT_EQ(kvc_free(pool, pages, 64), 0);
	KVT_EXPECT_EQ(kvc_free(pool, pages, 64), KV_STALE);
	KVT_EXPECT_EQ(kvc_alloc(pool, 64, KV_GFP_PREFILL, again), 0);
	KVT_EXPECT_EQ(kvc_free(pool, pages, 64),
		      KV_STALE); /* old tags, maybe the same pfns */
	KVT_EXPECT_EQ(write_pages(again, 64, 1).bits, 0);
	stop();
}

/* A freed page fails the very next check, and a check never passes on its next owner's.
 */
KVT_TEST(freed_page_fails_the_check)
{
	struct kv_grant page[64];
	struct kv_verdict v;

	start(NULL);
	KVT_EXPECT_EQ(kvc_alloc(pool, 64, KV_GFP_NOWAIT, page), 0);
	KVT_EXPECT_EQ(write_pages(page, 64, 1).bits, 0);
	KVT_EXPECT_EQ(kvc_free(pool, page, 64), 0);
	v = write_pages(page, 1, 2);
	KVT_EXPECT(v.bits & KV_BAD_GEN);
	stop();
}

/* cases O22: a page freed while a launched step writes it goes nowhere before that
 * retires */
KVT_TEST(o22_page_of_a_running_step_is_not_given_out)
{
	struct kv_grant page, other[64];
	struct kv_row row;
	struct kvc_check_request q = {
		.rows = &row, .nonce = 1, .nr_rows = 1, .length = 1};
	struct kvc_step *step;
	struct kv_verdict v;

	start(NULL);
	KVT_EXPECT_EQ(kvc_alloc(pool, 1, KV_GFP_NOWAIT, &page), 0);
	row = kv_row_make(page.pfn, page.tag, KV_ROW_WRITE, 1, 0);
	KVT_EXPECT_EQ(kvc_step_begin(c, &step), 0);
	KVT_EXPECT_EQ(kvc_step_check(step, pool, &q, 1, &v), 0);
	KVT_EXPECT_EQ(kvc_free(pool, &page, 1), 0);
	KVT_EXPECT_EQ(kvc_flush(c), KV_BUSY);
	for (u32 round = 0; round < 50; round++) {
		ipc_page_fill(pool, page.pfn, (int)round, 1); /* the late writer */
		KVT_EXPECT_EQ(kvc_alloc(pool, 64, KV_GFP_NOWAIT, other), 0);
		for (u32 i = 0; i < 64; i++)
			KVT_EXPECT(other[i].pfn != page.pfn);
		KVT_EXPECT_EQ(kvc_free(pool, other, 64), 0);
	}
	kvc_step_retire(step);
	KVT_EXPECT_EQ(kvc_flush(c), 0);
	stop();
}

/* The daemon holds it back by itself, too: a step announced before FREE keeps quarantine.
 */
KVT_TEST(quarantine_waits_for_an_announced_step)
{
	struct kv_grant pages[64];
	struct kvc_step *step;

	start(NULL);
	KVT_EXPECT_EQ(kvc_alloc(pool, 64, KV_GFP_NOWAIT, pages), 0);
	KVT_EXPECT_EQ(kvc_step_begin(c, &step), 0); /* not launched: the library sends */
	KVT_EXPECT_EQ(kvc_free(pool, pages, 64), 0);
	usleep(50000);
	KVT_EXPECT_EQ(stat_now().nr_quarantine, 64);
	kvc_step_retire(step);
	expect_within(stat_now().nr_quarantine == 0, 1000);
	stop();
}

KVT_TEST(magazine_serves_single_pages)
{
	struct kv_grant pages[512];
	struct kv_stat s;

	start(NULL);
	for (u32 i = 0; i < 512; i++) {
		KVT_EXPECT_EQ(kvc_alloc(pool, 1, KV_GFP_NOWAIT, &pages[i]), 0);
		KVT_EXPECT(kvc_page_addr(pool, pages[i].pfn) != NULL);
	}
	KVT_EXPECT_EQ(write_pages(pages + 100, 64, 9).bits, 0);
	s = stat_now();
	KVT_EXPECT(s.nr_magazine > 0);
	KVT_EXPECT_EQ(kvc_free(pool, pages, 512), 0);
	KVT_EXPECT_EQ(kvc_flush(c), 0);
	expect_within(stat_now().nr_quarantine == 0, 1000);
	stop();
}

static const char *const small[] = {"--host-bytes", "8MiB", NULL};

KVT_TEST(full_pool_says_full_and_serves_again)
{
	struct kv_grant pages[KV_BATCH_MAX], more[64];
	u32 nr = 0;
	int r;

	start(small);
	while ((r = kvc_alloc(pool, 16, KV_GFP_NOWAIT, pages + nr)) == 0)
		nr += 16;
	KVT_EXPECT_EQ(r, KV_FULL);
	while ((r = kvc_alloc(pool, 1, KV_GFP_NOWAIT, pages + nr)) == 0)
		nr++; /* to the last page, those in the magazine too */
	KVT_EXPECT_EQ(r, KV_FULL);
	KVT_EXPECT(nr >= 32);
	KVT_EXPECT_EQ(stat_now().nr_magazine, 0);
	KVT_EXPECT_EQ(kvc_free(pool, pages, 32), 0);
	KVT_EXPECT_EQ(kvc_alloc(pool, 32, KV_GFP_PREFILL, more), 0);
	stop();
}

/* ------------------------------------------------------------------- seal, lookup, pin
 */

KVT_TEST(sealed_pages_are_found_by_their_tokens)
{
	u32 tokens[8 * KV_PAGE_TOKENS], nr = 0;
	struct kv_seal_ret rets[8];
	struct kv_grant pages[8];
	struct kv_hit hits[8];

	start(NULL);
	fill_tokens(tokens, 8 * KV_PAGE_TOKENS, 1);
	KVT_EXPECT_EQ(kvc_lookup(pool, tokens, 8 * KV_PAGE_TOKENS, 8, hits, &nr),
		      KV_MISS);
	KVT_EXPECT_EQ(kvc_alloc(pool, 8, KV_GFP_NOWAIT, pages), 0);
	KVT_EXPECT_EQ(write_pages(pages, 8, 3).bits, 0);
	seal_pages(pages, 5, tokens, NULL, rets);
	seal_pages(pages + 5, 3, tokens + 5 * KV_PAGE_TOKENS, rets[4].key, rets + 5);
	KVT_EXPECT_EQ(kvc_lookup(pool, tokens, 8 * KV_PAGE_TOKENS, 8, hits, &nr), 0);
	KVT_EXPECT_EQ(nr, 8);
	for (u32 i = 0; i < 8; i++) {
		KVT_EXPECT_EQ(hits[i].grant.pfn, pages[i].pfn);
		KVT_EXPECT_EQ(memcmp(hits[i].key, rets[i].key, KV_KEY_BYTES), 0);
		KVT_EXPECT(hits[i].grant.flags & KV_GRANT_SHARED);
		KVT_EXPECT(kv_tag_sealed(hits[i].grant.tag));
	}
	tokens[5 * KV_PAGE_TOKENS + 3]++; /* the sixth page differs */
	KVT_EXPECT_EQ(kvc_lookup(pool, tokens, 8 * KV_PAGE_TOKENS, 8, hits, &nr), 0);
	KVT_EXPECT_EQ(nr, 5);
	KVT_EXPECT_EQ(kvc_lookup(pool, tokens, 3 * KV_PAGE_TOKENS + 7, 8, hits, &nr), 0);
	KVT_EXPECT_EQ(nr, 3);
	KVT_EXPECT_EQ(kvc_lookup(pool, tokens, 8 * KV_PAGE_TOKENS, 2, hits, &nr), 0);
	KVT_EXPECT_EQ(nr, 2);
	stop();
}

KVT_TEST(sealed_page_cannot_be_written)
{
	u32 tokens[KV_PAGE_TOKENS];
	struct kv_seal_ret ret;
	struct kv_grant page;

	start(NULL);
	fill_tokens(tokens, KV_PAGE_TOKENS, 2);
	KVT_EXPECT_EQ(kvc_alloc(pool, 1, KV_GFP_NOWAIT, &page), 0);
	KVT_EXPECT_EQ(write_pages(&page, 1, 3).bits, 0);
	seal_pages(&page, 1, tokens, NULL, &ret);
	KVT_EXPECT_EQ(write_pages(&page, 1, 4).bits, KV_BAD_SEALED);
	stop();
}

KVT_TEST(second_page_with_the_same_key_is_sealed_not_found)
{
	u32 tokens[KV_PAGE_TOKENS], nr;
	struct kv_seal_ret rets[2];
	struct kv_grant pages[2];
	struct kv_hit hit;

	start(NULL);
	fill_tokens(tokens, KV_PAGE_TOKENS, 3);
	KVT_EXPECT_EQ(kvc_alloc(pool, 2, KV_GFP_NOWAIT, pages), 0);
	KVT_EXPECT_EQ(write_pages(pages, 2, 3).bits, 0);
	seal_pages(&pages[0], 1, tokens, NULL, &rets[0]);
	seal_pages(&pages[1], 1, tokens, NULL, &rets[1]);
	KVT_EXPECT_EQ(rets[0].flags, 0);
	KVT_EXPECT_EQ(rets[1].flags, KV_SEALED_DUP);
	KVT_EXPECT_EQ(memcmp(rets[0].key, rets[1].key, KV_KEY_BYTES), 0);
	KVT_EXPECT_EQ(kvc_lookup(pool, tokens, KV_PAGE_TOKENS, 1, &hit, &nr), 0);
	KVT_EXPECT_EQ(hit.grant.pfn, pages[0].pfn);
	KVT_EXPECT_EQ(write_pages(&pages[1], 1, 4).bits, KV_BAD_SEALED);
	stop();
}

/* References are counted: as many unpins as pins, then the page is nobody's, but
 * findable. */
KVT_TEST(pins_are_counted)
{
	u32 tokens[KV_PAGE_TOKENS], nr;
	struct kv_seal_ret ret;
	struct kv_grant page;
	struct kv_hit hit;

	start(NULL);
	fill_tokens(tokens, KV_PAGE_TOKENS, 4);
	KVT_EXPECT_EQ(kvc_alloc(pool, 1, KV_GFP_NOWAIT, &page), 0);
	KVT_EXPECT_EQ(write_pages(&page, 1, 3).bits, 0);
	seal_pages(&page, 1, tokens, NULL, &ret);
	KVT_EXPECT_EQ(kvc_pin(pool, &page, 1), 0);
	KVT_EXPECT_EQ(kvc_lookup(pool, tokens, KV_PAGE_TOKENS, 1, &hit, &nr), 0);
	for (u32 i = 0; i < 3; i++) { /* the writer's, the pin's, the lookup's */
		KVT_EXPECT_EQ(kvc_unpin(pool, &hit.grant, 1), 0);
		KVT_EXPECT_EQ(kvc_flush(c), 0);
	}
	KVT_EXPECT_EQ(stat_now().nr_cached, 1);
	KVT_EXPECT_EQ(kvc_unpin(pool, &hit.grant, 1), 0);
	KVT_EXPECT_EQ(kvc_flush(c), KV_STALE);
	KVT_EXPECT_EQ(kvc_pin(pool, &page, 1), KV_STALE);
	KVT_EXPECT_EQ(kvc_lookup(pool, tokens, KV_PAGE_TOKENS, 1, &hit, &nr), 0);
	KVT_EXPECT_EQ(stat_now().nr_cached, 0);
	stop();
}

KVT_TEST(seal_of_a_stale_page_seals_nothing)
{
	u32 tokens[2 * KV_PAGE_TOKENS], crc[2] = {0}, nr;
	struct kv_seal_ret rets[2];
	struct kv_grant pages[2];
	struct kv_hit hits[2];
	struct kvc_seal seal = {.size_bytes = sizeof(seal),
				.nr_pages = 2,
				.pages = pages,
				.crc32c = crc,
				.tokens = tokens,
				.ret_seals = rets};

	start(NULL);
	fill_tokens(tokens, 2 * KV_PAGE_TOKENS, 5);
	KVT_EXPECT_EQ(kvc_alloc(pool, 2, KV_GFP_NOWAIT, pages), 0);
	KVT_EXPECT_EQ(write_pages(pages, 2, 3).bits, 0);
	KVT_EXPECT_EQ(kvc_free(pool, &pages[1], 1), 0);
	KVT_EXPECT_EQ(kvc_flush(c), 0);
	KVT_EXPECT_EQ(kvc_seal(pool, &seal), KV_STALE);
	KVT_EXPECT_EQ(kvc_lookup(pool, tokens, 2 * KV_PAGE_TOKENS, 2, hits, &nr),
		      KV_MISS);
	KVT_EXPECT_EQ(write_pages(&pages[0], 1, 4).bits, 0); /* still writable */
	stop();
}

KVT_TEST(fork_gives_private_pages)
{
	struct kv_grant pages[4], copies[4];

	start(NULL);
	KVT_EXPECT_EQ(kvc_alloc(pool, 4, KV_GFP_NOWAIT, pages), 0);
	KVT_EXPECT_EQ(kvc_fork(pool, pages, 4, KV_GFP_NOWAIT, copies), 0);
	for (u32 i = 0; i < 4; i++)
		for (u32 k = 0; k < 4; k++)
			KVT_EXPECT(copies[i].pfn != pages[k].pfn);
	KVT_EXPECT_EQ(write_pages(copies, 4, 1).bits, 0);
	KVT_EXPECT_EQ(kvc_free(pool, &pages[2], 1), 0);
	KVT_EXPECT_EQ(kvc_flush(c), 0);
	KVT_EXPECT_EQ(kvc_fork(pool, pages, 4, KV_GFP_NOWAIT, copies), KV_STALE);
	stop();
}

/* ---------------------------------------------------------- reports, events, quota */

KVT_TEST(report_keeps_the_page_history)
{
	struct kv_incident in = {.request_id = 77,
				 .step = 3,
				 .expected = 0x4101,
				 .found = 0x4200,
				 .bits = KV_BAD_GEN | KV_BAD_DEAD};
	struct kv_grant page;
	char *text;

	start(NULL);
	KVT_EXPECT_EQ(kvc_alloc(pool, 1, KV_GFP_NOWAIT, &page), 0);
	in.pfn = page.pfn;
	KVT_EXPECT_EQ(kvc_report(pool, &in), 0);
	text = ipc_admin(&kvmd, "{\"op\":\"incidents\"}");
	KVT_EXPECT_HAS(text, "77");
	free(text);
	in.reserved = 1;
	KVT_EXPECT_EQ(kvc_report(pool, &in), -EINVAL);
	stop();
}

static u32 revoked;

static void on_event(void *arg, const struct kvc_event *event)
{
	if (event->type == KV_MSG_REVOKE)
		revoked += event->nr;
}

/* An operator evicts a page that is in use: its holder is told, its rows fail. */
KVT_TEST(revoked_page_is_an_event_and_fails)
{
	u32 tokens[KV_PAGE_TOKENS];
	struct kv_seal_ret ret;
	struct kv_grant page;
	char request[128], *text;
	struct kvc_pool_info info;

	start(NULL);
	kvc_pool_get_info(pool, &info);
	fill_tokens(tokens, KV_PAGE_TOKENS, 6);
	KVT_EXPECT_EQ(kvc_alloc(pool, 1, KV_GFP_NOWAIT, &page), 0);
	KVT_EXPECT_EQ(write_pages(&page, 1, 3).bits, 0);
	seal_pages(&page, 1, tokens, NULL, &ret);
	snprintf(
		request, sizeof(request),
		"{\"op\":\"evict\",\"target\":\"page\",\"pool\":%u,\"pfn\":%u,\"revoke\":true}",
		info.pool_id, page.pfn);
	text = ipc_admin(&kvmd, request);
	if (!strstr(text, "\"ok\":true"))
		KVT_FAIL("evict: %s", text);
	free(text);
	for (u32 i = 0; i < 1000 && !revoked; i++) {
		KVT_EXPECT(kvc_dispatch(c, on_event, NULL) >= 0);
		usleep(1000);
	}
	KVT_EXPECT_EQ(revoked, 1);
	KVT_EXPECT(write_pages(&page, 1, 4).bits & (KV_BAD_GEN | KV_BAD_DEAD));
	stop();
}

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

KVT_TEST(quota_is_hard)
{
	char text[256];
	const char *args[] = {"--config", NULL, NULL};
	struct kv_grant pages[64], one;
	struct kv_stat s;
	u32 nr = 0;

	snprintf(text, sizeof(text),
		 "{\"tenants\":[{\"name\":\"red\",\"uids\":[%u],"
		 "\"gpus\":[{\"gpu\":\"*\",\"max\":\"3MiB\"}]}]}",
		 getuid());
	args[1] = write_config(text);
	start(args);
	unlink(args[1]);
	while (kvc_alloc(pool, 8, KV_GFP_NOWAIT, pages) == 0)
		nr += 8;
	KVT_EXPECT_EQ(kvc_alloc(pool, 8, KV_GFP_NOWAIT, pages), KV_QUOTA);
	while (kvc_alloc(pool, 1, KV_GFP_NOWAIT, &one) == 0)
		nr++;
	s = stat_now();
	KVT_EXPECT_EQ(s.tenant_max_bytes, 3u << 20);
	KVT_EXPECT(s.tenant_used_bytes <= s.tenant_max_bytes);
	KVT_EXPECT_EQ(s.nr_active, nr);
	KVT_EXPECT_LE(s.nr_magazine, 0);
	stop();
}

/* More pages than one turn gives back: what is asked of the pool next waits for them. */
KVT_TEST(a_large_pool_is_closed_and_opened_again)
{
	enum { PAGES = 3000 };
	static struct kv_grant g[PAGES];
	const char *args[] = {"--host-bytes", "512MiB", NULL};

	start(args);
	for (u32 i = 0; i < 3; i++) {
		KVT_EXPECT_EQ(kvc_alloc(pool, PAGES, KV_GFP_NOWAIT | KV_GFP_GROW, g), 0);
		KVT_EXPECT_EQ(stat_now().nr_active, PAGES);
		kvc_pool_close(pool);
		pool = ipc_pool(c);
		KVT_EXPECT_EQ(stat_now().nr_active, 0);
	}
	stop();
}

KVT_MAIN()
