/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check.c - a step's check (P3, P4), and its data on their way to the device and back.
 *
 * On a device the check runs on a branch beside work that touches no page, and is joined
 * before the first that does. Kernels read the verdicts there; the engine's own look at
 * them waits for the end of the step. Where the engine itself has something to say about
 * verdicts before pages are touched (two WRITE rows for a page, faults on purpose) it
 * waits for them.
 */
#include "engine/run/internal.h"

#include <errno.h>
#include <string.h>

/** eng_check_is_on() - is there a mirror, and a check in each step? */
bool eng_check_is_on(const struct eng_engine *e)
{
	return (e->session.check_mode != KV_CHECK_OFF || KV_MUTANT(off_checks)) &&
	       !KV_MUTANT(no_check);
}

/* check=off: no kernel, no mirror; every request is taken for good. */
static void check_off(struct eng_step *s)
{
	for (u32 i = 0; i < s->nr; i++) {
		if (s->owner[i] == ENG_NO_OWNER)
			continue;
		s->verdicts[i] = (struct kv_verdict){
			.step = s->number,
			.rows_checked = s->row_start[i + 1] - s->row_start[i],
		};
	}
}

/** eng_check_prepare() - verdicts as they are before the check: none, or with check off
 * all good */
void eng_check_prepare(struct eng_engine *e)
{
	struct eng_step *s = &e->step;

	memset(s->verdicts, 0, s->nr * sizeof(*s->verdicts));
	if (!eng_check_is_on(e))
		check_off(s);
	else if (e->opt.inject)
		eng_inject_block(e);
}

/*
 * Block and rows from host memory, by a kernel in front of the check on its branch: read by every
 * CTA of the check, a pinned block costs 10 us and more.
 */
static struct eng_piece rows_piece(struct eng_engine *e)
{
	struct eng_step *s = &e->step;

	return (struct eng_piece){
		.dst = eng_dev(e, s->rows),
		.src = s->rows,
		.count = &s->row_start[s->nr],
		.bytes = s->cap_rows * sizeof(*s->rows),
		.unit = sizeof(*s->rows),
	};
}

static int fetch_block(struct eng_engine *e)
{
	struct eng_step *s = &e->step;
	const struct kv_step_block *b = s->block;
	struct eng_fetch_args a = {
		.piece = {rows_piece(e),
			  {.dst = eng_dev(e, s->block),
			   .src = s->block,
			   .count = &b->nr_entries,
			   .bytes = s->block_bytes,
			   .head = sizeof(*b),
			   .unit = sizeof(struct kv_log_entry)}}, /* tags are smaller */
		.nr = 2,
		.side = true,
	};

	return e->mem->ops->fetch(e->mem, &a);
}

/**
 * eng_check_launch() - mirror update and check
 * @fetch: block and rows are still in host memory alone
 *
 * Return: 0; -errno of the kernel.
 */
int eng_check_launch(struct eng_engine *e, bool fetch)
{
	struct eng_step *s = &e->step;
	struct kvk_tag_check_args a = {
		.block = eng_dev(e, s->block),
		.mirror = e->mirror,
		.batch =
			{
				.rows = eng_dev(e, s->rows),
				.row_start = eng_dev(e, s->row_start),
				.lengths = eng_dev(e, s->lengths),
				.q_start = eng_dev(e, s->zero_q),
				.verdicts = eng_dev(e, s->verdicts),
				.step = eng_dev(e, s->number_arg),
				.nr_requests = s->nr,
			},
		.nonces = eng_dev(e, s->nonces),
		.page_tokens = KV_PAGE_TOKENS,
		.ret_verdicts = eng_dev(e, s->verdicts),
	};
	int rc;

	if (!eng_check_is_on(e))
		return 0;
	rc = e->mem->ops->fork(e->mem);
	if (rc)
		return rc;
	s->forked = true;
	rc = fetch ? fetch_block(e) : 0;
	return rc ? rc : e->ops->tag_check(&a, e->mem->side);
}

/** eng_check_join() - what is queued from here on runs behind the check; a second call
 * does nothing. Return: 0; -EIO */
int eng_check_join(struct eng_engine *e)
{
	if (!e->step.forked)
		return 0;
	e->step.forked = false;
	return e->mem->ops->join(e->mem);
}

/**
 * eng_side_begin() - what is queued from here to eng_side_end() runs beside what follows there
 *
 * Joined by eng_check_join(). A decode step's kernels are too small to fill a GPU. Elsewhere, and
 * in steps of prompts, work stays in its place.
 *
 * Return: 0; -EIO.
 */
