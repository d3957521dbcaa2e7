/* SPDX-License-Identifier: Apache-2.0 */
/*
 * request.c - a request's life: submit, publish, end (the state machine of engine.h).
 *
 * Callbacks run between steps, from eng_engine_turn(). A callback may stop, abort or free
 * its request; that is noted and done when the callback has returned.
 */
#include "engine/run/internal.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"

static int refuse_params(struct eng_engine *e, const struct eng_params *p,
			 struct eng_err *err)
{
	u32 vocab = e->m->config.vocab;
	u64 total = (u64)p->nr_prompt + p->max_tokens;

	if (p->nr_prompt == 0 || !p->prompt)
		return eng_refuse(err, -EINVAL,
				  "prompt: empty, at least one token is needed");
	if (p->max_tokens == 0 && !p->targets)
		return eng_refuse(err, -EINVAL, "max_tokens=0: at least 1 is needed");
	if (!(p->temperature >= 0) || p->temperature > 100)
		return eng_refuse(err, -EINVAL, "temperature=%g: not in 0..100",
				  (double)p->temperature);
	if (!(p->top_p >= 0) || p->top_p > 1)
		return eng_refuse(err, -EINVAL, "top_p=%g: not in 0..1",
				  (double)p->top_p);
	if (p->nr_given && p->nr_given >= p->nr_prompt)
		return eng_refuse(err, -EINVAL, "nr_given=%u: less than nr_prompt=%u",
				  p->nr_given, p->nr_prompt);
	if (total > e->opt.length_max)
		return eng_refuse(
			err, -E2BIG,
			"prompt of %u and max_tokens=%u: more than the %u tokens a "
			"sequence may have",
			p->nr_prompt, p->max_tokens, e->opt.length_max);
	if (kv_div_round_up(total, KV_PAGE_TOKENS) > e->pool_info.geometry.nr_pages)
		return eng_refuse(err, -E2BIG,
				  "prompt of %u and max_tokens=%u: the pool has %u pages",
				  p->nr_prompt, p->max_tokens,
				  e->pool_info.geometry.nr_pages);
	for (u32 i = 0; i < p->nr_prompt; i++) {
		if (p->prompt[i] >= vocab)
			return eng_refuse(err, -EINVAL,
					  "prompt[%u]=%u: not below vocab %u", i,
					  p->prompt[i], vocab);
		if (p->targets && p->targets[i] >= vocab)
			return eng_refuse(err, -EINVAL,
					  "targets[%u]=%u: not below vocab %u", i,
					  p->targets[i], vocab);
	}
	return 0;
}

static void request_destroy(struct eng_request *r)
{
	eng_table_fini(&r->table);
	free(r->tokens);
	free(r->logprobs);
	free(r->targets);
	free(r->target_logprobs);
	free(r->logits);
	free(r);
}

static int request_buffers(struct eng_request *r, const struct eng_params *p, u32 vocab)
{
	u32 total = p->nr_prompt + p->max_tokens;

	r->tokens = calloc(total, sizeof(*r->tokens));
	r->logprobs = calloc(p->max_tokens + 1, sizeof(*r->logprobs));
	if (!r->tokens || !r->logprobs)
		return -ENOMEM;
	memcpy(r->tokens, p->prompt, p->nr_prompt * sizeof(*r->tokens));
	if (p->targets) {
		r->targets = calloc(p->nr_prompt, sizeof(*r->targets));
		r->target_logprobs = calloc(p->nr_prompt, sizeof(*r->target_logprobs));
		if (!r->targets || !r->target_logprobs)
			return -ENOMEM;
		memcpy(r->targets, p->targets, p->nr_prompt * sizeof(*r->targets));
	}
	if (p->keep_logits) {
		r->logits = calloc(vocab, sizeof(*r->logits));
		if (!r->logits)
			return -ENOMEM;
	}
	return eng_table_init(&r->table, (u32)kv_div_round_up(total, KV_PAGE_TOKENS));
}

int eng_request_submit(struct eng_engine *e, const struct eng_params *p,
		       struct eng_request **ret, struct eng_err *err)
{
	struct eng_request *r;
	int rc;

	rc = refuse_params(e, p, err);
	if (rc)
		return rc;
	if (e->nr_waiting >= e->opt.waiting_max)
		return eng_refuse(err, -EAGAIN, "queue full: %u requests wait",
				  e->nr_waiting);
	r = calloc(1, sizeof(*r));
	if (!r)
		return eng_refuse(err, -ENOMEM, "out of memory");
	rc = request_buffers(r, p, e->m->config.vocab);
	if (rc)
		goto destroy;
	r->e = e;
	r->id = ++e->next_id;
	r->p = *p;
	r->p.prompt = NULL;
	r->p.targets = NULL;
	if (r->p.top_p == 0)
		r->p.top_p = 1;
	r->nr_prompt = p->nr_prompt;
	r->nr_tokens = p->nr_prompt;
	r->max_tokens = p->max_tokens;
	list_init(&r->node);
	eng_request_queue(r);
	*ret = r;
	return 0;
destroy:
	request_destroy(r);
	return eng_refuse(err, rc, "out of memory");
}

/** eng_request_queue() - into the waiting list, by age: an older one goes first */
void eng_request_queue(struct eng_request *r)
{
	struct eng_engine *e = r->e;
	struct list_node *at = &e->waiting;
	struct eng_request *other;

	kv_assert(r->table.nr == 0);
	list_for_each_entry (other, &e->waiting, node) {
		if (other->id > r->id) {
			at = &other->node;
			break;
		}
	}
	list_add_tail(at, &r->node);
	r->state = ENG_WAITING;
	r->nr_in_pages = 0;
	r->waiting_since_ns = kv_now_ns();
	r->starved_since_ns = 0;
	e->nr_waiting++;
	eng_stat_set(e->stats.waiting, e->nr_waiting);
}

