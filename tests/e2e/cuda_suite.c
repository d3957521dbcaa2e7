/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The other programs of this directory a second time, on a GPU: KVT_BACKEND=cuda, which
 * common.c reads. One case each; its notes are the failing cases of that program.
 */
#include "tests/kvt.h"

#include "tests/e2e/common.h"

static void run_on_cuda(const char *program)
{
	char path[512], line[1024];
	int status, passed = 0;
	ssize_t n;
	FILE *in;

	if (access("/dev/nvidiactl", F_OK))
		KVT_SKIP("no GPU");
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

KVT_TEST_T(abort_on_cuda, 120)
{
	run_on_cuda("abort");
}

KVT_TEST_T(cli_on_cuda, 120)
{
	run_on_cuda("cli");
}

KVT_TEST_T(faults_on_cuda, 120)
{
	run_on_cuda("faults");
}

KVT_TEST_T(http_on_cuda, 120)
{
	run_on_cuda("http");
}

KVT_TEST_T(invariance_on_cuda, 120)
{
	run_on_cuda("invariance");
}

KVT_TEST_T(pressure_on_cuda, 120)
{
	run_on_cuda("pressure");
}

KVT_TEST_T(restart_on_cuda, 120)
{
	run_on_cuda("restart");
}

KVT_TEST_T(review_restart_on_cuda, 120)
{
	run_on_cuda("review_restart");
}

KVT_TEST_T(sharing_on_cuda, 120)
{
	run_on_cuda("sharing");
}

KVT_MAIN()
