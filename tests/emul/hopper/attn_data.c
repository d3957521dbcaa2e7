/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attn_data.c - decode attention as Hopper would run it, on the CPU, on numbers that a model seldom
 * has: scales over the whole range of f16, zeros, equal tokens, one token that has all the weight,
 * scores up to 1e4, queries that see nothing of a part. Each row is compared with float64 on what the
 * pages hold, relative to the sum of the magnitudes that were added up for it.
 */
#include "tests/kvt.h"
#include "attn_step.h"

#define SM_SCALE 0.07	 /* upload() */
#define SMALLEST 0x1p-80 /* parts in f16 may lose this: slot_shift() */

/* How the magnitude of tokens varies. */
enum sizes {
	EVEN,
	SPREAD,
	BY_PAGE,
	HOLES,
	ZERO_PAGES,
	LARGE,
	SMALL,
	ONE,
	SAME,
	NR_SIZES
};

/* A row's queries. */
enum asks { ANY, NOTHING, ONE_TOKEN, NR_ASKS };

/* 2^x, x up to @limit */
static float power(u32 limit)
{
	return ldexpf(1.f, (int)kvt_rand_below(2 * limit + 1) - (int)limit);
}

/* Magnitudes of @n tokens. @limit: log2 of the largest */
static void sizes_draw(enum sizes kind, u32 n, u32 limit, float *to)
{
	const u32 one = kvt_rand_below(n);
	const float full = ldexpf(1.f, kvt_rand_below(2) ? (int)limit : 0);
	float now = 1.f;

	for (u32 t = 0; t < n; t++) {
		if (t % KV_PAGE_TOKENS == 0 && kind == BY_PAGE)
			now = power(limit);
		if (t % KV_PAGE_TOKENS == 0 && kind == ZERO_PAGES)
			now = kvt_rand_below(2) ? full : 0.f;
		to[t] = now;
		if (kind == SPREAD)
			to[t] = power(limit);
		if (kind == HOLES)
			to[t] = kvt_rand_below(3) ? 1.f : 0.f;
		if (kind == LARGE || kind == SMALL)
			to[t] = ldexpf(1.f, kind == LARGE ? (int)limit : -(int)limit);
		if (kind == ONE && t == one)
			to[t] = ldexpf(1.f, (int)limit);
	}
}

/* Tokens of all requests into the pages, keys and values (latent and rope) each of a kind. */
static void fill(struct world *w, const struct step *t, const enum sizes *kinds)
{
	const struct kv_layout *l = &w->f.pages.layout;
	const bool mla = l->kind == KV_LAYOUT_MLA;
	const u32 limit = l->dtype == KV_DTYPE_BF16 ? 40 : 20;
	const u32 dims[2] = {mla ? l->latent_dim : l->nr_kv_heads * l->head_dim,
			     mla ? l->rope_dim : l->nr_kv_heads * l->head_dim};
	float *src[2];

	kvt_paged_batch(&w->f, &w->g, t->lengths, t->lengths, t->nr);
	for (u32 i = 0; i < 2; i++) {
		const u32 n = w->f.batch.nr_tokens;
		float *size = malloc((n + 1) * sizeof(float));

		src[i] = malloc(((size_t)n * dims[i] + 1) * sizeof(float));
		kvt_rng_fill(&w->g, src[i], (size_t)n * dims[i], 1.f);
		sizes_draw(kinds[i], n, limit, size);
		for (size_t e = 0; e < (size_t)n * dims[i]; e++) {
			if (kinds[i] == SAME)
				src[i][e] = src[i][e % dims[i]];
			src[i][e] *= size[e / dims[i]];
		}
		free(size);
	}
	kvt_paged_append(&w->f, src[0], src[1]);
	free(src[0]);
	free(src[1]);
}

/* -------------------------------------------------------------------------- in float64 */

/* What one softmax sees: keys [tokens][dk] and values [tokens][dv], as stored. */
struct cache {
	double *k, *v;
	double *scale; /* of values; 1 where tokens have none of their own, or are zeros */
	double scale_max;
	u32 dk, dv;
};

