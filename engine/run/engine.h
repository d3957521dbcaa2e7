/* SPDX-License-Identifier: Apache-2.0 */
/*
 * engine.h - the inference engine: requests in, tokens out, K/V in pages of kvmd.
 *
 * One struct eng_engine = one model, one session of kvmd, one pool, one scheduler. Its
 *	owner calls eng_engine_turn() in a loop and eng_engine_wait() when a turn had nothing to
 *	do. All functions belong to that one thread; only eng_engine_wake() and
 *	eng_engine_stats() may be called from others.
 *
 * A request is a small state machine::
 *
 *	          submit                 admitted: pages leased, prefix looked up
 *	(caller) ------->  WAITING  ------------------------------------->  PREFILL
 *	                     ^  |                                            |   |
 *	      preempted:     |  | abort, no pages within admit_ms            |   | all
 *	tokens of the pages given    |  v                                            |   |
 *	sequence are in back, computed +-DONE <--- stale page, abort, error -----------+   v
 *	pages again later    |  ^                                              DECODE: a token a
 *	step
 *	                     +--|------------------------------------------------|
 *	                        +--- stop token, stop string, length, abort -----+
 *
 * WAITING and DONE hold no pages. DONE is final; its result stays readable until
 * eng_request_free().
 */
#ifndef ENG_RUN_ENGINE_H
#define ENG_RUN_ENGINE_H

#include <stdbool.h>
#include "kvclient.h"
#include "base/util.h"
#include "engine/model/model.h"
#include "engine/run/mem.h"

struct eng_engine;
struct eng_request;

/** enum eng_kv - how K/V lies in pages */
enum eng_kv {
	ENG_KV_BF16 = 0,
	ENG_KV_FP8 = 1,	  /* e4m3, a scale per token in the page */
	ENG_KV_FP8_S = 2, /* e4m3, static scales in the layout */
	ENG_KV_F32 = 3,	  /* tests only; kvmd must run with --test-layouts */
};

/** enum eng_attention - how exact the attention of decode steps is */
enum eng_attention {
	ENG_ATTENTION_EXACT = 0,
	ENG_ATTENTION_FAST = 1, /* KVK_ATTN_FAST */
};

enum eng_request_state {
	ENG_WAITING = 0, /* holds no page; in the queue */
	ENG_PREFILL =
		1, /* holds pages; tokens remain to be computed before the next sample */
	ENG_DECODE = 2, /* holds pages; computes one token a step */
	ENG_DONE = 3,	/* holds no page; final */
};

enum eng_finish {
	ENG_FINISH_NONE = 0,
	ENG_FINISH_STOP = 1,   /* a token of config.eos, or eng_request_stop() */
	ENG_FINISH_LENGTH = 2, /* max_tokens or the model's positions are used up */
	ENG_FINISH_ABORT = 3,  /* eng_request_abort() */
	ENG_FINISH_STALE = 4, /* KV_STALE: a page was not the one the request was given */
	ENG_FINISH_NO_PAGES = 5, /* KV_FULL or KV_QUOTA and no prospect of more */
	ENG_FINISH_ERROR = 6,	 /* -errno in result.code */
};

/**
 * struct eng_options - how to run; zero = default
 * @size_bytes: sizeof(struct eng_options)
 * @kv: enum eng_kv
 * @attention: enum eng_attention, of steps in which every sequence has one token; FAST is
 *	something else only for MLA with more than 16 heads on a GPU
 * @socket_path: kvmd; NULL: $KVMD_SOCKET, else the default
 * @client_name: shown by kvmctl; NULL: "kv-engine"
 * @batch_max: most requests in a step (16)
 * @chunk_tokens: most prompt tokens in a step (256)
 * @waiting_max: most requests in the queue (256)
 * @length_max: most tokens of a sequence; 0 = the model's positions
 * @admit_ms: a waiting request without prospect of pages ends after this (30,000), counted from
 *	when it came, or from when another was admitted or gave its pages back
 * @timeout_ms: most that a call to kvmd waits (5,000)
 * @kv_scales: FP8_S: static scales in struct kv_layout's order; NULL = the model's own
 * @no_prefix: look nothing up
 * @no_seal: seal nothing
 * @inject: allow eng_inject_*() (tests only)
 * @device: enum eng_device (mem.h): who computes; kvmd's backend must be of that kind
 * @gpu_uuid: 16 bytes, or NULL: the first GPU this process sees
 * @placed: the model's arrays lie in the device's memory already: nothing is copied
 * @progress: called now and then while weights go to a GPU, in bytes; may be NULL
 * @progress_arg: theirs
 */
