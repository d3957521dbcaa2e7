/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tag_check.cu - mirror update (P3), check of all rows (P4) and verdicts (P5) in one
 * kernel (tour 9/12).
 *
 * A CTA per request. Nobody waits for another CTA, because words only grow (P1):
 *
 *  DELTA  every CTA looks at all entries of the block and applies them itself, so its own
 *	   loads behind a CTA barrier see them. A word that is there already costs a load.
 *  FULL   the CTAs share the words out; a row's tag is the larger one of mirror and block.
 *
 * Whether the block is whole follows from the block and the position alone. A CTA that
 * advances the position can only make others read a later position, and that does not
 * change their answer.
 *
 * The mirror belongs to one stream: two calls on one mirror must not run at once. Block,
 * rows and nonces should lie in device memory; pinned host memory works and costs a trip
 * over the bus for each request.
 */
#include "kernels/attn_cuda.h"
#include "kernels/dev.cuh"

#define CHECK_THREADS	512u
#define CHECK_ILP	4u /* rows or entries of a thread in flight */

#define CHECK_NO_CHECK	0x10u
#define CHECK_NO_LENGTH 0x20u
#define CHECK_NO_MIRROR 0x40u
#define CHECK_GAP	0x80u
#define CHECK_NO_MAX	0x100u

struct check_params {
	struct kvk_tag_check_args a;
	u32 off;
};

/* What the whole CTA agrees on. */
struct check_block {
	struct kv_step_block head;
	u64 position;  /* of the mirror, before or after another CTA moved it */
	u32 nr_words;  /* of the mirror */
	u32 first_bad; /* entries from here on are not applied */
};

KVK_DEV u64 *mirror_tags(struct kv_mirror *m)
{
	return (u64 *)(m + 1);
}

/* A word that another thread of the CTA may just have raised: past L1. */
KVK_DEV u64 mirror_word(struct kv_mirror *m, u32 pfn)
{
	return *(volatile u64 *)&mirror_tags(m)[pfn];
}

KVK_DEV void mirror_raise(const struct check_params &p, u32 pfn, u64 tag)
{
	unsigned long long *word = (unsigned long long *)&mirror_tags(p.a.mirror)[pfn];

	if (p.off & CHECK_NO_MAX)
		*(volatile u64 *)word = tag;
	else
		atomicMax(word, (unsigned long long)tag);
}

/* Many words, most of which another CTA has raised already: a look is cheaper. */
KVK_DEV void mirror_apply(const struct check_params &p, u32 pfn, u64 tag)
{
	if (mirror_word(p.a.mirror, pfn) < tag || (p.off & CHECK_NO_MAX))
		mirror_raise(p, pfn, tag);
}

KVK_DEV bool entry_bad(const struct check_block &b, const struct kv_log_entry &e, u32 i)
{
	return e.pfn >= b.nr_words || e.sequence != (u32)(b.head.log_from + i);
}

/* Is the block whole, once first_bad is known? */
KVK_DEV bool delta_whole(const struct check_block &b)
{
	return b.first_bad == b.head.nr_entries && b.position >= b.head.log_from &&
	       b.head.log_to >= b.head.log_from &&
	       b.head.nr_entries == b.head.log_to - b.head.log_from;
}

/* All entries, by every CTA; true when the block is whole. */
KVK_DEV bool apply_delta(const struct check_params &p, struct check_block &b)
{
	const struct kv_log_entry *log = (const struct kv_log_entry *)(p.a.block + 1);
	const u32 nr = b.head.nr_entries;
	struct kv_log_entry one = {};

	/* the usual few entries: one look, no second trip for them or their words */
	if (nr <= CHECK_THREADS) {
		if (threadIdx.x < nr) {
			one = log[threadIdx.x];
			if (entry_bad(b, one, threadIdx.x))
				atomicMin(&b.first_bad, threadIdx.x);
		}
		__syncthreads();
		if (threadIdx.x < b.first_bad)
			mirror_raise(p, one.pfn, one.tag);
		return delta_whole(b);
	}
	for (u32 at = threadIdx.x; at < nr; at += CHECK_THREADS)
		if (entry_bad(b, log[at], at))
			atomicMin(&b.first_bad, at);
	__syncthreads();
	for (u32 at = threadIdx.x; at < b.first_bad; at += CHECK_THREADS * CHECK_ILP) {
		struct kv_log_entry e[CHECK_ILP];

#pragma unroll
		for (u32 k = 0; k < CHECK_ILP; k++)
			if (at + k * CHECK_THREADS < b.first_bad)
				e[k] = log[at + k * CHECK_THREADS];
#pragma unroll
		for (u32 k = 0; k < CHECK_ILP; k++)
			if (at + k * CHECK_THREADS < b.first_bad)
				mirror_apply(p, e[k].pfn, e[k].tag);
	}
	return delta_whole(b);
}