static struct cache cache_read(const struct world *w, u32 request, u32 head)
{
	const struct kv_layout *l = &w->f.pages.layout;
	const bool mla = l->kind == KV_LAYOUT_MLA;
	const u32 n = w->f.lengths[request], layer = l->nr_layers - 1;
	struct cache c = {.dk = mla ? l->latent_dim + l->rope_dim : l->head_dim,
			  .dv = mla ? l->latent_dim : l->head_dim};

	c.k = malloc(((size_t)n * c.dk + 1) * sizeof(double));
	c.v = malloc(((size_t)n * c.dv + 1) * sizeof(double));
	c.scale = malloc((n + 1) * sizeof(double));
	for (u32 t = 0; t < n; t++) {
		const u8 *part = kvt_paged_part(&w->f, request, t, layer);
		double *k = c.k + (size_t)t * c.dk, *v = c.v + (size_t)t * c.dv;

		for (u32 i = 0; i < c.dv; i++)
			k[i] = kvt_paged_value(&w->f, part, layer, mla ? 0 : 2 * head,
					       t % KV_PAGE_TOKENS, i);
		for (u32 i = c.dv; i < c.dk; i++)
			k[i] = kvt_paged_value(&w->f, part, layer, 1, t % KV_PAGE_TOKENS,
					       i - c.dv);
		for (u32 i = 0; i < c.dv; i++)
			v[i] = mla ? k[i]
				   : kvt_paged_value(&w->f, part, layer, 2 * head + 1,
						     t % KV_PAGE_TOKENS, i);
		c.scale[t] = 0;
		for (u32 i = 0; i < c.dv; i++)
			c.scale[t] = fmax(c.scale[t], fabs(v[i]) / 448);
		if (c.scale[t] == 0 || l->scale_kind != KV_SCALE_TOKEN)
			c.scale[t] = 1;
		c.scale_max = fmax(c.scale_max, c.scale[t]);
	}
	return c;
}

static void cache_free(struct cache *c)
{
	free(c->k);
	free(c->v);
	free(c->scale);
}

/*
 * Score of token @t; *magnitude: of what was added up, if larger. Queries are used as f16, with steps of 2^-24:
 * 2^21 times smaller than what is added to theirs.
 */
static double score(const struct cache *c, u32 t, const float *q, double *magnitude)
{
	const double *k = c->k + (size_t)t * c->dk;
	double s = 0, m = 0;

	for (u32 i = 0; i < c->dk; i++) {
		s += k[i] * q[i];
		m += fabs(k[i]) * (fabs(q[i]) + (q[i] != 0 ? 0x1p-4 : 0));
	}
	*magnitude = fmax(*magnitude, m * SM_SCALE);
	return s * SM_SCALE;
}

/*
 * What probabilities are at least good for: a step of their format at the largest of them, alone or
 * together with the scales of the values (of this row, or of all tokens).
 */
struct format {
	double step;
	bool product;
	double base; /* limit of the error, relative */
};

static struct format format_of(const struct shape *s)
{
	const bool fast = s->flags & KVK_ATTN_FAST;
	const bool wide = !s->kv_heads && s->heads * s->q_max > 16;

	if (s->dtype == KV_DTYPE_BF16)
		return (struct format){0x1p-120, false, fast ? 4.4e-3 : 1e-3};
	if (fast)
		return (struct format){0x1p-10, true, 6e-2};
	return (struct format){0x1p-23, wide, 1e-3};
}

/*
 * One row against float64: the norm of its error over that of the largest one allowed. Scores are
 * summed in f32: what they are off by, at most, grows with the magnitude of their parts and is a
 * relative error of the probabilities.
 */
static double row_error(const struct cache *c, const struct format *f, u32 sees,
			const float *q, const float *out)
{
	double *p = malloc(sees * sizeof(double)), top = -INFINITY, sum = 0;
	double num = 0, den = 0, most = 0, magnitude = 0;

	for (u32 t = 0; t < sees; t++) {
		p[t] = score(c, t, q, &magnitude);
		top = fmax(top, p[t]);
	}
	for (u32 t = 0; t < sees; t++) {
		sum += p[t] = exp(p[t] - top);
		most = fmax(most, p[t] * c->scale[t]);
	}
	if (!f->product)
		most = c->scale_max;
	for (u32 i = 0; i < c->dv; i++) {
		double o = 0, all = 0, lost = 0;

		for (u32 t = 0; t < sees; t++) {
			const double v = c->v[(size_t)t * c->dv + i];

			o += p[t] * v;
			all += p[t] * fabs(v);
			lost += fmin(p[t], f->step * most / c->scale[t]) * fabs(v);
		}
		all = ((f->base + magnitude * 0x1p-21) * all + lost) / sum + SMALLEST;
		num += (out[i] - o / sum) * (out[i] - o / sum);
		den += all * all;
	}
	free(p);
	return num > 0 || num != num ? sqrt(num / den) : 0;
}

