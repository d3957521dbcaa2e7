/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rank_probe.c - a decode step taken apart: the graph as it ran, the graph without its check,
 * and every kernel by itself.
 *
 * The forward pass runs once more with tables of its own between engine and kernels, which keep
 * the arguments of every call. Calls of one family and shape are then queued one after the other, in
 * the order of the layers, so that each has its own weights and finds the caches as cold as it
 * would. Their sum against the whole step's time is what lies between unlike kernels.
 *
 * The tables have no argument that leads back, so what they fill is a file-scope variable; a
 * process probes one engine at a time, on its thread.
 */
#include "rank.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "engine/run/internal.h"

#define CALLS_MAX 8192u
#define REPLAYS	  5u
#define REPEAT_TO 48u /* calls in a graph, at least */

enum call_kind {
	CALL_KEY,
	CALL_ATTN_MLA,
	CALL_ATTN_GQA,
	CALL_ROUTE,
	CALL_MOE_INT4,
	CALL_MOE_FP8,
	CALL_MOE_BF16,
	CALL_LINEAR,
	CALL_NORM,
	CALL_SILU,
	CALL_SAMPLE,
	CALL_COPY,
};

struct call {
	enum call_kind kind;
	u32 site;
	union {
		struct kvk_norm_rope_append_args key;
		struct kvk_attn_args attn;
		struct kvk_moe_route_args route;
		struct kvk_moe_args moe;
		struct kvk_linear_args linear;
		struct kvk_norm_args norm;
		struct kvk_silu_args silu;
		struct kvk_sample_args sample;
		struct eng_copy_args copy;
	} a;
};

static struct {
	struct eng_engine *e;
	const struct kvk_ops *ops;
	const struct eng_mem_ops *mem_ops;
	struct rank_look *look;
	struct call *calls;
	u32 nr_calls;
	u32 *ids; /* memory that copies may run to */
	double experts;
	u32 nr_moe;
} rec;

/* ------------------------------------------------------------------------------- calls */

static int call_run(const struct call *c)
{
	const struct kvk_ops *o = rec.ops;
	kvk_stream s = rec.e->mem->stream;

	switch (c->kind) {
	case CALL_KEY:
		return o->norm_rope_append(&c->a.key, s);
	case CALL_ATTN_MLA:
		return o->attn_mla(&c->a.attn, s);
	case CALL_ATTN_GQA:
		return o->attn_gqa(&c->a.attn, s);
	case CALL_ROUTE:
		return o->moe_route(&c->a.route, s);
	case CALL_MOE_INT4:
		return o->moe_int4(&c->a.moe, s);
	case CALL_MOE_FP8:
		return o->moe_fp8(&c->a.moe, s);
	case CALL_MOE_BF16:
		return o->moe_bf16(&c->a.moe, s);
	case CALL_LINEAR:
		return o->linear(&c->a.linear, s);
	case CALL_NORM:
		return o->norm(&c->a.norm, s);
	case CALL_SILU:
		return o->silu(&c->a.silu, s);
	case CALL_SAMPLE:
		return o->sample(&c->a.sample, s);
	case CALL_COPY:
		return rec.mem_ops->copy(rec.e->mem, &c->a.copy);
	}
	return -EINVAL;
}

/* Keep a call under its site and run it. */
static int keep(struct call c, const char *name, double bytes)
{
	struct rank_look *l = rec.look;
	u32 i = 0;

	if (rec.nr_calls == CALLS_MAX)
		return -ENOSPC;
	while (i < l->nr_sites && strcmp(l->sites[i].name, name))
		i++;
	if (i == RANK_SITES_MAX)
		return -ENOSPC;
	if (i == l->nr_sites) {
		l->sites[i] = (struct rank_site){.calls = 0};
		snprintf(l->sites[i].name, sizeof(l->sites[i].name), "%s", name);
		l->nr_sites++;
	}
	l->sites[i].calls++;
	l->sites[i].bytes += bytes;
	c.site = i;
	rec.calls[rec.nr_calls++] = c;
	return call_run(&c);
}

