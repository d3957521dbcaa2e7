/* SPDX-License-Identifier: Apache-2.0 */
/*
 * internal.h - structures shared by the files of engine/run. Everything here belongs to
 * the engine's loop thread unless it says otherwise.
 */
#ifndef ENG_RUN_INTERNAL_H
#define ENG_RUN_INTERNAL_H

#include "base/assert.h"
#include "base/list.h"
#include "base/mutant.h"
#include "engine/run/engine.h"
#include "engine/run/inject.h"
#include "engine/run/mem.h"
#include "kernels/kernels.h"

#define ENG_BATCH_MAX	256u
#define ENG_CHUNK_MAX	4096u
#define ENG_WAITING_MAX 65536u
#define ENG_LOGIT_ROWS	64u /* rows of lm_head computed at a time */

/* ------------------------------------------------------------------ page tables (kv.c)
 */

#define ENG_LEASE_ZERO	0x01u /* DIRTY: zero it in the step that first writes to it */
#define ENG_LEASE_COPY	0x02u /* fork: filled from table.fork_source in that step */
#define ENG_LEASE_GONE	0x04u /* not ours any more (REVOKE, injection): never freed */

struct eng_lease {
	struct kv_grant grant;
	u32 flags;
	u32 reserved;
};

/**
 * struct eng_table - the pages of one request
 * @rows: [cap] as the check sees them, without WRITE; owner
 * @leases: [cap] what kvmd gave; rows are never used to free; owner
 * @nr, @cap: pages
 * @nr_sealed: the first nr_sealed pages are sealed
 * @key: key of page nr_sealed - 1
 * @nonce: of the request's rows; new at each admission
 * @fork_source: the sealed page that the ENG_LEASE_COPY page is copied from
 * @has_fork_source: fork_source is held
 */
struct eng_table {
	struct kv_row *rows;
	struct eng_lease *leases;
	u32 nr;
	u32 cap;
	u32 nr_sealed;
	u8 key[KV_KEY_BYTES];
	u64 nonce;
	struct kv_grant fork_source;
	bool has_fork_source;
};

/* ------------------------------------------------------------------------- requests */

struct eng_request {
	struct list_node node; /* engine.waiting, .running or .done */
	struct eng_engine *e;
	u64 id; /* order of arrival: smaller = older */
	enum eng_request_state state;
	enum eng_finish finish;
	int code;
	struct eng_params p; /* prompt, targets: not valid after submit */
	u32 *tokens;	     /* [nr_prompt + max_tokens] owner */
	float *logprobs;     /* [max_tokens] owner */
	u32 *targets;	     /* [nr_prompt] or NULL; owner */
	float *target_logprobs;
	float *logits; /* [vocab] or NULL; owner */
	u32 nr_tokens; /* prompt and generated */
	u32 nr_prompt;
	u32 max_tokens;
	u32 nr_in_pages; /* tokens whose K/V lies in pages */
	u32 nr_cached;
	u32 nr_prefilled;
	u32 nr_preempted;
	u32 bad_bits, bad_row, bad_pfn;
	struct eng_table table;
	bool admitted_once;
	bool reserve;	 /* admit with the pages of its whole length */
	bool revoked;	 /* a page was taken by REVOKE */
	bool cancel;	 /* abort or stop was asked during a step's callbacks */
	bool publishing; /* its callbacks run */
	bool free_after; /* eng_request_free() inside a callback */
	enum eng_finish cancel_as;
	u64 waiting_since_ns;
	u64 starved_since_ns; /* 0: it got what it asked for */
	u64 retry_ns;	      /* not asked for pages again before this */
	u32 q_len;	      /* tokens in the step that is being built; 0 = not in it */
};

/* ------------------------------------------------------------------------ a step's data
 */

/*
 * The requests of a step's check: first the sequences, then groups of pseudo requests for
 * whole-page work. Each pseudo request has rows and a nonce of its own and belongs to a
 * sequence, which fails with it.
 */
enum eng_group {
	ENG_GROUP_SEQ = 0,
	ENG_GROUP_ZERO,
	ENG_GROUP_COPY_SRC,
	ENG_GROUP_COPY_DST,
	ENG_GROUP_CRC,
	ENG_GROUP_NR
};

/**
 * struct eng_view - a group as the kernels see it
 * @first, @nr: its requests among the step's
 * @row_start: [nr + 1], from 0; rows begin at step.row_start[first]
 */
