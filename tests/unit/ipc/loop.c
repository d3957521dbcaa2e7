/* SPDX-License-Identifier: Apache-2.0 */
/* The event loop, on io_uring and on epoll, alone and under a daemon. */
#include "kvmd/ipc/loop.h"

#include <fcntl.h>
#include <sys/eventfd.h>

#include "base/clock.h"
#include "tests/kvt.h"
#include "tests/unit/ipc/common.h"

#define STATUS "{\"op\":\"status\"}"

static struct daemon d;
static struct kvd_loop *loop;

struct seen {
	struct kvd_watch watch;
	u32 calls, events;
	struct kvd_watch *victim;
};

static void note(void *arg, u32 events)
{
	struct seen *s = arg;

	s->calls++;
	s->events |= events;
	if (s->victim)
		kvd_loop_del(loop, s->victim);
}

static void watch(struct seen *s, int fd)
{
	memset(s, 0, sizeof(*s));
	s->watch = (struct kvd_watch){
		.fd = fd, .events = KVD_LOOP_IN, .ready = note, .arg = s};
	KVT_EXPECT_EQ(kvd_loop_add(loop, &s->watch), 0);
}

static void wait_ms(int ms)
{
	KVT_EXPECT(kvd_loop_wait(loop, kv_now_ns() + (u64)ms * KV_NSEC_PER_MSEC) >= 0);
}

/* Readable stays readable: nothing is lost when a callback leaves data behind. */
static void level_triggered(void)
{
	struct seen s;
	int p[2], i;

	KVT_EXPECT(!pipe2(p, O_CLOEXEC | O_NONBLOCK));
	watch(&s, p[0]);
	wait_ms(10);
	KVT_EXPECT_EQ(s.calls, 0);
	KVT_EXPECT_EQ(write(p[1], "x", 1), 1);
	for (i = 1; i <= 5; i++) {
		wait_ms(1000);
		KVT_EXPECT_EQ(s.calls, i);
	}
	KVT_EXPECT_EQ(s.events, KVD_LOOP_IN);
	close(p[1]);
	wait_ms(1000);
	KVT_EXPECT(s.events & KVD_LOOP_HUP);
	kvd_loop_del(loop, &s.watch);
	close(p[0]);
}

/* Both are ready; whichever runs first removes the other: that one must not run. */
static void removed_watch_stays_silent(void)
{
	int a = eventfd(1, EFD_CLOEXEC), b = eventfd(1, EFD_CLOEXEC), i;
	struct seen sa, sb;

	for (i = 0; i < 100; i++) {
		watch(&sa, a);
		watch(&sb, b);
		sa.victim = &sb.watch;
		sb.victim = &sa.watch;
		wait_ms(1000);
		wait_ms(0);
		KVT_EXPECT((sa.calls > 0) != (sb.calls > 0));
		kvd_loop_del(loop, &sa.watch);
		kvd_loop_del(loop, &sb.watch);
	}
	close(a);
	close(b);
}

/* The slot of a removed watch is used again at once: an old event must not reach the new
 * one. */
static void slots_are_not_mixed_up(void)
{
	int ready = eventfd(1, EFD_CLOEXEC), quiet = eventfd(0, EFD_CLOEXEC), i;
	struct seen old, new;

	for (i = 0; i < 1000; i++) {
		watch(&old, ready);
		wait_ms(0); /* armed, the event may be on its way */
		kvd_loop_del(loop, &old.watch);
		watch(&new, quiet);
		wait_ms(0);
		wait_ms(0);
		KVT_EXPECT_EQ(new.calls, 0);
		kvd_loop_del(loop, &new.watch);
	}
	close(ready);
	close(quiet);
}

static void wanted_events_change(void)
{
	struct seen s;
	int p[2];

	KVT_EXPECT(!pipe2(p, O_CLOEXEC | O_NONBLOCK));
	watch(&s, p[1]);
	wait_ms(5);
	KVT_EXPECT_EQ(s.calls, 0); /* a pipe's end for writing is never readable */
	kvd_loop_modify(loop, &s.watch, KVD_LOOP_OUT);
	wait_ms(1000);
	KVT_EXPECT_EQ(s.events, KVD_LOOP_OUT);
	kvd_loop_modify(loop, &s.watch, KVD_LOOP_IN);
	s.calls = 0;
	wait_ms(5);
	wait_ms(5);
	KVT_EXPECT_EQ(s.calls, 0);
	kvd_loop_del(loop, &s.watch);
	close(p[0]);
	close(p[1]);
}

/* Facts F-fds: the counter belongs to the client as well, which may fill it and make it
 * block. */
static void kick_does_not_block(void)
{
	int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	u64 full = 0xfffffffffffffffeull, v;

	kvd_loop_kick(loop, fd);
	wait_ms(0);
	KVT_EXPECT_EQ(read(fd, &v, sizeof(v)), sizeof(v));
	KVT_EXPECT_EQ(v, 1);
	KVT_EXPECT_EQ(write(fd, &full, sizeof(full)), sizeof(full));
	fcntl(fd, F_SETFL, 0);	 /* blocking from now on */
	kvd_loop_kick(loop, fd); /* one that blocks does so until the case's time is up */
	wait_ms(0);
	kvd_loop_drain(fd);
	kvd_loop_drain(fd); /* empty and blocking */
	kvd_loop_drain(fd);
	close(fd);
}

