/* SPDX-License-Identifier: Apache-2.0 */
/*
 * prefill.c - admission: a waiting request gets a sealed prefix and pages for the rest.
 *
 * Pages for all tokens that have to be computed are leased at once, all or nothing, so
 * that a half admitted request never holds pages another could use. A request that was
 * starved while it ran alone asks for its whole length instead (reserve): once admitted
 * it cannot be starved again, which is what ends a stand-off between engines that share a
 * small pool (O23).
 */
#include "engine/run/internal.h"

#include <errno.h>

#include "base/clock.h"

#define RETRY_PENDING_NS (KV_NSEC_PER_MSEC / 2)
#define RETRY_FULL_NS	 (4 * KV_NSEC_PER_MSEC)

/* Can the tenant's hard limit ever hold the request? */
static bool quota_too_small(struct eng_engine *e, u32 nr_pages)
{
	struct kv_stat st;

	if (kvc_stat(e->pool, &st) != 0 || st.tenant_max_bytes == 0)
		return false;
	return (u64)nr_pages * e->pool_info.geometry.stride_bytes > st.tenant_max_bytes;
}

/* Refused: wait for a while, or for good. */
static void admit_refused(struct eng_engine *e, struct eng_request *r, u32 nr_pages,
			  int rc)
{
	u64 now_ns = kv_now_ns();
	/* In the queue behind others, who do get pages, nobody is without prospect of them. */
	u64 waited_ns = now_ns - KV_MAX(r->waiting_since_ns, e->moved_ns);
	bool outcome = rc == KV_FULL || rc == KV_QUOTA || rc == KV_PENDING;

	if (!outcome && rc != -ETIMEDOUT) {
		eng_request_done(r, ENG_FINISH_ERROR, rc);
		return;
	}
	if ((rc == KV_QUOTA && quota_too_small(e, nr_pages)) ||
	    waited_ns > (u64)e->opt.admit_ms * KV_NSEC_PER_MSEC) {
		eng_request_done(r, outcome ? ENG_FINISH_NO_PAGES : ENG_FINISH_ERROR, rc);
		return;
	}
	/* jitter: two engines that wait for the same pages must not wait in step */
	r->retry_ns =
		now_ns + (rc == KV_PENDING ? RETRY_PENDING_NS
					   : RETRY_FULL_NS + eng_rand(e) % RETRY_FULL_NS);
}

static void run_request(struct eng_engine *e, struct eng_request *r)
{
	struct list_node *at = &e->running;
	struct eng_request *other;

	list_del(&r->node);
	e->nr_waiting--;
	list_for_each_entry (other, &e->running, node) {
		if (other->id > r->id) {
			at = &other->node;
			break;
		}
	}
	list_add_tail(at, &r->node);
	e->nr_running++;
	e->moved_ns = kv_now_ns();
	r->state = ENG_PREFILL;
	eng_stat_set(e->stats.waiting, e->nr_waiting);
	eng_stat_set(e->stats.running, e->nr_running);
}

/**
 * eng_prefill_admit() - WAITING -> PREFILL, if pages can be had
 *
 * Return: true if it was admitted; false: it waits on, or is DONE (and may be gone).
 */
bool eng_prefill_admit(struct eng_engine *e, struct eng_request *r)
{
	u32 nr_want = r->reserve ? r->nr_prompt + r->max_tokens : r->nr_tokens;
	u32 nr_pages = (u32)kv_div_round_up(nr_want, KV_PAGE_TOKENS);
	u32 gfp = e->nr_running ? KV_GFP_NOWAIT : KV_GFP_PREFILL;
	u32 nr_cached = 0;
	int rc = 0;

	eng_table_reset(e, &r->table);
	if (!e->opt.no_prefix && !r->p.no_prefix && !r->targets)
		rc = eng_table_lookup(e, &r->table, r->tokens, r->nr_tokens, &nr_cached);
	if (!rc)
		rc = eng_table_grow(e, &r->table, nr_pages, gfp);
	eng_kvmd_note(e, rc);
	if (rc) {
		eng_table_release(e, &r->table);
		admit_refused(e, r, nr_pages, rc);
		return false;
	}
	nr_cached = KV_MAX(nr_cached, r->p.nr_given);
	kv_assert(nr_cached < r->nr_tokens);
	r->nr_in_pages = nr_cached;
	if (!r->admitted_once)
		r->nr_cached = KV_MIN(nr_cached, r->nr_prompt);
	r->admitted_once = true;
	eng_stat_add(e->stats.cached_tokens, nr_cached);
	run_request(e, r);
	return true;
}
