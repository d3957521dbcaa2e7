/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sched.c - who takes part in the next step: continuous batching with chunked prefill.
 *
 * Every running request that decodes adds one token; what is left of chunk_tokens goes to
 * prompts, oldest first. Order and chunking do not change a request's numbers (the
 * kernels compute each token alone), so the scheduler is free to choose.
 */
#include "engine/run/internal.h"

#include "base/clock.h"

#define PREEMPT_BACKOFF_NS (20 * KV_NSEC_PER_MSEC)

/**
 * eng_sched_preempt() - a running request gives its pages back and waits
 *
 * Its tokens stay; what was computed is computed again (sealed pages are usually still
 * found).
 */
void eng_sched_preempt(struct eng_request *r)
{
	struct eng_engine *e = r->e;

	kv_assert(r->state == ENG_PREFILL || r->state == ENG_DECODE);
	list_del(&r->node);
	e->nr_running--;
	e->moved_ns = kv_now_ns();
	eng_inject_forget(e, r);
	eng_table_release(e, &r->table);
	r->nr_preempted++;
	r->q_len = 0;
	r->revoked = false;
	eng_stat_set(e->stats.running, e->nr_running);
	eng_stat_add(e->stats.preemptions, 1);
	eng_request_queue(r);
	/* let the older ones use what was given before asking for it again */
	r->retry_ns =
		kv_now_ns() + PREEMPT_BACKOFF_NS / 2 + eng_rand(e) % PREEMPT_BACKOFF_NS;
}

static void drop_revoked(struct eng_engine *e)
{
	struct eng_request *r, *tmp;

	list_for_each_entry_safe (r, tmp, &e->running, node) {
		if (!r->revoked)
			continue;
		eng_sched_preempt(r);
		eng_stat_add(e->stats.revoked, 1);
	}
}

/* First come, first served: nobody overtakes the head of the queue. */
static void admit(struct eng_engine *e)
{
	u64 now_ns = kv_now_ns();

	while (e->nr_running < e->opt.batch_max) {
		struct eng_request *r = list_first(&e->waiting, struct eng_request, node);

		if (!r || r->retry_ns > now_ns || (e->nr_running && eng_kvmd_away(e)))
			return;
		if (!eng_prefill_admit(e, r) && !list_empty(&e->waiting) &&
		    list_first(&e->waiting, struct eng_request, node) == r)
			return;
	}
}

/* First of the running list that is younger than @id. */
static struct list_node *after_id(struct eng_engine *e, u64 id)
{
	struct eng_request *r;

	list_for_each_entry (r, &e->running, node) {
		if (r->id > id)
			return &r->node;
	}
	return &e->running;
}

/* Younger requests may be preempted, and @r itself may go, while it asks for its slot. */
static void pick_decodes(struct eng_engine *e)
{
	struct list_node *at = e->running.next;

	while (at != &e->running) {
		struct eng_request *r = list_entry(at, struct eng_request, node);
		u64 id = r->id;

		r->q_len = 0;
		if (r->state != ENG_DECODE) {
			at = at->next;
		} else if (eng_decode_slot(e, r)) {
			r->q_len = 1;
			at = at->next;
		} else {
			at = after_id(e, id);
		}
	}
}

static void pick_prefills(struct eng_engine *e)
{
	u32 budget = e->opt.chunk_tokens;
	struct eng_request *r;

	list_for_each_entry (r, &e->running, node) {
		if (r->state != ENG_PREFILL)
			continue;
		r->q_len = KV_MIN(r->nr_tokens - r->nr_in_pages, budget);
		budget -= r->q_len;
	}
}

/**
 * eng_sched_build() - admit, then choose the sequences of the next step
 *
 * Fills step.seqs, those with one token first. Return: how many; 0 = nothing can run now.
 */
u32 eng_sched_build(struct eng_engine *e)
{
	struct eng_step *s = &e->step;
	struct eng_request *r, *alone = NULL;
	u32 nr = 0;

	e->retry_ns = 0;
	drop_revoked(e);
	admit(e);
	pick_decodes(e);
	pick_prefills(e);
	if (e->opt.inject && eng_inject_alone(e, &alone) && alone->q_len == 0)
		alone = NULL;
	list_for_each_entry (r, &e->running, node) {
		if (r->q_len == 1 && (!alone || r == alone))
			s->seqs[nr++] = r;
	}
	s->nr_decode = nr;
	list_for_each_entry (r, &e->running, node) {
		if (r->q_len > 1 && (!alone || r == alone))
			s->seqs[nr++] = r;
	}
	kv_assert(nr <= e->opt.batch_max);
	return nr;
}

/** eng_sched_wait_ms() - how long the loop may sleep: until the next retry, -1 = for ever
 */
int eng_sched_wait_ms(struct eng_engine *e, int timeout_ms)
{
	struct eng_request *r = list_first(&e->waiting, struct eng_request, node);
	u64 now_ns = kv_now_ns(), at_ns = e->retry_ns;
	int ms;

	if (r && e->nr_running && eng_kvmd_away(e))
		r = NULL; /* admit() does not ask for it */
	if (r && e->nr_running < e->opt.batch_max && (at_ns == 0 || r->retry_ns < at_ns))
		at_ns = r->retry_ns ? r->retry_ns : now_ns;
	if (at_ns == 0)
		return timeout_ms;
	ms = at_ns <= now_ns ? 0 : (int)((at_ns - now_ns) / KV_NSEC_PER_MSEC) + 1;
	return timeout_ms < 0 ? ms : KV_MIN(ms, timeout_ms);
}
