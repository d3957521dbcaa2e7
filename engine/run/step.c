/* SPDX-License-Identifier: Apache-2.0 */
/*
 * step.c - one step by the safety protocol (design 5):
 *
 *	announce -> block -> rows -> [mirror update and check] -> zero, copy -> layers ->
 *digests
 *	-> launched -> verdicts read -> retire -> publish, seal
 *
 * All work on page bytes lies between announce and retire, behind the check. Nothing of a
 * request leaves the engine before its verdict was read.
 */
#include "engine/run/internal.h"

#include <errno.h>
#include <string.h>

#include "base/clock.h"

/* The library refuses rows out of range, and a page that two WRITE rows name (P4). */
static void declare_rows(struct eng_engine *e)
{
	struct eng_step *s = &e->step;

	for (u32 i = 0; i < s->nr_seqs; i++)
		s->row_codes[i] =
			kvc_step_rows(s->kvc, e->pool, s->rows + s->row_start[i],
				      s->row_start[i + 1] - s->row_start[i]);
}

static bool seq_passed(const struct eng_step *s, u32 i)
{
	return kv_verdict_ok(s->verdicts[i], s->number,
			     s->row_start[i + 1] - s->row_start[i]);
}

/* Does sequence @i write to a page that another sequence with a good verdict writes to?
 */
static bool shares_page(const struct eng_step *s, u32 i)
{
	for (u32 a = s->row_start[i]; a < s->row_start[i + 1]; a++) {
		for (u32 j = 0; j < s->nr_seqs; j++) {
			if (j == i || !seq_passed(s, j))
				continue;
			for (u32 b = s->row_start[j]; b < s->row_start[j + 1]; b++) {
				if (s->rows[a].pfn == s->rows[b].pfn &&
				    (s->rows[a].flags & s->rows[b].flags & KV_ROW_WRITE))
					return true;
			}
		}
	}
	return false;
}

/*
 * Of two writers of a page the check fails the stale one, and the other goes on: who is
 * refused must not depend on the order of the batch. Should both pass (one lease handed
 * out twice by the engine), the one that the library refused is not run: "not checked"
 * fails.
 */
static void refuse_rows(struct eng_step *s)
{
	for (u32 i = 0; i < s->nr_seqs; i++) {
		if (!s->row_codes[i])
			continue;
		if (!seq_passed(s, i) ||
		    (s->row_codes[i] == -EEXIST && !shares_page(s, i)))
			s->row_codes[i] = 0;
		else
			s->verdicts[i].step = 0;
	}
}

/* check=off: no kernel, no mirror; every request is taken for good. */
static void check_off(struct eng_step *s)
{
	for (u32 i = 0; i < s->nr; i++) {
		s->verdicts[i] = (struct kv_verdict){
			.step = s->number,
			.rows_checked = s->row_start[i + 1] - s->row_start[i],
		};
	}
}

static int check_batch(struct eng_engine *e)
{
	struct eng_step *s = &e->step;
	struct kvk_tag_check_args a = {
		.block = s->block,
		.mirror = e->mirror,
		.batch =
			{
				.rows = s->rows,
				.row_start = s->row_start,
				.lengths = s->lengths,
				.q_start = s->zero_q,
				.verdicts = s->verdicts,
				.step = &s->number,
				.nr_requests = s->nr,
			},
		.nonces = s->nonces,
		.page_tokens = KV_PAGE_TOKENS,
		.ret_verdicts = s->verdicts,
	};

	if (e->opt.inject)
		a.block = eng_inject_block(e);
	memset(s->verdicts, 0, s->nr * sizeof(*s->verdicts));
	return e->ops->tag_check(&a, NULL);
}

static int check(struct eng_engine *e)
{
	struct eng_step *s = &e->step;
	int rc = 0;

	if (e->session.check_mode == KV_CHECK_OFF || KV_MUTANT(no_check))
		check_off(s);
	else
		rc = check_batch(e);
	if (!rc)
		refuse_rows(s);
	if (!rc && e->opt.inject)
		eng_inject_verdicts(e);
	return rc;
}

