/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rank.c - kvbench rank: the whole decode step of one tensor-parallel rank.
 *
 * A private kvmd owns the pages, the engine of engine/run decodes on them as it does in production:
 * announce, argument block, rows, mirror and check on a branch of the step's graph, verdicts,
 * retire. Only weights and the K/V of the prompts are random numbers, made where they lie, and a
 * prompt's K/V is taken to be in the pages already. All pages of the pool are leased and
 * filled first, then as many as the requests need are given back in random order, so that a
 * request's pages lie anywhere. Requests have tokens of their own, so they are routed to experts of
 * their own.
 *
 * For each number of requests: the time from one token to the next, the step's graph, its
 * kernels one by one, and the time that their bytes take at the read rate measured in this run.
 * One thread.
 */
#include "rank.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "engine/private.h"
#include "engine/run/internal.h"
#include "json.h"
#include "rank_fill.h"

#define WARM_STEPS    4u
#define CEILING_READS 8u

#ifndef KVB_COMMIT
#define KVB_COMMIT "unknown"
#endif

/* struct rank - what a run holds; owner */
struct rank {
	struct rank_options opt;
	struct eng_mem *mem;
	struct rank_model model;
	struct eng_private_kvmd kvmd;
	bool own_kvmd;
	struct eng_engine *engine;
	struct kv_grant *pages; /* leased and not given to requests: [nr_pages] */
	u32 nr_pages;
	double ceiling; /* bytes per second */
	u64 rng;
	cJSON *rows;
};

static u64 rank_rand(struct rank *r)
{
	return rank_mix(r->rng++);
}

static int fail(const char *what, int rc)
{
	fprintf(stderr, "kvbench: %s: %s\n", what, rc > 0 ? "refused" : strerror(-rc));
	return 1;
}

/* ------------------------------------------------------------------------------- scene */

/* Read rate of the kernels' memory: the largest array there is, again and again. */
static int measure_ceiling(struct rank *r)
{
	const bool host = !r->mem->separate;
	const u64 bytes = host ? 64ull << 20 : 4ull << 30;
	const u32 n = CEILING_READS;
	void *buf = NULL, *sink = NULL;
	u64 t0 = 0;
	int rc = r->mem->ops->alloc(r->mem, 4, &sink);
	struct eng_mem *m = NULL;
	struct eng_err err;

	/* of its own memory, which is given back */
	if (!rc)
		rc = eng_mem_open(r->opt.device, NULL, &m, &err);
	if (!rc)
		rc = m->ops->alloc(m, bytes, &buf);
	for (u32 i = 0; i <= n && !rc; i++) {
		if (i == 1) {
			rc = m->ops->sync(m);
			t0 = kv_now_ns();
		}
		if (!rc)
			rc = rank_read(m, buf, bytes, sink);
	}
	if (!rc)
		rc = m->ops->sync(m);
	r->ceiling = (double)bytes * n / (double)(kv_now_ns() - t0) * 1e9;
	if (m)
		m->ops->close(m);
	return rc;
}

static int start_kvmd(struct rank *r)
{
	const bool gpu = r->opt.device == ENG_DEVICE_CUDA;
	char bytes[32], line[512] = "";
	const char *args[] = {"--backend",
			      gpu ? "cuda" : "host",
			      "--check",
			      "batch",
			      gpu ? "--gpu-bytes" : "--host-bytes",
			      bytes,
			      NULL};
	int rc;

	/* whole extents: room for one more */
	snprintf(
		bytes, sizeof(bytes), "%llu",
		(unsigned long long)(r->opt.kv_bytes + (gpu ? 1ull << 30 : 64ull << 20)));
	if (r->opt.socket_path)
		return 0;
	rc = eng_private_kvmd_start(args, &r->kvmd, line, sizeof(line));
	if (rc) {
		fprintf(stderr, "kvbench: private kvmd: %s\n", line);
		return rc;
	}
	r->own_kvmd = true;
	r->opt.socket_path = r->kvmd.socket_path;
	return 0;
}

