/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sample_ref.c - next token of each row on the host: greedy, temperature, top-p.
 *
 * Top-p keeps the most likely tokens until their mass reaches top_p; among equal logits
 * smaller ids come first. The cut is found without sorting: four passes that add up mass
 * per byte of an order-preserving key. The draw walks the kept tokens by id. Rows on
 * their own; any thread.
 */
#include <math.h>
#include "ref.h"

struct draw {
	const float *logits;
	u32 vocab;
	float max;
	float temperature;
	u32 cut;      /* key of the least likely kept logit */
	double above; /* mass of keys above the cut */
	double want;  /* mass to keep */
};

/* Unsigned order of keys = order of the floats. */
static u32 key_of(float x)
{
	u32 b = kvk_f32_bits(x);

	return b & 0x80000000u ? ~b : b | 0x80000000u;
}

static double mass_of(const struct draw *d, u32 i)
{
	return expf((d->logits[i] - d->max) / d->temperature);
}

/* One byte of the cut: @shift is the place of the byte in the key. */
static void cut_pass(struct draw *d, u32 shift)
{
	double mass[256] = {0};
	bool used[256] = {false};
	u32 chosen = 256;

	for (u32 i = 0; i < d->vocab; i++) {
		u32 key = key_of(d->logits[i]);

		if (shift < 24 && key >> (shift + 8) != d->cut)
			continue;
		mass[(key >> shift) & 255] += mass_of(d, i);
		used[(key >> shift) & 255] = true;
	}
	for (u32 b = 256; b-- > 0;) {
		if (!used[b])
			continue;
		if (chosen < 256)
			d->above += mass[chosen];
		chosen = b;
		if (d->above + mass[b] >= d->want)
			break;
	}
	d->cut = shift < 24 ? d->cut << 8 | chosen : chosen;
}

/* How many of the tokens at the cut itself are needed; all have the same mass. */
static u32 cut_count(const struct draw *d)
{
	double mass = 0, sum = d->above;
	u32 n = 0;

	for (u32 i = 0; i < d->vocab; i++) {
		if (key_of(d->logits[i]) != d->cut)
			continue;
		mass = mass_of(d, i);
		if (n && sum >= d->want)
			break;
		sum += mass;
		n++;
	}
	return n;
}

static u32 draw_id(struct draw *d, float top_p, u64 seed)
{
	double total = 0, target, sum = 0, at_cut = 0;
	u32 last = d->vocab, nr_cut = UINT32_MAX;

	for (u32 i = 0; i < d->vocab; i++)
		total += mass_of(d, i);
	if (top_p < 1.0f) {
		d->want = (double)top_p * total;
		for (int shift = 24; shift >= 0; shift -= 8)
			cut_pass(d, (u32)shift);
		nr_cut = cut_count(d);
		for (u32 i = 0; i < d->vocab; i++)
			if (key_of(d->logits[i]) == d->cut)
				at_cut = mass_of(d, i);
		total = d->above + at_cut * nr_cut;
	}
	target = (double)(seed >> 11) * 0x1p-53 * total;
	for (u32 i = 0; i < d->vocab; i++) {
		u32 key = key_of(d->logits[i]);
		double mass = mass_of(d, i);

		if (key < d->cut || mass == 0 || (key == d->cut && nr_cut == 0))
			continue;
		if (key == d->cut)
			nr_cut--;
		last = i;
		sum += mass;
		if (sum > target)
			break;
	}
	return last;
}

static void sample_row(const struct kvk_sample_args *a, u32 row)
{
	struct draw d = {.logits = a->logits + (size_t)row * a->vocab, .vocab = a->vocab};
	float temperature = a->temperature[row];
	u32 id = 0;
	bool bad = false;
	double sum = 0;

	for (u32 i = 0; i < a->vocab; i++) {
		bad |= kvk_is_nan(d.logits[i]);
		if (d.logits[i] > d.logits[id])
			id = i;
	}
	d.max = d.logits[id];
	d.temperature = temperature;
	/* an infinite maximum leaves nothing to draw from */
	if (bad && !KV_MUTANT(sample_nan))
		id = 0;
	else if (temperature > 0 && isfinite(d.max) && a->top_p[row] > 0)
		id = draw_id(&d, a->top_p[row], a->seeds[row]);
	a->ret_ids[row] = id;
	if (!a->ret_logprob)
		return;
	for (u32 i = 0; i < a->vocab; i++)
		sum += expf(d.logits[i] - d.max);
	a->ret_logprob[row] = bad ? kvk_bits_f32(0x7fc00000u)
				  : (float)((double)d.logits[id] - d.max - log(sum));
}

int kvk_sample_ref(const struct kvk_sample_args *a, kvk_stream stream)
{
	if (!a->logits || !a->temperature || !a->top_p || !a->seeds || !a->ret_ids ||
	    !a->vocab)
		return -EINVAL;
#pragma omp parallel for schedule(dynamic)
	for (u32 r = 0; r < a->nr_rows; r++)
		sample_row(a, r);
	return 0;
}
