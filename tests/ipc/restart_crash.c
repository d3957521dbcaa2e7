/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What kvmd leaves is damaged, or half done: it is killed at any store that must survive
 * (cases O33).
 */
#include "tests/ipc/restart.h"

/* -------------------------------------------------------------------------- damage */

KVT_TEST(damaged_records_cost_their_pages_and_are_counted)
{
	struct kv_grant pages[24];
	struct kvc_pool *p1;
	struct kv_hit hits[8];
	struct kv_stat s;
	size_t bytes;
	struct kvc *c1;
	char *status;
	u8 *map;

	start();
	c1 = ipc_connect(&kvmd);
	p1 = ipc_pool(c1);
	KVT_EXPECT_EQ(kvc_alloc(p1, 24, KV_GFP_NOWAIT, pages), 0);
	for (u32 i = 0; i < 24; i++)
		fill(p1, pages[i].pfn, i);
	KVT_EXPECT_EQ(seal(p1, pages, 8, 9), 0);
	wait_findable(p1, 8, 9);
	map = records_map("kvmd-frames", &bytes);
	kill_kvmd();
	/* one bit each, anywhere in what the check word covers, in five records */
	for (u32 i = 6; i < 11; i++) {
		u32 bit = kvt_rand_below(512);

		map[KVD_FRAMES_OFF + pages[i].pfn * sizeof(struct kvd_frame) + bit / 8] ^=
			(u8)(1u << (bit % 8));
	}
	munmap(map, bytes);
	again();
	s = stat_of(p1);
	KVT_EXPECT(log_has("damage 5 (5 poisoned)"));
	status = ipc_admin(&kvmd, "{\"op\":\"status\"}");
	KVT_EXPECT(strstr(status, "ADOPT_DAMAGE") != NULL);
	free(status);
	KVT_EXPECT_EQ(s.nr_active, 24 - 8 - 3);
	KVT_EXPECT_EQ(s.nr_sealed, 6);
	for (u32 i = 0; i < 24; i++)
		KVT_EXPECT_EQ(ipc_passes(c1, p1, pages[i]), i < 6 || i >= 11);
	KVT_EXPECT_EQ(lookup(p1, 8, 9, hits), 6); /* a miss from there on */
	KVT_EXPECT_EQ(kvc_alloc(p1, 5, KV_GFP_NOWAIT, pages + 6), 0);
	kvc_close(c1);
	ipc_stop(&kvmd);
}

/* A reference count that fits no record: the page is taken from its holders. */
KVT_TEST(damaged_leases_cost_the_page)
{
	struct kv_grant pages[8];
	u32 nr_pages;
	struct kvc_pool *p1;
	size_t bytes;
	struct kvc *c1;
	u16 *refs;

	start();
	c1 = ipc_connect(&kvmd);
	p1 = ipc_pool(c1);
	KVT_EXPECT_EQ(kvc_alloc(p1, 8, KV_GFP_NOWAIT, pages), 0);
	nr_pages = stat_of(p1).nr_pages_max;
	KVT_EXPECT(stat_of(p1).nr_pages < nr_pages);
	refs = (u16 *)records_map("kvmd-leases", &bytes);
	kill_kvmd();
	refs[pages[1].pfn] ^= 1u << kvt_rand_below(16);
	/* a page that nobody has, and that no extent has ever covered */
	refs[nr_pages - 1] ^= 1u;
	again();
	KVT_EXPECT_EQ(stat_of(p1).nr_active, 7);
	KVT_EXPECT(log_has("damage 2 (0 poisoned)"));
	for (u32 i = 0; i < 8; i++)
		KVT_EXPECT_EQ(ipc_passes(c1, p1, pages[i]), i != 1);
	kvc_close(c1);
	/* Its end looks at all that it held. */
	for (int i = 0; i < 3000 && !log_has("ended"); i++)
		usleep(1000);
	c1 = ipc_connect(&kvmd);
	p1 = ipc_pool(c1);
	KVT_EXPECT_EQ(stat_of(p1).nr_active, 0);
	KVT_EXPECT(!log_has("invariant broken"));
	kvc_close(c1);
	ipc_stop(&kvmd);
}

/* A kvmd that cannot adopt for want of memory leaves all as it was: the record that was
 * being changed is put right by the next one. */