/* ----------------------------------------------------------------------------- queries */

/* The largest magnitude of a row's scores becomes @want, or as near as queries in f16 get; 0 beyond @most. */
static void row_scale(const struct cache *c, u32 sees, float *q, double want, double most)
{
	double m = 0, top = 0;
	float f;

	for (u32 t = 0; t < sees; t++)
		(void)score(c, t, q, &m);
	for (u32 i = 0; i < c->dk; i++)
		top = fmax(top, fabsf(q[i]));
	if (!(m > 0) || !(top > 0))
		return;
	f = (float)fmin(fmax(want / m, 0.25 / top), 0x1p14 / top);
	if (f * m > most)
		f = 0.f;
	for (u32 i = 0; i < c->dk; i++)
		q[i] = (float)kvt_bf16(kvt_to_bf16(q[i] * f));
}

static void row_ask(const struct world *w, const struct cache *c, u32 sees, bool fast,
		    float *q)
{
	static const double wants[] = {2, 2, 30, 300, 1e4};
	const enum asks kind = kvt_rand_below(NR_ASKS);
	const u32 one = kvt_rand_below(sees);
	double want = wants[fast ? 0 : kvt_rand_below(KV_ARRAY_SIZE(wants))], top = 0;

	if (w->f.pages.layout.kind == KV_LAYOUT_MLA && kvt_rand_below(2))
		memset(q, 0, c->dv * sizeof(float));
	for (u32 i = 0; kind == ONE_TOKEN && i < c->dk; i++)
		top = fmax(top, fabs(c->k[(size_t)one * c->dk + i]));
	for (u32 i = 0; i < c->dk; i++) {
		if (kind == NOTHING)
			q[i] = 0.f;
		if (kind == ONE_TOKEN && top > 0 && q[i] != 0.f)
			q[i] = (float)(c->k[(size_t)one * c->dk + i] / top);
	}
	row_scale(c, sees, q, want, fast ? 4 : 2e4); /* more, and an f32 says little */
}

/* ------------------------------------------------------------------------------- cases */

/* Each row of a step: @check it, or draw its queries. */
static void rows(struct world *w, const struct shape *s, bool check)
{
	const u32 heads_kv = s->kv_heads ? s->kv_heads : 1, group = s->heads / heads_kv;
	const struct format f = format_of(s);

	for (u32 i = 0; i < w->f.batch.nr_requests * heads_kv; i++) {
		const u32 r = i / heads_kv, head = i % heads_kv;
		const u32 q_len = w->f.q_start[r + 1] - w->f.q_start[r];
		struct cache c;

		if (!q_len)
			continue;
		c = cache_read(w, r, head);
		for (u32 k = 0; k < q_len * group; k++) {
			const u32 sees = w->f.lengths[r] - q_len + 1 + k / group;
			const size_t at =
				(size_t)(w->f.q_start[r] + k / group) * s->heads +
				head * group + k % group;
			double err;

			if (!check) {
				row_ask(w, &c, sees, f.base > 1e-2, w->q + at * c.dk);
				continue;
			}
			err = row_error(&c, &f, sees, w->q + at * c.dk,
					w->out + at * c.dv);
			if (!(err <= 1))
				KVT_FAIL(
					"heads %u/%u dtype %u flags %u: request %u of %u tokens, row %u: error %.3g of what may be",
					s->heads, s->kv_heads, s->dtype, s->flags, r,
					w->f.lengths[r], k, err);
		}
		cache_free(&c);
	}
}

static u32 length_draw(u32 pages)
{
	static const u32 edges[] = {1, 2, 4, 63, 64, 65, 66, 127, 128, 129, 192, 257};
	const u32 n = kvt_rand_below(3) ? kvt_rand_below(64 * pages + 4)
					: edges[kvt_rand_below(KV_ARRAY_SIZE(edges))];

	return n;
}

