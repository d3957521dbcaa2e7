/* SPDX-License-Identifier: Apache-2.0 */
/* engines_child.c - an engine process of kvbench engines (engines.h). One thread. */
#include "engines.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "engine/run/engine.h"
#include "gpu_work.h"

#define PROMPT_TOKENS 128u
#define BATCH_MAX     256u
#define LONG_READS    20u

/* Say that we could start, wait for the others. Return: when to stop. */
static u64 wait_start(const struct engines_options *opt, struct engines_shared *shared)
{
	u64 start_ns;

	__atomic_fetch_add(&shared->ready, 1, __ATOMIC_SEQ_CST);
	while (!(start_ns = __atomic_load_n(&shared->start_ns, __ATOMIC_SEQ_CST)))
		usleep(100);
	while (kv_now_ns() < start_ns)
		;
	return start_ns + opt->seconds_ms * KV_NSEC_PER_MSEC;
}

/* One step more, @t0 to now. */
static void count(struct engines_result *ret, u64 t0, u64 units)
{
	ret->steps++;
	ret->units += units;
	if (ret->nr_samples < ENGINES_SAMPLES)
		ret->step_us[ret->nr_samples++] = (float)(kv_now_ns() - t0) * 1e-3f;
}

/* ------------------------------------------------------------------------------ decode */

static int submit(struct eng_engine *e, const struct eng_model *m, u32 batch, u32 seed,
		  struct eng_request **reqs)
{
	u32 prompt[PROMPT_TOKENS];
	u64 state = seed;

	for (u32 i = 0; i < batch; i++) {
		struct eng_params p = {.prompt = prompt,
				       .nr_prompt = PROMPT_TOKENS,
				       .max_tokens = m->config.max_positions -
						     PROMPT_TOKENS - 1,
				       .ignore_eos = true,
				       .no_prefix = true};
		struct eng_err err = {{0}};

		for (u32 t = 0; t < PROMPT_TOKENS; t++) {
			state = state * 6364136223846793005ull + 1442695040888963407ull;
			prompt[t] = (u32)(state >> 33) % m->config.vocab;
		}
		if (eng_request_submit(e, &p, &reqs[i], &err)) {
			fprintf(stderr, "kvbench: engines: %s\n", err.text);
			return -EINVAL;
		}
	}
	return 0;
}

static bool all_decode(struct eng_request **reqs, u32 nr)
{
	struct eng_result res;

	for (u32 i = 0; i < nr; i++) {
		eng_request_result(reqs[i], &res);
		if (res.state != ENG_DECODE)
			return false;
	}
	return true;
}

static int run_decode(const struct engines_options *opt, struct eng_engine *e,
		      struct eng_request **reqs, struct engines_shared *shared,
		      struct engines_result *ret)
{
	u32 batch = (u32)opt->batch;
	u64 start_ns, end_ns, t0;
	int r = 0;

	while (r >= 0 && !all_decode(reqs, batch)) {
		r = eng_engine_turn(e);
		if (r == 0)
			eng_engine_wait(e, 10);
	}
	for (u32 i = 0; i < 8 && r >= 0; i++)
		r = eng_engine_turn(e); /* the step's graph is there */
	if (r < 0)
		return r;
	end_ns = wait_start(opt, shared);
	start_ns = kv_now_ns();
	do {
		t0 = kv_now_ns();
		r = eng_engine_turn(e);
		if (r != (int)batch)
			return r < 0 ? r : -EPROTO; /* the figure would lie */
		count(ret, t0, batch);
	} while (kv_now_ns() < end_ns);
	ret->seconds = (double)(kv_now_ns() - start_ns) * 1e-9;
	return 0;
}

static int decode(const struct engines_options *opt, const char *socket_path, u32 i,
		  struct engines_shared *shared)
{
	static struct eng_request *reqs[BATCH_MAX];
	struct eng_model_options mopt = {0};
	struct eng_options eopt = {
		.size_bytes = sizeof(eopt),
		.kv = ENG_KV_FP8,
		.socket_path = socket_path,
		.client_name = "kvbench-engines",
		.batch_max = (u32)opt->batch,
		.no_prefix = true,
		.no_seal = true,
		.device = opt->backend == KVB_CUDA ? ENG_DEVICE_CUDA : ENG_DEVICE_HOST,
	};
	struct eng_err err = {{0}};
	struct eng_engine *e;
	struct eng_model *m;
	int r = eng_weights_parse(opt->weights);

	mopt.weights = (u32)r;
	if (r < 0 || eng_model_load(opt->model, &mopt, &m, &err) ||
	    eng_engine_create(m, &eopt, &e, &err)) {
		fprintf(stderr, "kvbench: engines: %s\n",
			r < 0 ? "--weights: unknown" : err.text);
		return 1;
	}
	r = submit(e, m, (u32)opt->batch, i + 1, reqs);
	if (!r)
		r = run_decode(opt, e, reqs, shared, &shared->engine[i]);
	if (r)
		fprintf(stderr, "kvbench: engines: engine %u: %s\n", i, strerror(-r));
	eng_engine_destroy(e);
	return r ? 1 : 0;
}

/* -------------------------------------------------------------------------------- read */

static int read_graph(struct eng_mem *m, const void *buf, u32 nr, u64 *sink,
		      void **ret_graph)
{
	int r = m->ops->graph_begin(m);

	for (u32 i = 0; i < nr && !r; i++)
		r = kvb_gpu_read(m, buf, ENGINES_READ, sink);
	return r ? r : m->ops->graph_end(m, ret_graph);
}

static int stream(const struct engines_options *opt, u32 reads, u32 i,
		  struct engines_shared *shared)
{
	struct engines_result *ret = &shared->engine[i];
	void *buf, *sink, *graph;
	u64 start_ns, end_ns, t0;
	struct eng_mem *m;
	int r = kvb_device_open(opt->backend, &m);

	if (r)
		return 1;
	r = m->ops->alloc(m, ENGINES_READ, &buf);
	if (!r)
		r = m->ops->alloc(m, sizeof(u64), &sink);
	if (!r)
		r = m->ops->sync(m);
	if (!r)
		r = read_graph(m, buf, reads, sink, &graph);
	if (!r)
		r = m->ops->graph_launch(m, graph);
	if (!r)
		r = m->ops->sync(m);
	if (r)
		goto fail;
	end_ns = wait_start(opt, shared);
	start_ns = kv_now_ns();
	do {
		t0 = kv_now_ns();
		r = m->ops->graph_launch(m, graph);
		if (!r)
			r = m->ops->sync(m);
		count(ret, t0, reads * ENGINES_READ);
	} while (!r && kv_now_ns() < end_ns);
	ret->seconds = (double)(kv_now_ns() - start_ns) * 1e-9;
	if (!r) {
		m->ops->graph_free(m, graph);
		m->ops->close(m);
		return 0;
	}
fail:
	fprintf(stderr, "kvbench: engines: engine %u: %s\n", i, strerror(-r));
	return 1;
}

int engines_child(const struct engines_options *opt, enum engines_kind kind,
		  const char *socket_path, u32 i, struct engines_shared *shared)
{
	if (kind == ENGINES_DECODE)
		return decode(opt, socket_path, i, shared);
	return stream(opt, kind == ENGINES_LONG ? LONG_READS : 1, i, shared);
}
