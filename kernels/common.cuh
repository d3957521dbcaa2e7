/* SPDX-License-Identifier: Apache-2.0 */
/*
 * common.cuh - thin names for the PTX that the kernels use: barriers in shared memory,
 * bulk copies, matrix instructions and conversions. sm_90a. Device code only; no state.
 */
#ifndef KVK_COMMON_CUH
#define KVK_COMMON_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>
#include "kernels/arch.cuh"

#define KVK_DEV static __device__ __forceinline__

KVK_DEV uint32_t smem_addr(const void *p)
{
	return (uint32_t)__cvta_generic_to_shared(p);
}

/* ---------------------------------------------------------------------------- mbarrier
 */

KVK_DEV void mbar_init(uint64_t *bar, uint32_t count)
{
	SM90_ASM("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_addr(bar)),
		 "r"(count)
		 : "memory");
}

/* Makes inits visible to the copy engine; then a CTA barrier. */
KVK_DEV void mbar_init_fence(void)
{
	SM90_ASM("fence.mbarrier_init.release.cluster;" ::: "memory");
}

KVK_DEV void mbar_arrive(uint64_t *bar)
{
	SM90_ASM("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(
			 smem_addr(bar))
		 : "memory");
}

KVK_DEV void mbar_arrive_expect(uint64_t *bar, uint32_t bytes)
{
	SM90_ASM("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::
			 "r"(smem_addr(bar)),
		 "r"(bytes)
		 : "memory");
}

KVK_DEV bool mbar_try(uint64_t *bar, uint32_t parity)
{
	uint32_t done = 1;

	SM90_ASM("{\n.reg .pred p;\n"
		 "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
		 "selp.u32 %0, 1, 0, p;\n}"
		 : "=r"(done)
		 : "r"(smem_addr(bar)), "r"(parity)
		 : "memory");
	return done;
}

/* ... right away. */
KVK_DEV bool mbar_test(uint64_t *bar, uint32_t parity)
{
	uint32_t done = 1;

	SM90_ASM("{\n.reg .pred p;\n"
		 "mbarrier.test_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
		 "selp.u32 %0, 1, 0, p;\n}"
		 : "=r"(done)
		 : "r"(smem_addr(bar)), "r"(parity)
		 : "memory");
	return done;
}

KVK_DEV void mbar_wait(uint64_t *bar, uint32_t parity)
{
	while (!mbar_try(bar, parity))
		;
}

/* Named barrier of some of the CTA's warps. */
KVK_DEV void bar_sync(int id, int nr_threads)
{
	asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(nr_threads) : "memory");
}

/* ... which also tells whether any thread brought true. */
KVK_DEV bool bar_or(int id, int nr_threads, bool v)
{
	uint32_t r;

	asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\n"
		     "bar.red.or.pred q, %2, %3, p;\nselp.u32 %0, 1, 0, q;\n}"
		     : "=r"(r)
		     : "r"((uint32_t)v), "r"(id), "r"(nr_threads)
		     : "memory");
	return r;
}

KVK_DEV void fence_proxy_async(void)
{
	SM90_ASM("fence.proxy.async.shared::cta;" ::: "memory");
}

/* -------------------------------------------------------------------------- bulk copies
 */

