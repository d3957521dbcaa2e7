/* SPDX-License-Identifier: Apache-2.0 */
/* openmp.c - see openmp.h. */
#include "engine/openmp.h"

#include <stdlib.h>
#include <unistd.h>

void eng_openmp_passive(char **argv)
{
	if (getenv("OMP_WAIT_POLICY") || getenv("GOMP_SPINCOUNT"))
		return;
	if (setenv("OMP_WAIT_POLICY", "passive", 1))
		return;
	execv("/proc/self/exe", argv);
	/* could not: go on and spin */
}
