/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernels_fp8_loads.cu - the E4M3 experts' kernels once more, without their products
 * (kernels/moe_loads.h): what a line of kvbench-kernels is held against. The product's own files
 * are compiled here under other names, so that nothing of it is in kvmd or kv-engine, and whatever
 * the kernels read and in which order is the same by construction.
 */
#define MOE_LOADS_ONLY		1
#define f8_kernel		f8_loads_kernel
#define f8s_kernel		f8s_loads_kernel
#define f8s_state		f8s_loads_state
#define f8s_packets		f8s_loads_packets
#define fc_kernel		fc_loads_kernel
#define fp8_pack		fp8_loads_pack
#define f8_probe		f8_loads_probe
#define chunk_pack		chunk_loads_pack
#define chunk_sum		chunk_loads_sum
#define plain_round		plain_loads_round
#define plain_first		plain_loads_first
#define plain_second		plain_loads_second
#define plain_sum		plain_loads_sum
#define moe_fp8_map		moe_loads_map
#define moe_fp8_wide_ok		moe_loads_wide_ok
#define moe_fp8_step_ok		moe_loads_step_ok
#define moe_fp8_step_launch	moe_loads_step_launch
#define moe_fp8_wide_launch	moe_loads_wide_launch
#define moe_chunk_launch	moe_loads_chunk_launch
#define kvk_moe_plain_workspace kvk_moe_loads_workspace
#define kvk_moe_workspace_cuda	kvk_moe_loads_workspace_any
#define kvk_moe_fp8_cuda	kvk_moe_fp8_loads

#include "kernels/moe_fp8_wide.cu"
#include "kernels/moe_fp8_chunk.cu"
#include "kernels/moe_fp8_step.cu"
#include "kernels/moe_plain.cu"
