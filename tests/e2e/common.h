/* SPDX-License-Identifier: Apache-2.0 */
/*
 * common.h - a rig for end-to-end tests: a private kvmd, a model, engines.
 *
 * Cases that need a second engine process fork it before this process touches OpenMP
 * (loading a model does): libgomp's threads do not survive a fork.
 */
#ifndef TESTS_E2E_COMMON_H
#define TESTS_E2E_COMMON_H

#include "engine/private.h"
#include "engine/run/engine.h"
#include "engine/run/inject.h"

struct cJSON;

#define RIG_TOKENS_MAX 1024u

struct rig {
	struct eng_private_kvmd kvmd;
	struct eng_model *m;
	char dir[1024];
};

/**
 * rig_on_cuda() - KVT_BACKEND=cuda: kvmd with --backend cuda, engines on the GPU of this
 * machine; else both on host memory, on a machine with a GPU, too
 */
bool rig_on_cuda(void);

/** rig_size_option() - "--host-bytes" or "--gpu-bytes", as the backend wants it */
const char *rig_size_option(void);

/** rig_kvmd() - start kvmd; @args NULL-terminated, may be NULL */
void rig_kvmd(struct rig *rig, const char *const *args);

/** rig_model() - load tests/models/@name */
void rig_model(struct rig *rig, const char *name, u32 weights);

/**
 * rig_more_heads() - an MLA model's query heads @copies times each, and of each copy's output a share:
 * the same model
 * @copies: a power of two. The arrays stay to the end of the process
 */
void rig_more_heads(struct rig *rig, u32 copies);

/** rig_engine() - create an engine; @opt may be NULL */
struct eng_engine *rig_engine(struct rig *rig, const struct eng_options *opt);

void rig_close(struct rig *rig);

/** rig_models_dir() - where tests/models is, seen from here */
const char *rig_models_dir(void);

/** rig_json() - parse a JSON file of tests/models */
struct cJSON *rig_json(const char *name);

/** rig_prompt() - @nr token ids of real text; another @seed, other text */
void rig_prompt(u32 seed, u32 *ret_ids, u32 nr);

/**
 * struct trace - everything a request produced, for byte-wise comparison
 * @tokens: ids
 * @hashes: one hash per token over the bytes of its whole logits row
 * @leads: how far the best logit of the row is above the second
 */
struct trace {
	u32 nr;
	u32 tokens[RIG_TOKENS_MAX];
	u64 hashes[RIG_TOKENS_MAX];
	float leads[RIG_TOKENS_MAX];
	u32 vocab;
	struct eng_result res; /* when done */
	bool done;
};

/** trace_submit() - a greedy request that fills @t */
struct eng_request *trace_submit(struct eng_engine *e, struct trace *t, const u32 *prompt,
				 u32 nr_prompt, u32 max_tokens, bool no_prefix);

/**
 * trace_expect_equal() - same tokens from bit-equal logits
 *
 * On a GPU the order of sums depends on the batch: there, same tokens as far as the choice
 * was clear. Where the best logit led by less than RIG_LEAD_MIN, texts may part.
 */
#define RIG_LEAD_MIN 0.5f
void trace_expect_equal(const struct trace *a, const struct trace *b, const char *what);

/** trace_expect_begins() - the same for the first @nr tokens, which both must have */
void trace_expect_begins(const struct trace *a, const struct trace *b, u32 nr,
			 const char *what);

/** rig_page_get(), rig_page_put() - bytes of an engine's page, wherever they are; nobody
 * may be computing on it */
void rig_page_get(struct eng_engine *e, u32 pfn, u64 off, void *dst, u64 bytes);
void rig_page_put(struct eng_engine *e, u32 pfn, u64 off, const void *src, u64 bytes);

/** rig_turns() - turn until @r has @nr_tokens tokens or is DONE */
void rig_turns(struct eng_engine *e, struct eng_request *r, u32 nr_tokens);

/** rig_run() - until all requests are DONE; fails on an engine error */
void rig_run(struct eng_engine *e);

/** rig_admin() - one request to kvmd's admin socket, parsed answer; fails if it is not ok
 */
struct cJSON *rig_admin(struct rig *rig, const char *request);

#endif