KVT_TEST(failed_adoption_leaves_the_undo_entry)
{
	struct kv_grant pages[4];
	struct kvd_image *image;
	struct kvd_frame *f;
	struct kvc_pool *p1;
	size_t bytes;
	struct kvc *c1;
	u8 *map;

	start();
	c1 = ipc_connect(&kvmd);
	p1 = ipc_pool(c1);
	KVT_EXPECT_EQ(kvc_alloc(p1, 4, KV_GFP_NOWAIT, pages), 0);
	image = (struct kvd_image *)records_map("kvmd-image", &bytes);
	map = records_map("kvmd-frames", &bytes);
	kill_kvmd();
	f = (struct kvd_frame *)(map + KVD_FRAMES_OFF) + pages[2].pfn;
	image->undo.pool_id = ((struct kvd_frames_hdr *)map)->pool_id;
	image->undo.pfn = pages[2].pfn;
	memcpy(image->undo.image, f, sizeof(image->undo.image));
	image->undo.valid = 1;
	f->refs++; /* and here it was killed */
	again_with("table_alloc:times=1");
	waitpid(kvmd.pid, NULL, 0);
	KVT_EXPECT_EQ(image->undo.valid, 1);
	again();
	KVT_EXPECT_EQ(stat_of(p1).nr_active, 4);
	KVT_EXPECT(log_has("1 undone") && log_has("damage 0"));
	for (u32 i = 0; i < 4; i++)
		KVT_EXPECT(ipc_passes(c1, p1, pages[i]));
	kvc_close(c1);
	ipc_stop(&kvmd);
}

/* A pool whose head is damaged starts empty, and its memory is not the old one's. */
KVT_TEST(damaged_head_costs_the_pool)
{
	struct kv_grant pages[8], other[8];
	struct kvc_pool *p1, *p2;
	struct kvc *c1, *c2;
	size_t bytes;
	u8 *map;

	start();
	c1 = ipc_connect(&kvmd);
	p1 = ipc_pool(c1);
	KVT_EXPECT_EQ(kvc_alloc(p1, 8, KV_GFP_NOWAIT, pages), 0);
	fill(p1, pages[0].pfn, 1);
	map = records_map("kvmd-frames", &bytes);
	kill_kvmd();
	map[16] ^= 4;
	again();
	/* another one comes first: the new pool has an extent when the old client is back */
	c2 = ipc_connect(&kvmd);
	p2 = ipc_pool(c2);
	KVT_EXPECT_EQ(kvc_alloc(p2, 1, KV_GFP_NOWAIT, other), 0);
	KVT_EXPECT_EQ(kvc_alloc(p1, 8, KV_GFP_NOWAIT, other), 0);
	KVT_EXPECT(!ipc_passes(c1, p1, pages[0]));
	KVT_EXPECT(log_has("damage 1 "));
	/* what one writes into the new pool, another one reads there */
	for (u32 i = 0; i < 8; i++)
		fill(p1, other[i].pfn, 40 + i);
	KVT_EXPECT_EQ(seal(p1, other, 8, 3), 0);
	wait_findable(p2, 8, 3);
	for (u32 i = 0; i < 8; i++)
		KVT_EXPECT(filled(p2, other[i].pfn, 40 + i));
	kvc_close(c1);
	kvc_close(c2);
	ipc_stop(&kvmd);
}

/* A session's entry that is damaged: that session is over, the others go on. */
KVT_TEST(damaged_session_costs_the_session)
{
	struct kv_grant mine[8], theirs[8];
	struct kvd_image *image;
	struct kvc_pool *p1, *p2;
	struct kvc *c1, *c2;
	size_t bytes;

	start();
	c1 = ipc_connect(&kvmd);
	c2 = ipc_connect(&kvmd);
	p1 = ipc_pool(c1);
	p2 = ipc_pool(c2);
	KVT_EXPECT_EQ(kvc_alloc(p1, 8, KV_GFP_NOWAIT, mine), 0);
	KVT_EXPECT_EQ(kvc_alloc(p2, 8, KV_GFP_NOWAIT, theirs), 0);
	image = (struct kvd_image *)records_map("kvmd-image", &bytes);
	kill_kvmd();
	image->sessions[0].cookie[kvt_rand_below(16)] ^= 1;
	again();
	expect_within(stat_of(p2).nr_active == 8 && !stat_of(p2).nr_quarantine, 1000);
	KVT_EXPECT(ipc_passes(c2, p2, theirs[7]));
	stat_of(p1);
	KVT_EXPECT(!ipc_passes(c1, p1, mine[7]));
	KVT_EXPECT_EQ(kvc_alloc(p1, 8, KV_GFP_NOWAIT, mine), 0);
	KVT_EXPECT(ipc_passes(c1, p1, mine[7]));
	kvc_close(c1);
	kvc_close(c2);
	ipc_stop(&kvmd);
}

