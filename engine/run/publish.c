/* SPDX-License-Identifier: Apache-2.0 */
/*
 * publish.c - the end of a step: verdicts are read, then results leave the engine (P5).
 *
 * A request whose verdict is not good ends in KV_STALE: an incident with the first bad
 * row goes to kvmd, its pages go the normal way, its token is thrown away. A row that
 * kvmd revoked meanwhile is no incident: the request is computed again on other pages.
 */
#include "engine/run/internal.h"

#include <errno.h>
#include <stdlib.h>
#include <time.h>

#include "base/clock.h"

/* strict: the rows are walked once more on the host, on the library's own mirror. */
static void check_strict(struct eng_engine *e)
{
	struct eng_step *s = &e->step;
	struct kv_verdict v;

	for (u32 i = 0; i < s->nr_seqs; i++) {
		struct kvc_check_request q = {
			.rows = s->rows + s->row_start[i],
			.nonce = s->nonces[i],
			.nr_rows = s->row_start[i + 1] - s->row_start[i],
			.length = s->lengths[i],
		};

		if (kvc_step_check(s->kvc, e->pool, &q, 1, &v) != 0 ||
		    !kv_verdict_ok(v, s->number, q.nr_rows)) {
			s->verdicts[i].bits |= v.bits | KV_BAD_NOCHECK;
			s->seq_ok[i] = false;
		}
	}
}

/**
 * eng_verdicts_read() - which sequences of the step are good?
 *
 * A sequence passes if its own verdict and those of its pseudo requests are good.
 * Context: all work of the step is complete; before retire.
 */
void eng_verdicts_read(struct eng_engine *e)
{
	struct eng_step *s = &e->step;

	for (u32 i = 0; i < s->nr_seqs; i++)
		s->seq_ok[i] = true;
	for (u32 i = 0; i < s->nr; i++) {
		u32 nr_rows = s->row_start[i + 1] - s->row_start[i];

		if (s->owner[i] == ENG_NO_OWNER)
			continue;
		if (kv_verdict_ok(s->verdicts[i], s->number, nr_rows) ||
		    KV_MUTANT(verdict_ignored_by_engine))
			continue;
		s->seq_ok[s->owner[i]] = false;
	}
	if (e->session.check_mode == KV_CHECK_STRICT)
		check_strict(e);
}

/* The first row that fails, for the report; the verdict itself came from the check. */
static void find_bad_row(struct eng_engine *e, u32 index, struct kv_incident *inc)
{
	struct eng_step *s = &e->step;
	u32 nr_pages = e->mirror_pages;
	u64 *tags = calloc(nr_pages, sizeof(*tags));
	u32 first = s->row_start[index], end = s->row_start[index + 1];

	if (!tags || eng_mirror_tags(e, tags))
		goto free_tags; /* the report goes without the row */
	for (u32 i = first; i < end; i++) {
		struct kv_row row = s->rows[i];
		u64 tag = row.pfn < nr_pages ? tags[row.pfn] : 0;
		u32 bits = kv_row_check(row, i - first, s->nonces[index], tag, nr_pages);

		if (!bits && i + 1 < end)
			continue;
		inc->pfn = row.pfn;
		inc->row = i - first;
		inc->expected = row.expected;
		inc->found = tag;
		if (bits)
			break;
	}
free_tags:
	free(tags);
}

/*
 * The news of a REVOKE may not have been read yet. It was sent before the page's tag died, so it
 * is there; but another thread may be reading it.
 */
static void read_news(struct eng_engine *e)
{
	u64 end_ns = kv_now_ns() + e->opt.timeout_ms * KV_NSEC_PER_MSEC;
	struct timespec ts = {0, 50000};

	while (kvc_dispatch(e->kvc, eng_dispatch_event, e) == -EAGAIN &&
	       !KV_MUTANT(news_not_read) && kv_now_ns() < end_ns)
		nanosleep(&ts, NULL);
}

