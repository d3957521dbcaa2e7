/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check.c - rows of a step: no page written twice, and the check on the host (P4, P5).
 *
 * The host check is kernels/tag_check in C over the library's own mirror: apply the
 * block, then kv_row_check() for every row. A verdict's step number comes from the block,
 * so that a check that did not run leaves no good verdict behind.
 *
 * With check mode `strict` the same rows are looked at once more at retire, against the
 * same mirror: rows that changed under the step, or a check that was wrong, become an
 * incident.
 *
 * Locks: kvc_pool.mirror_lock for mirror and block buffer. Stamps belong to the step's
 * slot.
 */
#include "internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* What strict mode remembers of a request; its rows stay as they are until retire (P4).
 */
struct kvc_walk {
	struct kvc_pool *pool;
	const struct kv_row *rows;
	u64 nonce;
	u32 nr_rows;
	u32 bits; /* of the verdict */
};

/* --------------------------------------------------------------------- two writers */

static u32 *stamps_of(struct kvc_step *step, struct kvc_pool *pool)
{
	u32 **stamps = &pool->stamps[step->slot];

	if (!*stamps)
		*stamps = calloc(pool->geometry.nr_pages, sizeof(u32));
	return *stamps;
}

static int check_row_pfns(struct kvc_pool *pool, const struct kv_row *rows, u32 nr)
{
	for (u32 i = 0; i < nr; i++)
		if (rows[i].pfn >= pool->geometry.nr_pages)
			return kvc_fail(-EINVAL, "rows[%u].pfn=%u: the pool has %u", i,
					rows[i].pfn, pool->geometry.nr_pages);
	return 0;
}

int kvc_step_rows(struct kvc_step *step, struct kvc_pool *pool, const struct kv_row *rows,
		  uint32_t nr_rows)
{
	u32 stamp = (u32)step->number ? (u32)step->number : 1;
	u32 *stamps, i;
	int r;

	if (kvc_poisoned(step->c))
		return kvc_fail(-EOWNERDEAD, "the process forked");
	stamps = stamps_of(step, pool);
	if (!stamps)
		return kvc_fail(-ENOMEM, "out of memory");
	r = check_row_pfns(pool, rows, nr_rows);
	if (r)
		return r;
	for (i = 0; i < nr_rows; i++) {
		if (!(rows[i].flags & KV_ROW_WRITE))
			continue;
		if (stamps[rows[i].pfn] == stamp && !KV_MUTANT(second_write_row_ok))
			break;
		stamps[rows[i].pfn] = stamp;
	}
	if (i == nr_rows)
		return 0;
	r = kvc_fail(-EEXIST, "rows[%u].pfn=%u: a second WRITE row in step %llu", i,
		     rows[i].pfn, (unsigned long long)step->number);
	while (i--) /* a refused request leaves no mark */
		if (rows[i].flags & KV_ROW_WRITE)
			stamps[rows[i].pfn] = 0;
	return r;
}

/* ---------------------------------------------------------------------- host check */

static int mirror_alloc(struct kvc_pool *pool)
{
	if (!pool->mirror)
		pool->mirror = calloc(1, sizeof(struct kv_mirror) +
						 pool->geometry.nr_pages * sizeof(u64));
	if (!pool->mirror_block)
		pool->mirror_block = malloc(kvc_step_block_bytes(pool));
	if (!pool->mirror || !pool->mirror_block)
		return kvc_fail(-ENOMEM, "out of memory");
	pool->mirror->nr_pages = pool->geometry.nr_pages;
	return 0;
}

/* Words are applied with max(): an older block does no harm (P1). */
static void mirror_apply(struct kv_mirror *mirror, const struct kv_step_block *block)
{
	const struct kv_log_entry *log = (const void *)(block + 1);
	const u64 *full = (const void *)(block + 1);
	u64 *tags = (u64 *)(mirror + 1);

	if (block->kind == KV_BLOCK_DELTA && mirror->position < block->log_from)
		return;
	for (u32 i = 0; i < block->nr_entries; i++) {
		u32 pfn = block->kind == KV_BLOCK_FULL ? i : log[i].pfn;
		u64 tag = block->kind == KV_BLOCK_FULL ? full[i] : log[i].tag;

		if (pfn < mirror->nr_pages && tags[pfn] < tag)
			tags[pfn] = tag;
	}
	mirror->position = KV_MAX(mirror->position, block->log_to);
}

