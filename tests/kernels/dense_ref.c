/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dense_ref.c - router, norm, rope and silu of the host against float64, and the
 * inner loops of each instruction set.
 */
#include "tests/kvt.h"
#include "common.h"
#include "kernels/fp8.h"
#include "kernels/simd.h"

static struct kvt_rng rng;

/* -------------------------------------------------------------------------- router */

struct route {
	float logits[64];
	float bias[64];
	u32 ids[16];
	float weights[16];
	struct kvk_moe_route_args a;
};

static void route_init(struct route *r, u32 experts, u32 top_k, u32 groups,
		       u32 top_groups)
{
	kvt_rng_fill(&rng, r->logits, experts, 2.0f);
	kvt_rng_fill(&rng, r->bias, experts, 0.3f);
	r->a = (struct kvk_moe_route_args){.logits = r->logits,
					   .bias = r->bias,
					   .ret_ids = r->ids,
					   .ret_weights = r->weights,
					   .nr_tokens = 1,
					   .nr_experts = experts,
					   .top_k = top_k,
					   .nr_groups = groups,
					   .top_groups = top_groups,
					   .norm = true,
					   .scale = 2.5f};
}

/* Is @e among the best @k of experts in groups among the best? By counting, no sort;
 * scores closer than f32 can tell count as equal. */
static bool route_truth_has(const struct route *r, u32 e, double *ret_score)
{
	u32 n = r->a.nr_experts, size = n / r->a.nr_groups, better = 0;
	double score[64] = {0}, biased[64] = {0}, group[64] = {0};

	for (u32 i = 0; i < n; i++) {
		score[i] = 1 / (1 + exp(-(double)r->logits[i]));
		biased[i] = (float)((float)score[i] + (r->a.bias ? r->bias[i] : 0));
	}
	for (u32 g = 0; g < r->a.nr_groups; g++) {
		group[g] = -INFINITY;
		for (u32 i = g * size; i < (g + 1) * size; i++)
			for (u32 j = i + 1; j < (g + 1) * size; j++)
				group[g] = fmax(group[g], biased[i] + biased[j]);
		if (size == 1)
			group[g] = biased[g];
	}
	*ret_score = score[e];
	for (u32 i = 0; i < n; i++) {
		u32 rank = 0;

		for (u32 g = 0; g < r->a.nr_groups; g++)
			rank += group[g] > group[i / size] + 1e-6;
		if (rank >= r->a.top_groups) {
			if (i == e)
				return false;
			continue;
		}
		better += biased[i] > biased[e] + 1e-6;
	}
	return better < r->a.top_k;
}

KVT_TEST(route_against_float64)
{
	static const u32 shapes[][4] = {{16, 4, 1, 1}, {64, 8, 8, 4}, {32, 6, 4, 2},
					{8, 8, 1, 1},  {8, 2, 8, 3},  {5, 1, 1, 1}};

	rng.state = kvt_rand64();
	for (u32 round = 0; round < 200; round++) {
		const u32 *s = shapes[round % 6];
		double sum = 0, score;
		struct route r;

		route_init(&r, s[0], s[1], s[2], s[3]);
		if (round % 5 == 0)
			r.a.bias = NULL;
		r.a.norm = round % 3 != 0;
		KVT_EXPECT_EQ(kvk_host_ops()->moe_route(&r.a, NULL), 0);
		for (u32 k = 0; k < s[1]; k++) {
			for (u32 j = 0; j < k; j++)
				KVT_EXPECT(r.ids[j] != r.ids[k]);
			KVT_EXPECT(route_truth_has(&r, r.ids[k], &score));
			sum += score;
		}
		for (u32 k = 0; k < s[1]; k++) {
			route_truth_has(&r, r.ids[k], &score);
			score = (r.a.norm ? score / sum : score) * 2.5;
			KVT_EXPECT_LE(fabs(score - r.weights[k]), 1e-6);
		}
	}
}