/* Tokens have no check word: one that is wrong fits no key. */
KVT_TEST(damaged_tokens_are_a_miss)
{
	struct kv_grant pages[8];
	struct kvc_pool *p1;
	struct kv_hit hits[8];
	size_t bytes;
	struct kvc *c1;
	u32 *tokens;

	start();
	c1 = ipc_connect(&kvmd);
	p1 = ipc_pool(c1);
	KVT_EXPECT_EQ(kvc_alloc(p1, 8, KV_GFP_NOWAIT, pages), 0);
	KVT_EXPECT_EQ(seal(p1, pages, 8, 9), 0);
	wait_findable(p1, 8, 9);
	tokens = (u32 *)records_map("kvmd-tokens", &bytes);
	kill_kvmd();
	tokens[pages[3].pfn * KV_PAGE_TOKENS + 17] ^= 1u << 5;
	again();
	KVT_EXPECT_EQ(lookup(p1, 8, 9, hits), 3);
	kvc_close(c1);
	ipc_stop(&kvmd);
}

/* --------------------------------------------------------------------- crash points */

/* Starts a new kvmd whenever one has died. Its thread must live as long as they do:
 * --die-with-parent means the thread that forked. */
static struct {
	pthread_t thread;
	bool stop;
	u32 deaths;
	const char *next_faults; /* of the next start: it may die while it adopts */
} super;

static void *supervise(void *arg)
{
	while (!__atomic_load_n(&super.stop, __ATOMIC_ACQUIRE)) {
		const char *faults;

		if (waitpid(kvmd.pid, NULL, WNOHANG) != kvmd.pid) {
			usleep(200);
			continue;
		}
		__atomic_add_fetch(&super.deaths, 1, __ATOMIC_RELEASE);
		faults = __atomic_exchange_n(&super.next_faults, NULL, __ATOMIC_ACQ_REL);
		again_with(faults ? faults : "crash=0");
	}
	return NULL;
}

struct model {
	struct kvc *c;
	struct kvc_pool *pool;
	struct kv_grant held[80];
	u32 seeds[80];
	u32 nr;
};

static void model_check(struct model *m)
{
	for (u32 i = 0; i < m->nr; i++) {
		if (!filled(m->pool, m->held[i].pfn, m->seeds[i]))
			KVT_FAIL("page %u of %u: wrong bytes", i, m->nr);
		if (!ipc_passes(m->c, m->pool, m->held[i]))
			KVT_FAIL("page %u of %u is not ours any more", i, m->nr);
	}
}

static void model_alloc(struct model *m, u32 nr, u32 seed)
{
	struct kv_grant *g = m->held + m->nr;

	KVT_EXPECT_EQ(kvc_alloc(m->pool, nr, KV_GFP_PREFILL, g), 0);
	for (u32 i = 0; i < nr; i++) {
		m->seeds[m->nr] = seed + i;
		fill(m->pool, g[i].pfn, seed + i);
		m->nr++;
	}
}

/* kvmd may die anywhere in it; every call must succeed all the same. */
static void workload(struct model *a, struct model *b, u32 round)
{
	struct kv_hit hits[8];
	struct kvc_pool *extra;
	struct kv_grant fork_of;
	u32 seed = 1000 + round * 10, got;

	model_alloc(a, 12, 1);
	model_alloc(b, 1, 100);
	model_alloc(b, 1, 101);
	KVT_EXPECT_EQ(seal(a->pool, a->held, 6, seed), 0);
	got = lookup(b->pool, 6, seed, hits);
	for (u32 i = 0; i < got; i++) {
		KVT_EXPECT(filled(b->pool, hits[i].grant.pfn, 1 + i));
		KVT_EXPECT(ipc_passes(b->c, b->pool, hits[i].grant));
	}
	KVT_EXPECT_EQ(kvc_pin(a->pool, a->held + 8, 2), 0);
	KVT_EXPECT_EQ(kvc_fork(a->pool, a->held + 9, 1, KV_GFP_PREFILL, &fork_of), 0);
	KVT_EXPECT_EQ(kvc_free(a->pool, &fork_of, 1), 0);
	KVT_EXPECT_EQ(kvc_free(a->pool, a->held + 8, 2), 0);
	KVT_EXPECT_EQ(kvc_flush(a->c), 0);
	if (got)
		for (u32 i = 0; i < got; i++)
			KVT_EXPECT_EQ(kvc_unpin(b->pool, &hits[i].grant, 1), 0);
	KVT_EXPECT_EQ(kvc_flush(b->c), 0);
	extra = ipc_pool(b->c);
	kvc_pool_close(extra);
	model_check(a);
	model_check(b);
	KVT_EXPECT_EQ(kvc_free(a->pool, a->held, a->nr), 0);
	KVT_EXPECT_EQ(kvc_flush(a->c), 0);
	KVT_EXPECT_EQ(kvc_free(b->pool, b->held, b->nr), 0);
	KVT_EXPECT_EQ(kvc_flush(b->c), 0);
	a->nr = b->nr = 0;
}

