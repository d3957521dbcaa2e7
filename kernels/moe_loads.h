/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_loads.h - whether a file's kernels leave their products out. A benchmark compiles some of
 * them once more so, to see what their loads alone cost (tests/bench/kernels_fp8_loads.cu, kernels_int4_loads.cu);
 * everywhere else they multiply.
 */
#ifndef KVK_MOE_LOADS_H
#define KVK_MOE_LOADS_H

#ifndef MOE_LOADS_ONLY
#define MOE_LOADS_ONLY 0
#endif

#endif /* KVK_MOE_LOADS_H */
