/* SPDX-License-Identifier: Apache-2.0 */
/* Extents, pools and events, against a scripted kvmd. */
#include "tests/unit/client/common.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>

static struct fake fake;
static struct kvc *c;
static struct kvc_pool *pool;

static void start(void)
{
	fake_start(&fake);
	c = fake_connect(&fake, 5000);
	pool = fake_pool(&fake, c);
}

static void stop(void)
{
	kvc_close(c);
	fake_stop(&fake);
}

static u32 nr_events, event_types[8], event_nr;

static void on_event(void *arg, const struct kvc_event *event)
{
	event_types[nr_events++ % 8] = event->type;
	event_nr = event->nr;
	if (event->type == KV_MSG_REVOKE)
		KVT_EXPECT_EQ(event->pages[0].pfn, 5);
}

static bool mapped(u32 pfn)
{
	return kvc_page_addr(pool, pfn) != NULL;
}

KVT_TEST(page_without_its_extent_is_not_handed_out)
{
	struct kv_grant g[2];

	start();
	fake.withhold_extents = true;
	KVT_EXPECT_EQ(kvc_alloc(pool, 2, KV_GFP_NOWAIT, g), -EPROTO);
	KVT_EXPECT_HAS(kvc_strerror(c), "extent is not mapped");
	fake_extent_add(&fake, 0);
	fake.next_pfn = 4;
	KVT_EXPECT_EQ(kvc_alloc(pool, 2, KV_GFP_NOWAIT, g), 0);
	KVT_EXPECT_EQ(kvc_flush(c), 0);
	KVT_EXPECT_EQ(fake.pages_freed, 2); /* the refused ones went back */
	stop();
}

KVT_TEST(pages_lie_where_the_geometry_says)
{
	struct kvc_pool_info info;
	struct kv_grant g[40];

	start();
	KVT_EXPECT_EQ(kvc_alloc(pool, 40, KV_GFP_NOWAIT, g), 0);
	kvc_pool_get_info(pool, &info);
	for (u32 i = 0; i < 40; i++) {
		u8 *addr = kvc_page_addr(pool, g[i].pfn);

		KVT_EXPECT(addr ==
			   (u8 *)info.base + kv_page_offset(&info.geometry, g[i].pfn));
		memset(addr, (int)i + 1, kv_page_bytes(&info.layout));
	}
	for (u32 i = 0; i < 40; i++) {
		const u8 *addr = kvc_page_addr(pool, g[i].pfn);

		KVT_EXPECT_EQ(addr[0], i + 1);
		KVT_EXPECT_EQ(addr[kv_page_bytes(&info.layout) - 1], i + 1);
	}
	KVT_EXPECT(!mapped(FAKE_PAGES));
	KVT_EXPECT(!mapped(FAKE_PAGES - 1));
	stop();
}

static u32 count_fds(void)
{
	DIR *d = opendir("/proc/self/fd");
	u32 n = 0;

	while (readdir(d))
		n++;
	closedir(d);
	return n;
}

/* cases O12: the same extent twice is mapped once, the second descriptor is closed */
KVT_TEST(o12_extent_given_twice_is_mapped_once)
{
	u32 fds;
	u8 *addr;

	start();
	fake_extent_add(&fake, 3);
	kvc_dispatch(c, NULL, NULL);
	addr = kvc_page_addr(pool, 3 << FAKE_SHIFT);
	KVT_EXPECT(addr != NULL);
	*addr = 77;
	fds = count_fds();
	fake.next_serial--; /* the same serial again */
	fake_extent_add(&fake, 3);
	kvc_dispatch(c, NULL, NULL);
	KVT_EXPECT_EQ(count_fds(), fds);
	KVT_EXPECT_EQ(*addr, 77);
	stop();
}