static u32 batch_max(const struct rank_options *o)
{
	u32 max = 1;

	for (u32 i = 0; i < o->nr_batches; i++)
		max = KV_MAX(max, o->batches[i]);
	return max;
}

static int open_engine(struct rank *r)
{
	struct eng_options o = {
		.size_bytes = sizeof(o),
		.kv = r->opt.kv,
		.attention = r->opt.attention,
		.socket_path = r->opt.socket_path,
		.client_name = "kvbench-rank",
		.batch_max = batch_max(&r->opt),
		.length_max = r->opt.in + r->opt.out + 2 * WARM_STEPS,
		.no_prefix = true,
		.no_seal = true,
		.device = r->opt.device,
		.placed = true,
	};
	struct eng_err err = {{0}};
	int rc = eng_engine_create(&r->model.m, &o, &r->engine, &err);

	if (rc)
		fprintf(stderr, "kvbench: %s\n", err.text);
	return rc;
}

/* Lease every page there is. */
static int lease_all(struct rank *r)
{
	struct kvc_pool *pool = eng_engine_pool(r->engine);
	u64 stride = r->engine->pool_info.geometry.stride_bytes;
	u32 want = (u32)(r->opt.kv_bytes / stride);
	int rc = 0;

	r->pages = calloc(want, sizeof(*r->pages));
	if (!r->pages)
		return -ENOMEM;
	while (r->nr_pages < want && !rc) {
		u32 n = KV_MIN(want - r->nr_pages, 512u);

		rc = kvc_alloc(pool, n, KV_GFP_PREFILL, r->pages + r->nr_pages);
		if (!rc)
			r->nr_pages += n;
		kvc_dispatch(r->engine->kvc, NULL, NULL);
	}
	if (rc)
		fprintf(stderr, "kvbench: page %u of %u: %s\n", r->nr_pages, want,
			rc > 0 ? "kvmd has no more" : strerror(-rc));
	return rc;
}

/* Random finite values into every page, inside an announced step (P6). */
static int fill_all(struct rank *r)
{
	struct eng_mem *m = r->engine->mem;
	struct kvc_step *step;
	void *host = NULL, *dev = NULL;
	int rc = m->ops->alloc_host(m, r->nr_pages * sizeof(u32), &host);

	if (!rc)
		rc = m->ops->alloc(m, r->nr_pages * sizeof(u32), &dev);
	if (rc)
		return rc;
	for (u32 i = 0; i < r->nr_pages; i++)
		((u32 *)host)[i] = r->pages[i].pfn;
	rc = kvc_step_begin(r->engine->kvc, &step);
	if (rc)
		return rc;
	rc = m->ops->load(m, dev, host, r->nr_pages * sizeof(u32));
	if (!rc)
		rc = rank_fill_pages(m, &r->engine->pages, dev, r->nr_pages, 99);
	if (!rc)
		rc = m->ops->sync(m);
	if (rc) /* no completion: the step stays announced (P8) */
		return rc;
	kvc_step_launched(step);
	kvc_step_retire(step);
	return 0;
}

static void shuffle_pages(struct rank *r)
{
	for (u32 i = r->nr_pages; i-- > 1;) {
		u32 j = (u32)(rank_rand(r) % (i + 1));
		struct kv_grant g = r->pages[i];

		r->pages[i] = r->pages[j];
		r->pages[j] = g;
	}
}

/* Give back @n pages, for requests to take. */
static int release_pages(struct rank *r, u32 n)
{
	struct kvc_pool *pool = eng_engine_pool(r->engine);
	int rc = 0;

	if (n > r->nr_pages) {
		fprintf(stderr,
			"kvbench: requests need %u pages more than --kv-bytes holds\n",
			n - r->nr_pages);
		return -ENOSPC;
	}
	for (u32 k = 0; k < n && !rc; k += 64) {
		u32 some = KV_MIN(n - k, 64u);

		r->nr_pages -= some;
		rc = kvc_free(pool, r->pages + r->nr_pages, some);
	}
	return rc ? rc : kvc_flush(r->engine->kvc);
}

