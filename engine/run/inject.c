/* SPDX-License-Identifier: Apache-2.0 */
/*
 * inject.c - faults on purpose (see inject.h). Tests only: nothing here runs unless the
 * engine was created with options.inject.
 *
 * Damage to a request's table or leases is done by eng_inject_arm(), between two steps.
 * Damage to what one step hands to the check is armed there and done by the hooks that
 * step.c calls.
 */
#include "engine/run/internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"

#define TAKE_WAIT_NS (2 * KV_NSEC_PER_SEC)
#define EXTRAS_MAX   4096u

static const char *const names[ENG_INJECT_NR] = {
	[ENG_INJECT_NONE] = "none",
	[ENG_INJECT_SWAP_ROWS] = "swap-rows",
	[ENG_INJECT_REUSE] = "reuse",
	[ENG_INJECT_LATE_WRITER] = "late-writer",
	[ENG_INJECT_OLD_GEN] = "old-generation",
	[ENG_INJECT_BAD_PFN] = "pfn-range",
	[ENG_INJECT_WRITE_SEALED] = "write-sealed",
	[ENG_INJECT_TRUNCATED] = "truncated-table",
	[ENG_INJECT_NO_CHECK] = "no-check",
	[ENG_INJECT_MIRROR_BEHIND] = "mirror-behind",
	[ENG_INJECT_FOREIGN] = "foreign-page",
};

int eng_inject_parse(const char *text)
{
	for (int i = 1; i < ENG_INJECT_NR; i++) {
		if (!strcmp(text, names[i]))
			return i;
	}
	return -EINVAL;
}

const char *eng_inject_str(enum eng_inject_kind kind)
{
	return (u32)kind < ENG_INJECT_NR ? names[kind] : "?";
}

static bool is_wanted(const struct eng_inject_state *in, u32 pfn, u32 *ret_index)
{
	for (u32 i = 0; i < in->nr_want; i++) {
		if (in->want[i].pfn == pfn) {
			*ret_index = i;
			return true;
		}
	}
	return false;
}

/* Keep a wanted page: it takes the place of an unwanted one of @grants. */
static bool keep_wanted(struct eng_inject_state *in, struct kv_grant *grants, u32 nr,
			u32 *nr_kept, struct kv_grant *page)
{
	struct kv_grant old;
	u32 w;

	if (*nr_kept == nr || !is_wanted(in, page->pfn, &w))
		return false;
	in->want[w] = in->want[--in->nr_want];
	old = grants[*nr_kept];
	grants[(*nr_kept)++] = *page;
	*page = old;
	return true;
}

/**
 * eng_inject_take() - exchange new pages for the freed ones that wait to be reused
 * @t: table that grows; the victim's own never gets its page back
 * @grants: nr pages just allocated; wanted ones come first on return
 *
 * Return: 0; -ETIMEDOUT: not all came (they may still be in quarantine); -ENOMEM.
 */
int eng_inject_take(struct eng_engine *e, const struct eng_table *t,
		    struct kv_grant *grants, u32 nr)
{
	struct eng_inject_state *in = &e->inject;
	struct kv_grant *extra;
	u32 nr_kept = 0, nr_extra = 0;
	u64 end_ns = kv_now_ns() + TAKE_WAIT_NS;

	if (t && t == in->owner)
		return 0;
	extra = calloc(EXTRAS_MAX, sizeof(*extra));
	if (!extra)
		return -ENOMEM;
	for (u32 i = 0; i < nr; i++)
		keep_wanted(in, grants, nr, &nr_kept, &grants[i]);
	while (in->nr_want && nr_kept < nr && kv_now_ns() < end_ns &&
	       nr_extra < EXTRAS_MAX) {
		struct timespec ts = {0, 500000};

		kvc_flush(e->kvc);
		if (kvc_alloc(e->pool, 1, KV_GFP_ATOMIC, &extra[nr_extra]) != 0) {
			kvc_dispatch(e->kvc, eng_dispatch_event, e);
			nanosleep(&ts, NULL);
			continue;
		}
		keep_wanted(in, grants, nr, &nr_kept, &extra[nr_extra]);
		nr_extra++;
	}
	for (u32 i = 0; i < nr_extra; i++)
		eng_free_grant(e, &extra[i]);
	free(extra);
	return in->nr_want && nr_kept < nr ? -ETIMEDOUT : 0;
}

