/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvmd's loop fails: that is a crash, and no end that an operator asked for. What the keeper
 * has is for the next one.
 */
#include "tests/unit/ipc/start.h"

#include <sys/epoll.h>

static int wait_error;

int epoll_pwait2(int fd, struct epoll_event *ev, int max, const struct timespec *ts,
		 const sigset_t *mask)
{
	if (!wait_error)
		return REAL(epoll_pwait2)(fd, ev, max, ts, mask);
	errno = wait_error;
	return -1;
}

/* As main() does it. */
static void run_until_it_fails(int error)
{
	char text[KVD_CONFIG_ERROR_BYTES];
	pid_t pid = fork();
	int status;

	if (!pid) {
		if (start(text))
			_exit(1);
		settle();
		wait_error = error;
		status = kvd_run(&kvd);
		kvd_fini(&kvd);
		_exit(status == -error ? 0 : 2);
	}
	KVT_EXPECT_EQ(waitpid(pid, &status, 0), pid);
	KVT_EXPECT_EQ(status, 0);
}

KVT_TEST(loop_that_fails_leaves_everything_to_the_next_kvmd)
{
	static const int errors[] = {ENOMEM, EBADF, EINVAL};

	dir_make();
	history();
	for (u32 i = 0; i < KV_ARRAY_SIZE(errors); i++) {
		run_until_it_fails(errors[i]);
		KVT_EXPECT_EQ(pages_now(), 4);
	}
	close(client);
	end();
}

KVT_MAIN()
