/* SPDX-License-Identifier: Apache-2.0 */
/*
 * product.h - the arithmetic of a warpgroup's product (wgmma) for machine.cc, which knows when
 * it is done. Exact products, summed in double and rounded once.
 */
#ifndef HOPPER_PRODUCT_H
#define HOPPER_PRODUCT_H

#include "ptx.h"

enum { WARP = 32 };
enum product_type { F16, BF16, E4M3 };

/* One warp's 16 rows of a product: what the lanes gave */
struct product {
	float *d[WARP];
	uint32_t a[WARP][4];
	enum product_type type;
	uint32_t rows; /* where the warp's rows are in shared memory; 0: in a */
	uint32_t n, b;
	uint32_t turned; /* b's memory is rows of k: bytes from 64 columns to the next */
	uint32_t apart;	 /* ... from 8 rows to the next; 0: they follow each other */
	bool narrow;	 /* b's rows are 64 bytes with the swizzle of 64 */
	int use_d;
};

/* Byte k of row n of rows of 128 bytes, swizzled, from shared address @base on */
static const uint8_t *product_at(uint32_t base, uint32_t n, uint32_t k)
{
	uint32_t at = base + n * 128 + k;

	at ^= (at >> 7 & 7) << 4;
	return hopper_shared() + at;
}

/* ... of 64 */
static const uint8_t *product_narrow(uint32_t base, uint32_t n, uint32_t k)
{
	uint32_t at = base + n * 64 + k;

	at ^= (at >> 7 & 3) << 4;
	return hopper_shared() + at;
}

static float product_value(const struct product *p, const uint8_t *at)
{
	if (p->type == E4M3)
		return kvk_e4m3_decode(*at);
	return p->type == BF16 ? hopper_half<true>(*(const uint16_t *)at)
			       : hopper_half<false>(*(const uint16_t *)at);
}

static float product_b(const struct product *p, uint32_t n, uint32_t k)
{
	const uint32_t bytes = p->type == E4M3 ? 1 : 2;

	if (p->turned)
		return product_value(p, product_at(p->b + n / 64 * p->turned +
							   (p->apart ? k / 8 * p->apart : 0),
						   p->apart ? k % 8 : k, n % 64 * 2));
	return product_value(p, p->narrow ? product_narrow(p->b, n, k * bytes)
					  : product_at(p->b, n, k * bytes));
}

/* A word of registers is 4 bytes of a row: columns 0 .. 15 bytes of rows g and g + 8, then 16 .. 31. */
static float product_a(const struct product *p, uint32_t row, uint32_t k)
{
	const uint32_t at = k * (p->type == E4M3 ? 1 : 2);
	const uint32_t *word = &p->a[row % 8 * 4 + at % 16 / 4][at / 16 * 2 + row / 8];

	return product_value(p, p->rows ? product_at(p->rows, row, at)
					: (const uint8_t *)word + at % 4);
}

static void product_run(const struct product *p)
{
	const uint32_t depth = p->type == E4M3 ? 32 : 16;
	float a[16][32], b[32];

	for (uint32_t i = 0; i < 16 * depth; i++)
		a[i / depth][i % depth] = product_a(p, i / depth, i % depth);
	for (uint32_t col = 0; col < p->n; col++) {
		for (uint32_t k = 0; k < depth; k++)
			b[k] = product_b(p, col, k);
		for (uint32_t row = 0; row < 16; row++) {
			float *d = &p->d[row % 8 * 4 + col % 8 / 2]
					[col / 8 * 4 + row / 8 * 2 + col % 2];
			double sum = p->use_d ? *d : 0.0;

			for (uint32_t k = 0; k < depth; k++)
				sum += (double)a[row][k] * b[k];
			*d = (float)sum;
		}
	}
}

#endif /* HOPPER_PRODUCT_H */
