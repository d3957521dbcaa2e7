/* SPDX-License-Identifier: Apache-2.0 */
/* openmp.h - how idle OpenMP threads wait. */
#ifndef ENG_OPENMP_H
#define ENG_OPENMP_H

/**
 * eng_openmp_passive() - make idle OpenMP threads sleep instead of spin
 * @argv: of main(); first thing there
 *
 * libgomp reads its environment before main(), so the program executes itself once more
 * with OMP_WAIT_POLICY=passive. Does nothing if the user has set OMP_WAIT_POLICY or
 * GOMP_SPINCOUNT. Why: kvmd and other engines share the cores. A thread that spins at a
 * barrier takes the very core that the thread it waits for, or kvmd, needs: measured 37
 * tokens/s at batch 8 with spinning against 608 without, on two busy cores.
 */
void eng_openmp_passive(char **argv);

#endif
