/* SPDX-License-Identifier: Apache-2.0 */
/* Rows, the host check, check modes: design 5, P4 and P5. */
#include "tests/unit/client/common.h"

#include <sys/socket.h>

#define NONCE 4711u
#define ROWS  5u

static struct fake fake;
static struct kvc *c;
static struct kvc_pool *pool;
static struct kv_grant pages[16];
static struct kv_row rows[16];

static void start(u32 mode)
{
	fake.check_mode = mode;
	fake_start(&fake);
	c = fake_connect(&fake, 1000);
	pool = fake_pool(&fake, c);
	KVT_EXPECT_EQ(kvc_alloc(pool, 16, KV_GFP_NOWAIT, pages), 0);
	for (u32 i = 0; i < 16; i++)
		rows[i] = kv_row_make(pages[i].pfn, pages[i].tag, 0, NONCE, i);
}

static void stop(void)
{
	kvc_close(c);
	fake_stop(&fake);
}

static struct kv_verdict check(u32 nr_rows, u32 length)
{
	struct kvc_check_request q = {
		.rows = rows, .nonce = NONCE, .nr_rows = nr_rows, .length = length};
	struct kvc_step *step;
	struct kv_verdict v;

	memset(&v, 0xee, sizeof(v));
	KVT_EXPECT_EQ(kvc_step_begin(c, &step), 0);
	KVT_EXPECT_EQ(kvc_step_check(step, pool, &q, 1, &v), 0);
	KVT_EXPECT_EQ(v.step, kvc_step_number(step));
	kvc_step_retire(step);
	return v;
}

KVT_TEST(good_rows_pass)
{
	start(KV_CHECK_BATCH);
	for (u32 i = 0; i < 3; i++) {
		struct kv_verdict v = check(ROWS, ROWS * KV_PAGE_TOKENS);

		KVT_EXPECT_EQ(v.bits, 0);
		KVT_EXPECT_EQ(v.rows_checked, ROWS);
	}
	stop();
}

KVT_TEST(each_kind_of_bad_row_has_its_bit)
{
	struct kv_row good = {0};

	start(KV_CHECK_BATCH);
	good = rows[3];
	rows[3].pfn = FAKE_PAGES;
	KVT_EXPECT_EQ(check(ROWS, 1).bits, KV_BAD_PFN);
	rows[3] = kv_row_make(good.pfn, good.expected, 0, NONCE + 1, 3);
	KVT_EXPECT_EQ(check(ROWS, 1).bits, KV_BAD_HASH);
	rows[3] = good;
	rows[3].expected += 1ull << KV_TAG_GEN_SHIFT;
	KVT_EXPECT_EQ(check(ROWS, 1).bits, KV_BAD_GEN);
	rows[3] = good;
	KVT_EXPECT_EQ(check(ROWS, ROWS * KV_PAGE_TOKENS + 1).bits, KV_BAD_LENGTH);
	fake_log(&fake, good.pfn, good.expected | KV_TAG_SEALED);
	KVT_EXPECT_EQ(check(ROWS, 1).bits,
		      0); /* reading a sealed page is what it is for */
	rows[3].flags |= KV_ROW_WRITE;
	KVT_EXPECT_EQ(check(ROWS, 1).bits, KV_BAD_SEALED);
	fake_kill(&fake, good.pfn);
	rows[3] = good;
	KVT_EXPECT_EQ(check(ROWS, 1).bits, KV_BAD_GEN | KV_BAD_DEAD);
	stop();
}

/* Swapped inside one request, too: a row knows its place. */
KVT_TEST(swapped_rows_fail)
{
	struct kv_row tmp;

	start(KV_CHECK_BATCH);
	tmp = rows[1];
	rows[1] = rows[4];
	rows[4] = tmp;
	KVT_EXPECT_EQ(check(ROWS, 1).bits, KV_BAD_HASH);
	stop();
}

KVT_TEST(only_the_bad_request_fails)
{
	struct kvc_check_request q[3];
	struct kvc_step *step;
	struct kv_verdict v[3];
	struct kv_row more[3][4];

	start(KV_CHECK_BATCH);
	for (u32 i = 0; i < 3; i++) {
		for (u32 k = 0; k < 4; k++)
			more[i][k] = kv_row_make(pages[i * 4 + k].pfn,
						 pages[i * 4 + k].tag, 0, i, k);
		q[i] = (struct kvc_check_request){
			.rows = more[i], .nonce = i, .nr_rows = 4, .length = 256};
	}
	fake_kill(&fake, pages[6].pfn);
	fake_give(&fake, pages[6].pfn);
	KVT_EXPECT_EQ(kvc_step_begin(c, &step), 0);
	KVT_EXPECT_EQ(kvc_step_check(step, pool, q, 3, v), 0);
	KVT_EXPECT(kv_verdict_ok(v[0], kvc_step_number(step), 4));
	KVT_EXPECT_EQ(v[1].bits, KV_BAD_GEN);
	KVT_EXPECT(kv_verdict_ok(v[2], kvc_step_number(step), 4));
	kvc_step_retire(step);
	stop();
}