/* -------------------------------------------------------------------------- one batch */

/* struct run - one number of requests */
struct run {
	u32 nr;
	struct eng_request *requests[RANK_REQUESTS_MAX];
	double step_us[RANK_OUT_MAX];
	u32 nr_steps;
	struct rank_look look;
};

static int submit(struct rank *r, struct run *run)
{
	u32 *prompt = calloc(r->opt.in, sizeof(*prompt));
	struct eng_err err = {{0}};
	int rc = prompt ? 0 : -ENOMEM;

	for (u32 i = 0; i < run->nr && !rc; i++) {
		struct eng_params p = {
			.prompt = prompt,
			.nr_prompt = r->opt.in,
			.max_tokens = r->opt.out + 2 * WARM_STEPS,
			.ignore_eos = true,
			.nr_given = r->opt.in - 1,
		};

		for (u32 t = 0; t < r->opt.in; t++)
			prompt[t] = (u32)(rank_rand(r) % r->model.m.config.vocab);
		rc = eng_request_submit(r->engine, &p, &run->requests[i], &err);
		if (rc)
			fprintf(stderr, "kvbench: %s\n", err.text);
	}
	free(prompt);
	return rc;
}

/* One step of all requests. */
static int turn_all(struct rank *r, struct run *run)
{
	for (u32 waits = 0; waits < 2000; waits++) {
		int n = eng_engine_turn(r->engine);

		if (n == (int)run->nr)
			return 0;
		if (n < 0)
			return n;
		if (n == 0) /* pages that were given back are in quarantine */
			eng_engine_wait(r->engine, 1);
	}
	return -ETIMEDOUT;
}

/* No request may have failed or been computed again: then another step was timed. */
static int all_good(struct run *run)
{
	struct eng_result res;

	for (u32 i = 0; i < run->nr; i++) {
		eng_request_result(run->requests[i], &res);
		if (res.state != ENG_DECODE || res.nr_preempted) {
			fprintf(stderr,
				"kvbench: request %u: %s (%s), preempted %u times\n", i,
				eng_state_str(res.state), eng_finish_str(res.finish),
				res.nr_preempted);
			return -EIO;
		}
	}
	return 0;
}

static int run_steps(struct rank *r, struct run *run)
{
	int rc = 0;

	for (u32 i = 0; i < WARM_STEPS + r->opt.out && !rc; i++) {
		u64 t0 = kv_now_ns();

		rc = turn_all(r, run);
		if (i >= WARM_STEPS)
			run->step_us[run->nr_steps++] = (double)(kv_now_ns() - t0) / 1e3;
	}
	if (!rc) {
		r->engine->probe = rank_probe;
		r->engine->probe_arg = &run->look;
		rc = turn_all(r, run);
		r->engine->probe = NULL;
	}
	return rc ? rc : all_good(run);
}

static double round_to(double v, double unit)
{
	return round(v / unit) * unit;
}

