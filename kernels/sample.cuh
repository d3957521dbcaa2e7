/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sample.cuh - what the two samplers share: the order of logits, a token's mass, and the launch
 * of the one that takes several CTAs a row (sample_wide.cu). Device code and one host function.
 */
#ifndef KVK_SAMPLE_CUH
#define KVK_SAMPLE_CUH

#include "kernels/arch.cuh"
#include "kernels/dev.cuh"

#define SAMPLE_NO_NAN 0x01u

struct sample_params {
	struct kvk_sample_args a;
	u32 mass_bits;
	u32 vec; /* rows of whole, aligned groups of four */
	u32 off;
};

/* Unsigned order of keys = order of the floats. */
KVK_DEV u32 sample_key(float x)
{
	u32 b = kvk_f32_bits(x);

	return b & 0x80000000u ? ~b : b | 0x80000000u;
}

KVK_DEV float sample_logit(u32 key)
{
	return kvk_bits_f32(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

/* Exponents of 2 that a difference of logits stands for; finite, so that 0 stays 0. */
KVK_DEV float sample_scale(float temperature)
{
	return fminf(1.44269504f / temperature, 3e38f);
}

/* A logit's mass in units of 2^-mass_bits of the largest one's; @unit: 2^mass_bits. */
KVK_DEV u64 sample_mass(float logit, float max, float scale, float unit)
{
	return (u64)(arch_exp2((logit - max) * scale) * unit);
}

/* The larger logit, and of equal ones the smaller id. */
KVK_DEV void sample_best(float &top, u32 &id, float v, u32 i)
{
	if (v > top || (v == top && i < id)) {
		top = v;
		id = i;
	}
}

/**
 * kvk_sample_wide() - sample with a cluster of CTAs per row, the row in their shared memory
 * @p: arguments that kvk_sample_cuda() has checked
 * @stream: queued here
 *
 * Hopper. The same ids as sample.cu's kernel. Return: 0; -ENOSPC: rows are too long for it, or
 * this device is not one for it; -EIO.
 */
int kvk_sample_wide(const struct sample_params *p, kvk_stream stream);

#endif /* KVK_SAMPLE_CUH */