KVT_TEST(request_without_rows_passes_with_length_0)
{
	struct kv_verdict v;

	start(KV_CHECK_BATCH);
	v = check(0, 0);
	KVT_EXPECT_EQ(v.bits, 0);
	KVT_EXPECT_EQ(v.rows_checked, 0);
	KVT_EXPECT_EQ(check(0, 1).bits, KV_BAD_LENGTH);
	stop();
}

/* Two steps may check in any order: the mirror never goes back. */
KVT_TEST(older_step_checked_later_sees_newer_words)
{
	struct kvc_check_request q = {
		.rows = rows, .nonce = NONCE, .nr_rows = 1, .length = 1};
	struct kvc_step *a, *b;
	struct kv_verdict v;

	start(KV_CHECK_BATCH);
	KVT_EXPECT_EQ(kvc_step_begin(c, &a), 0);
	KVT_EXPECT_EQ(kvc_step_begin(c, &b), 0);
	fake_kill(&fake, pages[0].pfn);
	KVT_EXPECT_EQ(kvc_step_check(b, pool, &q, 1, &v), 0);
	KVT_EXPECT(v.bits & KV_BAD_DEAD);
	KVT_EXPECT_EQ(kvc_step_check(a, pool, &q, 1, &v), 0);
	KVT_EXPECT(v.bits & KV_BAD_DEAD);
	KVT_EXPECT_EQ(v.step, kvc_step_number(a));
	kvc_step_retire(a);
	kvc_step_retire(b);
	stop();
}

/* More log than the ring holds between two checks: the full table, and the right answer.
 */
KVT_TEST(check_survives_a_log_that_ran_over)
{
	start(KV_CHECK_BATCH);
	KVT_EXPECT_EQ(check(ROWS, 1).bits, 0);
	for (u32 i = 0; i < KV_LOG_ENTRIES + 10; i++)
		fake_give(&fake, 500 + i % 8);
	KVT_EXPECT_EQ(check(ROWS, 1).bits, 0);
	fake_kill(&fake, pages[2].pfn);
	for (u32 i = 0; i < KV_LOG_ENTRIES + 10; i++)
		fake_give(&fake, 500 + i % 8);
	KVT_EXPECT_EQ(check(ROWS, 1).bits, KV_BAD_GEN | KV_BAD_DEAD);
	stop();
}

KVT_TEST(off_looks_at_nothing_but_announces)
{
	struct kvc_check_request q = {
		.rows = rows, .nonce = 1, .nr_rows = 3, .length = 9999};
	struct kvc_step *step;
	struct kv_verdict v;
	struct kvc_info info;

	start(KV_CHECK_OFF);
	kvc_info(c, &info);
	KVT_EXPECT_EQ(info.check_mode, KV_CHECK_OFF);
	fake_kill(&fake, pages[0].pfn);
	KVT_EXPECT_EQ(kvc_step_begin(c, &step), 0);
	KVT_EXPECT_EQ(fake.session->slots[0].word, 5);
	KVT_EXPECT_EQ(kvc_step_check(step, pool, &q, 1, &v), 0);
	KVT_EXPECT(kv_verdict_ok(v, kvc_step_number(step), 3));
	kvc_step_retire(step);
	stop();
}

KVT_TEST(strict_reports_rows_that_changed_under_the_step)
{
	struct kvc_check_request q = {
		.rows = rows, .nonce = NONCE, .nr_rows = 4, .length = 9};
	struct kvc_step *step;
	struct kv_verdict v;
	struct kv_row kept;

	start(KV_CHECK_STRICT);
	kept = rows[2];
	KVT_EXPECT_EQ(check(4, 9).bits, 0);
	KVT_EXPECT_EQ(kvc_step_begin(c, &step), 0);
	KVT_EXPECT_EQ(kvc_step_check(step, pool, &q, 1, &v), 0);
	KVT_EXPECT(kv_verdict_ok(v, kvc_step_number(step), 4));
	rows[2] = rows[3];
	kvc_step_retire(step);
	rows[2] = kept;
	expect_within(fake.served[KV_OP_REPORT] == 1, 1000);
	/* a page that dies during the step is no incident */
	KVT_EXPECT_EQ(kvc_step_begin(c, &step), 0);
	KVT_EXPECT_EQ(kvc_step_check(step, pool, &q, 1, &v), 0);
	fake_kill(&fake, pages[1].pfn);
	KVT_EXPECT(check(4, 9).bits & KV_BAD_DEAD); /* another step moves the mirror */
	kvc_step_retire(step);
	usleep(20000);
	KVT_EXPECT_EQ(fake.served[KV_OP_REPORT], 1);
	stop();
}

