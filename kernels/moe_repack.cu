/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_repack.cu - INT4 experts from checkpoint order to the kernel's order, and back to
 * compare.
 *
 * One expert at a time: the loader copies an expert to a staging buffer, repacks it to
 * its place and reuses the buffer, so no second copy of a layer exists. Verification
 * reads the packed expert through the inverse mapping and counts every word and scale
 * that differs.
 */
#include <errno.h>
#include "moe_cuda.h"
#include "moe_pack.h"

/* struct repack_mat - one matrix of one expert */
struct repack_mat {
	struct kvk_pack p;
	const uint32_t *w;
	const uint16_t *s;
	uint8_t *packed;
	uint32_t *bad; /* verify: count differences; NULL: write */
};

/* One CTA per brick. */
__global__ void repack_kernel(const struct repack_mat m)
{
	const uint32_t mt = blockIdx.y, kb = blockIdx.x,
		       groups = KVK_BRICK_COLS / m.p.group;
	const uint32_t row_words = m.p.kbricks * 16, row_scales = m.p.kbricks * groups;
	uint8_t *brick = m.packed + kvk_pack_brick(&m.p, mt, kb);
	uint16_t *scales = (uint16_t *)(brick + KVK_BRICK_NIBBLES);

	for (uint32_t i = threadIdx.x; i < 32 * 16; i += blockDim.x) {
		uint32_t r = i / 16, c8 = i % 16;
		uint32_t w = m.w[(uint64_t)kvk_pack_row(&m.p, mt, r) * row_words +
				 kb * 16 + c8];
		uint32_t *at = (uint32_t *)brick + kvk_brick_word(r, c8);

		if (!m.bad)
			*at = kvk_pack_word(w);
		else if (kvk_unpack_word(*at) != w)
			atomicAdd(m.bad, 1);
	}
	for (uint32_t i = threadIdx.x; i < 32 * groups; i += blockDim.x) {
		uint32_t r = i / groups, j = i % groups;
		uint16_t s = m.s[(uint64_t)kvk_pack_row(&m.p, mt, r) * row_scales +
				 kb * groups + j];
		uint16_t *at = scales + kvk_brick_scale(&m.p, r, j);

		if (!m.bad)
			*at = s;
		else if (*at != s)
			atomicAdd(m.bad, 1);
	}
}

static int repack_run(const struct kvk_repack *r, uint32_t *bad, cudaStream_t stream)
{
	const struct kvk_experts *e = &r->shape;
	struct repack_mat m[2];

	if (e->dtype != KVK_INT4 || !kvk_pack_ok(2 * e->inter, e->hidden, e->group) ||
	    !kvk_pack_ok(e->hidden, e->inter, e->group))
		return -EINVAL;
	m[0].p = kvk_pack_make(2 * e->inter, e->hidden, e->group, 1);
	m[0].w = (const uint32_t *)r->w13;
	m[0].s = (const uint16_t *)r->s13;
	m[0].packed = (uint8_t *)r->packed13;
	m[1].p = kvk_pack_make(e->hidden, e->inter, e->group, 0);
	m[1].w = (const uint32_t *)r->w2;
	m[1].s = (const uint16_t *)r->s2;
	m[1].packed = (uint8_t *)r->packed2;
	for (int i = 0; i < 2; i++) {
		m[i].bad = bad;
		repack_kernel<<<dim3(m[i].p.kbricks, m[i].p.mtiles), 128, 0, stream>>>(
			m[i]);
	}
	return cudaGetLastError() == cudaSuccess ? 0 : -EIO;
}

size_t kvk_moe_packed_bytes(const struct kvk_experts *e, int second)
{
	struct kvk_pack p;

	if (second)
		p = kvk_pack_make(e->hidden, e->inter, e->group, 0);
	else
		p = kvk_pack_make(2 * e->inter, e->hidden, e->group, 1);
	return kvk_pack_bytes(&p);
}

int kvk_moe_int4_repack(const struct kvk_repack *r, kvk_stream stream)
{
	return repack_run(r, NULL, (cudaStream_t)stream);
}

int kvk_moe_int4_verify(const struct kvk_repack *r, uint32_t *ret_bad, kvk_stream stream)
{
	return ret_bad ? repack_run(r, ret_bad, (cudaStream_t)stream) : -EINVAL;
}
