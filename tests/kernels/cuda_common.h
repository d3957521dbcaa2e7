/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda_common.h - device copies of what the kernel tests make in host memory.
 *
 * Each case is a process of its own, so nothing is freed. Every CUDA error ends the case.
 * Includes kvt.h: for test programs only.
 */
#ifndef KVT_KERNELS_CUDA_COMMON_H
#define KVT_KERNELS_CUDA_COMMON_H

#include <cuda_runtime_api.h>
#include "tests/kvt.h"
#include "common.h"

#define CU(call)                                                             \
	do {                                                                 \
		cudaError_t err_ = (call);                                   \
		if (err_ != cudaSuccess)                                     \
			KVT_FAIL("%s: %s", #call, cudaGetErrorString(err_)); \
	} while (0)

/* The CUDA table; without a device the case is skipped. */
static inline const struct kvk_ops *gpu_ops(void)
{
	const struct kvk_ops *ops = kvk_cuda_ops();

	if (!ops)
		KVT_SKIP("no GPU");
	return ops;
}

/*
 * KVT_SANITIZER: under compute-sanitizer, which shall see what the canary would hide, memory
 * is of the very size. "initcheck": and nothing is written to it before the kernels.
 * "short" is the control that errors are seen: what kernels write to is an eighth too small.
 */
static inline bool gpu_sanitizer(const char *what)
{
	const char *env = getenv("KVT_SANITIZER");

	return env && (!what || !strcmp(env, what));
}

static inline size_t gpu_canary_bytes(void)
{
	return gpu_sanitizer(NULL) ? 0 : 256;
}

/* What no kernel wrote to is still 0xff. */
static inline bool gpu_poisoned(void)
{
	return !gpu_sanitizer("initcheck");
}

/* Device memory of @bytes, and a canary behind it; all 0xff (NaN in every dtype). */
static inline void *gpu_alloc(size_t bytes)
{
	size_t room =
		bytes + gpu_canary_bytes() - (gpu_sanitizer("short") ? bytes / 8 : 0);
	void *p = NULL;

	CU(cudaMalloc(&p, room + !room));
	if (gpu_poisoned())
		CU(cudaMemset(p, 0xff, room));
	return p;
}

/* What the host fills before a kernel reads it. */
static inline void *gpu_room(size_t bytes)
{
	void *p = NULL;

	CU(cudaMalloc(&p, bytes + gpu_canary_bytes() + !bytes));
	if (gpu_canary_bytes())
		CU(cudaMemset(p, 0xff, bytes + gpu_canary_bytes()));
	return p;
}

static inline void gpu_put(void *dst, const void *src, size_t bytes)
{
	if (bytes)
		CU(cudaMemcpy(dst, src, bytes, cudaMemcpyHostToDevice));
}

static inline void *gpu_copy(const void *src, size_t bytes)
{
	void *p = NULL;

	CU(cudaMalloc(&p, bytes + gpu_canary_bytes() + !bytes));
	if (gpu_canary_bytes())
		CU(cudaMemset((u8 *)p + bytes, 0xff, gpu_canary_bytes()));
	gpu_put(p, src, bytes);
	return p;
}

/* Bytes back; fails when something was written behind them. */
static inline void gpu_get(void *dst, const void *src, size_t bytes)
{
	u8 canary[256];

	CU(cudaDeviceSynchronize());
	if (bytes)
		CU(cudaMemcpy(dst, src, bytes, cudaMemcpyDeviceToHost));
	if (!gpu_canary_bytes())
		return;
	CU(cudaMemcpy(canary, (const u8 *)src + bytes, sizeof(canary),
		      cudaMemcpyDeviceToHost));
	for (size_t i = 0; i < sizeof(canary); i++)
		KVT_EXPECT_EQ(canary[i], 0xff);
}

/* New memory with the bytes. */
static inline void *gpu_fetch(const void *src, size_t bytes)
{
	void *p = malloc(bytes + 1);

	gpu_get(p, src, bytes);
	return p;
}

/**
 * struct gpu_paged - device copy of a struct kvt_paged
 * @pages, @batch: with device pointers
 */
struct gpu_paged {
	struct kvk_pages pages;
	struct kvk_batch batch;
};

/* Bring the batch's arrays up to date in place; sizes as at gpu_paged_make(). */
static inline void gpu_paged_update(struct gpu_paged *d, const struct kvt_paged *f)
{
	u32 nr = f->batch.nr_requests;

	gpu_put((void *)d->batch.rows, f->rows, f->row_start[nr] * sizeof(struct kv_row));
	gpu_put((void *)d->batch.row_start, f->row_start, (nr + 1) * sizeof(u32));
	gpu_put((void *)d->batch.q_start, f->q_start, (nr + 1) * sizeof(u32));
	gpu_put((void *)d->batch.lengths, f->lengths, nr * sizeof(u32));
	gpu_put((void *)d->batch.verdicts, f->verdicts, nr * sizeof(struct kv_verdict));
	gpu_put((void *)d->batch.step, &f->step, sizeof(u64));
}

static inline struct gpu_paged gpu_paged_make(const struct kvt_paged *f, u32 rows_max)
{
	struct gpu_paged d = {.pages = f->pages, .batch = f->batch};
	u32 nr = f->batch.nr_requests;

	d.pages.base = gpu_copy(f->pages.base, f->bytes);
	if (f->pages.scales)
		d.pages.scales = gpu_copy(f->scales, sizeof(f->scales));
	d.batch.rows = gpu_room(rows_max * sizeof(struct kv_row));
	d.batch.row_start = gpu_room((nr + 1) * sizeof(u32));
	d.batch.q_start = gpu_room((nr + 1) * sizeof(u32));
	d.batch.lengths = gpu_room(nr * sizeof(u32));
	d.batch.verdicts = gpu_room(nr * sizeof(struct kv_verdict));
	d.batch.step = gpu_room(sizeof(u64));
	gpu_paged_update(&d, f);
	return d;
}

/* Fails unless both pools hold the same bytes. */
static inline void gpu_pages_equal(const struct gpu_paged *d, const struct kvt_paged *f,
				   const char *what)
{
	u8 *got = gpu_fetch(d->pages.base, f->bytes);
	const u8 *want = f->pages.base;

	for (size_t i = 0; i < f->bytes; i++)
		if (got[i] != want[i])
			KVT_FAIL("%s: byte %zu of the pool is %02x, not %02x", what, i,
				 got[i], want[i]);
	free(got);
}

/* A request fails in one of four ways, as a device sees it. */
static inline void verdict_fail(struct kvt_paged *f, u32 r, u32 how)
{
	struct kv_verdict *v = &f->verdicts[r];

	if (how == 0)
		v->bits = KV_BAD_GEN;
	else if (how == 1)
		v->step--;
	else if (how == 2)
		v->rows_checked++;
	else
		memset(v, 0, sizeof(*v));
}

/* Activations of a dtype from floats; the floats become what the dtype holds. */
static inline void *acts_make(u32 dtype, float *x, size_t n)
{
	u16 *h = malloc(n * 4 + 4);

	if (dtype == KVK_F32) {
		memcpy(h, x, n * 4);
		return h;
	}
	for (size_t i = 0; i < n; i++) {
		h[i] = kvt_to_bf16(x[i]);
		x[i] = (float)kvt_bf16(h[i]);
	}
	return h;
}

static inline size_t acts_bytes(u32 dtype, size_t n)
{
	return n * (dtype == KVK_F32 ? 4 : 2);
}

static inline float act_at(u32 dtype, const void *p, size_t i)
{
	return dtype == KVK_F32 ? ((const float *)p)[i]
				: (float)kvt_bf16(((const u16 *)p)[i]);
}

/**
 * acts_equal() - compare activations of the device with the host's
 * @tolerance: of |difference| / (rms of the host's values)
 *
 * NaN must be where the host has NaN. Return: the largest such difference.
 */
static inline double acts_equal(u32 dtype, const void *got, const void *want, size_t n,
				double tolerance, const char *what)
{
	double sum = 0, top = 0, rms;
	size_t nr = 0;

	for (size_t i = 0; i < n; i++) {
		double w = act_at(dtype, want, i);

		if (!isnan(w)) {
			sum += w * w;
			nr++;
		}
	}
	rms = nr && sum > 0 ? sqrt(sum / (double)nr) : 1;
	for (size_t i = 0; i < n; i++) {
		double w = act_at(dtype, want, i), g = act_at(dtype, got, i);
		double d = fabs(g - w) / rms;

		if (isnan(w) != isnan(g) || d > tolerance)
			KVT_FAIL("%s: value %zu of %zu is %g, not %g (rms %g)", what, i,
				 n, g, w, rms);
		if (d > top)
			top = d;
	}
	return top;
}

#endif /* KVT_KERNELS_CUDA_COMMON_H */
