/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernels_int4_loads.cu - the kernels of many tokens of INT4 experts once more, without their
 * products, as kernels_fp8_loads.cu does for E4M3. moe_int4.cuh and moe_int4_step.cuh can leave them
 * out themselves.
 */
#define MOE_LOADS_ONLY	       1
#define wide_kernel	       wide_loads_kernel
#define wide_pack	       wide_loads_pack
#define wide_pack_rows	       wide_loads_pack_rows
#define wide_pack_short	       wide_loads_pack_short
#define wide_sum	       wide_loads_sum
#define wide_sum_f16	       wide_loads_sum_f16
#define moe_wide_sum	       moe_wide_loads_sum
#define moe_wide_launch	       moe_wide_loads_launch
#define moe_wide_gemm_g32      moe_wide_loads_g32
#define moe_wide_gemm_g64      moe_wide_loads_g64
#define moe_wide_gemm_g128     moe_wide_loads_g128
#define moe_clean	       moe_loads_clean
#define kvk_moe_int4_workspace kvk_moe_int4_wide_loads_workspace
#define kvk_moe_int4_loads     kvk_moe_int4_wide_loads_only
#define kvk_moe_int4_cuda      kvk_moe_int4_wide_loads

#include "kernels/moe_int4_wide.cu"
#include "kernels/moe_int4_wide_g32.cu"
#include "kernels/moe_int4_wide_g64.cu"
#include "kernels/moe_int4_wide_g128.cu"
#include "kernels/moe_int4.cu"
