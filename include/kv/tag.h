/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kv/tag.h - tag word, page-table row, verdict and the per-row check (design section 5).
 *
 * The check is defined here once, for the C reference, the CUDA kernel and the client
 * library's host check alike: kv_row_check() is the only place that decides.
 */
#ifndef KV_TAG_H
#define KV_TAG_H

#include "types.h"

/*
 * P1. Generation in bits 63..8, bit 0 LIVE, bit 1 SEALED, bits 2..7 zero. A page's word only
 * grows, so a mirror may apply words with atomicMax in any order. Word 0 is never live.
 */
#define KV_TAG_LIVE	 1ull
#define KV_TAG_SEALED	 2ull
#define KV_TAG_FLAGS	 0xffull
#define KV_TAG_GEN_SHIFT 8
#define KV_TAG_GEN_MAX	 ((1ull << 56) - 1)

KV_INLINE uint64_t kv_tag_make(uint64_t generation, uint64_t flags)
{
	return (generation << KV_TAG_GEN_SHIFT) | flags;
}

KV_INLINE uint64_t kv_tag_gen(uint64_t tag)
{
	return tag >> KV_TAG_GEN_SHIFT;
}

KV_INLINE int kv_tag_live(uint64_t tag)
{
	return (tag & KV_TAG_LIVE) != 0;
}

KV_INLINE int kv_tag_sealed(uint64_t tag)
{
	return (tag & KV_TAG_SEALED) != 0;
}

/**
 * struct kv_row - one page of a request, as the device sees it (P4)
 * @pfn: page number in its pool
 * @flags: bits 7..0 KV_ROW_*; bits 31..8 kv_row_hash(request nonce, row index)
 * @expected: tag of the lease; only its generation is compared
 */
struct kv_row {
	uint32_t pfn;
	uint32_t flags;
	uint64_t expected;
};
KV_ABI_SIZE(kv_row, 16);
KV_ABI_FIELD(kv_row, pfn, 0, 4);
KV_ABI_FIELD(kv_row, flags, 4, 4);
KV_ABI_FIELD(kv_row, expected, 8, 8);

#define KV_ROW_WRITE	  0x01u /* this step may append to the page */
#define KV_ROW_FLAGS	  0xffu
#define KV_ROW_HASH_SHIFT 8

/**
 * kv_row_hash() - 24-bit hash that ties a row to its request and place
 * @nonce: random number of the request
 * @row_index: index of the row in the request's table
 *
 * splitmix64's finaliser (Steele, Lea, Flood 2014), upper 24 bits.
 */
KV_INLINE uint32_t kv_row_hash(uint64_t nonce, uint32_t row_index)
{
	uint64_t z = nonce + 0x9e3779b97f4a7c15ull * ((uint64_t)row_index + 1);

	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
	return (uint32_t)((z ^ (z >> 31)) >> 40);
}

KV_INLINE struct kv_row kv_row_make(uint32_t pfn, uint64_t tag, uint32_t row_flags,
				    uint64_t nonce, uint32_t row_index)
{
	struct kv_row row;

	row.pfn = pfn;
	row.flags = (row_flags & KV_ROW_FLAGS) |
		    (kv_row_hash(nonce, row_index) << KV_ROW_HASH_SHIFT);
	row.expected = tag;
	return row;
}

/* Bits of a verdict: why a request failed. Names are kv_verdict_str()'s and kvmctl's. */
#define KV_BAD_PFN     0x01u /* pfn >= number of pages in the pool */
#define KV_BAD_HASH    0x02u /* row belongs to another request or place */
#define KV_BAD_GEN     0x04u /* another generation is live: the page was reused */
#define KV_BAD_DEAD    0x08u /* the page was freed, revoked or evicted */
#define KV_BAD_SEALED  0x10u /* WRITE row on a sealed page */
#define KV_BAD_LENGTH  0x20u /* length > rows * page_tokens */
#define KV_BAD_MIRROR  0x40u /* the mirror is behind the step's log position */
#define KV_BAD_NOCHECK 0x80u /* host side only: no verdict for this step */

/**
 * struct kv_verdict - answer of the batch check for one request (P5)
 * @step: step number, copied from the argument block, never invented by the check
 * @bits: KV_BAD_*; 0 = all rows good
 * @rows_checked: rows really looked at; must equal the request's row count
 *
 * A request passes if kv_verdict_ok(); "not checked" fails.
 */
struct kv_verdict {
	uint64_t step;
	uint32_t bits;
	uint32_t rows_checked;
};
KV_ABI_SIZE(kv_verdict, 16);
KV_ABI_FIELD(kv_verdict, step, 0, 8);
KV_ABI_FIELD(kv_verdict, bits, 8, 4);
KV_ABI_FIELD(kv_verdict, rows_checked, 12, 4);