KVT_TEST(route_ties_and_nan_give_valid_ids)
{
	struct route r;

	rng.state = kvt_rand64();
	route_init(&r, 16, 4, 1, 1);
	r.a.bias = NULL;
	for (u32 i = 0; i < 16; i++)
		r.logits[i] = i >= 3 && i < 12 ? 1.0f : 0.5f;
	KVT_EXPECT_EQ(kvk_host_ops()->moe_route(&r.a, NULL), 0);
	for (u32 k = 0; k < 4; k++)
		KVT_EXPECT_EQ(r.ids[k], 3 + k);
	for (u32 at = 0; at < 16; at += 5) {
		r.logits[at] = NAN;
		memset(r.ids, 0xff, sizeof(r.ids));
		KVT_EXPECT_EQ(kvk_host_ops()->moe_route(&r.a, NULL), 0);
		for (u32 k = 0; k < 4; k++) {
			KVT_EXPECT_EQ(r.ids[k], k);
			KVT_EXPECT(isnan(r.weights[k]));
		}
		r.logits[at] = 0;
	}
	r.a.top_k = 17;
	KVT_EXPECT_EQ(kvk_host_ops()->moe_route(&r.a, NULL), -EINVAL);
	r.a.top_k = 4;
	r.a.nr_groups = 3;
	KVT_EXPECT_EQ(kvk_host_ops()->moe_route(&r.a, NULL), -EINVAL);
}

/* ---------------------------------------------------------------- norm, rope, silu */

KVT_TEST(norm_against_float64)
{
	float x[7 * 333], y[7 * 333], res[7 * 301], old[7 * 301], w[301];

	rng.state = kvt_rand64();
	for (u32 pass = 0; pass < 2; pass++) {
		struct kvk_norm_args a = {.x = x,
					  .residual = pass ? res : NULL,
					  .weight = w,
					  .y = y,
					  .eps = 1e-5f,
					  .nr_rows = 7,
					  .cols = 301,
					  .x_stride = 333,
					  .y_stride = 333,
					  .act_dtype = KVK_F32};

		kvt_rng_fill(&rng, x, 7 * 333, 3.0f);
		kvt_rng_fill(&rng, res, 7 * 301, 3.0f);
		kvt_rng_fill(&rng, w, 301, 1.0f);
		memcpy(old, res, sizeof(old));
		KVT_EXPECT_EQ(kvk_host_ops()->norm(&a, NULL), 0);
		for (u32 r = 0; r < 7; r++) {
			double ss = 0, v[301];

			for (u32 c = 0; c < 301; c++) {
				v[c] = x[r * 333 + c];
				if (pass) {
					v[c] = (float)(v[c] + old[r * 301 + c]);
					KVT_EXPECT(res[r * 301 + c] == (float)v[c]);
				}
				ss += v[c] * v[c];
			}
			for (u32 c = 0; c < 301; c++) {
				double t = v[c] / sqrt(ss / 301 + 1e-5f) * w[c];

				KVT_EXPECT_LE(fabs(t - y[r * 333 + c]),
					      4e-7 * fabs(t) + 1e-9);
			}
		}
		a.y = x; /* in place gives the same */
		KVT_EXPECT_EQ(pass ? 0 : kvk_host_ops()->norm(&a, NULL), 0);
		if (!pass)
			KVT_EXPECT(!memcmp(x, y, 301 * sizeof(float)));
	}
}

/* Into another array: the same values, and nothing else is touched there or here. */
static void rope_elsewhere(const struct kvk_rope_args *rotated, const float *old,
			   const float *want)
{
	enum { TOKENS = 5, HEAD = 21, TOKEN = 67, AT = 3 };
	struct kvk_rope_args a = *rotated;
	float x[TOKENS * 128], y[TOKENS * TOKEN];

	memcpy(x, old, sizeof(x));
	for (u32 i = 0; i < TOKENS * TOKEN; i++)
		y[i] = 55.0f;
	a.x = x;
	a.y = y;
	a.y_head_stride = HEAD;
	a.y_token_stride = TOKEN;
	a.y_offset = AT;
	KVT_EXPECT_EQ(kvk_host_ops()->rope(&a, NULL), 0);
	KVT_EXPECT(!memcmp(x, old, sizeof(x)));
	for (u32 i = 0; i < TOKENS * TOKEN; i++) {
		u32 t = i / TOKEN, h = i % TOKEN / HEAD, k = i % TOKEN % HEAD;

		if (h < a.nr_heads && k >= AT && k < AT + a.rope_dim)
			KVT_EXPECT(y[i] ==
				   want[t * 128 + h * a.head_stride + a.offset + k - AT]);
		else
			KVT_EXPECT(y[i] == 55.0f);
	}
	a.y_head_stride = a.rope_dim + AT - 1;
	KVT_EXPECT_EQ(kvk_host_ops()->rope(&a, NULL), -EINVAL);
}