static void report(struct rank *r, struct run *run)
{
	struct rank_look *l = &run->look;
	double sum_us = 0, bytes = 0, floor_us;
	cJSON *o = cJSON_CreateObject(), *kernels;
	struct kvb_dist step;

	kvb_dist_of(&step, run->step_us, run->nr_steps);
	for (u32 i = 0; i < l->nr_sites; i++) {
		sum_us += l->sites[i].us;
		bytes += l->sites[i].bytes;
	}
	floor_us = bytes / r->ceiling * 1e6;
	cJSON_AddNumberToObject(o, "requests", run->nr);
	cJSON_AddNumberToObject(o, "step_us", round_to(step.p50, 0.1));
	cJSON_AddNumberToObject(o, "step_us_p99", round_to(step.p99, 0.1));
	cJSON_AddNumberToObject(o, "tok_s", round_to(run->nr * 1e6 / step.p50, 0.1));
	cJSON_AddNumberToObject(o, "graph_us", round_to(l->graph_us, 0.1));
	cJSON_AddNumberToObject(o, "graph_no_check_us", round_to(l->no_check_us, 0.1));
	cJSON_AddNumberToObject(o, "sum_of_kernels_us", round_to(sum_us, 0.1));
	cJSON_AddNumberToObject(o, "floor_us", round_to(floor_us, 0.1));
	cJSON_AddNumberToObject(o, "bytes", round(bytes));
	cJSON_AddNumberToObject(o, "frac", round_to(floor_us / step.p50, 0.001));
	cJSON_AddNumberToObject(o, "distinct_experts", round_to(l->experts, 0.1));
	kernels = cJSON_AddArrayToObject(o, "kernels");
	for (u32 i = 0; i < l->nr_sites; i++) {
		const struct rank_site *s = &l->sites[i];
		cJSON *k = cJSON_CreateObject();

		cJSON_AddStringToObject(k, "name", s->name);
		cJSON_AddNumberToObject(k, "calls", s->calls);
		cJSON_AddNumberToObject(k, "us", round_to(s->us, 0.1));
		cJSON_AddNumberToObject(k, "floor_us",
					round_to(s->bytes / r->ceiling * 1e6, 0.1));
		cJSON_AddItemToArray(kernels, k);
	}
	cJSON_AddItemToArray(r->rows, o);
	fprintf(r->opt.json ? stderr : stdout,
		"%4u requests  step %9.1f us  %9.1f tok/s  graph %9.1f  without check %9.1f  "
		"kernels %9.1f  floor %9.1f  (%.0f %%)\n",
		run->nr, step.p50, run->nr * 1e6 / step.p50, l->graph_us, l->no_check_us,
		sum_us, floor_us, 100 * floor_us / step.p50);
	for (u32 i = 0; i < l->nr_sites && !r->opt.json; i++)
		printf("     %-28s %5u  %9.1f us  floor %9.1f\n", l->sites[i].name,
		       l->sites[i].calls, l->sites[i].us,
		       l->sites[i].bytes / r->ceiling * 1e6);
}

static int run_batch(struct rank *r, u32 nr)
{
	const u32 length = r->opt.in + r->opt.out + 2 * WARM_STEPS;
	const u32 need = nr * (u32)kv_div_round_up(length, KV_PAGE_TOKENS);
	struct run *run = calloc(1, sizeof(*run));
	u32 had = r->nr_pages;
	int rc;

	if (!run)
		return -ENOMEM;
	run->nr = nr;
	rc = release_pages(r, need);
	if (!rc)
		rc = submit(r, run);
	if (!rc)
		rc = run_steps(r, run);
	if (!rc)
		report(r, run);
	for (u32 i = 0; i < nr && run->requests[i]; i++)
		eng_request_free(run->requests[i]);
	free(run);
	kvc_flush(r->engine->kvc);
	/* leased again: the next batch gives back other pages */
	for (u32 i = 0; i < 2000 && !rc && r->nr_pages < had; i++) {
		u32 n = KV_MIN(had - r->nr_pages, 512u);
		int a = kvc_alloc(eng_engine_pool(r->engine), n, KV_GFP_PREFILL,
				  r->pages + r->nr_pages);

		if (!a)
			r->nr_pages += n;
		else if (a < 0)
			rc = a;
		else
			eng_engine_wait(r->engine, 1);
	}
	shuffle_pages(r);
	return rc;
}

/* --------------------------------------------------------------------------- the command
 */

static int scene_open(struct rank *r)
{
	struct eng_err err = {{0}};
	u64 t0 = kv_now_ns();
	int rc = eng_mem_open(r->opt.device, NULL, &r->mem, &err);

	if (rc) {
		fprintf(stderr, "kvbench: %s\n", err.text);
		return rc;
	}
	rc = measure_ceiling(r);
	if (rc)
		return rc;
	rc = rank_model_open(&r->model, r->opt.preset, r->opt.tp, r->opt.weights, r->mem,
			     &err);
	if (rc) {
		fprintf(stderr, "kvbench: %s\n", err.text);
		return rc;
	}
	fprintf(stderr, "kvbench: %.1f GB of weights in %.1f s; reads run at %.3f TB/s\n",
		(double)r->model.m.weight_bytes / 1e9, (double)(kv_now_ns() - t0) / 1e9,
		r->ceiling / 1e12);
	rc = start_kvmd(r);
	if (!rc)
		rc = open_engine(r);
	t0 = kv_now_ns();
	if (!rc)
		rc = lease_all(r);
	if (!rc)
		rc = fill_all(r);
	if (!rc)
		fprintf(stderr,
			"kvbench: %u pages, %.1f GB, leased and filled in %.1f s\n",
			r->nr_pages,
			(double)r->nr_pages *
				(double)r->engine->pool_info.geometry.stride_bytes / 1e9,
			(double)(kv_now_ns() - t0) / 1e9);
	shuffle_pages(r);
	return rc;
}

