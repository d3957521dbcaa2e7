/* SPDX-License-Identifier: Apache-2.0 */
/* inject.h - kvbench inject and kvbench check-cost. */
#ifndef KVB_INJECT_H
#define KVB_INJECT_H

/**
 * kvb_inject() - kvbench inject: each fault of engine/run/inject.h against a real kvmd
 *
 * Prints one row per fault: was it detected, did only the offender fail, how many bytes
 * of published text are wrong. Exit code 0 when all of them behaved as the check mode
 * promises (batch: detected, only the offender, no wrong byte; off: swapped and reused
 * rows show), 1 otherwise, 2 usage.
 */
int kvb_inject(int argc, char **argv);

/**
 * kvb_check_cost() - kvbench check-cost: decode speed with check off and batch,
 * interleaved
 *
 * Exit code 0, 1 on failure, 2 usage.
 */
int kvb_check_cost(int argc, char **argv);

#endif
