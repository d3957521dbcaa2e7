/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_ptx.cuh - the few machine instructions the MoE kernels are made of: bulk copies
 * that complete on an mbarrier, mma.sync, and gpu-scope counters. Device code only.
 */
#ifndef KVK_MOE_PTX_CUH
#define KVK_MOE_PTX_CUH

#include <stdint.h>
#include "arch.cuh"

/* A CTA's shared memory, and a launch. The emulator has other words for them. */
#define MOE_SHARED(type, name) __shared__ type name
#define MOE_DYNAMIC(name)      extern __shared__ uint8_t name[]
#define MOE_LAUNCH(kernel, grid, threads, stream, ...) \
	kernel<<<(grid), (threads), 0, (stream)>>>(__VA_ARGS__)

__device__ __forceinline__ uint32_t ptx_smem(const void *p)
{
	return (uint32_t)__cvta_generic_to_shared(p);
}

__device__ __forceinline__ void ptx_mbar_init(uint32_t bar, uint32_t count)
{
	SM90_ASM("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count));
}

__device__ __forceinline__ void ptx_mbar_arrive(uint32_t bar)
{
	SM90_ASM("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

__device__ __forceinline__ void ptx_mbar_expect(uint32_t bar, uint32_t bytes)
{
	SM90_ASM("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar),
		 "r"(bytes)
		 : "memory");
}

__device__ __forceinline__ void ptx_mbar_wait(uint32_t bar, uint32_t parity)
{
	SM90_ASM("{\n\t.reg .pred p;\n"
		 "again:\n\t"
		 "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n\t"
		 "@p bra done;\n\t"
		 "bra again;\n"
		 "done:\n\t}" ::"r"(bar),
		 "r"(parity)
		 : "memory");
}

/* Has that phase ended? Does not wait. */
__device__ __forceinline__ bool ptx_mbar_test(uint32_t bar, uint32_t parity)
{
	uint32_t done = 1;

	SM90_ASM("{\n\t.reg .pred p;\n\t"
		 "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
		 "selp.u32 %0, 1, 0, p;\n\t}"
		 : "=r"(done)
		 : "r"(bar), "r"(parity)
		 : "memory");
	return done;
}

/* Weights pass once: they must not push x, h and the partial sums out of L2. */
__device__ __forceinline__ uint64_t ptx_policy_stream(void)
{
	uint64_t p = 0;

	SM90_ASM("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(p));
	return p;
}

__device__ __forceinline__ void ptx_bulk_stream(uint32_t dst, const void *src,
						uint32_t bytes, uint32_t bar,
						uint64_t policy)
{
	SM90_ASM("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
		 ".L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(dst),
		 "l"(src), "r"(bytes), "r"(bar), "l"(policy)
		 : "memory");
}

__device__ __forceinline__ void ptx_bulk(uint32_t dst, const void *src, uint32_t bytes,
					 uint32_t bar)
{
	SM90_ASM("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
		 " [%0], [%1], %2, [%3];" ::"r"(dst),
		 "l"(src), "r"(bytes), "r"(bar)
		 : "memory");
}

/* 16 bytes through L2, completing on an mbarrier that counts lanes */
__device__ __forceinline__ void ptx_copy16(uint32_t dst, const void *src)
{
	asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src)
		     : "memory");
}

__device__ __forceinline__ void ptx_copy_arrive(uint32_t bar)
{
	SM90_ASM("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(bar) : "memory");
}

/* A thread's copies since the last commit are a group; wait until at most N groups are open. */
__device__ __forceinline__ void ptx_copy_commit(void)
{
	asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int N> __device__ __forceinline__ void ptx_copy_wait(void)
{
	asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

__device__ __forceinline__ uint4 ptx_lds128(uint32_t a)
{
	uint4 v;

	asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
		     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
		     : "r"(a));
	return v;
}

__device__ __forceinline__ uint2 ptx_lds64(uint32_t a)
{
	uint2 v;

	asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(a));
	return v;
}

/* Four 8 x 8 matrices of 16-bit values: lane 4 g + t has (g, 2 t) and (g, 2 t + 1) of each.
 * @a: lane l's is where row l % 8 of matrix l / 8 goes */
__device__ __forceinline__ void ptx_stmatrix(uint32_t a, uint32_t m0, uint32_t m1,
					     uint32_t m2, uint32_t m3)
{
	SM90_ASM("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
			 a),
		 "r"(m0), "r"(m1), "r"(m2), "r"(m3)
		 : "memory");
}

/* The same, each matrix transposed: its column l % 8 goes to lane l's place. */
__device__ __forceinline__ void ptx_stmatrix_turned(uint32_t a, uint32_t m0, uint32_t m1,
						    uint32_t m2, uint32_t m3)
{
	SM90_ASM(
		"stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::
			"r"(a),
		"r"(m0), "r"(m1), "r"(m2), "r"(m3)
		: "memory");
}

/* Two of them: the places are those of lanes 0 to 15. */
__device__ __forceinline__ void ptx_stmatrix2_turned(uint32_t a, uint32_t m0, uint32_t m1)
{
	SM90_ASM(
		"stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(a),
		"r"(m0), "r"(m1)
		: "memory");
}

/* d = a b + c, m16n8k16 */
__device__ __forceinline__ void ptx_mma_bf16(float (&d)[4], const uint32_t (&a)[4],
					     uint32_t b0, uint32_t b1,
					     const float (&c)[4])
{
	asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
	    "{%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
	    : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
	    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]),
	      "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

__device__ __forceinline__ void ptx_mma_f16(float (&d)[4], const uint32_t (&a)[4],
					    uint32_t b0, uint32_t b1, const float (&c)[4])
{
	asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
	    "{%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
	    : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
	    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]),
	      "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

