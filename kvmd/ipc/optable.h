/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ipc/optable.h - one row per ring operation: name, what its entry may say, handler,
 * counters. (tour 4/12) kvd_optable_check() asserts at boot that no opcode lacks a row.
 * kvd_op_check() applies a row's rules to a copied entry before any handler sees it.
 */
#ifndef KVD_IPC_OPTABLE_H
#define KVD_IPC_OPTABLE_H

#include <stdbool.h>

#include "base/util.h"
#include "kv/abi.h"
#include "kvmd/dbg/stats.h"

struct kvd_request;

#define KVD_OP_POOL	0x01u /* names an open pool */
#define KVD_OP_GFP	0x02u /* gfp means something; else it must be 0 */
#define KVD_OP_MAGAZINE 0x04u /* KV_SQE_MAGAZINE is allowed */
#define KVD_OP_MONITOR	0x08u /* allowed to KV_ROLE_MONITOR */
#define KVD_OP_SOME	0x10u /* room for one result is enough (LOOKUP) */
#define KVD_OP_LATE	0x20u /* what follows arg_fixed is copied by the steps, once */
#define KVD_OP_HASH	0x40u /* goes on the hash queue */

/**
 * struct kvd_op - a row
 * @name: as kvmctl and the trace print it
 * @flags: KVD_OP_*
 * @nr_min, @nr_max: bounds of kv_sqe.nr
 * @arg_fixed, @arg_each: arg_bytes must be arg_fixed + nr * arg_each
 * @ret_fixed, @ret_each: ret_bytes must be at least ret_fixed + nr * ret_each
 * @start: arguments are in request->args. Return: KVD_REQUEST_AGAIN: @step is called in
 *	later turns; KVD_REQUEST_PARK: @step is called when pages are free; else the result
 * @step: NULL: @start always finishes
 */
struct kvd_op {
	const char *name;
	u32 flags;
	u32 nr_min;
	u32 nr_max;
	u32 arg_fixed;
	u32 arg_each;
	u32 ret_fixed;
	u32 ret_each;
	int (*start)(struct kvd_request *req);
	int (*step)(struct kvd_request *req);
};

/** struct kvd_op_stats - counters of one opcode */
struct kvd_op_stats {
	u64 calls;
	u64 results[KV_OUTCOME_NR]; /* by outcome; [0] = done */
	u64 errors;
	struct kvd_hist time;
};

/** kvd_op_row() - the row of an opcode, or NULL */
const struct kvd_op *kvd_op_row(u32 opcode);

/** kvd_optable_check() - every opcode below KV_OP_NR has a complete row; asserts */
void kvd_optable_check(void);

/**
 * kvd_op_check() - are a copied entry's fields what its row allows?
 * @sqe: private copy
 * @monitor: the session is a KV_ROLE_MONITOR
 * @ret_op: the row
 *
 * Return: 0; -EOPNOTSUPP no such operation; -EACCES not for monitors; -EINVAL a field;
 *	-ENOSPC ret_bytes.
 */
int kvd_op_check(const struct kv_sqe *sqe, bool monitor, const struct kvd_op **ret_op);

#endif
