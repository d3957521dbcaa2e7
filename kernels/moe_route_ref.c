/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe_route_ref.c - sigmoid router on the host: biased scores choose, plain scores weigh.
 *
 * Each token on its own; no state; any thread.
 */
#include <math.h>
#include <string.h>
#include "ref.h"

#define EXPERTS_MAX 1024u
#define GROUPS_MAX  64u

static float score_of(float logit)
{
	return 1.0f / (1.0f + expf(-logit));
}

/* Index of the largest of @n values not yet taken; ties go to the smaller index. */
static u32 take_best(const float *v, bool *taken, u32 n)
{
	u32 best = n;

	for (u32 i = 0; i < n; i++)
		if (!taken[i] && (best == n || v[i] > v[best]))
			best = i;
	taken[best] = true;
	return best;
}

/* Experts of groups that are not among the best are marked taken. */
static void limit_groups(const struct kvk_moe_route_args *a, const float *biased,
			 bool *taken)
{
	u32 size = a->nr_experts / a->nr_groups;
	float score[GROUPS_MAX];
	bool chosen[GROUPS_MAX] = {false};

	for (u32 g = 0; g < a->nr_groups; g++) {
		float first = -INFINITY, second = -INFINITY;

		for (u32 i = g * size; i < (g + 1) * size; i++) {
			if (biased[i] > first) {
				second = first;
				first = biased[i];
			} else if (biased[i] > second) {
				second = biased[i];
			}
		}
		score[g] = size > 1 ? first + second : first;
	}
	for (u32 g = 0; g < a->top_groups; g++)
		take_best(score, chosen, a->nr_groups);
	for (u32 i = 0; i < a->nr_experts; i++)
		taken[i] = !chosen[i / size];
}

static void route_nan(const struct kvk_moe_route_args *a, u32 *ids, float *weights)
{
	for (u32 k = 0; k < a->top_k; k++) {
		ids[k] = k;
		weights[k] = kvk_bits_f32(0x7fc00000u);
	}
}

static void route_token(const struct kvk_moe_route_args *a, u32 t)
{
	const float *logits = a->logits + (size_t)t * a->nr_experts;
	float *weights = a->ret_weights + (size_t)t * a->top_k;
	u32 *ids = a->ret_ids + (size_t)t * a->top_k;
	float score[EXPERTS_MAX], biased[EXPERTS_MAX], sum = 0;
	bool taken[EXPERTS_MAX], bad = false;

	memset(taken, 0, a->nr_experts * sizeof(bool));
	for (u32 i = 0; i < a->nr_experts; i++) {
		score[i] = score_of(logits[i]);
		biased[i] = a->bias ? score[i] + a->bias[i] : score[i];
		bad |= kvk_is_nan(biased[i]);
	}
	if (bad && !KV_MUTANT(route_nan)) {
		route_nan(a, ids, weights);
		return;
	}
	if (a->top_groups < a->nr_groups)
		limit_groups(a, biased, taken);
	for (u32 k = 0; k < a->top_k; k++) {
		ids[k] = take_best(biased, taken, a->nr_experts);
		weights[k] = score[ids[k]];
		sum += weights[k];
	}
	for (u32 k = 0; k < a->top_k; k++)
		weights[k] =
			(a->norm ? weights[k] / (sum + 1e-20f) : weights[k]) * a->scale;
}

int kvk_moe_route_ref(const struct kvk_moe_route_args *a, kvk_stream stream)
{
	if (!a->logits || !a->ret_ids || !a->ret_weights || !a->nr_experts ||
	    a->nr_experts > EXPERTS_MAX || !a->top_k)
		return -EINVAL;
	if (!a->nr_groups || a->nr_groups > GROUPS_MAX || a->nr_experts % a->nr_groups ||
	    !a->top_groups || a->top_groups > a->nr_groups ||
	    a->top_k > a->nr_experts / a->nr_groups * a->top_groups)
		return -EINVAL;
#pragma omp parallel for schedule(static) if (a->nr_tokens > 16)
	for (u32 t = 0; t < a->nr_tokens; t++)
		route_token(a, t);
	return 0;
}