__device__ __forceinline__ float ptx_lds32(uint32_t a)
{
	float v;

	asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(a) : "memory");
	return v;
}

__device__ __forceinline__ void ptx_sts32(uint32_t a, float v)
{
	asm volatile("st.shared.f32 [%0], %1;" ::"r"(a), "f"(v) : "memory");
}

__device__ __forceinline__ float ptx_f16_f32(uint32_t bits)
{
	float v;

	asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"((uint16_t)bits));
	return v;
}

/* (a & mask) | magic in one instruction */
__device__ __forceinline__ uint32_t ptx_and_or(uint32_t a, uint32_t mask, uint32_t magic)
{
	uint32_t d;

	asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(mask), "r"(magic));
	return d;
}

__device__ __forceinline__ uint32_t ptx_fma_bf16x2(uint32_t a, uint32_t b, uint32_t c)
{
	uint32_t d;

	asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
	return d;
}

__device__ __forceinline__ uint32_t ptx_fma_f16x2(uint32_t a, uint32_t b, uint32_t c)
{
	uint32_t d;

	asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
	return d;
}

__device__ __forceinline__ uint32_t ptx_mul_f16x2(uint32_t a, uint32_t b)
{
	uint32_t d;

	asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
	return d;
}

/* Both of @a times the lower or the upper of @two. */
template <bool HIGH>
__device__ __forceinline__ uint32_t ptx_mul_f16x2_half(uint32_t a, uint32_t two)
{
	uint32_t d;

	if constexpr (HIGH)
		asm("{\n.reg .b16 l, h;\n.reg .b32 b;\nmov.b32 {l, h}, %2;\n"
		    "mov.b32 b, {h, h};\nmul.rn.f16x2 %0, %1, b;\n}"
		    : "=r"(d)
		    : "r"(a), "r"(two));
	else
		asm("{\n.reg .b16 l, h;\n.reg .b32 b;\nmov.b32 {l, h}, %2;\n"
		    "mov.b32 b, {l, l};\nmul.rn.f16x2 %0, %1, b;\n}"
		    : "=r"(d)
		    : "r"(a), "r"(two));
	return d;
}

/* {lo, hi} as f16x2 */
__device__ __forceinline__ uint32_t ptx_f16x2(float lo, float hi)
{
	uint32_t d;

	asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
	return d;
}

/* {lo, hi} as bf16x2 */
__device__ __forceinline__ uint32_t ptx_bf16x2(float lo, float hi)
{
	uint32_t d;

	asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
	return d;
}

/* The largest of a warp's 32 values. */
__device__ __forceinline__ uint32_t ptx_redux_max(uint32_t v)
{
	uint32_t d;

	asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(d) : "r"(v));
	return d;
}

/* The larger of both halves. */
__device__ __forceinline__ uint32_t ptx_max_u16x2(uint32_t a, uint32_t b)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900 /* where nobody runs this */
	return __vmaxu2(a, b);
#else
	uint32_t d;

	asm("max.u16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
	return d;
#endif
}

__device__ __forceinline__ uint32_t ptx_ld_acquire(const uint32_t *p)
{
	uint32_t v;

	asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
	return v;
}

__device__ __forceinline__ void ptx_red_release(uint32_t *p, uint32_t v)
{
	asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v)
		     : "memory");
}

__device__ __forceinline__ uint64_t ptx_ld_acquire64(const uint64_t *p)
{
	uint64_t v;

	asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
	return v;
}

__device__ __forceinline__ void ptx_red_release64(uint64_t *p, uint64_t v)
{
	asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(p), "l"(v)
		     : "memory");
}

/* Ordinary stores before, the copy engine after. */
__device__ __forceinline__ void ptx_fence_async(void)
{
	SM90_ASM("fence.proxy.async;" ::: "memory");
}

__device__ __forceinline__ void ptx_bar_sync(uint32_t id, uint32_t nr_threads)
{
	asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(nr_threads) : "memory");
}

__device__ __forceinline__ void ptx_bar_arrive(uint32_t id, uint32_t nr_threads)
{
	asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(nr_threads) : "memory");
}

/* Programmatic dependent launch: wait for the kernel before; let the next one start. */
__device__ __forceinline__ void ptx_grid_wait(void)
{
	GRID_ASM("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ void ptx_grid_launch(void)
{
	GRID_ASM("griddepcontrol.launch_dependents;" ::: "memory");
}

#endif /* KVK_MOE_PTX_CUH */