KVT_TEST(rope_pairs_and_halves)
{
	enum { TOKENS = 5, HEADS = 3, STRIDE = 40, DIM = 16, OFF = 20 };
	float x[TOKENS * 128], old[TOKENS * 128], cs[32 * DIM];
	u32 pos[TOKENS] = {0, 7, 31, 3, 3};

	rng.state = kvt_rand64();
	for (u32 inter = 0; inter < 2; inter++) {
		struct kvk_rope_args a = {.x = x,
					  .positions = pos,
					  .cos_sin = cs,
					  .nr_tokens = TOKENS,
					  .nr_heads = HEADS,
					  .head_stride = STRIDE,
					  .token_stride = 128,
					  .offset = OFF,
					  .rope_dim = DIM,
					  .act_dtype = KVK_F32,
					  .interleaved = inter};

		kvt_rng_fill(&rng, x, TOKENS * 128, 1.0f);
		for (u32 p = 0; p < 32; p++)
			for (u32 i = 0; i < DIM / 2; i++) {
				cs[p * DIM + i] =
					(float)cos(p * pow(100, -(double)i / 8));
				cs[p * DIM + DIM / 2 + i] =
					(float)sin(p * pow(100, -(double)i / 8));
			}
		memcpy(old, x, sizeof(x));
		KVT_EXPECT_EQ(kvk_host_ops()->rope(&a, NULL), 0);
		for (u32 t = 0; t < TOKENS; t++)
			for (u32 c = 0; c < 128; c++) {
				u32 h = c / STRIDE, i = c % STRIDE;
				const float *in = old + t * 128 + h * STRIDE + OFF;
				const float *k = cs + pos[t] * DIM;
				double want = old[t * 128 + c], p, q;

				if (h < HEADS && i >= OFF && i < OFF + DIM) {
					u32 j = (i - OFF) % 8;

					p = inter ? in[2 * j] : in[j];
					q = inter ? in[2 * j + 1] : in[j + 8];
					want = i - OFF < 8 ? p * k[j] - q * k[8 + j]
							   : q * k[j] + p * k[8 + j];
				}
				KVT_EXPECT_LE(fabs(want - x[t * 128 + c]), 5e-7);
			}
		rope_elsewhere(&a, old, x);
	}
}

/* The five calls one after the other: the same pages, and nothing is done for a bad batch. */
KVT_TEST(norm_rope_append_is_its_parts)
{
	static const u32 lens[] = {70, 3}, q_lens[] = {2, 3},
			 positions[] = {3, 0, 1, 15, 2};
	struct kv_layout l = kvt_layout_mla(KV_DTYPE_E4M3, KV_SCALE_TOKEN, 2);
	const size_t n = 5ul * 4 * 576 * 4;
	float *one = malloc(n), *two = malloc(n), *old = malloc(n);
	struct kvk_norm_rope_append_args a;
	const struct kvk_ops *o = kvk_host_ops();
	struct kvt_paged f, g;
	u64 nr_nan[2] = {0, 0};

	rng.state = kvt_rand64();
	kvt_paged_init(&f, &rng, &l, 8);
	kvt_paged_batch(&f, &rng, lens, q_lens, 2);
	g = f;
	g.pages.base = malloc(f.bytes);
	memcpy(g.pages.base, f.pages.base, f.bytes);
	kvt_rng_fill(&rng, one, n / 4, 1.0f);
	one[17] = NAN;
	memcpy(two, one, n);
	memcpy(old, one, n);
	a = kvt_key_args(&f.pages, &f.batch, one, positions, KVK_F32);
	a.append.batch.verdicts = NULL;
	KVT_EXPECT_EQ(o->norm_rope_append(&a, NULL), -EINVAL);
	KVT_EXPECT(!memcmp(one, old, n));
	a.append.batch.verdicts = f.verdicts;
	a.append.nan_count = &nr_nan[0];
	KVT_EXPECT_EQ(o->norm_rope_append(&a, NULL), 0);
	a = kvt_key_args(&g.pages, &g.batch, two, positions, KVK_F32);
	a.append.nan_count = &nr_nan[1];
	KVT_EXPECT_EQ(o->norm(&a.k_norm, NULL), 0);
	KVT_EXPECT_EQ(o->rope(&a.q_rope, NULL), 0);
	KVT_EXPECT_EQ(o->rope(&a.k_rope, NULL), 0);
	KVT_EXPECT_EQ(o->append(&a.append, NULL), 0);
	KVT_EXPECT(!memcmp(f.pages.base, g.pages.base, f.bytes));
	KVT_EXPECT(!memcmp(one, two, n) && memcmp(one, old, n));
	KVT_EXPECT(nr_nan[0] == nr_nan[1] && nr_nan[0] > 0);
	free(g.pages.base);
	kvt_paged_fini(&f);
	free(one);
	free(two);
	free(old);
}