/* A step of before a restart brings the mirror back to the old table: what a newer step has
 * checked is not compared with that. */
KVT_TEST(strict_compares_within_one_table)
{
	struct kvc_check_request q = {
		.rows = rows, .nonce = NONCE, .nr_rows = 4, .length = 9};
	struct kvc_step *older, *newer;
	struct kv_row now[4];
	struct kv_grant g[4];
	struct kv_verdict v;

	start(KV_CHECK_STRICT);
	KVT_EXPECT_EQ(kvc_step_begin(c, &older), 0);
	shutdown(fake.sock, SHUT_RDWR);
	expect_within(fake.sock < 0, 1000);
	fake.table_epoch++;
	KVT_EXPECT_EQ(kvc_alloc(pool, 4, KV_GFP_NOWAIT, g), 0);
	for (u32 i = 0; i < 4; i++)
		now[i] = kv_row_make(g[i].pfn, g[i].tag, 0, NONCE, i);
	KVT_EXPECT_EQ(kvc_step_begin(c, &newer), 0);
	q.rows = now;
	KVT_EXPECT_EQ(kvc_step_check(newer, pool, &q, 1, &v), 0);
	KVT_EXPECT(kv_verdict_ok(v, kvc_step_number(newer), 4));
	q.rows = rows;
	KVT_EXPECT_EQ(kvc_step_check(older, pool, &q, 1, &v), 0);
	KVT_EXPECT(kv_verdict_ok(v, kvc_step_number(older), 4));
	kvc_step_retire(newer);
	kvc_step_retire(older);
	KVT_EXPECT_EQ(kvc_alloc(pool, 4, KV_GFP_NOWAIT, g), 0); /* after any report */
	KVT_EXPECT_EQ(fake.served[KV_OP_REPORT], 0);
	stop();
}

/* ------------------------------------------------------------------- kvc_step_rows */

KVT_TEST(second_write_row_is_refused)
{
	struct kvc_step *step, *other;
	struct kv_row w[3];

	start(KV_CHECK_BATCH);
	for (u32 i = 0; i < 3; i++)
		w[i] = kv_row_make(pages[i % 2].pfn, pages[i % 2].tag, KV_ROW_WRITE,
				   NONCE, i);
	KVT_EXPECT_EQ(kvc_step_begin(c, &step), 0);
	KVT_EXPECT_EQ(kvc_step_rows(step, pool, w, 2), 0);
	KVT_EXPECT_EQ(kvc_step_rows(step, pool, w + 2, 1), -EEXIST);
	KVT_EXPECT_HAS(kvc_strerror(c), "rows[0].pfn=0");
	/* readers may share it, another step may write it */
	w[2].flags &= ~KV_ROW_WRITE;
	KVT_EXPECT_EQ(kvc_step_rows(step, pool, w + 2, 1), 0);
	KVT_EXPECT_EQ(kvc_step_begin(c, &other), 0);
	KVT_EXPECT_EQ(kvc_step_rows(other, pool, w, 2), 0);
	kvc_step_retire(other);
	kvc_step_retire(step);
	KVT_EXPECT_EQ(kvc_step_begin(c, &step), 0);
	KVT_EXPECT_EQ(kvc_step_rows(step, pool, w, 2), 0);
	kvc_step_retire(step);
	stop();
}

KVT_TEST(refused_rows_leave_no_mark)
{
	struct kvc_step *step;
	struct kv_row w[3];

	start(KV_CHECK_BATCH);
	for (u32 i = 0; i < 3; i++)
		w[i] = kv_row_make(pages[i % 2].pfn, pages[i % 2].tag, KV_ROW_WRITE,
				   NONCE, i);
	KVT_EXPECT_EQ(kvc_step_begin(c, &step), 0);
	KVT_EXPECT_EQ(kvc_step_rows(step, pool, w, 3), -EEXIST);
	KVT_EXPECT_EQ(kvc_step_rows(step, pool, w, 2), 0);
	w[0].pfn = FAKE_PAGES;
	KVT_EXPECT_EQ(kvc_step_rows(step, pool, w, 1), -EINVAL);
	KVT_EXPECT_HAS(kvc_strerror(c), "rows[0].pfn=1024");
	kvc_step_retire(step);
	stop();
}

KVT_MAIN()
