/* SPDX-License-Identifier: Apache-2.0 */
/* kernels_prefill.h - the prefill lines, a part of the family "attn". */
#ifndef KVB_KERNELS_PREFILL_H
#define KVB_KERNELS_PREFILL_H

#include "gpu_bench.h"

int kvb_kernels_prefill(struct kvb_ctx *ctx);

#endif /* KVB_KERNELS_PREFILL_H */
