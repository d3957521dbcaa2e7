/* SPDX-License-Identifier: Apache-2.0 */
/*
 * again.h - a test program of the same directory a second time, on the cuda backend. For
 * tests/ipc/cuda_suite.c and tests/e2e/cuda_suite.c.
 */
#ifndef TESTS_AGAIN_H
#define TESTS_AGAIN_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/kvt.h"

/* Its failing cases and its notes are ours. KVT_BACKEND is read by its common.c. */
static inline void run_on_cuda(const char *program)
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

#endif /* TESTS_AGAIN_H */