/* Nor do kicks pile up: each would be a request in the kernel for as long as the counter
 * is full, which is for good once the client is gone. */
static void kicks_do_not_pile_up(void)
{
	int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	u64 full = 0xfffffffffffffffeull, v, sum = 0;

	KVT_EXPECT_EQ(write(fd, &full, sizeof(full)), sizeof(full));
	fcntl(fd, F_SETFL, 0);
	for (u32 i = 0; i < 1000; i++) {
		kvd_loop_kick(loop, fd);
		wait_ms(0);
	}
	fcntl(fd, F_SETFL, O_NONBLOCK);
	KVT_EXPECT_EQ(read(fd, &v, sizeof(v)), sizeof(v));
	for (u32 i = 0; i < 20; i++) { /* what waited for room comes in now */
		wait_ms(1);
		sum += read(fd, &v, sizeof(v)) == sizeof(v) ? v : 0;
	}
	KVT_EXPECT_LE(sum, 1);
	/* and the next one is told again */
	kvd_loop_kick(loop, fd);
	wait_ms(0);
	KVT_EXPECT_EQ(read(fd, &v, sizeof(v)), sizeof(v));
	close(fd);
}

static void deadline_is_kept(void)
{
	u64 t0;
	int i;

	wait_ms(1); /* the last words of removed watches */
	wait_ms(1);
	for (i = 0; i < 3; i++) {
		t0 = kv_now_ns();
		KVT_EXPECT_EQ(kvd_loop_wait(loop, t0 + 30 * KV_NSEC_PER_MSEC), 0);
		KVT_EXPECT(kv_now_ns() - t0 >= 29 * KV_NSEC_PER_MSEC);
	}
}

static void all(bool force_epoll)
{
	KVT_EXPECT_EQ(kvd_loop_create(force_epoll, &loop), 0);
	if (!force_epoll && !kvd_loop_is_uring(loop))
		KVT_SKIP("io_uring is not allowed here: %s", kvd_loop_engine(loop));
	level_triggered();
	removed_watch_stays_silent();
	slots_are_not_mixed_up();
	wanted_events_change();
	kick_does_not_block();
	kicks_do_not_pile_up();
	deadline_is_kept();
	kvd_loop_destroy(loop);
}

KVT_TEST(io_uring_loop_keeps_its_promises)
{
	all(false);
}

KVT_TEST(epoll_loop_keeps_its_promises)
{
	all(true);
}

KVT_TEST(idle_means_one_wakeup_a_second)
{
	struct kv_grant g;
	struct raw c;
	double a, b;

	daemon_start(&d, NULL);
	raw_open(&c, &d);
	KVT_EXPECT_EQ(raw_alloc(&c, 1, KV_GFP_NOWAIT, &g), 0);
	a = daemon_number(&d, "{\"op\":\"stat\"}", "counters.wakeups");
	usleep(2500000);
	b = daemon_number(&d, "{\"op\":\"stat\"}", "counters.wakeups");
	/* 2 or 3 ticks; accept, line and hang-up of the admin connections */
	KVT_NOTE("%g wake-ups in 2.5 s", b - a);
	KVT_EXPECT_LE(b - a, 9);
	raw_close(&c);
	daemon_stop(&d);
}

static void with_epoll(struct kvd_options *opt)
{
	opt->force_epoll = true;
}

static void with_spin(struct kvd_options *opt)
{
	opt->spin = true;
}

static void ping(void (*tweak)(struct kvd_options *opt))
{
	struct kv_grant g[3];
	struct raw c;
	int i;

	daemon_start(&d, tweak);
	raw_open(&c, &d);
	for (i = 0; i < 200; i++) {
		KVT_EXPECT_EQ(raw_alloc(&c, 3, KV_GFP_NOWAIT, g), 0);
		KVT_EXPECT_EQ(raw_free(&c, g, 3), 0);
	}
	raw_close(&c);
	daemon_wait(&d, STATUS, "sessions", 0, 1000);
	KVT_EXPECT_EQ(daemon_number(&d, "{\"op\":\"audit\"}", "damage"), 0);
}

KVT_TEST(epoll_serves_where_io_uring_is_forbidden_and_says_so)
{
	cJSON *doc;
	char *text;

	ping(with_epoll);
	doc = daemon_ask(&d, STATUS);
	text = cJSON_PrintUnformatted(doc);
	KVT_EXPECT_HAS(text, "LOOP_EPOLL");
	cJSON_free(text);
	cJSON_Delete(doc);
	daemon_stop(&d);
}

KVT_TEST(spinning_serves_too)
{
	ping(with_spin);
	daemon_stop(&d);
}

KVT_MAIN()