static void scene_close(struct rank *r)
{
	bool lost = r->engine && r->engine->lost;

	if (r->engine)
		eng_engine_destroy(r->engine);
	if (r->own_kvmd)
		eng_private_kvmd_stop(&r->kvmd);
	rank_model_close(&r->model);
	if (r->mem && !lost)
		r->mem->ops->close(r->mem);
	free(r->pages);
}

/* Of the GPU; zeros on the host. */
static void add_uuid(cJSON *d, const u8 *uuid)
{
	char text[33];

	for (u32 i = 0; i < 16; i++)
		snprintf(text + 2 * i, 3, "%02x", uuid[i]);
	cJSON_AddStringToObject(d, "gpu_uuid", text);
}

static void add_date(cJSON *d)
{
	time_t now = time(NULL);
	char text[32];

	strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", gmtime(&now));
	cJSON_AddStringToObject(d, "date", text);
}

static int print_json(struct rank *r)
{
	const struct rank_options *o = &r->opt;
	const u64 stride = r->engine->pool_info.geometry.stride_bytes;
	cJSON *d = cJSON_CreateObject();

	cJSON_AddStringToObject(d, "schema", "kvbench-rank-1");
	cJSON_AddStringToObject(d, "commit", KVB_COMMIT);
	cJSON_AddStringToObject(d, "preset", o->preset);
	cJSON_AddStringToObject(d, "device", r->engine->mem->ops->name);
	add_uuid(d, r->engine->mem->gpu_uuid);
	add_date(d);
	cJSON_AddNumberToObject(d, "tp", o->tp);
	cJSON_AddStringToObject(d, "weights", o->weights == KVK_INT4 ? "int4" : "fp8");
	cJSON_AddStringToObject(d, "kv", eng_kv_str(o->kv));
	cJSON_AddStringToObject(d, "attention", eng_attention_str(o->attention));
	cJSON_AddNumberToObject(d, "in", o->in);
	cJSON_AddNumberToObject(d, "out", o->out);
	cJSON_AddStringToObject(d, "left_out", rank_model_left_out(o->preset));
	cJSON_AddNumberToObject(d, "ceiling_tb_s", round_to(r->ceiling / 1e12, 0.001));
	cJSON_AddNumberToObject(d, "weight_bytes", (double)r->model.m.weight_bytes);
	cJSON_AddNumberToObject(d, "kv_pages", r->nr_pages);
	cJSON_AddNumberToObject(d, "kv_bytes", (double)r->nr_pages * (double)stride);
	cJSON_AddItemToObject(d, "rows", r->rows);
	r->rows = NULL;
	return kvb_json_print(d);
}

int kvb_rank(int argc, char **argv)
{
	static struct rank r;
	int rc = rank_parse(&r.opt, argc, argv);

	if (rc)
		return rc;
	r.rng = 1;
	r.rows = cJSON_CreateArray();
	rc = scene_open(&r);
	for (u32 i = 0; i < r.opt.nr_batches && !rc; i++)
		rc = run_batch(&r, r.opt.batches[i]);
	if (!rc && r.opt.json)
		rc = print_json(&r);
	if (rc)
		fail("rank", rc);
	cJSON_Delete(r.rows);
	scene_close(&r);
	return rc == -ENODEV ? 3 : rc == -EINVAL ? 2 : rc ? 1 : 0;
}
