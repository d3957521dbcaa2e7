/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Too many descriptors are in flight (ETOOMANYREFS): what carries more waits until some peer
 * has read, and its socket is writable all the time.
 */
#include <dlfcn.h>
#include <errno.h>
#include <sys/socket.h>

#include "kvmd/ipc/conn.h"
#include "tests/kvt.h"
#include "tests/unit/ipc/common.h"

static bool full; /* no room for descriptors */

ssize_t sendmsg(int fd, const struct msghdr *mh, int flags)
{
	__typeof__(&sendmsg) real = (__typeof__(&sendmsg))dlsym(RTLD_NEXT, "sendmsg");

	if (full && mh->msg_controllen) {
		errno = ETOOMANYREFS;
		return -1;
	}
	return real(fd, mh, flags);
}

/* A daemon in this process, and a client of it that is served. */
static void scene(struct daemon *d, struct raw *c)
{
	daemon_here(d, 256ull << 20);
	daemon_here_turns(true);
	raw_open(c, d);
	daemon_here_turns(false);
}

static struct kvd_conn *newest(void)
{
	return kv_container_of(daemon_kvd.conns.prev, struct kvd_conn, node);
}

KVT_TEST(what_waits_for_room_for_descriptors_does_not_keep_the_loop_awake)
{
	struct kv_msg_hello hello;
	struct raw c, late;
	struct kv_grant g;
	struct daemon d;
	u32 i, ran = 0;

	scene(&d, &c);
	full = true;
	raw_connect(&late, &d);
	raw_hello_fill(&hello);
	raw_send(&late, &hello, sizeof(hello));
	for (i = 0; i < 1000 && !newest()->out.nr; i++)
		KVT_EXPECT(!kvd_turn(&daemon_kvd));
	KVT_EXPECT_EQ(newest()->out.nr, 1); /* its HELLO_REPLY */
	for (i = 0; i < 3; i++)
		kvd_loop_wait(daemon_kvd.loop, 0); /* last words */
	for (i = 0; i < 20; i++)
		ran += (u32)kvd_loop_wait(daemon_kvd.loop, 0);
	KVT_EXPECT_EQ(ran, 0);
	/* the others are served meanwhile, and it is as soon as there is room */
	daemon_here_turns(true);
	KVT_EXPECT_EQ(raw_alloc(&c, 0, KV_GFP_NOWAIT, &g), -EINVAL);
	KVT_EXPECT_EQ(recv(late.fd, &i, sizeof(i), MSG_DONTWAIT | MSG_PEEK), -1);
	full = false;
	KVT_EXPECT_EQ(raw_receive(&late, &late.hello, sizeof(late.hello)),
		      sizeof(late.hello));
	KVT_EXPECT_EQ(late.hello.result, 0);
	KVT_EXPECT_EQ(late.nr_fds, 4);
	daemon_here_turns(false);
	KVT_EXPECT_EQ(daemon_kvd.refs_ns, 0);
	for (i = 0; i < 4; i++)
		close(late.fds[i]);
	raw_close(&c);
	close(late.fd);
	daemon_here_end(&d);
}

KVT_MAIN()
