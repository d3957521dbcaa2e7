/* SPDX-License-Identifier: Apache-2.0 */
/* The operation table: no holes, and each rule of a row refuses what breaks it. */
#include "kvmd/ipc/optable.h"

#include "kvmd/ipc/request.h"
#include "tests/kvt.h"

static struct kv_sqe good(u32 opcode, u32 nr)
{
	const struct kvd_op *op = kvd_op_row(opcode);
	struct kv_sqe sqe;

	memset(&sqe, 0, sizeof(sqe));
	sqe.opcode = (u8)opcode;
	sqe.nr = nr;
	sqe.arg_bytes = op->arg_fixed + nr * op->arg_each;
	sqe.ret_bytes = op->ret_fixed + nr * op->ret_each;
	return sqe;
}

static int check(struct kv_sqe sqe)
{
	const struct kvd_op *op = NULL;
	int r = kvd_op_check(&sqe, false, &op);

	if (!r)
		KVT_EXPECT(op == kvd_op_row(sqe.opcode));
	return r;
}

KVT_TEST(no_opcode_lacks_a_row)
{
	u32 i, k;

	kvd_optable_check();
	for (i = 0; i < KV_OP_NR; i++) {
		KVT_EXPECT(kvd_op_row(i)->name && kvd_op_row(i)->start);
		for (k = 0; k < i; k++)
			KVT_EXPECT(strcmp(kvd_op_row(i)->name, kvd_op_row(k)->name));
		/* Arguments and results of the largest request fit the private buffers.
		 */
		KVT_EXPECT(kvd_op_row(i)->arg_fixed +
				   (u64)kvd_op_row(i)->nr_max * kvd_op_row(i)->arg_each <=
			   KVD_REQUEST_ARG_BYTES);
		if (!(kvd_op_row(i)->flags & KVD_OP_SOME))
			KVT_EXPECT(kvd_op_row(i)->ret_fixed +
					   (u64)kvd_op_row(i)->nr_max *
						   kvd_op_row(i)->ret_each <=
				   KVD_REQUEST_RET_BYTES);
	}
	KVT_EXPECT(!kvd_op_row(KV_OP_NR));
}

KVT_TEST(good_entries_pass)
{
	u32 i;

	for (i = 0; i < KV_OP_NR; i++) {
		KVT_EXPECT_EQ(check(good(i, kvd_op_row(i)->nr_min)), 0);
		KVT_EXPECT_EQ(check(good(i, kvd_op_row(i)->nr_max)), 0);
	}
}

KVT_TEST(o50_unknown_operation_is_not_supported)
{
	struct kv_sqe sqe = good(KV_OP_NOP, 0);
	u32 i;

	for (i = KV_OP_NR; i < 256; i++) {
		sqe.opcode = (u8)i;
		KVT_EXPECT_EQ(check(sqe), -EOPNOTSUPP);
	}
}

KVT_TEST(each_rule_refuses_what_breaks_it)
{
	struct kv_sqe sqe;
	u32 i, k;

	for (i = 0; i < KV_OP_NR; i++) {
		const struct kvd_op *op = kvd_op_row(i);
		u32 nr = op->nr_max;

		for (k = 0; k < KV_ARRAY_SIZE(sqe.reserved); k++) {
			sqe = good(i, nr);
			sqe.reserved[k] = 1u << (k * 7);
			KVT_EXPECT_EQ(check(sqe), -EINVAL);
		}
		for (k = 1; k < 8; k++) {
			sqe = good(i, nr);
			sqe.flags = (u8)(1u << k);
			KVT_EXPECT_EQ(check(sqe), -EINVAL);
		}
		sqe = good(i, nr);
		sqe.nr = nr + 1;
		KVT_EXPECT_EQ(check(sqe), -EINVAL);
		sqe.nr = 0xffffffff;
		KVT_EXPECT_EQ(check(sqe), -EINVAL);
		if (op->nr_min) {
			sqe = good(i, 0);
			KVT_EXPECT_EQ(check(sqe), -EINVAL);
		}
		sqe = good(i, nr);
		sqe.arg_bytes++;
		KVT_EXPECT_EQ(check(sqe), -EINVAL);
		sqe = good(i, nr);
		sqe.magazine = 1;
		KVT_EXPECT_EQ(check(sqe), -EINVAL);
		sqe = good(i, nr);
		sqe.gfp = KV_GFP_WAIT;
		KVT_EXPECT_EQ(check(sqe), op->flags & KVD_OP_GFP ? 0 : -EINVAL);
		sqe.gfp = 0x10;
		KVT_EXPECT_EQ(check(sqe), -EINVAL);
		if (op->ret_fixed + op->ret_each && !(op->flags & KVD_OP_SOME)) {
			sqe = good(i, nr);
			sqe.ret_bytes--;
			KVT_EXPECT_EQ(check(sqe), -ENOSPC);
		}
	}
}

/* arg_fixed + nr * arg_each must not wrap to a small number. */
KVT_TEST(sizes_do_not_wrap)
{
	struct kv_sqe sqe = good(KV_OP_SEAL, 1);

	sqe.nr = 0x0f000f01;
	sqe.arg_bytes = (u32)(32 + sqe.nr * 272u);
	KVT_EXPECT_EQ(check(sqe), -EINVAL);
}

KVT_TEST(magazine_stock)
{
	struct kv_sqe sqe = good(KV_OP_ALLOC, KV_MAGAZINE_SLOTS);

	sqe.flags = KV_SQE_MAGAZINE;
	sqe.ret_bytes = 0;
	sqe.magazine = KV_MAGAZINES - 1;
	KVT_EXPECT_EQ(check(sqe), 0);
	sqe.magazine = KV_MAGAZINES;
	KVT_EXPECT_EQ(check(sqe), -EINVAL);
	sqe.magazine = 0;
	sqe.nr = KV_MAGAZINE_SLOTS + 1;
	KVT_EXPECT_EQ(check(sqe), -EINVAL);
	sqe = good(KV_OP_FREE, 1);
	sqe.flags = KV_SQE_MAGAZINE;
	KVT_EXPECT_EQ(check(sqe), -EINVAL);
}

KVT_TEST(monitor_may_only_look)
{
	const struct kvd_op *op;
	struct kv_sqe sqe;
	u32 i, allowed = 0;

	for (i = 0; i < KV_OP_NR; i++) {
		sqe = good(i, kvd_op_row(i)->nr_min);
		if (kvd_op_check(&sqe, true, &op) == 0)
			allowed |= 1u << i;
		else
			KVT_EXPECT_EQ(kvd_op_check(&sqe, true, &op), -EACCES);
	}
	KVT_EXPECT_EQ(allowed, 1u << KV_OP_NOP | 1u << KV_OP_STAT | 1u << KV_OP_UNMAPPED);
}

KVT_MAIN()