static double act_bytes(double values)
{
	return values * (double)eng_act_bytes(rec.e->mem->act_dtype);
}

/* ------------------------------------------------------------------ tables in between */

static int rec_key(const struct kvk_norm_rope_append_args *a, kvk_stream stream)
{
	const struct kv_layout *l = &a->append.pages.layout;
	const double per_token = (double)kv_layer_bytes(l) / KV_PAGE_TOKENS;
	const double key = l->kind == KV_LAYOUT_MLA ? l->latent_dim + l->rope_dim
						    : 2.0 * l->nr_kv_heads * l->head_dim;
	const double q = l->kind == KV_LAYOUT_MLA ? l->rope_dim : l->head_dim;

	return keep((struct call){.kind = CALL_KEY, .a.key = *a}, "norm rope append",
		    a->append.batch.nr_tokens *
			    (per_token + act_bytes(key + 2 * q * a->q_rope.nr_heads)));
}

static int rec_attn(enum call_kind kind, const struct kvk_attn_args *a)
{
	const struct eng_step *s = &rec.e->step;
	const struct kv_layout *l = &a->pages.layout;
	double tokens = 0;

	for (u32 i = 0; i < s->nr_seqs; i++)
		tokens += s->lengths[i];
	return keep((struct call){.kind = kind, .a.attn = *a},
		    kind == CALL_ATTN_MLA ? "attn_mla" : "attn_gqa",
		    tokens * (double)kv_layer_bytes(l) / KV_PAGE_TOKENS);
}

static int rec_attn_mla(const struct kvk_attn_args *a, kvk_stream stream)
{
	return rec_attn(CALL_ATTN_MLA, a);
}

static int rec_attn_gqa(const struct kvk_attn_args *a, kvk_stream stream)
{
	return rec_attn(CALL_ATTN_GQA, a);
}

static int rec_route(const struct kvk_moe_route_args *a, kvk_stream stream)
{
	return keep((struct call){.kind = CALL_ROUTE, .a.route = *a}, "moe_route",
		    4.0 * a->nr_tokens * a->nr_experts);
}

/* Distinct experts of a call; waits. */
static int experts_count(const struct kvk_moe_args *a, u32 *ret)
{
	const u32 n = a->nr_tokens * a->top_k;
	struct eng_mem *m = rec.e->mem;
	int rc = m->ops->download(m, rec.ids, a->ids, n * sizeof(u32));

	if (!rc)
		rc = m->ops->sync(m);
	*ret = 0;
	for (u32 i = 0; i < n && !rc; i++) {
		u32 k = 0;

		while (k < i && rec.ids[k] != rec.ids[i])
			k++;
		*ret += k == i;
	}
	return rc;
}

static int rec_moe(enum call_kind kind, const char *name, const struct kvk_moe_args *a)
{
	const struct kvk_experts *x = &a->experts;
	u64 bytes[4], all;
	u32 distinct;
	int rc = experts_count(a, &distinct);

	if (rc)
		return rc;
	rec.experts += distinct;
	rec.nr_moe++;
	eng_experts_bytes(x, bytes);
	all = bytes[0] + bytes[1] + bytes[2] + bytes[3];
	return keep((struct call){.kind = kind, .a.moe = *a}, name,
		    (double)all / x->nr_experts * distinct);
}

static int rec_moe_int4(const struct kvk_moe_args *a, kvk_stream stream)
{
	return rec_moe(CALL_MOE_INT4, "moe_int4", a);
}

static int rec_moe_fp8(const struct kvk_moe_args *a, kvk_stream stream)
{
	return rec_moe(CALL_MOE_FP8, "moe_fp8", a);
}

static int rec_moe_bf16(const struct kvk_moe_args *a, kvk_stream stream)
{
	return rec_moe(CALL_MOE_BF16, "moe_bf16", a);
}