/* This CTA's share of the words; true when the block is whole. */
KVK_DEV bool apply_full(const struct check_params &p, const struct check_block &b)
{
	const u64 *tags = (const u64 *)(p.a.block + 1);
	const u32 nr = min(b.head.nr_entries, b.nr_words);

	for (u32 at = blockIdx.x * CHECK_THREADS + threadIdx.x; at < nr;
	     at += gridDim.x * CHECK_THREADS)
		mirror_apply(p, at, tags[at]);
	return nr == b.head.nr_entries;
}

/* The word to compare with, whether or not the CTA that applies it got there. */
KVK_DEV u64 tag_now(const struct check_params &p, const struct check_block &b, u32 pfn)
{
	/* behind the CTA's barrier its own words are seen, from L1 as well */
	u64 tag = mirror_tags(p.a.mirror)[pfn];

	if (b.head.kind == KV_BLOCK_FULL && pfn < min(b.head.nr_entries, b.nr_words)) {
		u64 word = ((const u64 *)(p.a.block + 1))[pfn];

		tag = word > tag || (p.off & CHECK_NO_MAX) ? word : tag;
	}
	return tag;
}

/* What a CTA needs of its request, loaded while the mirror is brought up to date. */
struct check_request {
	u32 first;
	u32 nr_rows;
	u32 length;
	bool shrinks;
	u64 nonce;
	struct kv_row row[CHECK_ILP]; /* of this thread: the first ones */
};

/* The thread's rows from @at on. */
KVK_DEV void rows_load(const struct check_params &p, struct check_request &q, u32 at)
{
#pragma unroll
	for (u32 k = 0; k < CHECK_ILP; k++)
		if (at + k * CHECK_THREADS < q.nr_rows)
			q.row[k] = p.a.batch.rows[q.first + at + k * CHECK_THREADS];
}

KVK_DEV void request_load(const struct check_params &p, struct check_request &q, u32 r)
{
	const u32 first = p.a.batch.row_start[r], end = p.a.batch.row_start[r + 1];

	q.length = p.a.batch.lengths[r];
	q.nonce = p.a.nonces[r];
	q.first = first;
	/* offsets that shrink: no rows, and a length that cannot fit them */
	q.shrinks = end < first;
	q.nr_rows = end < first ? 0 : end - first;
	rows_load(p, q, threadIdx.x);
}

/* Bits of this thread's rows from @at on; *nr grows by how many they are. */
KVK_DEV u32 rows_check(const struct check_params &p, const struct check_block &b,
		       const struct check_request &q, u32 at, u32 *nr)
{
	const u32 nr_pages = min(b.head.nr_pages, b.nr_words);
	u64 tag[CHECK_ILP];
	u32 bits = 0;

#pragma unroll
	for (u32 k = 0; k < CHECK_ILP; k++) {
		tag[k] = 0;
		if (at + k * CHECK_THREADS < q.nr_rows && q.row[k].pfn < nr_pages)
			tag[k] = tag_now(p, b, q.row[k].pfn);
	}
#pragma unroll
	for (u32 k = 0; k < CHECK_ILP; k++) {
		if (at + k * CHECK_THREADS >= q.nr_rows)
			continue;
		bits |= kv_row_check(q.row[k], at + k * CHECK_THREADS, q.nonce, tag[k],
				     nr_pages);
		++*nr;
	}
	return bits;
}