/* Bring the library's mirror to where the step must get. mirror_lock is held. */
static int mirror_update(struct kvc_step *step, struct kvc_pool *pool,
			 const struct kv_table *table)
{
	u64 head = kv_load_acquire64(&table->log_head.word);
	bool has_position;
	int r;

	r = mirror_alloc(pool);
	if (r)
		return r;
	if (KV_MUTANT(mirror_announced))
		head = step->early_head[pool->slot];
	has_position = pool->mirror_link_serial == step->link->serial;
	if (has_position && pool->mirror->position >= head)
		head = pool->mirror->position; /* a later step was here first */
	r = kvc_block_fill(table, step->number, has_position, pool->mirror->position,
			   head, pool->mirror_block, kvc_step_block_bytes(pool));
	if (r)
		return r;
	if (!has_position) {
		memset(pool->mirror + 1, 0, pool->geometry.nr_pages * sizeof(u64));
		pool->mirror->position = 0;
		pool->mirror_link_serial = step->link->serial;
	}
	mirror_apply(pool->mirror, pool->mirror_block);
	return 0;
}

static struct kv_verdict check_request(const struct kvc_pool *pool,
				       const struct kvc_check_request *q)
{
	const struct kv_step_block *block = pool->mirror_block;
	const u64 *tags = (const u64 *)(pool->mirror + 1);
	u32 nr_pages = pool->geometry.nr_pages;
	struct kv_verdict v = {.step = block->step};

	if (pool->mirror->position < block->log_to)
		v.bits |= KV_BAD_MIRROR;
	if (q->length > (u64)q->nr_rows * pool->layout.page_tokens)
		v.bits |= KV_BAD_LENGTH;
	for (u32 i = 0; i < q->nr_rows; i++) {
		struct kv_row row = q->rows[i];

		if (KV_MUTANT(check_skips_rows) && i > 0) {
			v.rows_checked++;
			continue;
		}
		v.bits |= kv_row_check(row, i, q->nonce,
				       row.pfn < nr_pages ? tags[row.pfn] : 0, nr_pages);
		v.rows_checked++;
	}
	return v;
}

static void answer_good(struct kvc_step *step, const struct kvc_check_request *requests,
			u32 nr, struct kv_verdict *ret_verdicts)
{
	for (u32 i = 0; i < nr; i++)
		ret_verdicts[i] = (struct kv_verdict){
			.step = step->number, .rows_checked = requests[i].nr_rows};
}

int kvc_step_check(struct kvc_step *step, struct kvc_pool *pool,
		   const struct kvc_check_request *requests, uint32_t nr_requests,
		   struct kv_verdict *ret_verdicts)
{
	const struct kv_table *table = step->link->tables[pool->slot].map;
	u32 mode = step->link->flags & KV_HELLO_CHECK_MASK;
	int r = 0;

	if (kvc_poisoned(step->c)) /* the table is not mapped here */
		return kvc_fail(-EOWNERDEAD, "the process forked");
	if (!table)
		return kvc_fail(-EINVAL, "the pool is not open in the step's session");
	if (mode == KV_CHECK_OFF || KV_MUTANT(no_check)) {
		answer_good(step, requests, nr_requests, ret_verdicts);
		kvc_step_launched(step);
		return 0;
	}
	pthread_mutex_lock(&pool->mirror_lock);
	r = mirror_update(step, pool, table);
	for (u32 i = 0; i < nr_requests && !r; i++)
		ret_verdicts[i] = check_request(pool, &requests[i]);
	pthread_mutex_unlock(&pool->mirror_lock);
	for (u32 i = 0; i < nr_requests && !r && mode == KV_CHECK_STRICT; i++)
		r = kvc_walk_add(step, pool, &requests[i], ret_verdicts[i].bits);
	if (!r)
		kvc_step_launched(step);
	return r;
}

