/* SPDX-License-Identifier: Apache-2.0 */
/* mover_rate.h - `kvbench mover`: what the mover moves in a second. */
#ifndef TESTS_BENCH_MOVER_RATE_H
#define TESTS_BENCH_MOVER_RATE_H

/** kvb_mover() - arguments after the command's name. Return: exit status */
int kvb_mover(int argc, char **argv);

#endif
