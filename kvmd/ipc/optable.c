/* SPDX-License-Identifier: Apache-2.0 */
/* ipc/optable.c - see optable.h; handlers: op_page.c, op_prefix.c, op_misc.c. (tour 4/12) */
#include "kvmd/ipc/optable.h"

#include <errno.h>

#include "base/assert.h"
#include "base/mutant.h"
#include "kvmd/ipc/ops.h"

#define PAGE_TOKENS_BYTES (KV_PAGE_TOKENS * sizeof(u32))

static const struct kvd_op optable[KV_OP_NR] = {
	[KV_OP_NOP] =
		{
			.name = "nop",
			.flags = KVD_OP_MONITOR,
			.start = kvd_op_nop,
		},
	[KV_OP_ALLOC] =
		{
			.name = "alloc",
			.flags = KVD_OP_POOL | KVD_OP_GFP | KVD_OP_MAGAZINE,
			.nr_min = 1,
			.nr_max = KV_BATCH_MAX,
			.ret_each = sizeof(struct kv_grant),
			.start = kvd_op_alloc,
			.step = kvd_op_alloc_again,
		},
	[KV_OP_FREE] =
		{
			.name = "free",
			.flags = KVD_OP_POOL,
			.nr_min = 1,
			.nr_max = KV_BATCH_MAX,
			.arg_each = sizeof(struct kv_page_ref),
			.start = kvd_op_free,
		},
	[KV_OP_SEAL] =
		{
			.name = "seal",
			.flags = KVD_OP_POOL | KVD_OP_HASH,
			.nr_min = 1,
			.nr_max = KV_BATCH_MAX,
			.arg_fixed = sizeof(struct kv_seal_arg),
			.arg_each = sizeof(struct kv_seal_page) + PAGE_TOKENS_BYTES,
			.ret_each = sizeof(struct kv_seal_ret),
			.start = kvd_op_seal,
			.step = kvd_op_seal_again,
		},
	[KV_OP_LOOKUP] =
		{
			.name = "lookup",
			.flags = KVD_OP_POOL | KVD_OP_SOME | KVD_OP_LATE | KVD_OP_HASH,
			.nr_max = KV_LOOKUP_MAX,
			.arg_fixed = sizeof(struct kv_lookup_arg),
			.arg_each = sizeof(u32),
			.ret_each = sizeof(struct kv_hit),
			.start = kvd_op_lookup,
			.step = kvd_op_lookup_again,
		},
	[KV_OP_PIN] =
		{
			.name = "pin",
			.flags = KVD_OP_POOL,
			.nr_min = 1,
			.nr_max = KV_BATCH_MAX,
			.arg_each = sizeof(struct kv_page_ref),
			.start = kvd_op_pin,
		},
	[KV_OP_UNPIN] =
		{
			.name = "unpin",
			.flags = KVD_OP_POOL,
			.nr_min = 1,
			.nr_max = KV_BATCH_MAX,
			.arg_each = sizeof(struct kv_page_ref),
			.start = kvd_op_free,
		},
	[KV_OP_FORK] =
		{
			.name = "fork",
			.flags = KVD_OP_POOL | KVD_OP_GFP,
			.nr_min = 1,
			.nr_max = KV_BATCH_MAX,
			.arg_each = sizeof(struct kv_page_ref),
			.ret_each = sizeof(struct kv_grant),
			.start = kvd_op_fork,
			.step = kvd_op_fork_again,
		},
	[KV_OP_REPORT] =
		{
			.name = "report",
			.flags = KVD_OP_POOL,
			.nr_max = 1,
			.arg_fixed = sizeof(struct kv_incident),
			.start = kvd_op_report,
		},
	[KV_OP_STAT] =
		{
			.name = "stat",
			.flags = KVD_OP_POOL | KVD_OP_MONITOR,
			.nr_max = 1,
			.ret_fixed = sizeof(struct kv_stat),
			.start = kvd_op_stat,
		},
	[KV_OP_UNMAPPED] =
		{
			.name = "unmapped",
			.flags = KVD_OP_POOL | KVD_OP_MONITOR,
			.nr_max = 1,
			.arg_fixed = sizeof(struct kv_extent_ref),
			.start = kvd_op_unmapped,
		},
	[KV_OP_PREFETCH] =
		{
			.name = "prefetch",
			.flags = KVD_OP_POOL | KVD_OP_SOME | KVD_OP_HASH,
			.nr_max = KV_LOOKUP_MAX,
			.arg_fixed = sizeof(struct kv_lookup_arg),
			.arg_each = sizeof(u32),
			.start = kvd_op_prefetch,
			.step = kvd_op_prefetch_again,
		},
};

const struct kvd_op *kvd_op_row(u32 opcode)
{
	if (KV_MUTANT(any_opcode))
		opcode %= KV_OP_NR;
	return opcode < KV_OP_NR ? &optable[opcode] : NULL;
}

void kvd_optable_check(void)
{
	u32 i;

	for (i = 0; i < KV_OP_NR; i++) {
		const struct kvd_op *op = &optable[i];

		kv_assert(op->name && op->start);
		kv_assert(op->nr_min <= op->nr_max);
		/* The largest legal arguments must fit a ring's argument area. */
		kv_assert(op->arg_fixed + (u64)op->nr_max * op->arg_each <= KV_ARG_BYTES);
		kv_assert(op->ret_fixed + (u64)op->nr_max * op->ret_each <=
			  KV_ARG_BYTES * 2);
	}
}

static int reserved_check(const struct kv_sqe *sqe)
{
	u32 i;

	if (sqe->flags & ~KV_SQE_FLAGS)
		return -EINVAL;
	for (i = 0; i < KV_ARRAY_SIZE(sqe->reserved); i++)
		if (sqe->reserved[i])
			return -EINVAL;
	return 0;
}

static bool room_ok(const struct kv_sqe *sqe, const struct kvd_op *op)
{
	u64 need = op->ret_fixed + (u64)sqe->nr * op->ret_each;

	/* LOOKUP's nr counts tokens; its hits are bounded by the room instead. */
	if ((op->flags & KVD_OP_SOME) || (sqe->flags & KV_SQE_MAGAZINE))
		return true;
	return sqe->ret_bytes >= need;
}

int kvd_op_check(const struct kv_sqe *sqe, bool monitor, const struct kvd_op **ret_op)
{
	const struct kvd_op *op = kvd_op_row(sqe->opcode);
	bool stock = sqe->flags & KV_SQE_MAGAZINE;

	if (!op)
		return -EOPNOTSUPP;
	if (reserved_check(sqe))
		return -EINVAL;
	if (monitor && !(op->flags & KVD_OP_MONITOR))
		return -EACCES;
	if (stock && !(op->flags & KVD_OP_MAGAZINE))
		return -EINVAL;
	if (sqe->magazine >= (stock ? KV_MAGAZINES : 1))
		return -EINVAL;
	if (sqe->gfp & ~(op->flags & KVD_OP_GFP ? KV_GFP_VALID : 0u))
		return -EINVAL;
	if (sqe->nr < op->nr_min || sqe->nr > op->nr_max)
		return -EINVAL;
	if (stock && sqe->nr > KV_MAGAZINE_SLOTS)
		return -EINVAL;
	if (sqe->arg_bytes != op->arg_fixed + (u64)sqe->nr * op->arg_each)
		return -EINVAL;
	if (!room_ok(sqe, op))
		return -ENOSPC;
	*ret_op = op;
	return 0;
}