/* All threads look at their rows; one writes what they found. */
KVK_DEV void request_check(const struct check_params &p, const struct check_block &b,
			   struct check_request &q, u32 common)
{
	__shared__ u32 all_bits, all_rows;
	u32 bits = common, nr = 0;

	if (threadIdx.x == 0)
		all_bits = all_rows = 0;
	if (q.shrinks ||
	    (q.length > (u64)q.nr_rows * p.a.page_tokens && !(p.off & CHECK_NO_LENGTH)))
		bits |= KV_BAD_LENGTH;
	for (u32 at = threadIdx.x; at < q.nr_rows; at += CHECK_THREADS * CHECK_ILP) {
		if (at >= CHECK_THREADS * CHECK_ILP)
			rows_load(p, q, at);
		bits |= rows_check(p, b, q, at, &nr);
	}
	__syncthreads();
	if (bits)
		atomicOr(&all_bits, bits);
	nr = dev_warp_sum(nr);
	if (threadIdx.x % 32 == 0 && nr)
		atomicAdd(&all_rows, nr);
	__syncthreads();
	if (threadIdx.x == 0) {
		struct kv_verdict v;

		v.step = b.head.step;
		v.bits = p.off & CHECK_NO_CHECK ? 0 : all_bits;
		v.rows_checked = p.off & CHECK_NO_CHECK ? q.nr_rows : all_rows;
		p.a.ret_verdicts[blockIdx.x] = v;
	}
}

__global__ void __launch_bounds__(CHECK_THREADS)
	tag_check_kernel(const __grid_constant__ struct check_params p)
{
	__shared__ struct check_block b;
	struct check_request q = {};
	bool whole = false, behind;

	if (p.a.batch.nr_requests)
		request_load(p, q, blockIdx.x);
	if (threadIdx.x == 0) {
		b.head = *p.a.block;
		b.position = *(volatile u64 *)&p.a.mirror->position;
		b.nr_words = p.a.mirror->nr_pages;
		b.first_bad = b.head.nr_entries;
	}
	__syncthreads();
	if (b.head.kind == KV_BLOCK_FULL)
		whole = apply_full(p, b);
	else if (b.head.kind == KV_BLOCK_DELTA)
		whole = apply_delta(p, b);
	whole |= (p.off & CHECK_GAP) != 0;
	/* this CTA's words are in the mirror before one of its threads looks */
	__syncthreads();
	if (threadIdx.x == 0 && blockIdx.x == 0 && whole)
		atomicMax((unsigned long long *)&p.a.mirror->position,
			  (unsigned long long)b.head.log_to);
	behind = !whole && b.position < b.head.log_to && !(p.off & CHECK_NO_MIRROR);
	if (p.a.batch.nr_requests)
		request_check(p, b, q, behind ? KV_BAD_MIRROR : 0);
}

int kvk_tag_check_cuda(const struct kvk_tag_check_args *a, kvk_stream stream)
{
	const struct kvk_batch *b = &a->batch;
	struct check_params p = {};

	if (!a->block || !a->mirror || !a->page_tokens)
		return -EINVAL;
	if (b->nr_requests &&
	    (!b->rows || !b->row_start || !b->lengths || !a->nonces || !a->ret_verdicts))
		return -EINVAL;
	p.a = *a;
	p.off = (DEV_MUTANT(no_check) ? CHECK_NO_CHECK : 0) |
		(DEV_MUTANT(check_no_length) ? CHECK_NO_LENGTH : 0) |
		(DEV_MUTANT(check_no_mirror) ? CHECK_NO_MIRROR : 0) |
		(DEV_MUTANT(mirror_gap) ? CHECK_GAP : 0) |
		(DEV_MUTANT(mirror_no_max) ? CHECK_NO_MAX : 0);
	/* without requests the mirror still moves on */
	DEV_LAUNCH(tag_check_kernel, KV_MAX(b->nr_requests, 1u), CHECK_THREADS, stream,
		   p);
	return dev_launched();
}