static void request_stale(struct eng_engine *e, struct eng_request *r, u32 index)
{
	struct eng_step *s = &e->step;
	struct kv_verdict v = s->verdicts[index];
	struct kv_incident inc = {
		.request_id = r->id,
		.step = s->number,
		.bits = v.step == s->number ? v.bits : KV_BAD_NOCHECK,
	};

	if (s->row_codes[index]) {
		eng_request_done(r, ENG_FINISH_ERROR, s->row_codes[index]);
		return;
	}
	read_news(e);
	if (r->revoked)
		return;
	if (!inc.bits)
		inc.bits = KV_BAD_NOCHECK; /* rows missing, or a pseudo request failed */
	find_bad_row(e, index, &inc);
	if (!KV_MUTANT(incident_not_reported))
		kvc_report(e->pool, &inc);
	r->bad_bits = inc.bits;
	r->bad_row = inc.row;
	r->bad_pfn = inc.pfn;
	eng_stat_add(e->stats.stale_aborts, 1);
	eng_request_done(r, ENG_FINISH_STALE, KV_STALE);
}

/* The step's K/V counts from now on. */
static void request_advance(struct eng_engine *e, struct eng_request *r)
{
	struct eng_table *t = &r->table;
	u32 first = r->nr_in_pages / KV_PAGE_TOKENS;
	u32 end = (u32)kv_div_round_up(r->nr_in_pages + r->q_len, KV_PAGE_TOKENS);
	u32 prompt_left =
		r->nr_in_pages < r->nr_prompt ? r->nr_prompt - r->nr_in_pages : 0;

	for (u32 i = first; i < end; i++)
		t->leases[i].flags &= ~(ENG_LEASE_ZERO | ENG_LEASE_COPY);
	if (t->has_fork_source) {
		eng_free_grant(e, &t->fork_source);
		t->has_fork_source = false;
	}
	r->nr_prefilled += KV_MIN(prompt_left, r->q_len);
	eng_stat_add(e->stats.prompt_tokens, KV_MIN(prompt_left, r->q_len));
	r->nr_in_pages += r->q_len;
	r->q_len = 0;
}

/**
 * eng_step_seal() - seal what became full
 *
 * Context: after retire: a page is immutable only when no step can write it any more
 * (P6).
 */
void eng_step_seal(struct eng_engine *e)
{
	struct eng_step *s = &e->step;

	for (u32 i = 0; i < s->nr_seqs; i++) {
		if (s->seq_ok[i] || KV_MUTANT(failed_request_seals))
			eng_table_seal(e, s->seqs[i], s->crc + s->crc_first[i],
				       s->crc_nr[i]);
		s->crc_nr[i] = 0;
	}
}

static s32 sample_of(const struct eng_step *s, u32 index)
{
	for (u32 i = 0; i < s->nr_samples; i++) {
		if (s->sample_seq[i] == index)
			return (s32)i;
	}
	return -1;
}

/**
 * eng_step_publish() - hand out the step's results
 *
 * Context: between steps; eng_verdicts_read() has run. Callbacks may end their own
 * request.
 */
void eng_step_publish(struct eng_engine *e)
{
	struct eng_step *s = &e->step;

	for (u32 i = 0; i < s->nr_seqs; i++) {
		if (s->seq_ok[i])
			request_advance(e, s->seqs[i]);
	}
	eng_step_seal(e);
	for (u32 i = 0; i < s->nr_seqs; i++) {
		struct eng_request *r = s->seqs[i];
		s32 k = sample_of(s, i);

		if (!s->seq_ok[i]) {
			request_stale(e, r, i);
		} else if (k >= 0) {
			r->state = ENG_DECODE;
			eng_request_publish(r, s->sample_ids[k], s->sample_logprob[k]);
		} else if (r->nr_in_pages == r->nr_tokens) {
			eng_request_done(r, ENG_FINISH_LENGTH,
					 0); /* scored: nothing to sample */
		}
	}
}