struct eng_view {
	u32 first;
	u32 nr;
	u32 *row_start;
};

#define ENG_NO_OWNER UINT32_MAX /* a request that only fills a batch up */

/**
 * struct eng_step - one step's data
 * @shared, @delta: arrays below marked [shared] lie in one piece of host memory; the
 *	kernels get eng_dev() of them, @delta bytes away: a copy, or on the host the same
 * @in_bytes, @out_first, @out_end: what goes to the device at the beginning of a step
 *	(block and rows as far as they are used as well), and what comes back
 * @forked: the check, or work beside the step's own, runs on the side branch and has not been
 *	joined
 */
struct eng_step {
	struct kvc_step *kvc;
	u64 number;
	u64 *number_arg; /* [shared] argument block: verdicts are compared with it */
	u32 stream;
	char *shared;
	ptrdiff_t delta;
	size_t in_bytes;
	size_t out_first;
	size_t out_end;
	bool forked;
	void *block;
	size_t block_bytes;

	u32 nr; /* requests, pseudo ones too */
	u32 nr_rows;
	u32 cap;      /* of the arrays by request */
	u32 cap_rows; /* of rows */
	struct kv_row *rows;
	u32 *row_start;
	u32 *lengths;
	u64 *nonces;
	struct kv_verdict *verdicts;
	u32 *owner; /* index of the sequence a pseudo request belongs to */
	struct eng_view view[ENG_GROUP_NR];

	struct eng_request **seqs; /* [batch_max] */
	u32 nr_seqs;
	u32 nr_decode; /* seqs with q_len 1 come first */
	u32 bucket;    /* requests that decode, filled up to this; 0: not filled up */
	u32 nr_tokens; /* those that fill up too */
	u32 q_len_max;
	u32 *q_start; /* [nr_seqs + 1] */
	u32 *zero_q;  /* zeros, for views without tokens */
	u32 *ids;     /* [tokens_max] */
	u32 *positions;
	u32 *targets;		/* [tokens_max] or ENG_NO_TARGET */
	float *target_logprobs; /* [tokens_max] */

	u32 *copy_tokens; /* [batch_max] tokens that hold data, per copied page */
	u32 *crc;	  /* [crc_max] */
	u32 *crc_first;	  /* [batch_max] first crc of a sequence */
	u32 *crc_nr;	  /* [batch_max] */
	u32 crc_max;
	u64 *nan_count; /* [shared] stored in pages by this step */

	u32 nr_samples;
	u32 *sample_seq; /* [batch_max] */
	u32 *sample_row; /* [batch_max] index among the step's tokens */
	u32 *sample_ids;
	float *sample_logprob;
	float *temperature;
	float *top_p;
	u64 *seeds;
	int *row_codes; /* [batch_max] of kvc_step_rows() */
	bool *seq_ok;	/* [batch_max] verdicts as read at the end */
};

/* activations in device memory, of mem->act_dtype but where F32 is said; every [T] is
 * tokens_max */
struct eng_act {
	void *x;      /* [T][hidden] residual stream */
	void *h;      /* [T][hidden] normed input of a block */
	void *y;      /* [T][hidden] a block's output */
	void *q_a;    /* MLA [T][q_rank] */
	void *q;      /* [T][heads * (nope + rope)] or [T][heads * head_dim] */
	void *q_abs;  /* MLA [T][heads][latent + rope] */
	void *kv;     /* MLA [T][latent + rope] */
	void *latent; /* MLA [T][latent] */
	void *k_rope; /* MLA [T][rope] */
	void *k;      /* GQA [T][kv_heads * head_dim] */
	void *v;
	void *attn;    /* MLA [T][heads][latent]; GQA [T][heads * head_dim] */
	void *attn_v;  /* MLA [T][heads * v] */
	void *gu;      /* [T][2][inter] */
	void *silu;    /* [T][inter] */
	float *router; /* [T][nr_experts] */
	u32 *expert_ids;
	float *expert_weights;
	void *head_in; /* [LOGIT_ROWS][hidden] */
	float *logits; /* [max(LOGIT_ROWS, batch_max)][vocab] */
	void *moe_ws;
	size_t moe_ws_bytes;
	void *attn_ws;
	size_t attn_ws_bytes;
	float *cos_sin; /* [length_max][rope dim] */
};