int eng_side_begin(struct eng_engine *e)
{
	int rc;

	if (!e->step.bucket)
		return 0;
	rc = e->mem->ops->fork(e->mem);
	if (rc)
		return rc;
	e->step.forked = true;
	e->main = e->mem->stream;
	e->mem->stream = e->mem->side;
	return 0;
}

void eng_side_end(struct eng_engine *e)
{
	if (e->step.bucket && e->main)
		e->mem->stream = e->main;
	e->main = NULL;
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

/** eng_check_needs_judge() - must verdicts be looked at before pages are touched? */
bool eng_check_needs_judge(const struct eng_engine *e)
{
	const struct eng_step *s = &e->step;

	if (!e->mem->separate || e->opt.inject)
		return true;
	for (u32 i = 0; i < s->nr_seqs; i++) {
		if (s->row_codes[i])
			return true;
	}
	return false;
}

/**
 * eng_check_judge() - the engine's own changes to verdicts, before pages are touched
 *
 * Context: the check is launched; waits for it.
 * Return: 0; -EIO.
 */
int eng_check_judge(struct eng_engine *e)
{
	struct eng_step *s = &e->step;
	size_t bytes = s->nr * sizeof(*s->verdicts);
	struct eng_mem *m = e->mem;
	int rc = 0;

	if (m->separate) {
		rc = eng_check_join(e);
		if (!rc)
			rc = m->ops->download(m, s->verdicts, eng_dev(e, s->verdicts),
					      bytes);
		if (!rc)
			rc = m->ops->sync(m);
	}
	if (rc)
		return rc;
	refuse_rows(s);
	if (e->opt.inject)
		eng_inject_verdicts(e);
	if (m->separate)
		rc = m->ops->upload(m, eng_dev(e, s->verdicts), s->verdicts, bytes);
	return rc;
}

static size_t block_used(const struct kv_step_block *b)
{
	size_t entry =
		b->kind == KV_BLOCK_FULL ? sizeof(u64) : sizeof(struct kv_log_entry);

	return sizeof(*b) + b->nr_entries * entry;
}

/** eng_step_upload() - the step's arrays, as far as they are used. Return: 0; -EIO */
int eng_step_upload(struct eng_engine *e)
{
	struct eng_step *s = &e->step;
	struct eng_mem *m = e->mem;
	int rc;

	if (!m->separate)
		return 0;
	rc = m->ops->upload(m, eng_dev(e, s->shared), s->shared, s->in_bytes);
	if (!rc)
		rc = m->ops->upload(m, eng_dev(e, s->rows), s->rows,
				    s->nr_rows * sizeof(*s->rows));
	if (!rc && eng_check_is_on(e))
		rc = m->ops->upload(m, eng_dev(e, s->block), s->block,
				    KV_MIN(block_used(s->block), s->block_bytes));
	return rc;
}

/**
 * eng_step_fetch() - what eng_step_upload() does but for the block, as a kernel of a graph
 * @rows: the rows as well; else eng_check_launch() brings them
 *
 * Return: 0; -EIO.
 */
int eng_step_fetch(struct eng_engine *e, bool rows)
{
	struct eng_step *s = &e->step;
	struct eng_fetch_args a = {
		.piece = {{.dst = eng_dev(e, s->shared),
			   .src = s->shared,
			   .bytes = s->in_bytes},
			  rows_piece(e)},
		.nr = rows ? 2 : 1,
	};

	return e->mem->ops->fetch(e->mem, &a);
}

/** eng_step_give() - verdicts and results to the host, as a kernel of a graph. Return: 0; -EIO */
int eng_step_give(struct eng_engine *e)
{
	struct eng_step *s = &e->step;
	struct eng_fetch_args a = {
		.piece = {{.dst = s->shared + s->out_first,
			   .src = eng_dev(e, s->shared + s->out_first),
			   .bytes = s->out_end - s->out_first}},
		.nr = 1,
	};

	return e->mem->ops->fetch(e->mem, &a);
}

/** eng_step_download() - verdicts and results; waits for all of the step. Return: 0; -EIO:
 * it may still run */
int eng_step_download(struct eng_engine *e)
{
	struct eng_step *s = &e->step;
	struct eng_mem *m = e->mem;
	int rc;

	if (!m->separate)
		return 0;
	rc = m->ops->download(m, s->shared + s->out_first,
			      eng_dev(e, s->shared + s->out_first),
			      s->out_end - s->out_first);
	return rc ? rc : m->ops->sync(m);
}