struct eng_options {
	u32 size_bytes;
	u32 kv;
	u32 attention;
	const char *socket_path;
	const char *client_name;
	u32 batch_max;
	u32 chunk_tokens;
	u32 waiting_max;
	u32 length_max;
	u32 admit_ms;
	u32 timeout_ms;
	const float *kv_scales;
	bool no_prefix;
	bool no_seal;
	bool inject;
	bool placed;
	u32 device;
	const u8 *gpu_uuid;
	void (*progress)(void *arg, u64 done, u64 total);
	void *progress_arg;
};

/**
 * struct eng_params - one request; zero = default
 * @prompt: nr_prompt token ids (1 and up), copied
 * @nr_prompt: at most length_max
 * @max_tokens: tokens to generate; 0 only with @targets
 * @temperature: 0 = greedy
 * @top_p: 0 or 1 = off
 * @seed: of the draws; equal seeds, equal tokens
 * @ignore_eos: go on behind an end token
 * @no_prefix: look nothing up, seal nothing
 * @keep_logits: result.logits holds the logits of the newest sample
 * @nr_given: this many tokens' K/V is taken to lie in the pages already, whatever is there
 *	(kvbench rank); less than nr_prompt
 * @targets: NULL, or [nr_prompt]: result.target_logprobs[i] becomes the log-probability
 *	of targets[i] after prompt[0 .. i]; copied. Such a request looks nothing up
 * @on_token: called for each new token, before the request may become DONE; may call
 *	eng_request_stop() and eng_request_abort()
 * @on_done: called once, when it is DONE; may call eng_request_free()
 * @arg: theirs
 */
struct eng_params {
	const u32 *prompt;
	u32 nr_prompt;
	u32 max_tokens;
	float temperature;
	float top_p;
	u64 seed;
	bool ignore_eos;
	bool no_prefix;
	bool keep_logits;
	u32 nr_given;
	const u32 *targets;
	void (*on_token)(void *arg, struct eng_request *r, u32 token, float logprob);
	void (*on_done)(void *arg, struct eng_request *r);
	void *arg;
};

/**
 * struct eng_result - what a request has come to
 * @state, @finish: where it stands
 * @code: STALE: KV_STALE; NO_PAGES: KV_FULL or KV_QUOTA; ERROR: -errno; else 0
 * @tokens: [nr_tokens] generated ids
 * @logprobs: [nr_tokens] their log-probabilities at temperature 1
 * @nr_prompt: prompt tokens
 * @nr_cached: prompt tokens found in sealed pages when it was first admitted
 * @nr_computed: prompt tokens computed here, recomputation after preemption included
 * @nr_preempted: times its pages were taken to let an older request go on
 * @bad_bits: STALE: KV_BAD_* of the verdict
 * @bad_row, @bad_pfn: STALE: the first bad row
 * @target_logprobs: [nr_prompt] or NULL
 * @logits: [vocab] or NULL
 */
struct eng_result {
	enum eng_request_state state;
	enum eng_finish finish;
	int code;
	const u32 *tokens;
	const float *logprobs;
	u32 nr_tokens;
	u32 nr_prompt;
	u32 nr_cached;
	u32 nr_computed;
	u32 nr_preempted;
	u32 bad_bits;
	u32 bad_row;
	u32 bad_pfn;
	const float *target_logprobs;
	const float *logits;
};

/**
 * struct eng_stats - counters since start, and gauges (running, waiting)
 */
struct eng_stats {
	u64 steps;
	u64 step_ns;
	u64 prompt_tokens; /* computed */
	u64 cached_tokens; /* taken from sealed pages */
	u64 generated_tokens;
	u64 preemptions;
	u64 stale_aborts;
	u64 revoked; /* requests that lost a page to REVOKE and were computed again */
	u64 sealed_pages;
	u64 zeroed_pages;
	u64 forked_pages;
	u64 nan_values;	 /* NaN stored in pages: never with sound weights */
	u64 finished[7]; /* by enum eng_finish */
	u64 running;
	u64 waiting;
};