/* --------------------------------------------------------------------------- the engine
 */

struct eng_inject_state {
	struct eng_inject armed; /* kind NONE: nothing waits for a step */
	struct kv_grant
		want[ENG_INJECT_ROWS_MAX]; /* freed pages the next allocation must get */
	u32 nr_want;
	const struct eng_table *owner; /* the table they were taken from */
};

/* the weights as the kernels get them (device.c) */
struct eng_placed {
	const struct eng_layer *layers;
	struct kvk_weight embed;
	struct kvk_weight lm_head;
	const float *final_norm;
};

#define ENG_BUCKETS 9u /* 1, 2, 4, .. 256 requests */

struct eng_engine {
	struct eng_model *m;
	struct eng_options opt;
	struct eng_mem *mem;
	kvk_stream main;	   /* of mem, between eng_side_begin() and _end() */
	const struct kvk_ops *ops; /* mem->kernels */
	struct eng_placed w;
	struct eng_layer *own_layers; /* owner; NULL: w.layers are the model's */
	void *graphs[ENG_BUCKETS];    /* decode steps; owner; NULL: not captured yet */
	bool warm[ENG_BUCKETS];	      /* has run once without a graph */
	bool lost; /* the device failed in a step: that step may still run (P8) */
	struct kvc *kvc;
	struct kvc_pool *pool;
	struct kvc_pool_info pool_info;
	struct kvk_pages pages;
	struct kvc_info session;  /* that leases and mirror are of */
	struct kv_mirror *mirror; /* device memory */
	u32 mirror_pages;
	u32 tokens_max; /* of a step */
	u32 pages_max;	/* of a sequence */
	int wake_fd;
	u64 rng;
	u64 next_id;
	u64 retry_ns;	    /* earliest time a turn may succeed again; 0 = at once */
	bool frees_due;	    /* kvc_flush() has something to send */
	bool away;	    /* the connection to kvmd is lost and not made again */
	bool no_stock;	    /* it is away, and so is the last page of the magazine */
	u64 quiet_until_ns; /* kvmd did not answer: see eng_kvmd_away() */
	u64 moved_ns;	    /* a request was last admitted, or left the running ones */
	struct list_node waiting; /* by id */
	struct list_node running; /* by id */
	struct list_node done;
	u32 nr_waiting;
	u32 nr_running;
	struct eng_step step;
	struct eng_act act;
	struct eng_stats stats;
	/* called in a step, behind its work; NULL: not (kvbench rank) */
	int (*probe)(struct eng_engine *e, void *arg);
	void *probe_arg;
	struct eng_inject_state inject;
	struct kv_hit *hits;	       /* [pages_max] scratch */
	struct kv_grant *grants;       /* [pages_max] scratch */
	struct kv_seal_ret *seal_rets; /* [pages_max] scratch */
	float *amax;		       /* borrowed; NULL: not collected. Host only */
	float *kept_logits;	       /* [vocab] host memory, when mem is separate */
	void *arena;		       /* owner of the step's host arrays */
};

/* Counters are read by other threads. */
#define eng_stat_set(field_, v_) __atomic_store_n(&(field_), (v_), __ATOMIC_RELAXED)
#define eng_stat_add(field_, v_) eng_stat_set(field_, (field_) + (u64)(v_))

/* engine.c */
u64 eng_rand(struct eng_engine *e);
void eng_session_lost(struct eng_engine *e);
void eng_graphs_drop(struct eng_engine *e);
bool eng_session_look(struct eng_engine *e);
bool eng_kvmd_away(const struct eng_engine *e);
int eng_kvmd_note(struct eng_engine *e, int rc);

/* kv.c */
int eng_table_init(struct eng_table *t, u32 cap);
void eng_table_fini(struct eng_table *t);
void eng_table_reset(struct eng_engine *e, struct eng_table *t);
int eng_table_lookup(struct eng_engine *e, struct eng_table *t, const u32 *tokens,
		     u32 nr_tokens, u32 *ret_cached);
int eng_table_grow(struct eng_engine *e, struct eng_table *t, u32 nr_pages, u32 gfp);
void eng_table_release(struct eng_engine *e, struct eng_table *t);
bool eng_table_revoke(struct eng_table *t, const struct kv_page_ref *page);
void eng_table_seal(struct eng_engine *e, struct eng_request *r, const u32 *crc, u32 nr);
void eng_free_grant(struct eng_engine *e, const struct kv_grant *grant);

