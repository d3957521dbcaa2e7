/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rope.c - rotary frequencies, plain and YaRN, and the table the rope kernel reads.
 *
 * Pure functions; any thread. All in double: a position of 131,072 times a frequency of 1
 * has no bits to spare in float.
 */
#include "engine/model/config.h"
#include "engine/model/rope.h"

#include <math.h>

double eng_yarn_mscale(double factor, double m)
{
	return factor <= 1 ? 1.0 : 0.1 * m * log(factor) + 1.0;
}

/* Index of the pair that turns @rotations times within the original context. */
static double yarn_bound(const struct eng_rope *r, double rotations)
{
	return r->dim * log(r->original_positions / (rotations * 2 * M_PI)) /
	       (2 * log(r->theta));
}

/* Frequency of pair @i: radians per position. */
static double rope_freq(const struct eng_rope *r, u32 i)
{
	double plain = 1.0 / pow(r->theta, 2.0 * i / r->dim);
	double low, high, interpolate;

	if (!r->yarn)
		return plain;
	low = fmax(floor(yarn_bound(r, r->beta_fast)), 0);
	high = fmin(ceil(yarn_bound(r, r->beta_slow)), r->dim - 1);
	interpolate = fmin(fmax((i - low) / fmax(high - low, 0.001), 0), 1);
	return interpolate * plain / r->factor + (1 - interpolate) * plain;
}

void eng_rope_table(const struct eng_rope *r, u32 nr_positions, float *ret)
{
	u32 half = r->dim / 2;
	double att = 1.0;

	if (r->yarn)
		att = eng_yarn_mscale(r->factor, r->mscale) /
		      eng_yarn_mscale(r->factor, r->mscale_all_dim);
	for (u32 i = 0; i < half; i++) {
		double freq = rope_freq(r, i);

		for (u32 p = 0; p < nr_positions; p++) {
			float *row = ret + (size_t)p * r->dim;

			row[i] = (float)(cos(p * freq) * att);
			row[half + i] = (float)(sin(p * freq) * att);
		}
	}
}