KVT_TEST(silu_against_float64)
{
	float gu[3 * 2 * 301], y[3 * 301];
	struct kvk_silu_args a = {
		.gu = gu, .y = y, .nr_tokens = 3, .inter = 301, .act_dtype = KVK_F32};

	rng.state = kvt_rand64();
	kvt_rng_fill(&rng, gu, 3 * 602, 5.0f);
	gu[0] = -200;
	gu[1] = 200;
	gu[2] = NAN;
	KVT_EXPECT_EQ(kvk_host_ops()->silu(&a, NULL), 0);
	KVT_EXPECT(isnan(y[2]));
	for (u32 i = 0; i < 3 * 301; i++) {
		double g = gu[i / 301 * 602 + i % 301],
		       u = gu[i / 301 * 602 + 301 + i % 301];
		double want = g / (1 + exp(-g)) * u;

		if (i != 2)
			KVT_EXPECT_LE(fabs(want - y[i]), 4e-7 * fabs(want) + 1e-30);
	}
}

/* ---------------------------------------------------------------- instruction sets */

/* exp of the softmax loop, within 2 ulp; and what it must do at the ends. */
static void check_exp(const struct kvk_simd *s)
{
	double worst = 0;

	for (u32 i = 0; i < 200000; i++) {
		float x = -87.0f * (float)i / 200000, p[64], max = 0, sum = 0;
		double want = exp((double)x), ulp = ldexp(1, ilogb(want) - 23);

		for (u32 j = 0; j < 64; j++)
			p[j] = x;
		s->softmax(p, 1, 1.0f, &max, &sum);
		worst = fmax(worst, fabs(p[0] - want) / ulp);
		KVT_EXPECT(p[1] == 0 && sum == p[0]);
	}
	KVT_NOTE("%s: exp within %.2f ulp", s->name, worst);
	KVT_EXPECT_LE(worst, 2);
}

/* Conversions and dot products of a variant; what narrower machines run too. */
static void check_loops(const struct kvk_simd *s)
{
	static u8 codes[256];
	static float x[4 * 640], k[8 * 640], sc[4 * 64];
	float out[256];
	u32 words[32];
	u16 half[64];

	for (u32 i = 0; i < 256; i++)
		codes[i] = (u8)i;
	s->cvt_e4m3(codes, 0.25f, out, 256);
	for (u32 i = 0; i < 256; i++) {
		double want = kvt_e4m3((u8)i) * 0.25;

		KVT_EXPECT(isnan(want) ? isnan(out[i]) : out[i] == want);
	}
	for (u32 i = 0; i < 32; i++)
		words[i] = (u32)kvt_rng_next(&rng);
	s->cvt_int4(words, 0.5f, out, 256);
	for (u32 i = 0; i < 256; i++)
		KVT_EXPECT(out[i] ==
			   ((int)(words[i / 8] >> (i % 8 * 4) & 15) - 8) * 0.5f);
	for (u32 i = 0; i < 64; i++)
		half[i] = (u16)kvt_rng_next(&rng);
	s->cvt_bf16(half, out, 61);
	for (u32 i = 0; i < 61; i++)
		KVT_EXPECT(isnan(out[i]) || out[i] == kvt_bf16(half[i]));
	kvt_rng_fill(&rng, x, 4 * 640, 1);
	kvt_rng_fill(&rng, k, 8 * 640, 1);
	s->scores(x, 640, k, 640, 576, 8, sc);
	for (u32 i = 0; i < 32; i++) {
		double sum = 0;

		for (u32 d = 0; d < 576; d++)
			sum += (double)x[i / 8 * 640 + d] * k[i % 8 * 640 + d];
		KVT_EXPECT_LE(fabs(sum - sc[i / 8 * 64 + i % 8]), 5e-5);
	}
}

