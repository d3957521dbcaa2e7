/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tag_check_ref.c - mirror update (P3), check of all rows (P4) and verdicts (P5) on the
 * host (tour 9/12).
 *
 * The mirror belongs to one engine stream: two calls on one mirror must not run at once.
 * The rows, the block and the verdicts belong to the step's slot until it retires.
 */
#include <string.h>
#include "ref.h"

static u64 *mirror_tags(struct kv_mirror *m)
{
	return (u64 *)(m + 1);
}

/* Words only grow (P1), so max() makes order and repetition harmless. */
static void mirror_apply(struct kv_mirror *m, u32 pfn, u64 tag)
{
	u64 *word = &mirror_tags(m)[pfn];

	if (tag > *word || KV_MUTANT(mirror_no_max))
		*word = tag;
}

/* A block that is not whole leaves the position where it is: the check then says MIRROR.
 */
static void mirror_update(struct kv_mirror *m, const struct kv_step_block *block)
{
	const struct kv_log_entry *log = (const void *)(block + 1);
	const u8 *tags = (const void *)(block + 1);
	bool whole = true;

	if (block->kind == KV_BLOCK_FULL) {
		u32 nr = KV_MIN(block->nr_entries, m->nr_pages);

		whole = nr == block->nr_entries;
		for (u32 i = 0; i < nr; i++) {
			u64 tag;

			memcpy(&tag, tags + (size_t)i * 8, sizeof(tag));
			mirror_apply(m, i, tag);
		}
	} else if (block->kind == KV_BLOCK_DELTA) {
		whole = m->position >= block->log_from &&
			block->log_to >= block->log_from &&
			block->nr_entries == block->log_to - block->log_from;
		for (u32 i = 0; i < block->nr_entries; i++) {
			if (log[i].pfn >= m->nr_pages ||
			    log[i].sequence != (u32)(block->log_from + i)) {
				whole = false;
				break;
			}
			mirror_apply(m, log[i].pfn, log[i].tag);
		}
	} else {
		whole = false;
	}
	if ((whole || KV_MUTANT(mirror_gap)) && block->log_to > m->position)
		m->position = block->log_to;
}

static struct kv_verdict request_check(const struct kvk_tag_check_args *a, u32 r,
				       u32 common_bits)
{
	const struct kvk_batch *b = &a->batch;
	u32 nr_rows = kvk_nr_rows(b, r);
	u32 nr_pages = KV_MIN(a->block->nr_pages, a->mirror->nr_pages);
	struct kv_verdict v = {.step = a->block->step, .bits = common_bits};

	if (KV_MUTANT(no_check)) {
		v.bits = 0;
		v.rows_checked = nr_rows;
		return v;
	}
	if (b->lengths[r] > (u64)nr_rows * a->page_tokens && !KV_MUTANT(check_no_length))
		v.bits |= KV_BAD_LENGTH;
	for (u32 i = 0; i < nr_rows; i++) {
		struct kv_row row = b->rows[b->row_start[r] + i];
		u64 tag = row.pfn < nr_pages ? mirror_tags(a->mirror)[row.pfn] : 0;

		v.bits |= kv_row_check(row, i, a->nonces[r], tag, nr_pages);
		v.rows_checked++;
	}
	return v;
}

int kvk_tag_check_ref(const struct kvk_tag_check_args *a, kvk_stream stream)
{
	const struct kvk_batch *b = &a->batch;
	u32 bits = 0;

	if (!a->block || !a->mirror || !a->page_tokens)
		return -EINVAL;
	if (b->nr_requests &&
	    (!b->rows || !b->row_start || !b->lengths || !a->nonces || !a->ret_verdicts))
		return -EINVAL;
	for (u32 r = 0; r < b->nr_requests; r++)
		if (b->row_start[r + 1] < b->row_start[r])
			return -EINVAL;
	mirror_update(a->mirror, a->block);
	if (a->mirror->position < a->block->log_to && !KV_MUTANT(check_no_mirror))
		bits |= KV_BAD_MIRROR;
	for (u32 r = 0; r < b->nr_requests; r++)
		a->ret_verdicts[r] = request_check(a, r, bits);
	return 0;
}