/* -------------------------------------------------------------------------------- strict
 */

/** kvc_walk_add() - strict: look at this request again at retire. Return: 0; -ENOMEM */
int kvc_walk_add(struct kvc_step *step, struct kvc_pool *pool,
		 const struct kvc_check_request *request, u32 bits)
{
	if (step->nr_walks == step->walks_max) {
		u32 max = step->walks_max ? step->walks_max * 2 : 64;
		struct kvc_walk *walks = realloc(step->walks, max * sizeof(*walks));

		if (!walks)
			return kvc_fail(-ENOMEM, "out of memory");
		step->walks = walks;
		step->walks_max = max;
	}
	step->walks[step->nr_walks++] = (struct kvc_walk){.pool = pool,
							  .rows = request->rows,
							  .nonce = request->nonce,
							  .nr_rows = request->nr_rows,
							  .bits = bits};
	return 0;
}

static void report_row(struct kvc_step *step, const struct kvc_walk *w, u32 row,
		       u64 found, u32 bits)
{
	struct kv_incident incident = {.request_id = w->nonce,
				       .step = step->number,
				       .expected = w->rows[row].expected,
				       .found = found,
				       .pfn = w->rows[row].pfn,
				       .row = row,
				       .bits = bits};
	struct kvc_req req = {.opcode = KV_OP_REPORT,
			      .pool = w->pool,
			      .nr = 1,
			      .arg_bytes = sizeof(incident),
			      .src = &incident};
	struct kvc *c = step->c;

	kvc_log(c, KVC_LOG_ERR, "strict: step %llu, row %u, pfn %u: bits 0x%x at retire",
		(unsigned long long)step->number, row, incident.pfn, bits);
	pthread_mutex_lock(&c->lock);
	if (step->link == c->link && !c->link->dead)
		kvc_ring_post(c->link, &req, KVC_FIRE);
	pthread_mutex_unlock(&c->lock);
}

/*
 * A page that died since the check was revoked, or freed by its own session: an outcome.
 * What else differs from the verdict is an incident; the first row of a request tells it.
 * The mirror may be another table's by now: where the last check was of a step on another
 * connection it says nothing of these rows.
 */
static u32 walk_rows(struct kvc_step *step, const struct kvc_walk *w, u32 *ret_row,
		     u64 *ret_tag)
{
	const u64 *tags = (const u64 *)(w->pool->mirror + 1);
	u32 nr_pages = w->pool->geometry.nr_pages;

	if (w->pool->mirror_link_serial != step->link->serial)
		return 0;
	for (u32 i = 0; i < w->nr_rows; i++) {
		struct kv_row row = w->rows[i];
		u64 tag = row.pfn < nr_pages ? tags[row.pfn] : 0;
		u32 bits = kv_row_check(row, i, w->nonce, tag, nr_pages) & ~w->bits;

		if ((bits & KV_BAD_DEAD) && kv_tag_gen(tag) > kv_tag_gen(row.expected))
			bits &= ~(KV_BAD_DEAD | KV_BAD_GEN);
		*ret_row = i;
		*ret_tag = tag;
		if (bits)
			return bits;
	}
	return 0;
}

static void walk_request(struct kvc_step *step, const struct kvc_walk *w)
{
	u32 row = 0, bits;
	u64 tag = 0;

	pthread_mutex_lock(&w->pool->mirror_lock);
	bits = walk_rows(step, w, &row, &tag);
	pthread_mutex_unlock(&w->pool->mirror_lock);
	if (bits)
		report_row(step, w, row, tag, bits);
}

/** kvc_walk_again() - strict: the rows of the step, once more */
void kvc_walk_again(struct kvc_step *step)
{
	for (u32 i = 0; i < step->nr_walks; i++)
		walk_request(step, &step->walks[i]);
	step->nr_walks = 0;
}
