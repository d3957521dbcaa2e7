/* SPDX-License-Identifier: Apache-2.0 */
/* rank_fill.c - rank_fill.h on host memory, and who does it on which memory. */
#include "rank_fill.h"

#include <errno.h>

static void fill_host(const struct rank_fill *f)
{
#pragma omp parallel for
	for (u64 i = 0; i < f->n; i++)
		rank_put(f, i);
}

static void fill_pages_host(const struct kvk_pages *p, const u32 *pfns, u32 nr, u64 seed)
{
	const struct kv_layout *l = &p->layout;
	const u32 words = kv_layer_bytes(l) / 4;

	for (u32 i = 0; i < nr; i++) {
		u8 *page = (u8 *)p->base + kv_page_offset(&p->geometry, pfns[i]);

		for (u32 k = 0; k < l->nr_layers; k++) {
			u32 *part = (u32 *)(void *)(page + (u64)k * kv_layer_stride(l));

			for (u32 w = 0; w < words; w++)
				part[w] = rank_page_word(l, w * 4,
							 rank_mix(seed +
								  ((u64)pfns[i] << 32) +
								  (k << 20) + w));
		}
	}
}

static void read_host(const void *src, u64 bytes, u32 *sink)
{
	const u64 *p = src;
	u64 sum = 0;

#pragma omp parallel for reduction(^ : sum)
	for (u64 i = 0; i < bytes / 8; i++)
		sum ^= p[i];
	*sink = (u32)sum;
}

static bool on_gpu(const struct eng_mem *m)
{
#ifdef CONFIG_CUDA
	return m->separate;
#else
	(void)m;
	return false;
#endif
}

#ifndef CONFIG_CUDA
int rank_fill_cuda(struct eng_mem *m, const struct rank_fill *f)
{
	return -ENODEV;
}

int rank_fill_pages_cuda(struct eng_mem *m, const struct kvk_pages *p, const u32 *pfns,
			 u32 nr, u64 seed)
{
	return -ENODEV;
}

int rank_read_cuda(struct eng_mem *m, const void *src, u64 bytes, u32 *sink)
{
	return -ENODEV;
}
#endif

int rank_fill(struct eng_mem *m, const struct rank_fill *f)
{
	if (on_gpu(m))
		return rank_fill_cuda(m, f);
	fill_host(f);
	return 0;
}

int rank_fill_pages(struct eng_mem *m, const struct kvk_pages *p, const u32 *pfns, u32 nr,
		    u64 seed)
{
	if (on_gpu(m))
		return rank_fill_pages_cuda(m, p, pfns, nr, seed);
	fill_pages_host(p, pfns, nr, seed);
	return 0;
}

int rank_read(struct eng_mem *m, const void *src, u64 bytes, u32 *sink)
{
	if (on_gpu(m))
		return rank_read_cuda(m, src, bytes, sink);
	read_host(src, bytes, sink);
	return 0;
}
