/* SPDX-License-Identifier: Apache-2.0 */
/*
 * decode.c - each decoding request needs a slot for its next token: sometimes a new page.
 * Tour 1/12: from here the page request goes to libkvclient/alloc.c.
 *
 * When none is to be had the youngest running request gives its pages back and is
 * computed again later. The oldest one is never a victim of another, so it always makes
 * progress. Alone and still without a page (other engines hold the rest), a request steps
 * back after a moment and asks for its whole length next time (prefill.c). While kvmd is away
 * who needs a page keeps what it has and waits; those with room go on.
 */
#include "engine/run/internal.h"

#include <errno.h>

#include "base/clock.h"

#define STARVE_NS	 (20 * KV_NSEC_PER_MSEC)
#define RETRY_PENDING_NS (KV_NSEC_PER_MSEC / 2)
#define RETRY_AWAY_NS	 (10 * KV_NSEC_PER_MSEC)

static struct eng_request *youngest(struct eng_engine *e)
{
	if (KV_MUTANT(preempt_oldest))
		return list_entry(e->running.next, struct eng_request, node);
	return list_entry(e->running.prev, struct eng_request, node);
}

static void retry_at(struct eng_engine *e, u64 ns)
{
	if (e->retry_ns == 0 || ns < e->retry_ns)
		e->retry_ns = ns;
}

/* Nobody younger to take pages from. */
static void starved(struct eng_engine *e, struct eng_request *r)
{
	u64 now_ns = kv_now_ns();

	if (r->starved_since_ns == 0)
		r->starved_since_ns = now_ns;
	if (e->nr_running > 1) {
		eng_sched_preempt(r);
		return;
	}
	if (now_ns - r->starved_since_ns < STARVE_NS) {
		retry_at(e, now_ns + RETRY_PENDING_NS);
		return;
	}
	r->reserve = true;
	eng_sched_preempt(r);
}

/* What is coming may wait for a step that never retires: no longer than for admission. */
static bool pending_too_long(struct eng_engine *e, struct eng_request *r)
{
	u64 now_ns = kv_now_ns();

	if (r->starved_since_ns == 0)
		r->starved_since_ns = now_ns;
	return now_ns - r->starved_since_ns > (u64)e->opt.admit_ms * KV_NSEC_PER_MSEC &&
	       !KV_MUTANT(pending_for_ever);
}

/* The page may come from the magazine, from kvmd, or from a younger request. */
static int get_page(struct eng_engine *e, struct eng_request *r, u32 nr_pages)
{
	int rc;

	/* The magazine is empty: who asks again waits for the same timeout. */
	if (e->no_stock && eng_kvmd_away(e))
		return -ETIMEDOUT;
	rc = eng_table_grow(e, &r->table, nr_pages, KV_GFP_NOWAIT);
	if (rc == KV_FULL)
		rc = eng_table_grow(e, &r->table, nr_pages, KV_GFP_PREFILL);
	while ((rc == KV_FULL || rc == KV_QUOTA) && youngest(e) != r) {
		eng_sched_preempt(youngest(e));
		kvc_flush(e->kvc);
		rc = eng_table_grow(e, &r->table, nr_pages, KV_GFP_NOWAIT);
	}
	e->no_stock = rc == -ETIMEDOUT;
	return eng_kvmd_note(e, rc);
}

/**
 * eng_decode_slot() - room for the K/V of the request's newest token
 * @r: a running request; younger ones may be preempted for it
 *
 * Return: true: it can take part in the step; false: not now (it may be WAITING or DONE,
 *	and then is the list's last).
 */
bool eng_decode_slot(struct eng_engine *e, struct eng_request *r)
{
	u32 nr_pages = (u32)kv_div_round_up(r->nr_tokens, KV_PAGE_TOKENS);
	int rc;

	if (nr_pages <= r->table.nr)
		return true;
	rc = get_page(e, r, nr_pages);
	switch (rc) {
	case 0:
		r->starved_since_ns = 0;
		return true;
	case KV_PENDING: /* coming: waiting is cheaper than computing again */
	case -ETIMEDOUT:
		if (pending_too_long(e, r))
			starved(e, r);
		else
			retry_at(e, kv_now_ns() +
					    (rc < 0 ? RETRY_AWAY_NS : RETRY_PENDING_NS));
		return false;
	case KV_FULL:
	case KV_QUOTA:
		starved(e, r);
		return false;
	default:
		eng_request_done(r, ENG_FINISH_ERROR, rc);
		return false;
	}
}
