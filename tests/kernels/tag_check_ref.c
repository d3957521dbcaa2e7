/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tag_check_ref.c - the host's tag_check: each bit of a verdict, the mirror, the log.
 */
#include "tests/kvt.h"
#include "common.h"

enum { PAGES = 64, REQUESTS = 4, ROWS = 3, LOG_MAX = 128 };

/* A mirror, a block and four requests of three rows on pages 0 .. 11. */
struct check {
	struct {
		struct kv_mirror head;
		u64 tags[PAGES];
	} mirror;
	struct {
		struct kv_step_block head;
		union {
			struct kv_log_entry log[LOG_MAX];
			u64 tags[2 * LOG_MAX];
		};
	} block;
	struct kv_row rows[REQUESTS * ROWS];
	u32 row_start[REQUESTS + 1];
	u32 lengths[REQUESTS];
	u64 nonces[REQUESTS];
	struct kv_verdict verdicts[REQUESTS];
	struct kvk_tag_check_args a;
};

static void check_log(struct check *c, u32 pfn, u64 tag)
{
	u32 i = c->block.head.nr_entries++;

	c->block.log[i] = (struct kv_log_entry){
		.tag = tag, .pfn = pfn, .sequence = (u32)c->block.head.log_to++};
}

static void check_init(struct check *c)
{
	memset(c, 0, sizeof(*c));
	c->mirror.head.nr_pages = PAGES;
	c->mirror.head.position = 0xfffffff0; /* sequence numbers wrap */
	c->block.head.step = 4711;
	c->block.head.nr_pages = PAGES;
	c->block.head.log_from = c->block.head.log_to = c->mirror.head.position;
	for (u32 i = 0; i < REQUESTS * ROWS; i++) {
		u32 r = i / ROWS;

		c->nonces[r] = 1000 + r;
		c->row_start[r + 1] = (r + 1) * ROWS;
		c->lengths[r] = ROWS * 64;
		check_log(c, i, kv_tag_make(50 + i, KV_TAG_LIVE));
		c->rows[i] = kv_row_make(i, kv_tag_make(50 + i, KV_TAG_LIVE),
					 i % ROWS == 2 ? KV_ROW_WRITE : 0, c->nonces[r],
					 i % ROWS);
	}
	memset(c->verdicts, 0xff, sizeof(c->verdicts));
	c->a = (struct kvk_tag_check_args){.block = &c->block.head,
					   .mirror = &c->mirror.head,
					   .batch = {.rows = c->rows,
						     .row_start = c->row_start,
						     .lengths = c->lengths,
						     .nr_requests = REQUESTS},
					   .nonces = c->nonces,
					   .page_tokens = 64,
					   .ret_verdicts = c->verdicts};
}

/* Request 1 must end with @bits, the others pass. */
static void check_expect(struct check *c, u32 bits)
{
	KVT_EXPECT_EQ(kvk_host_ops()->tag_check(&c->a, NULL), 0);
	for (u32 r = 0; r < REQUESTS; r++) {
		KVT_EXPECT_EQ(c->verdicts[r].step, 4711);
		KVT_EXPECT_EQ(c->verdicts[r].bits, r == 1 ? bits : 0);
		KVT_EXPECT_EQ(c->verdicts[r].rows_checked,
			      c->row_start[r + 1] - c->row_start[r]);
		KVT_EXPECT_EQ(kv_verdict_ok(c->verdicts[r], 4711, ROWS), r != 1 || !bits);
	}
}

KVT_TEST(check_passes_good_rows)
{
	struct check c;

	check_init(&c);
	check_expect(&c, 0);
	KVT_EXPECT_EQ(c.mirror.head.position, 0xfffffff0ull + REQUESTS * ROWS);
	check_expect(&c, 0); /* a block applied twice changes nothing */
}

KVT_TEST(check_finds_a_reused_page)
{
	struct check c;

	check_init(&c);
	check_log(&c, 4, kv_tag_make(500, 0));		 /* freed */
	check_log(&c, 4, kv_tag_make(501, KV_TAG_LIVE)); /* given to another */
	check_expect(&c, KV_BAD_GEN);
}

KVT_TEST(check_finds_a_dead_page)
{
	struct check c;

	check_init(&c);
	check_log(&c, 4, kv_tag_make(500, 0));
	check_expect(&c, KV_BAD_GEN | KV_BAD_DEAD);
	check_init(&c);
	c.block.log[4].tag &= ~KV_TAG_LIVE; /* same generation, no LIVE */
	check_expect(&c, KV_BAD_DEAD);
}

KVT_TEST(check_finds_swapped_rows)
{
	struct check c;
	struct kv_row keep;

	check_init(&c);
	keep = c.rows[3];
	c.rows[3] = c.rows[4]; /* same request, wrong place */
	c.rows[4] = keep;
	check_expect(&c, KV_BAD_HASH);
	check_init(&c);
	c.rows[4] = c.rows[1]; /* good page of another request */
	check_expect(&c, KV_BAD_HASH);
}