/* Pages go back to kvmd, rows stay. */
static int free_under_rows(struct eng_engine *e, struct eng_request *v, u32 row, u32 nr)
{
	struct eng_inject_state *in = &e->inject;
	int rc = 0;

	for (u32 i = row; i < row + nr; i++) {
		struct eng_lease *l = &v->table.leases[i];

		if ((l->flags & ENG_LEASE_GONE) || i < v->table.nr_sealed)
			return -EINVAL;
	}
	for (u32 i = row; i < row + nr && !rc; i++) {
		struct eng_lease *l = &v->table.leases[i];

		rc = kvc_free(e->pool, &l->grant, 1);
		l->flags |= ENG_LEASE_GONE;
		in->want[in->nr_want++] = l->grant;
	}
	in->owner = &v->table;
	return rc ? rc : kvc_flush(e->kvc);
}

static int run_overwrite(struct eng_engine *e, const struct kvk_move_args *move)
{
	int rc;

	eng_check_prepare(e);
	rc = eng_step_upload(e);
	if (!rc)
		rc = eng_check_launch(e, false);
	if (!rc)
		rc = eng_check_join(e);
	if (!rc)
		rc = e->ops->page_move(move, e->mem->stream);
	return rc ? rc : e->mem->ops->sync(e->mem);
}

/* A step of its own that zeroes one page, as its new owner would. */
static int overwrite_page(struct eng_engine *e, const struct kv_grant *page)
{
	struct eng_step *s = &e->step;
	struct kvk_move_args move = {.op = KVK_MOVE_ZERO,
				     .src = e->pages,
				     .dst = e->pages,
				     .dst_batch = {.rows = eng_dev(e, s->rows),
						   .row_start = eng_dev(e, s->row_start),
						   .lengths = eng_dev(e, s->lengths),
						   .q_start = eng_dev(e, s->zero_q),
						   .verdicts = eng_dev(e, s->verdicts),
						   .step = eng_dev(e, s->number_arg),
						   .nr_requests = 1}};
	int rc = kvc_step_begin(e->kvc, &s->kvc);

	if (rc)
		return rc < 0 ? rc : -EBUSY;
	s->number = kvc_step_number(s->kvc);
	*s->number_arg = s->number;
	s->nr = s->nr_rows = 1;
	s->owner[0] = 0;
	s->nonces[0] = eng_rand(e);
	s->lengths[0] = KV_PAGE_TOKENS;
	s->row_start[0] = 0;
	s->row_start[1] = 1;
	s->rows[0] = kv_row_make(page->pfn, page->tag, KV_ROW_WRITE, s->nonces[0], 0);
	if (e->session.check_mode != KV_CHECK_OFF)
		rc = kvc_step_block(s->kvc, e->pool, s->stream, s->block, s->block_bytes);
	if (!rc)
		rc = run_overwrite(e, &move);
	if (rc && e->mem->separate) {
		e->lost = true;
		return rc;
	}
	kvc_step_launched(s->kvc);
	kvc_step_retire(s->kvc);
	s->kvc = NULL;
	return rc;
}

/* The victim's page is given out again (to the victim) and overwritten; the row stays
 * old. */
static int old_generation(struct eng_engine *e, struct eng_request *v, u32 row)
{
	struct eng_lease *l = &v->table.leases[row];
	struct kv_grant page;
	int rc = free_under_rows(e, v, row, 1);

	if (rc)
		return rc;
	e->inject.owner = NULL;
	rc = kvc_alloc(e->pool, 1, KV_GFP_NOWAIT, &page);
	if (rc)
		return rc < 0 ? rc : -EAGAIN;
	rc = eng_inject_take(e, NULL, &page, 1);
	l->grant = page;
	l->flags = 0;
	return rc ? rc : overwrite_page(e, &page);
}

static int check_target(const struct eng_inject *in)
{
	const struct eng_request *v = in->victim, *o = in->other;
	u32 nr = in->nr_rows ? in->nr_rows : 1;

	if (!v || (v->state != ENG_PREFILL && v->state != ENG_DECODE))
		return -EINVAL;
	if (nr > ENG_INJECT_ROWS_MAX || in->row + nr > v->table.nr)
		return -EINVAL;
	if (in->kind == ENG_INJECT_SWAP_ROWS &&
	    (!o || o == v || (o->state != ENG_PREFILL && o->state != ENG_DECODE) ||
	     in->row + nr > o->table.nr))
		return -EINVAL;
	if (in->kind == ENG_INJECT_WRITE_SEALED && in->row >= v->table.nr_sealed)
		return -EINVAL;
	return 0;
}

static void swap_rows(const struct eng_inject *in)
{
	u32 nr = in->nr_rows ? in->nr_rows : 1;

	for (u32 i = in->row; i < in->row + nr; i++) {
		struct kv_row tmp = in->victim->table.rows[i];

		in->victim->table.rows[i] = in->other->table.rows[i];
		in->other->table.rows[i] = tmp;
	}
}