KVT_TEST(every_instruction_set_of_this_cpu)
{
	u32 nr = 0;

	rng.state = kvt_rand64();
	for (u32 i = 0; i < 3; i++) {
		const struct kvk_simd *s = kvk_simd_at(i);

		if (!s)
			continue;
		nr++;
		check_exp(s);
		check_loops(s);
	}
	KVT_EXPECT(nr >= 1);
}

/* Rows that see different numbers of tokens, together and alone: the same bits, and
 * float64. */
KVT_TEST(mix_blocks_agree_in_every_instruction_set)
{
	static const u32 n[4] = {64, 3, 0, 41};
	static float p[4 * 64], v[64 * 192], o[4 * 128], alone[4 * 128], old[4 * 128];

	rng.state = kvt_rand64();
	kvt_rng_fill(&rng, p, 4 * 64, 1);
	kvt_rng_fill(&rng, v, 64 * 192, 1);
	kvt_rng_fill(&rng, old, 4 * 128, 1);
	for (u32 i = 0; i < 3; i++) {
		const struct kvk_simd *s = kvk_simd_at(i);
		struct kvk_mix m = {.o = o,
				    .p = p,
				    .v = v,
				    .o_stride = 128,
				    .v_stride = 192,
				    .dim = 128,
				    .alpha = {0.5f, 0, 0.25f, 1}};

		if (!s)
			continue;
		memcpy(o, old, sizeof(o));
		memcpy(alone, old, sizeof(o));
		memcpy(m.n, n, sizeof(n));
		s->mix(&m);
		m.o = alone;
		for (u32 r = 0; r < 4; r++) {
			memset(m.n, 0, sizeof(m.n));
			m.n[r] = n[r];
			s->mix(&m);
		}
		KVT_EXPECT(!memcmp(o, alone, sizeof(o)));
		KVT_EXPECT(!memcmp(o + 2 * 128, old + 2 * 128, 128 * sizeof(float)));
		for (u32 at = 0; at < 4 * 128; at++) {
			double want = old[at] * m.alpha[at / 128];

			if (at / 128 == 2)
				continue;
			for (u32 j = 0; j < n[at / 128]; j++)
				want += (double)p[at / 128 * 64 + j] *
					v[j * 192 + at % 128];
			KVT_EXPECT_LE(fabs(want - o[at]), 2e-5);
		}
	}
}

/* Register blocks of a variant must give the same bits for any number of tokens. */
KVT_TEST(gemm_blocks_agree_in_every_instruction_set)
{
	static float tile[16 * KVK_TILE_COLS], x[32 * KVK_TILE_COLS], acc[32 * 256];
	static float all[32 * 16], one[32 * 16];
	const float *rows[32];

	rng.state = kvt_rand64();
	kvt_rng_fill(&rng, tile, 16 * KVK_TILE_COLS, 1);
	kvt_rng_fill(&rng, x, 32 * KVK_TILE_COLS, 1);
	for (u32 i = 0; i < 32; i++)
		rows[i] = x + i * KVK_TILE_COLS;
	for (u32 v = 0; v < 3; v++) {
		const struct kvk_simd *s = kvk_simd_at(v);
		struct kvk_gemm_panel g = {.tile = tile,
					   .x = rows,
					   .nr_vecs = 32,
					   .nr_tokens = 32,
					   .first = 1,
					   .last = 1,
					   .acc = acc,
					   .out = all};

		if (!s)
			continue;
		s->gemm(&g);
		g.out = one;
		for (u32 t = 0; t < 32; t += g.nr_tokens) {
			g.nr_tokens = KV_MIN(1 + t % 7, 32 - t);
			g.x = rows + t;
			g.out = one + t * 16;
			/* two panels instead of one */
			g.col = 0;
			g.nr_vecs = 11;
			g.last = 0;
			s->gemm(&g);
			g.col = 11 * 16;
			g.nr_vecs = 21;
			g.first = 0;
			g.last = 1;
			g.tile = tile + 11 * 16;
			s->gemm(&g);
			g.first = 1;
			g.tile = tile;
		}
		KVT_EXPECT(!memcmp(all, one, sizeof(all)));
	}
}

KVT_MAIN()
