/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kill -9 of an engine whose step stores on and on, alone and with a forked child that
 * lives on (facts F-exit, F-fork-gpu): no page leaves quarantine before the last store.
 * `kvbench kill` is run as it is; cuda_safety.c runs it on the card.
 */
#include "tests/ipc/common.h"

static void kill_rounds(const char *args)
{
	char bench[1024], cmd[2048], line[1024];
	int status, shown = 0;
	FILE *in;

	ipc_build_path("kvbench", bench, sizeof(bench));
	if (access(bench, X_OK))
		KVT_FAIL("%s is not built", bench);
	snprintf(cmd, sizeof(cmd), "%s kill %s 2>&1", bench, args);
	in = popen(cmd, "r");
	KVT_EXPECT(in);
	while (fgets(line, sizeof(line), in)) {
		printf("# %s", line);
		shown += strstr(line, "; 0 released before the last store\n") != NULL;
	}
	status = pclose(in);
	KVT_EXPECT_EQ(status, 0);
	KVT_EXPECT_EQ(shown, 3);
}

KVT_TEST(o19_killed_in_a_step_alone_and_with_a_child)
{
	kill_rounds("--backend host --rounds 4");
}

KVT_TEST(o19_killed_on_the_cuda_backend)
{
	ipc_use_fake_cuda();
	kill_rounds("--backend cuda --rounds 3");
}

KVT_MAIN()
