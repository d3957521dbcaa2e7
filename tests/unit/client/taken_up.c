/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A second kvmd behind one connection: sessions that are taken up, or are not, and what is
 * still under way of the first one.
 */
#include "tests/unit/client/common.h"

#include <sys/socket.h>

static struct fake f;
static struct kvc *c;
static struct kvc_pool *pool;

static void start(void)
{
	fake_start(&f);
	c = fake_connect(&f, 1000);
	pool = fake_pool(&f, c);
}

static void stop(void)
{
	kvc_close(c);
	fake_stop(&f);
}

/* The next kvmd: with the session, or without. */
static void next_kvmd(bool resume)
{
	shutdown(f.sock, SHUT_RDWR);
	expect_within(f.sock < 0, 1000);
	f.resume = resume;
	f.table_epoch++;
}

static bool mapped(u32 extent)
{
	return kvc_page_addr(pool, extent << FAKE_SHIFT) != NULL;
}

static u64 session_of(struct kvc *conn)
{
	struct kvc_info info;

	kvc_info(conn, &info);
	return info.session;
}

/* ------------------------------------------------------------------------- extents */

/*
 * In a new session an extent comes where a step of the old one still reads, so it is not
 * mapped yet; then kvmd wants it back. That is no reason to lose the session.
 */
KVT_TEST(extent_that_waits_for_an_old_step_can_be_removed)
{
	struct kvc_step *step;
	struct kv_stat st;

	start();
	fake_extent_add(&f, 0);
	kvc_dispatch(c, NULL, NULL);
	KVT_EXPECT_EQ(kvc_step_begin(c, &step), 0);
	next_kvmd(false);
	KVT_EXPECT_EQ(kvc_stat(pool, &st), 0);
	KVT_EXPECT_EQ(session_of(c), 2);
	fake_extent_add(&f, 0);
	fake_extent_remove(&f, 0);
	KVT_EXPECT(kvc_dispatch(c, NULL, NULL) >= 0);
	KVT_EXPECT_EQ(kvc_stat(pool, &st), 0);
	KVT_EXPECT_EQ(session_of(c), 2);
	KVT_EXPECT(mapped(0)); /* the step's */
	KVT_EXPECT_EQ(f.unmapped, 0);
	kvc_step_retire(step);
	KVT_EXPECT(!mapped(0));
	expect_within(f.unmapped == 1, 1000);
	fake_extent_add(&f, 0); /* acknowledged: the index may come again */
	kvc_dispatch(c, NULL, NULL);
	KVT_EXPECT(mapped(0));
	stop();
}

/*
 * kvmd added an extent and wanted it back, and both messages went down with it. The next
 * one only asks for it back, each time that we attach.
 */
KVT_TEST(extent_never_seen_can_be_removed_by_the_next_kvmd)
{
	struct kv_stat st;

	start();
	next_kvmd(true);
	KVT_EXPECT_EQ(kvc_stat(pool, &st), 0);
	KVT_EXPECT_EQ(session_of(c), 1);
	f.extent_serial[5] = 77;
	fake_extent_remove(&f, 5);
	KVT_EXPECT(kvc_dispatch(c, NULL, NULL) >= 0);
	expect_within(f.unmapped == 1, 1000);
	KVT_EXPECT_EQ(kvc_stat(pool, &st), 0);
	KVT_EXPECT_EQ(session_of(c), 1);
	stop();
}

/* Of one that was never given, in a session that nobody took up, nothing is believed. */
KVT_TEST(extent_never_given_cannot_be_removed)
{
	start();
	f.extent_serial[5] = 77;
	fake_extent_remove(&f, 5);
	KVT_EXPECT_EQ(kvc_dispatch(c, NULL, NULL), -ECONNRESET);
	stop();
}

KVT_MAIN()