static int move_pages(struct eng_engine *e, u32 op)
{
	struct eng_step *s = &e->step;
	struct kvk_move_args a = {.op = op, .src = e->pages, .dst = e->pages};

	switch (op) {
	case KVK_MOVE_ZERO:
		a.dst_batch = eng_batch_view(s, ENG_GROUP_ZERO);
		break;
	case KVK_MOVE_COPY:
		a.src_batch = eng_batch_view(s, ENG_GROUP_COPY_SRC);
		a.dst_batch = eng_batch_view(s, ENG_GROUP_COPY_DST);
		a.nr_tokens = s->copy_tokens;
		break;
	default:
		a.src_batch = eng_batch_view(s, ENG_GROUP_CRC);
		a.ret_crc = s->crc;
		break;
	}
	if (a.src_batch.nr_requests + a.dst_batch.nr_requests == 0)
		return 0;
	return e->ops->page_move(&a, NULL);
}

static int step_work(struct eng_engine *e)
{
	int rc = check(e);

	if (!rc)
		rc = move_pages(e, KVK_MOVE_ZERO);
	if (!rc)
		rc = move_pages(e, KVK_MOVE_COPY);
	if (!rc)
		rc = eng_forward(e);
	if (!rc)
		rc = move_pages(e, KVK_MOVE_CRC);
	return rc;
}

/* A mirror that is behind gets the same words again with the next block: do not move on.
 */
static bool mirror_is_behind(const struct eng_step *s)
{
	for (u32 i = 0; i < s->nr; i++) {
		if (s->verdicts[i].step == s->number &&
		    (s->verdicts[i].bits & KV_BAD_MIRROR))
			return true;
	}
	return false;
}

static int step_begin(struct eng_engine *e)
{
	struct eng_step *s = &e->step;
	int rc = kvc_step_begin(e->kvc, &s->kvc);

	if (rc == -ESHUTDOWN) { /* kvmd ended the session; the next call gets another */
		eng_session_lost(e);
		return -ETIMEDOUT;
	}
	if (rc)
		return rc;
	s->number = kvc_step_number(s->kvc);
	if (!eng_session_look(e) && !KV_MUTANT(old_leases_on_a_new_table))
		rc = -ETIMEDOUT;
	else if (e->session.check_mode != KV_CHECK_OFF)
		rc = kvc_step_block(s->kvc, e->pool, s->stream, s->block, s->block_bytes);
	if (!rc)
		return 0;
	kvc_step_retire(s->kvc);
	s->kvc = NULL;
	return rc;
}

/* P3, P6: between these two, and only there, page bytes are touched. */
static void step_end(struct eng_engine *e)
{
	struct eng_step *s = &e->step;

	if (!mirror_is_behind(s) || KV_MUTANT(mirror_behind_moves_on))
		kvc_step_launched(s->kvc);
	if (KV_MUTANT(publish_before_verdict)) {
		for (u32 i = 0; i < s->nr_seqs; i++)
			s->seq_ok[i] = true;
		eng_step_publish(e);
	}
	eng_verdicts_read(e);
	if (KV_MUTANT(seal_before_retire))
		eng_step_seal(e);
	kvc_step_retire(s->kvc);
	s->kvc = NULL;
}

/**
 * eng_step_run() - run step.seqs through one step
 *
 * Return: 0; KV_BUSY, -ETIMEDOUT: kvmd is away, nothing was done; another -errno: the
 *engine cannot go on.
 */
int eng_step_run(struct eng_engine *e)
{
	struct eng_step *s = &e->step;
	u64 start_ns = kv_now_ns();
	int rc;

	rc = step_begin(e);
	if (rc)
		return rc;
	eng_batch_build(e, s->seqs, s->nr_seqs);
	if (e->opt.inject)
		eng_inject_rows(e);
	declare_rows(e);
	rc = step_work(e);
	if (rc) {
		kvc_step_retire(s->kvc);
		s->kvc = NULL;
		return rc > 0 ? -EPROTO : rc;
	}
	step_end(e);
	if (!KV_MUTANT(publish_before_verdict))
		eng_step_publish(e);
	eng_stat_add(e->stats.steps, 1);
	eng_stat_add(e->stats.step_ns, kv_now_ns() - start_ns);
	return 0;
}