KVK_DEV uint64_t policy_evict_first(void)
{
	uint64_t p = 0;

	SM90_ASM("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(p));
	return p;
}

/* @bytes: multiple of 16; both addresses 16-byte aligned */
KVK_DEV void bulk_load(void *dst, const void *src, uint32_t bytes, uint64_t *bar,
		       uint64_t policy)
{
	SM90_ASM("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
		 ".L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(smem_addr(dst)),
		 "l"(src), "r"(bytes), "r"(smem_addr(bar)), "l"(policy)
		 : "memory");
}

/* ------------------------------------------------------------------- programmatic launch
 */

KVK_DEV void grid_wait(void)
{
	GRID_ASM("griddepcontrol.wait;" ::: "memory");
}

KVK_DEV void grid_launch_next(void)
{
	GRID_ASM("griddepcontrol.launch_dependents;" ::: "memory");
}

/* Registers per thread of a warpgroup, from here on. */
template <int N> KVK_DEV void regs_inc(void)
{
	SM90_ASM("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N> KVK_DEV void regs_dec(void)
{
	SM90_ASM("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

/* ------------------------------------------------------------------------- conversions
 */

/* Two e4m3 (low and high byte) to f16x2. */
KVK_DEV uint32_t e4m3x2_f16x2(uint16_t v)
{
	return arch_e4m3_f16(v);
}

/* Four e4m3 to two f16x2, in order. */
KVK_DEV void e4m3x4_f16(uint32_t v, uint32_t &lo, uint32_t &hi)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
	asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\n"
	    "cvt.rn.f16x2.e4m3x2 %0, a;\ncvt.rn.f16x2.e4m3x2 %1, b;\n}"
	    : "=r"(lo), "=r"(hi)
	    : "r"(v));
#else
	lo = arch_e4m3_f16(v);
	hi = arch_e4m3_f16(v >> 16);
#endif
}

KVK_DEV uint32_t pack_f16(float lo, float hi)
{
	uint32_t r;

	asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
	return r;
}

KVK_DEV uint32_t pack_bf16(float lo, float hi)
{
	uint32_t r;

	asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
	return r;
}

KVK_DEV float2 unpack_f16(uint32_t v)
{
	__half2 h;

	memcpy(&h, &v, 4);
	return __half22float2(h);
}

KVK_DEV float2 unpack_bf16(uint32_t v)
{
	return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
}

KVK_DEV float exp2_fast(float x)
{
	float r;

	asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
	return r;
}

/* --------------------------------------------------------------------------- matrix
 * units */

/* d[16][8] += a[16][16] b[16][8], f16 or bf16 in, f32 out */
template <bool BF16>
KVK_DEV void mma_16816(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
	if (BF16)
		asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
		    " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
		    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
		    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
	else
		asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
		    " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
		    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
		    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Transpose an 8 x 8 matrix of 16-bit values: lane 4g + c holds row g, columns 2c, 2c + 1
 * and gets rows 2c, 2c + 1 of column g. */
KVK_DEV uint32_t movmatrix_trans(uint32_t v)
{
	uint32_t r;

	asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
	return r;
}

KVK_DEV uint4 lds128(uint32_t addr)
{
	uint4 v;

	asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
		     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
		     : "r"(addr)
		     : "memory");
	return v;
}

KVK_DEV uint2 lds64(uint32_t addr)
{
	uint2 v;

	asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];"
		     : "=r"(v.x), "=r"(v.y)
		     : "r"(addr)
		     : "memory");
	return v;
}

/*
 * Four 8 x 8 matrices of 16 bits to shared memory: lane 8 i + r has the address of row r of
 * matrix i, lane 4 r + c its columns 2c, 2c + 1 in v[i].
 */
KVK_DEV void stmatrix4(uint32_t addr, const uint32_t *v)
{
	SM90_ASM("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(
			 addr),
		 "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
		 : "memory");
}

/* The other way round: lane 4 g + c gets rows 2c, 2c + 1 of column g of matrix i in w[i]. */
KVK_DEV void ldmatrix4_trans(uint32_t addr, uint32_t (&w)[4])
{
	asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
		     : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
		     : "r"(addr)
		     : "memory");
}

/* One word of global memory, never merged with its neighbour. */
KVK_DEV uint32_t ldg32(const void *p)
{
	uint32_t v;

	asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
	return v;
}

KVK_DEV uint32_t lds32(uint32_t addr)
{
	uint32_t v;

	asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(addr) : "memory");
	return v;
}

/* A word of shared memory that says how far another warp got. */
KVK_DEV uint32_t lds_acquire(const uint32_t *p)
{
	uint32_t v;

	asm volatile("ld.acquire.cta.shared.u32 %0, [%1];"
		     : "=r"(v)
		     : "r"(smem_addr(p))
		     : "memory");
	return v;
}

KVK_DEV void sts_release(uint32_t *p, uint32_t v)
{
	asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"(smem_addr(p)), "r"(v)
		     : "memory");
}

/* Returns the old value. */
KVK_DEV uint32_t atoms_add_release(uint32_t *p, uint32_t v)
{
	uint32_t r;

	asm volatile("atom.add.release.cta.shared.u32 %0, [%1], %2;"
		     : "=r"(r)
		     : "r"(smem_addr(p)), "r"(v)
		     : "memory");
	return r;
}

KVK_DEV uint32_t atoms_add_acq_rel(uint32_t *p, uint32_t v)
{
	uint32_t r;

	asm volatile("atom.add.acq_rel.cta.shared.u32 %0, [%1], %2;"
		     : "=r"(r)
		     : "r"(smem_addr(p)), "r"(v)
		     : "memory");
	return r;
}

KVK_DEV void spin_until(const uint32_t *p, uint32_t more_than)
{
	while (lds_acquire(p) <= more_than)
		;
}

#endif /* KVK_COMMON_CUH */