KV_INLINE int kv_verdict_ok(struct kv_verdict v, uint64_t step, uint32_t nr_rows)
{
	return v.step == step && v.bits == 0 && v.rows_checked == nr_rows;
}

/**
 * kv_row_check() - is this row still the page the request was given?
 * @row: the row
 * @row_index: its index in the request's table
 * @nonce: the request's nonce
 * @tag: the mirror's word for row.pfn; pass 0 when row.pfn is out of range
 * @nr_pages: pages in the pool's table
 *
 * Return: KV_BAD_* bits, 0 when good.
 */
KV_INLINE uint32_t kv_row_check(struct kv_row row, uint32_t row_index, uint64_t nonce,
				uint64_t tag, uint32_t nr_pages)
{
	uint32_t bits = 0;

	if ((row.flags >> KV_ROW_HASH_SHIFT) != kv_row_hash(nonce, row_index))
		bits |= KV_BAD_HASH;
	if (row.pfn >= nr_pages)
		return bits | KV_BAD_PFN;
	if (kv_tag_gen(row.expected) != kv_tag_gen(tag))
		bits |= KV_BAD_GEN;
	if (!kv_tag_live(tag))
		bits |= KV_BAD_DEAD;
	if ((row.flags & KV_ROW_WRITE) && kv_tag_sealed(tag))
		bits |= KV_BAD_SEALED;
	return bits;
}

/**
 * struct kv_log_entry - one change of a tag, in a pool's published log (P2)
 */
struct kv_log_entry {
	uint64_t tag;
	uint32_t pfn;
	uint32_t sequence; /* low 32 bits of the entry's position in the log */
};
KV_ABI_SIZE(kv_log_entry, 16);
KV_ABI_FIELD(kv_log_entry, tag, 0, 8);
KV_ABI_FIELD(kv_log_entry, pfn, 8, 4);
KV_ABI_FIELD(kv_log_entry, sequence, 12, 4);

#define KV_LOG_ENTRIES	 65536u
#define KV_LOG_BATCH_MAX 4096u /* entries logged per store of log_head */
#define KV_LOG_USABLE	 (KV_LOG_ENTRIES - KV_LOG_BATCH_MAX)

/**
 * struct kv_step_block - head of a step's argument block for one pool (P3)
 * @step: number of the step; verdicts carry it
 * @log_from: mirror position this block starts from (KV_BLOCK_DELTA)
 * @log_to: mirror position after it was applied
 * @nr_pages: pages in the pool's table
 * @kind: KV_BLOCK_DELTA: nr_entries kv_log_entry follow; KV_BLOCK_FULL: nr_entries tags (u64)
 *	follow, for pfn 0 .. nr_entries - 1
 * @nr_entries: see @kind
 *
 * Written by the client library between announce and launch, read by tag_check. It lies in
 * memory that the step's slot owns until retire.
 */
struct kv_step_block {
	uint64_t step;
	uint64_t log_from;
	uint64_t log_to;
	uint32_t nr_pages;
	uint32_t kind;
	uint32_t nr_entries;
	uint32_t reserved;
};
KV_ABI_SIZE(kv_step_block, 40);
KV_ABI_FIELD(kv_step_block, step, 0, 8);
KV_ABI_FIELD(kv_step_block, log_from, 8, 8);
KV_ABI_FIELD(kv_step_block, log_to, 16, 8);
KV_ABI_FIELD(kv_step_block, nr_pages, 24, 4);
KV_ABI_FIELD(kv_step_block, kind, 28, 4);
KV_ABI_FIELD(kv_step_block, nr_entries, 32, 4);
KV_ABI_FIELD(kv_step_block, reserved, 36, 4);

#define KV_BLOCK_DELTA 0u
#define KV_BLOCK_FULL  1u

/**
 * struct kv_mirror - head of an engine's own copy of a pool's tags
 * @position: log position it stands at; only grows
 * @nr_pages: words that follow
 * @reserved: zero
 *
 * nr_pages u64 tag words follow. Device memory on a GPU, ordinary memory on the host
 * backend. Words are applied with max(), so order and repetition do not matter (P1).
 */
struct kv_mirror {
	uint64_t position;
	uint32_t nr_pages;
	uint32_t reserved;
};
KV_ABI_SIZE(kv_mirror, 16);
KV_ABI_FIELD(kv_mirror, position, 0, 8);
KV_ABI_FIELD(kv_mirror, nr_pages, 8, 4);
KV_ABI_FIELD(kv_mirror, reserved, 12, 4);

#endif /* KV_TAG_H */