/* cases O40: unmapped under a kernel (LMCache 3536) */
KVT_TEST(o40_unmap_waits_for_the_steps_that_had_begun)
{
	struct kvc_step *a, *b, *later;

	start();
	fake_extent_add(&fake, 2);
	kvc_dispatch(c, NULL, NULL);
	KVT_EXPECT_EQ(kvc_step_begin(c, &a), 0);
	KVT_EXPECT_EQ(kvc_step_begin(c, &b), 0);
	fake_extent_remove(&fake, 2);
	KVT_EXPECT_EQ(kvc_dispatch(c, on_event, NULL), 1);
	KVT_EXPECT_EQ(event_types[0], KV_MSG_EXTENT_REMOVED);
	KVT_EXPECT_EQ(kvc_step_begin(c, &later), 0);
	*(volatile u8 *)kvc_page_addr(pool, 2 << FAKE_SHIFT) = 1; /* still there */
	kvc_step_retire(a);
	KVT_EXPECT(mapped(2 << FAKE_SHIFT));
	usleep(20000);
	KVT_EXPECT_EQ(fake.unmapped, 0);
	kvc_step_retire(b); /* the last that had begun; "later" does not matter */
	KVT_EXPECT(!mapped(2 << FAKE_SHIFT));
	expect_within(fake.unmapped == 1, 1000);
	kvc_step_retire(later);
	fake_extent_add(&fake, 2); /* acknowledged: the index may come again */
	kvc_dispatch(c, NULL, NULL);
	KVT_EXPECT(mapped(2 << FAKE_SHIFT));
	stop();
}

KVT_TEST(extent_index_reused_without_ack_ends_the_connection)
{
	struct kvc_step *step;

	start();
	fake_extent_add(&fake, 2);
	kvc_dispatch(c, NULL, NULL);
	KVT_EXPECT_EQ(kvc_step_begin(c, &step), 0);
	fake_extent_remove(&fake, 2);
	fake_extent_add(&fake, 2);
	KVT_EXPECT_EQ(kvc_dispatch(c, NULL, NULL), 1);
	KVT_EXPECT_EQ(kvc_dispatch(c, NULL, NULL), -ECONNRESET);
	KVT_EXPECT(mapped(2 << FAKE_SHIFT)); /* the running step keeps its memory */
	kvc_step_retire(step);
	stop();
}

KVT_TEST(events_reach_the_callback_in_order)
{
	struct kv_page_ref refs[2] = {{.pfn = 5, .tag = 7}, {.pfn = 6, .tag = 8}};
	struct pollfd p;

	start();
	p = (struct pollfd){.fd = kvc_event_fd(c), .events = POLLIN};
	KVT_EXPECT_EQ(poll(&p, 1, 0), 0);
	fake_extent_add(&fake, 1);
	fake_extent_remove(&fake, 1);
	fake_send_revoke(&fake, refs, 2);
	KVT_EXPECT_EQ(poll(&p, 1, 1000), 1);
	usleep(10000);
	KVT_EXPECT_EQ(kvc_dispatch(c, on_event, NULL), 2);
	KVT_EXPECT_EQ(event_types[0], KV_MSG_EXTENT_REMOVED);
	KVT_EXPECT_EQ(event_types[1], KV_MSG_REVOKE);
	KVT_EXPECT_EQ(event_nr, 2);
	KVT_EXPECT_EQ(poll(&p, 1, 0), 0);
	KVT_EXPECT_EQ(kvc_dispatch(c, on_event, NULL), 0);
	stop();
}

/* So many descriptors are free and no more. */
static void leave_fds(u32 nr, struct rlimit *ret_was)
{
	int first = open("/dev/null", O_RDONLY | O_CLOEXEC);
	struct rlimit none;

	KVT_EXPECT(first >= 0 && !getrlimit(RLIMIT_NOFILE, ret_was));
	close(first);
	none = *ret_was;
	none.rlim_cur = (rlim_t)first + nr;
	KVT_EXPECT(!setrlimit(RLIMIT_NOFILE, &none));
}

/* An engine with many connections of its own runs out of descriptors as an extent comes: it
 * is mapped when there is room again, and the session is not lost. */
KVT_TEST(extent_without_a_free_descriptor_waits)
{
	struct kv_layout other = fake_layout();
	struct kv_grant g[2];
	struct kvc_info info;
	struct kvc_pool *p;
	struct rlimit was;
	struct kv_stat st;

	start();
	fake_extent_add(&fake, 3);
	fake.withhold_extents = true;
	fake.next_pfn = 3 << FAKE_SHIFT;
	leave_fds(0, &was);
	KVT_EXPECT_EQ(kvc_dispatch(c, NULL, NULL), 0);
	KVT_EXPECT(!mapped(3 << FAKE_SHIFT));
	KVT_EXPECT_EQ(kvc_stat(pool, &st), 0); /* what needs none goes on */
	KVT_EXPECT_EQ(kvc_alloc(pool, 2, KV_GFP_NOWAIT, g), -ENOMEM);
	KVT_EXPECT(!setrlimit(RLIMIT_NOFILE, &was));
	KVT_EXPECT(kvc_dispatch(c, NULL, NULL) >= 0);
	KVT_EXPECT(mapped(3 << FAKE_SHIFT));
	KVT_EXPECT_EQ(kvc_alloc(pool, 2, KV_GFP_NOWAIT, g), 0);
	KVT_EXPECT_EQ(kvc_flush(c), 0);
	KVT_EXPECT_EQ(fake.pages_freed, 2); /* those of the first try */
	other.model_id[0] = 1;
	leave_fds(1, &was); /* for the other side, which makes the table */
	KVT_EXPECT_EQ(kvc_pool_open(c, &other, NULL, NULL, &p), -EMFILE);
	KVT_EXPECT(!setrlimit(RLIMIT_NOFILE, &was));
	KVT_EXPECT_EQ(kvc_pool_open(c, &other, NULL, NULL, &p), 0);
	KVT_EXPECT_EQ(kvc_stat(pool, &st), 0);
	kvc_info(c, &info);
	KVT_EXPECT_EQ(info.session, 1);
	stop();
}