static int rec_linear(const struct kvk_linear_args *a, kvk_stream stream)
{
	u64 scales = a->w.scales ? eng_weight_scale_bytes(&a->w) : 0;
	u64 bytes = (eng_weight_data_bytes(&a->w) + scales) * a->nr_batch;
	char name[48];

	snprintf(name, sizeof(name), "linear %ux%u", a->w.rows, a->w.cols);
	if (a->nr_batch > 1)
		snprintf(name, sizeof(name), "linear %ux%ux%u", a->nr_batch, a->w.rows,
			 a->w.cols);
	return keep((struct call){.kind = CALL_LINEAR, .a.linear = *a}, name,
		    (double)bytes + act_bytes((double)a->nr_tokens * a->nr_batch *
					      (a->w.rows + a->w.cols)));
}

static int rec_norm(const struct kvk_norm_args *a, kvk_stream stream)
{
	char name[48];

	snprintf(name, sizeof(name), "norm %u%s", a->cols,
		 a->residual ? " +residual" : "");
	return keep((struct call){.kind = CALL_NORM, .a.norm = *a}, name,
		    act_bytes((double)a->nr_rows * a->cols * (a->residual ? 4 : 2)) +
			    4.0 * a->cols);
}

static int rec_silu(const struct kvk_silu_args *a, kvk_stream stream)
{
	char name[48];

	snprintf(name, sizeof(name), "silu %u", a->inter);
	return keep((struct call){.kind = CALL_SILU, .a.silu = *a}, name,
		    act_bytes(3.0 * a->nr_tokens * a->inter));
}

static int rec_sample(const struct kvk_sample_args *a, kvk_stream stream)
{
	return keep((struct call){.kind = CALL_SAMPLE, .a.sample = *a}, "sample",
		    4.0 * a->nr_rows * a->vocab);
}

static int rec_copy(struct eng_mem *m, const struct eng_copy_args *a)
{
	char name[48];

	snprintf(name, sizeof(name), "copy %ux%u", a->nr_rows / rec.e->step.nr_tokens,
		 a->cols);
	return keep((struct call){.kind = CALL_COPY, .a.copy = *a}, name,
		    act_bytes(2.0 * a->nr_rows * a->cols));
}

/* ------------------------------------------------------------------------------ timing */

typedef int (*queue_fn)(struct eng_engine *e, void *arg);

/* Queue the work on the device @n times; us of one. On a GPU as one graph. */
static int time_work(struct eng_engine *e, queue_fn queue, void *arg, u32 n,
		     double *ret_us)
{
	struct eng_mem *m = e->mem;
	void *graph = NULL;
	u64 t0 = 0;
	int rc = 0, end;

	if (m->has_graphs) {
		rc = m->ops->graph_begin(m);
		if (rc)
			return rc;
		rc = queue(e, arg);
		end = m->ops->graph_end(m, &graph);
		rc = rc ? rc : end;
	}
	/* the first one is not counted */
	for (u32 i = 0; i <= n && !rc; i++) {
		if (i == 1) {
			rc = m->ops->sync(m);
			t0 = kv_now_ns();
		}
		if (!rc)
			rc = graph ? m->ops->graph_launch(m, graph) : queue(e, arg);
	}
	if (!rc)
		rc = m->ops->sync(m);
	*ret_us = (double)(kv_now_ns() - t0) / 1e3 / n;
	if (graph)
		m->ops->graph_free(m, graph);
	return rc;
}

static int queue_step(struct eng_engine *e, void *arg)
{
	const bool *check = arg;
	int rc;

	if (e->mem->has_graphs)
		return eng_step_queue(e, *check);
	rc = *check ? eng_check_launch(e, false) : 0;
	return rc ? rc : eng_forward(e);
}

/* Verdicts as the host writes them: none, or all good, as with check off. */
static void verdicts_write(struct eng_step *s, bool good)
{
	for (u32 i = 0; i < s->nr; i++)
		s->verdicts[i] = (struct kv_verdict){
			.step = good ? s->number : 0,
			.rows_checked = good ? s->row_start[i + 1] - s->row_start[i] : 0};
}