/**
 * eng_engine_create() - connect to kvmd, open the model's pool, allocate everything a
 *	step needs
 * @m: borrowed; must outlive the engine
 * @opt: NULL = all defaults
 * @ret: owner; eng_engine_destroy()
 * @err: one line when it failed
 *
 * Return: 0; -EINVAL an option or the layout; -ENODATA FP8_S without scales; -ENOMEM; the
 *	errors of kvc_open() and kvc_pool_open(); -ENODEV no such GPU, or kvmd's memory is
 *	not the device's. With a GPU its context is current on the calling thread after.
 */
int eng_engine_create(struct eng_model *m, const struct eng_options *opt,
		      struct eng_engine **ret, struct eng_err *err);

/**
 * eng_engine_destroy() - frees all requests (also DONE ones) and ends the session
 *
 * After a device error session and memory are left to the end of the process, which must
 * follow: the failed step may still run (design 5, P8).
 */
void eng_engine_destroy(struct eng_engine *e);

/**
 * eng_engine_turn() - handle events, admit, run at most one step
 *
 * Return: requests that took part in a step; 0: nothing could run, eng_engine_wait();
 *	-errno: kvmd broke the protocol or ended the session; the engine is of no more
 *	use.
 */
int eng_engine_turn(struct eng_engine *e);

/** eng_engine_wait() - sleep until events, eng_engine_wake(), a retry is due, or
 * @timeout_ms */
void eng_engine_wait(struct eng_engine *e, int timeout_ms);

/** eng_engine_wake() - end eng_engine_wait(). Context: any thread, signal handlers too */
void eng_engine_wake(struct eng_engine *e);

/** eng_engine_run() - turns and waits until no request is left that is not DONE; 0 or
 * -errno */
int eng_engine_run(struct eng_engine *e);

/** eng_engine_stats() - a snapshot. Context: any thread */
void eng_engine_stats(struct eng_engine *e, struct eng_stats *ret);

/** eng_engine_kvc(), eng_engine_pool(), eng_engine_layout() - what the engine opened */
struct kvc *eng_engine_kvc(struct eng_engine *e);
struct kvc_pool *eng_engine_pool(struct eng_engine *e);
const struct kv_layout *eng_engine_layout(struct eng_engine *e);

/**
 * eng_request_submit() - queue a request
 * @ret: owner; eng_request_free(), or eng_engine_destroy() does
 *
 * Return: 0; -EINVAL a parameter (@err names it); -E2BIG prompt or prompt + max_tokens
 *	too long for the model or the pool; -EAGAIN waiting_max requests wait; -ENOMEM.
 */
int eng_request_submit(struct eng_engine *e, const struct eng_params *p,
		       struct eng_request **ret, struct eng_err *err);

/** eng_request_abort() - end it with FINISH_ABORT, in any state; a second one does
 * nothing */
void eng_request_abort(struct eng_request *r);

/** eng_request_stop() - as abort, but the result is FINISH_STOP (a stop string was seen)
 */
void eng_request_stop(struct eng_request *r);

/** eng_request_free() - abort if needed, then free; the pages go the normal way */
void eng_request_free(struct eng_request *r);

/** eng_request_result() - pointers are valid until the next turn or eng_request_free() */
void eng_request_result(const struct eng_request *r, struct eng_result *ret);

/** eng_request_pages() - grants the request holds now, in order; for tests and kvbench */
u32 eng_request_pages(const struct eng_request *r, struct kv_grant *ret, u32 nr_max);

u64 eng_request_id(const struct eng_request *r);

const char *eng_finish_str(enum eng_finish finish);
const char *eng_state_str(enum eng_request_state state);

/** eng_kv_parse() - "bf16", "fp8", "fp8_s", "f32"; -EINVAL for another text */
int eng_kv_parse(const char *text);
const char *eng_kv_str(u32 kv);

/** eng_attention_parse() - "exact", "fast"; -EINVAL for another text */
int eng_attention_parse(const char *text);
const char *eng_attention_str(u32 attention);

#endif /* ENG_RUN_ENGINE_H */
