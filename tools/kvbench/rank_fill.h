/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rank_fill.h - random weights and pages, made where they are used: a function of a seed and the
 * element's number, the same on the host and on a GPU.
 *
 * Everything is queued on m->stream. Results: 0; -EIO the launch failed.
 */
#ifndef KVB_RANK_FILL_H
#define KVB_RANK_FILL_H

#include "base/util.h"
#include "engine/run/mem.h"
#include "kernels/fp8.h"

#ifdef __cplusplus
extern "C" {
#endif

enum rank_kind {
	RANK_BF16,	   /* normal, deviation @b */
	RANK_F32,	   /* @a .. @b */
	RANK_INT4,	   /* words of eight nibbles: q of -7 .. 7, mean 0 */
	RANK_E4M3,	   /* normal, deviation 112, never NaN */
	RANK_BF16_UNIFORM, /* @a .. @b */
};

/**
 * struct rank_fill - an array
 * @n: elements (words of INT4)
 */
struct rank_fill {
	void *dst;
	u64 n;
	u64 seed;
	u32 kind;
	float a;
	float b;
};

/* splitmix64's finaliser */
KV_INLINE u64 rank_mix(u64 z)
{
	z += 0x9e3779b97f4a7c15ull;
	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
	return z ^ (z >> 31);
}

/* Four uniform numbers added up, of unit variance; at most 3.5. */
KV_INLINE float rank_normal(u64 r)
{
	u32 sum = (u32)(r & 0xffff) + (u32)(r >> 16 & 0xffff) + (u32)(r >> 32 & 0xffff) +
		  (u32)(r >> 48);

	return ((float)sum / 65536.0f - 2.0f) * 1.7320508f;
}

/* Nibble 0, q = -8, becomes 8, q = 0. */
KV_INLINE u32 rank_nibbles(u32 w)
{
	return w | (~(w | w >> 1 | w >> 2 | w >> 3) & 0x11111111u) << 3;
}

KV_INLINE void rank_put(const struct rank_fill *f, u64 i)
{
	const u64 r = rank_mix(f->seed * 0x100000001b3ull + i);
	const float uniform = f->a + (f->b - f->a) * (float)(u32)(r >> 40) / 16777216.0f;

	switch (f->kind) {
	case RANK_BF16:
		((u16 *)f->dst)[i] = kvk_f32_to_bf16(rank_normal(r) * f->b);
		break;
	case RANK_F32:
		((float *)f->dst)[i] = uniform;
		break;
	case RANK_INT4:
		((u32 *)f->dst)[i] = rank_nibbles((u32)r);
		break;
	case RANK_E4M3:
		((u8 *)f->dst)[i] = kvk_e4m3_encode(rank_normal(r) * 112.0f);
		break;
	default:
		((u16 *)f->dst)[i] = kvk_f32_to_bf16(uniform);
	}
}

/* Word at byte @off of a layer's part of an MLA page: values of 0.1 .. 2, scales of 0.004 ..
 * 0.008 where the page holds them. */
KV_INLINE u32 rank_page_word(const struct kv_layout *l, u32 off, u64 r)
{
	if (l->dtype == KV_DTYPE_BF16)
		return ((u32)r & 0x80ff80ffu) | 0x3f003f00u;
	if (off >= kv_mla_scale_off(l, 0))
		return ((u32)r & 0x03ff03ffu) | 0x1c001c00u;
	return ((u32)r & 0x9f9f9f9fu) | 0x20202020u;
}

/** rank_fill() - all elements of an array */
int rank_fill(struct eng_mem *m, const struct rank_fill *f);

/**
 * rank_fill_pages() - all layers of pages of an MLA pool, BF16 or E4M3
 * @pfns: [nr] in the kernels' memory
 */
int rank_fill_pages(struct eng_mem *m, const struct kvk_pages *p, const u32 *pfns, u32 nr,
		    u64 seed);

/** rank_read() - read @bytes at @src once; @sink: 4 bytes in the kernels' memory */
int rank_read(struct eng_mem *m, const void *src, u64 bytes, u32 *sink);

/* rank_fill.cu */
int rank_fill_cuda(struct eng_mem *m, const struct rank_fill *f);
int rank_fill_pages_cuda(struct eng_mem *m, const struct kvk_pages *p, const u32 *pfns,
			 u32 nr, u64 seed);
int rank_read_cuda(struct eng_mem *m, const void *src, u64 bytes, u32 *sink);

#ifdef __cplusplus
}
#endif
#endif /* KVB_RANK_FILL_H */