int eng_inject_arm(struct eng_engine *e, const struct eng_inject *in)
{
	struct eng_request *v = in->victim;
	u32 nr = in->nr_rows ? in->nr_rows : 1;
	int rc;

	if (!e->opt.inject)
		return -EPERM;
	if (e->inject.armed.kind != ENG_INJECT_NONE || e->inject.nr_want)
		return -EBUSY;
	rc = check_target(in);
	if (rc)
		return rc;
	switch (in->kind) {
	case ENG_INJECT_SWAP_ROWS:
		swap_rows(in);
		return 0;
	case ENG_INJECT_REUSE:
		return free_under_rows(e, v, in->row, nr);
	case ENG_INJECT_LATE_WRITER:
		return free_under_rows(e, v, v->table.nr - 1, 1);
	case ENG_INJECT_OLD_GEN:
		return old_generation(e, v, in->row);
	case ENG_INJECT_BAD_PFN:
		v->table.rows[in->row].pfn = e->pool_info.geometry.nr_pages + 7;
		return 0;
	case ENG_INJECT_FOREIGN:
		v->table.rows[in->row] = kv_row_make(in->foreign.pfn, in->foreign.tag, 0,
						     v->table.nonce, in->row);
		return 0;
	case ENG_INJECT_WRITE_SEALED:
	case ENG_INJECT_TRUNCATED:
	case ENG_INJECT_NO_CHECK:
	case ENG_INJECT_MIRROR_BEHIND:
		e->inject.armed = *in;
		return 0;
	default:
		return -EINVAL;
	}
}

/** eng_inject_forget() - @r leaves the running list */
void eng_inject_forget(struct eng_engine *e, struct eng_request *r)
{
	if (e->inject.armed.victim == r)
		e->inject.armed.kind = ENG_INJECT_NONE;
	if (e->inject.owner == &r->table)
		e->inject.owner = NULL;
}

/* Index of the victim in the step, or -1. */
static s32 victim_index(const struct eng_engine *e)
{
	const struct eng_step *s = &e->step;

	if (e->inject.armed.kind == ENG_INJECT_NONE)
		return -1;
	for (u32 i = 0; i < s->nr_seqs; i++) {
		if (s->seqs[i] == e->inject.armed.victim)
			return (s32)i;
	}
	return -1;
}

/** eng_inject_alone() - must the next step run with the victim only? */
bool eng_inject_alone(struct eng_engine *e, struct eng_request **ret_r)
{
	if (e->inject.armed.kind != ENG_INJECT_MIRROR_BEHIND)
		return false;
	*ret_r = e->inject.armed.victim;
	return true;
}

/** eng_inject_rows() - damage to the rows of the step that was just built */
void eng_inject_rows(struct eng_engine *e)
{
	struct eng_step *s = &e->step;
	struct eng_view *v = &s->view[ENG_GROUP_SEQ];
	s32 i = victim_index(e);
	u32 last;

	if (i < 0)
		return;
	if (e->inject.armed.kind == ENG_INJECT_WRITE_SEALED)
		s->rows[s->row_start[i] + e->inject.armed.row].flags |= KV_ROW_WRITE;
	if (e->inject.armed.kind != ENG_INJECT_TRUNCATED)
		return;
	last = s->row_start[i + 1] - 1;
	memmove(&s->rows[last], &s->rows[last + 1],
		(s->nr_rows - last - 1) * sizeof(*s->rows));
	s->nr_rows--;
	for (u32 j = (u32)i + 1; j <= s->nr; j++)
		s->row_start[j]--;
	for (u32 j = (u32)i + 1; j <= v->nr; j++)
		v->row_start[j]--;
}

/** eng_inject_block() - leave a gap in the block that the check gets */
void eng_inject_block(struct eng_engine *e)
{
	struct kv_step_block behind;

	if (e->inject.armed.kind != ENG_INJECT_MIRROR_BEHIND || victim_index(e) < 0)
		return;
	memcpy(&behind, e->step.block, sizeof(behind));
	behind.kind = KV_BLOCK_DELTA;
	behind.log_from = KV_MAX(behind.log_to, eng_mirror_position(e)) + 1;
	behind.log_to = behind.log_from;
	behind.nr_entries = 0;
	memcpy(e->step.block, &behind, sizeof(behind));
}

/** eng_inject_verdicts() - damage to the verdicts; an armed injection ends with its step
 */
void eng_inject_verdicts(struct eng_engine *e)
{
	struct eng_step *s = &e->step;
	s32 i = victim_index(e);

	if (i < 0)
		return;
	/* with check off there is none to leave out */
	if (e->inject.armed.kind == ENG_INJECT_NO_CHECK &&
	    e->session.check_mode != KV_CHECK_OFF)
		s->verdicts[i] = (struct kv_verdict){.step = s->number - 1};
	e->inject.armed.kind = ENG_INJECT_NONE;
}
