/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who the process behind a connection is: what the kernel says of the socket's peer, or, where
 * it cannot say it at all, of its pid. A pid whose process is gone may be anybody's.
 */
#include <dlfcn.h>
#include <errno.h>
#include <sys/socket.h>

#include "tests/kvt.h"
#include "tests/unit/ipc/common.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

static struct daemon d;
static int peer_error; /* of the question for the peer's pidfd; 0: it is asked */

int getsockopt(int fd, int level, int name, void *value, socklen_t *len)
{
	__typeof__(&getsockopt) real =
		(__typeof__(&getsockopt))dlsym(RTLD_NEXT, "getsockopt");

	if (level == SOL_SOCKET && name == SO_PEERPIDFD && peer_error) {
		errno = peer_error;
		return -1;
	}
	return real(fd, level, name, value, len);
}

static int hello(int error)
{
	struct raw c;
	int r;

	peer_error = error;
	daemon_start(&d, NULL);
	raw_connect(&c, &d);
	r = raw_hello_try(&c, "peer");
	raw_close(&c);
	return r;
}

/*
 * A reaped peer has no pidfd before Linux 6.16 (EINVAL, later ESRCH), and whoever has its
 * socket speaks. The process that has its pid by now (here: ours) is not taken for it: it
 * would be waited for, and killed for steps that it does not have.
 */
KVT_TEST(a_peer_that_is_gone_is_not_looked_up_by_its_pid)
{
	static const int errors[] = {ESRCH, EINVAL, ENODATA, ENOMEM};

	for (u32 i = 0; i < KV_ARRAY_SIZE(errors); i++) {
		KVT_EXPECT_EQ(hello(errors[i]), -ECONNRESET);
		daemon_wait(&d, "{\"op\":\"status\"}", "sessions", 0, 5000);
		KVT_EXPECT_EQ(daemon_number(&d, "{\"op\":\"stat\"}",
					    "counters.connections_refused"),
			      1);
		daemon_stop(&d);
	}
}

/* Before Linux 6.5 nobody can say it: by the pid, and status says so. */
KVT_TEST(an_old_kernel_is_asked_by_the_pid)
{
	cJSON *status;
	char *text;
	struct raw c;

	peer_error = ENOPROTOOPT;
	daemon_start(&d, NULL);
	raw_connect(&c, &d);
	KVT_EXPECT_EQ(raw_hello(&c, "peer"), 0);
	status = daemon_ask(&d, "{\"op\":\"status\"}");
	text = cJSON_PrintUnformatted(status);
	KVT_EXPECT_HAS(text, "PIDFD_RACED");
	cJSON_free(text);
	cJSON_Delete(status);
	raw_close(&c);
	daemon_stop(&d);
}

KVT_MAIN()