KVT_TEST(check_finds_pfn_out_of_range)
{
	struct check c;

	check_init(&c);
	c.rows[5].pfn = PAGES;
	check_expect(&c, KV_BAD_PFN);
	c.rows[5].pfn = UINT32_MAX;
	check_expect(&c, KV_BAD_PFN);
	check_init(&c);
	c.block.head.nr_pages =
		5; /* the table is shorter than the mirror: rows 5 .. 11 go */
	KVT_EXPECT_EQ(kvk_host_ops()->tag_check(&c.a, NULL), 0);
	KVT_EXPECT_EQ(c.verdicts[0].bits, 0);
	KVT_EXPECT_EQ(c.verdicts[1].bits, KV_BAD_PFN);
	KVT_EXPECT_EQ(c.verdicts[3].bits, KV_BAD_PFN);
}

KVT_TEST(check_finds_a_write_row_on_a_sealed_page)
{
	struct check c;

	check_init(&c);
	check_log(&c, 4,
		  kv_tag_make(54, KV_TAG_LIVE | KV_TAG_SEALED)); /* read row: fine */
	check_expect(&c, 0);
	check_log(&c, 5, kv_tag_make(55, KV_TAG_LIVE | KV_TAG_SEALED)); /* WRITE row */
	check_expect(&c, KV_BAD_SEALED);
}

KVT_TEST(check_finds_a_length_beyond_the_rows)
{
	struct check c;

	check_init(&c);
	c.lengths[1] = ROWS * 64 + 1;
	check_expect(&c, KV_BAD_LENGTH);
	c.lengths[1] = UINT32_MAX;
	check_expect(&c, KV_BAD_LENGTH);
}

/* All requests of a step on a mirror that is behind fail, whatever their rows say. */
static void expect_behind(struct check *c)
{
	KVT_EXPECT_EQ(kvk_host_ops()->tag_check(&c->a, NULL), 0);
	for (u32 r = 0; r < REQUESTS; r++)
		KVT_EXPECT(c->verdicts[r].bits & KV_BAD_MIRROR);
}

KVT_TEST(check_finds_a_mirror_behind)
{
	struct check c;

	check_init(&c);
	KVT_EXPECT_EQ(kvk_host_ops()->tag_check(&c.a, NULL), 0);
	c.block.head.log_from = c.mirror.head.position + 1; /* one entry was lost */
	c.block.head.log_to = c.block.head.log_from;
	c.block.head.nr_entries = 0;
	expect_behind(&c);
	check_init(&c);
	c.block.head.log_to++; /* fewer entries than the block claims */
	expect_behind(&c);
	check_init(&c);
	c.block.log[7].sequence++; /* torn or overwritten entry */
	expect_behind(&c);
	check_init(&c);
	c.block.log[7].pfn = PAGES;
	expect_behind(&c);
	check_init(&c);
	c.block.head.kind = 7;
	expect_behind(&c);
}

KVT_TEST(mirror_words_only_grow)
{
	struct check c;

	check_init(&c);
	check_log(&c, 4, kv_tag_make(500, KV_TAG_LIVE));
	check_log(&c, 4, kv_tag_make(54, KV_TAG_LIVE)); /* an old word, late */
	check_expect(&c, KV_BAD_GEN);
	KVT_EXPECT_EQ(c.mirror.tags[4], kv_tag_make(500, KV_TAG_LIVE));
}

KVT_TEST(full_block_replaces_the_log)
{
	struct check c;

	check_init(&c);
	c.mirror.tags[2] = kv_tag_make(90, KV_TAG_LIVE); /* newer than the copy: stays */
	c.block.head.kind = KV_BLOCK_FULL;
	c.block.head.nr_entries = PAGES;
	c.block.head.log_from = 0;
	c.block.head.log_to = c.mirror.head.position + 100000;
	for (u32 i = 0; i < PAGES; i++)
		c.block.tags[i] = kv_tag_make(50 + i, KV_TAG_LIVE);
	KVT_EXPECT_EQ(kvk_host_ops()->tag_check(&c.a, NULL), 0);
	KVT_EXPECT_EQ(c.verdicts[0].bits, KV_BAD_GEN);
	KVT_EXPECT_EQ(c.verdicts[1].bits, 0);
	KVT_EXPECT_EQ(c.mirror.head.position, c.block.head.log_to);
	KVT_EXPECT_EQ(c.mirror.tags[2], kv_tag_make(90, KV_TAG_LIVE));
	KVT_EXPECT_EQ(c.mirror.tags[63], kv_tag_make(113, KV_TAG_LIVE));
}

KVT_TEST(check_of_a_request_without_rows)
{
	struct check c;

	check_init(&c);
	c.row_start[1] = c.row_start[2] =
		0; /* requests 0 and 1 have none; 2 has six rows */
	c.row_start[3] = 6;
	c.lengths[0] = 0;
	c.lengths[1] = 1;
	KVT_EXPECT_EQ(kvk_host_ops()->tag_check(&c.a, NULL), 0);
	KVT_EXPECT(kv_verdict_ok(c.verdicts[0], 4711, 0));
	KVT_EXPECT_EQ(c.verdicts[1].bits, KV_BAD_LENGTH);
	KVT_EXPECT_EQ(c.verdicts[2].bits, KV_BAD_HASH);
	KVT_EXPECT_EQ(c.verdicts[2].rows_checked, 6);
	c.a.mirror = NULL;
	KVT_EXPECT_EQ(kvk_host_ops()->tag_check(&c.a, NULL), -EINVAL);
}

KVT_MAIN()
