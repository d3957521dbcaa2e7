/* SPDX-License-Identifier: Apache-2.0 */
/* tier_rate.h - `kvbench tier`: what the NVMe tier stores and brings back in a second. */
#ifndef TESTS_BENCH_TIER_RATE_H
#define TESTS_BENCH_TIER_RATE_H

/** kvb_tier() - arguments after the command's name. Return: exit status */
int kvb_tier(int argc, char **argv);

#endif
