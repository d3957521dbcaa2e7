/* SPDX-License-Identifier: Apache-2.0 */
/*
 * product.h - the arithmetic of a warpgroup's product (wgmma) for machine.cc, which knows when
 * it is done. Exact products, summed in double and rounded once.
 */
#ifndef HOPPER_PRODUCT_H
#define HOPPER_PRODUCT_H

#include "ptx.h"

enum { WARP = 32 };

/* One warp's 16 rows of a product: what the lanes gave */
struct product {
	float *d[WARP];
	uint32_t a[WARP][4]; /* f16 */
	uint32_t
		rows; /* e4m3, bf16: where the warp's rows are in shared memory; f16: 0 */
	bool bf16;
	uint32_t n, b;
	uint32_t turned; /* b's memory is rows of k: bytes from 64 columns to the next */
	int use_d;
};

/* Byte k of row n of rows of 128 bytes, swizzled, from shared address @base on */
static const uint8_t *product_at(uint32_t base, uint32_t n, uint32_t k)
{
	uint32_t at = base + n * 128 + k;

	at ^= (at >> 7 & 7) << 4;
	return hopper_shared() + at;
}

static float product_b(const struct product *p, uint32_t n, uint32_t k)
{
	if (p->turned)
		return hopper_half<true>(*(const uint16_t *)product_at(
			p->b + n / 64 * p->turned, k, n % 64 * 2));
	if (p->bf16)
		return hopper_half<true>(*(const uint16_t *)product_at(p->b, n, k * 2));
	if (p->rows)
		return kvk_e4m3_decode(*product_at(p->b, n, k));
	return hopper_half<false>(*(const uint16_t *)product_at(p->b, n, k * 2));
}

static float product_a(const struct product *p, uint32_t row, uint32_t k)
{
	const uint32_t lane = row % 8 * 4 + k % 8 / 2;

	if (p->turned)
		return hopper_half<true>(p->a[lane][k / 8 * 2 + row / 8] >> k % 2 * 16);
	if (p->bf16)
		return hopper_half<true>(
			*(const uint16_t *)product_at(p->rows, row, k * 2));
	if (p->rows)
		return kvk_e4m3_decode(*product_at(p->rows, row, k));
	return hopper_half<false>(p->a[lane][k / 8 * 2 + row / 8] >> k % 2 * 16);
}

static void product_run(const struct product *p)
{
	for (uint32_t i = 0; i < 16 * p->n; i++) {
		const uint32_t row = i % 16, col = i / 16,
			       depth = p->rows && !p->bf16 ? 32 : 16;
		float *d = &p->d[row % 8 * 4 + col % 8 / 2]
				[col / 8 * 4 + row / 8 * 2 + col % 2];
		double sum = p->use_d ? *d : 0.0;

		for (uint32_t k = 0; k < depth; k++)
			sum += (double)product_a(p, row, k) * product_b(p, col, k);
		*d = (float)sum;
	}
}

#endif /* HOPPER_PRODUCT_H */
