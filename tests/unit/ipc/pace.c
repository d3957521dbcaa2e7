/* SPDX-License-Identifier: Apache-2.0 */
/* How fast a uid may connect: the buckets by themselves, and a kvmd that is connected to
 * without end. */
#include "kvmd/ipc/pace.h"

#include "base/clock.h"
#include "tests/unit/ipc/common.h"
#include "tests/kvt.h"

#define EACH KVD_PACE_EACH_NS

static u32 taken(struct kvd_pace *p, u32 uid, u64 now_ns, u32 tries)
{
	u32 nr = 0;

	while (tries--)
		nr += kvd_pace_take(p, uid, now_ns);
	return nr;
}

KVT_TEST(a_burst_then_a_steady_rate)
{
	static struct kvd_pace p;
	u64 now = 5 * KV_NSEC_PER_SEC;

	KVT_EXPECT_EQ(taken(&p, 7, now, 2000), KVD_PACE_BURST);
	KVT_EXPECT_EQ(taken(&p, 7, now + EACH - 1, 5), 0);
	for (u32 i = 1; i < 1000; i++)
		KVT_EXPECT_EQ(taken(&p, 7, now + i * EACH, 3), 1);
	/* half of the burst comes back in half of its time, and never more than all */
	now += 1000 * EACH + KVD_PACE_BURST / 2 * EACH;
	KVT_EXPECT_EQ(taken(&p, 7, now, 2000), KVD_PACE_BURST / 2 + 1);
	now += 100 * KVD_PACE_BURST * EACH;
	KVT_EXPECT_EQ(taken(&p, 7, now, 2000), KVD_PACE_BURST);
}

KVT_TEST(no_uid_pays_for_another)
{
	static struct kvd_pace p;
	u64 now = 1;

	for (u32 uid = 0; uid < KVD_PACE_UIDS; uid++)
		KVT_EXPECT_EQ(taken(&p, uid, now, 2000), KVD_PACE_BURST);
	KVT_EXPECT_EQ(p.nr, KVD_PACE_UIDS);
}

KVT_TEST(a_bucket_is_not_got_rid_of_by_many_uids)
{
	static struct kvd_pace p;
	u64 now = KV_NSEC_PER_SEC;
	u32 uid, nr = 0;

	for (uid = 0; uid < KVD_PACE_UIDS; uid++)
		taken(&p, uid, now, KVD_PACE_BURST);
	/* a thousand more uids do not get a thousand more bursts */
	for (; uid < 1000; uid++)
		nr += taken(&p, uid, now, KVD_PACE_BURST);
	KVT_EXPECT_EQ(nr, 0);
	KVT_EXPECT_EQ(taken(&p, 1, now, 1), 0);
	/* what one of them must wait for is one connection's time, not a whole burst's */
	KVT_EXPECT_EQ(taken(&p, uid, now + EACH, 5), 1);
	/* and full buckets are forgotten without harm */
	now += (KVD_PACE_BURST + 1) * EACH;
	KVT_EXPECT_EQ(taken(&p, 5000, now, 2000), KVD_PACE_BURST);
}

static double counter(const struct daemon *d, const char *name)
{
	char path[64];

	snprintf(path, sizeof(path), "counters.%s", name);
	return daemon_number(d, "{\"op\":\"stat\"}", path);
}

/* Connections that say nothing: the bucket is empty then. */
static void spend(const struct daemon *d)
{
	struct raw c;

	for (u32 i = 0; i < KVD_PACE_BURST || !counter(d, "connections_delayed"); i++) {
		raw_connect(&c, d);
		close(c.fd);
		KVT_EXPECT(i < 4 * KVD_PACE_BURST);
	}
}

KVT_TEST(who_comes_too_fast_waits_and_is_served)
{
	static struct raw c[24];
	struct daemon d;
	u64 start_ns;

	daemon_start(&d, NULL);
	spend(&d);
	start_ns = kv_now_ns();
	for (u32 i = 0; i < KV_ARRAY_SIZE(c); i++)
		raw_connect(&c[i], &d);
	for (u32 i = 0; i < KV_ARRAY_SIZE(c); i++) {
		KVT_EXPECT_EQ(raw_hello(&c[i], "later"), 0);
		/* in the order in which they came */
		KVT_EXPECT(!i || c[i].hello.client_id > c[i - 1].hello.client_id);
	}
	/* the first two may have been due when they came */
	KVT_EXPECT(kv_now_ns() - start_ns > (KV_ARRAY_SIZE(c) - 2) * EACH);
	KVT_EXPECT_EQ(counter(&d, "connections_too_fast"), 0);
	for (u32 i = 0; i < KV_ARRAY_SIZE(c); i++)
		raw_close(&c[i]);
	daemon_wait(&d, "{\"op\":\"status\"}", "sessions", 0, 2000);
	daemon_stop(&d);
}

KVT_TEST(the_waiting_room_has_an_end)
{
	static struct raw c[100];
	struct daemon d;
	u32 left = 0;
	int fds;

	daemon_start(&d, NULL);
	fds = daemon_nr_fds(&d);
	spend(&d);
	for (u32 i = 0; i < KV_ARRAY_SIZE(c); i++)
		raw_connect(&c[i], &d);
	for (u32 i = 0; i < KV_ARRAY_SIZE(c); i++)
		left += raw_hello_try(&c[i], "many") == -ECONNRESET;
	KVT_EXPECT(left > 0 && left < KV_ARRAY_SIZE(c));
	KVT_EXPECT(counter(&d, "connections_too_fast") >= left);
	for (u32 i = 0; i < KV_ARRAY_SIZE(c); i++)
		raw_close(&c[i]);
	daemon_wait(&d, "{\"op\":\"status\"}", "sessions", 0, 3000);
	for (u32 i = 0; i < 200 && daemon_nr_fds(&d) > fds; i++)
		usleep(10000);
	KVT_EXPECT_LE(daemon_nr_fds(&d), fds);
	daemon_stop(&d);
}

KVT_TEST(a_pause_ends)
{
	struct daemon d;
	struct raw c;
	double delayed;

	daemon_start(&d, NULL);
	spend(&d);
	usleep(600000); /* those who waited are served, and 50 more may come */
	delayed = counter(&d, "connections_delayed");
	for (u32 i = 0; i < 50; i++) {
		raw_connect(&c, &d);
		KVT_EXPECT_EQ(raw_hello(&c, "after"), 0);
		raw_close(&c);
	}
	KVT_EXPECT_EQ(counter(&d, "connections_delayed"), delayed);
	daemon_stop(&d);
}

KVT_MAIN()