static u32 nr_revokes;
static struct kvc_pool *first_pool;

/* At the first one the pool is closed, and another opened where it lay. */
static void reopen_on_revoke(void *arg, const struct kvc_event *event)
{
	if (event->type != KV_MSG_REVOKE || nr_revokes++)
		return;
	first_pool = pool;
	for (u32 i = 0; i < 64; i++) {
		kvc_pool_close(pool);
		pool = fake_pool(&fake, c);
		if (pool == first_pool)
			break;
	}
}

/* A pool's events are not the next one's, wherever that lies. */
KVT_TEST(events_of_a_closed_pool_are_not_the_next_ones)
{
	struct kv_page_ref ref = {.pfn = 5, .tag = 7};

	start();
	for (u32 i = 0; i < 16; i++) { /* what malloc() keeps for others is full then */
		kvc_pool_close(pool);
		pool = fake_pool(&fake, c);
	}
	fake_send_revoke(&fake, &ref, 1);
	fake_send_revoke(&fake, &ref, 1);
	KVT_EXPECT_EQ(kvc_dispatch(c, reopen_on_revoke, NULL), 2);
	if (pool != first_pool)
		KVT_NOTE("no pool came to lie where the first one lay");
	KVT_EXPECT_EQ(nr_revokes, 1);
	stop();
}

/* cases O01: second open of one handle (ucx 3192) */
KVT_TEST(o01_same_layout_is_the_same_pool)
{
	struct kvc_pool *again;

	start();
	again = fake_pool(&fake, c);
	KVT_EXPECT(again == pool);
	fake_extent_add(&fake, 0);
	kvc_dispatch(c, NULL, NULL);
	kvc_pool_close(again);
	KVT_EXPECT(mapped(0)); /* closing one leaves the other usable */
	kvc_pool_close(pool);
	pool = fake_pool(&fake, c);
	KVT_EXPECT(!mapped(0));
	stop();
}

KVT_TEST(close_leaves_nothing_behind)
{
	u32 fds = 0;

	for (u32 i = 0; i < 20; i++) {
		struct kv_grant g[40];

		memset(&fake, 0, sizeof(fake));
		fake_start(&fake);
		c = fake_connect(&fake, 5000);
		pool = fake_pool(&fake, c);
		KVT_EXPECT_EQ(kvc_alloc(pool, 40, KV_GFP_NOWAIT, g), 0);
		kvc_close(c);
		fake_stop(&fake);
		close(fake.ring_fd);
		close(fake.session_fd);
		close(fake.table_fd);
		close(fake.sq_efd);
		close(fake.cq_efd);
		if (fake.sock >= 0)
			close(fake.sock);
		if (i == 0)
			fds = count_fds();
	}
	KVT_EXPECT_EQ(count_fds(), fds);
}

KVT_TEST(unknown_backend_is_refused_by_name)
{
	struct kv_layout layout = fake_layout();
	struct kvc_pool *p = NULL;

	fake.backend = KV_BACKEND_CUDA_LEGACY + 1;
	fake_start(&fake);
	c = fake_connect(&fake, 5000);
	KVT_EXPECT_EQ(kvc_pool_open(c, &layout, NULL, NULL, &p), -ENODEV);
	KVT_EXPECT_HAS(kvc_strerror(c), "backend=3");
	KVT_EXPECT(p == NULL);
	layout.nr_scales = 4;
	KVT_EXPECT_EQ(kvc_pool_open(c, &layout, NULL, NULL, &p), -EINVAL);
	KVT_EXPECT_HAS(kvc_strerror(c), "nr_scales=4");
	stop();
}

KVT_MAIN()