/* As ipc_admin(), of a kvmd that may go while it answers. */
static char *ask(const char *request)
{
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	char *ret = calloc(1, 1 << 16);
	ssize_t n = 0;

	strcpy(addr.sun_path, kvmd.admin_path);
	for (int i = 0; i < 1000 && n <= 0; i++) {
		int sock = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

		if (!connect(sock, (void *)&addr, sizeof(addr)) &&
		    send(sock, request, strlen(request), MSG_NOSIGNAL) > 0)
			n = recv(sock, ret, (1 << 16) - 1, 0);
		close(sock);
		if (n <= 0)
			usleep(5000);
	}
	if (n <= 0)
		KVT_FAIL("admin socket: no reply to %s", request);
	ret[n] = 0;
	return ret;
}

static void arm(u64 n)
{
	char request[96];

	snprintf(request, sizeof(request), "{\"op\":\"fault\",\"spec\":\"crash=%llu\"}\n",
		 (unsigned long long)n);
	free(ask(request));
}

/* kvc_open() does not wait for a kvmd that goes while it says HELLO. */
static struct kvc *connect_patiently(void)
{
	struct kvc_options opt = {.size_bytes = sizeof(opt),
				  .socket_path = kvmd.socket_path,
				  .client_name = "test"};
	struct kvc *c;
	int r = -1;

	if (ipc_on_cuda())
		ipc_gpu_context(0);
	for (int i = 0; i < 500 && r; i++) {
		r = kvc_open(&opt, &c);
		if (r)
			usleep(10000);
	}
	if (r)
		KVT_FAIL("kvc_open: %d %s", r, kvc_strerror(NULL));
	return c;
}

/* Return: it died. */
static bool crash_at(u64 n, u32 round, bool fresh)
{
	u32 before = super.deaths;
	struct model a = {0}, b = {0};
	struct kv_stat s;
	char *audit;

	if (!fresh)
		arm(n);
	a.c = connect_patiently();
	b.c = connect_patiently();
	a.pool = ipc_pool(a.c);
	b.pool = ipc_pool(b.c);
	workload(&a, &b, round);
	/* What a request that died with kvmd had got, its client gives back when it is
	 * attached again; both are, after this. */
	stat_of(b.pool);
	stat_of(a.pool);
	stat_of(b.pool);
	/* A session that was closed while kvmd was away is seen within a second. */
	for (int i = 0; i < 3000; i++) {
		s = stat_of(a.pool);
		if (!s.nr_active && !s.nr_sealed)
			break;
		usleep(1000);
	}
	if (s.nr_active || s.nr_sealed) {
		ipc_show_log(&kvmd);
		printf("# %s\n", ask("{\"op\":\"pages\",\"pool\":1}\n"));
		printf("# %s\n", ask("{\"op\":\"ps\"}\n"));
		KVT_FAIL("crash point %llu: %u active, %u sealed left",
			 (unsigned long long)n, s.nr_active, s.nr_sealed);
	}
	kvc_close(a.c);
	kvc_close(b.c);
	arm(0);
	audit = ask("{\"op\":\"audit\"}\n");
	if (!strstr(audit, "\"damage\":0")) {
		ipc_show_log(&kvmd);
		KVT_FAIL("crash point %llu: %s", (unsigned long long)n, audit);
	}
	free(audit);
	return __atomic_load_n(&super.deaths, __ATOMIC_ACQUIRE) != before;
}

KVT_TEST_T(killed_at_any_store, 600)
{
	const char *all = getenv("KVT_LONG");
	u32 died = 0, run = 0, nested = 0;
	char faults[32];
	u64 n = 1;

	start();
	pthread_create(&super.thread, NULL, supervise, NULL);
	for (;; run++) {
		if (run % 3 == 2) { /* the one that takes over dies as well */
			snprintf(faults, sizeof(faults), "crash=%u",
				 1 + kvt_rand_below(400));
			__atomic_store_n(&super.next_faults, faults, __ATOMIC_RELEASE);
			nested++;
		}
		if (!crash_at(n, run, false))
			break;
		died++;
		__atomic_store_n(&super.next_faults, NULL, __ATOMIC_RELEASE);
		n += all ? 1 : 1 + kvt_rand_below(20);
	}
	KVT_NOTE("%llu crash points, %u run, %u deaths, %u of them twice",
		 (unsigned long long)n, run, died, nested);
	KVT_EXPECT(died > 20 && !log_has("damage 1") && !log_has("assert"));
	__atomic_store_n(&super.stop, true, __ATOMIC_RELEASE);
	pthread_join(super.thread, NULL);
	eng_private_kvmd_stop(&kvmd);
}

KVT_MAIN()