/* @pages: of the longest request */
static void any_data(const struct shape *s, u32 nr_requests, u32 pages)
{
	const struct kv_layout l = layout_of(s);
	const enum sizes kinds[2] = {kvt_rand_below(NR_SIZES), kvt_rand_below(NR_SIZES)};
	struct step t = {.nr = 1 + kvt_rand_below(nr_requests)};
	u32 total = 1;
	struct world w;

	for (u32 r = 0; r < t.nr; r++) {
		t.lengths[r] = length_draw(pages) + !r;
		t.q[r] = 1 + kvt_rand_below(s->q_max);
		t.q[r] = KV_MIN(t.q[r], t.lengths[r]);
		total += (t.lengths[r] + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS;
	}
	hopper_has_sms(1 + (int)kvt_rand_below(12));
	memset(&w, 0, sizeof(w));
	w.g.state = kvt_rand64();
	w.ops = kvk_host_ops();
	kvt_paged_init(&w.f, &w.g, &l, total);
	if (s->scale_kind == KV_SCALE_STATIC)
		for (u32 i = 0; i < KV_ARRAY_SIZE(w.f.scales); i++)
			w.f.scales[i] *= power(10);
	fill(&w, &t, kinds);
	set_queries(&w, t.q, t.nr, s->kv_heads ? l.head_dim : l.latent_dim + l.rope_dim,
		    s->kv_heads ? l.head_dim : l.latent_dim, s->heads);
	rows(&w, s, false);
	upload(&w, s->heads, l.nr_layers - 1);
	run(&w, s, 0);
	rows(&w, s, true);
	world_fini(&w);
}

static void shapes(const struct shape *s, u32 nr, u32 nr_requests, u32 pages)
{
	for (u32 i = 0; i < nr; i++)
		any_data(&s[i], nr_requests, pages);
}

/* Merges without counters: one kv head, or few requests. */
KVT_TEST(hopper_attn_data_gqa)
{
	static const struct shape s[] = {
		GQA(E4M3, TOKEN, 12, 1, 128), GQA(E4M3, TOKEN, 8, 2, 128),
		GQA(E4M3, STATIC, 4, 1, 128), GQA(E4M3, TOKEN, 48, 4, 128),
		GQA(E4M3, TOKEN, 12, 1, 64),  GQA(E4M3, STATIC, 16, 4, 64),
		GQA(E4M3, TOKEN, 32, 8, 64),  GQA(BF16, NONE, 12, 1, 128),
		GQA(BF16, NONE, 16, 4, 128),  GQA(BF16, NONE, 8, 2, 64),
	};

	shapes(s, KV_ARRAY_SIZE(s), 4, 20);
}

KVT_TEST(hopper_attn_data_mla)
{
	static const struct shape s[] = {
		MLA(E4M3, TOKEN, 8, 1, 0),  MLA(E4M3, TOKEN, 2, 4, 0),
		MLA(E4M3, STATIC, 8, 1, 0), MLA(E4M3, TOKEN, 16, 1, 0),
		MLA(E4M3, TOKEN, 4, 4, 0),  MLA(E4M3, STATIC, 4, 4, 0),
		MLA(BF16, NONE, 8, 1, 0),   MLA(BF16, NONE, 2, 4, 0),
		MLA(BF16, NONE, 16, 1, 0),  MLA(BF16, NONE, 5, 3, 0),
	};

	shapes(s, KV_ARRAY_SIZE(s), 3, 9);
}

KVT_TEST(hopper_attn_data_mla_wgmma)
{
	static const struct shape s[] = {
		MLA(E4M3, TOKEN, 64, 1, 0),
		MLA(E4M3, STATIC, 32, 2, 0),
		MLA(E4M3, TOKEN, 20, 4, 0),
		MLA(E4M3, TOKEN, 32, 1, KVK_ATTN_FAST),
		MLA(E4M3, STATIC, 20, 3, KVK_ATTN_FAST),
		MLA(BF16, NONE, 64, 1, 0),
		MLA(BF16, NONE, 20, 4, 0),
		MLA(BF16, NONE, 32, 2, KVK_ATTN_FAST),
	};

	shapes(s, KV_ARRAY_SIZE(s), 3, 9);
}

KVT_MAIN()
