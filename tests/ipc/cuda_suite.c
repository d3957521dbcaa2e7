/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The other programs of this directory a second time, on the cuda backend: outcomes and
 * semantics are those of the host backend. One case each; its notes are the failing cases
 * of that program. KVT_BACKEND is read by common.c, and KVT_DRIVER: over the fake driver, or
 * on a GPU.
 */
#include "tests/ipc/common.h"

static void run_on_cuda(const char *program)
{
	char path[512], line[1024];
	int status, passed = 0;
	ssize_t n;
	FILE *in;

	n = readlink("/proc/self/exe", path, sizeof(path) - 64);
	KVT_EXPECT(n > 0);
	path[n] = 0;
	snprintf(strrchr(path, '/') + 1, 48, "%s 2>&1", program);
	setenv("KVT_BACKEND", "cuda", 1);
	in = popen(path, "r");
	KVT_EXPECT(in);
	while (fgets(line, sizeof(line), in)) {
		passed += !strncmp(line, "ok ", 3) && !strstr(line, "# SKIP");
		if (!strncmp(line, "not ok", 6) || line[0] == '#')
			printf("# %s: %s", program, line);
	}
	status = pclose(in);
	KVT_NOTE("%d cases of %s pass on cuda", passed, program);
	KVT_EXPECT_EQ(status, 0);
	KVT_EXPECT(passed > 0);
}

KVT_TEST_T(hello_on_cuda, 120)
{
	run_on_cuda("hello");
}

KVT_TEST_T(ops_on_cuda, 120)
{
	run_on_cuda("ops");
}

KVT_TEST_T(ring_on_cuda, 120)
{
	run_on_cuda("ring");
}

KVT_TEST_T(share_on_cuda, 120)
{
	run_on_cuda("share");
}

KVT_TEST_T(death_on_cuda, 120)
{
	run_on_cuda("death");
}

KVT_TEST_T(restart_on_cuda, 120)
{
	run_on_cuda("restart");
}

KVT_TEST_T(restart_crash_on_cuda, 120)
{
	run_on_cuda("restart_crash");
}

KVT_MAIN()
