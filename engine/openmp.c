/* SPDX-License-Identifier: Apache-2.0 */
/* openmp.c - see openmp.h. */
#include "engine/openmp.h"

#include <limits.h>
#include <stdlib.h>
#include <unistd.h>

void eng_openmp_passive(char **argv)
{
	char path[PATH_MAX];
	ssize_t n;

	if (getenv("OMP_WAIT_POLICY") || getenv("GOMP_SPINCOUNT"))
		return;
	if (setenv("OMP_WAIT_POLICY", "passive", 1))
		return;
	n = readlink("/proc/self/exe", path, sizeof(path) - 1);
	if (n < 0)
		return;
	path[n] = 0;
	execv(path, argv); /* by its name, or ps would call the process "exe" */
			   /* could not: go on and spin */
}
