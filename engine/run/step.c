/* SPDX-License-Identifier: Apache-2.0 */
/*
 * step.c - one step by the safety protocol (design 5):
 *
 *	announce -> block -> rows -> [mirror update and check] -> zero, copy -> layers ->
 *	digests -> launched -> verdicts read -> retire -> publish, seal
 *
 * On a device a step of decodes is one graph, captured for a number of requests that the
 * step is filled up to (batch.c).
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

static int move_pages(struct eng_engine *e, u32 op)
{
	struct eng_step *s = &e->step;
	struct kvk_move_args a = {.op = op, .src = e->pages, .dst = e->pages};
	int rc;

	switch (op) {
	case KVK_MOVE_ZERO:
		a.dst_batch = eng_batch_view(e, ENG_GROUP_ZERO);
		break;
	case KVK_MOVE_COPY:
		a.src_batch = eng_batch_view(e, ENG_GROUP_COPY_SRC);
		a.dst_batch = eng_batch_view(e, ENG_GROUP_COPY_DST);
		a.nr_tokens = eng_dev(e, s->copy_tokens);
		break;
	default:
		a.src_batch = eng_batch_view(e, ENG_GROUP_CRC);
		a.ret_crc = eng_dev(e, s->crc);
		break;
	}
	if (a.src_batch.nr_requests + a.dst_batch.nr_requests == 0)
		return 0;
	rc = eng_check_join(e);
	return rc ? rc : e->ops->page_move(&a, e->mem->stream);
}

/* Everything up to the samples, one launch after the other. */
static int run_eager(struct eng_engine *e)
{
	int rc = eng_check_launch(e, false);

	if (!rc && eng_check_needs_judge(e))
		rc = eng_check_judge(e);
	if (!rc)
		rc = move_pages(e, KVK_MOVE_ZERO);
	if (!rc)
		rc = move_pages(e, KVK_MOVE_COPY);
	return rc ? rc : eng_forward(e);
}

/* May the step run as a graph? Index of the graph, or -1. */
static s32 graph_index(const struct eng_engine *e)
{
	const struct eng_step *s = &e->step;
	s32 i = 0;

	if (!s->bucket || eng_check_needs_judge(e) || s->view[ENG_GROUP_ZERO].nr ||
	    s->view[ENG_GROUP_COPY_SRC].nr)
		return -1;
	while (1u << i < s->bucket)
		i++;
	return i;
}

/**
 * eng_step_queue() - a step of decodes from host memory back to host memory, as its graph holds it
 * @check: with its check, if that is on; without, verdicts are taken as the host wrote them
 *
 * Return: 0; -errno of a kernel.
 */
int eng_step_queue(struct eng_engine *e, bool check)
{
	bool on = check && eng_check_is_on(e);
	int rc = eng_step_fetch(e, !on);

	if (!rc && on)
		rc = eng_check_launch(e, true);
	if (!rc)
		rc = eng_forward(e);
	return rc ? rc : eng_step_give(e);
}

static int graph_capture(struct eng_engine *e, void **ret_graph)
{
	struct eng_mem *m = e->mem;
	int rc = m->ops->graph_begin(m), end;

	if (rc)
		return rc;
	rc = eng_step_queue(e, true);
	end = m->ops->graph_end(m, ret_graph);
	return rc ? rc : end;
}

static int run_graph(struct eng_engine *e, u32 index)
{
	int rc = 0;

	if (!e->graphs[index])
		rc = graph_capture(e, &e->graphs[index]);
	return rc ? rc : e->mem->ops->graph_launch(e->mem, e->graphs[index]);
}

/** eng_graphs_drop() - steps are captured anew. Context: no step runs */
void eng_graphs_drop(struct eng_engine *e)
{
	for (u32 i = 0; i < ENG_BUCKETS; i++) {
		if (e->graphs[i])
			e->mem->ops->graph_free(e->mem, e->graphs[i]);
		e->graphs[i] = NULL;
	}
}

static int step_work(struct eng_engine *e)
{
	s32 graph = graph_index(e);
	int rc;

	eng_check_prepare(e);
	/* The first step of a size runs without: kernels are loaded when they first run, which a
	 * capture must not see. */
	if (graph >= 0 && !e->warm[graph]) {
		e->warm[graph] = true;
		graph = -1;
	}
	rc = graph < 0 ? eng_step_upload(e) : 0;
	if (!rc)
		rc = graph < 0 ? run_eager(e) : run_graph(e, (u32)graph);
	if (!rc)
		rc = move_pages(e, KVK_MOVE_CRC);
	if (!rc && e->probe)
		rc = e->probe(e, e->probe_arg);
	/* a graph has brought everything but digests itself */
	if (!rc && graph >= 0 && !e->step.view[ENG_GROUP_CRC].nr)
		rc = e->mem->ops->sync(e->mem);
	else if (!rc)
		rc = eng_step_download(e);
	return rc ? rc : eng_forward_results(e);
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

/*
 * Another thread's call (an HTTP client's prefetch) may be connecting again at this moment: the
 * step then begins in a session whose pools are not open yet. It waits for them here. Return:
 * -ETIMEDOUT; -ESHUTDOWN the pool did not come back.
 */
static int pool_is_coming(struct eng_engine *e)
{
	struct kv_stat st;

	if (KV_MUTANT(pool_on_its_way_is_lost))
		return -ESHUTDOWN;
	return kvc_stat(e->pool, &st) == -ESHUTDOWN ? -ESHUTDOWN : -ETIMEDOUT;
}

static int step_begin(struct eng_engine *e)
{
	struct eng_step *s = &e->step;
	u64 epoch = e->session.table_epoch;
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
	/* the mirror is a new table's, and the step may have been announced to the old one */
	else if (epoch != e->session.table_epoch && !KV_MUTANT(step_of_the_old_table) &&
		 !KV_MUTANT(old_leases_on_a_new_table))
		rc = -ETIMEDOUT;
	else if (e->session.check_mode != KV_CHECK_OFF)
		rc = kvc_step_block(s->kvc, e->pool, s->stream, s->block, s->block_bytes);
	if (!rc)
		return 0;
	kvc_step_retire(s->kvc);
	s->kvc = NULL;
	return rc == -ESHUTDOWN ? pool_is_coming(e) : rc;
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
 *	engine cannot go on.
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
	s->forked = false;
	rc = step_work(e);
	if (rc && e->mem->separate && !KV_MUTANT(retire_after_device_error)) {
		/* no completion: the slot stays as it is, the process must end (P8) */
		e->lost = true;
		return rc > 0 ? -EPROTO : rc;
	}
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
