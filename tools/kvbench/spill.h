/* SPDX-License-Identifier: Apache-2.0 */
/* spill.h - kvbench spill: pages through a whole kvmd to its DRAM tier and back. */
#ifndef KVB_SPILL_H
#define KVB_SPILL_H

/**
 * kvb_spill() - kvbench spill [--backend auto|host|cuda] [--mib N] [--json]
 *
 * Exit code 0, 1 on failure, 2 usage.
 */
int kvb_spill(int argc, char **argv);

#endif /* KVB_SPILL_H */
