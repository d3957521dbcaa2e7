/* SPDX-License-Identifier: Apache-2.0 */
/*
 * batch.c - a step's rows, lengths, tokens and groups, built between announce and launch.
 *
 * Sequences come first, then pseudo requests for the whole-page work of the step: pages
 * to be zeroed, fork copies (source and destination), pages whose digest is taken. Pseudo
 * requests have rows and a nonce of their own and are checked like every other reader and
 * writer.
 */
#include "engine/run/internal.h"

#include <string.h>

static u32 push_request(struct eng_step *s, u64 nonce, u32 length, u32 owner)
{
	u32 i = s->nr++;

	kv_assert(i < s->cap);
	s->nonces[i] = nonce;
	s->lengths[i] = length;
	s->owner[i] = owner;
	s->row_start[i + 1] = s->row_start[i];
	return i;
}

static void push_row(struct eng_step *s, struct kv_row row)
{
	kv_assert(s->nr_rows < s->cap_rows);
	s->rows[s->nr_rows++] = row;
	s->row_start[s->nr] = s->nr_rows;
}

static void push_seq(struct eng_step *s, struct eng_request *r, u32 index)
{
	u32 length = r->nr_in_pages + r->q_len;
	u32 nr_rows = (u32)kv_div_round_up(length, KV_PAGE_TOKENS);
	u32 first_write = r->nr_in_pages / KV_PAGE_TOKENS;

	kv_assert(nr_rows <= r->table.nr && first_write >= r->table.nr_sealed);
	push_request(s, r->table.nonce, length, index);
	for (u32 i = 0; i < nr_rows; i++) {
		struct kv_row row = r->table.rows[i];

		if (i >= first_write)
			row.flags |= KV_ROW_WRITE;
		push_row(s, row);
	}
	for (u32 t = 0; t < r->q_len; t++) {
		s->ids[s->nr_tokens + t] = r->tokens[r->nr_in_pages + t];
		s->positions[s->nr_tokens + t] = r->nr_in_pages + t;
		s->targets[s->nr_tokens + t] =
			r->targets && r->nr_in_pages + t < r->nr_prompt
				? r->targets[r->nr_in_pages + t]
				: ENG_NO_TARGET;
	}
	s->nr_tokens += r->q_len;
	s->q_start[index + 1] = s->nr_tokens;
	s->q_len_max = KV_MAX(s->q_len_max, r->q_len);
	if (length == r->nr_tokens && r->nr_tokens < r->nr_prompt + r->max_tokens) {
		s->sample_seq[s->nr_samples] = index;
		s->sample_row[s->nr_samples++] = s->nr_tokens - 1;
	}
}

/*
 * A graph is captured for a number of requests. Those that fill it up have one token and
 * no rows: no verdict can be good for them, so they touch no page, and what is computed
 * for them is NaN.
 */
static void push_fillers(struct eng_step *s, u32 nr_requests)
{
	while (s->nr < nr_requests) {
		u32 i = push_request(s, 0, 1, ENG_NO_OWNER);

		if (i >= s->bucket)
			continue; /* behind the pseudo requests: only checked */
		s->ids[i] = s->positions[i] = 0;
		s->targets[i] = ENG_NO_TARGET;
		s->nr_tokens++;
		s->q_start[i + 1] = s->nr_tokens;
	}
}

/* Pages this step writes for the first time that hold another session's bytes. */
static void push_zero(struct eng_engine *e, struct eng_step *s, struct eng_request *r,
		      u32 index)
{
	u32 i = r->nr_in_pages / KV_PAGE_TOKENS, n = 0;
	u32 end = (u32)kv_div_round_up(r->nr_in_pages + r->q_len, KV_PAGE_TOKENS);
	u64 nonce = 0;

	for (; i < end; i++) {
		struct eng_lease *l = &r->table.leases[i];

		if (!(l->flags & ENG_LEASE_ZERO) || KV_MUTANT(dirty_page_not_zeroed))
			continue;
		if (n == 0) {
			nonce = eng_rand(e);
			push_request(s, nonce, 0, index);
		}
		push_row(s, kv_row_make(l->grant.pfn, l->grant.tag, KV_ROW_WRITE, nonce,
					n++));
	}
	eng_stat_add(e->stats.zeroed_pages, n);
}

static void push_copy(struct eng_engine *e, struct eng_step *s, struct eng_request *r,
		      u32 index, bool is_dst)
{
	u32 i = r->nr_in_pages / KV_PAGE_TOKENS;
	struct eng_lease *l = &r->table.leases[i];
	const struct kv_grant *g = is_dst ? &l->grant : &r->table.fork_source;
	u64 nonce;

	if (!(l->flags & ENG_LEASE_COPY))
		return;
	kv_assert(r->table.has_fork_source);
	nonce = eng_rand(e);
	push_request(s, nonce, KV_PAGE_TOKENS, index);
	if (!is_dst)
		s->copy_tokens[s->nr_rows -
			       s->row_start[s->view[ENG_GROUP_COPY_SRC].first]] =
			r->nr_in_pages % KV_PAGE_TOKENS;
	push_row(s, kv_row_make(g->pfn, g->tag, is_dst ? KV_ROW_WRITE : 0, nonce, 0));
}

/* Pages that are full when this step is over and not sealed: they are sealed after
 * retire. */