/* With and without the check, in turn: a drift of the clock meets both. */
static int time_steps(struct eng_engine *e, struct rank_look *l)
{
	bool yes = true, no = false;
	double with[REPLAYS], without[REPLAYS];
	int rc = 0;

	for (u32 i = 0; i < REPLAYS && !rc; i++) {
		verdicts_write(&e->step, true);
		rc = time_work(e, queue_step, &no, 8, &without[i]);
		if (rc)
			break;
		verdicts_write(&e->step, false);
		rc = time_work(e, queue_step, &yes, 8, &with[i]);
	}
	for (u32 i = 1; i < REPLAYS && !rc; i++) {
		with[0] = KV_MIN(with[0], with[i]);
		without[0] = KV_MIN(without[0], without[i]);
	}
	l->graph_us = with[0];
	l->no_check_us = without[0];
	return rc;
}

struct site_arg {
	u32 site;
	u32 repeat;
};

static int queue_site(struct eng_engine *e, void *arg)
{
	const struct site_arg *s = arg;
	int rc = 0;

	for (u32 k = 0; k < s->repeat; k++)
		for (u32 i = 0; i < rec.nr_calls && !rc; i++)
			if (rec.calls[i].site == s->site)
				rc = call_run(&rec.calls[i]);
	return rc;
}

static int time_sites(struct eng_engine *e, struct rank_look *l)
{
	int rc = 0;

	for (u32 i = 0; i < l->nr_sites && !rc; i++) {
		struct site_arg s = {i, (REPEAT_TO + l->sites[i].calls - 1) /
						l->sites[i].calls};

		if (!e->mem->has_graphs)
			s.repeat = 1;
		rc = time_work(e, queue_site, &s, REPLAYS, &l->sites[i].us);
		l->sites[i].us /= s.repeat;
	}
	return rc;
}

/* Once more, one call after the other, with the tables in between. */
static int record(struct eng_engine *e)
{
	struct kvk_ops ops = *e->ops;
	struct eng_mem_ops mem_ops = *e->mem->ops;
	int rc;

	ops.norm_rope_append = rec_key;
	ops.attn_mla = rec_attn_mla;
	ops.attn_gqa = rec_attn_gqa;
	ops.moe_route = rec_route;
	ops.moe_int4 = rec_moe_int4;
	ops.moe_fp8 = rec_moe_fp8;
	ops.moe_bf16 = rec_moe_bf16;
	ops.linear = rec_linear;
	ops.norm = rec_norm;
	ops.silu = rec_silu;
	ops.sample = rec_sample;
	mem_ops.copy = rec_copy;
	e->ops = &ops;
	e->mem->ops = &mem_ops;
	rc = eng_forward(e);
	e->ops = rec.ops;
	e->mem->ops = rec.mem_ops;
	return rc ? rc : e->mem->ops->sync(e->mem);
}

int rank_probe(struct eng_engine *e, void *arg)
{
	struct rank_look *l = arg;
	const u32 nr_ids = e->tokens_max * e->m->config.top_k;
	void *ids;
	int rc;

	memset(l, 0, sizeof(*l));
	memset(&rec, 0, sizeof(rec));
	rec.e = e;
	rec.ops = e->ops;
	rec.mem_ops = e->mem->ops;
	rec.look = l;
	rec.calls = calloc(CALLS_MAX, sizeof(*rec.calls));
	rc = rec.calls ? e->mem->ops->alloc_host(e->mem, nr_ids * sizeof(u32), &ids)
		       : -ENOMEM;
	if (rc)
		goto free_calls;
	rec.ids = ids;
	rc = e->mem->ops->sync(e->mem);
	if (!rc)
		rc = time_steps(e, l);
	if (!rc)
		rc = record(e);
	if (!rc)
		rc = time_sites(e, l);
	l->experts = rec.nr_moe ? rec.experts / rec.nr_moe : 0;
free_calls:
	free(rec.calls);
	return rc;
}
