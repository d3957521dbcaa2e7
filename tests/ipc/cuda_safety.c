/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The safety protocol on the card: pages raced between two engine processes, engines killed
 * under a long kernel. The same commands, longer, make the tables of docs/performance.md;
 * race.c and kill.c run them where no GPU is.
 */
#include "tests/ipc/common.h"

static void bench(const char *args, const char *want, int times)
{
	char path[1024], cmd[2048], line[1024];
	int status, shown = 0;
	FILE *in;

	if (access("/dev/nvidiactl", F_OK))
		KVT_SKIP("no GPU");
	ipc_build_path("kvbench", path, sizeof(path));
	if (access(path, X_OK))
		KVT_FAIL("%s is not built", path);
	snprintf(cmd, sizeof(cmd), "%s %s 2>&1", path, args);
	in = popen(cmd, "r");
	KVT_EXPECT(in);
	while (fgets(line, sizeof(line), in)) {
		printf("# %s", line);
		shown += strstr(line, want) != NULL;
	}
	status = pclose(in);
	KVT_EXPECT_EQ(status, 0);
	KVT_EXPECT_EQ(shown, times);
}

KVT_TEST_T(o22_o25_o37_r4_pages_raced_on_the_card, 120)
{
	bench("race --backend cuda --reissues 300000", "0 foreign bytes in ", 1);
}

/* Twenty rounds each: alone, with a child of fork(), with one that kept the GPU open. */
KVT_TEST_T(o19_killed_under_a_long_kernel, 240)
{
	bench("kill --backend cuda --rounds 20", "; 0 released before the last store\n",
	      3);
}

/* P8: what the copy engines have queued ends before a page is given on. */
KVT_TEST_T(o19_killed_while_copies_run, 120)
{
	bench("kill --backend cuda --work copies --rounds 8",
	      "; 0 released before the last store\n", 3);
}

KVT_MAIN()