/* request.c */
void eng_request_done(struct eng_request *r, enum eng_finish finish, int code);
void eng_request_queue(struct eng_request *r);
void eng_request_publish(struct eng_request *r, u32 token, float logprob);

/* sched.c */
u32 eng_sched_build(struct eng_engine *e);
void eng_sched_preempt(struct eng_request *r);
int eng_sched_wait_ms(struct eng_engine *e, int timeout_ms);

/* prefill.c, decode.c */
bool eng_prefill_admit(struct eng_engine *e, struct eng_request *r);
bool eng_decode_slot(struct eng_engine *e, struct eng_request *r);

/* batch.c */
void eng_batch_build(struct eng_engine *e, struct eng_request **seqs, u32 nr);
struct kvk_batch eng_batch_view(struct eng_engine *e, enum eng_group group);

/** eng_dev() - where the kernels see a [shared] array of the step */
static inline void *eng_dev(const struct eng_engine *e, const void *p)
{
	return (char *)(uintptr_t)p + e->step.delta;
}

/* step.c */
int eng_step_run(struct eng_engine *e);
int eng_step_queue(struct eng_engine *e, bool check);

/* check.c */
void eng_check_prepare(struct eng_engine *e);
int eng_check_launch(struct eng_engine *e, bool fetch);
bool eng_check_is_on(const struct eng_engine *e);
int eng_check_join(struct eng_engine *e);
int eng_check_judge(struct eng_engine *e);
int eng_side_begin(struct eng_engine *e);
void eng_side_end(struct eng_engine *e);
bool eng_check_needs_judge(const struct eng_engine *e);
int eng_step_upload(struct eng_engine *e);
int eng_step_download(struct eng_engine *e);
int eng_step_fetch(struct eng_engine *e, bool rows);
int eng_step_give(struct eng_engine *e);

/* call.c */

/* y [tokens][nr_batch][rows] (+)= x W^T; 0: the step's tokens, one matrix, no bias */
struct eng_linear {
	const struct kvk_weight *w;
	const void *x;
	void *y;
	const float *bias;
	u32 nr_tokens;
	u32 nr_batch;
	u32 x_batch; /* elements between a token's vectors; 0: dense */
	u32 y_batch;
	bool accumulate;
	bool y_f32;
};

struct eng_norm {
	const void *x;
	void *residual;
	const float *weight;
	void *y;
	float eps;
	u32 nr_rows;
	u32 cols;
	u32 x_stride; /* 0: cols */
};

void *eng_act_at(const struct eng_engine *e, const void *base, size_t index);
int eng_call_linear(struct eng_engine *e, const struct eng_linear *l);
struct kvk_norm_args eng_norm_args(const struct eng_engine *e, const struct eng_norm *n);
int eng_call_norm(struct eng_engine *e, const struct eng_norm *n);

/* device.c */
int eng_weights_place(struct eng_engine *e);

/* mirror.c */
int eng_mirror_alloc(struct eng_engine *e);
int eng_mirror_reset(struct eng_engine *e);
u64 eng_mirror_position(struct eng_engine *e);
int eng_mirror_tags(struct eng_engine *e, u64 *ret_tags);

/* publish.c */
void eng_verdicts_read(struct eng_engine *e);
void eng_step_seal(struct eng_engine *e);
void eng_step_publish(struct eng_engine *e);
void eng_dispatch_event(void *arg, const struct kvc_event *event);

/* forward.c, buffers.c */
int eng_forward(struct eng_engine *e);
int eng_forward_results(struct eng_engine *e);
int eng_buffers_alloc(struct eng_engine *e);
void eng_buffers_free(struct eng_engine *e);

/* attn.c */
int eng_attn_block(struct eng_engine *e, u32 layer);

/* inject.c */
void eng_inject_rows(struct eng_engine *e);
void eng_inject_block(struct eng_engine *e);
void eng_inject_verdicts(struct eng_engine *e);
bool eng_inject_alone(struct eng_engine *e, struct eng_request **ret_r);
int eng_inject_take(struct eng_engine *e, const struct eng_table *t,
		    struct kv_grant *grants, u32 nr);
void eng_inject_forget(struct eng_engine *e, struct eng_request *r);

#endif /* ENG_RUN_INTERNAL_H */