static void push_crc(struct eng_engine *e, struct eng_step *s, struct eng_request *r,
		     u32 index)
{
	u32 first = r->table.nr_sealed;
	u32 end = (r->nr_in_pages + r->q_len) / KV_PAGE_TOKENS;
	u32 used = s->nr_rows - s->row_start[s->view[ENG_GROUP_CRC].first];
	u64 nonce;

	s->crc_first[index] = used;
	s->crc_nr[index] = 0;
	if (e->opt.no_seal || r->p.no_prefix || r->targets || end <= first ||
	    eng_kvmd_away(e))
		return;
	end = KV_MIN(end, first + (s->crc_max - used));
	if (end <= first)
		return;
	nonce = eng_rand(e);
	push_request(s, nonce, (end - first) * KV_PAGE_TOKENS, index);
	for (u32 i = first; i < end; i++) {
		struct eng_lease *l = &r->table.leases[i];

		push_row(s, kv_row_make(l->grant.pfn, l->grant.tag, 0, nonce, i - first));
	}
	s->crc_nr[index] = end - first;
}

static void group_begin(struct eng_step *s, enum eng_group group)
{
	s->view[group].first = s->nr;
	s->view[group].nr = 0;
}

/* Rows of a view are counted from its own first row. */
static void group_end(struct eng_step *s, enum eng_group group)
{
	struct eng_view *v = &s->view[group];

	v->nr = s->nr - v->first;
	for (u32 i = 0; i <= v->nr; i++)
		v->row_start[i] = s->row_start[v->first + i] - s->row_start[v->first];
}

static void sample_params(struct eng_step *s)
{
	for (u32 i = s->nr_samples; i < s->bucket; i++) {
		s->sample_row[i] = 0;
		s->temperature[i] = 0;
		s->top_p[i] = 1;
		s->seeds[i] = 0;
	}
	for (u32 i = 0; i < s->nr_samples; i++) {
		const struct eng_request *r = s->seqs[s->sample_seq[i]];

		s->temperature[i] = r->p.temperature;
		s->top_p[i] = r->p.top_p;
		/* splitmix64 of (seed, index of the token): the same draw wherever it is
		 * made */
		s->seeds[i] = (r->p.seed + r->nr_tokens) * 0x9e3779b97f4a7c15ull;
		s->seeds[i] ^= s->seeds[i] >> 30;
		s->seeds[i] *= 0xbf58476d1ce4e5b9ull;
		s->seeds[i] ^= s->seeds[i] >> 27;
	}
}

/* Requests to fill a step of decodes up to; 0: the step is not of that kind. */
static u32 bucket_of(struct eng_engine *e, struct eng_request **seqs, u32 nr)
{
	u32 bucket = 1;

	if (!e->mem->has_graphs || e->opt.inject)
		return 0;
	for (u32 i = 0; i < nr; i++) {
		if (seqs[i]->q_len != 1 || seqs[i]->targets)
			return 0;
	}
	while (bucket < nr)
		bucket *= 2;
	return KV_MIN(bucket, e->opt.batch_max);
}

/**
 * eng_batch_build() - fill the step from step.seqs
 * @nr: sequences, each with q_len > 0
 */
void eng_batch_build(struct eng_engine *e, struct eng_request **seqs, u32 nr)
{
	struct eng_step *s = &e->step;

	s->nr = s->nr_rows = s->nr_tokens = s->nr_samples = s->q_len_max = 0;
	s->nr_seqs = nr;
	s->bucket = bucket_of(e, seqs, nr);
	*s->number_arg = s->number;
	*s->nan_count = 0;
	s->row_start[0] = 0;
	s->q_start[0] = 0;
	group_begin(s, ENG_GROUP_SEQ);
	for (u32 i = 0; i < nr; i++)
		push_seq(s, seqs[i], i);
	if (s->bucket) {
		push_fillers(s, s->bucket);
		s->q_len_max = 1;
	}
	group_end(s, ENG_GROUP_SEQ);
	group_begin(s, ENG_GROUP_ZERO);
	for (u32 i = 0; i < nr; i++)
		push_zero(e, s, seqs[i], i);
	group_end(s, ENG_GROUP_ZERO);
	group_begin(s, ENG_GROUP_COPY_SRC);
	for (u32 i = 0; i < nr; i++)
		push_copy(e, s, seqs[i], i, false);
	group_end(s, ENG_GROUP_COPY_SRC);
	group_begin(s, ENG_GROUP_COPY_DST);
	for (u32 i = 0; i < nr; i++)
		push_copy(e, s, seqs[i], i, true);
	group_end(s, ENG_GROUP_COPY_DST);
	group_begin(s, ENG_GROUP_CRC);
	for (u32 i = 0; i < nr; i++)
		push_crc(e, s, seqs[i], i);
	group_end(s, ENG_GROUP_CRC);
	if (s->bucket)
		push_fillers(s, 2 * s->bucket);
	kv_assert(s->nr_tokens <= e->tokens_max);
	sample_params(s);
}

/** eng_batch_view() - a group as struct kvk_batch, for the kernels only */
struct kvk_batch eng_batch_view(struct eng_engine *e, enum eng_group group)
{
	struct eng_step *s = &e->step;
	const struct eng_view *v = &s->view[group];
	bool seq = group == ENG_GROUP_SEQ;

	return (struct kvk_batch){
		.rows = eng_dev(e, s->rows + s->row_start[v->first]),
		.row_start = eng_dev(e, v->row_start),
		.lengths = eng_dev(e, s->lengths + v->first),
		.q_start = eng_dev(e, seq ? s->q_start : s->zero_q),
		.verdicts = eng_dev(e, s->verdicts + v->first),
		.step = eng_dev(e, s->number_arg),
		.nr_requests = v->nr,
		.nr_tokens = seq ? s->nr_tokens : 0,
		.q_len_max = seq ? s->q_len_max : 0,
	};
}