static void leave_list(struct eng_request *r)
{
	struct eng_engine *e = r->e;

	list_del(&r->node);
	if (r->state == ENG_WAITING) {
		e->nr_waiting--;
	} else if (r->state != ENG_DONE) {
		e->nr_running--;
		e->moved_ns = kv_now_ns();
	}
	eng_stat_set(e->stats.waiting, e->nr_waiting);
	eng_stat_set(e->stats.running, e->nr_running);
}

/**
 * eng_request_done() - end a request: pages back, final state, on_done
 * @finish: why
 * @code: outcome or -errno that goes with it
 *
 * Context: between steps. Does nothing for a request that is DONE. @r may be gone on
 * return.
 */
void eng_request_done(struct eng_request *r, enum eng_finish finish, int code)
{
	struct eng_engine *e = r->e;

	if (r->state == ENG_DONE)
		return;
	kv_assert(!r->publishing);
	leave_list(r);
	eng_inject_forget(e, r);
	eng_table_release(e, &r->table);
	r->state = ENG_DONE;
	r->finish = finish;
	r->code = code;
	r->q_len = 0;
	list_add_tail(&e->done, &r->node);
	eng_stat_add(e->stats.finished[finish], 1);
	if (r->p.on_done) {
		r->publishing = true;
		r->p.on_done(r->p.arg, r);
		r->publishing = false;
	}
	if (r->free_after) {
		list_del(&r->node);
		request_destroy(r);
	}
}

static bool is_eos(const struct eng_config *c, u32 token)
{
	for (u32 i = 0; i < c->nr_eos; i++) {
		if (c->eos[i] == token)
			return true;
	}
	return false;
}

/**
 * eng_request_publish() - a new token of a request whose verdict was good
 *
 * Context: between steps. @r may be DONE, and gone, on return.
 */
void eng_request_publish(struct eng_request *r, u32 token, float logprob)
{
	u32 nr_new = r->nr_tokens - r->nr_prompt;

	kv_assert(nr_new < r->max_tokens);
	r->tokens[r->nr_tokens++] = token;
	r->logprobs[nr_new] = logprob;
	eng_stat_add(r->e->stats.generated_tokens, 1);
	if (r->p.on_token) {
		r->publishing = true;
		r->p.on_token(r->p.arg, r, token, logprob);
		r->publishing = false;
	}
	if (r->cancel)
		eng_request_done(r, r->cancel_as, 0);
	else if (!r->p.ignore_eos && is_eos(&r->e->m->config, token))
		eng_request_done(r, ENG_FINISH_STOP, 0);
	else if (nr_new + 1 == r->max_tokens)
		eng_request_done(r, ENG_FINISH_LENGTH, 0);
}

static void request_cancel(struct eng_request *r, enum eng_finish as)
{
	if (r->state == ENG_DONE)
		return;
	if (!r->publishing) {
		eng_request_done(r, as, 0);
		return;
	}
	if (!r->cancel)
		r->cancel_as = as;
	r->cancel = true;
}

void eng_request_abort(struct eng_request *r)
{
	request_cancel(r, ENG_FINISH_ABORT);
}

void eng_request_stop(struct eng_request *r)
{
	request_cancel(r, ENG_FINISH_STOP);
}

void eng_request_free(struct eng_request *r)
{
	if (!r)
		return;
	if (r->publishing) {
		r->free_after = true;
		request_cancel(r, ENG_FINISH_ABORT);
		return;
	}
	r->p.on_done = NULL;
	eng_request_done(r, ENG_FINISH_ABORT, 0);
	list_del(&r->node);
	request_destroy(r);
}

void eng_request_result(const struct eng_request *r, struct eng_result *ret)
{
	*ret = (struct eng_result){
		.state = r->state,
		.finish = r->finish,
		.code = r->code,
		.tokens = r->tokens + r->nr_prompt,
		.logprobs = r->logprobs,
		.nr_tokens = r->nr_tokens - r->nr_prompt,
		.nr_prompt = r->nr_prompt,
		.nr_cached = r->nr_cached,
		.nr_computed = r->nr_prefilled,
		.nr_preempted = r->nr_preempted,
		.bad_bits = r->bad_bits,
		.bad_row = r->bad_row,
		.bad_pfn = r->bad_pfn,
		.target_logprobs = r->target_logprobs,
		.logits = r->logits,
	};
}

u32 eng_request_pages(const struct eng_request *r, struct kv_grant *ret, u32 nr_max)
{
	u32 nr = KV_MIN(r->table.nr, nr_max);

	for (u32 i = 0; i < nr; i++)
		ret[i] = r->table.leases[i].grant;
	return nr;
}

u64 eng_request_id(const struct eng_request *r)
{
	return r->id;
}

const char *eng_finish_str(enum eng_finish finish)
{
	static const char *const names[] = {"none",	"stop",	    "length", "abort",
					    "KV_STALE", "no_pages", "error"};

	return (u32)finish < KV_ARRAY_SIZE(names) ? names[finish] : "?";
}

const char *eng_state_str(enum eng_request_state state)
{
	static const char *const names[] = {"waiting", "prefill", "decode", "done"};

	return (u32)state < KV_ARRAY_SIZE(names) ? names[state] : "?";
}
